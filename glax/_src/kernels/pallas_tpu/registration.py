"""Kernels in Pallas for TPUs, v5e and newer: one program walks a sequence with the state in VMEM.

docs/performance.md has the estimates.

Registered here, they are written in `forward` and `gradient`, which load Pallas when one of them runs.
"""

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig, TPUGradientConfig, priority, supports


@kernel_registry.register(
    "chunked", Platform.PALLAS, Backend.TPU, config=TPUChunkedConfig, supports=supports, priority=priority
)
def chunked(r: Recurrence, *, config: TPUChunkedConfig) -> Outputs:
    """The recurrence in chunks; q, k, v and gates are read once, the output is written once."""
    from glax._src.kernels.pallas_tpu import forward

    return forward.chunked(r, config=config)


@kernel_registry.register(
    "chunked.vjp", Platform.PALLAS, Backend.TPU, config=TPUGradientConfig, supports=supports, priority=priority
)
def chunked_vjp(r: Recurrence, d_output, d_final, *, config: TPUGradientConfig) -> Recurrence:
    """The gradient in every input of r: a walk forwards for the states, one backwards for everything else."""
    from glax._src.kernels.pallas_tpu import vjp

    return vjp.chunked_vjp(r, d_output, d_final, config=config)
