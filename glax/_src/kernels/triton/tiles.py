"""What the chunked kernels share: reading tiles of tokens, sums of gates, and the decayed scores of all pairs in a chunk.

Within a chunk tokens stand in walking order, whatever the direction: token i is row origin + SIGN * i. Logarithms are
natural; e^x is 2^(x log2 e).
"""

from glax._src.kernels.common import limits
from glax._src.kernels.triton.launch import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LOG_OF_ZERO = tl.constexpr(limits.LOG_OF_ZERO)
FAST_LIMIT = tl.constexpr(limits.FAST_LIMIT)


@triton.jit
def kept_loop(n, count):
    """n, for any count >= 0; that the compiler does not know, so that it does not unroll a loop of n passes."""
    return tl.where(count >= 0, n, 0)


@triton.jit
def looked_at(reach, count, EACH: tl.constexpr):
    """How many of its EACH chunks and heads a program must look at one by one: all, or none if none reached too far."""
    pair = tl.program_id(0) * EACH + tl.arange(0, EACH)
    furthest = tl.max(tl.load(reach + pair, mask=pair < count, other=0.0), 0)
    return tl.where(furthest > FAST_LIMIT, EACH, 0)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b in float32, its operands rounded to DTYPE; float32 operands multiply in PRECISION."""
    return tl.dot(operand(a, DTYPE, PRECISION), operand(b, DTYPE, PRECISION), input_precision=PRECISION)


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x in DTYPE, and for TF32 rounded to nearest: tensor cores cut its last digits off, an error that sums do not even out."""
    if x.dtype == tl.float32 and tl.float32 == DTYPE and PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE)


@triton.jit
def split(x, DTYPE: tl.constexpr):
    """x in float32 as two terms in bfloat16, the first cut and not rounded: together 16 bits."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(DTYPE), (x - high).to(DTYPE)


@triton.jit
def add_fine_dot(c, a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """c + a @ b^T in float32; operands in float32, of which bfloat16 products see 16 bits."""
    if tl.bfloat16 == DTYPE:
        high, low = split(a, DTYPE)
        b_high, b_low = split(b, DTYPE)
        c = tl.dot(low, tl.trans(b_high), tl.dot(high, tl.trans(b_low), c))
        return tl.dot(high, tl.trans(b_high), c)
    else:
        return c + dot(a, tl.trans(b), DTYPE, PRECISION)


@triton.jit
def half_fine_dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b in float32; a is in DTYPE, b in float32, of which bfloat16 products see 16 bits, and those in TF32 all."""
    if tl.bfloat16 == DTYPE:
        high, low = split(b, DTYPE)
        return tl.dot(a, high, tl.dot(a, low))
    else:
        return dot(a, b, DTYPE, "tf32x3")


@triton.jit
def at(x, row, head, HEADS: tl.constexpr, D: tl.constexpr):
    """The address of x[row, head, 0]; x is [rows, HEADS, D] and may pass 2^31 elements."""
    return x + (row.to(tl.int64) * HEADS + head) * D


