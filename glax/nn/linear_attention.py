"""Define what the linear attentions have in common: projections, short convolutions, and the output's norm and gate."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax.nn.arguments import checked
from glax.nn.convolution import ShortConvolution
from glax.nn.layer import Layer
from glax.nn.norms import RMSNormGated
from glax.nn.parts import EMBED, HEADS, activation, by_head, check_divides, check_sizes, linear, merged
from glax.nn.passes import Rows, State


class MixerOptions(TypedDict, total=False):
    """List the arguments that linear attentions and layers of the delta rule share.

    key_width, value_width: K and V of one head; width // num_heads if None.
    use_short_conv, conv_size, conv_bias: whether a ShortConvolution follows each projection of q, k and v (False unless the
                   layer says otherwise); its size (4); whether it has a bias (False).
    norm_eps, elementwise_affine: the epsilon of the norm of each head's output, whose default each layer's signature has, and
                   whether the norm has a scale (True).
    dtype:         the dtype of the projections and of q, k, v and y; the dtype of x and the parameters if None. The state is
                   float32.
    param_dtype:   the dtype of the parameters; float32 by default.
    kernel_init:   a function (key, shape, dtype) that returns the first values of a projection; normal with a deviation of 0.02
                   if None.
    filter_init:   the same of a convolution; those of torch.nn.Conv1d if None.
    recurrence:    the function that solves whole sequences: `glax.recurrent`, or `glax.parallel.recurrent` with its mesh and
                   axes.

    use_short_conv, norm_eps and recurrence are arguments of most layers, and so described here. A layer whose signature has none
    of that name, nor options with it, fixes it and raises TypeError for it.

    >>> layer = nn.GatedDeltaNet(64, num_heads=2, key_width=16, conv_size=3, rngs=nnx.Rngs(0))
    >>> layer.initial_state(1)["recurrent"].shape
    (1, 2, 16, 32)
    """

    key_width: int | None
    value_width: int | None
    conv_size: int
    conv_bias: bool
    elementwise_affine: bool
    dtype: jnp.dtype | None
    param_dtype: DTypeLike
    kernel_init: Callable | None
    filter_init: Callable | None


class Options(MixerOptions, total=False):
    """List the arguments that all linear attentions share, with those of `MixerOptions`. Convolutions have SiLU behind them.

    num_kv_heads:  the heads of k and v, a divisor of num_heads; num_heads if None. Head h reads h * num_kv_heads // num_heads.
    feature_map:   the name of a function of q and k, such as "relu"; none if None.
    use_output_gate, gate_fn: whether the norm of the output is multiplied by gate_fn(W_s x) (True), and the name of this
                   function ("swish").

    Names of functions are the keys of `glax.nn.parts.ACTIVATIONS`: "silu" and "swish", which are one function, "sigmoid",
    "logsigmoid", "tanh", "relu", "relu6", "sqrelu" (the square of relu), "leaky_relu", "elu_plus_one", "hardswish", "mish",
    "gelu" (by tanh), "gelu_exact", "quick_gelu", and "identity". ValueError for another name.

    >>> layer = nn.GatedLinearAttention(64, num_heads=4, num_kv_heads=2, feature_map="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    num_kv_heads: int | None
    feature_map: str | None
    use_output_gate: bool
    gate_fn: str


class ConvolutionOptions(Options, total=False):
    """List the further options of a layer whose signature has norm_eps and recurrence itself: `Options` and use_short_conv."""

    use_short_conv: bool


class NormOptions(Options, total=False):
    """List the further options of a layer whose signature has use_short_conv and recurrence itself: `Options` and norm_eps."""

    norm_eps: float


class OwnRecurrenceOptions(ConvolutionOptions, NormOptions, total=False):
    """List the further options of a layer whose signature has recurrence itself: `Options`, use_short_conv and norm_eps."""


class LinearAttention(Layer):
    """Compute y = W_o (RMSNorm(o) * gate_fn(W_s x)) for o = recurrence(q, k, v) of each head, with q, k, v = conv(W x).
    Subclasses define the gates of the recurrence. W_s is the projection of the output's gate.

    The state is S [N, H, K, V] in float32. With convolutions it is a dict: S as `recurrent`, and the last conv_size - 1 rows of
    q, k and v before their convolutions, [N, conv_size - 1, channels], as `query_conv`, `key_conv` and `value_conv`.

    width: the width of x and y. num_heads: H, the heads of the output. `Options` has the other arguments.
    num_query_heads, num_key_heads: the heads of q and of k; num_heads and num_kv_heads if None.
    num_updates: n, how many k and v a token has. W_k x and W_v x hold all heads of the first k and v, then all heads of the
        second, and so on. A subclass with n above 1 defines `heads` and `mix` for them, as `glax.nn.GatedDeltaProduct` does.
    qk_conv_activation, conv_activation: the name of the function behind the convolutions of q and k, and of v, as in `Options`;
        none if None.
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_query_heads: int | None = None,
        num_key_heads: int | None = None,
        num_updates: int = 1,
        conv_activation: str | None = "silu",
        qk_conv_activation: str | None = "silu",
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        norm_eps: float = 1e-6,
        elementwise_affine: bool = True,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        filter_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        key_width = width // num_heads if key_width is None else key_width
        value_width = width // num_heads if value_width is None else value_width
        check_sizes(key_width=key_width, value_width=value_width)
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        for name, function in (
            ("feature_map", feature_map),
            ("gate_fn", gate_fn),
            ("conv_activation", conv_activation),
        ):
            activation(name, function)
        activation("qk_conv_activation", qk_conv_activation)
        self.width, self.num_heads, self.num_kv_heads = width, num_heads, num_kv_heads
        self.num_query_heads = num_heads if num_query_heads is None else num_query_heads
        self.num_key_heads = num_kv_heads if num_key_heads is None else num_key_heads
        self.key_width, self.value_width, self.feature_map = key_width, value_width, feature_map
        self.recurrence, self.dtype, self.param_dtype = recurrence, dtype, param_dtype

        self.num_updates = num_updates
        queries, keys = self.num_query_heads * key_width, num_updates * self.num_key_heads * key_width
        values = num_updates * num_kv_heads * value_width
        self.query = self.linear(width, queries, (EMBED, HEADS), rngs, kernel_init)
        self.key = self.linear(width, keys, (EMBED, HEADS), rngs, kernel_init)
        self.value = self.linear(width, values, (EMBED, HEADS), rngs, kernel_init)
        self.use_short_conv = use_short_conv
        if use_short_conv:
            options: dict[str, Any] = dict(
                bias=conv_bias, filter_init=filter_init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )
            self.query_conv = ShortConvolution(queries, conv_size, activation=qk_conv_activation, **options)
            self.key_conv = ShortConvolution(keys, conv_size, activation=qk_conv_activation, **options)
            self.value_conv = ShortConvolution(values, conv_size, activation=conv_activation, **options)
        self.norm = self.output_norm(
            gate_fn=gate_fn, epsilon=norm_eps, elementwise_affine=elementwise_affine, param_dtype=param_dtype
        )
        out = num_heads * value_width
        self.output_gate = self.linear(width, out, (EMBED, HEADS), rngs, kernel_init) if use_output_gate else None
        self.output = self.linear(out, width, (HEADS, EMBED), rngs, kernel_init)

    def linear(
        self,
        inputs: int,
        outputs: int,
        axes: tuple,
        rngs: nnx.Rngs,
        kernel_init: Callable | None,
        *,
        bias: bool = False,
    ) -> nnx.Linear:
        """Return a projection in the layer's dtypes. axes: the logical axes of its kernel [inputs, outputs]. kernel_init: a
        function (key, shape, dtype) that returns the kernel's first values; None for the default of `glax.nn.parts.linear`.

        kernel_init is not stored in the layer. A closure there would make equal layers unequal, so that each is compiled for
        itself, and none can be pickled.
        """
        options: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs)
        return linear(inputs, outputs, axes, bias=bias, kernel_init=kernel_init, **options)

    def output_norm(self, **options) -> RMSNormGated:
        """Return the norm of the outputs o: in each head here. options: further arguments of RMSNormGated."""
        return RMSNormGated(self.value_width, **options)

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        shape = (batch, self.num_heads, self.key_width, self.value_width)
        state = dict(recurrent=jnp.zeros(shape, jnp.float32))
        if self.use_short_conv:
            convolutions = dict(query_conv=self.query_conv, key_conv=self.key_conv, value_conv=self.value_conv)
            state |= {name: conv.initial_state(batch) for name, conv in convolutions.items()}
        return state

    def inputs(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[list[Array], dict]:
        """Return [q, k, v], merged over heads, and the new states of the convolutions by name, {} without convolutions.

        q, k and v are the projections of x after their convolutions, if there are any. state, rows: as in
        `glax.nn.layer.Layer.mix`.
        """
        projected, states = [self.query(x), self.key(x), self.value(x)], {}
        if self.use_short_conv:
            named = dict(query_conv=self.query_conv, key_conv=self.key_conv, value_conv=self.value_conv)
            for i, (name, conv) in enumerate(named.items()):
                projected[i], states[name] = conv.extend(projected[i], state.get(name), rows)
        return projected, states

    def heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return q [*rows, num_query_heads, K], k [*rows, num_key_heads, K] and v [*rows, num_kv_heads, V], with the feature
        map applied to q and k. The arguments are merged over heads."""
        feature_map = activation("feature_map", self.feature_map)
        q, k = feature_map(q), feature_map(k)
        return by_head(q, self.num_query_heads), by_head(k, self.num_key_heads), by_head(v, self.num_kv_heads)

    def gates(self, x: Float[Array, "*rows width"]) -> dict[str, Any]:
        """Return {name: value} of the arguments of the recurrence that x determines, such as g and beta. Subclasses that do not
        define `mix` define it."""
        raise NotImplementedError

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        (q, k, v), states = self.inputs(x, state, rows)
        q, k, v = self.heads(q, k, v)
        o, after = rows.recurrent(self.recurrence, q, k, v, state.get("recurrent"), **self.gates(x))
        return self.outputs(o, x), states | dict(recurrent=after)

    def outputs(self, o: Float[Array, "*rows H V"], x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return y from the outputs o of the recurrence: W_o of their norm, with the gate of x if there is one."""
        gate = None if self.output_gate is None else by_head(self.output_gate(x), self.num_heads)
        return self.output(merged(self.norm(o, gate)))


__all__ = ["LinearAttention", "MixerOptions", "Options", "Unpack"]
