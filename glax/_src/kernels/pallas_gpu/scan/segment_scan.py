"""Compute the state that enters every segment from the segments' own states: S' = e^L S + f X along a sequence.

X is the final state of a segment that begins from zero, L its log decays, and f the scale of dL/dS or 1. XLA would form each
state from the first segment on, and would read 16 segments 120 times. Here every program has a tile of the state and reads each
segment once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_ROW, LOG2E, WGMMA, by_row, store, zeros
from glax._src.kernels.pallas_gpu.plan import quotient, remainder

TILE = 64, 8  # rows and columns of the state in a program: 4 numbers a thread
TOGETHER = 8  # the most segments whose states are fetched together; lowering takes 0.05 s for each


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that forward and gradient lower it once
def segment_scan(parts: int, given: bool, states, log, factor, start, descending):
    """Return the state that enters every segment, [E, H, K, V] in float32.

    states: [E, H, K, V], and log: [E, H, K or 1], of `parts` segments of each sequence. factor: [N], and one unused number.
    start: [N, H, K, V], if `given`. descending: [1], 1 if the scan goes from the last segment to the first.
    """
    E, H, K, V = states.shape
    across, down = V // TILE[1], K // TILE[0]
    together = max(i for i in range(1, TOGETHER + 1) if parts % i == 0)

    def body(states_g, log_g, factor_g, start_g, descending_g, out_g):
        program = lax.axis_index("program")
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

    body.__name__ = "segment_scan"  # in profiles
    results = [jax.ShapeDtypeStruct(states.shape, jnp.float32)]
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(E // parts * H * down * across,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    operands = states, log, factor, start, descending
    return once(("segment_scan", parts, given), kernel, *operands, results=results)[0]
