"""Invert I + L inside a kernel, where L [C, C] is strictly triangular: L_ij is what token i erases of what token j wrote.

Blocks of 8 on the diagonal are inverted by substitution, all together: row i of each lies in sublane i of one tile of 128 lanes.
Neighbouring blocks are then merged, 8 -> 16 -> 32, until one is left. With X the inverses so far, and M what L has between two
neighbours:

    [A  0]^-1     [    A^-1          0   ]
    [B  D]     =  [-D^-1 B A^-1    D^-1  ]   =   X - X M X

Only the later half of each pair's rows changes, so only those rows are multiplied. No power of L is formed: where keys repeat,
powers grow far beyond the inverse, and their series cancels. Every product takes three bfloat16 terms of each float32 operand.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.sizes import LANES

BLOCK = 8  # the sublanes of a tile


def unit_inverse(L, reverse: bool):
    """Compute (I + L)^-1 [C, C] for a strictly lower triangular L or, if `reverse`, for a strictly upper triangular one."""
    C, size = L.shape[0], BLOCK
    X = inverted_blocks(L, reverse)
    row, column = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    while size < C:
        # whether i and j are in neighbouring blocks of one pair
        neighbours = (row ^ column) & -size == size
        pairs = X.reshape(C // (2 * size), 2, size, C)
        first, second = (pairs[:, 1], pairs[:, 0]) if reverse else (pairs[:, 0], pairs[:, 1])
        later = second.reshape(C // 2, C)
        M = jnp.where(neighbours, L, 0)
        later = later - chunk_math.exact_dot(chunk_math.exact_dot(later, M), X)
        second = later.reshape(second.shape)
        X = jnp.stack([second, first] if reverse else [first, second], axis=1).reshape(C, C)
        size *= 2
    return X


def inverted_blocks(L, reverse: bool):
    """Compute (I + L)^-1 of every block [8, 8] on the diagonal, and 0 elsewhere: [C, C].

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
    return jnp.where(on_diagonal, X[None, :, :C], 0).reshape(C, C)
