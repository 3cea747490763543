"""Build Lara-4-Mini: Gated DeltaNet, softmax attention with rotation in a window and without it over all tokens, and experts."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    KINDS,
    LINEAR,
    SOFTMAX,
    TRAINING,
    attention_sizes,
    experts_per_token,
    hidden_act,
    layer_kinds,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    GATED_MLP,
    NORMED_ATTENTION,
    Names,
    mixer_names,
    outer_names,
    transposed,
    transposed_layouts,
)
from glax.models.qwen3_next import FusedGatedDeltaNet, delta_sizes
from glax.models.rope import rotation
from glax.nn import RMSNorm, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import Chosen, SparseMLP, softmax_router
from glax.nn.parts import EMBED, HEADS, linear

SLIDING = "sliding_attention"
PATTERN = (LINEAR, SLIDING, LINEAR, SOFTMAX, SLIDING)
MIXERS = {
    SOFTMAX: ("self_attn", NORMED_ATTENTION),
    SLIDING: ("self_attn", NORMED_ATTENTION),
    LINEAR: ("linear_attn", {"input": "in_proj", "conv": "conv1d", "norm": "out_norm", "output": "out_proj"}),
}
MLPS = (
    (r"\.mlp\.router$", ".mlp.gate.router"),
    *((rf"\.mlp\.shared\.{old}\.", rf".mlp.shared_expert.{new}.") for old, new in GATED_MLP.items()),
)
LAYOUTS = (
    *transposed_layouts("router"),
    ("input", ("gate_up_proj", transposed, transposed)),
    ("down", ("down_proj", transposed, transposed)),
)


class WholeGatedDeltaNet(FusedGatedDeltaNet):
    """Compute `FusedGatedDeltaNet` with one projection for everything: q, k and v of all heads, z, and the inputs of beta and
    of the step size, in this order."""

    A_range = (1.0, 16.0)

    def make_projections(self, **options):
        sizes = self.sizes
        self.input = linear(self.width, 2 * (sizes.keys + sizes.values + sizes.num_heads), (EMBED, HEADS), **options)

    def projected(self, x: Float[Array, "*rows width"]) -> list[Array]:
        values, heads = self.sizes.values, self.sizes.num_heads
        qkv = 2 * self.sizes.keys + values
        return jnp.split(self.input(x), [qkv, qkv + values, qkv + values + heads], axis=-1)


class WideRouterMLP(SparseMLP):
    """Compute `SparseMLP` with a router that reads its rows in float32."""

    def chosen(self, x: Float[Array, "M D"]) -> Chosen:
        return softmax_router(x.astype(jnp.float32), self.router[...], self.top_k, self.normalize)


def lara_mini(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Lara-4-Mini model. Layers of `full_attention` have no positions. Raises UnsupportedOption for an option that is not
    supported.

    Translated 2026, https://huggingface.co/translated/Lara-4-Mini-Base.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 1024), options.integer("num_hidden_layers", 34)
    outer, init = outer_options(options, precision, 151936, tied=True)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    usual = [PATTERN[layer % len(PATTERN)] for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual, KINDS | {SLIDING: SLIDING})
    sizes = attention_sizes(options, width, heads=16, kv_heads=4, head_width=128)
    window, bias = options.integer("sliding_window", 512), options.flag("attention_bias", False)
    rope, delta = rotation(options, 10000.0, 131072), delta_sizes(options, keys=8, values=16)
    each, shared = (options.integer(f"{name}_intermediate_size", 512) for name in ("moe", "shared_expert"))
    count = options.integer("num_experts", 128)
    top_k = experts_per_token(options, 4, "num_experts", count)
    normalize = options.flag("norm_topk_prob", True)
    options.ignore(*TRAINING, "intermediate_size")
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == LINEAR:
            return WholeGatedDeltaNet(width, delta, act=act, norm_eps=eps, **common)
        more = dict(bias=bias, output_bias=bias, qk_norm=True, norm_eps=eps)
        turned, reach = (rope, window) if kind == SLIDING else (None, None)
        return softmax_attention(width, sizes, turned, init, precision, window=reach, **more)

    def mlp() -> SparseMLP:
        always = SwiGLU(width, shared, activation=act, **common)
        more = dict(form="fused", act=act, normalize=normalize, shared=always)
        return WideRouterMLP(width, each, count, top_k, **more, **common)

    blocks = [Block(norm(), mixer(kind), norm(), mlp()) for kind in kinds]
    names = Names((*mixer_names(kinds, MIXERS), *MLPS, *outer_names()), layouts=LAYOUTS)
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
