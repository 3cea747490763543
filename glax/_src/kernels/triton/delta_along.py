"""Compute the delta rule with `along` and per-key gates in chunks: outputs, states and the gradient.

e, b and w are `erase`, `along` and `write`, and X = W * V:

    S_t = S_bar + k_t x_t^T - b_t (S_bar^T e_t)^T

**A chunk.** G_i is the sum of its log gates through token i, B_i is G_i, or with BEFORE G_{i-1}. Of readers r and writers y:

    L_b[i, j] = (e_i . b_j) e^{B_i - G_j}    j < i       P_b[i, j] = scale (q_i . b_j) e^{G_i - G_j}    j <= i
    L_k[i, j] = (e_i . k_j) e^{B_i - G_j}    j < i       P_k[i, j] = scale (q_i . k_j) e^{G_i - G_j}    j <= i

With Q, E, B, K decayed as in `delta_pairs`, D the decay of the whole chunk and S the state before it, what is written along b is

    Z = -(I + L_b)^-1 (E S + L_k X) = A X - E' S        A = -(I + L_b)^-1 L_k        E' = (I + L_b)^-1 E

The scan needs no matrix of pairs but P': the folded operands hold what the tokens of a chunk do to one another.

    O  = Q' S + P' X                                    Q' = scale Q - P_b E'        P' = P_k + P_b A
    S' = D S + K'^T X - B^T (E' S)                      K' = K + A^T B

The gradients of S and X need no more than these. On S and dS a prime means behind the chunk, elsewhere folded:

    dS = D dS' + Q'^T dO - E'^T (B dS')                 dX = K' dS' + P'^T dO

**The gradient of a chunk**, with Y the gradient of what stands before the inverse:

    Z = A X - E' S                    dP_b = dO Z^T    dP_k = dO X^T      j <= i
    Y = (I + L_b)^-T (B dS' + P_b^T dO)                dL_b = -Y Z^T    dL_k = -Y X^T      j < i
    dq = scale (dO S + dP_b b + dP_k k)                de = -Y S + dL_b b + dL_k k
    db = Z dS' + scale dP_b^T q + dL_b^T e             dk = X dS' + scale dP_k^T q + dL_k^T e

each product with the decay of its pair in every channel. The gradient of a log gate sums as in `delta_gradient`, with the
terms of b and k on the side that writes. A query with its own token and, with BEFORE, e with the token before are decayed by no
gate. Their terms are formed apart, without an exponential, and enter no gate's sum.

| kernel | one program | what it stores |
|---|---|---|
| `along_pairs` | a chunk and a head | Q', E', K', B, P', the decays of states; for the gradient A, P_b, (I + L_b)^-1 - I |
| `exact_along_pairs` | PAIRS of these | the same where gates are out of range |
| `along_outputs` | a sequence, a head and BV columns | O and the final state |
| `along_states` | the same, in one direction | S before and dS' behind each chunk, and dL/dS before the sequence |
| `along_products` | a chunk and a head | Z, -Y, dP_b, dP_k, dL_b, dL_k, dv and dw |
| `along_gradient` | a chunk and a head | dq, dk, de, db, dg and dscale |
| `exact_along_gradient` | PAIRS of these | the same where gates are out of range |

Each kernel reads what those above it stored, and no two programs of a kernel share anything. Ranges, the middle of a chunk and
its edges are those of `delta_pairs`. States are stored transposed, [chunks, H, V, K].

**Arguments of helpers**: h is a head, e the index of a chunk, and pair is e H + h. origin (or row) and count are the row of the
chunk's first token and its number of tokens. tokens are 0 to C - 1, ck and cv the channels of K and columns of V of a block.
The arrays of a kernel's signature are addresses in device memory; tiles such as tq and tdk are in registers. D has the
constants of the launch (`launch.Dimensions`).
"""

from glax._src.kernels.triton.delta_gradient import added_dot, store_written_gradients
from glax._src.kernels.triton.delta_pairs import (
    edge_operands,
    erase_decay,
    largest_sums,
    load_first_gate,
    store_middle_decays,
    unit_inverse,
)
from glax._src.kernels.triton.delta_scan import load_key_decay, load_start, store_columns
from glax._src.kernels.triton.gradient import term_sums
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    add_fine_dot,
    at,
    chunk_of,
    dot,
    exact_factors,
    exp,
    fine_gate_sums,
    gate_sums,
    half_fine_dot,
    halving,
    later_half_before,
    load_key_gates,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    operand,
    place_of,
    runtime_bound,
    split,
    store_state,
    store_tile,
)


