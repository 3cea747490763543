"""Define `prefill_into`, which reads prompts from states in a pool and writes the new states back into the pool."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.api.recurrent import bind_and_solve
from glax._src.core.bind import REQUIRED, ScanOptions, bind, check_before_tracing, check_integers, transferred
from glax._src.core.recurrence import PackedStates
from glax._src.core.registry import Config, Platform
from glax._src.core.stored_states import CompactStates, check_rounding_key
from glax._src.serving.on_shards import on_shards
from glax._src.serving.state_pool import (
    check_known_slots,
    check_states,
    in_bounds,
    usable,
)
from glax._src.serving.whole_rows import read_rows, write_rows
from glax._src.solve.dispatch import Choice
from glax._src.tuning.executor import compiled


def prefill_into(
    pool: Float[Array, "P H K V"],
    slots: Int[Array, "N"],
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    beta: Float[Array, "B T H"] | None = None,
    erase: Float[Array, "B T H K"] | None = None,
    write: Float[Array, "B T H V"] | None = None,
    erase_along: Float[Array, "B T H K"] | None = None,
    erase_before_decay: bool = False,
    use_qk_l2norm: bool = False,
    fresh: Bool[Array, "N"] | None = None,
    bonus: Float[Array, "H K"] | None = None,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    write_slots: Int[Array, "N"] | None = None,
    states_every: int | None = None,
    state_slots: Int[Array, "M"] | None = None,
    rounding_key: Key | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "P H K V"]]:
    """Run `recurrent` from states in a pool, and write the final states into the pool:

        output, final = recurrent(query, key, value, ..., initial_state=pool[slots]),     pool[slots] = final

    Sequence n continues from row slots[n]. Where fresh[n], it starts from zeros instead, as for a new request in a slot that
    was used before; if fresh is None, all continue. Prompts are usually packed: query [T, Hq, K] and so on, with cu_seqlens.
    cu_seqlens may be traced, so that one program serves any prompts of up to T tokens together. Reading a long prompt in
    several calls equals reading it in one call.

    write_slots: the slots of the new states; `slots` if None. A prefix in the pool can thus be read without being changed, by
    several sequences too: `slots` may then repeat. Sequence n stores no state if write_slots[n] is -1.

    Sequence n is absent if slots[n] is -1: its output is 0, and nothing is read or written. There is one exception. With
    write_slots, a sequence n for which fresh[n] is true reads no slot, and is computed for any slots[n].

    states_every, state_slots: a number E, a multiple of 64, and [M] slots for the states behind every E tokens, in the order of
    `recurrent`'s `states`. The states of sequence i follow the states of the sequences before it: T // E of each, or if packed
    as many as the sequence has whole pieces of E tokens. M is at most N (T // E), or T // E if packed. Slots without a state,
    and slots of absent sequences, do not change.

    Returns output [B, T, H, V], or [T, H, V] if query has no B, and the pool in its dtype: float32, or bfloat16 or float16 for
    storage. A pool that is donated to jit is updated in place. Slots outside the pool, repeated slots and rounding_key are as
    in `recurrent_step`. The other arguments are as in `recurrent`. Raises the errors of `recurrent` and `recurrent_step`, and
    ValueError for states_every without state_slots or the reverse.

    >>> q, pool, slots = jnp.ones((8, 2, 4)), jnp.zeros((4, 2, 4, 4)), jnp.array([3, 1])
    >>> output, pool = glax.prefill_into(pool, slots, q, q, q, cu_seqlens=jnp.array([0, 5, 8]))
    >>> [int(n) for n in range(4) if (pool[n] != 0).any()]
    [1, 3]
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, erase=erase, write=write,
        erase_along=erase_along, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, bonus=bonus, segment_ids=segment_ids,
    )  # fmt: skip
    required = (*REQUIRED, "pool", "slots")
    arrays |= dict(pool=pool, slots=slots, fresh=fresh, write_slots=write_slots, state_slots=state_slots)
    options = ScanOptions(
        pad_id=pad_id,
        states_every=states_every,
        use_qk_l2norm=use_qk_l2norm,
        erase_before_decay=erase_before_decay,
    )
    # Those of a StatePool are no array where they are in 8 bits.
    states = pool.values if isinstance(pool, CompactStates) else pool
    check_before_tracing(arrays | dict(pool=states), platform, cfg, options, required)
    check_rounding_key(rounding_key)
    check_known_slots(slots, pool, "pool", may_repeat=write_slots is not None)
    check_known_slots(write_slots, pool, "pool", "write_slots")
    check_known_slots(state_slots, pool, "pool", "state_slots")
    if (states_every is None) != (state_slots is None):
        given, missing = ("state_slots", "states_every") if states_every is None else ("states_every", "state_slots")
        raise ValueError(f"{given} needs {missing}, which is None")
    choice = Choice(Platform.parse(platform), cfg)
    return bind_and_prefill(choice, options.static, transferred(arrays) | dict(rounding_key=rounding_key))


