"""Measure the layers of published models on one NVIDIA GPU: glax beside fla-core, mamba-ssm and jax-linear-attention.

python benchmarks/models.py                         # every layer, with the peers that are installed
python benchmarks/models.py --only RetNet-1.3B --alone
python benchmarks/models.py --triton                # glax's Triton kernels too, which run where Hopper kernels do not
python benchmarks/models.py --compile 16            # the candidates of fla-core and mamba-ssm compiled first, by 16 processes
python benchmarks/models.py --packed                # one row of 32,768 tokens: documents, and gates of -inf at their places
python benchmarks/models.py --shape B,T,GROUPS,H,K,V --gate head    # a shape of your own
python benchmarks/models.py --alone --jobs 8        # glax's programs compiled side by side: first calls are not timed
python benchmarks/models.py --between               # shapes beside the published ones, as multiples of these
python benchmarks/models.py --errors                # relative errors against float64, in thousandths; nothing is timed
python benchmarks/models.py --errors --triton       # those of Triton's kernels

All implementations of a layer are timed in turns in one process, with many calls in flight; medians. "of floor": the time over
the time of a copy that moves `least_bytes`. Each line of JSON is a result in the form of benchmarks/results/README.md.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from layers import GATES, MODES, NAMED, PUBLISHED, Layer, documents, least_bytes, neighbours, with_gradient
from peers_fla import compile_a_part, compile_in_parts, short_tuning
from peers_layers import JaxImplementation, TorchPeer, jla_output
from timing import table

import glax
from glax._src.core.bind import bind
from glax.cli.measure import copy_gbytes, interleaved
from glax.testing.reference import reference, reference_gradient

PACKED = (1, 32768, 16, 16, 128, 128)
COUNTS = (16, 128)  # of documents
LIBRARIES = dict(fla="fla-core", mamba="mamba-ssm")
TRITON = "glax, Triton"
TRITON_CACHE = os.environ.get("TRITON_CACHE_DIR")


def peers(layer: Layer, operands) -> dict:
    """Return the peers that can run the layer here. One that fails is named on stderr."""
    made, wanted = {}, {}
    if layer.gate != "constant" and importlib.util.find_spec("jla"):
        wanted["jax-linear-attention"] = lambda: JaxImplementation(jla_output(layer), operands)
    if layer.peer is not None and importlib.util.find_spec("torch"):
        wanted[LIBRARIES[layer.peer]] = lambda: TorchPeer(layer, operands)
    for name, make in wanted.items():
        try:
            made[name] = make()
            made[name].ways()["both"].run()
        except Exception as error:  # a peer's own: it may refuse a shape in any way
            print(f"{layer.name}: {name}: {error!r:.300}", file=sys.stderr)
            made.pop(name, None)
    return made


def results(layer: Layer, made: dict, iters: int, gbytes: float, **note) -> list[dict]:
    """Measure the implementations of a layer in turns, and return a line for each and each mode."""
    least, lines = least_bytes(layer.operands()), []
    common = dict(model=layer.name, problem=layer.problem, gate=NAMED[layer.gate]) | note
    memory = {name: x.mib() for name, x in made.items()}
    for mode, named in MODES.items():
        times = interleaved([x.ways()[mode] for x in made.values()], iters)
        for name, t in zip(made, times, strict=True):
            line = common | dict(mode=named, implementation=name, ms=round(t.median, 4))
            line["times_floor"] = round(t.median / (least[mode] / gbytes / 1e6), 2)
            if mode == "both":
                line["mib"] = round(memory[name])
            lines.append(line)
    return lines


def repeats(made: JaxImplementation) -> bool:
    """Return whether a second call agrees with the first in every bit."""
    first, second = made.both(*made.operands), made.both(*made.operands)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(first, second, strict=True))


def compiled(layer: Layer) -> tuple[JaxImplementation, float]:
    """Return glax's programs of a layer, which have run, and the seconds that this took."""
    operands, began = layer.operands(), time.perf_counter()
    return JaxImplementation(layer.output, operands), time.perf_counter() - began


def measure_layers(layers, args) -> list[dict]:
    rows, gbytes = [], copy_gbytes(7)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        ready = pool.map(compiled, layers) if args.jobs > 1 else map(compiled, layers)
        for layer, (own, first_call) in zip(layers, list(ready) if args.jobs > 1 else ready, strict=True):
            made = dict(glax=own)
            if args.triton:
                made[TRITON] = JaxImplementation(dataclasses.replace(layer, platform="triton").output, own.operands)
                if TRITON_CACHE:  # jax-triton removes it, and peers would compile all of their candidates again
                    os.environ["TRITON_CACHE_DIR"] = TRITON_CACHE
            made |= {} if args.alone else peers(layer, own.operands)
            lines = results(layer, made, args.iters, gbytes)
            print("\n".join(map(json.dumps, lines)), flush=True)
            row = summary(layer.name, lines) | dict(repeats=repeats(own))
            rows.append(row if args.jobs > 1 else row | dict(first_s=first_call))
    return rows


