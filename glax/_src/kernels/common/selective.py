"""Define the operands of the selective scan and of its step, as the kernels of every platform take them.

G is the batch and D the channels. The fields have the names of the paper.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Packing(NamedTuple):
    """Hold how rows are packed: the boundaries of sequences as `cu_seqlens`, or the tokens that start from zeros, or neither."""

    cuts: Int[Array, "cuts"] | None
    resets: Bool[Array, "G T"] | None


class SelectiveOperands(NamedTuple):
    """Hold the operands of a scan. x, dt, B and C have any float dtype; A and the states have one, in which sums are formed."""

    x: Float[Array, "G T D"]
    dt: Float[Array, "G T D"]
    A: Float[Array, "D N"]
    B: Float[Array, "G T N"]
    C: Float[Array, "G T N"]
    states: Float[Array, "sequences D N"]
    packing: Packing


class StepOperands(NamedTuple):
    """Hold the operands of a step. slots: the row of the pool of each sequence, P for a sequence without a state; None if
    sequence n has row n."""

    x: Float[Array, "G D"]
    dt: Float[Array, "G D"]
    A: Float[Array, "D N"]
    B: Float[Array, "G N"]
    C: Float[Array, "G N"]
    pool: Float[Array, "P D N"]
    slots: Int[Array, "G"] | None