@compiled(static_argnums=(0, 1))
def bind_and_prefill(choice: Choice, options: ScanOptions, arrays: dict):
    """Return the output and the pool of `prefill_into`, compiled by jit. arrays: the public arguments by name."""

    def results(axis):
        return P(*[None] * (arrays["query"].ndim - 2), axis), P(None, axis)

    return on_shards(functools.partial(prefill_on_device, choice, options), arrays, results)


OWN = "pool", "slots", "fresh", "write_slots", "state_slots", "rounding_key"


def prefill_on_device(choice: Choice, options: ScanOptions, arrays: dict):
    """Return the output and the pool, for arrays on one device. arrays: the public arguments by name."""
    pool, slots, fresh, write_slots, state_slots, rounding_key = (arrays[name] for name in OWN)
    arrays = {name: x for name, x in arrays.items() if name not in OWN}
    query, r = arrays["query"], bind(**{name: x for name, x in arrays.items() if name != "bonus"}, **options.of_bind)
    check_states("pool", pool, r.state_shape, pooled=True)
    N, packed = r.num_sequences, r.boundaries is not None
    by = ("N", "cu_seqlens" if packed else "query")
    places, used = usable(slots, pool.shape[0], N, by)
    state, written = read_rows(choice, pool, places), places
    if fresh is not None:
        if fresh.dtype != jnp.bool_ or fresh.shape != (N,):
            raise ValueError(f"fresh must be booleans [N]={[N]}, got {fresh.dtype} of shape {fresh.shape}")
        state = jnp.where(fresh[:, None, None, None], 0, state)
    if write_slots is not None:
        written, _ = usable(write_slots, pool.shape[0], N, by, "write_slots")
        used = used if fresh is None else used | fresh
        written = jnp.where(used, written, pool.shape[0])
    output, final, *states = bind_and_solve(choice, options, arrays | dict(initial_state=state))
    if packed:
        shown = used[r.sequence_of] if N else jnp.zeros(query.shape[-3], bool)
        output = jnp.where(shown[:, None, None], output, 0)
    else:
        output = jnp.where(used[:, None, None, None] if query.ndim == 4 else used, output, 0)
    if state_slots is not None:
        keys = (None, None) if rounding_key is None else jax.random.split(rounding_key)
        pool, rounding_key = put_states(choice, pool, state_slots, states[0], used, keys[0]), keys[1]
    return output, write_rows(choice, pool, written, final, rounding_key)


def put_states(choice, pool, state_slots, states: Array | PackedStates, used: Bool[Array, "N"], rounding_key):
    """Return the pool with the states behind every n tokens written to state_slots [M]: state number i to slot state_slots[i].

    states: [N, J, H, K, V], numbered row by row, or `PackedStates`. used: which sequences are present; the states of the others
    are not written. rounding_key: for stochastic rounding; None rounds to nearest.
    """
    check_integers("state_slots", state_slots)
    if isinstance(states, PackedStates):
        states, offsets = states
        index = jnp.arange(len(states), dtype=jnp.int32)
        own = jnp.clip(jnp.searchsorted(offsets, index, side="right") - 1, 0, max(len(used) - 1, 0))
        has_state = (index < offsets[-1]) & (used[own] if len(used) else False)
    else:
        has_state = jnp.repeat(used, states.shape[1])
        states = states.reshape(-1, *states.shape[2:])
    count = len(states)
    if state_slots.ndim != 1 or state_slots.shape[0] > count:
        raise ValueError(
            f"state_slots must be [M] with M up to {count}, the number of whole pieces of states_every tokens, "
            f"got shape {state_slots.shape}"
        )
    places, _ = in_bounds(state_slots, pool.shape[0])
    M = len(places)
    return write_rows(choice, pool, jnp.where(has_state[:M], places, pool.shape[0]), states[:M], rounding_key)
