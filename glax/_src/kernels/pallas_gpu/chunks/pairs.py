"""Form what a chunk of the delta rule with per-key gates needs beside its state.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all of them, [K] each:

    L_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}     j before i
    L_ij = sum_c e_ic k_jc e^{H_ic - G_jc}            with an erase vector e in the place of beta k
    R    = (I + L)^-1 - I
    P_ij = scale sum_c q_ic k_jc e^{G_ic - G_jc}      j up to i

H_i is G_i, or with `before_decay` the sum of the gates before token i: G_i without its own gate.

The factor of a pair stands inside the sum over K. It is divided between the two tokens by a reference that lies between them.
Tokens are divided into blocks of s tokens. In every first block of two, M_i is the sum of the gates behind token i to the end of
its block, negated; in every second, the sum from the beginning of its block through token i. For i in a second block and j in
the first before it

    e^{G_i - G_j} = e^{M_i} e^{-M_j}

With `before_decay` the M_i of e is the sum without the token's own gate, which is the M of the token before, or 0. For the first
of the 2 s tokens of two blocks it may have any size. No pair of the level has that token as its second.

*Levels.* s is 32, 16, 8, 4, 2 and 1 in turn, and each pair is taken where its tokens are in the two blocks of s beside one
reference. M_i and -M_j are then sums of gates between the two tokens. Neither is above 0 for gates <= 0.
*Fast form of a level.* The equation holds for every pair of the 2 s tokens around a reference. The first level in which no |M|
is above FAST_LIMIT takes them all, and is the last. s = 32 serves gates whose sums over half a chunk are in range, s = 16 and
s = 8 those over 16 and 8 tokens: gates of at least -7.5 need at most three levels. The fast form is not tried below 8. The
gradient takes the same levels.

A token's score with itself is formed from q and k as they are. e^M q, e^M k and e^{-M} k have two terms of bfloat16.

M and the sums of the scan's decays are products of a matrix of 1, -1 and 0 with the gates. The matrix lies in shared memory and
is formed once for all channels, for to form it takes as many instructions as to use what it sums.

The scan reads decays from one token to a later one, which are right for all gates:

    scale Q e^G          K e^G or E e^H          K e^{G_last - G}          e^{G_last}

`inverse.py` has how I + L is inverted.

Roles. A program has one chunk of one head, and one warpgroup. Memory: `Tiles`. Gates in float32 are divided into two terms, and
the tile that they were loaded into then holds the `Pairs`. Who waits for whom:

    waits    for      until
    compute  compute  tokens loaded: q, k, gates, beta

or e in the place of beta.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import FAST_LIMIT, LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.chunks import inverse as inverses
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import ALONE, PARAMS, PROGRAM, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Pipeline
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_ROW,
    HALF,
    LOG2E,
    by_row,
    read,
    split,
    store_split,
    tiled,
    transposed,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, chunk_of, quotient

BF16 = jnp.bfloat16
CHANNELS = 64  # channels of K that registers hold together
NUMBERS = 3
BETA, LARGEST, OWN = range(NUMBERS)  # rows of `Tiles.numbers`; with e the first row is not read
LEVELS = C.bit_length() - 1  # of a chunk for gates of any size. As a last level: none takes the pairs that are left
FAST_LEVELS = 3  # that are tried as the last: s of 32, 16 and 8
# No sum is across warps. Without memory for such sums two programs fit on a multiprocessor with e, too.
WITH_ERASE = dataclasses.replace(PARAMS, reduction_scratch_bytes=16)
# The largest |M| of a last level, as the integer with the bits of the float32 number. The factors e^M and e^-M of two tokens
# are then between e^-60 and e^60, which leaves 1e12 on either side for q, k and sums over K (`common.limits`). The gate
# of the first of 2 s tokens is in no M but the one of its e, and may have any size. Products for j > i and in that row of e
# may be inf or NaN; none is selected.
FAST_BITS = int(np.float32(FAST_LIMIT).view(np.int32))

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands, in global memory: tokens, and the scale of each chunk. Each field's comment has its
    shape. HQ and HK, the numbers of heads of q and k, divide H."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    gates: Ref  # [B, T, H, K], in bfloat16 or float32
    beta: Ref  # [B, chunks, H, C]; None with e
    scale: Ref  # [B, chunks]
    e: Ref  # [B, T, H, K], in bfloat16; None with beta


class Results(NamedTuple):
    """Hold references to the results, in global memory: matrices of pairs and decayed rows, by chunk. Each field's comment has
    its shape. All but `decay` and `levels` are bfloat16."""

    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P
    queries: Ref  # [B, chunks, H, C, K]: scale Q e^G
    erasing: Ref  # [B, chunks, H, C, K]: K e^G, or E e^H
    leaving: Ref  # [B, chunks, H, C, K]: K e^{G_last - G}
    decay: Ref  # [B, chunks, H, K]: e^{G_last}, in float32
    levels: Ref  # [B, chunks, H]: how many levels there are, in int32; for the gradient

    @classmethod
    def types(cls, B: int, chunks: int, H: int, K: int) -> "Results":
        """Return the shapes and dtypes of the results."""
        pairs, keys = (jax.ShapeDtypeStruct((B, chunks, H, C, n), BF16) for n in (C, K))
        decay, levels = (
            jax.ShapeDtypeStruct((B, chunks, H, K), jnp.float32),
            jax.ShapeDtypeStruct((B, chunks, H), jnp.int32),
        )
        return cls(pairs, pairs, keys, keys, keys, decay, levels)

    def of_scan(self) -> tuple:
        """Return the results that the scan reads: all but `levels`."""
        return self[:-1]


class Tiles(NamedTuple):
    """Hold references to the shared memory of a chunk. "In two terms" means a high part and a rest in bfloat16."""

    q: Ref  # [C, K]; at last scale Q e^G
    k: Ref  # [C, K]; with beta at last K e^G
    gates: tuple[Ref, ...]  # [C, K] each, the terms of the gates; the first at last K e^{G_last - G}
    numbers: Ref  # [NUMBERS, C], of every token: beta, the largest |M|, and q_i . k_i
    sums: Ref  # [C, C]: the matrix whose product with gates is M; at last the one for e^G
    shared: Any  # a `Pairs`, or the union of float32 gates as they are loaded, [C, K], and a `Pairs`
    e: Ref  # [C, K]; at last E e^H; None with beta

    @classmethod
    def types(cls, K: int, gates, has_erase: bool) -> "Tiles":
        """Return the shapes and dtypes of the tiles. K: the width of keys. gates: the dtype of the gates. has_erase: whether e
        is an operand.

        Gates in float32 are divided into two terms, after which their tile holds the `Pairs`.
        """
        tile, pairs, wide = tiled(C, K), Pairs.types(), gates != BF16
        return cls(
            q=tile,
            k=tile,
            gates=(tile,) * (2 if wide else 1),
            numbers=plgpu.SMEM((NUMBERS, C), jnp.float32),
            sums=tiled(C, C),
            shared=plgpu.RefUnion(tiled(C, K, columns=32, dtype=gates), tuple(pairs)) if wide else (None, tuple(pairs)),
            e=tile if has_erase else None,
        )

    @property
    def erasing(self) -> Ref:
        """Return the tile [C, K] of the vectors that erase: e if it is an operand, else k."""
        return self.k if self.e is None else self.e

    @property
    def y(self) -> tuple[Ref, Ref]:
        """Return the two tiles of `Pairs.y`."""
        return Pairs(*self.shared[1]).y

    @property
    def inverse(self) -> tuple[Ref, Ref]:
        """Return the two tiles of `Pairs.inverse`."""
        return Pairs(*self.shared[1]).inverse


class Pairs(NamedTuple):
    """Hold references to the shared memory of matrices in two terms, each a pair of tiles: the high part and the rest."""

    # [C, CHANNELS]: first a matrix of `measure`, then K e^-M; at last P, and in turns the matrix of e^{G_last - G} and R
    y: tuple[Ref, Ref]
    inverse: tuple[Ref, Ref]  # [C, C]: what `store_inverse` multiplies

    @classmethod
    def types(cls) -> "Pairs":
        """Return the shapes and dtypes of the tiles."""
        y, inverse = tiled(C, CHANNELS), tiled(C, C, columns=inverses.BLOCK)
        return cls((y, y), (inverse, inverse))


@dataclasses.dataclass(frozen=True)
class PairsPipeline(Pipeline):
    """Hold the barriers by which the one warpgroup waits for its own copies. tokens: the tiles of a chunk."""

    tokens: Handoff

    @classmethod
    def planned(cls, has_erase: bool = False) -> "PairsPipeline":
        """Build the pipeline; its barriers are allocated at launch. has_erase: whether e is loaded in the place of beta."""
        copies = "q", "k", "gates", "e" if has_erase else "beta"
        return cls(Handoff(("compute",), ("compute",), copies, returned=False))


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls are lowered once
def pairs_of_chunks(reverse: bool, before_decay: bool, *operands) -> Results:
    """Compute R, P and the decayed operands of every chunk and head: the fields of `Results`.

    reverse: whether the scan goes from the last token to the first. before_decay: whether e reads the state before its token's
    decay. operands: the fields of `Operands`.
    """
    x = Operands(*operands)
    (B, chunks), H, K, has_erase = x.scale.shape, x.gates.shape[2], x.k.shape[3], x.e is not None
    return launch(
        "delta_key_pairs",
        (reverse, before_decay),
        lambda *refs: form_chunk(Program(reverse, before_decay, *refs)),
        x,
        Results.types(B, chunks, H, K),
        (Tiles.types(K, x.gates.dtype, has_erase),),
        ALONE,
        PairsPipeline.planned(has_erase),
        programs=B * chunks * H,
        params=WITH_ERASE if has_erase else PARAMS,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program: its operands and results in global memory, its shared memory and barriers.
    before_decay: whether e reads the state before its token's decay."""

    reverse: bool
    before_decay: bool
    operands: Operands
    results: Results
    tiles: Tiles
    pipeline: PairsPipeline

    def place(self):
        """Return (batch row, chunk of the row, head) of the program. The three numbers are computed at each use, so that no
        register holds them."""
        x = self.operands
        return chunk_of(lax.optimization_barrier(lax.axis_index(PROGRAM)), x.scale.shape[1], x.gates.shape[2])

    def scale(self):
        """Return the scale of the chunk's scores, a number."""
        b, c, _ = self.place()
        return self.operands.scale[b, c]

    def hidden(self, x):
        """Return the number x behind a barrier, so that the compiler does not know its value.

        Matrices that sum rows are formed from it where several products read them, because ptxas 13.0 writes a matrix that it
        knows to be constant too late for the first product.
        """
        return jnp.where(self.scale() < jnp.inf, x, x + 1)  # x + x is known where x is 0

    def in_order(self, i, j):
        """Return (i, j) such that i > j where the row's token is scanned after the column's. i, j: positions in memory of the
        tokens of rows and of columns.

        In a reverse scan the two change places, so that nothing is subtracted.
        """
        return (j, i) if self.reverse else (i, j)

    @property
    def blocks(self) -> int:
        """Return the number of blocks of CHANNELS channels in K, which are computed one after another."""
        return self.operands.k.shape[3] // CHANNELS

    def gates_of(self, channels) -> list[Ref]:
        """Return views of the terms of the gates in the given channels, [C, CHANNELS] each. channels: a slice of K."""
        return [term.at[:, channels] for term in self.tiles.gates]

    def summed(self, matrix, channels):
        """Return matrix @ g, [C, CHANNELS] in float32: sums of natural log gates in the given channels. matrix: [C, C] in
        bfloat16. channels: a slice of K."""
        return tiles.product(PAIRS, *((matrix, g) for g in self.gates_of(channels)))


