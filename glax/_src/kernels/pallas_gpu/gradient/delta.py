"""Compute the gradient of every chunk and head under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all. D_ij = e^{G_i - G_j} for j before i, and e =
beta k. S is the state before the chunk, and dS' = dL/dS' behind it. U and dX are those of `delta_scan`:

    A  = scale (dO U^T) D, its diagonal included        B = -(dX U^T) D
    dq = scale e^G (dO S^T) + A k                       de = -e^G (dX S^T) + B k
    dk = e^{G_last - G} (U dS'^T) + A^T q + B^T e + beta de
    d beta = de . k + dX . v            `delta_scan` computes the second term

    dg_t = e^{G_last} <S, dS'> + sum_{j < t} k_j . e^{G_last - G_j} (U dS'^T)_j
           + sum_{i >= t} (q_i . dq_i + e_i . de_i - k_i . (A^T q + B^T e)_i)

A pair of a token with itself passes no gate. Its part in A, scale dO_i . U_i, is left out of the sums of dg: beside strong gates
it would drown them in what it loses in rounding. It is added to dq and dk, and to q . dq for the scale, once these are formed.

With an erase vector de is a result, dk has no term beta de, there is no d beta, and in B and de e^{H_i} stands for e^{G_i}, with
the H of `chunks/inverse.py`. dX is then the sum of two terms of bfloat16, of which `delta_scan` gives the first by rows. Where e
reads the state before the token's decay, e_i . de_i counts in dg_t for i > t, and the pairs of neighbours in B pass no gate. They
are left out of the sums, too.

Two kernels compute this. Up to 128 channels and columns, `delta_gradient` has all of S in shared memory. Its programs are
persistent: one for each multiprocessor, which takes chunks of heads in turns. Where two heads share q and k, it takes them one
after another and writes the sums of their dq and dk; where more heads share them, XLA adds up those of each. Where keys or values
are wider, `delta_gradient_wide` has a program for every chunk, head and 128 channels of K, or two of 96 where K is 192. dO U^T,
dX U^T, dO S^T, dX S^T, U dS'^T and <S, dS'> are then added up in registers over steps of 64 columns of V, always in the same
order. So q, k and the states are read once, and dq and dk are written once. dq, de and dk of a channel need no sums over other
channels, but each program forms A and B again. States with more than 128 channels are stored as [K, V], and others as [V, K].

Roles. *queries* computes A and dq (`compute_queries`, `compute_queries_wide`), and *keys* B, de and dk (`compute_keys`,
`compute_keys_wide`). *load* loads (`load`, `load_wide`). At last *queries* forms dg from the sums of each token that both have
left in `Tiles.numbers`.

Memory. `Tiles` has what both kernels share, `States` or `Columns` what has columns of V. dq and dk overwrite q and k, but have
tiles of their own where two heads are summed: the first one's dq and dk, rounded, wait there for the second one's. A tile with
columns of V is loaded again as soon as its products are done, while products of pairs of tokens with q and k run. Who waits for
whom in `delta_gradient`:

    waits          for            until
    queries, keys  load           tokens loaded: k, q, gates, beta
    load           queries, keys  tokens read
    keys           queries        scores stored
    queries, keys  queries, keys  met
    queries, keys  load           states loaded: states, d_states, d_output
    load           queries, keys  states read

And in `delta_gradient_wide`:

    waits          for            until
    queries, keys  load           tokens loaded: k, q, gates, beta
    keys           queries        scores stored
    queries, keys  queries, keys  met
    queries, keys  load           columns full: d_output, S, U, dS, dX
    load           queries, keys  columns free

Where e is given it is loaded with k, and the first term of dX with dS' and the second.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, GATES, READING
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PARAMS, PROGRAM, SUMS_WITHIN_WARPS, by_role, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    REGISTERS,
    EdgeCopies,
    by_column,
    by_row,
    load_tokens,
    read,
    split_edges,
    store_split,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, chunk_of, quotient, remainder, tile_columns

BF16 = jnp.bfloat16
WIDEST = 128  # the most channels of K, and columns of V, that shared memory holds together
STAGES = 2  # steps in shared memory: one in work, one on its way
COLUMNS = 64  # of V in a step
TERMS, NUMBERS = 3, 8
D_SCALE, D_GATES, D_BETA = range(TERMS)  # rows of `Results.terms`
OF_GATES, OF_ERASURE, OF_OWN, OF_STATE, OF_QUERIES, OF_KEYS, OF_WRITES, OF_READS = range(
    NUMBERS
)  # rows of `Tiles.numbers`
ROLES = dict(queries=1, keys=1, load=1)

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory. Each field's comment has its shape. HQ and HK are the numbers of heads
    of q and of k, which divide H; C is 64, the tokens of a chunk."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    d_output: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, V, K + C]: S and U, transposed; [B, chunks, H, K + C, V] for keys wider than 128
    d_states: Ref  # [B, chunks, H, V, K + C]: dS' and dX, in the same way
    factors: Ref  # [B, chunks, H, FACTORS, C]: those of `chunks/inverse.py`
    scale: Ref  # [B + 1], or [1, chunks] of packed sequences
    e: Ref  # [B, T, H, K]; None with beta
    dX: Ref  # [B, T, H, V]: its first term; None with beta


class Results(NamedTuple):
    """Hold references to the results, in global memory. Each field's comment has its shape.

    dq, dk and de are gradients. `terms` holds for each token the summand q . dq / scale of d_scale, dg, and de . k, the first
    term of d beta.
    """

    dq: Ref  # [B, T, H / sums, K]: sums over as many neighbouring heads
    dk: Ref  # [B, T, H / sums, K]
    terms: Ref  # [B, chunks, H * blocks of K, TERMS, C]: q . dq / scale; dg; de . k, which is left out with e
    de: Ref  # [B, T, H, K]; None with beta

    @classmethod
    def types(cls, x: Operands, blocks: int = 1, sums: int = 1) -> "Results":
        """Return the shapes and dtypes of the results for the operands `x`. blocks: the number of blocks of K. sums: the number
        of neighbouring heads over which dq and dk are summed."""
        (B, T, H, _), K, chunks = x.d_output.shape, x.q.shape[3], x.factors.shape[1]
        rows = jax.ShapeDtypeStruct((B, T, H // sums, K), BF16)
        count, de = (TERMS, None) if x.e is None else (D_BETA, rows)
        return cls(rows, rows, jax.ShapeDtypeStruct((B, chunks, H * blocks, count, C), jnp.float32), de)


class Tiles(NamedTuple):
    """Hold references to the tiles in shared memory without columns of V: q, k, e, their gradients, numbers of tokens, and
    matrices of pairs of tokens. Each field's comment has its shape. dq and dk overwrite q and k, or lie in tiles of their own
    where two heads are summed."""

    q: Ref  # [C, K]
    k: Ref  # [C, K]
    # [NUMBERS, C]: by token G to base 2, beta or H to base 2, and dO . U. Sums over K in dg: parts of <S, dS'>, and by token
    # q . dq, e . de - k . (A^T q + B^T e), k . e^{G_last - G} (U dS'^T), and e . de apart where e reads before the decay.
    numbers: Ref
    output_pairs: tuple[Ref, Ref]  # [C, C]: A / scale in two terms
    erase_pairs: tuple[Ref, Ref]  # [C, C]: beta_i B_ij in two terms; with e B_ij
    e: Ref  # [C, K]; None with beta
    de: Ref  # [C, K]; None with beta
    dq: Ref  # [C, K]: of the first of two heads, and then their sum; None where heads are not summed
    dk: Ref  # [C, K]

    @classmethod
    def types(cls, K: int, has_erase: bool, lead: tuple[int, ...] = (), sums: int = 1) -> "Tiles":
        """Return the shapes and dtypes of the tiles. K: the channels that a program computes. has_erase: whether e is an
        operand. lead: the sizes of axes before those of each tile. sums: the number of heads over which dq and dk are summed, 1
        or 2."""
        tiled = functools.partial(tiles.tiled, columns=tile_columns(K))
        summed = tiled(*lead, C, K) if sums > 1 else None
        return cls(
            q=tiled(*lead, C, K),
            k=tiled(*lead, C, K),
            numbers=plgpu.SMEM((*lead, NUMBERS, C), jnp.float32),
            output_pairs=(tiled(*lead, C, C), tiled(*lead, C, C)),
            erase_pairs=(tiled(*lead, C, C), tiled(*lead, C, C)),
            e=tiled(*lead, C, K) if has_erase else None,
            de=tiled(*lead, C, K) if has_erase else None,
            dq=summed,
            dk=summed,
        )


class States(NamedTuple):
    """Hold references to the tiles in shared memory with columns of V, in `delta_gradient`. Each field's comment has its shape.

    S^T [V, K] and U^T [V, C] lie side by side in `states`, which one copy loads. dS'^T and dX^T lie so in `d_states`.
    """

    d_output: Ref  # [C, V]
    states: Ref  # [V, K + C]
    d_states: Ref  # [V, K + C]
    first: Ref  # [C, V]: the first term of dX; None with beta

    @classmethod
    def types(cls, K: int, V: int, has_erase: bool) -> "States":
        """Return the shapes and dtypes of the tiles, each with a leading axis of length 1. has_erase: whether e is an
        operand."""
        tiled = functools.partial(tiles.tiled, columns=tile_columns(K))
        return cls(tiled(1, C, V), tiled(1, V, K + C), tiled(1, V, K + C), tiled(1, C, V) if has_erase else None)

    @property
    def K(self) -> int:
        return self.states.shape[1] - C

    def state(self, ref):
        """Return a view of S^T or dS'^T, [V, K], in shared memory. ref: the tile `states` or `d_states`, which holds it."""
        return ref.at[:, pl.ds(0, self.K)]

    def beside(self, ref):
        """Return a view of U^T or dX^T, [V, C], in shared memory. ref: the tile `states` or `d_states`, which holds it."""
        return ref.at[:, pl.ds(self.K, C)]


