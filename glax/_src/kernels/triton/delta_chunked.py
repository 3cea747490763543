"""Launch the kernels of the delta rule in chunks: outputs and final states, and the gradient in every input."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence, spread_heads
from glax._src.kernels.triton import state_kernels
from glax._src.kernels.triton.chunked import (
    Operands,
    arithmetic,
    by_sequence,
    chunk_gradients,
    chunk_operands,
    gates_of,
    heads,
    segments_and_chunks,
    sizes,
    start_of_sequences,
)
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.delta_scan_kernels import delta_outputs
from glax._src.kernels.triton.delta_score_kernels import delta_inverses, delta_scores
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


def gate_of(r: Recurrence) -> str:
    """Return the scans' form of the gates. Constant gates have the factors of head gates."""
    return "head" if r.decay.form == "constant" else r.decay.form


class Scanned(NamedTuple):
    """What the scans read beside v: q, k, k_read and last of `delta_outputs`, and the pairs.

    queries, keys: with key gates, the operands of the scores of q and of k with the keys.
    """

    q: Array
    k: Array
    k_read: Array
    last: Array
    pairs: Pairs
    queries: Operands | None = None
    keys: Operands | None = None


def scanned(r: Recurrence, chunks: Segments, chunk: int) -> Scanned:
    """Compute what the scan reads.

    With key gates, the products of keys take the place of the scores in a second call of `chunk_operands`, in float32 because
    an inverse is formed from them.
    """
    if r.decay.form != "key":
        return Scanned(r.q, r.k, r.scale, r.scale, chunk_pairs(r, chunks, chunk))
    H, stored = r.num_heads, jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    queries = chunk_operands(r, chunks, chunk, dtype=stored)
    keys = chunk_operands(r, chunks, chunk, r.k, jnp.float32)
    inverse, factors = launch(
        delta_inverses,
        H * chunks.count,
        (keys.scores, r.erasing.beta, chunks.table),
        [((chunks.count, H, chunk, chunk), stored), ((chunks.count, H, 3, chunk), jnp.float32)],
        H=H, C=chunk, SIGN=-1 if r.reverse else 1, warps=4, stages=1,
    )  # fmt: skip
    pairs = Pairs(inverse, queries.scores, factors, r.scale)
    return Scanned(queries.q, queries.k, keys.q, queries.gates, pairs, queries, keys)


@compile_in_parallel
def delta_chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure, in one scan of every sequence."""
    segments, chunks = segments_and_chunks(r, config)
    q, k, k_read, last, pairs, *_ = scanned(r, chunks, config.chunk)
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    columns = min(config.columns, width(V))
    o, final = launch(
        delta_outputs,
        -(-V // columns) * H * segments.count,
        (q, k, r.v, k_read, last, pairs.inverse, pairs.scores, pairs.factors, r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), (r.state_shape, jnp.float32)],
        **sizes(r), HQ=q.shape[2], HK=k.shape[2], HV=r.v.shape[2], C=config.chunk, BK=width(K), BV=columns,
        GATE=gate_of(r), SIGN=-1 if r.reverse else 1, START=kind != 0, **arithmetic(r),
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


class Ends(NamedTuple):
    """What `delta_states` stores: S and dL/dS at the ends of every chunk, U and Y of its tokens, and dL/dS before sequences.

    Y is float32, because the gradient of beta is a sum of its products that cancel.
    """

    S: Array
    U: Array
    dS: Array
    Y: Array
    d_initial: Array


def chunk_ends(r: Recurrence, d_output, d_final, config: GradientConfig, segments, chunks, scan: Scanned) -> Ends:
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    gate = gate_of(r)
    states, rows = (chunks.count, H, *((K, V) if gate == "key" else (V, K))), (B, T, H, V)
    columns = min(config.block, width(V))
    results = launch(
        delta_states,
        2 * -(-V // columns) * H * segments.count,
        (scan.q, scan.k, r.v, scan.k_read, scan.last, d_output, *scan.pairs[:3], r.scale, start, d_final, segments.table),
        [(states, stored), (rows, stored), (states, stored), (rows, jnp.float32), (r.state_shape, jnp.float32)],
        **sizes(r), HQ=scan.q.shape[2], HK=scan.k.shape[2], HV=r.v.shape[2], C=config.chunk, BK=width(K), BV=columns,
        GATE=gate, SIGN=-1 if r.reverse else 1, START=kind != 0, **arithmetic(r), warps=4, stages=2,
    )  # fmt: skip
    return Ends(*results)


@compile_in_parallel
def delta_chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure.

    S is scanned forward and dL/dS in reverse. Then all chunks are processed in parallel.
    """
    segments, chunks = segments_and_chunks(r, config)
    scan = scanned(r, chunks, config.chunk)
    ends = chunk_ends(r, d_output, d_final, config, segments, chunks, scan)
    if r.decay.form == "key":
        return key_gate_gradients(r, d_output, config, chunks, scan, ends)
    return head_gate_gradients(r, d_output, config, chunks, scan.pairs, ends)


