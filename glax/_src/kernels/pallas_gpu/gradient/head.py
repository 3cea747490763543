"""Compute the gradient of every chunk and head, for per-head, constant or no gates.

G is the sum of log gates from where the scan enters the chunk. D_ij = e^{G_i - G_j} for j <= i, else 0. S is the state before
the chunk, and dS = dL/dS behind it. A = scale (q k^T) D and dA = (do v^T) D:

    dq = scale (e^G (do S^T) + dA k)      dk = e^{G_last - G} (v dS^T) + scale dA^T q      dv = A^T do + e^{G_last - G} (k dS)
    dg_t = e^{G_last} sum S dS + scale sum_{i >= t} q_i e^{G_i} (do S^T)_i + sum_{j < t} k_j e^{G_last - G_j} (v dS^T)_j
           + scale sum_{i >= t} (q_i (dA k)_i - k_i (dA^T q)_i)

The mask is inside the exponents, none of which is positive, so the gradient is exact for every gate. The kernel forms the sums
over channels. The sums over the 64 tokens of a chunk are left to XLA.

Roles. *load* is one warpgroup, and *compute* two. With D = 128 both share a chunk: one forms A^T, dq and dv (`Chunk.queries`),
and the other dA^T and dk (`Chunk.keys`). Their products have all columns, so each reads its left side once. With D = 64 each has
a chunk of its own, and does both.

Memory. Tiles of tokens lie in two slots a team. What dA loses in bfloat16 lies in the next chunk's tile of v, which is therefore
loaded late. Results overwrite tokens: dq q, dk k, and dv do. In a run of chunks only the first has a stored S: *compute* replaces
it by the state behind the chunk (`Chunk.advance_state`). Who waits for whom:

    waits    for      until
    compute  compute  met
    compute  load     tokens full: q, k, do, v, gates
    load     compute  results full
    compute  load     results free
    compute  load     states full: dS
    load     compute  states free
    compute  load     S full: S
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import SUMS_WITHIN_WARPS, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Meeting, Pipeline, Ring, acting_as
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    added,
    after,
    by_row,
    high_part,
    load_rows,
    product,
    read,
    transposed,
)
from glax._src.kernels.pallas_gpu.gradient import items
from glax._src.kernels.pallas_gpu.gradient.items import (
    BF16,
    SLOTS,
    TILE,
    Items,
    Program,
    ScanOrder,
    accumulator,
    along,
    half,
    store_rounded,
    tokens,
)
from glax._src.kernels.pallas_gpu.plan import WHOLE, Blocks, C, span

# Rows of numbers that are summed for every token: over it and those behind it, over the chunk, over those before it. BEFORE
# is summed for itself. All less what is behind would cancel: the last token's part may be e^-g times the other tokens' parts.
# BEFORE stays in registers: at widths of 128 shared memory has no room for it.
BEHIND, EDGE, BEFORE = range(3)
QUERIES, KEYS = range(2)  # the role that forms the rows

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory: tokens, the gates' sums, states and dL/dS. Each field's comment has
    its shape.

    H counts the blocks of heads and `heads` the heads of the gates or of the output; HQ, HK and HV are the numbers of heads of
    q, k and v.
    """

    gates: Ref  # [B, chunks, heads, C]: G
    q: Ref  # [B, T, HQ, D]
    k: Ref  # [B, T, HK, D]
    v: Ref  # [B, T, HV, D]
    do: Ref  # [B, T, heads, D]: the gradient of the output
    scale: Ref  # [B + 1]
    S: Ref  # [B, runs, H, D, D]: the state before a run of chunks
    dS: Ref  # [B, chunks, H, D, D]: the gradient of the state behind a chunk
    tokens: Ref  # [C]: `items.tokens`
    # With edges: `rows.Edges.block`, and the copies of the tokens' arrays.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, D]
    k_edges: Ref = None  # [B, 3 C, HK, D]
    v_edges: Ref = None  # [B, 3 C, HV, D]
    do_edges: Ref = None  # [B, 3 C, heads, D]


