"""Scan under the delta rule with per-key gates, for the outputs or for what the gradient reads.

S [K, V] is the state before a chunk. `chunks/pairs.py` has formed R, P and the decayed operands, and G is its sum of gates:

    X    = beta (V - (K e^G) S)
    U    = X + R X                      what the tokens write
    O    = (scale Q e^G) S + P U
    S'   = e^{G_last} S + (K e^{G_last - G})^T U

The scan of the adjoint is a reverse scan, from dS' = dL/dS' behind the chunk and dO:

    dU   = (K e^{G_last - G}) dS' + P^T dO
    dX   = dU + R^T dU                  dV = beta dX
    dS   = e^{G_last} dS' + (scale Q e^G)^T dO - (K e^G)^T (beta dX)

With an erase vector and a write gate

    X    = w V - (E e^H) S
    dV   = w dX                         dw = V dX
    dS   = e^{G_last} dS' + (scale Q e^G)^T dO - (E e^H)^T dX

and what dX loses in bfloat16 is stored too: de sums dX S over V, of which each factor has the error of several roundings.

No exponential is formed here. "transitions" are those of `delta_scan`. dU is formed from two terms of dS' in bfloat16 where
`DeltaKeyScan.splits_state` says so.

Roles. A program has one head of one segment, and 64 columns of the state, which do not depend on each other; for "transitions" it
has 128 where these divide the columns. *load* loads chunks ahead, *carry* takes the state through all chunks, transposed as in
`scan/delta.py`, and *output* forms the results.

Memory: `Tiles`. Outputs leave through the tile of their P. Who waits for whom, in a scan for "residuals":

    waits   for     until
    carry   load    chunks full: erasing, leaving, inverse, decay, beta, v
    load    carry   chunks free
    output  load    outputs full: queries, scores
    load    output  outputs free
    output  carry   state stored
    carry   output  state read
    output  carry   written stored
    carry   output  written read

and for "adjoint":

    waits          for            until
    carry, output  load           chunks full: erasing, leaving, inverse, decay, beta, queries, scores, v, d_output
    load           carry, output  chunks free
    output         carry          state stored
    carry          output         state read
    output         carry          written stored
    carry          output         written read

With an erase vector there is w, where it is not 1, in the place of beta. Without w *output* reads no chunk of an adjoint, and v
is not loaded.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.launch import by_role, launch
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Pipeline, Ring
from glax._src.kernels.pallas_gpu.device.tiles import (
    BY_COLUMN,
    BY_ROW,
    after,
    by_column,
    by_row,
    read,
    rounded_part,
    tiled,
    transposed,
)
from glax._src.kernels.pallas_gpu.plan import STRIPE, C, DeltaScan, quotient, remainder
from glax._src.kernels.pallas_gpu.scan import delta
from glax._src.kernels.pallas_gpu.scan.delta import (
    BF16,
    TOKENS,
    VALUES,
    starting_state,
    store_state,
    store_tokens,
)

# Chunks in shared memory: of Q and P for outputs, beside the plan's STAGES of the other tiles, 219 KB of 227 at widths of 128; of
# all operands for the adjoint, whose state reads Q and P too, 201 KB, and with w 225 KB. Beside w outputs have room for fewer.
OUTPUT_STAGES = ADJOINT_STAGES = WRITE_STAGES = 2
# The widest keys for which dU is formed from dS' in two terms of bfloat16. 128 spills nothing either, but was not timed.
SPLIT_KEYS = 64

Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaKeyScan(DeltaScan):
    """Hold the sizes and options that a scan under the delta rule with per-key gates is compiled for.

    The fields are those of `DeltaScan`. The scores are operands, so no warpgroup forms them.
    """

    @property
    def roles(self) -> dict[str, int]:
        """Return the number of warpgroups of each role. There is a *carry* for each stripe."""
        return {role: count for role, count in super().roles.items() if role != "score"}

    @property
    def stages(self) -> int:
        """Return the number of chunks in shared memory, other than those of the ring `outputs`."""
        if self.is_adjoint:
            return ADJOINT_STAGES
        return WRITE_STAGES if self.has_write and self.writes_tokens and self.K > 64 else self.STAGES

    @property
    def splits_state(self) -> bool:
        """Return whether the adjoint forms dU from dS' in two terms of bfloat16, for the gradient of beta."""
        return self.is_adjoint and self.K <= SPLIT_KEYS

    @property
    def reads_values(self) -> bool:
        """Return whether the scan reads v, and w if there is one. The adjoint reads v for the gradient of beta or w."""
        return self.kind != "adjoint ends" and not (self.is_adjoint and self.form == "erase")

    @property
    def forms_outputs(self) -> bool:
        """Return whether the scan writes O. *output* then reads Q and P."""
        return self.writes_tokens and not self.is_adjoint

    @property
    def by_stage(self) -> list[str]:
        """Return the names of the operands that have a tile in every stage, other than v and dO."""
        names = ["erasing", "leaving", "inverse", "decay"] + ["beta"] * (not self.has_erase)
        return names + ["queries", "scores"] * self.is_adjoint


