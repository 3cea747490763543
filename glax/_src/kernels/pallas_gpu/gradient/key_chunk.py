"""Compute the gradient of one chunk and head, for per-key gates that are in range of e^M and e^-M."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_ROW,
    LOG2E,
    added,
    after,
    by_row,
    clear,
    high_part,
    read,
    tiled,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.gradient.items import hand_over, meet, second_term, wait_for_states
from glax._src.kernels.pallas_gpu.gradient.refs import RestRefs
from glax._src.kernels.pallas_gpu.gradient.tiles import (
    CHUNK,
    TILE,
    accumulator,
    columns,
    half,
    masked,
    product,
)

bf16 = jnp.bfloat16


def chunk(n, m, c, release):
    """Compute the gradient of one chunk by the formulas of `gradient/key.py`, with M in log2.

    The exact kernel overwrites the results of chunks whose gates are out of range. release() waits until the results of the
    chunk before have left shared memory.

    Of two warpgroups that share a chunk, one forms A^T and the other dA^T, in the tile of g, which only M reads.
    """
    matrix, gates = c.scan.middle_matrix(), [c.g_w]
    if n.terms == 2:
        gates.append(second_term(m, c.t).at[:, c.mine])
    if n.packed:
        clear_foreign(m, c, (*gates, c.q_w, c.k_w))
        plgpu.commit_smem()
    M = product(*((matrix, g) for g in gates)) * LOG2E
    if n.terms == 2:
        plgpu.barrier_arrive(m.gates_read.at[c.t])
    c.vector[...] = (read(c.q_w) * read(c.k_w)).sum(1)
    x_rest = split(c.q_w, read(c.q_w) * jnp.exp2(M))
    y_rest = split(c.k_w, read(c.k_w) * jnp.exp2(-M))
    # e^M and e^-M are formed anew where they are needed again: M alone is held
    M, x_rest, y_rest = lax.optimization_barrier((M, x_rest, y_rest))
    release()
    rests = lent(m, c)
    rests.x[...], rests.y[...] = x_rest, y_rest
    meet(n, m, c)
    plgpu.barrier_wait(m.values_full.at[c.t])
    if n.packed:
        clear_foreign(m, c, (c.v_w, c.do_w))
        meet(n, m, c)
    A_T, dA_T = score_tiles(n, m, c)

    def keys_scored():
        """Store A^T = scale mask(y x^T), without its diagonal."""
        A_T[...] = masked(c.scan.before(), key_scores(n, m, c) * c.scale)

    def values_scored():
        """Store dA^T = mask(v do^T) in two terms."""
        found = lax.optimization_barrier(jnp.where(c.scan.earlier(), scores(n, c.v, c.do), 0.0))
        rests.dA_T[...] = split(dA_T, found)

    shared(n, c, keys_scored, values_scored)
    meet(n, m, c)
    wait_for_states(n, m, c)
    c = c.again()

    def of_tokens(push, fed, drawn):
        """Start the products in the order in which they are used, because starting one waits for most of those before."""
        start(n, m, c, push, fed, drawn)
        running = n.team + 3 * (not n.resets)  # products behind those of fed
        push, fed = after(push, n.team + running), after(fed, running)
        if n.resets:
            fed = c.scan.to_state(fed)
        y = read(c.k_w) + read(lent(m, c).y)
        before_gate = (y * fed).astype(bf16)
        dk = (jnp.exp2(-M) * (fed + c.scale * push)).astype(bf16)
        given = y * push
        # Rounded now, not when dk and dv are stored: two registers a pair until then.
        dk, before_gate, given = lax.optimization_barrier((dk, before_gate, given))
        if n.resets:
            drawn = add_scored(n, m, c, c.scan.from_state(after(drawn)))
        edge = around(n, m, c)  # a loop, before which the compiler does not move the next product
        if n.team == 1:  # one turn of a loop is none
            meet(n, m, c)

        def of_values(dv):
            here = c.again() if n.team == 1 else c  # where a warpgroup has the chunk alone, registers are short
            start_values(n, m, here, dv)
            total = drawn if n.resets else after(drawn, 2 * n.team + 1)
            used = (read(here.q_w) + read(lent(m, here).x)) * total
            behind_gate = c.scale * (used - given)
            dq = (c.scale * jnp.exp2(M) * total).astype(bf16)
            behind_gate, dq, used = lax.optimization_barrier((behind_gate, dq, used.sum(1)))
            values = after(dv)
            if n.resets:
                values = added(here.scan.to_state(values), (score_tiles(n, m, here, first_tile())[0], here.do_w))
            own = by_row(own_scores(n, m, here) * here.scale, TILE) * read(here.do_w)
            return behind_gate, dq, used, (values + own).astype(bf16)

        behind_gate, dq, used, dv = pl.run_scoped(of_values, accumulator())
        return behind_gate, before_gate, edge, dq, dk, dv, used

    *found, used = pl.run_scoped(of_tokens, *[accumulator()] * 3)
    plgpu.barrier_arrive(m.states_free.at[c.t])
    meet(n, m, c)
    c = c.again()
    finish(m, c, *found)
    m.used_g[c.b, c.c, c.h, c.w] = used  # last: fences wait for what is on its way to memory


def clear_foreign(m, c, found):
    """Zero the rows of tiles that do not belong to the chunk's sequence. They belong to another sequence, or may hold NaN."""
    first, end = m.places_g[c.c, 1], m.places_g[c.c, 2]
    pl.when((first > 0) | (end < CHUNK))(lambda: clear(found, first, end))


def split(tile, x):
    """Store x in the tile in bfloat16, and return what it loses there, in bfloat16.

    The barrier keeps the compiler from rounding x twice, one number at a time, which takes longer than pairs.
    """
    high = lax.optimization_barrier(x.astype(bf16))
    tile[...] = high
    return (x - high.astype(jnp.float32)).astype(bf16)


