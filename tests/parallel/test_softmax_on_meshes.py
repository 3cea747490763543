"""Softmax attention by a kernel that XLA cannot divide, in programs for several devices. XLA's form stands in for the kernel."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glax._src.core.backend import Backend
from glax._src.kernels.common.softmax import Intervals, ReadBlocks
from glax._src.kernels.triton import softmax_config
from glax._src.kernels.xla import softmax as xla
from glax._src.solve import softmax as solve
from tests.parallel.meshes import mesh_of, tree_close

B, T, D, V = 2, 24, 8, 6
DATA, HEADS, BOTH = P("data", None, "model"), P(None, None, ("data", "model")), P(None, None, "model")


@pytest.fixture
def fresh():
    """Let go of earlier programs: the callbacks of one that is alive serve an equal one, and would call its stand-ins."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def shapes(monkeypatch, fresh):
    """Return the shapes of q of all calls of the stand-ins."""
    found = []

    def forward(operands, *, cfg, scale):
        found.append(operands.q.shape)
        return xla.whole(operands, scale), jnp.zeros(operands.q.shape[:3], jnp.float32)

    def gradient(operands, o, log_total, d_o, *, cfg, scale):
        assert o.shape == d_o.shape and log_total.shape == d_o.shape[:3]
        found.append(operands.q.shape)
        return jax.vjp(lambda *x: xla.whole(operands._replace(q=x[0], k=x[1], v=x[2]), scale), *operands[:3])[1](d_o)

    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(softmax_config, "installation", lambda: None)
    for name, function in (("TRITON", forward), ("TRITON_GRADIENT", gradient)):
        monkeypatch.setattr(solve, name, dataclasses.replace(getattr(solve, name), function=function))
    return found


def operands(heads: tuple[int, int], is_packed: bool):
    draw, (HQ, HK), rows = np.random.default_rng(0), heads, np.arange(T)
    N = 1 if is_packed else B
    wanted = (N, T, HQ, D), (N, T, HK, D), (N, T, HK, V), (N, T, HQ, V)
    q, k, v, d_o = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in wanted)
    first = np.where(rows < 10, 0, 10) if is_packed else np.zeros_like(rows)
    first, last = (jnp.asarray(np.broadcast_to(x, (N, T)), jnp.int32) for x in (first, rows))
    return q, k, v, d_o, Intervals(first, last), jnp.array([0, 10, T]) if is_packed else None


def values_and_gradients(q, k, v, d_o, seen, cuts, blocks=None):
    def attended(q, k, v):
        if cuts is None:
            return solve.attend_in_blocks(q, k, v, seen, None, blocks)
        return solve.attend_by_sequence(q, k, v, seen, None, cuts, blocks)

    o, pull = jax.vjp(attended, q, k, v)
    return o, *pull(d_o)


@pytest.mark.parametrize(
    "spec, heads, is_packed, own",
    [
        (DATA, (8, 4), False, (1, T, 4, D)),
        (DATA, (4, 4), False, (1, T, 2, D)),
        (HEADS, (8, 4), False, (2, T, 2, D)),
        (HEADS, (8, 2), False, (2, T, 8, D)),  # two heads of k for four devices: gathered
        (P("data"), (4, 1), False, (1, T, 4, D)),
        (P(None, "data"), (4, 2), False, (2, T, 4, D)),
        (BOTH, (8, 4), True, (1, T, 4, D)),
        (P(), (4, 2), True, (1, T, 4, D)),
    ],
)
def test_a_device_runs_the_kernel_on_its_batch_and_heads(shapes, monkeypatch, spec, heads, is_packed, own):
    *floats, seen, cuts = operands(heads, is_packed)
    mesh = mesh_of(data=2, model=2)

    def placed(x):
        sizes = [mesh.shape[n] for n in ("data", "model")]
        fits = spec != HEADS or x.shape[2] % np.prod(sizes) == 0
        return jax.device_put(x, NamedSharding(mesh, spec if fits else P()))

    run = jax.jit(lambda *x: values_and_gradients(*x, seen, cuts))
    found = run(*map(placed, floats))
    assert set(shapes[-2:]) == {own}
    monkeypatch.undo()
    tree_close(found, values_and_gradients(*floats, seen, cuts))


