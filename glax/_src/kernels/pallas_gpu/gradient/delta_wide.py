"""Compute the gradient of every chunk under the delta rule where keys or values are wider than 128.

The formulas are those of `delta.py`. In these, dO U^T, dX U^T, dO S^T, dX S^T, U dS'^T and <S, dS'> are sums over the columns of
V. A program adds them up in registers over steps of 64 columns, always in the same order. So q, k and the states are read once,
and dq and dk are written once.

A program has at most 128 channels of K. dq, de and dk of a channel need no sums over other channels, but each program forms A
and B again. States with more than 128 channels are stored as [K, V], and others as [V, K].

One warpgroup loads, a step ahead. The other two compute what those of `gradient/delta.py` do.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.merge import store_split
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.edge_tiles import fetch_tokens, split_edges
from glax._src.kernels.pallas_gpu.device.tiles import BY_ROW, REGISTERS, by_row, read, tiled, transposed, zeros
from glax._src.kernels.pallas_gpu.gradient.delta import (
    OF_STATE,
    PAIRS,
    WIDEST,
    Operands,
    Program,
    Results,
    Tiles,
    erased_gradient,
    erased_scores,
    gradient_of_queries,
    load_keys,
    parts,
    send_keys,
    send_queries,
    store_scores,
)  # fmt: skip
from glax._src.kernels.pallas_gpu.plan import C, quotient

STAGES = 2  # steps in shared memory: one in work, one on its way
COLUMNS = 64  # of V in a step

Ref = Any


class Columns(NamedTuple):
    """Hold the shared memory of a step's columns of V, by stage. With several blocks of K nothing is transposed: the two last
    axes of states and of what tokens write are exchanged."""

    d_output: Ref  # [STAGES, C, COLUMNS]
    before: Ref  # [STAGES, COLUMNS, K]: S^T
    tokens: Ref  # [STAGES, COLUMNS, C]: U^T
    behind: Ref  # [STAGES, COLUMNS, K]: dS'^T
    erased: Ref  # [STAGES, COLUMNS, C]: dX^T
    loaded: Ref
    consumed: Ref

    @classmethod
    def types(cls, K: int, blocks: int) -> "Columns":
        state, pairs = tiled(STAGES, *((K, COLUMNS) if blocks > 1 else (COLUMNS, K))), tiled(STAGES, COLUMNS, C)
        return cls(
            d_output=tiled(STAGES, C, COLUMNS),
            before=state,
            tokens=pairs,
            behind=state,
            erased=pairs,
            loaded=plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        )


@functools.partial(jax.jit, static_argnums=0)  # so that equal calls are lowered once
def delta_gradient_wide(reverse: bool, *operands) -> Results:
    """Compute the fields of `Results` for every chunk and head. operands: the fields of `Operands`, and of `EdgeCopies` if there
    are any."""
    x, _ = split_edges(Operands, operands)
    K = min(x.q.shape[3], WIDEST)
    blocks = x.q.shape[3] // K
    inputs = len(operands)  # a cached kernel must not hold a tracer

    def body(*refs):
        p, own = Program.of(reverse, inputs, refs)
        me = lax.axis_index("warpgroup")
        pl.when(me == 0)(functools.partial(of_queries, p, own))
        pl.when(me == 1)(functools.partial(of_keys, p, own))
        pl.when(me == 2)(functools.partial(load, p, own))

    body.__name__ = "delta_gradient_wide"  # in profiles
    results = tuple(Results.types(x, blocks))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(math.prod(x.factors.shape[:3]) * blocks,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(K), Columns.types(K, blocks)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_gradient_wide", reverse), kernel, *operands, results=results, is_longest=True))


def steps(p: Program) -> int:
    """Return the number of steps, each of COLUMNS of V."""
    return p.operands.d_output.shape[3] // COLUMNS


def by_rows(p: Program, tile):
    """Return a tile of tokens with the tokens first."""
    return tile if p.blocks > 1 else transposed(tile)


def by_columns(p: Program, tile):
    """Return a tile of a state or of tokens with its columns of V first."""
    return transposed(tile) if p.blocks > 1 else tile


def load(p: Program, own: Columns):
    """Load all tiles, those of a step once the step that used their place is done."""
    plgpu.set_max_registers(REGISTERS[0], action="decrease")
    load_keys(p)
    x, K = p.operands, p.tiles.q.shape[1]
    beside = pl.ds(x.q.shape[3], C)

    @pl.loop(0, steps(p))
    def _(step):
        stage = stage_of(step)
        loaded = own.loaded.at[stage]
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(own.consumed.at[stage]))
        b, c, h = p.place()
        columns = pl.ds(step * COLUMNS, COLUMNS)
        head = quotient(h, x.factors.shape[2] // x.d_output.shape[2])
        fetch_tokens(p.edges, "d_output", x.d_output, (b, c, head, columns), own.d_output.at[stage], loaded)
        channels = pl.ds(p.block() * K, K)
        pairs = [(x.states, channels, own.before), (x.states, beside, own.tokens)]
        pairs += [(x.d_states, channels, own.behind), (x.d_states, beside, own.erased)]
        for source, part, tile in pairs:
            place = (part, columns) if p.blocks > 1 else (columns, part)
            plgpu.copy_gmem_to_smem(source.at[(b, c, h, *place)], tile.at[stage], loaded)


def stage_of(step):
    """Return the stage of a step."""
    return lax.rem(step, jnp.int32(STAGES))


def of_queries(p: Program, own: Columns):
    """Compute A and dq, and <S, dS'>."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    nothing = zeros(PAIRS), zeros((C, p.tiles.q.shape[1])), zeros((COLUMNS,), BY_ROW)
    pairs, of_state, edge = lax.fori_loop(0, steps(p), functools.partial(add_queries, p, own), nothing)
    plgpu.barrier_wait(p.tiles.loaded)
    store_scores(p, pairs)
    dq = gradient_of_queries(p, of_state)
    p.tiles.summed[OF_STATE] = edge
    send_queries(p, dq)


