"""Decode speculatively: compute the outputs of a few draft tokens together, then the state after the accepted tokens."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.core.bind import (
    REQUIRED,
    ScanOptions,
    bind,
    check_array,
    check_before_tracing,
    check_integers,
    known_values,
    transferred,
)
from glax._src.core.decay import USUAL_FORMS, Decay, promoted
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence, spread_heads, to_int32
from glax._src.core.registry import Config, Platform, Role
from glax._src.core.stored_states import DROPPED, check_rounding_key, check_state_dtype, stored
from glax._src.serving.decode_step import advance
from glax._src.serving.on_shards import head_spec, on_shards
from glax._src.serving.one_pass import in_one_pass, pool_of
from glax._src.serving.state_pool import (
    check_known_slots,
    check_states,
    in_bounds,
    put,
    take,
    usable,
)
from glax._src.solve.autodiff import differentiable, solve
from glax._src.solve.dispatch import Choice, pooled_kernel
from glax._src.solve.pieces import solve_rows
from glax._src.tuning.executor import compiled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Hold what `commit` needs of the draft tokens. `recurrent_verify` returns it.

    key, value:  [B, T, heads, width] of the T tokens of each sequence. decay: their gates. erasure: the erasure of the delta
        rule, or None.
    slots:       [B], the slots of the sequences in a pool; None without a pool.
    state_shape: the shape of the states [B, H, K, V], or of the pool [P, H, K, V], that `recurrent_verify` received.

    It is a tree of arrays, and passes through jit. A head has T (K + V) numbers, while the states behind each token would have
    T K V.

    >>> q, state = jnp.ones((1, 4, 2, 4)), jnp.zeros((1, 2, 4, 4))
    >>> glax.recurrent_verify(q, q, q, state)[1].state_shape
    (1, 2, 4, 4)
    """

    key: Float[Array, "B T Hk K"]
    value: Float[Array, "B T Hv V"]
    decay: Decay
    slots: Int[Array, "B"] | None
    state_shape: tuple[int, int, int, int] = dataclasses.field(metadata=dict(static=True))
    erasure: Erasure | None = None

    @property
    def as_arguments(self) -> dict[str, Any]:
        """Return key, value, slots, g_gamma, g, gk, gv, beta, erase, write and erase_along by these names, which are those of
        `recurrent_verify`; None for each that is absent."""
        d, erasure = self.decay, self.erasure or Erasure()
        gates = dict(g_gamma=d.constant, g=d.head, gk=d.key, gv=d.value)
        erasing = dict(beta=erasure.beta, erase=erasure.erase, write=erasure.write, erase_along=erasure.along)
        return dict(key=self.key, value=self.value, slots=self.slots) | gates | erasing

    def from_arguments(self, x: dict[str, Any]) -> "Draft":
        """Return the draft with the arrays of x in place of its own. x: {name: array}, as `as_arguments` returns it."""
        decay, erasure = Decay(x["g_gamma"], x["g"], x["gk"], x["gv"]), self.erasure
        if erasure is not None:
            erasure = erasure.replace(beta=x["beta"], erase=x["erase"], write=x["write"], along=x["erase_along"])
        return dataclasses.replace(self, key=x["key"], value=x["value"], slots=x["slots"], decay=decay, erasure=erasure)


