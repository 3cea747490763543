"""Build Nemotron-H: each layer has one of Mamba-2, softmax attention without positions, an MLP, or experts."""

import functools
import math
from typing import Any

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    KINDS,
    LINEAR,
    SOFTMAX,
    TRAINING,
    DenseMLP,
    attention_sizes,
    hidden_act,
    layer_kinds,
    mamba,
    softmax_attention,
)
from glax.models.mamba2 import BACKBONE, draw_output, first_steps, output_factor
from glax.models.model import CausalLM, MixerBlock, Precision, outer_options
from glax.models.names import ATTENTION, MAMBA, Names, mixer_names, renamed, transposed_layouts
from glax.nn import RMSNorm
from glax.nn.mlp import SparseMLP

PATTERN = {"M": LINEAR, "*": SOFTMAX, "-": "mlp", "E": "moe"}
WORDS = KINDS | {"mlp": "mlp", "moe": "moe"}
PLAIN_MLP = {"input": "up_proj", "output": "down_proj"}
# The names of some options of Mamba-2 in older configs.
OLDER = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand", "mamba_dt_min":
    "time_step_min", "mamba_dt_max": "time_step_max", "mamba_dt_limit": "time_step_limit", "mamba_dt_init_floor":
    "time_step_floor", "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
}  # fmt: skip
# Options without effect on the function that the model's own code computes, although it reads them.
IGNORED = ("chunk_size", "mtp_hybrid_override_pattern", "num_hidden_layers", "use_mamba_kernels")
# Options that concern experts alone, whatever their values are in a model that has none.
OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts",
    "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
)  # fmt: skip

OUTER = (
    (r"\.mixer\.router$", ".mixer.gate.router"),
    (r"\.mixer\.correction$", ".mixer.gate.e_score_correction_bias"),
    (r"\.mixer\.experts\.up$", ".mixer.experts.*.up_proj.up"),
    (r"\.mixer\.experts\.down$", ".mixer.experts.*.down_proj.down"),
    (r"\.mixer\.shared\.", ".mixer.shared_experts."),
    (r"\.mixer\.into\.", ".mixer.fc1_latent_proj."),
    (r"\.mixer\.out_of\.", ".mixer.fc2_latent_proj."),
    *BACKBONE,
)
MIXERS = {
    LINEAR: ("mixer", MAMBA),
    SOFTMAX: ("mixer", ATTENTION),
    "mlp": ("mixer", PLAIN_MLP),
    "moe": ("mixer", {}),
}
BIAS = r"\.gate\.e_score_correction_bias$"


def kinds_of(options: Options) -> list[str]:
    """Return each layer's kind, from a list of words or from the pattern of letters that older configs have."""
    pattern = options.take("hybrid_override_pattern", None)
    if not isinstance(pattern or "", str) or set(pattern or "") - set(PATTERN):
        raise options.unsupported("hybrid_override_pattern", f"its letters must be among {', '.join(PATTERN)}")
    usual = [LINEAR, "moe", SOFTMAX, "mlp"] if pattern is None else [PATTERN[letter] for letter in pattern]
    return layer_kinds(options, ("layers_block_type", "layer_types"), None, usual, WORDS)


def mamba_arguments(options: Options, eps: float) -> dict[str, Any]:
    """Return the arguments of Mamba2. eps: the epsilon of its norm."""
    return dict(
        num_heads=(heads := options.integer("mamba_num_heads", 128)),
        head_width=options.integer("mamba_head_dim", 64),
        state_width=options.integer("ssm_state_size", 128),
        groups=options.divisor("n_groups", 8, "mamba_num_heads", heads),
        conv_size=options.integer("conv_kernel", 4),
        conv_bias=options.flag("use_conv_bias", True),
        bias=options.flag("use_bias", False),
        act=hidden_act(options, "mamba_hidden_act"),
        dt_limit=(options.number("time_step_min", 0.001, above=0), math.inf),
        **first_steps(options),
        norm_eps=eps,
    )


