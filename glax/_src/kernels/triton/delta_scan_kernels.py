"""Scan the chunks of a segment with the delta rule: the outputs and states forward, dL/dS in reverse.

G_i is the sum of the log gates of a chunk through token i, and G_last is that sum over the chunk. S [K, V] is the state before
the chunk. T = (I + L)^-1 - I and P are those of `delta_score_kernels`:

    U  = (I + T) (beta * (V - e^G * (K S)))       what the tokens write: row u_i beside key k_i
    O  = scale (e^G * (Q S) + P U)
    S' = e^{G_last} S + (e^{G_last - G} * K)^T U

One program has one segment, one head and BV columns of the state. The state, U and O are held transposed. Every product then
has its left operand in registers and its right operand as it lies in memory, and nothing computed passes through shared memory.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import at, dot, load_state, load_tile, store_state


@triton.jit
def delta_outputs(
    q, k, v, k_read, decays, inverse, scores, factors, scale, start, table, o, final,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BV columns of a segment's outputs, o [rows, H, V], and of a sequence's final state, final [N, H, K, V].

    START: whether sequences begin from `start` or from zero. GATE: "none", "head", or "key". inverse, scores and factors are the
    results of `delta_scores`. With key gates q, k_read, k and decays are q_read, k_read, k_written and decays of
    `delta_key_pairs`; without, k_read and decays are not read.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    ck, cv, tokens = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    hq, hk, hv = h // (H // HQ), h // (H // HK), h // (H // HV)
    factor = tl.load(scale + n).to(tl.float32)
    # [BV, BK]
    S = load_start(start, n, h, ck, cv, H, K, V, START)
    # Always loaded one chunk ahead, so that its latency is hidden.
    through = load_decay(factors, decays, chunk, h, ck, filled, H, K, C, GATE)
    if GATE == "key":
        S = S * through[None, :]
    for c in range(0, tl.cdiv(length, C)):
        first = origin + SIGN * c * C
        count = filled - c * C
        pair = (chunk + c).to(tl.int64) * H + h
        # [C, BK]
        tq = load_tile(at(q, first, hq, HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, first, hk, HK, K), tokens, ck, count, HK, K, SIGN)
        # [C, C]
        T = load_tile(inverse + pair * C * C, tokens, tokens, count, 1, C, 1)
        P = load_tile(scores + pair * C * C, tokens, tokens, count, 1, C, 1)
        # [C, BV]
        tv = load_tile(at(v, first, hv, HV, V), tokens, cv, count, HV, V, SIGN)
        # [C]
        beta = load_factor(factors, pair, 2, tokens, count, C)
        up = load_factor(factors, pair, 0, tokens, count, C)
        down = load_factor(factors, pair, 1, tokens, count, C)
        U = written_tokens(
            S, k_read, tk, tv, T, beta, up, first, h, tokens, ck, count, H, K, GATE, SIGN, DTYPE, PRECISION
        )  # fmt: skip
        out = dot(S, tl.trans(tq), DTYPE, PRECISION)
        if GATE == "head":
            out *= up[None, :]
        elif GATE == "key":
            out *= factor
        if GATE == "key":
            behind = load_decay(factors, decays, chunk + c + 1, h, ck, count - C, H, K, C, GATE)
            S = next_read_state(S, U, tk, decays, chunk + c, h, ck, behind, H, K, DTYPE, PRECISION)
        else:
            S = next_state(S, U, tk, down, through, GATE, DTYPE, PRECISION)
            through = load_decay(factors, decays, chunk + c + 1, h, ck, count - C, H, K, C, GATE)
        out = tl.dot(U.to(DTYPE), tl.trans(P).to(DTYPE), out, input_precision=PRECISION)
        if GATE != "key":  # whose scores are scaled
            out *= factor
        store_columns(at(o, first, h, H, V), out, tokens, cv, length - c * C, H, V, SIGN)
    if (edges & 2) != 0:
        store_state(final, tl.trans(S), n, h, ck, cv, H, K, V)


@triton.jit
def written_tokens(
    S, k_read, tk, tv, T, beta, up, first, h, tokens, ck, count,
    H: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, SIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what the tokens of a chunk write, transposed: U^T = (beta * (V - e^G * (K S)))^T (I + T)^T, [BV, C].

    S: transposed, [BV, BK]. tk [C, BK], tv [C, BV] and T [C, C]: as they lie in memory. With key gates k_read, which
    holds e^G K, is read instead of tk.
    """
    if GATE == "key":
        tr = load_tile(at(k_read, first, h, H, K), tokens, ck, count, H, K, SIGN)
        read = dot(S, tl.trans(tr), DTYPE, PRECISION)
    else:
        read = dot(S, tl.trans(tk), DTYPE, PRECISION)
    if GATE == "head":
        read *= up[None, :]
    return inverted(T, added_transpose(-read, tv, DTYPE, PRECISION) * beta[None, :], DTYPE, PRECISION)


