"""Define the operands of the selective scan and of its step, as the kernels of every platform take them.

G is the batch and D the channels. The fields have the names of the paper.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Packing(NamedTuple):
    """Hold how a call packs sequences: their boundaries, `cuts` as in `cu_seqlens`, or `resets`, True at tokens that start from
    a state of zeros. Both are None without packing."""

    cuts: Int[Array, "cuts"] | None
    resets: Bool[Array, "G T"] | None


class SelectiveOperands(NamedTuple):
    """Hold the operands of   h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,   y_t = h_t C_t,   with N numbers of h for each channel.
    states: the initial h of each sequence. x, dt, B and C have any float dtype. A and states have one, in which sums are
    formed."""

    x: Float[Array, "G T D"]
    dt: Float[Array, "G T D"]
    A: Float[Array, "D N"]
    B: Float[Array, "G T N"]
    C: Float[Array, "G T N"]
    states: Float[Array, "sequences D N"]
    packing: Packing


class StepOperands(NamedTuple):
    """Hold the operands of one token of each of G sequences. pool: the states of P slots. slots: the row of the pool for each
    sequence, P for a sequence without a state; None if sequence g has row g."""

    x: Float[Array, "G D"]
    dt: Float[Array, "G D"]
    A: Float[Array, "D N"]
    B: Float[Array, "G N"]
    C: Float[Array, "G N"]
    pool: Float[Array, "P D N"]
    slots: Int[Array, "G"] | None
