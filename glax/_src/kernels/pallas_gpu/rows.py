"""Choose how sequences are read as rows of tokens, and compute where each chunk of these rows lies.

A tile of shared memory has 8 rows, so the copy engine reads an array from every eighth row. `Reading` names the form in which
sequences that begin or end at other rows are read. A boundary inside a row is a gate of -inf with per-head gates, and a marked
token with per-key gates (`newest_resets`).
"""

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.backend import sequences_apart
from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence, Residuals
from glax._src.core.segments import Segments
from glax._src.kernels.pallas_gpu.plan import ROWS, C

# Whether sequences whose length 8 does not divide are joined to rows that the kernels read in place, and the last chunk of one
# row is copied alone.
JOINS = True


class Form(enum.StrEnum):
    """Name the forms in which kernels read the sequences of a call as rows of tokens. Each value says its form in words."""

    GIVEN = "rows as they are given"
    FILLED = f"rows filled up to a multiple of {ROWS} by a copy"
    ONE_ROW = "one row of packed sequences"
    APART = "packed sequences, each from a chunk's start on"
    JOINED = "sequences joined to rows"
    EQUAL = "a batch as packed sequences"


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold how the kernels read the sequences of a call.

    form: the form of the rows. joined: the number of sequences in a row; 1 unless sequences are joined. copies_last: whether
    the last chunk of the only row is read from a copy, and the others in place, because 8 does not divide the row's length.
    """

    form: Form
    joined: int = 1
    copies_last: bool = False

    @classmethod
    def of(
        cls, r: Recurrence, parts: int = 1, d_final=None, residuals: Residuals | None = None, in_phases: bool = False
    ) -> "Reading":
        """Return how kernels read the rows of r, or for its gradient the rows of these operands too.

        parts: the segments of a sequence. d_final: the gradient of the final states, or None for zeros or the forward.
        residuals: what the forward saved, or None. in_phases: whether the kernel runs in two phases, which join and pack
        nothing.
        """
        B, T = r.q.shape[:2]
        if r.boundaries is not None:
            return cls(Form.ONE_ROW if d_final is None and fits_one_row(r) else Form.APART)
        # sequences a row: in the residuals if there are any, else in the rows that would be read
        joined = joined_number(r) if residuals is None else B // residuals.states.shape[0]
        if not in_phases and (joined > 1 or T % ROWS):
            if packs_if_not_joined(r) and (joined > 1 or (residuals is None and packs(r, parts))):
                return cls(Form.EQUAL)
            if joined > 1 and d_final is None:
                return cls(Form.JOINED, joined, joined == B and copies_last_chunk(r, B * T))
        copies_last = B == 1 and copies_last_chunk(r, T)
        return cls(Form.FILLED if T % ROWS and not copies_last else Form.GIVEN, copies_last=copies_last)

    def takes(self, r: Recurrence, residuals: Residuals) -> bool:
        """Return whether the residuals were saved for rows in this form. Otherwise the gradient computes them again. r: the
        caller's recurrence."""
        count = residuals.states.shape[0]
        if self.form is Form.APART:
            return not fits_one_row(r)  # the forward has no d_final, and reads one row
        return self.form in (Form.ONE_ROW, Form.JOINED) or count == (1 if self.form is Form.EQUAL else r.q.shape[0])

    @property
    def shares_rows(self) -> bool:
        """Return whether several sequences share a row, and so may share a chunk."""
        return self.form is Form.ONE_ROW or self.joined > 1

    def __str__(self) -> str:
        joined = f", {self.joined} to a row" if self.joined > 1 else ""
        return self.form + joined + ", the last chunk from a copy" * self.copies_last


def takes_segments(r: Recurrence) -> bool:
    """Return whether the kernels take boundaries inside a row as marked tokens that reset the state. Other kernels take
    boundaries as gates of -inf.

    Per-head gates of -inf are exact inside a chunk, so only per-key gates need marks. With keys of one block of 64 channels the
    gradient's kernel has no registers for the masks.
    """
    return r.decay.key is not None and r.erasure is None and r.q.shape[3] > 64


