"""Scan with per-head gates: one head to a program (`head_scan`), or two that share queries and keys (`pair_scan`).

G_i is the sum of a chunk's log gates through token i, L the sum of all of them:

    o_i   = scale * (e^{G_i} q_i^T S + sum_{j <= i} (q_i . k_j) e^{G_i - G_j} v_j)
    S_out = e^L S + sum_j k_j (e^{L - G_j} v_j)^T

No exponent is above 0 for gates <= 0, so one form is exact for all gates. A call without gates has gates of 0, and a constant
decay is the gate of every token. Where most of a state passes through a chunk, the errors of rounding e^{L - G_j} v_j to
bfloat16 add up from chunk to chunk. There the value is the sum of two terms. A reverse scan uses two terms already where a 64th
of the state passes, for the gates' gradient.

Roles. A program of `head_scan` has a segment of one sequence, one head, all of K and 64 or 128 columns of the state. Products
read q, k and v as they lie in memory. *load* loads chunks ahead. *carry* has the state in registers, and stores a copy of it
before each chunk. *output* forms scores and outputs from that copy. A scan without outputs has a *carry* for every 64 columns.
A program of `pair_scan` has two heads of 64 columns of V. Both read the same tiles of q and k, and the same scores before their
decay.

Memory: `Tiles` and `PairTiles`, in `Scan.stages` slots of chunks. Who waits for whom, in both kernels with outputs:

    waits          for            until
    output, carry  load           tokens full: gates, k, q, v
    load           output, carry  tokens free
    output         carry          state stored
    carry          output         state read
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, WARPGROUP, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    C,
    by_column,
    by_row,
    read,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, Scan, ScanResults, program_indices, quotient, remainder, span

BF16 = jnp.bfloat16
TWO_TERMS = -1.0, -6.0  # log2 decays of a chunk above which values have two terms, with time and against it
PAIR = range(2)
COLUMNS = 64  # columns of a head of `pair_scan`
VALUES = (C, COLUMNS)

Ref = Any
Pair = tuple[Ref, ...]  # two references, one for each head


class Operands(NamedTuple):
    """Hold references to the operands in global memory: the table of segments, tokens, sums of gates and the states that enter.

    Each field's comment has its shape. E counts segments, and N sequences.
    """

    table: Ref  # [E, 4] or [E, 5]
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]; q in an adjoint scan
    v: Ref  # [B, T, HV, V]; d_output in an adjoint scan
    gates: Ref  # [B, chunks, heads, C]: sums of log2 gates from where the scan enters the chunk
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, K, V]
    # Of a plan with edges: `Edges.block`, and the copies of q, k and v.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, K]
    k_edges: Ref = None  # [B, 3 C, HK, K]
    v_edges: Ref = None  # [B, 3 C, HV, V]
    # Of a plan that adds the gradients of the states of `states_every`.
    behind: Ref = None  # [B, num_behind, H, K, V]

    @classmethod
    def of(cls, w: Scan, *given) -> "Operands":
        """Return the operands by name. given: the operands that the plan w has, in the order of the fields. Absent fields
        become None."""
        count = cls._fields.index("edges")
        edges = given[count : count + 4] if w.edges else (None,) * 4
        return cls(*given[:count], *edges, *given[count + 4 * w.edges :])


class Results(NamedTuple):
    """Hold references to the results in global memory: outputs, stored and final states, log decays of segments, and the states
    of `states_every`.

    Each field's comment has its shape. A result that the plan leaves out has one tile.
    """

    o: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks / run, H, K, V]
    last: Ref  # [N or E, H, K, V]
    log: Ref = None  # [E, H, 1], of `head_scan`
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that stores the states of `states_every`

    @classmethod
    def types(cls, w: Scan, B: int, T: int, E: int) -> "Results":
        """Return the shapes and dtypes of the results of plan w. T: the number of rows of q, k and v. E: the number of
        segments."""
        log = jax.ShapeDtypeStruct((E, w.H, 1), jnp.float32)
        return cls(*w.results(B, w.rows_of_chunks(T), E), log, w.behind_type(B) if w.stores_behind else None)


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. A tile that the plan does not use has the smallest size. Each field's
    comment has its shape."""

    q: Ref  # [stages, C, K]
    k: Ref  # [stages, C, K]
    v: Ref  # [stages, C, columns]
    gates: Ref  # [stages, C]
    state: Ref  # [K, columns], or without outputs [state_stages, consumers, K, 64]
    scaled: Ref  # [C, columns], or without outputs [consumers, C, 64]: the values that are added to the state
    output: Ref  # [C, columns]

    @classmethod
    def types(cls, w: Scan) -> "Tiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        K, stages, columns, W = w.K, w.stages, w.columns, w.consumers
        tiled = functools.partial(tiles.tiled, columns=w.tile)
        return cls(
            q=tiled(stages, C, K) if w.outputs else tiled(1, C, 64),
            k=tiled(stages, C, K),
            v=tiled(stages, C, columns),
            gates=plgpu.SMEM((stages, C), jnp.float32),
            state=tiled(K, columns) if w.outputs else tiled(w.state_stages, W, K, 64),
            scaled=tiled(C, columns) if w.outputs else tiled(W, C, 64),
            output=tiled(C, columns) if w.outputs else tiled(8, 64),
        )


