"""Build RecurrentGemma: Griffin's recurrences of channels, and softmax attention over the last tokens."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, ScaledLM, attention_sizes, hidden_act, softmax_attention
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import ATTENTION, GATED_MLP, Names, mixer_names, outer_names, renamed
from glax.models.rope import rotation
from glax.nn import RGLRU, RMSNorm, SwiGLU

RECURRENCE = {
    "input": "linear_x", "gate": "linear_y", "output": "linear_out", "conv": "conv_1d", "input_gate": "rg_lru.input_gate",
    "decay_gate": "rg_lru.recurrent_gate", "rate": "rg_lru.recurrent_param",
}  # fmt: skip
MIXERS = {LINEAR: ("temporal_block", RECURRENCE), SOFTMAX: ("temporal_block", ATTENTION)}
MOST_CYCLES = 100  # the model's own code repeats block_types so many times, and has no more layers


def recurrent_gemma(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a RecurrentGemma model. Raises UnsupportedOption for an option that is not supported.

    Botev et al. 2024, https://arxiv.org/abs/2404.07839.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2560), options.integer("num_hidden_layers", 26)
    outer, _ = outer_options(options, precision, 256000, tied=True, pad=0)
    kinds = kinds_of(options, layers)
    sizes = attention_sizes(options, width, heads=10)
    heads = sizes["num_heads"]
    options.ignore(*TRAINING)
    inside = options.integer("lru_width", None, optional=True) or width
    if inside % heads:
        raise options.unsupported("lru_width", f"num_attention_heads={heads} must divide it")
    conv_size, scale = options.integer("conv1d_width", 4), options.number("w_init_variance_scale", 0.01, least=0)
    last_scale = options.number("final_w_init_variance_scale", 2 / layers, least=0)
    eps, act = (
        options.number("rms_norm_eps", 1e-6, least=0),
        hidden_act(options, "hidden_activation", "gelu_pytorch_tanh"),
    )
    cap = options.number("logits_soft_cap", 30.0, above=0)
    window = options.integer("attention_window_size", 2048)
    window = options.integer("sliding_window", window)  # which counts more
    both = options.integer("intermediate_size", 3 * width)  # of gate and up together
    bias = options.flag("attention_bias", False)
    rope = rotation(options, 10000.0, 2048, 0.5)
    if rope.kind != "default":
        raise options.unsupported("rope_parameters", "its rope_type must be 'default', as the model's own code has it")
    options.finish()

    drawn = nnx.initializers.normal
    deviation, inner = (scale / conv_size) ** 0.5, drawn(width**-0.5)
    norm = functools.partial(RMSNorm, width, epsilon=eps, zero_centred=True, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Any:
        if kind == SOFTMAX:
            return softmax_attention(width, sizes, rope, inner, precision, window=window, bias=bias, output_bias=True)
        first: dict[str, Any] = dict(filter_init=drawn(deviation), gate_init=drawn((scale * heads / inside) ** 0.5))
        return RGLRU(
            width,
            num_heads=heads,
            inside=inside,
            conv_size=conv_size,
            act=act,
            kernel_init=inner,
            **first,
            **precision.options,
        )

    def mlp() -> SwiGLU:
        return SwiGLU(width, both // 2, activation=act, bias=True, kernel_init=drawn(deviation), **precision.options)

    blocks = [Block(norm(), mixer(kind), norm(), mlp()) for kind in kinds]
    for block in blocks:
        kernel = block.attn.output.kernel
        kernel[...] = drawn((last_scale / kernel.shape[0]) ** 0.5)(
            precision.rngs.params(), kernel.shape, precision.param_dtype
        )
    rules = (
        *mixer_names(kinds, MIXERS), *renamed("mlp", GATED_MLP), (r"\.mlp\.", ".mlp_block."),
        (r"(\.rg_lru\.\w+_gate)\.", r"\1_"),
        *outer_names(norm="model.final_norm", attn_norm="temporal_pre_norm", mlp_norm="channel_pre_norm"),
    )  # fmt: skip
    outer |= dict(deviation=deviation, logit_cap=cap)
    # Its own code holds the factor of the embedding in bfloat16.
    factor = float(np.asarray(width**0.5, jnp.bfloat16))
    return ScaledLM(
        config, blocks, norm(), Names(rules), width=width, embedding_multiplier=factor, logits_multiplier=1.0, **outer
    )


def kinds_of(options: Options, layers: int) -> list[str]:
    """Return the kind of each layer: the words of block_types in turn, of which all but "recurrent" mean attention."""
    words = options.take("block_types", None)
    words = ["recurrent", "recurrent", "attention"] if words is None else words
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise options.unsupported("block_types", "it must be a list of words")
    if len(words) * MOST_CYCLES < layers:
        raise options.unsupported(
            "num_hidden_layers", f"it must be at most {MOST_CYCLES} times the {len(words)} of block_types"
        )
    return [LINEAR if words[layer % len(words)] == "recurrent" else SOFTMAX for layer in range(layers)]
