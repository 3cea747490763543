"""Compute the message of a shard to the others: the state that leaves if none enters, and the decay through the shard's rows.

    S = sum_t (k_t e^{G_t}) v_t^T + D S_0           G_t: the log decays after token t, D: the decay through all rows

The message in reverse time has dS = dL/dS, with scale * q and do in place of k and v, and its G_t includes token t. S_0 is the
state with which a sequence begins (or ends) inside the shard. Rows are read from the edge where the state leaves, until all
decays are 0. S therefore does not depend on the shard's outputs, and is sent while these are computed.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.parallel.boundary import BoundaryRows, Window, exp_both, scan_windows, times
from glax._src.parallel.exchange import Factors, apply_decay


def state_and_decay(
    rows: BoundaryRows,
    spans: Bool[Array, ""],
    begun: Float[Array, "N H K V"],
    a: Float[Array, "B T _ K"],
    b: Float[Array, "B T _ V"],
    adjoint: bool,
) -> tuple[Array, Array, Array | None]:
    """Return S [E, H, K, V], and D as factors of its rows [E, H, K or 1] and columns [E, H, V] or None.

    D is 0 unless `spans`. rows: ordered from the edge where the state leaves. begun: S_0 of every sequence. a, b: k and v, or q
    and do if `adjoint`.
    """
    r, edge = rows.r, rows.edge
    # As in the kernels, bfloat16 operands are multiplied as they are and summed in float32.
    product = functools.partial(jnp.einsum, preferred_element_type=r.dtype, precision=lax.Precision.HIGHEST)
    narrow = r.q.dtype if r.q.dtype == jnp.bfloat16 else r.dtype

    def visit(window, _, G, logs, S):
        row_decay, column_decay = rows.decays(logs, inclusive=adjoint)
        # [E, C, H, K], [E, C, H, V]
        x, y = times(window.read(a), row_decay).astype(narrow), times(window.read(b), column_decay).astype(narrow)
        return S + apply_decay(product("bchk,bchv->bhkv", x, y), *exp_both(G))

    _, passed, S = scan_windows(rows, visit, rows.aligned(jnp.zeros(rows.state_shape, r.dtype)))
    if adjoint:
        S = S * edge.pick(r.scale, rows.packed)[:, None, None, None]
    S = S + apply_decay(edge.pick(begun, rows.packed), *passed)
    return jnp.where(edge.crosses, S, 0), *decay_of(rows, spans, passed)


def decay_of(rows: BoundaryRows, spans: Bool[Array, ""], passed: Factors) -> tuple[Array, Array | None]:
    """Return the decay through the shard as factors of the state's rows and columns, 0 unless `spans`."""
    row_decay, column_decay = passed
    row_decay = jnp.ones((*rows.state_shape[:2], 1), rows.r.dtype) if row_decay is None else row_decay
    return jnp.where(spans, row_decay, 0), column_decay


def total_decay(rows: BoundaryRows, spans: Bool[Array, ""]) -> tuple[Array, Array | None]:
    """Return D of `state_and_decay` from all rows together, for differentiation: a loop whose number of steps depends on data
    has no gradient."""
    logs = Window(rows, 0, rows.r.q.shape[1]).logs()
    row_log, column_log = (None if x is None else x.sum(1) for x in logs)
    return decay_of(rows, spans, exp_both((row_log, column_log)))
