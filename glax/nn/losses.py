"""Compute the cross-entropy of the next token from the rows before the head. The logits of all rows are never formed together."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.bind import check_integers, check_real, known_number, known_values
from glax._src.core.recurrence import to_int32
from glax.nn.parts import check_floats, soft_cap

ROWS = 2048  # rows whose logits are formed together


def next_token_loss(
    x: Float[Array, "*rows width"],
    kernel: Float[Array, "width vocabulary"],
    targets: Int[Array, "*rows"],
    cap: float | None = None,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """Return the mean of -log softmax(logits)[target] + z_loss (log sum exp logits)^2 over the rows with a target, in float32.

    The first term is in nats. The second keeps the sum of exponentials near 1: Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311. logits: x kernel; cap tanh(x kernel / cap) if there is a cap. targets: from 0 to
    vocabulary - 1. A row with a negative target does not count. A target that is not in the vocabulary makes the loss NaN, and
    is an error where its value is known. The logits and their gradient are formed for `ROWS` rows at a time, so neither is ever
    whole in memory.

    Raises TypeError and ValueError, which name the argument, for other dtypes and shapes, and for a z_loss that is traced, not
    finite or below 0.
    """
    check_floats("x", x)
    check_floats("kernel", kernel)
    check_real("z_loss", z_loss)
    if (weight := known_number(z_loss)) is None or weight < 0:
        raise ValueError(f"z_loss must be a number of at least 0 that is known while tracing, got {z_loss}")
    targets = checked_targets(targets, x.shape[:-1], kernel.shape[1])
    T = targets.shape[-1]
    x, targets = x.reshape(-1, T, x.shape[-1]), targets.reshape(-1, T)
    parts = min(-(-targets.size // ROWS), T) or 1
    padding = -T % parts
    x = jnp.where((targets >= 0)[..., None], x, 0)  # rows that do not count are in no product, whatever they hold
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)
    count = jnp.maximum((targets >= 0).sum(), 1).astype(jnp.float32)
    total: Array = summed_loss(parts, cap, weight, x, kernel, targets)
    return total / count


def checked_targets(targets, shape: tuple[int, ...], vocabulary: int) -> Int[Array, "*rows"]:
    """Return targets as int32. Raise TypeError or ValueError unless they are integers of that shape, and below `vocabulary`
    where their values are known."""
    check_integers("targets", targets)
    if targets.shape != shape:
        raise ValueError(f"targets must be {list(shape)} as the tokens are, got shape {targets.shape}")
    known = known_values(targets)
    if known is not None and (wrong := known[known >= vocabulary]).size:
        raise ValueError(
            f"targets must be from 0 to {vocabulary - 1}, or below 0 for a token that does not count, got {wrong[0]}"
        )
    return to_int32(targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def summed_loss(
    parts: int,
    cap: float | None,
    z_loss: float,
    x: Float[Array, "B T width"],
    kernel: Float[Array, "width vocabulary"],
    targets: Int[Array, "B T"],
) -> Float[Array, ""]:
    def part(total, rows):
        x, targets = rows
        return total + part_loss(x, targets, kernel, cap, z_loss)[0], None

    return jax.lax.scan(part, jnp.zeros((), jnp.float32), (in_parts(x, parts), in_parts(targets, parts)))[0]


def in_parts(x: Array, parts: int) -> Array:
    """Return x [B, T, ...] as [parts, B, T / parts, ...]. Each part has every parts-th token, so each shard of T has tokens of
    all parts."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, parts, *x.shape[2:]), 2, 0)


def from_parts(x: Array) -> Array:
    """Return the inverse of `in_parts`."""
    whole = jnp.moveaxis(x, 0, 2)
    return whole.reshape(whole.shape[0], whole.shape[1] * whole.shape[2], *whole.shape[3:])


def part_loss(
    x: Float[Array, "B part width"], targets: Int[Array, "B part"], kernel, cap: float | None, z_loss: float
) -> tuple[Array, Array]:
    """Return the loss of a part, and its gradient with respect to x kernel, in x's dtype."""
    logits = soft_cap(jnp.matmul(x, kernel, preferred_element_type=jnp.float32), cap)
    used = targets >= 0
    # Not a sum over the vocabulary that a comparison selects: it would read all logits once more.
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1, mode="fill")[..., 0]
    highest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    log_total = jnp.log(total[..., 0]) + highest[..., 0]
    row = log_total - at_target
    if z_loss:
        row = row + z_loss * jnp.square(log_total)
    loss = jnp.where(used, row, 0).sum()
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    total = jnp.where((targets < logits.shape[-1])[..., None], total, jnp.nan)  # no gradient belongs to a loss of NaN
    p = weights / total
    if z_loss:
        p = p * (1 + 2 * z_loss * log_total[..., None])
    d_logits = jnp.where(used[..., None], p - is_target.astype(jnp.float32), 0)
    if cap is not None:
        d_logits = d_logits * (1 - jnp.square(logits / cap))
    return loss, d_logits.astype(x.dtype)


def _fwd(parts, cap, z_loss, x, kernel, targets):
    def part(carry, rows):
        total, d_kernel = carry
        x, targets = rows
        loss, d_logits = part_loss(x, targets, kernel, cap, z_loss)
        dx = jnp.matmul(d_logits, kernel.T, preferred_element_type=jnp.float32).astype(x.dtype)
        d_kernel += jnp.einsum("btd,btv->dv", x, d_logits, preferred_element_type=jnp.float32)
        return (total + loss, d_kernel), dx

    start = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (loss, d_kernel), dx = jax.lax.scan(part, start, (in_parts(x, parts), in_parts(targets, parts)))
    return loss, (from_parts(dx), d_kernel.astype(kernel.dtype))


def _bwd(parts, cap, z_loss, saved, d_loss):
    dx, d_kernel = saved
    return dx * d_loss.astype(dx.dtype), d_kernel * d_loss.astype(d_kernel.dtype), None


summed_loss.defvjp(_fwd, _bwd)
