"""Build the transformers that hybrids are compared with: Llama and Qwen3."""

import functools

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import SOFTMAX, TRAINING, attention_sizes, hidden_act, layer_kinds, softmax_attention
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import GATED_MLP, NORMED_ATTENTION, Names, mixer_names, outer_names, renamed
from glax.models.rope import rotation
from glax.nn import RMSNorm, SwiGLU

SLIDING = "sliding_attention"


def llama(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Llama model. Raises UnsupportedOption for an option that is not supported.

    Dubey et al. 2024, https://arxiv.org/abs/2407.21783.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    sizes = attention_sizes(options, width, heads=32)
    options.ignore("pretraining_tp")
    mlp_bias = options.flag("mlp_bias", False)
    kinds = layer_kinds(options, ("layer_types",), layers, [SOFTMAX] * layers, {SOFTMAX: SOFTMAX})
    windows = dict.fromkeys(kinds)
    return transformer(
        config, options, precision, kinds, windows, sizes, inside=11008, positions=2048, mlp_bias=mlp_bias
    )


def qwen3(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Qwen3 model without experts: Llama with a norm of q and k in each head, and windows in some layers. Raises
    UnsupportedOption for an option that is not supported.

    Qwen Team 2025, https://arxiv.org/abs/2505.09388.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    sizes = attention_sizes(options, width, heads=32, kv_heads=32, head_width=128)
    has_window = options.flag("use_sliding_window", False)
    window = options.integer("sliding_window", 4096, optional=True) if has_window else None
    options.ignore("sliding_window")
    first = options.integer("max_window_layers", 28, least=0)
    usual = [SLIDING if window is not None and layer >= first else SOFTMAX for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual, {SOFTMAX: SOFTMAX, SLIDING: SLIDING})
    if SLIDING in kinds and window is None:
        raise options.unsupported("layer_types", f"{SLIDING!r} must come with use_sliding_window and sliding_window")
    windows = {SOFTMAX: None, SLIDING: window}
    return transformer(
        config, options, precision, kinds, windows, sizes, inside=22016, positions=32768, vocabulary=151936
    )


def transformer(
    config: ModelConfig,
    options: Options,
    precision: Precision,
    kinds: list[str],
    windows: dict[str, int | None],
    sizes: dict,
    *,
    inside: int,
    positions: int,
    vocabulary: int = 32000,
    mlp_bias: bool = False,
) -> CausalLM:
    """Return a model of softmax attention and gated MLPs, from the options that are not taken yet.

    kinds: the kind of each layer. windows: by kind, how many tokens a token reads; None for all. sizes: num_heads, num_kv_heads
    and head_width, as `attention_sizes` returns them. inside, positions, vocabulary: the values for a config that lacks
    intermediate_size, max_position_embeddings or vocab_size. mlp_bias: whether the MLPs have biases.
    """
    width = options.integer("hidden_size", 4096)
    outer, init = outer_options(options, precision, vocabulary)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    inside, bias = options.integer("intermediate_size", inside), options.flag("attention_bias", False)
    rope = rotation(options, 10000.0, positions)
    options.ignore(*TRAINING)
    options.finish()
    more = dict(bias=bias, output_bias=bias, qk_norm=options.model_type == "qwen3", norm_eps=eps)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)
    blocks = [
        Block(
            norm(),
            softmax_attention(width, sizes, rope, init, precision, window=windows[kind], **more),
            norm(),
            SwiGLU(width, inside, activation=act, bias=mlp_bias, kernel_init=init, **precision.options),
        )
        for kind in kinds
    ]
    mixers = dict.fromkeys(kinds, ("self_attn", NORMED_ATTENTION))
    names = Names((*mixer_names(kinds, mixers), *renamed("mlp", GATED_MLP), *outer_names()))
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
