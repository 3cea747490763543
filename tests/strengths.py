"""Strengths of gates on both sides of every limit at which a kernel changes its form, from one list of limits.

A strength is a text, as `glax.testing.cases.gate` reads it; equal gates at every token make each limit one strength. `problem`
puts those about the fast form of one chunk size side by side: one call for all. A check bounds the sum of gates over half a
chunk, so strengths follow from the number of tokens there.
"""

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.common.limits import FAST_LIMIT, LOG_OF_ZERO
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import BARS, SUMS, named

LEAST_NORMAL = 87.3  # e^-87.3 is the least normal number of float32
LEAST = 103.97  # e^-103.97 rounds to the least number of float32, or to 0
# Sums of log decays at which a kernel changes its form, or float32 loses what a state holds; and the numbers of tokens over which
# a kernel forms such a sum. Of equal gates, each quotient is a strength at which one run-time check changes its answer.
LIMITS = (
    (FAST_LIMIT, (16, 32, 64, 128)),  # half a chunk of 32 to 256: the fast form; a whole one with gates on both sides
    (2.0, (1,)),  # XLA's form of many chunks: as many as a chunk has tokens, in half of it
    (40.0, (1, 12, 24, 48)),  # a block of the native kernels
    (20.0, (1, 24)),  # the same with gates on both sides, and of a block's first token
    (LEAST_NORMAL, (16, 32, 64, 128)),  # from middle to middle of chunks
    (LEAST, (1, 16, 32, 64, 128)),
    (-LOG_OF_ZERO, (1,)),  # a gate is cut there
)
# Sums over half a chunk; between two middles lies twice as much. They are on both sides of the two limits of float32, between
# these, and up to the limit of the fast form. e^-86 is a normal float32, e^-88 a subnormal one, e^-105 and e^-120 are 0.
NORMAL, SUBNORMAL, TINY, ZERO = (round(x + off) / 2 for x in (LEAST_NORMAL, LEAST) for off in (-1, 1))
BAND = NORMAL, SUBNORMAL, 48.0, TINY, ZERO, 56.0, FAST_LIMIT
CANCELLED = 2e-6  # of q dq: what float32 sums leave in a gate's gradient, where parts of that size cancel
EACH = 3  # times a tensor's bar: what one channel may be off, of which there are few numbers
LEARNED = ("log-sigmoid", "log-sigmoid of -0.8")  # means of -0.8 and -1.27


