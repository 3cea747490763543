"""Compare the gated delta rule on an NVIDIA GPU with fla-core and jax-linear-attention, where these are installed.

python benchmarks/delta_gpu.py                            # times, multiples of the floor, memory
python benchmarks/delta_gpu.py --shape 1,8192,16,32       # B, T, heads of q and k, heads of v; all are 128 wide
python benchmarks/delta_gpu.py --widths 256 512           # of keys and of values, with or without --shape
python benchmarks/delta_gpu.py --errors                   # against the recurrence in float64, at 2,1024,2,4; nothing is timed
python benchmarks/delta_gpu.py --profile                  # the time of each kernel, alone on the device
python benchmarks/delta_gpu.py --by pallas jla            # these alone; of pallas, triton, jla and fla
python benchmarks/delta_gpu.py --documents 16             # packed rows of 16 documents of unequal lengths
python benchmarks/delta_gpu.py --compile 16               # fla-core's candidates compiled first, by 16 processes, and tuned
python benchmarks/delta_gpu.py --tune                     # fla-core's candidates alone, in short runs
python benchmarks/delta_gpu.py --gate key                 # each of these with gates for each key channel: Kimi Delta Attention

Gates are log-sigmoid in float32. Each peer runs as its users call it, with many calls in flight, in turns.
Without --compile or --tune fla-core runs only where Triton's cache says how; --errors takes its first candidates.
With per-key gates, fla-core also runs with `safe_gate`, which is right only where the gates have a lower bound.
The floor reads each input once and writes each output once, at the rate of a copy; with gradient, those of both passes.
"""

import argparse
import collections
import contextlib
import functools
import importlib.util
import os
import statistics
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from device_profile import device_events
from peers_fla import (
    MIB,
    UntunedError,
    compile_a_part,
    compile_in_parts,
    first_candidate,
    no_tuning,
    short_tuning,
)
from timing import table

import glax
from glax._src.core.bind import bind
from glax.cli.measure import Way, copy_gbytes, interleaved
from glax.testing.reference import reference, reference_gradient
from glax_cli.arguments import integers, within

WIDTHS = 128, 128  # of keys and of values
SHAPES = {
    "head": ((4, 2048, 16, 16), (1, 8192, 16, 32), (1, 8192, 16, 64), (1, 32768, 8, 16)),
    "key": ((4, 2048, 16, 16), (1, 8192, 32, 32)),
}
ERRORS = {"head": (2, 1024, 2, 4), "key": (2, 1024, 4, 4)}  # jax-linear-attention's kda has no shared heads
PARTS = "output", "dq", "dk", "dv", "dg", "dbeta"
PLATFORMS = "pallas", "triton"


