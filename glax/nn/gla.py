"""Provide gated linear attention with per-key gates, and its simple form with per-head gates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent, recurrent_gla
from glax._src.core.recurrence import spread_heads
from glax.nn.arguments import checked
from glax.nn.linear_attention import LinearAttention, NormOptions, OwnRecurrenceOptions, Unpack
from glax.nn.parts import EMBED, HEADS, by_head, check_divides, for_rows, parameter


class GatedLinearAttention(LinearAttention):
    """Compute gated linear attention between projections. In every head:

        q_t, k_t, v_t = W_q x_t, W_k x_t, W_v x_t            g_t = log_sigmoid(W_g W_r x_t + b) / temperature
        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T             o_t = S_t^T q_t / sqrt(K)
        y_t = W_o (RMSNorm(o_t) * SiLU(W_s x_t))

    width:          the width of x and y.
    num_heads:      H, the heads of q and the state.
    gate_rank:      the rank of W_g W_r.
    num_gate_heads: the heads of the gates, a divisor of num_heads; num_heads if None. Head h reads h * num_gate_heads //
        num_heads.
    temperature:    the divisor of the log gates, 16 in the paper. A smaller one lets channels forget faster.
    clamp_min:      the least log gate; no limit if None.
    gate_bias_init: the first values of b, a function (key, shape, dtype); zeros if None.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is S [N, H, K, V] in float32, or with use_short_conv the dict of `glax.nn.linear_attention.LinearAttention`.

    The other arguments are those of `glax.nn.linear_attention.Options`. Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> layer = nn.GatedLinearAttention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        gate_rank: int = 16,
        num_gate_heads: int | None = None,
        temperature: float = 16.0,
        clamp_min: float | None = None,
        gate_bias_init: Callable | None = None,
        recurrence: Callable = recurrent_gla,
        rngs: nnx.Rngs,
        **options: Unpack[OwnRecurrenceOptions],
    ):
        super().__init__(width, num_heads=num_heads, recurrence=recurrence, rngs=rngs, **options)
        num_gate_heads = num_heads if num_gate_heads is None else num_gate_heads
        check_divides("num_gate_heads", num_gate_heads, "num_heads", num_heads)
        self.num_gate_heads, self.temperature, self.clamp_min = num_gate_heads, temperature, clamp_min
        gates = num_gate_heads * self.key_width
        self.gate_down = self.linear(width, gate_rank, (EMBED, None), rngs, options.get("kernel_init"))
        self.gate_up = self.linear(gate_rank, gates, (None, HEADS), rngs, options.get("kernel_init"))
        bias_init = nnx.initializers.zeros if gate_bias_init is None else gate_bias_init
        self.gate_bias = parameter(bias_init(rngs.params(), (gates,), self.param_dtype), HEADS)

    def log_gate(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows H K"]:
        """Return the log decay g [*rows, H, K] of every key channel, in float32, at least clamp_min if that is given. H is
        num_heads."""
        logits = self.gate_up(self.gate_down(x)).astype(jnp.float32)
        g = jax.nn.log_sigmoid(logits + for_rows(x, self.gate_bias[...])) / self.temperature
        g = g if self.clamp_min is None else jnp.maximum(g, self.clamp_min)
        return spread_heads(by_head(g, self.num_gate_heads), self.num_heads, axis=-2)

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        return dict(g=self.log_gate(x))


class SimpleGatedLinearAttention(LinearAttention):
    """Compute `GatedLinearAttention` with one gate per head:

        g_t = log_sigmoid(W_g x_t + b) / temperature            S_t = exp(g_t) S_{t-1} + k_t v_t^T

    width, num_heads, temperature: as in GatedLinearAttention. use_short_conv: whether q, k and v pass through convolutions
    with SiLU. The other arguments, norm_eps and recurrence among them, are those of `glax.nn.linear_attention.Options`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the dict of `glax.nn.linear_attention.LinearAttention`, or S [N, H, K, V] in float32 without use_short_conv.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635; Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    >>> layer = nn.SimpleGatedLinearAttention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        temperature: float = 16.0,
        use_short_conv: bool = True,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
        **options: Unpack[NormOptions],
    ):
        super().__init__(
            width, num_heads=num_heads, use_short_conv=use_short_conv, recurrence=recurrence, rngs=rngs, **options
        )
        self.temperature = temperature
        self.gate = self.linear(width, num_heads, (EMBED, HEADS), rngs, options.get("kernel_init"), bias=True)

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        return dict(g=jax.nn.log_sigmoid(self.gate(x).astype(jnp.float32)) / self.temperature)
