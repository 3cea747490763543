"""Form what the kernels read of gates: the terms of per-key gates, or the sums of per-head gates in each chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.rows import Rows


def key_terms(g: Array) -> tuple[Array, ...]:
    """Return the terms in bfloat16 of which per-key gates [B, rows, H, K] are the sum, each of that shape.

    Gates of a wider dtype have two terms, which hold 16 of their bits. They are arrays of their own, which XLA writes in one
    pass.
    """
    if g.dtype == jnp.bfloat16:
        return (g,)
    g = jnp.maximum(g.astype(jnp.float32), LOG_OF_ZERO)
    high = jax.lax.reduce_precision(g, 8, 7)  # XLA drops a cast there and back
    return high.astype(jnp.bfloat16), (g - high).astype(jnp.bfloat16)


def head_gates(r: Recurrence, rows: Rows, shape: tuple[int, ...]) -> Array:
    """Return per-head gates in rows of chunks, [*shape, H]. A constant decay is the gate of every token, no decay a gate of 0."""
    if r.decay.head is not None:
        return rows.take(r.decay.head)
    if r.decay.constant is not None:
        gates = r.by_token(r.decay.constant.astype(jnp.float32))
        return rows.take(jnp.broadcast_to(gates, (*r.q.shape[:2], r.num_heads)))
    return jnp.zeros((*shape, r.num_heads), jnp.float32)


def head_sums(gates: Array, reverse: bool) -> Array:
    """Return the sums of log2 gates [B, rows, H] from where the scan enters each chunk: [B, chunks, H, C] in float32."""
    B, rows, H = gates.shape
    if gates.dtype != jnp.bfloat16:  # which tensor cores sum as they are
        gates = gates.astype(jnp.float32)
    gates = jnp.pad(jnp.maximum(gates, LOG_OF_ZERO), ((0, 0), (0, -rows % C), (0, 0)))
    before = np.tri(C, dtype=np.float32)  # a product: a cumulative sum takes XLA several passes
    before = jnp.asarray(before.T if reverse else before, gates.dtype)
    exact = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    return exact("bcjh,ij->bchi", gates.reshape(B, -1, C, H), before) * LOG2E