class Operands(NamedTuple):
    """Hold references to the operands in global memory. All from `inverse` to `decay` are results of `chunks/pairs.py`. Each
    field's comment has its shape."""

    table: Ref  # [E, 4]: of every segment its batch row, first chunk, number of chunks and sequence
    v: Ref  # [B, T, HV, V]
    d_output: Ref  # [B, T, H, V], for the adjoint; else any array
    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P
    queries: Ref  # [B, chunks, H, C, K]: scale Q e^G
    erasing: Ref  # [B, chunks, H, C, K]: K e^G, or E e^H
    leaving: Ref  # [B, chunks, H, C, K]: K e^{G_last - G}
    decay: Ref  # [B, chunks, H, K]: e^{G_last}
    beta: Ref  # [B, chunks, H, C]; None with an erase vector
    start: Ref  # [E, H, V, K]; any array if segments begin from zero
    w: Ref  # [B, T, H, V]; None where it is beta, or 1


class Results(NamedTuple):
    """Hold references to the results in global memory: the fields of `delta.Results`, and dw as `write`."""

    output: Ref  # [B, T, H, V]: O or dV
    beta: Ref  # [B, chunks, H, V / STRIPE, C]: sums of dX v over a stripe, for the adjoint without an erase vector
    # [B, chunks, H, V, K + C]: S before each chunk and U, or dS' behind it and dX; transposed; with an erase vector dX has two
    # terms, [.., K + 2 C]
    states: Ref
    last: Ref  # [E, H, V, K]; of "transitions" also M, transposed: [E, H, V + K, K]
    write: Ref  # [B, T, H, V]: dw, for the adjoint; None without w

    @classmethod
    def types(cls, w: DeltaKeyScan, B: int, T: int, chunks: int, E: int) -> "Results":
        """Return the shapes and dtypes of the results of plan w. T: the number of rows of the outputs. chunks: the number of
        chunks of a row. E: the number of segments."""
        types = delta.Results.types(w, B, T, chunks, E)
        if w.kind != "adjoint" or not w.has_erase:
            return cls(*types, write=None)
        types = types._replace(states=jax.ShapeDtypeStruct((B, chunks, w.H, w.V, w.K + 2 * C), BF16))
        return cls(*types, write=types.output if w.has_write else None)


