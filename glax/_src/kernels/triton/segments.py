"""Cut the time axis into segments. One table covers packed and unpacked sequences, both directions and padding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glax._src.core.recurrence import Recurrence

SEQUENCE = 3  # the column of the table that holds the sequence


@dataclasses.dataclass(frozen=True)
class Segments:
    """Represent the sequences as segments of at most `size` tokens, each of one sequence, in scan order. Every sequence has at
    least one segment.

    count: the number M of rows of the table.
    table: a row for each segment: (row of its first token in the [B * T] rows, rows to write, rows that hold tokens,
           sequence, edges, first chunk). Token p of a segment is p rows after its first token, or before it with
           `reverse`. Rows of padding are written and hold no token. edges: 1 for the first segment of a sequence, plus 2
           for its last, 0 in padding. first chunk: the index of its first chunk among the chunks of all sequences.
    begins: the segments of sequence n are begins[n] to begins[n + 1] - 1.

    T is in the values and never in the shape of a kernel, so one compiled kernel serves every T.
    """

    count: int
    table: Int[Array, "M 6"]
    begins: Int[Array, "N+1"]


def segments_of(r: Recurrence, size: int, chunk: int) -> Segments:
    """Return the segments of r: every sequence is cut into segments of `size` tokens, from its first token in scan order on.
    size: a multiple of `chunk`, the tokens of a chunk."""
    B, T = r.q.shape[:2]
    if r.boundaries is None:
        xp, starts, lengths = np, np.arange(B) * T, np.full(B, T)
    else:
        # Padding after the last cut is one more sequence, which has no tokens.
        cuts = jnp.clip(r.boundaries, 0, T).astype(jnp.int32)
        starts = cuts.at[0].set(0)
        xp, lengths = jnp, jnp.diff(jnp.append(starts, T))
    N = r.num_sequences
    begins, chunk_begins = (begins_of(xp, lengths, each, N) for each in (size, chunk))
    count = segment_count(r, size)
    entry = xp.arange(count, dtype=np.int32)
    sequence = xp.searchsorted(begins[1:], entry, side="right")
    unused = sequence >= len(lengths)
    sequence = xp.minimum(sequence, len(lengths) - 1)
    index = entry - begins[sequence]
    before = index * size
    length = xp.where(unused, 0, xp.clip(lengths[sequence] - before, 0, size))
    padding = unused | (sequence >= N)
    origin = starts[sequence] + (lengths[sequence] - 1 - before if r.reverse else before)
    edges = xp.where(index == 0, 1, 0) + xp.where(entry == begins[sequence + 1] - 1, 2, 0)
    columns = (
        xp.where(unused, 0, origin),
        length,
        xp.where(padding, 0, length),
        xp.minimum(sequence, N - 1),
        xp.where(padding, 0, edges),
        chunk_begins[sequence] + index * (size // chunk),
    )
    table = xp.stack(columns, axis=1).astype(np.int32)
    return Segments(count, jnp.asarray(table), jnp.asarray(begins[: N + 1].astype(np.int32)))


def segment_count(r: Recurrence, size: int) -> int:
    """Return M, the number of rows of `Segments.table`, for segments of `size` tokens. With packed sequences M is the largest
    number that any boundaries could need, and the rows behind the last segment are unused."""
    B, T = r.q.shape[:2]
    return -(-T // size) * B if r.boundaries is None else T // size + r.num_sequences + 1


def begins_of(xp, lengths, size: int, N: int):
    """Return the index of the first segment of each sequence, [len(lengths) + 1]. The first N sequences have at least one
    segment each.

    xp: the module numpy or jax.numpy. lengths: the tokens of each sequence.
    """
    counts = -(-lengths // size)
    counts = xp.where(xp.arange(len(lengths)) < N, xp.maximum(counts, 1), counts)
    return xp.concatenate([xp.zeros(1, counts.dtype), xp.cumsum(counts)])
