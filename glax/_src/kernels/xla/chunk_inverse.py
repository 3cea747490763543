"""Invert I + L, where L [C, C] is strictly lower triangular: L_ij is what token i of a chunk erases of what token j wrote.

Blocks of 16 are inverted by forward substitution. Neighbouring blocks are then merged, 16 -> 32 -> 64:

    [A  0]^-1     [    A^-1          0   ]
    [B  D]     =  [-D^-1 B A^-1    D^-1  ]

No power of L is formed. Where keys repeat, the powers of L grow far beyond the inverse, and their series cancels. All products
have float32 operands or wider, at the highest precision.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.recurrence import varying_like
from glax._src.kernels.xla.chunk_math import matmul

BLOCK = 16


def unit_inverse(L: Float[Array, "B H C C"], descending: bool) -> Float[Array, "B H C C"]:
    """Compute (I + L)^-1 for a strictly lower triangular L or, if `descending`, for a strictly upper triangular L."""
    C = L.shape[-1]
    L = jnp.flip(L, (-2, -1)) if descending else L
    width = min(BLOCK, C)
    while width < C:
        width *= 2
    padding = [(0, 0)] * (L.ndim - 2) + [(0, width - C)] * 2
    inverse = merged(jnp.pad(L, padding) if width > C else L)[..., :C, :C]
    return jnp.flip(inverse, (-2, -1)) if descending else inverse


def merged(L: Float[Array, "B H C C"]) -> Float[Array, "B H C C"]:
    """Compute (I + L)^-1, for C of at most BLOCK or BLOCK times a power of two."""
    C = L.shape[-1]
    size = min(BLOCK, C)
    blocks = substituted(diagonal_blocks(L, size, 0))  # [B, H, n, size, size]
    while size < C:
        below = diagonal_blocks(L, size, 1)  # [B, H, n / 2, size, size]
        first, second = blocks[:, :, 0::2], blocks[:, :, 1::2]
        corner = -matmul(second, matmul(below, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return blocks[:, :, 0]


def diagonal_blocks(L: Float[Array, "B H C C"], size: int, below: int) -> Float[Array, "B H n size size"]:
    """Return blocks of `size` x `size` of L: for below = 0 all n blocks on the diagonal, [B, H, n, size, size]; for below = 1
    the blocks directly below the first, third, fifth ... of these, [B, H, n / 2, size, size]."""
    n, step = L.shape[-1] // size, 1 + below
    parts = [L[..., (i + below) * size : (i + below + 1) * size, i * size : (i + 1) * size] for i in range(0, n, step)]
    return jnp.stack(parts, axis=2)


def substituted(L: Float[Array, "B H n C C"]) -> Float[Array, "B H n C C"]:
    """Compute (I + L)^-1 of each block row by row: row i is row i of I minus the sum over j < i of L_ij times row j of the
    inverse."""
    C = L.shape[-1]
    identity = jnp.asarray(np.eye(C), L.dtype)

    def row(i, inverse):
        factors = lax.dynamic_index_in_dim(L, i, -2, keepdims=False)[..., None]
        new = lax.dynamic_index_in_dim(identity, i, keepdims=False) - (factors * inverse).sum(-2)
        return lax.dynamic_update_index_in_dim(inverse, new, i, -2)

    start = varying_like(jnp.broadcast_to(identity, L.shape), L)
    return lax.fori_loop(1, C, row, start)
