"""Chunks of the time axis, packed sequences included, without moving a row."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glax.recurrence import Recurrence, is_symbol


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
