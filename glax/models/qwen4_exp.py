"""Build the language model of Qwen4-Exp: the mixers of Qwen3.5 with experts, between which several streams of residuals run,
softmax attention that chooses the blocks it reads, and embeddings of n-grams."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, attention_sizes, hidden_act, layer_kinds
from glax.models.model import CausalLM, Mixing, Precision, outer_options
from glax.models.names import (
    GATED_MLP,
    Names,
    mixer_names,
    outer_names,
    renamed,
    same,
    stacked_experts,
    transposed_layouts,
)
from glax.models.qwen3_5 import FROM_WHOLE, OTHERS, SplitGatedDeltaNet, sparse_mlp
from glax.models.qwen3_5 import MIXERS as QWEN3_5_MIXERS
from glax.models.qwen3_next import MLPS, delta_sizes
from glax.models.rope import rotation
from glax.nn import Attention, RMSNorm, ShortConvolution
from glax.nn.choice import Choice
from glax.nn.parts import EMBED, VOCABULARY, by_head, for_rows, linear, merged, parameter
from glax.nn.passes import Rows, State
from glax.nn.rotary import rotate

# Published configs say "full_attention" of layers that choose blocks, too.
KINDS = {LINEAR: LINEAR, "indexed_attention": SOFTMAX, "full_attention": SOFTMAX}
INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
MIXERS = QWEN3_5_MIXERS | {
    SOFTMAX: (
        "self_attn",
        QWEN3_5_MIXERS[SOFTMAX][1]
        | {
            "index": "indexer.index_qk_proj",
            "index_query_norm": "indexer.q_layernorm",
            "index_key_norm": "indexer.k_layernorm",
        },
    )
}
STREAMS = {
    "norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "strength": "block_inject_weight",
}  # fmt: skip
NGRAMS = {
    "table": "ple_embedding.ngram_embedding.shard_*.table", "key": "key_proj", "value": "value_proj", "key_norm": "norm_key",
    "query_norm": "norm_query", "value_norm": "norm_conv", "conv": "conv1d",
}  # fmt: skip
# As FROM_ALONE of glax.models.qwen3_5, but the last norm is "hyper_connection_mixer" here.
FROM_ALONE = (r"^model\.(?=(embed_tokens|layers|hyper_connection_mixer)\.)", "model.language_model.")
GAP = 10007  # between the seeds of two layers that have n-grams: published tables were trained with it
GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1  # of SplitMix64
MOST_ROWS = 2**31 - 1  # of a table: its rows are named by int32


# ---- the streams of residuals ------------------------------------------------------------------------------------------------


class HyperConnection(nnx.Module):
    """Compute what a block reads from N streams of residuals x [*rows, N, D], and what it writes to each:

        h_n = RMSNorm(x_n)    w = sigmoid(W_up silu(W_down h / N))  [N, D]    read = sum_n w_n h_n / N
        strength = 2 sigmoid(W_s h / N)  [N]                                     x_n' = x_n + strength_n block(read)

    The projections read h of all streams. A call returns read [*rows, D] alone.

    count: N. rank: the width of W_down h. writes: whether there is a W_s; False for the one before the head, which no block
    follows.

    Zhu et al. 2024, https://arxiv.org/abs/2409.19606.
    """

    def __init__(self, width: int, count: int, rank: int, *, norm_eps: float, writes: bool = True, **options):
        self.count, whole = count, count * width
        norm: dict[str, Any] = dict(epsilon=norm_eps, zero_centred=True, param_dtype=options["param_dtype"])
        self.norm = RMSNorm(whole, groups=count, **norm)
        self.down = linear(whole, rank, (EMBED, None), **options)
        self.up = linear(rank, whole, (None, EMBED), **options)
        self.strength = linear(whole, count, (EMBED, None), **options) if writes else None

    def read(self, x: Float[Array, "*rows N D"]) -> tuple[Array, Array]:
        """Return read [*rows, D], and h of all streams [*rows, N D]."""
        h = self.norm(merged(x))
        w = by_head(jax.nn.sigmoid(self.up(jax.nn.silu(self.down(h) / self.count))), self.count)
        return (w * by_head(h, self.count)).mean(-2), h

    def write(self, x: Float[Array, "*rows N D"], y: Float[Array, "*rows D"], h: Array) -> Float[Array, "*rows N D"]:
        """Return x' [*rows, N, D]: x'_n = x_n + 2 sigmoid(s_n) y, with s = strength(h) / N.

        y: the output of the block. h: the second result of `read`.
        """
        assert self.strength is not None  # the last of a model writes nothing
        return x + y[..., None, :] * (2 * jax.nn.sigmoid(self.strength(h) / self.count))[..., None]

    def __call__(self, x: Float[Array, "*rows N D"]) -> Float[Array, "*rows D"]:
        return self.read(x)[0]


class HyperBlock(nnx.Module):
    """Compute a mixer and an MLP, each of which reads and writes the streams by a `HyperConnection`. If the block has features
    of n-grams, they are added to the streams first.

    `mix` takes a pair: the streams [*rows, N, D], and the tokens [*rows, 1].
    """

    def __init__(
        self,
        ngrams: "NGrams | None",
        attn_streams: HyperConnection,
        attn: Mixing,
        mlp_streams: HyperConnection,
        mlp: Any,
    ):
        self.ngrams, self.attn_streams, self.attn = ngrams, attn_streams, attn
        self.mlp_streams, self.mlp = mlp_streams, mlp

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        own = {} if self.ngrams is None else self.ngrams.empty_state(batch)
        return self.attn.empty_state(batch, max_length) | own

    def mix(self, pair: tuple[Array, Array], state: dict, rows: Rows) -> tuple[tuple[Array, Array], dict]:
        (x, tokens), own = pair, {}
        if self.ngrams is not None:
            features, own = self.ngrams.mix(x, tokens, state, rows)
            x = x + features
        read, h = self.attn_streams.read(x)
        y, after = self.attn.mix(read, state, rows)
        x = self.attn_streams.write(x, y, h)
        read, h = self.mlp_streams.read(x)
        return (self.mlp_streams.write(x, self.mlp(read), h), tokens), {**after, **own}


# ---- n-grams -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NGramHash:
    """Map the n-grams that end at a token to rows of a table, for n = 2 to the number of multipliers, each by `heads` hashes:

        a_n = xor over i < n of m_i token_{t - i}        row of hash j of n = offset_{n,j} + a_n mod p_{n,j}

    m: `multipliers`, odd. p: `primes`. m_i token is below 2^63 for every token of the vocabulary. Tokens before the sequence, and
    before the last `end` among t - 1, t - 2 and so on, count as `end`. rows: those of the whole table.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    end: int
    rows: int

    @property
    def size(self) -> int:
        return len(self.multipliers)

    @property
    def heads(self) -> int:
        return len(self.primes) // (self.size - 1)

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.primes[:-1], initial=0))

    def __call__(self, before: Sequence[Int[Array, "*rows"]]) -> Int[Array, "*rows hashes"]:
        """Return the rows of the table, [*rows, (size - 1) heads]. before: the token itself, the one before it and so on."""
        high, low = product(before[0].astype(jnp.uint32), self.multipliers[0])
        found, has_end, offsets = [], jnp.zeros(before[0].shape, bool), self.offsets
        for lag, token in enumerate(before[1:], 1):
            token = jnp.where(has_end, self.end, token)
            has_end = has_end | (token == self.end)
            more_high, more_low = product(token.astype(jnp.uint32), self.multipliers[lag])
            high, low = high ^ more_high, low ^ more_low
            own = slice((lag - 1) * self.heads, lag * self.heads)
            place = remainder(high, low, self.primes[own])
            found.append(place + for_rows(place, jnp.asarray(offsets[own], jnp.uint32), jnp.uint32))
        return jnp.concatenate(found, -1).astype(jnp.int32)

    def buffers(self) -> dict[str, np.ndarray]:
        """Return {name: array} of the hash's numbers that a checkpoint holds."""
        arrays = dict(
            layer_multipliers=self.multipliers, ngram_heads_vocab_sizes=self.primes, ngram_heads_offsets=self.offsets
        )
        return {name: np.array(values, np.int64) for name, values in arrays.items()}


