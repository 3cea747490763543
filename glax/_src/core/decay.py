"""Fold the gates of a recurrence into one value, `Decay`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Part(NamedTuple):
    """Describe a part of a log decay: the argument of `recurrent` that gives it, and its array's dimensions, such as
    "B T H"."""

    argument: str
    dimensions: str


# The fields of `Decay`. A form of decay is the set of parts that are given.
PARTS = dict(
    constant=Part("g_gamma", "N H"),
    head=Part("g", "B T H"),
    key=Part("gk", "B T H K"),
    value=Part("gv", "B T H V"),
)
# The forms that decay the rows of the state alone, and the forms that a kernel is taken to compute if it names none. A form that
# is added later is not among them: each kernel refuses it until it names it.
ROW_FORMS = ("none", "constant", "head", "key")
USUAL_FORMS = (*ROW_FORMS, "value", "key+value")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decay:
    """Hold the log decay of the state, a sum of parts: log decay[k, v] = constant + head + key[k] + value[v]. A missing
    part is zero.

    There are six forms (`USUAL_FORMS`): none, `constant`, `head`, `key`, `value`, and `key` with `value`. The form is part of the
    tree's structure, so it is known while tracing.
    """

    constant: Float[Array, "N H"] | None = None  # the log decay is the same at every token of a sequence
    head: Float[Array, "B T H"] | None = None
    key: Float[Array, "B T H K"] | None = None  # decays the state's rows
    value: Float[Array, "B T H V"] | None = None  # decays the state's columns

    @classmethod
    def from_gates(cls, g, g_gamma, gk, gv, to_tokens, dtype) -> "Decay":
        """Fold the gates: log decay = g + g_gamma + gk + gv. Autodiff of the sums returns the gradient of every gate.

        g: [B, T, H] or [B, T, H, K]; g_gamma: [N, H]; gk: [B, T, H, K]; gv: [B, T, H, V]. Each may be None. to_tokens:
        broadcasts one row for each sequence, [N, H], to that sequence's tokens, [B, T, H]. dtype: the dtype of sums and states,
        float32 or float64.

        A single gate is used as it is, without a copy and in its own dtype. A sum of gates has the widest dtype among its gates
        and `dtype`, so that float32 gates do not lower the precision of float64 inputs.
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
        """Return the decay of the transposed state: rows and columns are exchanged."""
        return dataclasses.replace(self, key=self.value, value=self.key)

    @property
    def by_token(self) -> bool:
        """Return whether the decay differs between tokens."""
        return self.form not in ("none", "constant")

    def map_tokens(self, f: Callable[[Array], Array]) -> "Decay":
        """Return the decay with f applied to every part that has an axis of tokens."""
        return dataclasses.replace(jax.tree.map(f, dataclasses.replace(self, constant=None)), constant=self.constant)

    def with_tokens(self, to_tokens: Callable[[Array], Array]) -> "Decay":
        """Return the decay with `head` in the place of `constant`. to_tokens: [N, H] -> [B, T, H]."""
        if self.constant is None:
            return self
        return dataclasses.replace(self, constant=None, head=to_tokens(self.constant))

    @property
    def form(self) -> str:
        """Return the name of the form: "none", "constant", "head", "key", "value" or "key+value"."""
        names = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        return "+".join(names) or "none"


def added(x: Array | None, y: Array | None, dtype) -> Array | None:
    """Return x + y in the widest of their dtypes and `dtype`. If one of them is None, return the other as it is."""
    if x is None or y is None:
        return y if x is None else x
    wide = promoted(x.dtype, y.dtype, dtype)
    return x.astype(wide) + y.astype(wide)


def promoted(*dtypes) -> jnp.dtype:
    """Return the common dtype of the arguments by JAX's standard rules.

    The rules are named explicitly, because the user's jax_numpy_dtype_promotion may forbid implicit promotion.
    """
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)
