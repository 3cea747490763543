"""Compute the delta rule token by token, by `lax.scan` over T, and its gradient:

    S_bar_t = exp(rows_t) S_{t-1} exp(columns_t)        S: [B, H, K, V]
    u_t     = w_t * v_t - S_bar_t^T e_t                 u: [B, H, V], what is written
    S_t     = S_bar_t + k_t u_t^T
    o_t     = scale * S_t^T q_t                         o: [B, H, V]

G_t = dL/dS_t includes scale q_t do_t^T. The gradient is a reverse scan:

    dq_t = scale S_t do_t       du_t = G_t^T k_t        dv_t = w_t * du_t       dw_t = v_t * du_t
    dk_t = G_t u_t              de_t = -S_bar_t du_t    dS_bar_t = G_t - e_t du_t^T
    d log decay_t = dS_bar_t * S_bar_t                  dL/dS_{t-1} = exp(rows_t) dS_bar_t exp(columns_t)

Where the erasure reads before the decay (`Erasure.before_decay`), S_{t-1} stands for S_bar_t in u_t and in de_t, and -e_t du_t^T
is a term of dL/dS_{t-1} instead of one of dS_bar_t. With another key b_t that it takes what it reads along (`Erasure.along`),
y_t = -S_bar_t^T e_t is written beside b_t and not a part of u_t, and dy_t = G_t^T b_t stands for du_t in de_t and dS_bar_t.

No step is a difference of long sums, so this form is exact for all gates and all keys. It is plain JAX, so the gradient can be
differentiated any number of times. Yang et al. 2024, https://arxiv.org/abs/2406.06484 and https://arxiv.org/abs/2412.06464.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import (
    Outputs,
    Recurrence,
    gradient_recurrence,
    spread_heads,
    sum_heads,
    varying_like,
)
from glax._src.core.registry import check_form
from glax._src.kernels.xla.chunk_math import StateDecay, state_decay
from glax._src.kernels.xla.chunk_window import log_of_zero

SEGMENT = 64  # tokens between two states that the gradient stores


class Tokens(NamedTuple):
    """Hold the arrays of r with time first, [T, B, heads, ...], and the position of each row in its sequence.

    begins, ends: [T], whether a packed sequence's scan begins or ends at a row. sequence: a row's sequence, N for padding. All
    three are None without packing. resets: [T, B], whether a token starts from a state of zeros; None if none does.
    """

    q: Array
    k: Array
    v: Array
    decay: Decay
    erasure: Erasure
    begins: Array | None = None
    ends: Array | None = None
    sequence: Int[Array, "T"] | None = None
    resets: Bool[Array, "T B"] | None = None


def tokens_of(r: Recurrence, resets: Bool[Array, "B T"] | None = None) -> Tokens:
    """Return the arrays of r with time first and zeros in padding rows. A row of zeros leaves the state unchanged. resets: the
    tokens that start from a state of zeros, or None.

    Raises UnsupportedError for a form of decay that `token_of` does not read, whatever caller comes with such a form.
    """
    check_form(r, "the scan token by token with an erasure, or apart from what is not finite,")
    if r.boundaries is None:
        place: dict[str, Any] = {}
        is_token = None
    else:
        is_token = r.is_token
        sequence = jnp.where(is_token, r.sequence_of, r.num_sequences)
        place = dict(begins=r.ends(scan_end=False), ends=r.ends(scan_end=True), sequence=sequence)

    def by_time(x):
        x = jnp.moveaxis(x, 1, 0)
        return x if is_token is None else jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    decay = r.decay.with_tokens(r.by_token)
    decay, erasure = jax.tree.map(by_time, decay), jax.tree.map(by_time, r.erasing)
    place["resets"] = None if resets is None else resets.T
    tokens = Tokens(by_time(r.q), by_time(r.k), by_time(r.v), decay, erasure, **place)
    return jax.tree.map(lambda x: varying_like(x, r.q), tokens)


class Token(NamedTuple):
    """Hold one token of all B sequences in the dtype of sums, with a head for each head of the states. e: the erase vector. w:
    the write gate, None for 1. decay: None without gates. erasure: the token's arrays; beta is [B, H, 1]."""

    q: Float[Array, "B H K"]
    k: Float[Array, "B H K"]
    v: Float[Array, "B H V"]
    e: Float[Array, "B H K"]
    w: Float[Array, "B H V"] | Float[Array, "B H 1"] | None
    decay: StateDecay | None
    erasure: Erasure


