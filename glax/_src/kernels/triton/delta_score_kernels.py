"""Form what a chunk of the delta rule needs beside its state. One program has one chunk and one head.

G_i is the sum of the log gates of a chunk through token i. Beta forms have e_i = beta_i k_i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}, j < i      what token i erases of what token j wrote
    P_ij = (q_i . k_j) e^{G_i - G_j}, j <= i            the scores

The factor of each pair is the exponential of one difference, so it is exact for all gates. L includes this factor. The inverse
of a matrix without decays may overflow where the decays keep (I + L)^-1 small.
"""

from glax._src.kernels.triton.delta_inverse import unit_inverse
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import dot, exp, load_head_sums, load_tokens, runtime_bound


@triton.jit
def delta_scores(q, k, beta, g, table, inverse, scores, factors, D: tl.constexpr):
    """Compute T = (I + L)^-1 - I and P of every chunk, inverse and scores [chunks, H, C, C], and the factors of its tokens.

    factors: [chunks, H, 3, C] in float32, e^G, e^{G_last - G} and beta; without gates only beta. g: the cumulative sums G of
    head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    entry = table + e * 6
    origin, count, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    # [C]
    tbeta = load_rows(beta, origin, h, tokens, count, D)
    # [C, C]
    P, L = tl.zeros([D.C, D.C], tl.float32), tl.zeros([D.C, D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        L += dot(tk, tl.trans(tk), D)
        P += dot(tq, tl.trans(tk), D)
    pair = e.to(tl.int64) * D.H + h
    row = factors + pair * 3 * D.C + tokens
    tl.store(row + 2 * D.C, tbeta)
    if D.FORM == "none":
        decay = tl.where(i >= j, 1.0, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        tl.store(row, exp(G))
        tl.store(row + D.C, exp(last - G))
        decay = exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
    place = pair * D.C * D.C + i * D.C + j
    tl.store(scores + place, (P * decay).to(scores.dtype.element_ty))
    L = tl.where(i > j, L * decay * tbeta[:, None], 0.0)
    T = tl.where(i > j, unit_inverse(L, D.C, D.DTYPE), 0.0)
    tl.store(inverse + place, T.to(inverse.dtype.element_ty))


@triton.jit
def load_rows(x, row, head, tokens, count, D: tl.constexpr):
    """Load x[row, head] of a chunk's tokens in float32, [C]; tokens from `count` on are 0."""
    p = x + row.to(tl.int64) * D.H + head
    return tl.load(p + (D.SIGN * D.H) * tokens, mask=tokens < count, other=0.0).to(tl.float32)
