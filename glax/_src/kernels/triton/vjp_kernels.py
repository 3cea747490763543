"""Compute the gradient of a chunk from the states at both its ends. One program has one chunk and GROUP heads.

Heads that share a query, key or value are processed by one program in order. It adds their gradients in memory, so that no
array has H heads and the order of the sum is fixed.

S is the state where the chunk begins and dS = dL/dS where it ends. P_ij = sum_k q_ik k_jk e^{G_ik - G_jk} and dP_ij = do_i .
v_j, for j < i:

    dq_i = e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j} + (do_i . v_i) k_i
    dk_j = e^{G_last - G_j} (dS v_j) + sum_i dP_ij q_i e^{G_i - G_j} + (do_j . v_j) q_j
    dv_j = dS^T (k_j e^{G_last - G_j}) + sum_i P_ij do_i + (q_j . k_j) do_j

The gradient of a log gate sums over all pairs of tokens that the gate decays: one token before it and one at or after it.

    dg_t = e^{G_last} sum_v S dS + sum_{s >= t} (q_s (dq_s - own) - k_s (dk_s within)) + sum_{s < t} k_s (dk_s from dS)

"own" is the term of a token with itself, which no gate decays. "within" is the term of the pairs inside the chunk. No term is a
difference of sums over more than a chunk, so mild gates lose no digits beside strong ones, at any T.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    LOG2E,
    at,
    dot,
    exp,
    half_fine_dot,
    load_head_sums,
    load_key_sums,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    middle_matrix,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)


@triton.jit
def gradient(
    q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Compute dq [rows, H // GQ, K], dk [rows, H // GK, K], dv [rows, H // GV, V], dscale [chunks, H] and dg of a chunk.

    states, d_states [chunks, H, K, V]: S and dS. dg: [rows, H, K] for key gates, [rows, H] for head gates, and the chunk's
    sum [chunks, H] for constant gates. BV holds all of V; each iteration takes BK rows of the states. decayed: the
    cumulative sums G of head gates, or `last` of `scale_operands`, as are k_scaled and scores. Where key gates are out of
    range, `exact_gradient` computes dq, dk and dg again; with key gates, GROUP is 1. GQ, GK, GV: how many neighbouring heads
    are summed in dq, dk and dv. Each divides GROUP.
    """
    first, e = tl.program_id(0) % (D.H // D.GROUP) * D.GROUP, tl.program_id(0) // (D.H // D.GROUP)
    if D.GROUP == 1:
        head_gradient(
            q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale, first,
            e, D,
        )  # fmt: skip
    else:
        for member in tl.range(0, runtime_bound(D.GROUP, e), num_stages=1):
            head_gradient(
                q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale,
                first + member, e, D,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def head_gradient(
    q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale, h, e,
    D: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of head h of chunk e, and add it to the sums of the heads that it shares arrays with."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    if D.FORM == "key":
        key_gate_gradient(
            q, k, v, g, decayed, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D,
        )  # fmt: skip
        Pt = tl.trans(load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D))
    else:
        Pt = head_gate_gradient(
            q, k, v, decayed, do, states, d_states, dq, dk, dg, dscale, factor, h, e, n, origin, length, count, D,
        )  # fmt: skip
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    tdv = tl.zeros([D.C, D.BV], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        if D.FORM == "key":
            x = load_tokens(k_scaled, origin, h, D.H, D.K, tokens, ck, count, D)
        else:
            x = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        tdv += dot(x, load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V), D)
    if D.FORM == "head" or D.FORM == "constant":
        G = load_head_sums(decayed, origin, h, n, tokens, count, D)
        last = load_head_sums(decayed, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        tdv *= exp(last - G)[:, None]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    tdv += dot(Pt, tdo, D) * factor
    store_sum(dv, tdv, origin, h, tokens, cv, length, D.V, D.GV, D)


@triton.jit
def key_gate_gradient(
    q, k, v, g, last, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of key gates, [C, K] each, scaled about the chunk's middle.

    In dg, the terms q * dq_pairs and k * dk_pairs cancel except for the pairs across a gate. Both use the same factors, q
    and k scaled to 16 bits, so they cancel however dP was rounded.
    """
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    d_diagonal = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    # [C, C]: dP, and its transpose from a product of its own
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), D), 0.0).to(D.DTYPE)
    dPt = tl.where(i < j, dot(tv, tl.trans(tdo), D), 0.0).to(D.DTYPE)
    d_scale = tl.zeros([D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # Load gates: [C, BK]
        gates = load_tokens(g, origin, h, D.H, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        # [BK]
        both = load_key_sums(last, e, h, ck, count, D)
        enter = load_key_sums(last, e, h, ck, count, D, True)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * exp(both)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        # Scale operands: [C, BK]
        M = whole_gate_sums(middle_matrix(tokens, D.C), gates)
        binary = M * LOG2E
        up, down = tl.exp2(binary), tl.exp2(-binary)
        x, y = tq * up, tk * down
        dq_pairs = half_fine_dot(dP, y, D)
        dk_pairs = half_fine_dot(dPt, x, D)
        # The decays of S and dS, e^{M_i} e^L and e^{-M_j} e^R, are products of factors in range (`common.limits`).
        tdq = dot(tdo, tl.trans(S), D) * (up * exp(enter)[None, :])
        tdk = dot(tv, tl.trans(dS), D) * (down * exp(both - enter)[None, :])
        suffix_terms = (tq * tdq + (x * dq_pairs - y * dk_pairs)) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs * up + d_diagonal[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        tdk += (dk_pairs * down + d_diagonal[:, None] * tq) * factor
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + e.to(tl.int64) * D.H + h, tl.sum(d_scale, 0))


@triton.jit
def head_gate_gradient(
    q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, n, origin, length, count, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk [C, K] and dg [C] for per-head, constant or no gates; return the decayed scores, transposed [C, C]."""
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    # [C, C]: dP, and its transpose from a product of its own
    dP = tl.where(i >= j, dot(tdo, tl.trans(tv), D), 0.0)
    dPt = tl.where(i <= j, dot(tv, tl.trans(tdo), D), 0.0)
    if D.FORM != "none":
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        total = load_head_sums(g, origin, h, n, D.C - 1, count, D)
        dP *= exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        decay = exp(tl.where(i <= j, G[None, :] - G[:, None], float("-inf")))
        dPt *= decay
        up, down = exp(G)[:, None], exp(last - G)[:, None]
    dP, dPt = dP.to(D.DTYPE), dPt.to(D.DTYPE)
    Pt = tl.zeros([D.C, D.C], tl.float32)
    through_start = tl.zeros([D.C], tl.float32)
    through_end = tl.zeros([D.C], tl.float32)
    state_products = tl.zeros([D.BK], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        Pt += dot(tk, tl.trans(tq), D)
        tdq = dot(tdo, tl.trans(S), D)
        tdk = dot(tv, tl.trans(dS), D)
        if D.FORM != "none":
            tdq, tdk = tdq * up, tdk * down
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        through_start += tl.sum(tq * tdq, 1)
        through_end += tl.sum(tk * tdk, 1)
        tdq += dot(dP, tk, D)
        tdk += dot(dPt, tq, D) * factor
        store_sum(dq, tdq * factor, origin, h, tokens, ck, length, D.K, D.GQ, D)
        store_sum(dk, tdk, origin, h, tokens, ck, length, D.K, D.GK, D)
    Pt = tl.where(i <= j, Pt, 0.0)
    dPt = dot(tv, tl.trans(tdo), D)
    if D.FORM != "none":
        Pt = Pt * decay
    slot = e.to(tl.int64) * D.H + h
    pairs = Pt * dPt
    tl.store(dscale + slot, tl.sum(tl.sum(pairs, 1) + through_start, 0))
    if D.FORM != "none":
        pairs = tl.where(i < j, pairs, 0.0)
        # Of the gate of token t: the terms of S with tokens from t on, and the terms of dS with tokens before t.
        reaching = tl.sum(tl.where(j >= i, (through_start * factor)[None, :], 0.0), 1)
        leaving = tl.sum(tl.where(j < i, through_end[None, :], 0.0), 1)
        within = tl.sum(pairs, 0) - tl.sum(pairs, 1)
        within = tl.sum(tl.where(j >= i, (within * factor)[None, :], 0.0), 1)
        tdg = tl.where(tokens < count, reaching + leaving + within + tl.sum(state_products, 0) * exp(total), 0.0)
        if D.FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            p = dg + origin.to(tl.int64) * D.H + h
            tl.store(p + (D.SIGN * D.H) * tokens, tdg.to(dg.dtype.element_ty), mask=tokens < length)
    return Pt


@triton.jit
def store_sum(
    x, value, row, h, tokens, d, count, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Add the gradient of head h to x [rows, H // GROUP, WIDTH]. The first of GROUP heads overwrites what x held."""
    HEADS: tl.constexpr = D.H // GROUP
    p = at(x, row, h // GROUP, HEADS, WIDTH)
    if GROUP > 1:
        value += load_tile(p, tokens, d, tl.where(h % GROUP == 0, 0, count), HEADS, WIDTH, D.SIGN)
    store_tile(p, value, tokens, d, count, HEADS, WIDTH, D.SIGN)


@triton.jit
def term_sums(matrix, x, SPLIT: tl.constexpr):
    """Return matrix @ x for a matrix of 0 and 1 and terms x that cancel.

    x has 16 bits, in two bfloat16 products (SPLIT), or full precision, in three TF32 products.
    """
    if SPLIT:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        matrix = matrix.to(tl.bfloat16)
        return tl.dot(matrix, low, tl.dot(matrix, high))
    else:
        return tl.dot(matrix, x, input_precision="tf32x3")
