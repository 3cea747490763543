"""Compute the gradient for per-head, constant or no gates, of heads that share queries and keys.

G is the sum of log gates from where the scan enters the chunk. D_ij = e^{G_i - G_j} for j <= i, else 0. S is the state before
the chunk, and dS = dL/dS behind it. P = q k^T, A = P D and dA = (do v^T) D, all of one head h:

    dq = scale sum_h ((e^G do) S^T) + scale (sum_h dA) k        dv_h = e^{G_last - G} (k dS) + scale A^T do
    dk = sum_h ((e^{G_last - G} v) dS^T) + scale (sum_h dA)^T q

The heads of a group have the same q and k. P is therefore formed once per group. The two products of dA are formed once, from
its sum over the heads. The other two sums grow in the accumulators of the products. The gates' gradient takes four numbers per
token from each head. They come from products that are formed anyway, because q_i (dA k)_i = sum_j P_ij dA_ij, and likewise for
keys:

    query side   do_i (e^{G_i} q_i S) + sum_j A_ij (do_i v_j)        key side   v_j (A^T do)_j
    before       v_j e^{G_last - G_j} (k_j dS)                       edge       e^{G_last} sum S dS

    dg_t = edge + sum_{i >= t} scale (query side - key side)_i + sum_{j < t} before_j

Query side and key side read the same A, rounded once, so that pairs on one side of t cancel. No exponent is positive, so the
gradient is exact for every gate. The columns of V are independent except for these sums: a head has a unit for every 64 of
them.

Where two chunks share a stored state, S is stored before the first and dS behind the last. The first chunk forms its dS from
the tokens of the last, and the last chunk its S from the tokens of the first.

Roles. An item is one chunk and some heads of a group, a unit one of these heads and 64 columns of V. *load* loads, a unit ahead.
*queries* and *keys* compute all units of an item, one after the other: the first A, dA and dq, the second dv and dk.

Memory. The tiles of a unit lie in two stages. P lies in two terms in the tiles of pairs until the last unit, and then the sum of
dA. The tile of the other chunk's q or k holds dq at last, and the tiles of scores hold dk. Who waits for whom:

    waits          for            until
    queries, keys  load           tokens loaded: q, k, other
    load           queries, keys  tokens read
    queries, keys  load           units full: gates, v, do, S, dS, other_gates, other_values
    load           queries, keys  units free
    queries, keys  queries, keys  met
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, SUMS_WITHIN_WARPS, WARPGROUP, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    by_column,
    by_row,
    read,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient.items import (
    BF16,
    Items,
    Program,
    ScanOrder,
    half,
    hidden_zero,
    store_rounded,
    tokens,
    warpgroups,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, Blocks, C, quotient, remainder

STAGES = 2  # buffers of tokens and states in shared memory: one in work, one being loaded
COLUMNS = 64  # columns of v in a unit
VALUES = (C, COLUMNS)
OVERHEAD = 2  # the start and the end of an item take as long as this many units
ROLES = dict(queries=1, keys=1, load=1)
QUERY_SIDE, KEY_SIDE, BEFORE, EDGE = range(4)  # rows of `Results.sums`

Ref = Any


@dataclass(frozen=True)
class HeadGroups(Items):
    """Hold the sizes that the kernel is compiled for.

    H counts blocks of heads (`Blocks`), which have all of K, the width D. They are called heads here. A unit is one head and 64
    of its columns, with `pieces` units to a head. An item is one chunk and `members` heads that read the same head of q and the
    same head of k. Items are numbered by (sequence, part of the heads, chunk), and program p has every `programs`-th item from p
    on. A run has one chunk or two.
    """

    pieces: int = 1
    members: int = 1

    def channels(self, part: int):
        """Return the slice of the `part`-th 64 channels of K in memory."""
        return half(part, self.in_memory[0])

    @property
    def parts(self) -> int:
        """Return the number of parts of the heads, of `members` heads each."""
        return self.H // self.members

    @property
    def units(self) -> int:
        """Return the number of units of an item."""
        return self.members * self.pieces

    def num_items(self, program):
        """Return the number of a program's items. program: the program's number."""
        total = self.B * self.parts * self.chunks
        return lax.div(jnp.maximum(total - program, 0) + (self.programs - 1), jnp.int32(self.programs))

    def place(self, item):
        """Return (batch row, part of the heads, chunk of the row) of an item, numbers from 0. item: the item's number."""
        rest, chunk = quotient(item, self.chunks), remainder(item, self.chunks)
        return quotient(rest, self.parts), remainder(rest, self.parts), chunk

    def is_first(self, chunk):
        """Return whether the scan reaches the chunk first of its run of two. chunk: its number in the batch row."""
        return lax.rem(chunk, jnp.int32(2)) == int(self.reverse)


