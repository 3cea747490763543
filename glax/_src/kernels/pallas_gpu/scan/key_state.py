"""Define the warpgroups of the per-key-gate scan that carry the state: S' = e^L S and S_out = e^R (S' + sum_j k^_j v_j^T)."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, LOG2E, C, by_row, decayed, transposed, zeros
from glax._src.kernels.pallas_gpu.plan import LOG_OF_RESET
from glax._src.kernels.pallas_gpu.scan.key_program import Program
from glax._src.kernels.pallas_gpu.scan.key_refs import exact_place


def carry_own_columns(p: Program):
    """Carry 64 columns of the state: one warpgroup of a scan without outputs."""
    columns = pl.ds((p.place()[0] * p.plan.consumers + p.warpgroup) * 64, 64)
    pl.when(p.warpgroup == 0)(lambda: p.fill(p.fetch))
    carry_state(p, columns, advance_own_columns)


def carry_shared_state(p: Program):
    """Carry the whole state of the program, and hand S' to the warpgroup that forms outputs."""
    columns = pl.ds(p.place()[0] * p.plan.columns, p.plan.columns)
    p.fill(p.fetch)
    carry_state(p, columns, advance_shared_state)


def advance_own_columns(p: Program, columns, S, step, slot, decay_behind):
    """Return decay_behind(S) + sum_j k^_j v_j^T, [K, columns] in float32. S is stored if the plan stores states.

    S: the S' of the chunk. decay_behind(x) applies the decay that is left behind S'.
    """
    w, me = p.plan, p.warpgroup
    pl.when(me == 0)(lambda: p.refill(step))
    if w.states:
        store_state(p, S, step, p.tiles.state.at[lax.rem(step, jnp.int32(w.state_stages)), me], columns)
    S = decay_behind(S)
    S = tiles.added(S, (transposed(p.tiles.a.at[slot]), p.tiles.b.at[slot, :, pl.ds(me * 64, 64)]))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return S


def advance_shared_state(p: Program, columns, S, step, slot, decay_behind):
    """Return what `advance_own_columns` returns. The output warpgroup reads S' before the next state is stored."""
    pl.when(step > 0)(functools.partial(wait_for_outputs, p, step - 1))
    store_state(p, S, step, p.tiles.state, columns)
    plgpu.barrier_arrive(p.barriers.state_stored)
    p.refill(step)

    def with_tokens(S):
        return tiles.added(S, (transposed(p.tiles.a.at[slot]), p.tiles.b.at[slot]))

    if p.plan.resets:
        S = lax.cond(
            p.has_reset(slot), functools.partial(begin_anew, p, slot), lambda S: with_tokens(decay_behind(S)), S
        )
    else:
        S = with_tokens(decay_behind(S))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    return S


def wait_for_outputs(p: Program, step):
    """Wait until the outputs of a step are formed. Where its chunk contains a reset, `begin_anew` has waited."""
    if not p.plan.resets:
        plgpu.barrier_wait(p.barriers.state_read)
        return
    has_reset = p.has_reset(lax.rem(step, jnp.int32(p.plan.stages)))  # its tiles are not fetched again before this wait
    pl.when(jnp.logical_not(has_reset))(lambda: plgpu.barrier_wait(p.barriers.state_read))


def begin_anew(p: Program, slot, S):
    """Return the state behind a chunk that contains a reset, from its tokens behind the newest. The outputs of the chunk read
    all of k^, so its other tokens are cleared once these are formed."""
    plgpu.barrier_wait(p.barriers.state_read)
    slot = lax.optimization_barrier(slot)
    before = p.tiles.newest[slot, p.plan.last_token]
    first, end = (0, C - before) if p.plan.reverse else (before, C)
    tiles.clear([p.tiles.a.at[slot, :, pl.ds(i * 64, 64)] for i in range(p.plan.scalers)], first, end)
    return tiles.added(zeros(S.shape), (transposed(p.tiles.a.at[slot]), p.tiles.b.at[slot]))