def roles_of(w: Scan) -> dict[str, int]:
    """Return the number of warpgroups of each role in a program of plan w. The order of the dict is the order of the
    warpgroups."""
    return dict(output=1, carry=1, load=1) if w.outputs else dict(carry=w.consumers, load=1)


@dataclasses.dataclass(frozen=True)
class HeadPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel. tokens: the ring of the tiles that *load* fills for a chunk. state:
    the handoff of the state before a chunk from *carry* to *output*."""

    tokens: Ring
    state: Handoff

    @classmethod
    def planned(cls, w: Scan, heads: int = 1) -> "HeadPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch. heads: the heads of a program, 1 or 2."""
        copies = *("gates",) * heads, "k", *("q",) * w.outputs, *("v",) * heads
        return cls(Ring(w.stages, ("load",), ("output", "carry"), copies), Handoff(("carry",), ("output",)))


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program of `head_scan`, and the program's position.

    warpgroup: the index of the calling warpgroup. block: the index of the program's columns of V. h: the head. e: the segment,
    a row of the table. batch: the row of the operands. first: the first chunk of the scan. count: the number of chunks. factor:
    the scale of the sequence. adjoint: 0, or 1 in a scan of dL/dS; traced in a `two_way` scan. two_terms: the log2 decay of a
    chunk above which values have two terms.

    The methods take `step`, the number of a chunk in the order of the scan, from 0.
    """

    plan: Scan
    operands: Operands
    results: Results
    tiles: Tiles
    pipeline: HeadPipeline
    warpgroup: Any
    block: Any
    h: Any
    e: Any
    batch: Any
    first: Any
    count: Any
    factor: Any
    adjoint: Any
    two_terms: Any

    @classmethod
    def of(cls, w: Scan, operands: Operands, *refs) -> "Program":
        """Return the program that the calling warpgroup belongs to. refs: the results, the tiles and the pipeline."""
        program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
        block, h, e = program_indices(program, w.V // w.columns, w.H)
        batch, first, whole, n = (operands.table[e, i] for i in range(4))
        factor = operands.scale[n]
        adjoint: Any = operands.table[e, 4] if w.two_way else int(w.adjoint)
        two_terms = (
            jnp.where(adjoint > 0, *map(jnp.float32, reversed(TWO_TERMS))) if w.two_way else TWO_TERMS[w.adjoint]
        )
        place = warpgroup, block, h, e, batch
        p = cls(w, operands, *refs, *place, first, whole, factor, adjoint, two_terms)
        return p.without_what_ends() if w.lookback else p

    def without_what_ends(self) -> "Program":
        """Return the program without the leading chunks whose tokens decay to 0 before the segment's end.

        The sums of the gates of the last `Scan.lookback` chunks are read from global memory, and decide `first` and `count`.
        """
        w, gates, whole, first = self.plan, self.operands.gates, self.count, self.first
        through, alive, found = 0.0, True, 1
        for i in range(w.lookback):
            place = w.chunk_at(jnp.maximum(whole - 1 - i, 0), jnp.maximum(whole, 1), self.adjoint)
            chunk = jnp.minimum(first + place, gates.shape[1] - 1)
            through += gates[self.batch, chunk, w.blocks.head(self.h), w.last_token]
            alive &= through >= LOG_OF_NOTHING * LOG2E
            found += alive.astype(jnp.int32)
        count = jnp.minimum(jnp.where(alive, whole, found), whole)
        first = jnp.where(self.adjoint == int(w.reverse), first + whole - count, first)
        return dataclasses.replace(self, first=first, count=count)

    @property
    def columns(self):
        """Return the slice of V that holds the program's columns of the state."""
        return span(self.block * self.plan.columns, self.plan.columns, self.plan.in_memory[1])

    def chunk(self, step):
        """Return the index of the chunk that the scan reaches at a step, counted from the first chunk of the row."""
        return self.first + self.plan.chunk_at(step, self.count, self.adjoint)

    def state_behind(self, step):
        """Return the index of the state of `states_every` that follows a step's chunk, and whether such a state exists."""
        return self.plan.state_behind(self.chunk(step), self.operands.gates.shape[1])


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def head_scan(w: Scan, table, q, k, v, G, scale, start, *rest) -> ScanResults:
    """Scan every segment of `table` with per-head gates. The stored states are those that enter the chunks. No chunk is out of
    range.

    A `two_way` scan begins at the first chunk of its segment behind which the decay is not 0 in float32. The log decays that it
    returns may exclude the chunks before. They are then so low that they stand for -inf.

    G: [B, chunks, H, C] in float32, the sums of log2 gates from where the scan enters each chunk. table, q, k, v, scale, start:
    as in `key_scan`. rest: the fields of `Operands` from `edges` on that the plan has.
    """

    def body(*refs):
        p = Program.of(w, *refs)
        pl.when(p.warpgroup == w.consumers)(acting_as("load")(functools.partial(load_chunks, p)))

        @pl.when(p.warpgroup < w.consumers)
        def _():
            if w.consumers > 1:
                plgpu.set_max_registers(232, action="increase")
            if w.outputs:
                pl.when(p.warpgroup == 0)(acting_as("output")(functools.partial(write_outputs, p)))
                pl.when(p.warpgroup == 1)(acting_as("carry")(functools.partial(carry_shared_state, p)))
            else:
                acting_as("carry")(carry_own_columns)(p)

    E = table.shape[0]
    found = launch(
        "head_scan",
        w,
        body,
        Operands.of(w, table, q, k, v, G, scale, start, *rest),
        Results.types(w, *k.shape[:2], E),
        (Tiles.types(w),),
        roles_of(w),
        HeadPipeline.planned(w),
        programs=w.V // w.columns * w.H * E,
    )
    return ScanResults(found.o, found.states, found.last, found.log if w.two_way else None, behind=found.behind)


