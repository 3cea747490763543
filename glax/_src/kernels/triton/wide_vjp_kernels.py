"""Compute the gradient of a chunk whose values are wide, in two kernels that share the chunk among programs.

The formulas are those of `vjp_kernels`. A program of `wide_key_gradient` has a block of the channels of K and sums over V; one
of `wide_value_gradient` has a block of the columns of V and sums over K. So no program holds all of V, and most loads are in a
pipelined loop.

The gradients of head gates and of the scale are sums over K, also in their terms of pairs of tokens, since P is such a sum. Each
program stores those of its own channels, and XLA adds them in a fixed order. "K / BK" in shapes is rounded up.
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
    load_state,
    load_tile,
    middle_matrix,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)
from glax._src.kernels.triton.vjp_kernels import store_sum, term_sums


@triton.jit
def wide_key_gradient(
    q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of dq [rows, H // GQ, K] and dk [rows, H // GK, K], and the gradients of gates and scale.

    Each iteration takes BV columns of the states [chunks, H, K, V]. dg: [rows, H, K] for key gates. Else the parts of dg of
    each block of channels: [rows, H, K / BK] for head gates and, as dscale, [chunks, H, K / BK] for constant gates. The
    other operands are those of `gradient`.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    block, program = tl.program_id(0) % NK, tl.program_id(0) // NK
    first, e = program % (H // GROUP) * GROUP, program // (H // GROUP)
    if GROUP == 1:
        wide_key_head(
            q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, first, e,
            H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, GQ, GK,
        )  # fmt: skip
    else:
        for member in tl.range(0, runtime_bound(GROUP, e), num_stages=1):
            wide_key_head(
                q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, first + member, e,
                H, HQ, HK, HV, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, GQ, GK,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def wide_key_head(
    q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, h, e,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of head h of chunk e in one block of channels."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    dP, tdq, tdk, state_products = sums_over_values(
        v, do, states, d_states, block, h, e, origin, length, count, H, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
        FORM != "none",
    )  # fmt: skip
    tokens, ck = tl.arange(0, C), block * BK + tl.arange(0, BK)
    # [C, BK]
    tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
    tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
    if FORM == "key":
        wide_key_gates(
            tq, tk, g, decayed, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, origin, length, count,
            H, K, C, BK, SIGN, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        wide_head_gates(
            tq, tk, decayed, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, n, origin, length, count,
            H, K, C, BK, FORM, SIGN, DTYPE, PRECISION, GQ, GK,
        )  # fmt: skip


@triton.jit
def sums_over_values(
    v, do, states, d_states, block, h, e, origin, length, count,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Compute dP = do v^T [C, C], do S^T and v dS^T [C, BK], and with GATED sum_v S dS [BK], for a block of channels."""
    tokens, ck = tl.arange(0, C), block * BK + tl.arange(0, BK)
    limit = tl.where(count > 0, V, 0)  # padding has no state
    dP = tl.zeros([C, C], tl.float32)
    tdq = tl.zeros([C, BK], tl.float32)
    tdk = tl.zeros([C, BK], tl.float32)
    state_products = tl.zeros([BK], tl.float32)
    for v0 in range(0, runtime_bound(V, length), BV):
        cv = v0 + tl.arange(0, BV)
        # [C, BV]
        tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
        tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, H, K, V)
        dS = load_state(d_states, e, h, ck, cv, limit, H, K, V)
        dP += dot(tdo, tl.trans(tv), DTYPE, PRECISION)
        tdq += dot(tdo, tl.trans(S), DTYPE, PRECISION)
        tdk += dot(tv, tl.trans(dS), DTYPE, PRECISION)
        if GATED:
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return dP, tdq, tdk, state_products


@triton.jit
def wide_key_gates(
    tq, tk, g, last, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, origin, length, count,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of dq, dk and dg of key gates as `key_gate_gradient` does, scaled about the chunk's middle."""
    tokens, ck = tl.arange(0, C), block * BK + tl.arange(0, BK)
    i, j = tokens[:, None], tokens[None, :]
    # [C]
    d_diagonal = tl.sum(tl.where(i == j, dP, 0.0), 1)
    # [C, C]
    dP = tl.where(i > j, dP, 0.0).to(DTYPE)
    # [BK]
    both = load_key_sums(last, e, h, ck, count, H, K)
    enter = load_key_sums(last, e, h, ck, count, H, K, True)
    edge = state_products * exp(both)
    # Scale operands: [C, BK]
    # The sums are NaN where a gate is -inf. Such a chunk is out of range, and the exact kernel writes its gradient anew.
    gates = load_tile(at(g, origin, h, H, K), tokens, ck, count, H, K, SIGN)
    binary = whole_gate_sums(middle_matrix(tokens, C), gates) * LOG2E
    up, down = tl.exp2(binary), tl.exp2(-binary)
    x, y = tq * up, tk * down
    # The decays of S and dS, e^{M_i} e^L and e^{-M_j} e^R, are products of factors in range (`common.limits`).
    tdk *= down * exp(both - enter)[None, :]
    prefix_terms = (tk * tdk).to(DTYPE)
    dk_pairs = half_fine_dot(tl.trans(dP), x, DTYPE, PRECISION)
    # Stored first, so that the rest finds registers.
    tdk += (dk_pairs * down + d_diagonal[:, None] * tq) * factor
    store_tile(at(dk, origin, h, H, K), tdk, tokens, ck, length, H, K, SIGN)
    suffix_terms = -y * dk_pairs
    dq_pairs = half_fine_dot(dP, y, DTYPE, PRECISION)
    tdq *= up * exp(enter)[None, :]
    suffix_terms += tq * tdq + x * dq_pairs
    tdq += dq_pairs * up + d_diagonal[:, None] * tk
    store_part(dscale, tl.sum(tl.sum(tq * tdq, 1), 0), e, h, block, H, K, BK)
    store_tile(at(dq, origin, h, H, K), tdq * factor, tokens, ck, length, H, K, SIGN)
    tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms * factor, tq.dtype == tl.bfloat16)
    tdg += dot(tl.where(j < i, 1.0, 0.0), prefix_terms, DTYPE, PRECISION) + edge[None, :]
    store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)