class Operands(NamedTuple):
    """Hold references to the operands, in global memory. Each field's comment has its shape. v and do have a head for every 64
    columns; `pieces` is V / 64. HQ, HK and HV are the numbers of heads of q, k and v."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV pieces, 64]
    do: Ref  # [B, T, H pieces, 64]
    gates: Ref  # [B, chunks, H / blocks, C]: sums of log2 gates from where the scan enters the chunk
    scale: Ref  # [B, chunks]
    S: Ref  # [B, chunks / run, H, K, V]: the state before the first chunk of every run
    dS: Ref  # [B, chunks / run, H, K, V]: dL/dS behind the last chunk of every run
    order: Ref  # [C]: `items.tokens`
    # With edges: `Edges.block`, and the copies of the tokens' arrays.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, K]
    k_edges: Ref = None  # [B, 3 C, HK, K]
    v_edges: Ref = None  # [B, 3 C, HV pieces, 64]
    do_edges: Ref = None  # [B, 3 C, H pieces, 64]


class Results(NamedTuple):
    """Hold references to the results, in global memory: dq and dk summed over an item's heads, dv, and the terms of dg by
    token. Each field's comment has its shape."""

    dq: Ref  # [B, T, parts, K]: of all heads of an item
    dk: Ref  # [B, T, parts, K]
    dv: Ref  # [B, T, H pieces, 64]
    sums: Ref  # [B, chunks, H pieces, 4, C]: see `gradient_groups`

    @classmethod
    def types(cls, n: HeadGroups) -> "Results":
        """Return the shapes and dtypes of the results for the plan n."""
        sums = jax.ShapeDtypeStruct((n.B, n.chunks, n.H * n.pieces, 4, C), jnp.float32)
        of_keys = n.parts, n.in_memory[0]
        each = [of_keys, of_keys, (n.H * n.pieces, COLUMNS)]
        return cls(*(jax.ShapeDtypeStruct((n.B, n.T, *x), jnp.bfloat16) for x in each), sums)


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. `other`, `other_values` and `other_gates` belong to the other chunk of
    a run of two, from which the state between the two chunks is formed. Each field's comment has its shape."""

    q: Ref  # [1, C, K]
    k: Ref  # [1, C, K]
    other: Ref  # [K / 64, C, 64]: k of the run's first chunk or q of its last, then dq
    v: Ref  # [STAGES, C, 64]
    do: Ref  # [STAGES, C, 64]
    other_values: Ref  # [STAGES, C, 64]: v of the run's first chunk or do of its last
    states: Ref  # [STAGES 2, K, 64]: S before the chunk, and dL/dS behind it
    gates: Ref  # [STAGES, C]
    other_gates: Ref  # [STAGES, C]
    scores: Ref  # [STAGES, C, C]: (q k^T) D, then dk by halves of K
    scores_rest: Ref  # [STAGES, C, C]: what it loses in bfloat16
    pairs: Ref  # [1, C, C]: q k^T, then the sum of scale dA over the heads
    pairs_rest: Ref  # [1, C, C]: what either loses in bfloat16
    dv: Ref  # [C, 64]
    order: Ref  # [C]

    @classmethod
    def types(cls, n: HeadGroups) -> "Tiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        tiled = functools.partial(tiles.tiled, columns=n.tile)
        values = tiled(STAGES, C, COLUMNS)
        gates = plgpu.SMEM((STAGES, C), jnp.float32)
        return cls(
            q=tiled(1, C, n.D),
            k=tiled(1, C, n.D),
            other=tiled(n.halves, C, 64),
            v=values,
            do=values,
            other_values=values if n.run > 1 else tiled(1, 8, 64),
            states=tiled(STAGES * 2, n.D, COLUMNS),
            gates=gates,
            other_gates=gates,
            scores=tiled(STAGES, C, C),
            scores_rest=tiled(STAGES, C, C),
            pairs=tiled(1, C, C),
            pairs_rest=tiled(1, C, C),
            dv=tiled(C, COLUMNS),
            order=plgpu.SMEM((C,), jnp.int32),
        )


