"""One chunk and head for any gates on keys: pairs by halving, each level with a reference between the pair's tokens.

Log gates are cut at -128 first. No exponent is positive, so nothing overflows; the diagonal is a level of its own.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu.gradient_fast import around, bf16, finish, in_two, own, tell_own
from glax.kernels.pallas_gpu.gradient_tiles import (
    LEVELS,
    TILE,
    exp,
    half,
    kept,
    meet,
    product,
)
from glax.kernels.pallas_gpu.tiles import LOG_OF_ZERO, WGMMA, by_row, read, transposed, zeros


def chunk(n, m, c):
    """Every warpgroup loads its own halves, q and k again for every level. Written for few registers, not for speed."""
    parts = range(n.team)
    arrived = m.reloaded.at[c.wg]

    def load(source, target):
        plgpu.copy_gmem_to_smem(source, target, arrived)
        plgpu.barrier_wait(arrived)

    def load_tokens(source, shared, target):
        load(source.at[c.b, c.rows, lax.div(c.h, n.H // shared), c.mine], target)
        return read(target)

    def load_q():
        return load_tokens(m.q_g, n.HQ, c.q_w)

    def load_k():
        return load_tokens(m.k_g, n.HK, c.k_w)

    def together():
        meet(m.meet_scaled.at[c.t])

    def left(a):
        """A product's left side in shared memory: fed from registers that loops write over, results differed."""
        plgpu.commit_smem()
        m.left.at[c.wg][...] = a
        plgpu.commit_smem()
        return m.left.at[c.wg]

    together()
    load(m.before_g.at[c.b, c.c, c.h, c.mine], m.S.at[c.t, c.mine])
    load(m.behind_g.at[c.b, c.c, c.h, c.mine], m.dS.at[c.t, c.mine])
    load_tokens(m.v_g, n.HV, c.v_w)
    load_tokens(m.do_g, n.H, c.do_w)
    load_q()
    load_k()
    tell_own(m, c)
    g = load_tokens(m.g_g, n.H, c.g_w)
    plgpu.commit_smem()
    c.g_w[...] = jnp.maximum(g, LOG_OF_ZERO).astype(bf16)
    together()
    ends = product((transposed(c.g_w), transposed(m.halves.at[c.wg])), shape=(64, 8))
    column = plgpu.broadcasted_iota(jnp.int32, (64, 8), 1, layout=WGMMA)
    last = exp(jnp.where(column < 2, ends, 0.0).sum(1))

    def way_of(level):
        """e^ of the gates between each token and the middle of its block."""
        return exp(product((left(m.walk.halving_matrix(level)), c.g_w)))

    def add_scores(level, A_T):
        way = way_of(level)
        c.q_w[...] = (load_q() * way).astype(bf16)
        c.k_w[...] = (load_k() * way).astype(bf16)
        together()
        found = product(*((c.k.at[p], transposed(c.q.at[p])) for p in parts))
        together()
        return A_T + jnp.where(m.walk.halving(level, transposed=True), found, 0.0)

    A_T = (lax.fori_loop(0, LEVELS, add_scores, zeros(TILE)) * c.scale).astype(bf16)
    down = exp(product((left(kept(m.walk.later(), 0.0, 1.0)), c.g_w)))
    c.k_w[...] = (load_k() * down).astype(bf16)
    together()
    through_states = ((c.k.at[p], m.dS.at[c.t, half(p), c.mine]) for p in parts)
    dv = product((left(A_T), c.do_w), *through_states)
    dv = (dv + by_row(own(n, m, c, 0) * c.scale, TILE) * read(c.do_w)).astype(bf16)
    together()

    def pairs(a, b, level, transposed_pairs):
        """The scores' gradient, or its transpose, at the pairs of a level."""
        found = product(*((a.at[p], transposed(b.at[p])) for p in parts))
        return kept(m.walk.halving(level, transposed_pairs), found)

    def passed(level, transposed_pairs, load, tile):
        """What those pairs make of the tokens that `load` brings, times `way_of`, in two terms; and times it once more."""
        way, (a, b) = way_of(level), (c.v, c.do) if transposed_pairs else (c.do, c.v)
        tile[...], m.less.at[c.wg][...] = in_two(load() * way)
        side = left(pairs(a, b, level, transposed_pairs))
        found = product((side, tile), (side, m.less.at[c.wg])) * way
        plgpu.commit_smem()
        return found

    def add_push(level, push):
        return push + passed(level, True, load_q, c.q_w)

    push = lax.fori_loop(0, LEVELS, add_push, zeros(TILE))
    fed = product(*((c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)])) for p in parts))
    fed *= exp(product((left(kept(m.walk.later(), 0.0, 1.0)), c.g_w)))
    k = load_k()
    before_gate = (k * fed).astype(bf16)
    push += by_row(own(n, m, c, 1), TILE) * load_q()
    given = k * push
    dk = (fed + c.scale * push).astype(bf16)

    def add_pull(level, pull):
        return pull + passed(level, False, load_k, c.k_w)

    pull = lax.fori_loop(0, LEVELS, add_pull, zeros(TILE))
    drawn = product(*((c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)])) for p in parts))
    edge = around(n, m, c) * last
    drawn *= exp(product((left(kept(m.walk.later(), 1.0)), c.g_w)))
    pull += by_row(own(n, m, c, 1), TILE) * load_k()
    drawn += pull
    x = load_q()
    used = x * drawn
    behind_gate = c.scale * (used - given)
    dq = (c.scale * drawn).astype(bf16)
    m.used_g[c.b, c.c, c.h, c.w] = used.sum(1)
    meet(m.meet_done.at[c.t])
    finish(m, c, behind_gate, before_gate, edge, dq, dk, dv)
    plgpu.wait_smem_to_gmem(0)
