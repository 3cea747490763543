"""Measure what rows of a trainer carry: `segment_ids` and `states_every`, beside the same rows without either.

python benchmarks/rows.py                    # B8 T4096 H16 K=V=128, gates per key and per head
python benchmarks/rows.py --gate head
python benchmarks/rows.py --shape 2,2048,4,4,64,64 --dtype float32    # B, T, heads of q and k, heads of v, K, V; for a CPU
python benchmarks/rows.py --errors           # against XLA in float32 at B2 T1024, in thousandths; nothing is timed

A row holds four documents of unequal length, other ones in every row. Stored states are float32 and get a gradient of their own.
All cases of a gate are timed in turns in one process; medians. "allowed" is the target: 1.15 times the row without documents, and
1.1 times the sum of the row without states and of a copy of the states' bytes, written once, and with gradient read once more.
Each line of JSON is a result in the form of benchmarks/results/README.md.
"""

import argparse
import dataclasses
import json
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from layers import GATES, MODES, NAMED, Layer, documents
from timing import table

import glax
from glax.cli.measure import Way, copy_gbytes, interleaved

SHAPE = (8, 4096, 16, 16, 128, 128)
DOCUMENTS, EVERY = 4, 256
SEGMENTS_ALLOWED, STATES_ALLOWED = 1.15, 1.1
PARTS = "o", "states", "dq", "dk", "dv", "dg"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a layer with further options. Results are the output, and the states where these are stored."""

    name: str
    layer: Layer
    options: dict

    def results(self, q, k, v, g, platform: str | None = None) -> tuple[jax.Array, ...]:
        found = glax.recurrent(q, k, v, **{GATES[self.layer.gate]: g}, **self.options, platform=platform)
        return (found.output, found.states) if "states_every" in self.options else (found.output,)

    def with_gradient(self, inputs, cotangents, platform: str | None = None):
        found, pull = jax.vjp(lambda *x: self.results(*x, platform=platform), *inputs)
        return found, pull(cotangents)

    def ways(self, inputs, d_output) -> dict[str, Way]:
        """Return the compiled call of each mode, which has run."""
        cotangents = self.cotangents(inputs, d_output)
        forward, both = jax.jit(self.results), jax.jit(self.with_gradient)
        jax.block_until_ready((forward(*inputs), both(inputs, cotangents)))
        return dict(
            forward=Way("forward", lambda: forward(*inputs)),
            both=Way("both", lambda: both(inputs, cotangents)),
        )

    def cotangents(self, inputs, d_output) -> tuple[jax.Array, ...]:
        shapes = jax.eval_shape(self.results, *inputs)
        return d_output, *(jax.random.normal(jax.random.key(5), x.shape, x.dtype) for x in shapes[1:])


def cases(layer: Layer) -> list[Case]:
    rows = [
        np.searchsorted(documents(layer.T, DOCUMENTS + row)[: DOCUMENTS - 1], np.arange(layer.T), "right")
        for row in range(layer.B)
    ]
    ids = jnp.asarray(np.stack(rows) + 1, jnp.int32)
    return [
        Case("none", layer, {}),
        Case(f"{DOCUMENTS} segments a row", layer, dict(segment_ids=ids)),
        Case(f"states_every={EVERY}", layer, dict(states_every=EVERY)),
    ]


def allowed_ms(case: Case, mode: str, plain_ms: float, gbytes: float) -> float:
    """Return the target of a case with segments or states. plain_ms: the time of the row with neither."""
    if "segment_ids" in case.options:
        return SEGMENTS_ALLOWED * plain_ms
    B, T, H, K, V = (getattr(case.layer, name) for name in "BTHKV")
    moved = 4 * B * (T // EVERY) * H * K * V * (2 if mode == "both" else 1)
    return STATES_ALLOWED * (plain_ms + moved / gbytes / 1e6)


def measure(layer: Layer, dtype: str, iters: int, gbytes: float) -> list[dict]:
    *inputs, d_output = (x.astype(dtype) for x in layer.operands(strength=0.25))
    tried, rows = cases(layer), []
    ways = [case.ways(inputs, d_output) for case in tried]
    times = {mode: interleaved([way[mode] for way in ways], iters) for mode in MODES}
    for i, case in enumerate(tried):
        row: dict[str, object] = dict(gate=NAMED[layer.gate], row=case.name)
        for mode, named in MODES.items():
            plain, ms = times[mode][0].median, times[mode][i].median
            line = dict(problem=layer.problem, gate=NAMED[layer.gate], packing=case.name, mode=named)
            print(json.dumps(line | dict(implementation="glax", ms=round(ms, 4))), flush=True)
            row |= {f"{named} ms": f"{ms:.4f}", f"{named}, of none": round(ms / plain, 3)}
            if case.options:
                row[f"{named}, of the allowed"] = round(ms / allowed_ms(case, mode, plain, gbytes), 3)
        rows.append(row)
    return rows


def errors(layer: Layer) -> list[dict]:
    """Return ||got - want|| / ||want|| in thousandths, and whether a second call repeats every bit."""
    *inputs, d_output = layer.operands(strength=0.25)
    wide, rows = tuple(x.astype(jnp.float32) for x in inputs), []
    for case in cases(layer):
        cotangents = case.cotangents(inputs, d_output)
        run = jax.jit(case.with_gradient)
        got, again = (jax.tree.leaves(run(inputs, cotangents)) for _ in range(2))
        exact = jax.jit(lambda x, d, case=case: case.with_gradient(x, d, platform="xla"))
        want = jax.tree.leaves(exact(wide, tuple(x.astype(jnp.float32) for x in cotangents)))
        names = PARTS if len(got) == len(PARTS) else (PARTS[0], *PARTS[2:])
        row: dict[str, object] = dict(gate=NAMED[layer.gate], row=case.name)
        for name, x, y in zip(names, got, want, strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            row[name] = float(1e3 * np.linalg.norm(x - y) / np.linalg.norm(y))
        pairs = zip(got, again, strict=True)
        rows.append(row | dict(repeats=str(all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs))))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", choices=("key", "head"), action="append")
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))), default=SHAPE)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--errors", action="store_true")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    gates = args.gate or ("key", "head")
    if args.errors:
        if args.shape != SHAPE or args.dtype != "bfloat16":
            parser.error("--errors has a shape and a dtype of its own: leave out --shape and --dtype")
        small = (2, 1024, *SHAPE[2:])
        print(table([row for gate in gates for row in errors(Layer("row", *small, gate))]))
        return
    layers, gbytes = [Layer("row", *args.shape, gate) for gate in gates], copy_gbytes(args.iters)
    print(table([row for layer in layers for row in measure(layer, args.dtype, args.iters, gbytes)]), flush=True)


if __name__ == "__main__":
    main()
