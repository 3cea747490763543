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
from glax.cli.cases import Problem, problems_of
from glax.cli.errors import UsageError
from glax.cli.measure import Way, copy_gbytes, interleaved, matmul_gflops
from glax.cli.output import progress, show_json, show_table, show_text
from glax.cli.peers import PEERS, UnavailableError, as_numpy, missing
from glax.cli.roofline import plot
from glax.testing.check import one_line
from glax.testing.reference import reference
from glax.testing.tolerances import BARS

LIBRARIES = ("jax", "jaxlib", "fla-core", "mamba-ssm", "jax-linear-attention", "ejkernel")
TOKENS = 32  # the tokens that one program decodes in mode "step"
HEADS, SEEN = 4, 256  # heads and tokens of the first sequence that are compared with the reference, a loop in Python


def run(args) -> int:
    problems, modes = problems_of(args), list(dict.fromkeys(args.mode or ("forward", "train")))
    peers = chosen_peers(args.peer)
    if args.packed > 1 and "step" in modes:
        raise UsageError(
            f"argument --packed: one token of a sequence is not packed: leave out --mode step, got {args.packed}"
        )
    if args.out is not None:
        make_folder(args.out)
    with progress("timing", 1 + len(problems) * len(modes)) as advance:
        machine = ceilings({problem.dtype for problem in problems}, min(args.iters, 7))
        advance()
        results = []
        for problem in problems:
            for mode in modes:
                results.append(measured(problem, mode, args.iters, peers))
                advance()
    versions = dict(glax=__version__) | {name: version_of(name) for name in LIBRARIES}
    document = dict(device=jax.devices()[0].device_kind, versions=versions, machine=machine, results=results)
    if args.json:
        show_json(document)
    else:
        show(document)
    if args.out is not None:  # written after printing, so that a full disk does not cost the measurements
        note = written(document, args.out)
        if not args.json:
            show_text(note)
    return int(not all(result["ways"][0]["right"] for result in results))


