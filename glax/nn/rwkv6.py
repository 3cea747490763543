"""Provide RWKV-6 (Finch): time mixing and channel mixing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.norms import LayerNorm
from glax.nn.parts import (
    EMBED,
    HEADS,
    MLP,
    activation,
    by_head,
    check_divides,
    check_sizes,
    for_rows,
    kernel_of,
    linear,
    merged,
    parameter,
)
from glax.nn.passes import Rows, State

MIXED = (
    "receptance",
    "decay",
    "key",
    "value",
    "output_gate",
)  # the projections that read a mixture of each token and the token before


def token_shift(x: Float[Array, "*rows D"], state: Array | None, rows: Rows) -> tuple[Array, Array]:
    """Return (x_{t-1} - x_t, the new state [N, 1, D]: the last row of each sequence).

    state: x_{t-1} for the first row of each sequence, [N, 1, D]; zeros if None. rows: as in `glax.nn.layer.Layer.mix`.
    """
    (before, own), after = rows.window(x, 2, state)
    return before - own, after


class RWKV6Attention(Layer):
    """Compute RWKV-6's time mixing. With d_t = x_{t-1} - x_t, in every head:

        m_t = B tanh(A (x_t + mu d_t)) + b                   for each of r, w, k, v and g
        r_t, k_t, v_t, g_t = W (x_t + m_t d_t)               w_t = -exp(W_2 tanh(W_1 (x_t + m_t d_t)) + c)
        o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t            S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T
        y_t = W_o (GroupNorm(o_t) * SiLU(g_t))

    width:      the width of x and y. num_heads: H; divides key_width and value_width.
    key_width, value_width: the widths of all heads together; width // 2 and width if None.
    mix_rank:   the rank of B A, for each of the five. decay_rank: the rank of W_2 W_1.
    gate_fn:    the name of the function of g_t, in place of SiLU: `glax.nn.linear_attention.Options` lists the names.
    norm_eps, elementwise_affine: the epsilon of GroupNorm, and whether it has a scale.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`. If kernel_init is
    None, kernels start Xavier uniform with a gain of 2^(-5/2).

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict: S [N, H, K, V] in float32 as `recurrent`, and the last token [N, 1, width] as `shift`.

    Peng et al. 2024, https://arxiv.org/abs/2404.05892.

    >>> layer = nn.RWKV6Attention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        key_width: int | None = None,
        value_width: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        gate_fn: str = "swish",
        norm_eps: float = 1e-5,
        elementwise_affine: bool = True,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        keys = width // 2 if key_width is None else key_width
        values = width if value_width is None else value_width
        check_sizes(key_width=keys, value_width=values)
        check_divides("num_heads", num_heads, "key_width", keys)
        check_divides("num_heads", num_heads, "value_width", values)
        activation("gate_fn", gate_fn)
        self.width, self.num_heads, self.keys, self.values = width, num_heads, keys, values
        self.mix_rank, self.gate_fn, self.dtype, self.recurrence = mix_rank, gate_fn, dtype, recurrence
        xavier = nnx.initializers.variance_scaling(2**-5, "fan_avg", "uniform")
        options: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init or xavier, rngs=rngs
        )
        self.mix_down = linear(width, 5 * mix_rank, (EMBED, None), **options)
        self.mix_up = linear(5 * mix_rank, width, (None, EMBED), **options)
        self.mix_first = parameter(jnp.zeros(width, param_dtype), EMBED)
        self.mix_bias = parameter(jnp.zeros((5, width), param_dtype), None, EMBED)
        self.receptance = linear(width, keys, (EMBED, HEADS), **options)
        self.decay_down = linear(width, decay_rank, (EMBED, None), **options)
        self.decay_up = linear(decay_rank, keys, (None, HEADS), bias=True, **options)
        self.key = linear(width, keys, (EMBED, HEADS), **options)
        self.value = linear(width, values, (EMBED, HEADS), **options)
        self.output_gate = linear(width, values, (EMBED, HEADS), **options)
        self.bonus = parameter(jnp.zeros((num_heads, keys // num_heads), param_dtype), HEADS, None)
        norm: dict[str, Any] = dict(epsilon=norm_eps, groups=num_heads, elementwise_affine=elementwise_affine)
        self.norm = LayerNorm(values, **norm, param_dtype=param_dtype)
        self.output = linear(values, width, (HEADS, EMBED), **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.num_heads, self.keys // self.num_heads, self.values // self.num_heads)
        shift = jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32)
        return dict(recurrent=jnp.zeros(shape, jnp.float32), shift=shift)

    def mixtures(self, x: Float[Array, "*rows width"], d: Float[Array, "*rows width"]) -> list[Array]:
        """Return x_t + m_t d_t for each of r, w, k, v and g, in this order, [*rows, width] each. d: x_{t-1} - x_t."""
        low = jnp.tanh(self.mix_down(x + d * for_rows(x, self.mix_first[...], x.dtype)))
        low = by_head(low, 5)  # [*rows, 5, mix_rank]
        up = kernel_of(self.mix_up).astype(x.dtype).reshape(5, self.mix_rank, self.width)
        m = jnp.einsum("...nr,nrh->n...h", low, up)
        return [x + (m[i] + for_rows(x, self.mix_bias[i], x.dtype)) * d for i in range(5)]

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        d, shift = token_shift(x, state.get("shift"), rows)
        mixed = dict(zip(MIXED, self.mixtures(x, d), strict=True))
        r, k, v = self.receptance(mixed["receptance"]), self.key(mixed["key"]), self.value(mixed["value"])
        w = self.decay_up(jnp.tanh(self.decay_down(mixed["decay"])))
        r, k, v, w = (by_head(y, self.num_heads) for y in (r, k, v, w))
        options: dict[str, Any] = dict(
            gk=-jnp.exp(w.astype(jnp.float32)), bonus=self.bonus[...].astype(jnp.float32), softmax_scale=1.0
        )
        o, after = rows.recurrent(self.recurrence, r, k, v, state.get("recurrent"), **options)
        gate = activation("gate_fn", self.gate_fn)(self.output_gate(mixed["output_gate"]))
        return self.output(self.norm(merged(o)) * gate), dict(recurrent=after, shift=shift)


class RWKV6FeedForward(Layer):
    """Compute RWKV-6's channel mixing. With d_t = x_{t-1} - x_t:

        y_t = sigmoid(W_r (x_t + mu_r d_t)) * W_v act(W_k (x_t + mu_k d_t))

    width: the width of x and y. inside: the number of outputs of W_k. act: the name of a function in
    `glax.nn.parts.ACTIVATIONS`; "sqrelu" is the squared ReLU.
    dtype, param_dtype and kernel_init are as in `glax.nn.linear_attention.MixerOptions`; mu_r and mu_k start as 0.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict of the last token [N, 1, width] as `shift`.

    Peng et al. 2024, https://arxiv.org/abs/2404.05892.

    >>> layer = nn.RWKV6FeedForward(64, 128, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        *,
        act: str = "sqrelu",
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        activation("act", act)
        self.width, self.act, self.dtype = width, act, dtype
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        self.key = linear(width, inside, (EMBED, MLP), **options)
        self.key_mix = parameter(jnp.zeros(width, param_dtype), EMBED)
        self.value = linear(inside, width, (MLP, EMBED), **options)
        self.receptance = linear(width, width, (EMBED, MLP), **options)
        self.receptance_mix = parameter(jnp.zeros(width, param_dtype), EMBED)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(shift=jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        d, shift = token_shift(x, state.get("shift"), rows)
        key = activation("act", self.act)(self.key(x + d * for_rows(x, self.key_mix[...], x.dtype)))
        receptance = self.receptance(x + d * for_rows(x, self.receptance_mix[...], x.dtype))
        return jax.nn.sigmoid(receptance) * self.value(key), dict(shift=shift)
