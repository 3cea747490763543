"""What glax is measured against: gated linear attention as one writes it in plain JAX, under JAX's own autodiff.

Every function takes query, key [B, T, H, K], value [B, T, H, V], float32, and log decays g: [B, T, H, K], a gate per
key channel, or [B, T, H], a gate per head. It returns the output [B, T, H, V], with the scale K ** -0.5.
"""

import functools

import jax.numpy as jnp
from jax import lax


def token_by_token(q, k, v, g):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t, by lax.scan. Autodiff keeps a state a token."""
    B, _, H, K = q.shape
    per_head = g.ndim == 3
    decay = jnp.exp(g)[..., None, None] if per_head else jnp.exp(g)[..., None]

    def step(S, row):
        q, k, v, decay = row
        S = S * decay + k[..., :, None] * v[..., None, :]
        return S, jnp.einsum("bhk,bhkv->bhv", q, S)

    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (q * K**-0.5, k, v, decay))
    _, o = lax.scan(step, jnp.zeros((B, H, K, v.shape[3]), q.dtype), rows)
    return jnp.moveaxis(o, 0, 1)


def in_chunks(q, k, v, g, size):
    """The chunked form: all that needs no state in batched products, and a lax.scan that passes the state along.

    With G the sum of g inside the chunk, o_i = (q_i e^{G_i}) S + sum_{j <= i} (q_i . k_j e^{G_i - G_j}) v_j and
    S' = e^{G_last} S + sum_j (k_j e^{G_last - G_j}) v_j^T. A gate per channel splits e^{G_i - G_j} about the middle of
    the chunk, which overflows if half a chunk decays by more than e^-88: correct for gates such as log-sigmoid only.
    """
    B, T, H, K = q.shape
    V, per_head = v.shape[3], g.ndim == 3

    def split(x):
        # [chunks, B, H, size, width]
        return x.reshape(B, T // size, size, H, -1).transpose(1, 0, 3, 2, 4)

    q, k, v, g = split(q * K**-0.5), split(k), split(v), split(g)
    G = jnp.cumsum(g, 3)
    last = G[..., -1:, :]
    causal = jnp.tril(jnp.ones((size, size), bool))
    if per_head:
        pairs = q @ k.mT * jnp.exp(jnp.where(causal, G - G.mT, -jnp.inf))
    else:
        M = G - G[..., size // 2, None, :]
        pairs = jnp.where(causal, (q * jnp.exp(M)) @ (k * jnp.exp(-M)).mT, 0)
    added = (k * jnp.exp(last - G)).mT @ v

    def step(S, chunk):
        decay, added = chunk
        return S * decay + added, S

    _, before = lax.scan(step, jnp.zeros((B, H, K, V), q.dtype), (jnp.exp(last).mT, added))
    o = (q * jnp.exp(G)) @ before + pairs @ v
    return o.transpose(1, 0, 3, 2, 4).reshape(B, T, H, V)


BASELINES = {
    "scan": token_by_token,
    "chunks of 64": functools.partial(in_chunks, size=64),
    "chunks of 32": functools.partial(in_chunks, size=32),
}
