"""Scan a segment of a sequence and write its outputs. The state stays on chip.

G_i is the sum of the log decays of a chunk through its token i, and G_last is that sum over the whole chunk:

    S_out = e^{G_last} S_in + sum_j (k_j e^{G_last - G_j}) v_j^T
    o_i   = (q_i e^{G_i})^T S_in + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j

One program has one segment, one head, and a block of the state's columns.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    at,
    dot,
    exp,
    load_head_sums,
    load_key_sums,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    place_of,
    store_state,
    store_tile,
)


@triton.jit
def outputs(q, k, v, g, scores, scale, start, table, o, final, D: tl.constexpr):
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0). g: the cumulative sums G of head
    gates. With key gates, q, k, scores and g are `q_scaled`, `k_scaled`, `scores` and `last` of `scale_operands`.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV)
    factor = tl.load(scale + n).to(tl.float32)
    if D.START == 1:
        limit = tl.where((filled > 0) | (edges != 0), D.V, 0)  # padding has no state
        S = load_state(start, e, h, ck, cv, limit, D.H, D.K, D.V).to(tl.float32)
    elif D.START == 2:
        S = load_state(start, n, h, ck, cv, D.V, D.H, D.K, D.V).to(tl.float32)
    else:
        S = tl.zeros([D.BK, D.BV], tl.float32)
    if D.FORM == "key":
        S = key_scan(q, k, v, g, scores, o, factor, cv, S, h, chunk, origin, length, filled, D)
    else:
        S = head_scan(q, k, v, g, o, factor, cv, S, h, n, origin, length, filled, D)
    if (edges & 2) != 0:
        store_state(final, S, n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def key_scan(q_scaled, k_scaled, v, last, scores, o, factor, cv, S, h, chunk, origin, length, filled, D: tl.constexpr):
    """Scan a segment with per-key gates. Scaled operands go from memory to the tensor cores unchanged."""
    ck, tokens = tl.arange(0, D.BK), tl.arange(0, D.C)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_key_sums(last, chunk, h, ck, filled, D)
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        # [C, BK]
        tq = load_tokens(q_scaled, first, h, D.H, D.K, tokens, ck, count, D)
        tk = load_tokens(k_scaled, first, h, D.H, D.K, tokens, ck, count, D)
        # [C, BV]
        tv = load_tokens(v, first, h, D.HV, D.V, tokens, cv, count, D)
        # [C, C]
        A = load_pairs(scores, (chunk + c).to(tl.int64) * D.H + h, tokens, count, D)
        out = dot(tq, S, D)
        S = S * exp(total)[:, None] + dot(tl.trans(tk), tv, D)
        total = load_key_sums(last, chunk + c + 1, h, ck, count - D.C, D)
        out = tl.dot(A.to(D.DTYPE), tv.to(D.DTYPE), out, input_precision=D.PRECISION) * factor
        store_tile(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    return S


@triton.jit
def head_scan(q, k, v, g, o, factor, cv, S, h, n, origin, length, filled, D: tl.constexpr):
    """Scan a segment with per-head, constant or no gates. q and k go to the tensor cores unchanged."""
    ck, tokens = tl.arange(0, D.BK), tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (D.H // D.HQ), h // (D.H // D.HK), h // (D.H // D.HV)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_head_sums(g, origin, h, n, D.C - 1, filled, D)
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        # [C, BK]
        tq = load_tile(at(q, first, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, first, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        # [C, BV]
        tv = load_tile(at(v, first, hv, D.HV, D.V), tokens, cv, count, D.HV, D.V, D.SIGN)
        # [C, C]
        A = dot(tq, tl.trans(tk), D)
        # [C, BV]
        from_state = dot(tq, S, D)
        if D.FORM == "none":
            A = tl.where(i >= j, A, 0.0)
            S += dot(tl.trans(tk), tv, D)
        else:
            G = load_head_sums(g, first, h, n, tokens, count, D)
            last = load_head_sums(g, first, h, n, tokens * 0 + (D.C - 1), count, D)
            through = exp(total)
            total = load_head_sums(g, first + D.SIGN * D.C, h, n, D.C - 1, count - D.C, D)
            A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
            from_state = from_state * exp(G)[:, None]
            S = S * through + dot(tl.trans(tk), tv * exp(last - G)[:, None], D)
        out = (from_state + dot(A, tv, D)) * factor
        store_tile(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    return S
