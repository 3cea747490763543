"""Provide gated slot attention: softmax over a fixed number of slots, whose keys and values two gated recurrences write.

A slot is a key and a value of the layer's memory here, and not a row of a state pool.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax._src.core.recurrence import spread_heads
from glax.nn.arguments import checked
from glax.nn.linear_attention import ConvolutionOptions, LinearAttention, Unpack
from glax.nn.norms import RMSNormGated
from glax.nn.parts import EMBED, HEADS, by_head, linear, merged
from glax.nn.passes import Rows, State


class GatedSlotAttention(LinearAttention):
    """Compute attention over slots, whose keys and values two gated recurrences write. In every head, with M slots:

        q_t, k_t = phi(W_q x_t), phi(W_k x_t)    v_t = SiLU(W_v x_t)    f_t = sigmoid(W_f x_t)^(1 / temperature)   [M]
        K_t = K_{t-1} diag(f_t) + k_t (1 - f_t)^T           V_t = diag(f_t) V_{t-1} + (1 - f_t) v_t^T
        o_t = V_t^T softmax(K_t^T q_t)                      y_t = W_o RMSNorm(SiLU(o_t))

    The norm is over all heads together. K and V are also the widths of a head's keys and values.

    width:        the width of x and y. num_heads: H. num_slots: M; key_width if None.
    temperature:  the divisor of the log gates. feature_map: the name of phi, "swish" (SiLU) if left out. norm_eps: the epsilon
    of the norm.
    learned_feature_map: whether q_t and k_t are phi(W_phi W_q x_t) and phi(W_phi W_k x_t), with one matrix W_phi [K, K] for both
        and all heads.

    The other arguments, `ConvolutionOptions`, are use_short_conv and those of `glax.nn.linear_attention.Options`. There is no
    output gate: gate_fn is without effect, and use_output_gate a TypeError.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict: K_t [N, H, K, M] as `keys` and V_t [N, H, M, V] as `values` in float32, and with use_short_conv the rows
    of `glax.nn.linear_attention.LinearAttention`.

    Zhang et al. 2024, https://arxiv.org/abs/2409.07146.

    >>> layer = nn.GatedSlotAttention(64, num_heads=2, num_slots=8, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_slots: int | None = None,
        temperature: float = 8.0,
        learned_feature_map: bool = False,
        norm_eps: float = 1e-5,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
        **options: Unpack[ConvolutionOptions],
    ):
        fixed: dict[str, Any] = dict(use_output_gate=False, norm_eps=norm_eps, recurrence=recurrence, rngs=rngs)
        with_map: dict[str, Any] = {"feature_map": "swish", **options}
        super().__init__(width, num_heads=num_heads, **fixed, **with_map)
        self.num_slots, self.temperature = self.key_width if num_slots is None else num_slots, temperature
        init, slots = options.get("kernel_init"), self.num_kv_heads * self.num_slots
        self.slot_gate = self.linear(width, slots, (EMBED, HEADS), rngs, init)
        made: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=init, rngs=rngs)
        K = self.key_width
        self.feature = linear(K, K, (None, None), **made) if learned_feature_map else None

    def output_norm(self, **options) -> RMSNormGated:
        return RMSNormGated(self.num_heads * self.value_width, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        states = super().empty_state(batch)
        del states["recurrent"]
        keys = (batch, self.num_heads, self.key_width, self.num_slots)
        values = (batch, self.num_heads, self.num_slots, self.value_width)
        return states | dict(keys=jnp.zeros(keys, jnp.float32), values=jnp.zeros(values, jnp.float32))

    def heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        if self.feature is not None:
            q, k = (merged(self.feature(by_head(y, y.shape[-1] // self.key_width))) for y in (q, k))
        return super().heads(q, k, jax.nn.silu(v))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        (q, k, v), states = self.inputs(x, state, rows)
        q, k, v = self.heads(q, k, v)
        g = jax.nn.log_sigmoid(by_head(self.slot_gate(x), self.num_kv_heads).astype(jnp.float32)) / self.temperature
        written = (-jnp.expm1(g)).astype(v.dtype)
        g = spread_heads(g, self.num_heads, axis=-2)
        scores, keys = rows.recurrent(self.recurrence, q, k, written, state.get("keys"), gv=g, softmax_scale=1.0)
        p = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
        o, values = rows.recurrent(self.recurrence, p, written, v, state.get("values"), gk=g, softmax_scale=1.0)
        return self.output(self.norm(jax.nn.silu(merged(o)))), states | dict(keys=keys, values=values)
