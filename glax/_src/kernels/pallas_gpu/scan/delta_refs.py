"""Define the plan of a scan under the delta rule, and what its warpgroups share: operands, shared memory and barriers."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks.inverse import FACTORS
from glax._src.kernels.pallas_gpu.device.edge_tiles import EdgeCopies
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, by_column, by_row, iota, tiled, transposed
from glax._src.kernels.pallas_gpu.plan import C, place_of

BF16 = jnp.bfloat16
STRIPE = 64  # columns of the state that a warpgroup carries
TOKENS, VALUES = (STRIPE, C), (C, STRIPE)
STAGES, WIDE_STAGES = 3, 2  # chunks in shared memory: as many as 227 KB hold at widths of 128, and of K = 256

Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaScan:
    """Hold the sizes and options that a scan is compiled for.

    kind: what the scan writes beside the last states. "outputs": O. "states": S before each chunk and U, for the gradient.
    "residuals": both. "adjoint": dS' behind each chunk, dX and dV, in reverse. "ends", "adjoint ends", "transitions": nothing.
    The state of "transitions" has K more columns, which begin as I and to which no tokens add. At the end they are the matrix M
    by which S would have been multiplied. H: the number of heads. K, V: the widths of a head. start: whether segments begin from
    given states, else from zero. A sequence that is not cut is one segment.

    Up to K = 128 the state and what tokens write are transposed, and pass from product to product in registers. Wider states
    are [K, V], and products read both sides from shared memory (`scan/delta_wide.py`).
    """

    kind: Literal["outputs", "states", "residuals", "adjoint", "ends", "transitions", "adjoint ends"]
    H: int
    K: int
    V: int
    reverse: bool
    start: bool

    @property
    def is_adjoint(self) -> bool:
        return self.kind in ("adjoint", "adjoint ends")

    @property
    def emits(self) -> bool:
        """Return whether the scan writes more than the last states."""
        return self.kind not in ("ends", "transitions", "adjoint ends")

    @property
    def writes_tokens(self) -> bool:
        """Return whether the scan writes O or dV."""
        return self.kind in ("outputs", "residuals", "adjoint")

    @property
    def reads_queries(self) -> bool:
        """Return whether the scan reads q, and forms P."""
        return self.writes_tokens or self.is_adjoint

    @property
    def reads_values(self) -> bool:
        """Return whether the scan reads v. The adjoint reads it for the gradient of beta."""
        return self.kind != "adjoint ends"

    @property
    def stores_states(self) -> bool:
        """Return whether the scan stores states and what stands beside them."""
        return self.kind in ("states", "residuals", "adjoint")

    @property
    def columns(self) -> int:
        """Return the number of columns of the state, with those of M."""
        return self.V + self.K if self.kind == "transitions" else self.V

    @property
    def wide(self) -> bool:
        """Return whether keys are wider than 128."""
        return self.K > 128

    @property
    def tight(self) -> bool:
        """Return whether shared memory has no room for two stages of R and v, and for dV beside what dX loses."""
        return self.wide and self.kind == "adjoint"

    def upright(self, columns, rows) -> tuple:
        """Return what belongs to the two last axes of a state, in their order in memory: V and K, or K and V in a wide plan."""
        return (rows, columns) if self.wide else (columns, rows)

    @property
    def stages(self) -> int:
        """Return the number of chunks in shared memory."""
        return WIDE_STAGES if self.wide else STAGES

    @property
    def stripes(self) -> int:
        """Return the number of stripes of a program, each carried by a warpgroup where there is no other work."""
        return 2 if self.kind in ("ends", "transitions") and self.columns // STRIPE % 2 == 0 else 1

    @property
    def roles(self) -> tuple[str, ...]:
        """Return what each warpgroup does: carry a stripe of the state, emit results, form scores, fetch chunks."""
        return ("carry",) * self.stripes + ("emit",) * self.emits + ("score",) * self.reads_queries + ("fetch",)

    @property
    def registers(self) -> dict[str, int]:
        """Return the registers of a thread by role. They add up to those that a program is launched with, or fewer."""
        if len(self.roles) == 4:
            return dict(carry=248, emit=112, score=112, fetch=40)
        return dict(carry=232 if self.stripes == 2 else 248, emit=216, score=216, fetch=40)

    @property
    def descending(self) -> bool:
        """Return whether the scan goes from the last chunk to the first."""
        return self.reverse != self.is_adjoint

    @property
    def last_token(self) -> int:
        """Return the last token of a chunk in the order of the recurrence."""
        return 0 if self.reverse else C - 1


class Operands(NamedTuple):
    """Hold the operands, in global memory. E counts the segments of all N sequences."""

    table: Ref  # [E, 4]: of every segment its batch row, first chunk, number of chunks and sequence
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV, V]
    d_output: Ref  # [B, T, H, V], for the adjoint; else any array
    inverse: Ref  # [B, chunks, H, C, C]: R
    factors: Ref  # [B, chunks, H, FACTORS, C]: those of `chunks/inverse.py`
    scale: Ref  # [N + 1]
    start: Ref  # [E, H, V, K], or [E, H, K, V] for a wide plan; any array if segments begin from zero


class Results(NamedTuple):
    """Hold the results, in global memory. A result that the plan leaves out has one tile. In a wide plan the last two axes of
    `states` and `last` are exchanged, and nothing is transposed."""

    output: Ref  # [B, T, H, V]: O or dV
    beta: Ref  # [B, chunks, H, V / STRIPE, C]: sums of dX v over a stripe, for the adjoint
    states: Ref  # [B, chunks, H, V, K + C]: S before each chunk and U, or dS' behind it and dX; transposed
    last: Ref  # [E, H, V, K]; of "transitions" also M, transposed: [E, H, V + K, K]

    @classmethod
    def types(cls, w: DeltaScan, B: int, T: int, chunks: int, E: int) -> "Results":
        output = (B, T, w.H, w.V) if w.writes_tokens else (1, C, 1, STRIPE)
        states = (B, chunks, w.H, *w.upright(w.V, w.K + C)) if w.stores_states else (1, 1, 1, STRIPE, 64)
        return cls(
            jax.ShapeDtypeStruct(output, BF16),
            jax.ShapeDtypeStruct(
                (B, chunks, w.H, w.V // STRIPE, C) if w.kind == "adjoint" else (1,) * 4 + (C,), jnp.float32
            ),
            jax.ShapeDtypeStruct(states, BF16),
            jax.ShapeDtypeStruct((E, w.H, *w.upright(w.columns, w.K)), jnp.float32),
        )


class Tiles(NamedTuple):
    """Hold the shared memory. The first six are by stage. The others pass from one warpgroup to another.

    In a wide plan `state`, `tokens` and `lost` are not transposed, and each stripe has a state. In a tight plan v and inverse
    have one stage, and dV overwrites `lost`.
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

    @classmethod
    def types(cls, w: DeltaScan) -> "Tiles":
        n, K = w.stages, w.K
        single = 1 if w.tight else n
        state = tiled(STRIPE, K) if w.emits else tiled(8, 64)
        return cls(
            q=tiled(n, C, K) if w.reads_queries else tiled(1, 8, 64),
            k=tiled(n, C, K),
            v=tiled(single, w.stripes, C, STRIPE) if w.reads_values else tiled(1, 1, 8, 64),
            d_output=tiled(n, C, STRIPE) if w.is_adjoint else tiled(1, 8, 64),
            inverse=tiled(single, C, C),
            factors=plgpu.SMEM((n, FACTORS, C), jnp.float32),
            state=tiled(w.stripes, K, STRIPE) if w.wide else state,
            tokens=tiled(STRIPE, C) if w.emits else tiled(8, 64),
            lost=tiled(STRIPE, C) if w.kind == "adjoint" else tiled(8, 64),
            scores=tiled(C, C) if w.reads_queries else tiled(8, 64),
            output=tiled(C, STRIPE) if w.writes_tokens and not w.tight else tiled(8, 64),
        )


