"""List the dtypes in which states are stored, and round to them stochastically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from glax._src.core.bind import DTYPES, check_memory, is_array

DROPPED = {"bfloat16": 16, "float16": 13}  # bits of a float32 mantissa that the dtype does not have


def check_state_dtype(name: str, dtype):
    """Raise TypeError, with the dtype's name, unless states can be stored in it."""
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
    """Return the states in the dtype of storage: rounded to nearest or, with a key, stochastically."""
    dtype = jnp.dtype(dtype)
    if rounding_key is None or str(dtype) not in DROPPED:
        return states.astype(dtype)
    return rounded(dtype, states.astype(jnp.float32), jax.random.bits(rounding_key, states.shape, jnp.uint32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded(dtype, x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round float32 to one of its two neighbours in dtype. A neighbour's probability is 1 - (its distance) / (their distance).

    bits: uniform random bits, one number per element. The expected value is x. The gradient is the gradient of a cast.
    """
    dropped = DROPPED[str(dtype)]
    mask = jnp.uint32((1 << dropped) - 1)
    # The noise carries into the bits that stay, with the wanted probability. The cast of what stays is exact.
    whole = (lax.bitcast_convert_type(x, jnp.uint32) + (bits & mask)) & ~mask
    found = lax.bitcast_convert_type(whole, jnp.float32)
    limits = jnp.finfo(dtype)
    if (
        limits.minexp > jnp.finfo(jnp.float32).minexp
    ):  # float16 also has subnormal numbers, which are multiples of one step
        step = jnp.float32(limits.smallest_subnormal)
        noise = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
        found = jnp.where(jnp.abs(x) < jnp.float32(limits.tiny), jnp.floor(x / step + noise) * step, found)
    return jnp.where(jnp.isfinite(x), found, x).astype(dtype)


def _rounded_fwd(dtype, x, bits):
    return rounded(dtype, x, bits), bits


def _rounded_bwd(dtype, bits, d):
    return d.astype(jnp.float32), np.zeros(bits.shape, jax.dtypes.float0)


rounded.defvjp(_rounded_fwd, _rounded_bwd)
