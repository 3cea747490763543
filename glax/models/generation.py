"""Continue prompts token by token, with states of constant size: in one compiled loop, or as a stream. Read what a
checkpoint says about it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.core.bind import (
    check_integers,
    check_memory,
    check_real,
    is_array,
    known_integer,
    known_number,
    known_values,
)
from glax._src.core.files import ContentError, newest, read_json
from glax._src.core.recurrence import to_int32
from glax.models.model import CausalLM, checked_tokens
from glax.nn.automatic import spec_of, with_automatic_axes

PADDINGS = ("right", "left")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Hold what is known while tracing. eos: the tokens that end a sequence. padded: whether prompts have lengths of their
    own."""

    greedy: bool
    top_k: int | None
    has_top_p: bool
    eos: tuple[int, ...]
    padded: bool


def generate(
    model: CausalLM,
    tokens: Int[Array, "B T"],
    max_new_tokens: int,
    *,
    lengths: Int[Array, "B"] | None = None,
    padding: str = "right",
    key: Key[Array, ""] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    eos: int | Sequence[int] | None = None,
) -> Int[Array, "B max_new_tokens"]:
    """Return the tokens that continue each prompt, computed in one compiled loop: [B, max_new_tokens].

    lengths:     [B], the lengths of the prompts in tokens [B, T], each at least 1; T each if None.
    padding:     the side of the prompts on which padding lies, "right" or "left". Its content has no influence.
    temperature: 0 takes the likeliest token. Otherwise a token is drawn from softmax(logits / temperature) with `key`.
    top_k:       draw among the k likeliest tokens. None with temperature 0.
    top_p:       draw among the likeliest tokens that together have this probability, at least one. None with temperature 0.
    eos:         a token, or several, that end a sequence. An ended sequence repeats the token that ended it. The loop ends with
                 the last sequence.

    Raises ValueError or TypeError, which names the argument. Sampling needs a key.

    >>> prompts = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> glax.models.generate(model, prompts, 8, temperature=0.7, key=jax.random.key(0)).shape
    (2, 8)
    """
    prompts, sampling, arrays = prepare(model, tokens, lengths, padding, key, temperature, top_k, top_p, eos)
    count = checked_count(max_new_tokens)
    graph, params = nnx.split(model)
    return loop(graph, sampling, count, params, prompts, arrays)


def stream(
    model: CausalLM,
    tokens: Int[Array, "B T"],
    max_new_tokens: int,
    *,
    lengths: Int[Array, "B"] | None = None,
    padding: str = "right",
    key: Key[Array, ""] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    eos: int | Sequence[int] | None = None,
) -> Iterator[Int[np.ndarray, "B"]]:
    """Yield the tokens of `generate`, one [B] after another, each as soon as it is computed. The stream ends with the last
    sequence.

    Arguments and errors are as in `generate`. Errors are raised at the call, before the first token.

    >>> tokens = glax.models.stream(model, jnp.array([[1, 2, 3]]), 8)
    >>> len([int(token[0]) for token in tokens])
    8
    """
    prompts, sampling, arrays = prepare(model, tokens, lengths, padding, key, temperature, top_k, top_p, eos)
    count = checked_count(max_new_tokens)
    graph, params = nnx.split(model)
    return streamed(graph, sampling, count, params, prompts, arrays)


def streamed(graph, sampling: Sampling, count: int, params, prompts: dict, arrays: dict) -> Iterator[np.ndarray]:
    if count < 1:
        return
    token, done, pools = first_token(graph, sampling, count, params, prompts, arrays)
    for i in range(count):
        yield np.asarray(token)
        if i + 1 == count or bool(done.all()):
            return
        token, done, pools = next_token(graph, sampling, params, token, done, pools, arrays, i + 1)


# ---- compiled --------------------------------------------------------------------------------------------------------


