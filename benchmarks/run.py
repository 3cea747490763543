"""Measure calls of glax beside peers: every suite of suites.py, by any subject, with one way to time and one form of results.

python benchmarks/run.py published                   # the layers of models, with the peers that are installed
python benchmarks/run.py delta --shape 1,8192,16,32,128,128 --gate key --by pallas fla
python benchmarks/run.py cpu --quick                 # this machine's CPU, beside plain JAX and PyTorch
python benchmarks/run.py choice --processes 12 --only kda          # one times, the others compile meanwhile
python benchmarks/run.py shapes --processes 1        # every call in a process of its own, for the times of first calls
python benchmarks/run.py shapes --compile 16         # the peers' candidates compiled first, by 16 processes
python benchmarks/run.py published --errors          # against float64, in thousandths, on short rows; nothing is timed
python benchmarks/run.py delta --profile             # the time of each kernel, alone on the device
python benchmarks/run.py cpu --help                  # all options

What a suite times in turns is timed so in one process, on GPUs with many calls in flight; medians. "of floor": the time over that
of a copy that reads each input once and writes each output once. Each line of JSON is a result in the form of results/README.md;
--json FILE writes them with device, date, versions and command. The exit code is 1 if results disagree; a missed bar is printed.
To compare two commits, run each checkout's own, in turns.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by PyTorch, whose idle threads would keep cores from others
if "choice" in sys.argv[1:]:
    # Else what does not depend on the call before, such as the inverse of the delta rule, is computed once for a loop of calls.
    LOOPS = " --xla_disable_hlo_passes=while-loop-invariant-code-motion"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + LOOPS

import jax
import jax.numpy as jnp
import triton_tuning
from calls import NAMED, Call
from meters import (
    available_bytes,
    distance,
    errors,
    expected,
    interleaved,
    kernels,
    kernels_ms,
    named,
    peak_mib,
    repeats,
    temporary_bytes,
)
from output import show, table, without, write
from peers import PLATFORMS, SUBJECTS, by_glax, kernels_here
from peers import named as subject_named
from suites import SUITES, Suite, subjects_of

import glax
from glax._src.core.known_miscompiles import version_of
from glax._src.core.registry import Backend
from glax.cli import bench, measure
from glax.cli.measure import Way, copy_gbytes, matmul_gflops
from glax_cli.arguments import integers, within
from glax_cli.published import LAYERS

MODES = {"forward": "forward", "train": "with gradient"}
STRENGTHS = ((1.0, 0.0), (1 / 16, 0.0), (1 / 256, 0.0), (1.0, -100.0))  # of log-sigmoid, and the value of a twentieth
turns = contextlib.nullcontext()  # the lock of the process that times, where there are several


@dataclasses.dataclass
class Subject:
    """One way to compute a call in a mode, which has run once. refusal: why it does not run here."""

    call: Call
    name: str
    way: Way | None = None
    refusal: str = ""
    first_s: float = 0.0


def prepared(call: Call, subject: str, mode: str, arrays: dict, d_output, suite: Suite) -> list[Subject]:
    """Return the subject's `Way`, or one for each kernel that runs here. What a peer or a compiler raises is a result."""
    makers: dict = {subject: SUBJECTS.get(subject)}
    if subject == "kernels":
        makers = {
            name: lambda *x, insist=insist: by_glax(*x, **insist) for name, insist in kernels_here(call, arrays).items()
        }
    loop = dict(loop=True) if suite.loop and subject in ("glax", *PLATFORMS) else {}
    found = []
    for name, make in makers.items():
        named, began = Subject(call, subject_named(call, name)), time.perf_counter()
        found.append(named)
        try:
            if make is None:
                raise ModuleNotFoundError("torch is not installed")
            way = make(call, mode, arrays, d_output, **loop)
            needs, there = temporary_bytes(way) or 0, available_bytes()
            if Backend.here() is Backend.CPU and there is not None and needs > 0.8 * there:
                raise MemoryError(f"needs {needs / 2**30:.1f} GiB, {there / 2**30:.1f} GiB are available")
            way.wait(way.run())
            named.way, named.first_s = way, time.perf_counter() - began
        except Exception as error:
            named.refusal = f"{type(error).__name__}: {error}".splitlines()[-1][:300]
    return found


