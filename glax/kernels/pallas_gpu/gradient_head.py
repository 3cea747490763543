"""The gradient of every chunk and head from the states at both its ends, for one gate a head.

With G_i the sum of a chunk's log gates through token i, L of all of them, S before the chunk and dS = dL/dS behind it,
A_ij = (q_i . k_j) e^{G_i - G_j} and dA_ij = (do_i . v_j) e^{G_i - G_j} for j <= i:

    dq_i = scale (e^{G_i} S do_i + sum_j dA_ij k_j)        dv_j = scale sum_i A_ij do_i + e^{L - G_j} dS^T k_j
    dk_j = e^{L - G_j} dS v_j + scale sum_i dA_ij q_i
    dg_t = e^L <S, dS> + sum_{i >= t} q_i . dq_i - sum_{j >= t} k_j . (scale sum_i dA_ij q_i)_j + sum_{j < t} k_j . (e^{L - G_j} dS v_j)

The two middle sums share the pairs that lie within them, formed of the same rounded dA, so that these cancel.

A program walks over chunks and heads. One warpgroup loads, ahead; two compute, each half of K in dq and dk and half of V in
dv (at widths of 64 each its own part of the pairs, and all of the rest).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.plan import C
from glax.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, by_column, by_row, product, read, tiled, transposed
from glax.kernels.pallas_gpu.tiles import LOG2E

BF16 = jnp.bfloat16
SLOTS = 2  # chunks in shared memory: one in work, one on its way
SUMS = 3  # of rows: q . dq, k . (scale dA^T q), k . (e^{L - G} dS v)


def gradient_head(q, k, v, G, d_output, scale, before, behind, *, reverse: bool, programs: int):
    """dq, dk [B, T, H, K], dv [B, T, H, V], dg [B, H, chunks, C] and d_scale [B, chunks, H], these two in float32.

    G [B, H, chunks, C] in float32: sums of log2 gates from where the walk enters each chunk. before, behind [B, chunks, H, K,
    V] in bfloat16: S and dS. K = V = 128, or 64 for which the second warpgroup works on the next head.
    """
    B, T = q.shape[:2]
    chunks, H, K, V = before.shape[1:]
    W = K // 64  # warpgroups a chunk
    hq, hk, hv = (H // x.shape[2] for x in (q, k, v))
    items = B * chunks * H

    def body(
        q_g, k_g, v_g, G_g, do_g, scale_g, before_g, behind_g, dq_g, dk_g, dv_g, sums_g, around_g,
        q_s, k_s, v_s, do_s, G_s, S_s, dS_s, dA_s, dAT_s, AT_s, given, taken, states_given, states_taken, joint,
    ):  # fmt: skip
        program, me = lax.axis_index("program"), lax.axis_index("warpgroup")
        count = lax.div(items - program + programs - 1, jnp.int32(programs))

        halves = [pl.ds(p * 64, 64) for p in range(W)]

        def place(step):
            """Sequence, chunk and head."""
            item = program + step * programs
            rest = lax.div(item, jnp.int32(H))
            return lax.div(rest, jnp.int32(chunks)), lax.rem(rest, jnp.int32(chunks)), lax.rem(item, jnp.int32(H))

        def rows(x, b, c, h, group, *columns):
            return x.at[(b, pl.ds(c * C, C), lax.div(h, jnp.int32(group)), *columns)]

        @pl.when(me == W)
        def _loading():
            if W > 1:
                plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(step):
                slot = lax.rem(step, jnp.int32(SLOTS))
                b, c, h = place(step)

                @pl.when(step >= SLOTS)
                def _():
                    plgpu.barrier_wait(taken.at[slot])

                full = given.at[slot]
                plgpu.copy_gmem_to_smem(G_g.at[b, h, c], G_s.at[slot], full)
                for x, shared, tile in ((do_g, 1, do_s), (v_g, hv, v_s), (q_g, hq, q_s), (k_g, hk, k_s)):
                    for p in range(W):
                        plgpu.copy_gmem_to_smem(rows(x, b, c, h, shared, halves[p]), tile.at[slot, p], full)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(states_taken)

                plgpu.copy_gmem_to_smem(before_g.at[b, c, h], S_s, states_given)
                plgpu.copy_gmem_to_smem(behind_g.at[b, c, h], dS_s, states_given)

        @pl.when(me < W)
        def _computing():
            if W > 1:
                plgpu.set_max_registers(232, action="increase")
            i, j = tiles.walking(reverse)
            half = pl.ds(me * 64, 64)

            def meet():
                plgpu.barrier_arrive(joint)
                plgpu.barrier_wait(joint)

            @pl.loop(0, count)
            def _(step):
                slot = lax.rem(step, jnp.int32(SLOTS))
                b, c, h = place(step)
                qt, kt, vt, dot = ([x.at[slot, p] for p in range(W)] for x in (q_s, k_s, v_s, do_s))
                own_q, own_k, own_v, own_do = (x.at[slot, me] for x in (q_s, k_s, v_s, do_s))
                factor = scale_g[b]
                plgpu.barrier_wait(given.at[slot])
                G = plgpu.load(G_s.at[slot], layout=BY_ROW)
                across = by_column(plgpu.load(G_s.at[slot], layout=BY_COLUMN), (C, C))
                enter, leave = jnp.exp2(G), jnp.exp2(G_s[slot, 0 if reverse else C - 1] - G)

                def pairs(x, y):
                    """Of x y^T, half by half."""
                    return [(a, transposed(b)) for a, b in zip(x, y, strict=True)]

                def decay(condition, difference):
                    return jnp.exp2(jnp.where(condition, difference, -jnp.inf))

                @pl.when(me == 0)
                def _():
                    D = decay(i >= j, by_row(G, (C, C)) - across)
                    dA_s[...] = (product((C, C), *pairs(dot, vt)) * D).astype(BF16)

                @pl.when(me == W - 1)
                def _():
                    D = decay(i <= j, across - by_row(G, (C, C)))
                    dAT_s[...] = (product((C, C), *pairs(vt, dot)) * D).astype(BF16)
                    AT_s[...] = (product((C, C), *pairs(kt, qt)) * (D * factor)).astype(BF16)

                plgpu.barrier_wait(states_given)
                around_g[b, c, h, half] = jnp.sum(read(S_s.at[half]) * read(dS_s.at[half]), axis=1)
                plgpu.commit_smem()
                meet()
                # [C, 64 of K]
                S, dS = ([x.at[half, p] for p in halves] for x in (S_s, dS_s))
                dq = product((C, 64), *pairs(dot, S)) * by_row(enter, (C, 64))
                dq = tiles.added(dq, (dA_s, own_k)) * factor
                sums_g[b, h, c, 0, me] = jnp.sum(read(own_q) * dq, axis=1)
                within = product((C, 64), (dAT_s, own_q)) * factor
                sums_g[b, h, c, 1, me] = jnp.sum(read(own_k) * within, axis=1)
                leaving = product((C, 64), *pairs(vt, dS)) * by_row(leave, (C, 64))
                sums_g[b, h, c, 2, me] = jnp.sum(read(own_k) * leaving, axis=1)
                # [C, 64 of V]
                dv = product((C, 64), *((x, dS_s.at[p, half]) for x, p in zip(kt, halves, strict=True)))
                plgpu.barrier_arrive(states_taken)
                dv = tiles.added(dv * by_row(leave, (C, 64)), (AT_s, own_do))
                meet()  # all have read what results are put into
                for x, tile, target in ((dq, own_q, dq_g), (within + leaving, own_k, dk_g), (dv, own_v, dv_g)):
                    tile[...] = x.astype(BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(tile, rows(target, b, c, h, 1, half))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(taken.at[slot])

            plgpu.wait_smem_to_gmem(0)

    f32 = jnp.float32
    dq, dk, dv, sums, around = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, T, H, K), BF16),
            jax.ShapeDtypeStruct((B, T, H, K), BF16),
            jax.ShapeDtypeStruct((B, T, H, V), BF16),
            jax.ShapeDtypeStruct((B, H, chunks, SUMS, W, C), f32),
            jax.ShapeDtypeStruct((B, chunks, H, K), f32),
        ),
        grid=(min(programs, items),),
        grid_names=("program",),
        num_threads=W + 1,
        thread_name="warpgroup",
        scratch_types=[
            *(tiled(SLOTS, W, C, 64),) * 4,
            plgpu.SMEM((SLOTS, C), f32),
            *(tiled(K, V),) * 2,
            *(tiled(C, C),) * 3,
            plgpu.Barrier(num_arrivals=1 + 4 * W, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=W, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=W),
            plgpu.Barrier(num_arrivals=W),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, G, d_output, scale, before, behind)
    through, within, leaving = jnp.moveaxis(sums.sum(4), 3, 0)
    last = G[..., 0 if reverse else C - 1]
    around = jnp.exp2(last) * around.sum(3).transpose(0, 2, 1)
    later = np.tri(C, dtype=np.float32)  # [t, s]: s <= t
    later = later if reverse else later.T
    dg = around[..., None] + jnp.einsum("bhcs,ts->bhct", through - within, later, precision="highest")
    dg = dg + jnp.einsum("bhcs,ts->bhct", leaving, 1 - later, precision="highest")
    return dq, dk, dv, dg, through.sum(3).transpose(0, 2, 1) / scale[:, None, None]
