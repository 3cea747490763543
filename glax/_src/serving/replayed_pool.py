"""Define `StatePool`, a state pool that writes a state once in several tokens."""

import dataclasses
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from glax._src.core.backend import Backend
from glax._src.core.bind import (
    DTYPES,
    REQUIRED,
    ScanOptions,
    bind,
    check_before_tracing,
    check_integers,
    checked_size,
    known_values,
    transferred,
)
from glax._src.core.decay import USUAL_FORMS, Decay, promoted
from glax._src.core.recurrence import Recurrence, to_int32
from glax._src.core.registry import KernelSpec, Role
from glax._src.core.ring import Ring, RingedStates
from glax._src.core.stored_states import COMPACT, DROPPED, CompactStates, check_rounding_key, check_state_dtype
from glax._src.serving.by_kernel import by_kernel
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.on_shards import gathered
from glax._src.serving.prefill import prefill_into
from glax._src.serving.replay import InPool, replay, state_after
from glax._src.serving.state_pool import check_known_slots, put, take, usable
from glax._src.solve.dispatch import Choice, executor, pooled_kernel, why_not_others
from glax._src.solve.exclusive_read import check_bonus, check_no_erasure
from glax._src.solve.partitioning import is_spread_by_type
from glax._src.tuning.executor import compiled

ERASURES = ("beta", "erase", "erase+write", "erase+along", "erase+write+along")


class TokenOptions(TypedDict, total=False):
    """List the arguments of a token other than its query, key and value: those of `recurrent_step`, by name.

    Of the gates and of beta to erase_along, give exactly those that the pool's `form` names: ValueError else. softmax_scale is
    K ** -0.5 if None, and the flags are False by default. For `verify` arrays of a token have an axis of T tokens after B;
    g_gamma, which is the same for all tokens, has none.

    >>> pool, q = glax.serving.StatePool(2, heads=2, widths=4, form="none+beta"), jnp.ones((2, 2, 4))
    >>> pool.step(q, q, q, beta=jnp.ones((2, 2)), use_qk_l2norm=True)[0].shape
    (2, 2, 4)
    """

    g: Float[Array, "B H"] | Float[Array, "B H K"] | None
    g_gamma: Float[Array, "H"] | Float[Array, "B H"] | None
    gk: Float[Array, "B H K"] | None
    gv: Float[Array, "B H V"] | None
    softmax_scale: float | Float[Array, ""] | None
    beta: Float[Array, "B H"] | None
    erase: Float[Array, "B H K"] | None
    write: Float[Array, "B H V"] | None
    erase_along: Float[Array, "B H K"] | None
    erase_before_decay: bool
    use_qk_l2norm: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """Hold the static properties of a pool, known while tracing. heads: the numbers of heads of keys, of values and of states.
    widths: (K, V). The other fields are the arguments of `StatePool` with these names."""

    heads: tuple[int, int, int]
    widths: tuple[int, int]
    replay: int
    drafts: int
    form: str
    token_dtype: str

    @property
    def sums(self) -> jnp.dtype:
        """Return the dtype in which sums are formed."""
        return promoted(self.token_dtype, jnp.float32)

    def ring(self, slots: int) -> Ring:
        """Return an empty replay ring for each of `slots` slots."""
        (Hk, Hv, H), (K, V), places = self.heads, self.widths, self.replay - 1 + self.drafts
        parts = self.form.split("+")

        def empty(*shape, dtype: DTypeLike = self.sums):
            return jnp.zeros((slots, places, *shape), dtype)

        decay = Decay(
            head=empty(H) if {"constant", "head"} & set(parts) else None,
            key=empty(H, K) if "key" in parts else None,
            value=empty(H, V) if "value" in parts else None,
        )
        erases, along = "beta" in parts or "erase" in parts, "along" in parts
        value = empty(H, V) if erases else empty(Hv, V, dtype=self.token_dtype)
        terms = (empty(H, K), empty(H, V)) if along else (None, None)
        return Ring(empty(Hk, K, dtype=self.token_dtype), value, decay, *terms)

    def check(self, r: Recurrence):
        """Raise ValueError unless r has the form and the heads of the pool, and TypeError unless token_dtype holds its tokens."""
        form = r.decay.form if r.erasure is None else f"{r.decay.form}+{r.erasure.form}"
        if form != self.form:
            raise ValueError(
                f"form must be {form!r}, the form of the gates and of the delta rule's arguments, for the pool to hold these "
                f"tokens, got {self.form!r}: make the pool with form={form!r}"
            )
        heads = (r.k.shape[2], r.v.shape[2], r.num_heads)
        if heads != self.heads:
            names = "heads of key, of value and of the states"
            raise ValueError(f"the {names} must be {self.heads} as the pool's heads say, got {heads}")
        if promoted(r.q.dtype, self.token_dtype) != jnp.dtype(self.token_dtype):
            raise TypeError(
                f"query must be {self.token_dtype}, the pool's token_dtype, or a dtype that it holds, got {r.q.dtype}: make "
                f"the pool with token_dtype={str(promoted(r.q.dtype, self.token_dtype))!r}"
            )