def carry_state(p: Program, columns, advance):
    """Carry the state [K, columns] in float32 through all chunks, and store the last.

    advance: `advance_own_columns` or `advance_shared_state`.
    """
    w = p.plan
    plgpu.set_max_registers(w.registers[1], action="increase")

    def scaled(step):
        slot = lax.rem(step, jnp.int32(w.stages))
        plgpu.barrier_wait(p.barriers.scaled.at[slot])
        return slot

    def log_decay(slot, place):
        return plgpu.load(p.tiles.sums.at[slot, place], layout=BY_ROW)

    def scan_to_edge(step, S):
        slot = scaled(step)
        if w.adds_behind:
            S = add_behind(p, columns, S, step)
        before, behind = log_decay(slot, 0), log_decay(slot, 1)
        if w.resets:  # no state passes
            log = LOG_OF_RESET * p.has_reset(slot).astype(jnp.float32)
            before, behind = (before, behind + log) if w.states else (before + log, behind)
        if not w.states:
            return advance(p, columns, S, step, slot, lambda S: decayed(S, before))
        return advance(p, columns, decayed(S, before), step, slot, lambda S: decayed(S, behind))

    def scan_to_middle(step, carry):
        S, tail = carry
        slot = scaled(step)
        out_of_range = p.tiles.out_of_range[slot]
        # S' of a chunk out of range is the state that enters it, and is decayed to the chunk's end here.
        in_range = 1.0 - out_of_range.astype(jnp.float32)
        before, behind = log_decay(slot, 0) * in_range, log_decay(slot, 1) * in_range

        def decay_through(S):
            return decayed(S, log_decay(slot, 0) + log_decay(slot, 1))

        def decay_behind(S):
            S = lax.cond(out_of_range > 0, decay_through, lambda S: S, S)
            if w.resets and not w.outputs:
                S = lax.cond(p.has_reset(slot), lambda S: zeros(S.shape), lambda S: S, S)
            return S

        # Never e^{tail + before}, which may be e^-120 = 0 where S is up to e^60 (`common.limits`).
        S = advance(p, columns, decayed(decayed(S, tail), before), step, slot, decay_behind)
        note_range(p, step, out_of_range)
        return store_behind(p, columns, S, behind, step) if w.stores_behind else (S, behind)

    S = zeros((w.K, columns.size))
    if w.start:
        start = p.operands.start.at[p.place()[2], p.place()[1], :, columns]
        S = plgpu.load(start, layout=tiles.WGMMA, optimized=False)
    if w.to_edge:
        S, tail = lax.fori_loop(0, p.count(), scan_to_edge, S), None
    else:
        S, tail = lax.fori_loop(0, p.count(), scan_to_middle, (S, zeros((w.K,), BY_ROW)))
    if w.states:  # not after the branch: its barrier's number would be held throughout, and spilled
        plgpu.wait_smem_to_gmem(0)
    w.leave(p.place()[2], functools.partial(store_last, p, columns, S, tail))


