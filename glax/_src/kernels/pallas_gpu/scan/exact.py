"""Add to the outputs of chunks out of range the terms of their own tokens, with per-key gates, token by token:

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,  o_t += scale S_t^T q_t        S = 0 before the chunk

The sums are float32, and no tensor core multiplies. The only exponents are gates, so the sums are exact for all gates.
`key_scan` has written the terms of the state that enters the chunk.

Chunks and heads are distributed to groups (`place_of_item`), and each program of a group has 32 columns of the state. A program
is one warpgroup, whose threads have K/16 rows of 4 columns. It reads the flags of its group and ends if none is set. It forms
e^g, k and q of 8 tokens at a time in float32 in shared memory, and scans these tokens, reading one token ahead. Every thread
leaves its share of their outputs in shared memory, where the shares are summed.

Roles. One warpgroup does all. Memory: `Tiles`. Who waits for whom:

    waits    for      until
    compute  compute  tokens full: gates, q, k, v
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import ALONE, PROGRAM, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E, C, read, store
from glax._src.kernels.pallas_gpu.plan import ROWS, Scan, quotient, remainder, span

EXACT_GROUPS = 256  # of chunks and heads: each group has programs of its own
FLAGS = 128  # flags that such a program reads together, one per thread
# Of rows of the state, one to a thread, by warps. Two dimensions of 4: in one of 16 Pallas would look for ways to swizzle.
GROUPS = 4, 4
COLUMNS = 32  # of the state in a program
TOKENS, SLOTS = 8, 2  # formed in float32 together; of which shared memory holds so many times, one on its way
PARTS = C // TOKENS

# [TOKENS, *GROUPS, COLUMNS]: a thread has a pair of columns of one token.
SHARES = plgpu.Layout.TILED(
    Tiling(((TOKENS, *GROUPS, COLUMNS), (2, *GROUPS, COLUMNS), (2,))),
    warp_dims=(-9,),
    lane_dims=(-5, -2),
    vector_dim=-1,
)
VALUES = plgpu.Layout.WG_STRIDED((TOKENS, COLUMNS), vec_size=2)
FLAG_LAYOUT = plgpu.Layout.WG_STRIDED((FLAGS,), vec_size=1)


Ref = Any


def place_of_item(groups: int, item):
    """Return (the group, the index in the group) of a chunk and head. item: their index among all pairs of a chunk and a head,
    in which heads vary fastest. groups: the number of groups.

    Heads of a chunk lie in different groups, because gates are often out of range in all of them.
    """
    return remainder(item, groups), quotient(item, groups)


def shape_of_flags(items: int) -> tuple[int, int]:
    """Return the shape (groups, items of a group) of the array of flags, which `place_of_item` indexes. items: the number of
    pairs of a chunk and a head.

    The second number is rounded up to a multiple of FLAGS.
    """
    return EXACT_GROUPS, -(-items // (EXACT_GROUPS * FLAGS)) * FLAGS


def state_layout(rows: int):
    """Return the layout in registers of a state [*GROUPS, rows, COLUMNS], in which a thread has all rows of one group in every
    eighth column."""
    tiling = Tiling(((*GROUPS, rows, COLUMNS), (8,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-5, -2), vector_dim=-1)


class Operands(NamedTuple):
    """Hold references to the operands in global memory: the table of segments, flags of chunks, tokens, gates and scale. Each
    field's comment has its shape."""

    table: Ref  # [E, 4], or [E, 7] of a plan that clears rows
    flags: Ref  # `shape_of_flags`: `by_group` of `key_scan`
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV, V]
    gates: tuple[Ref, ...]  # the terms, [B, T, H, K] each
    scale: Ref  # [N + 1]
    newest: Ref = None  # [B, chunks, C], of a plan with resets: `rows.newest_resets`


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. q, k, v and gates: the next tokens as loaded. query, key, decay,
    value: the tokens that are scanned, in float32. shares: each thread's terms of the outputs. newest: `rows.newest_resets` of
    the chunk."""

    q: Ref  # [SLOTS, TOKENS, K]
    k: Ref  # [SLOTS, TOKENS, K]
    v: Ref  # [SLOTS, TOKENS, COLUMNS]
    gates: Ref  # [SLOTS, terms, TOKENS, K]
    query: Ref  # [TOKENS, *GROUPS, rows]
    key: Ref  # [TOKENS, *GROUPS, rows]
    decay: Ref  # [TOKENS, *GROUPS, rows]
    value: Ref  # [TOKENS, COLUMNS]
    shares: Ref  # [TOKENS, *GROUPS, COLUMNS]
    newest: Ref = None  # [C], of a plan with resets

    @classmethod
    def types(cls, w: Scan) -> "Tiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        tokens = plgpu.SMEM((SLOTS, TOKENS, w.K), jnp.bfloat16)
        factors = plgpu.SMEM((TOKENS, *GROUPS, w.K // math.prod(GROUPS)), jnp.float32)
        return cls(
            q=tokens,
            k=tokens,
            v=plgpu.SMEM((SLOTS, TOKENS, COLUMNS), jnp.bfloat16),
            gates=plgpu.SMEM((SLOTS, w.terms, TOKENS, w.K), jnp.bfloat16),
            query=factors,
            key=factors,
            decay=factors,
            value=plgpu.SMEM((TOKENS, COLUMNS), jnp.float32),
            shares=plgpu.SMEM((TOKENS, *GROUPS, COLUMNS), jnp.float32),
            newest=plgpu.SMEM((C,), jnp.int32) if w.resets else None,
        )


@dataclasses.dataclass(frozen=True)
class ExactPipeline(Pipeline):
    """Hold the barriers by which the one warpgroup waits for its own copies. tokens: a ring of slots of TOKENS tokens."""

    tokens: Ring

    @classmethod
    def planned(cls, w: Scan) -> "ExactPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch."""
        return cls(Ring(SLOTS, ("compute",), ("compute",), (*("gates",) * w.terms, "q", "k", "v"), released_by=()))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Hold the position of one chunk and head, and one program's columns of the state.

    o: the outputs in global memory, [B, rows of chunks, H, V]. batch: the batch row. chunk: the index of the chunk in the rows
    of o. columns: the slice of V. segment: the row of the table of the chunk's segment.

    A chunk has PARTS parts of TOKENS tokens. In this file `part` is the index of a part in scan order.
    """

    plan: Scan
    operands: Operands
    o: Ref
    tiles: Tiles
    pipeline: "ExactPipeline"
    batch: Any
    chunk: Any
    head: Any
    columns: slice | pl.Slice
    segment: Any

    @property
    def scale(self):
        """Return the scale of the chunk's sequence."""
        return self.operands.scale[self.operands.table[self.segment, 3]]

    @property
    def base(self):
        """Return the row of q, k, v and gates at which the chunk begins."""
        table, e = self.operands.table, self.segment
        if not self.plan.packed:
            return self.chunk * C
        return table[e, 4] * ROWS + (self.chunk - table[e, 1]) * C

    @property
    def rows(self) -> int:
        """Return the number of rows of the state that a thread holds: those of one group."""
        return self.plan.K // math.prod(GROUPS)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state in registers, whose first three axes are K."""
        return *GROUPS, self.rows, COLUMNS

    def along(self, x):
        """Return x [*GROUPS, rows], repeated over the columns of the state."""
        return lax.broadcast_in_dim(x, self.state_shape, [0, 1, 2])

    def across(self, x):
        """Return x [COLUMNS], repeated over the rows of the state."""
        return lax.broadcast_in_dim(x, self.state_shape, [3])

    def first_row(self, part):
        """Return the row within the chunk at which a part begins."""
        return self.plan.chunk_at(part, PARTS) * TOKENS

    def of_keys(self, x, part):
        """Return the reference [TOKENS, K] to the rows of a part in x [B, T, heads, K]."""
        head = self.plan.blocks.of_keys(self.head, self.plan.H, x.shape[2])
        channels = span(0, self.plan.K, x.shape[3])
        return x.at[self.batch, pl.ds(self.base + self.first_row(part), TOKENS), head, channels]

    def of_values(self, x, part):
        """Return the reference [TOKENS, COLUMNS] to the rows of a part in x [B, T, heads, V]."""
        head = self.plan.blocks.of_values(self.head, self.plan.H, x.shape[2])
        return x.at[self.batch, pl.ds(self.base + self.first_row(part), TOKENS), head, self.columns]

    def own(self, x, part, layout):
        """Return x [TOKENS, ...], the rows of a part in registers, with 0 in the rows that do not belong to the chunk's
        sequence. These may hold NaN. layout: the layout of x."""
        if not self.plan.clears:
            return x
        table, e, row = self.operands.table, self.segment, self.base + self.first_row(part)
        token = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + row
        return jnp.where((token >= table[e, 5]) & (token < table[e, 6]), x, 0.0)


