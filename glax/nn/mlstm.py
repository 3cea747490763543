"""Provide the layer of xLSTM with a matrix memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.mlstm import MLSTMState, mlstm_by, mlstm_step
from glax._src.api.recurrent import recurrent
from glax._src.core.recurrence import Outputs
from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.norms import LayerNorm
from glax.nn.parts import EMBED, HEADS, by_head, check_sizes, linear, merged, soft_cap
from glax.nn.passes import Rows, State

STATES = ("recurrent", "normaliser", "stabiliser")  # C, n and m


class MLSTM(Layer):
    """Compute the mLSTM of xLSTM between projections. In every head:

        i_t = c tanh((w_i . x_t + b_i) / c)      g_t = log_sigmoid(c tanh((w_f . x_t + b_f) / c))      c = gate_cap
        C_t = exp(g_t) C_{t-1} + exp(i_t) k_t v_t^T          n_t = exp(g_t) n_{t-1} + exp(i_t) k_t
        h_t = C_t^T q_t / max(|n_t^T q_t|, 1)                y_t = W_o (sigmoid(W_s x_t) * LayerNorm(h_t))

    with q_t = W_q x_t / sqrt(K), k_t = W_k x_t, v_t = W_v x_t, and eps in the divisor as in `glax.mlstm`. Each head has its own
    norm.

    width: the width of x and y. num_heads: H.
    key_width, value_width: K and V of one head; width // (2 num_heads) and width // num_heads if None.
    gate_cap: c; no limit if None. bias: whether the norm and the projections have a bias; those of i and g always do.
    norm_eps, eps: the epsilons of the norm and of h. b_i starts as -10, and b_f from 3 in the first head to 6 in the last.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is a dict of float32, the fields of `glax.MLSTMState`: C [N, H, K, V] as `recurrent`, n [N, H, K] as `normaliser`
    and m [N, H] as `stabiliser`.

    Beck et al. 2024, https://arxiv.org/abs/2405.04517.

    >>> layer = nn.MLSTM(64, num_heads=2, rngs=nnx.Rngs(0))
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
        gate_cap: float | None = 15.0,
        bias: bool = False,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        key_width = width // (2 * num_heads) if key_width is None else key_width
        value_width = width // num_heads if value_width is None else value_width
        check_sizes(key_width=key_width, value_width=value_width)
        self.width, self.num_heads, self.key_width, self.value_width = width, num_heads, key_width, value_width
        self.gate_cap, self.eps, self.recurrence = gate_cap, eps, recurrence
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.make_projections(bias, kernel_init, **options)
        values = num_heads * value_width
        self.norm = LayerNorm(values, groups=num_heads, epsilon=norm_eps, bias=bias, param_dtype=param_dtype)
        self.output = linear(values, width, (HEADS, EMBED), bias=bias, kernel_init=kernel_init, **options)

    def make_projections(self, bias: bool, kernel_init: Callable | None, **options):
        """Create all projections but W_o. bias: whether those of q, k, v and the output gate have a bias.

        kernel_init: their first values; the kernels of the gates i and f start as 0. options: dtype, param_dtype and rngs.
        """
        keys, values = self.num_heads * self.key_width, self.num_heads * self.value_width
        wide: dict[str, Any] = dict(bias=bias, kernel_init=kernel_init, **options)
        self.query = linear(self.width, keys, (EMBED, HEADS), **wide)
        self.key = linear(self.width, keys, (EMBED, HEADS), **wide)
        self.value = linear(self.width, values, (EMBED, HEADS), **wide)
        self.output_gate = linear(self.width, values, (EMBED, HEADS), **wide)
        gates: dict[str, Any] = dict(bias=True, kernel_init=nnx.initializers.zeros, **options)
        self.input_gate, self.forget_gate = (
            linear(self.width, self.num_heads, (EMBED, HEADS), **gates) for _ in range(2)
        )
        for layer, first in zip((self.input_gate, self.forget_gate), initial_gates(self.num_heads), strict=True):
            assert layer.bias is not None
            layer.bias[...] = first.astype(layer.bias.dtype)

    def projected(self, x: Float[Array, "*rows width"]) -> list[Array]:
        """Return the projections [q, k, v, s, i, f] of x. q and k are [*rows, H K], and q is not divided by sqrt(K). v and s =
        W_s x are [*rows, H V]. The input gate i and the forget gate f are [*rows, H], before their cap."""
        layers = (self.query, self.key, self.value, self.output_gate, self.input_gate, self.forget_gate)
        return [layer(x) for layer in layers]

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.num_heads, self.key_width, self.value_width)
        return {name: jnp.zeros(shape[: 4 - i], jnp.float32) for i, name in enumerate(STATES)}

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        q, k, v, s, i, f = self.projected(x)
        before = MLSTMState(*(state[name] for name in STATES)) if state else None
        options: dict[str, Any] = dict(
            input_gate=self.capped(i), g=jax.nn.log_sigmoid(self.capped(f)), eps=self.eps, step=mlstm_step
        )
        q, k, v = (by_head(y, self.num_heads) for y in (q, k, v))
        h, after = rows.recurrent(self.solve_sequences, q, k, v, before, **options)
        y = self.output(jax.nn.sigmoid(s) * self.norm(merged(h)))
        return y, dict(zip(STATES, after, strict=True))

    def solve_sequences(self, q, k, v, *, input_gate, g, **options) -> Outputs:
        """Return the `Outputs` of `glax.mlstm` for whole sequences, output [*rows, H, V], computed by the layer's `recurrence`.

        q, k: [*rows, H, K]. v: [*rows, H, V]. *rows is [B, T], or [T] for packed sequences without B. input_gate, g: [*rows,
        H], the logarithms of the input gate and of the forget gate: i_t and g_t of the layer. options: eps, and the arguments
        of `glax.mlstm` such as initial_state, an `MLSTMState`, and cu_seqlens.
        """
        arrays = dict(query=q, key=k, value=v, input_gate=input_gate, g=g)
        return mlstm_by(self.recurrence, arrays, **options)

    def capped(self, gate: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Return c tanh(gate / c) in float32, or gate if gate_cap is None. gate: a projection of x with its bias."""
        return soft_cap(gate.astype(jnp.float32), self.gate_cap)


def initial_gates(heads: int) -> Float[Array, "2 H"]:
    """Return the first values of the biases of the input gate, -10, and of the forget gate, from 3 to 6 over the heads."""
    return jnp.stack([jnp.full(heads, -10.0), jnp.linspace(3.0, 6.0, heads)])
