"""The scaling warpgroups of the per-key-gate scan: load gates, sum them, scale operands.

Each has 64 channels of K and works ahead of the warpgroups that multiply.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.gate_range import in_range, weak_on_average
from glax._src.kernels.pallas_gpu.scan_key_gate_program import Program
from glax._src.kernels.pallas_gpu.scan_key_gate_refs import FLAGS
from glax._src.kernels.pallas_gpu.tiles import BY_ROW, LOG2E, C, read, transposed, zeros

ROOMY = 96  # registers of a thread that hold x and y together


@dataclasses.dataclass(frozen=True)
class Scaler:
    """A scaling warpgroup. share: which 64 channels. matrix [C, C]: sums gates by token. weak: whether q^ has two terms."""

    p: Program
    share: Any
    total: Any
    matrix: Any
    channels: slice | pl.Slice
    weak: Any


def scale_segment(p: Program):
    """Scale every chunk of the segment; store its log decays and where its gates are out of range."""
    w = p.plan
    plgpu.set_max_registers(w.registers[0], action="decrease")
    share, total = p.warpgroup - w.consumers, p.count()
    if w.to_edge:
        adjoint = p.adjoint.astype(jnp.float32) if w.either else float(p.adjoint)
        matrix = tiles.edge_matrix(w.reverse, adjoint if w.terms == 1 else p.hidden(adjoint))
    else:
        matrix = tiles.middle_matrix(w.reverse)
    channels = pl.ds(share * 64, 64)
    pl.when(share == 0)(functools.partial(prepare, p, total))
    plgpu.barrier_arrive(p.barriers.prepared)
    plgpu.barrier_wait(p.barriers.prepared)
    weak = p.tiles.weak[0] > 0 if w.outputs else False
    s = Scaler(p, share, total, matrix, channels, weak)
    carry = zeros((C,), BY_ROW), zeros((64,), BY_ROW)
    out_of_range, log = lax.fori_loop(0, total, functools.partial(scale_chunk, s), carry)

    block, h, e = p.place()

    @pl.when(block == 0)
    def _():
        if w.either:
            p.results.log[e, h, channels] = log
        if not w.to_edge:
            for copy in range(0, FLAGS // w.scalers, 64):
                p.results.out_of_range[e, h, pl.ds(share * (FLAGS // w.scalers) + copy, 64)] = out_of_range


def prepare(p: Program, total):
    """Fetch the first gates, and store what all scalers read."""
    for slot in range(2):
        pl.when(slot < total)(functools.partial(p.fetch_gates, slot, slot))
    p.tiles.halves[...] = tiles.halves(p.plan.reverse)
    if p.plan.outputs:
        gates = p.operands.gates.at[0]
        segment = p.segment_field(0), p.segment_field(1), total, p.of_keys(gates)
        p.tiles.weak[0] = weak_on_average(gates, *segment).astype(jnp.int32)
    plgpu.commit_smem()


def scale_chunk(s: Scaler, step, carry):
    """Scale the operands of one chunk. carry: how far the segment is out of range [C], its log decays [64]."""
    p, w = s.p, s.p.plan
    out_of_range, log = carry
    slot, gate_slot = lax.rem(step, jnp.int32(w.stages)), lax.rem(step, jnp.int32(2))
    a = p.tiles.a.at[slot, :, s.channels]
    gates = load_gates(s, gate_slot)
    # [C, 64]; [C]; [64] of both halves
    M, largest, ends = sum_gates(s, gates)
    if w.either:
        log = log + ends[0] + ends[1]
    pl.when(jnp.logical_not(s.weak))(lambda: plgpu.barrier_arrive(p.barriers.gates_consumed.at[gate_slot]))
    if not w.to_edge:
        out_of_range = note_range(s, step, out_of_range, largest, ends)
    else:
        ends = decays_to_edge(s, step, ends)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])  # and so until all have consumed what is overwritten here next
    for side, end in enumerate(ends):
        p.tiles.sums[slot, side, s.channels] = end
    scale_operands(s, slot, a, M, gates)
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.barriers.scaled.at[slot])

    # Where gates are weak, the output warpgroup reads their tile last, and fetches the next.
    @pl.when((s.share == 0) & jnp.logical_not(s.weak) & (step + 2 < s.total))
    def _():
        plgpu.barrier_wait(p.barriers.gates_consumed.at[gate_slot])
        p.fetch_gates(step + 2, gate_slot)

    return out_of_range, log


def load_gates(s: Scaler, gate_slot) -> list:
    """Return the tiles [C, 64] of the gates' terms, once they are loaded."""
    p, w = s.p, s.p.plan
    gates = [p.tiles.gates.at[gate_slot * w.terms + term, :, s.channels] for term in range(w.terms)]
    plgpu.barrier_wait(p.barriers.gates_loaded.at[gate_slot])
    if w.to_edge and w.terms == 1:  # gates of two terms are clamped where they are split
        (only,) = gates
        only[...] = jnp.maximum(plgpu.load(only, layout=tiles.WGMMA), jnp.bfloat16(LOG_OF_ZERO))
        plgpu.commit_smem()
    return gates


