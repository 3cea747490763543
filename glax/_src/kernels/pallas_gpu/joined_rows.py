"""Join sequences whose length 8 does not divide into rows of a length that it divides, which the kernels read in place.

The copy engine reads an array from every eighth row, so rows [B, T] of an odd T would be copied to longer ones. Eight of them
are one row [B / 8, 8 T] in memory. A boundary within it is a gate of -inf, or a marked token with per-key gates, as in
`packed_row`. The boundaries are known while tracing, so every sequence has segments of its own:

    resets n = 1 ... g - 1 at rows p_n         n T, or n T - 1 in reverse
    chunks of sequence n, scanned upwards      p_n / C + 1 ... p_{n+1} / C
    chunks of sequence n, scanned downwards    p_n / C ... p_{n+1} / C - 1

In scan order a sequence's last chunk contains the reset of the next. That chunk alone decides the state that enters the next
sequence's segment, so sequences are scanned in parallel.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.core.segments import Segments
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.plan import C


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """Represent unpacked sequences r without initial states by rows of `number` sequences each (`config.joined_number`)."""

    r: Recurrence
    number: int

    @property
    def T(self) -> int:
        """Return the number of tokens of a row."""
        return self.number * self.r.q.shape[1]

    @property
    def resets(self) -> np.ndarray:
        """Return the token at which the scan of every sequence of a row begins, [number], by its row in memory."""
        T = self.r.q.shape[1]
        return np.arange(self.number) * T + (T - 1 if self.r.reverse else 0)

    @property
    def bounds(self) -> np.ndarray:
        """Return the chunks that contain the reset of the second of every two neighbours in scan order, [number - 1], upwards."""
        return (self.resets[:-1] if self.r.reverse else self.resets[1:]) // C

    @property
    def begins(self) -> np.ndarray:
        """Return whether the scan of a sequence begins at each of its tokens, [T of r]."""
        T = self.r.q.shape[1]
        return np.arange(T) == (T - 1 if self.r.reverse else 0)

    @property
    def newest(self) -> np.ndarray:
        """Return `newest_resets` of a row without segments, [chunks, C]."""
        marks, order = np.tile(self.begins, self.number), np.arange(C, dtype=np.int32)
        marks = np.pad(marks, (0, -len(marks) % C)).reshape(-1, C)[:, :: -1 if self.r.reverse else 1]
        found = np.maximum.accumulate(np.where(marks, order, np.int32(-1)), axis=1)
        return found[:, :: -1 if self.r.reverse else 1]

    def join(self, x):
        """Return x [B, T, ...] as rows [B / number, number * T, ...]."""
        return x.reshape(-1, self.T, *x.shape[2:])

    def part(self, x):
        """Return x [B / number, rows, ...] as [B, T, ...], without rows behind the last sequence."""
        return x[:, : self.T].reshape(*self.r.q.shape[:2], *x.shape[2:])

    @property
    def row(self) -> Recurrence:
        """Return the recurrence of the rows. All sequences of a row have one scale, as `config.why_not_joined` makes sure."""
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
        """Return the gradient of per-head gates from the gradient of the rows' gates, 0 where a sequence begins from zeros."""
        return jnp.where(self.begins[:, None], 0, d)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the states of sequences come to their ends, for the sequences of a row.

        [number, 2]: the first and last chunk between the chunk of a sequence's reset and the chunk in which the scan leaves the
        sequence, with the former and without the latter. [number, C]: the rows of the latter chunk; -1 for rows of other
        sequences.
        """
        T, n = self.r.q.shape[1], np.arange(self.number)
        begin, reset = n * T, self.resets // C
        leaves = begin // C if self.r.reverse else (begin + T) // C
        between = np.stack([leaves + 1, reset] if self.r.reverse else [reset, leaves - 1], 1)
        rows = leaves[:, None] * C + np.arange(C)
        own = (rows >= begin[:, None]) & (rows < begin[:, None] + T)
        return between, np.where(own, rows, -1)

    def last_rows(self, entering) -> Recurrence:
        """Return the recurrence of the rows in which the scan leaves each sequence, [B, C], from the states that enter them. Rows
        of other sequences change no state."""
        r, (_, rows) = self.r, self.ends()
        is_own = rows >= 0

        def window(x):
            found = jnp.take(self.join(x), np.maximum(rows, 0).reshape(-1), axis=1)
            found = found.reshape(-1, C, *x.shape[2:])
            mask = np.tile(is_own, (x.shape[0] // self.number, 1)).reshape(-1, C, *(1,) * (x.ndim - 2))
            return jnp.where(mask, found, 0)

        tail, segments = r.without_padding, r.segments
        if r.decay.constant is not None:
            tail = tail.replace(decay=Decay(head=r.by_token(r.decay.constant.astype(jnp.float32))))
        tail = tail.replace(segments=None).map_tokens(window)
        if segments is not None:
            tail = tail.replace(segments=Segments(window(segments.resets), None))
        return tail.replace(initial_state=entering)


class JoinedLayout(KernelLayout):
    """Lay out joined rows. Every sequence has `pieces` segments, whose chunks depend on the direction of a scan."""

    def __init__(self, joined: JoinedRows, config: HopperConfig, square: bool):
        self.joined, self.pieces = joined, config.parts
        super().__init__(joined.row, config, square, parts=joined.number * self.pieces)
        if self.key and joined.r.segments is None:  # known while tracing: XLA would find them in every call
            self.newest = jnp.broadcast_to(joined.newest, (self.N, *joined.newest.shape))

    def segments(self) -> np.ndarray:
        return self.table_of(adjoint=False)

    def table_of(self, adjoint: bool) -> np.ndarray:
        """Return the table of segments of a scan, [E, 4]."""
        inner = self.joined.bounds + (0 if self.descending(adjoint) else 1)
        edges = np.concatenate([[0], inner, [self.chunks]])
        first, count = edges[:-1, None], np.diff(edges)[:, None]
        cuts = first + count * np.arange(self.pieces + 1) // self.pieces  # [number, pieces + 1]
        return self.in_every_row(cuts[:, :-1].reshape(-1), np.diff(cuts, axis=1).reshape(-1))

    def in_every_row(self, first, count) -> np.ndarray:
        """Return a table [N * len(first), 4] in which every row has segments of these chunks."""
        n = np.repeat(np.arange(self.N), len(first))
        return np.stack([n, np.tile(first, self.N), np.tile(count, self.N), n], 1).astype(np.int32)

    @property
    def lookback(self) -> int:
        return super().lookback if self.pieces > 1 else 0

    def reset_chunks(self, empty_first: bool):
        """Return the chunks with the resets of second neighbours, and their counts, 1 each; with a count of 0 before or behind
        them: [2, number]."""
        bounds = self.joined.bounds
        return np.pad([bounds, np.ones_like(bounds)], ((0, 0), (1, 0) if empty_first else (0, 1)))

    def whole_segments(self, adjoint: bool, last: bool) -> np.ndarray:
        """Return the table of a scan of `either` kind, [E, 5]. Of the last segment of each sequence it has the chunk with the
        next reset alone, which no state passes."""
        assert not last, "joined rows are not cut between devices"
        table = self.table_of(adjoint).reshape(self.N, self.joined.number, self.pieces, 4)
        descends = self.descending(adjoint)
        table[:, :, 0 if descends else -1, 1:3] = self.reset_chunks(empty_first=descends).T
        return np.insert(table.reshape(-1, 4), 4, adjoint, axis=1)

    def starts(self, start, a, b, adjoint: bool):
        """Return the state that enters every segment, [E, H, K, V]. With one segment for a sequence it comes from one chunk."""
        assert start is None, "joined rows begin from zeros"
        if self.pieces > 1:
            return super().starts(None, a, b, adjoint)
        table = self.in_every_row(*self.reset_chunks(empty_first=not self.descending(adjoint)))
        table = np.insert(table, 4, adjoint, axis=1)
        table = np.repeat(table[:, None], self.H, axis=1) if self.key else table
        S = self.scan(self.plan(outputs=False, either=True), a, b, None, table).last
        return S * jnp.repeat(self.scale, self.parts)[:, None, None, None] if adjoint else S

    def final_states(self, config: HopperConfig):
        """Return the final state of every sequence, [B, H, K, V], by scans without outputs. The rows in which the scan leaves a
        sequence are copied."""
        between = self.joined.ends()[0]
        table = self.in_every_row(between[:, 0], between[:, 1] - between[:, 0] + 1)
        plan = dataclasses.replace(self.plan(outputs=False), parts=1)
        entering = self.narrow(self.scan(plan, self.k, self.v, None, table).last)
        p = KernelLayout(self.joined.last_rows(entering), dataclasses.replace(config, parts=1))
        return p.narrow(p.scan(p.plan(outputs=False, start=True), p.k, p.v, p.start(entering)).last)
