"""Define one program of the per-key-gate scan: its position, and how it fetches chunks."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import C, with_terms
from glax._src.kernels.pallas_gpu.plan import ROWS, Scan, place_of
from glax._src.kernels.pallas_gpu.scan.key_refs import Barriers, Operands, Results, Tiles


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program. adjoint: 0 or 1; traced in a scan of `either` kind."""

    plan: Scan
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers
    warpgroup: Any
    adjoint: Any

    @classmethod
    def of(cls, plan: Scan, *refs) -> "Program":
        """Return the program. refs: operands and results one after the other, then `Tiles` and `Barriers`."""
        *in_global, tiles, barriers = refs
        in_global = with_terms(in_global, Operands._fields.index("gates"), plan.terms)
        operands = Operands.of(plan, in_global)
        results = Results(*in_global[operands.count :])
        p = cls(plan, operands, results, tiles, barriers, lax.axis_index("warpgroup"), int(plan.adjoint))
        return dataclasses.replace(p, adjoint=p.segment_field(4)) if plan.either else p

    def place(self):
        """Return block, head and segment.

        These and the fields of the table are computed at each use, because the compiler would spill values that all warpgroups
        hold throughout.
        """
        program = lax.optimization_barrier(lax.axis_index("program"))
        return place_of(program, self.plan.V // self.plan.columns, self.plan.H)

    def segment_field(self, column: int):
        """Return one column of the segment's row of the table."""
        _, h, e = self.place()
        return self.operands.table[(e, h, column) if self.plan.either else (e, column)]

    def count(self):
        """Return the number of chunks."""
        return self.segment_field(2)

    def hidden(self, x):
        """Return x, whose value the compiler cannot know.

        ptxas 13.0 writes a matrix that it knows to be constant only between the two products that read it. At the first
        chunk of a scan the first product then reads registers that nothing has written.
        """
        return jnp.where(self.count() >= 0, x, 0.5)

    def chunk(self, step):
        """Return the chunk that the scan reaches at a step."""
        return self.segment_field(1) + self.plan.place(step, self.count(), self.adjoint)

    def row(self, step):
        """Return the chunk's first row of a, b, q and gates at a step."""
        if not self.plan.packed:
            return self.chunk(step) * C
        return self.segment_field(4) * ROWS + self.plan.place(step, self.count(), self.adjoint) * C

    def own_rows(self):
        """Return the segment's first row of a, b, q and gates, and the row behind its last."""
        if self.plan.packed:
            return self.segment_field(5), self.segment_field(6)
        first = self.segment_field(1)
        begin, end = first * C, (first + self.count()) * C
        if self.plan.bounded:
            return jnp.maximum(begin, self.segment_field(5)), jnp.minimum(end, self.segment_field(6))
        return begin, jnp.minimum(end, self.operands.a.shape[1])

    def tokens(self, x, step, head, *columns):
        """Return the rows [C, ...] of one head of x [B, T, heads, ...] at a step."""
        return x.at[(self.segment_field(0), pl.ds(self.row(step), C), head, *columns)]

    def of_keys(self, x):
        """Return the head of x [B, T, heads, K] that the program reads."""
        return self.plan.blocks.of_keys(self.place()[1], self.plan.H, x.shape[2])

    def of_values(self, x):
        """Return the head of x [B, T, heads, V] that the program reads."""
        return self.plan.blocks.of_values(self.place()[1], self.plan.H, x.shape[2])

    def fetch_gates(self, step, slot):
        """Fetch the terms of the gates, [C, K] each, of a step."""
        for term in range(self.plan.terms):
            tile = self.tiles.gates.at[slot * self.plan.terms + term]
            gates = self.operands.gates[term]
            source = self.tokens(gates, step, self.of_keys(gates))
            plgpu.copy_gmem_to_smem(source, tile, self.barriers.gates_loaded.at[slot])

    def fetch(self, step, slot):
        """Fetch a [C, K], the program's columns of b, [C, columns], and the resets [C] of a step."""
        loaded, a, b = self.barriers.loaded, self.operands.a, self.operands.b
        plgpu.copy_gmem_to_smem(self.tokens(a, step, self.of_keys(a)), self.tiles.a.at[slot], loaded.at[slot])
        columns = pl.ds(self.place()[0] * self.plan.columns, self.plan.columns)
        plgpu.copy_gmem_to_smem(
            self.tokens(b, step, self.of_values(b), columns), self.tiles.b.at[slot], loaded.at[slot]
        )
        if self.plan.resets:
            newest = self.operands.newest.at[self.segment_field(0), self.chunk(step)]
            plgpu.copy_gmem_to_smem(newest, self.tiles.newest.at[slot], loaded.at[slot])

    def has_reset(self, slot):
        """Return whether the chunk contains a reset, which no state passes."""
        return self.tiles.newest[slot, self.plan.last_token] >= 0

    def fill(self, fetch):
        """Fetch the first chunks, as many as shared memory holds."""
        for slot in range(self.plan.stages):
            pl.when(slot < self.count())(functools.partial(fetch, slot, slot))

    def refill(self, step):
        """Fetch into the tiles of the step before, once every warpgroup has consumed them."""
        stages = self.plan.stages
        slot = lax.rem(step - 1, jnp.int32(stages))

        @pl.when((step > 0) & (step - 1 + stages < self.count()))
        def _():
            plgpu.barrier_wait(self.barriers.consumed.at[slot])
            self.fetch(step - 1 + stages, slot)
