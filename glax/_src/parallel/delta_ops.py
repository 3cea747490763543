"""Define the delta rule on a mesh under the names of its variants, as `glax._src.api.delta` does on one device."""

from typing import Unpack

from jaxtyping import Array, Float

from glax._src.api.delta import check_gate_per_head, check_gate_per_key
from glax._src.core.bind import check_array
from glax._src.core.recurrence import Outputs
from glax._src.parallel.ops import ParallelOptions, recurrent


class DeltaOptions(ParallelOptions, total=False):
    """List the options of `glax.parallel.recurrent`, and `use_qk_l2norm` as in `glax.delta_rule`."""

    use_qk_l2norm: bool


def delta_rule(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute `glax.delta_rule` on a mesh:

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,     o_t = softmax_scale * S_t^T q_t

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.delta_rule(q, q, q, jnp.full((1, 8, 2), 0.5), **axes).output.shape
    (1, 8, 2, 4)
    """
    check_array("beta", beta)
    return recurrent(query, key, value, beta=beta, **options)


def gated_delta_rule(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute `glax.gated_delta_rule` on a mesh:   S_bar = exp(g_t) S_{t-1},   S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.gated_delta_rule(q, q, q, jnp.full((1, 8, 2), -0.1), jnp.full((1, 8, 2), 0.5), **axes).output.shape
    (1, 8, 2, 4)
    """
    check_gate_per_head(query, g)
    check_array("beta", beta)
    return recurrent(query, key, value, g=g, beta=beta, **options)


def kda(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute `glax.kda` on a mesh:   S_bar = diag(exp(g_t)) S_{t-1},   S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.kda(q, q, q, jnp.full(q.shape, -0.1), jnp.full((1, 8, 2), 0.5), **axes).output.shape
    (1, 8, 2, 4)
    """
    check_gate_per_key(query, g)
    check_array("beta", beta)
    return recurrent(query, key, value, g=g, beta=beta, **options)