def token_of(r: Recurrence, row: Tokens) -> Token:
    """Return the token of one row of `Tokens`."""
    q, k, v = (spread_heads(x.astype(r.dtype), r.num_heads, axis=1) for x in (row.q, row.k, row.v))
    erasure = jax.tree.map(lambda x: x.astype(r.dtype), row.erasure)
    if erasure.beta is not None:
        erasure = erasure.replace(beta=erasure.beta[..., None])
    # Below the floor, exp is 0 in this dtype; the exponential of -inf itself has no derivative in its series.
    head, key, value = (
        None if x is None else jnp.maximum(x.astype(r.dtype), log_of_zero(r.dtype))
        for x in (row.decay.head, row.decay.key, row.decay.value)
    )
    decay = state_decay(
        None if head is None else head[..., None, None],
        None if key is None else key[..., :, None],
        None if value is None else value[..., None, :],
    )
    e, w = erasure.vectors(k)
    return Token(q, k, v, e, w, decay, erasure)


def read(S: Float[Array, "B H K V"], x: Float[Array, "B H K"]) -> Float[Array, "B H V"]:
    """Compute S^T x, [B, H, V]."""
    return jnp.einsum("bhk,bhkv->bhv", x, S, precision=lax.Precision.HIGHEST)


def read_rows(S: Float[Array, "B H K V"], x: Float[Array, "B H V"]) -> Float[Array, "B H K"]:
    """Compute S x, [B, H, K]."""
    return jnp.einsum("bhv,bhkv->bhk", x, S, precision=lax.Precision.HIGHEST)


def outer(x: Float[Array, "B H K"], y: Float[Array, "B H V"]) -> Float[Array, "B H K V"]:
    return x[..., :, None] * y[..., None, :]


def decayed(S: Array, decay: StateDecay | None) -> Array:
    """Return the state S times the decay; S itself for None."""
    return S if decay is None else S * decay.base + S * decay.rest


def advance(S: Float[Array, "B H K V"], t: Token):
    """Return (S_bar, u, y, S) of a token, as the module defines them, from the state S before the token. y: -S_bar^T e if that
    is written along another key, else None."""
    S_bar = decayed(S, t.decay)
    u, erased = t.v if t.w is None else t.w * t.v, read(S if t.erasure.before_decay else S_bar, t.e)
    if t.erasure.along is None:
        u, y = u - erased, None
        written = outer(t.k, u)
    else:
        y = -erased
        written = outer(t.k, u) + outer(t.erasure.along, y)
    # S * rest is summed with the token's own term first: alone it may be less than half a digit of S.
    return S_bar, u, y, S + written if t.decay is None else S * t.decay.base + (S * t.decay.rest + written)


def each(x: Shaped[Array, "N"], like: Array) -> Array:
    """Return x with axes of size 1 behind its own, to multiply arrays of the rank of `like`."""
    return x.reshape(-1, *[1] * (like.ndim - 1))


def cleared(S: Float[Array, "B *rest"], row: Tokens) -> Array:
    """Return S, or zeros if the row resets the state. Zeros are selected: a decay of 0 would not stop NaN or inf."""
    return S if row.resets is None else jnp.where(each(row.resets, S), 0, S)


