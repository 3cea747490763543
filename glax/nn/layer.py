"""Define what all layers with a state have in common: a parallel pass, a prefill into pools, and a step."""

import inspect
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.bind import (
    check_array,
    check_ids,
    check_integers,
    check_known_boundaries,
    check_memory_of_leaves,
    known_integer,
)
from glax._src.core.recurrence import to_int32
from glax._src.serving.state_pool import check_slot_values, put, take
from glax.nn.automatic import automatic, like, rows_of, state_of
from glax.nn.parts import check_floats
from glax.nn.passes import Parallel, Rows, State, Step

M = TypeVar("M", bound=type)


def check_rows(x, width: int, form: str, *ranks: int):
    """Raise TypeError or ValueError unless x is floating point, has a rank in `ranks` and `width` channels. form: its shape,
    for the message."""
    check_floats("x", x)
    if x.ndim not in ranks or x.shape[-1] != width:
        raise ValueError(f"x must be {form}, with width={width}, got shape {x.shape}")


class OfClass:
    """Define, as a descriptor, a class attribute with the given value. Reading it from an instance raises AttributeError."""

    def __init__(self, value):
        self.value = value

    def __get__(self, instance, owner):
        if instance is not None:
            raise AttributeError
        return self.value


def with_signature(module: M) -> M:
    """Return the class `module`, changed in place to have the signature of its __init__.

    Flax's metaclass takes (*args, **kwargs), which help() and documentation would show in place of the arguments. An instance
    has the signature of its __call__, from which `jax.jit` reads the names of arguments.
    """
    signature = inspect.signature(module.__init__)
    signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    setattr(module, "__signature__", OfClass(signature))  # noqa: B010
    return module


