"""Build the models of flash-linear-attention: gla, retnet, hgrn2 and rwkv6, with softmax attention in chosen layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.activations import FLA, TRANSFORMERS
from glax.models.config import ModelConfig, Options, exact_width, padding, rounded_width
from glax.models.model import Block, CausalLM, Precision
from glax.models.names import Names, renamed
from glax.models.residuals import add_mixtures, through_mixtures
from glax.nn import Attention, GatedLinearAttention, HGRN2Attention, MultiScaleRetention, RWKV6Attention
from glax.nn.mlp import SwiGLU
from glax.nn.norms import LayerNorm, RMSNorm
from glax.nn.parts import EMBED, parameter
from glax.nn.passes import Rows
from glax.nn.rwkv6 import RWKV6FeedForward

MODES = ("chunk", "fused_recurrent", "fused_chunk", "parallel")  # modes that compute the same function

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
CONVOLUTIONS = {"query_conv": "q_conv1d", "key_conv": "k_conv1d", "value_conv": "v_conv1d"}
GATES = {"gate_bias": "gk_proj.1.bias", "gate_down": "gk_proj.0", "gate_up": "gk_proj.1", "output_gate": "g_proj"}
GATED_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
OUTER = (
    (r"^embedding\.", "model.embeddings."),
    (r"^blocks\.", "model.layers."),
    (r"^head\.", "lm_head."),
    (r"^(norm|lower_bounds)(?=\.|$)", r"model.\1"),
    (r"^res\.", "model.res_"),
    (r"_res\.(?=proj|norm)", "_res_"),
)


# ---- options that several types share --------------------------------------------------------------------------------


def attention_layers(options: Options, width: int, layers: int) -> dict[int, dict]:
    """Return the arguments of `Attention` for each layer that has softmax attention, by layer number."""
    attn = options.take("attn", None)
    if attn is None:
        return {}
    found = {}
    for spec in attn if isinstance(attn, list) else [attn]:
        part = options.part("attn", spec, read=frozenset())
        chosen = part.take("layers")
        arguments = dict(
            num_heads=part.integer("num_heads"),
            num_kv_heads=part.integer("num_kv_heads", None, optional=True),
            bias=part.flag("qkv_bias", False),
            window=part.integer("window_size", None, optional=True),
            theta=part.number("rope_theta", 10000.0, above=0),
        )
        part.finish()
        heads = arguments["num_heads"]
        if width % heads:
            raise part.unsupported("num_heads", f"it must divide hidden_size={width}")
        if heads % (arguments["num_kv_heads"] or heads):
            raise part.unsupported("num_kv_heads", f"it must divide num_heads={heads}")
        for layer in chosen if isinstance(chosen, list) else [None]:
            if type(layer) is not int or layer not in range(layers) or layer in found:
                raise options.unsupported("attn", f"layers must list distinct numbers from 0 to {layers - 1}")
            found[layer] = arguments
    return found


def softmax_attention(width: int, spec: dict, init: Callable, precision: Precision) -> Attention:
    return Attention(width, kernel_init=init, **spec, **precision.options)


def softmax_names(layers) -> tuple[tuple[str, str], ...]:
    """Return naming rules for the layers of softmax attention. They apply before the rules of the other mixer."""
    return tuple(rule for layer in layers for rule in renamed(rf"{layer}\.attn", ATTENTION))


def gated_mlp(options: Options, width: int, ratio: float, init: Callable) -> Callable[[Precision], SwiGLU]:
    ratio = options.number("hidden_ratio", ratio, optional=True, above=0)
    ratio = 4 if ratio is None else ratio
    usual = -(-rounded_width("hidden_ratio", width, ratio * 2 / 3) // 256) * 256
    inside = options.integer("intermediate_size", None, optional=True)
    inside = usual if inside is None else inside
    act = options.choice("hidden_act", "swish", ("swish", "powlu"))
    return lambda precision: SwiGLU(width, inside, activation=act, kernel_init=init, **precision.options)


def heads_and_widths(options: Options, width: int, heads: int, expand: tuple[float, float]) -> dict:
    """Return num_heads, num_kv_heads, key_width and value_width of gla and retnet."""
    found = widths_of_heads(options, width, heads, expand)
    return found | dict(num_kv_heads=options.integer("num_kv_heads", None, optional=True) or found["num_heads"])


def widths_of_heads(options: Options, width: int, heads: int, expand: tuple[float, float]) -> dict:
    """Return num_heads, key_width and value_width, computed from expand_k and expand_v."""
    heads = options.integer("num_heads", heads)
    keys = exact_width("expand_k", width, options.number("expand_k", expand[0]))
    values = exact_width("expand_v", width, options.number("expand_v", expand[1]))
    if keys % heads or values % heads:
        raise ValueError(f"num_heads={heads} in config.json must divide the widths of keys {keys} and values {values}")
    return dict(num_heads=heads, key_width=keys // heads, value_width=values // heads)


def output_options(options: Options, functions: dict[str, str]) -> dict:
    """Return the options of the layer's output and feature map. functions: the feature maps by their names in the config."""
    known: dict[str | None, str | None] = {None: None, **functions}
    return dict(
        feature_map=known[options.choice("feature_map", None, known)],
        use_output_gate=options.flag("use_output_gate", True),
        elementwise_affine=affine(options),
    )


