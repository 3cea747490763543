"""Build Qwen3-Next: Gated DeltaNet, gated softmax attention with partial rotation, and experts in all or some layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    LINEAR,
    SOFTMAX,
    TRAINING,
    are_layers,
    attention_sizes,
    experts_per_token,
    hidden_act,
    layer_kinds,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    GATED_MLP,
    NORMED_ATTENTION,
    Names,
    mixer_names,
    outer_names,
    renamed,
    stacked_experts,
    transposed_layouts,
)
from glax.models.rope import rotation
from glax.nn import RMSNorm, RMSNormGated, ShortConvolution, SwiGLU
from glax.nn.delta import initial_A_log, log_decay
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP
from glax.nn.parts import EMBED, HEADS, by_head, linear, merged, parameter
from glax.nn.passes import Rows, State

MIXERS = {
    SOFTMAX: ("self_attn", NORMED_ATTENTION),
    LINEAR: (
        "linear_attn",
        {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "conv": "conv1d", "output": "out_proj"},
    ),
}
MLPS = (
    *renamed("mlp", GATED_MLP),
    (r"\.mlp\.router$", ".mlp.gate.router"),
    *((rf"\.mlp\.experts\.{old}$", rf".mlp.experts.*.{new}.{old}") for old, new in GATED_MLP.items()),
    (r"\.mlp\.shared\.mlp\.", ".mlp.shared_expert."),
    (r"\.mlp\.shared\.strength\.", ".mlp.shared_expert_gate."),
)


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Hold the sizes of a Gated DeltaNet.

    num_heads: the heads of v, the gates and the state. num_qk_heads: the heads of q and k. key_width, value_width: K and V of a
    head. conv_size: the rows that the convolution reads. `keys` and `values` are the widths of all heads together.
    """

    num_heads: int
    num_qk_heads: int
    key_width: int
    value_width: int
    conv_size: int

    @property
    def keys(self) -> int:
        return self.num_qk_heads * self.key_width

    @property
    def values(self) -> int:
        return self.num_heads * self.value_width


class FusedGatedDeltaNet(Layer):
    """Compute `glax.nn.GatedDeltaNet` with two projections and one convolution, as in checkpoints of Qwen3-Next.

    W_qkvz has the rows of q, k, v and the output's gate z, ordered by head of q and k: each such head is followed by its heads
    of v and z. W_ba has the rows of beta and the step size in the same order. The convolution reads q, k and v of all heads, in
    this order. act: the activation behind it. gate_act: the activation of z.
    """

    A_range = (0.01, 16.0)  # of the uniform first values of exp(A_log)

    def __init__(
        self,
        width: int,
        sizes: DeltaSizes,
        *,
        act: str,
        gate_act: str = "silu",
        norm_eps: float,
        kernel_init,
        dtype,
        param_dtype,
        rngs,
    ):
        self.width, self.sizes, self.recurrence = width, sizes, recurrent
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.make_projections(kernel_init=kernel_init, **options)
        conv: dict[str, Any] = dict(activation=act, filter_init=kernel_init)
        self.conv = ShortConvolution(2 * sizes.keys + sizes.values, sizes.conv_size, **conv, **options)
        self.A_log = parameter(initial_A_log(rngs, sizes.num_heads, self.A_range).astype(param_dtype), HEADS)
        self.dt_bias = parameter(jnp.ones(sizes.num_heads, param_dtype), HEADS)
        self.norm = RMSNormGated(sizes.value_width, gate_fn=gate_act, epsilon=norm_eps, param_dtype=param_dtype)
        self.output = linear(sizes.values, width, (HEADS, EMBED), kernel_init=kernel_init, **options)

    def make_projections(self, **options):
        """Create all projections but the output's. options: further arguments of `glax.nn.parts.linear`."""
        sizes = self.sizes
        self.qkvz = linear(self.width, 2 * (sizes.keys + sizes.values), (EMBED, HEADS), **options)
        self.ba = linear(self.width, 2 * sizes.num_heads, (EMBED, HEADS), **options)

    @property
    def state_passes(self) -> int:
        return 3  # the delta rule reads the state before it writes it

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.sizes.num_heads, self.sizes.key_width, self.sizes.value_width)
        return dict(recurrent=jnp.zeros(shape, jnp.float32), conv=self.conv.initial_state(batch))

    def projected(self, x: Float[Array, "*rows width"]) -> list[Array]:
        """Return [q, k and v of all heads joined, in this order, [*rows, 2 Hq K + H V]; z [*rows, H V]; the input of beta
        [*rows, H]; the input of the step size [*rows, H]]."""
        sizes, groups = self.sizes, self.sizes.num_qk_heads
        K, V = sizes.key_width, sizes.values // groups
        q, k, v, z = map(merged, jnp.split(by_head(self.qkvz(x), groups), [K, 2 * K, 2 * K + V], axis=-1))
        b, a = map(merged, jnp.split(by_head(self.ba(x), groups), 2, axis=-1))
        return [jnp.concatenate([q, k, v], -1), z, b, a]

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        sizes = self.sizes
        qkv, z, b, a = self.projected(x)
        qkv, conv = self.conv.extend(qkv, state.get("conv"), rows)
        q, k, v = jnp.split(qkv, [sizes.keys, 2 * sizes.keys], axis=-1)
        q, k, v = by_head(q, sizes.num_qk_heads), by_head(k, sizes.num_qk_heads), by_head(v, sizes.num_heads)
        g, beta = log_decay(a, self.A_log[...], self.dt_bias[...]), jax.nn.sigmoid(b.astype(jnp.float32))
        more: dict[str, Any] = dict(g=g, beta=beta, use_qk_l2norm=True)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), **more)
        y = self.output(merged(self.norm(o, by_head(z, sizes.num_heads))))
        return y, dict(recurrent=after, conv=conv)