def expert_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of SparseMLP for its router and its latent width. Raises UnsupportedOption for groups that do not
    fit."""
    found = dict(
        count=options.integer("n_routed_experts", 8),
        top_k=options.integer("num_experts_per_tok", 2),
        groups=options.integer("n_group", 1),
        best_groups=options.integer("topk_group", 1),
        normalize=options.flag("norm_topk_prob", True),
        scaling=options.number("routed_scaling_factor", 1.0),
        latent_width=options.integer("moe_latent_size", None, optional=True),
    )
    size, rest = divmod(found["count"], found["groups"])
    if rest or size < 2:
        raise options.unsupported(
            "n_group", f"it must divide n_routed_experts={found['count']} into groups of at least 2"
        )
    if found["best_groups"] > found["groups"]:
        raise options.unsupported("topk_group", f"it must be at most n_group={found['groups']}")
    if found["top_k"] > found["best_groups"] * size:
        raise options.unsupported(
            "num_experts_per_tok", f"topk_group groups hold {found['best_groups'] * size} experts"
        )
    return found


def nemotron_h(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Nemotron-H model. Layers of multi-token prediction are not read. Raises UnsupportedOption for an option that is
    not supported.

    NVIDIA 2025, https://arxiv.org/abs/2504.03624.
    """
    values = config.values
    for older, newer in OLDER.items():
        if older in values:
            values[newer] = values.pop(older)
    options = Options(values)
    width, kinds = options.integer("hidden_size", 4096), kinds_of(options)
    outer, init = outer_options(options, precision, 131072, has_padding=False)
    outer["tied"] = False  # whatever tie_word_embeddings says: the model's own code ties nothing
    eps = options.number("layer_norm_epsilon", 1e-5, least=0)
    factor = output_factor(options, True, len(kinds))
    options.ignore(*IGNORED, *TRAINING)
    sizes = attention_sizes(options, width, kv_heads=8) | dict(head_width=options.integer("head_dim", 128))
    arguments = mamba_arguments(options, eps)
    mlp = dict(
        act=hidden_act(options, "mlp_hidden_act", "relu2"),
        bias=options.flag("mlp_bias", False),
        kernel_init=init,
    )
    inside, experts, routed, shared = options.integer("intermediate_size", 21504), {}, 0, 0
    if "moe" in kinds:
        experts, routed = expert_arguments(options), options.integer("moe_intermediate_size", 7688)
        shared = options.integer("moe_shared_expert_intermediate_size", 7688)
    options.ignore(*OF_EXPERTS)
    options.finish()

    def mixer(kind: str):
        if kind == LINEAR:
            layer = mamba(width, arguments, init, precision)
            draw_output(layer, precision, factor)
            return layer
        if kind == SOFTMAX:
            return softmax_attention(width, sizes, None, init, precision)
        if kind == "mlp":
            return DenseMLP(width, inside, gated=False, **mlp, **precision.options)
        always = DenseMLP(width, shared, gated=False, **mlp, **precision.options)
        kind_of_experts: dict[str, Any] = dict(form="plain", routing="sigmoid", act=mlp["act"], kernel_init=init)
        if experts["latent_width"] is not None:
            kind_of_experts["latent_bias"] = mlp["bias"]
        return SparseMLP(width, routed, shared=always, **experts, **kind_of_experts, **precision.options)

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    blocks = [MixerBlock(norm(), mixer(kind)) for kind in kinds]
    rules = (*mixer_names(kinds, MIXERS, "mixer"), *renamed(r"mixer\.shared", PLAIN_MLP))
    layouts, others = transposed_layouts("up", "down", "router"), (r"^mtp\.",)
    names = Names((*rules, *OUTER), layouts=layouts, others=others, float32=(r"\.gate\.weight$", BIAS))
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
