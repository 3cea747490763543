"""`glax.models.forming`: the values of one program, by few programs that are compiled."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import glax.models
from glax.models import forming
from tests.compiling import Compiled

SIZES = dict(vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=32)


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def formed(mesh, make):
    """Return what `forming.formed` returns, with first axes over the mesh where it divides them, and the number of programs."""
    jax.clear_caches()
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, P("data") if x.ndim and x.shape[0] % 2 == 0 else P()), jax.eval_shape(make)
    )
    with Compiled() as compiled:
        found = forming.formed(make, shardings)
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
    return found, compiled.count


@pytest.mark.parametrize("kind", ["gla", "gated_deltanet", "mamba2"])
def test_parameters_are_those_of_eager_code(kind, mesh):
    sizes = SIZES | dict(model_type=kind) | (dict(head_dim=16) if kind != "gla" else {})
    sizes |= dict(state_size=16, num_heads=4, n_groups=1) if kind == "mamba2" else {}

    def make(layers):
        config = sizes | dict(num_hidden_layers=layers)
        return nnx.state(glax.models.from_config(config, rngs=nnx.Rngs(3)), nnx.Param)

    found, programs = formed(mesh, lambda: make(2))
    wanted = make(2)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert formed(mesh, lambda: make(4))[1] == programs  # deeper models need no more


def test_constants_small_values_and_shared_ones(mesh):
    table = np.arange(200.0, dtype=np.float32)

    def make():
        key = jax.random.key(1)
        x = jax.random.normal(key, (100,))
        return dict(x=x, y=2 * x, z=jax.numpy.asarray(table) + x.sum(), scalar=jax.numpy.float32(3), key=key)

    found, _ = formed(mesh, make)
    wanted = make()
    for name in ("x", "y", "z", "scalar"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(wanted["key"]).tolist()


def test_programs_that_differ_in_what_a_jit_closes_over_are_not_one(mesh):
    tables = [np.arange(100.0, dtype=np.float32) + i for i in range(3)]
    tables[2] = jax.numpy.asarray(tables[2])

    def make():
        x = jax.random.normal(jax.random.key(1), (100,))
        return [jax.jit(lambda x, table=table: x + table)(x) for table in tables]

    found, _ = formed(mesh, make)
    for x, y in zip(found, make(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
