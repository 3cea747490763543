"""Provide gated MLPs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax.nn.arguments import checked
from glax.nn.parts import EMBED, MLP, activation, check_floats, linear, products


class SwiGLU(nnx.Module):
    """Compute y = W_down (act(W_gate x) * W_up x).   Shazeer 2020, https://arxiv.org/abs/2002.05202.

    The two products with x are one where x has more rows than columns: half as many passes over x and its gradient.
    act is SiLU, unless `activation` names another; "powlu" is x^(3 / (sqrt(x) + 1)) sigmoid(x) for x > 0 and SiLU elsewhere.
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        *,
        activation: str = "swish",
        bias: bool = False,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        self.width, self.activation = width, activation
        self.act(jnp.zeros(()))  # raises ValueError for an unknown name
        options: dict[str, Any] = dict(
            bias=bias, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.gate = linear(width, inside, (EMBED, MLP), **options)
        self.up = linear(width, inside, (EMBED, MLP), **options)
        self.down = linear(inside, width, (MLP, EMBED), **options)

    def act(self, x: Array) -> Array:
        return powlu(x) if self.activation == "powlu" else activation("activation", self.activation)(x)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        check_floats("x", x, self.width)
        gate, up = products(x, self.gate, self.up)
        return self.down((self.act(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype))


def powlu(x: Array, power: float = 3.0) -> Array:
    positive = jnp.where(x > 0, x, 1.0)
    above = positive ** (power / (jnp.sqrt(positive) + 1))
    return jnp.where(x > 0, above, x) * jax.nn.sigmoid(x)
