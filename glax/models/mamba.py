"""Build Mamba-1 and FalconMamba, whose mixers have norms of dt, B and C."""

import functools
import math
from typing import Any

import jax.numpy as jnp

from glax.models.config import ModelConfig, Options, rounded_width
from glax.models.hybrids import hidden_act
from glax.models.mamba2 import ALIASES, BACKBONE, OF_FLA, WIDE, draw_output, first_steps, output_factor
from glax.models.model import CausalLM, MixerBlock, Precision, outer_options
from glax.models.names import MAMBA, Layout, Names, renamed, same
from glax.nn import Mamba1, RMSNorm

MAMBA1 = MAMBA | {"parts": "x_proj", "dt": "dt_proj", "dt_norm": "dt_layernorm"}
MAMBA1 |= {"B_norm": "b_layernorm", "C_norm": "c_layernorm"}
# The bias of W_dt is a parameter of the layer, which adds it in float32.
STEP_BIAS: tuple[tuple[str, Layout], ...] = (("dt_bias", ("dt_proj.bias", same, same)),)
RULES = (*renamed("mixer", MAMBA1), *BACKBONE)
NAMES = Names(RULES, layouts=STEP_BIAS, aliases=ALIASES)
NAMES_OF_FLA = Names(RULES, layouts=STEP_BIAS, aliases=ALIASES, float32=WIDE)
# Options that choose an implementation.
WITHOUT_EFFECT = ("use_associative_scan", "use_mambapy", "use_falcon_mambapy")
# Options that fla's configs have and those of transformers have not.
OF_FLA_ALONE = (*OF_FLA, "dt_rank", "dt_scale", "dt_min", "dt_max", "dt_init_scheme", "dt_init_floor")


def step_rank(options: Options, key: str, width: int) -> int:
    """Return the number of rows of W_dt: the option `key`, or ceil(width / 16) if it is "auto" or missing."""
    if options.take(key, "auto") == "auto":
        return math.ceil(width / 16)
    return options.integer(key)


def mamba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Mamba-1 model. Raises UnsupportedOption for an option that is not supported.

    Gu and Dao 2023, https://arxiv.org/abs/2312.00752.
    """
    if any(key in config.values for key in OF_FLA_ALONE):
        return of_fla(config, precision)
    return of_transformers(config, precision, Options(config.values), {})


def of_fla(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Mamba-1 model of fla. hidden_act must be SiLU, the only one for which fla's kernels and its plain code agree."""
    options = Options(config.values, code="mamba_fla")
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 48)
    inside = rounded_width("expand", width, options.number("expand", 2, above=0))
    outer, init = outer_options(options, precision, 32000, has_padding=False)
    options.choice("hidden_act", "silu", ("silu", "swish"))
    mixer = sizes_of(options, width, inside) | dict(
        kernel_init=init,
        rank=step_rank(options, "dt_rank", width),
        dt_init=options.choice("dt_init_scheme", "random", ("random", "constant")),
        dt_scale=options.number("dt_scale", 1.0, least=0),
        **first_steps(options, "dt_min", "dt_max", "dt_init_floor"),
    )
    return assemble(
        options,
        config,
        precision,
        outer,
        mixer,
        layers=layers,
        eps=options.number("norm_eps", 1e-5, least=0),
        is_wide=options.flag("residual_in_fp32", False),
        factor=output_factor(options, False, layers),
        names=NAMES_OF_FLA,
    )


def falcon_mamba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a FalconMamba model: Mamba-1 with RMSNorms without scales of dt, B and C.

    Zuo et al. 2024, https://arxiv.org/abs/2410.05355.
    """
    options = Options(config.values)
    return of_transformers(
        config, precision, options, dict(part_norm="plain", norm_eps=options.number("mixer_rms_eps", 1e-6, least=0))
    )


def of_transformers(config: ModelConfig, precision: Precision, options: Options, norms: dict[str, Any]) -> CausalLM:
    """Return a model from a config of transformers. norms: the arguments of Mamba1 for its norms of dt, B and C."""
    width, layers = options.integer("hidden_size", 768), options.integer("num_hidden_layers", 32)
    inside = width * options.integer("expand", 2)
    outer, init = outer_options(options, precision, 50280, tied=True, has_padding=False, deviation=0.1)
    mixer = norms | sizes_of(options, width, inside)
    mixer |= dict(
        kernel_init=init,
        rank=step_rank(options, "time_step_rank", width),
        act=hidden_act(options),
        dt_init=options.choice("time_step_init_scheme", "random", ("random", "constant")),
        dt_scale=options.number("time_step_scale", 1.0, least=0),
        **first_steps(options),
    )
    options.ignore(*WITHOUT_EFFECT)
    return assemble(
        options,
        config,
        precision,
        outer,
        mixer,
        layers=layers,
        eps=options.number("layer_norm_epsilon", 1e-5, least=0),
        is_wide=options.flag("residual_in_fp32", True),
        factor=output_factor(options, False, layers) or 1.0,
        names=NAMES,
    )


def sizes_of(options: Options, width: int, inside: int) -> dict[str, Any]:
    """Return the arguments of Mamba1 that fla and transformers name alike. inside: the inner width by the option `expand`;
    intermediate_size, if a config has it, replaces it."""
    return dict(
        width=width,
        inside=options.integer("intermediate_size", inside),
        state_width=options.integer("state_size", 16),
        conv_size=options.integer("conv_kernel", 4),
        conv_bias=options.flag("use_conv_bias", True),
        bias=options.flag("use_bias", False),
    )


def assemble(
    options: Options,
    config: ModelConfig,
    precision: Precision,
    outer: dict[str, Any],
    mixer: dict[str, Any],
    *,
    layers: int,
    eps: float,
    is_wide: bool,
    factor: float | None,
    names: Names,
) -> CausalLM:
    """Return the model. outer: the result of `outer_options`. mixer: the arguments of Mamba1. eps: the norms' epsilon. is_wide:
    whether the residual is float32. factor: W_out starts uniform within factor / sqrt(inputs); unchanged if None."""
    options.finish()
    width = mixer["width"]
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def block() -> MixerBlock:
        layer = Mamba1(**mixer, **precision.options)
        draw_output(layer, precision, factor)
        return MixerBlock(norm(), layer, precision.dtype, jnp.dtype(jnp.float32) if is_wide else None)

    return CausalLM(config, [block() for _ in range(layers)], norm(), names, width=width, **outer)
