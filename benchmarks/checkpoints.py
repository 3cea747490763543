"""Measure models of public sizes with random weights, glax beside transformers with fla's kernels, on one GPU.

python benchmarks/checkpoints.py --folder DIR --json FILE                      # Qwen3.5-4B, every part, by both libraries
python benchmarks/checkpoints.py --folder DIR --model kimi --what load decode prefill --by glax
python benchmarks/checkpoints.py --folder DIR --compile 16                     # the candidates of fla's kernels first
python benchmarks/checkpoints.py --folder DIR --check --model tiny-qwen3.5 tiny-kimi     # on a CPU: equal logits in float32
python benchmarks/checkpoints.py --folder DIR --model tiny-qwen3.5             # every part at tiny sizes, on a CPU too

DIR gets config.json, weights and tokenizers of each model, and a file of logits. Every part of a library runs in a process of its
own, so that peaks of memory are apart, and has a limit of time. What a part has yielded before an error or the limit counts.

load:    `from_pretrained` from files in the system's cache, beside reading them and sending them to the device; and logits of
         64 tokens by both libraries
decode:  a token behind prompts of 512, the difference of two calls of `generate`, greedy, by the number of sequences
prefill: 8 x 4096 tokens: glax's `generate` of one token, and a call of transformers' model that gives the last logits
lora:    a step of fine-tuning low-rank terms of the projections of attention and recurrence, everything recomputed
full:    the same of all parameters in float32, of 8 layers of the model
first:   seconds of a fresh process to its first token: `glax generate`, by what its folder of compiled programs holds

host_gib: more memory of the host at the peak than before the call, with mapped files; anonymous_gib: without those. gib: the
device's memory at the peak of the process. first_s: seconds of the first call. share: of the device's peak in matrix products,
by the formulas of glax.models.operations.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import numpy as np
from checkpoints_folder import CONFIGS, weight_files, write_folder
from checkpoints_job import Job
from children import ended, lines_in, say
from output import table, write

PARTS = ("load", "decode", "prefill", "lora", "full", "first")
BY = ("glax", "transformers")
SMALL = {"qwen3.5-4b": "qwen3.5-1.5b", "tiny-qwen3.5": "tiny-qwen3.5-4-layers"}  # trained whole
LEAST = 20.0  # seconds, below which no part begins
CHECKED = 1e-3  # of the largest logit, in float32
# What glax's rate should be over transformers', for all cases of a part or by case.
FASTER: dict[str, Any] = dict(decode={"B = 1": 3.0, "B = 64": 2.0}, prefill=1.15, lora=1.5, full=1.5)


def child(options, part: str, by: str):
    """Run one part, and print a line for each result."""
    name = options.model[0]
    small = options.folder / SMALL[name] if name in SMALL else None
    arrays = agreement_file(options, name, by)
    job = Job(name, options.folder / name, small, arrays, options.dtype, options.began, tuple(options.batches))
    if by == "glax":
        import checkpoints_glax as parts

        about = {}
    else:
        import torch

        if not torch.cuda.is_available():
            sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]  # as the import system marks what is not there
        import checkpoints_torch as parts

        if part == "compile":
            compile_kernels(options, job, parts)
            return
        about = parts.about()
        print("transformers:", json.dumps(about), file=sys.stderr)
    run = dict(
        load=parts.load, logits=parts.logits, prefill=parts.prefill, decode=parts.decode,
        lora=functools.partial(parts.tune, whole=False), full=functools.partial(parts.tune, whole=True), first=parts.first,
    )[part]  # fmt: skip
    for line in run(job):
        say(line)
    if by != "glax":
        say(dict(problem="kernels", **about, fallbacks=parts.FALLBACKS.lines))


def compile_kernels(options, job: Job, parts):
    """Compile every candidate of fla's kernels by --compile processes, or one of their parts."""
    import triton_tuning

    if options.part:
        parts.compile_a_part(job, triton_tuning.a_part(options.part))
        return
    again = [__file__, *sys.argv[1:], "--part"]
    triton_tuning.compile_in_parts(again, options.compile)