class Columns(NamedTuple):
    """Hold references to the tiles in shared memory with columns of V, in `delta_gradient_wide`. Each of the STAGES stages
    holds the COLUMNS columns of one step.

    Each field's comment has its shape where K is one block. Where K has several blocks nothing is transposed: the last two axes
    of S, U, dS and dX are exchanged.
    """

    d_output: Ref  # [STAGES, C, COLUMNS]
    S: Ref  # [STAGES, COLUMNS, K]: S^T
    U: Ref  # [STAGES, COLUMNS, C]: U^T
    dS: Ref  # [STAGES, COLUMNS, K]: dS'^T
    dX: Ref  # [STAGES, COLUMNS, C]: dX^T
    first: Ref = None  # [STAGES, C, COLUMNS]: the first term of dX; None with beta

    @classmethod
    def types(cls, K: int, columns_first: bool, has_erase: bool = False) -> "Columns":
        """Return the shapes and dtypes of the tiles. K: the channels of a block. columns_first: whether S, U, dS and dX are
        transposed, as they are where K is one block. has_erase: whether e is an operand."""
        tiled = functools.partial(tiles.tiled, columns=tile_columns(K))
        state, pairs = tiled(STAGES, *((COLUMNS, K) if columns_first else (K, COLUMNS))), tiled(STAGES, COLUMNS, C)
        rows = tiled(STAGES, C, COLUMNS)
        return cls(d_output=rows, S=state, U=pairs, dS=state, dX=pairs, first=rows if has_erase else None)


