"""Compute what the kernels need of each chunk before its state is known. One program has one chunk and one head.

With per-key gates these are q and k, scaled, and their scores.

G_i is the sum of the log gates of a chunk through token i, and G_last is that sum over the whole chunk:

    q_scaled_i = q_i e^{G_i}
    k_scaled_j = k_j e^{G_last - G_j}
    scores_ij  = sum_k q_ik k_jk e^{G_ik - G_jk}, j <= i

No exponent of the first two is positive. M is the sum of the gates from the chunk's middle. Where |M| is in range, the scores
are one product of q e^M and k e^-M. Where it is out of range, `exact_scores` computes them again. With
per-head gates, only the sums G_i are computed.

h is a head, e the index of a chunk, and table the one of `Segments`, with one segment for each chunk. D has the constants of
the launch (`launch.Dimensions`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.triton.config import precision, width
from glax._src.kernels.triton.launch import ALIASES_ARE_PASSED, launch, tl, triton
from glax._src.kernels.triton.segments import Segments
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    LOG2E,
    LOG_OF_ZERO,
    add_fine_dot,
    at,
    exp,
    halving,
    load_key_gates,
    load_tokens,
    middle_matrix,
    num_exact_pairs,
    num_halvings,
    runtime_bound,
    store_tile,
    whole_gate_sums,
)

PAIRS_PER_PROGRAM = 8  # (chunk, head) pairs that a program of an exact kernel tests
EXACT_WARPS = 8  # with 4, the exact gradient of float16 at widths of 128 spills more registers
SCALE_BLOCK = 32  # channels of an iteration of `scale_operands`
SCALE_STAGES = 3


@triton.jit
def add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D: tl.constexpr):
    """Return A + (tq e^M) (tk e^-M)^T [C, C], `diagonal` plus the diagonal of this product [C], and the larger of row_max and
    the largest |M| of each row [C]. tq, tk: queries and keys, [C, BK]. gates: log gates [C, BK]. M: their sums from the middle
    of the chunk, [C, BK]. All are in registers."""
    M = whole_gate_sums(middle_matrix(tokens, D.C), gates)
    row_max = tl.maximum(row_max, tl.max(tl.abs(M), 1))
    binary = M * LOG2E
    x, y = tq * tl.exp2(binary), tk * tl.exp2(-binary)
    diagonal += tl.sum(x * y, 1)
    return add_fine_dot(A, x, y, D), diagonal, row_max


@triton.jit
def scale_operands(q, k, g, table, q_scaled, k_scaled, scores, last, max_abs_cumsum, D: tl.constexpr):
    """Compute the scaled operands q_scaled, k_scaled [rows, H, K], the scores [chunks, H, C, C], and the sums of gates.

    last [chunks, H, 2, K]: G_last, and the sum L over the first half of the chunk. max_abs_cumsum [chunks, H]: the largest |M|
    or |L| (`common.limits`); the gate of the first token is in L only. The sums are matrix products, whose results have the
    layout of the operands. Two rows of G are `last`, so no reduction is needed.

    The scores are formed behind the other sums of gates, where the terms of the gates no longer take registers. In chunks of 16
    they are formed before one of these sums: Triton computes all rows in every warp where the loop's last product is [16, 16].
    """
    h, e = tl.program_id(0) % D.H, tl.program_id(0) // D.H
    entry = table + e * 6
    origin, count = tl.load(entry), tl.load(entry + 2)
    pair_index = e.to(tl.int64) * D.H + h
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    A = tl.full([D.C, D.C], 0, tl.float32)
    diagonal = tl.full([D.C], 0, tl.float32)
    row_max = tl.full([D.C], 0, tl.float32)
    ends = last + pair_index * 2 * D.K + tl.where(i == D.C - 1, 0, D.K)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        gates = load_key_gates(g, origin, h, tokens, ck, count, D)
        tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
        suffix = whole_gate_sums(tl.where(j > i, 1.0, 0.0), gates)
        store_tile(at(k_scaled, origin, h, D.H, D.K), tk * exp(suffix), tokens, ck, count, D.H, D.K, D.SIGN)
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        if D.C == 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D)
        G = whole_gate_sums(tl.where(j <= i, 1.0, 0.0), gates)
        row_max = tl.maximum(row_max, tl.max(tl.where(i == D.C // 2 - 1, tl.abs(G), 0.0), 1))
        store_tile(at(q_scaled, origin, h, D.H, D.K), tq * exp(G), tokens, ck, count, D.H, D.K, D.SIGN)
        if D.C > 16:
            A, diagonal, row_max = add_scores(A, diagonal, row_max, tq, tk, gates, tokens, D)
        tl.store(ends + ck[None, :], G, mask=((i == D.C - 1) | (i == D.C // 2 - 1)) & (ck < D.K)[None, :])
    A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(scores + pair_index * D.C * D.C + i * D.C + j, A.to(scores.dtype.element_ty))
    tl.store(max_abs_cumsum + pair_index, tl.max(row_max, 0))


@triton.jit
def exact_scores(q, k, g, table, max_abs_cumsum, pairs, scores, D: tl.constexpr):
    """Overwrite the scores [chunks, H, C, C] of chunks whose gates are out of range for `scale_operands`, in place.

    The scores are log2(C) products (`tiles.halving`), in each of which decays are taken from a token between the two of a pair.
    max_abs_cumsum: the result of `scale_operands`. pairs: [1], the number of (chunk, head) pairs; a program tests PAIRS of
    them.
    """
    count_of_pairs = tl.load(pairs)
    tokens = tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    for each in range(0, num_exact_pairs(max_abs_cumsum, count_of_pairs, D.PAIRS)):
        pair = tl.program_id(0) * D.PAIRS + each
        if tl.load(max_abs_cumsum + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % D.H, pair // D.H
            origin, count = tl.load(table + e * 6), tl.load(table + e * 6 + 2)
            A = tl.full([D.C, D.C], 0, tl.float32)
            diagonal = tl.full([D.C], 0, tl.float32)
            for k0 in range(0, runtime_bound(D.K, count), D.BK):
                ck = k0 + tl.arange(0, D.BK)
                gates = load_key_gates(g, origin, h, tokens, ck, count, D)
                tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
                tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
                diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32), 1)
                for level in range(0, runtime_bound(num_halvings(D.C), count)):
                    mask, matrix = halving(tokens, (D.C // 2) >> level)
                    decay = exp(whole_gate_sums(matrix, gates))
                    pairs_of_level = add_fine_dot(tl.full([D.C, D.C], 0, tl.float32), tq * decay, tk * decay, D)
                    A += tl.where(mask, pairs_of_level, 0.0)
            A = tl.where(i > j, A, tl.where(i == j, diagonal[:, None], 0.0))
            tl.store(scores + (e.to(tl.int64) * D.H + h) * D.C * D.C + i * D.C + j, A.to(scores.dtype.element_ty))


@triton.jit
def head_gate_cumsums(g, table, out, D: tl.constexpr):
    """Compute out[row, h] = G, the cumulative sum of the head gates of the row's chunk, in scan order. A program per chunk.

    A gate is split into a multiple of STEP = C 2^-17, truncated, and a rest of less than STEP. For gates of at most 128 in size
    the sum of the multiples is at most 128 C = 2^24 STEP, and so float32 adds them without rounding. The rests add up to less
    than C STEP (2^-5 for C = 64), and lose less than C (C STEP) 2^-24 in that (2^-23), which is small beside STEP. So G is
    rounded once, by at most STEP / 2, and the difference of two sums is off by at most STEP and twice that loss: a decay by
    4.9e-4 of itself for C = 64 and 9.8e-4 for 128, where bfloat16 rounds by 2^-9 = 2.0e-3.
    One float32 sum would round at every token, and equal weak gates behind gates of -inf would all round the same way.
    """
    STEP: tl.constexpr = D.C * 2.0**-17
    entry = table + tl.program_id(0) * 6
    origin, filled = tl.load(entry), tl.load(entry + 2)
    tokens, h = tl.arange(0, D.C), tl.arange(0, D.BH)
    offsets = (origin + D.SIGN * tokens).to(tl.int64)[:, None] * D.H + h[None, :]
    mask = (tokens < filled)[:, None] & (h < D.H)[None, :]
    gates = tl.maximum(tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32), LOG_OF_ZERO)
    multiples = (gates * (1 / STEP)).to(tl.int32).to(tl.float32) * STEP
    tl.store(out + offsets, tl.cumsum(multiples, 0) + tl.cumsum(gates - multiples, 0), mask=mask)


@triton.jit
def exact_scores_passed_scores(q, k, g, table, max_abs_cumsum, pairs, scores, scores_again, D: tl.constexpr):
    """Run `exact_scores` for jax-triton 0.3, which passes an updated operand a second time, as an output."""
    exact_scores(q, k, g, table, max_abs_cumsum, pairs, scores, D)


def dimensions(r: Recurrence, chunk: int) -> dict:
    """Return the constants of `Dimensions` that follow from r, by name. chunk: the tokens of a chunk.

    DTYPE, PRECISION: bfloat16 is multiplied as bfloat16, float32 in three TF32 products. float16 is multiplied in TF32, which
    has as many digits and the range that decays need.
    """
    _, H, K, V = r.state_shape
    heads = dict(H=H, HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2])
    sizes = dict(K=K, V=V, C=chunk, FORM=r.decay.form, SIGN=-1 if r.reverse else 1)
    if r.q.dtype == jnp.bfloat16:
        return heads | sizes | dict(DTYPE=tl.bfloat16, PRECISION="tf32")
    return heads | sizes | dict(DTYPE=tl.float32, PRECISION=precision(r.q))


def gates_of(r: Recurrence):
    """Return (the array of gates, their form): the constant [N, H], head [B, T, H] or key [B, T, H, K] gates of r. Without
    gates the array is another one, which no kernel reads."""
    d, form = r.decay, r.decay.form
    return next((x for x in (d.constant, d.head, d.key) if x is not None), r.scale), form


class Operands(NamedTuple):
    """Hold what a scan reads in place of q, k and the gates, and the scores of each chunk.

    q, k: q_scaled and k_scaled [B, T, H, K] for key gates, else r.q and r.k. gates: `last` [chunks, H, 2, K] for key gates, G
    [B, T, H] for head gates, r's own [N, H] for constant ones. scores [chunks, H, C, C], max_abs_cumsum [chunks, H]: of key
    gates only. Where a form of gates has no such array, another that is not read stands for it.
    """

    q: Array
    k: Array
    gates: Array
    scores: Array
    max_abs_cumsum: Array

    @property
    def heads(self) -> dict:
        """Return the numbers of heads of q and k as {"HQ": ..., "HK": ...}, constants of `Dimensions`. Scaled q and k have all
        H heads."""
        return dict(HQ=self.q.shape[2], HK=self.k.shape[2])


def chunk_operands(r: Recurrence, chunks: Segments, chunk: int) -> Operands:
    """Compute the operands of each chunk of r, on any form of gates. chunks: the segments of the table, one for each chunk of
    `chunk` tokens.

    For key gates, these are the results of `scale_operands` and `exact_scores`. For head gates, `gates` are their cumulative
    sums within each chunk.
    """
    (gates, form), (_, H, K, _) = gates_of(r), r.state_shape
    (B, T), M, shape = r.q.shape[:2], chunks.count, dimensions(r, chunk)
    if form == "head":
        gates = head_gate_sums(r, gates, chunks, chunk)
    if form != "key":
        return Operands(r.q, r.k, gates, r.scale, r.scale)
    wide, scores = ((B, T, H, K), r.q.dtype), ((M, H, chunk, chunk), r.q.dtype)
    q_scaled, k_scaled, scores, last, max_abs_cumsum = launch(
        scale_operands,
        H * M,
        (r.q, r.k, gates, chunks.table),
        [wide, wide, scores, ((M, H, 2, K), jnp.float32), ((M, H), jnp.float32)],
        **shape, BK=min(SCALE_BLOCK, width(K)), warps=4, stages=SCALE_STAGES,
    )  # fmt: skip
    (scores,) = launch(
        exact_scores_passed_scores if ALIASES_ARE_PASSED else exact_scores,
        -(-H * M // PAIRS_PER_PROGRAM),
        (r.q, r.k, gates, chunks.table, max_abs_cumsum, jnp.full(1, H * M, jnp.int32), scores),
        [(scores.shape, scores.dtype)],
        in_place={6: 0},
        **shape, BK=min(32, width(K)), PAIRS=PAIRS_PER_PROGRAM, warps=4, stages=1,
    )  # fmt: skip
    return Operands(q_scaled, k_scaled, last, scores, max_abs_cumsum)


def head_gate_sums(r: Recurrence, gates, chunks: Segments, chunk: int):
    """Return the cumulative sums G of head gates [B, T, H] within each chunk of `chunk` tokens, [B, T, H] in float32."""
    shape = dict(dimensions(r, chunk), BH=width(r.num_heads))
    output = [(gates.shape, jnp.float32)]
    return launch(head_gate_cumsums, chunks.count, (gates, chunks.table), output, **shape, warps=4, stages=1)[0]