def key_gate_gradients(r: Recurrence, d_output, config: GradientConfig, chunks: Segments, scan: Scanned, ends: Ends):
    """Assemble the gradient with key gates from two gradients without an erasure, both with U in the place of v.

    The first has the queries and the gradient of the outputs. The second has e = beta k in the place of the queries and -Y in the
    place of d_output, reads S and leaves dS to the first. Its part of a token with itself is removed: L has no diagonal.
    """
    (_, H, _, _), f32, beta = r.state_shape, jnp.float32, r.erasing.beta
    assert beta is not None and scan.queries is not None and scan.keys is not None  # the other forms are refused
    is_token = jnp.ones((1, 1, 1, 1), bool) if r.boundaries is None else r.is_token[None, :, None, None]
    U, Y = (jnp.where(is_token, x, 0) for x in (ends.U, ends.Y))
    k, v, beta = spread_heads(r.k, H), spread_heads(r.v, H), beta.astype(f32)[..., None]
    e = (beta * k).astype(r.q.dtype)
    inner = r.replace(v=U.astype(r.q.dtype), erasure=None, initial_state=None)
    dq, dk, _, dg, d_scale = chunk_gradients(inner, d_output, config, chunks, scan.queries, ends.S, ends.dS, f32)
    reads = inner.replace(q=e, scale=jnp.ones_like(r.scale))
    nothing = jnp.zeros_like(ends.dS)
    minus = (-Y).astype(r.q.dtype)
    de, dk_erased, _, dg_erased, _ = chunk_gradients(reads, minus, config, chunks, scan.keys, ends.S, nothing, f32)
    k, v, e, Y, U = (jnp.where(is_token, x.astype(f32), 0) for x in (k, v, e, Y, U))
    beta = jnp.where(is_token, beta, 0)
    own = (Y * U).sum(-1, keepdims=True)
    de += own * k
    dk += dk_erased + own * e + beta * de
    d_beta = ((de * k).sum(-1) + (Y * v).sum(-1)).astype(r.q.dtype)
    d_scale = by_sequence(r, chunks, d_scale).sum(1)
    d_decay, d_erasure = Decay(key=dg + dg_erased), Erasure(beta=d_beta)
    return gradient_recurrence(r, dq, dk, beta * Y, d_decay, ends.d_initial, d_scale, d_erasure)


def head_gate_gradients(r: Recurrence, d_output, config: GradientConfig, chunks: Segments, pairs: Pairs, ends: Ends):
    """Compute the gradient with per-head, constant or no gates, in one launch."""
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    S, U, dS, Y, d_initial = ends

    def like(x):  # gradients that heads share are summed in float32
        return (B, T, H, x.shape[3]), x.dtype if x.shape[2] == H else jnp.float32

    (gates, form), beta = gates_of(r), r.erasing.beta
    assert beta is not None  # the other forms are refused
    per_chunk, per_row = ((chunks.count, H), jnp.float32), (B, T, H)
    d_gates = (per_row, gates.dtype) if form == "head" else per_chunk
    dq, dk, dv, d_beta, dg, d_scale = launch(
        delta_gradient,
        H * chunks.count,
        (r.q, r.k, r.v, beta, pairs.gates, d_output, pairs.scores, U, Y, r.scale, S, dS, chunks.table),
        [*map(like, (r.q, r.k, r.v)), (per_row, beta.dtype), d_gates, per_chunk],
        **sizes(r), **heads(r), C=config.chunk, BK=min(config.rows, width(K)), BV=width(V), FORM=form,
        SIGN=-1 if r.reverse else 1, **arithmetic(r), warps=config.warps, stages=config.stages,
    )  # fmt: skip
    d_decay = Decay()
    if form != "none":
        d_decay = Decay(**{form: by_sequence(r, chunks, dg) if form == "constant" else dg})
    d_erasure = Erasure(beta=d_beta)
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, by_sequence(r, chunks, d_scale).sum(1), d_erasure)
