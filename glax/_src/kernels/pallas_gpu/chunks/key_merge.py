"""Merge the inverses of neighbouring blocks of a chunk under the delta rule with per-key gates, by products of all 64 columns.

`chunks/merge.py` has the formula, and multiplies fewer columns. Here a matrix is one array [64, 64] in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.merge import split, store_split
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, quotient, remainder

SIZES = 16, 32  # of the blocks whose inverses `merged` merges
STEP = 16  # rows of the right side of a product

Ref = Any


def split_product(a, pair, rows: list[int]):
    """Return a @ b in float32, without the product of what both lose in bfloat16, from the rows of b that begin at `rows`, STEP
    each. a: in registers. pair: the terms of b."""
    high, rest = split(a)
    terms = (high, pair[0]), (high, pair[1]), (rest, pair[0])
    return tiles.product(PAIRS, *((x[:, row : row + STEP], b.at[pl.ds(row, STEP)]) for row in rows for x, b in terms))


def between_neighbours(L, size: int, reverse: bool):
    """Return the blocks of L between the first and the second of every two blocks of `size` on the diagonal, and 0 elsewhere."""
    i, j = tiles.positions(reverse)
    block_i, block_j = quotient(i, size), quotient(j, size)
    return jnp.where((block_i == block_j + 1) & (remainder(block_j, 2) == 0), L, 0.0)


def tokens_of(size: int, second: bool, reverse: bool) -> list[int]:
    """Return where the tokens of the first, or the second, of every two blocks of `size` begin, STEP at a time."""
    rows = range(0, C, STEP)
    return [row for row in rows if (C - STEP - row if reverse else row) // size % 2 == second]


def merged(X, L, size: int, reverse: bool, inverse: tuple[Ref, Ref], product: tuple[Ref, Ref]):
    """Return the inverses of the blocks of 2 * size on the diagonal of I + L, from X [C, C], the inverses of the blocks of
    `size`. inverse, product: the tiles of X and of M X, which may be the same."""
    if product is inverse:
        plgpu.commit_smem()  # all warps have read the product before
    store_split(inverse, X)
    between = between_neighbours(L, size, reverse)
    through = split_product(between, inverse, tokens_of(size, False, reverse))
    if product is inverse:
        plgpu.commit_smem()  # all warps have read X
    store_split(product, through)
    return X - split_product(X, product, tokens_of(size, True, reverse))
