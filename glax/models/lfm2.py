"""Build LFM2 and LFM3: layers of gated short convolutions and layers of softmax attention, dense or with experts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    SOFTMAX,
    TRAINING,
    are_layers,
    attention_sizes,
    experts_per_token,
    layer_kinds,
    softmax_attention,
)
from glax.models.llama import SLIDING
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import NORMED_ATTENTION, Names, mixer_names, outer_names, renamed, transposed_layouts
from glax.models.rope import rotation, rotations
from glax.nn import RMSNorm, ShortConvolution, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP
from glax.nn.parts import EMBED, HEADS, linear
from glax.nn.passes import Rows, State

CONV = "conv"
KINDS = {SOFTMAX: SOFTMAX, "attention": SOFTMAX, CONV: CONV}  # older versions write the short name
ATTENTION = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "query_norm": "q_layernorm",
    "key_norm": "k_layernorm",
}  # fmt: skip
MIXERS = {
    SOFTMAX: ("self_attn", ATTENTION),
    CONV: ("conv", {"input": "in_proj", "output": "out_proj"}),
}
LFM3_KINDS = {kind: kind for kind in (SOFTMAX, SLIDING, CONV)}
LFM3_ROPE = {
    SLIDING: dict(rope_type="default", rope_theta=1e4),
    SOFTMAX: dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.5),
}  # of a config without rope_parameters
GATED_MLP = {"gate": "w1", "up": "w3", "down": "w2"}
MLP = (
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.router$", ".mlp.gate.router"),
    (r"\.mlp\.correction$", ".mlp.expert_bias"),
    *((rf"\.mlp\.experts\.{old}$", rf".mlp.experts.*.{new}.{old}") for old, new in GATED_MLP.items()),
    (r"\.mlp\.", ".feed_forward."),
)
SUM_FLOOR = 1e-6  # added to the sum of a token's weights


class SandwichBlock(Block):
    """Compute x + after(mixer(norm(x))), then x + after(mlp(norm(x))), where `after` is a norm as well."""

    def __init__(self, attn_norm: Any, attn: Layer, attn_after: Any, mlp_norm: Any, mlp: Any, mlp_after: Any):
        super().__init__(attn_norm, attn, mlp_norm, mlp)
        self.attn_after, self.mlp_after = attn_after, mlp_after

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows, *rest) -> tuple[Array, dict]:
        y, state = self.attn.mix(self.attn_norm(x), state, rows, *rest)
        x = x + self.attn_after(y)
        return x + self.mlp_after(self.mlp(self.mlp_norm(x))), state


class GatedShortConvolution(Layer):
    """Compute y_t = W_o (c_t * conv(b * z)_t) with b_t, c_t, z_t the thirds of W_i x_t, and conv a `ShortConvolution`.

    bias: whether both projections and the convolution have one. Liquid AI 2025, https://arxiv.org/abs/2511.23404.
    """

    def __init__(
        self,
        width: int,
        size: int,
        *,
        bias: bool,
        kernel_init: Callable,
        filter_init: Callable,
        dtype,
        param_dtype,
        rngs,
    ):
        self.width = width
        options: dict[str, Any] = dict(bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.input = linear(width, 3 * width, (EMBED, HEADS), kernel_init=kernel_init, **options)
        self.conv = ShortConvolution(width, size, activation=None, filter_init=filter_init, **options)
        self.output = linear(width, width, (HEADS, EMBED), kernel_init=kernel_init, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(conv=self.conv.initial_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        before, behind, z = jnp.split(self.input(x), 3, axis=-1)
        y, after = self.conv.extend(before * z, state.get("conv"), rows)
        return self.output(behind * y), dict(conv=after)


def mlp_width(options: Options) -> int:
    """Return the inner width of an MLP: block_ff_dim, or else intermediate_size, if block_auto_adjust_ff_dim is false.

    Otherwise it is 2/3 of this, times block_ffn_dim_multiplier and rounded up to a multiple of block_multiple_of, unless that
    multiplier is null.
    """
    inside = options.integer("block_ff_dim", options.integer("intermediate_size", 12288))
    factor = options.number("block_ffn_dim_multiplier", 1.0, optional=True, above=0)
    multiple = options.integer("block_multiple_of", 256)
    if not options.flag("block_auto_adjust_ff_dim", True):
        return inside
    inside = int(2 * inside / 3)
    return inside if factor is None else multiple * -(-int(factor * inside) // multiple)


def lfm2(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an LFM2 model without experts. Raises UnsupportedOption for an option that is not supported.

    Liquid AI 2025, https://arxiv.org/abs/2511.23404.
    """
    options = Options(config.values)
    layers = options.integer("num_hidden_layers", 32)
    chosen = options.take("full_attn_idxs", None)
    chosen = list(range(layers)) if chosen is None or options.values.get("layer_types") is not None else chosen
    if not are_layers(chosen, layers):
        raise options.unsupported("full_attn_idxs", f"it must hold layers from 0 to {layers - 1}")
    usual = [SOFTMAX if layer in chosen else CONV for layer in range(layers)]
    inside = mlp_width(options)
    return hybrid(config, options, precision, usual, 2560, [functools.partial(SwiGLU, inside=inside)] * layers)


