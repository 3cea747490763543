"""Invert the blocks of 16 on the diagonal of I + L by forward substitution, in float32.

L [64, 64] is strictly triangular, in registers as products leave it: warp w holds rows 16 w to 16 w + 15, and so all of block w.
X begins as I. At step j every row i subtracts L_ij X_j, and row j of X is final by then. Row j comes from the lanes that hold it,
and L_ij from the lane of the same row that holds column j, by shuffles. No shared memory and no barrier is needed.

Pallas has no shuffles, so this is written in the operations of MLIR.
"""

import functools

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, math, vector

from glax._src.kernels.pallas_gpu.plan import C

WARPS = 4
BLOCK = 16  # rows of a warp
TILE = 8  # rows and columns of a tile of registers; a lane holds two neighbouring columns of one row


def inverses_of_blocks(L, reverse: bool):
    """Return the inverses of the blocks of 16 on the diagonal of I + L, and 0 elsewhere: [C, C] in float32, as L is.

    reverse: whether L is upper triangular. The rows are then final from the last to the first.
    """
    return inline(substitute, (C, C), reverse)(L)


def inverses_of_stacked_blocks(L, reverse: bool):
    """Return the inverses of I + the blocks of 16 in L [C, 16], one below the other: [C, 16] in float32, as L is.

    reverse: whether the blocks are upper triangular.
    """
    return inline(substitute_stacked, (C, BLOCK), reverse)(L)


def inline(f, shape, reverse: bool):
    """Return f as an operation on float32 arrays of this shape, in registers as products leave them."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(functools.partial(f, reverse=reverse))


def substitute(context, L, *, reverse: bool):
    """Compute `inverses_of_blocks` of a FragmentedArray in a kernel that is being lowered."""
    del context
    lane = Lane()
    registers = L.registers.reshape(C // TILE, 2)  # [tile of columns, tile of the warp's rows], of two columns each
    # [tile of rows, tile of columns, column]: the lane's part of its warp's block
    block = [[lane.columns(lane.of_own_warp(registers[column::2, row])) for column in range(2)] for row in range(2)]
    X = inverse_of_block(lane, block, reverse)
    found = registers.copy()
    for tile, row in ((tile, row) for tile in range(C // TILE) for row in range(2)):
        found[tile, row] = lane.only_in_warp(tile // 2, lane.pair(X[row][tile % 2]))
    return type(L)(_registers=found.reshape(L.registers.shape), _layout=L.layout, _is_signed=None)


def substitute_stacked(context, L, *, reverse: bool):
    """Compute `inverses_of_stacked_blocks` of a FragmentedArray in a kernel that is being lowered."""
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
    """Return the inverse of I + block: both [tile of rows, tile of columns, column]."""
    X = lane.identity()
    for step in range(BLOCK - 1):
        eliminate(lane, block, X, BLOCK - 1 - step if reverse else step, reverse)
    return X


def eliminate(lane: "Lane", block, X, j: int, reverse: bool):
    """Subtract L_ij X_j from every row i of X behind row j. block: L, X: both [tile of rows, tile of columns, column]."""
    tile, within = divmod(j, TILE)
    # Row j has columns up to j, or in reverse from j on. The rows behind it begin in its own tile.
    columns = range(tile, 2) if reverse else range(tile + 1)
    rows = range(tile + 1) if reverse else range(tile, 2)
    of_row = {column: [lane.of_row(within, x) for x in X[tile][column]] for column in columns}
    for row in rows:
        factor = arith.negf(lane.of_column(within // 2, block[row][tile][within % 2]))
        for column, values in of_row.items():
            X[row][column] = [math.fma(factor, value, x) for value, x in zip(values, X[row][column], strict=True)]


class Lane:
    """One lane of a warp: its place, and what it reads from others. Numbers are values of MLIR."""

    def __init__(self):
        self.integer = ir.IntegerType.get_signless(32)
        self.float = ir.F32Type.get()
        self.vector = ir.VectorType.get((2,), self.float)
        self.number = arith.remui(utils.thread_idx(), self.constant(32))
        self.warp = arith.remui(utils.warp_idx(), self.constant(WARPS))

    def constant(self, x: int):
        return utils.c(x, self.integer)

    def equal(self, x, y: int):
        return arith.cmpi(arith.CmpIPredicate.eq, x, self.constant(y))

    def of_own_warp(self, x):
        """Return the entry of x [WARPS] whose place is the lane's warp."""
        found = x[-1]
        for warp in range(WARPS - 1):
            found = arith.select(self.equal(self.warp, warp), x[warp], found)
        return found

    def only_in_warp(self, warp: int, pair):
        """Return the pair in that warp, and 0 in others."""
        zero = utils.c(0.0, self.float)
        return arith.select(self.equal(self.warp, warp), pair, self.pair([zero, zero]))

    def columns(self, pair) -> list:
        place = ir.DenseI64ArrayAttr.get
        return [vector.extract(pair, dynamic_position=[], static_position=place([i])) for i in range(2)]

    def pair(self, columns):
        return vector.from_elements(self.vector, list(columns))

    def identity(self) -> list:
        """Return I, [tile of rows, tile of columns, column]."""
        zero, one = utils.c(0.0, self.float), utils.c(1.0, self.float)
        row, first = arith.divui(self.number, self.constant(4)), arith.remui(self.number, self.constant(4))
        first = arith.muli(first, self.constant(2))

        def diagonal(column: int):
            place = arith.addi(first, self.constant(column))
            return arith.select(arith.cmpi(arith.CmpIPredicate.eq, row, place), one, zero)

        return [[[diagonal(i) if a == b else zero for i in range(2)] for b in range(2)] for a in range(2)]

    def shuffled(self, x, lane):
        nvvm = utils.nvvm  # which JAX exports nowhere else
        return nvvm.shfl_sync(utils.c(0xFFFFFFFF, self.integer), x, lane, self.constant(31), nvvm.ShflKind.idx)

    def of_row(self, row: int, x):
        """Return x of the lane with the same columns in that row of the tile."""
        return self.shuffled(x, arith.addi(arith.remui(self.number, self.constant(4)), self.constant(4 * row)))

    def of_column(self, pair: int, x):
        """Return x of the lane with that pair of columns in the same row."""
        first = arith.muli(arith.divui(self.number, self.constant(4)), self.constant(4))
        return self.shuffled(x, arith.addi(first, self.constant(pair)))
