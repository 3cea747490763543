"""How close is close: relative RMS against float64, with the bars of docs/numerics.md."""

import dataclasses

import jax
import numpy as np

from glax._src.core.recurrence import Recurrence

# (output and state, gradients), by the dtype of q, k and v.
BARS = {"float64": (1e-13, 1e-12), "float32": (1e-5, 5e-5), "bfloat16": (3.5e-3, 3.5e-3), "float16": (1e-3, 1e-3)}
# The gradients of g_gamma and softmax_scale are single sums over all of T, with cancellation.
SUMS = {"constant": 10, "scale": 10}
EXTREME_GATES = 10  # float32, gates of -100 among mild ones


def assert_close(name: str, got, want, bar: float):
    """‖got - want‖ <= bar * ‖want‖, and every value finite. Below the least normal float32, all numbers are equal."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name} has {np.count_nonzero(~np.isfinite(got))} values that are not finite"
    error, size = norm(got - want), norm(want)
    floor = np.finfo(np.float32).tiny * np.sqrt(want.size)
    assert error <= bar * size + floor, f"{name} is off by {error / (size + floor):.1e}, bar {bar:.1e}"


def norm(x: np.ndarray) -> float:
    """Of a vector of any length in one thread: NumPy's own is BLAS's, whose threads wait for a core that other tests have."""
    return float(np.sqrt(np.square(x).sum()))


def assert_outputs_close(r: Recurrence, got, want, extreme: bool = False):
    bar = BARS[str(r.q.dtype)][0] * (EXTREME_GATES if extreme and r.q.dtype == np.float32 else 1)
    assert got.output.dtype == r.q.dtype
    assert got.final_state.dtype == r.dtype
    assert_close("output", got.output, want.output, bar)
    assert_close("final_state", got.final_state, want.final_state, bar)
    assert not np.asarray(got.output)[:, padding(r)].any(), "padding rows of output are not 0"


def assert_gradients_close(r: Recurrence, got: Recurrence, want: Recurrence, extreme: bool = False):
    got, want, inputs = named(got), named(want), named(r)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == inputs[name].dtype, f"d {name} has dtype {x.dtype}"
        bar = max(BARS[str(dtype)][1] for dtype in (r.q.dtype, x.dtype))  # a bfloat16 gate's gradient rounds to it
        bar *= (EXTREME_GATES if extreme and r.q.dtype == np.float32 else 1) * SUMS.get(name, 1)
        assert_close(f"d {name}", x, want[name], bar)
        if x.ndim > 2 and name != "initial_state":
            assert not np.asarray(x)[:, padding(r)].any(), f"padding rows of d {name} are not 0"


def named(r: Recurrence) -> dict[str, jax.Array]:
    """The float arrays of r by name."""
    fields = {field.name: getattr(r, field.name) for field in dataclasses.fields(r)}
    fields |= {field.name: getattr(r.decay, field.name) for field in dataclasses.fields(r.decay)}
    return {name: x for name, x in fields.items() if hasattr(x, "dtype") and name != "boundaries"}


def padding(r: Recurrence) -> slice:
    T = r.q.shape[1]
    return slice(T if r.boundaries is None else int(r.boundaries[-1]), T)
