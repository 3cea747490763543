"""Compute softmax attention whose keys and values come from one short row of each token, which is all that the cache holds."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.core.recurrence import is_symbol
from glax.nn.arguments import checked
from glax.nn.choice import Choice
from glax.nn.layer import Layer
from glax.nn.norms import RMSNorm
from glax.nn.parts import EMBED, HEADS, by_head, check_sizes, kernel_of, linear, merged
from glax.nn.passes import Rows, State
from glax.nn.rotary import Rotation, checked_rotation, rotate

EXPANDED = 4  # the most cached rows for each token for which they are expanded: more would take too much memory


class MultiHeadLatentAttention(Layer):
    """Compute multi-head latent attention. In every head h:

        c_t = RMSNorm(W_c x_t)   [L]       k_t = [W_k^h c_t, Rot_t W_s x_t]       v_t = W_v^h c_t
        q_t = [W_q^h x_t, Rot_t W_r^h x_t]   o_t = sum over s <= t of softmax_s(scale q_t^T k_s) v_s        y_t = W_o o_t

    Rot_t rotates by the position. The second parts are one key for all heads, of shared_width channels. With query_rank, W_q and
    W_r read RMSNorm(W_u x_t) in place of x_t. The cache holds c_t and the shared key, L + shared_width numbers a token. Where
    there is a cache, queries read it as it is: q_t^T W_k c_s = (W_k^T q_t)^T c_s, and W_v is applied to the sum of c_s.

    width:         the width of x and y. num_heads: the heads of q. latent_width: L.
    query_rank:    the width of W_u x_t; None for no W_u.
    head_width:    the channels of W_k^h c_t. shared_width: those of the shared key; without one if None, and without rotation.
    value_width:   the channels of v; head_width if None.
    theta:         the base of the rotation; no rotation if None. frequencies: as in `glax.nn.Attention`. interleaved: whether
                   channels 2 i and 2 i + 1 are a pair; else i and i + shared_width / 2.
    head_gated:    whether sigmoid(w^h . x_t) multiplies o_t. gated: whether sigmoid(W_g^h x_t) [value_width] does.
    scale:         the factor of the scores; (head_width + shared_width) ** -0.5 if None.
    bias:          whether W_c, W_s and W_u have a bias. output_bias: whether W_o has one.
    norm_eps:      the epsilon of both norms.

    dtype, param_dtype and kernel_init are as in `glax.nn.linear_attention.MixerOptions`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the cache, a dict: `key` [N, max_length, 1, L + shared_width] in `dtype`, float32 if None, and `length` [N], the
    tokens read. `glax.nn.Attention` says how to go on from it.

    DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.

    >>> layer = nn.MultiHeadLatentAttention(64, num_heads=2, latent_width=16, head_width=32, shared_width=8, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        latent_width: int,
        head_width: int,
        shared_width: int | None = None,
        value_width: int | None = None,
        query_rank: int | None = None,
        theta: float | None = 10000.0,
        frequencies: Sequence[float] | Rotation | None = None,
        interleaved: bool = False,
        gated: bool = False,
        head_gated: bool = False,
        scale: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        norm_eps: float = 1e-6,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        value_width = head_width if value_width is None else value_width
        rotation = None if shared_width is None else checked_rotation(theta, None, shared_width, frequencies)
        shared_width = shared_width or 0
        check_sizes(head_width=head_width, value_width=value_width, latent_width=latent_width)
        self.width, self.num_heads, self.head_width, self.shared_width = width, num_heads, head_width, shared_width
        self.latent_width, self.value_width, self.dtype = latent_width, value_width, dtype
        self.rotation, self.interleaved = rotation, interleaved
        self.scale = (head_width + shared_width) ** -0.5 if scale is None else scale
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        norms: dict[str, Any] = dict(epsilon=norm_eps, param_dtype=param_dtype)
        queries = num_heads * (head_width + shared_width)
        self.query_down = None if query_rank is None else linear(width, query_rank, (EMBED, None), bias=bias, **options)
        self.query_norm = None if query_rank is None else RMSNorm(query_rank, **norms)
        inputs, axis = (width, EMBED) if query_rank is None else (query_rank, None)
        self.query = linear(inputs, queries, (axis, HEADS), **options)
        self.latent = linear(width, latent_width + shared_width, (EMBED, None), bias=bias, **options)
        self.latent_norm = RMSNorm(latent_width, **norms)
        self.expand = linear(latent_width, num_heads * (head_width + value_width), (None, HEADS), **options)
        if gated and head_gated:
            raise ValueError("head_gated must be False with gated=True: the output has one gate")
        gates = num_heads * (value_width if gated else 1)
        self.gate = linear(width, gates, (EMBED, HEADS), **options) if gated or head_gated else None
        self.output = linear(num_heads * value_width, width, (HEADS, EMBED), bias=output_bias, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        if max_length is None:
            raise ValueError("max_length must be given: a cache of keys has as many rows a sequence")
        check_sizes(max_length=max_length)
        shape = (batch, max_length, 1, self.latent_width + self.shared_width)
        return dict(key=jnp.zeros(shape, self.dtype or jnp.float32), length=jnp.zeros(batch, jnp.int32))

    def query_latent(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows query_rank"]:
        """Return what W_q and W_r read: RMSNorm(W_u x), or x where there is no W_u."""
        return x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        return self.attend(x, self.query_latent(x), state, rows)

    def attend(
        self, x: Array, query_latent: Array, state: State, rows: Rows, choice: Choice | None = None
    ) -> tuple[Array, State]:
        """Return y [*rows, width] and the new state.

        x: [*rows, width]. query_latent: RMSNorm(W_u x) [*rows, query_rank], or x without W_u. state, rows: as in
        `glax.nn.layer.Layer.mix`. choice: how each row chooses the blocks of keys that it reads, for a state that also has
        "index"; all keys if None.
        """
        q = by_head(self.query(query_latent), self.num_heads)
        q, q_shared = q[..., : self.head_width], q[..., self.head_width :]
        row = self.latent(x)
        c, k_shared = self.latent_norm(row[..., : self.latent_width]), row[..., None, self.latent_width :]
        if self.rotation is not None:
            positions, _ = rows.positions(state.get("length"))
            if self.interleaved:  # scores do not depend on the order of channels, so it is not brought back
                q_shared, k_shared = halves_of_pairs(q_shared), halves_of_pairs(k_shared)
            q_shared, k_shared = (
                rotate(y, positions, self.rotation, rows.last_positions) for y in (q_shared, k_shared)
            )
        stored = jnp.concatenate([c[..., None, :], k_shared], -1)
        if "key" not in state:
            k, v = self.expanded(stored)
            q = jnp.concatenate([q, q_shared], -1)
            o, cache = rows.attend(q, k, v, {}, None, self.scale, stored, choice=choice)
        elif self.should_absorb(rows.mean_length, state["key"].shape[1]):  # one token always does
            o, cache = self.absorbed(q, q_shared, stored, state, rows, choice)
        else:
            q = jnp.concatenate([q, q_shared], -1)
            o, cache = rows.attend(q, stored, stored, state, None, self.scale, expanded=self.expanded, choice=choice)
        if self.gate is not None:
            o = o * jax.nn.sigmoid(by_head(self.gate(x), self.num_heads).astype(jnp.float32)).astype(o.dtype)
        return self.output(merged(o)), cache

    def should_absorb(self, tokens: int, cached: int) -> bool:
        """Return whether queries should read the latents in a cache directly, rather than keys and values expanded from all its
        rows.

        tokens: the tokens that each sequence reads in this call. cached: the rows of its cache. With w = head_width +
        value_width, expanding takes latent_width w products for each row and head. Reading a row directly takes 2 latent_width
        - w more products for each token and head. The result is True where reading directly is cheaper. It is also True with
        more than EXPANDED cached rows for each token, where the keys and values of all rows would take too much memory, and if
        a size is a symbol of `jax.export`.
        """
        if is_symbol(tokens) or is_symbol(cached):
            return True
        width = self.head_width + self.value_width
        return tokens * (2 * self.latent_width - width) < self.latent_width * width or cached > EXPANDED * tokens

    def expanded(self, stored: Float[Array, "*rows 1 stored"]) -> tuple[Array, Array]:
        """Return the keys and values of rows of a cache, [*rows, H, head_width + shared_width] and [*rows, H, value_width].

        stored: rows of the array `key` of this layer's state: latents behind their norm, latent_width channels, and then the
        shared key, which is rotated already.
        """
        c, k_shared = stored[..., 0, : self.latent_width], stored[..., self.latent_width :]
        k, v = jnp.split(by_head(self.expand(c), self.num_heads), [self.head_width], axis=-1)
        shared = jnp.broadcast_to(k_shared, (*k.shape[:-1], self.shared_width))
        return jnp.concatenate([k, shared], -1), v

    def absorbed(
        self, q: Array, q_shared: Array, stored: Array, state: State, rows: Rows, choice: Choice | None = None
    ) -> tuple[Array, State]:
        """Return (o [*rows, H, value_width] before the gate and W_o, the new cache). Queries read the latents of the cache
        directly: W_k is applied to q, and W_v to the weighted sum of latents.

        q: the part of the queries that reads W_k^h c_t, [*rows, H, head_width].
        q_shared: the rotated part that reads the shared key, [*rows, H, shared_width].
        stored: the new rows of the cache, [*rows, 1, latent_width + shared_width]: latents after their norm, then rotated
        shared keys.
        state: the cache. rows: as in `glax.nn.layer.Layer.mix`. choice: how each row chooses the keys that it reads; all keys
        if None.
        """
        kernel = kernel_of(self.expand).astype(q.dtype).reshape(self.latent_width, self.num_heads, -1)
        to_key, to_value = kernel[..., : self.head_width], kernel[..., self.head_width :]
        q = jnp.concatenate([jnp.einsum("...hd,rhd->...hr", q, to_key), q_shared], -1)
        o, cache = rows.attend(q, stored, stored[..., : self.latent_width], state, None, self.scale, choice=choice)
        return jnp.einsum("...hr,rhv->...hv", o, to_value), cache


def halves_of_pairs(x: Float[Array, "*rows H D"]) -> Float[Array, "*rows H D"]:
    """Return x with the channels of each head in the order 0, 2, 4, ..., 1, 3, 5, ..."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