def steady(chunk: int | None = None, step: float = 0.1, sides: int = 1) -> tuple[str, ...]:
    """Strengths of equal gates: 0.3 to 7 in steps, and inside and outside of every limit, or of those for one size of chunks.

    The distances from a limit are those of neighbours in float32 sums, and in bfloat16. Left out are decays of e^-75 to e^-104,
    all gates of a token together: the gradient of log decays is then less than 1e5 of the least normal number, of which float32
    has no five digits.
    """
    tokens = None if chunk is None else (1, chunk // 2, chunk)
    limits = {s / n for s, counts in LIMITS for n in counts if tokens is None or n in tokens}
    near = {limit * factor for limit in limits for factor in (0.99, 0.9999, 1.0001, 1.01)}
    strengths = near | set(np.arange(0.3, 7 + step / 2, step).round(3))
    return tuple(f"-{x:.7g}" for x in sorted(strengths) if not 75 < sides * x < 104)


def in_one(strengths: tuple[str, ...]) -> tuple[str, ...]:
    """The same strengths in one channel or head among mild ones."""
    return tuple(f"{strength} in one" for strength in strengths)


def band(chunk: int) -> tuple[str, ...]:
    """The few of `steady` from where a decay between middles underflows to where a half passes the limit, for slow kernels."""
    limits = LEAST_NORMAL / chunk, FAST_LIMIT / (chunk // 2)
    return tuple(s for s in steady(chunk) if 0.9 * limits[0] < -float(s) < 1.1 * limits[1])


def gates(form: str, half: int, T: int, K: int, rng: np.random.Generator) -> np.ndarray:
    """Log gates in float64, [T, H, K] for "key", [H] else. half: tokens in half a chunk.

    Key gates: every channel within the limits, every channel in the band, one channel just outside of it among others up to the
    cut, and log_sigmoid of N(-0.8, 1), whose sums between middles lie about -81.
    """
    band = np.interp(np.linspace(0, 1, K), np.linspace(0, 1, len(BAND)), BAND) / half
    outside = (1 + 2**-7) * FAST_LIMIT / half
    beyond = [0.3, 7.0, -LOG_OF_ZERO - 1, -LOG_OF_ZERO + 1, 1000.0]
    if form != "key":
        return -np.array([0.3, BAND[1] / half, FAST_LIMIT / half, outside, *beyond[1:]])
    inside = np.linspace(0.3, FAST_LIMIT / half, K)
    strong = np.array([*beyond, *np.linspace(0.3, FAST_LIMIT / half, K - 6), outside])
    learned = np.log1p(np.exp(-rng.normal(-0.8, 1, (T, K))))
    return -np.stack([np.broadcast_to(x, (T, K)) for x in (inside, band, strong, learned)], 1)


def problem(form: str, half: int, T: int, K: int, dtype="bfloat16", gate_dtype=None, reverse=False):
    """A recurrence with these gates, and the cotangents of its results."""
    rng = np.random.default_rng(0)
    logs = gates(form, half, T, K, rng)
    H = logs.shape[-1] if form != "key" else logs.shape[1]

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (normal(1, T, H, K) for _ in range(3))
    if form == "head":
        logs = np.broadcast_to(logs, (1, T, H))
    name, shape = dict(key=("gk", (1, T, H, K)), head=("g", (1, T, H)), constant=("g_gamma", (H,)))[form]
    given = {name: jnp.asarray(logs.reshape(shape), "float32" if form == "constant" else gate_dtype or dtype)}
    r = bind(q, k, v, **given, initial_state=normal(1, H, K, K, dtype="float32"), reverse=reverse)
    return r, normal(1, T, H, K), normal(1, H, K, K, dtype="float32")


def assert_right(r: Recurrence, d_output, d_final, got: Outputs, d: Recurrence):
    """Of every head all results are within the bars of docs/numerics.md, and of every channel within EACH times those."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), r)
    want, wanted = reference(exact), reference_gradient(exact, d_output.astype(jnp.float32), d_final)
    bar, gradient_bar = BARS[str(r.q.dtype)]
    results = dict(output=(got.output, want.output, bar), final_state=(got.final_state, want.final_state, bar))
    results |= {
        name: (x, named(wanted)[name], gradient_bar * SUMS.get(name, 1))
        for name, x in named(d).items()
        if name != "scale"
    }
    off = {}
    for name, (x, y, bar) in results.items():
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all(), name
        head = 1 if name.endswith("state") or name == "constant" else 2
        for most, places in [(bar, (head,))] + [(EACH * bar, (2, 3))] * (name in ("q", "k", "key")):
            error, size = (norm(a, places) for a in (x - y, y))
            floor = np.finfo(np.float32).tiny * np.sqrt(
                x.size / error.size
            )  # numbers below the least normal one are equal
            if name in ("constant", "head", "key"):
                parts = norm(np.asarray(exact.q, np.float64) * np.asarray(wanted.q), (2, 3)[: len(places)])
                floor = floor + CANCELLED * SUMS.get(name, 1) * parts
            off[name, len(places)] = error / (most * size + floor)
    print({name: np.round(x, 2).tolist() if x.size < 20 else round(float(x.max()), 2) for name, x in off.items()})
    assert max(x.max() for x in off.values()) <= 1, off


def norm(x, places):
    """The norms of x's parts at every index of the axes `places`."""
    return np.sqrt((x**2).sum(tuple(i for i in range(x.ndim) if i not in places)))
