"""Form the inverse of I + L by blocks, in arrays of 16 columns.

L [64, 64] is strictly triangular. X_b is the inverse of block b on the diagonal of I + L, and L_sf the block of L in the rows of
block s and the columns of block f. Blocks of 16 are inverted by substitution (`blocks.py`). Then neighbours are merged, and
merged again, until one block is left. Where f is the first of two neighbours in scanning order, and s the second, their inverse
has X_f and X_s on its diagonal, and between them

    Y = -X_s L_sf X_f

A matrix with blocks of `size` on its diagonal is a list of size / 16 arrays [64, 16]. Together they are [64, size]: each row has
the columns of its own block, and no others. Products have all 64 rows, of which those of the blocks s are used. Operands are sums
of two bfloat16 numbers, which hold 16 bits.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks import blocks as delta_blocks
from glax._src.kernels.pallas_gpu.chunks.blocks import BLOCK
from glax._src.kernels.pallas_gpu.device.tiles import high_part, iota
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder

BF16 = jnp.bfloat16
COLUMN = C, BLOCK
# For each of the two merges: the first column of X in the tiles where it is stored, and the first of L X. What a merge overwrites
# was read before the last barrier.
PLACES = (0, BLOCK), (2 * BLOCK, 0)

Ref = Any


def split(x):
    """Return x as two terms of bfloat16."""
    high = high_part(x)
    return high.astype(BF16), (x - high).astype(BF16)


def store_split(pair, x):
    """Store x as the two terms of a pair of tiles."""
    for tile, term in zip(pair, split(x), strict=True):
        tile[...] = term
    plgpu.commit_smem()


def store_inverse(L: Callable, reverse: bool, pair: tuple[Ref, Ref], result: Ref):
    """Store (I + L)^-1 - I in bfloat16, [C, C].

    L: a function of (size, places, is_counted), which returns [C, BLOCK] of L in float32, in the rows [size i, size (i + 1)) the
    columns from places[i] on. So L is formed where it is used. is_counted: a mask of the entries that count, the others being 0;
    None where the others do no harm, because no product of their rows is used.
    reverse: whether L is upper triangular. pair: tiles [C, C] of BLOCK columns, for two terms.
    """
    i, j = remainder(iota(COLUMN, 0), BLOCK), iota(COLUMN, 1)
    own = L(BLOCK, range(0, C, BLOCK), i < j if reverse else i > j)
    X = delta_blocks.inverses_of_stacked_blocks(own, reverse)
    between = across([X], L, reverse, pair, *PLACES[0])
    further = across(joined([X], between, reverse), L, reverse, pair, *PLACES[1])
    rest = joined([jnp.where(i == j, 0.0, X)], between, reverse)
    result[...] = jnp.concatenate(joined(rest, further, reverse), axis=1).astype(BF16)


def of_rows(size: int, found: list):
    """Return the rows [size i, size i + size) of the array i in found, for every i."""
    number, rows = quotient(iota(found[0].shape, 0), size), found[-1]
    for i, x in enumerate(found[:-1]):
        rows = jnp.where(number == i, x, rows)
    return rows


def joined(X: list, between: list, reverse: bool) -> list:
    """Return the inverses of blocks of twice the size. X: those of the blocks. between: Y, in the rows of the second ones."""
    is_odd = remainder(quotient(iota(COLUMN, 0), len(X) * BLOCK), 2) == 1
    first = [jnp.where(is_odd, 0.0 if reverse else y, x) for x, y in zip(X, between, strict=True)]
    return first + [jnp.where(is_odd, x, y if reverse else 0.0) for x, y in zip(X, between, strict=True)]


def across(X: list, L: Callable, reverse: bool, pair, place: int, onward: int) -> list:
    """Return Y of every two neighbours, in the rows of the second.

    X: the inverses of the blocks. L: as for `store_inverse`. pair: tiles that take X from column `place` on, and L X from
    `onward` on.
    """
    n, size = len(X), len(X) * BLOCK
    pairs = range(C // (2 * size))
    first, second = ([(2 * i + (reverse != late)) * size for i in pairs] for late in (False, True))
    terms = [split(x) for x in X]
    for at, of_column in enumerate(terms):
        store_columns(pair, place + at * BLOCK, of_column)
    plgpu.commit_smem()
    left = [split(L(2 * size, [row + at * BLOCK for row in first])) for at in range(n)]
    store_columns(pair, onward, split(products(left, pair, place, size, first)))
    plgpu.commit_smem()
    found = products(terms, pair, onward, size, second)
    return [-found[:, at : at + BLOCK] for at in range(0, size, BLOCK)]


def store_columns(pair, place: int, terms):
    """Store the terms of a matrix from column `place` on."""
    for tile, term in zip(pair, terms, strict=True):
        tile.at[:, pl.ds(place, term.shape[1])][...] = term


def products(left: list, pair, place: int, size: int, rows: list[int]):
    """Return a @ b for every 2 * size rows of a, [C, size]. The product of the second terms of both is left out.

    left: a in columns of BLOCK, each in two terms in registers. pair: two terms of b, in the columns from `place` on. rows: the
    row in which b begins, for each 2 * size rows of a.
    """

    def scope(*totals):
        for total, row in zip(totals, rows, strict=True):
            for at, (high, rest) in enumerate(left):
                part = pl.ds(row + at * BLOCK, BLOCK), pl.ds(place, size)
                for a, tile in ((high, pair[0]), (high, pair[1]), (rest, pair[0])):
                    plgpu.wgmma(total, a, tile.at[part])
        return of_rows(2 * size, lax.optimization_barrier([total[...] for total in totals]))

    return pl.run_scoped(scope, *(plgpu.ACC((C, size), jnp.float32) for _ in rows))
