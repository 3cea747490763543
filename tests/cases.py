"""The calls that every kernel is held to, as data."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence
from glax.testing.reference import reference, reference_gradient

# Gates of one strength are one set of inputs; all strengths of a case share its shapes, and so one compilation.
STRENGTHS = ("log-sigmoid", "mild", "0", "-1e-6", "-20", "-120", "-inf", "+0.05", "-100 on 5%", "-inf on 5%")
EXTREME = ("-100 on 5%", "-inf on 5%")
GATE_SUBSETS = [tuple(n for i, n in enumerate(("g", "g_gamma", "gk", "gv")) if bits >> i & 1) for bits in range(16)]
FORMS = dict(none=(), constant=("g_gamma",), head=("g",), key=("gk",), value=("gv",), both=("gk", "gv"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of shapes. `cuts` packs sequences; rows behind the last cut are padding, and hold NaN."""

    name: str
    B: int = 1
    T: int = 100
    heads: tuple[int, int, int] = (2, 2, 2)
    K: int = 16
    V: int = 24
    gates: tuple[str, ...] = ("gk",)
    dtype: str = "float32"
    gate_dtype: str = "float32"
    state_dtype: str | None = "float32"
    cuts: tuple[int, ...] | None = None
    reverse: bool = False
    strengths: tuple[str, ...] = ("log-sigmoid",)
    chunk: int | None = None

    def __str__(self):
        return self.name

    @property
    def num_sequences(self) -> int:
        return self.B if self.cuts is None else len(self.cuts) - 1


