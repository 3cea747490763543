"""Compute products of rows with the matrix of each row's group, and the sums of outer products of each group's rows.

    y_m = x_m w_e(m)   or   y_m = x_m w_e(m)^T            w_e = sum over the rows m of group e of x_m^T y_m

Rows are sorted by group; the rows behind the last group have y_m = 0. Two kernels: `row_products`, whose programs own ROWS rows
of one group and BV columns, and scan BK columns of x at a time; and `group_sums`, whose programs own BK x BV numbers of one w_e,
and scan ROWS rows of the group at a time. No w_e is read whose group has no rows. Sums are float32. Nothing is added atomically,
so every bit repeats. A row that is not finite reaches its own y_m, and the w_e of its group, alone.

`row_products` reads its block of rows from a table (`row_table`). Its programs vary over GROUP blocks of rows, then over
columns, then over further blocks: those that run at a time read few w_e, which stay in the L2 cache.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.kernels.common.grouped import GroupedOperands, edges, row_table
from glax._src.kernels.triton.config import precision
from glax._src.kernels.triton.grouped_config import GroupedConfig, GroupedSumConfig
from glax._src.kernels.triton.launch import launch, tl, triton

NEIGHBOURS = 8  # blocks of rows that read the same columns of w at a time


@triton.jit
def read(x, mask, MASKED: tl.constexpr):
    """Load x, a tile of addresses; with MASKED, 0 where `mask` is false."""
    return tl.load(x, mask=mask, other=0.0) if MASKED else tl.load(x)


@triton.jit
def row_products(x, w, table, blocks, y, D: tl.constexpr):
    """Compute y [M, V] of x [M, K] and w [D.H, K, V], or w [D.H, V, K] with D.TRANSPOSED. A program has a block of ROWS rows
    and BV columns of y.

    table: the result of `row_table`. blocks: [1], how many blocks of rows the table has. blocks is loaded, so that one compiled
    kernel serves all M.
    """
    program, count = tl.program_id(0), tl.load(blocks)
    first = program // (D.GROUP * D.NV) * D.GROUP
    neighbours, within = tl.minimum(count - first, D.GROUP), program % (D.GROUP * D.NV)
    entry = table + (first + within % neighbours) * 3
    start, own, group = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    rows, inner = tl.arange(0, D.ROWS), tl.arange(0, D.BK)
    columns = within // neighbours * D.BV + tl.arange(0, D.BV)

    xt, wt = x + start.to(tl.int64) * D.K, w + group.to(tl.int64) * (D.K * D.V)
    # Rows behind the block read its last row, and are not stored.
    of_x = tl.minimum(rows, own - 1)[:, None] * D.K + inner[None, :]
    along_inner: tl.constexpr = 1 if D.TRANSPOSED else D.V
    along_columns: tl.constexpr = D.K if D.TRANSPOSED else 1
    of_w = inner[:, None] * along_inner + columns[None, :] * along_columns
    tail: tl.constexpr = D.K % D.BK != 0
    total = tl.zeros([D.ROWS, D.BV], tl.float32)
    for i in range(0, tl.where(group < D.H, D.NK, 0)):
        is_inner = inner < D.K - i * D.BK
        xs = read(xt + of_x, is_inner[None, :], tail)
        if D.V % D.BV == 0:
            ws = read(wt + of_w, is_inner[:, None], tail)
        else:
            ws = read(wt + of_w, is_inner[:, None] & (columns < D.V)[None, :], True)
        total = tl.dot(xs, ws, total, input_precision=D.PRECISION)
        xt, wt = xt + D.BK, wt + D.BK * along_inner
    place = y + start.to(tl.int64) * D.V + (rows[:, None] * D.V + columns[None, :])
    tl.store(place, total.to(y.dtype.element_ty), mask=(rows < own)[:, None] & (columns < D.V)[None, :])


@triton.jit
def group_sums(x, y, begins, w, D: tl.constexpr):
    """Compute w [E, K, V] of x [M, K] and y [M, V]. begins: the result of `edges`. A program has a block of BK x BV numbers of
    one group's w; they are 0 if the group has no rows."""
    program = tl.program_id(0)
    group, block = program // (D.NK * D.NV), program % (D.NK * D.NV)
    begin = tl.load(begins + group)
    count = tl.load(begins + group + 1) - begin
    rows = tl.arange(0, D.ROWS)
    inner, columns = block // D.NV * D.BK + tl.arange(0, D.BK), block % D.NV * D.BV + tl.arange(0, D.BV)
    xt, yt = x + begin.to(tl.int64) * D.K, y + begin.to(tl.int64) * D.V
    total = tl.zeros([D.BK, D.BV], tl.float32)
    for i in range(0, tl.cdiv(count, D.ROWS)):
        own = (rows < count - i * D.ROWS)[:, None]
        xs = read(xt + (rows[:, None] * D.K + inner[None, :]), own & (inner < D.K)[None, :], True)
        ys = read(yt + (rows[:, None] * D.V + columns[None, :]), own & (columns < D.V)[None, :], True)
        total = tl.dot(tl.trans(xs), ys, total, input_precision=D.PRECISION)
        xt, yt = xt + D.ROWS * D.K, yt + D.ROWS * D.V
    place = w + group.to(tl.int64) * (D.K * D.V) + (inner[:, None] * D.V + columns[None, :])
    tl.store(place, total.to(w.dtype.element_ty), mask=(inner < D.K)[:, None] & (columns < D.V)[None, :])


# ---- launches ----------------------------------------------------------------------------------------------------------


def products(operands: GroupedOperands, config: GroupedConfig, transposed: bool) -> Float[Array, "M V"]:
    """Return y [M, V]: x_m w_e(m) for each row m, or x_m w_e(m)^T if transposed. operands.other: w [E, K, V], or [E, V, K] if
    transposed."""
    x, w, sizes = operands
    (M, K), V = x.shape, w.shape[1 if transposed else 2]
    table = row_table(sizes, M, config.rows)
    count = table.shape[0]
    (y,) = launch(
        row_products, count * -(-V // config.columns), (x, w, table, jnp.full(1, count, jnp.int32)), [((M, V), x.dtype)],
        H=w.shape[0], K=K, V=V, ROWS=config.rows, BK=config.inner, BV=config.columns, GROUP=NEIGHBOURS,
        TRANSPOSED=transposed, PRECISION=precision(x), warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return y


def sums(operands: GroupedOperands, config: GroupedSumConfig) -> Float[Array, "E K V"]:
    """Return the sum of x_m^T y_m over the rows m of each group; 0 for a group without rows. operands.other: y [M, V]."""
    x, y, sizes = operands
    (M, K), V, E = x.shape, y.shape[1], sizes.shape[0]
    (w,) = launch(
        group_sums, E * -(-K // config.inner) * -(-V // config.columns), (x, y, edges(sizes, M)), [((E, K, V), x.dtype)],
        H=E, K=K, V=V, ROWS=config.rows, BK=config.inner, BV=config.columns, PRECISION=precision(x),
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return w
