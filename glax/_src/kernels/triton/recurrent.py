"""Process one token at a time, with exact decays and the state in registers.

Launch the token-by-token kernels: the forward, and one step of decoding.

In kernels, h is a head, n a sequence, and row the row of a token in the [B T] rows. k and v, or ck and cv, are the indices of a
block of the state's rows and columns. D has the constants of the launch (`launch.Dimensions`).
"""

import jax.numpy as jnp

from glax._src.core.erasure import arrays_of
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.triton.config import TokenConfig, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch, tl, triton
from glax._src.kernels.triton.segments import segments_of
from glax._src.kernels.triton.tiles import at, exp, load_state, place_of, store_state


@triton.jit
def log_decays(head, key, value, row, h, n, k, v, D: tl.constexpr):
    """Return the log decays of one token for the rows [BK] and columns [BV] of the state, in float32; zeros for gates that are
    absent.

    head, key, value: the arrays of gates, read according to D.HEAD ("constant", "head" or "none"), D.KEY and D.VALUE. row: the
    token's row of [B * T]. h, n: the head and sequence. k, v: indices of rows [BK] and columns [BV].
    """
    rows, columns = tl.zeros(k.shape, tl.float32), tl.zeros(v.shape, tl.float32)
    if D.HEAD == "constant":
        rows += tl.load(head + n * D.H + h).to(tl.float32)
    elif D.HEAD == "head":
        rows += tl.load(head + row.to(tl.int64) * D.H + h).to(tl.float32)
    if D.KEY:
        rows += tl.load(at(key, row, h, D.H, D.K) + k, mask=k < D.K, other=0.0).to(tl.float32)
    if D.VALUE:
        columns += tl.load(at(value, row, h, D.H, D.V) + v, mask=v < D.V, other=0.0).to(tl.float32)
    return rows, columns


