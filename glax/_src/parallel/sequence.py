"""Solve a recurrence with T sharded over a mesh axis. Each shard solves its rows, and shards exchange the states at their
edges.

    S_out = D S_in + S       S: a shard's final state if none enters it, D: the decay through all its rows

A message consists of D and S, and its size does not depend on T. Both are computed before the shard's outputs. Every function
here runs inside shard_map over `axis` of n shards, in the order of T. r has the rows and segments of this shard, and the states,
boundaries and scales of all sequences; `shard_map` treats these as varying over the axis. No segment is padding.

**The delta rule** has a matrix in the place of D:

    S_out = M S_in C + S        C: the decay of columns

M [K, K] is the product over the tokens of D - b e^T D, where D is diag(exp(rows)) and b is k or `along`. With `before_decay` it
is the product of D - b e^T.

A shard sends M and S, which are K (K + V) numbers per head for any T, and in reverse time the adjoint of the map:

    dL/dS_in = M^T dL/dS_out C + dS

M is the final state of the shard's own recurrence from the identity with values of 0, so the kernels that solve the rows form
it. Each shard solves its rows twice: from zeros for the message, and from the state that arrives.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend
from glax._src.parallel.boundary import BoundaryRows, correct_gradient, correct_output, state_and_decay, total_decay
from glax._src.parallel.exchange import Message, Shard, apply_decay, exchange_states, of_sequences, shard_of
from glax._src.solve.autodiff import gradient, gradient_with_vjp, solve, solve_with_residuals, solve_with_vjp
from glax._src.solve.dispatch import (
    Choice,
    Resolution,
    begin,
    by_folding,
    finish,
    finish_with_residuals,
    resolve,
    runs_in_two_phases,
)
from glax._src.solve.isolation import if_finite, isolating
from glax._src.solve.partitioning import Axis


def transition(choice: Choice, r: Recurrence, shard: Shard) -> tuple[Float[Array, "E H K K"], Array | None]:
    """Return (M, the decay of columns [E, H, V] or None): the map of a state through the shard.

    M is [E, H, K, K]. Both are 0 unless one sequence spans the shard. r: the shard's rows with the boundaries of the whole
    problem.
    """
    B, T = r.q.shape[:2]
    H, K, packed = r.num_heads, r.q.shape[3], r.boundaries is not None

    def clear(x):
        """Return x, or zeros if the shard holds several sequences: its rows may then be padding with NaN, and its map is 0."""
        return None if x is None else of_sequences(shard.spans, x)

    decay, erasure = r.decay, r.erasing
    own = r.replace(
        q=jnp.zeros_like(r.k),
        k=clear(r.k),
        v=jnp.zeros((B, T, H, K), r.v.dtype),
        decay=Decay(
            None if decay.constant is None else shard.leave.pick(decay.constant, packed),
            clear(decay.head),
            clear(decay.key),
        ),
        initial_state=jnp.broadcast_to(jnp.eye(K, dtype=r.dtype), (B, H, K, K)),
        boundaries=None,
        segments=None,
        scale=jnp.ones(B, r.dtype),
        erasure=jax.tree.map(clear, erasure.replace(write=None)),
    )
    M = of_sequences(shard.spans, solve(choice, own).final_state)
    if decay.value is None:
        return M, None
    return M, total_decay(BoundaryRows(r, shard.leave, from_low=r.reverse), shard.spans)[1]


def solve_delta_rows(choice: Choice, axis: Axis, n: int, r: Recurrence, save_residuals: bool):
    """Solve the rows of one shard of the delta rule by `solve_twice`.

    Returns the outputs, and (the state that entered, the kernel's residuals or None, the map of `transition`).
    """
    return solve_twice(choice, axis, n, r, save_residuals, functools.partial(transition, choice, r))


def solve_twice(
    choice: Choice, axis: Axis, n: int, r: Recurrence, save_residuals: bool, map_of: Callable[[Shard], tuple]
):
    """Solve the rows of one shard twice: for the state that leaves it, and from the state that the other n - 1 shards along the
    mesh axis send.

    map_of: the map of a state through the shard, as factors of its rows and columns. Returns the outputs, and (the state that
    entered, the kernel's residuals or None, the map). The residuals are None unless `save_residuals`, and where the kernel has
    none.
    """
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    begun = of_sequences(shard.begins, r.start_state)
    own, residuals = shard.rows_of(r).replace(initial_state=begun), None
    left = of_sequences(shard.leave.crosses, shard.leave.pick(solve(choice, own).final_state, packed))
    through = map_of(shard)
    entered = exchange_states(axis, n, r.reverse, left, *through)
    own = own.replace(initial_state=shard.enter.add(begun, entered, packed))
    if save_residuals:
        (output, final), residuals = solve_with_residuals(choice, own)
    else:
        output, final = solve(choice, own)
    return Outputs(output, of_sequences(shard.ends, final)), (entered, residuals, through)


def gradient_of_delta_rows(choice: Choice, axis: Axis, n: int, r: Recurrence, d_output, d_final, saved) -> Recurrence:
    """Return the gradient of this shard's rows. It is computed twice: once for the message, and once from the dL/dS that
    arrives.

    d_output, d_final: the cotangents, of the shard's rows and of all final states. saved: the second result of
    `solve_delta_rows`.
    """
    (entered, residuals, (M, columns)), shard, packed = saved, shard_of(r, axis, n), r.boundaries is not None
    own, ended = entered_rows(r, shard, entered), of_sequences(shard.ends, d_final).astype(r.dtype)
    d_started = gradient(choice, own, d_output, ended, residuals).initial_state
    assert d_started is not None
    left = of_sequences(shard.enter.crosses, shard.enter.pick(d_started, packed))
    returned = exchange_states(axis, n, not r.reverse, left, M.mT, columns)
    d = gradient(choice, own, d_output, shard.leave.add(ended, returned, packed), residuals)
    return with_given_state(d, r, shard, d.initial_state)


def entered_rows(r: Recurrence, shard: Shard, entered: Array) -> Recurrence:
    """Return the recurrence of the shard's rows, with the arriving state `entered` as initial state of the sequence that
    enters."""
    begun = of_sequences(shard.begins, r.start_state)
    started = shard.enter.add(begun, entered, r.boundaries is not None)
    return shard.rows_of(r).replace(initial_state=started)


def with_given_state(d: Recurrence, r: Recurrence, shard: Shard, d_initial) -> Recurrence:
    """Return d, a gradient in the shard's rows, with d_initial as the gradient of the initial states.

    d_initial: [N, H, K, V], replaced by zeros for sequences that do not begin in the shard. None if r has no initial state.
    """
    given = r.initial_state
    return d.replace(initial_state=None if given is None else of_sequences(shard.begins, d_initial).astype(given.dtype))


def overlap_of(resolution: Resolution, r: Recurrence, gradient: bool) -> str:
    """Return how the state exchange overlaps with compute, "two_phase", "correct" or "wait", for r or if `gradient` for its
    gradient.

    "two_phase": the kernel's first phase computes the message, and its second phase takes the arriving state. The message
        needs no further reads of rows.
    "correct": a scan from the edge computes the message. The shard solves its rows from zero during the exchange, and then adds
        the terms of the arriving state. The scan reads rows until the decays underflow. These are few rows if decays depend on
        the data, else usually all rows.
    "wait": a scan from the edge computes the message. The shard then solves its rows from the arriving state. CPUs use this,
        because correcting takes longer there.
    """
    if runs_in_two_phases(resolution, r, gradient):
        return "two_phase"
    return "correct" if r.decay.by_token and Backend.here() is not Backend.CPU else "wait"


def outputs_of_rows(choice: Choice, axis: Axis, n: int, r: Recurrence) -> Outputs:
    """Return the outputs of `solve_rows`, and no residuals."""
    return solve_rows(choice, axis, n, r, save_residuals=False)[0]


def outputs_and_residuals_of_rows(choice: Choice, axis: Axis, n: int, r: Recurrence):
    """Return both results of `solve_rows`, with the kernel's residuals."""
    return solve_rows(choice, axis, n, r, save_residuals=True)


def solve_rows(choice: Choice, axis: Axis, n: int, r: Recurrence, save_residuals: bool):
    """Return the outputs, and (the state that entered, the kernel's residuals if `save_residuals`, else None).

    For the delta rule the pair has the shard's map as a third entry; see `solve_delta_rows`.
    """
    if r.erasure is not None:
        return solve_delta_rows(choice, axis, n, r, save_residuals)
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    begun = of_sequences(shard.begins, r.start_state)
    own, residuals = shard.rows_of(r).replace(initial_state=begun), None
    resolution = resolve(choice, own.folded)
    overlap = overlap_of(resolution, r.folded, gradient=False)
    mixes = shard.divides if overlap == "two_phase" else mixes_segments(resolution, own)

    def scanned_message() -> Message:
        rows = BoundaryRows(r, shard.leave, from_low=r.reverse)
        return state_and_decay(rows, shard.spans, shard.where_whole(begun), r.k, r.v, adjoint=False)

    if overlap == "two_phase":
        first, *local = begin(resolution, own.folded)
        message = shard.message(shard.leave, *local)
        message = if_finite(message, scanned_message) if mixes else message
    else:
        message = scanned_message()
    entered = exchange_states(axis, n, r.reverse, *message)
    if overlap == "correct":
        output, final = apart(axis, functools.partial(solve, choice), own, mixes)(own)
        output, passed = correct_output(BoundaryRows(r, shard.enter, from_low=not r.reverse), entered, output)
        final = shard.enter.add(final, shard.where_whole(apply_decay(entered, *passed)), packed)
    else:
        own = own.replace(initial_state=shard.enter.add(begun, entered, packed))
        if overlap == "two_phase":
            part = finish_with_residuals if save_residuals else finish
            run = functools.partial(part, resolution, begun=first)
        else:
            run = functools.partial(solve_with_residuals if save_residuals else solve, choice)
        found = apart(axis, run, own, mixes)(own)
        (output, final), residuals = found if save_residuals else (found, None)
    return Outputs(output, of_sequences(shard.ends, final)), (entered, residuals)


def mixes_segments(resolution: Resolution, own: Recurrence) -> bool:
    """Return whether NaN or inf can pass between the segments of the shard's rows in the kernels of `resolution`."""
    return own.segments is not None and resolution.mixes_segments(own)


def apart(axis: Axis, run: Callable, own: Recurrence, mixes: bool) -> Callable:
    """Return `run`, changed so that each sequence and segment of the shard's rows depends on its own rows alone.

    run: (own, *given) -> results, a kernel for a shard's rows. mixes: whether `run` lets NaN or inf pass from one sequence or
    segment to another. If a result in one shard is then not finite, all shards along `axis` are computed token by token. A
    number that overflows in one of them may only be large in another.
    """
    if not mixes:
        return run
    checked = isolating(run, own.segments, axis)
    return checked if own.segments is None else by_folding(checked)


def gradient_of_rows(choice: Choice, axis: Axis, n: int, r: Recurrence, d_output, d_final, saved) -> Recurrence:
    """Return the gradient of this shard's rows. dL/dS is exchanged as the state is, in the opposite direction.

    d_output, d_final: the cotangents, of the shard's rows and of all final states. saved: the second result of `solve_rows`.
    """
    if r.erasure is not None:
        return gradient_of_delta_rows(choice, axis, n, r, d_output, d_final, saved)
    (entered, residuals), shard, packed = saved, shard_of(r, axis, n), r.boundaries is not None
    own, ended = entered_rows(r, shard, entered), of_sequences(shard.ends, d_final).astype(r.dtype)
    resolution = resolve(choice, own.folded)
    overlap = overlap_of(resolution, r.folded, gradient=True)
    mixes = shard.divides if overlap == "two_phase" else mixes_segments(resolution, own)
    run, given = functools.partial(gradient, choice), [] if residuals is None else [residuals]

    def scanned_message() -> Message:
        rows = BoundaryRows(r, shard.enter, from_low=not r.reverse)
        return state_and_decay(rows, shard.spans, shard.where_whole(ended), r.q, d_output, adjoint=True)

    if overlap == "two_phase":
        first, *local = begin(resolution, own.folded, d_output, ended)
        message = shard.message(shard.enter, *local)
        message = if_finite(message, scanned_message) if mixes else message
        run = functools.partial(finish, resolution, begun=first)
    else:
        message = scanned_message()
    returned = exchange_states(axis, n, not r.reverse, *message)
    if overlap == "correct":
        d = apart(axis, run, own, mixes)(own, d_output, ended, *given)
        started, d_started = own.initial_state, d.initial_state
        assert started is not None and d_started is not None  # `own` has an initial state even if none was given
        rows = BoundaryRows(r, shard.leave, from_low=r.reverse)
        d, passed = correct_gradient(rows, returned, shard.where_whole(shard.leave.pick(started, packed)), d)
        d_initial = shard.leave.add(d_started, shard.where_whole(apply_decay(returned, *passed)), packed)
    else:
        d = apart(axis, run, own, mixes)(own, d_output, shard.leave.add(ended, returned, packed), *given)
        d_initial = d.initial_state
    return with_given_state(d, r, shard, d_initial)


def plain_gradient(choice: Choice, axis: Axis, n: int, r: Recurrence, d_output, d_final) -> Recurrence:
    """Return the gradient of `plain` for the cotangents d_output and d_final, by JAX. It has gradients of any order."""

    def outputs(rows: Recurrence) -> Outputs:
        return plain(choice, axis, n, rows.with_integers(r))

    _, pull = jax.vjp(outputs, r.floats)
    return pull(Outputs(d_output, d_final))[0]


def plain(choice: Choice, axis: Axis, n: int, r: Recurrence) -> Outputs:
    """Return the same outputs as `solve_rows`, by operations that have gradients of any order. Each shard solves its rows
    twice."""
    if r.erasure is not None:
        return solve_delta_rows(choice, axis, n, r, save_residuals=False)[0]

    def decay_of(shard: Shard):
        return total_decay(BoundaryRows(r, shard.leave, from_low=r.reverse), shard.spans)

    return solve_twice(choice, axis, n, r, False, decay_of)[0]


sequence_gradient = gradient_with_vjp(gradient_of_rows, plain_gradient, num_static=3)
# solve_sequence(choice, axis, n, r) returns the outputs of this shard's rows, and the final states of the sequences that end in
# it, with zeros for the others. It is differentiable any number of times. Its residuals are r, the state that entered, and the
# residuals of the kernel.
solve_sequence, _ = solve_with_vjp(outputs_of_rows, outputs_and_residuals_of_rows, sequence_gradient, num_static=3)
