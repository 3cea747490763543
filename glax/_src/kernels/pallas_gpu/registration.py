"""Register kernels for Hopper GPUs in Pallas Mosaic GPU. They need neither Triton nor a compiler beside JAX.

`chunked`, or `delta` and `delta_key` for the delta rule, launches them, and loads Pallas when one of them runs.
docs/internals/experiments/hopper.md has the figures.
"""

from glax._src.core.decay import ROW_FORMS
from glax._src.core.recurrence import Outputs, Recurrence, Residuals
from glax._src.core.registry import Backend, Platform, TwoPhase, kernel_registry
from glax._src.kernels.pallas_gpu.config import (
    WIDEST,
    HopperConfig,
    Widths,
    copies_last_chunk,
    grouped,
    in_one_row,
    joined_number,
    packs,
    stores_states,
    supports,
    takes_segments,
    why_not_joined,
)
from glax._src.kernels.pallas_gpu.plan import ROWS

# Above Triton's 10 or below it, and above XLA's: benchmarks/results/nvidia_h100/2026-11-27-platforms.json has the measurements,
# and tests/unit/test_priorities.py holds these rules to them.
FASTER, SLOWER = 15, 5


def forward_priority(r: Recurrence) -> int:
    """Return a priority above Triton's, or below it where narrow heads are copied to much wider blocks (`copies_much`)."""
    return SLOWER if copies_much(r, square=False) else FASTER


def gradient_priority(r: Recurrence) -> int:
    """Return a priority above Triton's, or below it where narrow heads are copied to much wider blocks (`copies_much`)."""
    return SLOWER if copies_much(r, square=True) else FASTER


def copies_much(r: Recurrence, square: bool) -> bool:
    """Return whether, in a large call, the blocks of the kernels hold at least 1.5 times as much as the states need.

    In larger calls 1.25 times is enough, where keys fit in one block. The result is False for the delta rule, which is faster
    here all the same. square: whether the gradient's blocks are meant.
    """
    if r.erasure is not None:
        return False
    B, T, _, K = r.q.shape
    widths, rows = Widths.of(r, square and not grouped(r)), B * T * r.num_heads
    filled = widths.blocks.rows * widths.K * widths.blocks.columns * widths.V / (K * r.v.shape[3])
    return (filled >= 1.5 and rows >= 2**14) or (filled >= 1.25 and K <= WIDEST and rows >= 2**16)


def in_two_phases(r: Recurrence, config: HopperConfig) -> bool:
    """Return whether sequences are cut into segments whose states are computed first, at the same widths in both phases.

    Packed sequences are not, because they have no segments of their own.
    """
    return (
        r.boundaries is None
        and r.erasure is None
        and config.parts > 1
        and Widths.of(r, square=True) == Widths.of(r, square=False)
    )


def forward_two_phase(r: Recurrence, config: HopperConfig) -> TwoPhase | None:
    """Return the two phases of the forward, or None if sequences are not cut into segments."""
    if not in_two_phases(r, config):
        return None
    from glax._src.kernels.pallas_gpu import chunked as launch

    return TwoPhase(launch.begin, launch.finish, launch.finish_with_residuals)


def gradient_two_phase(r: Recurrence, config: HopperConfig) -> TwoPhase | None:
    """Return the two phases of the gradient, or None if sequences are not cut into segments."""
    if not in_two_phases(r, config):
        return None
    from glax._src.kernels.pallas_gpu import chunked as launch

    return TwoPhase(launch.begin_vjp, launch.finish_vjp)


def forgoes_one_row(r: Recurrence, d_output=None, d_final=None, residuals=None) -> dict[str, str]:
    """Return why packed sequences are not read in place as one row, or nothing if they are."""
    if r.boundaries is None or (in_one_row(r) and d_final is None):
        return {}
    if r.decay.form == "key" and r.erasure is not None:
        why = "with beta and per-key gates, the kernels have no marks for boundaries, so each sequence begins a chunk"
        return {"packed sequences as one row": f"{why}, and the rows are copied"}
    if r.decay.form == "key" and not takes_segments(r):
        why = "with per-key gates, keys of at most 64 channels have no marks for boundaries, so each sequence begins a chunk"
        return {"packed sequences as one row": why}
    states = "initial states enter" if r.initial_state is not None else "the gradient of final states enters"
    copied = "the results" if r.decay.form == "key" else "the rows"
    why = f"{states} at boundaries, so each sequence begins a chunk, and {copied} are copied"
    return {"packed sequences as one row": why}


