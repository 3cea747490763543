"""Build the language model of GLM-5.3-Flash (glm5_next): Kimi Delta Attention, multi-head latent attention that chooses the
blocks it reads, and experts, between which several streams of residuals run."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, activate_convolutions, hidden_act, layer_kinds
from glax.models.kimi_linear import (
    DELTA,
    DENSE,
    LATENT,
    SPARSE,
    KimiOptions,
    delta_sizes,
    expert_arguments,
    latent_arguments,
)
from glax.models.model import CausalLM, Mixing, Precision, outer_options
from glax.models.names import (
    GATED_MLP,
    Names,
    mixer_names,
    outer_names,
    renamed,
    transposed_layouts,
)
from glax.nn import KimiDeltaAttention, LayerNorm, MultiHeadLatentAttention, RMSNorm, SwiGLU
from glax.nn.choice import Choice
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP
from glax.nn.norms import normalized
from glax.nn.parts import EMBED, by_head, for_rows, linear, normal, parameter
from glax.nn.passes import Rows, State

INDEXED = "indexed_attention"
# The last names are those of older configs.
KINDS = {LINEAR: LINEAR, INDEXED: SOFTMAX} | {
    "full_attention": SOFTMAX, "deepseek_sparse_attention": SOFTMAX, "qwen_sparse_attention": SOFTMAX, "mamba": LINEAR,
}  # fmt: skip
FULL, SHARED = "full", "shared"  # whether a layer has an indexer, or takes the choice of the layer before it
INDEXER = {
    "query": "wq_b", "key": "wk", "key_norm": "k_norm", "weights": "weights_proj", "position_bias": "index_kpool_compress_ape",
    "pooling": "index_kpool_compress_gate",
}  # fmt: skip
# The names of `Streams`: hc stands for hyper-connections.
STREAMS = tuple(
    (rf"\.{here}_streams\.{part}$", f".hc_{there}_{part}")
    for here, there in (("attn", "attn"), ("mlp", "ffn"))
    for part in ("fn", "base", "scale")
)
EXPERTS = {
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "shared": "n_shared_experts",
    "normalize": "norm_topk_prob",
}
PREFIX = "model.language_model"  # before the names of the language model: a folder has a vision tower too
MLPS = (
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.router$", ".mlp.gate.router"),
    (r"\.mlp\.correction$", ".mlp.gate.e_score_correction_bias"),
    *((rf"\.mlp\.experts\.{old}$", rf".mlp.experts.*.{new}.{old}") for old, new in GATED_MLP.items()),
    *((rf"\.mlp\.shared\.{old}\.", rf".mlp.shared_experts.{new}.") for old, new in GATED_MLP.items()),
)
# Names of transformers' own modules, which its files may have too.
ALIASES = (
    (r"\.self_attn\.forget_gate\.", ".self_attn."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
)
FLOAT32 = (
    r"\.gate\.weight$", r"\.e_score_correction_bias$", r"\.dt_bias$", r"\.A_log$", r"_conv1d\.weight$",
    r"\.hc_(attn|ffn)_(base|scale)$",
)  # fmt: skip


class IndexInputs(NamedTuple):
    """Hold the arrays from which a `Choice` is made, for each row: index queries [*rows, H D], keys [*rows, 2 D] and weights
    [*rows, H]."""

    query: Float[Array, "*rows HD"]
    key: Float[Array, "*rows 2D"]
    weight: Float[Array, "*rows H"]


class Indexer(nnx.Module):
    """Compute the `IndexInputs` of a `glax.nn.choice.Choice` from x [*rows, width] and the latent c [*rows, rank] of the
    attention's query:

        index_query_t = W_q c_t  [H, D]                    index_key_t = [LayerNorm(W_k x_t), W_g x_t]  [2 D]
        index_weight_t = W_w x_t / sqrt(H D)  [H]

    query, key, pooling and weights hold W_q, W_k, W_g and W_w. heads: H. head_width: D. block_size: the tokens of a block.
    `pooled` adds position_bias [block_size, D] by the position in a block.

    Z.ai 2026, https://huggingface.co/zai-org/GLM-5.3-Flash.
    """

    def __init__(self, width: int, *, rank: int, heads: int, head_width: int, block_size: int, **options):
        self.query = linear(rank, heads * head_width, (None, None), **options)
        self.key = linear(width, head_width, (EMBED, None), **options)
        self.key_norm = LayerNorm(head_width, epsilon=1e-6, param_dtype=options["param_dtype"])
        self.weights = linear(width, heads, (EMBED, None), **options)
        self.position_bias = parameter(jnp.zeros((block_size, head_width), options["param_dtype"]), None, None)
        self.pooling = parameter(jnp.ones((head_width, width), options["param_dtype"]), None, EMBED)

    def __call__(self, x: Float[Array, "*rows width"], c: Float[Array, "*rows rank"]) -> IndexInputs:
        query, weight, key = self.query(c), self.weights(x), self.key_norm(self.key(x))
        gate = x @ self.pooling[...].T.astype(x.dtype)
        scale = (query.shape[-1]) ** -0.5
        return IndexInputs(query, jnp.concatenate([key, gate], -1), weight.astype(jnp.float32) * scale)


def pooled(
    position_bias: Float[Array, "size D"], keys: Float[Array, "*rows size 2D"], _: Array
) -> Float[Array, "*rows D"]:
    """Return sum_s p_s k_s over the tokens s of a block, in each channel: keys = [k, g], p = softmax_s(g_s + position_bias_s).

    With position_bias bound, it is a `Choice.pool`. The last argument is the positions of blocks, and not used.
    """
    k, gate = jnp.split(keys, 2, axis=-1)
    share = jax.nn.softmax(gate.astype(jnp.float32) + position_bias.astype(jnp.float32), -2)
    return (share.astype(k.dtype) * k).astype(jnp.float32).sum(-2).astype(k.dtype)


class IndexedLatentAttention(MultiHeadLatentAttention):
    """Compute `glax.nn.MultiHeadLatentAttention` over the blocks of tokens that each row chooses. The `glax.nn.choice.Choice`
    is made of the results of an `Indexer`, with `pooled` as its pool.

    block_size, num_blocks: fields of the choice. index_width: D of the `Indexer`. indexer: None for a layer that takes the
    index inputs, and so the choice, of the layer before it. The cache also holds `index` [N, max_length, 1, 2 D], the index
    keys: a layer without an indexer stores those of the layer before it again.
    """

    def __init__(
        self, width: int, *, block_size: int, num_blocks: int, index_width: int, indexer: Indexer | None, **options
    ):
        super().__init__(width, **options)
        self.block_size, self.num_blocks, self.index_width = block_size, num_blocks, index_width
        self.indexer = indexer

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state = super().empty_state(batch, max_length)
        return state | dict(index=jnp.zeros((*state["key"].shape[:2], 1, 2 * self.index_width), state["key"].dtype))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        y, state, _ = self.mix_with_index(x, state, rows, None, None)
        return y, state

    def mix_with_index(
        self,
        x: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        index: IndexInputs | None,
        position_bias: Array | None,
    ) -> tuple[Array, State, IndexInputs]:
        """Return y [*rows, width], the new state, and the index inputs of the rows.

        index, position_bias [block_size, D]: those of the layer before; a layer with an indexer of its own does not use them.
        Raises ValueError for a layer without an indexer if they are None.
        """
        c = self.query_latent(x)
        if self.indexer is not None:
            index, position_bias = self.indexer(x, c), self.indexer.position_bias[...]
        if index is None or position_bias is None:
            raise ValueError("a layer without an indexer must follow one that has an indexer, in a model")
        pool = functools.partial(pooled, position_bias)
        query = by_head(index.query, index.weight.shape[-1])
        y, state = self.attend(
            x, c, state, rows, Choice(query, index.key, self.block_size, self.num_blocks, pool, index.weight)
        )
        return y, state, index


class Streams(nnx.Module):
    """Compute the weights by which a block reads and writes N streams of residuals x [*rows, N, D]:

        w = fn RMSNorm(x)  [(2 + N) N]                          pre = sigmoid(w_1 scale_1 + base_1) + eps
        post = 2 sigmoid(w_2 scale_2 + base_2)                  mixing = Sinkhorn(softmax(w_3 scale_3 + base_3) + eps)  [N, N]
        y = block(sum_n pre_n x_n)
        x_n' = post_n y + sum_m mixing_mn x_m

    RMSNorm is over all streams together, without a scale. w_1 and w_2 are the first N numbers of w and the next N, w_3 is the
    rest. Sinkhorn divides columns by their sums + eps, and then rows and columns in turn, until columns were divided
    `iterations` times, but once at least. All is float32.   Xie et al. 2025, https://arxiv.org/abs/2512.24880.

    width: D. count: N. norm_eps: the epsilon of RMSNorm. Parameters: fn [(2 + N) N, N D], base [(2 + N) N] and scale [3].
    """

    def __init__(self, width: int, count: int, *, iterations: int, eps: float, norm_eps: float, param_dtype, rngs):
        self.count, self.iterations, self.eps, self.norm_eps = count, iterations, eps, norm_eps
        weights = (2 + count) * count
        self.fn = parameter(normal(0.02)(rngs.params(), (weights, count * width), param_dtype), None, None)
        self.base = parameter(jnp.zeros(weights, param_dtype), None)
        self.scale = parameter(jnp.ones(3, param_dtype), None)

    def __call__(self, x: Float[Array, "*rows N D"]) -> tuple[Array, Array, Array]:
        """Return sum_n pre_n x_n [*rows, D], post [*rows, N] and mixing [*rows, N, N], with the dtype of x."""
        count, wide = self.count, x.astype(jnp.float32)
        flat = normalized(wide.reshape(*x.shape[:-2], -1), self.norm_eps)
        fn, base, scale = (param[...].astype(jnp.float32) for param in (self.fn, self.base, self.scale))
        w = jnp.matmul(flat, fn.T, precision=jax.lax.Precision.HIGHEST)
        # One number scales all of w_1, one all of w_2, one all of w_3.
        scale = jnp.repeat(scale, np.array([count, count, count**2]), total_repeat_length=len(base))
        w = w * for_rows(w, scale) + for_rows(w, base)
        pre, post, mixing = jnp.split(w, [count, 2 * count], axis=-1)
        pre = jax.nn.sigmoid(pre) + self.eps
        mixing = jax.nn.softmax(mixing.reshape(*mixing.shape[:-1], count, count), -1) + self.eps
        mixing = self.divided(mixing, -2)

        def both(_, mixing: Array) -> Array:
            return self.divided(self.divided(mixing, -1), -2)

        mixing = jax.lax.fori_loop(0, max(self.iterations - 1, 0), both, mixing)
        read = (pre[..., None] * wide).sum(-2)
        return read.astype(x.dtype), (2 * jax.nn.sigmoid(post)).astype(x.dtype), mixing.astype(x.dtype)

    def divided(self, mixing: Float[Array, "*rows N N"], axis: int) -> Float[Array, "*rows N N"]:
        """Return `mixing` divided by (its sums over `axis` + eps)."""
        return mixing / (mixing.sum(axis, keepdims=True) + self.eps)


def written_streams(x: Float[Array, "*rows N D"], y: Float[Array, "*rows D"], post: Array, mixing: Array) -> Array:
    """Return post_n y + sum_m mixing_mn x_m, [*rows, N, D]."""
    return post[..., None] * y[..., None, :] + jnp.einsum("...mn,...md->...nd", mixing, x)


class StreamBlock(nnx.Module):
    """Compute a mixer and an MLP, each after its norm. Each reads and writes the streams of residuals by a `Streams`.

    passes_index: whether the mixer of the next block has the same choice, so that this block passes its `IndexInputs` on. Other
    blocks pass None: a scan over layers needs pairs of one form.
    """

    def __init__(
        self, attn_streams: Streams, attn_norm, attn: Mixing, mlp_streams: Streams, mlp_norm, mlp, passes_index: bool
    ):
        self.attn_streams, self.attn_norm, self.attn = attn_streams, attn_norm, attn
        self.mlp_streams, self.mlp_norm, self.mlp = mlp_streams, mlp_norm, mlp
        self.passes_index = passes_index

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.attn.empty_state(batch, max_length)

    def mix(
        self, pair: tuple[Array, IndexInputs | None], state: dict, rows: Rows, position_bias: Array | None = None
    ) -> tuple[tuple[Array, IndexInputs | None], dict]:
        """Return (the pair for the next block, the new state).

        pair: the streams [*rows, N, D], and the index inputs that the block before passes on. position_bias: the bias of the
        previous block's indexer, for a block whose mixer has no indexer.
        """
        x, index = pair
        read, post, mixing = self.attn_streams(x)
        read = self.attn_norm(read)
        if isinstance(self.attn, IndexedLatentAttention):
            y, after, index = self.attn.mix_with_index(read, state, rows, index, position_bias)
        else:
            y, after = self.attn.mix(read, state, rows)
        x = written_streams(x, y, post, mixing)
        read, post, mixing = self.mlp_streams(x)
        x = written_streams(x, self.mlp(self.mlp_norm(read)), post, mixing)
        return (x, index if self.passes_index else None), dict(after)


class StreamLM(CausalLM):
    """Define a CausalLM whose blocks read `streams` copies of the embedding, and whose head reads the mean of the streams.
    sharing: the numbers of the layers that take the choice of the layer before them."""

    def __init__(self, *args, streams: int, sharing: tuple[int, ...], **options):
        super().__init__(*args, **options)
        self.streams, self.sharing = streams, sharing

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> tuple[Array, None]:
        x = super().begin(tokens, rows)
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.streams, x.shape[-1])), None

    def arguments(self, layer: int) -> tuple:
        # The position bias is a parameter of the layer before, whose choice this one takes.
        return (self.blocks[layer - 1].attn.indexer.position_bias[...],) if layer in self.sharing else ()

    def cannot_scan(self) -> str | None:
        return "layers take the choice of the layer before them" if self.sharing else None

    def through(self, x: tuple[Array, None], states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        (streams, _), states = super().through(x, states, rows)
        return streams.mean(-2), states


def glm5_next(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build the language model of GLM-5.3-Flash. Its vision tower and the layer of multi-token prediction behind the last are not
    read. Raises UnsupportedOption for an option that is not supported.

    Z.ai 2026, https://huggingface.co/zai-org/GLM-5.3-Flash.
    """
    outermost = KimiOptions(config.values)
    tied = outermost.flag("tie_word_embeddings", False)
    options = text_options(outermost)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 45)
    outer, init = outer_options(options, precision, 154880, pad=154820)
    outer["tied"] = tied  # whatever text_config says
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options)
    usual = [INDEXED if layer % 4 == 3 else LINEAR for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual, KINDS)
    usual = [DENSE if layer < 3 else SPARSE for layer in range(layers)]
    mlps = layer_kinds(options, ("mlp_layer_types",), layers, usual, {DENSE: DENSE, SPARSE: SPARSE})
    latent = latent_arguments(options, heads=64, query_rank=1536, width=256, shared=0)
    if latent["query_rank"] is None:
        raise options.unsupported("q_lora_rank", "the indexer needs it")
    if latent["shared_width"] is not None:
        raise options.unsupported("qk_rope_head_dim", "it must be 0: nothing rotates")
    delta = delta_options(options)
    index, num_blocks = index_options(options, latent["query_rank"])
    sharing = sharing_layers(options, kinds)
    counted = EXPERTS | {"count": options.present_key("n_routed_experts", "num_local_experts")}
    experts, shared = expert_arguments(options, counted, inside=2048, count=288, groups=1, best=1, scaling=2.5)
    inside, limit = options.integer("intermediate_size", 12288), options.number("swiglu_limit", 10.0, above=0)
    count = options.integer("hc_mult", 4)
    streams: dict[str, Any] = dict(
        iterations=options.integer("hc_sinkhorn_iters", 20, least=0),
        eps=options.number("hc_eps", 1e-6, least=0),
        norm_eps=eps,
        param_dtype=precision.param_dtype,
        rngs=precision.rngs,
    )
    options.ignore(*TRAINING, "head_dim", "qk_head_dim", "rope_parameters", "rope_scaling")
    options.finish()
    if options.outer is not None:
        outermost.ignore("rope_parameters", "vision_config")
        outermost.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(layer: int) -> Layer:
        if kinds[layer] == SOFTMAX:
            indexer = None if layer in sharing else Indexer(width, **index, **common)
            sizes: dict[str, Any] = dict(block_size=index["block_size"], index_width=index["head_width"])
            return IndexedLatentAttention(
                width, num_blocks=num_blocks, indexer=indexer, norm_eps=eps, **sizes, **latent, **common
            )
        mixer = KimiDeltaAttention(width, norm_eps=eps, gate_bias=False, filter_init=init, **delta, **common)
        activate_convolutions(mixer, act)
        return mixer

    def mlp(kind: str) -> SwiGLU | SparseMLP:
        gated = functools.partial(SwiGLU, width, activation=act, limit=limit, **common)
        if kind == DENSE:
            return gated(inside)
        # The experts have SiLU, whatever hidden_act says.
        return SparseMLP(width, routing="sigmoid", limit=limit, shared=gated(shared), **experts, **common)

    def block(layer: int, kind: str) -> StreamBlock:
        own = (
            Streams(width, count, **streams),
            norm(),
            mixer(layer),
            Streams(width, count, **streams),
            norm(),
            mlp(kind),
        )
        return StreamBlock(*own, passes_index=layer + 1 in sharing)

    blocks = [block(layer, kind) for layer, kind in enumerate(mlps)]
    outer |= dict(streams=count, sharing=sharing)
    return StreamLM(config, blocks, norm(), names_of(kinds, layers), width=width, **outer)