def form_chunk(p: Program):
    """Write the results of one chunk and head to global memory."""
    t, (b, c, h) = p.tiles, p.place()
    load_chunk(p)
    last = measure(p)
    p.results.levels[b, c, h] = jnp.minimum(last + 1, LEVELS)
    P, L = scores(p, last)
    if t.e is None:
        L = L * by_row(plgpu.load(t.numbers.at[BETA], layout=BY_ROW), PAIRS)
    plgpu.commit_smem()  # all warps have read y and the matrix of M
    t.y[0][...] = with_own_scores(p, P)
    t.y[1][...] = running_matrix(p, through=False)
    t.sums[...] = running_matrix(p, through=True)
    plgpu.commit_smem()
    scale_tokens(p)
    plgpu.commit_smem()
    stored = p.results.scores, p.results.queries, p.results.erasing, p.results.leaving
    for tile, result in zip((t.y[0], t.q, t.erasing, t.gates[0]), stored, strict=True):
        plgpu.copy_smem_to_gmem(tile, result.at[b, c, h])

    def part(size: int, places, is_counted=None):
        """Return part of L, [C, BLOCK], as the argument `L` of `store_inverse`. It is 0 where `is_counted` is false."""
        del is_counted
        return inverses.of_rows(size, [L[:, at : at + inverses.BLOCK] for at in places])

    inverses.store_inverse(part, p.reverse, t.inverse, t.y[1])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.y[1], p.results.inverse.at[b, c, h])
    plgpu.wait_smem_to_gmem(0)


