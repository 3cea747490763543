"""One token: decoding."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glax.api import bind_and_solve
from glax.bind import check_before_tracing
from glax.dispatch import Choice
from glax.recurrence import aligned
from glax.registry import Backend, Config, Platform
from glax.slots import check_known_slots, put, take, usable


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
    outside the pool is an error when its value is known, and counts as -1 when traced. A slot given twice is an error when
    known; when traced, what that row then holds and those sequences answer is undefined.

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
    step = functools.partial(unpooled_step, choice)
    if slots is None:
        return step(tokens, rest, state)
    slots, used = usable(slots, state.shape[0], tokens["query"].shape[0], ("B", "query"))
    if Backend.here() is Backend.CPU and math.prod(state.shape[1:]) >= LARGE and state.shape[0]:
        return one_row_at_a_time(step, tokens, rest, state, slots, used)
    output, final = step(tokens, rest, take(state, slots))
    return jnp.where(used[:, None, None], output, 0), put(state, slots, final)


LARGE = 2**14  # elements of one sequence's state


def unpooled_step(choice: Choice, tokens: dict, rest: dict, state):
    tokens = {name: None if x is None else x[:, None] for name, x in tokens.items()}
    arrays = tokens | rest | dict(initial_state=state, cu_seqlens=None)
    output, final = bind_and_solve(choice, False, arrays)
    return output[:, 0], final.astype(state.dtype)


def one_row_at_a_time(step, tokens: dict, rest: dict, pool, slots, used):
    """On CPUs a row of the pool stays in the cache from read to write; all rows at once would pass through memory thrice.

    Measured, 256 of 1024 rows of 16 x 128 x 128 float32, 2 cores: 37 ms, as without a pool; 158 ms all at once.
    """
    query, value = tokens["query"], tokens["value"]
    B, H = query.shape[0], max(tokens[name].shape[1] for name in ("query", "key", "value"))
    output = jnp.zeros((B, H, value.shape[2]), query.dtype)
    # Inside shard_map, what a loop carries must vary over the mesh as much as all that goes into it.
    pool, output, tokens, rest, slots, used = aligned((pool, output, tokens, rest, slots, used))
    per_row = rest["g_gamma"] is not None and rest["g_gamma"].ndim == 2

    def row(i, carry):
        pool, output = carry
        cut = lambda x: None if x is None else lax.dynamic_slice_in_dim(x, i, 1)  # noqa: E731
        at = jnp.minimum(slots[i], pool.shape[0] - 1)
        # A branch, because XLA would fuse the step into both of its uses, and then copy the pool to have it read twice.
        o, state = lax.cond(
            used[i],
            lambda state: step(
                {name: cut(x) for name, x in tokens.items()},
                rest | (dict(g_gamma=cut(rest["g_gamma"])) if per_row else {}),
                state,
            ),
            lambda state: (jnp.zeros_like(output[:1]), state),
            lax.dynamic_slice_in_dim(pool, at, 1),
        )
        return lax.dynamic_update_slice_in_dim(pool, state, at, 0), lax.dynamic_update_slice_in_dim(output, o, i, 0)

    pool, output = lax.fori_loop(0, B, row, (pool, output))
    return output, pool


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
