"""The parts of the Hopper kernels, each by itself: tables of segments, states that enter segments, inverses of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip(
        "the interpreter of Hopper kernels needs JAX 0.12: make hopper PYTHON=python3.13 VENV=.venv-3.13",
        allow_module_level=True,
    )

from glax._src.core.bind import bind
from glax._src.kernels.common.limits import LOG_OF_NOTHING, LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.chunks.inverse import inverses_of_chunks
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import JoinedLayout, KernelLayout
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.rows import newest_resets
from glax._src.kernels.pallas_gpu.scan.segments import lookback_tables, segment_scan
from glax.testing.reference import reference
from tests.hopper import BAR, Interpreter, distance


@pytest.fixture
def interpreter(monkeypatch):
    return Interpreter(monkeypatch)


def laid_out(r, parts: int) -> KernelLayout:
    return KernelLayout(r, Route.of(r, HopperConfig(parts=parts)))


@pytest.mark.parametrize("K, dtype", [(128, "bfloat16"), (64, "float32")])
def test_lookback_covers_every_chunk_that_reaches_the_end(K, dtype, interpreter):
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
    for reverse in (False, True):
        p = laid_out(bind(x, x, x, gk=gk, reverse=reverse), parts)
        tables = np.stack([np.insert(p.table, 4, adjoint, axis=1) for adjoint in (0, 1)])
        tables[:, 2, 2] = 0
        with interpreter.on():
            ways = lookback_tables(p.plan(outputs=False, two_way=True, lookback=p.lookback), tables, p.gates)
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


def test_per_head_scans_find_where_to_begin(interpreter):
    """NaN wherever nothing may be read; each head on its own, and each way through time."""
    size, T = 16, 64 * 32
    reaches = 3, 16  # chunks that reach a segment's end: decays of -40 a chunk, and of nearly nothing
    gates = np.stack([np.full(T, -40 / 64), np.full(T, -1e-3)], 1)
    for reverse in (False, True):
        q, k, v = np.random.default_rng(0).normal(size=(3, 1, T, 2, 64))
        # segment 0 is the one that leaves a state behind it, to the next; scanned backwards, 1 is
        unread = slice(0, (size - reaches[0]) * 64)
        unread = slice(T - unread.stop, T) if reverse else unread
        k[:, unread, 0] = np.nan
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
        r = bind(q, k, v, g=jnp.asarray(gates[None], jnp.bfloat16), reverse=reverse)
        with interpreter.on():
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
def test_segment_scan(interpreter, N, parts, H, K, V, logs, given, descending):
    rng = np.random.default_rng(0)
    own, start = (rng.normal(size=(n, H, K, V)).astype(np.float32) for n in (N * parts, N))
    log, factor = (-rng.random(shape).astype(np.float32) for shape in ((N * parts, H, logs), N + 1))
    with interpreter.on():
        operands = map(jnp.asarray, (own, log, factor, start, np.asarray([descending], np.int32)))
        found = np.asarray(segment_scan(parts, given, *operands))
    for n in range(N):
        S = start[n] * given
        for part in reversed(range(parts)) if descending else range(parts):
            e = n * parts + part
            np.testing.assert_allclose(found[e], S, rtol=1e-5, atol=1e-5)
            S = np.exp(log[e])[..., None] * S + factor[n] * own[e]


@pytest.mark.parametrize("reverse", [False, True])
def test_inverse_where_its_powers_grow(reverse, interpreter):
    """Keys that repeat, no decay and beta of 2: powers of L reach 1e17, the inverse stays at 2."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 1, 64))
    k = jnp.asarray(np.broadcast_to(key / np.linalg.norm(key), (1, 64, 1, 64)), jnp.bfloat16)
    numbers = jnp.zeros((1, 64, 1), jnp.float32)
    with interpreter.on():
        found = inverses_of_chunks(reverse, False, 1, k, numbers, numbers + 2.0, None).inverse
    exact = np.asarray(k[0, :, 0], np.float64)
    i, j = np.indices((64, 64))
    L = np.where(i < j if reverse else i > j, 2 * exact @ exact.T, 0)
    expected = np.linalg.inv(np.eye(64) + L) - np.eye(64)
    error = np.linalg.norm(np.asarray(found[0, 0, 0], np.float64) - expected) / np.linalg.norm(expected)
    assert error < 3.5e-3


