"""Check the gates of a scan with per-key gates, before it scales by them."""

from typing import Any

import jax.numpy as jnp

from glax._src.kernels.common.limits import FAST_LIMIT
from glax._src.kernels.pallas_gpu.device.tiles import C
from glax._src.kernels.pallas_gpu.plan import quotient

SAMPLES, WEAK = 8, -0.25  # gates of a program that are sampled, and the average above which they are weak


def in_range(largest, ends):
    """Return for every row whether the form about the chunk's middle is exact: |M|, |L| and |R| of `common.limits` are in
    range.

    largest: [C], the largest |M| by token. ends: L and R, [C] each, by channel. M excludes the first token's gate, and L
    includes it. Sums of gates of -inf are NaN, for which no comparison holds.
    """
    first, second = map(jnp.abs, ends)
    return (largest <= FAST_LIMIT) & (first <= FAST_LIMIT) & (second <= FAST_LIMIT)


def weak_on_average(g, batch, first, end, count, head):
    """Return whether a segment's gates g [B, T, H, K] are weak on average, by a sample of a few gates of different chunks,
    tokens and channels.

    first: the segment's first row. end: the row behind its last. count: the number of its chunks.
    """
    K = g.shape[3]
    total: Any = 0.0
    for i in range(SAMPLES):
        token = first + quotient(i * count, SAMPLES) * C + i * (C // SAMPLES)
        total += g[batch, jnp.clip(token, 0, jnp.maximum(end, 1) - 1), head, i * (K // SAMPLES)].astype(jnp.float32)
    return total > SAMPLES * WEAK
