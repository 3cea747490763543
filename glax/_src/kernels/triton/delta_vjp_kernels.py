"""Compute the gradient of a chunk of the delta rule. One program has one chunk and one head.

S is the state before the chunk and dS' = dL/dS after it. U and Y are those of `delta_state_kernels`, and D_ij = e^{G_i - G_j}:

    dP_ij = do_i . u_j, j <= i      dL_ij = -y_i . u_j, j < i      the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j D_ij dP_ij k_j)
    de_i  = -e^{G_i} (S y_i) + sum_j D_ij dL_ij k_j                the gradient of e_i = beta_i k_i
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i D_ij (scale dP_ij q_i + dL_ij e_i) + beta_j de_j
    dv_i  = beta_i y_i              dbeta_i = y_i . v_i + k_i . de_i

The sums of k_j over dL and its transpose are one product with a symmetric matrix. The gradient of a log gate sums over all
pairs of tokens that the gate decays, as in `vjp_kernels`, and never over more than a chunk.
"""

from glax._src.kernels.triton.delta_score_kernels import load_rows
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    at,
    dot,
    exp,
    load_head_sums,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    runtime_bound,
    store_tile,
)


@triton.jit
def delta_gradient(
    q, k, v, beta, g, do, scores, written, d_written, scale, states, d_states, table, dq, dk, dv, dbeta, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk [rows, H, K], dv [rows, H, V], dbeta [rows, H], dscale [chunks, H] and dg of a chunk.

    dg: [rows, H] for head gates, and the chunk's sum [chunks, H] for constant gates. BV holds all of V; each iteration takes BK
    rows of the states. g: the cumulative sums G of head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    hq, hk = h // (D.H // D.HQ), h // (D.H // D.HK)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    U = load_tokens(written, origin, h, D.H, D.V, tokens, cv, count, D)
    Y = load_tokens(d_written, origin, h, D.H, D.V, tokens, cv, count, D)
    tbeta = load_rows(beta, origin, h, tokens, count, D)
    store_tile(at(dv, origin, h, D.H, D.V), Y.to(tl.float32) * tbeta[:, None], tokens, cv, length, D.H, D.V, D.SIGN)
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdbeta = tl.sum(Y.to(tl.float32) * tv.to(tl.float32), 1)
    # [C, C]
    dP = dot(tdo, tl.trans(U), D)
    P = load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D)
    pairs = P.to(tl.float32) * dP
    d_scale = tl.sum(tl.sum(pairs, 1), 0)
    if D.FORM == "none":
        decay = tl.where(i >= j, 1.0, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        decay = exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        up, down = exp(G)[:, None], exp(last - G)[:, None]
    dP = (dP * decay).to(D.DTYPE)
    dL = tl.where(i > j, dot(Y, tl.trans(U), D) * -decay, 0.0)
    products = tl.zeros([D.C, D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        tk = load_tile(at(k, origin, hk, D.HK, D.K), tokens, k0 + tl.arange(0, D.BK), count, D.HK, D.K, D.SIGN)
        products += dot(tk, tl.trans(tk), D)
    products *= dL
    tdbeta += tl.sum(products, 1)
    pairs = tl.where(i > j, pairs * factor + products * tbeta[:, None], 0.0)
    # [C]: of each pair of tokens, those that the gate of the later token's step decays
    within = tl.sum(pairs, 1) - column_sums(pairs, D.C)
    dL = (dL * tbeta[:, None]).to(D.DTYPE)
    symmetric = dL + tl.trans(dL)
    dPt = tl.trans(dP)
    through_start, through_end = tl.zeros([D.C], tl.float32), tl.zeros([D.C], tl.float32)
    erased = tl.zeros([D.C], tl.float32)
    state_products = tl.zeros([D.BK], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tile(at(q, origin, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, origin, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # [C, BK]
        tdq = dot(tdo, S, D)
        tde = -dot(Y, S, D)
        tdk = dot(U, dS, D)
        if D.FORM != "none":
            tdq, tde, tdk = tdq * up, tde * up, tdk * down
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        through_start += tl.sum(tq * tdq, 1)
        erased += tl.sum(tk * tde, 1)
        through_end += tl.sum(tk * tdk, 1)
        tdq += dot(dP, tk, D)
        tdk += tde * tbeta[:, None] + dot(symmetric, tk, D)
        tdk += dot(dPt, tq, D) * factor
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    slot = e.to(tl.int64) * D.H + h
    tl.store(dscale + slot, d_scale + tl.sum(through_start, 0))
    row = origin.to(tl.int64) * D.H + h
    store_rows(dbeta + row, tdbeta + erased, tokens, length, D)
    if D.FORM != "none":
        total = exp(load_head_sums(g, origin, h, n, D.C - 1, count, D))
        # Of the gate of token t: the terms of S with tokens from t on, and the terms of dS with tokens before t.
        reaching = through_start * factor + erased * tbeta + within
        tdg = tl.sum(tl.where(j >= i, reaching[None, :], 0.0), 1) + tl.sum(
            tl.where(j < i, through_end[None, :], 0.0), 1
        )
        tdg = tl.where(tokens < count, tdg + tl.sum(state_products, 0) * total, 0.0)
        if D.FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            store_rows(dg + row, tdg, tokens, length, D)


@triton.jit
def column_sums(x, C: tl.constexpr):
    """Return the sums of the columns of x [C, C], in the layout of the sums of its rows."""
    return tl.sum(tl.trans(x), 1)


@triton.jit
def store_rows(x, value, tokens, count, D: tl.constexpr):
    """Store one value for each token of a chunk, [C], at x, the address of its first token."""
    tl.store(x + (D.SIGN * D.H) * tokens, value.to(x.dtype.element_ty), mask=tokens < count)