def measured(group: list[Call], suite: Suite, args) -> list[dict]:
    """Return a line for each call, mode and subject of a group, all timed in turns."""
    operands = {call: (arrays := call.arrays(), cotangent(call, arrays)) for call in group}
    lines = []
    for mode in MODES:
        found = [
            each
            for call in group
            for name in args.by or subjects_of(suite, call)
            for each in prepared(call, name, mode, *operands[call], suite)
        ]
        ready = [each for each in found if each.way is not None]
        wrong = checked(ready, mode, suite) if suite.close else {}
        with turns:
            gbytes = copy_gbytes(7) if mode == "forward" else lines[0]["copy_gbytes"]
            times = interleaved([each.way for each in ready], args.iters, args.seconds)
            alone = [kernels_ms(each.way) if args.device else None for each in ready]
        for each in found:
            line = each.call.named() | dict(mode=MODES[mode], implementation=each.name, copy_gbytes=round(gbytes, 1))
            lines.append(line)
            if each.way is None:
                line["refusal"] = each.refusal
                continue
            i, floor = ready.index(each), each.call.bytes(mode) / gbytes / 1e6
            line |= dict(ms=round(times[i].median, 5), p20=round(times[i].p20, 5), p80=round(times[i].p80, 5))
            line |= dict(
                times_first=round(times[i].median / times[0].median, 3), times_floor=round(times[i].median / floor, 2)
            )
            line["first_s"] = round(each.first_s, 2)
            if alone[i] is not None:
                line |= dict(kernels_ms=round(alone[i], 5), kernels_times_floor=round(alone[i] / floor, 2))
            line |= described(each, mode, *operands[each.call], ms=times[i].median)
            line |= wrong.get(each.name, {})
        print("\n".join(map(json.dumps, lines[-len(found) :])), flush=True)
        del found, ready, each
    jax.clear_caches()
    return lines


def cotangent(call: Call, arrays: dict) -> jax.Array:
    return jax.random.normal(jax.random.key(1), arrays["value"].shape, call.dtype)


def checked(ready: list[Subject], mode: str, suite: Suite) -> dict[str, dict]:
    """Return the largest error of each subject's results against the first subject's, and whether it is within the bar."""
    found, want = {}, None
    for each in ready:
        got = named(each.way.run(), each.call, mode)
        want = got if want is None else want
        worst = max(
            distance(got[name], want[name]) for name in (want if mode == "forward" else want.keys() - {"output"})
        )
        found[each.name] = dict(error=worst, right=worst <= suite.close[mode])
    return found


def described(each: Subject, mode: str, arrays: dict, d_output, ms: float) -> dict:
    """Return memory; for glax whether results repeat, and which kernels ran, with their rate on CPUs."""
    line: dict = dict(mib=mib and round(mib, 1)) if (mib := peak_mib(each.way)) else {}
    if (temporary := temporary_bytes(each.way)) is not None:
        line["temporary_mib"] = round(temporary / 2**20, 1)
    if each.call.states_every:
        line["states_bytes"] = jax.eval_shape(each.call.outputs, arrays)[1].size * 4
    if each.name != "glax":
        return line
    if mode == "train":
        line["repeats"] = repeats(each.way)
    used = bench.used(each.call, mode, arrays, d_output, None)
    line["kernels"] = [kernel["name"] for kernel in used]
    if (flops := each.call.flops(mode, used)) is not None:
        line["gflops"] = round(flops / ms / 1e6, 2)
    return line


# ---- other meters ----


def errors_of(group: list[Call], suite: Suite, args) -> list[dict]:
    """Return a line for each call and subject with the relative errors of every result, in thousandths; see `expected`.

    With states_every, whose gradient the reference does not have, against XLA's kernels in float32.
    """
    lines = []
    for call in dict.fromkeys(dataclasses.replace(x.small(), final=x.states_every is None) for x in group):
        for strength, extreme in args.strength or STRENGTHS:
            call = dataclasses.replace(call, strength=strength, extreme=extreme)
            arrays = call.arrays()
            d_output, want = cotangent(call, arrays), None
            for name in args.by or subjects_of(suite, call):
                for each in prepared(call, name, "train", arrays, d_output, suite):
                    line = call.named() | dict(mode="errors", implementation=each.name)
                    if each.way is None:
                        line["refusal"] = each.refusal
                    else:
                        want = want or wanted(call, arrays, d_output)
                        line |= errors(named(each.way.run(), call, "train"), want)
                        if each.name.startswith("glax"):
                            line["repeats"] = repeats(each.way)
                    print(json.dumps(line), flush=True)
                    lines.append(line)
    return lines


