"""Provide what the Hopper kernels share: tiles of 64 tokens in shared memory, products on them, sums of gates, exact factors.

A chunk is 64 tokens, the rows of one warpgroup's product. Logarithms are natural in memory and to base 2 in registers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.plan import C

HALF = C // 2
LOG2E = math.log2(math.e)

Ref = Any
SomeLayout = Any  # a layout of values in registers; JAX does not export its type

WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
# Registers of a thread that loads, and of one that computes, where one warpgroup loads and two compute. Together they have 3 x
# 168 at launch. A request for more would wait forever.
REGISTERS = 24, 240


def in_every_warp(count: int):
    """Return the layout in registers of a vector of `count` numbers, all of which every warp holds. count: a multiple of 32."""
    tiling = Tiling(((count,), (count // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


def tiled(*shape, columns: int = 64, dtype: Any = jnp.bfloat16):
    """Return the type of shared memory for tiles, in the layout that the copy engine writes and the tensor cores read.

    shape: the last two axes are rows and columns. columns: the columns of a tile, 16, 32 or 64, into which the last axis is
    divided. A row of a tile has at most 128 bytes, so 32 columns in float32. A product whose left side is in registers takes
    this many columns of the left side at a time.
    """
    # JAX 0.12 leaves methods of these classes abstract.
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(jnp.dtype(dtype).itemsize * columns),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref):
    """Return a view of the matrix `ref` in shared memory with its two axes exchanged, as an operand of a product."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def product(shape, *pairs) -> jax.Array:
    """Return the sum of a @ b over the pairs, in float32 in registers, once all products have ended. shape: the result's,
    (rows, columns).

    The calling warpgroup issues the products. b is in shared memory; a is in shared memory or registers; both are bfloat16.
    """

    def scope(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))


def added(total, *pairs) -> jax.Array:
    """Return total + the sum of a @ b over the pairs, by products of tensor cores, once all have ended.

    total: [rows, columns] in float32 in registers. a: in registers or shared memory; b: in shared memory; both bfloat16.
    """

    def scope(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)

    found: Any = pl.run_state(scope)(plgpu.ACC.init(total))  # the array that the accumulator holds at the end
    return found


def added_all(totals, *pairs) -> tuple[jax.Array, ...]:
    """Return a tuple of each total plus the sum of a @ b over its pairs, once all products have ended. All products run
    concurrently.

    totals: a tuple of float32 arrays in registers. pairs: for each total a list of (a, b), as in `added`.
    """

    def scope(accumulators):
        for accumulator, of_one in zip(accumulators, pairs, strict=True):
            for a, b in of_one:
                plgpu.wgmma(accumulator, a, b)

    found: Any = pl.run_state(scope)(tuple(plgpu.ACC.init(total) for total in totals))
    return found


def after(total, running: int = 0):
    """Return the product in the accumulator `total` once at most `running` later products of the warpgroup are still running.

    The barrier keeps the compiler from using the product before that.
    """
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(total, wait_n=running))


