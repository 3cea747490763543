"""Calls on an NVIDIA GPU beside fla-core's where it is installed: times, memory, errors of both, and bits that repeat.

python benchmarks/gpu.py                                            # B4 T2048 H16 D128, a gate a channel, bfloat16
python benchmarks/gpu.py --shape 1,32768,8,128 --gate head --json   # a line of JSON a table's row
python benchmarks/gpu.py --turn turn.lock                           # several at once: all compile, one at a time is timed
python benchmarks/gpu.py --quick                                    # fla-core tunes itself in short runs, not in minutes
python benchmarks/gpu.py --errors                                   # of both, a gate a channel and a head; nothing is timed

fla-core runs from PyTorch, each of its calls launched from Python, as its users launch it. Both are timed in turn, many calls
in flight. Peak memory counts inputs, outputs and gradients.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants memory, too

import jax
import jax.numpy as jnp
import numpy as np
from timing import table

import glax
from glax.bind import bind
from glax.cli.measure import Way, copy_gbytes, interleaved
from glax.cli.problems import GATES, Problem, four_numbers
from glax.reference import reference, reference_gradient

SHAPES = ((4, 2048, 16, 128), (2, 16384, 16, 128), (1, 8192, 96, 128), (1, 32768, 8, 128), (8, 1024, 8, 64))
ERRORS = (1, 1024, 4, 128)  # unless told: the reference walks in Python
PARTS = ("o", "state", "dq", "dk", "dv", "dg")
MIB = 2**20


def operands_of(problem: Problem, strong: bool = False) -> list[jax.Array]:
    """q, k, v, the gates and the output's gradient; `strong`: one gate in twenty is -100."""
    arrays = problem.arrays()
    gates = arrays[GATES[problem.gate]]
    if strong:
        gates = jnp.where(jax.random.uniform(jax.random.key(3), gates.shape) < 0.05, -100, gates).astype(gates.dtype)
    do = jax.random.normal(jax.random.key(1), arrays["value"].shape, problem.dtype)
    return [arrays["query"], arrays["key"], arrays["value"], gates, do]


class Glax:
    """Compiled for a problem; `compile_seconds` of forward and gradient together."""

    def __init__(self, problem: Problem, operands: list[jax.Array]):
        def forward(q, k, v, g):
            return glax.recurrent(q, k, v, **{GATES[problem.gate]: g})

        def both(q, k, v, g, do):
            out, pull = jax.vjp(forward, q, k, v, g)
            return *out, *pull(type(out)(do, jnp.zeros_like(out.final_state)))

        self.operands = operands
        began = time.perf_counter()
        self.both = jax.jit(both).lower(*operands).compile()
        self.compile_seconds = time.perf_counter() - began
        self.forward = jax.jit(lambda *x: forward(*x).output).lower(*operands[:4]).compile()

    def ways(self) -> list[Way]:
        return [
            Way("forward", lambda: self.forward(*self.operands[:4])),
            Way("both", lambda: self.both(*self.operands)),
        ]

    def peak_mib(self) -> float:
        need = self.both.memory_analysis()
        return (need.argument_size_in_bytes + need.output_size_in_bytes + need.temp_size_in_bytes) / MIB

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in self.both(*self.operands)]


class Fla:
    """fla-core's chunk kernels for a problem, tuned."""

    def __init__(self, problem: Problem, operands: list[jax.Array]):
        import torch
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla

        self.torch, self.op = torch, chunk_gla if problem.gate == "key" else chunk_simple_gla
        self.inputs = [torch.from_dlpack(x).clone().requires_grad_() for x in operands[:4]]
        self.do = torch.from_dlpack(operands[4]).clone()
        began = time.perf_counter()
        self.both()
        self.forward()
        torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - began

    def forward(self):
        with self.torch.no_grad():
            return self.op(*self.inputs)[0]

    def both(self):
        out, state = self.op(*self.inputs, output_final_state=True)
        return out, state, *self.torch.autograd.grad(out, self.inputs, self.do)

    def ways(self) -> list[Way]:
        wait = lambda _: self.torch.cuda.synchronize()  # noqa: E731
        return [Way("forward", self.forward, wait), Way("both", self.both, wait)]

    def peak_mib(self) -> float:
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self.both()
        return self.torch.cuda.max_memory_allocated() / MIB

    def results(self) -> list[np.ndarray]:
        return [x.detach().float().cpu().numpy() for x in self.both()]


