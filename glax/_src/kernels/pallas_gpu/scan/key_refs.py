"""Define the references of the per-key-gate scan: operands and results in global memory, tiles and barriers in shared memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import tiled
from glax._src.kernels.pallas_gpu.plan import C, Scan, quotient, remainder

EXACT_GROUPS = 256  # of chunks and heads: each group has programs of `exact_outputs` of its own
FLAGS = 128  # flags that such a program reads together, one per thread

Ref = Any


def exact_place(groups: int, item):
    """Return the group of a chunk and head, the `item`-th of all, and the index in the group.

    Heads of a chunk lie in different groups, because gates are often out of range in all of them.
    """
    return remainder(item, groups), quotient(item, groups)


class Operands(NamedTuple):
    """Hold the operands of `key_scan`, in global memory."""

    table: Ref  # [E, 4] or [E, H, 5]; [E, 7] or [E, H, 7] of a plan that clears rows
    q: Ref  # [B, T, HQ, K]
    a: Ref  # [B, T, HA, K]
    b: Ref  # [B, T, HB, V]
    gates: tuple[Ref, ...]  # the terms, [B, T, H, K] each
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, K, V]
    known_out_of_range: Ref  # [B, chunks, H]; `scale` where it is not read
    newest: Ref = None  # [B, chunks, C], of a plan with resets: `resets.newest_resets`
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that adds the gradients of the caller's states

    @classmethod
    def of(cls, w: Scan, refs) -> "Operands":
        """Return the operands that the plan has, with which `refs` begins."""
        names = [name for name in cls._fields if name not in cls._field_defaults]
        names += ["newest"] * w.resets + ["behind"] * w.adds_behind
        return cls(**dict(zip(names, refs, strict=False)))

    @property
    def count(self) -> int:
        return sum(x is not None for x in self)


class Results(NamedTuple):
    """Hold the results of `key_scan`, in global memory. A result that the plan leaves out has one tile or one number."""

    o: Ref  # [B, T, H, V]
    states: Ref  # [B, chunks, H, K, V]
    last: Ref  # [N or E, H, K, V]
    log: Ref  # [E, H, K]
    out_of_range: Ref  # [B, chunks, H]: 1 where the gates of a chunk are out of range
    by_group: Ref  # [EXACT_GROUPS, a multiple of FLAGS]: the same at `exact_place`
    behind: Ref = None  # [B, num_behind, H, K, V], of a plan that stores the caller's states

    @classmethod
    def types(cls, w: Scan, B: int, T: int, E: int) -> "Results":
        H, K, chunks = w.H, w.K, -(-T // C)
        flags = -(-B * chunks * H // EXACT_GROUPS)
        by_group = EXACT_GROUPS, -(-flags // FLAGS) * FLAGS
        return cls(
            *w.results(B, T, E),
            log=jax.ShapeDtypeStruct((E, H, K) if w.either else (1,), jnp.float32),
            out_of_range=jax.ShapeDtypeStruct((B, chunks, H) if w.states and not w.to_edge else (1,), jnp.int32),
            by_group=jax.ShapeDtypeStruct(by_group if w.outputs else (1,), jnp.int32),
            behind=w.behind_type(B) if w.stores_behind else None,
        )


class Tiles(NamedTuple):
    """Hold the shared memory. A tile that the plan does not use has the smallest size."""

    q: Ref  # [stages, C, K]: q, then q^, then without a tile of their own the outputs
    a: Ref  # [stages, C, K]: k, then k^
    b: Ref  # [stages, C, columns]: v
    gates: Ref  # [2 terms, C, K]: log gates, then without tiles of its own what q^ lost
    lost: Ref  # [lost_stages, C, K]: what q^ lost when it was rounded
    state: Ref  # [K, columns], or without outputs [state_stages, consumers, K, 64]: S'
    output: Ref  # [C, columns]; None with resets where it is not used
    sums: Ref  # [stages, 2, K]: log decays by channel: of a chunk's first half and its second
    own_scores: Ref  # [stages, scalers, C]: every token's score with itself, by half of K
    halves: Ref  # [C, C]: the matrix that sums gates over each half of a chunk
    weak: Ref  # [1]: 1 where the gates of the program are weak on average
    out_of_range: Ref  # [stages]: 1 where the gates of a chunk are out of range
    newest: Ref = None  # [stages, C], of a plan with resets

    @classmethod
    def types(cls, w: Scan) -> "Tiles":
        K, stages, columns, W = w.K, w.stages, w.columns, w.consumers
        output: Ref = tiled(C, columns) if w.has_output_tile else tiled(8, 64)
        if w.resets and not w.has_output_tile:
            output = None  # `newest` has its place
        return cls(
            q=tiled(stages, C, K) if w.outputs else tiled(1, C, 64),
            a=tiled(stages, C, K),
            b=tiled(stages, C, columns),
            gates=tiled(2 * w.terms, C, K),
            lost=tiled(w.lost_stages, C, K) if w.lost_stages else None,
            state=tiled(K, columns) if w.outputs else tiled(w.state_stages, W, K, 64),
            output=output,
            sums=plgpu.SMEM((stages, 2, K), jnp.float32),
            own_scores=plgpu.SMEM((stages, w.scalers, C), jnp.float32),
            halves=tiled(C, C),
            weak=plgpu.SMEM((1,), jnp.int32),
            out_of_range=plgpu.SMEM((stages,), jnp.int32),
            newest=plgpu.SMEM((stages, C), jnp.int32) if w.resets else None,
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports."""

    loaded: Ref  # by stage: q, a and b of a chunk lie in shared memory
    gates_loaded: Ref  # by slot: and its gates
    scaled: Ref  # by stage: q^, k^, the sums and the own scores are stored
    consumed: Ref  # by stage: all products with k^ and v are done
    gates_consumed: Ref  # by slot: all scalers have summed the gates
    lost_consumed: Ref  # by tile of `lost`: all products with it are done
    scalers_met: Ref  # all scalers are there
    prepared: Ref  # `halves` and `weak` are stored
    state_stored: Ref  # S' lies in shared memory
    state_read: Ref  # all products with S' are done

    @classmethod
    def types(cls, w: Scan) -> "Barriers":
        return cls(
            loaded=plgpu.Barrier(num_arrivals=2 + w.outputs + w.resets, num_barriers=w.stages),
            gates_loaded=plgpu.Barrier(num_arrivals=w.terms, num_barriers=2),
            scaled=plgpu.Barrier(num_arrivals=w.scalers, num_barriers=w.stages),
            consumed=plgpu.Barrier(num_arrivals=w.consumers, num_barriers=w.stages),
            gates_consumed=plgpu.Barrier(num_arrivals=w.scalers, num_barriers=2),
            lost_consumed=plgpu.Barrier(num_barriers=w.lost_stages) if w.lost_stages else None,
            scalers_met=plgpu.Barrier(num_arrivals=w.scalers),
            prepared=plgpu.Barrier(num_arrivals=w.scalers),
            state_stored=plgpu.Barrier(),
            state_read=plgpu.Barrier(),
        )
