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
    load_tokens,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)
from glax._src.kernels.triton.vjp_kernels import term_sums


@triton.jit
def exact_delta_key_gradient(
    q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `delta_key_gradient` where key gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            exact_gradient_of_pair(
                q, k, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale, pair, D,
            )  # fmt: skip


@triton.jit
def exact_delta_key_gradient_passed_outputs(
    q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    dq_again, dk_again, dg_again, dscale_again, D: tl.constexpr,
):  # fmt: skip
    """Run `exact_delta_key_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_delta_key_gradient(
        q, k, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D,
    )  # fmt: skip


@triton.jit
def exact_gradient_of_pair(
    q, k, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale, pair, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of a (chunk, head) pair, [C, K] each, and dscale."""
    h, e, pair = pair % D.H, pair // D.H, pair.to(tl.int64)
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    U = tl.trans(load_by_chunk(written, pair, tokens, cv, count, D))
    Z = tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, D))
    # [C]
    d_scale = tl.zeros([D.C], tl.float32)
    # [C, C]
    dP = dot(tdo, tl.trans(U), D)
    own = tl.sum(tl.where(i == j, dP, 0.0), 1)
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    dL = tl.where(i > j, dot(Z, tl.trans(U), D), 0.0).to(D.DTYPE)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # Load operands and gates: [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # Sum over pairs of tokens: [C, BK]
        none = tl.zeros([D.C, D.BK], tl.float32)
        dq_pairs, de_pairs, dk_pairs, pairs = none, none, none, none
        for level in range(0, runtime_bound(num_halvings(D.C), length)):
            mask, matrix = halving(tokens, (D.C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, D))
            dP_level = tl.where(mask, dP, 0.0)
            dL_level = tl.where(mask, dL, 0.0)
            x, y = tq * decay * factor, tk * decay
            level_dq = half_fine_dot(dP_level, y, D)
            level_de = half_fine_dot(dL_level, y, D)
            level_dk = half_fine_dot(tl.trans(dP_level), x, D)
            level_dk += half_fine_dot(tl.trans(dL_level), y, D)
            pairs += x * level_dq + y * (level_de - level_dk)
            dq_pairs += level_dq * decay
            de_pairs += level_de * decay
            dk_pairs += level_dk * decay
        up, down, through = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * through
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, S, D) * up
        tde = dot(Z, S, D) * up
        tdk = dot(U, dS, D) * down
        suffix_terms = tq * tdq * factor + tk * tde + pairs
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tl.bfloat16 == D.DTYPE)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs + own[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        tdk += dk_pairs + (own * factor)[:, None] * tq + tde + de_pairs
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))
