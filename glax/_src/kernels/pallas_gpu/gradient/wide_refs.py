"""Define the sizes that the gradient of wide heads is compiled for, its items of work, and its references by name."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import tiled, with_terms
from glax._src.kernels.pallas_gpu.gradient.tiles import half
from glax._src.kernels.pallas_gpu.plan import Blocks, C, quotient, remainder

STAGES = 2  # steps whose tiles lie in shared memory: one in work, one on its way
STEPS = 2  # of 64 columns in a block of 128

Ref = Any


@dataclasses.dataclass(frozen=True)
class WideGradient:
    """Hold what the kernel is compiled for. An item is one chunk of one block of K, 128 channels, of one head. Its steps take 64
    columns of V each.

    H: the number of whole heads. heads: the numbers of heads of q, k and v, in blocks. programs: the number of multiprocessors.
    terms: the arrays of bfloat16 of which per-key gates are the sum, 1 or 2.
    resets: whether tokens that reset the state are marked.
    """

    B: int
    T: int
    H: int
    blocks: Blocks
    heads: tuple[int, int, int]
    programs: int
    terms: int
    reverse: bool
    resets: bool = False

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a sequence."""
        return -(-self.T // C)

    @property
    def rows(self) -> int:
        """Return the number of blocks of K of all heads."""
        return self.H * self.blocks.rows

    @property
    def steps(self) -> int:
        """Return the number of steps of an item."""
        return STEPS * self.blocks.columns

    @property
    def slots(self) -> int:
        """Return the number of items whose q and k lie in shared memory."""
        return 1 if self.terms == 2 else 2

    def count(self, program):
        """Return the number of items program, program + programs, ..."""
        return lax.div(self.B * self.chunks * self.rows - program + (self.programs - 1), jnp.int32(self.programs))


class Operands(NamedTuple):
    """Hold the operands, in global memory. Heads are blocks of 128 channels or columns."""

    q: Ref  # [B, T, HQ, 128]
    k: Ref  # [B, T, HK, 128]
    v: Ref  # [B, T, HV, 128]
    gates: tuple[Ref, ...]  # the terms, [B, T, rows, 128] each
    d_output: Ref  # [B, T, H * columns, 128]
    scale: Ref  # [B + 1]
    before: Ref  # [B, chunks, rows * columns, 128, 128]
    behind: Ref  # [B, chunks, rows * columns, 128, 128]
    tokens: Ref  # [C]: the place of every row in scanning order, from 1; with resets [B, chunks, C]: `vjp_tiles.marks`


class Results(NamedTuple):
    """Hold the results, in global memory."""

    dq: Ref  # [B, T, rows, 128]
    dk: Ref  # [B, T, rows, 128]
    dv: Ref  # [B, T, rows * columns, 128]
    dg: Ref  # [B, T, rows, 128]
    used: Ref  # [B, chunks, rows, 2, C]: q dq by token, of each half of the channels

    @classmethod
    def types(cls, n: WideGradient) -> "Results":
        keys = jax.ShapeDtypeStruct((n.B, n.T, n.rows, 128), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((n.B, n.T, n.rows * n.blocks.columns, 128), jnp.bfloat16)
        return cls(keys, keys, values, keys, jax.ShapeDtypeStruct((n.B, n.chunks, n.rows, 2, C), jnp.float32))


class Tiles(NamedTuple):
    """Hold the shared memory. The second axis of tiles of tokens holds halves of the channels, one for each warpgroup."""

    q: Ref  # [slots, 2, C, 64]: q, then x, then dq
    k: Ref  # [slots, 2, C, 64]: k, then y, then dk
    gates: Ref  # [terms, 2, C, 64]
    x_rest: Ref  # [2, C, 64]: what x loses in bfloat16, then the gates' gradient from behind, then dg
    y_rest: Ref  # [2, C, 64]: what y loses, then the gates' gradient from before
    v: Ref  # [STAGES, C, 64]
    d_output: Ref  # [STAGES, C, 64]: d_output, then dv
    before: Ref  # [STAGES, 128, 64]
    behind: Ref  # [STAGES, 128, 64]
    scores: Ref  # [2, C, C], transposed: A, then what dA loses; dA; then by half what the gates' gradient loses
    sums: Ref  # [2, 64]: by half of the channels every token's score with itself, then sum_v S dS of each channel
    order: Ref  # [2, C]: `tokens`, for each warpgroup; with resets for every other item

    @classmethod
    def types(cls, n: WideGradient) -> "Tiles":
        return cls(
            q=tiled(n.slots, 2, C, 64),
            k=tiled(n.slots, 2, C, 64),
            gates=tiled(n.terms, 2, C, 64),
            x_rest=tiled(2, C, 64),
            y_rest=tiled(2, C, 64),
            v=tiled(STAGES, C, 64),
            d_output=tiled(STAGES, C, 64),
            before=tiled(STAGES, 128, 64),
            behind=tiled(STAGES, 128, 64),
            scores=tiled(2, C, C),
            sums=plgpu.SMEM((2, C), jnp.float32),
            order=plgpu.SMEM((2, C), jnp.int32),
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports."""

    keys_loaded: Ref  # by slot: q and k of an item lie in shared memory
    gates_loaded: Ref  # and its gates, and resets
    gates_read: Ref  # both have summed the gates for the last time
    keys_free: Ref  # by slot: dq and dk have left
    loaded: Ref  # by stage: the tiles of a step lie in shared memory
    consumed: Ref  # by stage: both are done with them, and dv has left
    scored: Ref  # by stage: the first warpgroup is done with d_output
    met: Ref

    @classmethod
    def types(cls, n: WideGradient) -> "Barriers":
        return cls(
            keys_loaded=plgpu.Barrier(num_arrivals=4, num_barriers=n.slots),
            gates_loaded=plgpu.Barrier(num_arrivals=2 * n.terms + n.resets),
            gates_read=plgpu.Barrier(num_arrivals=2),
            keys_free=plgpu.Barrier(num_arrivals=2, num_barriers=n.slots),
            loaded=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            scored=plgpu.Barrier(num_barriers=STAGES),
            met=plgpu.Barrier(num_arrivals=2),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program."""

    plan: WideGradient
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers

    @classmethod
    def of(cls, plan: WideGradient, *refs) -> "Program":
        """Return the program. refs: operands and results one after the other, then `Tiles` and `Barriers`."""
        *in_global, tiles, barriers = refs
        in_global = with_terms(in_global, Operands._fields.index("gates"), plan.terms)
        operands = Operands(*in_global[: len(Operands._fields)])
        return cls(plan, operands, Results(*in_global[len(Operands._fields) :]), tiles, barriers)

    def place(self, i):
        """Return batch row, chunk and block of K of the program's i-th item."""
        item = lax.axis_index("program") + i * self.plan.programs
        rest = quotient(item, self.plan.rows)
        return quotient(rest, self.plan.chunks), remainder(rest, self.plan.chunks), remainder(item, self.plan.rows)

    def rows(self, i):
        """Return batch row and token rows of the i-th item."""
        b, c, _ = self.place(i)
        return b, pl.ds(c * C, C)

    def block(self, i, step=0):
        """Return the block of the state that a step of the i-th item reads."""
        return self.place(i)[2] * self.plan.blocks.columns + quotient(step, STEPS)

    def stage(self, i, step):
        """Return the stage of a step of the i-th item."""
        return lax.rem(i * self.plan.steps + step, jnp.int32(STAGES))

    def parity(self, i):
        """Return the place of the resets of the i-th item. The item before still reads its own when they are fetched."""
        return remainder(i, 2)

    def columns(self, step):
        """Return the columns of a step within its block."""
        return half(remainder(step, STEPS))

    def meet(self):
        """Wait for the other warpgroup; each sees what the other has stored."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)
