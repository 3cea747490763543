"""Define the block sizes of the kernels of products of grouped rows, and state which calls these kernels refuse.

Importing this module imports neither Triton nor jax-triton.
"""

import dataclasses

from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import is_symbol
from glax._src.core.registry import Config
from glax._src.kernels.common.grouped import GroupedOperands
from glax._src.kernels.triton.config import DTYPES, check_block, has_large_tiles
from glax._src.kernels.triton.support import installation

MOST_NUMBERS = 2**31  # of the matrix of one group, and of all rows of a block: offsets within them are int32


@dataclasses.dataclass(frozen=True)
class GroupedConfig(Config):
    """Configure the Triton kernel that multiplies rows by the matrix of their group.

    rows, columns: the size of the block of results that a program owns. inner: the number of terms of its sums that it reads
    together. All three are powers of two from 16 to 256. warps: the warps of a program, a power of two. stages: the stages of
    its software pipeline. Raises ValueError, which names the field, for any other value.
    """

    rows: int = 128
    columns: int = 256
    inner: int = 64
    warps: int = 8
    stages: int = 3

    def __post_init__(self):
        check_block(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class GroupedSumConfig(Config):
    """Configure the Triton kernel that sums the outer products of a group's rows.

    inner, columns: the rows and columns of the block of results that a program owns. rows: the rows of the group that it reads
    together. warps, stages: as in `GroupedConfig`, with the same errors.
    """

    rows: int = 64
    inner: int = 128
    columns: int = 256
    warps: int = 8
    stages: int = 3

    def __post_init__(self):
        check_block(self, *(field.name for field in dataclasses.fields(self)))


def product_config(operands: GroupedOperands) -> GroupedConfig:
    """Return the block sizes of row products, from the mean number of rows of a group. A block of twice the mean fits most
    groups, so their matrix is read once."""
    mean = operands.x.shape[0] / operands.sizes.shape[0]
    rows = next((n for n in (16, 32, 64) if n >= 2 * mean), 128)
    if operands.x.dtype == "float32":
        return GroupedConfig(min(rows, 64), 64, 32, 4, 3)
    if rows < 128:  # reading the matrices takes the time: more programs read more at a time
        return GroupedConfig(rows, 64, 128 if has_large_tiles() else 64, 4, 4)
    return GroupedConfig() if has_large_tiles() else GroupedConfig(128, 128, 32, 8, 3)


def sum_config(operands: GroupedOperands) -> GroupedSumConfig:
    """Return the block sizes of sums over the rows of a group, by dtype and GPU."""
    if operands.x.dtype == "float32":
        return GroupedSumConfig(32, 64, 64, 4, 3)
    return GroupedSumConfig() if has_large_tiles() else GroupedSumConfig(32, 128, 128, 8, 3)


def refusal(operands: GroupedOperands) -> str | None:
    """Return why the Triton kernels support neither the products of x and w nor the sums of their gradient, or None if they
    support all of these. operands.other: w."""
    x, w, sizes = operands
    if any(is_symbol(n) for n in (*x.shape, *w.shape, *sizes.shape)):
        return "takes shapes that are known while tracing, got symbols"
    if 0 in (*x.shape, *w.shape):
        return f"takes arrays with elements, got rows {list(x.shape)} and matrices {list(w.shape)}"
    if str(x.dtype) not in DTYPES or w.dtype != x.dtype:
        return f"takes rows and matrices of one dtype, {' or '.join(DTYPES)}, got {x.dtype} and {w.dtype}"
    if w.shape[1] * w.shape[2] >= MOST_NUMBERS or 256 * max(w.shape[1:]) > MOST_NUMBERS:
        return f"takes matrices of fewer than 2^31 numbers, and up to 2^23 rows and columns, got {list(w.shape[1:])}"
    return known_miscompile("grouped/triton/gpu") or known_miscompile("grouped.sums/triton/gpu") or installation()
