"""Provide gated MLPs, and mixtures of experts: a router, and MLPs of which each token reads a few."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from glax._src.core.bind import check_integers
from glax._src.core.recurrence import to_int32
from glax.nn.arguments import checked
from glax.nn.parts import EMBED, MLP, activation, check_floats, linear, normal, parameter, products

Chosen = tuple[Float[Array, "M k"], Int[Array, "M k"]]  # the weights and the numbers of the experts of each token


class SwiGLU(nnx.Module):
    """Compute y = W_down (act(W_gate x) * W_up x).   Shazeer 2020, https://arxiv.org/abs/2002.05202.

    The two products with x are one where x has more rows than columns: half as many passes over x and its gradient.
    act is SiLU, unless `activation` names another; "powlu" is x^(3 / (sqrt(x) + 1)) sigmoid(x) for x > 0 and SiLU elsewhere.

    >>> mlp = nn.SwiGLU(64, 128, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((16, 64))).shape
    (16, 64)
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


# ---- experts ----------------------------------------------------------------------------------------------------------


def softmax_router(x: Float[Array, "M D"], kernel: Float[Array, "D E"], top_k: int, normalize: bool = True) -> Chosen:
    """Return the top_k experts of each token, with the softmax of their logits x kernel as weights.

    normalize: whether the weights of a token add up to 1; else the softmax is over all experts.
    """
    every = (x @ kernel.astype(x.dtype)).astype(jnp.float32)
    logits, chosen = jax.lax.top_k(every, top_k)
    if normalize:
        return jax.nn.softmax(logits, -1), chosen
    return jnp.exp(logits - jax.nn.logsumexp(every, -1, keepdims=True)), chosen


class Experts(nnx.Module):
    """Compute y = sum over chosen experts e of p_e W_down,e (act(W_gate,e x) * W_up,e x); without a gate W_down,e act(W_up,e x).

    form: "split": `gate` and `up` [E, D, I] apart. "fused": both in `input` [E, D, 2 I], the gate first. "plain": no gate.
    Tokens are sorted by expert, so that each expert multiplies its own tokens alone.

    Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.

    >>> experts = nn.Experts(64, 128, count=4, rngs=nnx.Rngs(0))
    >>> experts(jnp.ones((16, 64)), (jnp.ones((16, 1)), jnp.zeros((16, 1), jnp.int32))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        count: int,
        *,
        form: str = "split",
        act: str = "silu",
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        activation("act", act)
        self.width, self.form, self.act, self.count, self.dtype = width, form, act, count, dtype
        init = normal(0.02) if kernel_init is None else kernel_init

        def stack(inputs: int, outputs: int, *axes) -> nnx.Param:
            return parameter(init(rngs.params(), (count, inputs, outputs), param_dtype), None, *axes)

        match form:
            case "split":
                self.gate, self.up = (stack(width, inside, EMBED, MLP) for _ in range(2))
            case "fused":
                self.input = stack(width, 2 * inside, EMBED, MLP)
            case "plain":
                self.up = stack(width, inside, EMBED, MLP)
            case _:
                raise ValueError(f"form must be 'split', 'fused' or 'plain', got {form!r}")
        self.down = stack(inside, width, MLP, EMBED)

    def __call__(self, x: Float[Array, "M D"], chosen: Chosen) -> Float[Array, "M D"]:
        weights, experts = chosen
        check_floats("x", x, self.width)
        check_floats("weights", weights)
        check_integers("experts", experts)
        for name, y in (("weights", weights), ("experts", experts)):
            if y.ndim != 2 or y.shape != (x.shape[0], experts.shape[-1]):
                raise ValueError(f"{name} must be [M, k] with M={x.shape[0]} as x has rows, got shape {y.shape}")
        experts = to_int32(experts)
        k = experts.shape[1]
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.count)
        y = self.through(x[order // k], sizes)
        y = y * weights.reshape(-1)[order][:, None].astype(y.dtype)
        # The inverse of a permutation, so that each token sums its experts in one order.
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
        return y[back].reshape(*experts.shape, -1).sum(1)

    def through(self, x: Float[Array, "Mk D"], sizes: Int[Array, "E"]) -> Float[Array, "Mk D"]:
        """Return the output of each row's expert. The rows are sorted by expert, and `sizes` counts the rows of each."""
        act = activation("act", self.act)

        def product(x, kernel):
            return jax.lax.ragged_dot(x, kernel[...].astype(x.dtype), sizes)

        if self.form == "plain":
            return product(act(product(x, self.up)), self.down)
        if self.form == "fused":
            gate, up = jnp.split(product(x, self.input), 2, axis=-1)
        else:
            gate, up = product(x, self.gate), product(x, self.up)
        return product(act(gate) * up, self.down)


class SparseMLP(nnx.Module):
    """Add the outputs of experts, chosen by softmax probabilities of a router, and of an MLP that every token reads, if there
    is one.

    router: the kernel [D, E]. shared: a module from rows to rows, or None. normalize: as in `softmax_router`.

    >>> mlp = nn.SparseMLP(64, 128, count=4, top_k=2, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        count: int,
        top_k: int,
        *,
        form: str = "split",
        act: str = "silu",
        shared: Any = None,
        normalize: bool = True,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        if top_k > count:
            raise ValueError(f"top_k must be at most count={count}, got {top_k}")
        self.top_k, self.shared, self.normalize = top_k, shared, normalize
        init = normal(0.02) if kernel_init is None else kernel_init
        self.router = parameter(init(rngs.params(), (width, count), param_dtype), EMBED, None)
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        self.experts = Experts(width, inside, count, form=form, act=act, **options)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        check_floats("x", x, self.experts.width)
        flat = x.reshape(-1, x.shape[-1])
        chosen = softmax_router(flat, self.router[...], self.top_k, self.normalize)
        y = self.experts(flat, chosen).reshape(x.shape)
        return y if self.shared is None else y + self.shared(x)
