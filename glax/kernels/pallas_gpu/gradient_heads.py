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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu.gradient import SLOTS, Sizes, compute, launch, load, pipeline, scratch, warpgroups
from glax.kernels.pallas_gpu.gradient_fast import around, bf16, store
from glax.kernels.pallas_gpu.gradient_tiles import (
    CHUNK,
    TILE,
    accumulator,
    after,
    along,
    half,
    meet,
    product,
    tokens,
)
from glax.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, added, by_row, read, transposed

TILES = ("q", "k", "v", "do")
SUMS = (
    4  # rows of sums by token, or by k: of q dq, of k with dk through the chunk's pairs, and through the state; of S dS
)


def chunk(n: Sizes, m: SimpleNamespace, c: SimpleNamespace, release):
    parts = range(n.team)
    G, rest = (plgpu.load(m.gates.at[c.at, side], layout=BY_ROW) for side in (0, 1))
    up, down = jnp.exp2(G), jnp.exp2(rest)

    def decayed(mask, sign):
        """e^ of the difference of G at the rows' tokens and at the columns', where the mask says so, else 0."""
        across = along(plgpu.load(m.gates.at[c.at, 0], layout=BY_COLUMN))
        return jnp.exp2(jnp.where(mask, sign * (by_row(G, TILE) - across), -jnp.inf))

    def scores(A_T, dA):
        for p in parts:
            plgpu.wgmma(A_T, c.k.at[p], transposed(c.q.at[p]))
        for p in parts:
            plgpu.wgmma(dA, c.do.at[p], transposed(c.v.at[p]))
        A_T = after(A_T, n.team) * (decayed(m.walk.earlier(), -1.0) * c.scale)
        return A_T.astype(bf16), (after(dA) * decayed(m.walk.later(), 1.0)).astype(bf16)

    A_T, dA = pl.run_scoped(scores, accumulator(), accumulator())
    release()
    plgpu.barrier_wait(m.states_full.at[c.t])
    through = product(*((c.k.at[p], m.dS.at[c.t, half(p), c.mine]) for p in parts)) * by_row(down, TILE)
    dv = added(through, (A_T, c.do_w)).astype(bf16)
    dA_T = product(*((c.v.at[p], transposed(c.do.at[p])) for p in parts)) * decayed(m.walk.earlier(), -1.0)
    dA_T = dA_T.astype(bf16)

    def keys(fed, push):
        for p in parts:
            plgpu.wgmma(fed, c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)]))
        plgpu.wgmma(push, dA_T, c.q_w)
        return after(fed, 1) * by_row(down, TILE), after(push)

    fed, push = pl.run_scoped(keys, accumulator(), accumulator())
    y = read(c.k_w)
    sums = m.sums_g.at[c.b, c.c, c.h, c.w]
    sums[1] = (y * push).sum(1)
    sums[2] = (y * fed).sum(1)
    dk = (fed + c.scale * push).astype(bf16)

    def through_state(drawn):
        for p in parts:
            plgpu.wgmma(drawn, c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)]))
        sums[3] = around(n, m, c)
        return after(drawn) * by_row(up, TILE)

    drawn = pl.run_scoped(through_state, accumulator())
    plgpu.barrier_arrive(m.states_free.at[c.t])
    drawn = added(drawn, (dA, c.k_w))
    sums[0] = (read(c.q_w) * drawn).sum(1)
    meet(m.meet_done.at[c.t])
    c.q_w[...] = (c.scale * drawn).astype(bf16)
    c.k_w[...] = dk
    c.do_w[...] = dv
    plgpu.commit_smem()
    store(m, c, dict(dq=c.q_w, dk=c.k_w, dv=c.do_w))


def gradient_head(q, k, v, G, d_output, scale, before, behind, *, reverse: bool, programs: int, interpret=None):
    """dq, dk, dv per head, [B, T, H, K] and V; dg, [B, H, chunks, C] in memory order; d_scale, [B, chunks, H].

    G [B, H, chunks, C] float32: sums of log2 gates from where the walk enters the chunk through each token, each gate at
    least -128 log2(e). The others as in `gradient_key`.
    """
    B, T, H, D = d_output.shape
    n = Sizes(B, T, H, D, q.shape[2], k.shape[2], v.shape[2], programs)
    last = G[..., :1] if reverse else G[..., -1:]
    gates = jnp.stack([G, last - G], 3).swapaxes(1, 2)  # [B, chunks, H, 2, C]
    inputs = dict(gates=gates, q=q, k=k, v=v, do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(reverse))
    out = jax.ShapeDtypeStruct
    outputs = {name: out((B, T, H, D), jnp.bfloat16) for name in ("dq", "dk", "dv")}
    outputs |= dict(sums=out((B, n.chunks, H, n.team, SUMS, CHUNK), jnp.float32))
    memory = scratch(n, TILES, SLOTS) | pipeline(n, 4 * n.team + 1)
    memory |= dict(gates=plgpu.SMEM((n.teams * SLOTS, 2, CHUNK), jnp.float32))

    def body(m):
        warpgroups(lambda: load(n, m, TILES), lambda: compute(n, m, TILES, chunk))

    options = dict(interpret=interpret, reverse=reverse, programs=programs)
    *gradients, sums = launch(body, inputs, outputs, {}, memory, threads=3, **options)
    used, given, fed, edge = jnp.moveaxis(sums.sum(3), 3, 0)  # [B, chunks, H, C]
    behind_gate = scale[:, None, None, None] * (used - given)
    total = jnp.exp2(last.swapaxes(1, 2)) * edge.sum(3, keepdims=True)
    upward = np.tri(CHUNK, dtype=np.float32)  # products: cumulative sums take XLA several passes
    upto, onward = (upward.T, upward) if reverse else (upward, upward.T)
    back = jnp.einsum("bchs,ts->bcht", behind_gate, onward, precision="highest")
    dg = total + back + jnp.einsum("bchs,ts->bcht", fed, upto - np.eye(CHUNK, dtype=np.float32), precision="highest")
    return *gradients, dg.swapaxes(1, 2), used.sum(3)
