"""A forward and a gradient of the Triton kernels of wide heads for per-key, per-head and constant gates, whole and packed, once.

    export XLA_FLAGS=--xla_gpu_autotune_level=0  # the checker itself crashes where XLA tries kernels for its own products
    compute-sanitizer --tool memcheck python -m tests.triton_once

Needs an NVIDIA GPU; says whether all results are finite, and fails if one is not.
"""

import sys

import jax
import jax.numpy as jnp

import glax

K, V, H = 256, 320, 2
CALLS = {200: None, 150: (0, 1, 70, 149)}  # tokens: boundaries of documents
STRENGTHS = dict(usual=1.0, strong=40.0)  # of log-sigmoid


def main():
    failed = False
    for gate in ("gk", "g", "g_gamma"):
        for T, cuts in CALLS.items():
            keys = jax.random.split(jax.random.key(0), 5)
            tensors = [
                jax.random.normal(key, (1, T, H, width), jnp.bfloat16)
                for key, width in zip(keys, (K, K, V, V), strict=False)
            ]
            shape = dict(gk=(1, T, H, K), g=(1, T, H), g_gamma=(H,))[gate]
            logs = jax.nn.log_sigmoid(jax.random.normal(keys[4], shape))
            boundaries = None if cuts is None else jnp.asarray(cuts, jnp.int32)

            @jax.jit
            def both(q, k, v, do, logs, gate=gate, boundaries=boundaries):
                def forward(q, k, v, logs):
                    return glax.recurrent(q, k, v, **{gate: logs}, cu_seqlens=boundaries, platform="triton")

                out, pull = jax.vjp(forward, q, k, v, logs)
                return out, pull(type(out)(do, jnp.ones_like(out.final_state)))

            for name, factor in STRENGTHS.items():
                gates = (factor * logs).astype(jnp.bfloat16 if gate == "gk" else jnp.float32)
                found = jax.tree.leaves(both(*tensors, gates))
                finite = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found)
                print(f"{gate} T{T} {name}: {'finite' if finite else 'NOT FINITE'}", flush=True)
                failed |= not finite
    if failed:
        sys.exit("some results are not finite")


if __name__ == "__main__":
    main()
