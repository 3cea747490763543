"""Provide norms. Statistics are float32, and the result has the dtype of the input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.nn.arguments import checked
from glax.nn.parts import activation, by_head, check_divides, check_floats, for_rows, parameter


def normalized(x: Float[Array, "*rows D"], epsilon: float) -> Float[Array, "*rows D"]:
    """Return x / sqrt(mean(x^2) + epsilon), with the mean over the last axis."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def unit(x: Float[Array, "*rows K"], epsilon: float | Float[Array, "*rows 1"] = 1e-6) -> Float[Array, "*rows K"]:
    """Return x / sqrt(sum x^2 + epsilon) over the last axis, and 0 where all is 0. Sums are float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    # Below a norm of 1e-12 the divisor stays, as in PyTorch's normalize, which has no epsilon.
    return (wide * jax.lax.rsqrt(jnp.maximum(jnp.square(wide).sum(-1, keepdims=True) + epsilon, 1e-24))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Compute y = scale x / sqrt(mean(x^2) + epsilon), over the last axis; scale [width], which starts as 1.

    width:   the size of the last axis of x. groups: how many equal parts of it are normalised separately.
    epsilon: a number of at least 0, added to the mean of squares.
    elementwise_affine: whether there is a scale. param_dtype: its dtype.
    zero_centred: whether the factor is 1 + scale, with a scale that starts as 0.
    rngs:    ignored; for calls like those of other modules.

    norm(x [..., width]) returns y in the shape and dtype of x; statistics are float32. Raises ValueError if groups do not divide
    width or the last axis of x has another size, and TypeError if x is not floating point.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.

    >>> norm = nn.RMSNorm(64)
    >>> norm(jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-6,
        groups: int = 1,
        elementwise_affine: bool = True,
        zero_centred: bool = False,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        check_divides("groups", groups, "width", width)
        self.width, self.epsilon, self.groups, self.zero_centred = width, epsilon, groups, zero_centred
        first = (jnp.zeros if zero_centred else jnp.ones)(width, param_dtype)
        self.scale = parameter(first, None) if elementwise_affine else None

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return y, in the shape and dtype of x [..., width]."""
        check_floats("x", x, self.width)
        return self.scaled(x.astype(jnp.float32)).astype(x.dtype)

    def scaled(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return x / sqrt(mean(x^2) + epsilon) times the scale, for float32 x, in float32."""
        y = normalized(by_head(x, self.groups), self.epsilon).reshape(x.shape)
        if self.scale is None:
            return y
        scale = for_rows(y, self.scale[...])
        return y * (1 + scale if self.zero_centred else scale)


class RMSNormGated(RMSNorm):
    """Compute y = RMSNorm(x) * act(gate), or RMSNorm(x * act(gate)) if norm_before_gate is False, as in Mamba-2.

    gate_fn: the name of act in `glax.nn.parts.ACTIVATIONS`; "swish" is SiLU, and None is the identity. width and the other
    options are as in RMSNorm.

    norm(x [..., width], gate of the same shape) returns y in the shape and dtype of x; without a gate y is the norm alone.
    Raises the errors of RMSNorm, and ValueError for a gate of another shape or an unknown gate_fn.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    >>> norm = nn.RMSNormGated(64)
    >>> norm(jnp.ones((16, 64)), gate=jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(self, width: int, *, norm_before_gate: bool = True, gate_fn: str | None = "swish", **options):
        activation("gate_fn", gate_fn)
        self.norm_before_gate, self.gate_fn = norm_before_gate, gate_fn
        super().__init__(width, **options)

    def __call__(
        self, x: Float[Array, "*rows D"], gate: Float[Array, "*rows D"] | None = None
    ) -> Float[Array, "*rows D"]:
        """Return y, in the shape and dtype of x [..., width]; the norm of x alone if gate is None."""
        check_floats("x", x, self.width)
        wide = x.astype(jnp.float32)
        if gate is None:
            return self.scaled(wide).astype(x.dtype)
        check_floats("gate", gate)
        if gate.shape != x.shape:
            raise ValueError(f"gate must have the shape of x, {x.shape}, got {gate.shape}")
        factor = activation("gate_fn", self.gate_fn)(gate.astype(jnp.float32))
        y = self.scaled(wide) * factor if self.norm_before_gate else self.scaled(wide * factor)
        return y.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Compute y = scale (x - mean) / sqrt(variance + epsilon) + bias, over the last axis.

    width, groups, rngs: as in `RMSNorm`. epsilon: a number of at least 0, added to the variance.
    elementwise_affine: whether there is a scale [width], which starts as 1. There is no bias either if False.
    bias: whether there is also a bias [width], which starts as 0. param_dtype: the dtype of both.

    norm(x [..., width]) returns y in the shape and dtype of x; statistics are float32. Raises the errors of `RMSNorm`.

    Ba et al. 2016, https://arxiv.org/abs/1607.06450.

    >>> norm = nn.LayerNorm(64)
    >>> norm(jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-5,
        groups: int = 1,
        bias: bool = True,
        elementwise_affine: bool = True,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        check_divides("groups", groups, "width", width)
        self.width, self.epsilon, self.groups = width, epsilon, groups
        self.scale = parameter(jnp.ones(width, param_dtype), None) if elementwise_affine else None
        self.bias = parameter(jnp.zeros(width, param_dtype), None) if elementwise_affine and bias else None

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return y, in the shape and dtype of x [..., width]."""
        check_floats("x", x, self.width)
        wide = by_head(x.astype(jnp.float32), self.groups)
        centred = wide - wide.mean(-1, keepdims=True)
        y = normalized(centred, self.epsilon).reshape(x.shape)
        y = y if self.scale is None else y * for_rows(y, self.scale[...])
        y = y if self.bias is None else y + for_rows(y, self.bias[...])
        return y.astype(x.dtype)
