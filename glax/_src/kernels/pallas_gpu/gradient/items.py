"""Number the chunks that a gradient's program computes, form masks over a chunk's tokens, and let warpgroups take turns.

A program takes every `step`-th item, a run of chunks of one head. One warpgroup loads the tokens a chunk ahead, and the states
at both ends of a chunk once those of the chunk before have been read. Only the first chunk of a run has a stored state before
it. Within the run, the computing warpgroups carry that state on.

Two warpgroups compute. With D = 128 both share a chunk, and with D = 64 each has its own. Results overwrite the tiles of the
tokens. The loading warpgroup stores them to global memory while the next chunk is computed, after it has loaded that chunk's
states, for which the computing warpgroups wait.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, WARPGROUP
from glax._src.kernels.pallas_gpu.device.pipeline import acting_as
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, REGISTERS, WGMMA
from glax._src.kernels.pallas_gpu.plan import ROWS, WHOLE, Blocks, C, quotient, remainder, span, tile_columns

BF16 = jnp.bfloat16
SLOTS = 2  # chunks in shared memory: one in work, one on its way
TILE = (C, 64)  # the tokens of half of 128 channels, or of all of 64
ROLES = dict(compute=2, load=1)

Ref = Any


@dataclass(frozen=True)
class Items:
    """Hold the sizes and options that a kernel of the gradient is compiled for.

    H counts the blocks of all heads. A team is the warpgroups that share a chunk, and an item is a run of chunks of one head.
    Items are numbered by (batch row, run, head), of which heads vary fastest. heads: the numbers of heads of q, of k and of v.
    programs: the number of programs. reverse: whether the scan goes from the last token to the first.
    """

    B: int
    T: int
    H: int
    in_memory: tuple[int, int]  # the columns of a block of keys, and of values, in memory
    heads: tuple[int, int, int]
    programs: int
    reverse: bool
    blocks: Blocks = WHOLE  # of which a wide head's state consists; H counts them
    run: int = 1  # chunks from one stored state to the next; divides those of a sequence
    edges: bool = False  # chunks without some tokens are read from copies: `rows.Edges`
    terms: int = 1  # arrays of bfloat16 of which per-key gates are the sum
    summed: int = 1  # blocks of V over which dq, dk and dg are one sum; the exact form adds them up
    packed: bool = False  # chunks begin at any row of the inputs: `places` has those
    # Marked tokens reset the state (`newest_resets`). A chunk may hold several sequences, so d_scale is by token.
    resets: bool = False

    @functools.cached_property
    def D(self) -> int:
        """Return the width of a block of keys, and of values."""
        return 64 if max(self.in_memory) <= 64 else 128

    @functools.cached_property
    def pads_columns(self) -> bool:
        """Return whether the tiles of a block are padded with columns of zeros, because the block has fewer columns in memory
        than D."""
        return self.in_memory != (self.D, self.D)

    @property
    def block(self) -> tuple[slice | pl.Slice, slice | pl.Slice]:
        """Return the rows and the columns of a block [D, D] of the state in memory: two slices, which may pass the end of what
        is there."""
        keys, values = self.in_memory
        return span(0, self.D, keys), span(0, self.D, values)

    @property
    def tile(self) -> int:
        """Return the number of columns of a tile in shared memory."""
        return tile_columns(*self.in_memory)

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a batch row, or of all packed sequences."""
        return -(-self.T // C)

    @property
    def halves(self) -> int:
        """Return the number of parts of 64 channels in a block."""
        return self.D // 64

    @property
    def team(self) -> int:
        """Return the number of warpgroups that share a chunk."""
        return self.halves

    @property
    def last_token(self) -> int:
        """Return the row of the token by which a scan leaves a chunk."""
        return 0 if self.reverse else C - 1

    @property
    def teams(self) -> int:
        """Return the number of chunks that a program computes side by side."""
        return 2 // self.team

    @property
    def step(self) -> int:
        """Return the number of items from one of a team's items to its next."""
        return self.programs * self.teams

    @property
    def runs(self) -> int:
        """Return the number of runs of a batch row."""
        return self.chunks // self.run

    def count(self, first):
        """Return the number of chunks in the items first, first + step, ...: all items of a team. first: the number of the
        team's first item."""
        total = self.B * self.runs * self.H
        return lax.div(jnp.maximum(total - first, 0) + (self.step - 1), self.step) * self.run

    def chunk(self, first, i):
        """Return (batch row, run, chunk of the row, head, chunk of the run in scan order) of a team's i-th chunk, all numbers
        from 0. first: the number of the team's first item."""
        item = first + quotient(i, self.run) * self.step
        rest, h = quotient(item, self.H), remainder(item, self.H)
        b, run = quotient(rest, self.runs), remainder(rest, self.runs)
        j = remainder(i, self.run)
        return b, run, run * self.run + (self.run - 1 - j if self.reverse else j), h, j

    def chunk_of(self, program, i, team: int):
        """Return the result of `chunk` for the i-th chunk of a team. program: the program's number. team: the team's number in
        the program."""
        return self.chunk(program * self.teams + team, i)

    def slot(self, i, team: int):
        """Return the slot of shared memory that holds a team's i-th chunk. team: the team's number in the program."""
        return team * SLOTS + lax.rem(i, SLOTS)

    def heads_of(self, h) -> dict:
        """Return for each array of tokens, by its name q, k, g, v or do, the index of its head that block h of the state
        reads."""
        query, key, value = self.heads
        of_keys = dict(q=query, k=key, g=self.H // self.blocks.columns)
        of_values = dict(v=value, do=self.H // self.blocks.rows)
        found = {name: self.blocks.of_keys(h, self.H, heads) for name, heads in of_keys.items()}
        return found | {name: self.blocks.of_values(h, self.H, heads) for name, heads in of_values.items()}

    def rows_of(self, places: Ref, c) -> slice | pl.Slice:
        """Return the slice of C rows of the operands that chunk c reads. places: for packed sequences the table [chunks, 3] of
        `gradient_key`, whose first column is the first row divided by 8; not read otherwise."""
        return pl.ds(places[c, 0] * ROWS if self.packed else c * C, C)

    def scale(self, scale: Ref, b, c):
        """Return the scale of chunk c in batch row b. scale: one number for each batch row, or for each chunk if sequences are
        packed."""
        return scale[c if self.packed else b]


class Program(NamedTuple):
    """Hold what one program reads and writes: its plan (`Items`), the references of operands and results in global memory, of
    tiles in shared memory, and the barriers."""

    plan: Any
    operands: Any
    results: Any
    tiles: Any
    pipeline: Any

    def meet(self):
        """Wait for all warpgroups that compute. Each then sees what the others have stored in shared memory."""
        plgpu.commit_smem()
        self.pipeline.met.arrive()
        self.pipeline.met.wait()


@dataclass(frozen=True)
class ScanOrder:
    """Form masks and matrices [i, j] over the tokens of a chunk as they lie in memory, [64, 64] in registers; `reverse` scans
    them backwards.

    order: a reference to the result of `tokens`, or of `marks` if `resets`. Every mask reads `order` anew, because the compiler
    would hold masks that depend on positions alone in registers throughout a loop. `earlier` and `before` exclude pairs that a
    reset divides, and `later` does not.
    """

    reverse: bool
    order: Any
    resets: bool = False

    @property
    def last(self) -> int:
        """Return the row of the token by which a scan leaves the chunk."""
        return 0 if self.reverse else C - 1

    def positions(self):
        """Return the positions in scan order, from 1, of every row's token i and of every column's token j: two matrices [64,
        64] in int32."""
        i = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=WGMMA)
        j = plgpu.load(self.order, layout=BY_COLUMN, optimized=False)
        return C - i if self.reverse else i + 1, along(j >> 8 if self.resets else j)

    def earlier(self):
        """Return the mask of pairs in which token i is no later than token j."""
        i, j = self.positions()
        return self.in_reach(i, i <= j)

    def before(self):
        """Return the mask of pairs in which token i is before token j."""
        i, j = self.positions()
        return self.in_reach(i, i < j)

    def later(self):
        """Return the mask of pairs in which token i is no earlier than token j."""
        i, j = self.positions()
        return i >= j

    def in_reach(self, i, mask):
        """Return `mask` and the condition that position i is at or after the newest reset of token j; `mask` itself without
        resets. i: positions in scan order, [64, 64]. mask: [64, 64]."""
        if not self.resets:
            return mask
        return mask & (i >= along(plgpu.load(self.order, layout=BY_COLUMN, optimized=False) & 255))

    def sums(self):
        """Return two matrices [64, 64] of 0 and 1 in bfloat16 that sum rows for the gradient of the gates: for each token i,
        over the tokens j >= i, and over the tokens j < i.

        With resets the first sum ends before the next reset, and it is empty at a reset. The second needs no such end, because
        it is over tokens behind the last reset.
        """
        i, j = self.positions()
        mask = i <= j
        behind = self.in_reach(i - 1, mask) if self.resets else mask
        return masked(behind, 1.0), masked(mask, 0.0, 1.0)

    def from_state(self, x):
        """Return x [64, n] with zeros in the rows of tokens that have a reset at or before them."""
        newest = plgpu.load(self.order, layout=tiles.BY_ROW) & 255
        return jnp.where(tiles.by_row(newest, x.shape) == 0, x, 0.0)

    def to_state(self, x):
        """Return x [64, n] with zeros in the rows of tokens that have a reset behind them."""
        position = plgpu.load(self.order, layout=tiles.BY_ROW) >> 8
        return jnp.where(tiles.by_row(position, x.shape) >= (self.order[self.last] & 255), x, 0.0)

    def passes(self):
        """Return 1.0 if no token of the chunk is a reset, else 0.0."""
        return ((self.order[self.last] & 255) == 0).astype(jnp.float32)

    def middle_matrix(self):
        """Return the matrix [64, 64] in bfloat16 whose product with gates sums them from the chunk's middle through token i,
        with sign -1 before the middle."""
        j = plgpu.broadcasted_iota(jnp.int32, TILE, 1, layout=WGMMA)
        second = j < C // 2 if self.reverse else j >= C // 2
        least = jnp.where(second, 0.0, -1.0)
        return masked(self.later(), least + 1.0, least)


def tokens(reverse: bool):
    """Return the position of each token of a chunk in scan order, from 1, by its row in memory: [64]. `ScanOrder` reads it.

    Numbers from 0 on would be an iota, which XLA computes in every call.
    """
    order = np.arange(1, C + 1, dtype=np.int32)
    return order[::-1] if reverse else order


def marks(newest, reverse: bool):
    """Return 256 p + r by row in memory, [B, chunks, 64] in int32: p is a token's position in scan order, from 1, and r the
    position of its newest reset, from 1, or 0 without one.

    newest: the result of `newest_resets`.
    """
    return newest + 1 + 256 * tokens(reverse)


# ---- tiles -----------------------------------------------------------------------------------------------------------


def hidden_zero():
    """Return 0 behind a barrier, for the index of a tile, so that the compiler does not know its value.

    The compiler would compute the addresses of known tiles ahead of all loops, and spill them. A tile that products add to may
    not have a constant index.
    """
    return lax.optimization_barrier(jnp.int32(0))


def half(p, width: int = 128):
    """Return the slice of the 64 columns from 64 p on. width: the number of columns in memory, which the slice may pass."""
    return span(p * 64, 64, width)


def along(x):
    """Return x [64], one number for each column, repeated over the rows of a tile."""
    return jnp.broadcast_to(x[None, :], TILE)


def columns(ref):
    """Load ref [64] from shared memory, one number for each column, and return it repeated over the rows of a tile."""
    return along(plgpu.load(ref, layout=BY_COLUMN))


def accumulator(shape=TILE):
    """Return the type of a float32 accumulator in registers, to which products are added."""
    return plgpu.ACC(shape, jnp.float32)


def masked(mask, x, other: float | jax.Array = 0.0):
    """Return x where the mask is true, else `other`, in bfloat16.

    The barrier keeps the compiler from rounding first, which would leave two registers for every pair.
    """
    return lax.optimization_barrier(jnp.where(mask, x, other)).astype(BF16)


def store_rounded(tile, x):
    """Store x in the tile in bfloat16, and return what is lost, x minus its rounded value, in bfloat16.

    The barrier keeps the compiler from rounding x twice, one number at a time, which takes longer than pairs.
    """
    high = lax.optimization_barrier(x.astype(BF16))
    tile[...] = high
    return (x - high.astype(jnp.float32)).astype(BF16)


# ---- warpgroups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Hold the position of the chunk that a computing warpgroup processes, and the part of it that is the warpgroup's own."""

    p: Program
    first: Any  # the first item of its team
    i: Any  # the number of chunks that the team had before
    t: Any  # its team
    w: Any  # its number in the team
    wg: Any  # its number in the program
    b: Any  # sequence
    c: Any  # chunk of the sequence
    h: Any  # head
    j: Any  # chunk of its run, from where the scan enters
    at: Any  # the chunk's slot
    other: Any  # the slot of the next chunk
    mine: Any  # the columns of the warpgroup's half
    scale: Any

    @staticmethod
    def place(p: Program, first, i) -> dict:
        """Return the fields of `Chunk` for a team's i-th chunk. first: the team's first item."""
        n, wg = p.plan, lax.axis_index(WARPGROUP)
        t, w = lax.optimization_barrier((lax.div(wg, n.team), lax.rem(wg, n.team)))
        b, _, c, h, j = n.chunk(first, i)
        at, other = (t * SLOTS + lax.rem(i + ahead, SLOTS) for ahead in (0, 1))
        place = dict(t=t, w=w, b=b, c=c, h=h, j=j, at=at, other=other, mine=half(w), wg=t * n.team + w)
        return dict(p=p, first=first, i=i, **place, scale=n.scale(p.operands.scale, b, c))

    @property
    def q(self) -> Ref:
        """Return the chunk's tile of q in shared memory."""
        return self.p.tiles.q.at[self.at]

    @property
    def k(self) -> Ref:
        """Return the chunk's tile of k in shared memory."""
        return self.p.tiles.k.at[self.at]

    @property
    def v(self) -> Ref:
        """Return the chunk's tile of v in shared memory."""
        return self.p.tiles.v.at[self.at]

    @property
    def do(self) -> Ref:
        """Return the chunk's tile of the output's gradient in shared memory."""
        return self.p.tiles.do.at[self.at]

    def meet(self):
        """Wait for all warpgroups that share the chunk. Each then sees what the others have stored.

        One barrier serves every such point, because each barrier that a warpgroup waits for takes registers for its phase.
        """
        met = self.p.pipeline.met
        plgpu.commit_smem()
        met.arrive(self.t)
        met.wait(self.t)

    def wait_for_states(self):
        """Wait until dS is loaded, and at the first chunk of a run also S."""
        pipeline = self.p.pipeline
        pipeline.states.wait(self.t)
        if self.p.plan.run > 1:
            pl.when(self.j == 0)(lambda: pipeline.S.wait(self.t))

    def wait_until_stored(self):
        """Wait until the results of the team's chunk before have left shared memory; at its first chunk, return."""
        pl.when(self.i >= 1)(lambda: self.p.pipeline.results.acquire(self.t))

    def hand_over(self):
        """Report to the loading warpgroup that the results are in shared memory."""
        plgpu.commit_smem()
        self.p.pipeline.results.filled(self.t)

    def share(self, first: Callable, second: Callable):
        """Run `first` in one and `second` in the other of the two warpgroups that share the chunk, or both functions in the
        only one."""
        if self.p.plan.team == 1:
            first()
            second()
        else:
            pl.when(self.w == 0)(first)
            pl.when(self.w == 1)(second)


def first_item(n: Items):
    """Return the number of this computing warpgroup in its program, and the first item of its team."""
    wg = lax.axis_index(WARPGROUP)
    return wg, lax.axis_index(PROGRAM) * n.teams + lax.div(wg, n.team)


def compute_chunks(n: Items, first, compute: Callable):
    """Run compute(first, i) for each chunk of a team. first: the team's first item. i: the chunk's number among the team's."""

    def step(i, _):
        compute(first, i)
        return ()

    lax.fori_loop(0, n.count(first), step, ())


def load_chunks(p: Program, load_early: Callable, load_late: Callable, store: Callable):
    """Run the loading warpgroup: call each function with (program, i, team) for the i-th chunk of every team.

    load_early loads the tiles that are free. load_late loads the states, and the tiles that the chunk before uses until it is
    computed. store copies the results of a chunk to global memory, in one group of copies, while the next chunk is computed.
    """
    n, results = p.plan, p.pipeline.results
    program = lax.axis_index(PROGRAM)
    chunks = [n.count(program * n.teams + team) for team in range(n.teams)]

    def step(i, _):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for team in range(n.teams):
            pl.when((i >= 2) & (i <= chunks[team]))(lambda team=team: results.release(team))
            pl.when(i < chunks[team])(lambda team=team: load_early(program, i, team))
        for team in range(n.teams):
            pl.when(i < chunks[team])(lambda team=team: load_late(program, i, team))
        for team in range(n.teams):
            pl.when((i >= 1) & (i <= chunks[team]))(lambda team=team: store(program, i - 1, team))
        return ()

    lax.fori_loop(0, chunks[0] + 1, step, ())
    plgpu.wait_smem_to_gmem(0)


def warpgroups(load: Callable, compute: Callable):
    """Run `load` in the third warpgroup, with few registers, and `compute` in the first two, with many."""
    wg = lax.axis_index(WARPGROUP)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        with acting_as("load"):
            load()

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        compute()
