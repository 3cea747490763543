"""Compute tokens from a stored state and the tokens since it was written, which lie in a replay ring:

    S_t = e^{G_t} S_0 + sum_{i <= t} e^{G_t - G_i} k_i u_i^T        o_t = scale * S_t^T q_t

S_0 is the stored state, and G_t is the sum of the log decays since then. u_i is v_i, or under the delta rule what token i has
written, w_i * v_i - S_bar_i^T e_i. The ring thus holds u instead of v, e and w. With `Erasure.along` b there is a second term,
b_i y_i^T with y_i = -S_bar_i^T e_i.

Every exponent is a sum of the logs that it spans, and never a difference of longer sums, so the form is exact for all gates. The
state is read once for all tokens of a call.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.decay import Decay, promoted
from glax._src.core.recurrence import Recurrence, spread_heads
from glax._src.core.registry import Role
from glax._src.core.ring import Ring
from glax._src.core.segments import expanded
from glax._src.kernels.xla.chunk_math import state_decay
from glax._src.serving.decode_step import advance
from glax._src.serving.speculative import outputs_of
from glax._src.solve.autodiff import differentiable
from glax._src.solve.dispatch import Choice, pooled_kernel
from glax._src.solve.exclusive_read import bonus_term
from glax._src.solve.partitioning import is_spread_by_type


def state_after(S: Float[Array, "B H K V"], ring: Ring) -> Float[Array, "B H K V"]:
    """Return the states S after all tokens of the ring, in the dtype of S."""
    if ring.key.shape[1] == 0:
        return S
    last = jnp.array([ring.key.shape[1] - 1], jnp.int32)
    through, after = jax.tree.map(lambda x: x[:, 0], spans_of(ring.decay, last))
    added: Any = 0
    for k, u in ring.pairs(S.shape[1]):
        k, u = k * after.key_factor(), u * after.value_factor()
        added += jnp.einsum("bmhk,bmhv->bhkv", k, u, precision=lax.Precision.HIGHEST)
    decay = state_decay(
        None if through.head is None else through.head[..., None, None],
        None if through.key is None else through.key[..., :, None],
        None if through.value is None else through.value[..., None, :],
    )
    # S * rest is summed with the terms first: alone it may be less than half a digit of S.
    return S + added if decay is None else S * decay.base + (S * decay.rest + added)


class Spans(NamedTuple):
    """Hold sums of log decays up to each of T tokens, as exponents. A field is None if the decay has no such gate.

    The sums begin at the first token of the ring, [B, T, ...], or behind each of its M tokens, [B, T, M, ...]. head [..., H],
    key [..., H, K] and value [..., H, V] are the sums of the gates of these forms.
    """

    head: Array | None
    key: Array | None
    value: Array | None

    def key_factor(self) -> Array | float:
        """Return the decay of the state's rows, [..., H, K] or [..., H, 1], as a factor of keys; 1 without one."""
        log = self.key if self.head is None else self.head[..., None]
        return 1.0 if log is None else jnp.exp(log)

    def value_factor(self) -> Array | float:
        """Return the decay of the state's columns, [..., H, V], as a factor of values; 1 without one."""
        return 1.0 if self.value is None else jnp.exp(self.value)


def spans_of(decay: Decay, last: Int[Array, "T"]) -> tuple[Spans, Spans]:
    """Return two `Spans`, (through, after): sums of a ring's log decays g [B, M, ...] up to the tokens with the indices `last`.

    through [B, T, ...]        through[t] = sum_{m <= last[t]} g_m
    after [B, T, M, ...]       after[t, m] = sum_{m < j <= last[t]} g_j
    """

    def sums(log):
        if log is None:
            return None, None
        counts = jnp.arange(log.shape[1], dtype=jnp.int32)[None] <= last[:, None]  # [T, M]
        log = jnp.where(expanded(counts, log.ndim)[None], log[:, None], 0)
        sums = lax.cumsum(log, axis=2, reverse=True)
        return sums[:, :, 0], jnp.concatenate([sums[:, :, 1:], jnp.zeros_like(sums[:, :, :1])], 2)

    parts = [sums(log) for log in (decay.head, decay.key, decay.value)]
    return Spans(*(through for through, _ in parts)), Spans(*(after for _, after in parts))