def text_options(outermost: KimiOptions) -> KimiOptions:
    """Return the options of the language model: those of text_config, or all options of a config without text_config."""
    if outermost.values.get("text_config") is None:
        outermost.ignore("text_config")
        return KimiOptions(outermost.values, model_type="glm5_next", code="glm5_next_text")
    return outermost.model("text_config", "glm5_next_text")


def delta_options(options: Options) -> dict[str, Any]:
    """Return the arguments of KimiDeltaAttention. Options inside of `linear_attn_config` take precedence over others."""
    given = options.take("linear_attn_config", None)
    inner = options.part("linear_attn_config", {} if given is None else given, read=frozenset())
    sizes = delta_sizes(options, inner, 64)
    bound = options.number("linear_lower_bound", -5.0, optional=True)
    bound = inner.number("gate_lower_bound", bound, optional=True)
    # As transformers' config has it: safe_gate counts where linear_attn_config is given, and asks for a bound.
    has_bound = inner.flag("safe_gate", True) and given is not None
    inner.finish()
    bound = -5.0 if bound is None and has_bound else bound
    if bound is not None and bound >= 0:
        is_inner = "gate_lower_bound" in inner.values
        read, key = (inner, "gate_lower_bound") if is_inner else (options, "linear_lower_bound")
        raise read.unsupported(key, "it must be null or below 0, as a bound of log decays")
    # Rates start at 1 where log decays are bounded, as in the model's own code.
    return sizes | dict(lower_bound=bound, A_range=(1.0, 16.0) if bound is None else (1.0, 1.0))


