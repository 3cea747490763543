"""Measure the selective scan on a CPU: native code, XLA's kernel and a loop over tokens; and its layer beside transformers'.

python benchmarks/selective_cpu.py [--peer PYTHON] [--json FILE]      PYTHON: an interpreter that has torch and transformers

The implementations of a call run in turns, so that a machine that others slow down slows all. float32. The layer is one of
Mamba-130M, with random weights: width 768, 1536 channels of 16 numbers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
WIDTH, CHANNELS, STATE, RANK, THREADS = 768, 1536, 16, 48, 2
# Rows, tokens, channels, numbers of a state.
SCANS = (
    (1, 1, 1536, 16),
    (1, 16, 64, 16),
    (1, 128, 1536, 16),
    (1, 2048, 1536, 16),
    (8, 512, 1536, 16),
    (1, 8192, 16, 16),
)
STEPS = ((1, 1536, 16), (64, 1536, 16))
LAYERS = ((1, 16), (1, 512))


def medians(runs: dict[str, Callable], turns: int) -> dict[str, list[float]]:
    """Return the median and the slowest time of each in ms, after one run that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: [statistics.median(x), max(x)] for name, x in times.items()}


def token_loop(x, dt, A, B, C):
    import jax
    import jax.numpy as jnp

    def step(h, t):
        x, dt, B, C = t
        h = jnp.exp(dt[:, :, None] * A) * h + (dt * x)[:, :, None] * B[:, None]
        return h, (h * C[:, None]).sum(-1)

    tokens = [jnp.moveaxis(array, 1, 0) for array in (x, dt, B, C)]
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((len(x), *A.shape)), tokens)[1], 0, 1)


def scan_lines(turns: int) -> list[dict]:
    import jax
    import jax.numpy as jnp

    import glax

    lines = []

    def arrays(*shape, D, N):
        keys = jax.random.split(jax.random.key(0), 5)
        x, B, C = (jax.random.normal(k, (*shape, n)) for k, n in zip(keys, (D, N, N), strict=False))
        return x, jax.random.uniform(keys[3], x.shape, maxval=0.1), -jnp.exp(jax.random.normal(keys[4], (D, N))), B, C

    def ready(f, *operands):
        return lambda: jax.block_until_ready(f(*operands))

    def add(problem: str, mode: str, runs: dict[str, Callable]):
        found = medians(runs, turns)
        first = found["glax, native"][0]
        for name, (median, worst) in found.items():
            line = dict(problem=problem, mode=mode, implementation=name, ms=median, slowest_ms=worst)
            lines.append(line | dict(times_first=median / first))
            print(json.dumps(lines[-1]), flush=True)

    for B, T, D, N in SCANS:
        operands = arrays(B, T, D=D, N=N)
        ways = {
            "glax, native": lambda *x: glax.selective_scan(*x, platform="cpp").output,
            "glax, XLA": lambda *x: glax.selective_scan(*x, platform="xla").output,
            "loop over tokens (lax.scan)": token_loop,
        }
        problem = f"B{B} T{T} D{D} N{N}"
        add(problem, "forward", {name: ready(jax.jit(f), *operands) for name, f in ways.items()})
        gradients = {
            name: jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=range(5))) for name, f in ways.items()
        }
        add(problem, "gradient", {name: ready(f, *operands) for name, f in gradients.items()})
    for B, D, N in STEPS:
        operands = arrays(B, D=D, N=N)
        runs = {}
        for name, platform in {"glax, native": "cpp", "glax, XLA": "xla"}.items():
            step = jax.jit(
                lambda state, x, dt, A, B, C, platform=platform: glax.selective_scan_step(
                    x, dt, A, B, C, state, platform=platform
                )[1],
                donate_argnums=0,
            )
            held = [jnp.zeros((B, D, N))]

            def run(step=step, held=held, operands=operands):
                held[0] = jax.block_until_ready(step(held[0], *operands))

            runs[name] = run
        add(f"B{B} D{D} N{N}", "step", runs)
    return lines


def layer_by_glax(B: int, T: int) -> Callable:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from glax.nn import Mamba1

    layer = nnx.jit(lambda layer, x: layer(x)[0])
    own, x = Mamba1(WIDTH, rngs=nnx.Rngs(0)), jnp.ones((B, T, WIDTH))
    return lambda: jax.block_until_ready(layer(own, x))


def layer_by_transformers(B: int, T: int) -> Callable:
    import torch
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.set_num_threads(THREADS)
    config = MambaConfig(hidden_size=WIDTH, intermediate_size=CHANNELS, state_size=STATE, time_step_rank=RANK)
    layer, x = MambaMixer(config, layer_idx=0).eval(), torch.ones(B, T, WIDTH)
    return torch.inference_mode()(lambda: layer(x))


LAYERS_BY = dict(glax=layer_by_glax, transformers=layer_by_transformers)


def child(by: str, turns: int):
    """Print the times of the layers of one library, a line each. It runs in an interpreter that has the library."""
    for B, T in LAYERS:
        run = LAYERS_BY[by](B, T)
        median, worst = medians({by: run}, turns)[by]
        line = dict(
            problem=f"B{B} T{T}, layer of Mamba-130M", mode="forward", implementation=by, ms=median, slowest_ms=worst
        )
        print(json.dumps(line), flush=True)


def recorded(line: dict, turns: int) -> dict:
    """Return a line in the form of results/README.md."""
    what = f"selective scan, {line['mode']}, {line['problem']}"
    note = f"float32; median of {turns} turns, the slowest {line['slowest_ms']:.3f}"
    return dict(implementation=line["implementation"], what=what, value=line["ms"], unit="ms", note=note)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="with torch and transformers")
    parser.add_argument("--turns", type=int, default=7, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", choices=LAYERS_BY, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.turns)
        return
    lines = scan_lines(args.turns)
    for by, python in dict(glax=sys.executable, **({"transformers": args.peer} if args.peer else {})).items():
        command = [python, __file__, "--child", by, "--turns", str(args.turns)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        lines += [json.loads(line) for line in found]
    if args.json:
        from output import write

        write(args.json, [recorded(line, args.turns) for line in lines])


if __name__ == "__main__":
    main()
