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
    store_state,
)


@triton.jit
def segment_states(
    a, b, g, scale, start, table, out, edge, total,
    H: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, ADJOINT: tl.constexpr,
    LAST: tl.constexpr, START: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute each segment's final state from zero, out [segments, H, K, V], and its log decay, total [segments, H, K or 1].

    LAST: also compute these for a sequence's last segment (with ADJOINT its first). Otherwise they are 0 there.
    """
    carry_state(
        tl.program_id(0), a, b, g, scale, start, table, out, edge, total,
        H, HA, HB, K, V, C, BK, BV, FORM, SIGN, ADJOINT, False, LAST, START, DTYPE, PRECISION,
    )  # fmt: skip


@triton.jit
def chunk_states(
    q, k, v, do, g, scale, start, d_start, table, out, edge, d_out, d_edge,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    START: tl.constexpr, D_START: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute S where each chunk begins (out) and dL/dS where each chunk ends (d_out), both [chunks, H, K, V].

    Each direction has half of the programs, because one direction alone leaves the GPU half idle.
    """
    program = tl.program_id(0)
    if program % 2 == 0:
        carry_state(
            program // 2, k, v, g, scale, start, table, out, edge, edge,
            H, HK, HV, K, V, C, BK, BV, FORM, SIGN, False, True, True, START, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        carry_state(
            program // 2, q, do, g, scale, d_start, table, d_out, d_edge, d_edge,
            H, HQ, H, K, V, C, BK, BV, FORM, SIGN, True, True, True, D_START, DTYPE, PRECISION,
        )  # fmt: skip


@triton.jit
def carry_state(
    program, a, b, g, scale, start, table, out, edge, total,
    H: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, ADJOINT: tl.constexpr,
    EVERY: tl.constexpr, LAST: tl.constexpr, START: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state of k and v (a, b) along a segment, or with ADJOINT dL/dS of scale * q and do (a, b) in reverse:

        dS_in = e^{G_last} dS_out + sum_i (q_i e^{G_i}) do_i^T

    EVERY: store the state where the scan enters each chunk, out [chunks, H, K, V], and where it leaves the sequence, edge
    [N, H, K, V]. Otherwise store the state at the end of the segment, out [segments, H, K, V], and the segment's log
    decay, total [segments, H, K or 1]. START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0).
    g: the cumulative sums G of head gates. With key gates, a is `k_scaled` (or `q_scaled`) and g is `last` of
    `scale_operands`. The state is held transposed, so that no product is transposed, which would go through shared memory.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = program % (NK * NV), program // (NK * NV) % H, program // (NK * NV * H)
    row = table + e * 6
    origin, filled, n = tl.load(row), tl.load(row + 2), tl.load(row + 3)
    edges, chunk = tl.load(row + 4), tl.load(row + 5)
    k, v = block // NV * BK + tl.arange(0, BK), block % NV * BV + tl.arange(0, BV)
    tokens = tl.arange(0, C)
    ha, hb = h // (H // HA), h // (H // HB)
    if START == 1:
        S = tl.trans(load_state(start, e, h, k, v, V, H, K, V).to(tl.float32))
    elif START == 2:
        S = tl.trans(load_state(start, n, h, k, v, V, H, K, V).to(tl.float32))
    else:
        S = tl.zeros([BV, BK], tl.float32)
    log = tl.zeros([BK], tl.float32)
    factor = tl.load(scale + n).to(tl.float32)
    steps = tl.cdiv(filled, C)
    if not LAST:  # no kernel reads the state that leaves a sequence
        steps = tl.where((edges & (1 if ADJOINT else 2)) != 0, 0, steps)
    last = load_chunk_sum(g, steps - 1 if ADJOINT else 0, origin, chunk, h, n, k, filled, H, K, C, FORM, SIGN)
    for step in range(0, steps):
        c = steps - 1 - step if ADJOINT else step
        first = origin + SIGN * c * C
        count = filled - c * C
        if EVERY:
            store_state(out, tl.trans(S), chunk + c, h, k, v, H, K, V)
        # [C, BK]
        x = load_tile(at(a, first, ha, HA, K), tokens, k, count, HA, K, SIGN)
        # [C, BV]
        y = load_tile(at(b, first, hb, HB, V), tokens, v, count, HB, V, SIGN)
        if FORM == "head" or FORM == "constant":
            # [C]
            G = load_head_sums(g, first, h, n, tokens, count, H, FORM, SIGN)
            end = load_head_sums(g, first, h, n, tokens * 0 + (C - 1), count, H, FORM, SIGN)
            x = x * exp(G if ADJOINT else end - G)[:, None]
        # [BV, BK]
        added = dot(tl.trans(y), x, DTYPE, PRECISION)
        if ADJOINT:
            added *= factor
        if FORM == "key":
            S = S * exp(last)[None, :] + added
        elif FORM == "none":
            S += added
        else:
            S = S * exp(last) + added
        log += last
        # Loaded one chunk ahead, so that its latency is hidden.
        last = load_chunk_sum(g, c - 1 if ADJOINT else c + 1, origin, chunk, h, n, k, filled, H, K, C, FORM, SIGN)
    S = tl.trans(S)
    if EVERY:
        if (filled == 0) & (edges != 0):  # an empty sequence passes its state on
            store_state(out, S, chunk, h, k, v, H, K, V)
        if (edges & (1 if ADJOINT else 2)) != 0:
            store_state(edge, S, n, h, k, v, H, K, V)
    else:
        store_state(out, S, e, h, k, v, H, K, V)
        if FORM != "none":
            store_log(total, log, e, h, k, H, K, FORM)


@triton.jit
def load_chunk_sum(
    g, c, origin, chunk, h, n, k, filled,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Load the sum of the gates of chunk c of a segment, a scalar or [BK]; 0 where the segment has no chunk c."""
    count = tl.where(c >= 0, filled - c * C, 0)
    if FORM == "key":
        return load_key_sums(g, chunk + c, h, k, count, H, K)
    else:
        return load_head_sums(g, origin + SIGN * c * C, h, n, C - 1, count, H, FORM, SIGN)


@triton.jit
def scan_segments(
    local, total, start, begins, out, edge, through, before,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORM: tl.constexpr, ADJOINT: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Scan the segments' local states and log decays for the state where each segment begins (with ADJOINT, where it ends).

    out [segments, H, K, V]: those states. edge [N, H, K, V], through [N, H, K or 1]: the state after the last segment and
    the log decay of the whole sequence, valid if `segment_states` had LAST. before [segments, H, K or 1]: the log decay of
    the segments that the scan visits before each.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, n = tl.program_id(0) % (NK * NV), tl.program_id(0) // (NK * NV) % H, tl.program_id(0) // (NK * NV * H)
    k, v = block // NV * BK + tl.arange(0, BK), block % NV * BV + tl.arange(0, BV)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    S = load_state(start, n, h, k, v, V, H, K, V).to(tl.float32) if START else tl.zeros([BK, BV], tl.float32)
    log = tl.zeros([BK], tl.float32)
    for step in range(0, last - first):
        e = last - 1 - step if ADJOINT else first + step
        store_state(out, S, e, h, k, v, H, K, V)
        local_state = load_state(local, e, h, k, v, V, H, K, V)
        store_log(before, log, e, h, k, H, K, FORM)
        if FORM == "none":
            S += local_state
        else:
            if FORM == "key":
                log_decay = tl.load(total + (e.to(tl.int64) * H + h) * K + k, mask=k < K, other=0.0)
            else:
                log_decay = tl.load(total + e.to(tl.int64) * H + h + k * 0)
            S = S * exp(log_decay)[:, None] + local_state
            log += log_decay
    store_state(edge, S, n, h, k, v, H, K, V)
    store_log(through, log, n, h, k, H, K, FORM)


@triton.jit
def store_log(x, log, index, h, k, H: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr):
    """Store x[index, h, k], or x[index, h, 0] for gates that all channels share."""
    if FORM == "key":
        tl.store(x + (index.to(tl.int64) * H + h) * K + k, log, mask=k < K)
    else:
        tl.store(x + index.to(tl.int64) * H + h, tl.max(log, 0))


@triton.jit
def head_gate_cumsums(g, table, out, H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    """Compute out[row, h] = G, the cumulative sum of the head gates of the row's chunk, in scan order. A program per chunk.

    A gate is split into a multiple of STEP = C 2^-17, truncated, and a rest of less than STEP. For gates of at most 128 in size
    the sum of the multiples is at most 128 C = 2^24 STEP, and so float32 adds them without rounding. The rests add up to less
    than C STEP (2^-5 for C = 64), and lose less than C (C STEP) 2^-24 in that (2^-23), which is small beside STEP. So G is
    rounded once, by at most STEP / 2, and the difference of two sums is off by at most STEP and twice that loss: a decay by
    4.9e-4 of itself for C = 64 and 9.8e-4 for 128, where bfloat16 rounds by 2^-9 = 2.0e-3.
    One float32 sum would round at every token, and equal weak gates behind gates of -inf would all round the same way.
    """
    STEP: tl.constexpr = C * 2.0**-17
    entry = table + tl.program_id(0) * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    tokens, h = tl.arange(0, C), tl.arange(0, BH)
    offsets = (origin + SIGN * tokens).to(tl.int64)[:, None] * H + h[None, :]
    mask = (tokens < filled)[:, None] & (h < H)[None, :]
    gates = tl.maximum(tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32), LOG_OF_ZERO)
    multiples = (gates * (1 / STEP)).to(tl.int32).to(tl.float32) * STEP
    tl.store(out + offsets, tl.cumsum(multiples, 0) + tl.cumsum(gates - multiples, 0), mask=mask)


@triton.jit
def sequence_sums(x, begins, out, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr):
    """Compute out[n], the sum of x [entries, H] over entries begins[n] to begins[n + 1]. The order of summation is fixed."""
    n, h = tl.program_id(0), tl.arange(0, BH)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    total = tl.zeros([BH], tl.float32)
    for e in range(first, last, ROWS):
        rows = e + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & (h < H)[None, :]
        total += tl.sum(tl.load(x + rows[:, None] * H + h[None, :], mask=mask, other=0.0), 0)
    tl.store(out + n * H + h, total, mask=h < H)
