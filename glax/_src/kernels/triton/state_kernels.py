"""Carry a state along a segment of a sequence, to the states at its chunks, and scan over segments.

G_i is the sum of the log decays of a chunk through its token i, and G_last is that sum over the whole chunk:

    S_out = e^{G_last} S_in + sum_j (k_j e^{G_last - G_j}) v_j^T
    o_i   = (q_i e^{G_i})^T S_in + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j

One program has one segment, one head, and a block of the state. Three launches make segments independent: `segment_states`
computes their states from zero, `scan_segments` scans those, and `outputs` starts from the results.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    LOG_OF_ZERO,
    at,
    dot,
    exp,
    load_head_sums,
    load_key_sums,
    load_state,
    load_tile,
    place_of,
    store_state,
)


@triton.jit
def segment_states(a, b, g, scale, start, table, out, edge, total, D: tl.constexpr):
    """Compute each segment's final state from zero, out [segments, H, K, V], and its log decay, total [segments, H, K or 1].

    LAST: also compute these for a sequence's last segment (with ADJOINT its first). Otherwise they are 0 there.
    """
    carry_state(
        tl.program_id(0), a, b, g, scale, start, table, out, edge, total, D, D.HA, D.HB, D.ADJOINT, False, D.LAST,
        D.START,
    )  # fmt: skip


@triton.jit
def chunk_states(q, k, v, do, g, scale, start, d_start, table, out, edge, d_out, d_edge, D: tl.constexpr):
    """Compute S where each chunk begins (out) and dL/dS where each chunk ends (d_out), both [chunks, H, K, V].

    Each direction has half of the programs, because one direction alone leaves the GPU half idle.
    """
    program = tl.program_id(0)
    if program % 2 == 0:
        carry_state(
            program // 2, k, v, g, scale, start, table, out, edge, edge, D, D.HK, D.HV, False, True, True, D.START,
        )  # fmt: skip
    else:
        carry_state(
            program // 2, q, do, g, scale, d_start, table, d_out, d_edge, d_edge, D, D.HQ, D.H, True, True, True,
            D.D_START,
        )  # fmt: skip


@triton.jit
def carry_state(
    program, a, b, g, scale, start, table, out, edge, total, D: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    ADJOINT: tl.constexpr, EVERY: tl.constexpr, LAST: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Carry the state of k and v (a, b) along a segment, or with ADJOINT dL/dS of scale * q and do (a, b) in reverse:

        dS_in = e^{G_last} dS_out + sum_i (q_i e^{G_i}) do_i^T

    EVERY: store the state where the scan enters each chunk, out [chunks, H, K, V], and where it leaves the sequence, edge
    [N, H, K, V]. Otherwise store the state at the end of the segment, out [segments, H, K, V], and the segment's log
    decay, total [segments, H, K or 1]. START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0).
    g: the cumulative sums G of head gates. With key gates, a is `k_scaled` (or `q_scaled`) and g is `last` of
    `scale_operands`. The state is held transposed, so that no product is transposed, which would go through shared memory.
    """
    block, h, e = place_of(program, D.NK * D.NV, D)
    row = table + e * 6
    origin, filled, n = tl.load(row), tl.load(row + 2), tl.load(row + 3)
    edges, chunk = tl.load(row + 4), tl.load(row + 5)
    k, v = block // D.NV * D.BK + tl.arange(0, D.BK), block % D.NV * D.BV + tl.arange(0, D.BV)
    tokens = tl.arange(0, D.C)
    ha, hb = h // (D.H // HA), h // (D.H // HB)
    if START == 1:
        S = tl.trans(load_state(start, e, h, k, v, D.V, D.H, D.K, D.V).to(tl.float32))
    elif START == 2:
        S = tl.trans(load_state(start, n, h, k, v, D.V, D.H, D.K, D.V).to(tl.float32))
    else:
        S = tl.zeros([D.BV, D.BK], tl.float32)
    log = tl.zeros([D.BK], tl.float32)
    factor = tl.load(scale + n).to(tl.float32)
    steps = tl.cdiv(filled, D.C)
    if not LAST:  # no kernel reads the state that leaves a sequence
        steps = tl.where((edges & (1 if ADJOINT else 2)) != 0, 0, steps)
    last = load_chunk_sum(g, steps - 1 if ADJOINT else 0, origin, chunk, h, n, k, filled, D)
    for step in range(0, steps):
        c = steps - 1 - step if ADJOINT else step
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        if EVERY:
            store_state(out, tl.trans(S), chunk + c, h, k, v, D.H, D.K, D.V)
        # [C, BK]
        x = load_tile(at(a, first, ha, HA, D.K), tokens, k, count, HA, D.K, D.SIGN)
        # [C, BV]
        y = load_tile(at(b, first, hb, HB, D.V), tokens, v, count, HB, D.V, D.SIGN)
        if D.FORM == "head" or D.FORM == "constant":
            # [C]
            G = load_head_sums(g, first, h, n, tokens, count, D)
            end = load_head_sums(g, first, h, n, tokens * 0 + (D.C - 1), count, D)
            x = x * exp(G if ADJOINT else end - G)[:, None]
        # [BV, BK]
        added = dot(tl.trans(y), x, D)
        if ADJOINT:
            added *= factor
        if D.FORM == "key":
            S = S * exp(last)[None, :] + added
        elif D.FORM == "none":
            S += added
        else:
            S = S * exp(last) + added
        log += last
        # Loaded one chunk ahead, so that its latency is hidden.
        last = load_chunk_sum(g, c - 1 if ADJOINT else c + 1, origin, chunk, h, n, k, filled, D)
    S = tl.trans(S)
    if EVERY:
        if (filled == 0) & (edges != 0):  # an empty sequence passes its state on
            store_state(out, S, chunk, h, k, v, D.H, D.K, D.V)
        if (edges & (1 if ADJOINT else 2)) != 0:
            store_state(edge, S, n, h, k, v, D.H, D.K, D.V)
    else:
        store_state(out, S, e, h, k, v, D.H, D.K, D.V)
        if D.FORM != "none":
            store_log(total, log, e, h, k, D)


