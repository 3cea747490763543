"""Define the warpgroups of the per-head-gate scan that multiply. They carry the state, or form scores and outputs from a copy
of it."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    C,
    by_column,
    by_row,
    read,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import quotient, remainder
from glax._src.kernels.pallas_gpu.scan.head_program import Program

BF16 = jnp.bfloat16


def carry_own_columns(p: Program):
    """Carry 64 columns of the state: one warpgroup of a scan without outputs."""
    w, me = p.plan, p.warpgroup
    columns = pl.ds((p.block * w.consumers + me) * 64, 64)

    def enter(S, step):
        if w.states:
            store_state(p, S, step, p.tiles.state.at[lax.rem(step, jnp.int32(w.state_stages)), me], columns)
        else:
            plgpu.commit_smem()  # waits until all warps are done with the step before

    carry_state(p, columns, pl.ds(me * 64, 64), p.tiles.scaled.at[me], enter)
    plgpu.wait_smem_to_gmem(0)


def carry_shared_state(p: Program):
    """Carry the whole state of the program, and hand it to the warpgroup that forms outputs before each chunk."""

    def enter(S, step):
        pl.when(step > 0)(lambda: plgpu.barrier_wait(p.barriers.state_read))
        store_state(p, S, step, p.tiles.state, p.columns)
        plgpu.barrier_arrive(p.barriers.state_stored)

    carry_state(p, p.columns, pl.ds(0, p.plan.columns), p.tiles.scaled, enter)
    plgpu.wait_smem_to_gmem(0)


def carry_state(p: Program, columns, of_tile, scaled, enter):
    """Carry the state [K, columns] through all chunks, and store the last: S_out = e^L S + sum_j k_j (e^{L - G_j} v_j)^T.

    S is float32 and the products' operands are bfloat16. enter(S, step) receives the state before each chunk. of_tile: the same
    columns within a tile of b. scaled: the tile for the values that are added.
    """
    w = p.plan

    def advance(step, carry):
        S, log = carry
        slot = lax.rem(step, jnp.int32(w.stages))
        plgpu.barrier_wait(p.barriers.loaded.at[slot])
        if w.adds_behind:
            S = add_behind(p, S, step, columns)
        enter(S, step)
        values = functools.partial(values_of, p, slot, of_tile)
        G, last = plgpu.load(p.tiles.gates.at[slot], layout=BY_ROW), p.tiles.gates[slot, p.last_token]
        scaled[...] = values(G, last).astype(BF16)
        plgpu.commit_smem()
        S = tiles.added(S * jnp.exp2(last), (transposed(p.tiles.a.at[slot]), scaled))

        def lost(S):
            """Return S plus the product of k with what the values lost in rounding. The values are formed again, because the
            compiler would spill them."""
            x = values(plgpu.load(p.tiles.gates.at[slot], layout=BY_ROW), last) - read(scaled)
            plgpu.commit_smem()  # waits until all warps are done with the first term
            scaled[...] = x.astype(BF16)
            plgpu.commit_smem()
            return tiles.added(S, (transposed(p.tiles.a.at[slot]), scaled))

        S = lax.cond((last > p.most) & (last < 0.0), lost, lambda S: S, S)
        plgpu.barrier_arrive(p.barriers.consumed.at[slot])
        if w.stores_behind:
            store_behind(p, S, step, columns)
        return S, log + last

    S = zeros((w.K, columns.size))
    if w.start:
        S = plgpu.load(p.operands.start.at[p.e, p.h, :, columns], layout=tiles.WGMMA, optimized=False)
    S, log = lax.fori_loop(0, p.count, advance, (S, jnp.float32(0.0)))

    def store(place):
        p.results.last[place, p.h, :, columns] = S

    w.leave(p.e, store)
    if w.either:

        @pl.when((p.block == 0) & (p.warpgroup == 0))
        def _():
            p.results.log[p.e, p.h, 0] = log / LOG2E


def store_behind(p: Program, S, step, columns):
    """Store the state behind a chunk if it is one of the caller's states."""
    index, is_one = p.state_behind(step)

    @pl.when(is_one)
    def _():
        p.results.behind[p.batch, index, p.h, :, columns] = S


