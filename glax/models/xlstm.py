"""Build xLSTM: blocks of mLSTM and gated MLPs, and logits within a cap."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options, rounded_width
from glax.models.hybrids import DenseMLP
from glax.models.model import Block, CausalLM, Precision
from glax.models.names import Names, outer_names, renamed
from glax.nn import MLSTM, RMSNorm, SwiGLU
from glax.nn.mlstm import initial_gates
from glax.nn.parts import EMBED, HEADS, for_rows, linear, parameter

# The names of the parts by weight_mode: each projection apart, or those of one kind in one tensor.
MIXER = {
    "single": {
        "query": "q", "key": "k", "value": "v", "output_gate": "ogate_preact", "input_gate": "igate_preact",
        "forget_gate": "fgate_preact",
    },
    "fused": {"qkvo": "qkv_opreact", "gates": "ifgate_preact"},
}  # fmt: skip
MLP = {
    "single": {"gate": "proj_up_gate", "up": "proj_up", "down": "proj_down"},
    "fused": {"input": "proj_up_gate_z", "output": "proj_down"},
}
KERNELS = (
    "chunk_size",
    "chunkwise_kernel",
    "max_inference_chunksize",
    "return_last_states",
    "sequence_kernel",
    "step_kernel",
)


class FusedMLSTM(MLSTM):
    """Compute `glax.nn.MLSTM` with two projections: one for q, k, v and the output's gate, one for the input gate and the
    forget gate."""

    def make_projections(self, bias: bool, kernel_init, **options):
        wide, H = 2 * self.num_heads * (self.key_width + self.value_width), self.num_heads
        self.qkvo = linear(self.width, wide, (EMBED, HEADS), bias=bias, kernel_init=kernel_init, **options)
        zeros = nnx.initializers.zeros
        self.gates = linear(self.width, 2 * H, (EMBED, HEADS), bias=True, kernel_init=zeros, **options)
        assert self.gates.bias is not None
        self.gates.bias[...] = initial_gates(H).reshape(-1).astype(self.gates.bias.dtype)

    def projected(self, x: Float[Array, "*rows width"]) -> list[Array]:
        keys, values = self.num_heads * self.key_width, self.num_heads * self.value_width
        wide = jnp.split(self.qkvo(x), [keys, 2 * keys, 2 * keys + values], axis=-1)
        return [*wide, *jnp.split(self.gates(x), 2, axis=-1)]


class BiasedRMSNorm(RMSNorm):
    """Compute RMSNorm(x) + bias, with bias [width]."""

    def __init__(self, width: int, *, param_dtype, **options):
        super().__init__(width, param_dtype=param_dtype, **options)
        self.bias = parameter(jnp.zeros(width, param_dtype), None)

    def scaled(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = super().scaled(x)
        return y + for_rows(y, self.bias[...])


def head_width(options: Options, key: str, default: float, width: int, count: int) -> int:
    """Return the width of a head, (the option `key`) * width / count. The option is the width of all `count` heads as a share
    of hidden_size. default: its value for a config that lacks it. Raises UnsupportedOption if count does not divide the
    width."""
    whole = rounded_width(key, width, options.number(key, default, above=0))
    if whole < count or whole % count:
        raise options.unsupported(key, f"num_heads={count} must divide the width {whole} that it gives")
    return whole // count


def mlp_width(options: Options, width: int) -> int:
    """Return the inner width of an MLP: the integer part of hidden_size * ffn_proj_factor, rounded up to a multiple of
    ffn_round_up_to_multiple_of."""
    multiple = options.integer("ffn_round_up_to_multiple_of", 64)
    factor = options.number("ffn_proj_factor", 2.667, above=0)
    rounded_width("ffn_proj_factor", width, factor)
    return int((width * factor + multiple - 1) // multiple * multiple)


def xlstm(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an xLSTM model of mLSTM blocks. Raises UnsupportedOption for an option that is not supported.

    Beck et al. 2025, https://arxiv.org/abs/2503.13427.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    layers = options.integer("num_blocks", layers, optional=True) or layers
    if options.integer("embedding_dim", width, optional=True) not in (None, width):
        raise options.unsupported("embedding_dim", f"it must be hidden_size={width}")
    count, form = options.integer("num_heads", 8), options.choice("weight_mode", "single", tuple(MIXER))
    bias, eps = options.flag("use_bias", False), options.number("norm_eps", 1e-6, least=0)
    sizes = dict(
        num_heads=count,
        key_width=head_width(options, "qk_dim_factor", 0.5, width, count),
        value_width=head_width(options, "v_dim_factor", 1.0, width, count),
        gate_cap=options.number("gate_soft_cap", 15.0, above=0),
        eps=options.number("eps", 1e-6, least=0),
    )
    inside, cap = mlp_width(options, width), options.number("output_logit_soft_cap", 30.0, above=0)
    vocabulary = options.integer("vocab_size", 50304)
    options.choice("mode", "inference", ("inference", "train"))  # its own code cannot run the third
    options.choice("inference_state_dtype", "float32", ("float32",))
    options.flag("norm_reduction_force_float32", True)
    options.ignore(*KERNELS, "autocast_kernel_dtype", "tie_word_embeddings", "add_out_norm")
    options.finish()

    deviation = (2 / (5 * width)) ** 0.5
    common: dict[str, Any] = dict(kernel_init=nnx.initializers.normal(deviation), **precision.options)
    norm_options: dict[str, Any] = dict(epsilon=eps, param_dtype=precision.param_dtype)
    norm = functools.partial(BiasedRMSNorm if bias else RMSNorm, width, **norm_options)
    mixer = functools.partial(MLSTM if form == "single" else FusedMLSTM, width, bias=bias, norm_eps=eps, **sizes)

    def mlp() -> nnx.Module:
        if form == "single":
            return SwiGLU(width, inside, bias=bias, **common)
        return DenseMLP(width, inside, act="silu", bias=bias, **common)

    blocks = [Block(norm(), mixer(**common), norm(), mlp()) for _ in range(layers)]
    for block in blocks:
        for output in (block.attn.output, block.mlp.down if form == "single" else block.mlp.output):
            drawn = nnx.initializers.normal(2 / layers / output.in_features**0.5)
            output.kernel[...] = drawn(precision.rngs.params(), output.kernel.shape, precision.param_dtype)
    mixer_rules = renamed("attn", MIXER[form] | {"norm": "multihead_norm", "output": "out_proj"})
    inner = (*mixer_rules, *renamed("mlp", MLP[form]), (r"\.attn\.", ".mlstm_layer."), (r"\.mlp\.", ".ffn."))
    outer = outer_names("backbone.embeddings", "backbone.blocks", "backbone.out_norm", "norm_mlstm", "norm_ffn")
    return CausalLM(
        config,
        blocks,
        RMSNorm(width, **norm_options),
        Names((*inner, *outer)),
        vocabulary=vocabulary,
        width=width,
        tied=False,
        precision=precision,
        deviation=deviation,
        logit_cap=cap,
    )
