"""Serve with continuous batching: requests of any length come and go, and share one decoding step.

    python examples/serve.py --model demo-out/model.safetensors "def " "import os" "class A"
    python examples/serve.py --model FOLDER "Once upon a time"

FOLDER is a checkpoint that `glax.models.from_pretrained` loads. Requests are sequences of tokens; those of the demo's model
are bytes.

Every request has a slot in a pool of states, of one size whatever its length. Each round has two calls of fixed shapes:

1. Waiting prompts are read into free slots. They are packed one behind another into a fixed number of rows, a long prompt in
   pieces.
2. Every request whose prompt is read gets its next token. Empty slots are -1.

So two programs are compiled, and neither copies the pool. The likeliest token is chosen.
"""

import argparse
import collections
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glax.models import CausalLM, from_pretrained
from glax.models.tokens import Bytes, find_tokenizer
from glax.nn import ByteLM, ByteLMConfig
from glax.nn.checkpoint import load


@dataclasses.dataclass(frozen=True)
class Request:
    """Ask for `length` tokens that continue `prompt`, which has at least one token. arrives: the round before which it comes."""

    name: str
    prompt: Sequence[int]
    length: int
    arrives: int = 0


@dataclasses.dataclass
class Running:
    """Hold a request in its slot: how many tokens of its prompt have been read, and the tokens written."""

    request: Request
    read: int = 0
    written: list[int] = dataclasses.field(default_factory=list)


@functools.partial(nnx.jit, donate_argnums=1)
def prefill(model: ByteLM | CausalLM, pools, tokens, slots, cu_seqlens, fresh):
    """Return the token behind each of the packed prompts, [N], and the pools."""
    logits, pools = model.prefill(tokens, pools, slots, cu_seqlens, fresh)
    return logits[jnp.maximum(cu_seqlens[1:] - 1, 0)].argmax(-1), pools


@functools.partial(nnx.jit, donate_argnums=1)
def decode(model: ByteLM | CausalLM, pools, tokens, slots):
    """Return the next token of each slot, [B], and the pools."""
    logits, pools = model.step(tokens, pools, slots)
    return logits.argmax(-1), pools


class Server:
    """Serve requests by one model.

    capacity: the number of slots. rows: the tokens of a packed prefill, shared by all prompts of a round. max_length: the most
    tokens of a prompt and its continuation together, for models that have layers of softmax attention.
    """

    def __init__(self, model: ByteLM | CausalLM, capacity: int = 8, rows: int = 128, max_length: int = 4096):
        self.model, self.capacity, self.rows = model, capacity, rows
        self.pools = model.initial_states(capacity, max_length)
        self.running: list[Running | None] = [None] * capacity
        self.waiting: collections.deque[Request] = collections.deque()

    def serve(self, requests: Iterable[Request]) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield each request's name and tokens, in the type of its prompt, when it has finished."""
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
        """Read as many tokens of unread prompts as one packed call holds. Write the first token behind each prompt that ends."""
        tokens, cuts, slots, fresh = np.zeros(self.rows, np.int32), [0], [], []
        for slot, x in enumerate(self.running):
            if x is None or x.read == len(x.request.prompt) or cuts[-1] == self.rows:
                continue
            piece = x.request.prompt[x.read : x.read + self.rows - cuts[-1]]
            tokens[cuts[-1] : cuts[-1] + len(piece)] = list(piece)
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
        for slot, token in zip(slots, np.asarray(following), strict=False):
            if (x := self.running[slot]).read == len(x.request.prompt):
                x.written.append(int(token))

    def write(self):
        """Write one more token of each request whose prompt is read."""
        ready = [slot for slot, x in enumerate(self.running) if x is not None and x.written]
        if not ready:
            return
        tokens, slots = np.zeros(self.capacity, np.int32), np.full(self.capacity, -1, np.int32)
        for slot in ready:
            tokens[slot], slots[slot] = self.running[slot].written[-1], slot
        following, self.pools = decode(self.model, self.pools, tokens, slots)
        following = np.asarray(following)
        for slot in ready:
            self.running[slot].written.append(int(following[slot]))

    def finished(self) -> Iterator[tuple[str, bytes]]:
        for slot, x in enumerate(self.running):
            if x is not None and len(x.written) >= x.request.length and x.read == len(x.request.prompt):
                self.running[slot] = None
                yield x.request.name, type(x.request.prompt)(x.written[: x.request.length])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    help = "a checkpoint's folder, or what `glax demo` wrote (default: untrained weights)"
    parser.add_argument("--model", type=Path, help=help)
    parser.add_argument("--length", type=int, default=200, help="tokens for each prompt (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=8, help="requests at a time (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = Bytes()
    if arguments.model is None:
        model = ByteLM(ByteLMConfig(), rngs=nnx.Rngs(0))
    elif arguments.model.is_dir():
        model = from_pretrained(arguments.model)
        tokenizer = find_tokenizer(arguments.model, model.vocabulary)
    else:
        model = load(arguments.model)
    requests = [Request(prompt, tokenizer.encode(prompt), arguments.length) for prompt in arguments.prompts]
    began, count = time.perf_counter(), 0
    with jax.default_matmul_precision("float32"):
        for name, written in Server(model, arguments.capacity).serve(requests):
            count += len(written)
            print(f"---- {name!r}\n{name}{tokenizer.decode(written)}")
    print(f"---- {count} tokens in {time.perf_counter() - began:.1f} s, compilation included")


if __name__ == "__main__":
    main()
