"""Scan under the delta rule with per-key gates, for the outputs or for what the gradient reads.

S [K, V] is the state before a chunk. `chunks/pairs.py` has formed R, P and the decayed operands, and G is its sum of gates:

    X    = beta (V - (K e^G) S)
    U    = X + R X                      what the tokens write
    O    = (scale Q e^G) S + P U
    S'   = e^{G_last} S + (K e^{G_last - G})^T U

The scan of the adjoint is a reverse scan, from dS' = dL/dS' behind the chunk and dO:

    dU   = (K e^{G_last - G}) dS' + P^T dO
    dX   = dU + R^T dU                  dV = beta dX
    dS   = e^{G_last} dS' + (scale Q e^G)^T dO - (K e^G)^T (beta dX)

No exponential is formed here. A program has one head of one segment, and 64 columns of the state, which do not depend on each
other; for "transitions" it has 128 where these divide the columns. One warpgroup carries the state, transposed as in
`delta_carry.py`, one writes the results, and one fetches. "transitions" are those of `delta_scan`. dU is formed from two terms
of dS' in bfloat16 where `DeltaKeyScan.splits_state` says so.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_ROW, after, by_row, read, rounded_part, transposed
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder
from glax._src.kernels.pallas_gpu.scan.delta_carry import hand_state, hand_tokens, starting_state
from glax._src.kernels.pallas_gpu.scan.delta_key_refs import (
    OUTPUT_STAGES,
    Barriers,
    DeltaKeyScan,
    Operands,
    Program,
    Tiles,
)  # fmt: skip
from glax._src.kernels.pallas_gpu.scan.delta_refs import BF16, STRIPE, TOKENS, VALUES, Results


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_key_scan(w: DeltaKeyScan, rows: int, *operands) -> Results:
    """Scan every segment of `table`. rows: the number of rows of the outputs. operands: the fields of `Operands`."""
    x = Operands(*operands)
    B, chunks = x.beta.shape[:2]
    inputs = len(operands)  # a cached kernel must not hold a tracer

    def body(*refs):
        given, (*results, own, barriers) = refs[:inputs], refs[inputs:]
        p = Program(w, Operands(*given), None, Results(*results), own, barriers)
        me = lax.axis_index("warpgroup")
        work = dict(carry=carry_state, emit=emit_results, fetch=fetch_chunks)
        for number, role in enumerate(w.roles):
            pl.when(me == number)(functools.partial(work[role], p, *[number] * (role == "carry")))

    body.__name__ = "delta_key_" + w.kind.replace(" ", "_")  # in profiles
    results = tuple(Results.types(w, B, rows, chunks, x.table.shape[0]))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(w.columns // (STRIPE * w.stripes) * w.H * x.table.shape[0],),
        grid_names=("program",),
        num_threads=len(w.roles),
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_key_scan", w, rows), kernel, *operands, results=results))


def fetch_chunks(p: Program):
    """Fetch chunks ahead, as many as shared memory holds."""
    w, x, t, bar = p.plan, p.operands, p.tiles, p.barriers
    p.take_registers("fetch")
    staged = [(getattr(x, name), getattr(t, name)) for name in w.by_stage]

    @pl.loop(0, p.count())
    def _(step):
        slot, chunk = p.slot(step), (p.field(0), p.chunk(step))
        loaded = bar.loaded.at[slot]
        pl.when(step >= w.stages)(lambda: plgpu.barrier_wait(bar.consumed.at[slot]))
        for source, tile in staged:
            plgpu.copy_gmem_to_smem(source.at[(*chunk, p.head)], tile.at[slot], loaded)
        rows, head = pl.ds(p.chunk(step) * C, C), quotient(p.head, w.H // x.v.shape[2])
        for me in range(w.stripes if w.reads_values else 0):
            # The columns of M read any v, of which they write nothing.
            columns = pl.ds(remainder(p.number(me), w.V // STRIPE) * STRIPE, STRIPE)
            plgpu.copy_gmem_to_smem(x.v.at[p.field(0), rows, head, columns], t.v.at[slot, me], loaded)
        if w.is_adjoint:
            head = quotient(p.head, w.H // x.d_output.shape[2])
            plgpu.copy_gmem_to_smem(x.d_output.at[p.field(0), rows, head, p.stripe()], t.d_output.at[slot], loaded)
        if w.forms_outputs:
            slot = p.output_slot(step)
            pl.when(step >= OUTPUT_STAGES)(lambda: plgpu.barrier_wait(bar.output_consumed.at[slot]))
            for source, tile in ((x.queries, t.queries), (x.scores, t.scores)):
                plgpu.copy_gmem_to_smem(source.at[(*chunk, p.head)], tile.at[slot], bar.output_loaded.at[slot])


def carry_state(p: Program, me):
    """Carry S or dS, transposed, [STRIPE, K], through all chunks. me: the warpgroup."""
    p.take_registers("carry")
    advance = functools.partial(back if p.plan.is_adjoint else onward, p, me)
    p.results.last[p.place()[2], p.head, p.stripe(me), :] = lax.fori_loop(0, p.count(), advance, starting_state(p, me))


def onward(p: Program, me, step, S):
    """Return the state behind a chunk, and hand on the state before it and what its tokens write."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    before, through = S.astype(BF16), decayed(p, slot, S)

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


