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
from glax._src.kernels.triton.tiles import at, dot, load_pairs, load_tokens, place_of, store_state


@triton.jit
def delta_states(
    q, k, v, k_read, decays, do, inverse, scores, factors, scale, start, d_start, table, states, written, d_states,
    d_written, d_initial, D: tl.constexpr,
):  # fmt: skip
    """Compute states and d_states [chunks, H, V, K], written (U) and d_written (Y) [rows, H, V], and d_initial [N, H, K, V].

    With key gates U and -beta * Y in the place of Y are by chunk, [chunks, H, V, C], or [chunks, H, V, 2 * C] of bfloat16: then
    the second half holds what the first lost in rounding.
    """
    program = tl.program_id(0)
    if program % 2 == 0:
        scan_states(program // 2, k, v, k_read, decays, inverse, factors, start, table, states, written, D, D.START)
    else:
        scan_state_gradients(
            program // 2, q, k, k_read, decays, do, inverse, scores, factors, scale, d_start, table, d_states,
            d_written, d_initial, D,
        )  # fmt: skip


@triton.jit
def scan_states(
    program, k, v, k_read, decays, inverse, factors, start, table, states, written, D: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    """Store S before each chunk of a segment, and U."""
    block, h, e = place_of(program, D.NV, D)
    entry = table + e * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    n, chunk = tl.load(entry + 3), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    # [BV, BK]
    S = load_start(start, n, h, ck, cv, D, START)
    through = load_decay(factors, decays, chunk, h, ck, filled, D)
    if D.GATE == "key":
        S = S * through[None, :]
    for c in range(0, tl.cdiv(filled, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        # [C, BK]
        tk = load_tokens(k, first, h, D.HK, D.K, tokens, ck, count, D)
        # [C, C]
        T = load_pairs(inverse, pair, tokens, count, D)
        # [C, BV]
        tv = load_tokens(v, first, h, D.HV, D.V, tokens, cv, count, D)
        # [C]
        beta = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        store_state(states, S, chunk + c, h, cv, ck, D.H, D.V, D.K)
        U = written_tokens(S, k_read, tk, tv, T, beta, up, first, h, tokens, ck, count, D)
        if D.GATE == "key":
            store_by_chunk(written, U, pair, tokens, cv, D)
        else:
            store_columns(at(written, first, h, D.H, D.V), U, tokens, cv, count, D.H, D.V, D.SIGN)
        if D.GATE == "key":
            behind = load_decay(factors, decays, chunk + c + 1, h, ck, count - D.C, D)
            S = next_read_state(S, U, tk, decays, chunk + c, h, ck, behind, D)
        else:
            S = next_state(S, U, tk, down, through, D)
            through = load_decay(factors, decays, chunk + c + 1, h, ck, count - D.C, D)


@triton.jit
def scan_state_gradients(
    program, q, k, k_read, decays, do, inverse, scores, factors, scale, d_start, table, d_states, d_written,
    d_initial, D: tl.constexpr,
):  # fmt: skip
    """Store dL/dS after each chunk of a segment and Y, and dL/dS before its sequence. d_start: dL/dS after each sequence."""
    block, h, e = place_of(program, D.NV, D)
    entry = table + e * 6
    origin, filled, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    edges, chunk = tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    factor = tl.load(scale + n).to(tl.float32)
    # [BV, BK]
    dS = load_start(d_start, n, h, ck, cv, D, True)
    steps = tl.cdiv(filled, D.C)
    if D.GATE == "key":
        dS = dS * load_key_decay(decays, chunk + steps - 1, h, ck, filled, 2, D)[None, :]
    else:
        through = load_decay(factors, decays, chunk + steps - 1, h, ck, filled, D)
    for step in range(0, steps):
        c = steps - 1 - step
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        # [C, BK]
        tq = load_tokens(q, first, h, D.HQ, D.K, tokens, ck, count, D)
        tk = load_tokens(k, first, h, D.HK, D.K, tokens, ck, count, D)
        # [C, C]
        T = load_pairs(inverse, pair, tokens, count, D)
        P = load_pairs(scores, pair, tokens, count, D)
        # [BV, C]; with key gates, scores are scaled
        if D.GATE == "key":
            tdo = tl.trans(load_tokens(do, first, h, D.H, D.V, tokens, cv, count, D))
        else:
            tdo = load_columns(at(do, first, h, D.H, D.V), tokens, cv, count, D.H, D.V, D.SIGN).to(tl.float32) * factor
        # [C]
        beta = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        store_state(d_states, dS, chunk + c, h, cv, ck, D.H, D.V, D.K)
        dU = dot(dS, tl.trans(tk), D)
        if D.GATE == "head":
            dU *= down[None, :]
        dU = tl.dot(tdo.to(D.DTYPE), P.to(D.DTYPE), dU, input_precision=D.PRECISION)
        Y = inverted(tl.trans(T), dU, D)
        if D.GATE != "key":
            store_columns(at(d_written, first, h, D.H, D.V), Y, tokens, cv, count, D.H, D.V, D.SIGN)
        if D.GATE == "head":
            dS = dS * through + dot(tdo * up[None, :], tq, D)
            erased = -Y * (beta * up)[None, :]
        elif D.GATE == "key":
            between = load_key_decay(decays, chunk + c, h, ck, 1, 1, D)
            dS = dS * between[None, :] + dot(tdo, tq, D) * factor
            erased = -Y * beta[None, :]
            store_by_chunk(d_written, erased, pair, tokens, cv, D)
        else:
            dS += dot(tdo, tq, D)
            erased = -Y * beta[None, :]
        if D.GATE == "key":
            tr = load_tokens(k_read, first, h, D.H, D.K, tokens, ck, count, D)
            dS = tl.dot(erased.to(D.DTYPE), tr.to(D.DTYPE), dS, input_precision=D.PRECISION)
            enter = load_key_decay(decays, chunk + c, h, ck, 1, 0, D)
            leave = load_key_decay(decays, chunk + c - 1, h, ck, c, 2, D)
            dS = dS * enter[None, :] * leave[None, :]
        else:
            dS = tl.dot(erased.to(D.DTYPE), tk.to(D.DTYPE), dS, input_precision=D.PRECISION)
            through = load_decay(factors, decays, chunk + c - 1, h, ck, c, D)
    if (edges & 1) != 0:
        store_state(d_initial, tl.trans(dS), n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def store_by_chunk(x, value, pair, tokens, d, D: tl.constexpr):
    """Store U or -beta * Y of a (chunk, head) pair, transposed, [BV, C]. In bfloat16 what rounding lost follows beside it."""
    W: tl.constexpr = 2 * D.C if tl.bfloat16 == D.DTYPE else D.C
    p, mask = x + (pair * D.V + d[:, None]) * W + tokens[None, :], (d < D.V)[:, None]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask)
    if tl.bfloat16 == D.DTYPE:
        tl.store(p + D.C, (value - value.to(D.DTYPE).to(tl.float32)).to(D.DTYPE), mask=mask)
