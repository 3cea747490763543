"""Compute softmax attention of one row of q for each sequence, over the rows of caches of keys and values.

    s_i = scale q . k_i,  first <= i <= last        L = log2 sum_i e^{s_i}        o = sum_i e^{s_i} v_i / 2^L

A program has one head of k of one sequence, up to ROWS of the GROUP heads of q that read it as the rows of its products, and
one of PARTS parts of the keys first to last. All parts have equally many blocks of C keys, but those at the end may be shorter
or empty. It reads a block at a time, and no other row of the caches. With several parts their outputs are added by XLA,
weighted by 2^L. Scores and sums are float32; exponentials are powers of two. Weights are rounded to q's dtype, as the rows of
the caches are.

Without an array of values, the first V channels of a key are its value, and the key is read once.

A score that is not finite makes NaN of its own row of q, and of no other.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.kernels.common.softmax import StepOperands
from glax._src.kernels.triton.config import precision, width
from glax._src.kernels.triton.launch import launch, tl, triton
from glax._src.kernels.triton.softmax import add_scores, product, read, read_columns, store
from glax._src.kernels.triton.softmax_config import SoftmaxStepConfig
from glax._src.kernels.triton.tiles import LOG2E, at


@triton.jit
def add_keys(
    highest, total, weighted, q, rest, k, v, start, end, factor, D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return the running sums (highest, total, weighted) of `triton.softmax.add_scores` with the terms of the keys `start` to
    start + C added.

    q: [ROWS, channels]. k, v: the addresses of key 0 of one slot and head of the caches. rest: the channels of q behind the
    first V, read if D.VALUE is False. With MASKED, only keys below `end` count. factor: scale times log2(e).
    """
    own, cv = tl.arange(0, D.C), tl.arange(0, D.BV)
    kh = k + start.to(tl.int64) * (D.HK * D.K)
    if D.VALUE:
        kt = read(kh, own, tl.arange(0, D.BK), end - start, D.HK, D.K, D.BK, MASKED).to(q.dtype)
        vt = read(v + start.to(tl.int64) * (D.HK * D.V), own, cv, end - start, D.HK, D.V, D.BV, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(kt), input_precision=D.PRECISION)
    else:
        vt = read_columns(kh, own, cv, end - start, D.HK * D.K, D.V, D.BV, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(vt), input_precision=D.PRECISION)
        if D.K > D.V:
            ck = tl.arange(0, D.BK)
            kt = read_columns(kh + D.V, own, ck, end - start, D.HK * D.K, D.K - D.V, D.BK, MASKED).to(q.dtype)
            scores = product(rest, tl.trans(kt), scores, D)
    scores += 0.0 * scores  # an infinite score becomes NaN: by -inf its key would get a weight of 0
    if MASKED:
        scores = tl.where((own < end - start)[None, :], scores, float("-inf"))
    return add_scores(highest, total, weighted, scores, vt, factor, D)


