"""Build RWKV-7 from the configs of flash-linear-attention."""

from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array

from glax.models.config import ModelConfig, Options, rounded_width
from glax.models.fla import MODES_OF_DELTA, OUTER, RWKV6Block, attention_layers
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import FLA, Layout, Names, renamed
from glax.nn import LayerNorm, RWKV7Attention, RWKV7FeedForward
from glax.nn.passes import Rows
from glax.nn.rwkv7 import orthogonal

ATTN_NAMES = {
    "receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "norm": "g_norm",
    "erase_scale": "k_k", "rate_scale": "k_a", "bonus": "r_k", "decay_down": "w_lora.lora.0", "decay_up": "w_lora.lora.2",
    "rate_down": "a_lora.lora.0", "rate_up": "a_lora.lora.2", "value_gate_down": "v_lora.lora.0",
    "value_gate_up": "v_lora.lora.2", "output_gate_down": "g_lora.lora.0", "output_gate_up": "g_lora.lora.2",
}  # fmt: skip
MIXTURES = {
    "mix_receptance": "x_r", "mix_decay": "x_w", "mix_key": "x_k", "mix_value": "x_v", "mix_rate": "x_a",
    "mix_output_gate": "x_g",
}  # fmt: skip


def of_rows(x: np.ndarray) -> np.ndarray:
    """Return x [D] as [1, 1, D], the shape in checkpoints."""
    return x[None, None]


def row_of(x: np.ndarray) -> np.ndarray:
    """Return x [1, 1, D] as [D]. Raises ValueError for another number of rows."""
    return x.reshape(1, 1, x.shape[2])[0, 0]


# The oldest files hold the mixtures of a layer as one tensor, in this order.
OLDEST = ((r"\.attn\.x_x$", tuple(f".attn.x_{letter}" for letter in "rwkvag")),)
LAYOUTS: tuple[tuple[str, Layout], ...] = tuple((name, (key, of_rows, row_of)) for name, key in MIXTURES.items())


class RWKV7Block(RWKV6Block):
    """Compute x + attn(norm(x)), then x + ffn(norm(x)), both with a state, and pass the first layer's values v to the next
    block.

    `mix` takes a pair: x, and the values [*rows, width] of the first layer, or None in that layer.
    """

    def mix(self, x: Any, state: dict, rows: Rows) -> tuple[Any, dict]:
        x, first = x
        x = x if self.pre_norm is None else self.pre_norm(x)
        y, v, attn = self.attn.mix_values(self.attn_norm(x), state.get("attn", {}), rows, first)
        x = x + y
        y, ffn = self.ffn.mix(self.ffn_norm(x), state.get("ffn", {}), rows)
        return (x + y, v if first is None else first), dict(attn=attn, ffn=ffn)


class RWKV7(CausalLM):
    """Define a model whose layers all read the values v of the first layer."""

    def through(self, x: Array, states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        pair: Any = (x, None)
        pair, after = super().through(pair, states, rows)
        return pair[0], after


def rank(options: Options, key: str, default: int, width: int, factor: float) -> int:
    """Return the rank of a low-rank product: the option `key`, or if it is null, `factor` sqrt(width) rounded to a multiple of
    32, at least 32. default: the value for a config that lacks the option."""
    given = options.integer(key, default, optional=True)
    return max(32, round(factor * width**0.5 / 32) * 32) if given is None else given


def head_count(options: Options, width: int) -> int:
    """Return the number of heads. If a config has both head_dim and num_heads, head_dim decides, as in fla. Raises ValueError
    if it has neither, and UnsupportedOption if heads do not divide the width."""
    head_width, heads = (
        options.integer("head_dim", 64, optional=True),
        options.integer("num_heads", None, optional=True),
    )
    if head_width is None and heads is None:
        raise ValueError("config.json must have head_dim or num_heads")
    if head_width is not None:
        if width % head_width:
            raise options.unsupported("head_dim", f"it must divide hidden_size={width}")
        return width // head_width
    if width % heads:
        raise options.unsupported("num_heads", f"it must divide hidden_size={width}")
    return heads


def check_value_width(options: Options, width: int, layers: int):
    """Raise UnsupportedOption unless values are as wide as the model: fla's code fails for others."""
    given = options.take("value_dim", None)
    wanted = (None, width, [width] * layers)
    if isinstance(given, bool) or given not in wanted:
        raise options.unsupported(
            "value_dim", f"it must be hidden_size={width}, alone or in a list for {layers} layers"
        )


def rwkv7(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an RWKV-7 model. Peng et al. 2025, https://arxiv.org/abs/2503.14456."""
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 24)
    outer, _ = outer_options(options, precision, 32000)
    options.choice("attn_mode", "chunk", MODES_OF_DELTA)
    heads, eps = head_count(options, width), options.number("norm_eps", 1e-5, least=0)
    check_value_width(options, width, layers)
    by_width = width / heads / 64
    sizes: dict[str, Any] = dict(
        num_heads=heads,
        decay_rank=rank(options, "decay_low_rank_dim", 64, width, 2.5 * by_width),
        rate_rank=rank(options, "a_low_rank_dim", 64, width, 2.5 * by_width),
        value_rank=rank(options, "v_low_rank_dim", 16, width, 1.7 * by_width),
        gate_rank=rank(options, "gate_low_rank_dim", 128, width, 5.0),
        norm_eps=eps,
        key_epsilon=1e-6 if options.flag("fuse_norm", True) else 0.0,
    )
    ratio = options.number("hidden_ratio", 4.0, optional=True, above=0)
    usual = -(-rounded_width("hidden_ratio", width, 4.0 if ratio is None else ratio) // 32) * 32
    inside = options.integer("intermediate_size", None, optional=True)
    inside = usual if inside is None else inside
    act = FLA[options.choice("hidden_act", "sqrelu", FLA)]
    has_pre_norm, bias = options.flag("norm_first", True), options.flag("norm_bias", True)
    if attention_layers(options, width, layers):
        raise options.unsupported("attn", "its layers hand no values on, so that fla's code fails")
    options.finish()

    def norm() -> LayerNorm:
        return LayerNorm(width, epsilon=eps, bias=bias, param_dtype=precision.param_dtype)

    def block(layer: int) -> RWKV7Block:
        place: dict[str, Any] = dict(layer_idx=layer, num_layers=layers, **precision.options)
        attn, ffn = RWKV7Attention(width, **sizes, **place), RWKV7FeedForward(width, inside, act=act, **place)
        return RWKV7Block(norm() if has_pre_norm and layer == 0 else None, norm(), attn, norm(), ffn)

    rules = (*renamed("attn", ATTN_NAMES), *renamed("ffn", {"key_mix": "x_k"}), *OUTER)
    blocks = [block(layer) for layer in range(layers)]
    model = RWKV7(config, blocks, norm(), Names(rules, layouts=LAYOUTS, stacked_rows=OLDEST), width=width, **outer)
    initialise_outer(model, precision)
    return model


def initialise_outer(model: CausalLM, precision: Precision):
    """Set the first values of the embedding, which are small, and of the head, which is orthogonal."""
    table = model.embedding.embedding
    table[...] = nnx.initializers.uniform(2e-4)(precision.rngs.params(), table.shape, table.dtype) - 1e-4
    if model.head is not None:
        scale = 0.5 * max(1.0, model.vocabulary / model.width) ** 0.5
        kernel = model.head.kernel
        kernel[...] = orthogonal(scale)(precision.rngs.params(), kernel.shape, kernel.dtype)
