"""The Hopper kernels, forward and gradient, through the interpreter of Pallas Mosaic GPU and against the float64 reference."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import glax
from glax._src.core.backend import Backend
from glax._src.core.bind import bind
from glax._src.core.recurrence import StoredStates
from glax._src.core.registry import Platform
from glax._src.core.segments import Segments
from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu import plain
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.scan.segments import lookback_tables, segment_scan
from glax._src.solve.autodiff import solve
from glax._src.solve.dispatch import Choice, by_folding
from glax._src.solve.pieces import solve_with_states
from glax.testing.reference import reference, reference_gradient
from tests import mosaic_interpreter, strengths

BAR = 3.5e-3  # docs/numerics.md: bfloat16
DEFAULT = HopperConfig()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call and its gradient. `save`: the forward saves residuals. `parts`: in two phases, begun from other states.

    `states`: there are initial states, and the final states have a cotangent. `resets`: tokens that begin a segment of a row.
    `padding`: tokens of segments that are padding, which hold NaN.
    """

    gate: str
    strength: str | float = "mild"
    T: int = 72
    K: int = 64
    V: int = 64
    heads: tuple[int, int, int] = (1, 1, 1)
    cuts: tuple[int, ...] | None = None
    reverse: bool = False
    gate_dtype: Any = jnp.bfloat16
    gradient: bool = True
    save: bool = True
    parts: bool = False
    states: bool = True
    resets: tuple[int, ...] | None = None
    padding: tuple[int, ...] = ()
    config: HopperConfig = DEFAULT
    bar: float = BAR


