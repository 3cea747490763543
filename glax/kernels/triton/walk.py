"""Kernels that carry a state along a segment of a sequence: the states at its chunks, its outputs, and a scan of segments.

With G_i the sum of log decays of a chunk through its token i, in its first C/2 tokens L, in all of them G_last:

    S_out = e^{G_last} S_in + sum_j (k_j e^{G_last - G_j}) v_j^T
    o_i   = (q_i e^{G_i})^T S_in + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j

One program has one segment, one head, and a block of the state. Segments are made independent in three launches: their
states from zero, a scan over them, their outputs from the right states.
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
    load_head_gates,
    load_key_gates,
    load_state,
    load_tile,
    middle_matrix,
    store_state,
    store_tile,
    sums,
)


@triton.jit
def states(
    a, b, g, scale, start, table, out, edge, total,
    H: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, ADJOINT: tl.constexpr,
    EVERY: tl.constexpr, START: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states of k and v (a, b), or with ADJOINT those of scale * q and do walked backwards, dL/dS:

        dS_in = e^{G_last} dS_out + sum_i (q_i e^{G_i}) do_i^T

    EVERY: out [chunks, H, K, V] takes the state where the walk enters each chunk, edge [N, H, K, V] that at its end.
    Otherwise: out [segments, H, K, V] takes the state at the segment's end, begun from zero, and total [segments, H, K or
    1] its log decay. START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0).
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % (NK * NV), tl.program_id(0) // (NK * NV) % H, tl.program_id(0) // (NK * NV * H)
    row = table + e * 6
    origin, filled, n = tl.load(row), tl.load(row + 2), tl.load(row + 3)
    edges, chunk = tl.load(row + 4), tl.load(row + 5)
    k, v = block // NV * BK + tl.arange(0, BK), block % NV * BV + tl.arange(0, BV)
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    ha, hb = h // (H // HA), h // (H // HB)
    if START == 1:
        S = load_state(start, e, h, k, v, V, H, K, V).to(tl.float32)
    elif START == 2:
        S = load_state(start, n, h, k, v, V, H, K, V).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    log = tl.zeros([BK], tl.float32)
    factor = tl.load(scale + n).to(tl.float32) if ADJOINT else 1.0
    steps = tl.cdiv(filled, C)
    if not EVERY:  # nobody reads what leaves a sequence's last segment (or, against time, its first)
        steps = tl.where((edges & (1 if ADJOINT else 2)) != 0, 0, steps)
    for step in range(0, steps):
        c = steps - 1 - step if ADJOINT else step
        first = origin + SIGN * c * C
        count = filled - c * C
        if EVERY:
            store_state(out, S, chunk + c, h, k, v, H, K, V)
        # [C, BK], [C, BV]
        x = load_tile(at(a, first, ha, HA, K), tokens, k, count, HA, K, SIGN)
        y = load_tile(at(b, first, hb, HB, V), tokens, v, count, HB, V, SIGN)
        if ADJOINT:
            x = x.to(tl.float32) * factor
        if FORM == "key":
            gates = load_key_gates(g, first, h, tokens, k, count, H, K, SIGN)
            between = sums(tl.where(j <= i if ADJOINT else j > i, 1.0, 0.0), gates)
            last = tl.sum(gates.to(tl.float32), 0)
            S = S * exp(last)[:, None] + dot(tl.trans(x * exp(between)), y, DTYPE, PRECISION)
            log += last
        elif FORM == "none":
            S += dot(tl.trans(x), y, DTYPE, PRECISION)
        else:
            gates = load_head_gates(g, first, h, n, tokens, count, H, FORM, SIGN)
            between = tl.sum(tl.where(j <= i if ADJOINT else j > i, gates[None, :], 0.0), 1)
            last = tl.sum(gates, 0)
            S = S * exp(last) + dot(tl.trans(x * exp(between)[:, None]), y, DTYPE, PRECISION)
            log += last
    if EVERY:
        if (filled == 0) & (edges != 0):  # an empty sequence hands its state through
            store_state(out, S, chunk, h, k, v, H, K, V)
        if (edges & (1 if ADJOINT else 2)) != 0:
            store_state(edge, S, n, h, k, v, H, K, V)
    else:
        store_state(out, S, e, h, k, v, H, K, V)
        if FORM == "key":
            tl.store(total + (e.to(tl.int64) * H + h) * K + k, log, mask=k < K)
        elif FORM != "none":
            tl.store(total + e.to(tl.int64) * H + h, tl.max(log, 0))


@triton.jit
def scan(
    local, total, start, begins, out,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORM: tl.constexpr, ADJOINT: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """The state before every segment (behind it with ADJOINT) from the segments' own states and total log decays."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, n = tl.program_id(0) % (NK * NV), tl.program_id(0) // (NK * NV) % H, tl.program_id(0) // (NK * NV * H)
    k, v = block // NV * BK + tl.arange(0, BK), block % NV * BV + tl.arange(0, BV)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    S = load_state(start, n, h, k, v, V, H, K, V).to(tl.float32) if START else tl.zeros([BK, BV], tl.float32)
    for step in range(0, last - first):
        e = last - 1 - step if ADJOINT else first + step
        store_state(out, S, e, h, k, v, H, K, V)
        own = load_state(local, e, h, k, v, V, H, K, V)
        if FORM == "key":
            S = S * exp(tl.load(total + (e.to(tl.int64) * H + h) * K + k, mask=k < K, other=0.0))[:, None] + own
        elif FORM == "none":
            S += own
        else:
            S = S * exp(tl.load(total + e.to(tl.int64) * H + h)) + own


