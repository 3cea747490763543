"""Build Bamba: Mamba-2 in most layers, softmax attention in some, and a gated MLP in all."""

import functools

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    LINEAR,
    MIXERS,
    SOFTMAX,
    TRAINING,
    are_layers,
    attention_sizes,
    check_kinds_of_layers,
    hidden_act,
    mamba,
    mamba_options,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import GATED_MLP, Names, mixer_names, outer_names, renamed
from glax.models.rope import rotation
from glax.nn import RMSNorm, SwiGLU

OUTER = (
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.", ".feed_forward."),
    *outer_names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm"),
)


def bamba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Bamba model. Raises UnsupportedOption for an option that is not supported.

    IBM, Princeton and UIUC 2024, https://huggingface.co/blog/bamba.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 128000, pad=0)
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options)
    softmax = options.take("attn_layer_indices", None) or []
    if not are_layers(softmax, layers):
        raise options.unsupported("attn_layer_indices", f"it must hold layers from 0 to {layers - 1}")
    kinds = [SOFTMAX if layer in softmax else LINEAR for layer in range(layers)]
    check_kinds_of_layers(options, kinds)
    options.ignore(*TRAINING)
    sizes, rope = attention_sizes(options, width, kv_heads=8), rotation(options, 10000.0, 262144, 0.5, is_fixed=True)
    bias = options.flag("attention_bias", False)
    arguments = mamba_options(options, width, eps=eps, act=act)
    inside, mlp_bias = options.integer("intermediate_size", 14336), options.flag("mlp_bias", False)
    options.finish()

    def mixer(kind: str):
        if kind == LINEAR:
            return mamba(width, arguments, init, precision)
        return softmax_attention(width, sizes, rope, init, precision, bias=bias, output_bias=bias)

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mlp() -> SwiGLU:
        return SwiGLU(width, inside, activation=act, bias=mlp_bias, kernel_init=init, **precision.options)

    blocks = [Block(norm(), mixer(kind), norm(), mlp()) for kind in kinds]
    names = Names((*mixer_names(kinds, MIXERS), *OUTER))
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
