"""Store what the gradient of the delta rule reads of its scans: S and U forward, dL/dS and Y in reverse.

T, P and the factors are those of `delta_score_kernels`. S is the state before a chunk, and dS' = dL/dS after it:

    U  = (I + T) (beta * (V - e^G * (K S)))              S' = e^{G_last} S + (e^{G_last - G} * K)^T U
    dU = e^{G_last - G} * (K dS') + scale P^T dO         Y  = (I + T)^T dU, the gradient of beta * V
    dS = e^{G_last} dS' + (scale e^G * Q)^T dO - (beta e^G * K)^T Y

The two directions do not depend on each other, so each has half of the programs of one launch. States, U and Y are held
transposed, as in `delta_scan_kernels`, and states are stored so. With key gates e^G * Q, e^G * K and e^{G_last - G} * K come from
`delta_key_pairs`.
"""

from glax._src.kernels.triton.delta_scan_kernels import (
    inverted,
    load_columns,
    load_decay,
    load_factor,
    load_key_decay,
    load_start,
    next_read_state,
    next_state,
    store_columns,
    written_tokens,
)
from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import at, dot, load_tile, store_state


@triton.jit
def delta_states(
    q, k, v, k_read, decays, do, inverse, scores, factors, scale, start, d_start, table,
    states, written, d_states, d_written, d_initial,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute states and d_states [chunks, H, V, K], written (U) and d_written (Y) [rows, H, V], and d_initial [N, H, K, V].

    With key gates U and -beta * Y in the place of Y are by chunk, [chunks, H, V, C], or [chunks, H, V, 2 * C] of bfloat16: then
    the second half holds what the first lost in rounding.
    """
    program = tl.program_id(0)
    if program % 2 == 0:
        scan_states(
            program // 2, k, v, k_read, decays, inverse, factors, start, table, states, written,
            H, HK, HV, K, V, C, BK, BV, GATE, SIGN, START, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        scan_state_gradients(
            program // 2, q, k, k_read, decays, do, inverse, scores, factors, scale, d_start, table,
            d_states, d_written, d_initial,
            H, HQ, HK, K, V, C, BK, BV, GATE, SIGN, DTYPE, PRECISION,
        )  # fmt: skip


@triton.jit
def scan_states(
    program, k, v, k_read, decays, inverse, factors, start, table, states, written,
    H: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store S before each chunk of a segment, and U."""
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = program % NV, program // NV % H, program // (NV * H)
    entry = table + e * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    n, chunk = tl.load(entry + 3), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    # [BV, BK]
    S = load_start(start, n, h, ck, cv, H, K, V, START)
    through = load_decay(factors, decays, chunk, h, ck, filled, H, K, C, GATE)
    if GATE == "key":
        S = S * through[None, :]
    for c in range(0, tl.cdiv(filled, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        pair = (chunk + c).to(tl.int64) * H + h
        # [C, BK]
        tk = load_tile(at(k, first, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        # [C, C]
        T = load_tile(inverse + pair * C * C, tokens, tokens, count, 1, C, 1)
        # [C, BV]
        tv = load_tile(at(v, first, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
        # [C]
        beta = load_factor(factors, pair, 2, tokens, count, C)
        up = load_factor(factors, pair, 0, tokens, count, C)
        down = load_factor(factors, pair, 1, tokens, count, C)
        store_state(states, S, chunk + c, h, cv, ck, H, V, K)
        U = written_tokens(
            S, k_read, tk, tv, T, beta, up, first, h, tokens, ck, count, H, K, GATE, SIGN, DTYPE, PRECISION
        )  # fmt: skip
        if GATE == "key":
            store_by_chunk(written, U, pair, tokens, cv, V, C, DTYPE)
        else:
            store_columns(at(written, first, h, H, V), U, tokens, cv, count, H, V, SIGN)
        if GATE == "key":
            behind = load_decay(factors, decays, chunk + c + 1, h, ck, count - C, H, K, C, GATE)
            S = next_read_state(S, U, tk, decays, chunk + c, h, ck, behind, H, K, DTYPE, PRECISION)
        else:
            S = next_state(S, U, tk, down, through, GATE, DTYPE, PRECISION)
            through = load_decay(factors, decays, chunk + c + 1, h, ck, count - C, H, K, C, GATE)


@triton.jit
def scan_state_gradients(
    program, q, k, k_read, decays, do, inverse, scores, factors, scale, d_start, table,
    d_states, d_written, d_initial,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dL/dS after each chunk of a segment and Y, and dL/dS before its sequence. d_start: dL/dS after each sequence."""
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = program % NV, program // NV % H, program // (NV * H)
    entry = table + e * 6
    origin, filled, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    edges, chunk = tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    factor = tl.load(scale + n).to(tl.float32)
    # [BV, BK]
    dS = load_start(d_start, n, h, ck, cv, H, K, V, True)
    steps = tl.cdiv(filled, C)
    if GATE == "key":
        dS = dS * load_key_decay(decays, chunk + steps - 1, h, ck, filled, 2, H, K)[None, :]
    else:
        through = load_decay(factors, decays, chunk + steps - 1, h, ck, filled, H, K, C, GATE)
    for step in range(0, steps):
        c = steps - 1 - step
        first = origin + SIGN * c * C
        count = filled - c * C
        pair = (chunk + c).to(tl.int64) * H + h
        # [C, BK]
        tq = load_tile(at(q, first, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        # [C, C]
        T = load_tile(inverse + pair * C * C, tokens, tokens, count, 1, C, 1)
        P = load_tile(scores + pair * C * C, tokens, tokens, count, 1, C, 1)
        # [BV, C]; with key gates, scores are scaled
        if GATE == "key":
            tdo = tl.trans(load_tile(at(do, first, h, H, V), tokens, cv, count, H, V, SIGN))
        else:
            tdo = load_columns(at(do, first, h, H, V), tokens, cv, count, H, V, SIGN).to(tl.float32) * factor
        # [C]
        beta = load_factor(factors, pair, 2, tokens, count, C)
        up = load_factor(factors, pair, 0, tokens, count, C)
        down = load_factor(factors, pair, 1, tokens, count, C)
        store_state(d_states, dS, chunk + c, h, cv, ck, H, V, K)
        dU = dot(dS, tl.trans(tk), DTYPE, PRECISION)
        if GATE == "head":
            dU *= down[None, :]
        dU = tl.dot(tdo.to(DTYPE), P.to(DTYPE), dU, input_precision=PRECISION)
        Y = inverted(tl.trans(T), dU, DTYPE, PRECISION)
        if GATE != "key":
            store_columns(at(d_written, first, h, H, V), Y, tokens, cv, count, H, V, SIGN)
        if GATE == "head":
            dS = dS * through + dot(tdo * up[None, :], tq, DTYPE, PRECISION)
            erased = -Y * (beta * up)[None, :]
        elif GATE == "key":
            between = load_key_decay(decays, chunk + c, h, ck, 1, 1, H, K)
            dS = dS * between[None, :] + dot(tdo, tq, DTYPE, PRECISION) * factor
            erased = -Y * beta[None, :]
            store_by_chunk(d_written, erased, pair, tokens, cv, V, C, DTYPE)
        else:
            dS += dot(tdo, tq, DTYPE, PRECISION)
            erased = -Y * beta[None, :]
        if GATE == "key":
            tr = load_tile(at(k_read, first, h, H, K), tokens, ck, count, H, K, SIGN)
            dS = tl.dot(erased.to(DTYPE), tr.to(DTYPE), dS, input_precision=PRECISION)
            enter = load_key_decay(decays, chunk + c, h, ck, 1, 0, H, K)
            leave = load_key_decay(decays, chunk + c - 1, h, ck, c, 2, H, K)
            dS = dS * enter[None, :] * leave[None, :]
        else:
            dS = tl.dot(erased.to(DTYPE), tk.to(DTYPE), dS, input_precision=PRECISION)
            through = load_decay(factors, decays, chunk + c - 1, h, ck, c, H, K, C, GATE)
    if (edges & 1) != 0:
        store_state(d_initial, tl.trans(dS), n, h, ck, cv, H, K, V)


@triton.jit
def store_by_chunk(x, value, pair, tokens, d, V: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    """Store U or -beta * Y of a (chunk, head) pair, transposed, [BV, C]. In bfloat16 what rounding lost follows beside it."""
    W: tl.constexpr = 2 * C if tl.bfloat16 == DTYPE else C
    p, mask = x + (pair * V + d[:, None]) * W + tokens[None, :], (d < V)[:, None]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask)
    if tl.bfloat16 == DTYPE:
        tl.store(p + C, (value - value.to(DTYPE).to(tl.float32)).to(DTYPE), mask=mask)
