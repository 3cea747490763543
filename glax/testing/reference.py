"""Define what every kernel is held to: the recurrence token by token, in NumPy, in float64.

The kernels share no code with this module, nor with its gradient. The gradient of a gate is <G_t, decayed S_{t-1}>, formed
directly from both states, where kernels use a telescoped sum.
"""

from typing import Any, NamedTuple

import numpy as np

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence

NumPy = Any  # a float64 NumPy array instead of a JAX array


def reference(r: Recurrence, dtype=np.float64) -> Outputs:
    """Compute S_bar = exp(rows_t) S_{t-1} exp(columns_t),   S_t = S_bar + k_t u_t^T,   o_t = scale * S_t^T q_t.

    u_t is v_t, or w_t * v_t - S_bar^T e_t with an erasure, or w_t * v_t - S_{t-1}^T e_t with one before the decay.
    rows_t [K]: the sum of token t's log decays `constant`, `head` and `key`. columns_t [V]: its log decays `value`.

    r: a `glax.Recurrence` of arrays. dtype: the dtype of all arithmetic; float32 shows the error of rounding alone. Returns
    `Outputs` of NumPy arrays in that dtype: output [B, T, H, V] and final_state [N, H, K, V].

    >>> from glax.testing import cases, reference
    >>> reference.reference(cases.recurrence(cases.CASES[0], "log-sigmoid")).output.dtype
    dtype('float64')
    """
    x = _arrays(r, dtype)
    output: NumPy = np.zeros((*x.q.shape[:3], x.v.shape[3]), dtype)
    final: NumPy = x.state.copy()
    for n, b, tokens in _scans(r):
        S = x.state[n]
        for t in tokens:
            S = _step(S, x, b, t)
            output[b, t] = x.scale[n] * np.einsum("hk,hkv->hv", x.q[b, t], S)
        final[n] = S
    return Outputs(output, final)


def reference_states(r: Recurrence, every: int) -> np.ndarray:
    """Return the states after every `every` tokens in scan order, in float64: [N, T // every, H, K, V], or if packed
    [J, H, K, V].

    With segments, padding counts as tokens of the row.
    """
    x = _arrays(r, np.float64)
    found = [[] for _ in range(r.num_sequences)]
    for n, b, tokens in _scans(r.replace(segments=None)):
        S, is_token = x.state[n], None if r.segments is None else r.segments.is_token
        for i, t in enumerate(tokens, start=1):
            if is_token is None or is_token[b, t]:
                S = _step(S, x, b, t)
            if i % every == 0:
                found[n].append(S)
    if r.boundaries is None:
        return np.stack([np.stack(each) for each in found])
    return np.stack([S for each in found for S in each])


