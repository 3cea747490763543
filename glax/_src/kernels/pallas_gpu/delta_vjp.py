"""Compute the gradient of every chunk and head under the delta rule, with per-head gates.

G_i is the sum of a chunk's log gates through token i, and L the sum of all of them. D_ij = e^{G_i - G_j} for j before i, and e
= beta k. S is the state before the chunk, and dS' = dL/dS' behind it. U and dX are those of `delta_scan`:

    A  = scale (dO U^T) D, its diagonal included        B = -(dX U^T) D
    dq = scale e^G (dO S^T) + A k                       de = -e^G (dX S^T) + B k
    dk = e^{L - G} (U dS'^T) + A^T q + B^T e + beta de
    d beta = de . k + dX . v            `delta_scan` computes the second term

    dg_t = e^L <S, dS'> + sum_{j < t} k_j . e^{L - G_j} (U dS'^T)_j
           + sum_{i >= t} (q_i . dq_i + e_i . de_i - k_i . (A^T q + B^T e)_i)

The kernel writes the numbers of every token, and XLA sums them over tokens. One warpgroup computes A and dq, and the other B,
de and dk. A program has one chunk of one head.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.delta_inverse import split, store_split
from glax._src.kernels.pallas_gpu.edge_tiles import EdgeCopies, fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import C, quotient, remainder
from glax._src.kernels.pallas_gpu.tiles import BY_COLUMN, BY_ROW, by_column, by_row, read, tiled, transposed

BF16 = jnp.bfloat16
PAIRS = (C, C)
TERMS = 5
QUERIES, EDGE, KEYS, BEFORE, BETA = range(TERMS)  # rows of `Results.terms`

Ref = Any


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    d_output: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, V, K + C]: S and U, transposed
    d_states: Ref  # [B, chunks, H, V, K + C]: dS' and dX, transposed
    gates: Ref  # [B, chunks, H, C]: sums of log2 gates from where the scan enters the chunk
    beta: Ref  # [B, chunks, H, C]
    scale: Ref  # [B, chunks]


class Results(NamedTuple):
    """Hold the results, in global memory."""

    dq: Ref  # [B, T, H, K]
    dk: Ref  # [B, T, H, K]
    terms: Ref  # [B, chunks, H, TERMS, C]: q . dq / scale; parts of <S, dS'>; e . de - k . (...); k . (...); de . k


class Tiles(NamedTuple):
    """Hold the shared memory. dq and dk overwrite q and k."""

    q: Ref  # [C, K]
    k: Ref  # [C, K]
    d_output: Ref  # [C, V]
    states: Ref  # [V, K + C]
    d_states: Ref  # [V, K + C]
    gates: Ref  # [C]
    beta: Ref  # [C]
    output_pairs: tuple[Ref, Ref]  # [C, C]: A / scale in two terms
    erase_pairs: tuple[Ref, Ref]  # [C, C]: beta_i B_ij in two terms
    tokens_loaded: Ref
    states_loaded: Ref
    scored: Ref  # A is in its place
    done: Ref  # both warpgroups have read all tiles

    @classmethod
    def types(cls, K: int, V: int) -> "Tiles":
        return cls(
            q=tiled(C, K),
            k=tiled(C, K),
            d_output=tiled(C, V),
            states=tiled(V, K + C),
            d_states=tiled(V, K + C),
            gates=plgpu.SMEM((C,), jnp.float32),
            beta=plgpu.SMEM((C,), jnp.float32),
            output_pairs=(tiled(C, C), tiled(C, C)),
            erase_pairs=(tiled(C, C), tiled(C, C)),
            tokens_loaded=plgpu.Barrier(num_arrivals=5),
            states_loaded=plgpu.Barrier(num_arrivals=2),
            scored=plgpu.Barrier(),
            done=plgpu.Barrier(num_arrivals=2),
        )

    @property
    def K(self) -> int:
        return self.q.shape[1]

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

    def place(self):
        """Return sequence, chunk and head."""
        _, chunks, H, _ = self.operands.gates.shape
        rest = lax.optimization_barrier(lax.axis_index("program"))
        h, rest = remainder(rest, H), quotient(rest, H)
        # The chunk is traced, also where there is one: a slice known to pass the end of a short row is refused.
        return quotient(rest, chunks), lax.rem(rest, jnp.int32(chunks)), h

    def scale(self):
        """Return the scale of the chunk."""
        b, c, _ = self.place()
        return self.operands.scale[b, c]

    def tokens(self, x):
        """Return the chunk's rows [C, ...] of x [B, T, H, ...], a result."""
        b, c, h = self.place()
        return x.at[b, pl.ds(c * C, C), h]

    def gates(self):
        """Return G [C], to base 2, by row."""
        return plgpu.load(self.tiles.gates, layout=BY_ROW)

    def beta(self):
        """Return beta [C], by row."""
        return plgpu.load(self.tiles.beta, layout=BY_ROW)

    def decayed(self, pairs, diagonal: bool, factor: float = 1.0):
        """Return factor * pairs * D, [C, C] in float32. diagonal: whether to include the pair of a token with itself."""
        i, j = tiles.positions(self.reverse)
        to = by_column(plgpu.load(self.tiles.gates, layout=BY_COLUMN, optimized=False), PAIRS)
        mask = i >= j if diagonal else i > j
        return pairs * (factor * jnp.exp2(jnp.where(mask, by_row(self.gates(), PAIRS) - to, -jnp.inf)))

    def write_term(self, row: int, x):
        """Write x [C] to a row of `Results.terms`."""
        b, c, h = self.place()
        self.results.terms[b, c, h, row] = x


