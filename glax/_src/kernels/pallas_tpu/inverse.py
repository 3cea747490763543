"""Invert I + L inside a kernel, where L [C, C] is strictly triangular: L_ij is what token i erases of what token j wrote.

Blocks of 8 on the diagonal are inverted by substitution, all together: row i of each lies in sublane i of one tile of 128 lanes.
Neighbouring blocks are then merged, 8 -> 16 -> 32, until one is left. With X the inverses so far, and M what L has between two
neighbours:

    [A  0]^-1     [    A^-1          0   ]
    [B  D]     =  [-D^-1 B A^-1    D^-1  ]   =   X - X M X

Only the later half of each pair's rows changes, so only those rows are multiplied. No power of L is formed: where keys repeat,
powers grow far beyond the inverse, and their series cancels. Every product takes three bfloat16 terms of each float32 operand.

Each product waits for the one before it. Therefore the functions are generators, which yield where a result is awaited:
`delta.side_by_side` traces the same stage of all units of a program before the next stage.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.sizes import LANES

BLOCK = 8  # the sublanes of a tile


def unit_inverse(L, reverse: bool):
    """Return (I + L)^-1 [C, C] in float32. The function is a generator, which yields between stages.

    L is strictly lower triangular or, if `reverse`, strictly upper triangular.
    """
    C, size = L.shape[0], BLOCK
    X = yield from inverted_blocks(L, reverse)
    row, column = (lax.broadcasted_iota(jnp.int32, (C // 2, C), axis) for axis in (0, 1))
    while size < C:
        first, later = split_pairs(X, size, reverse)
        # whether j is in the first block of the pair whose later block has row i
        in_first = (column & size == 0) != reverse
        neighbours = in_first & ((row & -size) * 2 == (column & (-2 * size)))
        M = jnp.where(neighbours, split_pairs(L, size, reverse)[1], 0)
        product = block_dot(later, M, size, reverse, x_is_first=False)
        yield
        later = later - block_dot(product, first, size, reverse, x_is_first=True)
        X = join_pairs(first, later, size, reverse)
        yield
        size *= 2
    return X


def split_pairs(X, size: int, reverse: bool):
    """Return the rows of X in the first block of every pair of neighbouring blocks, and those in the later block, [C / 2, C]
    each. X: [C, C]. size: the rows of a block. reverse: whether the later block of a pair is the one with the lower row
    numbers."""
    C = X.shape[0]
    pairs = X.reshape(C // (2 * size), 2, size, C)
    first, later = (pairs[:, i].reshape(C // 2, C) for i in ((1, 0) if reverse else (0, 1)))
    return first, later


def join_pairs(first, later, size: int, reverse: bool):
    """Return the matrix [C, C] with the rows of both arrays, [C / 2, C] each: the inverse of `split_pairs`, which has the other
    arguments."""
    C, dtype = first.shape[1], first.dtype
    if dtype == jnp.bfloat16 and size < 16:  # rows of less than a tile
        first, later = first.astype(jnp.float32), later.astype(jnp.float32)
    first, later = (x.reshape(C // (2 * size), size, C) for x in (first, later))
    return jnp.stack([later, first] if reverse else [first, later], axis=1).reshape(C, C).astype(dtype)


def block_dot(x, y, size: int, reverse: bool, x_is_first: bool):
    """Return x @ y for one block of every pair, to float32, as [C / 2, C]. One product computes six of the products of the
    three bfloat16 terms x0, x1, x2 and y0, y1, y2.

    x [C / 2, C] has one block in each row of blocks: in the lanes of its pair's first block with `x_is_first`, else in those of
    the later one. The lanes of the pair's other block are 0, and take a second term of x. y [C / 2, C] has the rows that x
    multiplies. size, reverse: as in `split_pairs`.

                            x0 y0 + x1 y1      x0 y1 + x1 y0 + x2 y0 + x0 y2
    """
    C = y.shape[1]
    shift = size if x_is_first != reverse else C - size
    x0, x1, x2 = chunk_math.bfloat16_parts(x, exact=True)
    y0, y1, y2 = chunk_math.bfloat16_parts(y, exact=True)

    def rows(own, others):
        """Return y's operand [C, C]: `own` in the rows that multiply the first term of x, and `others` in those that multiply
        its second."""
        first, later = (own, others) if x_is_first else (others, own)
        return join_pairs(first, later, size, reverse)

    left = jnp.concatenate([x0 + roll_lanes(x1, shift), x2 + roll_lanes(x0, shift)], axis=1)
    above = jnp.concatenate([rows(y0, y1), rows(y1, y0)], axis=1)
    below = jnp.concatenate([jnp.zeros((C, C), jnp.bfloat16), rows(y0, y2)], axis=1)
    product = chunk_math.dot(left, jnp.concatenate([above, below]), chunk_math.NN, jnp.bfloat16)
    return product[:, :C] + product[:, C:]


def roll_lanes(x, shift: int):
    """Return bfloat16 x with its lanes moved by `shift` to higher lanes, around the end. A TPU moves lanes of 32 bits, here two
    rows in one."""
    return pltpu.bitcast(pltpu.roll(pltpu.bitcast(x, jnp.int32), shift, 1), jnp.bfloat16)


def inverted_blocks(L, reverse: bool):
    """Return (I + L)^-1 of every block [8, 8] on the diagonal, and 0 elsewhere: [C, C]. The function is a generator, which
    yields after each column.

    Column m of a block is done when row m is: then L_im times row m is subtracted from every later row i.
    """
    C = L.shape[0]
    width, shape = max(C, LANES), (C // BLOCK, BLOCK, C)
    number, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
    on_diagonal = (column & -BLOCK) == number * BLOCK
    # [8, width]: the blocks side by side
    blocks = jnp.where(on_diagonal, L.reshape(shape), 0).sum(0)
    blocks = blocks if width == C else jnp.concatenate([blocks, jnp.zeros((BLOCK, width - C), L.dtype)], axis=1)
    i, lane = (lax.broadcasted_iota(jnp.int32, (BLOCK, width), axis) for axis in (0, 1))
    place = lane & (BLOCK - 1)  # of a column in its block
    X = jnp.where(i == place, 1.0, 0.0)
    for m in range(BLOCK - 1, 0, -1) if reverse else range(BLOCK - 1):
        # column m of each block in all of its lanes
        column = jnp.where(place == m, blocks, 0)
        column = pltpu.roll(column, (width - m) % width, 1)
        for shift in (1, 2, 4):
            column = column + pltpu.roll(column, shift, 1)
        X = X - column * X[m : m + 1]
        yield
    return jnp.where(on_diagonal, X[None, :, :C], 0).reshape(C, C)
