"""Scan under the delta rule with per-head gates, for the outputs or for what the gradient reads.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all of them. S [K, V] is the state before the
chunk, R the result of `chunks/inverse.py`, and P_ij = scale (q_i . k_j) e^{G_i - G_j} for j up to i:

    X    = beta (V - e^G K S)
    U    = X + R X                      what the tokens write
    O    = scale e^G Q S + P U
    S'   = e^{G_last} S + K^T (e^{G_last - G} U)

The scan of the adjoint is a reverse scan, from dS' = dL/dS' behind the chunk and dO:

    dU   = e^{G_last - G} K dS' + P^T dO
    dX   = dU + R^T dU                  dV = beta dX
    dS   = e^{G_last} dS' + Q^T (scale e^G dO) - K^T (beta e^G dX)

A program has one head of one segment, and 64 columns of the state, or 128 for "ends" and "transitions" where these divide the
columns. Columns do not depend on each other. One warpgroup carries the state (`delta_carry.py`, or `delta_wide.py` for keys
wider than 128), one forms the scores and one writes the results (`delta_emit.py`), and one fetches.

A sequence is one segment, or is cut into several. A scan for "transitions" finds the state S_0 of each segment from zero, and the
matrix M by which the segment passes a state on: S' = M S + S_0. In the adjoint dS = M^T dS' + dS_0, with the same M.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.edge_tiles import fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.plan import quotient
from glax._src.kernels.pallas_gpu.scan.delta_carry import carry_state
from glax._src.kernels.pallas_gpu.scan.delta_emit import emit_results, form_scores
from glax._src.kernels.pallas_gpu.scan.delta_refs import (
    STRIPE,
    Barriers,
    DeltaScan,
    Operands,
    Program,
    Results,
    Tiles,
)  # fmt: skip
from glax._src.kernels.pallas_gpu.scan.delta_wide import carry_wide_state

Ref = Any


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_scan(w: DeltaScan, rows: int, *operands) -> Results:
    """Scan every segment of `table`. rows: the number of rows of the outputs. operands: the fields of `Operands`, and of
    `EdgeCopies` if there are any."""
    x, _ = split_edges(Operands, operands)
    B, chunks = x.factors.shape[:2]
    inputs = len(operands)  # a cached kernel must not hold a tracer

    def body(*refs):
        given, (*results, own, barriers) = refs[:inputs], refs[inputs:]
        p = Program(w, *split_edges(Operands, given), Results(*results), own, barriers)
        me = lax.axis_index("warpgroup")
        carry = carry_wide_state if w.wide else carry_state
        work = dict(carry=carry, emit=emit_results, score=form_scores, fetch=fetch_chunks)
        for number, role in enumerate(w.roles):
            pl.when(me == number)(functools.partial(work[role], p, *[number] * (role == "carry")))

    body.__name__ = "delta_" + w.kind.replace(" ", "_")  # in profiles
    results = tuple(Results.types(w, B, rows, chunks, x.table.shape[0]))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(w.columns // (STRIPE * w.stripes) * w.H * x.table.shape[0],),
        grid_names=("program",),
        num_threads=len(w.roles),
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_scan", w, rows), kernel, *operands, results=results))


def fetch_chunks(p: Program):
    """Fetch chunks ahead, as many as shared memory holds.

    A tight plan has one tile of v and one of R. v is fetched once the chunk before is consumed, and R once R of the chunk before
    is read.
    """
    w, x, t = p.plan, p.operands, p.tiles
    p.take_registers("fetch")
    tokens: list[tuple[str, Ref, Ref, tuple, slice | pl.Slice]] = [("k", x.k, t.k, (), slice(None))]
    if w.is_adjoint:
        tokens.append(("d_output", x.d_output, t.d_output, (), p.stripe()))
    for me in range(w.stripes if w.reads_values and not w.tight else 0):
        columns = p.stripe(me) if w.columns == w.V else pl.ds(lax.rem(p.number(me), w.V // STRIPE) * STRIPE, STRIPE)
        tokens.append(("v", x.v, t.v, (me,), columns))
    pairs = [(x.factors, t.factors)] + [(x.inverse, t.inverse)] * (not w.tight)
    if w.reads_queries:
        tokens.append(("q", x.q, t.q, (), slice(None)))

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        loaded = p.barriers.loaded.at[slot]
        pl.when(step >= w.stages)(lambda: plgpu.barrier_wait(p.barriers.consumed.at[slot]))
        if w.tight:
            pl.when(step > 0)(lambda: fetch_values(p, step - 1))
        for name, source, tile, inner, columns in tokens:
            at = p.field(0), p.chunk(step), quotient(p.head, w.H // source.shape[2]), columns
            fetch_tokens(p.edges, name, source, at, tile.at[(slot, *inner)], loaded)
        for source, tile in pairs:
            plgpu.copy_gmem_to_smem(source.at[p.field(0), p.chunk(step), p.head], tile.at[slot], loaded)
        if w.tight:
            pl.when(step > 0)(lambda: plgpu.barrier_wait(p.barriers.inverse_read))
            source = x.inverse.at[p.field(0), p.chunk(step), p.head]
            plgpu.copy_gmem_to_smem(source, t.inverse.at[0], p.barriers.inverse_loaded)

    if w.tight:
        last = p.count() - 1
        pl.when(last > 0)(lambda: plgpu.barrier_wait(p.barriers.consumed.at[p.slot(last - 1)]))
        pl.when(last >= 0)(lambda: fetch_values(p, last))


def fetch_values(p: Program, step):
    """Fetch v of a chunk into its one tile, once the chunk before is consumed."""
    x = p.operands
    at = p.field(0), p.chunk(step), quotient(p.head, p.plan.H // x.v.shape[2]), p.stripe()
    fetch_tokens(p.edges, "v", x.v, at, p.values(0), p.barriers.values_loaded)
