"""The gates of a recurrence, folded into one value."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decay:
    """Logarithm of the decay of the state, by what it varies over: head + key + value; missing parts do not decay.

    Kernels meet six forms, never sixteen: none, `constant`, `head`, `key`, `value`, `key` and `value`. Which parts are
    present is structure, so it is known while tracing.
    """

    constant: Float[Array, "N H"] | None = None  # one number a sequence and head
    head: Float[Array, "B T H"] | None = None
    key: Float[Array, "B T H K"] | None = None  # of the state's rows
    value: Float[Array, "B T H V"] | None = None  # of the state's columns

    @classmethod
    def from_gates(cls, g, g_gamma, gk, gv, to_tokens, dtype) -> "Decay":
        """log decay = g + g_gamma + gk + gv.  Folding is `+`, so autodiff returns the gradient of every gate.

        g: [B, T, H] or [B, T, H, K], g_gamma: [N, H], gk: [B, T, H, K], gv: [B, T, H, V], each or None.
        to_tokens: spreads one row a sequence, [N, H], over that sequence's tokens, [B, T, H].
        dtype: that in which the recurrence is summed, float32 or float64.

        A gate that stands alone keeps its dtype and its memory; a sum of two has `dtype` at least, so that float64 inputs
        lose nothing to gates of float32.
        """
        if g is not None and g.ndim == 4:
            g, gk = None, added(g, gk, dtype)
        if g_gamma is not None and (g is not None or gk is not None or gv is not None):
            g, g_gamma = added(g, to_tokens(g_gamma), dtype), None
        if g is None:
            return cls(constant=g_gamma, key=gk, value=gv)
        if gk is None and gv is None:
            return cls(head=g)
        if gk is not None:
            return cls(key=added(gk, g[..., None], dtype), value=gv)
        return cls(value=added(gv, g[..., None], dtype))

    @property
    def transposed(self) -> "Decay":
        """The decay of the transposed state."""
        return dataclasses.replace(self, key=self.value, value=self.key)

    @property
    def by_token(self) -> bool:
        """Whether the decay depends on the data, and not on the head alone."""
        return self.form not in ("none", "constant")

    @property
    def form(self) -> str:
        """The name of the form: "none", "constant", "head", "key", "value" or "key+value"."""
        names = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        return "+".join(names) or "none"


def added(x: Array | None, y: Array | None, dtype) -> Array | None:
    if x is None or y is None:
        return y if x is None else x
    wide = promoted(x.dtype, y.dtype, dtype)
    return x.astype(wide) + y.astype(wide)


def promoted(*dtypes) -> jnp.dtype:
    """The dtype that holds the values of all, also where jax_numpy_dtype_promotion forbids what is not said: this says it."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)