class Problem(NamedTuple):
    """q, k, v, the gates g [B, T, H] or [B, T, H, K], beta, and the gradient of the output."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    d_output: jax.Array
    cuts: tuple[int, ...] | None = None  # between documents

    @classmethod
    def of(
        cls,
        gate: str,
        B: int,
        T: int,
        key_heads: int,
        heads: int,
        least: float = 0.0,
        documents: int = 1,
        widths: tuple[int, int] = WIDTHS,
    ) -> "Problem":
        """least: the value of a twentieth of the log gates; 0 leaves them as they are. documents: those that a row packs."""
        K, V = widths
        q, k, v, do, g, beta, dice = (jax.random.key(i) for i in range(7))
        narrow, wide = (B, T, key_heads, K), (B, T, heads, V)
        q, k = (jax.random.normal(key, narrow) for key in (q, k))
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        gates = (B, T, heads, K) if gate == "key" else wide[:3]
        logs = jax.nn.log_sigmoid(jax.random.normal(g, gates))
        if least:
            logs = jnp.where(jax.random.uniform(dice, gates) < 0.05, least, logs)
        beta = jax.nn.sigmoid(jax.random.normal(beta, wide[:3]))
        v, do = (jax.random.normal(key, wide) for key in (v, do))
        q, k, v, beta, do = (x.astype(jnp.bfloat16) for x in (q, k, v, beta, do))
        cuts = None
        if documents > 1:
            if B > 1:
                raise ValueError(f"--documents must come with B of 1, for packed calls have one row; got {B}")
            inner = np.random.default_rng(0).choice(np.arange(1, T), documents - 1, replace=False)
            cuts = (0, *map(int, sorted(inner)), T)
        return cls(q, k, v, logs.astype(jnp.float32), beta, do, cuts)

    def named(self) -> str:
        """Return B, T, the heads of q and of v, the widths of both unless they are WIDTHS, and the number of documents."""
        widths = self.q.shape[3], self.v.shape[3]
        numbers = ",".join(map(str, (*self.q.shape[:3], self.v.shape[2], *(widths if widths != WIDTHS else ()))))
        return numbers if self.cuts is None else f"{numbers} in {len(self.cuts) - 1}"

    def floor(self, rate: float) -> tuple[float, float]:
        """Return the milliseconds of the forward, and of forward and gradient. rate: GB/s."""
        inputs = sum(x.nbytes for x in self[:5])
        forward, backward = inputs + self.d_output.nbytes, 2 * inputs + self.d_output.nbytes
        return forward / rate / 1e6, (forward + backward) / rate / 1e6


class JaxWay:
    """A function of q, k, v, g and beta that returns the output, compiled alone and with its gradient."""

    def __init__(self, problem: Problem, output: Callable):
        def with_gradient(*x):
            found, pull = jax.vjp(output, *x[:5])
            return found, *pull(x[5])

        self.forward, self.both = (
            functools.partial(jax.jit(f).lower(*x).compile(), *x)
            for f, x in ((output, problem[:5]), (with_gradient, problem[:6]))
        )

    def ways(self) -> list[Way]:
        return [Way("forward", self.forward), Way("both", self.both)]

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x, np.float64) for x in (self.forward(), *self.both()[1:])]

    def peak_mib(self) -> float:
        memory = self.both.func.memory_analysis()
        return (memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes) / MIB


class Fla:
    """fla-core's chunk_gated_delta_rule or chunk_kda from PyTorch.

    options: of that operator. repeats: copies of each head of q and k, where it takes no shared heads.
    """

    def __init__(self, problem: Problem, **options):
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        self.torch, op = torch, chunk_kda if problem.g.ndim == 4 else chunk_gated_delta_rule
        if problem.cuts is not None:
            options["cu_seqlens"] = torch.tensor(problem.cuts, dtype=torch.int64, device="cuda")
        self.op = functools.partial(op, **options)
        self.inputs = [torch.from_dlpack(x).clone().requires_grad_() for x in problem[:5]]
        self.d_output = torch.from_dlpack(problem.d_output).clone()
        self.repeats = 1
        try:
            self.both()
        except (AssertionError, ValueError):
            self.repeats = self.inputs[2].shape[2] // self.inputs[0].shape[2]
            self.both()
        self.forward()

    def output(self):
        q, k, v, g, beta = self.inputs
        q, k = (x if self.repeats == 1 else x.repeat_interleave(self.repeats, 2) for x in (q, k))
        return self.op(q, k, v, g=g, beta=beta)[0]

    def forward(self):
        with self.torch.no_grad():
            return self.output()

    def both(self):
        found = self.output()
        return found, *self.torch.autograd.grad(found, self.inputs, self.d_output)

    def ways(self) -> list[Way]:
        def wait(_):
            self.torch.cuda.synchronize()

        return [Way("forward", self.forward, wait), Way("both", self.both, wait)]

    def results(self) -> list[np.ndarray]:
        return [x.detach().double().cpu().numpy() for x in self.both()]

    def peak_mib(self) -> float:
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self.both()
        return self.torch.cuda.max_memory_allocated() / MIB


def by_glax(platform: str, cuts) -> Callable:
    def output(q, k, v, g, beta):
        cu_seqlens = None if cuts is None else jnp.asarray(cuts, jnp.int32)
        operator = glax.kda if g.ndim == 4 else glax.gated_delta_rule
        return operator(q, k, v, g, beta, cu_seqlens=cu_seqlens, platform=platform).output

    return output


def by_jla(cuts) -> Callable:
    segment_ids = None if cuts is None else np.repeat(np.arange(1, len(cuts)), np.diff(cuts))[None].astype(np.int32)

    def output(q, k, v, g, beta):
        from jla import ops

        kind = "kda" if g.ndim == 4 else "gated_deltanet"
        options = {} if segment_ids is None else {"segment_ids": jnp.asarray(segment_ids)}
        return ops.linear_attention(kind, q, k, v, g=g, beta=beta, impl="mosaic_gpu", **options)[0]

    return output


def fla_makers(problem: Problem) -> dict[str, Callable]:
    makers = {"fla": functools.partial(Fla, problem)}
    if problem.g.ndim == 4:
        makers["safe"] = functools.partial(Fla, problem, safe_gate=True)
    return makers


NAMES = dict(
    pallas="glax, pallas",
    triton="glax, triton",
    jla="jax-linear-attention",
    fla="fla-core",
    safe="fla-core, safe_gate",
)


def implementations(problem: Problem, by) -> dict[str, JaxWay | Fla]:
    """Return those of `by`, keys of NAMES, that run here. Of the others, the reason is printed."""
    makers: dict[str, Callable] = {
        platform: functools.partial(JaxWay, problem, by_glax(platform, problem.cuts)) for platform in PLATFORMS
    }
    makers |= {"jla": functools.partial(JaxWay, problem, by_jla(problem.cuts))}
    makers |= fla_makers(problem)
    made = {}
    for key in (key for key in by if key in makers):
        name = NAMES[key]
        try:
            made[name] = makers[key]()
        except (ImportError, NotImplementedError, RuntimeError, TypeError, UntunedError, ValueError) as reason:
            print(f"{name} does not run: {type(reason).__name__}: {reason!s:.300}", flush=True)
    return made


def print_errors(gate: str, by, documents: int, widths: tuple[int, int]):
    """Print the relative errors against the recurrence in float64, and whether results repeat in every bit."""
    shape = ERRORS[gate] if documents == 1 else (1, *ERRORS[gate][1:])
    for least in (0.0, -100.0):
        problem, rows = Problem.of(gate, *shape, least=least, documents=documents, widths=widths), []
        wide = [x.astype(jnp.float32) for x in problem[:5]]
        cu_seqlens = None if problem.cuts is None else jnp.asarray(problem.cuts, jnp.int32)
        r = bind(*wide[:3], g=wide[3], beta=wide[4], cu_seqlens=cu_seqlens)
        zeros = jnp.zeros(r.state_shape, jnp.float32)
        d = reference_gradient(r, problem.d_output.astype(jnp.float32), zeros)
        assert d.erasure is not None
        wanted = [reference(r).output, d.q, d.k, d.v, d.decay.key if gate == "key" else d.decay.head, d.erasure.beta]
        for name, made in implementations(problem, by).items():
            found, again = made.results(), made.results()
            errors = (np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, wanted, strict=True))
            row = dict(zip(PARTS, (f"{x:.2e}" for x in errors), strict=True))
            repeats = all(np.array_equal(x, y) for x, y in zip(found, again, strict=True))
            rows.append({"errors": name, **row, "repeats": str(repeats)})
        print(f"gates of {least} on 5%" if least else "log-sigmoid gates", table(rows), sep="\n", flush=True)


def print_times(problem: Problem, rate: float, iters: int, by):
    floor, made, rows = problem.floor(rate), implementations(problem, by), []
    timings = interleaved([way for x in made.values() for way in x.ways()], iters)
    for (name, x), times in zip(made.items(), zip(timings[::2], timings[1::2], strict=True), strict=True):
        row: dict[str, object] = {"B,T,q,v": problem.named(), "by": name}
        for mode, least, time in zip(("forward", "both"), floor, times, strict=True):
            row |= {f"{mode} ms": f"{time.median:.3f}", f"{mode} x floor": f"{time.median / least:.2f}"}
        rows.append(row | {"peak MiB": f"{x.peak_mib():.0f}"})
    print(table(rows), flush=True)


def print_profile(problem: Problem, iters: int, by):
    """Print the median time of each kernel, in microseconds, in calls one after another."""
    print("B,T,q,v", problem.named())
    for name, x in implementations(problem, by).items():
        for way in x.ways():

            def calls(run=way.run, finish=way.wait):
                for _ in range(iters):
                    finish(run())

            calls()
            times = collections.defaultdict(list)
            for event in device_events(calls):
                times[event.name].append(1e3 * event.milliseconds)
            total = sum(map(sum, times.values())) / iters
            print(f"{name}, {way.name}: {total:.0f} us on the device", flush=True)
            for kernel, found in sorted(times.items(), key=lambda item: -sum(item[1])):
                if sum(found) / iters > total / 100:
                    print(f"  {statistics.median(found):7.1f} us  {len(found) // iters} x  {kernel[:70]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", choices=SHAPES, default="head")
    parser.add_argument("--shape", type=integers("B,T,H,D"), action="append")
    parser.add_argument("--widths", type=within(1), nargs=2, metavar=("K", "V"), default=WIDTHS)
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument(
        "--compile", type=int, default=0, metavar="N", help="processes that compile fla-core's candidates"
    )
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))), help=argparse.SUPPRESS)
    parser.add_argument("--by", nargs="+", choices=NAMES, default=list(NAMES))
    args = parser.parse_args()
    shapes, widths = args.shape or SHAPES[args.gate], tuple(args.widths)

    def problem_of(shape) -> Problem:
        return Problem.of(args.gate, *shape, documents=args.documents, widths=widths)

    if args.compile:
        chosen = [x for shape in shapes for x in ("--shape", ",".join(map(str, shape)))]
        chosen += ["--widths", *map(str, widths)]
        compile_in_parts(
            [__file__, "--gate", args.gate, "--documents", str(args.documents), *chosen, "--part"], args.compile
        )
    if args.part or args.tune or args.compile:
        short_tuning()
    if args.part or args.tune:
        if args.part:
            compile_a_part(*args.part)
        for shape in shapes:
            for name, make in fla_makers(problem_of(shape)).items():
                make()
                print("compiled" if args.part else "tuned", NAMES[name], *shape, flush=True)
    elif args.errors:
        if importlib.util.find_spec("triton"):
            first_candidate()
        print_errors(args.gate, args.by, args.documents, widths)
    else:
        rate = copy_gbytes(args.iters)
        print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, a copy moves {rate:.0f} GB/s")
        with contextlib.nullcontext() if args.compile else no_tuning():
            for shape in shapes:
                if args.profile:
                    print_profile(problem_of(shape), args.iters, args.by)
                else:
                    print_times(problem_of(shape), rate, args.iters, args.by)


if __name__ == "__main__":
    main()
