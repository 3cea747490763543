"""Compute softmax attention with a key-value cache, for the layers of hybrids that are no recurrence."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax.nn.arguments import checked
from glax.nn.choice import Choice
from glax.nn.layer import Layer
from glax.nn.norms import RMSNorm
from glax.nn.parts import EMBED, HEADS, by_head, check_divides, check_sizes, linear, merged
from glax.nn.passes import Rows, State
from glax.nn.rotary import Rotation, checked_rotation, rotate


class Attention(Layer):
    """Compute causal softmax attention, with rotary positions and a cache of keys and values. In every head:

        o_t = sum over s <= t of softmax_s(scale (R_t q_t)^T R_s k_s) v_s        y_t = W_o o_t

    with q, k, v = W_q x, W_k x, W_v x and the rotation R_t by the position in the sequence.

    width:        the width of x and y. num_heads: H, the heads of q. Head h reads head h * num_kv_heads // H of k and v.
    num_kv_heads: the heads of k and v, a divisor of num_heads; num_heads if None. head_width: width // num_heads if None.
    theta:        the base of the rotation; no rotation if None.
    rotary_width: how many channels of a head rotate, from its first on; all if None. Pair i is channels i and
                  i + rotary_width / 2.
    frequencies:  the angle per token of each of the rotary_width / 2 pairs, theta^(-2 i / rotary_width) if None; or a
                  `glax.nn.rotary.Rotation`, which also scales, and has other angles for long sequences.
    window:       how many tokens a token reads, itself included; all before it if None.
    scale:        the factor of the scores; head_width ** -0.5 if None.
    bias:         whether the projections of q, k and v have a bias. output_bias: whether the output's projection has one.
    qk_norm:      whether q and k pass through RMSNorm in each head, with norm_eps. zero_centred: as in RMSNorm. norm_whole:
                  whether one norm reads all heads of q, and one all heads of k.
    gated:        whether sigmoid(z) multiplies each head's output. W_q x then holds q and z of head 0, then q and z of head 1,
                  and so on, each of head_width channels.
    head_gated:   whether sigmoid(W_h x), one number a head, multiplies each head's output.

    dtype, param_dtype and kernel_init are as in `glax.nn.linear_attention.MixerOptions`. norm_whole=True needs qk_norm=True
    and gated=False.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the cache, a dict: `key` and `value` [N, max_length, num_kv_heads, head_width] in `dtype`, float32 if None, and
    `length` [N], the tokens read. A token for which the cache has no row left raises ValueError where `length` is known, and has
    NaN as its output where `length` is traced. The state of a call without initial_state has rows for the tokens read and no
    more: to go on, pass initial_state(batch, max_length). A call with a cache raises ValueError for segment_ids.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.

    >>> layer = nn.Attention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        theta: float | None = 10000.0,
        rotary_width: int | None = None,
        frequencies: Sequence[float] | Rotation | None = None,
        window: int | None = None,
        scale: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        zero_centred: bool = False,
        norm_whole: bool = False,
        gated: bool = False,
        head_gated: bool = False,
        norm_eps: float = 1e-5,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_width = width // num_heads if head_width is None else head_width
        check_sizes(head_width=head_width)
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        self.width, self.num_heads, self.num_kv_heads, self.head_width = width, num_heads, num_kv_heads, head_width
        self.rotation = checked_rotation(theta, rotary_width, head_width, frequencies)
        self.window, self.scale, self.dtype, self.gated = window, scale, dtype, gated
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        queries = (2 if gated else 1) * num_heads * head_width
        self.query = linear(width, queries, (EMBED, HEADS), bias=bias, **options)
        self.key = linear(width, num_kv_heads * head_width, (EMBED, HEADS), bias=bias, **options)
        self.value = linear(width, num_kv_heads * head_width, (EMBED, HEADS), bias=bias, **options)
        self.output = linear(num_heads * head_width, width, (HEADS, EMBED), bias=output_bias, **options)
        self.head_gate = linear(width, num_heads, (EMBED, HEADS), bias=False, **options) if head_gated else None
        norms: dict[str, Any] = dict(epsilon=norm_eps, zero_centred=zero_centred, param_dtype=param_dtype)
        if norm_whole and (gated or not qk_norm):
            raise ValueError("norm_whole must come with qk_norm and without gated")
        self.norm_whole, heads, kv_heads = norm_whole, *((num_heads, num_kv_heads) if norm_whole else (1, 1))
        self.query_norm = RMSNorm(heads * head_width, **norms) if qk_norm else None
        self.key_norm = RMSNorm(kv_heads * head_width, **norms) if qk_norm else None

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        if max_length is None:
            raise ValueError("max_length must be given: a cache of keys and values has as many rows a sequence")
        check_sizes(max_length=max_length)
        shape = (batch, max_length, self.num_kv_heads, self.head_width)
        dtype = self.dtype or jnp.float32
        return dict(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype), length=jnp.zeros(batch, jnp.int32))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        gate = None if self.head_gate is None else self.head_gate(x)
        return self.attend(self.query(x), self.key(x), self.value(x), state, rows, gate)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        state: State,
        rows: Rows,
        head_gate: Array | None = None,
        choice: Choice | None = None,
    ) -> tuple[Array, State]:
        """Return y and the new state from the projections W_q x, W_k x and W_v x, merged over heads. Norms, rotation, gate and
        W_o are applied here. Models that change the projections call this method.

        q: [*rows, num_heads * head_width], or twice as wide if gated. k, v: [*rows, num_kv_heads * head_width]. state, rows: as
        in `glax.nn.layer.Layer.mix`. head_gate: W_h x [*rows, num_heads], needed if head_gated, else None. choice: how each row
        chooses the blocks of keys that it reads, a `glax.nn.choice.Choice`; all keys if None. Raises ValueError if head_gate is
        missing or superfluous.
        """
        if (head_gate is None) != (self.head_gate is None):
            raise ValueError("head_gate must be given where the layer has head_gated=True, and nowhere else")
        if self.norm_whole:
            q, k = self.normalized(q, k)
        q, k, v = by_head(q, self.num_heads), by_head(k, self.num_kv_heads), by_head(v, self.num_kv_heads)
        q, gate = jnp.split(q, 2, axis=-1) if self.gated else (q, None)
        if not self.norm_whole:
            q, k = self.normalized(q, k)
        if self.rotation is not None:
            positions, _ = rows.positions(state.get("length"))
            q, k = (rotate(y, positions, self.rotation, rows.last_positions) for y in (q, k))
        o, cache = rows.attend(q, k, v, state, self.window, self.scale, choice=choice)
        o = o if gate is None else o * jax.nn.sigmoid(gate)
        o = o if head_gate is None else o * jax.nn.sigmoid(head_gate)[..., None]
        return self.output(merged(o)), cache

    def normalized(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return q and k after their norms; unchanged without qk_norm. Both are [*rows, heads, head_width], or merged over
        heads with norm_whole."""
        return (q, k) if self.query_norm is None or self.key_norm is None else (self.query_norm(q), self.key_norm(k))
