"""Scan with per-key gates: carry the state along a sequence, and return outputs or the states at its chunks.

M_i is the sum of log decays from a chunk's middle through token i, L of its first half and R of its second:

    q^_i = q_i e^{M_i},  k^_j = k_j e^{-M_j},  S' = e^L S
    o_i  = scale * (q^_i^T S' + (q_i . k_i) v_i + sum_{j < i} (q^_i . k^_j) v_j)          S_out = e^R (S' + sum_j k^_j v_j^T)

Two exponentials per element serve every product. They are safe while |M|, |L| and |R| are at most 60, and while e^R and the next
chunk's e^L stay two factors of the state (`common.limits`). A chunk with larger sums is out of range. There q and k are scaled
to the edges of the chunk, S' is the state that enters it, and no score is formed:

    q^_i = q_i e^{L + M_i},  k^_j = k_j e^{R - M_j},  S' = S
    o_i  = scale * q^_i^T S'                                        S_out = e^{L + R} S' + sum_j k^_j v_j^T

`exact_outputs` adds what these outputs draw from the chunk's own tokens, so a gate of -inf costs its chunk alone.

A token's score with itself is the largest score where gates are strong. It is formed of q^ and k^, or of q and k, before they
are rounded. Scores have 16 bits, two terms in bfloat16. The gradient reads S' of every chunk. Where gates are weak, an output
is a sum over so many tokens that q^ has two terms, too, which costs time. Only programs whose gates are weak on average, by a
sample of them, form the second term of q^. That term lies in the tile that held the chunk's gates.

Two kinds of scan form no scores and scale to the chunk's edge: the scan that finds the states of segments, and the scan of dL/dS.
E_j is the sum of log decays behind token j. Against time q and d_output take the places of k and v, and E_j includes token j:

    S_out = e^{L + R} S + sum_j (k_j e^{E_j}) v_j^T

No exponent is above 0 there. The scan of dL/dS reads which chunks are out of range, and stores the states of the others decayed
to their middle.

Roles. A program has a segment of one sequence, one head and 64 or 128 columns of the state. Its warpgroups work side by side.
*scale* (`key_scale.py`) sums gates and scales operands, 64 channels of K in each of its warpgroups, ahead of those that
multiply. *carry* takes the state through all chunks, and stores S' for *output*, which forms scores and outputs while the next
state is formed. Scans without outputs have a *carry* for every 64 columns of the state. No role only loads: *scale* loads gates,
*carry* k and v, once *output* is done with them too, and *output* q, and the gates where their tile holds what q^ lost.

Memory: `Tiles`. q^ overwrites q, k^ overwrites k. Outputs leave through the tile of q^, and what q^ lost is in the tile of the
gates, unless `Scan.has_output_tile` and `Scan.lost_stages` say that they have tiles of their own. Who waits for whom, in a scan
with outputs, K = 128 and 128 columns; a line that ends in full names the roles whose copies have arrived, and the warpgroups of
*scale* meet at every chunk to agree whether it is in range (met), and once before the first chunk (prepared):

    waits          for            until
    scale          output, carry  tokens full: q, k, v
    carry          output, carry  tokens free
    scale          output, scale  gates full: gates
    scale          scale          gates free
    output, carry  scale          scaled full
    scale          scale          met
    scale          scale          prepared
    output         carry          state stored
    carry          output         state read

Other plans differ: with `Scan.has_lost_tiles`, *scale* waits for *output* until `lost free`, and *output* for *scale* until
`prepared`; with `Scan.pads_columns`, *carry* waits for itself until `token full`.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, WARPGROUP, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Names, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    C,
    by_column,
    by_row,
    decayed,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import LOG_OF_RESET, ROWS, Scan, ScanResults, program_indices, span
from glax._src.kernels.pallas_gpu.scan import exact
from glax._src.kernels.pallas_gpu.scan.key_scale import scale_segment

BF16 = jnp.bfloat16

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands in global memory: the table of E segments, the tokens of N sequences, gates, and the
    states that enter. Each field's comment has its shape."""

    table: Ref  # [E, 4] or [E, H, 5]; [E, 7] or [E, H, 7] of a plan that clears rows
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]; q in an adjoint scan
    v: Ref  # [B, T, HV, V]; d_output in an adjoint scan
    gates: tuple[Ref, ...]  # the terms, [B, T, H, K] each
    scale: Ref  # [N + 1], the last unused
    start: Ref  # [E, H, K, V]
    known_out_of_range: Ref  # [B, chunks, H]; `scale` where it is not read
    newest: Ref = None  # [B, chunks, C], of a plan with resets: `rows.newest_resets`
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that adds the gradients of the states of `states_every`


