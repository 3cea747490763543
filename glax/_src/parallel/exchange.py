"""Locate a shard of T in its sequences, and exchange states between shards.

Along a mesh axis of n shards, each shard holds T / n rows. The scan enters a shard at one edge and leaves it at the other. The
state of the sequence or segment under way at an edge crosses that edge. E is the number of states that cross: B, or 1 if
packed.

States and decays of the crossing sequence are selected, not multiplied by 0 or 1: a product with 0 would let NaN and inf of
other sequences pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from glax._src.core.recurrence import Recurrence
from glax._src.core.segments import Segments
from glax._src.solve.partitioning import Axis

# A state [E, H, K, V] that leaves a shard, and the shard's decay as factors of its rows and columns.
Message = tuple[Array, Array, Array | None]
Factors = tuple[Array | None, Array | None]  # factors of a state's rows [E, H, K or 1] and columns [E, H, V]; None is 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edge:
    """Describe an edge of a shard. If `crosses`, sequence number `sequence` crosses it and has `rows` tokens in the shard.

    Without packing, `sequence` is 0 and all rows of the batch cross together. With segments, `crosses` and `rows` have an entry
    for each row of the batch, for the segment that crosses there.
    """

    sequence: Int[Array, ""]
    crosses: Bool[Array, "*B"]
    rows: Int[Array, "*B"]

    def pick(self, x: Float[Array, "N *rest"], packed: bool) -> Float[Array, "E *rest"]:
        """Return the part of x that belongs to the crossing sequence, [1, *rest], if `packed`; else x, because all B sequences
        cross."""
        return lax.dynamic_slice_in_dim(x, self.sequence, 1) if packed else x

    def add(self, x: Float[Array, "N *rest"], edge: Float[Array, "E *rest"], packed: bool) -> Float[Array, "N *rest"]:
        """Return x with `edge` added to the part of the crossing sequence."""
        edge = of_sequences(self.crosses, edge).astype(x.dtype)
        return x.at[self.sequence].add(edge[0]) if packed else x + edge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """Hold the position of a shard in its sequences.

    cuts: the boundaries relative to this shard's rows. enter, leave: the edges, in the direction of the scan. begins, ends:
    whether a sequence's scan begins or ends in this shard; an empty sequence does both in the first shard. spans: whether one
    sequence or segment both enters and leaves the shard. segments: those of the shard's rows, without a reset at the first row
    in scan order, which no state enters. whole: whether the rows are one segment; None without segments.
    """

    cuts: Int[Array, "boundaries"] | None
    enter: Edge
    leave: Edge
    begins: Bool[Array, "N"]
    ends: Bool[Array, "N"]
    spans: Bool[Array, "*B"]
    segments: Segments | None = None
    whole: Bool[Array, "B"] | None = None

    @property
    def divides(self) -> bool:
        """Return whether the shard's rows may be several sequences or segments, one behind another."""
        return self.cuts is not None or self.segments is not None

    def rows_of(self, r: Recurrence) -> Recurrence:
        """Return r, the rows of this shard, with the boundaries and segments of these rows."""
        return r.replace(boundaries=self.cuts, segments=self.segments)

    def where_whole(self, states: Float[Array, "N H K V"]) -> Float[Array, "N H K V"]:
        """Return states [N, H, K, V] with zeros for rows of the batch that have several segments in this shard.

        Of these rows, no state at one edge of the shard reaches the other. Decays are left to the caller.
        """
        return states if self.whole is None else of_sequences(self.whole, states)

    def message(self, edge: Edge, state: Float[Array, "N H K V"], log) -> Message:
        """Return the operands of `exchange_states`: the state that leaves at `edge`, and the decay through the shard as a
        factor of its rows.

        state, log: the final state and the sum of log decays [N, H, K or 1] over the rows of every sequence in this shard.
        """
        packed = self.cuts is not None
        leaves = of_sequences(edge.crosses, edge.pick(state, packed))
        return leaves, of_sequences(self.spans, jnp.exp(edge.pick(log, packed))), None