def load(c: Chunk, part):
    """Start to load the rows of a part into their slot of shared memory. Do nothing if `part` is not below PARTS."""
    slot, at = remainder(part, SLOTS), c.operands

    @pl.when(part < PARTS)
    def _():
        for term in range(c.plan.terms):
            source, tile = c.of_keys(at.gates[term], part), c.tiles.gates.at[slot, term]
            c.pipeline.tokens.copy(source, tile, slot)
        for source, tile in ((at.q, c.tiles.q), (at.k, c.tiles.k)):
            c.pipeline.tokens.copy(c.of_keys(source, part), tile.at[slot], slot)
        c.pipeline.tokens.copy(c.of_values(at.v, part), c.tiles.v.at[slot], slot)


def form_factors(c: Chunk, part, slot):
    """Store e^g, k, q and v of a part in shared memory in float32, with 0 in rows of another sequence. slot: the slot of the
    part."""
    t, flat = c.tiles, plgpu.Layout.WG_STRIDED((TOKENS, c.plan.K), vec_size=4)

    def by_group(x):
        return x.reshape(TOKENS, *GROUPS, c.rows)

    def own(tile, layout=flat):
        return c.own(read(tile, layout), part, layout)

    g = jnp.maximum(sum(own(t.gates.at[slot, term]) for term in range(c.plan.terms)), LOG_OF_ZERO)
    t.decay[...] = by_group(jnp.exp2(g * LOG2E))
    t.key[...], t.query[...] = by_group(own(t.k.at[slot])), by_group(own(t.q.at[slot]))
    t.value[...] = own(t.v.at[slot], VALUES)
    plgpu.commit_smem()


