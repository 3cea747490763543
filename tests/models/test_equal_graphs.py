"""Equal models have equal graphs: nothing is compiled again for a second load, and the graph can be pickled."""

import pathlib
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import glax.models
import glax.nn
from glax.models.generation import loop

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
LAYERS = """
Attention Comba DeltaNet GatedDeltaNet GatedDeltaProduct GatedLinearAttention GatedSlotAttention HGRN2Attention
HGRNAttention KimiDeltaAttention LightningAttention MLSTM Mamba1 Mamba2 Mamba3 MultiScaleRetention RWKV6Attention
RWKV7Attention SimpleGatedLinearAttention
"""


@pytest.mark.fast
@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_models_of_one_config_have_equal_graphs_that_can_be_pickled(name):
    first, second = (
        nnx.graphdef(nnx.eval_shape(lambda: glax.models.from_config(FIXTURES / name, rngs=nnx.Rngs(0))))
        for _ in range(2)
    )
    assert first == second and hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.fast
def test_the_second_load_of_a_folder_compiles_nothing():
    tokens = jnp.arange(5)[None]
    glax.models.generate(glax.models.from_pretrained(FIXTURES / "gla"), tokens, 2)
    size = loop._cache_size()
    glax.models.generate(glax.models.from_pretrained(FIXTURES / "gla"), tokens, 2)
    assert size and loop._cache_size() == size


@pytest.mark.fast
@pytest.mark.parametrize("layer", LAYERS.split())
def test_layers_do_not_store_functions_of_their_first_values(layer):
    of_states = dict(num_heads=2, head_width=16, state_width=8)
    more = {"HGRNAttention": {}, "Mamba1": {}, "Mamba2": of_states, "Mamba3": of_states}.get(layer, dict(num_heads=2))
    more |= dict(layer_idx=0, num_layers=2) if layer == "LightningAttention" else {}

    def graph():
        init = nnx.initializers.normal(0.5)
        make = getattr(glax.nn, layer)
        return nnx.graphdef(nnx.eval_shape(lambda: make(16, kernel_init=init, **more, rngs=nnx.Rngs(0))))

    first, second = graph(), graph()
    assert first == second and hash(first) == hash(second)
    pickle.dumps(first)


@pytest.mark.fast
def test_kernel_init_gives_the_first_values_of_every_projection():
    layer = glax.nn.KimiDeltaAttention(16, num_heads=2, kernel_init=nnx.initializers.constant(0.5), rngs=nnx.Rngs(0))
    kernels = [x for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param)) if path[-1] == "kernel"]
    assert len(kernels) == 9 and all(bool(jax.numpy.all(x[...] == 0.5)) for x in kernels)
