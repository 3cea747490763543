"""List the dtypes in which states are stored, round to them stochastically, and store them in 8 bits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt32

from glax._src.core.bind import DTYPES, check_memory, is_array

DROPPED = {"bfloat16": 16, "float16": 13}  # bits of a float32 mantissa that the dtype does not have


def check_state_dtype(name: str, dtype):
    """Raise TypeError unless `dtype` is float32, bfloat16, float16 or float64. name: the argument that the message names."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {dtype}")
    if str(dtype) not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {dtype}")


def check_rounding_key(key):
    """Raise TypeError or ValueError unless key is None or one key of jax.random, such as jax.random.key(0) or PRNGKey(0)."""
    if key is None:
        return
    if isinstance(key, np.ndarray):
        check_memory("rounding_key", key)
    if not is_array(key) or not (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32):
        got = f"an array of {key.dtype}" if is_array(key) else repr(key)
        raise TypeError(f"rounding_key must be a key such as jax.random.key(0), got {got}")
    if np.ndim(key) != (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1):
        raise ValueError(f"rounding_key must be one key, got shape {np.shape(key)}")


def stored(states: Float[Array, "*shape"], dtype, rounding_key=None) -> Float[Array, "*shape"]:
    """Return the states in `dtype`. rounding_key: a key of jax.random, by which they are rounded stochastically to a dtype of
    16 bits; to nearest if None."""
    dtype = jnp.dtype(dtype)
    if rounding_key is None or str(dtype) not in DROPPED:
        return states.astype(dtype)
    return rounded(dtype, states.astype(jnp.float32), jax.random.bits(rounding_key, states.shape, jnp.uint32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded(dtype, x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round float32 x stochastically to one of its two neighbours in dtype, a <= x <= b: to b with probability (x - a) / (b - a).

    The expected value is x. The gradient is the gradient of a cast. bits: uniform random bits, one number for each element.
    """
    dropped = DROPPED[str(dtype)]
    mask = jnp.uint32((1 << dropped) - 1)
    # The noise carries into the bits that stay, with the wanted probability. The cast of what stays is exact.
    whole = (lax.bitcast_convert_type(x, jnp.uint32) + (bits & mask)) & ~mask
    found = lax.bitcast_convert_type(whole, jnp.float32)
    limits = jnp.finfo(dtype)
    # float16 also has subnormal numbers, which are multiples of one step.
    if limits.minexp > jnp.finfo(jnp.float32).minexp:
        step = jnp.float32(limits.smallest_subnormal)
        noise = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
        found = jnp.where(jnp.abs(x) < jnp.float32(limits.tiny), jnp.floor(x / step + noise) * step, found)
    return jnp.where(jnp.isfinite(x), found, x).astype(dtype)


def _rounded_fwd(dtype, x, bits):
    return rounded(dtype, x, bits), bits


def _rounded_bwd(dtype, bits, d):
    return d.astype(jnp.float32), np.zeros(bits.shape, jax.dtypes.float0)


rounded.defvjp(_rounded_fwd, _rounded_bwd)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------

# For each dtype its largest number, and the factor by which what rounding loses is multiplied before it is stored in that dtype
# too. Rounding loses at most half of the last digit, which is worth 1 in int8 and at most 32 in float8.
COMPACT = {"int8": (127.0, 254.0), "float8_e4m3fn": (448.0, 28.0)}
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)


def scaled_rows(K: int) -> int:
    """Return the number of adjacent rows of a K x V state that share a scale in 8 bits: the greatest common divisor of K and
    32."""
    return math.gcd(K, 32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompactStates:
    """Hold states [P, H, K, V] in 8 bits, with a float32 scale for each block of `scaled_rows(K)` rows:

        S = scale (values + rests / factor)

    `values` and `rests` have one 8-bit dtype, and `factor` is the second number of this dtype in COMPACT. `rests` holds what
    `values` loses by rounding. A read of `values` alone, one byte a number, is off by this rounding. A write starts from both,
    so the rounding of one write does not enter the next (error feedback).
    """

    values: Shaped[Array, "P H K V"]
    rests: Shaped[Array, "P H K V"]
    scale: Float[Array, "P H K_blocks"]

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], dtype: DTypeLike) -> "CompactStates":
        """Return states of zeros of the shape (P, H, K, V). dtype: "int8" or "float8_e4m3fn"."""
        P, H, K, _ = shape
        return cls(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((P, H, K // scaled_rows(K)), jnp.float32)
        )

    @classmethod
    def of(cls, states: Float[Array, "N H K V"], dtype) -> "CompactStates":
        """Return float states in 8 bits. dtype: int8 or float8_e4m3fn. All numbers of a block of rows become NaN if one is not
        finite."""
        largest, factor = COMPACT[str(jnp.dtype(dtype))]
        N, H, K, V = states.shape
        block, states = scaled_rows(K), states.astype(jnp.float32)
        scale = jnp.abs(states.reshape(N, H, K // block, block, V)).max((-2, -1)) / largest
        scale = jnp.where(jnp.isfinite(scale), jnp.maximum(scale, LEAST_SCALE), jnp.nan)
        x = jnp.where(jnp.isnan(by_row(scale, K)), 0, states / by_row(scale, K))
        values = narrowed(x, dtype)
        return cls(values, narrowed((x - values.astype(jnp.float32)) * factor, dtype), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Return float32, the dtype in which states are read."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.rests.nbytes + self.scale.nbytes

    def __len__(self) -> int:
        return self.values.shape[0]

    def without_rests(self, slots: Int[Array, "N"]) -> Float[Array, "N H K V"]:
        """Return scale * values of the rows `slots`, [N, H, K, V] in float32. The rests are not read. A slot of P or more gives
        zeros."""
        values, scale = (rows_of(x, slots) for x in (self.values, self.scale))
        return values.astype(jnp.float32) * by_row(scale, values.shape[2])

    def whole(self) -> Float[Array, "P H K V"]:
        """Return all states [P, H, K, V] in float32 with their rests: scale * (values + rests / factor)."""
        _, factor = COMPACT[str(self.values.dtype)]
        x = self.values.astype(jnp.float32) + self.rests.astype(jnp.float32) / factor
        return x * by_row(self.scale, self.values.shape[2])


def rows_of(x: Shaped[Array, "P *rest"], slots: Int[Array, "N"]) -> Shaped[Array, "N *rest"]:
    """Return x[slots], [N, ...], with zeros for a slot of P or more.

    No slot may be negative, because JAX would count -1 from the end: callers first replace -1 by P, by `state_pool.in_bounds`.
    """
    if x.shape[0] == 0:  # XLA takes no row of an empty array, not even with a fill value
        return jnp.zeros((*slots.shape, *x.shape[1:]), x.dtype)
    return x.at[slots].get(mode="fill", fill_value=0)


def by_row(scale: Float[Array, "P H K_blocks"], K: int) -> Float[Array, "P H K 1"]:
    """Return the scale of each row of the states [P, H, K, V]: each scale repeated for the K // K_blocks rows of its block."""
    return jnp.repeat(scale, K // scale.shape[2], axis=2)[..., None]


def narrowed(x: Float[Array, "*shape"], dtype) -> Shaped[Array, "*shape"]:
    """Return x rounded to the nearest number of a dtype of 8 bits. Numbers beyond the dtype's largest become the largest."""
    largest, _ = COMPACT[str(jnp.dtype(dtype))]
    x = jnp.clip(x, -largest, largest)
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)
