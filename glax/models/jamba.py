"""Build Jamba: Mamba-1 in most layers, softmax attention without rotation in some, and experts in some."""

import functools
from typing import Any

import jax.numpy as jnp

from glax.models.config import ModelConfig
from glax.models.hybrids import (
    LINEAR,
    SOFTMAX,
    TRAINING,
    attention_sizes,
    check_kinds_of_layers,
    experts_per_token,
    hidden_act,
    softmax_attention,
)
from glax.models.kimi_linear import KimiOptions
from glax.models.mamba import MAMBA1, STEP_BIAS, step_rank
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    ATTENTION,
    GATED_MLP,
    Names,
    mixer_names,
    outer_names,
    renamed,
    stacked_experts,
    transposed_layouts,
)
from glax.nn import Mamba1, RMSNorm, SparseMLP, SwiGLU
from glax.nn.layer import Layer

MIXERS = {SOFTMAX: ("self_attn", ATTENTION), LINEAR: ("mamba", MAMBA1)}
MLP = (
    *((rf"\.mlp\.experts\.{old}$", rf".mlp.experts.*.{new}.{old}") for old, new in GATED_MLP.items()),
    (r"\.mlp\.router$", ".mlp.router.router"),
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.", ".feed_forward."),
)


def chosen_layers(options: KimiOptions, kind: str, layers: int, period: int, offset: int) -> list[bool]:
    """Return, for each layer, whether its number is `offset` modulo `period`, so that it is of this kind.

    kind: "attn" or "expert", with which the options begin. period, offset: the values for a config that lacks the option.
    """
    period = options.integer(f"{kind}_layer_period", period)
    offset = options.integer(f"{kind}_layer_offset", offset, least=0)
    if offset >= period:
        raise options.unsupported(f"{kind}_layer_offset", f"it must be less than {kind}_layer_period={period}")
    return [layer % period == offset for layer in range(layers)]


def jamba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Jamba model. Raises UnsupportedOption for an option that is not supported.

    Lieber et al. 2024, https://arxiv.org/abs/2403.19887.
    """
    options = KimiOptions(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 65536, pad=0)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    attends = chosen_layers(options, "attn", layers, 8, 4)
    is_sparse = chosen_layers(options, "expert", layers, 2, 1)
    sizes, inside = attention_sizes(options, width, kv_heads=8), options.integer("intermediate_size", 14336)
    count = options.integer(options.present_key("num_experts", "num_local_experts"), 16, least=0)
    top_k = experts_per_token(options, 2, "num_experts", count if count > 1 and any(is_sparse) else 0)
    mixer: dict[str, Any] = dict(
        inside=width * options.integer("mamba_expand", 2),
        state_width=options.integer("mamba_d_state", 16),
        rank=step_rank(options, "mamba_dt_rank", width),
        conv_size=options.integer("mamba_d_conv", 4),
        conv_bias=options.flag("mamba_conv_bias", True),
        bias=options.flag("mamba_proj_bias", False),
        act=act,
        part_norm="scaled",
        norm_eps=eps,
    )
    kinds = [SOFTMAX if is_attention else LINEAR for is_attention in attends]
    check_kinds_of_layers(options, kinds)
    counts = [count if has_experts else 1 for has_experts in is_sparse]
    if options.take("layers_num_experts", None) not in (None, counts):
        raise options.unsupported("layers_num_experts", f"the other options make it {counts}")
    options.ignore(*TRAINING, "use_associative_scan", "use_mamba_kernels", "use_mambapy")
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer_of(is_attention: bool) -> Layer:
        if is_attention:
            return softmax_attention(width, sizes, None, init, precision)
        layer = Mamba1(width, **mixer, **common)
        for param in (layer.conv.filter, layer.dt.kernel):  # as the other projections
            param[...] = init(precision.rngs.params(), param.shape, jnp.float32).astype(param.dtype)
        layer.dt_bias[...] = jnp.zeros_like(layer.dt_bias[...])
        return layer

    def mlp(has_experts: bool) -> SwiGLU | SparseMLP:
        if has_experts and count > 1:
            return SparseMLP(width, inside, count, top_k, act=act, normalize=False, **common)
        return SwiGLU(width, inside, activation=act, **common)

    blocks = [
        Block(norm(), mixer_of(is_attention), norm(), mlp(has_experts))
        for is_attention, has_experts in zip(attends, is_sparse, strict=True)
    ]
    outer_rules = outer_names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm")
    layouts = (*transposed_layouts("router", "gate", "up", "down"), *STEP_BIAS)
    stacked = stacked_experts(r"model\.layers\.\d+\.feed_forward")
    names = Names((*mixer_names(kinds, MIXERS), *MLP, *outer_rules), layouts=layouts, stacked=stacked)
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