class Results(NamedTuple):
    """Hold references to the results, in global memory: the gradients, and by token the terms of dg and of d_scale. Each
    field's comment has its shape."""

    dq: Ref  # [B, T, H, D]
    dk: Ref  # [B, T, H, D]
    dv: Ref  # [B, T, H, D]
    sums: Ref  # [B, chunks, H, 3, 2, C]: the numbers that dg sums over tokens, in two terms
    d_scale: Ref  # [B, chunks, H, C]: q dq / scale by token

    @classmethod
    def types(cls, n: Items) -> "Results":
        """Return the shapes and dtypes of the results for the plan n."""
        of_keys, of_values = (jax.ShapeDtypeStruct((n.B, n.T, n.H, width), BF16) for width in n.in_memory)
        sums = jax.ShapeDtypeStruct((n.B, n.chunks, n.H, 3, 2, C), BF16)
        return cls(of_keys, of_keys, of_values, sums, jax.ShapeDtypeStruct((n.B, n.chunks, n.H, C), jnp.float32))


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. Tiles of tokens have two slots for each team. Each field's comment has
    its shape."""

    q: Ref  # [slots, C, D]: q, then dq
    k: Ref  # k, then dk
    v: Ref  # v, then what the dA of the chunk before loses
    do: Ref  # do, then dv
    S: Ref  # [teams, D, D]
    dS: Ref  # [teams, D, D]
    sums: Ref  # [teams, 2, 2, C] float32: by role, numbers that are summed over tokens
    A_T: Ref  # [teams, C, C]
    dA_T: Ref  # [teams, C, C]
    gates: Ref  # [slots, C] float32
    leaving: Ref  # [2, C, 64], of each warpgroup: k decayed to the end of the chunk, in runs

    @classmethod
    def types(cls, n: Items) -> "Tiles":
        """Return the shapes and dtypes of the tiles for the plan n."""
        tiled = functools.partial(tiles.tiled, columns=n.tile)
        tile, state = tiled(n.teams * SLOTS, C, n.D), tiled(n.teams, n.D, n.D)
        scores = tiled(n.teams, C, 64)
        return cls(
            *(tile,) * 4,
            *(state,) * 2,
            sums=plgpu.SMEM((n.teams, 2, 2, C), jnp.float32),
            A_T=scores,
            dA_T=scores,
            gates=plgpu.SMEM((n.teams * SLOTS, C), jnp.float32),
            leaving=tiled(2, C, 64) if n.run > 1 else None,
        )


@dataclass(frozen=True)
class HeadPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    met: the warpgroups that share a chunk. tokens: the tiles of tokens of a slot. states: S and dS. They count as read when all
    products of the chunk with them and with v are done, so that also the next v may be loaded. S: in runs, where only a run's
    first chunk loads it. results: full once they are in shared memory, and free once they have left it.
    """

    met: Meeting
    tokens: Ring
    results: Ring
    states: Ring
    S: Ring | None

    ORDER = ("met.all_there", "tokens.full", "results.free", "states.free", "results.full", "S.full", "states.full")

    @classmethod
    def planned(cls, n: Items) -> "HeadPipeline":
        """Build the pipeline for the sizes n; its barriers are allocated at launch."""
        load, compute, teams = ("load",), ("compute",), n.teams
        return cls(
            met=Meeting(compute, teams=teams),
            tokens=Ring(teams * SLOTS, load, compute, ("q", "k", "do", "v", "gates"), released_by=(), teams=teams),
            results=Ring(teams, compute, load, teams=teams),
            states=Ring(teams, load, compute, ("dS",) if n.run > 1 else ("dS", "S"), teams=teams),
            S=Ring(teams, load, compute, ("S",), released_by=(), teams=teams) if n.run > 1 else None,
        )


