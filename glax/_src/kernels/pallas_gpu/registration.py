"""Register kernels for Hopper GPUs in Pallas Mosaic GPU. They need neither Triton nor a compiler beside JAX.

`plain`, or `delta` for the delta rule, launches them, and loads Pallas when one of them runs.
docs/internals/experiments/hopper/host.md has the figures.
"""

from glax._src.core.decay import ROW_FORMS
from glax._src.core.recurrence import Outputs, Recurrence, Residuals
from glax._src.core.registry import Backend, Platform, TwoPhase, kernel_registry
from glax._src.kernels.pallas_gpu.config import HopperConfig, Widths, stores_states, supports
from glax._src.kernels.pallas_gpu.plan import BLOCK
from glax._src.kernels.pallas_gpu.route import Route, is_grouped
from glax._src.kernels.pallas_gpu.rows import Reading, takes_segments

# Above Triton's 10 or below it, and above XLA's: benchmarks/results/nvidia_h100/2026-11-27-platforms.json has the measurements,
# and tests/unit/test_priorities.py holds these rules to them.
FASTER, SLOWER = 15, 5


def forward_priority(r: Recurrence) -> int:
    """Return the priority of the forward: above Triton's, or below it where narrow heads are copied to much wider blocks
    (`copies_much`)."""
    return SLOWER if copies_much(r, square=False) else FASTER


def gradient_priority(r: Recurrence) -> int:
    """Return the priority of the gradient: above Triton's, or below it where narrow heads are copied to much wider blocks
    (`copies_much`)."""
    return SLOWER if copies_much(r, square=True) else FASTER


def copies_much(r: Recurrence, square: bool) -> bool:
    """Return whether the call is large and its kernels' blocks have many more elements than its states: at least 1.5 times as
    many.

    In still larger calls 1.25 times is enough, where keys fit in one block. The result is False for the delta rule, for which
    these kernels are faster all the same. square: whether the gradient's blocks are meant.
    """
    if r.erasure is not None:
        return False
    B, T, _, K = r.q.shape
    widths, rows = Widths.of(r, square=False), B * T * r.num_heads
    if square and (r.decay.key is not None or not is_grouped(r, widths)):
        widths = Widths.of(r, square=True)
    filled = widths.blocks.rows * widths.K * widths.blocks.columns * widths.V / (K * r.v.shape[3])
    return (filled >= 1.5 and rows >= 2**14) or (filled >= 1.25 and K <= BLOCK and rows >= 2**16)


def in_two_phases(r: Recurrence, config: HopperConfig) -> bool:
    """Return whether a call runs in two phases: its sequences are cut into segments, whose states are computed first, at the
    same widths in both phases.

    The result is False for packed sequences, which have no segments of their own, and for the delta rule.
    """
    return (
        r.boundaries is None
        and r.erasure is None
        and config.parts > 1
        and Widths.of(r, square=True) == Widths.of(r, square=False)
    )


def forward_two_phase(r: Recurrence, config: HopperConfig) -> TwoPhase | None:
    """Return the two phases of the forward, or None if `in_two_phases` is False."""
    if not in_two_phases(r, config):
        return None
    from glax._src.kernels.pallas_gpu import plain as launch

    return TwoPhase(launch.begin, launch.finish, launch.finish_with_residuals)


def gradient_two_phase(r: Recurrence, config: HopperConfig) -> TwoPhase | None:
    """Return the two phases of the gradient, or None if `in_two_phases` is False."""
    if not in_two_phases(r, config):
        return None
    from glax._src.kernels.pallas_gpu import plain as launch

    return TwoPhase(launch.begin_vjp, launch.finish_vjp)


def forward_route(r: Recurrence, *, config: HopperConfig) -> tuple[str, dict[str, str]]:
    """Return (the route of the forward with this config as text, the reasons as a dict). The dict has the reason for each
    faster form that the route does not take."""
    route = Route.of(r, config)
    return route.describe(is_gradient=False), route.reasons


def gradient_route(
    r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig
) -> tuple[str, dict[str, str]]:
    """Return (the route of the gradient with this config as text, the reasons as a dict). The dict has the reason for each
    faster form that the route does not take. d_output: not used."""
    route = Route.of(r, config, d_final, residuals)
    return route.describe(is_gradient=True), route.reasons


def omits_d_final(r: Recurrence) -> bool:
    """Return whether the gradient of r takes None for a d_final of zeros. The zeros are then neither written nor read.

    The delta rule with per-key gates takes None too, but the result is False for it, because no GPU has run that.
    """
    return Reading.of(r).shares_rows or (r.erasure is not None and r.decay.key is None)


def launcher(r: Recurrence):
    """Return the module that launches the kernels of r: `delta` if r has an erasure, else `plain`."""
    if r.erasure is None:
        from glax._src.kernels.pallas_gpu import plain as module
    else:
        from glax._src.kernels.pallas_gpu import delta as module
    return module


def isolate(run, r: Recurrence, *given):
    """Return run(r, *given), in which no NaN or inf passes from one sequence or segment to another. run: a forward or a
    gradient; given: the arguments of the gradient other than r."""
    from glax._src.kernels.pallas_gpu.isolation import isolated

    return isolated(run, r, *given)


def chunked_with_residuals(r: Recurrence, *, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Compute the outputs and final states in chunks, and the residuals: the states at chunks, which the gradient would
    otherwise compute again."""
    from glax._src.kernels.pallas_gpu.device.cache import recording

    with recording(r):
        return launcher(r).chunked_with_residuals(r, config)


@kernel_registry.register(
    "chunked",
    Platform.PALLAS,
    Backend.GPU,
    config=HopperConfig,
    supports=supports,
    priority=forward_priority,
    two_phase=forward_two_phase,
    forward_with_residuals=chunked_with_residuals,
    route=forward_route,
    forms=ROW_FORMS,
    erases=True,
    erases_before_decay=True,
    stores_states=stores_states,
    takes_segments=takes_segments,
    isolate=isolate,
)
def chunked(r: Recurrence, *, config: HopperConfig) -> Outputs:
    """Compute the recurrence in chunks. q, k, v and gates are read once, the output is written once, and the state stays on
    chip."""
    from glax._src.kernels.pallas_gpu.device.cache import recording

    with recording(r):
        return launcher(r).chunked(r, config)


@kernel_registry.register(
    "chunked.vjp",
    Platform.PALLAS,
    Backend.GPU,
    config=HopperConfig,
    supports=supports,
    priority=gradient_priority,
    two_phase=gradient_two_phase,
    omits_d_final=omits_d_final,
    stores_states=stores_states,
    route=gradient_route,
    forms=ROW_FORMS,
    erases=True,
    erases_before_decay=True,
    takes_segments=takes_segments,
    isolate=isolate,
)
def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig
) -> Recurrence:
    """Compute the gradient of every input of r from the states at both ends of each chunk. d_output: [B, T, H, V]. d_final: [N,
    H, K, V], or None for zeros. residuals: what the forward saved, or None."""
    from glax._src.kernels.pallas_gpu.device.cache import recording

    with recording(r):
        return launcher(r).chunked_vjp(r, d_output, d_final, residuals, config)
