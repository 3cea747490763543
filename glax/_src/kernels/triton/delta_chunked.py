"""Launch the kernels of the delta rule in chunks: outputs and final states, and the gradient in every input."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure, arrays_of
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence
from glax._src.kernels.triton.chunked import by_sequence, segments_and_chunks, start_of_sequences
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.delta_gradient import (
    delta_gradient,
    delta_key_gradient,
    exact_delta_key_gradient,
    exact_delta_key_gradient_passed_outputs,
)
from glax._src.kernels.triton.delta_pairs import (
    delta_key_pairs,
    delta_scores,
    exact_delta_key_pairs,
    exact_delta_key_pairs_passed_outputs,
)
from glax._src.kernels.triton.delta_scan import delta_outputs, delta_states
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch
from glax._src.kernels.triton.operands import (
    EXACT_WARPS,
    PAIRS_PER_PROGRAM,
    dimensions,
    gates_of,
    head_gate_sums,
)
from glax._src.kernels.triton.segments import Segments

STATE_SLICE = 64  # channels of a slice of a float32 state in the scans
KEY_BLOCK = 32  # channels of an iteration of `delta_key_pairs`


class Pairs(NamedTuple):
    """Hold what the scans read for each pair of tokens of a chunk.

    inverse, scores: [chunks, H, C, C], (I + L)^-1 - I and P. factors: [chunks, H, 3, C], the result of `delta_scores`. gates:
    the cumulative sums of head gates [B, T, H], or the constants of the sequences [N, H]; without these, an array that is not
    read.
    """

    inverse: Array
    scores: Array
    factors: Array
    gates: Array


def chunk_pairs(r: Recurrence, chunks: Segments, chunk: int) -> Pairs:
    """Compute the `Pairs` of every chunk of `chunk` tokens, for head, constant or no gates.

    inverse and scores are bfloat16 if q is, else float32: a float16 inverse may overflow.
    """
    (gates, form), (_, H, K, _) = gates_of(r), r.state_shape
    if form == "head":
        gates = head_gate_sums(r, gates, chunks, chunk)
    pairs = (chunks.count, H, chunk, chunk), jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    rows = 128 if r.q.dtype == jnp.bfloat16 else 32  # more would spill registers
    inverse, scores, factors = launch(
        delta_scores,
        H * chunks.count,
        (r.q, r.k, erasing_array(r), gates, chunks.table),
        [pairs, pairs, ((chunks.count, H, 3, chunk), jnp.float32)],
        **constants(r, chunk), BK=min(width(K), rows), warps=4, stages=1,
    )  # fmt: skip
    return Pairs(inverse, scores, factors, gates)


def constants(r: Recurrence, chunk: int) -> dict:
    """Return the constants of `Dimensions` that follow from r, by name: those of `operands.dimensions`, ERASURE and BEFORE.
    chunk: the tokens of a chunk."""
    return dimensions(r, chunk) | dict(ERASURE=r.erasing.form, BEFORE=r.erasing.before_decay)


def terms(r: Recurrence) -> dict:
    """Return the constant PRECISION of scans and gradients, as a dict: "tf32 terms" in float32, else an empty dict, which
    leaves the PRECISION of `dimensions`. The kernels that form the inverse do not take this constant."""
    return dict(PRECISION="tf32 terms") if r.q.dtype == jnp.float32 else {}


def scan_constants(r: Recurrence, chunk: int, q: Array, k: Array) -> dict:
    """Return the constants of a scan, by name. q, k: the arrays that the scan reads in the place of r.q and r.k."""
    K = width(r.state_shape[2])
    block = min(K, STATE_SLICE) if r.q.dtype == jnp.float32 else K
    return constants(r, chunk) | terms(r) | dict(HQ=q.shape[2], HK=k.shape[2], BK=block, GATE=gate_of(r))


def gradient_constants(r: Recurrence, config: GradientConfig) -> dict:
    """Return the constants of the gradient kernels of chunks in range, by name. In float32 the kernels sum over V in blocks of
    BV columns, whose terms fit in registers."""
    V, is_float32 = width(r.state_shape[3]), r.q.dtype == jnp.float32
    columns = min(V, config.columns or V) if is_float32 else V
    return terms(r) | dict(BK=min(config.rows, width(r.state_shape[2])), BV=columns, IN_BLOCKS=is_float32)


def erasing_array(r: Recurrence) -> Array:
    """Return the array with which r erases: beta [B, T, H] if r has it, or e [B, T, H, K]."""
    beta, erase, _ = arrays_of(r.erasing)
    return beta if erase is None else erase  # pyright: ignore[reportReturnType]


def write_of(r: Recurrence) -> Array:
    """Return the write gate w [B, T, H, V]; without w, an array that kernels do not read."""
    return r.scale if r.erasing.write is None else r.erasing.write


def gate_of(r: Recurrence) -> str:
    """Return the constant GATE of a scan: "none", "head" or "key". Constant gates have the factors of head gates."""
    return "head" if r.decay.form == "constant" else r.decay.form


def sequences_and_chunks(r: Recurrence, config: TritonChunkedConfig | GradientConfig) -> tuple[Segments, Segments]:
    """Return the whole sequences and their chunks, as two divisions of r. Raises ValueError for a config that divides
    sequences."""
    if config.segment:
        raise ValueError(
            f"segment must be 0 with beta or erase, whose scans take whole sequences, got {config.segment}: leave it out of cfg"
        )
    return segments_and_chunks(r, config)


class Scanned(NamedTuple):
    """Hold what the scans read besides v and w. q, k, e_read, decays: the operands of `delta_outputs`. pairs: the `Pairs` of
    every chunk. max_abs_cumsum: [chunks, H], the largest |sum| of key gates of each chunk and head; with other gates, an array
    that is not read."""

    q: Array
    k: Array
    e_read: Array
    decays: Array
    pairs: Pairs
    max_abs_cumsum: Array


def scanned(r: Recurrence, chunks: Segments, chunk: int) -> Scanned:
    """Compute the operands of the scans for every chunk of `chunk` tokens. Gates are none, constant, per
    head or per key."""
    if r.decay.form != "key":
        e_read = r.k if r.erasing.erase is None else r.erasing.erase
        return Scanned(r.q, r.k, e_read, r.scale, chunk_pairs(r, chunks, chunk), r.scale)
    (B, T), (_, H, K, _), M = r.q.shape[:2], r.state_shape, chunks.count
    assert r.decay.key is not None
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    wide, pairs, f32 = ((B, T, H, K), r.q.dtype), ((M, H, chunk, chunk), stored), jnp.float32
    operands = r.q, r.k, erasing_array(r), r.decay.key, r.scale, chunks.table
    shape = constants(r, chunk)
    *found, max_abs_cumsum = launch(
        delta_key_pairs,
        H * M,
        operands,
        [wide, wide, wide, pairs, pairs, ((M, H, 3, chunk), f32), ((M, H, 4, K), f32), ((M, H), f32)],
        **shape, BK=min(KEY_BLOCK, width(K)), warps=4, stages=2,
    )  # fmt: skip
    q_read, e_read, k_written, inverse, scores, factors, decays = launch(
        exact_delta_key_pairs_passed_outputs if ALIASES_ARE_PASSED else exact_delta_key_pairs,
        -(-H * M // PAIRS_PER_PROGRAM),
        (*operands, max_abs_cumsum, jnp.full(1, H * M, jnp.int32), *found),
        [(x.shape, x.dtype) for x in found],
        in_place={8 + i: i for i in range(7)},
        **shape, BK=16, PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
    )  # fmt: skip
    return Scanned(q_read, k_written, e_read, decays, Pairs(inverse, scores, factors, r.scale), max_abs_cumsum)


@compile_in_parallel
def delta_chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure, in one scan of every sequence."""
    segments, chunks = sequences_and_chunks(r, config)
    q, k, e_read, decays, pairs, _ = scanned(r, chunks, config.chunk)
    start, kind = start_of_sequences(r)
    (B, T), (_, H, _, V) = r.q.shape[:2], r.state_shape
    columns = min(config.columns, width(V))
    o, final = launch(
        delta_outputs,
        -(-V // columns) * H * segments.count,
        (q, k, r.v, e_read, write_of(r), decays, *pairs[:3], r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), (r.state_shape, jnp.float32)],
        **scan_constants(r, config.chunk, q, k), BV=columns, START=kind != 0, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


class Ends(NamedTuple):
    """Hold the results of `delta_states`. S, dS: S before and dL/dS behind every chunk, [chunks, H, V, K]. U, Y: of the chunks'
    tokens. d_initial: dL/dS before each sequence, [N, H, K, V].

    The gradient of beta is a sum of products of U and Y that cancel, and the gradient of e has the products of both. With head
    gates Y is float32, and so is U without beta. With key gates -Y or -beta Y stands for Y; `delta_states` has the shapes.
    """

    S: Array
    U: Array
    dS: Array
    Y: Array
    d_initial: Array


def chunk_ends(r: Recurrence, d_output, d_final, config: GradientConfig, segments, chunks, scan: Scanned) -> Ends:
    """Scan the sequences in both directions by `delta_states`, and return its results. segments, chunks: the whole sequences
    and their chunks. scan: the operands. d_output [B, T, H, V], d_final [N, H, K, V]: the cotangents."""
    start, kind = start_of_sequences(r)
    (B, T), (_, H, K, V) = r.q.shape[:2], r.state_shape
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    states, f32 = (chunks.count, H, V, K), jnp.float32
    if r.decay.form == "key":
        U = Y = (chunks.count, H, V, config.chunk * (2 if stored == jnp.bfloat16 else 1)), stored
    else:
        U, Y = ((B, T, H, V), f32 if r.erasing.beta is None else stored), ((B, T, H, V), f32)
    columns = min(config.block, width(V))
    results = launch(
        delta_states,
        2 * -(-V // columns) * H * segments.count,
        (
            scan.q, scan.k, r.v, scan.e_read, write_of(r), scan.decays, d_output, *scan.pairs[:3], r.scale, start, d_final,
            segments.table,
        ),
        [(states, stored), U, (states, stored), Y, (r.state_shape, f32)],
        **scan_constants(r, config.chunk, scan.q, scan.k), BV=columns, START=kind != 0, warps=4, stages=2,
    )  # fmt: skip
    return Ends(*results)


@compile_in_parallel
def delta_chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig, per_token: int = 1) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure.

    per_token: the number of rows of r for each token. All gates of a token but those of its first row are 0, and have no
    gradient. S is scanned forward and dL/dS in reverse. Then all chunks are processed in parallel.
    """
    segments, chunks = sequences_and_chunks(r, config)
    scan = scanned(r, chunks, config.chunk)
    ends = chunk_ends(r, d_output, d_final, config, segments, chunks, scan)
    if r.decay.form == "key":
        return key_gate_gradients(r, d_output, config, chunks, scan, ends, per_token)
    return head_gate_gradients(r, d_output, config, chunks, scan.pairs, ends, per_token)


def like(r: Recurrence, x) -> tuple:
    """Return the shape [B, T, H, width] and the dtype in which a kernel stores the gradient of x [B, T, heads, width], which is
    q, k or v.

    The dtype is float32 if heads share x, because their gradients are then summed; else x's own.
    """
    B, T, shared, width = x.shape
    return (B, T, r.num_heads, width), x.dtype if shared == r.num_heads else jnp.float32


def d_erasing(r: Recurrence) -> list[tuple]:
    """Return [(shape, dtype) of the gradient of beta or e, (shape, dtype) of the gradient of w]. Without w the second is an
    array of one number, which is not touched."""
    x, w = erasing_array(r), r.erasing.write
    return [(x.shape, x.dtype), ((1,), jnp.float32) if w is None else (w.shape, w.dtype)]


def erasure_like(r: Recurrence, d_erasure: Array, d_write: Array) -> Erasure:
    """Return the gradient of r's erasure as an `Erasure`. d_erasure: the gradient of beta or e. d_write: the gradient of w."""
    if r.erasing.beta is not None:
        return r.erasing.replace(beta=d_erasure)
    return r.erasing.replace(erase=d_erasure, write=None if r.erasing.write is None else d_write)


def key_gate_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, scan: Scanned, ends: Ends, per_token
):
    """Return the gradient of every input with key gates. One launch computes all chunks, and a second overwrites the results of
    chunks out of range. scan: the operands of the scans. ends: the results of `delta_states`. per_token: the number of rows of
    r for each token."""
    (_, H, _, V), M = r.state_shape, chunks.count
    g, erasure = r.decay.key, erasing_array(r)
    assert g is not None
    scaled = scan.q, scan.e_read, scan.k
    per_chunk, pairs = ((M, H), jnp.float32), jnp.full(1, H * M, jnp.int32)
    shape = constants(r, config.chunk) | dict(PER_TOKEN=per_token)
    dq, dk, dv, d_erasure, d_write, dg, d_scale = launch(
        delta_key_gradient,
        H * M,
        (
            r.q, r.k, r.v, *scaled, erasure, write_of(r), g, scan.decays, d_output, ends.U, ends.Y, r.scale, ends.S, ends.dS,
            chunks.table,
        ),
        [*(like(r, x) for x in (r.q, r.k, r.v)), *d_erasing(r), (g.shape, g.dtype), per_chunk],
        **shape | gradient_constants(r, config), warps=config.warps, stages=config.stages,
    )  # fmt: skip
    found = dq, dk, dg, d_scale, d_erasure
    dq, dk, dg, d_scale, d_erasure = launch(
        exact_delta_key_gradient_passed_outputs if ALIASES_ARE_PASSED else exact_delta_key_gradient,
        -(-H * M // PAIRS_PER_PROGRAM),
        (
            r.q, r.k, erasure, g, d_output, ends.U, ends.Y, r.scale, ends.S, ends.dS, chunks.table, scan.max_abs_cumsum, pairs,
            *found,
        ),
        [(x.shape, x.dtype) for x in found],
        in_place={13 + i: i for i in range(5)},
        **shape, BK=16, BV=width(V), PAIRS=PAIRS_PER_PROGRAM, warps=EXACT_WARPS, stages=1,
    )  # fmt: skip
    d_scale = by_sequence(r, chunks, d_scale).sum(1)
    return gradient_recurrence(
        r, dq, dk, dv, Decay(key=dg), ends.d_initial, d_scale, erasure_like(r, d_erasure, d_write)
    )


def head_gate_gradients(
    r: Recurrence, d_output, config: GradientConfig, chunks: Segments, pairs: Pairs, ends: Ends, per_token
):
    """Return the gradient of every input with per-head, constant or no gates, by one launch. pairs: the `Pairs` of every chunk.
    ends: the results of `delta_states`. per_token: the number of rows of r for each token."""
    (B, T), H = r.q.shape[:2], r.state_shape[1]
    gates, form = gates_of(r)
    per_chunk, per_row = ((chunks.count, H), jnp.float32), (B, T, H)
    d_gates = (per_row, gates.dtype) if form == "head" else per_chunk
    dq, dk, dv, d_erasure, d_write, dg, d_scale = launch(
        delta_gradient,
        H * chunks.count,
        (
            r.q, r.k, r.v, erasing_array(r), write_of(r), pairs.gates, d_output, pairs.scores, ends.U, ends.Y, r.scale, ends.S,
            ends.dS, chunks.table,
        ),
        [*(like(r, x) for x in (r.q, r.k, r.v)), *d_erasing(r), d_gates, per_chunk],
        **constants(r, config.chunk) | gradient_constants(r, config), PER_TOKEN=per_token,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    d_decay = Decay()
    if form != "none":
        d_decay = Decay(**{form: by_sequence(r, chunks, dg) if form == "constant" else dg})
    d_scale = by_sequence(r, chunks, d_scale).sum(1)
    return gradient_recurrence(r, dq, dk, dv, d_decay, ends.d_initial, d_scale, erasure_like(r, d_erasure, d_write))
