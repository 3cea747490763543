"""Define replay rings, which hold the tokens since the states of a pool were written. They are operands of a replay kernel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import spread_heads
from glax._src.core.segments import expanded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """Hold the tokens since the states were written: C places for each of the P slots of a pool, or of the P rows of a call.

    Token t has the state S_t = e^{G_t} S_0 + sum_i e^{G_t - G_i} (k_i u_i^T + b_i y_i^T). S_0 is the written state, and G_t the
    sum of the log decays g_i since then. key: k_i. value: u_i, what token i writes. decay: g_i; a constant decay is repeated in
    `head` for every token. along, erased: b_i and y_i with `Erasure.along`; else None, and their term is absent.
    """

    key: Float[Array, "P C Hk K"]
    value: Float[Array, "P C _ V"]
    decay: Decay
    along: Float[Array, "P C H K"] | None = None
    erased: Float[Array, "P C H V"] | None = None

    def followed_by(self, new: "Ring", length: Int[Array, "P"]) -> "Ring":
        """Return a ring of C + T places, in the dtypes of `new`: this ring's C places, and behind them the T tokens of `new`.

        length: the tokens of each row of this ring. Its places after these are zeros in the result.
        """
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), self.cleared_as(new, length), new)

    def cleared_as(self, new: "Ring", length: Int[Array, "P"]) -> "Ring":
        """Return this ring in the dtypes of `new`, with zeros after the first `length` tokens of each row."""
        return jax.tree.map(lambda x, y: x.astype(y.dtype), self.cleared(length), new)

    def cleared(self, length: Int[Array, "P"]) -> "Ring":
        """Return the ring with zeros after the first `length` tokens of each row, where tokens of another request may lie."""
        is_held = jnp.arange(self.key.shape[1], dtype=jnp.int32)[None] < length[:, None]
        return jax.tree.map(lambda x: jnp.where(expanded(is_held, x.ndim), x, 0), self)

    def pairs(self, heads: int) -> list[tuple[Array, Array]]:
        """Return (keys, values) of each term of the state's sum, with `heads` heads: (k, u), and with `Erasure.along` also (b,
        y)."""
        found = [(self.key, self.value)]
        if self.along is not None and self.erased is not None:
            found.append((self.along, self.erased))
        return [(spread_heads(k, heads), spread_heads(v, heads)) for k, v in found]


MOST_PLACES = 2**15  # of a ring
MOST_NUMBERS = 2**31 - 1  # of an array of one slot's ring


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingedStates:
    """Hold the states of P slots and their rings: what a replay kernel reads and updates.

    states: [P, H, K, V], or for states in 8 bits a tree of such arrays and of their scales.
    length: the number of tokens in each ring. drafted: the number of drafts behind them.
    replay: the number of tokens from one write of a state to the next.
    """

    states: Any
    ring: Ring
    length: Int[Array, "P"]
    drafted: Int[Array, "P"]
    replay: int = dataclasses.field(metadata=dict(static=True))

    def arrays(self) -> list[Array | None]:
        """Return the arrays of the pool in a fixed order, None for each that is absent: three of states (the states and twice
        None, or the values, rests and scale of states in 8 bits); the ring's key, value, log decays by head, key and value,
        along and erased; length and drafted."""
        ring, stored = self.ring, jax.tree.leaves(self.states)
        stored += [None] * (3 - len(stored))
        gates = ring.decay.head, ring.decay.key, ring.decay.value
        return [*stored, ring.key, ring.value, *gates, ring.along, ring.erased, self.length, self.drafted]

    def with_arrays(self, arrays: Sequence[Any]) -> "RingedStates":
        """Return the pool with `arrays` in place of its own, in the order in which the method `arrays` returns them."""
        *stored, key, value, head, row, column, along, erased, length, drafted = arrays
        states = jax.tree.unflatten(jax.tree.structure(self.states), [x for x in stored if x is not None])
        ring = Ring(key, value, Decay(head=head, key=row, value=column), along, erased)
        return dataclasses.replace(self, states=states, ring=ring, length=length, drafted=drafted)

    @property
    def is_countable(self) -> bool:
        """Return whether 16 bits can count the places of each array of the ring, and 32 bits the numbers of one slot's ring."""
        rings = [x.shape[1:] for x in jax.tree.leaves(self.ring)]
        return all(shape[0] <= MOST_PLACES and math.prod(shape) <= MOST_NUMBERS for shape in rings)
