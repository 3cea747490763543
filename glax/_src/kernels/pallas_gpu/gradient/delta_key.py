"""Compute the gradient of every chunk and head under the delta rule, with per-key gates.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all of them, [K] each. S is the state before the
chunk, and dS' = dL/dS' behind it. U and dX are those of `scan/delta_key.py`, and e = beta k:

    dP_ij = dO_i . U_j              j up to i       the gradients of the pairs' scores without decays
    dA_ij = -dX_i . U_j             j before i

    dq_i = scale (e^{G_i} (S dO_i) + sum_j dP_ij k_j e^{G_i - G_j})
    de_i = -e^{G_i} (S dX_i) + sum_j dA_ij k_j e^{G_i - G_j}
    dk_j = e^{G_last - G_j} (dS' U_j) + sum_i (scale dP_ij q_i + dA_ij e_i) e^{G_i - G_j} + beta_j de_j
    d beta_i = de_i . k_i + dX_i . v_i              `scan/delta_key.py` computes the second term

An erase vector e is an operand, and de a result. The last terms of dk_j and d beta_i are then absent, and dX has two terms of
bfloat16 beside S and U. With `before_decay`, e_i
reads the state before its token's own decay: G_i is G_{i-1} wherever it stands beside e_i or de_i.

A log gate decays the pairs with one token before it and one from it on. With dk^ for the terms of dk that are sums over i, and
without the terms of a token with itself:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s e^{G_last - G_s} (dS' U_s) + sum_{s >= t} (q_s dq_s + e_s de_s - k_s dk^_s)

where with `before_decay` the sum of e_s de_s is over s > t.

The sums over pairs are taken in the levels of `chunks/pairs.py`, of which the last has the fast form where there are at most
FAST_LEVELS. For dP with x = scale q, and for dA with x = e, they are sums over pairs with one reference, or over several such:

    dx_i  = e^{M_i} sum_j dP_ij (k_j e^{-M_j})          dk^_j = e^{-M_j} sum_i dP_ij (x_i e^{M_i})

With `before_decay` the M_i of e is without the token's own gate, as in `chunks/pairs.py`, and 0 for the first of the 2 s tokens
around a reference, which reads no pair of the level.

dP, dA and the decayed tokens have two terms of bfloat16, so both sums have 16 bits. In dg the terms of a pair whose tokens are
both behind the gate cancel, and leave an error of 16 bits.

Roles. An item is one chunk of one head and 64 channels of K; programs are persistent. *queries* computes dq, its part of dk^,
and dg. *keys* computes de and dk. Each adds up its sums over V in steps of 64 columns. *load* loads, also for the next item.

Memory. The tiles of a step lie in two stages (`Columns`), those of an item's channels of K once (`Tiles`). dq, dk and de
overwrite q, k and e, and dg the gates. Tiles of pairs and of decayed tokens hold at last what one warpgroup hands to the other.
Who waits for whom:

    waits          for            until
    queries, keys  load           columns full: d_output, S, U, dS, dX
    load           queries, keys  columns free
    queries, keys  load           channels loaded: q, k, gates, beta
    load           queries, keys  channels read
    keys           queries        gates stored
    queries        keys           right stored
    keys           queries        right read
    queries, keys  queries, keys  exchange

With an erase vector there is e in the place of beta, and beside the columns

    keys           load           lost full: lost
    load           keys           lost free
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.chunks.pairs import FAST_LEVELS
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PARAMS, PROGRAM, by_role, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    HALF,
    LOG2E,
    by_column,
    by_row,
    read,
    split,
    store_split,
    tiled,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient.delta import COLUMNS, STAGES, ChunkProgram, Columns, add_keys, load_step
from glax._src.kernels.pallas_gpu.plan import PAIRS, C

BF16 = jnp.bfloat16
BLOCK = 64  # channels of K of an item
SHAPE = (C, BLOCK)
TERMS = 2
D_SCALE, D_BETA = range(TERMS)  # rows of `Results.terms`; with e there is the first
QUERIES, KEYS = range(2)  # the roles that compute, and the places of their tiles
ROLES = dict(queries=1, keys=1, load=1)
# Registers of a thread, by whether e is an operand. A request for more than 3 x 168 in all would wait forever.
REGISTERS = {False: dict(queries=232, keys=248, load=24), True: dict(queries=240, keys=240, load=24)}
NUMBERS, MATRICES = 3, 15
TOKEN_BETA, OWN, EDGE = range(NUMBERS)  # rows of `Tiles.numbers`; with e none is read of the first

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory: tokens, and the states and dL/dS of every chunk. Each field's comment
    has its shape. HQ and HK, the numbers of heads of q and k, divide H; C is 64, the tokens of a chunk."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    gates: Ref  # [B, T, H, K], in bfloat16 or float32
    beta: Ref  # [B, chunks, H, C]; None with e
    d_output: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, V, K + C]: S and U, transposed
    d_states: Ref  # [B, chunks, H, V, K + C]: dS' and dX, transposed; with e [.., K + 2 C], what dX loses in bfloat16 behind it
    scale: Ref  # [B, chunks]
    levels: Ref  # [B, chunks, H]: of `chunks/pairs.py`
    e: Ref  # [B, T, H, K], in bfloat16; None with beta


class Results(NamedTuple):
    """Hold references to the results, in global memory: the gradients, and by token the terms of d_scale and of beta's
    gradient. Each field's comment has its shape."""

    dq: Ref  # [B, T, H, K]
    dk: Ref  # [B, T, H, K]
    dg: Ref  # [B, T, H, K], in the dtype of the gates
    # [B, chunks, H * blocks of K, TERMS, C]: q . dq / scale and k . de, summed over a block; with e the first alone
    terms: Ref
    de: Ref  # [B, T, H, K]; None with beta

    @classmethod
    def types(cls, x: Operands) -> "Results":
        """Return the shapes and dtypes of the results for the operands `x`."""
        (B, T, H, K), chunks, has_erase = x.gates.shape, x.scale.shape[1], x.e is not None
        rows = jax.ShapeDtypeStruct((B, T, H, K), BF16)
        terms = jax.ShapeDtypeStruct((B, chunks, H * (K // BLOCK), TERMS - has_erase, C), jnp.float32)
        dg = jax.ShapeDtypeStruct((B, T, H, K), x.gates.dtype)
        return cls(rows, rows, dg, terms, rows if has_erase else None)


class Tiles(NamedTuple):
    """Hold references to the shared memory of an item: tiles over BLOCK channels of K, and vectors [C]. Each field's comment
    has its shape. A matrix "in two terms" is the sum of two tiles of bfloat16."""

    matrices: Ref  # [MATRICES or one more, C, BLOCK]: those that properties name
    wide: Ref  # [1, C, BLOCK]: float32 gates as they are loaded, and at last dg; None for bfloat16
    numbers: Ref  # [NUMBERS, C], by token: beta, dP_ii; by channel: e^{G_last} sum_v S dS'
    e: Ref  # [1, C, BLOCK]; at last de; None with beta
    lost: Ref  # [1, COLUMNS, C], of a step: what dX^T loses in bfloat16; None with beta
    # [TERMS, C, BLOCK]: decayed rows of dS' U in two terms, in the place of float32 gates once these are divided; None where they
    # have matrices of their own
    over_gates: Ref

    @classmethod
    def types(cls, gates, has_erase: bool) -> tuple:
        """Return the shapes and dtypes of all tiles but `over_gates`. If that shares memory with `wide`, the latter is a union
        of both.

        gates: the dtype of the gates. has_erase: whether e is an operand.
        """
        is_wide = gates != BF16
        shares = is_wide and has_erase
        wide: Any = tiled(1, C, BLOCK, columns=32, dtype=gates) if is_wide else None
        return cls(
            matrices=tiled(MATRICES + is_wide - TERMS * shares, C, BLOCK),
            wide=plgpu.RefUnion(wide, tiled(TERMS, C, BLOCK)) if shares else wide,
            numbers=plgpu.SMEM((NUMBERS, C), jnp.float32),
            e=tiled(1, C, BLOCK) if has_erase else None,
            lost=tiled(1, COLUMNS, C) if has_erase else None,
            over_gates=None,
        )

    @classmethod
    def of(cls, given: "Tiles") -> "Tiles":
        """Return the tiles by name, with `wide` and `over_gates` apart where they share memory. given: the references for the
        types that `types` returns."""
        if given.e is None or given.wide is None:
            return given
        return given._replace(wide=given.wide[0], over_gates=given.wide[1])

    def matrix(self, number: int):
        """Return a view of the tile [C, BLOCK] with the index `number` in `matrices`. The index is behind a barrier of the
        compiler, which would otherwise hold the addresses of all matrices throughout loops."""
        return self.matrices.at[lax.optimization_barrier(jnp.int32(number))]

    def row(self, number: int):
        """Return a view of row `number` of `numbers`, [C] in shared memory, behind a barrier of the compiler."""
        return self.numbers.at[lax.optimization_barrier(jnp.int32(number))]

    def pair(self, number: int):
        """Return views of the two tiles from index `number` of `matrices` on: the two bfloat16 terms of one matrix."""
        return self.matrix(number), self.matrix(number + 1)

    @property
    def q(self):
        """Return the tile of q in shared memory, [C, BLOCK] in bfloat16. At last it holds dq."""
        return self.matrix(0)

    @property
    def k(self):
        """Return the tile of k in shared memory, [C, BLOCK] in bfloat16. At last it holds dk."""
        return self.matrix(1)

    def pairs(self, side: int):
        """Return the tiles of dP (side QUERIES) or dA (side KEYS), [C, C] in two terms.

        At the end of an item the tiles of QUERIES hold the terms that *queries* adds to dk. With an e that reads before the
        decay, the tiles of KEYS hold the terms of dg that are summed over the tokens behind a token.
        """
        return self.pair(2 + 2 * side)

    def left(self, side: int):
        """Return the tiles of x e^M, [C, BLOCK] in two terms, with x = scale q (side QUERIES) or e (side KEYS).

        At the end of an item they hold the terms of dg that are summed from a token on.
        """
        return self.pair(6 + 2 * side)

    @property
    def right(self):
        """Return the tiles of k e^-M, [C, BLOCK] in two terms. At the end of an item they hold the terms of dg that are summed
        before a token."""
        return self.pair(10)

    @property
    def behind(self):
        """Return the tiles of e^{G_last - G_j} (dS' U_j), [C, BLOCK] in two terms."""
        if self.over_gates is None:
            return self.pair(12)
        return tuple(self.over_gates.at[lax.optimization_barrier(jnp.int32(term))] for term in range(TERMS))

    @property
    def gates(self):
        """Return the tiles of the gates, [C, BLOCK]: one in bfloat16, or the two terms of float32 gates. `prepare_gates` stores
        them."""
        first = 14 if self.over_gates is None else 12
        return [self.matrix(first + term) for term in range(1 if self.wide is None else 2)]

    @property
    def erasing(self):
        """Return the tile of e, [C, BLOCK] in bfloat16. At the end of an item it holds de. Only with an erase vector."""
        return self.e.at[lax.optimization_barrier(jnp.int32(0))]

    @property
    def lost_of_step(self):
        """Return the tile [COLUMNS, C] of what dX^T loses in bfloat16, for the columns of a step. Only with an erase vector."""
        return self.lost.at[lax.optimization_barrier(jnp.int32(0))]

    @property
    def given_gates(self):
        """Return the tile of the gates as they are loaded, [C, BLOCK] in their dtype. At the end of an item it holds dg."""
        return self.gates[0] if self.wide is None else self.wide.at[lax.optimization_barrier(jnp.int32(0))]


@dataclasses.dataclass(frozen=True)
class Program(ChunkProgram):
    """Hold the references of one program. It takes every `programs`-th item. programs: the number of programs. before_decay:
    whether e reads the state before its token's decay."""

    programs: int
    before_decay: bool

    @property
    def has_erase(self) -> bool:
        """Return whether the erase vector e is an operand. If not, e is beta k."""
        return self.operands.e is not None

    def turns(self):
        """Return the number of items of the program."""
        B, chunks, heads, *_ = self.results.terms.shape
        return lax.div(B * chunks * heads - lax.axis_index(PROGRAM) + (self.programs - 1), jnp.int32(self.programs))

    def at(self, turn) -> "Program":
        """Return this program at its `turn`-th item, from 0."""
        return dataclasses.replace(self, turn=turn)

    def item(self):
        """Return the number of the item among those of all programs, behind a barrier of the compiler. Blocks of K vary
        fastest, then heads, then chunks."""
        return lax.optimization_barrier(lax.axis_index(PROGRAM) + self.turn * self.programs)

    def numbers_over_columns(self, row: int):
        """Load row `row` of `Tiles.numbers` into registers: one number for each token, repeated over the columns of [C,
        BLOCK]."""
        return by_row(plgpu.load(self.tiles.row(row), layout=BY_ROW), SHAPE)

    def stage(self, step):
        """Return the index of the stage of shared memory that holds the columns of the item's step number `step`.

        If items of several steps may begin in any stage, the result is behind a barrier of the compiler, so that the loading
        warpgroup holds no addresses that follow from it.
        """
        found = lax.rem(self.turn * self.steps + step, jnp.int32(STAGES))
        varies = self.steps > STAGES and self.steps % STAGES != 0
        return lax.optimization_barrier(found) if varies else found

    def hidden(self, x):
        """Return the number x behind a barrier, so that the compiler does not know its value.

        Matrices that sum rows are formed from it where several products read them, because ptxas 13.0 writes a matrix that it
        knows to be constant too late for the first product.
        """
        return jnp.where(self.scale() < jnp.inf, x, x + 1)  # x + x is known where x is 0

    def levels(self):
        """Return the number of levels of the chunk, as `chunks/pairs.py` stored it. If it is at most FAST_LEVELS, the last
        level has the fast form."""
        return self.operands.levels[self.place()]

    def lines(self):
        """Return the positions in memory of the rows and of the columns of a [C, C] matrix: two arrays [C] in registers, in the
        layouts BY_ROW and BY_COLUMN. Both are behind barriers of the compiler, so that registers do not hold what loops form
        from them."""
        places = (plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=layout) for layout in (BY_ROW, BY_COLUMN))
        i, j = map(lax.optimization_barrier, places)
        return i, j

    def scanned(self, place):
        """Return the position in scan order of the token at position `place` of the chunk in memory. The function is its own
        inverse."""
        return C - 1 - place if self.reverse else place

    def in_order(self):
        """Return matrices i and j [C, C] such that i > j where the row's token is scanned after the column's.

        In a reverse scan i is the column's position in memory and j the row's, so that nothing is subtracted.
        """
        i, j = self.lines()
        i, j = by_row(i, (C, C)), by_column(j, (C, C))
        return (j, i) if self.reverse else (i, j)

    def indicator_matrix(self, condition):
        """Return the matrix [C, C] in bfloat16 with 1 where condition(i, j) holds, else 0. Its product with rows of tokens sums
        the rows j for each i.

        condition: a function of two matrices of positions, which may only compare i with j: in a reverse scan `in_order`
        exchanges their positions.
        """
        return jnp.where(condition(*self.in_order()), self.hidden(jnp.float32(1.0)), 0.0).astype(BF16)

    def summed(self, matrix):
        """Return matrix @ g, [C, BLOCK] in float32: sums of natural log gates. matrix: [C, C] in bfloat16."""
        return tiles.product(SHAPE, *((matrix, g) for g in self.tiles.gates))

    def decay(self, condition):
        """Return e^x, [C, BLOCK]. x_i is the sum of the gates of those tokens j for which condition(i, j) holds."""
        return jnp.exp2(self.summed(self.indicator_matrix(condition)) * LOG2E)


@dataclasses.dataclass(frozen=True)
class DeltaKeyPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    columns: a step's columns of V. channels: an item's channels of K. gates: the tiles `Tiles.gates`. right: the rows k e^-M of
    a level. exchange: where *queries* and *keys* wait, at the end of an item, until each has stored what the other reads. lost:
    what dX loses in bfloat16 in a step's columns; None with beta.
    """

    columns: Ring
    channels: Handoff
    gates: Handoff
    right: Handoff
    exchange: Meeting
    lost: Ring | None = None

    @classmethod
    def planned(cls, has_erase: bool = False) -> "DeltaKeyPipeline":
        """Build the pipeline; its barriers are allocated at launch. has_erase: whether e is an operand, which is then loaded in
        the place of beta."""
        load, queries, keys = ("load",), ("queries",), ("keys",)
        return cls(
            columns=Ring(STAGES, load, queries + keys, ("d_output", "S", "U", "dS", "dX")),
            channels=Handoff(load, queries + keys, ("q", "k", "gates", "e" if has_erase else "beta")),
            gates=Handoff(queries, keys, returned=False),
            right=Handoff(keys, queries),
            exchange=Meeting(queries + keys),
            lost=Ring(1, load, keys, ("lost",)) if has_erase else None,
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that equal calls are lowered once
def delta_key_gradient(reverse: bool, before_decay: bool, most: int, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head. before_decay: whether e reads the state before its token's decay.
    most: the largest number of programs. operands: the fields of `Operands`."""
    x = Operands(*operands)
    (B, chunks), H, has_erase = x.scale.shape, x.gates.shape[2], x.e is not None
    programs = min(most, B * chunks * H * (x.q.shape[3] // BLOCK))

    def body(operands: Operands, results: Results, columns: Columns, own: Tiles, pipeline: DeltaKeyPipeline):
        p = Program(
            reverse, operands, results, Tiles.of(own), columns, pipeline, edges=None, width=BLOCK, programs=programs,
            before_decay=before_decay,
        )  # fmt: skip
        work = dict(queries=of_queries, keys=of_keys, load=load)
        counts = REGISTERS[has_erase]
        by_role(ROLES, {role: functools.partial(for_all_items, p, f, counts[role]) for role, f in work.items()})

    scratch = Columns.types(BLOCK, columns_first=True), Tiles.types(x.gates.dtype, has_erase)
    params = dataclasses.replace(PARAMS, reduction_scratch_bytes=0)  # no sum is over warps
    return launch(
        "delta_key_gradient", (reverse, before_decay), body, x, Results.types(x), scratch, ROLES,
        DeltaKeyPipeline.planned(has_erase), programs=programs, is_longest=True, params=params,
    )  # fmt: skip


def for_all_items(p: Program, work, count: int):
    """Run work(program) in one warpgroup for every item of the program. work: a role's function, which receives the program at
    the item. count: the registers of each thread."""
    plgpu.set_max_registers(count, action="decrease" if work is load else "increase")
    pl.loop(0, p.turns())(lambda turn: work(p.at(turn)))


# ---- load -------------------------------------------------------------------------------------------------------------


def load(p: Program):
    """Start to load an item's tiles, as the role *load*. The tiles of the first steps come first: their places are free while
    the item before still reads tokens."""
    first = min(STAGES, p.steps)
    for step in range(first):
        load_step(p, jnp.int32(step))
    if p.has_erase:
        load_lost(p, jnp.int32(0))
    x, t, channels = p.operands, p.tiles, p.pipeline.channels
    pl.when(p.turn > 0)(channels.acquire)
    for source, tile in ((x.q, t.q), (x.k, t.k), (x.gates, t.given_gates)):
        channels.copy(p.tokens(source), tile)
    if p.has_erase:
        channels.copy(p.tokens(x.e), t.erasing)
    else:
        channels.copy(x.beta.at[p.place()], t.row(TOKEN_BETA))
    if not p.has_erase:
        pl.loop(first, p.steps)(lambda step: load_step(p, step))
        return

    @pl.loop(1, p.steps)
    def _(step):
        load_lost(p, step)
        pl.when(step + 1 < p.steps)(lambda: load_step(p, step + 1))


def load_lost(p: Program, step):
    """Start to load what dX loses in bfloat16 in the columns of a step, once the step before has been read. step: the step's
    number in the item."""
    x, ring, (b, c, h) = p.operands, p.pipeline.lost, p.place()
    assert ring is not None
    ring.acquire(0, p.turn * p.steps + step)
    columns, beside = pl.ds(step * COLUMNS, COLUMNS), pl.ds(x.q.shape[3] + C, C)
    ring.copy(x.d_states.at[b, c, h, columns, beside], p.tiles.lost_of_step, 0)


# ---- compute ----------------------------------------------------------------------------------------------------------


def of_queries(p: Program):
    """Compute dq, the terms dP^T q of dk, and dg, of an item, as the role *queries*. Write dq and dg to global memory, and
    leave the terms of dk in shared memory for *keys*."""
    t = p.tiles
    nothing = zeros(PAIRS), zeros(SHAPE), zeros((COLUMNS, BLOCK))
    dP, of_state, edge = lax.fori_loop(0, p.steps, functools.partial(add_queries, p), nothing)
    p.pipeline.channels.wait()
    prepare_gates(p)
    store_edge(p, edge)
    i, j = p.in_order()
    t.row(OWN)[...] = jnp.sum(jnp.where(i == j, dP, 0.0), axis=1)
    store_split(t.pairs(QUERIES), jnp.where(i > j, dP, 0.0))
    dq, dk = sums_over_pairs(p, QUERIES, of_state * p.decay(through))
    # [C, BLOCK], without the token itself
    terms = read(t.q) * dq * p.scale() - read(t.k) * dk
    own = p.numbers_over_columns(OWN)
    dq += own * read(t.k)
    p.write_term(D_SCALE, (read(t.q) * dq).sum(1))
    plgpu.commit_smem()  # all warps have read the tiles
    store_split(t.left(QUERIES), terms)
    store_split(t.pairs(QUERIES), dk + own * (read(t.q) * p.scale()))
    p.pipeline.exchange.arrive()
    t.q[...] = (dq * p.scale()).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.q, p.tokens(p.results.dq))
    p.pipeline.exchange.wait()
    store_gates(p)
    plgpu.wait_smem_to_gmem(0)
    p.pipeline.channels.release()


def add_queries(p: Program, step, totals):
    """Return `totals` plus the terms of a step's columns, in registers. The totals are dO U^T [C, C], dO S^T [C, BLOCK], and
    the elementwise products of S and dS' [COLUMNS, BLOCK].

    The function waits for the step's stage, and releases the stage. step: the step's number in the item.
    """
    own, stage, (pairs, of_state, edge) = p.own, p.stage(step), totals
    p.pipeline.columns.wait(stage)
    d_output, S, dS = own.d_output.at[stage], own.S.at[stage], own.dS.at[stage]
    pairs, of_state = tiles.added_all((pairs, of_state), [(d_output, own.U.at[stage])], [(d_output, S)])
    edge += read(S) * read(dS)
    p.pipeline.columns.release(stage)
    return pairs, of_state, edge


def of_keys(p: Program):
    """Compute de and dk of an item, as the role *keys*. Write both, or without an erase vector dk and the terms of d beta, to
    global memory, and leave terms of dg in shared memory for *queries*."""
    t = p.tiles
    nothing = zeros(PAIRS), zeros(SHAPE), zeros(SHAPE)
    add = add_keys_of_two_terms if p.has_erase else add_keys
    dA, of_state, behind = lax.fori_loop(0, p.steps, functools.partial(add, p), nothing)
    p.pipeline.channels.wait()
    p.pipeline.gates.wait()
    store_split(t.behind, behind * p.decay(after_it))
    i, j = p.in_order()
    store_split(t.pairs(KEYS), dA * jnp.where(i > j, -1.0, 0.0))
    de, dk = sums_over_pairs(p, KEYS, of_state * -p.decay(before_it if p.before_decay else through))
    if p.has_erase:
        finish_keys_apart(p, de, dk)
        return
    p.write_term(D_BETA, (read(t.k) * de).sum(1))
    de *= p.numbers_over_columns(TOKEN_BETA)
    plgpu.commit_smem()  # all warps have read the tiles
    store_split(t.left(KEYS), read(t.k) * (de - dk))
    store_split(t.right, read(t.k) * whole(t.behind))
    p.pipeline.exchange.arrive()
    p.pipeline.exchange.wait()
    t.k[...] = (dk + de + whole(t.behind) + whole(t.pairs(QUERIES))).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.k, p.tokens(p.results.dk))
    plgpu.wait_smem_to_gmem(0)
    p.pipeline.channels.release()


def add_keys_of_two_terms(p: Program, step, totals):
    """Return `totals` plus the terms of a step's columns, in registers. The totals are dX U^T [C, C], and dX S^T and U dS'^T,
    [C, BLOCK] each. dX is a sum of two bfloat16 arrays.

    The function waits for the step's stage and for `lost`, and releases both. step: the step's number in the item.
    """
    own, columns, lost, stage = p.own, p.pipeline.columns, p.pipeline.lost, p.stage(step)
    assert lost is not None
    columns.wait(stage)
    lost.wait(0)
    U, S, dS = own.U.at[stage], own.S.at[stage], own.dS.at[stage]
    # One after the other: with operands of both terms held together registers are spilled.
    dX, rest = transposed(own.dX.at[stage]), transposed(p.tiles.lost_of_step)
    pairs, of_state, behind = tiles.added_all(totals, [(dX, U)], [(dX, S)], [(transposed(U), dS)])
    totals = *tiles.added_all((pairs, of_state), [(rest, U)], [(rest, S)]), behind
    columns.release(stage)
    lost.release(0)
    return totals


def finish_keys_apart(p: Program, de, dk):
    """Write de and dk to global memory where e is an operand, and store what *queries* needs for dg. de, dk: their sums over
    pairs, [C, BLOCK] in registers, as `sums_over_pairs` returns them.

    The function waits at `exchange` for *queries*, whose terms of dk it adds. `Tiles.behind` is added before, because dg may
    overwrite that tile after the exchange.
    """
    t = p.tiles
    plgpu.commit_smem()  # all warps have read the tiles
    of_erasure, of_keys = read(t.erasing) * de, read(t.k) * dk
    if p.before_decay:
        store_split(t.pairs(KEYS), of_erasure)
        store_split(t.left(KEYS), -of_keys)
    else:
        store_split(t.left(KEYS), of_erasure - of_keys)
    t.erasing[...] = de.astype(BF16)
    behind = whole(t.behind)
    store_split(t.right, read(t.k) * behind)
    dk += behind
    plgpu.copy_smem_to_gmem(t.erasing, p.tokens(p.results.de))
    p.pipeline.exchange.arrive()
    p.pipeline.exchange.wait()
    t.k[...] = (dk + whole(t.pairs(QUERIES))).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.k, p.tokens(p.results.dk))
    plgpu.wait_smem_to_gmem(0)
    p.pipeline.channels.release()


def prepare_gates(p: Program):
    """Store the gates in `Tiles.gates`, each raised to at least LOG_OF_ZERO, so that no sum has -inf. Gates in float32 are
    divided into two bfloat16 terms. Report the tiles to *keys*."""
    t = p.tiles
    found = plgpu.load(t.given_gates, layout=tiles.WGMMA)
    found = jnp.maximum(found, found.dtype.type(LOG_OF_ZERO))
    for tile, term in zip(t.gates, (found,) if t.wide is None else split(found), strict=True):
        tile[...] = term
    plgpu.commit_smem()
    p.pipeline.gates.stored()


def store_edge(p: Program, products):
    """Store e^{G_last} sum_v S dS' of each channel in row EDGE of `Tiles.numbers`. products: S dS' elementwise, [COLUMNS,
    BLOCK].

    Both sums, over V and over gates, are products with a column of ones, in tiles of the warpgroup that are free.
    """
    t = p.tiles
    i, _ = p.lines()
    # 1 in the first row in memory, which `by_halves` reads, and else 0
    t.pairs(QUERIES)[0][...] = tiles.indicator(by_row(i, PAIRS) == 0)
    store_split(t.left(QUERIES), products)

    def summed(terms):
        """Return the sums over the rows of terms [C, BLOCK], by channel [BLOCK]."""
        column = tiles.by_halves(t.pairs(QUERIES)[0])
        return tiles.column_of(tiles.product((BLOCK, 8), *((transposed(x), column) for x in terms)), 0)

    t.row(EDGE)[...] = summed(t.left(QUERIES)) * jnp.exp2(summed(t.gates) * LOG2E)
    plgpu.commit_smem()


def whole(pair):
    """Return the sum of a matrix's two terms in float32, in registers. pair: two tiles of one shape in shared memory."""
    high, rest = pair
    return read(high) + read(rest)


def level_matrix(p: Program, size, sign, own: bool = True):
    """Return the matrix [C, C] in bfloat16 whose product with gates sums the gates between every token and its reference, for
    blocks of `size` tokens.

    In every second block these are the gates from its beginning through the token; in every first, those behind the token,
    times `sign`, 1 or -1. With own and sign -1, as in the fast form, it is `reference_matrix` of `chunks/pairs.py`.

    own: whether a token's own gate counts to those through it. Otherwise it counts to those behind it, and the first token of
    two blocks has none.
    """
    i, j = p.lines()
    i = p.scanned(i)
    second = (i & size) != 0
    # [C], by row: the first and the last gate of the sum in memory, and what multiplies it
    if own:
        bounds = jnp.where(second, i & -size, i + 1), jnp.where(second, i, i | (size - 1))
    else:
        bounds = (
            jnp.where(second, i & -size, jnp.where((i & (2 * size - 1)) == 0, C, i)),
            jnp.where(second, i - 1, i | (size - 1)),
        )
    bounds = [p.scanned(x) for x in bounds][:: -1 if p.reverse else 1]
    first, last, factor = (by_row(x, PAIRS) for x in (*bounds, jnp.where(second, 1.0, sign)))
    j = by_column(j, PAIRS)
    return jnp.where((j >= first) & (j <= last), factor, 0.0).astype(BF16)


def tokens_of(p: Program, side: int):
    """Return x of the side, [C, BLOCK] in float32: scale q for QUERIES; e, which is beta k without an erase vector, for
    KEYS."""
    t = p.tiles
    if side == QUERIES:
        return read(t.q) * p.scale()
    return read(t.erasing) if p.has_erase else read(t.k) * p.numbers_over_columns(TOKEN_BETA)


def sums_over_pairs(p: Program, side: int, left):
    """Return the two sums over pairs, [C, BLOCK] each in registers: `left` + dx, and dk^.

    side: QUERIES for dx = dq / scale and x = scale q; KEYS for dx = de and x = e. left: what dx is added to, [C, BLOCK]. *keys*
    stores k e^-M of each level, which *queries* waits for.

    Except in the fast form, a token has one factor: e^M in a second block, and e^-M in a first. The other may be inf, and is
    not formed.
    """
    t, levels = p.tiles, p.levels()
    is_before = p.before_decay and side == KEYS

    def advance(level, found):
        left, right = found
        size = lax.shift_right_logical(p.hidden(jnp.int32(HALF)), level)
        is_fast = (level == levels - 1) & (levels <= FAST_LEVELS)
        sign = jnp.where(is_fast, -1.0, 1.0)

        def down(up):
            """Return 1 / up = e^{-M} [C, BLOCK] in the fast form, else `up`."""
            fast = plgpu.layout_cast(jnp.broadcast_to(is_fast, SHAPE), tiles.WGMMA)
            return jnp.where(fast, 1.0 / up, up)

        M = None if is_before else p.summed(level_matrix(p, size, sign)) * LOG2E
        # The same number, of which the compiler does not know that. It would hold the matrices of the first use to the second.
        again = p.hidden(size) if is_before else size

        plgpu.commit_smem()  # all warps have read the tokens of the level before
        if side == KEYS:
            decays = jnp.exp2((p.summed(level_matrix(p, size, sign)) * LOG2E if M is None else M) * sign)
            store_split(t.right, read(t.k) * decays)
            p.pipeline.right.stored()
        up = None if M is None else jnp.exp2(M)

        def of_reads(size):
            """Return the e^M of x. With `before_decay` M differs between x and k, and the factors are formed at each use, so
            that no registers hold them."""
            return jnp.exp2(p.summed(level_matrix(p, size, sign, own=False)) * LOG2E) if up is None else up

        def of_keys(size):
            """Return the factor of k, which is `down` of the e^M of k."""
            return jnp.exp2(p.summed(level_matrix(p, size, sign)) * (sign * LOG2E)) if up is None else down(up)

        store_split(t.left(side), tokens_of(p, side) * of_reads(size))
        if side == QUERIES:
            p.pipeline.right.wait()

        def product(turned, terms):
            """Return the level's pairs @ terms, without the product of the second terms of both. turned: the function that is
            applied to the tiles of the pairs, `transposed` or the identity. terms: the two terms of a matrix [C, BLOCK]."""
            i, j = p.lines()
            # The highest bit in which the positions of two tokens differ is the size of the blocks between which they lie.
            apart = by_row(i ^ jnp.where(is_fast, 0, size), PAIRS) ^ by_column(j, PAIRS)
            chosen = tiles.indicator(apart < jnp.where(is_fast, 2 * size, size))
            high, rest = (plgpu.load(turned(x), layout=tiles.WGMMA) * chosen for x in t.pairs(side))
            return tiles.product(SHAPE, (high, terms[0]), (rest, terms[0]), (high, terms[1]))

        left += product(lambda x: x, t.right) * of_reads(again)
        if is_before:  # registers have no room for the products of both sums
            left = lax.optimization_barrier(left)
        if side == QUERIES:
            p.pipeline.right.release()
        right += product(transposed, t.left(side)) * of_keys(again)
        if side == KEYS:
            p.pipeline.right.acquire()
        return left, right

    return lax.fori_loop(0, levels, advance, (left, zeros(SHAPE)))


def store_gates(p: Program):
    """Form dg [C, BLOCK] from the terms that both roles have stored, and start to copy it to global memory. It overwrites the
    tile of the loaded gates."""
    t = p.tiles
    from_it, before = p.indicator_matrix(lambda i, j: j >= i), p.indicator_matrix(lambda i, j: j < i)
    rows = [(from_it, x) for x in (*t.left(QUERIES), *t.left(KEYS))] + [(before, x) for x in t.right]
    if p.before_decay:
        behind = p.indicator_matrix(lambda i, j: j > i)
        rows += [(behind, x) for x in t.pairs(KEYS)]
    tile = t.given_gates
    edge = by_column(plgpu.load(t.row(EDGE), layout=BY_COLUMN, optimized=False), SHAPE)
    dg = tiles.product(SHAPE, *rows) + edge
    tile[...] = dg.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, p.tokens(p.results.dg))


def through(i, j):
    """Return j <= i: whether gate j decays a state that enters the chunk and is read at token i."""
    return j <= i


def before_it(i, j):
    """Return j < i: whether gate j decays a state that enters the chunk and is read before the decay of token i."""
    return j < i


def after_it(i, j):
    """Return j > i: whether gate j decays what token i writes, up to the chunk's end."""
    return j > i