def split_mix(state: int) -> int:
    """Return the output of SplitMix64 for a state.   Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195."""
    x = (state + GAMMA) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def primes_from(first: int) -> Iterator[int]:
    """Yield the primes of at least `first`, upwards."""
    for value in itertools.count(max(first, 2)):
        if value == 2 or (value % 2 and all(value % i for i in range(3, math.isqrt(value) + 1, 2))):
            yield value


def product(a: UInt32[Array, "*rows"], b: int) -> tuple[Array, Array]:
    """Return the upper and the lower 32 bits of a b, which is below 2^64."""
    b_low, b_high = b & 0xFFFFFFFF, b >> 32
    low, high = a & 0xFFFF, a >> 16
    middle = ((low * np.uint32(b_low & 0xFFFF)) >> 16) + ((high * np.uint32(b_low & 0xFFFF)) & 0xFFFF)
    middle = middle + ((low * np.uint32(b_low >> 16)) & 0xFFFF)
    upper = high * np.uint32(b_low >> 16) + ((low * np.uint32(b_low >> 16)) >> 16)
    upper = upper + ((high * np.uint32(b_low & 0xFFFF)) >> 16) + (middle >> 16)
    return upper + a * np.uint32(b_high), a * np.uint32(b_low)


def remainder(high: UInt32[Array, "*rows"], low: UInt32[Array, "*rows"], divisors: Sequence[int]) -> Array:
    """Return (2^32 high + low) mod p for each p of divisors, which are below 2^31: [*rows, len(divisors)]."""
    shift = 32 - max(divisors).bit_length()  # bits that are brought down at a time
    p = for_rows(high[..., None], jnp.asarray(divisors, jnp.uint32), jnp.uint32)
    found, left = high[..., None] % p, 32
    while left:
        taken = min(shift, left)
        left -= taken
        found = ((found << taken) | ((low[..., None] >> left) & np.uint32(2**taken - 1))) % p
    return found


