"""Provide mixtures of experts: a router, and MLPs of which each token reads a few."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glax._src.core.bind import check_integers
from glax._src.core.recurrence import to_int32
from glax.nn.arguments import checked
from glax.nn.parts import EMBED, MLP, activation, check_floats, normal, parameter

Chosen = tuple[Float[Array, "M k"], Int[Array, "M k"]]  # the weights and the numbers of the experts of each token


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
