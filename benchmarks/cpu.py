"""How fast glax is on this machine's CPU, beside what one writes in plain JAX (peers.py).

    python benchmarks/cpu.py               forward and gradient against the baselines
    python benchmarks/cpu.py --scaling     time per token and peak memory as sequences grow
    python benchmarks/cpu.py --compile     compile time of the gradient of every public function

Options: --quick, fewer repeats and, with --scaling, shorter sequences; --json FILE, everything measured.
The exit code is 1 only if results disagree; a bar that is missed is printed and no more.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
import jax.numpy as jnp
import numpy as np
from peers import BASELINES
from timing import available_bytes, compiled, copy_gbytes, interleaved, matmul_gflops, milliseconds, table

import glax
from glax.bind import bind
from glax.kernels import load_kernels
from glax.registry import KernelSpec, kernel_registry

OUT = Path(__file__).parent / "out"
FORWARD_BAR, TRAINING_BAR = 1.0, 1.8  # how many times as fast as the best baseline
SCALING_BAR, MEMORY_BAR, COMPILE_BAR = 1.25, 3.0, 5.0  # slowest / fastest time per token, GiB, seconds
CLOSE = {"forward": 2e-5, "training": 1e-4}  # both sides are float32 here: twice the bars against a float64 reference


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: float32, log-sigmoid gates, as many heads everywhere; `gate` is "gk", per channel, or "g", per head."""

    B: int
    T: int
    H: int
    width: int
    gate: str

    def __str__(self):
        return f"B{self.B} T{self.T} H{self.H} K=V={self.width} {self.gate}"

    def operands(self) -> list[jax.Array]:
        """query, key, value, gate, and the cotangent of the output."""
        rng = np.random.default_rng(0)
        wide = (self.B, self.T, self.H, self.width)
        arrays = [rng.standard_normal(wide, np.float32) for _ in range(4)]
        gates = rng.standard_normal(wide if self.gate == "gk" else wide[:3], np.float32)
        q, k, v, do, gates = map(jnp.asarray, (*arrays, gates))
        return [q, k, v, jax.nn.log_sigmoid(gates), do]

    def flops(self, mode: str, chunk: int) -> float:
        """Operations in matrix products, with states K x V and C = chunk, 0 if a kernel goes token by token:

            forward     B T H (4 K V + 2 C (K + V))        (q S, k^T v; pairs q k^T, pairs v)
            training    B T H (16 K V + 2 C (5 K + 4 V))   and the gradient's: the states again; dq, dk, dv and dS from
                                                           states; pairs, d_pairs; dq, dk, dv from pairs

        Masked halves of the pairs are counted, since they are computed; exponentials and elementwise work are not.
        """
        K = V = self.width
        each = 4 * K * V + 2 * chunk * (K + V) if mode == "forward" else 16 * K * V + 2 * chunk * (5 * K + 4 * V)
        return self.B * self.T * self.H * each

    def bytes(self, mode: str) -> float:
        """What must move if every input is read once, and every output written once, in each of forward and gradient:

        forward reads q, k, v, gate and writes o; the gradient reads those four and do, and writes four gradients.
        """
        per_token = self.B * self.T * self.H * 4
        gates = self.width if self.gate == "gk" else 1
        forward = per_token * (4 * self.width + gates)
        return forward if mode == "forward" else forward + per_token * (7 * self.width + 2 * gates)


SHAPES = [dict(B=1, T=2048, H=4, width=64), dict(B=2, T=4096, H=8, width=128)]
PROBLEMS = [Problem(**shape, gate=gate) for shape in SHAPES for gate in ("gk", "g")]


def by_glax(problem: Problem, **insist):
    """f(q, k, v, gate) -> output."""
    return lambda q, k, v, gate: glax.recurrent(q, k, v, **{problem.gate: gate}, **insist).output


