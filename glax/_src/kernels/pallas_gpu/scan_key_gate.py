"""Walks that carry the state along a sequence: outputs, or the states at its chunks, with a gate for every key channel.

With M_i the sum of log decays from a chunk's middle through token i, L of its first half and R of its second:

    q^_i = q_i e^{M_i},  k^_j = k_j e^{-M_j},  S' = e^L S
    o_i  = scale * (q^_i^T S' + (q_i . k_i) v_i + sum_{j < i} (q^_i . k^_j) v_j)          S_out = e^R (S' + sum_j k^_j v_j^T)

so two exponentials an element serve every product. They are safe while |M|, |L| and |R| are at most 60, and while e^R and the
next chunk's e^L are two factors of the state (`common.limits`). A program that saw more scans its segment again in the exact
form, which forms no exponent above 0. A token's score with itself, the largest where gates are strong, is of q^ and k^, or q and
k, before they are rounded, and scores have 16 bits: two terms in bfloat16. The gradient gets S' of every chunk. Where gates are
weak, an output is a sum over so many tokens that q^ has two terms, too, in a fifth more time: in programs whose gates, a few of
them sampled, are weak on average. The second term lies where a chunk's gates were.

What needs no scores and no S' but the edges of segments, and the walk of dL/dS, scales to the chunk's edge instead: with E_j the
log decays behind token j (against time, of q and d_output in place of k and v, through token j)

    S_out = e^{L + R} S + sum_j (k_j e^{E_j}) v_j^T

where no exponent is above 0. That of dL/dS is told which chunks are out of range, and stores others decayed to their middle.

A program has a segment of one sequence, one head and 64 or 128 columns of the state. Some of its warpgroups scale, each 64
channels of K, ahead of those that multiply: one has the state and hands S' to the other, which forms scores and outputs while
the next state is formed. Walks without outputs have a warpgroup for every 64 columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.gate_range import in_range, weak_on_average
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import Scan, ScanResults, place_of, quotient
from glax._src.kernels.pallas_gpu.scan_exact import exact_scan
from glax._src.kernels.pallas_gpu.scan_key_gate_refs import FLAGS, Barriers, Operands, Results, Tiles
from glax._src.kernels.pallas_gpu.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    C,
    by_row,
    decayed,
    read,
    transposed,
    zeros,
)

BF16 = jnp.bfloat16


@functools.partial(jax.jit, static_argnums=0)  # so that walks alike are lowered once
def key_scan(w: Scan, table, q, a, b, g, scale, start, told_far=None):
    """What `ScanResults` says.

    told_far [B, chunks, H]: `far` of `ScanResults`, which the walk of dL/dS is told.

    table [E, 4]: of every segment its batch row, first chunk, number of chunks, and sequence (for `scale`); for `either`,
    [E, H, 5].
    a [B, T, heads, K], b [B, T, heads, V]: k and v, or q and d_output with `adjoint`.
    g [terms, B, T, H, K] in bfloat16. start [E, H, K, V] in float32.
    """
    B, T = a.shape[:2]
    E, blocks = table.shape[0], w.V // w.columns
    W, stages, H, K = w.consumers, w.stages, w.H, w.K
    ha, hb, hq = (H // x.shape[2] for x in (a, b, q))

    scalers = w.scalers
    few, many = w.registers

    def body(*refs):
        *in_global, shared, barriers = refs
        operands, results = Operands(*in_global[:8]), Results(*in_global[8:])
        table_g, q_g, a_g, b_g, g_g, scale_g, start_g, told_far_g = operands
        o_g, states_g, last_g, log_g, far_g, far_chunk_g = results
        q_s, a_s, b_s, g_s, S_s, o_s, sums_s, own_s, halves_s, weak_s = shared
        given, gates_given, ready, free, gates_free, met, entered, taken = barriers
        me = lax.axis_index("warpgroup")

        def place():
            """Block, head and segment. These and what the table says are found anew where they are needed: what all
            warpgroups hold throughout, the compiler spills."""
            program = lax.optimization_barrier(lax.axis_index("program"))
            return place_of(program, blocks, H)

        def told(column):
            _, h, e = place()
            return table_g[(e, h, column) if w.either else (e, column)]

        def count():
            return told(2)

        adjoint = told(4) if w.either else int(w.adjoint)

        def hidden(x):
            """x, which the compiler may not know. Of a matrix that two products read, ptxas 13.0 writes what it knows to be
            constant between the two alone, so that at a walk's first chunk the first product reads what it finds."""
            return jnp.where(count() >= 0, x, 0.5)

        def chunk(step):
            return told(1) + w.place(step, count(), adjoint)

        def tokens(x, group, step, *columns):
            return x.at[(told(0), pl.ds(chunk(step) * C, C), quotient(place()[1], group), *columns)]

        def fetch_gates(step, slot):
            for term in range(w.terms):
                tile = g_s.at[slot * w.terms + term]
                plgpu.copy_gmem_to_smem(tokens(g_g.at[term], 1, step), tile, gates_given.at[slot])

        def fetch(step, slot):
            plgpu.copy_gmem_to_smem(tokens(a_g, ha, step), a_s.at[slot], given.at[slot])
            wide = pl.ds(place()[0] * w.columns, w.columns)
            plgpu.copy_gmem_to_smem(tokens(b_g, hb, step, wide), b_s.at[slot], given.at[slot])

        def fill(fetching):
            """The first chunks that shared memory holds."""
            for slot in range(stages):
                pl.when(slot < count())(functools.partial(fetching, slot, slot))

        def refill(step):
            """Fetches into the tiles that the step before has left, once all are done with them."""
            slot = lax.rem(step - 1, jnp.int32(stages))

            @pl.when((step > 0) & (step - 1 + stages < count()))
            def _():
                plgpu.barrier_wait(free.at[slot])
                fetch(step - 1 + stages, slot)

        def noted(step, far, share, largest, ends):
            """What is said of this chunk where its gates go too far, and of the segment up to it."""
            near = in_range(largest, ends)
            # where states are kept, chunks left when the first comes that is too far: the exact walk begins there
            left = jnp.maximum(far, (count() - step).astype(jnp.float32)) if w.states else 1.0
            if w.states:

                @pl.when(place()[0] == 0)
                def _():
                    far_chunk_g[told(0), chunk(step), place()[1], share] = jnp.where(near, 0.0, 1.0)

            return jnp.where(near, far, left)

        @pl.when(me >= W)
        def _scaling():
            plgpu.set_max_registers(few, action="decrease")
            share, total = me - W, count()
            roomy = few > 96  # for x and y at a time; else own scores are formed of tiles read once more
            if w.to_edge:
                way = adjoint.astype(jnp.float32) if w.either else float(adjoint)
                matrix = tiles.edge_matrix(w.reverse, way if w.terms == 1 else hidden(way))
            else:
                matrix = tiles.middle_matrix(w.reverse)
            part = pl.ds(share * 64, 64)

            @pl.when(share == 0)
            def _():
                for slot in range(2):
                    pl.when(slot < total)(functools.partial(fetch_gates, slot, slot))
                halves_s[...] = tiles.halves(w.reverse)
                if w.outputs:
                    weak_s[0] = weak_on_average(g_g.at[0], told(0), told(1), total, place()[1]).astype(jnp.int32)
                plgpu.commit_smem()

            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            weak = weak_s[0] > 0 if w.outputs else False

            def scale(step, carry):
                far, log = carry
                slot, gate_slot = lax.rem(step, jnp.int32(stages)), lax.rem(step, jnp.int32(2))
                at = a_s.at[slot, :, part]
                gates = [g_s.at[gate_slot * w.terms + term, :, part] for term in range(w.terms)]
                plgpu.barrier_wait(gates_given.at[gate_slot])
                if w.to_edge and w.terms == 1:  # those of two terms are cut where they are split
                    (only,) = gates
                    only[...] = jnp.maximum(plgpu.load(only, layout=tiles.WGMMA), jnp.bfloat16(LOG_OF_ZERO))
                    plgpu.commit_smem()

                def summed(M, halves):
                    for g in gates:
                        plgpu.wgmma(M, matrix, g)
                    for g in gates:
                        plgpu.wgmma(halves, transposed(g), tiles.by_halves(halves_s))
                    M = tiles.after(M, w.terms)
                    largest = None if w.to_edge else jnp.max(jnp.abs(M), axis=1)
                    return M, largest, halves[...]

                # [C, 64]; [64, 8]: of every channel, the sum over the first half of the chunk, over the second, and zeros
                M, largest, sums = pl.run_scoped(summed, plgpu.ACC((C, 64)), plgpu.ACC((64, 8)))
                ends = [tiles.column_of(sums, side) for side in (0, 1)]
                if w.either:
                    log = log + ends[0] + ends[1]

                pl.when(jnp.logical_not(weak))(lambda: plgpu.barrier_arrive(gates_free.at[gate_slot]))
                if not w.to_edge:
                    far = noted(step, far, share, largest, ends)
                elif w.states:  # dL/dS to the middle of a chunk, if that is in range, and from there on
                    out_of_range = told_far_g[told(0), chunk(step), place()[1]].astype(jnp.float32)
                    ends = ends[1] * (1.0 - out_of_range), ends[0] + ends[1] * out_of_range
                else:
                    ends = (ends[0] + ends[1],)
                plgpu.barrier_wait(given.at[slot])  # and so until all are done with what is written here next
                for side, end in enumerate(ends):
                    sums_s[slot, side, part] = end
                if w.outputs and not roomy:
                    own_s[slot, share] = jnp.sum(read(q_s.at[slot, :, part]) * read(at), axis=1)
                y = read(at) * jnp.exp2(M * (LOG2E if w.to_edge else -LOG2E))
                at[...] = (y * scale_g[told(3)] if w.adjoint else y).astype(BF16)
                if w.outputs:
                    qt = q_s.at[slot, :, part]
                    x = read(qt) * jnp.exp2(M * LOG2E)
                    qt[...] = x.astype(BF16)
                    if roomy:
                        own_s[slot, share] = jnp.sum(x * y, axis=1)

                    @pl.when(weak)
                    def _():
                        gates[0][...] = (x - read(qt)).astype(BF16)

                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])

                # where they are weak, the other that reads them does this
                @pl.when((share == 0) & jnp.logical_not(weak) & (step + 2 < total))
                def _():
                    plgpu.barrier_wait(gates_free.at[gate_slot])
                    fetch_gates(step + 2, gate_slot)

                return far, log

            far, log = lax.fori_loop(0, total, scale, (zeros((C,), BY_ROW), zeros((64,), BY_ROW)))

            block, h, e = place()

            @pl.when(block == 0)
            def _():
                if w.either:
                    log_g[e, h, part] = log
                if not w.to_edge:
                    for copy in range(0, FLAGS // scalers, 64):
                        far_g[e, h, pl.ds(share * (FLAGS // scalers) + copy, 64)] = far

        def carrying(columns, use):
            """The state through all chunks, [K, columns]: use(S', step, slot, on) returns it behind each, on(S') what is left of
            S' there if that is not done in the next chunk."""
            plgpu.set_max_registers(many, action="increase")

            def log_decays(step):
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[slot])
                return slot, *(plgpu.load(sums_s.at[slot, side], layout=BY_ROW) for side in range(2))

            def scan_to_edge(step, S):
                slot, ahead, after = log_decays(step)
                if not w.states:
                    return use(S, step, slot, lambda S: decayed(S, ahead))
                return use(decayed(S, ahead), step, slot, lambda S: decayed(S, after))

            def scan_to_middle(step, carry):
                S, tail = carry
                slot, ahead, after = log_decays(step)
                # Never e^{tail + ahead}, which may be e^-120 = 0 where S is up to e^60 (`common.limits`).
                return use(decayed(decayed(S, tail), ahead), step, slot, lambda S: S), after

            S = zeros((K, columns.size))
            if w.start:
                S = plgpu.load(start_g.at[place()[2], place()[1], :, columns], layout=tiles.WGMMA, optimized=False)
            if w.to_edge:
                S = lax.fori_loop(0, count(), scan_to_edge, S)
            else:
                S, tail = lax.fori_loop(0, count(), scan_to_middle, (S, zeros((K,), BY_ROW)))

            def store(at):
                last_g[at, place()[1], :, columns] = S if w.to_edge else decayed(S, tail) + lost(tail, columns)

            if w.states:  # not after the branch: its barrier's number would be held throughout, and spilled
                plgpu.wait_smem_to_gmem(0)
            w.leave(place()[2], store)

        def lost(tail, columns):
            """What the last token, most of the state where gates are strong, lost when it was scaled and rounded."""
            row = chunk(count() - 1) * C + (0 if w.reverse else C - 1)
            token = told(0), jnp.clip(row, 0, T - 1)
            k, v = (
                plgpu.load(x.at[(*token, quotient(place()[1], group), part)], layout=layout, optimized=False)
                for x, group, part, layout in ((a_g, ha, pl.ds(0, K), BY_ROW), (b_g, hb, columns, BY_COLUMN))
            )
            k = k.astype(jnp.float32)
            rounded = (k * jnp.exp2(-tail * LOG2E)).astype(BF16).astype(jnp.float32)
            left = (k - rounded * jnp.exp2(tail * LOG2E)) * jnp.where(count() > 0, 1.0, 0.0)
            shape = K, columns.size
            return by_row(left, shape) * tiles.by_column(v, shape).astype(jnp.float32)

        def keep(S, step, tile, columns):
            """Stores S' in the tile, and hands it to the copy engine if asked to."""
            if w.states:
                plgpu.wait_smem_to_gmem(w.kept_stages - 1, wait_read_only=True)
            tile[...] = S.astype(BF16)
            plgpu.commit_smem()
            if w.states:
                plgpu.copy_smem_to_gmem(tile, states_g.at[told(0), chunk(step), place()[1], :, columns])

        def own_columns():
            """A warpgroup of a walk without outputs."""
            columns = pl.ds((place()[0] * W + me) * 64, 64)
            pl.when(me == 0)(lambda: fill(fetch))

            def use(S, step, slot, on):
                pl.when(me == 0)(lambda: refill(step))
                if w.states:
                    keep(S, step, S_s.at[lax.rem(step, jnp.int32(w.kept_stages)), me], columns)
                S = tiles.added(on(S), (transposed(a_s.at[slot]), b_s.at[slot, :, pl.ds(me * 64, 64)]))
                plgpu.barrier_arrive(free.at[slot])
                return S

            carrying(columns, use)

        def state():
            """The warpgroup that has the state where there are outputs."""
            columns = pl.ds(place()[0] * w.columns, w.columns)
            fill(fetch)

            def use(S, step, slot, on):
                pl.when(step > 0)(lambda: plgpu.barrier_wait(taken))
                keep(S, step, S_s, columns)
                plgpu.barrier_arrive(entered)
                refill(step)
                S = tiles.added(on(S), (transposed(a_s.at[slot]), b_s.at[slot]))
                plgpu.barrier_arrive(free.at[slot])
                return S

            carrying(columns, use)

        def outputs():
            """The warpgroup that forms scores and outputs; these leave through the tile of q where they fit it."""
            plgpu.set_max_registers(many, action="increase")
            i, j = tiles.walking(w.reverse)
            factor, total = scale_g[told(3)], count()
            known, (block, h, _) = (told(0), told(1)) if not (w.states and w.start) else None, place()

            def tokens(x, group, step, *columns):  # found anew only for want of registers: all wait for this warpgroup
                batch, first = known or (told(0), told(1))
                return x.at[(batch, pl.ds((first + w.place(step, total)) * C, C), quotient(h, group), *columns)]

            def fetch_q(step, slot):
                plgpu.copy_gmem_to_smem(tokens(q_g, hq, step), q_s.at[slot], given.at[slot])

            fill(fetch_q)

            @pl.loop(0, total)
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                qt, at, bt = q_s.at[slot], a_s.at[slot], b_s.at[slot]
                plgpu.barrier_wait(ready.at[slot])
                weak = weak_s[0] > 0

                def with_lost(total, right):
                    """And of what q^ lost when it was rounded. Places of tiles are found anew: those of both products at hand,
                    the compiler would spill."""

                    def more(total):
                        here = lax.optimization_barrier(step)
                        lost = g_s.at[lax.rem(here, jnp.int32(2)) * w.terms]
                        return tiles.added(total, (lost, right(lax.rem(here, jnp.int32(stages)))))

                    return lax.cond(weak, more, lambda total: total, total)

                own = sum(plgpu.load(own_s.at[slot, share], layout=BY_ROW) for share in range(scalers))

                def formed(scores, o):
                    """Scores are masked and split while q^T S' is on its way."""
                    plgpu.wgmma(scores, qt, transposed(at))
                    plgpu.barrier_wait(entered)
                    plgpu.wgmma(o, qt, S_s)
                    P = with_lost(tiles.after(scores, 1), lambda slot: transposed(a_s.at[slot]))
                    P = jnp.where(i > j, P, jnp.where(i == j, by_row(own, P.shape), 0.0))
                    high = tiles.high_part(P)
                    plgpu.wgmma(o, high.astype(BF16), bt)
                    plgpu.wgmma(o, (P - high).astype(BF16), bt)
                    return o[...]

                o = pl.run_scoped(formed, plgpu.ACC((C, C)), plgpu.ACC((C, w.columns)))
                plgpu.barrier_arrive(free.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and all warps are done with this tile of q^

                @pl.when((step > 0) & (step - 1 + stages < total))
                def _():
                    fetch_q(step - 1 + stages, lax.rem(step - 1, jnp.int32(stages)))

                o = with_lost(o, lambda slot: S_s)
                plgpu.barrier_arrive(taken)
                o_tile = qt if w.columns == K else o_s

                @pl.when(weak & (step + 2 < total))
                def _():
                    plgpu.commit_smem()  # all warps are done with what q^ lost
                    fetch_gates(step + 2, lax.rem(step, jnp.int32(2)))

                o_tile[...] = (o * factor).astype(BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, tokens(o_g, 1, step, pl.ds(block * w.columns, w.columns)))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(me < W)
        def _computing():
            if w.outputs:
                lax.cond(me == 0, outputs, state)
            else:
                own_columns()

    body.__name__ = "key_scan"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=tuple(Results.types(w, B, T, E)),
        grid=(blocks * H * E,),
        grid_names=("program",),
        num_threads=W + scalers,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    operands = table, q, a, b, g, scale, start, scale if told_far is None else told_far
    *found, far, far_chunk = once(("key_scan", w), kernel, *operands)
    o, states, last, log = found
    if w.to_edge:
        return ScanResults(o, states, last, log if w.either else None)
    if w.states:
        far_chunk = jnp.any(far_chunk > 0, axis=(3, 4)).astype(jnp.int32)
    return ScanResults(*exact_scan(w, table, far, far_chunk, q, a, b, g, scale, start, o, states, last), far=far_chunk)
