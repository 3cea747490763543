"""Provide Mamba-2's mixer, a state-space model with one decay per head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax._src.solve.autodiff import SAVED_NAMES
from glax.nn.arguments import checked
from glax.nn.convolution import ShortConvolution
from glax.nn.layer import Layer
from glax.nn.norms import RMSNormGated
from glax.nn.parts import (
    EMBED,
    HEADS,
    activation,
    by_head,
    check_divides,
    for_rows,
    linear,
    merged,
    parameter,
)
from glax.nn.passes import Rows, State

# What the recurrence saves for its gradient.
SAVED = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


class Mamba2(Layer):
    """Compute Mamba-2's mixer. In every head h, of group h // (H / groups):

        z_t, (x_t, B_t, C_t), dt_t = W_in u_t                (x_t, B_t, C_t) behind one causal convolution and act
        dt_t = clip(softplus(dt_t + dt_bias), dt_limit)      A = -exp(A_log)
        S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T         y_t = S_t^T C_t + D x_t
        u'_t = W_out RMSNorm(y_t * SiLU(z_t))                the norm in each group

    width:       the width of u and u'. num_heads, head_width: H and V. state_width: K. groups: the number
             of groups of heads that share B and C; divides num_heads.
    conv_size, conv_bias: the size of the convolution, and whether it has a bias. bias: whether W_in and W_out have a bias.
    act:         the name of the function behind the convolution, as `glax.nn.linear_attention.Options` lists them.
    dt_limit:    the least and the greatest step.
    norm_eps:    the epsilon of the norm. norm_before_gate: whether u'_t is W_out (RMSNorm(y_t) * SiLU(z_t)) instead.
    use_norm:    whether there is a norm; u'_t = W_out (y_t * gate_fn(z_t)) if False.
    gate_fn:     the name of the function of z, for use_norm=False alone; act if None.
    norm_groups: how many parts of y are normalised separately; `groups` if None.
    per_channel_skip: whether D is [H V], one number per channel, rather than [H].
    A_range:     the range of the uniform first values of -A; -A starts as 1, 2, ..., H in the heads if None.
    dt_range, dt_floor: dt_bias starts as the inverse softplus of a step that is uniform in its logarithm over dt_range, and at
        least dt_floor.
    conv_init:   the convolution starts uniform within this number; as torch.nn.Conv1d does if None.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`.

    layer(u [B, T, width]) returns (u' [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors. The
    state of N sequences is a dict: S [N, H, K, V] in float32 as `recurrent`, and the last conv_size - 1 rows before the
    convolution, [N, conv_size - 1, H V + 2 groups K], as `conv`.

    Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    >>> layer = nn.Mamba2(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_width: int = 64,
        state_width: int = 128,
        groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        act: str = "silu",
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        norm_eps: float = 1e-5,
        norm_before_gate: bool = False,
        use_norm: bool = True,
        gate_fn: str | None = None,
        norm_groups: int | None = None,
        per_channel_skip: bool = False,
        A_range: tuple[float, float] | None = None,
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        conv_init: float | None = None,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        check_divides("groups", groups, "num_heads", num_heads)
        activation("act", act)
        activation("gate_fn", gate_fn)
        inside, states = num_heads * head_width, groups * state_width
        self.width, self.num_heads, self.head_width = width, num_heads, head_width
        self.state_width, self.groups, self.act = state_width, groups, act
        self.gate_fn = act if gate_fn is None else gate_fn
        self.dt_limit, self.recurrence = (float(dt_limit[0]), float(dt_limit[1])), recurrence
        options: dict[str, Any] = dict(
            bias=bias, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.input = linear(width, 2 * inside + 2 * states + num_heads, (EMBED, HEADS), **options)
        self.conv = ShortConvolution(
            inside + 2 * states,
            conv_size,
            bias=conv_bias,
            activation=act,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        if conv_init is not None:
            draw = jax.random.uniform(rngs.params(), self.conv.filter.shape, jnp.float32, -conv_init, conv_init)
            self.conv.filter[...] = draw.astype(param_dtype)
        self.dt_bias = parameter(initial_dt_bias(rngs, num_heads, dt_range, dt_floor).astype(param_dtype), HEADS)
        A = jnp.arange(1.0, num_heads + 1)
        if A_range is not None:
            A = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, *A_range)
        self.A_log = parameter(jnp.log(A).astype(param_dtype), HEADS)
        self.D = parameter(jnp.ones(inside if per_channel_skip else num_heads, param_dtype), HEADS)
        split = groups if norm_groups is None else norm_groups
        gated: dict[str, Any] = dict(
            norm_before_gate=norm_before_gate, gate_fn="silu", epsilon=norm_eps, param_dtype=param_dtype
        )
        self.norm = RMSNormGated(inside, groups=split, **gated) if use_norm else None
        self.output = linear(inside, width, (HEADS, EMBED), **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.num_heads, self.state_width, self.head_width)
        return dict(recurrent=jnp.zeros(shape, jnp.float32), conv=self.conv.initial_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        return self.scan(self.input(x), state, rows)

    def scan(self, projected: Float[Array, "*rows inputs"], state: State, rows: Rows) -> tuple[Array, State]:
        """Return the layer's output [*rows, width] and the new state, from the product W_in u instead of u. Models that scale
        the columns of W_in u call this method.

        projected: W_in u, [*rows, 2 H V + 2 groups K + H], the columns of z, x, B, C and dt in this order. state, rows: as in
        `glax.nn.layer.Layer.mix`.
        """
        inside, states = self.num_heads * self.head_width, self.groups * self.state_width
        _, xBC, dt = jnp.split(projected, [inside, 2 * inside + 2 * states], axis=-1)
        xBC, conv = self.conv.extend(xBC, state.get("conv"), rows)
        x, B, C = jnp.split(xBC, [inside, inside + states], axis=-1)
        x, B, C = by_head(x, self.num_heads), by_head(B, self.groups), by_head(C, self.groups)

        dt = jax.nn.softplus(dt.astype(jnp.float32) + for_rows(dt, self.dt_bias[...]))
        dt = jnp.clip(dt, *self.dt_limit)
        A = -jnp.exp(for_rows(dt, self.A_log[...]))
        before = state.get("recurrent")

        def recur(x, B, C, dt):
            v = (x.astype(jnp.float32) * dt[..., None]).astype(x.dtype)
            return rows.recurrent(self.recurrence, C, B, v, before, g=dt * A, softmax_scale=1.0)

        # v is formed again in the backward pass, from x, which is saved in any case.
        y, after = jax.checkpoint(recur, policy=SAVED)(x, B, C, dt)
        # Recomputed in the backward pass: else XLA keeps the product of y and the gate in float32 for every layer.
        return self.output(jax.checkpoint(self.gated)(y, x, projected)), dict(recurrent=after, conv=conv)

    def gated(
        self, y: Float[Array, "*rows H V"], x: Float[Array, "*rows H V"], projected: Float[Array, "*rows inputs"]
    ) -> Float[Array, "*rows inside"]:
        """Return what W_out multiplies, [*rows, H V]. With s = y + D x, merged over heads, it is:

            RMSNorm(s * SiLU(z))       by default
            RMSNorm(s) * SiLU(z)       with norm_before_gate
            s * gate_fn(z)             with use_norm=False

        y: S_t^T C_t. x: x_t, after the convolution. projected: as in `scan`; z is its first H V columns.
        """
        z = projected[..., : self.num_heads * self.head_width]
        wide = x.astype(jnp.float32)
        D = for_rows(wide, self.D[...].reshape(self.num_heads, -1))
        y = merged(y.astype(jnp.float32) + D * wide).astype(x.dtype)
        return y * activation("gate_fn", self.gate_fn)(z) if self.norm is None else self.norm(y, z)


def initial_dt_bias(rngs: nnx.Rngs, heads: int, span: tuple[float, float], floor: float) -> Float[Array, "H"]:
    """Return the first values of dt_bias [heads], in float32: softplus^-1(dt), where log(dt) is uniform over the logarithms of
    the two numbers in `span`, and dt is at least `floor`."""
    low, high = jnp.log(jnp.asarray(span, jnp.float32))
    dt = jnp.maximum(jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32) * (high - low) + low), floor)
    return dt + jnp.log(-jnp.expm1(-dt))
