"""Define the output warpgroup of the per-key-gate scan: scores of a chunk, and o = scale (q^ S' + P v)."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, C, by_column, by_row, transposed
from glax._src.kernels.pallas_gpu.scan.key_program import Program


@dataclasses.dataclass(frozen=True)
class OutputWarpgroup:
    """Hold what the output warpgroup of one program reads throughout.

    i, j: [C, C] in int32, the positions in scan order of rows and columns. scale: the sequence's scale, float32. total: the
    number of chunks. known: batch row and first chunk, or None where registers have no room for them. block, head: of `place`.
    """

    p: Program
    i: Any
    j: Any
    scale: Any
    total: Any
    known: tuple | None
    block: Any
    head: Any

    def tokens(self, x, step, head, *columns):
        """Return the rows [C, ...] of one head of x [B, rows of chunks, heads, ...] at a step.

        `Program.tokens` would compute the indices again. That costs time here, because all warpgroups wait for this one.
        """
        batch, first = self.known or (self.p.segment_field(0), self.p.segment_field(1))
        return x.at[(batch, pl.ds((first + self.p.plan.place(step, self.total)) * C, C), head, *columns)]

    def fetch_q(self, step, slot):
        """Fetch q [C, K] of a step into its tile."""
        q, w = self.p.operands.q, self.p.plan
        tokens = self.p.tokens if w.packed else self.tokens
        source = tokens(q, step, w.blocks.of_keys(self.head, w.H, q.shape[2]))
        plgpu.copy_gmem_to_smem(source, self.p.tiles.q.at[slot], self.p.barriers.loaded.at[slot])


def write_outputs(p: Program):
    """Form o = scale (q^ S' + P v) of every chunk, [C, columns] in bfloat16.

    It is sent from the tile of q where there is no room for a tile of its own.
    """
    w = p.plan
    plgpu.set_max_registers(w.registers[1], action="increase")
    i, j = tiles.positions(w.reverse)
    scale, total = p.operands.scale[p.segment_field(3)], p.count()
    known = None if w.states and w.start else (p.segment_field(0), p.segment_field(1))
    block, head = p.place()[:2]
    o = OutputWarpgroup(p, i, j, scale, total, known, block, head)
    p.fill(o.fetch_q)

    if not w.narrow:
        pl.loop(0, total)(functools.partial(write_chunk, o, None))
    else:
        plgpu.barrier_wait(p.barriers.prepared)
        # A loop for each, because a product behind a branch waits for those before it.
        for weak in (False, True):

            @pl.when((p.tiles.weak[0] > 0) == weak)
            def _(weak=weak):
                pl.loop(0, total)(functools.partial(write_chunk, o, weak))

    plgpu.wait_smem_to_gmem(0)


def write_chunk(o: OutputWarpgroup, weak: bool | None, step):
    """Form the outputs of one chunk, [C, columns], and send them to global memory in bfloat16.

    P [C, C] has the scores q^_i . k^_j of tokens j before i, and own scores on its diagonal. It is 0 in a chunk out of range.
    weak: whether q^ has two terms. None where registers have no room for all products together: it is then read here.
    """
    p, w = o.p, o.p.plan
    stages, total = w.stages, o.total
    slot = lax.rem(step, jnp.int32(stages))
    q = p.tiles.q.at[slot]
    a, b = p.tiles.a.at[slot], p.tiles.b.at[slot]
    plgpu.barrier_wait(p.barriers.scaled.at[slot])
    traced = None if w.narrow else p.tiles.weak[0] > 0
    out_of_range = p.tiles.out_of_range[slot]
    # [C]
    own = sum(plgpu.load(p.tiles.own_scores.at[slot, share], layout=BY_ROW) for share in range(w.scalers))
    # No score where the chunk is out of range: neither is i - C > j nor i + C == j. `exact_outputs` adds what they draw.
    later, same = o.i - out_of_range * C, o.i + out_of_range * C
    lost_slot = lax.rem(step, jnp.int32(2))
    terms = (q, p.tiles.lost.at[lost_slot]) if weak else (q,)

    def formed(scores, output):
        """Mask and split the scores while q^T S' is computed."""
        for x in terms:
            plgpu.wgmma(scores, x, transposed(a))
        if w.resets:
            pl.when(p.has_reset(slot))(functools.partial(divide_from_state, p, step))
        plgpu.barrier_wait(p.barriers.state_stored)
        for x in terms:
            plgpu.wgmma(output, x, p.tiles.state)
        # [C, C]
        P = tiles.after(scores, len(terms))
        if not w.narrow:
            P = add_lost(p, step, traced, P, lambda slot: transposed(p.tiles.a.at[slot]))
        if w.resets:
            P = lax.cond(p.has_reset(slot), functools.partial(divide_scores, p, step), lambda P: P, P)
        P = jnp.where(later > o.j, P, jnp.where(same == o.j, by_row(own, P.shape), 0.0))
        high = tiles.high_part(P)
        plgpu.wgmma(output, high.astype(jnp.bfloat16), b)
        plgpu.wgmma(output, (P - high).astype(jnp.bfloat16), b)
        return output[...]

    # [C, columns]
    output = pl.run_scoped(formed, plgpu.ACC((C, C)), plgpu.ACC((C, w.columns)))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    if w.narrow:
        plgpu.barrier_arrive(p.barriers.state_read)
    if weak:
        plgpu.barrier_arrive(p.barriers.lost_consumed.at[lost_slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and all warps are done with this tile of q^
    if w.narrow:
        pl.when(step + stages < total)(lambda: o.fetch_q(step + stages, slot))
    else:  # this chunk's tile of q is about to hold the outputs

        @pl.when((step > 0) & (step - 1 + stages < total))
        def _():
            o.fetch_q(step - 1 + stages, lax.rem(step - 1, jnp.int32(stages)))

        if w.resets:
            pl.when(traced & p.has_reset(slot))(functools.partial(divide_lost_from_state, p, step))
        output = add_lost(p, step, traced, output, lambda slot: p.tiles.state)
        plgpu.barrier_arrive(p.barriers.state_read)

        @pl.when(traced & (step + 2 < total))
        def _():
            plgpu.commit_smem()  # all warps are done with what q^ lost
            p.fetch_gates(step + 2, lost_slot)

    tile = p.tiles.output if w.has_output_tile else q
    tile[...] = (output * o.scale).astype(jnp.bfloat16)
    plgpu.commit_smem()
    columns = pl.ds(o.block * w.columns, w.columns)
    plgpu.copy_smem_to_gmem(tile, o.tokens(p.results.o, step, o.head, columns))


def newest_resets(p: Program, step, layout: Any = BY_ROW):
    """Return the newest reset of every token, [C]. The slot is computed again, because the compiler would hold it."""
    slot = lax.rem(lax.optimization_barrier(step), jnp.int32(p.plan.stages))
    return plgpu.load(p.tiles.newest.at[slot], layout=layout, optimized=False)


def divide_scores(p: Program, step, P):
    """Zero the scores [C, C] of pairs whose tokens have different newest resets.

    Positions are not compared, because the compiler would hold the positions of all columns.
    """
    return jnp.where(
        by_row(newest_resets(p, step), P.shape) == by_column(newest_resets(p, step, BY_COLUMN), P.shape), P, 0.0
    )


def divide_from_state(p: Program, step):
    """Zero the rows of q^ that have a reset at or before them, once the scores are formed."""
    plgpu.wgmma_wait(0)
    slot = lax.rem(lax.optimization_barrier(step), jnp.int32(p.plan.stages))
    clear_behind_resets(p, step, p.tiles.q.at[slot])


def divide_lost_from_state(p: Program, step):
    """Do the same to the second term of q^, in the tile of the gates."""
    clear_behind_resets(p, step, p.tiles.gates.at[lax.rem(lax.optimization_barrier(step), jnp.int32(2)) * p.plan.terms])


def clear_behind_resets(p: Program, step, tile):
    """Zero the rows of a tile [C, K] that have a reset at or before them."""
    plgpu.commit_smem()  # all warps have read the tile
    for share in range(p.plan.scalers):
        part = tile.at[:, pl.ds(share * 64, 64)]
        x = plgpu.load(part, layout=tiles.WGMMA)
        part[...] = jnp.where(by_row(newest_resets(p, step), x.shape) < 0, x, jnp.bfloat16(0))
    plgpu.commit_smem()


def add_lost(p: Program, step, weak, total, right):
    """Return total, float32, plus the product of what q^ lost in rounding, [C, K], with right(slot), where gates are weak.

    The slots are computed again, because the compiler would spill the slots of both products.
    """

    def added(total):
        here = lax.optimization_barrier(step)
        lost = p.tiles.gates.at[lax.rem(here, jnp.int32(2)) * p.plan.terms]
        return tiles.added(total, (lost, right(lax.rem(here, jnp.int32(p.plan.stages)))))

    return lax.cond(weak, added, lambda total: total, total)
