"""Compute the gradient of every chunk and head from the states at both its ends, for per-key gates.

S is the state before the chunk, dS = dL/dS behind it, and M the sum of log gates from the chunk's middle. x = q e^M, y = k
e^-M, A = scale mask(x y^T), dA = mask(do v^T). S' and dS' are the states decayed to the middle, as the scans store them:

    dq = scale e^M (do S'^T + dA y)      dk = e^-M (v dS'^T + scale dA^T x)      dv = A^T do + y dS'
    dg_t = sum_v S' dS' + scale sum_{i >= t} x_i (do S'^T)_i + sum_{j < t} y_j (v dS'^T)_j
           + scale sum_{i >= t} (x_i (dA y)_i - y_i (dA^T x)_i)

A reset divides a chunk (`resets`). A and dA then exclude pairs of tokens that a reset divides, the rows of do S'^T are those
of tokens before all resets of the chunk, and the rows of v dS'^T and y dS' those of tokens behind all. S' dS' has no term in
dg. A pair i >= t > j adds one term to the last sum, over tokens from t on; a pair with both tokens from t on adds two, which
cancel. So the sum may end before the next reset. It is 0 at a reset. The terms with S' have no rows from the first reset on,
and those with dS' none before the last.

The last sum cancels except for the pairs across t, because it is formed from the same x, y and dA as dq and dk. x, y and dA
have 16 bits in two terms of bfloat16, and their products are three of the four products of terms. A has 8 bits, and its
diagonal, the score of a token with itself, is added in float32. Where the gates of a chunk are out of range of e^M and e^-M,
the states are not decayed, and a second kernel computes the chunk exactly.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.gradient import exact as vjp_exact
from glax._src.kernels.pallas_gpu.gradient import key_chunk as vjp_key_gate_chunk
from glax._src.kernels.pallas_gpu.gradient.items import (
    SLOTS,
    Sizes,
    compute,
    launch,
    load,
    pipeline,
    scratch,
    warpgroups,
)
from glax._src.kernels.pallas_gpu.gradient.tiles import (
    CHUNK,
    marks,
    tokens,
)
from glax._src.kernels.pallas_gpu.plan import WHOLE, Blocks

TILES = ("q", "k", "v", "g", "do")
RESULTS = dict(dq="q", dk="k", dv="do", dg="v")
LATE = ("g", "v", "do")  # their places hold what dA, y and x lose in bfloat16 until then
LAST = ("v", "do")  # which a chunk begins without: what is loaded late is waited for, but for these


def gradient_key(
    q, k, v, g, d_output, scale, before, behind, out_of_range, places=None, *,
    reverse: bool, programs: int, blocks: Blocks = WHOLE, newest=None, interpret=None,
):  # fmt: skip
    """Return the terms of each block: dq, dk, dv, dg, [B, T, H, D] in bfloat16; d_scale, [B, chunks, H] in float32.

    H counts the blocks of all heads. T is a multiple of 8, and D is 64 or 128.
    q, k, v, d_output: [B, T, heads, D] in bfloat16, by block. Their heads divide those of the states.
    g: the log gates, [B, T, heads, D] in bfloat16, or the two terms of which they are the sum.
    scale: [B + 1] in float32, of which the last number is not used.
    before, behind: [B, chunks, H, D, D] in bfloat16, the state that enters each chunk in scan order, and the gradient of the
        state that leaves it. Both are decayed to the chunk's middle where out_of_range is 0.
    out_of_range: [B, chunks, H] in int32.
    places: [chunks, 3] in int32 for packed sequences, else None: the first row of every chunk in the inputs, divided by 8; the
        first of its rows that belongs to its sequence; and the row behind the last of these. Gradients are then in rows of
        chunks, scale is [chunks], and B = 1.
    programs: the number of multiprocessors.
    newest: [B, chunks, 64] in int32 for rows with resets (`newest_resets`), else None. d_scale is then by token, [B, chunks, H,
        64], and with `places` chunks lie one after another in the inputs.
    """
    (B, T), (_, chunks, H, D, _), packed = d_output.shape[:2], behind.shape, places is not None
    T = chunks * CHUNK if packed and newest is None else T
    n = Sizes(
        B, T, H, D, q.shape[2], k.shape[2], v.shape[2], programs, terms=len(g), blocks=blocks, packed=packed,
        resets=newest is not None,
    )  # fmt: skip
    inputs = dict(q=q, k=k, v=v, g=g[0], do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(reverse)) | (dict(g_rest=g[1]) if n.terms == 2 else {})
    inputs |= dict(places=places) if packed else {}
    inputs |= dict(marks=marks(newest, reverse)) if n.resets else {}
    options = dict(interpret=interpret, reverse=reverse, programs=programs)
    rows = jax.ShapeDtypeStruct((B, n.chunks, H, n.team, CHUNK), jnp.float32)
    each = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
    outputs = dict(dq=each, dk=each, dv=each, dg=each, used=rows)

    def positions(count):
        return plgpu.SMEM((count, CHUNK), jnp.int32)

    def near(m):
        warpgroups(
            lambda: load(n, m, TILES, RESULTS, LATE, LAST), lambda: compute(n, m, TILES, vjp_key_gate_chunk.chunk)
        )

    memory = (
        scratch(n, TILES, SLOTS)
        | pipeline(n, 3 * n.team + n.terms - 1 + n.resets, 2 * n.team)
        | (dict(marks=positions(SLOTS * n.teams)) if n.resets else dict(order=positions(2)))
    )
    if n.team == 1:
        memory |= vjp_key_gate_chunk.pair(n)
    found = launch("gradient_key", n, near, inputs, outputs, memory, threads=3, **options)
    inputs |= dict(out_of_range=out_of_range, any_out_of_range=vjp_exact.by_program(n, out_of_range))
    options["programs"] = vjp_exact.programs(n)
    exact, memory = functools.partial(vjp_exact.scan_program, n), vjp_exact.scratch(n)
    *gradients, used = launch("gradient_exact", n, exact, inputs, outputs, memory, over=found, threads=1, **options)
    return *gradients, used.sum(3) if n.resets else used.sum((3, 4))
