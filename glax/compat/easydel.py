"""Provide EasyDeL's `recurrent_gla`."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import glax

__all__ = ["recurrent_gla"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


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
    """Compute gated linear attention, by EasyDeL's signature:

        S_t = diag(exp(gk_t)) S_{t-1} + k_t v_t^T,     o_t = scale * S_t^T q_t

    gk: log decays, with the range of gates in `glax.recurrent`. scale: -1.0, traced or not, means K ** -0.5.
    initial_state: zeros if None.
    chunk_size: above 0 solves the sequence in parts of that many tokens, each from the state of the part before, so that fewer
        intermediate arrays are in memory at a time. 0 solves it in one part. The result is the same. T need not be a multiple.
    dtype: float32, bfloat16, float16 or float64, to which query, key, value and gk are cast; None casts nothing.

    Returns (output [B, T, H, V] in `dtype`, the final state [B, H, K, V] in float32, or None unless output_final_state). Raises
    the errors of `glax.recurrent`, and TypeError or ValueError for a chunk_size that is no integer of at least 0.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.easydel.recurrent_gla(q, q, q, jnp.full(q.shape, -0.1))[0].shape
    (1, 8, 2, 4)
    """
    if not isinstance(output_final_state, bool | np.bool_):
        raise TypeError(f"output_final_state must be True or False, known while tracing, got {output_final_state!r}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer):
        raise TypeError(f"chunk_size must be an integer, known while tracing, got {chunk_size!r}")
    if chunk_size < 0:
        raise ValueError(f"chunk_size must be 0 or more, got {chunk_size}")
    check_dtype(dtype)
    arrays = [cast(x, dtype) for x in (query, key, value, gk)]
    if getattr(arrays[0], "ndim", 4) != 4:
        raise ValueError(f"query must be [B, T, Hq, K], got shape {arrays[0].shape}")
    parts, state, outputs = [arrays], initial_state, []
    lengths = {np.shape(x)[1:2] for x in arrays}
    if chunk_size and len(lengths) == 1:  # parts of a key that is too long would have the right shape
        T = arrays[0].shape[1]
        cuts = [(start, min(start + int(chunk_size), T)) for start in range(0, max(T, 1), int(chunk_size))]
        parts = [[jax.lax.slice_in_dim(x, *cut, axis=1) for x in arrays] for cut in cuts]
    for q, k, v, g in parts:
        with as_scale():
            output, state = glax.recurrent(q, k, v, gk=g, softmax_scale=scale_meant(scale, q), initial_state=state)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1), state if output_final_state else None


def cast(x, dtype):
    """Return x in that dtype if it is an array of floats; else x, which `glax.recurrent` refuses."""
    is_float = hasattr(x, "astype") and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if is_float and dtype is not None else x


def check_dtype(dtype):
    try:
        known = dtype is None or (not isinstance(dtype, jax.Array | np.ndarray) and str(jnp.dtype(dtype)) in DTYPES)
    except TypeError:  # NumPy raises it for a value that names no dtype
        known = False
    if not known:
        raise TypeError(f"dtype must be {', '.join(DTYPES)} or None, got {dtype!r}")


@contextlib.contextmanager
def as_scale() -> Iterator[None]:
    """Replace "softmax_scale" by "scale", EasyDeL's name of the argument, in errors that are raised inside the context."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not str(error).startswith("softmax_scale"):
            raise
        raise type(error)(str(error).removeprefix("softmax_")) from None


def scale_meant(scale, q) -> float | Float[Array, ""] | None:
    """Return None, which means K ** -0.5, for a scale of -1.0, else the scale. The scale may be an array whose value only the
    running program knows."""
    if not isinstance(scale, jax.Array):
        return None if np.ndim(scale) == 0 and scale == -1.0 else scale
    if scale.shape or not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return scale
    return usual_at_minus_1(q.shape[-1], jnp.float64 if q.dtype == jnp.float64 else jnp.float32, scale)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def usual_at_minus_1(K: int, dtype, scale) -> Float[Array, ""]:
    """Return scale in dtype, or K ** -0.5 where the traced scale is -1."""
    scale = scale.astype(dtype)
    return jnp.where(scale == -1.0, K**-0.5, scale)