def tokens(p: "Program | PairProgram", x, head, step, *columns):
    """Return the reference [C, ...] to a step's rows of x [B, T, heads, ...] in global memory. head: the head of x. columns: a
    slice of the last axis, or nothing for all of it."""
    return x.at[(p.batch, pl.ds(p.chunk(step) * C, C), head, *columns)]


def load(p: "Program | PairProgram", x, edges, head, step, tile, slot, *columns):
    """Start to load the rows of one head of x at a step into `tile`, as the role *load*. The copy reports to the ring `tokens`.

    x: [B, T, heads, width]. edges: the copy of x for chunks that contain rows without a token, or None if the plan has no
    edges. head: the head of x. slot: the ring's slot of `tile`. columns: a slice of the width, or nothing for all of it.
    """
    ring = p.pipeline.tokens
    if edges is None:
        ring.copy(tokens(p, x, head, step, *columns), tile, slot)
        return
    block = p.operands.edges[p.chunk(step)]

    @pl.when(block < 0)
    def _():
        ring.copy(tokens(p, x, head, step, *columns), tile, slot)

    @pl.when(block >= 0)
    def _():
        ring.copy(edges.at[(p.batch, pl.ds(block * C, C), head, *columns)], tile, slot)


def load_chunks(p: Program):
    """Do the work of the role *load*: load gates, k, v and, for outputs, q of every chunk as soon as a slot is free."""
    w, x, t, h, ring = p.plan, p.operands, p.tiles, p.h, p.pipeline.tokens
    if w.consumers > 1:
        plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, p.count)
    def _(step):
        slot = ring.slot(step)
        ring.acquire(slot, step)
        gates = x.gates.at[p.batch, p.chunk(step), w.blocks.head(h)]
        ring.copy(gates, t.gates.at[slot], slot)
        load(p, x.k, x.k_edges, w.blocks.of_keys(h, w.H, x.k.shape[2]), step, t.k.at[slot], slot, p.plan.channels)
        if w.outputs:
            load(p, x.q, x.q_edges, w.blocks.of_keys(h, w.H, x.q.shape[2]), step, t.q.at[slot], slot, p.plan.channels)
        of_b = w.blocks.of_values(h, w.H, x.v.shape[2])
        load(p, x.v, x.v_edges, of_b, step, t.v.at[slot], slot, p.columns)


