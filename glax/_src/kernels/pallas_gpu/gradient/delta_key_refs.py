"""Define what the warpgroups of `delta_key.py` share: operands, results, shared memory and barriers, and where a program is."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, LOG2E, by_column, by_row, tiled
from glax._src.kernels.pallas_gpu.plan import C, chunk_of, quotient, remainder

BF16 = jnp.bfloat16
BLOCK = 64  # channels of K of an item
COLUMNS = 64  # of V in a step
STAGES = 2  # steps in shared memory: one in work, one on its way
SHAPE = (C, BLOCK)
TERMS = 2
D_SCALE, D_BETA = range(TERMS)  # rows of `Results.terms`
QUERIES, KEYS = range(2)  # the warpgroups that compute, and the places of their tiles
NUMBERS, MATRICES = 4, 15
TOKEN_BETA, LARGEST, OWN, EDGE = range(NUMBERS)  # rows of `Tiles.numbers`

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    gates: Ref  # [B, T, H, K], in bfloat16 or float32
    beta: Ref  # [B, chunks, H, C]
    d_output: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, V, K + C]: S and U, transposed
    d_states: Ref  # [B, chunks, H, V, K + C]: dS' and dX, transposed
    scale: Ref  # [B, chunks]


class Results(NamedTuple):
    """Hold the results, in global memory."""

    dq: Ref  # [B, T, H, K]
    dk: Ref  # [B, T, H, K]
    dg: Ref  # [B, T, H, K], in the dtype of the gates
    terms: Ref  # [B, chunks, H * blocks of K, TERMS, C]: q . dq / scale and k . de, summed over a block

    @classmethod
    def types(cls, x: Operands) -> "Results":
        (B, T, H, K), chunks = x.gates.shape, x.beta.shape[1]
        rows = jax.ShapeDtypeStruct((B, T, H, K), BF16)
        terms = jax.ShapeDtypeStruct((B, chunks, H * (K // BLOCK), TERMS, C), jnp.float32)
        return cls(rows, rows, jax.ShapeDtypeStruct((B, T, H, K), x.gates.dtype), terms)


class Tiles(NamedTuple):
    """Hold the shared memory of an item's channels of K."""

    matrices: Ref  # [MATRICES or one more, C, BLOCK]: those that properties name
    wide: Ref  # [1, C, BLOCK]: float32 gates as they are loaded, and at last dg; None for bfloat16
    numbers: Ref  # [NUMBERS, C], by token: beta, the largest |M|, dP_ii; by channel: e^{G_last} sum_v S dS'
    loaded: Ref  # barriers
    consumed: Ref
    prepared: Ref  # the gates and the largest |M| are in their places
    stored: Ref  # `right` is in its place, for a level
    read: Ref  # it is no longer needed
    handed: Ref  # both warpgroups have stored what one hands to the other

    @classmethod
    def types(cls, gates) -> "Tiles":
        """gates: their dtype."""
        wide = gates != BF16
        return cls(
            matrices=tiled(MATRICES + wide, C, BLOCK),
            wide=tiled(1, C, BLOCK, columns=32, dtype=gates) if wide else None,
            numbers=plgpu.SMEM((NUMBERS, C), jnp.float32),
            loaded=plgpu.Barrier(num_arrivals=4),
            consumed=plgpu.Barrier(num_arrivals=2),
            prepared=plgpu.Barrier(),
            stored=plgpu.Barrier(),
            read=plgpu.Barrier(),
            handed=plgpu.Barrier(num_arrivals=2),
        )

    def matrix(self, number: int):
        """Return a matrix, behind a barrier of the compiler, which would otherwise hold the addresses of all throughout loops."""
        return self.matrices.at[lax.optimization_barrier(jnp.int32(number))]

    def row(self, number: int):
        """Return a row of numbers, in the same way."""
        return self.numbers.at[lax.optimization_barrier(jnp.int32(number))]

    def pair(self, number: int):
        """Return a matrix in two terms."""
        return self.matrix(number), self.matrix(number + 1)

    @property
    def q(self):
        """q; at last dq."""
        return self.matrix(0)

    @property
    def k(self):
        """k; at last dk."""
        return self.matrix(1)

    def pairs(self, side: int):
        """dP or dA, [C, C]; at last what queries add to dk, in the place of dP."""
        return self.pair(2 + 2 * side)

    def left(self, side: int):
        """Decayed rows x; at last terms of dg that are summed from a token on."""
        return self.pair(6 + 2 * side)

    @property
    def right(self):
        """Decayed rows of k; at last terms of dg that are summed before a token."""
        return self.pair(10)

    @property
    def behind(self):
        """Decayed rows of dS' U."""
        return self.pair(12)

    @property
    def gates(self):
        """The terms of the gates."""
        return [self.matrix(14 + term) for term in range(1 if self.wide is None else 2)]

    @property
    def given_gates(self):
        """The gates as they are loaded; at last dg."""
        return self.gates[0] if self.wide is None else self.wide.at[lax.optimization_barrier(jnp.int32(0))]


