"""Chunks of the time axis, packed sequences included, without moving a row."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence, is_symbol


class Chunks(NamedTuple):
    """Entry i is rows first[i] to last[i] (not included) of T, all of one sequence; entries from `count` on are unused.

    Entries are in the order of time. `sequence` is where the chunk's state is kept; unpacked, all B sequences are
    walked side by side and it is 0.
    """

    size: int
    count: int | Int[Array, ""]
    first: Int[Array, "M"]
    last: Int[Array, "M"]
    sequence: Int[Array, "M"]


def chunks_of(r: Recurrence, size: int) -> Chunks:
    """Cuts every sequence of r into chunks of `size` rows; a chunk begins where its sequence does.

    Packed, N sequences make at most T // size + N chunks, whatever their lengths: so a new packing of the same T and N
    has the same shapes.
    """
    T = r.q.shape[1]
    if r.boundaries is None:
        if is_symbol(T):
            count = -(-T // size)
            first = jnp.arange(count, dtype=jnp.int32) * size
            last = jnp.minimum(first + size, jnp.asarray(T, jnp.int32))
            return Chunks(size, jnp.asarray(count, jnp.int32), first, last, jnp.zeros_like(first))
        first = np.arange(0, T, size, dtype=np.int32)
        return Chunks(size, len(first), *map(jnp.asarray, (first, np.minimum(first + size, T), np.zeros_like(first))))
    cuts = jnp.clip(r.boundaries, 0, T)
    begins = jnp.concatenate([jnp.zeros_like(cuts[:1]), jnp.cumsum(-(-jnp.diff(cuts) // size))])  # [N + 1], in chunks
    entry = jnp.arange(T // size + r.num_sequences, dtype=cuts.dtype)
    sequence = jnp.minimum(jnp.searchsorted(begins[1:], entry, side="right"), r.num_sequences - 1).astype(cuts.dtype)
    first = cuts[sequence] + (entry - begins[sequence]) * size
    return Chunks(size, begins[-1], first, jnp.minimum(first + size, cuts[sequence + 1]), sequence)


def with_room(r: Recurrence, size: int) -> Recurrence:
    """r; where T is a symbol and may be less than a chunk, with rows behind its last that fill one, which belong to no chunk."""
    rows = functools.partial(more_rows, size=size)
    decay = Decay(r.decay.constant, *map(rows, (r.decay.head, r.decay.key, r.decay.value)))
    return r.replace(q=rows(r.q), k=rows(r.k), v=rows(r.v), decay=decay)


def more_rows(x: Array | None, size: int) -> Array | None:
    if x is None or not is_symbol(T := x.shape[1]):
        return x
    return jnp.pad(x, ((0, 0), (0, -(-T // size) * size - T), *[(0, 0)] * (x.ndim - 2)))


def first_rows(x: Array | None, T: int) -> Array | None:
    """The inverse of `more_rows`."""
    return x[:, :T] if x is not None and is_symbol(T) else x
