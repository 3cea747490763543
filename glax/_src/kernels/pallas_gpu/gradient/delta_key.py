"""Compute the gradient of every chunk and head under the delta rule, with per-key gates.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all of them, [K] each. S is the state before the
chunk, and dS' = dL/dS' behind it. U and dX are those of `scan/delta_key.py`, and e = beta k:

    dP_ij = dO_i . U_j              j up to i       the gradients of the pairs' scores without decays
    dA_ij = -dX_i . U_j             j before i

    dq_i = scale (e^{G_i} (S dO_i) + sum_j dP_ij k_j e^{G_i - G_j})
    de_i = -e^{G_i} (S dX_i) + sum_j dA_ij k_j e^{G_i - G_j}
    dk_j = e^{G_last - G_j} (dS' U_j) + sum_i (scale dP_ij q_i + dA_ij e_i) e^{G_i - G_j} + beta_j de_j
    d beta_i = de_i . k_i + dX_i . v_i              `scan/delta_key.py` computes the second term

A log gate decays the pairs with one token before it and one from it on. With dk^ for the terms of dk that are sums over i, and
without the terms of a token with itself:

    dg_t = e^{G_last} sum_v S dS' + sum_{s < t} k_s e^{G_last - G_s} (dS' U_s) + sum_{s >= t} (q_s dq_s + e_s de_s - k_s dk^_s)

The sums over pairs are taken in the two forms of `chunks/pairs.py`, which are exact for all gates. For dP with x = scale q, and
for dA with x = e, they are sums over pairs with one reference, or over several such:

    dx_i  = e^{M_i} sum_j dP_ij (k_j e^{-M_j})          dk^_j = e^{-M_j} sum_i dP_ij (x_i e^{M_i})

dP, dA and the decayed tokens have two terms of bfloat16, so both sums have 16 bits. In dg the terms of a pair whose tokens are
both behind the gate cancel, and leave an error of 16 bits.

An item is one chunk of one head and 64 channels of K. One warpgroup computes dq, its part of dk^, and dg; another de and dk. Each
adds up its sums over V in steps of 64 columns. A third loads, also for the next item. Programs are persistent.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.chunks.merge import split, store_split
from glax._src.kernels.pallas_gpu.chunks.pairs import LEVELS, MOST
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, HALF, LOG2E, by_column, by_row, read, transposed, zeros
from glax._src.kernels.pallas_gpu.gradient.delta_key_refs import (
    BF16,
    BLOCK,
    COLUMNS,
    D_BETA,
    D_SCALE,
    EDGE,
    KEYS,
    LARGEST,
    OWN,
    QUERIES,
    SHAPE,
    STAGES,
    TOKEN_BETA,
    Columns,
    Operands,
    Program,
    Results,
    Tiles,
)  # fmt: skip
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, quotient


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls are lowered once
def delta_key_gradient(reverse: bool, most: int, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head. most: the largest number of programs. operands: the fields of
    `Operands`."""
    x = Operands(*operands)
    B, chunks, H, _ = x.beta.shape
    programs = min(most, B * chunks * H * (x.q.shape[3] // BLOCK))
    inputs = len(operands)  # a cached kernel must not hold a tracer

    def body(*refs):
        given, (*results, columns, own) = refs[:inputs], refs[inputs:]
        p = Program(reverse, programs, Operands(*given), Results(*results), columns, own)
        me = lax.axis_index("warpgroup")
        for number, work in enumerate((of_queries, of_keys, load)):
            pl.when(me == number)(functools.partial(for_all_items, p, work, tiles.REGISTERS[work is not load]))

    body.__name__ = "delta_key_gradient"  # in profiles
    results = tuple(Results.types(x))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[Columns.types(), Tiles.types(x.gates.dtype)],
        compiler_params=dataclasses.replace(tiles.PARAMS, reduction_scratch_bytes=0),  # no sum is over warps
    )
    found = once(("delta_key_gradient", reverse, programs), kernel, *operands, results=results, is_longest=True)
    return Results(*found)


def for_all_items(p: Program, work, registers: int):
    """Do one warpgroup's work for every item of the program."""
    plgpu.set_max_registers(registers, action="increase" if work is not load else "decrease")
    pl.loop(0, p.turns())(lambda turn: work(p.at(turn)))


def load(p: Program):
    """Load an item's tiles, first those of the first steps: their places are free while the item before still reads tokens."""
    first = min(STAGES, p.steps)
    for step in range(first):
        load_step(p, jnp.int32(step))
    x, t = p.operands, p.tiles
    pl.when(p.turn > 0)(lambda: plgpu.barrier_wait(t.consumed))
    for source, tile in ((x.q, t.q), (x.k, t.k), (x.gates, t.given_gates)):
        plgpu.copy_gmem_to_smem(p.tokens(source), tile, t.loaded)
    plgpu.copy_gmem_to_smem(x.beta.at[p.place()], t.row(TOKEN_BETA), t.loaded)
    pl.loop(first, p.steps)(lambda step: load_step(p, step))


def load_step(p: Program, step):
    """Load the tiles of a step, once the step that used their place is done."""
    x, own, stage = p.operands, p.columns, p.stage(step)
    loaded = own.loaded.at[stage]
    pl.when(p.turn * p.steps + step >= STAGES)(lambda: plgpu.barrier_wait(own.consumed.at[stage]))
    (b, c, h), columns = p.place(), pl.ds(step * COLUMNS, COLUMNS)
    head = quotient(h, x.beta.shape[2] // x.d_output.shape[2])
    plgpu.copy_gmem_to_smem(x.d_output.at[b, pl.ds(c * C, C), head, columns], own.d_output.at[stage], loaded)
    beside, channels = pl.ds(x.q.shape[3], C), p.channels()
    pairs = [(x.states, channels, own.before), (x.states, beside, own.tokens)]
    pairs += [(x.d_states, channels, own.behind), (x.d_states, beside, own.erased)]
    for source, part, tile in pairs:
        plgpu.copy_gmem_to_smem(source.at[b, c, h, columns, part], tile.at[stage], loaded)


def of_queries(p: Program):
    """Compute dq, what queries add to dk, and dg."""
    t = p.tiles
    nothing = zeros(PAIRS), zeros(SHAPE), zeros((COLUMNS, BLOCK))
    dP, of_state, edge = lax.fori_loop(0, p.steps, functools.partial(add_queries, p), nothing)
    plgpu.barrier_wait(t.loaded)
    prepare_gates(p)
    store_edge(p, edge)
    i, j = p.in_order()
    t.row(OWN)[...] = jnp.sum(jnp.where(i == j, dP, 0.0), axis=1)
    store_split(t.pairs(QUERIES), jnp.where(i > j, dP, 0.0))
    dq, dk = sums_over_pairs(p, QUERIES, of_state * p.decay(through))
    # [C, BLOCK], without the token itself
    terms = read(t.q) * dq * p.scale() - read(t.k) * dk
    own = p.number(OWN)
    dq += own * read(t.k)
    p.write_term(D_SCALE, (read(t.q) * dq).sum(1))
    plgpu.commit_smem()  # all warps have read the tiles
    store_split(t.left(QUERIES), terms)
    store_split(t.pairs(QUERIES), dk + own * (read(t.q) * p.scale()))
    plgpu.barrier_arrive(t.handed)
    t.q[...] = (dq * p.scale()).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.q, p.tokens(p.results.dq))
    plgpu.barrier_wait(t.handed)
    send_gates(p)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(t.consumed)


def add_queries(p: Program, step, totals):
    """Return dO U^T, dO S^T and the products S dS' of every column, with the terms of a step added."""
    own, stage, (pairs, of_state, edge) = p.columns, p.stage(step), totals
    plgpu.barrier_wait(own.loaded.at[stage])
    d_output, S, dS = own.d_output.at[stage], own.before.at[stage], own.behind.at[stage]
    pairs, of_state = tiles.added_all((pairs, of_state), [(d_output, own.tokens.at[stage])], [(d_output, S)])
    edge += read(S) * read(dS)
    plgpu.barrier_arrive(own.consumed.at[stage])
    return pairs, of_state, edge


def of_keys(p: Program):
    """Compute de and dk."""
    t = p.tiles
    nothing = zeros(PAIRS), zeros(SHAPE), zeros(SHAPE)
    dA, of_state, behind = lax.fori_loop(0, p.steps, functools.partial(add_keys, p), nothing)
    plgpu.barrier_wait(t.loaded)
    plgpu.barrier_wait(t.prepared)
    store_split(t.behind, behind * p.decay(after_it))
    i, j = p.in_order()
    store_split(t.pairs(KEYS), dA * jnp.where(i > j, -1.0, 0.0))
    de, dk = sums_over_pairs(p, KEYS, of_state * -p.decay(through))
    p.write_term(D_BETA, (read(t.k) * de).sum(1))
    de *= p.number(TOKEN_BETA)
    plgpu.commit_smem()  # all warps have read the tiles
    store_split(t.left(KEYS), read(t.k) * (de - dk))
    store_split(t.right, read(t.k) * whole(t.behind))
    plgpu.barrier_arrive(t.handed)
    plgpu.barrier_wait(t.handed)
    t.k[...] = (dk + de + whole(t.behind) + whole(t.pairs(QUERIES))).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.k, p.tokens(p.results.dk))
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(t.consumed)


