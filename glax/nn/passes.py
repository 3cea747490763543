"""Define how a layer reads its rows: whole sequences in parallel, packed or not, or one token of each sequence from a pool.

A layer is defined once, by `mix(x, state, rows)`, in terms of a `Rows`. `state` is a dict of arrays by name, each with one row
per sequence, or one row per slot of a pool. A missing entry stands for zeros.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glax._src.api.selective_scan import selective_scan, selective_scan_step
from glax._src.core.bind import known_values
from glax._src.core.recurrence import to_int32
from glax._src.core.segments import differs_from_padding
from glax._src.kernels.common.softmax import Intervals
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.state_pool import put, take
from glax._src.solve.softmax import attend_by_sequence, attend_in_blocks, attend_step, attend_whole
from glax.nn.choice import Choice

State = Mapping[str, Array]
Entry = Any  # an array of a State, or None for zeros; one token of each sequence always comes with arrays


class Rows(Protocol):
    """Define how a layer reads the rows before a row, and the state. `Parallel` and `Step` implement it."""

    def recurrent(
        self, recurrence: Callable, q, k, v, state: Entry, step: Callable = recurrent_step, **options
    ) -> tuple[Array, Any]:
        """Return the outputs [*rows, H, V] of the recurrence, and its new state.

        recurrence: the function that solves whole sequences, such as `glax.recurrent`; `Step` ignores it.
        step: the function of one token of each sequence, `glax.recurrent_step` by default; `Parallel` ignores it.
        q, k, v: by head, [*rows, heads, channels]. state: the state before the first rows.
        options: arguments of both functions, such as gates, softmax_scale and bonus.
        """
        ...

    def selective_scan(self, x, dt, A, B, C, D, state: Entry) -> tuple[Array, Array]:
        """Return the outputs [*rows, D] of `glax.selective_scan`, and its new state. The arguments are those of that function,
        with *rows for [B, T]; state: its state before the first rows."""
        ...

    def window(self, x: Array, size: int, state: Entry) -> tuple[list[Array], Array]:
        """Return (views, the new state). views is a list of `size` arrays [*rows, D]: entry i has, for each row, the row size -
        1 - i before it in its sequence, so the last entry is x itself.

        x: [*rows, D]. state: [N, size - 1, D], the rows before the first row of each sequence. The new state is the last size -
        1 rows of each sequence. Rows of other sequences are never read.
        """
        ...

    def accumulated(self, then: Callable, maps: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return, for each row, the maps of the rows of this call up to it, composed by `then`, an associative function of two
        tuples of arrays. maps: arrays [*rows, ...]. Rows of several sequences are composed too, so `then` must know where a
        sequence begins."""
        ...

    def with_zeros_in_padding(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return x with zeros in the rows of padding."""
        ...

    def positions(self, state: Entry) -> tuple[Int[Array, "*rows"], Array]:
        """Return (the position of each row, the new state). The position is the number of tokens before the row in its
        sequence.

        state: [N], the number of tokens of each sequence that were read before; the new state also counts the rows of this
        call.
        """
        ...

    def first_rows(self) -> Bool[Array, "*rows"]:
        """Return whether each row is the first of its sequence in this call; `Step` returns [True], to be broadcast."""
        ...

    def last_positions(self, positions: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Return, for each row, the greatest position among the rows of its sequence. positions: of all rows, as the
        method `positions` returns them."""
        ...

    @property
    def mean_length(self) -> int:
        """Return the mean number of tokens of a sequence, rounded down."""
        ...

    def attend(
        self,
        q,
        k,
        v,
        cache: State,
        window: int | None,
        scale: float | None,
        stored: Array | None = None,
        expanded: Callable[[Array], tuple[Array, Array]] | None = None,
        choice: Choice | None = None,
    ) -> tuple[Array, State]:
        """Return causal softmax attention of q [*rows, Hq, D] over k and v [*rows, Hk, D] and the cached rows before them, and
        the new cache.

        cache: "key" and "value" [N, L, Hk, D] and "length" [N], the tokens that it holds; {} for none. `Step` may have slots of
        a pool as N.
        window: how many keys a row reads at most, itself included; no limit if None. scale: the factor of the scores; D ** -0.5
        if None.
        stored: the rows [*rows, H, E] that a new cache holds as "key", without "value", in place of k and v; None for k and v.
        expanded: a function from "key" of a cache without "value" to (k, v). With it, k and v are both the rows to store. If it
        is None, the values are the first channels of the keys, as many as v has. `Step` ignores it and reads such a cache as if
        it were None.
        choice: how each row chooses the keys that it reads, for a cache that also has "index"; all keys if None. Raises
        ValueError for a choice together with a window.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Read whole sequences. Rows are [B, T], or [T] or [1, T] packed by cu_seqlens [N + 1], or [B, T] packed by segment_ids.

    A token continues the state of the token before it if both have the same segment id. pad_id is the id of padding, which
    changes no state; None if no id is padding.
    """

    shape: tuple[int, ...]
    cu_seqlens: Int[Array, "N+1"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    pad_id: int | None = None

    @property
    def num_sequences(self) -> int:
        return self.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def check_states(self, state: Array | None):
        """Raise ValueError unless the state has one row for each sequence or is None. JAX would read rows of other sequences in
        place of missing rows."""
        if state is not None and state.shape[0] != self.num_sequences:
            raise ValueError(
                f"initial_state must have one row for each of the {self.num_sequences} sequences, got shape {state.shape}"
            )

    def with_zeros_in_padding(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return x with zeros in the rows of padding, so that their content reaches no sum over rows, such as the gradient of a
        parameter."""
        if self.cu_seqlens is not None:
            is_token = jnp.broadcast_to(jnp.arange(self.shape[-1]) < self.cuts[-1], self.shape)
        elif self.segment_ids is not None and self.pad_id is not None:
            is_token = self.segments.is_token
        else:
            return x
        return jnp.where(is_token[..., None], x, 0)

    # ---- the recurrence ----------------------------------------------------------------------------------------------

    def recurrent(
        self, recurrence: Callable, q, k, v, state: Entry, step: Callable = recurrent_step, **options
    ) -> tuple[Array, Any]:
        if self.segment_ids is not None:
            options |= dict(segment_ids=self.segment_ids, pad_id=self.pad_id)
        return recurrence(q, k, v, initial_state=state, cu_seqlens=self.cu_seqlens, **options)

    def selective_scan(self, x, dt, A, B, C, D, state: Array | None) -> tuple[Array, Array]:
        packing: Any = dict(cu_seqlens=self.cu_seqlens, segment_ids=self.segment_ids, pad_id=self.pad_id)
        return selective_scan(x, dt, A, B, C, D, initial_state=state, **packing)

    def accumulated(self, then: Callable, maps: tuple[Array, ...]) -> tuple[Array, ...]:
        return maps if 0 in self.shape else jax.lax.associative_scan(then, maps, axis=len(self.shape) - 1)

    # ---- windows and positions ---------------------------------------------------------------------------------------

    def window(self, x: Array, size: int, state: Array | None) -> tuple[list[Array], Array]:
        before = size - 1
        self.check_states(state)
        if x.size == 0 or self.num_sequences == 0:  # no token reads or enters a state
            state = jnp.zeros((self.num_sequences, before, x.shape[-1])) if state is None else state
            return [x] * size, state.astype(x.dtype)
        if self.cu_seqlens is not None:
            return self.packed_window(x, before, state)
        if state is None:
            state = jnp.zeros((x.shape[0], before, x.shape[-1]), x.dtype)
        if self.segment_ids is not None:
            return self.window_in_segments(x, before, state)
        T, padded = x.shape[1], jnp.concatenate([state.astype(x.dtype), x], 1)
        return [padded[:, i : i + T] for i in range(size)], padded[:, T:]

    def packed_window(self, x: Array, before: int, state: Array | None) -> tuple[list[Array], Array]:
        """Return what `window` does, for rows packed by cu_seqlens. before: the number of rows before each row, size - 1."""
        flat = x.reshape(-1, x.shape[-1])
        if state is None:
            state = jnp.zeros((self.num_sequences, before, x.shape[-1]), x.dtype)
        begin, end = self.cuts[:-1], self.cuts[1:]
        own, rows = self.sequence_of, jnp.arange(len(flat))
        views = []
        for lag in range(before, -1, -1):
            positions = rows - lag - begin[own]  # in the sequence; negative before its first token
            earlier = state[own, jnp.clip(before + positions, 0, max(before - 1, 0))] if lag else flat
            views.append(jnp.where((positions >= 0)[:, None], jnp.roll(flat, lag, axis=0), earlier.astype(x.dtype)))
        positions = (end - begin)[:, None] - before + jnp.arange(before)[None]  # of the rows that stay
        old = jnp.take_along_axis(state, jnp.clip(before + positions, 0, max(before - 1, 0))[..., None], 1)
        new = flat[jnp.clip(begin[:, None] + positions, 0, len(flat) - 1)]
        after = jnp.where((positions >= 0)[..., None], new, old.astype(x.dtype))
        return [view.reshape(x.shape) for view in views], after

    def window_in_segments(self, x: Array, before: int, state: Array) -> tuple[list[Array], Array]:
        """Return what `window` does, for rows [B, T] with segment_ids. before: the number of rows before each row, size - 1."""
        segments, T = self.segments, x.shape[1]
        positions = jnp.arange(T)[None] - segments.begin  # [B, T]
        views = []
        for lag in range(before, -1, -1):
            back = positions - lag
            at = jnp.clip(before + back, 0, max(before - 1, 0))
            old = jnp.take_along_axis(state, at[..., None], 1) if lag else x
            old = jnp.where(segments.is_first[..., None], old.astype(x.dtype), 0)
            views.append(jnp.where((back >= 0)[..., None], jnp.roll(x, lag, axis=1), old))
        rows = segments.last[:, None] + 1 - before + jnp.arange(before)[None]  # [B, before]
        first_of_last = jnp.take_along_axis(segments.begin, segments.last[:, None], 1)
        in_last, at = rows >= first_of_last, jnp.clip(rows, 0, T - 1)
        old_at = jnp.clip(before + rows - first_of_last, 0, max(before - 1, 0))
        old = jnp.take_along_axis(state, old_at[..., None], 1)
        from_state = jnp.take_along_axis(segments.is_first, segments.last[:, None], 1)
        old = jnp.where(from_state[..., None], old, 0)
        after = jnp.where(in_last[..., None], jnp.take_along_axis(x, at[..., None], 1), old.astype(x.dtype))
        after = jnp.where(segments.is_token.any(1)[:, None, None], after, state.astype(x.dtype))
        return views, after

    def positions(self, state: Array | None) -> tuple[Int[Array, "*rows"], Array]:
        self.check_states(state)
        start = jnp.zeros(self.num_sequences, jnp.int32) if state is None else state
        T = self.shape[-1]
        if T == 0 or self.num_sequences == 0:
            return jnp.zeros(self.shape, jnp.int32), start
        if self.cu_seqlens is not None:
            begin, own = self.cu_seqlens[:-1], self.sequence_of
            positions = (jnp.arange(T) - begin[own] + start[own]).reshape(self.shape)
            return positions, start + jnp.diff(self.cu_seqlens)
        if self.segment_ids is None:
            return start[:, None] + jnp.arange(T)[None], start + T
        segments = self.segments
        positions = jnp.arange(T)[None] - segments.begin + jnp.where(segments.is_first, start[:, None], 0)
        after = jnp.take_along_axis(positions, segments.last[:, None], 1)[:, 0] + 1
        return positions, jnp.where(segments.is_token.any(1), after, start)

    def first_rows(self) -> Bool[Array, "*rows"]:
        return self.positions(None)[0] == 0

    def last_positions(self, positions: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        if positions.size == 0 or self.num_sequences == 0:
            return positions
        if self.cu_seqlens is not None:
            flat = positions.reshape(-1)
            ends = jnp.clip(self.cuts[1:] - 1, 0, len(flat) - 1)
            return flat[ends][self.sequence_of].reshape(positions.shape)
        if self.segment_ids is None:
            return jnp.broadcast_to(positions[:, -1:], positions.shape)
        begin, T = self.segments.begin, self.shape[-1]
        is_end = jnp.concatenate([begin[:, 1:] != begin[:, :-1], jnp.ones_like(begin[:, :1], bool)], 1)
        end = jax.lax.cummin(jnp.where(is_end, jnp.arange(T)[None], T - 1), axis=1, reverse=True)
        return jnp.take_along_axis(positions, end, 1)

    # ---- attention ---------------------------------------------------------------------------------------------------

    @property
    def mean_length(self) -> int:
        return math.prod(self.shape) // max(self.num_sequences, 1)

    def attend(
        self, q, k, v, cache: State, window: int | None, scale: float | None, stored=None, expanded=None, choice=None
    ) -> tuple[Array, State]:
        self.check_states(cache.get("key"))
        check_choice(choice, window)
        content = dict(key=k, value=v) if stored is None else dict(key=stored)
        content |= {} if choice is None else dict(index=choice.index_key[..., None, :])
        if expanded is None:
            expanded = functools.partial(values_within, width=v.shape[-1])
        if self.cu_seqlens is not None:
            return self.packed_attend(q, k, v, cache, window, scale, content, expanded, choice)
        if cache:
            return self.attend_to_cache(q, content, cache, window, scale, expanded, choice)
        rows = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
        if self.segment_ids is None:
            begin, attend, seen = jnp.zeros_like(rows), attend_whole, intervals(jnp.zeros_like(rows), rows, window)
            new = content | dict(length=jnp.full(q.shape[0], q.shape[1], jnp.int32))
        else:
            begin, attend, new = self.segments.begin, attend_in_blocks, self.segments.cache(content)
            seen = intervals(begin, jnp.where(self.segments.is_token, rows, -1), window)
        attend_all = functools.partial(attend, q, k, v, seen, scale)
        if choice is None:
            return attend_all(), new
        return choice.attend(attend_all, q, k, v, content["index"], seen=seen, scale=scale, begin=begin), new

    def attend_to_cache(
        self, q, content: State, cache: State, window, scale, expanded: Callable, choice: Choice | None
    ) -> tuple[Array, State]:
        """Return what `attend` does, for rows [B, T] that are not packed and a cache that holds earlier tokens.

        content: the new rows of the cache by name. expanded: a function from "key" of a cache without "value" to (k, v). Raises
        ValueError for segment_ids, and if the cache is known to lack room.
        """
        if self.segment_ids is not None:
            raise ValueError("segment_ids and the cache of softmax attention exclude each other: pack with cu_seqlens")
        L, T = cache["key"].shape[1], q.shape[1]
        check_room(cache["length"], T, L)
        positions, length = self.positions(cache["length"])
        at = (jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], positions.shape), positions)
        cache = extended(cache, at, content, length)
        seen, (keys, values) = intervals(jnp.zeros_like(positions), positions, window), cached(cache, expanded)
        attend_all = functools.partial(attend_in_blocks, q, keys, values, seen, scale)
        if choice is None:
            return nan_unless(positions < L, attend_all()), cache
        begin = jnp.zeros((q.shape[0], L), jnp.int32)
        o = choice.attend(attend_all, q, keys, values, cache["index"], seen=seen, scale=scale, begin=begin)
        return nan_unless(positions < L, o), cache

    def packed_attend(
        self, q, k, v, cache: State, window, scale, content: State, expanded: Callable, choice: Choice | None
    ) -> tuple[Array, State]:
        """Return what `attend` does, for rows packed by cu_seqlens. content and expanded are as in `attend_to_cache`; cache: {}
        for none."""
        shape = q.shape
        q, k, v = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
        own, rows = self.sequence_of, jnp.arange(q.shape[1])
        is_token = rows < self.cuts[-1]
        if not cache:
            seen = intervals(self.cuts[own], jnp.where(is_token, rows, -1), window)
            seen = Intervals(seen.first[None], seen.last[None])
            attend_all = functools.partial(attend_in_blocks, q, k, v, seen, scale)
            if choice is None:
                o = attend_all()
            else:
                index = content["index"].reshape(1, -1, *content["index"].shape[-2:])
                o = choice.attend(attend_all, q, k, v, index, seen=seen, scale=scale, begin=self.cuts[own][None])
            return o.reshape(*shape[:-1], o.shape[-1]), self.packed_cache(content)
        N, L = cache["key"].shape[:2]
        check_room(cache["length"], jnp.diff(self.cuts), L)
        positions, length = self.positions(cache["length"])
        positions = jnp.where(is_token, positions.reshape(-1), L)  # out of bounds: dropped
        flat = {name: x.reshape(-1, *x.shape[-2:]) for name, x in content.items()}
        cache = extended(cache, (own, positions), flat, length)
        seen = intervals(own * L, jnp.where(positions < L, own * L + positions, -1), window)
        seen = Intervals(seen.first[None], seen.last[None])
        k, v = cached(cache, expanded)
        keys, values = (x.reshape(1, N * L, *x.shape[2:]) for x in (k, v))
        attend_all = functools.partial(attend_by_sequence, q, keys, values, seen, scale, self.cuts)
        if choice is None:
            o = attend_all()
        else:
            at = jnp.where(positions < L, positions, -1)
            packed: dict[str, Any] = dict(positions=at, own=own, scale=scale, cuts=self.cuts)
            o = choice.attend_to_caches(attend_all, q, k, v, cache["index"], **packed)
        return nan_unless(((positions < L) | ~is_token)[None], o).reshape(*shape[:-1], o.shape[-1]), cache

    def packed_cache(self, content: State) -> State:
        """Return a new cache: the packed rows of `content` by sequence, [N, L, H, D], and "length" [N]. Rows behind a
        sequence's end are 0.

        content: the rows by name, [T, H, D] with any leading axes of length 1. L is the length of the longest sequence, or T if
        the lengths are traced.
        """
        lengths, T = jnp.diff(self.cuts), self.shape[-1]
        known = known_values(lengths)
        L = T if known is None else int(known.max(initial=0))
        at = jnp.arange(L)[None]
        rows, is_own = jnp.clip(self.cuts[:-1, None] + at, 0, max(T - 1, 0)), at < lengths[:, None]

        def of_sequences(x):
            x = x.reshape(T, *x.shape[-2:])
            found = x[rows] if T else jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
            return jnp.where(is_own[..., None, None], found, 0)

        return {name: of_sequences(x) for name, x in content.items()} | dict(length=lengths)

    # ---- which sequence ----------------------------------------------------------------------------------------------

    @property
    def cuts(self) -> Int[Array, "N+1"]:
        """Return cu_seqlens of packed rows. Raises AssertionError if the rows are not packed by cu_seqlens."""
        assert self.cu_seqlens is not None
        return self.cu_seqlens

    @property
    def sequence_of(self) -> Int[Array, "T"]:
        """Return the number of the sequence of every packed row. Padding rows behind the last sequence have its number."""
        found = jnp.searchsorted(self.cuts, jnp.arange(self.shape[-1]), side="right") - 1
        return jnp.clip(found, 0, self.num_sequences - 1)

    @functools.cached_property
    def segments(self) -> "Segments":
        """Return the `Segments` of rows with segment_ids, computed once. Raises AssertionError for rows without segment_ids."""
        assert self.segment_ids is not None  # rows without ids have no segments
        return Segments.of(self.segment_ids, self.pad_id)

    def settle(self):
        """Compute and cache the property `segments`, which all layers read, if there are segment_ids.

        A property that is first computed inside a scan or `jax.checkpoint` could not be read by other layers.
        """
        if self.segment_ids is not None:
            _ = self.segments


@dataclasses.dataclass(frozen=True)
class Segments:
    """Hold the segments of the rows [B, T] of a batch by token, and where each batch row ends.

    is_token: whether the token is not padding. begin: the position at which the token's segment begins. is_first: whether the
    token is in the first segment of its batch row that has tokens; that segment continues the state. last: [B], the position of
    the last token that is not padding.
    """

    is_token: Bool[Array, "B T"]
    begin: Int[Array, "B T"]
    is_first: Bool[Array, "B T"]
    last: Int[Array, "B"]

    @classmethod
    def of(cls, ids: Int[Array, "B T"], pad_id: int | None) -> "Segments":
        """Return the segments of these ids. pad_id: the id of padding; None if no id is padding. A batch row that is only
        padding has `last` = T - 1."""
        T = ids.shape[1]
        rows, is_token = jnp.arange(T), differs_from_padding(ids, pad_id)
        is_token = jnp.ones(ids.shape, bool) if is_token is None else is_token
        starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], 1)
        if T == 0:
            return cls(is_token, jnp.zeros(ids.shape, jnp.int32), is_token, jnp.full(ids.shape[0], -1))
        begin = jax.lax.cummax(jnp.where(starts, rows[None], 0), axis=1)
        is_first = begin == jnp.where(is_token.any(1), is_token.argmax(1), T)[:, None]
        last = T - 1 - is_token[:, ::-1].argmax(1)
        return cls(is_token, begin, is_first, last)

    def cache(self, content: State) -> State:
        """Return a cache of the last segment of each batch row that is not padding: its rows of `content` from row 0 on, zeros
        behind them, and its length as "length" [B].

        content: the rows [B, T, H, D] of all segments, by name.
        """
        B, T = self.begin.shape
        if T == 0:
            return {**content, "length": jnp.zeros(B, jnp.int32)}
        first = jnp.take_along_axis(self.begin, self.last[:, None], 1)
        length = jnp.where(self.is_token.any(1), self.last - first[:, 0] + 1, 0).astype(jnp.int32)
        rows, is_own = jnp.clip(first + jnp.arange(T)[None], 0, T - 1), jnp.arange(T)[None] < length[:, None]

        def of_last(x):
            return jnp.where(is_own[..., None, None], jnp.take_along_axis(x, rows[..., None, None], 1), 0)

        return {name: of_last(x) for name, x in content.items()} | dict(length=length)


@dataclasses.dataclass(frozen=True)
class Step:
    """Read one token of each of B sequences; *rows is [B].

    slots: with slots [B], states are pools, and the state of sequence b is row slots[b] of each pool; -1 for no sequence. If
    None, row b of each state belongs to sequence b.
    """

    slots: Int[Array, "B"] | None = None

    def with_zeros_in_padding(self, x: Float[Array, "B width"]) -> Float[Array, "B width"]:
        return x

    def recurrent(
        self, recurrence: Callable, q, k, v, state: Entry, step: Callable = recurrent_step, **options
    ) -> tuple[Array, Any]:
        options = {name: x for name, x in options.items() if x is not None}
        return step(q, k, v, state=state, slots=self.slots, **options)

    def selective_scan(self, x, dt, A, B, C, D, state: Array) -> tuple[Array, Array]:
        return selective_scan_step(x, dt, A, B, C, state, D, slots=self.slots)

    def accumulated(self, then: Callable, maps: tuple[Array, ...]) -> tuple[Array, ...]:
        return maps

    def window(self, x: Array, size: int, state: Array) -> tuple[list[Array], Array]:
        rows = jnp.concatenate([self.read(state).astype(x.dtype), x[:, None]], 1)
        return [rows[:, i] for i in range(size)], self.write(state, rows[:, 1:])

    def positions(self, state: Array) -> tuple[Int[Array, "B"], Array]:
        positions = self.read(state)
        return positions, self.write(state, positions + 1)

    def first_rows(self) -> Bool[Array, "1"]:
        return jnp.ones(1, bool)

    def last_positions(self, positions: Int[Array, "B"]) -> Int[Array, "B"]:
        return positions

    @property
    def mean_length(self) -> int:
        return 1

    def attend(
        self, q, k, v, cache: State, window: int | None, scale: float | None, stored=None, expanded=None, choice=None
    ) -> tuple[Array, State]:
        L = cache["key"].shape[1]
        check_choice(choice, window)
        positions, length = self.positions(cache["length"])
        check_room(positions, 1, L)  # an unused slot reads a length of 0
        rows = jnp.arange(len(q)) if self.slots is None else self.unused_to_end(self.slots, cache["key"])
        at = (rows, positions)
        content = dict(key=k, value=v) | ({} if choice is None else dict(index=choice.index_key[..., None, :]))
        cache = extended(cache, at, content, length)
        seen = intervals(jnp.zeros_like(positions)[:, None], positions[:, None], window)
        slots = None if self.slots is None else rows
        q = q[:, None]
        width = v.shape[-1]
        more: dict[str, Any] = dict(width=width, slots=slots)
        attend_all = functools.partial(attend_step, q, cache["key"], cache.get("value"), seen, scale, **more)
        o = (
            attend_all()
            if choice is None
            else choice.step(attend_all, q, cache, slots=rows, positions=positions, scale=scale, width=width)
        )
        return nan_unless(positions < L, o[:, 0]), cache

    def read(self, state: Array) -> Array:
        """Return the rows of a state that belong to the B sequences, zeros for a sequence without a slot."""
        return state if self.slots is None else take(state, self.unused_to_end(self.slots, state))

    def write(self, state: Array, rows: Array) -> Array:
        """Return the state or pool with `rows` as the rows of the B sequences, in the state's dtype."""
        if self.slots is None:
            return rows.astype(state.dtype)
        return put(state, self.unused_to_end(self.slots, state), rows)

    @staticmethod
    def unused_to_end(slots, pool: Array) -> Int[Array, "B"]:
        """Return the slots as int32, where the pool's number of rows stands for each slot outside of the pool, such as -1.
        Reads at that index give zeros, and writes are dropped."""
        slots = to_int32(slots)
        return jnp.where((slots >= 0) & (slots < pool.shape[0]), slots, pool.shape[0])


def intervals(first: Int[Array, "*rows"], last: Int[Array, "*rows"], window: int | None) -> Intervals:
    """Return the intervals of keys from `first` to `last`, cut to their last `window` keys unless window is None."""
    return Intervals(first if window is None else jnp.maximum(first, last - window + 1), last)


def check_choice(choice: Choice | None, window: int | None):
    """Raise ValueError if there are both a choice of keys and a window. A choice counts blocks from the beginning of a
    sequence, and a window begins elsewhere."""
    if choice is not None and window is not None:
        raise ValueError(f"window must be None where rows choose the keys that they read, got {window}")


def check_room(length: Int[Array, "N"], more: Int[Array, "N"] | int, rows: int):
    """Raise ValueError if a cache is known to lack rows for the new tokens.

    length: the tokens in the cache. more: the number of new tokens, for each sequence or one for all. rows: the rows of the
    cache for each sequence. Traced numbers count as 0 tokens in the cache, or as no new tokens.
    """
    before, after = known_values(length), more if isinstance(more, int) else known_values(more)
    if before is not None and after is not None:
        needed = int((before.astype(np.int64) + after).max(initial=0))
    else:
        needed = after if isinstance(after, int) else 0
    if isinstance(rows, int) and needed > rows:
        raise ValueError(
            f"max_length must be at least {needed}, the tokens of the longest sequence, got a cache of {rows}: make it by "
            "initial_state(batch, max_length) before the first tokens are read"
        )


def nan_unless(fits: Bool[Array, "*rows"], o: Float[Array, "*rows H V"]) -> Float[Array, "*rows H V"]:
    """Return o with NaN in each row where `fits` is False: its token does not fit into the cache, and no error can be raised
    because the number of tokens is traced."""
    return jnp.where(fits[..., None, None], o, jnp.nan)


def with_rows(cache: Array, at: tuple[Array, Array], rows: Array) -> Array:
    """Return the cache with `rows` set at the indices `at`, in the cache's dtype. Rows with an index out of bounds are
    dropped."""
    return cache.at[at].set(rows.astype(cache.dtype), mode="drop")


def extended(cache: State, at: tuple[Array, Array], content: State, length: Array) -> State:
    """Return the cache with the rows of `content` written at the indices `at`, and with `length` as its new "length".

    at: (the sequence or slot, the position) of each new row. content: new rows by name; rows of an array that the cache lacks,
    such as "value" in a cache with keys alone, are left out.
    """
    return {name: with_rows(cache[name], at, x) for name, x in content.items() if name in cache} | dict(length=length)


def cached(cache: State, expanded: Callable[[Array], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return (the keys, the values) of a cache: its "key" and "value", or expanded(its "key") if it has no "value"."""
    return (cache["key"], cache["value"]) if "value" in cache else expanded(cache["key"])


def values_within(keys: Array, width: int) -> tuple[Array, Array]:
    """Return the keys, and as values their first `width` channels."""
    return keys, keys[..., :width]
