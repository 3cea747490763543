"""The Hopper kernels on a Hopper GPU: 50 times fresh inputs into poisoned memory, and every time the same bits twice.

The interpreter does not notice a write that a product overtakes; this does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.kernels.pallas_gpu import chunked
from glax._src.kernels.pallas_gpu.config import HopperConfig, installation
from tests import strengths

GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.skipif(not GPU or bool(installation()), reason="needs a Hopper GPU and what its kernels need")

REPEATS = 50
BAR = 3.5e-3  # docs/numerics.md: bfloat16
PACKED = (0, 0, 1, 70, 198, 300, 599)
WEAKER = dict(mild=16, weak=256)  # than log-sigmoid
CASES = {
    "key": dict(B=2, T=256, gate="gk"),
    "key, long": dict(T=2048, H=1, gate="gk", strength="mild"),
    "key, -100": dict(T=1000, gate="gk", strength=-100.0),
    "key, -inf": dict(T=200, gate="gk", strength=-np.inf),
    "key, -inf, reversed": dict(T=200, gate="gk", strength=-np.inf, reverse=True),
    "key, 64 wide, shared heads, reversed": dict(B=2, T=300, heads=(2, 1, 4), K=64, V=64, gate="gk", reverse=True),
    "key, packed, shared heads, reversed": dict(T=600, heads=(4, 4, 2), gate="gk", cuts=PACKED, reverse=True),
    "key, odd widths": dict(B=2, T=130, K=100, V=40, gate="gk", strength="mild"),
    "key, float32 gates": dict(T=330, gate="gk", strength=-100.0, gate_dtype=jnp.float32),
    "head": dict(B=2, T=256, H=3, gate="g"),
    "head, long": dict(T=2048, H=1, gate="g", strength="mild"),
    "head, weak": dict(T=1000, gate="g", strength="weak"),
    "head, -100, reversed": dict(T=1000, gate="g", strength=-100.0, reverse=True),
    "head, -inf, packed": dict(T=600, H=4, K=64, V=64, gate="g", strength=-np.inf, cuts=PACKED),
    "constant, reversed": dict(B=2, T=300, gate="g_gamma", strength="mild", reverse=True),
    "constant, packed": dict(T=600, K=128, V=64, gate="g_gamma", strength="mild", cuts=PACKED),
    "none": dict(T=333, gate=None),
}


def draw(key, gate, T, strength=None, B=1, H=2, heads=None, K=128, V=128, cuts=None, gate_dtype=jnp.bfloat16, **_):
    """The float arguments of a call, and the cotangents of its results."""
    keys = iter(jax.random.split(key, 8))
    HQ, HK, HV = heads or (H, H, H)
    H, N = max(HQ, HK, HV), B if cuts is None else len(cuts) - 1
    normal = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)  # noqa: E731
    given = dict(query=normal(B, T, HQ, K), key=normal(B, T, HK, K), value=normal(B, T, HV, V))
    given |= dict(initial_state=normal(N, H, K, V, dtype=jnp.float32), softmax_scale=jnp.float32(K**-0.5))
    if gate is not None:
        shape = dict(gk=(B, T, H, K), g=(B, T, H), g_gamma=(H,))[gate]
        logs = jax.nn.log_sigmoid(normal(*shape, dtype=jnp.float32))
        if strength in WEAKER:
            logs = logs / WEAKER[strength]
        elif strength is not None:
            logs = jnp.where(jax.random.uniform(next(keys), shape) < 0.05, strength, logs)
        given[gate] = logs.astype(jnp.float32 if gate == "g_gamma" else gate_dtype)
    return given, (normal(B, T, H, V), normal(N, H, K, V, dtype=jnp.float32))


def results(given, cotangents, *, platform, reverse, cuts):
    def call(given):
        cu_seqlens = None if cuts is None else jnp.asarray(cuts, jnp.int32)
        return tuple(glax.recurrent(**given, cu_seqlens=cu_seqlens, reverse=reverse, platform=platform))

    found, pull = jax.vjp(call, given)
    return found, pull(cotangents)[0]


def poison(like):
    """Frees memory of the sizes that a call will take, full of NaN."""
    for x in jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(like)] * 3):
        x.delete()


@pytest.mark.parametrize("case", CASES)
def test_fresh_inputs(case):
    case = CASES[case]
    options = dict(reverse=case.get("reverse", False), cuts=case.get("cuts"))
    run = jax.jit(functools.partial(results, platform="pallas", **options))
    inputs = jax.jit(functools.partial(draw, **case))

    @jax.jit
    def reference(given, cotangents):
        given, cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), (given, cotangents))
        return results(given, cotangents, platform="xla", **options)

    @jax.jit
    def squares(found, expected):
        """Of every result, the squares of its differences and of itself, summed."""
        found, expected = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (found, expected))
        sums = lambda *x: jnp.stack([((x[0] - x[1]) ** 2).sum(), (x[1] ** 2).sum()])  # noqa: E731
        return jax.tree.map(sums, found, expected)

    total = None
    for repeat in range(REPEATS):
        given = inputs(jax.random.key(repeat))
        expected = reference(*given)
        poison((expected, given))
        found = run(*given)
        poison((expected, given))
        again = run(*given)
        assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (found, again)), strict=True)), repeat
        here = jax.tree.map(lambda x: np.asarray(x, np.float64), squares(found, expected))
        total = here if total is None else jax.tree.map(np.add, total, here)
    errors = {
        jax.tree_util.keystr(path): float(np.sqrt(off / size)) for path, (off, size) in jax.tree.leaves_with_path(total)
    }
    print("errors", case, {name: f"{x:.1e}" for name, x in errors.items()})
    for name, x in errors.items():
        sums = 10 if "scale" in name or "gamma" in name else 1  # over all of T, with cancellation
        assert x < sums * BAR, (name, errors)


@pytest.mark.parametrize(
    "form, K, parts, reverse",
    [
        ("key", 128, 1, False),
        ("key", 64, 3, True),
        ("head", 128, 1, True),
        ("head", 64, 3, False),
        ("constant", 128, 1, False),
    ],
)
def test_steady_strengths(form, K, parts, reverse):
    """Just inside and just outside of each limit, the state passed over several chunks, and segments."""
    r, *cotangents = strengths.problem(form, half=32, T=520, K=K, reverse=reverse)
    config = HopperConfig(parts=parts)
    found, residuals = jax.jit(functools.partial(chunked.chunked_with_residuals, config=config))(r)
    d = jax.jit(functools.partial(chunked.chunked_vjp, config=config))(r, *cotangents, residuals)
    strengths.assert_right(r, *cotangents, found, d)
