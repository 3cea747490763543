"""Lay out a recurrence for the Hopper kernels: rows in chunks, sequences in segments, and widths padded."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from glax._src.core.recurrence import Recurrence, Residuals
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E
from glax._src.kernels.pallas_gpu.plan import ROWS, WHOLE, Blocks, C, Scan, ScanResults, plan_of
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.rows import (
    Apart,
    Edges,
    EqualSequences,
    Form,
    JoinedRows,
    LastChunk,
    PackedRow,
    newest_resets,
)
from glax._src.kernels.pallas_gpu.scan.head import head_scan, pair_scan
from glax._src.kernels.pallas_gpu.scan.key import key_scan
from glax._src.kernels.pallas_gpu.scan.segments import lookback_tables, segment_scan

RUN = 2  # chunks from one saved state to the next, for per-head gates: the gradient forms the states between
LOOKBACK = 4, 8  # least and most chunks at a segment's end that the lookback reads
FEW = 4  # segments whose states XLA passes on as fast as `segment_scan`, which takes longer to compile
LONG = 16  # chunks of a segment from which on a lookback is worth it: for per-key gates it is a kernel of its own


class KernelLayout:
    """Lay out a recurrence for the kernels: padded q, k and v in rows of chunks, gates by form, and a table of segments.

    The kernels' heads are blocks of heads (`Blocks`): H, K and V are the number and the widths of these blocks. E counts the
    segments of all sequences. square: whether the layout serves the gradient, whose blocks are square unless `gradient_groups`
    computes it. given: the caller's recurrence, or in `EqualLayout` the packed one. r: the recurrence of the rows that the
    kernels read, without padding; equal to `given` except in subclasses. edges, tokens: set for packed sequences that are one
    row, else None. edges: the `Edges` of the row, unless gates are per key; or a `LastChunk`. tokens: the numbers of the first
    row with a token and of the row behind the last, if gates are per key.

    q, k, v: [B, rows, heads * blocks, K or V] in bfloat16. gates: the result of `gate_operands`; None under the delta rule,
    whose kernels read gates as they are. scale: [N] in float32. table: the result of `segments`.
    """

    def __init__(
        self, given: Recurrence, route: Route, square: bool = False, *, row: Recurrence | None = None,
        edges: Edges | None = None, tokens=None, parts: int | None = None, cuts: np.ndarray | None = None,
    ):  # fmt: skip
        """Lay out `given` for its route. row: the recurrence `r` of the rows that are read, by default `given`.

        parts: the segments of a row, by default those of the config. cuts: the boundaries of `row`, if they are known while
        tracing. square, edges, tokens: the fields of the class.
        """
        r = given if row is None else row
        self.newest = None if r.segments is None else newest_resets(r.segments.resets, r.reverse)
        r = r if r.segments is None else r.without_padding
        self.given, self.r, self.route, self.tokens = given, r, route, tokens
        self.apart = None if r.boundaries is None else Apart.of(r, cuts)
        self.last_chunk = LastChunk(r.q.shape[1]) if route.rows.copies_last else None
        self.edges = edges or self.last_chunk
        self.parts = route.config.parts if parts is None else parts
        self.key, self.grouped = r.decay.key is not None, route.gradient == "gradient_groups"
        widths = route.square if square and not self.grouped else route.widths
        self.N, self.blocks, self.K, self.V = r.scale.shape[0], widths.blocks, widths.K, widths.V
        self.in_memory = widths.in_memory
        self.stored, columns = widths.stored, 64 if route.scan == "pair_scan" else route.config.columns
        self.columns = min(columns, 128 * 128 // self.K, self.V)
        self.heads = r.num_heads
        self.H = self.heads * self.blocks.rows * self.blocks.columns
        self.q, self.k = (self.of_keys(x) for x in (r.q, r.k))
        self.v = self.of_values(r.v)
        self.chunks = -(-r.q.shape[1] // C) if self.apart is None else self.apart.count
        self.gates: Any = None if r.erasure is not None else self.gate_operands()
        self.scale = r.scale.astype(jnp.float32)
        self.table = self.segments()

    @functools.cached_property
    def e(self) -> Array | None:
        """Return the erase vector in rows of chunks, [B, rows, H, K] in bfloat16; None with beta."""
        erase = self.r.erasing.erase
        return None if erase is None else self.of_keys(erase.astype(jnp.bfloat16))

    @functools.cached_property
    def w(self) -> Array | None:
        """Return the write gate in rows of chunks, [B, rows, H, V] in bfloat16; None with beta, and where it is 1."""
        write = self.r.erasing.write
        return None if write is None else self.of_values(write.astype(jnp.bfloat16))

    def gate_operands(self) -> Any:
        """Return the gates as kernels read them: the terms of per-key gates (`key_terms`) as a tuple of arrays [B, rows, H, K],
        else the sums of log2 gates within chunks (`head_sums`), [B, chunks, H, C]."""
        if self.key:
            return key_terms(self.of_keys(self.r.decay.key))
        return head_sums(self.head_gates(), self.r.reverse)

    def head_gates(self) -> Array:
        """Return per-head gates as kernels read them: natural logarithms, [B, rows, H]. A constant decay is the gate of every
        token, no decay a gate of 0."""
        r = self.r
        if r.decay.head is not None:
            return self.take(r.decay.head)
        if r.decay.constant is not None:
            gates = r.by_token(r.decay.constant.astype(jnp.float32))
            return self.take(jnp.broadcast_to(gates, (*r.q.shape[:2], self.heads)))
        return jnp.zeros((*self.q.shape[:2], self.heads), jnp.float32)

    def take(self, x):
        """Return x [B, T, ...] in the rows that the kernels read. These are rows of chunks; or where rows are read in place x
        itself, with zeros up to a multiple of 8 rows."""
        if self.apart is not None and not self.in_place:
            return self.apart.take(x)
        fill = -x.shape[1] % ROWS
        return jnp.pad(x, ((0, 0), (0, fill), *((0, 0),) * (x.ndim - 2))) if fill else x

    def put(self, x):
        """Return x [B, rows of chunks, ...] in the rows of r, [B, T, ...]; 0 in padding."""
        return x[:, : self.r.q.shape[1]] if self.apart is None else self.apart.put(x)

    @functools.cached_property
    def in_place(self) -> bool:
        """Return whether the kernels read packed rows in place."""
        return self.apart is not None and self.apart.source is None

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Return the number of rows of tokens in the arrays that kernels write."""
        return self.chunks * C if self.in_place else self.q.shape[1] + -self.q.shape[1] % ROWS

    @functools.cached_property
    def result_rows(self) -> int:
        """Return the number of rows of results if the last chunk is read from a copy, so that the kernels read fewer rows in
        place; else 0."""
        return 0 if self.last_chunk is None else self.chunk_rows

    @functools.cached_property
    def size(self) -> int:
        """Return the number of chunks of a segment."""
        return -(-self.chunks // self.parts)

    @property
    def scales(self):
        """Return `scale` with an unused number appended, [N + 1]. XLA would write an array of equal numbers by a kernel in
        every call."""
        return jnp.append(self.scale, 0.0)

    def of_keys(self, x):
        """Return x [B, T, heads, K of r] in rows of chunks and blocks: [B, rows, heads * blocks, K in memory]."""
        return self.in_blocks(x, self.in_memory[0])

    def of_values(self, x):
        """Return x [B, T, heads, V of r] in rows of chunks and blocks: [B, rows, heads * blocks, V in memory]."""
        return self.in_blocks(x, self.in_memory[1])

    def in_blocks(self, x, width: int):
        """Return x [B, T, heads, columns] in rows of chunks and blocks of `width` columns: [B, rows, heads * blocks, width]."""
        x = widen(self.take(x) if self.last_chunk is None else x, -(-x.shape[-1] // width) * width)
        return x.reshape(*x.shape[:2], -1, width)

    def in_tiles(self, x):
        """Return the rows of x [B, rows, heads, width] that kernels read in place: all, or those before the last chunk if that
        is copied."""
        return x if self.last_chunk is None else x[:, : self.last_chunk.rows]

    def gradient_of_keys(self, x):
        """Return the gradient of q, k or per-key gates of every head, [B, T, H of r, K of r], summed over blocks of V. x: [B,
        rows, H, K], the terms of each block, or their sums over blocks of V."""
        columns = self.stored.columns
        if columns > 1 and x.shape[2] == self.heads * self.stored.count:
            x = x.reshape(*x.shape[:2], -1, columns, x.shape[3]).astype(jnp.float32).sum(3)
        return self.put(x.reshape(*x.shape[:2], self.heads, -1))[..., : self.r.q.shape[3]]

    def sum_of_values(self, x, blocks: Blocks):
        """Return the sums over blocks of K of the outputs, or of the gradient of v, of every head: [B, T, H of r, V of r]. x:
        [B, rows, H, V], the terms of each block. blocks: the blocks by which x is divided."""
        if blocks.rows > 1:
            x = x.reshape(*x.shape[:2], self.heads, blocks.rows, -1).astype(jnp.float32).sum(3)
        return self.put(x.reshape(*x.shape[:2], self.heads, -1))[..., : self.r.v.shape[3]]

    def sum_of_blocks(self, x):
        """Return the sums over the gradient's blocks of each head of x: [..., heads of r] from [..., blocks of heads]."""
        return x if self.stored == WHOLE else x.reshape(*x.shape[:-1], -1, self.stored.count).sum(-1)

    def segments(self):
        """Return the table of segments, [E, 4] in int32: batch row, first chunk, number of chunks and sequence of each. If
        packed sequences each begin a chunk, it is `Apart.segments`, [N, 7]."""
        if self.apart is not None:
            return self.apart.segments
        size = self.size
        n, part = np.divmod(np.arange(self.N * self.parts), self.parts)
        return np.stack([n, part * size, np.clip(self.chunks - part * size, 0, size), n], 1).astype(np.int32)

    def table_of(self, adjoint: bool):
        """Return the table of segments of a scan, [E, 4 or more]. It is the same for a scan with time and against time
        (`adjoint`), except in `JoinedLayout`."""
        return self.table

    @functools.cached_property
    def run(self) -> int:
        """Return the number of chunks from one state that is stored for the gradient to the next, 1 or 2. All chunks of a run
        are of one sequence."""
        if self.key or self.apart is not None or (self.grouped and self.every % RUN):
            return 1
        return math.gcd(self.chunks, RUN)

    @functools.cached_property
    def every(self) -> int:
        """Return the number of chunks from one state of `states_every` to the next; 0 without such states."""
        return (self.r.states_every or 0) // C

    @functools.cached_property
    def stored_states(self) -> dict[str, int]:
        """Return the fields `every` and `num_behind` of `Scan`, for a plan that stores the states of `states_every` or adds
        their gradients.

        The result is empty if the caller wants no states, or a row is too short for one.
        """
        number = self.r.q.shape[1] // self.r.states_every if self.r.states_every else 0
        return dict(every=self.every, num_behind=number) if number else {}

    def plan(self, **flags) -> Scan:
        """Return the plan of a scan of this layout. flags: the fields of `Scan` that the layout does not decide, such as
        `outputs`, `states` and `start`."""
        terms = len(self.gates) if self.key else 1
        return plan_of(
            self.H, self.K, self.V, self.in_memory, reverse=self.r.reverse, columns=self.columns, parts=self.parts, terms=terms,
            blocks=self.blocks, stored_by=self.stored if self.blocks != self.stored else WHOLE,
            packed=self.chunks if self.in_place else 0, edges=self.edges is not None,
            resets=self.newest is not None, bounded=self.tokens is not None,
            rows=self.result_rows, **flags,
        )  # fmt: skip

    def scan(self, plan: Scan, k, v, start, table=None, out_of_range=None, behind=None) -> ScanResults:
        """Run the kernel for the form of the gates over every segment in `table`, by default the layout's, and return its
        results.

        plan: the plan of the scan. k, v: in blocks; for dL/dS q and d_output in their places. start: the states that enter
        segments, [E, H, K, V] in float32, or None for zeros. out_of_range: the field of `Residuals`, which the scan of dL/dS
        reads. behind: the gradients of the states of `states_every` in blocks, [B, num_behind, H, K, V], for a plan that adds
        them.
        """
        operands = (
            self.table_of(plan.adjoint) if table is None else table,
            *(self.in_tiles(x) for x in (self.q, k, v)),
            self.gates,
            self.scales,
            jnp.zeros((1, 1, 1, 1)) if start is None else start,
        )
        if self.key:
            return key_scan(plan, self.with_tokens(operands[0]), *operands[1:], out_of_range, behind, self.newest)
        operands = *operands, *self.edge_copies(self.q, k, v), *([behind] if plan.adds_behind else [])
        scan = pair_scan if plan.outputs and self.route.scan == "pair_scan" else head_scan
        return scan(plan, *operands)

    def with_tokens(self, table):
        """Return `table` with two more columns if the plan clears rows without a token, else as given. The columns are the
        first row with a token, and the row behind the last. table: [..., 4 or 5], widened to 5 columns before."""
        if self.tokens is None:
            return table
        table = jnp.asarray(table)
        table = jnp.pad(table, (*((0, 0),) * (table.ndim - 1), (0, 5 - table.shape[-1])))
        tokens = jnp.broadcast_to(jnp.stack(self.tokens).astype(table.dtype), (*table.shape[:-1], 2))
        return jnp.concatenate([table, tokens], axis=-1)

    def edge_copies(self, *arrays):
        """Return the edge operands of a kernel, a tuple: `Edges.block`, and for each array [B, rows, heads, width] the copy of
        its edges, or None for None. Without edges the tuple is empty."""
        if self.edges is None:
            return ()
        return self.edges.block, *(None if x is None else self.edges.copy(x) for x in arrays)

    @functools.cached_property
    def lookback(self) -> int:
        """Return the largest number of chunks that a lookback reads at a segment's end: a sixteenth of a segment, but 4 to 8; 0
        for segments of less than 16 chunks."""
        return min(max(self.size // 16, LOOKBACK[0]), LOOKBACK[1]) if self.size >= LONG else 0

    def own_states(self, k, v, adjoint: bool, last: bool):
        """Return the state of every segment that begins from zero, [E, H, K, V] in float32, and its natural log decays, [E, H,
        K or 1].

        k, v: in blocks; for dL/dS q and d_output in their places. adjoint: whether the states are dL/dS, in a scan against
        time; they then lack the factor `scale`. last: whether to compute the segments that sequences end with, too.
        """
        plan = self.plan(outputs=False, two_way=True, lookback=self.lookback)
        tables = [self.whole_segments(way, last) for way in (False, True)]
        if self.key and plan.lookback:
            table = lookback_tables(plan, self.with_tokens(np.stack(tables)), self.gates)[adjoint]
        else:
            table = np.repeat(tables[adjoint][:, None], self.H, axis=1) if self.key else tables[adjoint]
        scanned = self.scan(plan, k, v, None, table)
        assert scanned.log is not None  # as a `two_way` scan returns
        return scanned.last, scanned.log

    def whole_segments(self, adjoint: bool, last: bool) -> np.ndarray:
        """Return the table of a `two_way` scan over all chunks, [E, 5], whose last column is `adjoint`.

        Unless `last`, the segments that sequences end with have a count of 0 chunks, because their states are computed with
        their outputs.
        """
        table = np.insert(self.table, 4, adjoint, axis=1)
        if not last:
            ends = np.arange(self.parts) == (0 if self.descending(adjoint) else self.parts - 1)
            table[np.tile(ends, self.N), 2] = 0
        return table

    def entry_states(self, own, start, adjoint: bool, is_scaled: bool = False):
        """Return the state that enters every segment, [E, H, K, V] in float32.

        own: the result of `own_states`, for the same `adjoint`. start: the state that enters each sequence, [N, H, K, V] in
        blocks, or None for zeros. is_scaled: whether own states of dL/dS include the factor `scale`.
        """
        scales = adjoint and not is_scaled
        if self.parts <= FEW:
            return jnp.stack(self.along(own, start, adjoint, is_scaled)[0], 1).reshape(-1, *own[0].shape[1:])
        given = start if start is not None else jnp.zeros((1, 1, 1, 1))
        descending = np.asarray([self.descending(adjoint)], np.int32)
        factor = self.scales if scales else np.append(np.ones(self.N, np.float32), np.float32(0))
        return segment_scan(self.parts, start is not None, *own, factor, given, descending)

    def along(self, own, start, adjoint: bool, is_scaled: bool = False) -> tuple[list[Array], Array]:
        """Return the states that enter the 1st, 2nd, ... segment of every sequence, a list of arrays [N, H, K, V], and the
        state behind the segment that is scanned last, [N, H, K, V].

        own: the states and log decays of segments from zero, as `own_states` returns them. start: the state that enters each
        sequence, or None for zeros. adjoint: whether the states are dL/dS. is_scaled: whether own states of dL/dS include the
        factor `scale`.
        """
        states, log = (x.reshape(self.N, self.parts, *x.shape[1:]) for x in own)
        factor = self.scale[:, None, None, None] if adjoint and not is_scaled else 1.0
        decay = jnp.exp(log)[..., None]
        S = jnp.zeros_like(states[:, 0]) if start is None else start
        entering = [S] * self.parts
        for part in range(self.parts - 1, -1, -1) if self.descending(adjoint) else range(self.parts):
            entering[part] = S
            S = decay[:, part] * S + factor * states[:, part]
        return entering, S

    def decayed_before(self, log, adjoint: bool):
        """Return, for each segment, the sum of the log decays of all segments of its sequence that are scanned before it, [E,
        H, K or 1].

        log: the log decay of each segment, [N, parts, H, K or 1]. adjoint: whether the scan is of dL/dS, against time.
        """
        logs = [jnp.zeros_like(log[:, 0])] * self.parts
        order = range(self.parts)[:: -1 if self.descending(adjoint) else 1]
        for before, part in itertools.pairwise(order):
            logs[part] = logs[before] + log[:, before]
        return jnp.stack(logs, 1).reshape(-1, *log.shape[2:])

    def begun_from(self, start, from_zero, log):
        """Return the state that enters every segment in a scan from `start`: from_zero + e^b start, [E, H, K, V].

        start: the states of sequences, [N, H of r, K of r, V of r], not None. from_zero: the states that enter in a scan from
        zero, [E, H, K, V]. log: b, the result of `decayed_before`.
        """
        filled = self.states_to_blocks(start)
        assert filled is not None  # the second phase has the state that has arrived
        return from_zero + jnp.exp(log)[..., None] * jnp.repeat(filled, self.parts, axis=0)

    def descending(self, adjoint: bool) -> bool:
        """Return whether a scan goes from the last segment to the first. adjoint: whether it is a scan of dL/dS."""
        return self.r.reverse != adjoint

    def states_to_blocks(self, states):
        """Return the states [N, H of r, K of r, V of r], padded with zeros to the kernels' widths and divided into blocks: [N,
        H, K, V] in float32. Return None for None."""
        if states is None:
            return None
        (rows, columns), (K, V), S = (self.blocks.rows, self.blocks.columns), self.in_memory, states.astype(jnp.float32)
        S = widen(jnp.swapaxes(widen(jnp.swapaxes(S, 2, 3), rows * K), 2, 3), columns * V)
        if self.blocks != WHOLE:
            S = jnp.swapaxes(S.reshape(*S.shape[:2], rows, K, columns, V), 3, 4).reshape(-1, self.H, K, V)
        return jnp.pad(S, ((0, 0), (0, 0), (0, self.K - K), (0, self.V - V))) if (K, V) != (self.K, self.V) else S

    def segment_starts(self, start, k, v, adjoint: bool):
        """Return the state that enters every segment, [E, H, K, V]; None for zeros.

        start: the state of every sequence, [N, H of r, K of r, V of r], or None for zeros. k, v: in blocks; for dL/dS q and
        d_output in their places. adjoint: whether the states are dL/dS.
        """
        start = self.states_to_blocks(start)
        if self.parts == 1:
            return start
        return self.entry_states(self.own_states(k, v, adjoint, last=False), start, adjoint)

    def chunkwise(self, d_output, residuals: Residuals, d_states):
        """Return the operands of the kernels that compute the gradients of every chunk separately, a tuple: q, k, v, gates,
        d_output, scale, the states before chunks, d_states, and further ones by form. If sequences are packed, every chunk is a
        sequence of its own.

        d_output: in blocks. residuals: divided into blocks (`of_blocks`). d_states: dL/dS behind the chunks, as a scan against
        time stores it.
        """
        gates, out_of_range = self.gates, [residuals.out_of_range] if self.key else []
        q, k, v, d_output = (self.in_tiles(x) for x in self.by_blocks(self.q, self.k, self.v, d_output))
        if self.tokens is not None:
            scale = jnp.broadcast_to(self.scale, (self.chunks,))
            return q, k, v, gates, d_output, scale, residuals.states, d_states, *out_of_range, self.rows_of_chunks()
        if self.apart is None:
            return q, k, v, gates, d_output, self.scales, residuals.states, d_states, *out_of_range
        scale = self.scale[self.apart.sequence]
        if self.in_place:
            return q, k, v, gates, d_output, scale, residuals.states, d_states, *out_of_range, self.rows_of_chunks()
        q, k, v, d_output = (x.reshape(self.chunks, C, *x.shape[2:]) for x in (q, k, v, d_output))
        return q, k, v, gates[0][:, None], d_output, scale, residuals.states[0][:, None], d_states[0][:, None]

    def rows_of_chunks(self):
        """Return three numbers for every chunk, [chunks, 3] in int32: its first row in the operands, divided by 8; and the
        first row with a token, and the row behind the last, both counted from the chunk's first row. The last two may lie
        outside of 0 ... C."""
        if self.apart is not None:
            return self.apart.rows_of_chunks(self.table)
        assert self.tokens is not None, "other rows begin at their own first row"
        row = jnp.arange(self.chunks, dtype=jnp.int32) * (C // ROWS)
        return jnp.stack([row, *(x - row * ROWS for x in self.tokens)], 1).astype(jnp.int32)

    def by_blocks(self, q, k, v, d_output):
        """Return q, k, v and d_output, given in the forward's blocks, in the gradient's blocks of K and of V: [B, rows, heads *
        blocks, width]."""
        K, V = self.in_memory
        if self.blocks != self.stored:
            K, V = K // self.stored.rows, V // self.stored.columns
        of_keys, of_values = ((x.reshape(*x.shape[:2], -1, K) for x in (q, k)), (v, d_output))
        return *of_keys, *(x.reshape(*x.shape[:2], -1, V) for x in of_values)

    def scale_of_chunks(self):
        """Return the scale of every chunk, [B, chunks]."""
        if self.apart is None:
            return jnp.broadcast_to(self.scale[:, None], (self.N, self.chunks))
        return self.scale[self.apart.sequence][None]

    def residuals(self, scanned: ScanResults) -> Residuals:
        """Return the residuals for the gradient, of whole heads, from the results of a scan.

        With per-head gates all chunks are in range. So are chunks behind the last sequence.
        """
        out_of_range = scanned.out_of_range
        if out_of_range is None:
            out_of_range = jnp.zeros((*scanned.states.shape[:1], self.chunks, scanned.states.shape[2]), jnp.int32)
        if self.apart is not None:
            out_of_range = jnp.where(jnp.arange(self.chunks)[None, :, None] < self.apart.begins[-1], out_of_range, 0)
        if self.stored == WHOLE:
            return Residuals(scanned.states, out_of_range)
        # Axis 2 holds heads, over which devices may share them: the blocks of a head stay together.
        states = scanned.states.reshape(*scanned.states.shape[:2], self.heads, -1, scanned.states.shape[4])
        flags = jnp.moveaxis(out_of_range.reshape(*out_of_range.shape[:2], -1, self.stored.count), 3, 2)
        return Residuals(states, flags.reshape(flags.shape[0], -1, self.heads))

    def of_blocks(self, residuals: Residuals) -> Residuals:
        """Return the residuals divided into blocks. residuals: those of whole heads, as the method `residuals` returns them."""
        if self.stored == WHOLE:
            return residuals
        (states, flags), blocks = residuals, self.heads * self.stored.count
        states = states.reshape(*states.shape[:2], blocks, -1, states.shape[4])
        flags = flags.reshape(flags.shape[0], -1, self.stored.count, self.heads)
        return Residuals(states, jnp.moveaxis(flags, 2, 3).reshape(*flags.shape[:2], blocks))

    def states_from_blocks(self, states):
        """Return the states of the heads of r, [N, H of r, K of r, V of r], from the states of blocks, [N, H, K, V], which may
        be padded: the inverse of `states_to_blocks`."""
        K, V = self.in_memory
        states = states[..., :K, :V]
        if self.blocks != WHOLE:
            rows, columns = self.blocks.rows, self.blocks.columns
            states = jnp.swapaxes(states.reshape(states.shape[0], -1, rows, columns, K, V), 3, 4)
            states = states.reshape(states.shape[0], -1, rows * K, columns * V)
        K, V = self.r.q.shape[3], self.r.v.shape[3]
        return states[..., :K, :V]

    def log_from_blocks(self, log):
        """Return the log decays of heads, [N, H of r, K of r or 1]. log: [N, H, K or 1] of blocks, equal for all blocks of V."""
        log = log[..., : self.in_memory[0]]
        if self.blocks != WHOLE:
            by_block = log.reshape(log.shape[0], -1, self.blocks.rows, self.blocks.columns, log.shape[2])[:, :, :, 0]
            by_block = by_block if self.key else by_block[:, :, :1]
            log = by_block.reshape(log.shape[0], self.heads, -1)
        return log[..., : self.r.q.shape[3]]

    @property
    def is_token(self):
        """Return whether each row of each chunk holds a token, [chunks, C]. The result is not defined for packed rows that
        kernels read in place."""
        source = None if self.apart is None else self.apart.source
        held = np.arange(self.chunks * C) < self.r.q.shape[1] if source is None else source >= 0
        return held.reshape(self.chunks, C)

    def by_sequence(self, x):
        """Return the sums of x over the chunks of every sequence, [N, H].

        x: [B, chunks, H]. Where packed sequences each begin a chunk, x is [chunks, H], over the chunks of all sequences.
        """
        return x.sum(1) if self.apart is None else self.apart.by_sequence(x)

    # ---- between rows and the sequences of the caller ----------------------------------------------------------------

    def join(self, x):
        """Return the caller's x [B, T, ...] in the rows of r. Only `EqualLayout` and `JoinedLayout` change x."""
        return x

    def split(self, x):
        """Return the caller's x [B, T, ...] from x in the rows of r: the inverse of `join`."""
        return x

    def final_states(self, last):
        """Return the final states of the caller, [N, H, K, V]. last: the states behind the rows that are read."""
        return last

    def gradient_of_tokens(self, x):
        """Return the gradient of an array with a token axis, in the sequences of `given`. x: the gradient in the rows of r."""
        return x

    def gradient_of_given(self, d: Recurrence) -> Recurrence:
        """Return the gradient with respect to the caller's recurrence. d: the gradient with respect to `given`. Only
        `EqualLayout`, in which these are not the same, changes d."""
        return d

    def gradient_of_gates(self, dg):
        """Return the gradient of per-head gates, [B, T, H] of `given`. dg: [B, chunks, C, blocks of H], the gradient of the
        gates of rows."""
        return self.put(self.sum_of_blocks(dg).reshape(self.r.q.shape[0], -1, self.heads))

    def gradient_of_constant(self, dg):
        """Return the gradient of constant decays, [N, H] of `given`. dg: [B, chunks, C, blocks of H], the gradient of the gates
        of rows."""
        is_token = self.is_token if self.apart is None else self.is_token[:, None]  # other rows have no gate
        return self.by_sequence(jnp.where(is_token[..., None], self.sum_of_blocks(dg), 0).sum(2))

    def scale_by_token(self, d_scale):
        """Return the terms of the gradient of the scale, from which `gradient_of_scale` computes the gradient. d_scale:
        `Gradients.scale`. The shape of the result depends on the layout."""
        return d_scale

    def gradient_of_scale(self, d_scale):
        """Return the gradient of the scales of `given`, [N]. d_scale: the result of `scale_by_token`."""
        return self.by_sequence(d_scale.sum(3) if d_scale.ndim == 4 else d_scale).sum(1)


class OneRowLayout(KernelLayout):
    """Lay out packed sequences as one row. With per-key gates the kernels clear rows without a token. With other gates they
    read the chunks that contain such rows from copies."""

    def __init__(self, given: Recurrence, route: Route, square: bool = False):
        self.packed = PackedRow(given)
        row = self.packed.row
        if given.decay.key is not None:
            super().__init__(given, route, square, row=row, tokens=(self.packed.cuts[0], self.packed.cuts[-1]))
        else:
            super().__init__(given, route, square, row=row, edges=Edges.of(given))

    def final_states(self, last):
        """Return the final states of sequences, [N, H, K, V], by a separate scan, which XLA drops where the states are not
        used. Each sequence is copied to a chunk's start. last: not used."""
        p = KernelLayout(self.given, self.route.in_one_segment(Form.APART))
        return p.states_from_blocks(p.scan(p.plan(outputs=False), p.k, p.v, None).last)

    def gradient_of_gates(self, dg):
        return self.packed.gate_gradient(super().gradient_of_gates(dg))

    def gradient_of_constant(self, dg):
        return self.packed.per_sequence(self.gradient_of_gates(dg)[0])

    def scale_by_token(self, d_scale):
        """Return the terms of the gradient of the scale by token, summed over blocks of heads: [T, 1]."""
        return d_scale.sum(2).reshape(-1, 1)[: self.r.q.shape[1]]

    def gradient_of_scale(self, d_scale):
        return self.packed.per_sequence(d_scale)[:, 0]


class EqualLayout(KernelLayout):
    """Lay out a batch as packed sequences of equal length, in one row. The residuals have one row, too."""

    def __init__(self, given: Recurrence, route: Route, square: bool = False):
        self.sequences = EqualSequences(given)
        super().__init__(self.sequences.packed, route, square, cuts=self.sequences.cuts)

    def join(self, x):
        return self.sequences.pack(x)

    def split(self, x):
        return self.sequences.part(x)

    def gradient_of_given(self, d: Recurrence) -> Recurrence:
        return d.map_tokens(self.sequences.part)


class JoinedLayout(KernelLayout):
    """Lay out joined rows. Every sequence of a row has `segments_per_sequence` segments, `parts` of the config. Which chunks a
    segment has depends on the direction of a scan.

    The boundaries are known while tracing, so that sequences remain in parallel. `number` (g below) sequences are joined to a
    row:

        resets n = 1 ... g - 1 at rows p_n         n T, or n T - 1 in reverse
        chunks of sequence n, scanned upwards      p_n / C + 1 ... p_{n+1} / C
        chunks of sequence n, scanned downwards    p_n / C ... p_{n+1} / C - 1

    In scan order a sequence's last chunk contains the reset of the next. That chunk alone decides the state that enters the
    next sequence's segment.
    """

    def __init__(self, given: Recurrence, route: Route, square: bool = False):
        self.joined, self.segments_per_sequence = JoinedRows(given, route.rows.joined), route.config.parts
        parts = self.joined.number * self.segments_per_sequence
        super().__init__(given, route, square, row=self.joined.row, parts=parts)
        if self.key and given.segments is None:  # known while tracing: XLA would find them in every call
            self.newest = jnp.broadcast_to(self.joined.newest, (self.N, *self.joined.newest.shape))

    def segments(self) -> np.ndarray:
        return self.table_of(adjoint=False)

    def table_of(self, adjoint: bool) -> np.ndarray:
        """Return the table of segments of a scan, [E, 4] in int32. adjoint: whether it is a scan of dL/dS, against time."""
        inner = self.joined.bounds + (0 if self.descending(adjoint) else 1)
        edges = np.concatenate([[0], inner, [self.chunks]])
        first, count = edges[:-1, None], np.diff(edges)[:, None]
        # [number, segments_per_sequence + 1]
        cuts = first + count * np.arange(self.segments_per_sequence + 1) // self.segments_per_sequence
        return self.in_every_row(cuts[:, :-1].reshape(-1), np.diff(cuts, axis=1).reshape(-1))

    def in_every_row(self, first, count) -> np.ndarray:
        """Return a table [N * len(first), 4] in int32, in which every row of tokens has segments of these chunks. first: the
        first chunk of each segment. count: its number of chunks."""
        n = np.repeat(np.arange(self.N), len(first))
        return np.stack([n, np.tile(first, self.N), np.tile(count, self.N), n], 1).astype(np.int32)

    @functools.cached_property
    def lookback(self) -> int:
        return super().lookback if self.segments_per_sequence > 1 else 0

    def reset_chunks(self, empty_first: bool):
        """Return an array [2, number], in its first row chunks, in its second row counts: for every two neighbouring sequences
        the chunk with the reset of the one scanned later, with a count of 1; and one entry more with a count of 0.

        empty_first: whether that entry comes before the others, else behind them.
        """
        bounds = self.joined.bounds
        return np.pad([bounds, np.ones_like(bounds)], ((0, 0), (1, 0) if empty_first else (0, 1)))

    def whole_segments(self, adjoint: bool, last: bool) -> np.ndarray:
        """Return the table of a `two_way` scan, [E, 5], whose last column is `adjoint`. For the last segment of each sequence
        in scan order the table has only the chunk with the next sequence's reset, because no state passes the reset. last:
        always False."""
        assert not last, "joined rows are not cut between devices"
        table = self.table_of(adjoint).reshape(self.N, self.joined.number, self.segments_per_sequence, 4)
        descends = self.descending(adjoint)
        table[:, :, 0 if descends else -1, 1:3] = self.reset_chunks(empty_first=descends).T
        return np.insert(table.reshape(-1, 4), 4, adjoint, axis=1)

    def segment_starts(self, start, k, v, adjoint: bool):
        """Return the state that enters every segment, [E, H, K, V]. If a sequence is one segment, one chunk determines that
        state: the chunk with the reset. start: None, because joined rows begin from zeros."""
        assert start is None, "joined rows begin from zeros"
        if self.segments_per_sequence > 1:
            return super().segment_starts(None, k, v, adjoint)
        table = self.in_every_row(*self.reset_chunks(empty_first=not self.descending(adjoint)))
        table = np.insert(table, 4, adjoint, axis=1)
        table = np.repeat(table[:, None], self.H, axis=1) if self.key else table
        S = self.scan(self.plan(outputs=False, two_way=True), k, v, None, table).last
        return S * jnp.repeat(self.scale, self.parts)[:, None, None, None] if adjoint else S

    def final_states(self, last):
        """Return the final state of every sequence, [B, H, K, V], by scans without outputs, which XLA drops where the states
        are not used.

        The rows in which the scan leaves a sequence are copied. last: not used.
        """
        return JoinedLayout(self.given, self.route).states_behind()

    def states_behind(self):
        """Return the final state of every sequence, [B, H, K, V]. The layout must be one of a forward, which is not
        `square`."""
        between = self.joined.ends()[0]
        table = self.in_every_row(between[:, 0], between[:, 1] - between[:, 0] + 1)
        plan = dataclasses.replace(self.plan(outputs=False), parts=1)
        entering = self.states_from_blocks(self.scan(plan, self.k, self.v, None, table).last)
        p = KernelLayout(self.joined.last_rows(entering), self.route.in_one_segment(Form.GIVEN))
        start = p.states_to_blocks(entering)
        return p.states_from_blocks(p.scan(p.plan(outputs=False, start=True), p.k, p.v, start).last)

    def join(self, x):
        return self.joined.join(x)

    def split(self, x):
        return self.joined.part(x)

    def gradient_of_tokens(self, x):
        return self.joined.part(x)

    def by_token(self, x):
        """Return x [B / number, chunks, C, ...], in rows of chunks, as [B, T, ...] of `given`."""
        return self.joined.part(x.reshape(self.N, -1, *x.shape[3:]))

    def gradient_of_gates(self, dg):
        return self.joined.gate_gradient(self.by_token(self.sum_of_blocks(dg)))

    def gradient_of_constant(self, dg):
        return self.gradient_of_gates(dg).sum(1)

    def scale_by_token(self, d_scale):
        """Return the terms of the gradient of the scale by token, summed over blocks of heads: [B, T]."""
        return self.by_token(d_scale.sum(2))

    def gradient_of_scale(self, d_scale):
        return d_scale.sum(1)


LAYOUTS = {Form.ONE_ROW: OneRowLayout, Form.EQUAL: EqualLayout, Form.JOINED: JoinedLayout}


def layout_of(r: Recurrence, route: Route, square: bool = False) -> KernelLayout:
    """Return the layout of r for its route. square: whether the layout serves the gradient."""
    return LAYOUTS.get(route.rows.form, KernelLayout)(r, route, square)


# ---- gates -----------------------------------------------------------------------------------------------------------


def key_terms(g: Array) -> tuple[Array, ...]:
    """Return a tuple of one or two arrays in bfloat16, [B, rows, H, K] each, whose sum is the per-key gates g.

    Gates in bfloat16 have one term. Others have two, which hold 16 bits of each gate. The terms are separate arrays, which XLA
    writes in one pass.
    """
    if g.dtype == jnp.bfloat16:
        return (g,)
    g = jnp.maximum(g.astype(jnp.float32), LOG_OF_ZERO)
    high = jax.lax.reduce_precision(g, 8, 7)  # XLA drops a cast there and back
    return high.astype(jnp.bfloat16), (g - high).astype(jnp.bfloat16)


def head_sums(gates: Array, reverse: bool) -> Array:
    """Return the sums of a chunk's gates from where the scan enters the chunk through each token, to base 2: [B, chunks, H, C]
    in float32. gates: natural logarithms, [B, rows, H]. reverse: whether the scan goes from the last token to the first."""
    B, rows, H = gates.shape
    if gates.dtype != jnp.bfloat16:  # which tensor cores sum as they are
        gates = gates.astype(jnp.float32)
    gates = jnp.pad(jnp.maximum(gates, LOG_OF_ZERO), ((0, 0), (0, -rows % C), (0, 0)))
    before = np.tri(C, dtype=np.float32)  # a product: a cumulative sum takes XLA several passes
    before = jnp.asarray(before.T if reverse else before, gates.dtype)
    exact = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    return exact("bcjh,ij->bchi", gates.reshape(B, -1, C, H), before) * LOG2E


def widen(x, width: int):
    """Return x with its last axis padded with zeros to `width`."""
    return x if x.shape[-1] == width else jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, width - x.shape[-1])))
