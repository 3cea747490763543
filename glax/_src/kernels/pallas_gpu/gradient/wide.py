"""Compute the gradient of every chunk of heads wider than 128 columns, with per-key gates. dq, dk and dg are summed over V on
chip.

The formulas are those of `key`. In these, do S'^T, v dS'^T, do v^T and <S', dS'> are sums over the columns of V. A program has
one chunk of 128 channels of K, an item. It scales q and k once, adds up these sums in registers over steps of 64 columns, stores
the columns of dv at each step, and forms dq, dk and dg behind the last step. q, k and the gates are therefore read once, and dq,
dk and dg are written once. Separate blocks of 128 columns would read and write them once for each block.

Roles. *load* loads, a step ahead. *scores* and *values* compute, each with 64 channels. The first also forms do v^T, and the
second dv.

Memory. The tiles of a step lie in two stages, and those of q and k in two slots, or one where gates have two terms. x, then dq,
overwrites q; y, then dk, overwrites k; dv overwrites do. Scores lie in two tiles: A^T, then what dA^T loses; and dA^T. Who waits
for whom:

    waits           for             until
    scores, values  load            keys full: q, k
    load            scores, values  keys free
    scores, values  load            gates loaded: marks, gates
    load            scores, values  gates read
    scores, values  load            columns full: v, do, S, dS
    load            scores, values  columns free
    values          scores          scored full
    scores, values  scores, values  met
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, SUMS_WITHIN_WARPS, WARPGROUP, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    by_row,
    high_part,
    product,
    read,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient import exact, items, key
from glax._src.kernels.pallas_gpu.gradient.items import (
    BF16,
    TILE,
    Items,
    ScanOrder,
    columns,
    half,
    marks,
    masked,
    store_rounded,
    tokens,
)
from glax._src.kernels.pallas_gpu.plan import Blocks, C, quotient, remainder

STAGES = 2  # steps whose tiles lie in shared memory: one in work, one on its way
STEPS = 2  # of 64 columns in a block of 128
REGISTERS = 40, 232  # of a thread that loads, and of one that computes
ROLES = dict(scores=1, values=1, load=1)

Ref = Any


@dataclasses.dataclass(frozen=True)
class WideItems(Items):
    """Hold the sizes that the kernel is compiled for.

    An item is one chunk of one block of K, 128 channels, of one head. Each of its steps takes 64 columns of V. `summed` is the
    number of blocks of V.
    """

    @property
    def key_blocks(self) -> int:
        """Return the number of blocks of K of all heads."""
        return self.H // self.blocks.columns

    @property
    def steps(self) -> int:
        """Return the number of steps of an item."""
        return STEPS * self.blocks.columns

    @property
    def slots(self) -> int:
        """Return the number of slots in shared memory, each for q and k of one item."""
        return 1 if self.terms == 2 else 2

    def num_items(self, program):
        """Return the number of a program's items: program, program + programs, ... program: the program's number."""
        total = self.B * self.chunks * self.key_blocks
        return lax.div(total - program + (self.programs - 1), jnp.int32(self.programs))


class Operands(NamedTuple):
    """Hold references to the operands, in global memory. Heads are blocks of 128 channels or columns: `rows` is the number of
    blocks of K of all heads, and `columns` the number of blocks of V of a head. HQ, HK and HV are the numbers of such heads of
    q, k and v."""

    q: Ref  # [B, T, HQ, 128]
    k: Ref  # [B, T, HK, 128]
    v: Ref  # [B, T, HV, 128]
    gates: tuple[Ref, ...]  # the terms, [B, T, rows, 128] each
    do: Ref  # [B, T, H * columns, 128]
    scale: Ref  # [B + 1]
    S: Ref  # [B, chunks, rows * columns, 128, 128]: the state before the chunk
    dS: Ref  # [B, chunks, rows * columns, 128, 128]: the gradient of the state behind the chunk
    tokens: Ref  # [C]: the place of every row in scanning order, from 1; with resets [B, chunks, C]: `items.marks`


class Tiles(NamedTuple):
    """Hold references to the shared memory. The second axis of q, k and gates, and the first of x_rest and y_rest, holds halves
    of the channels, one for each warpgroup."""

    q: Ref  # [slots, 2, C, 64]: q, then x, then dq
    k: Ref  # [slots, 2, C, 64]: k, then y, then dk
    gates: Ref  # [terms, 2, C, 64]
    x_rest: Ref  # [2, C, 64]: what x loses in bfloat16, then the gates' gradient from behind, then dg
    y_rest: Ref  # [2, C, 64]: what y loses, then the gates' gradient from before
    v: Ref  # [STAGES, C, 64]
    do: Ref  # [STAGES, C, 64]: do, then dv
    S: Ref  # [STAGES, 128, 64]
    dS: Ref  # [STAGES, 128, 64]
    scores: Ref  # [2, C, C], transposed: A, then what dA loses; dA; then by half what the gates' gradient loses
    sums: Ref  # [2, 64]: by half of the channels every token's score with itself, then sum_v S dS of each channel
    order: Ref  # [2, C]: `tokens`, for each warpgroup; with resets for every other item

    @classmethod
    def types(cls, n: WideItems) -> "Tiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        tiled = functools.partial(tiles.tiled, columns=n.tile)
        return cls(
            q=tiled(n.slots, 2, C, 64),
            k=tiled(n.slots, 2, C, 64),
            gates=tiled(n.terms, 2, C, 64),
            x_rest=tiled(2, C, 64),
            y_rest=tiled(2, C, 64),
            v=tiled(STAGES, C, 64),
            do=tiled(STAGES, C, 64),
            S=tiled(STAGES, 128, 64),
            dS=tiled(STAGES, 128, 64),
            scores=tiled(2, C, C),
            sums=plgpu.SMEM((2, C), jnp.float32),
            order=plgpu.SMEM((2, C), jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class WidePipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    keys: q and k of an item; they count as read once dq and dk have left their tiles. gates: the gates of an item, with its
    resets. columns: a step's columns of V; they count as read once dv has left its tile. scored: full once dA is formed from a
    step's do, which dv then overwrites. met: both computing roles.
    """

    keys: Ring
    gates: Handoff
    columns: Ring
    scored: Ring
    met: Meeting

    ORDER = (
        "keys.full", "gates.full", "gates.free", "keys.free", "columns.full",
        "columns.free", "scored.full", "met.all_there",
    )  # fmt: skip

    @classmethod
    def planned(cls, n: WideItems) -> "WidePipeline":
        """Build the pipeline for the sizes n; its barriers are allocated at launch."""
        load, scores, values = ("load",), ("scores",), ("values",)
        return cls(
            keys=Ring(n.slots, load, scores + values, ("q", "k") * 2),
            gates=Handoff(load, scores + values, (*("marks",) * n.resets, *("gates",) * (2 * n.terms))),
            columns=Ring(STAGES, load, scores + values, ("v", "do", "S", "dS")),
            scored=Ring(STAGES, scores, values, released_by=()),
            met=Meeting(scores + values),
        )


