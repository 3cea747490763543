"""Provide Mamba-3's mixer, a state-space model with rotated keys, a trapezoid over two tokens, and one or several inputs."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.api.mamba3 import Mamba3State, mamba3_by, mamba3_step, state_shapes
from glax._src.api.named import given
from glax._src.api.recurrent import recurrent
from glax.nn.arguments import checked
from glax.nn.layer import Layer
from glax.nn.mamba2 import initial_dt_bias
from glax.nn.norms import RMSNorm, RMSNormGated
from glax.nn.parts import EMBED, HEADS, by_head, check_divides, for_rows, linear, merged, parameter
from glax.nn.passes import Rows, State

STATES = ("angle", "recurrent", "last_key", "last_value")  # the fields of Mamba3State
# The arguments of `mamba3` beside Q, K and V: those that are [*rows, H] here and [B, H, T] there; those that are [*rows, ...] in
# both; and those without rows.
GATES, OF_ROWS, OF_ALL = (
    ("ADT", "DT", "Trap"),
    ("Angles", "Z"),
    ("Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "D"),
)


class Mamba3(Layer):
    """Compute Mamba-3's mixer. In every head h, of group h // (H / groups):

        z_t, x_t, B_t, C_t, dt_t, a_t, trap_t, angles_t = W_in u_t
        dt_t = softplus(dt_t + dt_bias)                      A_t = min(-softplus(a_t), -A_floor)
        y_t = mamba3(RMSNorm(C_t), RMSNorm(B_t), x_t, dt_t A_t, dt_t, trap_t, C_bias, B_bias, angles_t, D) * SiLU(z_t)
        u'_t = W_out y_t

    with the arguments of `glax.mamba3`. With mimo_rank R, B_t and C_t are R keys and R queries of one state. The parameters
    mimo_x, mimo_z and mimo_o [H, R, V] then form R values mimo_x_r * x_t and R gates SiLU(mimo_z_r * z_t), and y_t is the sum
    over r of mimo_o_r * output r * gate r.

    width:         the width of u and u'. num_heads, head_width: H and V. state_width: K, an even number. groups: the number
                   of groups of heads that share B and C; divides num_heads.
    rope_fraction: 0.5 or 1, the part of the columns of B and C that is rotated: their first K * rope_fraction // 2 pairs.
    mimo_rank:     R; one input if None. Pair i is columns i and K / 2 + i with R, and columns 2 i and 2 i + 1 without.
    use_norm:      whether y_t is RMSNorm(y_t) * SiLU(z_t), with the norm in each head.
    A_floor:       the least |A_t|. bias: whether W_in and W_out have a bias. norm_eps: the epsilon of the norms.
    dt_range, dt_floor: as in `glax.nn.Mamba2`.

    dtype, param_dtype, kernel_init and recurrence are as in `glax.nn.linear_attention.MixerOptions`.

    layer(u [B, T, width]) returns (u' [B, T, width], state). `glax.nn.layer.Layer` has the dtypes, decoding and errors. The
    state is a dict of float32: the fields of `glax.Mamba3State` as `angle`, `recurrent`, `last_key` and `last_value`.

    Lahoti et al. 2026, https://github.com/state-spaces/mamba.

    >>> layer = nn.Mamba3(64, num_heads=2, head_width=32, state_width=16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 16, 64)))[0].shape
    (1, 16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_width: int = 64,
        state_width: int = 128,
        groups: int = 1,
        rope_fraction: float = 0.5,
        mimo_rank: int | None = None,
        use_norm: bool = False,
        A_floor: float = 1e-4,
        bias: bool = False,
        norm_eps: float = 1e-5,
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        recurrence: Callable = recurrent,
        rngs: nnx.Rngs,
    ):
        check_divides("groups", groups, "num_heads", num_heads)
        if state_width % 2:
            raise ValueError(f"state_width must be even, got {state_width}")
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction must be 0.5 or 1, got {rope_fraction}")
        self.width, self.num_heads, self.head_width, self.state_width = width, num_heads, head_width, state_width
        self.groups, self.mimo_rank, self.A_floor, self.recurrence = groups, mimo_rank, A_floor, recurrence
        self.num_angles = int(state_width * rope_fraction) // 2
        rank = 1 if mimo_rank is None else mimo_rank
        inside, self.key_columns = num_heads * head_width, rank * groups * state_width
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        projection: dict[str, Any] = dict(bias=bias, kernel_init=kernel_init, **options)
        self.input = linear(
            width, 2 * inside + 2 * self.key_columns + 3 * num_heads + self.num_angles, (EMBED, HEADS), **projection
        )
        self.dt_bias = parameter(initial_dt_bias(rngs, num_heads, dt_range, dt_floor).astype(param_dtype), HEADS)

        def ones(width: int, scale: float = 1.0) -> nnx.Param:
            return parameter(jnp.full((num_heads, rank, width), scale, param_dtype), HEADS, None, None)

        self.B_bias, self.C_bias = ones(state_width), ones(state_width)
        norm: dict[str, Any] = dict(epsilon=norm_eps, param_dtype=param_dtype)
        self.B_norm, self.C_norm = RMSNorm(state_width, **norm), RMSNorm(state_width, **norm)
        if mimo_rank is not None:
            self.mimo_x, self.mimo_z, self.mimo_o = (
                ones(head_width, 1 / rank),
                ones(head_width),
                ones(head_width, 1 / rank),
            )
        self.D = parameter(jnp.ones(num_heads, param_dtype), HEADS)
        self.norm = RMSNormGated(inside, groups=num_heads, **norm) if use_norm else None
        self.output = linear(inside, width, (HEADS, EMBED), **projection)

    @property
    def state_passes(self) -> int:
        """Return how often a token passes over all entries of its recurrent states, once for each input and once for each output:
        2, or 2 R with mimo_rank R."""
        return 2 if self.mimo_rank is None else 2 * self.mimo_rank

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        rank = () if self.mimo_rank is None else (self.mimo_rank,)
        shapes = state_shapes(batch, self.num_heads, self.num_angles, self.state_width, self.head_width, *rank)
        return {name: jnp.zeros(shape, jnp.float32) for name, shape in zip(STATES, shapes, strict=True)}

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        inside, H = self.num_heads * self.head_width, self.num_heads
        sizes = (inside, inside, self.key_columns, self.key_columns, H, H, H, self.num_angles)
        cuts = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        z, v, B, C, dt, a, trap, angles = jnp.split(self.input(x), cuts, axis=-1)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + for_rows(dt, self.dt_bias[...]))
        A = jnp.minimum(-jax.nn.softplus(a.astype(jnp.float32)), -self.A_floor)
        v, z = by_head(v, H), by_head(z, H)
        by_heads = jnp.broadcast_to(angles[..., None, :].astype(jnp.float32), (*angles.shape[:-1], H, self.num_angles))
        options: dict[str, Any] = dict(ADT=A * dt, DT=dt, Trap=trap.astype(jnp.float32), Angles=by_heads)
        options |= self.constants() | given(Z=z if self.norm is None else None)
        before = Mamba3State(*(state[name] for name in STATES)) if state else None
        Q, K = self.keys_of(self.C_norm, C), self.keys_of(self.B_norm, B)
        y, after = rows.recurrent(self.solve_sequences, Q, K, v, before, step=mamba3_step, **options)
        return self.output(self.normed(y, z).astype(x.dtype)), dict(zip(STATES, after, strict=True))

    def keys_of(self, norm: RMSNorm, x: Float[Array, "*rows keys"]) -> Float[Array, "*shape G K"]:
        """Return keys or queries after their norm: [*rows, groups, K], or with mimo_rank R [*rows, R, groups, K].

        norm: the RMSNorm over K of keys (B_norm) or of queries (C_norm). x: columns of W_in u, [*rows, groups * K], or with
        mimo_rank [*rows, R * groups * K]: all groups of the first key, then those of the second, and so on. The channels K of the
        result are in the order of `glax.mamba3`, as `interleaved` says.
        """
        rank = () if self.mimo_rank is None else (self.mimo_rank,)
        return self.interleaved(norm(x.reshape(*x.shape[:-1], *rank, self.groups, self.state_width)))

    def interleaved(self, x: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
        """Return x unchanged without mimo_rank. With mimo_rank return x with columns i and K / 2 + i moved to 2 i and 2 i + 1:
        `glax.mamba3` rotates neighbouring columns as pairs."""
        if self.mimo_rank is None:
            return x
        return jnp.swapaxes(by_head(x, 2), -1, -2).reshape(x.shape)

    def constants(self) -> dict[str, Array]:
        """Return the arguments of `glax.mamba3` that are parameters, by name: Q_bias, K_bias and D, with mimo_rank MIMO_V, and
        with mimo_rank and without a norm MIMO_Z and MIMO_Out."""
        found: dict[str, Array] = dict(
            Q_bias=self.interleaved(self.C_bias[...]), K_bias=self.interleaved(self.B_bias[...])
        )
        if self.mimo_rank is None:
            found = {name: x[:, 0] for name, x in found.items()}
        else:
            found |= dict(MIMO_V=self.mimo_x[...])
            found |= {} if self.norm is not None else dict(MIMO_Z=self.mimo_z[...], MIMO_Out=self.mimo_o[...])
        return found | dict(D=self.D[...])

    def normed(self, y: Float[Array, "*shape H V"], z: Float[Array, "*rows H V"]) -> Float[Array, "*rows inside"]:
        """Return what W_out multiplies, [*rows, H V], from the output y of `glax.mamba3`.

        z: the columns of W_in u for the gate, by head. The result depends on use_norm and mimo_rank:

            without a norm                 y [*rows, H, V], which `glax.mamba3` has already multiplied by the gate
            with a norm                    RMSNorm(y) * SiLU(z), with y [*rows, H, V]
            with a norm and mimo_rank      sum over r of mimo_o_r * RMSNorm(y_r) * SiLU(mimo_z_r * z), with y [*rows, R, H, V]
        """
        if self.norm is None:
            return merged(y)
        if self.mimo_rank is None:
            return self.norm(merged(y), merged(z))
        factors, shares = (jnp.moveaxis(x[...].astype(jnp.float32), 1, 0) for x in (self.mimo_z, self.mimo_o))
        gate = z[..., None, :, :].astype(jnp.float32) * for_rows(y, factors)
        y = by_head(self.norm(merged(y.astype(jnp.float32)), merged(gate)), self.num_heads)
        return merged((y * for_rows(y, shares)).sum(-3))

    def solve_sequences(self, Q: Array, K: Array, V: Array, **options) -> tuple[Array, Mamba3State]:
        """Return (output, final state) of `glax.mamba3` for whole sequences, computed by the layer's `recurrence`.

        Q, K: as `keys_of` returns them. V: [*rows, H, V]. *rows is [B, T], or [T] for packed sequences without B, whose output
        has no B either.
        options: the other arguments of `glax.mamba3` by name. Those in GATES are [*rows, H] here, and those in OF_ROWS are
        [*rows, ...].
        """
        is_flat = V.ndim == 3
        by_row = dict(Q=Q, K=K, V=V) | {name: options.pop(name) for name in (*GATES, *OF_ROWS) if name in options}
        arrays = {name: x[None] if is_flat else x for name, x in by_row.items()}
        arrays |= {name: jnp.swapaxes(arrays[name], 1, 2) for name in GATES}
        arrays |= {name: options.pop(name) for name in OF_ALL if name in options}
        output, after = mamba3_by(self.recurrence, arrays, **options)
        return output[0] if is_flat else output, cast(Mamba3State, after)
