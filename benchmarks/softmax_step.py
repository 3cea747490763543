"""Time a step of softmax attention over caches: glax's kernel and XLA's form of it.

python benchmarks/softmax_step.py --json FILE                          # all rows, in a minute on one GPU
python benchmarks/softmax_step.py --rows qwen3.5 --configs 32,16,1,4,3 32,16,4,4,3 --ways glax --device   # other configs

Every slot of the pool has a token to read, behind as many as the row says. `gbytes`: of the keys and values that are read, in a
second. `share`: of the rate of a copy. `error`: the distance to XLA's form in float32, as a share of its norm.
A config is keys,rows,parts,warps,stages of `SoftmaxStepConfig`.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from meters import interleaved, kernels_ms
from output import table, write

import glax
from glax._src.kernels.common.softmax import Intervals
from glax._src.kernels.triton.softmax_config import SoftmaxStepConfig
from glax._src.kernels.xla import softmax as xla
from glax._src.solve import softmax as solve
from glax.cli.measure import Way, copy_gbytes

WAYS = ("glax", "xla")


@dataclasses.dataclass(frozen=True)
class Row:
    """B sequences that have read `length` tokens, in caches of S rows. Hq heads of K channels read Hk heads, whose values have V
    channels. within: whether these are the first channels of the keys."""

    name: str
    B: int
    S: int
    length: int
    Hq: int
    Hk: int
    K: int
    V: int
    within: bool = False

    def arrays(self, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (self.B, 1, self.Hq, self.K), (self.B, self.S, self.Hk, self.K), (self.B, self.S, self.Hk, self.V)
        q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
        return q, k, None if self.within else v

    @property
    def nbytes(self) -> int:
        return self.B * (self.length + 1) * self.Hk * (self.K + (0 if self.within else self.V)) * 2


ROWS = [
    Row("qwen3.5", 64, 1280, 1100, 16, 4, 256, 256),
    Row("qwen3.5, one", 1, 1280, 1100, 16, 4, 256, 256),
    Row("long", 1, 131_072, 100_000, 16, 4, 256, 256),
    Row("heads of 128", 64, 4096, 2048, 32, 8, 128, 128),
    Row("latent", 64, 4096, 2048, 32, 1, 576, 512, True),
    Row("latent, one", 1, 32_768, 30_000, 32, 1, 576, 512, True),
]


def attended(way: str, row: Row, q, k, v):
    last = jnp.full((row.B, 1), row.length, jnp.int32)
    attend = solve.attend_step if way == "glax" else xla.attend_step
    return attend(q, k, v, Intervals(jnp.zeros_like(last), last), None, width=row.V, slots=jnp.arange(row.B))


def error(row: Row) -> float:
    few = dataclasses.replace(row, B=min(row.B, 4))
    got = jax.jit(functools.partial(attended, "glax", few))(*few.arrays()).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), few.arrays())
        exact = jax.jit(functools.partial(attended, "xla", few))(*wide)
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))


def measured(row: Row, config: SoftmaxStepConfig | None, options) -> list[dict]:
    """Return a line for each way, timed in turns. config: the kernel's; by its own rule if None."""
    with glax.overlay({} if config is None else {solve.TRITON_STEP.op_id: config}):
        return lines_of(row, config, options)


def lines_of(row: Row, config: SoftmaxStepConfig | None, options) -> list[dict]:
    arrays, lines, running = row.arrays(), [], []
    for way in options.ways:
        run = functools.partial(jax.jit(functools.partial(attended, way, row)), *arrays)
        jax.block_until_ready(run())
        running.append(Way(way, run))
        line: dict[str, Any] = dict(problem=row.name, gate="softmax", mode="decode", implementation=way)
        lines.append(line | (dict(config=str(config)) if config else {}))
    for line, way, time in zip(lines, running, interleaved(running, options.iters), strict=True):
        line |= dict(ms=time.median, p20=time.p20, p80=time.p80)
        if options.device:
            line["kernels_ms"] = kernels_ms(way)
        line["gbytes"] = row.nbytes / line.get("kernels_ms", time.median) / 1e6
        line["share"] = line["gbytes"] / options.copy
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="*", default=names, choices=names)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--configs", nargs="*", default=[], help="keys,rows,parts,warps,stages")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--device", action="store_true", help="also the time of the kernels alone")
    parser.add_argument("--json", help="a file to write")
    options = parser.parse_args()
    options.copy, lines = copy_gbytes(options.iters), []
    configs = [SoftmaxStepConfig(*map(int, x.split(","))) for x in options.configs]
    for row in (row for row in ROWS if row.name in options.rows):
        for config in configs or [None]:
            found = measured(row, config, options)
            lines += found
            print(table(found), flush=True)
        if not configs:
            lines.append(dict(problem=row.name, gate="softmax", mode="errors", implementation="glax", error=error(row)))
            print(f"{row.name}: error {lines[-1]['error']:.1e}", flush=True)
    if options.json:
        write(Path(options.json), lines)


if __name__ == "__main__":
    main()
