"""Measure glax on this machine's CPU beside baselines in plain JAX (peers.py).

    python benchmarks/cpu.py               forward and gradient against the baselines, PyTorch's too where it is installed
    python benchmarks/cpu.py --scaling     time per token and peak memory as sequences grow
    python benchmarks/cpu.py --dtypes      bfloat16 and float16 beside float32
    python benchmarks/cpu.py --delta       the delta rule against lax.scan and chunks in plain JAX
    python benchmarks/cpu.py --compile     compile time of the gradient of every public function

Options: --quick, fewer repeats and, with --scaling, shorter sequences; --json FILE, everything measured.
The exit code is 1 only if results disagree. A missed bar is only printed.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by PyTorch, whose idle threads would keep cores from others

import delta_rule
import jax
import jax.numpy as jnp
import numpy as np
from cpu_compile import compile_bars, compiling
from peers import BASELINES
from peers_torch import with_torch
from timing import available_bytes, compiled, interleaved, table

import glax
from glax._src.core.bind import bind
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.cli.measure import Timing, copy_gbytes, matmul_gflops

OUT = Path(__file__).parent / "out"
MODES = ("forward", "forward + backward")
SPEED_BAR = dict(zip(MODES, (1.0, 1.8), strict=True))  # XLA's kernels: times as fast as the best baseline
NATIVE_BAR = dict(zip(MODES, (4.0, 5.0), strict=True))  # native kernels: times as fast as the best of all else
NATIVE, XLA = "glax", "glax on XLA"  # each as glax chooses among the kernels
CLOSE = dict(zip(MODES, (2e-5, 1e-4), strict=True))  # both sides are float32: twice the bars against float64
# Settings of glibc's malloc: freed memory stays with the process (docs/troubleshooting.md).
KEEP_FREED = dict(
    MALLOC_MMAP_THRESHOLD_=str(2**32),
    MALLOC_TRIM_THRESHOLD_=str(2**33),
    MALLOC_TOP_PAD_=str(2**28),
    MALLOC_ARENA_MAX="1",
)
SUM = "sum"  # no recurrence, only its traffic: q + k + v + gate
WAYS = {  # platform, environment
    "as glax chooses": ("auto", {}),
    "freed memory retained": ("auto", KEEP_FREED),
    "XLA": ("xla", {}),
    "operands added up": (SUM, {}),
    "operands added up, freed memory retained": (SUM, KEEP_FREED),
}
SCALING_BAR, MEMORY_BAR = 1.25, 3.0  # slowest / fastest time per token, GiB


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: log-sigmoid gates, the same number of heads for all operands. `gate` is "gk" (per key) or "g" (per head)."""

    B: int
    T: int
    H: int
    width: int
    gate: str
    dtype: str = "float32"  # of query, key and value

    def __str__(self):
        return f"B{self.B} T{self.T} H{self.H} K=V={self.width} {self.gate}"

    def operands(self) -> list[jax.Array]:
        """query, key, value, gate, and the cotangent of the output."""
        rng = np.random.default_rng(0)
        wide = (self.B, self.T, self.H, self.width)
        q, k, v, do = (jnp.asarray(rng.standard_normal(wide, np.float32)) for _ in range(4))
        gate = rng.standard_normal(wide if self.gate == "gk" else wide[:3], np.float32)
        q, k, v, do = (x.astype(self.dtype) for x in (q, k, v, do))
        return [q, k, v, jax.nn.log_sigmoid(jnp.asarray(gate)), do]

    def flops(self, forward_chunk: int, gradient_chunk: int | None) -> float:
        """Operations in the matrix products of a forward in chunks of C tokens, and of a gradient in chunks of D:

            forward     B T H (4 K V + 2 C (K + V))         q S, k^T v; pairs q k^T, pairs v
            gradient    B T H (10 K V + 2 D (3 K + 2 V))    the states again; dq, dk, dv and dS from states;
                                                            pairs, their gradient; dq, dk, dv from pairs

        C = 0 stands for a token-by-token kernel, D = None for no gradient. The masked halves of the pairs
        count, since they are computed; exponentials and elementwise work do not.
        """
        K = V = self.width
        each = 4 * K * V + 2 * forward_chunk * (K + V)
        if gradient_chunk is not None:
            each += 10 * K * V + 2 * gradient_chunk * (3 * K + 2 * V)
        return self.B * self.T * self.H * each

    def bytes(self, mode: str) -> float:
        """Return the bytes that move if forward and gradient each read every input once and write every output once.

        forward reads q, k, v, gate and writes o; the gradient reads those four and do, and writes four gradients.
        """
        rows, gates = self.B * self.T * self.H, 4 * (self.width if self.gate == "gk" else 1)
        wide = jnp.dtype(self.dtype).itemsize * self.width
        forward, gradient = 4 * wide + gates, 7 * wide + 2 * gates
        return rows * (forward if mode == "forward" else forward + gradient)


