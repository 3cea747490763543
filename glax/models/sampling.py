"""Choose the next tokens from logits, and find the texts that end a sequence."""

import dataclasses
import enum
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Hold the static properties of how tokens are drawn.

    greedy: whether the temperature is known to be 0. top_k: as in `generate`. has_top_p, has_penalty: whether there is a top_p,
    or a repetition penalty. eos: the tokens that end a sequence. log_probs: whether log probabilities are returned.
    """

    greedy: bool
    top_k: int | None
    has_top_p: bool
    has_penalty: bool
    eos: tuple[int, ...]
    log_probs: bool


def chosen(
    sampling: Sampling, logits: Float[Array, "R V"], seen: Bool[Array, "R V"] | None, arrays: dict, number
) -> tuple[Int[Array, "R"], Float[Array, "R"] | None]:
    """Return (the next token of each sequence, its log softmax(logits) or None). Of tokens with equal logits, the token with
    the lowest number is the likeliest.

    seen: which tokens are penalised; None without a penalty. arrays: the arguments of `generate` that may be traced, by name,
    such as temperature and key. number: how many tokens the continuation has already; the draw has the key fold_in(key,
    number).
    """
    logits = logits.astype(jnp.float32)
    token = drawn(sampling, processed(sampling, logits, seen, arrays), arrays, number)
    return token, log_prob_of(logits, token) if sampling.log_probs else None


def processed(
    sampling: Sampling, logits: Float[Array, "R V"], seen: Bool[Array, "R V"] | None, arrays: dict
) -> Float[Array, "R V"]:
    """Return the logits from whose softmax tokens are drawn, after the penalty, the temperature, top_k and top_p, in this order.
    A token that top_k or top_p excludes has -inf. Temperature 0 counts as 1."""
    if seen is not None:
        logits = penalised(logits, seen, arrays["penalty"])
    if sampling.greedy:
        return logits
    logits = tempered(logits, arrays["temperature"])
    if sampling.top_k is not None:
        logits = jnp.where(among_likeliest(logits, min(sampling.top_k, logits.shape[-1])), logits, -jnp.inf)
    if sampling.has_top_p:
        logits = jnp.where(in_nucleus(logits, arrays["top_p"]), logits, -jnp.inf)
    return logits


def drawn(sampling: Sampling, logits: Float[Array, "R V"], arrays: dict, number) -> Int[Array, "R"]:
    """Return tokens drawn from softmax(logits) with the key fold_in(key, number), or the likeliest at temperature 0. arrays:
    key and temperature by name."""
    likeliest = logits.argmax(-1).astype(jnp.int32)
    if sampling.greedy:
        return likeliest
    key = arrays["key"]
    is_raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    token = draw(key, number, logits) if key.ndim == is_raw else jax.vmap(draw, (0, None, 0))(key, number, logits)
    return jnp.where(arrays["temperature"] > 0, token, likeliest)


# ---- sequences with options of their own ---------------------------------------------------------------------------------


class SequenceOptions(NamedTuple):
    """Hold how the next token of each of B sequences is drawn, in arrays [B].

    key_data: data of keys, [B, words]. number: the token's number in its sequence. temperature, top_k, top_p, and the penalties
    repetition, presence and frequency: as in `glax.server.request.Request`.
    """

    key_data: Array
    number: Int[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]


class Draws(enum.IntEnum):
    """Name what a program that chooses tokens can do. A program of a higher value can do everything that one of a lower value
    can.

    Sorting takes long, so a program that can sort tests at run time whether a sequence needs it. On a GPU the host waits for
    the result of this test. The other programs test nothing.
    """

    LIKELIEST = 0  # all temperatures are 0
    UNLIMITED = 1  # no sequence with a temperature has top_k or top_p
    ANY = 2  # any options; in `glax.server.slots.draw` probabilities, too


def chosen_by_options(
    logits: Float[Array, "B V"],
    options: SequenceOptions,
    in_prompt: Bool[Array, "B V"],
    counts: Int[Array, "B V"],
    draws: Draws = Draws.ANY,
) -> Int[Array, "B"]:
    """Return the next token of each sequence, drawn by its own options. The result does not depend on the other sequences.

    in_prompt: which tokens the prompts hold. counts: how often the continuations hold each token. draws: at least what the
    options need.
    """
    logits = penalised(logits.astype(jnp.float32), in_prompt | (counts > 0), options.repetition[:, None])
    logits = logits - options.presence[:, None] * (counts > 0) - options.frequency[:, None] * counts
    likeliest = logits.argmax(-1).astype(jnp.int32)
    if draws is Draws.LIKELIEST:
        return likeliest
    logits = tempered(logits, options.temperature[:, None])
    if draws is Draws.ANY:  # sorting is left out where no sequence needs it
        is_limited = (options.temperature > 0) & ((options.top_k > 0) | (options.top_p < 1))
        logits = jax.lax.cond(
            is_limited.any(), limited, lambda logits, *_: logits, logits, options.top_k, options.top_p
        )
    token = jax.vmap(draw)(jax.random.wrap_key_data(options.key_data), options.number, logits)
    return jnp.where(options.temperature > 0, token, likeliest)


def limited(logits: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Return the logits with -inf for tokens that top_k or top_p exclude. top_k of 0 and top_p of 1 exclude none."""
    logits = jnp.where(among_likeliest(logits, top_k) | (top_k == 0)[:, None], logits, -jnp.inf)
    return jnp.where(in_nucleus(logits, top_p[:, None]) | (top_p == 1)[:, None], logits, -jnp.inf)