def back(p: Program, me, step, dS):
    """Return dS before a chunk from dS' behind it, and hand on dS' and dX."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    (behind, *rest), through = terms_of_state(p, dS), decayed(p, slot, dS)
    d_output = plgpu.load(transposed(t.d_output.at[slot]), layout=tiles.WGMMA)

    def of_state(by_keys):
        for term in (behind, *rest):
            plgpu.wgmma(by_keys, term, transposed(t.leaving.at[slot]))
        plgpu.wgmma(by_keys, d_output, t.scores.at[slot])
        hand_state(p, step, behind)
        return after(by_keys)

    dU = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, dU.astype(BF16), t.inverse.at[slot])
        plgpu.wgmma(state, d_output, t.queries.at[slot])
        erasing = -p.along(t.beta.at[slot], TOKENS)
        dX = after(by_inverse, 1)
        plgpu.wgmma(state, (dX * erasing).astype(BF16), t.erasing.at[slot])
        hand_tokens(p, step, dX)

    _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return dS


def terms_of_state(p: Program, dS) -> tuple:
    """Return dS' [STRIPE, K] in bfloat16 and, if the plan says so, what that loses. d beta sums dX v over V, and its terms may
    nearly cancel."""
    if not p.plan.splits_state:
        return (dS.astype(BF16),)
    high = rounded_part(dS)
    return high.astype(BF16), (dS - high).astype(BF16)


def decayed(p: Program, slot, S):
    """Return e^{G_last} S. Call it before a product starts: ptxas would wait for it, because a product has written S."""
    return lax.optimization_barrier(S * p.along(p.tiles.decay.at[slot], S.shape))


def emit_results(p: Program):
    """Write the results of all chunks. Outputs leave through the tile of their P."""
    w, t, bar = p.plan, p.tiles, p.barriers
    p.take_registers("emit")

    @pl.loop(0, p.count())
    def _(step):
        slot = p.output_slot(step)
        if w.forms_outputs:
            plgpu.barrier_wait(bar.output_loaded.at[slot])
        plgpu.barrier_wait(bar.state_stored)
        if w.stores_states:
            plgpu.copy_smem_to_gmem(t.state, p.stored(step, 0, w.K))
        o = tiles.product(VALUES, (t.queries.at[slot], transposed(t.state))) if w.forms_outputs else None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(bar.state_read)
        plgpu.barrier_wait(bar.tokens_stored)
        if w.stores_states:
            plgpu.copy_smem_to_gmem(t.tokens, p.stored(step, w.K, C))
        if o is not None:
            o = tiles.added(o, (t.scores.at[slot], transposed(t.tokens)))
        elif w.is_adjoint:
            o = gradient_of_values(p, step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(bar.tokens_read)
        if o is not None:
            tile = t.output if w.is_adjoint else t.scores.at[slot]
            plgpu.commit_smem()  # all warps have read P
            tile[...] = o.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, p.output(step))
        if w.forms_outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(bar.output_consumed.at[slot])

    plgpu.wait_smem_to_gmem(0)


def gradient_of_values(p: Program, step):
    """Return dV = beta dX, [C, STRIPE], and write the sums of dX v."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    dX = read(transposed(t.tokens)) + read(transposed(t.lost))
    p.results.beta[p.field(0), p.chunk(step), p.head, p.number()] = (dX * read(t.v.at[slot, 0])).sum(1)
    dV = dX * by_row(plgpu.load(t.beta.at[slot], layout=BY_ROW), VALUES)
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return dV
