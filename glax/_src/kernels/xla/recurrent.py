"""One token at a time: the recurrence as it is written down."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.recurrence import Outputs, Recurrence, is_symbol, spread_heads, varying_like
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels.xla import chunk_parallel


def priority(r: Recurrence) -> int:
    """Above `chunked` where a chunk would be mostly padding, and where that is slower but the state stays in a core's cache."""
    T = r.q.shape[1]
    return 2 if (not is_symbol(T) and T < 16) or (stays_in_cache(r) and not chunk_parallel.suits(r)) else 0


# A state is rounded at every token here, and what that adds up to grows with their number. Chunks carry what it leaves out.
LONGEST = 2**12


def stays_in_cache(r: Recurrence) -> bool:
    """Whether this is faster than chunk after chunk: on CPUs while the whole state stays in a core's cache, up to LONGEST tokens.

    Measured, float32, T = 1024, 2 cores: 5.2 ms against 6.6 at 8 heads of 64 x 64, 3.6 against 3.5 at 2 of 128 x 128,
    10 against 8.5 at 4 of those.
    """
    if r.is_symbolic:
        return False
    head = r.q.shape[3] * r.v.shape[3]
    small = head <= 2**12 and r.q.shape[0] * r.num_heads * head <= 2**15
    small &= r.q.shape[1] <= LONGEST
    return Backend.here() is Backend.CPU and small and r.boundaries is None


def split_decay(log: Float[Array, "T *rest"]) -> tuple[Array, Array | None]:
    """exp(log) as (whole, rest), so that S exp(log) = S whole + S rest; rest is None where it is 0.

    A single token is a step of decoding. The same gate may return at the next step, and exp(log) would round alike there:
    1e5 steps of -9e-6 are 3e-3 off. S whole + S rest rounds anew with every S. Longer scans round in turn.
    """
    if log.shape[0] != 1 or log.dtype != jnp.float32:
        return decay_by_token(log), None
    mild = jnp.abs(log) < 2.0**-6
    return jnp.where(mild, 1, jnp.exp(log)), jnp.where(mild, mild_expm1(log), 0)


def clear_padding(x, blank, is_token):
    """x, or its parts, where the row is a token; else what changes nothing."""
    if isinstance(x, tuple):
        return tuple(clear_padding(part, value, is_token) for part, value in zip(x, blank, strict=True))
    return None if x is None else jnp.where(is_token, x, blank)


def mild_expm1(log: Array) -> Array:
    """exp(log) - 1, to 1e-11 for |log| < 1/64."""
    return log * (1 + log * (1 / 2 + log * (1 / 6 + log * (1 / 24))))


def advance(S: Float[Array, "B H K V"], added: Float[Array, "B H K V"], decays) -> Float[Array, "B H K V"]:
    """S exp(logs) + added, of pairs (decay split in two or None, the axes of S that it lacks).

    The last rest is added to what the token brings before either meets S: by itself it may be less than half a digit of S,
    and would round to nothing at every token.
    """
    split = [
        [None if x is None else jnp.expand_dims(x, axes) for x in decay] for decay, axes in decays if decay is not None
    ]
    for i, (whole, rest) in enumerate(split):
        last = i == len(split) - 1
        if rest is not None:
            S, added = (S * whole, S * rest + added) if last else (S * whole + S * rest, added)
        else:
            S = S * whole
    return S + added


def decay_by_token(log: Float[Array, "T *rest"]) -> Float[Array, "T *rest"]:
    """exp(log), the mildest rounded up or down in turn.

    Equal gates round alike, and thousands of tokens' decays multiply: 2600 times -1e-6 rounded to nearest are 3e-5 off.
    So where a state lives for many tokens, a different fraction of the last digit is added at each before 1 + expm1(log)
    rounds, such that roundings up and down balance over any stretch of tokens. A gate of 0 stays exactly 1.
    """
    if log.dtype != jnp.float32:
        return jnp.exp(log)
    # Multiples of the golden ratio modulo 1 fill it evenly.
    turns = jnp.arange(log.shape[0], dtype=jnp.uint32) * np.uint32(2654435769)
    fraction = turns.astype(jnp.float32).reshape(-1, *[1] * (log.ndim - 1)) * 2.0**-32 - 0.5
    digit = jnp.where(log < 0, 2.0**-24, 2.0**-23)  # the distance of float32 numbers below and above 1
    return jnp.where(jnp.abs(log) < 2.0**-6, 1 + (mild_expm1(log) + fraction * digit), jnp.exp(log))


@kernel_registry.register("recurrent", Platform.XLA, Backend.ANY, priority=priority)
def recurrent(r: Recurrence, *, config) -> Outputs:
    """S_t = exp(rows_t) S_{t-1} exp(columns_t) + k_t v_t^T,   o_t = scale * S_t^T q_t, by lax.scan over T."""
    H, decay, packed = r.num_heads, r.decay, r.boundaries is not None
    head = decay.head if decay.constant is None else r.by_token(decay.constant)
    by_time = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (r.q, r.k, r.v, head, decay.key, decay.value)]
    by_time[3:] = [None if x is None else split_decay(x.astype(r.dtype)) for x in by_time[3:]]
    neutral = (0, 0, 0, (1, 0), (1, 0), (1, 0))  # what stands for a padding row
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
        return lax.dynamic_update_index_in_dim(states, S, n, 0) if packed else S, o.astype(r.q.dtype)

    rows = (by_time, places)
    rows = jax.tree.map(lambda x: varying_like(x, r.q), rows)
    final, output = lax.scan(step, r.start_state, rows, reverse=r.reverse)
    return Outputs(jnp.moveaxis(output, 0, 1), final)
