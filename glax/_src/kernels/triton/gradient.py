"""Compute the gradient of a chunk from the states at both its ends. One program has one chunk and GROUP heads.

Heads that share a query, key or value are processed by one program in order. It adds their gradients in memory, so that no
array has H heads and the order of the sum is fixed.

S is the state where the chunk begins and dS = dL/dS where it ends. P_ij = sum_k q_ik k_jk e^{G_ik - G_jk} and dP_ij = do_i .
v_j, for j < i:

    dq_i = e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j} + (do_i . v_i) k_i
    dk_j = e^{G_last - G_j} (dS v_j) + sum_i dP_ij q_i e^{G_i - G_j} + (do_j . v_j) q_j
    dv_j = dS^T (k_j e^{G_last - G_j}) + sum_i P_ij do_i + (q_j . k_j) do_j

The gradient of a log gate sums over all pairs of tokens that the gate decays: one token before it and one at or after it.

    dg_t = e^{G_last} sum_v S dS + sum_{s >= t} (q_s (dq_s - own) - k_s (dk_s within)) + sum_{s < t} k_s (dk_s from dS)

"own" is the term of a token with itself, which no gate decays. "within" is the term of the pairs inside the chunk. No term is a
difference of sums over more than a chunk, so mild gates lose no digits beside strong ones, at any T.

**Gates out of range** of the fast form: `exact_gradient` and `wide_exact_gradient` compute dq, dk and dg of such chunks again.
Pairs of tokens are log2(C) products, each with a reference between its tokens, so that no exponent is positive. A kernel that
held both forms would need more registers and take three times as long to compile. dv does not change.

**Wide values**: two kernels share the chunk among programs. A program of `wide_key_gradient` has a block of the channels of K and
sums over V; one of `wide_value_gradient` has a block of the columns of V and sums over K. So no program holds all of V, and most
loads are in a pipelined loop.

The gradients of head gates and of the scale are sums over K, also in their terms of pairs of tokens, since P is such a sum. Each
program stores those of its own channels, and XLA adds them in a fixed order. "K / BK" in shapes is rounded up.

**Arguments of helpers**: h is a head, e the index of a chunk, n its sequence, and block the number of a block of channels or
columns. origin, length and count are the row of the chunk's first token, the rows to write and the rows with tokens
(`tiles.chunk_of`). tokens are 0 to C - 1, ck and cv the channels of K and columns of V of a block. The arrays of a kernel's
signature are addresses in device memory; tiles such as tq and tdk are in registers. D has the constants of the launch
(`launch.Dimensions`).
"""

import math

import jax.numpy as jnp

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.triton.config import GradientConfig, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch, tl, triton
from glax._src.kernels.triton.operands import (
    EXACT_WARPS,
    PAIRS_PER_PROGRAM,
    Operands,
    dimensions,
    gates_of,
)
from glax._src.kernels.triton.segments import Segments
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    at,
    chunk_of,
    dot,
    exact_factors,
    exp,
    gate_sums,
    half_fine_dot,
    halving,
    load_head_sums,
    load_key_gates,
    load_key_sums,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)


