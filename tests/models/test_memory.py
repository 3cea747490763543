"""The memory of padded prompts and of packed prefills, of a model with softmax attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax.models import generation

HYBRID = dict(model_type="gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
HYBRID |= dict(num_heads=2, attn=dict(layers=[0], num_heads=4))


@pytest.fixture(scope="module")
def model():
    return glax.models.from_config(HYBRID, rngs=nnx.Rngs(0))


def temporary_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def test_padded_prompts_take_no_more_memory_than_full_ones(model):
    """Scores of all rows by the rows of all caches would take 75 MiB: 4 heads of 8 x 256 by 8 x 288."""
    greedy, found = (1, None, 0.0, None, None, 1.0, None, False), []
    for lengths in (None, np.full(8, 200)):
        call = generation.prepare(model, np.ones((8, 256), np.int32), 32, lengths, "right", greedy, None, None)
        found.append(temporary_bytes(generation.read_prompts.lower(*call.reading).compile()))
    assert found[1] <= found[0]


def test_the_memory_of_a_prefill_grows_with_the_caches_alone(model):
    """2048 packed tokens, as the prompts of one slot and of 32: scores by the rows of all caches would grow to 1 GiB."""
    graph, params = nnx.split(model)

    def prefill(params, tokens, pools, slots, cuts):
        return nnx.merge(graph, params).prefill(tokens, pools, slots, cuts)

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    found, caches = [], []
    for slots in (1, 32):
        pools = jax.eval_shape(lambda slots=slots: model.initial_states(slots, 1024))
        caches.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)))
        run = jax.jit(prefill, donate_argnums=2)
        compiled = run.lower(params, integers(2048), pools, integers(slots), integers(slots + 1)).compile()
        found.append(temporary_bytes(compiled))
    assert found[1] - found[0] <= 2 * (caches[1] - caches[0])
