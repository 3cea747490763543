"""Invert the matrix of every chunk under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}     j before i
    L_ij = (e_i . k_j) e^{H_i - G_j}            with an erase vector
    R    = (I + L)^-1 - I

H_i is G_i, or where e reads the state before the token's decay the sum of the gates before token i.
Exponents are sums of gates between two tokens, which are never above 0 for gates <= 0, so no gate needs another form. A gate of
-inf makes its pairs 0. L includes the decays. The inverse of a matrix without decays may overflow where (I + L)^-1 is small. The
kernel also writes the factors by which the scans and the gradient multiply tokens.

The inverse is formed by blocks, and not from powers of L, which may be far larger than the inverse. X_b is the inverse of block b
on the diagonal of I + L, and L_sf the block of L in the rows of block s and the columns of block f. Blocks of 16 are inverted by
forward substitution. Then neighbours are merged, and merged again, until one block is left. Where f is the first of two
neighbours in scanning order, and s the second, their inverse has X_f and X_s on its diagonal, and between them

    Y = -X_s L_sf X_f

A matrix with blocks of `size` on its diagonal is a list of size / 16 arrays [64, 16]. Together they are [64, size]: each row has
the columns of its own block, and no others. Products have all 64 rows, of which those of the blocks s are used. Operands are sums
of two bfloat16 numbers, which hold 16 bits.

The substitution is in float32. Warp w holds rows 16 w to 16 w + 15 of L, as products leave them, and so all of block w. X begins
as I. At step j every row i subtracts L_ij X_j, and row j of X is final by then. Row j comes from the lanes that hold it, and L_ij
from the lane of the same row that holds column j, by shuffles. No shared memory and no barrier is needed. Pallas has no shuffles,
so this is written in the operations of MLIR.

Roles. There is a program for each multiprocessor. Each of its warpgroups inverts one item, a chunk of one head, at a time.
Warpgroups take items in turns, and load the keys of the next while they invert one. Memory: `Tiles`, of each warpgroup. Who waits
for whom:

    waits    for      until
    compute  compute  keys full: k

and of e, too, if there is one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.extend.mlir.dialects import math as math_of_mlir

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PARAMS, PROGRAM, SUMS_WITHIN_WARPS, WARPGROUP, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    EdgeCopies,
    by_column,
    by_row,
    iota,
    load_tokens,
    split,
    split_edges,
    tiled,
    transposed,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, chunk_of, quotient, remainder, tile_columns

BF16 = jnp.bfloat16
FACTORS = 5
BETA, ERASING, LEAVING, WITHIN, GATES = range(FACTORS)  # rows of `Results.factors`
READING = BETA  # the same row, with e
BLOCK = 16  # rows of a warp
TILE = 8  # rows and columns of a tile of registers; a lane holds two neighbouring columns of one row
COLUMN = C, BLOCK
# For each of the two merges: the first column of X in the tiles where it is stored, and the first of L X. What a merge overwrites
# was read before the last barrier.
PLACES = (0, BLOCK), (2 * BLOCK, 0)

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory. Each field's comment has its shape. HK is the number of heads of k,
    which divides H; C is 64, the tokens of a chunk."""

    k: Ref  # [B, T, HK, K], in bfloat16
    gates: Ref  # [B, chunks * C, H]: natural log gates, in bfloat16 or float32
    beta: Ref  # [B, chunks * C, H], in bfloat16 or float32; 0 for rows without a token; None with e
    e: Ref  # [B, T, H, K], in bfloat16; None with beta


class Results(NamedTuple):
    """Hold references to the results, in global memory, by chunk: the inverse R, and the factors by which the scans and the
    gradient multiply tokens. Each field's comment has its shape."""

    inverse: Ref  # [B, chunks, H, C, C]: R, in bfloat16
    # [B, chunks, H, FACTORS, C] in float32: beta, beta e^G, e^{G_last - G}, e^G, G to base 2; with e the first two are H to base
    # 2, and e^H
    factors: Ref