def add_keys(p: Program, step, totals):
    """Return dX U^T, dX S^T and U dS'^T, with the terms of a step added."""
    own, stage = p.columns, p.stage(step)
    plgpu.barrier_wait(own.loaded.at[stage])
    U, dX = own.tokens.at[stage], transposed(own.erased.at[stage])
    of_state, of_gradient = (dX, own.before.at[stage]), (transposed(U), own.behind.at[stage])
    totals = tiles.added_all(totals, [(dX, U)], [of_state], [of_gradient])
    plgpu.barrier_arrive(own.consumed.at[stage])
    return totals


def prepare_gates(p: Program):
    """Raise gates to LOG_OF_ZERO, so that no sum has -inf, and divide those in float32 into two terms. Store the largest |M| of
    every token."""
    t = p.tiles
    found = plgpu.load(t.given_gates, layout=tiles.WGMMA)
    found = jnp.maximum(found, found.dtype.type(LOG_OF_ZERO))
    for tile, term in zip(t.gates, (found,) if t.wide is None else split(found), strict=True):
        tile[...] = term
    plgpu.commit_smem()
    M = p.summed(reference_sums(p, p.hidden(jnp.int32(HALF)), -1.0))
    t.row(LARGEST)[...] = jnp.max(jnp.abs(M), axis=1)
    plgpu.commit_smem()
    plgpu.barrier_arrive(t.prepared)


