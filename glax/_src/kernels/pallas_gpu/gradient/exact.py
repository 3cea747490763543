"""Compute the gradient of chunks whose per-key gates are out of range for `key` and `wide`, token by token in scan order:

    S_t = e^{g_t} S_{t-1} + k_t v_t^T                    dq_t = scale S_t do_t
    G_t = e^{g_{t+1}} G_{t+1} + scale q_t do_t^T         dk_t = G_t v_t,  dv_t = G_t^T k_t
    dg_t = <S_t, G_t> - k_t dk_t = dg_{t+1} + q_t dq'_t - k_t dk'_t

S is the state before the chunk and G = dL/dS behind it, both without scaling. dq' and dk' exclude the token's own terms, scale
(do_t . v_t) k_t and scale (do_t . v_t) q_t. These terms cancel in dg, which may be smaller than them by a factor of e^g. The
sums are float32, and no tensor core multiplies. The only exponents are gates, so the gradient is exact for all gates, and the
kernel is quick to compile. It is for gates that are rare.

Roles. A program has one warpgroup, *compute*, and there are two for each multiprocessor. It has half of K in dq, dk and dg, and
half of V in dv.

Memory: a chunk's tokens, and q dq / scale of every token. S and G are in registers. Where memory has fewer than D columns, they
and the results pass through tiles. Who waits for whom:

    waits    for      until
    compute  compute  tokens loaded: q, k, g, v, do, g_rest
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.launch import ALONE, PROGRAM, SUMS_WITHIN_WARPS, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Pipeline
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    WGMMA,
    by_column,
    by_row,
    read,
    tiled,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient.items import BF16, Items, Program, half
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder, span

Ref = Any

# [64 of K, V]: a thread has 4 rows of every eighth pair of columns, so that a sum over V takes 3 exchanges of 4 numbers.
ROWS = plgpu.Layout.TILED(
    Tiling(((64, 16), (16, 16), (4, 16), (4, 2))), warp_dims=(-8,), lane_dims=(-6, -3), vector_dim=-1
)
# [K, 64]: a thread has 8 of 64 rows, read together, of 4 columns: a sum over K takes 3 exchanges of 4 numbers.
STATE = plgpu.Layout.TILED(Tiling(((64, 64), (64, 16), (8, 4))), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1)
OF_K, OF_V = STATE.reduce(1), STATE.reduce(0)
OF_ROW, OF_COLUMN = ROWS.reduce(1), ROWS.reduce(0)


class Operands(NamedTuple):
    """Hold references to the operands, in global memory: those of the kernel for gates in range, and flags of the chunks whose
    gates are out of range."""

    of_chunks: Any  # `key.Operands`
    out_of_range: Ref  # [B, chunks, H]: whether this kernel computes a chunk
    any_out_of_range: Ref  # [programs]: whether any chunk of a program is out of range


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. q, k, v, g and do are the tokens of a chunk, [C, D] each in
    bfloat16."""

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    do: Ref
    g_rest: Ref  # the gates' second term, or None
    marks: Ref  # [C]: the chunk's part of `key.Operands.marks`, or None
    drawn: Ref  # [C, 64] float32: q dq / scale of every token
    copied: "CopiedTiles | None" = None  # where memory has fewer than D columns

    @classmethod
    def types(cls, n: Items) -> "Tiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        tile = plgpu.SMEM((C, n.D), BF16)
        return cls(
            *(tile,) * 5,
            g_rest=tile if n.terms == 2 else None,
            marks=plgpu.SMEM((C,), jnp.int32) if n.resets else None,
            drawn=plgpu.SMEM((C, 64), jnp.float32),
            copied=CopiedTiles.types(n) if n.pads_columns else None,
        )


