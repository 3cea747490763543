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
    load_tokens,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)
from glax._src.kernels.triton.vjp_kernels import term_sums


@triton.jit
def exact_gradient(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `gradient` where key gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % D.H, pair // D.H
            entry = table + e * 6
            origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
            factor = tl.load(scale + n).to(tl.float32)
            exact_key_gate_gradient(
                q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D,
            )  # fmt: skip


@triton.jit
def exact_gradient_passed_outputs(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, dq_again, dk_again,
    dg_again, dscale_again, D: tl.constexpr,
):  # fmt: skip
    """Run `exact_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_gradient(q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D)


@triton.jit
def exact_key_gate_gradient(
    q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of a chunk, [C, K] each, and dscale."""
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    d_diagonal = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), D), 0.0).to(D.DTYPE)
    d_scale = tl.zeros([D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # Load operands and gates: [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        # Sum over pairs of tokens: [C, BK]
        dq_pairs = tl.zeros([D.C, D.BK], tl.float32)
        dk_pairs = tl.zeros([D.C, D.BK], tl.float32)
        pairs = tl.zeros([D.C, D.BK], tl.float32)
        for level in range(0, runtime_bound(num_halvings(D.C), length)):
            mask, matrix = halving(tokens, (D.C // 2) >> level)
            decay = exp(gate_sums(matrix, gates))
            dP_level = tl.where(mask, dP, 0.0)
            x, y = tq * decay, tk * decay
            level_dq = half_fine_dot(dP_level, y, D)
            level_dk = half_fine_dot(tl.trans(dP_level), x, D)
            pairs += x * level_dq - y * level_dk
            dq_pairs += level_dq * decay
            dk_pairs += level_dk * decay
        up, down, last = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * last
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, tl.trans(S), D) * up
        tdk = dot(tv, tl.trans(dS), D) * down
        suffix_terms = (tq * tdq + pairs) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs + d_diagonal[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        tdk += (dk_pairs + d_diagonal[:, None] * tq) * factor
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + e.to(tl.int64) * D.H + h, tl.sum(d_scale, 0))