def affine(options: Options) -> bool:
    """Return the flag elementwise_affine. Null stands for false in these configs."""
    return options.choice("elementwise_affine", True, (True, False, None)) is True


def convolutions(options: Options) -> dict:
    return dict(use_short_conv=options.flag("use_short_conv", False), conv_size=options.integer("conv_size", 4))


def outer_options(options: Options) -> tuple[dict, Callable]:
    """Return the arguments of CausalLM that every type has, and the initialisation of projections."""
    deviation = options.number("initializer_range", 0.02, least=0)
    outer = dict(
        vocabulary=options.integer("vocab_size", 32000),
        tied=options.flag("tie_word_embeddings", False),
        deviation=deviation,
        padding=padding(options),
    )
    return outer, nnx.initializers.normal(deviation)


def fused_norm_name(fused: bool) -> dict[str, str]:
    """Return the name of the output's norm. It has another name in layers where fla computes it together with the gate."""
    return {"norm": "g_norm_swish_gate" if fused else "g_norm"}


def assemble(
    options: Options,
    config: ModelConfig,
    precision: Precision,
    mixer: Callable[[int], nnx.Module],
    names: dict[str, str],
    *,
    ratio: int,
    layers: int = 24,
    build: type["FLAModel"] | None = None,
    float32: tuple[str, ...] = (r"\.g_norm\.weight$",),
    **more,
) -> CausalLM:
    """Return a model of pre-norm blocks. A block has `mixer(layer)`, or softmax attention in the layers of `attn`, and a gated
    MLP. float32: as in `Names`."""
    width, layers = more.pop("width"), options.integer("num_hidden_layers", layers)
    outer, init = outer_options(options)
    norm: dict[str, Any] = dict(epsilon=options.number("norm_eps", 1e-6, least=0), param_dtype=precision.param_dtype)
    mlp, softmax = gated_mlp(options, width, ratio, init), attention_layers(options, width, layers)
    residuals = options.integer("attnres_block_size", None, optional=True)
    if residuals is not None and residuals != 1 and residuals % 2:
        raise options.unsupported("attnres_block_size", "it must be 1 or even")
    options.finish()
    build = FLAModel if build is None else build
    blocks = []
    for layer in range(layers):
        attn = softmax_attention(width, softmax[layer], init, precision) if layer in softmax else mixer(layer)
        blocks.append(Block(RMSNorm(width, **norm), attn, RMSNorm(width, **norm), mlp(precision)))
    rules = (*softmax_names(softmax), *renamed("attn", ATTENTION | names), *renamed("mlp", GATED_MLP), *OUTER)
    more |= dict(residuals=residuals, norm_eps=norm["epsilon"])
    wide = Names(rules, float32=float32)
    return build(config, blocks, RMSNorm(width, **norm), wide, width=width, precision=precision, **outer, **more)


# ---- the types -------------------------------------------------------------------------------------------------------


