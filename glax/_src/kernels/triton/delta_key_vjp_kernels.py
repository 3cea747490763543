"""Compute the gradient of a chunk of the delta rule with per-key gates. One program has one chunk and one head.

S is the state before the chunk and dS' = dL/dS after it. U and Y are those of `delta_state_kernels`, and z_i = -beta_i y_i. G_i
is the sum of the log gates of a chunk through token i. Products with e^{G_i - G_j} apply to every channel:

    dP_ij = do_i . u_j, j <= i      dL_ij = z_i . u_j, j < i        the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j})
    de_i  = e^{G_i} (S z_i) + sum_j dL_ij k_j e^{G_i - G_j}         beta_i times the gradient of e_i = beta_i k_i
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i (scale dP_ij q_i + dL_ij k_i) e^{G_i - G_j} + de_j
    dv_i  = -z_i                    dbeta_i = y_i . u_i / beta_i

The gradient of a log gate sums over all pairs of tokens that the gate decays, one before it and one at or after it:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s (dk_s from dS') + sum_{s >= t} (q_s dq_s + k_s de_s - k_s (dk_s within))

without the terms of a token with itself, which no gate decays. "within" are the terms of the pairs inside the chunk.

Where the gates are in range, both states are used at the chunk's middle, as e^E S and e^R dS' of `delta_key_kernels`. With
bfloat16 inputs they are given there, else this kernel brings them there and forms the operands again. All products then have
the operands q e^M, k e^M and k e^{-M} of that kernel, and only the results are decayed, by e^M or e^{-M}. In dg the terms of
pairs within the chunk cancel except for the pairs across a gate: both sides are products of the same operands.
"""

from glax._src.kernels.triton.delta_key_kernels import load_beta
from glax._src.kernels.triton.delta_vjp_kernels import store_rows
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    LOG2E,
    at,
    dot,
    exp,
    fine_gate_sums,
    gate_sums,
    load_key_gates,
    load_state,
    load_tokens,
    middle_matrix,
    runtime_bound,
    store_tile,
)
from glax._src.kernels.triton.vjp_kernels import term_sums

BLOCK = tl.constexpr(16)  # columns of V that are read together for dv and dbeta


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
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
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
    d_scale = tl.zeros([D.C], tl.float32)
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
        by_queries = added_dot(tl.trans(dP), x, tl.zeros([D.C, D.BK], tl.float32), D)
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
    over_beta, tdbeta = 1 / tbeta, tl.zeros([D.C], tl.float32)
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
