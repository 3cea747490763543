"""Find the document of every token: a sequence, or a segment of a row."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_gpu.rows import PackedRow, boundaries_within


@dataclasses.dataclass(frozen=True)
class Documents:
    """Hold where the documents of each row begin, and which rows are tokens.

    begins: whether the scan of a document begins at each row. is_token: false for padding, which counts to the document before it
    in scan order, and for rows of no sequence.
    """

    begins: Bool[Array, "B T"]
    is_token: Bool[Array, "B T"]
    reverse: bool

    @classmethod
    def of(cls, r: Recurrence) -> "Documents":
        """Return the documents of r: its sequences, or the segments of its rows."""
        B, T = r.q.shape[:2]
        first = jnp.arange(T) == (T - 1 if r.reverse else 0)
        begins, is_token = jnp.broadcast_to(first, (B, T)), jnp.ones((B, T), bool)
        if r.boundaries is not None:
            packed = PackedRow(r)
            begins, is_token = begins | packed.begins, packed.is_token[None]
        elif r.segments is not None:
            begins = begins | r.segments.resets
            is_token = is_token if r.segments.is_token is None else r.segments.is_token
        return cls(begins, is_token, r.reverse)

    @property
    def first(self) -> int:
        """Return the row of memory that the scan takes first."""
        return -1 if self.reverse else 0

    @property
    def last(self) -> int:
        """Return the row of memory that the scan takes last."""
        return 0 if self.reverse else -1

    def in_order(self, x: Array) -> Array:
        """Return x [B, T, ...] in scan order, or from scan order in the order of memory."""
        return x[:, ::-1] if self.reverse else x

    def reach(self, bad: Bool[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
        """Return (whether a bad token of the same document is at or before each token in scan order, whether there is one)."""
        so_far = self.sums(bad.astype(jnp.int32))
        begins = self.in_order(self.begins)
        ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
        rows = jnp.arange(bad.shape[1], dtype=jnp.int32)
        last = lax.cummin(jnp.where(ends, rows, rows.size - 1), axis=1, reverse=True)
        whole = jnp.take_along_axis(self.in_order(so_far), last, axis=1)
        return so_far > 0, self.in_order(whole) > 0

    def sums(self, x: Array) -> Array:
        """Return the sums of x [B, T] over the tokens of each document up to each token, in scan order."""
        x, begins = self.in_order(x), self.in_order(self.begins)
        rows = jnp.arange(x.shape[1], dtype=jnp.int32)
        first = lax.cummax(jnp.where(begins, rows, 0), axis=1)
        total = jnp.cumsum(x, axis=1)
        return self.in_order(total - jnp.take_along_axis(total - x, first, axis=1))

    def any_bad(self, bad: Bool[Array, "B T *rest"]) -> Bool[Array, "B T"]:
        """Return whether anything of each token is bad; not of padding."""
        return bad.reshape(*bad.shape[:2], -1).any(2) & self.is_token

    def by_sequence(self, r: Recurrence, bad: Bool[Array, "B T"]) -> Bool[Array, "N"]:
        """Return whether any token of each sequence of r is bad."""
        if r.boundaries is None:
            return bad.any(1)
        cuts = boundaries_within(r)
        begin = jnp.clip(cuts[:-1, None], 0, bad.shape[1])
        rows = jnp.arange(bad.shape[1], dtype=cuts.dtype)
        return (bad & (rows >= begin) & (rows < cuts[1:, None])).any(1)


def positive(gates: Float[Array, "B T *rest"]) -> Float[Array, "B T"]:
    """Return the largest positive gate of each token in float32, at most 100; 0 for gates that are NaN."""
    gates = jnp.nan_to_num(gates.astype(jnp.float32), nan=0.0, posinf=100.0, neginf=0.0)
    return jnp.clip(gates, 0, 100).reshape(*gates.shape[:2], -1).max(2)