SHAPES = (dict(B=1, T=2048, H=4, width=64), dict(B=2, T=4096, H=8, width=128))
PROBLEMS = [Problem(**shape, gate=gate) for shape in SHAPES for gate in ("gk", "g")]


def by_glax(problem: Problem, **insist):
    """f(q, k, v, gate) -> output."""
    return lambda q, k, v, gate: glax.recurrent(q, k, v, **{problem.gate: gate}, **insist).output


def added_up(q, k, v, gate):
    """Move as much memory as a forward, and its gradient likewise: how the machine alone scales with T."""
    return q + k + v + gate


def forced(problem: Problem, r: Recurrence) -> dict:
    """Return a function for each kernel whose forward runs here, with the kernel's heuristic config."""
    load_kernels()
    specs = [s for s in kernel_registry.kernels.values() if not s.is_gradient and s.refusal(r) is None]
    return {
        f"glax {s.algorithm} {s.platform}": by_glax(problem, platform=str(s.platform), cfg=s.config.heuristic(r))
        for s in specs
    }


def chosen(r: Recurrence, gradient: bool) -> tuple[str, int]:
    """Return the kernel that glax chooses and its chunk; 0 without chunks."""
    spec = kernel_registry.able(r, gradient=gradient)[0][0]
    return f"{spec.algorithm} {spec.platform}", getattr(spec.config.heuristic(r), "chunk", 0)


def in_mode(f, mode: str):
    """Return f without its cotangent, or <f, do> and its gradient with respect to q, k, v and the gate."""
    if mode == "forward":
        return lambda q, k, v, gate, do: f(q, k, v, gate)

    def loss(q, k, v, gate, do):
        return jnp.vdot(f(q, k, v, gate), do)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def relative_error(x, y) -> float:
    """The largest relative RMS error of x's arrays against y's: of the output, or of the four gradients."""
    x, y = (jax.tree.leaves(z[1] if isinstance(z, tuple) else z) for z in (x, y))
    return max(float(jnp.sqrt(jnp.square(a - b).sum() / jnp.square(b).sum())) for a, b in zip(x, y, strict=True))


def measure(problem: Problem, mode: str, args) -> dict:
    """Compile each way to compute the problem, compare it with the first baseline that fits in memory, and time it."""
    operands = problem.operands()
    q, k, v, gate, _ = operands
    r = bind(q, k, v, **{problem.gate: gate})
    ours = {NATIVE: by_glax(problem), XLA: by_glax(problem, platform="xla")} | forced(problem, r)
    runs, errors, notes, want = {}, {}, [], None
    for name, f in (BASELINES | ours).items():
        run = compiled(in_mode(f, mode), *operands)
        needs, there = run.memory_analysis().temp_size_in_bytes, available_bytes()
        if there is not None and needs > 0.8 * there:
            notes.append(f"{name} left out: it needs {needs / 2**30:.1f} GiB, {there / 2**30:.1f} GiB are available")
            continue
        got = run(*operands)
        want = got if want is None else want
        runs[name], errors[name] = run, relative_error(got, want)
    for name, run in with_torch(operands, mode != "forward").items():
        runs[name], errors[name] = run, relative_error(run(*operands), want)
    del got, want  # memory that the timed runs may need
    times = interleaved(runs, *operands, repeats=args.repeats, seconds=args.seconds, warm=True)

    def fastest(names):
        return min(names, key=lambda name: times[name].median)

    best = fastest([name for name in times if name not in ours and "torch" not in name])
    rival = fastest([name for name in times if name not in ours or "xla" in name.lower()])
    took = [chosen(r, gradient) for gradient in ((False,) if mode == "forward" else (False, True))]
    chunks = [chunk for _, chunk in took] + [None]
    seconds = times[NATIVE].median / 1e3
    return dict(
        title=f"{problem} {mode}",
        mode=mode,
        took=" and ".join(name for name, _ in took),
        native=all("cpp" in name for name, _ in took),
        best=best,
        speedup=times[best].median / times[XLA].median,
        rival=rival,
        native_speedup=times[rival].median / times[NATIVE].median,
        gflops=problem.flops(*chunks[:2]) / seconds / 1e9,
        gbytes=problem.bytes(mode) / seconds / 1e9,
        right=all(error <= CLOSE[mode] for error in errors.values()),
        notes=notes,
        ways={
            name: dict(
                ms=dataclasses.asdict(t),
                error=errors[name],
                temporary_mib=temporary_mib(runs[name]),
            )
            for name, t in times.items()
        },
    )


