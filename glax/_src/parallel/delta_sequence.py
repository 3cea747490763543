"""Solve the delta rule with T sharded over a mesh axis.

    S_out = M S_in C + S        M [K, K]: the product of (I - k e^T) diag(exp(rows)) over the tokens, C: the decay of columns

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
from glax._src.parallel.boundary import BoundaryRows
from glax._src.parallel.boundary_state import total_decay
from glax._src.parallel.exchange import Shard, exchange_states, of_sequences, shard_of
from glax._src.solve.autodiff import gradient, solve, solve_with_residuals
from glax._src.solve.dispatch import Choice
from glax._src.solve.partitioning import Axis


def transition(choice: Choice, r: Recurrence, shard: Shard) -> tuple[Float[Array, "E H K K"], Array | None]:
    """Return M and the decay of columns, [E, H, V] or None: the map of a state through the shard. The map is 0 unless one
    sequence spans it.

    r: the shard's rows with the boundaries of the whole problem.
    """
    B, T = r.q.shape[:2]
    H, K, packed = r.num_heads, r.q.shape[3], r.boundaries is not None

    def clear(x):
        """Return x, or zeros if the shard holds several sequences: its rows may then be padding with NaN, and its map is 0."""
        return None if x is None else jnp.where(shard.spans, x, 0)

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
        scale=jnp.ones(B, r.dtype),
        erasure=jax.tree.map(clear, erasure.replace(write=None)),
    )
    M = jnp.where(shard.spans, solve(choice, own).final_state, 0)
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
    own, residuals = r.replace(boundaries=shard.cuts, initial_state=begun), None
    left = jnp.where(shard.leave.crosses, shard.leave.pick(solve(choice, own).final_state, packed), 0)
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
    arrives."""
    (entered, residuals, (M, columns)), shard, packed = saved, shard_of(r, axis, n), r.boundaries is not None
    started = shard.enter.add(of_sequences(shard.begins, r.start_state), entered, packed)
    ended = of_sequences(shard.ends, d_final).astype(r.dtype)
    own = r.replace(initial_state=started, boundaries=shard.cuts)
    d_started = gradient(choice, own, d_output, ended, residuals).initial_state
    assert d_started is not None
    left = jnp.where(shard.enter.crosses, shard.enter.pick(d_started, packed), 0)
    returned = exchange_states(axis, n, not r.reverse, left, M.mT, columns)
    d = gradient(choice, own, d_output, shard.leave.add(ended, returned, packed), residuals)
    # `own` has an initial state even if none was given.
    given = r.initial_state
    d_initial = None if given is None else of_sequences(shard.begins, d.initial_state).astype(given.dtype)
    return d.replace(initial_state=d_initial)
