"""Define the operands of softmax attention, and the blocks of rows and of keys that its kernels take."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Intervals(NamedTuple):
    """Row t of a sequence of rows reads the keys first[t] to last[t], and none if last[t] < first[t]."""

    first: Int[Array, "*rows"]
    last: Int[Array, "*rows"]

    def hold(self, keys: Int[Array, "S"]) -> Bool[Array, "*rows S"]:
        keys = jnp.expand_dims(keys, range(self.first.ndim))
        return (keys >= self.first[..., None]) & (keys <= self.last[..., None])

    def bounds(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return the lowest key that any row reads, and how many keys there are from it to the highest."""
        reads = self.last >= self.first
        low = jnp.min(jnp.where(reads, self.first, jnp.iinfo(jnp.int32).max))
        return low, jnp.maximum(jnp.max(jnp.where(reads, self.last, -1)) + 1 - low, 0)


class SoftmaxOperands(NamedTuple):
    """Hold q [B, T, Hq, D], k [B, S, Hk, D] and v [B, S, Hk, V] of one dtype. Row t reads the keys first[t] to last[t].

    first, last: [B, T], int32. cuts: None, or for B = 1 the rows cuts[n] to cuts[n + 1] of each sequence. The keys of a
    sequence may then lie far from those of the next.
    """

    q: Float[Array, "B T Hq D"]
    k: Float[Array, "B S Hk D"]
    v: Float[Array, "B S Hk V"]
    first: Int[Array, "B T"]
    last: Int[Array, "B T"]
    cuts: Int[Array, "ends"] | None


class StepOperands(NamedTuple):
    """Hold q [B, 1, Hq, D], and pools k [P, S, Hk, D] and v [P, S, Hk, V] of caches, of any dtype. Row b reads the keys first[b]
    to last[b] of row slots[b] of the pools, and none of a row from P on.

    v: None for values that are the first channels of the keys. first, last: [B, 1]. slots: from 0, of which none but P repeats;
    None for row b.
    """

    q: Float[Array, "B 1 Hq D"]
    k: Float[Array, "P S Hk D"]
    v: Float[Array, "P S Hk V"] | None
    first: Int[Array, "B 1"]
    last: Int[Array, "B 1"]
    slots: Int[Array, "B"] | None


class RowBlocks(NamedTuple):
    """Hold blocks of at most `size` neighbouring rows, in order: each row of a batch element lies in one block.

    begin: [B, count + 1], the first row of each block, and T. low, high: [B, count], the rows of a block read no key but low <=
    s < high. full_low, full_high: [B, count], all its rows read each key full_low <= s < full_high.
    """

    begin: Int[Array, "B edges"]
    low: Int[Array, "B count"]
    high: Int[Array, "B count"]
    full_low: Int[Array, "B count"]
    full_high: Int[Array, "B count"]


def row_blocks(operands: SoftmaxOperands, size: int) -> RowBlocks:
    """Divide the rows into blocks of `size`. With cuts, no block has rows of two sequences."""
    (B, T), S = operands.first.shape, operands.k.shape[1]
    if operands.cuts is None:
        count = -(-T // size)
        begin = jnp.broadcast_to(jnp.minimum(jnp.arange(count + 1, dtype=jnp.int32) * size, T), (B, count + 1))
        spare = [(0, 0), (0, count * size - T)]
        first, last = (jnp.pad(x, spare).reshape(B, count, size) for x in (operands.first, operands.last))
        is_row = (jnp.arange(count * size) < T).reshape(1, count, size)
    else:
        begin = sequence_begins(operands.cuts, T, size)[None]
        rows = begin[:, :-1, None] + jnp.arange(size, dtype=jnp.int32)
        is_row = rows < begin[:, 1:, None]
        first, last = (x[0, jnp.minimum(rows, T - 1)] for x in (operands.first, operands.last))
    reads = is_row & (last >= first)
    low, high = jnp.where(reads, first, S).min(-1), jnp.where(reads, last + 1, 0).max(-1)
    full_low = jnp.where(is_row, jnp.where(reads, first, S), 0).max(-1)
    full_high = jnp.where(is_row, jnp.where(reads, last + 1, 0), S).min(-1)
    return RowBlocks(begin, jnp.minimum(low, high), high, full_low, full_high)


def sequence_begins(cuts: Int[Array, "ends"], T: int, size: int) -> Int[Array, "edges"]:
    """Return the first row of each block, and T. The rows behind the last cut are one more sequence."""
    cuts = jnp.clip(jnp.concatenate([cuts.astype(jnp.int32), jnp.full(1, T, jnp.int32)]), 0, T).at[0].set(0)
    N = cuts.shape[0] - 1
    ends = jnp.cumsum(-(-jnp.diff(cuts) // size), dtype=jnp.int32)  # of the blocks of each sequence
    number = jnp.arange(T // size + N + 1, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(ends, number, side="right"), N - 1)
    before = jnp.where(own > 0, ends[own - 1], 0)
    return jnp.minimum(cuts[own] + (number - before) * size, cuts[own + 1])


def forward_table(blocks: RowBlocks, T: int, size: int) -> Int[Array, "B count 6"]:
    """Return what a program of rows reads: its first row in the [B T] rows, its rows, `low`, `high`, and how many blocks of
    `size` keys from `low` on come before those that all rows read, and how many these are."""
    count = -(-(blocks.high - blocks.low) // size)
    before = jnp.clip(-(-(blocks.full_low - blocks.low) // size), 0, count)
    full = jnp.clip((blocks.full_high - blocks.low) // size, before, count) - before
    start = jnp.arange(blocks.low.shape[0], dtype=jnp.int32)[:, None] * T + blocks.begin[:, :-1]
    columns = start, jnp.diff(blocks.begin), blocks.low, blocks.high, before, full
    return jnp.stack([x.astype(jnp.int32) for x in columns], -1)


def gradient_table(blocks: RowBlocks, T: int, S: int, rows: int, keys: int) -> Int[Array, "B N 4"]:
    """Return what a program of `keys` keys reads: rows of the [B T] rows, r <= t < r' that read a key, of which f <= t < f' all
    read each key, as (r, f, f', r'). f' - f is a multiple of `rows`, the size of the blocks."""
    starts = jnp.arange(-(-S // keys), dtype=jnp.int32) * keys
    ends = jnp.minimum(starts + keys, S)
    number = jnp.arange(blocks.low.shape[1], dtype=jnp.int32)

    def spread(x):
        return x[:, None, :]  # [B, 1, count], beside [N, 1] of the keys

    reads = (spread(blocks.low) < ends[:, None]) & (spread(blocks.high) > starts[:, None])
    whole: Bool[Array, "B N count"] = (spread(blocks.full_low) <= starts[:, None]) & (
        spread(blocks.full_high) >= ends[:, None]
    )
    whole = whole & spread(jnp.diff(blocks.begin) == rows)
    begin = jnp.where(reads, number, len(number)).min(-1)
    end = jnp.maximum(jnp.where(reads, number + 1, 0).max(-1), begin)
    full_end = jnp.maximum(jnp.where(whole & reads, number + 1, 0).max(-1), begin)
    broken = ~whole & (number >= begin[..., None]) & (number < full_end[..., None])
    full_begin = jnp.maximum(jnp.where(broken, number + 1, 0).max(-1), begin)
    base = jnp.arange(blocks.low.shape[0], dtype=jnp.int32)[:, None] * T
    edges = [base + jnp.take_along_axis(blocks.begin, x, 1) for x in (begin, full_begin, full_end, end)]
    return jnp.stack(edges, -1).astype(jnp.int32)
