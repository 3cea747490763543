"""Define the operands of products of grouped rows, and the blocks of rows that their kernels take."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class GroupedOperands(NamedTuple):
    """Hold the operands of a product of grouped rows.

    x: [M, K], rows sorted by group. other: the matrices w [E, K, N], one for each group, by which rows are multiplied; or y [M,
    N], for the sum of x_m^T y_m over the rows m of each group. sizes: [E], integers, the number of rows of each group. Rows
    from sum(sizes) on are of no group.
    """

    x: Float[Array, "M K"]
    other: Float[Array, "..."]
    sizes: Int[Array, "E"]


def edges(sizes: Int[Array, "E"], M: int) -> Int[Array, "E+2"]:
    """Return the first row of each group, the first row behind all groups, and M: [E + 2] in int32."""
    ends = jnp.clip(jnp.cumsum(sizes.astype(jnp.int32), dtype=jnp.int32), 0, M)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, M, jnp.int32)])


def row_table(sizes: Int[Array, "E"], M: int, rows: int) -> Int[Array, "count 3"]:
    """Return a table [count, 3] of blocks of at most `rows` rows: the first row of each block, its number of rows, and its
    group, E for rows of no group.

    A block has rows of one group. A group without rows has no block. Unused entries at the end have no rows.
    """
    begins, E = edges(sizes, M), sizes.shape[0]
    blocks = -(-jnp.diff(begins) // rows)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    number = jnp.arange(min(M, M // rows + E + 1), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right", method="compare_all"), E)
    start = jnp.minimum(begins[group] + (number - (ends - blocks)[group]) * rows, M)
    return jnp.stack([start, jnp.minimum(begins[group + 1] - start, rows), group], -1).astype(jnp.int32)
