"""Launch the kernels of the delta rule with `along` and per-key gates: outputs and final states, and the gradient."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence, spread_heads
from glax._src.kernels.triton.chunked import by_sequence, start_of_sequences
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.delta_along import (
    along_gradient,
    along_outputs,
    along_pairs,
    along_products,
    along_states,
    exact_along_gradient,
    exact_along_gradient_passed_outputs,
    exact_along_pairs,
    exact_along_pairs_passed_outputs,
)
from glax._src.kernels.triton.delta_chunked import constants, d_erasing, like, sequences_and_chunks, write_of
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch
from glax._src.kernels.triton.operands import EXACT_WARPS, PAIRS_PER_PROGRAM
from glax._src.kernels.triton.segments import Segments

KEY_BLOCK = 32  # channels of an iteration of `along_pairs` and `along_products`


class Folded(NamedTuple):
    """Hold the results of `along_pairs`, in its order. The docstring of `along_pairs` has their shapes. Only the gradient reads
    inverse, passed and scores_along."""

    q_read: Array
    e_read: Array
    k_written: Array
    b_written: Array
    scores: Array
    inverse: Array
    passed: Array
    scores_along: Array
    decays: Array
    max_abs_cumsum: Array


def stored_dtype(r: Recurrence):
    """Return the dtype in which operands and matrices are stored: bfloat16 if q is, else float32, because a float16 inverse may
    overflow."""
    return jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32


def written_values(r: Recurrence) -> Array:
    """Return X = w * v, [B, T, H, V] in float32, or without w the array v [B, T, HV, V] itself."""
    if r.erasing.write is None:
        return r.v
    return spread_heads(r.v, r.num_heads).astype(jnp.float32) * r.erasing.write.astype(jnp.float32)


def shape_of(r: Recurrence, chunk: int) -> dict:
    """Return the constants of `Dimensions` that follow from r, by name. chunk: the tokens of a chunk. ERASURE is "erase" or
    "erase+write"."""
    return constants(r.replace(erasure=r.erasing.replace(along=None)), chunk)


def folded(r: Recurrence, chunks: Segments, chunk: int, gradient: bool) -> Folded:
    """Compute the folded operands of every chunk of `chunk` tokens. gradient: whether inverse, passed and scores_along are
    computed too; else arrays of one number stand for them."""
    (B, T), (_, H, K, _), M = r.q.shape[:2], r.state_shape, chunks.count
    wide, pairs, f32 = ((B, T, H, K), stored_dtype(r)), ((M, H, chunk, chunk), stored_dtype(r)), jnp.float32
    other = pairs if gradient else ((1,), f32)
    operands = r.q, r.k, r.erasing.erase, r.erasing.along, r.decay.key, r.scale, chunks.table
    shape = dict(shape_of(r, chunk), GRADIENT=gradient)
    *found, max_abs_cumsum = launch(
        along_pairs,
        H * M,
        operands,
        [wide, wide, wide, wide, pairs, other, other, other, ((M, H, 4, K), f32), ((M, H), f32)],
        **shape, BK=min(KEY_BLOCK, width(K)), warps=4, stages=1,
    )  # fmt: skip
    found = launch(
        exact_along_pairs_passed_outputs if ALIASES_ARE_PASSED else exact_along_pairs,
        -(-H * M // PAIRS_PER_PROGRAM),
        (*operands, max_abs_cumsum, jnp.full(1, H * M, jnp.int32), *found),
        [(x.shape, x.dtype) for x in found],
        in_place={9 + i: i for i in range(9)},
        **shape, BK=16, PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
    )  # fmt: skip
    return Folded(*found, max_abs_cumsum)


def products_of(r: Recurrence) -> int:
    """Return the number of matrices that `along_products` stores for a chunk: 4, or 6 in bfloat16, where dL_b and dL_k have two
    terms."""
    return 6 if r.q.dtype == jnp.bfloat16 else 4


@compile_in_parallel
def along_chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states of a recurrence with `along` and per-key gates, in one scan of every sequence."""
    segments, chunks = sequences_and_chunks(r, config)
    f, x = folded(r, chunks, config.chunk, False), written_values(r)
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    columns = min(config.columns, width(V))
    o, final = launch(
        along_outputs,
        -(-V // columns) * H * segments.count,
        (f.q_read, f.e_read, f.k_written, f.b_written, x, f.scores, f.decays, start, segments.table),
        [((B, T, H, V), r.q.dtype), (r.state_shape, jnp.float32)],
        **shape_of(r, config.chunk), BK=width(K), BV=columns, START=kind != 0,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


@compile_in_parallel
def along_chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient of every input of a recurrence with `along` and per-key gates. S is scanned forward and dL/dS in
    reverse; then all chunks are processed in parallel."""
    segments, chunks = sequences_and_chunks(r, config)
    f, x = folded(r, chunks, config.chunk, True), written_values(r)
    start, kind = start_of_sequences(r)
    (_, H, K, V), M, f32 = r.state_shape, chunks.count, jnp.float32
    shape = shape_of(r, config.chunk)
    states, columns = ((M, H, V, K), stored_dtype(r)), min(config.block, width(V))
    S, dS, d_initial = launch(
        along_states,
        2 * -(-V // columns) * H * segments.count,
        (f.q_read, f.e_read, f.k_written, f.b_written, x, d_output, f.decays, start, d_final, segments.table),
        [states, states, (r.state_shape, f32)],
        **shape, BK=width(K), BV=columns, START=kind != 0, warps=4, stages=2,
    )  # fmt: skip
    shape = dict(shape, BV=width(V))
    *written, dv, d_write = launch(
        along_products,
        H * M,
        (
            x, r.v, write_of(r), d_output, f.e_read, f.k_written, f.b_written, f.scores, f.inverse, f.passed, f.scores_along,
            S, dS, chunks.table,
        ),
        [
            ((M, H, 2, config.chunk, V), stored_dtype(r)), ((M, H, products_of(r), config.chunk, config.chunk), stored_dtype(r)),
            ((M, H, 4, config.chunk), f32), like(r, r.v), d_erasing(r)[1],
        ],
        **shape, BK=min(KEY_BLOCK, width(K)), warps=4, stages=2,
    )  # fmt: skip
    erasure, g = r.erasing, r.decay.key
    assert erasure.erase is not None and erasure.along is not None and g is not None
    operands = r.q, r.k, x, erasure.erase, erasure.along, g, d_output, *written, r.scale, S, dS, chunks.table
    found = launch(
        along_gradient,
        H * M,
        operands,
        [like(r, r.q), like(r, r.k), *((each.shape, each.dtype) for each in (erasure.erase, erasure.along, g)), ((M, H), f32)],
        **shape, BK=min(config.rows, width(K)), warps=config.warps, stages=config.stages,
    )  # fmt: skip
    found = launch(
        exact_along_gradient_passed_outputs if ALIASES_ARE_PASSED else exact_along_gradient,
        -(-H * M // PAIRS_PER_PROGRAM),
        (*operands, f.max_abs_cumsum, jnp.full(1, H * M, jnp.int32), *found),
        [(each.shape, each.dtype) for each in found],
        in_place={16 + i: i for i in range(6)},
        **shape, BK=16, PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
    )  # fmt: skip
    dq, dk, de, db, dg, d_scale = found
    d_scale = by_sequence(r, chunks, d_scale).sum(1)
    d_erasure = r.erasing.replace(erase=de, along=db, write=None if r.erasing.write is None else d_write)
    return gradient_recurrence(r, dq, dk, dv, Decay(key=dg), d_initial, d_scale, d_erasure)
