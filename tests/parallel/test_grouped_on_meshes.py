"""Products of grouped rows in programs for several devices. `jax.lax.ragged_dot` stands in for the kernel."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glax import nn
from glax._src.core.backend import Backend
from glax._src.kernels.triton import grouped_config
from glax._src.solve import grouped as solve
from glax._src.solve.partitioning import DIVIDED
from tests.parallel.meshes import mesh_of, tree_close

M, D, INSIDE, E, TOP = 24, 8, 6, 4, 2


@pytest.fixture
def shapes(monkeypatch):
    """Return the shapes of x of all calls of the stand-ins."""
    found = []

    def stand_in(by_xla):
        def run(operands, *, cfg, **options):
            found.append(operands.x.shape)
            return by_xla(operands, cfg=cfg, **options)

        return run

    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(grouped_config, "installation", lambda: None)
    for name, by_xla in (("TRITON", solve.products_by_xla), ("TRITON_SUMS", solve.sums_by_xla)):
        config = grouped_config.GroupedConfig()
        kernel = dataclasses.replace(
            getattr(solve, name), function=stand_in(by_xla), heuristic=lambda operands, config=config: config
        )
        monkeypatch.setattr(solve, name, kernel)
    return found


def program(mesh, rows: P | None):
    """Return a function of x and the weights [M, TOP] of chosen experts, and its arguments."""
    experts = nn.Experts(D, INSIDE, E, rngs=nnx.Rngs(0))
    experts.rows = None if rows is None else NamedSharding(mesh, rows)
    x = jax.random.normal(jax.random.key(0), (M, D))
    chosen = jax.random.randint(jax.random.key(1), (M, TOP), 0, E)
    graph, parameters = nnx.split(experts)

    def loss(parameters, x, weights):
        return (nnx.merge(graph, parameters)(x, (weights, chosen)) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2)), (parameters, x, jax.nn.softmax(x[:, :TOP]))


def test_a_device_runs_the_kernel_on_its_rows_inside_shard_map(shapes, monkeypatch):
    mesh = mesh_of(data=2, tensor=1)
    run, arguments = program(mesh, P(("data", "tensor"), None))
    with jax.set_mesh(mesh):
        found = jax.jit(run)(*arguments)
    assert set(shapes) == {(M * TOP // 2, D), (M * TOP // 2, INSIDE)}
    monkeypatch.undo()
    tree_close(found, program(mesh, None)[0](*arguments))


@pytest.mark.parametrize("rows", [None, P(("data",), None)])
def test_ragged_dot_runs_where_the_compiler_divides_a_program(shapes, monkeypatch, caplog, rows):
    mesh = mesh_of(data=2, tensor=2)
    run, arguments = program(mesh, rows)
    placed = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), arguments)
    with jax.set_mesh(mesh), caplog.at_level(logging.DEBUG, "glax"):
        found = jax.jit(run)(*placed)
    kernels = [record.message.split(":")[0] for record in caplog.records if DIVIDED in record.message]
    assert (kernels.count("grouped/xla/any"), kernels.count("grouped.sums/xla/any")) == (6, 3)
    monkeypatch.undo()
    tree_close(found, program(mesh, None)[0](*arguments))


def test_the_kernels_refuse_arrays_that_explicit_axes_divide(monkeypatch):
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(grouped_config, "installation", lambda: None)
    mesh = mesh_of(AxisType.Explicit, data=2)
    x, w, sizes = jnp.ones((M, D)), jnp.ones((E, D, INSIDE)), jnp.full(E, M // E)
    with jax.set_mesh(mesh):
        divided = jax.device_put(x, NamedSharding(mesh, P("data")))
        assert solve.refusal(solve.GroupedOperands(divided, w, sizes)) == DIVIDED
        assert solve.refusal(solve.GroupedOperands(x, w, sizes)) is None
