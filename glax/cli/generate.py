"""Run `glax generate`: continue a prompt with a model in a folder."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from glax._src.core.files import cache_folder
from glax.cli.errors import UsageError, reason, require

PACKAGES = ("flax", "safetensors")
DRAWING = ("temperature", "top_k", "top_p", "repetition_penalty")
MAX_NEW_TOKENS = 100
PROGRAMS, MOST_BYTES = "programs", 2**31  # the folder of compiled programs; the oldest are removed beyond so many bytes


def run(args) -> int:
    began = time.perf_counter()
    if args.temperature == 0 or (
        args.temperature is None and not os.path.lexists(args.folder / "generation_config.json")
    ):
        check_limits(args)
    require(PACKAGES)
    with stored_programs() if args.compilation_cache else contextlib.nullcontext():
        return generated(args, began)


def generated(args, began: float) -> int:
    """Load the model, and print the text that the model writes. Return the exit code. began: the time.perf_counter() at which
    the command began."""
    import jax.numpy as jnp

    from glax._src.core.compiling import beside
    from glax.models import load_adapter, merge_lora
    from glax.models.generation import generation_defaults, prepare
    from glax.models.load import opened_model
    from glax.models.sampling import Stops
    from glax.models.tokens import find_tokenizer

    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    try:
        model, read = opened_model(args.folder, dtype=dtype)
        if args.adapter is not None:
            read()
            model = merge_lora(load_adapter(model, args.adapter))
        tokenizer = find_tokenizer(args.folder, model.vocabulary, args.tokenizer)
        given = {name: vars(args)[name] for name in (*DRAWING, "max_new_tokens")}
        defaults = generation_defaults(model, **given)
        prompt = tokenizer.encode(args.prompt)
        if not prompt:
            raise UsageError("the prompt has no tokens: name at least one character with --prompt")
        drawing, stops = how_to_draw(args, defaults), tuple(args.stop or defaults.stop)
        if args.samples > 1 and not drawing["temperature"]:
            raise UsageError(f"--samples needs --temperature above 0: all would be equal, got {args.samples}")
        key = jax.random.key(args.seed) if drawing["temperature"] else None
        options = (args.samples, key, *(drawing[name] for name in DRAWING), defaults.eos, True)
        count = defaults.max_new_tokens or MAX_NEW_TOKENS
        finder = tokenizer if stops else None
        call = prepare(model, [prompt], count, None, "right", options, stops, finder)
        if args.adapter is None:
            beside(call.begin_compiling, read)
            call.set_parameters(model)
        pieces = call.one_by_one()
    except (ValueError, OSError) as error:
        raise UsageError(reason(error)) from None
    rows, log_probs, times = show(tokenizer, pieces, stops, as_it_grows=args.samples == 1)
    if args.samples > 1 or args.log_probs:
        for i, (row, found) in enumerate(zip(rows, log_probs, strict=True)):
            end = length_of(row, defaults.eos, Stops.of(stops, finder, 1))
            if args.samples > 1:
                print(f"[{i + 1}] {shown_text(tokenizer, row[:end], stops)}")
            if args.log_probs:
                for x, token in zip(found[:end], row[:end], strict=True):
                    print(f"{x:10.4f}  {tokenizer.decode([token])!r}")
    count, first = len(times), times[0] - began
    rate = f", {(count - 1) / (times[-1] - times[0]):,.0f} tokens/s behind it" if count > 1 else ""
    print(f"{count} tokens, the first after {first:.1f} s{rate}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def stored_programs() -> Iterator[None]:
    """Keep compiled programs in glax's cache folder, and read them from there, unless JAX has a cache already."""
    folder = cache_folder()
    if jax.config.jax_compilation_cache_dir is not None or folder is None:  # pyright: ignore[reportAttributeAccessIssue]
        yield
        return
    try:
        (folder / PROGRAMS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"glax: compiled programs are not stored: {reason(error)}", file=sys.stderr)
        yield
        return
    options = dict(
        jax_compilation_cache_dir=str(folder / PROGRAMS),
        jax_compilation_cache_max_size=MOST_BYTES,
        jax_persistent_cache_min_compile_time_secs=0.0,
    )
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # what JAX has compiled before was without a folder
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def check_limits(args):
    """Raise UsageError if the command line has top_k or top_p. Callers have found that the temperature is 0."""
    for option, limit in (("--top-k", args.top_k), ("--top-p", args.top_p)):
        if limit is not None:
            raise UsageError(
                f"{option} needs --temperature above 0, for 0 takes the likeliest token: got {option} {limit}"
            )


def how_to_draw(args, defaults) -> dict:
    """Return temperature, top_k, top_p and repetition_penalty by name: from the command line, else from generation_config.json.

    Those from the file are printed. defaults: the `GenerationDefaults`, with the command line's options in their places.
    """
    if defaults.temperature == 0:
        check_limits(args)
    drawing = {name: vars(defaults)[name] for name in DRAWING}
    read = [
        f"{name}={x}"
        for name in (*DRAWING, "max_new_tokens")
        if vars(args)[name] is None and (x := vars(defaults)[name])
    ]
    if read:
        print(f"glax generate: {', '.join(read)} as generation_config.json says", file=sys.stderr)
    if defaults.unsupported:
        rest = ", ".join(defaults.unsupported)
        print(f"glax generate: not supported, and not done: {rest} in generation_config.json", file=sys.stderr)
    return drawing


def length_of(row: list[int], eos: tuple[int, ...], stops) -> int:
    """Return how many tokens a sequence has: up to the first that ends it. stops: the `Stops` of one sequence, or None."""
    for at, token in enumerate(row):
        if token in eos or (stops is not None and stops.find(np.array([token]), np.array([False])).any()):
            return at + 1
    return len(row)


def shown_text(tokenizer, tokens, stops, *, is_whole: bool = True) -> str:
    """Return the text that is printed for tokens: it ends before the first of the texts `stops`.

    is_whole: whether no token follows; if not, text that later tokens may change is left out.
    """
    from glax.models.sampling import before_stop

    text = tokenizer.decode(tokens)
    if not is_whole:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the last character may be incomplete
    return before_stop(text, stops, is_whole=is_whole)


def show(tokenizer, pieces, stops, *, as_it_grows: bool) -> tuple[list[list[int]], np.ndarray, list[float]]:
    """Print the text of one sequence as it grows, if as_it_grows. Return (the tokens of each sequence, their logprobs
    [sequences, tokens], the time by time.perf_counter() at which each token was there).

    pieces: yields for each step (a token of each sequence, its logprobs). stops: as in `shown_text`.
    """
    tokens, log_probs, times, shown = [], [], [], ""
    for token, found in pieces:
        times.append(time.perf_counter())
        tokens.append(token)
        log_probs.append(found)
        if as_it_grows:
            text = shown_text(tokenizer, np.stack(tokens, 1)[0].tolist(), stops, is_whole=False)
            if len(text) > len(shown):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    rows = np.stack(tokens, 1).tolist()
    if as_it_grows:
        print(shown_text(tokenizer, rows[0], stops)[len(shown) :])
    return rows, np.stack(log_probs, 1), times
