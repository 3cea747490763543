"""Build the language model of Qwen4-Exp: the mixers of Qwen3.5 with experts, between which several streams of residuals run,
softmax attention that chooses the blocks it reads, and embeddings of n-grams."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
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
from glax.models.qwen3_5 import FROM_ALONE, FROM_WHOLE, OTHERS, SplitGatedDeltaNet, sparse_mlp
from glax.models.qwen3_5 import MIXERS as QWEN3_5_MIXERS
from glax.models.qwen3_next import MLPS, delta_sizes
from glax.models.rope import rotation
from glax.nn import Attention, RMSNorm
from glax.nn.choice import Choice
from glax.nn.parts import EMBED, by_head, for_rows, linear, merged, parameter
from glax.nn.passes import Rows, State
from glax.nn.rotary import rotate

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
GAP = 10007  # between the seeds of two layers


# ---- the streams of residuals ------------------------------------------------------------------------------------------------


class HyperConnection(nnx.Module):
    """Compute what a block reads from N streams of residuals x [*rows, N, D], and how strongly it writes to each:

        h_n = RMSNorm(x_n)    w = sigmoid(W_up silu(W_down h / N))  [N, D]    read = sum_n w_n h_n / N
        strength = 2 sigmoid(W_s h / N)  [N]                                     x_n' = x_n + strength_n block(read)

    The projections read h of all streams. writes: whether there is a W_s.   Zhu et al. 2024, https://arxiv.org/abs/2409.19606.
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
        """Return x'. y: what the block returns. h: as `read` returns it."""
        assert self.strength is not None  # the last of a model writes nothing
        return x + y[..., None, :] * (2 * jax.nn.sigmoid(self.strength(h) / self.count))[..., None]

    def __call__(self, x: Float[Array, "*rows N D"]) -> Float[Array, "*rows D"]:
        return self.read(x)[0]


class HyperBlock(nnx.Module):
    """Add the features of n-grams to the streams, if the block has any; then compute a mixer and an MLP, each of which reads and
    writes the streams by a `HyperConnection`. `mix` takes a pair: the streams [*rows, N, D], and the tokens [*rows, 1]."""

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