@triton.jit
def wide_head_gates(
    tq, tk, g, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, n, origin, length, count,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of dq and dk for per-head, constant or no gates, and these channels' part of dg and dscale."""
    tokens, ck = tl.arange(0, C), block * BK + tl.arange(0, BK)
    i, j = tokens[:, None], tokens[None, :]
    if FORM == "none":
        dP = tl.where(i >= j, dP, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, H, FORM, SIGN)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
        total = load_head_sums(g, origin, h, n, C - 1, count, H, FORM, SIGN)
        dP *= exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        tdq *= exp(G)[:, None]
        tdk *= exp(last - G)[:, None]
    # [C]
    through_start = tl.sum(tq * tdq, 1)
    through_end = tl.sum(tk * tdk, 1)
    # Stored first, so that the pairs find registers: [C, BK]
    rounded = dP.to(DTYPE)
    tdq += dot(rounded, tk, DTYPE, PRECISION)
    store_sum(dq, tdq * factor, origin, h, tokens, ck, length, H, K, SIGN, GQ)
    tdk += dot(tl.trans(rounded), tq, DTYPE, PRECISION) * factor
    store_sum(dk, tdk, origin, h, tokens, ck, length, H, K, SIGN, GK)
    # [C, C]
    pairs = dot(tq, tl.trans(tk), DTYPE, PRECISION) * dP
    store_part(dscale, tl.sum(tl.sum(pairs, 1) + through_start, 0), e, h, block, H, K, BK)
    if FORM != "none":
        NK: tl.constexpr = (K + BK - 1) // BK
        pairs = tl.where(i > j, pairs, 0.0)
        within = tl.sum(pairs, 1) - tl.sum(pairs, 0)
        # Of the gate of token j: the terms of S and of pairs with tokens from j on, and the terms of dS with tokens before j.
        terms = tl.where(i >= j, ((through_start + within) * factor)[:, None], through_end[:, None])
        tdg = tl.where(tokens < count, tl.sum(terms, 0) + tl.sum(state_products, 0) * exp(total), 0.0)
        if FORM == "constant":
            store_part(dg, tl.sum(tdg, 0), e, h, block, H, K, BK)
        else:
            p = dg + (origin.to(tl.int64) * H + h) * NK + block
            tl.store(p + (SIGN * H * NK) * tokens, tdg, mask=tokens < length)


@triton.jit
def store_part(x, value, e, h, block, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Store x[e, h, block] of x [chunks, H, K / BK]."""
    NK: tl.constexpr = (K + BK - 1) // BK
    tl.store(x + (e.to(tl.int64) * H + h) * NK + block, value)


@triton.jit
def wide_value_gradient(
    q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, GV: tl.constexpr,
):  # fmt: skip
    """Compute BV columns of dv [rows, H // GV, V]. Each iteration takes BK rows of the states dS [chunks, H, K, V].

    The operands are those of `gradient`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, program = tl.program_id(0) % NV, tl.program_id(0) // NV
    first, e = program % (H // GROUP) * GROUP, program // (H // GROUP)
    if GROUP == 1:
        wide_value_head(
            q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, first, e,
            H, HQ, HK, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, GV,
        )  # fmt: skip
    else:
        for member in tl.range(0, runtime_bound(GROUP, e), num_stages=1):
            wide_value_head(
                q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, first + member, e,
                H, HQ, HK, K, V, C, BK, BV, FORM, SIGN, DTYPE, PRECISION, GV,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def wide_value_head(
    q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, h, e,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, GV: tl.constexpr,
):  # fmt: skip
    """Compute dv of head h of chunk e in one block of columns, [C, BV]. Without key gates it sums the scores over K too."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, C), block * BV + tl.arange(0, BV)
    j, i = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, V, 0)  # padding has no state
    tdv = tl.zeros([C, BV], tl.float32)
    Pt = tl.zeros([C, C], tl.float32)
    for k0 in range(0, runtime_bound(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # [BK, BV]
        dS = load_state(d_states, e, h, ck, cv, limit, H, K, V)
        # [C, BK]
        if FORM == "key":
            x = load_tile(at(k_scaled, origin, h, H, K), tokens, ck, count, H, K, SIGN)
        else:
            x = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
            tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
            Pt += dot(x, tl.trans(tq), DTYPE, PRECISION)
        tdv += dot(x, dS, DTYPE, PRECISION)
    if FORM == "key":
        Pt = tl.trans(load_tile(scores + (e.to(tl.int64) * H + h) * C * C, tokens, tokens, count, 1, C, 1))
    elif FORM == "none":
        Pt = tl.where(i >= j, Pt, 0.0)
    else:
        G = load_head_sums(decayed, origin, h, n, tokens, count, H, FORM, SIGN)
        last = load_head_sums(decayed, origin, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
        Pt *= exp(tl.where(i >= j, G[None, :] - G[:, None], float("-inf")))
        tdv *= exp(last - G)[:, None]
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    tdv += dot(Pt, tdo, DTYPE, PRECISION) * factor
    store_sum(dv, tdv, origin, h, tokens, cv, length, H, V, SIGN, GV)
