"""States behind every n tokens, and their slots in a pool: recurrent, prefill_into and recurrent_verify."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import parallel
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast
CASE = Case("", T=200, heads=(4, 2, 1), K=6, V=5)


def arguments_of(**changes) -> dict:
    return inputs(dataclasses.replace(CASE, **changes), "mild")


def rows(arguments: dict, low: int, high: int) -> dict:
    return {name: x[0, low:high] for name, x in arguments.items() if name != "initial_state"}


def state_behind(arguments: dict, length: int, start=None, low: int = 0):
    own = {name: x[:, low : low + length] for name, x in arguments.items() if name != "initial_state"}
    return glax.recurrent(**own, initial_state=start).final_state[0]


def test_fields_shapes_and_dtypes():
    arguments = arguments_of(B=2)
    outputs = glax.recurrent(**arguments, states_every=64)
    assert outputs._fields == ("output", "final_state", "states")
    assert outputs.states.shape == (2, 3, 4, 6, 5)
    assert outputs.states.dtype == jnp.float32
    assert len(glax.recurrent(**arguments)) == 2
    half = glax.recurrent(**arguments, states_every=128, states_dtype="bfloat16").states
    assert half.dtype == jnp.bfloat16
    assert_close("states", half[:, 0], np.asarray(outputs.states[:, 1]), 4e-3)
    assert glax.recurrent(**arguments, states_every=256).states.shape == (2, 0, 4, 6, 5)
    assert len(glax.recurrent_attention(**arguments, states_every=64)) == 3
    packed = glax.recurrent(**rows(arguments, 0, 200), cu_seqlens=jnp.array([0, 70, 70, 200]), states_every=64)
    assert packed.states.states.shape == (3, 4, 6, 5)
    np.testing.assert_array_equal(packed.states.offsets, [0, 1, 1, 3])
    empty = glax.recurrent(
        *(x[:, :0] for x in (arguments[name] for name in ("query", "key", "value"))), states_every=64
    )
    assert empty.states.shape == (2, 0, 4, 6, 5)


def test_vmap_and_no_new_compile_when_documents_move():
    arguments = rows(arguments_of(), 0, 200)
    cuts = jnp.array([[0, 70, 70, 200], [0, 0, 190, 195]])
    traces = 0

    def run(cuts):
        nonlocal traces
        traces += 1
        return glax.recurrent(**arguments, cu_seqlens=cuts, states_every=64)

    jitted = jax.jit(run)
    each = [jax.tree.leaves(jitted(x)) for x in cuts]
    assert traces == 1
    mapped = jax.tree.leaves(quick_jit(jax.vmap(run))(cuts))
    for x, *ys in zip(mapped, *each, strict=True):
        assert_close("vmap", x, np.stack(ys), 1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_on_a_mesh(packed):
    mesh = jax.make_mesh((2, 2), ("b", "s"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    arguments = arguments_of(B=1 if packed else 2)
    options = dict(cu_seqlens=jnp.array([0, 70, 70, 200])) if packed else {}
    if packed:
        arguments.pop("initial_state")
    axes = dict(mesh=mesh, batch_axis="b", sequence_axis="s")
    got = quick_jit(lambda a: parallel.recurrent(**a, **options, **axes, states_every=64))(arguments)
    want = quick_jit(lambda a: glax.recurrent(**a, **options, states_every=64))(arguments)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("on a mesh", x, np.asarray(y), 5e-6)


def test_explain_says_why_it_is_solved_in_pieces():
    shape = jax.ShapeDtypeStruct((1, 200, 2, 8), jnp.float32)
    text = str(glax.explain(lambda x: glax.recurrent(x, x, x, states_every=64), shape))
    assert "not one call for all tokens: no kernel returns the states behind every 64 tokens" in text


def pool_of(seed: int = 3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(12, 4, 6, 5)), jnp.float32)


@pytest.mark.parametrize("traced", [False, True])
def test_prefill_reads_one_slot_and_writes_others(traced):
    """Three packed prompts and a null one: two go on from one prefix, one is fresh in a stale slot, one leaves no state.

    Slots that repeat are an error without write_slots.
    """
    pool, arguments = pool_of().at[7].set(jnp.nan), arguments_of()
    cuts = jnp.array([0, 130, 131, 195, 195])
    slots, write = jnp.array([2, 7, 2, -1]), jnp.array([5, 7, -1, 8])
    fresh, state_slots = jnp.array([False, True, False, False]), jnp.array([0, -1, 9])

    def run(pool, slots, write, fresh, state_slots):
        return glax.prefill_into(
            pool, slots, **rows(arguments, 0, 200), cu_seqlens=cuts, fresh=fresh, write_slots=write, states_every=64,
            state_slots=state_slots,
        )  # fmt: skip

    with pytest.raises(ValueError, match="slots must not repeat, got 2 more than once"):
        run(pool, slots, None, fresh, state_slots)
    output, new = (jax.jit(run) if traced else run)(pool, slots, write, fresh, state_slots)
    start = pool[slots[2]]
    want = {
        5: state_behind(arguments, 130, pool[2]),
        7: state_behind(arguments, 1, None, 130),
        0: state_behind(arguments, 64, pool[2]),
        9: state_behind(arguments, 64, start, 131),
    }
    for slot, state in want.items():
        assert_close(f"slot {slot}", new[slot], np.asarray(state), 2e-6)
    others = [slot for slot in range(12) if slot not in want]
    np.testing.assert_array_equal(new[jnp.array(others)], pool[jnp.array(others)])
    whole = glax.recurrent(**{name: x[None] for name, x in rows(arguments, 131, 195).items()}, initial_state=start)
    assert_close("output", output[131:195], np.asarray(whole.output[0]), 2e-6)
    assert not np.asarray(output[195:]).any()


def test_a_fresh_sequence_without_slots_is_read_and_its_pieces_are_stored():
    pool, arguments = pool_of(), arguments_of()
    output, new = glax.prefill_into(
        pool, jnp.array([2, -1, -1]), **rows(arguments, 0, 200), cu_seqlens=jnp.array([0, 70, 135, 200]),
        fresh=jnp.array([False, True, False]), write_slots=jnp.array([5, -1, 3]), states_every=64,
        state_slots=jnp.array([-1, 9, 1]),
    )  # fmt: skip
    whole = glax.recurrent(**{name: x[None] for name, x in rows(arguments, 70, 135).items()})
    assert_close("output", output[70:135], np.asarray(whole.output[0]), 2e-6)
    assert not output[135:].any()
    assert_close("piece", new[9], np.asarray(state_behind(arguments, 64, None, 70)), 2e-6)
    assert_close("final", new[5], np.asarray(state_behind(arguments, 70, pool[2])), 2e-6)
    np.testing.assert_array_equal(*(np.delete(x, (5, 9), axis=0) for x in (new, pool)))


def test_slots_out_of_range_touch_no_other_row():
    pool, arguments = pool_of(), arguments_of(B=2)

    def run(pool, slots, write, state_slots):
        batch = {name: x for name, x in arguments.items() if name != "initial_state"}
        return glax.prefill_into(
            pool, slots, **batch, write_slots=write, states_every=64, state_slots=state_slots
        )[1]  # fmt: skip

    new = jax.jit(run)(pool, jnp.array([0, 12]), jnp.array([99, 1]), jnp.array([-5, 12, 6, 2, 3, 4]))
    np.testing.assert_array_equal(np.delete(new, 6, axis=0), np.delete(pool, 6, axis=0))
    assert_close("slot 6", new[6], np.asarray(state_behind(arguments_of(B=2), 192, pool[0])), 2e-6)


def test_verify_leaves_the_state_behind_each_draft_token():
    pool, arguments = pool_of(), arguments_of(B=3, T=4)
    arguments.pop("initial_state")
    slots, state_slots = jnp.array([4, -1, 0]), jnp.array([[1, 2, -1, 4], [3, 5, 6, 7], [8, 9, 10, 11]])
    run = jax.jit(
        lambda pool, state_slots: glax.recurrent_verify(**arguments, state=pool, slots=slots, state_slots=state_slots)
    )
    output, draft, new = run(pool, state_slots)
    plain, plain_draft = glax.recurrent_verify(**arguments, state=pool, slots=slots)
    assert_close("output", output, np.asarray(plain), 2e-6)
    for b, slot in ((0, 4), (2, 0)):
        for t in range(4):
            if state_slots[b, t] >= 0:
                own = {name: x[b : b + 1, : t + 1] for name, x in arguments.items()}
                want = glax.recurrent(**own, initial_state=pool[slot]).final_state[0]
                assert_close(f"behind {t}", new[state_slots[b, t]], np.asarray(want), 2e-6)
    untouched = jnp.array([0, 3, 5, 6, 7])
    np.testing.assert_array_equal(new[untouched], pool[untouched])
    accepted = jnp.array([2, 1, 3])
    moved = glax.commit(pool, draft, accepted)
    assert_close("commit", moved[4], np.asarray(new[2]), 2e-6)
    assert len(plain_draft.key) == 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(states_every=100), ValueError, "states_every must be a multiple of 64, from 64 on, got 100"),
        (dict(states_every=0), ValueError, "states_every must be a multiple of 64, from 64 on, got 0"),
        (dict(states_every=64.0), TypeError, "states_every must be an integer, known while tracing, got 64.0"),
        (dict(states_dtype="float32"), ValueError, "states_dtype must be None without states_every, got float32"),
        (
            dict(states_every=64, states_dtype="int8"),
            TypeError,
            "states_dtype must be float32, bfloat16, float16, float64 or None, got int8",
        ),
    ],
)
def test_errors_of_states(options, error, text):
    with pytest.raises(error) as caught:
        glax.recurrent(**arguments_of(), **options)
    assert str(caught.value) == text


def test_errors_of_slots():
    pool, packed = pool_of(), rows(arguments_of(), 0, 200) | dict(cu_seqlens=jnp.array([0, 200]))
    slots = jnp.array([1])
    with pytest.raises(ValueError, match="states_every needs state_slots, which is None"):
        glax.prefill_into(pool, slots, **packed, states_every=64)
    with pytest.raises(ValueError, match=r"state_slots must be \[M\] with M up to 3, .*, got shape \(4,\)"):
        glax.prefill_into(pool, slots, **packed, states_every=64, state_slots=jnp.arange(4))
    with pytest.raises(ValueError, match="state_slots must be from -1 to 11, the last row of pool, got 12"):
        glax.prefill_into(pool, slots, **packed, states_every=64, state_slots=jnp.array([12, 0, 1]))
    with pytest.raises(ValueError, match="write_slots must be from -1 to 11, the last row of pool, got 12"):
        glax.prefill_into(pool, slots, **packed, write_slots=jnp.array([12]))
    draft = {name: x for name, x in arguments_of(B=1, T=2).items() if name != "initial_state"}
    with pytest.raises(ValueError, match="state_slots needs slots, by which state is a pool"):
        glax.recurrent_verify(**draft, state=pool[:1], state_slots=jnp.array([[0, -1]]))