class Hash:
    """Map the n-grams that end at a token to rows of a table, for n = 2 to `size`, each by `heads` hashes:

        h_n = xor over i < n of m_i token_{t - i}        row of head j of n = offset_j + h_n mod p_j

    m are odd numbers drawn from seed and layer, and p the primes from `base` on, of which each layer takes the next ones. m_i
    token is below 2^63. A token before the sequence, or before the last end of a text, counts as `end`.

    rows: those of the whole table, a multiple of `multiple`. layer: the number among the layers that have n-grams.
    """

    def __init__(
        self, vocabulary: int, size: int, heads: int, base: int, multiple: int, seed: int, layer: int, end: int
    ):
        self.size, self.heads, self.end = size, heads, end
        half = max(1, (2**63 - 1) // max(vocabulary, 1) // 2)
        first = seed + GAP * layer
        self.multipliers = tuple(2 * (mixed(first + GAMMA * (i + 1)) % half) + 1 for i in range(size))
        count = (size - 1) * heads
        self.primes = primes_from(base, (layer + 1) * count)[-count:]
        self.offsets = tuple(int(x) for x in np.cumsum((0, *self.primes[:-1])))
        self.rows = -(-sum(self.primes) // multiple) * multiple

    def __eq__(self, other):
        return isinstance(other, Hash) and vars(self) == vars(other)

    def __hash__(self):
        return hash((self.multipliers, self.primes, self.end))

    def __call__(self, before: Sequence[Int[Array, "*rows"]]) -> Int[Array, "*rows heads"]:
        """Return the rows of the table, [*rows, (size - 1) heads]. before: the token itself, the one before it and so on."""
        found, total, has_end = [], None, jnp.zeros(before[0].shape, bool)
        for lag, token in enumerate(before):
            token = jnp.where(has_end, self.end, token)
            high, low = product(token.astype(jnp.uint32), self.multipliers[lag])
            total = (high, low) if total is None else (total[0] ^ high, total[1] ^ low)
            if lag:
                has_end = has_end | (token == self.end)
                own = slice((lag - 1) * self.heads, lag * self.heads)
                place = remainder(*total, self.primes[own])
                found.append(place + for_rows(place, jnp.asarray(self.offsets[own], jnp.uint32), jnp.uint32))
        return jnp.concatenate(found, -1).astype(jnp.int32)

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint holds of it."""
        arrays = dict(
            layer_multipliers=self.multipliers, ngram_heads_vocab_sizes=self.primes, ngram_heads_offsets=self.offsets
        )
        return {name: np.array(values, np.int64) for name, values in arrays.items()}


GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def mixed(value: int) -> int:
    """Return the number after `value` of SplitMix64.   Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@functools.cache
def primes_from(first: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes of at least `first`."""
    found, value = [], max(first, 2)
    while len(found) < count:
        if value == 2 or (value % 2 and all(value % i for i in range(3, math.isqrt(value) + 1, 2))):
            found.append(value)
        value += 1
    return tuple(found)


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
    """Compute the features of the n-grams that end at a token, for each of N streams x_n:

        e = the rows of the table that `Hash` names    g_n = RMSNorm(W_k^n e) . RMSNorm(x_n) / sqrt(D)
        u_n = sigmoid(sign(g_n) sqrt(|g_n|)) W_v e      y_n = u_n + silu(conv(RMSNorm(u_n)))

    conv: a causal convolution of each channel, which reads every `dilation`-th row, conv_size in all. table: [parts, rows, E],
    the parts as a checkpoint has them.   Cheng et al. 2026, https://arxiv.org/abs/2601.07372.
    """

    def __init__(
        self, width: int, streams: int, embedded: int, hashes: Hash, parts: int, *, conv_size: int, norm_eps: float,
        kernel_init, dtype, param_dtype, rngs,
    ):  # fmt: skip
        self.hashes, self.streams, self.conv_size, self.dtype = hashes, streams, conv_size, dtype
        self.dilation, whole, own = hashes.size, streams * width, -(-hashes.rows // parts)
        heads, options = len(hashes.primes), dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        shape = (-(-hashes.rows // own), own, embedded // heads)
        self.table = parameter(kernel_init(rngs.params(), shape, param_dtype), None, None, EMBED)
        self.key = linear(embedded, whole, (None, EMBED), kernel_init=kernel_init, **options)
        self.value = linear(embedded, width, (None, EMBED), kernel_init=kernel_init, **options)
        norm = functools.partial(
            RMSNorm, whole, groups=streams, epsilon=norm_eps, zero_centred=True, param_dtype=param_dtype
        )
        self.key_norm, self.query_norm, self.value_norm = norm(), norm(), norm()
        self.conv = DilatedFilter(conv_size, whole, param_dtype)

    @property
    def reach(self) -> int:
        """Return how many rows before a row its convolution reads."""
        return (self.conv_size - 1) * self.dilation

    def empty_state(self, batch: int) -> dict:
        whole = self.conv.filter.shape[1]
        return dict(
            ngram_tokens=jnp.zeros((batch, self.hashes.size - 1, 1), jnp.int32),
            ngram_values=jnp.zeros((batch, self.reach, whole), self.dtype),
        )

    def mix(self, x: Float[Array, "*rows N D"], tokens: Int[Array, "*rows 1"], state: State, rows: Rows):
        """Return y [*rows, N, D] and the new state. Tokens are held less `end`, so that zeros stand for it."""
        end = self.hashes.end
        views, held = rows.window(tokens - end, self.hashes.size, state.get("ngram_tokens"))
        places = self.hashes([view[..., 0] + end for view in reversed(views)])
        table = self.table[...]
        e = merged(jnp.take(table.reshape(-1, table.shape[-1]), places, axis=0, mode="clip").astype(self.dtype))
        key, query = (by_head(y, self.streams) for y in (self.key_norm(self.key(e)), self.query_norm(merged(x))))
        g = (key * query).sum(-1, keepdims=True) / math.sqrt(x.shape[-1])
        g = jnp.sqrt(jnp.maximum(jnp.abs(g), 1e-6)) * jnp.sign(g)
        u = rows.without_padding(merged(jax.nn.sigmoid(g) * self.value(e)[..., None, :]))
        views, values = rows.window(self.value_norm(u), self.reach + 1, state.get("ngram_values"))
        y = u + self.conv(views[:: self.dilation])
        return by_head(y, self.streams), dict(ngram_tokens=held, ngram_values=values)


class DilatedFilter(nnx.Module):
    """Compute y = silu(sum over i of filter[i] * x_i) of rows x_i that lie apart; filter [size, width], which starts as 0."""

    def __init__(self, size: int, width: int, param_dtype):
        self.filter = parameter(jnp.zeros((size, width), param_dtype), None, EMBED)

    def __call__(self, views: Sequence[Float[Array, "*rows width"]]) -> Float[Array, "*rows width"]:
        total = sum(view.astype(jnp.float32) * for_rows(view, self.filter[i]) for i, view in enumerate(views))
        return jax.nn.silu(jnp.asarray(total)).astype(views[0].dtype)


# ---- attention -----------------------------------------------------------------------------------------------------------------


class IndexedAttention(Attention):
    """Compute `glax.nn.Attention` over the blocks of tokens that each row chooses by a `glax.nn.choice.Choice`.

    Its queries and keys are [RMSNorm(W_q x), W_k x], of `heads` heads and of one. A block's key is the mean of those of its
    tokens behind RMSNorm. Queries, and keys of blocks, rotate as those of attention do. size: the tokens of a block. best: the
    blocks that a row reads. The cache also holds `index` [N, max_length, 1, head_width of the index], W_k x.
    """

    def __init__(self, width: int, *, heads: int, index_width: int, size: int, best: int, norm_eps: float, **options):
        super().__init__(width, norm_eps=norm_eps, **options)
        self.heads, self.index_width, self.size, self.best = heads, index_width, size, best
        own = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
        self.index = linear(width, (heads + 1) * index_width, (EMBED, None), **own)
        norm: dict[str, Any] = dict(epsilon=norm_eps, zero_centred=True, param_dtype=own["param_dtype"])
        self.index_query_norm, self.index_key_norm = RMSNorm(index_width, **norm), RMSNorm(index_width, **norm)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state = super().empty_state(batch, max_length)
        return state | dict(index=jnp.zeros((*state["key"].shape[:2], 1, self.index_width), state["key"].dtype))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        index = by_head(self.index(x), self.heads + 1)
        place, _ = rows.positions(state.get("length"))
        query = self.rotated(self.index_query_norm(index[..., :-1, :]), place)
        choice = Choice(query, index[..., -1, :], self.size, self.best, self.pooled)
        return self.attend(self.query(x), self.key(x), self.value(x), state, rows, choice=choice)

    def rotated(self, x: Float[Array, "*rows H D"], place: Int[Array, "*rows"]) -> Float[Array, "*rows H D"]:
        return x if self.rotation is None else rotate(x, place, self.rotation)

    def pooled(self, keys: Float[Array, "*rows size D"], place: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        mean = keys.astype(jnp.float32).mean(-2).astype(keys.dtype)
        return self.rotated(self.index_key_norm(mean)[..., None, :], place)[..., 0, :]


# ---- the model -----------------------------------------------------------------------------------------------------------------


class Qwen4Exp(CausalLM):
    """A CausalLM whose blocks pass on `streams` copies of the embedding and the tokens. Its checkpoints hold what the hashes of
    n-grams are made of, which the config determines."""

    def __init__(self, *args, streams: int, buffers: tuple[tuple[str, Hash], ...], **options):
        super().__init__(*args, **options)
        self.streams, self.buffers = streams, buffers

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> tuple[Array, Array]:
        x = super().begin(tokens, rows)
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.streams, x.shape[-1])), tokens[..., None]

    def through(self, x: tuple[Array, Array], states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        (streams, _), after = super().through(x, states, rows)
        return streams, after

    def derived_tensors(self) -> dict[str, np.ndarray]:
        return {f"{place}.{name}": x for place, hashes in self.buffers for name, x in hashes.buffers().items()}

    def check_derived_tensors(self, tensors: Mapping[str, np.ndarray]):
        for name, expected in self.derived_tensors().items():
            if not np.array_equal(tensors.get(name, expected), expected):
                raise ValueError(
                    f"{name} must be what config.json determines by vocab_size, ngram_size, heads_per_ngram, ple_layer_ids, "
                    "ngram_vocab_size_base and seed, got other numbers: give config.json the values that the model was trained "
                    "with"
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

    def streams(writes: bool = True) -> HyperConnection:
        return HyperConnection(width, count, rank, norm_eps=eps, writes=writes, **common)

    def mixer(kind: str) -> Mixing:
        if kind == LINEAR:
            return SplitGatedDeltaNet(width, delta, act=act, gate_act=gate or act, norm_eps=eps, **common)
        more = dict(bias=bias, output_bias=bias, gated=True, qk_norm=True, zero_centred=True, norm_eps=eps)
        return IndexedAttention(width, **index, **sizes, **turned, **more, **common)

    def block(layer: int, kind: str) -> HyperBlock:
        own = ngrams[layer](streams=count, norm_eps=eps, **common) if layer in ngrams else None
        return HyperBlock(own, streams(), mixer(kind), streams(), mlp())

    blocks = [block(layer, kind) for layer, kind in enumerate(kinds)]
    prefix = "model.language_model" if is_whole else "model"
    place = f"{prefix}.layers.{{}}.ple.ple_embedding"
    hashed = [(place.format(i), block.ngrams.hashes) for i, block in enumerate(blocks) if block.ngrams is not None]
    names = names_of(kinds, prefix, is_whole, {place: hashes.rows for place, hashes in hashed})
    return Qwen4Exp(
        config, blocks, streams(writes=False), names, width=width, streams=count, buffers=tuple(hashed), **outer
    )


def index_arguments(options: Options, kinds: Sequence[str]) -> dict[str, int]:
    """Return the arguments of `IndexedAttention` for the choice of blocks, which layers of softmax attention must have."""
    given = {name: options.integer(name, None, optional=True) for name in INDEXER}
    missing = [name for name, value in given.items() if value is None]
    if SOFTMAX not in kinds and len(missing) == len(INDEXER):
        return {}
    if missing:
        raise options.unsupported(missing[0], "a model with layers of indexed_attention must have it")
    heads, shared, width, budget, size = given.values()
    if shared != 1:
        raise options.unsupported("indexer_kv_heads", "it must be 1")
    if budget % size:
        raise options.unsupported("indexer_budget", f"it must be a multiple of indexer_compress_ratio={size}")
    return dict(heads=heads, index_width=width, size=size, best=budget // size)


def check_rotation(options: Options, turned: Mapping[str, Any], index: Mapping[str, int]):
    """Raise UnsupportedOption for rotary positions that the index cannot have."""
    found = turned.get("frequencies")
    if getattr(found, "long", None) is not None:
        raise options.unsupported(
            "rope_parameters", "rope_type 'longrope' rotates keys of blocks anew where a text becomes long"
        )
    width = turned.get("rotary_width") or (0 if found is None else found.width)
    if index and width > index["index_width"]:
        raise options.unsupported("indexer_head_dim", f"it must be at least the {width} channels that rotate")


def ngram_makers(options: Options, kinds: Sequence[str], vocabulary: int, width: int) -> dict[int, Any]:
    """Return, by the number of each layer that has n-grams, from 0, a function that makes its `NGrams`."""
    numbers = options.take("ple_layer_ids", None) or []
    is_list = isinstance(numbers, list) and all(type(x) is int and 1 <= x <= len(kinds) for x in numbers)
    if not is_list:
        raise options.unsupported("ple_layer_ids", f"it must list numbers of layers from 1 to {len(kinds)}")
    embedded = options.integer("ple_embed_dim", None, optional=True) or width
    size, heads = options.integer("ngram_size", 3), options.integer("heads_per_ngram", 8)
    base = options.integer("ngram_vocab_size_base", 20_000_000)
    multiple = options.integer("make_ngram_vocab_size_divisible_by", 128)
    seed, parts = options.integer("seed", 1234, least=-(2**63)), options.integer("split_ngram_parts", 512)
    conv_size = options.integer("ple_conv_kernel_size", 4)
    end = options.take("eos_token_id", None)
    if not numbers:
        return {}
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int:
        raise options.unsupported("eos_token_id", "a model with ple_layer_ids must have it: it ends n-grams")
    if size < 2 or embedded % ((size - 1) * heads):
        raise options.unsupported(
            "ple_embed_dim", f"it must be a multiple of (ngram_size - 1) heads_per_ngram={(size - 1) * heads}"
        )
    makers = {}
    for i, layer in enumerate(sorted({number - 1 for number in numbers})):
        if kinds[layer] != LINEAR:
            raise options.unsupported("ple_layer_ids", f"layer {layer + 1} must be one of linear_attention")
        hashes = Hash(vocabulary, size, heads, base, multiple, seed, i, end)
        if hashes.rows >= 2**31:
            raise options.unsupported(
                "ngram_vocab_size_base", f"a table has at most {2**31 - 1} rows, here {hashes.rows}"
            )
        makers[layer] = functools.partial(
            NGrams, width, embedded=embedded, hashes=hashes, parts=parts, conv_size=conv_size
        )
    return makers


def names_of(kinds: Sequence[str], prefix: str, is_whole: bool, tables: Mapping[str, int]) -> Names:
    """Return the names of the tensors. tables: the rows of each table of n-grams, by the name of the module that holds it."""
    streams = tuple(
        rule
        for here in ("attn", "mlp")
        for rule in (*renamed(f"{here}_streams", STREAMS), (rf"\.{here}_streams\.", f".{here}_hyper_connection."))
    )
    last = tuple((rf"^norm\.{old}\.", f"{prefix}.hyper_connection_mixer.{new}.") for old, new in STREAMS.items())
    ngrams = (*renamed("ngrams", NGRAMS), (r"\.ngrams\.", ".ple."))
    outer = outer_names(*(f"{prefix}.{name}" for name in ("embed_tokens", "layers")))
    return Names(
        (*last, *mixer_names(kinds, MIXERS), *streams, *ngrams, *MLPS, *outer),
        layouts=(*transposed_layouts("router", *GATED_MLP), ("table", ("weight", same, same))),
        aliases=(FROM_ALONE if is_whole else FROM_WHOLE,),
        stacked=stacked_experts(rf"{re.escape(prefix)}\.layers\.\d+\.mlp"),
        rows=tuple((f"{place}.ngram_embedding.shard_*.weight", rows) for place, rows in tables.items()),
        scales=((r"(\.ngram_embedding)\.shard_\d+\.weight$", r"\1.weight_scale"),),
        others=OTHERS,
    )
