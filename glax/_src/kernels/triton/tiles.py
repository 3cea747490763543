"""Provide what the chunked kernels share: tiles of tokens, sums of gates, and products of a given precision.

The tokens of a chunk are in scan order in both directions: token i is row origin + SIGN * i. Logarithms are natural, and e^x is
computed as 2^(x log2 e).

**Arguments**: row is the row of a chunk's first token in the [B T] rows, tokens are 0 to C - 1, and count is the number of
tokens of the chunk. head is a head. k, v and d are index vectors of a block of channels or columns. Arrays are addresses in
device memory; tiles are in registers. D has the constants of the launch (`launch.Dimensions`).
"""

from glax._src.kernels.common import limits
from glax._src.kernels.triton.launch import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LOG_OF_ZERO = tl.constexpr(limits.LOG_OF_ZERO)
FAST_LIMIT = tl.constexpr(limits.FAST_LIMIT)


@triton.jit
def runtime_bound(n, count):
    """Return n, as a bound of a loop that is not unrolled. count: any number >= 0 that only the running kernel knows."""
    return tl.where(count >= 0, n, 0)


@triton.jit
def place_of(program, BLOCKS: tl.constexpr, D: tl.constexpr):
    """Return the block, the head, and the chunk, segment or sequence of a program. Blocks vary fastest, and then heads.

    BLOCKS: the number of blocks of a head.
    """
    return program % BLOCKS, program // BLOCKS % D.H, program // (BLOCKS * D.H)


@triton.jit
def chunk_of(table, e):
    """Return, for chunk e of `Segments.table`: the row of its first token, the number of rows to write, the number of rows with
    tokens, and its sequence."""
    entry = table + e * 6
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def num_exact_pairs(max_abs_cumsum, count, PAIRS: tl.constexpr, BLOCKS: tl.constexpr = 1):
    """Return the number of (chunk, head) pairs that this program must test for the exact form: PAIRS if any of its PAIRS pairs
    has a largest |cumulative sum| above FAST_LIMIT, else 0.

    max_abs_cumsum: [count] in device memory, the largest |sum| of each pair. BLOCKS neighbouring programs have the same pairs.
    """
    pair = tl.program_id(0) // BLOCKS * PAIRS + tl.arange(0, PAIRS)
    largest = tl.max(tl.load(max_abs_cumsum + pair, mask=pair < count, other=0.0), 0)
    return tl.where(largest > FAST_LIMIT, PAIRS, 0)


@triton.jit
def exp(x):
    """Return e^x, computed as 2^(x log2 e)."""
    return tl.exp2(x * LOG2E)


@triton.jit
def dot(a, b, D: tl.constexpr):
    """Return a @ b in float32. Operands are rounded to D.DTYPE; float32 operands are multiplied in D.PRECISION."""
    return dot_onto(operand(a, D), operand(b, D), None, D)


@triton.jit
def dot_onto(a, b, c, D: tl.constexpr):
    """Return c + a @ b in float32, for operands a and b that need no rounding to TF32, such as results of `operand`. c may be
    None, for 0.

    With PRECISION "tf32 terms" the three products of "tf32x3" are added in two separate sums. Each chain of dependent products
    is a third as long, and fewer terms are in registers at a time.
    """
    if D.PRECISION == "tf32 terms":
        a_high, a_low = tf32_terms(a)
        b_high, b_low = tf32_terms(b)
        low = tl.dot(a_low, b_high, input_precision="tf32") + tl.dot(a_high, b_low, input_precision="tf32")
        return tl.dot(a_high, b_high, c, input_precision="tf32") + low
    else:
        return tl.dot(a.to(D.DTYPE), b.to(D.DTYPE), c, input_precision=D.PRECISION)