class CopiedTiles(NamedTuple):
    """Hold the tiles through which states and results pass where memory has fewer than D columns.

    Copies fill the missing columns with zeros on loading, and drop them on storing.
    """

    rows: Ref  # [64, D]: a half of S or dS by channels of K
    columns: Ref  # [D, 64]: a half of dS by columns of V
    dq: Ref  # [C, 64]: the half of the results
    dk: Ref
    dg: Ref
    dv: Ref

    @classmethod
    def types(cls, n: Items) -> "CopiedTiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        tile = functools.partial(tiled, columns=n.tile)  # else the compiler looks for ways to swizzle
        return cls(tile(64, n.D), tile(n.D, 64), *(plgpu.SMEM((C, 64), BF16),) * 4)


@dataclass(frozen=True)
class ExactPipeline(Pipeline):
    """Hold the barriers by which the one warpgroup waits for its own copies. tokens: the tokens of a chunk. copied: one of
    `CopiedTiles`; None where memory has D columns."""

    tokens: Handoff
    copied: Handoff | None

    @classmethod
    def planned(cls, n: Items) -> "ExactPipeline":
        """Build the pipeline for the sizes n; its barriers are allocated at launch."""
        copies = "q", "k", "g", "v", "do", *("g_rest",) * (n.terms - 1)
        one = ("compute",)
        copied = Handoff(one, one, ("copied",), returned=False) if n.pads_columns else None
        return cls(Handoff(one, one, copies, returned=False), copied)


def gradient_exact(n: Items, operands, results, out_of_range):
    """Compute the chunks that are out of range again, and return the results with these chunks overwritten.

    n: the sizes and options of the kernel whose results they are. operands, results: `key.Operands`, and `key.Results`, which
    are overwritten. out_of_range: [B, chunks, H] in int32; not 0 for the chunks to compute.
    """
    programs = 2 * n.programs
    parts = jnp.repeat(out_of_range[..., :: n.summed].reshape(-1), n.team)
    by_program = jnp.pad(parts, (0, -parts.size % programs)).reshape(-1, programs).max(0)
    operands = Operands(operands, out_of_range, by_program)

    def body(*refs):
        compute_items(Program(n, *refs))

    return launch(
        "gradient_exact", n, body, operands, results, (Tiles.types(n),), ALONE, ExactPipeline.planned(n),
        programs=programs, over=True, params=SUMS_WITHIN_WARPS,
    )  # fmt: skip


def compute_items(p: Program):
    """Compute those of the program's parts that are out of range. A part is 64 channels of K in dq, dk and dg, and 64 columns
    of V in dv, of one chunk and head. Programs divide all parts among them, in range or not."""
    n, x = p.plan, p.operands
    first, step, heads = lax.axis_index(PROGRAM), 2 * n.programs, n.H // n.summed
    parts = n.team * n.B * n.chunks * heads

    @pl.when(x.any_out_of_range[first] != 0)
    def _():
        @pl.loop(first, parts, step=step)
        def _(part):
            item, part = lax.div(part, n.team), lax.rem(part, n.team)
            rest, head = quotient(item, heads), remainder(item, heads)
            b, c = quotient(rest, n.chunks), remainder(rest, n.chunks)

            @pl.when(x.out_of_range[b, c, head * n.summed] != 0)
            def _():
                def add(column, used):
                    return used + compute_block(Block.of(p, b, c, head * n.summed + column, part, head, column))

                layout = BY_ROW if n.resets else OF_ROW
                p.results.d_scale[b, c, head, part] = lax.fori_loop(0, n.summed, add, zeros((64,), layout))