CASES = {
    "key, -100 and -inf": Call(gate="gk", strength="extreme", T=72),
    "key, -inf at every place": Call(gate="gk", strength="every place", T=136),
    "key, packed, reversed, shared heads": Call(gate="gk", heads=(1, 2, 1), cuts=(0, 0, 1, 70, 80), T=90, reverse=True),
    "key, segments, states formed again": Call(gate="gk", T=150, save=False, config=HopperConfig(parts=2)),
    "key, packed, -inf beside boundaries": Call(
        gate="gk", strength="beside boundaries", cuts=(0, 5, 5, 13, 77, 142), T=150, heads=(2, 1, 2)
    ),
    "key, reset late": Call(gate="gk", strength="reset", T=216, gradient=False),
    "key, reset late, segments, reversed": Call(
        gate="gk", strength="reset", heads=(2, 1, 2), T=400, reverse=True, config=HopperConfig(parts=2)
    ),
    "key, float32 gates": Call(gate="gk", gate_dtype=jnp.float32, T=72),
    "key, weak": Call(gate="gk", strength=1 / 16, T=200, gradient=False, bar=2.45e-3),
    "head, weak, reversed": Call(gate="g", strength=1 / 256, T=250, reverse=True, gradient=False, bar=2.5e-3),
    "head, segments": Call(gate="g", T=310, K=60, V=40, parts=True, config=HopperConfig(parts=5)),
    "head, reversed, states formed again": Call(gate="g", heads=(1, 2, 1), T=250, reverse=True, save=False),
    "key, wide, extreme": Call(gate="gk", strength="extreme", T=72, K=130, V=100),
    "head, wide, segments, shared heads": Call(
        gate="g", T=150, K=160, V=130, heads=(1, 2, 1), parts=True, config=HopperConfig(parts=2)
    ),
    "constant, packed": Call(gate="g_gamma", cuts=(0, 66, 66, 90), T=100, save=False),
    "head, groups": Call(gate="g", heads=(1, 1, 3), T=120, K=72, V=40),
    "head, pairs": Call(gate="g", heads=(1, 2, 4), T=120, V=40, config=HopperConfig(columns=128)),
    "head, one row, segments": Call(
        gate="g",
        cuts=(0, 0, 5, 66, 66, 64 * 5, 330, 390, 395),
        T=400,
        states=False,
        heads=(2, 2, 2),
        config=HopperConfig(parts=3),
    ),
    "head, one row of groups, reversed, states formed again": Call(
        gate="g", heads=(1, 1, 2), K=128, cuts=(0, 7, 70, 140, 140), T=250, states=False, save=False, reverse=True
    ),
    "constant, one row of pairs": Call(
        gate="g_gamma",
        heads=(1, 1, 2),
        cuts=(0, 66, 66, 90, 128),
        T=128,
        states=False,
        config=HopperConfig(columns=128),
    ),
    "key, segments of one token and at edges of chunks": Call(
        gate="gk", T=200, resets=(1, 2, 3, 31, 32, 33, 63, 64, 95, 96, 127, 160, 199)
    ),
    "key, every token a segment": Call(gate="gk", T=72, resets=tuple(range(1, 72))),
    "key, one segment": Call(gate="gk", T=72, resets=()),
    "key, segments of a row, reversed, shared heads": Call(
        gate="gk", T=150, heads=(2, 1, 2), resets=(0, 40, 63, 64, 149), reverse=True, save=False
    ),
    "key, segments with gates out of range and padding": Call(
        gate="gk", strength="near the range", T=200, resets=(20, 70, 72, 140), padding=(72, 73, 90, 91, 199)
    ),
    "key, segments, cut by tokens": Call(
        gate="gk", strength=1 / 4, T=330, resets=(5, 100, 130, 260), config=HopperConfig(parts=2)
    ),
    "key, segments, float32 gates, reversed": Call(
        gate="gk",
        gate_dtype=jnp.float32,
        T=72,
        K=128,
        V=128,
        resets=(7, 20, 64),
        reverse=True,
        config=HopperConfig(columns=128),
    ),
    "key, segments, wide": Call(gate="gk", T=72, K=130, V=200, resets=(9, 10, 66)),
    "key, one row": Call(gate="gk", K=72, cuts=(0, 0, 5, 66, 66, 130, 142), T=200, states=False, heads=(1, 2, 1)),
    "key, one row, cut by tokens, reversed": Call(
        gate="gk",
        strength=1 / 4,
        K=72,
        cuts=(3, 70, 200, 330),
        T=400,
        states=False,
        reverse=True,
        save=False,
        config=HopperConfig(parts=2),
    ),
    "key, one row, out of range, wide": Call(
        gate="gk", strength="extreme", cuts=(0, 7, 70), T=90, K=130, V=100, states=False
    ),
    "head, last chunk of 7 rows": Call(gate="g", T=71),
    "head, last chunk of 63 rows, reversed, segments": Call(
        gate="g", T=255, heads=(1, 2, 2), reverse=True, parts=True, config=HopperConfig(parts=2)
    ),
    "head, groups, last chunk of one row": Call(gate="g", T=129, heads=(1, 1, 2), V=128, save=False),
    "constant, pairs, last chunk of 9 rows": Call(
        gate="g_gamma", T=73, heads=(1, 1, 2), config=HopperConfig(columns=128)
    ),
    "head, groups, packed, reversed": Call(gate="g", heads=(2, 1, 2), V=128, cuts=(0, 66, 66, 90), T=100, reverse=True),
}


def laid_out(r, parts):
    config = HopperConfig(parts=parts)
    return KernelLayout(r, Route.of(r, config))


def distance(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)


MARKS = {"head, segments": [pytest.mark.fast]}


@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS.get(c, [])) for c in CASES])
def test_against_the_reference(case, monkeypatch):
    check(CASES[case], monkeypatch)


