"""Decoding: one token at a time, pools of states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from tests.cases import GATE_SUBSETS, Case, inputs
from tests.close import assert_close

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("gates", GATE_SUBSETS, ids=lambda gates: "+".join(gates) or "none")
def test_token_by_token_equals_one_pass(gates):
    case = Case("", B=3, T=20, heads=(4, 2, 2), gates=gates, K=6, V=5)
    arguments = inputs(case, "log-sigmoid")
    constant = {name: arguments.pop(name) for name in ("g_gamma",) if name in arguments}
    whole = glax.recurrent(**arguments, **constant)
    state = arguments.pop("initial_state")

    def step(state, token):
        output, state = glax.recurrent_step(**token, **constant, state=state)
        return state, output

    final, output = jax.lax.scan(step, state, {name: jnp.moveaxis(x, 1, 0) for name, x in arguments.items()})
    assert_close("output", jnp.moveaxis(output, 0, 1), whole.output, 2e-6)
    assert_close("state", final, whole.final_state, 2e-6)


@pytest.mark.parametrize("platform", [None, "xla"], ids=["as chosen", "xla"])
@pytest.mark.parametrize("gate", ["g_gamma", "gk", "gv"])
def test_fifty_thousand_steps_of_decays_next_to_1(gate, platform):
    """Equal gates would round alike at every step, and decays of less than half a digit round to nothing."""
    rng = np.random.default_rng(0)
    logs = np.array([-9e-6, -1e-6, -4e-8, -3e-3], np.float32)
    k, v = rng.normal(size=(2, 50_000, 1, len(logs), 2)).astype(np.float32)
    first = rng.normal(size=(1, len(logs), 2, 2)).astype(np.float32)
    given = {gate: logs if gate == "g_gamma" else np.broadcast_to(logs[:, None], k.shape[1:])}

    def step(state, token):
        k, v = token
        return glax.recurrent_step(k, k, v, state, **given, platform=platform)[1], None

    state, _ = jax.jit(lambda *tokens: jax.lax.scan(step, first, tokens))(k, v)
    behind = np.arange(len(k))[::-1, None] * logs.astype(np.float64)  # log decays behind each token
    want = first[0] * np.exp(len(k) * logs.astype(np.float64))[:, None, None]
    want += np.einsum("th,thk,thv->hkv", np.exp(behind), *(x[:, 0].astype(np.float64) for x in (k, v)))
    for head, log in enumerate(logs):
        assert_close(f"state at {log}", state[0, head], want[head], 1e-5)


def token_and_pool(dtype=jnp.float32):
    arguments = inputs(Case("", B=3, T=1, heads=(4, 2, 2), K=6, V=5, state_dtype=None), "log-sigmoid")
    pool = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, 6, 5)), dtype)
    return {name: x[:, 0] for name, x in arguments.items()}, pool


@pytest.mark.parametrize("traced", [False, True])
def test_slots(traced):
    """Used rows change, all others keep their bits; slot -1 touches nothing and answers 0."""
    token, pool = token_and_pool()
    slots = jnp.array([4, -1, 0])
    step = jax.jit(glax.recurrent_step) if traced else glax.recurrent_step
    output, new = step(**token, state=pool, slots=slots)
    direct, states = glax.recurrent_step(**token, state=pool[jnp.array([4, 0, 0])])
    assert_close("output", output[0], direct[0], 1e-6)
    assert_close("output", output[2], direct[2], 1e-6)
    assert not output[1].any()
    assert_close("state", new[4], states[0], 1e-6)
    assert_close("state", new[0], states[2], 1e-6)
    for row in (1, 2, 3, 5):
        np.testing.assert_array_equal(new[row], pool[row])


def test_a_traced_slot_outside_the_pool_touches_nothing():
    token, pool = token_and_pool()
    output, new = jax.jit(glax.recurrent_step)(**token, state=pool, slots=jnp.array([6, -2, 100]))
    np.testing.assert_array_equal(new, pool)
    assert not output.any()


def test_null_slots_ignore_what_their_tokens_hold():
    token, pool = token_and_pool()
    token = {name: x.at[1].set(jnp.nan) for name, x in token.items()}
    output, new = glax.recurrent_step(**token, state=pool, slots=jnp.array([4, -1, 0]))
    assert np.isfinite(output).all()
    assert np.isfinite(new).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_are_stored_in_their_own_dtype(dtype):
    token, pool = token_and_pool(dtype)
    output, new = glax.recurrent_step(**token, state=pool[:3])
    assert new.dtype == pool.dtype
    want, wide = glax.recurrent_step(**token, state=pool[:3].astype(jnp.float32))
    assert_close("output", output, want, 1e-6)
    assert_close("state", new, wide, 4e-3)


def test_a_donated_pool_is_updated_in_place():
    token, _ = token_and_pool()
    pool = jnp.zeros((4096, 4, 6, 5))
    step = jax.jit(glax.recurrent_step, donate_argnames="state")
    memory = step.lower(**token, state=pool, slots=jnp.array([0, 1, 2])).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 10


def test_gradients_and_vmap():
    token, pool = token_and_pool()

    def loss(token, state):
        output, state = glax.recurrent_step(**token, state=state)
        return (output**2).sum() + (state**2).sum()

    def definition(token, state):
        q, k, v = (jnp.repeat(token[name], n, axis=1) for name, n in (("query", 1), ("key", 2), ("value", 2)))
        state = jnp.exp(token["gk"])[..., None] * state + k[..., None] * v[..., None, :]
        output = 6**-0.5 * jnp.einsum("bhk,bhkv->bhv", q, state)
        return (output**2).sum() + (state**2).sum()

    got, want = (jax.grad(f, argnums=(0, 1))(token, pool[:3]) for f in (loss, definition))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("gradient", x, y, 2e-6)
    states = jnp.stack([pool[:3], pool[3:]])
    each = functools.partial(glax.recurrent_step, **token)
    got = jax.vmap(lambda s: each(state=s))(states)
    for i in range(2):
        assert_close("vmap", got[0][i], each(state=states[i])[0], 1e-6)
