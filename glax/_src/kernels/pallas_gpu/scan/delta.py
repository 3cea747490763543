"""Scan under the delta rule with per-head gates, for the outputs or for what the gradient reads.

G_i is the sum of a chunk's log gates through token i, and G_last the sum of all of them. S [K, V] is the state before the
chunk, R the result of `chunks/inverse.py`, and P_ij = scale (q_i . k_j) e^{G_i - G_j} for j up to i:

    X    = beta (V - e^G K S)
    U    = X + R X                      what the tokens write
    O    = scale e^G Q S + P U
    S'   = e^{G_last} S + K^T (e^{G_last - G} U)

With an erase vector and a write gate X = w V - e^H E S, with the H of `chunks/inverse.py`.

The scan of the adjoint is a reverse scan, from dS' = dL/dS' behind the chunk and dO:

    dU   = e^{G_last - G} K dS' + P^T dO
    dX   = dU + R^T dU                  dV = beta dX
    dS   = e^{G_last} dS' + Q^T (scale e^G dO) - K^T (beta e^G dX)

or with an erase vector dS = e^{G_last} dS' + Q^T (scale e^G dO) - E^T (e^H dX), and dX is a result in two terms of bfloat16, for
de needs both. XLA multiplies it for dV = w dX and dw = v dX.

A sequence is one segment, or is cut into several. A scan for "transitions" finds the state S_0 of each segment from zero, and the
matrix M by which the segment passes a state on: S' = M S + S_0. In the adjoint dS = M^T dS' + dS_0, with the same M.

Roles. A program has one head of one segment, and 64 columns of the state, or 128 for "ends" and "transitions" where these divide
the columns. Columns do not depend on each other. *load* loads chunks ahead. *carry* takes the state through all chunks, and
nothing delays it: *score* forms the scores a chunk ahead, because they do not depend on the state; *output* forms the results
from what *carry* stores, the state before a chunk and what its tokens write. Both go to memory where the gradient will read
them.

Where programs of 64 columns would need more rounds on the GPU, those of a forward have 128 (`DeltaScan.together`): two warpgroups
carry a stripe each, *output* forms the results of both, and each chunk is loaded once for both. *score* loads as well then, and
forms the scores by 16 columns, so that registers hold all that this takes. *carry* reads v and the factors of a chunk only when
its first product has ended. U overwrites v, and O overwrites U, so that shared memory holds three chunks.

*carry* has two forms. Up to K = 128 everything is transposed, [V, tokens] and [V, K]: the left side of each product is what the
product before has left in registers, so that no result passes through shared memory on its way to the next. What does not depend
on a running product is done while it runs. A wider state is [K, STRIPE] and all else [tokens, STRIPE], and products read both
sides from shared memory. So registers hold the state once, in float32, and the factor of a token is one number for its row. In
the other form the state in bfloat16, the left sides of products and the factors of columns would take 112 registers of a thread
more than a state of 256 channels leaves.

Memory: `Tiles`. In the wide form operands of products overwrite what they were formed from: X, and then e^{G_last - G} U, the
tile of v; scale e^G dO the tile of dO; dU, and then beta e^G dX, the tile of P.

Who waits for whom, in a scan for "residuals":

    waits                 for                   until
    carry, score, output  load                  chunks full: k, v, factors, inverse, q
    load                  carry, score, output  chunks free
    output                carry                 state stored
    carry                 output                state read
    output                carry                 written stored
    carry                 output                written read
    output                score                 scores stored
    score                 output                scores read

for "adjoint":

    waits                 for                   until
    carry, score, output  load                  chunks full: k, d_output, v, factors, inverse, q
    load                  carry, score, output  chunks free
    output                carry                 state stored
    carry                 output                state read
    output                carry                 written stored
    carry                 output                written read
    carry                 score                 scores stored
    score                 carry                 scores read

and for "adjoint" where keys are wider than 128, so that v and R have one tile:

    waits                 for                   until
    carry, score, output  load                  chunks full: k, d_output, factors, q
    load                  carry, score, output  chunks free
    output                carry                 state stored
    carry                 output                state read
    output                carry                 written stored
    carry                 output                written read
    carry                 score                 scores stored
    score                 carry                 scores read
    output                load                  values loaded: v
    carry                 load                  inverse loaded: inverse
    load                  carry                 inverse read

and for "residuals" where two stripes are carried together:

    waits                 for                   until
    carry, score, output  score                 chunks full: k, v, factors, inverse, q
    score                 carry, score, output  chunks free
    output                carry                 state stored
    carry                 output                state read
    output                carry                 written full
    output                score                 scores stored
    score                 output                scores read

With an erase vector there are beside these

    carry                 load                  erasing full: e
    load                  carry                 erasing free

and a wide plan has one tile of everything, so that none needs a handoff of its own.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import BETA, ERASING, FACTORS, GATES, LEAVING, WITHIN
from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import PROGRAM, by_role, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    EdgeCopies,
    after,
    by_column,
    by_row,
    iota,
    load_tokens,
    read,
    rounded_part,
    split_edges,
    transposed,
    zeros,
)
from glax._src.kernels.pallas_gpu.plan import STRIPE, C, DeltaScan, program_indices, quotient

BF16 = jnp.bfloat16
TOKENS, VALUES = (STRIPE, C), (C, STRIPE)

Ref = Any


class Operands(NamedTuple):
    """Hold references to the operands in global memory. E counts the segments of all N sequences. Each field's comment has its
    shape."""

    table: Ref  # [E, 4]: of every segment its batch row, first chunk, number of chunks and sequence
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV, V]
    d_output: Ref  # [B, T, H, V], for the adjoint; else any array
    inverse: Ref  # [B, chunks, H, C, C]: R
    factors: Ref  # [B, chunks, H, FACTORS, C]: those of `chunks/inverse.py`
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, V, K], or [E, H, K, V] for a wide plan; any array if segments begin from zero
    e: Ref  # [B, T, H, K]; None with beta
    w: Ref  # [B, T, H, V]; None with beta, and where it is 1


class Results(NamedTuple):
    """Hold references to the results in global memory. A result that the plan leaves out has one tile. In a wide plan
    (`DeltaScan.wide`) the last two axes of `states` and `last` are exchanged, and nothing is transposed."""

    output: Ref  # [B, T, H, V]: O or dV; with e dX in place of dV
    beta: Ref  # [B, chunks, H, V / STRIPE, C]: sums of dX v over a stripe, for the adjoint
    # [B, chunks, H, V, K + C]: S before each chunk and U, or dS' behind it and dX, of which with e its second term; transposed
    states: Ref
    last: Ref  # [E, H, V, K]; of "transitions" also M, transposed: [E, H, V + K, K]

    @classmethod
    def types(cls, w: DeltaScan, B: int, T: int, chunks: int, E: int) -> "Results":
        """Return the shapes and dtypes of the results of plan w. T: the number of rows of the outputs. chunks: the number of
        chunks of a row. E: the number of segments."""
        output = (B, T, w.H, w.V) if w.writes_tokens else (1, C, 1, STRIPE)
        states = (B, chunks, w.H, *w.upright(w.V, w.K + C)) if w.stores_states else (1, 1, 1, STRIPE, 64)
        has_beta = w.kind == "adjoint" and not w.has_erase
        return cls(
            jax.ShapeDtypeStruct(output, BF16),
            jax.ShapeDtypeStruct((B, chunks, w.H, w.V // STRIPE, C) if has_beta else (1,) * 4 + (C,), jnp.float32),
            jax.ShapeDtypeStruct(states, BF16),
            jax.ShapeDtypeStruct((E, w.H, *w.upright(w.columns, w.K)), jnp.float32),
        )


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. The first six tiles are by stage. The others pass from one warpgroup
    to another.

    In a wide plan `state`, `tokens` and `lost` are not transposed, and each stripe has a state. In a tight plan v and inverse
    have one stage, and dV overwrites `lost`. With `together` each stripe has a tile of `state`; U overwrites its tile of v, and
    O overwrites U.
    """

    q: Ref  # [stages, C, K]
    k: Ref  # [stages, C, K]
    v: Ref  # [stages, stripes, C, STRIPE]
    d_output: Ref  # [stages, C, STRIPE]
    inverse: Ref  # [stages, C, C]
    factors: Ref  # [stages, FACTORS, C]
    state: Ref  # [STRIPE, K]: S or dS', transposed; [stripes, K, STRIPE] in a wide plan
    tokens: Ref  # [STRIPE, C]: U or dX, transposed
    lost: Ref  # [STRIPE, C]: what dX loses in bfloat16
    scores: Ref  # [C, C]: P
    output: Ref  # [C, STRIPE]
    e: Ref  # [erase_stages, C, K]; None with beta
    w: Ref  # [stages, stripes, C, STRIPE]; None without w

    @classmethod
    def types(cls, w: DeltaScan) -> "Tiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        n, K = w.stages, w.K
        single, tiled = 1 if w.tight else n, functools.partial(tiles.tiled, columns=w.tile)
        by_stripe = (w.stripes,) if w.together else ()
        state = tiled(*by_stripe, STRIPE, K) if w.has_results else tiled(8, 64)
        return cls(
            q=tiled(n, C, K) if w.reads_queries else tiled(1, 8, 64),
            k=tiled(n, C, K),
            v=tiled(single, w.stripes, C, STRIPE) if w.reads_values else tiled(1, 1, 8, 64),
            d_output=tiled(n, C, STRIPE) if w.is_adjoint else tiled(1, 8, 64),
            inverse=tiled(single, C, C),
            factors=plgpu.SMEM((n, FACTORS, C), jnp.float32),
            state=tiled(w.stripes, K, STRIPE) if w.wide else state,
            tokens=tiled(STRIPE, C) if w.has_results and not w.together else tiled(8, 64),
            lost=tiled(STRIPE, C) if w.kind == "adjoint" else tiled(8, 64),
            scores=tiled(C, C) if w.reads_queries else tiled(8, 64),
            output=tiled(C, STRIPE) if w.has_output_tile and not w.together else tiled(8, 64),
            e=tiled(w.erase_stages, C, K) if w.has_erase else None,
            w=tiled(n, w.stripes, C, STRIPE) if w.has_write and w.reads_values else None,
        )


