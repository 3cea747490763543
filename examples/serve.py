"""Serve with continuous batching: requests of any length come and go, and share one decoding step.

    python examples/serve.py --model demo-out/model "def " "import os" "class A"
    python examples/serve.py --model FOLDER "Once upon a time"

FOLDER is a checkpoint that `glax.models.from_pretrained` loads. Requests are sequences of tokens; those of the demo's model
are bytes.

Every request has a slot in a pool of states, of one size whatever its length. Each round has two calls of fixed shapes:

1. Waiting prompts are read into free slots. They are packed one behind another into a fixed number of rows, a long prompt in
   pieces.
2. Every request whose prompt is read gets its next token. Empty slots are -1.

So two programs are compiled, and neither copies the pool. The likeliest token is chosen. A request that cannot be served is
refused alone, before it has a slot.
"""

import argparse
import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glax.models import CausalLM, end_tokens, from_config, from_pretrained
from glax.models.tokens import Bytes, find_tokenizer


@dataclasses.dataclass(frozen=True)
class Request:
    """Ask for at most `length` tokens that continue `prompt`.

    prompt: bytes, or a list or a tuple of tokens; at least one. arrives: the round before which the request comes.
    """

    name: str
    prompt: Sequence[int]
    length: int
    arrives: int = 0


@dataclasses.dataclass
class Running:
    """Hold a request in its slot: its prompt, how many tokens of it have been read, and the tokens written."""

    request: Request
    prompt: np.ndarray
    read: int = 0
    written: list[int] = dataclasses.field(default_factory=list)


@functools.partial(nnx.jit, donate_argnums=1)
def prefill(model: CausalLM, pools, tokens, slots, cu_seqlens, fresh):
    """Return the token behind each of the packed prompts, [N], and the pools."""
    logits, pools = model.prefill(tokens, pools, slots, cu_seqlens, fresh)
    return logits[jnp.maximum(cu_seqlens[1:] - 1, 0)].argmax(-1), pools


@functools.partial(nnx.jit, donate_argnums=1)
def decode(model: CausalLM, pools, tokens, slots):
    """Return the next token of each slot, [B], and the pools."""
    logits, pools = model.step(tokens, pools, slots)
    return logits.argmax(-1), pools


