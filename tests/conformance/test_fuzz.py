"""Problems drawn at random, values freely and programs from a few, against the float64 reference; serving against a NumPy pool.

A minute as it stands. Longer, and with other draws:

    GLAX_FUZZ_SEED=7 GLAX_FUZZ_TIMES=20 python -m pytest tests/conformance/test_fuzz.py

A failure prints the smallest example that hypothesis finds. It holds everything: every array follows from its fields, so
`check(Problem(...))` or `serve(Serving(...))` repeats it.
"""

import dataclasses
import functools
import itertools
import os
import random

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import glax
from glax._src.core.bind import bind
from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax.testing.cases import gate
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import BARS, EXTREME_GATES, SUMS, norm
from tests.compiling import quick_jit
from tests.strengths import in_one, steady

SEED, TIMES = int(os.environ.get("GLAX_FUZZ_SEED", "0")), float(os.environ.get("GLAX_FUZZ_TIMES", "1"))


def examples(count: int):
    options = dict(deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck))
    return lambda test: seed(SEED)(settings(max_examples=max(1, round(count * TIMES)), **options)(test))


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program depends on. `sequences`: as many packed ones, else None. `config`: a chunk of XLA's kernels."""

    sizes: tuple[int, int, tuple[int, int, int], int, int]  # B, T, heads, K, V
    gates: tuple[str, ...]
    platform: str | None
    chunk: int | None
    dtype: str
    gate_dtype: str
    state: bool
    reverse: bool
    sequences: int | None

    @property
    def num_sequences(self) -> int:
        return self.sizes[0] if self.sequences is None else self.sequences


SIZES = (
    (1, 256, (4, 4, 4), 8, 8),  # heads side by side in XLA's form of many chunks
    (2, 512, (4, 2, 1), 6, 10),
    (1, 256, (8, 1, 8), 3, 4),
    (1, 512, (2, 2, 2), 8, 5),  # the same by groups of chunks
    (1, 260, (1, 2, 2), 16, 9),
    (2, 70, (2, 1, 2), 33, 4),
    (3, 17, (1, 1, 3), 1, 1),
    (1, 2, (1, 1, 1), 5, 7),
)
GATES = [
    (),
    ("gv",),
    ("gk", "gv"),
    ("g", "g_gamma"),
    ("g", "gk"),
    ("g_gamma", "gv"),
    *2 * (("g_gamma",), ("g",), ("gk",)),
]


def programs(count: int) -> list[Program]:
    """So many, every size, gate and platform about as often as any other."""
    rng = random.Random(SEED)
    turns = [itertools.cycle(rng.sample(x, len(x))) for x in (SIZES, GATES, ["xla", "xla", "xla", None])]
    found = []
    for _ in range(count):
        sizes, gates, platform = map(next, turns)
        dtype = rng.choice(["float32"] * 4 + ["bfloat16", "float16"])
        found.append(
            Program(
                sizes,
                gates,
                platform,
                chunk=rng.choice([None] * 5 + [16, 32, 64]) if platform == "xla" else None,
                dtype=dtype,
                # The gradient of a float16 gate, a sum over channels or tokens, may leave that dtype's range.
                gate_dtype=rng.choice(["float32", "float32" if dtype == "float16" else dtype]),
                state=rng.random() < 0.7,
                reverse=rng.random() < 0.4,
                sequences=rng.choice([None, None, 4]) if sizes[0] == 1 else None,
            )
        )
    return found


PROGRAMS = programs(round(27 * max(1, TIMES**0.5)))
STRENGTHS = st.one_of(
    st.sampled_from(steady(step=0.3)),
    st.floats(0.3, 7).map(lambda x: f"-{x:.4g}"),
    st.sampled_from(in_one(steady(step=0.5))),
    st.floats(-3, 0.5).map(lambda mean: f"log-sigmoid of {mean:.3g}"),
    st.floats(-4, 2.2).map(lambda log: f"-{10**log:.4g}"),
    st.sampled_from(["mild", "0", "-1e-6", "-inf", "-100 on 5%", "-inf on 5%", "-20 on 5%"]),
    st.sampled_from(["spread", "spread over channels", "+0.03", "+0.01", "+0.05 in one"]),
    st.tuples(st.integers(1, 70), st.floats(0.1, 35)).map(lambda x: f"swings of {x[0]} by {x[1]:.3g}"),
)
POSITIVE = ("+", "swings")


