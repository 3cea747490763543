"""Place the rows of a recurrence in chunks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_gpu.plan import ROWS, C


@dataclasses.dataclass(frozen=True)
class Rows:
    """Place the rows of r in chunks. T is padded so that tiles of 8 rows divide it, and every packed sequence begins at a chunk's
    start.

    The fields beside r are None without packing, and int32 arrays with it. begins: [N + 1], the first chunk of every sequence.
    source: [chunks C], the row of r that every row of chunks holds, or -1; None where the kernels read packed rows in place, and
    write rows of chunks. place: [T], the row of chunks that holds every row of r. They are NumPy arrays where the boundaries are
    known while tracing.
    """

    r: Recurrence
    begins: Array | np.ndarray | None = None
    source: Array | None = None
    place: Array | np.ndarray | None = None

    @classmethod
    def of(cls, r: Recurrence, cuts: np.ndarray | None = None) -> "Rows":
        """Return the rows of r. Packed rows are read in place with per-key gates. With other gates, and under the delta rule,
        they are copied into chunks. cuts: the boundaries of r, if they are known while tracing; then all rows are tokens."""
        if r.boundaries is None:
            return cls(r)
        if cuts is not None:
            lead = cuts[:-1] % ROWS
            begins = np.append(np.zeros(1, np.int32), np.cumsum(-(-(np.diff(cuts) + lead) // C))).astype(np.int32)
            token = np.repeat(np.arange(len(lead)), np.diff(cuts))
            place = begins[token] * C + lead[token] + np.arange(cuts[-1]) - cuts[token]
            return cls(r, begins, None, place.astype(np.int32))
        T, N = r.q.shape[1], r.num_sequences
        bounds = jnp.clip(r.boundaries, 0, T)
        in_place = r.decay.form == "key" and r.erasure is None
        # rows of other sequences in the first chunk of each
        lead = jnp.where(jnp.diff(bounds) > 0, bounds[:-1] % ROWS, 0) if in_place else jnp.zeros_like(bounds[:-1])
        begins = jnp.concatenate([jnp.zeros_like(bounds[:1]), jnp.cumsum(-(-(jnp.diff(bounds) + lead) // C))])
        token = r.sequence_of
        place = begins[token] * C + lead[token] + jnp.arange(T) - bounds[token]
        if in_place:
            return cls(r, begins, None, place)
        rows = jnp.arange((T // C + N) * C)
        own = jnp.clip(jnp.searchsorted(begins * C, rows, side="right") - 1, 0, N - 1)
        source = bounds[own] + rows - begins[own] * C
        source = jnp.where((rows < begins[-1] * C) & (source < bounds[own + 1]), source, -1)
        return cls(r, begins, source, place)

    @property
    def in_place(self) -> bool:
        """Return whether the kernels read packed rows in place."""
        return self.begins is not None and self.source is None

    @property
    def most_chunks(self) -> int:
        """Return the largest number of chunks that packed sequences can take, for any lengths."""
        T, N = self.r.q.shape[1], self.r.num_sequences
        return (T + (ROWS - 1) * N * self.in_place) // C + N

    def sequence_of_chunk(self, chunks: int):
        """Return the sequence of each of `chunks` chunks of a packed call, in int32. Chunks behind the last count to it."""
        assert self.begins is not None, "only packed calls have chunks of several sequences"
        numpy: Any = np if isinstance(self.begins, np.ndarray) else jnp
        found = numpy.searchsorted(self.begins, numpy.arange(chunks), side="right") - 1
        return numpy.clip(found, 0, self.r.num_sequences - 1)

    def take(self, x):
        """Return x [B, T, ...] as the kernels read it: if packed, in place or in rows of chunks. Rows without a token are 0."""
        if self.source is not None:
            found = jnp.take(x, jnp.maximum(self.source, 0), axis=1)
            return jnp.where((self.source >= 0).reshape(1, -1, *(1,) * (x.ndim - 2)), found, 0)
        fill = -x.shape[1] % 8
        return jnp.pad(x, ((0, 0), (0, fill), *((0, 0),) * (x.ndim - 2))) if fill else x

    def put(self, x):
        """Return x [B, rows of chunks, ...] in the rows of r; 0 in padding."""
        T = self.r.q.shape[1]
        if self.place is None:
            return x[:, :T]
        found = jnp.take(x, self.place, axis=1)
        if isinstance(self.place, np.ndarray):
            return found
        return jnp.where(self.r.is_token.reshape(1, -1, *(1,) * (x.ndim - 2)), found, 0)


def widen(x, width: int):
    """Return x with its last axis padded with zeros to `width`."""
    return x if x.shape[-1] == width else jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, width - x.shape[-1])))
