"""Name the custom calls of glax's kernels to jax.export."""

import jax.export

from glax._src.kernels.cpu.library import TARGETS
from glax._src.kernels.cuda.library import TARGET

# jax-triton's call, by its two names, and Pallas Mosaic GPU's.
OF_COMPILERS = ("triton_kernel_call", "triton_kernel_call_ffi", "mosaic_gpu_v2")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return what jax.export has to be given as `disabled_checks` to export a program that calls glax: a list, an entry for each
    custom call of glax's kernels.

    jax.export refuses every custom call whose format JAX does not promise to read later, and the kernels for CPUs and GPUs are
    such calls. An exported program therefore needs the version of glax that exported it, and on GPUs also those of JAX and
    Triton. Programs of XLA's kernels (platform="xla") need no exemption.

        exported = jax.export.export(jax.jit(f), disabled_checks=glax.export_checks())(*shapes)

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> f = jax.jit(lambda q: glax.recurrent(q, q, q).output)
    >>> exported = jax.export.export(f, disabled_checks=glax.export_checks())(q)
    """
    targets = (*TARGETS, TARGET, *OF_COMPILERS)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
