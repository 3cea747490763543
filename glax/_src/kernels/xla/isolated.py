"""Compute a recurrence with segments token by token, so that no segment reads another one's rows.

The chunks of other kernels hold tokens of several segments. A gate of -inf keeps these apart only while all numbers are finite,
because 0 times NaN or inf is NaN. Here a reset selects a state of zeros.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.xla.delta_recurrent import delta_by_token, delta_gradient_by_token


def isolated_outputs(r: Recurrence, resets: Bool[Array, "B T"]) -> Outputs:
    """Compute the outputs and final states of r. resets: tokens that start from a state of zeros; their gates are -inf."""
    return delta_by_token(erasing_nothing(r), resets)


def isolated_gradient(r: Recurrence, d_output, d_final, resets: Bool[Array, "B T"]) -> Recurrence:
    """Compute the gradient in every array of r, as `isolated_outputs` computes r."""
    gradient = delta_gradient_by_token(erasing_nothing(r), d_output, d_final, resets)
    return gradient if r.erasure is not None else gradient.replace(erasure=None)


def erasing_nothing(r: Recurrence) -> Recurrence:
    """Return r as a recurrence with an erasure, of zeros if r has none."""
    if r.erasure is not None:
        return r
    zeros = jnp.zeros((*r.q.shape[:2], r.num_heads, r.q.shape[3]), r.q.dtype)
    return r.replace(erasure=Erasure(erase=zeros))
