"""The gradient of one chunk from the states at both its ends, every chunk of every head in a program of its own.

With S the state before the chunk, dS = dL/dS behind it, P_ij = sum_k q_ik k_jk e^{G_ik - G_jk} and dP_ij = do_i . v_j, j < i:

    dq_i = e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j} + (do_i . v_i) k_i
    dk_j = e^{G_last - G_j} (dS v_j) + sum_i dP_ij q_i e^{G_i - G_j} + (do_j . v_j) q_j
    dv_j = dS^T (k_j e^{G_last - G_j}) + sum_i P_ij do_i + (q_j . k_j) do_j

The gradient of a log gate, by what decays under it: pairs of a token before and one behind it, wherever they stand.

    dg_t = e^{G_last} sum_v S dS + sum_{s >= t} (q_s (dq_s - own) - k_s (dk_s within)) + sum_{s < t} k_s (dk_s from dS)

where "own" is a token's part with itself, which no gate touches, and "within" the pairs inside the chunk. Nothing is the
difference of sums over more than a chunk, so the digits of mild gates survive beside strong ones, at any T.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    LOG2E,
    at,
    dot,
    exp,
    half_fine_dot,
    kept_loop,
    load_head_sums,
    load_last,
    load_state,
    load_tile,
    middle_matrix,
    store_tile,
    sums,
)


@triton.jit
def gradient(
    q, k, v, g, decayed, adds, scores, do, scale, before, behind, table, dq, dk, dv, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """before, behind [chunks, H, K, V]: S and dS. dq, dk [rows, H, K], dv [rows, H, V]. dscale [chunks, H].
    dg: [rows, H, K]; [rows, H]; or for constant gates the chunk's sum, [chunks, H]. BV holds all of V; rows of the states
    are taken BK at a time. decayed: head gates' sums G; or for key gates `last` of `prepare`, as are adds and scores. Where
    key gates are too strong, `exact_gradient` does the chunk's dq, dk and dg again.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    if FORM == "key":
        fast_keys(
            q, k, v, g, decayed, do, before, behind, dq, dk, dg, dscale, factor, h, e, origin, length, count,
            H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
        Pt = tl.trans(load_tile(scores + (e.to(tl.int64) * H + h) * C * C, tokens, tokens, count, 1, C, 1))
    else:
        Pt = keys(
            q, k, v, decayed, do, before, behind, dq, dk, dg, dscale, factor, h, e, n, origin, length, count,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
    written = tl.where(count > 0, V, 0)  # no state belongs to padding
    tdv = tl.zeros([C, BV], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        if FORM == "key":
            x = load_tile(at(adds, origin, h, H, K), tokens, ck, count, H, K, SIGN)
        else:
            x = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        tdv += dot(x, load_state(behind, e, h, ck, cv, written, H, K, V), DTYPE, PRECISION)
    if FORM == "head" or FORM == "constant":
        G = load_head_sums(decayed, origin, h, n, tokens, count, H, FORM, SIGN)
        last = load_head_sums(decayed, origin, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
        tdv *= exp(last - G)[:, None]
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    tdv += dot(Pt, tdo, DTYPE, PRECISION) * factor
    store_tile(at(dv, origin, h, H, V), tdv, tokens, cv, length, H, V, SIGN)


@triton.jit
def fast_keys(
    q, k, v, g, last, do, before, behind, dq, dk, dg, dscale, factor, h, e, origin, length, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of key gates, scaled about the chunk's middle.

    The pairs' parts in the gates' gradient, q * pull and k * push, cancel but for the pairs across a gate. So both are formed
    of the same factors, scaled q and k to 16 bits, and cancel whatever the rounding of dP was.
    """
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    written = tl.where(count > 0, V, 0)
    # [C, BV]
    tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    d_own = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    # [C, C]: rows of do, and of v
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0).to(DTYPE)
    dPt = tl.where(i < j, dot(tv, tl.trans(tdo), DTYPE, PRECISION), 0.0).to(DTYPE)
    d_scale = tl.zeros([C], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK], [C, BK], [C, BK], [BK, BV], [BK, BV]
        gates = load_tile(at(g, origin, h, H, K), tokens, ck, count, H, K, SIGN)
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        both = load_last(last, e, h, ck, count, H, K)
        enter = load_last(last, e, h, ck, count, H, K, True)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * exp(both)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        M = sums(middle_matrix(tokens, C), gates)
        binary = M * LOG2E
        up, down = tl.exp2(binary), tl.exp2(-binary)
        x, y = tq * up, tk * down
        pull = half_fine_dot(dP, y, DTYPE, PRECISION)
        push = half_fine_dot(dPt, x, DTYPE, PRECISION)
        # e^{M_i} e^L and e^{-M_j} e^R: each factor is in range, and their product is a decay of S or dS (`common.limits`).
        read = dot(tdo, tl.trans(S), DTYPE, PRECISION) * (up * exp(enter)[None, :])
        fed = dot(tv, tl.trans(dS), DTYPE, PRECISION) * (down * exp(both - enter)[None, :])
        from_behind = (tq * read + (x * pull - y * push)) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), from_behind, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * fed, DTYPE, PRECISION) + edge[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        read += pull * up + d_own[:, None] * tk
        d_scale += tl.sum(tq * read, 1)
        store_tile(at(dq, origin, h, H, K), read * factor, tokens, ck, length, H, K, SIGN)
        fed += (push * down + d_own[:, None] * tq) * factor
        store_tile(at(dk, origin, h, H, K), fed, tokens, ck, length, H, K, SIGN)
    tl.store(dscale + e.to(tl.int64) * H + h, tl.sum(d_scale, 0))


@triton.jit
def keys(
    q, k, v, g, do, before, behind, dq, dk, dg, dscale, factor, h, e, n, origin, length, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one gate a head and token, or of none; and the scores, decays applied, transposed."""
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    written = tl.where(count > 0, V, 0)
    # [C, BV]
    tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    # [C, C]: rows of do, and of v
    dP = tl.where(i >= j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0)
    dPt = tl.where(i <= j, dot(tv, tl.trans(tdo), DTYPE, PRECISION), 0.0)
    if FORM != "none":
        G = load_head_sums(g, origin, h, n, tokens, count, H, FORM, SIGN)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
        total = load_head_sums(g, origin, h, n, C - 1, count, H, FORM, SIGN)
        dP *= exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        decay = exp(tl.where(i <= j, G[None, :] - G[:, None], float("-inf")))
        dPt *= decay
        up, down = exp(G)[:, None], exp(last - G)[:, None]
    dP, dPt = dP.to(DTYPE), dPt.to(DTYPE)
    Pt = tl.zeros([C, C], tl.float32)
    through_start = tl.zeros([C], tl.float32)
    through_end = tl.zeros([C], tl.float32)
    over = tl.zeros([BK], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        Pt += dot(tk, tl.trans(tq), DTYPE, PRECISION)
        read = dot(tdo, tl.trans(S), DTYPE, PRECISION)
        fed = dot(tv, tl.trans(dS), DTYPE, PRECISION)
        if FORM != "none":
            read, fed = read * up, fed * down
            over += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        through_start += tl.sum(tq * read, 1)
        through_end += tl.sum(tk * fed, 1)
        read += dot(dP, tk, DTYPE, PRECISION)
        fed += dot(dPt, tq, DTYPE, PRECISION) * factor
        store_tile(at(dq, origin, h, H, K), read * factor, tokens, ck, length, H, K, SIGN)
        store_tile(at(dk, origin, h, H, K), fed, tokens, ck, length, H, K, SIGN)
    Pt = tl.where(i <= j, Pt, 0.0)
    dPt = dot(tv, tl.trans(tdo), DTYPE, PRECISION)
    if FORM != "none":
        Pt = Pt * decay
    slot = e.to(tl.int64) * H + h
    pairs = Pt * dPt
    tl.store(dscale + slot, tl.sum(tl.sum(pairs, 1) + through_start, 0))
    if FORM != "none":
        pairs = tl.where(i < j, pairs, 0.0)
        # of token t: what reaches a token from t on, from the chunk's start; and what leaves it from a token before t
        reaching = tl.sum(tl.where(j >= i, (through_start * factor)[None, :], 0.0), 1)
        leaving = tl.sum(tl.where(j < i, through_end[None, :], 0.0), 1)
        within = tl.sum(pairs, 0) - tl.sum(pairs, 1)
        within = tl.sum(tl.where(j >= i, (within * factor)[None, :], 0.0), 1)
        tdg = tl.where(tokens < count, reaching + leaving + within + tl.sum(over, 0) * exp(total), 0.0)
        if FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            p = dg + origin.to(tl.int64) * H + h
            tl.store(p + (SIGN * H) * tokens, tdg.to(dg.dtype.element_ty), mask=tokens < length)
    return Pt


@triton.jit
def term_sums(matrix, x, SPLIT: tl.constexpr):
    """matrix @ x for a matrix of 0 and 1 and terms that cancel: in two bfloat16 products, 16 bits, or three of TF32."""
    if SPLIT:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        matrix = matrix.to(tl.bfloat16)
        return tl.dot(matrix, low, tl.dot(matrix, high))
    else:
        return tl.dot(matrix, x, input_precision="tf32x3")
