"""Measure the trainer of `glax train` on one and several devices: tokens per second, memory, the first step, collectives.

python benchmarks/training.py --json FILE                        # all cases, on all devices of this machine
python benchmarks/training.py --only gla-1.3b/1 gla-1.3b/fsdp --profile     # and how long collectives alone run
python benchmarks/training.py --only 'gdn-1.3b/*' --vocabulary 128256       # beside jla's trainer at the sizes of its own claims
python benchmarks/training.py --tiny                             # every case at tiny sizes, on a CPU too

1:          one device, 4 rows of 2048 tokens; 8 rows of gla-340m
jla:        the same by the trainer of jax-linear-attention, where it is installed
fsdp:       all parameters sharded over N devices, 4 rows on each
tensor:     tensor = 2 and fsdp = N / 2, with as many rows in all
sequence-1: one device, as many of 4 rows of 32,768 tokens as fit it. Its blocks are recomputed in the backward pass, as those of
            `sequence` are
sequence:   the same rows, over N devices

A case runs `glax.models.training.train` in a process of its own, on a text of random words, with bfloat16 activations and float32
parameters. It ends before the last checkpoint. The rate is the median of the steps in history.jsonl behind the first few.
first_s: seconds from the start of the process to the end of the first step; begun_s: to its beginning. Cases share a folder of
compiled programs, and equal programs are compiled once. parameters_gib, optimizer_gib: on the first device;
memory_share: the sum of both, over the sum of one device. gib: the largest peak of a device. share: the MFU of docs/training.md.
Milliseconds of a step under --profile are those of `meters.exposed`.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from children import ended, lines_in, say

WARM, LONG_WARM = 4, 2  # steps before those that are timed; of long rows fewer, whose steps take seconds
LONG_STEPS, PROFILED = 5, 3  # the most steps of long rows that are timed, and steps of a profile
WORDS_OF_TEXT = 400_000
LEAST = 30.0  # seconds, below which no case begins
GIB = 2**30
COLUMNS = (
    "case", "devices", "problem", "tokens_per_second", "ms", "speedup", "efficiency", "share", "parameters_gib",
    "optimizer_gib", "memory_share", "gib", "first_s",
)  # fmt: skip
SHARED: dict[str, Any] = dict(vocab_size=32000, tie_word_embeddings=False)
GLA: dict[str, Any] = SHARED | dict(model_type="gla", num_hidden_layers=24, num_heads=4, expand_k=0.5, expand_v=1.0)
DELTA: dict[str, Any] = SHARED | dict(
    model_type="gated_deltanet", num_hidden_layers=24, num_heads=16, head_dim=128, expand_v=1.0
)
MODELS = {
    "gla-340m": GLA | dict(hidden_size=1024, intermediate_size=2816),
    "gla-1.3b": GLA | dict(hidden_size=2048, intermediate_size=5632),
    "gdn-1.3b": DELTA | dict(hidden_size=2048, intermediate_size=5632),
}
TINY = dict(vocab_size=512, num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_heads=4, head_dim=16)


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold what a process measures.

    mesh: the axes of `glax.models.training.TrainingConfig`. beside: the case of one device that it is compared with. fewer:
    whether it is tried with fewer rows where these have no memory.
    """

    model: str
    kind: str
    mesh: Mapping[str, int]
    rows: int
    length: int
    remat: str | None = None
    beside: str | None = None
    fewer: bool = False
    by: str = "glax"

    @property
    def name(self) -> str:
        return f"{self.model}/{self.kind}"

    @property
    def devices(self) -> int:
        return int(np.prod([*self.mesh.values()]))


