"""Find where segments begin, and the states that enter them.

`lookback_tables` computes the number of trailing chunks that can still affect a segment's final state, with per-key gates. The
kernel reads a segment's chunks from its end and sums their gates. The sums are the log decays of a state through the chunks
behind it. The kernel stops as soon as the decay of every channel of a head underflows float32. One call computes the lookback in
both directions, and XLA merges the calls of a forward and its gradient into one.

`segment_scan` computes the state that enters every segment from the segments' own states: S' = e^L S + f X along a sequence. X is
the final state of a segment that begins from zero, L its log decays, and f the scale of dL/dS or 1. XLA would form each state
from the first segment on, and would read 16 segments 120 times. Here every program has a tile of the state and reads each segment
once.

Roles. One warpgroup does all. Who waits for whom, in `lookback_tables`; `segment_scan` loads into registers alone:

    waits    for      until
    compute  compute  gates full: gates
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import ALONE, PROGRAM, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    WGMMA,
    C,
    by_row,
    store,
    tiled,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import Scan, quotient, remainder, span

AHEAD = 2  # chunks in shared memory; a lookback over the gates of a new model reads no more
TILE = 64, 8  # rows and columns of the state in a program of `segment_scan`: 4 numbers a thread
TOGETHER = 8  # the most segments whose states are loaded together; lowering takes 0.05 s for each


@dataclasses.dataclass(frozen=True)
class LookbackPipeline(Pipeline):
    """Hold the barriers by which the one warpgroup waits for its own copies. gates: a ring of the gates of chunks."""

    gates: Ring

    @classmethod
    def planned(cls, w: Scan) -> "LookbackPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch."""
        return cls(Ring(AHEAD, ("compute",), ("compute",), ("gates",) * w.terms, released_by=()))


