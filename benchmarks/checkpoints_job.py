"""What both libraries' processes of checkpoints.py share: the sizes of calls, and meters of time and of the host's memory."""

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GIB = 2**30
REPEATS = 3
COPIED = 2**28  # bytes that are read and sent to the device together
RANK, LEARNING_RATE, CLIP = 16, 1e-5, 1.0
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. "
# The projections that get low-rank terms: those of the layers that mix tokens.
TARGETS = {
    "qwen3_5_text": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"],
    "qwen4_exp_text": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"],
    "kimi_linear": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Hold the sizes of the calls.

    prefill, tune: rows, and tokens of each. batches: the sequences of decoding. prompt: the tokens before. few, many: the tokens
    that two calls write, whose difference in time is the time of a token. warm, steps: training steps before those that are
    timed, and those.
    """

    prefill: tuple[int, int] = (8, 4096)
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 512
    few: int = 65  # more than 64, so that one program of glax.models.generate writes both
    many: int = 97
    tune: tuple[int, int] = (4, 2048)
    warm: int = 3
    steps: int = 8
    compared: int = 64


TINY = Sizes((2, 64), (1, 2), 16, tune=(2, 32), warm=2, steps=3)


@dataclasses.dataclass(frozen=True)
class Job:
    """Hold what a process measures.

    name, folder: of the model. small: the folder of the model that is trained whole. arrays: the file for logits. dtype: of
    parameters and activations. began: when the process was started. batches: in place of those of its sizes.
    """

    name: str
    folder: Path
    small: Path | None
    arrays: Path
    dtype: str = "bfloat16"
    began: float = 0.0
    batches: tuple[int, ...] = ()

    @property
    def sizes(self) -> Sizes:
        sizes = TINY if self.name.startswith("tiny") else Sizes()
        return dataclasses.replace(sizes, batches=self.batches or sizes.batches)


def drawn_tokens(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Return tokens [rows, length], the same for both libraries."""
    return np.random.default_rng(0).integers(1, vocabulary, (rows, length), np.int32)


def seconds_of(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def median_seconds(run: Callable[[], Any]) -> float:
    return statistics.median(seconds_of(run) for _ in range(REPEATS))


def decoded(run: Callable[[int], Any], batch: int, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of decoding. run(n) continues the prompts by n tokens and waits for them."""
    first = seconds_of(lambda: run(sizes.many))
    run(sizes.few)
    seconds = {count: median_seconds(lambda count=count: run(count)) for count in (sizes.few, sizes.many)}
    each = (seconds[sizes.many] - seconds[sizes.few]) / (sizes.many - sizes.few)
    return dict(batch=batch, ms=1e3 * each, tokens_per_second=batch / each, first_s=first)


def prefilled(run: Callable[[], Any], sizes: Sizes) -> dict[str, Any]:
    first, rows = seconds_of(run), sizes.prefill
    seconds = median_seconds(run)
    return dict(ms=1e3 * seconds, tokens_per_second=rows[0] * rows[1] / seconds, first_s=first)


def copy_seconds(files: list[Path], put: Callable[[np.ndarray], Any]) -> tuple[float, float]:
    """Return the seconds to read files into memory, and to send what was read to the device: put(bytes) waits for its end."""
    buffer, reading, sending = np.empty(COPIED, np.uint8), 0.0, 0.0
    put(buffer)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while True:
                began = time.perf_counter()
                count = file.readinto(buffer.data)
                reading += time.perf_counter() - began
                if not count:
                    break
                part = buffer[:count]
                sending += seconds_of(lambda part=part: put(part))
    return reading, sending


def status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[-1] == "kB"}


class HostMemory:
    """Measure how much more memory of the host is taken at the peak than before.

    host_gib: of the whole process, with the pages of mapped files. anonymous_gib: without those, as seen every 5 ms.
    """

    def __enter__(self) -> "HostMemory":
        with contextlib.suppress(OSError):  # then the peak of the imports counts, if it is higher
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before, self.anonymous, self.is_over = status(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while not self.is_over.wait(0.005):
            self.anonymous = max(self.anonymous, status()["RssAnon"])

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()
        after = status()
        peak = max(self.anonymous, after["RssAnon"])
        self.host_gib = (after["VmHWM"] - self.before["VmRSS"]) / GIB
        self.anonymous_gib = max(peak - self.before["RssAnon"], 0) / GIB

    @property
    def figures(self) -> dict[str, float]:
        return dict(host_gib=self.host_gib, anonymous_gib=self.anonymous_gib)
