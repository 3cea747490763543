"""Compare calls on an NVIDIA GPU with fla-core, where it is installed: times, memory, errors, and bits that repeat.

python benchmarks/gpu.py                                            # B4 T2048 H16 D128, per-key gates, bfloat16
python benchmarks/gpu.py --shape 1,32768,8,128 --gate head --json   # one line of JSON per row
python benchmarks/gpu.py --table                                    # six shapes and both gates, each in a process of its own
python benchmarks/gpu.py --table --compile 16                       # fla-core's candidates compiled first, by 16 processes
python benchmarks/gpu.py --table --alone --device                   # without fla-core, and the time of kernels alone
python benchmarks/gpu.py --errors                                   # both gates, four strengths of them; nothing is timed

fla-core runs from PyTorch, and each of its calls is launched from Python, as its users launch it. The two are timed in turns,
with many calls in flight. --quick: fla-core tunes itself in short runs, not in minutes. Peak memory counts inputs, outputs and
gradients. "of floor": the time, divided by the time of a copy that reads each input once and writes each output once.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from peers_fla import MIB, Fla, compile_a_part, compile_in_parts, first_candidate, short_tuning
from timing import table

import glax
from glax._src.core.bind import bind
from glax._src.core.registry import UnsupportedError
from glax.cli.cases import GATES, Problem
from glax.cli.measure import Way, copy_gbytes, interleaved
from glax.testing.reference import reference, reference_gradient
from glax_cli.arguments import integers

SHAPES = ((4, 2048, 16, 128), (2, 16384, 16, 128), (1, 8192, 96, 128), (1, 32768, 8, 128), (8, 1024, 8, 64))
WITHOUT_PEER = ((4, 4096, 64, 128),)
ERRORS = (1, 1024, 4, 128)  # the default of --errors: the reference is a loop in Python
STRENGTHS = dict(usual=1.0, sixteenth=1 / 16, weak=1 / 256, strong=1.0)  # of log-sigmoid; strong: and -100 on 5%
MODES = dict(forward="forward", both="train")  # our name of a mode, and its name in a Problem
PARTS = ("o", "state", "dq", "dk", "dv", "dg")


def operands_of(problem: Problem, strength: str = "usual", gate_dtype=None) -> list[jax.Array]:
    """Return q, k, v, the gates and the gradient of the output."""
    shapes = problem.shapes()
    wide, gates = shapes["query"], shapes[GATES[problem.gate]]
    *rest, g, dice = (jax.random.key(i) for i in range(6))
    q, k, v, do = (jax.random.normal(key, wide.shape, wide.dtype) for key in rest)
    logs = STRENGTHS[strength] * jax.nn.log_sigmoid(jax.random.normal(g, gates.shape))
    if strength == "strong":
        logs = jnp.where(jax.random.uniform(dice, gates.shape) < 0.05, -100, logs)
    return [q, k, v, logs.astype(gate_dtype or gates.dtype), do]


class Glax:
    """glax compiled for a problem. compile_seconds: the time of the first call of forward and gradient together."""

    def __init__(self, problem: Problem, operands: list[jax.Array], platform: str | None = None):
        def forward(q, k, v, g):
            return glax.recurrent(q, k, v, **{GATES[problem.gate]: g}, platform=platform)

        def both(q, k, v, g, do):
            out, pull = jax.vjp(forward, q, k, v, g)
            return *out, *pull(type(out)(do, jnp.zeros_like(out.final_state)))

        self.operands = operands
        self.forward, self.both = jax.jit(lambda *x: forward(*x).output), jax.jit(both)  # called as users call them
        began = time.perf_counter()
        jax.block_until_ready(self.both(*operands))
        self.compile_seconds = time.perf_counter() - began
        jax.block_until_ready(self.forward(*operands[:4]))

    def ways(self) -> list[Way]:
        return [
            Way("forward", lambda: self.forward(*self.operands[:4])),
            Way("both", lambda: self.both(*self.operands)),
        ]

    def peak_mib(self) -> float:
        need = self.both.lower(*self.operands).compile().memory_analysis()  # compiled already, so this is a lookup
        return (need.argument_size_in_bytes + need.output_size_in_bytes + need.temp_size_in_bytes) / MIB

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in self.both(*self.operands)]

    def repeats(self) -> bool:
        """Return whether two more calls agree with the first in every bit."""
        first = self.both(*self.operands)
        return all(all(map(same_bits, first, self.both(*self.operands))) for _ in range(2))


@jax.jit
def same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    whole = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return (x.view(whole) == y.view(whole)).all()


def errors(want: list[np.ndarray], got: list[np.ndarray]) -> dict[str, float]:
    """Return ||got - want|| / ||want|| of the output, the final state and every gradient, in thousandths."""
    distances = [
        1e3 * np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in zip(got, want, strict=True)
    ]
    return dict(zip(PARTS, map(float, distances), strict=True))


def expected(gate: str, operands: list[np.ndarray]) -> list[np.ndarray]:
    """Compute the results in float64 with the reference. This runs in processes that use no device."""
    *inputs, do = operands
    r = bind(*inputs[:3], **{GATES[gate]: inputs[3]})
    out, d = reference(r), reference_gradient(r, do, np.zeros(r.state_shape))
    return [out.output, out.final_state, d.q, d.k, d.v, d.decay.key if gate == "key" else d.decay.head]


class Turns:
    """Locks of the processes that share this file: one at a time compiles glax; once all are ready, one at a time is timed."""

    def __init__(self, path: str | None):
        self.path = path
        self.shared = None if path is None else self.locked("", fcntl.LOCK_SH)  # held until this process is ready

    def locked(self, suffix: str, how: int):
        file = open(self.path + suffix, "w")  # noqa: SIM115  the caller closes it
        fcntl.flock(file, how)
        return file

    def compiling(self):
        return contextlib.nullcontext() if self.path is None else self.locked(".compiling", fcntl.LOCK_EX)

    def timing(self):
        if self.path is None:
            return contextlib.nullcontext()
        fcntl.flock(self.shared, fcntl.LOCK_EX)
        return self.shared


def on_device(way: Way, calls: int = 10) -> float:
    """Return the ms per call that its kernels take, without the gaps between them, from JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            way.wait([way.run() for _ in range(calls)][-1])
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        streams = [line for line in lines if line.name.startswith("Stream")]
        if not streams:
            raise RuntimeError(
                f"--device: expected streams of a GPU in the profile, got {[line.name for line in lines]}"
            )
        return sum(e.duration_ns for stream in streams for e in stream.events) / calls / 1e6


