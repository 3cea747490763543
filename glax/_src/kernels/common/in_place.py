"""Keep calls that write over an operand apart from what XLA would fuse them with."""

from typing import TypeVar

from jax import lax

T = TypeVar("T")


def unfused(x: T) -> T:
    """Return x behind an optimization barrier. x: an array that a call writes over, or the result of that call in its memory.

    XLA for GPUs makes one fusion of a call and the slices that it reads, or of a call and the update of a larger array with its
    result. In such a fusion XLA forgets that the result shares memory with the operand. The call would then write over new
    memory, which holds undefined numbers. The barrier costs no copy.
    """
    return lax.optimization_barrier(x)
