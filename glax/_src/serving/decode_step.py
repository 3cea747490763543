"""Define `recurrent_step`, which advances each sequence by one token, with states in a pool."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key

from glax._src.core.bind import REQUIRED, ScanOptions, bind, check_before_tracing, transferred
from glax._src.core.recurrence import Outputs, Recurrence, aligned
from glax._src.core.registry import Backend, Config, Platform, Role
from glax._src.core.stored_states import DROPPED, check_rounding_key, stored
from glax._src.serving.on_shards import on_shards
from glax._src.serving.one_pass import in_one_pass, pool_of
from glax._src.serving.state_pool import check_known_slots, check_states, put, take, usable
from glax._src.solve.autodiff import differentiable, solve
from glax._src.solve.dispatch import Choice
from glax._src.solve.exclusive_read import bonus_term, check_bonus, check_no_erasure, initial_read, with_zeros_in_unused
from glax._src.tuning.executor import compiled


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
    beta: Float[Array, "B H"] | None = None,
    erase: Float[Array, "B H K"] | None = None,
    write: Float[Array, "B H V"] | None = None,
    erase_along: Float[Array, "B H K"] | None = None,
    erase_before_decay: bool = False,
    use_qk_l2norm: bool = False,
    slots: Int[Array, "B"] | None = None,
    bonus: Float[Array, "H K"] | None = None,
    rounding_key: Key | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Advance each of B sequences by one token of `recurrent`:

        S' = exp(g + g_gamma) diag(exp(gk)) S diag(exp(gv)) + k v^T,     o = softmax_scale * S'^T q

    The gates g, g_gamma, gk and gv, softmax_scale, platform and cfg are as in `recurrent`. With beta [B, H], or erase [B, H, K]
    and write [B, H, V], it is one token of the delta rule. These, `erase_along`, `erase_before_decay` and `use_qk_l2norm` are as
    in `recurrent`, too.

    Returns output [B, H, V] in the query's dtype and the new state, in the shape and dtype of `state`. The dtype is float32, or
    bfloat16 or float16 for storage; sums are float32 in every case.

    rounding_key: a key of jax.random for stochastic rounding to bfloat16 or float16, another key at each step. None rounds to
    nearest. Rounding to nearest loses slow decays: one step of a decay of 0.99992 rounds a bfloat16 state back to what it was.
    With values added at every step the state's relative error is up to 0.5 after 4096 steps. Stochastic rounding is right on
    average. With a key, a kernel for whole sequences runs the step on states gathered from the pool. A float32 state is stored
    unchanged.

    With `slots` [B], state is a pool [P, H, K, V], and sequence b lives in row slots[b]. The other rows do not change. A pool
    that is donated to jit is updated in place. Slot -1 is no sequence: its output is 0, and nothing is read or written. A slot
    outside the pool is an error when its value is known, and counts as -1 when traced. A repeated slot is an error when known.
    When traced, the row and the outputs of a repeated slot are undefined.

    With `bonus` u [H, K] the output is RWKV-6's, as in `recurrent`: o = softmax_scale * (S + diag(u) k v^T)^T q.

    Raises the errors of `recurrent`. Gradients, vmap and scan work as for `recurrent`.

    >>> q, state = jnp.ones((1, 2, 4)), jnp.zeros((1, 2, 4, 4))
    >>> output, state = glax.recurrent_step(q, q, q, state, g=jnp.full((1, 2), -0.1))
    >>> output.shape
    (1, 2, 4)
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, erase=erase, write=write,
        erase_along=erase_along, softmax_scale=softmax_scale, state=state, slots=slots, bonus=bonus,
    )  # fmt: skip
    check_rounding_key(rounding_key)
    options = ScanOptions(use_qk_l2norm=use_qk_l2norm, erase_before_decay=erase_before_decay)
    check_before_tracing(arrays | dict(cu_seqlens=None), platform, cfg, options, required=(*REQUIRED, "state"))
    check_known_slots(slots, state)
    choice = Choice(Platform.parse(platform), cfg)
    return bind_and_step(choice, options.static, transferred(arrays) | dict(rounding_key=rounding_key))


@compiled(static_argnums=(0, 1))
def bind_and_step(choice: Choice, options: ScanOptions, arrays: dict):
    """Return the output and the states of a step, compiled by jit. arrays: the public arguments by name."""
    if arrays["state"].ndim != 4:
        got = arrays["state"].shape
        raise ValueError(f"state must be [B, H, K, V], or [P, H, K, V] with slots, got shape {got}")
    own = functools.partial(step_on_device, choice, options)
    return on_shards(own, arrays, lambda axis: (P(None, axis), P(None, axis)))


def step_on_device(choice: Choice, options: ScanOptions, arrays: dict):
    """Return the output and the states of a step, for arrays on one device. arrays: the public arguments by name."""
    named = dict(arrays)
    state, slots, bonus, rounding_key = (named.pop(name) for name in ("state", "slots", "bonus", "rounding_key"))
    r = bind(**named, **options.of_bind, one_token=True)
    r, slots = with_states(r, state, slots)
    read = None if bonus is None else read_with_bonus(r, slots, bonus)
    output, pool = advance_rounded(choice, r, slots, rounding_key)
    return (output if read is None else read)[:, 0], pool


def with_states(r: Recurrence, state, slots) -> tuple[Recurrence, Array | None]:
    """Return (r with `state`, the states of a step or its pool, as initial states; the slots, or None).

    In the slots returned, P, the size of the pool, marks a sequence without a slot.
    """
    if slots is not None:
        slots, _ = usable(slots, state.shape[0], r.num_sequences, ("B", "query"))
    check_states("state", state, r.state_shape, pooled=slots is not None)
    return differentiable(r.replace(initial_state=state)), slots


def advance_rounded(choice: Choice, r: Recurrence, slots, rounding_key) -> Outputs:
    """Return the output [B, T, H, V] and the pool after r's tokens. slots: as `with_states` returns them.

    The states are rounded stochastically if there is a rounding_key and the pool has 16 bits, else to nearest.
    """
    if rounding_key is None or str(pool_of(r).dtype) not in DROPPED:
        return advance(choice, r, slots)
    return advance_and_round(choice, r, slots, rounding_key)


def advance_and_round(choice: Choice, r: Recurrence, slots, rounding_key) -> Outputs:
    """Return the output [B, T, H, V] and the states behind r's tokens, rounded stochastically to the initial states' dtype.

    Step kernels round to nearest, so kernels for whole sequences form the states. slots: [B], the row of each sequence in the
    pool [P, H, K, V] of r's initial states, P for no sequence, whose output is 0. None: these are the states [B, H, K, V] in
    order. The states returned have their shape. rounding_key: a key of jax.random.
    """
    pool = pool_of(r)
    if slots is None:
        output, final = solve(choice, r)
        return Outputs(output, stored(final, pool.dtype, rounding_key))
    output, final = solve(choice, r.replace(initial_state=take(pool, slots)))
    used = slots < pool.shape[0]
    return Outputs(jnp.where(used[:, None, None, None], output, 0), put(pool, slots, final, rounding_key))


def read_with_bonus(r: Recurrence, slots, bonus: Float[Array, "H K"]) -> Float[Array, "B 1 H V"]:
    """Return scale * (S + diag(bonus) k v^T)^T q, [B, 1, H, V], with S read from the pool by slots.

    slots: as `with_states` returns them. A sequence without a slot gets 0.
    """
    check_no_erasure(r)
    check_bonus(bonus, r.num_heads, r.q.shape[3])
    if slots is not None:
        pool = pool_of(r)
        r = with_zeros_in_unused(
            r.replace(initial_state=take(pool, slots)), (slots < pool.shape[0])[:, None, None, None]
        )
    return (initial_read(r) + bonus_term(r, bonus)).astype(r.q.dtype)


LARGE = 2**14  # elements of one sequence's state


def gathered(choice: Choice, r: Recurrence, slots) -> Outputs:
    """Return the output [B, T, H, V] and the pool after r's tokens, by the kernels for whole sequences on states gathered from
    the pool. slots: as `with_states` returns them."""
    pool = pool_of(r)
    if slots is None:
        return unpooled(choice, r)
    if Backend.here() is Backend.CPU and math.prod(pool.shape[1:]) >= LARGE and pool.shape[0]:
        return one_row_at_a_time(choice, r, slots)
    output, final = unpooled(choice, r.replace(initial_state=take(pool, slots)))
    used = slots < pool.shape[0]
    return Outputs(jnp.where(used[:, None, None, None], output, 0), put(pool, slots, final))


def unpooled(choice: Choice, r: Recurrence) -> Outputs:
    """Return the output and the final states in the dtype of r's initial states, by the kernels for whole sequences."""
    output, final = solve(choice, r)
    return Outputs(output, final.astype(pool_of(r).dtype))


