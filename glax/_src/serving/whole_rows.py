"""Read and write whole rows of a pool of states: on TPUs by kernels that copy the rows of the slots alone, else as `take` and
`put` do."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.registry import Backend, Platform
from glax._src.serving.state_pool import put, take
from glax._src.serving.stored_states import CompactStates, stored
from glax._src.solve.dispatch import Choice
from glax._src.solve.lowering import Kernel


def read_rows(choice: Choice, pool, slots: Int[Array, "N"]) -> Float[Array, "N *state"]:
    """Return `take(pool, slots)`."""
    if not copies(choice, pool, slots):
        return take(pool, slots)

    def kernel(pool, slots):
        from glax._src.kernels.pallas_tpu import rows

        used = slots < len(pool)
        found = rows.read_rows(pool, jnp.where(used, slots, -1))
        return jnp.where(used.reshape(-1, *[1] * (pool.ndim - 1)), found, 0)

    return in_place(kernel, take)(pool, slots)


def write_rows(choice: Choice, pool, slots: Int[Array, "N"], states: Float[Array, "N *state"], rounding_key=None):
    """Return `put(pool, slots, states, rounding_key)`."""
    if not copies(choice, pool, slots):
        return put(pool, slots, states, rounding_key)

    def kernel(pool, slots, states):
        from glax._src.kernels.pallas_tpu import rows

        return rows.write_rows(pool, jnp.where(slots < len(pool), slots, -1), states)

    return in_place(kernel, put)(pool, slots, stored(states, pool.dtype, rounding_key))


def copies(choice: Choice, pool, slots) -> bool:
    """Return whether a TPU kernel copies the rows of this pool."""
    return (
        Backend.here() is Backend.TPU
        and choice.platform in (None, Platform.PALLAS)
        and not isinstance(pool, CompactStates)
        and pool.dtype in (jnp.float32, jnp.bfloat16)
        and 0 not in (*pool.shape, *slots.shape)
    )


def in_place(kernel: Callable, by_xla: Callable) -> Callable:
    """Return a function that computes what `by_xla` does, by a kernel where the program is for one TPU.

    Gradients, vmap, and programs that XLA divides over devices take `by_xla`.
    """

    def again(platform: Platform | None, results, *operands):
        """Compute the results in a program for another backend than predicted, or where XLA must see into the call."""
        is_for_tpu = Backend.here() is Backend.TPU and platform is not Platform.XLA
        return kernel(*operands) if is_for_tpu else by_xla(*operands)

    @jax.custom_batching.custom_vmap
    def run(*operands):
        return Kernel(kernel, again, opaque=True).placed_whole(*operands)

    @run.def_vmap
    def _(size: int, batched, *operands):
        axes = [0 if is_batched else None for is_batched in batched]
        return jax.vmap(by_xla, axes, axis_size=size)(*operands), True

    def bwd(operands, d):
        return jax.vjp(by_xla, *operands)[1](d)

    differentiable = jax.custom_vjp(lambda *operands: run(*operands))
    differentiable.defvjp(lambda *operands: (run(*operands), operands), bwd)
    return differentiable
