"""Write docs/performance.md from what was measured: benchmarks/results/<device>/*.json.

python docs/performance_page.py            prints the page
python docs/performance_page.py --write    replaces the page
"""

import argparse
import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
H100 = "NVIDIA H100 80GB"
MODES = "forward", "with gradient"
MOST = 8  # rows of a table of extremes

INTRODUCTION = """\
# Performance

This page is generated from the files in `benchmarks/results`, which hold every run with its device, date, versions and command.

- A problem is B, T, H, K, V: batch, time, heads, key width, value width. Arrays are bfloat16 on GPUs and float32 on CPUs.
- *Floor* is the time to read each input once and to write each output once, at the rate of a copy on that device.
- *With gradient* is forward and gradient together. Times are milliseconds, medians over all runs of a call.
- A result is left out once the same call was measured again with a newer kernel. It stays in its file.

Rates depend on the device, the host and the versions, so measure yours: `glax bench`, or `glax bench --like GLA-1.3B`.

![The time of the fastest peer over the time of glax, for every call that was timed beside one](_static/speed.svg)
"""

CHECKPOINTS = """\
Qwen3.5-4B with random weights in bfloat16 on one H200, beside transformers 5.17 with the kernels of fla-core 0.6.0
(`benchmarks/checkpoints.py`):

| call | glax | transformers | ratio |
|---|---|---|---|
| prefill, 8 x 4,096 tokens | 535 ms | 800 ms | 1.50x |
| a step of LoRA of rank 16, 4 x 2,048 tokens, recomputed | 412 ms, 13.6 GiB | 811 ms, 32.1 GiB | 1.97x |
| a token of 1 sequence behind 512, two runs | 3.6 and 5.8 ms | 49.7 ms | 13.7x and 8.6x |
| a token of 64, two runs | 7.8 and 8.3 ms | 68.3 ms | 8.7x and 8.2x |

A token of 1 sequence takes 2.3 ms in a later version. Its process holds 8.6 GiB of the GPU with stored programs and 9.4 where
XLA tunes them first, and transformers 8.0.

transformers decodes without its compiled caches, one call of the host a kernel. The second run of glax had 12 compiling
processes beside it.
"""

LOSSES = """\
Measured, and not in a table of this page:

- cuDNN frontend 1.32's kernel of KDA takes less than a half of glax's forward time at gates of at least -5.
  Most KDA models train with such gates.
  At gates near 0 it took 1.25 to 3.9 times glax's time before 29 November 2026; glax has become faster since.
- JAX 0.12 slows Hopper's kernels down: [](troubleshooting.md#jax-0-12-on-hopper-gpus). The tables are of JAX 0.11.
- Packed sequences on Hopper pay for a check that their results are finite: 21 to 31 us a forward, 64 to 200 us with gradient.
- `erase_along` has chunked kernels of its own on GPUs with per-key gates and heads up to 64 wide alone, as in RWKV-7.
  Elsewhere Triton runs it as two rows a token, and CUDA's kernels token by token.
- `from_pretrained` loads Qwen3.5-4B onto an H200 in 3.4 to 4.1 seconds, transformers in 1.6.
  It takes 1.1 GiB of the host's memory for 7.8. The device's peak is 9.5 GiB for 8.1.
- Sharded parameters in a plain `jit` train GLA-1.3B only 1.66 times as fast on four H100 as on one.
- The first token of `glax generate` with Qwen3.5-4B takes 29 to 35 seconds in a fresh process on an H200, most of which compiles,
  and 13 to 17 seconds with stored programs. The first step of `glax train` takes 46 to 63 seconds.
- Products of rows by their experts' matrices run at .79 of the rate of one dense product forward, and .89 with gradient.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of a file of results, with what the file says of all its lines."""

    file: str
    about: dict
    values: dict

    def get(self, name: str, default=None):
        return self.values.get(name, default)

    @property
    def call(self) -> tuple:
        """What was computed, without who computed it."""
        return tuple(self.get(name, "") for name in ("problem", "gate", "mode", "model", "packing"))

    @property
    def is_ours(self) -> bool:
        return self.get("implementation").startswith("glax")

    @property
    def is_measured(self) -> bool:
        return self.about.get("kind") != "estimated"

    @property
    def device(self) -> str:
        return self.about["device"]

    @property
    def title(self) -> str:
        """The problem, with the model, the packing or what else sets the call apart."""
        extra = [self.get(name) for name in ("model", "packing") if self.get(name)]
        return f"{self.get('problem')} ({', '.join(extra)})" if extra else self.get("problem")


