"""`glax.serving.StatePool`: slots, prompts, errors, and what it shares with plain pools."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import serving
from glax._src.core.bind import bind
from glax._src.core.registry import Role, kernel_registry
from glax._src.core.ring import MOST_PLACES
from glax._src.kernels.cpu.library import missing
from glax._src.serving import replay
from glax._src.serving.decode_step import one_row_at_a_time
from glax._src.serving.replayed_pool import replay_kernel
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast

P, B, H, K, V = 6, 3, 4, 6, 5
SLOTS = jnp.array([4, -1, 0])


def tokens_of(T: int | None = None, gates=("gk",), erasure=(), **changes) -> dict:
    """Arguments of `recurrent` for B sequences of T tokens, or of one token without the axis of T."""
    case = Case("", B=B, T=T or 1, heads=(4, 2, 1), K=K, V=V, gates=gates, erasure=erasure, state_dtype=None, **changes)
    arguments = inputs(case, "log-sigmoid")
    return arguments if T else {name: x[:, 0] for name, x in arguments.items()}


def pool_of(replay=4, drafts=3, form="key", **changes) -> serving.StatePool:
    pool = serving.StatePool(P, (4, 2, 1), (K, V), replay=replay, drafts=drafts, form=form, **changes)
    states = np.random.default_rng(1).normal(size=pool.states.shape)
    return pool.replace(states=jnp.asarray(states, pool.states.dtype))


def test_a_null_slot_reads_and_writes_nothing():
    pool = pool_of()
    token = {name: x.at[1].set(jnp.nan) for name, x in tokens_of().items()}
    drafts = {name: jnp.stack([x] * 3, 1) for name, x in token.items()}
    step = quick_jit(lambda pool, slots: pool.step(**token, slots=slots))
    verify = quick_jit(lambda pool, slots: pool.verify(**drafts, slots=slots))
    commit = quick_jit(lambda pool, slots: pool.commit(jnp.array([3, 3, 1]), slots=slots))
    for slots in (SLOTS, jnp.array([4, 1000, 0])):
        (output, new), (outputs, drafted) = step(pool, slots), verify(pool, slots)
        committed = commit(drafted, slots)
        assert not output[1].any() and not outputs[1].any()
        for x in (new, drafted, committed):
            untouched = np.array([1, 2, 3, 5])
            for leaf, old in zip(jax.tree.leaves(x), jax.tree.leaves(pool), strict=True):
                np.testing.assert_array_equal(leaf[untouched], old[untouched])
        assert new.length.tolist() == [1, 0, 0, 0, 1, 0]
        assert drafted.drafted.tolist() == [3, 0, 0, 0, 3, 0]
        assert committed.length.tolist() == [1, 0, 0, 0, 3, 0]


def test_states_are_written_by_every_replayth_token_of_a_slot_alone():
    pool, token = pool_of(replay=3, drafts=0), tokens_of()
    step = quick_jit(lambda pool, slots: pool.step(**token, slots=slots)[1])
    first = pool.states
    pool = step(step(pool, SLOTS), jnp.array([-1, -1, 0]))
    np.testing.assert_array_equal(pool.states, first)
    assert pool.length.tolist() == [2, 0, 0, 0, 1, 0]
    pool = step(pool, SLOTS)
    assert pool.length.tolist() == [0, 0, 0, 0, 2, 0]
    assert (pool.states[0] != first[0]).all()
    np.testing.assert_array_equal(pool.states[1:], first[1:])


def test_a_verification_and_a_commit_of_few_tokens_write_no_state():
    pool, drafts = pool_of(replay=8), tokens_of(3)
    _, drafted = pool.verify(**drafts, slots=SLOTS)
    committed = drafted.commit(jnp.array([2, 0, 3]), slots=SLOTS)
    for x in (drafted, committed):
        np.testing.assert_array_equal(x.states, pool.states)
    output, draft = glax.recurrent_verify(**drafts, state=pool.states, slots=SLOTS)
    want = glax.commit(pool.states, draft, jnp.array([2, 0, 3]))
    assert_close("output", drafted.verify(**drafts, slots=SLOTS)[0], np.asarray(output), 1e-6)
    assert_close("states", committed.states_of(), np.asarray(want), 1e-6)
    _, forgotten = drafted.verify(**{name: x[:, :0] for name, x in drafts.items()}, slots=SLOTS)
    assert not forgotten.drafted.any()
    # Drafts that are not committed are forgotten.
    token = {name: x[:, 0] for name, x in drafts.items()}
    outputs = [x.step(**token, slots=SLOTS)[0] for x in (pool, drafted)]
    np.testing.assert_array_equal(*outputs)


def test_prompts_are_those_of_prefill_into():
    """A prompt goes on behind the tokens of its ring; a fresh one does not. A slot that is read alone keeps its state."""
    pool, token, prompt = pool_of(), tokens_of(), tokens_of(70)
    _, pool = pool.step(**token, slots=jnp.array([4, 2, 0]))
    rows = {name: x[0] for name, x in prompt.items()}
    cuts, slots, fresh = jnp.array([0, 66, 70]), jnp.array([4, 2]), jnp.array([False, True])
    options = dict(cu_seqlens=cuts, fresh=fresh, states_every=64, state_slots=jnp.array([1]))
    output, new = pool.prefill(slots, **rows, **options)
    want_output, want = glax.prefill_into(pool.states_of(), slots, **rows, **options)
    assert_close("output", output, np.asarray(want_output), 2e-6)
    assert_close("states", new.states_of(), np.asarray(want), 2e-6)
    assert new.length.tolist() == [1, 0, 0, 0, 0, 0]
    write = dict(write_slots=jnp.array([5, 3]), cu_seqlens=cuts)
    _, copied = pool.prefill(slots, **rows, **write)
    for slot in (0, 2, 4):
        assert_close("read alone", copied.states_of()[slot], np.asarray(pool.states_of()[slot]), 1e-6)
    assert_close("written", copied.states_of()[5], np.asarray(new.states_of()[4]), 1e-6)


def test_slots_that_a_prompt_does_not_write_stay_as_they_were():
    """Those to which a sequence without a slot would write, and those for states that there are not."""
    _, pool = pool_of().step(**tokens_of(), slots=jnp.array([1, 2, 3]))
    rows, before = {name: x[0] for name, x in tokens_of(70).items()}, pool.states_of()
    _, new = quick_jit(lambda pool, slots: pool.prefill(
        slots, **rows, cu_seqlens=jnp.array([0, 5, 70]), write_slots=jnp.array([1, 4]), states_every=64,
        state_slots=jnp.array([2]),
    ))(pool, jnp.array([-1, 0]))  # fmt: skip
    assert (new.states_of()[jnp.array([4, 2])] != before[jnp.array([4, 2])]).any()
    others = jnp.array([0, 1, 3, 5])
    assert_close("others", new.states_of()[others], np.asarray(before[others]), 1e-6)
    _, short = pool.prefill(jnp.array([0]), **{name: x[:10] for name, x in rows.items()}, cu_seqlens=jnp.array([0, 10]))
    assert_close("others", short.states_of()[1:], np.asarray(before[1:]), 1e-6)


def test_a_slot_that_several_prompts_read_is_written_once(monkeypatch):
    """By a stand-in for the kernels that advance one row after another in place. The widths are those of no other test."""
    pool = serving.StatePool(P, H, (7, 9), replay=4, form="head")
    token, prompt = (
        inputs(Case("", B=1, T=T, heads=(H, H, H), K=7, V=9, gates=("g",), state_dtype=None), "mild") for T in (3, 6)
    )
    for t in range(3):
        _, pool = pool.step(**{name: x[:, t] for name, x in token.items()}, slots=jnp.array([2]))
    start = glax.recurrent(**token).final_state
    monkeypatch.setattr(replay, "pooled_kernel", lambda choice, r, role: role)
    monkeypatch.setattr(replay, "advance", one_row_at_a_time)
    output, pool = pool.prefill(
        jnp.array([2, 0, 2]),
        **{name: x[0] for name, x in prompt.items()},
        cu_seqlens=jnp.array([0, 2, 4, 6]),
        write_slots=jnp.array([1, 3, 4]),
    )
    assert_close("stored", pool.states[2], np.asarray(start[0]), 1e-6)
    own = {name: x[:, 4:] for name, x in prompt.items()}
    want, final = glax.recurrent(**own, initial_state=start)
    assert_close("output", output[4:], np.asarray(want[0]), 1e-6)
    assert_close("written", pool.states[4], np.asarray(final[0]), 1e-6)


def test_a_pool_without_rings_runs_the_kernels_of_plain_pools():
    pool, token = pool_of(replay=1, drafts=0), tokens_of()
    plain = jax.make_jaxpr(lambda states: glax.recurrent_step(**token, state=states, slots=SLOTS))(pool.states)
    own = jax.make_jaxpr(lambda pool: pool.step(**token, slots=SLOTS))(pool)
    assert ("ffi_call" in str(own)) == ("ffi_call" in str(plain))
    output, new = pool.step(**token, slots=SLOTS)
    want = glax.recurrent_step(**token, state=pool.states, slots=SLOTS)
    np.testing.assert_array_equal(output, want[0])
    np.testing.assert_array_equal(new.states, want[1])


@pytest.mark.skipif(missing("glax_replay") is not None, reason="needs the native library")
def test_the_native_kernel_takes_what_it_can_hold():
    def kernel_of(pool, rounding_key=None, T=None, **options) -> str | None:
        r = bind(**tokens_of(T, **options), one_token=T is None)
        spec = replay_kernel(r, pool, rounding_key)
        return None if spec is None else spec.name

    own = "recurrent.replay/cpp/cpu"
    assert kernel_of(pool_of()) == kernel_of(pool_of(replay=1)) == own
    assert kernel_of(pool_of(replay=1, drafts=0)) is None  # a plain pool
    assert kernel_of(pool_of(), T=1) == own
    assert kernel_of(pool_of(), T=2) is None
    assert kernel_of(pool_of(), jax.random.key(0)) == own  # the key rounds states of 16 bits
    for dtype in ("bfloat16", "float16"):
        assert kernel_of(pool_of(dtype=dtype)) == own
        assert kernel_of(pool_of(dtype=dtype), jax.random.key(0)) is None
    for places, able in ((MOST_PLACES, own), (MOST_PLACES + 1, None)):
        pool = serving.StatePool(1, 1, 1, replay=places + 1)
        one = jnp.ones((1, 1, 1, 1))
        spec = replay_kernel(bind(one, one, one), pool, None)
        assert (None if spec is None else spec.name) == able
    r = bind(**tokens_of(2))
    _, refusals = kernel_registry.able(r.replace(initial_state=pool_of().states), role=Role.REPLAY)
    assert refusals[own] == "takes one token of each sequence, got T=2"
    with jax.enable_x64(True):
        r = bind(**tokens_of(1)).replace(initial_state=jnp.zeros((P, H, K, V), jnp.float64))
        _, refusals = kernel_registry.able(r, role=Role.REPLAY)
        assert "the pool is float64" in refusals[own]


@pytest.mark.skipif(missing("glax_replay") is not None, reason="needs the native library")
def test_the_longest_ring_of_the_native_kernel():
    """Its tokens and their sums of decays, beside the state that they make."""
    places, rng = MOST_PLACES, np.random.default_rng(0)
    pool = serving.StatePool(1, 1, (3, 2), replay=places + 1, form="head")
    k, v = (jnp.asarray(rng.normal(size=(1, places, 1, n)), jnp.float32) for n in (3, 2))
    g = jnp.full((1, places, 1), -1e-3)
    ring = dataclasses.replace(pool.ring, key=k, value=v, decay=dataclasses.replace(pool.ring.decay, head=g))
    pool = pool.replace(ring=ring, length=jnp.array([places]))
    x = jnp.ones((1, 1, 3))
    output, pool = pool.step(x, x, x[..., :2], g=jnp.full((1, 1), -0.5))
    whole = [jnp.concatenate([a, jnp.full_like(a[:, :1], last)], 1) for a, last in ((k, 1), (v, 1), (g, -0.5))]
    want = glax.recurrent(whole[0].at[:, -1].set(1), *whole, platform="xla")
    assert_close("output", output, np.asarray(want.output[:, -1]), 1e-5)
    assert_close("state", pool.states, np.asarray(want.final_state), 1e-5)
    assert pool.length.tolist() == [0]


@pytest.mark.parametrize("transform", ["vmap", "export", "x64"])
def test_transformations(transform):
    pool, tokens = pool_of(), tokens_of(3)
    step = jax.jit(lambda pool, token, slots: jax.tree.leaves(pool.step(**token, slots=slots)))
    token = {name: x[:, 0] for name, x in tokens.items()}
    if transform == "vmap":
        pools = jax.tree.map(lambda x: jnp.stack([x, x]), pool)
        got = quick_jit(jax.vmap(step, (0, None, 0)))(pools, token, jnp.stack([SLOTS, SLOTS[::-1]]))
        want = [
            jax.tree.map(jnp.stack, x) for x in zip(*(step(pool, token, s) for s in (SLOTS, SLOTS[::-1])), strict=True)
        ]
        for x, y in zip(got, want, strict=True):
            assert_close("vmap", x, np.asarray(y), 1e-6)
    elif transform == "export":
        leaves, structure = jax.tree.flatten(pool)
        program = jax.jit(lambda leaves, token: step(structure.unflatten(leaves), token, SLOTS))
        exported = jax.export.export(program, disabled_checks=glax.export_checks())
        again = jax.export.deserialize(
            exported(leaves, token).serialize(),
        )
        for x, y in zip(again.call(leaves, token), step(pool, token, SLOTS), strict=True):
            assert_close("export", x, np.asarray(y), 1e-6)
    else:
        with jax.enable_x64(True):
            wide = serving.StatePool(P, (4, 2, 1), (K, V), "float64", replay=3, form="key", token_dtype="float64")
            states = np.random.default_rng(1).normal(size=pool.states.shape)
            wide, states = wide.replace(states=jnp.asarray(states)), jnp.asarray(states)
            token = {name: x.astype(jnp.float64) for name, x in token.items()}
            for _ in range(7):
                output, wide = wide.step(**token, slots=SLOTS)
                want, states = glax.recurrent_step(**token, state=states, slots=SLOTS)
                assert_close("output", output, np.asarray(want), 1e-13)
            assert wide.states_of().dtype == jnp.float64
            assert_close("states", wide.states_of(), np.asarray(states), 1e-13)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_empty_pools_and_calls(dtype):
    token = tokens_of()
    none = serving.StatePool(0, (4, 2, 1), (K, V), dtype, replay=4, drafts=3, form="key")
    output, new = quick_jit(lambda pool, slots: pool.step(**token, slots=slots))(none, jnp.array([0, -1, 5]))
    assert not output.any() and new.states.shape == (0, H, K, V)
    _, new = new.verify(**tokens_of(3), slots=jnp.array([-1, -1, -1]))
    assert new.commit(jnp.zeros(3, jnp.int32), slots=jnp.array([-1, -1, -1])).flush().states_of().shape == (0, H, K, V)
    pool = pool_of()
    nobody = {name: x[:0] for name, x in token.items()}
    output, new = pool.step(**nobody, slots=jnp.zeros(0, jnp.int32))
    assert output.shape == (0, 4, V)
    np.testing.assert_array_equal(new.states, pool.states)


def test_a_new_pool_can_be_donated():
    pool = serving.StatePool(4, 2, 8, replay=2, drafts=1, form="head")
    q, slots = jnp.ones((2, 2, 8)), jnp.array([3, 0])
    step = jax.jit(lambda pool: pool.step(q, q, q, g=jnp.zeros((2, 2)), slots=slots), donate_argnums=0)
    for _ in range(3):
        output, pool = step(pool)
    assert_close("output", output, np.full((2, 2, 8), 3 * 8**0.5), 1e-6)


def test_a_step_reads_with_a_bonus_and_normalises_as_recurrent_step_does():
    pool, token, states = pool_of(), tokens_of(), pool_of().states
    bonus = jnp.asarray(np.random.default_rng(2).normal(size=(H, K)), jnp.float32)
    for _ in range(6):
        output, pool = pool.step(**token, slots=SLOTS, bonus=bonus, softmax_scale=0.5)
        want, states = glax.recurrent_step(**token, state=states, slots=SLOTS, bonus=bonus, softmax_scale=0.5)
        assert_close("output", output, np.asarray(want), 2e-6)
    pool, token, states = pool_of(form="none+beta"), tokens_of(gates=(), erasure=("beta",)), pool_of().states
    for _ in range(6):
        output, pool = pool.step(**token, slots=SLOTS, use_qk_l2norm=True)
        want, states = glax.recurrent_step(**token, state=states, slots=SLOTS, use_qk_l2norm=True)
        assert_close("output", output, np.asarray(want), 2e-6)


def test_a_pool_passes_through_jit_and_scan():
    pool, tokens = pool_of(), tokens_of(9)
    by_time = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    scan = quick_jit(lambda pool: jax.lax.scan(lambda pool, x: pool.step(**x, slots=SLOTS)[::-1], pool, by_time))
    new, _ = scan(pool)
    assert isinstance(new, serving.StatePool) and new.layout == pool.layout
    want = pool
    for t in range(9):
        _, want = want.step(**{name: x[:, t] for name, x in tokens.items()}, slots=SLOTS)
    assert_close("states", new.states_of(), np.asarray(want.states_of()), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("call", ["step", "verify", "commit", "flush"])
def test_a_donated_pool_is_not_copied(call, dtype):
    """Neither where states are written nor where they are not; its rings are far smaller than its states."""
    pool = serving.StatePool(256, 2, 64, dtype, replay=3, drafts=1, form="head")
    token = {name: jnp.ones((2, 2, 64)) for name in ("query", "key", "value")} | dict(g=jnp.zeros((2, 2)))
    run = dict(
        step=lambda pool, slots: pool.step(**token, slots=slots),
        verify=lambda pool, slots: pool.verify(**{name: x[:, None] for name, x in token.items()}, slots=slots),
        commit=lambda pool, slots: pool.commit(jnp.ones(2, jnp.int32), slots=slots),
        flush=lambda pool, slots: pool.flush(slots),
    )[call]
    memory = jax.jit(run, donate_argnums=0).lower(pool, jnp.array([3, 200])).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend does not report its memory")
    assert memory.temp_size_in_bytes < pool.states.nbytes / 4
    assert memory.alias_size_in_bytes >= pool.states.nbytes


def test_states_of_sixteen_bits_are_rounded_when_they_are_written():
    pool, token = pool_of(replay=2, drafts=0, dtype="bfloat16"), tokens_of()
    key = jax.random.key(0)
    _, behind = pool.step(**token, slots=SLOTS)
    _, nearest = behind.step(**token, slots=SLOTS)
    _, random = behind.step(**token, slots=SLOTS, rounding_key=key)
    assert nearest.states.dtype == random.states.dtype == jnp.bfloat16
    assert (nearest.states[0] != random.states[0]).any()
    assert_close("rounded", nearest.states, np.asarray(random.states, np.float32), 1e-2)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_pool_of_8_bits_has_the_same_calls(dtype):
    """Prompts, steps, drafts and stored prefixes; slots that no call names keep their bits."""
    bar = dict(int8=0.03, float8_e4m3fn=0.1)[dtype]
    prompt, token, drafts = tokens_of(70), tokens_of(), tokens_of(3)
    rows, cuts, slots = {name: x[0] for name, x in prompt.items()}, jnp.array([0, 66, 70]), jnp.array([4, 0])
    options = dict(cu_seqlens=cuts, fresh=jnp.array([True, True]), states_every=64, state_slots=jnp.array([1]))
    found = []
    for each in (dtype, "float32"):
        pool = serving.StatePool(P, (4, 2, 1), (K, V), each, replay=2, drafts=3, form="key")
        output, pool = pool.prefill(slots, **rows, **options)
        found.append([output, pool.states_of()])
        for _ in range(3):
            output, pool = pool.step(**token, slots=SLOTS)
            found[-1].append(output)
        output, pool = pool.verify(**drafts, slots=SLOTS)
        pool = pool.commit(jnp.array([2, 0, 3]), slots=SLOTS)
        found[-1] += [output, pool.states_of()]
        if each == dtype:
            assert pool.states.nbytes < 6 * H * P * K * V
            assert not pool.states.values[jnp.array([2, 3, 5])].any()
    for x, y in zip(*found, strict=True):
        assert_close("result", x, np.asarray(y), bar)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (dict(slots=-1), ValueError, "slots must be at least 0, got -1"),
        (dict(heads=(4, 3, 1)), ValueError, r"heads must be numbers that divide the largest, got \(4, 3, 1\)"),
        (dict(heads=(4, 2)), ValueError, r"heads must be one number or 3, got \(4, 2\)"),
        (dict(widths=0), ValueError, "widths must be at least 1, got 0"),
        (dict(replay=0), ValueError, "replay must be at least 1, got 0"),
        (dict(replay=2.0), TypeError, "replay must be an integer, known while tracing, got 2.0"),
        (dict(drafts=-1), ValueError, "drafts must be at least 0, got -1"),
        (dict(form="gk"), ValueError, "form must be a decay form, 'none', .*, got 'gk'"),
        (dict(form="key+beta+write"), ValueError, r"form must be .*'\+erase\+write'.*, got 'key\+beta\+write'"),
        (dict(dtype="int32"), TypeError, "dtype must be floating point, got int32"),
        (dict(dtype="float8_e5m2"), TypeError, "dtype must be float32, bfloat16, float16 or float64, got float8_e5m2"),
        (dict(token_dtype="int8"), TypeError, "token_dtype must be float32, .*, got int8"),
    ],
)
def test_layouts_are_checked(changes, error, text):
    with pytest.raises(error, match=text):
        serving.StatePool(**dict(slots=4, heads=2, widths=8) | changes)


def test_tokens_are_checked_against_the_form():
    pool, token = pool_of(), tokens_of()
    with pytest.raises(ValueError, match=r"form must be 'head', .* got 'key': make the pool with form='head'"):
        pool.step(**tokens_of(gates=("g",)), slots=SLOTS)
    with pytest.raises(ValueError, match=r"form must be 'key\+beta', .* got 'key'"):
        pool.step(**tokens_of(erasure=("beta",)), slots=SLOTS)
    with pytest.raises(
        ValueError, match=r"heads of key, of value and of the states must be \(2, 1, 4\) .*, got \(4, 1, 4\)"
    ):
        pool.step(**token | dict(key=jnp.ones((B, 4, K))), slots=SLOTS)
    with pytest.raises(
        TypeError, match=r"query must be bfloat16, .* got float32: make the pool with token_dtype='float32'"
    ):
        pool_of(token_dtype="bfloat16").step(**token, slots=SLOTS)
    with pytest.raises(TypeError, match="tokens have no argument 'beat'"):
        pool.step(**token, slots=SLOTS, beat=token["gk"])
    with pytest.raises(ValueError, match="query must have at most drafts=3 tokens, got 4: make the pool with drafts=4"):
        pool.verify(**tokens_of(4), slots=SLOTS)
    with pytest.raises(ValueError, match="slots must be given for 3 sequences in a pool of 6 slots, got None"):
        pool.step(**token)
    with pytest.raises(ValueError, match="slots must be from -1 to 5"):
        pool.step(**token, slots=jnp.array([6, 0, 1]))
    with pytest.raises(ValueError, match="slots must not repeat, got 1 more than once"):
        pool.step(**token, slots=jnp.array([1, 0, 1]))


@pytest.mark.parametrize(
    ("slots", "error", "text"),
    [
        ([0, 1, 2], TypeError, "{} must be an array, got list"),
        (jnp.array(0), ValueError, "{} must be [{}], got shape ()"),
        (jnp.array([[0]]), ValueError, "{} must be [{}], got shape (1, 1)"),
        (jnp.array([0.0]), TypeError, "{} must hold integers, got float32"),
    ],
    ids=["list", "number", "matrix", "float"],
)
def test_slots_of_another_kind_are_named(slots, error, text):
    pool, prompt = pool_of(), tokens_of(3)
    calls = [
        (lambda: pool.flush(slots), "slots", "B"),
        (lambda: pool.states_of(slots), "slots", "B"),
        (lambda: pool.commit(jnp.zeros(3, jnp.int32), slots=slots), "slots", "B"),
        (lambda: pool.prefill(slots, **prompt), "slots", "N"),
        (lambda: pool.prefill(SLOTS, **prompt, write_slots=slots), "write_slots", "N"),
        (lambda: pool.prefill(SLOTS, **prompt, state_slots=slots), "state_slots", "M"),
    ]
    for call, *names in calls:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text.format(*names)


def test_accepted_tokens_are_checked_against_the_drafts():
    _, pool = pool_of().verify(**tokens_of(3), slots=SLOTS)
    for accepted, wrong in (([4, 0, 0], 4), ([0, 0, -1], -1)):
        with pytest.raises(ValueError, match=f"accepted must be from 0 to 3, the drafts of its slot, got {wrong}"):
            pool.commit(jnp.array(accepted), slots=SLOTS)
    with pytest.raises(ValueError, match="accepted must be from 0 to 0, the drafts of its slot, got 1"):
        pool.commit(jnp.array([1]), slots=jnp.array([1]))
    with pytest.raises(TypeError, match="accepted must hold integers, got float32"):
        pool.commit(jnp.ones(3), slots=SLOTS)
    traced = jax.jit(lambda pool, accepted: pool.commit(accepted, slots=SLOTS))(pool, jnp.array([9, 9, -9]))
    assert traced.length.tolist() == [0, 0, 0, 0, 3, 0]
