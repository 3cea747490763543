"""Checks that a scan with per-key gates makes of its gates before it scales by them."""

from typing import Any

import jax.numpy as jnp

from glax._src.kernels.common.limits import FAST_LIMIT
from glax._src.kernels.pallas_gpu.plan import quotient
from glax._src.kernels.pallas_gpu.tiles import C

SAMPLES, WEAK = 8, -0.25  # gates of a program that are sampled, and the average above which they are weak


def in_range(largest, ends):
    """Returns for every row whether the form about the chunk's middle holds: |M|, |L| and |R| of glax._src.kernels.common.limits.

    largest [C]: of |M|, by token; ends: L and R, [C] each, by channel. M leaves out the first token's gate, which L has. Sums of
    gates of -inf are NaN, for which no comparison holds.
    """
    first, second = map(jnp.abs, ends)
    return (largest <= FAST_LIMIT) & (first <= FAST_LIMIT) & (second <= FAST_LIMIT)


def weak_on_average(g, batch, first, end, count, head):
    """Whether a segment's gates g [B, T, H, K] are: of a few, each of another chunk, token and channel.

    first, end: its first row and that behind its last. count: its chunks.
    """
    K = g.shape[3]
    total: Any = 0.0
    for i in range(SAMPLES):
        token = first + quotient(i * count, SAMPLES) * C + i * (C // SAMPLES)
        total += g[batch, jnp.clip(token, 0, jnp.maximum(end, 1) - 1), head, i * (K // SAMPLES)].astype(jnp.float32)
    return total > SAMPLES * WEAK