class Columns(NamedTuple):
    """Hold the shared memory of a step's columns of V, by stage."""

    d_output: Ref  # [STAGES, C, COLUMNS]
    before: Ref  # [STAGES, COLUMNS, BLOCK]: S^T
    tokens: Ref  # [STAGES, COLUMNS, C]: U^T
    behind: Ref  # [STAGES, COLUMNS, BLOCK]: dS'^T
    erased: Ref  # [STAGES, COLUMNS, C]: dX^T
    loaded: Ref  # barriers
    consumed: Ref

    @classmethod
    def types(cls) -> "Columns":
        tile = tiled(STAGES, 64, 64)
        return cls(
            *(tile,) * 5,
            loaded=plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program, and the item it has: one chunk of one head, and one block of K.

    turn: the number of items that the program had before. It takes every `programs`-th item.
    """

    reverse: bool
    programs: int
    operands: Operands
    results: Results
    columns: Columns
    tiles: Tiles
    turn: Any = 0

    @property
    def blocks(self) -> int:
        """Return the number of blocks of K."""
        return self.operands.q.shape[3] // BLOCK

    @property
    def steps(self) -> int:
        """Return the number of steps of an item."""
        return self.operands.d_output.shape[3] // COLUMNS

    def turns(self):
        """Return the number of items of the program."""
        B, chunks, H, _ = self.operands.beta.shape
        items = B * chunks * H * self.blocks
        return lax.div(items - lax.axis_index("program") + (self.programs - 1), jnp.int32(self.programs))

    def at(self, turn) -> "Program":
        """Return the program at an item."""
        return dataclasses.replace(self, turn=turn)

    def item(self):
        """Return the number of the item. It is computed at each use, so that no register holds what follows from it."""
        return lax.optimization_barrier(lax.axis_index("program") + self.turn * self.programs)

    def place(self):
        """Return batch row, chunk and head. Blocks of K vary fastest, then heads."""
        _, chunks, H, _ = self.operands.beta.shape
        return chunk_of(quotient(self.item(), self.blocks), chunks, H)

    def block(self):
        """Return the block of K."""
        return remainder(self.item(), self.blocks)

    def channels(self):
        """Return the channels of K."""
        return pl.ds(self.block() * BLOCK, BLOCK)

    def tokens(self, x):
        """Return the chunk's rows [C, BLOCK] of x [B, T, heads, K]."""
        b, c, h = self.place()
        H = self.operands.beta.shape[2]
        return x.at[b, pl.ds(c * C, C), quotient(h, H // x.shape[2]), self.channels()]

    def scale(self):
        """Return the scale of the chunk."""
        b, c, _ = self.place()
        return self.operands.scale[b, c]

    def number(self, row: int):
        """Return numbers of tokens, a row of `Tiles.numbers`, repeated over [C, BLOCK]."""
        return by_row(plgpu.load(self.tiles.row(row), layout=BY_ROW), SHAPE)

    def stage(self, step):
        """Return the stage of a step. Where an item of several steps may begin in any, it is behind a barrier of the compiler, so
        that the warpgroup that loads holds no addresses that follow from it."""
        found = lax.rem(self.turn * self.steps + step, jnp.int32(STAGES))
        varies = self.steps > STAGES and self.steps % STAGES != 0
        return lax.optimization_barrier(found) if varies else found

    def hidden(self, x):
        """Return the number x in a form whose value the compiler does not know. Matrices that sum rows are formed from it where
        several products read them: `hidden` in `scan/key_program.py` has the reason."""
        return jnp.where(self.scale() < jnp.inf, x, x + x)

    def lines(self):
        """Return the positions in memory of rows and of columns of a [C, C] matrix, [C] each. They are behind barriers, so that
        registers do not hold what loops form from them."""
        places = (plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=layout) for layout in (BY_ROW, BY_COLUMN))
        i, j = map(lax.optimization_barrier, places)
        return i, j

    def scanned(self, place):
        """Return the position in scanning order of a position in memory, or the other way round."""
        return C - 1 - place if self.reverse else place

    def in_order(self):
        """Return matrices i and j [C, C] that are ordered as the tokens of rows and of columns are scanned: i > j where the row's
        token comes later. In a reverse scan each is the position in memory of the other, so that nothing is subtracted."""
        i, j = self.lines()
        i, j = by_row(i, (C, C)), by_column(j, (C, C))
        return (j, i) if self.reverse else (i, j)

    def matrix(self, condition):
        """Return the matrix [C, C] that sums the rows j for which condition(i, j) holds, an operand of products. The condition
        may only compare i with j: `in_order` says why."""
        return jnp.where(condition(*self.in_order()), self.hidden(jnp.float32(1.0)), 0.0).astype(BF16)

    def summed(self, matrix):
        """Return the sums of gates matrix @ g, [C, BLOCK] in natural logarithms."""
        return tiles.product(SHAPE, *((matrix, g) for g in self.tiles.gates))

    def decay(self, condition):
        """Return e^x, [C, BLOCK], for the sums x of gates j for which condition(i, j) holds."""
        return jnp.exp2(self.summed(self.matrix(condition)) * LOG2E)

    def write_term(self, row: int, x):
        """Write x [C] to a row of `Results.terms`."""
        b, c, h = self.place()
        self.results.terms[b, c, h * self.blocks + self.block(), row] = x
