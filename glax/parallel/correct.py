"""What a shard owes to the state that arrives, added to what it computed without.

A sequence that enters the shard with state P, or leaves it where dL/dS is Q, adds to token t, G_t the sum of log decays from
the edge through t (of Q: behind t),

    o_t += scale * (q_t e^{G_t})^T P         dk_t += e^{G_t} Q v_t       dv_t += (k_t e^{G_t})^T Q

The walk goes from the edge inwards, in chunks, and stops where all decays have become 0 in float32: log-sigmoid gates do
after some 200 tokens, however long the shard.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glax.decay import Decay
from glax.parallel.shard import Edge, through
from glax.recurrence import Recurrence, aligned, fold_heads, spread_heads

CHUNK = 512  # rows
LONG_CHUNK = 4096  # where the decay does not depend on the data, and so seldom ends the walk
einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Strip:
    """The rows of a shard by their distance from one edge: the lowest row, or the highest."""

    r: Recurrence
    edge: Edge
    from_low: bool

    @property
    def packed(self) -> bool:
        return self.r.boundaries is not None

    @property
    def size(self) -> int:
        long = self.r.decay.form in ("none", "constant")
        return min(self.r.q.shape[1], LONG_CHUNK if long else CHUNK)

    @property
    def most(self) -> int:
        return -(-self.r.q.shape[1] // self.size)

    @property
    def count(self) -> Int[Array, ""]:
        """The chunks that hold rows of the crossing sequence."""
        return jnp.where(self.edge.crosses, -(-self.edge.rows // self.size), 0)

    def window(self, i) -> tuple[Int[Array, ""], Array]:
        """The first row of a window that holds chunk i, and which of its rows are the chunk's, [C, 1, 1]."""
        T, C = self.r.q.shape[1], self.size
        start = jnp.clip(i * C if self.from_low else T - (i + 1) * C, 0, T - C)
        row = start + jnp.arange(C, dtype=start.dtype)
        distance = row if self.from_low else T - 1 - row
        own = (distance >= i * C) & (distance < jnp.minimum((i + 1) * C, self.edge.rows))
        return start, own[:, None, None]

    def read(self, x: Float[Array, "B T heads D"], i) -> Float[Array, "B C H D"]:
        start, own = self.window(i)
        x = lax.dynamic_slice_in_dim(x, start, self.size, 1).astype(self.r.dtype)
        return spread_heads(jnp.where(own, x, 0), self.r.num_heads)

    def add(self, buffer: Float[Array, "B T heads D"], x: Float[Array, "B C H D"], i) -> Array:
        start, own = self.window(i)
        old = lax.dynamic_slice_in_dim(buffer, start, self.size, 1)
        new = (old.astype(self.r.dtype) + fold_heads(x, buffer.shape[2])).astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, jnp.where(own, new, old), start, 1)

    def logs(self, i) -> tuple[Array | None, Array | None]:
        """The log decays of the state's rows and columns in chunk i: [E, C, H, width or 1] or None."""
        decay = self.r.decay
        key, value = (None if x is None else self.read(x, i) for x in (decay.key, decay.value))
        if decay.head is not None:
            key = self.read(decay.head[..., None], i)
        if decay.constant is not None:
            key = self.edge.pick(decay.constant, self.packed).astype(self.r.dtype)[:, None, :, None]
            key = jnp.where(self.window(i)[1], key, 0)
        return key, value

    def prefix(self, x: Array | None, inclusive: bool) -> Array | None:
        """Sums from the edge through each row, or up to it. Never a difference: log decays may be -inf."""
        if x is None:
            return None
        total = lax.cumsum(x, axis=1, reverse=not self.from_low)
        return total if inclusive else shifted(total, 1 if self.from_low else -1)


