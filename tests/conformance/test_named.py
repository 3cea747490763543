"""The named recurrences against loops over tokens in float64: outputs, states, and the gradient of every input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.testing.tolerances import ERASING_BARS, EXTREME_GATES
from tests.close import assert_close
from tests.named_cases import NamedCase, all_named_cases
from tests.suite import at_each

CASES = all_named_cases()


@functools.cache
def loop(case: NamedCase):
    def value(arrays, d_output, d_final):
        output, final = case.wanted(arrays)
        return (output * d_output).sum() + (final * d_final).sum(), (output, final)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


@functools.cache
def call(case: NamedCase):
    def value(arrays, d_output, d_final):
        output, final = case.named.run(**arrays, **case.options)
        return (output.astype(d_output.dtype) * d_output).sum() + (final * d_final).sum(), (output, final)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_named_recurrence_equals_its_loop_over_tokens(case):
    at_each(case.strengths, functools.partial(check, case))


def check(case: NamedCase, strength: str):
    rng, wide = np.random.default_rng(1), case.dtype == "float64"
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in case.arrays(strength).items()}
        d_output = jnp.asarray(rng.normal(size=(case.B, case.T, case.H, case.V)).astype(case.dtype).astype("float64"))
        d_final = jnp.asarray(rng.normal(size=arrays["initial_state"].shape).astype("float32").astype("float64"))
        (_, want), want_gradient = loop(case)(arrays, d_output * case.is_token[..., None, None], d_final)
    with jax.enable_x64(wide):
        cotangents = (
            jnp.asarray(np.asarray(d_output), "float64" if wide else "float32"),
            jnp.asarray(np.asarray(d_final)),
        )
        (_, got), got_gradient = call(case)(case.given(strength), *cotangents)
    bars = ERASING_BARS[case.dtype]
    extreme = EXTREME_GATES if "inf" in strength and case.dtype == "float32" else 1
    for name, x, y in zip(("output", "final_state"), got, want, strict=True):
        assert_close(name, x, y, bars[0] * extreme)
    assert not np.asarray(got[0])[~case.is_token].any()
    for name, y in want_gradient.items():
        assert_close(f"d {name}", got_gradient[name], case.by_row(name, y), bars[1] * extreme)


# ---- decoding ------------------------------------------------------------------------------------------------------------


def by_recurrent(name: str, a: dict) -> dict:
    """The arguments of recurrent_step, prefill_into and recurrent_verify that docs/variants.md gives for a named recurrence."""
    if name == "gated_delta_rule_2":
        shared = dict(gk=a["g"], erase=a["erase_gate"] * a["key"], write=a["write_gate"])
        return dict(query=a["query"], key=a["key"], value=a["value"], **shared)
    if name == "rwkv7":
        shared = dict(gk=a["log_decay"], erase=-a["a"], erase_along=a["b"], erase_before_decay=True, softmax_scale=1.0)
        return dict(query=a["receptance"], key=a["key"], value=a["value"], **shared)
    beta = a["beta"][..., None]
    shared = dict(g=a["g"], erase=beta * a["erase_key"], erase_before_decay=True)
    return dict(query=a["query"], key=a["key"], value=beta * a["value"], **shared)


@pytest.mark.parametrize("name", ["gated_delta_rule_2", "comba", "rwkv7"])
def test_steps_prompts_and_drafts_equal_the_loop(name):
    case = NamedCase("", name, B=2, T=9)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in case.arrays("-inf on 5%").items()}
    state, bar = arrays["initial_state"], ERASING_BARS["float32"][0]
    with jax.enable_x64(True):
        want, final = case.wanted({name: jnp.asarray(np.asarray(x), "float64") for name, x in arrays.items()})
    tokens = by_recurrent(name, arrays)
    pool, slots = jnp.zeros((4, *state.shape[1:])).at[jnp.array([2, 0])].set(state), jnp.array([2, 0])
    output, filled = glax.prefill_into(pool, slots, **tokens)
    assert_close("output", output, want, bar)
    assert_close("pool", filled[slots], final, bar)
    drafted, draft = glax.recurrent_verify(**tokens, state=pool, slots=slots)
    assert_close("output", drafted, want, bar)
    assert_close("pool", glax.commit(pool, draft, jnp.array([9, 9]))[slots], final, bar)
    for t in range(case.T):
        token = {name: x[:, t] if isinstance(x, jax.Array) else x for name, x in tokens.items()}
        if step := case.named.decode:
            own = {name: arrays[name][:, t] for name in case.named.arrays}
            assert_close("output", step(**own, state=pool[slots])[0], want[:, t], bar)
            assert_close("output", step(**own, state=pool, slots=slots)[0], want[:, t], bar)
        output, pool = glax.recurrent_step(**token, state=pool, slots=slots)
        assert_close("output", output, want[:, t], bar)
    assert_close("pool", pool[slots], final, bar)


def test_steps_of_several_updates_equal_the_loop():
    case = NamedCase("", "gated_delta_product", B=2, T=5)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in case.arrays("-inf on 5%").items()}
    state, slots, bar = arrays["initial_state"], jnp.array([2, 0]), ERASING_BARS["float32"][0]
    with jax.enable_x64(True):
        want, final = case.wanted({name: jnp.asarray(np.asarray(x), "float64") for name, x in arrays.items()})
    pool = jnp.zeros((4, *state.shape[1:])).at[slots].set(state)
    for t in range(case.T):
        output, pool = case.named.decode(
            **{name: arrays[name][:, t] for name in case.named.arrays}, state=pool, slots=slots
        )
        assert_close("output", output, want[:, t], bar)
    assert_close("pool", pool[slots], final, bar)
    assert not pool[1].any() and not pool[3].any()


def test_states_of_several_updates_are_counted_in_tokens():
    case = NamedCase("", "gated_delta_product", T=150)
    arrays = case.given("log-sigmoid")
    stored = case.named.run(**arrays, states_every=64).states
    for i, T in enumerate((64, 128)):
        head = {name: x if name == "initial_state" else x[:, : T * x.shape[1] // 150] for name, x in arrays.items()}
        assert_close("state", stored[:, i], np.asarray(case.named.run(**head).final_state, "float64"), 1e-5)


def test_an_argument_of_another_shape_is_named():
    a = {name: jnp.asarray(x, jnp.float32) for name, x in NamedCase("", "comba").arrays("0").items()}
    a.pop("initial_state")
    with pytest.raises(ValueError, match="erase_key must be"):
        glax.comba(**a | dict(erase_key=a["value"]))
    with pytest.raises(ValueError, match=r"g must be \[B, T, H\] in comba"):
        glax.comba(**a | dict(g=a["key"]))
    with pytest.raises(TypeError, match=r"options must be of cfg.*got beta2"):
        glax.comba(**a, beta2=1)
    tokens = dict(query=a["query"], key=a["key"], value=a["value"], g=a["g"], beta=a["beta"])
    with pytest.raises(ValueError, match=r"key must be .* with T \* num_updates = 77 \* 2 rows"):
        glax.gated_delta_product(**tokens, num_updates=2)


def mlstm_step(slots):
    x, gate = jnp.ones((2, 2, 4)), jnp.zeros((2, 2))
    pool = glax.MLSTMState(*(jnp.full(shape, 7.0) for shape in ((200, 2, 4, 4), (200, 2, 4), (200, 2))))
    return pool, glax.mlstm_step(x, x, x, gate + 9, gate, pool, slots=slots)


def mamba3_step(slots):
    x, gate, bias = jnp.ones((2, 2, 4)), jnp.ones((2, 2)), jnp.ones((2, 4))
    shapes = (200, 2, 2), (200, 2, 4, 4), (200, 2, 4), (200, 2, 4)
    pool = glax.Mamba3State(*(jnp.full(shape, 7.0) for shape in shapes))
    return pool, glax.mamba3_step(x, x, x, -gate, gate, gate, bias, bias, x[..., :2], state=pool, slots=slots)


@pytest.mark.parametrize("step", [mlstm_step, mamba3_step])
def test_an_unused_slot_of_a_small_dtype_touches_no_row_of_a_large_pool(step):
    pool, (output, written) = step(jnp.array([3, -1], jnp.int8))
    assert not np.asarray(output[1]).any()
    for before, after in zip(pool, written, strict=True):
        assert {*np.flatnonzero((np.asarray(before) != np.asarray(after)).reshape(200, -1).any(1))} == {3}
    with pytest.raises(TypeError, match="slots must be"):
        step([3, -1])
    with pytest.raises(ValueError, match="slots must be"):
        step(jnp.array([3, -1, 0]))
