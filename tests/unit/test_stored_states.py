"""States stored in bfloat16 and float16, rounded to nearest or stochastically; other dtypes are refused by name."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.stored_states import CompactStates, stored
from glax.testing import states
from tests.cases import Case, inputs
from tests.close import assert_close

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e-8])  # float16 is subnormal below 6e-5
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_is_to_a_neighbour_and_right_on_average(dtype, scale):
    x = jnp.asarray(np.random.default_rng(0).normal(size=500) * scale, jnp.float32)
    many = jax.vmap(lambda key: stored(x, dtype, key))(jax.random.split(jax.random.key(0), 2000))
    assert many.dtype == dtype
    wide, limits = np.asarray(many.astype(jnp.float32)), jnp.finfo(dtype)
    spacing = np.exp2(np.floor(np.log2(np.abs(x)))) * float(limits.eps)
    spacing = np.maximum(spacing, float(limits.smallest_subnormal))
    assert (np.abs(wide - np.asarray(x)) < spacing).all()
    assert np.abs(wide.mean(0) - np.asarray(x)).max() < 0.06 * spacing.max()
    exact = x.astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(stored(exact, dtype, jax.random.key(1)), exact.astype(dtype))


def test_values_that_are_not_finite_stay_so():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    for dtype in ("bfloat16", "float16"):
        np.testing.assert_array_equal(stored(x, dtype, jax.random.key(0)).astype(jnp.float32), x)


def pool_and_tokens(T: int, dtype):
    arguments = inputs(Case("", B=3, T=T, heads=(4, 2, 2), K=6, V=5, state_dtype=None), "mild")
    return jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, 6, 5)), dtype), arguments


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_function_rounds_its_new_states_and_no_others(dtype):
    """The mean over keys is the state in float32; rows of other slots keep their bits, null slots too."""
    pool, arguments = pool_and_tokens(2, dtype)
    slots, cuts = jnp.array([4, -1, 0]), jnp.array([0, 2, 2, 2])
    token = {name: x[:, 0] for name, x in arguments.items()}
    rows = {name: x[0] for name, x in arguments.items()}
    _, draft = glax.recurrent_verify(**arguments, state=pool, slots=slots)
    accepted = jnp.array([2, 1, 0])
    calls = dict(
        step=lambda pool, **key: glax.recurrent_step(**token, state=pool, slots=slots, **key)[1],
        prefill=lambda pool, **key: glax.prefill_into(pool, slots, **rows, cu_seqlens=cuts, **key)[1],
        commit=lambda pool, **key: glax.commit(pool, draft, accepted, **key),
    )
    for name, call in calls.items():
        keys = jax.random.split(jax.random.key(2), 400)
        many = jax.jit(jax.vmap(lambda key, call=call: call(pool, rounding_key=key)))(keys)
        assert many.dtype == dtype
        want = np.asarray(call(pool.astype(jnp.float32)))
        assert_close(name, many.astype(jnp.float32).mean(0), want, 6e-4)
        untouched = np.asarray([1, 2, 3, 5] + ([0] if name != "step" else []))
        for once in many[:3]:
            np.testing.assert_array_equal(once[untouched], pool[untouched])
        np.testing.assert_array_equal(call(pool.astype(jnp.float32), rounding_key=keys[0]), want)


def test_the_gradient_is_that_of_a_cast_and_states_without_pool_are_rounded():
    pool, arguments = pool_and_tokens(1, "bfloat16")
    token = {name: x[:, 0] for name, x in arguments.items()}

    def loss(token, **key):
        output, state = glax.recurrent_step(**token, state=pool[:3], **key)
        return (output**2).sum() + state.astype(jnp.float32).sum()

    got, want = jax.grad(loss)(token, rounding_key=jax.random.PRNGKey(0)), jax.grad(loss)(token)
    for name, x in got.items():
        assert_close(f"d {name}", x, np.asarray(want[name]), 1e-5)


def test_rounding_to_nearest_loses_slow_decays_and_states_with_rests_do_not():
    errors = {(x.dtype, x.stochastic, x.decay): x.error for x in states.state_errors()}
    for decay in states.DECAYS:
        assert errors["int8", False, decay] < 0.02
        assert errors["int8", False, decay] < 3 * errors["bfloat16", False, decay]
        assert errors["float8_e4m3fn", False, decay] < 0.04
    slow = max(states.DECAYS)
    assert errors["float32", False, slow] < 1e-5
    assert errors["bfloat16", False, slow] > 0.1 > errors["bfloat16", True, slow]
    assert errors["float16", False, slow] > 0.1 > errors["float16", True, slow]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_other_dtypes_are_refused_by_name(dtype):
    pool, arguments = pool_and_tokens(1, "float32")
    pool = pool.astype(dtype)
    text = f"got {dtype}"
    token = {name: x[:, 0] for name, x in arguments.items()}
    rows = {name: x[0] for name, x in arguments.items()}
    slots = jnp.array([0, 1, 2])
    _, draft = glax.recurrent_verify(**arguments, state=pool.astype(jnp.float32), slots=slots)
    for call in (
        lambda: glax.recurrent_step(**token, state=pool, slots=slots),
        lambda: glax.prefill_into(pool, slots[:1], **rows, cu_seqlens=jnp.array([0, 1])),
        lambda: glax.recurrent_verify(**arguments, state=pool, slots=slots),
        lambda: glax.commit(pool, draft, jnp.array([1, 1, 1])),
    ):
        with pytest.raises(TypeError, match=text):
            call()


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (7, TypeError, r"rounding_key must be a key such as jax.random.key\(0\), got 7"),
        (jnp.ones(2), TypeError, "rounding_key must be a key such as .*, got an array of float32"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"rounding_key must be one key, got shape \(3,\)"),
    ],
)
def test_what_is_no_key_is_refused(key, error, text):
    pool, arguments = pool_and_tokens(1, "bfloat16")
    with pytest.raises(error, match=text):
        glax.recurrent_step(**{name: x[:, 0] for name, x in arguments.items()}, state=pool[:3], rounding_key=key)


@pytest.mark.parametrize(("dtype", "rounded", "whole"), [("int8", 9e-3, 4e-5), ("float8_e4m3fn", 3e-2, 8e-4)])
@pytest.mark.parametrize("shape", [(2, 3, 64, 48), (1, 2, 6, 5), (1, 1, 1, 1), (1, 1, 128, 128)])
def test_states_in_8_bits_are_whole_with_their_rests(dtype, rounded, whole, shape):
    """Each head and block of rows has a scale of its own, also where its numbers are subnormal or close to the largest."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sizes = np.array([1e-30, 1.0, 1e30], np.float32)[: shape[1], None, None]
    states = jnp.asarray(x * sizes)
    got = CompactStates.of(states, dtype)
    assert got.values.dtype == got.rests.dtype == dtype
    assert got.shape == shape and got.scale.shape == (*shape[:2], shape[2] // math.gcd(shape[2], 32))
    slots = jnp.arange(shape[0])
    for h in range(shape[1]):
        want = np.asarray(states[:, h], np.float64)
        assert_close("whole", got.whole()[:, h], want, whole)
        assert_close("rounded", got.without_rests(slots)[:, h], want, rounded)
    assert not CompactStates.of(0 * states, dtype).whole().any()
    tiny = CompactStates.of(jnp.full(shape, 1e-40), dtype).whole()
    assert (jnp.abs(tiny) < 1e-36).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_shows_in_8_bits(dtype, value):
    """As NaN in its own block of rows alone."""
    got = CompactStates.of(jnp.ones((1, 2, 64, 4)).at[0, 1, 40, 2].set(value), dtype).whole()
    assert jnp.isnan(got[0, 1, 32:]).all()
    assert jnp.isfinite(got[0, 0]).all() and jnp.isfinite(got[0, 1, :32]).all()