def kernels(problem: Problem, operands) -> dict[str, tuple[KernelSpec, object]]:
    """Every kernel whose forward runs here, with the config that it guesses."""
    load_kernels()
    q, k, v, gate, _ = operands
    r = bind(q, k, v, **{problem.gate: gate})
    specs = [s for s in kernel_registry.kernels.values() if not s.algorithm.endswith(".vjp") and s.refusal(r, None) is None]
    return {f"glax {s.algorithm} {s.platform}": (s, s.config.heuristic(r)) for s in specs}


def chosen(problem: Problem, operands) -> tuple[str, int]:
    """What glax takes by itself: the kernel's name and its chunk, 0 if it has none."""
    able = kernels(problem, operands)
    q, k, v, gate, _ = operands
    r = bind(q, k, v, **{problem.gate: gate})
    name = max(able, key=lambda name: able[name][0].priority(r))
    return name, getattr(able[name][1], "chunk", 0)


def in_mode(f, mode: str):
    """f itself, its cotangent ignored; or <f, do> and its gradient in q, k, v and the gate."""
    if mode == "forward":
        return lambda q, k, v, gate, do: f(q, k, v, gate)
    loss = lambda q, k, v, gate, do: jnp.vdot(f(q, k, v, gate), do)  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def relative_error(x, y) -> float:
    """The largest relative RMS error of x's arrays against y's; of the forward, or of the four gradients."""
    x, y = (jax.tree.leaves(z[1] if isinstance(z, tuple) else z) for z in (x, y))
    return max(float(jnp.sqrt(jnp.square(a - b).sum() / jnp.square(b).sum())) for a, b in zip(x, y, strict=True))


def measure(problem: Problem, mode: str, args) -> dict:
    """Every way to compute the problem: compiled, compared with the first baseline that fits in memory, then timed."""
    operands = problem.operands()
    ways = BASELINES | {"glax": by_glax(problem)}
    for name, (spec, config) in kernels(problem, operands).items():
        ways[name] = by_glax(problem, platform=str(spec.platform), cfg=config)
    runs, errors, notes, want = {}, {}, [], None
    for name, f in ways.items():
        run = compiled(in_mode(f, mode), *operands)
        needs, there = run.memory_analysis().temp_size_in_bytes, available_bytes()
        if there is not None and needs > 0.8 * there:
            notes.append(f"{name} left out: it needs {needs / 2**30:.1f} GiB, {there / 2**30:.1f} GiB are available")
            continue
        got = run(*operands)
        want = got if want is None else want
        runs[name], errors[name] = run, relative_error(got, want)
        del got
    want = None
    times = interleaved(runs, *operands, repeats=args.repeats, seconds=args.seconds)
    memory = {name: run.memory_analysis().temp_size_in_bytes for name, run in runs.items()}
    best = min((name for name in times if name in BASELINES), key=lambda name: times[name].median)
    kernel, chunk = chosen(problem, operands)
    return dict(
        problem=str(problem),
        mode=mode,
        chosen=kernel,
        best=best,
        speedup=times[best].median / times["glax"].median,
        gflops=problem.flops(mode, chunk) / times["glax"].median / 1e6,
        gbytes=problem.bytes(mode) / times["glax"].median / 1e6,
        right=all(error <= CLOSE[mode] for error in errors.values()),
        notes=notes,
        ways={n: dataclasses.asdict(t) | dict(error=errors[n], temp_bytes=memory[n]) for n, t in times.items()},
        shown={name: str(t) for name, t in times.items()},
    )


def against_baselines(args) -> dict:
    machine = dict(matmul_gflops=matmul_gflops(), copy_gbytes=copy_gbytes())
    print(f"\nThis machine: {machine['matmul_gflops']:.0f} GFLOP/s in a float32 product of 2048 x 2048,", end=" ")
    print(f"{machine['copy_gbytes']:.1f} GB/s in a copy\n")
    results = []
    for problem in PROBLEMS:
        for mode in ("forward", "training"):
            result = measure(problem, mode, args)
            results.append(result)
            rate = ", ".join((f"{result['gflops']:.1f} GFLOP/s", f"{result['gbytes']:.2f} GB/s"))
            print(f"{problem}, {'forward' if mode == 'forward' else 'forward + backward'}; glax took {result['chosen']}: {rate}")
            base = result["ways"][result["best"]]["median"]
            rows = [
                {
                    "": name,
                    "ms: median (p20-p80)": result["shown"][name],
                    "of the best baseline": way["median"] / base,
                    "rel. error": float(way["error"]),
                    "temporary MiB": round(way["temp_bytes"] / 2**20),
                }
                for name, way in result["ways"].items()
            ]
            print(table(rows), *result["notes"], "", sep="\n", flush=True)
    return dict(machine=machine, results=results)


