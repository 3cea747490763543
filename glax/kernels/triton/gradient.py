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

from glax.kernels.triton.lang import tl, triton
from glax.kernels.triton.tiles import (
    FAST_LIMIT,
    at,
    dot,
    ends,
    exact_factors,
    exact_scores,
    exp,
    halving,
    kept_loop,
    levels,
    load_head_gates,
    load_key_gates,
    load_state,
    load_tile,
    middle_matrix,
    store_tile,
    sums,
)


@triton.jit
def gradient(
    q, k, v, g, do, scale, before, behind, table, dq, dk, dv, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """before, behind [chunks, H, K, V]: S and dS. dq, dk [rows, H, K], dv [rows, H, V]. dscale [chunks, H].
    dg: [rows, H, K]; [rows, H]; or for constant gates the chunk's sum, [chunks, H]. BV holds all of V; rows of the states
    are taken BK at a time, first for the scores, then for the gradients.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    P, own, reach = scores(q, k, g, origin, length, count, h, H, HQ, HK, K, C, BK, FORM, SIGN, DTYPE, PRECISION, False)
    if (FORM == "key") & (reach > FAST_LIMIT):
        P, own, reach = scores(
            q, k, g, origin, length, count, h, H, HQ, HK, K, C, BK, FORM, SIGN, DTYPE, PRECISION, True
        )
        through_scores(
            q, k, v, g, do, before, behind, dq, dk, dv, dg, dscale, P, own, factor, h, e, n, origin, length, count,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, True,
        )  # fmt: skip
    else:
        through_scores(
            q, k, v, g, do, before, behind, dq, dk, dv, dg, dscale, P, own, factor, h, e, n, origin, length, count,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, False,
        )  # fmt: skip


@triton.jit
def scores(
    q, k, g, origin, length, count, h,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """P [C, C] of all earlier tokens, key gates applied, others not; q_i . k_i [C]; and the largest |M| of the fast form."""
    tokens = tl.arange(0, C)
    P = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    reach = tl.zeros([BK], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        own += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
        if FORM == "key":
            gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
            if EXACT:
                P += exact_scores(tq, tk, gates, tokens, length, C, DTYPE, PRECISION)
            else:
                M = sums(middle_matrix(tokens, C), gates)
                reach = tl.maximum(reach, tl.max(tl.abs(M), 0))
                P += dot(tq * exp(M), tl.trans(tk * exp(-M)), DTYPE, PRECISION)
        else:
            P += dot(tq, tl.trans(tk), DTYPE, PRECISION)
    return tl.where(tokens[:, None] > tokens[None, :], P, 0.0), own, tl.max(reach, 0)


@triton.jit
def through_scores(
    q, k, v, g, do, before, behind, dq, dk, dv, dg, dscale, P, own, factor, h, e, n, origin, length, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk, given its scores.

    The pairs' parts in the gates' gradient, q * pull and k * push, cancel but for the pairs across a gate. So both are formed
    of the same rounded factors, and cancel whatever their rounding was. With one gate a head they are sums of P * dP.
    """
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    written = tl.where(count > 0, V, 0)  # no state belongs to padding
    # [C, BV]
    tv = load_tile(at(v, origin, hv, HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    # [C, C], [C]
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0)
    d_own = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    if FORM == "constant" or FORM == "head":
        gates = load_head_gates(g, origin, h, n, tokens, count, H, FORM, SIGN)
        G = tl.sum(tl.where(j <= i, gates[None, :], 0.0), 1)
        G_row = tl.sum(tl.where(i <= j, gates[:, None], 0.0), 0)
        decay = exp(tl.where(i > j, G[:, None] - G_row[None, :], float("-inf")))
        up = exp(G)[:, None]
        down = exp(tl.sum(tl.where(j > i, gates[None, :], 0.0), 1))[:, None]
        last = exp(tl.sum(gates, 0))
        P, pairs = P * decay, P * decay * dP  # [C, C]
        dP = dP * decay
        behind_gate = (tl.sum(pairs, 1) - tl.sum(pairs, 0)) * factor
        before_gate = tl.zeros([C], tl.float32)
        over_gate = 0.0
    dP = dP.to(DTYPE)
    tdv = dot(tl.trans(P * factor), tdo, DTYPE, PRECISION) + (own * factor)[:, None] * tdo

    d_scale = tl.zeros([C], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK], [C, BK], [BK, BV], [BK, BV]
        tq = load_tile(at(q, origin, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        # dq and dk through the states: read and fed; through the chunk's pairs: pull and push; pairs: q * pull - k * push
        read = dot(tdo, tl.trans(S), DTYPE, PRECISION)
        fed = dot(tv, tl.trans(dS), DTYPE, PRECISION)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if FORM == "key":
            gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
            if EXACT:
                up, down, last = exact_factors(gates, tokens)
                tdv += dot(tk * down, dS, DTYPE, PRECISION)
                pull = tl.zeros([C, BK], tl.float32)
                push = tl.zeros([C, BK], tl.float32)
                pairs = tl.zeros([C, BK], tl.float32)
                for level in range(0, kept_loop(levels(C), length)):
                    mask, matrix = halving(tokens, (C // 2) >> level)
                    way = exp(sums(matrix, gates))
                    pulled = tl.where(mask, dP, 0.0)
                    x, y = (tq * way).to(DTYPE), (tk * way).to(DTYPE)
                    level_pull = dot(pulled, y, DTYPE, PRECISION)
                    level_push = dot(tl.trans(pulled), x, DTYPE, PRECISION)
                    pairs += x * level_pull - y * level_push
                    pull += level_pull * way
                    push += level_push * way
            else:
                M = sums(middle_matrix(tokens, C), gates)
                up, down = exp(M), exp(-M)
                x, y = (tq * up).to(DTYPE), (tk * down).to(DTYPE)
                pull = dot(dP, y, DTYPE, PRECISION)
                push = dot(tl.trans(dP), x, DTYPE, PRECISION)
                pairs = x * pull - y * push
                pull, push = pull * up, push * down
                enter, leave, _ = ends(gates, M, tokens, C)
                last = exp(enter + leave)
                leave = exp(leave)
                tdv += dot(y, dS * leave[:, None], DTYPE, PRECISION)
                up, down = up * exp(enter)[None, :], down * leave[None, :]
            edge = edge * last
            read, fed = read * up, fed * down
        else:
            pull = dot(dP, tk, DTYPE, PRECISION)
            push = dot(tl.trans(dP), tq, DTYPE, PRECISION)
            if FORM == "none":
                tdv += dot(tk, dS, DTYPE, PRECISION)
            else:
                tdv += dot(tk, dS, DTYPE, PRECISION) * down
                read, fed = read * up, fed * down
        if FORM == "key":
            tdg = term_sums(tl.where(j >= i, 1.0, 0.0), (tq * read + pairs) * factor, tdo.dtype == tl.bfloat16)
            tdg += dot(tl.where(j < i, 1.0, 0.0), tk * fed, DTYPE, PRECISION) + edge[None, :]
            store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        elif FORM != "none":
            behind_gate += tl.sum(tq * read, 1) * factor
            before_gate += tl.sum(tk * fed, 1)
            over_gate += tl.sum(edge, 0)
        read += pull + d_own[:, None] * tk
        fed += (push + d_own[:, None] * tq) * factor
        d_scale += tl.sum(tq * read, 1)
        store_tile(at(dq, origin, h, H, K), read * factor, tokens, ck, length, H, K, SIGN)
        store_tile(at(dk, origin, h, H, K), fed, tokens, ck, length, H, K, SIGN)
    store_tile(at(dv, origin, h, H, V), tdv, tokens, cv, length, H, V, SIGN)
    slot = e.to(tl.int64) * H + h
    tl.store(dscale + slot, tl.sum(d_scale, 0))
    if FORM == "constant" or FORM == "head":
        tdg = tl.sum(tl.where(j >= i, behind_gate[None, :], 0.0) + tl.where(j < i, before_gate[None, :], 0.0), 1)
        tdg = tl.where(tokens < count, tdg + over_gate * last, 0.0)
        if FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            p = dg + origin.to(tl.int64) * H + h
            tl.store(p + (SIGN * H) * tokens, tdg.to(dg.dtype.element_ty), mask=tokens < length)


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
