"""Count what the server does, and write it in the text format of Prometheus."""

import bisect
import collections
import itertools
from collections.abc import Iterable, Mapping

from glax.server.scheduler import Counts

TEXT = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Count durations in buckets: for each limit of SECONDS, the durations that do not exceed it."""

    def __init__(self):
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float):
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, help: str) -> Iterable[str]:
        yield from head(name, "histogram", help)
        limits = [*map(str, SECONDS), "+Inf"]
        for limit, count in zip(limits, itertools.accumulate(self.counts), strict=True):
            yield f'{name}_bucket{{le="{limit}"}} {count}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {sum(self.counts)}"


class Metrics:
    """Hold the counts of the HTTP side. All calls come from one thread."""

    def __init__(self):
        self.responses: collections.Counter[int] = collections.Counter()
        self.first_token, self.request = Histogram(), Histogram()

    def lines(self) -> Iterable[str]:
        yield from family("glax_http_responses_total", "counter", "Responses by status.", "status", self.responses)
        yield from self.first_token.lines("glax_first_token_seconds", "From a call to the first token of an answer.")
        yield from self.request.lines("glax_answer_seconds", "From a call to the end of its answers.")


def head(name: str, kind: str, help: str) -> Iterable[str]:
    """Yield the two lines that begin a metric. kind: Prometheus' type, such as "counter"."""
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def family(name: str, kind: str, help: str, label: str, values: Mapping) -> Iterable[str]:
    """Yield the lines of a metric with one value for each value of `label`. kind: Prometheus' type, such as "counter". Labels
    need no escapes."""
    yield from head(name, kind, help)
    for key, found in sorted(values.items()):
        yield f'{name}{{{label}="{key}"}} {found}'


def scheduler_lines(counts: Counts) -> Iterable[str]:
    """Yield the lines of a scheduler's `Counts`."""
    for name, kind, help in (
        ("running", "gauge", "Requests that have a slot."),
        ("waiting", "gauge", "Requests in the queue."),
        ("free_slots", "gauge", "Slots that no request has."),
        ("state_bytes", "gauge", "Bytes of the states of running requests."),
        ("prefix_bytes", "gauge", "Bytes of stored prefixes."),
        ("read_tokens", "counter", "Tokens of prompts that were read."),
        ("written_tokens", "counter", "Tokens of answers."),
        ("cached_tokens", "counter", "Tokens of prompts that a stored prefix had."),
        ("rounds", "counter", "Rounds of the scheduler."),
    ):
        shown = f"glax_{name}_total" if kind == "counter" else f"glax_{name}"
        yield from head(shown, kind, help)
        yield f"{shown} {getattr(counts, name)}"
    yield from family("glax_requests_total", "counter", "Requests that ended, by reason.", "reason", counts.finished)