def cases(count: int, tiny: bool) -> list[Case]:
    """Return the cases for `count` devices, the most telling first."""
    rows, short, long = 4, 64 if tiny else 2048, 256 if tiny else 32768
    made = []
    for model in ("gla-1.3b", "gdn-1.3b"):
        one, alone = f"{model}/1", f"{model}/sequence-1"
        made += [
            Case(model, "1", {}, rows, short),
            Case(model, "fsdp", dict(fsdp=count), rows * count, short, beside=one),
            Case(model, "tensor", dict(tensor=2, fsdp=count // 2), rows * count, short, beside=one),
            Case(model, "sequence-1", {}, rows, long, "full", fewer=True),
            Case(model, "sequence", dict(sequence=count), rows, long, "full", beside=alone),
        ]
    made.append(Case("gdn-1.3b", "jla", {}, rows, short, by="jla", beside="gdn-1.3b/1"))
    made.append(Case("gla-340m", "1", {}, 2 * rows, short))
    order = (
        "gla-1.3b/1", "gla-1.3b/fsdp", "gdn-1.3b/1", "gdn-1.3b/fsdp", "gla-1.3b/sequence-1", "gla-1.3b/sequence",
        "gdn-1.3b/jla", "gla-340m/1", "gla-1.3b/tensor", "gdn-1.3b/tensor", "gdn-1.3b/sequence-1", "gdn-1.3b/sequence",
    )  # fmt: skip
    by_name = {case.name: case for case in made}
    missing = {"jla"} if importlib.util.find_spec("jla") is None else set()
    missing |= {"fsdp", "tensor", "sequence", "sequence-1"} if count == 1 else set()
    missing |= {"tensor"} if count % 2 else set()
    return [by_name[name] for name in order if by_name[name].kind not in missing]


def model_of(options, name: str) -> dict[str, Any]:
    """Return the config of a model, in the form of fla."""
    model = MODELS[name] | (TINY if options.tiny else {})
    return model | (dict(vocab_size=options.vocabulary) if options.vocabulary else {})


# ---- one case, in a process of its own -------------------------------------------------------------------------------


class Measured(Exception):
    """End a training when all its steps are measured. `train` would save a checkpoint and the model."""


def bytes_here(arrays) -> int:
    """Return the bytes of arrays on the first device."""
    import jax

    here = jax.local_devices()[0]
    held = [x for x in arrays if here in x.sharding.device_set]
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in held)


@dataclasses.dataclass
class Meter:
    """Measure a training from its callbacks. began: when the process was started. steps: after which it ends."""

    began: float
    length: int
    steps: int
    line: dict[str, Any] = dataclasses.field(default_factory=dict)

    def begin(self, beginning):
        import jax
        from flax import nnx

        from glax.models.operations import utilisation

        params = jax.tree.leaves(nnx.state(beginning.model, nnx.Param))
        self.line |= dict(
            begun_s=time.time() - self.began,
            parameters=sum(x.size for x in params),
            parameters_gib=bytes_here(params) / GIB,
            share=utilisation(beginning.model, self.length, 1.0),  # of one token a second
        )

    def each_step(self, step: int, loss: float, seconds: float) -> bool:
        import jax
        import jax.numpy as jnp

        if step == 1:
            held = [x for x in jax.live_arrays() if jnp.issubdtype(x.dtype, jnp.floating)]
            self.line["first_s"] = time.time() - self.began
            self.line["optimizer_gib"] = bytes_here(held) / GIB - self.line["parameters_gib"]
        if step == self.steps:
            raise Measured
        return False


def by_glax(case: Case, options) -> dict[str, Any]:
    """Return the figures of a training by glax."""
    import jax

    from glax.models import training

    warm, timed = (LONG_WARM, min(options.steps, LONG_STEPS)) if case.remat == "full" else (WARM, options.steps)
    last = warm + timed
    steps = last + 1 + PROFILED if options.profile else last
    out = options.folder / case.name.replace("/", "-")
    shutil.rmtree(out, ignore_errors=True)
    sizes: dict[str, Any] = dict(
        steps=steps, batch=case.rows, length=case.length, checkpoint_every=steps, remat=case.remat
    )
    if options.no_overlap:
        training.OVERLAP = {}  # which the step reads when it is built
    config = training.TrainingConfig(
        model_of(options, case.model),
        str(options.folder / "text.txt"),
        tokenizer=str(options.folder / "words.json"),
        out=str(out),
        dtype="bfloat16",
        profile=[last + 2, steps] if options.profile else None,
        **sizes | dict(case.mesh),
    )
    meter = Meter(options.began, case.length, steps)
    with contextlib.suppress(Measured):
        training.train(config, meter.each_step, meter.begin)
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    rates = [x["tokens_per_second"] for x in history if warm < x["step"] <= last]
    rate, share = statistics.median(rates), meter.line.pop("share")
    stats = [device.memory_stats() or {} for device in jax.local_devices()]  # None on a CPU
    line = dict(
        tokens_per_second=round(rate),
        lowest=round(min(rates)),
        ms=1e3 * case.rows * case.length / rate,
        share=share and share * rate,
        gib=max(x.get("peak_bytes_in_use", 0) for x in stats) / GIB or None,
        loss=history[-1]["loss"],
    )
    return line | meter.line | (profiled(out / "profile") if options.profile else {})


def profiled(folder: Path) -> dict[str, float]:
    """Return the milliseconds of a step from a profile, by `meters.exposed`; the kinds of collectives go to standard error."""
    from meters import events_of, exposed, is_collective

    events = list(events_of(folder))
    kinds: dict[str, float] = {}
    for event in filter(is_collective, events):
        kinds[event.name] = kinds.get(event.name, 0.0) + event.milliseconds / PROFILED
    for name, ms in sorted(kinds.items(), key=lambda x: -x[1]):
        print(f"{ms:9.2f} ms a step on all devices: {name}", file=sys.stderr)
    return {name: ms / PROFILED for name, ms in exposed(events).items()}


def by_jla(case: Case, options) -> dict[str, Any]:
    """Return the rate of jla's trainer with the settings of its own benchmark, as `models.jla_config` names them."""
    import jax
    from jla.config import DataConfig, ExperimentConfig, MeshConfig, RuntimeConfig, TrainConfig
    from jla.launch_env import launch
    from jla.training.trainer import Trainer
    from models import jla_config

    launch(RuntimeConfig(xla_tuning_level=1))
    window = max(options.steps // 3, 1)
    train = TrainConfig(
        max_steps=4 * window,
        seq_len=case.length,
        micro_batch_per_replica=case.rows // case.devices,
        log_every=window,
        dispatch_ahead=True,
        ce_impl="auto",
        ce_grad_in_forward=True,
        update_guard="select",
        final_eval=False,
        save_final=False,
        resume="never",
        output_dir=str(options.folder / "jla"),
    )
    config = ExperimentConfig(
        model=jla_config(model_of(options, case.model), False),
        train=train,
        data=DataConfig(synthetic_kind="uniform"),
        mesh=MeshConfig(fsdp=case.devices),
    )
    history = Trainer(config, devices=jax.devices()[: case.devices]).run().history
    rate = statistics.median(x["tokens_per_sec"] for x in history[1:])
    stats = jax.devices()[0].memory_stats() or {}
    gib = stats.get("peak_bytes_in_use", 0) / GIB or None
    return dict(
        tokens_per_second=round(rate), ms=1e3 * case.rows * case.length / rate, gib=gib, loss=history[-1]["loss"]
    )


# ---- the run ---------------------------------------------------------------------------------------------------------


def measured(options, case: Case) -> Iterator[dict[str, Any]]:
    """Yield the result of a case from a process of its own, or how it failed; several if it is tried with fewer rows."""
    while True:
        began = time.time()
        about = dict(case=case.name, model=case.model, mode="training", implementation=case.by, devices=case.devices)
        about |= dict(problem=f"{case.rows} x {case.length}", mesh=dict(case.mesh), remat=case.remat)
        left = options.seconds - (began - options.start)
        if left < LEAST:
            yield about | dict(failure=f"not begun: {left:.0f} s of --seconds are left")
            return
        command = [sys.executable, __file__, "--child", json.dumps(dataclasses.asdict(case)), *options.passed]
        command += ["--folder", str(options.folder), "--began", str(began)]
        output, errors, failure = ended(command, options.environment, min(options.limit, left))
        found = next(lines_in(output), {})
        if options.profile:
            print("\n".join(x for x in errors.splitlines() if " ms a step on all devices" in x))
        if failure and not found:
            print(errors[-options.shown :], file=sys.stderr)
            found = dict(failure=f"{failure}: {errors.strip()[-300:]}")
        yield about | dict(rows=case.rows, seconds=time.time() - began) | found
        if not case.fewer or case.rows == 1 or "memory" not in found.get("failure", ""):
            return
        case = dataclasses.replace(case, rows=case.rows // 2)


def child(options):
    """Measure one case, and print its result."""
    import jax

    case = Case(**json.loads(options.child))
    try:
        say((by_jla if case.by == "jla" else by_glax)(case, options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(dict(failure=f"no memory: {str(error)[:200]}"))


def compared(line: dict[str, Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """Return a result with what it is of one device's."""
    if (
        one is None
        or not {"tokens_per_second"} <= line.keys() & one.keys()
        or line["problem"].split()[-1] != one["problem"].split()[-1]
    ):
        return line
    speedup = line["tokens_per_second"] / one["tokens_per_second"]
    line = line | dict(speedup=speedup, efficiency=speedup / line["devices"])
    if "optimizer_gib" in line:
        held, held_by_one = (x["parameters_gib"] + x["optimizer_gib"] for x in (line, one))
        line["memory_share"] = held / held_by_one
    return line


# What is wanted: (case, figure, at least, at most, the number of devices it is for).
BARS = (
    ("*/fsdp", "speedup", 3.5, None, 4),
    ("*/tensor", "speedup", 2.8, None, 4),
    ("*/sequence", "speedup", 3.4, None, 4),
    ("*/fsdp", "memory_share", None, 0.27, 4),
    ("gla-340m/1", "tokens_per_second", 176_000, None, 1),
    ("gla-1.3b/1", "tokens_per_second", 57_500, None, 1),
    ("*/1", "first_s", None, 40, 1),
    ("gdn-1.3b/jla", "speedup", None, 1, 1),
)


def show(lines: list[dict[str, Any]], bars):
    """Print a table of the results, those of `bars` that are for these devices, and the failures."""
    from output import table

    good = [line for line in lines if "failure" not in line]
    if good:
        print("\n" + table([{name: line.get(name) for name in COLUMNS} for line in good]))
    if parts := [x for x in good if "exposed_ms" in x]:
        names = ("case", "all_ms", "compute_ms", "collectives_ms", "exposed_ms", "idle_ms")
        print("\n" + table([{name: line[name] for name in names} for line in parts]))
    for line in good:
        for pattern, figure, least, most, devices in bars:
            if not fnmatch.fnmatch(line["case"], pattern) or line["devices"] != devices or not line.get(figure):
                continue
            met = line[figure] >= least if least is not None else line[figure] <= most
            wanted = f"at least {least}" if least is not None else f"at most {most}"
            print(f"{line['case']}: {figure} {line[figure]:.4g}, wanted {wanted}: {'met' if met else 'MISSED'}")
    for line in lines:
        if "failure" in line:
            print(f"{line['case']}, {line['problem']}: {line['failure']}")


def prepared(options):
    """Write a text of random words, and a tokenizer with a token for each."""
    from checkpoints_folder import write_tokenizers

    vocabulary = model_of(options, "gla-1.3b")["vocab_size"]
    options.folder.mkdir(parents=True, exist_ok=True)
    write_tokenizers(options.folder, vocabulary)
    words = np.random.default_rng(0).integers(1, vocabulary, WORDS_OF_TEXT // (20 if options.tiny else 1))
    (options.folder / "text.txt").write_text(" ".join(map(str, words)))


def run(options) -> int:
    options.environment = dict(JAX_COMPILATION_CACHE_DIR=str(options.folder / "programs")) | dict(os.environ)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process leaves the memory to those that are measured
    import jax
    from output import write

    count = options.devices or jax.device_count()
    patterns = options.only or ["*"]
    chosen = [x for x in cases(count, options.tiny) if any(fnmatch.fnmatch(x.name, each) for each in patterns)]
    if not chosen:
        known = ", ".join(x.name for x in cases(count, options.tiny))
        raise SystemExit(
            f"--only must match a case for {count} devices, got {' '.join(options.only)}: these are {known}"
        )
    prepared(options)
    lines, ones = [], {x["case"]: x for path in options.beside for x in json.loads(path.read_text())["results"]}
    for case in chosen:
        one = ones.get(case.beside)
        if one is not None and "rows" in one and case.kind == "sequence":
            case = dataclasses.replace(case, rows=one["rows"])
        for line in measured(options, case):
            line = compared(line, one)
            if "tokens_per_second" in line:
                ones[case.name] = line
            lines.append(line)
            print(
                json.dumps({name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in line.items()}),
                flush=True,
            )
        if options.json:
            write(options.json, lines)
    show(lines, () if options.tiny else BARS)
    return int(any(not x["failure"].startswith(("no memory", "not begun")) for x in lines if "failure" in x))


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="CASE", help="names of cases or patterns, such as '*/fsdp'")
    add("--devices", type=int, help="N; all of this machine if left out")
    add("--steps", type=int, default=15, help="that are timed; default: %(default)s")
    add("--profile", action="store_true", help=f"a profile of {PROFILED} further steps, and how long collectives run")
    add("--vocabulary", type=int, help="in place of each model's own, 32000")
    add("--no-overlap", action="store_true", help="steps on several GPUs without XLA's latency-hiding scheduler")
    add("--tiny", action="store_true", help="tiny models and rows")
    add("--beside", nargs="+", type=Path, default=[], help="results that others are compared with, of earlier runs")
    add("--json", type=Path, help="the file for the results, written after each case")
    add("--seconds", type=float, default=1e9, help="of the whole run: no case begins behind them")
    add("--limit", type=float, default=240, help="seconds of one case; default: %(default)s")
    add("--shown", type=int, default=2000, help="characters of a failed process's errors")
    add("--folder", type=Path, help="of the text, compiled programs and runs; a new one if left out")
    add("--child", help=argparse.SUPPRESS)
    add("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.start = time.time()
    options.passed = ["--steps", str(options.steps), *(["--profile"] if options.profile else [])]
    options.passed += ["--no-overlap"] if options.no_overlap else []
    options.passed += ["--tiny"] if options.tiny else []
    options.passed += ["--vocabulary", str(options.vocabulary)] if options.vocabulary else []
    return options


def main() -> int:
    options = parsed()
    if options.child:
        child(options)
        return 0
    if options.folder:
        return run(options)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