def carry_own_columns(p: Program):
    """Carry 64 columns of the state, as one of the *carry* warpgroups of a scan without outputs. Each has columns of its
    own."""
    w, me = p.plan, p.warpgroup
    columns = span((p.block * w.consumers + me) * 64, 64, w.in_memory[1])

    def enter(S, step):
        if w.states:
            store_state(p, S, step, p.tiles.state.at[lax.rem(step, jnp.int32(w.state_stages)), me], columns)
        else:
            plgpu.commit_smem()  # waits until all warps are done with the step before

    carry_state(p, columns, pl.ds(me * 64, 64), p.tiles.scaled.at[me], enter)
    plgpu.wait_smem_to_gmem(0)


def carry_shared_state(p: Program):
    """Do the work of *carry* in a scan with outputs: carry all columns of the program, and store the state before each chunk
    for *output*."""

    def enter(S, step):
        with p.pipeline.state.storing(step):
            store_state(p, S, step, p.tiles.state, p.columns)

    carry_state(p, p.columns, pl.ds(0, p.plan.columns), p.tiles.scaled, enter)
    plgpu.wait_smem_to_gmem(0)


def carry_state(p: Program, columns, of_tile, scaled, enter):
    """Carry the state S [K, columns] in registers through all chunks, and store the last in global memory:

        S_out = e^L S + sum_j k_j (e^{L - G_j} v_j)^T

    S is float32 and the products' operands are bfloat16. columns: the slice of V that the state has. of_tile: the same columns
    within the tile of v. scaled: the tile for e^{L - G} v, [C, columns]. enter: a function (S, step), called with the state
    before each chunk.
    """
    w = p.plan

    def advance(step, carry):
        S, log = carry
        slot = p.pipeline.tokens.slot(step)
        p.pipeline.tokens.wait(slot)
        if w.adds_behind:
            S = add_behind(p, S, step, columns)
        enter(S, step)
        values = functools.partial(values_of, p, slot, of_tile)
        G, last = plgpu.load(p.tiles.gates.at[slot], layout=BY_ROW), p.tiles.gates[slot, w.last_token]
        scaled[...] = values(G, last).astype(BF16)
        plgpu.commit_smem()
        S = tiles.added(S * jnp.exp2(last), (transposed(p.tiles.k.at[slot]), scaled))

        def lost(S):
            """Return S plus the product of k with what the values lost in rounding.

            The values are formed again, because the compiler would spill them.
            """
            x = values(plgpu.load(p.tiles.gates.at[slot], layout=BY_ROW), last) - read(scaled)
            plgpu.commit_smem()  # waits until all warps are done with the first term
            scaled[...] = x.astype(BF16)
            plgpu.commit_smem()
            return tiles.added(S, (transposed(p.tiles.k.at[slot]), scaled))

        S = lax.cond((last > p.two_terms) & (last < 0.0), lost, lambda S: S, S)
        p.pipeline.tokens.release(slot)
        if w.stores_behind:
            store_behind(p, S, step, columns)
        return S, log + last

    S = zeros((w.K, columns.size))
    if w.start:
        S = plgpu.load(p.operands.start.at[p.e, p.h, :, columns], layout=tiles.WGMMA, optimized=False)
    S, log = lax.fori_loop(0, p.count, advance, (S, jnp.float32(0.0)))

    def store(place):
        p.results.last[place, p.h, :, columns] = S

    w.leave(p.e, store)
    if w.two_way:

        @pl.when((p.block == 0) & (p.warpgroup == 0))
        def _():
            p.results.log[p.e, p.h, 0] = log / LOG2E


