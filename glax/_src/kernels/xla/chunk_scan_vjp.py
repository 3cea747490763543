"""Compute the gradient of the scan over chunks: a forward scan that stores states, and a reverse scan that forms all gradients.

The forward scan stores the state S before each chunk, or the residuals hold it. The reverse scan carries dS = dL/dS, starting
from the gradient of the final state, and writes the gradients of the rows of one chunk at a time (`chunk_math.backward`). Both
carry states transposed, [B, H, V, K], which saves transpositions in the products.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence, gradient_recurrence, is_symbol
from glax._src.kernels.common.chunks import Chunks, pad_rows, pad_to_chunk, trim_rows
from glax._src.kernels.xla import chunk_math
from glax._src.kernels.xla.chunk_window import (
    ChunkWindow,
    initial_state_of,
    log_through,
    scan_chunks,
    select_form,
    start,
)


class StateStore:
    """Store the transposed state before each chunk, [B, H, V, K], in `buffers`, a list of arrays.

    The rows of a chunk in dq and dk, [C, K] each, can hold a state of V <= 2 C columns. The state of a chunk is read before its
    dq and dk are written. If the dtypes and heads agree, `buffers` is therefore dq and dk, and the gradient needs no memory
    beyond its results. XLA knows this order only if the state passes through a lax.cond, and otherwise copies the arrays.
    """

    def __init__(self, r: Recurrence, chunks: Chunks):
        B, T = r.q.shape[:2]
        H, K, V = r.state_shape[1:]
        self.shape, self.C, self.V = (chunks.first.shape[0], B, H, V, K), chunks.size, V
        whole = r.boundaries is None and not is_symbol(T) and T % self.C == 0 and V <= 2 * self.C
        whole &= r.decay.key is not None or r.decay.value is not None
        self.in_rows = whole and all(x.dtype == r.dtype and x.shape[2] == H for x in (r.q, r.k))
        self.arrays = [] if self.in_rows else [jnp.zeros(self.shape, r.dtype)]

    def put(self, w: ChunkWindow, i, buffers: list[Array], S: Float[Array, "B H V K"]) -> list[Array]:
        """Return the buffers with S, the state before chunk i, stored. w: the window of chunk i."""
        if not self.in_rows:
            return [lax.dynamic_update_index_in_dim(buffers[0], S, i, 0)]
        S = jnp.pad(S, ((0, 0), (0, 0), (0, 2 * self.C - self.V), (0, 0)))
        return [w.write(rows, part) for rows, part in zip(buffers, jnp.split(S, 2, axis=2), strict=True)]

    def get(self, w: ChunkWindow, i, buffers: list[Array]) -> Float[Array, "B H V K"]:
        """Return the state before chunk i from the buffers, [B, H, V, K]. w: the window of chunk i."""
        if not self.in_rows:
            return lax.dynamic_index_in_dim(buffers[0], i, keepdims=False)
        return jnp.concatenate([w.read(rows) for rows in buffers], axis=2)[:, :, : self.V]


ReadState = Callable[[ChunkWindow, Any, list[Array]], Array]


def states_before(
    r: Recurrence, chunks: Chunks, g: chunk_math.Geometry, d_qk: list[Array]
) -> tuple[ReadState, list[Array]]:
    """Scan forward and store the state before each chunk. d_qk: the buffers of dq and dk.

    Returns (read, d_qk): read(window, i, d_qk) returns the state before chunk i, [B, H, V, K], and the new d_qk are the buffers
    of dq and dk, which may hold the states.
    """
    stored, first = StateStore(r, chunks), r.start_state.mT

    def remember(w: ChunkWindow, i, carry):
        state, buffers = carry
        state, (key, value) = w.carry_or_start(state, first), w.gates()
        k, v = w.read_all(r.k, r.v)
        added = chunk_math.added(v, k, chunk_math.edges(g, value), chunk_math.edges(g, key))
        decay = chunk_math.state_decay(*log_through((key, value), transposed=True))
        return state.advance(decay, added), stored.put(w, i, buffers, state.high)

    carry = (initial_state_of(first, r.q.shape[0]), d_qk if stored.in_rows else stored.arrays)
    _, buffers = scan_chunks(r, chunks, remember, carry, backwards=False)

    def read(w: ChunkWindow, i, d_qk: list[Array]) -> Array:
        return stored.get(w, i, d_qk if stored.in_rows else buffers)

    return read, buffers if stored.in_rows else d_qk


def result_buffers(r: Recurrence):
    """Return a generator of functions x -> a new array of x's shape and dtype, one function for each result.

    Without packing, every row is overwritten later, and each array is filled with a different number: XLA would merge arrays
    with the same number into one, and copy it on one core. With packing, rows outside all sequences are not written, so arrays
    are filled with 0.
    """
    for number in itertools.count(1):
        yield functools.partial(jnp.full_like, fill_value=number if r.boundaries is None else 0)


def vjp_by_scan(r: Recurrence, size: int, d_output, d_final, states: Array | None) -> Recurrence:
    """Compute the gradient of every input by a reverse scan over chunks of `size` tokens.

    d_output: [B, T, H, V]. d_final: [N, H, K, V]. states: the states before each chunk, [B, chunks, H, K, V]; None recomputes
    them by a forward scan.
    """
    original, (chunks, g) = r, start(r, size)
    r, d_output = pad_to_chunk(r, chunks.size), pad_rows(d_output, chunks.size)
    blank = result_buffers(r)
    d_qk = [next(blank)(r.q), next(blank)(r.k)]
    if states is None:
        state_before, d_qk = states_before(r, chunks, g, d_qk)
    else:
        state_before = saved_states(states)

    def body(w: ChunkWindow, i, carry):
        d_state, each_scale, d_states, d_scale, d_qk, d_v, d_decay = carry
        d_state, gates = w.carry_or_start(d_state, d_last), w.gates()

        def evaluate(key, value, masks, S, dS):
            unscaled, k, v, do = w.read_all(r.q, r.k, r.v, d_output)
            q = unscaled * w.scale
            d_added, dq, dk, dv = chunk_math.backward(S, dS, q, k, v, do, key, value, masks)
            row_terms = q * dq[1] - k * dk[1]
            o = None if r.decay.value is None else chunk_math.forward(S.mT, q, k, v, key, value, masks)
            column_terms = None if o is None else o * do - v * dv[1]
            more_scale = chunk_math.total(unscaled * sum(dq), 3).sum((1, 2))
            return d_added, more_scale, sum(dq) * w.scale, sum(dk), sum(dv), (row_terms, column_terms)

        S = state_before(w, i, d_qk)
        d_added, more_scale, dq, dk, dv, terms = select_form(g, r, gates, False, evaluate, S, d_state.high)
        d_state = d_state.advance(chunk_math.state_decay(*log_through(gates, transposed=True)), d_added)
        edges = (chunk_math.total(S * d_state.high, axis) for axis in (2, 3))
        each_scale = w.carry_or_start(each_scale, None) + more_scale
        return (
            d_state,
            each_scale,
            w.write_state(d_states, d_state.high),
            w.write_state(d_scale, each_scale),
            [w.write(rows, x) for rows, x in zip(d_qk, (dq, dk), strict=True)],
            w.write(d_v, dv),
            decay_gradient(w, g, d_decay, *zip(terms, edges, strict=True)),
        )

    d_v, d_decay = next(blank)(r.v), jax.tree.map(lambda x: next(blank)(x), r.decay)
    if r.decay.constant is not None:
        d_decay = Decay(constant=jnp.zeros(r.decay.constant.shape, r.dtype))
    B, d_last = r.q.shape[0], d_final.astype(r.dtype).mT
    no_scale = jnp.zeros_like(r.scale)
    carry = (initial_state_of(d_last, B), jnp.zeros(B, r.dtype), d_last, no_scale, d_qk, d_v, d_decay)
    _, _, d_initial, d_scale, (dq, dk), dv, d_decay = scan_chunks(r, chunks, body, carry, backwards=True)
    T = original.q.shape[1]
    dq, dk, dv = (trim_rows(x, T) for x in (dq, dk, dv))
    d_gates = (None if x is None else trim_rows(x, T) for x in (d_decay.head, d_decay.key, d_decay.value))
    d_decay = Decay(d_decay.constant, *d_gates)
    d_initial = None if r.initial_state is None else d_initial.mT
    return gradient_recurrence(original, dq, dk, dv, d_decay, d_initial, d_scale)


def saved_states(states: Float[Array, "B chunks H K V"]) -> ReadState:
    """Return a function (window, i, d_qk) -> the transposed state before chunk i, [B, H, V, K], read from the residuals
    `states`."""
    return lambda w, i, d_qk: lax.dynamic_index_in_dim(states, i, 1, keepdims=False).mT


def decay_gradient(w: ChunkWindow, g: chunk_math.Geometry, d_decay: Decay, row_side, column_side) -> Decay:
    """Return d_decay, a `Decay` of buffers, with the gradient of the log decays of one chunk written to the chunk's rows, or
    added for constant decays.

    row_side, column_side: (terms [B, H, C, D], edge [B, H, D], and own [B, H, C, D] if any), the arguments of
    `chunk_math.log_gradient` for the gates of the state's rows and of its columns.
    """
    per_channel, per_head = (functools.partial(chunk_math.log_gradient, g, per_head=x) for x in (False, True))
    if d_decay.constant is not None:
        # [B, H, C]: rows outside the chunk hold no token
        each = per_head(*row_side)[..., 0]
        each = each if w.in_chunk is None else jnp.where(w.in_chunk, each, 0)
        return Decay(constant=w.write_state(d_decay.constant, w.read_state(d_decay.constant) + each.sum(2)))
    if d_decay.head is not None:
        return Decay(head=w.write(d_decay.head[..., None], per_head(*row_side))[..., 0])
    sides = ((d_decay.key, row_side), (d_decay.value, column_side))
    return Decay(None, None, *(None if d is None else w.write(d, per_channel(*side)) for d, side in sides))