@triton.jit
def load_chunk_sum(g, c, origin, chunk, h, n, k, filled, D: tl.constexpr):
    """Load the sum of the gates of chunk c of a segment, a scalar or [BK]; 0 where the segment has no chunk c."""
    count = tl.where(c >= 0, filled - c * D.C, 0)
    if D.FORM == "key":
        return load_key_sums(g, chunk + c, h, k, count, D)
    else:
        return load_head_sums(g, origin + D.SIGN * c * D.C, h, n, D.C - 1, count, D)


@triton.jit
def scan_segments(local, total, start, begins, out, edge, through, before, D: tl.constexpr):
    """Scan the segments' local states and log decays for the state where each segment begins (with ADJOINT, where it ends).

    out [segments, H, K, V]: those states. edge [N, H, K, V], through [N, H, K or 1]: the state after the last segment and
    the log decay of the whole sequence, valid if `segment_states` had LAST. before [segments, H, K or 1]: the log decay of
    the segments that the scan visits before each.
    """
    block, h, n = place_of(tl.program_id(0), D.NK * D.NV, D)
    k, v = block // D.NV * D.BK + tl.arange(0, D.BK), block % D.NV * D.BV + tl.arange(0, D.BV)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    S = (
        load_state(start, n, h, k, v, D.V, D.H, D.K, D.V).to(tl.float32)
        if D.START
        else tl.zeros([D.BK, D.BV], tl.float32)
    )
    log = tl.zeros([D.BK], tl.float32)
    for step in range(0, last - first):
        e = last - 1 - step if D.ADJOINT else first + step
        store_state(out, S, e, h, k, v, D.H, D.K, D.V)
        local_state = load_state(local, e, h, k, v, D.V, D.H, D.K, D.V)
        store_log(before, log, e, h, k, D)
        if D.FORM == "none":
            S += local_state
        else:
            if D.FORM == "key":
                log_decay = tl.load(total + (e.to(tl.int64) * D.H + h) * D.K + k, mask=k < D.K, other=0.0)
            else:
                log_decay = tl.load(total + e.to(tl.int64) * D.H + h + k * 0)
            S = S * exp(log_decay)[:, None] + local_state
            log += log_decay
    store_state(edge, S, n, h, k, v, D.H, D.K, D.V)
    store_log(through, log, n, h, k, D)


@triton.jit
def store_log(x, log, index, h, k, D: tl.constexpr):
    """Store x[index, h, k], or x[index, h, 0] for gates that all channels share."""
    if D.FORM == "key":
        tl.store(x + (index.to(tl.int64) * D.H + h) * D.K + k, log, mask=k < D.K)
    else:
        tl.store(x + index.to(tl.int64) * D.H + h, tl.max(log, 0))


@triton.jit
def head_gate_cumsums(g, table, out, D: tl.constexpr):
    """Compute out[row, h] = G, the cumulative sum of the head gates of the row's chunk, in scan order. A program per chunk.

    A gate is split into a multiple of STEP = C 2^-17, truncated, and a rest of less than STEP. For gates of at most 128 in size
    the sum of the multiples is at most 128 C = 2^24 STEP, and so float32 adds them without rounding. The rests add up to less
    than C STEP (2^-5 for C = 64), and lose less than C (C STEP) 2^-24 in that (2^-23), which is small beside STEP. So G is
    rounded once, by at most STEP / 2, and the difference of two sums is off by at most STEP and twice that loss: a decay by
    4.9e-4 of itself for C = 64 and 9.8e-4 for 128, where bfloat16 rounds by 2^-9 = 2.0e-3.
    One float32 sum would round at every token, and equal weak gates behind gates of -inf would all round the same way.
    """
    STEP: tl.constexpr = D.C * 2.0**-17
    entry = table + tl.program_id(0) * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    tokens, h = tl.arange(0, D.C), tl.arange(0, D.BH)
    offsets = (origin + D.SIGN * tokens).to(tl.int64)[:, None] * D.H + h[None, :]
    mask = (tokens < filled)[:, None] & (h < D.H)[None, :]
    gates = tl.maximum(tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32), LOG_OF_ZERO)
    multiples = (gates * (1 / STEP)).to(tl.int32).to(tl.float32) * STEP
    tl.store(out + offsets, tl.cumsum(multiples, 0) + tl.cumsum(gates - multiples, 0), mask=mask)


@triton.jit
def sequence_sums(x, begins, out, D: tl.constexpr):
    """Compute out[n], the sum of x [entries, H] over entries begins[n] to begins[n + 1]. The order of summation is fixed."""
    n, h = tl.program_id(0), tl.arange(0, D.BH)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    total = tl.zeros([D.BH], tl.float32)
    for e in range(first, last, D.ROWS):
        rows = e + tl.arange(0, D.ROWS)
        mask = (rows < last)[:, None] & (h < D.H)[None, :]
        total += tl.sum(tl.load(x + rows[:, None] * D.H + h[None, :], mask=mask, other=0.0), 0)
    tl.store(out + n * D.H + h, total, mask=h < D.H)
