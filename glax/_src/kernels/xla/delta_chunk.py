"""Compute the delta rule in chunks of C tokens: a scan forward, and a reverse scan that forms every gradient.

G_i is the sum of log decays from the chunk's first token through token i. S [K, V] is the state before the chunk. U [C, V]
holds what the tokens write: row u_i beside key k_i.

    L_ij = e_i . k_j e^{G_i - G_j}    j before i        what token i erases of what token j wrote
    P_ij = q_i . k_j e^{G_i - G_j}    j before i, j = i
    X    = w * v - (e e^G) S
    U    = (I + L)^-1 X
    O    = (q e^G) S + P U
    S'   = e^{G_last} S + (k e^{G_last - G})^T U

Where the erasure reads before the decay (`Erasure.before_decay`), L and X have G_{i-1} in the place of G_i: the factors of the
rows of e are `Factors.before`, and nothing else changes.

Where it takes what it reads along another key b (`Erasure.along`), the tokens write twice: W = w * v beside k, and U beside b.
L has b in the place of k, and X has -M W in the place of w * v, with M the scores of e with k. The outputs and the state sum over
both. This costs three products of C x C more, and the state is read and written once.

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

Where the erasure reads before the decay, token t's gate multiplies nothing that e_t reads, and the sum includes e_t de_t. What
passes no gate at all is left out of the sum, as the pair of a token with itself is: what e reads of the token before it or, at
the chunk's first token, of S.
"""

import functools
import operator
from collections.abc import Iterable

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
    """Return the scores of x with k, [B, H, C, C]: the sum over levels of mask * ((x * up) (k * down)^T * between).

    x: queries or erase vectors, [B, H, C, K]. k: [B, H, C, K]. key: the factors with which x is read. masks: [C, C] each, one
    per level.
    """
    pairs = jnp.zeros((*x.shape[:3], k.shape[2]), x.dtype)
    for up, down, mask in zip(key.up, key.down, masks, strict=True):
        if mask.any():
            pairs += jnp.where(mask, times(inner(times(x, up), times(k, down)), key.between), 0)
    return pairs


def scores_gradient(d_pairs, x, k, key: Factors, masks) -> tuple[Array, Array]:
    """Return the gradients of x and k. d_pairs: the gradient of the result of `scores`, [B, H, C, C]. The other arguments are
    those of `scores`."""
    dx, dk = jnp.zeros_like(x), jnp.zeros_like(k)
    for up, down, mask in zip(key.up, key.down, masks, strict=True):
        if mask.any():
            d = jnp.where(mask, times(d_pairs, key.between), 0)
            dx += times(matmul(d, times(k, down)), up)
            dk += times(matmul(d.mT, times(x, up)), down)
    return dx, dk


def read_erasure(w: ChunkWindow, erasure: Erasure) -> Erasure:
    """Return the erasure with the chunk's rows of each array, [B, H, C, width]; beta has a width of 1."""
    if erasure.beta is not None:
        return erasure.replace(beta=w.read(erasure.beta[..., None]))
    return jax.tree.map(w.read, erasure)


Written = list[tuple[Array, Array]]


def written(S, k, v, e, w, along, key: Factors, g: chunk_math.Geometry, masks) -> tuple[Array, Written]:
    """Return ((I + L)^-1 [B, H, C, C] of a chunk, its writes), where S [B, H, K, V] is the state before it.

    k, e, along: [B, H, C, K], v: [B, H, C, V], w: the write gate or None. The writes are pairs of keys [B, H, C, K] and values
    [B, H, C, V]: (k, U), or with `along` (k, w * v) and (along, U). The values of the last pair are the inverse times X.
    """
    reads, earlier = key.erasing, [mask & g.earlier for mask in masks]
    L = scores(e, k if along is None else along, reads, earlier)
    inverse = unit_inverse(L, descending=g.begin != 0)
    if along is None:
        return inverse, [(k, matmul(inverse, times(v, w) - matmul(times(e, reads.inward), S)))]
    values = times(v, w)
    X = -matmul(scores(e, k, reads, earlier), values) - matmul(times(e, reads.inward), S)
    return inverse, [(k, values), (along, matmul(inverse, X))]