def reference_gradient(r: Recurrence, d_output, d_final, dtype=np.float64) -> Recurrence:
    """Return the gradient of <output, d_output> + <final_state, d_final> in every input of r, as a Recurrence.

    r, dtype: as in `reference`. d_output [B, T, H, V], d_final [N, H, K, V]: arrays. The gradients have the shapes of r's arrays.

    G_t = dL/dS_t,  G_bar_t = dL/dS_bar_t
    dq_t = scale S_t do_t,  dk_t = G_t u_t,  du_t = G_t^T k_t,  de_t = -S_bar_t du_t
    G_bar_t = G_t - e_t du_t^T,  d log decay_t = G_bar_t * S_bar_t

    >>> from glax.testing import cases, reference
    >>> r = cases.recurrence(cases.CASES[0], "log-sigmoid")
    >>> reference.reference_gradient(r, jnp.ones((2, 150, 2, 32)), jnp.ones((2, 2, 32, 32))).q.shape
    (2, 150, 2, 32)
    """
    x = _arrays(r, dtype)
    do, dS = _plain(d_output).astype(dtype), _plain(d_final).astype(dtype)
    dq, dk, dv, de, dw, d_rows, d_columns = map(np.zeros_like, (x.q, x.k, x.v, x.k, x.v, x.rows, x.columns))
    d_along: NumPy = np.zeros_like(x.k)
    d_initial: NumPy = dS.copy()
    d_scale: NumPy = np.zeros(r.num_sequences, dtype)
    d_constant: NumPy = np.zeros((r.num_sequences, r.num_heads), dtype)
    beta = x.w  # [B, T, H, 1] where there is a d_beta
    d_beta: NumPy = None if r.erasure is None or r.erasure.beta is None else np.zeros(x.q.shape[:3], dtype)
    for n, b, tokens in _scans(r):
        states = [x.state[n]]
        for t in tokens:
            states.append(_step(states[-1], x, b, t))
        G = dS[n].copy()
        for i in reversed(range(len(tokens))):
            t, S = tokens[i], states[i + 1]
            read = np.einsum("hkv,hv->hk", S, do[b, t])
            dq[b, t] = x.scale[n] * read
            d_scale[n] += (x.q[b, t] * read).sum()
            G += x.scale[n] * x.q[b, t][..., None] * do[b, t][..., None, :]
            decay, S_bar, u, y = _written(states[i], x, b, t)
            dk[b, t] = np.einsum("hkv,hv->hk", G, u)
            du = np.einsum("hkv,hk->hv", G, x.k[b, t])
            dv[b, t], dw[b, t] = du if x.w is None else x.w[b, t] * du, du * x.v[b, t]
            d_read: NumPy = 0.0
            if x.e is not None:
                if x.along is not None:
                    d_along[b, t] = -np.einsum("hkv,hv->hk", G, y)
                d_erased = du if x.along is None else np.einsum("hkv,hk->hv", G, x.along[b, t])
                de[b, t] = -np.einsum("hkv,hv->hk", _read_by_erasure(states[i], S_bar, x, b, t), d_erased)
                d_read = -x.e[b, t][..., None] * d_erased[..., None, :]
                if x.before_decay and x.resets is not None and x.resets[b, t]:
                    d_read = 0.0
            if d_beta is not None:
                d_beta[b, t] = (de[b, t] * x.k[b, t]).sum(-1) + dw[b, t].sum(-1)
                dk[b, t] += beta[b, t] * de[b, t]
            if not x.before_decay:
                G = G + d_read
            d_log = G * S_bar
            d_rows[b, t], d_columns[b, t] = d_log.sum(-1), d_log.sum(-2)
            d_constant[n] += d_log.sum((-1, -2))
            G = G * decay
            if x.before_decay:
                G = G + d_read
        d_initial[n] = G
    decay, erasure = r.decay, None
    if r.erasure is not None:
        erasure = Erasure(
            beta=d_beta,
            erase=None if r.erasure.erase is None else de,
            write=None if r.erasure.write is None else dw,
            along=None if r.erasure.along is None else d_along,
            before_decay=r.erasure.before_decay,
        )
    return Recurrence(
        q=_fold(dq, r.q.shape[2]),
        k=_fold(dk, r.k.shape[2]),
        v=_fold(dv, r.v.shape[2]),
        decay=Decay(
            constant=None if decay.constant is None else d_constant,
            head=None if decay.head is None else d_rows.sum(-1),
            key=None if decay.key is None else d_rows,
            value=None if decay.value is None else d_columns,
        ),
        initial_state=None if r.initial_state is None else d_initial,
        boundaries=None,
        scale=d_scale,
        erasure=erasure,
        reverse=r.reverse,
    )


def _written(S, x: "_Arrays", b, t):
    """Return (the decay [H, K, V]; S_bar; u [H, V], what the token writes along k; y [H, V], what it erases along another key,
    or 0).

    S: [H, K, V], the state before the token. x: the inputs. b, t: the token's batch row and place in time.
    """
    decay = np.exp(x.rows[b, t][..., None] + x.columns[b, t][..., None, :])
    S_bar, u = S * decay, x.v[b, t]
    y = np.zeros_like(u)
    if x.w is not None:
        u = x.w[b, t] * u
    if x.e is not None:
        erased = np.einsum("hkv,hk->hv", _read_by_erasure(S, S_bar, x, b, t), x.e[b, t])
        u, y = (u - erased, y) if x.along is None else (u, erased)
    return decay, S_bar, u, y


