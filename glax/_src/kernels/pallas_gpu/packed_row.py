"""Take packed sequences as one row of tokens, which the kernels read in place.

A boundary is a gate of -inf with per-head gates, and a marked token with per-key gates (`resets`). The row is divided into
segments like any other row, wherever its sequences begin.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.core.segments import Segments
from glax._src.kernels.pallas_gpu.plan import ROWS, C


class Edges(NamedTuple):
    """Find the chunks of a row that contain rows without a token, before its first sequence or behind its last. Such rows may
    hold NaN.

    The kernels read these chunks from copies of 3 C rows: the chunk of the first token, the chunk of the last token, and zeros.
    Outputs and gradients are then 0 in rows without a token.

    block: the C rows of a copy from which each chunk is read; -1 for a chunk of tokens alone, which is read in place.
    source: the row that each row of a copy holds; -1 for zeros.
    """

    block: Int[Array, "chunks"]
    source: Int[Array, "rows"]

    @classmethod
    def of(cls, r: Recurrence) -> "Edges":
        """Return the edges of the row that holds the packed sequences of r, for any values of r.boundaries."""
        T, cuts = r.q.shape[1], boundaries_within(r)
        low, high = cuts[0], cuts[-1]
        first, last = low // C, jnp.maximum(high - 1, low) // C
        begin = jnp.arange(-(-T // C), dtype=jnp.int32) * C
        is_full = (begin >= low) & (begin + C <= high)
        chunk = begin // C
        block = jnp.where(chunk == first, 0, jnp.where(chunk == last, 1, 2))
        rows = jnp.stack([first, last])[:, None] * C + jnp.arange(C, dtype=jnp.int32)
        source = jnp.where((rows >= low) & (rows < high), rows, -1).reshape(-1)
        source = jnp.concatenate([source, jnp.full(C, -1, source.dtype)])
        return cls(jnp.where(is_full, -1, block).astype(jnp.int32), source)

    def copy(self, x: Float[Array, "1 T heads width"]) -> Float[Array, "1 rows heads width"]:
        """Return the 3 C rows of x that `source` names."""
        found = jnp.take(x, jnp.maximum(self.source, 0), axis=1)
        return jnp.where((self.source >= 0)[:, None, None], found, 0)


@dataclasses.dataclass(frozen=True)
class LastChunk:
    """Read the last chunk of a row of T tokens from a copy, where 8 does not divide T.

    The kernels read the chunks before it in place, from the rows up to the last multiple of 8. XLA hands these on as they are,
    because they begin the array.
    """

    T: int

    @property
    def rows(self) -> int:
        """Return the number of rows that kernels read in place."""
        return self.T - self.T % ROWS

    @property
    def block(self) -> Int[Array, "chunks"]:
        """Return the block of C rows of a copy from which each chunk is read, or -1, as `Edges` does."""
        return jnp.where(jnp.arange(-(-self.T // C), dtype=jnp.int32) == self.T // C, 0, -1)

    def copy(self, x: Float[Array, "1 T heads width"]) -> Float[Array, "1 C heads width"]:
        """Return the rows of x in the last chunk, filled up with zeros."""
        return jnp.pad(x[:, self.T - self.T % C :], ((0, 0), (0, -self.T % C), (0, 0), (0, 0)))


def boundaries_within(r: Recurrence) -> Int[Array, "N+1"]:
    """Return the boundaries of packed sequences, each moved to the nearest of 0 ... T. Tokens lie between the first and the
    last."""
    assert r.boundaries is not None
    return jnp.clip(r.boundaries, 0, r.q.shape[1])


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Represent packed sequences r without initial states by one row of tokens."""

    r: Recurrence

    @property
    def cuts(self) -> Int[Array, "N+1"]:
        """Return the first row of every sequence and the row behind the last sequence, [N + 1]."""
        return boundaries_within(self.r)

    @property
    def is_token(self) -> Bool[Array, "T"]:
        """Return whether each row belongs to a sequence, [T]."""
        cuts, rows = self.cuts, jnp.arange(self.r.q.shape[1], dtype=jnp.int32)
        return (rows >= cuts[0]) & (rows < cuts[-1])

    @property
    def begins(self) -> Bool[Array, "T"]:
        """Return whether the scan of a sequence begins at each row, [T]. A row without a token may be marked too, which has no
        effect."""
        T, cuts = self.r.q.shape[1], self.cuts
        first = cuts[1:] - 1 if self.r.reverse else cuts[:-1]
        return jnp.zeros(T, bool).at[jnp.where(first < 0, T, first)].set(True, mode="drop")

    @property
    def sequence_of(self) -> Int[Array, "T"]:
        """Return the sequence of every row, [T], by comparison with all boundaries. This is one kernel, while a binary search
        is a loop of many."""
        rows = jnp.arange(self.r.q.shape[1], dtype=jnp.int32)
        found = jnp.searchsorted(self.cuts, rows, side="right", method="compare_all") - 1
        return jnp.clip(found, 0, self.r.num_sequences - 1)

    @property
    def row(self) -> Recurrence:
        """Return the recurrence of the row: per-head gates in float32 or their own dtype, -inf where a sequence begins. All
        sequences have one scale, as `bind` sets it."""
        r, d = self.r, self.r.decay
        if d.key is not None:
            segments = Segments((self.begins & self.is_token)[None], None)
            return r.replace(boundaries=None, segments=segments, scale=r.scale[:1])
        if d.head is not None:
            gates = d.head
        elif d.constant is not None:
            gates = d.constant.astype(jnp.float32)[self.sequence_of][None]
        else:
            gates = jnp.zeros((*r.q.shape[:2], r.num_heads), jnp.float32)
        gates = jnp.where(self.is_token[:, None], gates, 0)
        gates = jnp.where(self.begins[:, None], -jnp.inf, gates)
        return r.replace(boundaries=None, decay=Decay(head=gates), scale=r.scale[:1])

    def gate_gradient(self, d: Float[Array, "1 T H"]) -> Float[Array, "1 T H"]:
        """Return the gradient of the packed gates from the gradient of the row's gates. It is 0 where a sequence begins from
        zeros."""
        return jnp.where((self.is_token & ~self.begins)[:, None], d, 0)

    def per_sequence(self, x: Float[Array, "T H"]) -> Float[Array, "N H"]:
        """Return the sums over the tokens of each sequence, [N, H], in a fixed order: its whole chunks, then the parts of its
        first and last chunk."""
        T, cuts = self.r.q.shape[1], self.cuts
        begin, end = cuts[:-1, None], cuts[1:, None]
        x = jnp.pad(x, ((0, -T % C), (0, 0))).reshape(-1, C, x.shape[1])
        low = jnp.arange(len(x), dtype=jnp.int32) * C
        whole = (begin <= low) & (low + C <= end)
        total = jnp.einsum("nc,ch->nh", whole.astype(x.dtype), x.sum(1), precision="highest")
        first, last = begin[:, 0] // C, (end[:, 0] - 1) // C
        for chunk, counts in ((first, begin < end), (last, (begin < end) & (last != first)[:, None])):
            chunk = jnp.clip(chunk, 0, len(x) - 1)
            rows = chunk[:, None] * C + jnp.arange(C, dtype=jnp.int32)
            is_part = counts & (rows >= begin) & (rows < end) & ~jnp.take_along_axis(whole, chunk[:, None], axis=1)
            total += jnp.where(is_part[..., None], x[chunk], 0).sum(1)
        return total


@dataclasses.dataclass(frozen=True)
class EqualSequences:
    """Represent a batch r [B, T, ...] by packed sequences [1, B T, ...] of equal length, the same numbers in memory."""

    r: Recurrence

    @property
    def cuts(self) -> np.ndarray:
        """Return the boundaries, [B + 1]."""
        B, T = self.r.q.shape[:2]
        return (np.arange(B + 1) * T).astype(np.int32)

    @property
    def packed(self) -> Recurrence:
        """Return the packed recurrence, with the initial states and the scales of r."""
        return self.r.map_tokens(self.pack).replace(boundaries=jnp.asarray(self.cuts))

    def pack(self, x: Float[Array, "B T *rest"]) -> Float[Array, "1 B*T *rest"]:
        return x.reshape(1, -1, *x.shape[2:])

    def part(self, x: Float[Array, "1 B*T *rest"]) -> Float[Array, "B T *rest"]:
        return x.reshape(*self.r.q.shape[:2], *x.shape[2:])
