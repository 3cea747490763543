"""Compute one token of each sequence, from a stored state and the tokens since it was written, which lie in a replay ring:

    S_t = e^{G_t} S_0 + sum_{i < t} e^{G_t - G_i} k_i u_i^T + k_t u_t^T        o_t = scale * S_t^T q_t

G is the sum of the log decays since S_0 was written. The ring holds k_i, u_i and the decays, and with `Erasure.along` b the
second term b_i y_i^T. The new token's u_t is v_t, or under the delta rule w_t * v_t - S_bar_t^T e_t. Where the token is the
REPLAY-th since S_0 was written, S_t is written in the place of S_0, and the ring is empty then. The token is appended to the ring
where that has a place for it. No other part of S is written. Every exponent is a sum of the log decays that it spans.

Roles: a program has one sequence, one head and BV columns of the state. It first issues its loads: of C - 1 tokens of the ring,
of the new token, and of S_0. A load that is issued behind those of S_0 waits as long as these. The program then decays the ring's
keys and values to the new token, and reads the ring and S_0 with q and e. Of a longer ring it loads C tokens at a time.

Memory: states stream past the caches. A program that writes a state loads the ring and S_0 again, from the second-level cache:
registers that held them would leave room for fewer programs. One program of a head appends the new key, each program its values.

Who waits for whom: programs of a sequence do not wait. Each reads the length of its slot and then adds ARRIVED to it. The last
to arrive knows that all have read, and stores the new length. A slot that two sequences of one call have is undefined, its length
too.

States in 8 bits have a scale for each SCALED rows: S_0 = scale (value + rest / FACTOR). Outputs read no rests, which are what
values lost by rounding, so they are read where the state is written alone. A program then has all columns, of which a scale is.

In helpers, h is a head, n a sequence, k and v are the indices of a block of the state's rows and columns, and row is the row of
a slot's first place in the arrays of the ring. D has the constants of the launch (`launch.Dimensions`).
"""

import jax.numpy as jnp
from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.core.ring import RingedStates
from glax._src.core.stored_states import COMPACT, LEAST_SCALE, scaled_rows
from glax._src.kernels.triton.config import TritonReplayConfig, width
from glax._src.kernels.triton.launch import launch, tl, triton
from glax._src.kernels.triton.recurrent import change, erasure_operands, gates_of, shape
from glax._src.kernels.triton.tiles import at, exp, load_state, place_of, store_state

ARRIVED = tl.constexpr(1 << 16)
LARGEST_FLOAT = tl.constexpr(3.4e38)
LEAST = tl.constexpr(LEAST_SCALE)
# Of states in 8 bits: the largest number, and by how much rests are multiplied.
LARGEST_INT8, FACTOR_INT8 = map(tl.constexpr, COMPACT["int8"])
LARGEST_FLOAT8, FACTOR_FLOAT8 = map(tl.constexpr, COMPACT["float8_e4m3fn"])
NAN = tl.constexpr(float("nan"))
MAGIC = tl.constexpr(1.5 * 2**23)  # float32 numbers around it are integers
FOLDED = tl.constexpr(16)  # tokens of the ring that are folded into the state at a time: the least that a product takes
MOST_TOKENS = 16  # of a tile, with S_0
TILE = 2**12  # numbers of a tile of keys


