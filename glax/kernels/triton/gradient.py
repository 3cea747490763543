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
    at,
    dot,
    exact_scores,
    exp,
    half_sums,
    halving,
    is_fast,
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
    dg: [rows, H, K]; [rows, H]; or for constant gates the chunk's sum, [chunks, H]. BV holds all of V; rows of the states
    are taken BK at a time, first for the scores, then for the gradients.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    written = tl.where(count > 0, V, 0)  # no state belongs to padding
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    factor = tl.load(scale + n).to(tl.float32)
    slot = e.to(tl.int64) * H + h
    if FORM == "constant" or FORM == "head":
        gates = load_head_gates(g, origin, h, n, tokens, count, H, FORM, SIGN)
        G = tl.sum(tl.where(j <= i, gates[None, :], 0.0), 1)
        G_row = tl.sum(tl.where(i <= j, gates[:, None], 0.0), 0)
        decay = exp(tl.where(i > j, G[:, None] - G_row[None, :], float("-inf")))
        up = exp(G)[:, None]
        down = exp(tl.sum(tl.where(j > i, gates[None, :], 0.0), 1))[:, None]
        last = exp(tl.sum(gates, 0))

    P = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=1):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        tq = load_tile(at(q, origin, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        own += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
        if FORM == "key":
            gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
            P += scores(tq, tk, gates, tokens, C, SCORES, PRECISION)
        else:
            P += dot(tq, tl.trans(tk), DTYPE, PRECISION)
    # [C, C], [C]
    P = P * (decay if FORM == "constant" or FORM == "head" else tl.where(i > j, 1.0, 0.0)) * factor
    own = own * factor

    # [C, BV]
    tv = load_tile(at(v, origin, hv, HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0)
    if FORM == "constant" or FORM == "head":
        dP = dP * decay
    d_own = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    tdv = dot(tl.trans(P), tdo, SCORES, PRECISION) + own[:, None] * tdo

    d_scale = tl.zeros([C], tl.float32)
    behind_gate = tl.zeros([C], tl.float32)
    before_gate = tl.zeros([C], tl.float32)
    over_gate = 0.0
    for k0 in tl.range(0, K, BK, num_stages=1):
        ck = k0 + tl.arange(0, BK)
        # [C, BK], [C, BK], [BK, BV], [BK, BV]
        tq = load_tile(at(q, origin, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        # dq and dk through the states, and through the chunk's pairs: read and pull, fed and push
        read = dot(tdo, tl.trans(S), DTYPE, PRECISION)
        fed = dot(tv, tl.trans(dS), DTYPE, PRECISION)
        if FORM == "key":
            gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
            M = sums(middle_matrix(tokens, C), gates)
            if is_fast(M):
                up, down = exp(M), exp(-M)
                pull = dot(dP, tk * down, SCORES, PRECISION) * up
                push = dot(tl.trans(dP), tq * up, SCORES, PRECISION) * down
                enter, leave = half_sums(gates, tokens, C)
                enter, leave = exp(enter), exp(leave)
            else:
                pull = tl.zeros([C, BK], tl.float32)
                push = tl.zeros([C, BK], tl.float32)
                for level in range(0, levels(C)):
                    pairs, matrix = halving(tokens, (C // 2) >> level)
                    way = exp(sums(matrix, gates))
                    pulled = tl.where(pairs, dP, 0.0)
                    pull += dot(pulled, tk * way, SCORES, PRECISION) * way
                    push += dot(tl.trans(pulled), tq * way, SCORES, PRECISION) * way
                up = exp(sums(tl.where(j <= i, 1.0, 0.0), gates))
                down = exp(sums(tl.where(j > i, 1.0, 0.0), gates))
                enter = tl.full([BK], 1.0, tl.float32)
                leave = tl.full([BK], 1.0, tl.float32)
            edge = edge * exp(tl.sum(gates.to(tl.float32), 0))
            read = read * up * enter[None, :]
            fed = fed * down * leave[None, :]
            tdv += dot(tk * down, dS.to(tl.float32) * leave[:, None], DTYPE, PRECISION)
        else:
            if FORM == "none":
                tdv += dot(tk, dS, DTYPE, PRECISION)
            else:
                read, fed = read * up, fed * down
                tdv += dot(tk * down, dS, DTYPE, PRECISION)
            pull = dot(dP, tk, DTYPE, PRECISION)
            push = dot(tl.trans(dP), tq, DTYPE, PRECISION)
        read += pull
        d_scale += tl.sum(tq * (read + d_own[:, None] * tk), 1)
        read = read * factor
        push = push * factor
        later, earlier = tq * read - tk * push, tk * fed  # what stands behind a gate, and what before it
        if FORM == "key":
            tdg = sums_of_terms(tl.where(j >= i, 1.0, 0.0), later, PRECISION)
            tdg += sums_of_terms(tl.where(j < i, 1.0, 0.0), earlier, PRECISION) + edge[None, :]
            store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        elif FORM != "none":
            behind_gate += tl.sum(later, 1)
            before_gate += tl.sum(earlier, 1)
            over_gate += tl.sum(edge, 0)
        store_tile(at(dq, origin, h, H, K), read + (d_own * factor)[:, None] * tk, tokens, ck, length, H, K, SIGN)
        store_tile(at(dk, origin, h, H, K), fed + push + (d_own * factor)[:, None] * tq, tokens, ck, length, H, K, SIGN)
    store_tile(at(dv, origin, h, H, V), tdv, tokens, cv, length, H, V, SIGN)
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
def scores(q, k, gates, tokens, C: tl.constexpr, SCORES: tl.constexpr, PRECISION: tl.constexpr):
    """sum_k q_ik k_jk e^{G_ik - G_jk} for j < i, and 0 elsewhere."""
    M = sums(middle_matrix(tokens, C), gates)
    if is_fast(M):
        P = tl.where(
            tokens[:, None] > tokens[None, :], dot(q * exp(M), tl.trans(k * exp(-M)), SCORES, PRECISION), 0.0
        )
    else:
        P = exact_scores(q, k, gates, tokens, C, SCORES, PRECISION)
    return P


@triton.jit
def sums_of_terms(matrix, x, PRECISION: tl.constexpr):
    """matrix @ x for a matrix of 0 and 1, in TF32, or as exactly as PRECISION says for float32 inputs."""
    return tl.dot(matrix, x, input_precision="tf32" if PRECISION == "tf32" else "tf32x3")
