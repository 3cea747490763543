"""A forward and a gradient of the Hopper kernels for each kind of gate, two widths, and gates of three strengths, once.

    export XLA_FLAGS=--xla_gpu_autotune_level=0  # the checker itself crashes where XLA tries kernels for its own products
    compute-sanitizer --tool memcheck python -m tests.hopper_once --gate g --width 64  # or all, without the two

Needs a Hopper GPU; says whether all results are finite.
"""

import argparse

import jax
import jax.numpy as jnp

import glax

TOKENS = {128: 2048, 64: 256}  # of a width; many are in segments
GATES = dict(gk="gk", g="g", delta="g", kda="gk")
ERASING = ("delta", "kda")  # with beta of 1
STRENGTHS = dict(usual=1.0, weak=1 / 256, strong=1.0)  # of log-sigmoid; strong: and one of -100


def inputs(gate: str, T: int, D: int) -> tuple[list[jax.Array], jax.Array]:
    """q, k, v and the output's gradient; gates."""
    wide = (1, T, 2, D)
    tensors = [jax.random.normal(jax.random.key(i), wide, jnp.bfloat16) for i in range(4)]
    return tensors, jax.nn.log_sigmoid(jax.random.normal(jax.random.key(4), wide if GATES[gate] == "gk" else wide[:3]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", choices=GATES)
    parser.add_argument("--width", type=int, choices=TOKENS)
    args = parser.parse_args()
    for gate in (args.gate,) if args.gate else GATES:

        @jax.jit
        def both(q, k, v, do, logs, gate=gate):
            def forward(q, k, v, logs):
                more = dict(beta=jnp.ones(logs.shape[:3], logs.dtype)) if gate in ERASING else {}
                return glax.recurrent(q, k, v, **{GATES[gate]: logs}, **more, platform="pallas")

            out, pull = jax.vjp(forward, q, k, v, logs)
            return out, pull(type(out)(do, jnp.ones_like(out.final_state)))

        for D in (args.width,) if args.width else TOKENS:
            T = TOKENS[D]
            tensors, logs = inputs(gate, T, D)
            if gate in ERASING:  # else every token multiplies the state by about D
                norms = jnp.linalg.norm(tensors[1].astype(jnp.float32), axis=-1, keepdims=True)
                tensors[1] = (tensors[1] / norms).astype(jnp.bfloat16)
            for name, factor in STRENGTHS.items():
                gates = factor * logs if name != "strong" else logs.at[:, 70].set(-100.0)
                found = jax.tree.leaves(both(*tensors, gates.astype(jnp.bfloat16)))
                finite = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found)
                print(f"{gate} T{T} D{D} {name}: {'finite' if finite else 'NOT FINITE'}", flush=True)


if __name__ == "__main__":
    main()