@triton.jit
def load_vector(x, row, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load x[row, head] of x [rows, HEADS, WIDTH], [BD], in x's own dtype, with 0 from channel WIDTH on. d: the indices of
    channels."""
    return tl.load(at(x, row, head, HEADS, WIDTH) + d, mask=d < WIDTH, other=0.0)


@triton.jit
def wide(x):
    """Return x in float32. The addition of 0 keeps the compiler from changing the layout of x earlier.

    All threads wait for a change of layout. Directly behind the load of x, the wait would delay the loads that follow.
    """
    return x.to(tl.float32) + 0.0


@triton.jit
def load_gates(head, key, value, h, n, k, v, D: tl.constexpr):
    """Load the log decays of the new token: (for the rows of the state [BK], or one number if all rows share a gate; for the
    columns [BV]); zeros without gates. n, h: the sequence and head. k, v: indices of rows and columns."""
    rows, columns = tl.zeros([D.BK], tl.float32), tl.zeros([D.BV], tl.float32)
    if D.KEY:
        rows = load_vector(key, n, h, k, D.H, D.K)
    elif D.HEAD != "none":
        rows = tl.load(head + n.to(tl.int64) * D.H + h)
    if D.VALUE:
        columns = load_vector(value, n, h, v, D.H, D.V)
    return rows, columns


@triton.jit
def ring_tile(x, row, tokens, held, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load x[row + tokens, head, d], [C, BD], with 0 for tokens that are not among the first `held` of the ring. row: the row
    of the slot's first place in x [P * PLACES, HEADS, WIDTH]. tokens: places of the ring, [C]."""
    p = at(x, row + tokens, head, HEADS, WIDTH)[:, None] + d[None, :]
    is_held = (tokens >= 0) & (tokens < held)
    return tl.load(p, mask=is_held[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def load_ring(ring, row, first, held, h, k, v, C: tl.constexpr, D: tl.constexpr):
    """Load (k_i, u_i, b_i, y_i) of C consecutive tokens i of the ring, from first - 1 on, and the gates of the tokens i + 1 for
    rows and columns of the state: six tiles [C, BK or BV], or [C, 1] for what is absent or has one number for each token.

    Row i of a tile has token first + i - 1, of which -1 stands for S_0, and the gates of token first + i. So the sum of gates
    from row i on is the log decay behind the token of row i. ring: the arrays of `RingedStates`. row: the row of the slot's
    first place. held: the number of tokens in the ring.
    """
    ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_erased = ring
    place = first + tl.arange(0, C)
    keys = ring_tile(ring_key, row, place - 1, held, h // (D.H // D.HK), k, D.HK, D.K)
    if D.ERASURE == "none":
        values = ring_tile(ring_value, row, place - 1, held, h // (D.H // D.HV), v, D.HV, D.V)
    else:
        values = ring_tile(ring_value, row, place - 1, held, h, v, D.H, D.V)
    gates, columns = tl.zeros([C, 1], tl.float32), tl.zeros([C, 1], tl.float32)
    if D.KEY:
        gates = ring_tile(ring_row, row, place, held, h, k, D.H, D.K)
    elif D.HEAD != "none":
        gates = tl.load(ring_head + (row + place) * D.H + h, mask=place < held, other=0.0)
    if D.VALUE:
        columns = ring_tile(ring_column, row, place, held, h, v, D.H, D.V)
    bs, ys = tl.zeros([C, 1], tl.float32), tl.zeros([C, 1], tl.float32)
    if D.ALONG:
        bs = ring_tile(ring_along, row, place - 1, held, h, k, D.H, D.K)
        ys = ring_tile(ring_erased, row, place - 1, held, h, v, D.H, D.V)
    return keys, values, bs, ys, gates, columns


@triton.jit
def decayed_terms(loaded, rows, columns, D: tl.constexpr):
    """Return ((k_i, u_i, b_i, y_i) decayed to the new token, [C, BK or BV] each, rows, columns), in float32.

    loaded: the result of `load_ring`. rows, columns: the sums of the log decays of newer tokens. The returned ones include the
    gates of the loaded tokens.
    """
    keys, values, bs, ys = wide(loaded[0]), wide(loaded[1]), wide(loaded[2]), wide(loaded[3])
    gates, column_gates = wide(loaded[4]), wide(loaded[5])
    if D.KEY:
        decay = exp(tl.cumsum(gates, 0, reverse=True) + rows[None, :])
    elif D.HEAD != "none":
        decay = exp(tl.cumsum(gates, 0, reverse=True) + rows)[:, None]
    if D.KEY or D.HEAD != "none":
        keys, bs = keys * decay, bs * decay
        rows += tl.sum(gates, 0)
    if D.VALUE:
        decay = exp(tl.cumsum(column_gates, 0, reverse=True) + columns[None, :])
        values, ys = values * decay, ys * decay
        columns += tl.sum(column_gates, 0)
    return (keys, values, bs, ys), rows, columns


@triton.jit
def read_term(x, keys, values):
    """Return sum_i (x . keys_i) values_i, [BV], for x [BK], keys [C, BK] and values [C, BV]."""
    return tl.sum(tl.sum(x[None, :] * keys, 1)[:, None] * values, 0)


@triton.jit
def read_ring(out, erased, q, e, terms, D: tl.constexpr):
    """Return `out` and `erased`, [BV] each, plus what q and e [BK] read of the ring's decayed tokens. terms: the first result
    of `decayed_terms`."""
    keys, values, bs, ys = terms
    out += read_term(q, keys, values)
    if D.ERASURE != "none":
        erased += read_term(e, keys, values)
    if D.ALONG:
        out += read_term(q, bs, ys)
        erased += read_term(e, bs, ys)
    return out, erased


@triton.jit
def add_ring(added, rows, columns, ring, row, held, h, k, v, D: tl.constexpr):
    """Return (`added` [BK, BV] plus the decayed terms k_i u_i^T and b_i y_i^T of the ring's tokens, rows, columns).

    rows, columns: the sums of the log decays of newer tokens. The returned ones include the ring's gates. row: the row of the
    slot's first place. held: the number of tokens in the ring.
    """
    for i in range(0, held // FOLDED + 1):
        loaded = load_ring(ring, row, (held // FOLDED - i) * FOLDED, held, h, k, v, FOLDED, D)
        terms, rows, columns = decayed_terms(loaded, rows, columns, D)
        keys, values, bs, ys = terms
        added = tl.dot(tl.trans(keys), values, added, input_precision="ieee")
        if D.ALONG:
            added = tl.dot(tl.trans(bs), ys, added, input_precision="ieee")
    return added, rows, columns


@triton.jit
def folded(S, added, rows, columns, D: tl.constexpr):
    """Return e^rows S e^columns + added, [BK, BV]. rows, columns: sums of log decays. Where these are mild (`change`), S itself
    is added last, to S (e^rows e^columns - 1) + added, so that equal gates do not round in one direction."""
    if D.KEY or D.HEAD != "none":
        mild, factor = change(rows + tl.zeros([D.BK], tl.float32))
        mild, factor = mild[:, None], factor[:, None]
        if D.VALUE:
            mild_column, column = change(columns)
            mild_column, column = mild_column[None, :], column[None, :]
            whole = tl.where(mild, 1.0 + factor, factor) * tl.where(mild_column, 1.0 + column, column)
            factor = tl.where(mild & mild_column, factor * column + (factor + column), whole)
            mild = mild & mild_column
        S = tl.where(mild, S, 0.0) + (S * factor + added)
    elif D.VALUE:
        mild, factor = change(columns)
        S = tl.where(mild[None, :], S, 0.0) + (S * factor[None, :] + added)
    else:
        S += added
    return S


@triton.jit
def append(ring, row, block, h, k, v, kt, ut, bt, yt, gate, column_gate, D: tl.constexpr):
    """Store the new token in row `row` of the ring, in device memory. Each program stores its columns of v; one program of a
    head (block 0) stores the keys and their gates.

    kt, ut, bt, yt: k, u, b and y of the token, [BK] or [BV]. gate, column_gate: its log decays (`load_gates`).
    """
    ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_erased = ring
    if D.ERASURE != "none":
        store_vector(ring_value, ut, row, h, v, D.H, D.V)
    elif h % (D.H // D.HV) == 0:
        store_vector(ring_value, ut, row, h // (D.H // D.HV), v, D.HV, D.V)
    if D.ALONG:
        store_vector(ring_erased, yt, row, h, v, D.H, D.V)
    if D.VALUE:
        store_vector(ring_column, column_gate, row, h, v, D.H, D.V)
    if block == 0:
        if h % (D.H // D.HK) == 0:
            store_vector(ring_key, kt, row, h // (D.H // D.HK), k, D.HK, D.K)
        if D.ALONG:
            store_vector(ring_along, bt, row, h, k, D.H, D.K)
        if D.KEY:
            store_vector(ring_row, gate, row, h, k, D.H, D.K)
        elif D.HEAD != "none":
            tl.store(ring_head + row * D.H + h, gate)


@triton.jit
def store_vector(x, value, row, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Store value [BD] as x[row, head] of x [rows, HEADS, WIDTH], in x's own dtype. d: the indices of channels."""
    tl.store(at(x, row, head, HEADS, WIDTH) + d, value.to(x.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def scales_of(scales, slot, head, D: tl.constexpr):
    """Return the address of the first of the K / SCALED scales of a head's state in 8 bits, in scales [P, H, K / SCALED]."""
    return scales + (slot.to(tl.int64) * D.H + head) * (D.K // D.SCALED)


@triton.jit
def factor_of(values):
    """Return FACTOR, by which the rests of states in 8 bits are multiplied, for the dtype of the array `values`."""
    return FACTOR_INT8 if values.dtype.element_ty == tl.int8 else FACTOR_FLOAT8


@triton.jit
def narrowed(x, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """Return x rounded to the nearest number of DTYPE, which has 8 bits and the largest number LARGEST."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if tl.int8 == DTYPE:
        x = (x + MAGIC) - MAGIC
    return x.to(DTYPE)


@triton.jit
def store_compact(values, rests, scales, S, slot, h, k, v, D: tl.constexpr):
    """Store S [BK, BV] in 8 bits in `values`, with new scales and rests, in row `slot` of each array. All numbers of a group of
    SCALED rows are NaN if one of the group is not finite."""
    LARGEST: tl.constexpr = LARGEST_INT8 if values.dtype.element_ty == tl.int8 else LARGEST_FLOAT8
    DTYPE: tl.constexpr = values.dtype.element_ty
    GROUPS: tl.constexpr = D.BK // D.SCALED
    size = tl.abs(S)
    size = tl.where(size <= LARGEST_FLOAT, size, float("inf"))  # NaN, too
    scale = tl.max(tl.reshape(tl.max(size, 1), [GROUPS, D.SCALED]), 1) / LARGEST
    scale = tl.where(scale <= LARGEST_FLOAT, tl.maximum(scale, LEAST), NAN)
    by_row = tl.reshape(tl.broadcast_to(scale[:, None], [GROUPS, D.SCALED]), [D.BK])[:, None]
    x = tl.where(by_row == by_row, S * (1.0 / by_row), 0.0)
    value = narrowed(x, DTYPE, LARGEST)
    store_state(values, value, slot, h, k, v, D.H, D.K, D.V, "evict_first")
    rest = narrowed((x - value.to(tl.float32)) * factor_of(values), DTYPE, LARGEST)
    store_state(rests, rest, slot, h, k, v, D.H, D.K, D.V, "evict_first")
    group = tl.arange(0, GROUPS)
    tl.store(scales_of(scales, slot, h, D) + group, scale, mask=group < D.K // D.SCALED)


@triton.jit
def replay(
    q, k, v, head, key, value, beta, erase, write, along, scale, slots, states, rests, scales, ring_key, ring_value,
    ring_head, ring_row, ring_column, ring_along, ring_erased, length, drafted, o, D: tl.constexpr,
):  # fmt: skip
    """Advance sequence n by one token, in row slots[n] of the pool and its ring, in place. For slot -1 the output o [B, H, V]
    is 0. A program has one sequence, one head and BV columns.

    states, rests, scales, ring_..., length, drafted: the arrays of `RingedStates`; length counts the tokens in each slot's
    ring, and drafted is set to 0. The other operands are those of `recurrent.step`, and `along` is b.
    """
    block, h, n = place_of(tl.program_id(0), D.NV, D)
    ck, cv = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV)
    slot = tl.load(slots + n)
    out = tl.full([D.BV], 0, tl.float32)
    if slot >= 0:
        ring = (ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_erased)
        row = slot.to(tl.int64) * D.PLACES
        held = tl.minimum(tl.load(length + slot) % ARRIVED, D.PLACES)
        first = held // D.C * D.C
        loaded = load_ring(ring, row, first, held, h, ck, cv, D.C, D)
        qt = load_vector(q, n, h // (D.H // D.HQ), ck, D.HQ, D.K)
        kt = load_vector(k, n, h // (D.H // D.HK), ck, D.HK, D.K)
        ut = load_vector(v, n, h // (D.H // D.HV), cv, D.HV, D.V)
        gate, column_gate = load_gates(head, key, value, h, n, ck, cv, D)
        factor = tl.load(scale + n).to(tl.float32)
        et, bt, yt, wt, by_row = kt, kt, ut, ut, tl.full([D.BK], 1, tl.float32)
        if D.ERASURE == "beta":
            wt = tl.load(beta + n.to(tl.int64) * D.H + h)
        elif D.ERASURE != "none":
            et = load_vector(erase, n, h, ck, D.H, D.K)
            if D.ERASURE == "erase+write":
                wt = load_vector(write, n, h, cv, D.H, D.V)
        if D.ALONG:
            bt = load_vector(along, n, h, ck, D.H, D.K)
        if D.SCALED is not None:
            by_row = tl.load(scales_of(scales, slot, h, D) + ck // D.SCALED, mask=ck < D.K, other=0.0)
        stored = load_state(states, slot, h, ck, cv, D.V, D.H, D.K, D.V, "evict_first")
        # All threads have the slot's length behind the barrier. The count of programs is waited for together with the state.
        tl.debug_barrier()
        arrived = tl.atomic_add(length + slot, ARRIVED, sem="relaxed") // ARRIVED
        qt, kt, ut, et, bt, wt = wide(qt), wide(kt), wide(ut), wide(et), wide(bt), wide(wt)
        gate, column_gate, by_row = wide(gate), wide(column_gate), wide(by_row)
        if D.ERASURE == "beta":
            et, ut = kt * wt, ut * wt
        elif D.ERASURE == "erase+write":
            ut *= wt
        rows, columns, read = gate, column_gate, qt
        if D.BEFORE:
            rows, columns = tl.full(gate.shape, 0, tl.float32), tl.zeros([D.BV], tl.float32)
            if D.KEY or D.HEAD != "none":
                read = qt * exp(gate)
        erased = tl.zeros([D.BV], tl.float32)
        terms, rows, columns = decayed_terms(loaded, rows, columns, D)
        out, erased = read_ring(out, erased, read, et, terms, D)
        if D.PLACES >= D.C:
            for i in range(1, held // D.C + 1):
                loaded_i = load_ring(ring, row, first - i * D.C, held, h, ck, cv, D.C, D)
                terms_i, rows, columns = decayed_terms(loaded_i, rows, columns, D)
                out, erased = read_ring(out, erased, read, et, terms_i, D)
        S = stored.to(tl.float32)
        by_state = by_row
        if D.KEY or D.HEAD != "none":
            by_state *= exp(rows)
        of_columns = exp(columns) if D.VALUE else 1.0
        out += tl.sum(S * (read * by_state)[:, None], 0) * of_columns
        if D.BEFORE and D.VALUE:
            out *= exp(column_gate)
        if D.ERASURE != "none":
            erased += tl.sum(S * (et * by_state)[:, None], 0) * of_columns
            if D.ALONG:
                yt = -erased
                out += tl.sum(qt * bt, 0) * yt
            else:
                ut -= erased
        out = (out + tl.sum(qt * kt, 0) * ut) * factor

        if held < D.PLACES:
            append(ring, row + held, block, h, ck, cv, kt, ut, bt, yt, gate, column_gate, D)
        if arrived == D.H * D.NV - 1:
            tl.store(length + slot, tl.where(held + 1 >= D.REPLAY, 0, held + 1))
            tl.store(drafted + slot, 0)
        if held + 1 >= D.REPLAY:
            added = kt[:, None] * ut[None, :]
            if D.ALONG:
                added += bt[:, None] * yt[None, :]
            added, rows, columns = add_ring(added, gate, column_gate, ring, row, held, h, ck, cv, D)
            S = load_state(states, slot, h, ck, cv, D.V, D.H, D.K, D.V, "evict_first").to(tl.float32)
            if D.SCALED is not None:
                rest = load_state(rests, slot, h, ck, cv, D.V, D.H, D.K, D.V, "evict_first").to(tl.float32)
                S = folded((S + rest * (1.0 / factor_of(states))) * by_row[:, None], added, rows, columns, D)
                store_compact(states, rests, scales, S, slot, h, ck, cv, D)
            else:
                S = folded(S, added, rows, columns, D)
                store_state(states, S, slot, h, ck, cv, D.H, D.K, D.V, "evict_first")
    tl.store(at(o, n, h, D.H, D.V) + cv, out.to(o.dtype.element_ty), mask=cv < D.V)


def recurrent_replay(
    r: Recurrence, pool: RingedStates, slots: Array | None, config: TritonReplayConfig
) -> tuple[Array, RingedStates]:
    """Advance B sequences by one token; return the outputs [B, H, V] and the pool.

    slots: [B], the row of the pool of each sequence; None if sequence b has row b. A sequence whose slot is outside of the pool
    has the output 0 and changes nothing. The pool is updated in place if the caller donates it. Raises ValueError if
    config.columns are fewer than V and states have 8 bits.
    """
    before = pool.arrays()
    (B, V), P, places = (r.q.shape[0], r.v.shape[3]), pool.states.shape[0], pool.ring.key.shape[1]
    slots = jnp.arange(B, dtype=jnp.int32) if slots is None else jnp.where((slots >= 0) & (slots < P), slots, -1)
    (gates, flags), (erasure, erases) = gates_of(r), erasure_operands(r)
    along = None if r.erasure is None else r.erasure.along
    form = str(erases.pop("ERASURE")).removesuffix("+along")
    tokens = [r.q, r.k, r.v, *gates, *erasure, r.scale if along is None else along, r.scale, slots]
    present = {i: x for i, x in enumerate(before) if x is not None}
    own, K = shape(r, config.columns), r.q.shape[3]
    scaled = scaled_rows(K) if str(present[0].dtype) in COMPACT else None
    if scaled is not None and config.columns < V:
        raise ValueError(f"{config} must have all {V} columns of states in 8 bits: set columns to {width(V)}")
    o, *after = launch(
        replay,
        -(-V // config.columns) * r.num_heads * B,
        [*tokens, *(r.scale if x is None else x for x in before)],
        [((B, r.num_heads, V), r.q.dtype), *((x.shape, x.dtype) for x in present.values())],
        in_place={len(tokens) + i: 1 + place for place, i in enumerate(present)},
        **own, **flags, **erases, ERASURE=form, ALONG=along is not None, PLACES=places, REPLAY=pool.replay, SCALED=scaled,
        C=tokens_of_a_tile(places, own["BK"]), warps=config.warps, stages=1,
    )  # fmt: skip
    found = dict(zip(present, after, strict=True))
    return o, pool.with_arrays([found.get(i) for i in range(len(before))])


def tokens_of_a_tile(places: int, rows: int) -> int:
    """Return C, the number of rows of a tile of the ring's tokens, a power of two: at least one for each place and one for S_0,
    unless that exceeds MOST_TOKENS or makes a tile of more than TILE numbers.

    places: the places of the ring. rows: the rows of the state, BK.
    """
    return min(1 << places.bit_length(), MOST_TOKENS, max(2, TILE // rows))