class Program(items.Program):
    """Hold the plan and the references of one program. i is everywhere the number of an item among the program's, from 0."""

    def place(self, i):
        """Return (batch row, chunk of the row, block of K among those of all heads) of the program's i-th item."""
        item = lax.axis_index(PROGRAM) + i * self.plan.programs
        rest = quotient(item, self.plan.key_blocks)
        return (
            quotient(rest, self.plan.chunks),
            remainder(rest, self.plan.chunks),
            remainder(item, self.plan.key_blocks),
        )

    def rows(self, i):
        """Return (batch row, slice of its C tokens) of the i-th item."""
        b, c, _ = self.place(i)
        return b, pl.ds(c * C, C)

    def block(self, i, step=0):
        """Return the index of the block of the state, along the third axis of `Operands.S`, that a step of the i-th item
        reads."""
        return self.place(i)[2] * self.plan.blocks.columns + quotient(step, STEPS)

    def stage(self, i, step):
        """Return the stage of shared memory that holds the tiles of a step of the i-th item."""
        return lax.rem(i * self.plan.steps + step, jnp.int32(STAGES))

    def parity(self, i):
        """Return the slot, 0 or 1, of the resets of the i-th item. The item before still reads its own when they are loaded."""
        return remainder(i, 2)

    def columns(self, step):
        """Return the slice of the 64 columns of a step within its block of V."""
        return half(remainder(step, STEPS), self.plan.in_memory[1])

    def channels(self, w):
        """Return the slice of the 64 channels of warpgroup w within its block of K."""
        return half(w, self.plan.in_memory[0])


