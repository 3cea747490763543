"""Compute the recurrence token by token, by `lax.scan` over T:

    S_t = exp(rows_t) S_{t-1} exp(columns_t) + k_t v_t^T        S: [B, H, K, V]
    o_t = scale * S_t^T q_t                                     o: [B, H, V]

rows and columns are the log decays of the rows [K] and columns [V] of S.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.decay import USUAL_FORMS
from glax._src.core.recurrence import Outputs, Recurrence, is_symbol, spread_heads, varying_like
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels.xla import chunk_parallel
from glax._src.kernels.xla.delta_recurrent import delta_by_token, delta_gradient_by_token
from glax._src.kernels.xla.isolated import isolate


def priority(r: Recurrence) -> int:
    """Return 2, above the 1 of `chunked`, for fewer than 16 tokens, and without an erasure also where the chunk scan would be
    slower (`stays_in_cache`) and the chunk-parallel form does not run. Return 0 otherwise."""
    T = r.q.shape[1]
    if r.erasure is not None:
        return 2 if not is_symbol(T) and T < 16 else 0
    return 2 if (not is_symbol(T) and T < 16) or (stays_in_cache(r) and not chunk_parallel.suits(r)) else 0


# The state is rounded at every token, and the error grows with the number of tokens. The chunk scan carries the rounding error.
LONGEST = 2**12


def stays_in_cache(r: Recurrence) -> bool:
    """Return whether, on a CPU and without packing, the state is small enough to stay in a core's cache and T is at most
    LONGEST: there this kernel is faster than the chunk scan.

    The bounds, 2^12 elements per head and 2^15 in all, were measured in float32 on a machine with two cores.
    """
    if r.is_symbolic:
        return False
    head = r.q.shape[3] * r.v.shape[3]
    small = head <= 2**12 and r.q.shape[0] * r.num_heads * head <= 2**15
    small &= r.q.shape[1] <= LONGEST
    return Backend.here() is Backend.CPU and small and r.boundaries is None


def split_decay(log: Float[Array, "T *rest"]) -> tuple[Array, Array | None]:
    """Return exp(log) as (whole, rest), such that S exp(log) = S whole + S rest. rest is None where it is 0.

    A call with a single token is a decode step. Decode steps may repeat the same gate, whose exp(log) rounds alike in each:
    after 1e5 steps with gates of -9e-6 the state is wrong by 3e-3. S whole + S rest rounds differently for every S. Calls with
    more tokens use `decay_by_token`.
    """
    if log.shape[0] != 1 or log.dtype != jnp.float32:
        return decay_by_token(log), None
    mild = jnp.abs(log) < 2.0**-6
    return jnp.where(mild, 1, jnp.exp(log)), jnp.where(mild, mild_expm1(log), 0)


def clear_padding(x, blank, is_token):
    """Return x where is_token is True, and the neutral value `blank` elsewhere; None for None. If x is a tuple, blank is a
    tuple too, and each element is treated so."""
    if isinstance(x, tuple):
        return tuple(clear_padding(part, value, is_token) for part, value in zip(x, blank, strict=True))
    return None if x is None else jnp.where(is_token, x, blank)


def mild_expm1(log: Array) -> Array:
    """Compute exp(log) - 1 with an error below 1e-11 for |log| < 1/64."""
    return log * (1 + log * (1 / 2 + log * (1 / 6 + log * (1 / 24))))


def advance(S: Float[Array, "B H K V"], added: Float[Array, "B H K V"], decays) -> Float[Array, "B H K V"]:
    """Return S times the decays, plus `added`: [B, H, K, V].

    decays: pairs (result of `split_decay` for one token or None, the axes of S that the decay lacks). S * rest is added to
    `added` first: it may be less than half a digit of S, and would be rounded away at every token if it were added to S alone.
    """
    split = [
        (jnp.expand_dims(whole, axes), None if rest is None else jnp.expand_dims(rest, axes))
        for (whole, rest), axes in ((decay, axes) for decay, axes in decays if decay is not None)
    ]
    for i, (whole, rest) in enumerate(split):
        last = i == len(split) - 1
        if rest is not None:
            S, added = (S * whole, S * rest + added) if last else (S * whole + S * rest, added)
        else:
            S = S * whole
    return S + added


def decay_by_token(log: Float[Array, "T *rest"]) -> Float[Array, "T *rest"]:
    """Return exp(log) [T, ...]; in float32, where |log| < 1/64, with a rounding that varies from token to token.

    Equal gates round alike, so the error grows with the number of tokens: the product of 2600 rounded decays e^-1e-6 is wrong
    by 3e-5. Before 1 + expm1(log) is rounded, a different fraction of the last digit is therefore added at each token. The
    roundings up and down balance over any range of tokens. A gate of 0 gives exactly 1.
    """
    if log.dtype != jnp.float32:
        return jnp.exp(log)
    # Multiples of the golden ratio modulo 1 fill it evenly.
    turns = jnp.arange(log.shape[0], dtype=jnp.uint32) * np.uint32(2654435769)
    fraction = turns.astype(jnp.float32).reshape(-1, *[1] * (log.ndim - 1)) * 2.0**-32 - 0.5
    digit = jnp.where(log < 0, 2.0**-24, 2.0**-23)  # the distance of float32 numbers below and above 1
    return jnp.where(jnp.abs(log) < 2.0**-6, 1 + (mild_expm1(log) + fraction * digit), jnp.exp(log))


@kernel_registry.register(
    "recurrent",
    Platform.XLA,
    Backend.ANY,
    priority=priority,
    erasing_forms=USUAL_FORMS,  # the gates that `delta_by_token` reads
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    mixes_segments=lambda r: True,
    isolate=isolate,
)
def recurrent(r: Recurrence, *, config) -> Outputs:
    """Compute the outputs and final states by a scan over tokens."""
    if r.erasure is not None:
        return delta_by_token(r)
    H, decay, packed = r.num_heads, r.decay, r.boundaries is not None
    head = decay.head if decay.constant is None else r.by_token(decay.constant)
    by_time = [jnp.moveaxis(x, 1, 0) for x in (r.q, r.k, r.v)]
    logs = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (head, decay.key, decay.value)]
    by_time += [None if x is None else split_decay(x.astype(r.dtype)) for x in logs]
    neutral = (0, 0, 0, (1, 0), (1, 0), (1, 0))  # the neutral values, for a row that is no token
    places = (r.sequence_of, r.is_token) if packed else None

    def step(states, row):
        tensors, place = row
        n, is_token = place or (None, None)
        # q: [B, H, K]   k: [B, H, K]   v: [B, H, V]   head: [B, H]   key: [B, H, K]   value: [B, H, V]
        if packed:
            tensors = [clear_padding(x, blank, is_token) for x, blank in zip(tensors, neutral, strict=True)]
        q, k, v, head, key, value = jax.tree.map(lambda x: x.astype(r.dtype), tensors)
        q, k, v = (spread_heads(x, H, axis=1) for x in (q, k, v))
        # [B, H, K, V]
        S = lax.dynamic_index_in_dim(states, n) if packed else states
        S = advance(S, k[..., :, None] * v[..., None, :], ((head, (2, 3)), (key, (3,)), (value, (2,))))
        scale = r.scale[n] if packed else r.scale[:, None, None]
        # [B, H, V]
        o = jnp.einsum("bhk,bhkv->bhv", q * scale, S, precision=lax.Precision.HIGHEST)
        if is_token is not None:  # a query of 0 does not stop NaN of the last sequence
            o = jnp.where(is_token, o, 0)
        return lax.dynamic_update_index_in_dim(states, S, n, 0) if packed else S, o.astype(r.q.dtype)

    rows = (by_time, places)
    rows = jax.tree.map(lambda x: varying_like(x, r.q), rows)
    final, output = lax.scan(step, r.start_state, rows, reverse=r.reverse)
    return Outputs(jnp.moveaxis(output, 0, 1), final)


def vjp_supports(r: Recurrence) -> str | None:
    """Return why this kernel does not compute the gradient of r, or None: r must have an erasure, and T must not be a
    symbol."""
    if r.erasure is None:
        return "takes recurrences that erase; the gradient of others is chunked's"
    return "takes a T that is known while tracing, not a symbol" if is_symbol(r.q.shape[1]) else None


@kernel_registry.register(
    "recurrent.vjp",
    Platform.XLA,
    Backend.ANY,
    priority=priority,
    supports=vjp_supports,
    erasing_forms=USUAL_FORMS,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    mixes_segments=lambda r: True,
    isolate=isolate,
)
def recurrent_vjp(r: Recurrence, d_output, d_final, *, config) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure, token by token."""
    return delta_gradient_by_token(r, d_output, d_final)
