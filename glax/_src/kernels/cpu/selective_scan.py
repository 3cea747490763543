"""Compute the selective scan of Mamba-1 in native code: forward, gradient of every input, and one decoding step.

native/selective_scan.h has the formulas.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.core.recurrence import is_symbol
from glax._src.kernels.common.foreign import NONE, call
from glax._src.kernels.common.selective import SelectiveOperands, StepOperands
from glax._src.kernels.cpu.library import missing
from glax._src.kernels.cpu.operands import STORED

CHUNK = 32  # tokens between two saved states; `SelectiveScan::chunk` in native/problem.h
ALIGNMENT = 64  # of a group's channels; `selective_alignment` in native/problem.h
GROUPS = 16  # partial sums of the gradients of B and C, at most


def takes(operands: SelectiveOperands | StepOperands) -> str | None:
    """Return why no native kernel can run the operands, because of their dtypes or shapes or because the library is missing;
    None if one can."""
    if operands.x.dtype not in STORED:
        return f"takes float32, bfloat16 and float16, x is {operands.x.dtype}"
    if any(is_symbol(size) for x in jax.tree.leaves(operands) for size in x.shape):
        return "takes shapes that are known while tracing, not symbols"
    return missing("glax_selective_step")  # a library has all three kernels or none


def step_takes(operands: StepOperands) -> str | None:
    """Return why the native kernel cannot run a step, or None."""
    if operands.pool.dtype not in STORED:
        return f"stores states as float32, bfloat16 and float16, the state is {operands.pool.dtype}"
    if 0 in (operands.x.shape[0], operands.pool.shape[0]):
        return "takes at least one sequence and one state"
    return takes(operands)


def readable(x: Array) -> Array:
    """Return x in a dtype that the library reads: its own if that is in STORED, else float32."""
    return x if x.dtype in STORED else x.astype(jnp.float32)


def operands_of(p: SelectiveOperands) -> list[Array | None]:
    """Return the library's operands: x, dt, A, B, C, the initial states, the boundaries and the resets, the last two in int32
    or None."""
    in_int32 = [None if x is None else x.astype(jnp.int32) for x in p.packing]
    return [readable(p.x), readable(p.dt), p.A, readable(p.B), readable(p.C), p.states, *in_int32]


def num_chunks(p: SelectiveOperands) -> int:
    """Return the number of states that the forward saves, one before each chunk of CHUNK tokens. Some are unused if sequences
    are packed."""
    G, T = p.x.shape[:2]
    return G * -(-T // CHUNK) if p.packing.cuts is None else T // CHUNK + p.states.shape[0]


def result(shape: tuple[int, ...], dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a result."""
    return jax.ShapeDtypeStruct(shape, dtype)


def forward(p: SelectiveOperands, *, reverse: bool, saves_residuals: bool) -> tuple[Array, Array, Array]:
    """Return y [G, T, D], the final states [sequences, D, N], both in float32, and the states before chunks, [chunks, D, N], or
    an empty array without residuals. y of rows of no sequence is undefined."""
    starts = result((num_chunks(p), *p.A.shape)) if saves_residuals else NONE
    results = [result(p.x.shape), result(p.states.shape), starts]
    y, final, starts = call("glax_selective_forward", operands_of(p), results, reverse=reverse)
    return y, final, starts


def gradient(
    p: SelectiveOperands,
    starts: Float[Array, "chunks D N"],
    d_y: Float[Array, "G T D"],
    d_final: Float[Array, "sequences D N"],
    *,
    reverse: bool,
) -> tuple[Array, ...]:
    """Return the gradients of x, dt, A, B, C and the states, in their dtypes. starts: the states before chunks that `forward`
    saved. Gradients of rows of no sequence are undefined."""
    x, dt = readable(p.x), readable(p.dt)
    D = x.shape[2]
    channels = -(-D // (GROUPS * ALIGNMENT)) * ALIGNMENT
    # Of A, each sequence has a partial sum, of the shape of its state; of B and C, each group of channels.
    of_states, by_group = result(p.states.shape), result((-(-D // channels), *p.B.shape))
    results = [result(x.shape, x.dtype), result(dt.shape, dt.dtype), of_states, by_group, by_group, of_states]
    operands = [*operands_of(p), starts, d_y.astype(jnp.float32), d_final.astype(jnp.float32)]
    dx, ddt, dA, dB, dC, d_states = call(
        "glax_selective_gradient", operands, results, reverse=reverse, channels=channels
    )
    gradients = (dx, ddt, dA.sum(0), dB.sum(0), dC.sum(0), d_states)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, p[:-1], strict=True))


def step(p: StepOperands) -> tuple[Array, Array]:
    """Advance each sequence by one token, in place in the pool. Return y [G, D] in float32, 0 for a sequence without a slot,
    and the pool."""
    tokens = [readable(p.x), readable(p.dt), p.A, readable(p.B), readable(p.C)]
    slots = None if p.slots is None else p.slots.astype(jnp.int32)
    results = [result(p.x.shape), result(p.pool.shape, p.pool.dtype)]
    y, pool = call("glax_selective_step", [*tokens, p.pool, slots], results, input_output_aliases={len(tokens): 1})
    return y, pool