def gate(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
    logs = -np.log1p(np.exp(-rng.normal(size=shape)))
    match strength.split():
        case ["log-sigmoid"]:
            return logs
        case ["log-sigmoid", "of", mean]:
            return -np.log1p(np.exp(-rng.normal(float(mean), size=shape)))
        case [value, "in", "one"]:  # channel of each head, or head; the others are mild
            return np.where(np.arange(shape[-1]) == 0, float(value), logs / 16)
        case ["mild"]:  # as learned gates are: GLA divides by 16
            return logs / 16
        case [value, "on", "5%"]:
            return np.where(rng.random(shape) < 0.05, float(value), logs)
        case [value]:
            return np.full(shape, float(value))


def inputs(case: Case, strength: str, seed: int = 0) -> dict[str, jax.Array]:
    """The arguments of `glax.recurrent`, without cu_seqlens and reverse."""
    rng = np.random.default_rng(seed)
    B, T, (Hq, Hk, Hv), K, V, H = case.B, case.T, case.heads, case.K, case.V, max(case.heads)
    arrays = dict(
        query=rng.normal(size=(B, T, Hq, K)), key=rng.normal(size=(B, T, Hk, K)), value=rng.normal(size=(B, T, Hv, V))
    )
    shapes = dict(g=(B, T, H), g_gamma=(case.num_sequences, H), gk=(B, T, H, K), gv=(B, T, H, V))
    arrays |= {name: gate(rng, shapes[name], strength) for name in case.gates}
    if case.cuts is not None:
        for name in arrays.keys() - {"g_gamma"}:
            arrays[name][:, case.cuts[-1] :] = np.nan
    if case.state_dtype is not None:
        arrays["initial_state"] = rng.normal(size=(case.num_sequences, H, K, V))
    dtypes = dict.fromkeys(("query", "key", "value"), case.dtype) | dict(initial_state=case.state_dtype)
    return {name: jnp.asarray(x.astype(dtypes.get(name, case.gate_dtype))) for name, x in arrays.items()}


def cotangents(case: Case, r: Recurrence, seed: int = 1):
    """dL/doutput and dL/dfinal_state; NaN in padding rows, which nobody may read."""
    rng = np.random.default_rng(seed)
    d_output = rng.normal(size=(*r.q.shape[:2], *r.state_shape[1::2]))
    if case.cuts is not None:
        d_output[:, case.cuts[-1] :] = np.nan
    return jnp.asarray(d_output.astype(r.q.dtype)), jnp.asarray(rng.normal(size=r.state_shape).astype(r.dtype))


def recurrence(case: Case, strength: str, seed: int = 0) -> Recurrence:
    cuts = None if case.cuts is None else jnp.asarray(case.cuts, jnp.int32)
    return bind(**inputs(case, strength, seed), cu_seqlens=cuts, reverse=case.reverse)


def all_cases() -> Iterator[Case]:
    # Empty sequences first, in the middle and last, one token, cuts inside chunks, padding behind.
    packed = dict(cuts=(0, 0, 30, 31, 31, 64, 91, 91), T=97)
    for form, gates in FORMS.items():
        strengths = STRENGTHS if gates else ("log-sigmoid",)
        yield Case(f"{form}", B=2, gates=gates, strengths=strengths)
        yield Case(f"{form}-reverse", gates=gates, strengths=strengths, reverse=True, T=64)
        yield Case(f"{form}-packed", gates=gates, strengths=strengths, **packed)
        yield Case(f"{form}-packed-reverse", gates=gates, strengths=strengths, reverse=True, **packed)
    for T in (1, 2, 63, 64, 65, 1000):
        yield Case(f"T{T}", B=2, T=T, heads=(1, 1, 1), K=8, V=8, strengths=("log-sigmoid", "-100 on 5%"))
        yield Case(f"T{T}-head", T=T, heads=(1, 1, 1), K=8, V=8, gates=("g",), strengths=("log-sigmoid", "-100 on 5%"))
    for form in ("constant", "head", "key"):  # equal gates must not round alike at every token
        yield Case(f"T2600-{form}", T=2600, heads=(1, 1, 1), K=8, V=8, gates=FORMS[form], strengths=("-1e-6", "mild"))
    for form in ("none", "constant", "head", "key"):  # lengths whose chunks XLA computes in parallel on CPUs
        gates = FORMS[form]
        strengths = STRENGTHS if gates else ("log-sigmoid",)
        yield Case(f"T512-{form}", B=2, T=512, heads=(4, 2, 1), K=8, V=12, gates=gates, strengths=strengths)
        yield Case(f"T512-{form}-reverse", T=512, K=12, V=8, gates=gates, strengths=strengths, reverse=True)
        yield Case(f"T512-{form}-bfloat16", T=512, K=8, V=8, gates=gates, dtype="bfloat16", state_dtype=None)
    for K, V in ((1, 1), (1, 64), (60, 16), (64, 64), (128, 60), (256, 128), (64, 256)):
        yield Case(
            f"K{K}V{V}", T=70, K=K, V=V, gates=("gk", "gv") if K == 60 else ("gk",), strengths=("log-sigmoid", "-20")
        )
    for heads in ((4, 2, 2), (2, 2, 4), (4, 2, 1), (1, 4, 2), (2, 3, 6)):
        name = "heads" + "-".join(map(str, heads))
        yield Case(name, B=2, T=40, heads=heads, gates=("gk", "gv"), K=8, V=6)
        yield Case(f"{name}-packed", heads=heads, gates=("g",), K=8, V=6, **packed)
    for dtype in ("bfloat16", "float16"):
        for form, gates in FORMS.items():
            yield Case(
                f"{dtype}-{form}", dtype=dtype, state_dtype=dtype, gates=gates, strengths=("log-sigmoid", "mild")
            )
        yield Case(f"{dtype}-packed", dtype=dtype, state_dtype=None, heads=(4, 2, 2), **packed)
    yield Case("bfloat16-gates", dtype="bfloat16", gate_dtype="bfloat16", strengths=("log-sigmoid", "-100 on 5%"))
    yield Case("float16-gates", gate_dtype="float16")
    yield Case("no-state", state_dtype=None)
    yield Case("no-state-packed", state_dtype=None, **packed)
    yield Case("all-padding", cuts=(0, 0, 0), T=10)
    for chunk in (1, 7, 16, 48, 64, 128):
        yield Case(f"chunk{chunk}", B=2, chunk=chunk, strengths=("log-sigmoid", "-20", "-100 on 5%"))
        yield Case(f"chunk{chunk}-packed", chunk=chunk, gates=("g_gamma",), **packed)


# ---- steady gates ----------------------------------------------------------------------------------------------------

# Sums of log decays at which a kernel changes its form, or float32 loses what a state holds; and the numbers of tokens over which
# a kernel forms such a sum. Of equal gates, each quotient is a strength at which one run-time check changes its answer.
LIMITS = (
    (60.0, (16, 32, 64, 128)),  # half a chunk of 32 to 256: the fast form; a whole one with gates on both sides
    (2.0, (1,)),  # XLA's form of many chunks: as many as a chunk has tokens, in half of it
    (40.0, (1, 12, 24, 48)),  # a block of the native kernels
    (20.0, (1, 24)),  # the same with gates on both sides, and of a block's first token
    (87.3, (16, 32, 64, 128)),  # from middle to middle of chunks: the least normal number of float32
    (103.97, (1, 16, 32, 64, 128)),  # the least number
    (128.0, (1,)),  # a gate is cut there
)


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
    return tuple(f"{strength} in one" for strength in strengths)


LEARNED = ("log-sigmoid", "log-sigmoid of -0.8")  # means of -0.8 and -1.27


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A case at many strengths, each in heads of its own of one array: the reference then needs one pass over the tokens."""

    case: Case
    strengths: tuple[str, ...]

    def __str__(self):
        return f"{self.case}-steady"

    def recurrence(self, strength: str) -> Recurrence:
        return self.of(strength, whole(self))

    def cotangents(self, strength: str) -> tuple[np.ndarray, np.ndarray]:
        return tuple(self.of(strength, Outputs(*whole_cotangents(self))))

    def outputs(self, strength: str) -> Outputs:
        return self.of(strength, whole_outputs(self))

    def gradient(self, strength: str) -> Recurrence:
        r, d = self.recurrence(strength), self.of(strength, whole_gradient(self))
        cuts = range(0, len(r.q) * r.q.shape[1] + 1, r.q.shape[1]) if r.boundaries is None else r.boundaries
        terms = (r.q * d.q).reshape(-1, *r.q.shape[2:]).astype(np.float64)
        d_scale = [terms[low:high].sum() for low, high in itertools.pairwise(cuts)]
        return d.replace(scale=np.asarray(d_scale) / r.scale)  # <q, dq> is the scale times its gradient

    def of(self, strength: str, x):
        """The heads of one strength out of `whole`, or of Outputs or a gradient like it."""
        i, n = self.strengths.index(strength), len(self.strengths)

        def heads(x, axis):
            if x is None:
                return None
            count = x.shape[axis] // n
            return np.asarray(x)[(slice(None),) * axis + (slice(i * count, (i + 1) * count),)]

        if isinstance(x, Outputs):
            return Outputs(heads(x.output, 2), heads(x.final_state, 1))
        decay = Decay(heads(x.decay.constant, 1), *(heads(y, 2) for y in (x.decay.head, x.decay.key, x.decay.value)))
        rows = dict(q=heads(x.q, 2), k=heads(x.k, 2), v=heads(x.v, 2))
        return x.replace(**rows, decay=decay, initial_state=heads(x.initial_state, 1))


@functools.lru_cache(maxsize=2)
def whole(sweep: Sweep) -> Recurrence:
    """All strengths side by side: also what kernels are given whose checks are of one head each."""
    case = sweep.case
    each = [inputs(case, strength, seed) for seed, strength in enumerate(sweep.strengths)]
    axes = dict(g_gamma=1, initial_state=1)
    arrays = {name: np.concatenate([x[name] for x in each], axes.get(name, 2)) for name in each[0]}
    cuts = None if case.cuts is None else np.asarray(case.cuts, np.int32)
    return jax.tree.map(np.asarray, bind(**arrays, cu_seqlens=cuts, reverse=case.reverse))


@functools.lru_cache(maxsize=2)
def whole_cotangents(sweep: Sweep):
    return cotangents(sweep.case, whole(sweep))


@functools.lru_cache(maxsize=2)
def whole_outputs(sweep: Sweep) -> Outputs:
    return reference(whole(sweep))


@functools.lru_cache(maxsize=2)
def whole_gradient(sweep: Sweep) -> Recurrence:
    return reference_gradient(whole(sweep), *whole_cotangents(sweep))


def all_sweeps() -> Iterator[Sweep]:
    """Over the shapes of cases of `all_cases`, so that what these compile serves all strengths; and over one that GPUs take."""
    cases = {case.name: case for case in all_cases()}
    for form in ("constant", "head", "key", "value", "both"):
        sides = 2 if form == "both" else 1
        for name in (form, f"{form}-packed-reverse"):
            yield Sweep(cases[name], steady(sides=sides) + in_one(steady(step=1)) + LEARNED)
    for name in (
        "T512-constant",
        "T512-head",
        "T512-key",
        "T512-head-reverse",
        "T512-key-reverse",
    ):  # two in groups of heads
        yield Sweep(cases[name], steady(64, step=0.2) + in_one(steady(64, step=1)) + LEARNED)
    for chunk in (16, 64, 128):
        yield Sweep(cases[f"chunk{chunk}"], steady(chunk) + in_one(steady(chunk, step=1)) + LEARNED)
    wide = Case("T260-bfloat16", T=260, heads=(1, 1, 1), K=64, V=64, dtype="bfloat16", gate_dtype="bfloat16")
    yield Sweep(wide, band(64) + in_one(band(64)) + LEARNED)


def band(chunk: int) -> tuple[str, ...]:
    """The few of `steady` from where a decay between middles underflows to where a half passes the limit, for slow kernels."""
    limits = 87.3 / chunk, 60 / (chunk // 2)
    return tuple(s for s in steady(chunk) if 0.9 * limits[0] < -float(s) < 1.1 * limits[1])