class Tiles(NamedTuple):
    """Hold references to the shared memory of a program. The tiles up to `scores` are by stage; if outputs are formed,
    `queries` and `scores` have stages of their own. The others pass from one warpgroup to another."""

    v: Ref  # [stages, stripes, C, STRIPE]
    d_output: Ref  # [stages, C, STRIPE]
    erasing: Ref  # [stages, C, K]
    leaving: Ref  # [stages, C, K]
    inverse: Ref  # [stages, C, C]
    decay: Ref  # [stages, K]
    beta: Ref  # [stages, C]; None with an erase vector
    queries: Ref  # [stages or OUTPUT_STAGES, C, K]
    scores: Ref  # [stages or OUTPUT_STAGES, C, C]: P, and then O
    state: Ref  # [STRIPE, K]: S or dS', transposed
    tokens: Ref  # [STRIPE, C]: U or dX, transposed
    lost: Ref  # [STRIPE, C]: what dX loses in bfloat16
    output: Ref  # [C, STRIPE]: dV
    w: Ref  # [stages, stripes, C, STRIPE]; None without w
    write: Ref  # [C, STRIPE]: dw; None without w

    @classmethod
    def types(cls, w: DeltaKeyScan) -> "Tiles":
        """Return the types of the tiles of plan w, from which a launch allocates shared memory."""
        n, K, unused = w.stages, w.K, tiled(8, 64)
        unused_stages = tiled(1, 8, 64)
        of_queries = n if w.is_adjoint else OUTPUT_STAGES
        return cls(
            v=tiled(n, w.stripes, C, STRIPE) if w.reads_values else tiled(1, 1, 8, 64),
            d_output=tiled(n, C, STRIPE) if w.is_adjoint else unused_stages,
            erasing=tiled(n, C, K),
            leaving=tiled(n, C, K),
            inverse=tiled(n, C, C),
            decay=plgpu.SMEM((n, K), jnp.float32),
            beta=None if w.has_erase else plgpu.SMEM((n, C), jnp.float32),
            queries=tiled(of_queries, C, K) if w.reads_queries else unused_stages,
            scores=tiled(of_queries, C, C) if w.reads_queries else unused_stages,
            state=tiled(STRIPE, K) if w.has_results else unused,
            tokens=tiled(STRIPE, C) if w.has_results else unused,
            lost=tiled(STRIPE, C) if w.kind == "adjoint" else unused,
            output=tiled(C, STRIPE) if w.kind == "adjoint" else unused,
            w=tiled(n, w.stripes, C, STRIPE) if w.has_write and w.reads_values else None,
            write=tiled(C, STRIPE) if w.has_write and w.kind == "adjoint" else None,
        )


@dataclasses.dataclass(frozen=True)
class DeltaKeyPipeline(Pipeline):
    """Hold the barriers between the roles of the kernel.

    chunks: the ring of the tiles of a chunk that *carry* reads. outputs: the ring of Q and P, if outputs are formed. state: the
    handoff of S before a chunk, or of dS' behind it. written: the handoff of U or dX.
    """

    chunks: Ring
    outputs: Ring
    state: Handoff
    written: Handoff

    @classmethod
    def planned(cls, w: DeltaKeyScan) -> "DeltaKeyPipeline":
        """Build the pipeline for plan w. Its barriers are allocated at launch."""
        of_values = ("v", *("w",) * w.has_write) * (w.stripes * w.reads_values)
        copies = *w.by_stage, *of_values, *("d_output",) * w.is_adjoint
        # *output* multiplies dX by v, and by beta or w
        readers = "carry", *("output",) * (w.kind == "adjoint" and w.reads_values)
        outputs = Ring(OUTPUT_STAGES, ("load",), ("output",) * w.forms_outputs, ("queries", "scores"), ("output",))
        handed = Handoff(("carry",), ("output",))
        return cls(Ring(w.stages, ("load",), readers, copies), outputs, handed, handed)


@dataclasses.dataclass(frozen=True)
class Program(delta.Program):
    """Hold the plan and the references of one program, with the classes of this file.

    The functions of this file take `step`, `slot` and `me` as those of `scan/delta.py`: the number of a chunk in scan order,
    the stage that holds the chunk, and the index of the *carry* warpgroup and its stripe.
    """

    plan: Any
    operands: Any
    results: Any
    tiles: Any
    pipeline: Any

    def along(self, tile, shape):
        """Load n numbers from shared memory, and return them repeated over the rows of `shape`, [STRIPE, n]."""
        return by_column(plgpu.load(tile, layout=BY_COLUMN, optimized=False), shape)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_key_scan(w: DeltaKeyScan, rows: int, *operands) -> Results:
    """Scan every segment of `table`, and return the results of plan w. rows: the number of rows of the outputs. operands: the
    fields of `Operands`."""
    x = Operands(*operands)

    def body(operands, *refs):
        p = Program(w, operands, None, *refs)
        work = dict(carry=carry_state, output=write_results, load=load_chunks)
        by_role(w.roles, {role: functools.partial(run, p) for role, run in work.items()})

    B, chunks = x.inverse.shape[:2]
    E = x.table.shape[0]
    return launch(
        "delta_key_" + w.kind.replace(" ", "_"),
        w,
        body,
        x,
        Results.types(w, B, rows, chunks, E),
        (Tiles.types(w),),
        w.roles,
        DeltaKeyPipeline.planned(w),
        programs=w.columns // (STRIPE * w.stripes) * w.H * E,
    )


