"""Build the models of flash-linear-attention: gla, gsa, retnet, hgrn, hgrn2, rwkv6, delta_net, gated_deltanet,
gated_deltaproduct, comba and kda, with softmax attention in chosen layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.attention_residual import AttentionResidual, AttentionResidualLM, blocks_of, residual_names
from glax.models.config import ModelConfig, Options, exact_width, rounded_width
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import (
    ATTENTION,
    CONVOLUTIONS,
    FLA,
    GATED_MLP,
    TRANSFORMERS,
    Names,
    Rules,
    one_of,
    outer_names,
    renamed,
)
from glax.nn import (
    Attention,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    KimiDeltaAttention,
    LayerNorm,
    MultiScaleRetention,
    RMSNorm,
    RWKV6Attention,
    RWKV6FeedForward,
    SwiGLU,
)
from glax.nn.delta import QK_ACTIVATIONS, QK_NORMS
from glax.nn.layer import Layer
from glax.nn.parts import EMBED, parameter
from glax.nn.passes import Rows

MODES = ("chunk", "fused_recurrent", "fused_chunk", "parallel")  # modes that compute the same function
MODES_OF_DELTA = MODES[:2]

OUTPUT_GATE = {"output_gate": "g_proj"}
GATES = OUTPUT_GATE | {"gate_bias": "gk_proj.1.bias", "gate_down": "gk_proj.0", "gate_up": "gk_proj.1"}
OUTER = (
    *outer_names("model.embeddings", attn_norm="attn_norm", mlp_norm="mlp_norm"),
    (r"^lower_bounds$", "model.lower_bounds"),
    *residual_names("model.res", "attn_res", "mlp_res"),
)


def options_of(config: ModelConfig, modes: Sequence[str] = MODES) -> tuple[Options, int, Callable]:
    """Return (a config's options, its hidden_size, the function that initialises projections). modes: the supported values of
    attn_mode; none for a type without this option."""
    options = Options(config.values)
    if modes:
        options.choice("attn_mode", "chunk", modes)
    init = nnx.initializers.normal(options.number("initializer_range", 0.02, least=0))
    return options, options.integer("hidden_size", 2048), init


# ---- options that several types share --------------------------------------------------------------------------------


def attention_layers(options: Options, width: int, layers: int) -> dict[int, dict]:
    """Return {the number of a layer with softmax attention, from 0: the arguments of its `Attention`}, from the option `attn`;
    {} without it. Raises UnsupportedOption for heads or layers that do not fit."""
    attn = options.take("attn", None)
    if attn is None:
        return {}
    found = {}
    for spec in attn if isinstance(attn, list) else [attn]:
        part = options.part("attn", spec, read=frozenset())
        chosen = part.take("layers")
        heads = part.integer("num_heads")
        if width % heads:
            raise part.unsupported("num_heads", f"it must divide hidden_size={width}")
        arguments = dict(
            num_heads=heads,
            num_kv_heads=part.divisor("num_kv_heads", None, "num_heads", heads, optional=True),
            bias=part.flag("qkv_bias", False),
            window=part.integer("window_size", None, optional=True),
            theta=part.number("rope_theta", 10000.0, above=0),
        )
        part.finish()
        for layer in chosen if isinstance(chosen, list) else [None]:
            if type(layer) is not int or layer not in range(layers) or layer in found:
                raise options.unsupported("attn", f"layers must list distinct numbers from 0 to {layers - 1}")
            found[layer] = arguments
    return found


def softmax_names(layers: dict[int, dict]) -> Rules:
    """Return rules that rename the parts of softmax attention in these layers from glax's names to a checkpoint's.

    They apply before the rules of the other mixer. layers: by layer number, as `attention_layers` returns them; only the
    numbers are read.
    """
    return renamed(rf"{one_of(layers)}\.attn", ATTENTION)


def gated_mlp(options: Options, width: int, ratio: float, init: Callable) -> Callable[[Precision], SwiGLU]:
    """Return a function from a precision to the MLP of a layer, with the width of intermediate_size, or else of hidden_ratio.

    ratio: hidden_ratio for a config that lacks it. init: the function that initialises projections.
    """
    ratio = options.number("hidden_ratio", ratio, optional=True, above=0)
    ratio = 4 if ratio is None else ratio
    usual = -(-rounded_width("hidden_ratio", width, ratio * 2 / 3) // 256) * 256
    inside = options.integer("intermediate_size", None, optional=True)
    inside = usual if inside is None else inside
    act = options.choice("hidden_act", "swish", ("swish", "powlu"))
    return lambda precision: SwiGLU(width, inside, activation=act, kernel_init=init, **precision.options)


def widths_of_heads(options: Options, width: int, heads: int, expand: tuple[float, float]) -> dict:
    """Return num_heads, key_width and value_width as arguments of a layer. expand_k and expand_v of the config are the widths
    of all heads of keys and values together, as multiples of `width`.

    heads, expand: num_heads and (expand_k, expand_v) for a config that lacks them. Raises ValueError for heads that do not
    divide.
    """
    heads = options.integer("num_heads", heads)
    keys = exact_width("expand_k", width, options.number("expand_k", expand[0]))
    values = exact_width("expand_v", width, options.number("expand_v", expand[1]))
    if keys % heads or values % heads:
        raise ValueError(f"num_heads={heads} in config.json must divide the widths of keys {keys} and values {values}")
    return dict(num_heads=heads, key_width=keys // heads, value_width=values // heads)


def linear_options(
    options: Options, width: int, heads: int, expand: tuple[float, float], functions: dict[str, str]
) -> dict:
    """Return the arguments of gla's and retnet's layers for heads, norm, output gate and feature map.

    heads, expand: as in `widths_of_heads`. functions: {a feature map's name in the config: its name in glax}.
    """
    known: dict[str | None, str | None] = {None: None, **functions}
    found = widths_of_heads(options, width, heads, expand)
    return found | dict(
        num_kv_heads=options.integer("num_kv_heads", None, optional=True) or found["num_heads"],
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        feature_map=known[options.choice("feature_map", None, known)],
        use_output_gate=options.flag("use_output_gate", True),
        elementwise_affine=affine(options),
    )


def affine(options: Options) -> bool:
    """Return the flag elementwise_affine, in which null stands for false."""
    return options.choice("elementwise_affine", True, (True, False, None)) is True


def convolutions(options: Options, init: Callable, used: bool = False) -> dict:
    """Return the arguments of a layer for its convolutions. init: the function that initialises filters. used: whether the
    layer has convolutions if the config lacks use_short_conv."""
    has_some = options.flag("use_short_conv", used)
    return dict(use_short_conv=has_some, conv_size=options.integer("conv_size", 4), filter_init=init)


def norm_name(config: ModelConfig, is_gated: bool) -> dict[str, str]:
    """Return {"norm": the name of the mixer's output norm in the checkpoint}. fla has another name for it in layers that
    compute the norm and the gate together. is_gated: whether the layer has an output gate."""
    return {"norm": "g_norm_swish_gate" if config.values.get("fuse_norm", True) and is_gated else "g_norm"}


def assemble(
    options: Options,
    config: ModelConfig,
    precision: Precision,
    mixer: functools.partial,
    names: dict[str, str],
    *,
    ratio: int = 4,
    layers: int = 24,
    build: type[AttentionResidualLM] = AttentionResidualLM,
    float32: tuple[str, ...] = (r"\.g_norm\.weight$",),
    **more,
) -> CausalLM:
    """Return a model of pre-norm blocks. A block has the layer `mixer`, or softmax attention in the layers that the option
    `attn` names, and a gated MLP.

    mixer: a layer of `glax.nn` with its width and its arguments but the precision. names: {a part of the mixer: its name in the
    checkpoint}. float32: as in `Names`.
    ratio, layers: hidden_ratio and num_hidden_layers for a config that lacks them.
    build, more: the class of the model, and its own arguments.
    """
    width, layers = mixer.args[0], options.integer("num_hidden_layers", layers)
    outer, init = outer_options(options, precision, 32000)
    eps = options.number("norm_eps", 1e-6, least=0)
    mlp, softmax = gated_mlp(options, width, ratio, init), attention_layers(options, width, layers)
    size = options.integer("attnres_block_size", None, optional=True)  # of a group of sublayers
    if size is not None and size != 1 and size % 2:
        raise options.unsupported("attnres_block_size", "it must be 1 or even")
    options.finish()

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def attn(layer: int) -> Layer:
        if layer not in softmax:
            return mixer(**precision.options)
        return Attention(width, kernel_init=init, **softmax[layer], **precision.options)

    def residual() -> AttentionResidual:
        return AttentionResidual(width, norm_eps=eps, kernel_init=nnx.initializers.zeros, **precision.options)

    blocks = blocks_of(layers, size, residual, norm, attn, lambda _: mlp(precision))
    rules = (*softmax_names(softmax), *renamed("attn", ATTENTION | names), *renamed("mlp", GATED_MLP), *OUTER)
    more |= dict(output_residual=None if size is None else residual())
    return build(config, blocks, norm(), Names(rules, float32=float32), width=width, **outer, **more)


# ---- the types -------------------------------------------------------------------------------------------------------


def gla(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a GLA model. Yang et al. 2024, https://arxiv.org/abs/2312.06635."""
    options, width, init = options_of(config)
    shared = linear_options(options, width, 4, (0.5, 1.0), FLA)
    more = convolutions(options, init) | dict(clamp_min=options.number("clamp_min", None, optional=True))
    gates = shared["num_kv_heads"]
    mixer = functools.partial(GatedLinearAttention, width, num_gate_heads=gates, kernel_init=init, **shared, **more)
    names = CONVOLUTIONS | GATES | norm_name(config, shared["use_output_gate"])
    return assemble(options, config, precision, mixer, names)


def retnet(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a RetNet model. It has no convolutions, whatever use_short_conv says. Sun et al. 2023,
    https://arxiv.org/abs/2307.08621."""
    options, width, init = options_of(config)
    shared = linear_options(options, width, 8, (1.0, 2.0), TRANSFORMERS)
    names = OUTPUT_GATE | norm_name(config, shared["use_output_gate"])
    mixer = functools.partial(MultiScaleRetention, width, kernel_init=init, **shared)
    return assemble(options, config, precision, mixer, names, ratio=2)


SLOT_FEATURES = {"swish": "swish", "relu": "relu", "t2r": "relu"}


def gsa(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a gated slot attention model. The norm of the mixer's output has an epsilon of 1e-5, and there is no output gate,
    whatever the config says, as in fla. Zhang et al. 2024, https://arxiv.org/abs/2409.07146."""
    options, width, init = options_of(config, ())
    # fla's config takes the first spelling, and keeps the second.
    expand = options.number("exapnd_k", 1.0), options.number("exapnd_v", 1.0)
    sizes, has_scale = widths_of_heads(options, width, 4, expand), affine(options)
    heads = sizes["num_heads"]
    if has_scale and heads * sizes["value_width"] != width:
        raise options.unsupported(
            "expand_v", f"with elementwise_affine the values must be as wide as hidden_size={width}"
        )
    slots = options.integer("num_slots", 64, optional=True)
    feature = options.choice("feature_map", "swish", SLOT_FEATURES)
    is_float = isinstance(options.values.get(key := "gate_logit_normalizer"), float)
    temperature = options.number(key, above=0) if is_float else options.integer(key, 8)
    more = dict(
        num_kv_heads=options.divisor("num_kv_heads", None, "num_heads", heads, optional=True),
        num_slots=slots,
        temperature=temperature,
        feature_map=SLOT_FEATURES[feature],
        learned_feature_map=feature == "t2r",
        elementwise_affine=has_scale,
        **convolutions(options, init),
    )
    mixer = functools.partial(GatedSlotAttention, width, kernel_init=init, **sizes, **more)
    names = CONVOLUTIONS | {"slot_gate": "f_proj", "feature": "feature_map.layer", "norm": "g_norm"}
    for name in ("use_norm", "use_output_gate"):
        options.flag(name, False)
    return assemble(options, config, precision, mixer, names)


def hgrn(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an HGRN model. Qin et al. 2023, https://arxiv.org/abs/2311.04823."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    inside = rounded_width("expand_ratio", width, options.number("expand_ratio", 1.0, above=0))
    if inside == 0:
        raise options.unsupported("expand_ratio", f"it must make hidden_size={width} at least 1")
    bounded = inside if options.flag("use_lower_bound", True) else None
    more = convolutions(options, init) | dict(norm_eps=options.number("norm_eps", 1e-6, least=0), inside=inside)
    mixer = functools.partial(HGRNAttention, width, elementwise_affine=affine(options), kernel_init=init, **more)
    names = {
        "input": "i_proj",
        "forget": "f_proj",
        "input_conv": "i_conv1d",
        "forget_conv": "f_conv1d",
        "norm": "g_norm",
    }
    names |= OUTPUT_GATE
    return assemble(options, config, precision, mixer, names, build=HGRN, bounded=bounded, float32=())


def hgrn2(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an HGRN2 model. The norm of the mixer's output has an epsilon of 1e-5, as in fla. Qin et al. 2024,
    https://arxiv.org/abs/2404.07904.

    Raises ValueError for sizes that do not fit each other.
    """
    options, width, init = options_of(config)
    ratio, heads = options.take("expand_ratio", 128), options.integer("num_heads", None, optional=True)
    if ratio is None and heads is None:
        raise ValueError("config.json must have expand_ratio or num_heads")
    ratio = width // heads if ratio is None else options.integer("expand_ratio", 128)
    heads = width // ratio
    if heads == 0 or width % heads:
        raise ValueError(
            f"hidden_size={width} in config.json must be a multiple of hidden_size // expand_ratio={heads}"
        )
    more = convolutions(options, init) | dict(num_heads=heads, key_width=ratio, value_width=width // heads)
    bounded = options.flag("use_lower_bound", True)
    if bounded and heads * ratio != width:
        raise options.unsupported("expand_ratio", f"with use_lower_bound it must divide hidden_size={width}")
    mixer = functools.partial(HGRN2Attention, width, elementwise_affine=affine(options), kernel_init=init, **more)
    names = {"key": "f_proj", "value": "i_proj", "norm": "g_norm"}
    names |= {"query_conv": "q_conv1d", "key_conv": "f_conv1d", "value_conv": "i_conv1d"}
    return assemble(options, config, precision, mixer, names, build=HGRN, bounded=width if bounded else None)


class HGRN(AttentionResidualLM):
    """Define a model whose decays have lower bounds that grow with depth: the cumulative sum of a softmax over the layers.

    bounded: the number of bounds of a layer, or None for no bounds.
    """

    def __init__(self, *args, bounded: int | None, **options):
        super().__init__(*args, **options)
        shape, dtype = (len(self.blocks), bounded or 0), options["precision"].param_dtype
        self.lower_bounds = None if bounded is None else parameter(jnp.zeros(shape, dtype), None, EMBED)

    def arguments(self, layer: int) -> tuple:
        is_softmax = isinstance(self.block_of(layer).attn, Attention)
        if self.lower_bounds is None or layer == 0 or is_softmax:  # the bound of the first layer is 0
            return ()
        shares = jax.nn.softmax(self.lower_bounds[...].astype(jnp.float32), 0)
        return (shares[1 : layer + 1].sum(0),)


class RWKV6Block(nnx.Module):
    """Compute x + attn(norm(x)), then x + ffn(norm(x)), both with a state. The first block also normalises its input."""

    def __init__(self, pre_norm: nnx.Module | None, attn_norm, attn, ffn_norm, ffn):
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
    "mix_down": "x_proj.0.linear", "mix_first": "x_proj.0.mu", "mix_up": "x_proj.2", "mix_bias": "x_bias", "receptance":
    "r_proj.linear", "decay_down": "w_proj.linear.lora.0", "decay_up": "w_proj.linear.lora.2", "key": "k_proj.linear",
    "value": "v_proj.linear", "output_gate": "g_proj.linear", "norm": "g_norm", "output": "o_proj",
}  # fmt: skip
RWKV6_FFN_NAMES = {
    "key": "key.linear", "key_mix": "key.mu", "receptance": "receptance.linear", "receptance_mix": "receptance.mu",
}  # fmt: skip


def rwkv6(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an RWKV-6 model. Peng et al. 2024, https://arxiv.org/abs/2404.05892."""
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 24)
    outer, init = outer_options(options, precision, 32000)
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
            return Attention(width, kernel_init=init, **softmax[layer], **precision.options)
        sizes = dict(num_heads=heads, key_width=keys, value_width=values, **ranks)
        return RWKV6Attention(width, norm_eps=eps, kernel_init=init, **sizes, **precision.options)

    def block(layer: int) -> RWKV6Block:
        ffn = RWKV6FeedForward(width, inside, act=act, kernel_init=init, **precision.options)
        return RWKV6Block(norm() if first and layer == 0 else None, norm(), mixer(layer), norm(), ffn)

    rules = (*softmax_names(softmax), *renamed("attn", RWKV6_NAMES), *renamed("ffn", RWKV6_FFN_NAMES), *OUTER)
    blocks = [block(layer) for layer in range(layers)]
    return CausalLM(config, blocks, norm(), Names(rules), width=width, **outer)


# ---- the delta rule ---------------------------------------------------------------------------------------------------

A_LOG = r"\.attn\.A_log$"
DELTA_NAMES = CONVOLUTIONS | {"beta": "b_proj", "norm": "o_norm"}
KDA_GATES = {
    "gate_down": "f_proj.0", "gate_up": "f_proj.1", "output_gate_down": "g_proj.0", "output_gate_up": "g_proj.1",
}  # fmt: skip


def delta_options(options: Options, init: Callable) -> dict[str, Any]:
    """Return the arguments that DeltaNet, Gated DeltaNet, Gated DeltaProduct and Kimi Delta Attention share. init: the function
    that initialises projections and filters."""
    return convolutions(options, init, used=True) | dict(
        allow_neg_eigval=options.flag("allow_neg_eigval", False),
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        kernel_init=init,
    )


def plain_norm(is_gated: bool) -> tuple[str, ...]:
    """Return the patterns of `Names.float32` for the norm of the mixer's output. fla has this norm in float32 if the layer has
    no output gate. is_gated: whether it has one."""
    return () if is_gated else (r"\.attn\.o_norm\.weight$",)


def grouped_heads(options: Options, *, heads: int, head_width: int, expand: float) -> dict[str, Any]:
    """Return num_heads (of values), num_qk_heads, key_width and value_width of a head, as arguments of a delta-rule layer.

    They are read from num_heads (of queries and keys), num_v_heads, head_dim and expand_v of the config. Without num_v_heads
    there are num_heads of values. value_width is head_dim * expand_v. heads, head_width, expand: the values for a config that
    lacks num_heads, head_dim or expand_v. Raises UnsupportedOption for a num_v_heads that num_heads does not divide, and
    ValueError where head_dim * expand_v is not a positive integer.
    """
    qk_heads = options.integer("num_heads", heads)
    heads = options.integer("num_v_heads", None, optional=True) or qk_heads
    if heads % qk_heads:
        raise options.unsupported("num_v_heads", f"it must be a multiple of num_heads={qk_heads}")
    keys = options.integer("head_dim", head_width)
    values = exact_width("expand_v", keys, options.number("expand_v", expand), "head_dim")
    return dict(num_heads=heads, num_qk_heads=qk_heads, key_width=keys, value_width=values)


def delta_net(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a DeltaNet model. Its output is normalised whatever use_output_norm says, and norm_first of older configs has no
    effect, as in fla. Yang et al. 2024, https://arxiv.org/abs/2406.06484."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    options.ignore("use_output_norm")
    more = dict(
        **widths_of_heads(options, width, 16, (1.0, 1.0)),
        **delta_options(options, init),
        use_beta=options.flag("use_beta", True),
        use_output_gate=options.flag("use_gate", False),
        qk_activation=options.choice("qk_activation", "silu", QK_ACTIVATIONS),
        qk_norm=options.choice("qk_norm", "l2", QK_NORMS),
    )
    float32 = plain_norm(more["use_output_gate"])
    mixer = functools.partial(DeltaNet, width, **more)
    return assemble(options, config, precision, mixer, DELTA_NAMES | OUTPUT_GATE, float32=float32)


def gated_deltanet(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Gated DeltaNet model. Yang et al. 2024, https://arxiv.org/abs/2412.06464."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    more = dict(
        **grouped_heads(options, heads=6, head_width=256, expand=2.0),
        **delta_options(options, init),
        use_output_gate=options.flag("use_gate", True),
        gate_fn=options.choice("output_gate_activation", "swish", ("swish", "silu", "sigmoid")),
    )
    return gated_delta_model(options, config, precision, functools.partial(GatedDeltaNet, width, **more))


def gated_deltaproduct(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Gated DeltaProduct model. Siems et al. 2025, https://arxiv.org/abs/2502.10297."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    keys = options.integer("head_dim", 256)
    more = dict(
        num_heads=options.integer("num_heads", 6),
        key_width=keys,
        value_width=exact_width("expand_v", keys, options.number("expand_v", 2.0), "head_dim"),
        num_updates=options.integer("num_householder", 1),
        **delta_options(options, init),
        use_output_gate=options.flag("use_output_gate", True),
        use_forget_gate=options.flag("use_forget_gate", False),
    )
    return gated_delta_model(options, config, precision, functools.partial(GatedDeltaProduct, width, **more))


def comba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Comba model. Its layers correct the output and weaken the key that reads, whatever use_output_correction,
    correction_factor and use_inner_decay say, as in fla. Hu et al. 2025, https://arxiv.org/abs/2506.02475."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    more = dict(
        **grouped_heads(options, heads=6, head_width=256, expand=2.0),
        **convolutions(options, init, used=True),
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        kernel_init=init,
        use_output_gate=options.flag("use_output_gate", True),
    )
    names = {"inner_decay": "decay", "correction": "D"}
    return gated_delta_model(options, config, precision, functools.partial(Comba, width, **more), names)


def gated_delta_model(
    options: Options,
    config: ModelConfig,
    precision: Precision,
    mixer: functools.partial,
    names: dict[str, str] | None = None,
) -> CausalLM:
    """Return a model whose mixer derives from GatedDeltaNet. names: {a part of the mixer: its name in the checkpoint}, for the
    parts that GatedDeltaNet lacks."""
    names = DELTA_NAMES | OUTPUT_GATE | {"gate": "a_proj"} | (names or {})
    float32 = (A_LOG, *plain_norm(mixer.keywords["use_output_gate"]))
    return assemble(options, config, precision, mixer, names, layers=21, float32=float32)


def kda(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Kimi Delta Attention model. Log gates are bounded if lower_bound is set. Kimi Team 2025,
    https://arxiv.org/abs/2510.26692."""
    options, width, init = options_of(config, MODES_OF_DELTA)
    bound, is_safe = options.number("lower_bound", None, optional=True), options.flag("safe_gate", False)
    if is_safe and bound is None:
        raise options.unsupported("safe_gate", "it must come with a lower_bound")
    if bound is not None and not bound < 0:
        raise options.unsupported("lower_bound", "it must be null or below 0")
    more = dict(
        **grouped_heads(options, heads=16, head_width=128, expand=1.0),
        **delta_options(options, init),
        lower_bound=bound,
        A_range=(1.0, 1.0) if is_safe else (1.0, 16.0),
    )
    mixer, float32 = functools.partial(KimiDeltaAttention, width, **more), (A_LOG, r"\.attn\.dt_bias$")
    return assemble(options, config, precision, mixer, DELTA_NAMES | KDA_GATES, float32=float32)
