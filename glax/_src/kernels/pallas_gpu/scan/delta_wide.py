"""Carry the state of a scan under the delta rule with keys wider than 128 through all chunks: the work of one warpgroup.

The formulas are those of `delta_scan`. The state is [K, STRIPE] and all else [tokens, STRIPE], and products read both sides from
shared memory. So registers hold the state once, in float32, and the factor of a token is one number for its row. In the form of
`scan/delta_carry.py`, the state in bfloat16, the left sides of products and the factors of columns would take 112 registers of a
thread more than a state of 256 channels leaves.

Operands of products overwrite what they were formed from: X, and then e^{G_last - G} U, the tile of v; scale e^G dO the tile of
dO; dU, and then beta e^G dX, the tile of P.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, ERASING, LEAVING, WITHIN
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import after, by_row, read, transposed
from glax._src.kernels.pallas_gpu.scan.delta_carry import carry_through, decayed, hand_tokens
from glax._src.kernels.pallas_gpu.scan.delta_refs import (
    BF16,
    STRIPE,
    VALUES,
    Program,
)  # fmt: skip


def carry_wide_state(p: Program, me):
    """Carry S or dS, [K, STRIPE], through all chunks. me: the warpgroup."""
    carry_through(p, me, onward, back)


def onward(p: Program, me, step, S):
    """Return the state behind a chunk, and hand on the state before it and what its tokens write."""
    t, slot = p.tiles, p.slot(step)
    # Formed where it is used: an accumulator's scope takes no reference with a static index from outside.
    values = functools.partial(p.values, slot, me)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    hand_state(p, me, step, S)
    through = decayed(p, slot, S)

    def of_state(by_keys):
        plgpu.wgmma(by_keys, t.k.at[slot], t.state.at[me])
        beta, erasing = p.row_factor(slot, BETA), p.factor_by_row(slot, ERASING)
        if p.plan.kind == "transitions":
            beta *= jnp.where(p.number(me) * STRIPE < p.plan.V, 1.0, 0.0)  # nothing is added to columns of M
        given = read(values()) * by_row(beta, VALUES)
        return given - after(by_keys) * erasing

    X = pl.run_scoped(of_state, plgpu.ACC(VALUES, jnp.float32))
    values()[...] = X.astype(BF16)
    plgpu.commit_smem()
    U: Any = pl.run_state(lambda total: plgpu.wgmma(total, p.inverse(slot), values()))(plgpu.ACC.init(X))
    plgpu.commit_smem()  # all warps have read X
    values()[...] = (U * p.factor_by_row(slot, LEAVING)).astype(BF16)
    plgpu.commit_smem()

    def of_tokens(state):
        plgpu.wgmma(state, transposed(t.k.at[slot]), values())
        hand_tokens(p, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return S


def back(p: Program, me, step, dS):
    """Return dS before a chunk from dS' behind it, and hand on dS' and dX."""
    t, bar, slot = p.tiles, p.barriers, p.slot(step)
    d_output, tokens = t.d_output.at[slot], t.scores
    plgpu.barrier_wait(bar.loaded.at[slot])
    hand_state(p, me, step, dS)
    through = decayed(p, slot, dS)

    dU = tiles.product(VALUES, (t.k.at[slot], t.state.at[me])) * p.factor_by_row(slot, LEAVING)
    plgpu.barrier_wait(bar.scores_stored)
    dU = tiles.added(dU, (transposed(t.scores), d_output))
    reads = read(d_output) * by_row(p.row_factor(slot, WITHIN) * p.scale(), VALUES)
    plgpu.commit_smem()  # all warps have read P and dO
    d_output[...] = reads.astype(BF16)
    tokens[...] = dU.astype(BF16)
    plgpu.commit_smem()
    if p.plan.tight:
        plgpu.barrier_wait(bar.inverse_loaded)

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, transposed(p.inverse(slot)), tokens)
        plgpu.wgmma(state, transposed(t.q.at[slot]), d_output)
        erasing = -p.factor_by_row(slot, ERASING)
        dX = after(by_inverse, 1)
        plgpu.commit_smem()  # all warps have read dU
        if p.plan.tight:
            plgpu.barrier_arrive(bar.inverse_read)
        tokens[...] = (dX * erasing).astype(BF16)
        plgpu.commit_smem()
        plgpu.wgmma(state, transposed(t.k.at[slot]), tokens)
        hand_tokens(p, step, dX)

    _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    plgpu.barrier_arrive(bar.scores_read)
    plgpu.barrier_arrive(bar.consumed.at[slot])
    return dS


def hand_state(p: Program, me, step, S):
    """Store S [K, STRIPE] in bfloat16, and report it to the warpgroup that emits results, if there is one."""
    if p.plan.emits:
        pl.when(step > 0)(lambda: plgpu.barrier_wait(p.barriers.state_read))
    p.tiles.state[me] = S.astype(BF16)
    plgpu.commit_smem()
    if p.plan.emits:
        plgpu.barrier_arrive(p.barriers.state_stored)
