"""Provide Mamba-1's mixer, a state-space model in which every entry of the state has a decay of its own."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax.nn.arguments import checked
from glax.nn.convolution import ShortConvolution
from glax.nn.layer import Layer
from glax.nn.mamba2 import initial_dt_bias
from glax.nn.norms import RMSNorm
from glax.nn.parts import EMBED, HEADS, activation, for_rows, linear, parameter
from glax.nn.passes import Rows, State

PART_NORMS = (None, "scaled", "plain")
FIRST_STEPS = ("random", "constant")


class Mamba1(Layer):
    """Compute Mamba-1's mixer. For every channel, with a state h [N]:

        x'_t, z_t = W_in u_t                                 x_t = act(conv(x')_t)
        dt_t, B_t, C_t = W_x x_t                             then an RMSNorm of each with part_norm
        dt_t = softplus(W_dt dt_t + dt_bias)                 A = -exp(A_log)
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t             y_t = C_t^T h_t + D x_t
        u'_t = W_out (y_t * SiLU(z_t))

    width:       the width of u and u'. inside: the number of channels of x and z; 2 width if None.
    state_width: N. rank: the rows of W_dt; width / 16, rounded up, if None.
    conv_size, conv_bias: the size of the causal convolution, and whether it has a bias. act: the name of the function after it,
    as `glax.nn.linear_attention.Options` lists them.
    bias:        whether W_in and W_out have a bias.
    part_norm:   "scaled" for RMSNorms with a scale, "plain" for RMSNorms without one, None for none. norm_eps: their epsilon.
    dt_init, dt_scale: with b = dt_scale / sqrt(rank), W_dt starts uniform from -b to b if "random", and as b if "constant".
    dt_range, dt_floor: as in `glax.nn.Mamba2`.

    dtype, param_dtype and kernel_init are as in `glax.nn.linear_attention.MixerOptions`.

    layer(u [B, T, width]) returns (u' [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors. The
    state of M sequences is a dict: h [M, inside, N] in float32 as `recurrent`, and the last conv_size - 1 rows of x', [M,
    conv_size - 1, inside], as `conv`. Raises ValueError for an unknown act, part_norm or dt_init.

    Gu and Dao 2023, https://arxiv.org/abs/2312.00752.

    >>> layer = nn.Mamba1(64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        inside: int | None = None,
        state_width: int = 16,
        rank: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        act: str = "silu",
        part_norm: str | None = None,
        norm_eps: float = 1e-6,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        activation("act", act)
        for name, given, known in (("part_norm", part_norm, PART_NORMS), ("dt_init", dt_init, FIRST_STEPS)):
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}")
        inside = 2 * width if inside is None else inside
        rank = math.ceil(width / 16) if rank is None else rank
        self.width, self.inside, self.state_width, self.rank = width, inside, state_width, rank
        common: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.input = linear(width, 2 * inside, (EMBED, HEADS), bias=bias, kernel_init=kernel_init, **common)
        self.conv = ShortConvolution(inside, conv_size, bias=conv_bias, activation=act, **common)
        self.parts = linear(inside, rank + 2 * state_width, (HEADS, None), kernel_init=kernel_init, **common)
        first = dt_scale * rank**-0.5
        self.dt = linear(rank, inside, (None, HEADS), kernel_init=nnx.initializers.constant(first), **common)
        if dt_init == "random":
            draw = jax.random.uniform(rngs.params(), (rank, inside), jnp.float32, -first, first)
            self.dt.kernel[...] = draw.astype(param_dtype)
        self.dt_bias = parameter(initial_dt_bias(rngs, inside, dt_range, dt_floor).astype(param_dtype), HEADS)
        A = jnp.broadcast_to(jnp.arange(1.0, state_width + 1), (inside, state_width))
        self.A_log = parameter(jnp.log(A).astype(param_dtype), HEADS, None)
        self.D = parameter(jnp.ones(inside, param_dtype), HEADS)
        scaled: dict[str, Any] = dict(
            epsilon=norm_eps, elementwise_affine=part_norm == "scaled", param_dtype=param_dtype
        )
        self.dt_norm, self.B_norm, self.C_norm = (
            None if part_norm is None else RMSNorm(size, **scaled) for size in (rank, state_width, state_width)
        )
        self.output = linear(inside, width, (HEADS, EMBED), bias=bias, kernel_init=kernel_init, **common)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.inside, self.state_width)
        return dict(recurrent=jnp.zeros(shape, jnp.float32), conv=self.conv.initial_state(batch))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        x, z = jnp.split(self.input(x), 2, axis=-1)
        x, conv = self.conv.extend(x, state.get("conv"), rows)
        parts = jnp.split(self.parts(x), [self.rank, self.rank + self.state_width], axis=-1)
        norms = (self.dt_norm, self.B_norm, self.C_norm)
        dt, B, C = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        dt = self.dt(dt)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + for_rows(dt, self.dt_bias[...]))
        A = -jnp.exp(self.A_log[...].astype(jnp.float32))
        y, after = rows.selective_scan(x, dt, A, B, C, self.D[...], state.get("recurrent"))
        return self.output(y * jax.nn.silu(z)), dict(recurrent=after, conv=conv)
