"""Compute the delta rule in chunks of C tokens: a scan forward, and a reverse scan that forms every gradient.

G_i is the sum of log decays from the chunk's first token through token i. S [K, V] is the state before the chunk. U [C, V]
holds what the tokens write: row u_i beside key k_i.

    L_ij = e_i . k_j e^{G_i - G_j}    j before i        what token i erases of what token j wrote
    P_ij = q_i . k_j e^{G_i - G_j}    j before i, j = i
    X    = w * v - (e e^G) S
    U    = (I + L)^-1 X
    O    = (q e^G) S + P U
    S'   = e^{G_last} S + (k e^{G_last - G})^T U

A chunk is thus a chunk of `chunk_math` with U in the place of v, and one more matrix of scores, L. Both use the same factors,
which are exact for all gates. L includes the decays. The inverse of a matrix without decays may overflow where (I + L)^-1 is
small.

The gradient follows from dS' = dL/dS' and do. dP and dL are restricted to the pairs of P and L:

    dU = (k e^{G_last - G}) dS' + P^T do                dX = (I + L)^-T dU              d(w * v) = dX
    dP = do U^T                                         dL = -dX U^T
    dq = (do S^T) e^G + dP k                            de = -(dX S^T) e^G + dL k
    dk = (U dS'^T) e^{G_last - G} + dP^T q + dL^T e     dS = e^{G_last} dS' + (q e^G)^T do - (e e^G)^T dX

The products of dP and dL with k, q and e include the decays of the pairs. The gradient of the log decays telescopes: it is <S,
dS> minus the sum over earlier tokens of q dq - k dk + e de, without the pair of a token with itself
(`chunk_math.log_gradient`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, gradient_like
from glax._src.kernels.common.chunks import pad_rows, pad_to_chunk, trim_rows
from glax._src.kernels.xla import chunk_math
from glax._src.kernels.xla.chunk_inverse import unit_inverse
from glax._src.kernels.xla.chunk_math import Factors, inner, matmul, times, total
from glax._src.kernels.xla.chunk_scan_vjp import decay_gradient, result_buffers
from glax._src.kernels.xla.chunk_window import (
    ChunkWindow,
    initial_state_of,
    log_through,
    scan_chunks,
    scan_outputs,
    select_form,
    start,
)

CHUNK = 64  # the tokens of a chunk where no config says otherwise


def scores(x, k, key: Factors, masks) -> Float[Array, "B H C C"]:
    """Compute the scores of x with k, [B, H, C, C]: the sum over levels of (x * up) (k * down)^T * between, each masked."""
    pairs = jnp.zeros((*x.shape[:3], k.shape[2]), x.dtype)
    for up, down, mask in zip(key.up, key.down, masks, strict=True):
        if mask.any():
            pairs += jnp.where(mask, times(inner(times(x, up), times(k, down)), key.between), 0)
    return pairs


def scores_gradient(d_pairs, x, k, key: Factors, masks) -> tuple[Array, Array]:
    """Return the gradients of x and k from the gradient of `scores`."""
    dx, dk = jnp.zeros_like(x), jnp.zeros_like(k)
    for up, down, mask in zip(key.up, key.down, masks, strict=True):
        if mask.any():
            d = jnp.where(mask, times(d_pairs, key.between), 0)
            dx += times(matmul(d, times(k, down)), up)
            dk += times(matmul(d.mT, times(x, up)), down)
    return dx, dk


def read_erasure(w: ChunkWindow, erasure: Erasure) -> Erasure:
    """Read the chunk's rows of each array, [B, H, C, width]; beta has a width of 1."""
    if erasure.beta is not None:
        return Erasure(beta=w.read(erasure.beta[..., None]))
    return jax.tree.map(w.read, erasure)


def written(S, k, v, e, w, key: Factors, g: chunk_math.Geometry, masks) -> tuple[Array, Array]:
    """Return ((I + L)^-1 [B, H, C, C], U [B, H, C, V]) of a chunk from the state S [B, H, K, V] before it."""
    L = scores(e, k, key, [mask & g.earlier for mask in masks])
    inverse = unit_inverse(L, descending=g.begin != 0)
    return inverse, matmul(inverse, times(v, w) - matmul(times(e, key.inward), S))


def forward_by_scan(r: Recurrence, size: int, save_states: bool) -> tuple[Outputs, Array | None]:
    """Compute the outputs, and the states before each chunk, [B, chunks, H, K, V], if `save_states`."""

    def evaluate(r: Recurrence, w: ChunkWindow, g, key, _, masks, S):
        q, k, v = w.read_all(r.q, r.k, r.v)
        q *= w.scale
        e, write = read_erasure(w, r.erasing).vectors(k)
        _, U = written(S, k, v, e, write, key, g, masks)
        o = matmul(times(q, key.inward), S) + matmul(scores(q, k, key, masks), U)
        return chunk_math.added(k, U, key, Factors()), o

    return scan_outputs(r, size, save_states, evaluate)


def states_before(r: Recurrence, size: int) -> Float[Array, "B chunks H K V"]:
    """Scan forward and return the state before each chunk, [B, chunks, H, K, V]."""
    chunks, g = start(r, size)
    first, B = r.start_state, r.q.shape[0]

    def body(w: ChunkWindow, i, carry):
        state, residuals = carry

        def evaluate(key, _, masks, S):
            k, v = w.read_all(r.k, r.v)
            e, write = read_erasure(w, r.erasing).vectors(k)
            return chunk_math.added(k, written(S, k, v, e, write, key, g, masks)[1], key, Factors())

        state, gates = w.carry_or_start(state, first), w.gates()
        residuals = lax.dynamic_update_index_in_dim(residuals, state.high, i, 1)
        added = select_form(g, r.decay, gates, False, evaluate, state.high)
        return [state.advance(chunk_math.state_decay(*log_through(gates)), added), residuals]

    residuals = jnp.zeros((B, chunks.first.shape[0], *r.state_shape[1:]), r.dtype)
    return scan_chunks(r, chunks, body, [initial_state_of(first, B), residuals], backwards=False)[1]


