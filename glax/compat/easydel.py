"""Provide EasyDeL's `recurrent_gla`."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.api.recurrent import recurrent
from glax._src.core.bind import (
    DTYPES,
    as_float,
    check_array,
    check_flag,
    check_integer,
    check_real,
    check_shapes,
    is_array,
)

__all__ = ["recurrent_gla"]


def recurrent_gla(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H V"],
    gk: Float[Array, "B T H K"],
    scale: float | Float[Array, ""] = -1.0,
    initial_state: Float[Array, "B H K V"] | None = None,
    chunk_size: int = 0,
    dtype=jnp.float32,
    output_final_state: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Compute S_t = diag(exp(gk_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t.   (https://arxiv.org/abs/2312.06635)

    A scale of -1.0, traced or not, means K ** -0.5. The output has `dtype`, to which the inputs are cast unless it is None. The
    float32 state is returned only if `output_final_state`. chunk_size > 0 solves the sequence in parts of that many tokens,
    each from the state of the part before. The result is the same, with fewer residuals in memory together. T need not be a
    multiple of chunk_size.

    Raises the errors of `glax.recurrent`, and ValueError or TypeError for a chunk_size that is no integer of at least 0.
    """
    arrays = dict(query=query, key=key, value=value, gk=gk)
    for name, x in (arrays | ({} if initial_state is None else dict(initial_state=initial_state))).items():
        check_array(name, x)
    check_flag("output_final_state", output_final_state)
    check_integer("chunk_size", chunk_size)
    if chunk_size < 0:
        raise ValueError(f"chunk_size must be 0 or more, got {chunk_size}")
    check_shapes(arrays)  # parts of a key that is too long would have the right shape
    check_dtype(dtype)
    arrays = {name: jnp.asarray(as_float(name, x), dtype) for name, x in arrays.items()}
    T, K = arrays["query"].shape[1], arrays["query"].shape[3]
    softmax_scale = scale_meant(scale, K, arrays["query"].dtype)
    length = int(chunk_size) or max(T, 1)
    state, outputs = initial_state, []
    for start in range(0, max(T, 1), length):
        part = {name: jax.lax.slice_in_dim(x, start, min(start + length, T), axis=1) for name, x in arrays.items()}
        q, k, v, gates = part["query"], part["key"], part["value"], part["gk"]
        output, state = recurrent(q, k, v, gk=gates, softmax_scale=softmax_scale, initial_state=state)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1), state if output_final_state else None


def check_dtype(dtype):
    try:
        known = dtype is None or (not is_array(dtype) and str(jnp.dtype(dtype)) in DTYPES)
    except TypeError:  # NumPy raises it for a value that names no dtype
        known = False
    if not known:
        raise TypeError(f"dtype must be {', '.join(DTYPES)} or None, got {dtype!r}")


def scale_meant(scale, K: int, dtype) -> float | Float[Array, ""] | None:
    """Return K ** -0.5 for a scale of -1.0, else the scale. The scale may be an array whose value only the running program
    knows."""
    if scale is None:
        return None
    check_real("scale", scale, dtype)
    if not isinstance(scale, jax.Array):
        return None if scale == -1.0 else scale
    return usual_at_minus_1(K, jnp.float64 if dtype == jnp.float64 else jnp.float32, scale)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def usual_at_minus_1(K: int, dtype, scale) -> Float[Array, ""]:
    scale = scale.astype(dtype)
    return jnp.where(scale == -1.0, K**-0.5, scale)
