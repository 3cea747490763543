"""Launch the token-by-token kernels: the forward, and one step of decoding."""

import jax.numpy as jnp

from glax._src.core.erasure import arrays_of
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.triton import recurrent_kernels
from glax._src.kernels.triton.config import TokenConfig, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch
from glax._src.kernels.triton.segments import segments_of


def gates_of(r: Recurrence):
    """Return the (head, key, value) arrays and their flags. An absent gate is replaced by an array that is not read."""
    d = r.decay
    head = d.head if d.constant is None else d.constant
    arrays = [r.scale if x is None else x for x in (head, d.key, d.value)]
    form = "none" if d.head is None else "head"
    if d.constant is not None:
        form = "constant"
    return arrays, dict(HEAD=form, KEY=d.key is not None, VALUE=d.value is not None)


def erasure_operands(r: Recurrence):
    """Return the (beta, erase, write) arrays and their flag. An absent one is replaced by an array that is not read."""
    form = "none" if r.erasure is None else r.erasure.form
    return [r.scale if x is None else x for x in arrays_of(r.erasure)], dict(ERASURE=form)


def shape(r: Recurrence, columns: int) -> dict:
    _, H, K, V = r.state_shape
    return dict(H=H, HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2], K=K, V=V, BK=width(K), BV=columns)


def recurrent(r: Recurrence, config: TokenConfig) -> Outputs:
    """Compute the outputs [B, T, H, V] and the final states [N, H, K, V] token by token."""
    B, T = r.q.shape[:2]
    N, H, K, V = r.state_shape
    segments = segments_of(r, T, T)
    (gates, flags), (erasure, erases) = gates_of(r), erasure_operands(r)
    start = r.scale if r.initial_state is None else r.initial_state
    o, final = launch(
        recurrent_kernels.recurrent,
        -(-V // config.columns) * H * segments.count,
        (r.q, r.k, r.v, *gates, *erasure, r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), ((N, H, K, V), jnp.float32)],
        **shape(r, config.columns), **flags, **erases, SIGN=-1 if r.reverse else 1, START=r.initial_state is not None,
        warps=config.warps, stages=2,
    )  # fmt: skip
    return Outputs(o, final)


def recurrent_step(r: Recurrence, pool, slots, config: TokenConfig):
    """Advance B sequences by one token; return the outputs [B, 1, H, V] and the pool [P, H, K, V].

    The pool is updated in place if the caller donates it. Otherwise JAX copies it first.
    """
    B, V = r.q.shape[0], pool.shape[3]
    (gates, flags), (erasure, erases) = gates_of(r), erasure_operands(r)
    o, pool = launch(
        recurrent_kernels.step_passed_pool if ALIASES_ARE_PASSED else recurrent_kernels.step,
        -(-V // config.columns) * r.num_heads * B,
        (r.q, r.k, r.v, *gates, *erasure, r.scale, slots, pool),
        [((B, 1, r.num_heads, V), r.q.dtype), (pool.shape, pool.dtype)],
        in_place={11: 1},
        **shape(r, config.columns), **flags, **erases, warps=config.warps, stages=1,
    )  # fmt: skip
    return o, pool
