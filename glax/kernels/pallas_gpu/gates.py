"""What a walk with a gate for every key channel finds out of its gates before it scales by them."""

import jax.numpy as jnp

from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.plan import quotient
from glax.kernels.pallas_gpu.tiles import C

SAMPLES, WEAK = 8, -0.25  # gates of a program that are asked, and the average above which they are weak


def in_range(largest, ends):
    """Of every row of a chunk whether the fast form holds there; largest: of |M|; ends: what the chunk's halves sum to. Sums of
    gates of -inf are NaN, for which no comparison holds, and which the largest may not show."""
    return (largest <= tiles.FAST_LIMIT) & (sum(map(jnp.abs, ends)) < jnp.inf)


def weak_on_average(g, batch, first, count, head):
    """Whether a segment's gates g [B, T, H, K] are: of a few, each of another chunk, token and channel."""
    T, K = g.shape[1], g.shape[3]
    total = 0.0
    for i in range(SAMPLES):
        token = (first + quotient(i * count, SAMPLES)) * C + i * (C // SAMPLES)
        total += g[batch, jnp.minimum(token, T - 1), head, i * (K // SAMPLES)].astype(jnp.float32)
    return total > SAMPLES * WEAK