class StatePool:
    """Hold the states of P slots, and beside each the tokens since it was written, so that a step seldom writes a state:

        S_t = e^{G_t} S_0 + sum_{i <= t} e^{G_t - G_i} k_i u_i^T,     o_t = scale * S_t^T q_t

    S_0 is the stored state, G_t the sum of the log decays since then, and u_i is v_i, or what token i writes under the delta
    rule. The tokens 1 to t lie in the slot's replay ring. A step reads the state and the ring, and writes its own token into
    the ring; every `replay`-th token of a slot writes the state. Slots may be at different places of their rings. The results
    are those of `recurrent_step`, `recurrent_verify`, `commit` and `prefill_into` on a plain pool, an array [P, H, K, V].

    slots: P.
    heads: the number of heads H, or the heads of (query, key, value), of which each divides the largest, as in `recurrent`.
    widths: (K, V), or one number for both.
    dtype: the dtype of the states: float32, bfloat16, float16 or float64; or int8 or float8_e4m3fn, with a scale for each head
        and block of gcd(K, 32) rows. Beside each number of 8 bits lie 8 bits more, its rest: what the number lost by rounding.
        The next state is formed from the numbers with their rests, so errors of rounding do not add up from write to write.
        Outputs are formed without the rests, so each has the error of one rounding to 8 bits.
    replay: the tokens from one write of a state to the next, at least 1. A ring has replay - 1 + drafts places.
    drafts: the most tokens of one `verify`, which lie in the ring after the tokens that count; 0 for none.
    form: the gates and the arguments of the delta rule that tokens have. It begins with a decay form: "none", "constant"
        (g_gamma), "head" (g), "key" (gk), "value" (gv) or "key+value" (gk and gv). Under the delta rule there follows "+beta",
        "+erase", "+erase+write", "+erase+along" or "+erase+write+along", of which along is `erase_along`.
    token_dtype: the dtype of keys and values in the ring: float32, bfloat16, float16 or float64. It must hold those of the
        calls without loss: bfloat16 holds no float16, nor float16 bfloat16.

    A new pool is zeros. It is a tree of arrays: it passes through jit, and one that is donated is updated in place. No method
    changes the pool that it is called on. `states`, `length` [P] and `drafted` [P] are the stored states and the numbers of
    tokens and of drafts in each ring. Raises TypeError or ValueError, which names the argument.

    >>> pool = glax.serving.StatePool(4, heads=2, widths=8, replay=8, form="head")
    >>> q, g, slots = jnp.ones((1, 2, 8)), jnp.full((1, 2), -0.1), jnp.array([3])
    >>> output, pool = pool.step(q, q, q, g=g, slots=slots)
    >>> output.shape, bool((pool.states == 0).all()), pool.length.tolist()
    ((1, 2, 8), True, [0, 0, 0, 1])
    """

    states: Float[Array, "P H K V"] | CompactStates
    ring: Ring
    length: Int[Array, "P"]  # the tokens of each ring
    drafted: Int[Array, "P"]  # the drafts in the ring after these
    layout: Layout

    def __init__(
        self,
        slots: int,
        heads: int | tuple[int, int, int],
        widths: int | tuple[int, int],
        dtype: DTypeLike = jnp.float32,
        *,
        replay: int = 1,
        drafts: int = 0,
        form: str = "none",
        token_dtype: DTypeLike = jnp.float32,
    ):
        slots = checked_size("slots", slots, 0)
        Hq, Hk, Hv = checked_sizes("heads", heads, 3)
        K, V = checked_sizes("widths", widths, 2)
        H = max(Hq, Hk, Hv)
        if any(H % n for n in (Hq, Hk, Hv)):
            raise ValueError(f"heads must be numbers that divide the largest, got {(Hq, Hk, Hv)}")
        if str(jnp.dtype(token_dtype)) not in DTYPES:
            raise TypeError(f"token_dtype must be {', '.join(DTYPES)}, got {token_dtype}")
        shape, is_compact = (slots, H, K, V), str(jnp.dtype(dtype)) in COMPACT
        if not is_compact:
            check_state_dtype("dtype", jnp.dtype(dtype))
        self.layout = Layout(
            heads=(Hk, Hv, H),
            widths=(K, V),
            replay=checked_size("replay", replay, 1),
            drafts=checked_size("drafts", drafts, 0),
            form=checked_form(form),
            token_dtype=str(jnp.dtype(token_dtype)),
        )
        self.states = CompactStates.zeros(shape, dtype) if is_compact else jnp.zeros(shape, dtype)
        self.ring = self.layout.ring(slots)
        # Two arrays: a donated pool must not hold one twice.
        self.length, self.drafted = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)

    def step(
        self,
        query: Float[Array, "B Hq K"],
        key: Float[Array, "B Hk K"],
        value: Float[Array, "B Hv V"],
        *,
        slots: Int[Array, "B"] | None = None,
        bonus: Float[Array, "H K"] | None = None,
        rounding_key: Key | None = None,
        **options: Unpack[TokenOptions],
    ) -> tuple[Float[Array, "B H V"], "StatePool"]:
        """Return the output [B, H, V] of one token of each sequence, and the pool after it, as `recurrent_step` does.

        Sequence b lives in slots[b], -1 for none, or in row b of the pool without slots. Drafts that were not committed are
        forgotten. bonus, rounding_key: as in `recurrent_step`; the key rounds the states that this step writes. States in 8
        bits are rounded to nearest. options: `TokenOptions`, those of the pool's `form`.

        Raises the errors of `recurrent_step`; ValueError for tokens of another form or other heads than the pool's, and TypeError
        for a query that token_dtype does not hold.
        """
        check_rounding_key(rounding_key)
        tokens, static = self.checked(dict(query=query, key=key, value=value, bonus=bonus), options, slots)
        own = transferred(dict(slots=slots, bonus=bonus))
        return bind_and_step(static, self, tokens, **own, rounding_key=rounding_key)

    def verify(
        self,
        query: Float[Array, "B T Hq K"],
        key: Float[Array, "B T Hk K"],
        value: Float[Array, "B T Hv V"],
        *,
        slots: Int[Array, "B"] | None = None,
        **options: Unpack[TokenOptions],
    ) -> tuple[Float[Array, "B T H V"], "StatePool"]:
        """Return the outputs [B, T, H, V] of T draft tokens, in the query's dtype, and the pool with the drafts at the ends
        of its rings.

        No state is written. `commit` moves each sequence past its accepted drafts; without it they are forgotten. T is at most
        `drafts`. slots, options and errors: as in `step`, the options with an axis of T tokens after B.
        """
        tokens, static = self.checked(dict(query=query, key=key, value=value), options, slots)
        return bind_and_verify(static, self, tokens, **transferred(dict(slots=slots)))

    def commit(
        self,
        accepted: Int[Array, "B"],
        *,
        slots: Int[Array, "B"] | None = None,
        rounding_key: Key | None = None,
    ) -> "StatePool":
        """Return the pool after the first accepted[b] drafts of each sequence b, without its other drafts.

        A state is written, and its ring emptied, where the ring then holds at least `replay` tokens.

        accepted: [B] integers. A number above the drafts that the slot has, or below 0, is a ValueError when known, and is
        clipped when traced. slots, rounding_key: as in `step`.
        """
        check_integers("accepted", accepted)
        check_rounding_key(rounding_key)
        self.check_slots(slots)
        self.check_accepted(accepted, slots)
        return commit_drafts(self, rounding_key=rounding_key, **transferred(dict(accepted=accepted, slots=slots)))

    def prefill(
        self,
        slots: Int[Array, "N"],
        query: Float[Array, "B T Hq K"],
        key: Float[Array, "B T Hk K"],
        value: Float[Array, "B T Hv V"],
        *,
        write_slots: Int[Array, "N"] | None = None,
        state_slots: Int[Array, "M"] | None = None,
        rounding_key: Key | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T H V"], "StatePool"]:
        """Read prompts as `prefill_into` does, which takes the same arguments, and return (the outputs, the pool).

        Outputs, errors and options, which include gates, cu_seqlens, fresh and states_every, are those of `prefill_into`.
        The rings of the slots in slots, write_slots and state_slots are first flushed: written into their states, and emptied.
        """
        check_rounding_key(rounding_key)
        self.check_slots(slots, letter="N", may_repeat=write_slots is not None)
        self.check_slots(write_slots, "write_slots", "N")
        self.check_slots(state_slots, "state_slots", "M")
        pool, keys = self, (None, None)
        if rounding_key is not None:
            keys = jax.random.split(rounding_key)
        # The slots that prefill_into writes are flushed too, because it leaves the states of some of them as they are.
        for each in (slots, write_slots, state_slots):
            if each is not None:
                pool = flushed(pool, rounding_key=keys[0], **transferred(dict(slots=each)))
        given = dict(write_slots=write_slots, state_slots=state_slots, rounding_key=keys[1])
        states: Any = pool.states
        output, states = prefill_into(states, slots, query, key, value, **given, **options)
        return output, pool.replace(states=states)

    def flush(self, slots: Int[Array, "B"] | None = None, *, rounding_key: Key | None = None) -> "StatePool":
        """Return the pool after the tokens in the replay rings of some slots are written into the slots' states: each stored
        state is then the one after all tokens that its slot has read, and the ring is empty.

        slots: [B], with -1 for none; None for all slots. Drafts of `verify` that were not committed are dropped. rounding_key: a
        key that rounds the written states stochastically, as in `step`; to nearest if None. Raises TypeError or ValueError for
        wrong slots.
        """
        check_rounding_key(rounding_key)
        self.check_slots(slots)
        return flushed(self, rounding_key=rounding_key, **transferred(dict(slots=slots)))

    def states_of(self, slots: Int[Array, "B"] | None = None) -> Float[Array, "B H K V"]:
        """Return the states [B, H, K, V] of the slots [B], or of all slots if None; zeros for slot -1.

        A state is the one after all tokens that the slot has read, those in its ring included. Drafts that were not committed
        are no such tokens. The dtype is float32, or float64 for a token_dtype of float64. Of states in 8 bits the result is the
        sum of the stored numbers and their rests, which are what these numbers lost by rounding. Raises TypeError or ValueError
        for wrong slots.
        """
        self.check_slots(slots)
        return states_behind(self, **transferred(dict(slots=slots)))

    # ---- for the functions below -------------------------------------------------------------------------------------

    def replace(self, **changes) -> "StatePool":
        """Return the pool with changed attributes, given by name."""
        pool = object.__new__(StatePool)
        vars(pool).update(vars(self) | changes)
        return pool

    def ringed(self) -> RingedStates:
        """Return the stored states, the replay rings and the numbers of tokens and drafts in them as a `RingedStates`, the
        operand of a kernel whose algorithm is named ".replay"."""
        return RingedStates(self.states, self.ring, self.length, self.drafted, self.layout.replay)

    def __repr__(self):
        (Hk, Hv, H), (K, V) = self.layout.heads, self.layout.widths
        own = f"replay={self.layout.replay}, drafts={self.layout.drafts}, form={self.layout.form!r}"
        return f"StatePool({jnp.shape(self.states)[0]}, heads={(H, Hk, Hv)}, widths={(K, V)}, {own})"

    def checked(self, arrays: dict, options: TokenOptions, slots) -> tuple[dict, ScanOptions]:
        """Return the arrays of tokens by the names of `recurrent`'s arguments, and their flags, which are static under jit.

        arrays: query, key, value and further arrays to check, by name. options: the other arguments of tokens. Raises TypeError
        or ValueError for wrong names, types and flags, and for known slots that the pool does not have. Shapes are checked
        later, while tracing.
        """
        given: dict[str, Any] = dict(options)
        unknown = [name for name in given if name not in TokenOptions.__annotations__]
        if unknown:
            raise TypeError(f"tokens have no argument {unknown[0]!r}: pass those of glax.recurrent_step, by name")
        flags = {name: given.pop(name, False) for name in ("use_qk_l2norm", "erase_before_decay")}
        tokens = {name: arrays[name] for name in REQUIRED} | dict(softmax_scale=None) | given
        static = ScanOptions(**flags)
        check_before_tracing(tokens | arrays | dict(slots=slots, cu_seqlens=None), None, None, static)
        check_known_slots(slots, self.states, "the pool")
        return transferred(tokens), static.static

    def check_slots(self, slots, argument: str = "slots", letter: str = "B", may_repeat: bool = False):
        """Raise TypeError or ValueError unless slots are None or an array of integers with one axis.

        Where they are not traced, so that their values are known, each must also be -1 or the number of a slot of the pool, and
        none may repeat but -1. argument, letter: the names of the argument and of its axis, for the errors. may_repeat: whether
        other slots may repeat too.
        """
        if slots is None:
            return
        check_integers(argument, slots)
        if np.ndim(slots) != 1:
            raise ValueError(f"{argument} must be [{letter}], got shape {np.shape(slots)}")
        check_known_slots(slots, self.states, "the pool", argument, may_repeat=may_repeat)

    def check_accepted(self, accepted, slots):
        """Raise ValueError if accepted[b] is below 0, or above the number of drafts in slot slots[b], or b if slots is None.

        Nothing is checked where the values of one of these are known only to a running program.
        """
        wanted = known_values(accepted)
        known = None if slots is None else known_values(slots)
        drafted = known_values(self.drafted)
        if wanted is None or drafted is None or (slots is not None and known is None):
            return
        if known is not None and known.shape == wanted.shape:
            wanted, drafted = wanted[known >= 0], drafted[known[known >= 0]]
        if wanted.shape != drafted.shape:
            return  # the shapes are checked while tracing
        if (wrong := (wanted < 0) | (wanted > drafted)).any():
            most = drafted[wrong][0]
            raise ValueError(f"accepted must be from 0 to {most}, the drafts of its slot, got {wanted[wrong][0]}")

    def usable_slots(self, slots, B: int | None = None) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
        """Return (the slot of each of B sequences, P in place of -1; whether the sequence has a slot), [B] each.

        slots: [B], or None for all P slots in order. B: the number of sequences in the tokens, which must fit; None without
        tokens.
        """
        P = self.states.shape[0]
        if slots is not None:
            return usable(slots, P, len(slots) if B is None else B, ("B", "query"))
        if B not in (None, P):
            raise ValueError(f"slots must be given for {B} sequences in a pool of {P} slots, got None")
        return jnp.arange(P, dtype=jnp.int32), jnp.ones(P, bool)

    def gathered(self, tokens: dict, slots) -> tuple[dict, Any]:
        """Return the tokens and the slots, unchanged unless arrays are sharded along explicit axes of a mesh and slots are
        given.

        Then they are resharded: each device has the tokens and slots of all sequences, for its own heads.
        """
        found = gathered(tokens | dict(pool=self.states, slots=slots))
        return {name: found[name] for name in tokens}, found["slots"]

    def rings_of(self, slots: Int[Array, "B"]) -> tuple[Ring, Int[Array, "B"]]:
        """Return (the replay rings of the slots, the number of tokens in each [B], drafts not counted).

        A ring holds the tokens since its slot's state was written. The result is a `Ring` whose arrays are [B, C, ...] with
        C = replay - 1 + drafts places. slots: as `usable_slots` returns them. For none, P, zeros are returned.
        """
        return jax.tree.map(lambda x: take(x, slots), self.ring), take(self.length, slots)

    def stored_states(self, slots: Int[Array, "B"], dtype) -> Float[Array, "B H K V"]:
        """Return the states [B, H, K, V] as they are stored, without the tokens of the rings, which `states_of` adds.

        A state in 8 bits is its numbers with their rests, times their scales. slots: as `usable_slots` returns them. dtype: the
        least precise dtype of the result; more precise states keep theirs.
        """
        return take(self.states, slots).astype(promoted(self.states.dtype, dtype))

    def states_to_read(self, slots: Int[Array, "B"], dtype) -> Float[Array, "B H K V"]:
        """Return the states [B, H, K, V] from which outputs are formed: as stored, without the tokens of the rings, and in 8
        bits without the rests.

        slots: as `usable_slots` returns them. dtype: the least precise dtype of the result; more precise states keep theirs.
        """
        if isinstance(self.states, CompactStates):
            return self.states.without_rests(slots).astype(promoted(self.states.dtype, dtype))
        return self.stored_states(slots, dtype)

    def put_tokens(self, slots: Int[Array, "B"], length: Int[Array, "B"], new: Ring) -> Ring:
        """Return the ring with the `new` tokens of each slot after its first `length`. Tokens without a place are dropped."""
        if self.ring.key.shape[1] == 0:
            return self.ring
        at = length[:, None] + jnp.arange(new.key.shape[1], dtype=jnp.int32)[None]

        def put(x, tokens):
            return x.at[slots[:, None], at].set(tokens.astype(x.dtype), mode="drop")

        return jax.tree.map(put, self.ring, new)

    def as_sums(self, ring: Ring, length: Int[Array, "B"]) -> Ring:
        """Return a ring in the dtype in which sums are formed, with zeros after the first `length` tokens of each row."""
        return jax.tree.map(lambda x: x.astype(self.layout.sums), ring.cleared(length))

    def advanced_states(
        self, slots: Int[Array, "B"], full: Bool[Array, "B"], ring: Ring, rounding_key, read: Array | None = None
    ):
        """Return the pool's states, with those of the slots that are `full` advanced by their tokens in `ring`.

        full: [B], whether the state of each of the slots is written. Where none is, no state is computed. ring: the rings of the
        slots, [B, C, ...] in the dtype of sums, with zeros behind their tokens. rounding_key: a key for states in 16 bits that
        are rounded stochastically, or None to round to nearest. read: an array that was formed of the states before this call, or
        None. On a CPU the writes wait for it, so that XLA need not copy the pool.
        """
        to_nearest = rounding_key is None or str(self.states.dtype) not in DROPPED
        in_pool = InPool.for_writes(self.states, slots, ring) if to_nearest else None
        if in_pool is not None and Backend.here() is Backend.CPU:
            return in_pool.advanced(ring, full, read)  # without a branch, for which XLA copies the pool there
        # Not in the branch: XLA copies a pool that a branch reads and writes.
        S = self.stored_states(slots, self.layout.sums)

        def write(states):
            if in_pool is not None:
                return in_pool._replace(states=states).advanced(ring, full)
            return put(states, jnp.where(full, slots, len(states)), state_after(S, ring), rounding_key)

        return lax.cond(full.any(), write, lambda states: states, self.states)


NAMES = ("states", "ring", "length", "drafted")


def pool_of_leaves(layout: Layout, leaves) -> StatePool:
    """Return the StatePool with this layout and the attributes of NAMES in `leaves`, as JAX rebuilds a tree."""
    pool = object.__new__(StatePool)
    vars(pool).update(zip(NAMES, leaves, strict=True), layout=layout)
    return pool


jax.tree_util.register_pytree_with_keys(
    StatePool,
    lambda pool: (tuple((jax.tree_util.GetAttrKey(name), vars(pool)[name]) for name in NAMES), pool.layout),
    pool_of_leaves,
)


def checked_sizes(name: str, x, count: int) -> tuple[int, ...]:
    """Return `count` integers of at least 1: those of the tuple x, or x itself `count` times. Raises TypeError or ValueError,
    which names the argument."""
    given = x if isinstance(x, tuple | list) else (x,) * count
    if len(given) != count:
        raise ValueError(f"{name} must be one number or {count}, got {x!r}")
    return tuple(checked_size(name, each, 1) for each in given)


def checked_form(form: str) -> str:
    """Return the form. Raises ValueError unless it is one of those that `StatePool` lists."""
    forms = [decay + erasure for decay in USUAL_FORMS for erasure in ("", *(f"+{each}" for each in ERASURES))]
    if form not in forms:
        raise ValueError(
            f"form must be a decay form, {', '.join(map(repr, USUAL_FORMS))}, and behind it nothing or one of "
            f"{', '.join(repr('+' + each) for each in ERASURES)}, got {form!r}"
        )
    return form


@compiled(static_argnums=(0,))
def bind_and_step(options: ScanOptions, pool: StatePool, tokens: dict, slots, bonus, rounding_key):
    """Return the results of `StatePool.step`, compiled by jit. options: the flags. tokens: arrays by argument of
    `recurrent_step`. The other arguments are those of `StatePool.step`."""
    tokens, slots = pool.gathered(tokens, slots)
    r = bind(**tokens, **options.of_bind, one_token=True)
    pool.layout.check(r)
    if bonus is not None:
        check_no_erasure(r)
        check_bonus(bonus, r.num_heads, r.q.shape[3])
    if pool.ring.key.shape[1] == 0 and not isinstance(pool.states, CompactStates):  # a plain pool
        given = dict(slots=slots, bonus=bonus, rounding_key=rounding_key)
        output, states = recurrent_step(**tokens, state=pool.states, **given, **options.flags)
        return output, pool.replace(states=states)
    kernel = None if bonus is not None else replay_kernel(r, pool, rounding_key)
    if kernel is not None:
        return step_by_kernel(kernel, r, pool, slots)
    return step_by_parts(r, pool, slots, bonus, rounding_key)


def step_by_parts(
    r: Recurrence, pool: StatePool, slots, bonus=None, rounding_key=None
) -> tuple[Float[Array, "B H V"], StatePool]:
    """Return the output and the pool of a step, computed by separate reads of states and rings, sums by XLA, and writes.

    r: one token of each sequence, without states. slots: [B], -1 for none, or None for the rows of the pool in order.
    """
    rows, used = pool.usable_slots(slots, r.q.shape[0])
    old, length = pool.rings_of(rows)
    in_pool = InPool.for_reads(pool.states, rows, old, r)
    S = in_pool or pool.states_to_read(rows, r.dtype)
    output, new, ring = replay(S, old, length, r, bonus)
    full = used & (length + 1 >= pool.layout.replay)
    states = pool.advanced_states(rows, full, ring, rounding_key, output)
    pool = pool.replace(
        states=states,
        ring=pool.put_tokens(rows, length, new),
        length=pool.length.at[rows].set(jnp.where(full, 0, length + 1), mode="drop"),
        drafted=pool.drafted.at[rows].set(0, mode="drop"),
    )
    return jnp.where(used[:, None, None], output[:, 0], 0), pool


def replay_kernel(r: Recurrence, pool: StatePool, rounding_key) -> KernelSpec | None:
    """Return the kernel that computes a whole step on the states and rings of the pool, or None if none is able.

    Such kernels round states to nearest and sum in float32: the result is None if the rounding_key would have an effect, or if
    sums are float64. It is None on explicit axes, too: the arrays of a ring are sharded in several ways, which one call of a
    kernel cannot have.
    """
    is_drawn = rounding_key is not None and str(pool.states.dtype) in DROPPED
    if is_drawn or pool.layout.sums != jnp.float32 or is_spread_by_type((r, pool.states)):
        return None
    if 0 in (*pool.states.shape, *pool.ring.key.shape, *r.q.shape) or not pool.ringed().is_countable:
        return None
    return pooled_kernel(Choice(), with_stored(r, pool), Role.REPLAY)


def with_stored(r: Recurrence, pool: StatePool) -> Recurrence:
    """Return r with the pool's states, as they are stored, as its initial states; of states in 8 bits the values alone."""
    states = pool.states
    return r.replace(initial_state=states.values if isinstance(states, CompactStates) else states)


def step_by_kernel(spec: KernelSpec, r: Recurrence, pool: StatePool, slots) -> tuple[Float[Array, "B H V"], StatePool]:
    """Return the output and the pool of a step, computed by the kernel `spec`, or by `step_by_parts` where the kernel cannot
    run.

    slots: as in `step_by_parts`.
    """

    def kernel(r: Recurrence, pool: StatePool, slots):
        ringed = pool.ringed()
        r = with_stored(r, pool)  # kernels choose their configs by the dtype
        others: Any = why_not_others(spec, Choice(), r)
        output, new = executor(spec, r, ringed, slots, **others)
        return output, pool.replace(states=new.states, ring=new.ring, length=new.length, drafted=new.drafted)

    pool.usable_slots(slots, r.q.shape[0])  # for its errors
    return by_kernel(kernel, step_by_parts, spec.backend)(r, pool, None if slots is None else to_int32(slots))


@compiled(static_argnums=(0,))
def bind_and_verify(options: ScanOptions, pool: StatePool, tokens: dict, slots):
    """Return the results of `StatePool.verify`, compiled by jit. options: the flags. tokens: arrays by argument, with an axis
    T."""
    query = tokens["query"]
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, Hq, K], got shape {query.shape}")
    tokens, slots = pool.gathered(tokens, slots)
    r, T = bind(**tokens, **options.of_bind), query.shape[1]
    pool.layout.check(r)
    if pool.layout.drafts < T:
        most = pool.layout.drafts
        raise ValueError(f"query must have at most drafts={most} tokens, got {T}: make the pool with drafts={T}")
    rows, used = pool.usable_slots(slots, query.shape[0])
    drafted = pool.drafted.at[rows].set(T, mode="drop")
    if T == 0:
        return jnp.zeros((*query.shape[:2], r.num_heads, r.v.shape[3]), query.dtype), pool.replace(drafted=drafted)
    old, length = pool.rings_of(rows)
    S = InPool.for_reads(pool.states, rows, old, r) or pool.states_to_read(rows, r.dtype)
    output, new, _ = replay(S, old, length, r)
    pool = pool.replace(ring=pool.put_tokens(rows, length, new), drafted=drafted)
    return jnp.where(used[:, None, None, None], output, 0), pool