def store_behind(p: Program, S, step, columns):
    """Store S [K, columns], the state behind a step's chunk, in global memory if `states_every` asks for that state. columns: a
    slice of V."""
    index, is_one = p.state_behind(step)

    @pl.when(is_one)
    def _():
        p.results.behind[p.batch, index, p.h, :, columns] = S


def add_behind(p: Program, S, step, columns):
    """Return S [K, columns] plus the gradient of the state of `states_every` behind a step's chunk; S if there is none.
    columns: a slice of V."""
    index, is_one = p.state_behind(step)

    def added(S):
        place = p.operands.behind.at[p.batch, index, p.h, :, columns]
        return S + plgpu.load(place, layout=tiles.WGMMA, optimized=False)

    return lax.cond(is_one, added, lambda S: S, S)


def values_of(p: Program, slot, columns, G, last):
    """Return the values of a chunk, [C, columns] in float32, decayed to the edge by which the scan leaves the chunk.

    They are e^{last - G} v, or scale e^G d_output in a scan of dL/dS; a `two_way` scan leaves out the scale. slot: the slot of
    the chunk. columns: a slice of the tile of v. G: [C] by row, and last: its value at that edge, both to base 2.
    """
    w = p.plan
    x = read(p.tiles.v.at[slot, :, columns])
    if w.two_way:
        before = p.adjoint.astype(jnp.float32)
        decay = jnp.exp2(before * G + (1.0 - before) * (last - G))
    else:
        decay = jnp.exp2(G) * p.factor if w.adjoint else jnp.exp2(last - G)
    return x * by_row(decay, x.shape)


def store_state(p: Program, S, step, tile, columns):
    """Store S [K, columns] in `tile` in bfloat16. In a scan that stores states, start to copy `tile` to global memory.

    First wait until earlier copies have read the tile. Only the state before the first chunk of a run is copied
    (`Scan.stored`). tile: [K, columns] in shared memory. columns: a slice of V.
    """
    w = p.plan
    if w.states:
        plgpu.wait_smem_to_gmem(w.state_stages - 1, wait_read_only=True)
    tile[...] = S.astype(BF16)
    plgpu.commit_smem()  # also waits until all warps are done with the step before
    if w.states:

        @pl.when(w.stored(p.chunk(step)))
        def _():
            target = p.results.states.at[p.batch, lax.div(p.chunk(step), jnp.int32(w.run))]
            if w.stored_by.count == 1:
                plgpu.copy_smem_to_gmem(tile, target.at[p.h, p.plan.channels, columns])
            else:
                store_by_blocks(p, tile, target, columns)