def with_own_scores(p: Program, P):
    """Return P with scale q_i . k_i on its diagonal, in bfloat16. P: the scores of different tokens, [C, C]."""
    # In memory's order, which L does not read either: no register then holds the positions until they are read again.
    i, j = tiles.positions_again(False)
    own = by_row(plgpu.load(p.tiles.numbers.at[OWN], layout=BY_ROW) * p.scale(), PAIRS)
    return jnp.where(i == j, own.astype(BF16), P)


def load_chunk(p: Program):
    """Load the tokens of the chunk into shared memory, and wait for them. Raise gates to at least LOG_OF_ZERO, so that no sum
    has -inf.

    Gates in float32 become the sum of two terms of bfloat16, which hold 16 of their bits.
    """
    x, t, (b, c, h) = p.operands, p.tiles, p.place()
    H, wide = x.gates.shape[2], t.shared[0]
    tokens = (x.q, t.q), (x.k, t.k), (x.gates, t.gates[0] if wide is None else wide), (x.e, t.e)
    for source, tile in tokens[: 3 if x.e is None else 4]:
        rows = source.at[b, pl.ds(c * C, C), quotient(h, H // source.shape[2])]
        p.pipeline.tokens.copy(rows, tile)
    if x.e is None:
        p.pipeline.tokens.copy(x.beta.at[b, c, h], t.numbers.at[BETA])
    p.pipeline.tokens.wait()
    for block in range(p.blocks):
        channels = pl.ds(block * CHANNELS, CHANNELS)
        high, *rest = p.gates_of(channels)
        found = plgpu.load(high if wide is None else wide.at[:, channels], layout=tiles.WGMMA)
        found = jnp.maximum(found, found.dtype.type(LOG_OF_ZERO))
        for tile, term in zip((high, *rest), (found,) if wide is None else split(found), strict=True):
            tile[...] = term
    plgpu.commit_smem()


def measure(p: Program):
    """Return the number of the chunk's last level, from 0: the first of FAST_LEVELS in which every |M| is at most FAST_LIMIT,
    else LEVELS.

    Store q_i . k_i and the largest |M| of each token in `Tiles.numbers`, and write e^{G_last} to global memory. The tile `y[0]`
    is overwritten, and `Tiles.sums` holds the matrix of M of the last level that was tried.
    """
    t, (b, c, h) = p.tiles, p.place()
    row = tiles.iota(PAIRS, 0)
    t.y[0][...] = tiles.indicator(row == 0)
    plgpu.commit_smem()

    def advance(block, found):
        channels = pl.ds(block * CHANNELS, CHANNELS)
        # [CHANNELS, 8], of which column 0 has the sums over the chunk
        gates = ((transposed(g), tiles.by_halves(t.y[0])) for g in p.gates_of(channels))
        sums = tiles.product((CHANNELS, 8), *gates)
        p.results.decay[b, c, h, channels] = jnp.exp2(tiles.column_of(sums, 0) * LOG2E)
        return found + jnp.sum(read(t.q.at[:, channels]) * read(t.k.at[:, channels]), axis=1)

    zeros = tiles.zeros((C,), BY_ROW)
    t.numbers[OWN] = lax.fori_loop(0, p.blocks, advance, zeros)

    def is_in_range(level):
        size = lax.shift_right_logical(jnp.int32(HALF), level)

        def larger(block, found):
            M = p.summed(t.sums, pl.ds(block * CHANNELS, CHANNELS))
            return jnp.maximum(found, jnp.max(jnp.abs(M), axis=1))

        store_reference_matrix(p, size)
        return is_small(t.numbers.at[LARGEST], lax.fori_loop(0, p.blocks, larger, zeros))

    return find_last_level(is_in_range)


def find_last_level(is_in_range):
    """Return the first level of 0 to FAST_LEVELS - 1 for which is_in_range(level) holds, else LEVELS.

    The search is a loop, so that its code exists once: a program executes most of its code once, and waits until that is
    fetched.
    """

    def advance(x):
        level = x[0] + 1
        return level, is_in_range(level).astype(jnp.int32)

    def goes_on(x):
        return (x[1] == 0) & (x[0] < FAST_LEVELS - 1)

    level, found = lax.while_loop(goes_on, advance, (jnp.int32(-1), jnp.int32(0)))
    return jnp.where(found == 0, LEVELS, level)


def is_small(row: Ref, largest):
    """Return whether every |M| is at most FAST_LIMIT, the same in every thread. largest: the largest |M| of each token, [C] by
    row. row: a row of shared memory, which is overwritten."""
    plgpu.commit_smem()  # all warps have read the row
    row[...] = largest
    plgpu.commit_smem()
    found = plgpu.load(row, layout=tiles.in_every_warp(C))
    # As integers, which a warp compares in one instruction: the bits of floats of at least 0 have the order of the floats.
    return jnp.max(lax.bitcast_convert_type(found, jnp.int32)) <= FAST_BITS


def in_interval(reverse: bool, bounds: Callable):
    """Return a mask [C, C]: whether the token of column j lies in the interval of the token of row i.

    bounds: a function of i, [C], that returns the interval's first and last token. All are positions in scanning order.
    """
    # Behind a barrier, so that registers do not hold them through loops.
    i = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW))
    first, last = bounds(C - 1 - i if reverse else i)
    if reverse:
        first, last = C - 1 - last, C - 1 - first
    j = tiles.iota(PAIRS, 1)
    return (j >= by_row(first, PAIRS)) & (j <= by_row(last, PAIRS))