def temporary_mib(run) -> int | None:
    """Return the temporary memory of an XLA program in MiB; None for other programs, where it is unknown."""
    return round(run.memory_analysis().temp_size_in_bytes / 2**20) if hasattr(run, "memory_analysis") else None


def against_baselines(args) -> dict:
    machine = dict(matmul_gflops=matmul_gflops("float32", 7), copy_gbytes=copy_gbytes(7))
    print(f"\nThis machine: {machine['matmul_gflops']:.0f} GFLOP/s in a float32 product of 2048 x 2048,", end=" ")
    print(f"{machine['copy_gbytes']:.1f} GB/s in a copy\n")
    results = []
    for problem in PROBLEMS:
        for mode in MODES:
            result = measure(problem, mode, args)
            results.append(result)
            print(f"{result['title']}: glax took {result['took']};", end=" ")
            print(f"{result['gflops']:.1f} GFLOP/s, {result['gbytes']:.2f} GB/s")
            base = result["ways"][result["best"]]["ms"]["median"]
            rows = [
                {
                    "": name,
                    "ms: median (p20-p80)": Timing(**way["ms"]),
                    "of the best baseline's": way["ms"]["median"] / base,
                    "relative error": way["error"],
                    "temporary MiB": way["temporary_mib"],
                }
                for name, way in result["ways"].items()
            ]
            print(table(rows), *result["notes"], "", sep="\n", flush=True)
    return dict(machine=machine, results=results)


def baseline_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    bars = []
    for r in found["results"]:
        bar = SPEED_BAR[r["mode"]]
        title = f"{r['title']}: XLA kernels, times as fast as {r['best']}"
        bars.append((title, r["speedup"], f">= {bar}", r["speedup"] >= bar))
    for r in found["results"]:
        bar = NATIVE_BAR[r["mode"]]
        title = f"{r['title']}: native kernels, times as fast as {r['rival']}"
        if r["native"]:
            bars.append((title, r["native_speedup"], f">= {bar}", r["native_speedup"] >= bar))
    return bars


def storage(args) -> dict:
    """bfloat16 and float16 beside float32, as glax chooses, in one run."""
    results = []
    for problem in PROBLEMS:
        for mode in MODES:
            runs = {}
            for dtype in ("float32", "bfloat16", "float16"):
                operands = dataclasses.replace(problem, dtype=dtype).operands()
                run = compiled(in_mode(by_glax(problem), mode), *operands)
                runs[dtype] = lambda run=run, operands=operands: run(*operands)
            times = interleaved(runs, repeats=args.repeats, seconds=args.seconds, warm=True)
            results.append({"": f"{problem} {mode}"} | {f"{dtype}, ms": t.median for dtype, t in times.items()})
    print(f"\n{table(results)}\n")
    return dict(results=results)


def storage_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    ratios = [(r[""], r["bfloat16, ms"] / r["float32, ms"]) for r in found["results"]]
    return [(f"{title}: bfloat16's time over float32's", ratio, "<= 1.0", ratio <= 1) for title, ratio in ratios]


def scaling(args) -> dict:
    """Time per token and the memory of one gradient, at B1 H8 K=V=64 gk, for T in powers of two.

    Measures each entry of WAYS in a separate process, and the memory of each length too: the peak that a process reports starts
    at its parent's.
    """
    lengths, micros = lengths_of(args), {}
    for way, (choice, environment) in WAYS.items():
        found = json.loads(of_child(environment, "--micros", choice, *["--quick"] * args.quick))
        micros |= {f"{way}: {mode}": found[mode] for mode in MODES}
    peaks = [float(of_child({}, "--peak", str(T))) for T in lengths]
    titles = ("T", *(f"{title}, us/token" for title in micros), "peak GiB")
    rows = [dict(zip(titles, row, strict=True)) for row in zip(lengths, *micros.values(), peaks, strict=True)]
    print(f"\n{Problem(1, lengths[0], 8, 64, 'gk')}, other T\n{table(rows)}\n")
    found = dict(lengths=lengths, micros=micros, peaks=peaks)
    OUT.mkdir(exist_ok=True)
    (OUT / "scaling.json").write_text(json.dumps(found, indent=2))
    plot(found, OUT / "scaling.png")
    for title, x in spreads(found, of_sum=True).items():
        print(f"{title}: {x:.2f}")
    print(f"Wrote {OUT / 'scaling.json'} and {OUT / 'scaling.png'}\n")
    return found


def lengths_of(args) -> list[int]:
    return [1024 * 2**i for i in range(5 if args.quick else 7)]


