"""Define the sizes that the gradient of groups of heads is compiled for, and its references by name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import tiled
from glax._src.kernels.pallas_gpu.plan import Blocks, C, quotient, remainder

STAGES = 2  # buffers of tokens and states in shared memory: one in work, one being loaded
COLUMNS = 64  # columns of v in a unit
QUERY_SIDE, KEY_SIDE, BEFORE, EDGE = range(4)  # rows of `Results.sums`

Ref = Any


@dataclass(frozen=True)
class HeadGroups:
    """Hold the sizes that the kernel is compiled for.

    H counts blocks of heads (`Blocks`), which have all of K. They are called heads here. A unit is one head and 64 of its
    columns, with `pieces` units to a head. An item is one chunk and `members` heads that read the same head of q and the same
    head of k. Items are numbered by (sequence, part of the heads, chunk), and program p has every `programs`-th item from p on.
    run: the chunks from one stored state to the next, 1 or 2; it divides those of a sequence.
    """

    B: int
    T: int
    H: int
    K: int
    pieces: int
    HQ: int
    HK: int
    HV: int
    members: int
    programs: int
    run: int
    reverse: bool
    blocks: Blocks
    edges: bool = False  # chunks without some tokens are read from copies: `rows.Edges`

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a sequence."""
        return -(-self.T // C)

    @property
    def parts(self) -> int:
        """Return the number of parts of the heads, of `members` heads each."""
        return self.H // self.members

    @property
    def units(self) -> int:
        """Return the number of units of an item."""
        return self.members * self.pieces

    @property
    def halves(self) -> int:
        """Return the number of parts of K with 64 columns each."""
        return self.K // 64

    @property
    def last_token(self) -> int:
        """Return the token by which a scan leaves a chunk."""
        return 0 if self.reverse else C - 1

    def items(self, program):
        """Return the number of a program's items."""
        total = self.B * self.parts * self.chunks
        return lax.div(jnp.maximum(total - program, 0) + (self.programs - 1), jnp.int32(self.programs))

    def place(self, item):
        """Return an item's sequence, part of the heads, and chunk."""
        rest, chunk = quotient(item, self.chunks), remainder(item, self.chunks)
        return quotient(rest, self.parts), remainder(rest, self.parts), chunk

    def is_first(self, chunk):
        """Return whether the scan reaches a chunk first of its run of two."""
        return lax.rem(chunk, jnp.int32(2)) == int(self.reverse)


class Operands(NamedTuple):
    """Hold the operands, in global memory. v and d_output have a head for every 64 columns."""

    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV pieces, 64]
    d_output: Ref  # [B, T, H pieces, 64]
    gates: Ref  # [B, chunks, H / blocks, C]: sums of log2 gates from where the scan enters the chunk
    scale: Ref  # [B, chunks]
    before: Ref  # [B, chunks / run, H, K, V]: the state before the first chunk of every run
    behind: Ref  # [B, chunks / run, H, K, V]: dL/dS behind the last chunk of every run
    order: Ref  # [C]: `vjp_tiles.tokens`
    # With edges: `Edges.block`, and the copies of the tokens' arrays.
    edges: Ref = None  # [chunks]
    q_edges: Ref = None  # [B, 3 C, HQ, K]
    k_edges: Ref = None  # [B, 3 C, HK, K]
    v_edges: Ref = None  # [B, 3 C, HV pieces, 64]
    d_output_edges: Ref = None  # [B, 3 C, H pieces, 64]

    @classmethod
    def count(cls, n: HeadGroups) -> int:
        """Return the number of operands that there are for these sizes."""
        return len(cls._fields) - (0 if n.edges else len(cls._field_defaults))