def check(c: Call, monkeypatch):
    rng, H, T, K, V = np.random.default_rng(0), max(c.heads), c.T, c.K, c.V

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (normal(1, T, h, width) for h, width in zip(c.heads, (K, K, V), strict=True))
    shape = dict(gk=(1, T, H, K), g=(1, T, H), g_gamma=(H,))[c.gate]
    logs, dice = jax.nn.log_sigmoid(normal(*shape, dtype=jnp.float32)), rng.random(shape)
    if c.strength == "extreme":
        logs = jnp.where(dice < 0.05, -100.0, jnp.where(dice > 0.98, -jnp.inf, logs))
    elif c.strength == "reset":  # most chunks near, and the state before still felt where the first is not
        logs = jnp.where((jnp.arange(T) == 150)[None, :, None, None], -jnp.inf, logs / 16)
    elif (
        c.strength == "every place"
    ):  # in a channel of the first chunk each, and in all at both ends of the second, two in a row
        token, channel = jnp.arange(T)[:, None], jnp.arange(K)
        resets = (token == channel) | (token // 64 == 1) & jnp.isin(token % 64, jnp.asarray([0, 1, 63]))
        logs = jnp.where(resets[None, :, None], -jnp.inf, logs / 4)
    elif c.strength == "beside boundaries":
        resets = jnp.isin(jnp.arange(T), jnp.asarray([4, 5, 13, 76, 78]))
        logs = jnp.where(resets[None, :, None, None], -jnp.inf, logs / 4)
    elif c.strength == "near the range":  # sums over half a chunk of 59.5, and of 60.5 in the next
        sums = jnp.where(jnp.arange(T) // 64 % 2 == 0, 59.5, 60.5)
        logs = jnp.broadcast_to(-sums[None, :, None, None] / 32, shape)
    elif c.strength != "mild":
        logs = c.strength * logs
    is_padding = jnp.isin(jnp.arange(T), jnp.asarray(c.padding, jnp.int32))
    N = 1 if c.cuts is None else len(c.cuts) - 1
    state, d_final = (normal(N, H, K, V, dtype=jnp.float32) for _ in range(2))
    d_output = normal(1, T, H, V)
    cu_seqlens, gates = None, {c.gate: logs.astype(c.gate_dtype)}
    if c.cuts is not None:
        cu_seqlens = jnp.asarray(c.cuts, jnp.int32)
        is_padding = (jnp.arange(T) < c.cuts[0]) | (jnp.arange(T) >= c.cuts[-1])
    if c.cuts is not None or c.padding:
        padding = is_padding[None, :, None, None]
        q, k, v, d_output = (jnp.where(padding, jnp.nan, x) for x in (q, k, v, d_output))
        if c.gate != "g_gamma":
            padding = padding[..., 0] if c.gate == "g" else padding
            gates[c.gate] = jnp.where(padding, jnp.nan, gates[c.gate])
    r = bind(q, k, v, **gates, initial_state=state if c.states else None, reverse=c.reverse, cu_seqlens=cu_seqlens)
    if c.resets is not None:
        resets = jnp.isin(jnp.arange(T), jnp.asarray(c.resets, jnp.int32))[None] & ~is_padding
        r = r.replace(segments=Segments(resets, ~is_padding[None] if c.padding else None))
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(plain, "multiprocessors", lambda: 3)  # the interpreter runs idle programs, too
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        if c.parts:  # begun from other states than they are finished from
            # compiled: what else runs beside an interpreted kernel may leave it no thread on a machine of two cores
            begin, begin_vjp = (jax.jit(f, static_argnames="config") for f in (plain.begin, plain.begin_vjp))
            begun, _, log = begin(r, config=c.config)
            found, residuals = plain.finish_with_residuals(begun, r, c.config)
            behind = jnp.exp(log)[..., None] * 3.0 * state
            _, reached, _ = begin(r.replace(initial_state=4.0 * state), config=c.config)
            assert distance(reached - behind, found.final_state) < BAR
            begun, *_ = begin_vjp(r, d_output, 0 * d_final, config=c.config)
            d = plain.finish_vjp(begun, r, d_output, d_final, residuals, config=c.config)
        else:
            found, residuals = (
                plain.chunked_with_residuals(r, c.config) if c.save else (plain.chunked(r, c.config), None)
            )
            of_final = d_final if c.states else None
            d = plain.chunked_vjp(r, d_output, of_final, residuals, c.config) if c.gradient else None
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, r)
    errors = [distance(a, b) for a, b in zip(found, reference(exact.folded), strict=True)]
    if c.gradient:
        of_reference = reference_gradient if r.segments is None else by_folding(reference_gradient)
        expected = of_reference(exact, d_output.astype(jnp.float32), d_final if c.states else 0 * d_final)
        cut = (r.floats, expected.replace(boundaries=None))
        assert jax.tree.structure(d) == jax.tree.structure(cut[0])
        for (path, a), b in zip(jax.tree.leaves_with_path(d), jax.tree.leaves(cut[1]), strict=True):
            sums = 10 if path[-1].name in ("scale", "constant") else 1  # over all of T, with cancellation
            errors.append(distance(a, b) / sums)
    print("errors", errors)
    assert max(errors) < c.bar, errors


@pytest.mark.parametrize(
    "gate, T, heads, reverse, parts, save",
    [
        ("g", 330, (2, 2, 2), False, 3, True),
        ("g", 256, (1, 1, 2), True, 1, False),
        ("gk", 200, (1, 1, 1), False, 2, False),
        ("gk", 192, (1, 1, 1), True, 1, True),
    ],
)
def test_states_behind_every_64_tokens(gate, T, heads, reverse, parts, save, monkeypatch):
    """With their gradients, which also pass from segment to segment; against the states of pieces, by XLA."""
    rng, every, H = np.random.default_rng(0), 64, max(heads)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v, d_output = (normal(1, T, h, 64, dtype=jnp.bfloat16) for h in (*heads, H))
    g = (jax.nn.log_sigmoid(normal(1, T, H, *(64,) * (gate == "gk"))) / 8).astype(jnp.bfloat16)
    state, d_final, d_states = normal(1, H, 64, 64), normal(1, H, 64, 64), normal(1, T // every, H, 64, 64)
    plain = bind(q, k, v, **{gate: g}, initial_state=state, reverse=reverse)
    r, config, cotangent = plain.replace(states_every=every), HopperConfig(parts=parts), StoredStates(d_final, d_states)
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(plain, "multiprocessors", lambda: 3)  # the interpreter runs idle programs, too
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found, residuals = plain.chunked_with_residuals(r, config) if save else (plain.chunked(r, config), None)
        d = plain.chunked_vjp(r, d_output, cotangent, residuals, config)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), plain)
    in_pieces = functools.partial(solve, Choice(Platform.XLA))
    wanted, pull = jax.vjp(lambda rows: tuple(solve_with_states(in_pieces, rows, every, None)), exact)
    expected = pull((d_output.astype(jnp.float32), d_final, d_states))[0]
    pairs = zip(jax.tree.leaves((found, d)), jax.tree.leaves((wanted, expected)), strict=True)
    assert max(distance(a, b) for a, b in pairs) < BAR