def index_options(options: Options, rank: int) -> tuple[dict[str, Any], int]:
    """Return (the arguments of `Indexer`, the number of blocks that a row reads). rank: the width of the latent of queries."""
    best, size = options.integer("index_topk", 2048), options.integer("index_kpool", 16)
    if best % size:
        raise options.unsupported("index_topk", f"it must be a multiple of index_kpool={size}")
    if not options.flag("index_kpool_always_select_tail", True) and size > 1:
        raise options.unsupported(
            "index_kpool_always_select_tail", "without it the first tokens of a sequence would read none"
        )
    sizes = dict(heads=options.integer("index_n_heads", 32), head_width=options.integer("index_head_dim", 128))
    return dict(rank=rank, block_size=size, **sizes), best // size


def sharing_layers(options: Options, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers, from 0, of the layers of softmax attention that have no indexer: they take the choice of the layer
    before.

    kinds: the kind of each layer. Raises UnsupportedOption if such a layer does not follow a layer with an indexer.
    """
    layers, every = len(kinds), max(options.integer("index_topk_freq", 1, least=0), 1)
    offset = options.integer("index_skip_topk_offset", 2, least=0)
    # Without a list of kinds, each `every`-th layer has an indexer, and so have those before the offset.
    usual = [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(layers)]
    pattern, key = options.take("index_topk_pattern", None), "indexer_types"
    if options.take(key, None) is None and pattern is not None:
        key = "index_topk_pattern"
        # A pattern is a list, or a string with one letter for each layer.
        options.values[key] = list(pattern) if isinstance(pattern, str) else pattern
    found = layer_kinds(options, (key,), layers, usual, {FULL: FULL, SHARED: SHARED, "F": FULL, "S": SHARED})
    sharing = tuple(i for i, kind in enumerate(found) if kinds[i] == SOFTMAX and kind == SHARED)
    for layer in sharing:
        if layer == 0 or kinds[layer - 1] != SOFTMAX or found[layer - 1] != FULL:
            raise options.unsupported(key, f"layer {layer} must follow a layer that has an indexer")
    return sharing


def names_of(kinds: Sequence[str], layers: int) -> Names:
    """Return the `Names` of the parameters. In files the layer of multi-token prediction has the number `layers`, behind the
    last. It counts as another model, as the vision tower does."""
    query = {"query": "q_b_proj"} | {f"indexer.{old}": f"indexer.{new}" for old, new in INDEXER.items()}
    mixers = {LINEAR: ("self_attn", DELTA), SOFTMAX: ("self_attn", LATENT | query)}
    outer = outer_names(*(f"{PREFIX}.{name}" for name in ("embed_tokens", "layers", "norm")))
    return Names(
        (*mixer_names(kinds, mixers), *MLPS, *STREAMS, *outer),
        layouts=transposed_layouts("router", *GATED_MLP),
        aliases=ALIASES,
        others=(r"^model\.visual\.", rf"^model\.language_model\.layers\.{layers}\."),
        float32=FLOAT32,
    )
