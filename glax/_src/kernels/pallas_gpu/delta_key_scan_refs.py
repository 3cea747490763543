"""Define the plan of a scan under the delta rule with per-key gates, and what its warpgroups share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu import delta_scan_refs
from glax._src.kernels.pallas_gpu.delta_scan_refs import BF16, STAGES, STRIPE, DeltaScan
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.tiles import BY_COLUMN, by_column, tiled

OUTPUT_STAGES = 2  # chunks of Q and P in shared memory: with STAGES of the other tiles 219 KB of 227 at widths of 128

Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaKeyScan(DeltaScan):
    """Hold the sizes and options that a scan is compiled for. kind: "outputs" or "transitions", as in `DeltaScan`. The scores
    are read, so no warpgroup forms them."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Return what each warpgroup does: carry a stripe of the state, emit outputs, fetch chunks."""
        return ("carry",) * self.stripes + ("emit",) * self.emits + ("fetch",)


class Operands(NamedTuple):
    """Hold the operands, in global memory. All from `inverse` to `decay` are results of `delta_key_pairs`."""

    table: Ref  # [N, 4]: of every sequence its batch row, first chunk, number of chunks and place
    v: Ref  # [B, T, HV, V]
    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P
    queries: Ref  # [B, chunks, H, C, K]: scale Q e^G
    erasing: Ref  # [B, chunks, H, C, K]: K e^G
    leaving: Ref  # [B, chunks, H, C, K]: K e^{G_last - G}
    decay: Ref  # [B, chunks, H, K]: e^{G_last}
    beta: Ref  # [B, chunks, H, C]
    start: Ref  # [N, H, V, K]


class Results(NamedTuple):
    """Hold the results, in global memory. Without outputs `output` has one tile."""

    output: Ref  # [B, T, H, V]: O
    last: Ref  # [N, H, V, K]; of "transitions" also M, transposed: [N, H, V + K, K]

    @classmethod
    def types(cls, w: DeltaKeyScan, B: int, T: int, N: int) -> "Results":
        output = (B, T, w.H, w.V) if w.emits else (1, C, 1, STRIPE)
        return cls(jax.ShapeDtypeStruct(output, BF16), jax.ShapeDtypeStruct((N, w.H, w.columns, w.K), jnp.float32))


class Tiles(NamedTuple):
    """Hold the shared memory. The first six are by stage, and the next two by output stage. The others pass from one warpgroup
    to another."""

    v: Ref  # [STAGES, stripes, C, STRIPE]
    erasing: Ref  # [STAGES, C, K]
    leaving: Ref  # [STAGES, C, K]
    inverse: Ref  # [STAGES, C, C]
    decay: Ref  # [STAGES, K]
    beta: Ref  # [STAGES, C]
    queries: Ref  # [OUTPUT_STAGES, C, K]
    scores: Ref  # [OUTPUT_STAGES, C, C]: P, and then O
    state: Ref  # [STRIPE, K]: S, transposed
    tokens: Ref  # [STRIPE, C]: U, transposed

    @classmethod
    def types(cls, w: DeltaKeyScan) -> "Tiles":
        n, K, unused = STAGES, w.K, tiled(8, 64)
        return cls(
            v=tiled(n, w.stripes, C, STRIPE),
            erasing=tiled(n, C, K),
            leaving=tiled(n, C, K),
            inverse=tiled(n, C, C),
            decay=plgpu.SMEM((n, K), jnp.float32),
            beta=plgpu.SMEM((n, C), jnp.float32),
            queries=tiled(OUTPUT_STAGES, C, K) if w.emits else tiled(1, 8, 64),
            scores=tiled(OUTPUT_STAGES, C, C) if w.emits else tiled(1, 8, 64),
            state=tiled(STRIPE, K) if w.emits else unused,
            tokens=tiled(STRIPE, C) if w.emits else unused,
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
        return cls(
            plgpu.Barrier(num_arrivals=5 + w.stripes, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=w.stripes, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=OUTPUT_STAGES),
            plgpu.Barrier(num_barriers=OUTPUT_STAGES),
            *[plgpu.Barrier()] * 4,
        )


@dataclasses.dataclass(frozen=True)
class Program(delta_scan_refs.Program):
    """Hold the plan and the references of one program: those of this file."""

    operands: Any
    results: Any
    tiles: Any
    barriers: Any

    def output_slot(self, step):
        return lax.rem(step, jnp.int32(OUTPUT_STAGES))

    def along(self, tile, shape):
        """Return numbers [n] in shared memory, repeated over the rows of [STRIPE, n]."""
        return by_column(plgpu.load(tile, layout=BY_COLUMN, optimized=False), shape)
