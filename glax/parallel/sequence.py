"""One recurrence whose T is spread over a mesh axis: each shard solves its rows, and the states at the edges are exchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from glax.autodiff import gradient, solve
from glax.dispatch import Choice
from glax.parallel.correct import correct_gradient, correct_output
from glax.parallel.shard import arriving, shard_of, through
from glax.parallel.strip import Strip
from glax.parallel.summary import summary
from glax.recurrence import Outputs, Recurrence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def solve_sequence(choice: Choice, axis: str, n: int, r: Recurrence) -> Outputs:
    """The outputs of this shard's rows, and the final states of the sequences that end in it, zeros for the others.

    Called inside shard_map over `axis` of n shards, in the order of T. r holds the rows of this shard and, varying over
    the axis all the same, the states, boundaries and scales of all sequences.

        S_out = D S_in + S       S: what the shard ends in when nothing enters it; D: the decay through all its rows

    so it is enough to tell the others D and S, of one size whatever T is.
    """
    return forward(choice, axis, n, r)[0]


def corrects(r: Recurrence) -> bool:
    """Whether a shard solves its rows from zero while states are exchanged, and then adds what the arriving one does.

    That hides the exchange, and costs as many rows as the decays let through: few, where they depend on the data. Decays
    of the head alone seldom end within a shard; there a correction would cost more than the exchange takes, so the state
    is awaited, and the rows are solved from it.
    """
    return r.decay.by_token


def forward(choice: Choice, axis: str, n: int, r: Recurrence):
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    begun = where(shard.begins, r.start_state, 0)
    own = r.replace(boundaries=shard.cuts)
    leaving = Strip(r, shard.leave, from_low=r.reverse)
    told = summary(leaving, shard.spans, begun, r.k, r.v, adjoint=False)
    entered = arriving(axis, n, r.reverse, *told)
    if corrects(r):
        output, final = solve(choice, own.replace(initial_state=begun))
        output, passed = correct_output(Strip(r, shard.enter, from_low=not r.reverse), entered, output)
        final = shard.enter.add(final, through(entered, *passed), packed)
    else:
        output, final = solve(choice, own.replace(initial_state=shard.enter.add(begun, entered, packed)))
    return Outputs(output, where(shard.ends, final, 0)), entered


def where(of_sequence, states, otherwise):
    return jnp.where(of_sequence[:, None, None, None], states, otherwise)


def _forward(choice, axis, n, r):
    outputs, entered = forward(choice, axis, n, r)
    return outputs, (r, entered)


def _backward(choice, axis, n, residuals, cotangents):
    """The adjoint walk: dL/dS takes the way of the state backwards, and is told in the same way."""
    r, entered = residuals
    d_output, d_final = cotangents
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    started = shard.enter.add(where(shard.begins, r.start_state, 0), entered, packed)
    ended = where(shard.ends, d_final, 0).astype(r.dtype)
    own = r.replace(initial_state=started, boundaries=shard.cuts)
    leaving = Strip(r, shard.enter, from_low=not r.reverse)
    told = summary(leaving, shard.spans, ended, r.q, d_output, adjoint=True)
    returned = arriving(axis, n, not r.reverse, *told)
    if corrects(r):
        d = gradient(choice, own, d_output, ended)
        strip = Strip(r, shard.leave, from_low=r.reverse)
        d, passed = correct_gradient(strip, returned, shard.leave.pick(started, packed), d)
        d_initial = shard.leave.add(d.initial_state, through(returned, *passed), packed)
    else:
        d = gradient(choice, own, d_output, shard.leave.add(ended, returned, packed))
        d_initial = d.initial_state
    # started, which the gradient was taken in, is there even if no initial state is
    given = r.initial_state
    d_initial = None if given is None else where(shard.begins, d_initial, 0).astype(given.dtype)
    cuts = None if r.boundaries is None else np.zeros(r.boundaries.shape, jax.dtypes.float0)
    return (d.replace(initial_state=d_initial, boundaries=cuts),)


solve_sequence.defvjp(_forward, _backward)
