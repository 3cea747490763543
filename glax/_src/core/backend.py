"""Predict the backend that kernels are chosen for.

The backend is a prediction while a program is traced, and is known while the program is lowered.
"""

import enum
from typing import Any

import jax

# JAX's name of the platform that a program is being lowered for; None while tracing. It is part of jit's cache key, so that no
# trace made for one platform is used for another.
lowering_platform = jax.make_user_context(None)

# Whether the sequences of a batch have to be computed apart, because the compiler may spread them over devices, or because each
# has a scale of its own. Kernels may else join neighbours. It is part of jit's cache key, too.
sequences_apart = jax.make_user_context(False)


class Backend(enum.StrEnum):
    """Name the kind of device that a kernel runs on: `cpu`, `gpu` (of NVIDIA, by CUDA), `tpu`, or `any` for every device.

    GPUs of AMD, which JAX drives by ROCm, run the kernels of `any` alone. A member is a str. Backend(name) raises ValueError for
    another name.

    >>> glax.Backend("cpu") is glax.Backend.CPU
    True
    """

    CPU = enum.auto()
    GPU = enum.auto()
    TPU = enum.auto()
    ANY = enum.auto()

    @classmethod
    def here(cls) -> "Backend":
        """Return the backend that kernels are chosen for at this place of a program.

        While a program is lowered, this is the backend of the lowering's platform. While a program is traced, it is a
        prediction: the backend of the devices of the current mesh; without a mesh, of jax.default_device; if that is not set,
        of JAX's default backend.
        """
        return cls.of(target_platform())

    @classmethod
    def of(cls, platform: str) -> "Backend":
        """Return the backend of one of JAX's platforms: "cpu", "gpu", "cuda" or "tpu", in any case. Another platform gives ANY:
        only kernels of backend ANY run there."""
        names = dict(cpu=cls.CPU, gpu=cls.GPU, cuda=cls.GPU, tpu=cls.TPU)
        return names.get(platform.lower(), cls.ANY)


def target_platform() -> str:
    """Return JAX's name of the platform that kernels are chosen for, such as "cpu", "gpu", "cuda", "rocm" or "tpu".

    While a program is lowered, this is the platform of the lowering. While a program is traced, it is the platform of the
    mesh's devices, else of jax.default_device, else of the default backend. `solve.lowering` chooses again where the prediction
    was wrong.
    """
    if lowering_platform.value is not None:
        return lowering_platform.value
    if (device := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return vendor_platform(device.platform)
    if (chosen := jax_option("jax_default_device")) is not None:
        return vendor_platform(chosen if isinstance(chosen, str) else chosen.platform)
    return vendor_platform(jax.default_backend())


def vendor_platform(platform: str) -> str:
    """Return `platform`, a name of JAX, unchanged, except that "gpu" becomes "rocm" where this process has GPUs of AMD.

    JAX names the GPUs of every vendor "gpu".
    """
    if platform != "gpu":
        return platform
    try:
        (device, *_) = jax.local_devices(backend="gpu")
    except RuntimeError:  # none is here: the program is for another machine, by CUDA
        return platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else platform


def x64_is_enabled() -> bool:
    """Return whether 64-bit dtypes are enabled, as JAX's configuration says at this place of the program."""
    return jax_option("jax_enable_x64")


def jax_option(name: str) -> Any:
    """Return the value of an option of JAX, as the current context sets it.

    JAX adds its options while it is imported, so type checkers do not know them.
    """
    return getattr(jax.config, name)


def computes_on() -> str:
    """Return a phrase for the texts of refusals that names the target platform, such as "JAX computes on cpu here"."""
    lowered = lowering_platform.value is not None
    return f"the program is lowered for {target_platform()}" if lowered else f"JAX computes on {target_platform()} here"


def local_device() -> jax.Device | None:  # pyright: ignore[reportInvalidTypeForm]  (JAX 0.10 has no stub of it)
    """Return a device of this process on the target platform. Return None if the process has none, as when it compiles for
    another machine."""
    name = target_platform()
    if name == jax.default_backend():
        return jax.local_devices()[0]
    try:
        return jax.local_devices(backend=name)[0]
    except RuntimeError:  # JAX raises it for a platform that it does not have here
        return None
