"""The walks of `walk` again, in a form that forms no exponent above 0, for the programs that went too far.

Products read both sides from shared memory: with the left one in registers, a kernel of this size gave NaN now and then.
Scores come from log2(C) products, each pair of tokens with a reference between them:

    level: C/2 .. 1 tokens a half;   A_ij = sum_k (q_ik e^{M_ik}) (k_jk e^{-M_jk}),   M the sum of gates from the middle of the
    block in which i is in the later and j in the earlier half

One warpgroup a program, one tile in flight: this is for gates that are rare. A program whose fast form held ends at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.tiles import BY_ROW, LOG2E, C, by_row, product, read, tiled, transposed, zeros

BF16 = jnp.bfloat16


def exact_walk(w, table, far, far_chunk, q, a, b, g, scale, start, o, states, last, log):
    """Writes o, states, last and log, references to what `key_walk` returned, where far [E, H] is not 0.

    far_chunk [B, chunks, H]: `far` of `Walked`, read where states are written.
    """
    E, blocks = table.shape[0], w.V // 64
    H, K = w.H, w.K
    ha, hb, hq = (H // x.shape[2] for x in (a, b, q))
    parts = [pl.ds(part, 64) for part in range(0, K, 64)]

    def body(
        table_g, far_g, far_chunk_g, q_g, a_g, b_g, g_g, scale_g, start_g, o_g, states_g, last_g, log_g, _,
        q_s, a_s, b_s, g_s, S_s, S16_s, x_s, y_s, matrix_s, halves_s, given,
    ):  # fmt: skip
        program = lax.axis_index("program")
        block, h, e = program % blocks, program // blocks % H, program // (blocks * H)
        batch, first, count, n = (table_g[e, i] for i in range(4))
        mine = pl.ds(block * 64, 64)

        def chunk(step):
            return first + (count - 1 - step if w.descending else step)

        def tokens(x, group, step, *columns):
            return x.at[(batch, pl.ds(chunk(step) * C, C), h // group, *columns)]

        @pl.when(far_g[e, h] > 0)
        def _():
            i, j = tiles.walking(w.reverse)
            factor = scale_g[n]

            def state(part):
                return plgpu.load(S_s.at[part], layout=tiles.WGMMA, optimized=False)

            def summing(matrix):
                """Until further notice `factors` are the decays over the gates that the matrix sums."""
                matrix_s[...] = matrix
                plgpu.commit_smem()

            def factors(part):
                """[C, 64 of K]"""
                sums = product((C, 64), *((matrix_s, g_s.at[term, :, part]) for term in range(w.terms)))
                return jnp.exp2(sums * LOG2E)

            def halves_of(part):
                """The sums of a chunk's gates before its middle and behind, [64 of K]."""
                of = [transposed(g_s.at[term, :, part]) for term in range(w.terms)]
                sums = product((64, 8), *((g, tiles.by_halves(halves_s)) for g in of))
                return [tiles.column_of(sums, side) for side in (0, 1)]

            def level(number, A):
                pairs, matrix = tiles.halving(number, w.reverse)
                summing(matrix)
                for part in parts:
                    f = factors(part)
                    x_s[...] = (read(q_s.at[:, part]) * f).astype(BF16)
                    y_s[...] = (read(a_s.at[:, part]) * f).astype(BF16)
                    plgpu.commit_smem()
                    scores = product((C, C), (x_s, transposed(y_s)))
                    plgpu.commit_smem()  # all have read what the next part overwrites
                    A = A + jnp.where(pairs, scores, 0.0)
                return A

            def walk(step, logs):
                for term in range(w.terms):
                    plgpu.copy_gmem_to_smem(tokens(g_g.at[term], 1, step), g_s.at[term], given)
                plgpu.copy_gmem_to_smem(tokens(a_g, ha, step), a_s, given)
                plgpu.copy_gmem_to_smem(tokens(b_g, hb, step, mine), b_s, given)
                if w.outputs:
                    plgpu.copy_gmem_to_smem(tokens(q_g, hq, step), q_s, given)
                plgpu.barrier_wait(given)
                for part in parts:
                    if w.terms == 1:  # sums of terms are cut already
                        g_s[0, :, part] = jnp.maximum(read(g_s.at[0, :, part]), tiles.LOG_OF_ZERO).astype(BF16)
                    S16_s[part] = state(part).astype(BF16)
                plgpu.commit_smem()
                if w.outputs:
                    A = jnp.where(i == j, product((C, C), (q_s, transposed(a_s))), 0.0)
                    A = lax.fori_loop(0, C.bit_length() - 1, level, A)
                    y_s[...] = A.astype(BF16)
                    summing(tiles.indicator(j <= i))
                    o = product((C, 64), (y_s, b_s))
                    for part in parts:
                        x_s[...] = (read(q_s.at[:, part]) * factors(part)).astype(BF16)
                        plgpu.commit_smem()
                        o = tiles.added(o, (x_s, S16_s.at[part]))
                        plgpu.commit_smem()
                    y_s[...] = (o * factor).astype(BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(y_s, tokens(o_g, 1, step, mine))
                if w.states:
                    ahead = jnp.where(far_chunk_g[batch, chunk(step), h] > 0, 0.0, 1.0)
                    for part in parts:
                        first, second = halves_of(part)
                        decay = jnp.exp2((second if w.adjoint else first) * LOG2E * ahead)
                        S16_s[part] = (state(part) * by_row(decay, (64, 64))).astype(BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(S16_s, states_g.at[batch, chunk(step), h, :, mine])
                summing(tiles.indicator(j <= i if w.adjoint else j > i))
                totals = []
                for part in parts:
                    x = read(a_s.at[:, part]) * factors(part)
                    a_s[:, part] = (x * factor if w.adjoint else x).astype(BF16)
                    plgpu.commit_smem()
                    totals.append(sum(halves_of(part)))
                    S = state(part) * by_row(jnp.exp2(totals[-1] * LOG2E), (64, 64))
                    S_s[part] = tiles.added(S, (transposed(a_s.at[:, part]), b_s))
                plgpu.wait_smem_to_gmem(0)  # and until all warps are done with the tiles
                return tuple(log + total for log, total in zip(logs, totals, strict=True))

            for part in parts:
                if w.start:
                    S_s[part] = plgpu.load(start_g.at[e, h, part, mine], layout=tiles.WGMMA, optimized=False)
                else:
                    S_s[part] = zeros((64, 64))
            halves_s[...] = tiles.halves(w.reverse)
            logs = lax.fori_loop(0, count, walk, tuple(zeros((64,), BY_ROW) for _ in parts))
            for part in parts:
                last_g[e, h, part, mine] = state(part)

            @pl.when(block == 0)
            def _():
                for part, log in zip(parts, logs, strict=True):
                    log_g[e, h, part] = log

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(blocks * H * E,),
        grid_names=("program",),
        scratch_types=[
            tiled(C, K) if w.outputs else tiled(C, 64),
            tiled(C, K),
            tiled(C, 64),
            tiled(w.terms, C, K),
            plgpu.SMEM((K, 64), jnp.float32),
            tiled(K, 64),
            tiled(C, 64),
            tiled(C, 64),
            tiled(C, C),
            tiled(C, C),
            plgpu.Barrier(num_arrivals=(3 if w.outputs else 2) + w.terms),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(table, far, far_chunk, q, a, b, g, scale, start, o, states, last, log)