@pytest.mark.fast
def test_explain_says_why_packed_sequences_are_copied(monkeypatch):
    """Packed sequences are one row unless states, or gradients of states, enter at boundaries."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    x, state = jax.ShapeDtypeStruct((1, 2048, 16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 16, 64, 64), jnp.float32)
    cuts = jax.ShapeDtypeStruct((3,), jnp.int32)

    def explained(field: str, initial_state=None) -> str:
        def loss(x, initial_state, cuts):
            found = glax.recurrent(
                x, x, x, g=x[..., 0], initial_state=initial_state, cu_seqlens=cuts, platform="pallas"
            )
            return getattr(found, field).astype(jnp.float32).sum()

        return str(glax.explain(jax.grad(loss), x, initial_state, cuts))

    assert "packed sequences as one row" not in explained("output")
    assert "packed sequences as one row: initial states enter at boundaries" in explained("output", state)
    assert "packed sequences as one row: the gradient of final states enters at boundaries" in explained("final_state")


@pytest.mark.fast
@pytest.mark.parametrize(
    "T,K,V,why",
    [
        (2048, 64, 128, None),
        (2049, 64, 128, "8 does not divide T=2049"),
        (2040, 200, 100, "128 does not divide key (K)=200, 128 does not divide value (V)=100"),
    ],
)
def test_explain_says_why_arrays_are_copied(T, K, V, why, monkeypatch):
    """Tiles have 8 rows and 64 columns, and blocks of per-key gates 64 or 128 channels."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    q, v = (jax.ShapeDtypeStruct((1, T, 16, width), jnp.bfloat16) for width in (K, V))
    said = str(glax.explain(lambda q, v: glax.recurrent(q, q, v, gk=q, platform="pallas").output, q, v))
    assert ("arrays as they are given" in said) == (why is not None)
    assert why is None or f"arrays as they are given: {why}, so they are copied and filled up" in said