def forgoes_arrays_as_given(r: Recurrence, config: HopperConfig, d_final=None) -> dict[str, str]:
    """Return why q, k, v, gates and the output are copied to wider or longer arrays, or nothing if they are not."""
    widths, (_, T, _, K), V = Widths.of(r, square=False), r.q.shape, r.v.shape[3]
    in_place = (joined_number(r) > 1 and d_final is None) or copies_last_chunk(r) or packs(r, config)
    sizes = (("T", T, 1 if in_place else ROWS), ("key (K)", K, widths.K), ("value (V)", V, widths.V))
    why = [f"{block} does not divide {name}={size}" for name, size, block in sizes if size % block]
    if not why:
        return {}
    said = f"{', '.join(why)}, so they are copied and filled up"
    if T % ROWS and not in_place and r.boundaries is None:
        said += f"; sequences are not joined: {why_not_joined(r) or 'the gradient of final states enters'}"
    return {"arrays as they are given": said}


def forgoes_results_as_given(r: Recurrence, config: HopperConfig, d_final=None) -> dict[str, str]:
    """Return why results are cut from longer arrays although the operands are read in place, or nothing if they are not."""
    B, T = r.q.shape[:2]
    if packs(r, config):
        why = f"{ROWS} does not divide T={T}, so sequences are read as packed ones, and their results are gathered"
        return {"results in arrays of T tokens": why}
    is_row = copies_last_chunk(r) or (joined_number(r) == B > 1 and d_final is None)
    if not is_row or B * T % ROWS == 0:
        return {}
    return {
        "results in arrays of T tokens": f"{ROWS} does not divide {B * T} tokens, so they are cut from longer arrays"
    }


def forgoes(r: Recurrence, d_output=None, d_final=None, residuals=None, *, config: HopperConfig) -> dict[str, str]:
    """Return what the kernels could do for other calls, each with the reason why not for this one with this config."""
    return (
        forgoes_one_row(r, d_output, d_final, residuals)
        | forgoes_arrays_as_given(r, config, d_final)
        | forgoes_results_as_given(r, config, d_final)
    )


def omits_d_final(r: Recurrence) -> bool:
    """Return whether the gradient takes None for a d_final of zeros, which it then neither writes nor reads.

    `delta_key.chunked_vjp` takes None too. That is not used, because no GPU has run it.
    """
    return in_one_row(r) or joined_number(r) > 1 or (r.erasure is not None and r.decay.form != "key")


def launcher(r: Recurrence):
    """Return the module that launches the kernels of r."""
    if r.erasure is None:
        from glax._src.kernels.pallas_gpu import chunked as found
    elif r.decay.form == "key":
        from glax._src.kernels.pallas_gpu import delta_key as found
    else:
        from glax._src.kernels.pallas_gpu import delta as found
    return found


def isolate(run, r: Recurrence, *given):
    """Return run(r, *given), in which nothing that is not finite passes from one sequence or segment to another."""
    from glax._src.kernels.pallas_gpu.isolation import isolated

    return isolated(run, r, *given)


def chunked_with_residuals(r: Recurrence, *, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Compute `chunked` and the states at its chunks, which the gradient would otherwise compute again."""
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
    forgoes=forgoes,
    forms=ROW_FORMS,
    erases=True,
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
    forgoes=forgoes,
    forms=ROW_FORMS,
    erases=True,
    takes_segments=takes_segments,
    isolate=isolate,
)
def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig
) -> Recurrence:
    """Compute the gradient of every input from the states at both ends of each chunk."""
    from glax._src.kernels.pallas_gpu.device.cache import recording

    with recording(r):
        return launcher(r).chunked_vjp(r, d_output, d_final, residuals, config)
