"""Compute the gradient of a chunk of the delta rule. One program has one chunk and one head.

S is the state before the chunk and dS' = dL/dS after it. U and Y are those of `delta_scan`, and D_ij = e^{G_i - G_j}:

    dP_ij = do_i . u_j, j <= i      dL_ij = -y_i . u_j, j < i      the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j D_ij dP_ij k_j)
    de_i  = -e^{G_i} (S y_i) + sum_j D_ij dL_ij k_j                the gradient of e_i = beta_i k_i
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i D_ij (scale dP_ij q_i + dL_ij e_i) + beta_j de_j
    dv_i  = beta_i y_i              dbeta_i = y_i . v_i + k_i . de_i

The sums of k_j over dL and its transpose are one product with a symmetric matrix. The gradient of a log gate sums over all
pairs of tokens that the gate decays, as in `gradient`, and never over more than a chunk.

**With per-key gates**, z_i = -beta_i y_i, and products with e^{G_i - G_j} apply to every channel:

    dP_ij = do_i . u_j, j <= i      dL_ij = z_i . u_j, j < i        the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j})
    de_i  = e^{G_i} (S z_i) + sum_j dL_ij k_j e^{G_i - G_j}         beta_i times the gradient of e_i = beta_i k_i
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i (scale dP_ij q_i + dL_ij k_i) e^{G_i - G_j} + de_j
    dv_i  = -z_i                    dbeta_i = y_i . u_i / beta_i

The gradient of a log gate sums over all pairs of tokens that the gate decays, one before it and one at or after it:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s (dk_s from dS') + sum_{s >= t} (q_s dq_s + k_s de_s - k_s (dk_s within))

without the terms of a token with itself, which no gate decays. "within" are the terms of the pairs inside the chunk.

Where the gates are in range, both states are used at the chunk's middle, as e^E S and e^R dS' of `delta_pairs`. With
bfloat16 inputs they are given there, else this kernel brings them there and forms the operands again. All products then have
the operands q e^M, k e^M and k e^{-M} of that kernel, and only the results are decayed, by e^M or e^{-M}. In dg the terms of
pairs within the chunk cancel except for the pairs across a gate: both sides are products of the same operands.

Where they are out of range, `exact_delta_key_gradient` computes dq, dk, dg and dscale again. Pairs of tokens are log2(C)
products, each with a reference between its tokens, so that no exponent is positive. dv and dbeta do not change.
"""

from glax._src.kernels.triton.delta_pairs import load_beta, load_rows
from glax._src.kernels.triton.gradient import term_sums
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    at,
    chunk_of,
    dot,
    exact_factors,
    exp,
    fine_gate_sums,
    gate_sums,
    half_fine_dot,
    halving,
    load_head_sums,
    load_key_gates,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)

BLOCK = tl.constexpr(16)  # columns of V that are read together for dv and dbeta


