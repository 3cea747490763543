"""Softmax attention over intervals of keys: values and gradients against sums in float64, poisoned rows, and costs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax._src.kernels.common.softmax import Intervals
from glax._src.kernels.xla import softmax
from glax._src.solve import softmax as solve
from glax.nn import Attention, MultiHeadLatentAttention
from glax.nn.passes import Parallel

H, KV, D, V = 4, 2, 6, 5
CUTS = np.array([0, 9, 9, 31, 47, 61])  # of 64 rows: the last three are padding
T, N, L = 64, len(CUTS) - 1, 40


def naive(q, k, v, first, last, d_o):
    """Return o, dq, dk and dv in float64, row by row and head by head."""
    q, k, v, d_o = (np.asarray(x, np.float64) for x in (q, k, v, d_o))
    o, dq, dk, dv = np.zeros(d_o.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        read, g = slice(first[b, t], last[b, t] + 1), h * k.shape[2] // q.shape[2]
        if last[b, t] < first[b, t]:
            continue
        scores = k[b, read, g] @ q[b, t, h] * q.shape[-1] ** -0.5
        p = np.exp(scores - scores.max())
        p /= p.sum()
        o[b, t, h] = p @ v[b, read, g]
        d_p = v[b, read, g] @ d_o[b, t, h]
        d_scores = p * (d_p - p @ d_p) * q.shape[-1] ** -0.5
        dv[b, read, g] += np.outer(p, d_o[b, t, h])
        dk[b, read, g] += np.outer(d_scores, q[b, t, h])
        dq[b, t, h] = d_scores @ k[b, read, g]
    return o, dq, dk, dv


def packed(window):
    """Return the intervals of rows that are packed by CUTS, and read their own sequence."""
    rows, own = np.arange(T), np.searchsorted(CUTS, np.arange(T), side="right") - 1
    first = np.maximum(CUTS[np.minimum(own, N - 1)], rows - (window or T) + 1)
    return first[None], np.where(rows < CUTS[-1], rows, -1)[None], T


def cached(window):
    """Return the intervals of the same rows where the keys of sequence n lie in rows n L to (n + 1) L behind 7 n others."""
    rows, own = np.arange(T), np.minimum(np.searchsorted(CUTS, np.arange(T), side="right") - 1, N - 1)
    positions = rows - CUTS[own] + 3 * own
    first, last = np.maximum(own * L, own * L + positions - (window or T) + 1), own * L + positions
    return first[None], np.where(rows < CUTS[-1], last, -1)[None], N * L


def batched(window):
    """Return the intervals of three rows of other lengths, one of which reads keys that lie behind it."""
    begins = np.array([0, 5, 20])[:, None]
    last = begins + np.arange(T)[None]
    return np.maximum(np.zeros_like(last), last - (window or 2 * T) + 1), last, T + 20


FORMS = {
    "whole": (solve.attend_whole, packed),
    "blocks": (solve.attend_in_blocks, packed),
    "batch": (solve.attend_in_blocks, batched),
    "sequences": (lambda *x: solve.attend_by_sequence(*x, jnp.asarray(CUTS)), cached),
}


def inputs(first, S, seed=0):
    draw = np.random.default_rng(seed)
    B = len(first)
    shapes = ((B, T, H, D), (B, S, KV, D), (B, S, KV, V), (B, T, H, V))
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.fixture
def small_blocks(monkeypatch):
    """Divide even the short rows of these tests."""
    monkeypatch.setattr(softmax, "ROWS", 16)
    monkeypatch.setattr(softmax, "KEYS", 24)


@functools.cache
def compiled(form, window):
    attend, intervals = FORMS[form]
    first, last, _ = (jnp.asarray(x) for x in intervals(window))

    @jax.jit
    def run(q, k, v, d_o):
        o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, Intervals(first, last), None), q, k, v)
        return o, *pull(d_o)

    return run


def values_and_gradients(form, window, *arrays):
    return jax.tree.map(np.asarray, compiled(form, window)(*arrays))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_sums_in_float64(small_blocks, form, window):
    first, last, S = FORMS[form][1](window)
    arrays = inputs(first, S)
    found = values_and_gradients(form, window, *arrays)
    for name, got, want in zip(("o", "dq", "dk", "dv"), found, naive(*arrays[:3], first, last, arrays[3]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_reaches_the_rows_that_read_it_alone(small_blocks, form):
    first, last, S = FORMS[form][1](None)
    clean = inputs(first, S)
    b, t = len(first) - 1, 20
    key = last[b, t]
    reads = (first <= key) & (last >= key) & (np.arange(len(first)) == b)[:, None]  # rows that read the key of row t
    keys = np.arange(S)[None]
    same = np.zeros((len(first), S), bool)  # keys whose gradients have terms of a row that reads `key`
    for row in np.argwhere(reads):
        same[row[0]] |= ((keys >= first[tuple(row)]) & (keys <= last[tuple(row)]))[0]
    own = np.zeros((len(first), T), bool)
    own[b, t] = True
    of_row = (np.arange(len(first)) == b)[:, None] & (keys >= first[b, t]) & (keys <= last[b, t])
    # by input: its poisoned row, the rows of o and dq that may be NaN, and those of dk and dv
    cases = {0: ((b, t), own, of_row), 1: ((b, key), reads, same), 2: ((b, key), reads, same), 3: ((b, t), own, of_row)}
    wanted = values_and_gradients(form, None, *clean)
    for (which, (at, rows, key_rows)), value in itertools.product(cases.items(), (np.nan, np.inf, -np.inf)):
        arrays = [x.copy() for x in clean]
        arrays[which][at] = value
        found = values_and_gradients(form, None, *arrays)
        for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
            spoiled = key_rows if i >= 2 else rows
            np.testing.assert_array_equal(got[~spoiled], want[~spoiled], err_msg=f"input {which}, result {i}")
            if i == 0 and which != 3:
                assert not np.isfinite(got[spoiled]).any()
            if i > 0:
                assert np.isnan(got[spoiled]).any(-1).any(-1).all()


def test_scores_that_overflow_reach_no_other_row(small_blocks):
    first, _, S = packed(None)
    q, k, v, d_o = inputs(first, S)
    wanted = values_and_gradients("blocks", None, q, k, v, d_o)
    q[0, 20], k[0, 20] = 1e30, 1e30
    found = values_and_gradients("blocks", None, q, k, v, d_o)
    others = np.r_[0:9, 31:64]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got[:, others], want[:, others])
    np.testing.assert_array_equal(found[0][0, 9:20], wanted[0][0, 9:20])
    assert np.isnan(found[0][0, 20]).all()


def test_garbage_behind_the_rows_of_a_cache_is_not_read():
    layer = Attention(16, num_heads=4, num_kv_heads=2, window=6, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 13, 16))

    @nnx.jit
    def run(layer, x, state):
        y, state = layer(x[:, :12], state)
        return y, *layer.step(x[:, 12], state)

    clean = layer.initial_state(3, 20)
    dirty = {name: x if name == "length" else jnp.full_like(x, jnp.nan) for name, x in clean.items()}
    for got, want in zip(run(layer, x, dirty)[:2], run(layer, x, clean)[:2], strict=True):
        np.testing.assert_array_equal(got, want)


# ---- what it costs -----------------------------------------------------------------------------------------------------


def temporary_bytes(attend, *arguments) -> int:
    return jax.jit(attend).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_memory_of_packed_rows_grows_with_the_rows_and_not_with_their_square(gradient):
    def of_rows(q, k, v, cuts):
        o, _ = Parallel((q.shape[0],), cuts).attend(q, k, v, {}, None, None)
        return o.sum()

    found = []
    for rows in (2048, 8192):
        x = jax.ShapeDtypeStruct((rows, 1, 4), jnp.float32)
        run = jax.grad(of_rows, (0, 1, 2)) if gradient else of_rows
        found.append(temporary_bytes(run, x, x, x, jax.ShapeDtypeStruct((9,), jnp.int32)))
    assert found[1] < 5 * found[0]
    assert found[1] < 8192**2  # a byte for each pair of rows


@pytest.fixture
def parts_read(monkeypatch):
    """Return a function that returns how many parts of `ROWS` keys a call reads, for blocks of as many rows."""
    monkeypatch.setattr(softmax, "KEYS", softmax.ROWS)
    read, sliced = [], jax.lax.dynamic_slice_in_dim

    def counted(x, *arguments, **options):
        jax.debug.callback(lambda: read.append(1))
        return sliced(x, *arguments, **options)

    monkeypatch.setattr(jax.lax, "dynamic_slice_in_dim", counted)

    def count(run, *arguments) -> int:
        read.clear()
        jax.block_until_ready(jax.jit(run)(*arguments))
        jax.effects_barrier()
        return len(read) // 2  # of keys and of values

    return count


def test_the_work_of_packed_rows_is_the_sum_of_the_squares_of_their_sequences(parts_read):
    """4096 rows as one sequence and as 16, of two blocks each."""

    def run(x, cuts):
        return Parallel((4096,), cuts).attend(x, x, x, {}, None, None)[0]

    x, blocks = jnp.ones((4096, 1, 2)), 4096 // softmax.ROWS
    assert parts_read(run, x, jnp.array([0, *[4096] * 16])) == blocks * (blocks + 1) // 2
    assert parts_read(run, x, jnp.arange(0, 4097, 256)) == 16 * 3


def test_a_prefill_reads_the_used_rows_of_its_own_caches(parts_read):
    """Eight prompts of one block, into caches of 4096 rows of which 200 are used."""

    def run(x, cuts, cache):
        return Parallel((1024,), cuts).attend(x, x, x, cache, None, None)[0]

    pool = jnp.ones((8, 4096, 1, 2))
    cache = dict(key=pool, value=pool, length=jnp.full(8, 200))
    assert parts_read(run, jnp.ones((1024, 1, 2)), jnp.arange(0, 1025, 128), cache) == 8 * 3


def test_a_prefill_reads_the_caches_of_its_own_sequences():
    """Scores of 1024 rows by 8 caches of 4096 keys would take 128 MiB a head."""

    def prefill(q, k, v, cache, cuts):
        return Parallel((q.shape[0],), cuts).attend(q, k, v, cache, None, None)

    x, cuts = jax.ShapeDtypeStruct((1024, 1, 4), jnp.float32), jax.ShapeDtypeStruct((9,), jnp.int32)
    pool = jax.ShapeDtypeStruct((8, 4096, 1, 4), jnp.float32)
    cache = dict(key=pool, value=pool, length=jax.ShapeDtypeStruct((8,), jnp.int32))
    assert temporary_bytes(prefill, x, x, x, cache, cuts) < 4 * 2**20


SLOTS = np.array([3, 0, 7, 9])  # of a pool of 9: the last is no row


@pytest.mark.parametrize("is_latent", [False, True], ids=["values", "latent"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_step_reads_the_rows_of_its_slots_in_parts(monkeypatch, window, is_latent):
    monkeypatch.setattr(softmax, "STEP_KEYS", 16)
    draw, length = np.random.default_rng(1), np.array([37, 4, 50, 0])
    q, k, v, d_o = (
        draw.standard_normal(x).astype(np.float32) for x in ((4, 1, H, D), (9, 64, KV, D), (9, 64, KV, V), (4, 1, H, V))
    )
    last = np.where(SLOTS < 9, length, -1)[:, None]
    first = np.maximum(last - (window or 64) + 1, 0)

    def attend(q, k, v):
        seen = Intervals(jnp.asarray(first), jnp.asarray(last))
        values = None if is_latent else v
        return softmax.attend_step(q, k, values, seen, None, width=V, slots=jnp.asarray(SLOTS))

    o, pull = jax.vjp(jax.jit(attend), q, k, v)
    rows = np.minimum(SLOTS, 8)
    values = k[..., :V] if is_latent else v
    want, dq, dk, dv = naive(q, k[rows], values[rows], first, last, d_o)
    if is_latent:
        dk[..., :V] += dv
    pool = np.zeros(k.shape)
    pool[SLOTS[:3]] = dk[:3]
    found = pull(d_o)
    for name, got, expected in (("o", o, want), ("dq", found[0], dq), ("dk", found[1], pool)):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("size", [4, 6, 16], ids="pool of {}".format)
@pytest.mark.parametrize("kind", ["attention", "latent"])
def test_the_memory_of_a_step_does_not_grow_with_the_cache(kind, size):
    """A copy of a cache, or of the rows of its slots, would take 16 times as much for the longer one."""
    common = dict(num_heads=4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    sizes = dict(latent_width=64, head_width=32, shared_width=16)
    layer = Attention(64, **common) if kind == "attention" else MultiHeadLatentAttention(64, **sizes, **common)
    graph, params = nnx.split(layer)

    def step(params, x, pool, slots):
        return nnx.merge(graph, params).step(x, pool, slots)

    found = []
    for length in (1024, 16384):
        pool = layer.initial_state(size, max_length=length)
        run = jax.jit(step, donate_argnums=2).lower(params, jnp.ones((4, 64)), pool, jnp.arange(4)).compile()
        found.append(run.memory_analysis().temp_size_in_bytes)
    assert found[1] <= found[0] + 1024, found
