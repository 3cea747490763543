"""Gated linear attention as a layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glax._src.api.recurrent import recurrent_gla
from glax._src.core.bind import check_array, check_integer, check_real, known_number
from glax._src.core.decay import promoted
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.prefill import prefill_into


class GatedLinearAttention(nnx.Module):
    """Projections around the recurrence, in every head:

        q_t, k_t, v_t = W_q x_t, W_k x_t, W_v x_t            g_t = log_sigmoid(W_g W_r x_t + b) / temperature
        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T             o_t = S_t^T q_t / sqrt(K)
        y_t = W_o (RMSNorm(o_t) * SiLU(W_s x_t))

    The log gate is of low rank but for its bias, which begins spread: some channels forget within a token or two, and
    so tell the order of the last ones; some remember hundreds.

    width:         of x and y.
    num_heads:     H, of q, gates and state.
    num_kv_heads:  of k and v; divides num_heads, which it is if None. Head h reads head h * num_kv_heads // num_heads.
    key_width, value_width: K and V of one head; width // num_heads if None.
    temperature:   16 in the paper; with less, channels can forget faster.
    dtype:         of the projections and of q, k and v; that of x and the parameters if None. The state is float32.
    recurrence:    what solves whole sequences: `glax.recurrent_gla`, or that of `glax.parallel` with its mesh and axes.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        gate_rank: int = 16,
        temperature: float = 16.0,
        dtype: jnp.dtype | None = None,
        recurrence: Callable = recurrent_gla,
        rngs: nnx.Rngs,
    ):
        check_sizes(width=width, num_heads=num_heads, gate_rank=gate_rank)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        key_width = width // num_heads if key_width is None else key_width
        value_width = width // num_heads if value_width is None else value_width
        check_sizes(num_kv_heads=num_kv_heads, key_width=key_width, value_width=value_width)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        check_real("temperature", temperature)
        if not known_number(temperature) > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.recurrence, self.temperature = recurrence, temperature
        self.width, self.num_heads, self.num_kv_heads = width, num_heads, num_kv_heads
        self.key_width, self.value_width = key_width, value_width
        keys, values = num_heads * self.key_width, num_heads * self.value_width

        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.query = linear(width, keys)
        self.key = linear(width, self.num_kv_heads * self.key_width)
        self.value = linear(width, self.num_kv_heads * self.value_width)
        self.gate_down, self.gate_up = linear(width, gate_rank), linear(gate_rank, keys)
        self.gate_bias = nnx.Param(jnp.tile(jnp.linspace(-4.0, 4.0, self.key_width), num_heads))
        # Narrower, Flax would mix dtypes inside, which jax_numpy_dtype_promotion may forbid.
        norm_dtype = None if dtype is None else promoted(dtype, jnp.float32)
        self.norm = nnx.RMSNorm(self.value_width, dtype=norm_dtype, rngs=rngs)
        self.output_gate, self.output = linear(width, values), linear(values, width)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        initial_state: Float[Array, "N H K V"] | None = None,
        cu_seqlens: Int[Array, "N+1"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        pad_id: int | None = None,
    ) -> tuple[Float[Array, "B T width"], Float[Array, "N H K V"]]:
        """y, and the state behind the last token of each sequence.

        Packed as in `glax.recurrent`, by segment_ids and pad_id, or by cu_seqlens with a B that is 1 or absent.
        """
        check_rows(x, self.width, "[B, T, width], or [T, width] with cu_seqlens", 2, 3)
        q, k, v, g = self.inputs(x)
        options = dict(initial_state=initial_state, cu_seqlens=cu_seqlens)
        if segment_ids is not None:  # a recurrence of the user's own may have no such argument
            options |= dict(segment_ids=segment_ids, pad_id=pad_id)
        o, state = self.recurrence(q, k, v, g, **options)
        return self.outputs(o, x), state

    def prefill_into(
        self,
        x: Float[Array, "T width"],
        pool: Float[Array, "P H K V"],
        slots: Int[Array, "N"],
        cu_seqlens: Int[Array, "N+1"],
        fresh: Bool[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T width"], Float[Array, "P H K V"]]:
        """y of packed prompts, and the pool with the states behind them; see `glax.prefill_into`."""
        check_rows(x, self.width, "[T, width]", 2)
        q, k, v, g = self.inputs(x)
        o, pool = prefill_into(pool, slots, q, k, v, g, cu_seqlens=cu_seqlens, fresh=fresh)
        return self.outputs(o, x), pool

    def step(
        self,
        x: Float[Array, "B width"],
        state: Float[Array, "B H K V"] | Float[Array, "P H K V"],
        slots: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B width"], Array]:
        """The same for one token of each sequence: y and the new state, or pool; see `glax.recurrent_step`."""
        check_rows(x, self.width, "[B, width]", 2)
        q, k, v, g = self.inputs(x)
        o, state = recurrent_step(q, k, v, state, g, slots=slots)
        return self.outputs(o, x), state

    def initial_state(self, batch: int) -> Float[Array, "B H K V"]:
        return jnp.zeros((batch, self.num_heads, self.key_width, self.value_width), jnp.float32)

    def inputs(self, x: Float[Array, "*rows width"]) -> tuple[Array, Array, Array, Array]:
        """q, k, v and the log gate, each [*rows, heads, width of a head]."""

        def by_head(y, heads):
            return y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads)

        g = self.gate_up(self.gate_down(x)).astype(jnp.float32) + jnp.expand_dims(
            self.gate_bias[...], range(x.ndim - 1)
        )
        return (
            by_head(self.query(x), self.num_heads),
            by_head(self.key(x), self.num_kv_heads),
            by_head(self.value(x), self.num_kv_heads),
            by_head(jax.nn.log_sigmoid(g) / self.temperature, self.num_heads),
        )

    def outputs(self, o: Float[Array, "*rows H V"], x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        gate = jax.nn.silu(self.output_gate(x))
        return self.output(self.norm(o).astype(gate.dtype).reshape(gate.shape) * gate)


def check_sizes(**sizes):
    """Check for integers of at least 1."""
    for name, size in sizes.items():
        check_integer(name, size)
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_rows(x, width: int, form: str, *ranks: int):
    check_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if x.ndim not in ranks or x.shape[-1] != width:
        raise ValueError(f"x must be {form}, with width={width}, got shape {x.shape}")