@triton.jit
def delta_gradient(
    q, k, v, beta, g, do, scores, written, d_written, scale, states, d_states, table, dq, dk, dv, dbeta, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk [rows, H, K], dv [rows, H, V], dbeta [rows, H], dscale [chunks, H] and dg of a chunk.

    dg: [rows, H] for head gates, and the chunk's sum [chunks, H] for constant gates. BV holds all of V; each iteration takes BK
    rows of the states. g: the cumulative sums G of head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    origin, length, count, n = chunk_of(table, e)
    hq, hk = h // (D.H // D.HQ), h // (D.H // D.HK)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    U = load_tokens(written, origin, h, D.H, D.V, tokens, cv, count, D)
    Y = load_tokens(d_written, origin, h, D.H, D.V, tokens, cv, count, D)
    tbeta = load_rows(beta, origin, h, tokens, count, D)
    store_tile(at(dv, origin, h, D.H, D.V), Y.to(tl.float32) * tbeta[:, None], tokens, cv, length, D.H, D.V, D.SIGN)
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdbeta = tl.sum(Y.to(tl.float32) * tv.to(tl.float32), 1)
    # [C, C]
    dP = dot(tdo, tl.trans(U), D)
    P = load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D)
    pairs = P.to(tl.float32) * dP
    d_scale = tl.sum(tl.sum(pairs, 1), 0)
    if D.FORM == "none":
        decay = tl.where(i >= j, 1.0, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        decay = exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        up, down = exp(G)[:, None], exp(last - G)[:, None]
    dP = (dP * decay).to(D.DTYPE)
    dL = tl.where(i > j, dot(Y, tl.trans(U), D) * -decay, 0.0)
    products = tl.full([D.C, D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        tk = load_tile(at(k, origin, hk, D.HK, D.K), tokens, k0 + tl.arange(0, D.BK), count, D.HK, D.K, D.SIGN)
        products += dot(tk, tl.trans(tk), D)
    products *= dL
    tdbeta += tl.sum(products, 1)
    pairs = tl.where(i > j, pairs * factor + products * tbeta[:, None], 0.0)
    # [C]: of each pair of tokens, those that the gate of the later token's step decays
    within = tl.sum(pairs, 1) - column_sums(pairs, D.C)
    dL = (dL * tbeta[:, None]).to(D.DTYPE)
    symmetric = dL + tl.trans(dL)
    dPt = tl.trans(dP)
    through_start, through_end = tl.full([D.C], 0, tl.float32), tl.full([D.C], 0, tl.float32)
    erased = tl.full([D.C], 0, tl.float32)
    state_products = tl.full([D.BK], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tile(at(q, origin, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, origin, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # [C, BK]
        tdq = dot(tdo, S, D)
        tde = -dot(Y, S, D)
        tdk = dot(U, dS, D)
        if D.FORM != "none":
            tdq, tde, tdk = tdq * up, tde * up, tdk * down
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        through_start += tl.sum(tq * tdq, 1)
        erased += tl.sum(tk * tde, 1)
        through_end += tl.sum(tk * tdk, 1)
        tdq += dot(dP, tk, D)
        tdk += tde * tbeta[:, None] + dot(symmetric, tk, D)
        tdk += dot(dPt, tq, D) * factor
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    slot = e.to(tl.int64) * D.H + h
    tl.store(dscale + slot, d_scale + tl.sum(through_start, 0))
    row = origin.to(tl.int64) * D.H + h
    store_rows(dbeta + row, tdbeta + erased, tokens, length, D)
    if D.FORM != "none":
        total = exp(load_head_sums(g, origin, h, n, D.C - 1, count, D))
        # Of the gate of token t: the terms of S with tokens from t on, and the terms of dS with tokens before t.
        reaching = through_start * factor + erased * tbeta + within
        tdg = tl.sum(tl.where(j >= i, reaching[None, :], 0.0), 1) + tl.sum(
            tl.where(j < i, through_end[None, :], 0.0), 1
        )
        tdg = tl.where(tokens < count, tdg + tl.sum(state_products, 0) * total, 0.0)
        if D.FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            store_rows(dg + row, tdg, tokens, length, D)


@triton.jit
def column_sums(x, C: tl.constexpr):
    """Return the sums of the columns of x [C, C], in the layout of the sums of its rows."""
    return tl.sum(tl.trans(x), 1)


@triton.jit
def store_rows(x, value, tokens, count, D: tl.constexpr):
    """Store one value for each token of a chunk, [C], at x, the address of its first token."""
    tl.store(x + (D.SIGN * D.H) * tokens, value.to(x.dtype.element_ty), mask=tokens < count)


@triton.jit
def delta_key_gradient(
    q, k, q_read, k_read, k_written, beta, g, decays, do, written, d_written, scale, states, d_states, table, dq, dk,
    dv, dbeta, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg [rows, H, K], dv [rows, H, V], dbeta [rows, H] and dscale [chunks, H] of a chunk.

    BV holds all of V; each iteration takes BK columns of the states [chunks, H, V, K]. q_read, k_read, k_written and decays are
    those of `delta_key_pairs`. In the code x, z and y are q e^M, k e^M and k e^{-M}. Where gates are out of range,
    `exact_delta_key_gradient` computes dq, dk, dg and dscale again.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    pair = e.to(tl.int64) * D.H + h
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    store_value_gradients(beta, written, d_written, dv, dbeta, h, pair, origin, length, count, D)
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    U = tl.trans(load_by_chunk(written, pair, tokens, cv, count, D))
    Z = tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, D))
    # [C, C]
    dP = dot(tdo, tl.trans(U), D)
    own = tl.sum(tl.where(i == j, dP, 0.0), 1)
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    dL = tl.where(i > j, dot(Z, tl.trans(U), D), 0.0).to(D.DTYPE)
    d_scale = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # q e^M, k e^M and k e^-M: [C, BK]
        if tl.bfloat16 == D.DTYPE:
            leave = tl.load(decays + (pair * 4 + 3) * D.K + ck, mask=ck < limit, other=0.0)
            M = leave[None, :] - fine_gate_sums(tl.where(j >= i, 1.0, 0.0), gates, D) + gates
            up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
            x = load_tokens(q_read, origin, h, D.H, D.K, tokens, ck, count, D)
            z = load_tokens(k_read, origin, h, D.H, D.K, tokens, ck, count, D)
            y = load_tokens(k_written, origin, h, D.H, D.K, tokens, ck, count, D)
        else:
            tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
            tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
            M = gate_sums(middle_matrix(tokens, D.C), gates)
            up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
            x, z, y = tq * up, tk * up, tk * down
            S *= exp(tl.sum(tl.where(i < D.C // 2, gates, 0.0).to(tl.float32), 0))[None, :]
            dS *= exp(tl.sum(tl.where(i >= D.C // 2, gates, 0.0).to(tl.float32), 0))[None, :]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        # The gradients of q e^M / scale, of k e^M and of k e^-M: [C, BK]
        tdk = dot(U, dS, D)
        leaving = tl.sum(y * tdk, 0)
        tdq = added_dot(dP, y, dot(tdo, S, D), D)
        tde = added_dot(dL, y, dot(Z, S, D), D)
        tdk = added_dot(tl.trans(dL), z, tdk, D)
        by_queries = added_dot(tl.trans(dP), x, tl.full([D.C, D.BK], 0, tl.float32), D)
        gate_terms = x * (tdq * factor) + z * tde - y * (tdk + by_queries * factor)
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), gate_terms, tl.bfloat16 == D.DTYPE) + (edge + leaving)[None, :]
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += own[:, None] * y
        d_scale += tl.sum(x * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * (up * factor), tokens, ck, length, D.H, D.K, D.SIGN)
        tdk = (tdk + (by_queries + own[:, None] * x) * factor) * down + tde * up
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))


@triton.jit
def store_value_gradients(beta, written, d_written, dv, dbeta, h, pair, origin, length, count, D: tl.constexpr):
    """Store dv and dbeta of a chunk."""
    tokens = tl.arange(0, D.C)
    tbeta = load_beta(beta, origin, h, tokens, count, D)
    over_beta, tdbeta = 1 / tbeta, tl.full([D.C], 0, tl.float32)
    for v0 in range(0, runtime_bound(D.V, length), BLOCK):
        block = v0 + tl.arange(0, BLOCK)
        # [BLOCK, C]: U and -dV
        part = load_whole(written, pair, tokens, block, count, D)
        d_part = load_whole(d_written, pair, tokens, block, count, D)
        tdbeta -= tl.sum(part * (d_part * over_beta[None, :]), 0)
        store_tile(at(dv, origin, h, D.H, D.V), -tl.trans(d_part), tokens, block, length, D.H, D.V, D.SIGN)
    store_rows(dbeta + origin.to(tl.int64) * D.H + h, tdbeta * over_beta, tokens, length, D)


@triton.jit
def added_dot(a, b, c, D: tl.constexpr):
    """Return c + a @ b in float32, for a in DTYPE. b: in bfloat16 where DTYPE is, else in float32, with all its digits."""
    if tl.bfloat16 == D.DTYPE:
        return tl.dot(a, b, c)
    else:
        return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def load_by_chunk(x, pair, tokens, d, count, D: tl.constexpr, LOW: tl.constexpr = False):
    """Load U or -beta * Y of a (chunk, head) pair, transposed, [BD, C], or with LOW what its rounding to bfloat16 lost."""
    W: tl.constexpr = 2 * D.C if tl.bfloat16 == D.DTYPE else D.C
    p = x + (pair * D.V + d[:, None]) * W + tokens[None, :] + LOW * D.C
    return tl.load(
        p, mask=(d < tl.where(count > 0, D.V, 0))[:, None], other=0.0
    )  # 0 is stored for tokens from `count` on


@triton.jit
def load_whole(x, pair, tokens, d, count, D: tl.constexpr):
    """Load U or -beta * Y of a pair, transposed, [BD, C], in float32, both terms where there are two."""
    tile = load_by_chunk(x, pair, tokens, d, count, D).to(tl.float32)
    if tl.bfloat16 == D.DTYPE:
        tile += load_by_chunk(x, pair, tokens, d, count, D, True).to(tl.float32)
    return tile


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
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    U = tl.trans(load_by_chunk(written, pair, tokens, cv, count, D))
    Z = tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, D))
    # [C]
    d_scale = tl.full([D.C], 0, tl.float32)
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
        none = tl.full([D.C, D.BK], 0, tl.float32)
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
