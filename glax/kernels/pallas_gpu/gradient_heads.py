"""The gradient of every chunk and head, for one gate a token and head, or a constant one, or none.

With G the sum of log gates from where the walk enters the chunk, D_ij = e^{G_i - G_j} for j <= i, else 0, S the state before the
chunk, dS = dL/dS behind it, A = scale (q k^T) D and dA = (do v^T) D:

    dq = scale (e^G (do S^T) + dA k)      dk = e^{G_last - G} (v dS^T) + scale dA^T q      dv = A^T do + e^{G_last - G} (k dS)
    dg_t = e^{G_last} sum S dS + scale sum_{i >= t} q_i e^{G_i} (do S^T)_i + sum_{j < t} k_j e^{G_last - G_j} (v dS^T)_j
           + scale sum_{i >= t} (q_i (dA k)_i - k_i (dA^T q)_i)

The mask is inside the exponents, none of which is positive: exact for every gate. The sums over k are rows of the tiles; those
over tokens are a chunk's 64 numbers, left to XLA.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.gradient import (
    SLOTS,
    Sizes,
    compute,
    launch,
    load,
    meet,
    pipeline,
    scratch,
    wait_for_states,
    warpgroups,
)
from glax.kernels.pallas_gpu.gradient_fast import around, bf16, pair, shared, split, store
from glax.kernels.pallas_gpu.gradient_tiles import (
    CHUNK,
    TILE,
    accumulator,
    after,
    along,
    half,
    product,
    tokens,
)
from glax.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, added, by_row, high_part, read, tiled, transposed

TILES = ("q", "k", "v", "do")
LATE = ("v",)  # their places hold what dA loses in bfloat16 until then
BEHIND, THROUGHOUT = range(2)  # sums by token: what is summed over those behind each, and what over the chunk
QUERIES, KEYS = range(2)  # who forms them


def chunk(n: Sizes, m: SimpleNamespace, c: SimpleNamespace, release):
    """Of two warpgroups that share a chunk one forms A^T, dq and dv, the other dA^T and dk: products of 128 columns read their
    left side once."""
    G, last = plgpu.load(m.gates.at[c.at], layout=BY_ROW), m.gates[c.at, m.walk.last]
    up, down = jnp.exp2(G), jnp.exp2(last - G)
    A_T, dA_T, dA_T_rest = m.A_T.at[c.t], m.dA_T.at[c.t], m.v.at[c.other, :, half(0)]

    def decayed(scores):
        """Times e^ of the difference of G at the columns' tokens and at the rows', 0 where the rows' are later."""
        across = along(plgpu.load(m.gates.at[c.at], layout=BY_COLUMN))
        return scores * jnp.exp2(jnp.where(m.walk.earlier(), across - by_row(G, TILE), -jnp.inf))

    def keys_scored():
        A_T[...] = (decayed(product((c.k, transposed(c.q)))) * c.scale).astype(bf16)

    def values_scored():
        dA_T_rest[...] = split(dA_T, decayed(product((c.v, transposed(c.do)))))

    def keys_left():
        m.leaving.at[c.wg][...] = (read(c.k_w) * by_row(down, TILE)).astype(bf16)

    shared(n, c, keys_scored, values_scored)
    if n.run > 1:
        pl.when(c.j < n.run - 1)(keys_left)
    release()
    meet(n, m, c)
    wait_for_states(n, m, c)
    wide = (CHUNK, n.D)
    up, down = by_row(up, wide), by_row(down, wide)

    def note(role, row, x):
        m.vectors.at[c.t, role, row][...] = x

    def queries(last_to_read):
        def products(drawn, through):
            plgpu.wgmma(drawn, c.do, transposed(m.S.at[c.t]))
            plgpu.wgmma(through, c.k, m.dS.at[c.t])
            drawn = after(drawn, 1) * up
            note(QUERIES, THROUGHOUT, around(n, m, c) * jnp.exp2(last))
            drawn = added(drawn, (transposed(dA_T), c.k), (transposed(dA_T_rest), c.k))
            return drawn, after(through) * down

        drawn, through = pl.run_scoped(products, accumulator(wide), accumulator(wide))
        if last_to_read:
            plgpu.barrier_arrive(m.states_free.at[c.t])
        dv = added(through, (A_T, c.do)).astype(bf16)
        used = (read(c.q) * drawn).sum(1)
        note(QUERIES, BEHIND, c.scale * used)
        return dict(dq=(c.q, (c.scale * drawn).astype(bf16)), dv=(c.do, dv)), used

    def keys(alone):
        def products(fed, push):
            plgpu.wgmma(fed, c.v, transposed(m.dS.at[c.t]))
            for d in (dA_T, dA_T_rest):
                plgpu.wgmma(push, d, c.q)
            edge = around(n, m, c) * jnp.exp2(last) if alone else 0.0
            fed = after(fed, 2) * down
            y = read(c.k)
            before = (y * fed).sum(1)  # what comes before a token is all of the chunk but what is behind
            dk = fed + c.scale * after(push)
            plgpu.barrier_arrive(m.states_free.at[c.t])
            note(KEYS, THROUGHOUT, edge + before)
            note(KEYS, BEHIND, -(y * dk).sum(1))
            return dk.astype(bf16)

        return dict(dk=(c.k, pl.run_scoped(products, accumulator(wide), accumulator(wide))))

    def leave(found: dict):
        """Results go where the tokens were, when all products with these are done."""
        meet(n, m, c)
        for tile, x in found.values():
            tile[...] = x
        plgpu.commit_smem()
        store(m, c, {name: tile for name, (tile, _) in found.items()}, slice(None))

    def leave_sums(row):
        total = sum(plgpu.load(m.vectors.at[c.t, role, row], layout=BY_ROW) for role in (QUERIES, KEYS))
        for term, x in enumerate(terms(total)):
            tiles.store(m.sums_g.at[c.b, c.c, c.h, row, term], x)

    def leave_used(used):
        m.used_g[c.b, c.c, c.h] = used

    def of_queries():
        found, used = queries(last_to_read=True)
        leave(found)
        leave_sums(BEHIND)
        leave_used(used)

    def of_keys():
        leave(keys(alone=True))
        leave_sums(THROUGHOUT)

    if n.team == 2:
        shared(n, c, of_queries, of_keys)
    else:
        found, used = queries(last_to_read=False)
        leave(found | keys(alone=False))
        leave_sums(BEHIND)
        leave_sums(THROUGHOUT)
        leave_used(used)
    if n.run > 1:
        pl.when(c.j < n.run - 1)(lambda: carry_on(n, m, c))


