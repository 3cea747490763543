"""Serve with continuous batching: requests of any length come and go, and share one decoding step.

    python examples/serve.py --model demo-out/model "def " "import os" "class A"
    python examples/serve.py --model FOLDER "Once upon a time"

FOLDER is a checkpoint that `glax.models.from_pretrained` loads. The tokens of the demo's model are bytes. `glax serve FOLDER`
serves the same scheduler over HTTP.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from flax import nnx

from glax.models import from_config, from_pretrained
from glax.models.tokens import Bytes, Tokenizer, find_tokenizer
from glax.server import Finished, Request, Scheduler, Token


def consumer(prompt: str, tokenizer: Tokenizer) -> Callable[[Token | Finished], None]:
    """Return a function of a request's events, which prints the answer when it has ended."""
    tokens = []

    def receive(event: Token | Finished):
        if isinstance(event, Token):
            tokens.append(event.token)
        else:
            print(f"---- {prompt!r}: {event.reason} {event.message}\n{prompt}{tokenizer.decode(tokens)}")

    return receive


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    help = "a checkpoint's folder, such as the one that `glax demo` writes (default: untrained weights)"
    parser.add_argument("--model", type=Path, help=help)
    parser.add_argument("--length", type=int, default=200, help="tokens for each prompt (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=8, help="requests at a time (default: %(default)s)")
    arguments = parser.parse_args()
    sizes = dict(vocab_size=Bytes.vocabulary, hidden_size=128, num_hidden_layers=3, num_heads=4)
    untrained = dict(model_type="gla", **sizes)
    model = from_pretrained(arguments.model) if arguments.model else from_config(untrained, rngs=nnx.Rngs(0))
    sys.stdout.reconfigure(errors="backslashreplace")  # a prompt may hold bytes that are no UTF-8
    try:
        tokenizer = find_tokenizer(arguments.model, model.vocabulary)
        with jax.default_matmul_precision("float32"):
            scheduler = Scheduler(model, capacity=arguments.capacity, queue=len(arguments.prompts))
    except ValueError as error:
        parser.error(str(error))
    for prompt in arguments.prompts:
        try:
            request = Request(tokenizer.encode(prompt), arguments.length)
            scheduler.submit(request, consumer(prompt, tokenizer))
        except ValueError as error:  # a request that cannot be served is refused alone
            print(f"---- {prompt!r} is refused: {error}")
    while scheduler.round():
        pass


if __name__ == "__main__":
    main()
