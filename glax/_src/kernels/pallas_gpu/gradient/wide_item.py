"""Compute one item of the gradient of wide heads: 64 tokens and 128 channels of K, 64 for each of two warpgroups."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_ROW, LOG2E, by_row, high_part, read, transposed, zeros
from glax._src.kernels.pallas_gpu.gradient.key_chunk import bf16, split
from glax._src.kernels.pallas_gpu.gradient.tiles import TILE, ScanOrder, columns, half, masked, product
from glax._src.kernels.pallas_gpu.gradient.wide_refs import Program


@dataclasses.dataclass(frozen=True)
class Item:
    """Hold the i-th item of a program in warpgroup w.

    slot: the slot of its q and k. scale: the scale of its sequence. q, k: its tiles, [2, C, 64]. A, dA: the tiles of the
    transposed scores, [C, C]. parts: the halves of the channels.
    """

    p: Program
    w: Any
    i: Any
    slot: Any
    scale: Any
    scan: ScanOrder
    q: Any
    k: Any
    A: Any
    dA: Any
    parts: tuple

    @classmethod
    def of(cls, p: Program, w, i) -> "Item":
        """Return the item. Every stage forms it again, because the compiler would hold the addresses of all tiles throughout,
        and spill them."""
        w, i, zero = lax.optimization_barrier((w, i, jnp.int32(0)))
        slot = lax.rem(i, jnp.int32(p.plan.slots))
        scan = ScanOrder(p.plan.reverse, p.tiles.order.at[p.parity(i) if p.plan.resets else w], p.plan.resets)
        parts = zero, zero + 1
        tiles = p.tiles.q.at[slot], p.tiles.k.at[slot], *(p.tiles.scores.at[part] for part in parts)
        return cls(p, w, i, slot, p.operands.scale[p.place(i)[0]], scan, *tiles, parts)


def compute_item(p: Program, w, i):
    """Compute dq, dk, dv and dg of the program's i-th item."""
    scale_operands(Item.of(p, w, i))
    drawn, fed, edge = add_columns(p, w, i)
    store_gradient(Item.of(p, w, i), drawn, fed, edge)
    if p.plan.slots == 1:
        leave(p, jnp.int32(0))


def leave(p: Program, slot):
    """Report that the tiles of q and k are free, once dq and dk have left them."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(p.barriers.keys_free.at[slot])


def scale_operands(it: Item):
    """Replace q and k by x = q e^M and y = k e^-M in two terms each, and store own scores and A^T."""
    p, w, t, slot = it.p, it.w, it.p.tiles, it.slot
    plgpu.barrier_wait(p.barriers.gates_loaded)
    M = gate_sums(it)
    plgpu.barrier_wait(p.barriers.keys_loaded.at[slot])
    q, k = it.q.at[w], it.k.at[w]
    t.sums.at[w][...] = (read(q) * read(k)).sum(1)
    x_rest, y_rest = split(q, read(q) * jnp.exp2(M)), split(k, read(k) * jnp.exp2(-M))
    if p.plan.slots == 2:
        pl.when(it.i > 0)(lambda: leave(p, 1 - slot))
    t.x_rest.at[w][...] = x_rest
    t.y_rest.at[w][...] = y_rest
    p.meet()

    @pl.when(w == 0)
    def _():
        """Store A^T = scale mask(y x^T), as three of the four products of two terms."""
        both = (it.k, it.q), (t.y_rest, it.q), (it.k, t.x_rest)
        pairs = [(y.at[part], x.at[part]) for y, x in both for part in it.parts]
        A = product(*((a, transposed(b)) for a, b in pairs))
        it.A[...] = masked(it.scan.before(), A * it.scale)

    p.meet()


def gate_sums(it: Item):
    """Return the sums of log2 gates from the chunk's middle, [C, 64], of the warpgroup's channels."""
    matrix, gates = it.scan.middle_matrix(), it.p.tiles.gates
    return product(*((matrix, gates.at[term, it.w]) for term in range(it.p.plan.terms))) * LOG2E


def add_columns(p: Program, w, i):
    """Sum over the columns of V. Return do S^T and v dS^T, [C, 64], and sum_v S dS, [64], of the warpgroup's channels.

    The first warpgroup stores dA, and the second dv.
    """
    steps, nothing = p.plan.steps, (zeros(TILE), zeros(TILE), zeros((64,), BY_ROW))

    def with_scores():
        carry = lax.fori_loop(0, steps, functools.partial(advance_scores, p, w, i), (*nothing, zeros(TILE)))
        p.meet()
        store_score_gradient(Item.of(p, w, i), carry[3])
        return carry[:3]

    def with_values():
        found = lax.fori_loop(0, steps, functools.partial(advance_values, p, w, i), nothing)
        p.meet()
        return found

    found = lax.cond(w == 0, with_scores, with_values)
    p.meet()
    return found


def step_tiles(it: Item, step):
    """Return the stage of a step, its tiles of v and d_output, and the warpgroup's channels of both states, once loaded."""
    t, stage = it.p.tiles, it.p.stage(it.i, step)
    plgpu.barrier_wait(it.p.barriers.loaded.at[stage])
    return stage, t.v.at[stage], t.d_output.at[stage], *(x.at[stage, half(it.w)] for x in (t.before, t.behind))


