"""Estimate the delta rule of tokamax, of deltanet-tpu and of glax on TPUs, from the code that one compiler makes of them.

    python -m benchmarks.tpu.peers --json FOLDER [--only REGEX]

Needs Python 3.12 with jax 0.11.2, libtpu 0.0.48.1, tokamax 0.0.17 and deltanet-tpu 0.3.0; no TPU. MaxText 0.2.5 has no kernel of
the delta rule to compile: it scans chunks by XLA.

The time of an instruction of the compiled program is the larger of its bundles / clock and its bytes / bandwidth:

bundles: of a Pallas kernel the steps of its grid times the bundles of a step, of another instruction its bundles once.
bytes: the operands and results in HBM, each once.

It leaves out waits for memory inside a kernel, blocks that a kernel reads again, loops of XLA's instructions beyond the first
turn, and what a kernel and a copy do at the same time. Where a library publishes a time, its own call is estimated too: the ratio
of the two times is the error of the estimate.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import glob
import importlib.metadata
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding

from benchmarks.tpu.compile import counted, environment
from benchmarks.tpu.problems import TARGETS, Problem, shapes
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels

GDN = Problem(1, 8192, 32, 128, "head", erases=True, shared=2)
GDN_16 = Problem(1, 8192, 16, 128, "head", erases=True)
KDA = Problem(1, 8192, 32, 128, "key", erases=True)
LIBRARIES = ("glax", "tokamax", "deltanet-tpu")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one library: forward or, if `gradient`, forward and gradient. published: the ms that the library states for it
    on `target`, with operands in `dtype` (of tokamax with the gates' activation and the norms inside); None for a call that is
    compared, in bfloat16 with log gates."""

    library: str
    target: str
    problem: Problem
    gradient: bool
    published: float | None = None

    def __str__(self):
        way = "forward and gradient" if self.gradient else "forward"
        return f"{self.target} {self.problem} {way} {self.library}{' as published' if self.published else ''}"


def calls() -> list[Call]:
    """Return the calls that are compared, and those with a published time."""
    compared = [
        Call(library, target, problem, gradient)
        for target in ("v6e", "v7x")
        for problem in (GDN, KDA)
        for gradient in (False, True)
        for library in LIBRARIES
        if not (library == "tokamax" and problem is GDN)
    ]
    wide = {problem: dataclasses.replace(problem, dtype="float32") for problem in (GDN, GDN_16, KDA)}
    published = [
        Call("tokamax", "v7x", KDA, False, 1.777),
        Call("tokamax", "v7x", KDA, True, 4.593),
        *(
            Call("deltanet-tpu", "v6e", wide[problem], gradient, ms)
            for problem, times in ((GDN, (11.37, 22.52)), (GDN_16, (5.63, 10.93)), (KDA, (11.67, 22.51)))
            for gradient, ms in zip((False, True), times, strict=True)
        ),
    ]
    return [*compared, *published]


# ---- the functions ---------------------------------------------------------------------------------------------------


def function(call: Call, array):
    """Return (function, operands) of a call. array: makes an abstract array of (shape, dtype)."""
    r, d_output, _ = call.problem.operands(array)
    if call.library == "glax":
        return glax_call(r.replace(initial_state=None), d_output, call.gradient)
    f, *operands = tokamax_call(call, array) if call.library == "tokamax" else deltanet_call(call, r)
    if not call.gradient:
        return f, operands
    d_output = operands[2] if call.library == "tokamax" else d_output  # of the shape and dtype of v

    def both(d_output, *operands):
        output, pull = jax.vjp(f, *operands)
        return output, pull(d_output)

    return both, (d_output, *operands)


def glax_call(r, d_output, gradient: bool):
    forward, vjp = (kernel_registry.kernels[f"{name}/pallas/tpu"] for name in ("chunked", "chunked.vjp"))
    run = functools.partial(forward.run, config=forward.config.heuristic(r))

    def both(r, d_output):
        d_final = jnp.zeros(r.state_shape, r.dtype)
        return run(r), vjp.run(r, d_output, d_final, config=vjp.config.heuristic(r))

    return (both, (r, d_output)) if gradient else (run, (r,))


def deltanet_call(call: Call, r):
    import deltanet_tpu

    f = dict(head=deltanet_tpu.chunk_gdn, key=deltanet_tpu.chunk_kda)[call.problem.form]
    f = f if call.gradient else functools.partial(f, is_inference=True)
    return f, r.q, r.k, r.v, r.decay.key if call.problem.form == "key" else r.decay.head, r.erasure.beta


