"""Define the operands of softmax attention, and the blocks of rows and of keys that its kernels take."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class ReadBlocks:
    """Hold which blocks of `size` keys each row reads of its interval. Block n of row t has the keys from first[t] + n size on,
    and is read where bit n % 32 of words[t, n // 32] is set.

    words: [*rows, W], int32. A block behind the last bit is not read. first: of an `Intervals`, at least 0.
    """

    words: Any  # an array, or in a tree what stands for one
    size: int

    def hold(self, first: Int[Array, "*rows"], keys: Int[Array, "*rows S"]) -> Bool[Array, "*rows S"]:
        """Return whether the block of each key is read. Keys before `first` count as those of its block."""
        number = block_numbers(keys, first[..., None], self.size)
        return (self.of_rows(number // 32) >> (number % 32)) & 1 == 1

    def of_rows(self, word: Array) -> Array:
        """Return the words of these numbers [*rows, _] as uint32, 0 from W on."""
        count = self.words.shape[-1]
        found = jnp.take_along_axis(self.words, jnp.minimum(word, count - 1).astype(jnp.int32), -1)
        return jnp.where(word < count, found.astype(jnp.uint32), 0)


def block_numbers(keys: Array, first: Array, size: int) -> Array:
    """Return which block of `size` keys of a row has each key, 0 for a key before its first. The shapes are broadcast.

    They are uint32. Of numbers with signs a quotient that rounds down is several operations, which XLA repeats for every head.
    """
    return jnp.maximum(keys - first, 0).astype(jnp.uint32) // size


class ChosenKeys(NamedTuple):
    """Hold `Intervals` of keys and the `ReadBlocks` of them. It takes the place of `Intervals` in XLA's forms."""

    first: Int[Array, "*rows"]
    last: Int[Array, "*rows"]
    blocks: ReadBlocks

    def hold(self, keys: Int[Array, "S"]) -> Bool[Array, "*rows S"]:
        """Return which of these keys each row reads."""
        every = jnp.broadcast_to(keys, (*self.first.shape, len(keys)))
        return Intervals(self.first, self.last).hold(keys) & self.blocks.hold(self.first, every)

    def bounds(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return those of the intervals."""
        return Intervals(self.first, self.last).bounds()


class SoftmaxOperands(NamedTuple):
    """Hold q [B, T, Hq, D], k [B, S, Hk, D] and v [B, S, Hk, V] of one dtype. Row t reads the keys first[t] to last[t].

    first, last: [B, T], int32. cuts: None, or for B = 1 the rows cuts[n] to cuts[n + 1] of each sequence. The keys of a
    sequence may then lie far from those of the next. blocks: None, or which blocks of these keys a row reads; with cuts, all rows
    of a sequence then have one `first`, from which the list of a program's tiles begins.
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
        """Return which keys rows read."""
        if self.blocks is None:
            return Intervals(self.first, self.last)
        return ChosenKeys(self.first, self.last, self.blocks)


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


class Tiles(NamedTuple):
    """Hold for each program the tiles of rows and keys that it could take, those first that have a row which reads a key.

    places: [B, programs, most], where each tile is: the index of its first key, or the number of its block of rows. count: [B,
    programs], how many tiles are read.
    """

    places: Int[Array, "B programs most"]
    count: Int[Array, "B programs"]


def tiles_of_rows(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, keys: int) -> Tiles:
    """Return, for each block of rows, the tiles of `keys` consecutive keys of which one of its rows reads a key.

    The places, [B, blocks of rows, most], are the indices of the tiles' first keys in rising order, in front of those of tiles
    that are not read. blocks: as `row_blocks` returns them for `rows`, the most rows of a block.
    """
    assert operands.blocks is not None
    S = operands.k.shape[1]
    if operands.cuts is not None:  # a block has rows of one sequence
        S = min(S, operands.blocks.words.shape[-1] * 32 * operands.blocks.size)
    starts = blocks.low[..., None] + jnp.arange(-(-S // keys), dtype=jnp.int32) * keys
    return listed(starts, tiles_read(operands, blocks, rows, starts, keys))


def tiles_of_keys(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, keys: int) -> Tiles:
    """Return, for each tile of `keys` consecutive keys, the blocks of rows of which one row reads a key of it.

    The places, [B, tiles of keys, blocks of rows], are the numbers of these blocks in rising order, in front of the others.
    blocks: as `row_blocks` returns them for `rows`, the most rows of a block.
    """
    (B, count), N = blocks.low.shape, -(-operands.k.shape[1] // keys)
    starts = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32) * keys, (B, count, N))
    is_read = tiles_read(operands, blocks, rows, starts, keys).swapaxes(1, 2)
    return listed(jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), is_read.shape), is_read)


def tiles_read(operands: SoftmaxOperands, blocks: RowBlocks, rows: int, starts, keys: int) -> Bool[Array, "B count N"]:
    """Return whether a row of each block of rows reads one of the keys from starts [B, count, N] on. A tile touches at most 32
    blocks of keys."""
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
    """Return the tiles at these places, those that are read in front and in order."""
    order = jnp.argsort(~is_read, axis=-1, stable=True)
    return Tiles(jnp.take_along_axis(places, order, -1), is_read.sum(-1, dtype=jnp.int32))


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
