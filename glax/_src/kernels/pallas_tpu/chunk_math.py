"""Compute one chunk inside a kernel, for the TPU's matrix units (MXU).

The two forms of a chunk are those of `glax._src.kernels.xla.chunk_math`. States are transposed, [V, K], so that gates of the
state's rows scale its lanes. Each product has operands of one type, usually the type of q, k and v, and sums in float32.
Products with a matrix of 0, 1 and -1 are exact, because the other operand is split into bfloat16 parts.
"""

import jax.numpy as jnp
from jax import lax

# Which axes a product contracts: N is an operand as it is, T is a transposed one.
NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(x, y, dims, dtype):
    """Return the product of two matrices, with operands in `dtype` and sums in float32. float32 operands are multiplied at the
    highest precision. dims: NT, NN or TN."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x.astype(dtype), y.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )


def positions(shape: tuple[int, int], axis: int, reverse: bool):
    """Return the position of each row (axis 0) or column (axis 1) in the scan of a chunk, as int32 of `shape`."""
    i = lax.broadcasted_iota(jnp.int32, shape, axis)
    return shape[axis] - 1 - i if reverse else i


def causal_mask(C: int, reverse: bool, inclusive: bool):
    """Return a mask [C, C]: whether token j precedes token i in scan order, or if `inclusive` is token i."""
    i, j = positions((C, C), 0, reverse), positions((C, C), 1, reverse)
    return j <= i if inclusive else j < i


def diagonal_mask(C: int):
    """Return the mask i = j, [C, C]."""
    return positions((C, C), 0, False) == positions((C, C), 1, False)


def select_rows(x, mask, otherwise=0.0):
    """Return x in the rows where `mask` is true, and `otherwise` in the other rows. A mask of None selects all rows."""
    return x if mask is None else jnp.where(mask, x, jnp.asarray(otherwise, x.dtype))


def bfloat16_parts(x, exact: bool):
    """Return bfloat16 arrays that add up to x, a list: one for bfloat16 x, three for float32 x.

    If not `exact`, a float32 x is split into two, which hold 16 of its 24 bits.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3 if exact else 2):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def sum_by(matrix, x, exact: bool):
    """Return matrix @ x in float32, for a matrix of 0, 1 and -1. The products are exact, and the sums are float32. exact:
    whether all bits of a float32 x count, else 16."""
    matrix = matrix.astype(jnp.bfloat16)
    return jnp.asarray(sum(dot(matrix, part, NN, jnp.bfloat16) for part in bfloat16_parts(x, exact)))


def fine_dot(x, y, dims, dtype):
    """Return the product of two float32 matrices, with sums in float32. If `dtype` is bfloat16, 16 bits of each operand count;
    else all. dims: NT, NN or TN.

    The products of the two bfloat16 terms of each operand are one product of twice the depth and twice the width, for matrix
    units of 256 x 256. The smaller terms are summed separately from the largest.
    """
    if dtype == jnp.float32:
        return dot(x, y, dims, dtype)
    (x0, *x1), (y0, *y1) = bfloat16_parts(x, exact=False), bfloat16_parts(y, exact=False)
    (x_axis,), (y_axis,) = dims[0]
    if not y1:
        xs, ys = [x0, *x1], [y0] * (1 + len(x1))
        return dot(jnp.concatenate(xs, axis=x_axis), jnp.concatenate(ys, axis=y_axis), dims, dtype)
    # Of the product's columns, the left half is x0 y0, and the right half x0 y1 + x1 y0.
    right, width = jnp.concatenate([y0, *y1], axis=1 - y_axis), y.shape[1 - y_axis]
    if x1:
        below = jnp.concatenate([jnp.zeros_like(y0), y0], axis=1 - y_axis)
        right = jnp.concatenate([right, below], axis=y_axis)
    product = dot(jnp.concatenate([x0, *x1], axis=x_axis), right, dims, dtype)
    return product[:, :width] + product[:, width:]


def row_sums(*arrays):
    """Return the sum of each row over all arrays, [C, 1]. arrays: [C, width] each."""
    if len({x.shape for x in arrays}) == 1:
        return jnp.asarray(sum(arrays)).sum(1, keepdims=True)
    return sum(x.sum(1, keepdims=True) for x in arrays)