def micros_per_token(args) -> dict[str, list[float]]:
    """Microseconds a token in each mode, for each T of `scaling`."""
    problems = [Problem(1, T, 8, 64, "gk") for T in lengths_of(args)]
    operands, micros = [p.operands() for p in problems], {}
    for mode in MODES:
        runs = [
            compiled(in_mode(added_up if args.micros == SUM else by_glax(p, platform=args.micros), mode), *x)
            for p, x in zip(problems, operands, strict=True)
        ]
        cases = {p.T: lambda run=run, x=x: run(*x) for p, run, x in zip(problems, runs, operands, strict=True)}
        times = interleaved(cases, repeats=args.repeats, seconds=args.seconds, warm=True)
        micros[mode] = [1e3 * times[p.T].median / p.T for p in problems]
    return micros


def of_child(environment: dict[str, str], *arguments: str) -> str:
    """Run this script in a separate process and return its output."""
    child = [sys.executable, __file__, *arguments]
    return subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment).stdout


def peak_gib_of_gradient(T: int) -> float:
    """Return the peak memory of this process, inputs and compiler included, after one forward and gradient."""
    problem = Problem(1, T, 8, 64, "gk")
    operands = problem.operands()
    jax.block_until_ready(compiled(in_mode(by_glax(problem), MODES[1]), *operands)(*operands))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def plot(found: dict, path: Path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for mode, times in zip(MODES, axes[:2], strict=True):
        for way in WAYS:
            times.plot(found["lengths"], found["micros"][f"{way}: {mode}"], "o-", label=way)
        times.set(title=mode, xlabel="T", ylabel="microseconds a token", yscale="log")
        times.set_yticks([1, 10], labels=["1", "10"])
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower left", ncols=len(WAYS))
    memory = axes[2]
    memory.plot(found["lengths"], found["peaks"], "o-")
    memory.axhline(MEMORY_BAR, color="grey", linestyle="--", label="bar")
    memory.set(title=MODES[1], xlabel="T", ylabel="peak memory of the process, GiB", ylim=(0, None))
    memory.legend()
    for part in axes:
        part.set_xscale("log", base=2)
    figure.savefig(path, dpi=120)


def spreads(found: dict, of_sum: bool) -> dict[str, float]:
    """The slowest time per token over the fastest, of the ways that are a sum or of the others."""
    ways = [way for way, (choice, _) in WAYS.items() if (choice == SUM) == of_sum]
    times = {f"{way}: {mode}": found["micros"][f"{way}: {mode}"] for way in ways for mode in MODES}
    return {f"{title}: slowest time per token over fastest": max(x) / min(x) for title, x in times.items()}


def scaling_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    bars = [(title, x, f"<= {SCALING_BAR}", x <= SCALING_BAR) for title, x in spreads(found, of_sum=False).items()]
    T, peak = found["lengths"][-1], found["peaks"][-1]
    return [*bars, (f"peak memory of a gradient at T={T}, GiB", peak, f"< {MEMORY_BAR}", peak < MEMORY_BAR)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtypes", action="store_true")
    parser.add_argument("--delta", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--micros", metavar="PLATFORM", help="print, as JSON, what --scaling measures in one process")
    parser.add_argument("--peak", type=int, metavar="T", help="print this process's peak GiB after a gradient at T")
    args = parser.parse_args()
    if args.peak:
        print(peak_gib_of_gradient(args.peak))
        return
    args.repeats, args.seconds = (5, 2.0) if args.quick else (25, 8.0)
    if args.micros:
        print(json.dumps(micros_per_token(args)))
        return
    print(f"JAX {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}")
    parts = dict(
        baselines=(not (args.scaling or args.compile or args.dtypes or args.delta), against_baselines, baseline_bars),
        dtypes=(args.dtypes, storage, storage_bars),
        delta=(args.delta, delta_rule.measure, delta_rule.bars),
        scaling=(args.scaling, scaling, scaling_bars),
        compile=(args.compile, compiling, compile_bars),
    )
    measured, bars = dict(jax=jax.__version__, python=platform.python_version(), cpus=os.cpu_count()), []
    for part, (selected, run, judge) in parts.items():
        if selected:
            measured[part] = run(args)
            bars += judge(measured[part])
    measured["bars"] = [dict(bar=what, measured=x, wanted=wanted, met=met) for what, x, wanted, met in bars]
    print(table([{**bar, "met": "pass" if bar["met"] else "MISS"} for bar in measured["bars"]]))
    print(f"{sum(met for *_, met in bars)} of {len(bars)} bars met")
    if args.json:
        args.json.write_text(json.dumps(measured, indent=2))
    compared = [measured.get(part, {}).get("results", []) for part in ("baselines", "delta")]
    wrong = [r for results in compared for r in results if not r["right"]]
    for r in wrong:
        print(f"WRONG: {r['title']}: results differ by more than {CLOSE[r['mode']]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
