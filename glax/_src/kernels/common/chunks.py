"""Build the table of a call's chunks: the rows of the T axis that each chunk holds. Packed sequences are cut in place.

T is the number of rows, N the number of sequences, and M the number of entries of the table.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glax._src.core.recurrence import Recurrence, is_symbol


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Hold the table of chunks. Chunk i holds the rows first[i] <= t < last[i], all of one sequence. Entries from `count` on
    are unused.

    size      the largest number of rows in a chunk
    count     the number of chunks
    sequence  the packed sequence of each chunk; 0 without packing, where a chunk holds these rows of all B sequences
    """

    size: int
    count: int | Int[Array, ""]
    first: Int[Array, "M"]
    last: Int[Array, "M"]
    sequence: Int[Array, "M"]


def chunks_of(r: Recurrence, size: int) -> Chunks:
    """Return the chunks of r: every sequence is cut into chunks of `size` rows, from its first row on."""
    return chunks_of_rows(r.q.shape[1], r.boundaries, size)


def chunks_of_rows(T: int, boundaries: Int[Array, "cuts"] | None, size: int) -> Chunks:
    """Return the chunks of T rows, which are one sequence, or the packed sequences between `boundaries` (`cu_seqlens`). Every
    sequence is cut into chunks of at most `size` rows, from its first row on.

    N packed sequences have at most M = T // size + N chunks, whatever their lengths. All packings with the same T and N
    therefore have the same shapes, and share one compiled program.
    """
    if boundaries is None:
        if is_symbol(T):
            count = -(-T // size)
            first = jnp.arange(count, dtype=jnp.int32) * size
            last = jnp.minimum(first + size, jnp.asarray(T, jnp.int32))
            return Chunks(size, jnp.asarray(count, jnp.int32), first, last, jnp.zeros_like(first))
        first = np.arange(0, T, size, dtype=np.int32)
        return Chunks(size, len(first), *map(jnp.asarray, (first, np.minimum(first + size, T), np.zeros_like(first))))
    cuts, N = jnp.clip(boundaries, 0, T), boundaries.shape[0] - 1
    begins = jnp.concatenate([jnp.zeros_like(cuts[:1]), jnp.cumsum(-(-jnp.diff(cuts) // size))])  # [N + 1], in chunks
    entry = jnp.arange(T // size + N, dtype=cuts.dtype)
    sequence = jnp.minimum(jnp.searchsorted(begins[1:], entry, side="right"), N - 1).astype(cuts.dtype)
    first = cuts[sequence] + (entry - begins[sequence]) * size
    return Chunks(size, begins[-1], first, jnp.minimum(first + size, cuts[sequence + 1]), sequence)


def pad_to_chunk(r: Recurrence, size: int) -> Recurrence:
    """Return r with zeros behind its T rows, up to a multiple of `size` rows, if T is symbolic; else r unchanged. A symbolic T
    may be less than `size`. No chunk holds the padding."""
    rows = functools.partial(pad_rows, size=size)
    decay = r.decay.map_tokens(rows)
    return r.replace(q=rows(r.q), k=rows(r.k), v=rows(r.v), decay=decay, erasure=jax.tree.map(rows, r.erasure))


def pad_rows(x: Array, size: int) -> Array:
    """Return x with zeros behind axis 1, up to a multiple of `size`, if the axis has a symbolic length; else x unchanged."""
    if not is_symbol(T := x.shape[1]):
        return x
    return jnp.pad(x, ((0, 0), (0, -(-T // size) * size - T), *[(0, 0)] * (x.ndim - 2)))


def trim_rows(x: Array, T: int) -> Array:
    """Return the first T rows of axis 1 of x, without those that `pad_rows` added. T: the length before padding; x is returned
    unchanged if T is not symbolic."""
    return x[:, :T] if is_symbol(T) else x