def scan_tokens(c: Chunk, part, S):
    """Return the state [*GROUPS, rows, COLUMNS] behind a part, whose factors are stored. Store every thread's share of the
    outputs of its tokens in `Tiles.shares`.

    S: the state before the part, in registers.
    """
    w, t, layout = c.plan, c.tiles, state_layout(c.rows)
    of_key, of_value = layout.reduce(3), layout.reduce(0).reduce(0).reduce(0)

    def operands(i):
        token = w.chunk_at(i, TOKENS)
        decay, *rows = (plgpu.load(ref.at[token], layout=of_key, optimized=False) for ref in (t.decay, t.key, t.query))
        if w.resets:
            decay = decay * passes(c, part * TOKENS + i)
        return decay, *rows, plgpu.load(t.value.at[token], layout=of_value)

    def advance(i, carry):
        """Advance the state by one token. The next token's operands are read before this token's are used."""
        S, (decay, k, q, v) = carry
        after = operands(jnp.minimum(i + 1, TOKENS - 1))
        S = S * c.along(decay) + c.along(k) * c.across(v)
        store(t.shares.at[w.chunk_at(i, TOKENS)], jnp.sum(S * c.along(q), axis=2))
        return S, after

    return lax.fori_loop(0, TOKENS, advance, (S, operands(0)))[0]


def passes(c: Chunk, i):
    """Return 0.0 if the chunk's i-th token in scan order resets the state, else 1.0."""
    row = c.plan.chunk_at(i, C)
    return (c.tiles.newest[row] != i).astype(jnp.float32)


def add_outputs(c: Chunk, part):
    """Add the outputs of a part, scale times the sums of its threads' shares, to the outputs that `key_scan` has written in
    global memory."""
    row = c.chunk * C + c.first_row(part)

    @pl.when(row < c.o.shape[1])
    def _():
        shares = plgpu.load(c.tiles.shares, layout=SHARES, optimized=False)
        # [TOKENS, COLUMNS]
        drawn = jnp.sum(jnp.sum(shares, axis=1), axis=1)
        target = c.o.at[c.batch, pl.ds(row, TOKENS), c.head, c.columns]
        before = plgpu.load(target, layout=SHARES.reduce(1).reduce(1), optimized=False)
        store(target, (before.astype(jnp.float32) + c.scale * drawn).astype(jnp.bfloat16))


