"""Scale q and k of chunks with per-key gates, and compute their scores. One program has one chunk and one head.

G_i is the sum of the log gates of a chunk through token i, and G_last is that sum over the whole chunk:

    q_scaled_i = q_i e^{G_i}
    k_scaled_j = k_j e^{G_last - G_j}
    scores_ij  = sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i

No exponent of the first two is positive. M is the sum of the gates from the chunk's middle. Where |M| is in range, the scores
are one product of q e^M and k e^-M. Where it is out of range, `exact_scores` computes them again.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    add_fine_dot,
    at,
    exp,
    halving,
    load_key_gates,
    load_tile,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)


@triton.jit
def add_scores(
    A, diagonal, row_max, tq, tk, gates, tokens, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Return A + (tq e^M) (tk e^-M)^T [C, C], `diagonal` plus the diagonal of that product [C], and the larger of row_max and the
    largest |M| of every row [C]. tq, tk, gates: [C, BK]. M is summed from the middle of the chunk.
    """
    M = whole_gate_sums(middle_matrix(tokens, C), gates)
    row_max = tl.maximum(row_max, tl.max(tl.abs(M), 1))
    binary = M * LOG2E
    x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
    diagonal += tl.sum(x * y, 1)
    return add_fine_dot(A, x, y, DTYPE, PRECISION), diagonal, row_max


@triton.jit
def scale_operands(
    q, k, g, table, q_scaled, k_scaled, scores, last, max_abs_cumsum,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scaled operands q_scaled, k_scaled [rows, H, K], the scores [chunks, H, C, C], and the sums of gates.

    last [chunks, H, 2, K]: G_last, and the sum L over the first half of the chunk. max_abs_cumsum [chunks, H]: the largest
    |M| or |L| (`common.limits`); the gate of the first token is in L only. The sums are matrix products, whose results have
    the layout that is needed. Two of their rows are `last`, so no reduction is needed.

    The scores are formed behind the other sums of gates, where the terms of the gates no longer take registers. In chunks of 16
    they are formed before one of these sums: Triton computes all rows in every warp where the loop's last product is [16, 16].
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, count = tl.load(entry), tl.load(entry + 2)
    pair_index = e.to(tl.int64) * H + h
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    A = tl.zeros([C, C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    row_max = tl.zeros([C], tl.float32)
    ends = last + pair_index * 2 * K + tl.where(i == C - 1, 0, K)
    for k0 in range(0, runtime_bound(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        suffix = whole_gate_sums(tl.where(j > i, 1.0, 0.0), gates)
        store_tile(at(k_scaled, origin, h, H, K), tk * exp(suffix), tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        if C == 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, C, DTYPE, PRECISION)
        G = whole_gate_sums(tl.where(j <= i, 1.0, 0.0), gates)
        row_max = tl.maximum(row_max, tl.max(tl.where(i == C // 2 - 1, tl.abs(G), 0.0), 1))
        store_tile(at(q_scaled, origin, h, H, K), tq * exp(G), tokens, ck, count, H, K, SIGN)
        if C > 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, C, DTYPE, PRECISION)
        tl.store(ends + ck[None, :], G, mask=((i == C - 1) | (i == C // 2 - 1)) & (ck < K)[None, :])
    A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(scores + pair_index * C * C + i * C + j, A.to(scores.dtype.element_ty))
    tl.store(max_abs_cumsum + pair_index, tl.max(row_max, 0))


@triton.jit
def exact_scores(
    q, k, g, table, max_abs_cumsum, pairs, scores,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Overwrite the scores of chunks whose gates are out of range for `scale_operands`.

    The scores are log2(C) products, each with a reference between its tokens. `pairs` holds the number of (chunk, head)
    pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, PAIRS)):
        pair = tl.program_id(0) * PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % H, pair // H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            A = tl.zeros([C, C], tl.float32)
            diagonal = tl.zeros([C], tl.float32)
            for k0 in range(0, runtime_bound(K, count), BK):
                ck = k0 + tl.arange(0, BK)
                gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
                tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
                tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
                diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
                for level in range(0, runtime_bound(num_halvings(C), count)):
                    mask, matrix = halving(tokens, (C // 2) >> level)
                    decay = exp(whole_gate_sums(matrix, gates))
                    pairs_of_level = add_fine_dot(
                        tl.zeros([C, C], tl.float32), tq * decay, tk * decay, DTYPE, PRECISION
                    )
                    A += tl.where(mask, pairs_of_level, 0.0)
            A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
            tl.store(scores + (e.to(tl.int64) * H + h) * C * C + i * C + j, A.to(scores.dtype.element_ty))


@triton.jit
def exact_scores_passed_scores(
    q, k, g, table, max_abs_cumsum, pairs, scores, scores_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Run `exact_scores` for jax-triton 0.3, which passes an updated operand a second time, as an output."""
    exact_scores(
        q, k, g, table, max_abs_cumsum, pairs, scores,
        H, HQ, HK, K, C, BK, SIGN, DTYPE, PRECISION, PAIRS,
    )  # fmt: skip
