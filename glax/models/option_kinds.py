"""Check the kinds of options, also of those without effect here: a config with another kind is damaged, or of another program."""

from collections.abc import Callable, Mapping
from typing import Any

COUNTS = """
    bos_token_id chunk_size conv_size expand ffn_hidden_size kv_channels mamba_chunk_size max_position_embeddings
    max_window_layers n_shared_experts num_hidden_layers num_logits_to_keep num_nextn_predict_layers num_query_groups
    sep_token_id sliding_window
"""
FLAGS = """
    attention_bias fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu fused_add_norm is_decoder
    is_encoder_decoder mamba_proj_bias moe_shared_expert_overlap norm_first output_router_logits rescale_prenorm_residual
    residual_in_fp32
    tie_word_embeddings use_cache use_conv_bias use_gk use_gv use_l2warp use_mamba_kernels use_mem_eff_path use_output_norm
    use_shared_mlp_adapter use_short_conv use_sliding_window
"""
NUMBERS = """
    attention_dropout hidden_dropout initializer_range router_aux_loss_coef router_jitter_noise time_step_floor time_step_max
    time_step_min z_loss_coefficient
"""
WORDS = "mamba_ssm_cache_dtype mtp_hybrid_override_pattern tokenizer_class transformers_version"
LISTS = "architectures layer_types layers_block_type mtp_layers_block_type"


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count_or_auto(value: Any) -> bool:
    return is_count(value) or value == "auto"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_limit(value: Any) -> bool:
    """Return whether a value is a number, or an infinite one as transformers writes it."""
    return is_number(value) or (isinstance(value, Mapping) and set(value) == {"__float__"})


def is_limits(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_limit, value))


def of_class(*classes: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, classes)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS.split(), (is_count, "an integer")),
    **dict.fromkeys(FLAGS.split(), (of_class(bool), "true or false")),
    **dict.fromkeys(NUMBERS.split(), (is_number, "a number")),
    **dict.fromkeys(WORDS.split(), (of_class(str), "a string")),
    **dict.fromkeys(LISTS.split(), (of_class(list, tuple), "a list")),
    "time_step_rank": (is_count_or_auto, "an integer or 'auto'"),
    "time_step_limit": (is_limits, "two numbers"),
}


def check_kinds(values: Mapping):
    """Raise ValueError, which names the key, for an option of another kind. Null passes."""
    for key in values.keys() & KINDS.keys():
        fits, kind = KINDS[key]
        if values[key] is not None and not fits(values[key]):
            raise ValueError(f"{key} in config.json must be {kind}, got {values[key]!r:.100}")
