"""Kernels for Hopper GPUs in Pallas Mosaic GPU: no Triton and no compiler beside JAX. docs/hopper.md has the figures.

Registered here, they are written in `launch`, which loads Pallas when one of them runs.
"""

from glax.kernels.pallas_gpu.config import HopperConfig, gradient_supports, supports
from glax.recurrence import Outputs, Recurrence
from glax.registry import Backend, Platform, kernel_registry


# Fewer tokens than these have not been measured beside the Triton kernels; from here on these kernels are faster.
MEASURED_FROM = 1024


def priority(r: Recurrence) -> int:
    """Above Triton's where measured faster (docs/hopper.md), else between Triton's and XLA's."""
    return 15 if r.q.shape[1] >= MEASURED_FROM else 5


@kernel_registry.register(
    "chunked", Platform.PALLAS, Backend.GPU, config=HopperConfig, supports=supports, priority=priority
)
def chunked(r: Recurrence, *, config: HopperConfig) -> Outputs:
    """The recurrence in chunks; q, k, v and gates are read once, the output is written once, the state stays on chip."""
    from glax.kernels.pallas_gpu import launch

    return launch.chunked(r, config)


@kernel_registry.register(
    "chunked.vjp",
    Platform.PALLAS,
    Backend.GPU,
    config=HopperConfig,
    supports=gradient_supports,
    priority=priority,
)
def chunked_vjp(r: Recurrence, d_output, d_final, *, config: HopperConfig) -> Recurrence:
    """The gradient in every input from the states at both ends of each chunk."""
    from glax.kernels.pallas_gpu import launch

    return launch.chunked_vjp(r, d_output, d_final, config)