class PartialRead(NamedTuple):
    """Hold what T query or erase vectors read of a state, before the values of the ring's M tokens are known.

    base: what they read of S_0, [B, T, H, V]. weights: the factor with which each vector reads the value of each token,
    [B, T, M, H], one array for each of `Ring.pairs`. value_factors: the decays of these values, [B, T, M, H, V]; None for 1.
    """

    base: Array
    weights: list[Array]
    value_factors: Array | None

    def with_values(self, values: list[Array]) -> Float[Array, "B H V"]:
        """Return what one vector reads, base + sum_m weights_m values_m, [B, H, V].

        values: [B, M, H, V], one array for each of `Ring.pairs`. This PartialRead is of one token: its fields have no axis T.
        """
        found = self.base
        for weight, u in zip(self.weights, values, strict=True):
            found += (weight[..., None] * (u if self.value_factors is None else u * self.value_factors)).sum(1)
        return found


def partial_read(
    S: Float[Array, "B H K V"] | None,
    ring: Ring,
    x: Float[Array, "B T H K"],
    last_term: Int[Array, "T"],
    last_decay: Int[Array, "T"],
) -> PartialRead:
    """Return what each vector x[t] reads of a state, as a `PartialRead`.

    The state is S with the terms of the ring's tokens up to index last_term[t], decayed through token last_decay[t]. S: the
    stored states; if None, `base` is empty, and the caller sets it.
    """
    through, after = spans_of(ring.decay, last_decay)
    base = jnp.zeros(0, x.dtype)
    if S is not None:
        base = jnp.einsum("bthk,bhkv->bthv", x * through.key_factor(), S, precision=lax.Precision.HIGHEST)
        base = base * through.value_factor()
    counts = jnp.arange(ring.key.shape[1], dtype=jnp.int32)[None] <= last_term[:, None]
    weights = []
    for k, _ in ring.pairs(x.shape[2]):
        weight = (x[:, :, None] * (k[:, None] * after.key_factor())).sum(-1)
        weights.append(jnp.where(counts[None, :, :, None], weight, 0))
    return PartialRead(base, weights, None if after.value is None else jnp.exp(after.value))


class InPool(NamedTuple):
    """Name states that kernels read or write in the pool itself: the pool, and the slot of each row of a call, P for no
    slot."""

    states: Float[Array, "P H K V"]
    slots: Int[Array, "B"]

    def read(self, ring: Ring, x: Float[Array, "B R H K"], decay: Decay) -> Float[Array, "B R H V"]:
        """Return what each of the R vectors of x reads of the state after the ring's tokens.

        decay: log decays of the vectors, [B, R, ...]. One decays the state before its vector reads, and for the vectors behind
        it, too.
        """
        r = recurrence_of(ring, x, decay, self.states)
        return outputs_of(Choice(), differentiable(r), self.slots)[:, -x.shape[1] :]

    def advanced(self, ring: Ring, full: Bool[Array, "B"], read: Array | None = None) -> Float[Array, "P H K V"]:
        """Return the pool with the states of some slots advanced by the tokens of the ring.

        full: which rows of the call are advanced, in the slots that `slots` names; the others do not change. read: what was
        read of the pool before, or None. The result then depends on `read`, so that XLA need not copy the pool.
        """
        slots, r = jnp.where(full, self.slots, len(self.states)), recurrence_of(ring, None, None, self.states)
        if read is not None:  # XLA does not drop a product by 0, which is NaN for some numbers
            r = r.replace(q=jnp.broadcast_to(0 * read.sum().astype(r.q.dtype), r.q.shape))
        return advance(Choice(), differentiable(r), slots).final_state

    @classmethod
    def for_writes(cls, states: Any, slots: Int[Array, "B"], ring: Ring) -> "InPool | None":
        """Return (states, slots) as `InPool` if a kernel can advance these states in the pool by the tokens of the ring; else
        None."""
        if not isinstance(states, jax.Array) or 0 in (*states.shape, *ring.key.shape):
            return None
        r = recurrence_of(ring, None, None, states)
        return None if pooled_kernel(Choice(), r, Role.STEP) is None else cls(states, slots)

    @classmethod
    def for_reads(cls, states: Any, slots: Int[Array, "B"], old: Ring, r: Recurrence) -> "InPool | None":
        """Return (states, slots) as `InPool` if a kernel can read these states in the pool, together with the ring `old`, for
        the tokens of r; else None.

        On explicit axes the result is None: the vectors may be sharded in several ways, which one call of a kernel cannot have.
        """
        if not isinstance(states, jax.Array) or 0 in (*states.shape, *r.q.shape) or is_spread_by_type(states):
            return None
        new = new_tokens(r, r.dtype)
        x = jnp.zeros((*r.q.shape[:2], r.num_heads, r.q.shape[3]), r.dtype)
        decay = new.decay
        if r.erasure is not None:
            x, decay = twice(x), jax.tree.map(twice, decay)
        reads = recurrence_of(old.cleared_as(new, jnp.zeros_like(slots)), x, decay, states)
        return None if pooled_kernel(Choice(), reads, Role.VERIFY) is None else cls(states, slots)


