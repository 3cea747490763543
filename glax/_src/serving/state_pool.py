"""Read and write rows of a pool of states by slot. A slot out of bounds, such as -1, reads as zeros, and writes to it are
dropped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.bind import check_integers, known_values
from glax._src.core.recurrence import aligned, to_int32
from glax._src.core.registry import Backend
from glax._src.core.stored_states import CompactStates, check_state_dtype, rows_of, stored


def check_known_slots(
    slots, pool, name: str = "state", argument: str = "slots", rank: int = 1, may_repeat: bool = False
):
    """Raise ValueError for slots outside of -1 to P - 1, or that repeat, if their values are known.

    pool: [P, H, K, V]. name, argument: the names of the pool and of the slots in the message. rank: the axes of the slots.
    may_repeat: whether slots may repeat. Other shapes and dtypes pass: `usable` and `check_states` check these.
    """
    if slots is None or isinstance(slots, Tracer) or not jnp.issubdtype(slots.dtype, jnp.integer):
        return
    if np.ndim(slots) == rank and np.ndim(pool) == 4:
        check_slot_values(slots, np.shape(pool)[0], name, argument, may_repeat)


def check_slot_values(slots, rows: int, name: str, argument: str = "slots", may_repeat: bool = False):
    """Raise ValueError if known slots repeat, or lie outside of -1 to rows - 1. name: the argument that has as many rows.

    may_repeat: whether slots that are only read may repeat.
    """
    if (known := known_values(slots)) is None:
        return
    if (wrong := known[(known < -1) | (known >= rows)]).size:
        raise ValueError(f"{argument} must be from -1 to {rows - 1}, the last row of {name}, got {wrong[0]}")
    taken, count = np.unique(known[known >= 0], return_counts=True)
    if (count > 1).any() and not may_repeat:
        raise ValueError(f"{argument} must not repeat, got {taken[count > 1][0]} more than once")


def check_states(name: str, x, shape: tuple[int, int, int, int], pooled: bool):
    """Raise TypeError or ValueError unless x is states [B, H, K, V], or if `pooled` a pool [P, H, K, V], of the shape that
    query, key and value imply."""
    letters = "PHKV" if pooled else "BHKV"
    check_state_dtype(name, x.dtype)
    if x.ndim != 4 or x.shape[pooled:] != shape[pooled:]:
        sizes = ", ".join(f"{letter}={size}" for letter, size in list(zip(letters, shape, strict=True))[pooled:])
        wanted = f"[{', '.join(letters)}] with {sizes} as query, key and value imply"
        raise ValueError(f"{name} must be {wanted}, got shape {x.shape}")


def usable(
    slots, rows: int, N: int, by: tuple[str, str], argument: str = "slots"
) -> tuple[Int[Array, "N"], Bool[Array, "N"]]:
    """Return (the slots, with unused ones replaced by `rows`; a mask of those that are used), [N] each.

    `rows` is out of bounds, so that reads give zeros and writes are dropped. by: the letter of the axis and the argument that
    gives N, for the message of ValueError.
    """
    check_integers(argument, slots)
    if slots.shape != (N,):
        raise ValueError(f"{argument} must be [{by[0]}] with {by[0]}={N} as in {by[1]}, got shape {slots.shape}")
    return in_bounds(slots, rows)


def in_bounds(slots: Int[Array, "*shape"], rows: int) -> tuple[Int[Array, "*shape"], Bool[Array, "*shape"]]:
    """Return (the slots, with those outside of 0 to rows - 1 replaced by `rows`; a mask of the others). Nothing is checked."""
    slots = to_int32(slots)  # `rows`, which stands for an unused slot, need not fit the dtype of slots
    used = (slots >= 0) & (slots < rows)
    return jnp.where(used, slots, rows), used


def take(pool: Float[Array, "P *state"] | CompactStates, slots: Int[Array, "N"]) -> Float[Array, "N *state"]:
    """Return the states of the slots, [N, ...], with zeros for slot P: pool[slots], or float32 from a pool in 8 bits."""
    if isinstance(pool, CompactStates):
        return jax.tree.map(lambda x: take(x, slots), pool).whole()
    return rows_of(pool, slots)


def put(pool, slots: Int[Array, "N"], states: Float[Array, "N *state"], rounding_key=None):
    """Return the pool with `states` in rows `slots`, in the pool's dtype: rounded to nearest or, with a key, stochastically.

    A slot out of bounds, such as `usable` returns for -1, drops its state. States in 8 bits are rounded to nearest.
    """
    if isinstance(pool, CompactStates):
        new = CompactStates.of(states, pool.values.dtype)
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), pool, new)
    states = stored(states, pool.dtype, rounding_key)
    if not (Backend.here() is Backend.CPU and pool.dtype.itemsize == 2 and pool.shape[0]):
        return pool.at[slots].set(states, mode="drop")

    # XLA's scatter on CPUs takes a copy of a whole bfloat16 or float16 pool in float32; a row's update does not.
    def row(i, pool):
        at = jnp.minimum(slots[i], pool.shape[0] - 1)
        old = lax.dynamic_slice_in_dim(pool, at, 1)
        new = lax.dynamic_slice_in_dim(states, i, 1)
        state = lax.cond(slots[i] < pool.shape[0], lambda new, _: new, lambda _, old: old, new, old)
        return lax.dynamic_update_slice_in_dim(pool, state, at, 0)

    pool, states, slots = aligned((pool, states, slots))
    return lax.fori_loop(0, len(slots), row, pool)