@triton.jit
def gradient(
    q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Compute dq [rows, H // GQ, K], dk [rows, H // GK, K], dv [rows, H // GV, V], dscale [chunks, H] and dg of a chunk.

    states, d_states [chunks, H, K, V]: S and dS. dg: [rows, H, K] for key gates, [rows, H] for head gates, and the chunk's
    sum [chunks, H] for constant gates. BV holds all of V; each iteration takes BK rows of the states. decayed: the
    cumulative sums G of head gates, or `last` of `scale_operands`, as are k_scaled and scores. Where key gates are out of
    range, `exact_gradient` computes dq, dk and dg again; with key gates, GROUP is 1. GQ, GK, GV: how many neighbouring heads
    are summed in dq, dk and dv. Each divides GROUP.
    """
    first, e = tl.program_id(0) % (D.H // D.GROUP) * D.GROUP, tl.program_id(0) // (D.H // D.GROUP)
    if D.GROUP == 1:
        head_gradient(
            q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale, first,
            e, D,
        )  # fmt: skip
    else:
        for member in tl.range(0, runtime_bound(D.GROUP, e), num_stages=1):
            head_gradient(
                q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale,
                first + member, e, D,
            )  # fmt: skip
            tl.debug_barrier()  # waits for the sums of all threads, which the next head reads


@triton.jit
def head_gradient(
    q, k, v, g, decayed, k_scaled, scores, do, scale, states, d_states, table, dq, dk, dv, dg, dscale, h, e,
    D: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of head h of chunk e, and add it in memory to the sums over the heads that share q, k or v. The
    operands are those of `gradient`."""
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    if D.FORM == "key":
        key_gate_gradient(
            q, k, v, g, decayed, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D,
        )  # fmt: skip
        Pt = tl.trans(load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D))
    else:
        Pt = head_gate_gradient(
            q, k, v, decayed, do, states, d_states, dq, dk, dg, dscale, factor, h, e, n, origin, length, count, D,
        )  # fmt: skip
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    tdv = tl.full([D.C, D.BV], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        if D.FORM == "key":
            x = load_tokens(k_scaled, origin, h, D.H, D.K, tokens, ck, count, D)
        else:
            x = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        tdv += dot(x, load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V), D)
    if D.FORM == "head" or D.FORM == "constant":
        G = load_head_sums(decayed, origin, h, n, tokens, count, D)
        last = load_head_sums(decayed, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        tdv *= exp(last - G)[:, None]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    tdv += dot(Pt, tdo, D) * factor
    store_sum(dv, tdv, origin, h, tokens, cv, length, D.V, D.GV, D)


@triton.jit
def key_gate_gradient(
    q, k, v, g, last, do, states, d_states, dq, dk, dg, dscale, factor, h, e, origin, length, count, D: tl.constexpr,
):  # fmt: skip
    """Store dq, dk and dg of key gates, [C, K] each, and dscale of head h of chunk e. q and k are multiplied by e^M and e^-M,
    with M the sums of gates from the chunk's middle.

    last: of `scale_operands`. factor: the scale. origin, length, count: as `chunk_of` returns them. The others are those of
    `gradient`. In dg, the terms q * dq and k * dk of pairs of tokens cancel except for the pairs across a gate. Both use the
    same factors, q and k scaled to 16 bits, so they cancel however dP was rounded.
    """
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    d_diagonal = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    # [C, C]: dP, and its transpose from a product of its own
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), D), 0.0).to(D.DTYPE)
    dPt = tl.where(i < j, dot(tv, tl.trans(tdo), D), 0.0).to(D.DTYPE)
    d_scale = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # Load gates: [C, BK]
        gates = load_tokens(g, origin, h, D.H, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        # [BK]
        both = load_key_sums(last, e, h, ck, count, D)
        enter = load_key_sums(last, e, h, ck, count, D, True)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * exp(both)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        # Scale operands: [C, BK]
        M = whole_gate_sums(middle_matrix(tokens, D.C), gates)
        binary = M * LOG2E
        up, down = tl.exp2(binary), tl.exp2(-binary)
        x, y = tq * up, tk * down
        dq_pairs = half_fine_dot(dP, y, D)
        dk_pairs = half_fine_dot(dPt, x, D)
        # The decays of S and dS, e^{M_i} e^L and e^{-M_j} e^R, are products of factors in range (`common.limits`).
        tdq = dot(tdo, tl.trans(S), D) * (up * exp(enter)[None, :])
        tdk = dot(tv, tl.trans(dS), D) * (down * exp(both - enter)[None, :])
        suffix_terms = (tq * tdq + (x * dq_pairs - y * dk_pairs)) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs * up + d_diagonal[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        tdk += (dk_pairs * down + d_diagonal[:, None] * tq) * factor
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + e.to(tl.int64) * D.H + h, tl.sum(d_scale, 0))


@triton.jit
def head_gate_gradient(
    q, k, v, g, do, states, d_states, dq, dk, dg, dscale, factor, h, e, n, origin, length, count, D: tl.constexpr,
):  # fmt: skip
    """Store dq, dk [C, K], dg [C] and dscale of head h of chunk e, for per-head, constant or no gates; return P with the
    decays, transposed, [C, C] in float32.

    g: the sums G of head gates, or the constant gates [N, H]. n: the sequence. The others are those of `key_gate_gradient`.
    """
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    # [C, C]: dP, and its transpose from a product of its own
    dP = tl.where(i >= j, dot(tdo, tl.trans(tv), D), 0.0)
    dPt = tl.where(i <= j, dot(tv, tl.trans(tdo), D), 0.0)
    if D.FORM != "none":
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        total = load_head_sums(g, origin, h, n, D.C - 1, count, D)
        dP *= exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        decay = exp(tl.where(i <= j, G[None, :] - G[:, None], float("-inf")))
        dPt *= decay
        up, down = exp(G)[:, None], exp(last - G)[:, None]
    dP, dPt = dP.to(D.DTYPE), dPt.to(D.DTYPE)
    Pt = tl.full([D.C, D.C], 0, tl.float32)
    through_start = tl.full([D.C], 0, tl.float32)
    through_end = tl.full([D.C], 0, tl.float32)
    state_products = tl.full([D.BK], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        dS = load_state(d_states, e, h, ck, cv, limit, D.H, D.K, D.V)
        Pt += dot(tk, tl.trans(tq), D)
        tdq = dot(tdo, tl.trans(S), D)
        tdk = dot(tv, tl.trans(dS), D)
        if D.FORM != "none":
            tdq, tdk = tdq * up, tdk * down
            state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        through_start += tl.sum(tq * tdq, 1)
        through_end += tl.sum(tk * tdk, 1)
        tdq += dot(dP, tk, D)
        tdk += dot(dPt, tq, D) * factor
        store_sum(dq, tdq * factor, origin, h, tokens, ck, length, D.K, D.GQ, D)
        store_sum(dk, tdk, origin, h, tokens, ck, length, D.K, D.GK, D)
    Pt = tl.where(i <= j, Pt, 0.0)
    dPt = dot(tv, tl.trans(tdo), D)
    if D.FORM != "none":
        Pt = Pt * decay
    slot = e.to(tl.int64) * D.H + h
    pairs = Pt * dPt
    tl.store(dscale + slot, tl.sum(tl.sum(pairs, 1) + through_start, 0))
    if D.FORM != "none":
        pairs = tl.where(i < j, pairs, 0.0)
        # Of the gate of token t: the terms of S with tokens from t on, and the terms of dS with tokens before t.
        reaching = tl.sum(tl.where(j >= i, (through_start * factor)[None, :], 0.0), 1)
        leaving = tl.sum(tl.where(j < i, through_end[None, :], 0.0), 1)
        within = tl.sum(pairs, 0) - tl.sum(pairs, 1)
        within = tl.sum(tl.where(j >= i, (within * factor)[None, :], 0.0), 1)
        tdg = tl.where(tokens < count, reaching + leaving + within + tl.sum(state_products, 0) * exp(total), 0.0)
        if D.FORM == "constant":
            tl.store(dg + slot, tl.sum(tdg, 0))
        else:
            p = dg + origin.to(tl.int64) * D.H + h
            tl.store(p + (D.SIGN * D.H) * tokens, tdg.to(dg.dtype.element_ty), mask=tokens < length)
    return Pt


@triton.jit
def store_sum(
    x, value, row, h, tokens, d, count, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Add value [C, BD], the gradient of head h, to x [rows, H // GROUP, WIDTH] in memory. The first of GROUP neighbouring
    heads overwrites what x held.

    row: the row of the chunk's first token. tokens, d: index vectors [C] and [BD]. count: the tokens to store. All threads must
    have stored one head before the next head is added.
    """
    HEADS: tl.constexpr = D.H // GROUP
    p = at(x, row, h // GROUP, HEADS, WIDTH)
    if GROUP > 1:
        value += load_tile(p, tokens, d, tl.where(h % GROUP == 0, 0, count), HEADS, WIDTH, D.SIGN)
    store_tile(p, value, tokens, d, count, HEADS, WIDTH, D.SIGN)


@triton.jit
def term_sums(matrix, x, SPLIT: tl.constexpr):
    """Return matrix @ x in float32, for a matrix [C, C] of 0 and 1 and terms x [C, BD] in float32 whose sums nearly cancel.

    With SPLIT 16 bits of x are used, in two bfloat16 products; otherwise full precision, in three TF32 products.
    """
    if SPLIT:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        matrix = matrix.to(tl.bfloat16)
        return tl.dot(matrix, low, tl.dot(matrix, high))
    else:
        return tl.dot(matrix, x, input_precision="tf32x3")


@triton.jit
def exact_gradient(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Overwrite dq, dk, dg and dscale of `gradient`, in place, for each chunk and head whose key gates are out of range.

    max_abs_cumsum: [chunks, H], of `scale_operands`. pairs: [1], the number of (chunk, head) pairs; a program tests PAIRS of
    them. The others are those of `gradient`.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % D.H, pair // D.H
            origin, length, count, n = chunk_of(table, e)
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
    """Store dq, dk and dg of a chunk, [C, K] each, and dscale, for key gates of any size. The operands are those of
    `key_gate_gradient`."""
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)
    # [C, BV]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    d_diagonal = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), D), 0.0).to(D.DTYPE)
    d_scale = tl.full([D.C], 0, tl.float32)
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
        dq_pairs = tl.full([D.C, D.BK], 0, tl.float32)
        dk_pairs = tl.full([D.C, D.BK], 0, tl.float32)
        pairs = tl.full([D.C, D.BK], 0, tl.float32)
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


@triton.jit
def wide_key_gradient(q, k, v, g, decayed, do, scale, states, d_states, table, dq, dk, dg, dscale, D: tl.constexpr):
    """Compute BK channels of dq [rows, H // GQ, K] and dk [rows, H // GK, K], and the gradients of gates and scale.

    Each iteration takes BV columns of the states [chunks, H, K, V]. dg: [rows, H, K] for key gates; else each block of channels
    stores its part of the sum, [rows, H, K / BK] for head gates and [chunks, H, K / BK] for constant gates. dscale: the parts
    of each block, [chunks, H, K / BK]. The other operands are those of `gradient`.
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
    """Store the gradients that `wide_key_gradient` computes, for head h of chunk e and one block of BK channels. block: the
    number of the block."""
    origin, length, count, n = chunk_of(table, e)
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
    """Return dP = do v^T [C, C], do S^T and v dS^T [C, BK], and with GATED sum_v S dS [BK] (else zeros), in float32, for head h
    of chunk e and block number `block` of BK channels. origin, length, count: as `chunk_of` returns them."""
    tokens, ck = tl.arange(0, D.C), block * D.BK + tl.arange(0, D.BK)
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    dP = tl.full([D.C, D.C], 0, tl.float32)
    tdq = tl.full([D.C, D.BK], 0, tl.float32)
    tdk = tl.full([D.C, D.BK], 0, tl.float32)
    state_products = tl.full([D.BK], 0, tl.float32)
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
    """Store BK channels of dq, dk and dg of key gates as `key_gate_gradient` does, and their part of dscale.

    tq, tk: a chunk's queries and keys, [C, BK]. dP, tdq, tdk, state_products: the results of `sums_over_values`. block: the
    number of the block. The others are those of `key_gate_gradient`.
    """
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
    """Store BK channels of dq and dk for per-head, constant or no gates, and these channels' part of dg and dscale. The
    operands are those of `wide_key_gates` and `head_gate_gradient`."""
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
    """Store the scalar `value` as x[e, h, block] of x [chunks, H, K / BK]."""
    tl.store(x + (e.to(tl.int64) * D.H + h) * D.NK + block, value)


@triton.jit
def wide_value_gradient(q, k, decayed, k_scaled, scores, do, scale, d_states, table, dv, D: tl.constexpr):
    """Compute BV columns of dv [rows, H // GV, V]. Each iteration takes BK rows of d_states [chunks, H, K, V], the states dS.

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
    """Store dv of head h of chunk e in block number `block` of BV columns, [C, BV]. Without key gates the scores P are summed
    over K here too."""
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), block * D.BV + tl.arange(0, D.BV)
    j, i = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    tdv = tl.full([D.C, D.BV], 0, tl.float32)
    Pt = tl.full([D.C, D.C], 0, tl.float32)
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


@triton.jit
def wide_exact_gradient(
    q, k, v, g, do, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Overwrite BK channels of the results of `wide_key_gradient`, in place, for each chunk and head whose key gates are out of
    range.

    max_abs_cumsum: [chunks, H], of `scale_operands`. pairs: [1], the number of (chunk, head) pairs; PAIRS of them are tested by
    the programs of each block of channels.
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
    """Store BK channels of dq, dk and dg of head h of chunk e, [C, BK] each, and their part of dscale [chunks, H, K / BK], for
    key gates of any size. block: the number of the block of channels."""
    origin, length, count, n = chunk_of(table, e)
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


def chunk_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Return (dq, dk, dv, the gradient of the gates, the gradient of the scale [chunks, H]).

    dq, dk, dv: [B, T, heads, width]; heads is H, or fewer where a program sums heads that share an array. The gradient of the
    gates: [B, T, H, K] for per-key gates, [B, T, H] for per-head gates, and the sums of chunks [chunks, H] for constant ones;
    without gates it has no meaning. d_output: [B, T, H, V]. chunks: the segments of the table, one for each chunk. operands:
    the result of `chunk_operands`. before, behind: [chunks, H, K, V], S before and dL/dS behind every chunk.
    """
    gradients = wide_gradients if config.columns else narrow_gradients
    return gradients(r, d_output, config, chunks, operands, before, behind)


def narrow_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Compute the results of `chunk_gradients` by programs that hold all of V."""
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    gates, form = gates_of(r)
    group, summed = shared_heads(r, chunks)
    per_chunk = ((chunks.count, H), jnp.float32)
    d_gates = {"key": ((B, T, H, K), gates.dtype), "head": ((B, T, H), gates.dtype)}
    shape = dict(dimensions(r, config.chunk), BV=width(V))
    dq, dk, dv, dg, d_scale = launch(
        gradient,
        H // group * chunks.count,
        (r.q, r.k, r.v, gates, operands.gates, operands.k, operands.scores, d_output, r.scale, before, behind, chunks.table),
        [*gradient_shapes(r, summed), d_gates.get(form, per_chunk), per_chunk],
        **shape, BK=min(config.rows, width(K)), warps=config.warps, stages=config.stages,
        GROUP=group, GQ=summed[0], GK=summed[1], GV=summed[2],
    )  # fmt: skip
    if form == "key":
        pairs, found = jnp.full(1, H * chunks.count, jnp.int32), (dq, dk, dg, d_scale)
        dq, dk, dg, d_scale = launch(
            exact_gradient_passed_outputs if ALIASES_ARE_PASSED else exact_gradient,
            -(-H * chunks.count // PAIRS_PER_PROGRAM),
            (r.q, r.k, r.v, gates, d_output, r.scale, before, behind, chunks.table, operands.max_abs_cumsum, pairs, *found),
            [(x.shape, x.dtype) for x in found],
            in_place={11 + i: i for i in range(4)},
            **shape, BK=16, PAIRS=PAIRS_PER_PROGRAM, warps=4 if r.q.dtype == jnp.bfloat16 else EXACT_WARPS, stages=1,
        )  # fmt: skip
    return dq, dk, dv, dg, d_scale


def wide_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Compute the results of `chunk_gradients` by programs that hold a block of K or of V. Sums over K are stored in parts, one
    for each block of K, and added here."""
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    gates, form = gates_of(r)
    group, summed = shared_heads(r, chunks)
    rows, columns = min(config.rows, width(K)), min(config.columns, width(V))
    blocks, blocks_of_v = -(-K // rows), -(-V // columns)
    parts = ((chunks.count, H, blocks), jnp.float32)
    d_gates = {"key": ((B, T, H, K), gates.dtype), "head": ((B, T, H, blocks), jnp.float32)}
    shape = dict(dimensions(r, config.chunk), BK=rows, BV=columns)
    options: dict = dict(shape, warps=config.warps, stages=config.stages, GROUP=group)
    d_query, d_key, d_value = gradient_shapes(r, summed)
    values = (r.q, r.k, operands.gates, operands.k, operands.scores, d_output, r.scale, behind, chunks.table)
    (dv,) = launch(
        wide_value_gradient, H // group * chunks.count * blocks_of_v, values, [d_value], **options, GV=summed[2]
    )
    dq, dk, dg, d_scale = launch(
        wide_key_gradient,
        H // group * chunks.count * blocks,
        (r.q, r.k, r.v, gates, operands.gates, d_output, r.scale, before, behind, chunks.table),
        [d_query, d_key, d_gates.get(form, parts), parts],
        **options, GQ=summed[0], GK=summed[1],
    )  # fmt: skip
    if form == "key":
        pairs, found = jnp.full(1, H * chunks.count, jnp.int32), (dq, dk, dg, d_scale)
        dq, dk, dg, d_scale = launch(
            wide_exact_gradient_passed_outputs if ALIASES_ARE_PASSED else wide_exact_gradient,
            -(-H * chunks.count // PAIRS_PER_PROGRAM) * blocks,
            (r.q, r.k, r.v, gates, d_output, r.scale, before, behind, chunks.table, operands.max_abs_cumsum, pairs, *found),
            [(x.shape, x.dtype) for x in found],
            in_place={11 + i: i for i in range(4)},
            **shape, PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
        )  # fmt: skip
    elif form != "none":
        dg = dg.sum(-1).astype(gates.dtype if form == "head" else jnp.float32)
    return dq, dk, dv, dg, d_scale.sum(-1)


def gradient_shapes(r: Recurrence, summed):
    """Return (shape, dtype) of dq, dk and dv. The shapes are [B, T, H / count, width].

    summed: three numbers, how many neighbouring heads (count) a kernel sums in each. The dtype is the array's own if the array
    has H heads, else float32.
    """
    (B, T), H = r.q.shape[:2], r.num_heads
    return [
        ((B, T, H // count, x.shape[3]), x.dtype if x.shape[2] == H else jnp.float32)
        for x, count in zip((r.q, r.k, r.v), summed, strict=True)
    ]


def shared_heads(r: Recurrence, chunks: Segments) -> tuple[int, list[int]]:
    """Return (the number of heads that a program takes in order, [how many of these share one head of q, of k and of v])."""
    group = heads_of_a_program(r, chunks.count)
    return group, [math.gcd(group, r.num_heads // x.shape[2]) for x in (r.q, r.k, r.v)]


def heads_of_a_program(r: Recurrence, chunks: int) -> int:
    """Return how many heads a program of the gradient processes in order: the largest divisor of the number of heads that share
    an array with which at least four programs for each multiprocessor are left, or 1. chunks: the number of chunks.

    The wide kernels have more programs than are counted here, so they fill the GPU too. With key gates the result is 1: their
    gradient has every head, and the exact kernels overwrite the results of single heads.
    """
    H = r.num_heads
    if r.decay.form == "key":
        return 1
    shared = max(H // x.shape[2] for x in (r.q, r.k, r.v))
    enough = (n for n in range(1, shared + 1) if shared % n == 0 and H // n * chunks >= 4 * multiprocessors())
    return max(enough, default=1)