@dataclass(frozen=True)
class GroupsPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    tokens: q and k of an item, and in runs of two chunks q or k of the other chunk. They count as read once dq and dk have left
    shared memory. units: v, do, gates and states of a unit, and in runs of two the gates and values of the other chunk. met:
    both computing roles.
    """

    tokens: Handoff
    units: Ring
    met: Meeting

    ORDER = ("tokens.full", "units.full", "units.free", "met.all_there", "tokens.free")

    @classmethod
    def planned(cls, n: HeadGroups) -> "GroupsPipeline":
        """Build the pipeline for the sizes n; its barriers are allocated at launch."""
        load, compute, in_runs = ("load",), ("queries", "keys"), n.run > 1
        others = ("other_gates", "other_values") * in_runs
        return cls(
            tokens=Handoff(load, compute, ("q", "k", *("other",) * (n.halves * in_runs))),
            units=Ring(STAGES, load, compute, ("gates", "v", "do", "S", "dS", *others)),
            met=Meeting(compute),
        )


def members(items: int, group: int, pieces: int, programs: int) -> int:
    """Return the number of heads of an item: the divisor of `group` with which the last program ends first, and of equal
    divisors the largest.

    A program's time is taken as its units, and OVERHEAD units more for each item. items: the number of pairs of a chunk and a
    group of all batch rows. group: the heads of a group. pieces: the units of a head. programs: the number of programs.
    """

    def time(n: int) -> int:
        return -(-items * (group // n) // programs) * (n * pieces + OVERHEAD)

    return min((n for n in range(group, 0, -1) if group % n == 0), key=time)


def gradient_groups(
    q, k, v, G, d_output, scale, before, behind, *,
    group: int, reverse: bool, programs: int, columns: int = 1, edges=(), rows: int = 0,
):  # fmt: skip
    """Return dq and dk of parts of the heads, [B, T or rows, parts, K], and dv per head, [B, T, H, V], in bfloat16; dg, [B,
    chunks, C, H] in memory order, and d_scale by token, [B, chunks, H, C], in float32.

    q, k, v, d_output: [B, T, heads, K or V] in bfloat16. Their heads divide H, T is a multiple of 8, K is 64 or 128, and 64
    divides V.
    columns: the blocks of V that a head is divided into, each of which is a head of v, d_output and H; 1 for whole heads.
    group: the number of consecutive whole heads that share one head of q and one of k. A part is several consecutive heads of
        one group, equally many in each part.
    G: [B, chunks, whole heads, C] in float32, sums of log2 gates from where the scan enters the chunk through each token.
    scale: [B, chunks] in float32.
    before, behind: [B, runs, H, K, V] in bfloat16. A run has one chunk or two. before is the state that enters its first chunk
        in scan order, and behind is the gradient of the state that leaves its last.
    programs: the number of multiprocessors.
    edges: `Edges.block`, and the copies of q, k, v and d_output, if some chunks are read from copies.
    rows: of the results, where the operands have fewer, because the last chunk is read from a copy.
    """
    B, T, H, V = d_output.shape
    K, chunks, pieces, group = q.shape[3], G.shape[1], V // COLUMNS, group * columns
    heads, each = tuple(x.shape[2] for x in (q, k, v)), members(B * chunks * (H // group), group, pieces, programs)
    n = HeadGroups(
        B, rows or T, H, (K, K), heads, programs, reverse, Blocks(columns=columns),  # values lie in parts of 64 columns
        run=chunks // before.shape[1], edges=bool(edges), pieces=pieces, members=each,
    )  # fmt: skip

    def body(*refs):
        p = Program(n, *refs)

        def compute():
            queries, keys = functools.partial(compute_queries, p), functools.partial(compute_keys, p)
            lax.cond(lax.axis_index(WARPGROUP) == 0, acting_as("queries")(queries), acting_as("keys")(keys))

        warpgroups(functools.partial(load, p), compute)

    v, d_output = (x.reshape(B, T, -1, COLUMNS) for x in (v, d_output))
    if edges:
        block, *tokens_of, v_edges, do_edges = edges
        edges = block, *tokens_of, *(x.reshape(*x.shape[:2], -1, COLUMNS) for x in (v_edges, do_edges))
    operands = Operands(q, k, v, d_output, G, scale, before, behind, tokens(reverse), *edges)
    found = launch(
        "gradient_groups", n, body, operands, Results.types(n), (Tiles.types(n),), ROLES, GroupsPipeline.planned(n),
        programs=programs, is_longest=True, params=SUMS_WITHIN_WARPS,
    )  # fmt: skip
    sums = found.sums.reshape(B, chunks, H, pieces, 4, C).sum(3)
    return (
        found.dq,
        found.dk,
        found.dv.reshape(B, -1, H, V),
        gate_gradient(sums, scale, reverse),
        sums[:, :, :, QUERY_SIDE],
    )


def gate_gradient(sums: jax.Array, scale: jax.Array, reverse: bool) -> jax.Array:
    """Return dg [B, chunks, C, H] from the four sums per token of the module's formula. sums: [B, chunks, H, 4, C]. scale: [B,
    chunks]. All are float32. reverse: whether the scan goes from the last token to the first."""
    onward = np.tri(C, dtype=np.float32)
    onward = onward if reverse else onward.T
    # [B, chunks, H, C]
    pairs = scale[:, :, None, None] * (sums[:, :, :, QUERY_SIDE] - sums[:, :, :, KEY_SIDE])
    terms = jnp.stack([pairs, sums[:, :, :, BEFORE], sums[:, :, :, EDGE]], axis=3)
    matrices = np.stack([onward, 1 - onward, np.ones_like(onward)])
    return jnp.einsum("bchrx,rtx->bcth", terms, matrices, precision="highest")


# ---- load -------------------------------------------------------------------------------------------------------------


def rows_of(chunk):
    """Return the slice of the C rows of a chunk. chunk: its number in the batch row."""
    return pl.ds(chunk * C, C)


def load(p: Program):
    """Load the units of all items, one ahead of the computing roles, and q and k of an item once the item before has been
    computed."""
    n, pipeline = p.plan, p.pipeline
    program = lax.axis_index(PROGRAM)

    def step(i, _):
        item, unit, slot = quotient(i, n.units), remainder(i, n.units), remainder(i, STAGES)
        place = n.place(program + item * n.programs)
        pipeline.units.acquire(slot, i)
        load_unit(p, place, unit, slot)

        @pl.when(unit == 0)
        def _():
            pl.when(i > 0)(pipeline.tokens.acquire)
            load_shared(p, place)

        return ()

    lax.fori_loop(0, n.num_items(program) * n.units, step, ())


def load_unit(p: Program, place, unit, slot):
    """Start to load v, do, gates and states of a unit into a slot of shared memory. In runs of two chunks, load also what the
    state between the chunks needs of the other chunk: its gates, and v or do.

    place: the result of `HeadGroups.place`. unit: the unit's number in the item.
    """
    n, x, t = p.plan, p.operands, p.tiles
    b, part, chunk = place
    head, piece = part * n.members + quotient(unit, n.pieces), remainder(unit, n.pieces)
    gate_head, value_head = n.blocks.head(head), n.blocks.of_values(head, n.H, n.heads[2]) * n.pieces + piece
    own = part * n.units + unit
    copy = functools.partial(p.pipeline.units.copy, slot=slot)
    copy(x.gates.at[b, chunk, gate_head], t.gates.at[slot])
    of_value, of_output = (x.v, x.v_edges, value_head, t.v.at[slot]), (x.do, x.do_edges, own, t.do.at[slot])
    load_rows(p, b, chunk, of_value, of_output, copy=copy)
    run, columns = quotient(chunk, n.run), pl.ds(piece * COLUMNS, COLUMNS)
    for i, states in enumerate((x.S, x.dS)):
        copy(states.at[b, run, head, n.block[0], columns], t.states.at[slot * 2 + i])
    if n.run > 1:
        other, is_first = other_chunk(chunk), n.is_first(chunk)
        copy(x.gates.at[b, other, gate_head], t.other_gates.at[slot])
        tile = t.other_values.at[slot]
        of_output, of_value = (x.do, x.do_edges, own, tile), (x.v, x.v_edges, value_head, tile)
        pl.when(is_first)(functools.partial(load_rows, p, b, other, of_output, copy=copy))
        pl.when(jnp.logical_not(is_first))(functools.partial(load_rows, p, b, other, of_value, copy=copy))


def load_shared(p: Program, place):
    """Start to load q and k of an item into shared memory, and with runs of two chunks q or k of the other chunk. place: the
    result of `HeadGroups.place`."""
    n, x, t, copy = p.plan, p.operands, p.tiles, p.pipeline.tokens.copy
    b, part, chunk = place
    query_head, key_head = (quotient(part * n.members, n.H // heads) for heads in n.heads[:2])
    of_query, of_key = ((head, n.block[0]) for head in (query_head, key_head))
    load_rows(p, b, chunk, (x.q, x.q_edges, of_query, t.q.at[0]), (x.k, x.k_edges, of_key, t.k.at[0]), copy=copy)
    if n.run > 1:
        other, is_first = other_chunk(chunk), n.is_first(chunk)

        def load_halves(source, edges, head):
            halves = [(source, edges, (head, n.channels(part)), t.other.at[part]) for part in range(n.halves)]
            load_rows(p, b, other, *halves, copy=copy)

        pl.when(is_first)(functools.partial(load_halves, x.q, x.q_edges, query_head))
        pl.when(jnp.logical_not(is_first))(functools.partial(load_halves, x.k, x.k_edges, key_head))


def load_rows(p: Program, b, chunk, *sources, copy):
    """Start to load a chunk's rows of several arrays.

    b, chunk: batch row, and the chunk's number in it. sources: tuples of an array of tokens, its copies for edges or None, its
    head or (head, columns), and the tile. copy: a function of (source, tile) that starts a copy.
    """

    def load(rows, from_copy: bool):
        for array, edges, place, tile in sources:
            place = place if isinstance(place, tuple) else (place,)
            copy((edges if from_copy else array).at[(b, rows, *place)], tile)

    tiles.load_rows(p.operands.edges, chunk, load)


def other_chunk(chunk):
    """Return the number of the other chunk of a run of two, in which chunks 2 n and 2 n + 1 lie."""
    return chunk + 1 - 2 * lax.rem(chunk, jnp.int32(2))


# ---- compute ----------------------------------------------------------------------------------------------------------


def for_all_items(p: Program, item):
    """Run item(i) for every item of the program, once its q and k are loaded. At the end, wait until all copies to global
    memory are done. item: a function of the item's number among the program's."""

    def step(i, _):
        p.pipeline.tokens.wait()
        item(i)
        return ()

    lax.fori_loop(0, p.plan.num_items(lax.axis_index(PROGRAM)), step, ())
    plgpu.wait_smem_to_gmem(0)


def place_of(p: Program, i):
    """Return (batch row, part of the heads, chunk of the row) of the program's i-th item.

    The three numbers are computed at each use, because the compiler would spill values that it holds throughout.
    """
    program, i = lax.optimization_barrier((lax.axis_index(PROGRAM), i))
    return p.plan.place(program + i * p.plan.programs)


def scale_of(p: Program, i):
    """Return the scale of the chunk of the program's i-th item."""
    b, _, chunk = place_of(p, i)
    return p.operands.scale[b, chunk]