def lines_of(options, name: str, part: str, by: str) -> Iterator[dict[str, Any]]:
    """Run one part of a library in a process of its own, and yield its results, and how it failed."""
    began = time.time()
    left = options.seconds - (began - options.start)
    if left < LEAST:
        yield dict(failure=f"not begun: {left:.0f} s of --seconds are left")
        return
    environment = os.environ | dict(HF_HUB_OFFLINE="1")
    if options.check:
        environment |= dict(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, __file__, "--child", part, by, "--model", name, "--folder", str(options.folder)]
    command += ["--dtype", options.dtype, "--began", str(began), "--compile", str(options.compile)]
    command += ["--batches", *map(str, options.batches)] if options.batches else []
    output, errors, failure = ended(command, environment, min(options.limit, left))
    yield from lines_in(output)
    if failure:
        last = [x for x in errors.splitlines() if x.strip()][-3:]
        yield dict(failure=f"{failure}: {' '.join(last)[:300]}")
        print(errors[-options.shown :], file=sys.stderr)
    yield dict(problem="process", seconds=time.time() - began)


def measured(options, name: str, part: str) -> list[dict[str, Any]]:
    """Return the lines of a part by each library."""
    found = []
    for by in BY:
        agreement_file(options, name, by).unlink(missing_ok=True)
    for by in options.by if part != "compile" else ["transformers"]:
        lines = [dict(model=name, mode=part, implementation=by) | line for line in lines_of(options, name, part, by)]
        for line in lines:
            if "tokens_per_second" in line and (share := share_of(name, line)) is not None:
                line["share"] = share
            print(json.dumps({key: rounded(x) for key, x in line.items()}), flush=True)
        found += lines
    if part in ("load", "logits") and all(agreement_file(options, name, by).exists() for by in BY):
        found.append(dict(model=name, mode=part, implementation="both", **agreement(options, name)))
        print(json.dumps(found[-1]), flush=True)
    return found


def rounded(x: Any) -> Any:
    return float(f"{x:.5g}") if isinstance(x, float) else x


def share_of(name: str, line: dict[str, Any]) -> float | None:
    """Return the share of the device's peak that a call's formulas come to; None of decoding and lora, and without a peak."""
    import jax

    from glax.models.config import ModelConfig
    from glax.models.load import abstract_model
    from glax.models.operations import PEAKS, flops_per_token

    kind = jax.devices()[0].device_kind
    peak = next((x for device, x in PEAKS.items() if device in kind), None)
    if peak is None or line["mode"] not in ("prefill", "full"):
        return None
    model = abstract_model(ModelConfig.of(CONFIGS[SMALL[name] if line["mode"] == "full" else name]))
    operations = flops_per_token(model, int(line["problem"].split()[-1]))
    if line["mode"] == "prefill":  # without a gradient, and the head reads the last token alone
        operations = (operations - 6 * model.vocabulary * model.width) / 3
    return operations * line["tokens_per_second"] / peak


def agreement_file(options, name: str, by: str) -> Path:
    return options.folder / f"logits-{name}-{by}.npy"


def agreement(options, name: str) -> dict[str, Any]:
    """Return how far the logits of both libraries differ, and the share of tokens whose likeliest next token is the same."""
    ours, theirs = (np.load(agreement_file(options, name, by)) for by in BY)
    largest = float(np.abs(theirs).max())
    return dict(
        problem="logits", tokens=len(ours), equal_argmax=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        largest_difference=float(np.abs(ours - theirs).max()), largest_logit=largest,
        error=float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
    )  # fmt: skip


# ---- the table -------------------------------------------------------------------------------------------------------


