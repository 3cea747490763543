"""One chunk and head, for gates on keys that stay within the range of e^M and e^-M."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu.gradient_tiles import (
    accumulator,
    after,
    columns,
    half,
    kept,
    meet,
    product,
)
from glax.kernels.pallas_gpu.tiles import LOG2E, added, high_part, read, transposed

bf16 = jnp.bfloat16


def chunk(n, m, c, release):
    """Few products at a time: more would leave no registers, and what is spilled passes through the memory's own cache.

    What it computes where the gates leave the range of e^M and e^-M is written over.
    """
    parts = range(n.team)
    M = product((m.walk.middle_matrix(), c.g_w)) * LOG2E
    up, down = jnp.exp2(M), jnp.exp2(-M)
    c.q_w[...] = (read(c.q_w) * up).astype(bf16)
    c.k_w[...] = (read(c.k_w) * down).astype(bf16)
    release()
    meet(m.meet_scaled.at[c.t])

    def scores(A_T, dA):
        for p in parts:
            plgpu.wgmma(A_T, c.k.at[p], transposed(c.q.at[p]))
        for p in parts:
            plgpu.wgmma(dA, c.do.at[p], transposed(c.v.at[p]))
        found = kept(m.walk.earlier(), after(A_T, n.team) * c.scale)
        return found, kept(m.walk.later(), after(dA))

    A_T, dA = pl.run_scoped(scores, accumulator(), accumulator())
    plgpu.barrier_wait(m.states_full.at[c.t])

    def values(dA_T, dv):
        for p in parts:
            plgpu.wgmma(dA_T, c.v.at[p], transposed(c.do.at[p]))
        plgpu.wgmma(dv, A_T, c.do_w)
        for p in parts:
            plgpu.wgmma(dv, c.k.at[p], m.dS.at[c.t, half(p), c.mine])
        found = kept(m.walk.earlier(), after(dA_T, n.team + 1))
        return found, after(dv).astype(bf16)

    dA_T, dv = pl.run_scoped(values, accumulator(), accumulator())

    def keys(fed, push):
        for p in parts:
            plgpu.wgmma(fed, c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)]))
        plgpu.wgmma(push, dA_T, c.q_w)
        return after(fed, 1), after(push)

    fed, push = pl.run_scoped(keys, accumulator(), accumulator())
    y = read(c.k_w)
    before_gate = (y * fed).astype(bf16)
    dk = (down * (fed + c.scale * push)).astype(bf16)
    given = y * push

    def through_state(drawn):
        for p in parts:
            plgpu.wgmma(drawn, c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)]))
        edge = around(n, m, c)
        return after(drawn), edge

    drawn, edge = pl.run_scoped(through_state, accumulator())
    plgpu.barrier_arrive(m.states_free.at[c.t])
    drawn = added(drawn, (dA, c.k_w))
    used = read(c.q_w) * drawn
    behind_gate = c.scale * (used - given)
    up = jnp.exp2(-jnp.log2(down))  # formed anew: to keep it would take registers that are not there
    dq = (c.scale * up * drawn).astype(bf16)
    m.used_g[c.b, c.c, c.h, c.w] = used.sum(1)
    meet(m.meet_done.at[c.t])
    finish(m, c, behind_gate, before_gate, edge, dq, dk, dv)


def around(n, m, c):
    """sum_v S dS, [64] of the warpgroup's own half of K."""
    own = [(c.t, c.mine, half(p)) for p in range(n.team)]
    return sum((read(m.S.at[x]) * read(m.dS.at[x])).sum(1) for x in own)


def finish(m, c, behind_gate, before_gate, edge, dq, dk, dv):
    """The gates' gradient summed, and everything stored. All products with the tiles are done: they are written over."""
    high = high_part(behind_gate)
    c.vector[...] = edge
    c.v_w[...] = high.astype(bf16)
    c.do_w[...] = (behind_gate - high).astype(bf16)
    c.g_w[...] = before_gate
    plgpu.commit_smem()
    mask = m.walk.earlier()
    suffix, prefix = kept(mask, 1.0), kept(mask, 0.0, 1.0)
    dg = product((suffix, c.v_w), (suffix, c.do_w), (prefix, c.g_w))
    c.q_w[...] = dq
    c.k_w[...] = dk
    dg = dg + columns(c.vector)
    plgpu.commit_smem()
    c.v_w[...] = dg.astype(bf16)
    c.do_w[...] = dv
    plgpu.commit_smem()
    store(m, c, dict(dq=c.q_w, dk=c.k_w, dv=c.do_w, dg=c.v_w))


def store(m, c, tiles: dict):
    """Starts the outputs on their way, as one group."""
    for name, source in tiles.items():
        target = getattr(m, name + "_g").at[c.b, c.rows, c.h, c.mine]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
    plgpu.commit_smem_to_gmem_group()
