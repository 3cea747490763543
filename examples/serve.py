"""Continuous batching: requests of any length come and go, and share one decoding step.

    python examples/serve.py --model demo-out/model.safetensors "def " "import os" "class A"

Every request has a slot in a pool of states, of one size whatever its length. In each round, waiting prompts are read into
free slots, packed one behind another into a fixed number of rows, a long one in pieces; then every request that is under
way gets its next byte, all in one call of a fixed shape, empty slots as -1. So two programs are compiled, and neither
copies the pool. Bytes are chosen greedily.
"""

import argparse
import collections
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glax.nn import ByteLM, ByteLMConfig
from glax.nn.checkpoint import load


@dataclasses.dataclass(frozen=True)
class Request:
    """`length` bytes that go on from `prompt`, at least one byte. Comes in before round `arrives`."""

    name: str
    prompt: bytes
    length: int
    arrives: int = 0


@dataclasses.dataclass
class Running:
    """A request in its slot: how much of its prompt has been read, and what was written."""

    request: Request
    read: int = 0
    written: bytearray = dataclasses.field(default_factory=bytearray)


@functools.partial(nnx.jit, donate_argnums=1)
def prefill(model: ByteLM, pools, tokens, slots, cu_seqlens, fresh):
    """The byte behind each of the packed prompts, [N], and the pools."""
    logits, pools = model.prefill_into(tokens, pools, slots, cu_seqlens, fresh)
    return logits[jnp.maximum(cu_seqlens[1:] - 1, 0)].argmax(-1).astype(jnp.uint8), pools


@functools.partial(nnx.jit, donate_argnums=1)
def decode(model: ByteLM, pools, tokens, slots):
    """The next byte of each slot, [B], and the pools."""
    logits, pools = model.step(tokens.astype(jnp.int32), pools, slots)
    return logits.argmax(-1).astype(jnp.uint8), pools


class Server:
    """capacity: slots. rows: of a packed prefill, shared by all prompts read in one round."""

    def __init__(self, model: ByteLM, capacity: int = 8, rows: int = 128):
        self.model, self.capacity, self.rows = model, capacity, rows
        self.pools = model.initial_states(capacity)
        self.running: list[Running | None] = [None] * capacity
        self.waiting: collections.deque[Request] = collections.deque()

    def serve(self, requests: Iterable[Request]) -> Iterator[tuple[str, bytes]]:
        """Each request's name and bytes, as they finish."""
        coming = collections.deque(sorted(requests, key=lambda request: request.arrives))
        turn = 0
        while coming or self.waiting or any(self.running):
            while coming and coming[0].arrives <= turn:
                self.waiting.append(coming.popleft())
            self.admit()
            self.read_prompts()
            yield from self.finished()
            self.write()
            yield from self.finished()
            turn += 1

    def admit(self):
        for slot, running in enumerate(self.running):
            if running is None and self.waiting:
                self.running[slot] = Running(self.waiting.popleft())

    def read_prompts(self):
        """One packed call for as much of the unread prompts as its rows hold; the first byte of those that are read."""
        tokens, cuts, slots, fresh = np.zeros(self.rows, np.int32), [0], [], []
        for slot, x in enumerate(self.running):
            if x is None or x.read == len(x.request.prompt) or cuts[-1] == self.rows:
                continue
            piece = x.request.prompt[x.read : x.read + self.rows - cuts[-1]]
            tokens[cuts[-1] : cuts[-1] + len(piece)] = np.frombuffer(piece, np.uint8)
            cuts.append(cuts[-1] + len(piece))
            slots.append(slot)
            fresh.append(x.read == 0)
            x.read += len(piece)
        if not slots:
            return
        unused = self.capacity - len(slots)
        arrays = (
            tokens,
            np.array(slots + [-1] * unused, np.int32),
            np.array(cuts + cuts[-1:] * unused, np.int32),
            np.array(fresh + [False] * unused),
        )
        following, self.pools = prefill(self.model, self.pools, *arrays)
        for slot, byte in zip(slots, np.asarray(following), strict=False):
            if (x := self.running[slot]).read == len(x.request.prompt):
                x.written.append(byte)

    def write(self):
        """One more byte for everyone whose prompt is read."""
        ready = [slot for slot, x in enumerate(self.running) if x is not None and x.written]
        if not ready:
            return
        tokens, slots = np.zeros(self.capacity, np.uint8), np.full(self.capacity, -1, np.int32)
        for slot in ready:
            tokens[slot], slots[slot] = self.running[slot].written[-1], slot
        following, self.pools = decode(self.model, self.pools, tokens, slots)
        for slot in ready:
            self.running[slot].written.append(int(following[slot]))

    def finished(self) -> Iterator[tuple[str, bytes]]:
        for slot, x in enumerate(self.running):
            if x is not None and len(x.written) >= x.request.length and x.read == len(x.request.prompt):
                self.running[slot] = None
                yield x.request.name, bytes(x.written[: x.request.length])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", type=Path, help="what `glax demo` wrote (default: untrained weights)")
    parser.add_argument("--length", type=int, default=200, help="bytes for each prompt (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=8, help="requests at a time (default: %(default)s)")
    arguments = parser.parse_args()
    model = load(arguments.model) if arguments.model else ByteLM(ByteLMConfig(), rngs=nnx.Rngs(0))
    requests = [Request(prompt, prompt.encode(), arguments.length) for prompt in arguments.prompts]
    began, count = time.perf_counter(), 0
    with jax.default_matmul_precision("float32"):
        for name, written in Server(model, arguments.capacity).serve(requests):
            count += len(written)
            print(f"---- {name!r}\n{name}{written.decode('utf-8', 'replace')}")
    print(f"---- {count} bytes in {time.perf_counter() - began:.1f} s, compilation included")


if __name__ == "__main__":
    main()
