"""The definition that every kernel is held to: token by token, in NumPy, in float64.

Nothing here is shared with the kernels, the gradient included: that of a gate is <G_t, decayed S_{t-1}>, formed directly
from both states, where kernels use a telescoped sum.
"""

from typing import Any

import numpy as np

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence

NumPy = Any  # a float64 NumPy array, in the place of a JAX array


def reference(r: Recurrence) -> Outputs:
    """S_t = exp(rows_t) S_{t-1} exp(columns_t) + k_t v_t^T,   o_t = scale * S_t^T q_t."""
    q, k, v, rows, columns, state, scale = _float64(r)
    output: NumPy = np.zeros((*q.shape[:3], v.shape[3]))
    final: NumPy = state.copy()
    for n, b, tokens in _scans(r):
        S = state[n]
        for t in tokens:
            S = _step(S, k, v, rows, columns, b, t)
            output[b, t] = scale[n] * np.einsum("hk,hkv->hv", q[b, t], S)
        final[n] = S
    return Outputs(output, final)


def reference_states(r: Recurrence, every: int) -> np.ndarray:
    """The states behind every `every` tokens in the order of the scan: [N, T // every, H, K, V], or packed [J, H, K, V].

    With segments, padding counts as tokens of the row.
    """
    _, k, v, rows, columns, state, _ = _float64(r)
    found = [[] for _ in range(r.num_sequences)]
    for n, b, tokens in _scans(r.replace(segments=None)):
        S, is_token = state[n], None if r.segments is None else r.segments.is_token
        for i, t in enumerate(tokens, start=1):
            if is_token is None or is_token[b, t]:
                S = _step(S, k, v, rows, columns, b, t)
            if i % every == 0:
                found[n].append(S)
    if r.boundaries is None:
        return np.stack([np.stack(each) for each in found])
    return np.stack([S for each in found for S in each])


def reference_gradient(r: Recurrence, d_output, d_final) -> Recurrence:
    """The gradient of <output, d_output> + <final_state, d_final> in every input of r, as a Recurrence.

    With G_t = dL/dS_t:  dq_t = scale S_t do_t,  dk_t = G_t v_t,  dv_t = G_t^T k_t,  d log decay_t = G_t * decayed S_{t-1}.
    """
    q, k, v, rows, columns, state, scale = _float64(r)
    do, dS = np.asarray(d_output, np.float64), np.asarray(d_final, np.float64)
    dq, dk, dv, d_rows, d_columns = map(np.zeros_like, (q, k, v, rows, columns))
    d_initial: NumPy = dS.copy()
    d_scale: NumPy = np.zeros(r.num_sequences)
    d_constant: NumPy = np.zeros((r.num_sequences, r.num_heads))
    for n, b, tokens in _scans(r):
        states = [state[n]]
        for t in tokens:
            states.append(_step(states[-1], k, v, rows, columns, b, t))
        G = dS[n].copy()
        for i in reversed(range(len(tokens))):
            t, S = tokens[i], states[i + 1]
            read = np.einsum("hkv,hv->hk", S, do[b, t])
            dq[b, t] = scale[n] * read
            d_scale[n] += (q[b, t] * read).sum()
            G += scale[n] * q[b, t][..., None] * do[b, t][..., None, :]
            dk[b, t] = np.einsum("hkv,hv->hk", G, v[b, t])
            dv[b, t] = np.einsum("hkv,hk->hv", G, k[b, t])
            decay = np.exp(rows[b, t][..., None] + columns[b, t][..., None, :])
            d_log = G * decay * states[i]
            d_rows[b, t], d_columns[b, t] = d_log.sum(-1), d_log.sum(-2)
            d_constant[n] += d_log.sum((-1, -2))
            G = G * decay
        d_initial[n] = G
    decay = r.decay
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
        reverse=r.reverse,
    )


def _step(S, k, v, rows, columns, b, t):
    decay = np.exp(rows[b, t][..., None] + columns[b, t][..., None, :])
    return S * decay + k[b, t][..., None] * v[b, t][..., None, :]


def _scans(r: Recurrence):
    """(sequence, batch row, its tokens in the order of the scan) of every sequence."""
    T = r.q.shape[1]
    cuts = None if r.boundaries is None else np.asarray(r.boundaries)
    for n in range(r.num_sequences):
        tokens = range(T) if cuts is None else range(cuts[n], cuts[n + 1])
        if r.segments is not None and r.segments.is_token is not None:
            tokens = np.flatnonzero(np.asarray(r.segments.is_token)[n])
        yield n, (n if cuts is None else 0), (tokens[::-1] if r.reverse else tokens)


def _float64(r: Recurrence) -> tuple[NumPy, ...]:
    """Every input in float64, heads repeated, gates spread to rows and columns of the state."""
    H = r.num_heads

    def wide(x) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    q, k, v = (np.repeat(wide(x), H // x.shape[2], axis=2) for x in (r.q, r.k, r.v))
    rows, columns, decay = np.zeros((*q.shape[:2], H, q.shape[3])), np.zeros((*q.shape[:2], H, v.shape[3])), r.decay
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
    state = np.zeros(r.state_shape) if r.initial_state is None else wide(r.initial_state)
    return q, k, v, rows, columns, state, wide(r.scale)


def _fold(x: NumPy, heads: int) -> NumPy:
    return x.reshape(*x.shape[:2], heads, -1, x.shape[3]).sum(3)
