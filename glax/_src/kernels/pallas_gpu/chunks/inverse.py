"""Invert the matrix of every chunk under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i:

    L_ij = beta_i (k_i . k_j) e^{G_i - G_j}     j before i
    R    = (I + L)^-1 - I

Exponents are sums of gates between two tokens, which are never above 0 for gates <= 0, so no gate needs another form. A gate of
-inf makes its pairs 0. L includes the decays. The inverse of a matrix without decays may overflow where (I + L)^-1 is small.

The inverse is formed by blocks (`chunks/merge.py`), and not from powers of L, which may be far larger than the inverse.

The kernel also writes the factors by which the scans and the gradient multiply tokens.

There is a program for each multiprocessor. Each of its warpgroups inverts one item, a chunk of one head, at a time. Warpgroups
take items in turns, and load the keys of the next while they invert one.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.chunks.merge import BLOCK, COLUMN, of_rows, store_inverse
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.edge_tiles import EdgeCopies, fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, LOG2E, by_column, by_row, tiled, transposed
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, chunk_of, quotient

BF16 = jnp.bfloat16
FACTORS = 5
BETA, ERASING, LEAVING, WITHIN, GATES = range(FACTORS)  # rows of `Results.factors`

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory. HK is the number of heads of k, which divides H."""

    k: Ref  # [B, T, HK, K], in bfloat16
    gates: Ref  # [B, chunks * C, H]: natural log gates, in bfloat16 or float32
    beta: Ref  # [B, chunks * C, H], in bfloat16 or float32; 0 for rows without a token


class Results(NamedTuple):
    """Hold the results, in global memory."""

    inverse: Ref  # [B, chunks, H, C, C]: R, in bfloat16
    factors: Ref  # [B, chunks, H, FACTORS, C]: beta, beta e^G, e^{G_last - G}, e^G, G to base 2; in float32


class Tiles(NamedTuple):
    """Hold the shared memory of a warpgroup."""

    k: Ref  # [C, K]
    numbers: Ref  # [C]: log2 gates, and then beta
    sums: Ref  # [C]: G, to base 2
    result: Ref  # [C, C]: R
    pair: tuple[Ref, Ref]  # [C, C]: what is multiplied, in two terms

    @classmethod
    def types(cls, K: int) -> "Tiles":
        """Return the types of all warpgroups, by warpgroup."""
        n = warpgroups_of(K)
        numbers, term = plgpu.SMEM((n, C), jnp.float32), tiled(n, C, C, columns=BLOCK)
        return cls(tiled(n, C, K), numbers, numbers, tiled(n, C, C), (term, term))

    def of(self, me) -> "Tiles":
        """Return those of one warpgroup."""
        return jax.tree.map(lambda x: x.at[me], self)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls are lowered once
