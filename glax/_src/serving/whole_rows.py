"""Read and write whole rows of a pool of states: on TPUs by kernels that copy only the rows of the slots, else by gathers and
scatters of XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.registry import Backend, Platform
from glax._src.core.stored_states import CompactStates, stored
from glax._src.serving.by_kernel import by_kernel
from glax._src.serving.state_pool import put, take
from glax._src.solve.dispatch import Choice


def read_rows(choice: Choice, pool, slots: Int[Array, "N"]) -> Float[Array, "N *state"]:
    """Return pool[slots], [N, ...], with zeros for a slot out of bounds."""
    if not copies(choice, pool, slots):
        return take(pool, slots)

    def kernel(pool, slots):
        from glax._src.kernels.pallas_tpu import rows

        used = slots < len(pool)
        found = rows.read_rows(pool, jnp.where(used, slots, -1))
        return jnp.where(used.reshape(-1, *[1] * (pool.ndim - 1)), found, 0)

    return by_kernel(kernel, take, Backend.TPU)(pool, slots)


def write_rows(choice: Choice, pool, slots: Int[Array, "N"], states: Float[Array, "N *state"], rounding_key=None):
    """Return the pool with states [N, ...] in rows `slots`, in the pool's dtype: rounded to nearest or, with a key,
    stochastically. A slot out of bounds writes nothing."""
    if not copies(choice, pool, slots):
        return put(pool, slots, states, rounding_key)

    def kernel(pool, slots, states):
        from glax._src.kernels.pallas_tpu import rows

        return rows.write_rows(pool, jnp.where(slots < len(pool), slots, -1), states)

    return by_kernel(kernel, put, Backend.TPU)(pool, slots, stored(states, pool.dtype, rounding_key))


def copies(choice: Choice, pool, slots) -> bool:
    """Return whether a TPU kernel copies the rows `slots` of this pool, rather than XLA."""
    return (
        Backend.here() is Backend.TPU
        and choice.platform in (None, Platform.PALLAS)
        and not isinstance(pool, CompactStates)
        and pool.dtype in (jnp.float32, jnp.bfloat16)
        and 0 not in (*pool.shape, *slots.shape)
    )
