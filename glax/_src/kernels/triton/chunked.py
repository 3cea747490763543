"""Compute a recurrence in chunks: outputs and final states, and the gradient in every input.

G_i is the sum of the log decays of a chunk through its token i, and G_last is that sum over the whole chunk:

    S_out = e^{G_last} S_in + sum_j (k_j e^{G_last - G_j}) v_j^T
    o_i   = (q_i e^{G_i})^T S_in + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j

**In one scan**: a program of `outputs` has one segment, one head, and a block of the state's columns. The state stays on chip.

**In segments**: three launches make segments independent. `segment_states` computes their states from zero, `scan_segments`
scans those, and `outputs` starts from the results.

**From stored states**, for wide heads: `entering_states` stores the state at every chunk, and `chunk_outputs` writes the outputs
of all chunks in parallel. A scan that holds all K rows of the state has few columns and few warps on a multiprocessor. Without
key gates it also repeats the products of queries and keys for every 32 columns. Here a program of the scan has a block of K as
well, no scan multiplies queries, and their products with keys are repeated for every 128 columns.

**The gradient**: `chunk_states` stores S and dL/dS at both ends of every chunk, and the kernels of `gradient` take all chunks in
parallel.

**Arguments of kernels**: table is the one of `Segments`, of segments or of chunks. rows are all B T tokens. D has the constants
of the launch (`launch.Dimensions`), and START there says where a scan begins.
"""

import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence
from glax._src.kernels.triton.compile_ahead import compile_in_parallel
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, width
from glax._src.kernels.triton.gradient import chunk_gradients
from glax._src.kernels.triton.launch import launch, tl, triton
from glax._src.kernels.triton.operands import Operands, chunk_operands, dimensions
from glax._src.kernels.triton.segments import SEQUENCE, Segments, segments_of
from glax._src.kernels.triton.tiles import (
    at,
    chunk_of,
    dot,
    exp,
    load_head_sums,
    load_key_sums,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    place_of,
    runtime_bound,
    store_state,
    store_tile,
)

OUTPUT_ROWS = 64  # rows of a stored state in an iteration of `chunk_outputs`
STATE_BLOCK = 64  # rows and columns of the state in a program of the kernels that form the states of segments


@triton.jit
def segment_states(a, b, g, scale, start, table, out, edge, total, D: tl.constexpr):
    """Compute each segment's final state from zero, out [segments, H, K, V], and its log decay, total [segments, H, K or 1].

    a, b: k and v, or with D.ADJOINT q and do. g, scale, start, table, edge: as in `carry_state`; edge and, with D.START 0,
    start are not used. D.LAST: whether both results are also computed for the segment that ends the scan of a sequence;
    otherwise they are 0 there.
    """
    carry_state(
        tl.program_id(0), a, b, g, scale, start, table, out, edge, total, D, D.HA, D.HB, D.ADJOINT, False, D.LAST,
        D.START,
    )  # fmt: skip


