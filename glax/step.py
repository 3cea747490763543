"""One token: decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glax.autodiff import solve
from glax.bind import bind, check_before_tracing
from glax.dispatch import Choice, run_step
from glax.recurrence import Recurrence, aligned
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
    batch = tokens["query"].shape[0]
    if slots is not None:
        slots = usable(slots, batch, rows=state.shape[0])
    tokens = {name: None if x is None else x[:, None] for name, x in tokens.items()}
    r = bind(**tokens, **rest, initial_state=rows_of(state, slots))
    output, state = advance(choice, aligned(r.replace(initial_state=None)), state, slots)
    return output[:, 0], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def advance(choice: Choice, r: Recurrence, pool, slots):
    """Output [B, 1, H, V] and the pool after one token, r, which holds no state: in the pool itself if a kernel can."""

    def in_pool(r, pool, slots):
        places = jnp.arange(r.num_sequences) if slots is None else jnp.where(slots < pool.shape[0], slots, -1)
        return run_step(choice, r, pool, places.astype(jnp.int32))

    if 0 in (*r.q.shape, pool.shape[0]) or jax.eval_shape(in_pool, r, pool, slots) is None:
        return gathered(choice, r, pool, slots)
    run = jax.custom_batching.custom_vmap(in_pool)
    run.def_vmap(functools.partial(by_example, choice))
    return run(r, pool, slots)


def by_example(choice: Choice, size: int, batched, *operands):
    """Vmapped steps read and write many pools: gathered, they merge into one batch."""
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
    results = jax.vmap(functools.partial(gathered, choice), axes, axis_size=size)(*operands)
    return results, jax.tree.map(lambda _: True, results)


def gathered(choice: Choice, r: Recurrence, pool, slots):
    """`advance` by the kernels for whole sequences."""
    output, final = solve(choice, r.replace(initial_state=rows_of(pool, slots)))
    final = final.astype(pool.dtype)
    if slots is None:
        return output, final
    used = slots < pool.shape[0]
    return jnp.where(used[:, None, None, None], output, 0), pool.at[slots].set(final, mode="drop")


def _advance_fwd(choice, r, pool, slots):
    return advance(choice, r, pool, slots), (r, pool, slots)


def _advance_bwd(choice, operands, cotangents):
    r, pool, slots = operands
    _, pull = jax.vjp(lambda r, pool: gathered(choice, r, pool, slots), r, pool)
    return *pull(cotangents), None if slots is None else np.zeros(slots.shape, jax.dtypes.float0)


advance.defvjp(_advance_fwd, _advance_bwd)


def rows_of(pool, slots):
    """The states of the sequences; zeros for those without."""
    return pool if slots is None else pool.at[slots].get(mode="fill", fill_value=0)


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


def usable(slots, batch: int, rows: int) -> Int[Array, "B"]:
    """The slots, every unused one moved out of bounds, where reads give zeros and writes are dropped."""
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots must hold integers, got {slots.dtype}")
    if slots.shape != (batch,):
        raise ValueError(f"slots must be [B] with B={batch} as in query, got shape {slots.shape}")
    used = (slots >= 0) & (slots < rows)
    return jnp.where(used, slots, rows)


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
