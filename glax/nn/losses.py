"""Compute the cross-entropy of the next token from the rows before the head. The logits of all rows are never formed together."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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
    sharding: NamedSharding | None = None,
) -> Float[Array, ""]:
    """Return the mean of -log softmax(logits)[target] + z_loss (log sum exp logits)^2 over the rows with a target, in float32.

    The first term is in nats. The second keeps the sum of exponentials near 1: Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311. logits: x kernel; cap tanh(x kernel / cap) if there is a cap. targets: from 0 to
    vocabulary - 1. A row with a negative target does not count. A target that is not in the vocabulary makes the loss NaN, and
    is an error where its value is known. The logits and their gradient are formed for `ROWS` rows at a time, so neither is ever
    whole in memory.

    sharding: how x [B, T, width] is spread over a mesh. Each device then forms `ROWS` rows at a time, the kernel is gathered
    along its width once, and the devices add their gradients of it once.

    Raises TypeError and ValueError, which name the argument, for other dtypes and shapes, for a sharding that does not divide B
    and T, and for a z_loss that is traced, not finite or below 0.
    """
    check_floats("x", x)
    check_floats("kernel", kernel)
    check_real("z_loss", z_loss)
    if (weight := known_number(z_loss)) is None or weight < 0:
        raise ValueError(f"z_loss must be a number of at least 0 that is known while tracing, got {z_loss}")
    targets = checked_targets(targets, x.shape[:-1], kernel.shape[1])
    T = targets.shape[-1]
    x, targets = x.reshape(-1, T, x.shape[-1]), targets.reshape(-1, T)
    if sharding is not None and sharded_axes(sharding):
        x, targets = by_shard(x, sharding), by_shard(targets, sharding)
        whole = NamedSharding(sharding.mesh, P(None, P.UNCONSTRAINED))
        each = jax.vmap(functools.partial(sum_of_rows, cap, weight, whole), (0, None, 0))
        total, count = (x.sum() for x in each(x, kernel, targets))
    else:
        total, count = sum_of_rows(cap, weight, None, x, kernel, targets)
    return total / jnp.maximum(count, 1).astype(jnp.float32)


def sharded_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the names of the mesh axes of more than one device over which the axes B and T of an array are spread, B's
    first."""
    return tuple(name for axis in (0, 1) for name in axes_of(sharding, axis))


def axes_of(sharding: NamedSharding, axis: int) -> tuple[str, ...]:
    """Return the names of the mesh axes of more than one device over which axis number `axis` of an array is spread."""
    entry = sharding.spec[axis] if axis < len(sharding.spec) else None
    entry = () if entry is None else entry
    names = (entry,) if isinstance(entry, str) else entry
    return tuple(name for name in names if sharding.mesh.shape[name] > 1)


def by_shard(x: Array, sharding: NamedSharding) -> Array:
    """Return x [B, T, ...] as [shards, B / (shards of B), T / (shards of T), ...], where entry i of the first axis is the shard
    of one device. No element moves to another device.

    Raises ValueError if the numbers of shards do not divide B and T.
    """
    rows, tokens = (math.prod(sharding.mesh.shape[name] for name in axes_of(sharding, axis)) for axis in (0, 1))
    if x.shape[0] % rows or x.shape[1] % tokens:
        raise ValueError(f"sharding must divide B and T, {x.shape[:2]}, got {rows} and {tokens} shards")
    x = x.reshape(rows, x.shape[0] // rows, tokens, x.shape[1] // tokens, *x.shape[2:])
    x = jnp.moveaxis(x, 2, 1)
    x = x.reshape(rows * tokens, *x.shape[2:])
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, P(sharded_axes(sharding))))