def tokamax_call(call: Call, array):
    """Return (function, *operands). The arrays of tokamax are [H, B, T, K]."""
    from tokamax._src.ops.kda import api

    p, fused = call.problem, call.published is not None
    x, beta = array((p.H, p.B, p.T, p.D), p.dtype), array((p.H, p.B, p.T), p.dtype)
    activation = (array((p.H,), "float32"), array((p.H * p.D,), "float32")) if fused else (None, None)
    options = dict(use_gate_in_kernel=True, lower_bound=-5.0, use_qk_l2norm=True) if fused else {}

    def f(q, k, v, gate, beta, a_log, bias):
        given = dict(a_log=a_log, delta_time_bias=bias, implementation="mosaic", **options)
        return api.kimi_delta_attention(q, k, v, gate, beta, **given)[0]

    return f, x, x, x, x, beta, *activation


# ---- the estimate ----------------------------------------------------------------------------------------------------


def pallas_calls(jaxpr, within: str = ""):
    """Yield (name, steps of the grid) of each Pallas kernel in a jaxpr and in those inside of it. The jitted
    function around a kernel names it if it has no name, as in the compiled program."""
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        if equation.primitive.name == "pallas_call":
            yield name or within, math.prod(equation.params["grid_mapping"].grid)
        inside = name if isinstance(name, str) else within
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from pallas_calls(inner, inside)


SIZES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s16=2, u16=2, f32=4, s32=4, u32=4)
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy-done", "after-all")


def hbm_bytes(shape: str) -> int:
    """Return the bytes in HBM of a shape of a program's text, or of a tuple of them. S(1) and above are other memories."""
    total = 0
    for dtype, dims, layout in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?", shape):
        if dtype in SIZES and not re.search(r"S\([1-9]", layout):
            total += SIZES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
    return total


def instructions(text: str) -> dict[str, tuple[str, int]]:
    """Return {name: (operation, bytes in HBM)} of the entry computation of a compiled program."""
    shapes, found = {}, {}
    for line in text[text.index("\nENTRY") :].splitlines()[1:]:
        parsed = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?)\s([a-z][a-z\-]*)\((.*?)\)(?:,|$)", line)
        if parsed is None:
            continue
        name, shape, operation, operands = parsed.groups()
        shapes[name] = shape
        if operation not in FREE:
            # A -start returns a tuple, of which all behind the first repeats the operand.
            results = shape.split("}")[0] + "}" if operation.endswith("-start") else shape
            read = {name: shapes[name] for name in re.findall(r"%([\w.\-]+)", operands)}
            found[name] = operation, hbm_bytes(results) + sum(map(hbm_bytes, read.values()))
    return found


def estimate(f, operands, call: Call, dump: str) -> dict:
    """Return the ms of a call and its parts. operands: shapes on a device of the call's target."""
    kind = jax.tree.leaves(operands)[0].sharding.device_set.pop().device_kind
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        grids = dict(pallas_calls(jax.make_jaxpr(f)(*operands).jaxpr))
        compiled = jax.jit(f).trace(*operands).lower(lowering_platforms=("tpu",)).compile()
    chip, ms, kernels = TARGETS[call.target], dict(kernels=0.0, other=0.0), {}
    for name, (operation, moved) in instructions(compiled.as_text()).items():
        paths = glob.glob(f"{dump}/*-{glob.escape(name)}-[0-9][0-9]-final_bundles.txt")
        text = pathlib.Path(paths[0]).read_text() if paths else ""
        is_kernel = operation == "custom-call" and bool(text)
        if is_kernel:
            # Differentiation puts its own words around a kernel's name.
            kernel = max((x for x in grids if x in name), key=len)
            has_check = call.library == "glax" and call.problem.form == "key" and "save_states" not in kernel
            step = counted(text, has_check)[1]
            bundles = grids[kernel] * step
            kernels[kernel] = dict(steps=grids[kernel], bundles=step, mb=round(moved / 1e6))
        else:
            bundles = counted(text, False)[0] if text else 0
        ms["kernels" if is_kernel else "other"] += 1e3 * max(bundles / chip.clock, moved / chip.bandwidth)
    assert kernels.keys() == grids.keys(), f"no bundles of {grids.keys() - kernels.keys()}"
    return dict(ms=round(sum(ms.values()), 3), ms_kernels=round(ms["kernels"], 3), kernels=kernels)


