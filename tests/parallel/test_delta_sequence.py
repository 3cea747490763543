"""The delta rule over meshes of simulated devices, compared with the float64 reference. Bytes between devices are counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import parallel
from glax._src.parallel.sharding import Spread
from tests.cases import Case
from tests.close import assert_close
from tests.parallel.test_communication import compiled, moved
from tests.parallel.test_parallel import PACKED, hold, mesh_of

SPANNING = dict(cuts=(0, 0, 70, 71, 90), T=96)  # one sequence spans a shard of 24 rows, and padding lies behind
PLAIN = dict(T=48, K=6, V=10)


@pytest.mark.parametrize(
    "case",
    [
        Case("head", B=2, gates=("g",), erasure=("beta",), heads=(1, 2, 2), **PLAIN),
        Case("key-reverse", gates=("gk",), erasure=("erase", "write"), reverse=True, **PLAIN),
        Case("key+value", gates=("gk", "gv"), erasure=("erase",), **PLAIN),
        Case("constant-packed", gates=("g_gamma",), erasure=("beta",), K=6, V=10, **PACKED),
        Case("head-spanning-reverse", gates=("g",), erasure=("beta",), K=6, V=10, reverse=True, **SPANNING),
    ],
    ids=str,
)
def test_the_sequence_over_four_shards(case):
    hold(case, Spread(mesh_of(sequence=4), sequence_axis="sequence"), ("log-sigmoid", "-100 on 5%"))


def test_eight_shards_pass_on_composed_maps():
    case = Case("", gates=("g",), erasure=("beta",), T=50, K=6, V=10)
    hold(case, Spread(mesh_of(sequence=8), sequence_axis="sequence"))


def test_heads_and_batch_stay_in_place():
    case = Case("", B=2, gates=("gk",), erasure=("beta",), heads=(2, 2, 4), **PLAIN)
    hold(case, Spread(mesh_of(data=2, model=2), batch_axis="data", head_axis="model"))


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda"])
def test_every_function_equals_its_own_on_one_device(name):
    rng = np.random.default_rng(0)
    B, T, H, K = 1, 16, 2, 4
    arrays = [jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.float32) for _ in range(3)]
    gates = dict(gated_delta_rule=(B, T, H), kda=(B, T, H, K))
    if name in gates:
        arrays.append(-jnp.asarray(rng.random(gates[name]), jnp.float32))
    arrays.append(jnp.asarray(rng.random((B, T, H)), jnp.float32))
    options = dict(use_qk_l2norm=True)
    sharded = functools.partial(getattr(parallel, name), mesh=mesh_of(sequence=2), sequence_axis="sequence", **options)
    for x, y in zip(sharded(*arrays), getattr(glax, name)(*arrays, **options), strict=True):
        assert_close(name, x, np.asarray(y, np.float64), 1e-5)


def test_bytes_do_not_grow_with_the_sequence():
    """K (K + V) numbers a head, gathered from 4 shards, whatever T is."""
    H, K, V = 2, 8, 6
    run = functools.partial(parallel.delta_rule, mesh=mesh_of(s=4), sequence_axis="s")
    for T in (64, 256):
        q, v = jnp.ones((1, T, H, K)), jnp.ones((1, T, H, V))
        assert moved(compiled(lambda q, v: run(q, q, v, q[..., 0]).output, q, v)) == {
            "all-gather": [4 * K * (K + V) * H * 4]
        }


@pytest.mark.parametrize("packing", ["cu_seqlens", "segment_ids", None])
@pytest.mark.parametrize("along", [False, True])
def test_an_erasure_before_the_decay_over_shards_equals_one_device(packing, along):
    rng = np.random.default_rng(0)
    H, K, V, T = 2, 6, 10, 45
    q, k, e = (jnp.asarray(rng.normal(size=(1, T, H, K)) / K**0.5, jnp.float32) for _ in range(3))
    v, g = jnp.asarray(rng.normal(size=(1, T, H, V)), jnp.float32), -jnp.asarray(rng.random((1, T, H)), jnp.float32)
    places = dict(cu_seqlens=jnp.array([0, 0, 30, 31, 40]), segment_ids=jnp.asarray(np.arange(T)[None] // 14))
    options = {} if packing is None else {packing: places[packing]}
    b = jnp.asarray(rng.normal(size=(1, T, H, K)) / K**0.5, jnp.float32)

    def loss(run, *arrays):
        q, k, v, g, e, b = arrays
        output, state = run(q, k, v, g, erase=e, erase_along=b if along else None, erase_before_decay=True, **options)
        return jnp.square(output).sum() + jnp.square(state).sum()

    on_mesh = functools.partial(parallel.recurrent, mesh=mesh_of(s=4), sequence_axis="s")
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1, 2, 3, 4, 5)))(q, k, v, g, e, b)
        for run in (on_mesh, glax.recurrent)
    )
    for name, x, y in zip("qkvgeb", got, want, strict=True):
        assert_close(name, x, np.asarray(y, np.float64), 2e-5)
