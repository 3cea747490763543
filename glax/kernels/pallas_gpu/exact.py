"""The walks of `key` again, token by token, for the programs whose gates went too far for it:

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t

in float32 and without products, so that no exponent but a gate itself is formed: exact for all gates. A loop over tokens is also
a tenth of the instructions that the same chunk takes in products by halving, and who first calls `key` waits for all to compile.

One warpgroup a program, one chunk in flight: this is for gates that are rare. A program whose fast form held ends at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.tiles import HALF, LOG2E, C, by_column, by_row, read

BF16 = jnp.bfloat16
# [K, 64]: a thread has every eighth row of 4 columns, so that a sum over K takes 3 exchanges of 4 numbers.
STATE = plgpu.Layout.TILED(Tiling(((8, 64), (8, 16), (8, 4))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
OF_K, OF_V = STATE.reduce(1), STATE.reduce(0)


def exact_walk(w, table, far, far_chunk, q, a, b, g, scale, start, o, states, last, log):
    """Writes o, states, last and log, references to what `key_walk` returned, where far [E, H] is not 0.

    far_chunk [B, chunks, H]: `far` of `Walked`, read where states are written.
    """
    E, blocks = table.shape[0], w.V // 64
    H, K = w.H, w.K
    ha, hb, hq = (H // x.shape[2] for x in (a, b, q))

    def body(
        table_g, far_g, far_chunk_g, q_g, a_g, b_g, g_g, scale_g, start_g, o_g, states_g, last_g, log_g, _,
        q_s, a_s, b_s, g_s, o_s, S_s, given,
    ):  # fmt: skip
        program = lax.axis_index("program")
        block, h, e = program % blocks, program // blocks % H, program // (blocks * H)
        batch, first, count, n = (table_g[e, i] for i in range(4))
        mine, adjoint = pl.ds(block * 64, 64), table_g[e, 4] if w.either else int(w.adjoint)

        def tokens(x, group, step, *columns):
            return x.at[(batch, pl.ds((first + w.place(step, count, adjoint)) * C, C), h // group, *columns)]

        @pl.when(far_g[e, h] > 0)
        def _():
            factor, none = scale_g[n], tiles.zeros((K,), OF_K)

            def gates(token):
                g = sum(read(g_s.at[term, token], OF_K) for term in range(w.terms))
                return jnp.maximum(g, tiles.LOG_OF_ZERO)

            def decayed(S, log):
                return S * by_row(jnp.exp2(log * LOG2E), S.shape)

            def when_adjoint(log, other):
                if w.either:
                    return log * adjoint.astype(jnp.float32) + other * (1 - adjoint).astype(jnp.float32)
                return log if w.adjoint else other

            def walk_token(step, carry):
                S, log, late = carry
                token = w.place(step, C, adjoint)
                g, left = gates(token), read(a_s.at[token], OF_K)
                added = by_row(left * factor if w.adjoint else left, S.shape)
                added *= by_column(read(b_s.at[token], OF_V), S.shape)
                S = decayed(S, when_adjoint(late, g)) + added
                if w.outputs:
                    o = jnp.sum(S * by_row(read(q_s.at[token], OF_K), S.shape), axis=0)
                    o_s[token] = (o * factor).astype(BF16)
                return S, log + g, when_adjoint(g, none)

            def walk(step, carry):
                S, _, late = carry
                for term in range(w.terms):
                    plgpu.copy_gmem_to_smem(tokens(g_g.at[term], 1, step), g_s.at[term], given)
                plgpu.copy_gmem_to_smem(tokens(a_g, ha, step), a_s, given)
                plgpu.copy_gmem_to_smem(tokens(b_g, hb, step, mine), b_s, given)
                if w.outputs:
                    plgpu.copy_gmem_to_smem(tokens(q_g, hq, step), q_s, given)
                plgpu.barrier_wait(given)
                if w.states:
                    chunk = first + w.place(step, count, adjoint)
                    # Of near chunks, decayed to their middle.
                    near = jnp.where(far_chunk_g[batch, chunk, h] > 0, 0, HALF)
                    ahead = lax.fori_loop(0, near, lambda i, log: log + gates(w.place(i, C, adjoint)), late)
                    S_s[...] = decayed(S, ahead).astype(BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(S_s, states_g.at[batch, chunk, h, :, mine])
                carry = lax.fori_loop(0, C, walk_token, carry)
                if w.outputs:
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(o_s, tokens(o_g, 1, step, mine))
                plgpu.wait_smem_to_gmem(0)  # and until all warps are done with the tiles
                return carry

            # A state of dL/dS decays by a token's gate before the next is added: that gate is late.
            S = tiles.zeros((K, 64), STATE)
            if w.start:
                S = plgpu.load(start_g.at[e, h, :, mine], layout=STATE, optimized=False)
            S, log, late = lax.fori_loop(0, count, walk, (S, none, none))
            last_g[e, h, :, mine] = decayed(S, late)

            @pl.when(block == 0)
            def _():
                log_g[e, h] = log

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(blocks * H * E,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((C, K) if w.outputs else (8, 64), BF16),
            plgpu.SMEM((C, K), BF16),
            plgpu.SMEM((C, 64), BF16),
            plgpu.SMEM((w.terms, C, K), BF16),
            plgpu.SMEM((C, 64) if w.outputs else (8, 64), BF16),
            plgpu.SMEM((K, 64) if w.states else (8, 64), BF16),
            plgpu.Barrier(num_arrivals=(3 if w.outputs else 2) + w.terms),
        ],
        compiler_params=tiles.PARAMS,
    )(table, far, far_chunk, q, a, b, g, scale, start, o, states, last, log)