@compiled()
def commit_drafts(pool: StatePool, accepted, slots, rounding_key) -> StatePool:
    """Return the result of `StatePool.commit`, compiled by jit."""
    if accepted.ndim != 1:
        raise ValueError(f"accepted must be [B], got shape {accepted.shape}")
    rows, used = pool.usable_slots(slots, accepted.shape[0])
    old, length = pool.rings_of(rows)
    total = length + jnp.clip(to_int32(accepted), 0, take(pool.drafted, rows))
    full = used & (total >= pool.layout.replay)
    states = pool.advanced_states(rows, full, pool.as_sums(old, total), rounding_key)
    return pool.replace(
        states=states,
        length=pool.length.at[rows].set(jnp.where(full, 0, total), mode="drop"),
        drafted=pool.drafted.at[rows].set(0, mode="drop"),
    )


@compiled()
def flushed(pool: StatePool, slots, rounding_key) -> StatePool:
    """Return the result of `StatePool.flush`, compiled by jit. A slot may stand in `slots` several times."""
    rows, used = pool.usable_slots(slots)
    if slots is not None:  # `prefill` may read one slot for several prompts, and a kernel must advance its state once
        used &= ~jnp.tril(rows[:, None] == rows, -1).any(1)
    old, length = pool.rings_of(rows)
    states = pool.advanced_states(rows, used & (length > 0), pool.as_sums(old, length), rounding_key)
    length, drafted = (x.at[rows].set(0, mode="drop") for x in (pool.length, pool.drafted))
    return pool.replace(states=states, length=length, drafted=drafted)


@compiled()
def states_behind(pool: StatePool, slots) -> Float[Array, "B H K V"]:
    """Return the states after all tokens of the slots' rings: the result of `StatePool.states_of`, compiled by jit."""
    rows, _ = pool.usable_slots(slots)
    return state_after(pool.stored_states(rows, pool.layout.sums), pool.as_sums(*pool.rings_of(rows)))