class NGrams(nnx.Module):
    """Compute the features of the n-grams that end at a token, for each of N streams x_n [D]:

        e = the rows of the table that `hashes` names    g_n = RMSNorm(W_k^n e) . RMSNorm(x_n) / sqrt(D)
        u_n = sigmoid(sign(g_n) sqrt(max(|g_n|, 1e-6))) W_v e      y_n = u_n + silu(conv(RMSNorm(u_n)))

    width: D. count: N. embed_width: the width of e. parts: in how many tensors, at most, a checkpoint divides the table. The
    parameter is [tensors, rows of each, E], with rows that nothing reads behind the last. conv: a `ShortConvolution` of conv_size
    rows, each hashes.size rows from the next.   Cheng et al. 2026, https://arxiv.org/abs/2601.07372.
    """

    def __init__(
        self, width: int, count: int, embed_width: int, hashes: NGramHash, parts: int, *, conv_size: int, norm_eps: float,
        kernel_init, dtype, param_dtype, rngs,
    ):  # fmt: skip
        self.hashes, self.count, self.dtype = hashes, count, dtype
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        whole, part_rows = count * width, -(-hashes.rows // parts)
        shape = (-(-hashes.rows // part_rows), part_rows, embed_width // len(hashes.primes))
        self.table = parameter(kernel_init(rngs.params(), shape, param_dtype), VOCABULARY, None, EMBED)
        self.key = linear(embed_width, whole, (None, EMBED), kernel_init=kernel_init, **options)
        self.value = linear(embed_width, width, (None, EMBED), kernel_init=kernel_init, **options)
        norm = functools.partial(
            RMSNorm, whole, groups=count, epsilon=norm_eps, zero_centred=True, param_dtype=param_dtype
        )
        self.key_norm, self.query_norm, self.value_norm = norm(), norm(), norm()
        zeros: Any = nnx.initializers.zeros
        self.conv = ShortConvolution(whole, conv_size, dilation=hashes.size, filter_init=zeros, **options)

    def empty_state(self, batch: int) -> dict:
        tokens = jnp.zeros((batch, self.hashes.size - 1, 1), jnp.int32)
        return dict(ngram_tokens=tokens, ngram_values=self.conv.empty_state(batch)["recurrent"])

    def mix(self, x: Float[Array, "*rows N D"], tokens: Int[Array, "*rows 1"], state: State, rows: Rows):
        """Return y [*rows, N, D] and the new state. The state holds tokens minus `end`, so that zeros stand for `end`."""
        end = self.hashes.end
        views, held = rows.window(tokens - end, self.hashes.size, state.get("ngram_tokens"))
        places = self.hashes([view[..., 0] + end for view in reversed(views)])
        table = self.table[...]
        e = merged(jnp.take(table.reshape(-1, table.shape[-1]), places, axis=0, mode="clip").astype(self.dtype))
        key, query = (by_head(y, self.count) for y in (self.key_norm(self.key(e)), self.query_norm(merged(x))))
        g = (key * query).sum(-1, keepdims=True) / math.sqrt(x.shape[-1])
        g = jnp.sqrt(jnp.maximum(jnp.abs(g), 1e-6)) * jnp.sign(g)
        u = rows.with_zeros_in_padding(merged(jax.nn.sigmoid(g) * self.value(e)[..., None, :]))
        more, values = self.conv.extend(self.value_norm(u), state.get("ngram_values"), rows)
        return by_head(u + more, self.count), dict(ngram_tokens=held, ngram_values=values)


# ---- attention -----------------------------------------------------------------------------------------------------------------


class IndexedAttention(Attention):
    """Compute `glax.nn.Attention` over the blocks of tokens that each row chooses by a `glax.nn.choice.Choice`, whose parts are

        index_query_t = R_t RMSNorm(W_iq x_t)  [index_heads, index_width]        index_key_t = W_ik x_t  [index_width]
        pool(block b) = R_s RMSNorm(the mean of the index keys of b), with s the position of its first token

    R is the rotation of attention, and `index` holds W_iq and W_ik. block_size, num_blocks: those of the choice. The
    cache also holds `index` [N, max_length, 1, index_width], the index keys.
    """

    def __init__(
        self, width: int, *, index_heads: int, index_width: int, block_size: int, num_blocks: int, norm_eps: float, **options
    ):  # fmt: skip
        super().__init__(width, norm_eps=norm_eps, **options)
        self.index_heads, self.index_width = index_heads, index_width
        self.block_size, self.num_blocks = block_size, num_blocks
        own = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
        self.index = linear(width, (index_heads + 1) * index_width, (EMBED, None), **own)
        norm: dict[str, Any] = dict(epsilon=norm_eps, zero_centred=True, param_dtype=own["param_dtype"])
        self.index_query_norm, self.index_key_norm = RMSNorm(index_width, **norm), RMSNorm(index_width, **norm)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state = super().empty_state(batch, max_length)
        return state | dict(index=jnp.zeros((*state["key"].shape[:2], 1, self.index_width), state["key"].dtype))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        index = by_head(self.index(x), self.index_heads + 1)
        positions, _ = rows.positions(state.get("length"))
        query = self.rotated(self.index_query_norm(index[..., :-1, :]), positions)
        choice = Choice(query, index[..., -1, :], self.block_size, self.num_blocks, self.pool)
        return self.attend(self.query(x), self.key(x), self.value(x), state, rows, choice=choice)

    def rotated(self, x: Float[Array, "*rows H D"], positions: Int[Array, "*rows"]) -> Float[Array, "*rows H D"]:
        """Return x rotated by `positions`, or x itself in a layer without rotation."""
        return x if self.rotation is None else rotate(x, positions, self.rotation)

    def pool(self, keys: Float[Array, "*rows size D"], positions: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Return the pooled index key of blocks, as the class defines it. keys: the index keys of a block's `size` tokens.
        positions: the position of the block's first token."""
        mean = keys.astype(jnp.float32).mean(-2).astype(keys.dtype)
        return self.rotated(self.index_key_norm(mean)[..., None, :], positions)[..., 0, :]


# ---- the model -----------------------------------------------------------------------------------------------------------------


class Qwen4Exp(CausalLM):
    """Define a CausalLM whose blocks pass on `num_streams` streams, which begin as copies of the embedding, and the tokens. Its
    norm is a `HyperConnection` that writes nothing.

    hashes: (the name of a module in a checkpoint, its `NGramHash`), whose numbers a checkpoint holds although its config
    determines them.
    """

    def __init__(self, *args, num_streams: int, hashes: tuple[tuple[str, NGramHash], ...], **options):
        super().__init__(*args, **options)
        self.num_streams, self.hashes = num_streams, hashes

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> tuple[Array, Array]:
        x = super().begin(tokens, rows)
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.num_streams, x.shape[-1])), tokens[..., None]

    def through(self, x: tuple[Array, Array], states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        (streams, _), after = super().through(x, states, rows)
        return streams, after

    def derived_tensors(self) -> dict[str, np.ndarray]:
        return {f"{module}.{name}": x for module, hashes in self.hashes for name, x in hashes.buffers().items()}

    def check_derived_tensors(self, tensors: Mapping[str, np.ndarray]):
        for name, expected in self.derived_tensors().items():
            if not np.array_equal(found := tensors.get(name, expected), expected):
                raise ValueError(
                    f"{name} must be {expected[:3].tolist()} and so on, which config.json determines by vocab_size, ngram_size, "
                    f"heads_per_ngram, ple_layer_ids, ngram_vocab_size_base and seed, got {np.ravel(found)[:3].tolist()}: give "
                    "config.json the values that the model was trained with"
                )


def qwen4_exp(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build the language model of Qwen4-Exp, from a config of the whole model (`qwen4_exp`) or of the language model alone
    (`qwen4_exp_text`).

    Positions are those of text, as in `glax.models.qwen3_5.qwen3_5`. The vision tower and the layers of multi-token prediction
    are not read. Raises UnsupportedOption for an option that is not supported.

    Qwen Team 2026, https://huggingface.co/Qwen/Qwen4-Exp.
    """
    outermost = Options(config.values)
    is_whole = not str(outermost.model_type).endswith("_text")
    options = outermost.model("text_config", "qwen4_exp_text") if is_whole else outermost
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 40)
    outer, init = outer_options(options, precision, 248320)
    outer["tied"] = outermost.flag("tie_word_embeddings", False)  # whatever text_config says
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    every = options.integer("full_attention_interval", 4)
    usual = [LINEAR if (layer + 1) % every else "indexed_attention" for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual, KINDS)
    gate = options.choice("output_gate_type", None, (None, "sigmoid", "silu"))
    if gate is None and act not in ("sigmoid", "silu"):
        raise options.unsupported("hidden_act", "without output_gate_type it must be 'sigmoid' or 'silu'")
    options.ignore("intermediate_size", "number_of_conv_states", *TRAINING)
    sizes = attention_sizes(options, width, heads=16, kv_heads=2, head_width=256)
    rope = rotation(options, 10000.0, 32768, 1.0, ignored=("mrope_interleaved", "mrope_section"))
    bias, delta = options.flag("attention_bias", False), delta_sizes(options)
    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    normalize = options.flag("norm_topk_prob", True)
    mlp = sparse_mlp(options, width, act, common, count=512, top_k=10, normalize=normalize)
    count, rank = options.integer("hc_count", 4, least=2), options.integer("hc_lowrank", 320)
    index = index_arguments(options, kinds)
    ngrams = ngram_makers(options, kinds, outer["vocabulary"], width)
    turned = rope.arguments(sizes["head_width"]) if SOFTMAX in kinds else {}
    check_rotation(options, turned, index)
    options.finish()
    if is_whole:
        outermost.finish()

    def hyper_connection(writes: bool = True) -> HyperConnection:
        return HyperConnection(width, count, rank, norm_eps=eps, writes=writes, **common)

    def mixer(kind: str) -> Mixing:
        if kind == LINEAR:
            return SplitGatedDeltaNet(width, delta, act=act, gate_act=gate or act, norm_eps=eps, **common)
        more = dict(bias=bias, output_bias=bias, gated=True, qk_norm=True, zero_centred=True, norm_eps=eps)
        return IndexedAttention(width, **index, **sizes, **turned, **more, **common)

    def block(layer: int, kind: str) -> HyperBlock:
        own = ngrams[layer](count=count, norm_eps=eps, **common) if layer in ngrams else None
        return HyperBlock(own, hyper_connection(), mixer(kind), hyper_connection(), mlp())

    blocks = [block(layer, kind) for layer, kind in enumerate(kinds)]
    prefix = "model.language_model" if is_whole else "model"
    module = f"{prefix}.layers.{{}}.ple.ple_embedding"
    hashes = [(module.format(i), block.ngrams.hashes) for i, block in enumerate(blocks) if block.ngrams is not None]
    names = names_of(kinds, prefix, is_whole, {module: each.rows for module, each in hashes})
    last = hyper_connection(writes=False)
    return Qwen4Exp(config, blocks, last, names, width=width, num_streams=count, hashes=tuple(hashes), **outer)


def index_arguments(options: Options, kinds: Sequence[str]) -> dict[str, int]:
    """Return the arguments of `IndexedAttention` for the choice of blocks; {} for a model without softmax attention and these
    options.

    kinds: the kind of each layer. Raises UnsupportedOption if some options of INDEXER are missing or do not fit each other.
    """
    given = {name: options.integer(name, None, optional=True) for name in INDEXER}
    missing = [name for name, value in given.items() if value is None]
    if SOFTMAX not in kinds and len(missing) == len(INDEXER):
        return {}
    if missing:
        raise options.unsupported(missing[0], f"layers of indexed_attention need all of {', '.join(INDEXER)}")
    heads, shared, width, budget, size = given.values()
    if shared != 1:
        raise options.unsupported("indexer_kv_heads", "it must be 1")
    if budget % size:
        raise options.unsupported("indexer_budget", f"it must be a multiple of indexer_compress_ratio={size}")
    return dict(index_heads=heads, index_width=width, block_size=size, num_blocks=budget // size)


def check_rotation(options: Options, turned: Mapping[str, Any], index: Mapping[str, int]):
    """Raise UnsupportedOption for rotary positions that index queries and keys cannot have.

    turned: the arguments of the rotation of attention. index: the result of `index_arguments`.
    """
    found = turned.get("frequencies")
    if getattr(found, "long", None) is not None:
        raise options.unsupported(
            "rope_parameters", "rope_type 'longrope' rotates keys of blocks anew where a text becomes long"
        )
    width = turned.get("rotary_width") or (0 if found is None else found.width)
    if index and width > index["index_width"]:
        raise options.unsupported("indexer_head_dim", f"it must be at least the {width} channels that rotate")


def ngram_makers(
    options: Options, kinds: Sequence[str], vocabulary: int, width: int
) -> dict[int, Callable[..., NGrams]]:
    """Return {the number of a layer that has n-grams, from 0: a function that makes its `NGrams`}.

    kinds: the kind of each layer. vocabulary: the number of tokens. width: the width of the model, and of e for a config that
    lacks ple_embed_dim. Raises UnsupportedOption for options that do not fit each other.
    """
    given, layers = options.take("ple_layer_ids", None), len(kinds)
    numbers = [] if given is None else given
    if not isinstance(numbers, list) or not all(type(x) is int and 1 <= x <= layers for x in numbers):
        raise options.unsupported("ple_layer_ids", f"it must list numbers of layers from 1 to {layers}")
    embed_width = options.integer("ple_embed_dim", None, optional=True) or width
    size, heads = options.integer("ngram_size", 3), options.integer("heads_per_ngram", 8)
    base = options.integer("ngram_vocab_size_base", 20_000_000)
    multiple = options.integer("make_ngram_vocab_size_divisible_by", 128)
    seed, parts = options.integer("seed", 1234, least=-(2**63)), options.integer("split_ngram_parts", 512)
    conv_size, end = options.integer("ple_conv_kernel_size", 4), options.take("eos_token_id", None)
    if not numbers:
        return {}
    end, count = end[0] if isinstance(end, list) and end else end, (size - 1) * heads
    if type(end) is not int or not 0 <= end < vocabulary:
        raise options.unsupported("eos_token_id", f"it ends n-grams, and must be a token from 0 to {vocabulary - 1}")
    if not count:
        raise options.unsupported("ngram_size", "it must be at least 2")
    if embed_width % count:
        raise options.unsupported("ple_embed_dim", f"it must be a multiple of (ngram_size - 1) heads_per_ngram={count}")
    if count * base > MOST_ROWS:  # before primes are looked for, of which each is at least `base`
        raise options.unsupported(
            "ngram_vocab_size_base", f"{count} primes of at least {base} make more than {MOST_ROWS} rows"
        )
    makers, primes = {}, primes_from(base)
    half = max(1, (2**63 - 1) // vocabulary // 2)  # so that a multiplier times a token is below 2^63
    for i, layer in enumerate(sorted({number - 1 for number in numbers})):
        if kinds[layer] != LINEAR:
            raise options.unsupported("ple_layer_ids", f"layer {layer + 1} must be one of linear_attention")
        own = tuple(itertools.islice(primes, count))  # those after the primes of the layer before
        # `split_mix` adds GAMMA once more, as the models' own code does.
        drawn = (split_mix(seed + GAP * i + GAMMA * (place + 1)) for place in range(size))
        multipliers, rows = tuple(2 * (x % half) + 1 for x in drawn), -(-sum(own) // multiple) * multiple
        if rows > MOST_ROWS:
            raise options.unsupported("ngram_vocab_size_base", f"a table has at most {MOST_ROWS} rows, here {rows}")
        hashes = NGramHash(multipliers, own, end, rows)
        makers[layer] = functools.partial(
            NGrams, width, embed_width=embed_width, hashes=hashes, parts=parts, conv_size=conv_size
        )
    return makers


def names_of(kinds: Sequence[str], prefix: str, is_whole: bool, tables: Mapping[str, int]) -> Names:
    """Return the `Names` of the parameters. kinds: the kind of each layer. prefix: the name before all others in files.
    is_whole: whether files have the vision tower's names. tables: {the module of a table of n-grams: the number of its
    rows}."""
    stream_rules = tuple(
        rule
        for here in ("attn", "mlp")
        for rule in (*renamed(f"{here}_streams", STREAMS), (rf"\.{here}_streams\.", f".{here}_hyper_connection."))
    )
    last = tuple((rf"^norm\.{old}\.", f"{prefix}.hyper_connection_mixer.{new}.") for old, new in STREAMS.items())
    ngrams = (*renamed("ngrams", NGRAMS), (r"\.ngrams\.", ".ple."))
    outer = outer_names(*(f"{prefix}.{name}" for name in ("embed_tokens", "layers")))
    return Names(
        (*last, *mixer_names(kinds, MIXERS), *stream_rules, *ngrams, *MLPS, *outer),
        layouts=(*transposed_layouts("router", *GATED_MLP), ("table", ("weight", same, same))),
        aliases=(FROM_ALONE if is_whole else FROM_WHOLE,),
        stacked=stacked_experts(rf"{re.escape(prefix)}\.layers\.\d+\.mlp"),
        table_rows=tuple((f"{module}.ngram_embedding.shard_*.weight", rows) for module, rows in tables.items()),
        scales=((r"(\.ngram_embedding)\.shard_\d+\.weight$", r"\1.weight_scale"),),
        others=OTHERS,
    )