def summed(terms: Iterable[Array]) -> Array:
    """Return the sum of the terms."""
    return functools.reduce(operator.add, terms)


def added(write: Written, key: Factors) -> Float[Array, "B H K V"]:
    """Return what a chunk's writes add to the state after the chunk: the sum over pairs of (keys * outward)^T values."""
    return summed([chunk_math.added(k, x, key, Factors()) for k, x in write])


def forward_by_scan(r: Recurrence, size: int, save_states: bool) -> tuple[Outputs, Array | None]:
    """Compute the outputs and final states, and with `save_states` the states before each chunk, [B, chunks, H, K, V], else
    None. size: the tokens of a chunk."""

    def evaluate(r: Recurrence, w: ChunkWindow, g, key, _, masks, S):
        q, k, v = w.read_all(r.q, r.k, r.v)
        q *= w.scale
        erasure = read_erasure(w, r.erasing)
        _, write = written(S, k, v, *erasure.vectors(k), erasure.along, key, g, masks)
        o = matmul(times(q, key.inward), S)
        for k, x in write:
            o += matmul(scores(q, k, key, masks), x)
        return added(write, key), o

    return scan_outputs(r, size, save_states, evaluate)


def states_before(r: Recurrence, size: int) -> Float[Array, "B chunks H K V"]:
    """Scan forward and return the state before each chunk, [B, chunks, H, K, V]."""
    chunks, g = start(r, size)
    first, B = r.start_state, r.q.shape[0]

    def body(w: ChunkWindow, i, carry):
        state, residuals = carry

        def evaluate(key, _, masks, S):
            k, v = w.read_all(r.k, r.v)
            erasure = read_erasure(w, r.erasing)
            return added(written(S, k, v, *erasure.vectors(k), erasure.along, key, g, masks)[1], key)

        state, gates = w.carry_or_start(state, first), w.gates()
        residuals = lax.dynamic_update_index_in_dim(residuals, state.high, i, 1)
        more = select_form(g, r, gates, False, evaluate, state.high)
        return [state.advance(chunk_math.state_decay(*log_through(gates)), more), residuals]

    residuals = jnp.zeros((B, chunks.first.shape[0], *r.state_shape[1:]), r.dtype)
    return scan_chunks(r, chunks, body, [initial_state_of(first, B), residuals], backwards=False)[1]