def lfm2_moe(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an LFM2 model with experts, chosen by sigmoids. Raises UnsupportedOption for an option that is not supported.

    Liquid AI 2025, https://arxiv.org/abs/2511.23404.
    """
    options = Options(config.values)
    layers, first = options.integer("num_hidden_layers", 32), options.integer("num_dense_layers", 2, least=0)
    count = options.integer("num_experts", 32)
    top_k = experts_per_token(options, 4, "num_experts", count)
    dense = functools.partial(SwiGLU, inside=options.integer("intermediate_size", 7168))
    sparse = functools.partial(
        SparseMLP,
        inside=options.integer("moe_intermediate_size", 1792),
        count=count,
        top_k=top_k,
        routing="sigmoid",
        corrected=options.flag("use_expert_bias", True),
        normalize=options.flag("norm_topk_prob", True),
        scaling=options.number("routed_scaling_factor", 1.0),
        sum_floor=SUM_FLOOR,
    )
    mlps = [dense if layer < first else sparse for layer in range(layers)]
    return hybrid(config, options, precision, [], 2048, mlps)


def hybrid(
    config: ModelConfig,
    options: Options,
    precision: Precision,
    usual: Sequence[str],
    width: int,
    mlps: Sequence[Callable],
) -> CausalLM:
    """Return the model, from the options that are not taken yet. usual, width: the kinds of layers and the width for a config
    that lacks them. mlps: for each layer, a function of the width that makes its MLP."""
    width = options.integer("hidden_size", width)
    outer, init = outer_options(options, precision, 65536, tied=True, pad=0)
    outer["tied"] = options.flag("tie_embedding", outer["tied"])  # an older name, which counts where a config has both
    eps = options.number("norm_eps", 1e-5, least=0)
    kinds = layer_kinds(options, ("layer_types",), len(mlps), usual, KINDS)
    sizes = attention_sizes(options, width, heads=32, kv_heads=8)
    size, bias = options.integer("conv_L_cache", 3), options.flag("conv_bias", False)
    rope = rotation(options, 1e6, 128000)
    options.ignore(*TRAINING)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == CONV:
            return GatedShortConvolution(width, size, bias=bias, filter_init=init, **common)
        return softmax_attention(width, sizes, rope, init, precision, qk_norm=True, norm_eps=eps)

    blocks = [Block(norm(), mixer(kind), norm(), mlp(width, **common)) for kind, mlp in zip(kinds, mlps, strict=True)]
    outer_rules = outer_names(norm="model.embedding_norm", attn_norm="operator_norm", mlp_norm="ffn_norm")
    names = Names(
        (*mixer_names(kinds, MIXERS), *MLP, *outer_rules),
        layouts=transposed_layouts("router", *GATED_MLP),
        float32=(r"\.expert_bias$",),
    )
    return CausalLM(config, blocks, norm(), names, width=width, **outer)


def lfm3(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an LFM3 model: windows in some layers of attention, rotary positions by kind of layer, a gate of each head's output,
    and norms behind mixers and MLPs too. Raises UnsupportedOption for an option that is not supported.

    Liquid AI 2026, https://huggingface.co/LiquidAI/LFM3-1.7B.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 24)
    outer, init = outer_options(options, precision, 128000, tied=True, pad=124893)
    eps = options.number("norm_eps", 1e-5, least=0)
    eps = options.number("rms_norm_eps", eps, least=0)  # another name, which counts where a config has both
    period = (SLIDING, CONV, SOFTMAX, CONV)
    usual = [CONV, *(period[layer % 4] for layer in range(1, layers))]
    kinds = layer_kinds(options, ("layer_types",), layers, usual, LFM3_KINDS)
    attention = [kind for kind in LFM3_ROPE if kind in kinds]
    ropes = rotations(options, attention, LFM3_ROPE, 1e6, 128000)
    sizes = attention_sizes(options, width, heads=16, kv_heads=4, head_width=128)
    window = options.integer("sliding_window", 256) if SLIDING in kinds else None
    options.ignore("sliding_window")
    bias, head_gated = options.flag("attention_bias", False), options.flag("use_attention_gate", True)
    size, conv_bias = options.integer("conv_L_cache", 7), options.flag("conv_bias", False)
    inside, has_after = options.integer("intermediate_size", 7680), options.flag("use_sandwich_norm", True)
    options.ignore(*TRAINING)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)
    more = dict(qk_norm=True, norm_eps=eps, bias=bias, output_bias=bias, head_gated=head_gated)

    def mixer(kind: str) -> Layer:
        if kind == CONV:
            return GatedShortConvolution(width, size, bias=conv_bias, filter_init=init, **common)
        own = dict(window=window if kind == SLIDING else None)
        return softmax_attention(width, sizes, ropes[kind], init, precision, **own, **more)

    def block(kind: str) -> Block:
        mlp = SwiGLU(width, inside, **common)
        if not has_after:
            return Block(norm(), mixer(kind), norm(), mlp)
        return SandwichBlock(norm(), mixer(kind), norm(), norm(), mlp, norm())

    named = ("self_attn", NORMED_ATTENTION | {"head_gate": "gate_proj"})
    outer_rules = outer_names(norm="model.embedding_norm", attn_norm="operator_norm", mlp_norm="ffn_norm")
    after_rules = ((r"\.attn_after\.", ".post_operator_norm."), (r"\.mlp_after\.", ".post_ffn_norm."))
    names = Names(
        (*mixer_names(kinds, MIXERS | dict.fromkeys(attention, named)), *after_rules, *MLP, *outer_rules),
        aliases=((r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),),
    )
    return CausalLM(config, [block(kind) for kind in kinds], norm(), names, width=width, **outer)
