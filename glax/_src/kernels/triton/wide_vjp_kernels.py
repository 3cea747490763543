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
    load_pairs,
    load_state,
    load_tokens,
    middle_matrix,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)
from glax._src.kernels.triton.vjp_kernels import store_sum, term_sums


@triton.jit
def wide_key_gradient(q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, D: tl.constexpr):
    """Compute BK channels of dq [rows, H // GQ, K] and dk [rows, H // GK, K], and the gradients of gates and scale.

    Each iteration takes BV columns of the states [chunks, H, K, V]. dg: [rows, H, K] for key gates. Else the parts of dg of
    each block of channels: [rows, H, K / BK] for head gates and, as dscale, [chunks, H, K / BK] for constant gates. The
    other operands are those of `gradient`.
    """
    block, program = tl.program_id(0) % D.NK, tl.program_id(0) // D.NK
    first, e = program % (D.H // D.GROUP) * D.GROUP, program // (D.H // D.GROUP)
    if D.GROUP == 1:
        wide_key_head(q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, first, e, D)
    else:
        for member in tl.range(0, runtime_bound(D.GROUP, e), num_stages=1):
            wide_key_head(
                q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, first + member, e,
                D,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def wide_key_head(
    q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, block, h, e, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of head h of chunk e in one block of channels."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    dP, tdq, tdk, state_products = sums_over_values(
        v, do, states, d_states, block, h, e, origin, length, count, D, D.FORM != 'none',
    )  # fmt: skip
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    # [C, BK]
    tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
    tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
    if D.FORM == "key":
        wide_key_gates(
            tq, tk, g, decayed, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, origin, length,
            count, D,
        )  # fmt: skip
    else:
        wide_head_gates(
            tq, tk, decayed, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, n, origin, length,
            count, D,
        )  # fmt: skip


@triton.jit
def sums_over_values(v, do, states, d_states, block, h, e, origin, length, count, D: tl.constexpr, GATED: tl.constexpr):
    """Compute dP = do v^T [C, C], do S^T and v dS^T [C, BK], and with GATED sum_v S dS [BK], for a block of channels."""
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    dP = tl.zeros([D.C, D.C], tl.float32)
    tdq = tl.zeros([D.C, D.BK], tl.float32)
    tdk = tl.zeros([D.C, D.BK], tl.float32)
    state_products = tl.zeros([D.BK], tl.float32)
    for v0 in range(0, runtime_bound(D.V, length), D.BV):
        cv = v0 + tl.arange(0, D.BV)
        # [C, BV]
        tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
        tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dP += dot(tdo, tl.trans(tv), D)
        tdq += dot(tdo, tl.trans(S), D)
        tdk += dot(tv, tl.trans(dS), D)
        if GATED:
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return dP, tdq, tdk, state_products


@triton.jit
def wide_key_gates(
    tq, tk, g, last, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, origin, length, count,
    D: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of dq, dk and dg of key gates as `key_gate_gradient` does, scaled about the chunk's middle."""
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    i, j = tokens[:, None], tokens[None, :]
    # [C]
    d_diagonal = tl.sum(tl.where(i == j, dP, 0.0), 1)
    # [C, C]
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    # [BK]
    both = load_key_sums(last, e, h, ck, count, D)
    enter = load_key_sums(last, e, h, ck, count, D, True)
    edge = state_products * exp(both)
    # Scale operands: [C, BK]
    # The sums are NaN where a gate is -inf. Such a chunk is out of range, and the exact kernel writes its gradient anew.
    gates = load_tokens(g, origin, h, D.H, D.K, tokens, ck, count, D)
    binary = whole_gate_sums(middle_matrix(tokens, D.C), gates) * LOG2E
    up, down = tl.exp2(binary), tl.exp2(-binary)
    x, y = tq * up, tk * down
    # The decays of S and dS, e^{M_i} e^L and e^{-M_j} e^R, are products of factors in range (`common.limits`).
    tdk *= down * exp(both - enter)[None, :]
    prefix_terms = (tk * tdk).to(D.DTYPE)
    dk_pairs = half_fine_dot(tl.trans(dP), x, D)
    # Stored first, so that the rest finds registers.
    tdk += (dk_pairs * down + d_diagonal[:, None] * tq) * factor
    store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    suffix_terms = -y * dk_pairs
    dq_pairs = half_fine_dot(dP, y, D)
    tdq *= up * exp(enter)[None, :]
    suffix_terms += tq * tdq + x * dq_pairs
    tdq += dq_pairs * up + d_diagonal[:, None] * tk
    store_part(dscale, tl.sum(tl.sum(tq * tdq, 1), 0), e, h, block, D)
    store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
    tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms * factor, tq.dtype == tl.bfloat16)
    tdg += dot(tl.where(j < i, 1.0, 0.0), prefix_terms, D) + edge[None, :]
    store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)


@triton.jit
def wide_head_gates(
    tq, tk, g, dP, tdq, tdk, state_products, dq, dk, dg, dscale, factor, block, h, e, n, origin, length, count,
    D: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of dq and dk for per-head, constant or no gates, and these channels' part of dg and dscale."""
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    i, j = tokens[:, None], tokens[None, :]
    if D.FORM == "none":
        dP = tl.where(i >= j, dP, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        total = load_head_sums(g, origin, h, n, D.C - 1, count, D)
        dP *= exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        tdq *= exp(G)[:, None]
        tdk *= exp(last - G)[:, None]
    # [C]
    through_start = tl.sum(tq * tdq, 1)
    through_end = tl.sum(tk * tdk, 1)
    # Stored first, so that the pairs find registers: [C, BK]
    rounded = dP.to(D.DTYPE)
    tdq += dot(rounded, tk, D)
    store_sum(dq, tdq * factor, origin, h, tokens, ck, length, D.K, D.GQ, D)
    tdk += dot(tl.trans(rounded), tq, D) * factor
    store_sum(dk, tdk, origin, h, tokens, ck, length, D.K, D.GK, D)
    # [C, C]
    pairs = dot(tq, tl.trans(tk), D) * dP
    store_part(dscale, tl.sum(tl.sum(pairs, 1) + through_start, 0), e, h, block, D)
    if D.FORM != "none":
        pairs = tl.where(i > j, pairs, 0.0)
        within = tl.sum(pairs, 1) - tl.sum(pairs, 0)
        # Of the gate of token j: the terms of S and of pairs with tokens from j on, and the terms of dS with tokens before j.
        terms = tl.where(i >= j, ((through_start + within) * factor)[:, None], through_end[:, None])
        tdg = tl.where(tokens < count, tl.sum(terms, 0) + tl.sum(state_products, 0) * exp(total), 0.0)
        if D.FORM == "constant":
            store_part(dg, tl.sum(tdg, 0), e, h, block, D)
        else:
            p = dg + (origin.to(tl.int64) * D.H + h) * D.NK + block
            tl.store(p + (D.SIGN * D.H * D.NK) * tokens, tdg, mask=tokens < length)


@triton.jit
def store_part(x, value, e, h, block, D: tl.constexpr):
    """Store x[e, h, block] of x [chunks, H, K / BK]."""
    tl.store(x + (e.to(tl.int64) * D.H + h) * D.NK + block, value)


@triton.jit
def wide_value_gradient(q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, D: tl.constexpr):
    """Compute BV columns of dv [rows, H // GV, V]. Each iteration takes BK rows of the states dS [chunks, H, K, V].

    The operands are those of `gradient`.
    """
    block, program = tl.program_id(0) % D.NV, tl.program_id(0) // D.NV
    first, e = program % (D.H // D.GROUP) * D.GROUP, program // (D.H // D.GROUP)
    if D.GROUP == 1:
        wide_value_head(q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, first, e, D)
    else:
        for member in tl.range(0, runtime_bound(D.GROUP, e), num_stages=1):
            wide_value_head(
                q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, first + member, e, D,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def wide_value_head(q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, block, h, e, D: tl.constexpr):
    """Compute dv of head h of chunk e in one block of columns, [C, BV]. Without key gates it sums the scores over K too."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), block * D.BV + tl.arange(0, D.BV)
    j, i = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    tdv = tl.zeros([D.C, D.BV], tl.float32)
    Pt = tl.zeros([D.C, D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [BK, BV]
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        # [C, BK]
        if D.FORM == "key":
            x = load_tokens(k_scaled, origin, h, D.H, D.K, tokens, ck, count, D)
        else:
            x = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
            tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
            Pt += dot(x, tl.trans(tq), D)
        tdv += dot(x, dS, D)
    if D.FORM == "key":
        Pt = tl.trans(load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D))
    elif D.FORM == "none":
        Pt = tl.where(i >= j, Pt, 0.0)
    else:
        G = load_head_sums(decayed, origin, h, n, tokens, count, D)
        last = load_head_sums(decayed, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        Pt *= exp(tl.where(i >= j, G[None, :] - G[:, None], float("-inf")))
        tdv *= exp(last - G)[:, None]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    tdv += dot(Pt, tdo, D) * factor
    store_sum(dv, tdv, origin, h, tokens, cv, length, D.V, D.GV, D)
