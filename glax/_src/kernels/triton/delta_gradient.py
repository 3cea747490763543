"""Compute the gradient of a chunk of the delta rule. One program has one chunk and one head.

S is the state before the chunk and dS' = dL/dS after it. U and Y are those of `delta_scan`, B_i is of `delta_pairs`, and
D_ij = e^{G_i - G_j}:

    dP_ij = do_i . u_j, j <= i      dL_ij = -y_i . u_j, j < i      the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j D_ij dP_ij k_j)
    de_i  = -e^{B_i} (S y_i) + sum_j e^{B_i - G_j} dL_ij k_j
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i (D_ij scale dP_ij q_i + e^{B_i - G_j} dL_ij e_i)
    dv_i  = w_i y_i                 dw_i = v_i y_i

Beta stands for e_i = beta_i k_i and w_i = beta_i: then dk_j has the term beta_j de_j, and dbeta_i = y_i . v_i + k_i . de_i. The
sums of k_j over dL and its transpose are one product with a symmetric matrix. The gradient of a log gate sums over all pairs of
tokens that the gate decays, as in `gradient`, and never over more than a chunk.

**With per-key gates**, z_i = -y_i, and products with e^{G_i - G_j} apply to every channel:

    dP_ij = do_i . u_j, j <= i      dL_ij = z_i . u_j, j < i        the gradients of the pairs' scores, without decays
    dq_i  = scale (e^{G_i} (S do_i) + sum_j dP_ij k_j e^{G_i - G_j})
    de_i  = e^{B_i} (S z_i) + sum_j dL_ij k_j e^{B_i - G_j}
    dk_j  = e^{G_last - G_j} (dS' u_j) + sum_i (scale dP_ij q_i e^{G_i - G_j} + dL_ij e_i e^{B_i - G_j})
    dv_i  = -w_i z_i                dw_i = -v_i z_i

With beta, z_i = -beta_i y_i and k stands for e in these formulas: de_i is then beta_i times the gradient of e_i, and

    dk_j gains de_j                 dv_i = -z_i                     dbeta_i = y_i . u_i / beta_i

The gradient of a log gate sums over all pairs of tokens that the gate decays, one before it and one at or after it:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s (dk_s from dS') + sum_{s >= t} (q_s dq_s + e_s de_s - k_s (dk_s within))

without the terms of a token with itself, which no gate decays. "within" are the terms of the pairs inside the chunk. With
BEFORE e_s de_s counts for s > t alone, without the pair of e with the token before it, which no gate decays either.

Where the gates are in range, both states are used at the chunk's middle, as e^E S and e^R dS' of `delta_pairs`. With
bfloat16 inputs they are given there, else this kernel brings them there and forms the operands again. All products then have
the operands q e^M, e e^M and k e^{-M} of that kernel, and only the results are decayed, by e^M or e^{-M}. In dg the terms of
pairs within the chunk cancel except for the pairs across a gate: both sides are products of the same operands.

Where they are out of range, `exact_delta_key_gradient` computes dq, dk, dg, dscale and de again. Pairs of tokens are log2(C)
products, each with a reference between its tokens, so that no exponent is positive. dv, dbeta and dw do not change.

**Arguments of helpers**: h is a head, e the index of a chunk, and pair is e H + h. origin, length and count are the row of the
chunk's first token, the rows to write and the rows with tokens (`tiles.chunk_of`). tokens are 0 to C - 1, ck and cv the
channels of K and columns of V of a block. The arrays of a kernel's signature are addresses in device memory; tiles such as tq
and tdk are in registers. D has the constants of the launch (`launch.Dimensions`).
"""

from glax._src.kernels.triton.delta_pairs import erase_decay, load_beta, load_erase, load_rows
from glax._src.kernels.triton.gradient import term_sums
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    add_fine_dot,
    at,
    chunk_of,
    dot,
    dot_onto,
    exact_factors,
    exp,
    fine_gate_sums,
    gate_sums,
    half_fine_dot,
    halving,
    later_half_before,
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
    split,
    store_tile,
)

BLOCK = tl.constexpr(16)  # columns of V that are read together for dv and dbeta