def wanted(call: Call, arrays: dict, d_output) -> dict:
    if call.states_every is None:
        return expected(call, arrays, d_output)
    exact, cotangent = {name: x.astype(jnp.float32) for name, x in arrays.items()}, d_output.astype(jnp.float32)
    return named(by_glax(call, "train", exact, cotangent, platform="xla").run(), call, "train")


def profiled(group: list[Call], suite: Suite, args) -> list[dict]:
    """Return a line for each kernel that takes a hundredth of a call or more: the median of its executions, in microseconds."""
    lines = []
    for call in group:
        arrays = call.arrays()
        for mode in MODES:
            for name in args.by or subjects_of(suite, call):
                for each in prepared(call, name, mode, arrays, cotangent(call, arrays), suite):
                    found = kernels(each.way, args.iters) if each.way is not None else {}
                    total = sum(map(sum, found.values()))
                    for kernel, took in sorted(found.items(), key=lambda item: -sum(item[1])):
                        if sum(took) > total / 100:
                            line = call.named() | dict(mode=MODES[mode], implementation=each.name, kernel=kernel[:70])
                            line |= dict(us=round(1e3 * statistics.median(took), 1), times=len(took) // args.iters)
                            lines.append(line | dict(us_of_call=round(1e3 * total / args.iters, 1)))
    return lines


# ---- processes ----


def start(lock):
    global turns
    turns = lock


def in_processes(groups: list[list[Call]], suite_name: str, args) -> list[dict]:
    """Measure each group in a process of its own: one times, and the others compile meanwhile."""
    context, lines = multiprocessing.get_context("spawn"), {}
    with concurrent.futures.ProcessPoolExecutor(
        args.processes, context, start, (context.Lock(),), max_tasks_per_child=1
    ) as pool:
        waiting = {pool.submit(task, i, suite_name, args): i for i in range(len(groups))}
        for done in concurrent.futures.as_completed(waiting):
            try:
                lines[waiting[done]] = done.result()
            except Exception as error:  # of one process, which must not cost the others' results
                group = groups[waiting[done]]
                print(f"{group[0]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            save(args, [line for i in sorted(lines) for line in lines[i]])
    return [line for i in sorted(lines) for line in lines[i]]


def task(index: int, suite_name: str, args) -> list[dict]:
    suite = SUITES[suite_name]
    set_up(suite, args)
    return args.meter(groups_of(suite, args)[index], suite, args)


def set_up(suite: Suite, args):
    """Limit what Triton's autotuner does for peers, where it is installed, and the samples of loops."""
    if suite.loop:
        measure.SAMPLE_MS = 20.0  # a loop needs one launch, so short samples are enough
    if version_of("triton") is None:
        return
    match "first" if args.errors else args.tuning:
        case "short":
            triton_tuning.short_tuning()
        case "first":
            triton_tuning.first_candidate()
        case "cached":
            triton_tuning.no_tuning()


def compile_part(groups: list[list[Call]], suite: Suite, args):
    """Compile a part of the candidates of every peer in PyTorch, and time nothing."""
    triton_tuning.compile_a_part(*args.part)
    for call in (call for group in groups for call in group):
        arrays = call.arrays()
        for name in {"fla", "safe", "mamba"} & set(args.by or subjects_of(suite, call)):
            for each in prepared(call, name, "train", arrays, cotangent(call, arrays), suite):
                print(f"{call}: {each.name}: {each.refusal or 'compiled'}", file=sys.stderr, flush=True)


# ---- the command ----


def save(args, lines: list[dict]):
    if args.json is not None:
        write(args.json, lines)


def groups_of(suite: Suite, args) -> list[list[Call]]:
    """Return the calls that are timed in turns: those of the suite, or of --like and --shape."""
    rest = dict(dtype="bfloat16") | suite.rest | {name: x for name in ("dtype", "packed") if (x := getattr(args, name))}
    if args.shape:
        chosen = [Call.of_shape(s, gate=gate, **rest) for s in args.shape for gate in args.gate or suite.gates[:1]]
    else:
        changes = {name: rest[name] for name in ("dtype", "packed") if getattr(args, name)}
        chosen = [dataclasses.replace(call, **changes) for call in suite.calls()]
        chosen = [call for call in chosen if not args.gate or call.gate in args.gate]
    chosen = [call for call in chosen if not args.like or call.name in args.like]
    return [group for call in chosen if args.only in str((group := suite.group(call))[0].named())]


def parsed() -> argparse.Namespace:
    listed = "\n".join(f"  {name:12} {suite.what}; by {', '.join(suite.by)}" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsuites:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suite", choices=SUITES, metavar="SUITE")
    add(
        "--shape", type=integers("B,T,H,D", "B,T,H,K,V", "B,T,G,H,K,V"), action="append", help="in place of the suite's"
    )
    add("--gate", nargs="+", choices=NAMED)
    add("--like", nargs="+", metavar="MODEL", help=f"of suite published or between, such as {next(iter(LAYERS))}")
    add("--only", default="", metavar="TEXT", help="calls in whose line of results the text stands")
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--packed", type=within(1), metavar="N", help="documents in a row")
    add(
        "--by",
        nargs="+",
        choices=(*SUBJECTS, "kernels"),
        metavar="SUBJECT",
        help=f"of {', '.join((*SUBJECTS, 'kernels'))}",
    )
    meter = parser.add_mutually_exclusive_group()
    meter.add_argument("--errors", action="store_true", help="nothing is timed")
    meter.add_argument("--profile", action="store_true", help="the time of each kernel alone")
    meter.add_argument("--part", type=triton_tuning.a_part, help=argparse.SUPPRESS)
    add("--strength", type=float, action="append", nargs=2, metavar=("FACTOR", "VALUE"),
        help="with --errors: gates of FACTOR times log-sigmoid, a twentieth of them VALUE")  # fmt: skip
    add("--device", action="store_true", help="the sum of the kernels' times as well, by JAX's profiler")
    add("--iters", type=within(1), default=None, help="rounds; 25 on a CPU, 9 elsewhere")
    add("--seconds", type=float, default=8.0, help="on a CPU, after which a subject rests")
    add("--quick", action="store_true", help="5 rounds of at most 2 seconds")
    add("--processes", type=int, default=0, metavar="N", help="each group in a process of its own, N at a time")
    add("--compile", type=int, default=0, metavar="N", help="processes that compile the peers' candidates first")
    add(
        "--tuning", choices=("short", "full", "cached", "first"), default="short", help="of peers by Triton's autotuner"
    )
    add("--json", type=Path, metavar="FILE", help="for all results")
    args = parser.parse_args()
    if args.like and args.shape:
        parser.error("--like and --shape both choose calls: give one of them")
    if args.strength and not args.errors:
        parser.error("--strength is of --errors: give both, or leave it out")
    usual = 25 if Backend.here() is Backend.CPU else 9
    args.iters = 5 if args.quick else args.iters or usual
    args.seconds = 2.0 if args.quick else args.seconds
    args.meter = errors_of if args.errors else measured
    args.meter = profiled if args.profile else args.meter
    return args


def main() -> int:
    args = parsed()
    suite = SUITES[args.suite]
    groups = groups_of(suite, args)
    if args.part:
        compile_part(groups, suite, args)
        return 0
    if args.compile:
        triton_tuning.compile_in_parts(
            [__file__, *without(sys.argv[1:], "--compile", "--json"), "--part"], args.compile
        )
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if Backend.here() is Backend.CPU and args.meter is measured:
        print(f"{matmul_gflops('float32', 7):.0f} GFLOP/s in a float32 product, {copy_gbytes(7):.1f} GB/s in a copy")
    if args.processes:
        lines = in_processes(groups, args.suite, args)
    else:
        set_up(suite, args)
        lines = [line for group in groups for line in args.meter(group, suite, args)]
    show(lines, MODES.values())
    bars = suite.bars(lines) if args.meter is measured else []
    if bars:
        print(
            table([bar.row() for bar in bars]), f"{sum(bar.is_met for bar in bars)} of {len(bars)} bars met", sep="\n"
        )
    save(args, lines)
    for line in (wrong := [line for line in lines if line.get("right") is False]):
        print(f"WRONG: {line['problem']} {line['gate']} {line['mode']} {line['implementation']}: {line['error']:.1e}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
