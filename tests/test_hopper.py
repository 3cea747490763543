"""The Hopper kernels, forward and gradient, through the interpreter of Pallas Mosaic GPU and against the float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.bind import bind
from glax.kernels.pallas_gpu import launch
from glax.kernels.pallas_gpu.config import HopperConfig
from glax.reference import reference, reference_gradient
from tests import mosaic_interpreter

BAR = 3.5e-3  # docs/design.md: bfloat16
CASES = {
    "key, -100 and -inf": dict(gate="gk", strength="extreme", T=72),
    "key, packed, reversed, shared heads": dict(gate="gk", heads=(1, 2, 1), cuts=(0, 0, 1, 70, 80), T=90, reverse=True),
    "key, float32 gates": dict(gate="gk", gate_dtype=jnp.float32, T=72, gradient=False),
    "head, segments": dict(gate="g", T=300, K=60, V=40, config=HopperConfig(parts=2)),
    "constant, packed": dict(gate="g_gamma", cuts=(0, 66, 66, 90), T=100),
}


def distance(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)


MARKS = {"head, segments": [pytest.mark.fast]}


@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS.get(c, [])) for c in CASES])
def test_against_the_reference(case, monkeypatch):
    check(monkeypatch, **CASES[case])


def check(
    monkeypatch, gate, strength="mild", T=72, K=64, V=64, heads=(1, 1, 1), cuts=None, reverse=False,
    gate_dtype=jnp.bfloat16, gradient=True, config=None,
):  # fmt: skip
    config = config or HopperConfig()
    rng, H = np.random.default_rng(0), max(heads)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (normal(1, T, h, width) for h, width in zip(heads, (K, K, V), strict=True))
    shape = dict(gk=(1, T, H, K), g=(1, T, H), g_gamma=(H,))[gate]
    logs, dice = jax.nn.log_sigmoid(normal(*shape, dtype=jnp.float32)), rng.random(shape)
    if strength == "extreme":
        logs = jnp.where(dice < 0.05, -100.0, jnp.where(dice > 0.98, -jnp.inf, logs))
    N = 1 if cuts is None else len(cuts) - 1
    state, d_final = (normal(N, H, K, V, dtype=jnp.float32) for _ in range(2))
    d_output = normal(1, T, H, V)
    cu_seqlens = None if cuts is None else jnp.asarray(cuts, jnp.int32)
    gates = {gate: logs.astype(gate_dtype)}
    r = bind(q, k, v, **gates, initial_state=state, reverse=reverse, cu_seqlens=cu_seqlens)
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found = tuple(launch.chunked(r, config))
        d = launch.chunked_vjp(r, d_output, d_final, config) if gradient else None
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, r)
    errors = [distance(a, b) for a, b in zip(found, reference(exact), strict=True)]
    if gradient:
        expected = reference_gradient(exact, d_output.astype(jnp.float32), d_final)
        cut = (r.replace(boundaries=None), expected.replace(boundaries=None))
        assert jax.tree.structure(d) == jax.tree.structure(cut[0])
        for (path, a), b in zip(jax.tree.leaves_with_path(d), jax.tree.leaves(cut[1]), strict=True):
            sums = 10 if path[-1].name in ("scale", "constant") else 1  # over all of T, with cancellation
            errors.append(distance(a, b) / sums)
    assert max(errors) < BAR, errors
