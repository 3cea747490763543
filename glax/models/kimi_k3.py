"""Build the language model of Kimi K3: the mixers of Kimi-Linear with gates of full rank, experts in a narrower width, and
attention over the sums that groups of layers have left, in place of residuals."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from glax.models.attention_residual import AttentionResidual, AttentionResidualLM, blocks_of, residual_names
from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, hidden_act
from glax.models.kimi_linear import (
    DELTA,
    DENSE,
    EXPERTS,
    LATENT,
    LATENT_NORM_EPS,
    SPARSE,
    KimiOptions,
    delta_arguments,
    expert_arguments,
    expert_names,
    kimi_linear,
    latent_arguments,
    linear_options,
)
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import GATED_MLP, Names, mixer_names, outer_names, renamed, transposed, transposed_layouts
from glax.nn import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP

# Options that Kimi-Linear's config does not have. Text models of either are of model_type "kimi_linear".
K3_OPTIONS = ("attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size")
EXPERT_KEYS = {
    "count": "num_experts", "top_k": "num_experts_per_token", "groups": "num_expert_group", "shared": "num_shared_experts",
    "normalize": "moe_renormalize",
}  # fmt: skip
# Options that a model without experts may have.
EXPERT_OPTIONS = (
    *EXPERT_KEYS.values(), "latent_moe_use_norm", "moe_intermediate_size", "moe_router_activation_func",
    "routed_expert_hidden_size", "routed_scaling_factor", "topk_group",
)  # fmt: skip
# Its own code reads them, and they change nothing that it computes.
IGNORED = (
    "head_dim", "max_position_embeddings", "num_nextn_predict_layers", "rope_parameters", "rope_scaling", "rope_theta",
    "topk_method", "use_grouped_topk",
)  # fmt: skip
PREFIX = "language_model."  # before the names of the language model in a folder of the whole model
OTHERS = (r"^vision_tower\.", r"^mm_projector\.")
FLOAT32 = (r"\.A_log$", r"\.dt_bias$", r"\.e_score_correction_bias$", r"_conv1d\.weight$", r"\.o_norm\.weight$")
LATENT_EXPERTS = tuple(
    (rf"\.mlp\.{old}\.", f".block_sparse_moe.routed_expert_{new}.")
    for old, new in (("into", "down_proj"), ("out_norm", "norm"), ("out_of", "up_proj"))
)


def kimi_k3(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build the language model of Kimi K3. Its vision tower is not read. Raises UnsupportedOption for an option that is not
    supported.

    Kimi Team 2026, https://arxiv.org/abs/2607.24653.
    """
    outermost = KimiOptions(config.values)
    options = outermost.model("text_config", "kimi_k3_text")
    model = language_model(config, options, precision, is_whole=True)
    # Whether embeddings are tied, the language model's own config says.
    outermost.ignore("tie_word_embeddings", "vision_config")
    outermost.finish()
    return model