def gradient_wide(
    q, k, v, g, d_output, scale, before, behind, out_of_range, *,
    reverse: bool, programs: int, blocks: Blocks, newest=None,
):  # fmt: skip
    """Return dq and dk of every block of K, [B, T, rows, 128]; dv of every block of the state, [B, T, rows * columns, 128]; dg
    of every block of K, [B, T, rows, 128]; all in bfloat16. Return d_scale too, [B, chunks, rows] in float32.

    The arguments are those of `gradient_key`, for blocks of 128 x 128: q, k, v, d_output [B, T, heads, 128] in bfloat16; g, one
    or two terms of the log gates, of the same shape; scale [B + 1] in float32; before, behind [B, chunks, rows * columns, 128,
    128] in bfloat16; out_of_range [B, chunks, rows * columns] and newest [B, chunks, 64] in int32. programs: the number of
    multiprocessors. With `newest`, d_scale is by token, [B, chunks, rows, 64].
    """
    (B, T), H = d_output.shape[:2], behind.shape[2]
    n = WideItems(
        B, T, H, behind.shape[3:], (q.shape[2], k.shape[2], v.shape[2]), programs, reverse, blocks,
        terms=len(g), summed=blocks.columns, resets=newest is not None,
    )  # fmt: skip
    order = marks(newest, reverse) if n.resets else tokens(reverse)
    operands = Operands(q, k, v, tuple(g), d_output, scale, before, behind, order)

    def body(*refs):
        p, wg = Program(n, *refs), lax.axis_index(WARPGROUP)
        pl.when(wg == 2)(acting_as("load")(functools.partial(load, p)))
        pl.when(wg < 2)(functools.partial(compute, p, wg))

    found = launch(
        "gradient_wide", n, body, operands, key.Results.types(n), (Tiles.types(n),), ROLES, WidePipeline.planned(n),
        programs=programs, is_longest=True, params=SUMS_WITHIN_WARPS,
    )  # fmt: skip
    g, g_rest = g if n.terms == 2 else (*g, None)
    marked = order if n.resets else None
    given = key.Operands(q, k, v, g, d_output, scale, before, behind, tokens(reverse), g_rest, None, marked)
    *gradients, d_scale = exact.gradient_exact(n, given, found, out_of_range)
    return *gradients, d_scale.sum(3) if n.resets else d_scale.sum((3, 4))


# ---- load -------------------------------------------------------------------------------------------------------------


def load(p: Program):
    """Load the tiles of every step as they become free, and q, k and the gates of the next item in between, as the role
    *load*."""
    n = p.plan
    plgpu.set_max_registers(REGISTERS[0], action="decrease")
    count = n.num_items(lax.axis_index(PROGRAM))

    load_gates(p, 0)
    load_keys(p, 0)

    @pl.loop(0, count)
    def _(i):
        @pl.loop(0, n.steps)
        def _(step):
            load_step(p, i, step)

            @pl.when((step == 1) & (i > 0))
            def _():
                p.pipeline.gates.acquire()
                load_gates(p, i)

            ahead = i + n.slots - 1  # whose keys find their place free next
            pl.when((step == 1) & (ahead > 0) & (ahead < count))(lambda: load_keys(p, ahead))


def load_keys(p: Program, i):
    """Start to load q and k of the i-th item, once dq and dk of the item that used their tiles have left shared memory."""
    n, slot = p.plan, lax.rem(jnp.int32(i), jnp.int32(p.plan.slots))
    p.pipeline.keys.acquire(slot, i)
    block = p.block(i)
    for x, heads, tile in zip((p.operands.q, p.operands.k), n.heads[:2], (p.tiles.q, p.tiles.k), strict=True):
        for w in range(2):
            source = x.at[(*p.rows(i), n.blocks.of_keys(block, n.H, heads), p.channels(w))]
            p.pipeline.keys.copy(source, tile.at[slot, w], slot)