def compared(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure: of both libraries, how many times better glax's is, and the bar. These are glax's rates over
    transformers', and transformers' seconds and memory over glax's."""
    measured = [x for x in lines if x["implementation"] in BY and "problem" in x]
    cases = dict.fromkeys((x["model"], x["mode"], x["problem"]) for x in measured)
    for model, part, case in cases:
        both = {
            x["implementation"]: x for x in lines if (x["model"], x["mode"], x.get("problem")) == (model, part, case)
        }
        for figure in ("seconds", "tokens_per_second", "share", "first_s", "gib", "host_gib", "anonymous_gib"):
            ours, theirs = (both.get(by, {}).get(figure) for by in BY)
            if (ours is None and theirs is None) or case in ("process", "logits"):
                continue
            row = dict(model=model, what=f"{part}, {case}", figure=figure, glax=ours, transformers=theirs)
            if ours and theirs and figure != "share":
                row["times"] = ours / theirs if figure == "tokens_per_second" else theirs / ours
                row["bar"] = bar_of(part, case, figure)
                if row["bar"] is not None:
                    row["met"] = "yes" if row["times"] >= row["bar"] else "no"
            yield row


def bar_of(part: str, case: str, figure: str) -> float | None:
    if figure == "gib" and part != "load":
        return 1.0
    found = FASTER.get(part) if figure == "tokens_per_second" else None
    return found.get(case) if isinstance(found, dict) else found


def show(lines: list[dict[str, Any]]):
    columns = ("model", "what", "figure", "glax", "transformers", "times", "bar", "met")
    rows = [{name: row.get(name) for name in columns} for row in compared(lines)]
    if rows:
        print("\n" + table(rows))
    for line in lines:
        if line.get("problem") == "logits" and "equal_argmax" in line:
            same = f"{line['equal_argmax']:.0%} of {line['tokens']} tokens have the same likeliest next one"
            print(f"{line['model']}: {same}, and the logits differ by {line['error']:.2g}, relative")
        elif "failure" in line:
            print(f"{line['model']}, {line['mode']} by {line['implementation']}: {line['failure']}")
    used = [x for x in lines if x.get("problem") in ("process", "write")]
    print(table([{name: x.get(name) for name in ("model", "mode", "implementation", "seconds")} for x in used]))


# ---- the run ---------------------------------------------------------------------------------------------------------


def prepared(options, name: str) -> list[dict[str, Any]]:
    """Write the folders of a model, and read them once, so that the system holds them in memory."""
    found = []
    for each in dict.fromkeys((name, SMALL.get(name, name))):
        began = time.perf_counter()
        size = write_folder(options.folder / each, CONFIGS[each])
        seconds = time.perf_counter() - began
        for path in weight_files(options.folder / each):
            with open(path, "rb", buffering=0) as file:
                while file.read(2**26):
                    pass
        found.append(dict(model=each, mode="write", implementation="-", problem="write", seconds=seconds, bytes=size))
        print(json.dumps(found[-1]), flush=True)
    return found


def check(options) -> int:
    """Compare the logits of both libraries in float32 on the CPU. Return 1 if they differ."""
    options.dtype, options.by, failed = "float32", list(BY), False
    for name in options.model:
        prepared(options, name)
        found = next((x for x in measured(options, name, "logits") if "largest_logit" in x), None)
        good = found is not None and found["largest_difference"] <= CHECKED * found["largest_logit"]
        print(f"{name}: {'the logits agree' if good else 'THE LOGITS DIFFER, or were not compared'}")
        failed |= not good
    return int(failed)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", choices=[x for x in CONFIGS if x not in SMALL.values()], default=["qwen3.5-4b"])
    add(
        "--batches",
        nargs="+",
        type=int,
        default=[],
        metavar="B",
        help="sequences of decoding, in place of 1, 16 and 64",
    )
    parts = (*PARTS, "logits", "tune")
    add("--what", nargs="+", choices=parts, default=list(PARTS), help="in this order; tune is lora and full")
    add("--by", nargs="+", choices=BY, default=list(BY))
    add("--folder", type=Path, required=True, help="for the models; 12 GB of Qwen3.5-4B, 9 GB of kimi")
    add("--json", type=Path, help="the file for the results, written after each part")
    add("--limit", type=float, default=400, help="seconds of one part of one library")
    add("--seconds", type=float, default=1e9, help="of the whole run: no part begins behind them")
    add(
        "--compile",
        type=int,
        default=0,
        metavar="N",
        help="compile the candidates of fla's kernels first, in N processes",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--check", action="store_true", help="compare logits in float32 on the CPU, and measure nothing")
    add("--shown", type=int, default=2000, help="characters of a failed process's errors")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    add("--part", help=argparse.SUPPRESS)
    add("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.what = [x for part in options.what for x in (("lora", "full") if part == "tune" else (part,))]
    options.start = time.time()
    return options


def main() -> int:
    options = parsed()
    if options.child:
        child(options, *options.child)
        return 0
    if options.check:
        return check(options)
    lines = []
    for name in options.model:
        lines += prepared(options, name)
        compiled = ["compile"] if options.compile and "transformers" in options.by else []
        for part in (*compiled, *options.what):
            if part == "full" and name not in SMALL:
                continue
            lines += measured(options, name, part)
            if options.json:
                write(options.json, lines)
    show(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
