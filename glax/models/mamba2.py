"""Build Mamba-2 from configs of transformers, flash-linear-attention and the state-spaces repository."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options, is_finite, rounded_width, shown
from glax.models.model import CausalLM, MixerBlock, Precision, outer_options
from glax.models.names import FLA, MAMBA, TRANSFORMERS, Names, outer_names, renamed
from glax.nn import Attention, Mamba1, Mamba2, Mamba3, RMSNorm, ShortConvolution
from glax.nn.convolution import uniform_filter
from glax.nn.layer import Layer
from glax.nn.parts import EMBED, HEADS, linear
from glax.nn.passes import Rows

# Options that fla's configs have and those of transformers have not.
OF_FLA = (
    "rmsnorm", "norm_eps", "dt_limit", "D_has_hdim", "A_init_range", "fuse_norm", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "use_l2warp",
)  # fmt: skip

BACKBONE = outer_names("backbone.embeddings", "backbone.layers", "backbone.norm_f")
MIXER = renamed("mixer", MAMBA)
ALIASES = ((r"^backbone\.embedding\.weight$", "backbone.embeddings.weight"),)  # transformers renames it likewise
ORIGINAL = Names((*MIXER, *outer_names("backbone.embedding", "backbone.layers", "backbone.norm_f")))
USUAL = Names((*MIXER, *BACKBONE), aliases=ALIASES)
WIDE = (r"\.A_log$", r"^backbone\.layers\.\d+\.norm\.weight$", r"^backbone\.norm_f\.weight$")
NAMES_OF_FLA = Names((*MIXER, *BACKBONE), aliases=ALIASES, float32=WIDE)


class FusedAttention(Attention):
    """Compute softmax attention whose q, k and v come from one projection, and pass through one convolution if conv_size is
    above 0, as in the state-spaces repository."""

    def __init__(self, width: int, *, conv_size: int, bias: bool, **options):
        super().__init__(width, **options)
        given: dict[str, Any] = {name: options[name] for name in ("dtype", "param_dtype", "rngs")}
        for name in ("query", "key", "value"):
            delattr(self, name)
        inside = (self.num_heads + 2 * self.num_kv_heads) * self.head_width
        self.input = linear(width, inside, (EMBED, HEADS), bias=bias, kernel_init=options["kernel_init"], **given)
        self.conv = ShortConvolution(inside, conv_size, bias=True, activation=None, **given) if conv_size else None

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state: dict[str, Any] = dict(attn=super().empty_state(batch, max_length))
        return state if self.conv is None else state | dict(conv=self.conv.initial_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: Any, rows: Rows) -> tuple[Array, Any]:
        qkv, after = self.input(x), {}
        if self.conv is not None:
            qkv, after["conv"] = self.conv.extend(qkv, state.get("conv"), rows)
        queries, keys = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        q, k, v = jnp.split(qkv, [queries, queries + keys], axis=-1)
        y, cache = self.attend(q, k, v, state.get("attn", {}), rows)
        return y, after | dict(attn=dict(cache))


def mamba2(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Mamba-2 model. Raises UnsupportedOption for an option that is not supported.

    Dao and Gu 2024, https://arxiv.org/abs/2405.21060.
    """
    if "ssm_cfg" in config.values:
        return original(config, precision)
    if any(key in config.values for key in OF_FLA):
        return of_fla(config, precision)
    options = Options(config.values)
    sizes = sizes_of(options, heads=128, groups=8, hidden=4096, layers=64)
    eps, limit = options.number("layer_norm_epsilon", 1e-5, least=0), limits(options, "time_step_limit")
    mixer = dict(
        act=TRANSFORMERS[options.choice("hidden_act", "silu", TRANSFORMERS)],
        dt_limit=limit,
        **first_steps(options),
    )
    factor = output_factor(options, False, sizes["layers"]) or 1.0
    options.ignore("time_step_rank", "chunk_size")
    more: dict[str, Any] = dict(eps=eps, deviation=0.1, vocabulary=32768, factor=factor)
    return assemble(options, config, precision, sizes, mixer, **more)


