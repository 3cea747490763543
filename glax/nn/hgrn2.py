"""Provide HGRN2: gated linear attention whose key is one minus its decay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent_gla
from glax.nn.arguments import checked
from glax.nn.linear_attention import ConvolutionOptions, LinearAttention, Unpack
from glax.nn.norms import RMSNormGated
from glax.nn.parts import by_head, for_rows, merged
from glax.nn.passes import Rows, State


class HGRN2Attention(LinearAttention):
    """Compute the recurrence of HGRN2 between projections. In every head:

        q_t = SiLU(W_q x_t)      f_t = b + (1 - b) sigmoid(W_f x_t)      v_t = W_i x_t
        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T            o_t = S_t^T q_t / sqrt(K)
        y_t = W_o RMSNorm(o_t)

    The norm is over all heads together. W_f is the parameter `key`. lower_bound: b [H K] from 0 to 1, an argument of `mix`; 0
    if None. The blocks of HGRN2 share one table of b over the layers. The other arguments are those of
    `glax.nn.linear_attention.Options`; the convolutions have no activation.

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
        g = jax.nn.log_sigmoid(f.astype(jnp.float32))
        if lower_bound is not None:
            b = for_rows(x, lower_bound)
            g = jnp.logaddexp(jnp.log(b), jnp.log1p(-b) + g)
        k = (-jnp.expm1(g)).astype(v.dtype)
        q, k, v = self.heads(jax.nn.silu(q), k, v)
        g = by_head(g, self.num_kv_heads)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), g=g)
        return self.output(self.norm(merged(o))), states | dict(recurrent=after)
