"""Describe a call to the kernels, and compute what they need of each chunk before its state is known."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.triton import score_kernels, state_kernels
from glax._src.kernels.triton.config import width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch, tl
from glax._src.kernels.triton.segments import Segments

PAIRS_PER_PROGRAM = 8  # (chunk, head) pairs that a program of an exact kernel tests
EXACT_WARPS = 8  # with 4, the exact gradient of float16 at widths of 128 spills more registers
SCALE_BLOCK = 32  # channels of an iteration of `scale_operands`
SCALE_STAGES = 3


def arithmetic(r: Recurrence) -> dict:
    """Return the type and precision of products.

    bfloat16 is multiplied as bfloat16, float32 in three TF32 products. float16 is multiplied in TF32, which has as many
    digits and the range that decays need.
    """
    if r.q.dtype == jnp.bfloat16:
        return dict(DTYPE=tl.bfloat16, PRECISION="tf32")
    return dict(DTYPE=tl.float32, PRECISION="tf32x3" if r.q.dtype == jnp.float32 else "tf32")


def sizes(r: Recurrence) -> dict:
    _, H, K, V = r.state_shape
    return dict(H=H, K=K, V=V)


def heads(r: Recurrence) -> dict:
    return dict(HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2])


def gates_of(r: Recurrence):
    """Return the array of the gates and the form. Absent gates are replaced by an array that is not read."""
    d, form = r.decay, r.decay.form
    return next((x for x in (d.constant, d.head, d.key) if x is not None), r.scale), form


class Operands(NamedTuple):
    """Hold the scan's q, k and gates, and the scores of each chunk.

    Where a form of gates lacks scores and max_abs_cumsum, they are replaced by an array that is not read.
    """

    q: Array
    k: Array
    gates: Array
    scores: Array
    max_abs_cumsum: Array


def chunk_operands(r: Recurrence, chunks: Segments, chunk: int) -> Operands:
    """Compute the operands of each chunk.

    For key gates, these are the results of `scale_operands` and `exact_scores`. For head gates, gates are their cumulative
    sums within each chunk.
    """
    (gates, form), (_, H, K, _) = gates_of(r), r.state_shape
    B, T = r.q.shape[:2]
    sign = dict(SIGN=-1 if r.reverse else 1)
    if form == "head":
        output = [(gates.shape, jnp.float32)]
        options = dict(H=H, BH=width(H), C=chunk, **sign, warps=4, stages=1)
        (gates,) = launch(state_kernels.head_gate_cumsums, chunks.count, (gates, chunks.table), output, **options)
    if form != "key":
        return Operands(r.q, r.k, gates, r.scale, r.scale)
    M = chunks.count
    shape = dict(H=H, HQ=r.q.shape[2], HK=r.k.shape[2], K=K, C=chunk, **sign, **arithmetic(r), warps=4)
    wide, scores = ((B, T, H, K), r.q.dtype), ((M, H, chunk, chunk), r.q.dtype)
    q_scaled, k_scaled, scores, last, max_abs_cumsum = launch(
        score_kernels.scale_operands,
        H * M,
        (r.q, r.k, gates, chunks.table),
        [wide, wide, scores, ((M, H, 2, K), jnp.float32), ((M, H), jnp.float32)],
        **shape, BK=min(SCALE_BLOCK, width(K)), stages=SCALE_STAGES,
    )  # fmt: skip
    (scores,) = launch(
        score_kernels.exact_scores_passed_scores if ALIASES_ARE_PASSED else score_kernels.exact_scores,
        -(-H * M // PAIRS_PER_PROGRAM),
        (r.q, r.k, gates, chunks.table, max_abs_cumsum, jnp.full(1, H * M, jnp.int32), scores),
        [(scores.shape, scores.dtype)],
        in_place={6: 0},
        **shape, BK=min(32, width(K)), PAIRS=PAIRS_PER_PROGRAM, stages=1,
    )  # fmt: skip
    return Operands(q_scaled, k_scaled, last, scores, max_abs_cumsum)