def store_by_blocks(p: Program, tile, target, columns):
    """Start to send 64 columns of the state to global memory, as parts of the blocks of K and V (`Scan.stored_by`) that they
    lie in.

    tile: [K, 64] in shared memory. target: the states of one run of chunks, [blocks of H, rows of a block, columns of a block].
    columns: the slice of V.
    """
    w, by = p.plan, p.plan.stored_by
    rows, per_block = w.in_memory[0] // by.rows, w.V // by.columns // 64
    column = lax.div(columns.start, jnp.int32(64))
    place = p.h * by.count + quotient(column, per_block)
    columns = pl.ds(remainder(column, per_block) * 64, 64)
    for part in range(by.rows):
        source = tile.at[pl.ds(part * rows, rows)]
        plgpu.copy_smem_to_gmem(source, target.at[place + part * by.columns, :, columns], commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def write_outputs(p: Program):
    """Do the work of the role *output*: form scores and outputs of every chunk."""
    i, j = tiles.positions(p.plan.reverse)
    pl.loop(0, p.count)(functools.partial(write_chunk, p, i, j))
    plgpu.wait_smem_to_gmem(0)


def write_chunk(p: Program, i, j, step):
    """Form o = scale (e^G q S + P v) of a step's chunk, [C, columns], and start to send o to global memory in bfloat16.

    P_ij = (q_i . k_j) e^{G_i - G_j} for j <= i, else 0. i, j: [C, C] in int32, the positions of rows and columns in scan order.
    """
    w, t = p.plan, p.tiles
    slot = p.pipeline.tokens.slot(step)
    q, k, v = t.q.at[slot], t.k.at[slot], t.v.at[slot]
    p.pipeline.tokens.wait(slot)
    # [C, C]
    P = tiles.product((C, C), (q, transposed(k)))
    G = plgpu.load(t.gates.at[slot], layout=BY_ROW)
    to = by_column(plgpu.load(t.gates.at[slot], layout=BY_COLUMN, optimized=False), (C, C))
    P = P * jnp.exp2(jnp.where(i >= j, by_row(G, (C, C)) - to, -jnp.inf))
    with p.pipeline.state.reading():  # [C, columns]
        o = tiles.product((C, w.columns), (q, t.state))
    o = tiles.added(o * by_row(jnp.exp2(G), o.shape), (P.astype(BF16), v))
    p.pipeline.tokens.release(slot)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    t.output[...] = (o * p.factor).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.output, tokens(p, p.results.o, p.h, step, p.columns))


class PairTiles(NamedTuple):
    """Hold references to the shared memory of a program of `pair_scan`. Both heads share the tiles of q and k; each has its own
    of everything else. Each field's comment has its shape, for one head."""

    q: Ref  # [stages, C, K]
    k: Ref  # [stages, C, K]
    v: Pair  # [stages, C, 64]
    gates: Pair  # [stages, C]
    state: Pair  # [K, 64]
    scaled: Pair  # [C, 64]: v decayed to the chunk's end
    output: Pair  # [C, 64]

    @classmethod
    def types(cls, w: Scan) -> "PairTiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        tiled = functools.partial(tiles.tiled, columns=w.tile)
        q, gates = tiled(w.stages, C, w.K), plgpu.SMEM((w.stages, C), jnp.float32)
        v, state, values = tiled(w.stages, C, COLUMNS), tiled(w.K, COLUMNS), tiled(C, COLUMNS)
        return cls(q, q, *((x, x) for x in (v, gates, state, values, values)))