def on_pools(f: Callable, pools, *operands) -> Any:
    """Return f(pools, *operands), which are the tokens, which sequences have ended, and pools that lie as `pools`."""
    return with_automatic_axes(f, (P(), P(), jax.tree.map(spec_of, pools)), pools, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def loop(graph, sampling: Sampling, count: int, params, prompts: dict, arrays: dict) -> Int[Array, "B count"]:
    return with_automatic_axes(functools.partial(all_tokens, graph, sampling, count), P(), params, prompts, arrays)


def all_tokens(graph, sampling: Sampling, count: int, params, prompts: dict, arrays: dict) -> Int[Array, "B count"]:
    B = prompts["tokens"].shape[0]
    written = jnp.zeros((count, B), jnp.int32)
    if count == 0 or B == 0:
        return written.T
    token, done, pools = begun(graph, sampling, count, params, prompts, arrays)

    def unfinished(carry):
        i, _, done, _, _ = carry
        return (i < count) & ~done.all()

    def one(carry):
        i, token, done, pools, written = carry
        token, done, pools = following(graph, sampling, params, token, done, pools, arrays, i)
        return i + 1, token, done, pools, written.at[i].set(token)

    carry = (1, token, done, pools, written.at[0].set(token))
    last, token, _, _, written = jax.lax.while_loop(unfinished, one, carry)
    return jnp.where(
        jnp.arange(count)[:, None] < last, written, token
    ).T  # ended sequences repeat the token that ended them


def begun(graph, sampling: Sampling, count: int, params, prompts: dict, arrays: dict):
    """Read the prompts, and return (the first new tokens, which sequences have ended, the pools).

    prompts: tokens [B, T], and of padded prompts their lengths [B]. count: the number of new tokens.
    """
    B, T = prompts["tokens"].shape
    pools = nnx.merge(graph, params).initial_states(B, T + count)
    return on_pools(functools.partial(prompts_read, graph, sampling), pools, params, prompts, arrays)


def prompts_read(graph, sampling: Sampling, pools, params, prompts: dict, arrays: dict):
    model = nnx.merge(graph, params)
    tokens, lengths = prompts["tokens"], prompts["lengths"]
    B, T = tokens.shape
    if not sampling.padded:
        x, pools = model.extend_hidden(tokens, pools)
        token, done = chosen(sampling, model.logits(x[:, -1]), arrays, 0), jnp.zeros(B, bool)
        return token, ended(sampling, token, done), pools
    cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    rows = jnp.arange(B * T)
    own = jnp.clip(jnp.searchsorted(cu_seqlens, rows, side="right") - 1, 0, B - 1)
    at = jnp.clip(rows - cu_seqlens[own] + prompts["begins"][own], 0, T - 1)
    packed = jnp.where(rows < cu_seqlens[-1], tokens[own, at], 0)
    x, pools = model.prefill_hidden(packed, pools, jnp.arange(B), cu_seqlens)
    logits = model.logits(x[cu_seqlens[1:] - 1])
    token, done = chosen(sampling, logits, arrays, 0), jnp.zeros(B, bool)
    return token, ended(sampling, token, done), pools


def following(graph, sampling: Sampling, params, token, done, pools, arrays: dict, number):
    """Read the last tokens, and return (the next tokens, which sequences have ended, the pools). number: how many tokens each
    sequence has."""
    return on_pools(functools.partial(tokens_read, graph, sampling), pools, params, token, done, arrays, number)


def tokens_read(graph, sampling: Sampling, pools, params, token, done, arrays: dict, number):
    logits, pools = nnx.merge(graph, params).step(token, pools)
    token = jnp.where(done, token, chosen(sampling, logits, arrays, number))
    return token, ended(sampling, token, done), pools


first_token = jax.jit(begun, static_argnums=(0, 1, 2))
next_token = jax.jit(following, static_argnums=(0, 1), donate_argnums=5)


def chosen(sampling: Sampling, logits: Float[Array, "B V"], arrays: dict, number) -> Int[Array, "B"]:
    """Return the next token of each sequence. Of equal logits, the lowest tokens are the likeliest. number: the number of the
    token, which gives the key of its draw: the key that `jax.random.split` gives, without an array of all."""
    logits = logits.astype(jnp.float32)
    likeliest = logits.argmax(-1).astype(jnp.int32)
    if sampling.greedy:
        return likeliest
    temperature = arrays["temperature"]
    scaled = logits / jnp.where(temperature > 0, temperature, 1)
    if sampling.top_k is not None:
        scaled = jnp.where(among_likeliest(scaled, min(sampling.top_k, scaled.shape[-1])), scaled, -jnp.inf)
    if sampling.has_top_p:
        scaled = jnp.where(in_nucleus(scaled, arrays["top_p"]), scaled, -jnp.inf)
    drawn = jax.random.categorical(jax.random.fold_in(arrays["key"], number), scaled).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, likeliest)