@triton.jit
def decayed_state(S, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return e^rows S e^columns, [BK, BV]. rows [BK], columns [BV]: log decays. ROWS, COLUMNS: whether these are applied at
    all."""
    if ROWS:
        mild, factor = change(rows)
        S = tl.where(mild[:, None], S, 0.0) + S * factor[:, None]
    if COLUMNS:
        mild, factor = change(columns)
        S = tl.where(mild[None, :], S, 0.0) + S * factor[None, :]
    return S


@triton.jit
def change(log):
    """Return (whether each gate is mild, its factor). log: log decays. A gate of less than 1/64 in size is mild, and its factor
    is e^log - 1; the factor of others is e^log.

    A factor e^log would round equal gates in the same direction at every token: 2600 gates of -1e-6 would be off by 8e-5.
    """
    mild = tl.abs(log) < 1 / 64
    rest = log * (1 + log * (1 / 2 + log * (1 / 6 + log * (1 / 24))))  # to 1e-11 below 1/64
    return mild, tl.where(mild, rest, exp(log))


@triton.jit
def vector(x, row, head, d, HEADS: tl.constexpr, D: tl.constexpr):
    """Load x[row, head] of x [rows, HEADS, D], in float32: [BD], with 0 from channel D on. d: the indices of channels."""
    return tl.load(at(x, row, head, HEADS, D) + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def written(S, before, kt, vt, beta, erase, write, row, h, k, v, D: tl.constexpr):
    """Return what a token writes to its decayed state S along its key, [BV]: v, or with an erasure w * v - S^T e.

    D.ERASURE: "none", "beta" (e = beta k and w = beta), "erase" (w = 1) or "erase+write". D.BEFORE: e reads `before`, the state
    before the decay. S, before: [BK, BV]. kt, vt: the token's key and value. beta [rows, H], erase [rows, H, K], write [rows,
    H, V]: arrays in device memory. row, h: the token's row and head. k, v: indices of rows and columns.
    """
    if D.ERASURE == "none":
        return vt
    elif D.ERASURE == "beta":
        return tl.load(beta + row.to(tl.int64) * D.H + h).to(tl.float32) * (vt - tl.sum(S * kt[:, None], 0))
    else:
        if D.ERASURE == "erase+write":
            vt *= vector(write, row, h, v, D.H, D.V)
        return vt - tl.sum((before if D.BEFORE else S) * vector(erase, row, h, k, D.H, D.K)[:, None], 0)


@triton.jit
def recurrent(q, k, v, head, key, value, beta, erase, write, scale, start, table, o, final, D: tl.constexpr):
    """Compute the outputs o [rows, H, V] and the final states `final` [N, H, K, V]. A program has one sequence, one head and BV
    columns of v.

    head, key, value, beta, erase, write: the arrays of gates and of the erasure (`gates_of`, `erasure_operands`). start: the
    initial states [N, H, K, V], read with D.START. table: of `Segments`, one segment for each sequence.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, filled = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, edges = tl.load(entry + 3), tl.load(entry + 4)
    ck, cv = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV)
    hq, hk, hv = h // (D.H // D.HQ), h // (D.H // D.HK), h // (D.H // D.HV)
    factor = tl.load(scale + n).to(tl.float32)
    S = (
        load_state(start, n, h, ck, cv, D.V, D.H, D.K, D.V).to(tl.float32)
        if D.START
        else tl.full([D.BK, D.BV], 0, tl.float32)
    )
    for t in range(0, filled):
        row = origin + D.SIGN * t
        rows, columns = log_decays(head, key, value, row, h, n, ck, cv, D)
        before = S
        S = decayed_state(S, rows, columns, D.HEAD != "none" or D.KEY, D.VALUE)
        kt = vector(k, row, hk, ck, D.HK, D.K)
        u = written(S, before, kt, vector(v, row, hv, cv, D.HV, D.V), beta, erase, write, row, h, ck, cv, D)
        S += kt[:, None] * u[None, :]
        out = tl.sum(S * vector(q, row, hq, ck, D.HQ, D.K)[:, None], 0) * factor
        tl.store(at(o, row, h, D.H, D.V) + cv, out.to(o.dtype.element_ty), mask=cv < D.V)
    for t in range(filled, length):
        zero = tl.full([D.BV], 0, o.dtype.element_ty)
        tl.store(at(o, origin + D.SIGN * t, h, D.H, D.V) + cv, zero, mask=cv < D.V)
    if (edges & 2) != 0:
        store_state(final, S, n, h, ck, cv, D.H, D.K, D.V)


