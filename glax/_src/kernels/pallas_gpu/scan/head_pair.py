"""Scan with per-head gates, two heads to a program. The heads have 64 columns of V, and share queries and keys.

The formulas are those of `scan/head.py`. Both heads read the same tiles of q and k, and the same scores before their decay.
One warpgroup fetches, one carries both states, and one forms both outputs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    C,
    by_column,
    by_row,
    read,
    tiled,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, Scan, ScanResults, place_of, quotient
from glax._src.kernels.pallas_gpu.scan.head_program import MOST

BF16 = jnp.bfloat16
PAIR = range(2)
COLUMNS = 64  # columns of a head
VALUES = (C, COLUMNS)

Ref = Any
Pair = tuple[Ref, ...]  # two references, one for each head


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    table: Ref  # [E, 4]
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV, 64]
    gates: Ref  # [B, chunks, H, C]: sums of log2 gates
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, K, 64]
    # Of a plan with edges: `Edges.block`, and the copies of q, k and v.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, K]
    k_edges: Ref = None  # [B, 3 C, HK, K]
    v_edges: Ref = None  # [B, 3 C, HV, 64]

    @classmethod
    def count(cls, w: Scan) -> int:
        """Return the number of operands that the plan has."""
        return len(cls._fields) - (0 if w.edges else len(cls._field_defaults))


class Results(NamedTuple):
    """Hold the results, in global memory."""

    o: Ref  # [B, T, H, 64]
    states: Ref  # [B, runs, H, K, 64]
    last: Ref  # [N, H, K, 64]


class Tiles(NamedTuple):
    """Hold the shared memory. There is a tile for each head of the pair, but one of q and one of k for both."""

    q: Ref  # [stages, C, K]
    k: Ref  # [stages, C, K]
    v: Pair  # [stages, C, 64]
    gates: Pair  # [stages, C]
    state: Pair  # [K, 64]
    scaled: Pair  # [C, 64]: v decayed to the chunk's end
    output: Pair  # [C, 64]


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports."""

    loaded: Ref  # by stage: everything of a chunk
    consumed: Ref  # by stage: all products with k and v are done
    state_stored: Ref
    state_read: Ref


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program."""

    plan: Scan
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers

    @classmethod
    def of(cls, plan: Scan, *refs) -> "Program":
        """Return the program. refs: operands and results one after the other, then `Tiles` and `Barriers`."""
        *in_global, own, barriers = refs
        count = Operands.count(plan)
        return cls(plan, Operands(*in_global[:count]), Results(*in_global[count:]), own, barriers)

    def place(self):
        """Return the pair of heads and the segment. They are computed at each use, because the compiler would spill them."""
        _, pair, segment = place_of(lax.optimization_barrier(lax.axis_index("program")), 1, self.plan.H // 2)
        return pair, segment

    def segment_field(self, column: int):
        """Return one column of the segment's row of the table."""
        return self.operands.table[self.place()[1], column]

    def count(self):
        return self.segment_field(2)

    def chunk(self, step):
        """Return the chunk that the scan reaches at a step."""
        return self.segment_field(1) + self.plan.place(step, self.count())

    def tokens(self, x, step, head):
        """Return the rows [C, ...] of one head of x [B, T, heads, ...] at a step."""
        return x.at[self.segment_field(0), pl.ds(self.chunk(step) * C, C), head]

    def fetch(self, x, edges, step, head, tile, loaded):
        """Fetch the rows of one head of x at a step. A chunk that contains rows without a token is read from `edges`, the
        copies of x."""
        if edges is None:
            plgpu.copy_gmem_to_smem(self.tokens(x, step, head), tile, loaded)
            return
        block = self.operands.edges[self.chunk(step)]

        @pl.when(block < 0)
        def _():
            plgpu.copy_gmem_to_smem(self.tokens(x, step, head), tile, loaded)

        @pl.when(block >= 0)
        def _():
            plgpu.copy_gmem_to_smem(edges.at[self.segment_field(0), pl.ds(block * C, C), head], tile, loaded)

    def head(self, i):
        """Return the i-th head of the pair."""
        return self.place()[0] * 2 + i

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.plan.stages))

    def gate_sums(self, slot, i, layout=BY_ROW):
        """Return G [C] of the i-th head, to base 2."""
        return plgpu.load(self.tiles.gates[i].at[slot], layout=layout, optimized=layout is BY_ROW)

    def factor(self):
        """Return the scale of the sequence."""
        return self.operands.scale[self.segment_field(3)]


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def pair_scan(w: Scan, table, q, k, v, G, scale, start, *edges) -> ScanResults:
    """Scan every segment of `table` with outputs. Operands and results are those of `head_scan`; V is 64, and w.H even."""
    B, T = k.shape[0], w.rows_of_chunks(k.shape[1])
    E, H, K = table.shape[0], w.H, w.K

    def body(*refs):
        p = Program.of(w, *refs)
        me = lax.axis_index("warpgroup")
        pl.when(me == 2)(functools.partial(load, p))

        @pl.when(me < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            lax.cond(me == 0, functools.partial(form_outputs, p), functools.partial(carry_states, p))

    body.__name__ = "pair_scan"  # in profiles
    own = Tiles(
        q=tiled(w.stages, C, K),
        k=tiled(w.stages, C, K),
        v=(tiled(w.stages, C, COLUMNS),) * 2,
        gates=(plgpu.SMEM((w.stages, C), jnp.float32),) * 2,
        state=(tiled(K, COLUMNS),) * 2,
        scaled=(tiled(C, COLUMNS),) * 2,
        output=(tiled(C, COLUMNS),) * 2,
    )
    barriers = Barriers(
        loaded=plgpu.Barrier(num_arrivals=6, num_barriers=w.stages),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=w.stages),
        state_stored=plgpu.Barrier(),
        state_read=plgpu.Barrier(),
    )
    results = w.results(B, T, E)
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(H // 2 * E,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[own, barriers],
        compiler_params=tiles.PARAMS,
    )
    operands = table, q, k, v, G, scale, start, *edges
    return ScanResults(*once(("pair_scan", w), kernel, *operands, results=results))


