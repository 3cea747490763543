"""Kernels for Hopper GPUs in Pallas Mosaic GPU: no Triton and no compiler beside JAX. docs/hopper.md has the figures.

Registered here, they are written in `launch`, which loads Pallas when one of them runs.
"""

from glax.kernels.pallas_gpu.config import HopperConfig, gradient_supports, supports
from glax.recurrence import Outputs, Recurrence
from glax.registry import Backend, Platform, kernel_registry


def forward_priority(r: Recurrence) -> int:
    """One gate a head: above XLA's and below Triton's, being measured faster but not yet through `glax check` on a GPU.

    Gates a key channel, only for those who ask: q e^M, k e^-M, scores and state each round to bfloat16 once, 3.3e-3 to
    3.5e-3 in all, at the bar of 3.5e-3 and sometimes past it.
    """
    return 5 if r.decay.key is None else -1


def gradient_priority(r: Recurrence) -> int:
    """Below all: only for those who ask for it, until the whole of it has run on a GPU."""
    return -1


@kernel_registry.register(
    "chunked", Platform.PALLAS, Backend.GPU, config=HopperConfig, supports=supports, priority=forward_priority
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
    priority=gradient_priority,
)
def chunked_vjp(r: Recurrence, d_output, d_final, *, config: HopperConfig) -> Recurrence:
    """The gradient in every input from the states at both ends of each chunk."""
    from glax.kernels.pallas_gpu import launch

    return launch.chunked_vjp(r, d_output, d_final, config)
