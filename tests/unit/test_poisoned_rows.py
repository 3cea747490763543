"""Rows that are not finite: what lies in padding reaches nothing, and experts, windows and losses mix no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax.models import from_config
from glax.nn import Attention, LightningAttention, ShortConvolution, SimpleGatedLinearAttention
from glax.nn.losses import next_token_loss
from glax.nn.mamba3 import Mamba3
from glax.nn.mlp import SparseMLP
from glax.nn.rwkv6 import RWKV6FeedForward
from glax.nn.rwkv7 import RWKV7Attention

WIDTH, T = 8, 12
IDS = np.array(
    [[3] * 4 + [5] * 5 + [0] * 3, [2] * T]
)  # the second document of the first row is poisoned, and the padding
OTHERS = np.array([[True] * 4 + [False] * 8, [True] * T])
PADDING = IDS == 0


def outputs_and_gradients(layer, x, weights):
    """Return the layer's outputs, the gradient of their weighted sum in x, and those in the parameters."""
    graph, params = nnx.split(layer)

    def weighted(x, params):
        y, _ = nnx.merge(graph, params)(x, segment_ids=jnp.asarray(IDS), pad_id=0)
        return (jnp.where(weights == 0, 0, y) * weights).sum(), y

    (_, y), (dx, d_params) = jax.value_and_grad(weighted, (0, 1), has_aux=True)(x, params)
    return y, dx, d_params


# The layers that no model of tests/models/test_poisoned_models.py has, or that hide behind others there.
LAYERS = {
    "attention": lambda: Attention(WIDTH, num_heads=2, qk_norm=True, gated=True, rngs=nnx.Rngs(0)),
    "channel mixing": lambda: RWKV6FeedForward(WIDTH, 16, rngs=nnx.Rngs(0)),
    "Mamba-3": lambda: Mamba3(WIDTH, num_heads=2, head_width=4, state_width=8, mimo_rank=2, rngs=nnx.Rngs(0)),
    "RWKV-7": lambda: RWKV7Attention(WIDTH, num_heads=2, rngs=nnx.Rngs(0)),
    "convolution": lambda: ShortConvolution(WIDTH, 3, rngs=nnx.Rngs(0)),
    "lightning": lambda: LightningAttention(WIDTH, num_heads=2, rngs=nnx.Rngs(0)),
    "simple gla": lambda: SimpleGatedLinearAttention(WIDTH, num_heads=2, rngs=nnx.Rngs(0)),
}


def assert_equal(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("name", LAYERS)
def test_documents_and_padding_reach_no_other_row(name):
    layer = LAYERS[name]()
    run, draw = jax.jit(outputs_and_gradients, static_argnums=0), np.random.default_rng(0)
    x, weights = (draw.standard_normal((2, T, WIDTH)).astype(np.float32) for _ in range(2))
    weights[PADDING] = 0
    y, dx, d_params = run(layer, x, weights)
    for value in (np.nan, np.inf):
        poisoned = x.copy()
        poisoned[0, 6] = value
        found = run(layer, poisoned, weights)
        assert not np.isfinite(found[0][0, 6]).all()
        assert_equal(found[0][OTHERS], y[OTHERS])
        assert_equal(found[0][0, 4:6], y[0, 4:6])  # earlier rows of the same document
        assert_equal(found[1][OTHERS], dx[OTHERS])
        found = run(layer, np.where(PADDING[..., None], value, x), weights)
        assert_equal(found[0][~PADDING], y[~PADDING])
        assert_equal(found[1][~PADDING], dx[~PADDING])
        assert_equal(found[2], d_params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", ["split", "fused"])
def test_experts_give_each_token_its_own_outputs_and_gradient(form, value):
    layer = SparseMLP(WIDTH, 6, 4, 2, form=form, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    run = jax.jit(lambda x, d_y: (lambda y, pull: (y, *pull(d_y)))(*jax.vjp(nnx.merge(graph, params), x)))
    x, d_y = (np.random.default_rng(i).standard_normal((1, T, WIDTH)).astype(np.float32) for i in range(2))
    wanted, others = run(x, d_y), np.arange(T) != 5
    for which in range(2):
        poisoned = [x.copy(), d_y.copy()]
        poisoned[which][0, 5] = value
        for got, want in zip(run(*poisoned), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[:, others], np.asarray(want)[:, others])


def test_the_loss_reads_rows_with_a_target_alone():
    x, kernel = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate([(2, T, 4), (4, 9)])
    )
    targets = np.where(PADDING, -1, np.arange(T) % 9)
    run = jax.jit(jax.value_and_grad(next_token_loss, (0, 1)))
    wanted, found = run(x, kernel, targets), run(np.where(PADDING[..., None], np.nan, x), kernel, targets)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    x[0, 5] = np.nan  # a row with a target makes the mean NaN, and leaves the gradients of other rows
    _, (dx, _) = run(x, kernel, targets)
    np.testing.assert_array_equal(dx[OTHERS], wanted[1][0][OTHERS])


def test_padding_of_no_token_reaches_neither_logits_nor_gradients():
    """Ids outside of the vocabulary are rows of NaN where they are traced."""
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
    graph, params = nnx.split(from_config(dict(model_type="gla", **sizes), rngs=nnx.Rngs(0)))

    @jax.jit
    def run(params, tokens):
        def loss(params):
            logits = nnx.merge(graph, params)(tokens, jnp.asarray(IDS), 0)
            return jnp.where(PADDING[..., None], 0, logits).sum(), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    tokens = np.arange(2 * T).reshape(2, T)
    ((_, logits), gradients), ((_, got), found) = run(params, tokens), run(params, np.where(PADDING, -1, tokens))
    np.testing.assert_array_equal(got[~PADDING], logits[~PADDING])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, gradients)
