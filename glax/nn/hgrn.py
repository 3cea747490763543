"""Provide HGRN, whose channels are recurrences of their own, and HGRN2, whose key is one minus its decay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent, recurrent_gla
from glax.nn.arguments import checked
from glax.nn.convolution import ShortConvolution
from glax.nn.layer import Layer
from glax.nn.linear_attention import ConvolutionOptions, LinearAttention, Unpack
from glax.nn.norms import RMSNormGated
from glax.nn.parts import EMBED, HEADS, by_head, for_rows, linear, merged
from glax.nn.passes import Rows, State


def log_gate(f: Float[Array, "*rows D"], lower_bound: Float[Array, "D"] | None) -> Float[Array, "*rows D"]:
    """Return log(b + (1 - b) sigmoid(f)), the log decay of each channel, in float32. b is lower_bound, or 0 if that is None."""
    g = jax.nn.log_sigmoid(f.astype(jnp.float32))
    if lower_bound is None:
        return g
    b = for_rows(f, lower_bound)
    return jnp.logaddexp(jnp.log(b), jnp.log1p(-b) + g)


def of_channels(
    recurrence: Callable, v: Float[Array, "*rows D"], g: Float[Array, "*rows D"], before: Array | None, rows: Rows
) -> tuple[Float[Array, "*rows D"], Float[Array, "N D"]]:
    """Return the outputs h of one scalar recurrence per channel, h_t = exp(g_t) * h_{t-1} + v_t, and the states behind the last
    tokens, [N, D].

    recurrence: the function that solves whole sequences, such as `glax.recurrent`.
    before: the states before the first tokens, [N, D]; zeros if None.
    rows: as in `glax.nn.layer.Layer.mix`.
    """
    # One head with K = 1 and V = D: its per-value gates are the gates of the channels.
    one = jnp.ones((*v.shape[:-1], 1, 1), v.dtype)
    before = None if before is None else before[:, None, None]
    h, after = rows.recurrent(recurrence, one, one, v[..., None, :], before, gv=g[..., None, :], softmax_scale=1.0)
    return merged(h), after[:, 0, 0]


class HGRNAttention(Layer):
    """Compute HGRN's mixer, one recurrence a channel:

        f_t = b + (1 - b) sigmoid(W_f x_t)       h_t = f_t * h_{t-1} + (1 - f_t) * SiLU(W_i x_t)
        y_t = W_o (RMSNorm(h_t) * SiLU(W_g x_t))

    width:  the width of x and y. inside: D, the width of h; width if None.
    use_short_conv: whether W_f x and W_i x pass through convolutions, without activation.
    norm_eps, elementwise_affine: the epsilon of the norm, and whether it has a scale.

    conv_size, conv_bias, dtype, param_dtype, kernel_init, filter_init and recurrence are as in
    `glax.nn.linear_attention.MixerOptions`. b [D], from 0 to 1, is the argument lower_bound of `mix`. A model passes it, from a
    table that its layers share; a call of the layer has b = 0.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is h [N, D] in float32; with use_short_conv a dict of h as `recurrent`, and of the last conv_size - 1 rows before
    the convolutions, [N, conv_size - 1, D], as `input_conv` and `forget_conv`.

    Qin et al. 2023, https://arxiv.org/abs/2311.04823.

    >>> layer = nn.HGRNAttention(64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        inside: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        elementwise_affine: bool = True,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        filter_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        inside = width if inside is None else inside
        self.width, self.inside, self.recurrence = width, inside, recurrence
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.input, self.forget, self.output_gate = (
            linear(width, inside, (EMBED, HEADS), kernel_init=kernel_init, **options) for _ in range(3)
        )
        self.use_short_conv = use_short_conv
        if use_short_conv:
            conv: dict[str, Any] = dict(bias=conv_bias, activation=None, filter_init=filter_init, **options)
            self.input_conv, self.forget_conv = (ShortConvolution(inside, conv_size, **conv) for _ in range(2))
        norm: dict[str, Any] = dict(epsilon=norm_eps, elementwise_affine=elementwise_affine)
        self.norm = RMSNormGated(inside, **norm, param_dtype=param_dtype)
        self.output = linear(inside, width, (HEADS, EMBED), kernel_init=kernel_init, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state = dict(recurrent=jnp.zeros((batch, self.inside), jnp.float32))
        if not self.use_short_conv:
            return state
        return state | {name: getattr(self, name).initial_state(batch) for name in ("input_conv", "forget_conv")}

    def mix(
        self,
        x: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        lower_bound: Float[Array, "D"] | None = None,
    ) -> tuple[Array, State]:
        i, f, states = self.input(x), self.forget(x), {}
        if self.use_short_conv:
            i, states["input_conv"] = self.input_conv.extend(i, state.get("input_conv"), rows)
            f, states["forget_conv"] = self.forget_conv.extend(f, state.get("forget_conv"), rows)
        g = log_gate(f, lower_bound)
        v = (jax.nn.silu(i.astype(jnp.float32)) * -jnp.expm1(g)).astype(i.dtype)
        h, after = of_channels(self.recurrence, v, g, state.get("recurrent"), rows)
        return self.output(self.norm(h, self.output_gate(x))), states | dict(recurrent=after)


class HGRN2Attention(LinearAttention):
    """Compute the recurrence of HGRN2 between projections. In every head:

        q_t = SiLU(W_q x_t)      f_t = b + (1 - b) sigmoid(W_f x_t)      v_t = W_i x_t
        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T            o_t = S_t^T q_t / sqrt(K)
        y_t = W_o RMSNorm(o_t)

    The norm is over all heads together. W_f is the parameter `key`. b [H * K], from 0 to 1, is the argument lower_bound of
    `mix`. A model passes it, from a table that its layers share; a call of the layer has b = 0.

    width: the width of x and y. num_heads: H. norm_eps: the epsilon of the norm. use_short_conv: whether W_q x, W_f x and W_i x
    pass through convolutions, without activation. The other arguments are those of `glax.nn.linear_attention.Options`. There
    is no output gate: gate_fn is without effect, and use_output_gate a TypeError.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is S [N, H, K, V] in float32, or with use_short_conv the dict of `glax.nn.linear_attention.LinearAttention`.

    Qin et al. 2024, https://arxiv.org/abs/2404.07904.

    >>> layer = nn.HGRN2Attention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        norm_eps: float = 1e-5,
        recurrence: Callable = recurrent_gla,
        rngs: nnx.Rngs,
        **options: Unpack[ConvolutionOptions],
    ):
        fixed: dict[str, Any] = dict(
            use_output_gate=False,
            conv_activation=None,
            qk_conv_activation=None,
            norm_eps=norm_eps,
            recurrence=recurrence,
        )
        super().__init__(width, num_heads=num_heads, rngs=rngs, **fixed, **options)

    def output_norm(self, **options) -> RMSNormGated:
        return RMSNormGated(self.num_heads * self.value_width, **options)

    def mix(
        self,
        x: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        lower_bound: Float[Array, "keys"] | None = None,
    ) -> tuple[Array, State]:
        (q, f, v), states = self.inputs(x, state, rows)
        g = log_gate(f, lower_bound)
        k = (-jnp.expm1(g)).astype(v.dtype)
        q, k, v = self.heads(jax.nn.silu(q), k, v)
        g = by_head(g, self.num_kv_heads)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), g=g)
        return self.output(self.norm(merged(o))), states | dict(recurrent=after)
