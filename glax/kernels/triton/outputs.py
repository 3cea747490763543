"""The kernel that walks along a segment of a sequence and writes its outputs, the state on chip.

With G_i the sum of log decays of a chunk through its token i, in all of it G_last:

    S_out = e^{G_last} S_in + sum_j (k_j e^{G_last - G_j}) v_j^T
    o_i   = (q_i e^{G_i})^T S_in + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j

One program has one segment, one head, and a block of the state's columns.
"""

from glax.kernels.triton.lang import tl, triton
from glax.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    at,
    dot,
    exact_factors,
    exact_scores,
    exp,
    half_matrix,
    half_sums,
    load_head_sums,
    load_key_gates,
    load_state,
    load_tile,
    middle_matrix,
    store_state,
    store_tile,
    sums,
)


@triton.jit
def outputs(
    q, k, v, g, scale, start, table, o, final, reach,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a segment for BV columns of v, and the state behind a sequence's last segment.

    START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0). g: for head gates their sums G.
    reach [programs]: how far key gates had to reach; where that is too far, `exact_outputs` walks the segment again.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges = tl.load(entry + 3), tl.load(entry + 4)
    cv = block * BV + tl.arange(0, BV)
    factor = tl.load(scale + n).to(tl.float32)
    if FORM == "key":
        HALF: tl.constexpr = BK // 2
        c0, c1 = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
        S = tl.trans(start_of(start, e, h, n, c0, cv, filled, edges, H, K, V, HALF, BV, START))
        T = tl.trans(start_of(start, e, h, n, c1, cv, filled, edges, H, K, V, HALF, BV, START))
        S, T, far = fast_walk(
            q, k, v, g, o, factor, cv, S, T, h, origin, length, filled,
            H, HQ, HK, HV, K, V, C, HALF, BV, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
        tl.store(reach + tl.program_id(0), far)
        if (edges & 2) != 0:
            store_state(final, tl.trans(S), n, h, c0, cv, H, K, V)
            store_state(final, tl.trans(T), n, h, c1, cv, H, K, V)
    else:
        ck = tl.arange(0, BK)
        S = start_of(start, e, h, n, ck, cv, filled, edges, H, K, V, BK, BV, START)
        S = head_walk(
            q, k, v, g, o, factor, cv, S, h, n, origin, length, filled,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
        if (edges & 2) != 0:
            store_state(final, S, n, h, ck, cv, H, K, V)


@triton.jit
def exact_outputs(
    q, k, v, g, scale, start, table, reach, o, final,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Over the results of `outputs` for key gates, in their memory: the segments whose gates are too strong for its form.

    In a kernel of its own: in one with the fast form it would take registers from it.
    """
    if tl.load(reach + tl.program_id(0)) > FAST_LIMIT:
        NV: tl.constexpr = (V + BV - 1) // BV
        block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
        entry = table + e * 6
        origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        n, edges = tl.load(entry + 3), tl.load(entry + 4)
        ck, cv = tl.arange(0, BK), block * BV + tl.arange(0, BV)
        factor = tl.load(scale + n).to(tl.float32)
        S = start_of(start, e, h, n, ck, cv, filled, edges, H, K, V, BK, BV, START)
        S = exact_walk(
            q, k, v, g, o, factor, cv, S, h, origin, length, filled,
            H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
        if (edges & 2) != 0:
            store_state(final, S, n, h, ck, cv, H, K, V)


@triton.jit
def exact_outputs_passed_outputs(
    q, k, v, g, scale, start, table, reach, o, final, o_again, final_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`exact_outputs` for jax-triton 0.3, which hands over what is updated as outputs, too."""
    exact_outputs(
        q, k, v, g, scale, start, table, reach, o, final,
        H, HQ, HK, HV, K, V, C, BK, BV, SIGN, START, DTYPE, PRECISION,
    )  # fmt: skip


@triton.jit
def start_of(
    start, e, h, n, ck, cv, filled, edges,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """The state that a segment begins from, [BK, BV]."""
    if START == 1:
        written = tl.where((filled > 0) | (edges != 0), V, 0)  # padding has no state
        S = load_state(start, e, h, ck, cv, written, H, K, V).to(tl.float32)
    elif START == 2:
        S = load_state(start, n, h, ck, cv, V, H, K, V).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    return S


@triton.jit
def fast_walk(
    q, k, v, g, o, factor, cv, S, T, h, origin, length, filled,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Key gates, scaled about a chunk's middle; and how far that had to reach.

    S, T: the state's rows for the first and the second half of k's channels, transposed, [BV, BK]: half at a time needs half
    the registers, and an operand that was computed in registers and must be transposed would take a detour through memory.
    Gates are not cut, and go from memory to the tensor cores: where one is -inf, the reach is infinite.
    """
    tokens = tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    halves = half_matrix(tokens, C).to(g.dtype.element_ty)
    reach = tl.zeros([C], tl.float32)
    lowest = tl.zeros([BK], tl.float32)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        tv = load_tile(at(v, first, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
        vt = tl.trans(tv)
        x, y, own, far, enter, leave, least = scaled(
            q, k, g, halves, first, count, h, 0, H, HQ, HK, K, C, BK, SIGN, DTYPE
        )
        A = dot(x, tl.trans(y), DTYPE, PRECISION)
        S = S * exp(enter)[None, :]
        read = dot(x, tl.trans(S), DTYPE, PRECISION)
        S = (S + dot(vt, y, DTYPE, PRECISION)) * exp(leave)[None, :]
        reach, lowest = tl.maximum(reach, far), tl.minimum(lowest, least)
        if K > BK:
            x, y, more, far, enter, leave, least = scaled(
                q, k, g, halves, first, count, h, BK, H, HQ, HK, K, C, BK, SIGN, DTYPE
            )
            own += more
            A = tl.dot(x, tl.trans(y), A, input_precision=PRECISION)
            T = T * exp(enter)[None, :]
            read = tl.dot(x, tl.trans(T.to(DTYPE)), read, input_precision=PRECISION)
            T = (T + dot(vt, y, DTYPE, PRECISION)) * exp(leave)[None, :]
            reach, lowest = tl.maximum(reach, far), tl.minimum(lowest, least)
        A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
        out = tl.dot(A.to(DTYPE), tv.to(DTYPE), read, input_precision=PRECISION) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    reach = tl.max(reach, 0)
    return S, T, tl.where(tl.min(lowest, 0) > float("-inf"), reach, float("inf"))


@triton.jit
def scaled(
    q, k, g, halves, first, count, h, k0,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """q e^M, k e^-M [C, BK]; q_i . k_i and the largest |M_i| [C]; the gates' sums over each half, and over all or -inf [BK]."""
    ck, tokens = k0 + tl.arange(0, BK), tl.arange(0, C)
    gates = load_tile(at(g, first, h, H, K), tokens, ck, count, H, K, SIGN)
    M = sums(middle_matrix(tokens, C), gates)
    tk = load_tile(at(k, first, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
    tq = load_tile(at(q, first, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
    binary = M * LOG2E
    x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
    own, far = tl.sum(x * y, 1), tl.max(tl.abs(M), 1)
    enter, leave = half_sums(gates, halves)
    both = enter + leave
    return x.to(DTYPE), y.to(DTYPE), own, far, enter, leave, tl.where(both == both, both, float("-inf"))


@triton.jit
def exact_walk(
    q, k, v, g, o, factor, cv, S, h, origin, length, filled,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Key gates of any strength."""
    ck, tokens = tl.arange(0, BK), tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        tq = load_tile(at(q, first, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        tv = load_tile(at(v, first, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        gates = load_key_gates(g, first, h, tokens, ck, count, H, K, SIGN)
        own = tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
        A = exact_scores(tq, tk, gates, tokens, filled, C, DTYPE, PRECISION)
        A = tl.where(i > j, A, tl.where(i == j, own[:, None], 0.0))
        up, down, through = exact_factors(gates, tokens)
        read = dot(tq * up, S, DTYPE, PRECISION)
        S = S * through[:, None] + dot(tl.trans(tk * down), tv, DTYPE, PRECISION)
        out = (read + dot(A, tv, DTYPE, PRECISION)) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    return S


@triton.jit
def head_walk(
    q, k, v, g, o, factor, cv, S, h, n, origin, length, filled,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One gate a head and token, or none: q and k go to the tensor cores as they are."""
    ck, tokens = tl.arange(0, BK), tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    # Of the next chunk, always: nothing waits for a number that is loaded a chunk ahead.
    total = load_head_sums(g, origin, h, n, C - 1, filled, H, FORM, SIGN)
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        # [C, BK], [C, BK], [C, BV]
        tq = load_tile(at(q, first, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        tv = load_tile(at(v, first, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        A = dot(tq, tl.trans(tk), DTYPE, PRECISION)
        read = dot(tq, S, DTYPE, PRECISION)
        if FORM == "none":
            A = tl.where(i >= j, A, 0.0)
            S += dot(tl.trans(tk), tv, DTYPE, PRECISION)
        else:
            G = load_head_sums(g, first, h, n, tokens, count, H, FORM, SIGN)
            last = load_head_sums(g, first, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
            through = exp(total)
            total = load_head_sums(g, first + SIGN * C, h, n, C - 1, count - C, H, FORM, SIGN)
            A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
            read = read * exp(G)[:, None]
            S = S * through + dot(tl.trans(tk), tv * exp(last - G)[:, None], DTYPE, PRECISION)
        out = (read + dot(A, tv, DTYPE, PRECISION)) * factor
        store_tile(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    return S
