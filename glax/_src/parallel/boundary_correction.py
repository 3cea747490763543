"""Correct a shard's outputs and gradients, computed from zero states, for the state that arrives at an edge.

A sequence that enters the shard with state P, or leaves it with Q = dL/dS, adds to token t

    o_t += scale * (q_t e^{G_t})^T P         dk_t += e^{G_t} Q v_t       dv_t += (k_t e^{G_t})^T Q

G_t is the sum of log decays from the edge through t. For Q, token t itself is excluded. Only the rows at the edge where e^{G_t}
is not 0 are read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.parallel.boundary import BoundaryRows, exp_both, scan_windows, times
from glax._src.parallel.exchange import Factors, apply_decay

einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def correct_output(
    rows: BoundaryRows, P: Float[Array, "E H K V"], output: Float[Array, "B T H V"]
) -> tuple[Array, Factors]:
    """Return the corrected output, and the decay through all rows of the crossing sequence."""
    r = rows.r
    scale = rows.edge.pick(r.scale, rows.packed)[:, None, None, None]

    def visit(window, _, G, logs, output):
        row_decay, column_decay = rows.decays(logs, inclusive=True)
        # [E, C, H, K]
        q = times(window.read(r.q) * scale, row_decay)
        return window.add(output, times(einsum("bchk,bhkv->bchv", q, apply_decay(P, *exp_both(G))), column_decay))

    _, passed, output = scan_windows(rows, visit, rows.aligned(output))
    return output, passed


def correct_gradient(
    rows: BoundaryRows, Q: Float[Array, "E H K V"], entered: Float[Array, "E H K V"], d: Recurrence
) -> tuple[Recurrence, Factors]:
    """Return d with the terms of Q = dL/dS at the edge, and the decay through all rows of the crossing sequence.

    entered: the state before that sequence's first row in this shard. The gradient of a log decay is <entered, dL/d entered>
    plus the sum of k_s * dk_s over the tokens s before it. The sum starts at the rows farthest from the edge, where the terms
    are smallest.
    """
    r, decay = rows.r, rows.r.decay
    visited, passed, before = sums_before_windows(rows)
    # [E, H, K, V]
    edge_terms = apply_decay(Q, *passed) * entered
    totals = sums_by_gate(decay, edge_terms)

    def step(window, G: Factors, carry):
        dk, dv, d_decay, totals = carry
        adjoint, logs = apply_decay(Q, *exp_both(G)), window.logs()
        row_decay, column_decay = rows.decays(logs, inclusive=False)
        # [E, C, H, K], [E, C, H, V]
        k, v = times(window.read(r.k), row_decay), times(window.read(r.v), column_decay)
        k_term, v_term = einsum("bchv,bhkv->bchk", v, adjoint), einsum("bchk,bhkv->bchv", k, adjoint)
        row_side = None if decay.form == "value" else k * k_term
        column_side = None if decay.value is None else v * v_term
        if row_side is not None and decay.key is None:
            row_side = row_side.sum(3, keepdims=True)
        sides = row_side, column_side
        # Tokens that come earlier in the recurrence are farther from the edge.
        d_key, d_value = (
            None if x is None else t[:, None] + rows.suffix(x) for x, t in zip(sides, totals, strict=True)
        )
        d_decay = Decay(
            head=None if d_decay.head is None else window.add(d_decay.head[..., None], d_key)[..., 0],
            key=None if d_decay.key is None else window.add(d_decay.key, d_key),
            value=None if d_decay.value is None else window.add(d_decay.value, d_value),
        )
        totals = tuple(None if x is None else t + x.sum(1) for x, t in zip(sides, totals, strict=True))
        return window.add(dk, times(k_term, row_decay)), window.add(dv, times(v_term, column_decay)), d_decay, totals

    def visit_next(j, carry):
        i = visited - 1 - j
        G = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), before)
        return step(rows.next_window(i), G, carry)

    carry = rows.aligned((d.k, d.v, d.decay, totals))
    carry = lax.fori_loop(0, visited, visit_next, carry) if rows.max_next_windows else carry
    dk, dv, d_decay, _ = step(rows.first_window, (None, None), carry)
    return d.replace(k=dk, v=dv, decay=d_decay), passed


def sums_by_gate(decay: Decay, terms: Float[Array, "E H K V"]) -> Factors:
    """Return the sums of terms over the elements of the state that share a gate: (for gates of its rows, for gates of its
    columns)."""
    of_rows = None
    if decay.key is not None:
        of_rows = terms.sum(3)
    elif decay.form != "value":
        of_rows = terms.sum((2, 3))[..., None]
    return of_rows, None if decay.value is None else terms.sum(2)


def sums_before_windows(rows: BoundaryRows) -> tuple[Int[Array, ""], Factors, Factors]:
    """Return the results of `scan_windows`, and the sums of log decays up to each window after the first.

    The sums are [windows, E, H, width], or None.
    """

    def visit(window, i, G, logs, saved):
        if i is None:
            return jax.tree.map(lambda x: jnp.zeros((rows.max_next_windows, *x.shape), x.dtype), G)
        return jax.tree.map(lambda x, now: lax.dynamic_update_index_in_dim(x, now, i, 0), saved, G)

    return scan_windows(rows, visit, None)