def state_behind(p: Program, step):
    """Return the index of the caller's state behind a step's chunk, and whether there is one."""
    chunks = -(-p.operands.a.shape[1] // C)
    return p.plan.state_behind(p.chunk(step), chunks)


def store_behind(p: Program, columns, S, tail, step):
    """Store e^tail S if the caller has a state behind the chunk. Return S [K, columns] and the log decay [K] that is left.

    These are (e^tail S, 0) where a state was stored, and else (S, tail).
    """
    _, is_one = state_behind(p, step)

    def stored():
        T, again = p.operands.a.shape[1], lax.optimization_barrier(step)
        index, _ = state_behind(p, again)
        token = p.chunk(again) * C + (0 if p.plan.reverse else C - 1)
        found = lax.optimization_barrier(decayed(S, tail))
        found += lost_in_rounding(p, tail, columns, jnp.minimum(token, T - 1))
        found = lax.optimization_barrier(found)
        p.results.behind[p.segment_field(0), index, p.place()[1], :, columns] = found
        return found, zeros((p.plan.K,), BY_ROW)

    return lax.cond(is_one, stored, lambda: (S, tail))


def add_behind(p: Program, columns, S, step):
    """Return S plus the gradient of the caller's state behind a chunk, if there is one."""
    index, is_one = state_behind(p, step)

    def added(S):
        place = p.operands.behind.at[p.segment_field(0), index, p.place()[1], :, columns]
        return S + plgpu.load(place, layout=tiles.WGMMA, optimized=False)

    return lax.cond(is_one, added, lambda S: S, S)


def note_range(p: Program, step, flag):
    """Write whether the chunk is out of range, in one program and warpgroup of those that share its channels."""
    w, (block, head) = p.plan, p.place()[:2]

    @pl.when((block == 0) & (p.warpgroup == (1 if w.outputs else 0)))
    def _():
        batch, chunk = p.segment_field(0), p.chunk(step)
        if w.states:
            p.results.out_of_range[batch, chunk, head] = flag
        if w.outputs:
            chunks = -(-w.rows_of_chunks(p.operands.a.shape[1]) // C)
            item = (batch * chunks + chunk) * w.H + head
            p.results.by_group[exact_place(p.results.by_group.shape[0], item)] = flag


def store_state(p: Program, S, step, tile, columns):
    """Store S' in the tile, and in a scan that stores states send it to global memory."""
    if p.plan.states:
        plgpu.wait_smem_to_gmem(p.plan.state_stages - 1, wait_read_only=True)
    tile[...] = S.astype(jnp.bfloat16)
    plgpu.commit_smem()
    if p.plan.states:
        target = p.results.states.at[p.segment_field(0), p.chunk(step), p.place()[1], :, columns]
        plgpu.copy_smem_to_gmem(tile, target)


def store_last(p: Program, columns, S, tail, at):
    """Store the state behind the segment. tail: [K], the decay of the segment's last half chunk, or None."""

    def with_last_token(S):
        first, end = p.own_rows()
        token = jnp.clip(first if p.plan.reverse else end - 1, 0, p.operands.a.shape[1] - 1)
        return decayed(S, tail) + lost_in_rounding(p, tail, columns, token)

    if tail is not None:
        # A packed sequence without tokens must not read a row: it may hold anything.
        S = lax.cond(has_tokens(p), with_last_token, lambda S: S, S) if p.plan.clears else with_last_token(S)
    p.results.last[at, p.place()[1], :, columns] = S


def has_tokens(p: Program):
    """Return whether the segment has a token, in a plan that clears rows."""
    if p.plan.packed:
        return p.count() > 0
    first, end = p.own_rows()
    return first < end


def lost_in_rounding(p: Program, tail, columns, token):
    """Return what the last token of a chunk lost when it was scaled and rounded, [K, columns]. Where gates are strong, this
    token is most of the state."""
    w, token = p.plan, (p.segment_field(0), token)
    a, b = p.operands.a, p.operands.b
    k, v = (
        plgpu.load(x.at[(*token, head, part)], layout=layout, optimized=False)
        for x, head, part, layout in (
            (a, p.of_keys(a), pl.ds(0, w.K), BY_ROW),
            (b, p.of_values(b), columns, BY_COLUMN),
        )
    )
    k = k.astype(jnp.float32)
    rounded = (k * jnp.exp2(-tail * LOG2E)).astype(jnp.bfloat16).astype(jnp.float32)
    # [K]
    left = (k - rounded * jnp.exp2(tail * LOG2E)) * jnp.where(p.count() > 0, 1.0, 0.0)
    shape = w.K, columns.size
    return by_row(left, shape) * tiles.by_column(v, shape).astype(jnp.float32)