def read() -> tuple[dict[str, dict], list[Result]]:
    """Return the files in the form of benchmarks/results/README.md, and their lines that no later file supersedes."""
    files = {
        path.relative_to(RESULTS).as_posix(): json.loads(path.read_text()) for path in sorted(RESULTS.rglob("*.json"))
    }
    files = {name: content for name, content in files.items() if "results" in content}
    results = [Result(name, content, values) for name, content in files.items() for values in content["results"]]
    return files, [result for result in results if not result.get("superseded")]


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(headings: list[str], rows: Iterable[Iterable]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def number(x: float | None, digits: int = 3) -> str:
    """x in so many significant digits."""
    if x is None:
        return ""
    text = f"{x:.{digits}g}"
    return f"{x:,.0f}" if "e" in text else text


def ratio(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}x"


def grouped(results: Iterable, key: Callable) -> dict:
    found: dict = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found


def median_of(group: list[Result], name: str) -> float | None:
    """Return the median of a field over the runs that have it, or None."""
    values = [x.get(name) for x in group if x.get(name) is not None]
    return statistics.median(values) if values else None


def calls_of(results: list[Result]) -> dict[tuple, list[Result]]:
    """Return glax's runs of each call, of whole sequences on GPUs."""
    chosen = [x for x in results if x.is_measured and x.get("implementation") == "glax" and x.get("mode") in MODES]
    return grouped((x for x in chosen if not x.file.startswith("cpu")), lambda x: (x.device, *x.call))


# ---- sections --------------------------------------------------------------------------------------------------------


def layers(results: list[Result]) -> str:
    """The layers of published models on an H100, and the delta rule. A note with "=" says that a run changes the layer."""
    chosen = [x for x in results if x.device == H100 and not x.get("packing") and "=" not in x.get("note", "")]
    of_delta = [x for x in chosen if (x.get("gate") or "").startswith("delta") and not x.get("model")]
    layers = of_delta + [x for x in chosen if re.search(r"\d[BM]$|^Lightning$", x.get("model") or "")]
    rows = []
    calls = grouped(calls_of(layers).items(), lambda item: (item[0][4], item[0][1], item[0][2]))
    for (model, problem, gate), group in sorted(calls.items()):
        by_mode = {call[3]: runs for call, runs in group}
        if all(mode in by_mode and median_of(by_mode[mode], "ms") for mode in MODES):
            batch, length = (int(x) for x in problem.split(",")[:2])
            times = [median_of(by_mode[mode], "ms") for mode in MODES]
            rows.append((model or "-", problem, gate, *map(number, times), f"{batch * length / times[1] / 1e3:.1f}"))
    headings = ["layer of", "B, T, H, K, V", "gate", *MODES, "million tokens/s, with gradient"]
    return f"One {H100}, JAX 0.11.2.\n\n" + table(headings, rows)


def floors(results: list[Result]) -> str:
    """The distance to the floor: for each gate, the median over its calls, the best and the worst."""
    rows = []
    calls = {call: runs for call, runs in calls_of(results).items() if median_of(runs, "times_floor")}
    for (device, gate, mode), group in sorted(
        grouped(calls.values(), lambda x: (x[0].device, x[0].get("gate"), x[0].get("mode"))).items()
    ):
        ordered = sorted(group, key=lambda runs: median_of(runs, "times_floor"))
        times = [median_of(runs, "times_floor") for runs in ordered]
        best, worst = (f"{ratio(t)} {runs[0].title}" for t, runs in ((times[0], ordered[0]), (times[-1], ordered[-1])))
        rows.append((device, gate, mode, len(group), ratio(statistics.median(times)), best, worst))
    return table(["device", "gate", "mode", "calls", "median", "best", "worst"], rows)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A peer and glax on the same call in one file. times: the peer's time over ours, None where only memory is recorded."""

    peer: Result
    ours: Result | None
    times: float | None


def comparisons(results: list[Result]) -> list[Comparison]:
    """Return every peer with glax's result for the same call in the same file; on CPUs glax as it chooses."""
    ours = {(x.file, x.call): x for x in results if x.is_ours and x.is_measured and x.get("mib")}
    ours |= {(x.file, x.call): x for x in results if x.get("implementation") == "glax" and x.is_measured}
    found = []
    for peer in results:
        if peer.is_ours or not peer.is_measured:
            continue
        own, times = ours.get((peer.file, peer.call)), peer.get("times_glax")
        if times is None and own is not None and peer.get("ms") and own.get("ms"):
            times = peer.get("ms") / own.get("ms")
        if times is None and own is not None and peer.get("tokens_per_second"):
            times = own.get("tokens_per_second") / peer.get("tokens_per_second")
        found.append(Comparison(peer, own, times))
    return found


def losses(found: list[Comparison]) -> str:
    slower = sorted((x for x in found if x.times is not None and x.times < 1), key=lambda x: x.times)
    rows = [
        (
            x.peer.title,
            x.peer.get("gate"),
            x.peer.get("mode"),
            x.peer.get("implementation"),
            ratio(x.times),
            x.peer.device,
        )
        for x in slower
    ]
    text = LOSSES + "\nCalls in which a peer is faster:\n\n"
    text += table(["call", "gate", "mode", "peer", "peer / glax", "device"], rows)
    more = {}
    for x in found:
        own, theirs = x.ours and x.ours.get("mib"), x.peer.get("mib")
        if own and theirs and own > theirs:
            more[x.peer.title, x.peer.get("gate"), x.peer.get("implementation")] = (own, theirs)
    worst = sorted(more.items(), key=lambda item: -item[1][0] / item[1][1])[:MOST]
    rows = [(call, gate, *mib, peer) for (call, gate, peer), mib in worst]
    text += "\nCalls in which a peer needs less memory, in MiB at the peak of forward and gradient:\n\n"
    return text + table(["call", "gate", "glax", "peer", "which"], rows)


def peers(found: list[Comparison]) -> str:
    rows = []
    chosen = [x for x in found if x.times is not None]
    for (peer, mode, device), group in sorted(
        grouped(chosen, lambda x: (x.peer.get("implementation"), x.peer.get("mode"), x.peer.device)).items()
    ):
        calls = grouped(group, lambda x: x.peer.call)
        times = {call: statistics.median(x.times for x in runs) for call, runs in calls.items()}
        worst = min(times, key=lambda call: times[call])
        title = f"{ratio(times[worst])} {', '.join(filter(None, (calls[worst][0].peer.title, calls[worst][0].peer.get('gate'))))}"
        rows.append((peer, device, mode, len(times), ratio(statistics.median(times.values())), title))
    return table(["peer", "device", "mode", "calls", "peer / glax, median", "worst"], rows)


def packing(results: list[Result]) -> str:
    """The time of several documents over the time of one document in the same file."""
    rows = []
    chosen = [x for x in results if x.get("packing") and x.get("implementation") == "glax" and x.get("ms")]
    ratios = []
    for group in grouped(chosen, lambda x: (x.file, *x.call[:3])).values():
        alone = next((x.get("ms") for x in group if x.get("packing") in ("one document", "none")), None)
        others = [x for x in group if x.get("packing") not in ("one document", "none")]
        ratios += [(x, x.get("ms") / alone) for x in others if alone]
    for (gate, mode), group in sorted(grouped(ratios, lambda x: (x[0].get("gate"), x[0].get("mode"))).items()):
        worst = max(group, key=lambda x: x[1])
        values = [x[1] for x in group]
        rows.append((gate, mode, len(group), ratio(statistics.median(values)), f"{ratio(worst[1])} {worst[0].title}"))
    return table(["gate", "mode", "runs", "of one document, median", "worst"], rows)


def decoding(results: list[Result]) -> str:
    rows = []
    # Steps that write a state every few tokens move fewer bytes than are counted.
    chosen = [x for x in results if x.get("copy_share") and not (x.get("mode") or "").startswith("replay")]
    for (gate, device), group in sorted(grouped(chosen, lambda x: (x.get("gate"), x.device)).items(), key=str):
        shares = [x.get("copy_share") for x in group]
        rows.append((gate, device, len(group), *(f"{100 * f(shares):.0f}%" for f in (statistics.median, min))))
    return table(["gate", "device", "runs", "of a copy's rate, median", "worst"], rows)


def training(results: list[Result]) -> str:
    rows = []
    chosen = [x for x in results if x.get("tokens_per_second") and not x.get("requests")]  # those serve
    chosen = [x for x in chosen if x.get("mode") in (None, "training step", "training", "lora", "full")]

    def title(x):
        model = x.get("model") or x.about["method"].split(", batch")[0]
        model = f"{model}, {x.get('problem')}" if x.get("mode") in ("training", "lora", "full") else model
        if x.get("devices", 1) > 1:  # a case is "model/axis", such as gla-1.3b/fsdp
            model += f", {x.get('case').split('/')[1]} = {x.get('devices')}"
        return (model, x.get("implementation"), x.device)

    for (model, implementation, device), group in sorted(grouped(chosen, title).items()):
        rows.append(
            (
                model,
                implementation,
                device,
                len(group),
                f"{median_of(group, 'tokens_per_second'):,.0f}",
                number(median_of(group, "gib")),
            )
        )
    return table(["model", "implementation", "device", "runs", "tokens per second", "GiB"], rows)


def whole_models(results: list[Result]) -> str:
    """Return a table of models that write tokens or read prompts."""
    rows = []
    chosen = [
        x for x in results if x.get("tokens_per_second") and x.get("model") and x.get("mode") in ("decode", "prefill")
    ]

    def title(x):
        return (x.get("model"), x.get("mode"), x.get("problem"), x.get("implementation"), x.device)

    for names, group in sorted(grouped(chosen, title).items()):
        figures = f"{median_of(group, 'tokens_per_second'):,.0f}", number(median_of(group, "gib"))
        rows.append((*names, len(group), *figures))
    return table(["model", "mode", "problem", "implementation", "device", "runs", "tokens per second", "GiB"], rows)


def parallel(results: list[Result]) -> str:
    rows = []
    chosen = [x for x in results if x.get("devices", 1) > 1 and x.get("speedup") and x.get("mode") != "training"]
    for devices, group in sorted(grouped(chosen, lambda x: x.get("devices")).items()):
        both = [[x.get(name) for x in group if x.get(name)] for name in ("speedup", "speedup_waited")]
        rows.append((devices, len(group), *(ratio(f(values)) for values in both for f in (statistics.median, min))))
    headings = ["GPUs", "runs", "speedup, median", "worst", "each call waited for, median", "worst"]
    return "![Speedup by the number of GPUs](_static/parallel.svg)\n\n" + table(headings, rows)


def cpus(results: list[Result]) -> str:
    """The largest problem of each gate and mode on each CPU."""
    rows = []
    chosen = [x for x in results if x.file.startswith("cpu") and x.get("ms") and x.get("mode") in MODES]
    for (device, gate, mode), group in sorted(
        grouped(chosen, lambda x: (x.device, x.get("gate"), x.get("mode"))).items()
    ):
        by_problem = grouped(group, lambda x: x.get("problem"))
        largest = max(by_problem, key=lambda problem: median_of(by_problem[problem], "ms"))
        ms = {
            name: median_of(runs, "ms")
            for name, runs in grouped(by_problem[largest], lambda x: x.get("implementation")).items()
        }
        rows.append(
            (
                device,
                largest,
                gate,
                mode,
                "; ".join(f"{name} {number(x)}" for name, x in sorted(ms.items(), key=lambda x: x[1])),
            )
        )
    return "The slowest problem of each gate; all are in the files.\n\n" + table(
        ["device", "problem", "gate", "mode", "ms"], rows
    )


def lengths(results: list[Result]) -> str:
    chosen = [x for x in results if x.get("us_per_token")]
    columns = list(dict.fromkeys((x.get("implementation"), x.get("mode")) for x in chosen))
    rows = []
    for problem, group in grouped(chosen, lambda x: x.get("problem")).items():
        us = {(x.get("implementation"), x.get("mode")): x.get("us_per_token") for x in group}
        rows.append((problem, *(number(us[c]) for c in columns), next(x.get("gib") for x in group if x.get("gib"))))
    text = "![Memory by length](_static/memory.svg)\n\nMicroseconds per token on a CPU:\n\n"
    return text + table(["problem", *(f"{a}, {m}" for a, m in columns), "GiB at the peak"], rows)


def estimates(results: list[Result]) -> str:
    rows = []
    chosen = [x for x in results if not x.is_measured and x.get("times_floor")]
    for (device, mode), group in sorted(grouped(chosen, lambda x: (x.device, x.get("mode"))).items()):
        times = [x.get("times_floor") for x in group]
        worst = max(group, key=lambda x: x.get("times_floor"))
        rows.append(
            (
                device,
                mode,
                len(group),
                ratio(statistics.median(times)),
                f"{ratio(max(times))} {worst.title}, {worst.get('gate')}",
            )
        )
    return "No TPU has run these kernels.\n\n" + table(
        ["device", "mode", "calls", "of the floor, median", "worst"], rows
    )


def sources(files: dict[str, dict]) -> str:
    rows = []
    for folder, group in sorted(grouped(files.items(), lambda item: item[0].split("/")[0]).items()):
        dates = sorted(content["date"] for _, content in group)
        versions = sorted(
            {f"{name} {version}" for _, content in group for name, version in content["versions"].items()}
        )
        rows.append((f"`benchmarks/results/{folder}`", len(group), f"{dates[0]} to {dates[-1]}", ", ".join(versions)))
    text = "All lines of all runs are in these folders; `benchmarks/results/README.md` says what a field means.\n\n"
    return text + table(["folder", "files", "dates", "versions"], rows)


def page() -> str:
    files, results = read()
    found = comparisons(results)
    sections = {
        "How fast on my GPU": layers(results),
        "Best and worst, of the floor": floors(results),
        "Where glax loses": losses(found),
        "Beside other libraries": peers(found),
        "Packed sequences": packing(results),
        "Decoding": decoding(results),
        "Training a model": training(results),
        "Decoding by whole models": whole_models(results),
        "A published model": CHECKPOINTS,
        "Several GPUs, the sequence sharded": parallel(results),
        "CPUs": cpus(results),
        "Memory and length": lengths(results),
        "TPUs, estimated": estimates(results),
        "All figures": sources(files),
    }
    return INTRODUCTION + "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace docs/performance.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