def of_fla(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Mamba-2 model from a config of fla. Raises UnsupportedOption for an option that is not supported."""
    options = Options(config.values, code="mamba2_fla")
    sizes = sizes_of(options, heads=None, groups=1, hidden=2048, layers=48)
    mixer = mixer_options(options) | dict(act=FLA[options.choice("hidden_act", "silu", FLA)])
    eps = options.number("norm_eps", 1e-5, least=0)
    factor = output_factor(options, True, sizes["layers"])
    options.ignore("chunk_size")
    more: dict[str, Any] = dict(eps=eps, deviation=0.02, vocabulary=32000, names=NAMES_OF_FLA, factor=factor)
    return assemble(options, config, precision, sizes, mixer, **more)


def draw_output(layer: Mamba1 | Mamba2 | Mamba3, precision: Precision, factor: float | None):
    """Set new first values of W_out: uniform within factor / sqrt(inputs). Nothing is done if factor is None."""
    if factor is None:
        return
    kernel = layer.output.kernel
    inside, width = kernel.shape
    draw = uniform_filter(precision.rngs.params(), (inside, width), jnp.float32)
    kernel[...] = (factor * draw).astype(kernel.dtype)


def output_factor(options: Options, default: bool, layers: int) -> float | None:
    """Return 1 / sqrt(layers), the factor of the first values of W_out, if rescale_prenorm_residual is true; else None.
    default: that option for a config that lacks it."""
    return layers**-0.5 if options.flag("rescale_prenorm_residual", default, optional=True) else None


def first_steps(
    options: Options, least: str = "time_step_min", most: str = "time_step_max", floor: str = "time_step_floor"
) -> dict[str, Any]:
    """Return dt_range and dt_floor as arguments of a layer, from the options of these names."""
    dt_range = options.number(least, 0.001, above=0), options.number(most, 0.1, above=0)
    return dict(dt_range=dt_range, dt_floor=options.number(floor, 1e-4, above=0))


def mixer_options(options: Options) -> dict[str, Any]:
    """Return the arguments of Mamba2 that fla and the state-spaces repository name alike."""
    return dict(
        dt_limit=limits(options, "dt_limit"),
        **first_steps(options, "dt_min", "dt_max", "dt_init_floor"),
        use_norm=options.flag("rmsnorm", True),
        norm_before_gate=options.flag("norm_before_gate", False),
        per_channel_skip=options.flag("D_has_hdim", False),
        A_range=options.pair("A_init_range", (1, 16), above=0),
        conv_init=options.number("conv_init", None, optional=True, least=0),
    )


def sizes_of(options: Options, *, heads: int | None, groups: int, hidden: int, layers: int) -> dict:
    """Return the sizes that the configs of transformers and fla name alike, as arguments of `Mamba2`, with width and layers.

    heads, groups, hidden, layers: the values for a config that lacks the option. heads None stands for as many heads as fill
    the inner width. Raises ValueError unless num_heads * head_dim is hidden_size * expand.
    """
    width, expand = options.integer("hidden_size", hidden), options.number("expand", 2, above=0)
    head_width = options.integer("head_dim", 64)
    inside = rounded_width("expand", width, expand)
    found = inside // head_width
    given = options.integer("num_heads", found if heads is None else heads, optional=True)
    if given not in (None, found) or inside % head_width:
        raise ValueError(
            f"num_heads * head_dim in config.json must be hidden_size * expand={inside}, got {given} * {head_width}"
        )
    return dict(
        width=width,
        layers=options.integer("num_hidden_layers", layers),
        num_heads=found,
        head_width=head_width,
        state_width=options.integer("state_size", 128),
        groups=options.divisor("n_groups", groups, "num_heads", found),
        conv_size=options.integer("conv_kernel", 4),
        conv_bias=options.flag("use_conv_bias", True),
        bias=options.flag("use_bias", False),
    )


WORDS = {"Infinity": math.inf, "-Infinity": -math.inf}


def limits(options: Options, key: str) -> tuple[float, float]:
    """Return the least and the greatest step, two floats; 0 and infinity if `key` is missing or null. transformers writes
    infinity as a word."""
    value = options.take(key, None)
    value = (0.0, math.inf) if value is None else value
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{key} in config.json must be two numbers, got {value!r}")
    low, high = step_limit(key, value[0]), step_limit(key, value[1])
    if not low <= high:
        raise ValueError(f"{key} in config.json must be two numbers in ascending order, got {value!r}")
    return low, high


def step_limit(key: str, x: Any) -> float:
    """Return x, a limit of the step, as a float: a number, or the word that transformers writes for infinity. key: the
    option, for the message."""
    is_word = isinstance(x, dict) and set(x) == {"__float__"} and isinstance(x["__float__"], str)
    value: Any = WORDS.get(x["__float__"]) if is_word else x
    if is_finite(value) or value in (math.inf, -math.inf):
        return float(value)
    raise ValueError(f"{key} in config.json must be two numbers, got {shown(x)}")


def assemble(
    options: Options,
    config: ModelConfig,
    precision: Precision,
    sizes: dict,
    mixer: dict,
    *,
    eps: float,
    deviation: float,
    vocabulary: int,
    names: Names = USUAL,
    factor: float | None = None,
    attention: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Return a model of Mamba-2 layers. sizes: from `sizes_of`. mixer: further arguments of Mamba2.

    factor: W_out starts uniform within factor / sqrt(inputs); unchanged if None. attention: the numbers of the layers of
    softmax attention, and the arguments of their `FusedAttention`; None for no such layers.
    """
    sizes = dict(sizes)
    width, layers = sizes.pop("width"), sizes.pop("layers")
    residual = jnp.dtype(jnp.float32) if options.flag("residual_in_fp32", True) else None
    outer, init = outer_options(options, precision, vocabulary, has_padding=False, deviation=deviation)
    options.finish()
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)
    softmax, arguments = ((), {}) if attention is None else (attention["layers"], attention["arguments"])

    def mixer_of(layer: int) -> Layer:
        if layer in softmax:
            return FusedAttention(width, kernel_init=init, **arguments, **precision.options)
        mamba = Mamba2(width, norm_eps=eps, kernel_init=init, **sizes, **mixer, **precision.options)
        draw_output(mamba, precision, factor)
        return mamba

    blocks = [MixerBlock(norm(), mixer_of(layer), precision.dtype, residual) for layer in range(layers)]
    return CausalLM(config, blocks, norm(), names, width=width, **outer)