def inverses_of_chunks(reverse: bool, most: int, k, gates, beta, *edges) -> Results:
    """Compute the fields of `Results` for every chunk and head. `Operands` has the shapes. most: the largest number of programs.
    edges: the fields of `EdgeCopies`, or none."""
    (B, rows, H), K = gates.shape, k.shape[3]
    operands, place, own = (k, gates, beta, *edges), (B, rows // C, H), Tiles.types(K)
    inputs = len(operands)  # a cached kernel must not hold a tracer
    programs = min(most, -(-math.prod(place) // warpgroups_of(K)))

    def body(*refs):
        given, (*results, own, loaded) = refs[:inputs], refs[inputs:]
        write_inverses(Program(reverse, programs, *split_edges(Operands, given), Results(*results), own, loaded))

    body.__name__ = "delta_inverse"  # in profiles
    numbers = jax.ShapeDtypeStruct((*place, FACTORS, C), jnp.float32)
    results = jax.ShapeDtypeStruct((*place, C, C), BF16), numbers
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups_of(K),
        thread_name="warpgroup",
        scratch_types=[own, plgpu.Barrier(num_barriers=warpgroups_of(K))],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_inverse", reverse, programs), kernel, *operands, results=results))


def warpgroups_of(K: int) -> int:
    """Return the number of warpgroups of a program: as many as registers and 227 KB of shared memory have room for."""
    return 4 if K <= 128 else 3


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program. programs: their number."""

    reverse: bool
    programs: int
    operands: Operands
    edges: EdgeCopies | None
    results: Results
    tiles: Tiles
    loaded: Ref

    @property
    def total(self) -> int:
        """Return the number of items, the chunks of all heads."""
        return math.prod(self.results.inverse.shape[:3])

    @property
    def warpgroups(self) -> int:
        """Return the number of warpgroups of a program. Each has items of its own."""
        return self.tiles.k.shape[0]

    @property
    def stride(self) -> int:
        """Return the number of warpgroups of all programs."""
        return self.programs * self.warpgroups

    def place(self, item):
        """Return batch row, chunk and head of an item."""
        _, chunks, H = self.results.inverse.shape[:3]
        return chunk_of(item, chunks, H)

    def fetch(self, item, me):
        """Start to load the keys of an item, if there is one."""
        pl.when(item < self.total)(lambda: self.fetch_keys(item, me))

    def fetch_keys(self, item, me):
        """Start to load the keys of an item, [C, K]."""
        (b, c, h), k = self.place(item), self.operands.k
        at = b, c, quotient(h, self.results.inverse.shape[2] // k.shape[2]), slice(None)
        fetch_tokens(self.edges, "k", k, at, self.tiles.k.at[me], self.loaded.at[me])

    def numbers(self, item):
        """Return the log2 gates and beta of an item's tokens, [C] each, by row and in float32."""
        b, c, h = self.place(jnp.minimum(item, self.total - 1))
        x, rows = self.operands, pl.ds(c * C, C)
        log, beta = (
            plgpu.load(source.at[b, rows, h], layout=BY_ROW, optimized=False).astype(jnp.float32)
            for source in (x.gates, x.beta)
        )
        return jnp.maximum(log, LOG_OF_ZERO) * LOG2E, beta


def write_inverses(p: Program):
    """Form R and the factors of every chunk and head, in turns with all other warpgroups."""
    me = lax.axis_index("warpgroup")
    first, stride = lax.axis_index("program") * p.warpgroups + me, p.stride

    def advance(step, numbers):
        item = first + step * stride
        write_inverse(p, me, item, item + stride, numbers)
        return p.numbers(item + stride)

    p.fetch(first, me)
    count = lax.div(jnp.maximum(p.total - first, 0) + (stride - 1), jnp.int32(stride))
    lax.fori_loop(0, count, advance, p.numbers(first))
    plgpu.wait_smem_to_gmem(0)


def write_inverse(p: Program, me, item, following, numbers):
    """Form R and the factors of an item, and fetch the keys of the following. numbers: the result of `Program.numbers`."""
    (log, beta), t, place = numbers, p.tiles.of(me), p.place(item)
    G = sums_of_gates(p.reverse, log, t)
    write_factors(G, beta, t.sums[0 if p.reverse else C - 1], p.results.factors.at[place])
    t.numbers[...] = beta  # in the place of the gates, which all warps have read
    plgpu.barrier_wait(p.loaded.at[me])
    keys = tiles.product(PAIRS, (t.k, transposed(t.k)))
    plgpu.commit_smem()  # all warps have read the keys
    p.fetch(following, me)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # R of the item before has left its tile
    store_inverse(functools.partial(erased, t, keys), p.reverse, t.pair, t.result)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.result, p.results.inverse.at[place])


def erased(t: Tiles, keys, size: int, places, is_counted=None):
    """Return part of L, [C, BLOCK], as `store_inverse` reads it. keys: k_i . k_j, [C, C]. Without is_counted nothing is masked:
    rows of first blocks then hold numbers that are not in L, and no product of these rows is used."""
    picked = of_rows(size, [keys[:, at : at + BLOCK] for at in places])
    to = of_rows(size, [by_column(load(t.sums.at[pl.ds(at, BLOCK)], BY_COLUMN), COLUMN) for at in places])
    between = by_row(load(t.sums, BY_ROW), COLUMN) - to
    between = between if is_counted is None else jnp.where(is_counted, between, -jnp.inf)
    return picked * by_row(load(t.numbers, BY_ROW), COLUMN) * jnp.exp2(between)


def load(ref, layout):
    """Return numbers of tokens in shared memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def sums_of_gates(reverse: bool, log, t: Tiles):
    """Return G [C], by row, and store it. log: the gates to base 2."""
    i, j = tiles.positions_again(reverse)
    t.numbers[...] = log
    plgpu.commit_smem()
    G = jnp.where(i >= j, by_column(load(t.numbers, BY_COLUMN), PAIRS), 0.0).sum(1)
    t.sums[...] = G
    plgpu.commit_smem()
    return G


def write_factors(G, beta, last, factors: Ref):
    """Write the factors of the tokens, [FACTORS, C]. G, beta: [C], by row. last: G of the last token."""
    within = jnp.exp2(G)
    for row, x in zip(range(FACTORS), (beta, beta * within, jnp.exp2(last - G), within, G), strict=True):
        factors[row] = x