class Results(NamedTuple):
    """Hold the results, in global memory."""

    dq: Ref  # [B, T, parts, K]: of all heads of an item
    dk: Ref  # [B, T, parts, K]
    dv: Ref  # [B, T, H pieces, 64]
    sums: Ref  # [B, chunks, H pieces, 4, C]: see `gradient_groups`

    @classmethod
    def types(cls, n: HeadGroups) -> "Results":
        sums = jax.ShapeDtypeStruct((n.B, n.chunks, n.H * n.pieces, 4, C), jnp.float32)
        each = [(n.parts, n.K), (n.parts, n.K), (n.H * n.pieces, COLUMNS)]
        return cls(*(jax.ShapeDtypeStruct((n.B, n.T, *x), jnp.bfloat16) for x in each), sums)


class Tiles(NamedTuple):
    """Hold the shared memory. `other` tiles belong to the other chunk of a run, from which the state between the two chunks is
    formed."""

    q: Ref  # [1, C, K]
    k: Ref  # [1, C, K]
    other: Ref  # [K / 64, C, 64]: k of the run's first chunk or q of its last, then dq
    v: Ref  # [STAGES, C, 64]
    d_output: Ref  # [STAGES, C, 64]
    other_values: Ref  # [STAGES, C, 64]: v of the run's first chunk or d_output of its last
    states: Ref  # [STAGES 2, K, 64]: S before the chunk, and dL/dS behind it
    gates: Ref  # [STAGES, C]
    other_gates: Ref  # [STAGES, C]
    scores: Ref  # [STAGES, C, C]: (q k^T) D, then dk by halves of K
    scores_rest: Ref  # [STAGES, C, C]: what it loses in bfloat16
    pairs: Ref  # [1, C, C]: q k^T, then the sum of scale dA over the heads
    pairs_rest: Ref  # [1, C, C]: what either loses in bfloat16
    dv: Ref  # [C, 64]
    order: Ref  # [C]

    @classmethod
    def types(cls, n: HeadGroups) -> "Tiles":
        values = tiled(STAGES, C, COLUMNS)
        gates = plgpu.SMEM((STAGES, C), jnp.float32)
        return cls(
            q=tiled(1, C, n.K),
            k=tiled(1, C, n.K),
            other=tiled(n.halves, C, 64),
            v=values,
            d_output=values,
            other_values=values if n.run > 1 else tiled(1, 8, 64),
            states=tiled(STAGES * 2, n.K, COLUMNS),
            gates=gates,
            other_gates=gates,
            scores=tiled(STAGES, C, C),
            scores_rest=tiled(STAGES, C, C),
            pairs=tiled(1, C, C),
            pairs_rest=tiled(1, C, C),
            dv=tiled(C, COLUMNS),
            order=plgpu.SMEM((C,), jnp.int32),
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports."""

    shared_loaded: Ref  # q, k and `other` of an item
    loaded: Ref  # by stage: v, d_output, gates and states of a unit, and what the other chunk has
    consumed: Ref  # by stage: both warpgroups are done with a unit
    met: Ref  # both warpgroups have stored what they exchange
    finished: Ref  # dq and dk of an item have left shared memory

    @classmethod
    def types(cls, n: HeadGroups) -> "Barriers":
        return cls(
            shared_loaded=plgpu.Barrier(num_arrivals=2 + n.halves * (n.run > 1)),
            loaded=plgpu.Barrier(num_arrivals=7 if n.run > 1 else 5, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            met=plgpu.Barrier(num_arrivals=2),
            finished=plgpu.Barrier(num_arrivals=2),
        )


@dataclass(frozen=True)
class Program:
    """Hold the sizes and the references of one program."""

    plan: HeadGroups
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers

    @classmethod
    def of(cls, plan: HeadGroups, *refs) -> "Program":
        """Return the program. refs: operands and results one after the other, then `Tiles` and `Barriers`."""
        *in_global, tiles, barriers = refs
        count = Operands.count(plan)
        return cls(plan, Operands(*in_global[:count]), Results(*in_global[count:]), tiles, barriers)

    def meet(self):
        """Wait for both computing warpgroups: each then sees what the other has stored."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)