def kimi_text(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a model of model_type "kimi_linear": a Kimi-Linear, or the language model of Kimi K3 where the config has its
    options. Raises UnsupportedOption for an option that is not supported.

    Kimi Team 2025, https://arxiv.org/abs/2510.26692.
    """
    values = config.values
    if values.get("hidden_act") != "situ" and all(values.get(key) is None for key in K3_OPTIONS):
        return kimi_linear(config, precision)
    return language_model(config, KimiOptions(values, code="kimi_k3_text"), precision, is_whole=False)


def language_model(config: ModelConfig, options: KimiOptions, precision: Precision, *, is_whole: bool) -> CausalLM:
    """Return the language model of these options. is_whole: whether its folders hold the whole model, with a vision tower, or
    the language model alone, under shorter names."""
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 163840, pad=0)
    eps = options.number("rms_norm_eps", 1e-6, least=0)
    act, situ = activation_of(options)
    delta, kinds = gated_delta_arguments(options, layers)
    latent = latent_arguments(options)
    options.choice("mla_use_nope", False, (True,))
    has_gate = options.flag("mla_use_output_gate", False)
    mlps = mlp_kinds_by_frequency(options, layers)
    experts, shared = sparse_arguments(options, eps) if SPARSE in mlps else ({}, 0)
    inside = options.integer("intermediate_size", 11008)
    every = options.integer("attn_res_block_size", None, optional=True)
    options.ignore(*TRAINING, *IGNORED)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)
    gated = functools.partial(SwiGLU, width, activation=act, situ=situ, **common)

    def mixer(layer: int) -> Layer:
        if kinds[layer] == SOFTMAX:
            more = dict(theta=None, norm_eps=LATENT_NORM_EPS, gated=has_gate)
            return MultiHeadLatentAttention(width, **more, **latent, **common)
        return KimiDeltaAttention(width, norm_eps=eps, gate_bias=False, filter_init=init, **delta, **common)

    def mlp(layer: int) -> SwiGLU | SparseMLP:
        if mlps[layer] == DENSE:
            return gated(inside)
        return SparseMLP(width, routing="sigmoid", act=act, situ=situ, shared=gated(shared), **experts, **common)

    def residual() -> AttentionResidual:
        return AttentionResidual(width, norm_eps=eps, **common)

    size = None if every is None else 2 * every  # the config counts layers, of two sublayers each
    names = names_of(kinds, mlps, delta, latent["query_rank"], is_whole)
    blocks = blocks_of(layers, size, residual, norm, mixer, mlp)
    outer |= dict(output_residual=None if every is None else residual())
    return AttentionResidualLM(config, blocks, norm(), names, width=width, **outer)


def activation_of(options: Options) -> tuple[str, tuple[float, float | None] | None]:
    """Return (activation, situ), the arguments of `SwiGLU` with these names, from the options."""
    beta = options.number("activation_situ_beta", None, optional=True, least=0)
    linear_beta = options.number("activation_situ_linear_beta", None, optional=True, above=0)
    if options.values.get("hidden_act") == "situ":
        options.ignore("hidden_act")
        return "silu", (beta or 1.0, linear_beta)  # 0 counts as null in the model's own code
    return hidden_act(options), None


def gated_delta_arguments(options: Options, layers: int) -> tuple[dict[str, Any], list[str]]:
    """Return (the arguments of KimiDeltaAttention, those of its gates included; the kind of each layer)."""
    inner = linear_options(options)
    for key, other in (("full_attn_layers", "kda_layers"), ("kda_layers", "full_attn_layers")):
        if inner.values.get(key) is None and inner.values.get(other) is not None:
            raise inner.unsupported(key, f"it must come with {other}")
    delta, kinds = delta_arguments(options, inner, layers)
    bound = inner.number("gate_lower_bound", None, optional=True)
    if bound is not None and bound >= 0:
        raise inner.unsupported("gate_lower_bound", "it must be null or below 0")
    delta |= dict(lower_bound=bound, low_rank_output=not inner.flag("use_full_rank_gate", False))
    inner.finish()
    return delta, kinds


def mlp_kinds_by_frequency(options: Options, layers: int) -> list[str]:
    """Return "dense" or "sparse" for the MLP of each layer: "sparse" where the layer's number, from 0, is a multiple of
    moe_layer_freq and at least first_k_dense_replace; "dense" in all layers of a config without num_experts."""
    first, every = options.integer("first_k_dense_replace", 0, least=0), options.integer("moe_layer_freq", 1)
    has_experts = options.values.get("num_experts") is not None
    kinds = [SPARSE if has_experts and layer >= first and layer % every == 0 else DENSE for layer in range(layers)]
    if SPARSE not in kinds:
        options.ignore(*EXPERT_OPTIONS)
    return kinds


def sparse_arguments(options: KimiOptions, eps: float) -> tuple[dict[str, Any], int]:
    """Return (the arguments of SparseMLP, the width of all shared experts together). eps: the epsilon of the norm of latent
    experts."""
    options.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    experts, shared = expert_arguments(options, EXPERT_KEYS, inside=1024, count=256, groups=1, best=1, scaling=1.0)
    latent = options.integer("routed_expert_hidden_size", None, optional=True)
    experts["normalize"] &= experts["top_k"] > 1  # the weight of one expert is not normalised
    has_norm = options.flag("latent_moe_use_norm", False)
    if latent is not None:
        experts |= dict(latent_width=latent, latent_norm_eps=eps if has_norm else None)
    return experts, shared


def padded_rates(x: np.ndarray) -> np.ndarray:
    """Return A_log [H] with zeros behind it, up to a multiple of 128 numbers, as published files hold it."""
    return np.pad(x, (0, -len(x) % 128))


@dataclasses.dataclass(frozen=True)
class UnpaddedRates:
    """Define a function from a file's tensor to A_log [H], the rates of H = `heads` heads. Published files have zeros behind
    them, up to a multiple of 128 numbers. It raises ValueError for other numbers there, which would be the rates of more
    heads.

    Two with equal `heads` are equal. Partials of a function would not be, and then equal models would have unequal graphs.
    """

    heads: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if x.ndim != 1 or x[self.heads :].any():
            raise ValueError(f"A_log must have {self.heads} numbers, and zeros behind them, got shape {x.shape}")
        return x[: self.heads]


def names_of(kinds: list[str], mlps: list[str], delta: dict[str, Any], query_rank: int | None, is_whole: bool) -> Names:
    """Return the `Names` of the parameters.

    kinds, mlps: for each layer the kind of its mixer, and whether its MLP is dense or sparse. delta: the arguments of
    KimiDeltaAttention. query_rank: the argument of MultiHeadLatentAttention. is_whole: as in `language_model`.
    """
    gates = {} if delta["low_rank_output"] else {"output_gate_up": "g_proj"}
    query = {"query": "q_proj" if query_rank is None else "q_b_proj", "gate": "g_proj"}
    mixers = {LINEAR: ("self_attn", DELTA | gates), SOFTMAX: ("self_attn", LATENT | query)}
    prefix = PREFIX if is_whole else ""
    model = f"{prefix}model"
    residuals = residual_names(f"{model}.output_attn_res", "self_attention_res", "mlp_res")
    outer = outer_names(*(f"{model}.{name}" for name in ("embed_tokens", "layers", "norm")))
    # A config of either kind may lie beside the files of the other.
    longer, shorter = (r"^(?=(model|lm_head)\.)", PREFIX), (rf"^{re.escape(PREFIX)}", "")
    return Names(
        (
            *mixer_names(kinds, mixers), *renamed("mlp", GATED_MLP), *expert_names(mlps), *LATENT_EXPERTS, *residuals, *outer,
            (r"^lm_head\.", f"{prefix}lm_head."),
        ),
        layouts=(
            *transposed_layouts("router"),
            *((old, (f"{new}.weight", transposed, transposed)) for old, new in EXPERTS.items()),
            ("A_log", ("A_log", padded_rates, UnpaddedRates(delta["num_heads"]))),
        ),
        aliases=(longer if is_whole else shorter,),
        others=OTHERS,
        float32=FLOAT32,
    )  # fmt: skip