def add_queries(p: Program, own: Columns, step, totals):
    """Return dO U^T, dO S^T and parts of <S, dS'>, with the terms of a step's columns added."""
    stage, (pairs, of_state, edge) = stage_of(step), totals
    plgpu.barrier_wait(own.loaded.at[stage])
    d_output, S, dS = own.d_output.at[stage], own.before.at[stage], own.behind.at[stage]
    of_tokens, of_columns = (d_output, by_columns(p, own.tokens.at[stage])), (d_output, by_columns(p, S))
    pairs, of_state = tiles.added_all((pairs, of_state), [of_tokens], [of_columns])
    edge += sum((read(S.at[at]) * read(dS.at[at])).sum(1) for at in parts(*S.shape))
    plgpu.barrier_arrive(own.consumed.at[stage])
    return pairs, of_state, edge


def of_keys(p: Program, own: Columns):
    """Compute B, de and dk."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    shape = (C, p.tiles.q.shape[1])
    nothing = zeros(PAIRS), zeros(shape), zeros(shape)
    pairs, of_state, behind = lax.fori_loop(0, steps(p), functools.partial(add_keys, p, own), nothing)
    plgpu.barrier_wait(p.tiles.loaded)
    B, t = erased_scores(p, pairs), p.tiles
    store_split(t.erase_pairs, B)  # registers have no room for its two terms beside the sums
    dk, erased = erased_gradient(p, of_state, t.erase_pairs)
    plgpu.commit_smem()  # all warps have read B
    store_split(t.erase_pairs, B * by_row(p.beta(), PAIRS))
    send_keys(p, dk, erased, behind)


def add_keys(p: Program, own: Columns, step, totals):
    """Return dX U^T, dX S^T and U dS'^T, with the terms of a step's columns added."""
    stage = stage_of(step)
    plgpu.barrier_wait(own.loaded.at[stage])
    U, dX = by_columns(p, own.tokens.at[stage]), by_rows(p, own.erased.at[stage])
    of_state = dX, by_columns(p, own.before.at[stage])
    of_gradient = by_rows(p, own.tokens.at[stage]), by_columns(p, own.behind.at[stage])
    totals = tiles.added_all(totals, [(dX, U)], [of_state], [of_gradient])
    plgpu.barrier_arrive(own.consumed.at[stage])
    return totals
