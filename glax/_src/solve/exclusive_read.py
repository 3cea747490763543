"""Compute outputs from the state before each token, with a bonus for the token itself: the read of RWKV-6.

Peng et al. 2024, https://arxiv.org/abs/2404.05892.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.core.recurrence import Outputs, OutputsWithStates, Recurrence, spread_heads
from glax._src.core.segments import Segments, expanded


def check_no_erasure(r: Recurrence):
    """Raise ValueError for a recurrence of the delta rule, which has no bonus."""
    if r.erasure is not None:
        raise ValueError("bonus must come without beta, erase and write, got both: pass one of them")


def check_bonus(bonus, heads: int, width: int):
    """Raise TypeError or ValueError unless bonus is [H, K], floating point."""
    if not jnp.issubdtype(bonus.dtype, jnp.floating):
        raise TypeError(f"bonus must be floating point, got {bonus.dtype}")
    if bonus.shape != (heads, width):
        raise ValueError(f"bonus must be [H, K]=[{heads}, {width}], got shape {bonus.shape}")


def solve_with_bonus(solver: Callable, r: Recurrence, bonus: Float[Array, "H K"]) -> Outputs | OutputsWithStates:
    """Compute o_t = scale * (S_{t-1} + diag(bonus) k_t v_t^T)^T q_t with the states of r, where token t has not decayed S_{t-1}.

    solver: r -> its outputs.

    S_{t-1}^T q_t is what an ordinary read at token t - 1 gives for the query of token t. So the queries move one token
    towards the beginning of their sequence, the outputs move back, and the first token reads the initial state.
    """
    segments, r = r.segments, passing_padding(r)
    if r.boundaries is not None:
        r = with_zeros_in_unused(r, r.is_token[:, None, None])
    last, first = (r.ends(scan_end)[:, None, None] for scan_end in (True, False))
    to_next = 1 if r.reverse else -1
    if segments is not None:
        last = last[None] | expanded(jnp.roll(segments.resets, to_next, axis=1), 4)
    moved = solver(r.replace(q=jnp.where(last, 0, jnp.roll(r.q, to_next, axis=1))))
    behind = jnp.where(first, initial_read(r), jnp.roll(moved.output, -to_next, axis=1).astype(r.dtype))
    if r.boundaries is not None:  # a sequence's last output comes back to the padding row behind it
        behind = jnp.where(r.is_token[:, None, None], behind, 0)
    if segments is not None:
        behind = jnp.where(expanded(segments.resets, 4), 0, behind)
    output = (behind + bonus_term(r, bonus)).astype(r.q.dtype)
    return moved._replace(output=output if segments is None else segments.masked(output))


def passing_padding(r: Recurrence) -> Recurrence:
    """Return r with k = v = 0 and no decay in the padding of its segments, so that the state passes through padding
    unchanged."""
    s = r.segments
    if s is None or s.is_token is None:
        return r
    padded = r.replace(segments=Segments(jnp.zeros_like(s.resets), s.is_token)).folded
    return padded.replace(segments=Segments(s.resets, None))


def with_zeros_in_unused(r: Recurrence, used: Bool[Array, "*rows 1 1"]) -> Recurrence:
    """Return r with q, k and v of unused tokens set to zero, because they may hold NaN. Their outputs and gradients are then
    0."""
    return r.replace(**{name: jnp.where(used, x, 0) for name, x in (("q", r.q), ("k", r.k), ("v", r.v))})


def initial_read(r: Recurrence) -> Float[Array, "B T H V"] | float:
    """Return scale * S_0^T q at every token, where q is the query of the first token of its sequence: [B, T, H, V]."""
    if r.initial_state is None:
        return 0.0
    first = -1 if r.reverse else 0
    if r.boundaries is None:
        q = r.q[:, first]
    else:
        at = r.boundaries[1:] - 1 if r.reverse else r.boundaries[:-1]
        q = r.q[0, jnp.clip(at, 0, r.q.shape[1] - 1)]
    q = spread_heads(q, r.num_heads, axis=1).astype(r.dtype)  # [N, H, K]
    read = jnp.einsum("nhk,nhkv->nhv", q, r.start_state, precision=lax.Precision.HIGHEST)
    return r.by_token(read * r.scale[:, None, None])


def bonus_term(r: Recurrence, bonus: Float[Array, "H K"]) -> Float[Array, "B T H V"]:
    """Return scale * (sum over K of q bonus k) v, [B, T, H, V]."""
    q, k, v = (spread_heads(x, r.num_heads).astype(r.dtype) for x in (r.q, r.k, r.v))
    weight = (q * k * bonus.astype(r.dtype)[None, None]).sum(-1) * r.by_token(r.scale)[..., None]
    return weight[..., None] * v