def slot_of(p: Program, i, unit):
    """Return the slot of shared memory that holds a unit of the program's i-th item. unit: the unit's number in the item."""
    return remainder(i * p.plan.units + unit, STAGES)


def store(p: Program, i, *stored):
    """Write an item's dq or dk to global memory, wait until it has left shared memory, and report the item's tokens read.

    stored: pairs of a tile, and a result [B, T, parts, columns].
    """
    b, part, chunk = place_of(p, i)
    plgpu.commit_smem()
    for tile, result in stored:
        plgpu.copy_smem_to_gmem(tile, result.at[b, rows_of(chunk), part])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    p.pipeline.tokens.release()


def note(p: Program, i, unit, row: int, x):
    """Write x [C] from registers to global memory: to row `row` of `Results.sums`, for a unit of the program's i-th item."""
    b, part, chunk = place_of(p, i)
    tiles.store(p.results.sums.at[b, chunk, part * p.plan.units + unit, row], x)


def edge(p: Program, slot):
    """Return e^{G_last} sum_v S dS over the columns of a unit, [64] by channel of K: with 128 channels, those 64 apart are
    added. slot: the unit's slot.

    The sum is a loop, because code without a loop needs too many registers.
    """

    def rows(i, total):
        return total + (
            read(p.tiles.states.at[slot * 2, half(i)]) * read(p.tiles.states.at[slot * 2 + 1, half(i)])
        ).sum(1)

    total = lax.fori_loop(0, p.plan.halves, rows, zeros((64,), BY_ROW))
    return total * jnp.exp2(p.tiles.gates[slot, p.plan.last_token])


