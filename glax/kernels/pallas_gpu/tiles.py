"""What the kernels share: the matrices that sum gates within a chunk, masks, and reading tiles and vectors."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
LOG2E = math.log2(math.e)


def exp(x):
    return jnp.exp2(x * LOG2E)


def tile(ref):
    """A tile in the registers that products leave theirs in."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def vector(ref, kept: int):
    """ref [n] for a tile [64, 64] whose dimension `kept` it runs along."""
    x = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - kept))
    return jnp.broadcast_to(x[None, :] if kept else x[:, None], (CHUNK, CHUNK))


def positions():
    """Row and column of every element of a tile [64, 64]."""
    zero = lax.optimization_barrier(jnp.int32(0))  # or the compiler keeps what follows in registers throughout a loop
    return (zero + plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d, layout=plgpu.Layout.WGMMA) for d in (0, 1))


@dataclass(frozen=True)
class Walk:
    """Masks and matrices [i, j] over the tokens of a chunk as they lie in memory; walked backwards if `reverse`."""

    reverse: bool

    def earlier(self):
        """Token i no later than token j."""
        i, j = positions()
        return i >= j if self.reverse else i <= j

    def later(self):
        i, j = positions()
        return i <= j if self.reverse else i >= j

    def suffix_matrix(self):
        """Row i sums from token i on."""
        return jnp.where(self.earlier(), 1.0, 0.0).astype(jnp.bfloat16)

    def prefix_matrix(self):
        """Row i sums what is before token i."""
        return jnp.where(self.earlier(), 0.0, 1.0).astype(jnp.bfloat16)

    def middle_matrix(self):
        """Row i sums the gates from the chunk's middle through token i, negatively before it."""
        i, j = positions()
        if self.reverse:
            i, j = CHUNK - 1 - i, CHUNK - 1 - j
        after = jnp.where(j <= i, 1.0, 0.0)
        return jnp.where(j >= CHUNK // 2, after, after - 1.0).astype(jnp.bfloat16)

    def halves_matrix(self):
        """[8, 64]: ones over the tokens of the first half, ones over those of the second, and nothing."""
        row, j = (lax.broadcasted_iota(jnp.int32, (8, CHUNK), d) for d in (0, 1))
        second = (j < CHUNK // 2) if self.reverse else (j >= CHUNK // 2)
        own = jnp.where(second, row == 1, row == 0)
        return jnp.where(own, 1.0, 0.0).astype(jnp.bfloat16)
