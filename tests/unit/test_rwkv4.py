"""RWKV-4's sums of weights: in long decoding with slow decays, and gradients where weights are nearly all or nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax import nn
from glax.nn.rwkv4 import NOTHING, behind_token

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("key", [-100.0, 1.0, 100.0])
def test_a_sum_of_weights_does_not_stand_still_where_decays_are_slow(key):
    """100,000 equal keys, one at a time. Without the rest L is off by .03 to .09 where w is e^-10."""
    w, k, T = jnp.exp(jnp.asarray([-30.0, -10.0, -3.0])), jnp.full(3, key), 100_000

    @jax.jit
    def decoded():
        start = jnp.full(3, NOTHING), jnp.zeros(3)
        return jax.lax.fori_loop(0, T, lambda _, pair: behind_token(pair[0], pair[1], k, w), start)[0]

    exact = np.asarray(w, np.float64)
    want = key + np.log(-np.expm1(-exact * T) / -np.expm1(-exact))
    np.testing.assert_allclose(decoded(), want, rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize(("decay", "bonus"), [(3.0, 1.0), (-5.0, 20.0), (-8.0, -20.0)])
def test_gradients_of_weights_that_are_nearly_all_or_nothing(decay, bonus):
    layer = nn.RWKV4Attention(2, inside=3, rngs=nnx.Rngs(0))
    layer.decay[...], layer.bonus[...] = jnp.full(3, decay), jnp.full(3, bonus)
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2)), jnp.float32)

    def loss(state, x):
        return jnp.sin(3 * nnx.merge(graph, state)(x)[0]).sum()

    def by_sums(state, x):
        p, x = nnx.merge(graph, state), x[0]
        before = jnp.concatenate([jnp.zeros((1, 2), x.dtype), x[:-1]])

        def projected(mixture, projection):
            mu = mixture[...]
            return (mu * x + (1 - mu) * before) @ projection.kernel[...]

        r = projected(p.mix_receptance, p.receptance)
        k, v = projected(p.mix_key, p.key), projected(p.mix_value, p.value)
        w, total, weighted, rows = jnp.exp(p.decay[...]), 0.0, 0.0, []
        for t in range(len(x)):
            own = jnp.exp(p.bonus[...] + k[t])
            rows.append((weighted + own * v[t]) / (total + own))
            total, weighted = (jnp.exp(-w) * a + jnp.exp(k[t]) * b for a, b in ((total, 1.0), (weighted, v[t])))
        return jnp.sin(3 * (jax.nn.sigmoid(r) * jnp.stack(rows)) @ p.output.kernel[...]).sum()

    got = jax.jit(jax.grad(loss))(state, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float64), (state, x))
        want = jax.jit(jax.grad(by_sums))(*wide)
    for name in ("decay", "bonus"):
        a, b = (np.asarray(y[name].get_value(), np.float64) for y in (got, want))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-12, err_msg=name)
