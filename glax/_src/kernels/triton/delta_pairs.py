"""Form what a chunk of the delta rule needs in addition to its state. One program has one chunk and one head.

G_i is the sum of the log gates of a chunk through token i. With beta, e_i = beta_i k_i:

    L_ij = (e_i . k_j) e^{B_i - G_j}, j < i      what token i erases of what token j wrote
    P_ij = (q_i . k_j) e^{G_i - G_j}, j <= i     the scores

B_i is G_i, or with BEFORE, where e reads the state before the token's decay, G_{i-1}; B_0 is then 0.

The factor of each pair is the exponential of one difference, so it is exact for all gates. L includes this factor. The inverse
of a matrix without decays may overflow where the decays keep (I + L)^-1 small.

**With per-key gates**, and with G_last the sum over the whole chunk:

    L_ij = sum_k e_ik k_jk e^{B_ik - G_jk}, j < i             what token i erases of what token j wrote
    P_ij = scale sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i      the scores

M_i is the sum of the log gates from the chunk's middle through token i; before the middle, minus the sum of those behind i. E
and R are the sums over the first and the second half. Where all three are in range (`common.limits`), both matrices are one
product with k e^{-M}, and the state is decayed to the middle of the chunk before it is read:

    Q e^M      E e^M      K e^{-M}            the operands of the products with the state there, which is e^E S

With BEFORE the row of e_i takes M_{i-1}, which is -E in the first row.

Elsewhere a second kernel forms both matrices in log2(C) products, each with a reference between its tokens, so that no exponent
is positive. The state is read as it enters, and decays by e^{G_last} before the tokens write:

    Q e^G      E e^B      K e^{G_last - G}

With beta, K stands for E in these operands, and L is multiplied by beta behind the product.

With float32 and float16 inputs all chunks have these operands, because e^{R - M_j} would lose digits where R and M_j are near
the limit.

**The inverse of I + L**, where L [C, C] is strictly lower triangular: the inverses of neighbouring blocks on the diagonal are
merged, from single tokens on, 1 -> 2 -> 4, until one block is left:

    [A  0]^-1     [    A^-1          0   ]
    [B  D]     =  [-D^-1 B A^-1    D^-1  ]

Up to blocks of 16, a merge is a product of whole blocks of 16: with X the inverses and M what is in the place of B, X - X M X.
Where the inverse is used in float32, blocks of 16 are inverted by forward substitution, which is slower and two bits more
exact.

No power of L is formed, because the powers may grow far beyond the inverse. Merges multiply in three TF32 products, whose error
is two bits larger than float32's.

**Arguments of helpers**: h is a head, e the index of a chunk, and pair is e H + h. origin and count are the row of the chunk's
first token and its number of tokens. tokens are 0 to C - 1, and ck the channels of a block. The arrays of a kernel's signature
are addresses in device memory; tiles such as tq and tdk are in registers. D has the constants of the launch
(`launch.Dimensions`).
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    LOG_OF_ZERO,
    add_fine_dot,
    at,
    dot,
    exp,
    fine_gate_sums,
    gate_sums,
    halving,
    later_half_before,
    load_head_sums,
    load_key_gates,
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
)

BLOCK = tl.constexpr(16)


@triton.jit
def delta_scores(q, k, erasure, g, table, inverse, scores, factors, D: tl.constexpr):
    """Compute T = (I + L)^-1 - I and P of every chunk, inverse and scores [chunks, H, C, C], and the factors of its tokens.

    erasure: beta [rows, H], or e [rows, H, K]. factors: [chunks, H, 3, C] in float32, e^G, e^{G_last - G}, and beta or the
    decay e^B of what e reads; without gates only beta. g: the cumulative sums G of head gates, or the constants of the sequences.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    entry = table + e * 6
    origin, count, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    if D.ERASURE == "beta":
        # [C]
        tbeta = load_rows(erasure, origin, h, tokens, count, D)
    # [C, C]
    P, L = tl.full([D.C, D.C], 0, tl.float32), tl.full([D.C, D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        L += dot(te, tl.trans(tk), D)
        P += dot(tq, tl.trans(tk), D)
    pair = e.to(tl.int64) * D.H + h
    row = factors + pair * 3 * D.C + tokens
    if D.ERASURE == "beta":
        tl.store(row + 2 * D.C, tbeta)
    if D.FORM == "none":
        decay = tl.where(i >= j, 1.0, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        last = load_head_sums(g, origin, h, n, tokens * 0 + (D.C - 1), count, D)
        tl.store(row, exp(G))
        tl.store(row + D.C, exp(last - G))
        if D.ERASURE != "beta" and not D.BEFORE:
            tl.store(row + 2 * D.C, exp(G))
        decay = exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
    P *= decay
    if D.BEFORE:
        B = load_head_sums(g, origin, h, n, tokens - 1, count, D)
        tl.store(row + 2 * D.C, exp(B))
        decay = exp(tl.where(i > j, B[:, None] - G[None, :], float("-inf")))
    place = pair * D.C * D.C + i * D.C + j
    tl.store(scores + place, P.to(scores.dtype.element_ty))
    L *= decay
    if D.ERASURE == "beta":
        L *= tbeta[:, None]
    L = tl.where(i > j, L, 0.0)
    T = tl.where(i > j, unit_inverse(L, D.C, D.DTYPE), 0.0)
    tl.store(inverse + place, T.to(inverse.dtype.element_ty))


@triton.jit
def load_erase(erasure, tk, origin, h, tokens, ck, count, D: tl.constexpr):
    """Return the erase vectors of a chunk, [C, BK], loaded from `erasure` [rows, H, K]. With beta, return tk, the keys: the
    caller multiplies by beta."""
    if D.ERASURE == "beta":
        return tk
    else:
        return load_tokens(erasure, origin, h, D.H, D.K, tokens, ck, count, D)


@triton.jit
def load_rows(x, row, head, tokens, count, D: tl.constexpr):
    """Load x[row, head] of x [rows, H] for a chunk's tokens, in float32, [C]; tokens from `count` on are 0. row: the row of the
    chunk's first token."""
    p = x + row.to(tl.int64) * D.H + head
    return tl.load(p + (D.SIGN * D.H) * tokens, mask=tokens < count, other=0.0).to(tl.float32)


@triton.jit
def delta_key_pairs(
    q, k, erasure, g, scale, table, q_read, e_read, k_written, inverse, scores, factors, decays, max_abs_cumsum,
    D: tl.constexpr,
):  # fmt: skip
    """Compute the scaled operands, T = (I + L)^-1 - I and P of every chunk, and the decays of its states.

    table: the one of `Segments`, of chunks; it gives each chunk's first row, its tokens and its sequence, by which scale [N] is
    read. erasure: beta [rows, H], or e [rows, H, K]. q_read, e_read, k_written [rows, H, K]: the scaled operands. inverse, scores
    [chunks, H, C, C]: T and P. factors [chunks, H, 3, C]: only the last row is stored, and only with beta, which it holds.
    decays [chunks, H, 4, K]: the factors of the state before it is read, between the reads and the writes, and behind the
    writes, and R (0 where the state is read as it enters). max_abs_cumsum [chunks, H]: the largest of |M|, |E| and |R|.
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
    pair = e.to(tl.int64) * D.H + h
    tokens = tl.arange(0, D.C)
    i = tokens[:, None]
    # [C, C]
    L, P = tl.full([D.C, D.C], 0, tl.float32), tl.full([D.C, D.C], 0, tl.float32)
    largest = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        M = fine_gate_sums(middle_matrix(tokens, D.C), gates, D)
        first_gate = load_first_gate(g, origin, h, ck, count, D)[None, :]
        largest = tl.maximum(largest, largest_sums(M, first_gate))
        up, down = tl.exp2(M * LOG2E), tl.exp2(M * -LOG2E)
        xq, xe, y = tq * up, te * erase_decay(M, up, gates, D), tk * down
        L = add_fine_dot(L, xe, y, D)
        P = add_fine_dot(P, xq, y, D)
        place = decays + pair * 4 * D.K + ck[None, :] + 0 * i
        if tl.bfloat16 == D.DTYPE:
            store_middle_decays(place, up, down, first_gate, ck, D)
            tl.store(place + 3 * D.K, M, mask=(i == D.C - 1) & (ck < D.K)[None, :])
        else:
            xq, xe, y = edge_operands(tq, te, tk, gates, place, ck, D)
        store_tile(at(q_read, origin, h, D.H, D.K), xq, tokens, ck, count, D.H, D.K, D.SIGN)
        store_tile(at(e_read, origin, h, D.H, D.K), xe, tokens, ck, count, D.H, D.K, D.SIGN)
        store_tile(at(k_written, origin, h, D.H, D.K), y, tokens, ck, count, D.H, D.K, D.SIGN)
    tl.store(max_abs_cumsum + pair, tl.max(largest, 0))
    store_pairs(L, P, erasure, scale, table, inverse, scores, factors, h, e, origin, count, D)


@triton.jit
def load_first_gate(g, origin, h, ck, count, D: tl.constexpr):
    """Load the log gates of a chunk's first token, [BK] in float32, raised to at least LOG_OF_ZERO; 0 where the chunk has no
    token (count <= 0). origin: the token's row."""
    x = tl.load(at(g, origin, h, D.H, D.K) + ck, mask=ck < tl.where(count > 0, D.K, 0), other=0.0)
    return tl.maximum(x.to(tl.float32), LOG_OF_ZERO)


@triton.jit
def largest_sums(M, first_gate):
    """Return, for each token, the largest |sum| of gates between it and the chunk's middle, over channels: [C]. M: [C, BK].
    first_gate: the gates of the first token, [1, BK].

    The largest of all includes |E| and |R|: the last row of M is R, and -E, the row before the first, is M_0 minus the first
    gate.
    """
    i = tl.arange(0, M.shape[0])[:, None]
    return tl.max(tl.maximum(tl.abs(M), tl.abs(tl.where(i == 0, first_gate, 0.0) - M)), 1)


@triton.jit
def erase_decay(M, up, gates, D: tl.constexpr):
    """Return the decay of the state that e reads, from the chunk's middle, [C, BK]: up = e^M, or with BEFORE e^M without the
    token's own gate."""
    return tl.exp2((M - gates) * LOG2E) if D.BEFORE else up


@triton.jit
def store_middle_decays(place, up, down, first_gate, ck, D: tl.constexpr):
    """Store the factors of a state that is read at the chunk's middle: e^E before the reads, 1 between reads and writes, and
    e^R behind the writes.

    up, down: e^M and e^-M, [C, BK]. place: addresses [C, BK] of the channels ck in row 0 of the chunk's decays. first_gate: [1,
    BK].
    """
    i, inside = tl.arange(0, D.C)[:, None], (ck < D.K)[None, :]
    tl.store(place, down * exp(first_gate), mask=(i == 0) & inside)
    tl.store(place + D.K, tl.full([D.C, ck.shape[0]], 0, tl.float32) + 1.0, mask=(i == 0) & inside)
    tl.store(place + 2 * D.K, up, mask=(i == D.C - 1) & inside)


@triton.jit
def edge_operands(tq, te, tk, gates, place, ck, D: tl.constexpr):
    """Return Q e^G, E e^B and K e^{G_last - G}, [C, BK], of tq, te, tk and the log gates, and store the decays of a state that
    is read as it enters the chunk: 1, e^{G_last}, 1, and 0 for R. place: as in `store_middle_decays`."""
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    G = gate_sums(tl.where(j <= i, 1.0, 0.0), gates)
    up, mask = exp(G), (i == D.C - 1) & (ck < D.K)[None, :]
    one = tl.full([D.C, ck.shape[0]], 0, tl.float32) + 1.0
    tl.store(place, one, mask=mask)
    tl.store(place + D.K, up, mask=mask)
    tl.store(place + 2 * D.K, one, mask=mask)
    tl.store(place + 3 * D.K, one * 0.0, mask=mask)
    before = exp(gate_sums(tl.where(j < i, 1.0, 0.0), gates)) if D.BEFORE else up
    return tq * up, te * before, tk * exp(gate_sums(tl.where(j > i, 1.0, 0.0), gates))


@triton.jit
def store_pairs(L, P, erasure, scale, table, inverse, scores, factors, h, e, origin, count, D: tl.constexpr):
    """Store T, P times the scale, and beta of a chunk, in inverse, scores and factors. L, P: [C, C], without beta and the
    scale, and of any value above their triangles. h, e: the head and chunk. origin, count: its first row and number of
    tokens."""
    factor = tl.load(scale + tl.load(table + e * 6 + 3)).to(tl.float32)
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    pair = e.to(tl.int64) * D.H + h
    place = pair * D.C * D.C + i * D.C + j
    tl.store(scores + place, tl.where(i >= j, P * factor, 0.0).to(scores.dtype.element_ty))
    if D.ERASURE == "beta":
        tbeta = load_beta(erasure, origin, h, tokens, count, D)
        tl.store(factors + (pair * 3 + 2) * D.C + tokens, tbeta)
        L *= tbeta[:, None]
    T = unit_inverse(tl.where(i > j, L, 0.0), D.C, D.DTYPE)
    tl.store(inverse + place, tl.where(i > j, T, 0.0).to(inverse.dtype.element_ty))


@triton.jit
def load_beta(beta, origin, h, tokens, count, D: tl.constexpr):
    """Load beta [rows, H] of a chunk's tokens in float32, [C], with 1e-30 in the place of numbers nearer to 0.

    What a token with beta = 1e-30 writes changes no result, and divided by beta gives its row back. The gradient of beta reads
    this quotient.
    """
    x = load_rows(beta, origin, h, tokens, count, D)
    return tl.where(tl.abs(x) < 1e-30, 1e-30, x)


@triton.jit
def exact_delta_key_pairs(
    q, k, erasure, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, inverse, scores, factors, decays,
    D: tl.constexpr,
):  # fmt: skip
    """Overwrite the results of `delta_key_pairs`, in place, for each chunk and head whose gates are out of range.

    max_abs_cumsum: the result of `delta_key_pairs`. pairs: [1], the number of (chunk, head) pairs; a program tests PAIRS of
    them.
    """
    count_of_pairs = tl.load(pairs)
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % D.H, pair // D.H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            L, P = exact_pairs(q, k, erasure, g, q_read, e_read, k_written, decays, h, e, origin, count, D)
            store_pairs(L, P, erasure, scale, table, inverse, scores, factors, h, e, origin, count, D)


@triton.jit
def exact_delta_key_pairs_passed_outputs(
    q, k, erasure, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, inverse, scores, factors, decays,
    q_read_again, e_read_again, k_written_again, inverse_again, scores_again, factors_again, decays_again,
    D: tl.constexpr,
):  # fmt: skip
    """Run `exact_delta_key_pairs` for jax-triton 0.3, which passes updated operands a second time, as outputs."""
    exact_delta_key_pairs(
        q, k, erasure, g, scale, table, max_abs_cumsum, pairs, q_read, e_read, k_written, inverse, scores, factors,
        decays, D,
    )  # fmt: skip


@triton.jit
def exact_pairs(q, k, erasure, g, q_read, e_read, k_written, decays, h, e, origin, count, D: tl.constexpr):
    """Store the scaled operands and the decays of head h of chunk e, and return L without beta and P without the scale, [C, C],
    for gates of any size. origin, count: the chunk's first row and number of tokens."""
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    L, P = tl.full([D.C, D.C], 0, tl.float32), tl.full([D.C, D.C], 0, tl.float32)
    diagonal = tl.full([D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        te = load_erase(erasure, tk, origin, h, tokens, ck, count, D)
        diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
        for level in range(0, runtime_bound(num_halvings(D.C), count)):
            mask, matrix = halving(tokens, (D.C // 2) >> level)
            decay = exp(fine_gate_sums(matrix, gates, D))
            none = tl.full([D.C, D.C], 0, tl.float32)
            before = (
                exp(fine_gate_sums(later_half_before(tokens, (D.C // 2) >> level), gates, D)) if D.BEFORE else decay
            )
            L += tl.where(mask, add_fine_dot(none, te * before, tk * decay, D), 0.0)
            P += tl.where(mask, add_fine_dot(none, tq * decay, tk * decay, D), 0.0)
        place = decays + (e.to(tl.int64) * D.H + h) * 4 * D.K + ck[None, :] + 0 * i
        xq, xe, y = edge_operands(tq, te, tk, gates, place, ck, D)
        store_tile(at(q_read, origin, h, D.H, D.K), xq, tokens, ck, count, D.H, D.K, D.SIGN)
        store_tile(at(e_read, origin, h, D.H, D.K), xe, tokens, ck, count, D.H, D.K, D.SIGN)
        store_tile(at(k_written, origin, h, D.H, D.K), y, tokens, ck, count, D.H, D.K, D.SIGN)
    return L, tl.where(i == j, diagonal[:, None], P)


@triton.jit
def unit_inverse(L, C: tl.constexpr, DTYPE: tl.constexpr):
    """Return (I + L)^-1, [C, C], for a strictly lower triangular L [C, C] in float32; C is 16 times a power of two.

    DTYPE: the dtype of the products in which the inverse is used. For bfloat16, blocks of 16 are inverted by merges, else by
    forward substitution.
    """
    if tl.bfloat16 == DTYPE:
        X = small_inverses(diagonal_blocks(L, C, 16, 0), C // 16)
    else:
        X = substituted(diagonal_blocks(L, C, 16, 0), C // 16)
    if C >= 32:
        X = merged(X, L, C, 16)
    if C >= 64:
        X = merged(X, L, C, 32)
    if C >= 128:
        X = merged(X, L, C, 64)
    if C >= 256:
        X = merged(X, L, C, 128)
    if C >= 512:
        X = merged(X, L, C, 256)
    return tl.reshape(X, [C, C])


@triton.jit
def diagonal_blocks(L, C: tl.constexpr, SIZE: tl.constexpr, BELOW: tl.constexpr):
    """Return the C / SIZE blocks of L [C, C] on the diagonal, [n, SIZE, SIZE], or with BELOW = 1 the blocks below these, the
    first of which is 0."""
    n: tl.constexpr = C // SIZE
    rows, columns = tl.arange(0, n)[:, None, None, None], tl.arange(0, n)[None, None, :, None]
    return tl.sum(tl.where(rows == columns + BELOW, tl.reshape(L, [n, SIZE, n, SIZE]), 0.0), 2)


@triton.jit
def small_inverses(L, N: tl.constexpr):
    """Return (I + L)^-1 of each of N blocks L, [N, 16, 16], by merges of single tokens."""
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    X = tl.where(i == j, 1.0, tl.where((i == j + 1) & (j % 2 == 0), -L, 0.0))
    X = merged_within(X, L, N, 2)
    X = merged_within(X, L, N, 4)
    return merged_within(X, L, N, 8)


@triton.jit
def merged_within(X, L, N: tl.constexpr, SIZE: tl.constexpr):
    """Return, for N blocks of 16 x 16, the inverses of the blocks of 2 * SIZE on their diagonals, [N, 16, 16]. X: the inverses
    of the blocks of SIZE on the diagonals. L: the strictly lower triangular blocks."""
    i, j = tl.arange(0, BLOCK)[None, :, None] // SIZE, tl.arange(0, BLOCK)[None, None, :] // SIZE
    M = tl.where((i == j + 1) & (j % 2 == 0), L, 0.0)
    return X - of_blocks(X, of_blocks(M, X, N, BLOCK), N, BLOCK)


@triton.jit
def of_blocks(a, b, N: tl.constexpr, SIZE: tl.constexpr):
    """Return the N products a[n] @ b[n], [N, SIZE, SIZE], in float32 by three TF32 products."""
    if N == 1:
        shape: tl.constexpr = [SIZE, SIZE]
        return tl.reshape(multiplied(tl.reshape(a, shape), tl.reshape(b, shape)), [1, SIZE, SIZE])
    else:
        return multiplied(a, b)


@triton.jit
def substituted(L, N: tl.constexpr):
    """Return (I + L)^-1 of each of N blocks L, [N, 16, 16], by forward substitution. Step r subtracts multiples of the finished
    row r of the inverse from the rows below it."""
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    X = tl.zeros([N, BLOCK, BLOCK], tl.float32) + tl.where(i == j, 1.0, 0.0)
    for r in range(0, BLOCK - 1):
        # [N, 16] each: column r of L, and row r of the inverse
        factors = tl.sum(tl.where(j == r, L, 0.0), 2)
        row = tl.sum(tl.where(i == r, X, 0.0), 1)
        X -= factors[:, :, None] * row[:, None, :]
    return X


@triton.jit
def merged(X, L, C: tl.constexpr, SIZE: tl.constexpr):
    """Return the inverses [n / 2, 2 * SIZE, 2 * SIZE] of the blocks of 2 * SIZE on the diagonal of I + L. X [n, SIZE, SIZE]:
    the inverses of the blocks of SIZE there. L: [C, C]."""
    n: tl.constexpr = C // SIZE // 2
    # [n / 2, SIZE, SIZE] each
    first, second = half(X, n, SIZE, 0), half(X, n, SIZE, 1)
    below = half(diagonal_blocks(L, C, SIZE, 1), n, SIZE, 1)
    corner = of_blocks(second, of_blocks(below, first, n, SIZE), n, SIZE)
    # [n / 2, 2, SIZE, 2, SIZE]
    row, column = tl.arange(0, 2)[None, :, None, None, None], tl.arange(0, 2)[None, None, None, :, None]
    left = tl.where(row == 0, first[:, None, :, None, :], -corner[:, None, :, None, :])
    right = tl.where(row == 0, 0.0, second[:, None, :, None, :])
    return tl.reshape(tl.where(column == 0, left, right), [n, 2 * SIZE, 2 * SIZE])


@triton.jit
def half(X, N: tl.constexpr, SIZE: tl.constexpr, WHICH: tl.constexpr):
    """Return every second of the blocks X [2 * N, SIZE, SIZE], [N, SIZE, SIZE], beginning with the first (WHICH = 0) or the
    second (1)."""
    which = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(which == WHICH, tl.reshape(X, [N, 2, SIZE, SIZE]), 0.0), 1)


@triton.jit
def multiplied(a, b):
    """Return a @ b in float32 by three TF32 products."""
    return tl.dot(a, b, input_precision="tf32x3")
