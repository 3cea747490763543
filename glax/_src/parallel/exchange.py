"""Where a shard of T stands in its sequences, and what shards tell each other.

Along a mesh axis of n shards, each holds T / n rows. The walk enters a shard at one edge and leaves it at the other; the
sequence under way there (all of them side by side, if not packed) crosses that edge with its state. E counts the states
that cross: B, or 1 if packed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import Recurrence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edge:
    """`sequence` crosses this edge of the shard if `crosses`, with `rows` of its tokens next to the edge inside."""

    sequence: Int[Array, ""]
    crosses: Bool[Array, ""]
    rows: Int[Array, ""]

    def pick(self, x: Float[Array, "N *rest"], packed: bool) -> Float[Array, "E *rest"]:
        """What belongs to the crossing sequence."""
        return lax.dynamic_slice_in_dim(x, self.sequence, 1) if packed else x

    def add(self, x: Float[Array, "N *rest"], edge: Float[Array, "E *rest"], packed: bool) -> Float[Array, "N *rest"]:
        """x with `edge` added to what belongs to the crossing sequence."""
        edge = jnp.where(self.crosses, edge, 0).astype(x.dtype)
        return x.at[self.sequence].add(edge[0]) if packed else x + edge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """cuts: the boundaries as seen from this shard's rows. enter, leave: the edges, in the direction of the walk.

    begins, ends: whether a sequence's walk begins, ends in this shard; an empty one does both in the first.
    spans: whether the sequence that enters is the one that leaves.
    """

    cuts: Int[Array, "N+1"] | None
    enter: Edge
    leave: Edge
    begins: Bool[Array, "N"]
    ends: Bool[Array, "N"]
    spans: Bool[Array, ""]

    def told(self, edge: Edge, state: Float[Array, "N H K V"], log) -> tuple[Array, Array, None]:
        """What `arriving` takes: the state that leaves at that edge and the decay through the shard, as factors of its rows.

        state, log [N, H, K or 1]: those of every sequence, of its rows here.
        """
        packed = self.cuts is not None
        leaves = jnp.where(edge.crosses, edge.pick(state, packed), 0)
        return leaves, jnp.where(self.spans, jnp.exp(edge.pick(log, packed)), 0), None


def shard_of(r: Recurrence, axis: str, n: int) -> Shard:
    """r holds this shard's rows, and the boundaries of all."""
    T, index = r.q.shape[1], lax.axis_index(axis)
    rank = n - 1 - index if r.reverse else index
    if r.boundaries is None:
        every = jnp.zeros(r.num_sequences, bool)
        crossing = rank != 0, rank != n - 1
        enter, leave = (Edge(jnp.zeros_like(index), crosses, jnp.where(crosses, T, 0)) for crosses in crossing)
        return Shard(None, enter, leave, every | (rank == 0), every | (rank == n - 1), enter.crosses & leave.crosses)
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
    # Whether the low, the high end of a sequence lies here.
    lies = [((low <= at) & (at < high) & (begin < end)) | empty for at in (begin, end - 1)]
    enter, leave = (last, first) if r.reverse else (first, last)
    begins, ends = lies[::-1] if r.reverse else lies
    return Shard(local, enter, leave, begins, ends, enter.crosses & leave.crosses & (enter.sequence == leave.sequence))


def gathers(n: int) -> bool:
    """Whether the shards' summaries are all gathered, or handed on in steps of 1, 1, 2, 4, ... shards.

    Each of n shards receives n - 1 summaries or 1 + ceil(log2(n - 1)): equally many up to 4 shards, where gathering takes
    one exchange instead of up to three.
    """
    return n <= 4


def steps(n: int) -> list[int]:
    """How far summaries are handed on, one exchange each."""
    far = [1]
    while sum(far) < n - 1:
        far.append(sum(far))
    return far


def arriving(axis: str, n: int, backwards: bool, state: Float[Array, "E H K V"], rows, columns) -> Array:
    """The state that crosses each shard's first edge, [E, H, K, V]; `backwards`, the last shard's is the first.

    A shard hands on   rows * arriving * columns + state,   and these maps are composed:  nothing else is sent. rows:
    [E, H, K] or [E, H, 1], columns: [E, H, V] or None. What arrives at the first shard is 0.
    """
    E, H, K, V = state.shape
    parts = [x.reshape(E, H, -1) for x in (state, rows, *([] if columns is None else [columns]))]
    widths = [x.shape[2] for x in parts]
    message = jnp.concatenate(parts, axis=2)

    def unpacked(message):
        ends = [sum(widths[:i]) for i in range(1, len(widths))]
        state, rows, *rest = jnp.split(message, ends, axis=2)
        return state.reshape(E, H, K, V), rows, rest[0] if rest else None

    def after(earlier, later):
        """The map of two in a row."""
        (S, r, c), (S2, r2, c2) = earlier, later
        return through(S, r2, c2) + S2, r * r2, None if c is None else c * c2

    index = lax.axis_index(axis)
    rank = n - 1 - index if backwards else index
    if gathers(n):
        every = lax.all_gather(message, axis)
        mine = so_far = jnp.zeros_like(state)
        for j in range(n - 1):
            S, r, c = unpacked(every[n - 1 - j if backwards else j])
            so_far = through(so_far, r, c) + S
            mine = jnp.where(rank == j + 1, so_far, mine)
        return mine

    def moved(parts, far):
        message = jnp.concatenate([x.reshape(E, H, -1) for x in parts if x is not None], axis=2)
        pairs = [(i + far, i) if backwards else (i, i + far) for i in range(n - far)]
        return unpacked(lax.ppermute(message, axis, pairs))  # zeros where nobody sends: no state, and none let through

    first, *rest = steps(n)
    held = moved((state, rows, columns), first)
    for far in rest:
        held = after(moved(held, far), held)
    return held[0]


def through(state: Float[Array, "E H K V"], rows, columns) -> Float[Array, "E H K V"]:
    """rows * state * columns, where both are factors or None."""
    state = state if rows is None else state * rows[..., None]
    return state if columns is None else state * columns[..., None, :]
