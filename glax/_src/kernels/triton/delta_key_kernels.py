"""Form what a chunk of the delta rule with per-key gates needs beside its state. One program has one chunk and one head.

G_i is the sum of the log gates of a chunk through token i, and G_last is that sum over the whole chunk:

    L_ij = beta_i sum_k k_ik k_jk e^{G_ik - G_jk}, j < i      what token i erases of what token j wrote
    P_ij = sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i            the scores
    e^G * Q      e^G * K      e^{G_last - G} * K              the operands of the products with states

M is the sum of the gates from the chunk's middle, with sign -1 before it. E and R are the sums over the first and the second
half. Where all three are in range (`common.limits`), everything is a product of e^M, e^{-M}, e^E and e^R, and both matrices are
one product with k e^{-M}. Elsewhere a second kernel forms everything again, in log2(C) products, each with a reference between
its tokens, so that no exponent is positive.
"""

from glax._src.kernels.triton.delta_inverse import unit_inverse
from glax._src.kernels.triton.delta_score_kernels import load_rows
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    add_fine_dot,
    at,
    exact_factors,
    exp,
    fine_gate_sums,
    halving,
    load_key_gates,
    load_tile,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)


@triton.jit
def delta_key_pairs(
    q, k, beta, g, table, q_read, k_read, k_written, inverse, scores, factors, last, max_abs_cumsum,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scaled operands, T = (I + L)^-1 - I and P of every chunk, and the sums of its gates.

    q_read, k_read, k_written [rows, H, K]: e^G * Q, e^G * K and e^{G_last - G} * K. inverse, scores [chunks, H, C, C]: T and P.
    factors [chunks, H, 3, C]: beta is the last. last [chunks, H, 2, K]: G_last and E. max_abs_cumsum [chunks, H]: the largest of
    |M|, |E| and |R|.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
    pair = e.to(tl.int64) * H + h
    tokens = tl.arange(0, C)
    i = tokens[:, None]
    # [C, C]
    L, P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    row_max, column_max = tl.zeros([C], tl.float32), tl.zeros([BK], tl.float32)
    for k0 in range(0, runtime_bound(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        M = fine_gate_sums(middle_matrix(tokens, C), gates, DTYPE)
        # [BK]
        enter = tl.sum(tl.where(i < C // 2, gates, 0.0).to(tl.float32), 0)
        leave = tl.sum(tl.where(i >= C // 2, gates, 0.0).to(tl.float32), 0)
        row_max = tl.maximum(row_max, tl.max(tl.abs(M), 1))
        column_max = tl.maximum(column_max, tl.maximum(tl.abs(enter), tl.abs(leave)))
        sums = last + pair * 2 * K + ck
        tl.store(sums, enter + leave, mask=ck < K)
        tl.store(sums + K, enter, mask=ck < K)
        # [C, BK]
        up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
        xq, xk, y = tq * up, tk * up, tk * down
        L = add_fine_dot(L, xk, y, DTYPE, PRECISION)
        P = add_fine_dot(P, xq, y, DTYPE, PRECISION)
        if tl.bfloat16 == DTYPE:
            xq, xk, y = xq * exp(enter)[None, :], xk * exp(enter)[None, :], y * exp(leave)[None, :]
        else:  # e^{R - M_j} of large R and M_j has not all digits of float32
            from_start, to_end, _ = exact_factors(gates, tokens)
            xq, xk, y = tq * from_start, tk * from_start, tk * to_end
        store_tile(at(q_read, origin, h, H, K), xq, tokens, ck, count, H, K, SIGN)
        store_tile(at(k_read, origin, h, H, K), xk, tokens, ck, count, H, K, SIGN)
        store_tile(at(k_written, origin, h, H, K), y, tokens, ck, count, H, K, SIGN)
    tl.store(max_abs_cumsum + pair, tl.maximum(tl.max(row_max, 0), tl.max(column_max, 0)))
    store_pairs(L, P, beta, inverse, scores, factors, h, e, origin, count, H, C, SIGN)


@triton.jit
def store_pairs(
    L, P, beta, inverse, scores, factors, h, e, origin, count,
    H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Store T, P and beta of a chunk. L, P: [C, C], L without its factor beta, both of any value above their triangles."""
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    pair = e.to(tl.int64) * H + h
    place = pair * C * C + i * C + j
    tl.store(scores + place, tl.where(i >= j, P, 0.0).to(scores.dtype.element_ty))
    tbeta = load_beta(beta, origin, h, tokens, count, H, SIGN)
    tl.store(factors + (pair * 3 + 2) * C + tokens, tbeta)
    T = unit_inverse(tl.where(i > j, L * tbeta[:, None], 0.0), C)
    tl.store(inverse + place, tl.where(i > j, T, 0.0).to(inverse.dtype.element_ty))


@triton.jit
def load_beta(beta, origin, h, tokens, count, H: tl.constexpr, SIGN: tl.constexpr):
    """Load the beta of a chunk's tokens in float32, [C], with 1e-30 in the place of numbers nearer to 0.

    What such a token writes, 1e-30 of its row, changes no result, and its quotient by beta is that row. The gradient of beta
    reads this quotient.
    """
    x = load_rows(beta, origin, h, tokens, count, H, SIGN)
    return tl.where(tl.abs(x) < 1e-30, 1e-30, x)


@triton.jit
def exact_delta_key_pairs(
    q, k, beta, g, table, max_abs_cumsum, pairs, q_read, k_read, k_written, inverse, scores, factors,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `delta_key_pairs` where gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, PAIRS)):
        pair = tl.program_id(0) * PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % H, pair // H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            L, P = exact_pairs(
                q, k, g, q_read, k_read, k_written, h, origin, count, H, HQ, HK, K, C, BK, SIGN, DTYPE, PRECISION
            )  # fmt: skip
            store_pairs(L, P, beta, inverse, scores, factors, h, e, origin, count, H, C, SIGN)


@triton.jit
def exact_delta_key_pairs_passed_outputs(
    q, k, beta, g, table, max_abs_cumsum, pairs, q_read, k_read, k_written, inverse, scores, factors,
    q_read_again, k_read_again, k_written_again, inverse_again, scores_again, factors_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Run `exact_delta_key_pairs` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_delta_key_pairs(
        q, k, beta, g, table, max_abs_cumsum, pairs, q_read, k_read, k_written, inverse, scores, factors,
        H, HQ, HK, K, C, BK, SIGN, DTYPE, PRECISION, PAIRS,
    )  # fmt: skip


@triton.jit
def exact_pairs(
    q, k, g, q_read, k_read, k_written, h, origin, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the scaled operands of a chunk, and return L without beta and P, [C, C], for gates of any size."""
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    L, P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    for k0 in range(0, runtime_bound(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
        for level in range(0, runtime_bound(num_halvings(C), count)):
            mask, matrix = halving(tokens, (C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, DTYPE))
            none = tl.zeros([C, C], tl.float32)
            L += tl.where(mask, add_fine_dot(none, tk * decay, tk * decay, DTYPE, PRECISION), 0.0)
            P += tl.where(mask, add_fine_dot(none, tq * decay, tk * decay, DTYPE, PRECISION), 0.0)
        up, down, _ = exact_factors(gates, tokens)
        store_tile(at(q_read, origin, h, H, K), tq * up, tokens, ck, count, H, K, SIGN)
        store_tile(at(k_read, origin, h, H, K), tk * up, tokens, ck, count, H, K, SIGN)
        store_tile(at(k_written, origin, h, H, K), tk * down, tokens, ck, count, H, K, SIGN)
    return L, tl.where(i == j, diagonal[:, None], P)