@triton.jit
def added_transpose(x, tile, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return x + tile^T in float32, for x [BV, C] in registers and a tile [C, BV] as it lies in memory.

    bfloat16 tiles are multiplied by the identity, which is exact: a transpose through shared memory needs eight barriers.
    """
    if tl.bfloat16 == DTYPE:
        rows = tl.arange(0, x.shape[0])
        identity = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0).to(DTYPE)
        return tl.dot(identity, tl.trans(tile).to(DTYPE), x)
    else:
        return x + tl.trans(tile).to(tl.float32)


@triton.jit
def inverted(T, x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return x + x T^T, the transposed rows x [BV, C] multiplied by the inverse I + T. The identity is not rounded to DTYPE."""
    return tl.dot(x.to(DTYPE), tl.trans(T).to(DTYPE), x, input_precision=PRECISION)


@triton.jit
def next_state(S, U, tk, down, through, GATE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the transposed state behind a chunk, [BV, BK]. U: [BV, C]. through: the result of `load_decay`."""
    if GATE == "head":
        return S * through + dot(U * down[None, :], tk, DTYPE, PRECISION)
    else:
        return S + dot(U, tk, DTYPE, PRECISION)


@triton.jit
def next_read_state(
    S, U, tk, decays, chunk, h, ck, enter, H: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return the transposed state that the tokens of the next chunk read, [BV, BK], from the one that those of this chunk read.

    enter: the decay [BK] of the state on its way into the next chunk. It is applied apart from the decay out of this chunk: their
    product may be 0 where the state is large (`common.limits`).
    """
    between, leave = load_key_decay(decays, chunk, h, ck, 1, 1, H, K), load_key_decay(decays, chunk, h, ck, 1, 2, H, K)
    return (S * between[None, :] + dot(U, tk, DTYPE, PRECISION)) * leave[None, :] * enter[None, :]


@triton.jit
def load_key_decay(decays, chunk, h, ck, count, which, H: tl.constexpr, K: tl.constexpr):
    """Load a decay of the states of a chunk with key gates, [BK]; 1 where count <= 0. which: its row in `decays`."""
    p = decays + ((chunk.to(tl.int64) * H + h) * 4 + which) * K
    return tl.load(p + ck, mask=ck < tl.where(count > 0, K, 0), other=1.0)


@triton.jit
def load_factor(factors, pair, which, tokens, count, C: tl.constexpr):
    """Load e^G (which = 0), e^{G_last - G} (1) or beta (2) of a (chunk, head) pair, [C]; tokens from `count` on are 0."""
    return tl.load(factors + (pair * 3 + which) * C + tokens, mask=tokens < count, other=0.0)


@triton.jit
def load_through(factors, chunk, h, count, H: tl.constexpr, C: tl.constexpr):
    """Load e^{G_last}, the decay of a whole chunk; 1 where the segment has no such chunk."""
    return tl.load(factors + (chunk.to(tl.int64) * H + h) * 3 * C + C - 1, mask=count > 0, other=1.0)


@triton.jit
def load_decay(
    factors, decays, chunk, h, ck, count, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """Load the decay of a whole chunk, or with key gates the decay [BK] before its tokens read the state.

    It is 1 where the segment has no such chunk.
    """
    if GATE == "key":
        return load_key_decay(decays, chunk, h, ck, count, 0, H, K)
    elif GATE == "head":
        return load_through(factors, chunk, h, count, H, C)
    else:
        return 1.0


@triton.jit
def load_start(start, n, h, ck, cv, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, START: tl.constexpr):
    """Load the transposed state that sequence n begins from, [BV, BK]; 0 without START."""
    if START:
        return tl.trans(load_state(start, n, h, ck, cv, V, H, K, V).to(tl.float32))
    else:
        return tl.zeros([cv.shape[0], ck.shape[0]], tl.float32)


@triton.jit
def load_columns(x, tokens, d, count, HEADS: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr):
    """Load x[tokens, d] transposed, [BD, C]. Tokens from `count` on and columns from D on are 0."""
    offsets = (SIGN * HEADS * D) * tokens[None, :] + d[:, None]
    return tl.load(x + offsets, mask=(tokens < count)[None, :] & (d < D)[:, None], other=0.0)


@triton.jit
def store_columns(x, value, tokens, d, count, HEADS: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr):
    offsets = (SIGN * HEADS * D) * tokens[None, :] + d[:, None]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(tokens < count)[None, :] & (d < D)[:, None])