@triton.jit
def part_outputs(q, k, v, first, last, slots, sizes, scale, o, log_total, D: tl.constexpr):
    """Store the outputs o [PARTS, B, HQ, V] and log totals L [PARTS, B, HQ] of each part of the keys, -inf for a part without
    keys. sizes: [3], the numbers P, S and B. slots: [B], a number outside of 0 to P - 1 for none."""
    program, blocks = tl.program_id(0), tl.cdiv(D.GROUP, D.ROWS)
    part, other = program % D.PARTS, program // D.PARTS
    block, other = other % blocks, other // blocks
    hk, b = other % D.HK, other // D.HK
    slot = tl.load(slots + b)
    is_slot = (slot >= 0) & (slot < tl.load(sizes))
    low, high = tl.load(first + b), tl.load(last + b) + 1
    count = tl.where(is_slot, tl.maximum(high - low, 0), 0)
    size = tl.cdiv(tl.cdiv(count, D.PARTS), D.C) * D.C
    begin = low + part * size
    end = tl.minimum(begin + size, low + count)
    rows, ck, cv = tl.arange(0, D.ROWS), tl.arange(0, D.BK), tl.arange(0, D.BV)
    hq, heads = hk * D.GROUP + block * D.ROWS, D.GROUP - block * D.ROWS
    factor = tl.load(scale) * LOG2E
    qh = at(q, b, hq, D.HQ, D.K)
    if D.VALUE:
        qt = read(qh, rows, ck, heads, 1, D.K, D.BK, True)
        rest = qt  # not read
    else:
        qt = read_columns(qh, rows, cv, heads, D.K, D.V, D.BV, True)
        rest = read_columns(qh + D.V, rows, ck, heads, D.K, D.K - D.V, D.BK, True)
    row = tl.where(is_slot, slot, 0).to(tl.int64) * tl.load(sizes + 1)
    kh, vh = at(k, row, hk, D.HK, D.K), at(v, row, hk, D.HK, D.V)

    highest, total = tl.full([D.ROWS], float("-inf"), tl.float32), tl.zeros([D.ROWS], tl.float32)
    weighted = tl.zeros([D.ROWS, D.BV], tl.float32)
    whole = tl.maximum(end - begin, 0) // D.C
    for i in range(0, whole):
        highest, total, weighted = add_keys(
            highest, total, weighted, qt, rest, kh, vh, begin + i * D.C, end, factor, D, False
        )
    if begin + whole * D.C < end:
        highest, total, weighted = add_keys(
            highest, total, weighted, qt, rest, kh, vh, begin + whole * D.C, end, factor, D, True
        )
    weighted = weighted / tl.where(total == 0, 1.0, total)[:, None]
    log = tl.where(total == 0, float("-inf"), highest * factor + tl.log2(total))
    place = part * tl.load(sizes + 2) + b
    tl.store(log_total + place.to(tl.int64) * D.HQ + hq + rows, log, mask=rows < heads)
    store(at(o, place, hq, D.HQ, D.V), weighted, rows, cv, heads, 1, D.V)


def forward(
    operands: StepOperands, scale: float, value_width: int, config: SoftmaxStepConfig
) -> Float[Array, "B 1 Hq V"]:
    """Return the output o [B, 1, Hq, V] of one step, in q's dtype. value_width: V. scale: the factor of scores."""
    q, k, v, first, last, slots = operands
    (B, _, HQ, K), (P, S, HK, _), V = q.shape, k.shape, value_width
    group, parts = HQ // HK, config.parts
    slots = jnp.arange(B) if slots is None else slots
    o, log_total = launch(
        part_outputs, B * HK * -(-group // config.rows) * parts,
        (
            q, k, k if v is None else v, first, last, slots.astype(jnp.int32),
            jnp.array([P, S, B], jnp.int32), jnp.full(1, scale, jnp.float32),
        ),
        [((parts, B, HQ, V), q.dtype if parts == 1 else jnp.float32), ((parts, B, HQ), jnp.float32)],
        H=HQ, HQ=HQ, HK=HK, GROUP=group, K=K, V=V, BK=width(K if v is not None else max(K - V, 1)), BV=width(V),
        PRECISION=precision(q), ROWS=config.rows, C=config.keys, PARTS=parts, VALUE=v is not None,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return (o[0] if parts == 1 else joined(o, log_total).astype(q.dtype))[:, None]


def joined(o: Float[Array, "parts B Hq V"], log_total: Float[Array, "parts B Hq"]) -> Float[Array, "B Hq V"]:
    """Return the outputs of all parts joined: sum_p 2^{L_p} o_p / sum_p 2^{L_p}, 0 for a row without keys. log_total: L, -inf
    for a part without keys."""
    highest = log_total.max(0)
    weights = jnp.exp2(log_total - jnp.where(highest == -jnp.inf, 0, highest))
    total = weights.sum(0)
    return (weights[..., None] * o).sum(0) / jnp.where(total == 0, 1, total)[..., None]