def add_behind(p: Program, S, step, columns):
    """Return S plus the gradient of the caller's state behind a chunk, if there is one."""
    index, is_one = p.state_behind(step)

    def added(S):
        place = p.operands.behind.at[p.batch, index, p.h, :, columns]
        return S + plgpu.load(place, layout=tiles.WGMMA, optimized=False)

    return lax.cond(is_one, added, lambda S: S, S)


def values_of(p: Program, slot, columns, G, last):
    """Return the values of a chunk, decayed to the edge by which the scan leaves the chunk, [C, columns] in float32.

    They are e^{last - G} v, or scale e^G d_output in a scan of dL/dS. G: [C], and last: its value at the edge, to base 2.
    """
    w = p.plan
    x = read(p.tiles.b.at[slot, :, columns])
    if w.either:
        before = p.adjoint.astype(jnp.float32)
        decay = jnp.exp2(before * G + (1.0 - before) * (last - G))
    else:
        decay = jnp.exp2(G) * p.factor if w.adjoint else jnp.exp2(last - G)
    return x * by_row(decay, x.shape)


def store_state(p: Program, S, step, tile, columns):
    """Store S [K, columns] in the tile in bfloat16, and in a scan that stores states send it to global memory."""
    w = p.plan
    if w.states:
        plgpu.wait_smem_to_gmem(w.state_stages - 1, wait_read_only=True)
    tile[...] = S.astype(BF16)
    plgpu.commit_smem()  # also waits until all warps are done with the step before
    if w.states:

        @pl.when(w.stored(p.chunk(step)))
        def _():
            target = p.results.states.at[p.batch, lax.div(p.chunk(step), jnp.int32(w.run))]
            if w.stored_by.count == 1:
                plgpu.copy_smem_to_gmem(tile, target.at[p.h, :, columns])
            else:
                store_by_blocks(p, tile, target, columns)


def store_by_blocks(p: Program, tile, target, columns):
    """Store 64 columns of the state as parts of the blocks that they lie in."""
    w, by = p.plan, p.plan.stored_by
    rows, per_block = w.K // by.rows, w.V // by.columns // 64
    column = lax.div(columns.start, jnp.int32(64))
    place = p.h * by.count + quotient(column, per_block)
    columns = pl.ds(remainder(column, per_block) * 64, 64)
    for part in range(by.rows):
        source = tile.at[pl.ds(part * rows, rows)]
        plgpu.copy_smem_to_gmem(source, target.at[place + part * by.columns, :, columns], commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def write_outputs(p: Program):
    """Form scores and outputs of every chunk, in a warpgroup of its own."""
    i, j = tiles.positions(p.plan.reverse)
    pl.loop(0, p.count)(functools.partial(write_chunk, p, i, j))
    plgpu.wait_smem_to_gmem(0)


def write_chunk(p: Program, i, j, step):
    """Form o = scale (e^G q S + P v) of one chunk, [C, columns], and send it to global memory in bfloat16.

    P_ij = (q_i . k_j) e^{G_i - G_j} for j <= i, else 0. i, j: [C, C], positions in scan order.
    """
    w, t = p.plan, p.tiles
    slot = lax.rem(step, jnp.int32(w.stages))
    q, a, b = t.q.at[slot], t.a.at[slot], t.b.at[slot]
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    # [C, C]
    P = tiles.product((C, C), (q, transposed(a)))
    G = plgpu.load(t.gates.at[slot], layout=BY_ROW)
    to = by_column(plgpu.load(t.gates.at[slot], layout=BY_COLUMN, optimized=False), (C, C))
    P = P * jnp.exp2(jnp.where(i >= j, by_row(G, (C, C)) - to, -jnp.inf))
    plgpu.barrier_wait(p.barriers.state_stored)
    # [C, columns]
    o = tiles.product((C, w.columns), (q, t.state))
    plgpu.barrier_arrive(p.barriers.state_read)
    o = tiles.added(o * by_row(jnp.exp2(G), o.shape), (P.astype(BF16), b))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    t.output[...] = (o * p.factor).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.output, p.tokens(p.results.o, p.h, step, p.columns))
