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

A program has a segment of one sequence, one head and 64 or 128 columns of the state. Its stages run in warpgroups side by side:
some scale operands, 64 channels of K each, ahead of those that multiply (`scan/key_scale.py`); one carries the state and hands
S' over (`scan/key_state.py`) to the one that forms scores and outputs while the next state is formed (`scan/key_output.py`).
Scans without outputs have a warpgroup for every 64 columns of the state.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.plan import Scan, ScanResults
from glax._src.kernels.pallas_gpu.scan.exact import exact_outputs
from glax._src.kernels.pallas_gpu.scan.key_output import write_outputs
from glax._src.kernels.pallas_gpu.scan.key_program import Program
from glax._src.kernels.pallas_gpu.scan.key_refs import Barriers, Results, Tiles
from glax._src.kernels.pallas_gpu.scan.key_scale import scale_segment
from glax._src.kernels.pallas_gpu.scan.key_state import carry_own_columns, carry_shared_state


@functools.partial(jax.jit, static_argnums=0)  # so that equal scans are lowered once
def key_scan(
    w: Scan, table, q, a, b, g, scale, start, known_out_of_range=None, behind=None, newest=None
) -> ScanResults:  # fmt: skip
    """Scan every segment of `table` with per-key gates. Return `ScanResults`.

    table: [E, 4], the batch row, first chunk, number of chunks and sequence (for `scale`) of every segment; [E, H, 5] for
    `either`, whose fifth column is 1 against time. If packed, the table is [E, 7]: also the first row of the segment's first
    chunk in a, b, q and g, divided by 8; the segment's first row; and the row behind its last. If bounded, it is [E, 7] or
    [E, H, 7]: the last two columns are the row of the first token and the row behind the last, and the fifth is used by
    `either` alone.
    a, b: [B, T, heads, K] and [B, T, heads, V], k and v, or q and d_output with `adjoint`.
    g: the terms of the gates, [B, T, H, K] in bfloat16 each. start: [E, H, K, V] in float32.
    known_out_of_range: [B, chunks, H], `out_of_range` of the forward's `ScanResults`, which the scan of dL/dS reads.
    behind: [B, num_behind, H, K, V] in float32, the gradients of the caller's states, for a plan that adds them.
    newest: [B, chunks, C], the result of `newest_resets`, for a plan with resets.
    """
    B, T = a.shape[0], w.rows_of_chunks(a.shape[1])
    E = table.shape[0]

    def body(*refs):
        p = Program.of(w, *refs)
        pl.when(p.warpgroup >= w.consumers)(functools.partial(scale_segment, p))

        @pl.when(p.warpgroup < w.consumers)
        def _():
            if w.outputs:
                stages = functools.partial(write_outputs, p), functools.partial(carry_shared_state, p)
                lax.cond(p.warpgroup == 0, *stages)
            else:
                carry_own_columns(p)

    body.__name__ = "key_scan"  # in profiles
    results = tuple(x for x in Results.types(w, B, T, E) if x is not None)
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(w.V // w.columns * w.H * E,),
        grid_names=("program",),
        num_threads=w.consumers + w.scalers,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    operands = [table, q, a, b, *g, scale, start, scale if known_out_of_range is None else known_out_of_range]
    operands += [newest] * w.resets + [behind] * w.adds_behind
    found = Results(*once(("key_scan", w), kernel, *operands, results=results))
    o = exact_outputs(w, table, found.by_group, q, a, b, g, scale, found.o, newest) if w.outputs else found.o
    log, out_of_range = found.log if w.either else None, None if w.to_edge else found.out_of_range
    return ScanResults(o, found.states, found.last, log, out_of_range, found.behind)
