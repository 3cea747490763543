"""The calls of the conformance suite, as data. `glax.testing.cases` has what a case is, and the arrays drawn for it."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.decay import PARTS, Decay
from glax._src.core.recurrence import Outputs, Recurrence
from glax.testing.cases import EXTREME, FORMS, Case, cotangents, inputs, recurrence
from glax.testing.reference import reference, reference_gradient
from tests.strengths import LEARNED, band, in_one, steady

__all__ = [
    "EXTREME",
    "FORMS",
    "Case",
    "cotangents",
    "inputs",
    "recurrence",
]  # with what is defined here, for most tests

# Gates of one strength are one set of inputs; all strengths of a case share its shapes, and so one compilation.
STRENGTHS = ("log-sigmoid", "mild", "0", "-1e-6", "-20", "-120", "-inf", "+0.05", "-100 on 5%", "-inf on 5%")
GATE_SUBSETS = [tuple(n for i, n in enumerate(("g", "g_gamma", "gk", "gv")) if bits >> i & 1) for bits in range(16)]


def runs(*lengths: tuple[int, int]) -> tuple[int, ...]:
    """A row of segment ids: each id as often as the number behind it says."""
    return tuple(i for i, n in lengths for _ in range(n))


# Padding at either end and inside, ids without order, an id that comes twice, one token a segment, a segment of the whole row
# and a row of padding alone. T is 67.
SEGMENT_IDS = (
    runs((0, 3), (9, 30), (2, 1), (5, 1), (0, 2), (5, 20), (9, 5), (0, 5)),
    runs((7, 67)),
    runs((0, 67)),
    tuple(range(67, 0, -1)),
)


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
    for heads in ((4, 2, 2), (2, 2, 4), (4, 2, 1), (1, 4, 2), (2, 3, 6), (1, 1, 6)):
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
    for form, gates in FORMS.items():
        segmented = dict(B=4, T=67, ids=SEGMENT_IDS, gates=gates, K=8, V=6)
        yield Case(f"{form}-segments", heads=(4, 2, 1), strengths=("log-sigmoid", "-inf on 5%"), **segmented)
        yield Case(f"{form}-segments-reverse", reverse=True, strengths=("log-sigmoid",), **segmented)
    yield Case("bfloat16-segments", dtype="bfloat16", state_dtype=None, **segmented | dict(gates=("gk",)))
    for chunk in (1, 7, 16, 48, 64, 128):
        yield Case(f"chunk{chunk}", B=2, chunk=chunk, strengths=("log-sigmoid", "-20", "-100 on 5%"))
        yield Case(f"chunk{chunk}-packed", chunk=chunk, gates=("g_gamma",), **packed)


# ---- steady gates ----------------------------------------------------------------------------------------------------


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
        axes = {name: part.dimensions.split().index("H") for name, part in PARTS.items()}
        decay = Decay(**{name: heads(getattr(x.decay, name), axis) for name, axis in axes.items()})
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
    for form in ("constant", "head", "key", "value", "key+value"):
        sides = 2 if form == "key+value" else 1
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