def load_gates(p: Program, i):
    """Start to load the terms of the gates of the i-th item, in halves [C, 64] of the channels, and its resets."""
    if p.plan.resets:
        b, c, _ = p.place(i)
        p.pipeline.gates.copy(p.operands.tokens.at[b, c], p.tiles.order.at[p.parity(i)])
    for term in range(p.plan.terms):
        for w in range(2):
            source = p.operands.gates[term].at[(*p.rows(i), p.place(i)[2], p.channels(w))]
            p.pipeline.gates.copy(source, p.tiles.gates.at[term, w])


def load_step(p: Program, i, step):
    """Start to load the step's columns of v, do, S and dS into its stage, once the stage has been read. step: the step's number
    in the i-th item."""
    n, stage, block = p.plan, p.stage(i, step), p.block(i, step)
    columns, ring = p.columns(step), p.pipeline.columns
    ring.acquire(stage, i * n.steps + step)
    of_v, of_output = (n.blocks.of_values(block, n.H, heads) for heads in (n.heads[2], n.H // n.blocks.rows))
    ring.copy(p.operands.v.at[(*p.rows(i), of_v, columns)], p.tiles.v.at[stage], stage)
    source = p.operands.do.at[(*p.rows(i), of_output, columns)]
    ring.copy(source, p.tiles.do.at[stage], stage)
    b, c, _ = p.place(i)
    for x, tile in ((p.operands.S, p.tiles.S), (p.operands.dS, p.tiles.dS)):
        ring.copy(x.at[b, c, block, n.block[0], columns], tile.at[stage], stage)


# ---- compute ----------------------------------------------------------------------------------------------------------


def compute(p: Program, wg):
    """Compute every item of the program, in one of two warpgroups. wg: 0 for the role *scores*, 1 for *values*."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    if not p.plan.resets:
        order = p.tiles.order.at[wg]
        order[...] = plgpu.load(p.operands.tokens, layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
    pl.loop(0, p.plan.num_items(lax.axis_index(PROGRAM)))(functools.partial(compute_item, p, wg))
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Item:
    """Hold the i-th item of a program, and the tiles in shared memory that warpgroup w uses.

    slot: the slot of its q and k. scale: the scale of its batch row. scan: the masks over its tokens. q, k: its tiles, [2, C,
    64]. A, dA: the tiles of the transposed scores, [C, C]. parts: the numbers of the halves of the channels, 0 and 1.
    """

    p: Program
    w: Any
    i: Any
    slot: Any
    scale: Any
    scan: ScanOrder
    q: Any
    k: Any
    A: Any
    dA: Any
    parts: tuple

    @classmethod
    def of(cls, p: Program, w, i) -> "Item":
        """Return the i-th item for warpgroup w. Every stage forms it again, because the compiler would hold the addresses of
        all tiles throughout, and spill them."""
        w, i, zero = lax.optimization_barrier((w, i, jnp.int32(0)))
        slot = lax.rem(i, jnp.int32(p.plan.slots))
        scan = ScanOrder(p.plan.reverse, p.tiles.order.at[p.parity(i) if p.plan.resets else w], p.plan.resets)
        parts = zero, zero + 1
        tiles = p.tiles.q.at[slot], p.tiles.k.at[slot], *(p.tiles.scores.at[part] for part in parts)
        return cls(p, w, i, slot, p.operands.scale[p.place(i)[0]], scan, *tiles, parts)


def compute_item(p: Program, w, i):
    """Compute dq, dk, dv and dg of the program's i-th item, in warpgroup w."""
    scale_operands(Item.of(p, w, i))
    dx, dy_state, edge = add_columns(p, w, i)
    store_gradient(Item.of(p, w, i), dx, dy_state, edge)
    if p.plan.slots == 1:
        release_keys(p, jnp.int32(0))


def release_keys(p: Program, slot):
    """Report to *load* that the tiles of q and k in `slot` are free, once dq and dk have left them."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    p.pipeline.keys.release(slot)


def scale_operands(it: Item):
    """Replace q and k, in shared memory, by x = q e^M and y = k e^-M in two terms of bfloat16 each. Store each token's score
    with itself, and A^T.

    The function waits for the gates, q and k, and at the end for the other computing warpgroup.
    """
    p, w, t, slot = it.p, it.w, it.p.tiles, it.slot
    p.pipeline.gates.wait()
    M = gate_sums(it)
    p.pipeline.keys.wait(slot)
    q, k = it.q.at[w], it.k.at[w]
    t.sums.at[w][...] = (read(q) * read(k)).sum(1)
    x_rest, y_rest = store_rounded(q, read(q) * jnp.exp2(M)), store_rounded(k, read(k) * jnp.exp2(-M))
    if p.plan.slots == 2:
        pl.when(it.i > 0)(lambda: release_keys(p, 1 - slot))
    t.x_rest.at[w][...] = x_rest
    t.y_rest.at[w][...] = y_rest
    p.meet()

    @pl.when(w == 0)
    def _():
        """Store A^T = scale mask(y x^T), as three of the four products of two terms."""
        both = (it.k, it.q), (t.y_rest, it.q), (it.k, t.x_rest)
        pairs = [(y.at[part], x.at[part]) for y, x in both for part in it.parts]
        A = product(TILE, *((a, transposed(b)) for a, b in pairs))
        it.A[...] = masked(it.scan.before(), A * it.scale)

    p.meet()


def gate_sums(it: Item):
    """Return M, the sums of log2 gates from the chunk's middle, [C, 64] in float32, of the warpgroup's channels."""
    matrix, gates = it.scan.middle_matrix(), it.p.tiles.gates
    return product(TILE, *((matrix, gates.at[term, it.w]) for term in range(it.p.plan.terms))) * LOG2E


def add_columns(p: Program, w, i):
    """Sum over the columns of V. Return do S^T and v dS^T, [C, 64] each, and sum_v S dS, [64], of warpgroup w's channels.

    Warpgroup 0, *scores*, stores dA, and warpgroup 1, *values*, dv. Both meet at the end.
    """
    steps, nothing = p.plan.steps, (zeros(TILE), zeros(TILE), zeros((64,), BY_ROW))

    def with_scores():
        carry = lax.fori_loop(0, steps, functools.partial(advance_scores, p, w, i), (*nothing, zeros(TILE)))
        p.meet()
        store_score_gradient(Item.of(p, w, i), carry[3])
        return carry[:3]

    def with_values():
        found = lax.fori_loop(0, steps, functools.partial(advance_values, p, w, i), nothing)
        p.meet()
        return found

    found = lax.cond(w == 0, acting_as("scores")(with_scores), acting_as("values")(with_values))
    p.meet()
    return found


def step_tiles(it: Item, step):
    """Wait for the tiles of a step, and return its stage, its tiles of v and do, [C, 64], and the warpgroup's channels of S and
    dS, [64, 64]."""
    t, stage = it.p.tiles, it.p.stage(it.i, step)
    it.p.pipeline.columns.wait(stage)
    return stage, t.v.at[stage], t.do.at[stage], *(x.at[stage, half(it.w)] for x in (t.S, t.dS))


def advance_scores(p: Program, w, i, step, carry):
    """Return `carry` plus the terms of a step's 64 columns of V, in registers. `carry` holds do S^T, v dS^T, sum_v S dS and
    dA^T = v do^T.

    The function waits for the step's tiles, and releases them. w: the warpgroup. i: the program's item. step: the step's number
    in the item.
    """
    it, (dx, dy_state, edge, dA) = Item.of(p, w, i), carry
    stage, v, do, S, dS = step_tiles(it, step)
    found = tiles.added_all((dx, dy_state, dA), [(do, transposed(S))], [(v, transposed(dS))], [(v, transposed(do))])
    dx, dy_state, dA = found
    p.pipeline.scored.filled(stage)
    edge = edge + (read(S) * read(dS)).sum(1)
    p.pipeline.columns.release(stage)
    return dx, dy_state, edge, dA


def advance_values(p: Program, w, i, step, carry):
    """Return `carry` plus the terms of a step's 64 columns of V, in registers. `carry` holds do S^T, v dS^T and sum_v S dS.
    Write these columns of dv.

    The function waits for the step's tiles, and releases them. w: the warpgroup. i: the program's item. step: the step's number
    in the item.
    """
    it, (dx, dy_state, edge) = Item.of(p, w, i), carry
    stage, v, do, S, dS = step_tiles(it, step)
    dx, dy_state = tiles.added_all((dx, dy_state), [(do, transposed(S))], [(v, transposed(dS))])
    store_values(it, step, stage)
    edge = edge + (read(S) * read(dS)).sum(1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    p.pipeline.columns.release(stage)
    return dx, dy_state, edge


def store_values(it: Item, step, stage):
    """Store the step's columns of dv = A^T do + y dS in the tile of do, once *scores* has read that, and start to copy them to
    global memory."""
    p, t = it.p, it.p.tiles
    do, dS = t.do.at[stage], t.dS.at[stage]
    pairs = [(y.at[part], dS.at[half(part)]) for y in (it.k, t.y_rest) for part in it.parts]
    # [C, 64]
    if p.plan.resets:  # y dS has no rows before a reset
        dv = it.scan.to_state(product(TILE, *pairs))
        dv = tiles.added(dv, (it.A, do))
    else:
        dv = product(TILE, (it.A, do), *pairs)
    own = sum(plgpu.load(t.sums.at[part], layout=BY_ROW) for part in it.parts)
    dv = (dv + by_row(own * it.scale, TILE) * read(do)).astype(BF16)
    p.pipeline.scored.wait(stage)
    plgpu.commit_smem()  # all warps have read do
    do[...] = dv
    plgpu.commit_smem()
    target = p.results.dv.at[(*p.rows(it.i), p.block(it.i, step), p.columns(step))]
    plgpu.copy_smem_to_gmem(do, target)


def store_score_gradient(it: Item, dA):
    """Store dA^T in two terms of bfloat16, the second in the tile of A, which no product reads any more. dA: v do^T, [C, C]."""
    it.A[...] = store_rounded(it.dA, lax.optimization_barrier(jnp.where(it.scan.earlier(), dA, 0.0)))


# ---- store ------------------------------------------------------------------------------------------------------------


def store_gradient(it: Item, dx, dy_state, edge):
    """Form dq, dk and dg of the warpgroup's channels, and start to copy them to global memory. Write the terms of d_scale
    there.

    dx, dy_state, edge: the results of `add_columns`.
    """
    p, w, t = it.p, it.w, it.p.tiles
    q, k, x_rest, y_rest = it.q.at[w], it.k.at[w], t.x_rest.at[w], t.y_rest.at[w]
    if p.plan.resets:
        edge = edge * it.scan.passes()
        dx, dy_state = it.scan.from_state(dx), it.scan.to_state(dy_state)
    t.sums.at[w][...] = edge
    M = gate_sums(it)  # formed again: it would not stay in registers beside the sums
    p.pipeline.gates.release()
    # [C, 64]
    dy_pairs = product(TILE, (it.dA, q), (it.A, q), (it.dA, x_rest))
    dx = tiles.added(dx, *((transposed(d), y) for d, y in ((it.dA, k), (it.dA, y_rest), (it.A, k))))
    p.meet()  # both are done with A and dA
    y = read(k) + read(y_rest)
    y_rest[...] = (y * dy_state).astype(BF16)
    k[...] = (jnp.exp2(-M) * (dy_state + it.scale * dy_pairs)).astype(BF16)
    x_dx = (read(q) + read(x_rest)) * dx
    q[...] = (it.scale * jnp.exp2(M) * dx).astype(BF16)
    behind_gate, lost = it.scale * (x_dx - y * dy_pairs), t.scores.at[w]
    high = high_part(behind_gate)
    x_rest[...] = high.astype(BF16)
    lost[...] = (behind_gate - high).astype(BF16)
    x_dx = x_dx.sum(1)
    plgpu.commit_smem()
    suffix, prefix = it.scan.sums()
    dg = product(TILE, (suffix, x_rest), (suffix, lost), (prefix, y_rest)) + columns(t.sums.at[w])
    plgpu.commit_smem()  # all warps are done with the tile
    x_rest[...] = dg.astype(BF16)
    plgpu.commit_smem()
    place = *p.rows(it.i), p.place(it.i)[2], p.channels(w)
    for tile, result in ((q, p.results.dq), (k, p.results.dk), (x_rest, p.results.dg)):
        plgpu.copy_smem_to_gmem(tile, result.at[place])
    b, c, block = p.place(it.i)
    p.results.d_scale[b, c, block, w] = x_dx  # last: fences wait for what is on its way to memory
