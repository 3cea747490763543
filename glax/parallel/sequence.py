"""One recurrence whose T is spread over a mesh axis: each shard solves its rows, and the states at the edges are exchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from glax.autodiff import gradient, solve
from glax.dispatch import Choice
from glax.parallel.correct import Strip, correct_gradient, correct_output, passed, reach
from glax.parallel.shard import Shard, arriving, shard_of, through
from glax.recurrence import Outputs, Recurrence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def solve_sequence(choice: Choice, axis: str, n: int, r: Recurrence) -> Outputs:
    """The outputs of this shard's rows, and the final states of the sequences that end in it, zeros for the others.

    Called inside shard_map over `axis` of n shards, in the order of T. r holds the rows of this shard and, varying over
    the axis all the same, the states, boundaries and scales of all sequences.

        S_out = D S_in + S       S: what the shard ends in when nothing enters it; D: the decay through all its rows

    so it is enough to tell the others D and S, of one size whatever T is. Then o_t += (what S_in adds to it).
    """
    return forward(choice, axis, n, r)[0]


def forward(choice: Choice, axis: str, n: int, r: Recurrence):
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    strip = Strip(r, shard.enter, from_low=not r.reverse)
    found = reach(strip)
    own = r.replace(initial_state=where(shard.begins, r.start_state, 0), boundaries=shard.cuts)
    output, final = solve(choice, own)
    left = jnp.where(shard.leave.crosses, shard.leave.pick(final, packed), 0)
    entered = arriving(axis, n, r.reverse, left, *summary(shard, strip, found))
    output = correct_output(strip, found, entered, output)
    final = shard.enter.add(final, through(entered, *passed(strip, found)), packed)
    return Outputs(output, where(shard.ends, final, 0)), entered


def summary(shard: Shard, strip: Strip, found):
    """The decay through the shard, of rows [E, H, K or 1] and columns: 0 if what enters it is not what leaves it."""
    rows, columns = passed(strip, found)
    E, H = 1 if strip.packed else strip.r.q.shape[0], strip.r.num_heads
    rows = jnp.ones((E, H, 1), strip.r.dtype) if rows is None else rows
    return jnp.where(shard.spans, rows, 0), columns


def where(of_sequence, states, otherwise):
    return jnp.where(of_sequence[:, None, None, None], states, otherwise)


def _forward(choice, axis, n, r):
    outputs, entered = forward(choice, axis, n, r)
    return outputs, (r, entered)


def _backward(choice, axis, n, residuals, cotangents):
    """The adjoint walk: each shard's gradient as if nothing came back to it, then what does."""
    r, entered = residuals
    d_output, d_final = cotangents
    shard, packed = shard_of(r, axis, n), r.boundaries is not None
    strip = Strip(r, shard.leave, from_low=r.reverse)
    found = reach(strip)
    begun = where(shard.begins, r.start_state, 0)
    started = shard.enter.add(begun, entered, packed)
    own = r.replace(initial_state=started, boundaries=shard.cuts)
    d = gradient(choice, own, d_output, where(shard.ends, d_final, 0).astype(r.dtype))

    sent = jnp.where(shard.enter.crosses, shard.enter.pick(d.initial_state, packed), 0)
    returned = arriving(axis, n, not r.reverse, sent, *summary(shard, strip, found))
    d = correct_gradient(strip, found, returned, shard.leave.pick(started, packed), d)
    d_initial = None
    if r.initial_state is not None:
        d_initial = shard.leave.add(d.initial_state, through(returned, *passed(strip, found)), packed)
        d_initial = where(shard.begins, d_initial, 0).astype(r.initial_state.dtype)
    cuts = None if r.boundaries is None else np.zeros(r.boundaries.shape, jax.dtypes.float0)
    return (d.replace(initial_state=d_initial, boundaries=cuts),)


solve_sequence.defvjp(_forward, _backward)
