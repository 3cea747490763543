"""Compute attention over depth, which takes the place of residuals in some models."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.nn import RMSNorm
from glax.nn.parts import EMBED, kernel_of, linear


class AttentionResidual(nnx.Module):
    """Compute sum over i of p_i x_i [*rows, D] of each row's sources x_i,   p = softmax over i of w^T RMSNorm(x_i), in float32.

    Kimi Team 2026, https://arxiv.org/abs/2603.15031.
    """

    def __init__(self, width: int, *, norm_eps: float, **options):
        self.proj = linear(width, 1, (EMBED, None), **options)
        self.norm = RMSNorm(width, epsilon=norm_eps, param_dtype=options["param_dtype"])

    def __call__(self, sources: Sequence[Float[Array, "*rows D"]]) -> Float[Array, "*rows D"]:
        wide = [x.astype(jnp.float32) for x in sources]
        weight = kernel_of(self.proj)[:, 0].astype(jnp.float32)
        scores = jnp.stack([(self.norm(x) * weight).sum(-1) for x in wide])
        p = jax.nn.softmax(scores, 0)
        return jnp.asarray(sum(p[i][..., None] * x for i, x in enumerate(wide))).astype(sources[0].dtype)