def chunk_gradient(S, dS, rows, erasure: Erasure, is_first, key: Factors, g: chunk_math.Geometry, masks):
    """Compute the gradient of one chunk from S before the chunk and dS = dL/dS after it, [B, H, K, V] each.

    Returns ((d_added, through_no_gate), dq, dk, dv, d_erasure, (terms, own)). d_added: the terms of the chunk's tokens in dL/dS
    before it, less through_no_gate. through_no_gate: those of these terms that pass no gate, or None. terms [B, H, C, K], own:
    the arguments of `chunk_math.log_gradient`; own may be None. rows: q, multiplied by the scale, k, v and do. erasure: the
    chunk's rows. is_first: [C, 1], whether a row is the chunk's first token in the scan. `masks` exclude the pair of a token
    with itself.
    """
    q, k, v, do = rows
    (e, write), reads, along = erasure.vectors(k), key.erasing, erasure.along
    inverse, pairs = written(S, k, v, e, write, along, key, g, masks)
    # [B, H, C, 1]
    owns = [(total(q * k, 3)[..., None], total(do * x, 3)[..., None]) for k, x in pairs]
    q_in, e_in = times(q, key.inward), times(e, reads.inward)
    d_writes = [
        matmul(times(k, key.outward), dS) + matmul(scores(q, k, key, masks).mT, do) + own * do
        for (k, _), (own, _) in zip(pairs, owns, strict=True)
    ]
    dX = matmul(inverse.mT, d_writes[-1])
    d_value = dX if along is None else d_writes[0] - matmul(scores(e, k, reads, masks).mT, dX)
    of_reads = [scores_gradient(inner(do, x), q, k, key, masks) for k, x in pairs]
    gated = [mask & ~g.adjacent for mask in masks] if erasure.before_decay else masks
    of_erasures = [scores_gradient(-inner(dX, x), e, k, reads, gated) for k, x in pairs]
    dq, de = summed([d for d, _ in of_reads]), summed([d for d, _ in of_erasures])
    dq += times(inner(do, S), key.inward)
    de_state, own, through_no_gate = times(inner(dX, S), reads.inward), None, None
    if erasure.before_decay:
        first, e_in = jnp.where(is_first, e_in, 0), jnp.where(is_first, 0, e_in)
        through_no_gate = -chunk_math.outer(first, dX)
        de -= jnp.where(is_first, 0, de_state)
        own = e * de
    else:
        de -= de_state
    dks = [
        dk + (more_dk + times(inner(x, dS), key.outward))
        for (_, dk), (_, more_dk), (_, x) in zip(of_reads, of_erasures, pairs, strict=True)
    ]
    terms = q * dq - summed([k * dk for (k, _), dk in zip(pairs, dks, strict=True)]) + e * de
    if erasure.before_decay:
        adjacent = [jnp.where(g.adjacent, -inner(dX, x), 0) for _, x in pairs]
        de += summed([matmul(d, k) for d, (k, _) in zip(adjacent, pairs, strict=True)]) - jnp.where(
            is_first, de_state, 0
        )
        dks = [dk + matmul(d.mT, e) for d, dk in zip(adjacent, dks, strict=True)]
    d_erasure, gain = erasure.gradient(de, d_value, k, v)
    d_added = chunk_math.outer(q_in, do) - chunk_math.outer(e_in, dX)
    dks = [dk + d_own * q for dk, (_, d_own) in zip(dks, owns, strict=True)]
    dk = dks[0] if gain is None else dks[0] + gain
    if along is not None:
        d_erasure = d_erasure.replace(along=dks[1])
    dq += summed([d_own * k for (k, _), (_, d_own) in zip(pairs, owns, strict=True)])
    return (d_added, through_no_gate), dq, dk, times(d_value, write), d_erasure, (terms, own)


def vjp_by_scan(r: Recurrence, size: int, d_output, d_final, states: Array | None) -> Recurrence:
    """Compute the gradient of every input by a reverse scan over chunks of `size` tokens.

    d_output: [B, T, H, V]. d_final: [N, H, K, V]. states: the states before each chunk, [B, chunks, H, K, V]; None recomputes
    them by a forward scan.
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
            is_first = w.is_first if erasure.before_decay else None
            d = chunk_gradient(S, dS, (unscaled * w.scale, k, v, do), erasure, is_first, key, g, masks)
            d_added, dq, dk, dv, d_erased, terms = d
            return d_added, total(unscaled * dq, 3).sum((1, 2)), (dq * w.scale, dk, dv), d_erased, terms

        S = lax.dynamic_index_in_dim(states, i, 1, keepdims=False)
        d_added, more_scale, d_rows, d_erased, (terms, own) = select_form(g, r, gates, False, evaluate, S, d_state.high)
        (d_added, through_no_gate), decay = d_added, chunk_math.state_decay(*log_through(gates))
        through_gates = d_state.advance(decay, d_added)
        d_state = through_gates if through_no_gate is None else d_state.advance(decay, d_added + through_no_gate)
        each_scale = w.carry_or_start(each_scale, None) + more_scale
        sides = (terms, total(S * through_gates.high, 3), own), (None, None)
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
        return buffers.replace(beta=w.write(buffers.beta[..., None], x.beta)[..., 0])
    return jax.tree.map(w.write, buffers, x)