def measure_packed(args) -> list[dict]:
    """Compare one document with several, which begin at the same rows for all implementations, and with gates of -inf there."""
    rows, gbytes = [], copy_gbytes(7)
    for gate in args.gate or ("key", "head"):
        one = Layer("one document", *PACKED, gate)
        operands = one.operands(strength=0.25)
        made, packing = {"one document": JaxImplementation(one.output, operands)}, {}
        for count in COUNTS:
            layer = dataclasses.replace(one, name=f"{count} documents", cuts=documents(one.T, count))
            made[layer.name] = JaxImplementation(layer.output, operands)
            g = operands[3].at[:, jnp.asarray(layer.cuts)].set(-jnp.inf)
            made[f"{count} documents, -inf"] = JaxImplementation(one.output, [*operands[:3], g, operands[4]])
            if importlib.util.find_spec("jla") and not args.alone:
                made[f"{count} documents, jax-linear-attention"] = JaxImplementation(jla_output(layer), operands)
            packing[count] = layer
        lines = results(one, made, args.iters, gbytes)
        for line in lines:
            line["packing"] = line.pop("implementation")
            line["implementation"] = "jax-linear-attention" if "jax-linear" in line["packing"] else "glax"
        print("\n".join(map(json.dumps, lines)), flush=True)
        alone = {line["mode"]: line["ms"] for line in lines if line["packing"] == "one document"}
        for name in made:
            own = {line["mode"]: line for line in lines if line["packing"] == name}
            row = dict(gate=NAMED[gate], packing=name)
            for mode, line in own.items():
                row |= {f"{mode} ms": f"{line['ms']:.3f}", f"{mode} of one": round(line["ms"] / alone[mode], 2)}
            rows.append(row)
    return rows


def measure_between(layers, args) -> list[dict]:
    """Compare every layer with its neighbours, by glax alone, timed in turns."""
    rows, gbytes = [], copy_gbytes(7)
    for layer in layers:
        near = {layer.name: layer} | neighbours(layer)
        made = {name: JaxImplementation(x.output, x.operands()) for name, x in near.items()}
        times = {mode: interleaved([x.ways()[mode] for x in made.values()], args.iters) for mode in MODES}
        for i, (name, x) in enumerate(near.items()):
            row, least = dict(model=layer.name, shape=name, problem=x.problem), least_bytes(x.operands())
            for mode, named in MODES.items():
                ms = times[mode][i].median
                row |= {f"{named} ms": f"{ms:.4f}", f"{named} of the layer": round(ms / times[mode][0].median, 3)}
                row |= {f"{named} of floor": round(ms / (least[mode] / gbytes / 1e6), 2)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def summary(name: str, lines: list[dict]) -> dict:
    """The columns of a table: times and multiples of the floor for glax, and what peers take as multiples of glax."""
    row = dict(model=name)
    for mode in MODES.values():
        own = {line["implementation"]: line for line in lines if line["mode"] == mode}
        row |= {f"{mode} ms": f"{own['glax']['ms']:.3f}", f"{mode} of floor": own["glax"]["times_floor"]}
        for library in (*LIBRARIES.values(), "jax-linear-attention"):
            for ours in own.keys() & {"glax", TRITON} if library in own else ():
                beside = library if ours == "glax" else f"{library} by Triton"
                row[f"{mode}, {beside}"] = f"{own[library]['ms'] / own[ours]['ms']:.2f}x"
    memory = {line["implementation"]: line["mib"] for line in lines if "mib" in line}
    return row | dict(MiB="; ".join(f"{name} {mib}" for name, mib in memory.items()))


def errors(layer: Layer) -> dict:
    """Return ||got - want|| / ||want|| in thousandths of the output and every gradient, for a row of 512 tokens."""
    layer = dataclasses.replace(layer, B=1, T=512)
    *inputs, do = layer.operands()
    q, k, v, g = map(np.asarray, inputs)
    r = bind(*map(jnp.asarray, (q, k, v)), **{GATES[layer.gate]: jnp.asarray(g)})
    d = reference_gradient(r, np.asarray(do), np.zeros(r.state_shape))
    gates = dict(key=d.decay.key, head=d.decay.head, constant=d.decay.constant)[layer.gate]
    want = [reference(r).output, d.q, d.k, d.v, np.asarray(gates).reshape(g.shape)]
    got = with_gradient(layer.output)(*inputs, do)
    names = ("o", "dq", "dk", "dv", "dg")
    distance = (1e3 * np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in zip(got, want))  # noqa: B905
    return dict(model=layer.name) | dict(zip(names, map(float, distance), strict=True))


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[layer.name for layer in PUBLISHED])
    parser.add_argument("--shape", action="append", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--gate", action="append", choices=GATES, help="of --shape and --packed")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels too; with --errors, alone")
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="threads that compile glax's programs")
    parser.add_argument(
        "--compile", type=int, default=0, metavar="N", help="processes that compile the peers' candidates"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--packed", action="store_true")
    what.add_argument("--errors", action="store_true")
    what.add_argument("--between", action="store_true")
    what.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.packed and "constant" in (args.gate or ()):
        parser.error("--packed takes --gate key and head, got constant: gates of -inf have no place in it")
    if args.triton and (args.packed or args.between):
        parser.error("--triton goes with whole layers and with --errors, not with --packed or --between")
    if args.only and args.shape:
        parser.error("--only and --shape both choose layers: give one of them")
    return args


def main():
    args = parsed()
    layers = [layer for layer in PUBLISHED if not args.only or layer.name in args.only]
    if args.shape:
        layers = [Layer(str(shape), *shape, gate) for shape in args.shape for gate in args.gate or ("key",)]
    if args.part:
        compile_a_part(*args.part)
        for layer in layers:
            if layer.peer is not None:
                TorchPeer(layer, layer.operands()).both()
        return
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if args.errors:
        platform = "triton" if args.triton else None
        print(table([errors(dataclasses.replace(layer, platform=platform)) for layer in layers]))
        return
    if args.between:
        print(table(measure_between(layers, args)))
        return
    if importlib.util.find_spec("torch") and importlib.util.find_spec("fla") and not args.alone:
        if args.compile:
            chosen = [x for name in args.only or () for x in ("--only", name)]
            compile_in_parts([__file__, *chosen, "--part"], args.compile)
        short_tuning()
    print(table(measure_packed(args) if args.packed else measure_layers(layers, args)), flush=True)


if __name__ == "__main__":
    main()
