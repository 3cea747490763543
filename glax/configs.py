"""Export the configs of the kernels, for `cfg`, overlays and tuning.

>>> q = jnp.ones((1, 8, 2, 4))
>>> glax.recurrent(q, q, q, cfg=glax.configs.ChunkedConfig(chunk=64)).output.shape
(1, 8, 2, 4)

Each class belongs to one or more kernels in `glax.kernel_registry`. It loads at its first use, without Triton or an
accelerator. `NAMES` maps a name here to its kernel.
"""

from glax._src.core.registry import Config, kernel_registry
from glax._src.kernels import load_kernels

NAMES = {
    "ChunkedConfig": "chunked/xla/any",
    "NativeConfig": "recurrent/cpp/cpu",
    "TritonChunkedConfig": "chunked/triton/gpu",
    "GradientConfig": "chunked.vjp/triton/gpu",
    "TokenConfig": "recurrent/triton/gpu",
    "TritonReplayConfig": "recurrent.replay/triton/gpu",
    "CudaConfig": "recurrent/cuda/gpu",
    "ReplayConfig": "recurrent.replay/cuda/gpu",
    "HopperConfig": "chunked/pallas/gpu",
    "TPUChunkedConfig": "chunked/pallas/tpu",
    "TPUGradientConfig": "chunked.vjp/pallas/tpu",
    "TPUPoolConfig": "recurrent.step/pallas/tpu",
}
__all__ = [*NAMES]  # pyright: ignore[reportUnsupportedDunderAll]  (the names come from __getattr__)


def __getattr__(name: str) -> type[Config]:
    """Return the config class of that name. Raises AttributeError if there is none."""
    if name not in NAMES:
        raise AttributeError(f"module 'glax.configs' has no attribute {name!r}, only {', '.join(NAMES)}")
    load_kernels()
    return kernel_registry.kernels[NAMES[name]].config


def __dir__() -> list[str]:
    return sorted([*globals(), *NAMES])
