"""Invert I + L, where L [C, C] is strictly lower triangular: L_ij is what token i of a chunk erases of what token j wrote.

The inverses of neighbouring blocks on the diagonal are merged, from single tokens on, 1 -> 2 -> 4, until one block is left:

    [A  0]^-1     [    A^-1          0   ]
    [B  D]     =  [-D^-1 B A^-1    D^-1  ]

Up to blocks of 16, a merge is a product of whole blocks of 16: with X the inverses and M what is in the place of B, X - X M X.
Where the inverse is used in float32, blocks of 16 are inverted by forward substitution, which is slower and two bits more exact.

No power of L is formed, because the powers may grow far beyond the inverse. Merges multiply in three TF32 products, whose error
is two bits larger than float32's.
"""

from glax._src.kernels.triton.launch import tl, triton

BLOCK = tl.constexpr(16)


@triton.jit
def unit_inverse(L, C: tl.constexpr, DTYPE: tl.constexpr):
    """Compute (I + L)^-1, [C, C], for a strictly lower triangular L in float32; C is 16 times a power of two.

    DTYPE: of the products that the inverse is used in.
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
    """Return the blocks of L on the diagonal, [n, SIZE, SIZE], or with BELOW = 1 those under it, the first of which is 0."""
    n: tl.constexpr = C // SIZE
    rows, columns = tl.arange(0, n)[:, None, None, None], tl.arange(0, n)[None, None, :, None]
    return tl.sum(tl.where(rows == columns + BELOW, tl.reshape(L, [n, SIZE, n, SIZE]), 0.0), 2)


@triton.jit
def small_inverses(L, N: tl.constexpr):
    """Compute (I + L)^-1 for N blocks, [N, 16, 16]."""
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    X = tl.where(i == j, 1.0, tl.where((i == j + 1) & (j % 2 == 0), -L, 0.0))
    X = merged_within(X, L, N, 2)
    X = merged_within(X, L, N, 4)
    return merged_within(X, L, N, 8)


@triton.jit
def merged_within(X, L, N: tl.constexpr, SIZE: tl.constexpr):
    """Merge the inverses X of neighbouring blocks of SIZE on the diagonals of N blocks of 16, [N, 16, 16]."""
    i, j = tl.arange(0, BLOCK)[None, :, None] // SIZE, tl.arange(0, BLOCK)[None, None, :] // SIZE
    M = tl.where((i == j + 1) & (j % 2 == 0), L, 0.0)
    return X - of_blocks(X, of_blocks(M, X, N, BLOCK), N, BLOCK)


@triton.jit
def of_blocks(a, b, N: tl.constexpr, SIZE: tl.constexpr):
    """Return the products of N blocks, [N, SIZE, SIZE]."""
    if N == 1:
        shape: tl.constexpr = [SIZE, SIZE]
        return tl.reshape(multiplied(tl.reshape(a, shape), tl.reshape(b, shape)), [1, SIZE, SIZE])
    else:
        return multiplied(a, b)


@triton.jit
def substituted(L, N: tl.constexpr):
    """Compute (I + L)^-1 for N blocks, [N, 16, 16]. Step r subtracts the finished row r from the rows below it."""
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
    """Merge the inverses X [n, SIZE, SIZE] of neighbouring blocks of I + L into [n / 2, 2 * SIZE, 2 * SIZE]."""
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
    """Return every second one of the blocks X [2 * N, SIZE, SIZE], from the first (WHICH = 0) or the second on."""
    which = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(which == WHICH, tl.reshape(X, [N, 2, SIZE, SIZE]), 0.0), 1)


@triton.jit
def multiplied(a, b):
    return tl.dot(a, b, input_precision="tf32x3")
