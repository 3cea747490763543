"""Build Mamba-3 from the configs of flash-linear-attention."""

import functools
from typing import Any

import jax.numpy as jnp

from glax.models.config import ModelConfig, Options, rounded_width
from glax.models.mamba2 import ALIASES, BACKBONE, draw_output, first_steps, output_factor
from glax.models.model import CausalLM, MixerBlock, Precision, outer_options
from glax.models.names import Names, renamed
from glax.nn import Mamba3, RMSNorm

FLOAT32 = (r"\.(B_bias|C_bias|dt_bias)$", r"^backbone\.layers\.\d+\.norm\.weight$", r"^backbone\.norm_f\.weight$")
NAMES = Names(
    (*renamed("mixer", {"input": "in_proj", "output": "out_proj"}), *BACKBONE), aliases=ALIASES, float32=FLOAT32
)


def mixer_options(options: Options, width: int) -> dict[str, Any]:
    """Return the arguments of Mamba3 but its width. Raises UnsupportedOption for sizes that do not fit each other."""
    head_width, expand = options.integer("head_dim", 64), options.number("expand", 2, above=0)
    inside, states = rounded_width("expand", width, expand), options.integer("state_size", 128)
    if inside % head_width or not inside:
        raise options.unsupported("head_dim", f"it must divide hidden_size * expand={inside}")
    if states % 2:
        raise options.unsupported("state_size", "it must be even")
    has_rank = options.flag("is_mimo", False)
    rank, heads = options.integer("mimo_rank", 4, optional=not has_rank), inside // head_width
    if options.integer("num_heads", heads) != heads:
        raise options.unsupported("num_heads", f"it must be hidden_size * expand / head_dim={heads}")
    rope = options.choice("rope_fraction", 0.5, (0.5, 1.0))
    if int(states * rope) < 2:
        raise options.unsupported("rope_fraction", f"of state_size={states} it leaves no columns to rotate")
    return dict(
        num_heads=heads,
        head_width=head_width,
        state_width=states,
        groups=options.divisor("n_groups", 1, "num_heads", heads),
        rope_fraction=float(rope),
        mimo_rank=rank if has_rank else None,
        use_norm=options.flag("is_outproj_norm", False),
        A_floor=options.number("A_floor", 1e-4, above=0),
        bias=options.flag("use_bias", False),
        **first_steps(options, "dt_min", "dt_max", "dt_init_floor"),
    )


def mamba3(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Mamba-3 model. Lahoti et al. 2026, https://github.com/state-spaces/mamba."""
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 48)
    mixer, eps = mixer_options(options, width), options.number("norm_eps", 1e-5, least=0)
    residual = jnp.dtype(jnp.float32) if options.flag("residual_in_fp32", True) else None
    outer, init = outer_options(options, precision, 32000, has_padding=False)
    factor = output_factor(options, True, layers)
    options.ignore("chunk_size", "hidden_act")
    options.finish()
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def block() -> MixerBlock:
        layer = Mamba3(width, norm_eps=eps, kernel_init=init, **mixer, **precision.options)
        draw_output(layer, precision, factor)
        return MixerBlock(norm(), layer, precision.dtype, residual)

    return CausalLM(config, [block() for _ in range(layers)], norm(), NAMES, width=width, **outer)