def reference_matrix(p: Program, size, own: bool = True):
    """Return the matrix [C, C] in bfloat16 whose product with gates is M, for blocks of `size` tokens, a power of two: the sums
    between every token and its reference, with sign -1 before the reference.

    own: True for M, in which the gates through a token include its own. If False, the token's own gate counts to those behind
    it.
    """

    def is_second(i):
        return (i & size) != 0

    def bounds(i):
        through, behind = (i, i + 1) if own else (i - 1, i)
        return jnp.where(is_second(i), i & -size, behind), jnp.where(is_second(i), through, i | (size - 1))

    i = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_ROW))
    sign = jnp.where(is_second(C - 1 - i if p.reverse else i), 1.0, -1.0)
    return jnp.where(in_interval(p.reverse, bounds), by_row(sign, PAIRS), 0.0).astype(BF16)


def store_reference_matrix(p: Program, size):
    """Store the matrix of `reference_matrix`, for blocks of `size` tokens, in `Tiles.sums`."""
    plgpu.commit_smem()  # all warps have read the one before
    p.tiles.sums[...] = reference_matrix(p, size)
    plgpu.commit_smem()


def scores(p: Program, last):
    """Return P without the scores of tokens with themselves, in bfloat16, and L before it is multiplied by beta, in float32:
    [C, C] each in registers.

    last: the result of `measure`, the level that takes all pairs that are left. Where it is 0, `measure` has left its matrix in
    `Tiles.sums`.
    """

    def advance(level, found):
        size = lax.shift_right_logical(jnp.int32(HALF), level)
        pl.when(last > 0)(lambda: store_reference_matrix(p, size))
        P, L = products(p, size)

        def bounds(i):
            """Return the first and the last token of the interval that token i reads in this level: the first block if i is in
            the second, and in the last level all earlier tokens of both blocks. All are positions in scan order."""
            return i & -(2 * size), (i & jnp.where(level == last, -1, -size)) - 1

        is_of_level = in_interval(p.reverse, bounds)
        return jnp.where(is_of_level, (P * p.scale()).astype(BF16), found[0]), jnp.where(is_of_level, L, found[1])

    nothing = tiles.zeros(PAIRS)
    return lax.fori_loop(0, jnp.minimum(last + 1, LEVELS), advance, (nothing.astype(BF16), nothing))


