"""Compute the gradient of chunks of the delta rule whose key gates are out of range for `delta_key_gradient`.

The formulas are those of `delta_key_vjp_kernels`. Pairs of tokens are log2(C) products, each with a reference between its
tokens, so that no exponent is positive. dv and dbeta do not change.
"""

from glax._src.kernels.triton.delta_key_vjp_kernels import load_by_chunk
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    at,
    dot,
    exact_factors,
    exp,
    fine_gate_sums,
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
def exact_delta_key_gradient(
    q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `delta_key_gradient` where key gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, PAIRS)):
        pair = tl.program_id(0) * PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            exact_gradient_of_pair(
                q, k, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale,
                pair, H, HQ, HK, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
            )  # fmt: skip


@triton.jit
def exact_delta_key_gradient_passed_outputs(
    q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    dq_again, dk_again, dg_again, dscale_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Run `exact_delta_key_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_delta_key_gradient(
        q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs,
        dq, dk, dg, dscale, H, HQ, HK, K, V, C, BK, BV, SIGN, DTYPE, PRECISION, PAIRS,
    )  # fmt: skip


@triton.jit
def exact_gradient_of_pair(
    q, k, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale, pair,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of a (chunk, head) pair, [C, K] each, and dscale."""
    h, e, pair = pair % H, pair // H, pair.to(tl.int64)
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, K, 0)
    # [C, BV]
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    U = tl.trans(load_by_chunk(written, pair, tokens, cv, count, V, C, DTYPE))
    Z = tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, V, C, DTYPE))
    # [C]
    d_scale = tl.zeros([C], tl.float32)
    # [C, C]
    dP = dot(tdo, tl.trans(U), DTYPE, PRECISION)
    own = tl.sum(tl.where(i == j, dP, 0.0), 1)
    dP = tl.where(i > j, dP, 0.0).to(DTYPE)
    dL = tl.where(i > j, dot(Z, tl.trans(U), DTYPE, PRECISION), 0.0).to(DTYPE)
    for k0 in range(0, runtime_bound(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # Load operands and gates: [C, BK]
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, H, V, K)
        dS = load_state(d_states, e, h, cv, ck, limit, H, V, K)
        # Sum over pairs of tokens: [C, BK]
        none = tl.zeros([C, BK], tl.float32)
        dq_pairs, de_pairs, dk_pairs, pairs = none, none, none, none
        for level in range(0, runtime_bound(num_halvings(C), length)):
            mask, matrix = halving(tokens, (C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, DTYPE))
            dP_level = tl.where(mask, dP, 0.0)
            dL_level = tl.where(mask, dL, 0.0)
            x, y = tq * decay * factor, tk * decay
            level_dq = half_fine_dot(dP_level, y, DTYPE, PRECISION)
            level_de = half_fine_dot(dL_level, y, DTYPE, PRECISION)
            level_dk = half_fine_dot(tl.trans(dP_level), x, DTYPE, PRECISION)
            level_dk += half_fine_dot(tl.trans(dL_level), y, DTYPE, PRECISION)
            pairs += x * level_dq + y * (level_de - level_dk)
            dq_pairs += level_dq * decay
            de_pairs += level_de * decay
            dk_pairs += level_dk * decay
        up, down, through = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * through
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, S, DTYPE, PRECISION) * up
        tde = dot(Z, S, DTYPE, PRECISION) * up
        tdk = dot(U, dS, DTYPE, PRECISION) * down
        suffix_terms = tq * tdq * factor + tk * tde + pairs
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tl.bfloat16 == DTYPE)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, DTYPE, PRECISION) + edge[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        tdq += dq_pairs + own[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, H, K), tdq * factor, tokens, ck, length, H, K, SIGN)
        tdk += dk_pairs + (own * factor)[:, None] * tq + tde + de_pairs
        store_tile(at(dk, origin, h, H, K), tdk, tokens, ck, length, H, K, SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))