def _read_by_erasure(S, S_bar, x: "_Arrays", b, t):
    """Return the state [H, K, V] that a token's erase vector reads: S with before_decay, else S_bar. At a reset, S counts as
    zeros.

    S, S_bar: the state before the token, and that state decayed. b, t: the token's batch row and place in time.
    """
    if not x.before_decay:
        return S_bar
    return np.zeros_like(S) if x.resets is not None and x.resets[b, t] else S


def _step(S, x: "_Arrays", b, t):
    """Return the state after token t of batch row b, from the state S before it."""
    _, S_bar, u, y = _written(S, x, b, t)
    S = S_bar + x.k[b, t][..., None] * u[..., None, :]
    return S if x.along is None else S - x.along[b, t][..., None] * y[..., None, :]


def _scans(r: Recurrence):
    """Yield (the number of the sequence, its batch row, the places in time of its tokens in scan order) for every sequence."""
    T = r.q.shape[1]
    cuts = None if r.boundaries is None else np.asarray(r.boundaries)
    for n in range(r.num_sequences):
        tokens = range(T) if cuts is None else range(cuts[n], cuts[n + 1])
        if r.segments is not None and r.segments.is_token is not None:
            tokens = np.flatnonzero(np.asarray(r.segments.is_token)[n])
        yield n, (n if cuts is None else 0), (tokens[::-1] if r.reverse else tokens)


class _Arrays(NamedTuple):
    """Hold every input of the reference in one dtype, with heads repeated to H.

    rows [B, T, H, K] and columns [B, T, H, V]: sums of the log decays. state: the initial state. e, w: the erase vector and the
    write gate, which may be None. resets: [B, T], tokens that start from zeros; None without segments. along: None, or the key
    of erasures.
    """

    q: NumPy
    k: NumPy
    v: NumPy
    rows: NumPy
    columns: NumPy
    state: NumPy
    scale: NumPy
    e: NumPy
    w: NumPy
    before_decay: bool = False
    resets: NumPy = None
    along: NumPy = None


def _arrays(r: Recurrence, dtype) -> _Arrays:
    def wide(x):
        return _plain(x).astype(dtype)

    H = r.num_heads
    q, k, v = (np.repeat(wide(x), H // x.shape[2], axis=2) for x in (r.q, r.k, r.v))
    rows, columns = np.zeros((*q.shape[:2], H, q.shape[3]), dtype), np.zeros((*q.shape[:2], H, v.shape[3]), dtype)
    decay, e, w, resets = r.decay, None, None, None
    if decay.constant is not None:
        for n, b, tokens in _scans(r):
            rows[b, np.asarray(tokens, int)] += wide(decay.constant)[n][:, None]
    if decay.head is not None:
        rows += wide(decay.head)[..., None]
    if decay.key is not None:
        rows += wide(decay.key)
    if decay.value is not None:
        columns += wide(decay.value)
    if r.segments is not None:
        resets = np.asarray(r.segments.resets)
        rows[resets], columns[resets] = -np.inf, 0
    if r.erasure is not None and r.erasure.beta is not None:
        w = wide(r.erasure.beta)[..., None]
        e = w * k
    elif r.erasure is not None:
        e, w = wide(r.erasure.erase), None if r.erasure.write is None else wide(r.erasure.write)
    before_decay = r.erasure is not None and r.erasure.before_decay
    state = np.zeros(r.state_shape, dtype) if r.initial_state is None else wide(r.initial_state)
    along = None if r.erasure is None or r.erasure.along is None else wide(r.erasure.along)
    return _Arrays(q, k, v, rows, columns, state, wide(r.scale), e, w, before_decay, resets, along)


def _plain(x) -> NumPy:
    """Return x as a NumPy array. Raise TypeError for an array with a mask, which would have no effect."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("arrays must have no mask, got a MaskedArray: pass filled(value)")
    return np.asarray(x)


def _fold(x: NumPy, heads: int) -> NumPy:
    """Return the sums over adjacent heads that share a head of the input: [B, T, H, D] as [B, T, heads, D]."""
    return x.reshape(*x.shape[:2], heads, -1, x.shape[3]).sum(3)
