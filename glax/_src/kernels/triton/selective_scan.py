"""Compute the selective scan of Mamba-1 token by token, and its gradient.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = sum over n of C_t[n] h_t[n] + D x_t        for every channel d

A program is one warp with a block of channels of one segment, whose states stay in registers. A segment is a sequence, or a part
of one where programs are few. `ends` then scans every segment from zeros first. A segment multiplies the state before it by
exp(A sum dt), unless a token in it starts from zeros. So `enter` computes the states that enter segments, from one to the next.

Tiles are [own, groups, 4, LANES, across]: LANES lanes share a channel. A lane holds `own` neighbouring channels, and of their
states `groups` times four neighbouring numbers, or fewer where a state has fewer, so that its loads are wide and most sums over n
are its own. Nothing is shared between programs, and no program waits for another.

`outputs` reads x and dt of the next SPAN tokens while it computes these. It stores the state before every CHUNK tokens for
`gradient`, which takes chunks from the last to the first:

1. It reads a chunk from its state, and stores the state before every SPAN tokens in `scratch`, which is the program's own.
2. It reads SPAN tokens again, from the last such span to the first, and keeps their states and decays in registers. Then it goes
   against time. dh begins as the gradient that later tokens pass to the state behind a token:

    dh += C dy        dC = sum over d of h dy        dB = sum over d of dh dt x        q = sum over n of dh B
    g = dh exp(dt A) h_before        dA += dt g        ddt = x q + sum over n of A g        dx = dt q + D dy
    dh = exp(dt A) dh

dB and dC are stored for every block of channels, dA and dD for every segment, and XLA adds them in a fixed order: nothing is
added atomically, so every bit repeats. The tokens behind the last whole span are taken one by one. Sums are float32. exp is
2^(dt (A log2 e)).
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.recurrence import bucket
from glax._src.kernels.common.selective import SelectiveOperands
from glax._src.kernels.triton.config import DTYPES
from glax._src.kernels.triton.launch import launch, tl, triton
from glax._src.kernels.triton.selective_scan_config import CHUNK, SelectiveConfig


class Segments(NamedTuple):
    """Hold the segments that programs scan, in scan order, as the kernels read them: [segments] each. A segment is a part of a
    sequence."""

    begin: Int[Array, "segments"]  # the first row in memory
    end: Int[Array, "segments"]  # behind the last row
    chunk: Int[Array, "segments"]  # where `starts` has the state before it
    sequence: Int[Array, "segments"]
    is_first: Int[Array, "segments"]  # of its sequence
    is_last: Int[Array, "segments"]
    keeps: Int[Array, "segments"]  # whether the state before it reaches its end: no token starts from zeros

    @classmethod
    def of(cls, p: SelectiveOperands, length: int | None, reverse: bool) -> tuple["Segments", Array, Array]:
        """Return (the segments of at most `length` tokens, the index of the first segment of each sequence, the index of its
        last).

        length: None for whole sequences. An empty sequence has one empty segment. Shapes do not depend on the boundaries. So
        segments that are left over come last, are empty, and are neither first nor last of a sequence.
        """
        G, T = p.x.shape[:2]
        edges = jnp.arange(G + 1) * T if p.packing.cuts is None else p.packing.cuts.astype(jnp.int32)
        begin, end = edges[:-1], edges[1:]
        sizes, length = end - begin, length or max(G * T, 1)
        counts = jnp.maximum(-(-sizes // length), 1)
        behind = jnp.cumsum(counts)
        most = max(G * T - 1, 0) // length  # more segments than sequences, by any boundaries
        count = len(sizes) + (G * (max(T - 1, 0) // length) if p.packing.cuts is None else most)
        i = jnp.arange(count)
        sequence = jnp.minimum(jnp.searchsorted(behind, i, side="right"), len(sizes) - 1)
        place = i - (behind - counts)[sequence]
        first = jnp.minimum(place * length, sizes[sequence])
        last = jnp.minimum(first + length, sizes[sequence])
        rows = begin[sequence] + first, begin[sequence] + last
        if reverse:
            rows = end[sequence] - last, end[sequence] - first
        keeps = jnp.ones(count, bool)
        if count > len(sizes) and p.packing.resets is not None:  # whole sequences pass no state on
            before = jnp.pad(jnp.cumsum(p.packing.resets.reshape(-1).astype(jnp.int32)), (1, 0))
            keeps = before[rows[0]] == before[rows[1]]
        chunk = begin[sequence] // CHUNK + sequence + place * (length // CHUNK)
        own = place < counts[sequence]
        fields = *rows, chunk, sequence, place == 0, own & (place == counts[sequence] - 1), keeps
        return cls(*(x.astype(jnp.int32) for x in fields)), behind - counts, behind - 1


LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
FIELDS = tl.constexpr(len(Segments._fields))
BEGIN, END, CHUNK_OF, SEQUENCE, IS_FIRST, IS_LAST, KEEPS = (tl.constexpr(i) for i in range(len(Segments._fields)))
ENTRIES = 256  # numbers of states of a program of `enter`


@triton.jit
def places(block, D: tl.constexpr):
    """Return, for a program's tiles [own, groups, 4, LANES, across]: the channels, the indices n of a state's numbers, the
    offsets of both in a state [K, V], and a mask of those that exist.

    channels: [own, 1, 1, LANES, across]. numbers: [1, groups, 4, LANES, 1]. block: the index of the program's block of BK
    channels.
    """
    OWN: tl.constexpr = D.OWN
    LANES: tl.constexpr = D.LANES
    ACROSS: tl.constexpr = D.BK // OWN
    TOGETHER: tl.constexpr = min(4, D.BV // LANES)
    GROUPS: tl.constexpr = D.BV // LANES // TOGETHER
    own = tl.arange(0, OWN)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    together = tl.arange(0, TOGETHER)[None, None, :, None, None]
    lane = tl.arange(0, LANES)[None, None, None, :, None]
    across = tl.arange(0, ACROSS)[None, None, None, None, :]
    # All lanes of a channel read and hold what it has, so that no value moves between lanes.
    channel = (block * ACROSS + across) * OWN + own + lane * 0
    number = (group * LANES + lane) * TOGETHER + together
    return channel, number, channel * D.V + number, (channel < D.K) & (number < D.V)


@triton.jit
def own_part(A, skip, table, D: tl.constexpr):
    """Return (segment, channels, numbers, offsets, mask, first chunk, first row, rows, A log2 e, skip) of a program.

    channels to mask: the results of `places`. first row: in scan order. A and skip: those of the program's channels; 0 for an
    absent skip.
    """
    segment = tl.program_id(0) // D.NK
    channel, number, place, exists = places(tl.program_id(0) % D.NK, D)
    begin = tl.load(table + segment * FIELDS + BEGIN)
    end = tl.load(table + segment * FIELDS + END)
    chunk = tl.load(table + segment * FIELDS + CHUNK_OF)
    first = begin if D.SIGN == 1 else end - 1
    decay = tl.load(A + place, mask=exists, other=0.0) * LOG2E
    factor = tl.load(skip + channel, mask=channel < D.K, other=0.0) if D.SKIP else 0.0
    return segment, channel, number, place, exists, chunk, first, end - begin, decay, factor


@triton.jit
def row_of(x, row, WIDTH: tl.constexpr):
    """Return the address of row `row` of x [rows, WIDTH], also where x has more than 2^31 elements."""
    return x + row.to(tl.int64) * WIDTH


@triton.jit
def load_rows(x, k, channel, D: tl.constexpr):
    """Load, for each channel, the k-th row in scan order from the row at the address x, of an array [rows, K], in float32."""
    place = (x + channel) + D.SIGN * k * D.K
    if D.K % D.BK == 0:
        return tl.load(place).to(tl.float32)
    return tl.load(place, mask=channel < D.K, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, k, channel, value, D: tl.constexpr):
    """Store a value for each channel in the k-th row in scan order from the row at the address x, of an array [rows, K]. All
    lanes of a channel hold the value, and the first stores it."""
    place = (x + channel) + D.SIGN * k * D.K
    first = tl.arange(0, D.LANES)[None, None, None, :, None] == 0
    value = tl.broadcast_to(value.to(x.dtype.element_ty), channel.shape)
    tl.store(place, value, mask=(first & (channel < D.K)) if D.K % D.BK else tl.broadcast_to(first, channel.shape))


@triton.jit
def load_numbers(B, k, number, D: tl.constexpr):
    """Load, for each number of a state, the k-th row in scan order from the row at the address B, of an array [rows, BV]. All
    channels share the numbers."""
    whole = number + tl.arange(0, D.BK // D.OWN)[None, None, None, None, :] * 0
    return tl.load((B + whole) + D.SIGN * k * D.BV)


@triton.jit
def over_numbers(x):
    """Return the sum of a tile x over the numbers of a state, for each channel: [own, 1, 1, 1, across]."""
    return tl.sum(tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True), 3, keep_dims=True)


@triton.jit
def unless_reset(h, resets, k, D: tl.constexpr):
    """Return the state h, or zeros if D.RESETS and the k-th token in scan order starts from zeros. resets: the address of the
    mark of token 0, nonzero at such tokens."""
    return tl.where(tl.load(resets + D.SIGN * k) != 0, 0.0, h) if D.RESETS else h


@triton.jit
def load_span(x, dt, channel, D: tl.constexpr, SPAN: tl.constexpr):
    """Return (x, dt) of SPAN consecutive tokens in scan order: two tuples of a value for each channel. x, dt: the addresses of
    the first token's rows."""
    xs = ()
    dts = ()
    for k in tl.static_range(SPAN):
        xs += (load_rows(x, k, channel, D),)
        dts += (load_rows(dt, k, channel, D),)
    return xs, dts


