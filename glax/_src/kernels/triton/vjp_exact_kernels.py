"""Compute the gradient of chunks whose key gates are out of range for the fast form of `gradient`.

The formulas are those of `vjp_kernels`. Pairs of tokens are log2(C) products, each with a reference between its tokens, so that
no exponent is positive. A kernel that held both forms would need more registers and take three times as long to compile. dv
does not change.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    at,
    dot,
    exact_factors,
    exp,
    gate_sums,
    half_fine_dot,
    halving,
    load_key_gates,
    load_state,
    load_tile,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)
from glax._src.kernels.triton.vjp_kernels import term_sums


@triton.jit
def exact_gradient(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `gradient` where key gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, PAIRS)):
        pair = tl.program_id(0) * PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % H, pair // H
            entry = table + e * 6
            origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
            factor = tl.load(scale + n).to(tl.float32)
            exact_key_gate_gradient(
                q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count,
                H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
            )  # fmt: skip


@triton.jit
def exact_gradient_passed_outputs(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    dq_again, dk_again, dg_again, dscale_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Run `exact_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_gradient(
        q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
        H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION, PAIRS,
    )  # fmt: skip


@triton.jit
def exact_key_gate_gradient(
    q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of a chunk, [C, K] each, and dscale."""
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, V, 0)
    # [C, BV]
    tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    d_diagonal = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0).to(DTYPE)
    d_scale = tl.zeros([C], tl.float32)
    for k0 in range(0, runtime_bound(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # Load operands and gates: [C, BK]
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, H, K, V)
        dS = load_state(d_states, e, h, ck, cv, limit, H, K, V)
        # Sum over pairs of tokens: [C, BK]
        dq_pairs = tl.zeros([C, BK], tl.float32)
        dk_pairs = tl.zeros([C, BK], tl.float32)
        pairs = tl.zeros([C, BK], tl.float32)
        for level in range(0, runtime_bound(num_halvings(C), length)):
            mask, matrix = halving(tokens, (C // 2) >> level)
            decay = exp(gate_sums(matrix, gates))
            dP_level = tl.where(mask, dP, 0.0)
            x, y = tq * decay, tk * decay
            level_dq = half_fine_dot(dP_level, y, DTYPE, PRECISION)
            level_dk = half_fine_dot(tl.trans(dP_level), x, DTYPE, PRECISION)
            pairs += x * level_dq - y * level_dk
            dq_pairs += level_dq * decay
            dk_pairs += level_dk * decay
        up, down, last = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * last
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, tl.trans(S), DTYPE, PRECISION) * up
        tdk = dot(tv, tl.trans(dS), DTYPE, PRECISION) * down
        suffix_terms = (tq * tdq + pairs) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, DTYPE, PRECISION) + edge[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        tdq += dq_pairs + d_diagonal[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, H, K), tdq * factor, tokens, ck, length, H, K, SIGN)
        tdk += (dk_pairs + d_diagonal[:, None] * tq) * factor
        store_tile(at(dk, origin, h, H, K), tdk, tokens, ck, length, H, K, SIGN)
    tl.store(dscale + e.to(tl.int64) * H + h, tl.sum(d_scale, 0))