def among_likeliest(logits: Float[Array, "B V"], count: int) -> Bool[Array, "B V"]:
    """Return whether a token is among the `count` likeliest, [B, V]. Exactly as many are: the lowest ones of equal logits."""
    likeliest = jax.lax.top_k(logits, count)[1]  # in order, the lower token first where logits are equal
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), likeliest, True, -1, inplace=False)


def in_nucleus(logits: Float[Array, "B V"], top_p) -> Bool[Array, "B V"]:
    """Return whether the tokens that are likelier together have a probability below top_p, [B, V]. The likeliest token is
    always in the set. Of equal logits, the lower token counts as likelier."""
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    probability = jnp.take_along_axis(jax.nn.softmax(logits), order, -1)
    inside = jnp.cumsum(probability, -1) - probability < top_p
    inside = inside.at[:, 0].set(True)
    return jnp.put_along_axis(jnp.zeros_like(inside), order, inside, -1, inplace=False)


def ended(sampling: Sampling, token: Int[Array, "B"], done: Bool[Array, "B"]) -> Bool[Array, "B"]:
    return done | jnp.isin(token, jnp.asarray(sampling.eos, jnp.int32)) if sampling.eos else done


# ---- checks ----------------------------------------------------------------------------------------------------------


def checked_count(max_new_tokens) -> int:
    if (count := known_integer("max_new_tokens", max_new_tokens)) < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {count}")
    return count


def prepare(model, tokens, lengths, padding, key, temperature, top_k, top_p, eos) -> tuple[dict, Sampling, dict]:
    """Check the arguments, and return (the prompts, the static arguments, the arguments that may be traced)."""
    tokens = checked_tokens("tokens", tokens, "[B, T]", model.vocabulary)
    B, T = tokens.shape
    if T == 0:
        raise ValueError(f"tokens must be [B, T] with T of at least 1, got shape {tokens.shape}")
    if padding not in PADDINGS:
        raise ValueError(f"padding must be 'right' or 'left', got {padding!r}")
    padded, lengths = lengths is not None, checked_lengths(lengths, B, T)
    begins = T - lengths if padding == "left" else jnp.zeros_like(lengths)
    prompts = dict(tokens=tokens, lengths=lengths, begins=begins)
    check_real("temperature", temperature)
    known = known_number(temperature)
    if known is not None and known < 0:
        raise ValueError(f"temperature must be at least 0, got {known}")
    greedy = known == 0
    if top_k is not None:
        top_k = known_integer("top_k", top_k)
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None:
        check_real("top_p", top_p)
        share = known_number(top_p)
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {share}")
    for name, limit in (("top_k", top_k), ("top_p", top_p)):
        if greedy and limit is not None:
            raise ValueError(
                f"{name} must be None at temperature 0, which takes the likeliest token, got {limit}: pass a temperature above 0"
            )
    if key is None:
        if not greedy:
            raise ValueError("key must be given where temperature is above 0, such as jax.random.key(0)")
        key = jax.random.key(0)
    check_key(key)
    arrays = dict(key=key, temperature=jnp.asarray(temperature, jnp.float32))
    arrays["top_p"] = jnp.asarray(1.0 if top_p is None else top_p, jnp.float32)
    return (
        prompts,
        Sampling(greedy, top_k, top_p is not None, eos_tokens(eos, model.vocabulary), padded),
        arrays,
    )


def checked_lengths(lengths, B: int, T: int) -> Int[Array, "B"]:
    if lengths is None:
        return jnp.full(B, T, jnp.int32)
    if not is_array(lengths):
        lengths = np.asarray(lengths)
    check_integers("lengths", lengths)
    if lengths.shape != (B,):
        raise ValueError(f"lengths must be [B]=[{B}] as tokens has rows, got shape {lengths.shape}")
    known = known_values(lengths)
    if known is not None and (wrong := known[(known < 1) | (known > T)]).size:
        raise ValueError(f"lengths must be from 1 to T={T}, got {wrong[0]}")
    return to_int32(lengths)


def eos_tokens(eos, vocabulary: int) -> tuple[int, ...]:
    if eos is None:
        return ()
    is_one = not isinstance(eos, Iterable) or (is_array(eos) and eos.shape == ())
    found = tuple(known_integer("eos", token) for token in ([eos] if is_one else eos))
    if wrong := [token for token in found if not 0 <= token < vocabulary]:
        raise ValueError(f"eos must be from 0 to {vocabulary - 1}, got {wrong[0]}: no sequence ends with it")
    return found