def measured(problem: Problem, peer: bool, iters: int, turns: Turns, device: bool = False) -> dict:
    """Return a row of times and memory."""
    operands = operands_of(problem)
    with turns.compiling():
        made = dict(glax=Glax(problem, operands))
    if peer:
        made["fla-core"] = Fla(problem, operands, tune=False)
    with turns.timing():
        if peer and not made["fla-core"].tuned:
            made["fla-core"] = Fla(problem, operands)
        row = dict(problem=str(problem), copy_gbytes=copy_gbytes(7))
        for i, (mode, named) in enumerate(MODES.items()):
            times = interleaved([x.ways()[i] for x in made.values()], iters)
            row |= {f"{name} {mode} ms": t.median for name, t in zip(made, times, strict=True)}
            floor = problem.bytes(named) / row["copy_gbytes"] / 1e6
            row[f"{mode} of floor"] = times[0].median / floor
            if device:
                row[f"{mode} kernels ms"] = on_device(made["glax"].ways()[i])
                row[f"{mode} kernels of floor"] = row[f"{mode} kernels ms"] / floor
            if peer:
                row |= {f"{mode} ratio": times[1].median / times[0].median}
                row |= {f"{mode} ratios": (times[1].p20 / times[0].p80, times[1].p80 / times[0].p20)}
        row |= {f"{name} MiB": x.peak_mib() for name, x in made.items()}
        row |= {f"{name} compile s": x.compile_seconds for name, x in made.items()}
        row["glax repeats"] = "in every bit" if made["glax"].repeats() else "differ"
    return row


def compared(problems: list[Problem], strengths: list[str], peer: bool) -> list[dict]:
    """Return a row of errors against float64 for each implementation and strength of gates. Gates have the dtype of q."""
    requests = [
        (problem, strength, operands_of(problem, strength, problem.dtype))
        for problem in problems
        for strength in strengths
    ]
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes started below; this process has its devices already
    rows = []
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = [
            pool.submit(expected, problem.gate, [*map(np.asarray, operands)]) for problem, _, operands in requests
        ]
        for (problem, strength, operands), want in zip(requests, wanted, strict=True):
            ways = {"glax": Glax, "its Hopper kernels": "pallas", "its Triton kernels": "triton"}
            for name, way in (ways | ({"fla-core": Fla} if peer else {})).items():
                try:
                    made = way(problem, operands) if callable(way) else Glax(problem, operands, way)
                except UnsupportedError as refused:
                    print(f"{name}: {refused}", file=sys.stderr)
                    continue
                rows.append(dict(problem=str(problem), gates=strength, by=name) | errors(want.result(), made.results()))
    return rows


