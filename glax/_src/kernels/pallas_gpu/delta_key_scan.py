"""Scan under the delta rule with per-key gates, for the outputs or for the transitions of segments.

S [K, V] is the state before a chunk. `delta_key_pairs` has formed R, P and the decayed operands, and G is its sum of gates:

    X    = beta (V - (K e^G) S)
    U    = X + R X                      what the tokens write
    O    = (scale Q e^G) S + P U
    S'   = e^{G_last} S + (K e^{G_last - G})^T U

No exponential is formed here. A program has one head of one sequence, and 64 columns of the state, which do not depend on each
other; for "transitions" it has 128 where these divide the columns. One warpgroup carries the state, transposed as in
`delta_scan_carry`, one writes the outputs, and one fetches. "transitions" are those of `delta_scan`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.delta_key_scan_refs import (
    OUTPUT_STAGES,
    Barriers,
    DeltaKeyScan,
    Operands,
    Program,
    Results,
    Tiles,
)  # fmt: skip
from glax._src.kernels.pallas_gpu.delta_scan_carry import hand_state, hand_tokens, starting_state
from glax._src.kernels.pallas_gpu.delta_scan_refs import BF16, STAGES, STRIPE, TOKENS
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder
from glax._src.kernels.pallas_gpu.tiles import after, read, transposed

VALUES = C, STRIPE


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_key_scan(w: DeltaKeyScan, rows: int, *operands) -> Results:
    """Scan every sequence of `table`. rows: the number of rows of the outputs. operands: the fields of `Operands`."""
    x = Operands(*operands)

    def body(*refs):
        given, (*results, own, barriers) = refs[: len(operands)], refs[len(operands) :]
        p = Program(w, Operands(*given), None, Results(*results), own, barriers)
        me = lax.axis_index("warpgroup")
        work = dict(carry=carry_state, emit=emit_outputs, fetch=fetch_chunks)
        for number, role in enumerate(w.roles):
            pl.when(me == number)(functools.partial(work[role], p, *[number] * (role == "carry")))

    body.__name__ = "delta_key_" + w.kind  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=tuple(Results.types(w, x.v.shape[0], rows, x.table.shape[0])),
        grid=(w.columns // (STRIPE * w.stripes) * w.H * x.table.shape[0],),
        grid_names=("program",),
        num_threads=len(w.roles),
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_key_scan", w, rows), kernel, *operands))


def fetch_chunks(p: Program):
    """Fetch chunks ahead, as many as shared memory holds."""
    w, x, t, bar = p.plan, p.operands, p.tiles, p.barriers
    p.take_registers("fetch")
    carried = [(getattr(x, name), getattr(t, name)) for name in ("erasing", "leaving", "inverse", "decay", "beta")]

    @pl.loop(0, p.count())
    def _(step):
        slot, chunk = p.slot(step), (p.field(0), p.chunk(step))
        loaded = bar.loaded.at[slot]
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(bar.consumed.at[slot]))
        for source, tile in carried:
            plgpu.copy_gmem_to_smem(source.at[(*chunk, p.head)], tile.at[slot], loaded)
        rows, head = pl.ds(p.chunk(step) * C, C), quotient(p.head, w.H // x.v.shape[2])
        for me in range(w.stripes):
            # The columns of M read any v, of which they write nothing.
            columns = pl.ds(remainder(p.number(me), w.V // STRIPE) * STRIPE, STRIPE)
            plgpu.copy_gmem_to_smem(x.v.at[p.field(0), rows, head, columns], t.v.at[slot, me], loaded)
        if w.emits:
            slot = p.output_slot(step)
            pl.when(step >= OUTPUT_STAGES)(lambda: plgpu.barrier_wait(bar.output_consumed.at[slot]))
            for source, tile in ((x.queries, t.queries), (x.scores, t.scores)):
                plgpu.copy_gmem_to_smem(source.at[(*chunk, p.head)], tile.at[slot], bar.output_loaded.at[slot])


def carry_state(p: Program, me):
    """Carry S, transposed, [STRIPE, K], through all chunks. me: the warpgroup."""
    p.take_registers("carry")
    S = lax.fori_loop(0, p.count(), functools.partial(onward, p, me), starting_state(p, me))
    p.results.last[p.place()[2], p.head, p.stripe(me), :] = S


def onward(p: Program, me, step, S):
    """Return the state behind a chunk, and hand on the state before it and what its tokens write."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    # Decayed before a product starts: ptxas would wait for it, because a product has written S.
    before, through = S.astype(BF16), lax.optimization_barrier(S * p.along(t.decay.at[slot], S.shape))

    def of_state(by_keys):
        plgpu.wgmma(by_keys, before, transposed(t.erasing.at[slot]))
        hand_state(p, step, before)
        given, beta = read(transposed(t.v.at[slot, me])), p.along(t.beta.at[slot], TOKENS)
        if p.plan.kind == "transitions":
            given = jnp.where(p.column(me, TOKENS) < p.plan.V, given, 0.0)
        return (given - after(by_keys)) * beta

    X = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))
    U = tiles.added(X, (X.astype(BF16), transposed(t.inverse.at[slot])))

    def of_tokens(state):
        plgpu.wgmma(state, U.astype(BF16), t.leaving.at[slot])
        hand_tokens(p, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return S


def emit_outputs(p: Program):
    """Write the outputs of all chunks, each through the tile of its P."""
    t, bar = p.tiles, p.barriers
    p.take_registers("emit")

    @pl.loop(0, p.count())
    def _(step):
        slot = p.output_slot(step)
        plgpu.barrier_wait(bar.output_loaded.at[slot])
        plgpu.barrier_wait(bar.state_stored)
        o = tiles.product(VALUES, (t.queries.at[slot], transposed(t.state)))
        plgpu.barrier_arrive(bar.state_read)
        plgpu.barrier_wait(bar.tokens_stored)
        o = tiles.added(o, (t.scores.at[slot], transposed(t.tokens)))
        plgpu.barrier_arrive(bar.tokens_read)
        plgpu.commit_smem()  # all warps have read P
        t.scores[slot] = o.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t.scores.at[slot], p.output(step))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(bar.output_consumed.at[slot])

    plgpu.wait_smem_to_gmem(0)
