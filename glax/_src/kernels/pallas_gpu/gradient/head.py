"""Compute the gradient of every chunk and head, for per-head, constant or no gates.

G is the sum of log gates from where the scan enters the chunk. D_ij = e^{G_i - G_j} for j <= i, else 0. S is the state before
the chunk, and dS = dL/dS behind it. A = scale (q k^T) D and dA = (do v^T) D:

    dq = scale (e^G (do S^T) + dA k)      dk = e^{G_last - G} (v dS^T) + scale dA^T q      dv = A^T do + e^{G_last - G} (k dS)
    dg_t = e^{G_last} sum S dS + scale sum_{i >= t} q_i e^{G_i} (do S^T)_i + sum_{j < t} k_j e^{G_last - G_j} (v dS^T)_j
           + scale sum_{i >= t} (q_i (dA k)_i - k_i (dA^T q)_i)

The mask is inside the exponents, none of which is positive, so the gradient is exact for every gate. The kernel forms the sums
over channels. The sums over the 64 tokens of a chunk are left to XLA.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    added,
    after,
    by_row,
    high_part,
    read,
    tiled,
    transposed,
)
from glax._src.kernels.pallas_gpu.gradient.items import (
    SLOTS,
    Sizes,
    compute,
    hand_over,
    launch,
    load,
    meet,
    pipeline,
    scratch,
    wait_for_states,
    warpgroups,
)
from glax._src.kernels.pallas_gpu.gradient.key_chunk import bf16, pair, shared, split
from glax._src.kernels.pallas_gpu.gradient.refs import ChunkRefs, GradientRefs
from glax._src.kernels.pallas_gpu.gradient.tiles import (
    CHUNK,
    TILE,
    accumulator,
    along,
    half,
    product,
    tokens,
)
from glax._src.kernels.pallas_gpu.plan import WHOLE, Blocks

TILES = ("q", "k", "v", "do")
RESULTS = dict(dq="q", dk="k", dv="do")
LATE = ("v",)  # until these are loaded, their tiles hold what dA loses in bfloat16
# Rows of numbers that are summed for every token: over it and those behind it, over the chunk, over those before it. The last is
# never all less what is behind: the last token's part is full where the other tokens' parts may be e^g of it.
# BEFORE stays in registers: at widths of 128 shared memory has no room for it.
BEHIND, EDGE, BEFORE = range(3)
QUERIES, KEYS = range(2)  # the role that forms the rows


@dataclass(frozen=True)
class Chunk:
    """Compute one chunk and head, by one warpgroup or by two.

    Of two warpgroups, one forms A^T, dq and dv, and the other dA^T and dk. Their products have all columns, so each reads its
    left side once.
    """

    n: Sizes
    m: GradientRefs
    c: ChunkRefs
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of a tile of tokens."""
        return CHUNK, self.n.D

    @property
    def apart(self) -> bool:
        """Return whether another warpgroup has the other role."""
        return self.n.team == 2

    @property
    def scores(self) -> tuple:
        """Return the tiles of A^T, and of dA^T in two terms."""
        m, c = self.m, self.c
        return m.A_T.at[c.t], (m.dA_T.at[c.t], m.v.at[c.other, :, half(0)])

    def gates(self):
        """Return G [64], by row."""
        return plgpu.load(self.m.gates.at[self.c.at], layout=BY_ROW)

    def through(self):
        """Return the log2 decay through the whole chunk."""
        return self.m.gates[self.c.at, self.m.scan.last]

    def leaving(self, shape):
        """Return e^{G_last - G}, repeated along the rows."""
        return by_row(jnp.exp2(self.through() - self.gates()), shape)

    def decayed(self, scores):
        """Return transposed scores times e^{G_column - G_row}, and 0 where the row's token is later than the column's."""
        across = along(plgpu.load(self.m.gates.at[self.c.at], layout=BY_COLUMN))
        exponent = jnp.where(self.m.scan.earlier(), across - by_row(self.gates(), TILE), -jnp.inf)
        return scores * jnp.exp2(exponent)

    def key_scores(self):
        """Store A^T = scale (k q^T) D^T in bfloat16."""
        A_T, _ = self.scores
        A_T[...] = (self.decayed(product((self.c.k, transposed(self.c.q)))) * self.c.scale).astype(bf16)

    def value_scores(self):
        """Store dA^T = (v do^T) D^T in two terms."""
        _, (dA_T, rest) = self.scores
        rest[...] = split(dA_T, self.decayed(product((self.c.v, transposed(self.c.do)))))

    def scored(self):
        """Wait until all warpgroups have written their scores, and the results of the chunk before have left shared memory."""
        n, m, c = self.n, self.m, self.c

        def keys_left():
            """Store e^{G_last - G} k, from which `carry_on` forms the state behind the chunk."""
            m.leaving.at[c.wg][...] = (read(c.k_w) * self.leaving(TILE)).astype(bf16)

        if n.run > 1:
            pl.when(c.j < n.run - 1)(keys_left)
        self.release()
        meet(n, m, c)

    def note(self, role: int, row: int, x):
        """Store numbers by token, x [64], which `leave` sums over tokens."""
        self.m.vectors.at[self.c.t, role, row][...] = x

    def noted(self, row: int):
        """Return the sum over the roles of the numbers that `note` stored, [64]."""
        roles = (QUERIES, KEYS) if row == BEHIND or self.apart else (QUERIES,)
        return sum(plgpu.load(self.m.vectors.at[self.c.t, role, row], layout=BY_ROW) for role in roles)

    def around(self):
        """Return e^{G_last} sum_v S dS, [64], for the warpgroup's own half of K. Registers suffice for code without a loop."""
        m, c = self.m, self.c
        parts = [(c.t, c.mine, half(p)) for p in range(self.n.team)]
        return sum((read(m.S.at[x]) * read(m.dS.at[x])).sum(1) for x in parts) * jnp.exp2(self.through())

    def queries(self):
        """Return dq and dv, and q dq / scale by token."""
        m, c = self.m, self.c
        A_T, dA_T = self.scores

        def products(drawn, through):
            plgpu.wgmma(drawn, c.do, transposed(m.S.at[c.t]))
            plgpu.wgmma(through, c.k, m.dS.at[c.t])
            self.scored()
            drawn = after(drawn, 1) * by_row(jnp.exp2(self.gates()), self.shape)
            self.note(QUERIES, EDGE, self.around())
            drawn = added(drawn, *((transposed(term), c.k) for term in dA_T))
            return drawn, after(through) * self.leaving(self.shape)

        drawn, through = pl.run_scoped(products, accumulator(self.shape), accumulator(self.shape))
        if self.apart:
            plgpu.barrier_arrive(m.states_free.at[c.t])
        dv = added(through, (A_T, c.do)).astype(bf16)
        used = (read(c.q) * drawn).sum(1)
        self.note(QUERIES, BEHIND, c.scale * used)
        return dict(dq=(c.scale * drawn).astype(bf16), dv=dv), used

    def keys(self):
        """Return dk, and by token the terms of k dk from behind the chunk."""
        m, c = self.m, self.c
        _, dA_T = self.scores

        def products(fed, push):
            plgpu.wgmma(fed, c.v, transposed(m.dS.at[c.t]))
            if self.apart:
                self.scored()
            for term in dA_T:
                plgpu.wgmma(push, term, c.q)
            if self.apart:
                self.note(KEYS, EDGE, self.around())
            fed = after(fed, len(dA_T)) * self.leaving(self.shape)
            y = read(c.k)
            before = (y * fed).sum(1)
            push = c.scale * after(push)
            plgpu.barrier_arrive(m.states_free.at[c.t])
            self.note(KEYS, BEHIND, -(y * push).sum(1))
            return (fed + push).astype(bf16), before

        dk, before = pl.run_scoped(products, accumulator(self.shape), accumulator(self.shape))
        return dict(dk=dk), before

    def leave(self, found: dict, rows: dict):
        """Store results in the tiles of the tokens, once all products with these are done. rows: numbers to be summed over
        tokens, or None for those that `note` stored."""
        n, m, c = self.n, self.m, self.c
        meet(n, m, c)
        for name, x in found.items():
            c.tiles[RESULTS[name]][...] = x
        hand_over(m, c)
        for row, x in rows.items():  # stored last, because fences wait for stores to global memory
            total = self.noted(row) if x is None else x
            high = high_part(total)
            for term, x in enumerate((high, total - high)):
                tiles.store(m.sums_g.at[c.b, c.c, c.h, row, term], x.astype(bf16))

    def carry_on(self):
        """Replace the state before the chunk by the state behind it, once all warpgroups are done with it. Each warpgroup forms
        half of the rows."""
        m, c = self.m, self.c
        rows = m.S.at[c.t, c.mine]
        found = product((transposed(m.leaving.at[c.wg]), c.v), shape=(64, self.n.D))
        rows[...] = (read(rows) * jnp.exp2(self.through()) + found).astype(bf16)
        meet(self.n, m, c)  # before the tile of v is reused