def terms(x):
    """x as the sum of two in bfloat16."""
    high = high_part(x)
    return high.astype(bf16), (x - high).astype(bf16)


def carry_on(n, m, c):
    """Puts the state behind the chunk in the place of that before it, when all are done with that: each warpgroup its half of
    the rows."""
    through = jnp.exp2(m.gates[c.at, m.walk.last])
    rows = m.S.at[c.t, c.mine]
    found = product((transposed(m.leaving.at[c.wg]), c.v), shape=(64, n.D))
    rows[...] = (read(rows) * through + found).astype(bf16)
    meet(n, m, c)  # before v's place is lent


def gradient_head(q, k, v, G, d_output, scale, before, behind, *, reverse: bool, programs: int, interpret=None):
    """dq, dk, dv per head, [B, T, H, K] and V; dg, [B, chunks, C, H] in memory order; d_scale, [B, chunks, H].

    G [B, chunks, H, C] float32: sums of log2 gates from where the walk enters the chunk through each token, each gate at
    least -128 log2(e). before [B, runs, H, K, V]: the states that enter the first chunk of every run of as many chunks as
    there are for each. The others as in `gradient_key`.
    """
    B, T, H, D = d_output.shape
    n = Sizes(B, T, H, D, q.shape[2], k.shape[2], v.shape[2], programs, run=behind.shape[1] // before.shape[1], whole=True)
    inputs = dict(gates=G, q=q, k=k, v=v, do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(reverse))
    out = jax.ShapeDtypeStruct
    outputs = {name: out((B, T, H, D), jnp.bfloat16) for name in ("dq", "dk", "dv")}
    outputs |= dict(sums=out((B, n.chunks, H, 2, 2, CHUNK), bf16))
    outputs |= dict(used=out((B, n.chunks, H, CHUNK), jnp.float32))
    memory = scratch(n, TILES, SLOTS) | pipeline(n, len(TILES) + 1)
    memory |= dict(**pair(n), gates=plgpu.SMEM((n.teams * SLOTS, CHUNK), jnp.float32))
    memory |= dict(vectors=plgpu.SMEM((n.teams, 2, 2, CHUNK), jnp.float32))
    if n.run > 1:
        memory["leaving"] = tiled(2, CHUNK, 64)

    def body(m):
        warpgroups(lambda: load(n, m, TILES, LATE), lambda: compute(n, m, TILES, chunk))

    options = dict(interpret=interpret, reverse=reverse, programs=programs)
    *gradients, sums, used = launch("gradient_head", n, body, inputs, outputs, memory, threads=3, **options)
    behind = np.tri(CHUNK, dtype=np.float32) if reverse else np.tri(CHUNK, dtype=np.float32).T
    rows = np.stack([behind, behind, np.ones_like(behind), np.ones_like(behind)], 1)  # as `sums` has them
    rows = jnp.asarray(rows.reshape(CHUNK, -1), bf16)
    sums = sums.reshape(B, n.chunks, H, -1)
    dg = jnp.einsum("bchx,tx->bcth", sums, rows, preferred_element_type=jnp.float32)
    return *gradients, dg, used.sum(3)
