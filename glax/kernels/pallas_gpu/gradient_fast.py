"""One chunk and head, for gates on keys that stay within the range of e^M and e^-M."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu.gradient_tiles import (
    FAST_LIMIT,
    LOG2E,
    WGMMA,
    accumulator,
    after,
    columns,
    high_part,
    kept,
    product,
    tile,
    transposed,
)

bf16 = jnp.bfloat16


def chunk(n, m, c, release):
    """Products run while what needs no product of them is computed: M's and dA's, A's and dA^T's, dv's and dk's, dq's.

    Returns [64] of 1 where the gates stay within range, and 0 where the results are to be computed anew.
    """
    from glax.kernels.pallas_gpu.gradient import half, meet

    parts = range(n.team)

    def scaled(M_total, ends_total, dA_total):
        plgpu.wgmma(M_total, m.walk.middle_matrix(), c.g_w)
        plgpu.wgmma(ends_total, transposed(c.g_w), transposed(m.halves))
        for p in parts:
            plgpu.wgmma(dA_total, c.do.at[p], transposed(c.v.at[p]))
        M, ends = after(M_total, n.team) * LOG2E, after(ends_total, n.team) * LOG2E
        column = plgpu.broadcasted_iota(jnp.int32, (64, 8), 1, layout=WGMMA)
        enter, leave = (jnp.where(column == side, ends, 0.0).sum(1) for side in (0, 1))
        finite = jnp.abs(enter) + jnp.abs(leave) < jnp.inf  # sums of gates of -inf are NaN, and the largest may not show it
        near = (jnp.abs(M).max(1) <= FAST_LIMIT * LOG2E) & finite
        enter, leave = jnp.exp2(enter), jnp.exp2(leave)
        fits = jnp.where(near, 1.0, 0.0)
        m.fits_g[c.b, c.c, c.h, c.w] = fits
        c.vector[0] = enter
        c.vector[1] = leave
        up, down = jnp.exp2(M), jnp.exp2(-M)
        c.q_w[...] = (tile(c.q_w) * up).astype(bf16)
        y = tile(c.k_w) * down
        c.k_w[...] = y.astype(bf16)
        release()  # waits for all warps, which are past the product with g then
        c.g_w[...] = (y * columns(c.vector.at[1])).astype(bf16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(m.meet_scaled.at[c.t])
        dA = kept(m.walk.later(), after(dA_total))
        plgpu.barrier_wait(m.meet_scaled.at[c.t])
        plgpu.barrier_wait(m.states_full.at[c.t])
        pl.run_scoped(lambda *totals: scores(up, down, enter * leave, dA, *totals), accumulator(), accumulator())
        return fits

    def scores(up, down, decay, dA, A_T_total, dA_T_total):
        for p in parts:
            plgpu.wgmma(A_T_total, c.k.at[p], transposed(c.q.at[p]))
        for p in parts:
            plgpu.wgmma(dA_T_total, c.v.at[p], transposed(c.do.at[p]))
        earlier = m.walk.earlier()
        A_T = kept(earlier, after(A_T_total, n.team) * c.scale)

        def values(dv_total, fed_total):
            plgpu.wgmma(dv_total, A_T, c.do_w)
            for p in parts:
                plgpu.wgmma(dv_total, c.g.at[p], m.dS.at[c.t, half(p), c.mine])
            for p in parts:
                plgpu.wgmma(fed_total, c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)]))
            dA_T = kept(earlier, after(dA_T_total, 2 * n.team + 1))
            dv = after(dv_total, n.team).astype(bf16)
            pl.run_scoped(lambda push: keys(up, down, decay, dA, dA_T, dv, fed_total, push), accumulator())

        pl.run_scoped(values, accumulator(), accumulator())

    def keys(up, down, decay, dA, dA_T, dv, fed_total, push_total):
        plgpu.wgmma(push_total, dA_T, c.q_w)
        fed = after(fed_total, 1) * columns(c.vector.at[1])
        y = tile(c.k_w)
        before_gate = (y * fed).astype(bf16)
        push = after(push_total)
        dk = (down * (fed + c.scale * push)).astype(bf16)
        given = y * push
        pl.run_scoped(lambda *totals: queries(up, decay, dA, dv, before_gate, dk, given, *totals), *[accumulator()] * 2)

    def queries(up, decay, dA, dv, before_gate, dk, given, read_total, pull_total):
        for p in parts:
            plgpu.wgmma(read_total, c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)]))
        plgpu.wgmma(pull_total, dA, c.k_w)
        edge = around(n, m, c) * decay
        read = after(read_total, 1) * columns(c.vector.at[0])
        plgpu.barrier_arrive(m.states_free.at[c.t])
        read = read + after(pull_total)
        used = tile(c.q_w) * read
        behind_gate = c.scale * (used - given)
        dq = (c.scale * up * read).astype(bf16)
        m.used_g[c.b, c.c, c.h, c.w] = used.sum(1)
        meet(m.meet_done.at[c.t])
        finish(m, c, behind_gate, before_gate, edge, dq, dk, dv)

    return pl.run_scoped(scaled, accumulator(), accumulator((64, 8)), accumulator())


def around(n, m, c):
    """sum_v S dS, [64] of the warpgroup's own half of K."""
    from glax.kernels.pallas_gpu.gradient import half

    own = [(c.t, c.mine, half(p)) for p in range(n.team)]
    return sum((tile(m.S.at[x]) * tile(m.dS.at[x])).sum(1) for x in own)


def finish(m, c, behind_gate, before_gate, edge, dq, dk, dv):
    """The gates' gradient summed, and everything stored. All products with the tiles are done: they are written over."""
    high = high_part(behind_gate)
    c.vector[0] = edge
    c.v_w[...] = high.astype(bf16)
    c.do_w[...] = (behind_gate - high).astype(bf16)
    c.g_w[...] = before_gate
    plgpu.commit_smem()
    mask = m.walk.earlier()
    suffix, prefix = kept(mask, 1.0), kept(mask, 0.0, 1.0)
    dg = product((suffix, c.v_w), (suffix, c.do_w), (prefix, c.g_w))
    c.q_w[...] = dq
    c.k_w[...] = dk
    dg = dg + columns(c.vector.at[0])
    plgpu.commit_smem()
    c.v_w[...] = dg.astype(bf16)
    c.do_w[...] = dv
    plgpu.commit_smem()
    outputs = ((c.q_w, m.dq_g), (c.k_w, m.dk_g), (c.do_w, m.dv_g), (c.v_w, m.dg_g))
    for source, target in outputs:
        plgpu.copy_smem_to_gmem(source, target.at[c.b, c.rows, c.h, c.mine], commit_group=target is m.dg_g)
