"""Define the tolerances of docs/numerics.md, and compare a kernel's results with the reference by them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.recurrence import Outputs, Recurrence

# Relative RMS error of (output and state, gradients), by the dtype of q, k and v.
BARS = {"float64": (1e-13, 1e-12), "float32": (1e-5, 5e-5), "bfloat16": (3.5e-3, 3.5e-3), "float16": (1e-3, 1e-3)}
# The same for recurrences that erase: a state is multiplied by I - beta k k^T once more at every token.
ERASING_BARS = BARS | {"float64": (1e-12, 1e-11), "float32": (2e-5, 1e-4)}
# The gradients of g_gamma and softmax_scale are single sums over all of T, with cancellation: factors of their bars.
SUMS = {"constant": 10, "scale": 10}
# The factor of all bars in float32 where gates of -100 or -inf stand among mild ones.
EXTREME_GATES = 10


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Hold the comparison of one array with the reference. `reason` states why it is not within `bar`, and is None where it is.

    error: ‖got - want‖ / ‖want‖; None if the array has another shape or dtype, values that are not finite, or filled padding.
    """

    name: str
    bar: float
    error: float | None = None
    reason: str | None = None


def compare(name: str, got, want, bar: float, dtype=None) -> Comparison:
    """Compare arrays. `reason` is None if ‖got - want‖ <= bar * ‖want‖, every value is finite, and shape and dtype are as
    expected. Norms are 2-norms over all elements.

    dtype: the expected dtype, or None for any. Numbers below the least normal float32 number count as equal.
    """
    want = np.asarray(want, np.float64)
    if got.shape != want.shape or (dtype is not None and got.dtype != dtype):
        expected = f"{'' if dtype is None else dtype}{list(want.shape)}"
        return Comparison(name, bar, reason=f"{name} is {got.dtype}{list(got.shape)}, expected {expected}")
    got = np.asarray(got).astype(np.float64)
    if (wrong := np.count_nonzero(~np.isfinite(got))) > 0:
        return Comparison(name, bar, reason=f"{wrong} of {got.size} values of {name} are not finite")
    floor = float(np.finfo(np.float32).tiny) * want.size**0.5
    distance, size = norm(got - want), norm(want)
    error = distance / (size + floor) if want.size else 0.0
    within = distance <= bar * size + floor
    return Comparison(name, bar, error, None if within else f"{name} is off by {error:.1e}, bar {bar:.1e}")


def compare_outputs(r: Recurrence, got: Outputs, want: Outputs, extreme: bool = False) -> list[Comparison]:
    """Compare the output and the final state of a kernel, `got`, with the reference's, `want`. Padding of the output must be 0.

    extreme: whether some gates are -100 or -inf.
    """
    output = compare_output(r, got.output, want.output, extreme)
    return [output, compare("final_state", got.final_state, want.final_state, output.bar, r.dtype)]


def compare_output(r: Recurrence, got, want, extreme: bool = False) -> Comparison:
    """Compare the output of a kernel, `got`, with the reference's, `want`. Its padding must be 0. extreme: as in
    `compare_outputs`."""
    bar = bars_of(r)[str(r.q.dtype)][0] * widened(r, extreme)
    return with_clear_padding(compare("output", got, want, bar, r.q.dtype), r, got)


def compare_gradients(r: Recurrence, got: Recurrence, want: Recurrence, extreme: bool = False) -> list[Comparison]:
    """Compare the gradient in every array of r. Padding rows must be 0, and each gradient has the dtype of its array."""
    arrays, wanted, inputs = named(got), named(want), named(r)
    if arrays.keys() != wanted.keys():
        reason = f"returns the gradients of {', '.join(arrays)}, expected {', '.join(wanted)}"
        return [Comparison("gradient", bars_of(r)[str(r.q.dtype)][1], reason=reason)]
    compared = []
    for name, x in arrays.items():
        # The gradient of a bfloat16 gate is rounded to bfloat16.
        bar = max(bars_of(r)[str(dtype)][1] for dtype in (r.q.dtype, inputs[name].dtype))
        bar *= widened(r, extreme) * SUMS.get(name, 1)
        comparison = compare(f"d {name}", x, wanted[name], bar, inputs[name].dtype)
        by_token = x.ndim > 2 and name != "initial_state"
        compared.append(with_clear_padding(comparison, r, x) if by_token else comparison)
    return compared


def bars_of(r: Recurrence) -> dict[str, tuple[float, float]]:
    """Return the bars for r, {dtype: (of outputs and states, of gradients)}: wider ones with an erasure."""
    return BARS if r.erasure is None else ERASING_BARS


def widened(r: Recurrence, extreme: bool) -> int:
    """Return the factor of the bars of r: EXTREME_GATES for float32 with extreme gates, else 1."""
    return EXTREME_GATES if extreme and r.q.dtype == jnp.float32 else 1


def with_clear_padding(comparison: Comparison, r: Recurrence, x) -> Comparison:
    """Return the comparison, or a miss if x [B, T, ...] is not 0 in a padding row."""
    x, filled = np.asarray(x), False
    if r.boundaries is not None:
        filled = x[:, int(r.boundaries[-1]) :].any()
    elif r.segments is not None and r.segments.is_token is not None:
        filled = x[~np.asarray(r.segments.is_token)].any()
    if comparison.error is not None and filled:
        return dataclasses.replace(comparison, error=None, reason=f"padding rows of {comparison.name} are not 0")
    return comparison


def named(r: Recurrence) -> dict[str, jax.Array]:
    """Return the float arrays of a recurrence, or of a gradient that has this form, by name."""
    arrays: dict[str, Any] = vars(r) | vars(r.decay) | ({} if r.erasure is None else r.erasure.arrays)
    return {name: x for name, x in arrays.items() if hasattr(x, "dtype") and name != "boundaries"}


def norm(x: np.ndarray) -> float:
    """Return ‖x‖, computed in one thread. NumPy's BLAS threads would wait for cores that others use."""
    return float(np.sqrt(np.square(x).sum()))