@triton.jit
def outputs(x, dt, A, B, C, skip, states, table, resets, y, final, starts, D: tl.constexpr):
    """Compute y [rows, K], the final states of segments, `final` [segments, K, V], and with D.GRADIENT the states before
    chunks, starts [chunks, K, V].

    x, dt: [rows, K]. A: [K, V]. B, C: [rows, BV]. skip: [K], D of the module's header. states: [segments, K, V], those that
    enter segments. table: the fields of `Segments`, [segments, FIELDS]. resets: [rows], nonzero where a token starts from
    zeros.
    """
    SPAN: tl.constexpr = D.SPAN
    segment, channel, number, place, exists, chunk, first, count, decay, factor = own_part(A, skip, table, D)
    h = tl.load(row_of(states, segment, D.K * D.V) + place, mask=exists, other=0.0)
    chunks = row_of(starts, chunk, D.K * D.V) + place
    spans = count // SPAN
    if spans > 0:
        xs, dts = load_span(row_of(x, first, D.K), row_of(dt, first, D.K), channel, D, SPAN)
        for i in range(spans):
            step = i * SPAN
            if D.GRADIENT and step % D.C == 0:
                tl.store(row_of(chunks, step // D.C, D.K * D.V), h, mask=exists)
            following = first + D.SIGN * tl.minimum(step + SPAN, (spans - 1) * SPAN)
            next_xs, next_dts = load_span(row_of(x, following, D.K), row_of(dt, following, D.K), channel, D, SPAN)
            row = first + D.SIGN * step
            yt, Bt, Ct = row_of(y, row, D.K), row_of(B, row, D.BV), row_of(C, row, D.BV)
            outs = ()  # stored behind the span: the compiler moves no load over a store
            for k in tl.static_range(SPAN):
                h = passed(h, xs[k], dts[k], Bt, resets + row, k, decay, number, D)
                outs += (over_numbers(h * load_numbers(Ct, k, number, D)) + factor * xs[k],)
            for k in tl.static_range(SPAN):
                store_rows(yt, k, channel, outs[k], D)
            xs, dts = next_xs, next_dts
    if D.GRADIENT and (spans * SPAN % D.C == 0) & (spans * SPAN < count):
        tl.store(row_of(chunks, spans * SPAN // D.C, D.K * D.V), h, mask=exists)
    for step in range(spans * SPAN, count):
        row = first + D.SIGN * step
        tx = load_rows(row_of(x, row, D.K), 0, channel, D)
        h = advanced(h, x, dt, B, resets, row, 0, decay, channel, number, D)
        out = over_numbers(h * load_numbers(row_of(C, row, D.BV), 0, number, D))
        store_rows(row_of(y, row, D.K), 0, channel, out + factor * tx, D)
    tl.store(row_of(final, segment, D.K * D.V) + place, h, mask=exists)


@triton.jit
def ends(x, dt, A, B, table, resets, final, total, D: tl.constexpr):
    """Compute what each segment adds to the state behind it, `final` [segments, K, V], and the sum of its dt, total [segments,
    K].

    With D.ADJOINT x is dy, B is C, and the scan goes against time. The results are then what each segment adds to the gradient
    of the state before it, and the same sum. The operands are those of `outputs`.
    """
    SPAN: tl.constexpr = D.SPAN
    segment, channel, number, place, exists, _, first, count, decay, _ = own_part(A, A, table, D)
    h = tl.zeros(place.shape, tl.float32)
    through = tl.zeros(channel.shape, tl.float32)
    spans = count // SPAN
    if spans > 0:
        xs, dts = load_span(row_of(x, first, D.K), row_of(dt, first, D.K), channel, D, SPAN)
        for i in range(spans):
            following = first + D.SIGN * tl.minimum((i + 1) * SPAN, (spans - 1) * SPAN)
            next_xs, next_dts = load_span(row_of(x, following, D.K), row_of(dt, following, D.K), channel, D, SPAN)
            row = first + D.SIGN * (i * SPAN)
            for k in tl.static_range(SPAN):
                h = passed(h, xs[k], dts[k], row_of(B, row, D.BV), resets + row, k, decay, number, D)
                through += dts[k]
            xs, dts = next_xs, next_dts
    for step in range(spans * SPAN, count):
        row = first + D.SIGN * step
        td = load_rows(row_of(dt, row, D.K), 0, channel, D)
        tx = load_rows(row_of(x, row, D.K), 0, channel, D)
        h = passed(h, tx, td, row_of(B, row, D.BV), resets + row, 0, decay, number, D)
        through += td
    tl.store(row_of(final, segment, D.K * D.V) + place, h, mask=exists)
    store_rows(row_of(total, segment, D.K), 0, channel, through, D)


@triton.jit
def passed(h, x, dt, B, resets, k, decay, number, D: tl.constexpr):
    """Return the state h behind the k-th token from the state before it. x, dt: the token's values. With D.ADJOINT x is dy and
    B is C: return the gradient of the state before the token from h, the gradient of the state behind it without this token's
    term."""
    through = tl.exp2(decay * dt)
    if D.ADJOINT:
        return unless_reset(through * (h + load_numbers(B, k, number, D) * x), resets, k, D)
    return through * unless_reset(h, resets, k, D) + load_numbers(B, k, number, D) * (dt * x)


@triton.jit
def enter(added, total, A, states, table, into, D: tl.constexpr):
    """Compute the states that enter the H segments, into [segments, K, V].

    added, total: the results of `ends`. states: those that enter sequences, [sequences, K, V]. table: as in `outputs`. With
    D.ADJOINT the scan goes from the last segment to the first, and states are gradients behind sequences. A program has BK
    numbers of the states, and takes all segments in order.
    """
    place = tl.program_id(0) * D.BK + tl.arange(0, D.BK)
    exists = place < D.K * D.V
    decay = tl.load(A + place, mask=exists, other=0.0) * LOG2E
    S = tl.zeros((D.BK,), tl.float32)
    for i in range(D.H):
        e = D.H - 1 - i if D.ADJOINT else i
        row = table + e * FIELDS
        given = tl.load(row_of(states, tl.load(row + SEQUENCE), D.K * D.V) + place, mask=exists, other=0.0)
        S = tl.where(tl.load(row + (IS_LAST if D.ADJOINT else IS_FIRST)) != 0, given, S)
        tl.store(row_of(into, e, D.K * D.V) + place, S, mask=exists)
        through = tl.exp2(decay * tl.load(row_of(total, e, D.K) + place // D.V, mask=exists, other=0.0))
        S = tl.where(tl.load(row + KEEPS) != 0, S * through, 0.0)
        S += tl.load(row_of(added, e, D.K * D.V) + place, mask=exists, other=0.0)


@triton.jit
def advanced(h, x, dt, B, resets, row, k, decay, channel, number, D: tl.constexpr):
    """Return the state behind the k-th token in scan order from `row`. h: the state before the token. x, dt, B, resets: whole
    arrays."""
    td = load_rows(row_of(dt, row, D.K), k, channel, D)
    tx = load_rows(row_of(x, row, D.K), k, channel, D)
    return passed(h, tx, td, row_of(B, row, D.BV), resets + row, k, decay, number, D)


@triton.jit
def from_other(x, across, bit: tl.constexpr):
    """Return x of another lane or column: the entry whose index on the axis `across` is this one's with the bits of `bit`
    flipped."""
    return tl.gather(x, across ^ bit, 4)


@triton.jit
def store_sums(B, values, number, D: tl.constexpr):
    """Store, for each of several consecutive tokens, the sum of `values` over a program's channels, in an array [rows, BV]. B:
    the address of the row of the first token in scan order. values: a tile [1, groups, 4, LANES, across] for each token, the
    last token first.

    Two lanes add two tokens' sums together: each sends its value of one token, and receives the other lane's value of the
    other. So lanes hold the sums of different tokens in the end, and fewer values move than if each held all.
    """
    TOKENS: tl.constexpr = len(values)
    ACROSS: tl.constexpr = D.BK // D.OWN
    across = tl.broadcast_to(tl.arange(0, ACROSS)[None, None, None, None, :], values[0].shape)
    for i in tl.static_range(5):
        if 1 << i < ACROSS:
            has = (across & (1 << i)) != 0
            sums = ()
            for pair in tl.static_range(len(values) // 2):
                own = tl.where(has, values[2 * pair + 1], values[2 * pair])
                sent = tl.where(has, values[2 * pair], values[2 * pair + 1])
                sums += (own + from_other(sent, across, 1 << i),)
            for one in tl.static_range(len(values) % 2):  # the only one
                sums += (values[one] + from_other(values[one], across, 1 << i),)
            values = sums
    whole = number - D.SIGN * D.BV * across
    for i in tl.static_range(len(values)):
        place = (B + whole) + D.SIGN * D.BV * (TOKENS - 1 - ACROSS * i)
        if ACROSS > TOKENS:
            tl.store(place, values[i], mask=across < TOKENS)
        else:
            tl.store(place, values[i])


@triton.jit
def against_time(
    carried, h, x, dt, B, C, resets, dy, dx, ddt, dB, dC, row, decay, factor, channel, number, D: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Compute the gradients of SPAN tokens, from the last to the first, and store dx, ddt, dB and dC. Return `carried` with the
    terms of these tokens.

    h: the state before the tokens. row: the row of the first token. carried: (dh, dA, dD) of the tokens behind. factor: D of
    the program's channels. decay: A log2(e).
    """
    dh, dA, d_skip = carried
    before = ()
    throughs = ()
    of_B = ()
    of_C = ()
    xs, dts = load_span(row_of(x, row, D.K), row_of(dt, row, D.K), channel, D, SPAN)
    for k in tl.static_range(SPAN):
        through = tl.exp2(decay * dts[k])
        before += (h,)
        h = through * unless_reset(h, resets + row, k, D) + load_numbers(row_of(B, row, D.BV), k, number, D) * (
            dts[k] * xs[k]
        )
        throughs += (through,)
    dy, dx, ddt = row_of(dy, row, D.K), row_of(dx, row, D.K), row_of(ddt, row, D.K)
    B, C, dB, dC = row_of(B, row, D.BV), row_of(C, row, D.BV), row_of(dB, row, D.BV), row_of(dC, row, D.BV)
    for back in tl.static_range(SPAN):
        tx, td = xs[SPAN - 1 - back], dts[SPAN - 1 - back]
        t_dy = load_rows(dy, SPAN - 1 - back, channel, D)
        of_C += (tl.sum(h * t_dy, 0, keep_dims=True),)
        dh += load_numbers(C, SPAN - 1 - back, number, D) * t_dy
        of_B += (tl.sum(dh * (td * tx), 0, keep_dims=True),)
        q = over_numbers(dh * load_numbers(B, SPAN - 1 - back, number, D))
        dh *= throughs[SPAN - 1 - back]
        h = before[SPAN - 1 - back]
        g = dh * unless_reset(h, resets + row, SPAN - 1 - back, D)
        store_rows(ddt, SPAN - 1 - back, channel, tx * q + LN2 * over_numbers(decay * g), D)
        store_rows(dx, SPAN - 1 - back, channel, td * q + factor * t_dy, D)
        dA += td * g
        d_skip += tx * t_dy
        dh = unless_reset(dh, resets + row, SPAN - 1 - back, D)
    store_sums(dB, of_B, number, D)
    store_sums(dC, of_C, number, D)
    return dh, dA, d_skip


@triton.jit
def gradient(
    x, dt, A, B, C, skip, table, resets, starts, dy, d_final, size,
    dx, ddt, dA, dB, dC, d_skip, d_states, scratch, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of every input. dA [segments, K, V] and d_skip [segments, K] are sums over a segment, and dB and dC
    [blocks, rows, BV] are sums over a block of channels. d_states [segments, K, V]: the gradients of the states before
    segments.

    d_final: [segments, K, V], the gradients of the states behind segments. starts: of `outputs`. size: [1], the number of rows.
    scratch: a program's own memory in device memory, for the states before every SPAN tokens of a chunk. The other operands are
    those of `outputs`.
    """
    SPAN: tl.constexpr = D.SPAN
    segment, channel, number, place, exists, chunk, first, count, decay, factor = own_part(A, skip, table, D)
    chunks = row_of(starts, chunk, D.K * D.V) + place
    block = tl.program_id(0) % D.NK
    spans = row_of(scratch, tl.program_id(0), D.C // SPAN * D.BK * D.BV) + ((channel - block * D.BK) * D.BV + number)
    of_block = block.to(tl.int64) * tl.load(size) * D.BV
    dB += of_block
    dC += of_block
    dh = tl.load(row_of(d_final, segment, D.K * D.V) + place, mask=exists, other=0.0)
    carried = (dh, tl.zeros(place.shape, tl.float32), tl.zeros(channel.shape, tl.float32))
    for back in range(0, tl.cdiv(count, D.C)):
        c = tl.cdiv(count, D.C) - 1 - back
        step = c * D.C
        tokens = tl.minimum(count - step, D.C)
        h = tl.load(row_of(chunks, c, D.K * D.V), mask=exists, other=0.0)
        tl.store(spans, h)
        for s in range(1, tl.cdiv(tokens, SPAN)):
            row = first + D.SIGN * (step + (s - 1) * SPAN)
            for k in tl.static_range(SPAN):
                h = advanced(h, x, dt, B, resets, row, k, decay, channel, number, D)
            tl.store(spans + s * (D.BK * D.BV), h)
        tl.debug_barrier()
        whole = tokens // SPAN
        for k in range(0, tokens % SPAN):
            t = tokens - 1 - k
            h = tl.load(spans + whole * (D.BK * D.BV))
            for s in range(whole * SPAN, t):
                h = advanced(h, x, dt, B, resets, first + D.SIGN * (step + s), 0, decay, channel, number, D)
            row = first + D.SIGN * (step + t)
            carried = against_time(
                carried, h, x, dt, B, C, resets, dy, dx, ddt, dB, dC, row, decay, factor, channel, number, D, 1
            )
        for k in range(0, whole):
            s = whole - 1 - k
            h = tl.load(spans + s * (D.BK * D.BV))
            row = first + D.SIGN * (step + s * SPAN)
            carried = against_time(
                carried, h, x, dt, B, C, resets, dy, dx, ddt, dB, dC, row, decay, factor, channel, number, D, SPAN
            )
        tl.debug_barrier()
    dh, total, of_skip = carried
    tl.store(row_of(d_states, segment, D.K * D.V) + place, dh, mask=exists)
    tl.store(row_of(dA, segment, D.K * D.V) + place, total, mask=exists)
    if D.SKIP:
        store_rows(row_of(d_skip, segment, D.K), 0, channel, of_skip, D)


# ---- launches ----------------------------------------------------------------------------------------------------------


def padded(B: Float[Array, "G T N"]) -> Float[Array, "G T _"]:
    """Return B in float32, with zeros behind its N numbers up to a power of two, so that loads of a state's numbers are
    aligned."""
    return jnp.pad(B.astype(jnp.float32), ((0, 0), (0, 0), (0, bucket(B.shape[2]) - B.shape[2])))


def prepared(p: SelectiveOperands, skip: Float[Array, "D"] | None, config: SelectiveConfig, reverse: bool):
    """Return (the operands A, B, C and skip as the kernels read them; the marks of tokens that start from zeros, int32; the
    constants and options of a launch, by name). skip: D of the module's header, or None."""
    resets = p.packing.resets
    D, N = p.A.shape
    constants = dict(
        H=1, K=D, V=N, C=CHUNK, BK=config.channels, BV=bucket(N), LANES=config.lanes, OWN=config.own, SPAN=config.span,
        SIGN=-1 if reverse else 1, RESETS=resets is not None, warps=1, stages=1,
    )  # fmt: skip
    marks = jnp.zeros(1, jnp.int32) if resets is None else resets.astype(jnp.int32)
    factor = jnp.zeros(1, jnp.float32) if skip is None else skip.astype(jnp.float32)
    return (p.A, padded(p.B), padded(p.C), factor), marks, constants


def readable(x: Array) -> Array:
    """Return x in a dtype that the kernels read: its own if it is in DTYPES, else float32."""
    return x if str(x.dtype) in DTYPES else x.astype(jnp.float32)


def entering(
    x: Array,
    B: Array,
    p: SelectiveOperands,
    states: Float[Array, "sequences D N"],
    segments: Segments,
    marks: Array,
    constants: dict[str, Any],
    *,
    adjoint: bool,
) -> Float[Array, "segments D N"]:
    """Return the states that enter segments, [segments, D, N]. states: those that enter sequences.

    x [G, T, D], B [G, T, N rounded up]: a token adds dt x B to the state. If `adjoint`, x is dy and B is C: a token adds x B to
    the gradient of the state, and `states` are gradients behind sequences. marks, constants: the results of `prepared`.
    """
    count, (D, N) = len(segments.begin), p.A.shape
    if count == len(states):
        return states
    table, of_segments = jnp.stack(segments, 1), ((count, D, N), jnp.float32)
    sign = -constants["SIGN"] if adjoint else constants["SIGN"]
    added, total = launch(
        ends, count * -(-D // constants["BK"]), (x, readable(p.dt), p.A, B, table, marks),
        [of_segments, ((count, D), jnp.float32)], ADJOINT=adjoint, **constants | dict(SIGN=sign),
    )  # fmt: skip
    sizes = dict(H=count, K=D, V=N, BK=ENTRIES, ADJOINT=adjoint, warps=4, stages=1)
    (into,) = launch(enter, -(-D * N // ENTRIES), (added, total, p.A, states, table), [of_segments], **sizes)
    return into


def forward(
    p: SelectiveOperands,
    skip: Float[Array, "D"] | None,
    config: SelectiveConfig,
    *,
    reverse: bool,
    saves_residuals: bool,
) -> tuple[Array, Array, Array]:
    """Return y [G, T, D] in the dtype of x; the final states [sequences, D, N]; and the states before chunks of CHUNK tokens,
    [chunks, D, N], which have no meaning without residuals. skip: D of the module's header, or None for 0. y of rows of no
    sequence is undefined."""
    operands, marks, constants = prepared(p, skip, config, reverse)
    segments, _, last = Segments.of(p, config.segment, reverse)
    states = entering(p.x, operands[1], p, p.states, segments, marks, constants, adjoint=False)
    (G, T, D), count = p.x.shape, len(states)
    chunks = G * T // CHUNK + len(p.states) if saves_residuals else 1
    results = [(p.x.shape, p.x.dtype), (states.shape, jnp.float32), ((chunks, *p.A.shape), jnp.float32)]
    operands = p.x, readable(p.dt), *operands, states, jnp.stack(segments, 1), marks
    y, final, starts = launch(
        outputs, count * -(-D // config.channels), operands, results,
        SKIP=skip is not None, GRADIENT=saves_residuals, **constants,
    )  # fmt: skip
    return y, (final if count == len(p.states) else final[last]), starts


def gradients(
    p: SelectiveOperands,
    skip: Float[Array, "D"] | None,
    starts: Float[Array, "chunks D N"],
    d_y: Float[Array, "G T D"],
    d_final: Float[Array, "sequences D N"],
    config: SelectiveConfig,
    *,
    reverse: bool,
) -> tuple[tuple[Array, ...], Array | None]:
    """Return (the gradients of x, dt, A, B, C and the states, in their dtypes; the gradient of skip, or None without it).

    Gradients are undefined in rows of no sequence. starts: the states before chunks that `forward` saved.
    """
    operands, marks, constants = prepared(p, skip, config, reverse)
    segments, first, _ = Segments.of(p, config.segment, reverse)
    behind = entering(d_y, operands[2], p, d_final, segments, marks, constants, adjoint=True)
    (G, T, D), count, BV = p.x.shape, len(behind), constants["BV"]
    blocks = -(-D // config.channels)
    programs, partial = count * blocks, ((blocks, G, T, BV), jnp.float32)
    of_states = (behind.shape, jnp.float32)
    dt = readable(p.dt)
    results = [
        (p.x.shape, p.x.dtype), (dt.shape, dt.dtype), of_states, partial, partial,
        ((count, D) if skip is not None else (1,), jnp.float32), of_states,
        ((programs, CHUNK // config.span, config.channels, BV), jnp.float32),
    ]  # fmt: skip
    size = jnp.full(1, G * T, jnp.int32)
    operands = p.x, dt, *operands, jnp.stack(segments, 1), marks, starts, d_y, behind, size
    dx, ddt, dA, dB, dC, d_skip, d_states, _ = launch(
        gradient, programs, operands, results, SKIP=skip is not None, **constants
    )
    dB, dC = (each.sum(0)[..., : p.A.shape[1]] for each in (dB, dC))
    d_states = d_states if count == len(p.states) else d_states[first]
    found = tuple(d.astype(x.dtype) for d, x in zip((dx, ddt, dA.sum(0), dB, dC, d_states), p[:-1], strict=True))
    return found, None if skip is None else d_skip.sum(0).astype(skip.dtype)
