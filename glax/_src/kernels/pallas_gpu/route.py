"""Choose the route of a call: how its rows are read, which kernels run, and why no faster form does."""

import dataclasses

from glax._src.core.recurrence import Recurrence, Residuals
from glax._src.kernels.pallas_gpu.config import HopperConfig, Widths, group_size, pairs_heads
from glax._src.kernels.pallas_gpu.plan import BLOCK, ROWS
from glax._src.kernels.pallas_gpu.rows import Form, Reading, fits_one_row, takes_segments, why_not_joined


@dataclasses.dataclass(frozen=True)
class Route:
    """Hold how the kernels of a call are launched: rows, kernels and config. `describe` returns the route as text.

    rows: how sequences are read. scan, gradient: the functions that launch the kernels. Profiles show the same names, except
    that `delta_scan` and `delta_key_scan` are launched under the names of their results, such as `delta_outputs`. config: the
    config that runs, which has one segment if `rows` allows no more. reasons: each faster form that the call does not take, and
    why. widths: the blocks of states. square: the blocks of states for a gradient that needs them square.
    """

    rows: Reading
    scan: str
    gradient: str
    config: HopperConfig
    reasons: dict[str, str]
    widths: Widths
    square: Widths

    @classmethod
    def of(
        cls,
        r: Recurrence,
        config: HopperConfig,
        d_final=None,
        residuals: Residuals | None = None,
        in_phases: bool = False,
    ) -> "Route":
        """Return the route of the forward of r, or of its gradient with d_final and residuals.

        in_phases: whether the kernel runs in two phases. Raises ValueError if the config divides packed sequences into segments
        although each begins a chunk.
        """
        rows = Reading.of(r, config.parts, d_final, residuals, in_phases)
        widths, square = Widths.of(r, square=False), Widths.of(r, square=True)
        if rows.form is Form.EQUAL or (rows.form is Form.APART and fits_one_row(r)):
            config = dataclasses.replace(config, parts=1) if config.parts > 1 else config
        elif rows.form is Form.APART and config.parts > 1:
            raise ValueError(
                f"parts must be 1 for packed sequences with states, each of which begins a chunk; got {config.parts}: "
                "pass cfg=HopperConfig(parts=1), or leave out cfg"
            )
        reasons = {**one_row_reason(r, rows), **copies_reason(r, rows, widths), **results_reason(r, rows)}
        scan, gradient = scan_kernel(r, config, widths), gradient_kernel(r, rows, widths, square)
        return cls(rows, scan, gradient, config, reasons, widths, square)

    def in_one_segment(self, form: Form) -> "Route":
        """Return this route with rows read in the given form, and each sequence in one segment."""
        return dataclasses.replace(self, rows=Reading(form), config=dataclasses.replace(self.config, parts=1))

    def describe(self, is_gradient: bool) -> str:
        """Return the text that `glax.explain` prints, for the gradient if `is_gradient`, else for the forward."""
        kernels = f"{self.scan}, then {self.gradient}" if is_gradient else self.scan
        segments = f"{self.config.parts} segments of a row" if self.config.parts > 1 else "whole rows"
        return f"{kernels}; {self.rows}; {segments}"


def scan_kernel(r: Recurrence, config: HopperConfig, widths: Widths) -> str:
    """Return the name of the function that launches the scan which forms the outputs. widths: those of the forward."""
    if r.erasure is not None:
        return "delta_key_scan" if r.decay.key is not None else "delta_scan"
    if r.decay.key is not None:
        return "key_scan"
    is_paired = config.columns == 128 and r.states_every is None and pairs_heads(r, widths)
    return "pair_scan" if is_paired else "head_scan"


def gradient_kernel(r: Recurrence, rows: Reading, widths: Widths, square: Widths) -> str:
    """Return the name of the kernel that computes the gradients of chunks. widths: those of the forward. square: the widths in
    square blocks, for a gradient that needs them.

    `gradient_wide` takes states of several blocks of columns, and only if each row holds one sequence.
    """
    if r.erasure is not None:
        if r.decay.key is not None:
            return "delta_key_gradient"
        return "delta_gradient" if max(widths.K, widths.V) <= BLOCK else "delta_gradient_wide"
    if r.decay.key is None:
        return "gradient_groups" if is_grouped(r, widths) else "gradient_head"
    is_wide = square.blocks.columns > 1 and square.K == BLOCK and r.boundaries is None and rows.form is not Form.EQUAL
    return "gradient_wide" if is_wide else "gradient_key"


def is_grouped(r: Recurrence, widths: Widths) -> bool:
    """Return whether one program computes the gradient of all heads that share a query and a key. widths: those of the forward.

    It is so for gates other than per-key, and keys of one block, if heads share queries and keys or if all blocks of values
    together are narrower than a block of keys. This function does not check the gates.
    """
    is_narrow = widths.V * widths.blocks.columns < widths.K
    return widths.stored.rows == 1 and (is_narrow or group_size(r) > 1)


# ---- why not faster --------------------------------------------------------------------------------------------------


def one_row_reason(r: Recurrence, rows: Reading) -> dict[str, str]:
    """Return {form: reason} if packed sequences are not read in place as one row, else {}."""
    if rows.form is not Form.APART:
        return {}
    begins_chunk = "so each sequence begins a chunk"
    if r.decay.key is not None and r.erasure is not None:
        why = f"with beta and per-key gates, the kernels have no marks for boundaries, {begins_chunk}, and the rows are copied"
    elif r.decay.key is not None and not takes_segments(r):
        why = f"with per-key gates, keys of at most 64 channels have no marks for boundaries, {begins_chunk}"
    else:
        states = "initial states enter" if r.initial_state is not None else "the gradient of final states enters"
        copied = "the results" if r.decay.key is not None else "the rows"
        why = f"{states} at boundaries, {begins_chunk}, and {copied} are copied"
    return {"packed sequences as one row": why}


def copies_reason(r: Recurrence, rows: Reading, widths: Widths) -> dict[str, str]:
    """Return {form: reason} if q, k, v, gates and the output are copied to wider or longer arrays, else {}."""
    (_, T, _, K), V = r.q.shape, r.v.shape[3]
    in_place = rows.copies_last or rows.form in (Form.JOINED, Form.EQUAL)
    of_keys, of_values = widths.in_memory
    sizes = (("T", T, 1 if in_place else ROWS), ("key (K)", K, of_keys), ("value (V)", V, of_values))
    why = [f"{block} does not divide {name}={size}" for name, size, block in sizes if size % block]
    if not why:
        return {}
    said = f"{', '.join(why)}, so they are copied and filled up"
    if rows.form is Form.FILLED:
        said += f"; sequences are not joined: {why_not_joined(r) or 'the gradient of final states enters'}"
    return {"arrays as they are given": said}


def results_reason(r: Recurrence, rows: Reading) -> dict[str, str]:
    """Return {form: reason} if results are cut from longer arrays although the operands are read in place, else {}."""
    B, T = r.q.shape[:2]
    if rows.form is Form.EQUAL:
        why = f"{ROWS} does not divide T={T}, so sequences are read as packed ones, and their results are gathered"
        return {"results in arrays of T tokens": why}
    if not rows.copies_last:
        return {}
    why = f"{ROWS} does not divide {B * T} tokens, so they are cut from longer arrays"
    return {"results in arrays of T tokens": why}
