"""Invert the matrix of every chunk under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}     j before i
    R    = (I + L)^-1 - I

Exponents are sums of gates between two tokens, which are never above 0 for gates <= 0, so no gate needs another form. A gate of
-inf makes its pairs 0. L includes the decays. The inverse of a matrix without decays may overflow where (I + L)^-1 is small.

The inverse is formed by blocks. Those of 16 on the diagonal are inverted by substitution (`delta_blocks`), and then merged with
their neighbours until one block is left. With X the inverses and M the blocks of L between neighbours, the merged inverses are
X - X M X. The operands of these products are sums of two bfloat16 numbers, which hold 16 bits. No power of L is formed.

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

from glax._src.kernels.pallas_gpu import delta_blocks, tiles
from glax._src.kernels.pallas_gpu.edge_tiles import EdgeCopies, fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import C, chunk_of, quotient, remainder
from glax._src.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, by_column, by_row, high_part, tiled, transposed

BF16 = jnp.bfloat16
SIZES = 16, 32  # of the blocks whose inverses are merged
STEP = 16  # rows of the right side of a product
PAIRS = (C, C)

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    k: Ref  # [B, T, HK, K]
    gates: Ref  # [B, chunks, H, C]: sums of log2 gates from where the scan enters the chunk
    beta: Ref  # [B, chunks, H, C]


class Tiles(NamedTuple):
    """Hold the shared memory. A pair is a matrix in two terms."""

    k: Ref  # [C, K]
    gates: Ref  # [C]
    beta: Ref  # [C]
    result: Ref  # [C, C]: R
    inverse: tuple[Ref, Ref]  # [C, C]: X
    product: tuple[Ref, Ref]  # [C, C]: M X
    loaded: Ref  # barrier


@functools.partial(jax.jit, static_argnums=0)  # so that equal calls are lowered once
def inverses_of_chunks(reverse: bool, k, gates, beta, *edges) -> jax.Array:
    """Compute R of every chunk and head, [B, chunks, H, C, C] in bfloat16. `Operands` has the shapes. edges: the fields of
    `EdgeCopies`, or none."""
    (B, chunks, H, _), K = gates.shape, k.shape[3]
    operands = k, gates, beta, *edges

    def body(*refs):
        *given, inverse, own = refs
        write_inverse(reverse, *split_edges(Operands, given), inverse, own)

    body.__name__ = "delta_inverse"  # in profiles
    pair = tiled(C, C, columns=STEP), tiled(C, C, columns=STEP)
    own = Tiles(
        k=tiled(C, K),
        gates=plgpu.SMEM((C,), jnp.float32),
        beta=plgpu.SMEM((C,), jnp.float32),
        result=tiled(C, C),
        inverse=pair,
        product=pair,
        loaded=plgpu.Barrier(num_arrivals=3),
    )
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((B, chunks, H, C, C), BF16),),
        grid=(B * chunks * H,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[own],
        compiler_params=tiles.PARAMS,
    )
    return once(("delta_inverse", reverse), kernel, *operands)[0]


def write_inverse(reverse: bool, x: Operands, edges: EdgeCopies | None, result: Ref, t: Tiles):
    """Form R of one chunk and head."""
    _, chunks, H, _ = x.gates.shape
    b, c, h = chunk_of(lax.axis_index("program"), chunks, H)
    fetch_tokens(edges, "k", x.k, (b, c, quotient(h, H // x.k.shape[2]), slice(None)), t.k, t.loaded)
    for source, tile in ((x.gates, t.gates), (x.beta, t.beta)):
        plgpu.copy_gmem_to_smem(source.at[b, c, h], tile, t.loaded)
    plgpu.barrier_wait(t.loaded)
    i, j = tiles.positions(reverse)
    keys = tiles.product(PAIRS, (t.k, transposed(t.k)))
    to = by_column(plgpu.load(t.gates, layout=BY_COLUMN, optimized=False), PAIRS)
    G = by_row(plgpu.load(t.gates, layout=BY_ROW), PAIRS)
    beta = by_row(plgpu.load(t.beta, layout=BY_ROW), PAIRS)
    L = keys * beta * jnp.exp2(jnp.where(i > j, G - to, -jnp.inf))
    X = delta_blocks.inverses_of_blocks(L, reverse)
    for size in SIZES:
        X = merged(X, L, size, reverse, t.inverse, t.product)
    t.result[...] = jnp.where(i == j, 0.0, X).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.result, result.at[b, c, h])
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


def split_product(a, pair, rows: list[int]):
    """Return a @ b in float32, without the product of what both lose in bfloat16, from the rows of b that begin at `rows`, STEP
    each. a: in registers. pair: the terms of b."""
    high, rest = split(a)
    terms = (high, pair[0]), (high, pair[1]), (rest, pair[0])
    return tiles.product(PAIRS, *((x[:, row : row + STEP], b.at[pl.ds(row, STEP)]) for row in rows for x, b in terms))


def between_neighbours(L, size: int, reverse: bool):
    """Return the blocks of L between the first and the second of every two blocks of `size` on the diagonal, and 0 elsewhere."""
    i, j = tiles.positions(reverse)
    block_i, block_j = quotient(i, size), quotient(j, size)
    return jnp.where((block_i == block_j + 1) & (remainder(block_j, 2) == 0), L, 0.0)


def tokens_of(size: int, second: bool, reverse: bool) -> list[int]:
    """Return where the tokens of the first, or the second, of every two blocks of `size` begin, STEP at a time."""
    rows = range(0, C, STEP)
    return [row for row in rows if (C - STEP - row if reverse else row) // size % 2 == second]


def merged(X, L, size: int, reverse: bool, inverse: tuple[Ref, Ref], product: tuple[Ref, Ref]):
    """Return the inverses of the blocks of 2 * size on the diagonal of I + L, from X [C, C], the inverses of the blocks of
    `size`. inverse, product: the tiles of X and of M X, which may be the same."""
    if product is inverse:
        plgpu.commit_smem()  # all warps have read the product before
    store_split(inverse, X)
    between = between_neighbours(L, size, reverse)
    through = split_product(between, inverse, tokens_of(size, False, reverse))
    if product is inverse:
        plgpu.commit_smem()  # all warps have read X
    store_split(product, through)
    return X - split_product(X, product, tokens_of(size, True, reverse))
