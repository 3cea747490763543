"""Compute the gradient of a chunk of the delta rule with per-key gates. One program has one chunk and one head.

S is the state before the chunk and dS' = dL/dS after it. U and Y are those of `delta_state_kernels`, e_i = beta_i k_i, and G_i is
the sum of the log gates of a chunk through token i. Products with e^{G_i - G_j} apply to every channel:

    dP_ij = do_i . u_j, j < i       dL_ij = -y_i . u_j, j < i       the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j} + (do_i . u_i) k_i)
    de_i  = -e^{G_i} (S y_i) + sum_j dL_ij k_j e^{G_i - G_j}
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i (scale dP_ij q_i + dL_ij e_i) e^{G_i - G_j}
            + scale (do_j . u_j) q_j + beta_j de_j
    dv_i  = beta_i y_i              dbeta_i = y_i . u_i / beta_i = y_i . v_i + k_i . de_i

The gradient of a log gate sums over all pairs of tokens that the gate decays, one before it and one at or after it:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s (dk_s from dS')
           + sum_{s >= t} (q_s (dq_s - own) + e_s de_s - k_s (dk_s within))

"own" is the term of a token with itself, which no gate decays. "within" is the term of the pairs inside the chunk. Both use the
same factors, q, e and k scaled to 16 bits, so they cancel however dP and dL were rounded.
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
    half_fine_dot,
    load_key_gates,
    load_key_sums,
    load_state,
    load_tile,
    runtime_bound,
    store_tile,
)
from glax._src.kernels.triton.vjp_kernels import term_sums

BLOCK = tl.constexpr(16)  # columns of V that are read together for dv and dbeta


@triton.jit
def delta_key_gradient(
    q, k, beta, g, last, do, written, written_low, d_written, d_written_low, scale, states, d_states, table,
    dq, dk, dv, dbeta, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg [rows, H, K], dv [rows, H, V], dbeta [rows, H] and dscale [chunks, H] of a chunk.

    BV holds all of V; each iteration takes BK columns of the states [chunks, H, V, K]. last: the sums of `delta_key_pairs`. Where
    gates are out of range, `exact_delta_key_gradient` computes dq, dk, dg and dscale again.
    """
    h, e = tl.program_id(0) % H, tl.program_id(0) // H
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, K, 0)  # padding has no state
    tbeta = load_beta(beta, origin, h, tokens, count, H, SIGN)
    # [C]: dbeta, and do_i . u_i
    tdbeta, own = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for v0 in range(0, runtime_bound(V, length), BLOCK):
        block = v0 + tl.arange(0, BLOCK)
        # [C, BLOCK]
        part = load_whole(written, written_low, origin, h, tokens, block, count, H, V, SIGN, DTYPE)
        d_part = load_whole(d_written, d_written_low, origin, h, tokens, block, count, H, V, SIGN, DTYPE)
        own += tl.sum(load_tile(at(do, origin, h, H, V), tokens, block, count, H, V, SIGN) * part, 1)
        store_tile(at(dv, origin, h, H, V), d_part * tbeta[:, None], tokens, block, length, H, V, SIGN)
        tdbeta += tl.sum(part * d_part, 1)
    store_rows(dbeta + origin.to(tl.int64) * H + h, tdbeta / tbeta, tokens, length, H, SIGN)
    # [C, BV]
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    U = load_tile(at(written, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    Y = load_tile(at(d_written, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    d_scale = tl.zeros([C], tl.float32)
    # [C, C]
    dP = tl.where(i > j, dot(tdo, tl.trans(U), DTYPE, PRECISION), 0.0).to(DTYPE)
    dL = tl.where(i > j, -dot(Y, tl.trans(U), DTYPE, PRECISION), 0.0).to(DTYPE)
    for k0 in range(0, runtime_bound(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, H, V, K)
        dS = load_state(d_states, e, h, cv, ck, limit, H, V, K)
        # [BK]
        both = load_key_sums(last, e, h, ck, count, H, K)
        enter = load_key_sums(last, e, h, ck, count, H, K, True)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * exp(both)
        # Scale operands: [C, BK]
        M = (both - enter)[None, :] - fine_gate_sums(tl.where(j >= i, 1.0, 0.0), gates, DTYPE) + gates
        up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
        x, z, y = tq * up * factor, tk * up * tbeta[:, None], tk * down
        dq_pairs = half_fine_dot(dP, y, DTYPE, PRECISION)
        de_pairs = half_fine_dot(dL, y, DTYPE, PRECISION)
        dk_pairs = half_fine_dot(tl.trans(dP), x, DTYPE, PRECISION) + half_fine_dot(tl.trans(dL), z, DTYPE, PRECISION)
        # The decays of S and dS', e^{M_i} e^E and e^{-M_j} e^R, are products of factors in range (`common.limits`).
        entering = up * exp(enter)[None, :]
        tdq = dot(tdo, S, DTYPE, PRECISION) * entering
        tde = -dot(Y, S, DTYPE, PRECISION) * entering
        tdk = dot(U, dS, DTYPE, PRECISION) * (down * exp(both - enter)[None, :])
        leaving = tk * tdk
        gate_terms = (
            tq * tdq * factor + tk * tde * tbeta[:, None] - leaving + (x * dq_pairs + z * de_pairs - y * dk_pairs)
        )
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), gate_terms, tl.bfloat16 == DTYPE)
        tdg += (edge + tl.sum(leaving, 0))[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        tdq += dq_pairs * up + own[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, H, K), tdq * factor, tokens, ck, length, H, K, SIGN)
        tde += de_pairs * up
        tdk += dk_pairs * down + (own * factor)[:, None] * tq + tbeta[:, None] * tde
        store_tile(at(dk, origin, h, H, K), tdk, tokens, ck, length, H, K, SIGN)
    tl.store(dscale + e.to(tl.int64) * H + h, tl.sum(d_scale, 0))


@triton.jit
def load_whole(
    x, low, origin, h, tokens, d, count, H: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load x[tokens, d], [C, BD], in float32. bfloat16 x [rows, H, D] has a second term, low."""
    tile = load_tile(at(x, origin, h, H, D), tokens, d, count, H, D, SIGN).to(tl.float32)
    if tl.bfloat16 == DTYPE:
        tile += load_tile(at(low, origin, h, H, D), tokens, d, count, H, D, SIGN).to(tl.float32)
    return tile
