"""Measure what the scheduler of `glax serve` writes: requests that arrive together, whose prompts begin alike, by their number.

python benchmarks/serving.py                                   # GLA-1.3B, 1,024 + 256 tokens, 512 of them shared
python benchmarks/serving.py --model gla-340m --together 1 64 --repeats 3 --json FILE
python benchmarks/serving.py --by generate                     # the same prompts in one call of glax.models.generate
python benchmarks/serving.py --by transformers                 # by transformers' generate, where torch has a GPU

Weights are random, in bfloat16. Each number of requests is served twice untimed, which compiles what reads prompts whole and
behind stored prefixes, and then `repeats` times, with other prompts. tokens_per_second: tokens of answers in a second, the
reading of the prompts included. first_token_s: seconds to the first token of a request, the median; last_first_token_s: to the
last. cached_share: the share of the prompts' tokens that stored prefixes had. first_s: seconds of the untimed runs.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints_folder import CONFIGS
from flax import nnx
from output import table, write

import glax.models
import glax.server

SHARED = dict(
    model_type="gla", expand_k=0.5, expand_v=1.0, vocab_size=32000, tie_word_embeddings=False, eos_token_id=None
)
MODELS = {
    "tiny": SHARED | dict(hidden_size=64, num_hidden_layers=2, num_heads=2, intermediate_size=64, vocab_size=256),
    "gla-340m": SHARED | dict(hidden_size=1024, num_hidden_layers=24, num_heads=4, intermediate_size=2816),
    "gla-1.3b": SHARED | dict(hidden_size=2048, num_hidden_layers=24, num_heads=4, intermediate_size=5632),
    "qwen3.5-4b": CONFIGS["qwen3.5-4b"] | dict(eos_token_id=None),
}
COLUMNS = (
    "requests", "implementation", "tokens_per_second", "first_token_s", "last_first_token_s", "cached_share", "first_s"
)  # fmt: skip


class Prompts:
    """Draw prompts of `length` tokens, of which the first `shared` are those of one prefix."""

    def __init__(self, vocabulary: int, length: int, shared: int):
        self.draw, self.vocabulary, self.length = np.random.default_rng(0), vocabulary, length
        self.prefix = self.draw.integers(1, vocabulary, shared)

    def take(self, count: int) -> list[list[int]]:
        rest = self.draw.integers(1, self.vocabulary, (count, self.length - len(self.prefix)))
        return [[*self.prefix.tolist(), *row.tolist()] for row in rest]


def by_scheduler(options, model, count: int):
    """Return run(prompts) -> (seconds, seconds to each first token, tokens of prompts that stored prefixes had)."""
    scheduler = glax.server.Scheduler(
        model, capacity=count, rows=options.rows, max_length=options.prompt + options.answer, queue=count,
        prefix_bytes=options.prefix_bytes,
    )  # fmt: skip

    def run(prompts):
        began, first, before = time.perf_counter(), {}, scheduler.counts().cached_tokens

        def receive(number, event):
            first.setdefault(number, time.perf_counter() - began)

        for number, prompt in enumerate(prompts):
            request = glax.server.Request(prompt, max_tokens=options.answer)
            scheduler.submit(request, functools.partial(receive, number))
        while scheduler.round():
            pass
        finished = scheduler.counts().finished
        if set(finished) - {"length", "stop"}:
            raise RuntimeError(f"requests ended otherwise than by their length: {finished}")
        return time.perf_counter() - began, sorted(first.values()), scheduler.counts().cached_tokens - before

    return run


def by_generate(options, model, count: int):
    def run(prompts):
        began = time.perf_counter()
        jax.block_until_ready(glax.models.generate(model, jnp.asarray(prompts), options.answer))
        return time.perf_counter() - began, [], 0

    return run


def by_transformers(options, model, count: int):
    """Return the same by transformers on the folder that glax writes. GLA's own model code there is fla's."""
    import fla  # noqa: F401, which registers its models
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        glax.models.save_pretrained(model, folder)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()

    @torch.inference_mode()
    def run(prompts):
        tokens, began = torch.tensor(prompts, device="cuda"), time.perf_counter()
        peer.generate(tokens, max_new_tokens=options.answer, min_new_tokens=options.answer, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began, [], 0

    return run


BY = dict(scheduler=by_scheduler, generate=by_generate, transformers=by_transformers)


def measured(options, model, by: str, count: int) -> dict:
    run, prompts = BY[by](options, model, count), Prompts(model.vocabulary, options.prompt, options.shared)
    began = time.perf_counter()
    for _ in range(2):
        run(prompts.take(count))
    compiled, found = time.perf_counter() - began, [run(prompts.take(count)) for _ in range(options.repeats)]
    seconds = statistics.median(x[0] for x in found)
    line = dict(model=options.model, implementation=by, requests=count, first_s=round(compiled, 2))
    line |= dict(seconds=round(seconds, 4), tokens_per_second=round(count * options.answer / seconds, 1))
    if first := found[-1][1]:
        line |= dict(first_token_s=round(statistics.median(first), 4), last_first_token_s=round(first[-1], 4))
        line |= dict(cached_share=round(found[-1][2] / (count * options.prompt), 3))
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gla-1.3b")
    parser.add_argument("--by", nargs="+", choices=BY, default=["scheduler"])
    parser.add_argument("--together", nargs="+", type=int, default=[1, 16, 64, 256], help="requests at a time")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=512, help="of which all prompts share so many")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=2048, help="the most tokens of prompts that a round reads")
    parser.add_argument("--prefix-bytes", type=int, default=2 << 30, help="of stored prefixes")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the file for the results")
    options = parser.parse_args()
    if not 0 <= options.shared < options.prompt:
        parser.error(f"--shared must be from 0 to below --prompt, {options.prompt}, got {options.shared}")
    dtype = jnp.bfloat16
    model = glax.models.from_config(MODELS[options.model], dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    lines = []
    for count in options.together:
        for by in options.by:
            lines.append(measured(options, model, by, count))
            print(json.dumps(lines[-1]), flush=True)
    print(table([{name: line.get(name) for name in COLUMNS} for line in lines]))
    if options.json:
        write(options.json, lines)


if __name__ == "__main__":
    main()