def load(p: Program):
    """Fetch chunks ahead, as many as shared memory holds."""
    w, x, t = p.plan, p.operands, p.tiles
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        loaded = p.barriers.loaded.at[slot]
        pl.when(step >= w.stages)(lambda: plgpu.barrier_wait(p.barriers.consumed.at[slot]))
        for source, edges, tile in ((x.q, x.q_edges, t.q), (x.k, x.k_edges, t.k)):
            shared = quotient(p.head(0), w.H // source.shape[2])
            p.fetch(source, edges, step, shared, tile.at[slot], loaded)
        for i in PAIR:
            sums = x.gates.at[p.segment_field(0), p.chunk(step), p.head(i)]
            plgpu.copy_gmem_to_smem(sums, t.gates[i].at[slot], loaded)
            p.fetch(x.v, x.v_edges, step, quotient(p.head(i), w.H // x.v.shape[2]), t.v[i].at[slot], loaded)


def carry_states(p: Program):
    """Carry the states [K, 64] of both heads through all chunks, and store each for the outputs before its chunk."""
    w, x, t, bar = p.plan, p.operands, p.tiles, p.barriers
    last_token = 0 if w.reverse else C - 1

    def store_states(S, step):
        pl.when(step > 0)(lambda: plgpu.barrier_wait(bar.state_read))
        if w.states:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in PAIR:
            t.state[i][...] = S[i].astype(BF16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(bar.state_stored)
        if w.states:

            @pl.when(w.stored(p.chunk(step)))
            def _():
                run = lax.div(p.chunk(step), jnp.int32(w.run))
                for i in PAIR:
                    plgpu.copy_smem_to_gmem(t.state[i], p.results.states.at[p.segment_field(0), run, p.head(i)])

    def add_tokens(S, slot, i):
        """Return S plus the terms of the chunk's tokens, from values in two terms where most of the state passes, as in
        `head_scan`."""
        last, scaled = t.gates[i][slot, last_token], t.scaled[i]

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
        return lax.cond((last > MOST[0]) & (last < 0.0), lost, lambda S: S, S)

    def advance(step, S):
        slot = p.slot(step)
        plgpu.barrier_wait(bar.loaded.at[slot])
        store_states(S, step)
        S = [add_tokens(S[i], slot, i) for i in PAIR]
        plgpu.barrier_arrive(bar.consumed.at[slot])
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


def form_outputs(p: Program):
    """Form the scores of a chunk once, and from them the outputs of each head with its decay."""
    w, t, bar = p.plan, p.tiles, p.barriers
    row, column = tiles.positions(w.reverse)

    def decayed(scores, slot, i):
        """Return scores [C, C] times the decay e^{G_row - G_column} of the i-th head, and 0 where the row's token is earlier; in
        bfloat16."""
        to = by_column(p.gate_sums(slot, i, BY_COLUMN), PAIRS)
        between = jnp.where(row >= column, by_row(p.gate_sums(slot, i), PAIRS) - to, -jnp.inf)
        return (scores * jnp.exp2(between)).astype(BF16)

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        q = t.q.at[slot]
        plgpu.barrier_wait(bar.loaded.at[slot])
        # [C, C]
        scores = tiles.product(PAIRS, (q, transposed(t.k.at[slot])))
        each = [decayed(scores, slot, i) for i in PAIR]
        plgpu.barrier_wait(bar.state_stored)
        # [C, 64]
        o = [tiles.product(VALUES, (q, t.state[i])) for i in PAIR]
        plgpu.barrier_arrive(bar.state_read)
        o = [x * by_row(jnp.exp2(p.gate_sums(slot, i)), VALUES) for i, x in enumerate(o)]
        o = [tiles.added(o[i], (each[i], t.v[i].at[slot])) for i in PAIR]
        plgpu.barrier_arrive(bar.consumed.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in PAIR:
            t.output[i][...] = (o[i] * p.factor()).astype(BF16)
        plgpu.commit_smem()
        for i in PAIR:
            plgpu.copy_smem_to_gmem(t.output[i], p.tokens(p.results.o, step, p.head(i)))

    plgpu.wait_smem_to_gmem(0)