def fits_one_row(r: Recurrence) -> bool:
    """Return whether packed sequences can be one row of tokens, with a reset at every boundary.

    States that enter or leave at a boundary have no place in such a row.
    """
    if r.boundaries is None or r.initial_state is not None:
        return False
    return r.decay.key is None or takes_segments(r)


def joined_number(r: Recurrence) -> int:
    """Return the number of sequences that are joined to a row, if 8 does not divide their length; 1 if none are joined.

    The number is the least whose row has a length that 8 divides; or the number of all sequences if that does not divide the
    batch, and the last chunk of their row can be copied.
    """
    B, T = r.q.shape[:2]
    if not JOINS or T % ROWS == 0 or why_not_joined(r) is not None:
        return 1
    return least_number(T) if B % least_number(T) == 0 else B


def least_number(T: int) -> int:
    """Return the least n for which 8 divides n T."""
    return ROWS // math.gcd(T, ROWS)


def packs(r: Recurrence, parts: int) -> bool:
    """Return whether an unpacked batch is read in place as packed sequences, each from a chunk's start on.
    `packs_if_not_joined` must hold, too.

    The results lie in chunks, and are gathered. Only kernels with per-key gates read packed sequences in place, in one segment
    each. parts: the segments of a sequence in the config.
    """
    (B, T), is_plain = r.q.shape[:2], r.segments is None and r.states_every is None
    whole = parts == 1 and T % ROWS > 0 and B * T % ROWS == 0 and T >= C
    return JOINS and B > 1 and is_plain and whole and not sequences_apart.value


def packs_if_not_joined(r: Recurrence) -> bool:
    """Return whether r may be packed and cannot be joined: it has per-key gates and no erasure, and has initial states, or keys
    too narrow for marks (`takes_segments`)."""
    return r.decay.key is not None and r.erasure is None and (r.initial_state is not None or not takes_segments(r))


def copies_last_chunk(r: Recurrence, T: int) -> bool:
    """Return whether the last chunk of one row of T tokens is read from a copy, because 8 does not divide T.

    With per-key gates, or with beta, no kernel can do so.
    """
    return JOINS and T > C and T % ROWS > 0 and r.erasure is None and r.decay.key is None


def why_not_joined(r: Recurrence) -> str | None:
    """Return why sequences whose length 8 does not divide cannot be joined, or None if they can be.

    In a joined row a sequence begins from zeros, at a reset inside a chunk.
    """
    B, T = r.q.shape[:2]
    number = least_number(T)
    if r.boundaries is not None:
        return "packed sequences are one row already"
    if r.erasure is not None:
        return "beta is given"
    if r.initial_state is not None:
        return "initial states enter"
    if r.states_every is not None:
        return "states behind every n tokens are stored"
    if r.decay.key is not None and not takes_segments(r):
        return "with per-key gates, keys of at most 64 channels have no marks for resets"
    if T < C:
        return f"sequences are shorter than {C} tokens"
    if B == 1:
        return "B=1"
    if B % number and r.decay.key is not None:
        return f"{number} sequences, which {ROWS} divides together, do not divide B={B}"
    if sequences_apart.value:
        return (
            "several devices may share the batch, or examples have scales of their own: call inside shard_map over all axes "
            "to join the sequences of a device"
        )
    return None