def baseline_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    bars = []
    for r in found["results"]:
        bar = FORWARD_BAR if r["mode"] == "forward" else TRAINING_BAR
        what = f"{r['problem']} {'forward' if r['mode'] == 'forward' else 'forward + backward'}: speed, of the best baseline's"
        bars.append((what, r["speedup"], f">= {bar}", r["speedup"] >= bar))
    return bars


def scaling(args) -> dict:
    """Time per token and the memory of one gradient, at B1 H8 K=V=64 gk, for T in powers of two.

    Memory first, each length in a process of its own: what a process reports as its peak starts at its parent's.
    """
    lengths = [1024 * 2**i for i in range(5 if args.quick else 7)]
    problems = [Problem(1, T, 8, 64, "gk") for T in lengths]
    memory = [peak_gib_of_child(T) for T in lengths]
    times = {}
    for mode in ("forward", "training"):
        operands = [p.operands() for p in problems]
        runs = [compiled(in_mode(by_glax(p), mode), *x) for p, x in zip(problems, operands, strict=True)]
        cases = {T: lambda run=run, x=x: run(*x) for T, run, x in zip(lengths, runs, operands, strict=True)}
        times[mode] = interleaved(cases, repeats=args.repeats, seconds=args.seconds)
    results = [
        dict(
            T=T,
            forward_us=1e3 * times["forward"][T].median / T,
            training_us=1e3 * times["training"][T].median / T,
            peak_gib=gib,
        )
        for T, gib in zip(lengths, memory, strict=True)
    ]
    titles = dict(T="T", forward_us="forward us/token", training_us="forward + backward us/token", peak_gib="peak GiB")
    print(f"\nB1 H8 K=V=64 gk\n{table([{titles[n]: x for n, x in row.items()} for row in results])}\n")
    OUT.mkdir(exist_ok=True)
    (OUT / "scaling.json").write_text(json.dumps(results, indent=2))
    plot(results, OUT / "scaling.png")
    print(f"Wrote {OUT / 'scaling.json'} and {OUT / 'scaling.png'}")
    return dict(results=results)


def peak_gib_of_child(T: int) -> float:
    child = [sys.executable, __file__, "--peak", str(T)]
    return float(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout)