def test_inverses_in_turns(interpreter):
    """One program for all chunks, whose warpgroups take several each, with gates that are summed and a last chunk in part."""
    rng, (T, HK, H, K) = np.random.default_rng(1), (600, 1, 2, 64)
    k = rng.normal(size=(1, T, HK, K))
    k = jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), jnp.bfloat16)
    gates, beta = -rng.exponential(size=(1, T, H)), rng.uniform(size=(1, T, H))
    gates[0, 70:80, 1] = -np.inf
    padded = [jnp.asarray(np.pad(x, ((0, 0), (0, 40), (0, 0))), jnp.float32) for x in (gates, beta)]
    with interpreter.on():
        found = inverses_of_chunks(False, False, 1, k, *padded, None)
    gates, beta = (np.asarray(x, np.float64).reshape(10, 64, H) for x in padded)
    exact = np.pad(np.asarray(k[0, :, 0], np.float64), ((0, 40), (0, 0))).reshape(10, 64, K)
    sums = np.cumsum(np.maximum(gates, LOG_OF_ZERO), 1)
    for c, h in np.ndindex(10, H):
        between = np.where(np.tri(64, k=-1) > 0, sums[c, :, None, h] - sums[c, None, :, h], -np.inf)
        L = beta[c, :, None, h] * (exact[c] @ exact[c].T) * np.exp(between)
        expected = np.linalg.inv(np.eye(64) + L) - np.eye(64)
        assert np.linalg.norm(np.asarray(found.inverse[0, c, h], np.float64) - expected) < 3.5e-3 * np.linalg.norm(
            expected
        )
        within, leaving = np.exp(sums[c, :, h]), np.exp(sums[c, -1, h] - sums[c, :, h])
        factors = beta[c, :, h], beta[c, :, h] * within, leaving, within, sums[c, :, h] / np.log(2)
        np.testing.assert_allclose(found.factors[0, c, h], factors, rtol=2e-4, atol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("B, T, pieces", [(8, 65, 1), (8, 333, 3), (4, 66, 1), (2, 68, 1), (2, 1500, 4), (16, 2047, 1)])
def test_every_segment_begins_behind_the_chunk_of_a_reset(B, T, pieces, reverse):
    """Segments cover every chunk once, and the first segment of a sequence follows the chunk with its reset, in scan order. That
    chunk alone gives the state that enters."""
    x = jnp.zeros((B, T, 1, 64), jnp.bfloat16)
    r = bind(x, x, x, g=x[..., 0], reverse=reverse)
    p = JoinedLayout(r, Route.of(r, HopperConfig(parts=pieces)))
    joined = p.joined
    assert joined.T % 8 == 0 and p.chunks == -(-joined.T // 64)
    for adjoint in (False, True):
        table = p.table_of(adjoint).reshape(p.N, joined.number, pieces, 4)
        for row, segments in enumerate(table.reshape(p.N, -1, 4)):
            covered = [first + i for _, first, count, _ in segments for i in range(count)]
            assert covered == list(range(p.chunks)) and set(segments[:, 0]) == {row}
        own = p.whole_segments(adjoint, last=False).reshape(p.N, joined.number, pieces, 5)
        assert (own[..., 4] == adjoint).all()
        downwards = p.descending(adjoint)
        ends = own[:, :, 0 if downwards else -1]
        for n in range(joined.number):
            follower = n - 1 if downwards else n + 1
            if not 0 <= follower < joined.number:
                assert (ends[:, n, 2] == 0).all()
                continue
            # of the two sequences, the reset of the one that the recurrence reaches later
            chunk = joined.resets[min(n, follower) + (not reverse)] // 64
            assert (ends[:, n, 1:3] == (chunk, 1)).all()
            first, count = table[:, follower, -1 if downwards else 0, 1:3].T
            assert ((first + count if downwards else first - 1) == chunk).all()


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
def test_resets_of_joined_rows_are_known_while_tracing(reverse):
    x = jnp.zeros((16, 333, 1, 72), jnp.bfloat16)
    r = bind(x, x, x, gk=x, reverse=reverse)
    p = JoinedLayout(r, Route.of(r, HopperConfig()))
    segments = p.joined.row.segments
    assert segments is not None
    np.testing.assert_array_equal(p.newest, newest_resets(segments.resets, reverse))