# ---- where chunks lie ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Apart:
    """Hold where the chunks of packed sequences lie, each of which begins a chunk, and which rows of the chunks are tokens.

    r: the packed recurrence. begins: [N + 1] in int32, the first chunk of every sequence, and the number of chunks of all.
    source: [chunks C] in int32, the token that each row of the chunks holds, or -1; None where the kernels read packed rows in
    place, and write rows of chunks. row: [T] in int32, the row of the chunks that holds each token. begins and row are NumPy
    arrays where the boundaries are known while tracing.
    """

    r: Recurrence
    begins: Array | np.ndarray
    source: Array | None
    row: Array | np.ndarray

    @classmethod
    def of(cls, r: Recurrence, cuts: np.ndarray | None = None) -> "Apart":
        """Return the chunks of the packed sequences r. With per-key gates rows are read in place; with other gates, and under
        the delta rule, they are copied into chunks.

        cuts: the boundaries of r, if they are known while tracing; then all rows are tokens.
        """
        if cuts is not None:
            lead = cuts[:-1] % ROWS
            begins = np.append(np.zeros(1, np.int32), np.cumsum(-(-(np.diff(cuts) + lead) // C))).astype(np.int32)
            own = np.repeat(np.arange(len(lead)), np.diff(cuts))
            row = begins[own] * C + lead[own] + np.arange(cuts[-1]) - cuts[own]
            return cls(r, begins, None, row.astype(np.int32))
        T, N = r.q.shape[1], r.num_sequences
        bounds = boundaries_within(r)
        in_place = r.decay.key is not None and r.erasure is None
        # rows of other sequences in the first chunk of each
        lead = jnp.where(jnp.diff(bounds) > 0, bounds[:-1] % ROWS, 0) if in_place else jnp.zeros_like(bounds[:-1])
        begins = jnp.concatenate([jnp.zeros_like(bounds[:1]), jnp.cumsum(-(-(jnp.diff(bounds) + lead) // C))])
        own = r.sequence_of
        row = begins[own] * C + lead[own] + jnp.arange(T) - bounds[own]
        if in_place:
            return cls(r, begins, None, row)
        rows = jnp.arange((T // C + N) * C)
        own = jnp.clip(jnp.searchsorted(begins * C, rows, side="right") - 1, 0, N - 1)
        source = bounds[own] + rows - begins[own] * C
        source = jnp.where((rows < begins[-1] * C) & (source < bounds[own + 1]), source, -1)
        return cls(r, begins, source, row)

    @property
    def count(self) -> int:
        """Return the largest number of chunks that sequences of any lengths can have, for the T tokens and N sequences of r."""
        T, N = self.r.q.shape[1], self.r.num_sequences
        return (T + (ROWS - 1) * N * (self.source is None)) // C + N

    @property
    def sequence(self):
        """Return the index of each chunk's sequence, [chunks] in int32. Chunks behind the last sequence count to it."""
        numpy: Any = np if isinstance(self.begins, np.ndarray) else jnp
        own = numpy.searchsorted(self.begins, numpy.arange(self.count), side="right") - 1
        return numpy.clip(own, 0, self.r.num_sequences - 1)

    @property
    def segments(self):
        """Return the table of sequences, [N, 7] in int32. The columns are batch row, first chunk, number of chunks and
        sequence; the row of r's arrays at which the first chunk begins, divided by 8; the sequence's first row in these arrays;
        and the row behind its last."""
        n, cuts = jnp.arange(self.r.num_sequences), boundaries_within(self.r)
        columns = jnp.zeros_like(n), self.begins[:-1], jnp.diff(self.begins), n, cuts[:-1] // ROWS, cuts[:-1], cuts[1:]
        return jnp.stack(columns, 1).astype(jnp.int32)

    def rows_of_chunks(self, segments):
        """Return three numbers for each chunk, [chunks, 3] in int32: the row of r's arrays at which the chunk begins, divided
        by 8; and the first row of its sequence, and the row behind the last, both counted from the chunk's first row.

        The last two may lie outside of 0 ... C. segments: the table `segments`.
        """
        chunk, own = jnp.arange(self.count), segments[self.sequence]
        row = own[:, 4] + (chunk - own[:, 1]) * (C // ROWS)
        first, end = (own[:, i] - row * ROWS for i in (5, 6))
        return jnp.stack([jnp.where(end > 0, row, 0), first, end], 1).astype(jnp.int32)

    def by_sequence(self, x):
        """Return the sums of x over the chunks of every sequence, [N, H]. x: [chunks, H], the chunks of all sequences in
        order."""
        x, used = x.reshape(self.count, -1), jnp.arange(self.count) < self.begins[-1]
        own = (self.sequence == jnp.arange(self.r.num_sequences)[:, None]) & used
        return jnp.where(own[..., None], x, 0).sum(1)  # a sum in a fixed order, and no product: 0 times NaN is NaN

    def take(self, x):
        """Return x [1, T, ...] in rows of chunks, with 0 in rows without a token. Raises AssertionError where rows are read in
        place."""
        assert self.source is not None, "these rows are read in place"
        taken = jnp.take(x, jnp.maximum(self.source, 0), axis=1)
        return jnp.where((self.source >= 0).reshape(1, -1, *(1,) * (x.ndim - 2)), taken, 0)

    def put(self, x):
        """Return x [1, rows of chunks, ...] in the rows of r; 0 in padding."""
        taken = jnp.take(x, self.row, axis=1)
        if isinstance(self.row, np.ndarray):
            return taken
        return jnp.where(self.r.is_token.reshape(1, -1, *(1,) * (x.ndim - 2)), taken, 0)


def newest_resets(resets: Bool[Array, "B T"], reverse: bool) -> Int[Array, "B chunks _"]:
    """Return the newest reset r_i of every token i within its chunk, [B, chunks, C] in int32, in the order of rows in memory.

    r_i is the position in scan order of token i's newest reset, or -1 without a reset in the chunk at or before i:

        token i draws on token j of its chunk      if r_i <= j <= i
        token i draws on the state S that enters   if r_i = -1
        token j reaches the state that leaves      if r_last <= j, and S reaches it if r_last = -1

    Gates stay as they are: their sums within a chunk cross a reset only between tokens of which neither draws on the other. So
    a reset needs no gate of -inf, which would put its chunk out of range. The result is a maximum over pairs: a cumulative
    maximum takes XLA several kernels. resets: whether each token resets the state. reverse: whether the scan goes from the last
    token to the first.
    """
    order = np.arange(C, dtype=np.int32)
    order = order[::-1] if reverse else order
    # [B, chunks, C]
    marks = jnp.pad(resets, ((0, 0), (0, -resets.shape[1] % C))).reshape(resets.shape[0], -1, C)
    # [B, chunks, C, C]: token i, reset j
    counts = marks[:, :, None, :] & (order[None, :] <= order[:, None])
    return jnp.max(jnp.where(counts, order, np.int32(-1)), axis=3)


class Edges(NamedTuple):
    """Find the chunks of a row that contain rows without a token, before its first sequence or behind its last. Such rows may
    hold NaN.

    The kernels read these chunks from copies of 3 C rows: the chunk of the first token, the chunk of the last token, and zeros.
    Outputs and gradients are then 0 in rows without a token.

    block: 0, 1 or 2, the block of C rows of a copy from which each chunk is read; -1 for a chunk of tokens alone, which is read
    in place. source: [3 C], the row of the array that each row of a copy holds; -1 for zeros.
    """

    block: Int[Array, "chunks"]
    source: Int[Array, "rows"]

    @classmethod
    def of(cls, r: Recurrence) -> "Edges":
        """Return the edges of the row that holds the packed sequences of r, for any values of r.boundaries."""
        T, cuts = r.q.shape[1], boundaries_within(r)
        low, high = cuts[0], cuts[-1]
        first, last = low // C, jnp.maximum(high - 1, low) // C
        begin = jnp.arange(-(-T // C), dtype=jnp.int32) * C
        is_full = (begin >= low) & (begin + C <= high)
        chunk = begin // C
        block = jnp.where(chunk == first, 0, jnp.where(chunk == last, 1, 2))
        rows = jnp.stack([first, last])[:, None] * C + jnp.arange(C, dtype=jnp.int32)
        source = jnp.where((rows >= low) & (rows < high), rows, -1).reshape(-1)
        source = jnp.concatenate([source, jnp.full(C, -1, source.dtype)])
        return cls(jnp.where(is_full, -1, block).astype(jnp.int32), source)

    def copy(self, x: Float[Array, "1 T heads width"]) -> Float[Array, "1 rows heads width"]:
        """Return the copy of x, the 3 C rows that `source` names, with zeros where it names none."""
        taken = jnp.take(x, jnp.maximum(self.source, 0), axis=1)
        return jnp.where((self.source >= 0)[:, None, None], taken, 0)


@dataclasses.dataclass(frozen=True)
class LastChunk:
    """Read the last chunk of a row of T tokens from a copy, where 8 does not divide T.

    The kernels read the chunks before it in place, from the rows up to the last multiple of 8. XLA passes these rows on without
    a copy, because they begin the array.
    """

    T: int

    @property
    def rows(self) -> int:
        """Return the number of rows that kernels read in place: the largest multiple of 8 up to T."""
        return self.T - self.T % ROWS

    @property
    def block(self) -> Int[Array, "chunks"]:
        """Return the block of C rows of a copy from which each chunk is read: 0 for the last chunk, and -1 for the others,
        which are read in place."""
        return jnp.where(jnp.arange(-(-self.T // C), dtype=jnp.int32) == self.T // C, 0, -1)

    def copy(self, x: Float[Array, "1 T heads width"]) -> Float[Array, "1 C heads width"]:
        """Return the rows of x in the last chunk, filled up with zeros to C rows."""
        return jnp.pad(x[:, self.T - self.T % C :], ((0, 0), (0, -self.T % C), (0, 0), (0, 0)))


# ---- sequences as rows -----------------------------------------------------------------------------------------------


def boundaries_within(r: Recurrence) -> Int[Array, "N+1"]:
    """Return the boundaries of packed sequences, [N + 1], each clipped to 0 ... T. Tokens lie between the first and the
    last."""
    assert r.boundaries is not None
    return jnp.clip(r.boundaries, 0, r.q.shape[1])


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Represent packed sequences r without initial states by one row of tokens, in which boundaries are resets."""

    r: Recurrence

    @property
    def cuts(self) -> Int[Array, "N+1"]:
        """Return the first row of every sequence and the row behind the last sequence, [N + 1]."""
        return boundaries_within(self.r)

    @property
    def is_token(self) -> Bool[Array, "T"]:
        """Return whether each row belongs to a sequence, [T]."""
        cuts, rows = self.cuts, jnp.arange(self.r.q.shape[1], dtype=jnp.int32)
        return (rows >= cuts[0]) & (rows < cuts[-1])

    @property
    def begins(self) -> Bool[Array, "T"]:
        """Return whether the scan of a sequence begins at each row, [T]. A row without a token may be marked too, which has no
        effect."""
        T, cuts = self.r.q.shape[1], self.cuts
        first = cuts[1:] - 1 if self.r.reverse else cuts[:-1]
        return jnp.zeros(T, bool).at[jnp.where(first < 0, T, first)].set(True, mode="drop")

    @property
    def sequence_of(self) -> Int[Array, "T"]:
        """Return the index of the sequence of every row, [T], by comparison with all boundaries. This is one kernel, while a
        binary search is a loop of many."""
        rows = jnp.arange(self.r.q.shape[1], dtype=jnp.int32)
        own = jnp.searchsorted(self.cuts, rows, side="right", method="compare_all") - 1
        return jnp.clip(own, 0, self.r.num_sequences - 1)

    @property
    def row(self) -> Recurrence:
        """Return the recurrence of the row without boundaries. Where a sequence begins, per-head gates are -inf. Per-key gates
        stay as they are, and `segments` marks the tokens at which sequences begin.

        Per-head gates are in float32 or their own dtype. All sequences have one scale, as `bind` sets it.
        """
        r, d = self.r, self.r.decay
        if d.key is not None:
            segments = Segments((self.begins & self.is_token)[None], None)
            return r.replace(boundaries=None, segments=segments, scale=r.scale[:1])
        if d.head is not None:
            gates = d.head
        elif d.constant is not None:
            gates = d.constant.astype(jnp.float32)[self.sequence_of][None]
        else:
            gates = jnp.zeros((*r.q.shape[:2], r.num_heads), jnp.float32)
        gates = jnp.where(self.is_token[:, None], gates, 0)
        gates = jnp.where(self.begins[:, None], -jnp.inf, gates)
        erasure = r.erasure
        if erasure is not None and erasure.before_decay and erasure.erase is not None:
            # Before its gate of -inf, a token that begins a sequence would read the state of another.
            erasure = erasure.replace(erase=jnp.where(self.begins[:, None, None], 0, erasure.erase))
        return r.replace(boundaries=None, decay=Decay(head=gates), scale=r.scale[:1], erasure=erasure)

    def gate_gradient(self, d: Float[Array, "1 T H"]) -> Float[Array, "1 T H"]:
        """Return the gradient of the packed gates from d, the gradient of the row's gates. The result is 0 where a sequence
        begins from zeros, and in rows without a token."""
        return jnp.where((self.is_token & ~self.begins)[:, None], d, 0)

    def per_sequence(self, x: Float[Array, "T H"]) -> Float[Array, "N H"]:
        """Return the sums of x over the tokens of each sequence, [N, H], in a fixed order: whole chunks first, then the parts
        of the first and last chunk."""
        T, cuts = self.r.q.shape[1], self.cuts
        begin, end = cuts[:-1, None], cuts[1:, None]
        x = jnp.pad(x, ((0, -T % C), (0, 0))).reshape(-1, C, x.shape[1])
        low = jnp.arange(len(x), dtype=jnp.int32) * C
        whole = (begin <= low) & (low + C <= end)
        total = jnp.einsum("nc,ch->nh", whole.astype(x.dtype), x.sum(1), precision="highest")
        first, last = begin[:, 0] // C, (end[:, 0] - 1) // C
        for chunk, counts in ((first, begin < end), (last, (begin < end) & (last != first)[:, None])):
            chunk = jnp.clip(chunk, 0, len(x) - 1)
            rows = chunk[:, None] * C + jnp.arange(C, dtype=jnp.int32)
            is_part = counts & (rows >= begin) & (rows < end) & ~jnp.take_along_axis(whole, chunk[:, None], axis=1)
            total += jnp.where(is_part[..., None], x[chunk], 0).sum(1)
        return total


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """Represent a batch r without initial states as rows of `number` sequences each. A sequence begins at a reset inside a
    row."""

    r: Recurrence
    number: int

    @property
    def T(self) -> int:
        """Return the number of tokens of a row."""
        return self.number * self.r.q.shape[1]

    @property
    def resets(self) -> np.ndarray:
        """Return, for every sequence of a row, the row index of the token at which its scan begins, [number]."""
        T = self.r.q.shape[1]
        return np.arange(self.number) * T + (T - 1 if self.r.reverse else 0)

    @property
    def bounds(self) -> np.ndarray:
        """Return, for every two neighbouring sequences, the chunk that contains the reset of the one scanned later, [number -
        1] in ascending order."""
        return (self.resets[:-1] if self.r.reverse else self.resets[1:]) // C

    @property
    def begins(self) -> np.ndarray:
        """Return a mask [T of r]: whether the scan of a sequence begins at this token of the sequence."""
        T = self.r.q.shape[1]
        return np.arange(T) == (T - 1 if self.r.reverse else 0)

    @property
    def newest(self) -> np.ndarray:
        """Return the function `newest_resets` for the resets of a row, [chunks, C] in int32. All rows have the same."""
        marks, order = np.tile(self.begins, self.number), np.arange(C, dtype=np.int32)
        marks = np.pad(marks, (0, -len(marks) % C)).reshape(-1, C)[:, :: -1 if self.r.reverse else 1]
        newest = np.maximum.accumulate(np.where(marks, order, np.int32(-1)), axis=1)
        return newest[:, :: -1 if self.r.reverse else 1]

    def join(self, x):
        """Return x [B, T, ...] as rows [B / number, number * T, ...]."""
        return x.reshape(-1, self.T, *x.shape[2:])

    def part(self, x):
        """Return x [B / number, rows, ...] as [B, T, ...], without rows behind the last sequence."""
        return x[:, : self.T].reshape(*self.r.q.shape[:2], *x.shape[2:])

    @property
    def row(self) -> Recurrence:
        """Return the recurrence of the rows, with a reset where each sequence begins: a gate of -inf, or with per-key gates a
        mark in `segments`. All sequences of a row have one scale, as `why_not_joined` makes sure."""
        r, d = self.r, self.r.decay
        q, k, v = (self.join(x) for x in (r.q, r.k, r.v))
        joined = dict(q=q, k=k, v=v, scale=r.scale[:: self.number])
        if d.key is not None:
            marks = jnp.broadcast_to(self.begins, r.q.shape[:2])
            is_token = None
            if r.segments is not None:
                marks, is_token = marks | r.segments.resets, r.segments.is_token
                is_token = None if is_token is None else self.join(is_token)
            segments = Segments(self.join(marks), is_token)
            return r.replace(**joined, decay=Decay(key=self.join(d.key)), segments=segments)
        if d.head is not None:
            gates = d.head
        elif d.constant is not None:
            gates = r.by_token(d.constant.astype(jnp.float32))
        else:
            gates = jnp.zeros((*r.q.shape[:2], r.num_heads), jnp.float32)
        gates = jnp.where(self.begins[:, None], -jnp.inf, gates)
        return r.replace(**joined, decay=Decay(head=self.join(gates)))

    def gate_gradient(self, d: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Return the gradient of per-head gates from d, the gradient of the joined rows' gates by sequence: 0 where a sequence
        begins from zeros."""
        return jnp.where(self.begins[:, None], 0, d)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays for the sequences of a row: which chunks are scanned from a sequence's reset until before the chunk
        in which the scan leaves the sequence, and which rows of that last chunk belong to the sequence.

        First array, [number, 2]: the first and the last of these chunks, by index in memory. Second array, [number, C]: the
        rows of the chunk in which the scan leaves; -1 for rows of other sequences.
        """
        T, n = self.r.q.shape[1], np.arange(self.number)
        begin, reset = n * T, self.resets // C
        leaves = begin // C if self.r.reverse else (begin + T) // C
        between = np.stack([leaves + 1, reset] if self.r.reverse else [reset, leaves - 1], 1)
        rows = leaves[:, None] * C + np.arange(C)
        own = (rows >= begin[:, None]) & (rows < begin[:, None] + T)
        return between, np.where(own, rows, -1)

    def last_rows(self, entering) -> Recurrence:
        """Return a recurrence [B, C] of the rows in which the scan leaves each sequence: those of the second result of `ends`.
        entering: the states that enter these rows, [B, H, K, V].

        Rows of other sequences are 0, and change no state.
        """
        r, (_, rows) = self.r, self.ends()
        is_own = rows >= 0

        def window(x):
            taken = jnp.take(self.join(x), np.maximum(rows, 0).reshape(-1), axis=1)
            taken = taken.reshape(-1, C, *x.shape[2:])
            mask = np.tile(is_own, (x.shape[0] // self.number, 1)).reshape(-1, C, *(1,) * (x.ndim - 2))
            return jnp.where(mask, taken, 0)

        tail, segments = r.without_padding, r.segments
        if r.decay.constant is not None:
            tail = tail.replace(decay=Decay(head=r.by_token(r.decay.constant.astype(jnp.float32))))
        tail = tail.replace(segments=None).map_tokens(window)
        if segments is not None:
            tail = tail.replace(segments=Segments(window(segments.resets), None))
        return tail.replace(initial_state=entering)


@dataclasses.dataclass(frozen=True)
class EqualSequences:
    """Represent a batch r [B, T, ...] by packed sequences [1, B T, ...] of equal length, the same numbers in memory."""

    r: Recurrence

    @property
    def cuts(self) -> np.ndarray:
        """Return the boundaries of the packed sequences, [B + 1] in int32."""
        B, T = self.r.q.shape[:2]
        return (np.arange(B + 1) * T).astype(np.int32)

    @property
    def packed(self) -> Recurrence:
        """Return the packed recurrence, with the initial states and the scales of r."""
        return self.r.map_tokens(self.pack).replace(boundaries=jnp.asarray(self.cuts))

    def pack(self, x: Float[Array, "B T *rest"]) -> Float[Array, "1 B*T *rest"]:
        """Return an array of r as the array of the packed sequences."""
        return x.reshape(1, -1, *x.shape[2:])

    def part(self, x: Float[Array, "1 B*T *rest"]) -> Float[Array, "B T *rest"]:
        """Return an array of the packed sequences as the array of r: the inverse of `pack`."""
        return x.reshape(*self.r.q.shape[:2], *x.shape[2:])
