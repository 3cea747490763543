"""Compute the short causal convolution along the sequence that many of these models have."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.parts import HEADS, Initializer, activation, for_rows, parameter
from glax.nn.passes import Rows, State


def uniform_filter(key, shape: tuple[int, int], dtype) -> Float[Array, "size width"]:
    """Return the first values of a filter [size, width], uniform between -1 / sqrt(size) and 1 / sqrt(size).

    torch.nn.Conv1d with one input channel per group draws its filter in the same way.
    """
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class ShortConvolution(Layer):
    """Compute a depthwise causal convolution:   y_t = act(sum over i of filter[i] * x_{t - (size - 1 - i) dilation} + bias).

    The parameter filter is [size, width]; filter[size - 1] multiplies row t itself. The rows before a sequence's first are its
    state, or zeros without one. Packed sequences do not read each other's rows. Sums are float32. Over sequence shards of a mesh,
    jit exchanges (size - 1) dilation rows.

    width:       the channels of x and y. size: how many rows a row reads, itself included. dilation: the distance of these rows.
    bias:        whether there is a bias [width], which starts as 0.
    activation:  the name of act in `glax.nn.parts.ACTIVATIONS`; none if None.
    filter_init: a function (key, shape, dtype) that returns the first values of the filter; if None, they are uniform within
        1 / sqrt(size), as in torch.nn.Conv1d.
    dtype:       the dtype of the empty state; float32 if None. param_dtype: the dtype of the parameters.

    layer(x [B, T, width]) returns (y [B, T, width] in the dtype of x, state). The state is the last
    (size - 1) dilation rows of x, [N, (size - 1) dilation, width]. `glax.nn.layer.Layer` has decoding and errors.

    >>> layer = nn.ShortConvolution(64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        size: int = 4,
        *,
        dilation: int = 1,
        bias: bool = False,
        activation: str | None = "silu",
        filter_init: Initializer | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.width, self.size, self.dilation, self.activation, self.dtype = width, size, dilation, activation, dtype
        self.act(jnp.zeros(()))  # raises ValueError for an unknown name
        init = uniform_filter if filter_init is None else filter_init
        self.filter = parameter(init(rngs.params(), (size, width), jnp.float32).astype(param_dtype), None, HEADS)
        self.bias = parameter(jnp.zeros(width, param_dtype), HEADS) if bias else None

    def act(self, x: Array) -> Array:
        """Return act(x), the activation that the constructor names."""
        return activation("activation", self.activation)(x)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        rows = (self.size - 1) * self.dilation
        return dict(recurrent=jnp.zeros((batch, rows, self.width), self.dtype or jnp.float32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        y, after = self.extend(x, state.get("recurrent"), rows)
        return y, dict(recurrent=after)

    def extend(self, x: Float[Array, "*rows width"], before: Array | None, rows: Rows) -> tuple[Array, Array]:
        """Return y [*rows, width] in the dtype of x, and the new state. Layers that contain a convolution call this method.

        before: the state before the first rows, [N, (size - 1) dilation, width]; zeros if None. The new state has its shape.
        rows: as in `glax.nn.layer.Layer.mix`.
        """
        views, after = rows.window(x, (self.size - 1) * self.dilation + 1, before)
        views = views[:: self.dilation]
        y = jnp.asarray(sum(view.astype(jnp.float32) * for_rows(x, self.filter[i]) for i, view in enumerate(views)))
        y = y if self.bias is None else y + for_rows(y, self.bias[...])
        return self.act(gradient_in(x.dtype, y)).astype(x.dtype), after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient_in(dtype, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x unchanged. The gradient is rounded to `dtype`, and then has the dtype of x again.

    Memory holds the rounded gradient, which the gradient of each of the filter's rows reads once.
    """
    return x


def _fwd(dtype, x):
    return x, None


def _bwd(dtype, _, d_x):
    # The barrier keeps XLA from joining the two conversions, which would leave the gradient in float32.
    return (jax.lax.optimization_barrier(d_x.astype(dtype)).astype(d_x.dtype),)


gradient_in.defvjp(_fwd, _bwd)