def products(p: Program, size):
    """Return (Q e^M) (K e^-M)^T and (x e^M) (K e^-M)^T, [C, C] each in float32 registers. x is E if that is an operand, else K.

    `Tiles.sums` holds the matrix of M, for blocks of `size` tokens. With `before_decay` the M of x is without its token's own
    gate. `Tiles.y` is overwritten.
    """
    t = p.tiles

    def advance(block, found):
        channels = pl.ds(block * CHANNELS, CHANNELS)
        M = p.summed(t.sums, channels) * LOG2E  # [C, CHANNELS]
        plgpu.commit_smem()  # all warps have read y
        store_split(t.y, read(t.k.at[:, channels]) * jnp.exp2(-M))
        up = jnp.exp2(M)
        queries = split(read(t.q.at[:, channels]) * up)
        if p.before_decay:
            up = jnp.exp2(p.summed(reference_matrix(p, p.hidden(size), own=False), channels) * LOG2E)
        erasing = split(read(t.erasing.at[:, channels]) * up)
        high, rest = (transposed(term) for term in t.y)
        return tiles.added_all(found, *([(x, high), (lost, high), (x, rest)] for x, lost in (queries, erasing)))

    return lax.fori_loop(0, p.blocks, advance, (tiles.zeros(PAIRS), tiles.zeros(PAIRS)))


