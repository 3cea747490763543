"""Define the operands of softmax attention, and the blocks of rows and of keys that its kernels take."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Intervals(NamedTuple):
    """Hold the keys that each row of queries reads: first[t] to last[t], both included, and none if last[t] < first[t].

    *rows: the axes of rows, such as [B, T]. The numbers are indices in the axis S of keys.
    """

    first: Int[Array, "*rows"]
    last: Int[Array, "*rows"]

    def hold(self, keys: Int[Array, "S"]) -> Bool[Array, "*rows S"]:
        """Return whether each row reads each of these keys. keys: indices."""
        keys = jnp.expand_dims(keys, range(self.first.ndim))
        return (keys >= self.first[..., None]) & (keys <= self.last[..., None])

    def bounds(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return (the lowest key that any row reads, the number of keys from there through the highest key that any row
        reads)."""
        reads = self.last >= self.first
        low = jnp.min(jnp.where(reads, self.first, jnp.iinfo(jnp.int32).max))
        return low, jnp.maximum(jnp.max(jnp.where(reads, self.last, -1)) + 1 - low, 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class ReadBlocks:
    """Hold which blocks of `size` keys each row reads of its interval. Block n of row t has the keys from first[t] + n size on,
    where `first` is of an `Intervals` and at least 0. The row reads the block where bit n % 32 of words[t, n // 32] is set.

    words: [*rows, W], int32. A block behind the last bit is not read.
    """

    words: Any  # an array, or in a tree what stands for one
    size: int

    def hold(self, first: Int[Array, "*rows"], keys: Int[Array, "*rows S"]) -> Bool[Array, "*rows S"]:
        """Return whether each row reads the block of each of its keys. first: the first key of each row's interval. keys:
        indices; a key before `first` counts as a key of block 0."""
        number = block_numbers(keys, first[..., None], self.size)
        return (self.of_rows(number // 32) >> (number % 32)) & 1 == 1

    def of_rows(self, word: Array) -> Array:
        """Return, for each row, the words of the given numbers, as uint32 [*rows, count]. word: [*rows, count], indices in the
        last axis of `words`; from W on, 0 is returned."""
        count = self.words.shape[-1]
        found = jnp.take_along_axis(self.words, jnp.minimum(word, count - 1).astype(jnp.int32), -1)
        return jnp.where(word < count, found.astype(jnp.uint32), 0)


def block_numbers(keys: Array, first: Array, size: int) -> Array:
    """Return the number (key - first) // size of the block that holds each key, as uint32; 0 for a key before `first`. first:
    the first key of the row's interval. The shapes of keys and first are broadcast.

    Division of unsigned integers rounds down in one operation. With signs it takes several, which XLA repeats for every head.
    """
    return jnp.maximum(keys - first, 0).astype(jnp.uint32) // size


class ChosenKeys(NamedTuple):
    """Hold which keys each row reads: of the keys first[t] to last[t], as in `Intervals`, those in the blocks that `blocks`
    marks. XLA's forms take a ChosenKeys in place of an `Intervals`."""

    first: Int[Array, "*rows"]
    last: Int[Array, "*rows"]
    blocks: ReadBlocks

    def hold(self, keys: Int[Array, "S"]) -> Bool[Array, "*rows S"]:
        """Return whether each row reads each of these keys. keys: indices."""
        every = jnp.broadcast_to(keys, (*self.first.shape, len(keys)))
        return Intervals(self.first, self.last).hold(keys) & self.blocks.hold(self.first, every)

    def bounds(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return `Intervals.bounds` of first and last: (the lowest key, the number of keys). `blocks` has no effect."""
        return Intervals(self.first, self.last).bounds()


class SoftmaxOperands(NamedTuple):
    """Hold q [B, T, Hq, D], k [B, S, Hk, D] and v [B, S, Hk, V] of one dtype. Row t of queries reads the keys first[t] to
    last[t], both included.

    first, last: [B, T], int32. cuts: None; or with B = 1 the boundaries of packed sequences, where sequence n has the rows of
    queries cuts[n] <= t < cuts[n + 1]. The keys of a sequence may then lie far from those of the next. blocks: None if a row
    reads all keys of its interval, else the blocks of these keys that it reads. With cuts and blocks, all rows of a sequence
    have one `first`, from which the list of a program's tiles begins.
    """

    q: Float[Array, "B T Hq D"]
    k: Float[Array, "B S Hk D"]
    v: Float[Array, "B S Hk V"]
    first: Int[Array, "B T"]
    last: Int[Array, "B T"]
    cuts: Int[Array, "ends"] | None
    blocks: ReadBlocks | None = None

    @property
    def keys_read(self) -> Intervals | ChosenKeys:
        """Return which keys each row reads: `Intervals` without blocks, else `ChosenKeys`."""
        if self.blocks is None:
            return Intervals(self.first, self.last)
        return ChosenKeys(self.first, self.last, self.blocks)


class StepOperands(NamedTuple):
    """Hold the operands of one query for each of B rows: q [B, 1, Hq, D], and the caches k [P, S, Hk, D] and v [P, S, Hk, V],
    pools of P slots of S keys, in any dtype. Row b reads the keys first[b] to last[b], both included, of slot slots[b].

    v: None if the values are the first channels of the keys. first, last: [B, 1]. slots: integers from 0; a row with slot P
    reads nothing, and no other slot is repeated. None if row b has slot b.
    """

    q: Float[Array, "B 1 Hq D"]
    k: Float[Array, "P S Hk D"]
    v: Float[Array, "P S Hk V"] | None
    first: Int[Array, "B 1"]
    last: Int[Array, "B 1"]
    slots: Int[Array, "B"] | None


class RowBlocks(NamedTuple):
    """Hold blocks of neighbouring rows of queries, in order. Each row of a batch element lies in one block.

    begin: [B, count + 1], the first row of each block, and T. low, high: [B, count]; the rows of a block read only keys s with
    low <= s < high. full_low, full_high: [B, count]; every row of the block reads each key s with full_low <= s < full_high.
    """

    begin: Int[Array, "B edges"]
    low: Int[Array, "B count"]
    high: Int[Array, "B count"]
    full_low: Int[Array, "B count"]
    full_high: Int[Array, "B count"]


def row_blocks(operands: SoftmaxOperands, size: int) -> RowBlocks:
    """Return the rows divided into blocks of at most `size` rows. With cuts, no block has rows of two sequences."""
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
    """Return the first row of each block of at most `size` rows, and T, when each sequence is divided from its first row on:
    [count + 1].

    cuts: the boundaries of sequences. Rows before the first count to the first sequence; rows behind the last are one more
    sequence. Unused blocks at the end begin at T and have no rows.
    """
    cuts = jnp.clip(jnp.concatenate([cuts.astype(jnp.int32), jnp.full(1, T, jnp.int32)]), 0, T).at[0].set(0)
    N = cuts.shape[0] - 1
    ends = jnp.cumsum(-(-jnp.diff(cuts) // size), dtype=jnp.int32)  # of the blocks of each sequence
    number = jnp.arange(T // size + N + 1, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(ends, number, side="right"), N - 1)
    before = jnp.where(own > 0, ends[own - 1], 0)
    return jnp.minimum(cuts[own] + (number - before) * size, cuts[own + 1])


def forward_table(blocks: RowBlocks, T: int, size: int) -> Int[Array, "B count 6"]:
    """Return what each program of the forward reads, one block of rows: [B, count, 6] in int32.

    The columns: the block's first row in the [B T] rows; its number of rows; `low`; `high`; the number of tiles of `size` keys,
    from `low` on, before those that all rows of the block read; the number of tiles that all rows read. size: the keys of a
    tile.
    """
    count = -(-(blocks.high - blocks.low) // size)
    before = jnp.clip(-(-(blocks.full_low - blocks.low) // size), 0, count)
    full = jnp.clip((blocks.full_high - blocks.low) // size, before, count) - before
    start = jnp.arange(blocks.low.shape[0], dtype=jnp.int32)[:, None] * T + blocks.begin[:, :-1]
    columns = start, jnp.diff(blocks.begin), blocks.low, blocks.high, before, full
    return jnp.stack([x.astype(jnp.int32) for x in columns], -1)


class Tiles(NamedTuple):
    """Hold for each program the tiles of rows and keys that it could take. Those in which a row reads a key come first.

    places: [B, programs, most], where each tile lies: the index of its first key, or the number of its block of rows. count:
    [B, programs], how many of them have a row that reads a key.
    """

    places: Int[Array, "B programs most"]
    count: Int[Array, "B programs"]


def tiles_of_rows(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, keys: int) -> Tiles:
    """Return, for each block of rows, the tiles of `keys` consecutive keys of which one of its rows reads a key.

    The places, [B, blocks of rows, most], are the indices of the tiles' first keys: in rising order those of tiles that are
    read, then the others. blocks: the result of `row_blocks` for blocks of at most `rows` rows. operands.blocks must not be
    None.
    """
    assert operands.blocks is not None
    S = operands.k.shape[1]
    if operands.cuts is not None:  # a block has rows of one sequence
        S = min(S, operands.blocks.words.shape[-1] * 32 * operands.blocks.size)
    starts = blocks.low[..., None] + jnp.arange(-(-S // keys), dtype=jnp.int32) * keys
    return listed(starts, tiles_read(operands, blocks, rows, starts, keys))


def tiles_of_keys(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, keys: int) -> Tiles:
    """Return, for each tile of `keys` consecutive keys, the blocks of rows of which one row reads a key of the tile.

    The places, [B, tiles of keys, blocks of rows], are the numbers of the blocks of rows: in rising order those that read a
    key, then the others. blocks: the result of `row_blocks` for blocks of at most `rows` rows. operands.blocks must not be
    None.
    """
    (B, count), N = blocks.low.shape, -(-operands.k.shape[1] // keys)
    starts = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32) * keys, (B, count, N))
    is_read = tiles_read(operands, blocks, rows, starts, keys).swapaxes(1, 2)
    return listed(jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), is_read.shape), is_read)


def tiles_read(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, starts, keys: int) -> Bool[Array, "B count N"]:
    """Return whether a row of each block of rows reads one of the `keys` keys of each tile. starts: [B, count, N], the first
    key of each of the N tiles of a block of rows. A tile must touch at most 32 blocks of keys of `operands.blocks`."""
    assert operands.blocks is not None
    (B, T), size = operands.first.shape, operands.blocks.size
    own = blocks.begin[:, :-1, None] + jnp.arange(rows, dtype=jnp.int32)
    batch, row = jnp.arange(B)[:, None, None], jnp.minimum(own, T - 1)
    first, last, words = (x[batch, row] for x in (operands.first, operands.last, operands.blocks.words))
    of_row = ReadBlocks(words, size)
    begin, end = starts[:, :, None], starts[:, :, None] + keys - 1  # beside [B, count, rows, 1]
    first, last, is_row = first[..., None], last[..., None], (own < blocks.begin[:, 1:, None])[..., None]
    meets = is_row & (begin <= last) & (end >= first)
    low = block_numbers(begin, first, size)
    high = block_numbers(jnp.minimum(end, last), first, size)
    word, bit = low // 32, low % 32
    bits = (of_row.of_rows(word) >> bit) | ((of_row.of_rows(word + 1) << 1) << (31 - bit))
    within = (jnp.uint32(2) << jnp.minimum(high - low, 31)) - 1
    return (meets & (bits & within != 0)).any(2)


def listed(places: Int[Array, "B N most"], is_read: Bool[Array, "B N most"]) -> Tiles:
    """Return `Tiles` with the places sorted: first those where is_read is True, then the others, both in the given order."""
    order = jnp.argsort(~is_read, axis=-1, stable=True)
    return Tiles(jnp.take_along_axis(places, order, -1), is_read.sum(-1, dtype=jnp.int32))


def gradient_table(blocks: RowBlocks, T: int, S: int, rows: int, keys: int) -> Int[Array, "B N 4"]:
    """Return which rows the program of each tile of `keys` keys reads: (r, f, f', r'), [B, N, 4] in int32.

    The numbers are indices of the [B T] rows. Rows outside of r <= t < r' read no key of the tile. Rows f <= t < f' all read
    each of its keys; f' - f is a multiple of `rows`. blocks: the result of `row_blocks` for blocks of at most `rows` rows.
    """
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