@triton.jit
def chunk_states(q, k, v, do, g, scale, start, d_start, table, out, edge, d_out, d_edge, D: tl.constexpr):
    """Compute S before each chunk, out, and dL/dS behind it, d_out, both [chunks, H, K, V]; and S at the end and dL/dS at the
    beginning of every sequence, edge and d_edge [N, H, K, V].

    q, k, g: as `carry_state` reads them. start, d_start: where the scan of S, by D.START, and of dL/dS, by D.D_START, begin.
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

    program: the index of a block of the state, a head and a segment (`place_of`). a [rows, HA, K], b [rows, HB, V]. table: the
    table of `Segments`. scale: [N]. EVERY: store the state where the scan enters each chunk, out [chunks, H, K, V], and where
    it leaves the sequence, edge [N, H, K, V]. Otherwise store the state at the end of the segment, out [segments, H, K, V], and
    the segment's log decay, total [segments, H, K or 1]. LAST: as D.LAST of `segment_states`. START: the segment begins from
    start[segment] (1), start[sequence] (2) or zero (0). g: the sums G of head gates, or the constant gates [N, H]. With key
    gates, a is `k_scaled` (or `q_scaled`) and g is `last` of `scale_operands`. The state is held transposed in registers, so
    that no product is transposed, which would go through shared memory.
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
        S = tl.full([D.BV, D.BK], 0, tl.float32)
    log = tl.full([D.BK], 0, tl.float32)
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
    """Load the sum of the log gates of chunk c of a segment, a scalar or [BK]; 0 if the segment has no chunk c. chunk: the
    index of the segment's first chunk among all chunks. The other arguments are those of `carry_state` and the segment's entry
    in the table."""
    count = tl.where(c >= 0, filled - c * D.C, 0)
    if D.FORM == "key":
        return load_key_sums(g, chunk + c, h, k, count, D)
    else:
        return load_head_sums(g, origin + D.SIGN * c * D.C, h, n, D.C - 1, count, D)


@triton.jit
def scan_segments(local, total, start, begins, out, edge, through, before, D: tl.constexpr):
    """Compute the state where each segment begins (with ADJOINT, where it ends) from the segments' local states and log decays.

    local [segments, H, K, V], total [segments, H, K or 1]: the results of `segment_states`. start [N, H, K, V]: the initial
    states. begins [N + 1]: the first segment of each sequence. out [segments, H, K, V]: the result. edge [N, H, K, V], through
    [N, H, K or 1]: the state after the last segment, and the log decay of the whole sequence; both are valid if
    `segment_states` had LAST. before [segments, H, K or 1]: the log decay of the segments that are scanned before each.
    """
    block, h, n = place_of(tl.program_id(0), D.NK * D.NV, D)
    k, v = block // D.NV * D.BK + tl.arange(0, D.BK), block % D.NV * D.BV + tl.arange(0, D.BV)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    S = (
        load_state(start, n, h, k, v, D.V, D.H, D.K, D.V).to(tl.float32)
        if D.START
        else tl.full([D.BK, D.BV], 0, tl.float32)
    )
    log = tl.full([D.BK], 0, tl.float32)
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
    """Store log [BK], log decays, as x[index, h, k] of x [_, H, K] with key gates. With other gates all its numbers are equal,
    and one is stored as x[index, h, 0] of x [_, H, 1]."""
    if D.FORM == "key":
        tl.store(x + (index.to(tl.int64) * D.H + h) * D.K + k, log, mask=k < D.K)
    else:
        tl.store(x + index.to(tl.int64) * D.H + h, tl.max(log, 0))


@triton.jit
def sequence_sums(x, begins, out, D: tl.constexpr):
    """Compute out[n], the sum of x [entries, H] over the entries begins[n] <= e < begins[n + 1], for each sequence n. out: [N,
    H]. A program sums one sequence. The order of summation is fixed."""
    n, h = tl.program_id(0), tl.arange(0, D.BH)
    first, last = tl.load(begins + n), tl.load(begins + n + 1)
    total = tl.full([D.BH], 0, tl.float32)
    for e in range(first, last, D.ROWS):
        rows = e + tl.arange(0, D.ROWS)
        mask = (rows < last)[:, None] & (h < D.H)[None, :]
        total += tl.sum(tl.load(x + rows[:, None] * D.H + h[None, :], mask=mask, other=0.0), 0)
    tl.store(out + n * D.H + h, total, mask=h < D.H)


@triton.jit
def outputs(q, k, v, g, scores, scale, start, table, o, final, D: tl.constexpr):
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: the segment begins from start[segment] (1), start[sequence] (2) or zero (0). g: the cumulative sums G of head
    gates. With key gates, q, k, scores and g are `q_scaled`, `k_scaled`, `scores` and `last` of `scale_operands`.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV)
    factor = tl.load(scale + n).to(tl.float32)
    if D.START == 1:
        limit = tl.where((filled > 0) | (edges != 0), D.V, 0)  # padding has no state
        S = load_state(start, e, h, ck, cv, limit, D.H, D.K, D.V).to(tl.float32)
    elif D.START == 2:
        S = load_state(start, n, h, ck, cv, D.V, D.H, D.K, D.V).to(tl.float32)
    else:
        S = tl.full([D.BK, D.BV], 0, tl.float32)
    if D.FORM == "key":
        S = key_scan(q, k, v, g, scores, o, factor, cv, S, h, chunk, origin, length, filled, D)
    else:
        S = head_scan(q, k, v, g, o, factor, cv, S, h, n, origin, length, filled, D)
    if (edges & 2) != 0:
        store_state(final, S, n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def key_scan(q_scaled, k_scaled, v, last, scores, o, factor, cv, S, h, chunk, origin, length, filled, D: tl.constexpr):
    """Compute BV columns of the outputs o of a segment with per-key gates, and return the state behind it, [BK, BV]. Scaled
    operands go from memory to the tensor cores unchanged.

    S: the state before the segment, [BK, BV], in registers. cv: the program's columns of V. factor: the scale. h: the head.
    chunk, origin, length, filled: the segment's first chunk, first row, rows to write and rows that hold tokens, from
    `Segments.table`.
    """
    ck, tokens = tl.arange(0, D.BK), tl.arange(0, D.C)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_key_sums(last, chunk, h, ck, filled, D)
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        # [C, BK]
        tq = load_tokens(q_scaled, first, h, D.H, D.K, tokens, ck, count, D)
        tk = load_tokens(k_scaled, first, h, D.H, D.K, tokens, ck, count, D)
        # [C, BV]
        tv = load_tokens(v, first, h, D.HV, D.V, tokens, cv, count, D)
        # [C, C]
        A = load_pairs(scores, (chunk + c).to(tl.int64) * D.H + h, tokens, count, D)
        out = dot(tq, S, D)
        S = S * exp(total)[:, None] + dot(tl.trans(tk), tv, D)
        total = load_key_sums(last, chunk + c + 1, h, ck, count - D.C, D)
        out = tl.dot(A.to(D.DTYPE), tv.to(D.DTYPE), out, input_precision=D.PRECISION) * factor
        store_tile(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    return S


@triton.jit
def head_scan(q, k, v, g, o, factor, cv, S, h, n, origin, length, filled, D: tl.constexpr):
    """Compute BV columns of the outputs o of a segment with per-head, constant or no gates, and return the state behind it,
    [BK, BV]. q and k go to the tensor cores unchanged.

    g: the sums G of head gates, or the constant gates [N, H]. n: the sequence. The other arguments are those of `key_scan`.
    """
    ck, tokens = tl.arange(0, D.BK), tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    hq, hk, hv = h // (D.H // D.HQ), h // (D.H // D.HK), h // (D.H // D.HV)
    # Always loaded one chunk ahead, so that its latency is hidden.
    total = load_head_sums(g, origin, h, n, D.C - 1, filled, D)
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        # [C, BK]
        tq = load_tile(at(q, first, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, first, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        # [C, BV]
        tv = load_tile(at(v, first, hv, D.HV, D.V), tokens, cv, count, D.HV, D.V, D.SIGN)
        # [C, C]
        A = dot(tq, tl.trans(tk), D)
        # [C, BV]
        from_state = dot(tq, S, D)
        if D.FORM == "none":
            A = tl.where(i >= j, A, 0.0)
            S += dot(tl.trans(tk), tv, D)
        else:
            G = load_head_sums(g, first, h, n, tokens, count, D)
            last = load_head_sums(g, first, h, n, tokens * 0 + (D.C - 1), count, D)
            through = exp(total)
            total = load_head_sums(g, first + D.SIGN * D.C, h, n, D.C - 1, count - D.C, D)
            A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
            from_state = from_state * exp(G)[:, None]
            S = S * through + dot(tl.trans(tk), tv * exp(last - G)[:, None], D)
        out = (from_state + dot(A, tv, D)) * factor
        store_tile(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    return S


@triton.jit
def entering_states(k, v, g, scale, start, table, out, final, D: tl.constexpr):
    """Compute S where each chunk begins, out [chunks, H, K, V], and at the end of every sequence, final [N, H, K, V]. The
    operands are those of `carry_state`, of which a program runs one segment."""
    carry_state(
        tl.program_id(0), k, v, g, scale, start, table, out, final, final, D, D.HK, D.HV, False, True, True, D.START,
    )  # fmt: skip


@triton.jit
def chunk_outputs(q, k, v, g, scores, scale, states, table, o, D: tl.constexpr):
    """Compute BV columns of a chunk's outputs, o [rows, H, V], from the states before chunks, states [chunks, H, K, V].

    Each iteration takes BK channels. g: the cumulative sums G of head gates. With key gates, q and scores are `q_scaled` and
    `scores` of `scale_operands`, and k and g are not read. The programs of one chunk and head are neighbours, which read the
    same queries and keys.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    origin, length, count, n = chunk_of(table, e)
    cv, tokens = block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    factor = tl.load(scale + n).to(tl.float32)
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    # [C, BV]
    out = tl.full([D.C, D.BV], 0, tl.float32)
    # [C, C]
    A = tl.full([D.C, D.C], 0, tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        out += dot(tq, S, D)
        if D.FORM != "key":
            tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
            A += dot(tq, tl.trans(tk), D)
    if D.FORM == "key":
        A = load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D)
    elif D.FORM == "none":
        A = tl.where(i >= j, A, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        out = out * exp(G)[:, None]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    out = tl.dot(A.to(D.DTYPE), tv.to(D.DTYPE), out, input_precision=D.PRECISION) * factor
    store_tile(at(o, origin, h, D.H, D.V), out, tokens, cv, length, D.H, D.V, D.SIGN)


def segment_size(r: Recurrence, size: int, chunk: int) -> int:
    """Return `size`, the tokens of a segment. If size is 0, return the length of a segment that holds any whole sequence: T,
    rounded up to whole chunks of `chunk` tokens."""
    return size or -(-r.q.shape[1] // chunk) * chunk


def start_of_sequences(r: Recurrence):
    """Return (the initial states [N, H, K, V], 2), or (an array that is not read, 0) if r has none. The number is START of
    `carry_state`: 2 for a state of each sequence, 0 for zeros."""
    return (r.scale, 0) if r.initial_state is None else (r.initial_state, 2)


class Scan:
    """Launch the kernels that compute states, for one division of sequences into segments and one direction.

    d_output: None for the scan of S; for the scan of dL/dS, in reverse, the gradient of the outputs [B, T, H, V]. block: the
    largest number of rows and of columns of a state in a program. operands: the result of `chunk_operands`.
    """

    def __init__(self, r: Recurrence, config, block: int, segments: Segments, operands: Operands, d_output=None):
        self.r, self.segments, self.gates, self.adjoint = r, segments, operands.gates, d_output is not None
        self.a, self.b = (operands.k, r.v) if d_output is None else (operands.q, d_output)
        self.launched = blocks_of(r, config, block)

    def starts(self, start, kind: int):
        """Return (the state where the scan of every segment begins, [segments, H, K, V], 1). If every sequence is one segment,
        return (start, kind) unchanged.

        start, kind: the states where the scans of sequences begin, and the START with which kernels read them.
        """
        if self.segments.count <= self.r.num_sequences and self.r.boundaries is None:
            return start, kind
        return self.scan(self.states(last=False), start, kind)[0], 1

    def states(self, last: bool):
        """Return each segment's final state from zero, [segments, H, K, V], and its log decay, [segments, H, K or 1].

        last: whether these are also computed for the segment that ends the scan of a sequence. Otherwise they are 0 there,
        which is enough for `starts`.
        """
        r, (_, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        local, _, log = launch(
            segment_states,
            programs_of(r, self.launched) * M,
            (self.a, self.b, self.gates, r.scale, r.scale, self.segments.table),
            [((M, H, K, V), jnp.float32), ((1,), jnp.float32), ((M, H, self.logs), jnp.float32)],
            HA=self.a.shape[2], HB=self.b.shape[2], ADJOINT=self.adjoint, LAST=last, START=0, **self.launched,
        )  # fmt: skip
        return local, log

    def scan(self, states, start, kind: int):
        """Scan the segments' local states. states: the results of `states`. start, kind: the states where sequences begin, and
        the START with which kernels read them.

        Returns a list: the state where every segment begins [segments, H, K, V], the state and the log decay at the end of
        every sequence [N, H, K, V] and [N, H, K or 1], and the log decay before every segment [segments, H, K or 1].
        """
        r, (N, H, K, V), M = self.r, self.r.state_shape, self.segments.count
        options = self.launched | dict(BK=min(32, width(K)), BV=min(32, width(V)), warps=4, stages=2)
        shapes = (M, H, K, V), (N, H, K, V), (N, H, self.logs), (M, H, self.logs)
        outputs, operands = [(shape, jnp.float32) for shape in shapes], (*states, start, self.segments.begins)
        programs = programs_of(r, options) * N
        return launch(scan_segments, programs, operands, outputs, **options, ADJOINT=self.adjoint, START=kind != 0)

    @property
    def logs(self) -> int:
        """Return how many log decays a head has: K with key gates, else 1."""
        return self.r.state_shape[2] if self.r.decay.form == "key" else 1


def blocks_of(r: Recurrence, config, block: int) -> dict:
    """Return the constants and launch options that all kernels of states share, by name. block: the largest number of rows and
    of columns of a state in a program. config: has `chunk`."""
    _, _, K, V = r.state_shape
    blocks = dict(BK=min(block, width(K)), BV=min(block, width(V)))
    warps = 8 if blocks["BK"] * blocks["BV"] > STATE_BLOCK * STATE_BLOCK else 4
    return dimensions(r, config.chunk) | blocks | dict(warps=warps, stages=3 if r.q.dtype == jnp.bfloat16 else 2)


def programs_of(r: Recurrence, blocks: dict) -> int:
    """Return the number of programs that one segment needs. blocks: the result of `blocks_of`."""
    _, H, K, V = r.state_shape
    return -(-K // blocks["BK"]) * -(-V // blocks["BV"]) * H


def segments_and_chunks(r: Recurrence, config) -> tuple[Segments, Segments]:
    """Return (the segments of config.segment tokens, the chunks of config.chunk tokens) of the sequences of r. Both are
    `Segments`. For config.segment 0, each sequence is one segment."""
    C = config.chunk
    return segments_of(r, segment_size(r, config.segment, C), C), segments_of(r, C, C)


@compile_in_parallel
def chunked(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states in one scan of every sequence, or with config.block from states at every chunk.

    With config.segment, segments of the sequences are scanned in parallel, after the states where they begin.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands, start = chunk_operands(r, chunks, config.chunk), start_of_sequences(r)
    if config.segment:
        start = Scan(r, config, STATE_BLOCK, segments, operands).starts(*start)
    return launch_outputs(r, config, segments, chunks, operands, *start)


@compile_in_parallel
def local_states(r: Recurrence, config: TritonChunkedConfig):
    """Compute the first phase of the forward: return (what `finish` reads, the final states [N, H, K, V], the log decays of
    whole sequences [N, H, K or 1]).

    The last two are the message to other devices. While it is exchanged, the states where segments begin are computed from a
    zero initial state. `finish` adds the decayed initial state to them.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands = chunk_operands(r, chunks, config.chunk)
    scan = Scan(r, config, STATE_BLOCK, segments, operands)
    states = scan.states(last=True)
    _, final, log, _ = scan.scan(states, *start_of_sequences(r))
    entering, _, _, before = scan.scan(states, r.scale, 0)
    return (operands, entering, before), final, log


@compile_in_parallel
def finish(saved, r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the second phase of the forward: outputs and final states from r.initial_state. saved: the first result of
    `local_states`."""
    operands, entering, before = saved
    segments, chunks = segments_and_chunks(r, config)
    start = entering + jnp.exp(before)[..., None] * r.start_state[segments.table[:, SEQUENCE]]
    return launch_outputs(r, config, segments, chunks, operands, start, 1)


def launch_outputs(
    r: Recurrence,
    config: TritonChunkedConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    kind: int,
):
    """Compute o [B, T, H, V] and the final states [N, H, K, V]. segments, chunks: the results of `segments_and_chunks`.
    operands: of `chunk_operands`. start, kind: the states where segments or sequences begin, and the START with which kernels
    read them."""
    B, T = r.q.shape[:2]
    _, H, K, V = r.state_shape
    columns = min(config.columns, width(V))
    options: dict = dict(dimensions(r, config.chunk), BV=columns, warps=config.warps, stages=config.stages)
    blocks, o = -(-V // columns) * H, ((B, T, H, V), r.q.dtype)
    if config.block:
        states, final = launch_states(r, config, segments, chunks, operands, start, kind)
        (o,) = launch(
            chunk_outputs,
            blocks * chunks.count,
            (operands.q, operands.k, r.v, operands.gates, operands.scores, r.scale, states, chunks.table),
            [o],
            **options | operands.heads, BK=min(OUTPUT_ROWS, width(K)),
        )  # fmt: skip
        return Outputs(o, final)
    o, final = launch(
        outputs,
        blocks * segments.count,
        (operands.q, operands.k, r.v, operands.gates, operands.scores, r.scale, start, segments.table),
        [o, (r.state_shape, jnp.float32)],
        **options, BK=width(K), START=kind,
    )  # fmt: skip
    return Outputs(o, final)


def launch_states(
    r: Recurrence,
    config: TritonChunkedConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    kind: int,
):
    """Compute the state before each chunk [chunks, H, K, V], in bfloat16 for bfloat16 queries and else in float32, and the
    final states [N, H, K, V]. The arguments are those of `launch_outputs`."""
    blocks = blocks_of(r, config, config.block)
    stored = jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32
    return launch(
        entering_states,
        programs_of(r, blocks) * segments.count,
        (operands.k, r.v, operands.gates, r.scale, start, segments.table),
        [((chunks.count, *r.state_shape[1:]), stored), (r.state_shape, jnp.float32)],
        **blocks | operands.heads, START=kind,
    )  # fmt: skip


@compile_in_parallel
def chunked_vjp(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient in every input of r. d_output: [B, T, H, V]. d_final: [N, H, K, V].

    S is scanned forwards and dL/dS in reverse, for the states at both ends of every chunk. Then all chunks are processed in
    parallel.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands, start, d_start = chunk_operands(r, chunks, config.chunk), start_of_sequences(r), (d_final, 2)
    if config.segment:
        start = Scan(r, config, config.block, segments, operands).starts(*start)
        d_start = Scan(r, config, config.block, segments, operands, d_output).starts(*d_start)
    return launch_gradient(r, d_output, config, segments, chunks, operands, start, d_start)


@compile_in_parallel
def local_states_vjp(r: Recurrence, d_output, d_final, config: GradientConfig):
    """Compute the first phase of the gradient: return (what `finish_vjp` reads, dL/dS before each sequence [N, H, K, V], the
    log decays of whole sequences [N, H, K or 1]).

    The last two are the message to other devices. While it is exchanged, the second phase scans for the states where segments
    begin.
    """
    segments, chunks = segments_and_chunks(r, config)
    operands = chunk_operands(r, chunks, config.chunk)
    adjoint_scan = Scan(r, config, config.block, segments, operands, d_output)
    states = adjoint_scan.states(last=True)
    _, d_initial, log, _ = adjoint_scan.scan(states, d_final, 2)
    return (operands, states), d_initial, log


@compile_in_parallel
def finish_vjp(saved, r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the second phase of the gradient. d_final: [N, H, K, V], the gradient of the final states that arrived from other
    devices. saved: the first result of `local_states_vjp`."""
    operands, states = saved
    segments, chunks = segments_and_chunks(r, config)
    start = Scan(r, config, config.block, segments, operands).starts(*start_of_sequences(r))
    d_start, *_ = Scan(r, config, config.block, segments, operands, d_output).scan(states, d_final, 2)
    return launch_gradient(r, d_output, config, segments, chunks, operands, start, (d_start, 1))


def launch_gradient(
    r: Recurrence,
    d_output,
    config: GradientConfig,
    segments: Segments,
    chunks: Segments,
    operands: Operands,
    start,
    d_start,
) -> Recurrence:
    """Compute the gradient of every input of r.

    start, d_start: (states, START) where the scan of S, and the scan of dL/dS, begin each segment. The other arguments are
    those of `launch_outputs`.
    """
    _, H, K, V = r.state_shape
    form = r.decay.form
    (start, kind), (d_start, d_kind) = start, d_start
    blocks = blocks_of(r, config, config.block)
    states = ((chunks.count, H, K, V), jnp.bfloat16 if r.q.dtype == jnp.bfloat16 else jnp.float32)
    edges = (r.state_shape, jnp.float32)
    before, _, behind, d_initial = launch(
        chunk_states,
        2 * programs_of(r, blocks) * segments.count,
        (operands.q, operands.k, r.v, d_output, operands.gates, r.scale, start, d_start, segments.table),
        [states, edges, states, edges],
        **blocks | operands.heads, START=kind, D_START=d_kind,
    )  # fmt: skip

    dq, dk, dv, dg, d_scale = chunk_gradients(r, d_output, config, chunks, operands, before, behind)
    d_decay = Decay()
    if form != "none":
        d_decay = Decay(**{form: by_sequence(r, chunks, dg) if form == "constant" else dg})
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, by_sequence(r, chunks, d_scale).sum(1))


def by_sequence(r: Recurrence, chunks: Segments, x):
    """Return the sum of x [chunks, H] over the chunks of each sequence, [N, H].

    The order of summation is fixed, so repeated calls agree in every bit.
    """
    N, H = r.state_shape[:2]
    if r.boundaries is None:
        return x.reshape(N, -1, H).sum(1)
    options = dict(H=H, BH=width(H), ROWS=16, warps=4, stages=1)
    return launch(sequence_sums, N, (x, chunks.begins), [((N, H), jnp.float32)], **options)[0]
