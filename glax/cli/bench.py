"""Run `glax bench`: measure glax on this device, beside the limits of the device and beside peers."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glax
from glax._src.core.bind import bind
from glax._src.core.files import replacing, unwritable
from glax._src.core.known_miscompiles import version_of
from glax._src.serving.decode_step import recurrent_step
from glax._version import __version__
from glax.cli.arguments import a_path, within
from glax.cli.cases import Problem, add_problems, forward, problems_of, train
from glax.cli.errors import UsageError
from glax.cli.measure import Way, copy_gbytes, interleaved, matmul_gflops
from glax.cli.output import add_json, progress, show_json, show_table
from glax.cli.peers import PEERS, UnavailableError, as_numpy
from glax.cli.roofline import plot
from glax.testing.check import one_line
from glax.testing.reference import reference
from glax.testing.tolerances import BARS

MODES = ("forward", "train", "step")
TOKENS = 32  # the tokens that one program decodes in mode "step"
HEADS, SEEN = 4, 256  # heads and tokens of the first sequence that are compared with the reference, a loop in Python


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "bench",
        help="time glax on this device, beside its limits and other libraries",
        description="Times calls of each shape, gate and dtype: medians with the 20th and 80th percentile of the device's "
        "time (accelerators: many calls in flight; CPUs: one at a time), the rates that they amount to, what a copy and a "
        "matrix product reach in the same run, and fla-core and ejkernel where installed. Exit code 1 if glax is wrong.",
    )
    add_problems(parser)
    help = "forward; train: forward and backward; step: one token for B sequences. Repeat for more (default: forward, train)"
    parser.add_argument("--mode", action="append", choices=MODES, help=help)
    parser.add_argument("--iters", type=within(1), default=20, metavar="N", help="samples (default: %(default)s)")
    parser.add_argument("--out", type=a_path, metavar="FOLDER", help="write bench.json and roofline.png there")
    add_json(parser)
    return parser


def run(args) -> int:
    problems, modes = problems_of(args), list(dict.fromkeys(args.mode or MODES[:2]))
    if args.out is not None:
        make_folder(args.out)
    with progress("timing", 1 + len(problems) * len(modes)) as advance:
        machine = ceilings({problem.dtype for problem in problems}, min(args.iters, 7))
        advance()
        results = []
        for problem in problems:
            for mode in modes:
                results.append(measured(problem, mode, args.iters))
                advance()
    versions = dict(glax=__version__) | {name: version_of(name) for name in ("jax", "jaxlib", "fla-core", "ejkernel")}
    document = dict(device=jax.devices()[0].device_kind, versions=versions, machine=machine, results=results)
    if args.json:
        show_json(document)
    else:
        show(document)
    if args.out is not None:  # written after printing, so that a full disk does not cost the measurements
        note = written(document, args.out)
        if not args.json:
            print(note)
    return int(not all(result["ways"][0]["right"] for result in results))


def written(document: dict, folder: Path) -> str:
    """Write bench.json and its picture, and return what happened, as text for the user."""
    try:
        with replacing(folder / "bench.json") as new:
            new.write_text(json.dumps(document, indent=1, allow_nan=False))
        return f"wrote {folder / 'bench.json'}; {plot(document, folder / 'roofline.png')}"
    except OSError as error:
        raise UsageError(f"argument --out: cannot write to {folder}: {error.strerror or error}") from error


def make_folder(folder: Path):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"argument --out: cannot make {folder}: {error.strerror}") from error
    if reason := unwritable(folder):
        raise UsageError(f"argument --out: cannot write to {folder}: {reason}")


def ceilings(dtypes: set[str], iters: int) -> dict:
    return dict(
        copy_gbytes=copy_gbytes(iters), matmul_gflops={dtype: matmul_gflops(dtype, iters) for dtype in sorted(dtypes)}
    )


def measured(problem: Problem, mode: str, iters: int) -> dict:
    """Return the results of glax and then of every peer: prepared, compared with the reference, and timed in turn."""
    arrays, state = problem.arrays(), None
    d_output = jax.random.normal(jax.random.key(1), arrays["value"].shape, problem.dtype)
    if mode == "step":
        arrays = {name: x if name == "g_gamma" else x[:, 0] for name, x in arrays.items()}
        state = jax.random.normal(jax.random.key(2), (problem.B, problem.H, problem.D, problem.D), jnp.float32)
    want = expected(arrays, state)
    reports, ready = [], []
    for name, prepare in (("glax", by_glax), *PEERS.items()):
        report: dict[str, Any] = dict(name=name, ms=None, error=None, right=None, reason=None)
        reports.append(report)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # peers print to standard output
                way = prepare(problem, mode, arrays, d_output, state)
                result = way.run()
                way.wait(result)
            report["error"], report["right"] = judged(result, want, BARS[problem.dtype][0])
            ready.append((report, way))
        except UnavailableError as reason:
            report["reason"] = str(reason)
        except Exception as failure:  # whatever a peer, a compiler or a device raises is the result of this way
            report["reason"] = one_line(failure)
    for (report, _), timing in zip(ready, interleaved([way for _, way in ready], iters), strict=True):
        report["ms"] = dataclasses.asdict(timing)
    result = dict(problem=dataclasses.asdict(problem), mode=mode, bytes=problem.bytes(mode), kernels=[], ways=reports)
    if (ms := reports[0]["ms"]) is None:
        return result
    kernels = used(mode, arrays, d_output, state)
    flops = problem.flops(mode, kernels)
    rates = dict(gflops=flops / ms["median"] / 1e6, gbytes=result["bytes"] / ms["median"] / 1e6)
    return result | dict(kernels=kernels, flops=flops, **rates)


def by_glax(problem: Problem, mode: str, arrays: dict, d_output, state) -> Way:
    f, operands = call(mode, arrays, d_output, state)
    program = jax.jit(f).lower(*operands).compile()
    return Way("glax", lambda: program(*operands), calls=TOKENS if mode == "step" else 1)


def call(mode: str, arrays: dict, d_output, state):
    """Return (a function whose first result is the output to compare, its operands)."""
    match mode:
        case "forward":
            return forward, (arrays,)
        case "train":
            return train, (arrays, d_output)
        case _:
            return decode, (arrays, state)


def decode(arrays: dict, state):
    """Return the output of the first token, the output after the last of TOKENS equal tokens, and the last state."""
    first, state = recurrent_step(**arrays, state=state)

    def step(_, carry):
        return recurrent_step(**arrays, state=carry[1])

    return first, *jax.lax.fori_loop(1, TOKENS, step, (first, state))


def used(mode: str, arrays: dict, d_output, state) -> list[dict]:
    f, operands = call(mode, arrays, d_output, state)
    return [
        dict(name=d.kernel, config=str(d.config), selector=d.selector, chunk=getattr(d.config, "chunk", 0))
        for d in glax.explain(f, *operands)
    ]


def expected(arrays: dict, state) -> np.ndarray:
    """Return the reference's output of the first sequence for a few heads and tokens, [tokens, heads, D]."""
    if state is not None:
        arrays = {name: x if name == "g_gamma" else x[:, None] for name, x in arrays.items()}
        arrays["initial_state"] = state[:1, :HEADS]
    few = {name: x[:1, :SEEN, :HEADS] for name, x in arrays.items() if name not in ("g_gamma", "initial_state")}
    few |= {name: x[..., :HEADS] for name, x in arrays.items() if name == "g_gamma"}
    few |= {name: x for name, x in arrays.items() if name == "initial_state"}
    return np.asarray(reference(bind(**few)).output[0])