def iota(shape, axis) -> jax.Array:
    """Return each number's index along an axis, in int32 and the layout of products."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def read(ref, layout: SomeLayout = WGMMA) -> jax.Array:
    """Load a reference in shared memory into registers in float32, in the given layout, by default the layout of products."""
    return plgpu.load(ref, layout=layout).astype(jnp.float32)


def store(ref, x):
    """Store x, in registers, in a reference in shared or global memory.

    JAX 0.12 refuses stores in small pieces and stores with bank conflicts unless `optimized=False`, as here, allows them.
    """
    store_as_is = getattr(plgpu, "store", None)
    if store_as_is is None:
        ref[...] = x
    else:
        store_as_is(ref, x, optimized=False)


def clear(found, first, end):
    """Zero the rows before `first` and from `end` on in each of the tiles `found`, [C, 64] in bfloat16 in shared memory, in
    place. All warps of a warpgroup call this.

    A fence stands between two tiles, over which the compiler moves no reads. It would otherwise read all tiles together, and
    there are not enough registers for that.
    """
    for tile in found:
        x = plgpu.load(tile, layout=WGMMA)
        # Behind a barrier, so that the compiler does not hold it throughout a loop.
        row = by_row(lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW)), x.shape)
        tile[...] = jnp.where((row >= first) & (row < end), x, jnp.bfloat16(0))
        plgpu.commit_smem()


def by_row(x, shape) -> jax.Array:
    """Return x [m], in the layout BY_ROW, repeated over the columns of [m, n]. shape: (m, n)."""
    return lax.broadcast_in_dim(x, shape, [0])


def by_column(x, shape) -> jax.Array:
    """Return x [n], in the layout BY_COLUMN, repeated over the rows of [m, n]. shape: (m, n)."""
    return lax.broadcast_in_dim(x, shape, [1])


def decayed(S, log) -> jax.Array:
    """Return e^log S in registers: S [K, columns] with natural log decays `log` [K] applied to its rows."""
    return S * by_row(jnp.exp2(log * LOG2E), S.shape)


def zeros(shape, layout: SomeLayout = WGMMA) -> jax.Array:
    """Return zeros in float32 in registers, in the given layout, by default the layout of products."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def high_part(x):
    """Return float32 x truncated to the bits that bfloat16 has, in float32."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)


def rounded_part(x):
    """Return float32 x rounded to the bits of bfloat16, halves away from 0, in float32. A cast there and back would not do,
    because XLA drops it."""
    return lax.bitcast_convert_type((lax.bitcast_convert_type(x, jnp.int32) + 0x8000) & -65536, jnp.float32)


def split(x):
    """Return x, in float32, as two terms in bfloat16: x truncated, and the rest."""
    high = high_part(x)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def store_split(pair, x):
    """Store x as the two terms of `split` in `pair`, two tiles in shared memory of the shape of x."""
    for tile, term in zip(pair, split(x), strict=True):
        tile[...] = term
    plgpu.commit_smem()


def indicator(condition) -> jax.Array:
    """Return the condition, an array of bool, as 1 and 0 in bfloat16, an operand of a product."""
    return jnp.where(condition, 1.0, 0.0).astype(jnp.bfloat16)


def positions(reverse: bool):
    """Return the positions in scan order of every row and of every column of a [C, C] matrix, two arrays [C, C] in int32 in
    registers. reverse: whether the scan goes from the last row to the first."""
    i, j = iota((C, C), 0), iota((C, C), 1)
    return (C - 1 - i, C - 1 - j) if reverse else (i, j)


def positions_again(reverse: bool):
    """Return the result of `positions`, formed anew at each use behind a barrier of the compiler, so that registers do not hold
    it through loops."""
    row = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW))
    i, j = by_row(row, (C, C)), iota((C, C), 1)
    return (C - 1 - i, C - 1 - j) if reverse else (i, j)


def middle_matrix(reverse: bool) -> jax.Array:
    """Return the matrix [C, C] in bfloat16, in registers, whose product with gates [C, D] has in row i the sum of the gates
    from the chunk's middle through token i in scan order. Before the middle it is the sum behind token i up to the middle, with
    sign -1."""
    i, j = positions(reverse)
    after, before = (j >= HALF) & (j <= i), (j < HALF) & (j > i)
    return (jnp.where(after, 1.0, 0.0) - jnp.where(before, 1.0, 0.0)).astype(jnp.bfloat16)


def edge_matrix(reverse: bool, adjoint) -> jax.Array:
    """Return the matrix [C, C] of 0 and 1 in bfloat16, in registers, whose product with gates [C, D] has in row i the sum of
    the gates between token i and the edge by which the scan leaves the chunk.

    These gates are those behind i, or with `adjoint` those through i. reverse: whether the sequence is scanned from its last
    token to its first, so that "behind" is at lower rows. adjoint: 0 for a scan of states, 1 for a scan of dL/dS, which goes
    the other way; may be traced.
    """
    i, j = positions(reverse)
    through = jnp.where(j <= i, 1.0, 0.0)
    return (through * adjoint + (1.0 - through) * (1.0 - adjoint)).astype(jnp.bfloat16)


def halves(reverse: bool) -> jax.Array:
    """Return the matrix [C, C] of 0 and 1 in bfloat16, in registers, whose product with gates [C, D] has two sums: in row 0 of
    the gates before the chunk's middle in scan order, and in row 1 of the others. All other rows are 0."""
    row, j = iota((C, C), 0), iota((C, C), 1)
    first, second = (1, 0) if reverse else (0, 1)
    return indicator(((j < HALF) & (row == first)) | ((j >= HALF) & (row == second)))


def by_halves(ref):
    """Return a view [C, 8] of the first 8 rows of `ref`, transposed, as the right side of a product. ref: a matrix [C, C] in
    shared memory, such as the matrix of `halves`."""
    return transposed(ref.at[pl.ds(0, 8)])


def column_of(x, index: int) -> jax.Array:
    """Return column `index` of the matrix x [m, n] in registers as [m], in the layout BY_ROW."""
    return jnp.sum(jnp.where(iota(x.shape, 1) == index, x, 0.0), axis=1)


class EdgeCopies(NamedTuple):
    """Hold references to the copies from which a kernel reads the chunks that contain rows without a token, in global memory.

    block: for each chunk, the block of C rows of a copy that holds the chunk, or -1. A copy is None if the kernel does not read
    that array.
    """

    block: Ref  # [chunks]: 0, 1 or 2, the block of C rows of a copy that a chunk is read from; -1 for none
    k: Ref  # [B, 3 C, HK, K]
    q: Ref = None  # [B, 3 C, HQ, K]
    v: Ref = None  # [B, 3 C, HV, V]
    d_output: Ref = None  # [B, 3 C, H, V]
    e: Ref = None  # [B, 3 C, H, K]
    w: Ref = None  # [B, 3 C, H, V]


def split_edges(kind, operands):
    """Return (the first operands as a `kind`, the rest as EdgeCopies). The second is None if there is no rest. kind: a
    NamedTuple, whose fields are the first operands."""
    count = len(kind._fields)
    return kind(*operands[:count]), EdgeCopies(*operands[count:]) if operands[count:] else None


def load_rows(block: Ref | None, chunk, load: Callable):
    """Run load(rows, from_copy) for the rows of a chunk: a slice of C rows and False, or if a copy holds the chunk, a slice of
    the copy and True.

    block: [chunks], the field of `EdgeCopies`, or None without copies. chunk: the index of the chunk in its row.
    """
    if block is None:
        load(pl.ds(chunk * C, C), False)
        return
    at = block[chunk]
    pl.when(at < 0)(lambda: load(pl.ds(chunk * C, C), False))
    pl.when(at >= 0)(lambda: load(pl.ds(at * C, C), True))


def load_tokens(edges: EdgeCopies | None, name: str, x, at, tile, loaded):
    """Start to load the rows of x in a chunk, [C, columns], into `tile`. If a copy holds the chunk, load from that. Do not
    wait.

    name: the field of `edges` with the copy of x. edges: None without copies. x: [B, T, heads, width] in global memory. at:
    batch row, chunk, head, and a slice of the width. tile: in shared memory. loaded: the barrier at which the copy reports its
    end.
    """
    b, chunk, head, columns = at

    def load(rows, from_copy: bool):
        source = getattr(edges, name) if from_copy else x
        plgpu.copy_gmem_to_smem(source.at[b, rows, head, columns], tile, loaded)

    load_rows(None if edges is None else edges.block, chunk, load)
