"""Carry the state of a scan under the delta rule through all chunks: the work of one warpgroup.

The formulas are those of `delta_scan`. Everything is transposed, [V, tokens] and [V, K]: the left side of each product is what
the product before has left in registers, so that no result passes through shared memory on its way to the next. What does not
depend on a running product is done while it runs.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, ERASING, LEAVING, WITHIN
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import after, read, rounded_part, transposed, zeros
from glax._src.kernels.pallas_gpu.scan.delta_refs import (
    BF16,
    STRIPE,
    TOKENS,
    Program,
)  # fmt: skip


def carry_state(p: Program, me):
    """Carry S or dS, transposed, [STRIPE, K], through all chunks. me: the warpgroup."""
    carry_through(p, me, onward, back)


def carry_through(p: Program, me, onward: Callable, back: Callable):
    """Carry S or dS through all chunks, and write what leaves the last.

    onward, back: functions of (p, me, step, the state before a step), which return the state behind the step, for S and for dS.
    """
    p.take_registers("carry")
    S = starting_state(p, me)
    S = lax.fori_loop(0, p.count(), functools.partial(back if p.plan.is_adjoint else onward, p, me), S)
    p.results.last[(p.place()[2], p.head, *p.plan.upright(p.stripe(me), slice(None)))] = S


def starting_state(p: Program, me):
    """Return what the warpgroup's stripe of the state begins from: given states, zeros, or in columns of M those of I. It is
    [STRIPE, K], or [K, STRIPE] in a wide plan."""
    w, x = p.plan, p.operands
    if w.start:
        place = p.place()[2], p.head, *w.upright(p.stripe(), slice(None))
        return plgpu.load(x.start.at[place], layout=tiles.WGMMA, optimized=False)
    S = zeros(w.upright(STRIPE, w.K))
    if w.kind == "transitions":
        S = jnp.where(p.column(me, S.shape) - w.V == tiles.iota(S.shape, int(not w.wide)), 1.0, S)
    return S


def onward(p: Program, me, step, S):
    """Return the state behind a chunk, and hand on the state before it and what its tokens write."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    before, through = S.astype(BF16), decayed(p, slot, S)

    def of_state(by_keys):
        plgpu.wgmma(by_keys, before, transposed(t.k.at[slot]))
        hand_state(p, step, before)
        given, erasing = read(transposed(t.v.at[slot, me])) * p.factor(slot, BETA), p.factor(slot, ERASING)
        if p.plan.kind == "transitions":
            given = jnp.where(p.column(me, TOKENS) < p.plan.V, given, 0.0)
        leaving = p.factor(slot, LEAVING)
        return leaving, given - after(by_keys) * erasing

    leaving, X = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))
    U = tiles.added(X, (X.astype(BF16), transposed(t.inverse.at[slot])))

    def of_tokens(state):
        plgpu.wgmma(state, (U * leaving).astype(BF16), t.k.at[slot])
        hand_tokens(p, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return S


def back(p: Program, me, step, dS):
    """Return dS before a chunk from dS' behind it, and hand on dS' and dX."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    behind, through = dS.astype(BF16), decayed(p, slot, dS)
    d_output = transposed(t.d_output.at[slot])

    def of_state(by_keys, by_scores):
        plgpu.wgmma(by_keys, behind, transposed(t.k.at[slot]))
        hand_state(p, step, behind)
        plgpu.barrier_wait(p.barriers.scores_stored)
        plgpu.wgmma(by_scores, plgpu.load(d_output, layout=tiles.WGMMA), t.scores)
        leaving = p.factor(slot, LEAVING)
        dU = after(by_keys, 1) * leaving
        reads = (read(d_output) * (p.factor(slot, WITHIN) * p.scale())).astype(BF16)
        return reads, dU + after(by_scores)

    accumulator = plgpu.ACC(TOKENS, jnp.float32)
    reads, dU = pl.run_scoped(of_state, accumulator, accumulator)
    plgpu.barrier_arrive(p.barriers.scores_read)

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, dU.astype(BF16), t.inverse.at[slot])
        plgpu.wgmma(state, reads, t.q.at[slot])
        erasing = -p.factor(slot, ERASING)
        dX = after(by_inverse, 1)
        plgpu.wgmma(state, (dX * erasing).astype(BF16), t.k.at[slot])
        hand_tokens(p, step, dX)

    _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return dS


def decayed(p: Program, slot, S):
    """Return e^{G_last} S. Call it before a product starts: ptxas would wait for it, because a product has written S."""
    return lax.optimization_barrier(S * p.tiles.factors[slot, WITHIN, p.plan.last_token])


def hand_state(p: Program, step, S):
    """Hand S [STRIPE, K] to the warpgroup that emits results, if there is one."""
    if not p.plan.emits:
        return
    pl.when(step > 0)(lambda: plgpu.barrier_wait(p.barriers.state_read))
    p.tiles.state[...] = S
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.barriers.state_stored)


def hand_tokens(p: Program, step, x):
    """Hand x [STRIPE, C] to the warpgroup that emits results, if there is one. dX has two terms, for the gradient of beta."""
    if not p.plan.emits:
        return
    pl.when(step > 0)(lambda: plgpu.barrier_wait(p.barriers.tokens_read))
    high = rounded_part(x) if p.plan.is_adjoint else x
    p.tiles.tokens[...] = high.astype(BF16)
    if p.plan.is_adjoint:
        p.tiles.lost[...] = (x - high).astype(BF16)
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.barriers.tokens_stored)
