"""Compute the gradient of every chunk and head under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all. D_ij = e^{G_i - G_j} for j before i, and e =
beta k. S is the state before the chunk, and dS' = dL/dS' behind it. U and dX are those of `delta_scan`:

    A  = scale (dO U^T) D, its diagonal included        B = -(dX U^T) D
    dq = scale e^G (dO S^T) + A k                       de = -e^G (dX S^T) + B k
    dk = e^{G_last - G} (U dS'^T) + A^T q + B^T e + beta de
    d beta = de . k + dX . v            `delta_scan` computes the second term

    dg_t = e^{G_last} <S, dS'> + sum_{j < t} k_j . e^{G_last - G_j} (U dS'^T)_j
           + sum_{i >= t} (q_i . dq_i + e_i . de_i - k_i . (A^T q + B^T e)_i)

One warpgroup computes A and dq, a second computes B, de and dk, and a third loads. The first then forms dg from the sums of each
token that both have left in `Tiles.summed`. There is a program for each multiprocessor, which takes chunks of heads in turns. A
tile with columns of V is loaded for the next chunk as soon as its products are done, while products of pairs of tokens with q
and k run. `gradient/delta_wide.py` computes the same where keys or values are wider than 128.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, GATES
from glax._src.kernels.pallas_gpu.chunks.merge import store_split
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.edge_tiles import EdgeCopies, fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    REGISTERS,
    by_column,
    by_row,
    read,
    tiled,
    transposed,
)
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, chunk_of, quotient, remainder

BF16 = jnp.bfloat16
WIDEST = 128  # the most channels of K, and columns of V, that shared memory holds together
TERMS, SUMMED = 3, 4
D_SCALE, D_GATES, D_BETA = range(TERMS)  # rows of `Results.terms`
OF_STATE, OF_QUERIES, OF_KEYS, OF_WRITES = range(SUMMED)  # rows of `Tiles.summed`

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory. HQ and HK are the numbers of heads of q and of k, which divide H."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    d_output: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, V, K + C]: S and U, transposed; [B, chunks, H, K + C, V] for keys wider than 128
    d_states: Ref  # [B, chunks, H, V, K + C]: dS' and dX, in the same way
    factors: Ref  # [B, chunks, H, FACTORS, C]: those of `chunks/inverse.py`
    scale: Ref  # [B + 1], or [1, chunks] of packed sequences


class Results(NamedTuple):
    """Hold the results, in global memory."""

    dq: Ref  # [B, T, H, K]
    dk: Ref  # [B, T, H, K]
    terms: Ref  # [B, chunks, H * blocks of K, TERMS, C]: q . dq / scale; dg; de . k

    @classmethod
    def types(cls, x: Operands, blocks: int = 1) -> "Results":
        (B, T, H, _), K, chunks = x.d_output.shape, x.q.shape[3], x.factors.shape[1]
        rows = jax.ShapeDtypeStruct((B, T, H, K), BF16)
        return cls(rows, rows, jax.ShapeDtypeStruct((B, chunks, H * blocks, TERMS, C), jnp.float32))


class Tiles(NamedTuple):
    """Hold the shared memory of keys and of pairs of tokens. dq and dk overwrite q and k."""

    q: Ref  # [C, K]
    k: Ref  # [C, K]
    gates: Ref  # [C]: G, to base 2
    beta: Ref  # [C]
    # [SUMMED, C], the sums over K in dg: parts of <S, dS'>, and by token q . dq, e . de - k . (A^T q + B^T e), and
    # k . e^{G_last - G} (U dS'^T)
    summed: Ref
    output_pairs: tuple[Ref, Ref]  # [C, C]: A / scale in two terms
    erase_pairs: tuple[Ref, Ref]  # [C, C]: beta_i B_ij in two terms
    loaded: Ref
    scored: Ref  # A is in its place
    done: Ref  # both warpgroups have read all tiles

    @classmethod
    def types(cls, K: int, lead: tuple[int, ...] = ()) -> "Tiles":
        """lead: axes before those of each tile."""
        return cls(
            q=tiled(*lead, C, K),
            k=tiled(*lead, C, K),
            gates=plgpu.SMEM((*lead, C), jnp.float32),
            beta=plgpu.SMEM((*lead, C), jnp.float32),
            summed=plgpu.SMEM((*lead, SUMMED, C), jnp.float32),
            output_pairs=(tiled(*lead, C, C), tiled(*lead, C, C)),
            erase_pairs=(tiled(*lead, C, C), tiled(*lead, C, C)),
            loaded=plgpu.Barrier(num_arrivals=4),
            scored=plgpu.Barrier(),
            done=plgpu.Barrier(num_arrivals=2),
        )


class States(NamedTuple):
    """Hold the shared memory of what has columns of V. S^T or dS'^T [V, K] and beside it U^T or dX^T [V, C] are one copy."""

    d_output: Ref  # [C, V]
    states: Ref  # [V, K + C]
    d_states: Ref  # [V, K + C]
    loaded: Ref
    consumed: Ref  # both warpgroups have read these tiles
    sent: Ref  # dq and dk have left the tiles of q and k

    @classmethod
    def types(cls, K: int, V: int) -> "States":
        """Return the types, with an axis of one tile in front."""
        both = plgpu.Barrier(num_arrivals=2)
        return cls(tiled(1, C, V), tiled(1, V, K + C), tiled(1, V, K + C), plgpu.Barrier(num_arrivals=3), both, both)

    @property
    def K(self) -> int:
        return self.states.shape[1] - C

    def state(self, ref):
        """Return S^T or dS'^T, [V, K], of the tile that holds it."""
        return ref.at[:, pl.ds(0, self.K)]

    def beside(self, ref):
        """Return U^T or dX^T, [V, C]."""
        return ref.at[:, pl.ds(self.K, C)]


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the references of one program. Its position is computed at each use."""

    reverse: bool
    operands: Operands
    edges: EdgeCopies | None
    results: Results
    tiles: Tiles
    item: Any  # the number of the chunk, head and block of K that the program computes
    turn: Any = 0  # the number of items that the program had before

    @classmethod
    def of(cls, reverse: bool, count: int, refs) -> "tuple[Program, Any]":
        """Return the program and the tiles that its kernel has beside `Tiles`. count: the number of operands among refs."""
        given, (*results, tiles, own) = refs[:count], refs[count:]
        return cls(reverse, *split_edges(Operands, given), Results(*results), tiles, lax.axis_index("program")), own

    def place(self):
        """Return sequence, chunk and head."""
        _, chunks, H = self.operands.factors.shape[:3]
        return chunk_of(quotient(lax.optimization_barrier(self.item), self.blocks), chunks, H)

    @property
    def blocks(self) -> int:
        """Return the number of blocks of K. An item has one."""
        return self.operands.q.shape[3] // self.tiles.q.shape[1]

    def block(self):
        """Return the block of the item."""
        return remainder(lax.optimization_barrier(self.item), self.blocks)

    def channels(self):
        """Return the channels of K of the program."""
        width = self.tiles.q.shape[1]
        return slice(None) if self.blocks == 1 else pl.ds(self.block() * width, width)

    def scale(self):
        """Return the scale of the chunk."""
        (b, c, _), scale = self.place(), self.operands.scale
        return scale[b] if len(scale.shape) == 1 else scale[b, c]

    def tokens(self, x):
        """Return the chunk's rows [C, width] of x [B, T, H, K], a result."""
        b, c, h = self.place()
        return x.at[b, pl.ds(c * C, C), h, self.channels()]

    def gates(self):
        """Return G [C], to base 2, by row."""
        return plgpu.load(self.tiles.gates, layout=BY_ROW)

    def beta(self):
        """Return beta [C], by row."""
        return plgpu.load(self.tiles.beta, layout=BY_ROW)

    def decayed(self, pairs, diagonal: bool, factor: float = 1.0):
        """Return factor * pairs * D, [C, C] in float32. diagonal: whether to include the pair of a token with itself."""
        i, j = tiles.positions_again(self.reverse)
        to = by_column(plgpu.load(self.tiles.gates, layout=BY_COLUMN, optimized=False), PAIRS)
        mask = i >= j if diagonal else i > j
        return pairs * (factor * jnp.exp2(jnp.where(mask, by_row(self.gates(), PAIRS) - to, -jnp.inf)))

    def write_term(self, row: int, x):
        """Write x [C] to a row of `Results.terms`."""
        b, c, h = self.place()
        self.results.terms[b, c, h * self.blocks + self.block(), row] = x


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls are lowered once
def delta_gradient(reverse: bool, most: int, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head. most: the largest number of programs. operands: the fields of
    `Operands`, and of `EdgeCopies` if there are any."""
    x, _ = split_edges(Operands, operands)
    total = math.prod(x.factors.shape[:3])
    programs, results = min(total, most), tuple(Results.types(x))
    inputs = len(operands)  # a cached kernel must not hold a tracer

    def body(*refs):
        p, own = Program.of(reverse, inputs, refs)
        me = lax.axis_index("warpgroup")
        for number, work in enumerate((of_queries, of_keys, load)):
            pl.when(me == number)(functools.partial(in_turns, work, total, programs, p, own))

    body.__name__ = "delta_gradient"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(x.q.shape[3], lead=(1,)), States.types(x.q.shape[3], x.d_output.shape[3])],
        compiler_params=tiles.PARAMS,
    )
    found = once(("delta_gradient", reverse, programs), kernel, *operands, results=results, is_longest=True)
    return Results(*found)


def in_turns(work: Callable, total: int, programs: int, p: Program, own: States):
    """Do the work of a warpgroup for all items of its program. total: the number of items of all programs."""
    plgpu.set_max_registers(REGISTERS[work is not load], action="increase" if work is not load else "decrease")
    first = p.item

    @pl.loop(0, lax.div(total + (programs - 1) - first, jnp.int32(programs)))
    def _(step):
        work(dataclasses.replace(p, tiles=only(p.tiles), item=first + step * programs, turn=step), only(own))


def only(shared):
    """Return shared memory without its first axis, which has length 1. The last three fields are barriers, which have no such
    axis. The index is behind a barrier of the compiler, which would otherwise hold the addresses of all parts throughout the
    loop."""
    index = lax.optimization_barrier(jnp.int32(0))
    return type(shared)(*jax.tree.map(lambda x: x.at[index], tuple(shared[:-3])), *shared[-3:])


def load(p: Program, own: States):
    """Load all tiles, each once the item before has no more use for it."""
    x = p.operands
    (b, c, h), H = p.place(), x.factors.shape[2]
    pl.when(p.turn > 0)(lambda: plgpu.barrier_wait(own.consumed))
    for source, tile in ((x.states, own.states), (x.d_states, own.d_states)):
        plgpu.copy_gmem_to_smem(source.at[b, c, h], tile, own.loaded)
    at = b, c, quotient(h, H // x.d_output.shape[2]), slice(None)
    fetch_tokens(p.edges, "d_output", x.d_output, at, own.d_output, own.loaded)
    pl.when(p.turn > 0)(lambda: plgpu.barrier_wait(own.sent))
    load_keys(p)


def load_keys(p: Program):
    """Start to load q, k, gates and beta."""
    x, t = p.operands, p.tiles
    (b, c, h), H = p.place(), x.factors.shape[2]
    for name in ("k", "q"):
        source = getattr(x, name)
        at = b, c, quotient(h, H // source.shape[2]), p.channels()
        fetch_tokens(p.edges, name, source, at, getattr(t, name), t.loaded)
    for row, tile in ((GATES, t.gates), (BETA, t.beta)):
        plgpu.copy_gmem_to_smem(x.factors.at[b, c, h, row], tile, t.loaded)


def of_queries(p: Program, own: States):
    """Compute A and dq, <S, dS'>, and dg."""
    V, K = own.states.shape[0], own.K
    plgpu.barrier_wait(own.loaded)
    plgpu.barrier_wait(p.tiles.loaded)
    store_scores(p, tiles.product(PAIRS, (own.d_output, own.beside(own.states))))
    of_state = tiles.product((C, K), (own.d_output, own.state(own.states)))
    p.tiles.summed[OF_STATE] = sum((read(own.states.at[at]) * read(own.d_states.at[at])).sum(1) for at in parts(V, K))
    plgpu.barrier_arrive(own.consumed)
    send_queries(p, gradient_of_queries(p, of_state))
    plgpu.barrier_arrive(own.sent)


def of_keys(p: Program, own: States):
    """Compute B, de and dk."""
    shape = (C, own.K)
    # [C, V]
    U, dX = own.beside(own.states), transposed(own.beside(own.d_states))
    plgpu.barrier_wait(own.loaded)
    plgpu.barrier_wait(p.tiles.loaded)
    B, t = erased_scores(p, tiles.product(PAIRS, (dX, U))), p.tiles
    store_split(t.erase_pairs, B)  # registers have no room for its two terms
    dk, erased = erased_gradient(p, tiles.product(shape, (dX, own.state(own.states))), t.erase_pairs)
    plgpu.commit_smem()  # all warps have read B
    store_split(t.erase_pairs, B * by_row(p.beta(), PAIRS))
    behind = tiles.product(shape, (transposed(U), own.state(own.d_states)))
    plgpu.barrier_arrive(own.consumed)
    send_keys(p, dk, erased, behind)
    plgpu.barrier_arrive(own.sent)


def store_scores(p: Program, pairs):
    """Store A / scale in two terms. pairs: dO U^T, [C, C]."""
    store_split(p.tiles.output_pairs, p.decayed(pairs, diagonal=True))
    plgpu.barrier_arrive(p.tiles.scored)


def gradient_of_queries(p: Program, of_state):
    """Return dq / scale, [C, K]. of_state: dO S^T."""
    t = p.tiles
    dq = of_state * by_row(jnp.exp2(p.gates()), of_state.shape)
    dq = tiles.added(dq, *((term, t.k) for term in t.output_pairs))
    products = (dq * read(t.q)).sum(1)
    p.write_term(D_SCALE, products)
    t.summed[OF_QUERIES] = products * p.scale()
    return dq


def send_queries(p: Program, dq):
    """Write dq in the place of q, and to global memory, and then dg, once both warpgroups have read all tiles."""
    meet(p)
    p.tiles.q[...] = (dq * p.scale()).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(p.tiles.q, p.tokens(p.results.dq))
    p.write_term(D_GATES, gradient_of_gates(p))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def gradient_of_gates(p: Program):
    """Return dg [C], by row, from the numbers of all tokens."""
    t, (i, j) = p.tiles, tiles.positions_again(p.reverse)

    def numbers(row: int):
        return by_column(plgpu.load(t.summed.at[row], layout=BY_COLUMN, optimized=False), PAIRS)

    through = jnp.exp2(t.gates[0 if p.reverse else C - 1])
    each = jnp.where(j >= i, numbers(OF_QUERIES) + numbers(OF_KEYS), numbers(OF_WRITES))
    return (each + through * numbers(OF_STATE)).sum(1)


def erased_scores(p: Program, pairs):
    """Return B [C, C]. pairs: dX U^T."""
    return p.decayed(pairs, diagonal=False, factor=-1.0)


def erased_gradient(p: Program, of_state, B):
    """Return beta de [C, K], and its products with k summed over K, [C]. of_state: dX S^T, [C, K]. B: [C, C], in two terms."""
    t, shape = p.tiles, of_state.shape
    de = tiles.added(of_state * by_row(-jnp.exp2(p.gates()), shape), *((term, t.k) for term in B))
    products = (de * read(t.k)).sum(1)
    p.write_term(D_BETA, products)
    return de * by_row(p.beta(), shape), products * p.beta()


def send_keys(p: Program, dk, erased, behind):
    """Add the other terms of dk, and write it in the place of k, and to global memory.

    dk: beta de, [C, K]. erased: its products with k summed over K, [C]. behind: U dS'^T, [C, K].
    """
    t, shape = p.tiles, dk.shape
    last = t.gates[0 if p.reverse else C - 1]
    behind = behind * by_row(jnp.exp2(last - p.gates()), shape)
    t.summed[OF_WRITES] = (behind * read(t.k)).sum(1)
    dk += behind
    plgpu.barrier_wait(t.scored)
    pairs = tiles.product(shape, *((transposed(term), t.q) for term in t.output_pairs)) * p.scale()
    pairs = tiles.added(pairs, *((transposed(term), t.k) for term in t.erase_pairs))
    t.summed[OF_KEYS] = erased - (pairs * read(t.k)).sum(1)
    dk += pairs
    meet(p)
    t.k[...] = dk.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.k, p.tokens(p.results.dk))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def parts(V: int, K: int) -> list:
    """Return the indices of the tiles [64, 64] of a state."""
    return [(pl.ds(row, 64), pl.ds(column, 64)) for row in range(0, V, 64) for column in range(0, K, 64)]


def meet(p: Program):
    """Wait until both warpgroups have read all tiles."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.tiles.done)
    plgpu.barrier_wait(p.tiles.done)
