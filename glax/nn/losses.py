"""Cross-entropy of the next token from the rows before the head, without the logits of all rows together."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS = 1024  # whose logits are formed together


def next_token_loss(
    x: Float[Array, "*rows width"], kernel: Float[Array, "width vocabulary"], targets: Int[Array, "*rows"]
) -> Float[Array, ""]:
    """The mean over the rows with a target of -log softmax(x kernel)[target], in nats, in float32.

    targets: from 0 to vocabulary - 1; a row with a negative target does not count. The logits of `ROWS` rows are formed at a
    time, and the gradient with them, so that neither they nor their gradient are ever whole in memory.
    """
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    padding = -len(x) % min(ROWS, max(len(x), 1))
    x = jnp.pad(x, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding), constant_values=-1)
    count = jnp.maximum((targets >= 0).sum(), 1).astype(jnp.float32)
    return summed_loss(x, kernel, targets) / count


@jax.custom_vjp
def summed_loss(x: Float[Array, "rows width"], kernel: Float[Array, "width vocabulary"], targets: Int[Array, "rows"]):
    def part(total, rows):
        x, targets = rows
        return total + part_loss(x, targets, kernel)[0], None

    return jax.lax.scan(part, jnp.zeros((), jnp.float32), parts(x, targets))[0]


def parts(x: Array, targets: Array) -> tuple[Array, Array]:
    size = min(ROWS, len(x))
    return x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size)


def part_loss(x: Float[Array, "part width"], targets: Int[Array, "part"], kernel) -> tuple[Array, Array]:
    """The loss of a part, and its gradient in the logits, in x's dtype."""
    logits = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    used = targets >= 0
    highest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    at_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    log_total = jnp.log(total[:, 0]) + highest[:, 0]
    loss = jnp.where(used, log_total - jnp.where(at_target, logits, 0).sum(-1), 0).sum()
    d_logits = jnp.where(used[:, None], weights / total - at_target, 0)
    return loss, d_logits.astype(x.dtype)


def _fwd(x, kernel, targets):
    def part(carry, rows):
        total, d_kernel = carry
        x, targets = rows
        loss, d_logits = part_loss(x, targets, kernel)
        dx = jnp.matmul(d_logits, kernel.T, preferred_element_type=jnp.float32).astype(x.dtype)
        d_kernel += jnp.matmul(x.T, d_logits, preferred_element_type=jnp.float32)
        return (total + loss, d_kernel), dx

    start = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (loss, d_kernel), dx = jax.lax.scan(part, start, parts(x, targets))
    return loss, (dx.reshape(x.shape), d_kernel.astype(kernel.dtype))


def _bwd(saved, d_loss):
    dx, d_kernel = saved
    return (dx * d_loss.astype(dx.dtype), d_kernel * d_loss.astype(d_kernel.dtype), None)


summed_loss.defvjp(_fwd, _bwd)
