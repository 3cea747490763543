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
    load_state,
    load_tile,
    store_state,
    store_tile,
)


@triton.jit
def outputs(
    q, k, v, g, scores, scale, start, table, o, final,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0). g: the cumulative sums G of head
    gates. With key gates, q, k, scores and g are `q_scaled`, `k_scaled`, `scores` and `last` of `scale_operands`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    factor = tl.load(scale + n).to(tl.float32)
    if START == 1:
        limit = tl.where((filled > 0) | (edges != 0), V, 0)  # padding has no state
        S = load_state(start, e, h, ck, cv, limit, H, K, V).to(tl.float32)
    elif START == 2:
        S = load_state(start, n, h, ck, cv, V, H, K, V).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    if FORM == "key":
        S = key_scan(
            q, k, v, g, scores, o, factor, cv, S, h, chunk, origin, length, filled,
            H, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        S = head_scan(
            q, k, v, g, o, factor, cv, S, h, n, origin, length, filled,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
    if (edges & 2) != 0:
        store_state(final, S, n, h, ck, cv, H, K, V)


@triton.jit
def key_scan(
    q_scaled, k_scaled, v, last, scores, o, factor, cv, S, h, chunk, origin, length, filled,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan a segment with per-key gates. Scaled operands go from memory to the tensor cores unchanged."""
    ck, tokens = tl.arange(0, BK), tl.arange(0, C)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_key_sums(last, chunk, h, ck, filled, H, K)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        # [C, BK]
        tq = load_tile(at(q_scaled, first, h, H, K), tokens, ck, count, H, K, SIGN)
        tk = load_tile(at(k_scaled, first, h, H, K), tokens, ck, count, H, K, SIGN)
        # [C, BV]
        tv = load_tile(at(v, first, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
        # [C, C]
        A = load_tile(scores + ((chunk + c).to(tl.int64) * H + h) * C * C, tokens, tokens, count, 1, C, 1)
        out = dot(tq, S, DTYPE, PRECISION)
        S = S * exp(total)[:, None] + dot(tl.trans(tk), tv, DTYPE, PRECISION)
        total = load_key_sums(last, chunk + c + 1, h, ck, count - C, H, K)
        out = tl.dot(A.to(DTYPE), tv.to(DTYPE), out, input_precision=PRECISION) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    return S


@triton.jit
def head_scan(
    q, k, v, g, o, factor, cv, S, h, n, origin, length, filled,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan a segment with per-head, constant or no gates. q and k go to the tensor cores unchanged."""
    ck, tokens = tl.arange(0, BK), tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_head_sums(g, origin, h, n, C - 1, filled, H, FORM, SIGN)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        # [C, BK]
        tq = load_tile(at(q, first, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        # [C, BV]
        tv = load_tile(at(v, first, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        # [C, C]
        A = dot(tq, tl.trans(tk), DTYPE, PRECISION)
        # [C, BV]
        from_state = dot(tq, S, DTYPE, PRECISION)
        if FORM == "none":
            A = tl.where(i >= j, A, 0.0)
            S += dot(tl.trans(tk), tv, DTYPE, PRECISION)
        else:
            G = load_head_sums(g, first, h, n, tokens, count, H, FORM, SIGN)
            last = load_head_sums(g, first, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
            through = exp(total)
            total = load_head_sums(g, first + SIGN * C, h, n, C - 1, count - C, H, FORM, SIGN)
            A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
            from_state = from_state * exp(G)[:, None]
            S = S * through + dot(tl.trans(tk), tv * exp(last - G)[:, None], DTYPE, PRECISION)
        out = (from_state + dot(A, tv, DTYPE, PRECISION)) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    return S