@pytest.mark.parametrize("form", ["key", "head"])
def test_steady_strengths(form, monkeypatch):
    """A state passes from a chunk's middle to the next one's also where the decay between them is 0 in float32."""
    r, *cotangents = strengths.problem(form, half=32, T=104, K=64)
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(plain, "multiprocessors", lambda: 2)  # the interpreter runs idle programs, too
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found, residuals = plain.chunked_with_residuals(r, HopperConfig())
        d = plain.chunked_vjp(r, *cotangents, residuals, HopperConfig())
    strengths.assert_right(r, *cotangents, found, d)


def test_a_final_state_has_its_last_token_unrounded(monkeypatch):
    """1.65e-3 off with it rounded, where gates are so strong that it is most of the state."""
    rng = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(rng.normal(size=(1, 64, 1, 64)), jnp.bfloat16) for _ in range(4))
    r = bind(q, k, v, gk=jax.nn.log_sigmoid(g))
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found = plain.chunked(r, HopperConfig())
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, r)
    assert distance(found.final_state, reference(exact).final_state) < 1.1e-3


@pytest.mark.parametrize("K, dtype", [(128, "bfloat16"), (64, "float32")])
def test_lookback_covers_every_chunk_that_reaches_the_end(K, dtype, monkeypatch):
    """Of every head every chunk behind which some decay of a segment is not 0, and no more than one chunk too many."""
    rng, parts, size = np.random.default_rng(0), 4, 20
    T = 64 * (parts * size - 1) - 5  # the last segment is shorter
    strength = np.repeat(10.0 ** rng.uniform(-2.5, 0.7, (2, T // 64 + 1, 2)), 64, axis=1)[:, :T, :, None]
    gk = jnp.asarray(-strength * rng.uniform(size=(2, T, 2, K)), dtype)
    gk = gk.at[1, -700:-690, 1].set(-jnp.inf)
    x = jnp.zeros((2, T, 2, K), jnp.bfloat16)
    sums = np.pad(np.asarray(gk, np.float64), ((0, 0), (0, 64 * parts * size - T), (0, 0), (0, 0)))
    sums = sums.reshape(2, parts, size, 64, 2, K).sum(3)
    counts = set()
    mosaic_interpreter.install(monkeypatch)
    for reverse in (False, True):
        p = laid_out(bind(x, x, x, gk=gk, reverse=reverse), parts)
        tables = np.stack([np.insert(p.table, 4, adjoint, axis=1) for adjoint in (0, 1)])
        tables[:, 2, 2] = 0
        with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
            ways = lookback_tables(p.plan(outputs=False, either=True, lookback=p.lookback), tables, p.gates)
        for adjoint, (table, found) in enumerate(zip(tables, map(np.asarray, ways), strict=True)):
            backwards = reverse != bool(adjoint)
            for e, (n, first, count, _, _) in enumerate(table):
                own = sums[n, e % parts, :count]
                through = np.cumsum(own if backwards else own[::-1], axis=0).max(2)[: p.lookback]
                for h in range(2):
                    dead = np.flatnonzero(through[:, h] < LOG_OF_NOTHING)
                    needed = dead[0] + 1 if dead.size else count
                    counts.add(int(needed))
                    start = first + (0 if backwards else count - needed)
                    assert found[e, h].tolist() == [n, start, needed, n, adjoint]
    assert counts >= {0, 1, 2, 3, size - 1, size}


def test_per_head_scans_find_where_to_begin(monkeypatch):
    """NaN wherever nothing may be read; each head on its own, and each way through time."""
    size, T = 16, 64 * 32
    reaches = 3, 16  # chunks that reach a segment's end: decays of -40 a chunk, and of nearly nothing
    gates = np.stack([np.full(T, -40 / 64), np.full(T, -1e-3)], 1)
    mosaic_interpreter.install(monkeypatch)
    for reverse in (False, True):
        q, k, v = np.random.default_rng(0).normal(size=(3, 1, T, 2, 64))
        # segment 0 is the one that leaves a state behind it, to the next; scanned backwards, 1 is
        unread = slice(0, (size - reaches[0]) * 64)
        unread = slice(T - unread.stop, T) if reverse else unread
        k[:, unread, 0] = np.nan
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
        r = bind(q, k, v, g=jnp.asarray(gates[None], jnp.bfloat16), reverse=reverse)
        with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
            p = laid_out(r, 2)
            states, log = p.own_states(p.k, p.v, adjoint=False, last=False)
        e = int(reverse)
        assert np.isfinite(states).all() and log[e, 0, 0] < LOG_OF_NOTHING
        np.testing.assert_allclose(log[e, 1, 0], -64 * size * 1e-3, rtol=1e-2)
        own = slice(64 * size, T) if reverse else slice(0, 64 * size)
        exact = jax.tree.map(
            lambda x: x.astype(jnp.float32),
            bind(q[:, own, 1:], k[:, own, 1:], v[:, own, 1:], g=r.decay.head[:, own, 1:], reverse=reverse),
        )
        assert distance(states[e, 1], reference(exact).final_state[0, 0]) < BAR


@pytest.mark.fast
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("gate", ["gk", "g"])
def test_states_that_arrive_late_are_added_decayed(gate, adjoint):
    """To those that enter segments of a scan from zero; decays of 0 among them."""
    rng, parts = np.random.default_rng(0), 3
    x = jnp.zeros((2, 64 * parts, 2, 64), jnp.bfloat16)
    p = laid_out(bind(x, x, x, **{gate: x if gate == "gk" else x[..., 0]}), parts)
    log = -(10.0 ** rng.uniform(-2, 3, (2 * parts, 2, 64 if gate == "gk" else 1)).astype(np.float32))
    log[:, 0, 0] = -np.inf
    own = jnp.asarray(rng.normal(size=(2 * parts, 2, 64, 64)), jnp.float32), jnp.asarray(log)
    start = jnp.asarray(rng.normal(size=(2, 2, 64, 64)), jnp.float32)
    late = p.begun_from(
        start, p.entry_states(own, None, adjoint), p.decayed_before(log.reshape(2, parts, *log.shape[1:]), adjoint)
    )
    np.testing.assert_allclose(late, p.entry_states(own, start, adjoint), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "N,parts,H,K,V,logs,given,descending", [(2, 3, 2, 64, 64, 1, True, 0), (1, 16, 1, 128, 64, 128, False, 1)]
)
def test_segment_scan(monkeypatch, N, parts, H, K, V, logs, given, descending):
    rng = np.random.default_rng(0)
    own, start = (rng.normal(size=(n, H, K, V)).astype(np.float32) for n in (N * parts, N))
    log, factor = (-rng.random(shape).astype(np.float32) for shape in ((N * parts, H, logs), N + 1))
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        operands = map(jnp.asarray, (own, log, factor, start, np.asarray([descending], np.int32)))
        found = np.asarray(segment_scan(parts, given, *operands))
    for n in range(N):
        S = start[n] * given
        for part in reversed(range(parts)) if descending else range(parts):
            e = n * parts + part
            np.testing.assert_allclose(found[e], S, rtol=1e-5, atol=1e-5)
            S = np.exp(log[e])[..., None] * S + factor[n] * own[e]