@pytest.mark.parametrize(
    "spec, is_packed, own",
    [
        (DATA, False, (1, T, 2, D)),
        (HEADS, False, (2, T, 2, D)),
        (BOTH, True, (1, T, 4, D)),
        (P("data"), False, (1, T, 8, D)),
    ],
)
def test_a_device_reads_the_chosen_blocks_of_its_rows(shapes, monkeypatch, spec, is_packed, own):
    heads = (4, 4) if spec == DATA else (8, 4)
    *floats, seen, cuts = operands(heads, is_packed)
    words = np.random.default_rng(1).integers(0, 2**8, (len(floats[0]), T, 1))
    blocks = ReadBlocks(jnp.asarray(words, jnp.int32), 3)
    mesh = mesh_of(data=2, model=2)
    run = jax.jit(lambda blocks, *x: values_and_gradients(*x, seen, cuts, blocks))
    found = run(blocks, *(jax.device_put(x, NamedSharding(mesh, spec)) for x in floats))
    assert set(shapes[-2:]) == {own}
    monkeypatch.undo()
    tree_close(found, values_and_gradients(*floats, seen, cuts, blocks))


@pytest.mark.parametrize("within", [False, True], ids=["values", "within"])
@pytest.mark.parametrize("slots", [None, (3, 0)], ids=["in order", "slots"])
@pytest.mark.parametrize(
    "spec, heads, own",
    [
        (HEADS, (8, 4), (2, 1, 2, D)),
        (HEADS, (4, 4), (2, 1, 1, D)),
        (BOTH, (8, 4), (2, 1, 4, D)),
        (BOTH, (8, 1), (2, 1, 4, D)),  # one head of k for all of q
        (HEADS, (8, 2), (2, 1, 8, D)),  # two heads of k for four devices: gathered
        (DATA, (8, 4), (1, 1, 4, D)),
    ],
)
def test_a_device_runs_the_kernel_of_a_step_on_its_heads(monkeypatch, fresh, spec, heads, own, slots, within):
    found, (HQ, HK), draw = [], heads, np.random.default_rng(0)

    def step(operands, *, cfg, scale, width):
        found.append(operands.q.shape)
        return solve.step_by_xla(operands, scale=scale, width=width)

    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(softmax_config, "installation", lambda: None)
    monkeypatch.setattr(solve, "TRITON_STEP", dataclasses.replace(solve.TRITON_STEP, function=step))
    rows = B if slots is None else 5
    shapes = (B, 1, HQ, D), (rows, T, HK, D), (rows, T, HK, V)
    dtype = jnp.bfloat16 if within else jnp.float32
    q, k, v = (jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes)
    last = jnp.array([[7], [20]], jnp.int32)
    seen, slots = Intervals(jnp.zeros_like(last), last), None if slots is None else jnp.array(slots, jnp.int32)
    mesh = mesh_of(data=2, model=2)

    def placed(x):
        own = [
            None if n is None or x.shape[d] % np.prod([mesh.shape[a] for a in np.atleast_1d(n)]) else n
            for d, n in enumerate(spec)
        ]
        return jax.device_put(x, NamedSharding(mesh, P(*own)))

    def run(q, k, v):
        return solve.attend_step(q, k, None if within else v, seen, None, width=V, slots=slots)

    result = jax.jit(run)(*map(placed, (q, k, v)))
    expected = own if slots is None or spec != DATA else (2, *own[1:])  # rows that slots name are not divided
    assert found[-1] == expected
    monkeypatch.undo()
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (result, run(q, k, v))), rtol=2e-2, atol=2e-2 if within else 1e-6
    )


def test_inside_shard_map_a_device_runs_the_kernel_on_its_arrays(shapes, monkeypatch):
    *floats, seen, _ = operands((4, 2), False)
    mesh = mesh_of(data=2)

    def run(*x):
        return values_and_gradients(*x[:4], Intervals(*x[4:]), None)

    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(*floats, *seen)
    assert set(shapes) == {(1, T, 4, D)}
    monkeypatch.undo()
    tree_close(found, values_and_gradients(*floats, seen, None))