@triton.jit
def along_pairs(
    q, k, erase, along, g, scale, table, q_read, e_read, k_written, b_written, scores, inverse, passed, scores_along, decays,
    max_abs_cumsum, D: tl.constexpr,
):  # fmt: skip
    """Compute the folded operands of every chunk and the decays of its states.

    q [rows, HQ, K], k [rows, HK, K], erase, along, g [rows, H, K]. q_read, e_read, k_written, b_written [rows, H, K]: Q', E',
    K', B. scores [chunks, H, C, C]: P'. inverse, passed, scores_along: (I + L_b)^-1 - I, A and P_b, of the shape of scores,
    which are not touched without GRADIENT. decays [chunks, H, 4, K], max_abs_cumsum [chunks, H]: those of `delta_key_pairs`,
    but for the fourth row of decays, which nothing reads.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    largest = store_chunk(
        q, k, erase, along, g, scale, table, q_read, e_read, k_written, b_written, scores, inverse, passed, scores_along,
        decays, h, e, False, D,
    )  # fmt: skip
    tl.store(max_abs_cumsum + e.to(tl.int64) * D.H + h, largest)


@triton.jit
def exact_along_pairs(
    q, k, erase, along, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, b_written, scores, inverse, passed,
    scores_along, decays, D: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `along_pairs`, in place, for each chunk and head whose gates are out of range.

    max_abs_cumsum: the result of `along_pairs`. pairs: [1], the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            store_chunk(
                q, k, erase, along, g, scale, table, q_read, e_read, k_written, b_written, scores, inverse, passed,
                scores_along, decays, pair % D.H, pair // D.H, True, D,
            )  # fmt: skip


@triton.jit
def exact_along_pairs_passed_outputs(
    q, k, erase, along, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, b_written, scores, inverse, passed,
    scores_along, decays, q_read_again, e_read_again, k_written_again, b_written_again, scores_again, inverse_again,
    passed_again, scores_along_again, decays_again, D: tl.constexpr,
):  # fmt: skip
    """Run `exact_along_pairs` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_along_pairs(
        q, k, erase, along, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, b_written, scores, inverse,
        passed, scores_along, decays, D,
    )  # fmt: skip