# ---- the state-spaces repository -------------------------------------------------------------------------------------


def original(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a model from a folder of state-spaces/mamba: d_model, n_layer, ssm_cfg. The vocabulary is rounded up to
    pad_vocab_size_multiple."""
    options = Options(config.values, model_type="mamba2", code="mamba2_state_spaces")
    options.ignore("fused_add_norm")
    width, layers = options.integer("d_model"), options.integer("n_layer")
    options.choice("d_intermediate", 0, (0,))
    attention = attention_of(options, width, layers)
    options.choice("rms_norm", True, (True,))
    multiple = options.integer("pad_vocab_size_multiple", 8)
    vocabulary = -(-options.integer("vocab_size", 50277) // multiple) * multiple
    tied, in_fp32 = options.flag("tie_embeddings", True), options.flag("residual_in_fp32", True)
    ssm = options.take("ssm_cfg")
    options.finish()

    inner = options.part("ssm_cfg", ssm)
    inner.ignore("chunk_size", "use_mem_eff_path", "sequence_parallel")
    inner.values.setdefault("layer", "Mamba1")
    if inner.take("layer") == "Mamba1":
        raise inner.unsupported("layer", "Mamba-1 loads from transformers' folders, whose names on the Hub end in -hf")
    inner.choice("layer", None, ("Mamba2",))
    head_width = inner.integer("headdim", 64)
    inside = rounded_width("expand", width, inner.number("expand", 2, above=0), "d_model")
    if inside % head_width:
        raise inner.unsupported("headdim", f"it must divide expand * d_model={inside}")
    whole = inner.integer("d_ssm", None, optional=True)
    if whole not in (None, inside):
        raise inner.unsupported("d_ssm", f"it must be expand * d_model={inside}, without a part that is an MLP")
    sizes = dict(width=width, layers=layers, num_heads=inside // head_width, head_width=head_width)
    sizes |= dict(
        state_width=inner.integer("d_state", 128),
        groups=inner.divisor("ngroups", 1, "d_ssm / headdim", inside // head_width),
        conv_size=inner.integer("d_conv", 4),
        conv_bias=inner.flag("conv_bias", True),
        bias=inner.flag("bias", False),
    )
    mixer = mixer_options(inner)
    inner.finish()
    shared = Options(dict(tie_word_embeddings=tied, residual_in_fp32=in_fp32, vocab_size=vocabulary))
    more: dict[str, Any] = dict(eps=1e-5, deviation=0.02, vocabulary=vocabulary, names=ORIGINAL, attention=attention)
    return assemble(shared, config, precision, sizes, mixer, **more)


def attention_of(options: Options, width: int, layers: int) -> dict[str, Any] | None:
    """Return {"layers": the numbers of the layers of softmax attention, "arguments": the arguments of `FusedAttention`}, or
    None if there are no such layers. Raises UnsupportedOption for an option that is not supported."""
    chosen, given = options.take("attn_layer_idx", None) or [], options.take("attn_cfg", None) or {}
    if not isinstance(chosen, list) or not all(isinstance(layer, int) and layer in range(layers) for layer in chosen):
        raise options.unsupported("attn_layer_idx", f"it must hold layers from 0 to {layers - 1}")
    if not chosen:
        return None
    inner = options.part("attn_cfg", given)
    heads = inner.integer("num_heads")
    kv_heads = inner.divisor("num_heads_kv", None, "num_heads", heads, optional=True)
    head_width = inner.integer("head_dim", None, optional=True) or width // heads
    inner.choice("causal", False, (True,))
    inner.choice("mlp_dim", 0, (0,))
    inner.choice("rotary_emb_interleaved", False, (False,))
    rotary, base = inner.integer("rotary_emb_dim", 0, least=0), inner.number("rotary_emb_base", 10000.0, above=0)
    if rotary % 2 or rotary > head_width:
        raise inner.unsupported("rotary_emb_dim", f"it must be even and at most head_dim={head_width}")
    arguments = dict(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        scale=inner.number("softmax_scale", None, optional=True),
        conv_size=inner.integer("d_conv", 0, least=0),
        bias=inner.flag("qkv_proj_bias", True),
        output_bias=inner.flag("out_proj_bias", True),
        **(dict(theta=base, rotary_width=rotary) if rotary else dict(theta=None)),
    )
    inner.finish()
    return dict(layers=tuple(chosen), arguments=arguments)
