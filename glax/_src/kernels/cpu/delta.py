"""Compute the delta rule in native code: forward, gradient of every input, and one decoding step.

The formulas are in native/delta_block.h.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure, arrays_of
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence
from glax._src.kernels.common.foreign import NONE, call
from glax._src.kernels.cpu.operands import STORED, marks_of, operands_of


def erasure_operands(r: Recurrence) -> list[Array | None]:
    """Return [beta, erase, write], operands of the library: each in a dtype that the library reads, or None if r has none."""
    return [x if x is None or x.dtype in STORED else x.astype(jnp.float32) for x in arrays_of(r.erasure)]


def forward(r: Recurrence) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure, in blocks of up to 16 tokens."""
    results = [
        jax.ShapeDtypeStruct((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype),
        jax.ShapeDtypeStruct(r.state_shape, jnp.float32),
    ]
    return Outputs(
        *call("glax_delta_forward", [*operands_of(r), *erasure_operands(r), *marks_of(r)], results, reverse=r.reverse)
    )


def gradient(r: Recurrence, d_output: Float[Array, "B T H V"], d_final: Float[Array, "N H K V"]) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure. In addition to the results, each thread holds one
    state for every 256 tokens."""
    (B, T), (N, H, K, V), decay, erasure = r.q.shape[:2], r.state_shape, r.decay, r.erasing

    def each(x: Array):
        # float32 where heads share an array: gradient_recurrence sums over them.
        return jax.ShapeDtypeStruct((B, T, H, x.shape[3]), x.dtype if x.shape[2] == H else jnp.float32)

    def if_any(shape, x: Array | None):
        return NONE if x is None else jax.ShapeDtypeStruct(shape, jnp.float32)

    results = [
        each(r.q),
        each(r.k),
        each(r.v),
        if_any((B, T, H), decay.head),
        if_any((B, T, H, K), decay.key),
        if_any((N, H), decay.constant),
        if_any((N, H, K, V), r.initial_state),
        jax.ShapeDtypeStruct((N, H), jnp.float32),
        if_any((B, T, H), erasure.beta),
        if_any((B, T, H, K), erasure.erase),
        if_any((B, T, H, V), erasure.write),
    ]
    operands = [*operands_of(r), *erasure_operands(r), d_output, d_final.astype(jnp.float32), *marks_of(r)]
    dq, dk, dv, *gates, d_initial, d_scale, d_beta, d_erase, d_write = call(
        "glax_delta_gradient", operands, results, reverse=r.reverse
    )

    def where_given(x: Array | None, d: Array) -> Array | None:
        return None if x is None else d

    d_head, d_key, d_constant = map(where_given, (decay.head, decay.key, decay.constant), gates)
    d_erasure = Erasure(
        *map(where_given, arrays_of(erasure), (d_beta, d_erase, d_write)), before_decay=erasure.before_decay
    )
    d_decay = Decay(constant=d_constant, head=d_head, key=d_key)
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, d_scale.sum(1), d_erasure)


def step(r: Recurrence, pool: Float[Array, "P H K V"], slots: Int[Array, "B"]):
    """Advance each sequence by one token, in place in the pool. Return the output [B, 1, H, V] and the pool. slots: the row of
    the pool of each sequence, -1 for none."""
    *arrays, _, _, scale = operands_of(r)
    results = [
        jax.ShapeDtypeStruct((r.q.shape[0], 1, r.num_heads, r.v.shape[3]), r.q.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    ]
    operands = [*arrays, pool, slots, scale, *erasure_operands(r)]
    output, pool = call("glax_delta_step", operands, results, input_output_aliases={len(arrays): 1})
    return output, pool
