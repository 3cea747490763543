"""Scan with per-head gates. Products read q, k and v as they lie in memory.

G_i is the sum of a chunk's log gates through token i, L the sum of all of them:

    o_i   = scale * (e^{G_i} q_i^T S + sum_{j <= i} (q_i . k_j) e^{G_i - G_j} v_j)
    S_out = e^L S + sum_j k_j (e^{L - G_j} v_j)^T

No exponent is above 0 for gates <= 0, so one form is exact for all gates. A call without gates has gates of 0, and a constant
decay is the gate of every token. Where most of a state passes through a chunk, the errors of rounding e^{L - G_j} v_j to
bfloat16 add up from chunk to chunk. There the value is the sum of two terms. A reverse scan uses two terms already where a 64th
of the state passes, for the gates' gradient.

A program has a segment of one sequence, one head, all of K and 64 or 128 columns of the state. One warpgroup fetches. One
carries the state, and hands it to the warpgroup that forms scores and outputs. Scans without outputs have a warpgroup for every
64 columns.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.plan import Scan, ScanResults
from glax._src.kernels.pallas_gpu.scan.head_program import (
    Barriers,
    Program,
    Results,
    Tiles,
    fetch_chunks,
)
from glax._src.kernels.pallas_gpu.scan.head_stages import carry_own_columns, carry_shared_state, write_outputs


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def head_scan(w: Scan, table, q, a, b, G, scale, start, *rest) -> ScanResults:
    """Scan every segment of `table` with per-head gates. The stored states are those that enter the chunks. No chunk is out of
    range.

    A scan of `either` kind begins at the first chunk of its segment behind which the decay is not 0 in float32. The log decays
    that it returns may exclude the chunks before. They are then so low that they stand for -inf.

    G: [B, chunks, H, C] in float32, the sums of log2 gates from where the scan enters each chunk. The other operands are those
    of `key_scan`. rest: the last operands of `Operands`, as many as the plan has.
    """
    B, T = a.shape[0], w.rows_of_chunks(a.shape[1])
    E = table.shape[0]

    def body(*refs):
        p = Program.of(w, *refs)
        pl.when(p.warpgroup == w.consumers)(functools.partial(fetch_chunks, p))

        @pl.when(p.warpgroup < w.consumers)
        def _():
            if w.consumers > 1:
                plgpu.set_max_registers(232, action="increase")
            if w.outputs:
                pl.when(p.warpgroup == 0)(functools.partial(write_outputs, p))
                pl.when(p.warpgroup == 1)(functools.partial(carry_shared_state, p))
            else:
                carry_own_columns(p)

    body.__name__ = "head_scan"  # in profiles
    results = tuple(x for x in Results.types(w, B, T, E) if x is not None)
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(w.V // w.columns * w.H * E,),
        grid_names=("program",),
        num_threads=w.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    operands = table, q, a, b, G, scale, start, *rest
    found = Results(*once(("head_scan", w), kernel, *operands, results=results))
    return ScanResults(found.o, found.states, found.last, found.log if w.either else None, behind=found.behind)
