"""Define the delta rule under the names of its variants: DeltaNet, Gated DeltaNet, Kimi Delta Attention."""

from typing import Any, Unpack

from jaxtyping import Array, Float

from glax._src.api.recurrent import Options, variant
from glax._src.core.bind import check_array


class DeltaOptions(Options, total=False):
    """List the options of `recurrent`, and use_qk_l2norm.

    use_qk_l2norm: whether to divide each query and key by its norm, x * rsqrt(sum x^2 + 1e-6). False by default.
    """

    use_qk_l2norm: bool


@variant
def delta_rule(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> dict[str, Any]:
    """Compute DeltaNet:   S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = softmax_scale * S_t^T q_t.

    beta: [B, T, H], any float dtype, after its sigmoid; TypeError if None. No value is refused: with keys of norm 1, from 0 to
    2 the state stays bounded, and elsewhere it may grow. use_qk_l2norm: whether to divide each query and key by its norm, x *
    rsqrt(sum x^2 + 1e-6); False by default. Other shapes and dtypes, options, results and errors: as in `recurrent`.

    Yang et al. 2024, https://arxiv.org/abs/2406.06484.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.delta_rule(q, q, q, jnp.full((1, 8, 2), 0.5), use_qk_l2norm=True).output.shape
    (1, 8, 2, 4)
    """
    check_array("beta", beta)
    return dict(query=query, key=key, value=value, beta=beta, **options)


@variant
def gated_delta_rule(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> dict[str, Any]:
    """Compute Gated DeltaNet:   S_bar = exp(g_t) S_{t-1},   S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T,

    and o_t = softmax_scale * S_t^T q_t.

    The decay comes first, then the erasure. g: [B, T, H] log decays, with the range of gates in `recurrent`; ValueError for any
    other rank. beta, use_qk_l2norm: as in `delta_rule`. Other shapes and dtypes, options, results and errors: as in `recurrent`.

    Yang et al. 2024, https://arxiv.org/abs/2412.06464.

    >>> q, g = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2), -0.1)
    >>> glax.gated_delta_rule(q, q, q, g, beta=jnp.exp(g), use_qk_l2norm=True).output.shape
    (1, 8, 2, 4)
    """
    check_gate_per_head(query, g)
    check_array("beta", beta)
    return dict(query=query, key=key, value=value, g=g, beta=beta, **options)


@variant
def kda(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> dict[str, Any]:
    """Compute Kimi Delta Attention:   S_bar = diag(exp(g_t)) S_{t-1},   S_t = S_bar + beta_t k_t (v_t - S_bar^T k_t)^T,

    and o_t = softmax_scale * S_t^T q_t.

    g: [B, T, H, K] log decays, one a key channel, with the range of gates in `recurrent`; ValueError for g [B, T, H]. beta,
    use_qk_l2norm: as in `delta_rule`. Other shapes and dtypes, options, results and errors: as in `recurrent`.

    Kimi Team 2025, https://arxiv.org/abs/2510.26692.

    >>> q, g = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2, 4), -0.1)
    >>> glax.kda(q, q, q, g, beta=jnp.full((1, 8, 2), 0.5), use_qk_l2norm=True).output.shape
    (1, 8, 2, 4)
    """
    check_gate_per_key(query, g)
    check_array("beta", beta)
    return dict(query=query, key=key, value=value, g=g, beta=beta, **options)


def check_gate_per_head(query, g):
    check_rank(query, g, -1, "[B, T, H] in gated_delta_rule; kda takes [B, T, H, K]")


def check_gate_per_key(query, g):
    check_rank(query, g, 0, "[B, T, H, K] in kda; gated_delta_rule takes [B, T, H]")


def check_rank(query, g, difference: int, wanted: str):
    """Raise ValueError unless g has `difference` more axes than query. wanted: the shape of g in the message."""
    check_array("query", query)
    check_array("g", g)
    if query.ndim in (3, 4) and g.ndim != query.ndim + difference:
        raise ValueError(f"g must be {wanted}, got shape {g.shape}")