def running_matrix(p: Program, through: bool):
    """Return the matrix [C, C] in bfloat16 whose product with gates is G, the sums through each token, if `through`; else
    G_last - G, the sums behind it."""
    i, j = p.in_order(*tiles.positions_again(False))
    return tiles.indicator(j <= i if through else j > i)


def scale_tokens(p: Program):
    """Replace, in shared memory, Q by scale Q e^G, the gates by K e^{G_last - G}, and K by K e^G, or E by E e^H if it is an
    operand."""
    t = p.tiles

    @pl.loop(0, p.blocks)
    def _(block):
        channels = pl.ds(block * CHANNELS, CHANNELS)
        q, k, erasing, gates = (x.at[:, channels] for x in (t.q, t.k, t.erasing, t.gates[0]))

        def decays(matrix):
            """Return e^x, [C, CHANNELS], for the sums x = matrix @ g of the block's gates."""
            return jnp.exp2(p.summed(matrix, channels) * LOG2E)

        leaving = lax.optimization_barrier((read(k) * decays(t.y[1])).astype(BF16))
        reads = None
        if p.before_decay:
            i, j = p.in_order(*tiles.positions_again(False))
            matrix = jnp.where(j < i, p.hidden(jnp.float32(1.0)), 0.0).astype(BF16)
            reads = lax.optimization_barrier((read(erasing) * decays(matrix)).astype(BF16))
        within = decays(t.sums)
        plgpu.commit_smem()  # all warps have read the gates
        gates[...] = leaving
        q[...] = (read(q) * (within * p.scale())).astype(BF16)
        erasing[...] = (read(erasing) * within).astype(BF16) if reads is None else reads
