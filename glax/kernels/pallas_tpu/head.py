"""Gates per head: e^{G_i - G_j} for every pair, each exact.

With hi = log gates rounded to multiples of 1/16 and lo the rest, sums of hi are exact in float32 and those of lo are small:
differences of two sums then keep their digits even where gates of -100 stand among mild ones.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from glax.kernels.pallas_tpu import chunk


class HeadSums(NamedTuple):
    """Of every head of a program: sums of log gates from the chunk's first token through each, along the lanes and along
    the rows, as hi + lo; the decay from the chunk's start through a token, and from behind it to the end.

    rows: hi, lo, inward, outward, each [R, C]; columns: the same, transposed, in one matrix [C, 4 R]; total: [R, 1].
    """

    rows: tuple
    columns: jnp.ndarray
    total: jnp.ndarray

    def pairs(self, head: int, mask):
        """[C, C]: the decay from behind token j through token i where mask holds, else 0."""
        R = self.rows[0].shape[0]
        hi, lo = (self.column(part, head) - self.rows[part][head : head + 1] for part in (0, 1))
        del R
        return jnp.exp(jnp.where(mask, hi + lo, -jnp.inf))

    def column(self, part: int, head: int):
        """[C, 1]."""
        at = part * self.rows[0].shape[0] + head
        return self.columns[:, at : at + 1]

    def inward(self, head: int):
        return self.column(2, head)

    def outward(self, head: int):
        return self.column(3, head)


def head_sums(gates, reverse: bool) -> HeadSums:
    """gates: [R, C] float32, 0 outside of the step's rows."""
    R, C = gates.shape
    gates = jnp.maximum(gates, chunk.LOG_OF_ZERO)
    hi = jnp.floor(gates * 16 + 0.5) * (1 / 16)
    parts = jnp.concatenate([hi, gates - hi])
    s, i = chunk.tokens((C, C), 0, reverse), chunk.tokens((C, C), 1, reverse)
    # [2 R, C]
    sums = lax.dot_general(
        parts, (s <= i).astype(jnp.float32), chunk.NN, precision="highest", preferred_element_type=jnp.float32
    )
    hi, lo = sums[:R], sums[R:]
    end = 0 if reverse else C - 1
    behind = (hi[:, end : end + 1] - hi) + (lo[:, end : end + 1] - lo)
    total = jnp.exp(hi[:, end : end + 1] + lo[:, end : end + 1])
    rows = (hi, lo, jnp.exp(hi + lo), jnp.exp(behind))
    return HeadSums(rows, jnp.concatenate(rows).T, total)
