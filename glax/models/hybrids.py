"""Provide what hybrids of transformers share: options of Mamba-2 and of softmax attention, kinds of layers, and an MLP."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.config import LAYERS, Options
from glax.models.mamba2 import limits
from glax.models.model import CausalLM, Precision
from glax.models.names import ATTENTION, MAMBA, TRANSFORMERS
from glax.models.rope import Rope
from glax.nn import Attention, Mamba2
from glax.nn.parts import EMBED, MLP, activation, linear

# Options that concern training alone, or the number of logits that a prompt needs.
TRAINING = (
    "attention_dropout", "num_logits_to_keep", "output_router_logits", "router_aux_loss_coef", "z_loss_coefficient",
)  # fmt: skip

LINEAR, SOFTMAX = "linear_attention", "full_attention"
KINDS = {
    LINEAR: LINEAR,
    "mamba": LINEAR,
    SOFTMAX: SOFTMAX,
    "attention": SOFTMAX,
}  # older versions write the short names
# The names of the mixers of `glax.models.names.mixer_names`.
MIXERS = {SOFTMAX: ("self_attn", ATTENTION), LINEAR: ("mamba", MAMBA)}


def attention_sizes(
    options: Options, width: int, heads: int = 32, kv_heads: int | None = None, head_width: int | None = None
) -> dict[str, Any]:
    """Return num_heads, num_kv_heads and head_width as arguments of `Attention`.

    heads, kv_heads, head_width: the values for a config that lacks the option. kv_heads None stands for num_heads, and
    head_width None for width // num_heads.
    """
    heads = options.integer("num_attention_heads", heads)
    head_width = options.integer("head_dim", head_width, optional=True) or width // heads
    if head_width == 0:
        raise options.unsupported("num_attention_heads", f"it must be at most hidden_size={width}")
    kv_heads = options.divisor("num_key_value_heads", kv_heads, "num_attention_heads", heads, optional=True)
    return dict(num_heads=heads, num_kv_heads=kv_heads, head_width=head_width)


def softmax_attention(width: int, sizes: dict, rope: Rope | None, init, precision: Precision, **more) -> Attention:
    """Return an `Attention`. sizes: as `attention_sizes` returns them. rope: None for no rotation. init: the function that
    initialises projections. more: further arguments of `Attention`."""
    turned = dict(theta=None) if rope is None else rope.arguments(sizes["head_width"])
    return Attention(width, kernel_init=init, **sizes, **turned, **more, **precision.options)


def mamba_options(options: Options, width: int, *, eps: float, act: str, inside: int | None = None) -> dict[str, Any]:
    """Return the arguments of Mamba2 from the options that bamba, granitemoehybrid and falcon_h1 name alike.

    inside: the width of all heads together, if the config names it; mamba_expand times the width if None.
    """
    expand, heads = options.integer("mamba_expand", 2), options.integer("mamba_n_heads", 128)
    inside = inside or expand * width
    is_auto = options.take("mamba_d_head", "auto") == "auto"
    head_width = inside // heads if is_auto else options.integer("mamba_d_head")
    if head_width * heads != inside:
        raise ValueError(f"mamba_n_heads * mamba_d_head in config.json must be {inside}, got {heads} * {head_width}")
    options.ignore("mamba_chunk_size")
    return dict(
        num_heads=heads,
        head_width=head_width,
        state_width=options.integer("mamba_d_state", 256),
        groups=options.divisor("mamba_n_groups", 1, "mamba_n_heads", heads),
        conv_size=options.integer("mamba_d_conv", 4),
        conv_bias=options.flag("mamba_conv_bias", True, optional=True),
        bias=options.flag("mamba_proj_bias", False, optional=True),
        act=act,
        dt_limit=limits(options, "time_step_limit"),
        norm_eps=eps,
    )


def mamba(width: int, arguments: dict, init, precision: Precision) -> Mamba2:
    """Return a Mamba2. arguments: as `mamba_options` returns them. init: the function that initialises projections."""
    return Mamba2(width, kernel_init=init, **arguments, **precision.options)


def hidden_act(options: Options, key: str = "hidden_act", default: str = "silu") -> str:
    """Return glax's name of the activation that the option `key` names. default: the name in a config that lacks it."""
    return TRANSFORMERS[options.choice(key, default, TRANSFORMERS)]


