"""Scale the operands of a scan with per-key gates: the role *scale* of `key.py`, which has the formulas.

Its warpgroups load gates, sum them to M, L and R, and replace q and k of a chunk by q^ and k^, each for 64 channels of K. They
agree on whether the chunk is in range.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import FAST_LIMIT, LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, LOG2E, C, read, transposed, zeros
from glax._src.kernels.pallas_gpu.plan import LOG_OF_RESET, Scan, quotient

BF16 = jnp.bfloat16
Program = Any  # `key.Program`; `key.py` imports this file
OUT_OF_RANGE = 2 * FAST_LIMIT  # in the place of the sum ahead of S', of a token or channel
ROOMY = 96  # registers of a thread that hold x and y together
SAMPLES, WEAK = 8, -0.25  # gates of a program that are sampled, and the average above which they are weak


def in_range(largest, ends):
    """Return a mask [C], which is true everywhere exactly if |M|, |L| and |R| permit the form about the chunk's middle
    (`common.limits`).

    largest: [C], the largest |M| by token. ends: L and R, [64] each, by channel; C is 64, so entry n of the mask is for token n
    and channel n. M excludes the first token's gate, and L includes it. Sums of gates of -inf are NaN, for which no comparison
    holds.
    """
    first, second = map(jnp.abs, ends)
    return (largest <= FAST_LIMIT) & (first <= FAST_LIMIT) & (second <= FAST_LIMIT)


def weak_on_average(g, batch, first, end, count, head):
    """Return whether a segment's gates g [B, T, H, K] are weak on average, by a sample of a few gates of different chunks,
    tokens and channels.

    g: in global memory. batch, head: indices of g. first: the segment's first row. end: the row behind its last. count: the
    number of its chunks.
    """
    K = g.shape[3]
    total: Any = 0.0
    for i in range(SAMPLES):
        token = first + quotient(i * count, SAMPLES) * C + i * (C // SAMPLES)
        total += g[batch, jnp.clip(token, 0, jnp.maximum(end, 1) - 1), head, i * (K // SAMPLES)].astype(jnp.float32)
    return total > SAMPLES * WEAK


@dataclasses.dataclass(frozen=True)
class Scaler:
    """Hold what one warpgroup of the role *scale*, a scaler, reads throughout.

    share: the index of its 64 channels. channels: their slice of K. total: the number of chunks. matrix: [C, C] in bfloat16, in
    registers, whose product with gates [C, 64] is M. weak: whether q^ has two terms.

    In this file `step` is the number of a chunk in scan order, `slot` is the slot of its tiles of q, k and v, and `gate_slot`,
    0 or 1, the slot of its gates. `M` is the first result of `sum_gates`, [C, 64] in registers: the logarithms by which tokens
    are scaled.
    """

    p: Program
    share: Any
    total: Any
    matrix: Any
    channels: slice | pl.Slice
    weak: Any


def scale_segment(p: Program):
    """Do the work of the role *scale*: scale every chunk of the segment. A `two_way` scan stores the segment's log decays in
    global memory, 64 channels of [K] in float32 by each warpgroup."""
    w = p.plan
    plgpu.set_max_registers(w.registers[0], action="decrease")
    share, total = p.warpgroup - w.consumers, p.count()
    if w.to_edge:
        adjoint = p.adjoint.astype(jnp.float32) if w.two_way else float(p.adjoint)
        matrix = tiles.edge_matrix(w.reverse, adjoint if w.terms == 1 else p.hidden(adjoint))
    else:
        matrix = tiles.middle_matrix(w.reverse)
    channels = pl.ds(share * 64, 64)
    pl.when(share == 0)(functools.partial(prepare, p, total))
    p.pipeline.prepared.arrive()
    p.pipeline.prepared.wait()
    weak = p.tiles.weak[0] > 0 if w.outputs else False
    s = Scaler(p, share, total, matrix, channels, weak)
    log = lax.fori_loop(0, total, functools.partial(scale_chunk, s), zeros((64,), BY_ROW))
    if w.two_way:
        block, h, e = p.place()

        @pl.when(block == 0)
        def _():
            p.results.log[e, h, channels] = log


def prepare(p: Program, total):
    """Start to load the gates of the first two chunks, and store `Tiles.halves` and `Tiles.weak`, which all scalers read. One
    scaler calls this. total: the number of chunks."""
    if p.plan.resets and not p.plan.outputs:
        p.tiles.halves[...] = tiles.halves(p.plan.reverse)
        plgpu.commit_smem()
    for slot in range(2):
        pl.when(slot < total)(functools.partial(p.load_gates, slot, slot))
    if not p.plan.resets or p.plan.outputs:
        p.tiles.halves[...] = tiles.halves(p.plan.reverse)
    if p.plan.outputs:
        gates = p.operands.gates[0]
        segment = p.segment_field(0), *p.own_rows(), total, p.of_keys(gates)
        p.tiles.weak[0] = weak_on_average(gates, *segment).astype(jnp.int32)
    plgpu.commit_smem()


def scale_chunk(s: Scaler, step, log):
    """Scale the operands of a step's chunk in shared memory, and return `log`, to which a `two_way` scan adds the chunk's log
    decays.

    log: [64], the log decays of the segment up to the chunk.
    """
    p, w = s.p, s.p.plan
    slot, gate_slot = p.pipeline.tokens.slot(step), lax.rem(step, jnp.int32(2))
    gates = loaded_gates(s, gate_slot)
    if w.clears:
        clear_foreign(s, step, slot, gates)
    # [C, 64]; [C]; [64] of both halves
    M, largest, ends = sum_gates(s, gates)

    # Scalers wait until q, k and v are loaded. These are loaded once the warpgroups that multiply are done with the chunk
    # before in this slot. So they have also read its decays and scores, which are overwritten here next.
    if w.to_edge:
        if w.two_way:
            log = log + ends[0] + ends[1]
        release_gates(s, step, gate_slot)
        wait_for_tokens(s, slot)
        if w.two_way and w.resets:
            log = log + LOG_OF_RESET * p.has_reset(slot).astype(jnp.float32)
        store_decays(s, slot, decays_to_edge(s, step, ends))
        scale_keys(s, slot, M)
    else:
        wait_for_tokens(s, slot)
        before, after = ends
        store_decays(s, slot, (jnp.where(in_range(largest, ends), before, OUT_OF_RANGE), after))
        p.pipeline.met.arrive()
        own, y = form_early(s, slot, M)
        out_of_range = any_out_of_range(s, slot)

        @pl.when(jnp.logical_not(out_of_range))
        def _():
            release_gates(s, step, gate_slot)
            scale_keys(s, slot, M, y)
            if w.outputs:
                scale_queries(s, step, slot, M, gates, own, y)

        @pl.when(out_of_range)
        def _():
            scale_to_edges(s, step, slot, gates)
            release_gates(s, step, gate_slot)

    if w.resets and not w.outputs:
        slot = lax.rem(lax.optimization_barrier(step), jnp.int32(w.stages))  # again: the compiler would spill one
        pl.when(p.has_reset(slot))(functools.partial(clear_cut, s, slot))
    plgpu.commit_smem()
    p.pipeline.scaled.filled(slot)
    if not roomy(w):
        load_next_gates(s, step, gate_slot)
    return log


def loaded_gates(s: Scaler, gate_slot) -> list:
    """Wait until the gates are loaded, and return references to their terms, a list of tiles [C, 64] of this scaler's channels.

    Gates of one term are raised to LOG_OF_ZERO in place if tokens are scaled to the edge.
    """
    p, w = s.p, s.p.plan
    gates = [p.tiles.gates.at[gate_slot * w.terms + term, :, s.channels] for term in range(w.terms)]
    p.pipeline.gates.wait(gate_slot)
    if w.to_edge and w.terms == 1:  # gates of two terms are clamped where they are split
        (only,) = gates
        only[...] = jnp.maximum(plgpu.load(only, layout=tiles.WGMMA), BF16(LOG_OF_ZERO))
        plgpu.commit_smem()
    return gates


def sum_gates(s: Scaler, gates):
    """Return (M [C, 64], the largest |M| by token [C], a list of L and R by channel, [64] each), in registers, in float32 and
    natural logarithms.

    gates: the terms, tiles [C, 64]. If tokens are scaled to the edge, M is the sum from a token to that edge, and the second
    result is None.
    """
    w = s.p.plan

    def summed(M, halves):
        for g in gates:
            plgpu.wgmma(M, s.matrix, g)
        for g in gates:
            plgpu.wgmma(halves, transposed(g), tiles.by_halves(s.p.tiles.halves))
        M = tiles.after(M, w.terms)
        largest = None if w.to_edge else jnp.max(jnp.abs(M), axis=1)
        return M, largest, halves[...]

    # sums [64, 8]: of every channel, the sum over the first half of the chunk, over the second, and zeros
    M, largest, sums = pl.run_scoped(summed, plgpu.ACC((C, 64)), plgpu.ACC((64, 8)))
    return M, largest, [tiles.column_of(sums, side) for side in (0, 1)]


def clear_cut(s: Scaler, slot):
    """Zero the rows of k^ in the tile of `slot` that a reset divides from the edge by which the scan leaves the chunk.

    With time these are the rows before the chunk's newest reset. Against time they are those with a reset at or before them.
    `behind_newest` and `before_all` return a number for each row: it is below 0 where the row is cleared.
    """
    p, w = s.p, s.p.plan
    share, slot = lax.optimization_barrier((p.warpgroup - w.consumers, slot))
    plgpu.commit_smem()  # all warps have stored k^
    # [C]
    if w.two_way:
        against = p.adjoint
        reach = (1 - against) * behind_newest(p, slot) + against * before_all(p, slot)
    else:
        reach = before_all(p, slot) if w.adjoint else behind_newest(p, slot)
    tile = p.tiles.k.at[slot, :, pl.ds(share * 64, 64)]
    x = plgpu.load(tile, layout=tiles.WGMMA)
    tile[...] = jnp.where(tiles.by_row(reach, x.shape) >= 0, x, BF16(0))


def behind_newest(p: Program, slot):
    """Return the position of each token in scan order less the position of the chunk's newest reset, [C] in int32: below 0
    before the reset."""
    row = plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW)
    return (C - 1 - row if p.plan.reverse else row) - p.tiles.newest[slot, p.plan.last_token]


def before_all(p: Program, slot):
    """Return 0 for each token before all resets of the chunk, and a number below 0 for the others, [C] in int32."""
    return -1 - plgpu.load(p.tiles.newest.at[slot], layout=BY_ROW)


def wait_for_tokens(s: Scaler, slot):
    """Wait until q, k and v of the chunk in `slot` are loaded. Where rows are cleared, `clear_foreign` has waited."""
    if not s.p.plan.clears:
        s.p.pipeline.tokens.wait(slot)


def clear_foreign(s: Scaler, step, slot, gates):
    """Wait until q, k and v are loaded. Zero their rows, and the rows of `gates`, that do not belong to the segment, in place.

    Such rows belong to another sequence, or may hold NaN. This comes before all products, which leave few registers. gates: the
    terms, tiles [C, 64].
    """
    p, w = s.p, s.p.plan
    p.pipeline.tokens.wait(slot)
    first, end = (row - p.row(step) for row in p.own_rows())

    @pl.when((first > 0) | (end < C))
    def _():
        # These are computed again: the compiler would hold what it computes for all tiles throughout.
        share, at = lax.optimization_barrier((p.warpgroup - w.consumers, slot))
        channels = pl.ds(share * 64, 64)
        of_keys = (p.tiles.k, p.tiles.q) if w.outputs else (p.tiles.k,)
        tiles.clear((*gates, *(tile.at[at, :, channels] for tile in of_keys)), first, end)
        for block in range(w.columns // 64):
            values = p.tiles.v.at[at, :, pl.ds(block * 64, 64)]
            pl.when(share == block % w.scalers)(functools.partial(tiles.clear, (values,), first, end))


def roomy(w: Scan) -> bool:
    """Return whether the plan w leaves registers room for q^ and k^ together, so that both are formed before either is
    stored."""
    return w.registers[0] > ROOMY


def release_gates(s: Scaler, step, gate_slot):
    """Report that the gates' tile may be overwritten, if scalers read it last. If registers have room, also start to load the
    next."""
    pl.when(reads_gates_last(s))(lambda: s.p.pipeline.gates.release(gate_slot))
    if roomy(s.p.plan):
        load_next_gates(s, step, gate_slot)


def reads_gates_last(s: Scaler):
    """Return whether scalers read the gates' tile last, and load the next gates into it. Otherwise *output* does both, because
    the tile holds what q^ lost in rounding."""
    return True if s.p.plan.lost_stages else jnp.logical_not(s.weak)


def load_next_gates(s: Scaler, step, gate_slot):
    """Start to load the gates of the chunk of step + 2 into the tile, once all its readers have released it. Do nothing where
    *output* loads these, or no such chunk exists. One scaler loads for all."""
    p = s.p

    @pl.when((s.share == 0) & reads_gates_last(s) & (step + 2 < s.total))
    def _():
        p.pipeline.gates.acquire(gate_slot)
        p.load_gates(step + 2, gate_slot)


def any_out_of_range(s: Scaler, slot):
    """Wait until all scalers have arrived at `met`, and return whether the chunk is out of range in any scaler's channels. So
    all scalers scale the chunk alike.

    One scaler stores the result in `Tiles.out_of_range`.
    """
    p = s.p
    p.pipeline.met.wait()
    sums = plgpu.load(p.tiles.sums.at[slot, 0], layout=tiles.in_every_warp(p.plan.K))
    # As integers, which a warp compares in one instruction. They are in the order of numbers above 0.
    largest = jnp.max(lax.bitcast_convert_type(sums, jnp.int32))
    out_of_range = largest == int(np.float32(OUT_OF_RANGE).view(np.int32))

    @pl.when(s.share == 0)
    def _():
        p.tiles.out_of_range[slot] = out_of_range.astype(jnp.int32)

    return out_of_range


def store_decays(s: Scaler, slot, decays):
    """Store one or two log decays [64] of this scaler's channels in `Tiles.sums`. *carry* applies the first before S' is
    stored, and the second after that."""
    for place, decay in enumerate(decays):
        s.p.tiles.sums[slot, place, s.channels] = decay


def decays_to_edge(s: Scaler, step, ends):
    """Return a tuple of the log decays [64] that *carry* applies to the state before it stores the state, and after. Where no
    states are stored, the tuple has one: L + R. ends: L and R."""
    p = s.p
    if not p.plan.states:
        return (ends[0] + ends[1],)
    # dL/dS is stored at the middle of a chunk that is in range, and else at its edge
    place = p.segment_field(0), p.chunk(step), p.place()[1]
    out_of_range = p.operands.known_out_of_range[place].astype(jnp.float32)
    return ends[1] * (1.0 - out_of_range), ends[0] + ends[1] * out_of_range


def scale_to_edges(s: Scaler, step, slot, gates):
    """Replace k_j and q_i of a chunk out of range by k_j e^{R - M_j} and q_i e^{L + M_i}, in place: decays behind token j, and
    through token i.

    A factor exceeds 1 only where the gates let the state grow, so the factors are exact for all gates. gates: the terms, tiles
    [C, 64], whose gates are first raised to LOG_OF_ZERO in place. All scalers call this, and wait for one another.
    """
    p, w = s.p, s.p.plan
    for g in gates:  # a sum with -inf would be NaN
        g[...] = jnp.maximum(plgpu.load(g, layout=tiles.WGMMA), BF16(LOG_OF_ZERO))
    plgpu.commit_smem()
    # [C, 64]; [64] of both halves
    M, _, ends = sum_gates(s, gates)
    p.pipeline.met.arrive()
    p.pipeline.met.wait()  # all have read what `ends` overwrites
    store_decays(s, slot, ends)
    plgpu.commit_smem()

    def scaled(tile, log):
        """Return x e^log of a tile x [C, 64], in float32 in registers."""
        # [C, 64]
        return read(tile) * jnp.exp2(log * LOG2E)

    def end(side: int):
        """Return L (side 0) or R (side 1) of the channels, repeated over the tokens, [C, 64]."""
        # [C, 64]
        return tiles.by_column(plgpu.load(p.tiles.sums.at[slot, side, s.channels], layout=BY_COLUMN), (C, 64))

    k = p.tiles.k.at[slot, :, s.channels]
    k[...] = scaled(k, end(1) - M).astype(BF16)
    if w.outputs:
        q = p.tiles.q.at[slot, :, s.channels]
        x = scaled(q, end(0) + M)
        if not w.lost_stages:
            q[...] = x.astype(BF16)
        store_queries(s, step, gates, x, q)


def form_early(s: Scaler, slot, M):
    """Return (own scores, k^), of which at least one is None. If registers have room, form k^ [C, 64]; else in a scan with
    outputs the own scores q_i . k_i over the scaler's channels, [C].

    The result is formed while other scalers arrive. Without the barrier the compiler would move the computation behind that
    point.
    """
    p, w = s.p, s.p.plan
    if roomy(w):
        return None, lax.optimization_barrier(scaled_keys(s, slot, M))
    if not w.outputs:
        return None, None
    q, k = (tile.at[slot, :, s.channels] for tile in (p.tiles.q, p.tiles.k))
    return lax.optimization_barrier(jnp.sum(read(q) * read(k), axis=1)), None


def scaled_keys(s: Scaler, slot, M):
    """Return k^ [C, 64] in registers: in float32 in a scan with outputs, which forms own scores of k^, else in bfloat16. In a
    scan of dL/dS, k^ includes the scale."""
    p, w = s.p, s.p.plan
    y = read(p.tiles.k.at[slot, :, s.channels]) * jnp.exp2(M * (LOG2E if w.to_edge else -LOG2E))
    if w.adjoint:
        y = y * p.operands.scale[p.segment_field(3)]
    return y if w.outputs else y.astype(BF16)


def scale_keys(s: Scaler, slot, M, y=None):
    """Replace k by k^ [C, 64] in bfloat16, in place. y: k^ if `form_early` has formed it, else None."""
    y = scaled_keys(s, slot, M) if y is None else y
    s.p.tiles.k[slot, :, s.channels] = y.astype(BF16)


def scale_queries(s: Scaler, step, slot, M, gates, own, y):
    """Replace q by q^ = q e^M in place, and store every token's score with itself, q^ . k^, over the scaler's channels. If
    gates are weak, also store what q^ lost in rounding.

    own: the scores [C] if `form_early` has formed them, else None; then y is k^ [C, 64]. gates: the terms, tiles [C, 64].
    """
    p = s.p
    q = p.tiles.q.at[slot, :, s.channels]
    # [C, 64]
    x = read(q) * jnp.exp2(M * LOG2E)
    if not p.plan.lost_stages:
        q[...] = x.astype(BF16)
    p.tiles.own_scores[slot, s.share] = jnp.sum(x * y, axis=1) if own is None else own
    store_queries(s, step, gates, x, q)


def store_queries(s: Scaler, step, gates, x, q):
    """Store q^ = x [C, 64] in the tile q, and what q^ lost in rounding where gates are weak.

    x: float32. q: the tile [C, 64] of the scaler's channels. gates: the terms, tiles [C, 64]. With tiles for what q^ lost, the
    first of two terms is truncated, which takes fewer instructions than to round. Without, the tile of q holds x already, and
    the tile of the gates takes the second term.
    """
    lost = s.p.pipeline.lost
    if lost is None:

        @pl.when(s.weak)
        def _():
            gates[0][...] = (x - read(q)).astype(BF16)

        return

    @pl.when(jnp.logical_not(s.weak))
    def _():
        q[...] = x.astype(BF16)

    @pl.when(s.weak)
    def _():
        slot = lost.slot(step)
        high = tiles.high_part(x)
        q[...] = high.astype(BF16)
        lost.acquire(slot, step)
        s.p.tiles.lost[slot, :, s.channels] = (x - high).astype(BF16)
