"""The rows of a shard from one of its edges inwards, as far as a state at that edge and they can act on each other.

G_t is the sum of log decays from the edge to token t. The walk stops where every e^{G_t} has become 0 in float32, which is
exact: log-sigmoid gates do after some 200 tokens, however long the shard. So what is done to a strip costs what its gates
let through, and by the gates alone: no other shard is asked.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import Recurrence, aligned, fold_heads, spread_heads
from glax._src.parallel.exchange import Edge

NEAR = 256  # rows next to the edge, taken without asking: log-sigmoid gates end there
FAR = 4096  # rows at a time beyond
WHOLE = 16384  # rows at a time where the decay does not depend on the data, and so seldom ends the walk


@dataclasses.dataclass(frozen=True)
class Strip:
    """The rows of a shard by their distance from one edge: the lowest row, or the highest."""

    r: Recurrence
    edge: Edge
    from_low: bool

    @property
    def packed(self) -> bool:
        return self.r.boundaries is not None

    @property
    def states(self) -> tuple[int, int, int, int]:
        """E H K V: the shape of what crosses the edge."""
        return 1 if self.packed else self.r.q.shape[0], *self.r.state_shape[1:]

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of the window next to the edge, and of those beyond."""
        near, far = (NEAR, FAR) if self.r.decay.by_token else (WHOLE, WHOLE)
        return min(self.r.q.shape[1], near), min(self.r.q.shape[1], far)

    @property
    def most(self) -> int:
        """How many windows lie beyond the first."""
        near, far = self.sizes
        return -(-(self.r.q.shape[1] - near) // far)

    @property
    def count(self) -> Int[Array, ""]:
        """How many of them hold rows of the crossing sequence."""
        near, far = self.sizes
        return -(-jnp.maximum(self.edge.rows - near, 0) // far)

    @property
    def near(self) -> "Window":
        return Window(self, 0, self.sizes[0])

    def beyond(self, i) -> "Window":
        near, far = self.sizes
        return Window(self, near + i * far, far)

    def prefix(self, x: Array | None, inclusive: bool) -> Array | None:
        """Sums from the edge through each row, or up to it. Never a difference: log decays may be -inf."""
        if x is None:
            return None
        total = lax.cumsum(x, axis=1, reverse=not self.from_low)
        return total if inclusive else shifted(total, 1 if self.from_low else -1)

    def suffix(self, x: Array) -> Array:
        """Sums over the rows behind each, away from the edge."""
        return shifted(lax.cumsum(x, axis=1, reverse=self.from_low), -1 if self.from_low else 1)

    def aligned(self, carry):
        """Inside shard_map, what a loop carries must vary over the mesh as much as all that goes into it."""
        return aligned((carry, self.r.q, self.edge))[0]


@dataclasses.dataclass(frozen=True)
class Window:
    """`size` rows of a strip, from `offset` rows off its edge on."""

    strip: Strip
    offset: int | Int[Array, ""]
    size: int

    @property
    def start(self) -> Int[Array, ""]:
        """The first of the `size` rows of the shard that hold the window's."""
        T = self.strip.r.q.shape[1]
        return jnp.clip(self.offset if self.strip.from_low else T - self.offset - self.size, 0, T - self.size)

    @property
    def own(self) -> Bool[Array, "C 1 1"]:
        """Which of these are the window's, and of the crossing sequence."""
        row = self.start + jnp.arange(self.size)
        distance = row if self.strip.from_low else self.strip.r.q.shape[1] - 1 - row
        end = jnp.minimum(self.offset + self.size, self.strip.edge.rows)
        return ((distance >= self.offset) & (distance < end))[:, None, None]

    def read(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B C H D"]:
        x = as_it_lies(lax.dynamic_slice_in_dim(x, self.start, self.size, 1)).astype(self.strip.r.dtype)
        return spread_heads(jnp.where(self.own, x, 0), self.strip.r.num_heads)

    def add(self, buffer: Float[Array, "B T heads D"], x: Float[Array, "B C H D"]) -> Array:
        old = lax.dynamic_slice_in_dim(buffer, self.start, self.size, 1)
        new = (old.astype(self.strip.r.dtype) + fold_heads(x, buffer.shape[2])).astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, as_it_lies(jnp.where(self.own, new, old)), self.start, 1)

    def logs(self) -> tuple[Array | None, Array | None]:
        """The log decays of the state's rows and columns: [E, C, H, width or 1] or None."""
        strip, decay = self.strip, self.strip.r.decay
        key, value = (None if x is None else self.read(x) for x in (decay.key, decay.value))
        if decay.head is not None:
            key = self.read(decay.head[..., None])
        if decay.constant is not None:
            key = strip.edge.pick(decay.constant, strip.packed).astype(strip.r.dtype)[:, None, :, None]
            key = jnp.where(self.own, key, 0)
        return key, value


def inwards(strip: Strip, visit, carry):
    """Folds visit(window, i, G, logs, carry) from the edge on while any decay lives.

    i: which window beyond the first, None for the first. G: the sums of logs up to the window. Returns (the number of
    windows visited beyond the first, the factors through all of the crossing sequence's rows, carry). These factors are 0
    where the walk stopped before the rows' end.
    """
    E, H, K, V = strip.states
    decay, dtype = strip.r.decay, strip.r.dtype
    widths = (
        0 if decay.form in ("none", "value") else K if decay.key is not None else 1,
        V * (decay.value is not None),
    )
    G = tuple(jnp.zeros((E, H, width), dtype) if width else None for width in widths)

    def step(window, i, G, carry):
        logs = window.logs()
        carry = visit(window, i, G, logs, carry)
        return tuple(None if x is None else x + log.sum(1) for x, log in zip(G, logs, strict=True)), carry

    def lives(loop):
        i, G, _ = loop
        alive = [(jnp.exp(x) != 0).any() for x in G if x is not None]
        return functools.reduce(jnp.logical_and, alive, i < strip.count)

    def beyond(loop):
        i, *rest = loop
        return i + 1, *step(strip.beyond(i), i, *rest)

    loop = strip.aligned((jnp.zeros_like(strip.count), *step(strip.near, None, G, carry)))
    i, G, carry = lax.while_loop(lives, beyond, loop) if strip.most else loop
    return i, tuple(None if x is None else jnp.where(i == strip.count, jnp.exp(x), 0) for x in G), carry


def exps(*logs: Array | None) -> tuple[Array | None, ...]:
    return tuple(None if x is None else jnp.exp(x) for x in logs)


def shifted(x: Array, by: int) -> Array:
    """x moved along axis 1 by one row, with zeros let in."""
    none = jnp.zeros_like(x[:, :1])
    return jnp.concatenate([none, x[:, :-1]] if by > 0 else [x[:, 1:], none], axis=1)


def times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def as_it_lies(x: Array) -> Array:
    """x, row by row in memory. Else XLA turns a loop's whole arrays over, as the products of their windows would have them."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
