"""Provide RWKV-4: time mixing, whose channels are weighted means of values, and channel mixing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from glax._src.api.mlstm import Pair
from glax._src.api.recurrent import check_layer, recurrent
from glax.nn.arguments import checked
from glax.nn.hgrn import of_channels
from glax.nn.layer import Layer
from glax.nn.parts import EMBED, HEADS, MLP, activation, for_rows, linear, parameter
from glax.nn.passes import Rows, State
from glax.nn.rwkv6 import token_shift
from glax.nn.rwkv7 import orthogonal

NOTHING = -1e30  # the logarithm of a weight of 0, finite, so that differences of logarithms are never NaN


class RWKV4Attention(Layer):
    """Compute RWKV-4's time mixing. With x^m_t = mu_m * x_t + (1 - mu_m) * x_{t-1} for each m of r, k and v:

        r_t, k_t, v_t = W_r x^r_t, W_k x^k_t, W_v x^v_t          w = exp(d)
        o_t = (e^(u + k_t) v_t + sum_{j < t} e^(k_j - (t - 1 - j) w) v_j) / (e^(u + k_t) + sum_{j < t} e^(k_j - (t - 1 - j) w))
        y_t = W_o (sigmoid(r_t) * o_t)

    It is computed by the logarithm L_t of the sum of weights and the weighted mean m_t, which no key can make overflow:

        L_t = log(e^(L_{t-1} - w) + e^(k_t))        m_t = f_t * m_{t-1} + (1 - f_t) * v_t,   f_t = sigmoid(L_{t-1} - w - k_t)
        o_t = m_{t-1} + sigmoid(u + k_t - L_{t-1}) * (v_t - m_{t-1})

    d and u [D] are the parameters decay and bonus; mu_r, mu_k and mu_v [width] are mix_receptance, mix_key and mix_value.

    width: the width of x and y. inside: D, the width of r, k and v; width if None.
    layer_idx, num_layers: the layer's number in its model, from 0 on, and how many there are. What parameters start as depends
    on both.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`; but if kernel_init is
    None, projections start orthogonal.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict: m [N, D] as `recurrent`, L and its rest [N, 1, 2 D] as `log_weight`, both float32, or float64 for
    float64 inputs; the last token [N, 1, width] as `shift`; and the number of tokens, [N], as `length`. L is not read
    where length is 0. The rest is what L lost in rounding at a token that was the first of its call, else 0.

    Peng et al. 2023, https://arxiv.org/abs/2305.13048.

    >>> layer = nn.RWKV4Attention(64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        inside: int | None = None,
        layer_idx: int = 0,
        num_layers: int = 1,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        inside = width if inside is None else inside
        self.width, self.inside, self.dtype, self.recurrence = width, inside, dtype, recurrence
        check_layer(layer_idx, num_layers - 1, "num_layers - 1")
        depth, along = 1 - layer_idx / num_layers, layer_idx / max(num_layers - 1, 1)
        share = jnp.arange(width, dtype=jnp.float32) / width
        self.mix_receptance, self.mix_key, self.mix_value = (
            parameter(initial.astype(param_dtype), EMBED)
            for initial in (share ** (depth / 2), share**depth, share**depth + 0.3 * along)
        )
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.receptance, self.key, self.value = (
            linear(width, inside, (EMBED, HEADS), kernel_init=kernel_init or widening(width, inside), **options)
            for _ in range(3)
        )
        channel = jnp.arange(inside, dtype=jnp.float32) / max(inside - 1, 1)
        self.decay = parameter((8 * channel ** (0.7 + 1.3 * along) - 5).astype(param_dtype), HEADS)
        self.bonus = parameter(jnp.ones(inside, param_dtype), HEADS)
        init = kernel_init or widening(inside, width)
        self.output = linear(inside, width, (HEADS, EMBED), kernel_init=init, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(
            recurrent=jnp.zeros((batch, self.inside), jnp.float32),
            log_weight=jnp.zeros((batch, 1, 2 * self.inside), jnp.float32),
            shift=jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32),
            length=jnp.zeros(batch, jnp.int32),
        )

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        positions, length = rows.positions(state.get("length"))
        d, shift = token_shift(x, state.get("shift"), rows)
        r, k, v = (
            project(mixed(x, d, mu))
            for project, mu in (
                (self.receptance, self.mix_receptance),
                (self.key, self.mix_key),
                (self.value, self.mix_value),
            )
        )
        k, wide = k.astype(jnp.promote_types(k.dtype, jnp.float32)), v.astype(jnp.promote_types(v.dtype, jnp.float32))
        w = for_rows(k, jnp.exp(self.decay[...].astype(k.dtype)), k.dtype)
        u = for_rows(k, self.bonus[...], k.dtype)
        before, log_weight = log_weights(k, w, (positions == 0)[..., None], state.get("log_weight"), rows)
        log_factor, weight = jax.nn.log_sigmoid(before - w - k), share(k + w - before)
        mean = state.get("recurrent")
        m, after = of_channels(self.recurrence, (weight * wide).astype(v.dtype), log_factor, mean, rows)
        (m_before, _), _ = rows.window(m.astype(wide.dtype), 2, None if mean is None else mean[:, None])
        own = u + k - before
        o = share(-own) * m_before + share(own) * wide
        y = self.output(jax.nn.sigmoid(r) * o.astype(r.dtype))
        return y, dict(recurrent=after, log_weight=log_weight, shift=shift, length=length)


def mixed(x: Float[Array, "*rows D"], d: Float[Array, "*rows D"], mu: nnx.Param) -> Float[Array, "*rows D"]:
    """Return mu x_t + (1 - mu) x_{t-1}. d: x_{t-1} - x_t. mu: [D]."""
    return x + d * (1 - for_rows(x, mu[...], x.dtype))


def share(x: Array) -> Array:
    """Return sigmoid(x), with a derivative that does not cancel where it is near 1."""
    return jnp.exp(jax.nn.log_sigmoid(x))


def widening(inputs: int, outputs: int) -> Callable:
    """Return a function of first values: an orthogonal matrix, scaled by sqrt(outputs / inputs) if that is above 1."""
    return orthogonal(max(1.0, outputs / inputs) ** 0.5)


def log_weights(
    k: Float[Array, "*rows D"], w: Array, is_first: Bool[Array, "*rows 1"], state: Array | None, rows: Rows
) -> tuple[Float[Array, "*rows D"], Float[Array, "N 1 2*D"]]:
    """Return L before each token, NOTHING before the first one of a sequence, and the new state:

        L_t = log(e^(L_{t-1} - w) + e^(k_t))

    w: [D], for rows. is_first: whether no token of the sequence has been read before. state: L and its rest before the first
    rows.
    """
    (entering, _), _ = rows.window(jnp.concatenate([jnp.zeros_like(k)] * 2, -1), 2, state)  # the state, at first rows
    high, rest = jnp.split(entering, 2, -1)
    begins = is_first | rows.first_rows()[..., None]
    first, rest = behind_token(jnp.where(is_first, NOTHING, high), jnp.where(is_first, 0, rest), k, w)

    def then(first: tuple, second: tuple) -> tuple[Array, Array, Array]:
        """Return the map L -> log(e^(L + a) + e^x) of the tokens of both, where a token that begins discards
        the L before it."""
        (began, a, x), (begins, b, y) = first, second
        return began | begins, a + b, jnp.logaddexp(jnp.where(begins, NOTHING, x) + b, y)

    maps = begins, jnp.broadcast_to(-w, k.shape), jnp.where(begins, first, k)
    _, _, L = rows.accumulated(then, maps)
    (before, _), after = rows.window(jnp.concatenate([L, jnp.where(begins, rest, 0)], -1), 2, state)
    return jnp.where(is_first, NOTHING, jnp.split(before, 2, -1)[0]), after


def behind_token(high: Array, rest: Array, k: Array, w: Array) -> tuple[Array, Array]:
    """Return L behind a token, and what it loses in rounding. high + rest: L before the token.

    Where decays are slow, a token changes L by less than L's last digit. Without the rest, L would stop short of its value in
    decoding.
    """
    change = jnp.log1p(jnp.expm1(-jnp.minimum(w, 0.5)) + jnp.exp(jnp.minimum(k - high, 0)))  # of finite gradient
    total = Pair.sum_of(high, change + rest)
    is_slow = (w < 0.5) & (k <= high)
    return jnp.where(is_slow, total.high, jnp.logaddexp(high + rest - w, k)), jnp.where(is_slow, total.low, 0)


class RWKV4FeedForward(Layer):
    """Compute RWKV-4's channel mixing. With x^m_t = mu_m * x_t + (1 - mu_m) * x_{t-1} for m of r and k:

        y_t = sigmoid(W_r x^r_t) * W_v act(W_k x^k_t)

    width: the width of x and y. inside: the number of outputs of W_k. act: the name of a function in
    `glax.nn.parts.ACTIVATIONS`; "sqrelu" is the squared ReLU. mu_r and mu_k [width] are mix_receptance and mix_key.
    layer_idx, num_layers, dtype, param_dtype and kernel_init are as in `RWKV4Attention`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict of the last token [N, 1, width] as `shift`.

    Peng et al. 2023, https://arxiv.org/abs/2305.13048.

    >>> layer = nn.RWKV4FeedForward(64, 128, rngs=nnx.Rngs(0))
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
        check_layer(layer_idx, num_layers - 1, "num_layers - 1")
        self.width, self.act, self.dtype = width, act, dtype
        share = (jnp.arange(width, dtype=jnp.float32) / width) ** (1 - layer_idx / num_layers)
        self.mix_receptance, self.mix_key = (parameter(share.astype(param_dtype), EMBED) for _ in range(2))
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.key = linear(width, inside, (EMBED, MLP), kernel_init=kernel_init or widening(width, inside), **options)
        self.receptance = linear(width, width, (EMBED, MLP), kernel_init=kernel_init or orthogonal(), **options)
        self.value = linear(inside, width, (MLP, EMBED), kernel_init=kernel_init or widening(inside, width), **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return dict(shift=jnp.zeros((batch, 1, self.width), self.dtype or jnp.float32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        d, shift = token_shift(x, state.get("shift"), rows)
        key = activation("act", self.act)(self.key(mixed(x, d, self.mix_key)))
        receptance = self.receptance(mixed(x, d, self.mix_receptance))
        return jax.nn.sigmoid(receptance) * self.value(key), dict(shift=shift)
