"""Provide linear attentions with a constant decay: RetNet's retention and Lightning Attention."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import lightning_decay, recurrent
from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.linear_attention import LinearAttention, OwnRecurrenceOptions, Unpack
from glax.nn.norms import RMSNorm, RMSNormGated
from glax.nn.parts import EMBED, HEADS, activation, by_head, check_divides, check_sizes, linear, merged
from glax.nn.passes import Rows, State
from glax.nn.rotary import Rotation, checked_rotation, rotate


class MultiScaleRetention(LinearAttention):
    """Compute RetNet's retention, with rotary positions, in head h = 0, 1, ...:

        S_t = (1 - 2^(-5-h)) S_{t-1} + R_t k_t v_t^T        o_t = S_t^T R_t q_t / sqrt(K)
        y_t = W_o (RMSNorm(o_t) * SiLU(W_s x_t))

    with q_t = W_q x_t, k_t = W_k x_t and v_t = W_v x_t. R_t rotates by the position in the sequence (`glax.nn.rotary.rotate`).

    width: the width of x and y. num_heads: H. theta: the base of the rotation. The other arguments are those of
    `glax.nn.linear_attention.Options`; key_width must be even.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict: S [N, H, K, V] in float32 as `recurrent`, and the number of tokens read, [N] in int32, as `length`.
    With use_short_conv it also holds `query_conv`, `key_conv` and `value_conv`, as in
    `glax.nn.linear_attention.LinearAttention`.

    Sun et al. 2023, https://arxiv.org/abs/2307.08621.

    >>> layer = nn.MultiScaleRetention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        theta: float = 10000.0,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
        **options: Unpack[OwnRecurrenceOptions],
    ):
        super().__init__(width, num_heads=num_heads, recurrence=recurrence, rngs=rngs, **options)
        if self.key_width % 2:
            raise ValueError(f"key_width must be even, since pairs of channels rotate, got {self.key_width}")
        rotation = checked_rotation(theta, None, self.key_width)
        if rotation is None:
            raise TypeError("theta must be a number, got None")
        self.rotation = rotation

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        return super().empty_state(batch) | dict(length=jnp.zeros(batch, jnp.int32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        (q, k, v), states = self.inputs(x, state, rows)
        q, k, v = self.heads(q, k, v)
        positions, states["length"] = rows.positions(state.get("length"))
        q, k = (rotate(y, positions, self.rotation) for y in (q, k))
        decay = np.log1p(-np.exp2(-5.0 - np.arange(self.num_heads))).astype(np.float32)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), g_gamma=jnp.asarray(decay))
        return self.outputs(o, x), states | dict(recurrent=after)


