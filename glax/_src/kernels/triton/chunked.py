"""The chunked kernels launched: outputs and final states, and the gradient in every input."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, fold_heads, gradient_like
from glax._src.kernels.triton import score_kernels, state_kernels
from glax._src.kernels.triton.compile_ahead import side_by_side
from glax._src.kernels.triton.config import ChunkedConfig, GradientConfig, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch, tl
from glax._src.kernels.triton.output_kernels import outputs
from glax._src.kernels.triton.segments import SEQUENCE, Segments, segments_of
from glax._src.kernels.triton.vjp_exact_kernels import exact_gradient, exact_gradient_passed_outputs
from glax._src.kernels.triton.vjp_kernels import gradient

EACH = 8  # chunks that a program looks at before it ends, if none needs the exact form
EXACT_WARPS = 8  # float16's exact gradient at widths of 128 spills 952 bytes so, 3008 with 4
PREPARED = 32  # channels at a time in `prepare`
PREPARE_STAGES = 3
WALKED = 64  # rows and columns of the state in a program that finds segments' states for the forward


def arithmetic(r: Recurrence) -> dict:
    """In what operands are rounded and multiplied: bfloat16 as it is, float16 in TF32, which has its digits and the range
    for decays, float32 in three TF32 products."""
    if r.q.dtype == jnp.bfloat16:
        return dict(DTYPE=tl.bfloat16, PRECISION="tf32")
    return dict(DTYPE=tl.float32, PRECISION="tf32x3" if r.q.dtype == jnp.float32 else "tf32")


def sizes(r: Recurrence) -> dict:
    _, H, K, V = r.state_shape
    return dict(H=H, K=K, V=V)


def heads(r: Recurrence) -> dict:
    return dict(HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2])


def gates_of(r: Recurrence):
    """The gates' array and the form; any array stands for gates that are not there."""
    d, form = r.decay, r.decay.form
    return next((x for x in (d.constant, d.head, d.key) if x is not None), r.scale), form


class Operands(NamedTuple):
    """What walks take for q, k and the gates, with the scores of each chunk; any array stands for what a form lacks."""

    q: Array
    k: Array
    gates: Array
    scores: Array
    reach: Array


