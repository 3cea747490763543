"""Define the plan of a scan under the delta rule with per-key gates, and what its warpgroups share."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, by_column, tiled
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.scan import delta_refs as delta_scan_refs
from glax._src.kernels.pallas_gpu.scan.delta_refs import STAGES, STRIPE, DeltaScan

# Chunks in shared memory: of Q and P for outputs, beside STAGES of the other tiles, 219 KB of 227 at widths of 128; of all
# operands for the adjoint, whose state reads Q and P too, 201 KB.
OUTPUT_STAGES = ADJOINT_STAGES = 2
# The widest keys for which dU is formed from dS' in two terms of bfloat16. 128 spills nothing either, but was not timed.
SPLIT_KEYS = 64

Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaKeyScan(DeltaScan):
    """Hold the sizes and options that a scan is compiled for. kind: as in `DeltaScan`. The scores are read, so no warpgroup forms
    them."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Return what each warpgroup does: carry a stripe of the state, emit results, fetch chunks."""
        return ("carry",) * self.stripes + ("emit",) * self.emits + ("fetch",)

    @property
    def stages(self) -> int:
        """Return the number of chunks in shared memory."""
        return ADJOINT_STAGES if self.is_adjoint else STAGES

    @property
    def splits_state(self) -> bool:
        """Return whether the adjoint forms dU from dS' in two terms of bfloat16."""
        return self.is_adjoint and self.K <= SPLIT_KEYS

    @property
    def forms_outputs(self) -> bool:
        """Return whether the scan writes O. The warpgroup that emits results then reads Q and P."""
        return self.writes_tokens and not self.is_adjoint

    @property
    def by_stage(self) -> list[str]:
        """Return the names of the operands, beside v and dO, that are fetched for every stage."""
        return ["erasing", "leaving", "inverse", "decay", "beta"] + ["queries", "scores"] * self.is_adjoint


class Operands(NamedTuple):
    """Hold the operands, in global memory. All from `inverse` to `decay` are results of `chunks/pairs.py`."""

    table: Ref  # [E, 4]: of every segment its batch row, first chunk, number of chunks and sequence
    v: Ref  # [B, T, HV, V]
    d_output: Ref  # [B, T, H, V], for the adjoint; else any array
    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P
    queries: Ref  # [B, chunks, H, C, K]: scale Q e^G
    erasing: Ref  # [B, chunks, H, C, K]: K e^G
    leaving: Ref  # [B, chunks, H, C, K]: K e^{G_last - G}
    decay: Ref  # [B, chunks, H, K]: e^{G_last}
    beta: Ref  # [B, chunks, H, C]
    start: Ref  # [E, H, V, K]; any array if segments begin from zero


class Tiles(NamedTuple):
    """Hold the shared memory. Those up to `scores` are by stage, and `queries` and `scores` by output stage if they are read for
    outputs. The others pass from one warpgroup to another."""

    v: Ref  # [stages, stripes, C, STRIPE]
    d_output: Ref  # [stages, C, STRIPE]
    erasing: Ref  # [stages, C, K]
    leaving: Ref  # [stages, C, K]
    inverse: Ref  # [stages, C, C]
    decay: Ref  # [stages, K]
    beta: Ref  # [stages, C]
    queries: Ref  # [stages or OUTPUT_STAGES, C, K]
    scores: Ref  # [stages or OUTPUT_STAGES, C, C]: P, and then O
    state: Ref  # [STRIPE, K]: S or dS', transposed
    tokens: Ref  # [STRIPE, C]: U or dX, transposed
    lost: Ref  # [STRIPE, C]: what dX loses in bfloat16
    output: Ref  # [C, STRIPE]: dV

    @classmethod
    def types(cls, w: DeltaKeyScan) -> "Tiles":
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
            beta=plgpu.SMEM((n, C), jnp.float32),
            queries=tiled(of_queries, C, K) if w.reads_queries else unused_stages,
            scores=tiled(of_queries, C, C) if w.reads_queries else unused_stages,
            state=tiled(STRIPE, K) if w.emits else unused,
            tokens=tiled(STRIPE, C) if w.emits else unused,
            lost=tiled(STRIPE, C) if w.kind == "adjoint" else unused,
            output=tiled(C, STRIPE) if w.kind == "adjoint" else unused,
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports. The first two are by stage, the next two by output stage."""

    loaded: Ref
    consumed: Ref
    output_loaded: Ref
    output_consumed: Ref
    state_stored: Ref
    state_read: Ref
    tokens_stored: Ref
    tokens_read: Ref

    @classmethod
    def types(cls, w: DeltaKeyScan) -> "Barriers":
        copies = len(w.by_stage) + w.stripes * w.reads_values + w.is_adjoint
        readers = w.stripes + (w.kind == "adjoint")  # what emits the adjoint reads v and beta
        return cls(
            plgpu.Barrier(num_arrivals=copies, num_barriers=w.stages),
            plgpu.Barrier(num_arrivals=readers, num_barriers=w.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=OUTPUT_STAGES),
            plgpu.Barrier(num_barriers=OUTPUT_STAGES),
            *[plgpu.Barrier()] * 4,
        )


@dataclasses.dataclass(frozen=True)
class Program(delta_scan_refs.Program):
    """Hold the plan and the references of one program: those of this file."""

    plan: Any
    operands: Any
    tiles: Any
    barriers: Any

    def output_slot(self, step):
        return lax.rem(step, jnp.int32(OUTPUT_STAGES))

    def along(self, tile, shape):
        """Return numbers [n] in shared memory, repeated over the rows of [STRIPE, n]."""
        return by_column(plgpu.load(tile, layout=BY_COLUMN, optimized=False), shape)
