"""Define one program of the scan with per-head gates: its references, its position, and how it fetches chunks."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E, C, tiled
from glax._src.kernels.pallas_gpu.plan import Scan, place_of

MOST = -1.0, -6.0  # log2 decays of a chunk above which values have two terms, with time and against it

Ref = Any


class Operands(NamedTuple):
    """Hold the operands of `head_scan`, in global memory."""

    table: Ref  # [E, 4] or [E, 5]
    q: Ref  # [B, T, HQ, K]
    a: Ref  # [B, T, HA, K]
    b: Ref  # [B, T, HB, V]
    gates: Ref  # [B, chunks, heads, C]: sums of log2 gates from where the scan enters the chunk
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, K, V]
    # Of a plan with edges: `Edges.block`, and the copies of q, a and b.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, K]
    a_edges: Ref = None  # [B, 3 C, HA, K]
    b_edges: Ref = None  # [B, 3 C, HB, V]
    # Of a plan that adds the gradients of the caller's states.
    behind: Ref = None  # [B, num_behind, H, K, V]

    @classmethod
    def of(cls, w: Scan, refs) -> "Operands":
        """Return the operands that the plan has, with which `refs` begins."""
        *edges, behind = list(cls._field_defaults)
        names = [name for name in cls._fields if name not in cls._field_defaults]
        names += edges * w.edges + [behind] * w.adds_behind
        return cls(**dict(zip(names, refs, strict=False)))

    @property
    def count(self) -> int:
        """Return the number of operands that there are."""
        return sum(x is not None for x in self)


class Results(NamedTuple):
    """Hold the results of `head_scan`, in global memory. A result that the plan leaves out has one tile."""

    o: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks / run, H, K, V]
    last: Ref  # [N or E, H, K, V]
    log: Ref  # [E, H, 1]
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that stores the caller's states

    @classmethod
    def types(cls, w: Scan, B: int, T: int, E: int) -> "Results":
        log = jax.ShapeDtypeStruct((E, w.H, 1), jnp.float32)
        return cls(*w.results(B, T, E), log, w.behind_type(B) if w.stores_behind else None)


class Tiles(NamedTuple):
    """Hold the shared memory. A tile that the plan does not use has the smallest size."""

    q: Ref  # [stages, C, K]
    a: Ref  # [stages, C, K]
    b: Ref  # [stages, C, columns]
    gates: Ref  # [stages, C]
    state: Ref  # [K, columns], or without outputs [state_stages, consumers, K, 64]
    scaled: Ref  # [C, columns], or without outputs [consumers, C, 64]: the values that are added to the state
    output: Ref  # [C, columns]

    @classmethod
    def types(cls, w: Scan) -> "Tiles":
        K, stages, columns, W = w.K, w.stages, w.columns, w.consumers
        return cls(
            q=tiled(stages, C, K) if w.outputs else tiled(1, C, 64),
            a=tiled(stages, C, K),
            b=tiled(stages, C, columns),
            gates=plgpu.SMEM((stages, C), jnp.float32),
            state=tiled(K, columns) if w.outputs else tiled(w.state_stages, W, K, 64),
            scaled=tiled(C, columns) if w.outputs else tiled(W, C, 64),
            output=tiled(C, columns) if w.outputs else tiled(8, 64),
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports."""

    loaded: Ref  # by stage: a chunk lies in shared memory
    consumed: Ref  # by stage: all warpgroups are done with the chunk
    state_stored: Ref  # the state before the chunk lies in shared memory
    state_read: Ref  # the product with the state is done

    @classmethod
    def types(cls, w: Scan) -> "Barriers":
        return cls(
            loaded=plgpu.Barrier(num_arrivals=4 if w.outputs else 3, num_barriers=w.stages),
            consumed=plgpu.Barrier(num_arrivals=w.consumers, num_barriers=w.stages),
            state_stored=plgpu.Barrier(),
            state_read=plgpu.Barrier(),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program, and the program's position.

    block, h, e: of `place_of`. batch: the row of the operands. first, count: the first chunk of the scan and the number of
    chunks. factor: the scale of the sequence. adjoint: 0 or 1; traced in a scan of `either` kind. most: the log2 decay of a chunk
    above which values have two terms.
    """

    plan: Scan
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers
    warpgroup: Any
    block: Any
    h: Any
    e: Any
    batch: Any
    first: Any
    count: Any
    factor: Any
    adjoint: Any
    most: Any

    @classmethod
    def of(cls, w: Scan, *refs) -> "Program":
        """Return the program. refs: operands and results one after the other, then `Tiles` and `Barriers`."""
        *in_global, tiles, barriers = refs
        operands = Operands.of(w, in_global)
        results = Results(*in_global[operands.count :])
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        block, h, e = place_of(program, w.V // w.columns, w.H)
        batch, first, whole, n = (operands.table[e, i] for i in range(4))
        factor = operands.scale[n]
        adjoint: Any = operands.table[e, 4] if w.either else int(w.adjoint)
        most = jnp.where(adjoint > 0, *map(jnp.float32, reversed(MOST))) if w.either else MOST[w.adjoint]
        place = warpgroup, block, h, e, batch
        p = cls(w, operands, results, tiles, barriers, *place, first, whole, factor, adjoint, most)
        return p.without_what_ends() if w.lookback else p

    def without_what_ends(self) -> "Program":
        """Return the program without the leading chunks whose tokens decay to 0 before the segment's end."""
        w, gates, whole, first = self.plan, self.operands.gates, self.count, self.first
        through, alive, found = 0.0, True, 1
        for i in range(w.lookback):
            place = w.place(jnp.maximum(whole - 1 - i, 0), jnp.maximum(whole, 1), self.adjoint)
            chunk = jnp.minimum(first + place, gates.shape[1] - 1)
            through += gates[self.batch, chunk, w.blocks.head(self.h), self.last_token]
            alive &= through >= LOG_OF_NOTHING * LOG2E
            found += alive.astype(jnp.int32)
        count = jnp.minimum(jnp.where(alive, whole, found), whole)
        first = jnp.where(self.adjoint == int(w.reverse), first + whole - count, first)
        return dataclasses.replace(self, first=first, count=count)

    @property
    def last_token(self) -> int:
        """Return the token by which the scan leaves a chunk."""
        return 0 if self.plan.reverse else C - 1

    @property
    def columns(self):
        """Return the program's columns of V."""
        return pl.ds(self.block * self.plan.columns, self.plan.columns)

    def chunk(self, step):
        """Return the chunk that the scan reaches at a step."""
        return self.first + self.plan.place(step, self.count, self.adjoint)

    def tokens(self, x, head, step, *columns):
        """Return the rows [C, ...] of one head of x [B, T, heads, ...] at a step."""
        return x.at[(self.batch, pl.ds(self.chunk(step) * C, C), head, *columns)]

    def state_behind(self, step):
        """Return the index of the caller's state behind a step's chunk, and whether there is one."""
        return self.plan.state_behind(self.chunk(step), self.operands.gates.shape[1])

    def fetch(self, x, edges, head, step, tile, loaded, *columns):
        """Fetch the rows of one head of x at a step. A chunk that contains rows without a token is read from `edges`, the
        copies of x."""
        if edges is None:
            plgpu.copy_gmem_to_smem(self.tokens(x, head, step, *columns), tile, loaded)
            return
        block = self.operands.edges[self.chunk(step)]

        @pl.when(block < 0)
        def _():
            plgpu.copy_gmem_to_smem(self.tokens(x, head, step, *columns), tile, loaded)

        @pl.when(block >= 0)
        def _():
            rows = edges.at[(self.batch, pl.ds(block * C, C), head, *columns)]
            plgpu.copy_gmem_to_smem(rows, tile, loaded)


def fetch_chunks(p: Program):
    """Fetch gates, a, b and, for outputs, q of every chunk as soon as a slot is free."""
    w, x, t, h = p.plan, p.operands, p.tiles, p.h
    if w.consumers > 1:
        plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, p.count)
    def _(step):
        slot = lax.rem(step, jnp.int32(w.stages))

        @pl.when(step >= w.stages)
        def _():
            plgpu.barrier_wait(p.barriers.consumed.at[slot])

        loaded = p.barriers.loaded.at[slot]
        gates = x.gates.at[p.batch, p.chunk(step), w.blocks.head(h)]
        plgpu.copy_gmem_to_smem(gates, t.gates.at[slot], loaded)
        p.fetch(x.a, x.a_edges, w.blocks.of_keys(h, w.H, x.a.shape[2]), step, t.a.at[slot], loaded)
        if w.outputs:
            p.fetch(x.q, x.q_edges, w.blocks.of_keys(h, w.H, x.q.shape[2]), step, t.q.at[slot], loaded)
        of_b = w.blocks.of_values(h, w.H, x.b.shape[2])
        p.fetch(x.b, x.b_edges, of_b, step, t.b.at[slot], loaded, p.columns)
