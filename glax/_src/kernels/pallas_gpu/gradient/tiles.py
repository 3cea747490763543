"""Provide what the gradient's kernels share: masks and sums over a chunk, and reading tiles and vectors.

A chunk is 64 tokens. Tiles [64, 64] have the register layout of products.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, LOG2E, WGMMA
from glax._src.kernels.pallas_gpu.plan import C as CHUNK

TILE = (CHUNK, 64)


def exp(x):
    """Return e^x."""
    return jnp.exp2(x * LOG2E)


def half(p):
    """Return the p-th half of 128 columns, or all of 64."""
    return pl.ds(p * 64, 64)


def along(x):
    """Return x [64] of the columns, repeated over the rows of a tile."""
    return jnp.broadcast_to(x[None, :], TILE)


def columns(ref):
    """Return ref [64], a vector by column in shared memory, repeated over the rows of a tile."""
    return along(plgpu.load(ref, layout=BY_COLUMN))


def accumulator(shape=TILE):
    """Return the type of the sum that products are added to, in float32."""
    return plgpu.ACC(shape, jnp.float32)


def product(*pairs, shape=TILE):
    """Return the sum of a @ b over the pairs, in float32; see `tiles.product`."""
    return tiles.product(shape, *pairs)


def masked(mask, x, other: float | jax.Array = 0.0):
    """Return x where the mask is true, else `other`, in bfloat16.

    The barrier keeps the compiler from rounding first, which would leave two registers for every pair.
    """
    return lax.optimization_barrier(jnp.where(mask, x, other)).astype(jnp.bfloat16)


def tokens(reverse: bool):
    """Return the position of each token of a chunk in scan order, from 1, by its row in memory: [64]. `ScanOrder` reads it.

    Numbers from 0 on would be an iota, which XLA computes in every call.
    """
    order = np.arange(1, CHUNK + 1, dtype=np.int32)
    return order[::-1] if reverse else order


def marks(newest, reverse: bool):
    """Return the positions of tokens, from 1, and of their newest resets, from 1 or 0 without one, in one number: 256 times the
    first plus the second, [B, chunks, 64]. newest: the result of `newest_resets`."""
    return newest + 1 + 256 * tokens(reverse)


@dataclass(frozen=True)
class ScanOrder:
    """Form masks and matrices [i, j] over the tokens of a chunk as they lie in memory, [64, 64]; `reverse` scans them backwards.

    order: the array `tokens` in memory, or `marks` if `resets`. It is read anew for every mask, because the compiler would hold
    masks that depend on positions alone in registers throughout a loop. Masks of pairs exclude those that a reset divides.
    """

    reverse: bool
    order: Any
    resets: bool = False

    @property
    def last(self) -> int:
        """Return the token by which a scan leaves the chunk."""
        return 0 if self.reverse else CHUNK - 1

    def positions(self):
        """Return the position in scan order of every row and of every column, from 1."""
        i = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=WGMMA)
        j = plgpu.load(self.order, layout=BY_COLUMN, optimized=False)
        return CHUNK - i if self.reverse else i + 1, along(j >> 8 if self.resets else j)

    def earlier(self):
        """Return where token i is no later than token j."""
        i, j = self.positions()
        return self.in_reach(i, i <= j)

    def before(self):
        """Return where token i is before token j."""
        i, j = self.positions()
        return self.in_reach(i, i < j)

    def in_reach(self, i, mask):
        """Return the mask [i, j] without pairs in which position i is before the newest reset of token j."""
        if not self.resets:
            return mask
        return mask & (i >= along(plgpu.load(self.order, layout=BY_COLUMN, optimized=False) & 255))

    def sums(self):
        """Return two matrices by which the gradient of the gates is summed: over token i and the tokens j behind it, and over
        the tokens j before it.

        With resets the first sum ends where a reset begins, and it is empty at a reset. The second needs no such end, because
        it is over tokens behind the last reset.
        """
        i, j = self.positions()
        mask = i <= j
        behind = self.in_reach(i - 1, mask) if self.resets else mask
        return masked(behind, 1.0), masked(mask, 0.0, 1.0)

    def from_state(self, x):
        """Return x [64, n] with zeros in the rows of tokens that have a reset at or before them."""
        newest = plgpu.load(self.order, layout=BY_ROW) & 255
        return jnp.where(tiles.by_row(newest, x.shape) == 0, x, 0.0)

    def to_state(self, x):
        """Return x [64, n] with zeros in the rows of tokens that have a reset behind them."""
        position = plgpu.load(self.order, layout=BY_ROW) >> 8
        return jnp.where(tiles.by_row(position, x.shape) >= (self.order[self.last] & 255), x, 0.0)

    def passes(self):
        """Return 1.0 if no reset is in the chunk, else 0.0."""
        return ((self.order[self.last] & 255) == 0).astype(jnp.float32)

    def later(self):
        """Return where token i is no earlier than token j."""
        i, j = self.positions()
        return i >= j

    def middle_matrix(self):
        """Return the matrix whose row i sums the gates from the chunk's middle through token i, with sign -1 before the
        middle."""
        j = plgpu.broadcasted_iota(jnp.int32, TILE, 1, layout=WGMMA)
        second = j < CHUNK // 2 if self.reverse else j >= CHUNK // 2
        least = jnp.where(second, 0.0, -1.0)
        return masked(self.later(), least + 1.0, least)