def compile_one(index: int, dump: str):
    """Print the estimate of one call as JSON. Runs in a process with `environment`."""
    call, contexts = calls()[index], contextlib.ExitStack()
    load_kernels()
    if call.library == "tokamax":
        from tokamax import config

        contexts.enter_context(config.cross_compile(True))
    jax.default_backend = lambda: "tpu"  # deltanet-tpu compiles its kernels where this says so
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[call.target].topology)
    with contexts:
        found = estimate(*function(call, shapes(SingleDeviceSharding(topology.devices[0]))), call, dump)
    print(json.dumps(found), flush=True)


# ---- the comparison --------------------------------------------------------------------------------------------------


def verdict(ours: float, best: float, factors: list[float]) -> tuple[float, str]:
    """Return (the share of the best peer's time, whether it is at most 0.75 by more than the error of the estimate).

    factors: the published times over their estimates. A time may be its estimate times any number between the least factor and
    the greatest, so a share is known to the quotient of these.
    """
    share, error = ours / best, max(factors) / min(factors)
    if share * error <= 0.75:
        return share, "at most 0.75"
    return share, "more than 0.75" if share / error > 0.75 else "undecided"


def result(call: Call, found: dict) -> dict:
    """Return a line of results, of the fields of benchmarks/results/README.md."""
    p = call.problem
    line = dict(
        problem=f"{p.B},{p.T},{p.H},{p.D},{p.D}",
        gate=dict(head="per head, delta rule", key="per key, delta rule")[p.form],
        mode="gradient" if call.gradient else "forward",
        implementation=call.library,
        **found,
    )
    if p.shared > 1:
        line["heads"] = p.H // p.shared
    if call.published is not None:
        line |= dict(dtype=p.dtype, published_ms=call.published, times_estimate=round(call.published / found["ms"], 2))
    return line


def compare(found: dict[Call, dict]):
    """Print the factors of published times, and the comparison."""
    factors = {call: call.published / x["ms"] for call, x in found.items() if call.published is not None}
    for call, factor in factors.items():
        print(f"| {call} | {call.published:.2f} | {found[call]['ms']:.2f} | {factor:.2f} |")
    for call, x in found.items():
        if call.library == "glax":
            peers = {name: found.get(dataclasses.replace(call, library=name)) for name in LIBRARIES[1:]}
            times = {name: peer["ms"] for name, peer in peers.items() if peer is not None}
            if times and factors:  # --only may leave them out
                share, words = verdict(x["ms"], min(times.values()), list(factors.values()))
                print(f"| {call} | {x['ms']:.2f} | {times} | {share:.2f} | {words} |")


def main():
    parser = argparse.ArgumentParser(prog="benchmarks.tpu.peers")
    parser.add_argument("--json", type=pathlib.Path, metavar="FOLDER", help="in which each chip's results get a folder")
    parser.add_argument("--only", default="", help="a regular expression: only the calls whose names it finds")
    parser.add_argument("--one", nargs=2, metavar=("INDEX", "DUMP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return compile_one(int(args.one[0]), args.one[1])
    found = {}
    for index, call in enumerate(calls()):
        if re.search(args.only, str(call)):
            with tempfile.TemporaryDirectory() as dump:
                command = [sys.executable, "-m", "benchmarks.tpu.peers", "--one", str(index), dump]
                done = subprocess.run(command, env=environment(dump), stdout=subprocess.PIPE, text=True, check=True)
            found[call] = json.loads(done.stdout.splitlines()[-1])
            print(call, found[call], flush=True)
    compare(found)
    for target in sorted({call.target for call in found} if args.json else ()):
        write(args.json / f"tpu_{target}", target, found)
    return None


def write(folder: pathlib.Path, target: str, found: dict[Call, dict]):
    """Write the results of one chip."""
    today = datetime.date.today().isoformat()
    content = dict(
        date=today,
        device=f"TPU {target}",
        kind="estimated",
        dtype="bfloat16",
        versions={name: importlib.metadata.version(name) for name in ("jax", "libtpu", *LIBRARIES[1:])},
        method="python -m benchmarks.tpu.peers. No TPU has run this. Bundles and bytes of the compiled program.",
        results=[result(call, x) for call, x in found.items() if call.target == target],
    )
    folder.mkdir(exist_ok=True)
    (folder / f"{today}-peers.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