@triton.jit
def store_chunk(
    q, k, erase, along, g, scale, table, q_read, e_read, k_written, b_written, scores, inverse, passed, scores_along, decays,
    h, e, EXACT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store all results of `along_pairs` for head h of chunk e, and return the largest |sum| of its gates. The other arguments
    are those of `along_pairs`.

    EXACT: whether the form must be right for gates of any size; then the returned number is 0. Three loops over the channels,
    of two matrices of pairs each or of the operands, need half the registers of one loop.
    """
    origin, count, n = tl.load(table + e * 6), tl.load(table + e * 6 + 2), tl.load(table + e * 6 + 3)
    factor = tl.load(scale + n).to(tl.float32)
    pair = e.to(tl.int64) * D.H + h
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    # [C, C]
    L_b, L_k, largest = pair_products(erase, D.H, k, along, g, h, origin, count, D.BEFORE, EXACT, D)
    L_k = tl.where(i > j, L_k, 0.0)
    T = tl.where(i > j, unit_inverse(tl.where(i > j, L_b, 0.0), D.C, D.DTYPE), 0.0)
    A = operand(-L_k - dot(T, L_k, D), D)
    T = operand(T, D)
    if D.GRADIENT:
        store_square(inverse, T, pair, D)
        store_square(passed, A, pair, D)
    P_b, P_k, _ = pair_products(q, D.HQ, k, along, g, h, origin, count, False, EXACT, D)
    P_b = operand(tl.where(i >= j, P_b * factor, 0.0), D)
    if D.GRADIENT:
        store_square(scores_along, P_b, pair, D)
    store_square(scores, tl.where(i >= j, P_k * factor, 0.0) + dot(P_b, A, D), pair, D)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        place_k = decays + pair * 4 * D.K + ck[None, :] + 0 * i
        if EXACT or tl.bfloat16 != D.DTYPE:
            read, e_read_decay, written = edge_operands(1.0, 1.0, 1.0, gates, place_k, ck, D)
        else:
            M = fine_gate_sums(middle_matrix(tokens, D.C), gates, D)
            first_gate = load_first_gate(g, origin, h, ck, count, D)[None, :]
            read, written = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
            store_middle_decays(place_k, read, written, first_gate, ck, D)
            e_read_decay = erase_decay(M, read, gates, D)
        E = load_tokens(erase, origin, h, D.H, D.K, tokens, ck, count, D) * e_read_decay
        E += dot(T, E, D)
        store_tile(at(e_read, origin, h, D.H, D.K), E, tokens, ck, count, D.H, D.K, D.SIGN)
        Q = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D) * (read * factor) - dot(P_b, E, D)
        store_tile(at(q_read, origin, h, D.H, D.K), Q, tokens, ck, count, D.H, D.K, D.SIGN)
        B = load_tokens(along, origin, h, D.H, D.K, tokens, ck, count, D) * written
        store_tile(at(b_written, origin, h, D.H, D.K), B, tokens, ck, count, D.H, D.K, D.SIGN)
        K = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D) * written + dot(tl.trans(A), B, D)
        store_tile(at(k_written, origin, h, D.H, D.K), K, tokens, ck, count, D.H, D.K, D.SIGN)
    return largest


@triton.jit
def store_square(x, value, place, D: tl.constexpr):
    """Store value [C, C] as x[place], for x [places, C, C]."""
    tokens = tl.arange(0, D.C)
    tl.store(x + place * D.C * D.C + (tokens[:, None] * D.C + tokens[None, :]), value.to(x.dtype.element_ty))


@triton.jit
def pair_products(
    x, HEADS: tl.constexpr, k, along, g, h, origin, count, BEFORE: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr
):
    """Return sum_c x_ic b_jc e^{G_i - G_j} and sum_c x_ic k_jc e^{G_i - G_j}, [C, C] each, and the largest |sum| of gates.

    x: q or erase, with HEADS heads. along: b. BEFORE: whether x reads the state before its token's decay, with G_{i-1} for G_i.
    Entries above the diagonal may have any value. With EXACT the first two results are right for gates of any size, and the
    third is 0; the product of a token with itself is then formed separately. h: the head. origin, count: the chunk's first row
    and number of tokens.
    """
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    none = tl.full([D.C, D.C], 0, tl.float32)
    by_b, by_k = none, none
    own_b, own_k, largest = tl.full([D.C], 0, tl.float32), tl.full([D.C], 0, tl.float32), tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tx = load_tokens(x, origin, h, HEADS, D.K, tokens, ck, count, D)
        tb = load_tokens(along, origin, h, D.H, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        if EXACT:
            own_b += tl.sum(tx.to(tl.float32) * tb.to(tl.float32), 1)
            own_k += tl.sum(tx.to(tl.float32) * tk.to(tl.float32), 1)
            for level in range(0, runtime_bound(num_halvings(D.C), count)):
                mask, matrix = halving(tokens, (D.C // 2) >> level)
                decay = exp(fine_gate_sums(matrix, gates, D))
                before = (
                    exp(fine_gate_sums(later_half_before(tokens, (D.C // 2) >> level), gates, D)) if BEFORE else decay
                )
                read = tx * before
                by_b += tl.where(mask, add_fine_dot(none, read, tb * decay, D), 0.0)
                by_k += tl.where(mask, add_fine_dot(none, read, tk * decay, D), 0.0)
        else:
            M = fine_gate_sums(middle_matrix(tokens, D.C), gates, D)
            largest = tl.maximum(largest, largest_sums(M, load_first_gate(g, origin, h, ck, count, D)[None, :]))
            read = tx * tl.exp2(((M - gates) if BEFORE else M) * LOG2E)
            down = tl.exp2(M * -LOG2E)
            by_b = add_fine_dot(by_b, read, tb * down, D)
            by_k = add_fine_dot(by_k, read, tk * down, D)
    if EXACT:
        by_b, by_k = tl.where(i == j, own_b, by_b), tl.where(i == j, own_k, by_k)
    return by_b, by_k, tl.max(largest, 0)


@triton.jit
def load_values(x, row, h, tokens, cv, count, D: tl.constexpr):
    """Load X of a chunk, [C, BV], from x: v of HV heads, or w * v of H heads where ERASURE is "erase+write". row: the row of
    the chunk's first token. cv: the columns."""
    return load_tokens(x, row, h, D.H if D.ERASURE == "erase+write" else D.HV, D.V, tokens, cv, count, D)


@triton.jit
def along_outputs(
    q_read, e_read, k_written, b_written, x, scores, decays, start, table, o, final, D: tl.constexpr
):  # fmt: skip
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: whether sequences begin from `start` or from zero. q_read to b_written, scores and decays: the results of
    `along_pairs`. x: X [rows, H or HV, V]. The state [BV, BK] and the outputs [BV, C] are held transposed, so nothing that is
    computed passes through shared memory.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    S = load_start(start, n, h, ck, cv, D, D.START)
    S = S * load_key_decay(decays, chunk, h, ck, filled, 0, D)[None, :]
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        # [C, BK]
        tq = load_tokens(q_read, first, h, D.H, D.K, tokens, ck, count, D)
        te = load_tokens(e_read, first, h, D.H, D.K, tokens, ck, count, D)
        tk = load_tokens(k_written, first, h, D.H, D.K, tokens, ck, count, D)
        tb = load_tokens(b_written, first, h, D.H, D.K, tokens, ck, count, D)
        # [C, C] and [C, BV]
        P = load_pairs(scores, (chunk + c).to(tl.int64) * D.H + h, tokens, count, D)
        tv = load_values(x, first, h, tokens, cv, count, D)
        high, low = state_terms(S, D)
        erased = -read_state(high, low, te, D)
        out = read_state(high, low, tq, D)
        behind = load_key_decay(decays, chunk + c + 1, h, ck, count - D.C, 0, D)
        S = next_state(S, erased, tv, tk, tb, decays, chunk + c, h, ck, behind, D)
        out = added_values(out, tv, tl.trans(P), D)
        store_columns(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    if (edges & 2) != 0:
        store_state(final, tl.trans(S), n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def state_terms(S, D: tl.constexpr):
    """Return the two operands by which `read_state` multiplies S: its two bfloat16 terms, which have 16 bits together, or for
    other dtypes S twice."""
    if tl.bfloat16 == D.DTYPE:
        return split(S, D.DTYPE)
    else:
        return S, S


@triton.jit
def read_state(high, low, tile, D: tl.constexpr):
    """Return (tile S)^T, [BV, C], for a tile [C, BK]. high, low: the results of `state_terms` for S^T [BV, BK].

    Where gates let the state persist, rounding S at every chunk would add up: with one term the outputs miss the tolerance of
    bfloat16.
    """
    if tl.bfloat16 == D.DTYPE:
        return tl.dot(high, tl.trans(tile), tl.dot(low, tl.trans(tile)))
    else:
        return dot(high, tl.trans(tile), D)


@triton.jit
def next_state(S, erased, tv, tk, tb, decays, chunk, h, ck, enter, D: tl.constexpr):
    """Return the transposed state that the tokens of the next chunk read, [BV, BK], from S, which the tokens of this chunk
    read.

    erased: -(E' S)^T, [BV, C]. tv, tk, tb: tiles of X, K' and B. chunk: the index of this chunk. enter: the decay [BK] of the
    state on its way into the next chunk, applied separately from the decay out of this one.
    """
    between, leave = load_key_decay(decays, chunk, h, ck, 1, 1, D), load_key_decay(decays, chunk, h, ck, 1, 2, D)
    S = added_values(S * between[None, :] + dot(erased, tb, D), tv, tk, D)
    return S * leave[None, :] * enter[None, :]


@triton.jit
def added_values(x, tile, other, D: tl.constexpr):
    """Return x + tile^T @ other in float32, for x [BV, BD], a tile [C, BV] of values as it lies in memory, and other [C, BD]. A
    float32 tile is multiplied in two bfloat16 terms where D.DTYPE is bfloat16."""
    if tl.bfloat16 == D.DTYPE:
        if tile.dtype == tl.float32:  # w * v, in two terms
            high, low = split(tile, D.DTYPE)
            return tl.dot(tl.trans(high), other, tl.dot(tl.trans(low), other, x))
        else:
            return tl.dot(tl.trans(tile), other, x)
    else:
        return x + dot(tl.trans(tile), other, D)


@triton.jit
def along_states(
    q_read, e_read, k_written, b_written, x, do, decays, start, d_start, table, states, d_states, d_initial, D: tl.constexpr
):  # fmt: skip
    """Store S before each chunk in states and dL/dS behind it in d_states, [chunks, H, V, K], and dL/dS before the sequences in
    d_initial [N, H, K, V].

    d_start: dL/dS behind each sequence. x: X. START: whether sequences begin from `start` or from zero. The two directions do
    not depend on each other: each has half of the programs.
    """
    program = tl.program_id(0)
    block, h, e = place_of(program // 2, D.NV, D)
    entry = table + e * 6
    origin, filled, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    edges, chunk = tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    steps = tl.cdiv(filled, D.C)
    if program % 2 == 0:
        # [BV, BK]
        S = load_start(start, n, h, ck, cv, D, D.START)
        S = S * load_key_decay(decays, chunk, h, ck, filled, 0, D)[None, :]
        for c in range(0, steps):
            first = origin + D.SIGN * c * D.C
            count = filled - c * D.C
            # [C, BK]
            te = load_tokens(e_read, first, h, D.H, D.K, tokens, ck, count, D)
            tk = load_tokens(k_written, first, h, D.H, D.K, tokens, ck, count, D)
            tb = load_tokens(b_written, first, h, D.H, D.K, tokens, ck, count, D)
            # [C, BV]
            tv = load_values(x, first, h, tokens, cv, count, D)
            store_state(states, S, chunk + c, h, cv, ck, D.H, D.V, D.K)
            high, low = state_terms(S, D)
            erased = -read_state(high, low, te, D)
            behind = load_key_decay(decays, chunk + c + 1, h, ck, count - D.C, 0, D)
            S = next_state(S, erased, tv, tk, tb, decays, chunk + c, h, ck, behind, D)
    else:
        dS = load_start(d_start, n, h, ck, cv, D, True)
        dS = dS * load_key_decay(decays, chunk + steps - 1, h, ck, filled, 2, D)[None, :]
        for step in range(0, steps):
            c = steps - 1 - step
            first = origin + D.SIGN * c * D.C
            count = filled - c * D.C
            tq = load_tokens(q_read, first, h, D.H, D.K, tokens, ck, count, D)
            te = load_tokens(e_read, first, h, D.H, D.K, tokens, ck, count, D)
            tb = load_tokens(b_written, first, h, D.H, D.K, tokens, ck, count, D)
            tdo = load_tokens(do, first, h, D.H, D.V, tokens, cv, count, D)
            store_state(d_states, dS, chunk + c, h, cv, ck, D.H, D.V, D.K)
            high, low = state_terms(dS, D)
            written = -read_state(high, low, tb, D)
            between = load_key_decay(decays, chunk + c, h, ck, 1, 1, D)
            dS = added_values(dS * between[None, :] + dot(written, te, D), tdo, tq, D)
            enter = load_key_decay(decays, chunk + c, h, ck, 1, 0, D)
            leave = load_key_decay(decays, chunk + c - 1, h, ck, c, 2, D)
            dS = dS * enter[None, :] * leave[None, :]
        if (edges & 1) != 0:
            store_state(d_initial, tl.trans(dS), n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def along_products(
    x, v, write, do, e_read, k_written, b_written, scores, inverse, passed, scores_along, states, d_states, table, written,
    products, undecayed, dv, d_write, D: tl.constexpr,
):  # fmt: skip
    """Compute those parts of a chunk's gradient that all channels of K share, and dv and dw. BV holds all of V.

    written [chunks, H, 2, C, V]: Z and -Y. products [chunks, H, 4, C, C]: dP_b and dP_k of different tokens, and dL_b and dL_k
    of the pairs that a gate decays; other entries are 0. undecayed [chunks, H, 4, C] in float32: the remaining entry of each
    row of these four products: of token i with itself for dP, and with BEFORE of e_i with token i - 1 for dL. In bfloat16
    products has two matrices more, what rounding dL_b and dL_k lost.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    origin, length, count, _ = chunk_of(table, e)
    pair = e.to(tl.int64) * D.H + h
    cv, tokens = tl.arange(0, D.BV), tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    # [C, BV]
    Z = tl.full([D.C, D.BV], 0, tl.float32)
    dZ, dX = Z, Z
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        Z -= dot(load_tokens(e_read, origin, h, D.H, D.K, tokens, ck, count, D), tl.trans(S), D)
        dZ += dot(load_tokens(b_written, origin, h, D.H, D.K, tokens, ck, count, D), tl.trans(dS), D)
        dX += dot(load_tokens(k_written, origin, h, D.H, D.K, tokens, ck, count, D), tl.trans(dS), D)
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    X = load_values(x, origin, h, tokens, cv, count, D)
    dX += dot(tl.trans(load_pairs(scores, pair, tokens, count, D)), tdo, D)
    store_written_gradients(dX, v, write, dv, d_write, h, tokens, cv, origin, length, count, D)
    if X.dtype == tl.float32:
        Z += half_fine_dot(load_pairs(passed, pair, tokens, count, D), X, D)
    else:
        Z += dot(load_pairs(passed, pair, tokens, count, D), X, D)
    dZ += dot(tl.trans(load_pairs(scores_along, pair, tokens, count, D)), tdo, D)
    N = -dZ - dot(tl.trans(load_pairs(inverse, pair, tokens, count, D)), dZ, D)
    store_tile(written + pair * 2 * D.C * D.V, Z, tokens, cv, D.C, 1, D.V, 1)
    store_tile(written + (pair * 2 + 1) * D.C * D.V, N, tokens, cv, D.C, 1, D.V, 1)
    # The gradients of e and b are made of these: rounded once at each factor they would be off by the bar of bfloat16.
    X, tdo, place = X.to(tl.float32), tdo.to(tl.float32), pair * num_products(D)
    none, nearest = tl.full([D.C, D.C], 0, tl.float32), tl.where(i == j, 1.0, 0.0)
    dP_b = split_nearest(add_fine_dot(none, tdo, Z, D), nearest, undecayed, pair * 4, D)
    store_square(products, dP_b, place, D)
    dP_k = split_nearest(add_fine_dot(none, tdo, X, D), nearest, undecayed, pair * 4 + 1, D)
    store_square(products, dP_k, place + 1, D)
    nearest = tl.where(i == j + 1, 1.0, 0.0) if D.BEFORE else none
    dL_b = split_nearest(add_fine_dot(none, N, Z, D), nearest, undecayed, pair * 4 + 2, D)
    store_square(products, dL_b, place + 2, D)
    dL_k = split_nearest(add_fine_dot(none, N, X, D), nearest, undecayed, pair * 4 + 3, D)
    store_square(products, dL_k, place + 3, D)
    if tl.bfloat16 == D.DTYPE:
        store_square(products, dL_b - dL_b.to(D.DTYPE).to(tl.float32), place + 4, D)
        store_square(products, dL_k - dL_k.to(D.DTYPE).to(tl.float32), place + 5, D)


@triton.jit
def num_products(D: tl.constexpr):
    """Return the number of matrices [C, C] that `along_products` stores for a chunk and head in `products`: 4, or 6 in
    bfloat16, where the last two are what rounding dL_b and dL_k lost."""
    return 6 if tl.bfloat16 == D.DTYPE else 4


@triton.jit
def split_nearest(x, nearest, undecayed, place, D: tl.constexpr):
    """Return x [C, C] strictly below the diagonal, with 0 where `nearest` is 1. Store the entry of each row where nearest is 1
    in undecayed[place], [C], or 0 where a row has none.

    x: a product of rows, such as dP_b. nearest: [C, C], with at most one 1 in a row: the pair that no gate decays.
    """
    tokens = tl.arange(0, D.C)
    tl.store(undecayed + place * D.C + tokens, tl.sum(x * nearest, 1))
    return tl.where((tokens[:, None] > tokens[None, :]) & (nearest == 0), x, 0.0)


@triton.jit
def load_products(products, pair, tokens, count, D: tl.constexpr):
    """Load dP_b, dP_k, dL_b and dL_k of a (chunk, head) pair, [C, C] each, and in bfloat16 what rounding the last two lost.
    With other dtypes dL_b and dL_k are returned a second time in their place, which the caller does not read."""
    place = pair * num_products(D)
    LOW: tl.constexpr = 2 if tl.bfloat16 == D.DTYPE else 0
    dP_b, dP_k = load_pairs(products, place, tokens, count, D), load_pairs(products, place + 1, tokens, count, D)
    dL_b, dL_k = load_pairs(products, place + 2, tokens, count, D), load_pairs(products, place + 3, tokens, count, D)
    low_b = load_pairs(products, place + 2 + LOW, tokens, count, D)
    return dP_b, dP_k, dL_b, dL_k, low_b, load_pairs(products, place + 3 + LOW, tokens, count, D)


@triton.jit
def load_written(written, pair, which, tokens, d, count, D: tl.constexpr):
    """Load Z (which = 0) or -Y (1) of a (chunk, head) pair, [C, BV], from written [pairs, 2, C, V]; tokens from `count` on are
    0. d: the columns."""
    return load_tile(written + (pair * 2 + which) * D.C * D.V, tokens, d, count, 1, D.V, 1)


@triton.jit
def load_undecayed(undecayed, pair, which, tokens, D: tl.constexpr):
    """Load row `which` of undecayed [pairs, 4, C] of a (chunk, head) pair at the indices `tokens`, as a column [C, 1]; 0 from
    token C on. The rows are those of dP_b, dP_k, dL_b and dL_k."""
    return tl.load(undecayed + (pair * 4 + which) * D.C + tokens, mask=tokens < D.C, other=0.0)[:, None]


@triton.jit
def load_near(x, HEADS: tl.constexpr, STEP: tl.constexpr, origin, h, tokens, ck, count, D: tl.constexpr):
    """Load, for each token i of a chunk, x [rows, HEADS, K] at token i + STEP, [C, BK] in float32; 0 if the chunk has no such
    token. origin: the row of the chunk's first token."""
    rows = tokens + STEP
    return load_tokens(x, origin, h, HEADS, D.K, tl.where(rows >= 0, rows, D.C), ck, count, D).to(tl.float32)


@triton.jit
def along_gradient(
    q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, dq, dk, de, db, dg, dscale,
    D: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, de, db and dg [rows, H, K] and dscale [chunks, H].

    x: X. written, products and undecayed: the results of `along_products`. BV holds all of V; each iteration takes BK columns
    of the states [chunks, H, V, K]. In the code r, z, y and u are scale q e^M, e e^M, k e^{-M} and b e^{-M}. Where gates are
    out of range, `exact_along_gradient` overwrites all results.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    pair = e.to(tl.int64) * D.H + h
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)  # padding has no state
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    X = load_values(x, origin, h, tokens, cv, count, D)
    Z = load_written(written, pair, 0, tokens, cv, count, D)
    N = load_written(written, pair, 1, tokens, cv, count, D)
    # [C, C]
    dP_b, dP_k, dL_b, dL_k, low_b, low_k = load_products(products, pair, tokens, count, D)
    # [C, 1]
    own_b, own_k = load_undecayed(undecayed, pair, 0, tokens, D), load_undecayed(undecayed, pair, 1, tokens, D)
    d_scale = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        M = fine_gate_sums(middle_matrix(tokens, D.C), gates, D)
        up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
        e_up = erase_decay(M, up, gates, D)
        if tl.bfloat16 != D.DTYPE:  # whose states are those at the edges of the chunk
            S *= exp(tl.sum(tl.where(i < D.C // 2, gates, 0.0).to(tl.float32), 0))[None, :]
            dS *= exp(tl.sum(tl.where(i >= D.C // 2, gates, 0.0).to(tl.float32), 0))[None, :]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        # One result after the other, so that few tiles are held at a time: [C, BK]
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        tb = load_tokens(along, origin, h, D.H, D.K, tokens, ck, count, D)
        y, u = (tk * down).to(D.DTYPE), (tb * down).to(D.DTYPE)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        r = (tq * (up * factor)).to(D.DTYPE)
        tdq = added_dot(dP_b, u, added_dot(dP_k, y, dot(tdo, S, D), D), D)
        gate_terms = r * tdq
        tdq = tdq * up + own_k * tk + own_b * tb
        d_scale += tl.sum(tq * tdq, 1)
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        z = (load_tokens(erase, origin, h, D.H, D.K, tokens, ck, count, D) * e_up).to(D.DTYPE)
        tde = added_dot(dL_b, u, added_dot(dL_k, y, dot(N, S, D), D), D)
        if tl.bfloat16 == D.DTYPE:
            tde = tl.dot(low_b, u, tl.dot(low_k, y, tde))
        e_terms = z * tde
        if D.BEFORE:
            e_terms = tl.where(i > 0, e_terms, 0.0)
        gate_terms += e_terms
        tde = tde * e_up
        if D.BEFORE:
            tde += load_undecayed(undecayed, pair, 3, tokens, D) * load_near(
                k, D.HK, -1, origin, h, tokens, ck, count, D
            )
            tde += load_undecayed(undecayed, pair, 2, tokens, D) * load_near(
                along, D.H, -1, origin, h, tokens, ck, count, D
            )
        store_tile(at(de, origin, h, D.H, D.K), tde, tokens, ck, length, D.H, D.K, D.SIGN)
        none = tl.full([D.C, D.BK], 0, tl.float32)
        tdk = added_dot(tl.trans(dP_k), r, added_dot(tl.trans(dL_k), z, none, D), D)
        through = dot(X, dS, D)
        gate_terms -= y * tdk
        leaving = y * through
        tdk = (tdk + through) * down + (own_k * factor) * tq
        if D.BEFORE:
            te_next = load_near(erase, D.H, 1, origin, h, tokens, ck, count, D)
            tdk += load_undecayed(undecayed, pair, 3, tokens + 1, D) * te_next
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
        tdb = added_dot(tl.trans(dP_b), r, added_dot(tl.trans(dL_b), z, none, D), D)
        through = dot(Z, dS, D)
        gate_terms -= u * tdb
        leaving += u * through
        tdb = (tdb + through) * down + (own_b * factor) * tq
        if D.BEFORE:
            te_next = load_near(erase, D.H, 1, origin, h, tokens, ck, count, D)
            tdb += load_undecayed(undecayed, pair, 2, tokens + 1, D) * te_next
        store_tile(at(db, origin, h, D.H, D.K), tdb, tokens, ck, length, D.H, D.K, D.SIGN)
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), gate_terms, tl.bfloat16 == D.DTYPE) + edge[None, :]
        # Not the total less the sum from token i on: the terms that no gate decays would drown those behind a strong gate.
        tdg += term_sums(tl.where(j < i, 1.0, 0.0), leaving, tl.bfloat16 == D.DTYPE)
        if D.BEFORE:
            tdg -= e_terms
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))


@triton.jit
def exact_along_gradient(
    q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, de,
    db, dg, dscale, D: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `along_gradient`, in place, for each chunk and head whose gates are out of range.

    max_abs_cumsum: the result of `along_pairs`. pairs: [1], the number of (chunk, head) pairs; a program tests PAIRS of them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            exact_gradient_of_chunk(
                q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, dq, dk, de, db, dg,
                dscale, pair, D,
            )  # fmt: skip


@triton.jit
def exact_along_gradient_passed_outputs(
    q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk, de,
    db, dg, dscale, dq_again, dk_again, de_again, db_again, dg_again, dscale_again, D: tl.constexpr,
):  # fmt: skip
    """Run `exact_along_gradient` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_along_gradient(
        q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, max_abs_cumsum, pairs, dq, dk,
        de, db, dg, dscale, D,
    )  # fmt: skip


@triton.jit
def exact_gradient_of_chunk(
    q, k, x, erase, along, g, do, written, products, undecayed, scale, states, d_states, table, dq, dk, de, db, dg, dscale, pair,
    D: tl.constexpr,
):  # fmt: skip
    """Store dq, dk, de, db and dg of a (chunk, head) pair, [C, K] each, and dscale, for gates of any size. pair: chunk * H +
    head. The operands are those of `along_gradient`.

    Pairs of tokens are log2(C) products (`tiles.halving`), in each of which decays are taken from a token between the two of a
    pair, so that no exponent is positive.
    """
    h, e, pair = pair % D.H, pair // D.H, pair.to(tl.int64)
    origin, length, count, n = chunk_of(table, e)
    factor = tl.load(scale + n).to(tl.float32)
    tokens, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    i, j = tokens[:, None], tokens[None, :]
    limit = tl.where(count > 0, D.K, 0)
    # [C, BV]
    tdo = load_tokens(do, origin, h, D.H, D.V, tokens, cv, count, D)
    X = load_values(x, origin, h, tokens, cv, count, D)
    Z = load_written(written, pair, 0, tokens, cv, count, D)
    N = load_written(written, pair, 1, tokens, cv, count, D)
    # [C, C]
    dP_b, dP_k, dL_b, dL_k, low_b, low_k = load_products(products, pair, tokens, count, D)
    # [C, 1]
    own_b, own_k = load_undecayed(undecayed, pair, 0, tokens, D), load_undecayed(undecayed, pair, 1, tokens, D)
    d_scale = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, length), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D).to(tl.float32)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D).to(tl.float32)
        tb = load_tokens(along, origin, h, D.H, D.K, tokens, ck, count, D).to(tl.float32)
        te = load_tokens(erase, origin, h, D.H, D.K, tokens, ck, count, D).to(tl.float32)
        # [BV, BK]
        S = load_state(states, e, h, cv, ck, limit, D.H, D.V, D.K)
        dS = load_state(d_states, e, h, cv, ck, limit, D.H, D.V, D.K)
        none = tl.full([D.C, D.BK], 0, tl.float32)
        # gate_pairs: what pairs add to the gradient of the sums of gates. e_pairs: the part of it in which e reads.
        dq_pairs, de_pairs, dk_pairs, db_pairs, gate_pairs, e_pairs = none, none, none, none, none, none
        for level in range(0, runtime_bound(num_halvings(D.C), length)):
            mask, matrix = halving(tokens, (D.C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, D))
            before = (
                exp(fine_gate_sums(later_half_before(tokens, (D.C // 2) >> level), gates, D)) if D.BEFORE else decay
            )
            r, z, y, u = tq * (decay * factor), te * before, tk * decay, tb * decay
            level_P_b, level_P_k = tl.where(mask, dP_b, 0.0), tl.where(mask, dP_k, 0.0)
            level_L_b, level_L_k = tl.where(mask, dL_b, 0.0), tl.where(mask, dL_k, 0.0)
            level_dq = half_fine_dot(level_P_b, u, D) + half_fine_dot(level_P_k, y, D)
            level_de = half_fine_dot(level_L_b, u, D) + half_fine_dot(level_L_k, y, D)
            if tl.bfloat16 == D.DTYPE:
                level_de += dot(tl.where(mask, low_b, 0.0), u, D) + dot(tl.where(mask, low_k, 0.0), y, D)
            level_db = half_fine_dot(tl.trans(level_P_b), r, D) + half_fine_dot(tl.trans(level_L_b), z, D)
            level_dk = half_fine_dot(tl.trans(level_P_k), r, D) + half_fine_dot(tl.trans(level_L_k), z, D)
            level_e = z * level_de
            gate_pairs += r * level_dq + level_e - y * level_dk - u * level_db
            e_pairs += level_e
            dq_pairs += level_dq * decay
            de_pairs += level_de * before
            dk_pairs += level_dk * decay
            db_pairs += level_db * decay
        up, down, through = exact_factors(gates, tokens)
        # [BK]
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * through
        # Add the states' parts: [C, BK]
        tdq = dot(tdo, S, D) * up
        tde = dot(N, S, D) * (exp(gate_sums(tl.where(j < i, 1.0, 0.0), gates)) if D.BEFORE else up)
        tdk, tdb = dot(X, dS, D) * down, dot(Z, dS, D) * down
        e_states = te * tde
        if D.BEFORE:
            e_states = tl.where(i > 0, e_states, 0.0)
        gate_terms = tq * tdq * factor + e_states + gate_pairs
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), gate_terms, tl.bfloat16 == D.DTYPE)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * tdk + tb * tdb, D) + edge[None, :]
        if D.BEFORE:
            tdg -= e_states + e_pairs
            near_b, near_k = (
                load_undecayed(undecayed, pair, 2, tokens, D),
                load_undecayed(undecayed, pair, 3, tokens, D),
            )
            de_pairs += near_k * load_near(k, D.HK, -1, origin, h, tokens, ck, count, D)
            de_pairs += near_b * load_near(along, D.H, -1, origin, h, tokens, ck, count, D)
            te_next = load_near(erase, D.H, 1, origin, h, tokens, ck, count, D)
            dk_pairs += load_undecayed(undecayed, pair, 3, tokens + 1, D) * te_next
            db_pairs += load_undecayed(undecayed, pair, 2, tokens + 1, D) * te_next
        store_tile(at(dg, origin, h, D.H, D.K), tdg, tokens, ck, length, D.H, D.K, D.SIGN)
        tdq += dq_pairs + own_k * tk + own_b * tb
        d_scale += tl.sum(tq * tdq, 1)
        tdk += dk_pairs + (own_k * factor) * tq
        tdb += db_pairs + (own_b * factor) * tq
        store_tile(at(dq, origin, h, D.H, D.K), tdq * factor, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(de, origin, h, D.H, D.K), tde + de_pairs, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(dk, origin, h, D.H, D.K), tdk, tokens, ck, length, D.H, D.K, D.SIGN)
        store_tile(at(db, origin, h, D.H, D.K), tdb, tokens, ck, length, D.H, D.K, D.SIGN)
    tl.store(dscale + pair, tl.sum(d_scale, 0))