def gla(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a GLA model. Yang et al. 2024, https://arxiv.org/abs/2312.06635."""
    options = Options(config.values)
    width = options.integer("hidden_size", 2048)
    heads, output = heads_and_widths(options, width, 4, (0.5, 1.0)), output_options(options, FLA)
    options.choice("attn_mode", "chunk", MODES)
    deviation = options.number("initializer_range", 0.02, least=0)
    more = dict(
        **convolutions(options),
        clamp_min=options.number("clamp_min", None, optional=True),
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        kernel_init=nnx.initializers.normal(deviation),
        filter_init=nnx.initializers.normal(deviation),
    )

    def mixer(layer: int) -> GatedLinearAttention:
        return GatedLinearAttention(
            width, num_gate_heads=heads["num_kv_heads"], **heads, **output, **more, **precision.options
        )

    fused = config.values.get("fuse_norm", True) and output["use_output_gate"]
    names = CONVOLUTIONS | GATES | fused_norm_name(fused)
    return assemble(options, config, precision, mixer, names, ratio=4, width=width)


def retnet(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a RetNet model. It has no convolutions, whatever use_short_conv says. Sun et al. 2023,
    https://arxiv.org/abs/2307.08621."""
    options = Options(config.values)
    width = options.integer("hidden_size", 2048)
    heads, output = heads_and_widths(options, width, 8, (1.0, 2.0)), output_options(options, TRANSFORMERS)
    options.choice("attn_mode", "chunk", MODES)
    more = dict(
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        kernel_init=nnx.initializers.normal(options.number("initializer_range", 0.02, least=0)),
    )

    def mixer(layer: int) -> MultiScaleRetention:
        return MultiScaleRetention(width, **heads, **output, **more, **precision.options)

    fused = config.values.get("fuse_norm", True) and output["use_output_gate"]
    names = {"output_gate": "g_proj"} | fused_norm_name(fused)
    return assemble(options, config, precision, mixer, names, ratio=2, width=width)


def hgrn2(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an HGRN2 model. The norm of the mixer's output has an epsilon of 1e-5, as in fla. Qin et al. 2024,
    https://arxiv.org/abs/2404.07904."""
    options = Options(config.values)
    width = options.integer("hidden_size", 2048)
    ratio, heads = options.take("expand_ratio", 128), options.integer("num_heads", None, optional=True)
    if ratio is None and heads is None:
        raise ValueError("config.json must have expand_ratio or num_heads")
    ratio = width // heads if ratio is None else options.integer("expand_ratio", 128)
    heads = width // ratio
    if heads == 0 or width % heads:
        raise ValueError(
            f"hidden_size={width} in config.json must be a multiple of hidden_size // expand_ratio={heads}"
        )
    options.choice("attn_mode", "chunk", MODES)
    more = dict(
        num_heads=heads,
        key_width=ratio,
        value_width=width // heads,
        elementwise_affine=affine(options),
        **convolutions(options),
        kernel_init=nnx.initializers.normal(options.number("initializer_range", 0.02, least=0)),
        filter_init=nnx.initializers.normal(options.number("initializer_range", 0.02, least=0)),
    )
    bounded = options.flag("use_lower_bound", True)
    if bounded and heads * ratio != width:
        raise options.unsupported("expand_ratio", f"with use_lower_bound it must divide hidden_size={width}")

    def mixer(layer: int) -> HGRN2Attention:
        return HGRN2Attention(width, **more, **precision.options)

    names = {"key": "f_proj", "value": "i_proj", "norm": "g_norm"}
    names |= {"query_conv": "q_conv1d", "key_conv": "f_conv1d", "value_conv": "i_conv1d"}
    return assemble(options, config, precision, mixer, names, ratio=4, width=width, build=HGRN2, bounded=bounded)


class FLAModel(CausalLM):
    """A model whose sublayers read a mixture of the outputs of all earlier sublayers, if the config has `attnres_block_size`."""

    def __init__(self, *args, residuals: int | None, norm_eps: float, **options):
        super().__init__(*args, **options)
        self.residuals = residuals
        if residuals is not None:
            add_mixtures(self, norm_eps, options["precision"].options)

    def through(self, x: Array, states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        if self.residuals is None:
            return super().through(x, states, rows)
        return through_mixtures(self, self.residuals, x, states, rows)


class HGRN2(FLAModel):
    """A model whose decays have lower bounds that grow with depth: the cumulative sum of a softmax over the layers."""

    def __init__(self, *args, bounded: bool, **options):
        super().__init__(*args, **options)
        shape, dtype = (len(self.blocks), self.width), options["precision"].param_dtype
        self.lower_bounds = parameter(jnp.zeros(shape, dtype), None, EMBED) if bounded else None

    def arguments(self, layer: int) -> tuple:
        is_softmax = isinstance(self.blocks[layer].attn, Attention)
        if self.lower_bounds is None or layer == 0 or is_softmax:  # the bound of the first layer is 0
            return ()
        shares = jax.nn.softmax(self.lower_bounds[...].astype(jnp.float32), 0)
        return (shares[1 : layer + 1].sum(0),)


class RWKV6Block(nnx.Module):
    """Compute x + attn(norm(x)), then x + ffn(norm(x)), both with a state. The first block also normalises its input."""

    def __init__(self, pre_norm: nnx.Module | None, attn_norm, attn, ffn_norm, ffn: RWKV6FeedForward):
        self.pre_norm, self.attn_norm, self.attn, self.ffn_norm, self.ffn = pre_norm, attn_norm, attn, ffn_norm, ffn

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return dict(attn=self.attn.empty_state(batch, max_length), ffn=self.ffn.empty_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        x = x if self.pre_norm is None else self.pre_norm(x)
        y, attn = self.attn.mix(self.attn_norm(x), state.get("attn", {}), rows)
        x = x + y
        y, ffn = self.ffn.mix(self.ffn_norm(x), state.get("ffn", {}), rows)
        return x + y, dict(attn=attn, ffn=ffn)


RWKV6_NAMES = {
    "mix_down": "x_proj.0.linear",
    "mix_first": "x_proj.0.mu",
    "mix_up": "x_proj.2",
    "mix_bias": "x_bias",
    "receptance": "r_proj.linear",
    "decay_down": "w_proj.linear.lora.0",
    "decay_up": "w_proj.linear.lora.2",
    "key": "k_proj.linear",
    "value": "v_proj.linear",
    "output_gate": "g_proj.linear",
    "norm": "g_norm",
    "output": "o_proj",
}
RWKV6_FFN_NAMES = {
    "key": "key.linear",
    "key_mix": "key.mu",
    "receptance": "receptance.linear",
    "receptance_mix": "receptance.mu",
}


def rwkv6(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an RWKV-6 model. Peng et al. 2024, https://arxiv.org/abs/2404.05892."""
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 24)
    outer, init = outer_options(options)
    options.choice("attn_mode", "chunk", MODES)
    heads, eps = options.integer("num_heads", 4), options.number("norm_eps", 1e-5, least=0)
    keys = exact_width("expand_k", width, options.number("expand_k", 0.5))
    values = exact_width("expand_v", width, options.number("expand_v", 1.0))
    ranks = dict(mix_rank=options.integer("proj_low_rank_dim", 32), decay_rank=options.integer("gate_low_rank_dim", 64))
    ratio = options.number("hidden_ratio", 3.5, optional=True, above=0)
    ratio = 3.5 if ratio is None else ratio
    usual = -(-rounded_width("hidden_ratio", width, ratio) // 32) * 32
    inside = options.integer("intermediate_size", None, optional=True)
    inside = usual if inside is None else inside
    act = FLA[options.choice("hidden_act", "sqrelu", FLA)]
    first, bias, softmax = (
        options.flag("norm_first", True),
        options.flag("norm_bias", True),
        attention_layers(options, width, layers),
    )
    options.finish()

    def norm() -> LayerNorm:
        return LayerNorm(width, epsilon=eps, bias=bias, param_dtype=precision.param_dtype)

    def mixer(layer: int) -> nnx.Module:
        if layer in softmax:
            return softmax_attention(width, softmax[layer], init, precision)
        sizes = dict(num_heads=heads, key_width=keys, value_width=values, **ranks)
        return RWKV6Attention(width, norm_eps=eps, kernel_init=init, **sizes, **precision.options)

    def block(layer: int) -> RWKV6Block:
        ffn = RWKV6FeedForward(width, inside, act=act, kernel_init=init, **precision.options)
        return RWKV6Block(norm() if first and layer == 0 else None, norm(), mixer(layer), norm(), ffn)

    rules = (*softmax_names(softmax), *renamed("attn", RWKV6_NAMES), *renamed("ffn", RWKV6_FFN_NAMES), *OUTER)
    blocks = [block(layer) for layer in range(layers)]
    return CausalLM(config, blocks, norm(), Names(rules), width=width, precision=precision, **outer)
