"""Run `glax generate`: continue a prompt with a model in a folder."""

import dataclasses
import os
import sys
import time

from glax.cli.errors import UsageError, reason
from glax.cli.packages import require

PACKAGES = ("flax", "safetensors")


def run(args) -> int:
    if args.temperature == 0 or (
        args.temperature is None and not os.path.lexists(args.folder / "generation_config.json")
    ):
        check_limits(args)
    require(PACKAGES)
    import jax
    import jax.numpy as jnp

    from glax.models import from_pretrained, stream
    from glax.models.generation import generation_defaults
    from glax.models.tokens import find_tokenizer

    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    try:
        model = from_pretrained(args.folder, dtype=dtype)
        tokenizer = find_tokenizer(args.folder, model.vocabulary, args.tokenizer)
        defaults = generation_defaults(model)
        prompt = tokenizer.encode(args.prompt)
        if not prompt:
            raise UsageError("the prompt has no tokens: name at least one character with --prompt")
        drawing = how_to_draw(args, defaults)
        key = jax.random.key(args.seed)
        tokens = stream(model, jnp.asarray([prompt]), args.max_new_tokens, key=key, eos=defaults.eos, **drawing)
    except (ValueError, OSError) as error:
        raise UsageError(reason(error)) from None
    count, seconds = show(tokenizer, tokens)
    rate = f", {(count - 2) / seconds:,.0f} tokens/s behind the first two" if count > 2 else ""
    print(f"{count} tokens{rate}", file=sys.stderr)
    return 0


def check_limits(args):
    """Raise UsageError for a limit on the command line, where the temperature is 0."""
    for option, limit in (("--top-k", args.top_k), ("--top-p", args.top_p)):
        if limit is not None:
            raise UsageError(
                f"{option} needs --temperature above 0, for 0 takes the likeliest token: got {option} {limit}"
            )


def how_to_draw(args, defaults) -> dict:
    """Return temperature, top_k and top_p: those of the command line, else those of generation_config.json, which are
    printed."""
    if (defaults.temperature if args.temperature is None else args.temperature) == 0:
        check_limits(args)
        defaults = dataclasses.replace(defaults, top_k=None, top_p=None)
    given = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    drawing = {name: getattr(defaults, name) if x is None else x for name, x in given.items()}
    read = [f"{name}={x}" for name, x in drawing.items() if given[name] is None and x]
    if read:
        print(f"glax generate: {', '.join(read)} as generation_config.json says", file=sys.stderr)
    if defaults.unsupported:
        rest = ", ".join(defaults.unsupported)
        print(f"glax generate: not supported, and not done: {rest} in generation_config.json", file=sys.stderr)
    return drawing


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
