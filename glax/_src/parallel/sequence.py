"""One recurrence whose T is spread over a mesh axis: each shard solves its rows, and the states at the edges are exchanged.

    S_out = D S_in + S       S: what the shard ends in when nothing enters it; D: the decay through all its rows

so it is enough to tell the others D and S, of one size whatever T is. Both are at hand before the shard's outputs are. Every
function here is called inside shard_map over `axis` of n shards, in the order of T; r holds the rows of this shard and,
varying over the axis all the same, the states, boundaries and scales of all sequences.
"""

import jax
import jax.numpy as jnp

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend
from glax._src.parallel.boundary import Strip
from glax._src.parallel.boundary_correction import correct_gradient, correct_output
from glax._src.parallel.boundary_state import summary, whole_decay
from glax._src.parallel.exchange import arriving, shard_of, through
from glax._src.solve.autodiff import gradient, gradient_with_vjp, solve, solve_with_residuals, solve_with_vjp
from glax._src.solve.dispatch import (
    Choice,
    Resolution,
    begin,
    finish,
    finish_with_residuals,
    resolve,
    runs_in_two_phases,
)


def way_of(resolution: Resolution, r: Recurrence, gradient: bool) -> str:
    """How a shard learns what it tells the others, and what it does meanwhile.

    "parts": the kernel's first part tells it, the second takes the state that arrives: no row is read for it.
    "correct": a walk from the edge tells it; the shard solves its rows from zero while states are exchanged, and adds what
        the arriving one does: as many rows as the decays let through, few where they depend on the data, else mostly all.
    "wait": that walk; the shard then solves its rows from the arriving state. CPUs take longer to correct.
    """
    if runs_in_two_phases(resolution, r, gradient):
        return "parts"
    return "correct" if r.decay.by_token and Backend.here() is not Backend.CPU else "wait"


def outputs_of_rows(choice: Choice, axis: str, n: int, r: Recurrence) -> Outputs:
    return solve_rows(choice, axis, n, r, keep=False)[0]


def outputs_and_residuals_of_rows(choice: Choice, axis: str, n: int, r: Recurrence):
    return solve_rows(choice, axis, n, r, keep=True)


def solve_rows(choice: Choice, axis: str, n: int, r: Recurrence, keep: bool):
    """The outputs, with the state that entered and, with `keep`, what the kernel leaves for its gradient, else None."""
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    begun = where(shard.begins, r.start_state, 0)
    own, residuals = r.replace(boundaries=shard.cuts), None
    resolution = resolve(choice, own.replace(initial_state=begun))
    way = way_of(resolution, r, gradient=False)
    if way == "parts":
        first, *reached = begin(resolution, own.replace(initial_state=begun))
        told = shard.told(shard.leave, *reached)
    else:
        leaving = Strip(r, shard.leave, from_low=r.reverse)
        told = summary(leaving, shard.spans, begun, r.k, r.v, adjoint=False)
    entered = arriving(axis, n, r.reverse, *told)
    if way == "correct":
        output, final = solve(choice, own.replace(initial_state=begun))
        output, passed = correct_output(Strip(r, shard.enter, from_low=not r.reverse), entered, output)
        final = shard.enter.add(final, through(entered, *passed), packed)
    else:
        own = own.replace(initial_state=shard.enter.add(begun, entered, packed))
        if way == "parts" and keep:
            (output, final), residuals = finish_with_residuals(resolution, own, first)
        elif way == "parts":
            output, final = finish(resolution, own, begun=first)
        elif keep:
            (output, final), residuals = solve_with_residuals(choice, own)
        else:
            output, final = solve(choice, own)
    return Outputs(output, where(shard.ends, final, 0)), (entered, residuals)


def where(of_sequence, states, otherwise):
    return jnp.where(of_sequence[:, None, None, None], states, otherwise)


def gradient_of_rows(choice: Choice, axis: str, n: int, r: Recurrence, d_output, d_final, saved) -> Recurrence:
    """The adjoint walk: dL/dS takes the way of the state backwards, and is told in the same way."""
    (entered, residuals), shard, packed = saved, shard_of(r, axis, n), r.boundaries is not None
    started = shard.enter.add(where(shard.begins, r.start_state, 0), entered, packed)
    ended = where(shard.ends, d_final, 0).astype(r.dtype)
    own = r.replace(initial_state=started, boundaries=shard.cuts)
    resolution = resolve(choice, own)
    way = way_of(resolution, r, gradient=True)
    if way == "parts":
        first, *reached = begin(resolution, own, d_output, ended)
        told = shard.told(shard.enter, *reached)
    else:
        leaving = Strip(r, shard.enter, from_low=not r.reverse)
        told = summary(leaving, shard.spans, ended, r.q, d_output, adjoint=True)
    returned = arriving(axis, n, not r.reverse, *told)
    if way == "correct":
        d = gradient(choice, own, d_output, ended, residuals)
        strip = Strip(r, shard.leave, from_low=r.reverse)
        d, passed = correct_gradient(strip, returned, shard.leave.pick(started, packed), d)
        d_initial = shard.leave.add(d.initial_state, through(returned, *passed), packed)
    else:
        ended = shard.leave.add(ended, returned, packed)
        if way == "parts":
            d = finish(resolution, own, d_output, ended, *([] if residuals is None else [residuals]), begun=first)
        else:
            d = gradient(choice, own, d_output, ended, residuals)
        d_initial = d.initial_state
    # `own` has an initial state even if none was given.
    given = r.initial_state
    return d.replace(initial_state=None if given is None else where(shard.begins, d_initial, 0).astype(given.dtype))


def plain_gradient(choice: Choice, axis: str, n: int, r: Recurrence, d_output, d_final) -> Recurrence:
    """The gradient of `plain`, which has gradients of any order."""

    def outputs(rows: Recurrence) -> Outputs:
        return plain(choice, axis, n, rows.replace(boundaries=r.boundaries))

    _, pull = jax.vjp(outputs, r.replace(boundaries=None))
    return pull(Outputs(d_output, d_final))[0]


def plain(choice: Choice, axis: str, n: int, r: Recurrence) -> Outputs:
    """The same in operations that have gradients of any order, each shard's rows walked twice."""
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    begun = where(shard.begins, r.start_state, 0)
    own = r.replace(boundaries=shard.cuts, initial_state=begun)
    left = jnp.where(shard.leave.crosses, shard.leave.pick(solve(choice, own).final_state, packed), 0)
    entered = arriving(axis, n, r.reverse, left, *whole_decay(Strip(r, shard.leave, from_low=r.reverse), shard.spans))
    started = shard.enter.add(begun, entered, packed)
    output, final = solve(choice, own.replace(initial_state=started))
    return Outputs(output, where(shard.ends, final, 0))


sequence_gradient = gradient_with_vjp(gradient_of_rows, plain_gradient, num_static=3)
# solve_sequence(choice, axis, n, r): the outputs of this shard's rows, and the final states of the sequences that end in it,
# zeros for the others. Differentiable any number of times; its residuals are r, the state that entered, and the kernel's.
solve_sequence, _ = solve_with_vjp(outputs_of_rows, outputs_and_residuals_of_rows, sequence_gradient, num_static=3)
