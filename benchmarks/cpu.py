"""Measure on a CPU what is no time of a call: growth with T, compile times, and the overhead of glax over its kernels.

    python benchmarks/cpu.py scaling             time per token and peak memory as sequences grow, and benchmarks/out/scaling.png
    python benchmarks/cpu.py scaling --delta     the same of the gated delta rule
    python benchmarks/cpu.py compile             compile time of the gradient of every public function
    python benchmarks/cpu.py overhead            of an eager call and of a traced one over their kernels alone, and of the import

--quick: fewer repeats, and shorter sequences; --json FILE: everything measured. `run.py cpu` measures calls.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
import jax.numpy as jnp
from calls import Call
from meters import interleaved
from output import table, write
from peers import SUBJECTS
from run import MODES, cotangent
from suites import Bar

import glax
from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import Choice, resolve, run_forward
from glax.cli.measure import Way, timing

OUT = Path(__file__).parent / "out"
# Settings of glibc's malloc: freed memory stays with the process (docs/troubleshooting.md).
KEEP_FREED = dict(
    MALLOC_MMAP_THRESHOLD_=str(2**32),
    MALLOC_TRIM_THRESHOLD_=str(2**33),
    MALLOC_TOP_PAD_=str(2**28),
    MALLOC_ARENA_MAX="1",
)
WAYS = {  # subject, environment
    "as glax chooses": ("glax", {}),
    "freed memory retained": ("glax", KEEP_FREED),
    "XLA": ("xla", {}),
    "operands added up": ("sum", {}),
    "operands added up, freed memory retained": ("sum", KEEP_FREED),
}
SCALING_BAR, MEMORY_BAR, COMPILE_BAR = 1.25, 3.0, 5.0  # slowest / fastest time per token; GiB; seconds
EAGER_BAR, TRACED_BAR, IMPORT_BAR = 60.0, 3.0, 150.0  # microseconds, milliseconds, milliseconds


# ---- growth with T ----


def growing(args) -> list[Call]:
    return [
        Call(1, 1024 * 2**i, 8, 8, 64, 64, "head" if args.delta else "key", "float32", args.delta)
        for i in range(args.lengths)
    ]


def scaling(args) -> tuple[dict, list[Bar]]:
    """Measure each entry of WAYS in a separate process, and the memory of each length too: the peak of a process never falls."""
    calls, ways = growing(args), {name: x for name, x in WAYS.items() if not (args.delta and x[0] == "sum")}
    micros, spent = {}, {}
    for name, (subject, environment) in ways.items():
        found = json.loads(of_child(args, environment, "--micros", subject))
        micros |= {f"{name}: {mode}": x["wall"] for mode, x in found.items()}
        spent |= {f"{name}: {mode}": x["processor"] for mode, x in found.items()}
    peaks = [json.loads(of_child(args, {}, "--peak", str(i))) for i in range(len(calls))]
    columns = {"T": [call.T for call in calls]} | {f"{name}, us/token": x for name, x in micros.items()}
    columns |= {f"{name}, processor us/token": x for name, x in spent.items() if name.startswith("as glax")}
    columns |= {name: [x[name] for x in peaks] for name in peaks[0]}
    print(table([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]))
    OUT.mkdir(exist_ok=True)
    plot(columns["T"], micros, [x["peak GiB"] for x in peaks], OUT / "scaling.png")
    print(f"Wrote {OUT / 'scaling.png'}")
    spreads = {name: max(x) / min(x) for name, x in micros.items()}
    bars = [
        Bar(f"{name}: slowest time per token over fastest", x, SCALING_BAR)
        for name, x in spreads.items()
        if "added up" not in name
    ]
    T, peak = calls[-1].T, peaks[-1]["peak GiB"]
    return columns | dict(spreads=spreads), [*bars, Bar(f"peak memory of a gradient at T={T}, GiB", peak, MEMORY_BAR)]


def of_child(args, environment: dict[str, str], *arguments: str) -> str:
    """Run this script in a separate process and return its output."""
    options = [name for name in ("--quick", "--delta") if getattr(args, name[2:])]
    child = [sys.executable, __file__, "scaling", *arguments, *options, "--lengths", str(args.lengths)]
    return subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment).stdout


def ways_of(calls: list[Call], subject: str, mode: str) -> list[Way]:
    return [SUBJECTS[subject](x, mode, (a := x.arrays()), cotangent(x, a)) for x in calls]


def micros_per_token(args) -> dict[str, dict[str, list[float]]]:
    """Microseconds a token by the clock and of all processors, in each mode, for each T."""
    calls, found = growing(args), {}
    for mode, name in MODES.items():
        ways = ways_of(calls, args.micros, mode)
        times = interleaved(ways, 5 if args.quick else 25, 2.0 if args.quick else 8.0)
        wall = [1e3 * t.median / call.T for t, call in zip(times, calls, strict=True)]
        spent = [1e6 * processor_seconds(way) / call.T for way, call in zip(ways, calls, strict=True)]
        found[name] = dict(wall=wall, processor=spent)
    return found


def processor_seconds(way: Way) -> float:
    spent = []
    for _ in range(7):
        began = time.process_time()
        way.wait(way.run())
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def peaks_of_gradient(args) -> dict[str, float]:
    """Return the peak of this process, inputs and compiler included, after one forward and gradient, and what these add to it."""
    (way,) = ways_of([growing(args)[args.peak]], "glax", "train")
    program = way.run.func.lower(*way.run.args).compile()
    compiling, anew = peak_gib(), Path("/proc/self/clear_refs")
    if anew.exists():
        anew.write_text("5")  # the peak begins anew
    before = peak_gib()
    results = jax.block_until_ready(program(*way.run.args))
    peak, size = peak_gib(), sum(x.nbytes for x in jax.tree.leaves(results))
    return {
        "peak GiB": max(peak, compiling),
        "a call adds, MiB": 1024 * (peak - before),
        "its results, MiB": size / 2**20,
    }


def peak_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def plot(lengths: list[int], micros: dict[str, list[float]], peaks: list[float], path: Path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for mode, times in zip(MODES.values(), axes[:2], strict=True):
        for name in (name for name in micros if name.endswith(f": {mode}")):
            times.plot(lengths, micros[name], "o-", label=name.removesuffix(f": {mode}"))
        times.set(title=mode, xlabel="T", ylabel="microseconds a token", yscale="log")
        times.set_yticks([1, 10], labels=["1", "10"])
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower left", ncols=len(WAYS))
    memory = axes[2]
    memory.plot(lengths, peaks, "o-")
    memory.axhline(MEMORY_BAR, color="grey", linestyle="--", label="bar")
    memory.set(title="with gradient", xlabel="T", ylabel="peak memory of the process, GiB", ylim=(0, None))
    memory.legend()
    for part in axes:
        part.set_xscale("log", base=2)
    figure.savefig(path, dpi=120)


# ---- compile times ----


def variants(T: int = 2048, H: int = 4, D: int = 64) -> dict:
    """Every public function and form of decay: (f(q, k, v, gates), gates)."""
    per_head, per_channel = -jnp.ones((1, T, H)), -jnp.ones((1, T, H, D))
    cuts = jnp.array([0, T // 7, T // 2, T // 2 + 1, T], jnp.int32)
    forms = dict(
        none={},
        constant=dict(g_gamma=-jnp.ones(H)),
        head=dict(g=per_head),
        key=dict(gk=per_channel),
        value=dict(gv=per_channel),
        **{"key+value": dict(gk=per_channel, gv=per_channel)},
    )

    def recurrent(q, k, v, gates, **options):
        return glax.recurrent(q, k, v, **gates, **options)

    return {
        **{f"recurrent, decay: {name}": (recurrent, gates) for name, gates in forms.items()},
        "recurrent, packed": (lambda *x: recurrent(*x, cu_seqlens=cuts), forms["key"]),
        "recurrent, reverse": (lambda *x: recurrent(*x, reverse=True), forms["key"]),
        "recurrent_gla": (glax.recurrent_gla, per_channel),
        "simple_gla": (glax.simple_gla, per_head),
        "retention": (lambda q, k, v, _: glax.retention(q, k, v), ()),
        "lightning_attention": (lambda q, k, v, _: glax.lightning_attention(q, k, v, 3, 12), ()),
    }


def compiling(args) -> tuple[dict, list[Bar]]:
    """Seconds to trace and compile the gradient of each variant, at B1 T2048 H4 K=V=64.

    The first variant is compiled twice, because the first compilation loads kernels and starts XLA.
    """
    x, seconds = jnp.ones((1, 2048, 4, 64)), {}
    for i, (name, (f, gates)) in enumerate(variants().items()):

        def loss(q, k, v, gates, f=f):
            return f(q, k, v, gates).output.sum()

        for _ in range(2 if i == 0 else 1):
            jax.clear_caches()
            begin = time.perf_counter()
            jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x, x, x, gates).compile()
            seconds[name] = time.perf_counter() - begin
    print(table([{"gradient of": name, "seconds to compile": x} for name, x in seconds.items()]))
    slowest = max(seconds, key=seconds.__getitem__)
    return seconds, [Bar(f"slowest to compile of {len(seconds)}: {slowest}, s", seconds[slowest], COMPILE_BAR)]


# ---- overhead over the kernels ----


def eager() -> float:
    """Return the overhead of a warm call in microseconds. The arrays are tiny, so that the call dominates."""
    q = jnp.ones((1, 1, 1, 4))
    gk = -q
    r = bind(q, q, q, gk=gk)
    kernel = jax.jit(functools.partial(run_forward, resolve(Choice(), r)))

    def median_us(f) -> float:
        return 1e3 * timing([batch(f) for _ in range(3)]).median

    def batch(f, calls: int = 200) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = f()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / calls

    pairs = []
    for _ in range(15):
        direct = median_us(lambda: kernel(r).output)
        pairs.append(median_us(lambda: glax.recurrent_attention(q, q, q, gk=gk)) - direct)
    return statistics.median(pairs)


def traced() -> float:
    """Return the overhead of tracing a call in milliseconds. Each call has its own shape, so that no trace is cached."""
    shapes = [jax.ShapeDtypeStruct((1, 8 + i, 2, 16), jnp.float32) for i in range(8)]
    recurrences = [jax.eval_shape(lambda q: bind(q, q, q, gk=q), shape) for shape in shapes]
    specs = [kernel_registry.find(r) for r in recurrences]

    def kernels_alone(*rs):
        return [spec.run(r, config=spec.config.heuristic(r)).output for spec, r in zip(specs, rs, strict=True)]

    def calls(*qs):
        return [glax.recurrent_attention(q, q, q, gk=q) for q in qs]

    def once(f, operands) -> float:
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(f)(*operands)
        return 1e3 * (time.perf_counter() - start)

    pairs = [once(calls, shapes) - once(kernels_alone, recurrences) for _ in range(10)][1:]
    return statistics.median(pairs) / len(shapes)


def imported() -> float:
    code = "import time, jax, jax.numpy, numpy; s = time.perf_counter(); import glax; print(time.perf_counter() - s)"
    command = [sys.executable, "-c", code]
    return 1e3 * statistics.median(float(subprocess.check_output(command)) for _ in range(5))


def overhead(args) -> tuple[dict, list[Bar]]:
    load_kernels()
    bars = [
        Bar("eager call, us", eager(), EAGER_BAR),
        Bar("traced call, ms", traced(), TRACED_BAR),
        Bar("import glax, ms", imported(), IMPORT_BAR),
    ]
    return {bar.what: bar.value for bar in bars}, bars


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scaling", "compile", "overhead"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--delta", action="store_true", help="with scaling")
    parser.add_argument("--lengths", type=int, metavar="N", help="with scaling: 1024, 2048, ..., N of them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--micros", metavar="SUBJECT", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=int, metavar="I", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lengths = args.lengths or (5 if args.quick else 7)
    if args.micros or args.peak is not None:
        print(json.dumps(micros_per_token(args) if args.micros else peaks_of_gradient(args)))
        return
    measured, bars = dict(scaling=scaling, compile=compiling, overhead=overhead)[args.what](args)
    print(table([bar.row() for bar in bars]))
    if args.json:
        write(args.json, [dict(what=name, value=value) for name, value in measured.items()])


if __name__ == "__main__":
    main()
