"""A small random checkpoint with a tokenizer, and a server of it in a thread, for tests and the soak."""

import contextlib
import functools
import http.client
import json
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import openai
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from glax.cli.serve import bound, prepared
from glax.models import from_config, from_pretrained, generate, save_pretrained
from glax.models.tokens import TOKENIZER, find_tokenizer
from glax_cli.parser import build_parser

NAME = "tiny-gla"
TEXT = "The quick brown fox, é à ñ, 你好世界, 😀👩‍👩‍👧, jumps over the lazy dog. "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """Write a checkpoint of random weights whose tokenizer begins texts with <s>, with a chat template that does so too. It has
    no end token, so that answers are as long as they are asked to be."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 20, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = dict(model_type="gla", vocab_size=made.get_vocab_size(), hidden_size=64, num_hidden_layers=2, num_heads=2)
    save_pretrained(from_config(config, rngs=nnx.Rngs(0)), folder)
    made.save(str(folder / TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<s>", chat_template=TEMPLATE)))
    return folder


class Alone:
    """What the checkpoint answers without a server: `generate` on one prompt."""

    def __init__(self, folder: pathlib.Path):
        self.model = from_pretrained(folder)
        self.tokenizer = find_tokenizer(folder, self.model.vocabulary)
        self.found = {}

    def tokens(self, prompt, count: int, **options) -> list[int]:
        """The most likely tokens. All calls without options share one program, for `generate` writes 32 tokens."""
        prompt = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        key = (tuple(prompt), *sorted(options.items()))
        if key not in self.found:
            self.found[key] = np.asarray(generate(self.model, [prompt], 32, **options))[0].tolist()
        return self.found[key][:count]

    def text(self, prompt, count: int, **options) -> str:
        return self.tokenizer.decode(self.tokens(prompt, count, **options))


class Running:
    """A server in a thread, and ways to call it."""

    def __init__(self, app, listener, port: int):
        self.app, self.listener, self.port = app, listener, port
        self.scheduler = app.scheduler
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **(dict(api_key="none", max_retries=0, timeout=120) | options))

    def complete(self, prompt, **options):
        """The completion, the most likely one unless options say otherwise, or the list of its chunks if it is streamed."""
        with self.client() as client:
            found = client.completions.create(**(dict(model=NAME, prompt=prompt, temperature=0) | options))
            return list(found) if options.get("stream") else found

    def call(self, method: str, path: str, body=None, **headers) -> tuple[int, dict, bytes]:
        """Status, headers and body of a plain call."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def wait_until(self, holds: Callable[[], object], seconds: float = 60):
        """Wait until holds() is true, and fail after `seconds`, so that an error of the server is no test without an end."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, (self.scheduler.counts(), self.app.num_open)
            time.sleep(0.001)

    def wait_until_free(self, seconds: float = 20):
        self.wait_until(self.is_free, seconds)

    def is_free(self) -> bool:
        counts = self.scheduler.counts()
        return not counts.running and not counts.waiting and not self.app.num_open

    def poison(self, most: int | None = None) -> bool:
        """Make NaN the state of a request that writes, and has more to write. Return whether there is one.

        most: its max_tokens, if not any request will do.
        """
        with self.scheduler.turn:
            for ticket in self.scheduler.running:
                left = ticket.request.max_tokens - len(ticket.written)
                is_wanted = most is None or (ticket.request.max_tokens == most and ticket.request.temperature == 0)
                if is_wanted and left > 1 and ticket.written and not ticket.is_cancelled:
                    arrays = self.scheduler.slots.arrays
                    arrays["pools"] = jax.tree.map(functools.partial(with_nan, ticket.slot), arrays["pools"])
                    return True
            return False


def with_nan(slot: int, x):
    return x.at[slot].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x


@contextlib.contextmanager
def running(folder: pathlib.Path, *options: str, key: str | None = None) -> Iterator[Running]:
    """Serve a folder, as `glax serve` with these options does, on a free port."""
    args = build_parser().parse_args(["serve", str(folder), "--port", "0", *options])
    with contextlib.closing(bound(args.host, args.port)) as listening:
        app, listener = prepared(args, listening, key)
        app.scheduler.start()
        thread = threading.Thread(target=listener.run, kwargs=dict(sockets=[listening]), daemon=True)
        thread.start()
        while not listener.started:
            time.sleep(0.01)
        try:
            yield Running(app, listener, listening.getsockname()[1])
        finally:
            listener.should_exit = True
            thread.join(20)
            app.scheduler.stop()
            assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)