def store_edge(p: Program, products):
    """Store e^{G_last} sum_v S dS' by channel. products: S dS', [COLUMNS, BLOCK]. Both sums are products with a column of ones,
    in tiles of the warpgroup that are free."""
    t = p.tiles
    i, _ = p.lines()
    # 1 in the first row in memory, which `by_halves` reads, and else 0
    t.pairs(QUERIES)[0][...] = tiles.indicator(by_row(i, PAIRS) == 0)
    store_split(t.left(QUERIES), products)

    def summed(terms):
        """Return the sums of terms [C, BLOCK] over their rows, [BLOCK]."""
        column = tiles.by_halves(t.pairs(QUERIES)[0])
        return tiles.column_of(tiles.product((BLOCK, 8), *((transposed(x), column) for x in terms)), 0)

    t.row(EDGE)[...] = summed(t.left(QUERIES)) * jnp.exp2(summed(t.gates) * LOG2E)
    plgpu.commit_smem()


def whole(pair):
    """Return a matrix in two terms in float32."""
    high, rest = pair
    return read(high) + read(rest)


def is_in_range(p: Program):
    """Return whether the item takes the fast form. Integers with the same bits are in the order of numbers above 0, and a warp
    compares them in one instruction."""
    found = plgpu.load(p.tiles.row(LARGEST), layout=tiles.in_every_warp(C))
    return jnp.max(lax.bitcast_convert_type(found, jnp.int32)) <= MOST


