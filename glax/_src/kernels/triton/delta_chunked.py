"""Launch the kernels of the delta rule in chunks: outputs and final states, and the gradient in every input."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence
from glax._src.kernels.triton import state_kernels
from glax._src.kernels.triton.chunked import (
    arithmetic,
    by_sequence,
    gates_of,
    heads,
    heads_of_a_program,
    segments_and_chunks,
    sizes,
    start_of_sequences,
)
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.delta_scan_kernels import delta_outputs
from glax._src.kernels.triton.delta_score_kernels import delta_scores
from glax._src.kernels.triton.delta_state_kernels import delta_states
from glax._src.kernels.triton.delta_vjp_kernels import delta_gradient
from glax._src.kernels.triton.launch import launch
from glax._src.kernels.triton.segments import Segments


class Pairs(NamedTuple):
    """Hold what the scans read of the pairs of tokens of each chunk.

    inverse, scores: [chunks, H, C, C], (I + L)^-1 - I and P. factors: [chunks, H, 3, C], as `delta_scores` returns them. gates:
    the cumulative sums of head gates, or the constants of the sequences; without gates, an array that is not read.
    """

    inverse: Array
    scores: Array
    factors: Array
    gates: Array


def chunk_pairs(r: Recurrence, chunks: Segments, chunk: int) -> Pairs:
    """Compute the `Pairs` of every chunk.

    inverse and scores are bfloat16 if q is, else float32: a float16 inverse may overflow.
    """
    (gates, form), (_, H, K, _) = gates_of(r), r.state_shape
    sign = dict(SIGN=-1 if r.reverse else 1)
    if form == "head":
        options = dict(H=H, BH=width(H), C=chunk, **sign, warps=4, stages=1)
        (gates,) = launch(
            state_kernels.head_gate_cumsums,
            chunks.count,
            (gates, chunks.table),
            [(gates.shape, jnp.float32)],
            **options,
        )
    pairs = (chunks.count, H, chunk, chunk), jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    rows = 128 if r.q.dtype == jnp.bfloat16 else 32  # more would spill registers
    inverse, scores, factors = launch(
        delta_scores,
        H * chunks.count,
        (r.q, r.k, r.erasing.beta, gates, chunks.table),
        [pairs, pairs, ((chunks.count, H, 3, chunk), jnp.float32)],
        H=H, HQ=r.q.shape[2], HK=r.k.shape[2], K=K, C=chunk, BK=min(width(K), rows), FORM=form, **sign,
        **arithmetic(r), warps=4, stages=1,
    )  # fmt: skip
    return Pairs(inverse, scores, factors, gates)


@compile_in_parallel
def delta_chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure, in one scan of every sequence."""
    segments, chunks = segments_and_chunks(r, config)
    pairs = chunk_pairs(r, chunks, config.chunk)
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    columns = min(config.columns, width(V))
    o, final = launch(
        delta_outputs,
        -(-V // columns) * H * segments.count,
        (r.q, r.k, r.v, pairs.inverse, pairs.scores, pairs.factors, r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), (r.state_shape, jnp.float32)],
        **sizes(r), **heads(r), C=config.chunk, BK=width(K), BV=columns,
        GATED=r.decay.form != "none", SIGN=-1 if r.reverse else 1, START=kind != 0, **arithmetic(r),
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


@compile_in_parallel
def delta_chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure.

    S is scanned forward and dL/dS in reverse. Then all chunks are processed in parallel.
    """
    segments, chunks = segments_and_chunks(r, config)
    C, flags = config.chunk, dict(SIGN=-1 if r.reverse else 1, **arithmetic(r))
    pairs = chunk_pairs(r, chunks, C)
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    states, rows, columns = ((chunks.count, H, V, K), stored), ((B, T, H, V), stored), min(config.block, width(V))
    S, U, dS, Y, d_initial = launch(
        delta_states,
        2 * -(-V // columns) * H * segments.count,
        (r.q, r.k, r.v, d_output, *pairs[:3], r.scale, start, d_final, segments.table),
        [states, rows, states, rows, (r.state_shape, jnp.float32)],
        **sizes(r), **heads(r), C=C, BK=width(K), BV=columns, GATED=r.decay.form != "none", START=kind != 0, **flags,
        warps=4, stages=2,
    )  # fmt: skip

    group = heads_of_a_program(r, chunks.count)
    summed = [math.gcd(group, H // x.shape[2]) for x in (r.q, r.k, r.v)]

    def like(x, count):  # gradients that heads share are summed in float32
        return (B, T, H // count, x.shape[3]), x.dtype if x.shape[2] == H else jnp.float32

    (gates, form), beta = gates_of(r), r.erasing.beta
    assert beta is not None  # the other forms are refused
    per_chunk, per_row = ((chunks.count, H), jnp.float32), (B, T, H)
    d_gates = (per_row, gates.dtype) if form == "head" else per_chunk
    dq, dk, dv, d_beta, dg, d_scale = launch(
        delta_gradient,
        H // group * chunks.count,
        (r.q, r.k, r.v, beta, pairs.gates, d_output, pairs.scores, U, Y, r.scale, S, dS, chunks.table),
        [*map(like, (r.q, r.k, r.v), summed), (per_row, beta.dtype), d_gates, per_chunk],
        **sizes(r), **heads(r), C=C, BK=min(config.rows, width(K)), BV=width(V), FORM=form, **flags,
        warps=config.warps, stages=config.stages, GROUP=group, GQ=summed[0], GK=summed[1], GV=summed[2],
    )  # fmt: skip
    d_decay = Decay()
    if form != "none":
        d_decay = Decay(**{form: by_sequence(r, chunks, dg) if form == "constant" else dg})
    d_erasure = Erasure(beta=d_beta)
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, by_sequence(r, chunks, d_scale).sum(1), d_erasure)
