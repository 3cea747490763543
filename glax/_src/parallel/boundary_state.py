"""What a shard tells the others: the state that leaves it when nothing enters, and the decay through it.

    S = sum_t (k_t e^{G_t}) v_t^T + D S_0           G_t: the log decays behind token t, D: those through all rows

and against time, of dS = dL/dS with G_t through token t itself, that of scale * q and do. S_0 is what a sequence begins
(ends) with inside the shard. The walk goes from the edge where the state leaves inwards, and ends where decays are 0: so S
is at hand before the shard's outputs are, and does not wait for them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.parallel.boundary import Strip, Window, exps, inwards, times
from glax._src.parallel.exchange import through


def summary(
    strip: Strip,
    spans: Bool[Array, ""],
    begun: Float[Array, "N H K V"],
    a: Float[Array, "B T heads K"],
    b: Float[Array, "B T heads V"],
    adjoint: bool,
) -> tuple[Array, Array, Array | None]:
    """S [E, H, K, V], and D as factors of its rows [E, H, K or 1] and columns [E, H, V] or None; 0 unless `spans`.

    strip: from the edge where the state leaves. begun: S_0 of every sequence. a, b: k and v, or with `adjoint` q and do.
    """
    r, edge = strip.r, strip.edge
    # As in the kernels: bfloat16 is multiplied as it is, and summed in float32.
    product = dict(preferred_element_type=r.dtype, precision=lax.Precision.HIGHEST)
    narrow = r.q.dtype if r.q.dtype == jnp.bfloat16 else r.dtype

    def visit(window, _, G, logs, S):
        rows, columns = exps(*(strip.prefix(x, inclusive=adjoint) for x in logs))
        # [E, C, H, K], [E, C, H, V]
        x, y = times(window.read(a), rows).astype(narrow), times(window.read(b), columns).astype(narrow)
        return S + through(jnp.einsum("bchk,bchv->bhkv", x, y, **product), *exps(*G))

    _, passed, S = inwards(strip, visit, strip.aligned(jnp.zeros(strip.states, r.dtype)))
    if adjoint:
        S = S * edge.pick(r.scale, strip.packed)[:, None, None, None]
    S = S + through(edge.pick(begun, strip.packed), *passed)
    return jnp.where(edge.crosses, S, 0), *decay_of(strip, spans, passed)


def decay_of(strip: Strip, spans: Bool[Array, ""], passed: tuple[Array | None, Array | None]):
    rows, columns = passed
    rows = jnp.ones((*strip.states[:2], 1), strip.r.dtype) if rows is None else rows
    return jnp.where(spans, rows, 0), columns


def whole_decay(strip: Strip, spans: Bool[Array, ""]) -> tuple[Array, Array | None]:
    """D as `summary` has it, of all rows at once: a walk of as many steps as decays take has no gradient."""
    logs = Window(strip, 0, strip.r.q.shape[1]).logs()
    return decay_of(strip, spans, exps(*(None if x is None else x.sum(1) for x in logs)))
