"""Run `glax generate`: continue a prompt with a model in a folder."""

import argparse
import sys
import time

from glax.cli.arguments import INT32, a_path, within
from glax.cli.errors import UsageError
from glax.cli.packages import require

PACKAGES = ("flax", "safetensors")
DTYPES = ("float32", "bfloat16", "float16")


def number(least: float, most: float):
    """Return an argparse type for numbers from least to most."""

    def real(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {text}")
        return value

    return real


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt by a model in a folder",
        description="Continues a prompt by a checkpoint of fla, transformers or glax: a folder of config.json and "
        "safetensors. Its tokenizer.json is used where it has one; a vocabulary of 256 without one is bytes.",
    )
    parser.add_argument("folder", type=a_path, metavar="FOLDER", help="of the checkpoint")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue")
    help = "at most so many (default: %(default)s)"
    parser.add_argument("--max-new-tokens", type=within(1, INT32), default=100, metavar="N", help=help)
    help = "0 takes the likeliest token (default: %(default)s)"
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.0, metavar="X", help=help)
    parser.add_argument(
        "--top-k", type=within(1, INT32), metavar="N", help="draw among the N likeliest tokens; needs --temperature"
    )
    help = "draw among the likeliest tokens that together have this probability; needs --temperature"
    parser.add_argument("--top-p", type=number(1e-9, 1), metavar="X", help=help)
    parser.add_argument("--seed", type=within(0, 2**63 - 1), default=0, metavar="N", help="of drawing (default: 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: as in the file)")
    parser.add_argument("--tokenizer", type=a_path, metavar="FILE", help="a tokenizer.json")
    return parser


def run(args) -> int:
    for option, limit in (("--top-k", args.top_k), ("--top-p", args.top_p)):
        if limit is not None and args.temperature == 0:
            raise UsageError(
                f"{option} needs --temperature above 0, for 0 takes the likeliest token: got {option} {limit}"
            )
    require(PACKAGES)
    import jax
    import jax.numpy as jnp

    from glax.models import from_pretrained, stream
    from glax.models.tokens import find_tokenizer

    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    try:
        model = from_pretrained(args.folder, dtype=dtype)
        tokenizer = find_tokenizer(args.folder, model.vocabulary, args.tokenizer)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise UsageError("the prompt has no tokens: name at least one character with --prompt")
    tokens = stream(
        model,
        jnp.asarray([prompt]),
        args.max_new_tokens,
        key=jax.random.key(args.seed),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        eos=end_tokens(model),
    )
    count, seconds = show(tokenizer, tokens)
    rate = f", {(count - 2) / seconds:,.0f} tokens/s behind the first two" if count > 2 else ""
    print(f"{count} tokens{rate}", file=sys.stderr)
    return 0


def end_tokens(model) -> list[int]:
    """Return the end tokens of the config that the vocabulary has. Return none if the tokens are bytes."""
    eos = model.config.values.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    return [x for x in eos if isinstance(x, int) and 0 <= x < model.vocabulary and model.vocabulary > 256]


def show(tokenizer, tokens) -> tuple[int, float]:
    """Print the text as it grows. Return the number of tokens, and the seconds since the second token, when all is compiled."""
    written, shown, since = [], "", None
    for token in tokens:
        written.append(int(token[0]))
        text = tokenizer.decode(written)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the last character is complete
            print(text[len(shown) :], end="", flush=True)
            shown = text
        if len(written) == 2:
            since = time.perf_counter()
    print(tokenizer.decode(written)[len(shown) :])
    return len(written), 0.0 if since is None else time.perf_counter() - since
