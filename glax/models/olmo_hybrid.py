"""Build OLMo-Hybrid: layers of Gated DeltaNet behind their norms, and layers of softmax attention in front of theirs."""

import functools
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    LINEAR,
    SOFTMAX,
    TRAINING,
    activate_convolutions,
    attention_sizes,
    hidden_act,
    layer_kinds,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    ATTENTION,
    CONVOLUTIONS,
    GATED_MLP,
    NORMED_ATTENTION,
    Names,
    mixer_names,
    one_of,
    outer_names,
    renamed,
)
from glax.models.rope import rotation
from glax.nn import GatedDeltaNet, RMSNorm, SwiGLU
from glax.nn.passes import Rows

DELTA = ATTENTION | CONVOLUTIONS | {"beta": "b_proj", "gate": "a_proj", "output_gate": "g_proj", "norm": "o_norm"}
MIXERS = {
    SOFTMAX: ("self_attn", NORMED_ATTENTION),
    LINEAR: ("linear_attn", DELTA),
}
# The names of a block's norms in files, and those that some files have instead.
NORMS = {
    SOFTMAX: ("feedforward_layer_norm", "post_feedforward_layernorm"),
    LINEAR: ("attention_layer_norm", "feedforward_layer_norm"),
}
ALIASES = (
    (r"\.input_layernorm\.weight$", ".attention_layer_norm.weight"),
    (r"\.post_attention_layernorm\.weight$", ".feedforward_layer_norm.weight"),
)
DELTA_NORM_EPS = 1e-5  # whatever rms_norm_eps says


class PostNormBlock(nnx.Module):
    """Compute x + norm(mixer(x)), then x + norm(mlp(x))."""

    def __init__(self, attn: Any, attn_norm: RMSNorm, mlp: Any, mlp_norm: RMSNorm):
        self.attn, self.attn_norm, self.mlp, self.mlp_norm = attn, attn_norm, mlp, mlp_norm

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.attn.empty_state(batch, max_length)

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        y, state = self.attn.mix(x, state, rows)
        x = x + self.attn_norm(y)
        return x + self.mlp_norm(self.mlp(x)), state


def delta_options(options: Options, width: int, heads: int) -> dict[str, Any]:
    """Return the arguments of GatedDeltaNet. heads: the heads of keys and of values for a config that lacks their numbers."""
    keys = options.integer("linear_num_key_heads", None, optional=True) or heads
    values = options.integer("linear_num_value_heads", None, optional=True) or heads
    if values % keys:
        raise options.unsupported("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads={keys}")
    key_width = options.integer("linear_key_head_dim", None, optional=True) or int(0.75 * width / keys)
    return dict(
        num_heads=values,
        num_qk_heads=keys,
        key_width=key_width,
        value_width=options.integer("linear_value_head_dim", None, optional=True) or 2 * key_width,
        conv_size=options.integer("linear_conv_kernel_dim", 4),
        allow_neg_eigval=options.flag("linear_allow_neg_eigval", True),
        A_range=tuple(options.number(f"linear_a_log_{end}", x, least=0) for end, x in (("min", 0.0), ("max", 16.0))),
        dt_range=tuple(options.number(f"linear_dt_{end}", x, above=0) for end, x in (("min", 0.001), ("max", 0.1))),
        dt_floor=options.number("linear_dt_init_floor", 1e-4, above=0),
        norm_eps=DELTA_NORM_EPS,
    )


def olmo_hybrid(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an OLMo-Hybrid model. Nothing rotates where rope_theta is null. Raises UnsupportedOption for an option that is not
    supported.

    OLMo Team 2026, https://huggingface.co/allenai/Olmo-Hybrid-7B.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 3840), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 100352, pad=100277)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    usual = [SOFTMAX if layer % 4 == 3 else LINEAR for layer in range(layers)]
    usual = usual if SOFTMAX in usual else [*usual[:-1], SOFTMAX]
    kinds = layer_kinds(options, ("layer_types",), layers, usual)
    if len(set(kinds)) < 2:
        raise options.unsupported("layer_types", f"it must hold both {LINEAR!r} and {SOFTMAX!r}")
    options.ignore(*TRAINING)
    sizes = attention_sizes(options, width, heads=30)
    delta = delta_options(options, width, sizes["num_heads"])
    inside, bias = options.integer("intermediate_size", 11008), options.flag("attention_bias", False)
    rope = rotation(options, 10000.0, 65536)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def linear_block() -> Block:
        mixer = GatedDeltaNet(width, filter_init=init, **delta, **common)
        activate_convolutions(mixer, act)
        return Block(norm(), mixer, norm(), SwiGLU(width, inside, activation=act, **common))

    def softmax_block() -> PostNormBlock:
        more = dict(bias=bias, output_bias=bias, qk_norm=True, norm_whole=True, norm_eps=eps)
        turned = None if rope.theta is None else rope
        mixer = softmax_attention(width, sizes, turned, init, precision, **more)
        return PostNormBlock(mixer, norm(), SwiGLU(width, inside, activation=act, **common), norm())

    blocks = [linear_block() if kind == LINEAR else softmax_block() for kind in kinds]
    rules = [*mixer_names(kinds, MIXERS), *renamed("mlp", GATED_MLP)]
    for kind, (attn_norm, mlp_norm) in NORMS.items():
        layers = one_of(layer for layer, other in enumerate(kinds) if other == kind)
        rules += [
            (rf"(\.{layers})\.attn_norm\.", rf"\1.{attn_norm}."),
            (rf"(\.{layers})\.mlp_norm\.", rf"\1.{mlp_norm}."),
        ]
    # transformers saves the rows of its one filter in three equal parts, whatever the widths of q, k and v are.
    names = Names(
        (*rules, *outer_names()), aliases=ALIASES, joined=tuple(CONVOLUTIONS.values()), float32=(r"\.A_log$",)
    )
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
