"""Launch the kernels of the gradient that take all chunks in parallel, after the states at their ends."""

import math

import jax.numpy as jnp

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.triton import wide_vjp_exact_kernels as wide_exact
from glax._src.kernels.triton.config import GradientConfig, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch
from glax._src.kernels.triton.operands import (
    EXACT_WARPS,
    PAIRS_PER_PROGRAM,
    Operands,
    arithmetic,
    gates_of,
    heads,
    sizes,
)
from glax._src.kernels.triton.segments import Segments
from glax._src.kernels.triton.vjp_exact_kernels import exact_gradient, exact_gradient_passed_outputs
from glax._src.kernels.triton.vjp_kernels import gradient
from glax._src.kernels.triton.wide_vjp_kernels import wide_key_gradient, wide_value_gradient


def chunk_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Compute dq, dk, dv, the gates' gradient and the scale's [chunks, H] from the states at both ends of every chunk."""
    gradients = wide_gradients if config.columns else narrow_gradients
    return gradients(r, d_output, config, chunks, operands, before, behind)


def narrow_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Compute the gradients with programs that hold all of V."""
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    gates, form = gates_of(r)
    group, summed = shared_heads(r, chunks)
    per_chunk = ((chunks.count, H), jnp.float32)
    d_gates = {"key": ((B, T, H, K), gates.dtype), "head": ((B, T, H), gates.dtype)}
    shape = dict(shape_of(r, config), BV=width(V))
    dq, dk, dv, dg, d_scale = launch(
        gradient,
        H // group * chunks.count,
        (r.q, r.k, r.v, gates, operands.gates, operands.k, operands.scores, d_output, r.scale, before, behind, chunks.table),
        [*gradient_shapes(r, summed), d_gates.get(form, per_chunk), per_chunk],
        **shape, BK=min(config.rows, width(K)), FORM=form, warps=config.warps, stages=config.stages,
        GROUP=group, GQ=summed[0], GK=summed[1], GV=summed[2],
    )  # fmt: skip
    if form == "key":
        pairs, found = jnp.full(1, H * chunks.count, jnp.int32), (dq, dk, dg, d_scale)
        dq, dk, dg, d_scale = launch(
            exact_gradient_passed_outputs if ALIASES_ARE_PASSED else exact_gradient,
            -(-H * chunks.count // PAIRS_PER_PROGRAM),
            (r.q, r.k, r.v, gates, d_output, r.scale, before, behind, chunks.table, operands.max_abs_cumsum, pairs, *found),
            [(x.shape, x.dtype) for x in found],
            in_place={11 + i: i for i in range(4)},
            **shape, BK=16, PAIRS=PAIRS_PER_PROGRAM, warps=4 if r.q.dtype == jnp.bfloat16 else EXACT_WARPS, stages=1,
        )  # fmt: skip
    return dq, dk, dv, dg, d_scale


def wide_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, operands: Operands, before, behind
):
    """Compute the gradients with programs that hold a block of K or of V, and add the parts that blocks of K have formed."""
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    gates, form = gates_of(r)
    group, summed = shared_heads(r, chunks)
    rows, columns = min(config.rows, width(K)), min(config.columns, width(V))
    blocks, blocks_of_v = -(-K // rows), -(-V // columns)
    parts = ((chunks.count, H, blocks), jnp.float32)
    d_gates = {"key": ((B, T, H, K), gates.dtype), "head": ((B, T, H, blocks), jnp.float32)}
    shape = dict(shape_of(r, config), BK=rows, BV=columns)
    options: dict = dict(shape, FORM=form, warps=config.warps, stages=config.stages, GROUP=group)
    d_query, d_key, d_value = gradient_shapes(r, summed)
    values = (r.q, r.k, operands.gates, operands.k, operands.scores, d_output, r.scale, behind, chunks.table)
    (dv,) = launch(
        wide_value_gradient, H // group * chunks.count * blocks_of_v, values, [d_value], **options, GV=summed[2]
    )
    dq, dk, dg, d_scale = launch(
        wide_key_gradient,
        H // group * chunks.count * blocks,
        (r.q, r.k, r.v, gates, operands.gates, d_output, r.scale, before, behind, chunks.table),
        [d_query, d_key, d_gates.get(form, parts), parts],
        **options, GQ=summed[0], GK=summed[1],
    )  # fmt: skip
    if form == "key":
        pairs, found = jnp.full(1, H * chunks.count, jnp.int32), (dq, dk, dg, d_scale)
        dq, dk, dg, d_scale = launch(
            wide_exact.wide_exact_gradient_passed_outputs if ALIASES_ARE_PASSED else wide_exact.wide_exact_gradient,
            -(-H * chunks.count // PAIRS_PER_PROGRAM) * blocks,
            (r.q, r.k, r.v, gates, d_output, r.scale, before, behind, chunks.table, operands.max_abs_cumsum, pairs, *found),
            [(x.shape, x.dtype) for x in found],
            in_place={11 + i: i for i in range(4)},
            **shape, PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
        )  # fmt: skip
    elif form != "none":
        dg = dg.sum(-1).astype(gates.dtype if form == "head" else jnp.float32)
    return dq, dk, dv, dg, d_scale.sum(-1)


def shape_of(r: Recurrence, config: GradientConfig) -> dict:
    """Return the options that all kernels of the gradient share."""
    return dict(**sizes(r), **heads(r), C=config.chunk, SIGN=-1 if r.reverse else 1, **arithmetic(r))


def gradient_shapes(r: Recurrence, summed):
    """Return the shapes and dtypes of dq, dk and dv. Gradients that heads share are summed in float32."""
    (B, T), H = r.q.shape[:2], r.num_heads
    return [
        ((B, T, H // count, x.shape[3]), x.dtype if x.shape[2] == H else jnp.float32)
        for x, count in zip((r.q, r.k, r.v), summed, strict=True)
    ]


def shared_heads(r: Recurrence, chunks: Segments) -> tuple[int, list[int]]:
    """Return the heads of a program, and how many of them share a query, a key and a value."""
    group = heads_of_a_program(r, chunks.count)
    return group, [math.gcd(group, r.num_heads // x.shape[2]) for x in (r.q, r.k, r.v)]


def heads_of_a_program(r: Recurrence, chunks: int) -> int:
    """Return how many heads a program of the gradient processes in order: as many as share an array, if that fills the GPU.

    The wide kernels have more programs than are counted here, so they fill it too. With key gates it is 1: their gradient has
    every head, and the exact kernels overwrite the results of single heads.
    """
    H = r.num_heads
    if r.decay.form == "key":
        return 1
    shared = max(H // x.shape[2] for x in (r.q, r.k, r.v))
    enough = (n for n in range(1, shared + 1) if shared % n == 0 and H // n * chunks >= 4 * multiprocessors())
    return max(enough, default=1)
