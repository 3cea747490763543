"""Time decoding: a step with and without a pool, and the demo's model by steps against recomputing the prefix.

python benchmarks/decode.py                     # both, and benchmarks/out/decode.png
python benchmarks/decode.py --only pool         # 256 of 1024 slots, 16 heads of 128 x 128, float32
python benchmarks/decode.py --only loop         # one sequence, 4 heads of 64 x 64, in a loop within one program
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import glax
from glax.cli.measure import copy_gbytes

PREFIXES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def median(call, repeats: int) -> float:
    """Return the median seconds of call(), which passes its result to its next call because the argument is donated."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def pool(P: int = 1024, B: int = 256, H: int = 16, D: int = 128, repeats: int = 9):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, x = (jax.random.normal(key, (B, H, D)) for key in keys)
    gk = jax.nn.log_sigmoid(x)
    slots = jnp.asarray(np.random.default_rng(0).permutation(P)[:B], jnp.int32)
    seconds = {}
    for name, rows, where in (("without a pool", B, None), ("pool", P, slots)):
        step = jax.jit(lambda state, slots: glax.recurrent_step(q, k, v, state, gk=gk, slots=slots), donate_argnums=0)
        held = [jnp.zeros((rows, H, D, D))]

        def call(step=step, held=held, where=where):
            _, held[0] = jax.block_until_ready(step(held[0], where))

        seconds[name] = median(call, repeats)
        print(f"{name:16} {1e3 * seconds[name]:8.2f} ms", flush=True)
    print(f"the pool takes {100 * (seconds['pool'] / seconds['without a pool'] - 1):+.0f}%")
    moved, copy = 2 * B * H * D * D * 4 / seconds["pool"] / 1e9, copy_gbytes(7)
    print(f"states read and written at {moved:.1f} GB/s, a copy at {copy:.1f} GB/s: {100 * moved / copy:.0f}%")


def loop(H: int = 4, D: int = 64, steps: int = 2000, repeats: int = 9):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, x = (jax.random.normal(key, (1, H, D)) for key in keys)
    gk = jax.nn.log_sigmoid(x)

    def step(_, carry):
        state, total = carry
        output, state = glax.recurrent_step(q, k, v, state, gk=gk)
        return state, total + output

    run = jax.jit(lambda state: jax.lax.fori_loop(0, steps, step, (state, jnp.zeros((1, H, D)))))
    state = jnp.zeros((1, H, D, D))
    seconds = median(lambda: jax.block_until_ready(run(state)), repeats) / steps
    print(f"one sequence, {H} heads of {D} x {D}: {1e6 * seconds:.2f} microseconds a step")


def model(repeats: int = 20):
    """Return the seconds of one step, and the seconds of recomputing a prefix by its length."""
    from flax import nnx

    from glax.cli.demo_run import MODEL
    from glax.models import from_config

    lm = from_config(MODEL, rngs=nnx.Rngs(0))
    graph, params = nnx.split(lm)
    whole = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens)[:, -1])
    one = jax.jit(lambda params, token, states: nnx.merge(graph, params).step(token, states))
    token, states = jnp.zeros(1, jnp.int32), lm.initial_states(1)
    step = median(lambda: jax.block_until_ready(one(params, token, states)), repeats)
    again = {}
    for T in PREFIXES:
        tokens = jnp.zeros((1, T), jnp.int32)
        again[T] = median(lambda tokens=tokens: jax.block_until_ready(whole(params, tokens)), repeats)
        print(f"prefix {T:5}  read again {1e3 * again[T]:8.2f} ms   one step {1e3 * step:6.2f} ms", flush=True)
    return step, again


def plot(step: float, again: dict[int, float], path: Path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(list(again), [1e3 * x for x in again.values()], "o-", label="reading the prefix again")
    axes.axhline(1e3 * step, color="C1", label="one step from its state")
    axes.set(xlabel="bytes before", ylabel="ms for the next byte", title="The demo's model, batch 1")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    print(f"Written: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["pool", "loop", "model"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/decode.png"))
    arguments = parser.parse_args()
    if arguments.only in (None, "pool"):
        pool()
    if arguments.only in (None, "loop"):
        loop()
    if arguments.only in (None, "model"):
        plot(*model(), arguments.out)


if __name__ == "__main__":
    main()
