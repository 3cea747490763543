"""What a shard owes to the state that arrives, added to what it computed without.

A sequence that enters the shard with state P, or leaves it where dL/dS is Q, adds to token t, G_t the sum of log decays from
the edge through t (of Q: behind t),

    o_t += scale * (q_t e^{G_t})^T P         dk_t += e^{G_t} Q v_t       dv_t += (k_t e^{G_t})^T Q

in the strip of rows at the edge where e^{G_t} is not 0.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.parallel.boundary import Strip, exps, inwards, times
from glax._src.parallel.exchange import through

einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
Factors = tuple[Array | None, Array | None]


def correct_output(strip: Strip, P: Float[Array, "E H K V"], output: Float[Array, "B T H V"]) -> tuple[Array, Factors]:
    """The output, and the decay through all of the crossing sequence's rows."""
    r = strip.r
    scale = strip.edge.pick(r.scale, strip.packed)[:, None, None, None]

    def visit(window, _, G, logs, output):
        rows, columns = exps(*(strip.prefix(x, inclusive=True) for x in logs))
        # [E, C, H, K]
        q = times(window.read(r.q) * scale, rows)
        return window.add(output, times(einsum("bchk,bhkv->bchv", q, through(P, *exps(*G))), columns))

    _, passed, output = inwards(strip, visit, strip.aligned(output))
    return output, passed


def correct_gradient(
    strip: Strip, Q: Float[Array, "E H K V"], entered: Float[Array, "E H K V"], d: Recurrence
) -> tuple[Recurrence, Factors]:
    """d with what Q = dL/dS at the edge adds to it, and the decay through all of the crossing sequence's rows.

    `entered` is the state before that sequence's first row here. A log decay's gradient is the sum of k_s * dk_s over the
    tokens s before it, from <entered, its gradient> on: summed from the far end of the walk, where the terms are smallest.
    """
    r, decay = strip.r, strip.r.decay
    on_rows, on_columns = decay.form != "value", decay.value is not None
    per_channel = decay.key is not None
    found, passed, before = reach(strip)
    # [E, H, K, V]
    ever = through(Q, *passed) * entered
    totals = (
        (ever.sum(3) if per_channel else ever.sum((2, 3))[..., None]) if on_rows else None,
        ever.sum(2) if on_columns else None,
    )

    def step(window, G: Factors, carry):
        dk, dv, d_decay, totals = carry
        adjoint, logs = through(Q, *exps(*G)), window.logs()
        rows, columns = exps(*(strip.prefix(x, inclusive=False) for x in logs))
        # [E, C, H, K], [E, C, H, V]
        k, v = times(window.read(r.k), rows), times(window.read(r.v), columns)
        k_term, v_term = einsum("bchv,bhkv->bchk", v, adjoint), einsum("bchk,bhkv->bchv", k, adjoint)
        sides = (k * k_term if on_rows else None, v * v_term if on_columns else None)
        sides = (sides[0] if per_channel or not on_rows else sides[0].sum(3, keepdims=True), sides[1])
        # The tokens earlier in the walk lie farther from the edge.
        d_rows, d_columns = (
            None if x is None else t[:, None] + strip.suffix(x) for x, t in zip(sides, totals, strict=True)
        )
        d_decay = Decay(
            head=None if d_decay.head is None else window.add(d_decay.head[..., None], d_rows)[..., 0],
            key=None if d_decay.key is None else window.add(d_decay.key, d_rows),
            value=None if d_decay.value is None else window.add(d_decay.value, d_columns),
        )
        totals = tuple(None if x is None else t + x.sum(1) for x, t in zip(sides, totals, strict=True))
        return window.add(dk, times(k_term, rows)), window.add(dv, times(v_term, columns)), d_decay, totals

    def beyond(j, carry):
        i = found - 1 - j
        G = tuple(None if x is None else lax.dynamic_index_in_dim(x, i, keepdims=False) for x in before)
        return step(strip.beyond(i), G, carry)

    carry = strip.aligned((d.k, d.v, d.decay, totals))
    carry = lax.fori_loop(0, found, beyond, carry) if strip.most else carry
    dk, dv, d_decay, _ = step(strip.near, (None, None), carry)
    return d.replace(k=dk, v=dv, decay=d_decay), passed


def reach(strip: Strip) -> tuple[Int[Array, ""], Factors, Factors]:
    """What `inwards` finds, and the sums of log decays up to each window beyond the first, [windows, E, H, width]."""

    def visit(window, i, G, logs, kept):
        if i is None:
            return tuple(None if x is None else jnp.zeros((strip.most, *x.shape), x.dtype) for x in G)
        return tuple(
            None if x is None else lax.dynamic_update_index_in_dim(x, now, i, 0) for x, now in zip(kept, G, strict=True)
        )

    return inwards(strip, visit, None)