class SharedExpert(nnx.Module):
    """Compute y = sigmoid(w^T x) mlp(x), with w [D] for x [*rows, D]. options: further arguments of `glax.nn.parts.linear` for
    w."""

    def __init__(self, width: int, mlp: SwiGLU, **options):
        self.mlp, self.strength = mlp, linear(width, 1, (EMBED, None), **options)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return jax.nn.sigmoid(self.strength(x)) * self.mlp(x)


def sparse_layers(options: Options, layers: int) -> list[bool]:
    """Return whether each layer has experts."""
    dense, step = options.take("mlp_only_layers", None) or [], options.integer("decoder_sparse_step", 1)
    if not are_layers(dense, layers):
        raise options.unsupported("mlp_only_layers", f"it must hold layers from 0 to {layers - 1}")
    count = options.integer("num_experts", 512, least=0)
    return [bool(count) and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def delta_sizes(options: Options, keys: int = 16, values: int = 32) -> DeltaSizes:
    """Return the sizes of a Gated DeltaNet. keys, values: the numbers of heads for a config that lacks them."""
    keys, values = options.integer("linear_num_key_heads", keys), options.integer("linear_num_value_heads", values)
    if values % keys:
        raise options.unsupported("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads={keys}")
    return DeltaSizes(
        num_heads=values,
        num_qk_heads=keys,
        key_width=options.integer("linear_key_head_dim", 128),
        value_width=options.integer("linear_value_head_dim", 128),
        conv_size=options.integer("linear_conv_kernel_dim", 4),
    )


def mlps(options: Options, width: int, act: str, init, precision: Precision) -> tuple[Callable, Callable]:
    """Return (a function that makes the MLP of a layer without experts, one that makes the MLP of a layer with experts)."""
    inside, shared = options.integer("intermediate_size", 5632), options.integer("shared_expert_intermediate_size", 512)
    each, count = options.integer("moe_intermediate_size", 512), options.integer("num_experts", 512, least=0)
    top_k = experts_per_token(options, 10, "num_experts", count)
    normalize = options.flag("norm_topk_prob", True)
    common: dict[str, Any] = dict(kernel_init=init, **precision.options)

    def dense(inside: int = inside) -> SwiGLU:
        return SwiGLU(width, inside, activation=act, **common)

    def sparse() -> SparseMLP:
        always = SharedExpert(width, dense(shared), **common)
        return SparseMLP(width, each, count, top_k, act=act, normalize=normalize, shared=always, **common)

    return dense, sparse


def qwen3_next(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Qwen3-Next model. Layers of multi-token prediction are not read. Raises UnsupportedOption for an option that is
    not supported.

    Qwen Team 2025, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2048), options.integer("num_hidden_layers", 48)
    outer, init = outer_options(options, precision, 151936)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    every = options.integer("full_attention_interval", 4)
    usual = [LINEAR if (layer + 1) % every else SOFTMAX for layer in range(layers)]
    kinds, is_sparse = layer_kinds(options, ("layer_types",), layers, usual), sparse_layers(options, layers)
    options.ignore(*TRAINING)
    sizes = attention_sizes(options, width, heads=16, kv_heads=2, head_width=256)
    rope, bias = rotation(options, 10000.0, 32768, 0.25), options.flag("attention_bias", False)
    delta, (dense, sparse) = delta_sizes(options), mlps(options, width, act, init, precision)
    options.finish()

    norm = functools.partial(RMSNorm, width, epsilon=eps, zero_centred=True, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == LINEAR:
            return FusedGatedDeltaNet(width, delta, act=act, norm_eps=eps, kernel_init=init, **precision.options)
        more = dict(bias=bias, output_bias=bias, gated=True, qk_norm=True, zero_centred=True, norm_eps=eps)
        return softmax_attention(width, sizes, rope, init, precision, **more)

    blocks = [
        Block(norm(), mixer(kind), norm(), sparse() if has_experts else dense())
        for kind, has_experts in zip(kinds, is_sparse, strict=True)
    ]
    rules = (*mixer_names(kinds, MIXERS), *MLPS, *outer_names())
    stacked = stacked_experts(r"model\.layers\.\d+\.mlp")
    names = Names(rules, layouts=transposed_layouts("router", *GATED_MLP), stacked=stacked, others=(r"^mtp\.",))
    return CausalLM(config, blocks, norm(), names, width=width, **outer)
