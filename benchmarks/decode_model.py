"""Decode with a whole model on one NVIDIA GPU: tokens per second of glax.models.generate, or of fla's model with its cache.

python benchmarks/decode_model.py             # GLA-340M, 64 sequences behind prompts of 2048 tokens, bfloat16
python benchmarks/decode_model.py --by fla    # GLAForCausalLM, one call a token
python benchmarks/decode_model.py --by fla --part 0/4    # compiles a fourth of the candidates of its kernels, and times nothing
python benchmarks/decode_model.py --model mamba2

The models are those of train.py. The time of a token is the difference of two calls that go on by different numbers of tokens,
so that the prompt is not in it. The last line is a result in the form of benchmarks/results/README.md.
"""

import argparse
import json
import statistics
import time

from train import MODELS, a_part, config_of, fla_model

FEW, MANY, REPEATS = 8, 72, 3  # tokens behind the prompt


def by_glax(args) -> dict:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import glax.models

    bf16 = jnp.bfloat16
    model = glax.models.from_config(config_of(args), dtype=bf16, param_dtype=bf16, rngs=nnx.Rngs(0))
    prompts = jax.random.randint(jax.random.key(1), (args.batch, args.tokens), 0, model.vocabulary)

    def run(count):
        jax.block_until_ready(glax.models.generate(model, prompts, count))

    row = timed(run)
    return row | dict(gib=jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30)


def by_fla(args) -> dict | None:
    import torch
    from peers_fla import compile_a_part, short_tuning

    if args.part:
        compile_a_part(*args.part)
    else:
        short_tuning()
    torch.manual_seed(0)
    model = fla_model(args).to(torch.bfloat16).eval()
    prompts = torch.randint(0, MODELS[args.model].vocabulary, (args.batch, args.tokens), device="cuda")

    @torch.no_grad()
    def run(count):
        tokens, cache = prompts, None
        for _ in range(count):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        torch.cuda.synchronize()

    if args.part:
        return run(2)
    row = timed(run)
    return row | dict(gib=torch.cuda.max_memory_allocated() / 2**30)


def timed(run) -> dict:
    """Return the seconds of the first calls, of a prompt with its first tokens, and of one further token."""
    seconds, began = {}, time.perf_counter()
    for count in (FEW, MANY):
        run(count)
    first = time.perf_counter() - began
    for count in (FEW, MANY):
        each = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run(count)
            each.append(time.perf_counter() - began)
        seconds[count] = statistics.median(each)
    return dict(first_s=first, prompt_s=seconds[FEW], token_s=(seconds[MANY] - seconds[FEW]) / (MANY - FEW))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="gla")
    parser.add_argument("--by", choices=("glax", "fla"), default="glax")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter look")
    parser.add_argument("--part", type=a_part, help="i/n; with --by fla")
    args = parser.parse_args()
    choice = MODELS[args.model]
    args.layers = args.layers or choice.layers
    row = by_fla(args) if args.by == "fla" else by_glax(args)
    if row is None:
        return
    second = row.pop("token_s")
    row |= dict(ms=1e3 * second, tokens_per_second=round(args.batch / second))
    named = dict(model=choice.name, problem=f"{args.batch} x {args.tokens}", mode="decode", implementation=args.by)
    print(json.dumps(named | {name: round(x, 3) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()