@triton.jit
def output_walk(
    q, k, v, g, start, o, factor, cv,
    h, n, origin, length, filled, edges, e,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The outputs of a segment, and the state behind it; and how far the fast form, where it is used, had to reach."""
    ck, tokens = tl.arange(0, BK), tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    if START == 1:
        written = tl.where((filled > 0) | (edges != 0), V, 0)  # padding has no state
        S = load_state(start, e, h, ck, cv, written, H, K, V).to(tl.float32)
    elif START == 2:
        S = load_state(start, n, h, ck, cv, V, H, K, V).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    reach = tl.zeros([BK], tl.float32)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        # [C, BK], [C, BK], [C, BV]
        tq = load_tile(at(q, first, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        tv = load_tile(at(v, first, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        if FORM == "key":
            gates = load_key_gates(g, first, h, tokens, ck, count, H, K, SIGN)
            own = tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
            if EXACT:
                A = exact_scores(tq, tk, gates, tokens, filled, C, DTYPE, PRECISION)
                up, down, through = exact_factors(gates, tokens)
                read = dot(tq * up, S, DTYPE, PRECISION)
                S = S * through[:, None] + dot(tl.trans(tk * down), tv, DTYPE, PRECISION)
            else:
                M = sums(middle_matrix(tokens, C), gates)
                up, down = (tq * exp(M)).to(DTYPE), (tk * exp(-M)).to(DTYPE)
                A = dot(up, tl.trans(down), DTYPE, PRECISION)
                enter, leave, largest = ends(gates, M, tokens, C)
                reach = tl.maximum(reach, largest)
                S = S * exp(enter)[:, None]
                read = dot(up, S, DTYPE, PRECISION)
                S = (S + dot(tl.trans(down), tv, DTYPE, PRECISION)) * exp(leave)[:, None]
            A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
        elif FORM == "none":
            A = tl.where(i >= j, dot(tq, tl.trans(tk), DTYPE, PRECISION), 0.0)
            read = dot(tq, S, DTYPE, PRECISION)
            S += dot(tl.trans(tk), tv, DTYPE, PRECISION)
        else:
            gates = load_head_gates(g, first, h, n, tokens, count, H, FORM, SIGN)
            G = tl.sum(tl.where(j <= i, gates[None, :], 0.0), 1)
            rest = tl.sum(tl.where(j > i, gates[None, :], 0.0), 1)
            G_row = tl.sum(tl.where(i <= j, gates[:, None], 0.0), 0)
            decay = exp(tl.where(i >= j, G[:, None] - G_row[None, :], float("-inf")))
            A = dot(tq, tl.trans(tk), DTYPE, PRECISION) * decay
            read = dot(tq, S, DTYPE, PRECISION) * exp(G)[:, None]
            S = S * exp(tl.sum(gates, 0)) + dot(tl.trans(tk), tv * exp(rest)[:, None], DTYPE, PRECISION)
        out = (read + dot(A, tv, DTYPE, PRECISION)) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    return S, tl.max(reach, 0)


@triton.jit
def outputs(
    q, k, v, g, scale, start, table, o, final,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a segment for BV columns of v, and the state behind a sequence's last segment.

    START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0). A segment whose gates turn out to
    be too strong for the fast form is walked again in the exact one, 16 tokens at a time: that needs the fewest products.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges = tl.load(entry + 3), tl.load(entry + 4)
    cv = block * BV + tl.arange(0, BV)
    factor = tl.load(scale + n).to(tl.float32)
    S, reach = output_walk(
        q, k, v, g, start, o, factor, cv, h, n, origin, length, filled, edges, e,
        H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, START, DTYPE, PRECISION, False,
    )  # fmt: skip
    if FORM == "key":  # noqa: SIM102 (the compiler knows the form, not the reach)
        if reach > FAST_LIMIT:
            S, reach = output_walk(
                q, k, v, g, start, o, factor, cv, h, n, origin, length, filled, edges, e,
                H, HQ, HK, HV, K, V, 16, BK, BV, FORM, SIGN, START, DTYPE, PRECISION, True,
            )  # fmt: skip
    if (edges & 2) != 0:
        store_state(final, S, n, h, tl.arange(0, BK), cv, H, K, V)


@triton.jit
def sequence_sums(x, begins, out, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr):
    """out[n] = the sum of x [entries, H] over entries begins[n] to begins[n + 1], always in the same order."""
    n, h = tl.program_id(0), tl.arange(0, BH)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    total = tl.zeros([BH], tl.float32)
    for e in range(first, last, ROWS):
        rows = e + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & (h < H)[None, :]
        total += tl.sum(tl.load(x + rows[:, None] * H + h[None, :], mask=mask, other=0.0), 0)
    tl.store(out + n * H + h, total, mask=h < H)
