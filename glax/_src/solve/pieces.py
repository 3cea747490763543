"""Solve sequences in pieces of n tokens, one after another, to obtain the states behind every n tokens.

The state behind a piece is the initial state of the next piece, and no token is read twice. With segments, the pieces are
counted along the row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from glax._src.core.recurrence import Outputs, OutputsWithStates, PackedStates, Recurrence
from glax._src.core.segments import Segments, expanded

Solver = Callable[[Recurrence], Outputs]


def solve_with_states(solver: Solver, r: Recurrence, every: int, dtype) -> OutputsWithStates:
    """Return the outputs of solver(r), and in `dtype` the states behind every `every` whole tokens in scan order.

    The states are [N, T // every, H, K, V]; for packed sequences see `PackedStates`. The result is differentiable if the solver
    is.
    """
    dtype = r.dtype if dtype is None else dtype
    if r.boundaries is None:
        return OutputsWithStates(*solve_rows(solver, r, every, dtype))
    return solve_packed(solver, r, every, dtype)


class RowStates(NamedTuple):
    """Hold the outputs, final states and J stored states of B rows that are not packed."""

    output: Float[Array, "B T H V"]
    final_state: Float[Array, "B H K V"]
    states: Float[Array, "B J H K V"]


def no_states(r: Recurrence, every: int, dtype) -> Array | PackedStates:
    """Return the stored states of a recurrence without tokens or without sequences: zeros in the shapes of `solve_with_states`.

    dtype: their dtype; None for the dtype of sums.
    """
    N, *state = r.state_shape
    count, dtype = r.q.shape[1] // every, r.dtype if dtype is None else dtype
    if r.boundaries is None:
        return jnp.zeros((N, count, *state), dtype)
    return PackedStates(jnp.zeros((count, *state), dtype), jnp.zeros(N + 1, jnp.int32))


def solve_rows(solver: Solver, r: Recurrence, every: int, dtype) -> RowStates:
    """Return the outputs and states of rows that are not packed, by a loop over whole pieces of `every` tokens and then the
    tail.

    solver: solves one piece of all rows. dtype: of the stored states. A tail of fewer than `every` tokens stores no state.
    """
    T, count = r.q.shape[1], r.q.shape[1] // every
    whole = count * every
    low = T - whole if r.reverse else 0  # the first row of the whole pieces; the tail ends the scan

    def pieces(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "count B every *rest"]:
        x = lax.slice_in_dim(x, low, low + whole, axis=1)
        return jnp.moveaxis(x.reshape(x.shape[0], count, every, *x.shape[2:]), 1, 0)

    def step(state, piece: Recurrence):
        output, state = solver(from_fresh_states(piece.with_whole(r.replace(initial_state=state))))
        return state, (output, state.astype(dtype))

    state, (output, states) = lax.scan(step, r.start_state, r.tokens_alone.map_tokens(pieces), reverse=r.reverse)
    output = jnp.moveaxis(output, 0, 1).reshape(r.q.shape[0], whole, *output.shape[3:])
    states = jnp.moveaxis(states[::-1] if r.reverse else states, 0, 1)
    if whole < T:
        begin = 0 if r.reverse else whole
        tail = r.map_tokens(lambda x: lax.slice_in_dim(x, begin, begin + T - whole, axis=1))
        rest, state = solver(from_fresh_states(tail.replace(initial_state=state)))
        output = jnp.concatenate([rest, output] if r.reverse else [output, rest], axis=1)
    return RowStates(output, state, states)


def from_fresh_states(r: Recurrence) -> Recurrence:
    """Return r, the tokens of one piece, with resets at first tokens expressed by initial states.

    If the first token of a row that is not padding is a reset, the row's initial state becomes zeros and the reset is removed:
    `Segments` permit no reset there.
    """
    if r.segments is None:
        return r
    resets, is_token = r.segments.resets, r.segments.is_token
    used = jnp.ones(resets.shape, bool) if is_token is None else is_token
    first = used & (lax.cumsum(used.astype(jnp.int32), axis=1, reverse=r.reverse) == 1)
    fresh = (resets & first).any(1)
    state = jnp.where(fresh[:, None, None, None], 0, r.start_state)
    return r.replace(initial_state=state, segments=Segments(resets & ~first, is_token))


class Pieces(NamedTuple):
    """Hold the pieces of packed sequences, in scan order within each sequence. There are M = T // every + N; those from
    begin[-1] on are unused.

    rows: [M, every], the places in time of each piece's tokens. valid: false for places beyond the end of a sequence's last
    piece and for unused pieces. sequence: [M], the sequence of each piece. begin: [N + 1], the first piece of each sequence,
    and the end of the last.
    """

    rows: Int[Array, "M every"]
    valid: Bool[Array, "M every"]
    sequence: Int[Array, "M"]
    begin: Int[Array, "N+1"]

    @classmethod
    def of(cls, r: Recurrence, every: int) -> "Pieces":
        T, N = r.q.shape[1], r.num_sequences
        cuts = jnp.clip(r.boundaries, 0, T)
        begin = jnp.concatenate([jnp.zeros_like(cuts[:1]), jnp.cumsum(-(-jnp.diff(cuts) // every))]).astype(jnp.int32)
        piece = jnp.arange(T // every + N, dtype=jnp.int32)
        sequence = jnp.clip(jnp.searchsorted(begin, piece, side="right") - 1, 0, N - 1)
        low, high, offset = cuts[sequence], cuts[sequence + 1], (piece - begin[sequence]) * every
        first = jnp.maximum(high - offset - every, low) if r.reverse else low + offset
        last = high - offset if r.reverse else jnp.minimum(first + every, high)
        rows = first[:, None] + jnp.arange(every, dtype=cuts.dtype)[None]
        valid = (rows < last[:, None]) & (piece < begin[-1])[:, None]
        return cls(jnp.clip(rows, 0, T - 1), valid, sequence, begin)


def solve_packed(solver: Solver, r: Recurrence, every: int, dtype) -> OutputsWithStates:
    """Return the outputs and states of packed sequences, by a loop over the pieces of all sequences.

    Each step of the loop solves one piece, as a batch of one row of `every` tokens. dtype: of the stored states.
    """
    p, (N, *_), start = Pieces.of(r, every), r.state_shape, r.start_state
    if r.decay.constant is not None:  # rows of a piece that are not valid must not decay
        r = r.replace(decay=r.decay.with_tokens(r.by_token))

    def pieces(x: Float[Array, "1 T *rest"]) -> Float[Array, "M 1 every *rest"]:
        x = x[0][p.rows]
        return jnp.where(expanded(p.valid, x.ndim), x, 0)[:, None]

    def step(state, xs):
        piece, first, sequence = xs
        own = lax.dynamic_slice_in_dim(start, sequence, 1)
        scale = lax.dynamic_slice_in_dim(r.scale, sequence, 1)
        whole = r.replace(initial_state=jnp.where(first, own, state), scale=scale, boundaries=None)
        output, state = solver(piece.with_whole(whole))
        return state, (output[0], state[0])

    first = jnp.arange(len(p.sequence), dtype=jnp.int32) == p.begin[p.sequence]
    xs = (r.tokens_alone.map_tokens(pieces), first, p.sequence)
    _, (outputs, behind) = lax.scan(step, jnp.zeros_like(start[:1]), xs)

    lengths = jnp.diff(jnp.clip(r.boundaries, 0, r.q.shape[1]))
    final = jnp.where(expanded(lengths[:, None] > 0, 5)[:, 0], behind[jnp.clip(p.begin[1:] - 1, 0)], start)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths // every, dtype=jnp.int32)])
    index = jnp.arange(r.q.shape[1] // every, dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(offsets, index, side="right") - 1, 0, N - 1)
    states = behind[jnp.clip(p.begin[sequence] + index - offsets[sequence], 0, len(behind) - 1)].astype(dtype)
    states = jnp.where((index < offsets[-1])[:, None, None, None], states, 0)
    return OutputsWithStates(at_tokens(r, p, outputs, every), final, PackedStates(states, offsets))


def at_tokens(r: Recurrence, p: Pieces, outputs: Float[Array, "M every H V"], every: int) -> Float[Array, "1 T H V"]:
    """Return the outputs of the pieces at the places in time of their tokens, [1, T, H, V]; 0 in padding."""
    rows, own, cuts = jnp.arange(r.q.shape[1], dtype=jnp.int32), r.sequence_of, jnp.asarray(r.boundaries)
    begin, end = cuts[own], cuts[own + 1]
    piece = p.begin[own] + ((end - 1 - rows) if r.reverse else (rows - begin)) // every
    piece = jnp.clip(piece, 0, len(outputs) - 1)
    at = jnp.clip(rows - p.rows[piece, 0], 0, every - 1)
    return jnp.where(r.is_token[:, None, None], outputs[piece, at], 0)[None]