# ---- the parts of both ---------------------------------------------------------------------------------------------------


def log_prob_of(logits: Float[Array, "B V"], token: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return log softmax(logits) at the tokens."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty) -> Float[Array, "B V"]:
    """Return the logits with those of `seen` tokens divided by the penalty if they are above 0, else multiplied by it."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def tempered(logits: Float[Array, "B V"], temperature) -> Float[Array, "B V"]:
    """Return the logits divided by the temperature. Temperature 0 counts as 1."""
    return logits / jnp.where(temperature > 0, temperature, 1)


def draw(key, number, logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Return a token drawn from softmax(logits) with the key fold_in(key, number)."""
    return jax.random.categorical(jax.random.fold_in(key, number), logits).astype(jnp.int32)


def among_likeliest(logits: Float[Array, "B V"], count: int | Int[Array, "B"]) -> Bool[Array, "B V"]:
    """Return whether a token is among the `count` likeliest, [B, V]. Of tokens with equal logits the lowest come first."""
    if not isinstance(count, int):
        order = likeliest_first(logits)
        return jnp.put_along_axis(
            jnp.zeros(logits.shape, bool), order, jnp.arange(logits.shape[-1]) < count[:, None], -1, inplace=False
        )
    likeliest = jax.lax.top_k(logits, count)[1]  # in order, the lower token first where logits are equal
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), likeliest, True, -1, inplace=False)


def likeliest_first(logits: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Return the tokens in falling order of their logits, the lower first where these are equal."""
    return jnp.argsort(logits, axis=-1, stable=True, descending=True)


def in_nucleus(logits: Float[Array, "B V"], top_p) -> Bool[Array, "B V"]:
    """Return whether a token is in the nucleus, [B, V]: whether all tokens that are likelier than it together have a probability
    below top_p. The likeliest token always is. Of tokens with equal logits, the lower counts as likelier."""
    order = likeliest_first(logits)
    probability = jnp.take_along_axis(jax.nn.softmax(logits), order, -1)
    inside = jnp.cumsum(probability, -1) - probability < top_p
    inside = inside.at[:, 0].set(True)
    return jnp.put_along_axis(jnp.zeros_like(inside), order, inside, -1, inplace=False)


class Stops:
    """Find texts that end a sequence in the text of its tokens.

    tokenizer: an object with decode(tokens) -> text. Where decode takes skip_special_tokens, the text holds special tokens, so
    that they may end a sequence. rows: the number of sequences. For each new token all tokens of its sequence are decoded again,
    because a token's text may depend on the tokens before it.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, rows: int):
        self.texts, self.tokenizer = tuple(texts), tokenizer
        takes = inspect.signature(tokenizer.decode).parameters
        self.options = dict(skip_special_tokens=False) if "skip_special_tokens" in takes else {}
        self.written: list[list[int]] = [[] for _ in range(rows)]

    @classmethod
    def of(cls, stop, tokenizer, rows: int) -> "Stops | None":
        """Return `Stops` for `stop`, a text or several, or None if there is none. Raises TypeError or ValueError."""
        texts = [stop] if isinstance(stop, str) else list(stop or ())
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"stop must be a text or several, got {wrong[0]!r:.80}")
        if "" in texts:
            raise ValueError("stop must be texts of at least one character, got ''")
        if bool(texts) != (tokenizer is not None):
            raise ValueError(
                "stop and tokenizer must be given together: texts are found in what tokenizer.decode returns, got "
                + ("stop alone" if texts else "tokenizer alone")
            )
        return cls(texts, tokenizer, rows) if texts else None

    def find(self, tokens: Int[np.ndarray, "R"], done: Bool[np.ndarray, "R"]) -> Bool[np.ndarray, "R"]:
        """Return whether the text of a sequence, with its next token, holds one of the texts. False for ended sequences."""
        found = np.zeros(len(tokens), bool)
        for row in np.flatnonzero(~done):
            self.written[row].append(int(tokens[row]))
            text = self.tokenizer.decode(self.written[row], **self.options)
            found[row] = any(part in text for part in self.texts)
        return found


def before_stop(text: str, stops: Sequence[str], *, is_whole: bool) -> str:
    """Return the text before the first place where one of `stops` begins; the whole text if none occurs.

    is_whole: whether no more text follows. If False, an end of the text that may be the beginning of one of `stops` is left out
    too.
    """
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text if is_whole else text[: len(text) - max(begun, default=0)]
