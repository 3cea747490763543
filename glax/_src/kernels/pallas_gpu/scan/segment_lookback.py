"""Compute the number of trailing chunks that can still affect a segment's final state, with per-key gates.

The kernel reads a segment's chunks from its end and sums their gates. The sums are the log decays of a state through the chunks
behind it. The kernel stops as soon as the decay of every channel of a head underflows float32. One call computes the lookback
in both directions, and XLA merges the calls of a forward and its gradient into one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, C, tiled, zeros
from glax._src.kernels.pallas_gpu.plan import Scan, quotient, remainder

AHEAD = 2  # chunks in shared memory; a lookback over the gates of a new model reads no more


@functools.partial(jax.jit, static_argnums=0)  # so that forward and gradient lower it once
def lookback_tables(w: Scan, table, g) -> list[jax.Array]:
    """Return the tables of two scans of `either` kind, [E, H, 5] each, forward and reverse, with the first chunk that each head
    must scan.

    table: [2, E, 5 or 7], the tables of whole segments. g: the gates that `key_scan` takes. The kernel reads at most
    `w.lookback` chunks. If no decay underflows in them, the scan covers the whole segment. Resets are not read: without a
    lookback the scan costs what it costs without resets.
    """
    E = table.shape[1]
    heads, K = g[0].shape[2:]
    halves = range(K // 64)

    def body(*refs):
        table_g, g_g, with_g, against_g, g_s, ones_s, sums_s, given = tiles.with_terms(refs, 1, w.terms)
        program = lax.axis_index("program")
        rest, h = quotient(program, w.H), remainder(program, w.H)
        way, e = quotient(rest, E), remainder(rest, E)
        batch, first, whole, n, adjoint = (table_g[way, e, i] for i in range(5))

        def fetch(i):
            """Fetch the i-th chunk from the end."""
            rows = pl.ds((first + w.place(whole - 1 - i, whole, adjoint)) * C, C)
            slot = lax.rem(i, jnp.int32(AHEAD))
            for term in range(w.terms):
                tile = g_s.at[slot * w.terms + term]
                channels_of_h = w.blocks.of_keys(h, w.H, heads)
                plgpu.copy_gmem_to_smem(g_g[term].at[batch, rows, channels_of_h], tile, given.at[slot])

        for i in range(AHEAD):
            pl.when(i < whole)(functools.partial(fetch, jnp.int32(i)))
        ones_s[...] = plgpu.layout_cast(jnp.ones((C, C), jnp.bfloat16), tiles.WGMMA)
        plgpu.commit_smem()

        def channels(half):
            return pl.ds(half * 64, 64)

        def clear_foreign(i, gates):
            """Zero the rows without a token of the i-th chunk from the end. They may hold NaN."""
            row = (first + w.place(whole - 1 - i, whole, adjoint)) * C
            low, high = (table_g[way, e, column] - row for column in (5, 6))
            parts = [g.at[:, channels(half)] for g in gates for half in halves]
            pl.when((low > 0) | (high < C))(functools.partial(tiles.clear, parts, low, high))

        def look(i, carry):
            """Add the gates of the i-th chunk from the end. before: whether a state passes the chunks so far, so that this
            chunk was fetched."""
            through, before, alive, found = carry
            slot = lax.rem(i, jnp.int32(AHEAD))
            here = before & (i < whole)

            def further():
                plgpu.barrier_wait(given.at[slot])
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
            pl.when(now & (i + AHEAD < jnp.minimum(whole, w.lookback)))(lambda: fetch(i + AHEAD))
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

    body.__name__ = "lookback_tables"  # in profiles
    results = [jax.ShapeDtypeStruct((E, w.H, 5), jnp.int32)] * 2
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(2 * E * w.H,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[
            tiled(AHEAD * w.terms, C, K),
            tiled(C, C),
            plgpu.SMEM((AHEAD, K), jnp.float32),
            plgpu.Barrier(num_arrivals=w.terms, num_barriers=AHEAD),
        ],
        compiler_params=tiles.PARAMS,
    )
    return once(("lookback_tables", w), kernel, table, *g, results=results)
