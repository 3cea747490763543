"""Softmax attention over chosen blocks, beside loops in float64 that read their definition."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax._src.kernels.common.softmax import ReadBlocks
from glax.nn import choice as module
from glax.nn.choice import Choice, block_starts
from glax.nn.layer import from_pool, into_pool, parallel_rows, token_rows

SIZE, BEST, HEADS = 3, 2, 4
WHOLE = SIZE * BEST + SIZE - 1  # up to so many tokens, all are read


def drawn(seed: int, *rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = dict(q=(4, 6), k=(2, 6), v=(2, 5), query=(HEADS, 7), key=(7,), weight=(HEADS,))
    return {name: rng.standard_normal((*rows, *shape)).astype(np.float32) for name, shape in shapes.items()}


def choice_of(x, weighted: bool = False) -> Choice:
    def pool(keys, position):
        return keys.mean(-2) + 0.1 * position[..., None]

    weight = jnp.asarray(x["weight"]) if weighted else None
    return Choice(jnp.asarray(x["query"]), jnp.asarray(x["key"]), SIZE, BEST, pool, weight)


def by_loops(x, weighted: bool = False) -> np.ndarray:
    """The outputs of one sequence, [T, 4, 5]."""
    x = {name: value.astype(np.float64) for name, value in x.items()}
    T = len(x["q"])
    pooled = [x["key"][i : i + SIZE].mean(0) + 0.1 * i for i in range(0, T - SIZE + 1, SIZE)]
    found = np.zeros((T, 4, 5))
    for t in range(T):
        count = (t + 1) // SIZE
        weight = x["weight"][t] if weighted else np.ones(HEADS)
        scores = [weight @ np.maximum(x["query"][t] @ block, 0) for block in pooled[:count]]
        best = sorted(range(count), key=lambda b: -scores[b])[:BEST]
        read = [s for b in best for s in range(b * SIZE, (b + 1) * SIZE)] + list(range(count * SIZE, t + 1))
        for h in range(4):
            logits = x["k"][read, h // 2] @ x["q"][t, h] * 6**-0.5
            weights = np.exp(logits - logits.max())
            found[t, h] = weights @ x["v"][read, h // 2] / weights.sum()
    return found


def attend(x, rows, cache=None):
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    return rows.attend(q, k, v, cache or {}, None, None, choice=choice_of(x))


def cache_of(N: int, L: int) -> dict:
    shapes = dict(key=(2, 6), value=(2, 5), index=(1, 7))
    arrays = {name: jnp.zeros((N, L, *shape)) for name, shape in shapes.items()}
    return arrays | dict(length=jnp.zeros(N, jnp.int32))


def part(x, *at):
    return {name: value[at] for name, value in x.items()}


@pytest.fixture(params=[False, True])
def scores(request, monkeypatch):
    """All rows together, and few at a time."""
    if request.param:
        monkeypatch.setattr(module, "SCORES", 1000)
        monkeypatch.setattr(module, "ROWS", 4)


@jax.jit
def step(x, pool):
    """The outputs of one token of the sequences in slots 2 and 0, beside a row that is no sequence."""
    o, pool = attend(x, token_rows(jnp.array([2, 0, -1]), 3, pool, "pool"), pool)
    return o[:2], pool


# Bits 31 and 32 lie in two words, and 200 tokens are more than one block of rows and of keys.
@pytest.mark.parametrize("T", [1, SIZE, WHOLE, WHOLE + 1, 25, 32 * SIZE - 1, 32 * SIZE + 1, 200])
def test_whole_sequences(T, scores):
    x = drawn(T, 2, T)
    o, cache = jax.jit(lambda x: attend(x, parallel_rows((2, T), None)))(x)
    np.testing.assert_allclose(o, [by_loops(part(x, b)) for b in range(2)], atol=2e-6)
    np.testing.assert_array_equal(cache["index"][:, :, 0], x["key"])


def test_heads_with_weights_of_both_signs(scores):
    """In a whole batch, in packed rows over caches and in steps; the caches hold keys whose first channels are the values."""
    T, x = 25, drawn(7, 2, 25)
    x["k"] = np.repeat(x["k"][..., :1, :], 2, -2)
    x["v"] = x["k"][..., :5]
    want = [by_loops(part(x, b), weighted=True) for b in range(2)]

    @jax.jit
    def whole(x):
        one = x["k"][..., :1, :]
        return parallel_rows((2, T), None).attend(
            x["q"], x["k"], x["v"], {}, None, None, one, choice=choice_of(x, weighted=True)
        )

    @jax.jit
    def continued(x, cache, cuts):
        """Read packed rows, or with no cuts a token of each sequence."""
        rows = token_rows(None, 2, cache, "cache") if cuts is None else parallel_rows((len(x["q"]),), cuts)
        key = x["k"][:, :1]
        return rows.attend(x["q"], key, key[..., :5], cache, None, None, choice=choice_of(x, weighted=True))

    o, _ = whole(x)
    np.testing.assert_allclose(o, want, atol=2e-6)

    cache = dict(key=jnp.zeros((2, T, 1, 6)), index=jnp.zeros((2, T, 1, 7)), length=jnp.zeros(2, jnp.int32))
    first, found = 13, []
    packed = {name: value.reshape(-1, *value.shape[2:]) for name, value in part(x, slice(None), slice(first)).items()}
    o, cache = continued(packed, cache, jnp.array([0, first, 2 * first]))
    found.append(o.reshape(2, first, 4, 5))
    for t in range(first, T):
        o, cache = continued(part(x, slice(None), t), cache, None)
        found.append(o[:, None])
    np.testing.assert_allclose(np.concatenate(found, 1), want, atol=2e-6)


def test_segments_and_padding(scores):
    lengths, x = (1, WHOLE + 2, 2, 15, WHOLE), drawn(0, 1, 40)
    ids = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [np.full(40 - sum(lengths), 9)])[None]
    x["key"][0, sum(lengths) :] = np.nan  # padding
    o, _ = jax.jit(lambda x: attend(x, parallel_rows((1, 40), None, jnp.asarray(ids), 9)))(x)
    cuts = np.cumsum((0, *lengths))
    for begin, end in itertools.pairwise(cuts):
        want = by_loops(part(x, 0, slice(begin, end)))
        np.testing.assert_allclose(o[0, begin:end], want, atol=2e-6)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("lengths", [(4, 0, WHOLE + 5, 1, WHOLE, 20), (0, 140, 1, 0, 96, 2)], ids=["short", "long"])
def test_packed_sequences(lengths, is_cached, scores):
    cuts = np.cumsum((0, *lengths))
    T, x = cuts[-1], drawn(1, cuts[-1])
    rows = parallel_rows((T,), jnp.asarray(cuts))
    o, cache = attend(x, rows, cache_of(len(lengths), max(lengths) + 5) if is_cached else None)
    for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
        np.testing.assert_allclose(o[begin:end], by_loops(part(x, slice(begin, end))), atol=2e-6)
        np.testing.assert_array_equal(cache["index"][n, : end - begin, 0], x["key"][begin:end])


@pytest.mark.parametrize("seen", [2, WHOLE - 1, 17])
def test_a_prompt_that_goes_on_from_slots_and_then_by_steps(seen):
    x, more, T = drawn(seen, 2, 30), 4, 30
    pool = cache_of(4, T)
    pool["key"] = pool["key"].at[1].set(jnp.nan)  # of another sequence
    slots = jnp.array([2, 0])

    @jax.jit
    def prefill(x, pool, fresh):
        length = x["q"].shape[1]
        rows = parallel_rows((2 * length,), jnp.array([0, length, 2 * length]))
        packed = {name: value.reshape(-1, *value.shape[2:]) for name, value in x.items()}
        states, at = from_pool(pool, slots, 2, fresh)
        o, states = attend(packed, rows, states)
        return o.reshape(2, length, 4, 5), into_pool(pool, at, states)

    first, pool = prefill(part(x, slice(None), slice(seen)), pool, jnp.array([True, True]))
    second, pool = prefill(part(x, slice(None), slice(seen, seen + more)), pool, jnp.array([False, False]))
    found = [first, second]
    for t in range(seen + more, T):
        unused = {name: np.stack([*value[:, t], value[0, 0]]) for name, value in x.items()}
        o, pool = step(unused, pool)
        found.append(o[:, None])
    want = [by_loops(part(x, b)) for b in range(2)]
    np.testing.assert_allclose(np.concatenate(found, 1), want, atol=2e-6)


def test_continued_rows_of_a_batch():
    @jax.jit
    def goes_on(x, cache):
        return attend(x, parallel_rows(x["q"].shape[:2], None), cache)

    x = drawn(5, 2, 25)
    cache, found = cache_of(2, 25), []
    for begin, end in ((0, 4), (4, 18), (18, 25)):
        some = part(x, slice(None), slice(begin, end))
        o, cache = goes_on(some, cache)
        found.append(o)
    np.testing.assert_allclose(np.concatenate(found, 1), [by_loops(part(x, b)) for b in range(2)], atol=2e-6)


def test_rows_that_are_not_finite_reach_those_that_read_them_alone():
    x = drawn(2, 2, 25)
    x["v"][0, 4] = np.nan
    x["k"][0, 7, 1] = np.inf
    o, _ = jax.block_until_ready(jax.jit(lambda x: attend(x, parallel_rows((2, 25), None)))(x))  # which reads x itself
    x["v"][0, 4], x["k"][0, 7, 1] = 0, 0
    reads = by_loops(part(x, 0))
    assert np.isnan(o[0, 4:8, :2]).all()  # of the head of k and v that lie in the row's own tail, or in all it sees
    assert np.isfinite(o[0, :4]).all() and np.isfinite(o[1]).all()
    sound = np.isfinite(o[0])
    assert sound[8:].any()  # some rows choose other blocks
    np.testing.assert_allclose(np.where(sound, o[0], 0), np.where(sound, reads, 0), atol=2e-6)


def test_gradients_are_those_of_the_chosen_keys_and_none_of_the_index(scores):
    x = drawn(3, 1, 25)
    weights = jnp.sin(jnp.arange(25 * 4 * 5.0)).reshape(1, 25, 4, 5)

    def loss(x):
        return (weights * attend(x, parallel_rows((1, 25), None))[0]).sum()

    found = jax.jit(jax.grad(loss))(x)
    assert not found["query"].any() and not found["key"].any()
    for name in "qkv":
        step = 1e-4 * np.random.default_rng(0).standard_normal(x[name].shape)

        def moved(sign, name=name, step=step):
            changed = x | {name: x[name].astype(np.float64) + sign * step}
            return (np.asarray(weights[0], np.float64) * by_loops(part(changed, 0))).sum()

        np.testing.assert_allclose((found[name] * step).sum(), (moved(1) - moved(-1)) / 2, rtol=2e-3)


def test_gradients_in_bfloat16_are_added_over_parts_of_the_rows_in_float32(monkeypatch):
    x = jax.tree.map(jnp.asarray, drawn(4, 1, 150))
    weights = jnp.sin(jnp.arange(150 * 4 * 5.0)).reshape(1, 150, 4, 5)

    def gradient(dtype, scores):
        monkeypatch.setattr(module, "SCORES", scores)

        def loss(floats):
            o, _ = attend(x | {name: y.astype(dtype) for name, y in floats.items()}, parallel_rows((1, 150), None))
            return (weights * o.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss))({name: x[name] for name in "qkv"})

    want = gradient(jnp.float32, 2**26)
    for scores in (2**26, 2400):
        found = gradient(jnp.bfloat16, scores)
        for name, y in found.items():
            assert np.linalg.norm(y - want[name]) < 0.01 * np.linalg.norm(want[name]), (scores, name)


def test_a_row_that_is_not_finite_reaches_no_gradient_of_another_sequence():
    x = jax.tree.map(jnp.asarray, drawn(6, 1, 50))
    ids = jnp.asarray(np.repeat([[0, 1]], 25, 1))

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: jnp.square(attend(x, parallel_rows((1, 50), None, ids))[0]).sum())(x)

    clean = gradient(x)
    found = gradient(x | dict(q=x["q"].at[0, 7].set(jnp.nan), v=x["v"].at[0, 20].set(jnp.inf)))
    for name in "qkv":
        np.testing.assert_allclose(found[name][0, 25:], clean[name][0, 25:], atol=2e-6)


def test_of_equal_scores_the_first_count():
    choice = choice_of(drawn(0, 1, 9))
    at = choice.best_blocks(jnp.array([0.0, 2.0, 0.0, 2.0, 2.0]), jnp.array([True, True, True, True, False]))
    np.testing.assert_array_equal(at, [1, 3])
    at = choice.best_blocks(jnp.zeros(4), jnp.array([False, True, True, True]))
    np.testing.assert_array_equal(at, [1, 2])
    at = choice.best_blocks(jnp.array([3.0, jnp.nan, 1.0]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(at, [1, 0])
    at = choice.best_blocks(jnp.array([-1.0, -jnp.inf, -3.0]), jnp.array([False, True, True]))
    np.testing.assert_array_equal(at, [2, 1])  # below 0, where heads have weights
    at = choice.best_blocks(jnp.zeros(3), jnp.array([False, True, False]))
    np.testing.assert_array_equal(at, [1, 3])  # 3: none


@pytest.mark.parametrize("N", [0, 2])
def test_rows_without_tokens(N):
    x = drawn(0, 0)
    o, cache = attend(x, parallel_rows((0,), jnp.zeros(N + 1, jnp.int32)))
    assert o.shape == (0, 4, 5) and cache["index"].shape == (N, 0, 1, 7)
    o, _ = attend(x, parallel_rows((0,), jnp.zeros(N + 1, jnp.int32)), cache_of(N, 30))
    assert o.shape == (0, 4, 5)


def test_what_a_choice_cannot_be_beside_is_an_error():
    x, rows = drawn(0, 1, 9), parallel_rows((1, 9), None)
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    with pytest.raises(ValueError, match="window must be None where rows choose the keys that they read, got 4"):
        rows.attend(q, k, v, {}, 4, None, choice=choice_of(x))


def test_indices_of_64_bits_raise_no_warning():
    T, x = 33 * SIZE, drawn(8, 1, 33 * SIZE)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        o, _ = attend(x, parallel_rows((1, T), None))
    np.testing.assert_allclose(o[0], by_loops(part(x, 0)), atol=2e-6)


def test_a_block_without_a_bit_is_not_read():
    blocks = ReadBlocks(jnp.full((1, 2), -1), 2)  # of 64 blocks
    found = blocks.hold(jnp.array([3]), jnp.array([[0, 3, 130, 131, 1000]]))
    np.testing.assert_array_equal(found, [[True, True, True, False, False]])


def test_blocks_begin_anew_in_every_sequence():
    begin = jnp.array([[0, 0, 0, 0, 4, 4, 6, 6, 6, 6]])
    np.testing.assert_array_equal(block_starts(begin, 2), [[0, 2, 4, 6, 8]])
    np.testing.assert_array_equal(block_starts(begin, 3), [[0, 6, 10]])
