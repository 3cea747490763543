"""Compare the TPU kernels, in Pallas' interpreter, with the references of tokamax and of deltanet-tpu at small shapes.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu.references

Needs jax 0.11.2, tokamax 0.0.17 and deltanet-tpu 0.3.0; no TPU. It prints norms of differences over norms of the references, and
fails where one is above BARS.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

import glax
from glax._src.core.registry import Backend

BARS = dict(float32=2e-5, bfloat16=5e-3)
# H, B, T, K and V: tokamax's tests of its public function have the first; the others have whole chunks.
TOKAMAX = ((3, 2, 7, 8, 5), (2, 2, 128, 64, 64), (2, 1, 192, 128, 128), (1, 1, 256, 256, 128))
DELTANET = ((1, 128, 2, 2), (2, 256, 1, 2))  # B, T, heads of the key and of the value, all 128 wide


def in_interpreter(function, *arrays, **options):
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        run = jax.jit(lambda *arrays: function(*arrays, platform="pallas", **options))
        return jax.block_until_ready(run(*arrays))


def compare(name: str, dtype: str, got, want):
    """Print and check the distances of (output, state)."""
    found = [np.asarray(x, np.float64) for x in got], [np.asarray(x, np.float64) for x in want]
    errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(*found, strict=True)]
    print(f"{name} {dtype}: output {errors[0]:.1e}, state {errors[1]:.1e}", flush=True)
    assert max(errors) <= BARS[dtype], name


def beside_tokamax(shape: tuple, dtype: str):
    from tokamax._src.ops.kda import api

    H, B, T, K, V = shape
    rng = np.random.default_rng(0)
    q, k, g = (rng.normal(size=(H, B, T, K)) for _ in range(3))
    v, beta, state = rng.normal(size=(H, B, T, V)), rng.random((H, B, T)), rng.normal(size=(B, 1, H, K, V))
    k, g = k / np.linalg.norm(k, axis=-1, keepdims=True), -0.1 * np.logaddexp(g, 0)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, g, beta)]
    state = jnp.asarray(state, "float32")
    output, final = api.kimi_delta_attention(
        *arrays, initial_state=state, output_final_state=True, implementation="xla"
    )
    got = in_interpreter(glax.kda, *(jnp.moveaxis(x, 0, 2) for x in arrays), initial_state=state[:, 0])
    compare(f"tokamax kda {shape}", dtype, got, (jnp.moveaxis(output, 0, 2), final[:, 0]))


def beside_deltanet(shape: tuple, name: str):
    from deltanet_tpu import reference

    B, T, Hk, Hv = shape
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, T, Hk, 128)) for _ in range(2))
    gates = dict(gdn=(B, T, Hv), kda=(B, T, Hv, 128), delta_rule=None)[name]
    gate = [] if gates is None else [np.log(rng.random(gates))]
    arrays = (
        q,
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.normal(size=(B, T, Hv, 128)),
        *gate,
        rng.random((B, T, Hv)),
    )
    arrays = [jnp.asarray(x, "float32") for x in arrays]
    function, expected = dict(
        gdn=(glax.gated_delta_rule, reference.reference_gdn),
        kda=(glax.kda, reference.reference_kda),
        delta_rule=(glax.delta_rule, reference.reference_delta_rule),
    )[name]
    want, got = expected(*arrays, output_final_state=True), in_interpreter(function, *arrays)
    compare(f"deltanet-tpu {name} {shape}", "float32", got, want)


def main():
    with mock.patch.object(Backend, "here", return_value=Backend.TPU):
        for shape in TOKAMAX:
            for dtype in BARS:
                beside_tokamax(shape, dtype)
        for shape in DELTANET:
            for name in ("gdn", "kda", "delta_rule"):
                beside_deltanet(shape, name)


if __name__ == "__main__":
    main()