def errors(want: list[np.ndarray], got: list[np.ndarray]) -> dict[str, float]:
    """||got - want|| / ||want|| of the output, the final state and every gradient."""
    distances = [
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in zip(got, want, strict=True)
    ]
    return dict(zip(PARTS, map(float, distances), strict=True))


def expected(problem: Problem, operands: list[jax.Array]) -> list[np.ndarray]:
    *inputs, do = operands
    r = bind(*inputs[:3], **{GATES[problem.gate]: inputs[3]})
    out, d = reference(r), reference_gradient(r, do, jnp.zeros(r.state_shape))
    return [out.output, out.final_state, d.q, d.k, d.v, d.decay.key if problem.gate == "key" else d.decay.head]


def short_tuning():
    """Makes Triton's autotuner, which fla-core uses, time each candidate for 8 ms instead of 100."""
    from triton import testing
    from triton.backends.nvidia.driver import CudaDriver

    whole = testing.do_bench

    def short(f, warmup=None, rep=None, **rest):
        return whole(f, warmup=2, rep=8, **rest)

    CudaDriver.get_benchmarker = lambda self: short


def first_candidate():
    """Makes Triton's autotuner take the first candidate that runs: the others need not be compiled."""
    from triton.runtime.autotuner import Autotuner

    os.environ["FLA_CACHE_RESULTS"] = "0"  # what is taken here is no result to keep
    whole, done = Autotuner._bench, {}

    def first(self, *args, config, **rest):
        if done.get(self) is self.nargs:  # the call's own dict
            return [float("inf")]
        timing = whole(self, *args, config=config, **rest)
        if timing[0] < float("inf"):
            done[self] = self.nargs
        return timing

    Autotuner._bench = first


@contextlib.contextmanager
def turn(path: str | None):
    """Alone among the processes that name this file."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(problem: Problem, makers: dict, iters: int, taking_turns) -> dict:
    """A row of times and memory."""
    operands = operands_of(problem)
    made = {name: make(problem, operands) for name, make in makers.items()}
    with taking_turns:
        row = dict(problem=str(problem), copy_gbytes=copy_gbytes(7))
        for i, mode in enumerate(("forward", "both")):
            times = interleaved([x.ways()[i] for x in made.values()], iters)
            row |= {f"{name} {mode} ms": t.median for name, t in zip(made, times, strict=True)}
            if len(times) == 2:
                row[f"{mode} ratio"] = times[1].median / times[0].median
        row |= {f"{name} MiB": x.peak_mib() for name, x in made.items()}
        row |= {f"{name} compile s": x.compile_seconds for name, x in made.items()}
        first = made["glax"].results()
        same = all(
            x.tobytes() == y.tobytes() for _ in range(2) for x, y in zip(first, made["glax"].results(), strict=True)
        )
        row["glax repeats"] = "in every bit" if same else "differ"
    return row


def compared(problem: Problem, makers: dict) -> list[dict]:
    """A row of errors against float64 for each library and strength of gates."""
    rows = []
    for strength in ("mild", "strong"):
        operands = operands_of(problem, strength == "strong")
        want = expected(problem, operands)
        rows += [
            dict(problem=str(problem), strength=strength, library=name)
            | errors(want, make(problem, operands).results())
            for name, make in makers.items()
        ]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=four_numbers, metavar="B,T,H,D")
    parser.add_argument("--gate", action="append", choices=("key", "head"))
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--turn", metavar="FILE")
    tuning = parser.add_mutually_exclusive_group()
    tuning.add_argument("--quick", action="store_true")
    tuning.add_argument("--errors", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    makers = dict(glax=Glax)
    if importlib.util.find_spec("fla") is not None and importlib.util.find_spec("torch") is not None:
        makers["fla-core"] = Fla
        if args.quick:
            short_tuning()
        if args.errors:
            first_candidate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if args.errors:
        shapes, gates = args.shape or (ERRORS,), args.gate or ("key", "head")
        problems = [Problem(*shape, gate, "bfloat16") for shape in shapes for gate in gates]
        show([row for problem in problems for row in compared(problem, makers)], args.json)
        return
    for shape in args.shape or SHAPES[:1]:
        for gate in args.gate or ("key",):
            row = measured(Problem(*shape, gate, "bfloat16"), makers, args.iters, turn(args.turn))
            show([row] if args.json else [dict(what=name, value=value) for name, value in row.items()], args.json)


def show(rows: list[dict], as_json: bool):
    print("\n".join(map(json.dumps, rows)) if as_json else table(rows), flush=True)


if __name__ == "__main__":
    main()