def enter(states: Array, carried: Array, begins, sequence) -> Array:
    """Return `carried` [1, ...], the state behind the last row, or the entry `sequence` of `states` [N, ...] where a packed
    sequence begins at this row.

    begins: whether a sequence begins here; None if the call is not packed, where `carried` is returned.
    """
    if begins is None:
        return carried
    return jnp.where(begins, lax.dynamic_index_in_dim(states, jnp.minimum(sequence, len(states) - 1)), carried)


def of_tokens(r: Recurrence, sequence, x):
    """Return x, a tree of arrays, with zeros if the row is padding, where the carried state may be NaN from the sequence
    before. sequence: the row's sequence; None without packing."""
    return x if sequence is None else jax.tree.map(lambda x: jnp.where(sequence < r.num_sequences, x, 0), x)


def write_state(states: Array, x: Array, sequence) -> Array:
    """Return x, the state, if the call is not packed (sequence is None). For packed sequences return `states` with x as the
    entry of the row's sequence; padding writes nothing."""
    return x if sequence is None else states.at[sequence].set(x[0], mode="drop")


def first_carry(r: Recurrence, states: Float[Array, "N *rest"]) -> Array:
    """Return the state that a scan carries before its first row: `states`, or zeros for packed sequences, each of which reads
    its own entry of `states` where it begins."""
    return states if r.boundaries is None else jnp.zeros_like(states, shape=(1, *states.shape[1:]))


def delta_by_token(r: Recurrence, resets: Bool[Array, "B T"] | None = None) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure. resets: [B, T], the tokens that start from a state
    of zeros, which also have gates of -inf."""
    start = r.start_state
    scale = r.scale

    def step(carry, row: Tokens):
        S, finals = carry
        t, n = token_of(r, row), row.sequence
        *_, S = advance(cleared(enter(start, S, row.begins, n), row), t)
        factor = each(scale, t.q) if n is None else scale[jnp.minimum(n, len(scale) - 1)]
        return (S, write_state(finals, S, n)), of_tokens(r, n, read(S, t.q * factor)).astype(r.q.dtype)

    carry = jax.tree.map(lambda x: varying_like(x, r.q), (first_carry(r, start), start))
    (_, final), output = lax.scan(step, carry, tokens_of(r, resets), reverse=r.reverse)
    return Outputs(jnp.moveaxis(output, 0, 1), final)


# ---- gradient ----------------------------------------------------------------------------------------------------------


def in_segments(r: Recurrence, tokens):
    """Return `tokens`, any tree of arrays [T, ...], with the time axis cut into [segments, SEGMENT], filled up with rows of
    zeros.

    The field `sequence` of the rows that fill is the number of sequences, which marks padding.
    """
    length = min(SEGMENT, r.q.shape[1])
    missing = -r.q.shape[1] % length

    def cut(path, x):
        padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        outside = r.num_sequences if getattr(path[-1], "name", "") == "sequence" else 0
        return jnp.pad(x, padding, constant_values=outside).reshape(-1, length, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(cut, tokens)


def delta_gradient_by_token(r: Recurrence, d_output, d_final, resets: Bool[Array, "B T"] | None = None) -> Recurrence:
    """Compute the gradient in every array of r. Memory holds the inputs, one state for every SEGMENT tokens, and the states of
    one segment.

    A forward scan stores the state before each segment. The reverse scan recomputes the states of one segment at a time.
    resets: [B, T], the tokens that start from a state of zeros.
    """
    tokens, start, d_final = tokens_of(r, resets), r.start_state, d_final.astype(r.dtype)
    d_output = jnp.moveaxis(d_output, 1, 0).astype(r.dtype)
    if r.boundaries is not None:
        d_output = jnp.where(r.is_token[:, None, None, None], d_output, 0)
    rows = in_segments(r, (tokens, varying_like(d_output, r.q)))

    def forward_step(S, row):
        t = token_of(r, row[0])
        before = cleared(enter(start, S, row[0].begins, row[0].sequence), row[0])
        return advance(before, t)[-1], before

    def forward_segment(S, segment):
        return lax.scan(forward_step, S, segment, reverse=r.reverse)[0], S

    first = varying_like(first_carry(r, start), r.q)
    _, saved = lax.scan(forward_segment, first, rows, reverse=r.reverse)

    def backward_step(carry, row):
        G, d_initial, d_scale = carry
        (own, do), before = row
        n = own.sequence
        G, d = token_gradient(r, own, do, before, enter(d_final, G, own.ends, n))
        d_scale = d_scale + d.scale if n is None else d_scale.at[n].add(d.scale[0], mode="drop")
        return (G, write_state(d_initial, G, n), d_scale), d

    def backward_segment(carry, segment):
        rows, S = segment
        _, states = lax.scan(forward_step, S, rows, reverse=r.reverse)
        return lax.scan(backward_step, carry, (rows, states), reverse=not r.reverse)

    carry = (first_carry(r, d_final), d_final, jnp.zeros_like(r.scale))
    carry = jax.tree.map(lambda x: varying_like(x, r.q), carry)
    (_, d_initial, d_scale), d = lax.scan(backward_segment, carry, (rows, saved), reverse=not r.reverse)

    def by_row(x):
        return jnp.moveaxis(x.reshape(-1, *x.shape[2:])[: r.q.shape[1]], 0, 1)

    dq, dk, dv, decay, erasure = jax.tree.map(by_row, (d.q, d.k, d.v, d.decay, d.erasure))
    if r.decay.constant is not None:
        decay = Decay(constant=r.per_sequence(decay.head))
    return gradient_recurrence(r, dq, dk, dv, decay, d_initial, d_scale, erasure)


class TokenGradient(NamedTuple):
    """Hold the gradient of one token's arrays, as in `Tokens`, and its term of the gradient of the scale, [B]."""

    q: Array
    k: Array
    v: Array
    decay: Decay
    erasure: Erasure
    scale: Float[Array, "B"]