class Server:
    """Serve requests by one model.

    capacity: the number of slots. rows: the tokens of a packed prefill, shared by all prompts of a round. max_length: the most
    tokens of a prompt and its continuation together, for models that have layers of softmax attention. ends: the tokens that
    end a continuation before its length.
    """

    def __init__(
        self,
        model: CausalLM,
        capacity: int = 8,
        rows: int = 128,
        max_length: int = 4096,
        ends: Sequence[int] = (),
    ):
        for name, value in (("capacity", capacity), ("rows", rows), ("max_length", max_length)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.model, self.capacity, self.rows, self.ends = model, capacity, rows, frozenset(ends)
        self.max_length = max_length if has_caches(model) else None
        self.pools = model.initial_states(capacity, max_length)
        self.running: list[Running | None] = [None] * capacity
        self.waiting: collections.deque[Request] = collections.deque()

    def serve(self, requests: Iterable[Request]) -> Iterator[tuple[str, Sequence[int] | ValueError]]:
        """Yield each request's name and tokens, in the type of its prompt, when it has finished.

        First the names of the requests that cannot be served are yielded, each with the ValueError that says why.
        """
        accepted = []
        for request in requests:
            try:
                self.check(request)
                accepted.append(request)
            except ValueError as error:
                yield request.name, error
        coming = collections.deque(sorted(accepted, key=lambda request: request.arrives))
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

    def check(self, request: Request):
        """Raise ValueError, which names the field, for a request that cannot be served."""
        prompt = request.prompt
        if not isinstance(prompt, bytes | bytearray | list | tuple) or not len(prompt):
            raise ValueError(f"prompt must be bytes, a list or a tuple of at least one token, got {prompt!r:.80}")
        if isinstance(prompt, bytes | bytearray) and self.model.vocabulary > Bytes.vocabulary:
            raise ValueError(
                "prompt must be a list or a tuple of tokens, because bytes cannot hold the "
                f"{self.model.vocabulary} tokens of the continuation, got {prompt!r:.80}"
            )
        for token in prompt:
            if not is_integer(token) or not 0 <= token < self.model.vocabulary:
                raise ValueError(f"prompt must hold tokens from 0 to {self.model.vocabulary - 1}, got {token!r:.80}")
        for name, value in (("length", request.length), ("arrives", request.arrives)):
            if not is_integer(value) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r:.80}")
        if self.max_length is not None and len(prompt) + request.length > self.max_length:
            raise ValueError(
                f"prompt and length must be at most max_length={self.max_length} tokens together, got {len(prompt)} and "
                f"{request.length}"
            )

    def admit(self):
        for slot, running in enumerate(self.running):
            if running is None and self.waiting:
                request = self.waiting.popleft()
                self.running[slot] = Running(request, np.array(list(request.prompt), np.int32))

    def read_prompts(self):
        """Read as many tokens of unread prompts as one packed call holds. Write the first token behind each prompt that ends."""
        tokens, cuts, slots, fresh = np.zeros(self.rows, np.int32), [0], [], []
        for slot, x in enumerate(self.running):
            if x is None or x.read == len(x.prompt) or cuts[-1] == self.rows:
                continue
            piece = x.prompt[x.read : x.read + self.rows - cuts[-1]]
            tokens[cuts[-1] : cuts[-1] + len(piece)] = piece
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
            if (x := self.running[slot]).read == len(x.prompt):
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

    def finished(self) -> Iterator[tuple[str, Sequence[int]]]:
        for slot, x in enumerate(self.running):
            if x is None or x.read < len(x.prompt):
                continue
            if len(x.written) >= x.request.length or x.written[-1] in self.ends:
                self.running[slot] = None
                yield x.request.name, type(x.request.prompt)(x.written[: x.request.length])


def is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def has_caches(model: CausalLM) -> bool:
    """Return whether the model's states hold as many rows as a request has tokens, as those of softmax attention do."""
    one, two = (jax.eval_shape(lambda n=n: model.initial_states(1, n)) for n in (1, 2))
    return jax.tree.map(jnp.shape, one) != jax.tree.map(jnp.shape, two)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    help = "a checkpoint's folder, such as the one that `glax demo` writes (default: untrained weights)"
    parser.add_argument("--model", type=Path, help=help)
    parser.add_argument("--length", type=int, default=200, help="tokens for each prompt (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=8, help="requests at a time (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.model is None:
        sizes = dict(vocab_size=Bytes.vocabulary, hidden_size=128, num_hidden_layers=3, num_heads=4)
        model = from_config(dict(model_type="gla", **sizes), rngs=nnx.Rngs(0))
    else:
        model = from_pretrained(arguments.model)
    tokenizer, ends = find_tokenizer(arguments.model, model.vocabulary), end_tokens(model)
    sys.stdout.reconfigure(errors="backslashreplace")  # a prompt may hold bytes that are no UTF-8
    try:
        requests = [Request(prompt, tokenizer.encode(prompt), arguments.length) for prompt in arguments.prompts]
        longest = max(len(request.prompt) for request in requests) + max(arguments.length, 1)
        server = Server(model, arguments.capacity, max_length=longest, ends=ends)
    except ValueError as error:
        parser.error(str(error))
    began, count = time.perf_counter(), 0
    with jax.default_matmul_precision("float32"):
        for name, written in server.serve(requests):
            if isinstance(written, ValueError):
                print(f"---- {name!r} is refused: {written}")
                continue
            count += len(written)
            print(f"---- {name!r}\n{name}{tokenizer.decode(written)}")
    print(f"---- {count} tokens in {time.perf_counter() - began:.1f} s, compilation included")


if __name__ == "__main__":
    main()
