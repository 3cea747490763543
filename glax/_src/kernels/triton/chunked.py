"""Launch the chunked kernels: outputs and final states, and the gradient in every input."""

import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence
from glax._src.kernels.triton import chunk_output_kernels, state_kernels
from glax._src.kernels.triton.chunk_gradients import chunk_gradients
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.launch import launch
from glax._src.kernels.triton.operands import Operands, arithmetic, chunk_operands, heads, sizes
from glax._src.kernels.triton.output_kernels import outputs
from glax._src.kernels.triton.segments import SEQUENCE, Segments, segments_of

OUTPUT_ROWS = 64  # rows of a stored state in an iteration of `chunk_outputs`
STATE_BLOCK = 64  # rows and columns of the state in a program of the kernels that form the states of segments


def segment_size(r: Recurrence, size: int, chunk: int) -> int:
    """Return `size`, or for 0 the length of a segment that holds any sequence: T, rounded up to whole chunks."""
    return size or -(-r.q.shape[1] // chunk) * chunk


def start_of_sequences(r: Recurrence):
    """Return the initial states and the kernels' START: 2 for a state of each sequence, 0 for zero."""
    return (r.scale, 0) if r.initial_state is None else (r.initial_state, 2)


class Scan:
    """Launch the state kernels over one division into segments, in one direction.

    d_output: the gradient of the outputs for the scan of dL/dS in reverse; None for the scan of S.
    """

    def __init__(self, r: Recurrence, config, block: int, segments: Segments, operands: Operands, d_output=None):
        self.r, self.segments, self.gates, self.adjoint = r, segments, operands.gates, d_output is not None
        self.a, self.b = (operands.k, r.v) if d_output is None else (operands.q, d_output)
        self.launched = blocks_of(r, config, block)

    def starts(self, start, kind: int):
        """Return the state where every segment begins, [segments, H, K, V], and the START that other kernels read it with."""
        if self.segments.count <= self.r.num_sequences and self.r.boundaries is None:
            return start, kind
        return self.scan(self.states(last=False), start, kind)[0], 1

    def states(self, last: bool):
        """Return each segment's final state from zero, [segments, H, K, V], and its log decay, [segments, H, K or 1].

        last: also compute these for the segment that ends the scan of a sequence. Otherwise they are 0 there, which is
        enough for `starts`.
        """
        r, (_, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        local, _, log = launch(
            state_kernels.segment_states,
            programs_of(r, self.launched) * M,
            (self.a, self.b, self.gates, r.scale, r.scale, self.segments.table),
            [((M, H, K, V), jnp.float32), ((1,), jnp.float32), ((M, H, self.logs), jnp.float32)],
            **sizes(r), HA=self.a.shape[2], HB=self.b.shape[2], ADJOINT=self.adjoint, LAST=last, START=0, **self.launched,
        )  # fmt: skip
        return local, log

    def scan(self, states, start, kind: int):
        """Scan the segments' local states.

        Returns the state where every segment begins [segments, H, K, V], the state and the log decay at the end of every
        sequence [N, H, K, V] and [N, H, K or 1], and the log decay before every segment [segments, H, K or 1].
        """
        r, (N, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        operands, flags = (*states, start, self.segments.begins), dict(FORM=r.decay.form, ADJOINT=self.adjoint)
        options = dict(START=kind != 0, warps=4, stages=2)
        blocks = dict(BK=min(32, width(K)), BV=min(32, width(V)))
        programs = -(-K // blocks["BK"]) * -(-V // blocks["BV"]) * H * N
        shapes = (M, H, K, V), (N, H, K, V), (N, H, self.logs), (M, H, self.logs)
        outputs = [(shape, jnp.float32) for shape in shapes]
        return launch(
            state_kernels.scan_segments, programs, operands, outputs, **sizes(r), **blocks, **flags, **options
        )

    @property
    def logs(self) -> int:
        return self.r.state_shape[2] if self.r.decay.form == "key" else 1


def blocks_of(r: Recurrence, config, block: int) -> dict:
    """Return the options that all state kernels share."""
    _, _, K, V = r.state_shape
    blocks = dict(C=config.chunk, BK=min(block, width(K)), BV=min(block, width(V)))
    flags = dict(FORM=r.decay.form, SIGN=-1 if r.reverse else 1)
    warps = 8 if blocks["BK"] * blocks["BV"] > STATE_BLOCK * STATE_BLOCK else 4
    return blocks | flags | arithmetic(r) | dict(warps=warps, stages=3 if r.q.dtype == jnp.bfloat16 else 2)


def programs_of(r: Recurrence, blocks: dict) -> int:
    """Return the number of programs that one segment needs."""
    _, H, K, V = r.state_shape
    return -(-K // blocks["BK"]) * -(-V // blocks["BV"]) * H


def segments_and_chunks(r: Recurrence, config) -> tuple[Segments, Segments]:
    """Divide the sequences into segments of config.segment tokens, and into chunks."""
    C = config.chunk
    return segments_of(r, segment_size(r, config.segment, C), C), segments_of(r, C, C)


@compile_in_parallel
def chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states in one scan of every sequence, or with config.block from states at every chunk.

    With config.segment, segments of the sequences are scanned in parallel, after the states where they begin.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands, start = chunk_operands(r, chunks, config.chunk), start_of_sequences(r)
    if config.segment:
        start = Scan(r, config, STATE_BLOCK, segments, operands).starts(*start)
    return launch_outputs(r, config, segments, chunks, operands, *start)


@compile_in_parallel
def local_states(r: Recurrence, config: TritonChunkedConfig):
    """Compute the first phase: the segments' local states, and from them the final state and the log decay.

    The states where segments begin are computed from a zero initial state, while the final state is exchanged. `finish`
    adds the decayed initial state to them.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands = chunk_operands(r, chunks, config.chunk)
    scan = Scan(r, config, STATE_BLOCK, segments, operands)
    states = scan.states(last=True)
    _, final, log, _ = scan.scan(states, *start_of_sequences(r))
    entering, _, _, before = scan.scan(states, r.scale, 0)
    return (operands, entering, before), final, log


@compile_in_parallel
def finish(saved, r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the second phase: outputs and final states from r.initial_state and what `local_states` saved."""
    operands, entering, before = saved
    segments, chunks = segments_and_chunks(r, config)
    start = entering + jnp.exp(before)[..., None] * r.start_state[segments.table[:, SEQUENCE]]
    return launch_outputs(r, config, segments, chunks, operands, start, 1)


def launch_outputs(
    r: Recurrence,
    config: TritonChunkedConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    kind: int,
):
    """Compute o [B, T, H, V] and the final states [N, H, K, V]. kind: the START that `start` is read with."""
    B, T = r.q.shape[:2]
    _, H, K, V = r.state_shape
    C, columns = config.chunk, min(config.columns, width(V))
    options = dict(C=C, BV=columns, FORM=r.decay.form, SIGN=-1 if r.reverse else 1, **arithmetic(r))
    options |= sizes(r)
    blocks, o = -(-V // columns) * H, ((B, T, H, V), r.q.dtype)
    if config.block:
        states, final = launch_states(r, config, segments, chunks, operands, start, kind)
        (o,) = launch(
            chunk_output_kernels.chunk_outputs,
            blocks * chunks.count,
            (operands.q, operands.k, r.v, operands.gates, operands.scores, r.scale, states, chunks.table),
            [o],
            **options, HQ=operands.q.shape[2], HK=operands.k.shape[2], HV=r.v.shape[2],
            BK=min(OUTPUT_ROWS, width(K)), warps=config.warps, stages=config.stages,
        )  # fmt: skip
        return Outputs(o, final)
    o, final = launch(
        outputs,
        blocks * segments.count,
        (operands.q, operands.k, r.v, operands.gates, operands.scores, r.scale, start, segments.table),
        [o, (r.state_shape, jnp.float32)],
        **options, **heads(r), BK=width(K), START=kind, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


def launch_states(
    r: Recurrence,
    config: TritonChunkedConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    kind: int,
):
    """Compute the state where each chunk begins [chunks, H, K, V], and the final states [N, H, K, V]."""
    blocks = blocks_of(r, config, config.block)
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    return launch(
        chunk_output_kernels.entering_states,
        programs_of(r, blocks) * segments.count,
        (operands.k, r.v, operands.gates, r.scale, start, segments.table),
        [((chunks.count, *r.state_shape[1:]), stored), (r.state_shape, jnp.float32)],
        **sizes(r), HK=operands.k.shape[2], HV=r.v.shape[2], START=kind, **blocks,
    )  # fmt: skip


@compile_in_parallel
def chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient in every input.

    S is scanned forwards and dL/dS in reverse, for the states at both ends of every chunk. Then all chunks are processed in
    parallel.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands, start, d_start = chunk_operands(r, chunks, config.chunk), start_of_sequences(r), (d_final, 2)
    if config.segment:
        start = Scan(r, config, config.block, segments, operands).starts(*start)
        d_start = Scan(r, config, config.block, segments, operands, d_output).starts(*d_start)
    return launch_gradient(r, d_output, config, segments, chunks, operands, start, d_start)


@compile_in_parallel
def local_states_vjp(r: Recurrence, d_output, d_final, config: GradientConfig):
    """Compute the first phase of the gradient: the segments' parts of dL/dS, and from them d_initial and the log decay.

    While d_initial is exchanged, the second phase scans for the states where segments begin.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands = chunk_operands(r, chunks, config.chunk)
    adjoint_scan = Scan(r, config, config.block, segments, operands, d_output)
    states = adjoint_scan.states(last=True)
    _, d_initial, log, _ = adjoint_scan.scan(states, d_final, 2)
    return (operands, states), d_initial, log


@compile_in_parallel
def finish_vjp(saved, r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the second phase of the gradient from d_final and what `local_states_vjp` saved."""
    operands, states = saved
    segments, chunks = segments_and_chunks(r, config)
    start = Scan(r, config, config.block, segments, operands).starts(*start_of_sequences(r))
    d_start, *_ = Scan(r, config, config.block, segments, operands, d_output).scan(states, d_final, 2)
    return launch_gradient(r, d_output, config, segments, chunks, operands, start, (d_start, 1))


def launch_gradient(
    r: Recurrence,
    d_output,
    config: GradientConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    d_start,
) -> Recurrence:
    """Compute the gradient from the states where scans of segments begin.

    start, d_start: (states, START) of the scan of S and of the scan of dL/dS.
    """
    _, H, K, V = r.state_shape
    form = r.decay.form
    (start, kind), (d_start, d_kind) = start, d_start
    blocks = blocks_of(r, config, config.block)
    states = ((chunks.count, H, K, V), jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32)
    edges = (r.state_shape, jnp.float32)
    before, _, behind, d_initial = launch(
        state_kernels.chunk_states,
        2 * programs_of(r, blocks) * segments.count,
        (operands.q, operands.k, r.v, d_output, operands.gates, r.scale, start, d_start, segments.table),
        [states, edges, states, edges],
        **sizes(r), HQ=operands.q.shape[2], HK=operands.k.shape[2], HV=r.v.shape[2], START=kind, D_START=d_kind, **blocks,
    )  # fmt: skip

    dq, dk, dv, dg, d_scale = chunk_gradients(r, d_output, config, chunks, operands, before, behind)
    d_decay = Decay()
    if form != "none":
        d_decay = Decay(**{form: by_sequence(r, chunks, dg) if form == "constant" else dg})
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, by_sequence(r, chunks, d_scale).sum(1))


def by_sequence(r: Recurrence, chunks: Segments, x):
    """Return the sum of x [chunks, H] over the chunks of each sequence, [N, H].

    The order of summation is fixed, so repeated calls agree in every bit.
    """
    N, H = r.state_shape[:2]
    if r.boundaries is None:
        return x.reshape(N, -1, H).sum(1)
    rows = dict(H=H, BH=width(H), ROWS=16, warps=4, stages=1)
    (total,) = launch(state_kernels.sequence_sums, N, (x, chunks.begins), [((N, H), jnp.float32)], **rows)
    return total
