"""EasyDeL's `recurrent_gla`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax.api import recurrent


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
    """S_t = diag(exp(gk_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t.   (https://arxiv.org/abs/2312.06635)

    scale -1.0 means K ** -0.5. The output has `dtype`, to which the inputs are cast. The state, always float32 here, comes
    back only if `output_final_state`. chunk_size > 0 walks the sequence in segments of that many tokens (T need not be a
    multiple), handing the state on: the result is the same, and less is kept for the gradient at a time.

    Raises ValueError or TypeError as `glax.recurrent` does, or for a negative chunk_size.
    """
    if chunk_size < 0:
        raise ValueError(f"chunk_size must be 0 or more, got {chunk_size}")
    query, key, value, gk = (jnp.asarray(x, dtype) for x in (query, key, value, gk))
    scale = None if not isinstance(scale, jax.Array) and scale == -1.0 else scale
    length = chunk_size or max(query.shape[1], 1)
    state, outputs = initial_state, []
    for start in range(0, max(query.shape[1], 1), length):
        part = (x[:, start : start + length] for x in (query, key, value))
        output, state = recurrent(*part, gk=gk[:, start : start + length], softmax_scale=scale, initial_state=state)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1), state if output_final_state else None
