"""Equal models have equal graphs: nothing is compiled again for a second load, and the graph can be pickled."""

import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
import glax.nn
from glax.models.generation import write_tokens
from glax.models.structure import Structure
from glax.server.request import Request
from glax.server.scheduler import Scheduler

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
LAYERS = """
Attention Comba DeltaNet GatedDeltaNet GatedDeltaProduct GatedLinearAttention GatedSlotAttention HGRN2Attention
HGRNAttention KimiDeltaAttention LightningAttention MLSTM Mamba1 Mamba2 Mamba3 MultiScaleRetention RGLRU RWKV4Attention
RWKV6Attention RWKV7Attention SimpleGatedLinearAttention
"""


@pytest.mark.parametrize(
    "name",
    # Each alone takes a quarter of a second: every fourth is fast.
    [
        pytest.param(path.name, marks=[pytest.mark.fast] * (i % 4 == 0))
        for i, path in enumerate(sorted(FIXTURES.iterdir()))
    ],
)
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
    size = write_tokens._cache_size()
    glax.models.generate(glax.models.from_pretrained(FIXTURES / "gla"), tokens, 2)
    assert size and write_tokens._cache_size() == size


@pytest.mark.fast
@pytest.mark.parametrize("layer", LAYERS.split())
def test_layers_do_not_store_functions_of_their_first_values(layer):
    of_states = dict(num_heads=2, head_width=16, state_width=8)
    more = {"HGRNAttention": {}, "Mamba1": {}, "RWKV4Attention": {}, "Mamba2": of_states, "Mamba3": of_states}.get(
        layer, dict(num_heads=2)
    )
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


# ---- what programs are compiled for -----------------------------------------------------------------------------------

TINY = dict(model_type="gla", vocab_size=32, hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=16)


def made(seed: int = 0, **options):
    return glax.models.from_config(TINY | options, rngs=nnx.Rngs(seed))


@pytest.mark.fast
def test_equal_models_have_equal_structures():
    (one, of_one), (two, of_two) = Structure.of(made(0)), Structure.of(made(1))
    assert one == two and hash(one) == hash(two)
    assert any((a != b).any() for a, b in zip(of_one, of_two, strict=True))
    tokens = jnp.ones((1, 4), jnp.int32)
    np.testing.assert_array_equal(two.model(of_one)(tokens), made(0)(tokens))


@pytest.mark.parametrize("options", [dict(num_heads=4), dict(num_hidden_layers=3), dict(norm_eps=1e-3)])
@pytest.mark.fast
def test_other_models_have_other_structures(options):
    one, other = Structure.of(made())[0], Structure.of(made(**options))[0]
    assert one != other and one != "a structure"


def written_by_stream(model):
    return [int(token[0]) for token in glax.models.stream(model, jnp.array([[1, 2, 3]]), 6)]


def written_by_scheduler(model):
    scheduler = Scheduler(model, capacity=2, max_length=64)
    return scheduler.answers([Request([1, 2, 3], max_tokens=6)])[0].tolist()


@pytest.mark.parametrize("written", [written_by_stream, written_by_scheduler])
@pytest.mark.fast
def test_no_token_costs_a_hash_of_the_model(written, monkeypatch):
    """jit asks for the hash of what it is compiled for at every call. A graph of 24 layers takes 14 ms."""
    model, hashes = made(), []
    written(model)
    hashed = nnx.GraphDef.__hash__
    monkeypatch.setattr(nnx.GraphDef, "__hash__", lambda graph: hashes.append(1) or hashed(graph))
    assert len(written(model)) == 6
    assert len(hashes) == 1
