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

The state is a tuple of slices of BK channels: products with float32 have two terms of each operand in registers, and slices of 64
channels leave room for them. bfloat16 has one slice.

The two directions do not depend on each other, so each has half of the programs of one launch. States, U and Y are held
transposed, and states are stored so. With key gates e^G * Q, e^B * E and e^{G_last - G} * K come from
`delta_key_pairs`.

**Arguments of helpers**: h is a head, n a sequence, chunk the index of a chunk among all chunks, and pair is chunk H + h. first
(or row) and count are the row of the chunk's first token and its number of tokens. tokens are 0 to C - 1, ck and cv the
channels of K and columns of V of a block. The arrays of a kernel's signature are addresses in device memory; tiles such as tq
and tdk are in registers. D has the constants of the launch (`launch.Dimensions`).
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    at,
    dot,
    dot_onto,
    load_pairs,
    load_state,
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

    START: whether sequences begin from `start` or from zero. GATE: "none", "head", or "key". inverse, scores and factors are
    the results of `delta_scores`. With key gates q, e_read, k and decays are q_read, e_read, k_written and decays of
    `delta_key_pairs`. Without key gates, decays are not read, and e_read is e [rows, H, K], or with beta k, which only float32
    reads from e_read (`load_erasing`). write: w [rows, H, V], read where ERASURE is "erase+write".
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    cv, tokens = block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    factor = tl.load(scale + n).to(tl.float32)
    S = load_starts(start, decays, chunk, n, h, cv, filled, 0, D, D.START)
    # Always loaded one chunk ahead, so that its latency is hidden.
    through = load_through(factors, chunk, h, filled, D)
    for c in range(0, tl.cdiv(length, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        tq = load_slices(q, first, h, D.HQ, tokens, count, D)
        tk = load_slices(k, first, h, D.HK, tokens, count, D)
        if len(S) == 1:
            T, P, tv = load_pairs_and_values(inverse, scores, v, pair, first, h, tokens, cv, count, D)
        # [C]
        erase_factor = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        te = load_erasing(e_read, tk, first, h, tokens, count, D)
        if len(S) > 1:
            read, out = sliced_dots(S, te, tq, D)
            T, P, tv = load_pairs_and_values(inverse, scores, v, pair, first, h, tokens, cv, count, D)
        else:
            read = sliced_dot(S, te, D)
        U = written_tokens(read, write, tv, T, erase_factor, up, first, h, tokens, cv, count, D)
        if len(S) == 1:
            out = sliced_dot(S, tq, D)
        if D.GATE == "head":
            out *= up[None, :]
        elif D.GATE == "key":
            out *= factor
        S = next_states(S, U, tk, down, through, decays, chunk + c, h, count - D.C, D)
        through = load_through(factors, chunk + c + 1, h, count - D.C, D)
        out = dot_onto(U, tl.trans(P), out, D)
        if D.GATE != "key":  # whose scores are scaled
            out *= factor
        store_columns(at(o, first, h, D.H, D.V), out, tokens, cv, length - c * D.C, D.H, D.V, D.SIGN)
    if (edges & 2) != 0:
        for s in tl.static_range(len(S)):
            store_state(final, tl.trans(S[s]), n, h, channels(s, D), cv, D.H, D.K, D.V)


@triton.jit
def load_pairs_and_values(inverse, scores, v, pair, first, h, tokens, cv, count, D: tl.constexpr):
    """Load T and P of a chunk, [C, C] each, and V, [C, BV]. pair: the index of the (chunk, head) pair. first: the row of the
    chunk's first token.

    With several slices of a state the caller loads these behind the products with the state, because registers have no room for
    both.
    """
    T = load_pairs(inverse, pair, tokens, count, D)
    P = load_pairs(scores, pair, tokens, count, D)
    return T, P, load_tokens(v, first, h, D.HV, D.V, tokens, cv, count, D)


@triton.jit
def channels(s, D: tl.constexpr):
    """Return the indices of the channels of K in slice s of a state, [BK]."""
    return s * D.BK + tl.arange(0, D.BK)


@triton.jit
def load_slices(x, row, h, HEADS: tl.constexpr, tokens, count, D: tl.constexpr):
    """Load x [rows, HEADS, K] of a chunk for head h, as a tuple of tiles [C, BK], one for each slice of a state. row: the row
    of the chunk's first token. Tokens from `count` on are 0."""
    N: tl.constexpr = D.NK
    found = ()
    for s in tl.static_range(N):
        found += (load_tokens(x, row, h, HEADS, D.K, tokens, channels(s, D), count, D),)
    return found


@triton.jit
def sliced_dot(S, x, D: tl.constexpr):
    """Return S x^T, [BV, C]. S: a tuple of the slices [BV, BK] of a transposed state. x: a tuple of slices [C, BK]."""
    product = dot(S[0], tl.trans(x[0]), D)
    for s in tl.static_range(1, len(S)):
        product = dot_onto(S[s], tl.trans(x[s]), product, D)
    return product


@triton.jit
def sliced_dots(S, x, y, D: tl.constexpr):
    """Return (S x^T, S y^T) of slices as in `sliced_dot`. Both products of a slice are formed together, so that the terms of
    the slice are formed once."""
    of_x, of_y = dot(S[0], tl.trans(x[0]), D), dot(S[0], tl.trans(y[0]), D)
    for s in tl.static_range(1, len(S)):
        of_x, of_y = dot_onto(S[s], tl.trans(x[s]), of_x, D), dot_onto(S[s], tl.trans(y[s]), of_y, D)
    return of_x, of_y


@triton.jit
def written_tokens(read, write, tv, T, erase_factor, up, first, h, tokens, cv, count, D: tl.constexpr):
    """Return what the tokens of a chunk write, transposed: U^T = (W * V - e^B * (E S))^T (I + T)^T, [BV, C].

    read: (E S)^T [BV, C], or with key gates (e^B E S)^T. write: w in memory. up: e^G [C]. erase_factor: beta, or e^B without
    beta, [C]. tv [C, BV] and T [C, C]: V and T as they lie in memory, not transposed. first, h: the row of the chunk's first
    token, and the head.
    """
    if D.GATE == "head":
        read *= (up if D.ERASURE == "beta" else erase_factor)[None, :]
    if D.ERASURE == "beta":
        return inverted(T, added_transpose(-read, tv, D) * erase_factor[None, :], D)
    elif D.ERASURE == "erase":
        return inverted(T, added_transpose(-read, tv, D), D)
    else:
        tw = load_tokens(write, first, h, D.H, D.V, tokens, cv, count, D)
        return inverted(T, added_product(-read, tv, tw, D), D)


@triton.jit
def load_erasing(e_read, tk, first, h, tokens, count, D: tl.constexpr):
    """Load the operand of E S as a tuple of slices [C, BK]: with key gates e^B E, else E; with beta, K in the place of E. tk:
    the slices of K, which are returned where these are the operand.

    The compiler does not load a float32 tile ahead that two products read in two layouts. So with beta and float32, e_read is K
    a second time.
    """
    if D.GATE == "key" or D.ERASURE != "beta":
        return load_slices(e_read, first, h, D.H, tokens, count, D)
    elif D.PRECISION == "tf32 terms":
        return load_slices(e_read, first, h, D.HK, tokens, count, D)
    else:
        return tk


@triton.jit
def added_product(x, tile, other, D: tl.constexpr):
    """Return x + (tile * other)^T in float32, for x [BV, C] in registers and tiles [C, BV] as they lie in memory.

    A product of two bfloat16 numbers has 16 bits, and so two bfloat16 terms.
    """
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
    """Return x (I + T)^T = x + x T^T, [BV, C], for transposed rows x [BV, C] and T [C, C]. x, the product with the identity, is
    not rounded to DTYPE."""
    return dot_onto(x, tl.trans(T), x, D)


@triton.jit
def next_states(S, U, tk, down, through, decays, chunk, h, left, D: tl.constexpr):
    """Return the slices [BV, BK] of the transposed state behind a chunk; with key gates, of the state as the next chunk reads
    it.

    S: the slices before. U: [BV, C]. tk: the slices of K. down: e^{G_last - G}. through: the result of `load_through`. chunk:
    the chunk's index. left: how many tokens of the segment follow the chunk.
    """
    if D.GATE == "head":
        U *= down[None, :]
    after = ()
    for s in tl.static_range(len(S)):
        if D.GATE == "head":
            after += (S[s] * through + dot(U, tk[s], D),)
        elif D.GATE == "key":
            ck = channels(s, D)
            enter = load_key_decay(decays, chunk + 1, h, ck, left, 0, D)
            after += (next_read_state(S[s], U, tk[s], decays, chunk, h, ck, enter, D),)
        else:
            after += (S[s] + dot(U, tk[s], D),)
    return after


@triton.jit
def next_read_state(S, U, tk, decays, chunk, h, ck, enter, D: tl.constexpr):
    """Return one slice of the transposed state that the tokens of the next chunk read, [BV, BK], from S, the slice that the
    tokens of this chunk read.

    U: [BV, C]. tk: [C, BK]. ck: the channels. enter: the decay [BK] of the state on its way into the next chunk. It is applied
    apart from the decay out of this chunk: their product may be 0 where the state is large (`common.limits`).
    """
    between, leave = load_key_decay(decays, chunk, h, ck, 1, 1, D), load_key_decay(decays, chunk, h, ck, 1, 2, D)
    return (S * between[None, :] + dot(U, tk, D)) * leave[None, :] * enter[None, :]


@triton.jit
def load_key_decay(decays, chunk, h, ck, count, which, D: tl.constexpr):
    """Load row `which` of the decays [chunks, H, 4, K] of a chunk's state with key gates, for the channels ck, [BK]; 1 if count
    <= 0. Row 0 is the decay before the chunk reads, 1 between reads and writes, 2 behind the writes."""
    p = decays + ((chunk.to(tl.int64) * D.H + h) * 4 + which) * D.K
    return tl.load(p + ck, mask=ck < tl.where(count > 0, D.K, 0), other=1.0)


@triton.jit
def load_factor(factors, pair, which, tokens, count, D: tl.constexpr):
    """Load row `which` of the factors [_, 3, C] of a (chunk, head) pair, [C]; tokens from `count` on are 0.

    Row 0 is e^G and row 1 is e^{G_last - G}. Row 2 is the factor of what is erased: beta, or the decay e^B of what e reads.
    """
    return tl.load(factors + (pair * 3 + which) * D.C + tokens, mask=tokens < count, other=0.0)


@triton.jit
def load_through(factors, chunk, h, count, D: tl.constexpr):
    """Load e^{G_last}, the decay of a whole chunk with head gates; 1 with other gates and where count <= 0. chunk: the chunk's
    index. count: the tokens from the chunk's first on."""
    if D.GATE == "head":
        return tl.load(factors + (chunk.to(tl.int64) * D.H + h) * 3 * D.C + D.C - 1, mask=count > 0, other=1.0)
    else:
        return 1.0


@triton.jit
def load_start(start, n, h, ck, cv, D: tl.constexpr, START: tl.constexpr):
    """Load the transposed state that sequence n begins from, [BV, BK] in float32; 0 without START. start: [N, H, K, V]. ck, cv:
    its rows and columns."""
    if START:
        return tl.trans(load_state(start, n, h, ck, cv, D.V, D.H, D.K, D.V).to(tl.float32))
    else:
        return tl.zeros([cv.shape[0], ck.shape[0]], tl.float32)


@triton.jit
def load_starts(start, decays, chunk, n, h, cv, count, which, D: tl.constexpr, START: tl.constexpr):
    """Load the slices of the transposed state that sequence n begins from, a tuple of [BV, BK]; 0 without START. With key gates
    they are multiplied by row `which` of the decays of chunk number `chunk` (`load_key_decay`)."""
    N: tl.constexpr = D.NK
    found = ()
    for s in tl.static_range(N):
        x = load_start(start, n, h, channels(s, D), cv, D, START)
        if D.GATE == "key":
            x *= load_key_decay(decays, chunk, h, channels(s, D), count, which, D)[None, :]
        found += (x,)
    return found


@triton.jit
def load_columns(x, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    """Load x[tokens, d] transposed, [BD, C]. x: the address of channel 0 of token 0 (`tiles.load_tile`). Tokens from `count` on
    and columns from WIDTH on are 0."""
    offsets = (SIGN * HEADS * WIDTH) * tokens[None, :] + d[:, None]
    return tl.load(x + offsets, mask=(tokens < count)[None, :] & (d < WIDTH)[:, None], other=0.0)


@triton.jit
def store_columns(x, value, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr):
    """Store value [BD, C], transposed, to x[tokens, d]. The arguments are those of `load_columns`."""
    offsets = (SIGN * HEADS * WIDTH) * tokens[None, :] + d[:, None]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(tokens < count)[None, :] & (d < WIDTH)[:, None])


@triton.jit
def delta_states(
    q, k, v, e_read, write, decays, do, inverse, scores, factors, scale, start, d_start, table, states, written, d_states,
    d_written, d_initial, D: tl.constexpr,
):  # fmt: skip
    """Compute states and d_states [chunks, H, V, K], S before and dL/dS after each chunk, written (U) and d_written (Y) [rows,
    H, V], and d_initial [N, H, K, V], dL/dS before each sequence.

    With key gates written and d_written are [chunks, H, V, C], by chunk, and d_written holds -Y, or with beta -beta * Y. In
    bfloat16 they are [chunks, H, V, 2 * C]: the second half holds what the first lost in rounding. The other operands are those
    of `delta_outputs`; do: [rows, H, V], and d_start [N, H, K, V], dL/dS after each sequence.
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
    """Store S before each chunk of a segment, states [chunks, H, V, K], and U, written, as in `delta_states`. program: the
    index of a block of columns, a head and a segment."""
    block, h, e = place_of(program, D.NV, D)
    entry = table + e * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    n, chunk = tl.load(entry + 3), tl.load(entry + 5)
    cv, tokens = block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    S = load_starts(start, decays, chunk, n, h, cv, filled, 0, D, START)
    through = load_through(factors, chunk, h, filled, D)
    for c in range(0, tl.cdiv(filled, D.C)):
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        tk = load_slices(k, first, h, D.HK, tokens, count, D)
        # [C, C]
        T = load_pairs(inverse, pair, tokens, count, D)
        # [C, BV]
        tv = load_tokens(v, first, h, D.HV, D.V, tokens, cv, count, D)
        # [C]
        erase_factor = load_factor(factors, pair, 2, tokens, count, D)
        up = load_factor(factors, pair, 0, tokens, count, D)
        down = load_factor(factors, pair, 1, tokens, count, D)
        for s in tl.static_range(len(S)):
            store_state(states, S[s], chunk + c, h, cv, channels(s, D), D.H, D.V, D.K)
        read = sliced_dot(S, load_erasing(e_read, tk, first, h, tokens, count, D), D)
        U = written_tokens(read, write, tv, T, erase_factor, up, first, h, tokens, cv, count, D)
        if D.GATE == "key":
            store_by_chunk(written, U, pair, tokens, cv, D)
        else:
            store_columns(at(written, first, h, D.H, D.V), U, tokens, cv, count, D.H, D.V, D.SIGN)
        S = next_states(S, U, tk, down, through, decays, chunk + c, h, count - D.C, D)
        through = load_through(factors, chunk + c + 1, h, count - D.C, D)


@triton.jit
def scan_state_gradients(
    program, q, k, e_read, decays, do, inverse, scores, factors, scale, d_start, table, d_states, d_written,
    d_initial, D: tl.constexpr,
):  # fmt: skip
    """Store dL/dS after each chunk of a segment, d_states [chunks, H, V, K], Y or -Y in d_written as in `delta_states`, and
    d_initial, dL/dS before the sequence. d_start: dL/dS after each sequence. program: the index of a block of columns, a head
    and a segment."""
    block, h, e = place_of(program, D.NV, D)
    entry = table + e * 6
    origin, filled, n = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    edges, chunk = tl.load(entry + 4), tl.load(entry + 5)
    cv, tokens = block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    factor = tl.load(scale + n).to(tl.float32)
    steps = tl.cdiv(filled, D.C)
    dS = load_starts(d_start, decays, chunk + steps - 1, n, h, cv, filled, 2, D, True)
    through = load_through(factors, chunk + steps - 1, h, filled, D)
    for step in range(0, steps):
        c = steps - 1 - step
        first = origin + D.SIGN * c * D.C
        count = filled - c * D.C
        pair = (chunk + c).to(tl.int64) * D.H + h
        tq = load_slices(q, first, h, D.HQ, tokens, count, D)
        tk = load_slices(k, first, h, D.HK, tokens, count, D)
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
        for s in tl.static_range(len(dS)):
            store_state(d_states, dS[s], chunk + c, h, cv, channels(s, D), D.H, D.V, D.K)
        dU = sliced_dot(dS, tk, D)
        if D.GATE == "head":
            dU *= down[None, :]
        dU = dot_onto(tdo, P, dU, D)
        Y = inverted(tl.trans(T), dU, D)
        if D.GATE == "head":
            tdo *= up[None, :]
            erased = -Y * (erase_factor * up if D.ERASURE == "beta" else erase_factor)[None, :]
        else:
            erased = -Y * erase_factor[None, :] if D.ERASURE == "beta" else -Y
        if D.GATE == "key":
            dS = with_queries(dS, tdo, tq, through, factor, decays, chunk + c, h, D)
            store_by_chunk(d_written, erased, pair, tokens, cv, D)
        else:
            store_columns(at(d_written, first, h, D.H, D.V), Y, tokens, cv, count, D.H, D.V, D.SIGN)
            dS = with_queries(dS, tdo, tq, through, factor, decays, chunk + c, h, D)
        te = load_erasing(e_read, tk, first, h, tokens, count, D)
        dS = previous_state_gradients(dS, erased, te, decays, chunk, c, h, D)
        through = load_through(factors, chunk + c - 1, h, c, D)
    if (edges & 1) != 0:
        for s in tl.static_range(len(dS)):
            store_state(d_initial, tl.trans(dS[s]), n, h, channels(s, D), cv, D.H, D.K, D.V)


@triton.jit
def with_queries(dS, tdo, tq, through, factor, decays, chunk, h, D: tl.constexpr):
    """Return the slices [BV, BK] of dL/dS of a chunk, decayed from behind its writes to its reads, plus the term of its
    queries, tdo tq (times factor with key gates).

    dS: the slices of dL/dS behind the chunk. tdo: dO, transposed and, without key gates, decayed and scaled, [BV, C]. tq:
    slices [C, BK]. through: e^{G_last} of head gates.
    """
    after = ()
    for s in tl.static_range(len(dS)):
        if D.GATE == "head":
            after += (dS[s] * through + dot(tdo, tq[s], D),)
        elif D.GATE == "key":
            between = load_key_decay(decays, chunk, h, channels(s, D), 1, 1, D)
            after += (dS[s] * between[None, :] + dot(tdo, tq[s], D) * factor,)
        else:
            after += (dS[s] + dot(tdo, tq[s], D),)
    return after


@triton.jit
def previous_state_gradients(dS, erased, te, decays, chunk, c, h, D: tl.constexpr):
    """Return the slices [BV, BK] of dL/dS before chunk c of a segment: dS + erased te, with key gates decayed to where the
    chunk before writes.

    dS: the results of `with_queries`. erased: [BV, C]. te: slices [C, BK]. chunk: the index of the segment's first chunk.
    """
    before = ()
    for s in tl.static_range(len(dS)):
        x = dot_onto(erased, te[s], dS[s], D)
        if D.GATE == "key":
            enter = load_key_decay(decays, chunk + c, h, channels(s, D), 1, 0, D)
            leave = load_key_decay(decays, chunk + c - 1, h, channels(s, D), c, 2, D)
            x = x * enter[None, :] * leave[None, :]
        before += (x,)
    return before


@triton.jit
def store_by_chunk(x, value, pair, tokens, d, D: tl.constexpr):
    """Store value [BV, C], U, -Y or -beta Y of a (chunk, head) pair, transposed, as x[pair, d] of x [pairs, V, C]. In bfloat16
    x is [pairs, V, 2 * C], and the second half holds what rounding the value lost. d: the columns."""
    W: tl.constexpr = 2 * D.C if tl.bfloat16 == D.DTYPE else D.C
    p, mask = x + (pair * D.V + d[:, None]) * W + tokens[None, :], (d < D.V)[:, None]
    tl.store(p, value.to(x.dtype.element_ty), mask=mask)
    if tl.bfloat16 == D.DTYPE:
        tl.store(p + D.C, (value - value.to(D.DTYPE).to(tl.float32)).to(D.DTYPE), mask=mask)
