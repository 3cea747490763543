"""Compute the gradient for per-head, constant or no gates, of heads that share queries and keys.

G is the sum of log gates from where the scan enters the chunk. D_ij = e^{G_i - G_j} for j <= i, else 0. S is the state before
the chunk, and dS = dL/dS behind it. P = q k^T, A = P D and dA = (do v^T) D, all of one head h:

    dq = scale sum_h ((e^G do) S^T) + scale (sum_h dA) k        dv_h = e^{G_last - G} (k dS) + scale A^T do
    dk = sum_h ((e^{G_last - G} v) dS^T) + scale (sum_h dA)^T q

The heads of a group have the same q and k. P is therefore formed once per group. The two products of dA are formed once, from
its sum over the heads. The other two sums grow in the accumulators of the products. The gates' gradient takes four numbers per
token from each head. They come from products that are formed anyway, because q_i (dA k)_i = sum_j P_ij dA_ij, and likewise for
keys:

    query side   do_i (e^{G_i} q_i S) + sum_j A_ij (do_i v_j)        key side   v_j (A^T do)_j
    before       v_j e^{G_last - G_j} (k_j dS)                       edge       e^{G_last} sum S dS

    dg_t = edge + sum_{i >= t} scale (query side - key side)_i + sum_{j < t} before_j

Query side and key side read the same A, rounded once, so that pairs on one side of t cancel. No exponent is positive, so the
gradient is exact for every gate. The columns of V are independent except for these sums: a head has a unit for every 64 of
them.

Where two chunks share a stored state, S is stored before the first and dS behind the last. The first chunk forms its dS from
the tokens of the last, and the last chunk its S from the tokens of the first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.gradient.head_group_refs import (
    BEFORE,
    COLUMNS,
    EDGE,
    KEY_SIDE,
    QUERY_SIDE,
    Barriers,
    HeadGroups,
    Program,
    Results,
    Tiles,
)
from glax._src.kernels.pallas_gpu.gradient.head_group_stages import compute_keys, compute_queries, load
from glax._src.kernels.pallas_gpu.gradient.items import warpgroups
from glax._src.kernels.pallas_gpu.gradient.tiles import tokens
from glax._src.kernels.pallas_gpu.plan import Blocks, C

OVERHEAD = 2  # the start and the end of an item take as long as this many units


def members(items: int, group: int, pieces: int, programs: int) -> int:
    """Return the number of heads of an item: the divisor of `group` with which the programs end first. Of equal divisors,
    return the largest.

    items: the number of chunks and groups in all.
    """

    def time(n: int) -> int:
        return -(-items * (group // n) // programs) * (n * pieces + OVERHEAD)

    return min((n for n in range(group, 0, -1) if group % n == 0), key=time)


def gradient_groups(
    q, k, v, G, d_output, scale, before, behind, *,
    group: int, reverse: bool, programs: int, columns: int = 1, edges=(), rows: int = 0, interpret=None,
):  # fmt: skip
    """Return dq and dk of parts of the heads, [B, T or rows, parts, K], and dv per head, [B, T, H, V], in bfloat16; dg, [B,
    chunks, C, H] in memory order, and d_scale by token, [B, chunks, H, C], in float32.

    q, k, v, d_output: [B, T, heads, K or V] in bfloat16. Their heads divide H, T is a multiple of 8, K is 64 or 128, and 64
    divides V.
    columns: the blocks of V that a head is divided into, each of which is a head of v, d_output and H; 1 for whole heads.
    group: the number of consecutive whole heads that share one head of q and one of k. A part is several consecutive heads of
        one group, equally many in each part.
    G: [B, chunks, whole heads, C] in float32, sums of log2 gates from where the scan enters the chunk through each token.
    scale: [B, chunks] in float32.
    before, behind: [B, runs, H, K, V] in bfloat16. A run has one chunk or two. before is the state that enters its first chunk
        in scan order, and behind is the gradient of the state that leaves its last.
    programs: the number of multiprocessors.
    edges: `Edges.block`, and the copies of q, k, v and d_output, if some chunks are read from copies.
    rows: of the results, where the operands have fewer, because the last chunk is read from a copy.
    """
    B, T, H, V = d_output.shape
    K, chunks, pieces, group = q.shape[3], G.shape[1], V // COLUMNS, group * columns
    n = HeadGroups(
        B, rows or T, H, K, pieces, q.shape[2], k.shape[2], v.shape[2],
        members=members(B * chunks * (H // group), group, pieces, programs), programs=programs,
        run=chunks // before.shape[1], reverse=reverse, blocks=Blocks(columns=columns), edges=bool(edges),
    )  # fmt: skip

    def body(*refs):
        p = Program.of(n, *refs)

        def computing():
            stages = functools.partial(compute_queries, p), functools.partial(compute_keys, p)
            lax.cond(lax.axis_index("wg") == 0, *stages)

        warpgroups(functools.partial(load, p), computing)

    body.__name__ = "gradient_groups"  # in profiles
    results = tuple(Results.types(n))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(programs,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[Tiles.types(n), Barriers.types(n)],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    v, d_output = (x.reshape(B, T, -1, COLUMNS) for x in (v, d_output))
    if edges:
        block, *tokens_of, v_edges, d_output_edges = edges
        edges = block, *tokens_of, *(x.reshape(*x.shape[:2], -1, COLUMNS) for x in (v_edges, d_output_edges))
    operands = q, k, v, d_output, G, scale, before, behind, tokens(reverse), *edges
    found = Results(*once(("gradient_groups", n), kernel, *operands, results=results, is_longest=True))
    sums = found.sums.reshape(B, chunks, H, pieces, 4, C).sum(3)
    return (
        found.dq,
        found.dk,
        found.dv.reshape(B, -1, H, V),
        gate_gradient(sums, scale, reverse),
        sums[:, :, :, QUERY_SIDE],
    )


def gate_gradient(sums: jax.Array, scale: jax.Array, reverse: bool) -> jax.Array:
    """Return dg [B, chunks, C, H] by the formula above, from four numbers per token, [B, chunks, H, 4, C]; all float32."""
    onward = np.tri(C, dtype=np.float32)
    onward = onward if reverse else onward.T
    # [B, chunks, H, C]
    pairs = scale[:, :, None, None] * (sums[:, :, :, QUERY_SIDE] - sums[:, :, :, KEY_SIDE])
    terms = jnp.stack([pairs, sums[:, :, :, BEFORE], sums[:, :, :, EDGE]], axis=3)
    matrices = np.stack([onward, 1 - onward, np.ones_like(onward)])
    return jnp.einsum("bchrx,rtx->bcth", terms, matrices, precision="highest")
