"""Compute the gradient of chunks whose key gates are out of range, where values are wide.

The formulas are those of `vjp_exact_kernels`. A program has a block of the channels of K, and sums over V in blocks.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    at,
    dot,
    exp,
    half_fine_dot,
    halving,
    load_key_gates,
    load_tokens,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)
from glax._src.kernels.triton.vjp_kernels import term_sums
from glax._src.kernels.triton.wide_vjp_kernels import store_part, sums_over_values


@triton.jit
def wide_exact_gradient(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Overwrite BK channels of the results of `wide_key_gradient` where key gates are out of range.

    `pairs` holds the number of (chunk, head) pairs; PAIRS of them are tested by the programs of each block of channels.
    """
    block, group = tl.program_id(0) % D.NK, tl.program_id(0) // D.NK
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS, D.NK)):
        pair = group * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            wide_exact_head(
                q, k, v, g, do, scale, states, d_states, table, dq, dk, dg, dscale, block, pair % D.H, pair // D.H, D,
            )  # fmt: skip


@triton.jit
def wide_exact_gradient_passed_outputs(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, dq_again, dk_again,
    dg_again, dscale_again, D: tl.constexpr,
):  # fmt: skip
    """Run `wide_exact_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    wide_exact_gradient(q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D)


@triton.jit
def wide_exact_head(q, k, v, g, do, scale, states, d_states, table, dq, dk, dg, dscale, block, h, e, D: tl.constexpr):
    """Compute BK channels of dq, dk and dg of a chunk, [C, BK] each, and their part of dscale [chunks, H, K / BK]."""
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    dP, tdq, tdk, state_products = sums_over_values(
        v, do, states, d_states, block, h, e, origin, length, count, D, True,
    )  # fmt: skip
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    i, j = tokens[:, None], tokens[None, :]
    # [C]
    d_diagonal = tl.sum(tl.where(i == j, dP, 0.0), 1)
    # [C, C]
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    # Load operands and gates: [C, BK]
    tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
    tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
    gates = load_key_gates(g, origin, h, tokens, ck, count, D)
    # Add the states' parts: [C, BK]
    tdq *= exp(whole_gate_sums(tl.where(j <= i, 1.0, 0.0), gates))
    tdk *= exp(whole_gate_sums(tl.where(j > i, 1.0, 0.0), gates))
    suffix_terms = tq * tdq
    # [BK]
    edge = state_products * exp(tl.sum(gates.to(tl.float32), 0))
    tdg = dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
    tdk += d_diagonal[:, None] * tq * factor
    tdq += d_diagonal[:, None] * tk
    # Sum over pairs of tokens: [C, BK]
    for level in range(0, runtime_bound(num_halvings(D.C), length)):
        mask, matrix = halving(tokens, (D.C // 2) >> level)
        decay = exp(whole_gate_sums(matrix, gates))
        dP_level = tl.where(mask, dP, 0.0)
        x, y = tq * decay, tk * decay
        level_dq = half_fine_dot(dP_level, y, D)
        level_dk = half_fine_dot(tl.trans(dP_level), x, D)
        suffix_terms += x * level_dq - y * level_dk
        tdq += level_dq * decay
        tdk += level_dk * decay * factor
    tdg += term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms * factor, tq.dtype == tl.bfloat16)
    store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
    store_part(dscale, tl.sum(tl.sum(tq * tdq, 1), 0), e, h, block, D)
    store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
    store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
