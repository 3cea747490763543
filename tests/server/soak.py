"""Serve many clients that come, go and misbehave, and check every answer.

python -m tests.server.soak --minutes 10 --clients 64

Each client is OpenAI's own, over loopback, and draws one kind of call after another. Greedy answers must be those of `generate`
alone; the state of one request is made NaN in the middle, and that request alone may fail. At the end all slots must be free,
and memory and threads what they were after the first quarter. Prints one table; the exit code is 1 if anything failed.
"""

import argparse
import collections
import dataclasses
import gc
import os
import pathlib
import random
import sys
import tempfile
import threading
import time

import jax
import openai
import rich.console
import rich.table

from tests.memory import resident_bytes
from tests.server.serving import NAME, TEXT, Alone, Running, make_folder, running

BAD = (
    b"{",
    b"\xff",
    b"[" * 10_000,
    b'{"n": NaN}',
    b'{"model": "tiny-gla"}',
    b'{"model": "tiny-gla", "prompt": [-1]}',
    b"[]",
)
GROWTH = 0.1  # of the memory after the first quarter
LONGEST = 32


@dataclasses.dataclass
class Totals:
    """What all clients have counted: calls and seconds by kind, refusals for a full queue, and what was wrong."""

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    full: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    poisoned: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Client:
    """One client: it draws calls until the end, and checks each answer."""

    def __init__(self, server: Running, texts: dict[str, str], totals: Totals, seed: int):
        self.server, self.texts, self.totals, self.draw = server, texts, totals, random.Random(seed)
        self.calls = [self.whole, self.streamed, self.stopped, self.several, self.sampled, self.left, self.bad]

    def run(self, end: float):
        with self.server.client() as client:
            while time.monotonic() < end:
                call, began = self.draw.choice(self.calls), time.monotonic()
                name = call.__name__
                try:
                    said = call(client)
                except openai.RateLimitError:
                    self.totals.full[name] += 1
                    time.sleep(self.draw.random())
                    continue
                except openai.APIError as error:
                    if "not finite" in str(error):
                        self.totals.poisoned.append(name)
                        continue
                    said = f"{type(error).__name__}: {error}"
                with self.totals.lock:
                    self.totals.seconds[name].append(time.monotonic() - began)
                    if said:
                        self.totals.wrong.append(f"{name}: {said}")

    def prompt(self) -> str:
        return self.draw.choice(list(self.texts))

    def create(self, client, prompt, **options):
        return client.completions.create(
            **(dict(model=NAME, prompt=prompt, temperature=0, max_tokens=LONGEST) | options)
        )

    def whole(self, client) -> str | None:
        prompt = self.prompt()
        return differs(self.create(client, prompt).choices[0].text, self.texts[prompt])

    def streamed(self, client) -> str | None:
        prompt = self.prompt()
        chunks = list(self.create(client, prompt, stream=True))
        if chunks[-1].choices[0].finish_reason != "length":
            return f"ended with {chunks[-1].choices[0].finish_reason}"
        return differs("".join(chunk.choices[0].text for chunk in chunks), self.texts[prompt])

    def stopped(self, client) -> str | None:
        prompt = self.prompt()
        at = self.draw.randrange(len(self.texts[prompt]) - 2)
        stop = self.texts[prompt][at : at + 2]
        found = self.create(client, prompt, stop=stop).choices[0]
        return differs(found.text, self.texts[prompt].split(stop)[0])

    def several(self, client) -> str | None:
        prompts = [self.prompt() for _ in range(3)]
        found = self.create(client, prompts)
        return differs([choice.text for choice in found.choices], [self.texts[prompt] for prompt in prompts])

    def sampled(self, client) -> str | None:
        options = dict(temperature=1.5, top_p=0.95, seed=self.draw.randrange(100), n=2, logprobs=2)
        found = self.create(client, self.prompt(), **options)
        counts = [len(choice.logprobs.tokens) for choice in found.choices]
        return None if counts == [LONGEST] * 2 else f"{counts} tokens"

    def left(self, client) -> str | None:
        stream = self.create(client, self.prompt(), stream=True, max_tokens=400)
        for _ in range(self.draw.randrange(6)):
            next(stream)
        stream.close()

    def bad(self, client) -> str | None:
        path = self.draw.choice(["/v1/completions", "/v1/chat/completions"])
        status, _, _ = self.server.call("POST", path, self.draw.choice(BAD))
        return None if status == 400 else f"status {status}"


