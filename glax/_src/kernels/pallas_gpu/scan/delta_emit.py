"""Do what a scan under the delta rule needs beside its states: the scores, and the results. One warpgroup does each.

Neither delays the warpgroup that carries the state. Scores do not depend on the state, and are formed one chunk ahead. Outputs
are formed from what that warpgroup hands on: the state before a chunk, and what its tokens write. Both go to memory where the
gradient will read them.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, GATES, WITHIN
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, by_column, by_row, read, transposed
from glax._src.kernels.pallas_gpu.plan import PAIRS
from glax._src.kernels.pallas_gpu.scan.delta_refs import BF16, VALUES, C, Program


def form_scores(p: Program):
    """Form P of all chunks. No exponent is above 0 for gates <= 0."""
    t, bar = p.tiles, p.barriers
    p.take_registers("score")
    i, j = tiles.positions(p.plan.reverse)

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        plgpu.barrier_wait(bar.loaded.at[slot])
        to = plgpu.load(t.factors.at[slot, GATES], layout=BY_COLUMN, optimized=False)
        between = jnp.where(i >= j, by_row(p.row_factor(slot, GATES), PAIRS) - by_column(to, PAIRS), -jnp.inf)
        found = tiles.product(PAIRS, (t.q.at[slot], transposed(t.k.at[slot])))
        plgpu.barrier_arrive(bar.consumed.at[slot])
        scores = (found * (jnp.exp2(between) * p.scale())).astype(BF16)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(bar.scores_read))
        t.scores[...] = scores
        plgpu.commit_smem()
        plgpu.barrier_arrive(bar.scores_stored)


def emit_results(p: Program):
    """Write the results of all chunks."""
    w, t, bar = p.plan, p.tiles, p.barriers
    p.take_registers("emit")

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        # The copies of the chunk before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(step > 0)(lambda: plgpu.barrier_arrive(bar.tokens_read))
        if w.writes_tokens:
            plgpu.barrier_wait(bar.loaded.at[slot])
        plgpu.barrier_wait(bar.state_stored)
        if w.stores_states:
            plgpu.copy_smem_to_gmem(p.state(), p.stored(step, 0, w.K))
        o = outputs_of_state(p, slot) if w.writes_tokens and not w.is_adjoint else None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(bar.state_read)
        plgpu.barrier_wait(bar.tokens_stored)
        if w.stores_states:
            plgpu.copy_smem_to_gmem(t.tokens, p.stored(step, w.K, C))
        if o is not None:
            plgpu.barrier_wait(bar.scores_stored)
            o = tiles.added(o, (t.scores, p.by_rows(t.tokens)))
            plgpu.barrier_arrive(bar.scores_read)
        elif w.is_adjoint:
            o = gradient_of_values(p, step, slot)
        if o is not None:
            plgpu.barrier_arrive(bar.consumed.at[slot])
            tile = t.lost if w.tight else t.output
            tile[...] = o.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, p.output(step))

    plgpu.wait_smem_to_gmem(0)


def outputs_of_state(p: Program, slot):
    """Return scale e^G Q S, [C, STRIPE]."""
    t = p.tiles
    o = tiles.product(VALUES, (t.q.at[slot], p.by_rows(p.state())))
    return o * by_row(p.row_factor(slot, WITHIN) * p.scale(), VALUES)


def gradient_of_values(p: Program, step, slot):
    """Return dV = beta dX, [C, STRIPE], and write the sums of dX v."""
    t = p.tiles
    dX = read(p.by_rows(t.tokens)) + read(p.by_rows(t.lost))
    if p.plan.tight:
        plgpu.barrier_wait(p.barriers.values_loaded)
    p.results.beta[p.field(0), p.chunk(step), p.head, p.number()] = (dX * read(p.values(slot))).sum(1)
    return dX * p.factor_by_row(slot, BETA)
