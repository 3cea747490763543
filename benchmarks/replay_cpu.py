"""Measure steps of a `StatePool` on a CPU, by the kernel of rings and by parts, beside the step of a plain pool.

python benchmarks/replay_cpu.py [--turns N] [--json FILE]

A program advances all sequences by 8 tokens, so that calling it from Python is a small part. The slots are at different places of
their rings of 8, so one state in 8 is written. The ways run in turns, so that a machine that others slow down slows all.
Figures are microseconds a step.
"""

import argparse
import dataclasses
import functools
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from output import write

import glax
from glax import serving
from glax._src.serving import replayed_pool

TOKENS = REPLAY = 8
CALLS = 4  # of a way in one turn


@dataclasses.dataclass(frozen=True)
class Steps:
    """B sequences of H heads of 128 x 128. gate: "g" or "gk". delta: the delta rule. state: the dtype of states."""

    B: int
    H: int = 16
    gate: str = "gk"
    delta: bool = False
    state: str = "float32"

    @property
    def title(self) -> str:
        gate = dict(g="per-head gates", gk="per-key gates")[self.gate]
        return f"B{self.B} H{self.H} K128 V128, {gate}{', delta rule' if self.delta else ''}, {self.state} states"

    def token(self) -> dict[str, jax.Array]:
        keys, shape = jax.random.split(jax.random.key(0), 5), (self.B, self.H, 128)
        x = {name: jax.random.normal(key, shape) for name, key in zip(("query", "key", "value"), keys, strict=False)}
        x["key"] /= jnp.linalg.norm(x["key"], axis=-1, keepdims=True)
        x[self.gate] = jax.nn.log_sigmoid(jax.random.normal(keys[3], shape if self.gate == "gk" else shape[:2]))
        return x | (dict(beta=jax.nn.sigmoid(jax.random.normal(keys[4], shape[:2]))) if self.delta else {})

    def pool(self) -> serving.StatePool:
        form = dict(g="head", gk="key")[self.gate] + ("+beta" if self.delta else "")
        pool = serving.StatePool(self.B, self.H, 128, self.state, replay=REPLAY, form=form)
        return pool.replace(length=jnp.arange(self.B, dtype=jnp.int32) % REPLAY)

    def ways(self) -> dict:
        """Return (a compiled program, its pool) by the name of the way."""
        slots = jnp.asarray(np.random.default_rng(0).permutation(self.B).astype(np.int32))

        def plain(pool, token):
            return glax.recurrent_step(**token, state=pool, slots=slots)

        def ringed(pool, token):
            return pool.step(**token, slots=slots)

        found, token, kernel = {}, self.token(), replayed_pool.replay_kernel
        if self.state != "int8":
            states = jnp.zeros((self.B, self.H, 128, 128), self.state)
            found["plain"] = program(plain).lower(states, token).compile(), states
        found["replay"] = program(ringed).lower(self.pool(), token).compile(), self.pool()
        replayed_pool.replay_kernel = lambda r, pool, rounding_key: None
        jax.clear_caches()
        found["replay by parts"] = program(ringed).lower(self.pool(), token).compile(), self.pool()
        replayed_pool.replay_kernel = kernel
        jax.clear_caches()
        return found


def program(step):
    @functools.partial(jax.jit, donate_argnums=0)
    def steps(pool, token):
        def one(_, carry):
            pool, query = carry
            output, pool = step(pool, token | dict(query=query))
            return pool, query + 1e-3 * output.mean((-2, -1), keepdims=True)

        return jax.lax.fori_loop(0, TOKENS, one, (pool, token["query"]))

    return steps


CASES = (
    Steps(16),
    Steps(16, gate="g"),
    Steps(16, gate="g", delta=True),
    Steps(16, state="bfloat16"),
    Steps(16, state="int8"),
    Steps(64),
    Steps(1),
    Steps(1, gate="g", delta=True),
)


def measured(steps: Steps, turns: int) -> list[dict]:
    ways, token = steps.ways(), steps.token()
    times: dict[str, list[float]] = {name: [] for name in ways}
    pools = {name: pool for name, (_, pool) in ways.items()}
    for _ in range(turns):
        for name, (run, _) in ways.items():
            for call in range(CALLS + 1):
                start = time.perf_counter()
                pools[name], _ = jax.block_until_ready(run(pools[name], token))
                if call:  # the first brings the states into the caches
                    times[name].append((time.perf_counter() - start) * 1e6 / TOKENS)
    lines = []
    for name, x in times.items():
        note = f"float32 tokens; median of {len(x)}, best {min(x):.0f}, p20 {np.quantile(x, 0.2):.0f}, slowest {max(x):.0f}"
        what = f"step of {'a pool' if name == 'plain' else 'a StatePool, replay 8'}, {steps.title}"
        lines.append(
            dict(implementation=f"glax, {name}", what=what, value=float(np.median(x)), unit="us a step", note=note)
        )
        print(f"{steps.title}: {name}: {lines[-1]['value']:.0f} ({note})", flush=True)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = [line for steps in CASES for line in measured(steps, options.turns)]
    if options.json:
        write(options.json, lines)


if __name__ == "__main__":
    main()
