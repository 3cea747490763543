"""Provide the recurrent block of Griffin, whose channels are recurrences of their own with gates of heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax.nn.arguments import checked
from glax.nn.convolution import ShortConvolution
from glax.nn.hgrn import of_channels
from glax.nn.layer import Layer
from glax.nn.parts import EMBED, HEADS, activation, by_head, check_divides, for_rows, linear, merged, parameter
from glax.nn.passes import Rows, State

STEEPNESS = 8.0  # of log decays, where a gate is 1
STEEPEST = 1000.0  # the greatest derivative of `root`


@jax.custom_jvp
def root(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Return sqrt(x), with a derivative of at most STEEPEST: the derivative of sqrt has no bound towards x = 0, where a decay
    is 1."""
    return jnp.sqrt(x)


@root.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return root(x), dx * jax.lax.rsqrt(jnp.maximum(4 * x, STEEPEST**-2))


class HeadLinear(nnx.Module):
    """Compute W_h x_h + b_h for each head: weight [H, D / H, D / H] and bias [H, D / H]. Sums are float32."""

    def __init__(self, width: int, heads: int, *, kernel_init: Callable, dtype, param_dtype, rngs: nnx.Rngs):
        self.dtype, shape = dtype, (heads, width // heads, width // heads)
        self.weight = parameter(kernel_init(rngs.params(), shape, param_dtype), HEADS, None, None)
        self.bias = parameter(jnp.zeros(shape[:2], param_dtype), HEADS, None)

    def __call__(self, x: Float[Array, "*rows H width"]) -> Float[Array, "*rows H width"]:
        x = x if self.dtype is None else x.astype(self.dtype)
        y = jnp.einsum("...hi,hij->...hj", x, self.weight[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return y + for_rows(y, self.bias[...])


def log_rates(key, shape: tuple[int], dtype) -> Float[Array, "D"]:
    """Return the first values of p, with which exp(-softplus(p)) is the root of a uniform number from .9^2 to .999^2."""
    squares = jax.random.uniform(key, shape, jnp.float32, 0.9**2 + 1e-8, 0.999**2 + 1e-8)
    return jnp.log(jnp.expm1(-0.5 * jnp.log(squares))).astype(dtype)


class RGLRU(Layer):
    """Compute the recurrent block of Griffin, with the real-gated linear recurrent unit, one recurrence a channel:

        u_t = conv(W_x x_t)            r_t = sigmoid(A_r u_t + b_r)      i_t = sigmoid(A_i u_t + b_i)
        log a_t = -8 softplus(p) r_t   h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * i_t * u_t
        y_t = W_o (h_t * act(W_y x_t))

    The first token of a sequence has no factor sqrt(1 - a_t^2). A_r and A_i are one matrix for each head. W_x, W_y and W_o have
    biases. The parameters are decay_gate (A_r), input_gate (A_i), input (W_x), gate (W_y), output (W_o) and rate (p). The
    derivative of the root is at most 1000.

    width: the width of x and y. num_heads: the heads of the gates. inside: D, the width of u and h; width if None.
    conv_size: of the convolution, which has a bias and no activation. act: a name of `glax.nn.parts.ACTIVATIONS`.
    filter_init, gate_init: the first values of the filter and of A_r and A_i; normal with a deviation of .02 if None.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict of h [N, D] in float32 as `recurrent`, of the last conv_size - 1 rows before the convolution, [N,
    conv_size - 1, D], as `conv`, and of the number of tokens, [N], as `length`.

    De et al. 2024, https://arxiv.org/abs/2402.19427.

    >>> layer = nn.RGLRU(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        inside: int | None = None,
        conv_size: int = 4,
        act: str = "gelu",
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        filter_init: Callable | None = None,
        gate_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        inside = width if inside is None else inside
        check_divides("num_heads", num_heads, "inside", inside)
        activation("act", act)  # raises ValueError for an unknown name
        self.width, self.inside, self.num_heads, self.act, self.recurrence = width, inside, num_heads, act, recurrence
        usual = nnx.initializers.normal(0.02)
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate, self.input = (
            linear(width, inside, (EMBED, HEADS), bias=True, kernel_init=kernel_init, **options) for _ in range(2)
        )
        self.conv = ShortConvolution(
            inside, conv_size, bias=True, activation=None, filter_init=filter_init or usual, **options
        )
        self.input_gate, self.decay_gate = (
            HeadLinear(inside, num_heads, kernel_init=gate_init or usual, **options) for _ in range(2)
        )
        self.rate = parameter(log_rates(rngs.params(), (inside,), param_dtype), HEADS)
        self.output = linear(inside, width, (HEADS, EMBED), bias=True, kernel_init=kernel_init, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(
            recurrent=jnp.zeros((batch, self.inside), jnp.float32),
            conv=self.conv.initial_state(batch),
            length=jnp.zeros(batch, jnp.int32),
        )

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        positions, length = rows.positions(state.get("length"))
        u, filtered = self.conv.extend(self.input(x), state.get("conv"), rows)
        heads = by_head(u, self.num_heads)
        entering, r = (jax.nn.sigmoid(merged(gate(heads))) for gate in (self.input_gate, self.decay_gate))
        g = -STEEPNESS * r * for_rows(u, jax.nn.softplus(self.rate[...].astype(jnp.float32)))
        factor = jnp.where((positions == 0)[..., None], 1.0, root(-jnp.expm1(2 * g)))
        v = (u.astype(jnp.float32) * entering * factor).astype(u.dtype)
        h, after = of_channels(self.recurrence, v, g, state.get("recurrent"), rows)
        y = self.output(h * activation("act", self.act)(self.gate(x)))
        return y, dict(recurrent=after, conv=filtered, length=length)