class LightningAttention(Layer):
    """Compute Lightning Attention as in MiniMax-01. In every head:

        q_t, k_t, v_t = R_t act(W_q x_t), R_t act(W_k x_t), act(W_v x_t)
        S_t = exp(-s) S_{t-1} + k_t v_t^T                    o_t = scale S_t^T q_t
        y_t = W_o (sigmoid(W_s x_t) * RMSNorm(o_t))

    R_t rotates by the position in the sequence. RMSNorm reads all heads together.

    width:       the width of x and y. num_heads: H. head_width: D, the K and V of a head; width // num_heads if None.
    norm_groups: into how many equal parts the outputs of all heads are divided, which RMSNorm normalises separately.
    norm_eps:    the epsilon of all norms.
    slopes:      s [H], or "fla" or "minimax": the slopes of `glax.lightning_attention` for layer_idx and num_layers.
    act:         the name of a function, as `glax.nn.linear_attention.Options` lists them: "silu" in MiniMax-01; None for none, as
                 in Ling-2.5.
    theta:       the base of the rotation; no rotation if None. rotary_width, frequencies: as in `glax.nn.Attention`.
    qk_norm:     whether q and k pass through RMSNorm in each head, with norm_eps, behind act and before they rotate.
    scale:       the factor of the outputs.
    bias:        whether the projections of q, k and v have a bias. output_bias: whether the output's projection has one.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is S [N, H, D, D] in float32; with theta a dict of S as `recurrent`, and of the number of tokens read, [N] in int32,
    as `length`.

    Qin et al. 2024, https://arxiv.org/abs/2401.04658; MiniMax 2025, https://arxiv.org/abs/2501.08313.

    >>> layer = nn.LightningAttention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_width: int | None = None,
        slopes="minimax",
        layer_idx: int = 0,
        num_layers: int = 1,
        act: str | None = "silu",
        theta: float | None = None,
        rotary_width: int | None = None,
        frequencies: Sequence[float] | Rotation | None = None,
        qk_norm: bool = False,
        norm_groups: int = 1,
        scale: float = 1.0,
        bias: bool = False,
        output_bias: bool = False,
        norm_eps: float = 1e-6,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        head_width = width // num_heads if head_width is None else head_width
        check_sizes(head_width=head_width)
        activation("act", act)
        self.width, self.num_heads, self.head_width, self.act = width, num_heads, head_width, act
        self.recurrence, self.slopes = recurrence, slope_tuple(slopes, num_heads, layer_idx, num_layers)
        self.rotation, self.scale = checked_rotation(theta, rotary_width, head_width, frequencies), scale
        inside = num_heads * head_width
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        norms: dict[str, Any] = dict(epsilon=norm_eps, param_dtype=param_dtype)
        self.query = linear(width, inside, (EMBED, HEADS), bias=bias, **options)
        self.key = linear(width, inside, (EMBED, HEADS), bias=bias, **options)
        self.value = linear(width, inside, (EMBED, HEADS), bias=bias, **options)
        self.query_norm = RMSNorm(head_width, **norms) if qk_norm else None
        self.key_norm = RMSNorm(head_width, **norms) if qk_norm else None
        check_divides("norm_groups", norm_groups, "num_heads * head_width", inside)
        self.norm = RMSNormGated(inside, groups=norm_groups, gate_fn="sigmoid", **norms)
        self.output_gate = linear(width, inside, (EMBED, HEADS), **options)
        self.output = linear(inside, width, (HEADS, EMBED), bias=output_bias, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        state = dict(recurrent=jnp.zeros((batch, self.num_heads, self.head_width, self.head_width), jnp.float32))
        return state if self.rotation is None else state | dict(length=jnp.zeros(batch, jnp.int32))

    def heads(self, x: Float[Array, "*rows width"]) -> list[Float[Array, "*rows H D"]]:
        """Return [q, k, v], each [*rows, H, D]: act of the projections of x, before norms and rotation."""
        act = activation("act", self.act)
        return [by_head(act(project(x)), self.num_heads) for project in (self.query, self.key, self.value)]

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        q, k, v = self.heads(x)
        after = {}
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotation is not None:
            positions, after["length"] = rows.positions(state.get("length"))
            q, k = (rotate(y, positions, self.rotation, rows.last_positions) for y in (q, k))
        decay = -jnp.asarray(self.slopes, jnp.float32)
        before = state.get("recurrent")
        o, after["recurrent"] = rows.recurrent(
            self.recurrence, q, k, v, before, g_gamma=decay, softmax_scale=self.scale
        )
        return self.output(self.norm(merged(o), self.output_gate(x))), after


def slope_tuple(slopes, num_heads: int, layer_idx: int, num_layers: int) -> tuple[float, ...]:
    """Return the slopes s of the heads, num_heads numbers.

    slopes: the numbers, or "fla" or "minimax" for those of `glax.lightning_attention` in layer `layer_idx` of `num_layers`.
    Raises ValueError unless there is one number per head.
    """
    if isinstance(slopes, str):
        heads = jax.ShapeDtypeStruct((1, 1, num_heads, 1), jnp.float32)
        return tuple(float(-x) for x in lightning_decay(heads, heads, heads, layer_idx, num_layers, slopes))
    if np.shape(slopes) != (num_heads,):
        raise ValueError(f"slopes must be 'fla', 'minimax' or [H]=[{num_heads}], got shape {np.shape(slopes)}")
    return tuple(float(x) for x in np.asarray(slopes))
