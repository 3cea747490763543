"""Sequence parallelism on the devices of one host: forward and gradient of one long sequence on 1, 2, 4, ... devices.

    python benchmarks/parallel.py                       # B1 T131072 H16 K=V=128 bfloat16, per-key gates
    python benchmarks/parallel.py --gates retention     # decays that never underflow
    python benchmarks/parallel.py --ways correct wait   # two choices of `overlap_of` in glax/_src/parallel/sequence.py

gates: log-sigmoid and mild (a sixteenth of log-sigmoid) are per key, head is mild per head, retention is constant per head, and
none has no decay. Each line states a number of devices, the time and the speed-up over one device with the same kernels, for
consecutive calls and for calls waited for one by one, to which the host adds its own time, and the errors of output and gradients
against one device. Stages and their seconds go to stderr. Gates of one form are compiled once for each number of devices.
--json FILE writes the lines in the form of results/README.md.
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from output import table, write

import glax
from glax import parallel
from glax._src.parallel import sequence

ROW = 20
NAMED = {
    "log-sigmoid": "per key, log-sigmoid",
    "mild": "per key, mild",
    "head": "per head, mild",
    "retention": "constant",
    "none": "none",
}


@contextlib.contextmanager
def stage(name: str):
    """Prints the name of a stage to stderr, and its seconds once it has ended."""
    print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
    began = time.perf_counter()
    yield
    print(f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


@jax.jit(static_argnums=range(4))
def tensors(T: int, heads: int, width: int, dtype: str) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the arguments of `recurrent` beside gates, and the output's cotangent."""
    *qkv, weight = (jax.random.normal(jax.random.key(i), (1, T, heads, width), dtype) for i in range(4))
    return dict(zip(("query", "key", "value"), qkv, strict=True)), weight


@jax.jit(static_argnums=(0, 1))
def logs(shape: tuple[int, ...], dtype: str, divisor: float) -> jax.Array:
    return (jax.nn.log_sigmoid(jax.random.normal(jax.random.key(4), shape)) / divisor).astype(dtype)


def gate(gates: str, T: int, heads: int, width: int, dtype: str) -> dict[str, jax.Array]:
    match gates:
        case "log-sigmoid":
            return dict(gk=logs((1, T, heads, width), dtype, 1.0))
        case "mild":
            return dict(gk=logs((1, T, heads, width), dtype, 16.0))
        case "head":
            return dict(g=logs((1, T, heads), dtype, 16.0))
        case "retention":
            return dict(g_gamma=jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(heads))))
        case "none":
            return {}


def forward_and_gradient(f, given, weight):
    output, pull = jax.vjp(lambda given: f(**given).output, given)
    # In training the cotangent depends on the output, so no part of the gradient may run before it.
    output, weight = jax.lax.optimization_barrier((output, weight))
    return output, pull(weight)[0]


def compiled(mesh, way: str, platform: str | None, given, weight):
    """way: "alone" for one device, "rule" for the choice of `overlap_of`, or one of its results."""
    spread = functools.partial(parallel.recurrent, mesh=mesh, sequence_axis="sequence")
    f = glax.recurrent if way == "alone" else spread
    run = jax.jit(functools.partial(forward_and_gradient, functools.partial(f, platform=platform)))
    if way in ("alone", "rule"):
        return traced_and_compiled(run, given, weight)
    rule, sequence.overlap_of = sequence.overlap_of, lambda *_, **__: way
    try:
        jax.clear_caches()  # programs traced with the rule
        return traced_and_compiled(run, given, weight)
    finally:
        sequence.overlap_of = rule
        jax.clear_caches()


def traced_and_compiled(run, *arguments):
    with stage("  tracing and lowering"):  # Triton compiles here
        lowered = run.lower(*arguments)
    with stage("  compiling"):
        return lowered.compile()


def timed(run, arguments, repeats: int) -> tuple[float, float, tuple]:
    """Returns the median seconds of a call among ROW consecutive calls, of a call waited for alone, and its result."""
    with stage("  the first call"):
        result = jax.block_until_ready(run(*arguments))

    def seconds(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = run(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls

    medians = []
    for calls in (ROW, 1):
        seconds(calls)  # allocates memory for all results in flight
        medians.append(statistics.median(seconds(calls) for _ in range(repeats)))
    return *medians, result


@jax.jit
def errors(got, want):
    """The relative RMS difference of every array, on the devices where they lie."""

    def error(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.sqrt(((x - y) ** 2).sum() / (y**2).sum())

    return jax.tree.map(error, got, want)


def shardings(mesh, arrays):
    """A NamedSharding for each array of a tree: T over "sequence", and gates of heads alone replicated."""
    return jax.tree.map(lambda x: NamedSharding(mesh, P() if x.ndim == 1 else P(None, "sequence")), arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--T", 131072), ("--heads", 16), ("--width", 128), ("--repeats", 10)):
        parser.add_argument(flag, type=int, default=default, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--gates", nargs="+", default=[*NAMED][:2], choices=NAMED, help="default: the first two")
    parser.add_argument("--ways", nargs="+", default=["rule"], choices=["rule", "correct", "wait"])
    parser.add_argument("--platform", help="of the kernels, on one device and on several alike; default: glax's choice")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    began = time.perf_counter()
    with stage("devices"):
        jax.devices()
    ways = [(1, "alone"), *((n, way) for n in (2, 4, 8) if n <= jax.device_count() for way in arguments.ways)]
    shape = arguments.T, arguments.heads, arguments.width, arguments.dtype
    with stage("query, key, value and the cotangent"):
        qkv, weight = jax.block_until_ready(tensors(*shape))
    problem = f"1,{arguments.T},{arguments.heads},{arguments.width},{arguments.width}"
    runs, lines = {}, []  # gates of one form share what is compiled
    for gates in arguments.gates:
        with stage(f"{gates}: gates"):
            given = qkv | jax.block_until_ready(gate(gates, *shape)), weight
        reference = alone = alone_waited = None
        for n, way in ways:
            if way == "correct" and gates in ("retention", "none"):
                continue  # not supported for constant decays and for none
            mesh = jax.make_mesh((n,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:n])
            with stage(f"{gates}: {n} devices, {way}: arrays to their places"):
                operands = jax.block_until_ready(jax.device_put(given, shardings(mesh, given)))
            form = n, way, str(jax.tree.map(jax.typeof, given))
            runs[form] = runs[form] if form in runs else compiled(mesh, way, arguments.platform, *operands)
            seconds, waited, result = timed(runs[form], operands, arguments.repeats)
            reference, alone = reference or result, alone or seconds
            with stage("  errors"):
                off = errors(result, jax.device_put(reference, shardings(mesh, reference)))
                output_off, gradient_off = float(off[0]), max(map(float, jax.tree.leaves(off[1])))
            del result
            alone_waited = alone_waited or waited
            line = dict(
                problem=problem, gate=NAMED[gates], mode="with gradient", devices=n, implementation="glax", note=way
            )
            line |= dict(ms=round(1e3 * seconds, 4), speedup=round(alone / seconds, 3))
            line |= dict(ms_waited=round(1e3 * waited, 4), speedup_waited=round(alone_waited / waited, 3))
            lines.append(line | dict(output_error=output_off, gradient_error=gradient_off))
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))
    if arguments.json:
        write(arguments.json, lines)
    print(f"all in {time.perf_counter() - began:.0f} s, compiling included")


if __name__ == "__main__":
    main()