def logs(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
    """`gate`, and strengths of all sizes by token, or by channel or head; and sums that swing between 0 and -`size`."""
    match strength.split():
        case ["spread"]:
            return -(10.0 ** rng.uniform(-4, 2.2, shape))
        case ["spread", "over", "channels"]:
            return np.broadcast_to(-(10.0 ** rng.uniform(-4, 1.2, shape[-1])), shape).copy()
        case ["swings", "of", tokens, "by", size]:
            down = np.arange(shape[1]) // int(tokens) % 2 == 0
            each = np.where(down, -1.0, 1.0) * float(size) / int(tokens)
            return np.broadcast_to(each.reshape(1, -1, *[1] * (len(shape) - 2)), shape).copy()
    return gate(rng, shape, strength)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call and its cotangents. k, v and the state are of size 10^k, 10^v and 10^(k + v + state)."""

    program: Program
    strengths: tuple[str, ...]
    cuts: tuple[int, ...] | None = None
    k: int = 0
    v: int = 0
    state: int = 0
    scale: float | None = None
    seed: int = 0

    @property
    def extreme(self) -> bool:
        """Whether strong gates stand among mild ones; docs/numerics.md says why the bars are then wider."""
        mixed = ("on", "in", "spread", "swings")
        return any(set(mixed) & set(strength.split()) for strength in self.strengths) or len(self.strengths) > 1

    def arrays(self) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """The arguments of `glax.recurrent`; dL/doutput and dL/dfinal_state."""
        p, rng = self.program, np.random.default_rng(self.seed)
        (B, T, (Hq, Hk, Hv), K, V), N = p.sizes, p.num_sequences
        H = max(Hq, Hk, Hv)

        def normal(shape, dtype, log=0):
            return (rng.normal(size=shape) * 10.0**log).astype(dtype)

        arrays = dict(
            query=normal((B, T, Hq, K), p.dtype),
            key=normal((B, T, Hk, K), p.dtype, self.k),
            value=normal((B, T, Hv, V), p.dtype, self.v),
        )
        shapes = dict(g=(B, T, H), g_gamma=(N, H), gk=(B, T, H, K), gv=(B, T, H, V))
        for name, strength in zip(p.gates, self.strengths, strict=True):
            arrays[name] = logs(rng, shapes[name], strength).astype(p.gate_dtype)
        if p.state:
            arrays["initial_state"] = normal((N, H, K, V), np.float32, self.k + self.v + self.state)
        d_output, d_final = normal((B, T, H, V), p.dtype), normal((N, H, K, V), np.float32)
        if self.cuts is not None:
            for x in (d_output, *(x for name, x in arrays.items() if name not in ("g_gamma", "initial_state"))):
                x[:, self.cuts[-1] :] = np.nan
            arrays["cu_seqlens"] = np.asarray(self.cuts, np.int32)
        arrays["softmax_scale"] = np.float32(K**-0.5 if self.scale is None else self.scale)
        return arrays, (d_output, d_final)


@st.composite
def problems(draw):
    program = draw(st.sampled_from(PROGRAMS))
    half = "float16" in (program.dtype, program.gate_dtype)
    strengths = tuple(draw(STRENGTHS) for _ in program.gates)
    if half or "g_gamma" in program.gates:  # growth passes float16; a constant gate does not swing
        strengths = tuple("mild" if strength.startswith(POSITIVE) else strength for strength in strengths)
    if sum(strength.startswith(POSITIVE) for strength in strengths) > 1:
        strengths = (strengths[0], *["mild"] * (len(strengths) - 1))
    cuts = None
    if program.sequences is not None:
        T = program.sizes[1]
        cuts = (0, *sorted(draw(st.lists(st.integers(0, T), min_size=program.sequences, max_size=program.sequences))))
    sizes = st.just(0) if program.dtype == "float16" else st.integers(-6, 6)
    return Problem(
        program, strengths, cuts, *(draw(sizes) for _ in range(3)),
        scale=draw(st.sampled_from([None, None, 1.0, -1.0, 0.05, 3.0])), seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


# ---- whole sequences -------------------------------------------------------------------------------------------------


@functools.cache
def compiled(p: Program):
    """Output, final state, and the gradient in every float argument by its name."""
    cfg = None if p.chunk is None else ChunkedConfig(p.chunk)
    call = functools.partial(glax.recurrent, reverse=p.reverse, platform=p.platform, cfg=cfg)

    def run(arguments, cotangents):
        cuts = {name: arguments[name] for name in ("cu_seqlens",) if name in arguments}
        floats = {name: x for name, x in arguments.items() if name not in cuts}
        outputs, pull = jax.vjp(lambda x: call(**x, **cuts), floats)
        return outputs, pull(glax.Outputs(*cotangents))[0]

    return quick_jit(run)


def wanted(p: Program, arrays: dict, cotangents):
    """The same by the reference. It takes all kinds of gates apart, where glax adds them up."""
    gates = {name: arrays.get(name) for name in ("g_gamma", "g", "gk", "gv")}
    r: Recurrence = bind(**{name: x for name, x in arrays.items() if name not in gates}, reverse=p.reverse)
    r = r.replace(decay=Decay(*gates.values()))
    d = reference_gradient(r, *cotangents)
    found = dict(query=d.q, key=d.k, value=d.v, initial_state=d.initial_state, softmax_scale=d.scale.sum())
    found |= zip(gates, (d.decay.constant, d.decay.head, d.decay.key, d.decay.value), strict=True)
    return reference(r), {name: x for name, x in found.items() if x is not None}


def distance(got, want, floor: float) -> float:
    """Relative RMS, infinite where one is not a number; numbers below the floor, or the least of got's dtype, are all equal."""
    floor = max(floor, float(ml_dtypes.finfo(got.dtype).smallest_subnormal))
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if not np.isfinite(got).all():
        return np.inf
    return max(0.0, norm(got - want) - floor * np.sqrt(want.size)) / (norm(want) or 1)


def check(problem: Problem):
    p, (arrays, cotangents) = problem.program, problem.arrays()
    outputs, gradient = jax.tree.map(np.asarray, compiled(p)(arrays, cotangents))
    want, want_gradient = wanted(p, arrays, cotangents)
    assert gradient.keys() == want_gradient.keys()
    # Products of three, each of whose factors may be less than the least normal number and 0: 1e4 of these, by the other two.
    sizes = (10.0 ** abs(x) for x in (problem.k, problem.v, problem.k + problem.v + problem.state))
    floor = 1e4 * np.finfo(np.float32).tiny * np.prod(sorted(sizes)[1:])
    wide = EXTREME_GATES if problem.extreme and p.dtype == "float32" else 1
    misses = []
    for name, got, x in zip(outputs._fields, outputs, want, strict=True):
        if (off := distance(got, x, floor)) > (bar := BARS[p.dtype][0] * wide):
            misses.append(f"{name} is off by {off:.1e}, bar {bar:.1e}")
    for name, got in gradient.items():
        bar = max(BARS[str(dtype)][1] for dtype in (p.dtype, got.dtype)) * wide
        bar *= SUMS["scale"] if name in ("g_gamma", "softmax_scale") else 1
        if (off := distance(got, want_gradient[name], floor)) > bar:
            misses.append(f"d {name} is off by {off:.1e}, bar {bar:.1e}")
    if problem.cuts is not None:
        assert not outputs.output[:, problem.cuts[-1] :].any(), "padding rows of output are not 0"
    assert not misses, "; ".join(misses)


@examples(300)
@given(problems())
def test_any_problem(problem):
    check(problem)


# ---- boundaries ------------------------------------------------------------------------------------------------------

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@examples(60)
@given(
    st.sampled_from(INTEGERS),
    st.lists(st.integers(0, 300), min_size=3, max_size=3),
    st.booleans(),
    st.sampled_from(["xla", None]),
)
def test_boundaries_of_any_integers(dtype, cuts, in_order, platform):
    """Those that decrease or pass T are refused; all others cut the sequence where they say."""
    cuts = [0, *(min(cut, np.iinfo(dtype).max) for cut in (sorted(cuts) if in_order else cuts))]
    rng, T = np.random.default_rng(0), 290
    q, k, v = (rng.normal(size=(1, T, 1, n)).astype(np.float32) for n in (3, 3, 2))
    g = -rng.uniform(size=(1, T, 1)).astype(np.float32)
    call = functools.partial(glax.recurrent, q, k, v, g=g, platform=platform)
    if cuts != sorted(cuts) or cuts[-1] > T:
        with pytest.raises(ValueError, match="cu_seqlens must not"):
            call(cu_seqlens=np.asarray(cuts, dtype))
        return
    want = reference(bind(q, k, v, g=g, cu_seqlens=np.asarray(cuts, np.int32)))
    for name, got, x in zip(want._fields, call(cu_seqlens=np.asarray(cuts, dtype)), want, strict=True):
        assert distance(got, x, 1e-35) <= BARS["float32"][0], name


# ---- serving ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Serving:
    """Calls one after another on one pool, each with the slots of its two sequences. traced: inside of jit."""

    rows: int
    dtype: str
    slot_dtype: str
    calls: tuple[tuple[str, int, int], ...]
    platform: str | None = None
    traced: bool = False
    seed: int = 0


@st.composite
def servings(draw):
    rows, dtype = draw(st.sampled_from([2, 3, 128, 256, 300])), draw(st.sampled_from(INTEGERS))
    least, most = (0 if dtype.startswith("u") else -2), min(rows, np.iinfo(dtype).max)
    slot = st.sampled_from(sorted({least, 0, 1, rows // 2, rows - 2, rows - 1, rows})).map(lambda x: min(x, most))
    call = st.tuples(st.sampled_from(["step", "prefill", "packed", "verify"]), slot, slot)
    return Serving(
        rows,
        draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        dtype,
        tuple(draw(st.lists(call, min_size=1, max_size=3))),
        platform=draw(st.sampled_from(["xla", None])),
        traced=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


K, V, H, DRAFT = 4, 3, 2, 3


@functools.cache
def server(kind: str, platform: str | None):
    """(pool, slots, accepted, tokens [2, T, ...]) -> output, new pool."""

    def run(pool, slots, accepted, tokens):
        if kind == "step":
            token = {name: x[:, 0] for name, x in tokens.items()}
            output, pool = glax.recurrent_step(**token, state=pool, slots=slots, platform=platform)
            return output[:, None], pool
        if kind == "prefill":
            return glax.prefill_into(pool, slots, **tokens, platform=platform)
        if kind == "packed":
            flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in tokens.items()}
            cuts = np.asarray([0, 1, 2 * DRAFT], slots.dtype)
            return glax.prefill_into(pool, slots, **flat, cu_seqlens=cuts, platform=platform)
        output, draft = glax.recurrent_verify(**tokens, state=pool, slots=slots, platform=platform)
        return output, glax.commit(pool, draft, accepted)

    return run, quick_jit(run)


def serve(serving: Serving):
    rng = np.random.default_rng(serving.seed)
    pool = rng.normal(size=(serving.rows, H, K, V)).astype(serving.dtype)
    for kind, *slots in serving.calls:
        used = [0 <= slot < serving.rows for slot in slots]
        repeated = slots[0] == slots[1] and used[0]
        known_wrong = repeated or any(not use and slot != -1 for use, slot in zip(used, slots, strict=True))
        shapes = dict(query=(H, K), key=(1, K), value=(H, V), gk=(H, K))
        tokens = {name: rng.normal(size=(2, DRAFT, *shape)).astype(np.float32) for name, shape in shapes.items()}
        tokens["gk"] = -np.abs(tokens["gk"])
        accepted = rng.integers(0, DRAFT + 1, 2)
        operands = pool, np.asarray(slots, serving.slot_dtype), accepted.astype(serving.slot_dtype), tokens
        known, traced = server(kind, serving.platform)
        if known_wrong and not serving.traced:
            with pytest.raises(ValueError, match="slots must"):
                known(*operands)
            continue
        if repeated:
            continue  # undefined
        output, new = jax.tree.map(np.asarray, (traced if serving.traced else known)(*operands))
        assert new.dtype == pool.dtype
        pool = follow(kind, pool, slots, used, accepted, tokens, output, new)


def follow(kind, pool, slots, used, accepted, tokens, output, new) -> np.ndarray:
    """The pool after one call, row by row, by the reference; and that `output` and `new` are so."""
    bar = BARS["float32"][0]
    stored = bar if pool.dtype == np.float32 else float(ml_dtypes.finfo(pool.dtype).eps)
    flat = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in tokens.items()}
    for n, (slot, use) in enumerate(zip(slots, used, strict=True)):
        if kind == "packed":  # one token, and the others
            rows = slice(0, 1) if n == 0 else slice(1, None)
            got, own = output[rows], {name: x[:, rows] for name, x in flat.items()}
        else:
            got, own = output[n], {name: x[n : n + 1, : 1 if kind == "step" else DRAFT] for name, x in tokens.items()}
        if not use:
            assert not got.any(), f"slot {slot} is no row, and its output is not 0"
            continue
        r = bind(**own, initial_state=pool[slot][None].astype(np.float32))
        assert distance(got, reference(r).output[0], 1e-35) <= bar, f"the output of slot {slot}"
        if kind == "verify":
            own = {name: x[:, : accepted[n]] for name, x in own.items()}
            r = bind(**own, initial_state=r.initial_state)
        assert distance(new[slot], reference(r).final_state[0], 1e-35) <= stored, f"the state in slot {slot}"
    others = np.setdiff1d(np.arange(len(pool)), [slot for slot, use in zip(slots, used, strict=True) if use])
    changed = [int(row) for row in others if not np.array_equal(pool[row], new[row])]
    assert not changed, f"rows {changed} have changed, of slots {slots}"
    return new


@examples(60)
@given(servings())
def test_a_pool_in_numpy(serving):
    serve(serving)
