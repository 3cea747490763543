"""Form the pairs of tokens of every chunk under the delta rule: the inverse and the scores P, with per-head gates.

G_i is the sum of a chunk's log gates through token i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}     j before i
    R    = (I + L)^-1 - I
    P_ij = scale (q_i . k_j) e^{G_i - G_j}      j before i, j = i

No exponent is above 0 for gates <= 0, so one form is exact for all gates; a gate of -inf makes its pairs 0. L includes the
decays. The inverse of a matrix without decays may overflow where (I + L)^-1 is small.

The inverse is formed by blocks. The inverses of blocks on the diagonal, at first single tokens, are merged with their
neighbours' until one block is left. With X the inverses and M the blocks of L between neighbours, the merged inverses are X - X
M X. The operands of these products are sums of two bfloat16 numbers, which hold 16 bits. No power of L is formed.

A program has one chunk of one head, and one warpgroup. Programs are short. Several share a multiprocessor, and one computes
while another loads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder
from glax._src.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, by_column, by_row, high_part, tiled, transposed

BF16 = jnp.bfloat16
SIZES = 2, 4, 8, 16, 32  # of the blocks whose inverses are merged by products
PAIRS = (C, C)

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    gates: Ref  # [B, chunks, H, C]: sums of log2 gates from where the scan enters the chunk
    beta: Ref  # [B, chunks, H, C]
    scale: Ref  # [B, chunks]


class Results(NamedTuple):
    """Hold the results, in global memory."""

    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P


class Tiles(NamedTuple):
    """Hold the shared memory. A pair is a matrix in two terms."""

    q: Ref  # [C, K]
    k: Ref  # [C, K]
    gates: Ref  # [C]
    beta: Ref  # [C]
    inverse: tuple[Ref, Ref]  # [C, C]: X
    product: tuple[Ref, Ref]  # [C, C]: M X
    loaded: Ref  # barrier


@functools.partial(jax.jit, static_argnums=0)  # so that equal calls are lowered once
def pairs_of_chunks(reverse: bool, q, k, gates, beta, scale) -> Results:
    """Compute R and P of every chunk and head, in bfloat16. `Operands` has the shapes."""
    (B, chunks, H, _), K = gates.shape, q.shape[3]

    def body(*refs):
        *in_global, own = refs
        count = len(Operands._fields)
        write_pairs(reverse, Operands(*in_global[:count]), Results(*in_global[count:]), own)

    body.__name__ = "delta_pairs"  # in profiles
    pair = (tiled(C, C), tiled(C, C))
    own = Tiles(
        q=tiled(C, K),
        k=tiled(C, K),
        gates=plgpu.SMEM((C,), jnp.float32),
        beta=plgpu.SMEM((C,), jnp.float32),
        inverse=pair,
        product=pair,
        loaded=plgpu.Barrier(num_arrivals=4),
    )
    out = jax.ShapeDtypeStruct((B, chunks, H, C, C), BF16)
    kernel = plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(B * chunks * H,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[own],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_pairs", reverse), kernel, *Operands(q, k, gates, beta, scale)))


def write_pairs(reverse: bool, x: Operands, results: Results, t: Tiles):
    """Form R and P of one chunk and head."""
    _, chunks, H, _ = x.gates.shape
    rest = lax.axis_index("program")
    h, rest = remainder(rest, H), quotient(rest, H)
    # Traced, also where there is one chunk: a slice known to pass the end of a short row is refused.
    c, b = lax.rem(rest, jnp.int32(chunks)), quotient(rest, chunks)
    for source, tile in ((x.q, t.q), (x.k, t.k)):
        head = quotient(h, H // source.shape[2])
        plgpu.copy_gmem_to_smem(source.at[b, pl.ds(c * C, C), head], tile, t.loaded)
    for source, tile in ((x.gates, t.gates), (x.beta, t.beta)):
        plgpu.copy_gmem_to_smem(source.at[b, c, h], tile, t.loaded)
    plgpu.barrier_wait(t.loaded)
    i, j = tiles.positions(reverse)
    keys = tiles.product(PAIRS, (t.k, transposed(t.k)))
    queries = tiles.product(PAIRS, (t.q, transposed(t.k)))
    to = by_column(plgpu.load(t.gates, layout=BY_COLUMN, optimized=False), PAIRS)
    G = by_row(plgpu.load(t.gates, layout=BY_ROW), PAIRS)
    decay = jnp.exp2(jnp.where(i >= j, G - to, -jnp.inf))
    t.product[0][...] = (queries * decay * x.scale[b, c]).astype(BF16)
    beta = by_row(plgpu.load(t.beta, layout=BY_ROW), PAIRS)
    L = jnp.where(i > j, keys * decay * beta, 0.0)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.product[0], results.scores.at[b, c, h])
    X = jnp.where(i == j, 1.0, 0.0) - between_neighbours(L, 1, i, j)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for size in SIZES:
        X = merged(X, L, size, i, j, t)
    t.inverse[0][...] = jnp.where(i == j, 0.0, X).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.inverse[0], results.inverse.at[b, c, h])
    plgpu.wait_smem_to_gmem(0)


def split(x):
    """Return x as two terms of bfloat16."""
    high = high_part(x)
    return high.astype(BF16), (x - high).astype(BF16)


def store_split(pair, x):
    """Store x as the two terms of a pair of tiles."""
    for tile, term in zip(pair, split(x), strict=True):
        tile[...] = term
    plgpu.commit_smem()


def split_product(a, pair):
    """Return a @ b in float32, without the product of what both lose in bfloat16. a: in registers. pair: the terms of b."""
    high, rest = split(a)
    return tiles.product(PAIRS, (high, pair[0]), (high, pair[1]), (rest, pair[0]))


def between_neighbours(L, size: int, i, j):
    """Return the blocks of L below every second block of `size` on the diagonal, and 0 elsewhere."""
    block_i, block_j = quotient(i, size), quotient(j, size)
    return jnp.where((block_i == block_j + 1) & (remainder(block_j, 2) == 0), L, 0.0)


def merged(X, L, size: int, i, j, t: Tiles):
    """Return the inverses of the blocks of 2 * size on the diagonal of I + L, from X [C, C], the inverses of the blocks of
    `size`."""
    store_split(t.inverse, X)
    through = split_product(between_neighbours(L, size, i, j), t.inverse)
    store_split(t.product, through)
    return X - split_product(X, t.product)
