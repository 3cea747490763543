"""`prefill_into`: prompts, from states in a pool and back into it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.api.recurrent import bind_and_solve
from glax._src.core.bind import REQUIRED, ScanOptions, bind, check_before_tracing, transferred
from glax._src.core.registry import Config, Platform
from glax._src.serving.state_pool import check_known_slots, check_states, put, take, usable
from glax._src.serving.stored_states import check_rounding_key
from glax._src.solve.dispatch import Choice


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
    fresh: Bool[Array, "N"] | None = None,
    bonus: Float[Array, "H K"] | None = None,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    rounding_key: Key | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "P H K V"]]:
    """`recurrent` from states in a pool and back into it:

        output, final = recurrent(query, key, value, ..., initial_state=pool[slots]),     pool[slots] = final

    Sequence n goes on from row slots[n]; where fresh[n], from zeros instead, as a new request in a slot used before.
    Usually the prompts are packed: query [T, Hq, K] and so on, with cu_seqlens, which may be traced, so that one program
    serves any prompts of up to T tokens together. A long prompt may come in pieces, which equals one pass.

    Returns output [B, T, H, V], or [T, H, V] as query has it, and the pool in its dtype: float32, or bfloat16 or float16 for
    storage. Donate it to jit and it is updated in place. Slot -1 is no sequence: output 0, nothing read or written. Slots
    outside the pool, slots given twice and rounding_key are as in `recurrent_step`; everything else is as in `recurrent`.
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv,
        softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, bonus=bonus, segment_ids=segment_ids,
    )  # fmt: skip
    required = (*REQUIRED, "pool", "slots")
    own, options = dict(pool=pool, slots=slots, fresh=fresh), ScanOptions(pad_id=pad_id)
    check_before_tracing(arrays | own, platform, cfg, options, required)
    check_rounding_key(rounding_key)
    check_known_slots(slots, pool, "pool")
    choice = Choice(Platform.parse(platform), cfg)
    return bind_and_prefill(choice, options.static, transferred(arrays), **transferred(own), rounding_key=rounding_key)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def bind_and_prefill(choice: Choice, options: ScanOptions, arrays: dict, pool, slots, fresh, rounding_key):
    query, r = arrays["query"], bind(**{name: x for name, x in arrays.items() if name != "bonus"}, **vars(options))
    check_states("pool", pool, r.state_shape, pooled=True)
    N, packed = r.num_sequences, r.boundaries is not None
    slots, used = usable(slots, pool.shape[0], N, ("N", "cu_seqlens" if packed else "query"))
    state = take(pool, slots)
    if fresh is not None:
        if fresh.dtype != jnp.bool_ or fresh.shape != (N,):
            raise ValueError(f"fresh must be booleans [N]={[N]}, got {fresh.dtype} of shape {fresh.shape}")
        state = jnp.where(fresh[:, None, None, None], 0, state)
    output, final = bind_and_solve(choice, options, arrays | dict(initial_state=state))
    if packed:
        used = used[r.sequence_of] if N else jnp.zeros(query.shape[-3], bool)
        output = jnp.where(used[:, None, None], output, 0)
    else:
        output = jnp.where(used[:, None, None, None] if query.ndim == 4 else used, output, 0)
    return output, put(pool, slots, final, rounding_key)