def reference_sums(p: Program, size, sign):
    """Return the matrix [C, C] that sums gates between every token and its reference, for blocks of `size` tokens. In every
    second block these are the gates from its beginning through the token; in every first, those behind the token, times sign."""
    i, j = p.lines()
    i = p.scanned(i)
    second = (i & size) != 0
    # [C], by row: the first and the last gate of the sum in memory, and what multiplies it
    bounds = jnp.where(second, i & -size, i + 1), jnp.where(second, i, i | (size - 1))
    bounds = [p.scanned(x) for x in bounds][:: -1 if p.reverse else 1]
    first, last, factor = (by_row(x, PAIRS) for x in (*bounds, jnp.where(second, 1.0, sign)))
    j = by_column(j, PAIRS)
    return jnp.where((j >= first) & (j <= last), factor, 0.0).astype(BF16)


def sums_over_pairs(p: Program, side: int, left):
    """Return the two sums over pairs, [C, BLOCK] each: `left` with dx added, and dk^.

    side: QUERIES with x = scale q, or KEYS with x = beta k. dx is dq / scale, or de. In the exact form a token
    has one factor in a level: e^M in a second block, and e^-M in a first. The other may be inf, and is not formed.
    """
    t, is_fast = p.tiles, is_in_range(p)

    def down(up):
        """Return e^{-M} or, in the exact form, the decay of tokens in the first of two blocks."""
        fast = plgpu.layout_cast(jnp.broadcast_to(is_fast, SHAPE), tiles.WGMMA)
        return jnp.where(fast, 1.0 / up, up)

    def advance(level, found):
        left, right = found
        size = lax.shift_right_logical(p.hidden(jnp.int32(HALF)), level)
        sign = jnp.where(is_fast, -1.0, 1.0)
        M = p.summed(reference_sums(p, size, sign)) * LOG2E
        up = jnp.exp2(M)
        plgpu.commit_smem()  # all warps have read the tokens of the level before
        x = read(t.q) * p.scale() if side == QUERIES else read(t.k) * p.number(TOKEN_BETA)
        store_split(t.left(side), x * up)
        if side == KEYS:
            store_split(t.right, read(t.k) * jnp.exp2(M * sign))  # down(up), formed again, so that no registers hold it
            plgpu.barrier_arrive(t.stored)
        else:
            plgpu.barrier_wait(t.stored)

        def product(turned, terms):
            """Return the pairs of the level @ the terms of tokens, without the product of what both lose in bfloat16."""
            i, j = p.lines()
            # The highest bit in which the positions of two tokens differ is the size of the blocks between which they lie.
            apart = by_row(i ^ jnp.where(is_fast, 0, size), PAIRS) ^ by_column(j, PAIRS)
            chosen = tiles.indicator(apart < jnp.where(is_fast, C, size))
            high, rest = (plgpu.load(turned(x), layout=tiles.WGMMA) * chosen for x in t.pairs(side))
            return tiles.product(SHAPE, (high, terms[0]), (rest, terms[0]), (high, terms[1]))

        left += product(lambda x: x, t.right) * up
        if side == QUERIES:
            plgpu.barrier_arrive(t.read)
        right += product(transposed, t.left(side)) * down(up)
        if side == KEYS:
            plgpu.barrier_wait(t.read)
        return left, right

    return lax.fori_loop(0, jnp.where(is_fast, 1, LEVELS), advance, (left, zeros(SHAPE)))


def send_gates(p: Program):
    """Write dg, [C, BLOCK], from what both warpgroups have stored."""
    t = p.tiles
    from_it, before = p.matrix(lambda i, j: j >= i), p.matrix(lambda i, j: j < i)
    rows = [(from_it, x) for x in (*t.left(QUERIES), *t.left(KEYS))] + [(before, x) for x in t.right]
    tile = t.given_gates
    edge = by_column(plgpu.load(t.row(EDGE), layout=BY_COLUMN, optimized=False), SHAPE)
    dg = tiles.product(SHAPE, *rows) + edge
    tile[...] = dg.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, p.tokens(p.results.dg))


def through(i, j):
    """Return whether gate j decays what enters the chunk up to token i."""
    return j <= i


def after_it(i, j):
    """Return whether gate j decays token i up to the chunk's end."""
    return j > i
