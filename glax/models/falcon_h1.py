"""Build Falcon-H1: Mamba-2 and softmax attention side by side in every layer, with multipliers throughout."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from glax.models.bamba import OUTER
from glax.models.config import ModelConfig, Options, is_finite
from glax.models.hybrids import (
    TRAINING,
    ScaledLM,
    attention_sizes,
    check_kinds_of_layers,
    hidden_act,
    mamba_options,
    softmax_attention,
)
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import ATTENTION, MAMBA, Names, renamed
from glax.models.rope import rotation
from glax.nn import Mamba2, RMSNorm, SwiGLU
from glax.nn.parts import EMBED, HEADS, for_rows, linear
from glax.nn.passes import Rows, State


class ScaledMamba2(Mamba2):
    """Compute Mamba-2 with the input multiplied by `input_multiplier`, and the parts z, x, B, C and dt of W_in's output by
    `multipliers`, in this order. output_bias: whether W_out has a bias. The other arguments are those of `Mamba2`."""

    def __init__(
        self, width: int, *, multipliers: tuple[float, ...], input_multiplier: float, output_bias: bool, **options
    ):
        super().__init__(width, **options)
        inside, states = self.num_heads * self.head_width, self.groups * self.state_width
        sizes = (inside, inside, states, states, self.num_heads)
        self.input_multiplier = input_multiplier
        self.parts = tuple(zip(multipliers, sizes, strict=True))
        if output_bias != options["bias"]:
            given: dict[str, Any] = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
            self.output = linear(inside, width, (HEADS, EMBED), bias=output_bias, **given)

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        factors = np.concatenate([np.full(size, factor, np.float32) for factor, size in self.parts])
        projected = self.input(x * self.input_multiplier)
        return self.scan(projected * for_rows(projected, jnp.asarray(factors), projected.dtype), state, rows)


class ScaledMLP(SwiGLU):
    """Compute y = d W_down (W_up x * act(g W_gate x)), with multipliers g and d."""

    def __init__(self, width: int, inside: int, multipliers: tuple[float, ...], **options):
        super().__init__(width, inside, **options)
        self.multipliers = multipliers

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        gate = self.act(self.gate(x).astype(jnp.float32) * self.multipliers[0])
        y = self.down((gate * self.up(x).astype(jnp.float32)).astype(x.dtype))
        return y * self.multipliers[1]


class FalconH1Block(nnx.Module):
    """Compute x + s mamba(h) + a attention(i h) with h = norm(x), then x + mlp(norm(x)). multipliers: (s, i, a)."""

    def __init__(self, attn_norm, mamba, self_attn, mlp_norm, mlp, multipliers: tuple[float, ...]):
        self.attn_norm, self.mamba, self.self_attn, self.mlp_norm, self.mlp = attn_norm, mamba, self_attn, mlp_norm, mlp
        self.multipliers = multipliers

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return dict(mamba=self.mamba.empty_state(batch), attn=self.self_attn.empty_state(batch, max_length))

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        ssm_out, attn_in, attn_out = self.multipliers
        h = self.attn_norm(x)
        scanned, mamba = self.mamba.mix(h, state.get("mamba", {}), rows)
        attended, attn = self.self_attn.mix(h * attn_in, state.get("attn", {}), rows)
        x = x + (scanned * ssm_out + attended * attn_out)
        return x + self.mlp(self.mlp_norm(x)), dict(mamba=mamba, attn=attn)


def numbers(options: Options, key: str, count: int) -> tuple[float, ...]:
    """Return a list of `count` numbers; ones if the option is absent. Raises UnsupportedOption for another value."""
    given = options.take(key, None)
    given = [1.0] * count if given is None else given
    numeric = isinstance(given, list | tuple) and all(map(is_finite, given))
    if not numeric or len(given) != count:
        raise options.unsupported(key, f"it must be {count} numbers")
    return tuple(map(float, given))


def falcon_h1(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Falcon-H1 model. Raises UnsupportedOption for an option that is not supported.

    Zuo et al. 2025, https://arxiv.org/abs/2507.22448.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 128000, pad=0)
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options)
    check_kinds_of_layers(options, ["hybrid"] * layers, {"hybrid": "hybrid"})
    options.ignore(*TRAINING)
    sizes, rope = attention_sizes(options, width, kv_heads=8), rotation(options, 10000.0, 8192)
    bias = options.flag("attention_bias", False)
    # Multiplying the keys multiplies the scores.
    scale = sizes["head_width"] ** -0.5 * options.number("key_multiplier", 1.0)
    inside = options.integer("mamba_d_ssm", 1024, optional=True)
    arguments = mamba_options(options, width, eps=eps, act=act, inside=inside)
    arguments |= dict(
        use_norm=options.flag("mamba_rms_norm", False, optional=True),
        norm_before_gate=options.flag("mamba_norm_before_gate", True, optional=True),
        multipliers=numbers(options, "ssm_multipliers", 5),
        input_multiplier=options.number("ssm_in_multiplier", 1.0),
        output_bias=options.flag("projectors_bias", False, optional=True),
        gate_fn="silu",
    )
    multipliers = tuple(
        options.number(f"{name}_multiplier", 1.0) for name in ("ssm_out", "attention_in", "attention_out")
    )
    scaled = dict(
        embedding_multiplier=options.number("embedding_multiplier", 1.0),
        logits_multiplier=options.number("lm_head_multiplier", 1.0),
    )
    mlp_inside, mlp_bias = options.integer("intermediate_size", 14336), options.flag("mlp_bias", False)
    mlp_multipliers = numbers(options, "mlp_multipliers", 2)
    options.finish()

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mlp() -> ScaledMLP:
        more = dict(activation=act, bias=mlp_bias, kernel_init=init)
        return ScaledMLP(width, mlp_inside, mlp_multipliers, **more, **precision.options)

    blocks = [
        FalconH1Block(
            norm(),
            ScaledMamba2(width, kernel_init=init, **arguments, **precision.options),
            softmax_attention(width, sizes, rope, init, precision, bias=bias, output_bias=bias, scale=scale),
            norm(),
            mlp(),
            multipliers,
        )
        for _ in range(layers)
    ]
    names = Names((*renamed("mamba", MAMBA), *renamed("self_attn", ATTENTION), *OUTER))
    return ScaledLM(config, blocks, norm(), names, width=width, **outer, **scaled)
