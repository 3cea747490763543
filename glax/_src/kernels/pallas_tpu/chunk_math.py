"""The mathematics of one chunk inside a kernel: the same two forms as `glax._src.kernels.xla.chunk_math`, written for the MXU.

States are transposed, [V, K]: gates of the state's rows then scale its lanes. Every product says its operands' type: that of
q, k and v; sums are float32. Products with a matrix of 0, 1 and -1 are exact: the other side is split into bfloat16 parts.
"""

import jax.numpy as jnp
from jax import lax

NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(x, y, dims, dtype):
    """A product of matrices in `dtype`, in float32 throughout if that is float32."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x.astype(dtype), y.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )


def times(x, factor):
    return x if factor is None else x * factor


def tokens(shape: tuple[int, int], axis: int, reverse: bool):
    """The place of each row (or column) in the walk of a chunk of C tokens."""
    i = lax.broadcasted_iota(jnp.int32, shape, axis)
    return shape[axis] - 1 - i if reverse else i


def earlier(C: int, reverse: bool, own: bool):
    """[C, C]: whether token j comes before token i in the walk, or (if `own`) is it."""
    i, j = tokens((C, C), 0, reverse), tokens((C, C), 1, reverse)
    return j <= i if own else j < i


def itself(C: int):
    """[C, C]: whether token j is token i."""
    return tokens((C, C), 0, False) == tokens((C, C), 1, False)


def masked(x, own, value=0.0):
    """x where `own`, a mask of its rows; None is all of them."""
    return x if own is None else jnp.where(own, x, jnp.asarray(value, x.dtype))


def parts_of(x, exact: bool):
    """bfloat16 arrays whose sum is x: one holds a bfloat16, three a float32; two (not `exact`) hold 16 of its 24 bits."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3 if exact else 2):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def summed(matrix, x, exact: bool):
    """matrix @ x, where matrix holds 0, 1 and -1: exact products, summed in float32."""
    matrix = matrix.astype(jnp.bfloat16)
    return sum(dot(matrix, part, NN, jnp.bfloat16) for part in parts_of(x, exact))


def row_sums(*arrays):
    """The sums of the rows of all arrays [C, width], together, [C, 1]."""
    if len({x.shape for x in arrays}) == 1:
        return sum(arrays).sum(1, keepdims=True)
    return sum(x.sum(1, keepdims=True) for x in arrays)