def shifted(x: Array, by: int) -> Array:
    """x moved along axis 1 by one row, with zeros let in."""
    none = jnp.zeros_like(x[:, :1])
    return jnp.concatenate([none, x[:, :-1]] if by > 0 else [x[:, 1:], none], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reach:
    """alive: the number of chunks that a state at the edge acts on. logs[side][i]: the log decays between it and chunk i."""

    alive: Int[Array, ""]
    logs: tuple[Array | None, Array | None]

    def factors(self, i) -> tuple[Array | None, Array | None]:
        at = [None if x is None else lax.dynamic_index_in_dim(x, i, keepdims=False) for x in self.logs]
        return tuple(None if x is None else jnp.exp(x) for x in at)


def reach(strip: Strip) -> Reach:
    """By the gates alone, so that it need not wait for the other shards."""
    r, E = strip.r, 1 if strip.packed else strip.r.q.shape[0]
    H, K, V = r.state_shape[1:]
    form = r.decay.form
    widths = (
        0 if form in ("none", "value") else K if r.decay.key is not None else 1,
        V if r.decay.value is not None else 0,
    )
    logs = tuple(jnp.zeros((strip.most + 1, E, H, w), r.dtype) if w else None for w in widths)

    def lives(carry):
        i, logs = carry
        last = [None if x is None else jnp.exp(lax.dynamic_index_in_dim(x, i, keepdims=False)) for x in logs]
        return (i < strip.count) & functools.reduce(
            jnp.logical_and, [(x != 0).any() for x in last if x is not None], True
        )

    def step(carry):
        i, logs = carry
        totals = [None if x is None else x.sum(1) for x in strip.logs(i)]
        after = tuple(
            None if x is None else lax.dynamic_update_index_in_dim(
                x, lax.dynamic_index_in_dim(x, i, keepdims=False) + total, i + 1, 0
            )
            for x, total in zip(logs, totals, strict=True)
        )  # fmt: skip
        return i + 1, after

    if form == "none":
        return Reach(strip.count, (None, None))
    alive, logs = lax.while_loop(lives, step, aligned_with(strip, (jnp.zeros_like(strip.count), logs)))
    return Reach(alive, logs)


def passed(strip: Strip, found: Reach) -> tuple[Array | None, Array | None]:
    """The factors through all of the crossing sequence's rows: 0 where the walk stopped before their end."""
    whole = found.alive == strip.count
    return tuple(None if x is None else jnp.where(whole, x, 0) for x in found.factors(found.alive))


def aligned_with(strip: Strip, carry):
    """Inside shard_map, what a loop carries must vary over the mesh as much as all that goes into it."""
    return aligned((carry, strip.r.q, strip.edge))[0]


def correct_output(strip: Strip, found: Reach, P: Float[Array, "E H K V"], output: Float[Array, "B T H V"]) -> Array:
    r = strip.r
    scale = strip.edge.pick(r.scale, strip.packed)[:, None, None, None]

    def step(i, output):
        state = through(P, *found.factors(i))
        rows, columns = (strip.prefix(x, inclusive=True) for x in strip.logs(i))
        # [E, C, H, K]
        q = strip.read(r.q, i) * scale
        q = q if rows is None else q * jnp.exp(rows)
        o = einsum("bchk,bhkv->bchv", q, state)
        return strip.add(output, o if columns is None else o * jnp.exp(columns), i)

    return lax.fori_loop(0, found.alive, step, aligned_with(strip, output))


def correct_gradient(
    strip: Strip, found: Reach, Q: Float[Array, "E H K V"], entered: Float[Array, "E H K V"], d: Recurrence
) -> Recurrence:
    """d with what Q = dL/dS at the edge adds to it; `entered` is the state before the crossing sequence's first row here.

    A log decay's gradient is the sum of k_s * dk_s over the tokens s before it, from <entered, its gradient> on: summed from
    the far end of the walk, where the terms are smallest.
    """
    r, decay = strip.r, strip.r.decay
    on_rows, on_columns = decay.form not in ("none", "value"), decay.value is not None
    per_channel = decay.key is not None
    # [E, H, K, V]
    ever = through(Q, *passed(strip, found)) * entered
    totals = (
        (ever.sum(3) if per_channel else ever.sum((2, 3))[..., None]) if on_rows else None,
        ever.sum(2) if on_columns else None,
    )
    constant = None if decay.constant is None else jnp.zeros_like(totals[0][..., 0])

    def step(j, carry):
        i = found.alive - 1 - j
        dk, dv, d_decay, totals, constant = carry
        adjoint = through(Q, *found.factors(i))
        rows, columns = (None if x is None else jnp.exp(strip.prefix(x, inclusive=False)) for x in strip.logs(i))
        # [E, C, H, K], [E, C, H, V]
        k, v = strip.read(r.k, i), strip.read(r.v, i)
        k = k if rows is None else k * rows
        v = v if columns is None else v * columns
        k_term, v_term = einsum("bchv,bhkv->bchk", v, adjoint), einsum("bchk,bhkv->bchv", k, adjoint)

        sides = (k * k_term if on_rows else None, v * v_term if on_columns else None)
        sides = (sides[0] if per_channel or not on_rows else sides[0].sum(3, keepdims=True), sides[1])
        before = [  # the tokens earlier in the walk, which lie farther from the edge
            None if x is None else total[:, None] + shifted(
                lax.cumsum(x, axis=1, reverse=strip.from_low), -1 if strip.from_low else 1
            )
            for x, total in zip(sides, totals, strict=True)
        ]  # fmt: skip
        totals = tuple(None if x is None else t + x.sum(1) for x, t in zip(sides, totals, strict=True))
        dk = strip.add(dk, k_term if rows is None else k_term * rows, i)
        dv = strip.add(dv, v_term if columns is None else v_term * columns, i)
        if constant is not None:
            constant = constant + jnp.where(strip.window(i)[1], before[0], 0).sum(1)[..., 0]
        d_decay = Decay(
            None,
            None if d_decay.head is None else strip.add(d_decay.head[..., None], before[0], i)[..., 0],
            None if d_decay.key is None else strip.add(d_decay.key, before[0], i),
            None if d_decay.value is None else strip.add(d_decay.value, before[1], i),
        )
        return dk, dv, d_decay, totals, constant

    given = dataclasses.replace(d.decay, constant=None)
    carry = aligned_with(strip, (d.k, d.v, given, totals, constant))
    dk, dv, d_decay, _, constant = lax.fori_loop(0, found.alive, step, carry)
    if constant is not None:
        d_decay = dataclasses.replace(d_decay, constant=strip.edge.add(d.decay.constant, constant, strip.packed))
    return d.replace(k=dk, v=dv, decay=d_decay)