def sum_of_rows(
    cap: float | None,
    z_loss: float,
    whole: NamedSharding | None,
    x: Float[Array, "B T width"],
    kernel: Float[Array, "width vocabulary"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return (the sum of -log softmax(logits)[target] + z_loss (log sum exp logits)^2 over the rows with a target, the number
    of these rows). The logits are x kernel, capped as in `next_token_loss`; a row is one token.

    whole: the sharding that the kernel is gathered to; None for no mesh.
    """
    T = targets.shape[-1]
    parts = min(-(-targets.size // ROWS), T) or 1
    padding = -T % parts
    x = jnp.where((targets >= 0)[..., None], x, 0)  # rows that do not count are in no product, whatever they hold
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)
    return summed_loss(parts, cap, z_loss, whole, x, kernel, targets), (targets >= 0).sum()


def checked_targets(targets, shape: tuple[int, ...], vocabulary: int) -> Int[Array, "*rows"]:
    """Return targets as int32.

    Raises TypeError unless they are integers, and ValueError unless they have the given shape and, where their values are
    known, are below `vocabulary`.
    """
    check_integers("targets", targets)
    if targets.shape != shape:
        raise ValueError(f"targets must be {list(shape)} as the tokens are, got shape {targets.shape}")
    known = known_values(targets)
    if known is not None and (wrong := known[known >= vocabulary]).size:
        raise ValueError(
            f"targets must be from 0 to {vocabulary - 1}, or below 0 for a token that does not count, got {wrong[0]}"
        )
    return to_int32(targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def summed_loss(
    parts: int,
    cap: float | None,
    z_loss: float,
    whole: NamedSharding | None,
    x: Float[Array, "B T width"],
    kernel: Float[Array, "width vocabulary"],
    targets: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Return the sum of the losses of all rows with a target, in float32, as `sum_of_rows` defines it. The rows are divided
    into `parts` parts along T, whose logits are formed one after another.

    Under differentiation the forward also forms the gradients of x and the kernel, which are its residuals.
    """
    kernel = gathered(kernel, whole)

    def part(total, rows):
        x, targets = rows
        return total + part_loss(x, targets, kernel, cap, z_loss)[0], None

    return jax.lax.scan(part, jnp.zeros((), jnp.float32), (in_parts(x, parts), in_parts(targets, parts)))[0]


def gathered(kernel: Float[Array, "width vocabulary"], whole: NamedSharding | None) -> Array:
    """Return the kernel with the sharding `whole`; unchanged if that is None. It is gathered here once, and not again in each
    of the two products that read it."""
    return kernel if whole is None else jax.lax.with_sharding_constraint(kernel, whole)


def in_parts(x: Array, parts: int) -> Array:
    """Return x [B, T, ...] as [parts, B, T / parts, ...]. Part p has the tokens p, p + parts, p + 2 parts, ..., so that each
    shard of T has tokens of all parts."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, parts, *x.shape[2:]), 2, 0)


def from_parts(x: Array) -> Array:
    """Return x [parts, B, T / parts, ...] as [B, T, ...]: the inverse of `in_parts`."""
    whole = jnp.moveaxis(x, 0, 2)
    return whole.reshape(whole.shape[0], whole.shape[1] * whole.shape[2], *whole.shape[3:])


def part_loss(
    x: Float[Array, "B part width"], targets: Int[Array, "B part"], kernel, cap: float | None, z_loss: float
) -> tuple[Array, Array]:
    """Return (the sum of the losses of one part's rows with a target, in float32; the gradient of that sum with respect to the
    product x kernel before the cap, [B, part, vocabulary], in x's dtype).

    cap, z_loss: as in `next_token_loss`.
    """
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


def _fwd(parts, cap, z_loss, whole, x, kernel, targets):
    kernel = gathered(kernel, whole)

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


def _bwd(parts, cap, z_loss, whole, saved, d_loss):
    dx, d_kernel = saved
    return dx * d_loss.astype(dx.dtype), d_kernel * d_loss.astype(d_kernel.dtype), None


summed_loss.defvjp(_fwd, _bwd)