class Results(NamedTuple):
    """Hold references to the results in global memory. A result that the plan leaves out has one tile or one number."""

    o: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, K, V]
    last: Ref  # [N or E, H, K, V]
    log: Ref  # [E, H, K]
    out_of_range: Ref  # [B, chunks, H]: 1 where the gates of a chunk are out of range
    by_group: Ref  # `exact.shape_of_flags`: the same at `exact.place_of_item`
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that stores the states of `states_every`

    @classmethod
    def types(cls, w: Scan, B: int, T: int, E: int) -> "Results":
        """Return the shapes and dtypes of the results of plan w. T: the number of rows of q, k and v. E: the number of
        segments."""
        rows = w.rows_of_chunks(T)
        H, K, chunks = w.H, w.K, -(-rows // C)
        return cls(
            *w.results(B, rows, E),
            log=jax.ShapeDtypeStruct((E, H, K) if w.two_way else (1,), jnp.float32),
            out_of_range=jax.ShapeDtypeStruct((B, chunks, H) if w.states and not w.to_edge else (1,), jnp.int32),
            by_group=jax.ShapeDtypeStruct(exact.shape_of_flags(B * chunks * H) if w.outputs else (1,), jnp.int32),
            behind=w.behind_type(B) if w.stores_behind else None,
        )


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. A tile that the plan does not use has the smallest size. Each field's
    comment has its shape."""

    q: Ref  # [stages, C, K]: q, then q^, then without a tile of their own the outputs
    k: Ref  # [stages, C, K]: then k^
    v: Ref  # [stages, C, columns]
    gates: Ref  # [2 terms, C, K]: log gates, then without tiles of its own what q^ lost
    lost: Ref  # [lost_stages, C, K]: what q^ lost when it was rounded
    state: Ref  # [K, columns], or without outputs [state_stages, consumers, K, 64]: S'
    output: Ref  # [C, columns]; None with resets where it is not used
    sums: Ref  # [stages, 2, K]: log decays by channel: of a chunk's first half and its second
    own_scores: Ref  # [stages, scalers, C]: every token's score with itself, by half of K
    halves: Ref  # [C, C]: the matrix that sums gates over each half of a chunk
    weak: Ref  # [1]: 1 where the gates of the program are weak on average; with `token` the last of `out_of_range`
    out_of_range: Ref  # [stages]: 1 where the gates of a chunk are out of range
    newest: Ref = None  # [stages, C], of a plan with resets
    # [1 or consumers, K + columns], where fewer are in memory: k and v of one token, for each warpgroup that carries
    token: Ref = None

    @classmethod
    def types(cls, w: Scan) -> "Tiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        K, columns, W, scalers = w.K, w.columns, w.consumers, w.scalers
        tiled = functools.partial(tiles.tiled, columns=w.tile)
        stages, lost_stages, state_stages = w.stages, w.lost_stages, w.state_stages
        output: Ref = tiled(C, columns) if w.has_output_tile else tiled(8, 64)
        if (w.resets or w.pads_columns) and not w.has_output_tile:
            output = None  # `newest` or `token` has its place
        return cls(
            q=tiled(stages, C, K) if w.outputs else tiled(1, C, 64),
            k=tiled(stages, C, K),
            v=tiled(stages, C, columns),
            gates=tiled(2 * w.terms, C, K),
            lost=tiled(lost_stages, C, K) if lost_stages else None,
            state=tiled(K, columns) if w.outputs else tiled(state_stages, W, K, 64),
            output=output,
            sums=plgpu.SMEM((stages, 2, K), jnp.float32),
            own_scores=plgpu.SMEM((stages, scalers, C), jnp.float32),
            halves=tiled(C, C),
            weak=None if w.pads_columns else plgpu.SMEM((1,), jnp.int32),
            out_of_range=plgpu.SMEM((stages + bool(w.pads_columns),), jnp.int32),
            newest=plgpu.SMEM((stages, C), jnp.int32) if w.resets else None,
            token=plgpu.SMEM((w.carriers, K + columns // w.carriers), BF16) if w.pads_columns else None,
        )


def roles_of(w: Scan) -> dict[str, int]:
    """Return the number of warpgroups of each role in a program of plan w. The order of the dict is the order of the
    warpgroups."""
    return dict(output=1, carry=1, scale=w.scalers) if w.outputs else dict(carry=w.consumers, scale=w.scalers)


@dataclasses.dataclass(frozen=True)
class KeyPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    tokens: the ring of q, k, v and resets of a chunk. gates: the ring of its gates. scaled: the ring of q^, k^, the sums and
    the tokens' own scores. lost: the ring of what q^ lost in rounding, if that has tiles of its own, else None. met: all
    warpgroups of *scale* have arrived. prepared: `Tiles.halves` and `Tiles.weak` are stored. state: the handoff of S'. token:
    the ring of k and v of one token, if memory has fewer columns than the tiles, else None; *carry* waits for its own copies.
    """

    tokens: Ring
    gates: Ring
    scaled: Ring
    lost: Ring | None
    met: Meeting
    prepared: Meeting
    state: Handoff
    token: Ring | None

    ORDER: ClassVar[Names] = (
        *("tokens.full", "gates.full", "scaled.full", "tokens.free", "gates.free", "lost.free"),
        *("met.all_there", "prepared.all_there", "state.full", "state.free", "token.full"),
    )

    @classmethod
    def planned(cls, w: Scan) -> "KeyPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch."""
        consumers, scale = ("output", "carry"), ("scale",)
        copies = *("q",) * w.outputs, "k", "v", *("newest",) * w.resets
        # Where what q^ lost lies in the tile of the gates, *output* reads that tile last, and loads the next.
        fill_gates = scale if w.lost_stages else ("output", "scale")
        return cls(
            tokens=Ring(w.stages, consumers, scale, copies, released_by=consumers, acquired_by=("carry",)),
            gates=Ring(2, fill_gates, scale, ("gates",) * w.terms, acquired_by=scale),
            scaled=Ring(w.stages, scale, consumers, released_by=()),
            lost=Ring(w.lost_stages, (), ("output",), acquired_by=scale) if w.lost_stages else None,
            met=Meeting(scale),
            prepared=Meeting(scale, waiting=(*scale, *("output",) * w.has_lost_tiles)),
            state=Handoff(("carry",), ("output",)),
            token=Ring(w.carriers, ("carry",), ("carry",), ("k", "v"), released_by=()) if w.pads_columns else None,
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program. warpgroup: the index of the calling warpgroup. adjoint: 0, or 1 in a
    scan of dL/dS; traced in a `two_way` scan.

    The methods take `step`, the number of a chunk in scan order from 0, and `slot`, the index of the tiles that hold the chunk.
    """

    plan: Scan
    operands: Operands
    results: Results
    tiles: Tiles
    pipeline: KeyPipeline
    warpgroup: Any
    adjoint: Any

    @classmethod
    def of(cls, plan: Scan, *refs) -> "Program":
        """Return the program that the calling warpgroup belongs to. refs: the operands, the results, the tiles and the
        pipeline."""
        p = cls(plan, *refs, lax.axis_index(WARPGROUP), int(plan.adjoint))
        if plan.pads_columns:
            weak = p.tiles.out_of_range.at[pl.ds(plan.stages, 1)]
            p = dataclasses.replace(p, tiles=p.tiles._replace(weak=weak))
        return dataclasses.replace(p, adjoint=p.segment_field(4)) if plan.two_way else p

    def place(self):
        """Return the indices (block of columns, head, segment) of the program.

        These and the fields of the table are computed at each use, because the compiler would spill values that all warpgroups
        hold throughout.
        """
        program = lax.optimization_barrier(lax.axis_index(PROGRAM))
        return program_indices(program, self.plan.V // self.plan.columns, self.plan.H)

    def segment_field(self, column: int):
        """Return the entry of the table in the segment's row and the given column."""
        _, h, e = self.place()
        return self.operands.table[(e, h, column) if self.plan.two_way else (e, column)]

    def count(self):
        """Return the number of chunks of the segment."""
        return self.segment_field(2)

    def hidden(self, x):
        """Return the number x behind a barrier, so that the compiler does not know its value.

        ptxas 13.0 writes a matrix that it knows to be constant only between the two products that read it. At the first chunk
        of a scan the first product then reads registers that nothing has written.
        """
        return jnp.where(self.count() >= 0, x, 0.5)

    def chunk(self, step):
        """Return the index of the chunk that the scan reaches at a step, counted as the chunks of o and of the states."""
        return self.segment_field(1) + self.plan.chunk_at(step, self.count(), self.adjoint)

    def row(self, step):
        """Return the row of q, k, v and gates at which a step's chunk begins."""
        if not self.plan.packed:
            return self.chunk(step) * C
        return self.segment_field(4) * ROWS + self.plan.chunk_at(step, self.count(), self.adjoint) * C

    def own_rows(self):
        """Return (the row of q, k, v and gates at which the segment begins, the row behind its last). Rows without a token at
        either end are left out in a plan that clears rows."""
        if self.plan.packed:
            return self.segment_field(5), self.segment_field(6)
        first = self.segment_field(1)
        begin, end = first * C, (first + self.count()) * C
        if self.plan.bounded:
            return jnp.maximum(begin, self.segment_field(5)), jnp.minimum(end, self.segment_field(6))
        return begin, jnp.minimum(end, self.operands.k.shape[1])

    def tokens(self, x, step, head, *columns):
        """Return the reference [C, ...] to a step's rows of x [B, T, heads, ...] in global memory. head: the head of x.
        columns: a slice of the last axis."""
        return x.at[(self.segment_field(0), pl.ds(self.row(step), C), head, *columns)]

    def of_keys(self, x):
        """Return the index of the head of x [B, T, heads, K] that the program reads."""
        return self.plan.blocks.of_keys(self.place()[1], self.plan.H, x.shape[2])

    def of_values(self, x):
        """Return the index of the head of x [B, T, heads, V] that the program reads."""
        return self.plan.blocks.of_values(self.place()[1], self.plan.H, x.shape[2])

    def load_gates(self, step, slot):
        """Start to load the terms of a step's gates, [C, K] each, into the tiles of `slot`, 0 or 1."""
        for term in range(self.plan.terms):
            tile = self.tiles.gates.at[slot * self.plan.terms + term]
            gates = self.operands.gates[term]
            self.pipeline.gates.copy(self.tokens(gates, step, self.of_keys(gates), self.plan.channels), tile, slot)

    def load(self, step, slot):
        """Start to load k [C, K], the program's columns of v, [C, columns], and with resets `newest` [C] of a step into the
        tiles of `slot`."""
        ring, k, v = self.pipeline.tokens, self.operands.k, self.operands.v
        ring.copy(self.tokens(k, step, self.of_keys(k), self.plan.channels), self.tiles.k.at[slot], slot)
        columns = span(self.place()[0] * self.plan.columns, self.plan.columns, v.shape[3])
        ring.copy(self.tokens(v, step, self.of_values(v), columns), self.tiles.v.at[slot], slot)
        if self.plan.resets:
            newest = self.operands.newest.at[self.segment_field(0), self.chunk(step)]
            ring.copy(newest, self.tiles.newest.at[slot], slot)

    def has_reset(self, slot):
        """Return whether the chunk in `slot` contains a reset, which no state passes."""
        return self.tiles.newest[slot, self.plan.last_token] >= 0

    def load_first(self, load):
        """Call load(step, slot) for the first chunks, as many as shared memory holds."""
        for slot in range(self.plan.stages):
            pl.when(slot < self.count())(functools.partial(load, slot, slot))

    def load_next(self, step):
        """Start to load a chunk into the tiles that held the chunk of step - 1, once every warpgroup has read these. Do nothing
        at step 0, and where no chunk is left."""
        stages, slot = self.plan.stages, self.pipeline.tokens.slot(step - 1)

        @pl.when((step > 0) & (step - 1 + stages < self.count()))
        def _():
            self.pipeline.tokens.acquire(slot)
            self.load(step - 1 + stages, slot)


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def key_scan(
    w: Scan, table, q, k, v, g, scale, start, known_out_of_range=None, behind=None, newest=None
) -> ScanResults:  # fmt: skip
    """Scan every segment of `table` with per-key gates. Return `ScanResults`.

    table: [E, 4], the batch row, first chunk, number of chunks and sequence (for `scale`) of every segment; [E, H, 5] for
    `two_way`, whose fifth column is 1 against time. If packed, the table is [E, 7]: also the first row of the segment's first
    chunk in q, k, v and g, divided by 8; the segment's first row; and the row behind its last. If bounded, it is [E, 7] or
    [E, H, 7]: the last two columns are the row of the first token and the row behind the last, and the fifth is used by
    `two_way` alone.
    q, k, v: [B, T, heads, K or V]; of an adjoint plan q and d_output in the places of k and v. scale: [N + 1], the last unused.
    g: the terms of the gates, [B, T, H, K] in bfloat16 each. start: [E, H, K, V] in float32.
    known_out_of_range: [B, chunks, H], `out_of_range` of the forward's `ScanResults`, which the scan of dL/dS reads.
    behind: [B, num_behind, H, K, V] in float32, the gradients of the states of `states_every`, for a plan that
        adds them.
    newest: [B, chunks, C], the result of `newest_resets`, for a plan with resets.
    """

    def body(*refs):
        p = Program.of(w, *refs)
        pl.when(p.warpgroup >= w.consumers)(acting_as("scale")(functools.partial(scale_segment, p)))

        @pl.when(p.warpgroup < w.consumers)
        def _():
            if w.outputs:
                output, carry = functools.partial(write_outputs, p), functools.partial(carry_shared_state, p)
                lax.cond(p.warpgroup == 0, acting_as("output")(output), acting_as("carry")(carry))
            else:
                acting_as("carry")(carry_own_columns)(p)

    E = table.shape[0]
    known = scale if known_out_of_range is None else known_out_of_range
    newest, behind = newest if w.resets else None, behind if w.adds_behind else None
    found = launch(
        "key_scan",
        w,
        body,
        Operands(table, q, k, v, tuple(g), scale, start, known, newest, behind),
        Results.types(w, *k.shape[:2], E),
        (Tiles.types(w),),
        roles_of(w),
        KeyPipeline.planned(w),
        programs=w.V // w.columns * w.H * E,
    )
    o = exact.exact_outputs(w, table, found.by_group, q, k, v, g, scale, found.o, newest) if w.outputs else found.o
    log, out_of_range = found.log if w.two_way else None, None if w.to_edge else found.out_of_range
    return ScanResults(o, found.states, found.last, log, out_of_range, found.behind)


def carry_own_columns(p: Program):
    """Carry 64 columns of the state, as one of the *carry* warpgroups of a scan without outputs. Each has columns of its
    own."""
    columns = span((p.place()[0] * p.plan.consumers + p.warpgroup) * 64, 64, p.plan.in_memory[1])
    pl.when(p.warpgroup == 0)(lambda: p.load_first(p.load))
    carry_state(p, columns, advance_own_columns)


def carry_shared_state(p: Program):
    """Do the work of *carry* in a scan with outputs: carry all columns of the program, and store S' of each chunk for
    *output*."""
    columns = span(p.place()[0] * p.plan.columns, p.plan.columns, p.plan.in_memory[1])
    p.load_first(p.load)
    carry_state(p, columns, advance_shared_state)


def advance_own_columns(p: Program, columns, S, step, slot, decay_behind):
    """Return decay_behind(S) + sum_j k^_j v_j^T, [K, columns] in float32. Store S if the plan stores states.

    S: S' of the chunk. columns: a slice of V. slot: the slot of the step's chunk. decay_behind: a function that decays S' to
    the edge by which the scan leaves the chunk.
    """
    w, me = p.plan, p.warpgroup
    pl.when(me == 0)(lambda: p.load_next(step))
    if w.states:
        store_state(p, S, step, p.tiles.state.at[lax.rem(step, jnp.int32(w.state_stages)), me], columns)
    S = decay_behind(S)
    S = tiles.added(S, (transposed(p.tiles.k.at[slot]), p.tiles.v.at[slot, :, pl.ds(me * 64, 64)]))
    p.pipeline.tokens.release(slot)
    return S


def advance_shared_state(p: Program, columns, S, step, slot, decay_behind):
    """Return decay_behind(S) + sum_j k^_j v_j^T, [K, columns] in float32, and store S for *output*, which reads it before the
    next is stored.

    S: S' of the chunk. columns: a slice of V. slot: the slot of the step's chunk. decay_behind: a function that decays S' to
    the edge by which the scan leaves the chunk.
    """
    pl.when(step > 0)(functools.partial(wait_for_outputs, p, step - 1))
    store_state(p, S, step, p.tiles.state, columns)
    p.pipeline.state.stored()
    p.load_next(step)

    def with_tokens(S):
        return tiles.added(S, (transposed(p.tiles.k.at[slot]), p.tiles.v.at[slot]))

    if p.plan.resets:
        S = lax.cond(
            p.has_reset(slot), functools.partial(begin_anew, p, slot), lambda S: with_tokens(decay_behind(S)), S
        )
    else:
        S = with_tokens(decay_behind(S))
    p.pipeline.tokens.release(slot)
    return S


def wait_for_outputs(p: Program, step):
    """Wait until *output* has read the state S' of a step. Where the step's chunk contains a reset, `begin_anew` has waited."""
    if not p.plan.resets:
        p.pipeline.state.acquire()
        return
    has_reset = p.has_reset(lax.rem(step, jnp.int32(p.plan.stages)))  # its tiles are not loaded again before this wait
    pl.when(jnp.logical_not(has_reset))(lambda: p.pipeline.state.acquire())


def begin_anew(p: Program, slot, S):
    """Return the state behind a chunk that contains a reset, [K, columns], formed only from the tokens from the newest reset
    on.

    First wait until *output*, which reads all of k^, has formed the chunk's outputs. Then clear the other rows of k^ in their
    tile. slot: the slot of the chunk. S: gives the shape only.
    """
    p.pipeline.state.acquire()
    slot = lax.optimization_barrier(slot)
    before = p.tiles.newest[slot, p.plan.last_token]
    first, end = (0, C - before) if p.plan.reverse else (before, C)
    tiles.clear([p.tiles.k.at[slot, :, pl.ds(i * 64, 64)] for i in range(p.plan.scalers)], first, end)
    return tiles.added(zeros(S.shape), (transposed(p.tiles.k.at[slot]), p.tiles.v.at[slot]))


def carry_state(p: Program, columns, advance):
    """Carry the state [K, columns] in registers in float32 through all chunks, and store the last in global memory.

    columns: a slice of V. advance: `advance_own_columns` or `advance_shared_state`.
    """
    w = p.plan
    plgpu.set_max_registers(w.registers[1], action="increase")

    def scaled(step):
        slot = p.pipeline.tokens.slot(step)
        p.pipeline.scaled.wait(slot)
        return slot

    def log_decay(slot, place):
        return plgpu.load(p.tiles.sums.at[slot, place], layout=BY_ROW)

    def scan_to_edge(step, S):
        slot = scaled(step)
        if w.adds_behind:
            S = add_behind(p, columns, S, step)
        before, behind = log_decay(slot, 0), log_decay(slot, 1)
        if w.resets:  # no state passes
            log = LOG_OF_RESET * p.has_reset(slot).astype(jnp.float32)
            before, behind = (before, behind + log) if w.states else (before + log, behind)
        if not w.states:
            return advance(p, columns, S, step, slot, lambda S: decayed(S, before))
        return advance(p, columns, decayed(S, before), step, slot, lambda S: decayed(S, behind))

    def scan_to_middle(step, carry):
        S, tail = carry
        slot = scaled(step)
        out_of_range = p.tiles.out_of_range[slot]
        # S' of a chunk out of range is the state that enters it, and is decayed to the chunk's end here.
        in_range = 1.0 - out_of_range.astype(jnp.float32)
        before, behind = log_decay(slot, 0) * in_range, log_decay(slot, 1) * in_range

        def decay_through(S):
            return decayed(S, log_decay(slot, 0) + log_decay(slot, 1))

        def decay_behind(S):
            S = lax.cond(out_of_range > 0, decay_through, lambda S: S, S)
            if w.resets and not w.outputs:
                S = lax.cond(p.has_reset(slot), lambda S: zeros(S.shape), lambda S: S, S)
            return S

        # Never e^{tail + before}, which may be e^-120 = 0 where S is up to e^60 (`common.limits`).
        S = advance(p, columns, decayed(decayed(S, tail), before), step, slot, decay_behind)
        note_range(p, step, out_of_range)
        return store_behind(p, columns, S, behind, step) if w.stores_behind else (S, behind)

    S = zeros((w.K, columns.size))
    if w.start:
        start = p.operands.start.at[p.place()[2], p.place()[1], :, columns]
        S = plgpu.load(start, layout=tiles.WGMMA, optimized=False)
    if w.to_edge:
        S, tail = lax.fori_loop(0, p.count(), scan_to_edge, S), None
    else:
        S, tail = lax.fori_loop(0, p.count(), scan_to_middle, (S, zeros((w.K,), BY_ROW)))
    if w.states:  # not after the branch: its barrier's number would be held throughout, and spilled
        plgpu.wait_smem_to_gmem(0)
    w.leave(p.place()[2], functools.partial(store_last, p, columns, S, tail))


def state_behind(p: Program, step):
    """Return the index of the state of `states_every` that follows a step's chunk, and whether such a state exists."""
    chunks = -(-p.operands.k.shape[1] // C)
    return p.plan.state_behind(p.chunk(step), chunks)


def store_behind(p: Program, columns, S, tail, step):
    """Store e^tail S in global memory if `states_every` asks for the state behind a step's chunk, and return (e^tail S, 0);
    else return (S, tail).

    S: [K, columns]. columns: a slice of V. tail: [K], a log decay that is not applied yet.
    """
    _, is_one = state_behind(p, step)

    def stored():
        T, again = p.operands.k.shape[1], lax.optimization_barrier(step)
        index, _ = state_behind(p, again)
        token = p.chunk(again) * C + p.plan.last_token
        found = lax.optimization_barrier(decayed(S, tail))
        found += lost_in_rounding(p, tail, columns, jnp.minimum(token, T - 1))
        found = lax.optimization_barrier(found)
        p.results.behind[p.segment_field(0), index, p.place()[1], :, columns] = found
        return found, zeros((p.plan.K,), BY_ROW)

    return lax.cond(is_one, stored, lambda: (S, tail))


def add_behind(p: Program, columns, S, step):
    """Return S plus the gradient of the state that `states_every` stores behind a step's chunk; S if none is stored there.

    S, in registers: the columns `columns`, a slice of V, of dL/dS behind the chunk, in a scan of gradients. step: the index of
    the chunk in the order of the scan.
    """
    index, is_one = state_behind(p, step)

    def added(S):
        place = p.operands.behind.at[p.segment_field(0), index, p.place()[1], :, columns]
        return S + plgpu.load(place, layout=tiles.WGMMA, optimized=False)

    return lax.cond(is_one, added, lambda S: S, S)


def note_range(p: Program, step, flag):
    """Write to global memory whether a step's chunk is out of range. flag: 1 if it is, else 0. Of the programs and warpgroups
    that share the chunk and head, one writes."""
    w, (block, head) = p.plan, p.place()[:2]

    @pl.when((block == 0) & (p.warpgroup == (1 if w.outputs else 0)))
    def _():
        batch, chunk = p.segment_field(0), p.chunk(step)
        if w.states:
            p.results.out_of_range[batch, chunk, head] = flag
        if w.outputs:
            chunks = -(-w.rows_of_chunks(p.operands.k.shape[1]) // C)
            item = (batch * chunks + chunk) * w.H + head
            p.results.by_group[exact.place_of_item(p.results.by_group.shape[0], item)] = flag


def store_state(p: Program, S, step, tile, columns):
    """Store S' [K, columns] in `tile` in bfloat16. In a scan that stores states, first wait until earlier copies have read
    `tile`, and then start to copy `tile` to global memory. columns: a slice of V."""
    if p.plan.states:
        plgpu.wait_smem_to_gmem(p.plan.state_stages - 1, wait_read_only=True)
    tile[...] = S.astype(BF16)
    plgpu.commit_smem()
    if p.plan.states:
        target = p.results.states.at[p.segment_field(0), p.chunk(step), p.place()[1], p.plan.channels, columns]
        plgpu.copy_smem_to_gmem(tile, target)


def store_last(p: Program, columns, S, tail, at):
    """Store S, or e^tail S, in global memory as the state behind the segment.

    columns: a slice of V. tail: [K], the log decay of the segment's last half chunk, or None. at: the first index of the result
    `last`.
    """

    def with_last_token(S):
        first, end = p.own_rows()
        token = jnp.clip(first if p.plan.reverse else end - 1, 0, p.operands.k.shape[1] - 1)
        return decayed(S, tail) + lost_in_rounding(p, tail, columns, token)

    if tail is not None:
        # A packed sequence without tokens must not read a row: it may hold anything.
        S = lax.cond(has_tokens(p), with_last_token, lambda S: S, S) if p.plan.clears else with_last_token(S)
    p.results.last[at, p.place()[1], :, columns] = S


def has_tokens(p: Program):
    """Return whether the program's segment has a token. Only for plans that clear rows."""
    if p.plan.packed:
        return p.count() > 0
    first, end = p.own_rows()
    return first < end


def lost_in_rounding(p: Program, tail, columns, token):
    """Return (k_j - e^tail bf16(e^{-tail} k_j)) v_j^T, [K, columns]: what the last token j of a chunk lost when it was scaled
    and rounded.

    Where gates are strong, this token is most of the state. tail: [K], the log decay that is not applied yet. columns: a slice
    of V. token: the row of token j in k and v. The result is 0 for a segment without chunks.
    """
    w, find = p.plan, copied_token if p.plan.pads_columns else token_in_memory
    k, v = (
        plgpu.load(x, layout=layout, optimized=False)
        for x, layout in zip(find(p, columns, token), (BY_ROW, BY_COLUMN), strict=True)
    )
    k = k.astype(jnp.float32)
    rounded = (k * jnp.exp2(-tail * LOG2E)).astype(BF16).astype(jnp.float32)
    # [K]
    left = (k - rounded * jnp.exp2(tail * LOG2E)) * jnp.where(p.count() > 0, 1.0, 0.0)
    shape = w.K, columns.size
    return by_row(left, shape) * tiles.by_column(v, shape).astype(jnp.float32)


def token_in_memory(p: Program, columns, token):
    """Return references to k [K] and to v [columns] of one token in global memory. columns: a slice of V. token: its row in k
    and v."""
    place, (keys, values) = (p.segment_field(0), token), (p.operands.k, p.operands.v)
    return keys.at[(*place, p.of_keys(keys), p.plan.channels)], values.at[(*place, p.of_values(values), columns)]


def copied_token(p: Program, columns, token):
    """Copy k [K] and v [columns] of one token to shared memory, wait, and return references to both. Columns that memory does
    not have are 0.

    columns: a slice of V. token: the row in k and v.
    """
    w, ring = p.plan, p.pipeline.token
    assert ring is not None  # as in every plan that pads columns
    mine = 0 if w.outputs else p.warpgroup
    found = [p.tiles.token.at[mine, pl.ds(0, w.K)], p.tiles.token.at[mine, pl.ds(w.K, columns.size)]]
    plgpu.commit_smem()  # all warps have read the token before
    for source, tile in zip(token_in_memory(p, columns, token), found, strict=True):
        ring.copy(source, tile, mine)
    ring.wait(mine)
    return found


@dataclasses.dataclass(frozen=True)
class OutputWarpgroup:
    """Hold what the role *output* of one program reads throughout.

    i, j: [C, C] in int32, the positions in scan order of rows and columns. scale: the sequence's scale, float32. total: the
    number of chunks. known: batch row and first chunk, or None where registers have no room for them. block: the index of the
    program's columns. head: the head.
    """

    p: Program
    i: Any
    j: Any
    scale: Any
    total: Any
    known: tuple | None
    block: Any
    head: Any

    def tokens(self, x, step, head, *columns):
        """Return the reference [C, ...] to a step's rows of one head of x [B, rows of chunks, heads, ...] in global memory.

        `Program.tokens` would compute the indices again. That costs time here, because all warpgroups wait for this one.
        columns: a slice of the last axis.
        """
        batch, first = self.known or (self.p.segment_field(0), self.p.segment_field(1))
        return x.at[(batch, pl.ds((first + self.p.plan.chunk_at(step, self.total)) * C, C), head, *columns)]

    def load_q(self, step, slot):
        """Start to load q [C, K] of a step into the tile of `slot`."""
        q, w = self.p.operands.q, self.p.plan
        tokens = self.p.tokens if w.packed else self.tokens
        source = tokens(q, step, w.blocks.of_keys(self.head, w.H, q.shape[2]), self.p.plan.channels)
        self.p.pipeline.tokens.copy(source, self.p.tiles.q.at[slot], slot)


def write_outputs(p: Program):
    """Do the work of the role *output*: form o = scale (q^ S' + P v) of every chunk, [C, columns] in bfloat16.

    o is sent from the tile of q where there is no room for a tile of its own.
    """
    w = p.plan
    plgpu.set_max_registers(w.registers[1], action="increase")
    i, j = tiles.positions(w.reverse)
    scale, total = p.operands.scale[p.segment_field(3)], p.count()
    known = None if w.states and w.start else (p.segment_field(0), p.segment_field(1))
    block, head = p.place()[:2]
    o = OutputWarpgroup(p, i, j, scale, total, known, block, head)
    p.load_first(o.load_q)

    if not w.has_lost_tiles:
        pl.loop(0, total)(functools.partial(write_chunk, o, None))
    else:
        p.pipeline.prepared.wait()
        # A loop for each, because a product behind a branch waits for those before it.
        for weak in (False, True):

            @pl.when((p.tiles.weak[0] > 0) == weak)
            def _(weak=weak):
                pl.loop(0, total)(functools.partial(write_chunk, o, weak))

    plgpu.wait_smem_to_gmem(0)


def write_chunk(o: OutputWarpgroup, weak: bool | None, step):
    """Form the outputs of a step's chunk, [C, columns], and start to send them to global memory in bfloat16.

    P [C, C] has the scores q^_i . k^_j of tokens j before i, and own scores on its diagonal. It is 0 in a chunk out of range.
    weak: whether q^ has two terms. If None, `Tiles.weak` says so at run time: registers then have no room for all products
    together.
    """
    p, w = o.p, o.p.plan
    stages, total = w.stages, o.total
    slot = p.pipeline.tokens.slot(step)
    q = p.tiles.q.at[slot]
    k, v = p.tiles.k.at[slot], p.tiles.v.at[slot]
    p.pipeline.scaled.wait(slot)
    traced = None if w.has_lost_tiles else p.tiles.weak[0] > 0
    out_of_range = p.tiles.out_of_range[slot]
    # [C]
    own = sum(plgpu.load(p.tiles.own_scores.at[slot, share], layout=BY_ROW) for share in range(w.scalers))
    # No score where the chunk is out of range: neither is i - C > j nor i + C == j. `exact_outputs` adds what they draw.
    later, same = o.i - out_of_range * C, o.i + out_of_range * C
    lost_slot = lax.rem(step, jnp.int32(2))
    terms = (q, p.tiles.lost.at[lost_slot]) if weak else (q,)

    def formed(scores, output):
        """Form the scores, mask them, and split them in two terms, while q^ S' is computed. Return the outputs before their
        scale, [C, columns].

        scores, output: accumulators [C, C] and [C, columns].
        """
        for x in terms:
            plgpu.wgmma(scores, x, transposed(k))
        if w.resets:
            pl.when(p.has_reset(slot))(functools.partial(divide_from_state, p, step))
        p.pipeline.state.wait()
        for x in terms:
            plgpu.wgmma(output, x, p.tiles.state)
        # [C, C]
        P = tiles.after(scores, len(terms))
        if not w.has_lost_tiles:
            P = add_lost(p, step, traced, P, lambda slot: transposed(p.tiles.k.at[slot]))
        if w.resets:
            P = lax.cond(p.has_reset(slot), functools.partial(divide_scores, p, step), lambda P: P, P)
        P = jnp.where(later > o.j, P, jnp.where(same == o.j, by_row(own, P.shape), 0.0))
        high = tiles.high_part(P)
        plgpu.wgmma(output, high.astype(BF16), v)
        plgpu.wgmma(output, (P - high).astype(BF16), v)
        return output[...]

    # [C, columns]
    output = pl.run_scoped(formed, plgpu.ACC((C, C)), plgpu.ACC((C, w.columns)))
    p.pipeline.tokens.release(slot)
    if w.has_lost_tiles:
        p.pipeline.state.release()
    if weak and p.pipeline.lost is not None:
        p.pipeline.lost.release(lost_slot)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and all warps are done with this tile of q^
    if w.has_lost_tiles:
        pl.when(step + stages < total)(lambda: o.load_q(step + stages, slot))
    else:  # this chunk's tile of q is about to hold the outputs

        @pl.when((step > 0) & (step - 1 + stages < total))
        def _():
            o.load_q(step - 1 + stages, p.pipeline.tokens.slot(step - 1))

        if w.resets:
            pl.when(traced & p.has_reset(slot))(functools.partial(divide_lost_from_state, p, step))
        output = add_lost(p, step, traced, output, lambda slot: p.tiles.state)
        p.pipeline.state.release()

        @pl.when(traced & (step + 2 < total))
        def _():
            plgpu.commit_smem()  # all warps are done with what q^ lost
            p.load_gates(step + 2, lost_slot)

    tile = p.tiles.output if w.has_output_tile else q
    tile[...] = (output * o.scale).astype(BF16)
    plgpu.commit_smem()
    columns = span(o.block * w.columns, w.columns, w.in_memory[1])
    plgpu.copy_smem_to_gmem(tile, o.tokens(p.results.o, step, o.head, columns))


def newest_resets(p: Program, step, layout: Any = BY_ROW):
    """Load the newest reset of every token of a step's chunk, [C], from shared memory into registers. See `rows.newest_resets`.

    The slot is computed again, because the compiler would hold it.
    """
    slot = p.pipeline.tokens.slot(lax.optimization_barrier(step))
    return plgpu.load(p.tiles.newest.at[slot], layout=layout, optimized=False)


def divide_scores(p: Program, step, P):
    """Return the scores P [C, C] of a step's chunk with 0 for pairs whose tokens have different newest resets.

    Positions are not compared, because the compiler would hold the positions of all columns.
    """
    return jnp.where(
        by_row(newest_resets(p, step), P.shape) == by_column(newest_resets(p, step, BY_COLUMN), P.shape), P, 0.0
    )


def divide_from_state(p: Program, step):
    """Zero the rows of q^ in their tile that have a reset at or before them, because no state reaches them. First wait until
    the scores are formed from q^."""
    plgpu.wgmma_wait(0)
    slot = p.pipeline.tokens.slot(lax.optimization_barrier(step))
    clear_behind_resets(p, step, p.tiles.q.at[slot])


def divide_lost_from_state(p: Program, step):
    """Zero the rows of the second term of q^, in the tile of the gates, that have a reset at or before them. No state reaches
    these."""
    clear_behind_resets(p, step, p.tiles.gates.at[lax.rem(lax.optimization_barrier(step), jnp.int32(2)) * p.plan.terms])


def clear_behind_resets(p: Program, step, tile):
    """Zero the rows of a step's tile [C, K] that have a reset at or before them."""
    plgpu.commit_smem()  # all warps have read the tile
    for share in range(p.plan.scalers):
        part = tile.at[:, pl.ds(share * 64, 64)]
        x = plgpu.load(part, layout=tiles.WGMMA)
        part[...] = jnp.where(by_row(newest_resets(p, step), x.shape) < 0, x, BF16(0))
    plgpu.commit_smem()


def add_lost(p: Program, step, weak, total, right):
    """Return total + (what q^ lost in rounding) @ right(slot), in float32, if gates are weak; else total.

    weak: a traced bool. right: a function that returns the right operand of the product in shared memory, for the slot of the
    step. The slots are computed again, because the compiler would spill the slots of both products.
    """

    def added(total):
        here = lax.optimization_barrier(step)
        lost = p.tiles.gates.at[lax.rem(here, jnp.int32(2)) * p.plan.terms]
        return tiles.added(total, (lost, right(lax.rem(here, jnp.int32(p.plan.stages)))))

    return lax.cond(weak, added, lambda total: total, total)