def rows_of_table(args) -> list[dict]:
    """Return the rows. Each is measured in a process of its own, so that compile times are those of a first call."""
    requests = [
        (shape, gate) for shape in args.shape or (*SHAPES, *WITHOUT_PEER) for gate in args.gate or ("key", "head")
    ]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:

        def row(shape, gate) -> dict:
            options = ["--shape", ",".join(map(str, shape)), "--gate", gate, "--iters", str(args.iters), "--json"]
            command = [sys.executable, __file__, *options, "--turns", os.path.join(folder, "turns")]
            command += ["--quick"] * args.quick + ["--alone"] * (args.alone or shape in WITHOUT_PEER)
            command += ["--device"] * args.device
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)
            return json.loads(done.stdout.splitlines()[-1])

        return [each.result() for each in [pool.submit(row, *x) for x in requests]]


def summary(rows: list[dict]) -> list[dict]:
    """Select the columns that fit on a line."""
    lines = []
    for row in rows:
        line = dict(problem=row["problem"].removesuffix(" bfloat16"))
        for mode in MODES:
            line |= {f"{mode} ms": f"{row[f'glax {mode} ms']:.4g}"}
            line |= {name: row[name] for name in (f"{mode} of floor", f"{mode} kernels of floor") if name in row}
            if f"{mode} ratio" in row:
                line[f"{mode}, fla-core"] = "{:.2f}x ({:.2f} to {:.2f})".format(
                    row[f"{mode} ratio"], *row[f"{mode} ratios"]
                )
        figures = [f"{name} {what}" for what in ("MiB", "compile s") for name in ("glax", "fla-core")]
        line |= {name: f"{row[name]:.3g}" for name in figures if name in row}
        lines.append(line | {"repeats": row["glax repeats"]})
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=integers("B,T,H,D"), metavar="B,T,H,D")
    parser.add_argument("--gate", action="append", choices=("key", "head"))
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--turns", metavar="FILE", help=Turns.__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without fla-core")
    parser.add_argument("--device", action="store_true", help="glax's kernels alone as well, by JAX's profiler")
    what = parser.add_mutually_exclusive_group()
    for name in ("table", "errors"):
        what.add_argument(f"--{name}", action="store_true")
    what.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))), help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="processes that compile fla-core first")
    parser.add_argument("--strength", choices=(*STRENGTHS, "all"), default="all", help="of the gates, with --errors")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    installed = all(importlib.util.find_spec(name) is not None for name in ("fla", "torch"))
    peer = installed and not args.alone
    gates = args.gate or (("key",) if not (args.table or args.errors or args.part) else ("key", "head"))
    if args.part:
        compile_a_part(*args.part)
        for shape in args.shape or SHAPES:
            for gate in gates:
                problem = Problem.of_shape((shape[0], min(shape[1], 1024), *shape[2:]), gate=gate, dtype="bfloat16")
                Fla(problem, operands_of(problem))
        return
    if args.table:
        if args.compile and peer:
            began = time.perf_counter()
            chosen = [x for shape in args.shape or () for x in ("--shape", ",".join(map(str, shape)))]
            chosen += [x for gate in args.gate or () for x in ("--gate", gate)]
            compile_in_parts([__file__, *chosen, "--part"], args.compile)
            print(f"compiled fla-core's candidates in {time.perf_counter() - began:.0f} s", flush=True)
        rows = rows_of_table(args)
        if not args.json:
            print(table(summary(rows)))
        return
    turns = Turns(args.turns)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if peer and args.quick:
        short_tuning()
    if args.errors:
        if peer:
            first_candidate()
        strengths = dict(all=[*STRENGTHS]).get(args.strength, [args.strength])
        problems = [
            Problem.of_shape(shape, gate=gate, dtype="bfloat16") for shape in args.shape or (ERRORS,) for gate in gates
        ]
        show(compared(problems, strengths, peer), args.json)
        return
    for shape in args.shape or SHAPES[:1]:
        for gate in gates:
            row = measured(Problem.of_shape(shape, gate=gate, dtype="bfloat16"), peer, args.iters, turns, args.device)
            show([row] if args.json else [dict(what=name, value=value) for name, value in row.items()], args.json)


def show(rows: list[dict], as_json: bool):
    print("\n".join(map(json.dumps, rows)) if as_json else table(rows), flush=True)


if __name__ == "__main__":
    main()