def shard_of(r: Recurrence, axis: Axis, n: int) -> Shard:
    """Return the position of this shard. r has the rows and segments of this shard, and the boundaries of the whole problem."""
    T, index = r.q.shape[1], lax.axis_index(axis)
    rank = n - 1 - index if r.reverse else index
    if r.boundaries is None:
        every = jnp.zeros(r.num_sequences, bool)
        begins, ends = every | (rank == 0), every | (rank == n - 1)
        if r.segments is not None:
            return shard_of_segments(r, r.segments, begins, ends)
        enter, leave = (Edge(jnp.zeros_like(index), x, jnp.where(x, T, 0)) for x in (rank != 0, rank != n - 1))
        return Shard(None, enter, leave, begins, ends, enter.crosses & leave.crosses)
    low, cuts = index * T, r.boundaries
    high = low + T
    local = jnp.clip(cuts - low, 0, T)

    def edge(at, rows):
        n = jnp.clip(jnp.searchsorted(cuts, at, side="right") - 1, 0, r.num_sequences - 1)
        crosses = (cuts[n] < at) & (at < cuts[n + 1])
        return Edge(n.astype(index.dtype), crosses, jnp.where(crosses, rows(n), 0))

    first = edge(low, lambda n: local[n + 1])
    last = edge(high, lambda n: T - local[n])
    begin, end = cuts[:-1], cuts[1:]
    empty = (begin >= end) & (rank == 0)
    # Whether the lower and the upper end of a sequence are in this shard.
    lies = [((low <= at) & (at < high) & (begin < end)) | empty for at in (begin, end - 1)]
    enter, leave = (last, first) if r.reverse else (first, last)
    begins, ends = lies[::-1] if r.reverse else lies
    return Shard(local, enter, leave, begins, ends, enter.crosses & leave.crosses & (enter.sequence == leave.sequence))


def shard_of_segments(r: Recurrence, s: Segments, begins: Bool[Array, "B"], ends: Bool[Array, "B"]) -> Shard:
    """Return the position of a shard of rows whose segments s have no padding.

    begins, ends: whether the scan of each row of the batch begins or ends in this shard.
    """
    T = r.q.shape[1]
    row = jnp.arange(T)
    first = row == (T - 1 if r.reverse else 0)
    resets = s.resets & ~first
    whole = ~resets.any(1)
    # A reset is the first row of its segment in scan order.
    lowest, highest = jnp.where(resets, row, T).min(1), jnp.where(resets, row, -1).max(1)
    entering, leaving = (T - 1 - highest, lowest + 1) if r.reverse else (lowest, T - highest)
    enters, leaves = ~begins & ~(s.resets & first).any(1), ~ends
    sequence = jnp.zeros((), row.dtype)
    enter, leave = (
        Edge(sequence, crosses, jnp.where(crosses, jnp.where(whole, T, rows), 0))
        for crosses, rows in ((enters, entering), (leaves, leaving))
    )
    return Shard(None, enter, leave, begins, ends, enters & leaves & whole, Segments(resets, None), whole)


def uses_all_gather(n: int) -> bool:
    """Return whether n shards gather all messages, instead of passing them on by distances of 1, 1, 2, 4, ... shards.

    Each shard receives n - 1 messages by gathering, and 1 + ceil(log2(n - 1)) by passing on. The numbers are equal up to 4
    shards, where gathering takes one exchange and passing on takes up to three.
    """
    return n <= 4


def shift_distances(n: int) -> list[int]:
    """Return the distances 1, 1, 2, 4, ... by which n devices pass messages on, one exchange each. Their sum is n - 1 or
    more."""
    distances = [1]
    while sum(distances) < n - 1:
        distances.append(sum(distances))
    return distances