@triton.jit
def step(q, k, v, head, key, value, beta, erase, write, scale, slots, pool, o, D: tl.constexpr):
    """Advance sequence n by one token, in row slots[n] of the pool [P, H, K, V], in place, and store the output o [B, H, V].
    For slot -1 the output is 0. A program has one sequence, one head and BV columns. The other operands are those of
    `recurrent`."""
    block, h, n = place_of(tl.program_id(0), D.NV, D)
    ck, cv = tl.arange(0, D.BK), block * D.BV + tl.arange(0, D.BV)
    slot = tl.load(slots + n)
    factor = tl.load(scale + n).to(tl.float32)
    out = tl.full([D.BV], 0, tl.float32)
    if slot >= 0:
        # A pool is larger than any cache, and each state is read and written once. The barrier stops the compiler from
        # using part of the state before all of its loads are issued, which saves registers and serialises the loads. The
        # same happens if gates or q, k and v are loaded before the state, as the disassembly shows.
        S = load_state(pool, slot, h, ck, cv, D.V, D.H, D.K, D.V, "evict_first").to(tl.float32)
        tl.debug_barrier()
        rows, columns = log_decays(head, key, value, n, h, n, ck, cv, D)
        kt, vt = vector(k, n, h // (D.H // D.HK), ck, D.HK, D.K), vector(v, n, h // (D.H // D.HV), cv, D.HV, D.V)
        qt = vector(q, n, h // (D.H // D.HQ), ck, D.HQ, D.K)
        before = S
        S = decayed_state(S, rows, columns, D.HEAD != "none" or D.KEY, D.VALUE)
        S += kt[:, None] * written(S, before, kt, vt, beta, erase, write, n, h, ck, cv, D)[None, :]
        out = tl.sum(S * qt[:, None], 0) * factor
        store_state(pool, S, slot, h, ck, cv, D.H, D.K, D.V, "evict_first")
    tl.store(at(o, n, h, D.H, D.V) + cv, out.to(o.dtype.element_ty), mask=cv < D.V)


@triton.jit
def step_passed_pool(q, k, v, head, key, value, beta, erase, write, scale, slots, pool, o, pool_again, D: tl.constexpr):
    """Run `step` for jax-triton 0.3, which passes the pool a second time, as an output."""
    step(q, k, v, head, key, value, beta, erase, write, scale, slots, pool, o, D)


def gates_of(r: Recurrence):
    """Return ([head, key, value], {HEAD, KEY, VALUE}): the arrays of gates, and the constants of `Dimensions` that say which
    are read. `head` holds the constant gates [N, H] if r has these. r.scale, which is not read, stands for an absent gate."""
    d = r.decay
    head = d.head if d.constant is None else d.constant
    arrays = [r.scale if x is None else x for x in (head, d.key, d.value)]
    form = "none" if d.head is None else "head"
    if d.constant is not None:
        form = "constant"
    return arrays, dict(HEAD=form, KEY=d.key is not None, VALUE=d.value is not None)


def erasure_operands(r: Recurrence):
    """Return ([beta, erase, write], {ERASURE, BEFORE}): the arrays of the erasure, and the constants of `Dimensions` that say
    which are read. r.scale, which is not read, stands for an absent array."""
    flags = dict(ERASURE="none", BEFORE=False)
    if r.erasure is not None:
        flags = dict(ERASURE=r.erasure.form, BEFORE=r.erasure.before_decay)
    return [r.scale if x is None else x for x in arrays_of(r.erasure)], flags


def shape(r: Recurrence, columns: int) -> dict:
    """Return the sizes among the constants of `Dimensions`, by name. columns: BV, the columns of the state in a program, which
    has all rows."""
    _, H, K, V = r.state_shape
    return dict(H=H, HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2], K=K, V=V, BK=width(K), BV=columns)


def run_tokens(r: Recurrence, config: TokenConfig) -> Outputs:
    """Compute the outputs [B, T, H, V] and the final states [N, H, K, V] token by token."""
    B, T = r.q.shape[:2]
    N, H, K, V = r.state_shape
    segments = segments_of(r, T, T)
    (gates, flags), (erasure, erases) = gates_of(r), erasure_operands(r)
    start = r.scale if r.initial_state is None else r.initial_state
    o, final = launch(
        recurrent,
        -(-V // config.columns) * H * segments.count,
        (r.q, r.k, r.v, *gates, *erasure, r.scale, start, segments.table),
        [((B, T, H, V), r.q.dtype), ((N, H, K, V), jnp.float32)],
        **shape(r, config.columns), **flags, **erases, SIGN=-1 if r.reverse else 1, START=r.initial_state is not None,
        warps=config.warps, stages=2,
    )  # fmt: skip
    return Outputs(o, final)


def run_step(r: Recurrence, pool, slots, config: TokenConfig):
    """Advance B sequences by one token; return the outputs [B, 1, H, V] and the pool [P, H, K, V]. slots: [B], the row of the
    pool of each sequence; -1 for none, whose output is 0.

    The pool is updated in place if the caller donates it. Otherwise JAX copies it first.
    """
    B, V = r.q.shape[0], pool.shape[3]
    (gates, flags), (erasure, erases) = gates_of(r), erasure_operands(r)
    o, pool = launch(
        step_passed_pool if ALIASES_ARE_PASSED else step,
        -(-V // config.columns) * r.num_heads * B,
        (r.q, r.k, r.v, *gates, *erasure, r.scale, slots, pool),
        [((B, 1, r.num_heads, V), r.q.dtype), (pool.shape, pool.dtype)],
        in_place={11: 1},
        **shape(r, config.columns), **flags, **erases, warps=config.warps, stages=1,
    )  # fmt: skip
    return o, pool