def scan_chunk(c: Chunk):
    """Scan the tokens of one chunk from a state of zeros, and add their terms to the outputs in global memory."""
    for part in range(SLOTS):
        load(c, part)
    if c.plan.resets:
        newest = plgpu.load(c.operands.newest.at[c.batch, c.chunk], layout=tiles.BY_COLUMN, optimized=False)
        c.tiles.newest[...] = newest

    def advance(part, S):
        slot = remainder(part, SLOTS)
        c.pipeline.tokens.wait(slot)
        form_factors(c, part, slot)
        S = scan_tokens(c, part, S)
        plgpu.commit_smem()  # all are done with the tiles
        load(c, part + SLOTS)
        add_outputs(c, part)
        return S

    lax.fori_loop(0, PARTS, advance, tiles.zeros(c.state_shape, state_layout(c.rows)))


def scan_group(w: Scan, at: Operands, o: Ref, t: Tiles, pipeline: "ExactPipeline"):
    """Scan those chunks of the program's group that are out of range, in the program's columns. This is the whole work of a
    program.

    at: the operands. o: the outputs in global memory, which are changed in place. t: the tiles.
    """
    (B, T, H, V), groups = o.shape, at.flags.shape[0]
    blocks = V // COLUMNS
    chunks = -(-T // C)
    program = lax.axis_index(PROGRAM)
    block, group = remainder(program, blocks), quotient(program, blocks)
    # Chunks behind the last segment's hold no tokens, and nothing has written their flags.
    last = at.table.shape[0] - 1
    used = jnp.minimum(at.table[last, 1] + at.table[last, 2], chunks)
    items = ((B - 1) * chunks + used) * H
    # places of the group that hold a chunk and head
    held = quotient(jnp.maximum(items - group, 0) + (groups - 1), groups)

    def any_flag(first):
        """Return whether any of FLAGS flags is set, from the index `first` of the group on."""
        here = plgpu.broadcasted_iota(jnp.int32, (FLAGS,), 0, layout=FLAG_LAYOUT) + first < held
        flags = plgpu.load(at.flags.at[group, pl.ds(first, FLAGS)], layout=FLAG_LAYOUT)
        return jnp.max(jnp.where(here, flags, 0).astype(jnp.float32)) > 0

    def scan_item(place):
        item = place * groups + group
        row, head = quotient(item, H), remainder(item, H)
        batch, chunk = quotient(row, chunks), remainder(row, chunks)
        columns = pl.ds(block * COLUMNS, COLUMNS)
        scan_chunk(Chunk(w, at, o, t, pipeline, batch, chunk, head, columns, segment_of(at.table, batch, chunk)))

    @pl.loop(0, at.flags.shape[1], step=FLAGS)
    def _(first):
        @pl.when((first < held) & any_flag(first))
        def _():
            @pl.loop(first, jnp.minimum(first + FLAGS, held))
            def _(place):
                pl.when(at.flags[group, place] > 0)(lambda: scan_item(place))


def segment_of(table, batch, chunk):
    """Return the index of a chunk's segment in `table`, by bisection: the last segment that begins at or before the chunk.
    batch: the chunk's batch row."""

    def halve(_, between):
        low, high = between
        middle = quotient(low + high, 2)
        row, first = table[middle, 0], table[middle, 1]
        later = (row > batch) | ((row == batch) & (first > chunk))
        return jnp.where(later, low, middle), jnp.where(later, middle, high)

    E = table.shape[0]
    low, _ = lax.fori_loop(0, E.bit_length(), halve, (jnp.int32(0), jnp.int32(E)))
    return low


def exact_outputs(w: Scan, table, flags, q, k, v, g, scale, o, newest=None):
    """Return the outputs [B, T, H, V] in bfloat16. In chunks out of range the terms of the chunk's own tokens are added to o.

    flags: `Results.by_group` of `key_scan`. o: the outputs of `key_scan`, with T rows of chunks. g: a sequence of the terms of
    the gates. newest: `rows.newest_resets`, for a plan with resets. The other operands are as in `key_scan`.
    """
    return launch(
        "exact_outputs",
        w,
        functools.partial(scan_group, w),
        Operands(table, flags, q, k, v, tuple(g), scale, newest),
        o,
        (Tiles.types(w),),
        ALONE,
        ExactPipeline.planned(w),
        programs=o.shape[3] // COLUMNS * flags.shape[0],
        over=True,
    )