def advance_scores(p: Program, w, i, step, carry):
    """Add the terms of 64 columns of V to the sums, and to dA^T = v do^T."""
    it, (drawn, fed, edge, dA) = Item.of(p, w, i), carry
    stage, v, do, S, dS = step_tiles(it, step)
    found = tiles.added_all((drawn, fed, dA), [(do, transposed(S))], [(v, transposed(dS))], [(v, transposed(do))])
    drawn, fed, dA = found
    plgpu.barrier_arrive(p.barriers.scored.at[stage])
    edge = edge + (read(S) * read(dS)).sum(1)
    plgpu.barrier_arrive(p.barriers.consumed.at[stage])
    return drawn, fed, edge, dA


def advance_values(p: Program, w, i, step, carry):
    """Add the terms of 64 columns of V to the sums, and store these columns of dv."""
    it, (drawn, fed, edge) = Item.of(p, w, i), carry
    stage, v, do, S, dS = step_tiles(it, step)
    drawn, fed = tiles.added_all((drawn, fed), [(do, transposed(S))], [(v, transposed(dS))])
    store_values(it, step, stage)
    edge = edge + (read(S) * read(dS)).sum(1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(p.barriers.consumed.at[stage])
    return drawn, fed, edge


def store_values(it: Item, step, stage):
    """Store the step's columns of dv = A^T do + y dS, in the tile of d_output."""
    p, t = it.p, it.p.tiles
    do, dS = t.d_output.at[stage], t.behind.at[stage]
    pairs = [(y.at[part], dS.at[half(part)]) for y in (it.k, t.y_rest) for part in it.parts]
    # [C, 64]
    if p.plan.resets:  # y dS has no rows before a reset
        dv = it.scan.to_state(product(*pairs))
        dv = tiles.added(dv, (it.A, do))
    else:
        dv = product((it.A, do), *pairs)
    own = sum(plgpu.load(t.sums.at[part], layout=BY_ROW) for part in it.parts)
    dv = (dv + by_row(own * it.scale, TILE) * read(do)).astype(bf16)
    plgpu.barrier_wait(p.barriers.scored.at[stage])
    plgpu.commit_smem()  # all warps have read d_output
    do[...] = dv
    plgpu.commit_smem()
    target = p.results.dv.at[(*p.rows(it.i), p.block(it.i, step), p.columns(step))]
    plgpu.copy_smem_to_gmem(do, target)


def store_score_gradient(it: Item, dA):
    """Store the transposed dA in two terms, in the tile of A, which no product reads any more."""
    it.A[...] = split(it.dA, lax.optimization_barrier(jnp.where(it.scan.earlier(), dA, 0.0)))


def store_gradient(it: Item, drawn, fed, edge):
    """Form dq, dk and dg of the warpgroup's channels, and send them to global memory."""
    p, w, t = it.p, it.w, it.p.tiles
    q, k, x_rest, y_rest = it.q.at[w], it.k.at[w], t.x_rest.at[w], t.y_rest.at[w]
    if p.plan.resets:
        edge = edge * it.scan.passes()
        drawn, fed = it.scan.from_state(drawn), it.scan.to_state(fed)
    t.sums.at[w][...] = edge
    M = gate_sums(it)  # formed again: it would not stay in registers beside the sums
    plgpu.barrier_arrive(p.barriers.gates_read)
    # [C, 64]
    push = product((it.dA, q), (it.A, q), (it.dA, x_rest))
    drawn = tiles.added(drawn, *((transposed(d), y) for d, y in ((it.dA, k), (it.dA, y_rest), (it.A, k))))
    p.meet()  # both are done with A and dA
    y = read(k) + read(y_rest)
    y_rest[...] = (y * fed).astype(bf16)
    k[...] = (jnp.exp2(-M) * (fed + it.scale * push)).astype(bf16)
    used = (read(q) + read(x_rest)) * drawn
    q[...] = (it.scale * jnp.exp2(M) * drawn).astype(bf16)
    behind_gate, lost = it.scale * (used - y * push), t.scores.at[w]
    high = high_part(behind_gate)
    x_rest[...] = high.astype(bf16)
    lost[...] = (behind_gate - high).astype(bf16)
    used = used.sum(1)
    plgpu.commit_smem()
    suffix, prefix = it.scan.sums()
    dg = product((suffix, x_rest), (suffix, lost), (prefix, y_rest)) + columns(t.sums.at[w])
    plgpu.commit_smem()  # all warps are done with the tile
    x_rest[...] = dg.astype(bf16)
    plgpu.commit_smem()
    place = *p.rows(it.i), p.place(it.i)[2], half(w)
    for tile, result in ((q, p.results.dq), (k, p.results.dk), (x_rest, p.results.dg)):
        plgpu.copy_smem_to_gmem(tile, result.at[place])
    b, c, block = p.place(it.i)
    p.results.used[b, c, block, w] = used  # last: fences wait for what is on its way to memory
