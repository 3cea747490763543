"""`glax.models.forming`: the values of one program, by few programs that are compiled."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import glax.models
from glax.models import forming

SIZES = dict(vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=32)


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))


def formed(mesh, monkeypatch, make):
    """Return what `forming.formed` returns, everywhere on the mesh, and the number of programs."""
    made, jit = [], jax.jit

    def counted(*args, **options):
        made.append(args)
        return jit(*args, **options)

    shapes = jax.eval_shape(make)
    with monkeypatch.context() as patch:
        patch.setattr(forming.jax, "jit", counted)
        found = forming.formed(make, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes))
    return found, len(made)


@pytest.mark.parametrize("kind", ["gla", "gated_deltanet", "mamba2"])
def test_parameters_are_those_of_eager_code(kind, mesh, monkeypatch):
    sizes = SIZES | dict(model_type=kind) | (dict(head_dim=16) if kind != "gla" else {})
    sizes |= dict(state_size=16, num_heads=4, n_groups=1) if kind == "mamba2" else {}

    def make(layers):
        config = sizes | dict(num_hidden_layers=layers)
        return nnx.state(glax.models.from_config(config, rngs=nnx.Rngs(3)), nnx.Param)

    found, programs = formed(mesh, monkeypatch, lambda: make(2))
    wanted = make(2)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert formed(mesh, monkeypatch, lambda: make(4))[1] == programs  # deeper models need no more


def test_constants_small_values_and_shared_ones(mesh, monkeypatch):
    table = np.arange(200.0, dtype=np.float32)

    def make():
        key = jax.random.key(1)
        x = jax.random.normal(key, (100,))
        return dict(x=x, y=2 * x, z=jax.numpy.asarray(table) + x.sum(), scalar=jax.numpy.float32(3), key=key)

    found, _ = formed(mesh, monkeypatch, make)
    wanted = make()
    for name in ("x", "y", "z", "scalar"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(wanted["key"]).tolist()


def test_programs_that_differ_in_what_a_jit_closes_over_are_not_one(mesh, monkeypatch):
    tables = [np.arange(100.0, dtype=np.float32) + i for i in range(3)]
    tables[2] = jax.numpy.asarray(tables[2])

    def make():
        x = jax.random.normal(jax.random.key(1), (100,))
        return [jax.jit(lambda x, table=table: x + table)(x) for table in tables]

    found, _ = formed(mesh, monkeypatch, make)
    for x, y in zip(found, make(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