@dataclasses.dataclass(frozen=True)
class DeltaPipeline(Pipeline):
    """Hold the barriers between the roles of `delta_gradient` and `delta_gradient_wide`.

    tokens: q, k, gates and beta; they count as read once dq and dk have left their tiles. scores: A, which counts as read once
    both computing roles have met. met: where *queries* and *keys* wait until both have read all tiles. states: the states of a
    chunk; None in `delta_gradient_wide`. columns: the tiles of a step; None in `delta_gradient`.
    """

    tokens: Handoff
    scores: Handoff
    met: Meeting
    states: Handoff | None
    columns: Ring | None

    ORDER = (
        "tokens.full", "scores.full", "met.all_there", "states.full", "states.free",
        "tokens.free", "columns.full", "columns.free",
    )  # fmt: skip

    @classmethod
    def planned(cls, is_wide: bool, has_erase: bool = False) -> "DeltaPipeline":
        """Build the pipeline of `delta_gradient_wide` if `is_wide`, else of `delta_gradient`. Its barriers are allocated at
        launch.

        A program of `delta_gradient_wide` has a single item, so *load* never waits there until the tokens are read. has_erase:
        whether e is an operand.
        """
        load, queries, keys = ("load",), ("queries",), ("keys",)
        loaded, first = ("k", "q", "gates", "beta", *("e",) * has_erase), ("first",) * has_erase
        return cls(
            tokens=Handoff(load, queries + keys, loaded, returned=not is_wide),
            scores=Handoff(queries, keys, returned=False),
            met=Meeting(queries + keys),
            states=None if is_wide else Handoff(load, queries + keys, ("states", "d_states", "d_output", *first)),
            columns=Ring(STAGES, load, queries + keys, ("d_output", "S", "U", "dS", "dX", *first)) if is_wide else None,
        )


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """Hold the references of a program that computes items one after another. An item is one chunk, one head and one block of
    K.

    The item's position is computed at each use, so that no register holds it.
    """

    reverse: bool
    operands: Any
    results: Any
    tiles: Any
    own: Any  # the shared memory of what has columns of V
    pipeline: Any
    edges: EdgeCopies | None
    width: int  # of a block of K
    turn: Any = dataclasses.field(default=0, kw_only=True)  # the number of items that the program had before

    def item(self):
        """Return the number of the item, from 0. Blocks of K vary fastest, then heads, then chunks. Subclasses define this
        function."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        """Return the number of blocks of K."""
        return self.operands.q.shape[3] // self.width

    @property
    def H(self) -> int:
        """Return the number of heads."""
        return self.results.terms.shape[2] // self.blocks

    @property
    def steps(self) -> int:
        """Return the number of steps of an item. Each step takes COLUMNS columns of V."""
        return self.operands.d_output.shape[3] // COLUMNS

    def place(self):
        """Return (batch row, number of the chunk in the row, head) of the item."""
        return chunk_of(quotient(self.item(), self.blocks), self.results.terms.shape[1], self.H)

    def block(self):
        """Return the number of the item's block of K, from 0."""
        return remainder(self.item(), self.blocks)

    def channels(self):
        """Return the slice of K that the item's block covers."""
        return pl.ds(self.block() * self.width, self.width)

    @property
    def columns_first(self) -> bool:
        """Return whether states, U and dX are stored as [V, K] and [V, C]. If not, they are [K, V] and [C, V]."""
        return True

    def by_rows(self, tile):
        """Return a view [C, COLUMNS] of a step's tile of U or dX in shared memory."""
        return transposed(tile) if self.columns_first else tile

    def by_columns(self, tile):
        """Return a view of a step's tile in shared memory with its columns of V first: S or dS' as [COLUMNS, width], U or dX as
        [COLUMNS, C]."""
        return tile if self.columns_first else transposed(tile)

    def stage(self, step):
        """Return the index of the stage of shared memory that holds the columns of the item's step number `step`."""
        return self.pipeline.columns.slot(step)

    def tokens(self, x):
        """Return a reference to the item's part [C, width] of x in global memory. x: [B, T, heads, K], where `heads` divides
        H."""
        b, c, h = self.place()
        return x.at[b, pl.ds(c * C, C), quotient(h, self.H // x.shape[2]), self.channels()]

    def scale(self):
        """Return the scale of the chunk's scores, a number."""
        (b, c, _), scale = self.place(), self.operands.scale
        return scale[b] if len(scale.shape) == 1 else scale[b, c]

    def write_term(self, row: int, x):
        """Write x, one number for each token [C] in registers, to global memory: to the item's row `row` of `Results.terms`."""
        b, c, h = self.place()
        self.results.terms[b, c, h * self.blocks + self.block(), row] = x


@dataclasses.dataclass(frozen=True)
class Program(ChunkProgram):
    """Hold the references of one program of `delta_gradient` or `delta_gradient_wide`. before_decay: whether e reads the state
    before its token's decay. number: the number of the program's item."""

    before_decay: bool
    number: Any  # of the item

    @classmethod
    def of(cls, reverse: bool, before_decay: bool, given: tuple[Operands, EdgeCopies | None], *refs) -> "Program":
        """Return the program at its first item. given: the operands, and the copies of edges or None. refs: the fields from
        `results` to `pipeline`, in their order."""
        (operands, edges), number = given, lax.axis_index(PROGRAM)
        return cls(reverse, operands, *refs, edges, width_of_block(operands.q.shape[3]), before_decay, number)

    @property
    def columns_first(self) -> bool:
        return self.blocks == 1

    def item(self):
        return lax.optimization_barrier(self.number)

    def channels(self):
        # With one block nothing depends on the item, whose number would be formed behind a barrier of the compiler.
        return slice(None) if self.blocks == 1 else super().channels()

    def load_numbers(self, row: int):
        """Load row `row` of `Tiles.numbers` [C] from shared memory into registers in the layout BY_ROW: one number for each
        token, and so for each row of a matrix."""
        return plgpu.load(self.tiles.numbers.at[row], layout=BY_ROW)

    def numbers_over_rows(self, row: int):
        """Load row `row` of `Tiles.numbers` [C] from shared memory into registers: one number for each token, repeated over the
        rows of a matrix [C, C]."""
        return by_column(plgpu.load(self.tiles.numbers.at[row], layout=BY_COLUMN, optimized=False), PAIRS)

    def gates(self):
        """Load the sums G of each token [C], as logarithms to base 2, into registers by row."""
        return self.load_numbers(OF_GATES)

    def beta(self):
        """Load the beta of each token [C] into registers by row. With e an operand there is no beta: the row holds H, which
        `reading` loads."""
        assert not self.has_erase, "e is beta k only where it is not an operand"
        return self.load_numbers(OF_ERASURE)

    def last(self):
        """Return G of the token by which the scan leaves the chunk, as a logarithm to base 2."""
        return self.tiles.numbers[OF_GATES, 0 if self.reverse else C - 1]

    @property
    def has_erase(self) -> bool:
        """Return whether the erase vector e is an operand. If not, e is beta k."""
        return self.operands.e is not None

    def reading(self):
        """Load the sums of gates through which e reads the state, [C], as logarithms to base 2, into registers by row: H where
        e is an operand, else G."""
        return self.load_numbers(OF_ERASURE) if self.has_erase else self.gates()

    def decayed(self, pairs, reading, factor: float = 1.0):
        """Return factor * pairs * D, [C, C] in float32. D is 0 unless j is before i, so the diagonal is 0.

        pairs: a matrix [C, C] over tokens i, j. reading: the sum of gates at each token i, G or H, [C] to base 2 and by row.
        """
        i, j = tiles.positions_again(self.reverse)
        between = by_row(reading, PAIRS) - self.numbers_over_rows(OF_GATES)
        return pairs * (factor * jnp.exp2(jnp.where(i > j, between, -jnp.inf)))


def width_of_block(K: int) -> int:
    """Return the number of channels of a block of K. The blocks are the fewest of at most WIDEST channels, and all have the
    same width."""
    return K // -(-K // WIDEST)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that equal calls are lowered once
def delta_gradient(reverse: bool, before_decay: bool, most: int, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head, where K and V are at most 128.

    before_decay: whether e reads the state before the token's decay. most: the largest number of programs. operands: the fields
    of `Operands`, and of `EdgeCopies` if there are any.
    """
    given = x, _ = split_edges(Operands, operands)
    has_erase, sums = x.e is not None, heads_summed(x)
    total = math.prod(x.factors.shape[:3]) // sums
    programs, K, V = min(total, most), x.q.shape[3], x.d_output.shape[3]

    def body(*refs):
        p = Program.of(reverse, before_decay, *refs)
        work = dict(queries=compute_queries, keys=compute_keys, load=load)
        by_role(ROLES, {role: functools.partial(in_turns, f, total, programs, sums, p) for role, f in work.items()})

    scratch = Tiles.types(K, has_erase, lead=(1,), sums=sums), States.types(K, V, has_erase)
    pipeline = DeltaPipeline.planned(is_wide=False, has_erase=has_erase)
    return launch(
        "delta_gradient", (reverse, before_decay), body, given, Results.types(x, sums=sums), scratch, ROLES, pipeline,
        programs=programs, is_longest=True, params=SUMS_WITHIN_WARPS if has_erase else PARAMS,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls are lowered once
def delta_gradient_wide(reverse: bool, before_decay: bool, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head of keys or values wider than 128. before_decay: whether e reads
    the state before the token's decay. operands: the fields of `Operands`, and of `EdgeCopies` if there are any."""
    given = x, _ = split_edges(Operands, operands)
    K = width_of_block(x.q.shape[3])
    blocks = x.q.shape[3] // K

    def body(*refs):
        p = Program.of(reverse, before_decay, *refs)
        work = dict(queries=compute_queries_wide, keys=compute_keys_wide, load=load_wide)
        by_role(ROLES, {role: functools.partial(f, p) for role, f in work.items()})

    has_erase = x.e is not None
    scratch = Tiles.types(K, has_erase), Columns.types(K, blocks == 1, has_erase)
    pipeline = DeltaPipeline.planned(is_wide=True, has_erase=has_erase)
    return launch(
        "delta_gradient_wide", (reverse, before_decay), body, given, Results.types(x, blocks), scratch, ROLES, pipeline,
        programs=math.prod(x.factors.shape[:3]) * blocks, is_longest=True, params=SUMS_WITHIN_WARPS if has_erase else PARAMS,
    )  # fmt: skip


def heads_summed(x: Operands) -> int:
    """Return the number of neighbouring heads whose dq and dk `delta_gradient` sums: 2 where two heads share q and k, else 1.

    Where more heads share them, sums of two would be rounded to bfloat16 here, beside the rounding of each head, before XLA
    adds them up: dk of four heads is then above the tolerance of docs/numerics.md. Beside e shared memory has no room for the
    sums.
    """
    shared = [x.d_output.shape[2] // keys.shape[2] for keys in (x.q, x.k)]
    return 2 if x.e is None and shared == [2, 2] else 1


def in_turns(work: Callable, total: int, programs: int, sums: int, p: Program):
    """Run one warpgroup's work for all items of its program. The items come in runs of `sums` neighbours, and programs take the
    runs in turns.

    work: the role's function, called with the program at each item. total: the number of runs of all programs. programs: the
    number of programs. sums: the items of a run, whose dq and dk are summed. p: the program at its first item.
    """
    plgpu.set_max_registers(REGISTERS[work is not load], action="increase" if work is not load else "decrease")
    first = p.number

    @pl.loop(0, lax.div(total + (programs - 1) - first, jnp.int32(programs)) * sums)
    def _(step):
        number = (first + quotient(step, sums) * programs) * sums + remainder(step, sums)
        work(dataclasses.replace(p, tiles=only(p.tiles), number=number, turn=step, own=only(p.own)))


def only(shared):
    """Return views of tiles in shared memory without their leading axis of length 1. shared: a `Tiles`, `States` or None.

    The index is behind a barrier of the compiler, which would otherwise hold the addresses of all parts throughout the loop.
    """
    index = lax.optimization_barrier(jnp.int32(0))
    return jax.tree.map(lambda x: x.at[index], shared)


# ---- load -------------------------------------------------------------------------------------------------------------


def load(p: Program):
    """Load the tiles of an item of `delta_gradient` into shared memory, as the role *load*, which waits until the computing
    roles have read those of the item before."""
    x, own, states = p.operands, p.own, p.pipeline.states
    (b, c, h), H = p.place(), p.H
    pl.when(p.turn > 0)(states.acquire)
    for source, tile in ((x.states, own.states), (x.d_states, own.d_states)):
        states.copy(source.at[b, c, h], tile)
    at = b, c, quotient(h, H // x.d_output.shape[2]), slice(None)
    load_tokens(p.edges, "d_output", x.d_output, at, own.d_output, states.full)
    if own.first is not None:
        load_tokens(None, "", x.dX, at, own.first, states.full)
    pl.when(p.turn > 0)(p.pipeline.tokens.acquire)
    load_keys(p)


def load_keys(p: Program):
    """Start to load q, k, gates and beta into shared memory, or if e is given q, k, e, gates and H. `tokens` reports when they
    are there."""
    x, t, tokens = p.operands, p.tiles, p.pipeline.tokens
    (b, c, h), H = p.place(), p.H
    for name, source, tile in (("k", x.k, t.k), ("q", x.q, t.q), ("e", x.e, t.e)):
        if source is not None:
            at = b, c, quotient(h, H // source.shape[2]), p.channels()
            load_tokens(p.edges, name, source, at, tile, tokens.full)
    for row, number in ((GATES, OF_GATES), (READING if p.has_erase else BETA, OF_ERASURE)):
        tokens.copy(x.factors.at[b, c, h, row], t.numbers.at[number])


def load_wide(p: Program):
    """Load all tiles of `delta_gradient_wide` into shared memory, as the role *load*: those of a step as soon as the step that
    used their stage is done."""
    plgpu.set_max_registers(REGISTERS[0], action="decrease")
    load_keys(p)
    pl.loop(0, p.steps)(functools.partial(load_step, p))


def load_step(p: ChunkProgram, step):
    """Start to load the tiles of a step into its stage of shared memory, once the step that used the stage before is done.
    step: the step's number in the item."""
    x, own, ring, stage = p.operands, p.own, p.pipeline.columns, p.stage(step)
    ring.acquire(stage, p.turn * p.steps + step)
    (b, c, h), columns = p.place(), pl.ds(step * COLUMNS, COLUMNS)
    at = b, c, quotient(h, p.H // x.d_output.shape[2]), columns
    load_tokens(p.edges, "d_output", x.d_output, at, own.d_output.at[stage], ring.full.at[stage])
    if own.first is not None:
        load_tokens(None, "", x.dX, at, own.first.at[stage], ring.full.at[stage])
    beside, channels = pl.ds(x.q.shape[3], C), pl.ds(p.block() * p.width, p.width)
    pairs = [(x.states, channels, own.S), (x.states, beside, own.U)]
    pairs += [(x.d_states, channels, own.dS), (x.d_states, beside, own.dX)]
    for source, part, tile in pairs:
        place = (columns, part) if p.columns_first else (part, columns)
        ring.copy(source.at[(b, c, h, *place)], tile.at[stage], stage)


# ---- compute ----------------------------------------------------------------------------------------------------------


def compute_queries(p: Program):
    """Compute A, which *keys* reads, and write dq, dg and the terms of d_scale of an item, as the role *queries* of
    `delta_gradient`."""
    own = p.own
    V, K = own.states.shape[0], own.K
    p.pipeline.states.wait()
    p.pipeline.tokens.wait()
    store_scores(p, tiles.product(PAIRS, (own.d_output, own.beside(own.states))))
    of_state = tiles.product((C, K), (own.d_output, own.state(own.states)))
    p.tiles.numbers[OF_STATE] = sum((read(a) * read(b)).sum(1) for a, b in parts(own.states, own.d_states, V, K))
    p.pipeline.states.release()
    store_queries(p, gradient_of_queries(p, of_state))
    p.pipeline.tokens.release()


def compute_keys(p: Program):
    """Compute B and the gradients of keys of an item, as the role *keys* of `delta_gradient`. Write dk, and de if e is an
    operand, else the terms of d beta."""
    own = p.own
    shape = (C, own.K)
    # [V, C], and terms of [C, V]
    U, dX = own.beside(own.states), [transposed(own.beside(own.d_states)), *[own.first] * p.has_erase]
    p.pipeline.states.wait()
    p.pipeline.tokens.wait()
    B = erased_scores(p, tiles.product(PAIRS, *((term, U) for term in dX)))
    of_state = tiles.product(shape, *((term, own.state(own.states)) for term in dX))
    dk, erased = erased_gradient(p, of_state, B)
    behind = tiles.product(shape, (transposed(U), own.state(own.d_states)))
    p.pipeline.states.release()
    store_keys(p, dk, erased, behind)
    p.pipeline.tokens.release()


def compute_queries_wide(p: Program):
    """Compute A, which *keys* reads, and write dq, dg and the terms of d_scale of an item, as the role *queries* of
    `delta_gradient_wide`."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    nothing = zeros(PAIRS), zeros((C, p.tiles.q.shape[1])), zeros((COLUMNS,), BY_ROW)
    pairs, of_state, edge = lax.fori_loop(0, p.steps, functools.partial(add_queries, p), nothing)
    p.pipeline.tokens.wait()
    store_scores(p, pairs)
    dq = gradient_of_queries(p, of_state)
    p.tiles.numbers[OF_STATE] = edge
    store_queries(p, dq)


def add_queries(p: Program, step, totals):
    """Return `totals` plus the terms of a step's columns, in registers. The totals are dO U^T, dO S^T, and <S, dS'> as sums by
    row of the tiles of S.

    The function waits for the step's stage, and releases the stage. step: the step's number in the item.
    """
    own, ring, stage, (pairs, of_state, edge) = p.own, p.pipeline.columns, p.stage(step), totals
    ring.wait(stage)
    d_output, S, dS = own.d_output.at[stage], own.S.at[stage], own.dS.at[stage]
    of_tokens, of_columns = (d_output, p.by_columns(own.U.at[stage])), (d_output, p.by_columns(S))
    pairs, of_state = tiles.added_all((pairs, of_state), [of_tokens], [of_columns])
    edge += sum((read(a) * read(b)).sum(1) for a, b in parts(S, dS, *S.shape))
    ring.release(stage)
    return pairs, of_state, edge


def compute_keys_wide(p: Program):
    """Compute B and the gradients of keys of an item, as the role *keys* of `delta_gradient_wide`. Write dk, and de if e is an
    operand, else the terms of d beta."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    shape = (C, p.tiles.q.shape[1])
    nothing = zeros(PAIRS), zeros(shape), zeros(shape)
    pairs, of_state, behind = lax.fori_loop(0, p.steps, functools.partial(add_keys, p), nothing)
    p.pipeline.tokens.wait()
    B = erased_scores(p, pairs)
    dk, erased = erased_gradient(p, of_state, B)
    store_keys(p, dk, erased, behind)


def add_keys(p: ChunkProgram, step, totals):
    """Return `totals` plus the terms of a step's columns, in registers. The totals are dX U^T, dX S^T and U dS'^T.

    The function waits for the step's stage, and releases the stage. step: the step's number in the item.
    """
    own, ring, stage = p.own, p.pipeline.columns, p.stage(step)
    ring.wait(stage)
    U, dX = p.by_columns(own.U.at[stage]), [p.by_rows(own.dX.at[stage])]
    dX += [] if own.first is None else [own.first.at[stage]]
    S, of_gradient = p.by_columns(own.S.at[stage]), (p.by_rows(own.U.at[stage]), p.by_columns(own.dS.at[stage]))
    totals = tiles.added_all(totals, [(term, U) for term in dX], [(term, S) for term in dX], [of_gradient])
    ring.release(stage)
    return totals


def store_scores(p: Program, pairs):
    """Store A / scale without its diagonal in `Tiles.output_pairs`, as two terms of bfloat16, and the diagonal in
    `Tiles.numbers`. Report it to *keys*.

    pairs: dO U^T, [C, C].
    """
    i, j = tiles.positions_again(p.reverse)
    p.tiles.numbers[OF_OWN] = jnp.where(i == j, pairs, 0.0).sum(1)
    store_split(p.tiles.output_pairs, p.decayed(pairs, p.gates()))
    p.pipeline.scores.stored()


def gradient_of_queries(p: Program, of_state):
    """Return dq / scale, [C, K] in registers. Write q . dq / scale of each token to global memory, a term of d_scale. Store q .
    dq of each token, without the term of its own pair, in `Tiles.numbers`.

    of_state: dO S^T, [C, K].
    """
    t, shape = p.tiles, of_state.shape
    dq = of_state * by_row(jnp.exp2(p.gates()), shape)
    dq = tiles.added(dq, *((term, t.k) for term in t.output_pairs))
    t.numbers[OF_QUERIES] = (dq * read(t.q)).sum(1) * p.scale()
    dq += by_row(p.load_numbers(OF_OWN), shape) * read(t.k)
    p.write_term(D_SCALE, (dq * read(t.q)).sum(1))
    return dq


def store_queries(p: Program, dq):
    """Write dq, and then dg, to global memory, once both computing roles have read all tiles. Return when dq has left shared
    memory.

    dq: the result of `gradient_of_queries`, without the scale.
    """
    meet(p)
    store_gradient(p, dq * p.scale(), p.tiles.q, p.tiles.dq, p.results.dq)
    p.write_term(D_GATES, gradient_of_gates(p))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def gradient_of_gates(p: Program):
    """Return dg [C], by row, from the sums in `Tiles.numbers`, which both computing roles have stored."""
    i, j = tiles.positions_again(p.reverse)
    through = jnp.exp2(p.last())
    each = jnp.where(
        j >= i, p.numbers_over_rows(OF_QUERIES) + p.numbers_over_rows(OF_KEYS), p.numbers_over_rows(OF_WRITES)
    )
    if p.before_decay:
        each += jnp.where(j > i, p.numbers_over_rows(OF_READS), 0.0)
    return (each + through * p.numbers_over_rows(OF_STATE)).sum(1)


def erased_scores(p: Program, pairs):
    """Return B, [C, C]: -dX U^T decayed from the written token j to the reading of token i. Store B in `Tiles.erase_pairs` as
    two terms of bfloat16.

    If e reads before the decay, the pairs of neighbouring tokens are left out of what is stored, but not of the result. B is
    stored because registers have no room for it. pairs: dX U^T, [C, C].
    """
    B = p.decayed(pairs, p.reading(), factor=-1.0)
    store_split(p.tiles.erase_pairs, B - neighbours(p, B) if p.before_decay else B)
    return B


def neighbours(p: Program, B):
    """Return B with zeros in all entries but B_ij where token j is the last before token i, [C, C]."""
    i, j = tiles.positions_again(p.reverse)
    return jnp.where(i - j == 1, B, 0.0)


def erased_gradient(p: Program, of_state, B):
    """Return beta de [C, K], and (beta de) . k by token [C]. Write de . k to `Results.terms`, and leave beta B in
    `Tiles.erase_pairs`.

    Where e is an operand, write de to global memory instead, leave B in `erase_pairs`, and return None and e . de; or the
    result of `erased_before_decay`. of_state: dX S^T, [C, K]. B: the result of `erased_scores`.
    """
    t, shape = p.tiles, of_state.shape
    if p.before_decay:
        return erased_before_decay(p, of_state, B)
    de = tiles.added(of_state * by_row(-jnp.exp2(p.reading()), shape), *((term, t.k) for term in t.erase_pairs))
    if p.has_erase:
        write_de(p, de)
        return None, (de * read(t.e)).sum(1)
    products = (de * read(t.k)).sum(1)
    p.write_term(D_BETA, products)
    de *= by_row(p.beta(), shape)
    plgpu.commit_smem()  # all warps have read B
    store_split(t.erase_pairs, B * by_row(p.beta(), PAIRS))
    return de, products * p.beta()


def erased_before_decay(p: Program, of_state, B):
    """Return B'^T e [C, K] and None, for an e that reads the state before the token's decay. B' is the part of B for
    neighbouring tokens.

    Write de to global memory, store e . de without neighbours in `Tiles.numbers`, and leave the pairs of B that are no
    neighbours in `Tiles.erase_pairs`. of_state: dX S^T, [C, K]. B: the result of `erased_scores`.
    """
    t, shape = p.tiles, of_state.shape
    de = tiles.added(of_state * by_row(-jnp.exp2(p.reading()), shape), *((term, t.k) for term in t.erase_pairs))
    t.numbers[OF_READS] = (de * read(t.e)).sum(1)
    plgpu.commit_smem()  # all warps have read the other pairs
    store_split(t.erase_pairs, neighbours(p, B))
    write_de(p, tiles.added(de, *((term, t.k) for term in t.erase_pairs)))
    dk = tiles.product(shape, *((transposed(term), t.e) for term in t.erase_pairs))
    plgpu.commit_smem()  # all warps have read the neighbours
    store_split(t.erase_pairs, B - neighbours(p, B))
    return dk, None


def write_de(p: Program, de):
    """Store de [C, K] in its tile in bfloat16, and start to copy it to global memory. The function does not wait for the
    copy."""
    p.tiles.de[...] = de.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(p.tiles.de, p.tokens(p.results.de))


def store_keys(p: Program, dk, erased, behind):
    """Form dk [C, K] and write it to global memory, once both computing roles have read all tiles. Store the sums of dk for dg
    in `Tiles.numbers`.

    dk, erased: the two results of `erased_gradient`. behind: U dS'^T, [C, K]. The function waits for A from *queries*, and at
    the end until dk has left shared memory.
    """
    t, shape = p.tiles, behind.shape
    behind = behind * by_row(jnp.exp2(p.last() - p.gates()), shape)
    t.numbers[OF_WRITES] = (behind * read(t.k)).sum(1)
    dk = behind if dk is None else dk + behind
    p.pipeline.scores.wait()
    pairs = tiles.product(shape, *((transposed(term), t.q) for term in t.output_pairs)) * p.scale()
    pairs = tiles.added(pairs, *((transposed(term), t.e if p.has_erase else t.k) for term in t.erase_pairs))
    t.numbers[OF_KEYS] = (0.0 if erased is None else erased) - (pairs * read(t.k)).sum(1)
    dk += pairs + by_row(p.load_numbers(OF_OWN) * p.scale(), shape) * read(t.q)
    meet(p)
    store_gradient(p, dk, t.k, t.dk, p.results.dk)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_gradient(p: Program, gradient, tile, summed, result):
    """Store a gradient in `tile` in bfloat16, and start to copy it from there to `result`, in global memory.

    If two heads are summed, store the first head's gradient in `summed`, not in `tile`, and then the sum of both. Both are
    copied to the same place of `result`: a branch around the first copy would spill addresses of barriers. gradient: [C, K] in
    registers. summed: a tile, or None where heads are not summed.
    """
    if summed is None:
        tile[...] = gradient.astype(BF16)
    else:
        end = C * remainder(
            p.item(), 2
        )  # 0 for the first head, for which `summed` holds nothing yet, and C for the second
        rows = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW))
        tile, gradient = summed, gradient + jnp.where(by_row(rows < end, gradient.shape), read(summed), 0.0)
        tile[...] = gradient.astype(BF16)
        plgpu.wait_smem_to_gmem(0)  # the first one's has arrived, and does not overwrite the sum
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, p.tokens(result))


def parts(S, dS, rows: int, columns: int) -> list[tuple]:
    """Return views of corresponding tiles of S and dS, as pairs (of S, of dS). Each is [64, 64], or [64, 32] where 64 does not
    divide `rows` or `columns`.

    rows, columns: the shape of S and of dS, which lie in shared memory.
    """
    if rows % 64:
        places = [(pl.ds(row, 32), pl.ds(column, 64)) for row in range(0, rows, 32) for column in range(0, columns, 64)]
        return [tuple(transposed(x.at[at]) for x in (S, dS)) for at in places]
    size = tile_columns(columns)
    places = [(pl.ds(row, 64), pl.ds(column, size)) for row in range(0, rows, 64) for column in range(0, columns, size)]
    return [(S.at[at], dS.at[at]) for at in places]


def meet(p: Program):
    """Wait until *queries* and *keys* have both read all tiles. Each then sees what the other has stored."""
    plgpu.commit_smem()
    p.pipeline.met.arrive()
    p.pipeline.met.wait()
