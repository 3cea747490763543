"""Compute the gradient of every chunk and head from the states at both its ends, for per-key gates.

S is the state before the chunk, dS = dL/dS behind it, and M the sum of log gates from the chunk's middle. x = q e^M, y = k
e^-M, A = scale mask(x y^T), dA = mask(do v^T). S' and dS' are the states decayed to the middle, as the scans store them:

    dq = scale e^M (do S'^T + dA y)      dk = e^-M (v dS'^T + scale dA^T x)      dv = A^T do + y dS'
    dg_t = sum_v S' dS' + scale sum_{i >= t} x_i (do S'^T)_i + sum_{j < t} y_j (v dS'^T)_j
           + scale sum_{i >= t} (x_i (dA y)_i - y_i (dA^T x)_i)

Below dx is do S'^T + dA y, dy_state v dS'^T, and dy_pairs dA^T x.

A reset divides a chunk (`newest_resets`). A and dA then exclude pairs of tokens that a reset divides, the rows of do S'^T are
those of tokens before all resets of the chunk, and the rows of v dS'^T and y dS' those of tokens behind all. S' dS' has no term
in dg. A pair i >= t > j adds one term to the last sum, over tokens from t on; a pair with both tokens from t on adds two, which
cancel. So the sum may end before the next reset. It is 0 at a reset. The terms with S' have no rows from the first reset on,
and those with dS' none before the last.

The last sum cancels except for the pairs across t, because it is formed from the same x, y and dA as dq and dk. x, y and dA
have 16 bits in two terms of bfloat16, and their products are three of the four products of terms. A has 8 bits, and its
diagonal, the score of a token with itself, is added in float32. Where the gates of a chunk are out of range of e^M and e^-M,
the states are not decayed, and a second kernel computes the chunk exactly (`exact`).

Roles. *load* is one warpgroup, and *compute* two. With D = 128 both share a chunk: each has half of K in dq, dk and dg, and half
of V in dv, one forms A^T, and the other dA^T. With D = 64 each has a chunk of its own.

Memory. Tiles of tokens lie in two slots a team. What x, y and dA lose in bfloat16 lies in the next chunk's tiles of do, v and g,
which are therefore loaded late (`Chunk.rests`). A^T and dA^T lie in the tile of g, of which only M is formed, or with D = 64 in
tiles of their own. The gates' second term lies in the tile of S until M is formed. Results overwrite tokens: dq q, dk k, dv do,
and dg v. Who waits for whom:

    waits    for      until
    compute  compute  met
    compute  load     tokens full: q, k, g, g_rest, marks
    load     compute  results full
    compute  load     results free
    compute  load     states full: dS, S
    load     compute  states free
    compute  load     values full: v, do
    load     compute  gates_read
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import SUMS_WITHIN_WARPS, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Meeting, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    added,
    after,
    by_row,
    clear,
    high_part,
    product,
    read,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient import exact, items
from glax._src.kernels.pallas_gpu.gradient.items import (
    BF16,
    SLOTS,
    TILE,
    Items,
    Program,
    ScanOrder,
    accumulator,
    columns,
    half,
    hidden_zero,
    marks,
    masked,
    store_rounded,
    tokens,
)
from glax._src.kernels.pallas_gpu.plan import WHOLE, Blocks, C, span

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory: tokens, states and dL/dS by chunk. Fields that a call does not have
    are None. HQ, HK and HV are the numbers of heads of q, k and v; H counts the blocks of all heads."""

    q: Ref  # [B, T, HQ, D]
    k: Ref  # [B, T, HK, D]
    v: Ref  # [B, T, HV, D]
    g: Ref  # [B, T, heads, D]: log gates, or the first of their two terms
    do: Ref  # [B, T, heads, D]: the gradient of the output
    scale: Ref  # [B + 1], or [chunks] if packed
    S: Ref  # [B, chunks, H, D, D]: the state before the chunk
    dS: Ref  # [B, chunks, H, D, D]: the gradient of the state behind the chunk
    tokens: Ref  # [C]: `items.tokens`
    g_rest: Ref = None  # [B, T, heads, D]: the gates' second term
    places: Ref = None  # [chunks, 3]: the rows of each chunk, if packed; see `gradient_key`
    marks: Ref = None  # [B, chunks, C]: `items.marks`, of rows with resets