def token_gradient(r: Recurrence, row: Tokens, do, before, G):
    """Return (dL/dS before the token, the gradient of the token's arrays as `TokenGradient`).

    do: the gradient of the token's output, [B, H, V]. before: the state before the token. G: dL/dS after the token, without the
    term of the token's output.
    """
    t, n = token_of(r, row), row.sequence
    S_bar, u, y, S = advance(before, t)
    scale = each(r.scale, t.q) if n is None else r.scale[jnp.minimum(n, len(r.scale) - 1)]
    reads = read_rows(S, do)
    G = G + outer(t.q * scale, do)
    du = read(G, t.k)
    along, before_decay = t.erasure.along, t.erasure.before_decay
    d_erased = du if along is None else read(G, along)
    d_read = outer(t.e, d_erased)
    d_bar = G if before_decay else G - d_read
    erasure, more_dk = t.erasure.gradient(-read_rows(before if before_decay else S_bar, d_erased), du, t.k, t.v)
    if y is not None:
        erasure = erasure.replace(along=read_rows(G, y))
    dk = read_rows(G, u) if more_dk is None else read_rows(G, u) + more_dk
    if erasure.beta is not None:
        erasure = erasure.replace(beta=erasure.beta[..., 0])
    d_log, decay = d_bar * S_bar, row.decay
    d = TokenGradient(
        q=sum_heads(reads * scale, row.q.shape[1], axis=1),
        k=sum_heads(dk, row.k.shape[1], axis=1),
        v=sum_heads(du if t.w is None else t.w * du, row.v.shape[1], axis=1),
        decay=Decay(
            head=None if decay.head is None else d_log.sum((2, 3)),
            key=None if decay.key is None else d_log.sum(3),
            value=None if decay.value is None else d_log.sum(2),
        ),
        erasure=erasure,
        scale=(t.q * reads).sum((1, 2)),
    )
    d_before = decayed(d_bar, t.decay)
    return cleared(d_before - d_read if before_decay else d_before, row), of_tokens(r, n, d)
