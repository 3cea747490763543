"""Scan the chunks of a segment with the delta rule: the outputs and states forward, dL/dS in reverse.

G_i is the sum of the log gates of a chunk through token i, and G_last is that sum over the chunk. S [K, V] is the state before
the chunk. T = (I + L)^-1 - I and P are those of `delta_pairs`:

    U  = (I + T) (W * V - e^B * (E S))            what the tokens write: row u_i beside key k_i
    O  = scale (e^G * (Q S) + P U)
    S' = e^{G_last} S + (e^{G_last - G} * K)^T U

B is G, or where e reads the state before the token's decay, the sum before the token. Beta stands for E = beta * K and W = beta.
E S is then beta * (K S), so that no operand is rounded again.

One program has one segment, one head and BV columns of the state. The state, U and O are held transposed. Every product then
has its left operand in registers and its right operand as it lies in memory, and nothing computed passes through shared memory.

**For the gradient**, `delta_states` stores S and U forward, dL/dS and Y in reverse. dS' = dL/dS after a chunk:

    U  = (I + T) (W * V - e^B * (E S))                   S' = e^{G_last} S + (e^{G_last - G} * K)^T U
    dU = e^{G_last - G} * (K dS') + scale P^T dO         Y  = (I + T)^T dU, the gradient of W * V
    dS = e^{G_last} dS' + (scale e^G * Q)^T dO - (e^B * E)^T Y

The two directions do not depend on each other, so each has half of the programs of one launch. States, U and Y are held
transposed, and states are stored so. With key gates e^G * Q, e^B * E and e^{G_last - G} * K come from
`delta_key_pairs`.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    at,
    dot,
    load_pairs,
    load_state,
    load_tile,
    load_tokens,
    place_of,
    split,
    store_state,
)


@triton.jit
def delta_outputs(
    q, k, v, e_read, write, decays, inverse, scores, factors, scale, start, table, o, final, D: tl.constexpr
):  # fmt: skip
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: whether sequences begin from `start` or from zero. GATE: "none", "head", or "key". inverse, scores and factors are the
    results of `delta_scores`. With key gates q, e_read, k and decays are q_read, e_read, k_written and decays of
    `delta_key_pairs`; without, decays are not read, and e_read is e [rows, H, K], or not read with beta. write: w [rows, H, V],
    read where ERASURE is "erase+write".
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    hq, hk, hv = h // (D.H // D.HQ), h // (D.H // D.HK), h // (D.H // D.HV)
    factor = tl.load(scale + n).to(tl.float32)
    # [BV, BK]
    S = load_start(start, n, h, ck, cv, D, D.START)
    # Always loaded one chunk ahead, so that its latency is hidden.
    through = load_decay(factors, decays, chunk, h, ck, filled, D)
    if D.GATE == "key":
        S = S * through[None, :]
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        # [C, BK]
        tq = load_tile(at(q, first, hq, D.HQ, D.K), tokens, ck, count, D.HQ, D.K, D.SIGN)
        tk = load_tile(at(k, first, hk, D.HK, D.K), tokens, ck, count, D.HK, D.K, D.SIGN)
        # [C, C]
        T = load_pairs(inverse, pair, tokens, count, D)
        P = load_pairs(scores, pair, tokens, count, D)
        # [C, BV]
        tv = load_tile(at(v, first, hv, D.HV, D.V), tokens, cv, count, D.HV, D.V, D.SIGN)
        # [C]
        erase_factor = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        U = written_tokens(S, e_read, write, tk, tv, T, erase_factor, up, first, h, tokens, ck, cv, count, D)
        out = dot(S, tl.trans(tq), D)
        if D.GATE == "head":
            out *= up[None, :]
        elif D.GATE == "key":
            out *= factor
        if D.GATE == "key":
            behind = load_decay(factors, decays, chunk + c + 1, h, ck, count - D.C, D)
            S = next_read_state(S, U, tk, decays, chunk + c, h, ck, behind, D)
        else:
            S = next_state(S, U, tk, down, through, D)
            through = load_decay(factors, decays, chunk + c + 1, h, ck, count - D.C, D)
        out = tl.dot(U.to(D.DTYPE), tl.trans(P).to(D.DTYPE), out, input_precision=D.PRECISION)
        if D.GATE != "key":  # whose scores are scaled
            out *= factor
        store_columns(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    if (edges & 2) != 0:
        store_state(final, tl.trans(S), n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def written_tokens(S, e_read, write, tk, tv, T, erase_factor, up, first, h, tokens, ck, cv, count, D: tl.constexpr):
    """Return what the tokens of a chunk write, transposed: U^T = (W * V - e^B * (E S))^T (I + T)^T, [BV, C].

    S: transposed, [BV, BK]. tk [C, BK], tv [C, BV] and T [C, C]: as they lie in memory. With key gates e_read holds e^B E.
    """
    te = load_erasing(e_read, tk, first, h, tokens, ck, count, D)
    read = dot(S, tl.trans(te), D)
    if D.GATE == "head":
        read *= (up if D.ERASURE == "beta" else erase_factor)[None, :]
    if D.ERASURE == "beta":
        return inverted(T, added_transpose(-read, tv, D) * erase_factor[None, :], D)
    elif D.ERASURE == "erase":
        return inverted(T, added_transpose(-read, tv, D), D)
    else:
        tw = load_tile(at(write, first, h, D.H, D.V), tokens, cv, count, D.H, D.V, D.SIGN)
        return inverted(T, added_product(-read, tv, tw, D), D)


@triton.jit
def load_erasing(e_read, tk, first, h, tokens, ck, count, D: tl.constexpr):
    """Load the operand that reads what is erased, [C, BK]: e^B E, or E without key gates; with beta, K in the place of E."""
    if D.GATE == "key" or D.ERASURE != "beta":
        return load_tokens(e_read, first, h, D.H, D.K, tokens, ck, count, D)
    else:
        return tk


@triton.jit
def added_product(x, tile, other, D: tl.constexpr):
    """Return x + (tile * other)^T as `added_transpose` does. A product of two bfloat16 has 16 bits, two terms of bfloat16."""
    product = tile.to(tl.float32) * other.to(tl.float32)
    if tl.bfloat16 == D.DTYPE:
        high, low = split(product, D.DTYPE)
        return added_transpose(added_transpose(x, low, D), high, D)
    else:
        return added_transpose(x, product, D)


@triton.jit
def added_transpose(x, tile, D: tl.constexpr):
    """Return x + tile^T in float32, for x [BV, C] in registers and a tile [C, BV] as it lies in memory.

    bfloat16 tiles are multiplied by the identity, which is exact: a transpose through shared memory needs eight barriers.
    """
    if tl.bfloat16 == D.DTYPE:
        rows = tl.arange(0, x.shape[0])
        identity = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0).to(D.DTYPE)
        return tl.dot(identity, tl.trans(tile).to(D.DTYPE), x)
    else:
        return x + tl.trans(tile).to(tl.float32)


@triton.jit
def inverted(T, x, D: tl.constexpr):
    """Return x + x T^T, the transposed rows x [BV, C] multiplied by the inverse I + T. The identity is not rounded to DTYPE."""
    return tl.dot(x.to(D.DTYPE), tl.trans(T).to(D.DTYPE), x, input_precision=D.PRECISION)


@triton.jit
def next_state(S, U, tk, down, through, D: tl.constexpr):
    """Return the transposed state behind a chunk, [BV, BK]. U: [BV, C]. through: the result of `load_decay`."""
    if D.GATE == "head":
        return S * through + dot(U * down[None, :], tk, D)
    else:
        return S + dot(U, tk, D)


@triton.jit
def next_read_state(S, U, tk, decays, chunk, h, ck, enter, D: tl.constexpr):
    """Return the transposed state that the tokens of the next chunk read, [BV, BK], from the one that those of this chunk read.

    enter: the decay [BK] of the state on its way into the next chunk. It is applied apart from the decay out of this chunk: their
    product may be 0 where the state is large (`common.limits`).
    """
    between, leave = load_key_decay(decays, chunk, h, ck, 1, 1, D), load_key_decay(decays, chunk, h, ck, 1, 2, D)
    return (S * between[None, :] + dot(U, tk, D)) * leave[None, :] * enter[None, :]


@triton.jit
def load_key_decay(decays, chunk, h, ck, count, which, D: tl.constexpr):
    """Load a decay of the states of a chunk with key gates, [BK]; 1 where count <= 0. which: its row in `decays`."""
    p = decays + ((chunk.to(tl.int64) * D.H + h) * 4 + which) * D.K
    return tl.load(p + ck, mask=ck < tl.where(count > 0, D.K, 0), other=1.0)


@triton.jit
def load_factor(factors, pair, which, tokens, count, D: tl.constexpr):
    """Load row `which` of the factors of a (chunk, head) pair, [C]; tokens from `count` on are 0.

    The rows are e^G, e^{G_last - G}, and the factor of what is erased: beta, or the decay e^B of what e reads.
    """
    return tl.load(factors + (pair * 3 + which) * D.C + tokens, mask=tokens < count, other=0.0)


@triton.jit
def load_through(factors, chunk, h, count, D: tl.constexpr):
    """Load e^{G_last}, the decay of a whole chunk; 1 where the segment has no such chunk."""
    return tl.load(factors + (chunk.to(tl.int64) * D.H + h) * 3 * D.C + D.C - 1, mask=count > 0, other=1.0)


@triton.jit
def load_decay(factors, decays, chunk, h, ck, count, D: tl.constexpr):
    """Load the decay of a whole chunk, or with key gates the decay [BK] before its tokens read the state.

    It is 1 where the segment has no such chunk.
    """
    if D.GATE == "key":
        return load_key_decay(decays, chunk, h, ck, count, 0, D)
    elif D.GATE == "head":
        return load_through(factors, chunk, h, count, D)
    else:
        return 1.0


@triton.jit
def load_start(start, n, h, ck, cv, D: tl.constexpr, START: tl.constexpr):
    """Load the transposed state that sequence n begins from, [BV, BK]; 0 without START."""
    if START:
        return tl.trans(load_state(start, n, h, ck, cv, D.V, D.H, D.K, D.V).to(tl.float32))
    else:
        return tl.zeros([cv.shape[0], ck.shape[0]], tl.float32)


@triton.jit
def load_columns(x, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    """Load x[tokens, d] transposed, [BD, C]. Tokens from `count` on and columns from WIDTH on are 0."""
    offsets = (SIGN * HEADS * WIDTH) * tokens[None, :] + d[:, None]
    return tl.load(x + offsets, mask=(tokens < count)[None, :] & (d < WIDTH)[:, None], other=0.0)


@triton.jit
def store_columns(x, value, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    offsets = (SIGN * HEADS * WIDTH) * tokens[None, :] + d[:, None]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(tokens < count)[None, :] & (d < WIDTH)[:, None])


@triton.jit
def delta_states(
    q, k, v, e_read, write, decays, do, inverse, scores, factors, scale, start, d_start, table, states, written, d_states,
    d_written, d_initial, D: tl.constexpr,
):  # fmt: skip
    """Compute states and d_states [chunks, H, V, K], written (U) and d_written (Y) [rows, H, V], and d_initial [N, H, K, V].

    With key gates U and, in the place of Y, -Y or with beta -beta * Y are by chunk, [chunks, H, V, C], or
    [chunks, H, V, 2 * C] of bfloat16: then the second half holds what the first lost in rounding.
    """
    program = tl.program_id(0)
    if program % 2 == 0:
        scan_states(
            program // 2, k, v, e_read, write, decays, inverse, factors, start, table, states, written, D, D.START
        )
    else:
        scan_state_gradients(
            program // 2, q, k, e_read, decays, do, inverse, scores, factors, scale, d_start, table, d_states,
            d_written, d_initial, D,
        )  # fmt: skip


@triton.jit
def scan_states(
    program, k, v, e_read, write, decays, inverse, factors, start, table, states, written, D: tl.constexpr,
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
        erase_factor = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        store_state(states, S, chunk + c, h, cv, ck, D.H, D.V, D.K)
        U = written_tokens(S, e_read, write, tk, tv, T, erase_factor, up, first, h, tokens, ck, cv, count, D)
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
    program, q, k, e_read, decays, do, inverse, scores, factors, scale, d_start, table, d_states, d_written,
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
        erase_factor = load_factor(factors, pair, 2, tokens, count, D)
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
            erased = -Y * (erase_factor * up if D.ERASURE == "beta" else erase_factor)[None, :]
        elif D.GATE == "key":
            between = load_key_decay(decays, chunk + c, h, ck, 1, 1, D)
            dS = dS * between[None, :] + dot(tdo, tq, D) * factor
            erased = -Y * erase_factor[None, :] if D.ERASURE == "beta" else -Y
            store_by_chunk(d_written, erased, pair, tokens, cv, D)
        else:
            dS += dot(tdo, tq, D)
            erased = -Y * erase_factor[None, :] if D.ERASURE == "beta" else -Y
        te = load_erasing(e_read, tk, first, h, tokens, ck, count, D)
        dS = tl.dot(erased.to(D.DTYPE), te.to(D.DTYPE), dS, input_precision=D.PRECISION)
        if D.GATE == "key":
            enter = load_key_decay(decays, chunk + c, h, ck, 1, 0, D)
            leave = load_key_decay(decays, chunk + c - 1, h, ck, c, 2, D)
            dS = dS * enter[None, :] * leave[None, :]
        else:
            through = load_decay(factors, decays, chunk + c - 1, h, ck, c, D)
    if (edges & 1) != 0:
        store_state(d_initial, tl.trans(dS), n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def store_by_chunk(x, value, pair, tokens, d, D: tl.constexpr):
    """Store U, or what stands for Y, of a (chunk, head) pair, transposed, [BV, C]. In bfloat16 what rounding lost follows."""
    W: tl.constexpr = 2 * D.C if tl.bfloat16 == D.DTYPE else D.C
    p, mask = x + (pair * D.V + d[:, None]) * W + tokens[None, :], (d < D.V)[:, None]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask)
    if tl.bfloat16 == D.DTYPE:
        tl.store(p + D.C, (value - value.to(D.DTYPE).to(tl.float32)).to(D.DTYPE), mask=mask)