def one_row_at_a_time(choice: Choice, r: Recurrence, slots) -> Outputs:
    """Return the output and the pool of a step, of which a loop advances one row at a time. slots: as `with_states` returns
    them.

    On CPUs each row then stays in the cache from its read to its write. All rows together would pass through memory three
    times.
    """
    pool, tokens = pool_of(r), r.replace(initial_state=None)
    output = jnp.zeros((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)
    # Inside shard_map, what a loop carries must vary over the mesh as much as all that goes into it.
    pool, output, tokens, slots = aligned((pool, output, tokens, slots))

    def row(i, carry):
        pool, output = carry
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1), tokens)
        at = jnp.minimum(slots[i], pool.shape[0] - 1)
        # A branch, because XLA would fuse the step into both of its uses, and then copy the pool to have it read twice.
        o, state = lax.cond(
            slots[i] < pool.shape[0],
            lambda state: tuple(unpooled(choice, own.replace(initial_state=state))),
            lambda state: (jnp.zeros_like(output[:1]), state),
            lax.dynamic_slice_in_dim(pool, at, 1),
        )
        return lax.dynamic_update_slice_in_dim(pool, state, at, 0), lax.dynamic_update_slice_in_dim(output, o, i, 0)

    pool, output = lax.fori_loop(0, r.q.shape[0], row, (pool, output))
    return Outputs(output, pool)


# (choice, r, slots) -> the output [B, T, H, V] and the pool behind r's tokens; in place where a kernel is able.
advance = in_one_pass(Role.STEP, gathered)