def twice(x: Array) -> Array:
    """Return x [B, T, ...] followed by x along the axis of tokens, [B, 2 T, ...]."""
    return jnp.concatenate([x, x], 1)


def recurrence_of(ring: Ring, x, decay: Decay | None, states) -> Recurrence:
    """Return the recurrence of the ring's tokens, followed by R tokens that only read. Its initial states are a pool, [P, H, K,
    V].

    x: [B, R, H, K], the queries of these R tokens. decay: their log decays. R is 0 if both are None.
    """
    H = states.shape[1]
    pairs, logs = ring.pairs(H), ring.decay
    if len(pairs) == 2:  # two tokens for each of the ring, one for each term; the second does not decay

        def interleaved(x, y):
            return jnp.stack([x, y], 2).reshape(x.shape[0], -1, *x.shape[2:])

        k, v = (interleaved(*each) for each in zip(*pairs, strict=True))
        logs = jax.tree.map(lambda x: interleaved(x, jnp.zeros_like(x)), logs)
    else:
        k, v = ring.key, ring.value
    q = spread_heads(k, H)  # its outputs are dropped; it gives the recurrence the heads of the states
    if x is not None:
        B, R = x.shape[:2]
        q = jnp.concatenate([jnp.zeros((*k.shape[:2], *x.shape[2:]), x.dtype), x], 1)
        k, v = (jnp.concatenate([y, jnp.zeros((B, R, *y.shape[2:]), y.dtype)], 1) for y in (k, v))
        logs = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), logs, decay)
    return Recurrence(q, k, v, logs, states, None, jnp.ones(len(k), k.dtype))


def new_tokens(r: Recurrence, dtype) -> Ring:
    """Return the tokens of r as a `Ring` in `dtype`. Under the delta rule its `value` and `erased` are zeros, because what
    tokens write is not known yet; `replay` sets them."""
    B, T, H = (*r.q.shape[:2], r.num_heads)

    def wide(x):
        return None if x is None else x.astype(dtype)

    decay = r.decay.with_tokens(lambda x: jnp.broadcast_to(x[:, None], (B, T, H)))
    value, along, erased = r.v, None, None
    if r.erasure is not None:
        value, along = jnp.zeros((B, T, H, r.v.shape[3]), dtype), wide(r.erasure.along)
        erased = None if along is None else jnp.zeros_like(value)
    return Ring(r.k.astype(dtype), value.astype(dtype), jax.tree.map(wide, decay), along, erased)


