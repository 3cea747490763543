"""Compute softmax attention of rows that each read an interval of keys, and its gradient.

    s_ti = scale q_t . k_i,  first_t <= i <= last_t        L_t = log2 sum_i e^{s_ti}        p_ti = e^{s_ti} / 2^{L_t}
    o_t  = sum_i p_ti v_i                                   shift_t = d_o_t . o_t
    d_v_i = sum_t p_ti d_o_t        d_s_ti = scale p_ti (d_o_t . v_i - shift_t)
    d_q_t = sum_i d_s_ti k_i        d_k_i = sum_t d_s_ti q_t

Three kernels: `outputs` and `query_gradient`, whose programs own ROWS rows of one head and scan C keys at a time; and
`key_gradient`, whose programs own C keys of one head and scan ROWS rows at a time, of all GROUP heads of q that read it. Nothing
is added atomically, so every bit repeats.

A program knows by its table (`RowBlocks`) which keys none of its rows reads, which it skips, and which all of them read, whose
scores need no mask. Where rows read chosen blocks of their keys (`ReadBlocks`), a program has a list of the tiles of which one of
its rows reads a key (`Tiles`), and takes those alone: the bits of the blocks that a row reads of a tile fit into one word.

Scores and sums are float32; exponentials are powers of two. Weights are rounded to the dtype of v.

A row that is not finite reaches the rows that read it alone. Scores are selected by the intervals before they are summed. A
product of 0 and NaN would still spoil a sum, and so a program whose sums are not finite forms them again. What a product sums
over is then 0 in rows that are not finite, and NaN reaches those that read them: by the scores of `outputs`, and by L in
gradients.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.kernels.common.softmax import (
    SoftmaxOperands,
    forward_table,
    gradient_table,
    row_blocks,
    tiles_of_keys,
    tiles_of_rows,
)
from glax._src.kernels.triton.config import precision, width
from glax._src.kernels.triton.launch import launch, tl, triton
from glax._src.kernels.triton.softmax_config import SoftmaxConfig, SoftmaxGradientConfig, check_keys
from glax._src.kernels.triton.tiles import LOG2E, at

# ---- tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def product(a, b, c, D: tl.constexpr):
    """Return a @ b + c in float32."""
    return tl.dot(a, b, c, input_precision=D.PRECISION)


@triton.jit
def read(x, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load x[tokens, d], [tokens, BLOCK], from the address x of token 0 of an array [tokens, HEADS, WIDTH]. Channels from WIDTH
    on are 0. With MASKED, tokens from `count` on are 0; without, all tokens must exist."""
    return read_columns(x, tokens, d, count, HEADS * WIDTH, WIDTH, BLOCK, MASKED)