class Results(NamedTuple):
    """Hold references to the results, in global memory: the gradients, and by token the terms of d_scale. Each field's comment
    has its shape. `summed` is the number of blocks of V over which dq, dk and dg are one sum."""

    dq: Ref  # [B, T, H / summed, D]
    dk: Ref  # [B, T, H / summed, D]
    dv: Ref  # [B, T, H, D]
    dg: Ref  # [B, T, H / summed, D]
    d_scale: Ref  # [B, chunks, H / summed, D / 64, C]: q dq / scale by token, of each half of K

    @classmethod
    def types(cls, n: Items) -> "Results":
        """Return the shapes and dtypes of the results for the plan n."""
        H, out = n.H // n.summed, jax.ShapeDtypeStruct
        keys, values = (out((n.B, n.T, heads, width), BF16) for heads, width in zip((H, n.H), n.in_memory, strict=True))
        return cls(keys, keys, values, keys, out((n.B, n.chunks, H, n.halves, C), jnp.float32))


class Tiles(NamedTuple):
    """Hold references to the shared memory. Tiles of tokens have two slots for each team, and halves of the channels. Each
    field's comment has its shape, and what the tile holds one after another."""

    q: Ref  # [slots, D / 64, C, 64]: q, then x, then dq
    k: Ref  # k, then y, then dk
    v: Ref  # v, then high parts of the gates' gradient, then dg
    g: Ref  # the gates' first term, then A^T and dA^T with D = 128, then the gates' gradient from before
    do: Ref  # do, then low parts of the gates' gradient, then dv
    S: Ref  # [teams, D, D]
    dS: Ref  # [teams, D, D]
    vectors: Ref  # [2, C], of each warpgroup: every token's score with itself, then sum_v S' dS' of each channel
    order: Ref  # [2, C]: each warpgroup's copy of `Operands.tokens`, without resets
    marks: Ref  # [slots, C]: the chunk's part of `Operands.marks`
    A_T: Ref  # [teams, C, C] with D = 64
    dA_T: Ref

    @classmethod
    def types(cls, n: Items) -> "Tiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        teams, team, slots = n.teams, n.team, SLOTS * n.teams
        tiled = functools.partial(tiles.tiled, columns=n.tile)
        tile, state = tiled(slots, team, C, 64), tiled(teams, n.D, n.D)
        scores = tiled(teams, C, C) if team == 1 else None
        return cls(
            *(tile,) * 5,
            *(state,) * 2,
            vectors=plgpu.SMEM((2, C), jnp.float32),
            order=None if n.resets else plgpu.SMEM((2, C), jnp.int32),
            marks=plgpu.SMEM((slots, C), jnp.int32) if n.resets else None,
            A_T=scores,
            dA_T=scores,
        )