@triton.jit
def load_tile(x, tokens, d, count, HEADS: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr):
    """x[tokens, d], [C, BD], from the address of token 0; tokens from `count` on read 0, as do columns from D on."""
    offsets = (SIGN * HEADS * D) * tokens[:, None] + d[None, :]
    return tl.load(x + offsets, mask=(tokens < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, tokens, d, count, HEADS: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr):
    offsets = (SIGN * HEADS * D) * tokens[:, None] + d[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(tokens < count)[:, None] & (d < D)[None, :])


@triton.jit
def load_state(
    x, index, head, k, v, limit, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EVICTION: tl.constexpr = ""
):  # fmt: skip
    """x[index, head, k, v], [BK, BV]; 0 beyond K and from column `limit` on."""
    p = x + (index.to(tl.int64) * H + head) * (K * V) + k[:, None] * V + v[None, :]
    return tl.load(p, mask=(k < K)[:, None] & (v < limit)[None, :], other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_state(
    x, value, index, head, k, v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EVICTION: tl.constexpr = ""
):  # fmt: skip
    p = x + (index.to(tl.int64) * H + head) * (K * V) + k[:, None] * V + v[None, :]
    mask = (k < K)[:, None] & (v < V)[None, :]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask, eviction_policy=EVICTION)


@triton.jit
def load_key_gates(g, row, head, tokens, k, count, H: tl.constexpr, K: tl.constexpr, SIGN: tl.constexpr):
    """[C, BK], in the dtype they came in, cut at the logarithm of zero."""
    x = load_tile(at(g, row, head, H, K), tokens, k, count, H, K, SIGN)
    return tl.maximum(x.to(tl.float32), LOG_OF_ZERO).to(x.dtype)


@triton.jit
def load_head_sums(G, row, head, sequence, tokens, count, H: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr):
    """G [tokens]: the sums of the chunk's gates through these tokens; from `count` on they are the chunk's. G comes from
    `walk.chunk_sums`, or holds the sequences' constants."""
    if FORM == "none":
        return 0.0
    elif FORM == "constant":
        gate = tl.maximum(tl.load(G + sequence * H + head).to(tl.float32), LOG_OF_ZERO)
        return gate * tl.maximum(tl.minimum(tokens + 1, count), 0) * 1.0
    else:
        tokens = tl.minimum(tokens, count - 1)
        p = G + row.to(tl.int64) * H + head
        return tl.load(p + (SIGN * H) * tokens, mask=tokens >= 0, other=0.0)


@triton.jit
def load_last(last, chunk, head, k, count, H: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr = False):
    """The sums of a chunk's key gates, or those of its first half, [BK]; 0 where the chunk has no token."""
    p = last + (chunk.to(tl.int64) * H + head) * 2 * K + FIRST * K
    return tl.load(p + k, mask=k < tl.where(count > 0, K, 0), other=0.0)


@triton.jit
def sums(matrix, x):
    """matrix @ x for a [C, C] matrix of 0, 1 and -1 and gates x [C, D], exact but for the float32 sum."""
    if x.dtype == tl.float32:
        return tl.dot(matrix.to(tl.float32), x, input_precision="tf32x3")
    else:
        return tl.dot(matrix.to(x.dtype), x)


@triton.jit
def halving(tokens, half):
    """The pairs of tokens in the later and the earlier half of one block of 2 * half tokens, and the matrix that sums the
    gates between a token and the middle of its block: no pair's reference lies outside it, so exponents are <= 0."""
    i, j = tokens[:, None], tokens[None, :]
    middle = i // (2 * half) * (2 * half) + half
    later, same = i >= middle, i // (2 * half) == j // (2 * half)
    pairs = same & later & (j < middle)
    matrix = tl.where((later & (j >= middle) & (j <= i)) | ((i < j) & (j < middle)), 1.0, 0.0)
    return pairs, matrix


@triton.jit
def middle_matrix(tokens, C: tl.constexpr):
    """Row i sums the gates from the chunk's middle through token i, negatively before it."""
    i, j = tokens[:, None], tokens[None, :]
    return tl.where((j >= C // 2) & (j <= i), 1.0, 0.0) - tl.where((j < C // 2) & (j > i), 1.0, 0.0)


@triton.jit
def exact_factors(gates, tokens):
    """e^{G_i} and e^{G_last - G_i}, [C, BK], each from its own sum; and e^{G_last}, [BK]."""
    i, j = tokens[:, None], tokens[None, :]
    up = exp(sums(tl.where(j <= i, 1.0, 0.0), gates))
    down = exp(sums(tl.where(j > i, 1.0, 0.0), gates))
    return up, down, exp(tl.sum(gates.to(tl.float32), 0))


@triton.constexpr_function
def levels(C):
    """How often a chunk can be halved."""
    return C.bit_length() - 1
