"""Provide RWKV-7 (Goose): time mixing and channel mixing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import check_layer, recurrent
from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.norms import LayerNorm, unit
from glax.nn.parts import (
    EMBED,
    HEADS,
    MLP,
    activation,
    by_head,
    check_divides,
    for_rows,
    linear,
    merged,
    parameter,
)
from glax.nn.passes import Rows, State
from glax.nn.rwkv6 import token_shift

zeros = nnx.initializers.zeros


def orthogonal(scale: float = 1.0) -> Callable:
    """Return a function (key, shape, dtype) of first values, `scale` times an orthogonal matrix, computed in float32."""

    def init(key, shape: tuple[int, int], dtype=jnp.float32) -> Float[Array, "inputs outputs"]:
        return nnx.initializers.orthogonal(scale)(key, shape, jnp.float32).astype(dtype)

    return init


class RWKV7Attention(Layer):
    """Compute RWKV-7's time mixing. With x^m_t = x_t + mu_m (x_{t-1} - x_t) for each m of r, w, k, v, a and g:

        r_t, k'_t, v_t = W_r x^r_t, W_k x^k_t, W_v x^v_t        w_t = -e^(-1/2) sigmoid(D_2 tanh(D_1 x^w_t) + d)
        a_t = sigmoid(A_2 A_1 x^a_t + e)                        g_t = G_2 sigmoid(G_1 x^g_t)
        p_t = s * k'_t / |s * k'_t| in every head               k_t = k'_t * (1 + (a_t - 1) * c)
        S_t = diag(exp(w_t)) S_{t-1} - (a_t * p_t) (p_t^T S_{t-1}) + k_t v_t^T        o_t = S_t^T r_t
        y_t = W_o ((GroupNorm(o_t) + (r_t . (u * k_t)) v_t) * g_t)

    In every layer but a model's first, a gate moves v_t towards the first layer's values: v_t = W_v x^v_t +
    sigmoid(V_2 V_1 x^v_t + f) * (first_t - W_v x^v_t). first, in the shape of x, holds v of layer 0, which is
    the second result of its `mix_values(x, state, rows)`. In later layers first is an argument of `mix` and `mix_values`, which
    raise ValueError without it. A call, `prefill_into` and `step` pass no first: they raise it unless layer_idx is 0.

    s, c [width] and u [H, K] are the parameters erase_scale, rate_scale and bonus; mu_r to mu_g [width] are mix_receptance to
    mix_output_gate. The lower letters d, e and f are biases [width]. GroupNorm has a group for each head, a scale and a bias.

    width:       the width of x and y, and of r, k and v for all heads together. num_heads: H; divides width. K is width / H.
    decay_rank, rate_rank, value_rank, gate_rank: the ranks of D_2 D_1, A_2 A_1, V_2 V_1 and G_2 G_1.
    layer_idx, num_layers: the layer's number in its model, from 0 on, and how many there are. What parameters start as depends
                 on both. Layer 0 has no V_2 V_1.
    norm_eps:    the epsilon of GroupNorm is width / H times this number.
    key_epsilon: what is added to |s * k'|^2 before the root.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`. If kernel_init is
    None, W_r, W_k and W_v start orthogonal and W_o as 0, as RWKV-7 does.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict: S [N, H, K, K] in float32 as `recurrent`, and the last token [N, 1, width] as `shift`.

    Peng et al. 2025, https://arxiv.org/abs/2503.14456.

    >>> layer = nn.RWKV7Attention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        decay_rank: int = 64,
        rate_rank: int = 64,
        value_rank: int = 16,
        gate_rank: int = 128,
        layer_idx: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-5,
        key_epsilon: float = 1e-6,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        check_divides("num_heads", num_heads, "width", width)
        self.width, self.num_heads, self.key_epsilon = width, num_heads, key_epsilon
        self.dtype, self.recurrence = dtype, recurrence
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        def projection(scale: float, axes=(EMBED, HEADS)) -> nnx.Linear:
            own = orthogonal(scale) if scale else zeros
            return linear(width, width, axes, kernel_init=own if kernel_init is None else kernel_init, **options)

        def low_rank(rank: int, bias: Float[Array, "width"] | None) -> tuple[nnx.Linear, nnx.Linear]:
            gain = 0.1 * max(1.0, rank / width) ** 0.5
            down = linear(width, rank, (EMBED, None), kernel_init=zeros, **options)
            has_bias = bias is not None
            up = linear(rank, width, (None, HEADS), bias=has_bias, kernel_init=orthogonal(gain), **options)
            if up.bias is not None and bias is not None:
                up.bias[...] = bias.astype(param_dtype)
            return down, up

        initial = InitialValues(width, width // num_heads, layer_idx, num_layers)

        def mixture(power: float) -> nnx.Param:
            return parameter(initial.mixture(power).astype(param_dtype), EMBED)

        self.mix_receptance, self.mix_decay, self.mix_key = mixture(0.2), mixture(0.9), mixture(0.7)
        self.mix_value, self.mix_rate, self.mix_output_gate = mixture(0.7), mixture(0.9), mixture(0.2)
        self.receptance, self.key, self.value = projection(1.0), projection(0.1), projection(1.0)
        self.decay_down, self.decay_up = low_rank(decay_rank, initial.decay)
        self.rate_down, self.rate_up = low_rank(rate_rank, -0.19 + 0.3 * initial.zigzag + 0.4 * initial.line)
        value_bias = 0.73 - 0.4 * initial.line
        self.value_gate_down, self.value_gate_up = low_rank(value_rank, value_bias) if layer_idx else (None, None)
        self.output_gate_down, self.output_gate_up = low_rank(gate_rank, None)
        self.erase_scale = parameter((0.71 - 0.1 * initial.line).astype(param_dtype), HEADS)
        self.rate_scale = parameter(jnp.full(width, 1.02, param_dtype), HEADS)
        self.bonus = parameter(jnp.full((num_heads, width // num_heads), -0.04, param_dtype), HEADS, None)
        eps = width // num_heads * norm_eps
        self.norm = LayerNorm(width, epsilon=eps, groups=num_heads, param_dtype=param_dtype)
        assert self.norm.scale is not None
        self.norm.scale[...] = jnp.full(width, initial.norm, param_dtype)
        self.output = projection(0.0, (HEADS, EMBED))

    @property
    def state_passes(self) -> int:
        """Return how often a token passes over all entries of its recurrent states: 3, twice to read them and once to write."""
        return 3  # the delta rule reads the state before it writes it

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        head_width = self.width // self.num_heads
        shift = jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32)
        return dict(recurrent=jnp.zeros((batch, self.num_heads, head_width, head_width), jnp.float32), shift=shift)

    def mix(
        self,
        x: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        first: Float[Array, "*rows width"] | None = None,
    ) -> tuple[Array, State]:
        y, _, state = self.mix_values(x, state, rows, first)
        return y, state

    def mix_values(
        self,
        x: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        first: Float[Array, "*rows width"] | None = None,
    ) -> tuple[Array, Array, State]:
        """Return y, the values v and the new state. y and v are [*rows, width], and v is v_t of the layer's formulas, which in
        later layers is already moved towards `first`.

        x, state, rows: as in `glax.nn.layer.Layer.mix`. first: the values v that this method of the model's first layer
        returned; None in the first layer. Raises ValueError if `first` is missing in a layer after the first.
        """
        d, shift = token_shift(x, state.get("shift"), rows)

        def mixed(mu: nnx.Param) -> Float[Array, "*rows width"]:
            return x + d * for_rows(x, mu[...], x.dtype)

        r, k, x_v = self.receptance(mixed(self.mix_receptance)), self.key(mixed(self.mix_key)), mixed(self.mix_value)
        v = self.value(x_v)
        if self.value_gate_down is not None and self.value_gate_up is not None:
            if first is None:
                raise ValueError(
                    "first must be the values of layer 0 in a layer behind it, got None: call `mix_values`"
                )
            v = v + jax.nn.sigmoid(self.value_gate_up(self.value_gate_down(x_v))) * (first - v)
        w = self.decay_up(jnp.tanh(self.decay_down(mixed(self.mix_decay)))).astype(jnp.float32)
        a = jax.nn.sigmoid(self.rate_up(self.rate_down(mixed(self.mix_rate))))
        gate = self.output_gate_up(jax.nn.sigmoid(self.output_gate_down(mixed(self.mix_output_gate))))
        erase = unit(by_head(k * for_rows(k, self.erase_scale[...], k.dtype), self.num_heads), self.key_epsilon)
        k = k * (1 + (a - 1) * for_rows(k, self.rate_scale[...], k.dtype))
        r, k, a, w, by_heads = (by_head(y, self.num_heads) for y in (r, k, a, w, v))
        options: dict[str, Any] = dict(
            gk=-(jnp.e**-0.5) * jax.nn.sigmoid(w),
            erase=erase,
            erase_along=erase * a,
            erase_before_decay=True,
            softmax_scale=1.0,
        )
        o, after = rows.recurrent(self.recurrence, r, k, by_heads, state.get("recurrent"), **options)
        wide = (r * k).astype(jnp.float32) * for_rows(r, self.bonus[...])
        own = wide.sum(-1, keepdims=True).astype(v.dtype) * by_heads
        y = (self.norm(merged(o)) + merged(own)) * gate
        return self.output(y), v, dict(recurrent=after, shift=shift)


class InitialValues:
    """Hold the terms from which the first values of RWKV-7's parameters are formed, in one layer of a model.

    By channel, [width] each: share, i / width for channel i; line, from -1/2 to 1/2; zigzag, z |z| with z from -1 to 1 over the
    channels of a head; decay, the bias d of the decays, which are slower in the first channels and the first layers. For all
    channels: depth, from 1 in layer 0 down to 1 / num_layers; norm, the scale of the norm, which grows with the layers.
    """

    def __init__(self, width: int, head_width: int, layer_idx: int, num_layers: int):
        n = jnp.arange(width, dtype=jnp.float32)
        check_layer(layer_idx, num_layers - 1, "num_layers - 1")
        self.share, self.depth = n / width, 1 - layer_idx / num_layers
        along = n / max(width - 1, 1)
        z = 2 * (n % head_width) / max(head_width - 1, 1) - 1
        self.line, self.zigzag = along - 0.5, z * jnp.abs(z)
        power = 1 + (layer_idx / max(num_layers - 1, 1)) ** 0.3
        self.decay = -5.5 + 6 * along**power + 2.5 * self.zigzag
        self.norm = ((layer_idx + 1) / num_layers) ** 0.7

    def mixture(self, power: float) -> Float[Array, "width"]:
        """Return the first values of mu, the share of the token before in a mixture, [width]."""
        return 1 - self.share ** (power * self.depth)


class RWKV7FeedForward(Layer):
    """Compute RWKV-7's channel mixing: y_t = W_v act(W_k (x_t + mu (x_{t-1} - x_t))).

    width: the width of x and y. inside: the number of outputs of W_k. act: the name of a function in
    `glax.nn.parts.ACTIVATIONS`; "sqrelu" is the squared ReLU.
    layer_idx, num_layers: as in `RWKV7Attention`. dtype, param_dtype and kernel_init are as in
    `glax.nn.linear_attention.MixerOptions`; but if kernel_init is None, W_k starts orthogonal and W_v as 0.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict of the last token [N, 1, width] as `shift`.

    Peng et al. 2025, https://arxiv.org/abs/2503.14456.

    >>> layer = nn.RWKV7FeedForward(64, 128, rngs=nnx.Rngs(0))
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
        layer_idx: int = 0,
        num_layers: int = 1,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        activation("act", act)
        self.width, self.act, self.dtype = width, act, dtype
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        initial, init = InitialValues(width, width, layer_idx, num_layers), kernel_init
        self.key = linear(width, inside, (EMBED, MLP), kernel_init=init or orthogonal(), **options)
        self.key_mix = parameter((1 - initial.share ** (initial.depth**4)).astype(param_dtype), EMBED)
        self.value = linear(inside, width, (MLP, EMBED), kernel_init=init or zeros, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(shift=jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        d, shift = token_shift(x, state.get("shift"), rows)
        key = self.key(x + d * for_rows(x, self.key_mix[...], x.dtype))
        return self.value(activation("act", self.act)(key)), dict(shift=shift)
