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
from glax.kernels.pallas_gpu.gradient_fast import around, bf16, own_states, pair, scores, shared, split, store
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
from glax.kernels.pallas_gpu import tiles
from glax.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, added, by_row, high_part, read, tiled, transposed

TILES = ("q", "k", "v", "do")
LATE = ("v",)  # their places hold what dA loses in bfloat16 until then
SUMS = 2  # rows of 64: what is summed over the tokens behind each, and what over the chunk


def chunk(n: Sizes, m: SimpleNamespace, c: SimpleNamespace, release):
    """Two warpgroups that share a chunk form one of the scores each, A^T and dA^T."""
    G, last = plgpu.load(m.gates.at[c.at], layout=BY_ROW), m.gates[c.at, m.walk.last]
    up, down = jnp.exp2(G), jnp.exp2(last - G)
    A_T, dA_T, dA_T_rest = m.A_T.at[c.t], m.dA_T.at[c.t], m.v.at[c.other, lax.div(c.w, n.team)]

    def decayed(scores):
        """Times e^ of the difference of G at the columns' tokens and at the rows', 0 where the rows' are later."""
        across = along(plgpu.load(m.gates.at[c.at], layout=BY_COLUMN))
        return scores * jnp.exp2(jnp.where(m.walk.earlier(), across - by_row(G, TILE), -jnp.inf))

    def keys_scored():
        A_T[...] = (decayed(scores(n, c.k, c.q)) * c.scale).astype(bf16)

    def values_scored():
        dA_T_rest[...] = split(dA_T, decayed(scores(n, c.v, c.do)))

    def keys_left():
        m.leaving.at[c.wg][...] = (read(c.k_w) * by_row(down, TILE)).astype(bf16)

    shared(n, c, keys_scored, values_scored)
    if n.run > 1:
        pl.when(c.j < n.run - 1)(keys_left)
    release()
    meet(n, m, c)
    wait_for_states(n, m, c)

    def products(push, fed, through, drawn):
        start(n, m, c, (dA_T, dA_T_rest), push, fed, through, drawn)
        drawn = after(drawn, 2 * n.team + 2) * by_row(up, TILE)
        push, fed = after(push, 2 * n.team), after(fed, n.team) * by_row(down, TILE)
        y = read(c.k_w)
        before = (y * fed).sum(1)  # what comes before a token is all of the chunk but what is behind
        less = c.scale * (y * push).sum(1) + before
        dk, less, before = lax.optimization_barrier(((fed + c.scale * push).astype(bf16), less, before))
        edge = around(n, m, c) * jnp.exp2(last)
        m.vectors.at[c.wg, 1][...] = edge + before
        through = after(through) * by_row(down, TILE)
        drawn = added(drawn, (transposed(dA_T), c.k_w), (transposed(dA_T_rest), c.k_w))
        plgpu.barrier_arrive(m.states_free.at[c.t])
        if n.run > 1:
            pl.when(c.j < n.run - 1)(lambda: carry_on(n, m, c))
        return less, dk, through, drawn

    less, dk, through, drawn = pl.run_scoped(products, *[accumulator()] * 4)
    dv = added(through, (A_T, c.do_w)).astype(bf16)
    used = (read(c.q_w) * drawn).sum(1)
    m.vectors.at[c.wg, 0][...] = c.scale * used - less
    meet(n, m, c)
    c.q_w[...] = (c.scale * drawn).astype(bf16)
    c.k_w[...] = dk
    c.do_w[...] = dv
    plgpu.commit_smem()
    store(m, c, dict(dq=c.q_w, dk=c.k_w, dv=c.do_w))
    rows = range(SUMS) if n.team == 1 else (c.w,)
    for row in rows:
        total = sum(plgpu.load(m.vectors.at[c.t * n.team + p, row], layout=BY_ROW) for p in range(n.team))
        for term, x in enumerate(terms(total)):
            tiles.store(m.sums_g.at[c.b, c.c, c.h, row, term], x)
    m.used_g[c.b, c.c, c.h, c.w] = used


def terms(x):
    """x as the sum of two in bfloat16."""
    high = high_part(x)
    return high.astype(bf16), (x - high).astype(bf16)


def carry_on(n, m, c):
    """Puts the state behind the chunk in the place of that before it, when all products with that are done.

    Each warpgroup its half of the rows, which the other does not read.
    """
    through = jnp.exp2(m.gates[c.at, m.walk.last])
    for p, x in enumerate(own_states(n, c)):
        added = product((transposed(m.leaving.at[c.wg]), c.v.at[p]))
        m.S.at[x][...] = (read(m.S.at[x]) * through + added).astype(bf16)


def start(n, m, c, both, push, fed, through, drawn):
    """Sets products on their way, in this order: do S^T; dA^T q; v dS^T; k dS."""
    parts = range(n.team)
    for p in parts:
        plgpu.wgmma(drawn, c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)]))
    for d in both:
        plgpu.wgmma(push, d, c.q_w)
    for p in parts:
        plgpu.wgmma(fed, c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)]))
    for p in parts:
        plgpu.wgmma(through, c.k.at[p], m.dS.at[c.t, half(p), c.mine])


def gradient_head(q, k, v, G, d_output, scale, before, behind, *, reverse: bool, programs: int, interpret=None):
    """dq, dk, dv per head, [B, T, H, K] and V; dg, [B, chunks, C, H] in memory order; d_scale, [B, chunks, H].

    G [B, chunks, H, C] float32: sums of log2 gates from where the walk enters the chunk through each token, each gate at
    least -128 log2(e). before [B, runs, H, K, V]: the states that enter the first chunk of every run of as many chunks as
    there are for each. The others as in `gradient_key`.
    """
    B, T, H, D = d_output.shape
    n = Sizes(B, T, H, D, q.shape[2], k.shape[2], v.shape[2], programs, run=behind.shape[1] // before.shape[1])
    inputs = dict(gates=G, q=q, k=k, v=v, do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(reverse))
    out = jax.ShapeDtypeStruct
    outputs = {name: out((B, T, H, D), jnp.bfloat16) for name in ("dq", "dk", "dv")}
    outputs |= dict(sums=out((B, n.chunks, H, SUMS, 2, CHUNK), bf16))
    outputs |= dict(used=out((B, n.chunks, H, n.team, CHUNK), jnp.float32))
    memory = scratch(n, TILES, SLOTS) | pipeline(n, 4 * n.team + 1)
    memory |= dict(**pair(n), gates=plgpu.SMEM((n.teams * SLOTS, CHUNK), jnp.float32))
    memory |= dict(vectors=plgpu.SMEM((2, SUMS, CHUNK), jnp.float32))
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
    return *gradients, dg, used.sum((3, 4))
