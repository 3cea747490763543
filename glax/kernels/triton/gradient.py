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
    exp,
    half_sums,
    halving,
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
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """before, behind [chunks, H, K, V]: S and dS. dq, dk [rows, H, K], dv [rows, H, V]. dscale [chunks, H].
    dg: [rows, H, K]; [rows, H]; or for constant gates the chunk's sum, [chunks, H]. Columns of v are read BV at a time.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    ck = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    factor = tl.load(scale + n).to(tl.float32)
    slot = e.to(tl.int64) * H + h
    # [C, BK]
    tq = load_tile(at(q, origin, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
    tk = load_tile(at(k, origin, hk, HK, K), tokens, ck, count, HK, K, SIGN)
    own = tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1) * factor  # [C]
    # What q, k and their gradients are multiplied by: within the chunk, and on the way to and from its ends.
    if FORM == "key":
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        M = sums(middle_matrix(tokens, C), gates)
        fast = tl.max(tl.abs(M)) <= FAST_LIMIT
        if fast:
            up, down = exp(M), exp(-M)
            P = tl.where(i > j, dot(tq * (up * factor), tl.trans(tk * down), SCORES, PRECISION), 0.0)
            enter, leave = half_sums(gates, tokens, C)
            enter, leave = exp(enter), exp(leave)
        else:
            P = tl.zeros([C, C], tl.float32)
            for level in range(0, levels(C)):
                pairs, matrix = halving(tokens, (C // 2) >> level)
                way = exp(sums(matrix, gates))
                P += tl.where(pairs, dot(tq * (way * factor), tl.trans(tk * way), SCORES, PRECISION), 0.0)
            up = exp(sums(tl.where(j <= i, 1.0, 0.0), gates))
            down = exp(sums(tl.where(j > i, 1.0, 0.0), gates))
            enter = tl.full([BK], 1.0, tl.float32)
            leave = tl.full([BK], 1.0, tl.float32)
        last = exp(tl.sum(gates.to(tl.float32), 0))
        out = tk * down
    elif FORM == "none":
        P = tl.where(i > j, dot(tq, tl.trans(tk), DTYPE, PRECISION) * factor, 0.0)
        out = tk
    else:
        gates = load_head_gates(g, origin, h, n, tokens, count, H, FORM, SIGN)
        G = tl.sum(tl.where(j <= i, gates[None, :], 0.0), 1)
        G_row = tl.sum(tl.where(i <= j, gates[:, None], 0.0), 0)
        decay = exp(tl.where(i > j, G[:, None] - G_row[None, :], float("-inf")))
        P = dot(tq, tl.trans(tk), DTYPE, PRECISION) * decay * factor
        up = exp(G)[:, None]
        down = exp(tl.sum(tl.where(j > i, gates[None, :], 0.0), 1))[:, None]
        last = exp(tl.sum(gates, 0))
        out = tk * down
    dP = tl.zeros([C, C], tl.float32)
    d_own = tl.zeros([C], tl.float32)
    read = tl.zeros([C, BK], tl.float32)  # dq and dk through the states
    fed = tl.zeros([C, BK], tl.float32)
    edge = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        cv = v0 + tl.arange(0, BV)
        # [C, BV], [C, BV], [BK, BV], [BK, BV]
        tv = load_tile(at(v, origin, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
        written = tl.where(count > 0, V, 0)  # no state belongs to padding
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        dP += dot(tdo, tl.trans(tv), DTYPE, PRECISION)
        d_own += tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
        read += dot(tdo, tl.trans(S), DTYPE, PRECISION)
        fed += dot(tv, tl.trans(dS), DTYPE, PRECISION)
        edge += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        tdv = dot(tl.trans(P), tdo, SCORES, PRECISION) + own[:, None] * tdo
        if FORM == "key":
            tdv += dot(out, dS.to(tl.float32) * leave[:, None], DTYPE, PRECISION)
        else:
            tdv += dot(out, dS, DTYPE, PRECISION)
        store_tile(at(dv, origin, h, H, V), tdv, tokens, cv, length, H, V, SIGN)
    if FORM == "key":
        read = read * up * enter[None, :]
        fed = fed * down * leave[None, :]
        if fast:
            dP = tl.where(i > j, dP, 0.0)
            pull = dot(dP, tk * down, SCORES, PRECISION) * up
            push = dot(tl.trans(dP), tq * (up * factor), SCORES, PRECISION) * down
        else:
            pull = tl.zeros([C, BK], tl.float32)
            push = tl.zeros([C, BK], tl.float32)
            for level in range(0, levels(C)):
                pairs, matrix = halving(tokens, (C // 2) >> level)
                way = exp(sums(matrix, gates))
                pulled = tl.where(pairs, dP, 0.0)
                pull += dot(pulled, tk * way, SCORES, PRECISION) * way
                push += dot(tl.trans(pulled), tq * (way * factor), SCORES, PRECISION) * way
    else:
        dP = dP * decay if FORM != "none" else tl.where(i > j, dP, 0.0)
        if FORM != "none":
            read, fed = read * up, fed * down
        pull = dot(dP, tk, DTYPE, PRECISION)
        push = dot(tl.trans(dP), tq, DTYPE, PRECISION) * factor
    if FORM != "none":
        # [C, BK]: what stands behind a gate, and what before it
        later = tq * ((read + pull) * factor) - tk * push
        earlier = tk * fed
    read += pull + d_own[:, None] * tk
    tl.store(dscale + slot, tl.sum(tl.sum(tq * read, 1), 0))
    store_tile(at(dq, origin, h, H, K), read * factor, tokens, ck, length, H, K, SIGN)
    store_tile(at(dk, origin, h, H, K), fed + push + (d_own * factor)[:, None] * tq, tokens, ck, length, H, K, SIGN)
    if FORM == "key":
        tdg = sums_of_terms(tl.where(j >= i, 1.0, 0.0), later, PRECISION)
        tdg += sums_of_terms(tl.where(j < i, 1.0, 0.0), earlier, PRECISION) + (edge * last)[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
    elif FORM != "none":
        later, earlier = tl.sum(later, 1), tl.sum(earlier, 1)
        tdg = tl.sum(tl.where(j >= i, later[None, :], 0.0) + tl.where(j < i, earlier[None, :], 0.0), 1)
        tdg = tl.where(tokens < count, tdg + tl.sum(edge, 0) * last, 0.0)
        if FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            p = dg + origin.to(tl.int64) * H + h
            tl.store(p + (SIGN * H) * tokens, tdg.to(dg.dtype.element_ty), mask=tokens < length)


@triton.jit
def sums_of_terms(matrix, x, PRECISION: tl.constexpr):
    """matrix @ x for a matrix of 0 and 1, in TF32, or as exactly as PRECISION says for float32 inputs."""
    return tl.dot(matrix, x, input_precision="tf32" if PRECISION == "tf32" else "tf32x3")
