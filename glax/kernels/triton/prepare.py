"""What chunks with key gates need of q, k and the gates alone, every chunk and head in a program of its own.

With G_i the sum of log gates of a chunk through token i, in all of it G_last:

    reads_i = q_i e^{G_i}      adds_j = k_j e^{G_last - G_j}      scores_ij = sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i

No exponent of the first two is positive. The scores take one product where the gates allow it, scaled about the chunk's middle;
where that reaches too far, `exact_scores` forms them again.
"""

from glax.kernels.triton.lang import tl, triton
from glax.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    at,
    dot,
    exp,
    halving,
    kept_loop,
    levels,
    load_key_gates,
    load_tile,
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
    """reads, adds [rows, H, K]; scores [chunks, H, C, C]; reach [chunks, H].

    last [chunks, H, 2, K]: G_last, and the sum of the gates of the first half.
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
    for k0 in range(0, kept_loop(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        G = sums(tl.where(j <= i, 1.0, 0.0), gates)
        store_tile(at(reads, origin, h, H, K), tq * exp(G), tokens, ck, count, H, K, SIGN)
        rest = sums(tl.where(j > i, 1.0, 0.0), gates)
        store_tile(at(adds, origin, h, H, K), tk * exp(rest), tokens, ck, count, H, K, SIGN)
        each = gates.to(tl.float32)
        tl.store(last + slot * 2 * K + ck, tl.sum(each, 0), mask=ck < K)
        first = tl.sum(tl.where(i < C // 2, each, 0.0), 0)
        tl.store(last + slot * 2 * K + K + ck, first, mask=ck < K)
        M = sums(middle_matrix(tokens, C), gates)
        far = tl.maximum(far, tl.max(tl.abs(M), 1))
        binary = M * LOG2E
        x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
        own += tl.sum(x * y, 1)
        A += dot(x, tl.trans(y), DTYPE, PRECISION)
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
    for each in range(0, kept_loop(EACH, count_of_pairs)):
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
                    A += tl.where(mask, dot(tq * way, tl.trans(tk * way), DTYPE, PRECISION), 0.0)
            A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
            tl.store(scores + (e.to(tl.int64) * H + h) * C * C + i * C + j, A.to(scores.dtype.element_ty))


@triton.jit
def exact_scores_passed_scores(
    q, k, g, table, reach, pairs, scores, scores_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """`exact_scores` for jax-triton 0.3, which hands over what is updated as an output, too."""
    exact_scores(q, k, g, table, reach, pairs, scores, H, HQ, HK, K, C, BK, SIGN, DTYPE, PRECISION, EACH)
