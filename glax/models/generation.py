"""Continue prompts token by token: in compiled loops, or as a stream. Read what a checkpoint says about it."""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.core.bind import (
    check_flag,
    check_integers,
    check_memory,
    check_real,
    is_array,
    known_integer,
    known_number,
    known_values,
)
from glax._src.core.compiling import start_compiling
from glax._src.core.explicit_axes import spec_of, with_automatic_axes
from glax._src.core.files import newest
from glax._src.core.recurrence import bucket, to_int32
from glax.models.folders import read_optional_object
from glax.models.model import CausalLM, check_tokens, require_whole
from glax.models.sampling import Sampling, Stops, chosen
from glax.models.structure import Structure

PADDINGS = ("right", "left")
# A cache of keys and values begins with room for as many tokens behind the longest prompt, and doubles when it is full.
ROOM = 512


def generate(
    model: CausalLM,
    tokens: Int[Array, "B T"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    lengths: Int[Array, "B"] | None = None,
    padding: str = "right",
    samples: int = 1,
    key: Key[Array, "*rows"] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    repetition_penalty: float | Float[Array, ""] | None = None,
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    log_probs: bool = False,
) -> Any:
    """Return the tokens that continue each prompt, int32 [B * samples, max_new_tokens]. With log_probs return (tokens,
    log_probs), of which the second are the logarithms of the tokens' probabilities, float32 of the same shape.

    One compiled program reads the prompts and draws the first tokens; another writes the others. They are compiled side by side,
    and also serve `stream`, and models of equal structure. The number of tokens in the prompts is padded to one of a few sizes,
    each of which compiles both again. Caches of keys and values grow with the longest sequence; each growth compiles the second
    again.

    tokens:      [B, T], prompts of one length or padded; or a list of prompts of any lengths, each a list of tokens.
    lengths:     [B], the lengths of the prompts in tokens [B, T], each at least 1; T each if None.
    padding:     the side of the prompts on which padding lies, "right" or "left". Its content has no influence.
    samples:     how many continuations of each prompt are drawn. Those of prompt b are the rows from b * samples on.
    key:         one key for all draws; or [B * samples] keys, with which a row's draws do not depend on the other rows.
    temperature: 0 takes the likeliest token. Otherwise a token is drawn from softmax(logits / temperature) with `key`.
    top_k:       draw among the k likeliest tokens; no limit if None. ValueError with temperature 0, unless None.
    top_p:       draw among the likeliest tokens that together have this probability, at least one; no limit if None. ValueError
                 with temperature 0, unless None.
    repetition_penalty: a logit of a token that the prompt or the continuation holds is divided by it if it is above 0, and
                 multiplied by it otherwise; no penalty if None. Keskar et al. 2019, https://arxiv.org/abs/1909.05858.
    eos:         a token, or several, that end a sequence. An ended sequence repeats the token that ended it. The loop ends when
                 all sequences have ended.
    stop:        a text, or several. After each token the text of the continuation so far is searched for them. The token with
                 which it first contains one of them is the sequence's last. The host then reads tokens one at a time, as in
                 `stream`.
    tokenizer:   an object whose decode(tokens) gives the text of a continuation, such as one of
                 `glax.models.tokens.find_tokenizer`. It must be given with stop, and only then. Where decode takes
                 skip_special_tokens, the text holds special tokens.
    log_probs:   whether to return log softmax(logits) at each token: of the model's own distribution, before penalty,
                 temperature, top_k and top_p. It is 0 for the repeated token of an ended sequence.

    Raises ValueError or TypeError, which names the argument: also if temperature is above 0 and key is None.

    >>> prompts = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> glax.models.generate(model, prompts, 8, temperature=0.7, key=jax.random.key(0)).shape
    (2, 8)
    """
    require_whole(model)
    drawing = (samples, key, temperature, top_k, top_p, repetition_penalty, eos, log_probs)
    call = prepare(model, tokens, max_new_tokens, lengths, padding, drawing, stop, tokenizer)
    if call.stops is None:
        call.write_until(call.count)
    else:
        for _ in call.one_by_one():
            pass
    tokens, found = result(call.count, call.progress)
    return (tokens, found) if log_probs else tokens


def stream(
    model: CausalLM,
    tokens: Int[Array, "B T"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    lengths: Int[Array, "B"] | None = None,
    padding: str = "right",
    samples: int = 1,
    key: Key[Array, "*rows"] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    repetition_penalty: float | Float[Array, ""] | None = None,
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    log_probs: bool = False,
) -> Iterator[Any]:
    """Yield the tokens of `generate`, one int32 [B * samples] after another, each as soon as it is computed. With log_probs,
    yield (tokens, log_probs). The stream ends after max_new_tokens, or when all sequences have ended.

    Arguments and errors are as in `generate`; ValueError also for a model or arguments that are traced. Errors are raised at the
    call, before the first token. The first token does not wait for the program that writes the others, which is compiled
    meanwhile. Behind the second token nothing is compiled, unless a cache of keys and values grows.

    >>> tokens = glax.models.stream(model, jnp.array([[1, 2, 3]]), 8)
    >>> len([int(token[0]) for token in tokens])
    8
    """
    require_whole(model)
    drawing = (samples, key, temperature, top_k, top_p, repetition_penalty, eos, log_probs)
    call = prepare(model, tokens, max_new_tokens, lengths, padding, drawing, stop, tokenizer)
    if call.is_traced:
        raise ValueError("model and arguments of stream must be known, got some that are traced: use generate")
    return call.one_by_one()


# ---- compiled --------------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """Hold how far R continuations have come.

    number: how many tokens each has. token: the last token of each, which the model has not read yet. done: which have ended.
    log_prob: the log probability of `token`, or None. seen: which tokens of the vocabulary the prompt or the continuation holds,
    or None without a penalty. written: all tokens. log_probs: their log probabilities, or None.
    """

    number: Int[Array, ""]
    token: Int[Array, "R"]
    done: Bool[Array, "R"]
    log_prob: Float[Array, "R"] | None
    seen: Bool[Array, "R V"] | None
    written: Int[Array, "limit R"]
    log_probs: Float[Array, "limit R"] | None

    @classmethod
    def start(cls, sampling: Sampling, limit: int, R: int, V: int) -> "Progress":
        """Return the progress before the first token. limit: the tokens that `written` has room for. R: the number of
        continuations. V: the number of tokens in the vocabulary."""
        has = sampling.log_probs
        return cls(
            jnp.zeros((), jnp.int32),
            jnp.zeros(R, jnp.int32),
            jnp.zeros(R, bool),
            jnp.zeros(R, jnp.float32) if has else None,
            jnp.zeros((R, V), bool) if sampling.has_penalty else None,
            jnp.zeros((limit, R), jnp.int32),
            jnp.zeros((limit, R), jnp.float32) if has else None,
        )

    def with_next(self, sampling: Sampling, logits: Float[Array, "R V"], arrays: dict) -> "Progress":
        """Return the progress after the next token of each sequence, chosen by the logits. An ended sequence repeats its last
        token.

        arrays: the traced arguments of the draw by name, as `checked_drawing` returns them.
        """
        token, log_prob = chosen(sampling, logits, self.seen, arrays, self.number)
        token, done, log_probs = jnp.where(self.done, self.token, token), self.done, self.log_probs
        if log_prob is not None and log_probs is not None:
            log_prob = jnp.where(done, 0, log_prob)
            log_probs = log_probs.at[self.number].set(log_prob)
        if sampling.eos:
            done = done | jnp.isin(token, jnp.asarray(sampling.eos, jnp.int32))
        seen = None if self.seen is None else self.seen.at[jnp.arange(len(token)), token].set(True)
        written = self.written.at[self.number].set(token)
        return Progress(self.number + 1, token, done, log_prob, seen, written, log_probs)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Hold the static sizes of a call. samples: the continuations of a prompt. limit: the tokens that `Progress.written` has
    room for. room: the tokens of a sequence that the pools have room for."""

    samples: int
    limit: int
    room: int


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def read_prompts(structure: Structure, sampling: Sampling, sizes: Sizes, parameters, prompts: dict, arrays: dict):
    """Read the prompts. Return (the progress with the first token of each continuation, the pools of its R sequences).

    prompts: tokens [B, T]; or packed, tokens [T] with cu_seqlens [B + 1]. arrays: as `checked_drawing` returns them. structure
    and parameters: the model, as `Structure.of` divides it.
    """
    model, R = structure.model(parameters), num_prompts(prompts) * sizes.samples
    pools = model.initial_states(R, sizes.room)
    progress = Progress.start(sampling, sizes.limit, R, model.vocabulary)
    f = functools.partial(first_tokens, structure, sampling)
    return with_automatic_axes(f, specs_of(progress, pools), parameters, prompts, arrays, progress, pools)


def first_tokens(
    structure: Structure, sampling: Sampling, parameters, prompts: dict, arrays: dict, progress: Progress, pools
):
    """Read B prompts into empty pools, copy the state of each to the R / B rows of its continuations, and draw the first
    tokens.

    Return (progress, pools) after that. progress: from `Progress.start`. The other arguments are those of `read_prompts`.
    """
    model, tokens, cuts = structure.model(parameters), prompts["tokens"], prompts.get("cu_seqlens")
    B = num_prompts(prompts)
    samples = progress.token.shape[0] // B

    def to_all(x):
        return x if samples == 1 else jnp.repeat(x, samples, axis=0)

    states = pools if samples == 1 else jax.tree.map(lambda x: x[::samples], pools)
    if cuts is None:
        x, states = model.extend_hidden(tokens, states)
        rows, last = jnp.arange(B)[:, None], x[:, -1]
    else:
        x, states = model.prefill_hidden(tokens, states, jnp.arange(B), cuts)
        rows, last = sequence_of(cuts, tokens.shape[0]), x[cuts[1:] - 1]
        rows = jnp.where(jnp.arange(tokens.shape[0]) < cuts[-1], rows, B)  # padding is dropped
    if progress.seen is not None:
        seen = jnp.zeros((B, model.vocabulary), bool).at[rows, tokens].set(True, mode="drop")
        progress = progress._replace(seen=to_all(seen))
    pools = jax.tree.map(lambda pool, state: to_all(state).astype(pool.dtype), pools, states)
    return progress.with_next(sampling, to_all(model.logits(last)), arrays), pools


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=6)
def write_tokens(structure: Structure, sampling: Sampling, parameters, arrays: dict, until, progress: Progress, pools):
    """Write tokens until each sequence has `until`, or all sequences have ended. Return (progress, pools). The buffers of the
    argument `pools` are donated: it must not be read again. The other arguments are those of `read_prompts`."""
    f = functools.partial(next_tokens, structure, sampling)
    return with_automatic_axes(f, specs_of(progress, pools), parameters, arrays, until, progress, pools)


def next_tokens(structure: Structure, sampling: Sampling, parameters, arrays: dict, until, progress: Progress, pools):
    """Return (progress, pools) after a loop whose steps read the last token of each continuation and draw the next, until there
    are `until` tokens or all sequences have ended."""

    def following(carry):
        progress, pools = carry
        logits, pools = structure.model(parameters).step(progress.token, pools)
        return progress.with_next(sampling, logits, arrays), pools

    def continues(carry):
        return (carry[0].number < until) & ~carry[0].done.all()

    return jax.lax.while_loop(continues, following, (progress, pools))


def specs_of(progress: Progress, pools) -> tuple:
    """Return the PartitionSpecs of (progress, pools). The progress is replicated."""
    return jax.tree.map(lambda _: P(), progress), jax.tree.map(spec_of, pools)


def num_prompts(prompts: dict) -> int:
    """Return the number of prompts."""
    return len(prompts["tokens"]) if "cu_seqlens" not in prompts else prompts["cu_seqlens"].shape[0] - 1


def sequence_of(cuts: Int[Array, "N+1"], T: int) -> Int[Array, "T"]:
    """Return the number of the sequence of every packed token. Padding after the last sequence counts to it."""
    return jnp.clip(jnp.searchsorted(cuts, jnp.arange(T), side="right") - 1, 0, cuts.shape[0] - 2)


@functools.partial(jax.jit, static_argnums=0)
def result(count: int, progress: Progress) -> tuple[Int[Array, "R count"], Float[Array, "R count"] | None]:
    """Return the first `count` tokens of each sequence and their log_probs. Ended sequences repeat the token that ended them."""
    is_written = jnp.arange(count)[:, None] < progress.number
    tokens = jnp.where(is_written, progress.written[:count], progress.token).T
    return tokens, None if progress.log_probs is None else progress.log_probs[:count].T


# ---- one call --------------------------------------------------------------------------------------------------------


compiled: set[Hashable] = set()  # what the programs were compiled for in threads


@dataclasses.dataclass
class Call:
    """Hold the checked arguments of one call, and how far it has come.

    count: the tokens to write, max_new_tokens. samples, stops: the arguments `samples`, and `stop` with `tokenizer`. prompts,
    arrays: as `read_prompts` takes them. longest: the tokens of the longest prompt.
    most: the largest `sizes.room` that the call may need. progress: shapes before the first token. pools: None before it.
    compiling: the compilations of `read_prompts` and `write_tokens` that `begin_compiling` has begun, and that their first
    calls wait for.
    """

    model: CausalLM
    sampling: Sampling
    count: int
    samples: int
    prompts: dict
    arrays: dict
    longest: int
    stops: Stops | None

    def __post_init__(self):
        self.structure, self.parameters = Structure.of(self.model)
        leaves = jax.tree.leaves((self.parameters, self.prompts, self.arrays))
        self.is_traced = any(isinstance(x, Tracer) for x in leaves)
        if self.is_traced and self.stops is not None:
            raise ValueError("stop must be None where the model or an argument is traced: call generate outside of jit")
        limit = bucket(max(self.count, 64))
        # Both are sizes of buckets, so that all lengths in a bucket give the same shapes.
        self.most = bucketed(bucketed(self.longest) + limit)
        room = min(self.most, bucketed(bucketed(self.longest) + ROOM))
        if self.is_traced or not (room == self.most or has_caches(self.model)):
            room = self.most
        self.sizes = Sizes(self.samples, limit, room)
        rows = num_prompts(self.prompts) * self.samples
        self.is_empty = not (self.count and rows)
        start = functools.partial(Progress.start, self.sampling, limit, rows, self.model.vocabulary)
        self.progress, self.pools = start() if self.is_empty else jax.eval_shape(start), None
        self.compiling: list[Future] = []

    def set_parameters(self, model: CausalLM):
        """Set the parameters from a model. The call was prepared for a model with shapes in their place."""
        self.model, (_, self.parameters) = model, Structure.of(model)

    @property
    def reading(self) -> tuple:
        """Return the operands of `read_prompts`."""
        return self.structure, self.sampling, self.sizes, self.parameters, self.prompts, self.arrays

    def writing(self, until: int, progress: Progress, pools) -> tuple:
        """Return the operands of `write_tokens`."""
        return self.structure, self.sampling, self.parameters, self.arrays, np.int32(until), progress, pools

    def begin_compiling(self):
        """Trace the programs of the call, and begin to compile them side by side in threads. The parameters may be shapes.

        Nothing is done a second time, for this call or one of equal sizes. Arrays on devices that were chosen for them have
        shardings that are not known before the first program has run; JAX compiles such a call as it comes.
        """
        leaves = jax.tree.leaves(self.reading[3:])
        sizes = (self.structure, self.sampling, self.sizes, self.count > 1, *((x.shape, x.dtype) for x in leaves))
        if (
            self.compiling
            or self.is_empty
            or self.is_traced
            or sizes in compiled
            or any(is_committed(x) for x in leaves)
        ):
            return
        traced = read_prompts.trace(*self.reading)
        programs = [traced]
        if self.count > 1:
            programs.append(write_tokens.trace(*self.writing(self.count, *traced.out_info)))
        self.compiling = start_compiling(program.lower() for program in programs)
        compiled.add(sizes)

    def write_until(self, until: int):
        """Write tokens until there are `until`, or all sequences have ended."""
        if self.is_empty:
            return
        if self.pools is None:
            self.begin_compiling()
            for compiling in self.compiling[:1]:
                compiling.result()
            self.progress, self.pools = read_prompts(*self.reading)
        while until > 1:
            for compiling in self.compiling:
                compiling.result()
            reached = min(until, self.sizes.room - self.longest + 1)  # the last token is not read
            self.progress, self.pools = write_tokens(*self.writing(reached, self.progress, self.pools))
            if reached == until or np.asarray(self.progress.done).all():
                return
            room = min(2 * self.sizes.room, self.most)
            self.sizes = dataclasses.replace(self.sizes, room=room)
            self.pools = self.model.grown_states(self.pools, room)

    def one_by_one(self) -> Iterator[Any]:
        """Yield the tokens [R], or (tokens, log_probs), until all have ended. Those whose text holds one of `stops` end."""
        for i in range(0 if self.is_empty else self.count):
            self.write_until(i + 1)
            token, done = np.asarray(self.progress.token), np.asarray(self.progress.done)
            if self.stops is not None and (found := self.stops.find(token, done)).any():
                done = done | found
                self.progress = self.progress._replace(done=jax.device_put(done, self.progress.done.sharding))
            yield token if self.progress.log_prob is None else (token, np.asarray(self.progress.log_prob))
            if done.all():
                return


def bucketed(length: int) -> int:
    """Return the size of the bucket of a length: the least multiple of 16, and of an eighth of the next power of two, that is at
    least `length`."""
    step = max(16, bucket(length) // 8)
    return -(-length // step) * step


def is_committed(x) -> bool:
    """Return whether an array lies on devices that were chosen for it, and not on the default device."""
    return isinstance(x, jax.Array) and x.committed


def has_caches(model: CausalLM) -> bool:
    """Return whether some states of the model grow with the tokens of a sequence, as keys and values do."""
    one, two = (jax.eval_shape(lambda n=n: model.empty_states(1, n)) for n in (1, 2))
    return jax.tree.map(jnp.shape, one) != jax.tree.map(jnp.shape, two)


# ---- checks ----------------------------------------------------------------------------------------------------------


def prepare(model, tokens, max_new_tokens, lengths, padding, drawing: tuple, stop, tokenizer) -> Call:
    """Return a `Call` with the checked arguments of `generate`. Raises what `generate` raises.

    model: may have shapes in place of parameters, which `Call.set_parameters` sets later. drawing: (samples, key, temperature,
    top_k, top_p, repetition_penalty, eos, log_probs).
    """
    if padding not in PADDINGS:
        raise ValueError(f"padding must be 'right' or 'left', got {padding!r}")
    if isinstance(tokens, list | tuple):
        for name, given in (("lengths", lengths), ("padding", None if padding == "right" else padding)):
            if given is not None:
                raise ValueError(f"{name} must not be given where tokens is a list of prompts, got {given!r:.80}")
        tokens, lengths = of_lists(tokens)
    check_tokens("tokens", tokens, "[B, T]", model.vocabulary)
    B, T = tokens.shape
    if T == 0:
        raise ValueError(f"tokens must be [B, T] with T of at least 1, got shape {tokens.shape}")
    prompts, longest = arranged(tokens, lengths, padding)
    if (count := known_integer("max_new_tokens", max_new_tokens)) < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {count}")
    samples, *rest = drawing
    if (samples := known_integer("samples", samples)) < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    sampling, arrays = checked_drawing(model, B, samples, *rest)
    stops = Stops.of(stop, tokenizer, B * samples)
    return Call(model, sampling, count, samples, prompts, arrays, longest, stops)


def of_lists(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Return (the prompts padded with zeros on the right, [B, T]; their lengths, [B]). Raises ValueError or TypeError."""
    rows = [np.asarray(prompt) for prompt in prompts]
    for i, row in enumerate(rows):
        if row.ndim != 1 or not row.size:
            raise ValueError(f"tokens[{i}] must be a list of at least one token, got {prompts[i]!r:.80}")
        check_integers(f"tokens[{i}]", row)
    found = np.zeros((len(rows), max(map(len, rows), default=1)), np.int64)
    for i, row in enumerate(rows):
        found[i, : len(row)] = np.minimum(row, np.iinfo(np.int64).max)
    return found, np.array([len(row) for row in rows], np.int32)


def arranged(tokens: Int[Array | np.ndarray, "B T"], lengths, padding: str) -> tuple[dict, int]:
    """Return (the prompts as the dict that `read_prompts` takes, the greatest length, T if lengths are traced).

    Known prompts are packed on the host, into as many tokens as their bucket has. Prompts of one length that are traced, or on
    several devices, stay [B, T].
    """
    B, T = tokens.shape
    known, is_padded = known_values(tokens), lengths is not None
    several = known is not None and isinstance(tokens, jax.Array) and len(tokens.sharding.device_set) > 1
    if B == 0 or (not is_padded and (known is None or several)):
        return dict(tokens=to_int32(tokens)), T
    lengths = checked_lengths(lengths, B, T)
    known_lengths = known_values(lengths)
    if known is not None and known_lengths is not None:
        begins = T - known_lengths if padding == "left" else np.zeros_like(known_lengths)
        rows = [row[begin : begin + n] for row, begin, n in zip(known, begins, known_lengths, strict=True)]
        packed = np.zeros(bucketed(int(known_lengths.sum())), np.int32)
        packed[: known_lengths.sum()] = np.concatenate(rows)
        cuts = np.concatenate([[0], np.cumsum(known_lengths)]).astype(np.int32)
        return jax.device_put(dict(tokens=packed, cu_seqlens=cuts)), int(known_lengths.max())
    tokens, lengths = to_int32(tokens), to_int32(lengths)
    cuts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    rows, own = jnp.arange(B * T), sequence_of(cuts, B * T)
    begins = T - lengths if padding == "left" else jnp.zeros_like(lengths)
    at = jnp.clip(rows - cuts[own] + begins[own], 0, T - 1)
    return dict(tokens=jnp.where(rows < cuts[-1], tokens[own, at], 0), cu_seqlens=cuts), T


def checked_drawing(
    model, B, samples, key, temperature, top_k, top_p, repetition_penalty, eos, log_probs
) -> tuple[Sampling, dict]:
    """Return (the `Sampling`, which is static; {name: array} of the arguments that may be traced). Raises ValueError or
    TypeError, which names the argument."""
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
    if greedy and samples > 1:
        raise ValueError(
            f"samples must be 1 at temperature 0, whose continuations are equal, got {samples}: pass a temperature above 0"
        )
    check_flag("log_probs", log_probs)
    if key is None:
        if not greedy:
            raise ValueError("key must be given where temperature is above 0, such as jax.random.key(0)")
    else:
        check_key(key, B * samples)
    arrays = {} if greedy else dict(key=key, temperature=float32(temperature))
    if top_p is not None:
        arrays["top_p"] = float32(top_p)
    if repetition_penalty is not None:
        check_real("repetition_penalty", repetition_penalty)
        penalty = known_number(repetition_penalty)
        if penalty is not None and not penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {penalty}")
        arrays["penalty"] = float32(repetition_penalty)
    ends = eos_tokens(eos, model.vocabulary)
    return Sampling(greedy, top_k, top_p is not None, "penalty" in arrays, ends, bool(log_probs)), arrays


def float32(x):
    """Return a number as a scalar in float32. A known number is converted on the host, without a program."""
    known = known_number(x)
    return jnp.asarray(x, jnp.float32) if known is None else np.float32(known)


def checked_lengths(lengths, B: int, T: int) -> Int[Array | np.ndarray, "B"]:
    """Return the lengths of the prompts, integers [B]; T each if None. Raises TypeError or ValueError unless there is one for
    each prompt, from 1 to T where it is known."""
    if lengths is None:
        return np.full(B, T, np.int32)
    if not is_array(lengths):
        lengths = np.asarray(lengths)
    check_integers("lengths", lengths)
    if lengths.shape != (B,):
        raise ValueError(f"lengths must be [B]=[{B}] as tokens has rows, got shape {lengths.shape}")
    known = known_values(lengths)
    if known is not None and (wrong := known[(known < 1) | (known > T)]).size:
        raise ValueError(f"lengths must be from 1 to T={T}, got {wrong[0]}")
    return lengths


def eos_tokens(eos, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of the argument `eos`, which is a token, several or None, as a tuple. Raises TypeError or ValueError
    for others than integers from 0 to vocabulary - 1."""
    if eos is None:
        return ()
    is_one = not isinstance(eos, Iterable) or (is_array(eos) and eos.shape == ())
    found = tuple(known_integer("eos", token) for token in ([eos] if is_one else eos))
    if wrong := [token for token in found if not 0 <= token < vocabulary]:
        raise ValueError(f"eos must be from 0 to {vocabulary - 1}, got {wrong[0]}: no sequence ends with it")
    return found


def check_key(key, rows: int):
    """Raise TypeError unless key is a key or an array of keys with one axis, typed or raw; ValueError unless such an array has
    `rows` keys."""
    if isinstance(key, np.ndarray):
        check_memory("key", key)
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = is_array(key) and key.dtype == jnp.uint32
    several = key.ndim - raw if typed or raw else -1
    if several not in (0, 1):
        got = f"{key.dtype} of shape {key.shape}" if is_array(key) else repr(key)
        raise TypeError(f"key must be one key of jax.random, such as jax.random.key(0), got {got}")
    if several and key.shape[0] != rows:
        raise ValueError(f"key must be one key, or one for each of the {rows} continuations, got {key.shape[0]} keys")


# ---- generation_config.json: the tokens that end a sequence, and how tokens are drawn -----------------------------------------

FILE = "generation_config.json"
MOST = 1e6  # the most that `glax generate` takes as a temperature; more tokens than a vocabulary has
TOP_K = 50  # what transformers takes where the file has do_sample and no top_k
# Options that glax does not have, each with the values of it that change nothing. None, too, changes nothing for each.
NEUTRAL: dict[str, tuple] = {
    name: values
    for names, values in (
        ("bad_words_ids begin_suppress_tokens constraints force_words_ids suppress_tokens", ([],)),
        (
            "diversity_penalty encoder_no_repeat_ngram_size min_length min_new_tokens no_repeat_ngram_size "
            "penalty_alpha",
            (0,),
        ),
        (
            "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id max_time "
            "watermarking_config",
            (),
        ),
        ("encoder_repetition_penalty guidance_scale num_beam_groups num_beams num_return_sequences", (1,)),
        ("max_length", (20,)),  # as transformers has it where it is not set
        ("remove_invalid_values token_healing", (False,)),
        ("sequence_bias", ([], {})),
    )
    for name in names.split()
}
# The same for options that only matter where tokens are drawn, above temperature 0.
NEUTRAL_DRAWN: dict[str, tuple] = dict(epsilon_cutoff=(0,), eta_cutoff=(0,), min_p=(0,), top_h=(), typical_p=(1,))


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Hold the options for generation that a checkpoint's files contain.

    eos: the tokens that end a sequence. temperature: 0 unless the file has do_sample. top_k, top_p: None for no limit.
    repetition_penalty: None for 1. stop: the texts that end a sequence. max_new_tokens: None if the file does not say.
    unsupported: options of the file that would change what is generated, as "name=value".
    """

    eos: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    unsupported: tuple[str, ...] = ()


def generation_defaults(model: CausalLM, **given) -> GenerationDefaults:
    """Return the defaults of the generation_config.json in the folder that the model was loaded from.

    End tokens are those of that file, else those of config.json. End tokens outside of the vocabulary are left out. With
    do_sample and without top_k, top_k is 50, as in transformers.

    given: temperature, top_k, top_p, repetition_penalty or max_new_tokens, each in place of the file's if not None. A value of
    the file that has no effect is not checked, such as top_k and top_p at temperature 0.

    Raises OSError if the file cannot be read, and ValueError, which names the key, for a value of another kind or range.
    """
    path, values = file_of(model)
    eos, penalty = end_tokens_of(model, path, values), number_option(path, values, "repetition_penalty", 1.0, given)
    if not penalty > 0:
        raise ValueError(f"repetition_penalty in {path} must be above 0, got {penalty!r}")
    stop = values.get("stop_strings") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise ValueError(f"stop_strings in {path} must be a text or a list of texts, got {stop!r:.80}")
    sampled = values.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ValueError(f"do_sample in {path} must be true or false, got {sampled!r:.80}")
    temperature = number_option(path, values if sampled else {}, "temperature", 1.0 if sampled else 0.0, given)
    if temperature < 0:
        raise ValueError(f"temperature in {path} must be at least 0, got {temperature!r}")
    drawing = values if temperature else {}
    top_k = number_option(path, drawing, "top_k", TOP_K if sampled and temperature else 0, given)
    top_p = number_option(path, drawing, "top_p", 1.0, given)
    if not (isinstance(top_k, int) and top_k >= 0):
        raise ValueError(f"top_k in {path} must be an integer of at least 0, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p in {path} must be above 0 and at most 1, got {top_p!r}")
    count = number_option(path, values, "max_new_tokens", 0, given)
    if not (isinstance(count, int) and (count > 0 or values.get("max_new_tokens") is None)):
        raise ValueError(f"max_new_tokens in {path} must be an integer of at least 1, got {count!r}")
    neutral = NEUTRAL | (NEUTRAL_DRAWN if temperature else {})
    others = {name: values.get(name) for name in sorted(neutral)}
    return GenerationDefaults(
        eos,
        float(temperature),
        top_k or None,
        float(top_p) if top_p < 1 else None,
        float(penalty) if penalty != 1 else None,
        tuple(stop),
        count or None,
        tuple(f"{name}={x!r:.40}" for name, x in others.items() if x is not None and x not in neutral[name]),
    )


def end_tokens(model: CausalLM) -> tuple[int, ...]:
    """Return the tokens that end a sequence, for `eos` of `generate` and `stream`: eos_token_id of the generation_config.json in
    the folder that the model was loaded from, else of its config.json; () if neither has one.

    Tokens that the vocabulary does not have are left out. Raises ValueError for an eos_token_id that is neither a token nor a
    list of tokens.

    >>> glax.models.end_tokens(model)  # `generate` takes it: eos=glax.models.end_tokens(model) or None
    ()
    """
    return end_tokens_of(model, *file_of(model))


def file_of(model: CausalLM) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the generation_config.json of the model's folder and its content, which is empty if there is none."""
    path = None if model.folder is None else newest(Path(model.folder), FILE)
    return path, {} if path is None else read_optional_object(path)


def end_tokens_of(model: CausalLM, path: Path | None, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of `values`, the content of the generation_config.json at `path`, else of the model's config.json;
    without those that the vocabulary does not have."""
    eos = tokens_of(path, values.get("eos_token_id"))
    if eos is None:
        config = model.config.values | model.config.text_values
        eos = tokens_of("config.json", config.get("eos_token_id")) or []
    return tuple(token for token in eos if 0 <= token < model.vocabulary)


def tokens_of(path: Path | str | None, value: Any) -> list[int] | None:
    """Return the tokens of `value`, an eos_token_id, which is a token, a list of tokens or None; None for None. path: its file,
    for the message. Raises ValueError for another value."""
    if value is None:
        return None
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise ValueError(f"eos_token_id in {path} must be a token or a list of tokens, got {value!r:.80}")
    return found


def number_option(
    path: Path | None, values: Mapping[str, Any], key: str, default: float, given: Mapping[str, Any]
) -> Any:
    """Return given[key] if there is one, else values[key], else the default. Raises ValueError for a value that is no number.
    path: the file of `values`, for the message."""
    if given.get(key) is not None:
        return given[key]
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{key} in {path} must be a number of at most {MOST:g}, got {value!r:.80}")
    return value