def replay(S: Float[Array, "B H K V"] | InPool, old: Ring, length: Int[Array, "B"], r: Recurrence, bonus=None):
    """Return the outputs of r's tokens [B, T, H, V]; a Ring of these tokens; and a Ring of the tokens of `old` and these.

    S: the stored states of B sequences. old: the tokens since S was written, the first `length` of each row. bonus: as in
    `recurrent_step`, with T = 1; the output then reads the state before the token.
    """
    dtype = r.dtype if isinstance(S, InPool) else promoted(r.dtype, S.dtype)
    H, T = r.num_heads, r.q.shape[1]
    new = new_tokens(r, dtype)
    old_and_new = old.followed_by(new, length)
    # A kernel that reads states in the pool reads the old tokens with them. Only the new ones are then summed here.
    ring = new if isinstance(S, InPool) else old_and_new
    C = ring.key.shape[1] - T
    at = C + jnp.arange(T, dtype=jnp.int32)
    states = None if isinstance(S, InPool) else S.astype(dtype)
    before = at - int(bonus is not None)
    q = spread_heads(r.q.astype(dtype) * r.scale.astype(dtype)[:, None, None, None], H)
    vectors, reads = [q], [partial_read(states, ring, q, before, before)]
    written = spread_heads(r.v.astype(dtype), H)
    if r.erasure is not None:
        erasure = jax.tree.map(lambda x: x.astype(dtype), r.erasure)
        erasure = erasure.replace(beta=None if erasure.beta is None else erasure.beta[..., None])
        e, w = erasure.vectors(spread_heads(new.key, H))
        written = written if w is None else w * written
        vectors, reads = [e, q], [partial_read(states, ring, e, at - 1, at - int(erasure.before_decay)), *reads]
    if isinstance(S, InPool):
        decays = place_of_decay(r, bonus)
        bases = S.read(old.cleared_as(new, length), joined(vectors), jax.tree.map(decays, new.decay))
        bases = bases.reshape(*bases.shape[:1], T, len(vectors), *bases.shape[2:])
        reads = [each._replace(base=bases[:, :, i]) for i, each in enumerate(reads)]
    # Each token's terms are set at its turn. Those of later tokens are still zeros, so that it reads nothing of them.
    values = [u.at[:, C:].set(0) for _, u in ring.pairs(H)]

    def token(values, row):
        place, u, reads = row
        if r.erasure is None:
            terms = [u]
        else:
            erased = reads[0].with_values(values)
            terms = [u - erased] if r.erasure.along is None else [u, -erased]
        values = [x.at[:, place].set(term) for x, term in zip(values, terms, strict=True)]
        return values, reads[-1].with_values(values)

    values, output = lax.scan(token, values, (at, *jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (written, reads))))
    output = jnp.moveaxis(output, 0, 1)
    if bonus is not None:
        output += bonus_term(r, bonus).astype(dtype)
    if r.erasure is not None:
        u, *y = (x[:, C:] for x in values)
        new = dataclasses.replace(new, value=u, erased=y[0] if y else None)
        old_and_new = old.followed_by(new, length)
    return output.astype(r.q.dtype), new, old_and_new


def joined(vectors: list[Array]) -> Float[Array, "B R H K"]:
    """Return n vectors [B, T, H, K] of each token as [B, T n, H, K], one token after another."""
    x = jnp.stack(vectors, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def place_of_decay(r: Recurrence, bonus):
    """Return a function from the log decays of tokens, [B, T, ...], to the log decays of their reads, [B, R, ...].

    The reads are in the order of `joined`: R = 2 T under the delta rule, with a token's erase vector before its query, else
    R = T. The first read of a token that follows its decay gets the token's log decay. Its other reads get zeros. With a bonus
    the one token reads before its decay, so all are zeros.
    """
    if bonus is not None:  # the one token reads before its decay
        return jnp.zeros_like

    def place(log):
        if r.erasure is None:
            return log
        none = jnp.zeros_like(log)
        return joined([none, log] if r.erasure.before_decay else [log, none])

    return place