@triton.jit
def delta_gradient(
    q, k, v, erasure, write, g, do, scores, written, d_written, scale, states, d_states, table, dq, dk, dv, d_erasure,
    d_write, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk [rows, H, K], dv [rows, H, V], dscale [chunks, H], dg and the gradient of the erasure of a chunk.

    erasure, d_erasure: beta [rows, H] or e [rows, H, K], and its gradient. write, d_write: w [rows, H, V] and its gradient,
    which are not touched unless ERASURE is "erase+write". scores: P. written, d_written [rows, H, V]: U and Y. states, d_states
    [chunks, H, V, K]: S and dS'. dg: [rows, H] for head gates, and the chunk's sum [chunks, H] for constant gates. Each
    iteration takes BK columns of states and d_states. BV holds all of V; but with IN_BLOCKS sums over V are taken in blocks of
    BV. g: the cumulative sums G of head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    origin, length, count, n = chunk_of(table, e)
    hq, hk = h // (D.H // D.HQ), h // (D.H // D.HK)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    # [C, C]
    if not D.IN_BLOCKS:
        # [C, BV]
        tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
        U = load_tokens(written, origin, h, D.H, D.V, tokens, cv, count, D)
        Y = load_tokens(d_written, origin, h, D.H, D.V, tokens, cv, count, D)
        if D.ERASURE != "beta":
            U, Y = U.to(D.DTYPE), Y.to(D.DTYPE)
            dL = value_gradients(v, write, written, d_written, dv, d_write, h, origin, length, count, D)
        else:
            tbeta = load_rows(erasure, origin, h, tokens, count, D)
            tdbeta = scaled_value_gradients(Y, tbeta, v, dv, h, tokens, cv, origin, length, count, D)
        dP = dot(tdo, tl.trans(U), D)
    else:
        dP, dL, tdbeta = pairs_of_values(
            erasure, v, write, do, written, d_written, dv, d_write, h, e, origin, length, count, D
        )
        if D.ERASURE == "beta":
            tbeta = load_rows(erasure, origin, h, tokens, count, D)
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
    e_up = up if D.FORM != "none" else 1.0
    if D.BEFORE:
        B = load_head_sums(g, origin, h, n, tokens - 1, count, D)
        e_up = exp(B)[:, None]
        decay = exp(tl.where(i > j, B[:, None] - G[None, :], float("-inf")))
    if D.ERASURE == "beta" and not D.IN_BLOCKS:
        dL = dot(Y, tl.trans(U), D)
    dL = tl.where(i > j, dL * -decay, 0.0)
    products = erase_products(erasure, k, origin, h, length, count, D) * dL
    if D.ERASURE == "beta":
        tdbeta += tl.sum(products, 1)
        products *= tbeta[:, None]
    within, products = gate_terms_of_pairs(pairs, products, factor, D)
    if D.ERASURE == "beta":
        dL = (dL * tbeta[:, None]).to(D.DTYPE)
        by_keys = dL + tl.trans(dL)
    else:
        by_keys = tl.trans(dL.to(D.DTYPE))
    dPt = tl.trans(dP)
    through_start, through_end = tl.full([D.C], 0, tl.float32), tl.full([D.C], 0, tl.float32)
    erased = tl.full([D.C], 0, tl.float32)
    state_products = tl.full([D.BK], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        if D.IN_BLOCKS:
            tdq, tde, tdk, products_of_rows = sums_over_values(
                do, written, d_written, states, d_states, ck, h, e, origin, length, count, D
            )
            tde = -tde
            state_products += products_of_rows
        # [C, BK]
        tq = load_tile(at(q, origin, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, origin, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        if not D.IN_BLOCKS:
            # [BV, BK]
            S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
            dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
            # [C, BK]
            tdq = dot(tdo, S, D)
            tde = -dot(Y, S, D)
            tdk = dot(U, dS, D)
        if D.FORM != "none":
            # One of the two branches has set them.
            tdq, tde, tdk = tdq * up, tde * e_up, tdk * down  # pyright: ignore[reportOperatorIssue]
            if not D.IN_BLOCKS:
                state_products += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        through_start += tl.sum(tq * tdq, 1)
        erased += tl.sum(te * tde, 1)
        through_end += tl.sum(tk * tdk, 1)
        tdq += dot(dP, tk, D)
        if D.ERASURE == "beta":
            tdk += tde * tbeta[:, None] + dot(by_keys, te, D)
        else:
            tdk += dot(by_keys, te, D)
            tde = added_fine_dot(dL, tk, tde, D)
            store_tile(at(d_erasure, origin, h, D.H, D.K), tde, tokens, ck, length, D.H, D.K, D.SIGN)
        tdk += dot(dPt, tq, D) * factor
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    slot = e.to(tl.int64) * D.H + h
    tl.store(dscale + slot, d_scale + tl.sum(through_start, 0))
    row = origin.to(tl.int64) * D.H + h
    if D.ERASURE == "beta":
        store_rows(d_erasure + row, tdbeta + erased, tokens, length, D)
        erased *= tbeta
    if D.FORM != "none":
        after = erased + tl.sum(products, 1) if D.BEFORE else erased
        reaching = (through_start * factor if D.BEFORE else through_start * factor + erased) + within
        through = tl.sum(state_products, 0) * exp(load_head_sums(g, origin, h, n, D.C - 1, count, D))
        store_gate_gradient(dg, slot, row, reaching, after, through_end, through, length, count, D)


@triton.jit
def gate_terms_of_pairs(pairs, products, factor, D: tl.constexpr):
    """Return (the terms of the gates' gradient from pairs within the chunk, [C], and `products` without the pairs that no gate
    decays, [C, C]).

    pairs: (q_i . k_j) times dP_ij, with the decay, [C, C]. products: (e_i . k_j) times dL_ij, with the decay. factor: the
    scale. A pair contributes to the gradients of the gates behind its earlier token, up to its later token.
    """
    if D.BEFORE:
        products = tl.where(tokens_apart(D) > 1, products, 0.0)
        pairs = tl.where(tokens_apart(D) > 0, pairs * factor, 0.0)
        return tl.sum(pairs, 1) - column_sums(pairs + products, D.C), products
    else:
        pairs = tl.where(tokens_apart(D) > 0, pairs * factor + products, 0.0)
        return tl.sum(pairs, 1) - column_sums(pairs, D.C), products


@triton.jit
def scaled_value_gradients(Y, tbeta, v, dv, h, tokens, cv, origin, length, count, D: tl.constexpr):
    """Store dv = beta Y of a chunk, [C, BV], and return y_i . v_i, [C], over the columns cv. Y: [C, BV]. tbeta: [C]. h: the
    head. origin, length, count: as `chunk_of` returns them."""
    Y = Y.to(tl.float32)
    store_tile(at(dv, origin, h, D.H, D.V), Y * tbeta[:, None], tokens, cv, length, D.H, D.V, D.SIGN)
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    return tl.sum(Y * tv.to(tl.float32), 1)


@triton.jit
def pairs_of_values(
    erasure, v, write, do, written, d_written, dv, d_write, h, e, origin, length, count, D: tl.constexpr
):  # fmt: skip
    """Return dO U^T and Y U^T of a chunk, [C, C], and y_i . v_i, [C], as sums over blocks of V. Store dv and dw.

    With key gates, Z of the module's header stands for Y. The last result is 0 without beta and with key gates. With beta and
    key gates, `store_value_gradients` stores dv.
    """
    tokens = tl.arange(0, D.C)
    dP, dL = tl.full([D.C, D.C], 0, tl.float32), tl.full([D.C, D.C], 0, tl.float32)
    tdbeta = tl.full([D.C], 0, tl.float32)
    for v0 in range(0, runtime_bound(D.V, length), D.BV):
        cv = v0 + tl.arange(0, D.BV)
        # [C, BV]
        tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
        U = load_written(written, h, e, origin, tokens, cv, count, D)
        Y = load_written(d_written, h, e, origin, tokens, cv, count, D)
        if D.ERASURE != "beta":
            dX = -Y if D.FORM == "key" else Y
            store_written_gradients(dX, v, write, dv, d_write, h, tokens, cv, origin, length, count, D)
        elif D.FORM != "key":
            tbeta = load_rows(erasure, origin, h, tokens, count, D)
            tdbeta += scaled_value_gradients(Y, tbeta, v, dv, h, tokens, cv, origin, length, count, D)
        dP = dot_onto(tdo, tl.trans(U), dP, D)
        dL = dot_onto(Y, tl.trans(U), dL, D)
    return dP, dL, tdbeta


@triton.jit
def sums_over_values(do, written, d_written, states, d_states, ck, h, e, origin, length, count, D: tl.constexpr):
    """Return dO S, Y S and U dS' of a chunk, [C, BK], and sum_v S dS', [BK], for the channels ck, as sums over blocks of V.
    With key gates Z of the module's header stands for Y."""
    tokens, limit = tl.arange(0, D.C), tl.where(count > 0, D.K, 0)
    none = tl.full([D.C, D.BK], 0, tl.float32)
    tdq, tde, tdk, products = none, none, none, tl.full([D.BV, D.BK], 0, tl.float32)
    for v0 in range(0, runtime_bound(D.V, length), D.BV):
        cv = v0 + tl.arange(0, D.BV)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # [C, BV]
        tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
        U = load_written(written, h, e, origin, tokens, cv, count, D)
        Y = load_written(d_written, h, e, origin, tokens, cv, count, D)
        tdq = dot_onto(tdo, S, tdq, D)
        tde = dot_onto(Y, S, tde, D)
        tdk = dot_onto(U, dS, tdk, D)
        products += S * dS
    return tdq, tde, tdk, tl.sum(products, 0)


@triton.jit
def load_written(x, h, e, origin, tokens, cv, count, D: tl.constexpr):
    """Load U or Y of head h of chunk e, [C, BV], from x [rows, H, V]. With key gates, x is by chunk (`load_by_chunk`), and
    holds -Y or -beta Y in the place of Y."""
    if D.FORM == "key":
        return tl.trans(load_by_chunk(x, e.to(tl.int64) * D.H + h, tokens, cv, count, D))
    else:
        return load_tokens(x, origin, h, D.H, D.V, tokens, cv, count, D)


@triton.jit
def tokens_apart(D: tl.constexpr):
    """Return [C, C], the number of tokens by which row i comes after row j. A token has PER_TOKEN rows, and all gates but its
    first row's are 0."""
    tokens = tl.arange(0, D.C) // D.PER_TOKEN
    return tokens[:, None] - tokens[None, :]


@triton.jit
def near_pairs(pairs, NEAREST: tl.constexpr, D: tl.constexpr):
    """Return `pairs` [C, C] split in two, with 0 elsewhere: (the pairs i > j that are at most NEAREST tokens apart, which no
    gate decays; the pairs further apart)."""
    i, j = tl.arange(0, D.C)[:, None], tl.arange(0, D.C)[None, :]
    decayed = tokens_apart(D) > NEAREST
    return tl.where((i > j) & (decayed == 0), pairs, 0.0), tl.where(decayed, pairs, 0.0)


@triton.jit
def erase_products(erasure, k, origin, h, length, count, D: tl.constexpr):
    """Return E K^T of a chunk, [C, C] in float32, as sums over K; with beta K K^T. erasure: e [rows, H, K], or beta. origin,
    length, count: as `chunk_of` returns them."""
    tokens = tl.arange(0, D.C)
    products = tl.full([D.C, D.C], 0, tl.float32)
    WIDTH: tl.constexpr = D.BK if tl.bfloat16 == D.DTYPE else BLOCK
    for k0 in range(0, runtime_bound(D.K, length), WIDTH):
        ck = k0 + tl.arange(0, WIDTH)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        products += dot(te, tl.trans(tk), D)
    return products


@triton.jit
def store_gate_gradient(dg, slot, row, reaching, after, through_end, through, length, count, D: tl.constexpr):
    """Store dg_t of a chunk, for per-head or constant gates:

        dg_t = through + sum_{i >= t} reaching_i + sum_{i > t} after_i + sum_{j < t} through_end_j

    reaching [C]: the terms q dq and e de less k dk of each token. after [C]: with BEFORE, the terms e de, which count only
    behind t; else not read. through_end [C]: the terms of dS. through: the term <S, dS> of the whole chunk. slot: the index of
    the sum over the chunk in dg [chunks, H], for constant gates. row: the index of the chunk's first token in dg [rows, H], for
    head gates.
    """
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    tdg = tl.sum(tl.where(j >= i, reaching[None, :], 0.0), 1) + tl.sum(tl.where(j < i, through_end[None, :], 0.0), 1)
    if D.BEFORE:
        tdg += tl.sum(tl.where(j > i, after[None, :], 0.0), 1)
    tdg = tl.where(tokens < count, tdg + through, 0.0)
    if D.FORM == "constant":
        tl.store(dg + slot, tl.sum(tdg, 0))
    else:
        store_rows(dg + row, tdg, tokens, length, D)


@triton.jit
def value_gradients(v, write, written, d_written, dv, d_write, h, origin, length, count, D: tl.constexpr):
    """Store dv and dw of a chunk, without beta, and return Y U^T [C, C] from all digits of both factors.

    The gradient of e is formed from this product. If each factor were rounded, the gradient's error would reach the tolerance
    of bfloat16. written, d_written: U and Y, [rows, H, V].
    """
    tokens = tl.arange(0, D.C)
    product = tl.full([D.C, D.C], 0, tl.float32)
    for v0 in range(0, runtime_bound(D.V, length), BLOCK):
        block = v0 + tl.arange(0, BLOCK)
        U = load_tokens(written, origin, h, D.H, D.V, tokens, block, count, D).to(tl.float32)
        Y = load_tokens(d_written, origin, h, D.H, D.V, tokens, block, count, D).to(tl.float32)
        product = add_fine_dot(product, Y, U, D)
        store_written_gradients(Y, v, write, dv, d_write, h, tokens, block, origin, length, count, D)
    return product


@triton.jit
def store_written_gradients(Y, v, write, dv, d_write, h, tokens, cv, origin, length, count, D: tl.constexpr):
    """Store dv = w * Y and dw = v * Y from Y, the gradient of w * v, [C, BV]. Without w, store dv = Y."""
    Y = Y.to(tl.float32)
    if D.ERASURE == "erase+write":
        tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
        store_tile(at(d_write, origin, h, D.H, D.V), Y * tv, tokens, cv, length, D.H, D.V, D.SIGN)
        Y *= load_tokens(write, origin, h, D.H, D.V, tokens, cv, count, D)
    store_tile(at(dv, origin, h, D.H, D.V), Y, tokens, cv, length, D.H, D.V, D.SIGN)


@triton.jit
def column_sums(x, C: tl.constexpr):
    """Return the sums of the columns of x [C, C], [C], in the layout of sums of its rows."""
    return tl.sum(tl.trans(x), 1)


@triton.jit
def store_rows(x, value, tokens, count, D: tl.constexpr):
    """Store value [C], one number for each token of a chunk, at x, the address of the first token's number in an array [rows,
    H]. Tokens from `count` on are not stored."""
    tl.store(x + (D.SIGN * D.H) * tokens, value.to(x.dtype.element_ty), mask=tokens < count)


@triton.jit
def delta_key_gradient(
    q, k, v, q_read, e_read, k_written, erasure, write, g, decays, do, written, d_written, scale, states, d_states, table,
    dq, dk, dv, d_erasure, d_write, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg [rows, H, K], dv [rows, H, V], dscale [chunks, H] and the gradient of the erasure of a chunk.

    q [rows, HQ, K], k [rows, HK, K], v [rows, HV, V], g [rows, H, K] and do [rows, H, V], where rows are all B T tokens.
    erasure, write, d_erasure, d_write and BV: as in `delta_gradient`. q_read, e_read, k_written and decays: those of
    `delta_key_pairs`. written, d_written: U, and -Y or with beta -beta Y, by chunk (`load_by_chunk`). scale: [N], by sequence.
    states, d_states: [chunks, H, V, K], S before and dL/dS behind every chunk, or with bfloat16 inputs both at the middle of a
    chunk in range. Each iteration takes BK columns of states and d_states. table: of `Segments`. In the code x, z and y are q
    e^M, e e^M and k e^{-M}. Where gates are out of range, `exact_delta_key_gradient` computes dq, dk, dg, dscale and de again.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    pair = e.to(tl.int64) * D.H + h
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    if D.ERASURE == "beta":
        store_value_gradients(erasure, written, d_written, dv, d_erasure, h, pair, origin, length, count, D)
    # [C, C]
    if not D.IN_BLOCKS:
        # [C, BV]
        tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
        U = tl.trans(load_by_chunk(written, pair, tokens, cv, count, D))
        Z = tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, D))
        if D.ERASURE != "beta":
            whole = tl.trans(load_whole(d_written, pair, tokens, cv, count, D))
            store_written_gradients(-whole, v, write, dv, d_write, h, tokens, cv, origin, length, count, D)
        dP = dot(tdo, tl.trans(U), D)
    else:
        dP, dL, _ = pairs_of_values(
            erasure, v, write, do, written, d_written, dv, d_write, h, e, origin, length, count, D
        )
        dL = tl.where(i > j, dL, 0.0)
    own = tl.sum(tl.where(i == j, dP, 0.0), 1)
    if D.PER_TOKEN > 1:
        near_dP, dP = near_pairs(dP, 0, D)
        near_dP = near_dP.to(D.DTYPE)
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    if not D.IN_BLOCKS:
        dL = erased_pairs_gradient(U, Z, written, d_written, pair, tokens, cv, count, D)
    if D.BEFORE or D.PER_TOKEN > 1:
        adjacent, dL = near_pairs(dL, D.BEFORE, D)
    d_scale = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        if not D.IN_BLOCKS:
            # [BV, BK]
            S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
            dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # q e^M, e e^M and k e^-M: [C, BK]
        if tl.bfloat16 == D.DTYPE:
            leave = tl.load(decays + (pair * 4 + 3) * D.K + ck, mask=ck < limit, other=0.0)
            M = leave[None, :] - fine_gate_sums(tl.where(j >= i, 1.0, 0.0), gates, D) + gates
            up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
            x = load_tokens(q_read, origin, h, D.H, D.K, tokens, ck, count, D)
            z = load_tokens(e_read, origin, h, D.H, D.K, tokens, ck, count, D)
            y = load_tokens(k_written, origin, h, D.H, D.K, tokens, ck, count, D)
        else:
            enter = exp(tl.sum(tl.where(i < D.C // 2, gates, 0.0).to(tl.float32), 0))
            leave = exp(tl.sum(tl.where(i >= D.C // 2, gates, 0.0).to(tl.float32), 0))
            if D.IN_BLOCKS:
                tdq, tde, tdk, edge = sums_over_values(
                    do, written, d_written, states, d_states, ck, h, e, origin, length, count, D
                )
                tdq, tde, tdk = tdq * enter[None, :], tde * enter[None, :], tdk * leave[None, :]
                edge *= enter * leave
            else:
                S *= enter[None, :]
                dS *= leave[None, :]
            tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
            tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
            M = gate_sums(middle_matrix(tokens, D.C), gates)
            up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
            te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
            x, z, y = tq * up, te * erase_decay(M, up, gates, D), tk * down
        # The gradients of q e^M / scale, of e e^M and of k e^-M: [C, BK]
        if not D.IN_BLOCKS:
            edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            tdk, tdq, tde = dot(U, dS, D), dot(tdo, S, D), dot(Z, S, D)
        leaving = y * tdk
        tdq = added_dot(dP, y, tdq, D)
        tde = added_dot(dL, y, tde, D) if D.ERASURE == "beta" else added_fine_dot(dL, y, tde, D)
        by_erased = added_dot(tl.trans(dL.to(D.DTYPE)), z, tl.full([D.C, D.BK], 0, tl.float32), D)
        erased = z * tde
        if D.BEFORE:
            erased = tl.where(i > 0, erased, 0.0)
        by_queries = added_dot(tl.trans(dP), x, tl.full([D.C, D.BK], 0, tl.float32), D)
        tdk += by_erased
        gate_terms = x * (tdq * factor) + erased - y * (by_erased + by_queries * factor)
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), gate_terms, tl.bfloat16 == D.DTYPE) + edge[None, :]
        # Not the total less the sum from token i on: the terms that no gate decays would drown those behind a strong gate.
        tdg += dot(tl.where(j < i, 1.0, 0.0), leaving, D)
        if D.BEFORE:
            tdg -= erased
        if D.BEFORE or D.PER_TOKEN > 1:
            tde = added_fine_dot(adjacent, y, tde, D)
            tdk = added_dot(tl.trans(adjacent.to(D.DTYPE)), z, tdk, D)
        if D.PER_TOKEN > 1:
            tdq = added_dot(near_dP, y, tdq, D)
            by_queries = added_dot(tl.trans(near_dP), x, by_queries, D)
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += own[:, None] * y
        d_scale += tl.sum(x * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * (up * factor), tokens, ck, length, D.H, D.K, D.SIGN)
        tdk = (tdk + (by_queries + own[:, None] * x) * factor) * down
        if D.ERASURE == "beta":
            tdk += tde * up
        else:
            tde *= erase_decay(M, up, gates, D)
            store_tile(at(d_erasure, origin, h, D.H, D.K), tde, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))


@triton.jit
def store_value_gradients(beta, written, d_written, dv, dbeta, h, pair, origin, length, count, D: tl.constexpr):
    """Store dv = beta * Y and dbeta of a chunk with key gates and beta. written, d_written: U and -beta * Y by chunk
    (`load_by_chunk`). beta, dbeta: [rows, H]."""
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
def erased_pairs_gradient(U, Z, written, d_written, pair, tokens, cv, count, D: tl.constexpr):
    """Return dL = Z U^T for j < i, [C, C], of a chunk with key gates, with 0 elsewhere: in DTYPE with beta, else in float32
    from both terms of U and Z.

    The gradient of e is formed from dL. If each factor were rounded, the gradient's error would reach the tolerance of
    bfloat16. U, Z: [C, BV], the first terms. written, d_written: the arrays that hold both terms.
    """
    i, j = tokens[:, None], tokens[None, :]
    dL = dot(Z, tl.trans(U), D)
    if D.ERASURE == "beta":
        return tl.where(i > j, dL, 0.0).to(D.DTYPE)
    elif tl.bfloat16 == D.DTYPE:
        dL = tl.dot(Z, load_by_chunk(written, pair, tokens, cv, count, D, True), dL)
        dL = tl.dot(tl.trans(load_by_chunk(d_written, pair, tokens, cv, count, D, True)), tl.trans(U), dL)
        return tl.where(i > j, dL, 0.0)
    else:
        return tl.where(i > j, dL, 0.0)


@triton.jit
def fine_dot(a, b, D: tl.constexpr):
    """Return a @ b in float32, for float32 a and b. Where D.DTYPE is bfloat16, products take 16 bits of each; otherwise all
    bits."""
    if tl.bfloat16 == D.DTYPE:
        high, low = split(a, D.DTYPE)
        return tl.dot(low, b.to(D.DTYPE), half_fine_dot(high, b, D))
    else:
        return half_fine_dot(a, b, D)


@triton.jit
def added_fine_dot(a, b, c, D: tl.constexpr):
    """Return c + a @ b in float32, for float32 a. Where D.DTYPE is bfloat16, products take 16 bits of a, and 8 of b."""
    if tl.bfloat16 == D.DTYPE:
        high, low = split(a, D.DTYPE)
        b = b.to(D.DTYPE)
        return tl.dot(high, b, tl.dot(low, b, c))
    else:
        return added_dot(a, b.to(tl.float32), c, D)


@triton.jit
def added_dot(a, b, c, D: tl.constexpr):
    """Return c + a @ b in float32, for a in D.DTYPE. Where D.DTYPE is bfloat16, b is bfloat16 too. Otherwise b is float32, and
    products take all its digits."""
    if tl.bfloat16 == D.DTYPE:
        return tl.dot(a, b, c)
    elif D.PRECISION == "tf32 terms":
        return dot_onto(a, b, c, D)
    else:
        return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def load_by_chunk(x, pair, tokens, d, count, D: tl.constexpr, LOW: tl.constexpr = False):
    """Load U, -Y or -beta Y of a (chunk, head) pair, transposed, [BD, C], from x [pairs, V, C]; in bfloat16 x is [pairs, V, 2 *
    C]. With LOW, load the second half, what rounding to bfloat16 lost. d: the columns of V. All are 0 if count <= 0."""
    W: tl.constexpr = 2 * D.C if tl.bfloat16 == D.DTYPE else D.C
    p = x + (pair * D.V + d[:, None]) * W + tokens[None, :] + LOW * D.C
    return tl.load(
        p, mask=(d < tl.where(count > 0, D.V, 0))[:, None], other=0.0
    )  # 0 is stored for tokens from `count` on


@triton.jit
def load_whole(x, pair, tokens, d, count, D: tl.constexpr):
    """Load U, -Y or -beta Y of a (chunk, head) pair, transposed, [BD, C] in float32: in bfloat16 the sum of both halves that
    `load_by_chunk` reads."""
    tile = load_by_chunk(x, pair, tokens, d, count, D).to(tl.float32)
    if tl.bfloat16 == D.DTYPE:
        tile += load_by_chunk(x, pair, tokens, d, count, D, True).to(tl.float32)
    return tile


@triton.jit
def exact_delta_key_gradient(
    q, k, erasure, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    de, D: tl.constexpr,
):  # fmt: skip
    """Overwrite dq, dk, dg [rows, H, K] and dscale [chunks, H] of `delta_key_gradient` where key gates are out of range.

    The other operands are those of `delta_key_gradient` too. de: [rows, H, K], the gradient of e, which is not touched with
    beta. max_abs_cumsum: [chunks, H], of `delta_key_pairs`; a chunk above FAST_LIMIT is out of range. pairs: [1], the number of
    (chunk, head) pairs, of which a program tests PAIRS.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            exact_gradient_of_pair(
                q, k, erasure, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale, de, pair, D,
            )  # fmt: skip


@triton.jit
def exact_delta_key_gradient_passed_outputs(
    q, k, erasure, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg, dscale,
    de, dq_again, dk_again, dg_again, dscale_again, de_again, D: tl.constexpr,
):  # fmt: skip
    """Run `exact_delta_key_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_delta_key_gradient(
        q, k, erasure, g, do, written, d_written, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, dg,
        dscale, de, D,
    )  # fmt: skip


@triton.jit
def exact_gradient_of_pair(
    q, k, erasure, g, do, written, d_written, scale, states, d_states, table, dq, dk, dg, dscale, de, pair, D: tl.constexpr,
):  # fmt: skip
    """Store dq, dk, dg and, without beta, de of a (chunk, head) pair, [C, K] each, and dscale, for gates of any size. pair:
    chunk * H + head."""
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
    if D.PER_TOKEN > 1:
        near_dP, dP = near_pairs(dP, 0, D)
        near_dP = near_dP.to(D.DTYPE)
    dP = tl.where(i > j, dP, 0.0).to(D.DTYPE)
    dL = erased_pairs_gradient(U, Z, written, d_written, pair, tokens, cv, count, D)
    if D.BEFORE or D.PER_TOKEN > 1:
        adjacent, dL = near_pairs(dL, D.BEFORE, D)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # Load operands and gates: [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        # Sum over pairs of tokens: [C, BK]
        none = tl.full([D.C, D.BK], 0, tl.float32)
        dq_pairs, de_pairs, dk_pairs, pairs, own_erased = none, none, none, none, none
        for level in range(0, runtime_bound(num_halvings(D.C), length)):
            mask, matrix = halving(tokens, (D.C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, D))
            dP_level = tl.where(mask, dP, 0.0)
            dL_level = tl.where(mask, dL, 0.0)
            x, y = tq * decay * factor, tk * decay
            before = (
                exp(fine_gate_sums(later_half_before(tokens, (D.C // 2) >> level), gates, D)) if D.BEFORE else decay
            )
            z = y if D.ERASURE == "beta" else te * before
            level_dq = half_fine_dot(dP_level, y, D)
            level_de = half_fine_dot(dL_level, y, D) if D.ERASURE == "beta" else fine_dot(dL_level, y, D)
            level_dk = half_fine_dot(tl.trans(dP_level), x, D)
            level_dk += half_fine_dot(tl.trans(dL_level.to(D.DTYPE)), z, D)
            if D.ERASURE == "beta":
                pairs += x * level_dq + y * (level_de - level_dk)
            else:
                erased = z * level_de
                pairs += x * level_dq + erased - y * level_dk
                own_erased += erased
            dq_pairs += level_dq * decay
            de_pairs += level_de * before
            dk_pairs += level_dk * decay
        up, down, through = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * through
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, S, D) * up
        tde = dot(Z, S, D) * (exp(gate_sums(tl.where(j < i, 1.0, 0.0), gates)) if D.BEFORE else up)
        tdk = dot(U, dS, D) * down
        erased = te * tde
        if D.BEFORE:
            erased = tl.where(i > 0, erased, 0.0)
        suffix_terms = tq * tdq * factor + erased + pairs
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), suffix_terms, tl.bfloat16 == D.DTYPE)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk, D) + edge[None, :]
        if D.BEFORE:
            tdg -= erased + own_erased
        if D.PER_TOKEN > 1:
            dq_pairs += dot(near_dP, tk, D)
            dk_pairs += dot(tl.trans(near_dP), tq * factor, D)
        if D.BEFORE or D.PER_TOKEN > 1:
            de_pairs = added_fine_dot(adjacent, tk, de_pairs, D)
            dk_pairs += dot(tl.trans(adjacent), te, D)
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs + own[:, None] * tk
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        if D.ERASURE == "beta":
            tdk += dk_pairs + (own * factor)[:, None] * tq + tde + de_pairs
        else:
            tdk += dk_pairs + (own * factor)[:, None] * tq
            store_tile(at(de, origin, h, D.H, D.K), tde + de_pairs, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))
