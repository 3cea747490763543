"""Build MiniMax-01: Lightning Attention, softmax attention and experts. Residual connections start from norm(x), not from x."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
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
from glax.models.names import ATTENTION, Names, mixer_names, outer_names, transposed_layouts
from glax.models.rope import rotation
from glax.nn import LightningAttention, RMSNorm
from glax.nn.mlp import SparseMLP
from glax.nn.parts import EMBED, HEADS, activation, by_head, linear
from glax.nn.passes import Rows

OUTER = (
    (r"\.self_attn\.qkv\.", ".self_attn.qkv_proj."),
    (r"\.mlp\.router$", ".block_sparse_moe.gate.router"),
    (r"\.mlp\.experts\.gate$", ".block_sparse_moe.experts.*.w1.gate"),
    (r"\.mlp\.experts\.up$", ".block_sparse_moe.experts.*.w3.up"),
    (r"\.mlp\.experts\.down$", ".block_sparse_moe.experts.*.w2.down"),
    *outer_names(),
)
MIXERS = {SOFTMAX: ("self_attn", ATTENTION), LINEAR: ("self_attn", {"output": "out_proj"})}


ROUNDING = 2.0**-6  # of decays that were formed and stored in bfloat16


class FusedLightning(LightningAttention):
    """Compute Lightning Attention whose q, k and v come from one projection: q, k and v of head 0, then q, k and v of head 1,
    and so on."""

    def __init__(self, width: int, *, bias: bool = False, kernel_init, dtype, param_dtype, rngs: nnx.Rngs, **arguments):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        super().__init__(width, **arguments, **options)
        for name in ("query", "key", "value"):
            delattr(self, name)
        self.qkv = linear(width, 3 * self.num_heads * self.head_width, (EMBED, HEADS), bias=bias, **options)

    def heads(self, x: Float[Array, "*rows width"]) -> list[Float[Array, "*rows H D"]]:
        each = by_head(activation("act", self.act)(self.qkv(x)), self.num_heads)
        return [each[..., i * self.head_width : (i + 1) * self.head_width] for i in range(3)]


class MiniMaxBlock(Block):
    """Compute x = a h + b mixer(h) with h = norm(x), and then the same with the experts in place of the mixer. factors: (a, b)
    of the mixer and of the experts."""

    def __init__(self, attn_norm, attn, mlp_norm, mlp, attn_factors: tuple, mlp_factors: tuple):
        super().__init__(attn_norm, attn, mlp_norm, mlp)
        self.attn_factors, self.mlp_factors = attn_factors, mlp_factors

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        x = self.attn_norm(x)
        y, state = self.attn.mix(x, state, rows)
        x = self.mlp_norm(x * self.attn_factors[0] + y * self.attn_factors[1])
        return x * self.mlp_factors[0] + self.mlp(x) * self.mlp_factors[1], dict(state)


def slopes(heads: int, layer: int, layers: int) -> np.ndarray:
    """Return the slopes [heads] of layer number `layer`, from 0, of `layers`, as the model's own code computes them: 2^(-8 h /
    heads) (1 - layer / (layers - 1 + 1e-5) + 1e-5) for h = 1, ..., heads."""
    each = np.exp2(-8.0 / heads * (np.arange(heads) + 1.0))
    return (each * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).astype(np.float32)


def decay_factors(slope: np.ndarray, block: int) -> dict[str, np.ndarray]:
    """Return {name: array} of the decays within blocks of `block` tokens, which a checkpoint holds as buffers of the model's
    own code.

    slope: the slopes [heads] of a layer.
    """
    rate, rows = slope[:, None, None], np.arange(1, block + 1, dtype=np.float32)
    back = rows[:, None] - rows
    inside = np.where(back >= 0, np.exp(-rate * np.maximum(back, 0)), 0)
    found = dict(
        slope_rate=rate,
        query_decay=np.exp(-rate * rows[:, None]),
        key_decay=np.exp(-rate * (block - rows[:, None])),
        diagonal_decay=inside[None],
    )
    return {name: x.astype(np.float32) for name, x in found.items()}


class MiniMax(CausalLM):
    """Define a CausalLM whose checkpoints also hold the decays of Lightning Attention, which the config determines.

    The decays are those of the config, in float32, as MiniMax's own code has them. transformers rounds the stored ones to the
    dtype of the parameters, each by itself: in bfloat16 a slope is then up to 1% off, and differs from the decays beside it.
    """

    def __init__(self, *args, block: int, kinds: list[str], heads: int, **options):
        super().__init__(*args, **options)
        self.block, self.kinds, self.heads = block, tuple(kinds), heads

    def derived_tensors(self) -> dict[str, np.ndarray]:
        found = {}
        for layer, kind in enumerate(self.kinds):
            if kind == LINEAR:
                factors = decay_factors(slopes(self.heads, layer, len(self.kinds)), self.block)
                found |= {f"model.layers.{layer}.self_attn.{name}": x for name, x in factors.items()}
        return found

    def check_derived_tensors(self, tensors: Mapping[str, np.ndarray]):
        for name, expected in self.derived_tensors().items():
            stored = tensors.get(name, expected).astype(np.float32)
            same = stored.shape == expected.shape and np.allclose(stored, expected, rtol=ROUNDING, atol=ROUNDING)
            if name.endswith("slope_rate"):
                same = same and np.allclose(stored, expected, rtol=ROUNDING, atol=0)
            if not same:
                raise ValueError(
                    f"{name} must be what config.json determines by num_attention_heads, num_hidden_layers and block_size, got "
                    "other decays: give config.json the values that the model was trained with"
                )


def minimax(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a MiniMax-01 model. Raises UnsupportedOption for an option that is not supported.

    MiniMax 2025, https://arxiv.org/abs/2501.08313.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 32000)
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options)
    usual = [SOFTMAX if (layer + 1) % 2 else LINEAR for layer in range(layers)]
    older, key = options.take("attn_type_list", None), "layer_types"  # the original repository's list, of 0 and 1
    if older is not None and options.take(key, None) is None:
        key = "attn_type_list"
    kinds = layer_kinds(options, (key,), layers, usual, KINDS | {0: LINEAR, 1: SOFTMAX})
    options.ignore("router_jitter_noise", *TRAINING)
    sizes, rope = attention_sizes(options, width, kv_heads=8), rotation(options, 1000000.0, 131072)
    window = options.integer("sliding_window", None, optional=True)
    block = options.integer("block_size", 256)

    def factors(name: str) -> tuple[float, float]:
        return options.number(f"{name}_alpha_factor", 1.0), options.number(f"{name}_beta_factor", 1.0)

    by_kind, mlp_factors = {LINEAR: factors("linear_attn"), SOFTMAX: factors("full_attn")}, factors("mlp")
    count = options.integer("num_local_experts", 8)
    experts = count, experts_per_token(options, 2, "num_local_experts", count)
    inside = options.integer("intermediate_size", 14336)
    options.finish()

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mixer(layer: int, kind: str):
        if kind == SOFTMAX:
            return softmax_attention(width, sizes, rope, init, precision, window=window)
        heads = sizes["num_heads"]
        more = dict(num_heads=heads, head_width=sizes["head_width"], slopes=slopes(heads, layer, layers), act=act)
        return FusedLightning(width, kernel_init=init, **more, **precision.options)

    blocks = [
        MiniMaxBlock(
            norm(),
            mixer(layer, kind),
            norm(),
            SparseMLP(width, inside, *experts, act=act, kernel_init=init, **precision.options),
            by_kind[kind],
            mlp_factors,
        )
        for layer, kind in enumerate(kinds)
    ]
    layouts = transposed_layouts("router", "gate", "up", "down")
    names = Names((*mixer_names(kinds, MIXERS), *OUTER), layouts=layouts)
    return MiniMax(
        config, blocks, norm(), names, width=width, block=block, kinds=kinds, heads=sizes["num_heads"], **outer
    )