@dataclasses.dataclass(frozen=True)
class DeltaPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    chunks: the ring of the tiles that are loaded for a chunk. state: the handoff of S before a chunk, or of dS' behind it.
    written: the handoff of U or dX; a ring with `together`. scores: the handoff of P. values, inverse: in a tight plan the
    handoffs of v and of R, which have one tile each; else None. erasing: the ring of e; None with beta.
    """

    chunks: Ring
    state: Handoff
    written: Handoff | Ring
    scores: Handoff
    values: Handoff | None = None
    inverse: Handoff | None = None
    erasing: Ring | None = None

    @classmethod
    def planned(cls, w: DeltaScan) -> "DeltaPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch."""
        copies = "k", *("d_output",) * w.is_adjoint, *("v",) * (w.stripes * w.reads_values * (not w.tight)), "factors"
        copies += *("inverse",) * (not w.tight), *("q",) * w.reads_queries
        copies += ("w",) * (w.stripes * w.reads_values * w.has_write)
        chunks = Ring(w.stages, (w.loading,), ("carry", "score", *("output",) * w.reads_chunks), copies)
        handed = Handoff(("carry",), ("output",))
        # In a tile of v: whatever was written there is read before the chunk's stage is free.
        written = Ring(w.stages, ("carry",), ("output",), released_by=()) if w.together else handed
        scores = Handoff(("score",), ("carry",) if w.is_adjoint else ("output",))
        erasing = Ring(w.erase_stages, ("load",), ("carry",), ("e",)) if w.has_erase else None
        if not w.tight:
            return cls(chunks, handed, written, scores, erasing=erasing)
        values = Handoff(("load",), ("output",), ("v",), returned=False)
        return cls(chunks, handed, written, scores, values, Handoff(("load",), ("carry",), ("inverse",)))


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program. edges: copies of the chunks with rows without a token, or None.

    The methods and functions of this file take `step`, the number of a chunk in scan order from 0; `slot`, the stage of shared
    memory that holds the chunk; and `me`, the index of a *carry* warpgroup, and of its stripe, within the program. A wide plan
    has K above 128 (`DeltaScan.wide`), and a tight plan little shared memory (`DeltaScan.tight`).
    """

    plan: DeltaScan
    operands: Operands
    edges: EdgeCopies | None
    results: Results
    tiles: Tiles
    pipeline: DeltaPipeline

    def place(self):
        """Return (the index of the program's stripes, the head, the segment). These are computed at each use, so that no
        register holds them.

        A program has `DeltaScan.stripes` neighbouring stripes. The index of its first stripe is the first number times that.
        """
        w = self.plan
        return program_indices(
            lax.optimization_barrier(lax.axis_index(PROGRAM)), w.columns // (STRIPE * w.stripes), w.H
        )

    @property
    def head(self):
        """Return the index of the program's head among all H heads."""
        return self.place()[1]

    def stripe_index(self, me=0):
        """Return the index of the stripe of the state that warpgroup `me` carries, among all stripes of the state."""
        return self.place()[0] * self.plan.stripes + me

    def stripe(self, me=0):
        """Return the slice of the state's columns that warpgroup `me` carries."""
        return pl.ds(self.stripe_index(me) * STRIPE, STRIPE)

    def column(self, me, shape):
        """Return, for each row of [STRIPE, ...], or in a wide plan each column of [..., STRIPE], the index of the state's
        column, in int32 of shape `shape`. Columns from V on are those of the matrix M."""
        return iota(shape, int(self.plan.wide)) + self.stripe_index(me) * STRIPE

    def field(self, column: int):
        """Return the entry of the table in the segment's row and the given column."""
        return self.operands.table[self.place()[2], column]

    def count(self):
        """Return the number of chunks of the segment."""
        return self.field(2)

    def chunk(self, step):
        """Return the index of the chunk that the scan reaches at a step, counted from the first chunk of the row."""
        first, count = self.field(1), self.count()
        return first + (count - 1 - step if self.plan.descending else step)

    def at(self, step, x):
        """Return the indices (batch row, chunk, head) at which the chunk of a step lies in x [B, T, heads, width]."""
        return self.field(0), self.chunk(step), quotient(self.head, self.plan.H // x.shape[2])

    def tile_of_stripe(self, tile, me):
        """Return the tile of the stripe of warpgroup `me` in `tile`, which has one for each stripe if a program carries two
        stripes of a forward (`DeltaScan.together`). Else return `tile`, which serves its only stripe."""
        if not self.plan.together:
            return tile
        # An accumulator's scope takes no reference with a static index from outside.
        return tile.at[lax.optimization_barrier(jnp.int32(me))]

    def written(self, slot, me):
        """Return the tile that holds U or dX of the chunk in `slot`. With `together` it is the stripe's tile of v, in which O
        replaces U."""
        return self.tile_of_stripe(self.tiles.v.at[slot], me) if self.plan.together else self.tiles.tokens

    def rows(self, step, x, me=0):
        """Return the reference [C, STRIPE] to a step's rows of x [B, T, H, V] in global memory, in the columns of the stripe of
        warpgroup `me`."""
        return x.at[self.field(0), pl.ds(self.chunk(step) * C, C), self.head, self.stripe(me)]

    def stored(self, step, first: int, width: int, me=0):
        """Return the reference to the part of the result `states` for the chunk of a step: `width` channels from `first` on, in
        the stripe of warpgroup `me`."""
        chunk = self.results.states.at[self.field(0), self.chunk(step), self.head]
        return chunk.at[self.plan.upright(self.stripe(me), pl.ds(first, width))]

    def take_registers(self, role: str):
        """Set the registers of each thread of the calling warpgroup to the number of its role (`DeltaScan.registers`)."""
        launched = 65536 // (128 * sum(self.plan.roles.values())) // 8 * 8
        count = self.plan.registers[role]
        plgpu.set_max_registers(count, action="increase" if count > launched else "decrease")

    def slot(self, step):
        """Return the stage of shared memory that holds the chunk of a step."""
        slot = self.pipeline.chunks.slot(step)
        # Else the compiler would hold a multiple of the step for each tile, where registers are few.
        return lax.optimization_barrier(slot) if self.plan.together else slot

    def values(self, slot, me=0):
        """Return the tile of v [C, STRIPE] of the chunk in `slot`, for the stripe of warpgroup `me`."""
        return self.tiles.v.at[0 if self.plan.tight else slot, me]

    @contextlib.contextmanager
    def erasing(self, step, slot):
        """Provide the tile of e [C, K], or with beta the tile of k. First wait until e is loaded, and release e after the
        `with` block."""
        ring = self.pipeline.erasing
        if ring is None:
            yield self.tiles.k.at[slot]
            return
        own = ring.slot(step)
        ring.wait(own)
        yield self.tiles.e.at[own]
        ring.release(own)

    def inverse(self, slot):
        """Return the tile of R [C, C] of the chunk in `slot`."""
        return self.tiles.inverse.at[0 if self.plan.tight else slot]

    def state(self, me=0):
        """Return the tile of the state that *output* reads: of the stripe of warpgroup `me`, or in a wide plan the only
        tile."""
        if not self.plan.wide:
            return self.tile_of_stripe(self.tiles.state, me)
        # Behind a barrier of the compiler, which would otherwise hold the addresses of all its parts throughout a loop.
        return self.tiles.state.at[lax.optimization_barrier(jnp.int32(0))]

    def by_rows(self, tile):
        """Return a tile of the state or of tokens as [K or C, STRIPE]. Without a wide plan this is a transposed view."""
        return tile if self.plan.wide else transposed(tile)

    def scale(self):
        """Return the scale of the segment's sequence, read from global memory."""
        return self.operands.scale[self.field(3)]

    def factor(self, slot, row: int):
        """Load a row of factors [C] of the chunk in `slot`, and return it repeated over the rows of [STRIPE, C]. row: BETA,
        ERASING, LEAVING, WITHIN or GATES of `chunks/inverse.py`."""
        found = plgpu.load(self.tiles.factors.at[slot, row], layout=BY_COLUMN, optimized=False)
        return by_column(found, TOKENS)

    def row_factor(self, slot, row: int):
        """Load a row of factors [C], and return it in the layout BY_ROW: one number for each row of a matrix. row: as in
        `factor`."""
        return plgpu.load(self.tiles.factors.at[slot, row], layout=BY_ROW)

    def factor_by_row(self, slot, row: int):
        """Load a row of factors [C], and return it repeated over the columns of [C, STRIPE]. row: as in `factor`."""
        return by_row(self.row_factor(slot, row), VALUES)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_scan(w: DeltaScan, rows: int, *operands) -> Results:
    """Scan every segment of `table`, and return the results of plan w. rows: the number of rows of the outputs. operands: the
    fields of `Operands`, and of `EdgeCopies` if there are any."""
    x, edges = split_edges(Operands, operands)

    def body(operands, *refs):
        p = Program(w, *operands, *refs)
        work = dict(carry=carry_state, output=write_results, score=form_scores, load=load_chunks)
        by_role(w.roles, {role: functools.partial(run, p) for role, run in work.items()})

    B, chunks = x.factors.shape[:2]
    E = x.table.shape[0]
    found = launch(
        "delta_" + w.kind.replace(" ", "_"),
        w,
        body,
        (x, edges),
        Results.types(w, B, rows, chunks, E),
        (Tiles.types(w),),
        w.roles,
        DeltaPipeline.planned(w),
        programs=w.columns // (STRIPE * w.stripes) * w.H * E,
    )
    if w.kind == "transitions" and w.K % STRIPE:  # without the columns that fill the last stripe of M
        return found._replace(last=found.last[:, :, : w.V + w.K])
    return found


def load_chunks(p: Program):
    """Do the work of the role *load*: load every chunk as soon as a stage is free.

    A tight plan has one tile each for v and for the inverse R. v waits until the chunk before is released, and R until the R
    before is read.
    """
    p.take_registers("load")
    load = loader(p)

    @pl.loop(0, p.count())
    def _(step):
        load(step)

    if p.plan.tight:
        last = p.count() - 1
        pl.when(last > 0)(lambda: p.pipeline.chunks.acquire(p.slot(last - 1)))
        pl.when(last >= 0)(lambda: load_values(p, last))


def loader(p: Program):
    """Return a function load(step), which waits until a stage is free and starts to load the chunk of a step. The role
    `DeltaScan.loading` calls that function for each step in order."""
    w, x, t, pipe = p.plan, p.operands, p.tiles, p.pipeline
    tokens: list[tuple[str, Ref, Ref, tuple, slice | pl.Slice]] = [("k", x.k, t.k, (), slice(None))]
    if w.is_adjoint:
        tokens.append(("d_output", x.d_output, t.d_output, (), p.stripe()))
    for me in range(w.stripes if w.reads_values and not w.tight else 0):
        columns = (
            p.stripe(me) if w.columns == w.V else pl.ds(lax.rem(p.stripe_index(me), w.V // STRIPE) * STRIPE, STRIPE)
        )
        tokens.append(("v", x.v, t.v, (me,), columns))
        if w.has_write:
            tokens.append(("w", x.w, t.w, (me,), columns))
    pairs = [(x.factors, t.factors)] + [(x.inverse, t.inverse)] * (not w.tight)
    if w.reads_queries:
        tokens.append(("q", x.q, t.q, (), slice(None)))

    def load(step):
        slot = p.slot(step)
        pipe.chunks.acquire(slot, step)
        if w.tight:
            pl.when(step > 0)(lambda: load_values(p, step - 1))
        for name, source, tile, inner, columns in tokens:
            load_tokens(
                p.edges,
                name,
                source,
                (*p.at(step, source), columns),
                tile.at[(slot, *inner)],
                pipe.chunks.full.at[slot],
            )
        for source, tile in pairs:
            pipe.chunks.copy(source.at[p.field(0), p.chunk(step), p.head], tile.at[slot], slot)
        if pipe.erasing is not None:  # the last copy, for which those of the chunk do not wait
            slot = pipe.erasing.slot(step)
            pipe.erasing.acquire(slot, step)
            load_tokens(p.edges, "e", x.e, (*p.at(step, x.e), slice(None)), t.e.at[slot], pipe.erasing.full.at[slot])
        if w.tight:
            assert pipe.inverse is not None
            pl.when(step > 0)(pipe.inverse.acquire)
            pipe.inverse.copy(x.inverse.at[p.field(0), p.chunk(step), p.head], t.inverse.at[0])

    return load


def load_values(p: Program, step):
    """Start to load v of a step's chunk into its one tile, in a tight plan. The caller has waited until the tile may be
    overwritten."""
    x, values = p.operands, p.pipeline.values
    assert values is not None
    load_tokens(p.edges, "v", x.v, (*p.at(step, x.v), p.stripe()), p.values(0), values.full)


def carry_state(p: Program, me=0):
    """Do the work of the role *carry*: carry S or dS through all chunks in registers, [STRIPE, K], or [K, STRIPE] in a wide
    plan, and write the last to global memory."""
    p.take_registers("carry")
    forms = (onward_wide, back_wide) if p.plan.wide else (onward, back)
    S = starting_state(p, me)
    S = lax.fori_loop(0, p.count(), functools.partial(forms[p.plan.is_adjoint], p, me), S)
    p.results.last[(p.place()[2], p.head, *p.plan.upright(p.stripe(me), slice(None)))] = S


def starting_state(p: Program, me):
    """Return the warpgroup's stripe of the state before the first chunk, [STRIPE, K], or [K, STRIPE] in a wide plan, in
    float32: the given states or zeros, and the identity in the columns of M."""
    w, x = p.plan, p.operands
    if w.start:
        place = p.place()[2], p.head, *w.upright(p.stripe(me), slice(None))
        return plgpu.load(x.start.at[place], layout=tiles.WGMMA, optimized=False)
    S = zeros(w.upright(STRIPE, w.K))
    if w.kind == "transitions":
        S = jnp.where(p.column(me, S.shape) - w.V == tiles.iota(S.shape, int(not w.wide)), 1.0, S)
    return S


def onward(p: Program, me, step, S):
    """Return S' [STRIPE, K] behind a step's chunk from S before it, both float32 in registers. Store S and U for *output*."""
    t, slot = p.tiles, p.slot(step)
    p.pipeline.chunks.wait(slot)
    before, through = S.astype(BF16), decayed(p, slot, S)

    def of_state(by_keys):
        with p.erasing(step, slot) as keys:
            plgpu.wgmma(by_keys, before, transposed(keys))
            store_state(p, me, step, before)
            if p.plan.together:  # registers have no room for what is read of a chunk while a product runs
                behind, read = lax.optimization_barrier((after(by_keys), slot))
                return None, values_to_write(p, read, me) - behind * p.factor(read, ERASING)
            given, erasing = values_to_write(p, slot, me), p.factor(slot, ERASING)
            if p.plan.kind == "transitions":
                given = jnp.where(p.column(me, TOKENS) < p.plan.V, given, 0.0)
            leaving = p.factor(slot, LEAVING)
            return leaving, given - after(by_keys) * erasing

    leaving, X = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))
    U = tiles.added(X, (X.astype(BF16), transposed(t.inverse.at[slot])))
    leaving = p.factor(slot, LEAVING) if leaving is None else leaving

    def of_tokens(state):
        plgpu.wgmma(state, (U * leaving).astype(BF16), t.k.at[slot])
        store_tokens(p, me, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    p.pipeline.chunks.release(slot)
    return S


def values_to_write(p: Program, slot, me):
    """Return beta v, w v, or v if there is neither, of the chunk in `slot`: [STRIPE, C] in float32 in registers."""
    v = read(transposed(p.tiles.v.at[slot, me]))
    if not p.plan.has_erase:
        return v * p.factor(slot, BETA)
    return v * read(transposed(p.tiles.w.at[slot, me])) if p.plan.has_write else v


def back(p: Program, me, step, dS):
    """Return dS [STRIPE, K] before a step's chunk from dS' behind it, both float32 in registers. Store dS' and dX for *output*.

    The argument dS is dS'.
    """
    t, slot = p.tiles, p.slot(step)
    p.pipeline.chunks.wait(slot)
    behind, through = dS.astype(BF16), decayed(p, slot, dS)
    d_output = transposed(t.d_output.at[slot])

    def of_state(by_keys, by_scores):
        plgpu.wgmma(by_keys, behind, transposed(t.k.at[slot]))
        store_state(p, me, step, behind)
        p.pipeline.scores.wait()
        plgpu.wgmma(by_scores, plgpu.load(d_output, layout=tiles.WGMMA), t.scores)
        leaving = p.factor(slot, LEAVING)
        dU = after(by_keys, 1) * leaving
        reads = (read(d_output) * (p.factor(slot, WITHIN) * p.scale())).astype(BF16)
        return reads, dU + after(by_scores)

    accumulator = plgpu.ACC(TOKENS, jnp.float32)
    reads, dU = pl.run_scoped(of_state, accumulator, accumulator)
    p.pipeline.scores.release()

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, dU.astype(BF16), t.inverse.at[slot])
        plgpu.wgmma(state, reads, t.q.at[slot])
        erasing = -p.factor(slot, ERASING)
        dX = after(by_inverse, 1)
        plgpu.wgmma(state, (dX * erasing).astype(BF16), keys)
        store_tokens(p, me, step, dX)

    with p.erasing(step, slot) as keys:
        _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    p.pipeline.chunks.release(slot)
    return dS


def decayed(p: Program, slot, S):
    """Return e^{G_last} S for the state S of a stripe. Call this before a product starts: ptxas would wait for the product,
    because a product has written S."""
    return lax.optimization_barrier(S * p.tiles.factors[slot, WITHIN, p.plan.last_token])


def store_state(p: Program, me, step, S):
    """Wait until *output* has read the tile of the state, and store S [STRIPE, K], in bfloat16, there. Do nothing in a plan
    without the role *output*."""
    if not p.plan.has_results:
        return
    with p.pipeline.state.storing(step):
        p.tile_of_stripe(p.tiles.state, me)[...] = S
        plgpu.commit_smem()


def store_tokens(p: Program, me, step, x):
    """Store x, which is U or dX, in bfloat16 for *output*: with `together` in the stripe's tile of v, else in the tile `tokens`
    once *output* has read the last. dX has a second term, for the gradients of beta and of e, in the tile `lost`.

    x: [STRIPE, C] in float32, or [C, STRIPE] in a wide plan. Do nothing in a plan without the role *output*.
    """
    if not p.plan.has_results:
        return
    written = p.pipeline.written
    if isinstance(written, Ring):
        slot = p.slot(step)
        plgpu.commit_smem()  # all warps have read v
        p.written(slot, me)[...] = x.astype(BF16)
        plgpu.commit_smem()
        written.filled(slot)
        return
    with written.storing(step):
        high = rounded_part(x) if p.plan.is_adjoint else x
        p.tiles.tokens[...] = high.astype(BF16)
        if p.plan.is_adjoint:
            p.tiles.lost[...] = (x - high).astype(BF16)
        plgpu.commit_smem()


def onward_wide(p: Program, me, step, S):
    """Return S' [K, STRIPE] behind a step's chunk from S before it, both float32 in registers. Store S and U for *output*.

    X, and then e^{G_last - G} U, overwrite the tile of v.
    """
    t, slot = p.tiles, p.slot(step)
    # Formed where it is used: an accumulator's scope takes no reference with a static index from outside.
    values = functools.partial(p.values, slot, me)
    p.pipeline.chunks.wait(slot)
    store_wide_state(p, me, step, S)
    through = decayed(p, slot, S)

    def of_state(by_keys):
        with p.erasing(step, slot) as keys:
            plgpu.wgmma(by_keys, keys, t.state.at[me])
            beta = None if p.plan.has_erase else p.row_factor(slot, BETA)
            erasing = p.factor_by_row(slot, ERASING)
            if p.plan.kind == "transitions":  # nothing is added to columns of M
                beta = (1.0 if beta is None else beta) * jnp.where(p.stripe_index(me) * STRIPE < p.plan.V, 1.0, 0.0)
            given = read(values())
            if p.plan.has_write:
                given *= read(t.w.at[slot, me])
            if beta is not None:
                given *= by_row(beta, VALUES) if beta.ndim else beta
            return given - after(by_keys) * erasing

    X = pl.run_scoped(of_state, plgpu.ACC(VALUES, jnp.float32))
    values()[...] = X.astype(BF16)
    plgpu.commit_smem()
    U: Any = pl.run_state(lambda total: plgpu.wgmma(total, p.inverse(slot), values()))(plgpu.ACC.init(X))
    plgpu.commit_smem()  # all warps have read X
    values()[...] = (U * p.factor_by_row(slot, LEAVING)).astype(BF16)
    plgpu.commit_smem()

    def of_tokens(state):
        plgpu.wgmma(state, transposed(t.k.at[slot]), values())
        store_tokens(p, me, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    p.pipeline.chunks.release(slot)
    return S


def back_wide(p: Program, me, step, dS):
    """Return dS [K, STRIPE] before a step's chunk from dS' behind it, both float32 in registers. Store dS' and dX for *output*.

    The argument dS is dS'. The tiles of dO and of the scores are overwritten.
    """
    t, slot, inverse = p.tiles, p.slot(step), p.pipeline.inverse
    d_output, tokens = t.d_output.at[slot], t.scores
    p.pipeline.chunks.wait(slot)
    store_wide_state(p, me, step, dS)
    through = decayed(p, slot, dS)

    dU = tiles.product(VALUES, (t.k.at[slot], t.state.at[me])) * p.factor_by_row(slot, LEAVING)
    p.pipeline.scores.wait()
    dU = tiles.added(dU, (transposed(t.scores), d_output))
    reads = read(d_output) * by_row(p.row_factor(slot, WITHIN) * p.scale(), VALUES)
    plgpu.commit_smem()  # all warps have read P and dO
    d_output[...] = reads.astype(BF16)
    tokens[...] = dU.astype(BF16)
    plgpu.commit_smem()
    if inverse is not None:
        inverse.wait()

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, transposed(p.inverse(slot)), tokens)
        plgpu.wgmma(state, transposed(t.q.at[slot]), d_output)
        erasing = -p.factor_by_row(slot, ERASING)
        dX = after(by_inverse, 1)
        plgpu.commit_smem()  # all warps have read dU
        if inverse is not None:
            inverse.release()
        tokens[...] = (dX * erasing).astype(BF16)
        plgpu.commit_smem()
        plgpu.wgmma(state, transposed(keys), tokens)
        store_tokens(p, me, step, dX)

    with p.erasing(step, slot) as keys:
        _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    p.pipeline.scores.release()
    p.pipeline.chunks.release(slot)
    return dS


def store_wide_state(p: Program, me, step, S):
    """Store S [K, STRIPE] in bfloat16, for products and for *output*, if the plan has that role. First wait until *output* has
    read the tile."""
    with p.pipeline.state.storing(step) if p.plan.has_results else contextlib.nullcontext():
        p.tiles.state[me] = S.astype(BF16)
        plgpu.commit_smem()


def form_scores(p: Program):
    """Do the work of the role *score*: form P [C, C] of all chunks, in columns of `DeltaScan.scored`. No exponent is above 0
    for gates <= 0.

    Where *score* also loads, it starts to load each chunk ahead of its scores.
    """
    w, t = p.plan, p.tiles
    p.take_registers("score")
    shape = C, w.scored
    i, j, scale = iota(shape, 0), iota(shape, 1), p.scale()

    def part(slot, first: int):
        columns = pl.ds(first, w.scored)
        to = plgpu.load(t.factors.at[slot, GATES, columns], layout=BY_COLUMN, optimized=False)
        counted = i <= j + first if w.reverse else i >= j + first
        between = jnp.where(counted, by_row(p.row_factor(slot, GATES), shape) - by_column(to, shape), -jnp.inf)
        found = tiles.product(shape, (t.q.at[slot], transposed(t.k.at[slot, columns])))
        return (found * (jnp.exp2(between) * scale)).astype(BF16)

    def form(step):
        slot = p.slot(step)
        p.pipeline.chunks.wait(slot)
        scores, at = [part(slot, 0)], slot
        for first in range(w.scored, C, w.scored):
            before, at = lax.optimization_barrier((scores[-1], at))  # one after the other
            scores = [*scores[:-1], before, part(at, first)]
        p.pipeline.chunks.release(slot)
        with p.pipeline.scores.storing(step):
            t.scores[...] = jnp.concatenate(scores, axis=1) if scores[1:] else scores[0]
            plgpu.commit_smem()

    if w.loading != "score":
        pl.loop(0, p.count())(form)
        return
    load, ahead = loader(p), w.stages - 1  # a load of more would wait for *output*, which waits for these scores

    @pl.loop(0, p.count() + ahead)
    def _(i):
        pl.when(i >= ahead)(functools.partial(form, i - ahead))
        pl.when(i < p.count())(functools.partial(load, i))


def write_results(p: Program):
    """Do the work of the role *output*: write the results of all chunks to global memory: outputs, states and U, or dV, dS' and
    dX."""
    w, t = p.plan, p.tiles
    chunks, written = p.pipeline.chunks, p.pipeline.written
    gives_dX = w.is_adjoint and w.has_erase
    stripes = range(w.stripes)
    p.take_registers("output")

    def tile(slot, me):
        if gives_dX or w.together:
            return p.written(slot, me)
        return t.lost if w.tight else t.output

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        # The copies of the chunk before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if isinstance(written, Ring):
            pl.when(step > 0)(lambda: chunks.release(p.slot(step - 1)))
        else:
            pl.when(step > 0)(written.release)
        if w.reads_chunks:
            chunks.wait(slot)
        p.pipeline.state.wait()
        for me in stripes if w.stores_states else ():
            plgpu.copy_smem_to_gmem(p.state(me), p.stored(step, 0, w.K, me))
        o = [outputs_of_state(p, slot, me) for me in stripes] if w.writes_tokens and not w.is_adjoint else []
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        p.pipeline.state.release()
        written.wait(slot) if isinstance(written, Ring) else written.wait()
        for me in stripes if w.stores_states else ():
            plgpu.copy_smem_to_gmem(t.lost if gives_dX else p.written(slot, me), p.stored(step, w.K, C, me))
        if o:
            with p.pipeline.scores.reading():
                o = [tiles.added(x, (t.scores, p.by_rows(p.written(slot, me)))) for me, x in enumerate(o)]
            if w.together:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # all warps have read U, and so has its copy
        elif gives_dX:
            o = [read(p.by_rows(t.tokens))]
            plgpu.commit_smem()  # all warps have read the tile, in which o will lie by rows
        elif w.is_adjoint:
            o = [gradient_of_values(p, step, slot)]
        if o:
            if not w.together:
                chunks.release(slot)
            for me, x in enumerate(o):
                tile(slot, me)[...] = x.astype(BF16)
            plgpu.commit_smem()
            for me in stripes:
                plgpu.copy_smem_to_gmem(tile(slot, me), p.rows(step, p.results.output, me))

    plgpu.wait_smem_to_gmem(0)
    if isinstance(written, Ring):  # so that no barrier ends with arrivals that complete nothing
        pl.when(p.count() > 0)(lambda: chunks.release(p.slot(p.count() - 1)))


def outputs_of_state(p: Program, slot, me):
    """Return scale e^G Q S of the chunk in `slot`, [C, STRIPE] in float32 in registers, for the stripe of warpgroup `me`."""
    t = p.tiles
    o = tiles.product(VALUES, (t.q.at[slot], p.by_rows(p.state(me))))
    return o * by_row(p.row_factor(slot, WITHIN) * p.scale(), VALUES)


def gradient_of_values(p: Program, step, slot):
    """Return dV = beta dX of a step's chunk, [C, STRIPE] in float32 in registers. Write the sums of dX v over the stripe to
    `Results.beta`."""
    t = p.tiles
    dX = read(p.by_rows(t.tokens)) + read(p.by_rows(t.lost))
    if p.pipeline.values is not None:
        p.pipeline.values.wait()
    p.results.beta[p.field(0), p.chunk(step), p.head, p.stripe_index()] = (dX * read(p.values(slot))).sum(1)
    return dX * p.factor_by_row(slot, BETA)
