"""Time the selective scan of Mamba-1 and its gradient on a GPU: glax's kernels, XLA's, and mamba-ssm's where it is installed.

python benchmarks/selective.py --json FILE                     # all rows, in a minute on one GPU
python benchmarks/selective.py --rows training --forward 4 1 8 --gradient 4 2 8 --ways glax   # other configs

A config is one of `SelectiveConfig`. bfloat16, with A and D in float32. The floor is the longer of two: each array once at the
rate of a copy, and one exponential for every token, channel and number of a state, of which a multiprocessor computes 16 in a
cycle of CLOCK. `error` is the distance to XLA's form in float32, as a share of its norm. Ways that cannot run give the reason.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from meters import interleaved
from output import table, write

import glax
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.triton.selective_scan_config import SelectiveConfig
from glax._src.solve import selective_scan as solve
from glax.cli.measure import Way, copy_gbytes
from glax.cli.peers import by_torch, tensor

WAYS = ("glax", "xla", "mamba-ssm")
CLOCK = 1.98e9  # of an H100 or H200 SXM, at most
N, MOST = 16, 512  # numbers of a state; rows and channels of which errors are formed


# One layer of Mamba-2.8B: training, one prompt, a long one; and one of Mamba-130M.
GATE, MODES = "selective scan", dict(forward="forward", train="with gradient")  # as results/README.md names them
ROWS = dict(training=(4, 2048, 5120), prompt=(1, 2048, 5120), long=(1, 32_768, 5120), narrow=(8, 2048, 1536))


def title(row: str) -> str:
    """Return a row's B, T, D, N."""
    return ",".join(map(str, (*ROWS[row], N)))


def arrays_of(B: int, T: int, D: int, dtype=jnp.bfloat16) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the arguments of B sequences of T tokens and D channels, and the cotangent of y."""
    widths = dict(x=D, dt=D, B=N, C=N, d_y=D)
    keys = dict(zip(widths, jax.random.split(jax.random.key(0), len(widths)), strict=True))
    found = {name: jax.random.normal(key, (B, T, widths[name])) for name, key in keys.items()}
    found = {name: x.astype(dtype) for name, x in (found | dict(dt=jax.nn.softplus(found["dt"] - 4))).items()}
    d_y = found.pop("d_y")
    return found | dict(A=-jnp.broadcast_to(jnp.arange(1.0, N + 1), (D, N)), D=jnp.ones(D)), d_y


def floor_ms(mode: str, B: int, T: int, D: int, gbytes: float) -> float:
    """Return the floor. The gradient reads x, dt and dy again, and computes exponentials again."""
    arrays, times = dict(forward=(3, 1), train=(8, 2))[mode]
    exponentials = 1e3 * times * B * T * D * N / (16 * multiprocessors() * CLOCK)
    return max(2 * arrays * B * T * D / gbytes / 1e6, exponentials)


def by_glax(platform: str, mode: str, arrays: dict, d_y: jax.Array):
    def forward(arrays):
        return glax.selective_scan(**arrays, platform=platform).output

    def train(arrays):
        y, pull = jax.vjp(forward, arrays)
        return y, pull(d_y)

    return functools.partial(jax.jit(forward if mode == "forward" else train), arrays)


def way(name: str, mode: str, arrays: dict, d_y: jax.Array) -> Way:
    if name != "mamba-ssm":
        return Way(name, by_glax("triton" if name == "glax" else "xla", mode, arrays, d_y))
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    turned = {name: tensor(x if name in ("A", "D") else x.mT).contiguous() for name, x in arrays.items()}
    ordered = {name: turned[name] for name in ("x", "dt", "A", "B", "C", "D")}
    return by_torch(name, lambda **given: selective_scan_fn(*given.values()), mode, ordered, d_y.mT)


def measured(row: str, mode: str, gbytes: float, ways: list[str]) -> list[dict]:
    """Return a line for each way, timed in turns."""
    lines, running, floor = [], {}, floor_ms(mode, *ROWS[row], gbytes)
    for name in ways:
        line = dict(
            problem=title(row), gate=GATE, mode=MODES[mode], implementation=name, dtype="bfloat16", floor_ms=floor
        )
        try:
            one = way(name, mode, *arrays_of(*ROWS[row]))
            one.wait(one.run())
            running[name] = one
        except Exception as failure:  # a way that is not installed, or without the memory for this call
            line["refusal"] = f"{type(failure).__name__}: {failure}"[:300]
        lines.append(line)
    times = dict(zip(running, interleaved(list(running.values()), 20), strict=True))
    for line in lines:
        if (time := times.get(line["implementation"])) is not None:
            line |= dict(ms=time.median, p20=time.p20, p80=time.p80, times_floor=time.median / floor)
    return lines


def error(B: int, T: int, D: int) -> float:
    """Return the largest error of y and of the gradients, of one sequence's first rows and channels."""
    small = arrays_of(1, min(T, MOST), min(D, MOST))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), small)
    results = by_glax("triton", "train", *small)(), by_glax("xla", "train", *exact)()
    pairs = zip(*map(jax.tree.leaves, results), strict=True)
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--forward", nargs=3, type=int, metavar=("LANES", "OWN", "SPAN"))
    parser.add_argument("--gradient", nargs=3, type=int, metavar=("LANES", "OWN", "SPAN"))
    parser.add_argument("--json", type=Path, help="a file to write")
    options = parser.parse_args()
    lines, gbytes = [], copy_gbytes(10)
    given = dict(SCAN=options.forward, GRADIENT=options.gradient)
    configs = {name: SelectiveConfig(*numbers) for name, numbers in given.items() if numbers}
    for name, config in configs.items():
        first, *others = vars(solve)[name]
        vars(solve)[name] = (dataclasses.replace(first, heuristic=lambda operands, config=config: config), *others)
    for row in options.rows:
        for mode in ("forward", "train"):
            found = measured(row, mode, gbytes, options.ways)
            if mode == "train":
                found.append(
                    dict(problem=title(row), gate=GATE, mode="errors", implementation="glax", error=error(*ROWS[row]))
                )
            lines += [line | (dict(config=str(configs)) if configs else {}) for line in found]
            print(table(found), flush=True)
    if options.json:
        write(options.json, lines)


if __name__ == "__main__":
    main()
