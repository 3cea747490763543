"""Provide the layers of the delta rule: DeltaNet, Gated DeltaNet, Gated DeltaProduct, Comba and Kimi Delta Attention."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax._src.api.named import gated_delta_product_by, gated_delta_product_step, given
from glax._src.api.recurrent import recurrent
from glax._src.core.recurrence import spread_heads
from glax.nn.arguments import checked
from glax.nn.linear_attention import LinearAttention, MixerOptions
from glax.nn.mamba2 import initial_dt_bias
from glax.nn.norms import unit
from glax.nn.parts import EMBED, HEADS, activation, by_head, check_divides, check_sizes, for_rows, merged, parameter
from glax.nn.passes import Rows, State

QK_ACTIVATIONS = {"silu": None, "relu": "relu", "elu": "elu_plus_one", "identity": None}
QK_NORMS = ("l2", "sum")


class DeltaOptions(MixerOptions, total=False):
    """List the arguments that all layers of the delta rule share, with those of `glax.nn.linear_attention.MixerOptions`.

    use_short_conv is True and norm_eps is 1e-5 if left out, unlike there.
    allow_neg_eigval: whether beta is doubled, and so reaches from 0 to 2 and not from 0 to 1; False if left out. The
        eigenvalues of a token's transition then reach from -1 to 1.

    >>> layer = nn.DeltaNet(64, num_heads=2, allow_neg_eigval=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    use_short_conv: bool
    allow_neg_eigval: bool
    norm_eps: float
    recurrence: Callable


class DeltaAttention(LinearAttention):
    """Project, convolve and activate q, k and v, and form the strength beta of the delta rule. Subclasses define `gates` or
    `mix`.

    num_heads: H, the heads of v, beta, the gates and the state.
    num_qk_heads: the heads of q and k, a divisor of num_heads; num_heads if None.
    use_beta: whether beta is sigmoid(W_b x); beta is 1 if False.
    qk_activation: the name of the function of q and k, a key of QK_ACTIVATIONS.

    The other arguments are those of `DeltaOptions` and of `glax.nn.linear_attention.LinearAttention`.
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_qk_heads: int | None = None,
        use_beta: bool = True,
        qk_activation: str = "silu",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
        **options,
    ):
        num_qk_heads = num_heads if num_qk_heads is None else num_qk_heads
        check_divides("num_qk_heads", num_qk_heads, "num_heads", num_heads)
        check_one_of("qk_activation", qk_activation, QK_ACTIVATIONS)
        self.qk_activation, self.allow_neg_eigval = qk_activation, allow_neg_eigval
        super().__init__(
            width,
            num_heads=num_heads,
            num_query_heads=num_qk_heads,
            num_key_heads=num_qk_heads,
            feature_map=QK_ACTIVATIONS[qk_activation],
            qk_conv_activation=self.silu_or_none,
            use_short_conv=use_short_conv,
            norm_eps=norm_eps,
            recurrence=recurrence,
            rngs=rngs,
            **options,
        )
        self.beta = (
            self.linear(width, self.num_updates * num_heads, (EMBED, HEADS), rngs, options.get("kernel_init"))
            if use_beta
            else None
        )

    @property
    def state_passes(self) -> int:
        """Return how often a token passes over all entries of its recurrent states: 1 + 2 n. Each of its n = num_updates
        updates reads and writes the state once, and the query reads the state once."""
        return 1 + 2 * self.num_updates  # an update reads the state, and writes it

    @property
    def silu_or_none(self) -> str | None:
        """Return the name of the function that is applied to q and k before they are divided into heads: "silu" if
        qk_activation is "silu", else None. Other functions are the feature map, which is applied later."""
        return "silu" if self.qk_activation == "silu" else None

    def inputs(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[list[Array], dict]:
        """Return ([q, k, v], {the name of a convolution: its new state}). The dict is empty without convolutions.

        q, k and v are the projections of x, merged over heads, after their convolutions, if there are any. SiLU is applied to
        v, and to q and k if qk_activation is "silu". state, rows: as in `glax.nn.layer.Layer.mix`.
        """
        (q, k, v), states = super().inputs(x, state, rows)
        if not self.use_short_conv:
            act = activation("qk_activation", self.silu_or_none)
            q, k, v = act(q), act(k), jax.nn.silu(v)
        return [q, k, v], states

    def strength(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows betas"]:
        """Return beta [*rows, num_updates * H] in float32: sigmoid(W_b x), or [*rows, H] ones without W_b; doubled if
        allow_neg_eigval."""
        if self.beta is None:
            return self.scaled_beta(jnp.ones((*x.shape[:-1], self.num_heads), jnp.float32))
        return self.scaled_beta(jax.nn.sigmoid(self.beta(x).astype(jnp.float32)))

    def scaled_beta(self, beta: Float[Array, "*rows betas"]) -> Float[Array, "*rows betas"]:
        """Return beta, doubled if allow_neg_eigval."""
        return 2 * beta if self.allow_neg_eigval else beta


class DeltaNet(DeltaAttention):
    """Compute DeltaNet. In every head:

        q_t, k_t, v_t = SiLU(conv(W_q x_t)), SiLU(conv(W_k x_t)), SiLU(conv(W_v x_t))        beta_t = sigmoid(W_b x_t)
        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T                                   o_t = S_t^T q_t / sqrt(K)
        y_t = W_o RMSNorm(o_t)

    The recurrence reads q and k normalised by qk_norm.

    width:         the width of x and y. num_heads: H.
    use_beta:      whether there is a beta; it is 1 if False.
    use_output_gate, gate_fn: whether RMSNorm(o_t) is multiplied by gate_fn(W_s x_t), and the name of this function, such as
                   "swish" (SiLU) or "sigmoid": `glax.nn.linear_attention.Options` lists the names.
    qk_activation: the function of q and k: "silu", "relu", "elu" (elu(x) + 1) or "identity".
    qk_norm:       how q and k are normalised: "l2" for x * rsqrt(sum x^2 + 1e-6), or "sum" for x / max(sum |x|, 1e-6).

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the dict of `glax.nn.linear_attention.LinearAttention`, or S [N, H, K, V] in float32 without use_short_conv.

    The other arguments are those of `glax.nn.delta.DeltaOptions`. Yang et al. 2024, https://arxiv.org/abs/2406.06484.

    >>> layer = nn.DeltaNet(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        use_beta: bool = True,
        use_output_gate: bool = False,
        gate_fn: str = "swish",
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        rngs: nnx.Rngs,
        **options: Unpack[DeltaOptions],
    ):
        check_one_of("qk_norm", qk_norm, QK_NORMS)
        self.qk_norm = qk_norm
        gated: dict[str, Any] = dict(use_output_gate=use_output_gate, gate_fn=gate_fn)
        more: dict[str, Any] = dict(use_beta=use_beta, qk_activation=qk_activation)
        super().__init__(width, num_heads=num_heads, rngs=rngs, **gated, **more, **options)

    def heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        q, k, v = super().heads(q, k, v)
        return (divided_by_sum(q), divided_by_sum(k), v) if self.qk_norm == "sum" else (q, k, v)

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        return dict(beta=self.strength(x), use_qk_l2norm=self.qk_norm == "l2")


class GatedDeltaNet(DeltaAttention):
    """Compute DeltaNet with one decay per head, from a step size as in Mamba-2:

        g_t = -exp(A_log) softplus(W_a x_t + dt_bias)              S_bar = exp(g_t) S_{t-1}
        S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T             y_t = W_o (RMSNorm(o_t) * SiLU(W_s x_t))

    with q, k, v, beta and o as in `DeltaNet`.

    width:        the width of x and y. num_heads: H, the heads of v, the gates and the state.
    num_qk_heads: the heads of q and k, a divisor of num_heads; num_heads if None. Head h reads head h * num_qk_heads //
        num_heads.
    use_output_gate, gate_fn: whether RMSNorm(o_t) is multiplied by gate_fn(W_s x_t), and the name of this function, such as
        "swish" (SiLU) or "sigmoid": `glax.nn.linear_attention.Options` lists the names.
    use_forget_gate: whether there is a decay; g_t is 0 if False.
    A_range:      the range of the uniform first values of exp(A_log). dt_range, dt_floor: dt_bias starts as the inverse
        softplus of a step that is uniform in its logarithm over dt_range, and at least dt_floor.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the dict of `glax.nn.linear_attention.LinearAttention`, or S [N, H, K, V] in float32 without use_short_conv.

    The other arguments are those of `glax.nn.delta.DeltaOptions`. Yang et al. 2024, https://arxiv.org/abs/2412.06464.

    >>> layer = nn.GatedDeltaNet(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_qk_heads: int | None = None,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        use_forget_gate: bool = True,
        A_range: tuple[float, float] = (0.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        rngs: nnx.Rngs,
        **options: Unpack[DeltaOptions],
    ):
        gated: dict[str, Any] = dict(use_output_gate=use_output_gate, gate_fn=gate_fn)
        super().__init__(width, num_heads=num_heads, num_qk_heads=num_qk_heads, rngs=rngs, **gated, **options)
        self.use_forget_gate = use_forget_gate
        if use_forget_gate:
            self.gate = self.linear(width, num_heads, (EMBED, HEADS), rngs, options.get("kernel_init"))
            self.A_log = parameter(initial_A_log(rngs, num_heads, A_range).astype(self.param_dtype), HEADS)
            dt_bias = initial_dt_bias(rngs, num_heads, dt_range, dt_floor)
            self.dt_bias = parameter(dt_bias.astype(self.param_dtype), HEADS)

    def log_gate(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows H"] | None:
        """Return the log decay g [*rows, H] in float32, or None if there is none."""
        return log_decay(self.gate(x), self.A_log[...], self.dt_bias[...]) if self.use_forget_gate else None

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        return dict(g=self.log_gate(x), beta=self.strength(x), use_qk_l2norm=True)


class GatedDeltaProduct(GatedDeltaNet):
    """Compute Gated DeltaNet with num_updates keys, values and strengths a token. The state decays once a token:

        S_t0 = exp(g_t) S_{t-1}        S_tj = S_t,j-1 + beta_tj k_tj (v_tj - S_t,j-1^T k_tj)^T, j = 1 ... n
        o_t = S_tn^T q_t / sqrt(K)     y_t = W_o (RMSNorm(o_t) * SiLU(W_s x_t))

    num_updates: n. The outputs of W_k, W_v and W_b are those of all heads for j = 1, then for j = 2, and so on.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is as in `GatedDeltaNet`: S behind the last update of a token.

    The other arguments are those of `GatedDeltaNet`. Siems et al. 2025, https://arxiv.org/abs/2502.10297.

    >>> layer = nn.GatedDeltaProduct(64, num_heads=2, num_updates=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(self, width: int, *, num_heads: int, num_updates: int = 2, rngs: nnx.Rngs, **options: Any):
        more: dict[str, Any] = options | dict(num_updates=num_updates)
        super().__init__(width, num_heads=num_heads, rngs=rngs, **more)

    def heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return q [*rows, num_qk_heads, K], k [*rows, n, num_qk_heads, K] and v [*rows, n, H, V], with the feature map applied
        to q and k. The arguments are merged over heads, and k and v also over the n updates."""
        return super().heads(q, by_head(k, self.num_updates), by_head(v, self.num_updates))

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        (q, k, v), states = self.inputs(x, state, rows)
        q, k, v = self.heads(q, k, v)
        gates, n = self.gates(x), self.num_updates
        beta = by_head(gates.pop("beta"), n)
        step = functools.partial(gated_delta_product_step, num_updates=n, g=None)
        o, after = rows.recurrent(self.by_updates, q, k, v, state.get("recurrent"), step=step, beta=beta, **gates)
        return self.outputs(o, x), states | dict(recurrent=after)

    def by_updates(self, q, k, v, *, g, beta, **options) -> tuple[Array, Array]:
        """Return the outputs and final states of `glax.gated_delta_product` for whole sequences. They are solved by the
        function that the layer's constructor got as `recurrence`.

        q: [*rows, num_qk_heads, K]. k: [*rows, n, num_qk_heads, K]. v: [*rows, n, H, V]. g: the log decays, [*rows, H], or
        None.
        beta: [*rows, n, H]. *rows is [B, T], or [T] for packed sequences without B. options: those of
        `glax.gated_delta_product`, such as initial_state and cu_seqlens.
        """

        def in_rows(x: Array, at: int) -> Array:
            """Return x with its axis `at` of tokens and its axis at + 1 of updates merged into one axis of rows."""
            return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

        at = q.ndim - 3
        k, v, beta = in_rows(k, at), in_rows(v, at), in_rows(beta, at)
        arrays = dict(query=q, key=k, value=v, beta=beta) | given(g=g)
        return gated_delta_product_by(self.recurrence, arrays, num_updates=self.num_updates, **options)


class Comba(GatedDeltaNet):
    """Compute Comba, a delta rule that reads the state before it decays, and subtracts a part of k from q:

        p_t = sigmoid(b) k_t                               q'_t = q_t - D p_t
        S_t = exp(g_t) S_{t-1} + beta_t n(k_t) (v_t - S_{t-1}^T n(p_t))^T
        o_t = S_t^T n(q'_t) / sqrt(K)                      y_t = W_o (RMSNorm(o_t) * sigmoid(W_s x_t))

    with q, k, v, g and beta as in `GatedDeltaNet`, numbers b and D for each head of k, and n(x) = x / sqrt(sum x^2 + 1e-6). In
    n(p_t) sigmoid(b) cancels but for the 1e-6, so b acts almost only by q'.

    use_output_correction, correction_factor: whether there is D, and its first value. use_inner_decay: whether there is b, which
    starts as 1; p_t is k_t if False. gate_fn: the name of the function of W_s x_t, in place of sigmoid:
    `glax.nn.linear_attention.Options` lists the names.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is as in `GatedDeltaNet`.

    The other arguments are those of `GatedDeltaNet`. Hu et al. 2025, https://arxiv.org/abs/2506.02475.

    >>> layer = nn.Comba(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        gate_fn: str = "sigmoid",
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, num_heads=num_heads, gate_fn=gate_fn, rngs=rngs, **options)
        heads, dtype = self.num_key_heads, self.param_dtype
        self.inner_decay = parameter(jnp.ones(heads, dtype), HEADS) if use_inner_decay else None
        correction = parameter(jnp.full(heads, correction_factor, dtype), HEADS)
        self.correction = correction if use_output_correction else None

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        (q, k, v), states = self.inputs(x, state, rows)
        q, k, v = self.heads(q, k, v)
        wide, share = k.astype(jnp.float32), jnp.ones((), jnp.float32)
        if self.inner_decay is not None:
            share = jax.nn.sigmoid(for_rows(wide, self.inner_decay[...][:, None]))
        if self.correction is not None:
            q = (q - for_rows(wide, self.correction[...][:, None]) * (share * wide).astype(k.dtype)).astype(q.dtype)
        beta = self.strength(x)[..., None]
        # The norm of share * k, divided by share: its gradient in share, which is small, is no difference of larger numbers.
        p = spread_heads(unit(wide, 1e-6 / share**2), self.num_heads, -2)
        erasure: dict[str, Any] = dict(erase=(beta * p).astype(v.dtype), erase_before_decay=True)
        v = (beta * v.astype(jnp.float32)).astype(v.dtype)
        q, k = unit(q), unit(k)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), g=self.log_gate(x), **erasure)
        return self.outputs(o, x), states | dict(recurrent=after)


class KimiDeltaAttention(DeltaAttention):
    """Compute DeltaNet with one decay per key channel, from projections of low rank:

        f_t = W_f W_r x_t + dt_bias                                S_bar = diag(exp(g_t)) S_{t-1}
        g_t = -exp(A_log) softplus(f_t)                            S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T
        y_t = W_o (RMSNorm(o_t) * sigmoid(W_s W_t x_t + b))

    with q, k, v, beta and o as in `DeltaNet`.

    width:        the width of x and y. num_heads: H, the heads of v, the gates and the state.
    num_qk_heads: the heads of q and k, a divisor of num_heads; num_heads if None. Head h reads head h * num_qk_heads //
        num_heads.
    gate_rank:    the rank of W_f W_r and of W_s W_t; value_width if None. low_rank: whether they are such products; else each is
        one matrix. low_rank_output: whether W_s W_t is such a product; as low_rank if None.
    lower_bound:  a negative bound of the log gates: g_t = lower_bound sigmoid(exp(A_log) f_t). No bound if None.
    gate_fn:      the name of the function of W_s W_t x_t + b, in place of sigmoid: `glax.nn.linear_attention.Options` lists the
        names. gate_bias: whether there is b.
    A_range:      the range of the uniform first values of exp(A_log). dt_range, dt_floor: as in `GatedDeltaNet`.

    layer(x [B, T, width]) returns (y [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors.
    The state is the dict of `glax.nn.linear_attention.LinearAttention`, or S [N, H, K, V] in float32 without use_short_conv.

    The other arguments are those of `glax.nn.delta.DeltaOptions`. Kimi Team 2025, https://arxiv.org/abs/2510.26692.

    >>> layer = nn.KimiDeltaAttention(64, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_qk_heads: int | None = None,
        gate_rank: int | None = None,
        low_rank: bool = True,
        low_rank_output: bool | None = None,
        lower_bound: float | None = None,
        gate_fn: str = "sigmoid",
        gate_bias: bool = True,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        rngs: nnx.Rngs,
        **options: Unpack[DeltaOptions],
    ):
        self.lower_bound = lower_bound
        gated: dict[str, Any] = dict(
            use_output_gate=False, gate_fn=gate_fn
        )  # the gate of LinearAttention has full rank
        super().__init__(width, num_heads=num_heads, num_qk_heads=num_qk_heads, rngs=rngs, **gated, **options)
        gate_rank = self.value_width if gate_rank is None else gate_rank
        check_sizes(gate_rank=gate_rank)
        gates, values = num_heads * self.key_width, num_heads * self.value_width
        init, low_rank_output = options.get("kernel_init"), low_rank if low_rank_output is None else low_rank_output

        def product(is_low: bool, outputs: int, **more) -> tuple[nnx.Linear | None, nnx.Linear]:
            down = self.linear(width, gate_rank, (EMBED, None), rngs, init) if is_low else None
            inputs, axis = (gate_rank, None) if is_low else (width, EMBED)
            return down, self.linear(inputs, outputs, (axis, HEADS), rngs, init, **more)

        self.gate_down, self.gate_up = product(low_rank, gates)
        self.output_gate_down, self.output_gate_up = product(low_rank_output, values, bias=gate_bias)
        self.A_log = parameter(initial_A_log(rngs, num_heads, A_range).astype(self.param_dtype), HEADS)
        self.dt_bias = parameter(initial_dt_bias(rngs, gates, dt_range, dt_floor).astype(self.param_dtype), HEADS)

    def log_gate(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows H K"]:
        """Return the log decay g [*rows, H, K] of every key channel, in float32."""
        f = self.gate_up(x if self.gate_down is None else self.gate_down(x)).astype(jnp.float32)
        f = by_head(f + for_rows(f, self.dt_bias[...]), self.num_heads)
        rate = jnp.exp(for_rows(f, self.A_log[...][:, None]))
        if self.lower_bound is None:
            return -rate * jax.nn.softplus(f)
        return self.lower_bound * jax.nn.sigmoid(rate * f)

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        return dict(g=self.log_gate(x), beta=self.strength(x), use_qk_l2norm=True)

    def outputs(self, o: Float[Array, "*rows H V"], x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        down = x if self.output_gate_down is None else self.output_gate_down(x)
        gate = by_head(self.output_gate_up(down), self.num_heads)
        return self.output(merged(self.norm(o, gate)))


def log_decay(
    a: Float[Array, "*rows H"], A_log: Float[Array, "H"], dt_bias: Float[Array, "H"]
) -> Float[Array, "*rows H"]:
    """Return -exp(A_log) softplus(a + dt_bias), [*rows, H], in float32."""
    step = jax.nn.softplus(a.astype(jnp.float32) + for_rows(a, dt_bias))
    return -jnp.exp(for_rows(step, A_log)) * step


# ---- initial values and checks -----------------------------------------------------------------------------------------


def initial_A_log(rngs: nnx.Rngs, heads: int, span: tuple[float, float]) -> Float[Array, "H"]:
    """Return the logarithm of uniform numbers in `span`, [H]. The lower end of `span` may be 0."""
    A = jax.random.uniform(rngs.params(), (heads,), jnp.float32, *span)
    return jnp.log(jnp.maximum(A, 1e-6))


def divided_by_sum(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """Return x / max(sum |x|, 1e-6) over the last axis. Sums are float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide / jnp.maximum(jnp.abs(wide).sum(-1, keepdims=True), 1e-6)).astype(x.dtype)


def check_one_of(name: str, value, known):
    """Raise ValueError, which names the argument `name`, unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
