"""Scan with per-head gates: products take q, k and v as they lie in memory.

G_i is the sum of a chunk's log gates through token i, L the sum of all of them:

    o_i   = scale * (e^{G_i} q_i^T S + sum_{j <= i} (q_i . k_j) e^{G_i - G_j} v_j)
    S_out = e^L S + sum_j k_j (e^{L - G_j} v_j)^T

No factor's exponent is above 0 for gates <= 0, so one form is exact for all. A call without gates has gates of 0, a constant
gate is the gate of every token. Where most of a state passes through a chunk, what e^{L - G_j} v_j loses when it is rounded to
bfloat16 adds up from chunk to chunk. There it is the sum of two terms; against time already where a 64th of the state passes,
for the gates' gradient. The warpgroups are those of `key_scan`, but nothing is scaled ahead of them: one only fetches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import Scan, ScanResults, place_of
from glax._src.kernels.pallas_gpu.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    C,
    by_column,
    by_row,
    read,
    tiled,
    transposed,
    zeros,
)

BF16 = jnp.bfloat16
MOST = -1.0, -6.0  # log2 decays of a chunk above which values have two terms, with time and against it


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def head_scan(w: Scan, table, q, a, b, G, scale, start):
    """Scan every segment of `table` with per-head gates. States are those that enter the chunks; no chunk is out of range.

    A scan of `either` kind begins at the first chunk of its segment behind which the decay is not 0 in float32. The log decays
    that it returns may leave out the chunks before: then they are so low that they mean -inf.

    G [B, chunks, H, C] in float32: the sums of log2 gates from where the scan enters each chunk. The other operands are
    those of `key_scan`.
    """
    B, T = a.shape[:2]
    E, blocks = table.shape[0], w.V // w.columns
    W, stages, H, K = w.consumers, w.stages, w.H, w.K
    heads_of_q, heads_of_a, heads_of_b = (x.shape[2] for x in (q, a, b))

    def body(
        table_g, q_g, a_g, b_g, G_g, scale_g, start_g, o_g, states_g, last_g, log_g,
        q_s, a_s, b_s, G_s, S_s, scaled_s, o_s, loaded, consumed, state_stored, state_read,
    ):  # fmt: skip
        program, me = lax.axis_index("program"), lax.axis_index("warpgroup")
        block, h, e = place_of(program, blocks, H)
        batch, first, whole, n = (table_g[e, i] for i in range(4))
        factor, last_token = scale_g[n], 0 if w.reverse else C - 1
        adjoint: Any = table_g[e, 4] if w.either else int(w.adjoint)
        most = jnp.where(adjoint > 0, *map(jnp.float32, reversed(MOST))) if w.either else MOST[w.adjoint]

        def needed():
            """Return the number of trailing chunks that the scan goes over."""
            through, alive, found = 0.0, True, 1
            for i in range(w.lookback):
                place = w.place(jnp.maximum(whole - 1 - i, 0), jnp.maximum(whole, 1), adjoint)
                through += G_g[batch, jnp.minimum(first + place, G.shape[1] - 1), w.blocks.head(h), last_token]
                alive &= through >= LOG_OF_NOTHING * LOG2E
                found += alive.astype(jnp.int32)
            return jnp.minimum(jnp.where(alive, whole, found), whole)

        count = needed() if w.lookback else whole
        if w.lookback:
            first = jnp.where(adjoint == int(w.reverse), first + whole - count, first)
        wide = pl.ds(block * w.columns, w.columns)

        def chunk(step):
            return first + w.place(step, count, adjoint)

        def tokens(x, head, step, *columns):
            return x.at[(batch, pl.ds(chunk(step) * C, C), head, *columns)]

        @pl.when(me == W)
        def _fetching():
            if W > 1:
                plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(G_g.at[batch, chunk(step), w.blocks.head(h)], G_s.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(
                    tokens(a_g, w.blocks.of_keys(h, H, heads_of_a), step), a_s.at[slot], loaded.at[slot]
                )
                if w.outputs:
                    plgpu.copy_gmem_to_smem(
                        tokens(q_g, w.blocks.of_keys(h, H, heads_of_q), step), q_s.at[slot], loaded.at[slot]
                    )
                plgpu.copy_gmem_to_smem(
                    tokens(b_g, w.blocks.of_values(h, H, heads_of_b), step, wide), b_s.at[slot], loaded.at[slot]
                )

        def carrying(mine, b_mine, scaled, enter):
            """The state through all chunks, [K, columns]: enter(S, step) has it before each."""

            def through(G, last):
                """The decays between tokens and the edge of the chunk that the scan leaves by."""
                if w.either:
                    before = adjoint.astype(jnp.float32)
                    return jnp.exp2(before * G + (1.0 - before) * (last - G))
                return jnp.exp2(G) * factor if w.adjoint else jnp.exp2(last - G)

            def advance(step, carry):
                S, log = carry
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[slot])
                enter(S, step)
                G, last = plgpu.load(G_s.at[slot], layout=BY_ROW), G_s[slot, last_token]

                def values(G):
                    x = read(b_s.at[slot, :, b_mine])
                    return x * by_row(through(G, last), x.shape)

                scaled[...] = values(G).astype(BF16)
                plgpu.commit_smem()
                S = tiles.added(S * jnp.exp2(last), (transposed(a_s.at[slot]), scaled))

                def lost(S):
                    """Add what the values lost in rounding. They are formed again: the compiler would spill them."""
                    x = values(plgpu.load(G_s.at[slot], layout=BY_ROW)) - read(scaled)
                    plgpu.commit_smem()  # all warps are done with the first term
                    scaled[...] = x.astype(BF16)
                    plgpu.commit_smem()
                    return tiles.added(S, (transposed(a_s.at[slot]), scaled))

                S = lax.cond((last > most) & (last < 0.0), lost, lambda S: S, S)
                plgpu.barrier_arrive(consumed.at[slot])
                return S, log + last

            S = zeros((K, mine.size))
            if w.start:
                S = plgpu.load(start_g.at[e, h, :, mine], layout=tiles.WGMMA, optimized=False)
            S, log = lax.fori_loop(0, count, advance, (S, jnp.float32(0.0)))

            def store(place):
                last_g[place, h, :, mine] = S

            w.leave(e, store)
            if w.either:

                @pl.when((block == 0) & (me == 0))
                def _():
                    log_g[e, h, 0] = log / LOG2E

        def store_state(S, step, tile, mine):
            """Store S in the tile, and in a scan that stores states send it to global memory."""
            if w.states:
                plgpu.wait_smem_to_gmem(w.state_stages - 1, wait_read_only=True)
            tile[...] = S.astype(BF16)
            plgpu.commit_smem()  # and until all warps are done with the step before
            if w.states:

                @pl.when(w.stored(chunk(step)))
                def _():
                    plgpu.copy_smem_to_gmem(
                        tile, states_g.at[batch, lax.div(chunk(step), jnp.int32(w.run)), h, :, mine]
                    )

        def own_columns():
            """Carry 64 columns of the state: one warpgroup of a scan without outputs."""
            mine = pl.ds((block * W + me) * 64, 64)

            def enter(S, step):
                if w.states:
                    store_state(S, step, S_s.at[lax.rem(step, jnp.int32(w.state_stages)), me], mine)
                else:
                    plgpu.commit_smem()  # until all warps are done with the step before

            carrying(mine, pl.ds(me * 64, 64), scaled_s.at[me], enter)
            plgpu.wait_smem_to_gmem(0)

        def state():
            """The warpgroup that has the state where there are outputs."""

            def enter(S, step):
                pl.when(step > 0)(lambda: plgpu.barrier_wait(state_read))
                store_state(S, step, S_s, wide)
                plgpu.barrier_arrive(state_stored)

            carrying(wide, pl.ds(0, w.columns), scaled_s, enter)
            plgpu.wait_smem_to_gmem(0)

        def outputs():
            """The warpgroup that forms scores and outputs."""
            i, j = tiles.positions(w.reverse)

            @pl.loop(0, count)
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                qt, at, bt = q_s.at[slot], a_s.at[slot], b_s.at[slot]
                plgpu.barrier_wait(loaded.at[slot])
                P = tiles.product((C, C), (qt, transposed(at)))
                G = plgpu.load(G_s.at[slot], layout=BY_ROW)
                to = by_column(plgpu.load(G_s.at[slot], layout=BY_COLUMN, optimized=False), (C, C))
                P = P * jnp.exp2(jnp.where(i >= j, by_row(G, (C, C)) - to, -jnp.inf))
                plgpu.barrier_wait(state_stored)
                o = tiles.product((C, w.columns), (qt, S_s))
                plgpu.barrier_arrive(state_read)
                o = tiles.added(o * by_row(jnp.exp2(G), o.shape), (P.astype(BF16), bt))
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s[...] = (o * factor).astype(BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s, tokens(o_g, h, step, wide))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(me < W)
        def _computing():
            if W > 1:
                plgpu.set_max_registers(232, action="increase")
            if w.outputs:
                pl.when(me == 0)(outputs)
                pl.when(me == 1)(state)
            else:
                own_columns()

    body.__name__ = "head_scan"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=(*w.results(B, T, E), jax.ShapeDtypeStruct((E, H, 1), jnp.float32)),
        grid=(blocks * H * E,),
        grid_names=("program",),
        num_threads=W + 1,
        thread_name="warpgroup",
        scratch_types=[
            tiled(stages, C, K) if w.outputs else tiled(1, C, 64),
            tiled(stages, C, K),
            tiled(stages, C, w.columns),
            plgpu.SMEM((stages, C), jnp.float32),
            tiled(K, w.columns) if w.outputs else tiled(w.state_stages, W, K, 64),
            tiled(C, w.columns) if w.outputs else tiled(W, C, 64),
            tiled(C, w.columns) if w.outputs else tiled(8, 64),
            plgpu.Barrier(num_arrivals=4 if w.outputs else 3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=W, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        compiler_params=tiles.PARAMS,
    )
    *states, log = once(("head_scan", w), kernel, table, q, a, b, G, scale, start)
    return ScanResults(*states, log if w.either else None)