def differs(got, want) -> str | None:
    return None if got == want else f"got {got!r}, expected {want!r}"


def figures() -> dict[str, float]:
    """Return what must not grow: memory in MiB, threads, and open files."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return {"MiB": resident_bytes() / 2**20, "threads": threading.active_count(), "files": files}


def soak(folder: pathlib.Path, seconds: float, clients: int) -> tuple[Totals, dict, dict, dict[str, int]]:
    """Return what the clients counted, the figures after the first quarter and at the end, and requests by reason."""
    alone = Alone(folder)
    # Texts of many lengths, half of which share a prefix of several blocks.
    prompts = [TEXT[: 3 * i + 1] for i in range(12)] + [TEXT * 8 + TEXT[: 5 * i + 1] for i in range(12)]
    texts = {prompt: alone.text(prompt, LONGEST) for prompt in prompts}
    options = (
        "--capacity",
        "16",
        "--rows",
        "128",
        "--max-length",
        "1024",
        "--queue",
        "48",
        "--prefix-bytes",
        str(4 << 20),
    )
    totals = Totals()
    with running(folder, *options) as server:
        for prompt in texts:  # all programs are compiled before anything is measured
            assert server.complete(prompt, max_tokens=LONGEST).choices[0].text == texts[prompt]
        began = time.monotonic()
        threads = [
            threading.Thread(target=Client(server, texts, totals, seed).run, args=(began + seconds,))
            for seed in range(clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(max(began + seconds / 4 - time.monotonic(), 0))
        first = figures()
        time.sleep(max(began + seconds / 2 - time.monotonic(), 0))
        while not server.poison(LONGEST) and time.monotonic() < began + seconds:
            time.sleep(0.001)
        time.sleep(max(began + seconds * 0.9 - time.monotonic(), 0))
        last = figures()
        for thread in threads:
            thread.join()
        server.wait_until_free(60)
        counts = server.scheduler.counts()
        if counts.free_slots != 16:
            totals.wrong.append(f"{counts.free_slots} of 16 slots are free at the end")
        for prompt in texts:
            if said := differs(server.complete(prompt, max_tokens=LONGEST).choices[0].text, texts[prompt]):
                totals.wrong.append(f"at the end: {said}")
    if len(totals.poisoned) != 1:
        totals.wrong.append(f"{len(totals.poisoned)} calls failed, and one request's state was NaN")
    if last["MiB"] > first["MiB"] * (1 + GROWTH) or last["threads"] > first["threads"] + 8:
        totals.wrong.append(f"grown from {first} to {last}")
    return totals, first, last, counts.finished


def table(totals: Totals, first: dict, last: dict, finished: dict[str, int]) -> rich.table.Table:
    grown = ", ".join(f"{name} {first[name]:,.0f} then {last[name]:,.0f}" for name in first)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in finished.items())
    title = f"requests: {reasons}\ncalls that failed for a state of NaN: {len(totals.poisoned)}\n{grown}"
    shown = rich.table.Table(title=title)
    for column in ("call", "calls", "429", "median ms", "99% ms"):
        shown.add_column(column, justify="left" if column == "call" else "right")
    for name, seconds in sorted(totals.seconds.items()):
        ordered = sorted(seconds)
        times = [f"{1000 * ordered[int(len(ordered) * part)]:,.0f}" for part in (0.5, 0.99)]
        shown.add_row(name, f"{len(seconds):,}", f"{totals.full[name]:,}", *times)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as base, jax.default_matmul_precision("float32"):
        found = soak(make_folder(pathlib.Path(base) / NAME), 60 * arguments.minutes, arguments.clients)
    rich.console.Console().print(table(*found))
    for each in found[0].wrong[:20]:
        print(f"WRONG {each}")
    return 1 if found[0].wrong else 0


if __name__ == "__main__":
    sys.exit(main())
