"""Build the models of bailing_hybrid, which have latent attention and experts: Ling-3 with Kimi Delta Attention, and Ling-2.5,
Ring-2.5 and Ling-2.6 with Lightning Attention."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, activate_convolutions, hidden_act, layer_kinds
from glax.models.kimi_linear import LATENT as KIMI_LATENT
from glax.models.kimi_linear import (
    LATENT_NORM_EPS,
    KimiOptions,
    expert_arguments,
    expert_keys,
    latent_arguments,
    mlp_kinds,
    mlp_of,
)
from glax.models.minimax import FusedLightning
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    ATTENTION,
    CONVOLUTIONS,
    GATED_MLP,
    Names,
    mixer_names,
    outer_names,
    renamed,
    transposed_layouts,
)
from glax.models.rope import Rope, attention_scale, rotation
from glax.nn import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm
from glax.nn.layer import Layer
from glax.nn.parts import activation, by_head

DELTA = ATTENTION | CONVOLUTIONS | {
    "gate_up": "f_proj",
    "output_gate_up": "g_proj",
    "beta": "b_proj",
    "norm": "o_norm",
    "output": "dense",
}  # fmt: skip
LATENT = KIMI_LATENT | {"gate": "g_proj", "output": "dense"}
MLPS = (
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.router$", ".mlp.gate.router"),
    (r"\.mlp\.correction$", ".mlp.gate.expert_bias"),
    *((rf"\.mlp\.experts\.{old}$", rf".mlp.experts.*.{new}.{old}") for old, new in GATED_MLP.items()),
    *((rf"\.mlp\.shared\.{old}\.", rf".mlp.shared_experts.{new}.") for old, new in GATED_MLP.items()),
)
# Names of transformers' own modules, which its files may have too.
ALIASES = (
    (r"^model\.embed_tokens\.", "model.word_embeddings."),
    (r"\.self_attn\.(forget_gate\.)?", ".attention."),
    (r"\.attention\.o_proj\.", ".attention.dense."),
    (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
)
# Options that only a config with Kimi Delta Attention has.
OF_DELTA = (
    "kda_lower_bound", "kda_safe_gate", "no_kda_lora", "short_conv_kernel_size", "linear_conv_kernel_dim", "linear_head_dim",
)  # fmt: skip
LIGHTNING = {
    "qkv": "query_key_value",
    "query_norm": "query_layernorm",
    "key_norm": "key_layernorm",
    "norm": "g_norm",
    "output_gate": "g_proj",
    "output": "dense",
}
EXPERT_KEYS_2_5 = {
    "count": "num_experts",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "shared": "num_shared_experts",
    "normalize": "norm_topk_prob",
}
# Options that the own code of Ling-2.5 takes without an effect on its function.
WITHOUT_EFFECT = ("linear_silu", "mtp_loss_scaling_factor", "qk_head_dim")
FLOAT32 = (r"\.gate\.weight$", r"\.gate\.expert_bias$", r"\.dt_bias$", r"\.A_log$", r"_conv1d\.weight$")


def bailing_hybrid(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Ling model. Raises UnsupportedOption for an option that is not supported.

    Ling Team 2026, https://huggingface.co/inclusionAI.
    """
    return (lightning_model if has_lightning(config.values) else delta_model)(config, precision)


def has_lightning(values: Mapping) -> bool:
    """Return whether the layers without softmax are Lightning Attention, and not Kimi Delta Attention.

    values: the values of config.json. If it names classes under "architectures", these decide. Otherwise the layers are
    Lightning Attention if it has group_norm_size and no option of OF_DELTA.
    """
    classes = values.get("architectures") or []
    if isinstance(classes, list) and classes:
        return any("V2_5" in str(name) for name in classes)
    return "group_norm_size" in values and not any(key in values for key in OF_DELTA)