class Layer(nnx.Module):
    """Define a layer with a state. It reads whole sequences in parallel, packed prompts into pools, or one token of each:

        y, state = layer(x)                                      x, y [B, T, width]
        y, pool = layer.prefill_into(x, pool, slots, cu_seqlens)       [T, width]
        y, state = layer.step(x, state)                                [B, width]

    The state of N sequences is an array with N rows, or a dict of such arrays where the layer's docstring names several; a dict
    whose only key is "recurrent" is given and taken as its array. N is B, or the number of packed sequences. A pool is the
    state of as many sequences as it has slots. x is floating point. y has the layer's `dtype`, or if that is None the dtype to
    which x and the parameters are promoted.

    A subclass defines the layer once, by `mix(x, state, rows)`, which returns (y, the new state) for the x and y of each of these
    calls. In it states are always dicts, and rows is a `glax.nn.passes.Rows`, by which it reads other rows and states however
    the rows are packed. It also sets `width` and defines `empty_state(batch, max_length)`, which returns a dict of zeros.

    Constructors and methods raise TypeError or ValueError, which names the argument: for sizes below 1, for heads that do not
    divide, for unknown names of functions, and for x or a state of another shape.

    >>> layer = nn.SimpleGatedLinearAttention(64, num_heads=2, use_short_conv=False, rngs=nnx.Rngs(0))
    >>> y, state = layer.step(jnp.ones((1, 64)), layer.initial_state(1))
    >>> y.shape, state.shape
    ((1, 64), (1, 2, 32, 32))
    """

    width: int

    def mix(self, x: Float[Array, "*rows width"], state: State, rows: Rows) -> tuple[Array, State]:
        """Return y [*rows, width] and the new state. Subclasses define it.

        x: [*rows, width], with *rows as `rows` says: [B, T], [T], or [B] for one token of each sequence. state: a dict of arrays
        by name; a missing one stands for zeros. rows: a `glax.nn.passes.Rows`, which knows the sequences of the rows.
        """
        raise NotImplementedError

    def empty_state(self, batch: int, max_length: int | None = None) -> dict:
        """Return the state of `batch` sequences before their first token: zeros, by the name of each array. Subclasses define
        it.

        max_length: the tokens of a sequence, for the cache of softmax attention; unused by other layers.
        """
        raise NotImplementedError

    @property
    def state_passes(self) -> int:
        """Return how often a token passes over all entries of the recurrent states: 2, once to write and once to read them.
        Layers of the delta rule return more, because they also read the states before they write.

        `glax.models.operations` multiplies the number of entries by it to count operations.
        """
        return 2

    def initial_state(self, batch: int, max_length: int | None = None):
        """Return the state of `batch` sequences before their first token, or a pool of as many slots: zeros, an array or a dict.

        max_length: the tokens of a sequence, for the cache of softmax attention, which raises ValueError if it is None. Other
        states do not depend on it.
        """
        return public(self.empty_state(batch, max_length))

    @automatic(rows_of("x"), state_of("initial_state", rows="x"))
    def __call__(
        self,
        x: Float[Array, "B T width"],
        initial_state=None,
        cu_seqlens: Int[Array, "N+1"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        pad_id: int | None = None,
    ) -> tuple[Float[Array, "B T width"], Array | dict]:
        """Return y [B, T, width], and the state behind the last token of each sequence.

        x [T, width] is one sequence, and y then has no B. initial_state: the state before the first tokens, one row for each
        sequence; zeros if None. Sequences are packed as in `glax.recurrent`: by segment_ids and pad_id, or by cu_seqlens with a
        B that is 1 or absent. Raises TypeError or ValueError, which names the argument.
        """
        check_rows(x, self.width, "[B, T, width], or [T, width] with cu_seqlens", 2, 3)
        check_memory_of_leaves("initial_state", initial_state)
        rows = parallel_rows(x.shape[:-1], cu_seqlens, segment_ids, pad_id)
        y, state = self.mix(rows.with_zeros_in_padding(x), named(initial_state), rows)
        return y, public(state)

    @automatic(rows_of("x"), like("pool"))
    def prefill_into(
        self,
        x: Float[Array, "T width"],
        pool,
        slots: Int[Array, "N"],
        cu_seqlens: Int[Array, "N+1"],
        fresh: Bool[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T width"], Array | dict]:
        """Return y [T, width] of packed prompts, and the pool with the states behind their last tokens.

        pool: as `initial_state` returns it. Sequence n has rows cu_seqlens[n] to cu_seqlens[n + 1] - 1 of x. It goes on from
        row slots[n] of the pool, or from zeros where fresh[n]. Without `fresh` every sequence goes on. The state behind its
        last token is written to row slots[n]. A sequence with slot -1 starts from zeros, and its state is dropped.
        Raises TypeError or ValueError, which names the argument.
        """
        check_rows(x, self.width, "[T, width]", 2)
        rows = parallel_rows(x.shape[:-1], cu_seqlens)
        states, slots = from_pool(named(pool), slots, rows.num_sequences, fresh)
        y, states = self.mix(rows.with_zeros_in_padding(x), states, rows)
        return y, public(into_pool(named(pool), slots, states))

    @automatic(rows_of("x"), like("state"))
    def step(
        self, x: Float[Array, "B width"], state, slots: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B width"], Array | dict]:
        """Return y [B, width] of one token of each sequence, and the new state or pool, as `glax.recurrent_step` does.

        state: as `initial_state` returns it. Without slots, row b of the state belongs to sequence b. With slots the state is a
        pool, and row slots[b] of it belongs to sequence b. Slot -1 marks a row of x that is no sequence: it reads and writes no
        state, and its y has no meaning. Raises TypeError or ValueError, which names the argument.
        """
        check_rows(x, self.width, "[B, width]", 2)
        y, state = self.mix(x, named(state), token_rows(slots, x.shape[0], named(state), "state"))
        return y, public(state)


ONLY = "recurrent"  # the name of the state of a layer with a single array


def public(state: State):
    """Return a state as users see it: the array of a dict whose only key is "recurrent", else the dict."""
    return state[ONLY] if state.keys() == {ONLY} else dict(state)


def named(state) -> State:
    """Return a state as `mix` takes it, the inverse of `public`: {} for None, and {"recurrent": state} for an array."""
    if state is None:
        return {}
    return state if isinstance(state, dict) else {ONLY: state}


def parallel_rows(shape: tuple[int, ...], cu_seqlens, segment_ids=None, pad_id: int | None = None) -> Parallel:
    """Return the `Parallel` of rows of this shape, [B, T] or [T], after a check of the packing arguments. Rows [T] without
    cu_seqlens are one sequence.

    Raises ValueError if both cu_seqlens and segment_ids are given, if their shapes do not fit the rows, or for a pad_id without
    segment_ids. Raises TypeError for arguments that are not integers.
    """
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("cu_seqlens and segment_ids exclude each other: pass one of them")
    if pad_id is not None:
        pad_id = known_integer("pad_id", pad_id)
        if segment_ids is None:
            raise ValueError(f"pad_id must be None without segment_ids, got {pad_id}")
    if segment_ids is not None:
        check_ids("segment_ids", segment_ids)
        if segment_ids.shape != shape:
            raise ValueError(f"segment_ids must be [B, T]={list(shape)} as the tokens are, got {segment_ids.shape}")
    if segment_ids is not None and len(shape) == 1:
        raise ValueError(f"segment_ids must be [B, T], for rows with a B, got shape {segment_ids.shape}")
    if cu_seqlens is None and len(shape) == 1:  # one sequence, without a B
        cu_seqlens = jnp.array([0, shape[0]], jnp.int32)
    if cu_seqlens is not None:
        check_integers("cu_seqlens", cu_seqlens)
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"cu_seqlens must be [N + 1], got shape {cu_seqlens.shape}")
        if len(shape) == 2 and shape[0] != 1:
            raise ValueError(f"cu_seqlens packs the sequences along T, so x must have B=1, got B={shape[0]}")
        check_known_boundaries(cu_seqlens, shape[-1], "x")
        cu_seqlens = to_int32(cu_seqlens)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return Parallel(shape, cu_seqlens, segment_ids, pad_id)


def check_slots(slots, letter: str, count: int, pool, name: str):
    """Raise TypeError or ValueError unless `slots` is `count` integers. Where their values are known, each must be -1 or a row
    of the pool, and no row may occur twice.

    letter: the name of the axis of `slots` in messages, "B" or "N". pool: a tree of arrays with one row for each slot. name:
    the name of the argument `pool` in messages.
    """
    check_integers("slots", slots)
    if slots.shape != (count,):
        raise ValueError(f"slots must be [{letter}]={[count]}, one for each sequence, got shape {slots.shape}")
    if not isinstance(slots, Tracer):
        check_slot_values(slots, jax.tree.leaves(pool)[0].shape[0], name)


def token_rows(slots: Int[Array, "B"] | None, B: int, state, name: str) -> Step:
    """Return the `Step` that reads one token of each of B sequences.

    state: a tree of arrays with B rows, or with slots a pool. name: the argument `state` in messages. Raises TypeError or
    ValueError for wrong slots, and without slots for a state that has not B rows.
    """
    check_memory_of_leaves(name, state)
    if slots is not None:
        check_slots(slots, "B", B, state, name)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if slots is None and x.shape[:1] != (B,):
            at = name + jax.tree_util.keystr(path)
            raise ValueError(f"{at} must have B={B} rows without slots, one for each token, got shape {x.shape}")
    return Step(slots)


def from_pool(pool, slots: Int[Array, "N"], N: int, fresh: Bool[Array, "N"] | None):
    """Return (the states of N sequences, a tree of [N, ...] read from the pool; their slots, int32).

    A sequence has zeros as its state if its `fresh` is True or its slot is -1. In the returned slots the number of the pool's
    rows, which is out of bounds, stands for -1. Raises TypeError or ValueError for slots or `fresh` of another shape or dtype,
    and for known slots that repeat.
    """
    check_memory_of_leaves("pool", pool)
    check_slots(slots, "N", N, pool, "pool")
    if fresh is not None:
        check_array("fresh", fresh)
        if fresh.dtype != jnp.bool_ or fresh.shape != (N,):
            raise ValueError(f"fresh must be booleans [N]={[N]}, got {fresh.dtype} of shape {fresh.shape}")
    rows = jax.tree.leaves(pool)[0].shape[0]
    slots = Step.unused_to_end(slots, jax.tree.leaves(pool)[0])
    unread = slots >= rows if fresh is None else fresh | (slots >= rows)

    def read(x):
        state = take(x, slots)
        return jnp.where(unread.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(state), state)

    return jax.tree.map(read, pool), slots


def into_pool(pool, slots: Int[Array, "N"], states):
    """Return the pool, a tree of arrays, with states[n] written to row slots[n]. A slot out of bounds, as `from_pool` returns
    for -1, drops its state."""
    return jax.tree.map(lambda pool, state: put(pool, slots, state), pool, states)