def chunk(n: Sizes, m: GradientRefs, c: ChunkRefs, release):
    """Compute one chunk. release() waits until the results of the chunk before have left shared memory."""
    x = Chunk(n, m, c, release)
    shared(n, c, x.key_scores, x.value_scores)
    wait_for_states(n, m, c)

    def of_queries():
        found, used = x.queries()
        x.leave(found, {BEHIND: None})
        m.used_g[c.b, c.c, c.h] = used

    def of_keys():
        found, before = x.keys()
        x.leave(found, {BEFORE: before, EDGE: None})

    if x.apart:
        shared(n, c, of_queries, of_keys)
    else:
        found, used = x.queries()
        keys, before = x.keys()
        x.leave(found | keys, {BEHIND: None, BEFORE: before, EDGE: None})
        m.used_g[c.b, c.c, c.h] = used
    if n.run > 1:
        pl.when(c.j < n.run - 1)(x.carry_on)


def gradient_head(
    q, k, v, G, d_output, scale, before, behind, *,
    reverse: bool, programs: int, blocks: Blocks = WHOLE, edges=(), rows: int = 0, interpret=None,
):  # fmt: skip
    """Return each block's terms: dq, dk, dv, [B, T or rows, H, D] in bfloat16; dg, [B, chunks, C, H] in memory order, and d_scale
    by token, [B, chunks, H, C], in float32.

    G: [B, chunks, heads, C] float32, sums of log2 gates from where the scan enters the chunk through each token, each gate at
    least -128 log2(e). before: [B, runs, H, D, D], the states that enter the first chunk of every run; the runs of a sequence
    have equally many chunks. edges: `Edges.block`, and the copies of q, k, v and d_output, if some chunks are read from copies.
    rows: of the results, where the operands have fewer, because the last chunk is read from a copy.
    The other arguments are as in `gradient_key`.
    """
    (B, T), (_, chunks, H, D, _) = d_output.shape[:2], behind.shape
    T = rows or T
    heads, run = (x.shape[2] for x in (q, k, v)), chunks // before.shape[1]
    n = Sizes(B, T, H, D, *heads, programs, run=run, whole=True, blocks=blocks, edges=bool(edges))
    inputs = dict(gates=G, q=q, k=k, v=v, do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(reverse))
    inputs |= dict(zip(("edges", *(f"{name}_edges" for name in TILES)), edges, strict=True)) if edges else {}
    out = jax.ShapeDtypeStruct
    outputs = {name: out((B, T, H, D), jnp.bfloat16) for name in ("dq", "dk", "dv")}
    outputs |= dict(sums=out((B, n.chunks, H, 3, 2, CHUNK), bf16))
    outputs |= dict(used=out((B, n.chunks, H, CHUNK), jnp.float32))
    memory = scratch(n, TILES, SLOTS) | pipeline(n, len(TILES) + 1)
    memory |= dict(**pair(n), gates=plgpu.SMEM((n.teams * SLOTS, CHUNK), jnp.float32))
    memory |= dict(vectors=plgpu.SMEM((n.teams, 2, 2, CHUNK), jnp.float32))
    if n.run > 1:
        memory["leaving"] = tiled(2, CHUNK, 64)

    def body(m):
        warpgroups(lambda: load(n, m, TILES, RESULTS, LATE), lambda: compute(n, m, TILES, chunk))

    options = dict(interpret=interpret, reverse=reverse, programs=programs)
    *gradients, sums, used = launch("gradient_head", n, body, inputs, outputs, memory, threads=3, **options)
    onward = np.tri(CHUNK) if reverse else np.tri(CHUNK).T
    weights = np.repeat(
        np.stack([onward, np.ones_like(onward), 1 - onward], 1), 2, axis=1
    )  # for the rows of `sums`, each in two terms
    weights, sums = jnp.asarray(weights.reshape(CHUNK, -1), bf16), sums.reshape(B, n.chunks, H, -1)
    dg = jnp.einsum("bchx,tx->bcth", sums, weights, preferred_element_type=jnp.float32)
    return *gradients, dg, used
