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
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)


@triton.jit
def add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D: tl.constexpr):
    """Return A + (tq e^M) (tk e^-M)^T [C, C], `diagonal` plus the diagonal of that product [C], and the larger of row_max and the
    largest |M| of every row [C]. tq, tk, gates: [C, BK]. M is summed from the middle of the chunk.
    """
    M = whole_gate_sums(middle_matrix(tokens, D.C), gates)
    row_max = tl.maximum(row_max, tl.max(tl.abs(M), 1))
    binary = M * LOG2E
    x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
    diagonal += tl.sum(x * y, 1)
    return add_fine_dot(A, x, y, D), diagonal, row_max


@triton.jit
def scale_operands(q, k, g, table, q_scaled, k_scaled, scores, last, max_abs_cumsum, D: tl.constexpr):
    """Compute the scaled operands q_scaled, k_scaled [rows, H, K], the scores [chunks, H, C, C], and the sums of gates.

    last [chunks, H, 2, K]: G_last, and the sum L over the first half of the chunk. max_abs_cumsum [chunks, H]: the largest
    |M| or |L| (`common.limits`); the gate of the first token is in L only. The sums are matrix products, whose results have
    the layout that is needed. Two of their rows are `last`, so no reduction is needed.

    The scores are formed behind the other sums of gates, where the terms of the gates no longer take registers. In chunks of 16
    they are formed before one of these sums: Triton computes all rows in every warp where the loop's last product is [16, 16].
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    entry = table + e * 6
    origin, count = tl.load(entry), tl.load(entry + 2)
    pair_index = e.to(tl.int64) * D.H + h
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    A = tl.zeros([D.C, D.C], tl.float32)
    diagonal = tl.zeros([D.C], tl.float32)
    row_max = tl.zeros([D.C], tl.float32)
    ends = last + pair_index * 2 * D.K + tl.where(i == D.C - 1, 0, D.K)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        suffix = whole_gate_sums(tl.where(j > i, 1.0, 0.0), gates)
        store_tile(at(k_scaled, origin, h, D.H, D.K), tk * exp(suffix), tokens, ck, count, D.H, D.K, D.SIGN)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        if D.C == 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D)
        G = whole_gate_sums(tl.where(j <= i, 1.0, 0.0), gates)
        row_max = tl.maximum(row_max, tl.max(tl.where(i == D.C // 2 - 1, tl.abs(G), 0.0), 1))
        store_tile(at(q_scaled, origin, h, D.H, D.K), tq * exp(G), tokens, ck, count, D.H, D.K, D.SIGN)
        if D.C > 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D)
        tl.store(ends + ck[None, :], G, mask=((i == D.C - 1) | (i == D.C // 2 - 1)) & (ck < D.K)[None, :])
    A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(scores + pair_index * D.C * D.C + i * D.C + j, A.to(scores.dtype.element_ty))
    tl.store(max_abs_cumsum + pair_index, tl.max(row_max, 0))


@triton.jit
def exact_scores(q, k, g, table, max_abs_cumsum, pairs, scores, D: tl.constexpr):
    """Overwrite the scores of chunks whose gates are out of range for `scale_operands`.

    The scores are log2(C) products, each with a reference between its tokens. `pairs` holds the number of (chunk, head)
    pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % D.H, pair // D.H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            A = tl.zeros([D.C, D.C], tl.float32)
            diagonal = tl.zeros([D.C], tl.float32)
            for k0 in range(0, runtime_bound(D.K, count), D.BK):
                ck = k0 + tl.arange(0, D.BK)
                gates = load_key_gates(g, origin, h, tokens, ck, count, D)
                tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
                tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
                diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
                for level in range(0, runtime_bound(num_halvings(D.C), count)):
                    mask, matrix = halving(tokens, (D.C // 2) >> level)
                    decay = exp(whole_gate_sums(matrix, gates))
                    pairs_of_level = add_fine_dot(tl.zeros([D.C, D.C], tl.float32), tq * decay, tk * decay, D)
                    A += tl.where(mask, pairs_of_level, 0.0)
            A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
            tl.store(scores + (e.to(tl.int64) * D.H + h) * D.C * D.C + i * D.C + j, A.to(scores.dtype.element_ty))


@triton.jit
def exact_scores_passed_scores(q, k, g, table, max_abs_cumsum, pairs, scores, scores_again, D: tl.constexpr):
    """Run `exact_scores` for jax-triton 0.3, which passes an updated operand a second time, as an output."""
    exact_scores(q, k, g, table, max_abs_cumsum, pairs, scores, D)