@functools.partial(jax.jit, static_argnums=0)  # so that equal calls are lowered once
def delta_gradient(reverse: bool, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head. operands: the fields of `Operands`, and of `EdgeCopies` if there
    are any."""
    x, _ = split_edges(Operands, operands)
    (B, T, H, V), K, chunks = x.d_output.shape, x.q.shape[3], x.gates.shape[1]

    def body(*refs):
        given, (*results, own) = refs[: len(operands)], refs[len(operands) :]
        p = Program(reverse, *split_edges(Operands, given), Results(*results), own)
        me = lax.axis_index("warpgroup")
        pl.when(me == 0)(functools.partial(load_all, p))
        pl.when(me == 0)(functools.partial(of_queries, p))
        pl.when(me == 1)(functools.partial(of_keys, p))

    body.__name__ = "delta_gradient"  # in profiles
    rows = [jax.ShapeDtypeStruct((B, T, H, width), BF16) for width in (K, K)]
    kernel = plgpu.kernel(
        body,
        out_type=tuple(Results(*rows, jax.ShapeDtypeStruct((B, chunks, H, TERMS, C), jnp.float32))),
        grid=(B * chunks * H,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(K, V)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_gradient", reverse), kernel, *operands))


def load_all(p: Program):
    """Start to load all tiles."""
    x, t = p.operands, p.tiles
    (b, c, h), H = p.place(), x.gates.shape[2]
    for source, tile in ((x.states, t.states), (x.d_states, t.d_states)):
        plgpu.copy_gmem_to_smem(source.at[b, c, h], tile, t.states_loaded)
    for name in ("d_output", "k", "q"):
        source = getattr(x, name)
        at = b, c, quotient(h, H // source.shape[2]), slice(None)
        fetch_tokens(p.edges, name, source, at, getattr(t, name), t.tokens_loaded)
    for source, tile in ((x.gates, t.gates), (x.beta, t.beta)):
        plgpu.copy_gmem_to_smem(source.at[b, c, h], tile, t.tokens_loaded)


def of_queries(p: Program):
    """Compute A and dq, and <S, dS'>."""
    t = p.tiles
    V, K = t.d_output.shape[1], t.K
    plgpu.barrier_wait(t.states_loaded)
    plgpu.barrier_wait(t.tokens_loaded)
    # [C, C]
    A = p.decayed(tiles.product(PAIRS, (t.d_output, t.beside(t.states))), diagonal=True)
    store_split(t.output_pairs, A)
    plgpu.barrier_arrive(t.scored)
    # [C, K]
    dq = tiles.product((C, K), (t.d_output, t.state(t.states)))
    dq = tiles.added(dq * by_row(jnp.exp2(p.gates()), (C, K)), *((term, t.k) for term in t.output_pairs))
    p.write_term(QUERIES, (dq * read(t.q)).sum(1))
    p.write_term(EDGE, sum((read(t.states.at[at]) * read(t.d_states.at[at])).sum(1) for at in parts(V, K)))
    meet(p)
    t.q[...] = (dq * p.scale()).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.q, p.tokens(p.results.dq))
    plgpu.wait_smem_to_gmem(0)


def of_keys(p: Program):
    """Compute B, de and dk."""
    t = p.tiles
    shape = (C, t.K)
    # [C, V]
    U, dX = t.beside(t.states), transposed(t.beside(t.d_states))
    plgpu.barrier_wait(t.states_loaded)
    plgpu.barrier_wait(t.tokens_loaded)
    # [C, C]
    B = p.decayed(tiles.product(PAIRS, (dX, U)), diagonal=False, factor=-1.0)
    store_split(t.erase_pairs, B * by_row(p.beta(), PAIRS))
    # [C, K]
    de = tiles.product(shape, (dX, t.state(t.states)))
    de = tiles.added(de * by_row(-jnp.exp2(p.gates()), shape), *((term, t.k) for term in split(B)))
    p.write_term(BETA, (de * read(t.k)).sum(1))
    dk = de * by_row(p.beta(), shape)
    erased = (dk * read(t.k)).sum(1)
    behind = tiles.product(shape, (transposed(U), t.state(t.d_states)))
    last = t.gates[0 if p.reverse else C - 1]
    behind = behind * by_row(jnp.exp2(last - p.gates()), shape)
    p.write_term(BEFORE, (behind * read(t.k)).sum(1))
    dk += behind
    plgpu.barrier_wait(t.scored)
    pairs = tiles.product(shape, *((transposed(term), t.q) for term in t.output_pairs)) * p.scale()
    pairs = tiles.added(pairs, *((transposed(term), t.k) for term in t.erase_pairs))
    p.write_term(KEYS, erased - (pairs * read(t.k)).sum(1))
    dk += pairs
    meet(p)
    t.k[...] = dk.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(t.k, p.tokens(p.results.dk))
    plgpu.wait_smem_to_gmem(0)


def parts(V: int, K: int) -> list:
    """Return the indices of the tiles [64, 64] of a state."""
    return [(pl.ds(row, 64), pl.ds(column, 64)) for row in range(0, V, 64) for column in range(0, K, 64)]


def meet(p: Program):
    """Wait until both warpgroups have read all tiles."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(p.tiles.done)
    plgpu.barrier_wait(p.tiles.done)
