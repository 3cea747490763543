"""The gradient of every chunk and head from the states at both its ends, for gates on keys."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu.tiles import CHUNK, LOG2E, Walk, tile, vector

SLOTS = 2
VARIANTS = {'': {}, 'copy': dict(probe='copy'), 'compute': dict(probe='compute')}


def gradient_key(q, k, v, g, d_output, scale, before, behind, *, reverse: bool, programs: int = 132, interpret=None, probe=None):
    B, T, H, K = g.shape
    V = v.shape[3]
    C, nC = CHUNK, before.shape[1]
    HQ, HK, HV = q.shape[2], k.shape[2], v.shape[2]
    team = K // 64
    teams = 2 // team
    total = B * nC * H
    step = programs * teams
    bf16, f32 = jnp.bfloat16, jnp.float32
    walk = Walk(reverse)

    def half(p):
        return pl.ds(p * 64, 64)

    def body(
        q_g, k_g, v_g, g_g, do_g, scale_g, S_g, dS_g, halves_g, dq_g, dk_g, dv_g, dg_g, dscale_g,
        q_s, k_s, v_s, g_s, do_s, S_s, dS_s, halves_s, vectors_s,
        halves_full, tokens_full, tokens_free, states_full, states_free, meet_scaled, meet_done,
    ):  # fmt: skip
        cta = lax.axis_index("cta")
        wg = lax.axis_index("wg")

        def place(item):
            if probe == "compute":
                item = lax.rem(item, programs * 2)
            h = lax.rem(item, H)
            rest = lax.div(item, H)
            return lax.div(rest, nC), lax.rem(rest, nC), h

        def count(t):
            """Items of team t of this program."""
            return lax.div(jnp.maximum(total - (cta * teams + t), 0) + (step - 1), step)

        @pl.when(wg == 2)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(halves_g, halves_s, halves_full)

            def load(i, _):
                slot = lax.rem(i, SLOTS)
                for t in range(teams):

                    @pl.when(i < count(t))
                    def _():
                        b, c, h = place(cta * teams + t + i * step)
                        rows = pl.ds(c * C, C)
                        at = t * SLOTS + slot

                        @pl.when(i >= SLOTS)
                        def _():
                            plgpu.barrier_wait(tokens_free.at[at])

                        full = tokens_full.at[at]
                        hq, hk, hv = (lax.div(h, H // heads) for heads in (HQ, HK, HV))
                        full = tokens_full.at[at]
                        for x, x_s, head in ((g_g, g_s, h), (q_g, q_s, hq), (k_g, k_s, hk), (v_g, v_s, hv), (do_g, do_s, h)):
                            for p in range(team):
                                plgpu.copy_gmem_to_smem(x.at[b, rows, head, half(p)], x_s.at[at, p], full)

                        @pl.when(i >= 1)
                        def _():
                            plgpu.barrier_wait(states_free.at[t])

                        plgpu.copy_gmem_to_smem(S_g.at[b, c, h], S_s.at[t], states_full.at[t])
                        plgpu.copy_gmem_to_smem(dS_g.at[b, c, h], dS_s.at[t], states_full.at[t])

                return ()

            lax.fori_loop(0, count(0), load, ())

        @pl.when(wg < 2)
        def _consume():
            plgpu.set_max_registers(232, action="increase")

            plgpu.barrier_wait(halves_full)

            def chunk(i, _):
                t, w = lax.optimization_barrier((lax.div(wg, team), lax.rem(wg, team)))
                mine = half(w)
                b, c, h = place(cta * teams + t + i * step)
                at = t * SLOTS + lax.rem(i, SLOTS)
                factor = scale_g[b]
                q_t, k_t, v_t, g_t, do_t = (x.at[at] for x in (q_s, k_s, v_s, g_s, do_s))
                q_w, k_w, v_w, g_w, do_w = (x.at[w] for x in (q_t, k_t, v_t, g_t, do_t))
                vec = vectors_s.at[t * team + w]
                plgpu.barrier_wait(tokens_full.at[at])

                if probe == "copy":
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(i >= 1)
                    def _():
                        plgpu.barrier_arrive(tokens_free.at[t * SLOTS + lax.rem(i + 1, SLOTS)])

                    plgpu.barrier_wait(states_full.at[t])
                    plgpu.barrier_arrive(states_free.at[t])
                    plgpu.commit_smem()
                    rows = pl.ds(c * C, C)
                    plgpu.copy_smem_to_gmem(q_w, dq_g.at[b, rows, h, mine], commit_group=False)
                    plgpu.copy_smem_to_gmem(k_w, dk_g.at[b, rows, h, mine], commit_group=False)
                    plgpu.copy_smem_to_gmem(do_w, dv_g.at[b, rows, h, mine], commit_group=False)
                    plgpu.copy_smem_to_gmem(v_w, dg_g.at[b, rows, h, mine])
                    return ()

                # [C, 64]: M; [64, 8]: sums over the first half and over the second, channels by rows
                def sums(M, ends):
                    plgpu.wgmma(M, walk.middle_matrix(), g_w)
                    plgpu.wgmma(ends, g_w.transpose((1, 0)), halves_s.transpose((1, 0)))
                    return M[...] * LOG2E, ends[...] * LOG2E

                M, ends = pl.run_scoped(sums, plgpu.ACC((C, 64), f32), plgpu.ACC((64, 8), f32))
                column = plgpu.broadcasted_iota(jnp.int32, (64, 8), 1, layout=plgpu.Layout.WGMMA)
                enter = jnp.exp2(jnp.where(column == 0, ends, 0.0).sum(1))
                leave = jnp.exp2(jnp.where(column == 1, ends, 0.0).sum(1))
                vec[0] = enter
                vec[1] = leave
                up, down = jnp.exp2(M), jnp.exp2(-M)
                q_w[...] = (tile(q_w).astype(f32) * up).astype(bf16)
                y = tile(k_w).astype(f32) * down
                k_w[...] = y.astype(bf16)
                # the outputs of the chunk before have left; and every warp is past the product with g
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(i >= 1)
                def _():
                    plgpu.barrier_arrive(tokens_free.at[t * SLOTS + lax.rem(i + 1, SLOTS)])

                g_w[...] = (y * vector(vec.at[1], 1)).astype(bf16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(meet_scaled.at[t])
                plgpu.barrier_wait(meet_scaled.at[t])
                square, part = plgpu.ACC((C, C), f32), plgpu.ACC((C, 64), f32)

                # [C, C]: A transposed and dA
                def scores(A_T, dA):
                    for p in range(team):
                        plgpu.wgmma(A_T, k_t.at[p], q_t.at[p].transpose((1, 0)))
                    for p in range(team):
                        plgpu.wgmma(dA, do_t.at[p], v_t.at[p].transpose((1, 0)))
                    kept = jnp.where(walk.earlier(), plgpu.wgmma_accumulator_load(A_T, wait_n=team) * factor, 0.0)
                    return kept.astype(bf16), jnp.where(walk.later(), dA[...], 0.0).astype(bf16)

                A_T, dA = pl.run_scoped(scores, square, square)
                plgpu.barrier_wait(states_full.at[t])

                # [C, C], [C, 64]: dA transposed, dv
                def values(dA_T, dv):
                    for p in range(team):
                        plgpu.wgmma(dA_T, v_t.at[p], do_t.at[p].transpose((1, 0)))
                    plgpu.wgmma(dv, A_T, do_w)
                    for p in range(team):
                        plgpu.wgmma(dv, g_t.at[p], dS_s.at[t, half(p), mine])
                    kept = jnp.where(walk.earlier(), plgpu.wgmma_accumulator_load(dA_T, wait_n=team + 1), 0.0)
                    return kept.astype(bf16), dv[...].astype(bf16)

                dA_T, dv = pl.run_scoped(values, square, part)

                # [C, 64]: k's gradient through the state, and through the chunk's pairs
                def keys(fed, push):
                    for p in range(team):
                        plgpu.wgmma(fed, v_t.at[p], dS_s.at[t, mine, half(p)].transpose((1, 0)))
                    plgpu.wgmma(push, dA_T, q_w)
                    return plgpu.wgmma_accumulator_load(fed, wait_n=1) * vector(vec.at[1], 1), push[...]

                fed, push = pl.run_scoped(keys, part, part)
                y = tile(k_w).astype(f32)
                before_gate = (y * fed).astype(bf16)
                dk = (down * (fed + factor * push)).astype(bf16)
                given = y * push

                # [C, 64], [64]: q's gradient through the state, and what decays over the whole chunk
                def state(read):
                    for p in range(team):
                        plgpu.wgmma(read, do_t.at[p], S_s.at[t, mine, half(p)].transpose((1, 0)))
                    edge = 0.0
                    for p in range(team):
                        here = (t, mine, half(p))
                        edge += (tile(S_s.at[here]).astype(f32) * tile(dS_s.at[here]).astype(f32)).sum(1)
                    return read[...] * vector(vec.at[0], 1), edge

                read, edge = pl.run_scoped(state, part)
                plgpu.barrier_arrive(states_free.at[t])
                read = pl.run_state(lambda read: plgpu.wgmma(read, dA, k_w))(plgpu.ACC.init(read))
                used = tile(q_w).astype(f32) * read
                behind_gate = factor * (used - given)
                dq = (factor * up * read).astype(bf16)
                dscale_g[b, c, h, w] = used.sum(1)
                plgpu.barrier_arrive(meet_done.at[t])
                plgpu.barrier_wait(meet_done.at[t])

                # all products with the tiles are done: they hold the gates' terms, then the outputs
                vec[0] = edge * enter * leave
                high = behind_gate.astype(bf16)
                v_w[...] = high
                do_w[...] = (behind_gate - high.astype(f32)).astype(bf16)
                g_w[...] = before_gate
                plgpu.commit_smem()

                def gate(dg):
                    suffix = walk.suffix_matrix()
                    plgpu.wgmma(dg, suffix, v_w)
                    plgpu.wgmma(dg, suffix, do_w)
                    plgpu.wgmma(dg, walk.prefix_matrix(), g_w)
                    q_w[...] = dq
                    k_w[...] = dk
                    return dg[...]

                dg = pl.run_scoped(gate, part) + vector(vec.at[0], 1)
                plgpu.commit_smem()
                v_w[...] = dg.astype(bf16)
                do_w[...] = dv
                plgpu.commit_smem()
                rows = pl.ds(c * C, C)
                plgpu.copy_smem_to_gmem(q_w, dq_g.at[b, rows, h, mine], commit_group=False)
                plgpu.copy_smem_to_gmem(k_w, dk_g.at[b, rows, h, mine], commit_group=False)
                plgpu.copy_smem_to_gmem(do_w, dv_g.at[b, rows, h, mine], commit_group=False)
                plgpu.copy_smem_to_gmem(v_w, dg_g.at[b, rows, h, mine])
                return ()

            lax.fori_loop(0, count(lax.div(wg, team)), chunk, ())
            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def smem(*shape):
        return plgpu.SMEM(shape, bf16, transforms=transforms)

    tokens = [smem(teams * SLOTS, team, C, 64)] * 5
    barrier = plgpu.Barrier
    out = jax.ShapeDtypeStruct
    return plgpu.kernel(
        body,
        out_type=[
            out((B, T, H, K), bf16),
            out((B, T, H, K), bf16),
            out((B, T, H, V), bf16),
            out((B, T, H, K), bf16),
            out((B, nC, H, team, C), f32),
        ],
        grid=(programs,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            *tokens,
            smem(teams, K, V),
            smem(teams, K, V),
            smem(8, 64),
            plgpu.SMEM((2, 2, 64), f32),
            barrier(),
            barrier(num_arrivals=5 * team, num_barriers=teams * SLOTS),
            barrier(num_arrivals=team, num_barriers=teams * SLOTS),
            barrier(num_arrivals=2, num_barriers=teams),
            barrier(num_arrivals=team, num_barriers=teams),
            barrier(num_arrivals=team, num_barriers=teams),
            barrier(num_arrivals=team, num_barriers=teams),
        ],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )(q, k, v, g, d_output, scale, before, behind, walk.halves_matrix())