def sum_gates(s: Scaler, gates):
    """Return M [C, 64], the largest |M| by token [C] (None to the edge), and L and R [64] of every channel."""
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


def note_range(s: Scaler, step, out_of_range, largest, ends):
    """Store whether the chunk's gates are out of range; return it for the segment up to this chunk.

    Where states are stored, the number is that of the chunks left when the first comes that is out of range: the exact scan
    begins there.
    """
    p, w = s.p, s.p.plan
    near = in_range(largest, ends)
    left = jnp.maximum(out_of_range, (p.count() - step).astype(jnp.float32)) if w.states else 1.0
    if w.states:

        @pl.when(p.place()[0] == 0)
        def _():
            flags = jnp.where(near, 0.0, 1.0)
            p.results.chunk_out_of_range[p.segment_field(0), p.chunk(step), p.place()[1], s.share] = flags

    return jnp.where(near, out_of_range, left)


def decays_to_edge(s: Scaler, step, ends):
    """Return the log decays [64] that apply before the state is stored, and after."""
    p = s.p
    if not p.plan.states:
        return (ends[0] + ends[1],)
    # dL/dS is stored at the middle of a chunk that is in range, and else at its edge
    place = p.segment_field(0), p.chunk(step), p.place()[1]
    out_of_range = p.operands.known_out_of_range[place].astype(jnp.float32)
    return ends[1] * (1.0 - out_of_range), ends[0] + ends[1] * out_of_range


def scale_operands(s: Scaler, slot, a, M, gates):
    """Replace a and q by k^ and q^; store every token's score with itself, and where gates are weak what q^ lost in rounding."""
    p, w = s.p, s.p.plan
    roomy = w.registers[0] > ROOMY  # else own scores are formed of tiles that are read once more
    if w.outputs and not roomy:
        p.tiles.own_scores[slot, s.share] = jnp.sum(read(p.tiles.q.at[slot, :, s.channels]) * read(a), axis=1)
    # [C, 64]
    y = read(a) * jnp.exp2(M * (LOG2E if w.to_edge else -LOG2E))
    a[...] = (y * p.operands.scale[p.segment_field(3)] if w.adjoint else y).astype(jnp.bfloat16)
    if w.outputs:
        q = p.tiles.q.at[slot, :, s.channels]
        # [C, 64]
        x = read(q) * jnp.exp2(M * LOG2E)
        q[...] = x.astype(jnp.bfloat16)
        if roomy:
            p.tiles.own_scores[slot, s.share] = jnp.sum(x * y, axis=1)

        @pl.when(s.weak)
        def _():
            gates[0][...] = (x - read(q)).astype(jnp.bfloat16)