def decayed_product(total, decay, values, state):
    """Return total + decay * (values state^T), [C, 64] in float32. total, decay: [C, 64] in registers. values, state: tiles [C,
    64] and [64, 64] in shared memory.

    The barrier keeps the compiler from starting the next product before this one is added.
    """
    return lax.optimization_barrier(total + decay * tiles.product(VALUES, (values, transposed(state))))


def compute_queries(p: Program):
    """Compute dq of every item, as the role *queries*. Form P = q k^T once for an item, and for every unit A and dA, which
    *keys* reads. Add the unit's terms to dq and to the sum of dA over heads."""
    n, t, units = p.plan, p.tiles, p.pipeline.units
    t.order[...] = plgpu.load(p.operands.order, layout=BY_COLUMN, optimized=False)
    plgpu.commit_smem()
    mask = ScanOrder(n.reverse, t.order)

    def decays(slot):
        """Return D [C, C] of the gates in a slot, with 0 above its diagonal in scan order."""
        G = plgpu.load(t.gates.at[slot], layout=BY_ROW)
        to = plgpu.load(t.gates.at[slot], layout=BY_COLUMN, optimized=False)
        return jnp.exp2(jnp.where(mask.later(), by_row(G, PAIRS) - by_column(to, PAIRS), -jnp.inf))

    def store_pairs(x, at):
        """Store x [C, C] in two bfloat16 terms, in `Tiles.pairs` and `pairs_rest` at index `at`, a 0 that the compiler does not
        know. Scores stay in shared memory while units are computed, because there are too few registers for them."""
        t.pairs_rest.at[at][...] = store_rounded(t.pairs.at[at], x)

    def item(i):
        """Compute dq of the program's i-th item."""
        at = hidden_zero()
        store_pairs(tiles.product(PAIRS, (t.q.at[at], transposed(t.k.at[at]))), at)

        def add(unit, carry):
            # dq: halves [C, 64], over the scale; pairs [C, C]: the sum of dA
            dq, pairs = carry
            slot = slot_of(p, i, unit)
            v, do = t.v.at[slot], t.do.at[slot]
            units.wait(slot)
            D = decays(slot)
            A = (read(t.pairs.at[0]) + read(t.pairs_rest.at[0])) * D
            t.scores_rest.at[slot][...] = store_rounded(t.scores.at[slot], A)
            dA = tiles.product(PAIRS, (do, transposed(v)))
            query_side = ((read(t.scores.at[slot]) + read(t.scores_rest.at[slot])) * dA).sum(1)
            pairs += dA * D
            p.meet()
            S = t.states.at[slot * 2]
            # [C, 64]
            qS = tiles.product(VALUES, (t.q.at[0], S))
            up = by_row(jnp.exp2(plgpu.load(t.gates.at[slot], layout=BY_ROW)), VALUES)
            query_side += (read(do) * up * qS).sum(1)
            dq = [decayed_product(y, up, do, S.at[half(part)]) for part, y in enumerate(dq)]
            units.release(slot)
            note(p, i, unit, QUERY_SIDE, query_side)
            return dq, pairs

        dq, pairs = lax.fori_loop(0, n.units, add, ([zeros((C, 64)) for _ in range(n.halves)], zeros(PAIRS)))
        scale, at = scale_of(p, i), hidden_zero()
        store_pairs(pairs * scale, at)
        p.meet()
        for part, y in enumerate(dq):
            k = t.k.at[at, :, half(part)]
            y = tiles.added(y * scale, (t.pairs.at[at], k), (t.pairs_rest.at[at], k))
            t.other.at[part][...] = y.astype(BF16)
        p.meet()
        store(p, i, *((t.other.at[part], p.results.dq.at[..., n.channels(part)]) for part in range(n.halves)))

    for_all_items(p, item)