def check_key(key):
    if isinstance(key, np.ndarray):
        check_memory("key", key)
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = is_array(key) and key.dtype == jnp.uint32
    if not (typed and key.ndim == 0) and not (raw and key.ndim == 1):
        got = f"{key.dtype} of shape {key.shape}" if is_array(key) else repr(key)
        raise TypeError(f"key must be one key of jax.random, such as jax.random.key(0), got {got}")


# ---- generation_config.json: the tokens that end a text, and how its tokens are drawn -----------------------------------------

FILE = "generation_config.json"
MOST = 1e6  # the most that `glax generate` takes as a temperature; more tokens than a vocabulary has
# Options that change what is generated and that glax does not have, with the values that change nothing. None never does.
NEUTRAL: dict[str, tuple] = {
    name: values
    for names, values in (
        ("bad_words_ids begin_suppress_tokens force_words_ids stop_strings suppress_tokens", ([],)),
        (
            "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length min_new_tokens "
            "min_p no_repeat_ngram_size penalty_alpha",
            (0,),
        ),
        (
            "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id top_h "
            "watermarking_config",
            (),
        ),
        ("encoder_repetition_penalty guidance_scale num_beam_groups num_beams repetition_penalty typical_p", (1,)),
        ("sequence_bias", ([], {})),
    )
    for name in names.split()
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Hold what a checkpoint says about generating from it.

    eos: the tokens that end a text. temperature: 0 unless the file has do_sample. top_k, top_p: None for no limit. unsupported:
    options of the file that would change what is generated, as "name=value".
    """

    eos: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    unsupported: tuple[str, ...] = ()


def generation_defaults(model: CausalLM) -> GenerationDefaults:
    """Return the defaults of the generation_config.json in the folder that the model was loaded from.

    End tokens are those of that file, else those of config.json. Tokens that the vocabulary does not have are left out. Raises
    OSError if the file cannot be read, and ValueError, which names the key, for a value of another kind or range.
    """
    path = None if model.folder is None else newest(Path(model.folder), FILE)
    values: Any = {}
    if path is not None and os.path.lexists(path):
        try:
            _, values = read_json(path)
        except ContentError as error:
            raise ValueError(f"{path} holds no JSON: {error}") from None
        if not isinstance(values, Mapping):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    eos = tokens_of(path, values.get("eos_token_id"))
    if eos is None:
        eos = tokens_of("config.json", model.config.values.get("eos_token_id")) or []
    temperature = number(path, values, "temperature", 1.0)
    top_k, top_p = number(path, values, "top_k", 0), number(path, values, "top_p", 1.0)
    if not (isinstance(top_k, int) and top_k >= 0):
        raise ValueError(f"top_k in {path} must be an integer of at least 0, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p in {path} must be above 0 and at most 1, got {top_p!r}")
    if temperature < 0:
        raise ValueError(f"temperature in {path} must be at least 0, got {temperature!r}")
    sampled = values.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ValueError(f"do_sample in {path} must be true or false, got {sampled!r:.80}")
    others = {name: values.get(name) for name in sorted(NEUTRAL)}
    return GenerationDefaults(
        tuple(token for token in eos if 0 <= token < model.vocabulary),
        float(temperature) if sampled else 0.0,
        top_k or None,
        float(top_p) if top_p < 1 else None,
        tuple(f"{name}={x!r:.40}" for name, x in others.items() if x is not None and x not in NEUTRAL[name]),
    )


def end_tokens(model: CausalLM) -> tuple[int, ...]:
    """Return the tokens that end a text: `eos` of `generate` and `stream`. See `generation_defaults`.

    >>> glax.models.end_tokens(model)
    ()
    """
    return generation_defaults(model).eos


def tokens_of(path: Path | str | None, value: Any) -> list[int] | None:
    """Return the tokens of an eos_token_id, which is a token, a list of tokens or None."""
    if value is None:
        return None
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise ValueError(f"eos_token_id in {path} must be a token or a list of tokens, got {value!r:.80}")
    return found


def number(path: Path | None, values: Mapping[str, Any], key: str, default: float) -> Any:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{key} in {path} must be a number of at most {MOST:g}, got {value!r:.80}")
    return value
