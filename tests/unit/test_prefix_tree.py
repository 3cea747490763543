"""`glax.serving.PrefixCache` and `PrefixStore`: prefixes that requests share, in pools and in whole models."""

import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax
from glax import serving
from glax.models import from_pretrained
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast
FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"


def stored(cache: serving.PrefixCache, tokens: list[int]) -> serving.Prefix:
    """The prefix of all whole blocks of the tokens, stored and in use."""
    prefix = cache.match([*tokens, 0])
    rest = tokens[prefix.length : len(tokens) // cache.every * cache.every]
    cache.insert(prefix, rest, cache.reserve(len(rest) // cache.every))
    return prefix


def test_the_longest_stored_prefix_is_found_and_leaves_a_token_to_read():
    cache = serving.PrefixCache(2, range(10, 16))
    first = stored(cache, [1, 2, 3, 4, 5])
    assert (first.length, first.slots, first.slot) == (4, [10, 11], 11)
    assert cache.match([1, 2, 3, 4]).slots == [10]
    assert cache.match([1, 2, 3, 4, 9]).slots == [10, 11]
    assert cache.match([1, 2, 9, 9, 9]).slots == [10]
    assert cache.match(np.array([1, 2, 3, 4, 5], np.uint16)).length == 4
    nothing = cache.match([2, 1, 3])
    assert (nothing.length, nothing.slots, nothing.slot) == (0, [], -1)
    assert cache.match([]).length == 0
    assert len(cache) == 2


def test_the_least_recently_used_leaf_that_is_not_in_use_is_dropped():
    cache = serving.PrefixCache(1, range(4), slot_bytes=100, budget=399)
    assert cache.capacity == 3
    a, b = stored(cache, [1, 2]), stored(cache, [3])
    assert cache.nbytes == 300
    assert cache.reserve(1) == [-1]  # all are in use
    cache.release(a)
    cache.release(b)
    cache.release(cache.match([1, 2, 0]))  # now [3] is the oldest
    (slot,) = cache.reserve(1)
    assert slot == b.slot and not cache.match([3, 0]).slots and cache.match([1, 2, 0]).length == 2
    cache.give_back([slot])
    cache.release(cache.match([1, 2, 0]))
    assert len(cache) == 2


def test_a_block_with_followers_stays_until_they_are_dropped():
    cache = serving.PrefixCache(1, range(3))
    cache.release(stored(cache, [1, 2, 3]))
    cache.release(cache.match([1, 0]))
    assert cache.reserve(2) == [2, 1]
    assert cache.match([1, 2, 3]).slots == [0]


def test_a_block_that_two_requests_read_at_a_time_is_stored_once():
    cache = serving.PrefixCache(1, range(4))
    a, b = cache.match([1, 2]), cache.match([1, 2])
    slots = cache.reserve(1), cache.reserve(1)
    cache.insert(a, [1], slots[0])
    cache.insert(b, [1], slots[1])
    assert a.slots == b.slots == slots[0] and len(cache) == 1
    cache.release(a)
    assert [slot for slot in cache.reserve(9) if slot >= 0] == [1, 2, 3]  # b is in use still


def test_blocks_without_a_slot_are_not_stored():
    cache = serving.PrefixCache(1, range(2))
    prefix = cache.match([1, 2, 3, 4])
    slots = cache.reserve(3)
    assert slots == [0, 1, -1]
    cache.insert(prefix, [1, 2, 3], slots)
    assert prefix.length == 2
    other = serving.PrefixCache(1, ())
    prefix = other.match([1, 2])
    other.insert(prefix, [1], other.reserve(1))
    assert prefix.length == 0


def test_wrong_uses_are_errors():
    cache = serving.PrefixCache(2, range(4))
    prefix = cache.match([1, 2, 3])
    (slot,) = cache.reserve(1)
    with pytest.raises(ValueError, match="tokens must be 1 blocks of 2, one for each slot, got 3"):
        cache.insert(prefix, [1, 2, 3], [slot])
    with pytest.raises(ValueError, match="slots must be reserved and stand once, got 3"):
        cache.insert(prefix, [1, 2], [3])
    with pytest.raises(ValueError, match="slots must be reserved and stand once, got 0"):
        cache.give_back([slot, slot])
    cache.release(prefix)
    with pytest.raises(ValueError, match="prefix must be in use, got one that was released"):
        cache.release(prefix)
    with pytest.raises(TypeError, match="tokens must be a sequence of integers, got float64"):
        cache.match([0.5, 1])
    with pytest.raises(ValueError, match="tokens must be from 0 on, got -1"):
        cache.match([-1, 1, 2])
    with pytest.raises(ValueError, match=r"slots must not repeat, got \[1, 1\]"):
        serving.PrefixCache(2, [1, 1])
    with pytest.raises(ValueError, match="budget needs slot_bytes, the bytes of one slot, got 0"):
        serving.PrefixCache(2, [1], budget=7)


def test_random_requests_get_their_own_prefixes_and_leak_nothing():
    """Against a model of the cache: which tokens the state in each slot is behind."""
    rng, cache, behind, running = random.Random(0), serving.PrefixCache(2, range(6)), {}, []
    for _ in range(4000):
        if running and rng.random() < 0.5:
            cache.release(running.pop(rng.randrange(len(running))))
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        prefix = cache.match(tokens)
        for i, slot in enumerate(prefix.slots, start=1):
            assert behind[slot] == tokens[: 2 * i]
        whole = (len(tokens) - prefix.length) // 2
        slots = cache.reserve(whole)
        start = prefix.length
        if rng.random() < 0.2:  # the call failed
            cache.give_back(slots)
        else:
            cache.insert(prefix, tokens[start : start + 2 * whole], slots)
            for i, slot in enumerate(prefix.slots, start=1):
                if slot in slots:
                    behind[slot] = tokens[: 2 * i]
                assert behind[slot] == tokens[: 2 * i]
        running.append(prefix)
        assert len(cache.droppable) <= cache.capacity
    for prefix in running:
        cache.release(prefix)
    assert not cache.reserved and sorted(cache.reserve(9)[:6]) == list(range(6))


def test_prompts_go_on_from_stored_states_of_a_pool():
    """Two requests with one prefix, in a plain pool and in a StatePool: outputs and states are those of whole prompts."""
    n, H, K, V = 64, 2, 6, 5
    x = inputs(Case("", T=200, heads=(2, 2, 2), K=K, V=V, state_dtype=None), "mild")
    rows = {name: y[0] for name, y in x.items()}
    ids = list(range(200))
    want = glax.recurrent(**x)

    def part(*spans):
        return {name: jnp.concatenate([y[low:high] for low, high in spans]) for name, y in rows.items()}

    def plain(pool, slots, tokens, **options):
        return glax.prefill_into(pool, slots, **tokens, **options)

    for prefill, pool in (
        (plain, jnp.zeros((8, H, K, V))),
        (serving.StatePool.prefill, serving.StatePool(8, H, (K, V), replay=4, form="key")),
    ):
        if prefill is not plain:

            def prefill(pool, slots, tokens, **options):
                return pool.prefill(slots, **tokens, **options)

        cache = serving.PrefixCache(n, range(4, 8))
        first = cache.match(ids)
        slots = cache.reserve(2)
        _, pool = prefill(
            pool, jnp.array([0]), part((0, 150)), cu_seqlens=jnp.array([0, 150]), fresh=jnp.array([True]),
            states_every=n, state_slots=jnp.array(slots),
        )  # fmt: skip
        cache.insert(first, ids[:128], slots)
        second, third = cache.match(ids), cache.match(ids[:130])
        assert second.slot == third.slot == slots[1]
        output, pool = prefill(
            pool, jnp.array([second.slot, third.slot]), part((128, 200), (128, 130)), cu_seqlens=jnp.array([0, 72, 74]),
            write_slots=jnp.array([1, 2]),
        )  # fmt: skip
        assert_close("output", output[:72], np.asarray(want.output[0, 128:]), 1e-5)
        assert_close("output", output[72:], np.asarray(want.output[0, 128:130]), 1e-5)
        states = pool if prefill is plain else pool.states_of()
        assert_close("state", states[1], np.asarray(want.final_state[0]), 1e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_hybrid_goes_on_from_a_stored_prefix(name):
    """Recurrent states, convolutions and pages of keys and values: logits are those of a request that read all its tokens."""
    model, every, longest = from_pretrained(FIXTURES / name), 4, 24
    store = serving.PrefixStore(model.initial_states, 5, every, longest)
    cache = serving.PrefixCache(every, range(5), slot_bytes=store.slot_bytes, budget=5 * store.slot_bytes)
    assert cache.capacity == 5 and any(store.paged) and not all(store.paged)
    prefill = nnx.jit(lambda model, *arguments: model.prefill(*arguments))
    save, load = quick_jit(serving.PrefixStore.save), quick_jit(serving.PrefixStore.load)
    tokens = np.random.default_rng(0).integers(1, model.vocabulary, 14).astype(np.int32)

    def read(pools, slot, low, high, fresh):
        padded = np.zeros(every, np.int32)
        padded[: high - low] = tokens[low:high]
        cuts = jnp.array([0, high - low])
        logits, pools = prefill(model, padded, pools, jnp.array([slot]), cuts, jnp.array([fresh]))
        return logits[: high - low], pools

    pools, prefix, want = model.initial_states(3, longest), cache.match(tokens), []
    for low in range(0, 14, every):
        high = min(low + every, 14)
        logits, pools = read(pools, 0, low, high, low == 0)
        want.append(logits)
        if high - low == every:
            slots = cache.reserve(1)
            store = save(store, pools, jnp.array([0]), jnp.array(slots), jnp.array([high]))
            cache.insert(prefix, tokens[low:high], slots)
    assert prefix.length == 12
    second = cache.match(tokens[:11])
    assert second.length == 8
    slots = np.full((2, 6), -1, np.int32)
    slots[0, :2] = second.slots
    before = pools
    pools = load(store, pools, jnp.array([2, -1]), slots)
    for leaf, old in zip(jax.tree.leaves(pools), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf[:2], old[:2])
    for low, high, logits in ((8, 12, want[2]), (12, 14, want[3])):
        got, pools = read(pools, 2, low, high, False)
        np.testing.assert_array_equal(got, logits)


def test_trees_and_shapes_are_checked():
    store = serving.PrefixStore(lambda batch, n: dict(key=jnp.zeros((batch, n, 2))), 4, 8, 32)
    with pytest.raises(ValueError, match=r"pools must be a tree as initial_states returns it, .*'key'.*, got"):
        store.save(jnp.zeros((3, 32, 2)), jnp.array([0]), jnp.array([0]), jnp.array([8]))
    with pytest.raises(ValueError, match="rows, slots must have one entry for each request"):
        store.load(dict(key=jnp.zeros((3, 32, 2))), jnp.array([0]), jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match="second axis alone grows with max_length=32, got shape"):
        serving.PrefixStore(lambda batch, n: jnp.zeros((batch, 2, n)), 4, 8, 32)


EVERY, ROWS, WIDTH = 4, 10, 2


def small_states(batch: int, length: int, dtype="float32", width: int = WIDTH) -> dict:
    return dict(key=jnp.zeros((batch, length, width), dtype), state=jnp.zeros((batch, 3), dtype))


def small_store_and_pools():
    """A store of 4 slots, and pools of 3 rows of 10 tokens, all of other numbers."""
    store, pools = serving.PrefixStore(small_states, 4, EVERY, ROWS), small_states(3, ROWS)
    rng = np.random.default_rng(0)
    store, pools = (
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree) for tree in (store, pools)
    )
    return store, pools


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_store_is_not_copied(dtype):
    store, pools = (
        serving.PrefixStore(lambda b, n: small_states(b, n, dtype), 4096, EVERY, ROWS),
        small_states(3, ROWS, dtype),
    )
    one = jnp.array([1])
    save = jax.jit(serving.PrefixStore.save, donate_argnums=0)
    memory = save.lower(store, pools, one, one, jnp.array([8])).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend does not report its memory")
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 4
    assert memory.alias_size_in_bytes >= store.slot_bytes * store.capacity


def test_traced_values_out_of_range_store_and_load_nothing():
    store, pools = small_store_and_pools()
    save, load = quick_jit(serving.PrefixStore.save), quick_jit(serving.PrefixStore.load)
    rows, slots = jnp.array([0, 1, 2, 0, 1, 2, -1, 3, 0, 1]), jnp.array([3, 0, 0, 0, 0, 0, 0, 0, -1, 4])
    ends = jnp.array([8, 0, 2, 6, 12, -4, 4, 4, 4, 4])
    new = save(store, pools, rows, slots, ends)
    key, state = (np.array(x) for x in store.leaves)
    key[3], state[3] = pools["key"][0, 4:8], pools["state"][0]
    np.testing.assert_array_equal(new.leaves[0], key)
    np.testing.assert_array_equal(new.leaves[1], state)

    got = load(store, pools, jnp.array([1, 0, 3, -1]), jnp.array([[2, -1], [-1, 1], [1, 1], [1, 1]]))
    key, state = np.array(pools["key"]), np.array(pools["state"])
    key[1, :4], state[1] = store.leaves[0][2], store.leaves[1][2]
    np.testing.assert_array_equal(got["key"], key)
    np.testing.assert_array_equal(got["state"], state)
    for slot in (4, -7):  # the prefix ends before it
        again = load(store, pools, jnp.array([1]), jnp.array([[2, slot]]))
        np.testing.assert_array_equal(again["key"], key)
        np.testing.assert_array_equal(again["state"], state)
    for none in (np.full((2, 2), -1), np.zeros((2, 0), int)):
        same = serving.PrefixStore.load(store, pools, np.array([0, 1]), none)
        np.testing.assert_array_equal(same["key"], pools["key"])
        np.testing.assert_array_equal(same["state"], pools["state"])


@pytest.mark.parametrize(
    ("rows", "slots", "text"),
    [
        ([0], [[4, -1]], "slots must be from -1 to 3, the last row of the store, got 4"),
        ([0], [[0, -2]], "slots must be from -1 to 3, the last row of the store, got -2"),
        ([0, 1], [[0, 1], [-1, 2]], "slots must have -1 behind a request's blocks alone, got -1 before 2"),
        ([3], [[0, 1]], "rows must be from -1 to 2, the last row of pools, got 3"),
        ([-2], [[0, 1]], "rows must be from -1 to 2, the last row of pools, got -2"),
        ([1, 1], [[0, 1], [2, 3]], "rows must not repeat, got 1 more than once"),
        ([0], [0, 1], "slots must be [N, J], got shape (2,)"),
        (0, [[0, 1]], "rows must be [N], got shape ()"),
        (
            [0],
            [[0, 1, 2]],
            "pools must have 12 rows of keys and values, 3 blocks of 4 tokens as slots say, got 10: pass larger pools, or "
            "fewer slots",
        ),
    ],
)
def test_known_values_that_load_cannot_take_are_errors(rows, slots, text):
    store, pools = small_store_and_pools()
    with pytest.raises(ValueError) as caught:
        store.load(pools, jnp.array(rows), jnp.array(slots))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("rows", "slots", "ends", "text"),
    [
        ([0], [4], [4], "slots must be from -1 to 3, the last row of the store, got 4"),
        ([0, 1], [2, 2], [4, 4], "slots must not repeat, got 2 more than once"),
        ([3], [0], [4], "rows must be from -1 to 2, the last row of pools, got 3"),
        ([0], [0], [6], "ends must be multiples of every=4, from 4 to 10, the rows of keys and values, got 6"),
        ([0], [0], [0], "ends must be multiples of every=4, from 4 to 10, the rows of keys and values, got 0"),
        ([0], [0], [12], "ends must be multiples of every=4, from 4 to 10, the rows of keys and values, got 12"),
        ([0], [0], [[4]], "ends must be [N], got shape (1, 1)"),
    ],
)
def test_known_values_that_save_cannot_take_are_errors(rows, slots, ends, text):
    store, pools = small_store_and_pools()
    with pytest.raises(ValueError) as caught:
        store.save(pools, jnp.array(rows), jnp.array(slots), jnp.array(ends))
    assert str(caught.value) == text


def test_pools_that_do_not_fit_the_store_are_errors():
    store, pools = small_store_and_pools()
    row, slot = jnp.array([0]), jnp.array([0])
    for other, error, text in (
        (
            small_states(3, ROWS, width=3),
            ValueError,
            "pools['key'] must be [3, tokens, 2] as initial_states returns it, got ",
        ),
        (
            small_states(3, ROWS, "bfloat16"),
            TypeError,
            "pools['key'] must be float32 as initial_states returns it, got bf",
        ),
        (
            pools | dict(state=jnp.zeros((2, 3))),
            ValueError,
            "pools['state'] must be [3, 3] as initial_states returns it, ",
        ),
    ):
        for call in (lambda x: store.save(x, row, slot, jnp.array([4])), lambda x: store.load(x, row, slot[None])):
            with pytest.raises(error) as caught:
                call(other)
            assert str(caught.value).startswith(text)
    short, slots = small_states(3, 7), jnp.array([[0, 1]])
    with pytest.raises(ValueError, match=r"pools must have 8 rows of keys and values, 2 blocks of 4 tokens .*, got 7"):
        jax.eval_shape(store.load, short, row, slots)
    fits = store.load(short, row, jnp.array([[3, -1]]))  # known slots count alone
    np.testing.assert_array_equal(fits["key"][0, :4], store.leaves[0][3])
    with pytest.raises(ValueError, match="ends must be multiples of every=4, from 4 to 7, the rows of keys and values"):
        store.save(short, row, slot, jnp.array([8]))