def compute_keys(p: Program):
    """Compute dv and dk of every item, as the role *keys*. For every unit, form the state that is not stored, and dv, and add
    the unit's terms to dk."""
    n, t, units = p.plan, p.tiles, p.pipeline.units

    def form_state(i, slot):
        """Replace the unit's S or dS in shared memory, in runs of two chunks: form S behind the run's first chunk from the
        state before that chunk, or dL/dS before its last chunk from the gradient behind that chunk."""
        is_first = n.is_first(place_of(p, i)[2])
        G, last = plgpu.load(t.other_gates.at[slot], layout=BY_ROW), t.other_gates[slot, n.last_token]
        factor = jnp.where(is_first, scale_of(p, i), 1.0)
        values = t.other_values.at[slot]
        first = is_first.astype(jnp.float32)
        between = jnp.exp2(first * G + (1.0 - first) * (last - G)) * factor
        values[...] = (read(values) * by_row(between, VALUES)).astype(BF16)
        plgpu.commit_smem()
        for part in range(n.halves):
            state = t.states.at[slot * 2 + is_first.astype(jnp.int32), half(part)]
            found = tiles.product((64, COLUMNS), (transposed(t.other.at[part]), values))
            state[...] = (read(state) * jnp.exp2(last) + found).astype(BF16)

    def item(i):
        """Compute dv and dk of the program's i-th item."""

        def add(unit, dk):
            slot = slot_of(p, i, unit)
            v, do, dS = t.v.at[slot], t.do.at[slot], t.states.at[slot * 2 + 1]
            units.wait(slot)
            if n.run > 1:
                form_state(i, slot)
            p.meet()
            G, last = plgpu.load(t.gates.at[slot], layout=BY_ROW), t.gates[slot, n.last_token]
            leaving = by_row(jnp.exp2(last - G), VALUES)
            # halves [C, 64]
            dk = [decayed_product(x, leaving, v, dS.at[half(part)]) for part, x in enumerate(dk)]
            S_dS = edge(p, slot)
            # [C, 64]
            dv = tiles.product(VALUES, (t.k.at[0], dS)) * leaving
            dv, before = lax.optimization_barrier((dv, (read(v) * dv).sum(1)))
            scores = t.scores.at[slot], t.scores_rest.at[slot]
            A_do = tiles.product(VALUES, *((transposed(term), do) for term in scores))
            key_side = (read(v) * A_do).sum(1)
            note(p, i, unit, BEFORE, before)
            note(p, i, unit, KEY_SIDE, key_side)
            note(p, i, unit, EDGE, S_dS)
            units.release(slot)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            t.dv[...] = (dv + scale_of(p, i) * A_do).astype(BF16)
            plgpu.commit_smem()
            b, part, chunk = place_of(p, i)
            plgpu.copy_smem_to_gmem(t.dv, p.results.dv.at[b, rows_of(chunk), part * n.units + unit])
            return dk

        dk = lax.fori_loop(0, n.units, add, [zeros((C, 64)) for _ in range(n.halves)])
        p.meet()
        at = hidden_zero()
        terms = [transposed(x.at[at]) for x in (t.pairs, t.pairs_rest)]
        dk = [tiles.added(x, *((y, t.q.at[at, :, half(part)]) for y in terms)) for part, x in enumerate(dk)]
        p.meet()
        for part, x in enumerate(dk):
            t.scores.at[part][...] = x.astype(BF16)
        store(p, i, *((t.scores.at[part], p.results.dk.at[..., n.channels(part)]) for part in range(n.halves)))

    for_all_items(p, item)