def load_chunks(p: Program):
    """Do the work of the role *load*: load every chunk as soon as a stage is free."""
    w, x, t, pipe = p.plan, p.operands, p.tiles, p.pipeline
    p.take_registers("load")
    staged = [(getattr(x, name), getattr(t, name)) for name in w.by_stage]

    @pl.loop(0, p.count())
    def _(step):
        slot, chunk = p.slot(step), (p.field(0), p.chunk(step))
        pipe.chunks.acquire(slot, step)
        for source, tile in staged:
            pipe.chunks.copy(source.at[(*chunk, p.head)], tile.at[slot], slot)
        rows, head = pl.ds(p.chunk(step) * C, C), quotient(p.head, w.H // x.v.shape[2])
        for me in range(w.stripes if w.reads_values else 0):
            # The columns of M read any v, of which they write nothing.
            columns = pl.ds(remainder(p.stripe_index(me), w.V // STRIPE) * STRIPE, STRIPE)
            pipe.chunks.copy(x.v.at[p.field(0), rows, head, columns], t.v.at[slot, me], slot)
            if w.has_write:
                pipe.chunks.copy(x.w.at[p.field(0), rows, p.head, columns], t.w.at[slot, me], slot)
        if w.is_adjoint:
            head = quotient(p.head, w.H // x.d_output.shape[2])
            pipe.chunks.copy(x.d_output.at[p.field(0), rows, head, p.stripe()], t.d_output.at[slot], slot)
        if w.forms_outputs:
            slot = pipe.outputs.slot(step)
            pipe.outputs.acquire(slot, step)
            for source, tile in ((x.queries, t.queries), (x.scores, t.scores)):
                pipe.outputs.copy(source.at[(*chunk, p.head)], tile.at[slot], slot)


def carry_state(p: Program, me=0):
    """Do the work of the role *carry*: carry S or dS through all chunks, transposed, [STRIPE, K] in registers, and write the
    last to global memory."""
    p.take_registers("carry")
    advance = functools.partial(back if p.plan.is_adjoint else onward, p, me)
    p.results.last[p.place()[2], p.head, p.stripe(me), :] = lax.fori_loop(0, p.count(), advance, starting_state(p, me))


def onward(p: Program, me, step, S):
    """Return S' [STRIPE, K] behind a step's chunk from S before it, both float32 in registers. Store S and U for *output*."""
    t, slot = p.tiles, p.slot(step)
    p.pipeline.chunks.wait(slot)
    before, through = S.astype(BF16), decayed(p, slot, S)

    def of_state(by_keys):
        plgpu.wgmma(by_keys, before, transposed(t.erasing.at[slot]))
        store_state(p, me, step, before)
        given = read(transposed(t.v.at[slot, me]))
        beta = None if p.plan.has_erase else p.along(t.beta.at[slot], TOKENS)
        if p.plan.has_write:
            given *= read(transposed(t.w.at[slot, me]))
        if p.plan.kind == "transitions":
            given = jnp.where(p.column(me, TOKENS) < p.plan.V, given, 0.0)
        X = given - after(by_keys)
        return X if beta is None else X * beta

    X = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))
    U = tiles.added(X, (X.astype(BF16), transposed(t.inverse.at[slot])))

    def of_tokens(state):
        plgpu.wgmma(state, U.astype(BF16), t.leaving.at[slot])
        store_tokens(p, me, step, U)

    S = pl.run_state(of_tokens)(plgpu.ACC.init(through))
    p.pipeline.chunks.release(slot)
    return S


def back(p: Program, me, step, dS):
    """Return dS [STRIPE, K] before a step's chunk from dS' behind it, both float32 in registers. Store dS' and dX for *output*.

    The argument dS is dS'.
    """
    t, slot = p.tiles, p.slot(step)
    p.pipeline.chunks.wait(slot)
    (behind, *rest), through = terms_of_state(p, dS), decayed(p, slot, dS)
    d_output = plgpu.load(transposed(t.d_output.at[slot]), layout=tiles.WGMMA)

    def of_state(by_keys):
        for term in (behind, *rest):
            plgpu.wgmma(by_keys, term, transposed(t.leaving.at[slot]))
        plgpu.wgmma(by_keys, d_output, t.scores.at[slot])
        store_state(p, me, step, behind)
        return after(by_keys)

    dU = pl.run_scoped(of_state, plgpu.ACC(TOKENS, jnp.float32))

    def of_tokens(totals):
        by_inverse, state = totals
        plgpu.wgmma(by_inverse, dU.astype(BF16), t.inverse.at[slot])
        plgpu.wgmma(state, d_output, t.queries.at[slot])
        erasing = None if p.plan.has_erase else -p.along(t.beta.at[slot], TOKENS)
        dX = after(by_inverse, 1)
        plgpu.wgmma(state, (-dX if erasing is None else dX * erasing).astype(BF16), t.erasing.at[slot])
        store_tokens(p, me, step, dX)

    _, dS = pl.run_state(of_tokens)((plgpu.ACC.init(dU), plgpu.ACC.init(through)))
    p.pipeline.chunks.release(slot)
    return dS


def terms_of_state(p: Program, dS) -> tuple:
    """Return dS [STRIPE, K] as a tuple of one or two bfloat16 terms, two if `DeltaKeyScan.splits_state`.

    The gradient of beta sums dX v over V, and the terms of that sum may nearly cancel.
    """
    if not p.plan.splits_state:
        return (dS.astype(BF16),)
    high = rounded_part(dS)
    return high.astype(BF16), (dS - high).astype(BF16)


def decayed(p: Program, slot, S):
    """Return e^{G_last} S for the state S [STRIPE, K]. Call this before a product starts: ptxas would wait for the product,
    because a product has written S."""
    return lax.optimization_barrier(S * p.along(p.tiles.decay.at[slot], S.shape))


def write_results(p: Program):
    """Do the work of the role *output*: write the results of all chunks to global memory. Outputs leave through the tile of
    their P."""
    w, t = p.plan, p.tiles
    p.take_registers("output")

    @pl.loop(0, p.count())
    def _(step):
        slot = p.pipeline.outputs.slot(step)
        if w.forms_outputs:
            p.pipeline.outputs.wait(slot)
        p.pipeline.state.wait()
        if w.stores_states:
            plgpu.copy_smem_to_gmem(t.state, p.stored(step, 0, w.K))
        o = tiles.product(VALUES, (t.queries.at[slot], transposed(t.state))) if w.forms_outputs else None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        p.pipeline.state.release()
        p.pipeline.written.wait()
        if w.stores_states:
            plgpu.copy_smem_to_gmem(t.tokens, p.stored(step, w.K, C))
            if w.is_adjoint and w.has_erase:
                plgpu.copy_smem_to_gmem(t.lost, p.stored(step, w.K + C, C))
        if o is not None:
            o = tiles.added(o, (t.scores.at[slot], transposed(t.tokens)))
        elif w.is_adjoint:
            o = gradient_of_values(p, step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        p.pipeline.written.release()
        if o is not None:
            tile = t.output if w.is_adjoint else t.scores.at[slot]
            plgpu.commit_smem()  # all warps have read P
            tile[...] = o.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, p.rows(step, p.results.output))
            if t.write is not None:
                plgpu.copy_smem_to_gmem(t.write, p.rows(step, p.results.write))
        if w.forms_outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            p.pipeline.outputs.release(slot)

    plgpu.wait_smem_to_gmem(0)


def gradient_of_values(p: Program, step):
    """Return dV of a step's chunk, [C, STRIPE] in float32 in registers: beta dX, w dX, or dX without a write gate.

    Also write the sums of dX v to `Results.beta`, or with a write gate store dw = dX v in the tile `write`.
    """
    w, t, slot = p.plan, p.tiles, p.slot(step)
    if not w.reads_values:
        return read(transposed(t.tokens)) + read(transposed(t.lost))
    p.pipeline.chunks.wait(slot)
    dX = read(transposed(t.tokens)) + read(transposed(t.lost))
    products = dX * read(t.v.at[slot, 0])
    if w.has_write:
        t.write[...] = products.astype(BF16)
        dV = dX * read(t.w.at[slot, 0])
    else:
        p.results.beta[p.field(0), p.chunk(step), p.head, p.stripe_index()] = products.sum(1)
        dV = dX * by_row(plgpu.load(t.beta.at[slot], layout=BY_ROW), VALUES)
    p.pipeline.chunks.release(slot)
    return dV