def recurrent_verify(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    state: Float[Array, "B H K V"] | Float[Array, "P H K V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "B H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    *,
    beta: Float[Array, "B T H"] | None = None,
    erase: Float[Array, "B T H K"] | None = None,
    write: Float[Array, "B T H V"] | None = None,
    erase_along: Float[Array, "B T H K"] | None = None,
    erase_before_decay: bool = False,
    use_qk_l2norm: bool = False,
    slots: Int[Array, "B"] | None = None,
    state_slots: Int[Array, "B T"] | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Float[Array, "B T H V"], Draft] | tuple[Float[Array, "B T H V"], Draft, Float[Array, "P H K V"]]:
    """Return the outputs of T draft tokens of each of B sequences, before it is known which tokens are accepted:

        output, _ = recurrent(query, key, value, ..., initial_state=state)

    It does not advance `state`: commit(state, draft, accepted) then moves it past each sequence's accepted tokens. The function
    is for few tokens, up to about 16. query to erase_along, the flags, platform and cfg are as in `recurrent`. With `slots`
    [B], state is a pool [P, H, K, V] as in `recurrent_step`, and slot -1 gives output 0.

    state_slots: [B, T] slots of the pool, one for the state of each sequence after each draft token has been read. The function
    then also returns a pool with these states in those rows. Its other rows are those of `state`. No state is stored for a slot
    of -1, nor for a sequence whose own slot is -1. Each state is rounded to nearest.

    Returns output [B, T, H, V] in the query's dtype and the Draft; with state_slots also the pool. Raises the errors of
    `recurrent` and `recurrent_step`.

    >>> q, state = jnp.ones((1, 4, 2, 4)), jnp.zeros((1, 2, 4, 4))
    >>> outputs, draft = glax.recurrent_verify(q, q, q, state)
    >>> outputs.shape
    (1, 4, 2, 4)
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, erase=erase, write=write,
        erase_along=erase_along, softmax_scale=softmax_scale,
    )  # fmt: skip
    arrays |= dict(state=state, slots=slots, state_slots=state_slots)
    options = ScanOptions(use_qk_l2norm=use_qk_l2norm, erase_before_decay=erase_before_decay)
    check_before_tracing(arrays | dict(cu_seqlens=None), platform, cfg, options, required=(*REQUIRED, "state"))
    check_known_slots(slots, state)
    check_known_slots(state_slots, state, "state", "state_slots", rank=2)
    if state_slots is not None and slots is None:
        raise ValueError("state_slots needs slots, by which state is a pool")
    return bind_and_verify(Choice(Platform.parse(platform), cfg), options.static, transferred(arrays))


@compiled(static_argnums=(0, 1))
def bind_and_verify(choice: Choice, options: ScanOptions, arrays: dict):
    """Return the results of `recurrent_verify`, compiled by jit. arrays: the public arguments by name."""
    for name, wanted in dict(query="[B, T, Hq, K]", state="[B, H, K, V], or [P, H, K, V] with slots").items():
        if arrays[name].ndim != 4:
            raise ValueError(f"{name} must be {wanted}, got shape {arrays[name].shape}")
    verify = functools.partial(verify_on_device, choice, options, arrays["state"].shape)

    def results(axis):
        shapes = {name: None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        _, draft, *pool = jax.eval_shape(verify, shapes)
        names = draft.as_arguments
        specs = {name: head_spec(name, x, draft.key.ndim, axis) for name, x in names.items() if x is not None}
        return P(None, None, axis), draft.from_arguments(dict.fromkeys(names) | specs), *[P(None, axis) for _ in pool]

    return on_shards(verify, arrays, results)


def verify_on_device(choice: Choice, options: ScanOptions, state_shape: tuple[int, int, int, int], arrays: dict):
    """Return the outputs, the draft, and with state_slots the pool, for arrays on one device. state_shape: the shape of the
    states on all devices. arrays: the public arguments by name."""
    named = dict(arrays)
    query, state, slots, state_slots = named["query"], *(named.pop(name) for name in ("state", "slots", "state_slots"))
    r = bind(**named, **options.of_bind)
    check_states("state", state, r.state_shape, pooled=slots is not None)
    draft = Draft(r.k, r.v, r.decay, slots, state_shape, r.erasure)
    if state_slots is not None:
        return verified_with_states(choice, r, state, slots, state_slots, draft)
    if slots is not None:
        slots, _ = usable(slots, state.shape[0], query.shape[0], ("B", "query"))
    r = r.replace(initial_state=state)
    kernel = pooled_kernel(choice, r, Role.VERIFY)
    # Behind a native call that reads the pool, XLA would copy a donated one for the commit. A gather of few states is cheap.
    solver = outputs_gathered if kernel is not None and kernel.platform is Platform.CPP else outputs_of
    return solver(choice, differentiable(r), slots), draft


def outputs_gathered(choice: Choice, r: Recurrence, slots) -> Float[Array, "B T H V"]:
    """Return the outputs of r's tokens by the kernels of whole sequences, with the states gathered from the pool.

    slots: [B], P for a sequence without a state, whose output is 0; None if the initial states of r are no pool.
    """
    if 0 in r.q.shape[:2]:
        return jnp.zeros((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)
    if slots is None:
        return solve(choice, r).output
    pool = pool_of(r)
    output = solve(choice, r.replace(initial_state=take(pool, slots))).output
    return jnp.where((slots < pool.shape[0])[:, None, None, None], output, 0)


# (choice, r, slots) -> the outputs [B, T, H, V]; the states are read once where a kernel is able.
outputs_of = in_one_pass(Role.VERIFY, outputs_gathered)


def verified_with_states(choice: Choice, r: Recurrence, pool, slots, state_slots, draft: Draft):
    """Return (the outputs, the draft, the pool with the state after each token in its slot of `state_slots`).

    slots [B], state_slots [B, T]: as in `recurrent_verify`.
    """
    B, T = r.q.shape[:2]
    check_integers("state_slots", state_slots)
    if state_slots.shape != (B, T):
        raise ValueError(f"state_slots must be [B, T]={[B, T]} as in query, got shape {state_slots.shape}")
    places, used = usable(slots, pool.shape[0], B, ("B", "query"))
    if 0 in (B, T):
        return jnp.zeros((B, T, r.num_heads, r.v.shape[3]), r.q.dtype), draft, pool
    r = differentiable(r.replace(initial_state=take(pool, places)))
    solver = functools.partial(solve, dataclasses.replace(choice, pieces=1))
    output, _, states = solve_rows(solver, r, 1, r.dtype)
    targets, _ = in_bounds(state_slots, pool.shape[0])
    targets = jnp.where(used[:, None], targets, pool.shape[0]).reshape(-1)
    pool = put(pool, targets, states.reshape(-1, *states.shape[2:]))
    return jnp.where(used[:, None, None, None], output, 0), draft, pool


def commit(
    state: Float[Array, "B H K V"] | Float[Array, "P H K V"],
    draft: Draft,
    accepted: Int[Array, "B"],
    *,
    rounding_key: Key | None = None,
) -> Float[Array, "B H K V"] | Float[Array, "P H K V"]:
    """Return the state behind the first a = accepted[b] draft tokens of each sequence b, as if they had been read one by one:

        S' = e^{G_a} S + sum_{t <= a} e^{G_a - G_t} k_t v_t^T        G_t: the sum of log decays through token t

    It is one product of rank T, and no state in between is formed. Tokens of the delta rule are read as `recurrent` reads them.

    state: the state that `recurrent_verify` received, or a pool that has grown since then. draft: what it returned, with the
    slots of the sequences in the pool. accepted: [B] integers from 0 to T; 0 leaves the state unchanged. A value outside this
    range raises ValueError when known, and is clipped to the range when traced. rounding_key: as in `recurrent_step`. Sequences
    without an accepted token are not rounded.

    Returns a state in the shape and dtype of `state`; a pool that is donated to jit is updated in place. Raises TypeError for a
    state that is not floating point, a draft that is no `Draft` or an `accepted` that is no array of integers, and ValueError
    for a state of another shape, a smaller pool or an `accepted` of another shape.

    >>> q, state = jnp.ones((1, 4, 2, 4)), jnp.zeros((1, 2, 4, 4))
    >>> _, draft = glax.recurrent_verify(q, q, q, state)
    >>> float(glax.commit(state, draft, jnp.array([3]))[0, 0, 0, 0])  # three of four tokens
    3.0
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be the Draft that recurrent_verify returned, got {type(draft).__name__}")
    check_array("state", state)
    check_integers("accepted", accepted)
    B, T = draft.key.shape[:2]
    check_state_dtype("state", state.dtype)
    check_rounding_key(rounding_key)
    if state.ndim != 4 or state.shape[1:] != draft.state_shape[1:] or state.shape[0] < draft.state_shape[0]:
        wanted = ", ".join(map(str, draft.state_shape))
        raise ValueError(f"state must be what recurrent_verify was given, [{wanted}], got shape {state.shape}")
    if draft.slots is None and state.shape[0] != B:
        raise ValueError(f"state must be [B, H, K, V] with B={B} as in the draft, got shape {state.shape}")
    if accepted.shape != (B,):
        raise ValueError(f"accepted must be [B]={[B]} as in the draft, got shape {accepted.shape}")
    known = known_values(accepted)
    if known is not None and (wrong := known[(known < 0) | (known > T)]).size:
        raise ValueError(f"accepted must be from 0 to T={T}, the length of the draft, got {wrong[0]}")
    own = transferred(dict(state=state, accepted=accepted))
    return bound_commit(draft=draft, rounding_key=rounding_key, **own)


@compiled()
def bound_commit(state, draft: Draft, accepted, rounding_key):
    """Return the result of `commit` for arguments that it has checked, compiled by jit."""
    arrays = draft.as_arguments | dict(state=state, query=draft.key, accepted=accepted, rounding_key=rounding_key)
    return on_shards(functools.partial(commit_on_device, draft), arrays, lambda axis: P(None, axis))


def commit_on_device(draft: Draft, arrays: dict):
    """Return the state [B, H, K, V], or the pool [P, H, K, V], behind the accepted tokens, for arrays on one device.

    arrays: by name, those of `Draft.as_arguments`, and state, accepted and rounding_key of `commit`. They replace the arrays
    of `draft`.
    """
    draft = draft.from_arguments(arrays)
    state, accepted, rounding_key = (arrays[name] for name in ("state", "accepted", "rounding_key"))
    pool, decay, places = state, draft.decay, None
    (B, T), H = draft.key.shape[:2], state.shape[1]
    if draft.slots is not None:
        places, _ = usable(draft.slots, pool.shape[0], B, ("B", "query"))
    # [B, T, 1, 1]
    taken = (jnp.arange(T, dtype=jnp.int32)[None] < to_int32(accepted)[:, None])[..., None, None]
    rounds_to_nearest = rounding_key is None or str(pool.dtype) not in DROPPED
    if rounds_to_nearest and (r := steps_in_pool(draft, taken, pool)) is not None:
        return advance(Choice(), differentiable(r), places).final_state
    state = pool if places is None else take(pool, places)
    dtype = promoted(draft.key.dtype, jnp.float32)
    if draft.erasure is not None or decay.form not in USUAL_FORMS:
        S = state_after(draft, taken, state.astype(dtype))
        return stored(S, pool.dtype, rounding_key) if places is None else put(pool, places, S, rounding_key)
    head = decay.head if decay.constant is None else jnp.broadcast_to(decay.constant[:, None], (B, T, H))
    rows = decay.key if head is None else head[..., None]

    def behind(log):
        """Return (the decay from behind each token through the last, the decay through all tokens) of log decays.

        The exponents are sums of at most T logs. A difference of two longer sums would cancel.
        """
        log = jnp.where(taken, log.astype(dtype), 0)
        sums = lax.cumsum(log, axis=1, reverse=True)
        return jnp.exp(jnp.concatenate([sums[:, 1:], jnp.zeros_like(sums[:, :1])], 1)), jnp.exp(sums[:, 0])

    k, v = (spread_heads(x, H).astype(dtype) for x in (draft.key, draft.value))
    S, k = state.astype(dtype), jnp.where(taken, k, 0)
    v = jnp.where(taken, v, 0)
    if rows is not None and T:
        factor, through = behind(rows)
        k, S = k * factor, S * through[..., None]
    if decay.value is not None and T:
        factor, through = behind(decay.value)
        v, S = v * factor, S * through[..., None, :]
    S = S + jnp.einsum("bthk,bthv->bhkv", k, v, precision=lax.Precision.HIGHEST)
    # A sequence without an accepted token has a state that its dtype holds exactly, so rounding does not change it.
    return stored(S, pool.dtype, rounding_key) if places is None else put(pool, places, S, rounding_key)


def steps_in_pool(draft: Draft, taken: Bool[Array, "B T 1 1"], pool: Float[Array, "P H K V"]) -> Recurrence | None:
    """Return the recurrence of the taken tokens if a kernel advances states in the pool by several tokens; else None.

    Without slots and without an erasure the product of rank T is preferred: docs/internals/cuda.md has both.
    """
    if draft.key.shape[1] < 2 or 0 in (draft.key.shape[0], pool.shape[0]):
        return None
    if draft.slots is None and draft.erasure is None:
        return None
    r = taken_alone(draft, taken, pool)
    return None if pooled_kernel(Choice(), r, Role.STEP) is None else r


def state_after(draft: Draft, taken: Bool[Array, "B T 1 1"], state: Float[Array, "B H K V"]) -> Float[Array, "B H K V"]:
    """Return the state after the taken tokens of a draft of the delta rule. taken: true for the tokens that were accepted."""
    if 0 in draft.key.shape[:2]:
        return state
    return solve(Choice(), differentiable(taken_alone(draft, taken, state))).final_state


def taken_alone(draft: Draft, taken: Bool[Array, "B T 1 1"], state: Float[Array, "_ H K V"]) -> Recurrence:
    """Return the recurrence of a draft's tokens in which those that are not taken have k = 0 and no decay, so they change
    nothing.

    state: the states, or a pool of them. Keys, repeated for all heads, stand for the queries, which a draft does not have.
    """
    (B, T), H = draft.key.shape[:2], state.shape[1]

    def clear(x):
        return jnp.where(taken.reshape(B, T, *[1] * (x.ndim - 2)), x, 0)

    decay = draft.decay.with_tokens(lambda x: jnp.broadcast_to(x[:, None], (B, T, H)))
    key, erasure = clear(draft.key), jax.tree.map(clear, draft.erasure)
    scale = jnp.ones(B, promoted(key.dtype, jnp.float32))
    query = spread_heads(key, H)
    return Recurrence(query, key, clear(draft.value), jax.tree.map(clear, decay), state, None, scale, erasure=erasure)