class Barriers(NamedTuple):
    """Hold the barriers, each named by what it reports. The first two are by stage. Only a tight plan has the last three."""

    loaded: Ref
    consumed: Ref
    state_stored: Ref
    state_read: Ref
    tokens_stored: Ref
    tokens_read: Ref
    scores_stored: Ref
    scores_read: Ref
    values_loaded: Ref = None
    inverse_loaded: Ref = None
    inverse_read: Ref = None

    @classmethod
    def types(cls, w: DeltaScan) -> "Barriers":
        copies = 3 + w.stripes * w.reads_values + w.reads_queries + w.is_adjoint - 2 * w.tight
        # All but the fetching warpgroup. For "states" the emitting one reads no tile either.
        readers = len(w.roles) - 1 - (w.kind == "states")
        return cls(
            plgpu.Barrier(num_arrivals=copies, num_barriers=w.stages),
            plgpu.Barrier(num_arrivals=readers, num_barriers=w.stages),
            *[plgpu.Barrier()] * (9 if w.tight else 6),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program."""

    plan: DeltaScan
    operands: Operands
    edges: EdgeCopies | None
    results: Results
    tiles: Tiles
    barriers: Barriers

    def place(self):
        """Return the first stripe divided by the stripes of a program, the head and the segment. They are computed at each use,
        so that no register holds them."""
        w = self.plan
        return place_of(lax.optimization_barrier(lax.axis_index("program")), w.columns // (STRIPE * w.stripes), w.H)

    @property
    def head(self):
        return self.place()[1]

    def number(self, me=0):
        """Return the number of the stripe that warpgroup `me` carries."""
        return self.place()[0] * self.plan.stripes + me

    def stripe(self, me=0):
        """Return the columns of that stripe."""
        return pl.ds(self.number(me) * STRIPE, STRIPE)

    def column(self, me, shape):
        """Return the column of the state that each row of [STRIPE, ...] stands for, or in a wide plan each column of [...,
        STRIPE]. Those from V on are of M."""
        return iota(shape, int(self.plan.wide)) + self.number(me) * STRIPE

    def field(self, column: int):
        """Return one column of the segment's row of the table."""
        return self.operands.table[self.place()[2], column]

    def count(self):
        """Return the number of chunks of the segment."""
        return self.field(2)

    def chunk(self, step):
        """Return the chunk that the scan reaches at a step."""
        first, count = self.field(1), self.count()
        return first + (count - 1 - step if self.plan.descending else step)

    def output(self, step):
        """Return the place of a chunk's outputs."""
        return self.results.output.at[self.field(0), pl.ds(self.chunk(step) * C, C), self.head, self.stripe()]

    def stored(self, step, first: int, width: int):
        """Return `width` columns of the stored states of a chunk, from `first` on; rows in a wide plan."""
        chunk = self.results.states.at[self.field(0), self.chunk(step), self.head]
        return chunk.at[self.plan.upright(self.stripe(), pl.ds(first, width))]

    def take_registers(self, role: str):
        """Take the registers of a role, or give back those that it does not need."""
        launched = 65536 // (128 * len(self.plan.roles)) // 8 * 8
        count = self.plan.registers[role]
        plgpu.set_max_registers(count, action="increase" if count > launched else "decrease")

    def slot(self, step):
        """Return the stage that holds the chunk of a step."""
        return lax.rem(step, jnp.int32(self.plan.stages))

    def values(self, slot, me=0):
        """Return the tile of v of a slot."""
        return self.tiles.v.at[0 if self.plan.tight else slot, me]

    def inverse(self, slot):
        """Return the tile of R of a slot."""
        return self.tiles.inverse.at[0 if self.plan.tight else slot]

    def state(self):
        """Return the tile of the state that the warpgroup for results reads."""
        if not self.plan.wide:
            return self.tiles.state
        # Behind a barrier of the compiler, which would otherwise hold the addresses of all its parts throughout a loop.
        return self.tiles.state.at[lax.optimization_barrier(jnp.int32(0))]

    def by_rows(self, tile):
        """Return a tile of the state or of tokens as [K or C, STRIPE]."""
        return tile if self.plan.wide else transposed(tile)

    def scale(self):
        """Return the scale of the sequence."""
        return self.operands.scale[self.field(3)]

    def factor(self, slot, row: int):
        """Return a row of factors [C], repeated over the rows of [STRIPE, C]."""
        found = plgpu.load(self.tiles.factors.at[slot, row], layout=BY_COLUMN, optimized=False)
        return by_column(found, TOKENS)

    def row_factor(self, slot, row: int):
        """Return a row of factors [C], by row of a matrix."""
        return plgpu.load(self.tiles.factors.at[slot, row], layout=BY_ROW)

    def factor_by_row(self, slot, row: int):
        """Return a row of factors [C], repeated over the columns of [C, STRIPE]."""
        return by_row(self.row_factor(slot, row), VALUES)