def peak_gib_of_gradient(T: int) -> float:
    problem = Problem(1, T, 8, 64, "gk")
    operands = problem.operands()
    jax.block_until_ready(compiled(in_mode(by_glax(problem), "training"), *operands)(*operands))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def plot(results: list[dict], path: Path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    T = [row["T"] for row in results]
    left.plot(T, [row["forward_us"] for row in results], "o-", label="forward")
    left.plot(T, [row["training_us"] for row in results], "o-", label="forward + backward")
    left.set(xscale="log", ylim=(0, None), xlabel="T", ylabel="microseconds a token")
    left.legend()
    right.plot(T, [row["peak_gib"] for row in results], "o-")
    right.axhline(MEMORY_BAR, color="grey", linestyle="--")
    right.set(xscale="log", ylim=(0, None), xlabel="T", ylabel="peak memory of a gradient, GiB")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    figure.savefig(path, dpi=120)


def scaling_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    rows, bars = found["results"], []
    for name, title in (("forward_us", "forward"), ("training_us", "forward + backward")):
        spread = max(row[name] for row in rows) / min(row[name] for row in rows)
        bars.append((f"{title}: slowest time per token over fastest", spread, f"<= {SCALING_BAR}", spread <= SCALING_BAR))
    last = rows[-1]
    bars.append((f"peak memory at T={last['T']}, GiB", last["peak_gib"], f"< {MEMORY_BAR}", last["peak_gib"] < MEMORY_BAR))
    return bars


def variants() -> dict:
    """Every public function and form of decay: (f(q, k, v, *gates), gates)."""
    B, T, H, D = 1, 2048, 4, 64
    per_head, per_channel = -jnp.ones((B, T, H)), -jnp.ones((B, T, H, D))
    cuts = jnp.array([0, 300, 1000, 1001, T], jnp.int32)
    forms = dict(
        none={},
        constant=dict(g_gamma=-jnp.ones(H)),
        head=dict(g=per_head),
        key=dict(gk=per_channel),
        value=dict(gv=per_channel),
        both=dict(gk=per_channel, gv=per_channel),
    )
    recurrent = lambda q, k, v, gates, **options: glax.recurrent(q, k, v, **gates, **options)  # noqa: E731
    return {
        **{f"recurrent, decay: {name}": (recurrent, gates) for name, gates in forms.items()},
        "recurrent, packed": (lambda *x: recurrent(*x, cu_seqlens=cuts), forms["key"]),
        "recurrent, reverse": (lambda *x: recurrent(*x, reverse=True), forms["key"]),
        "recurrent_gla": (glax.recurrent_gla, per_channel),
        "simple_gla": (glax.simple_gla, per_head),
        "retention": (lambda q, k, v, _: glax.retention(q, k, v), ()),
        "lightning_attention": (lambda q, k, v, _: glax.lightning_attention(q, k, v, 3, 12), ()),
    }


def compiling(args) -> dict:
    """Seconds to trace and compile the gradient of each variant, at B1 T2048 H4 K=V=64; the first compiles twice."""
    x = jnp.ones((1, 2048, 4, 64))
    results = []
    for i, (name, (f, gates)) in enumerate(variants().items()):
        for _ in range(2 if i == 0 else 1):  # the first time starts XLA too
            gradient = jax.jit(jax.grad(lambda q, k, v, gates, f=f: f(q, k, v, gates).output.sum(), argnums=(0, 1, 2, 3)))
            begin = time.perf_counter()
            gradient.lower(x, x, x, gates).compile()
            seconds = time.perf_counter() - begin
        results.append({"gradient of": name, "seconds to compile": seconds})
    print(f"\n{table(results)}\n")
    return dict(results=results)


def compile_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    rows = [(row["gradient of"], row["seconds to compile"]) for row in found["results"]]
    return [(f"compile {name}, seconds", seconds, f"<= {COMPILE_BAR}", seconds <= COMPILE_BAR) for name, seconds in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peak", type=int, metavar="T", help="print the peak GiB of this process after one gradient at T")
    args = parser.parse_args()
    if args.peak:
        print(peak_gib_of_gradient(args.peak))
        return
    args.repeats, args.seconds = (5, 2.0) if args.quick else (25, 12.0)
    print(f"JAX {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}")
    measured, bars = dict(jax=jax.__version__, python=platform.python_version(), cpus=os.cpu_count()), []
    parts = dict(
        baselines=(not (args.scaling or args.compile), against_baselines, baseline_bars),
        scaling=(args.scaling, scaling, scaling_bars),
        compile=(args.compile, compiling, compile_bars),
    )
    for part, (asked, run, judge) in parts.items():
        if asked:
            measured[part] = run(args)
            bars += judge(measured[part])
    measured["bars"] = [dict(bar=what, measured=x, wanted=wanted, met=met) for what, x, wanted, met in bars]
    titles = ("bar", "measured", "wanted", "")
    print(table([dict(zip(titles, (b[0], b[1], b[2], "pass" if b[3] else "MISS"), strict=True)) for b in bars]))
    print(f"{sum(b[3] for b in bars)} of {len(bars)} bars met")
    if args.json:
        args.json.write_text(json.dumps(measured, indent=2))
    wrong = [r for r in measured.get("baselines", {}).get("results", []) if not r["right"]]
    for r in wrong:
        print(f"WRONG: {r['problem']} {r['mode']}: results differ by more than {CLOSE[r['mode']]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
