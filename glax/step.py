"""One token: decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glax.api import bind_and_solve
from glax.bind import check_before_tracing
from glax.dispatch import Choice
from glax.registry import Config, Platform


def recurrent_step(
    query: Float[Array, "B Hq K"],
    key: Float[Array, "B Hk K"],
    value: Float[Array, "B Hv V"],
    state: Float[Array, "B H K V"] | Float[Array, "P H K V"],
    g: Float[Array, "B H"] | Float[Array, "B H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "B H"] | None = None,
    gk: Float[Array, "B H K"] | None = None,
    gv: Float[Array, "B H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    *,
    slots: Int[Array, "B"] | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token of `recurrent` for each of B sequences:

        S' = exp(g + g_gamma) diag(exp(gk)) S diag(exp(gv)) + k v^T,     o = softmax_scale * S'^T q

    Returns output [B, H, V] in the query's dtype and the new state, of the shape and dtype of `state`: float32, or
    bfloat16 or float16 for storage (sums are float32 all the same).

    With `slots` [B], state is a pool [P, H, K, V] and sequence b lives in row slots[b]. The other rows stay as they are;
    donate the pool to jit and it is updated in place. Slot -1 is no sequence: output 0, nothing read or written. A slot
    outside the pool is an error when its value is known, and counts as -1 when traced; so is one slot given twice, whose
    result when traced is that of either.

    Raises as `recurrent` does. Gradients, vmap and scan work as there.
    """
    tokens = dict(query=query, key=key, value=value, g=g, gk=gk, gv=gv)
    rest = dict(g_gamma=g_gamma, softmax_scale=softmax_scale)
    check_before_tracing(tokens | rest | dict(state=state, slots=slots, cu_seqlens=None), platform, cfg, reverse=False)
    check_known_slots(slots, state)
    return bind_and_step(Choice(Platform.parse(platform), cfg), tokens, rest, state, slots)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def bind_and_step(choice: Choice, tokens: dict, rest: dict, state, slots):
    for name, x in (tokens | {"state": state}).items():
        if x is not None and x.ndim not in RANKS[name][0]:
            raise ValueError(f"{name} must be {RANKS[name][1]}, got shape {x.shape}")
    pool, batch = state, tokens["query"].shape[0]
    if slots is not None:
        slots, used = usable(slots, batch, rows=state.shape[0])
        state = pool.at[slots].get(mode="fill", fill_value=0)
    tokens = {name: None if x is None else x[:, None] for name, x in tokens.items()}
    arrays = tokens | rest | dict(initial_state=state, cu_seqlens=None)
    output, final = bind_and_solve(choice, False, arrays)
    output, final = output[:, 0], final.astype(state.dtype)
    if slots is None:
        return output, final
    return jnp.where(used[:, None, None], output, 0), pool.at[slots].set(final, mode="drop")


TOKEN = "[B, heads, width]"
RANKS = dict(
    query=((3,), TOKEN),
    key=((3,), TOKEN),
    value=((3,), TOKEN),
    g=((2, 3), "[B, H] or [B, H, K]"),
    gk=((3,), TOKEN),
    gv=((3,), TOKEN),
    state=((4,), "[B, H, K, V], or [P, H, K, V] with slots"),
)


def usable(slots, batch: int, rows: int) -> tuple[Int[Array, "B"], Array]:
    """The slots, every unused one moved out of bounds, where reads give zeros and writes are dropped; and which are used."""
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots must hold integers, got {slots.dtype}")
    if slots.shape != (batch,):
        raise ValueError(f"slots must be [B] with B={batch} as in query, got shape {slots.shape}")
    used = (slots >= 0) & (slots < rows)
    return jnp.where(used, slots, rows), used


def check_known_slots(slots, state):
    """The values of slots, where they are known; their shape and dtype are left to `usable`."""
    if slots is None or isinstance(slots, jax.core.Tracer) or not jnp.issubdtype(slots.dtype, jnp.integer):
        return
    known, rows = np.asarray(slots), np.shape(state)[0]
    if (wrong := known[(known < -1) | (known >= rows)]).size:
        raise ValueError(f"slots must be from -1 to {rows - 1}, the last row of state, got {wrong[0]}")
    taken, count = np.unique(known[known >= 0], return_counts=True)
    if (count > 1).any():
        raise ValueError(f"slots must not repeat, got {taken[count > 1][0]} more than once")