@triton.jit
def read_columns(
    x, tokens, d, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load x[tokens, d] as `read` does, where the rows of two neighbouring tokens are STRIDE numbers apart."""
    p = x + STRIDE * tokens[:, None] + d[None, :]
    if MASKED and BLOCK == WIDTH:
        return tl.load(p, mask=(tokens < count)[:, None], other=0.0)
    elif MASKED:
        return tl.load(p, mask=(tokens < count)[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif BLOCK == WIDTH:
        return tl.load(p)
    else:
        return tl.load(p, mask=(d < WIDTH)[None, :], other=0.0)


@triton.jit
def store(x, value, tokens, d, count, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Store value at x[tokens, d], from the address x of token 0 of an array [tokens, HEADS, WIDTH]. Tokens from `count` on and
    channels from WIDTH on are not stored."""
    p = x + (HEADS * WIDTH) * tokens[:, None] + d[None, :]
    tl.store(p, value.to(x.dtype.element_ty), mask=(tokens < count)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def is_finite(x):
    """Return whether each row of x [rows, columns] is finite."""
    x = x.to(tl.float32)
    return tl.max(tl.where(x - x == 0, 0, 1), 1) == 0


@triton.jit
def replaced(x, sound):
    """Return x [rows, columns] with 0 in the rows where sound [rows] is False."""
    return tl.where(sound[:, None], x, 0.0).to(x.dtype)


@triton.jit
def held(first, last, keys):
    """Return whether keys lie in intervals: first <= key <= last. The shapes of all three are broadcast."""
    return (keys >= first) & (keys <= last)


@triton.jit
def block_number(keys, first, D: tl.constexpr):
    """Return the number of the block of D.SIZE keys in which each key lies, uint32; 0 for a key before the row's first.

    A row counts its blocks from its first key on. keys: indices of keys. first: the index of each row's first key. Their shapes
    are broadcast.
    """
    return tl.maximum(keys - first, 0).to(tl.uint32) // D.SIZE


@triton.jit
def bits_from(words, first, start, num_words, D: tl.constexpr):
    """Return 32 bits for each row, as uint32: bit i says whether the row reads the i-th block of keys from the block that holds
    key `start` on.

    words: the addresses of the rows' words, of which each row has num_words. first: the first key of each row's interval.
    """
    number = block_number(start, first, D)
    word, bit = (number // 32).to(tl.int32), number % 32
    low = tl.load(words + word, mask=word < num_words, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(words + word + 1, mask=word + 1 < num_words, other=0).to(tl.uint32, bitcast=True)
    return (low >> bit) | ((high << 1) << (31 - bit))


@triton.jit
def reads(first, last, keys, bits, start, D: tl.constexpr):
    """Return whether rows read keys. first, last: the rows' intervals. keys: indices. bits: with D.SIZE, the result of
    `bits_from` for the key `start`; else not read. All shapes are broadcast."""
    seen = held(first, last, keys)
    if D.SIZE:
        place = block_number(keys, first, D) - block_number(start, first, D)
        seen = seen & (((bits >> place) & 1) != 0)
    return seen


@triton.jit
def row_program(sizes, D: tl.constexpr):
    """Return, of a program that owns rows: the batch element, the head of q, the head of k, and the number of its entry in the
    table. sizes: an array that begins with the number of blocks of rows.

    Neighbouring programs have the heads of q that read one head of k. Blocks of rows vary next, from the last to the first:
    with causal intervals the last has the most keys.
    """
    program, count = tl.program_id(0), tl.load(sizes)
    block, other = count - 1 - program // D.GROUP % count, program // (D.GROUP * count)
    head, b = other % D.HK, other // D.HK
    return b, head * D.GROUP + program % D.GROUP, head, b * count + block


@triton.jit
def masked_part(i, size, before, full):
    """Return the offset, in keys, of part i of those parts that need a mask. A part has `size` keys. `before` masked parts come
    first, then `full` parts without a mask, then the other masked ones."""
    return tl.where(i < before, i, i + full) * size


# ---- outputs -----------------------------------------------------------------------------------------------------------


@triton.jit
def add_keys(
    highest, total, weighted, q, k, v, first, last, words, num_words, start, high, factor, D: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return (highest, total, weighted) of `add_scores` with the terms of C keys from `start` on added.

    q: a tile [ROWS, BK]. k, v: the addresses of key 0 of one head. first, last: the rows' intervals. high: keys from `high` on
    are not loaded with MASKED. MASKED: whether some row may not read some key. CAREFUL: whether k and v may have rows that are
    not finite. words, num_words: as in `bits_from`, of the rows. factor: scale times log2(e).
    """
    own, ck, cv = tl.arange(0, D.C), tl.arange(0, D.BK), tl.arange(0, D.BV)
    kt = read(k + start.to(tl.int64) * (D.HK * D.K), own, ck, high - start, D.HK, D.K, D.BK, MASKED)
    scores = tl.dot(q, tl.trans(kt), input_precision=D.PRECISION)
    vt = read(v + start.to(tl.int64) * (D.HK * D.V), own, cv, high - start, D.HK, D.V, D.BV, MASKED)
    if CAREFUL:
        sound = is_finite(kt) & is_finite(vt)
        scores, vt = tl.where(sound[None, :], scores, float("nan")), replaced(vt, sound)
    scores += 0.0 * scores  # an infinite score becomes NaN: by -inf its key would get a weight of 0
    if MASKED:
        bits = bits_from(words, first, start, num_words, D)[:, None] if D.SIZE else 0
        seen = reads(first[:, None], last[:, None], (start + own)[None, :], bits, start, D)
        scores = tl.where(seen, scores, float("-inf"))
    return add_scores(highest, total, weighted, scores, vt, factor, D)


@triton.jit
def add_scores(highest, total, weighted, scores, v, factor, D: tl.constexpr):
    """Return (highest, total, weighted), the sums of rows over keys, with the terms of more keys added. A key with a score of
    -inf adds nothing.

    highest: [ROWS], the largest product q . k. total: [ROWS], the sum of 2^{factor (q . k - highest)}. weighted: [ROWS, BV],
    the sum of values with these weights. scores: products q . k, [ROWS, C]. v: [C, BV]. factor: scale times log2(e).
    """
    new = tl.maximum(highest, tl.max(scores, 1))
    unit = tl.where(new == float("-inf"), 0.0, new * factor)
    change = tl.exp2(highest * factor - unit)
    weights = tl.exp2(scores * factor - unit[:, None])
    weighted = product(weights.to(v.dtype), v, weighted * change[:, None], D)
    return new, total * change + tl.sum(weights, 1), weighted


@triton.jit
def outputs(q, k, v, first, last, table, sizes, scale, o, log_total, D: tl.constexpr):
    """Compute o [B, T, HQ, V] and log_total, L [B, T, HQ]. A program has a block of rows of one head.

    first, last: [B, T]. table: the result of `forward_table`. sizes: [blocks of rows, S]. scale: [1].
    """
    row_outputs(q, k, v, first, last, first, first, table, sizes, scale, o, log_total, D)


@triton.jit
def chosen_outputs(q, k, v, first, last, words, tiles, table, sizes, scale, o, log_total, D: tl.constexpr):
    """Compute o and log_total as `outputs` does, for rows that read chosen blocks of D.SIZE keys.

    words: [B, T, W], of `ReadBlocks`. tiles: the places of `Tiles`, [B, blocks of rows, most]. table: the result of
    `forward_table`, whose fifth column holds the count of `Tiles` instead. sizes: [blocks of rows, S, W, most].
    """
    row_outputs(q, k, v, first, last, words, tiles, table, sizes, scale, o, log_total, D)


@triton.jit
def row_outputs(q, k, v, first, last, words, tiles, table, sizes, scale, o, log_total, D: tl.constexpr):
    """Compute the results of `outputs`, or with D.SIZE of `chosen_outputs`, for one program. Without D.SIZE, words and tiles
    are any arrays, which are not read."""
    b, hq, hk, number = row_program(sizes, D)
    entry = table + number * 6
    start, count, low, high = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    before, full = tl.load(entry + 4), tl.load(entry + 5)  # before: with D.SIZE the number of tiles
    rows, ck, cv = tl.arange(0, D.ROWS), tl.arange(0, D.BK), tl.arange(0, D.BV)
    factor = tl.load(scale) * LOG2E
    qt = read(at(q, start, hq, D.HQ, D.K), rows, ck, count, D.HQ, D.K, D.BK, True)
    begins = tl.load(first + start + rows, mask=rows < count, other=0)
    ends = tl.load(last + start + rows, mask=rows < count, other=-1)
    kh, vh = at(k, b * tl.load(sizes + 1), hk, D.HK, D.K), at(v, b * tl.load(sizes + 1), hk, D.HK, D.V)
    num_words, own = 0, words
    if D.SIZE:
        num_words = tl.load(sizes + 2)
        own = words + (start + tl.minimum(rows, count - 1)).to(tl.int64) * num_words
        tiles += number.to(tl.int64) * tl.load(sizes + 3)

    highest, total = tl.full([D.ROWS], float("-inf"), tl.float32), tl.zeros([D.ROWS], tl.float32)
    weighted = tl.zeros([D.ROWS, D.BV], tl.float32)
    if not D.SIZE:
        for i in range(0, full):
            key = low + (before + i) * D.C
            highest, total, weighted = add_keys(
                highest, total, weighted, qt, kh, vh, begins, ends, own, num_words, key, high, factor, D, False, False
            )
    parts = before if D.SIZE else tl.cdiv(high - low, D.C)
    for i in range(0, parts if D.SIZE else parts - full):
        key = tl.load(tiles + i) if D.SIZE else low + masked_part(i, D.C, before, full)
        highest, total, weighted = add_keys(
            highest, total, weighted, qt, kh, vh, begins, ends, own, num_words, key, high, factor, D, True, False
        )
    if tl.sum(tl.sum(weighted * 0.0, 1) + total * 0.0, 0) != 0:
        highest, total = tl.full([D.ROWS], float("-inf"), tl.float32), tl.zeros([D.ROWS], tl.float32)
        weighted = tl.zeros([D.ROWS, D.BV], tl.float32)
        for i in tl.range(0, parts, num_stages=1):
            key = tl.load(tiles + i) if D.SIZE else low + i * D.C
            highest, total, weighted = add_keys(
                highest, total, weighted, qt, kh, vh, begins, ends, own, num_words, key, high, factor, D, True, True
            )
    total = tl.where(total == 0, 1.0, total)
    unit = tl.where(highest == float("-inf"), 0.0, highest * factor)
    tl.store(log_total + (start + rows).to(tl.int64) * D.HQ + hq, unit + tl.log2(total), mask=rows < count)
    store(at(o, start, hq, D.HQ, D.V), weighted / total[:, None], rows, cv, count, D.HQ, D.V)


# ---- the gradient of q -------------------------------------------------------------------------------------------------


@triton.jit
def add_query_gradient(
    dq, q, d_o, logs, shifts, k, v, first, last, words, num_words, start, high, factor, D: tl.constexpr, MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return dq / scale [ROWS, BK] with the terms of C keys from `start` on added. d_o: [ROWS, BV]. logs, shifts: L and d_o . o
    of the rows, [ROWS]. The other arguments are those of `add_keys`."""
    own, ck, cv = tl.arange(0, D.C), tl.arange(0, D.BK), tl.arange(0, D.BV)
    kt = read(k + start.to(tl.int64) * (D.HK * D.K), own, ck, high - start, D.HK, D.K, D.BK, MASKED)
    vt = read(v + start.to(tl.int64) * (D.HK * D.V), own, cv, high - start, D.HK, D.V, D.BV, MASKED)
    if CAREFUL:
        kt = replaced(kt, is_finite(kt))
    weights = tl.exp2(tl.dot(q, tl.trans(kt), input_precision=D.PRECISION) * factor - logs[:, None])
    d_scores = weights * (tl.dot(d_o, tl.trans(vt), input_precision=D.PRECISION) - shifts[:, None])
    if MASKED:
        bits = bits_from(words, first, start, num_words, D)[:, None] if D.SIZE else 0
        seen = reads(first[:, None], last[:, None], (start + own)[None, :], bits, start, D)
        d_scores = tl.where(seen, d_scores, 0.0)
    return product(d_scores.to(kt.dtype), kt, dq, D)


@triton.jit
def query_gradient(
    q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_q, D: tl.constexpr
):  # fmt: skip
    """Compute d_q [B, T, HQ, K]. A program has a block of rows of one head. log_total, shift: L and d_o . o, [B, T, HQ];
    log_total is NaN where d_o or o is not finite. The first arguments are those of `outputs`."""
    row_query_gradient(q, k, v, first, last, first, first, table, sizes, scale, log_total, shift, d_o, d_q, D)


@triton.jit
def chosen_query_gradient(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_q, D: tl.constexpr
):  # fmt: skip
    """Compute d_q [B, T, HQ, K] of rows that read chosen blocks of keys. words, tiles, table: as in `chosen_outputs`."""
    row_query_gradient(q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_q, D)


@triton.jit
def row_query_gradient(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_q, D: tl.constexpr
):  # fmt: skip
    """Compute d_q as `query_gradient`, or with D.SIZE as `chosen_query_gradient`, for one program. words, tiles: as in
    `row_outputs`."""
    b, hq, hk, number = row_program(sizes, D)
    entry = table + number * 6
    start, count, low, high = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    before, full = tl.load(entry + 4), tl.load(entry + 5)  # before: with D.SIZE the number of tiles
    rows, ck, cv = tl.arange(0, D.ROWS), tl.arange(0, D.BK), tl.arange(0, D.BV)
    factor = tl.load(scale) * LOG2E
    qt = read(at(q, start, hq, D.HQ, D.K), rows, ck, count, D.HQ, D.K, D.BK, True)
    d_ot = read(at(d_o, start, hq, D.HQ, D.V), rows, cv, count, D.HQ, D.V, D.BV, True)
    begins = tl.load(first + start + rows, mask=rows < count, other=0)
    ends = tl.load(last + start + rows, mask=rows < count, other=-1)
    place = (start + rows).to(tl.int64) * D.HQ + hq
    logs = tl.load(log_total + place, mask=rows < count, other=0.0)
    shifts = tl.load(shift + place, mask=rows < count, other=0.0)
    kh, vh = at(k, b * tl.load(sizes + 1), hk, D.HK, D.K), at(v, b * tl.load(sizes + 1), hk, D.HK, D.V)
    num_words, own = 0, words
    if D.SIZE:
        num_words = tl.load(sizes + 2)
        own = words + (start + tl.minimum(rows, count - 1)).to(tl.int64) * num_words
        tiles += number.to(tl.int64) * tl.load(sizes + 3)

    dq = tl.zeros([D.ROWS, D.BK], tl.float32)
    if not D.SIZE:
        for i in range(0, full):
            key = low + (before + i) * D.C
            dq = add_query_gradient(
                dq, qt, d_ot, logs, shifts, kh, vh, begins, ends, own, num_words, key, high, factor, D, False, False
            )
    parts = before if D.SIZE else tl.cdiv(high - low, D.C)
    for i in range(0, parts if D.SIZE else parts - full):
        key = tl.load(tiles + i) if D.SIZE else low + masked_part(i, D.C, before, full)
        dq = add_query_gradient(
            dq, qt, d_ot, logs, shifts, kh, vh, begins, ends, own, num_words, key, high, factor, D, True, False
        )
    if tl.sum(tl.sum(dq * 0.0, 1), 0) != 0:
        dq = tl.zeros([D.ROWS, D.BK], tl.float32)
        for i in tl.range(0, parts, num_stages=1):
            key = tl.load(tiles + i) if D.SIZE else low + i * D.C
            dq = add_query_gradient(
                dq, qt, d_ot, logs, shifts, kh, vh, begins, ends, own, num_words, key, high, factor, D, True, True
            )
    store(at(d_q, start, hq, D.HQ, D.K), dq * tl.load(scale), rows, ck, count, D.HQ, D.K)


# ---- the gradients of k and v ------------------------------------------------------------------------------------------


@triton.jit
def add_key_gradient(
    dk, dv, k, v, keys, q, d_o, log_total, shift, first, last, words, num_words, start, stop, hq, factor, D: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Return (dk / scale, dv), [C, BK] and [C, BV], with the terms of ROWS rows from `start` on added: dk with D.KEY, dv with
    D.VALUE.

    k, v: the program's keys and values, [C, BK] and [C, BV]. keys: their indices, from a multiple of C on. q, d_o, log_total,
    shift, first, last, words: whole arrays in device memory. start, stop: rows of [B T]. MASKED: whether some row may not read
    some key; then rows from `stop` on have no terms. CAREFUL: whether rows may be not finite. num_words: the words of a row.
    hq: the head of q.
    """
    own, ck, cv, count = tl.arange(0, D.ROWS), tl.arange(0, D.BK), tl.arange(0, D.BV), stop - start
    qt = read(at(q, start, hq, D.HQ, D.K), own, ck, count, D.HQ, D.K, D.BK, MASKED)
    d_ot = read(at(d_o, start, hq, D.HQ, D.V), own, cv, count, D.HQ, D.V, D.BV, MASKED)
    place = (start + own).to(tl.int64) * D.HQ + hq
    if MASKED:
        logs = tl.load(log_total + place, mask=own < count, other=0.0)
        shifts = tl.load(shift + place, mask=own < count, other=0.0)
    else:
        logs, shifts = tl.load(log_total + place), tl.load(shift + place)
    begins = tl.load(first + start + own, mask=own < count, other=0)  # not used where no row is masked
    ends = tl.load(last + start + own, mask=own < count, other=-1)
    if CAREFUL:
        sound = (logs == logs) & (ends >= begins)
        qt, d_ot = replaced(qt, sound), replaced(d_ot, sound)
    weights = tl.exp2(tl.dot(k, tl.trans(qt), input_precision=D.PRECISION) * factor - logs[None, :])
    low, bits = tl.min(keys, 0), 0
    if D.SIZE:
        own_words = words + (start + tl.minimum(own, count - 1)).to(tl.int64) * num_words
        bits = bits_from(own_words, begins, low, num_words, D)[None, :]
    seen = reads(begins[None, :], ends[None, :], keys[:, None], bits, low, D)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    if D.VALUE:
        dv = product(weights.to(d_ot.dtype), d_ot, dv, D)
    if D.KEY:
        d_scores = weights * (tl.dot(v, tl.trans(d_ot), input_precision=D.PRECISION) - shifts[None, :])
        if MASKED:
            d_scores = tl.where(seen, d_scores, 0.0)
        dk = product(d_scores.to(qt.dtype), qt, dk, D)
    return dk, dv


@triton.jit
def key_gradient(
    q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_k, d_v, D: tl.constexpr
):  # fmt: skip
    """Compute d_k [B, S, HK, K] with D.KEY, and d_v [B, S, HK, V] with D.VALUE. A program has a block of keys of one head.

    q [B, T, HQ, K], k [B, S, HK, K] and v [B, S, HK, V]. first, last: [B, T], the interval of keys of each row. table: of
    `gradient_table`. sizes: [programs of a head, S]. scale: one number. log_total, shift: L and d_o . o, [B, T, HQ].
    d_o: [B, T, HQ, V].
    """
    key_gradients(q, k, v, first, last, first, first, table, sizes, scale, log_total, shift, d_o, d_k, d_v, D)


@triton.jit
def chosen_key_gradient(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_k, d_v, D: tl.constexpr
):  # fmt: skip
    """Compute d_k and d_v as `key_gradient`, of rows that read chosen blocks of D.SIZE keys.

    words: [B, T, W], of `ReadBlocks`. tiles: [B, programs, most, 2], for each program the blocks of rows that it reads, (begin,
    end) in the [B T] rows. table: [B, programs], how many these are. sizes: [programs of a head, S, W, most].
    """
    key_gradients(q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_k, d_v, D)


@triton.jit
def key_gradients(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_k, d_v, D: tl.constexpr
):  # fmt: skip
    """Compute the results of `key_gradient`, or with D.SIZE of `chosen_key_gradient`, for one program. words, tiles: as in
    `row_outputs`."""
    program, blocks, S = tl.program_id(0), tl.load(sizes), tl.load(sizes + 1)
    block, other = program % blocks, program // blocks
    hk, b = other % D.HK, other // D.HK
    number, num_words = b * blocks + block, 0
    own, ck, cv = tl.arange(0, D.C), tl.arange(0, D.BK), tl.arange(0, D.BV)
    factor, count = tl.load(scale) * LOG2E, S - block * D.C
    keys, place = block * D.C + own, b * S + block * D.C
    kt = read(at(k, place, hk, D.HK, D.K), own, ck, count, D.HK, D.K, D.BK, True)
    vt = read(at(v, place, hk, D.HK, D.V), own, cv, count, D.HK, D.V, D.BV, True)
    if D.SIZE:
        num_words, parts = tl.load(sizes + 2), tl.load(table + number)
        tiles += number.to(tl.int64) * tl.load(sizes + 3) * 2
        begin, full_begin, full_end, end = 0, 0, 0, 0
    else:
        entry = table + number * 4
        begin, full_begin, full_end, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        before = tl.cdiv(full_begin - begin, D.ROWS)  # parts of the rows that are masked
        parts = before + tl.cdiv(end - full_end, D.ROWS)

    dk, dv = tl.zeros([D.C, D.BK], tl.float32), tl.zeros([D.C, D.BV], tl.float32)
    for g in range(0, D.GROUP):
        hq = hk * D.GROUP + g
        for i in range(0, (full_end - full_begin) // D.ROWS):
            dk, dv = add_key_gradient(
                dk, dv, kt, vt, keys, q, d_o, log_total, shift, first, last, words, num_words, full_begin + i * D.ROWS,
                full_end, hq, factor, D, False, False,
            )  # fmt: skip
        for i in range(0, parts):
            if D.SIZE:
                start, stop = tl.load(tiles + 2 * i), tl.load(tiles + 2 * i + 1)
            else:
                start = tl.where(i < before, begin + i * D.ROWS, full_end + (i - before) * D.ROWS)
                stop = tl.where(i < before, full_begin, end)
            dk, dv = add_key_gradient(
                dk, dv, kt, vt, keys, q, d_o, log_total, shift, first, last, words, num_words, start, stop, hq, factor, D,
                True, False,
            )  # fmt: skip
    if tl.sum(tl.sum(dk * 0.0, 1), 0) + tl.sum(tl.sum(dv * 0.0, 1), 0) != 0:
        dk, dv = tl.zeros([D.C, D.BK], tl.float32), tl.zeros([D.C, D.BV], tl.float32)
        for g in range(0, D.GROUP):
            for i in tl.range(0, parts if D.SIZE else tl.cdiv(end - begin, D.ROWS), num_stages=1):
                start, stop = begin + i * D.ROWS, end
                if D.SIZE:
                    start, stop = tl.load(tiles + 2 * i), tl.load(tiles + 2 * i + 1)
                dk, dv = add_key_gradient(
                    dk, dv, kt, vt, keys, q, d_o, log_total, shift, first, last, words, num_words, start, stop,
                    hk * D.GROUP + g, factor, D, True, True,
                )  # fmt: skip
    if D.KEY:
        store(at(d_k, place, hk, D.HK, D.K), dk * tl.load(scale), own, ck, count, D.HK, D.K)
    if D.VALUE:
        store(at(d_v, place, hk, D.HK, D.V), dv, own, cv, count, D.HK, D.V)


@triton.jit
def key_alone(
    q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_k, D: tl.constexpr
):  # fmt: skip
    """Compute d_k [B, S, HK, K] alone, from the arguments of `key_gradient`."""
    key_gradient(q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_k, d_k, D)


@triton.jit
def value_alone(
    q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_v, D: tl.constexpr
):  # fmt: skip
    """Compute d_v [B, S, HK, V] alone, from the arguments of `key_gradient`."""
    key_gradient(q, k, v, first, last, table, sizes, scale, log_total, shift, d_o, d_v, d_v, D)


@triton.jit
def chosen_key_alone(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_k, D: tl.constexpr
):  # fmt: skip
    """Compute d_k [B, S, HK, K] alone, from the arguments of `chosen_key_gradient`."""
    key_gradients(q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_k, d_k, D)


@triton.jit
def chosen_value_alone(
    q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_v, D: tl.constexpr
):  # fmt: skip
    """Compute d_v [B, S, HK, V] alone, from the arguments of `chosen_key_gradient`."""
    key_gradients(q, k, v, first, last, words, tiles, table, sizes, scale, log_total, shift, d_o, d_v, d_v, D)


# ---- launches ----------------------------------------------------------------------------------------------------------

WHOLE = outputs, query_gradient, key_gradient, key_alone, value_alone  # of rows that read all keys of their intervals
CHOSEN = chosen_outputs, chosen_query_gradient, chosen_key_gradient, chosen_key_alone, chosen_value_alone


def dimensions(operands: SoftmaxOperands) -> dict:
    """Return those constants of `Dimensions` that all kernels have, by name: heads, widths, precision, and SIZE where rows read
    chosen blocks."""
    (HQ, K), (HK, V) = operands.q.shape[2:], operands.v.shape[2:]
    sizes: dict = dict(K=K, V=V, BK=width(K), BV=width(V))
    sizes |= {} if operands.blocks is None else dict(SIZE=operands.blocks.size)
    return dict(H=HQ, HQ=HQ, HK=HK, GROUP=HQ // HK, PRECISION=precision(operands.q)) | sizes


def row_arguments(operands: SoftmaxOperands, rows: int, keys: int) -> tuple[tuple, int]:
    """Return (the first arguments of a kernel whose programs own rows, up to `sizes`; the number of blocks of rows). rows,
    keys: the sizes of a program's tile."""
    (*arrays, _, chosen), blocks = operands, row_blocks(operands, rows)
    table = forward_table(blocks, operands.q.shape[1], keys)
    programs, S = table.shape[1], operands.k.shape[1]
    if chosen is None:
        return (*arrays, table, jnp.array([programs, S], jnp.int32)), programs
    tiles = tiles_of_rows(operands, blocks, rows, keys)
    table = table.at[..., 4].set(tiles.count)
    sizes = jnp.array([programs, S, chosen.words.shape[-1], tiles.places.shape[-1]], jnp.int32)
    return (*arrays, chosen.words, tiles.places, table, sizes), programs


def key_arguments(operands: SoftmaxOperands, config: SoftmaxGradientConfig) -> tuple[tuple, int]:
    """Return (the first arguments of a kernel whose programs own keys, up to `sizes`; the number of blocks of keys)."""
    *arrays, _, chosen = operands
    (B, T), S = operands.first.shape, operands.k.shape[1]
    if chosen is None:
        table = gradient_table(row_blocks(operands, config.rows), T, S, config.rows, config.own_keys)
        return (*arrays, table, jnp.array([table.shape[1], S], jnp.int32)), table.shape[1]
    blocks = row_blocks(operands, config.read_rows)
    tiles = tiles_of_keys(operands, blocks, config.read_rows, config.own_keys)
    programs, base = tiles.count.shape[1], jnp.arange(B, dtype=jnp.int32)[:, None] * T
    ends = [
        base[..., None] + x[jnp.arange(B)[:, None, None], tiles.places]
        for x in (blocks.begin[:, :-1], blocks.begin[:, 1:])
    ]
    sizes = jnp.array([programs, S, chosen.words.shape[-1], tiles.places.shape[-1]], jnp.int32)
    return (*arrays, chosen.words, jnp.stack(ends, -1), tiles.count, sizes), programs


def forward(
    operands: SoftmaxOperands, scale: float, config: SoftmaxConfig
) -> tuple[Float[Array, "B T Hq V"], Float[Array, "B T Hq"]]:
    """Return (o, L), where L is log2 of the sum of e^{scores} of each row, in float32. Raises ValueError if config.keys are too
    many for chosen blocks."""
    q, v = operands.q, operands.v
    B, T, HQ, _ = q.shape
    check_keys(operands, keys=config.keys)
    kernel = (WHOLE if operands.blocks is None else CHOSEN)[0]
    arguments, programs = row_arguments(operands, config.rows, config.keys)
    o, log_total = launch(
        kernel, B * programs * HQ, (*arguments, jnp.full(1, scale, jnp.float32)),
        [((B, T, HQ, v.shape[3]), q.dtype), ((B, T, HQ), jnp.float32)],
        **dimensions(operands), ROWS=config.rows, C=config.keys, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return o, log_total


def gradient(operands: SoftmaxOperands, o, log_total, d_o, scale: float, config: SoftmaxGradientConfig):
    """Return [dq, dk, dv] in the dtypes of q, k and v. o, log_total: the results of `forward`. d_o: the gradient of o. Raises
    ValueError if the config's keys are too many for chosen blocks."""
    q, k, v = operands[:3]
    (B, _, HQ, _), HK = q.shape, v.shape[2]
    check_keys(operands, keys=config.keys, own_keys=config.own_keys)
    _, of_rows, together, for_key, for_value = WHOLE if operands.blocks is None else CHOSEN
    shift = (d_o.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    log_total = jnp.where((jnp.isfinite(o) & jnp.isfinite(d_o)).all(-1), log_total, jnp.nan)
    common = dimensions(operands)
    rest = jnp.full(1, scale, jnp.float32), log_total, shift, d_o
    arguments, programs = row_arguments(operands, config.rows, config.keys)
    (d_q,) = launch(
        of_rows, B * programs * HQ, (*arguments, *rest), [(q.shape, q.dtype)],
        **common, ROWS=config.rows, C=config.keys, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    arguments, programs = key_arguments(operands, config)
    outs = (k.shape, k.dtype), (v.shape, v.dtype)
    parts = ((for_key, outs[:1]), (for_value, outs[1:])) if config.apart else ((together, outs),)
    results = [d_q]
    for kernel, out in parts:
        results += launch(
            kernel, B * programs * HK, (*arguments, *rest), out,
            **common, ROWS=config.read_rows, C=config.own_keys, warps=config.key_warps, stages=config.key_stages,
            KEY=kernel is not for_value, VALUE=kernel is not for_key,
        )  # fmt: skip
    return results
