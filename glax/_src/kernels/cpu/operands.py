"""List the operands of the library of native kernels, from the arrays of a recurrence."""

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.recurrence import Recurrence

STORED = (jnp.float32, jnp.bfloat16, jnp.float16)


def operands_of(r: Recurrence) -> list[Array | None]:
    """Return the library's first operands: q, k, v, the head, key and value gates, the constant decay, the initial state,
    boundaries and scale. Gates are in a dtype that the library reads, the constant decay, states and scale in float32,
    boundaries in int32. None stands for what r does not have."""
    decay = r.decay
    gates = [
        x if x is None or x.dtype in STORED else x.astype(jnp.float32) for x in (decay.head, decay.key, decay.value)
    ]
    in_float32 = [None if x is None else x.astype(jnp.float32) for x in (decay.constant, r.initial_state)]
    boundaries = None if r.boundaries is None else r.boundaries.astype(jnp.int32)
    return [r.q, r.k, r.v, *gates, *in_float32, boundaries, r.scale.astype(jnp.float32)]


def marks_of(r: Recurrence) -> list[Array]:
    """Return [marks], int32 [B, T]: 1 where a token resets the state, 2 at padding, else 0. Without segments return []."""
    if r.segments is None:
        return []
    marks = r.segments.resets.astype(jnp.int32)
    return [marks if r.segments.is_token is None else jnp.where(r.segments.is_token, marks, 2)]