def layer_kinds(
    options: Options,
    keys: Sequence[str],
    layers: int | None,
    default: Sequence[str],
    known: Mapping[Any, str] = KINDS,
) -> list[str]:
    """Return the kind of each layer, known[word], from a list of words in the config. Of the options `keys`, those that are not
    null must agree.

    known: {a word: the kind that it names}. default: the words if every option is missing or null. layers: the required number
    of words, or None for any. Raises UnsupportedOption, which names the option read, for another number of words and for an
    unknown word.
    """
    found = [(key, value) for key in keys if (value := options.take(key, None)) is not None]
    key, kinds = found[0] if found else (keys[0], list(default))
    is_known = isinstance(kinds, list) and all(isinstance(kind, str | int) and kind in known for kind in kinds)
    if not is_known or layers not in (None, len(kinds)) or not 1 <= len(kinds) <= LAYERS:
        count = f"1 to {LAYERS} kinds" if layers is None else f"{layers} kinds"
        raise options.unsupported(key, f"it must list {count}, each one of {', '.join(map(repr, known))}")
    for other, value in found[1:]:
        if not isinstance(value, list) or [known.get(str(x)) for x in value] != [known[x] for x in kinds]:
            raise options.unsupported(other, f"it must name the same kinds as {key}")
    return [known[kind] for kind in kinds]


def check_kinds_of_layers(options: Options, kinds: Sequence[str], known: Mapping[Any, str] = KINDS):
    """Raise UnsupportedOption if the config has a list of the layers' kinds that differs from `kinds`, which other options
    determine."""
    for key in ("layers_block_type", "layer_types"):
        if layer_kinds(options, (key,), len(kinds), kinds, known) != list(kinds):
            raise options.unsupported(key, f"the other options make it {list(kinds)}")


def experts_per_token(options: Options, default: int, key: str, count: int, least: int = 1) -> int:
    """Return num_experts_per_tok. Raises UnsupportedOption if it is above `count`, the number of experts, which the option
    `key` holds; any number passes if `count` is 0.

    default: the number for a config that lacks it. least: the least number that is allowed.
    """
    top_k = options.integer("num_experts_per_tok", default, least=least)
    if count and top_k > count:
        raise options.unsupported("num_experts_per_tok", f"it must be at most {key}={count}")
    return top_k


def are_layers(given: Any, layers: int) -> bool:
    """Return whether an option's value is a list of numbers of layers, from 0 to layers - 1."""
    return isinstance(given, list) and all(type(layer) is int and 0 <= layer < layers for layer in given)


class DenseMLP(nnx.Module):
    """Compute y = W_output (act(a) * b) with a, b the halves of W_input x; y = W_output act(W_input x) if not `gated`.

    x, y [..., width]; a, b [..., inside]. act: the name of a function in `glax.nn.parts.ACTIVATIONS`. options: further
    arguments of `glax.nn.parts.linear`.
    """

    def __init__(self, width: int, inside: int, *, act: str, gated: bool = True, **options):
        activation("act", act)
        self.act, self.gated = act, gated
        self.input = linear(width, (1 + gated) * inside, (EMBED, MLP), **options)
        self.output = linear(inside, width, (MLP, EMBED), **options)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return self.behind_input(self.input(x))

    def behind_input(self, projected: Float[Array, "*rows inside"]) -> Float[Array, "*rows width"]:
        """Return y from W_input x. A subclass calls it with a changed W_input x."""
        act = activation("act", self.act)
        if not self.gated:
            return self.output(act(projected))
        gate, up = jnp.split(projected, 2, axis=-1)
        return self.output(act(gate) * up)


class ScaledLM(CausalLM):
    """Define a CausalLM that multiplies the embedding by `embedding_multiplier` and the logits by `logits_multiplier`."""

    def __init__(self, *args, embedding_multiplier: float, logits_multiplier: float, **options):
        super().__init__(*args, **options)
        self.embedding_multiplier, self.logits_multiplier = embedding_multiplier, logits_multiplier

    def embed(self, tokens):
        return super().embed(tokens) * self.embedding_multiplier

    def before_head(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return x * self.logits_multiplier


def activate_convolutions(layer: Any, act: str):
    """Change the activation of the layer's convolutions of q, k and v, which is SiLU, to `act`."""
    for conv in (layer.query_conv, layer.key_conv, layer.value_conv):
        conv.activation = act