def delta_model(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Ling-3 model. Layers of multi-token prediction, which follow the others, are not read. Raises UnsupportedOption
    for an option that is not supported."""
    options = KimiOptions(config.values)
    width, layers = options.integer("hidden_size", 2560), options.integer("num_hidden_layers", 42)
    outer, init = outer_options(options, precision, 157184, pad=156892)
    outer["tied"] = False  # whatever tie_word_embeddings says
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    every = options.integer("layer_group_size", 6)
    usual = [LINEAR if (layer + 1) % every else SOFTMAX for layer in range(layers)]
    kinds, mlps = layer_kinds(options, ("layer_types",), layers, usual), mlp_kinds(options, layers, 2)
    latent = latent_arguments(options)
    experts, shared = expert_arguments(
        options, expert_keys(options), inside=768, count=512, groups=8, best=4, scaling=2.5
    )
    inside, delta = options.integer("intermediate_size", 6144), delta_arguments(options, latent["num_heads"])
    rope = rotation(options, 6e6, 262144, length_key=options.present_key("max_position_embeddings", "model_max_length"))
    turned = rotary_arguments(rope, latent)
    further = options.integer(options.present_key("num_mtp_layers", "num_nextn_predict_layers"), 1, least=0)
    options.ignore(*TRAINING, "head_dim", "qk_head_dim", "pretraining_tp", "mtp_loss_scaling_factor")
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == SOFTMAX:
            more = dict(interleaved=True, head_gated=True, norm_eps=LATENT_NORM_EPS)
            return MultiHeadLatentAttention(width, **latent, **turned, **more, **common)
        more = dict(low_rank=False, gate_bias=False, filter_init=init)
        layer = KimiDeltaAttention(width, norm_eps=eps, **delta, **more, **common)
        activate_convolutions(layer, act)
        return layer

    mlp = functools.partial(mlp_of, width=width, inside=inside, shared=shared, act=act, experts=experts, common=common)
    blocks = [Block(norm(), mixer(kind), norm(), mlp(of)) for kind, of in zip(kinds, mlps, strict=True)]
    query = "q_proj" if latent["query_rank"] is None else "q_b_proj"
    mixers = {LINEAR: ("attention", DELTA), SOFTMAX: ("attention", LATENT | {"query": query})}
    names = Names(
        (*mixer_names(kinds, mixers), *MLPS, *outer_names("model.word_embeddings")),
        layouts=transposed_layouts("router", *GATED_MLP),
        aliases=ALIASES,
        others=tuple(rf"^model\.layers\.{layers + i}\." for i in range(further)),
        float32=FLOAT32,
    )
    return CausalLM(config, blocks, norm(), names, width=width, **outer)


def delta_arguments(options: KimiOptions, heads: int) -> dict[str, Any]:
    """Return the sizes and lower_bound of KimiDeltaAttention as its arguments. heads: num_heads for a config without
    linear_num_heads.

    The width of a head is linear_head_dim in configs of transformers, whose head_dim is the width of the rotation, and head_dim
    in others. Raises UnsupportedOption for a bound that is not below 0.
    """
    head_width = options.integer("linear_head_dim", options.integer("head_dim", 128))
    size = options.integer("linear_conv_kernel_dim", options.integer("short_conv_kernel_size", 4))
    heads = options.integer("linear_num_heads", heads)
    bound = options.number("kda_lower_bound", -5.0)
    is_bounded = options.flag("kda_safe_gate", True)
    if is_bounded and bound >= 0:
        raise options.unsupported("kda_lower_bound", "it must be below 0")
    return dict(
        num_heads=heads,
        key_width=head_width,
        value_width=head_width,
        conv_size=size,
        lower_bound=bound if is_bounded else None,
    )


def rotary_arguments(rope: Rope, latent: dict[str, Any]) -> dict[str, Any]:
    """Return theta, frequencies and scale as arguments of the latent attention. latent: its sizes, as `latent_arguments`
    returns them.

    If positions are scaled, the option mscale_all_dim of the rope options changes scale.
    """
    found = rope.arguments(latent["shared_width"])
    found.pop("rotary_width", None)
    scale = (latent["head_width"] + latent["shared_width"]) ** -0.5
    every = None if rope.inner is None else rope.inner.number("mscale_all_dim", None, optional=True)
    if every and rope.inner is not None:
        scale *= attention_scale(rope.inner.number("factor", above=0), every) ** 2
    return found | dict(scale=scale)


# ---- Ling-2.5, Ring-2.5 and Ling-2.6 ---------------------------------------------------------------------------------


class JointLightning(FusedLightning):
    """Compute Lightning Attention whose q, k and v come from one projection: all of q, then all of k, then all of v."""

    def heads(self, x: Float[Array, "*rows width"]) -> list[Float[Array, "*rows H D"]]:
        act = activation("act", self.act)
        return [by_head(act(part), self.num_heads) for part in jnp.split(self.qkv(x), 3, axis=-1)]


def lightning_model(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Ling-2.5, Ring-2.5 or Ling-2.6 model. Its own code is in github.com/inclusionAI/Ring-V2.5. Layers of multi-token
    prediction, which follow the others, are not read. Raises UnsupportedOption for an option that is not supported."""
    options = KimiOptions(config.values, code="bailing_moe_v2_5")
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 20)
    outer, init = outer_options(options, precision, 157184, pad=156892)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    every = options.integer("layer_group_size", 5)
    whole = layers // every * every  # the layers of whole groups
    kinds = [SOFTMAX if (layer + 1) % every == 0 or layer >= whole else LINEAR for layer in range(layers)]
    mlps, latent = mlp_kinds(options, layers, 1), latent_arguments(options, heads=16)
    latent["bias"] = latent["output_bias"] = bias = options.flag("use_qkv_bias", False)
    experts, shared = expert_arguments(options, EXPERT_KEYS_2_5, inside=512, count=256, groups=8, best=4, scaling=1.0)
    experts["normalize"] = experts["top_k"] > 1  # whatever norm_topk_prob says
    inside = options.integer("intermediate_size", 5120)
    rope = rotation(options, 600000.0, 32768, 0.5)
    heads, head_width = latent["num_heads"], options.integer("head_dim", 128, optional=True)
    head_width = width // latent["num_heads"] if head_width is None else head_width
    lightning = lightning_arguments(options, rope, heads, head_width) | dict(bias=bias, act=None, norm_eps=eps)
    if int(head_width * rope.partial) != latent["shared_width"]:
        raise options.unsupported(
            "qk_rope_head_dim", f"it must be head_dim * partial_rotary_factor={head_width * rope.partial:g}"
        )
    turned = rotary_arguments(dataclasses.replace(rope, partial=1.0), latent)
    further = options.integer("num_nextn_predict_layers", 0, least=0)
    options.ignore(*TRAINING, *WITHOUT_EFFECT)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(layer: int, kind: str) -> Layer:
        if kind == SOFTMAX:
            more = dict(interleaved=True, norm_eps=LATENT_NORM_EPS)
            return MultiHeadLatentAttention(width, **latent, **turned, **more, **common)
        return JointLightning(width, slopes=slopes(heads, layer, layers), **lightning, **common)

    mlp = functools.partial(mlp_of, width=width, inside=inside, shared=shared, act=act, experts=experts, common=common)
    each = enumerate(zip(kinds, mlps, strict=True))
    blocks = [Block(norm(), mixer(layer, kind), norm(), mlp(of)) for layer, (kind, of) in each]
    query = "q_proj" if latent["query_rank"] is None else "q_b_proj"
    mixers = {LINEAR: ("attention", LIGHTNING), SOFTMAX: ("attention", LATENT | {"query": query})}
    names = Names(
        (*mixer_names(kinds, mixers), *MLPS, *outer_names("model.word_embeddings")),
        layouts=transposed_layouts("router", *GATED_MLP),
        others=tuple(rf"^model\.layers\.{layers + i}\." for i in range(further)),
    )
    return CausalLM(config, blocks, norm(), names, width=width, **outer)


