"""The selective scan with sequences and channels over a mesh, by automatic and by explicit axes, and in shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax
from tests.close import assert_close
from tests.parallel.meshes import mesh_of

B, T, D, N = 4, 40, 8, 3
SPECS = (P("data", None, "model"), P("data", None, "model"), P("model"), P("data"), P("data"))
IDS = jnp.asarray(np.repeat([[1, 2, 0, 1]], [13, 9, 3, 15], axis=1).repeat(B, 0))


def arrays() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    steps, A = rng.random((B, T, D)), -rng.random((D, N))
    found = (rng.normal(size=(B, T, D)), steps, A, rng.normal(size=(B, T, N)), rng.normal(size=(B, T, N)))
    return [jnp.asarray(x, jnp.float32) for x in found]


def with_gradient(*operands):
    def loss(*operands):
        outputs = glax.selective_scan(*operands, segment_ids=IDS, pad_id=0)
        return sum((x**2).sum() for x in outputs), outputs

    return jax.value_and_grad(loss, argnums=range(5), has_aux=True)(*operands)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sequences_and_channels_are_computed_where_they_lie(kind):
    mesh = mesh_of(kind, data=2, model=2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), SPECS, strict=True)]
    program = jax.jit(with_gradient).lower(*placed).compile()
    got, want = jax.device_get((program(*placed), with_gradient(*arrays())))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("result", x, y, 1e-5)
    assert "all-gather" not in program.as_text()


def test_steps_leave_states_where_they_lie():
    mesh = mesh_of(AxisType.Explicit, data=2, model=2)
    x, dt, A, b, c = arrays()
    state = jnp.zeros((B, D, N))
    want = glax.selective_scan_step(x[:, 0], dt[:, 0], A, b[:, 0], c[:, 0], state)
    specs = (P("data", "model"), P("data", "model"), P("model"), P("data"), P("data"), P("data", "model"))
    operands = (x[:, 0], dt[:, 0], A, b[:, 0], c[:, 0], state)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    got = jax.jit(glax.selective_scan_step)(*placed)
    assert tuple(got[1].sharding.spec)[:2] == ("data", "model")
    for x, y in zip(got, want, strict=True):
        assert_close("result", x, y, 1e-5)


def test_inside_shard_map():
    mesh = mesh_of(AxisType.Auto, data=2, model=2)

    def scan(*operands):
        return glax.selective_scan(*operands).output

    spread = jax.shard_map(scan, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0])
    results = []
    for run in (spread, scan):
        gradient = jax.jit(jax.grad(lambda *operands, run=run: (run(*operands) ** 2).sum(), argnums=range(5)))
        results.append([run(*arrays()), *gradient(*arrays())])
    for x, y in zip(*results, strict=True):
        assert_close("result", x, y, 1e-5)
