"""Time softmax attention and its gradient: glax's kernel, XLA's form of it, and cuDNN's through jax.nn.dot_product_attention.

python benchmarks/softmax.py --json FILE                     # all rows, in less than a minute on one GPU
python benchmarks/softmax.py --rows qwen3.5 --ways glax cudnn --device
python benchmarks/softmax.py --rows qwen3.5 --forward 128,64,8,2 128,32,8,3 --ways glax    # other configs of the kernel

`tflops` counts the products over the keys that rows read: two of the forward, and seven of forward and gradient. XLA's form is
timed in the forward of one row by default, and elsewhere with --ways xla: it takes seconds. Ways that cannot run are named with
the reason. `error` is the distance to XLA's form in float32, as a share of its norm, of up to ERROR_ROWS rows of one sequence.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from meters import interleaved, kernels_ms
from output import table, write

from glax._src.kernels.common.softmax import Intervals, SoftmaxOperands
from glax._src.kernels.triton.softmax_config import SoftmaxConfig, SoftmaxGradientConfig
from glax._src.kernels.xla.softmax import in_blocks
from glax._src.solve import softmax as solve
from glax.cli.measure import Way

WAYS = ("glax", "cudnn", "xla")
ERROR_ROWS = 512


@dataclasses.dataclass(frozen=True)
class Row:
    """B sequences of T rows. Hq heads of width D read Hk heads. documents: the lengths of packed sequences, B = 1."""

    name: str
    B: int
    T: int
    Hq: int
    Hk: int
    D: int
    documents: tuple[int, ...] = ()

    def arrays(self):
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.Hq, self.Hk, self.Hk, self.Hq)
        return [
            jax.random.normal(key, (self.B, self.T, H, self.D), jnp.bfloat16)
            for key, H in zip(keys, heads, strict=True)
        ]

    def intervals(self) -> Intervals:
        rows = np.broadcast_to(np.arange(self.T), (self.B, self.T))
        cuts = np.cumsum([0, *self.documents])
        first = cuts[np.searchsorted(cuts, rows, side="right") - 1] if self.documents else np.zeros_like(rows)
        return Intervals(jnp.asarray(first, jnp.int32), jnp.asarray(rows, jnp.int32))

    @property
    def scores(self) -> int:
        lengths = self.documents or (self.T,)
        return self.B * self.Hq * sum(n * (n + 1) // 2 for n in lengths)


ROWS = [
    Row("qwen3.5", 8, 4096, 16, 4, 256),
    Row("heads of 128", 4, 2048, 16, 16, 128),
    Row("long", 1, 32768, 8, 8, 128),
    Row("packed", 1, 16384, 16, 4, 128, (512, 1536, 2048, 4096, 8192)),
]


def attended(way: str, row: Row, q, k, v):
    """Return the attention by one of WAYS."""
    if way == "cudnn":
        if row.documents:
            raise NotImplementedError("jax.nn.dot_product_attention has no packed sequences of any lengths")
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    seen = row.intervals()
    if way == "glax":
        return solve.attend_in_blocks(q, k, v, seen, None)
    return in_blocks(SoftmaxOperands(q, k, v, *seen, None), row.D**-0.5)


def program(way: str, row: Row, mode: str):
    """Return a jitted function of q, k, v and the cotangent."""

    def forward(q, k, v, d_o):
        return attended(way, row, q, k, v)

    def train(q, k, v, d_o):
        o, pull = jax.vjp(functools.partial(attended, way, row), q, k, v)
        return o, *pull(d_o)

    return jax.jit(dict(forward=forward, train=train)[mode])


def error(row: Row) -> float:
    """Return the distance of the first rows' outputs to those in float32."""
    few = dataclasses.replace(row, B=1, T=min(row.T, ERROR_ROWS), documents=())
    q, k, v, _ = few.arrays()
    got = jax.jit(functools.partial(attended, "glax", few))(q, k, v).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(attended, "xla", few))(*(x.astype(jnp.float32) for x in (q, k, v)))
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))


def with_configs(forward, gradient):
    """Let the kernels run with these configs where they are given."""
    for name, config in (("TRITON", forward), ("TRITON_GRADIENT", gradient)):
        if config is not None:
            kernel = dataclasses.replace(getattr(solve, name), heuristic=lambda operands, config=config: config)
            setattr(solve, name, kernel)


def parsed(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def measured(row: Row, mode: str, ways, options) -> list[dict]:
    """Return a line for each way, timed in turns."""
    arrays, lines, running = row.arrays(), [], {}
    for way in ways:
        line = dict(problem=row.name, mode=mode, implementation=way, dtype="bfloat16")
        try:
            run = functools.partial(program(way, row, mode), *arrays)
            jax.block_until_ready(run())
            running[way] = Way(way, run)
        except Exception as failure:  # a way without this call, or without the memory for it
            line["refusal"] = f"{type(failure).__name__}: {failure}"[:300]
        lines.append(line)
    found = zip(running, interleaved(list(running.values()), options.iters), strict=True)
    times = dict(found)
    products = dict(forward=2, train=7)[mode]
    for line in lines:
        if (time := times.get(line["implementation"])) is None:
            continue
        line |= dict(ms=time.median, p20=time.p20, p80=time.p80)
        line["tflops"] = products * 2 * row.scores * row.D / time.median / 1e9
        if options.device:
            line["kernels_ms"] = kernels_ms(running[line["implementation"]])
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], choices=[row.name for row in ROWS])
    parser.add_argument("--ways", nargs="*", default=None, choices=WAYS)
    parser.add_argument("--modes", nargs="*", default=["forward", "train"], choices=["forward", "train"])
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--device", action="store_true", help="also the time of the kernels alone")
    parser.add_argument("--forward", nargs="*", type=parsed, default=[], help="configs: rows,keys,warps,stages")
    parser.add_argument("--gradient", nargs="*", type=parsed, default=[], help="configs, as SoftmaxGradientConfig")
    parser.add_argument("--json", help="a file to write")
    options = parser.parse_args()
    lines = []
    configs: list[tuple] = [(SoftmaxConfig(*x), None) for x in options.forward]
    configs += [(None, SoftmaxGradientConfig(*x[:8], apart=bool(x[8:] and x[8]))) for x in options.gradient]
    for forward, gradient in configs or [(None, None)]:
        with_configs(forward, gradient)
        for row in (row for row in ROWS if row.name in options.rows):
            for mode in options.modes:
                by_default = ("glax", "cudnn", "xla") if (row, mode) == (ROWS[0], "forward") else ("glax", "cudnn")
                found = measured(row, mode, options.ways or by_default, options)
                for line in found:
                    line |= dict(config=str(forward or gradient)) if configs else {}
                lines += found
                print(table(found), flush=True)
            if not configs:
                lines.append(dict(problem=row.name, mode="errors", implementation="glax", error=error(row)))
                print(f"{row.name}: error {lines[-1]['error']:.1e}", flush=True)
    if options.json:
        write(Path(options.json), lines)


if __name__ == "__main__":
    main()