def chosen_peers(named: list[str] | None) -> dict:
    """Return the peers to time, {name: function that prepares a `Way`}, as in `PEERS`.

    named: the names that the user gave; all peers, installed or not, if None or empty. Raises UsageError for a named peer that
    is not installed.
    """
    for peer in named or ():
        if lacking := missing(peer):
            raise UsageError(f"argument --peer: {peer} needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    return {name: prepare for name, prepare in PEERS.items() if not named or name in named}


def written(document: dict, folder: Path) -> str:
    """Write bench.json and its picture into `folder`. Return a text for the user that says so."""
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
    """Return what the device reaches: "copy_gbytes", the GB/s of a copy, and "matmul_gflops", the GFLOP/s of a product by
    dtype."""
    return dict(
        copy_gbytes=copy_gbytes(iters), matmul_gflops={dtype: matmul_gflops(dtype, iters) for dtype in sorted(dtypes)}
    )


def measured(problem: Problem, mode: str, iters: int, peers: dict) -> dict:
    """Return the results of glax and of the peers on one problem: all are prepared, compared with the reference, and then timed
    in turn. mode: "forward", "train" or "step". iters: samples of each. peers: as `chosen_peers` returns them."""
    arrays, state = problem.arrays(), None
    d_output = jax.random.normal(jax.random.key(1), arrays["value"].shape, problem.dtype)
    if mode == "step":
        arrays = {name: x if name == "g_gamma" else x[:, 0] for name, x in arrays.items()}
        state = jax.random.normal(jax.random.key(2), (problem.B, problem.H, problem.K, problem.V), jnp.float32)
    want = expected(problem, arrays, state)
    reports, ready = [], []
    for name, prepare in (("glax", by_glax), *peers.items()):
        report: dict[str, Any] = dict(name=name, ms=None, error=None, right=None, reason=None)
        reports.append(report)
        if lacking := missing(name):
            report["reason"] = f"{', '.join(lacking)} not installed"
            continue
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
    kernels = used(problem, mode, arrays, d_output, state)
    flops = problem.flops(mode, kernels)
    gflops = None if flops is None else flops / ms["median"] / 1e6
    return result | dict(kernels=kernels, flops=flops, gflops=gflops, gbytes=result["bytes"] / ms["median"] / 1e6)


def by_glax(problem: Problem, mode: str, arrays: dict, d_output, state) -> Way:
    """Return a `Way` to compute the problem by glax, compiled. The arguments are those of `call`."""
    f, operands = call(problem, mode, arrays, d_output, state)
    program = jax.jit(f).lower(*operands).compile()
    return Way("glax", lambda: program(*operands), calls=TOKENS if mode == "step" else 1)


def call(problem: Problem, mode: str, arrays: dict, d_output, state):
    """Return (a function whose first result is the output to compare, its operands). mode: "forward", "train" or "step".

    arrays: the arguments of `recurrent` by name, of one token for a step. d_output: the cotangent, read in "train" alone.
    state: the initial states, read in "step" alone.
    """
    match mode:
        case "forward":
            return problem.forward, (arrays,)
        case "train":
            return problem.train, (arrays, d_output)
        case _:
            return decode, (arrays, state)


def decode(arrays: dict, state):
    """Return (the output of the first token, the output after the last of TOKENS equal tokens, the last state)."""
    first, state = recurrent_step(**arrays, state=state)

    def step(_, carry):
        return recurrent_step(**arrays, state=carry[1])

    return first, *jax.lax.fori_loop(1, TOKENS, step, (first, state))


def used(problem: Problem, mode: str, arrays: dict, d_output, state) -> list[dict]:
    """Return the kernels that glax runs in the call: for each its name, config, selector, and chunk, which is 0 without one.

    The arguments are those of `call`.
    """
    f, operands = call(problem, mode, arrays, d_output, state)
    return [
        dict(name=d.kernel, config=str(d.config), selector=d.selector, chunk=getattr(d.config, "chunk", 0))
        for d in glax.explain(f, *operands)
    ]


def expected(problem: Problem, arrays: dict, state) -> np.ndarray:
    """Return the reference's output of the first batch row for a few heads and tokens, [tokens, heads, V], in float64.

    arrays, state: as in `call`; state is None but for a step.
    """
    each = problem.H // problem.G  # heads of value for one of query and key
    shared = max(1, HEADS // each)
    heads = shared * each
    if state is not None:
        arrays = {name: x if name == "g_gamma" else x[:, None] for name, x in arrays.items()}
    few: dict = {}
    for name, x in arrays.items():
        own = shared if name in ("query", "key") else heads
        few[name] = x[:heads] if name == "g_gamma" else x[:1, :SEEN, :own]
    if state is not None:
        few["initial_state"] = state[:1, :heads]
    elif problem.packed > 1:
        few["cu_seqlens"] = np.minimum(problem.boundaries, few["query"].shape[1])
    return np.asarray(reference(bind(**few)).output[0])


def judged(result, want: np.ndarray, bar: float) -> tuple[float | None, bool]:
    """Return (the relative RMS error of the result where the reference `want` is known, None if it is not finite; whether it is
    at most `bar`)."""
    output = result[0] if isinstance(result, tuple) else result
    tokens, heads, _ = want.shape
    got = as_numpy(output[0]).reshape(-1, *output.shape[-2:])[:tokens, :heads]
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(result) if isinstance(x, jax.Array))
    return (error if np.isfinite(error) else None), finite and error <= bar


def show(document: dict):
    machine = document["machine"]
    products = ", ".join(f"{g:,.0f} GFLOP/s in a {dtype} product" for dtype, g in machine["matmul_gflops"].items())
    show_text(f"{document['device']}: {machine['copy_gbytes']:,.1f} GB/s in a copy; {products}")
    notes: dict[str, list[str]] = {}
    for result in document["results"]:
        problem = Problem(**result["problem"])
        name = problem.title(result["mode"])
        for way in result["ways"]:
            if way["ms"] is None and not missing(way["name"]):
                notes.setdefault(f"{way['name']}: {way['reason']}", []).append(name)
        show_result(name, problem.dtype, result, machine)
    print()
    for note, names in notes.items():
        every = len(names) == len(document["results"])
        show_text(note if every else f"{note} ({'; '.join(names)})")
    if lacking := [way["name"] for way in document["results"][0]["ways"] if missing(way["name"])]:
        show_text(f"not installed, and not timed: {', '.join(lacking)}")


def show_result(name: str, dtype: str, result: dict, machine: dict):
    """Print the times of one call for each library that ran, the rates of glax, and its kernels. machine: the result of
    `ceilings`."""
    own, rows = result["ways"][0]["ms"], []
    for way in result["ways"]:
        if (ms := way["ms"]) is None:
            continue
        times = f"{ms['median'] / own['median']:.2f}x" if own and way["name"] != "glax" else None
        verdict = "" if way["right"] else "WRONG"
        rows.append((way["name"], ms["median"], f"{ms['p20']:.3g} - {ms['p80']:.3g}", times, way["error"], verdict))
    if rows:
        print()
        show_table(("by", "ms", "p20 - p80", "of glax's", "error", ""), rows, title=name)
    if own is None:
        return
    rates = [f"{result['gbytes']:,.1f} GB/s, {result['gbytes'] / machine['copy_gbytes']:.1%} of a copy"]
    if result["gflops"] is not None:
        share = result["gflops"] / machine["matmul_gflops"][dtype]
        rates.append(f"{result['gflops']:,.1f} GFLOP/s, {share:.1%} of a product")
    show_text(f"glax moves {'; computes '.join(rates)}")
    for kernel in result["kernels"]:
        show_text(f"glax ran {used_text(kernel)}")


def used_text(kernel: dict) -> str:
    return f"{kernel['name']} with {kernel['config']}, by {kernel['selector']}"