def lightning_arguments(options: Options, rope: Rope, heads: int, head_width: int) -> dict[str, Any]:
    """Return the arguments of LightningAttention but bias, act, slopes and norm_eps."""
    options.choice("rope_interleave", True, (True,))
    groups = options.integer("group_norm_size", 4)
    if heads * head_width % groups:
        raise options.unsupported(
            "group_norm_size", f"it must divide num_attention_heads * head_dim={heads * head_width}"
        )
    return rope.arguments(head_width) | dict(
        num_heads=heads,
        head_width=head_width,
        scale=head_width**-0.5,
        norm_groups=groups,
        qk_norm=options.flag("use_qk_norm", True),
        output_bias=options.flag("use_bias", False),
    )


def slopes(heads: int, layer: int, layers: int) -> np.ndarray:
    """Return the slopes s [heads] of layer number `layer`, from 0, of `layers`:   a_h (1 - (layer - 1) / (layers - 1) + 1e-5),
    with the slopes a_h of ALiBi.

    Press et al. 2022, https://arxiv.org/abs/2108.12409.
    """
    return alibi(heads) * (1 - (layer - 1) / (layers - 1) + 1e-5)


def alibi(heads: int) -> np.ndarray:
    """Return the slopes [heads] of ALiBi: 2^(-8 h / H) for h = 1, ..., H, where H is the greatest power of 2 that is at most
    `heads`. If H is less than `heads`, the slopes number 1, 3, 5, ... of 2 H heads follow."""
    power = 2 ** int(math.log2(heads))
    found = np.exp2(-8.0 / power * np.arange(1, power + 1))
    return found if power == heads else np.concatenate([found, alibi(2 * power)[::2][: heads - power]])
