"""Build Zamba: Mamba-1 layers of several heads, some behind a transformer block that they share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import TRAINING, hidden_act, layer_kinds
from glax.models.mamba import step_rank
from glax.models.mamba2 import first_steps
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import GATED_MLP, Names, one_of
from glax.models.zamba2 import (
    HYBRID,
    KINDS,
    PLAIN,
    HybridBlock,
    SharedAttention,
    SharedBlock,
    SharedBlocksLM,
    ZambaBlock,
    check_derived,
    outer_rules,
    uses_of,
)
from glax.nn import RMSNorm, ShortConvolution, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mamba2 import initial_dt_bias
from glax.nn.parts import EMBED, HEADS, by_head, for_rows, linear, parameter
from glax.nn.passes import Rows, State

MAMBA = {
    "input": "in_proj",
    "conv": "conv1d",
    "output": "out_proj",
    "parts": "x_proj_weight",
    "dt": "dt_proj_weight",
    "dt_bias": "dt_proj_bias",
}
# Its own code reads them, and they change nothing that it computes.
IGNORED = ("max_position_embeddings", "use_associative_scan", "use_mamba_kernels")


class HeadMamba1(Layer):
    """Compute `glax.nn.Mamba1`'s mixer in heads. Each head h of channels has projections and a scan of its own:

        x'_ti, z_ti = rows 2 i and 2 i + 1 of W_in u_t       x = act(conv(x'))
        dt_t, B_t, C_t = W_x^h x_t^h                         dt_t = softplus(W_dt^h dt_t + dt_bias^h)

    The state is a dict: of head i [M, inside / heads, N] in float32 as `recurrent_i`, and the last rows of x' as `conv`.

    Glorioso et al. 2024, https://arxiv.org/abs/2405.16712.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        inside: int,
        state_width: int,
        rank: int,
        conv_size: int,
        conv_bias: bool,
        bias: bool,
        act: str,
        dt_range: tuple[float, float],
        dt_floor: float,
        kernel_init: Callable,
        **options: Any,
    ):
        rngs, dtype = options["rngs"], options["param_dtype"]
        self.width, self.heads, self.inside, self.state_width, self.rank = width, heads, inside, state_width, rank
        of_head = inside // heads
        self.input = linear(width, 2 * inside, (EMBED, HEADS), bias=bias, kernel_init=kernel_init, **options)
        self.conv = ShortConvolution(
            inside, conv_size, bias=conv_bias, activation=act, filter_init=kernel_init, **options
        )
        self.parts = parameter(
            kernel_init(rngs.params(), (heads, rank + 2 * state_width, of_head), dtype), HEADS, None, None
        )
        drawn = jax.random.uniform(rngs.params(), (heads, of_head, rank), jnp.float32, -(rank**-0.5), rank**-0.5)
        self.dt = parameter(drawn.astype(dtype), HEADS, None, None)
        self.dt_bias = parameter(
            initial_dt_bias(rngs, inside, dt_range, dt_floor).reshape(heads, of_head).astype(dtype), HEADS, None
        )
        A = jnp.broadcast_to(jnp.arange(1.0, state_width + 1), (heads, of_head, state_width))
        self.A_log = parameter(jnp.log(A).astype(dtype), HEADS, None, None)
        self.D = parameter(jnp.ones((heads, of_head), dtype), HEADS, None)
        self.output = linear(inside, width, (HEADS, EMBED), bias=bias, kernel_init=kernel_init, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.inside // self.heads, self.state_width)
        states = {f"recurrent_{head}": jnp.zeros(shape, jnp.float32) for head in range(self.heads)}
        return states | dict(conv=self.conv.initial_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        both = self.input(x)
        both = both.reshape(*both.shape[:-1], self.inside, 2)
        x, conv = self.conv.extend(both[..., 0], state.get("conv"), rows)
        # A scan has one B and one C for all its channels, so that each head is a scan of its own.
        found, after = [], dict(conv=conv)
        for head in range(self.heads):
            name, own = f"recurrent_{head}", by_head(x, self.heads)[..., head, :]
            parts = own @ self.parts[head].T.astype(own.dtype)
            dt, B, C = jnp.split(parts, [self.rank, self.rank + self.state_width], axis=-1)
            dt = dt @ self.dt[head].T.astype(dt.dtype)
            dt = jax.nn.softplus(dt.astype(jnp.float32) + for_rows(dt, self.dt_bias[head]))
            A = -jnp.exp(self.A_log[head].astype(jnp.float32))
            y, after[name] = rows.selective_scan(own, dt, A, B, C, self.D[head], state.get(name))
            found.append(y)
        return self.output(jnp.concatenate(found, -1) * jax.nn.silu(both[..., 1])), after


def zamba(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Zamba model. Raises UnsupportedOption for an option that is not supported.

    Glorioso et al. 2024, https://arxiv.org/abs/2405.16712.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 3712), options.integer("num_hidden_layers", 76)
    outer, init = outer_options(options, precision, 32000, tied=True, pad=0)
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options, default="gelu")
    kinds = layer_kinds(options, ("layers_block_type", "layer_types"), layers, usual_kinds(options, layers), KINDS)
    attention, mixer = attention_arguments(options, width), mamba_arguments(options, width)
    inside = options.integer("intermediate_size", 14848)
    options.ignore(*IGNORED, *TRAINING)
    options.finish()
    built: dict[str, Any] = dict(kernel_init=init, **precision.options)

    def norm(size: int = width) -> RMSNorm:
        return RMSNorm(size, epsilon=eps, param_dtype=precision.param_dtype)

    def shared() -> SharedBlock:
        attn = SharedAttention(2 * width, theta=None, **attention, **built)
        return SharedBlock(norm(2 * width), attn, norm(), SwiGLU(width, inside, activation=act, **built))

    def block(use: int | None) -> ZambaBlock | HybridBlock:
        if use is None:
            return ZambaBlock(norm(), HeadMamba1(width, **mixer, **built))
        projection = linear(width, width, (EMBED, None), **built)
        return HybridBlock(norm(), HeadMamba1(width, **mixer, **built), projection, adapters={}, unread={})

    uses = uses_of(kinds, 1 if outer["tied"] else kinds.count(HYBRID))  # its own code ties all weights, or none
    blocks, several = [block(use) for use in uses], [shared() for _ in range(len(set(uses) - {None}))]
    return SharedBlocksLM(config, blocks, norm(), names_of(uses), width=width, shared=several, uses=uses, **outer)


def usual_kinds(options: Options, layers: int) -> list[str]:
    """Return the kind of each layer, PLAIN or HYBRID, for a config that does not list the kinds."""
    period, offset = options.integer("attn_layer_period", 6), options.integer("attn_layer_offset", 4, least=0)
    return [PLAIN, PLAIN, HYBRID] + [HYBRID if i % period == offset else PLAIN for i in range(layers - 3)]


def attention_arguments(options: Options, width: int) -> dict[str, Any]:
    """Return the arguments of SharedAttention, whose input is twice as wide as the model."""
    heads = options.integer("num_attention_heads", 16)
    kv_heads = options.divisor("num_key_value_heads", 16, "num_attention_heads", heads)
    usual = 2 * width // heads
    head_width = options.integer("attention_head_dim", None, optional=True) or usual
    head_width = options.integer("head_dim", None, optional=True) or head_width
    check_derived(options, dict(attention_hidden_size=2 * width))
    return dict(num_heads=heads, num_kv_heads=kv_heads, head_width=head_width, scale=(head_width / 2) ** -0.5)


def mamba_arguments(options: Options, width: int) -> dict[str, Any]:
    """Return the arguments of HeadMamba1."""
    inside, heads = options.integer("mamba_expand", 2) * width, options.integer("n_mamba_heads", 2)
    if inside % heads:
        raise options.unsupported("n_mamba_heads", f"it must divide mamba_expand * hidden_size={inside}")
    return dict(
        heads=heads,
        inside=inside,
        state_width=options.integer("mamba_d_state", 16),
        rank=step_rank(options, "mamba_dt_rank", width),
        conv_size=options.integer("mamba_d_conv", 4),
        conv_bias=options.flag("mamba_conv_bias", True),
        bias=options.flag("mamba_proj_bias", False),
        act=hidden_act(options, "hidden_mamba_act"),
        **first_steps(options),
    )


def names_of(uses: list[int | None]) -> Names:
    """Return the `Names` of the parameters. uses: for each layer the number of its shared block, or None. A shared block is
    stored in the first layer that uses it."""
    hybrids = [layer for layer, use in enumerate(uses) if use is not None]
    first = {use: uses.index(use) for use in uses if use is not None}
    copies = one_of(layer for layer in hybrids if layer not in first.values())
    rules = [(rf"^(blocks\.{one_of(hybrids)})\.(?=mamba|mixer_norm)", r"\1.mamba_decoder.")]
    rules += [(rf"^shared\.{use}\.", f"model.layers.{layer}.shared_transf.") for use, layer in first.items()]
    rules += outer_rules("shared_transf", GATED_MLP, MAMBA)
    # The copies of a shared block, which the model's own code also replaces by the first.
    return Names(tuple(rules), ignored=(rf"^model\.layers\.{copies}\.shared_transf\.",))
