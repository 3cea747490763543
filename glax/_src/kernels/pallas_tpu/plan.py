"""Lay out a recurrence in blocks: the rows, heads and states of each step of a kernel's grid."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu.sizes import VMEM_BYTES, packing, unit_bytes


class Step(NamedTuple):
    """Hold one step of a scan: the rows low <= row < high of a block of C rows, all of one sequence.

    block: the block's number in its batch row. low, high: rows counted within the block. sequence: the sequence's number;
    without packing, the number of the batch row. begins, ends: whether the sequence's scan begins or ends in this step.
    first_visit: whether no earlier step had this block.
    """

    block: int | Array
    low: int | Array
    high: int | Array
    sequence: int | Array
    begins: bool | Array
    ends: bool | Array
    first_visit: bool | Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold the shapes of a scan. The grid is (B, groups, steps). A program has `units` units of `pack` heads each.

    Arrays have the shape [B, T, heads * width]: a row is a token, and heads lie side by side in the lanes. A unit is `pack`
    heads, whose padded widths K and V fill whole tiles of 128 lanes. Its state is one matrix, block diagonal for two heads.
    With packing, a step visits a block of C rows once for every sequence that has rows in it, so no row is ever moved. N: the
    number of sequences. heads: the numbers of heads of q, k and v. chunk: C. reverse: whether the recurrence goes from the last
    token to the first. adjoint: whether the scan has the opposite order of the recurrence, as in a gradient.
    """

    B: int
    T: int
    N: int
    H: int
    heads: tuple[int, int, int]
    K: int
    V: int
    chunk: int
    pack: int
    units: int
    packed: bool
    reverse: bool
    adjoint: bool = False

    @classmethod
    def of(cls, r: Recurrence, chunk: int, units: int, gradient: bool) -> "Plan":
        """Return the plan of the call r. chunk: the tokens of a chunk. units: the most units of a program; fewer where their
        blocks do not fit VMEM, or where they would divide heads that share one head of q, k or v. gradient: whether the kernel
        is a gradient."""
        B, T, Hq, K = r.q.shape
        heads, H, V = (Hq, r.k.shape[2], r.v.shape[2]), r.num_heads, r.v.shape[3]
        pack, K, V = packing(heads, K, V)
        erases, itemsize = r.erasure is not None, r.q.dtype.itemsize
        bytes_of_unit = unit_bytes(chunk, pack * K, pack * V, itemsize, erases, gradient)
        units = min(units, H // pack, max(1, VMEM_BYTES // bytes_of_unit))
        fits = (n for n in range(units, 0, -1) if H // pack % n == 0 and splits_no_group(n * pack, H, heads))
        packed = r.boundaries is not None
        return cls(B, T, r.num_sequences, H, heads, K, V, chunk, pack, next(fits), packed, r.reverse)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def program_heads(self) -> int:
        """Return the number of heads of a program."""
        return self.units * self.pack

    @property
    def lanes(self) -> int:
        """Return the number of lanes of a unit's keys, pack * K."""
        return self.pack * self.K

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the shape of a program's states, transposed: (units, pack * V, pack * K)."""
        return (self.units, self.pack * self.V, self.lanes)

    @property
    def gate_rows(self) -> int:
        """Return the rows of a block of per-head gates: the heads of a program, rounded up to 8 sublanes."""
        return -(-self.program_heads // 8) * 8

    @property
    def groups(self) -> int:
        """Return the number of groups into which the heads are divided, one for each program of a batch row."""
        return self.H // self.program_heads

    @property
    def blocks(self) -> int:
        """Return the number of blocks of C rows in a batch row."""
        return -(-self.T // self.chunk)

    @property
    def steps(self) -> int:
        """Return the number of steps of a batch row: one for every block, and if packed one more for every sequence and for the
        padding on either side. Steps that a call does not need have no rows."""
        return self.blocks + (self.N + 2 if self.packed else 0)

    @property
    def ragged(self) -> bool:
        """Return whether blocks may have rows that do not belong to the step's sequence."""
        return self.packed or self.T % self.chunk != 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the kernel's grid, (B, groups, steps). Steps run in order."""
        return (self.B, self.groups, self.steps)

    @property
    def from_last_row(self) -> bool:
        """Return whether the scan goes from the last row to the first."""
        return self.reverse != self.adjoint

    def heads_read(self, heads: int) -> int:
        """Return the number of heads that a program reads of an array with `heads` heads: at least 1, and `program_heads` if no
        head is shared."""
        return max(1, self.program_heads * heads // self.H)

    def unit_of(self, unit, heads: int):
        """Return which unit of its block of an array with `heads` heads the program's unit `unit` reads. Heads are shared only
        where a unit is one head."""
        sharing = self.program_heads // self.heads_read(heads)
        if sharing == 1:
            return unit
        return unit // sharing if isinstance(unit, int) else lax.div(unit, sharing)

    def heads_of(self, unit: int) -> range:
        """Return the numbers of a unit's heads, counted within its program."""
        return range(unit * self.pack, (unit + 1) * self.pack)

    def is_shared(self, heads: int) -> bool:
        """Return whether several heads of a program read one head of an array with `heads` heads."""
        return self.heads_read(heads) < self.program_heads

    # ---- the scan ----------------------------------------------------------------------------------------------------

    def table(self, r: Recurrence) -> Int[Array, "5*steps"] | None:
        """Return the table of steps for packed sequences, by which `step` finds its rows; None if not packed.

        The table holds one field after another, each for all steps in the recurrence's order: block, low, high, sequence, and
        begins + 2 ends.
        """
        if r.boundaries is None:
            return None
        cuts = jnp.clip(r.boundaries.astype(jnp.int32), 0, self.T)
        # [N + 2]: the padding rows before and after the sequences are segments too, whose outputs are zeros
        edges = jnp.concatenate([jnp.zeros(1, jnp.int32), cuts, jnp.full(1, self.T, jnp.int32)])
        first, last = edges[:-1], edges[1:]
        is_padding = jnp.arange(self.N + 2) % (self.N + 1) == 0
        spanned = jnp.where(last > first, (last - 1) // self.chunk - first // self.chunk + 1, ~is_padding)
        begin = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(spanned).astype(jnp.int32)])
        # [steps]: the steps after the last one stay at its block and have no rows
        i, total = jnp.arange(self.steps, dtype=jnp.int32), begin[-1]
        entry = jnp.clip(total - 1 - i if self.reverse else i, 0, total - 1)
        segment = jnp.searchsorted(begin[1:], entry, side="right").astype(jnp.int32)
        block = jnp.minimum(first[segment] // self.chunk + entry - begin[segment], self.blocks - 1)
        low = jnp.maximum(first[segment] - block * self.chunk, 0)
        high = jnp.minimum(last[segment] - block * self.chunk, self.chunk)
        real = (i < total) & ~is_padding[segment]
        at_first, at_last = entry == begin[segment], entry == begin[segment + 1] - 1
        begins, ends = (at_last, at_first) if self.reverse else (at_first, at_last)
        flags = jnp.where(real, begins + 2 * ends, 0)
        sequence = jnp.clip(segment - 1, 0, self.N - 1)
        fields = (block, low, jnp.where(real, high, low), sequence, flags)
        return jnp.concatenate([field.astype(jnp.int32) for field in fields])

    def step(self, b, m, table) -> Step:
        """Return step m of the scan through batch row b. m: the step's number in the scan's order. table: the result of `table`
        in scalar memory; not read if not packed."""
        if not self.packed:
            block = self.blocks - 1 - m if self.from_last_row else m
            high = jnp.minimum(self.T - block * self.chunk, self.chunk)
            return Step(block, 0, high, b, m == 0, m == self.blocks - 1, True)

        def entry(field, m):
            return table[field * self.steps + (self.steps - 1 - m if self.adjoint else m)]

        block, low, high, sequence, flags = (entry(field, m) for field in range(5))
        begins, ends = (flags & 1) == 1, (flags & 2) == 2
        if self.adjoint:
            begins, ends = ends, begins
        first_visit = (m == 0) | (entry(0, jnp.maximum(m - 1, 0)) != block)
        return Step(block, low, high, sequence, begins, ends, first_visit)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def block_spec(self, shape, index) -> pl.BlockSpec:
        """Return the specification of a block of `shape`. index: a function (b, g, step, m) that returns the block's index,
        where b is the batch row, g the group of heads and m the number of the step."""

        def at(b, g, m, scale, *table):
            return index(b, g, self.step(b, m, *table or (None,)), m)

        return pl.BlockSpec(shape, at)

    def token_block(self, heads: int, width: int) -> pl.BlockSpec:
        """Return the specification of a block of [B, T, heads * width]: C rows of the heads that a program reads."""
        read = self.heads_read(heads)
        sharing = max(1, self.H // (heads * self.program_heads))  # programs that read the same head
        return self.block_spec(
            (None, self.chunk, read * width), lambda b, g, step, m: (b, step.block, lax.div(g, sharing))
        )

    def head_gate_block(self) -> pl.BlockSpec:
        """Return the specification of the block of per-head gates [B, groups, blocks, gate_rows, C] that a step reads."""
        shape = (None, None, None, self.gate_rows, self.chunk)
        return self.block_spec(shape, lambda b, g, step, m: (b, g, step.block, 0, 0))

    def sequence_block(self, *shape: int) -> pl.BlockSpec:
        """Return the specification of the block, of shape `shape`, of an array [N, groups, *shape] for the sequence of a
        step."""
        return self.block_spec((None, None, *shape), lambda b, g, step, m: (step.sequence, g, *[0] * len(shape)))

    def step_block(self, *shape: int) -> pl.BlockSpec:
        """Return the specification of the block, of shape `shape`, of an array [B, groups, steps, *shape] for a step. Its steps
        are in the recurrence's order."""

        def index(b, g, step, m):
            return (b, g, self.steps - 1 - m if self.adjoint else m, *[0] * len(shape))

        return self.block_spec((None, None, None, *shape), index)

    # ---- from the arrays of a recurrence, and back -------------------------------------------------------------------

    def to_lanes(self, x: Float[Array, "B T heads D"], width: int) -> Float[Array, "B T heads*width"]:
        """Return x with each head padded by zeros to `width` lanes, and with at least C rows."""
        more_rows = max(0, self.chunk - self.T)
        x = pad(x, (0, 0), (0, more_rows), (0, 0), (0, width - x.shape[3]))
        return x.reshape(*x.shape[:2], -1)

    def from_lanes(self, x: Float[Array, "B T heads*width"], width: int, used: int) -> Float[Array, "B T heads used"]:
        """Return x as [B, T, heads, used], without padding: the inverse of `to_lanes`. width: the lanes of a head. used: those
        that are not padding."""
        x = x.reshape(*x.shape[:2], -1, width)
        return x[:, : self.T, :, :used]

    def to_groups(self, x: Float[Array, "B T H"]) -> Float[Array, "B groups blocks rows C"]:
        """Return per-head gates or beta [B, T, H] in float32, grouped by program, with the tokens of a block along the lanes.
        The added rows, up to `gate_rows`, and tokens are 0."""
        x = pad(x.astype(jnp.float32), (0, 0), (0, self.blocks * self.chunk - self.T), (0, 0))
        x = x.reshape(self.B, self.blocks, self.chunk, self.groups, self.program_heads).transpose(0, 3, 1, 4, 2)
        return pad(x, (0, 0), (0, 0), (0, 0), (0, self.gate_rows - self.program_heads), (0, 0))

    def from_groups(self, x: Float[Array, "B groups blocks rows C"]) -> Float[Array, "B T H"]:
        """Return x as [B, T, H]: the inverse of `to_groups`."""
        x = x[:, :, :, : self.program_heads].transpose(0, 2, 4, 1, 3)
        return x.reshape(self.B, -1, self.H)[:, : self.T]

    def to_state_blocks(self, x: Float[Array, "N H K V"]) -> Float[Array, "N groups rows K V"]:
        """Return states padded by zeros to the plan's K and V, and grouped by program."""
        x = pad(x, (0, 0), (0, 0), (0, self.K - x.shape[2]), (0, self.V - x.shape[3]))
        return x.reshape(self.N, self.groups, self.program_heads, self.K, self.V)

    def from_state_blocks(self, x: Float[Array, "N groups rows K V"], K: int, V: int) -> Float[Array, "N H K V"]:
        """Return x as [N, H, K, V], without padding: the inverse of `to_state_blocks`."""
        return x.reshape(self.N, self.H, self.K, self.V)[:, :, :K, :V]


def splits_no_group(count: int, H: int, heads: tuple[int, int, int]) -> bool:
    """Return whether programs of `count` heads are whole groups, or parts of one: a group is the heads that share one head of
    q, k or v. H: the number of all heads. heads: the numbers of heads of q, k and v."""
    return all(count % (H // n) == 0 or H // n % count == 0 for n in heads)


def pad(x: Array, *widths: tuple[int, int]) -> Array:
    """Return x with each axis padded by (before, after) zeros."""
    return jnp.pad(x, widths) if any(width != (0, 0) for width in widths) else x