class Tiles(NamedTuple):
    """Hold references to the shared memory of one warpgroup: its keys [C, K], vectors [C] and matrices [C, C]."""

    k: Ref  # [C, K]
    numbers: Ref  # [C]: log2 gates, and then beta, or with e H to base 2
    sums: Ref  # [C]: G, to base 2
    result: Ref  # [C, C]: R
    pair: tuple[Ref, Ref]  # [C, C]: what is multiplied, in two terms
    e: Ref  # [C, K]; None with beta

    @classmethod
    def types(cls, K: int, has_erase: bool) -> "Tiles":
        """Return the shapes and dtypes of the tiles of all warpgroups of a program: each field with a leading axis over
        warpgroups. K: the width of keys. has_erase: whether e is an operand."""
        n, columns = warpgroups_of(K, has_erase), tile_columns(K)
        numbers, term = plgpu.SMEM((n, C), jnp.float32), tiled(n, C, C, columns=BLOCK)
        keys = tiled(n, C, K, columns=columns)
        e = keys if has_erase else None
        return cls(keys, numbers, numbers, tiled(n, C, C), (term, term), e)

    def of(self, me) -> "Tiles":
        """Return views of the tiles of the warpgroup with index `me` in its program, without their leading axis."""
        return jax.tree.map(lambda x: x.at[me], self)


@dataclasses.dataclass(frozen=True)
class InversePipeline(Pipeline):
    """Hold the barriers by which each warpgroup waits for its own copies. keys: a ring with one slot for each warpgroup."""

    keys: Ring

    @classmethod
    def planned(cls, K: int, has_erase: bool = False) -> "InversePipeline":
        """Build the pipeline for keys of width K; its barriers are allocated at launch. has_erase: whether e is loaded, too."""
        copies = "k", *("e",) * has_erase
        return cls(Ring(warpgroups_of(K, has_erase), ("compute",), ("compute",), copies, released_by=()))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that equal calls are lowered once
