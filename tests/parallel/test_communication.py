"""What devices send each other, in bytes, by `glax.parallel` and by plain calls on arrays that are sharded already."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax
from glax import parallel
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.parallel.exchange import shift_distances, uses_all_gather
from tests.cases import Case, inputs
from tests.compiling import quick_jit
from tests.parallel.meshes import mesh_of, tree_close
from tests.parallel.test_parallel import PACKED

# ---- what moves ------------------------------------------------------------------------------------------------------

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def moved(compiled) -> dict[str, list[int]]:
    """The bytes of each collective's results on one device, by kind."""
    found: dict[str, list[int]] = {}
    for results, kind in re.findall(rf"= ([^=]*?) ({KINDS})(?:-start)?\(", compiled.as_text()):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", results)
        assert {dtype for dtype, _ in shapes} == {"f32"}, results
        found.setdefault(kind, []).extend(4 * int(np.prod([int(n) for n in s.split(",") if n])) for _, s in shapes)
    return found


def compiled(f, *args):
    return quick_jit(f).lower(*args).compile()


@pytest.mark.parametrize(
    ("shards", "gates", "extra"), [(2, ("g",), 1), (4, ("gk", "gv"), 8 + 6), (8, ("gk",), 8), (8, (), 1)], ids=str
)
def test_shards_exchange_only_states_and_decays(shards, gates, extra):
    """(K V + K' + V') H N 4 bytes times F for the forward, and again for the gradient, at any T."""
    B, H, K, V = 2, 2, 8, 6
    spread = functools.partial(parallel.recurrent, mesh=mesh_of(s=shards), sequence_axis="s")
    message = (K * V + extra) * H * B * 4
    exchanges = (
        [message * shards] if uses_all_gather(shards) else [message] * len(shift_distances(shards))
    )  # a gather's result
    kind = "all-gather" if uses_all_gather(shards) else "collective-permute"
    for T in (64, 1024) if gates == ("gk",) else (64,):
        case = Case("", B=B, T=T, heads=(H, H, H), gates=gates, K=K, V=V, state_dtype=None)
        arguments = inputs(case, "mild")
        assert moved(compiled(lambda a: spread(**a).output, arguments)) == {kind: exchanges}
        gradient = jax.grad(lambda a: (spread(**a).output ** 2).sum())
        assert moved(compiled(gradient, arguments)) == {kind: exchanges * 2}
    if gates == ("g",):
        final = moved(compiled(lambda a: spread(**a).final_state, arguments))
        assert final == {kind: exchanges, "all-reduce": [K * V * H * B * 4]}


def test_packed_sequences_send_one_state_however_many_they_are():
    case = Case("", heads=(2, 2, 2), K=8, V=6, **PACKED)
    spread = functools.partial(parallel.recurrent, mesh=mesh_of(s=4), sequence_axis="s")
    run = compiled(lambda a, cuts: spread(**a, cu_seqlens=cuts).output, inputs(case, "mild"), jnp.array(case.cuts))
    assert moved(run) == {"all-gather": [4 * (8 * 6 + 8) * 2 * 4]}


@pytest.mark.fast
@pytest.mark.parametrize("n", range(1, 70))
def test_every_message_arrives_once(n):
    """Every shard receives the messages of all shards before it, each once."""
    if n > 1:
        received = sum(shift_distances(n))
        assert received >= n - 1 and received - shift_distances(n)[-1] < max(n - 1, 1)
        assert uses_all_gather(n) == (n - 1 <= 1 + (n > 2) + max(0, (n - 2).bit_length() - 1) or n <= 4)


# ---- plain calls on arrays that are spread already -------------------------------------------------------------------


def spread_inputs(mesh, case, axes):
    def place(name, x):
        heads = 1 if name == "initial_state" else 2
        spec = [axes.get("batch")] + [None] * (x.ndim - 1)
        spec[heads] = axes.get("heads") if x.shape[heads] > 1 else None
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {name: place(name, x) for name, x in inputs(case, "log-sigmoid").items()}


@pytest.mark.parametrize(
    ("kind", "heads", "axes"),
    [
        (AxisType.Auto, (4, 4, 4), dict(batch="b")),
        (AxisType.Auto, (4, 4, 4), dict(heads="h")),
        (AxisType.Auto, (4, 2, 1), dict(batch="b", heads="h")),
        (AxisType.Explicit, (4, 2, 1), dict(batch="b", heads="h")),
    ],
    ids=str,
)
def test_plain_calls_gather_nothing(kind, heads, axes):
    """Forward: no collective at all. Gradient: the loss, and d_value where the heads of several devices share it."""
    mesh, case = mesh_of(kind, b=2, h=2), Case("", B=4, T=40, heads=heads, gates=("gk", "gv"), K=6, V=5)
    placed = spread_inputs(mesh, case, axes)

    def value(arguments):
        output, state = glax.recurrent(**arguments)
        return (output**2).sum() + (state**2).sum()

    assert moved(compiled(lambda a: glax.recurrent(**a), placed)) == {}
    gradient = compiled(jax.value_and_grad(value), placed)
    reduced = [n for kind, sizes in moved(gradient).items() for n in sizes if kind == "all-reduce" or n > 16]
    shards = 2 if "batch" in axes else 1
    shared = [placed["value"].nbytes // shards] if heads[2] == 1 else []
    assert [n for n in reduced if n > 16] == shared  # beside single numbers: of the loss, of each sequence's scale
    tree_close(gradient(placed), quick_jit(jax.value_and_grad(value))(inputs(case, "log-sigmoid")))


def test_gradients_of_what_is_shared_are_whole():
    """softmax_scale and g_gamma, one for all devices."""
    mesh, case = mesh_of(b=2, h=2), Case("", B=4, T=40, heads=(4, 2, 2), gates=(), K=6, V=5)
    placed = spread_inputs(mesh, case, dict(batch="b", heads="h"))

    def value(scale, gamma, arguments):
        output, state = glax.recurrent(**arguments, g_gamma=gamma, softmax_scale=scale)
        return (output**2).sum() + (state**2).sum()

    run = quick_jit(jax.grad(value, argnums=(0, 1)))
    shared = jnp.float32(0.3), -jnp.arange(4.0) / 8
    tree_close(run(*shared, placed), run(*shared, inputs(case, "log-sigmoid")))


def test_a_kernel_that_xla_cannot_see_into_is_given_what_lies_on_its_device(monkeypatch):
    load_kernels()
    seen = []

    def run(r, *, config):
        seen.append(r.q.shape)
        return kernel_registry.kernels["chunked/xla/any"].get_impl(config)(r)

    original = kernel_registry.kernels["chunked/xla/any"]
    opaque = dataclasses.replace(
        original, algorithm="opaque", platform=Platform.CPP, backend=Backend.CPU, run=run, priority=lambda r: 100
    )
    monkeypatch.setitem(kernel_registry.kernels, opaque.name, opaque)
    mesh, case = mesh_of(b=2, h=2), Case("", B=4, T=40, heads=(4, 4, 4), K=6, V=5)
    placed = spread_inputs(mesh, case, dict(batch="b", heads="h"))
    jax.jit(lambda a: glax.recurrent(**a, platform="cpp"))(placed)
    assert set(seen[:-1]) == {(4, 40, 4, 6)} and seen[-1] == (2, 40, 2, 6)  # as traced and lowered, and as run
