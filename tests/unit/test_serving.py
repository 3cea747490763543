"""Serving: pools of states, prompts into them, draft tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.decay import USUAL_FORMS
from glax._src.kernels.cpu.library import missing
from tests.cases import FORMS, Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast

SMALL, LARGE = dict(K=6, V=5), dict(K=64, V=64)  # a state that is gathered on CPUs, and one that is updated where it is


def token_and_pool(size, dtype=jnp.float32, B=3, gates=("g", "g_gamma", "gk", "gv")):
    case = Case("", B=B, T=1, heads=(4, 2, 2), gates=gates, state_dtype=None, **size)
    arguments = inputs(case, "log-sigmoid")
    pool = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, size["K"], size["V"])), dtype)
    return {name: x if name == "g_gamma" else x[:, 0] for name, x in arguments.items()}, pool


# ---- one token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots(size, traced, dtype):
    """Used rows change as without a pool, all others keep their bits; slot -1 touches nothing and answers 0."""
    token, pool = token_and_pool(size, dtype)
    token = {name: x.at[1].set(jnp.nan) if name in ("query", "key") else x for name, x in token.items()}
    slots = jnp.array([4, -1, 0])
    step = jax.jit(glax.recurrent_step) if traced else glax.recurrent_step
    output, new = step(**token, state=pool, slots=slots)
    direct, states = glax.recurrent_step(**token, state=pool[jnp.array([4, 1, 0])])
    assert new.dtype == pool.dtype
    for b, slot in ((0, 4), (2, 0)):
        assert_close("output", output[b], direct[b], 1e-6)
        assert_close("state", new[slot], states[b], 1e-6 if dtype == "float32" else 4e-3)  # a last bit
    assert not output[1].any()
    for row in (1, 2, 3, 5):
        np.testing.assert_array_equal(new[row], pool[row])


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_traced_slots_outside_the_pool_touch_nothing(size):
    token, pool = token_and_pool(size)
    output, new = jax.jit(glax.recurrent_step)(**token, state=pool, slots=jnp.array([6, -2, 1000]))
    np.testing.assert_array_equal(new, pool)
    assert not output.any()


SLOTS = dict(  # the last row of a pool, or a slot out of bounds, is at or beyond the end of the dtype's range
    uint8=(256, [255, 0, 3]),
    int8=(200, [127, -1, 3]),
    uint16=(6, [65535, 0, 3]),
    uint32=(6, [2**32 - 1, 0, 3]),
    int64=(6, [2**32 + 1, -(2**32), 3]),
    uint64=(6, [2**64 - 1, 2**32, 3]),
)


@pytest.mark.parametrize("platform", ["cpp", "xla"])
@pytest.mark.parametrize("dtype", SLOTS)
def test_slots_of_any_integer_dtype(dtype, platform):
    if platform == "cpp" and (reason := missing()):
        pytest.skip(reason)
    rows, values = SLOTS[dtype]
    token, _ = token_and_pool(SMALL, gates=("gk",))
    sequences = {name: x[:, None] for name, x in token.items()}
    pool = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 4, 6, 5)), jnp.float32)
    accepted = jnp.ones(3, jnp.uint8)

    @quick_jit
    def serve(pool, slots):
        stepped = glax.recurrent_step(**token, state=pool, slots=slots, platform=platform)
        filled = glax.prefill_into(pool, slots, **sequences, platform=platform)
        output, draft = glax.recurrent_verify(**sequences, state=pool, slots=slots, platform=platform)
        return *stepped, filled[0][:, 0], filled[1], output[:, 0], glax.commit(pool, draft, accepted)

    with jax.enable_x64(dtype.endswith("64")):
        got = serve(pool, jnp.array(values, dtype))
    used = [(b, slot) for b, slot in enumerate(values) if 0 <= slot < rows]
    output, states = glax.recurrent_step(**token, state=pool[jnp.array([max(0, min(s, rows - 1)) for s in values])])
    want_output, want_pool = np.zeros_like(output), np.array(pool)
    for b, slot in used:
        want_output[b], want_pool[slot] = output[b], states[b]
    for i, x in enumerate(got):
        assert_close(f"result {i}", x, want_pool if i % 2 else want_output, 2e-6)
    for new in got[1::2]:
        unused = np.setdiff1d(np.arange(rows), [slot for _, slot in used])
        np.testing.assert_array_equal(np.asarray(new)[unused], np.asarray(pool)[unused])


def test_known_slots_of_any_integer_dtype():
    token, pool = token_and_pool(SMALL, gates=())
    for dtype in ("uint8", "int8", "uint16", "uint32"):
        with pytest.raises(ValueError, match="slots must be from -1 to 5, the last row of state, got 100"):
            glax.recurrent_step(**token, state=pool, slots=jnp.array([0, 100, 1], dtype))
    with pytest.raises(ValueError, match="slots must be from -1 to 5, the last row of state, got 18446744073709551615"):
        glax.recurrent_step(**token, state=pool, slots=np.array([0, 2**64 - 1, 1], np.uint64))


def test_no_slot_fits_an_empty_pool():
    token, pool = token_and_pool(SMALL, gates=())
    output, new = quick_jit(lambda slots: glax.recurrent_step(**token, state=pool[:0], slots=slots))(
        jnp.array([0, 1, -1])
    )
    assert new.shape == (0, 4, 6, 5)
    assert not output.any()


@pytest.mark.parametrize("call", ["step", "prefill", "verify"])
def test_states_and_pools_are_checked_by_their_own_name(call):
    token, pool = token_and_pool(SMALL, gates=())
    sequences = {name: x[:, None] for name, x in token.items()}
    run, name = dict(
        step=(lambda **k: glax.recurrent_step(**token | dict(slots=jnp.arange(3)) | k), "state"),
        prefill=(lambda **k: glax.prefill_into(**sequences | dict(slots=jnp.arange(3)) | k), "pool"),
        verify=(lambda **k: glax.recurrent_verify(**sequences | dict(slots=jnp.arange(3)) | k), "state"),
    )[call]
    for missing_one in ("query", "key", "value", name):
        with pytest.raises(TypeError, match=f"{missing_one} must be an array, got NoneType"):
            run(**{name: pool, missing_one: None})
    for bad in (pool[:, :3], pool[..., :4], pool[:, :, :5]):
        wanted = rf"{name} must be \[P, H, K, V\] with H=4, K=6, V=5 as query, key and value imply, got shape"
        with pytest.raises(ValueError, match=wanted):
            run(**{name: bad})
    for bad in (pool[0], pool[0, 0, 0, 0]):
        with pytest.raises(ValueError, match=rf"{name} must be .*\[P, H, K, V\].*, got shape"):
            run(**{name: bad})
    with pytest.raises(TypeError, match=f"{name} must be floating point, got int32"):
        run(**{name: pool.astype(jnp.int32)})
    with pytest.raises(ValueError, match=r"slots must be \[.\] with .=3 as in query, got shape \(3, 1\)"):
        run(**{name: pool}, slots=jnp.zeros((3, 1), jnp.int32))
    if call == "prefill":
        with pytest.raises(TypeError, match="slots must be an array, got NoneType"):
            run(pool=pool, slots=None)
    else:
        wanted = r"state must be \[B, H, K, V\] with B=3, H=4, K=6, V=5 as query, key and value imply, got shape \(6, 4, 6, 5\)"
        with pytest.raises(ValueError, match=wanted):
            run(state=pool, slots=None)


def test_a_traced_slot_given_twice_touches_no_other_row():
    token, pool = token_and_pool(LARGE)
    _, new = jax.jit(glax.recurrent_step)(**token, state=pool, slots=jnp.array([2, 2, 5]))
    for row in (0, 1, 3, 4):
        np.testing.assert_array_equal(new[row], pool[row])
    _, states = glax.recurrent_step(**token, state=pool[jnp.array([2, 2, 5])])
    assert_close("state", new[5], states[2], 1e-6)


@pytest.mark.parametrize("call", ["step", "prefill", "verify"])
def test_known_slots_are_checked(call):
    token, pool = token_and_pool(SMALL)
    gamma = token.pop("g_gamma")
    sequences = {name: x[:, None] for name, x in token.items()} | dict(g_gamma=gamma)
    run = dict(
        step=lambda slots: glax.recurrent_step(**token, g_gamma=gamma, state=pool, slots=slots),
        prefill=lambda slots: glax.prefill_into(pool, slots, **sequences),
        verify=lambda slots: glax.recurrent_verify(**sequences, state=pool, slots=slots),
    )[call]
    with pytest.raises(ValueError, match=r"slots must be from -1 to 5, the last row of (state|pool), got 6"):
        run(jnp.array([0, 6, 1]))
    with pytest.raises(ValueError, match=r"slots must be from -1 to 5, the last row of (state|pool), got -2"):
        run(jnp.array([0, -2, 1]))
    with pytest.raises(ValueError, match="slots must not repeat, got 3 more than once"):
        run(jnp.array([3, -1, 3]))
    with pytest.raises(TypeError, match="slots must hold integers, got float32"):
        run(jnp.array([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"slots must be \[.\] with .=3 as in query, got shape \(2,\)"):
        run(jnp.array([0, 1]))
    run(jnp.array([-1, 0, -1]))  # no sequence at all is no repetition


def pool_memory(f, pool, *args):
    return quick_jit(f, donate_argnums=0).lower(pool, *args).compile().memory_analysis()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_pool_is_never_copied(size, dtype):
    token, pool = token_and_pool(size, dtype)
    pool, slots = jnp.zeros((2048 if size is SMALL else 100, *pool.shape[1:]), dtype), jnp.array([0, 1, 2])
    sequences = {name: x if name == "g_gamma" else x[:, None] for name, x in token.items()}

    def verify_and_commit(pool, slots):
        output, draft = glax.recurrent_verify(**sequences, state=pool, slots=slots)
        return output, glax.commit(pool, draft, jnp.ones(3, jnp.int32))

    for f in (
        lambda pool, slots: glax.recurrent_step(**token, state=pool, slots=slots),
        lambda pool, slots: glax.prefill_into(pool, slots, **sequences),
        verify_and_commit,
    ):
        memory = pool_memory(f, pool, slots)
        assert memory.alias_size_in_bytes >= pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes / 4


def test_gradients_and_vmap_of_a_large_pool():
    token, pool = token_and_pool(LARGE)
    slots = jnp.array([4, -1, 0])

    def loss(token, pool):
        output, new = glax.recurrent_step(**token, state=pool, slots=slots)
        return (output**2).sum() + (new**2).sum()

    def unpooled(token, pool):
        output, states = glax.recurrent_step(**token, state=pool[jnp.array([4, 1, 0])])
        new = pool.at[jnp.array([4, 0])].set(states[jnp.array([0, 2])])
        return (output[0] ** 2).sum() + (output[2] ** 2).sum() + (new**2).sum()

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(token, pool) for f in (loss, unpooled))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("gradient", x, y, 5e-6)
    pools = jnp.stack([pool, pool[::-1]])
    got = jax.vmap(lambda pool: glax.recurrent_step(**token, state=pool, slots=slots))(pools)
    for i in range(2):
        want = glax.recurrent_step(**token, state=pools[i], slots=slots)
        jax.tree.map(lambda x, y, i=i: assert_close("vmap", x[i], y, 1e-6), got, want)


# ---- prompts ---------------------------------------------------------------------------------------------------------

CUTS = (0, 30, 30, 31, 95)


def prompts(cuts=CUTS, padded=100, gates=("gk", "gv", "g_gamma")):
    """Rank 3, rows behind the last cut NaN."""
    case = Case("", T=padded, heads=(4, 2, 2), gates=gates, cuts=cuts, state_dtype=None, **SMALL)
    return {name: x if name == "g_gamma" else x[0] for name, x in inputs(case, "log-sigmoid").items()}


def test_prefill_equals_each_prompt_alone():
    arguments, (_, pool) = prompts(), token_and_pool(SMALL)
    slots, fresh = jnp.array([5, 1, -1, 0]), jnp.array([False, False, False, True])
    prefill = jax.jit(glax.prefill_into)
    output, new = prefill(pool, slots, **arguments, cu_seqlens=jnp.array(CUTS), fresh=fresh)
    assert output.shape == (100, 4, 5)
    want = np.array(pool)
    for n, (slot, begin, end) in enumerate(zip((5, 1, -1, 0), CUTS, CUTS[1:], strict=False)):
        if slot == -1:
            assert not output[begin:end].any()
            continue
        own = {name: x[n] if name == "g_gamma" else x[None, begin:end] for name, x in arguments.items()}
        alone = glax.recurrent(**own, initial_state=pool[slot] * (not fresh[n]))
        assert_close("output", output[begin:end], alone.output[0], 2e-6)
        want[slot] = alone.final_state[0]
    assert_close("pool", new, want, 2e-6)
    for row in (1, 2, 3, 4):  # an empty prompt hands its state through
        np.testing.assert_array_equal(new[row], pool[row])
    assert not output[95:].any()


def test_prefill_in_pieces_equals_one_pass():
    case = Case("", B=2, T=100, heads=(4, 2, 2), gates=("gk", "g"), state_dtype=None, **SMALL)
    arguments, (_, pool) = inputs(case, "mild"), token_and_pool(SMALL)
    slots = jnp.array([3, 1])
    whole, at_once = glax.prefill_into(pool, slots, **arguments)
    outputs, piecewise = [], pool
    for begin, end in ((0, 37), (37, 38), (38, 100)):
        output, piecewise = glax.prefill_into(piecewise, slots, **{n: x[:, begin:end] for n, x in arguments.items()})
        outputs.append(output)
    assert_close("output", jnp.concatenate(outputs, 1), whole, 2e-6)
    assert_close("pool", piecewise, at_once, 2e-6)


def test_prefill_errors_name_the_argument():
    arguments, (_, pool) = prompts(), token_and_pool(SMALL)
    call = functools.partial(glax.prefill_into, pool, jnp.arange(4), **arguments, cu_seqlens=jnp.array(CUTS))
    with pytest.raises(ValueError, match=r"fresh must be booleans \[N\]=\[4\], got int32 of shape \(4,\)"):
        call(fresh=jnp.arange(4))
    with pytest.raises(ValueError, match=r"pool must be \[P, H, K, V\]"):
        glax.prefill_into(pool[0], jnp.arange(4), **arguments, cu_seqlens=jnp.array(CUTS))
    with pytest.raises(TypeError, match="pool must be an array, got list"):
        glax.prefill_into([1], jnp.arange(4), **arguments, cu_seqlens=jnp.array(CUTS))


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", USUAL_FORMS)
def test_commit_equals_replay(form):
    """Every accepted count of 16 draft tokens against as many single steps; the state itself at 0, bit for bit."""
    T = 16
    case = Case("", B=T + 1, T=T, heads=(4, 2, 2), gates=FORMS[form], **SMALL)

    @jax.jit
    def speculated(arguments, state):
        output, draft = glax.recurrent_verify(**arguments, state=state)
        return output, glax.commit(state, draft, jnp.arange(T + 1))

    @jax.jit
    def replayed(arguments, state):
        constant = {name: x for name, x in arguments.items() if name == "g_gamma"}
        by_time = {name: jnp.moveaxis(x, 1, 0) for name, x in arguments.items() if name != "g_gamma"}

        def step(state, token):
            output, state = glax.recurrent_step(**token, **constant, state=state)
            return state, (output, state)

        _, (outputs, states) = jax.lax.scan(step, state, by_time)
        behind = jnp.concatenate([state[None], states])  # [T + 1, B, H, K, V]
        return jnp.moveaxis(outputs, 0, 1), behind[jnp.arange(T + 1), jnp.arange(T + 1)]

    for strength in ("log-sigmoid", "-inf on 5%", "-120", "+0.05") if FORMS[form] else ("log-sigmoid",):
        arguments = inputs(case, strength)
        state = arguments.pop("initial_state")
        output, new = speculated(arguments, state)
        want_output, want = replayed(arguments, state)
        assert_close("output", output, want_output, 2e-6)
        assert_close("state", new, want, 2e-6)
        np.testing.assert_array_equal(new[0], state[0])


def test_drafts_in_a_pool():
    case = Case("", B=3, T=4, heads=(4, 2, 2), gates=("gk",), dtype="bfloat16", state_dtype=None, **SMALL)
    arguments, (_, pool) = inputs(case, "log-sigmoid"), token_and_pool(SMALL, "bfloat16")
    slots, accepted = jnp.array([4, -1, 0]), jnp.array([3, 2, 0])

    @jax.jit
    def speculate(pool, slots, accepted):
        output, draft = glax.recurrent_verify(**arguments, state=pool, slots=slots)
        return output, glax.commit(pool, draft, accepted)

    output, new = speculate(pool, slots, accepted)
    direct, draft = glax.recurrent_verify(**arguments, state=pool[jnp.array([4, 1, 0])])
    states = glax.commit(pool[jnp.array([4, 1, 0])], draft, accepted)
    assert_close("output", output[::2], direct[::2], 1e-6)
    assert not output[1].any()
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new[4], states[0])
    for row in (0, 1, 2, 3, 5):
        np.testing.assert_array_equal(new[row], pool[row])
    _, clipped = speculate(pool, slots, jnp.array([9, -4, -1]))  # traced: the nearest count there is
    whole = glax.commit(pool[jnp.array([4, 1, 0])], draft, jnp.array([4, 0, 0]))
    np.testing.assert_array_equal(clipped[4], whole[0])
    np.testing.assert_array_equal(clipped[0], pool[0])


def test_a_draft_is_smaller_than_its_states():
    case = Case("", B=2, T=16, heads=(4, 4, 4), state_dtype=None, **LARGE)
    state = jnp.zeros((2, 4, 64, 64))
    _, draft = glax.recurrent_verify(**inputs(case, "log-sigmoid"), state=state)
    assert sum(x.nbytes for x in jax.tree.leaves(draft)) < 16 * state.nbytes / 15


def test_commit_errors_name_the_argument():
    case = Case("", B=2, T=4, heads=(2, 2, 2), state_dtype=None, **SMALL)
    state = jnp.zeros((2, 2, 6, 5))
    _, draft = glax.recurrent_verify(**inputs(case, "log-sigmoid"), state=state)
    with pytest.raises(ValueError, match="accepted must be from 0 to T=4, the length of the draft, got 5"):
        glax.commit(state, draft, jnp.array([5, 0]))
    with pytest.raises(ValueError, match=r"accepted must be \[B\]=\[2\]"):
        glax.commit(state, draft, jnp.array([1]))
    with pytest.raises(TypeError, match="accepted must hold integers"):
        glax.commit(state, draft, jnp.ones(2))
    with pytest.raises(ValueError, match="state must be what recurrent_verify was given"):
        glax.commit(state[:, :, :5], draft, jnp.array([1, 0]))
    with pytest.raises(TypeError, match="state must be floating point, got int32"):
        glax.commit(state.astype(jnp.int32), draft, jnp.array([1, 0]))
    with pytest.raises(TypeError, match="draft must be the Draft that recurrent_verify returned, got NoneType"):
        glax.commit(state, None, jnp.array([1, 0]))
    with pytest.raises(
        ValueError, match=r"state must be \[B, H, K, V\] with B=2 as in the draft, got shape \(3, 2, 6, 5\)"
    ):
        glax.commit(jnp.zeros((3, 2, 6, 5)), draft, jnp.array([1, 0]))
    for accepted in (jnp.array([200, 0], "uint8"), np.array([2**64 - 1, 0], np.uint64)):
        with pytest.raises(ValueError, match="accepted must be from 0 to T=4, the length of the draft, got"):
            glax.commit(state, draft, accepted)


def test_commit_takes_no_smaller_pool():
    case = Case("", B=2, T=4, heads=(4, 2, 2), state_dtype=None, **SMALL)
    arguments, (_, pool) = inputs(case, "log-sigmoid"), token_and_pool(SMALL)
    _, draft = glax.recurrent_verify(**arguments, state=pool, slots=jnp.array([5, 0]))
    wanted = r"state must be what recurrent_verify was given, \[6, 4, 6, 5\], got shape \(5, 4, 6, 5\)"
    with pytest.raises(ValueError, match=wanted):
        jax.eval_shape(glax.commit, pool[:5], draft, jnp.array([1, 2]))
    grown = jnp.concatenate([pool, pool])
    new = glax.commit(grown, draft, jnp.array([1, 2]))
    np.testing.assert_array_equal(new[:6], glax.commit(pool, draft, jnp.array([1, 2])))
    np.testing.assert_array_equal(new[6:], pool)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_accepted_counts_of_any_integer_dtype(dtype):
    case = Case("", B=2, T=4, heads=(4, 2, 2), **SMALL)
    arguments = inputs(case, "log-sigmoid")
    state = arguments.pop("initial_state")
    _, draft = glax.recurrent_verify(**arguments, state=state)
    most = jnp.array([jnp.iinfo(dtype).max, 1], dtype)  # traced: taken for T
    new = quick_jit(glax.commit)(state, draft, most)
    assert_close("state", new, glax.commit(state, draft, jnp.array([4, 1])), 1e-6)