@dataclass(frozen=True)
class Block:
    """Hold the position of what one call of `compute_block` computes: chunk c of batch row b, block h of the state, and half
    `part` of the block.

    p: the program. head: the block of K to which dq, dk and dg belong. column: the number of the block of V in its head; its
    terms are added to those of the blocks before. mine: the slice of the half's channels, or columns. Rows are those of the
    tiles in shared memory.
    """

    p: Program
    b: Any
    c: Any
    h: Any
    part: Any
    head: Any
    column: Any
    mine: Any  # the channels, or columns, of the half
    scale: Any

    @classmethod
    def of(cls, p: Program, b, c, h, part, head, column) -> "Block":
        """Return the block with the half's slice and the chunk's scale."""
        mine, scale = half(part), p.plan.scale(p.operands.of_chunks.scale, b, c)
        return cls(p, b, c, h, part, head, column, mine, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the half of S."""
        return 64, self.p.plan.D

    def row(self, i):
        """Return the row in the tiles of the chunk's i-th token in scan order."""
        return C - 1 - i if self.p.plan.reverse else i

    def of_half(self, tile: Ref, row):
        """Return row `row` of a tile [C, D], one token, in the half's 64 channels or columns: [64] in float32, in registers."""
        return read(tile.at[row, self.mine], OF_ROW)

    def of_all(self, tile: Ref, row):
        """Return row `row` of a tile [C, D], one token, in all columns: [D] in float32, in registers."""
        return read(tile.at[row], OF_COLUMN)

    def gate(self, row, load: Callable):
        """Return the log gates of a token, summed over their terms.

        row: the token's row in the tiles. load: `of_half` or `of_all`.
        """
        s = self.p.tiles
        g = load(s.g, row)
        return g if s.g_rest is None else g + load(s.g_rest, row)

    def passed(self, i, x):
        """Return x, or 0 if the i-th token in scan order is a reset. x: an array in registers, what passes between this token
        and the one before, in either direction."""
        marks = self.p.tiles.marks
        return x if marks is None else x * ((marks[self.row(i)] & 255) != i + 1).astype(jnp.float32)

    def own_score(self, row):
        """Return do . v of a token, repeated for 64 rows: [64] in registers, so that the sum stays within a warp. row: the
        token's row in the tiles."""
        do, v = (self.of_all(tile, row) for tile in (self.p.tiles.do, self.p.tiles.v))
        return jnp.sum(plgpu.layout_cast(by_column(do * v, self.shape), ROWS), axis=1)

    def state(self, x: Ref):
        """Load the half of S or dS with the half's 64 channels of K and all columns of V: [64, D] in float32, in registers. x:
        `S` or `dS` of the operands, in global memory."""
        place = x.at[self.b, self.c, self.h, self.mine, self.p.plan.block[1]]
        return plgpu.load(self.copied("rows", place), layout=ROWS, optimized=False).astype(jnp.float32)

    def columns_of_state(self, x: Ref):
        """Load the half of S or dS with all channels of K and the half's 64 columns of V: [D, 64] in float32, in registers. x:
        `S` or `dS` of the operands, in global memory."""
        place = x.at[self.b, self.c, self.h, self.p.plan.block[0], self.mine]
        return plgpu.load(self.copied("columns", place), layout=STATE, optimized=False).astype(jnp.float32)

    def copied(self, name: str, source: Ref) -> Ref:
        """Return the tile of `CopiedTiles` called `name`, after copying `source` to it, if memory has fewer than D columns;
        else `source`. The function waits for the copy. source: a reference in global memory."""
        if not self.p.plan.pads_columns:
            return source
        tile, copied = self.p.tiles.copied._asdict()[name], self.p.pipeline.copied
        plgpu.commit_smem()  # all warps have read the tile
        copied.copy(source, tile)
        copied.wait()
        return tile

    def result(self, name: str) -> Ref:
        """Return a reference to the chunk's rows and the half's columns of the result called `name`, [C, 64] in global
        memory."""
        head = self.h if name == "dv" else self.head
        return self.p.results._asdict()[name].at[self.b, pl.ds(self.c * C, C), head, self.mine]

    def load_results(self):
        """Load the sums over the blocks of V before this one, to which `store` adds, into `CopiedTiles`, and wait for them.
        Where memory has D columns, do nothing."""
        if self.p.plan.pads_columns and self.p.plan.summed > 1:

            @pl.when(self.column > 0)
            def _():
                for name in ("dq", "dk", "dg"):
                    self.copied(name, self.result(name))

    def send(self, *names: str):
        """Copy the results called `names` from `CopiedTiles` to global memory, and wait until they are there. Where memory has
        D columns, do nothing."""
        if self.p.plan.pads_columns:
            plgpu.commit_smem()
            for name in names:
                plgpu.copy_smem_to_gmem(self.p.tiles.copied._asdict()[name], self.result(name))
            plgpu.wait_smem_to_gmem(0)

    def store(self, row, of_values: bool = False, **results):
        """Store a token's results, [64] each in bfloat16: dv if `of_values`, else dq, dk or dg, added to those of the blocks of
        V before.

        The results go to global memory, or to `CopiedTiles` where memory has fewer than D columns. row: the token's row in the
        tiles. results: the numbers by result, [64] in float32.
        """
        n = self.p.plan
        if n.pads_columns:
            return self.store_in_tiles(row, of_values, **results)

        def stored(result: Ref, place):
            return plgpu.load(result.at[place], layout=OF_ROW, optimized=False).astype(jnp.float32)

        @pl.when(self.c * C + row < n.T)
        def _():
            for name, x in results.items():
                result = self.p.results._asdict()[name]
                place = self.b, self.c * C + row, self.h if of_values else self.head, self.mine
                if n.summed > 1 and not of_values:
                    before = functools.partial(stored, result, place)
                    x = x + lax.cond(self.column > 0, before, lambda: zeros((64,), OF_ROW))
                result[place] = x.astype(BF16)

    def store_in_tiles(self, row, of_values: bool, **results):
        """Store a token's results as `store` does, in the tiles that `send` copies to memory."""
        for name, x in results.items():
            tile = self.p.tiles.copied._asdict()[name]
            if self.p.plan.summed > 1 and not of_values:
                before = functools.partial(read, tile.at[row], OF_ROW)
                x = x + lax.cond(self.column > 0, before, lambda: zeros((64,), OF_ROW))
            tile[row] = x.astype(BF16)


def compute_block(at: Block):
    """Store one block's dv, and its dq, dk and dg added to those of the blocks of V before.

    Return q dq / scale, [64]: summed over tokens, by channel of the half; or with resets summed over these channels, by token.
    """
    load_tokens(at)
    at.load_results()
    S, used = compute_queries(at)
    at.send("dq")
    dS = at.state(at.p.operands.of_chunks.dS)
    plgpu.commit_smem()
    if at.p.plan.resets:
        used = used_by_token(at)
    compute_keys(at, S, dS)
    at.send("dk", "dg")
    compute_values(at)
    at.send("dv")
    return used


def load_tokens(at: Block):
    """Load the chunk's tokens into shared memory, and wait for them. In packed sequences, zero the rows of other sequences,
    which may hold NaN."""
    n, x, s = at.p.plan, at.p.operands.of_chunks, at.p.tiles
    plgpu.commit_smem()  # all are done with the tiles
    heads = n.heads_of(at.h)
    arrays = [(x.q, s.q, "q"), (x.k, s.k, "k"), (x.g, s.g, "g"), (x.v, s.v, "v"), (x.do, s.do, "do")]
    arrays += [(x.g_rest, s.g_rest, "g")] if n.terms == 2 else []
    for source, tile, name in arrays:
        columns = span(0, n.D, source.shape[3])
        at.p.pipeline.tokens.copy(source.at[at.b, n.rows_of(x.places, at.c), heads[name], columns], tile)
    if n.resets:
        s.marks[...] = plgpu.load(x.marks.at[at.b, at.c], layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
    at.p.pipeline.tokens.wait()
    if n.packed:
        clear_foreign(at, [tile for _, tile, _ in arrays])


def clear_foreign(at: Block, found):
    """Zero the rows of the tiles `found`, [C, D] each, that do not belong to the chunk's sequence."""
    n, places = at.p.plan, at.p.operands.of_chunks.places
    first, end, layout = places[at.c, 1], places[at.c, 2], plgpu.Layout.WG_STRIDED((C, n.D), vec_size=8)

    @pl.when((first > 0) | (end < C))
    def _():
        row = plgpu.broadcasted_iota(jnp.int32, (C, n.D), 0, layout=layout)
        for tile in found:
            x = plgpu.load(tile, layout=layout)
            tile[...] = jnp.where((row >= first) & (row < end), x, jnp.bfloat16(0))
        plgpu.commit_smem()


def compute_queries(at: Block):
    """Store dq of the half's channels. Return S behind the chunk, [64, D], and the sum of q dq / scale over tokens, [64] by
    channel."""
    s, shape = at.p.tiles, at.shape

    def advance(i, carry):
        S, used = carry
        row = at.row(i)
        S = S * by_row(at.passed(i, exp(at.gate(row, at.of_half))), shape)
        drawn = jnp.sum(S * by_column(at.of_all(s.do, row), shape), axis=1)
        s.drawn[row] = drawn * at.of_half(s.q, row)
        drawn += at.own_score(row) * at.of_half(s.k, row)
        S += by_row(at.of_half(s.k, row), shape) * by_column(at.of_all(s.v, row), shape)
        at.store(row, dq=at.scale * drawn)
        return S, used + drawn * at.of_half(s.q, row)

    return lax.fori_loop(0, C, advance, (at.state(at.p.operands.of_chunks.S), zeros((64,), OF_ROW)))


def compute_keys(at: Block, S, dS):
    """Store dk and dg of the half's channels. S, dS: the state behind the chunk, and dL/dS there, [64, D] each."""
    s, shape = at.p.tiles, at.shape

    def advance(i, carry):
        G, dg = carry
        token = C - 1 - i
        row = at.row(token)
        dk = jnp.sum(G * by_column(at.of_all(s.v, row), shape), axis=1)
        dg += at.scale * plgpu.load(s.drawn.at[row], layout=OF_ROW) - at.of_half(s.k, row) * dk
        G += by_row(at.scale * at.of_half(s.q, row), shape) * by_column(at.of_all(s.do, row), shape)
        dg = at.passed(token, dg)
        at.store(row, dk=dk + at.own_score(row) * at.scale * at.of_half(s.q, row), dg=dg)
        return G * by_row(at.passed(token, exp(at.gate(row, at.of_half))), shape), dg

    lax.fori_loop(0, C, advance, (dS, jnp.sum(S * dS, axis=1)))


def compute_values(at: Block):
    """Store dv of the chunk's tokens in the half's columns of V, [C, 64], by a scan of dL/dS against time."""
    s = at.p.tiles

    def of_keys(tile: Ref, row):
        return read(tile.at[row], OF_K)

    def advance(i, G):
        token = C - 1 - i
        row = at.row(token)
        q, k, g = of_keys(s.q, row), of_keys(s.k, row), at.gate(row, of_keys)
        G += by_row(at.scale * q, G.shape) * by_column(read(s.do.at[row, at.mine], OF_V), G.shape)
        at.store(row, of_values=True, dv=jnp.sum(G * by_row(k, G.shape), axis=0))
        return G * by_row(at.passed(token, exp(g)), G.shape)

    lax.fori_loop(0, C, advance, at.columns_of_state(at.p.operands.of_chunks.dS))


def used_by_token(at: Block):
    """Return q dq / scale of every token, summed over the channels of the half: `Tiles.drawn`, plus (do . v) (q . k) of the
    token itself."""
    s = at.p.tiles

    def tile(ref: Ref):
        return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)

    parts = range(at.p.plan.team)
    own = sum((tile(s.do.at[:, half(part)]) * tile(s.v.at[:, half(part)])).sum(1) for part in parts)
    return tile(s.drawn).sum(1) + own * (tile(s.q.at[:, at.mine]) * tile(s.k.at[:, at.mine])).sum(1)


def exp(x):
    """Return e^x in float32, by the base-2 exponential."""
    return jnp.exp2(x * LOG2E)
