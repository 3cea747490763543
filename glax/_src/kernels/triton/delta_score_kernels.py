"""Form what a chunk of the delta rule needs beside its state. One program has one chunk and one head.

G_i is the sum of the log gates of a chunk through token i. Beta forms have e_i = beta_i k_i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}, j < i      what token i erases of what token j wrote
    P_ij = (q_i . k_j) e^{G_i - G_j}, j <= i            the scores

The factor of each pair is the exponential of one difference, so it is exact for all gates. L includes this factor. The inverse
of a matrix without decays may overflow where the decays keep (I + L)^-1 small.
"""

from glax._src.kernels.triton.delta_inverse import unit_inverse
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import at, dot, exp, load_head_sums, load_tile, runtime_bound


@triton.jit
def delta_scores(
    q, k, beta, g, table, inverse, scores, factors,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute T = (I + L)^-1 - I and P of every chunk, inverse and scores [chunks, H, C, C], and the factors of its tokens.

    factors: [chunks, H, 3, C] in float32, e^G, e^{G_last - G} and beta; without gates only beta. g: the cumulative sums G of
    head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, count, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    # [C]
    tbeta = load_rows(beta, origin, h, tokens, count, H, SIGN)
    # [C, C]
    P, L = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for k0 in range(0, runtime_bound(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        L += dot(tk, tl.trans(tk), DTYPE, PRECISION)
        P += dot(tq, tl.trans(tk), DTYPE, PRECISION)
    pair = e.to(tl.int64) * H + h
    row = factors + pair * 3 * C + tokens
    tl.store(row + 2 * C, tbeta)
    if FORM == "none":
        decay = tl.where(i >= j, 1.0, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, H, FORM, SIGN)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
        tl.store(row, exp(G))
        tl.store(row + C, exp(last - G))
        decay = exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
    place = pair * C * C + i * C + j
    tl.store(scores + place, (P * decay).to(scores.dtype.element_ty))
    L = tl.where(i > j, L * decay * tbeta[:, None], 0.0)
    T = tl.where(i > j, unit_inverse(L, C, DTYPE), 0.0)
    tl.store(inverse + place, T.to(inverse.dtype.element_ty))


@triton.jit
def load_rows(x, row, head, tokens, count, H: tl.constexpr, SIGN: tl.constexpr):
    """Load x[row, head] of a chunk's tokens in float32, [C]; tokens from `count` on are 0."""
    p = x + row.to(tl.int64) * H + head
    return tl.load(p + (SIGN * H) * tokens, mask=tokens < count, other=0.0).to(tl.float32)