def inverses_of_chunks(reverse: bool, before_decay: bool, multiprocessors: int, k, gates, beta, e, *edges) -> Results:
    """Compute R and the factors of every chunk and head: the fields of `Results`, from k, gates, beta and e, the fields of
    `Operands`.

    before_decay: whether e reads the state before the token's decay. multiprocessors: the number of multiprocessors of the GPU,
    which is also the largest number of programs. edges: the fields of `EdgeCopies`, or none.
    """
    (B, rows, H), K, has_erase = gates.shape, k.shape[3], e is not None
    place, warpgroups = (B, rows // C, H), warpgroups_of(K, has_erase)
    programs = min(multiprocessors, -(-math.prod(place) // warpgroups))

    def body(operands, *refs):
        write_inverses(Program(reverse, before_decay, programs, *operands, *refs))

    numbers = jax.ShapeDtypeStruct((*place, FACTORS, C), jnp.float32)
    return launch(
        "delta_inverse",
        (reverse, before_decay),
        body,
        split_edges(Operands, (k, gates, beta, e, *edges)),
        Results(jax.ShapeDtypeStruct((*place, C, C), BF16), numbers),
        (Tiles.types(K, has_erase),),
        dict(compute=warpgroups),
        InversePipeline.planned(K, has_erase),
        programs=programs,
        params=SUMS_WITHIN_WARPS if has_erase else PARAMS,
    )


def warpgroups_of(K: int, has_erase: bool) -> int:
    """Return the number of warpgroups of a program: as many as registers and 227 KB of shared memory have room for. K: the
    width of keys. has_erase: whether e is an operand."""
    return 4 if K <= 128 else 3 - has_erase


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program. before_decay: whether e reads the state before its token's decay. programs: the
    number of all programs."""

    reverse: bool
    before_decay: bool
    programs: int
    operands: Operands
    edges: EdgeCopies | None
    results: Results
    tiles: Tiles
    pipeline: InversePipeline

    @property
    def total(self) -> int:
        """Return the number of items, the chunks of all heads."""
        return math.prod(self.results.inverse.shape[:3])

    @property
    def warpgroups(self) -> int:
        """Return the number of warpgroups of a program. Each has items of its own."""
        return self.tiles.k.shape[0]

    @property
    def stride(self) -> int:
        """Return the number of warpgroups of all programs."""
        return self.programs * self.warpgroups

    def place(self, item):
        """Return (batch row, chunk of the row, head) of an item. item: the item's number, in which heads vary fastest."""
        _, chunks, H = self.results.inverse.shape[:3]
        return chunk_of(item, chunks, H)

    def load(self, item, me):
        """Start to load the keys of an item, and e, unless its number is behind the last item. me: the warpgroup's index in its
        program, whose tiles are filled."""
        pl.when(item < self.total)(lambda: self.load_keys(item, me))

    def load_keys(self, item, me):
        """Start to load the keys of an item, [C, K], and e. me: the warpgroup's index in its program, whose tiles are
        filled."""
        b, c, h = self.place(item)
        for name, x, tile in (("k", self.operands.k, self.tiles.k), ("e", self.operands.e, self.tiles.e)):
            if x is not None:
                at = b, c, quotient(h, self.results.inverse.shape[2] // x.shape[2]), slice(None)
                load_tokens(self.edges, name, x, at, tile.at[me], self.pipeline.keys.full.at[me])

    def numbers(self, item):
        """Return the log2 gates of an item's tokens and, unless e is given, their beta: [C] each in float32, in registers by
        row. Gates are raised to at least LOG_OF_ZERO. An item behind the last has the numbers of the last."""
        b, c, h = self.place(jnp.minimum(item, self.total - 1))
        x, rows = self.operands, pl.ds(c * C, C)
        log, *beta = (
            plgpu.load(source.at[b, rows, h], layout=BY_ROW, optimized=False).astype(jnp.float32)
            for source in (x.gates, x.beta)
            if source is not None
        )
        return jnp.maximum(log, LOG_OF_ZERO) * LOG2E, *beta


def write_inverses(p: Program):
    """Write R and the factors of every chunk and head, in turns with all other warpgroups."""
    me = lax.axis_index(WARPGROUP)
    first, stride = lax.axis_index(PROGRAM) * p.warpgroups + me, p.stride

    def advance(step, numbers):
        item = first + step * stride
        write_inverse(p, me, item, item + stride, numbers)
        return p.numbers(item + stride)

    p.load(first, me)
    count = lax.div(jnp.maximum(p.total - first, 0) + (stride - 1), jnp.int32(stride))
    lax.fori_loop(0, count, advance, p.numbers(first))
    plgpu.wait_smem_to_gmem(0)


def write_inverse(p: Program, me, item, following, numbers):
    """Write R and the factors of an item to global memory, and start to load the keys of the item `following`.

    me: the warpgroup's index in its program. item, following: numbers of items. numbers: the gates and beta of the item, from
    `Program.numbers`.
    """
    if p.operands.e is not None:
        me = lax.optimization_barrier(me)  # registers have no room for addresses that stay through a loop
    (log, *beta), t, place = numbers, p.tiles.of(me), p.place(item)
    G, H = sums_of_gates(p.reverse, p.before_decay, log, t)
    write_factors(G, H, beta, t.sums[0 if p.reverse else C - 1], p.results.factors.at[place])
    t.numbers[...] = beta[0] if beta else H  # in the place of the gates, which all warps have read
    p.pipeline.keys.wait(me)
    keys = tiles.product(PAIRS, (t.k if t.e is None else t.e, transposed(t.k)))
    plgpu.commit_smem()  # all warps have read the keys
    p.load(following, me)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # R of the item before has left its tile
    store_inverse(functools.partial(erased, t, keys), p.reverse, t.pair, t.result)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.result, p.results.inverse.at[place])


def erased(t: Tiles, keys, size: int, places, is_counted=None):
    """Return a part of L, [C, BLOCK]: in rows [size i, size (i + 1)) the BLOCK columns of L from places[i] on.

    keys: k_i . k_j or e_i . k_j, [C, C]. is_counted: a mask of the entries to keep, the others being 0. Without it nothing is
    masked: rows of first blocks then hold numbers that are not in L, and no product of these rows is used.
    """
    picked = of_rows(size, [keys[:, at : at + BLOCK] for at in places])
    to = of_rows(size, [by_column(numbers_of(t.sums.at[pl.ds(at, BLOCK)], BY_COLUMN), COLUMN) for at in places])
    between = by_row(numbers_of(t.sums if t.e is None else t.numbers, BY_ROW), COLUMN) - to
    between = between if is_counted is None else jnp.where(is_counted, between, -jnp.inf)
    picked = picked * by_row(numbers_of(t.numbers, BY_ROW), COLUMN) if t.e is None else picked
    return picked * jnp.exp2(between)


def numbers_of(ref, layout):
    """Load the numbers of a vector in shared memory into registers, in float32 and the given layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def sums_of_gates(reverse: bool, before_decay: bool, log, t: Tiles):
    """Return G and H, [C] each to base 2, in registers by row, and store G in `Tiles.sums`. Without `before_decay`, H is G.
    log: the log2 gates, [C]."""
    i, j = tiles.positions_again(reverse)
    t.numbers[...] = log
    plgpu.commit_smem()
    through, gates = i >= j, by_column(numbers_of(t.numbers, BY_COLUMN), PAIRS)
    G = jnp.where(through, gates, 0.0).sum(1)
    t.sums[...] = G
    H = jnp.where(i > j, gates, 0.0).sum(1) if before_decay else G
    plgpu.commit_smem()
    return G, H


def write_factors(G, H, beta: list, last, factors: Ref):
    """Write the factors by which the scans and the gradient multiply tokens to global memory.

    G, H, and the entry of `beta` if there is one: [C], by row, G and H to base 2. last: G of the last token. factors: a
    reference [FACTORS, C].
    """
    within = jnp.exp2(G)
    reading = within if H is G else jnp.exp2(H)
    erasing = (beta[0], beta[0] * within) if beta else (H, reading)
    for row, x in zip(range(FACTORS), (*erasing, jnp.exp2(last - G), within, G), strict=True):
        factors[row] = x


def store_inverse(L: Callable, reverse: bool, pair: tuple[Ref, Ref], result: Ref):
    """Store (I + L)^-1 - I in `result` [C, C], in bfloat16.

    L: a function of (size, places, is_counted), so that L is formed where it is used. The function returns an array [C, BLOCK]
    in float32, which in its rows [size i, size (i + 1)) has the BLOCK columns of L from places[i] on. is_counted: a mask of the
    entries that count, the others being 0; None where the others do no harm, because no product of their rows is used. reverse:
    whether L is upper triangular. pair: tiles [C, C] of BLOCK columns, which are overwritten with two terms of operands.
    """
    i, j = remainder(iota(COLUMN, 0), BLOCK), iota(COLUMN, 1)
    own = L(BLOCK, range(0, C, BLOCK), i < j if reverse else i > j)
    X = inverses_of_blocks(own, reverse)
    between = across([X], L, reverse, pair, *PLACES[0])
    further = across(joined([X], between, reverse), L, reverse, pair, *PLACES[1])
    rest = joined([jnp.where(i == j, 0.0, X)], between, reverse)
    result[...] = jnp.concatenate(joined(rest, further, reverse), axis=1).astype(BF16)


def of_rows(size: int, found: list):
    """Return an array whose rows [size i, size i + size) are those of found[i], for every i."""
    number, rows = quotient(iota(found[0].shape, 0), size), found[-1]
    for i, x in enumerate(found[:-1]):
        rows = jnp.where(number == i, x, rows)
    return rows


def joined(X: list, between: list, reverse: bool) -> list:
    """Return the inverses of blocks of twice the size, as a list of arrays [C, BLOCK].

    X: the inverses of the blocks, such a list of half the length. between: Y of every two neighbours, in the rows of the second
    block of each, a list as long as X.
    """
    is_odd = remainder(quotient(iota(COLUMN, 0), len(X) * BLOCK), 2) == 1
    first = [jnp.where(is_odd, 0.0 if reverse else y, x) for x, y in zip(X, between, strict=True)]
    return first + [jnp.where(is_odd, x, y if reverse else 0.0) for x, y in zip(X, between, strict=True)]


def across(X: list, L: Callable, reverse: bool, pair, place: int, onward: int) -> list:
    """Return Y = -X_s L_sf X_f of every two neighbouring blocks, in the rows of the second: a list of arrays [C, BLOCK], as
    long as X.

    X: the inverses of the blocks. L: as for `store_inverse`. pair: tiles that take X in the columns from `place`, and L X in
    those from `onward`.
    """
    n, size = len(X), len(X) * BLOCK
    pairs = range(C // (2 * size))
    first, second = ([(2 * i + (reverse != late)) * size for i in pairs] for late in (False, True))
    terms = [split(x) for x in X]
    for at, of_column in enumerate(terms):
        store_columns(pair, place + at * BLOCK, of_column)
    plgpu.commit_smem()
    left = [split(L(2 * size, [row + at * BLOCK for row in first])) for at in range(n)]
    store_columns(pair, onward, split(products(left, pair, place, size, first)))
    plgpu.commit_smem()
    found = products(terms, pair, onward, size, second)
    return [-found[:, at : at + BLOCK] for at in range(0, size, BLOCK)]


def store_columns(pair, place: int, terms):
    """Store the two bfloat16 terms of a matrix in shared memory, one in each tile of `pair`, in the columns from `place` on."""
    for tile, term in zip(pair, terms, strict=True):
        tile.at[:, pl.ds(place, term.shape[1])][...] = term


def products(left: list, pair, place: int, size: int, rows: list[int]):
    """Return the products of blocks of rows, [C, size]: each 2 * size rows of a matrix a are multiplied with `size` rows of a
    matrix b of their own. The product of the second terms of both is left out.

    left: a, [C, size], in parts of BLOCK columns, each as two bfloat16 terms in registers. pair: the two terms of b, in the
    columns from `place` on. rows: for each 2 * size rows of a, the first of the rows of b that it is multiplied with.
    """

    def scope(*totals):
        for total, row in zip(totals, rows, strict=True):
            for at, (high, rest) in enumerate(left):
                part = pl.ds(row + at * BLOCK, BLOCK), pl.ds(place, size)
                for a, tile in ((high, pair[0]), (high, pair[1]), (rest, pair[0])):
                    plgpu.wgmma(total, a, tile.at[part])
        return of_rows(2 * size, lax.optimization_barrier([total[...] for total in totals]))

    return pl.run_scoped(scope, *(plgpu.ACC((C, size), jnp.float32) for _ in rows))


def inverses_of_blocks(L, reverse: bool):
    """Return (I + L_b)^-1 for the blocks L_b of 16 rows in L [C, 16], [C, 16] in float32 registers: one block below the other.

    reverse: whether the blocks are upper triangular.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((C, BLOCK), jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(functools.partial(substitute, reverse=reverse))(L)


def substitute(context, L, *, reverse: bool):
    """Return (I + L_b)^-1 of the blocks of L, as `inverses_of_blocks` does, for a FragmentedArray L [C, 16] in the layout of
    products: by forward substitution in operations of MLIR. context: the lowering's context, which is not used."""
    del context
    lane = Lane()
    registers = L.registers.reshape(2, 2)  # [tile of columns, tile of the warp's rows], of two columns each
    X = inverse_of_block(
        lane, [[lane.columns(registers[column, row]) for column in range(2)] for row in range(2)], reverse
    )
    found = registers.copy()
    for column, row in ((column, row) for column in range(2) for row in range(2)):
        found[column, row] = lane.pair(X[row][column])
    return type(L)(_registers=found.reshape(L.registers.shape), _layout=L.layout, _is_signed=None)


def inverse_of_block(lane: "Lane", block, reverse: bool) -> list:
    """Return the inverse of I + block, for the 16 rows of a warp. Both are nested lists of this lane's MLIR values, indexed
    [tile of rows][tile of columns][column]."""
    X = lane.identity()
    for step in range(BLOCK - 1):
        eliminate(lane, block, X, BLOCK - 1 - step if reverse else step, reverse)
    return X


def eliminate(lane: "Lane", block, X, j: int, reverse: bool):
    """Subtract L_ij X_j from every row i of X behind row j, in place: X gets new values. block, which is L, and X are nested
    lists, indexed [tile of rows][tile of columns][column]."""
    tile, within = divmod(j, TILE)
    # Row j has columns up to j, or in reverse from j on. The rows behind it begin in its own tile.
    columns = range(tile, 2) if reverse else range(tile + 1)
    rows = range(tile + 1) if reverse else range(tile, 2)
    of_row = {column: [lane.of_row(within, x) for x in X[tile][column]] for column in columns}
    for row in rows:
        factor = arith.negf(lane.of_column(within // 2, block[row][tile][within % 2]))
        for column, values in of_row.items():
            X[row][column] = [
                math_of_mlir.fma(factor, value, x) for value, x in zip(values, X[row][column], strict=True)
            ]


class Lane:
    """Represent one lane of a warp: its position in a tile, and what it reads from other lanes by shuffles. Numbers are MLIR
    values."""

    def __init__(self):
        self.integer = ir.IntegerType.get_signless(32)
        self.float = ir.F32Type.get()
        self.vector = ir.VectorType.get((2,), self.float)
        self.number = arith.remui(utils.thread_idx(), self.constant(32))

    def constant(self, x: int):
        """Return x as an int32 value of MLIR."""
        return utils.c(x, self.integer)

    def columns(self, pair) -> list:
        """Return the two numbers of a vector of MLIR, as a list."""
        place = ir.DenseI64ArrayAttr.get
        return [vector.extract(pair, dynamic_position=[], static_position=place([i])) for i in range(2)]

    def pair(self, columns):
        """Return the vector of MLIR with two numbers."""
        return vector.from_elements(self.vector, list(columns))

    def identity(self) -> list:
        """Return this lane's part of I, indexed [tile of rows][tile of columns][column]."""
        zero, one = utils.c(0.0, self.float), utils.c(1.0, self.float)
        row, first = arith.divui(self.number, self.constant(4)), arith.remui(self.number, self.constant(4))
        first = arith.muli(first, self.constant(2))

        def diagonal(column: int):
            place = arith.addi(first, self.constant(column))
            return arith.select(arith.cmpi(arith.CmpIPredicate.eq, row, place), one, zero)

        return [[[diagonal(i) if a == b else zero for i in range(2)] for b in range(2)] for a in range(2)]

    def shuffled(self, x, lane):
        """Return the value of x in the warp's lane with number `lane`. All lanes of the warp take part."""
        nvvm = utils.nvvm  # which JAX exports nowhere else
        return nvvm.shfl_sync(utils.c(0xFFFFFFFF, self.integer), x, lane, self.constant(31), nvvm.ShflKind.idx)

    def of_row(self, row: int, x):
        """Return the value of x in the lane that holds the same columns of row `row` of the tile."""
        return self.shuffled(x, arith.addi(arith.remui(self.number, self.constant(4)), self.constant(4 * row)))

    def of_column(self, pair: int, x):
        """Return the value of x in the lane that holds the `pair`-th pair of columns of the same row."""
        first = arith.muli(arith.divui(self.number, self.constant(4)), self.constant(4))
        return self.shuffled(x, arith.addi(first, self.constant(pair)))