def operands_of(r: Recurrence, chunks: Segments, chunk: int) -> Operands:
    """Key gates: as `prepare` and `exact_scores` make them. Head gates: summed from each chunk's first token on."""
    (gates, form), (_, H, K, _) = gates_of(r), r.state_shape
    B, T = r.q.shape[:2]
    sign = dict(SIGN=-1 if r.reverse else 1)
    if form == "head":
        output = [(gates.shape, jnp.float32)]
        options = dict(H=H, BH=width(H), C=chunk, **sign, warps=4, stages=1)
        (gates,) = launch(state_kernels.chunk_sums, chunks.count, (gates, chunks.table), output, **options)
    if form != "key":
        return Operands(r.q, r.k, gates, r.scale, r.scale)
    M = chunks.count
    shape = dict(H=H, HQ=r.q.shape[2], HK=r.k.shape[2], K=K, C=chunk, **sign, **arithmetic(r), warps=4)
    wide, scores = ((B, T, H, K), r.q.dtype), ((M, H, chunk, chunk), r.q.dtype)
    reads, adds, scores, last, reach = launch(
        score_kernels.prepare,
        H * M,
        (r.q, r.k, gates, chunks.table),
        [wide, wide, scores, ((M, H, 2, K), jnp.float32), ((M, H), jnp.float32)],
        **shape, BK=min(PREPARED, width(K)), stages=PREPARE_STAGES,
    )  # fmt: skip
    (scores,) = launch(
        score_kernels.exact_scores_passed_scores if ALIASES_ARE_PASSED else score_kernels.exact_scores,
        -(-H * M // EACH),
        (r.q, r.k, gates, chunks.table, reach, jnp.full(1, H * M, jnp.int32), scores),
        [(scores.shape, scores.dtype)],
        in_place={6: 0},
        **shape, BK=min(32, width(K)), EACH=EACH, stages=1,
    )  # fmt: skip
    return Operands(reads, adds, last, scores, reach)


def whole(r: Recurrence, size: int, chunk: int) -> int:
    """`size`, or for 0 the length of a segment that holds any sequence."""
    return size or -(-r.q.shape[1] // chunk) * chunk


def start_of_sequences(r: Recurrence):
    return (r.scale, 0) if r.initial_state is None else (r.initial_state, 2)


class Scan:
    """Launches of `walk.states` and what follows it over one division into segments, in one direction."""

    def __init__(self, r: Recurrence, config, block: int, segments: Segments, given: Operands, d_output=None):
        self.r, self.segments, self.gates, self.adjoint = r, segments, given.gates, d_output is not None
        self.a, self.b = (given.q, d_output) if self.adjoint else (given.k, r.v)
        self.launched = blocks_of(r, config, block)

    def starts(self, start, kind: int):
        """The state where every segment begins, [segments, H, K, V], and how other kernels are to read it."""
        if self.segments.count <= self.r.num_sequences and self.r.boundaries is None:
            return start, kind
        return self.scan(self.states(last=False), start, kind)[0], 1

    def states(self, last: bool):
        """Of every segment: its state, begun from zero, [segments, H, K, V], and log decay, [segments, H, K or 1].

        last: of those that end a sequence's walk too; else theirs are 0, which will do for `starts`.
        """
        r, (_, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        local, _, log = launch(
            state_kernels.states,
            programs_of(r, self.launched) * M,
            (self.a, self.b, self.gates, r.scale, r.scale, self.segments.table),
            [((M, H, K, V), jnp.float32), ((1,), jnp.float32), ((M, H, self.logs), jnp.float32)],
            **sizes(r), HA=self.a.shape[2], HB=self.b.shape[2], ADJOINT=self.adjoint, LAST=last, START=0, **self.launched,
        )  # fmt: skip
        return local, log

    def scan(self, states, start, kind: int):
        """The state where every segment begins, that which ends every sequence, [N, H, K, V], its log decay, and those before
        every segment."""
        r, (N, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        operands, flags = (*states, start, self.segments.begins), dict(FORM=r.decay.form, ADJOINT=self.adjoint)
        options = dict(START=kind != 0, warps=4, stages=2)
        blocks = dict(BK=min(32, width(K)), BV=min(32, width(V)))
        programs = -(-K // blocks["BK"]) * -(-V // blocks["BV"]) * H * N
        shapes = (M, H, K, V), (N, H, K, V), (N, H, self.logs), (M, H, self.logs)
        outputs = [(shape, jnp.float32) for shape in shapes]
        return launch(state_kernels.scan, programs, operands, outputs, **sizes(r), **blocks, **flags, **options)

    @property
    def logs(self) -> int:
        return self.r.state_shape[2] if self.r.decay.form == "key" else 1


def blocks_of(r: Recurrence, config, block: int) -> dict:
    """What the kernels of states have in common."""
    _, _, K, V = r.state_shape
    blocks = dict(C=config.chunk, BK=min(block, width(K)), BV=min(block, width(V)))
    flags = dict(FORM=r.decay.form, SIGN=-1 if r.reverse else 1)
    return blocks | flags | arithmetic(r) | dict(warps=4, stages=3 if r.q.dtype == jnp.bfloat16 else 2)


def programs_of(r: Recurrence, blocks: dict) -> int:
    """A segment's."""
    _, H, K, V = r.state_shape
    return -(-K // blocks["BK"]) * -(-V // blocks["BV"]) * H


def segments_and_chunks(r: Recurrence, config) -> tuple[Segments, Segments]:
    C = config.chunk
    return segments_of(r, whole(r, config.segment, C), C), segments_of(r, C, C)


@side_by_side
def chunked(r: Recurrence, config: ChunkedConfig) -> Outputs:
    """One walk over every sequence; where that leaves the GPU idle, over segments of them, after their states."""
    segments, chunks = segments_and_chunks(r, config)
    given, start = operands_of(r, chunks, config.chunk), start_of_sequences(r)
    if config.segment:
        start = Scan(r, config, WALKED, segments, given).starts(*start)
    return walk_of_outputs(r, config, segments, given, *start)


@side_by_side
def begin(r: Recurrence, config: ChunkedConfig):
    """The first of two TwoPhase: every segment's own state, and what follows from them and the initial state.

    That does not wait for the states that enter segments, which are formed while it is exchanged: from zero, for what
    arrives is added to them, decayed.
    """
    segments, chunks = segments_and_chunks(r, config)
    given = operands_of(r, chunks, config.chunk)
    states_walk = Scan(r, config, WALKED, segments, given)
    states = states_walk.states(last=True)
    _, final, log, _ = states_walk.scan(states, *start_of_sequences(r))
    entering, _, _, before = states_walk.scan(states, r.scale, 0)
    return (given, entering, before), final, log


@side_by_side
def finish(begun, r: Recurrence, config: ChunkedConfig) -> Outputs:
    given, entering, before = begun
    segments, _ = segments_and_chunks(r, config)
    start = entering + jnp.exp(before)[..., None] * r.start_state[segments.table[:, SEQUENCE]]
    return walk_of_outputs(r, config, segments, given, start, 1)


def walk_of_outputs(r: Recurrence, config: ChunkedConfig, segments: Segments, given: Operands, start, kind: int):
    B, T = r.q.shape[:2]
    _, H, K, V = r.state_shape
    C, columns = config.chunk, min(config.columns, width(V))
    o, final = launch(
        outputs,
        -(-V // columns) * H * segments.count,
        (given.q, given.k, r.v, given.gates, given.scores, r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), (r.state_shape, jnp.float32)],
        **sizes(r), **heads(r), C=C, BK=width(K), BV=columns,
        FORM=r.decay.form, SIGN=-1 if r.reverse else 1, START=kind, **arithmetic(r),
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return Outputs(o, final)


@side_by_side
def chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """The states at both ends of every chunk, S walking forwards and dS backwards; then all chunks at once."""
    segments, chunks = segments_and_chunks(r, config)
    given, start, d_start = operands_of(r, chunks, config.chunk), start_of_sequences(r), (d_final, 2)
    if config.segment:
        start = Scan(r, config, config.block, segments, given).starts(*start)
        d_start = Scan(r, config, config.block, segments, given, d_output).starts(*d_start)
    return gradient_of_chunks(r, d_output, config, segments, chunks, given, start, d_start)


@side_by_side
def begin_vjp(r: Recurrence, d_output, d_final, config: GradientConfig):
    """The first of two TwoPhase: what every segment adds to dL/dS, and what follows from that and d_final.

    While that is exchanged, the second walks for the states before segments.
    """
    segments, chunks = segments_and_chunks(r, config)
    given = operands_of(r, chunks, config.chunk)
    against = Scan(r, config, config.block, segments, given, d_output)
    states = against.states(last=True)
    _, d_initial, log, _ = against.scan(states, d_final, 2)
    return (given, states), d_initial, log


@side_by_side
def finish_vjp(begun, r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    given, states = begun
    segments, chunks = segments_and_chunks(r, config)
    start = Scan(r, config, config.block, segments, given).starts(*start_of_sequences(r))
    d_start, *_ = Scan(r, config, config.block, segments, given, d_output).scan(states, d_final, 2)
    return gradient_of_chunks(r, d_output, config, segments, chunks, given, start, (d_start, 1))


def gradient_of_chunks(
    r: Recurrence,
    d_output,
    config: GradientConfig,
    segments: Segments,
    chunks: Segments,
    given: Operands,
    start,
    d_start,
) -> Recurrence:
    """start, d_start: the states that walks begin from, and how they are to be read."""
    B, T = r.q.shape[:2]
    _, H, K, V = r.state_shape
    (gates, form), C = gates_of(r), config.chunk
    (start, kind), (d_start, d_kind) = start, d_start
    blocks = blocks_of(r, config, config.block)
    states = ((chunks.count, H, K, V), jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32)
    edges = (r.state_shape, jnp.float32)
    before, _, behind, d_initial = launch(
        state_kernels.all_states,
        2 * programs_of(r, blocks) * segments.count,
        (given.q, given.k, r.v, d_output, given.gates, r.scale, start, d_start, segments.table),
        [states, edges, states, edges],
        **sizes(r), HQ=given.q.shape[2], HK=given.k.shape[2], HV=r.v.shape[2], START=kind, D_START=d_kind, **blocks,
    )  # fmt: skip

    def wide(x):  # gradients that heads share are summed in float32
        return x.dtype if x.shape[2] == H else jnp.float32

    d_gates = {"key": ((B, T, H, K), gates.dtype), "head": ((B, T, H), gates.dtype)}
    each = ((chunks.count, H), jnp.float32)
    shape = dict(**sizes(r), **heads(r), C=C, BV=width(V), SIGN=-1 if r.reverse else 1, **arithmetic(r))
    dq, dk, dv, dg, d_scale = launch(
        gradient,
        H * chunks.count,
        (r.q, r.k, r.v, gates, given.gates, given.k, given.scores, d_output, r.scale, before, behind, chunks.table),
        [((B, T, H, K), wide(r.q)), ((B, T, H, K), wide(r.k)), ((B, T, H, V), wide(r.v)), d_gates.get(form, each), each],
        **shape, BK=min(config.rows, width(K)), FORM=form, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    if form == "key":
        pairs, found = jnp.full(1, H * chunks.count, jnp.int32), (dq, dk, dg, d_scale)
        dq, dk, dg, d_scale = launch(
            exact_gradient_passed_outputs if ALIASES_ARE_PASSED else exact_gradient,
            -(-H * chunks.count // EACH),
            (r.q, r.k, r.v, gates, d_output, r.scale, before, behind, chunks.table, given.reach, pairs, *found),
            [(x.shape, x.dtype) for x in found],
            in_place={11 + i: i for i in range(4)},
            **shape, BK=16, EACH=EACH, warps=4 if r.q.dtype == jnp.bfloat16 else EXACT_WARPS, stages=1,
        )  # fmt: skip
    decay = dict.fromkeys(("constant", "head", "key"))
    if form != "none":
        decay[form] = by_sequence(r, chunks, dg) if form == "constant" else dg
    d = r.replace(
        q=fold_heads(dq, r.q.shape[2]),
        k=fold_heads(dk, r.k.shape[2]),
        v=fold_heads(dv, r.v.shape[2]),
        decay=Decay(**decay),
        initial_state=None if r.initial_state is None else d_initial,
        boundaries=None,
        scale=by_sequence(r, chunks, d_scale).sum(1),
    )
    return gradient_like(r, d)


def by_sequence(r: Recurrence, chunks: Segments, x):
    """The sum of x [chunks, H] over the chunks of each sequence, [N, H]; the order is fixed, so repeats agree in every bit."""
    N, H = r.state_shape[:2]
    if r.boundaries is None:
        return x.reshape(N, -1, H).sum(1)
    rows = dict(H=H, BH=width(H), ROWS=16, warps=4, stages=1)
    (total,) = launch(state_kernels.sequence_sums, N, (x, chunks.begins), [((N, H), jnp.float32)], **rows)
    return total