def gradient_head(
    q, k, v, G, d_output, scale, before, behind, *,
    reverse: bool, programs: int, blocks: Blocks = WHOLE, edges=(), rows: int = 0,
):  # fmt: skip
    """Return each block's terms: dq, dk, dv, [B, T or rows, H, D] in bfloat16; dg, [B, chunks, C, H] in memory order, and
    d_scale by token, [B, chunks, H, C], in float32.

    q, k, v, d_output: [B, T, heads, D] in bfloat16, by block. Their heads divide those of the states. G: [B, chunks, heads, C]
    float32, sums of log2 gates from where the scan enters the chunk through each token, each gate at least -128 log2(e). scale:
    [B + 1] in float32, of which the last number is not used. before: [B, runs, H, D, D] in bfloat16, the states that enter the
    first chunk of every run; the runs of a sequence have equally many chunks. behind: [B, chunks, H, D, D] in bfloat16, the
    gradient of the state that leaves each chunk. programs: the number of multiprocessors. edges: `Edges.block`, and the copies
    of q, k, v and d_output, if some chunks are read from copies. rows: the number of rows of the results, where the operands
    have fewer because the last chunk is read from a copy.
    """
    (B, T), (_, chunks, H, *_) = d_output.shape[:2], behind.shape
    heads, run = tuple(x.shape[2] for x in (q, k, v)), chunks // before.shape[1]
    n = Items(B, rows or T, H, behind.shape[3:], heads, programs, reverse, blocks, run=run, edges=bool(edges))
    operands = Operands(G, q, k, v, d_output, scale, before, behind, tokens(reverse), *edges)

    def body(*refs):
        p = Program(n, *refs)
        items.warpgroups(functools.partial(load, p), acting_as("compute")(functools.partial(compute, p)))

    *gradients, sums, d_scale = launch(
        "gradient_head", n, body, operands, Results.types(n), (Tiles.types(n),), items.ROLES, HeadPipeline.planned(n),
        programs=programs, is_longest=True, params=SUMS_WITHIN_WARPS,
    )  # fmt: skip
    onward = np.tri(C) if reverse else np.tri(C).T
    weights = np.stack([onward, np.ones_like(onward), 1 - onward], 1)
    weights = np.repeat(weights, 2, axis=1)  # for the rows of `sums`, each in two terms
    weights, sums = jnp.asarray(weights.reshape(C, -1), BF16), sums.reshape(B, n.chunks, H, -1)
    dg = jnp.einsum("bchx,tx->bcth", sums, weights, preferred_element_type=jnp.float32)
    return *gradients, dg, d_scale


# ---- load and store to global memory ---------------------------------------------------------------------------------


