"""The selective scan by Triton in programs for several devices. XLA's kernel stands in for Triton's."""

import logging
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding

import glax
from glax._src.core.backend import Backend
from glax._src.kernels.triton import selective_scan_config
from glax._src.solve import selective_scan as solver
from glax._src.solve.partitioning import DIVIDED
from tests.parallel.meshes import mesh_of, tree_close
from tests.parallel.test_selective_scan import SPECS, B, D, T, arrays

WHOLE, PART = (B, T, D), (B // 2, T, D // 2)


@pytest.fixture
def shapes(monkeypatch):
    """Yield the shapes of x of all calls of the stand-ins."""
    found = []

    def forward(p, skip, cfg, *, reverse, saves_residuals):
        found.append(p.x.shape)
        y, final, _ = solver.xla.forward(p, reverse=reverse)
        return y.astype(p.x.dtype), final, jnp.zeros_like(y)

    def gradients(p, skip, starts, d_y, d_final, cfg, *, reverse):
        found.append(p.x.shape)
        return solver.derived_gradient(reverse, p, d_y, d_final), None

    name = "glax._src.kernels.triton.selective_scan"
    module = types.ModuleType(name)
    module.forward, module.gradients = forward, gradients
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["glax._src.kernels.triton"], "selective_scan", module, raising=False)
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(selective_scan_config, "installation", lambda: None)
    jax.clear_caches()  # of calls that were traced for this machine
    yield found
    jax.clear_caches()


def with_gradient(*operands, platform=None):
    def loss(*operands):
        outputs = glax.selective_scan(*operands, platform=platform)
        return sum((x**2).sum() for x in outputs), outputs

    return jax.value_and_grad(loss, argnums=range(5), has_aux=True)(*operands)


def test_a_device_runs_the_kernel_on_its_part_inside_shard_map(shapes, monkeypatch):
    mesh = mesh_of(data=2, model=2)

    def run(*operands):
        return glax.selective_scan(*operands).output

    spread = jax.shard_map(run, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0])

    def gradient(run):
        return jax.jit(jax.grad(lambda *operands: (run(*operands) ** 2).sum(), argnums=range(5)))(*arrays())

    found = gradient(spread)
    assert set(shapes) == {PART}
    monkeypatch.undo()
    jax.clear_caches()
    tree_close(found, gradient(run))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_xla_runs_where_the_compiler_divides_a_program(shapes, monkeypatch, caplog, kind):
    mesh = mesh_of(kind, data=2, model=2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), SPECS, strict=True)]
    with caplog.at_level(logging.DEBUG, "glax"):
        program = jax.jit(with_gradient).lower(*placed).compile()
    assert any(DIVIDED in record.message for record in caplog.records)
    assert "all-gather" not in program.as_text()
    found = program(*placed)
    monkeypatch.undo()
    jax.clear_caches()
    tree_close(found, with_gradient(*arrays()))


def test_a_kernel_by_name_runs_on_gathered_arrays(shapes, monkeypatch):
    mesh = mesh_of(data=2, model=2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), SPECS, strict=True)]
    found = jax.jit(lambda *operands: with_gradient(*operands, platform="triton"))(*placed)
    assert set(shapes) == {WHOLE}
    monkeypatch.undo()
    jax.clear_caches()
    tree_close(found, with_gradient(*arrays()))