@triton.jit
def tf32_bits(x):
    """Return the bits, as int32, of float32 x rounded to the nearest TF32 number. For NaN the bits may be another number's."""
    return (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000


@triton.jit
def tf32_terms(x):
    """Return float32 x as (high, x - high), with high the nearest TF32 number. Tensor cores truncate x - high to TF32; both
    terms together have 22 bits of x."""
    high = tf32_bits(x).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def operand(x, D: tl.constexpr):
    """Return x as an operand of a product: in D.DTYPE, or rounded to the nearest TF32 number if the product of float32 numbers
    is in TF32.

    Tensor cores truncate float32 operands to TF32. Sums do not average out the error of truncation.
    """
    if x.dtype == tl.float32 and tl.float32 == D.DTYPE and D.PRECISION == "tf32":
        bits = tf32_bits(x)
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(D.DTYPE)


@triton.jit
def split(x, DTYPE: tl.constexpr):
    """Return float32 x as two terms (high, low) in DTYPE, bfloat16, which together have 16 bits of x. high is x truncated, not
    rounded."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(DTYPE), (x - high).to(DTYPE)


@triton.jit
def add_fine_dot(c, a, b, D: tl.constexpr):
    """Return c + a @ b^T in float32, for float32 a and b. Where D.DTYPE is bfloat16, three bfloat16 products take 16 bits of a
    and of b; otherwise the product is `dot`."""
    if tl.bfloat16 == D.DTYPE:
        high, low = split(a, D.DTYPE)
        b_high, b_low = split(b, D.DTYPE)
        c = tl.dot(low, tl.trans(b_high), tl.dot(high, tl.trans(b_low), c))
        return tl.dot(high, tl.trans(b_high), c)
    else:
        return c + dot(a, tl.trans(b), D)


@triton.jit
def half_fine_dot(a, b, D: tl.constexpr):
    """Return a @ b in float32, for a in D.DTYPE and b in float32. Where D.DTYPE is bfloat16, two bfloat16 products take 16 bits
    of b; otherwise three TF32 products take all bits of both."""
    if tl.bfloat16 == D.DTYPE:
        high, low = split(b, D.DTYPE)
        return tl.dot(a, high, tl.dot(a, low))
    else:
        return tl.dot(a.to(D.DTYPE), b.to(D.DTYPE), input_precision="tf32x3")


@triton.jit
def at(x, row, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the address of x[row, head, 0], for x [rows, HEADS, WIDTH] of possibly more than 2^31 elements."""
    return x + (row.to(tl.int64) * HEADS + head) * WIDTH


@triton.jit
def load_tile(x, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    """Load x[tokens, d], [C, BD], in x's own dtype. x: the address in device memory of channel 0 of token 0. tokens, d: index
    vectors [C] and [BD]. A token is HEADS * WIDTH elements behind the one before, or before it if SIGN is -1. Tokens from
    `count` on and channels from WIDTH on are 0."""
    offsets = (SIGN * HEADS * WIDTH) * tokens[:, None] + d[None, :]
    return tl.load(x + offsets, mask=(tokens < count)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    """Store value [C, BD] to x[tokens, d], in x's own dtype. The other arguments are those of `load_tile`; tokens from `count`
    on and channels from WIDTH on are not stored."""
    offsets = (SIGN * HEADS * WIDTH) * tokens[:, None] + d[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(tokens < count)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def load_tokens(
    x, row, h, HEADS: tl.constexpr, WIDTH: tl.constexpr, tokens, d, count, D: tl.constexpr
):  # fmt: skip
    """Load [C, BD] of x [rows, HEADS, WIDTH] for the tokens of a chunk and the channels d. row: the row of the chunk's first
    token. h: a head of D.H; D.H / HEADS of these share one head of x. count: the tokens from which on zeros are returned."""
    return load_tile(at(x, row, h // (D.H // HEADS), HEADS, WIDTH), tokens, d, count, HEADS, WIDTH, D.SIGN)


@triton.jit
def load_pairs(x, pair, tokens, count, D: tl.constexpr):
    """Load x[pair], [C, C], of x [pairs, C, C], which holds a number for each two tokens of a (chunk, head) pair. Rows and
    columns from `count` on are 0."""
    return load_tile(x + pair * D.C * D.C, tokens, tokens, count, 1, D.C, 1)


@triton.jit
def load_state(
    x, index, head, k, v, limit, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EVICTION: tl.constexpr = ""
):  # fmt: skip
    """Load the block [BK, BV] of x[index, head], a state of x [_, H, K, V], in x's own dtype. k, v: the rows and columns of the
    block. Rows from K on and columns from `limit` on are 0. EVICTION: Triton's eviction_policy."""
    p = x + (index.to(tl.int64) * H + head) * (K * V) + k[:, None] * V + v[None, :]
    return tl.load(p, mask=(k < K)[:, None] & (v < limit)[None, :], other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_state(
    x, value, index, head, k, v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EVICTION: tl.constexpr = ""
):  # fmt: skip
    """Store value [BK, BV] as the block of rows k and columns v of x[index, head], of x [_, H, K, V], in x's own dtype."""
    p = x + (index.to(tl.int64) * H + head) * (K * V) + k[:, None] * V + v[None, :]
    mask = (k < K)[:, None] & (v < V)[None, :]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask, eviction_policy=EVICTION)


@triton.jit
def load_key_gates(g, row, head, tokens, k, count, D: tl.constexpr):
    """Load the log gates g [rows, H, K] of a chunk's tokens and the channels k, [C, BK], in their own dtype, raised to at least
    LOG_OF_ZERO. row: the row of the chunk's first token. Tokens from `count` on have gates of 0."""
    x = load_tokens(g, row, head, D.H, D.K, tokens, k, count, D)
    return tl.maximum(x.to(tl.float32), LOG_OF_ZERO).to(x.dtype)


@triton.jit
def load_head_sums(G, row, head, sequence, tokens, count, D: tl.constexpr):
    """Load G at the indices `tokens` of a chunk, the sums of the chunk's log gates through each; from token `count` on, the sum
    of the whole chunk. The result has the shape of `tokens`, a scalar or a vector; it is 0.0 without gates.

    G: the results [rows, H] of `head_gate_cumsums`, or for the form "constant" the gates [N, H] of the sequences. row: the row
    of the chunk's first token.
    """
    if D.FORM == "none":
        return 0.0
    elif D.FORM == "constant":
        gate = tl.maximum(tl.load(G + sequence * D.H + head).to(tl.float32), LOG_OF_ZERO)
        return gate * tl.maximum(tl.minimum(tokens + 1, count), 0) * 1.0
    else:
        tokens = tl.minimum(tokens, count - 1)
        p = G + row.to(tl.int64) * D.H + head
        return tl.load(p + (D.SIGN * D.H) * tokens, mask=tokens >= 0, other=0.0)


@triton.jit
def load_key_sums(last, chunk, head, k, count, D: tl.constexpr, FIRST: tl.constexpr = False):
    """Load the sums over a chunk of the log gates of the channels k, [BK], or with FIRST the sums over its first half. last:
    the result [chunks, H, 2, K] of `scale_operands`. The sums are 0 if count <= 0, where there is no such chunk."""
    p = last + (chunk.to(tl.int64) * D.H + head) * 2 * D.K + FIRST * D.K
    return tl.load(p + k, mask=k < tl.where(count > 0, D.K, 0), other=0.0)


@triton.jit
def gate_sums(matrix, x):
    """Return matrix @ x in float32, for a [C, C] matrix of 0, 1 and -1 and log gates x [C, BK].

    float32 gates are rounded to two terms of TF32, 22 bits together. Gates in other dtypes lose no bit; only the sum rounds.
    A gate of -inf gives NaN in the sums of its channel that do not take it, by 0 * -inf, so callers cut gates first.
    """
    if x.dtype == tl.float32:
        return tl.dot(matrix.to(tl.float32), x, input_precision="tf32x3")
    else:
        return tl.dot(matrix.to(x.dtype), x)


@triton.jit
def fine_gate_sums(matrix, x, D: tl.constexpr):
    """Return matrix @ x as `gate_sums` does, in bfloat16 products with 16 bits of each gate where D.DTYPE is bfloat16.

    A sum is then off by no more than 2^-16 of the sum of its gates' sizes. Where this error changes a decay visibly, the decay
    is near 0.
    """
    if x.dtype == tl.float32 and tl.bfloat16 == D.DTYPE:
        high, low = split(x, D.DTYPE)
        return tl.dot(matrix.to(D.DTYPE), high, tl.dot(matrix.to(D.DTYPE), low))
    else:
        return gate_sums(matrix, x)


@triton.jit
def whole_gate_sums(matrix, x):
    """Return matrix @ x as `gate_sums` does, in bfloat16 products with all 24 bits of each float32 gate.

    Three products of bfloat16 need fewer registers than three of TF32, whose operands cannot be read from shared memory. The
    first term of a gate is its first 8 bits, the second the next 8, the third the last 8, and so they add up to the gate.
    A bit below 2^-126, the least normal number, may be lost: gates of less than 2^-103 have such bits, and their decay is 1.
    """
    if x.dtype == tl.float32:
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        middle, low = split(x - high, tl.bfloat16)
        matrix = matrix.to(tl.bfloat16)
        return tl.dot(matrix, high.to(tl.bfloat16), tl.dot(matrix, middle, tl.dot(matrix, low)))
    else:
        return gate_sums(matrix, x)


@triton.jit
def halving(tokens, half):
    """Return (mask, matrix) of one level of halving, both [C, C]. tokens: 0 to C - 1. half: a power of two below C.

    The mask is True for pairs with token i in the later and token j in the earlier half of a block of 2 * half tokens. The
    matrix sums the gates between a token and the middle of its block. That middle lies between the tokens of each pair, so all
    exponents are <= 0.
    """
    i, j = tokens[:, None], tokens[None, :]
    middle = i // (2 * half) * (2 * half) + half
    later, same = i >= middle, i // (2 * half) == j // (2 * half)
    pairs = same & later & (j < middle)
    matrix = tl.where((later & (j >= middle) & (j <= i)) | ((i < j) & (j < middle)), 1.0, 0.0)
    return pairs, matrix


@triton.jit
def later_half_before(tokens, half):
    """Return the matrix [C, C] of 0 and 1 whose row i, for a token in the later half of a block of 2 * half tokens, sums the
    gates from the block's middle through token i - 1. Rows of the earlier half are 0."""
    i, j = tokens[:, None], tokens[None, :]
    return tl.where((j >= i // (2 * half) * (2 * half) + half) & (j < i), 1.0, 0.0)


@triton.jit
def middle_matrix(tokens, C: tl.constexpr):
    """Return the matrix [C, C] whose product with gates is M. Row i sums the gates from the chunk's middle through token i;
    before the middle, row i sums those of the tokens between i and the middle, with sign -1."""
    i, j = tokens[:, None], tokens[None, :]
    return tl.where((j >= C // 2) & (j <= i), 1.0, 0.0) - tl.where((j < C // 2) & (j > i), 1.0, 0.0)


@triton.jit
def exact_factors(gates, tokens):
    """Return e^{G_i} and e^{G_last - G_i}, [C, BK], each from a sum of its own, and e^{G_last}, [BK]. gates: log gates [C, BK].
    G_i is their sum through token i, and G_last the sum over the chunk."""
    i, j = tokens[:, None], tokens[None, :]
    up = exp(gate_sums(tl.where(j <= i, 1.0, 0.0), gates))
    down = exp(gate_sums(tl.where(j > i, 1.0, 0.0), gates))
    return up, down, exp(tl.sum(gates.to(tl.float32), 0))


@triton.constexpr_function
def num_halvings(C):
    """Return log2(C): how many times a chunk can be halved."""
    return C.bit_length() - 1