@functools.partial(jax.jit, static_argnums=0)  # so that forward and gradient lower it once
def lookback_tables(w: Scan, table, g) -> list[jax.Array]:
    """Return the tables of two `two_way` scans, [E, H, 5] in int32 each: with time and against time. The first chunk and the
    number of chunks in each row are those that the head must scan.

    w: the plan of the `two_way` scan. table: [2, E, 5], or [2, E, 7] if w is bounded, the tables of whole segments. g: the
    gates that `key_scan` takes. The kernel reads at most `w.lookback` chunks. If no decay underflows in them, the scan covers
    the whole segment. Resets are not read: without a lookback the scan costs what it costs without resets.
    """
    E = table.shape[1]
    heads, K = g[0].shape[2], w.K
    halves = range(K // 64)

    def body(operands, results, g_s, ones_s, sums_s, pipeline):
        table_g, g_g = operands
        with_g, against_g = results
        program = lax.axis_index(PROGRAM)
        rest, h = quotient(program, w.H), remainder(program, w.H)
        way, e = quotient(rest, E), remainder(rest, E)
        batch, first, whole, n, adjoint = (table_g[way, e, i] for i in range(5))

        def load(i):
            """Start to load the gates of the i-th chunk from the segment's end."""
            rows = pl.ds((first + w.chunk_at(whole - 1 - i, whole, adjoint)) * C, C)
            slot = pipeline.gates.slot(i)
            for term in range(w.terms):
                tile = g_s.at[slot * w.terms + term]
                channels_of_h = w.blocks.of_keys(h, w.H, heads)
                source = g_g[term].at[batch, rows, channels_of_h, span(0, K, w.in_memory[0])]
                pipeline.gates.copy(source, tile, slot)

        for i in range(AHEAD):
            pl.when(i < whole)(functools.partial(load, jnp.int32(i)))
        ones_s[...] = plgpu.layout_cast(jnp.ones((C, C), jnp.bfloat16), tiles.WGMMA)
        plgpu.commit_smem()

        def channels(half):
            return pl.ds(half * 64, 64)

        def clear_foreign(i, gates):
            """Zero the rows of the tiles `gates` of the i-th chunk from the segment's end that hold no token. They may hold
            NaN."""
            row = (first + w.chunk_at(whole - 1 - i, whole, adjoint)) * C
            low, high = (table_g[way, e, column] - row for column in (5, 6))
            parts = [g.at[:, channels(half)] for g in gates for half in halves]
            pl.when((low > 0) | (high < C))(functools.partial(tiles.clear, parts, low, high))

        def look(i, carry):
            """Add the gates of the i-th chunk from the segment's end to the sums of `carry`, if a state passes all chunks
            behind the (i - 1)-th. Return the new `carry`.

            carry: the sums of log decays, a list of arrays [64, 8]; whether a state passes all chunks behind the (i - 1)-th;
            whether it passes all chunks behind the i-th; and the number of chunks to scan.
            """
            through, before, alive, found = carry
            slot = pipeline.gates.slot(i)
            here = before & (i < whole)

            def further():
                pipeline.gates.wait(slot)
                gates = [g_s.at[slot * w.terms + term] for term in range(w.terms)]
                if w.bounded:
                    clear_foreign(i, gates)
                # [64, 8], whose columns are equal
                return [
                    tiles.added(
                        x, *((tiles.transposed(g.at[:, channels(half)]), tiles.by_halves(ones_s)) for g in gates)
                    )
                    for half, x in zip(halves, through, strict=True)
                ]

            through = lax.cond(here, further, lambda: through)
            for half, x in zip(halves, through, strict=True):
                sums_s[slot, channels(half)] = jnp.max(x, axis=1)
            plgpu.commit_smem()  # also waits until all warps are done with this chunk's tile
            largest = jnp.max(plgpu.load(sums_s.at[slot], layout=BY_COLUMN))
            now = here & alive & (largest >= LOG_OF_NOTHING)
            pl.when(now & (i + AHEAD < jnp.minimum(whole, w.lookback)))(lambda: load(i + AHEAD))
            return through, alive, now, found + now.astype(jnp.int32)

        start = [zeros((64, 8)) for _ in halves], whole > 0, whole > 0, jnp.int32(1)
        _, _, every, found = lax.fori_loop(0, w.lookback, look, start)
        count = jnp.where(every, whole, jnp.minimum(found, whole))
        first = jnp.where(adjoint == int(w.reverse), first + whole - count, first)

        def leave(out_g):
            for i, x in enumerate((batch, first, count, n, adjoint)):
                out_g[e, h, i] = x

        for place, out_g in enumerate((with_g, against_g)):
            pl.when(way == place)(functools.partial(leave, out_g))

    scratch = (
        *(tiled(*shape, columns=w.tile) for shape in ((AHEAD * w.terms, C, K), (C, C))),
        plgpu.SMEM((AHEAD, K), jnp.float32),
    )
    results = [jax.ShapeDtypeStruct((E, w.H, 5), jnp.int32)] * 2
    pipeline, programs = LookbackPipeline.planned(w), 2 * E * w.H
    return launch("lookback_tables", w, body, (table, g), results, scratch, ALONE, pipeline, programs=programs)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that forward and gradient lower it once
def segment_scan(parts: int, given: bool, states, log, factor, start, descending):
    """Return the state that enters every segment, [E, H, K, V] in float32.

    parts: the segments of each sequence. given: whether `start` is read. states: [E, H, K, V], the states of segments that
    begin from zero. log: [E, H, K or 1], their natural log decays. factor: [N], by which the states of each sequence are
    multiplied, and one unused number. start: [N, H, K, V], the states that enter sequences, if `given`. descending: [1], 1 if
    the scan goes from the last segment to the first, else 0.
    """
    E, H, K, V = states.shape
    across, down = V // TILE[1], K // TILE[0]
    together = max(i for i in range(1, TOGETHER + 1) if parts % i == 0)

    def body(operands, out_g):
        states_g, log_g, factor_g, start_g, descending_g = operands
        program = lax.axis_index(PROGRAM)
        left = quotient(program, across)
        head = quotient(left, down)
        n, h = quotient(head, H), remainder(head, H)
        rows = pl.ds(remainder(left, down) * TILE[0], TILE[0])
        columns = pl.ds(remainder(program, across) * TILE[1], TILE[1])

        def load(ref, *place, layout):
            return plgpu.load(ref.at[place], layout=layout, optimized=False)

        def segment(i):
            return n * parts + i + (parts - 1 - 2 * i) * descending_g[0]

        def decay(e):
            if log.shape[2] == 1:
                return jnp.exp2(log_g[e, h, 0] * LOG2E)
            return by_row(jnp.exp2(load(log_g, e, h, rows, layout=BY_ROW) * LOG2E), TILE)

        def advance(i, S):
            some = [segment(i * together + j) for j in range(together)]
            met = [(e, load(states_g, e, h, rows, columns, layout=WGMMA) * factor, decay(e)) for e in some]
            for e, added, through in met:
                store(out_g.at[e, h, rows, columns], S)
                S = S * through + added
            return S

        factor = factor_g[n]
        S = load(start_g, n, h, rows, columns, layout=WGMMA) if given else zeros(TILE)
        lax.fori_loop(0, parts // together, advance, S)

    return launch(
        "segment_scan",
        (parts, given),
        body,
        (states, log, factor, start, descending),
        jax.ShapeDtypeStruct(states.shape, jnp.float32),
        (),
        ALONE,
        programs=E // parts * H * down * across,
        params=plgpu.CompilerParams(approx_math=True),
    )
