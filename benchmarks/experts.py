"""Time products of rows by the matrix of each row's expert, and their gradient: glax's kernels, and jax.lax.ragged_dot.

python benchmarks/experts.py --json FILE                     # all rows, in less than a minute on one GPU
python benchmarks/experts.py --rows prefill --forward 128,256,64,8,4 128,128,64,8,4 --ways glax      # other configs

Beside them stands one dense product of as many operations. A row's expert is drawn evenly. `tflops` counts one product of the
forward, and three of forward and gradient; `gb_s` counts the operands and results once, of matrices those of experts with rows.
Ways that cannot run are named with the reason. `error` is the distance of y by `glax`, in the largest group, to that in float32,
as a share of its norm.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from meters import interleaved, kernels_ms
from output import table, write

from glax._src.kernels.triton.grouped_config import GroupedConfig, GroupedSumConfig
from glax._src.solve import grouped as solve
from glax.cli.measure import Way

WAYS = dict(glax=solve.grouped_product, ragged_dot=jax.lax.ragged_dot, dense=lambda x, w, sizes: x @ w[0])


@dataclasses.dataclass(frozen=True)
class Row:
    """M rows of E experts, whose matrices are K x N."""

    name: str
    M: int
    E: int = 64
    K: int = 2304
    N: int = 1024

    @property
    def about(self) -> dict:
        return dict(
            problem=f"{self.M} rows, {self.E} x {self.K} x {self.N}", gate="rows by expert", model="Kimi-Linear"
        )

    def arrays(self):  # x, w, the cotangent of y, and the rows of each expert
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (self.M, self.K), (self.E, self.K, self.N), (self.M, self.N)
        floats = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=False)]
        experts = jax.random.randint(keys[3], (self.M,), 0, self.E)
        return *floats, jnp.bincount(experts, length=self.E).astype(jnp.int32)


ROWS = [Row("prefill", 262_144), Row("decoding", 512)]  # of Kimi-Linear


def program(way: str, mode: str):
    def run(x, w, d_y, sizes):
        y, pull = jax.vjp(lambda x, w: WAYS[way](x, w, sizes), x, w)
        return y if mode == "forward" else (y, *pull(d_y))

    return jax.jit(run)


def error(x, w, d_y, sizes) -> float:
    """Return the distance of the largest group's y to that in float32."""
    e = int(sizes.argmax())
    own = slice(int(sizes[:e].sum()), int(sizes[: e + 1].sum()))
    exact = jnp.matmul(x[own].astype(jnp.float32), w[e].astype(jnp.float32), precision="highest")
    return float(jnp.linalg.norm(program("glax", "forward")(x, w, d_y, sizes)[own] - exact) / jnp.linalg.norm(exact))


def measured(row: Row, mode: str, options) -> list[dict]:
    """Return a line for each way, timed in turns."""
    arrays, lines, running = row.arrays(), [], {}
    products = dict(forward=1, train=3)[mode]
    read = row.M * (row.K + row.N) + row.K * row.N * int((arrays[-1] > 0).sum())  # by each product, with what it writes
    for way in options.ways:
        line = row.about | dict(mode=mode, implementation=way, dtype="bfloat16")
        try:
            run = functools.partial(program(way, mode), *arrays)
            jax.block_until_ready(run())
            running[way] = Way(way, run)
        except Exception as failure:  # a way without the memory for this call
            line["refusal"] = f"{type(failure).__name__}: {failure}"[:300]
        lines.append(line)
    times = dict(zip(running, interleaved(list(running.values()), options.iters), strict=True))
    for line in lines:
        if (time := times.get(line["implementation"])) is not None:
            line |= dict(ms=time.median, p20=time.p20, p80=time.p80)
            line["tflops"] = products * 2 * row.M * row.K * row.N / time.median / 1e9
            line["gb_s"] = None if line["implementation"] == "dense" else products * 2 * read / time.median / 1e6
            if options.device:
                line["kernels_ms"] = kernels_ms(running[line["implementation"]])
    return lines


def beside(line: dict) -> dict:
    """Return a line as results have it: the dense product is another call, and no peer's."""
    if line["implementation"] != "dense" or "ms" not in line:
        return line
    rest = {name: x for name, x in line.items() if name not in ("ms", "p20", "p80", "tflops", "gb_s")}
    return rest | dict(what="a dense product of as many operations", value=line["ms"], unit="ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], choices=[row.name for row in ROWS])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--device", action="store_true", help="also the time of the kernels alone")
    parser.add_argument("--forward", nargs="*", default=[], help="configs: rows,columns,inner,warps,stages")
    parser.add_argument("--sums", nargs="*", default=[], help="configs of dw: rows,inner,columns,warps,stages")
    parser.add_argument("--json", help="a file to write")
    options = parser.parse_args()
    configs = [("TRITON", GroupedConfig(*map(int, x.split(",")))) for x in options.forward]
    configs += [("TRITON_SUMS", GroupedSumConfig(*map(int, x.split(",")))) for x in options.sums]
    shipped, lines = dict(TRITON=solve.TRITON, TRITON_SUMS=solve.TRITON_SUMS), []
    for name, config in configs or [("TRITON", None)]:
        vars(solve).update(shipped)
        if config is not None:
            vars(solve)[name] = dataclasses.replace(shipped[name], heuristic=lambda operands, config=config: config)
        for row in (row for row in ROWS if row.name in options.rows):
            for mode in ("forward", "train"):
                found = measured(row, mode, options)
                lines += [line | (dict(config=str(config)) if config else {}) for line in found]
                print(table(found), f"\n{config}" if config else "", flush=True)
            lines.append(row.about | dict(mode="errors", implementation="glax", error=error(*row.arrays())))
            print(table(lines[-1:]), flush=True)
    if options.json:
        write(Path(options.json), [beside(line) for line in lines])


if __name__ == "__main__":
    main()