def lent(m, c, first: Any = 0) -> RestRefs:
    """Return the tiles of the next chunk's g, v and do, which hold what x, y and dA lose in bfloat16 until they are loaded."""
    xs, ys = m.do.at[c.other], m.v.at[c.other]
    return RestRefs(x=xs.at[c.w], y=ys.at[c.w], xs=xs, ys=ys, dA_T=m.g.at[c.other, first])


def score_tiles(n, m, c, first: Any = 0):
    """Return the tiles of A^T and dA^T."""
    return (c.g.at[first], c.g.at[first + 1]) if n.team == 2 else (m.A_T.at[c.t], m.dA_T.at[c.t])


def pair(n) -> dict:
    """Return shared memory for the two scores of a chunk, where no other tile can hold them."""
    return {name: tiled(n.teams, CHUNK, 64) for name in ("A_T", "dA_T")}


def own_scores(n, m, c):
    """Return q . k of every token, [64], summed over the halves that the warpgroups have stored."""
    return sum(plgpu.load(m.vectors.at[c.t * n.team + p], layout=BY_ROW) for p in range(n.team))


def scores(n, a, b):
    """Return a b^T, [64, 64], summed over all of K or V."""
    return product(*((a.at[p], transposed(b.at[p])) for p in range(n.team)))


def key_scores(n, m, c):
    """Return y x^T, [64, 64], as three of the four products of two terms."""
    parts, rest = range(n.team), lent(m, c)
    pairs = [(c.k.at[p], c.q.at[p]) for p in parts]
    pairs += [(rest.ys.at[p], c.q.at[p]) for p in parts] + [(c.k.at[p], rest.xs.at[p]) for p in parts]
    return product(*((a, transposed(b)) for a, b in pairs))


def shared(n, c, first, second):
    """Run both functions in the warpgroup of a chunk. Where two warpgroups share it, run `first` in one and `second` in the
    other."""
    if n.team == 1:
        first()
        second()
    else:
        pl.when(c.w == 0)(first)
        pl.when(c.w == 1)(second)


def start(n, m, c, push, fed, drawn):
    """Start the products in this order: dA^T x; v dS^T; do S^T + dA y. With resets, do S^T has no rows behind them, and
    `add_scored` adds dA y."""
    parts, rest, (_, dA_T) = range(n.team), lent(m, c), score_tiles(n, m, c)
    for d, x in ((dA_T, c.q_w), (rest.dA_T, c.q_w), (dA_T, rest.x)):
        plgpu.wgmma(push, d, x)
    for p in parts:
        plgpu.wgmma(fed, c.v.at[p], transposed(m.dS.at[c.t, c.mine, half(p)]))
    for p in parts:
        plgpu.wgmma(drawn, c.do.at[p], transposed(m.S.at[c.t, c.mine, half(p)]))
    if not n.resets:
        for pair in read_by_scores(n, m, c):
            plgpu.wgmma(drawn, *pair)


def read_by_scores(n, m, c, first: Any = 0):
    """Return the operands of the products that sum to dA y."""
    rest, (_, dA_T) = lent(m, c, first), score_tiles(n, m, c, first)
    return [(transposed(d), y) for d, y in ((dA_T, c.k_w), (dA_T, rest.y), (rest.dA_T, c.k_w))]


def first_tile():
    """Return 0 as a traced number: no constant may be the index of a tile that products are added by."""
    return lax.optimization_barrier(jnp.int32(0))


def add_scored(n, m, c, drawn):
    return added(drawn, *read_by_scores(n, m, c, first_tile()))


def start_values(n, m, c, dv):
    """Start the products of dv = A^T do + y dS, [64, 64], into the accumulator dv. With resets, start those of y dS alone."""
    A_T, _ = score_tiles(n, m, c)
    if not n.resets:
        plgpu.wgmma(dv, A_T, c.do_w)
    for y in (c.k, lent(m, c).ys):
        for p in range(n.team):
            plgpu.wgmma(dv, y.at[p], m.dS.at[c.t, half(p), c.mine])


def around(n, m, c):
    """Return sum_v S dS, [64], for the warpgroup's own half of K.

    It is a loop. In code without a loop the compiler reads everything together, and spills what has no registers beside the
    running products.
    """

    def part(p, total):
        x = c.t, c.mine, half(p)
        return total + (read(m.S.at[x]) * read(m.dS.at[x])).sum(1)

    found = lax.fori_loop(0, n.team, part, zeros((64,), BY_ROW))
    return found * c.scan.passes() if n.resets else found


def finish(m, c, behind_gate, before_gate, edge, dq, dk, dv):
    """Form dg_t = edge + sum_{i >= t} behind_gate_i + sum_{j < t} before_gate_j, and store all results.

    behind_gate: [64, 64] in float32, before_gate: the same in bfloat16, by token and channel. edge: [64], by channel. dq, dk,
    dv: [64, 64] in bfloat16. The results overwrite the tiles of the tokens, whose products are done.
    """
    high = high_part(behind_gate)
    c.vector[...] = edge
    c.v_w[...] = high.astype(bf16)
    c.do_w[...] = (behind_gate - high).astype(bf16)
    c.g_w[...] = before_gate
    plgpu.commit_smem()
    suffix, prefix = c.scan.sums()
    dg = product((suffix, c.v_w), (suffix, c.do_w), (prefix, c.g_w))
    c.q_w[...] = dq
    c.k_w[...] = dk
    dg = dg + columns(c.vector)
    plgpu.commit_smem()
    c.v_w[...] = dg.astype(bf16)
    c.do_w[...] = dv
    hand_over(m, c)
