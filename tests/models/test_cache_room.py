"""The cache of softmax attention: what lies behind its end is an error or NaN, and a state continues its own sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax.models import from_config
from glax.nn import Attention

FULL = r"max_length must be at least {}, the tokens of the longest sequence, got a cache of {}"
X = jax.random.normal(jax.random.key(0), (2, 9, 16))


@pytest.fixture(scope="module", params=[None, 3])
def layer(request):
    return Attention(16, num_heads=4, num_kv_heads=2, window=request.param, rngs=nnx.Rngs(0))


def close(x, y):
    np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-5)


def grown(state, rows: int):
    return {
        name: x if name == "length" else jnp.pad(x, [(0, 0), (0, rows), (0, 0), (0, 0)]) for name, x in state.items()
    }


def test_a_cache_with_room_continues_and_a_full_one_is_an_error(layer):
    want, _ = layer(X)
    y, state = layer(X[:, :7], layer.initial_state(2, max_length=8))
    close(y, want[:, :7])
    y, state = layer.step(X[:, 7], state)
    close(y, want[:, 7])
    with pytest.raises(ValueError, match=FULL.format(9, 8)):
        layer.step(X[:, 8], state)
    with pytest.raises(ValueError, match=FULL.format(10, 8)):
        layer(X[:, :2], state)
    with pytest.raises(ValueError, match=FULL.format(9, 8)):
        jax.jit(lambda x: layer(x, layer.initial_state(2, max_length=8)))(X)  # a shape is known while tracing
    _, state = layer(X[:, :7])
    with pytest.raises(ValueError, match=FULL.format(8, 7)):
        layer.step(X[:, 7], state)


def test_tokens_behind_the_end_are_nan_where_their_position_is_traced(layer):
    want, _ = layer(X)
    _, state = layer(X[:, :7], layer.initial_state(2, max_length=8))
    pool = {name: jnp.concatenate([x, x]) for name, x in state.items()}
    pool["length"] = pool["length"].at[1].set(8)
    y, _ = jax.jit(layer.step)(X[:, 7], pool, jnp.array([0, 1]))
    close(y[0], want[0, 7])
    assert np.isnan(y[1]).all()
    y, _ = jax.jit(layer)(X[:, 7:], state)
    close(y[:, 0], want[:, 7])
    assert np.isnan(y[:, 1]).all()


def test_a_prefill_of_more_tokens_than_the_cache_has_rows(layer):
    pool, slots = layer.initial_state(3, max_length=4), jnp.array([2, 0])
    rows, cuts = jnp.concatenate([X[0, :3], X[1, :5], X[0, 3:4]]), jnp.array([0, 3, 8])
    with pytest.raises(ValueError, match=FULL.format(5, 4)):
        layer.prefill_into(rows, pool, slots, cuts)
    y, _ = jax.jit(layer.prefill_into)(rows, pool, slots, cuts)
    want, _ = layer(X)
    close(y[:3], want[0, :3])
    close(y[3:7], want[1, :4])
    assert np.isnan(y[7]).all()


def test_the_state_behind_packed_rows_is_that_of_their_sequences(layer):
    want, _ = layer(X)
    rows = jnp.concatenate([X[0, :3], X[1, :6]])[None]
    for run in (layer, jax.jit(layer)):
        _, state = run(rows, cu_seqlens=jnp.array([0, 3, 9]))
        y, _ = layer.step(jnp.stack([X[0, 3], X[1, 6]]), grown(state, 1))
        close(y, jnp.stack([want[0, 3], want[1, 6]]))
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 2], [3, 3, 3, 3, 0, 0, 0, 0, 0]])
    both = jnp.concatenate([rows, jnp.concatenate([X[:1, :4], X[1:, 4:]], 1)])
    for run in (layer, jax.jit(layer, static_argnames="pad_id")):
        _, state = run(both, segment_ids=ids, pad_id=0)
        y, _ = layer.step(jnp.stack([X[1, 6], X[0, 4]]), grown(state, 1))
        close(y, jnp.stack([want[1, 6], want[0, 4]]))


def test_a_hybrid_says_when_its_caches_are_full():
    options = dict(vocab_size=32, hidden_size=8, num_hidden_layers=2, num_heads=2, intermediate_size=8)
    model = from_config(dict(model_type="gla", attn=dict(layers=[1], num_heads=2), **options), rngs=nnx.Rngs(0))
    tokens, cuts = jnp.arange(6), jnp.array([0, 6])
    _, pools = model.prefill(tokens, model.initial_states(1, 6), jnp.array([0]), cuts)
    with pytest.raises(ValueError, match=FULL.format(7, 6)):
        model.step(tokens[:1], pools)
    assert np.isnan(nnx.jit(lambda model, *rest: model.step(*rest))(model, tokens[:1], pools)[0]).all()
    with pytest.raises(ValueError, match=FULL.format(6, 5)):
        model.prefill(tokens, model.initial_states(1, 5), jnp.array([0]), cuts)