def chunk_gradient(S, dS, q, k, v, do, erasure: Erasure, key: Factors, g: chunk_math.Geometry, masks):
    """Compute the gradient of one chunk from S before the chunk and dS = dL/dS after it. q is multiplied by the scale.

    Returns (what the chunk adds to dL/dS before it, dq, dk, dv, the gradient of the erasure, the terms of the gates' gradient
    [B, H, C, K]). `masks` exclude the pair of a token with itself.
    """
    e, write = erasure.vectors(k)
    inverse, U = written(S, k, v, e, write, key, g, masks)
    # [B, H, C, 1]
    own, d_own = total(q * k, 3)[..., None], total(do * U, 3)[..., None]
    q_in, e_in, k_out = times(q, key.inward), times(e, key.inward), times(k, key.outward)
    dU = matmul(k_out, dS) + matmul(scores(q, k, key, masks).mT, do) + own * do
    dX = matmul(inverse.mT, dU)
    dq, dk = scores_gradient(inner(do, U), q, k, key, masks)
    de, more_dk = scores_gradient(-inner(dX, U), e, k, key, masks)
    dq += times(inner(do, S), key.inward)
    de -= times(inner(dX, S), key.inward)
    dk += more_dk + times(inner(U, dS), key.outward)
    terms = q * dq - k * dk + e * de
    d_erasure, gain = erasure.gradient(de, dX, k, v)
    d_added = chunk_math.outer(q_in, do) - chunk_math.outer(e_in, dX)
    dk = dk + d_own * q if gain is None else dk + d_own * q + gain
    return d_added, dq + d_own * k, dk, times(dX, write), d_erasure, terms


def vjp_by_scan(r: Recurrence, size: int, d_output, d_final, states: Array | None) -> Recurrence:
    """Compute the gradient of every input by a reverse scan over chunks of `size` tokens.

    states: the states before each chunk, [B, chunks, H, K, V]; None recomputes them by a forward scan.
    """
    original, (chunks, g) = r, start(r, size)
    r, d_output = pad_to_chunk(r, chunks.size), pad_rows(d_output, chunks.size)
    states = states_before(r, size) if states is None else states
    d_last = d_final.astype(r.dtype)

    def body(w: ChunkWindow, i, carry):
        d_state, each_scale, d_states, d_scale, rows, d_erasure, d_decay = carry
        d_state, gates = w.carry_or_start(d_state, d_last), w.gates()

        def evaluate(key, _, masks, S, dS):
            unscaled, k, v, do = w.read_all(r.q, r.k, r.v, d_output)
            erasure = read_erasure(w, r.erasing)
            d = chunk_gradient(S, dS, unscaled * w.scale, k, v, do, erasure, key, g, masks)
            d_added, dq, dk, dv, d_erased, terms = d
            return d_added, total(unscaled * dq, 3).sum((1, 2)), (dq * w.scale, dk, dv), d_erased, terms

        S = lax.dynamic_index_in_dim(states, i, 1, keepdims=False)
        d_added, more_scale, d_rows, d_erased, terms = select_form(g, r.decay, gates, False, evaluate, S, d_state.high)
        d_state = d_state.advance(chunk_math.state_decay(*log_through(gates)), d_added)
        each_scale = w.carry_or_start(each_scale, None) + more_scale
        sides = (terms, total(S * d_state.high, 3)), (None, None)
        return [
            d_state,
            each_scale,
            w.write_state(d_states, d_state.high),
            w.write_state(d_scale, each_scale),
            [w.write(buffer, x) for buffer, x in zip(rows, d_rows, strict=True)],
            write_erasure(w, d_erasure, d_erased),
            decay_gradient(w, g, d_decay, *sides) if r.decay.form != "none" else d_decay,
        ]

    blank = result_buffers(r)
    rows = [next(blank)(x) for x in (r.q, r.k, r.v)]
    d_erasure, d_decay = (jax.tree.map(lambda x: next(blank)(x), x) for x in (r.erasure, r.decay))
    if r.decay.constant is not None:
        d_decay = Decay(constant=jnp.zeros(r.decay.constant.shape, r.dtype))
    B = r.q.shape[0]
    sums = [d_last, jnp.zeros_like(r.scale)]
    carry = [initial_state_of(d_last, B), jnp.zeros(B, r.dtype), *sums, rows, d_erasure, d_decay]
    _, _, d_initial, d_scale, rows, d_erasure, d_decay = scan_chunks(r, chunks, body, carry, backwards=True)
    T = original.q.shape[1]
    dq, dk, dv = (trim_rows(x, T) for x in rows)
    if r.decay.constant is None:
        d_decay = jax.tree.map(lambda x: trim_rows(x, T), d_decay)
    d = r.replace(
        q=dq,
        k=dk,
        v=dv,
        decay=d_decay,
        initial_state=None if r.initial_state is None else d_initial,
        boundaries=None,
        scale=d_scale,
        erasure=jax.tree.map(lambda x: trim_rows(x, T), d_erasure),
    )
    return gradient_like(original, d)


def write_erasure(w: ChunkWindow, buffers: Erasure, x: Erasure) -> Erasure:
    """Return the buffers with the gradient of one chunk's erasure, x, written to the rows of the chunk."""
    if buffers.beta is not None and x.beta is not None:
        return Erasure(beta=w.write(buffers.beta[..., None], x.beta)[..., 0])
    return jax.tree.map(w.write, buffers, x)
