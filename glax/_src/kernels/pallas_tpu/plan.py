"""How a recurrence lies in blocks: which rows, heads and states each step of a kernel's grid sees."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu.sizes import VMEM_BYTES, packing, unit_bytes


class Step(NamedTuple):
    """One step of a walk: rows low to high (not included) of a block of C rows, all of one sequence.

    begins, ends: whether the walk of the sequence does so here; fresh: whether no earlier step saw the block.
    """

    block: int | Array
    low: int | Array
    high: int | Array
    sequence: int | Array
    begins: bool | Array
    ends: bool | Array
    fresh: bool | Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes of a walk. The grid is (B, groups, steps); a program holds `units` units of `pack` heads each.

    Arrays are seen as [B, T, heads * width]: one row is one token, and heads lie side by side in the lanes. A unit is `pack`
    heads whose widths K, V (padded here) fill whole tiles of 128 lanes; its state is one matrix, block diagonal for two heads.
    Packed, a block of C rows is visited once for every sequence that has rows in it, so no row is ever moved.
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
    against: bool = False

    @classmethod
    def of(cls, r: Recurrence, chunk: int, units: int) -> "Plan":
        B, T, Hq, K = r.q.shape
        heads, H, V = (Hq, r.k.shape[2], r.v.shape[2]), r.num_heads, r.v.shape[3]
        pack, K, V = packing(heads, K, V)
        units = min(units, H // pack, max(1, VMEM_BYTES // unit_bytes(chunk, pack * K, pack * V, r.q.dtype.itemsize)))
        fits = (n for n in range(units, 0, -1) if H // pack % n == 0 and shares(n * pack, H, heads))
        packed = r.boundaries is not None
        return cls(B, T, r.num_sequences, H, heads, K, V, chunk, pack, next(fits), packed, r.reverse)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Heads of a program."""
        return self.units * self.pack

    @property
    def lanes(self) -> int:
        """The lanes of a unit's keys."""
        return self.pack * self.K

    @property
    def state(self) -> tuple[int, int, int]:
        """The states of a program, transposed."""
        return (self.units, self.pack * self.V, self.lanes)

    @property
    def gate_rows(self) -> int:
        """Rows of a block of gates per head: the heads of a program, in whole sublanes."""
        return -(-self.rows // 8) * 8

    @property
    def groups(self) -> int:
        return self.H // self.rows

    @property
    def blocks(self) -> int:
        return -(-self.T // self.chunk)

    @property
    def steps(self) -> int:
        """Every block once, and once more for every sequence that begins inside of one, is empty, or is padding."""
        return self.blocks + (self.N + 2 if self.packed else 0)

    @property
    def ragged(self) -> bool:
        """Whether blocks may hold rows that are not of the step's sequence."""
        return self.packed or self.T % self.chunk != 0

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.B, self.groups, self.steps)

    @property
    def backwards(self) -> bool:
        """Whether the walk goes from late rows to early ones."""
        return self.reverse != self.against

    def held(self, heads: int) -> int:
        """Heads of a tensor with `heads` heads that a program reads."""
        return max(1, self.rows * heads // self.H)

    def unit_of(self, unit, heads: int):
        """Which of those, in units, its unit `unit` reads. Heads are shared only where a unit is one head."""
        sharing = self.rows // self.held(heads)
        return unit if sharing == 1 else unit // sharing if isinstance(unit, int) else lax.div(unit, sharing)

    def heads_of(self, unit: int) -> range:
        """The heads of a unit, of those of its program."""
        return range(unit * self.pack, (unit + 1) * self.pack)

    def is_shared(self, heads: int) -> bool:
        """Whether more than one head of a program reads the same of `heads` heads."""
        return self.held(heads) < self.rows

    # ---- the walk ----------------------------------------------------------------------------------------------------

    def table(self, r: Recurrence) -> Int[Array, "5*steps"] | None:
        """Packed: (block, low, high, sequence, begins + 2 ends) of every step, in the order of the recurrence."""
        if not self.packed:
            return None
        cuts = jnp.clip(r.boundaries.astype(jnp.int32), 0, self.T)
        # [N + 2]: padding rows before and behind the sequences are segments of their own, to be written as zeros
        edges = jnp.concatenate([jnp.zeros(1, jnp.int32), cuts, jnp.full(1, self.T, jnp.int32)])
        first, last = edges[:-1], edges[1:]
        is_padding = jnp.arange(self.N + 2) % (self.N + 1) == 0
        spanned = jnp.where(last > first, (last - 1) // self.chunk - first // self.chunk + 1, ~is_padding)
        begin = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(spanned).astype(jnp.int32)])
        # [steps]: steps behind the last stay where it was, and have no rows
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
        """Step m of the walk through batch row b."""
        if not self.packed:
            block = self.blocks - 1 - m if self.backwards else m
            high = jnp.minimum(self.T - block * self.chunk, self.chunk)
            return Step(block, 0, high, b, m == 0, m == self.blocks - 1, True)
        at = lambda field, m: table[field * self.steps + (self.steps - 1 - m if self.against else m)]  # noqa: E731
        block, low, high, sequence, flags = (at(field, m) for field in range(5))
        begins, ends = (flags & 1) == 1, (flags & 2) == 2
        if self.against:
            begins, ends = ends, begins
        fresh = (m == 0) | (at(0, jnp.maximum(m - 1, 0)) != block)
        return Step(block, low, high, sequence, begins, ends, fresh)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def spec(self, shape, index) -> pl.BlockSpec:
        """A block of that shape at index(b, group, step, m)."""

        def at(b, g, m, scale, *table):
            return index(b, g, self.step(b, m, *table or (None,)), m)

        return pl.BlockSpec(shape, at)

    def tokens(self, heads: int, width: int) -> pl.BlockSpec:
        """[B, T, heads * width]: the heads that a program reads, C rows."""
        held = self.held(heads)
        share = max(1, self.H // (heads * self.rows))  # programs that read the same head
        return self.spec((None, self.chunk, held * width), lambda b, g, step, m: (b, step.block, lax.div(g, share)))

    def head_gates(self) -> pl.BlockSpec:
        """[B, groups, blocks, gate rows, C]."""
        shape = (None, None, None, self.gate_rows, self.chunk)
        return self.spec(shape, lambda b, g, step, m: (b, g, step.block, 0, 0))

    def per_sequence(self, *shape: int) -> pl.BlockSpec:
        """[N, groups, *shape]."""
        return self.spec((None, None, *shape), lambda b, g, step, m: (step.sequence, g, *[0] * len(shape)))

    def per_step(self, *shape: int) -> pl.BlockSpec:
        """[B, groups, steps, *shape]."""

        def index(b, g, step, m):
            return (b, g, self.steps - 1 - m if self.against else m, *[0] * len(shape))

        return self.spec((None, None, None, *shape), index)

    # ---- from the arrays of a recurrence, and back -------------------------------------------------------------------

    def wide(self, x: Float[Array, "B T heads D"], width: int) -> Float[Array, "B T heads*width"]:
        """Each head padded to `width` lanes, and at least one block of rows."""
        more_rows = max(0, self.chunk - self.T)
        x = pad(x, (0, 0), (0, more_rows), (0, 0), (0, width - x.shape[3]))
        return x.reshape(*x.shape[:2], -1)

    def narrow(self, x: Float[Array, "B T heads*width"], width: int, used: int) -> Float[Array, "B T heads used"]:
        """The inverse of `wide`."""
        x = x.reshape(*x.shape[:2], -1, width)
        return x[:, : self.T, :, :used]

    def by_group(self, x: Float[Array, "B T H"]) -> Float[Array, "B groups blocks rows C"]:
        """Gates per head, with time along the lanes."""
        x = pad(x.astype(jnp.float32), (0, 0), (0, self.blocks * self.chunk - self.T), (0, 0))
        x = x.reshape(self.B, self.blocks, self.chunk, self.groups, self.rows).transpose(0, 3, 1, 4, 2)
        return pad(x, (0, 0), (0, 0), (0, 0), (0, self.gate_rows - self.rows), (0, 0))

    def from_groups(self, x: Float[Array, "B groups blocks rows C"]) -> Float[Array, "B T H"]:
        """The inverse of `by_group`."""
        x = x[:, :, :, : self.rows].transpose(0, 2, 4, 1, 3)
        return x.reshape(self.B, -1, self.H)[:, : self.T]

    def states(self, x: Float[Array, "N H K V"]) -> Float[Array, "N groups rows K V"]:
        x = pad(x, (0, 0), (0, 0), (0, self.K - x.shape[2]), (0, self.V - x.shape[3]))
        return x.reshape(self.N, self.groups, self.rows, self.K, self.V)

    def from_states(self, x: Float[Array, "N groups rows K V"], K: int, V: int) -> Float[Array, "N H K V"]:
        return x.reshape(self.N, self.H, self.K, self.V)[:, :, :K, :V]


def shares(rows: int, H: int, heads: tuple[int, int, int]) -> bool:
    """Whether blocks of `rows` heads cut no group of heads that share one query, key or value."""
    return all(rows % (H // n) == 0 or H // n % rows == 0 for n in heads)


def pad(x: Array, *widths: tuple[int, int]) -> Array:
    return jnp.pad(x, widths) if any(width != (0, 0) for width in widths) else x