@dataclass(frozen=True)
class KeyPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    met: the warpgroups that share a chunk. tokens: the tiles of a slot from which M, x and y are formed. values: v and do.
    gates_read: reached once M is formed, so that S may overwrite the gates' second term. states: S and dS. They count as read
    when all products of the chunk are done, so that also the next g, v and do may be loaded. results: full once they are in
    shared memory, and free once they have left it.
    """

    met: Meeting
    tokens: Ring
    results: Ring
    states: Ring
    values: Ring
    gates_read: Meeting | None

    ORDER = (
        "met.all_there", "tokens.full", "results.free", "states.free", "results.full",
        "values.full", "gates_read.all_there", "states.full",
    )  # fmt: skip

    @classmethod
    def planned(cls, n: Items) -> "KeyPipeline":
        """Build the pipeline for the sizes n; its barriers are allocated at launch."""
        load, compute, teams = ("load",), ("compute",), n.teams
        tokens = *("q", "k", "g") * n.team, *("g_rest",) * (n.terms - 1), *("marks",) * n.resets
        return cls(
            met=Meeting(compute, teams=teams),
            tokens=Ring(teams * SLOTS, load, compute, tokens, released_by=(), teams=teams),
            results=Ring(teams, compute, load, teams=teams),
            states=Ring(teams, load, compute, ("dS", "S"), teams=teams),
            values=Ring(teams, load, compute, ("v", "do") * n.team, released_by=(), teams=teams),
            gates_read=Meeting(compute, load, teams=teams) if n.terms == 2 else None,
        )


def gradient_key(
    q, k, v, g, d_output, scale, before, behind, out_of_range, places=None, *,
    reverse: bool, programs: int, blocks: Blocks = WHOLE, newest=None,
):  # fmt: skip
    """Return the terms of each block: dq, dk, dv, dg, [B, T, H, D] in bfloat16; d_scale, [B, chunks, H] in float32.

    H counts the blocks of all heads, into which `blocks` divides their states. T is a multiple of 8, and D is 64 or 128.
    q, k, v, d_output: [B, T, heads, D] in bfloat16, by block. Their heads divide those of the states.
    g: the log gates, [B, T, heads, D] in bfloat16, or the two terms of which they are the sum.
    scale: [B + 1] in float32, of which the last number is not used.
    before, behind: [B, chunks, H, D, D] in bfloat16, the state that enters each chunk in scan order, and the gradient of the
        state that leaves it. Both are decayed to the chunk's middle where out_of_range is 0.
    out_of_range: [B, chunks, H] in int32; not 0 for the chunks that `gradient_exact` computes.
    places: [chunks, 3] in int32 for packed sequences, else None: the first row of every chunk in the inputs, divided by 8; the
        first of its rows that belongs to its sequence; and the row behind the last of these. Gradients are then in rows of
        chunks, scale is [chunks], and B = 1.
    programs: the number of multiprocessors.
    newest: [B, chunks, 64] in int32 for rows with resets (`newest_resets`), else None. d_scale is then by token, [B, chunks, H,
        64], and with `places` chunks lie one after another in the inputs.
    """
    (B, T), (_, chunks, H, *_), packed = d_output.shape[:2], behind.shape, places is not None
    T = chunks * C if packed and newest is None else T
    n = Items(
        B, T, H, behind.shape[3:], (q.shape[2], k.shape[2], v.shape[2]), programs, reverse, blocks,
        terms=len(g), packed=packed, resets=newest is not None,
    )  # fmt: skip
    g, g_rest = g if n.terms == 2 else (*g, None)
    marked = marks(newest, reverse) if n.resets else None
    operands = Operands(q, k, v, g, d_output, scale, before, behind, tokens(reverse), g_rest, places, marked)

    def body(*refs):
        p = Program(n, *refs)
        items.warpgroups(functools.partial(load, p), acting_as("compute")(functools.partial(compute, p)))

    found = launch(
        "gradient_key", n, body, operands, Results.types(n), (Tiles.types(n),), items.ROLES, KeyPipeline.planned(n),
        programs=programs, is_longest=True, params=SUMS_WITHIN_WARPS,
    )  # fmt: skip
    *gradients, d_scale = exact.gradient_exact(n, operands, found, out_of_range)
    return *gradients, d_scale.sum(3) if n.resets else d_scale.sum((3, 4))


# ---- load ------------------------------------------------------------------------------------------------------------


def load(p: Program):
    """Run the loading warpgroup: copy the chunks' tokens, gates and states to shared memory, and their results back."""
    n, x, s, pipeline = p.plan, p.operands, p.tiles, p.pipeline

    def load_tokens(names, program, i, t: int, late: bool = False):
        """Load the tokens of chunk i of team t, of the arrays `names`, by halves of the channels.

        Their position is computed at each use, because the warpgroup has few registers.
        """
        (b, _, c, h, _), at = n.chunk_of(program, i, t), n.slot(i, t)
        heads, rows = n.heads_of(h), n.rows_of(x.places, c)
        arrays = dict(q=(x.q, s.q), k=(x.k, s.k), v=(x.v, s.v), g=(x.g, s.g), do=(x.do, s.do))
        ring, slot = (pipeline.values, t) if late else (pipeline.tokens, at)
        for name in names:
            source, tile = arrays[name]
            for part in range(n.team):
                columns = half(part, source.shape[3])
                ring.copy(source.at[b, rows, heads[name], columns], tile.at[at].at[part], slot)

    def load_early(program, i, t: int):
        load_tokens(("q", "k"), program, i, t)
        if n.resets:
            (b, _, c, _, _), at = n.chunk_of(program, i, t), n.slot(i, t)
            pipeline.tokens.copy(x.marks.at[b, c], s.marks.at[at], at)

    def load_late(program, i, t: int):
        b, _, c, h, _ = n.chunk_of(program, i, t)
        pl.when(i >= 1)(lambda: pipeline.states.acquire(t))
        load_tokens(("g",), program, i, t)
        if n.terms == 2:
            rest = x.g_rest.at[b, n.rows_of(x.places, c), n.heads_of(h)["g"], span(0, n.D, x.g_rest.shape[3])]
            pipeline.tokens.copy(rest, second_term(p, t), n.slot(i, t))
        load_tokens(("v", "do"), program, i, t, late=True)
        pipeline.states.copy(x.dS.at[b, c, h, *n.block], s.dS.at[t], t)
        if n.terms == 2:
            pipeline.gates_read.wait(t)
        pipeline.states.copy(x.S.at[b, c, h, *n.block], s.S.at[t], t)

    def store(program, i, t: int):
        b, _, c, h, _ = n.chunk_of(program, i, t)
        pipeline.results.wait(t)
        for result, tile in zip(p.results[:4], (s.q, s.k, s.do, s.v), strict=True):
            at = n.slot(i, t)
            for part in range(n.team):
                target = result.at[b, pl.ds(c * C, C), h, half(part, result.shape[3])]
                plgpu.copy_smem_to_gmem(tile.at[at].at[part], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    items.load_chunks(p, load_early, load_late, store)


def second_term(p: Program, t):
    """Return the tile of the gates' second term, [C, D]: a part of the tile of S, which is loaded only once M is formed. t: the
    team."""
    return p.tiles.S.at[t, pl.ds(0, C)]


# ---- compute ---------------------------------------------------------------------------------------------------------


class Rests(NamedTuple):
    """Hold the tiles of what x = q e^M, y = k e^-M and dA^T lose in bfloat16. x, y: those of this warpgroup's channels, [C,
    64]. xs, ys: those of all channels, [D / 64, C, 64]. dA_T: [C, C]."""

    x: Ref  # this warpgroup's half
    y: Ref  # this warpgroup's half
    xs: Ref  # both halves
    ys: Ref  # both halves
    dA_T: Ref


@dataclass(frozen=True)
class Chunk(items.Chunk):
    """Hold the chunk that a computing warpgroup processes. Properties ending in _w are tiles of this warpgroup's 64
    channels."""

    scan: ScanOrder
    vector: Ref  # [C]: this warpgroup's row of `vectors`

    @classmethod
    def of(cls, p: Program, first, i) -> "Chunk":
        """Return the i-th chunk of the team whose first item is `first`."""
        n, s, place = p.plan, p.tiles, cls.place(p, first, i)
        order = s.marks.at[place["at"]] if n.resets else s.order
        vector = s.vectors.at[place["t"] * n.team + place["w"]]
        return cls(**place, scan=ScanOrder(n.reverse, order, n.resets), vector=vector)

    def again(self) -> "Chunk":
        """Return the same chunk, with its fields computed anew behind a barrier of the compiler, which would otherwise hold
        them in registers until here."""
        return Chunk.of(self.p, *lax.optimization_barrier((self.first, self.i)))

    @property
    def g(self):
        """Return the chunk's tile of the gates' first term in shared memory, [D / 64, C, 64]."""
        return self.p.tiles.g.at[self.at]

    @property
    def q_w(self):
        return self.q.at[self.w]

    @property
    def k_w(self):
        return self.k.at[self.w]

    @property
    def v_w(self):
        return self.v.at[self.w]

    @property
    def g_w(self):
        return self.g.at[self.w]

    @property
    def do_w(self):
        return self.do.at[self.w]

    def state(self, ref: Ref, p):
        """Return a reference to the block [64, 64] of S' or dS', with this warpgroup's 64 channels and 64 columns from 64 p on.

        S', dS': the states decayed to the chunk's middle. ref: `Tiles.S` or `Tiles.dS`, [teams, D, D].
        """
        return ref.at[self.t, self.mine, half(p)]

    def rests(self, first: Any = 0) -> Rests:
        """Return the tiles of the next chunk's do, v and g, which hold what x, y and dA lose in bfloat16 until that chunk is
        loaded. first: 0, or the result of `hidden_zero`."""
        s = self.p.tiles
        xs, ys = s.do.at[self.other], s.v.at[self.other]
        return Rests(x=xs.at[self.w], y=ys.at[self.w], xs=xs, ys=ys, dA_T=s.g.at[self.other, first])

    def scores(self, first: Any = 0) -> tuple[Ref, Ref]:
        """Return the tiles of A^T and dA^T, [C, C] each in shared memory. first: 0, or the result of `hidden_zero`."""
        if self.p.plan.team == 2:
            return self.g.at[first], self.g.at[first + 1]
        return self.p.tiles.A_T.at[self.t], self.p.tiles.dA_T.at[self.t]


def compute(p: Program):
    """Run a computing warpgroup: write the gradients of all chunks of its team."""
    n = p.plan
    wg, first = items.first_item(n)
    if not n.resets:  # many masks: where tokens stand is read from shared memory
        order = p.tiles.order.at[wg]
        order[...] = plgpu.load(p.operands.tokens, layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
        p = p._replace(tiles=p.tiles._replace(order=order))
    items.compute_chunks(n, first, functools.partial(compute_chunk, p))


def compute_chunk(p: Program, first, i):
    """Compute the gradients of one chunk, the team's i-th. `gradient_exact` later overwrites them where gates are out of range.
    first: the number of the team's first item."""
    n, pipeline, c = p.plan, p.pipeline, Chunk.of(p, first, i)
    pipeline.tokens.wait(c.at)
    matrix, gates = c.scan.middle_matrix(), [c.g_w]
    if n.terms == 2:
        gates.append(second_term(p, c.t).at[:, c.mine])
    if n.packed:
        clear_foreign(c, (*gates, c.q_w, c.k_w))
        plgpu.commit_smem()
    M = product(TILE, *((matrix, g) for g in gates)) * LOG2E
    if n.terms == 2:
        pipeline.gates_read.arrive(c.t)
    c.vector[...] = (read(c.q_w) * read(c.k_w)).sum(1)
    x_rest = store_rounded(c.q_w, read(c.q_w) * jnp.exp2(M))
    y_rest = store_rounded(c.k_w, read(c.k_w) * jnp.exp2(-M))
    # e^M and e^-M are formed anew where they are needed again: M alone is held
    M, x_rest, y_rest = lax.optimization_barrier((M, x_rest, y_rest))
    c.wait_until_stored()
    rests = c.rests()
    rests.x[...], rests.y[...] = x_rest, y_rest
    c.meet()
    pipeline.values.wait(c.t)
    if n.packed:
        clear_foreign(c, (c.v_w, c.do_w))
        c.meet()
    store_scores(c)
    c.meet()
    c.wait_for_states()
    c = c.again()
    *found, x_dx = pl.run_scoped(functools.partial(multiply, c, M), *[accumulator()] * 3)
    pipeline.states.release(c.t)
    c.meet()
    c = c.again()
    store_results(c, *found)
    p.results.d_scale[c.b, c.c, c.h, c.w] = x_dx  # last: fences wait for what is on its way to memory


def clear_foreign(c: Chunk, found):
    """Zero the rows of the tiles `found`, [C, 64] each, that do not belong to the chunk's sequence. Such rows may hold NaN."""
    places = c.p.operands.places
    first, end = places[c.c, 1], places[c.c, 2]
    pl.when((first > 0) | (end < C))(lambda: clear(found, first, end))


def store_scores(c: Chunk):
    """Store A^T = scale mask(y x^T) without its diagonal, and dA^T = mask(v do^T) in two terms of bfloat16, in the tiles of
    `Chunk.scores` and `Chunk.rests`. The function does not wait."""
    A_T, dA_T = c.scores()
    parts = range(c.p.plan.team)

    def of_keys():
        """Store A^T, formed from y x^T [C, C] without the product of the second terms of y and x."""
        rests = c.rests()
        pairs = [(c.k.at[part], c.q.at[part]) for part in parts]
        pairs += [(rests.ys.at[part], c.q.at[part]) for part in parts]
        pairs += [(c.k.at[part], rests.xs.at[part]) for part in parts]
        A_T[...] = masked(c.scan.before(), product(TILE, *((y, transposed(x)) for y, x in pairs)) * c.scale)

    def of_values():
        pairs = ((c.v.at[part], transposed(c.do.at[part])) for part in parts)
        dA = lax.optimization_barrier(jnp.where(c.scan.earlier(), product(TILE, *pairs), 0.0))
        c.rests().dA_T[...] = store_rounded(dA_T, dA)

    c.share(of_keys, of_values)


def multiply(c: Chunk, M, dy_pairs, dy_state, dx):
    """Run all products with scores and states. Return the arguments of `store_results`, and x dx by token, [64].

    M: the sums of log2 gates from the chunk's middle, [C, 64]. dy_pairs, dy_state, dx: the accumulators of dA^T x, v dS'^T and
    do S'^T + dA y, [C, 64] each. Products are started in the order in which they are used, because starting one waits for most
    of those before.
    """
    n, p = c.p.plan, c.p
    start(c, dy_pairs, dy_state, dx)
    running = n.team + 3 * (not n.resets)  # products behind those of dy_state
    dy_pairs, dy_state = after(dy_pairs, n.team + running), after(dy_state, running)
    if n.resets:
        dy_state = c.scan.to_state(dy_state)
    y = read(c.k_w) + read(c.rests().y)
    before_gate = (y * dy_state).astype(BF16)
    dk = (jnp.exp2(-M) * (dy_state + c.scale * dy_pairs)).astype(BF16)
    y_dy = y * dy_pairs
    # Rounded now, not when dk and dv are stored: two registers a pair until then.
    dk, before_gate, y_dy = lax.optimization_barrier((dk, before_gate, y_dy))
    if n.resets:
        dx = added(c.scan.from_state(after(dx)), *pairs_of_queries(c, hidden_zero()))
    edge = around(c)  # a loop, before which the compiler does not move the next product
    if n.team == 1:  # one turn of a loop is none
        c.meet()

    def of_values(dv):
        here = c.again() if n.team == 1 else c  # where a warpgroup has the chunk alone, registers are short
        start_values(here, dv)
        total = dx if n.resets else after(dx, 2 * n.team + 1)
        x_dx = (read(here.q_w) + read(here.rests().x)) * total
        behind_gate = c.scale * (x_dx - y_dy)
        dq = (c.scale * jnp.exp2(M) * total).astype(BF16)
        behind_gate, dq, x_dx = lax.optimization_barrier((behind_gate, dq, x_dx.sum(1)))
        values = after(dv)
        if n.resets:
            values = added(here.scan.to_state(values), (here.scores(hidden_zero())[0], here.do_w))
        own = sum(plgpu.load(p.tiles.vectors.at[here.t * n.team + part], layout=BY_ROW) for part in range(n.team))
        own = by_row(own * here.scale, TILE) * read(here.do_w)
        return behind_gate, dq, x_dx, (values + own).astype(BF16)

    behind_gate, dq, x_dx, dv = pl.run_scoped(of_values, accumulator())
    return behind_gate, before_gate, edge, dq, dk, dv, x_dx


def start(c: Chunk, dy_pairs, dy_state, dx):
    """Start the products in this order: dA^T x in dy_pairs, v dS'^T in dy_state, do S'^T + dA y in dx.

    With resets dA y is added later, because rows of do S'^T behind a reset are cleared before.
    """
    s, parts, rests, (_, dA_T) = c.p.tiles, range(c.p.plan.team), c.rests(), c.scores()
    for dA, x in ((dA_T, c.q_w), (rests.dA_T, c.q_w), (dA_T, rests.x)):
        plgpu.wgmma(dy_pairs, dA, x)
    for part in parts:
        plgpu.wgmma(dy_state, c.v.at[part], transposed(c.state(s.dS, part)))
    for part in parts:
        plgpu.wgmma(dx, c.do.at[part], transposed(c.state(s.S, part)))
    if not c.p.plan.resets:
        for pair in pairs_of_queries(c):
            plgpu.wgmma(dx, *pair)


def pairs_of_queries(c: Chunk, first: Any = 0):
    """Return three pairs of operands whose products sum to dA y: those of two bfloat16 terms each, without the product of both
    second terms. first: as in `Chunk.scores`."""
    rests, (_, dA_T) = c.rests(first), c.scores(first)
    return [(transposed(dA), y) for dA, y in ((dA_T, c.k_w), (dA_T, rests.y), (rests.dA_T, c.k_w))]


def start_values(c: Chunk, dv):
    """Start the products of A^T do + y dS' in the accumulator dv, [64, 64]. With resets, start those of y dS' alone."""
    n, dS, (A_T, _) = c.p.plan, c.p.tiles.dS, c.scores()
    if not n.resets:
        plgpu.wgmma(dv, A_T, c.do_w)
    for y in (c.k, c.rests().ys):
        for part in range(n.team):
            plgpu.wgmma(dv, y.at[part], dS.at[c.t, half(part), c.mine])


def around(c: Chunk):
    """Return sum_v S' dS', [64], for this warpgroup's channels of K.

    The sum is a loop. In code without a loop the compiler reads everything together, and spills what has no registers beside
    the running products.
    """
    s = c.p.tiles

    def add(part, total):
        return total + (read(c.state(s.S, part)) * read(c.state(s.dS, part))).sum(1)

    found = lax.fori_loop(0, c.p.plan.team, add, zeros((64,), BY_ROW))
    return found * c.scan.passes() if c.p.plan.resets else found


# ---- store -----------------------------------------------------------------------------------------------------------


def store_results(c: Chunk, behind_gate, before_gate, edge, dq, dk, dv):
    """Form dg_t = edge + sum_{i >= t} behind_gate_i + sum_{j < t} before_gate_j, store all results, and hand them to *load*.

    behind_gate: [64, 64] in float32, before_gate: the same in bfloat16, by token and channel. edge: [64], by channel. dq, dk,
    dv: [64, 64] in bfloat16. The results overwrite the tiles of the tokens, whose products are done.
    """
    high = high_part(behind_gate)
    c.vector[...] = edge
    c.v_w[...] = high.astype(BF16)
    c.do_w[...] = (behind_gate - high).astype(BF16)
    c.g_w[...] = before_gate
    plgpu.commit_smem()
    suffix, prefix = c.scan.sums()
    dg = product(TILE, (suffix, c.v_w), (suffix, c.do_w), (prefix, c.g_w))
    c.q_w[...] = dq
    c.k_w[...] = dk
    dg = dg + columns(c.vector)
    plgpu.commit_smem()
    c.v_w[...] = dg.astype(BF16)
    c.do_w[...] = dv
    c.hand_over()
