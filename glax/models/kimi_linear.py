"""Build Kimi-Linear: Kimi Delta Attention, multi-head latent attention without rotation, and experts chosen by sigmoids."""

import functools
from typing import Any

import numpy as np

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, activate_convolutions, are_layers, hidden_act, layer_kinds
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    ATTENTION,
    CONVOLUTIONS,
    GATED_MLP,
    Layout,
    Names,
    Rules,
    mixer_names,
    one_of,
    outer_names,
    renamed,
    transposed,
    transposed_layouts,
)
from glax.nn import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP

DELTA = ATTENTION | CONVOLUTIONS | {
    "gate_down": "f_a_proj",
    "gate_up": "f_b_proj",
    "output_gate_down": "g_a_proj",
    "output_gate_up": "g_b_proj",
    "beta": "b_proj",
    "norm": "o_norm",
}  # fmt: skip
LATENT = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "latent": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "expand": "kv_b_proj",
    "output": "o_proj",
}
EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
DENSE, SPARSE = "dense", "sparse"
# The published files call the MLP of a layer without experts `mlp`, and transformers writes the other name for it too.
ALIASES = ((r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)", ".mlp."),)
FLOAT32 = (r"\.gate\.weight$", r"\.gate\.e_score_correction_bias$", r"\.dt_bias$")
LATENT_NORM_EPS = 1e-6  # whatever rms_norm_eps says


def rates_to_torch(x: np.ndarray) -> np.ndarray:
    """Return A_log [H] as [1, 1, H, 1], the shape in checkpoints."""
    return x[None, None, :, None]


def rates_from_torch(x: np.ndarray) -> np.ndarray:
    """Return A_log [H] from [1, 1, H, 1], the inverse of `rates_to_torch`."""
    return x[0, 0, :, 0]


LAYOUTS: tuple[tuple[str, Layout], ...] = (
    *transposed_layouts("router"),
    *((old, (f"{new}.weight", transposed, transposed)) for old, new in EXPERTS.items()),
    ("A_log", ("A_log", rates_to_torch, rates_from_torch)),
)


class KimiOptions(Options):
    """Hold options that Kimi's own config names otherwise than transformers. Both names are read."""

    def present_key(self, key: str, other: str) -> str:
        """Return which of two names of one option the config has: `other` if it has that one, else `key`. Both then count as
        taken.

        Raises UnsupportedOption if the config has both with different values.
        """
        if key in self.values and other in self.values and self.values[key] != self.values[other]:
            raise self.unsupported(other, f"it must be {key}={self.values[key]!r}, which names the same")
        self.ignore(key, other)
        return other if other in self.values else key


def kimi_linear(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Kimi-Linear model. Raises UnsupportedOption for an option that is not supported.

    Kimi Team 2025, https://arxiv.org/abs/2510.26692.
    """
    options = KimiOptions(config.values)
    width, layers = options.integer("hidden_size", 2304), options.integer("num_hidden_layers", 27)
    outer, init = outer_options(options, precision, 163840, pad=163839)
    outer["tied"] = False  # whatever tie_word_embeddings says
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options)
    inner = linear_options(options)
    delta, kinds = delta_arguments(options, inner, layers)
    inner.finish()
    mlps = mlp_kinds(options, layers, 1)
    latent = latent_arguments(options)
    experts, shared = expert_arguments(
        options, expert_keys(options), inside=1024, count=256, groups=1, best=1, scaling=2.446
    )
    inside = options.integer("intermediate_size", 9216)
    options.ignore(
        *TRAINING, "head_dim", "qk_head_dim", "pretraining_tp", "rope_parameters", "rope_scaling", "rope_theta"
    )
    options.present_key("max_position_embeddings", "model_max_length")
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == SOFTMAX:
            return MultiHeadLatentAttention(width, theta=None, norm_eps=LATENT_NORM_EPS, **latent, **common)
        layer = KimiDeltaAttention(width, norm_eps=eps, gate_bias=False, filter_init=init, **delta, **common)
        activate_convolutions(layer, act)
        return layer

    mlp = functools.partial(mlp_of, width=width, inside=inside, shared=shared, act=act, experts=experts, common=common)
    blocks = [Block(norm(), mixer(kind), norm(), mlp(of)) for kind, of in zip(kinds, mlps, strict=True)]
    query = "q_proj" if latent["query_rank"] is None else "q_b_proj"
    mixers = {LINEAR: ("self_attn", DELTA), SOFTMAX: ("self_attn", LATENT | {"query": query})}
    names = Names(
        (*mixer_names(kinds, mixers), *renamed("mlp", GATED_MLP), *expert_names(mlps), *outer_names()),
        layouts=LAYOUTS,
        aliases=ALIASES,
        float32=FLOAT32,
    )
    return CausalLM(config, blocks, norm(), names, width=width, **outer)


def linear_options(options: Options) -> Options:
    """Return the options in `linear_attn_config`."""
    return options.part("linear_attn_config", options.take("linear_attn_config", None) or {}, read=frozenset())


def delta_arguments(options: Options, inner: Options, layers: int) -> tuple[dict[str, Any], list[str]]:
    """Return (the sizes of KimiDeltaAttention as its arguments, the kind of each layer, LINEAR or SOFTMAX).

    inner: `linear_attn_config`. Kimi's own config has both there: sizes, and lists of layers that are numbered from 1. Raises
    UnsupportedOption unless these lists hold each layer once.
    """
    sizes = delta_sizes(options, inner, 32)
    listed = [inner.take(key, None) for key in ("full_attn_layers", "kda_layers")]
    usual = [SOFTMAX if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    if None not in listed:
        softmax, linear = ([layer - 1 for layer in given] if are_numbers(given) else None for given in listed)
        if softmax is None or linear is None or sorted(softmax + linear) != list(range(layers)):
            why = f"it and full_attn_layers={listed[0]!r} must hold each of the layers 1 to {layers} once"
            raise inner.unsupported("kda_layers", why)
        usual = [SOFTMAX if layer in softmax else LINEAR for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual)
    return sizes, kinds


def delta_sizes(options: Options, inner: Options, heads: int) -> dict[str, Any]:
    """Return the sizes of KimiDeltaAttention as its arguments. inner: `linear_attn_config`, which takes precedence over other
    options. heads: the number of heads for a config that lacks it."""
    width = inner.integer("head_dim", options.integer("linear_head_dim", 128))
    return dict(
        num_heads=inner.integer("num_heads", options.integer("linear_num_heads", heads)),
        key_width=width,
        value_width=width,
        conv_size=inner.integer("short_conv_kernel_size", options.integer("linear_conv_kernel_dim", 4)),
    )


def are_numbers(given: Any) -> bool:
    """Return whether an option's value is a list of integers that are not negative."""
    return are_layers(given, 2**31)


def mlp_kinds(options: Options, layers: int, dense: int) -> list[str]:
    """Return "dense" or "sparse" for each layer's MLP. dense: the number of dense MLPs for a config that lacks it."""
    first = options.integer("first_k_dense_replace", dense, least=0)
    usual = [DENSE if layer < first else SPARSE for layer in range(layers)]
    return layer_kinds(options, ("mlp_layer_types",), layers, usual, {DENSE: DENSE, SPARSE: SPARSE})


def mlp_of(
    kind: str, width: int, inside: int, shared: int, act: str, experts: dict[str, Any], common: dict[str, Any]
) -> SwiGLU | SparseMLP:
    """Return the MLP of a layer. kind: "dense" or "sparse". inside, shared: the inner widths of a dense MLP, and of the shared
    experts together. experts: further arguments of SparseMLP. common: arguments of both classes."""
    if kind == DENSE:
        return SwiGLU(width, inside, activation=act, **common)
    always = SwiGLU(width, shared, activation=act, **common)
    return SparseMLP(width, routing="sigmoid", act=act, shared=always, **experts, **common)


def latent_arguments(
    options: Options, heads: int = 32, query_rank: int | None = None, width: int = 128, shared: int = 64
) -> dict[str, Any]:
    """Return the arguments of MultiHeadLatentAttention.

    heads, query_rank, shared: num_attention_heads, q_lora_rank and qk_rope_head_dim for a config that lacks them. width: the
    same for qk_nope_head_dim and v_head_dim, the channels of a head's keys and values. The layer has no shared key if
    qk_rope_head_dim is 0, which is allowed only if `shared` is 0.
    """
    heads, bias = options.integer("num_attention_heads", heads), options.flag("attention_bias", False)
    if options.integer("num_key_value_heads", heads, optional=True) not in (None, heads):
        raise options.unsupported("num_key_value_heads", f"it must be num_attention_heads={heads}")
    return dict(
        num_heads=heads,
        latent_width=options.integer("kv_lora_rank", 512),
        query_rank=options.integer("q_lora_rank", query_rank, optional=True),
        head_width=options.integer("qk_nope_head_dim", width),
        shared_width=options.integer("qk_rope_head_dim", shared, least=min(shared, 1)) or None,
        value_width=options.integer("v_head_dim", width),
        bias=bias,
        output_bias=bias,
    )


def expert_keys(options: KimiOptions) -> dict[str, str]:
    """Return {the key by which `expert_arguments` names an option: the option's name in this config}."""
    return {
        "count": options.present_key("num_local_experts", "num_experts"),
        "top_k": options.present_key("num_experts_per_tok", "num_experts_per_token"),
        "groups": options.present_key("n_group", "num_expert_group"),
        "shared": options.present_key("n_shared_experts", "num_shared_experts"),
        "normalize": options.present_key("norm_topk_prob", "moe_renormalize"),
    }


def expert_arguments(
    options: Options, names: dict[str, str], *, inside: int, count: int, groups: int, best: int, scaling: float
) -> tuple[dict[str, Any], int]:
    """Return (the arguments of SparseMLP, the width of all shared experts together). names: the options' names, from
    `expert_keys`. The other arguments are the values for a config that lacks the option."""
    inside = options.integer("moe_intermediate_size", inside)
    usual = dict(count=count, top_k=8, groups=groups, shared=1)
    found = {name: options.integer(names[name], value) for name, value in usual.items()}
    shared, best = found.pop("shared"), options.integer("topk_group", best)
    size, rest = divmod(found["count"], found["groups"])
    if rest or size < 2:
        raise options.unsupported(names["groups"], f"it must divide {found['count']} experts into groups of at least 2")
    if best > found["groups"]:
        raise options.unsupported("topk_group", f"it must be at most {names['groups']}={found['groups']}")
    if found["top_k"] > best * size:
        raise options.unsupported(names["top_k"], f"topk_group groups hold {best * size} experts")
    normalize = options.flag(names["normalize"], True)
    more = dict(normalize=normalize, scaling=options.number("routed_scaling_factor", scaling))
    return dict(inside=inside, best_groups=best, **found, **more), shared * inside


def expert_names(mlps: list[str]) -> Rules:
    """Return rules for the names of the parts of a `SparseMLP`. mlps: whether each layer's MLP is dense or sparse."""
    parts = (
        (r"router$", "gate.router"),
        (r"correction$", "gate.e_score_correction_bias"),
        (r"experts\.(?=\w+$)", "experts.*."),
        (r"shared\.", "shared_experts."),
    )
    sparse = one_of(layer for layer, kind in enumerate(mlps) if kind == SPARSE)
    inner = tuple((rf"(\.{sparse})\.mlp\.{old}", rf"\1.block_sparse_moe.{new}") for old, new in parts)
    below = tuple((rf"(\.shared_experts)\.{old}(?=\.)", rf"\1.{new}") for old, new in GATED_MLP.items())
    return (*inner, *below)