def exchange_states(axis: Axis, n: int, backwards: bool, state: Float[Array, "E H K V"], rows, columns) -> Array:
    """Return the state that enters each shard, [E, H, K, V].

    A shard maps the state that enters it to `rows * entering * columns + state`. The shards send these maps, composed, and
    nothing else. state: the state that leaves this shard if zeros enter it. rows: [E, H, K] or [E, H, 1], or a matrix
    [E, H, K, K] that multiplies the state instead. columns: [E, H, V] or None. The state that enters the first shard is 0. If
    `backwards`, the order of the shards is reversed. Where `rows` are all 0, they also stop NaN and inf.
    """
    (E, H, K, V), of_rows = state.shape, rows.shape
    parts = [x.reshape(E, H, -1) for x in (state, rows, *([] if columns is None else [columns]))]
    widths = [x.shape[2] for x in parts]
    message = jnp.concatenate(parts, axis=2)

    def unpacked(message):
        ends = [sum(widths[:i]) for i in range(1, len(widths))]
        state, rows, *rest = jnp.split(message, ends, axis=2)
        return state.reshape(E, H, K, V), rows.reshape(of_rows), rest[0] if rest else None

    def compose(earlier, later):
        """Return the map of two consecutive shards: `later` applied to what `earlier` gives. A map is (state, rows, columns or
        None)."""
        (S, r, c), (S2, r2, c2) = earlier, later
        S, r, c = jax.tree.map(functools.partial(stopped, rows=r2), (S, r, c))
        through = r * r2 if r.ndim == 3 else apply_decay(r, r2, None)
        return apply_decay(S, r2, c2) + S2, through, None if c is None else c * c2

    index = lax.axis_index(axis)
    rank = n - 1 - index if backwards else index
    if uses_all_gather(n):
        every = lax.all_gather(message, axis)
        mine = so_far = jnp.zeros_like(state)
        for j in range(n - 1):
            S, r, c = unpacked(every[n - 1 - j if backwards else j])
            so_far = apply_decay(stopped(so_far, r), r, c) + S
            mine = jnp.where(rank == j + 1, so_far, mine)
        return mine

    def shift(parts, distance):
        message = jnp.concatenate([x.reshape(E, H, -1) for x in parts if x is not None], axis=2)
        pairs = [(i + distance, i) if backwards else (i, i + distance) for i in range(n - distance)]
        # ppermute gives zeros where no shard sends: state 0 and decay 0
        return unpacked(lax.ppermute(message, axis, pairs))

    first, *rest = shift_distances(n)
    composed = shift((state, rows, columns), first)
    for distance in rest:
        composed = compose(shift(composed, distance), composed)
    return composed[0]


@jax.custom_vjp
def stopped(x: Float[Array, "E H *rest"], rows: Float[Array, "E H *more"]) -> Float[Array, "E H *rest"]:
    """Return x with 0 in place of NaN and inf where all of `rows` are 0, as where no sequence spans a shard.

    The cotangent of x is stopped likewise. Finite numbers pass, because the gradient of `rows` reads them.
    """
    closed = (rows == 0).all(tuple(range(2, rows.ndim)))
    return jnp.where(closed.reshape(*closed.shape, *[1] * (x.ndim - 2)) & ~jnp.isfinite(x), 0, x)


def stopped_fwd(x, rows):
    return stopped(x, rows), rows


def stopped_bwd(rows, d_x):
    return stopped(d_x, rows), None


stopped.defvjp(stopped_fwd, stopped_bwd)


def apply_decay(state: Float[Array, "E H K V"], rows, columns) -> Float[Array, "E H K V"]:
    """Return rows * state * columns, where None stands for 1. A dense map of rows [E, H, K, K] multiplies as a matrix."""
    if rows is not None and rows.ndim == 4:
        state = jnp.matmul(rows, state, precision=lax.Precision.HIGHEST)
    elif rows is not None:
        state = state * rows[..., None]
    return state if columns is None else state * columns[..., None, :]


def of_sequences(chosen: Bool[Array, "*N"], x: Shaped[Array, "N *rest"]) -> Shaped[Array, "N *rest"]:
    """Return x with 0 where `chosen` is false. chosen: a bool for each sequence, or one for all."""
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