@dataclasses.dataclass(frozen=True)
class PairProgram:
    """Hold the references of one program of `pair_scan`. The program's position is computed at each use, because the compiler
    would spill it.

    The methods take `step`, the number of a chunk in scan order from 0; `slot`, the slot of a chunk in the ring `tokens`; and
    `i`, 0 or 1, which of the two heads.
    """

    plan: Scan
    operands: Operands
    results: Results
    tiles: PairTiles
    pipeline: HeadPipeline

    def place(self):
        """Return (the index of the pair of heads, the index of the segment)."""
        _, pair, segment = program_indices(lax.optimization_barrier(lax.axis_index(PROGRAM)), 1, self.plan.H // 2)
        return pair, segment

    def segment_field(self, column: int):
        """Return the entry of the table in the segment's row and the given column."""
        return self.operands.table[self.place()[1], column]

    def count(self):
        """Return the number of chunks of the segment."""
        return self.segment_field(2)

    def chunk(self, step):
        """Return the index of the chunk that the scan reaches at a step, counted from the first chunk of the row."""
        return self.segment_field(1) + self.plan.chunk_at(step, self.count())

    @property
    def batch(self):
        """Return the batch row of the segment in the operands."""
        return self.segment_field(0)

    def head(self, i):
        """Return the index of the i-th head of the pair among all H heads."""
        return self.place()[0] * 2 + i

    def gate_sums(self, slot, i, layout=BY_ROW):
        """Load G [C] of the i-th head, to base 2, from shared memory into registers in the given layout."""
        return plgpu.load(self.tiles.gates[i].at[slot], layout=layout, optimized=layout is BY_ROW)

    def factor(self):
        """Return the scale of the segment's sequence, read from global memory."""
        return self.operands.scale[self.segment_field(3)]


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def pair_scan(w: Scan, table, q, k, v, G, scale, start, *edges) -> ScanResults:
    """Scan every segment of `table` with outputs, two heads to a program. Operands and results are those of `head_scan`; V is
    64, and w.H even. edges: the fields of `Operands` from `edges` on that the plan has."""

    def body(*refs):
        p = PairProgram(w, *refs)
        me = lax.axis_index(WARPGROUP)
        pl.when(me == 2)(acting_as("load")(functools.partial(load_pairs, p)))

        @pl.when(me < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            output, carry = functools.partial(write_output_pairs, p), functools.partial(carry_states, p)
            lax.cond(me == 0, acting_as("output")(output), acting_as("carry")(carry))

    E = table.shape[0]
    found = launch(
        "pair_scan",
        w,
        body,
        Operands.of(w, table, q, k, v, G, scale, start, *edges),
        Results(*w.results(k.shape[0], w.rows_of_chunks(k.shape[1]), E)),
        (PairTiles.types(w),),
        roles_of(w),
        HeadPipeline.planned(w, heads=2),
        programs=w.H // 2 * E,
    )
    return ScanResults(found.o, found.states, found.last)


def load_pairs(p: PairProgram):
    """Do the work of the role *load*: load q, k, and the gates and v of both heads of every chunk as soon as a slot is free."""
    w, x, t, ring = p.plan, p.operands, p.tiles, p.pipeline.tokens
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, p.count())
    def _(step):
        slot = ring.slot(step)
        ring.acquire(slot, step)
        for source, edges, tile in ((x.q, x.q_edges, t.q), (x.k, x.k_edges, t.k)):
            load(
                p,
                source,
                edges,
                quotient(p.head(0), w.H // source.shape[2]),
                step,
                tile.at[slot],
                slot,
                p.plan.channels,
            )
        for i in PAIR:
            sums = x.gates.at[p.batch, p.chunk(step), p.head(i)]
            ring.copy(sums, t.gates[i].at[slot], slot)
            load(p, x.v, x.v_edges, quotient(p.head(i), w.H // x.v.shape[2]), step, t.v[i].at[slot], slot)


def carry_states(p: PairProgram):
    """Do the work of *carry*: carry the states [K, 64] of both heads through all chunks, and store each for *output* before its
    chunk."""
    w, x, t, ring = p.plan, p.operands, p.tiles, p.pipeline.tokens

    def store_states(S, step):
        with p.pipeline.state.storing(step):
            if w.states:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i in PAIR:
                t.state[i][...] = S[i].astype(BF16)
            plgpu.commit_smem()
        if w.states:

            @pl.when(w.stored(p.chunk(step)))
            def _():
                run = lax.div(p.chunk(step), jnp.int32(w.run))
                for i in PAIR:
                    plgpu.copy_smem_to_gmem(t.state[i], p.results.states.at[p.batch, run, p.head(i), p.plan.channels])

    def add_tokens(S, slot, i):
        """Return e^L S + sum_j k_j (e^{L - G_j} v_j)^T of the i-th head, [K, 64]. Values have two terms if most of the state
        passes the chunk."""
        last, scaled = t.gates[i][slot, w.last_token], t.scaled[i]

        def values():
            leaving = jnp.exp2(last - p.gate_sums(slot, i))
            return read(t.v[i].at[slot]) * by_row(leaving, VALUES)

        def lost(S):
            rest = values() - read(scaled)
            plgpu.commit_smem()  # waits until all warps are done with the first term
            scaled[...] = rest.astype(BF16)
            plgpu.commit_smem()
            return tiles.added(S, (transposed(t.k.at[slot]), scaled))

        scaled[...] = values().astype(BF16)
        plgpu.commit_smem()
        S = tiles.added(S * jnp.exp2(last), (transposed(t.k.at[slot]), scaled))
        return lax.cond((last > TWO_TERMS[0]) & (last < 0.0), lost, lambda S: S, S)

    def advance(step, S):
        slot = ring.slot(step)
        ring.wait(slot)
        store_states(S, step)
        S = [add_tokens(S[i], slot, i) for i in PAIR]
        ring.release(slot)
        return S

    S = [zeros((w.K, COLUMNS)) for _ in PAIR]
    if w.start:
        segment = p.place()[1]
        S = [plgpu.load(x.start.at[segment, p.head(i)], layout=tiles.WGMMA, optimized=False) for i in PAIR]
    S = lax.fori_loop(0, p.count(), advance, S)

    def store_last(place):
        for i in PAIR:
            p.results.last[place, p.head(i)] = S[i]

    w.leave(p.place()[1], store_last)
    plgpu.wait_smem_to_gmem(0)


def write_output_pairs(p: PairProgram):
    """Do the work of *output*: form the scores of a chunk once, and from them the outputs of each head with its decay."""
    w, t, ring = p.plan, p.tiles, p.pipeline.tokens
    row, column = tiles.positions(w.reverse)

    def decayed(scores, slot, i):
        """Return scores [C, C] times the decay e^{G_row - G_column} of the i-th head in bfloat16. Where the row's token is
        earlier than the column's, the result is 0."""
        to = by_column(p.gate_sums(slot, i, BY_COLUMN), PAIRS)
        between = jnp.where(row >= column, by_row(p.gate_sums(slot, i), PAIRS) - to, -jnp.inf)
        return (scores * jnp.exp2(between)).astype(BF16)

    @pl.loop(0, p.count())
    def _(step):
        slot = ring.slot(step)
        q = t.q.at[slot]
        ring.wait(slot)
        # [C, C]
        scores = tiles.product(PAIRS, (q, transposed(t.k.at[slot])))
        each = [decayed(scores, slot, i) for i in PAIR]
        with p.pipeline.state.reading():  # [C, 64]
            o = [tiles.product(VALUES, (q, t.state[i])) for i in PAIR]
        o = [x * by_row(jnp.exp2(p.gate_sums(slot, i)), VALUES) for i, x in enumerate(o)]
        o = [tiles.added(o[i], (each[i], t.v[i].at[slot])) for i in PAIR]
        ring.release(slot)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in PAIR:
            t.output[i][...] = (o[i] * p.factor()).astype(BF16)
        plgpu.commit_smem()
        for i in PAIR:
            plgpu.copy_smem_to_gmem(t.output[i], tokens(p, p.results.o, p.head(i), step))

    plgpu.wait_smem_to_gmem(0)