def judged(result, want: np.ndarray, bar: float) -> tuple[float | None, bool]:
    """Return the relative RMS error of the first result where the reference is known, or None if it is not finite; and whether
    it is within the bar."""
    output = result[0] if isinstance(result, tuple) else result
    tokens, heads, _ = want.shape
    got = as_numpy(output[0]).reshape(-1, *output.shape[-2:])[:tokens, :heads]
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(result) if isinstance(x, jax.Array))
    return (error if np.isfinite(error) else None), finite and error <= bar


def show(document: dict):
    machine = document["machine"]
    print(f"{document['device']}: {machine['copy_gbytes']:,.1f} GB/s in a copy;", end=" ")
    print(", ".join(f"{g:,.0f} GFLOP/s in a {dtype} product" for dtype, g in machine["matmul_gflops"].items()))
    rows, notes = [], {}
    for result in document["results"]:
        problem = Problem(**result["problem"])
        name = problem.title(result["mode"])
        for way in result["ways"]:
            if way["ms"] is None:
                notes.setdefault(f"{way['name']}: {way['reason']}", []).append(name)
                continue
            rates = (None,) * 4
            if way["name"] == "glax":
                gflops, gbytes = result["gflops"], result["gbytes"]
                shares = gflops / machine["matmul_gflops"][problem.dtype], gbytes / machine["copy_gbytes"]
                rates = (gflops, f"{shares[0]:.1%}", gbytes, f"{shares[1]:.1%}")
            ms, own = way["ms"], result["ways"][0]["ms"]
            spread = f"{ms['p20']:.3g} - {ms['p80']:.3g}"
            times = f"{ms['median'] / own['median']:.2f}x" if own and way["name"] != "glax" else None
            verdict = "" if way["right"] else "WRONG"
            rows.append((name, way["name"], ms["median"], spread, times, *rates, way["error"], verdict))
    headings = ("call", "by", "ms", "p20 - p80", "of glax's", "GFLOP/s", "of product", "GB/s", "of copy", "error", "")
    if rows:
        show_table(headings, rows)
    for note, names in notes.items():
        every = len(names) == len(document["results"])
        print(note if every else f"{note} ({'; '.join(names)})")
    ran = (" and ".join(map(used_text, result["kernels"])) for result in document["results"])
    for text in dict.fromkeys(filter(None, ran)):
        print(f"glax ran {text}")


def used_text(kernel: dict) -> str:
    return f"{kernel['name']} with {kernel['config']}, by {kernel['selector']}"