def load(p: Program):
    """Run the loading warpgroup: copy the chunks' tokens, gates and states to shared memory, and their results back."""
    n, x, s, pipeline = p.plan, p.operands, p.tiles, p.pipeline

    def load_tokens(names, program, i, t: int):
        """Load the tokens of chunk i of team t, of the arrays `names`, which are q, k, v or do.

        Their position is computed at each use, because the warpgroup has few registers.
        """
        (b, _, c, h, _), at = n.chunk_of(program, i, t), n.slot(i, t)
        heads = n.heads_of(h)
        arrays = dict(q=(x.q, x.q_edges, s.q), k=(x.k, x.k_edges, s.k))
        arrays |= dict(v=(x.v, x.v_edges, s.v), do=(x.do, x.do_edges, s.do))

        def load(rows, from_copy: bool):
            for name in names:
                array, edges, tile = arrays[name]
                columns = span(0, n.D, array.shape[3])
                source = (edges if from_copy else array).at[b, rows, heads[name], columns]
                pipeline.tokens.copy(source, tile.at[at], at)

        load_rows(x.edges, c, load)

    def load_early(program, i, t: int):
        load_tokens(("q", "k", "do"), program, i, t)

    def load_late(program, i, t: int):
        b, run, c, h, j = n.chunk_of(program, i, t)
        pl.when(i >= 1)(lambda: pipeline.states.acquire(t))
        load_tokens(("v",), program, i, t)
        gates, tile = x.gates.at[b, c, n.blocks.head(h)], s.gates.at[n.slot(i, t)]
        pipeline.tokens.copy(gates, tile, n.slot(i, t))
        pipeline.states.copy(x.dS.at[b, c, h, *n.block], s.dS.at[t], t)

        @pl.when(j == 0)
        def _():
            ring = pipeline.states if n.run == 1 else pipeline.S
            ring.copy(x.S.at[b, run, h, *n.block], s.S.at[t], t)

    def store(program, i, t: int):
        b, _, c, h, _ = n.chunk_of(program, i, t)
        pipeline.results.wait(t)
        for result, tile in zip(p.results[:3], (s.q, s.k, s.do), strict=True):
            at = n.slot(i, t)
            target = result.at[b, pl.ds(c * C, C), h, span(0, n.D, result.shape[3])]
            plgpu.copy_smem_to_gmem(tile.at[at], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    items.load_chunks(p, load_early, load_late, store)


# ---- compute ---------------------------------------------------------------------------------------------------------


def compute(p: Program):
    """Run a computing warpgroup: write the gradients of all chunks of its team."""
    _, first = items.first_item(p.plan)
    items.compute_chunks(p.plan, first, functools.partial(compute_chunk, p))


def compute_chunk(p: Program, first, i):
    """Compute the gradients of one chunk, the team's i-th. first: the number of the team's first item."""
    n, c = p.plan, Chunk(**Chunk.place(p, first, i))
    p.pipeline.tokens.wait(c.at)
    c.share(c.store_key_scores, c.store_value_scores)
    c.wait_for_states()

    def of_queries():
        found, d_scale = c.queries()
        c.store(found, {BEHIND: None})
        p.results.d_scale[c.b, c.c, c.h] = d_scale

    def of_keys():
        found, before = c.keys()
        c.store(found, {BEFORE: before, EDGE: None})

    if c.apart:
        c.share(of_queries, of_keys)
    else:
        found, d_scale = c.queries()
        keys, before = c.keys()
        c.store(found | keys, {BEHIND: None, BEFORE: before, EDGE: None})
        p.results.d_scale[c.b, c.c, c.h] = d_scale
    if n.run > 1:
        pl.when(c.j < n.run - 1)(c.advance_state)


@dataclass(frozen=True)
class Chunk(items.Chunk):
    """Hold the chunk and head that a computing warpgroup processes, alone or with the other one, and compute its gradients."""

    @property
    def scan(self) -> ScanOrder:
        """Return the masks over the chunk's tokens."""
        return ScanOrder(self.p.plan.reverse, self.p.operands.tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of a tile of tokens, (C, D)."""
        return C, self.p.plan.D

    @property
    def apart(self) -> bool:
        """Return whether two warpgroups share the chunk, one as *queries* and one as *keys*."""
        return self.p.plan.team == 2

    @property
    def k_w(self):
        """Return a view of the warpgroup's 64 channels of k in shared memory, [C, 64]."""
        return self.k.at[:, self.mine]

    @property
    def scores(self) -> tuple:
        """Return (tile of A^T, (tile of dA^T, tile of what dA^T loses in bfloat16)), [C, 64] each in shared memory."""
        s = self.p.tiles
        return s.A_T.at[self.t], (s.dA_T.at[self.t], s.v.at[self.other, :, half(0)])

    def gates(self):
        """Load G [64], as logarithms to base 2, into registers by row."""
        return plgpu.load(self.p.tiles.gates.at[self.at], layout=BY_ROW)

    def through(self):
        """Return the log decay through the whole chunk to base 2, a number."""
        return self.p.tiles.gates[self.at, self.scan.last]

    def leaving(self, shape):
        """Return e^{G_last - G} by row, repeated over the columns of `shape`."""
        return by_row(jnp.exp2(self.through() - self.gates()), shape)

    def decayed(self, scores):
        """Return scores * e^{G_column - G_row}, with 0 where the row's token is later than the column's. scores: transposed,
        [C, 64] in float32."""
        across = along(plgpu.load(self.p.tiles.gates.at[self.at], layout=BY_COLUMN))
        exponent = jnp.where(self.scan.earlier(), across - by_row(self.gates(), TILE), -jnp.inf)
        return scores * jnp.exp2(exponent)

    def store_key_scores(self):
        """Store A^T = scale (k q^T) D^T in shared memory, in bfloat16. The function does not wait."""
        A_T, _ = self.scores
        A_T[...] = (self.decayed(product(TILE, (self.k, transposed(self.q)))) * self.scale).astype(BF16)

    def store_value_scores(self):
        """Store dA^T = (v do^T) D^T in shared memory, in two terms of bfloat16. The function does not wait."""
        _, (dA_T, rest) = self.scores
        rest[...] = store_rounded(dA_T, self.decayed(product(TILE, (self.v, transposed(self.do)))))

    def wait_for_scores(self):
        """Wait until the warpgroups that share the chunk have stored their scores, and the results of the chunk before have
        left shared memory. Before, store e^{G_last - G} k of this warpgroup's channels, except at a run's last chunk."""
        n, s = self.p.plan, self.p.tiles

        def store_leaving():
            """Store e^{G_last - G} k, from which `advance_state` forms the state behind the chunk."""
            s.leaving.at[self.wg][...] = (read(self.k_w) * self.leaving(TILE)).astype(BF16)

        if n.run > 1:
            pl.when(self.j < n.run - 1)(store_leaving)
        self.wait_until_stored()
        self.meet()

    def note(self, role: int, row: int, x):
        """Store x [64], a number for each token, in shared memory: in row `row` of the sums of `role`, QUERIES or KEYS. `store`
        adds both roles' numbers, and writes them to global memory."""
        self.p.tiles.sums.at[self.t, role, row][...] = x

    def noted(self, row: int):
        """Return the sum of what the roles stored in row `row` by `note`, [64] by row. With one warpgroup for a chunk, only
        QUERIES stores the row EDGE."""
        roles = (QUERIES, KEYS) if row == BEHIND or self.apart else (QUERIES,)
        return sum(plgpu.load(self.p.tiles.sums.at[self.t, role, row], layout=BY_ROW) for role in roles)

    def around(self):
        """Return e^{G_last} sum_v S dS, [64], for the channels of K that this warpgroup has.

        The sum is code without a loop, for which registers suffice here.
        """
        s = self.p.tiles
        parts = [(self.t, self.mine, half(part)) for part in range(self.p.plan.team)]
        return sum((read(s.S.at[x]) * read(s.dS.at[x])).sum(1) for x in parts) * jnp.exp2(self.through())

    def queries(self):
        """Return dict(dq, dv), [C, D] each in bfloat16 registers, and q dq / scale by token, [64]. Store terms of dg by `note`.

        The function waits in `wait_for_scores` while its first products run. If two warpgroups share the chunk, it reports that
        the states are read.
        """
        s = self.p.tiles
        A_T, dA_T = self.scores

        def products(dq, dv):
            plgpu.wgmma(dq, self.do, transposed(s.S.at[self.t]))
            plgpu.wgmma(dv, self.k, s.dS.at[self.t])
            self.wait_for_scores()
            dq = after(dq, 1) * by_row(jnp.exp2(self.gates()), self.shape)
            self.note(QUERIES, EDGE, self.around())
            dq = added(dq, *((transposed(term), self.k) for term in dA_T))
            return dq, after(dv) * self.leaving(self.shape)

        dq, dv = pl.run_scoped(products, accumulator(self.shape), accumulator(self.shape))
        if self.apart:
            self.p.pipeline.states.release(self.t)
        dv = added(dv, (A_T, self.do)).astype(BF16)
        d_scale = (read(self.q) * dq).sum(1)
        self.note(QUERIES, BEHIND, self.scale * d_scale)
        return dict(dq=(self.scale * dq).astype(BF16), dv=dv), d_scale

    def keys(self):
        """Return dict(dk), [C, D] in bfloat16 registers, and k . (e^{G_last - G} v dS^T) by token, [64]. Store terms of dg by
        `note`, and report that the states are read.

        If two warpgroups share the chunk, the function waits in `wait_for_scores` while its first product runs.
        """
        s = self.p.tiles
        _, dA_T = self.scores

        def products(behind, pairs):
            plgpu.wgmma(behind, self.v, transposed(s.dS.at[self.t]))
            if self.apart:
                self.wait_for_scores()
            for term in dA_T:
                plgpu.wgmma(pairs, term, self.q)
            if self.apart:
                self.note(KEYS, EDGE, self.around())
            behind = after(behind, len(dA_T)) * self.leaving(self.shape)
            k = read(self.k)
            before = (k * behind).sum(1)
            pairs = self.scale * after(pairs)
            self.p.pipeline.states.release(self.t)
            self.note(KEYS, BEHIND, -(k * pairs).sum(1))
            return (behind + pairs).astype(BF16), before

        dk, before = pl.run_scoped(products, accumulator(self.shape), accumulator(self.shape))
        return dict(dk=dk), before

    def store(self, found: dict, rows: dict):
        """Store the results in the tiles of the tokens, once all products with these are done, and hand them to *load*. Then
        write terms of dg to `Results.sums`.

        found: the results by name, dq, dk or dv. rows: by row of `sums` (BEHIND, EDGE or BEFORE) numbers by token [64], or None
        for those that `note` stored.
        """
        of_result = dict(dq=self.q, dk=self.k, dv=self.do)
        self.meet()
        for name, x in found.items():
            of_result[name][...] = x
        self.hand_over()
        for row, x in rows.items():  # stored last, because fences wait for stores to global memory
            total = self.noted(row) if x is None else x
            high = high_part(total)
            for term, x in enumerate((high, total - high)):
                tiles.store(self.p.results.sums.at[self.b, self.c, self.h, row, term], x.astype(BF16))

    def advance_state(self):
        """Replace the state before the chunk by the state behind it, once all warpgroups are done with it. Each warpgroup forms
        half of the rows."""
        s = self.p.tiles
        rows = s.S.at[self.t, self.mine]
        found = product((64, self.p.plan.D), (transposed(s.leaving.at[self.wg]), self.v))
        rows[...] = (read(rows) * jnp.exp2(self.through()) + found).astype(BF16)
        self.meet()  # before the tile of v is reused
