"""What chunks with key gates need of q, k and the gates alone, every chunk and head in a program of its own.

With G_i the sum of log gates of a chunk through token i, in all of it G_last:

    reads_i = q_i e^{G_i}      adds_j = k_j e^{G_last - G_j}      scores_ij = sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i

No exponent of the first two is positive. The scores take one product where the gates allow it, of q e^M and k e^-M, M the sum of
the gates from the chunk's middle; where that reaches too far, `exact_scores` forms them again.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    add_fine_dot,
    at,
    exp,
    halving,
    kept_loop,
    levels,
    load_key_gates,
    load_tile,
    looked_at,
    middle_matrix,
    store_tile,
    sums,
)


@triton.jit
def prepare(
    q, k, g, table, reads, adds, scores, last, reach,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """reads, adds [rows, H, K]; scores [chunks, H, C, C]; last [chunks, H, 2, K]: G_last, and the first half's sum.

    reach [chunks, H]: the largest |M| or |L| of `common.limits`; the first token's gate shows in L alone. Sums come
    out of products in the layout that they are needed in, and two of their rows are `last`: nothing is reduced.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, count = tl.load(entry), tl.load(entry + 2)
    slot = e.to(tl.int64) * H + h
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    A = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    far = tl.zeros([C], tl.float32)
    ends = last + slot * 2 * K + tl.where(i == C - 1, 0, K)
    for k0 in range(0, kept_loop(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        M = sums(middle_matrix(tokens, C), gates)
        binary = M * LOG2E
        x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
        own += tl.sum(x * y, 1)
        A = add_fine_dot(A, x, y, DTYPE, PRECISION)
        G = sums(tl.where(j <= i, 1.0, 0.0), gates)
        far = tl.maximum(far, tl.max(tl.maximum(tl.abs(M), tl.abs(G - M)), 1))
        tl.store(ends + ck[None, :], G, mask=((i == C - 1) | (i == C // 2 - 1)) & (ck < K)[None, :])
        store_tile(at(reads, origin, h, H, K), tq * exp(G), tokens, ck, count, H, K, SIGN)
        rest = sums(tl.where(j > i, 1.0, 0.0), gates)
        store_tile(at(adds, origin, h, H, K), tk * exp(rest), tokens, ck, count, H, K, SIGN)
    A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
    tl.store(scores + slot * C * C + i * C + j, A.to(scores.dtype.element_ty))
    tl.store(reach + slot, tl.max(far, 0))


@triton.jit
def exact_scores(
    q, k, g, table, reach, pairs, scores,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The scores of chunks whose gates are too strong for `prepare`, in their memory: log2(C) products, each with a reference
    between its tokens. A program looks at EACH of the `pairs` of a chunk and a head.
    """
    count_of_pairs = tl.load(pairs)
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    for each in range(0, looked_at(reach, count_of_pairs, EACH)):
        pair = tl.program_id(0) * EACH + each
        if tl.load(reach + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % H, pair // H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            A = tl.zeros([C, C], tl.float32)
            own = tl.zeros([C], tl.float32)
            for k0 in range(0, kept_loop(K, count), BK):
                ck = k0 + tl.arange(0, BK)
                gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
                tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
                tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
                own += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
                for level in range(0, kept_loop(levels(C), count)):
                    mask, matrix = halving(tokens, (C // 2) >> level)
                    way = exp(sums(matrix, gates))
                    pairs_of_level = add_fine_dot(tl.zeros([C, C], tl.float32), tq * way, tk * way, DTYPE, PRECISION)
                    A += tl.where(mask, pairs_of_level, 0.0)
            A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
            tl.store(scores + (e.to(tl.int64) * H + h) * C * C + i * C + j, A.to(scores.dtype.element_ty))


@triton.jit
def exact_scores_passed_scores(
    q, k, g, table, reach, pairs, scores, scores_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """`exact_scores` for jax-triton 0.3, which hands over what is updated as an output, too."""
    exact_scores(
        q, k, g, table, reach, pairs, scores,
        H, HQ, HK, K, C, BK, SIGN, DTYPE, PRECISION, EACH,
    )  # fmt: skip
