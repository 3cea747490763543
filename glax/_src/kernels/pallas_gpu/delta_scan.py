"""Scan under the delta rule with per-head gates, for the outputs or for what the gradient reads.

G_i is the sum of a chunk's log gates through token i, and L the sum of all of them. S [K, V] is the state before the chunk. R
and P are those of `delta_pairs`:

    X    = beta (V - e^G K S)
    U    = X + R X                      what the tokens write
    O    = scale e^G Q S + P U
    S'   = e^L S + K^T (e^{L - G} U)

The scan of the adjoint is a reverse scan, from dS' = dL/dS' behind the chunk and dO:

    dU   = e^{L - G} K dS' + P^T dO
    dX   = dU + R^T dU                  dV = beta dX
    dS   = e^L dS' + Q^T (scale e^G dO) - K^T (beta e^G dX)

Everything is computed transposed, [V, tokens] and [V, K], because columns of the state do not depend on each other. A warpgroup
carries 64 columns in registers. Each product reads its operand from the registers that the product before has written, so
nothing passes through shared memory in between. One more warpgroup fetches.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.delta_pairs import split
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import C, place_of, quotient
from glax._src.kernels.pallas_gpu.tiles import BY_COLUMN, after, by_column, read, tiled, transposed, zeros

BF16 = jnp.bfloat16
STRIPE = 64  # columns of the state that a warpgroup carries
TOKENS = (STRIPE, C)

Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaScan:
    """Hold the sizes and options that a scan is compiled for.

    kind: what the scan writes. "outputs": O. "states": S before each chunk and U, for the gradient. "residuals": both.
    "adjoint": dS' behind each chunk, dX and dV, in reverse. H: the number of heads. K, V: the widths of a head. stripes: the
    warpgroups of a program that carry columns, 1 or 2. start: whether sequences begin from given states.
    """

    kind: Literal["outputs", "states", "residuals", "adjoint"]

    H: int
    K: int
    V: int
    reverse: bool
    stripes: int
    start: bool

    @property
    def writes_tokens(self) -> bool:
        """Return whether the scan writes O or dV."""
        return self.kind != "states"

    @property
    def stores_states(self) -> bool:
        """Return whether the scan stores states and what stands beside them."""
        return self.kind != "outputs"

    @property
    def reads_queries(self) -> bool:
        """Return whether the scan reads q and P."""
        return self.kind != "states"

    @property
    def beside(self) -> int:
        """Return the number of columns beside a stored state: U, or dX in two terms, because the gradient of beta needs both."""
        return 2 * C if self.kind == "adjoint" else C

    @property
    def descending(self) -> bool:
        """Return whether the scan goes from the last chunk to the first."""
        return self.reverse != (self.kind == "adjoint")

    @property
    def columns(self) -> int:
        """Return the number of columns of the state in a program."""
        return STRIPE * self.stripes

    @property
    def stages(self) -> int:
        """Return the number of chunks in shared memory: as many as 227 KB hold at widths of 128."""
        if self.stores_states and self.reads_queries and self.stripes == 2:
            return 2
        return 3 if self.reads_queries else 4

    @property
    def last_token(self) -> int:
        """Return the last token of a chunk in the order of the recurrence."""
        return 0 if self.reverse else C - 1


class Operands(NamedTuple):
    """Hold the operands, in global memory."""

    table: Ref  # [N, 4]: of every sequence its batch row, first chunk, number of chunks and place
    q: Ref  # [B, T, HQ, K]
    k: Ref  # [B, T, HK, K]
    v: Ref  # [B, T, HV, V]; dO for the adjoint
    inverse: Ref  # [B, chunks, H, C, C]: R
    scores: Ref  # [B, chunks, H, C, C]: P
    gates: Ref  # [B, chunks, H, C]: sums of log2 gates from where the scan enters the chunk
    beta: Ref  # [B, chunks, H, C]
    scale: Ref  # [N + 1]
    start: Ref  # [N, H, V, K]


class Results(NamedTuple):
    """Hold the results, in global memory. A result that the plan leaves out has one tile."""

    output: Ref  # [B, T, H, V]: O or dV
    states: Ref  # [B, chunks, H, V, K + beside]: S before each chunk and U, or dS' behind it and dX; transposed
    last: Ref  # [N, H, V, K]

    @classmethod
    def types(cls, w: DeltaScan, B: int, T: int, chunks: int, N: int) -> "Results":
        output = (B, T, w.H, w.V) if w.writes_tokens else (1, C, 1, STRIPE)
        states = (B, chunks, w.H, w.V, w.K + w.beside) if w.stores_states else (1, 1, 1, STRIPE, 64)
        return cls(
            jax.ShapeDtypeStruct(output, BF16),
            jax.ShapeDtypeStruct(states, BF16),
            jax.ShapeDtypeStruct((N, w.H, w.V, w.K), jnp.float32),
        )


class Tiles(NamedTuple):
    """Hold the shared memory, by stage. The last two tiles are by warpgroup."""

    q: Ref  # [stages, C, K]
    k: Ref  # [stages, C, K]
    v: Ref  # [stages, C, columns]
    inverse: Ref  # [stages, C, C]
    scores: Ref  # [stages, C, C]
    gates: Ref  # [stages, C]
    beta: Ref  # [stages, C]
    output: Ref  # [stripes, C, STRIPE]
    state: Ref  # [stripes, STRIPE, K + beside]

    @classmethod
    def types(cls, w: DeltaScan) -> "Tiles":
        n, K = w.stages, w.K
        return cls(
            q=tiled(n, C, K) if w.reads_queries else tiled(1, 8, 64),
            k=tiled(n, C, K),
            v=tiled(n, C, w.columns),
            inverse=tiled(n, C, C),
            scores=tiled(n, C, C) if w.reads_queries else tiled(1, 8, 64),
            gates=plgpu.SMEM((n, C), jnp.float32),
            beta=plgpu.SMEM((n, C), jnp.float32),
            output=tiled(w.stripes, C, STRIPE) if w.writes_tokens else tiled(1, 8, 64),
            state=tiled(w.stripes, STRIPE, K + w.beside) if w.stores_states else tiled(1, 8, 64),
        )


class Barriers(NamedTuple):
    """Hold the barriers by stage, each named by what it reports."""

    loaded: Ref
    consumed: Ref

    @classmethod
    def types(cls, w: DeltaScan) -> "Barriers":
        copies = 7 if w.reads_queries else 5
        return cls(
            plgpu.Barrier(num_arrivals=copies, num_barriers=w.stages),
            plgpu.Barrier(num_arrivals=w.stripes, num_barriers=w.stages),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold the plan and the references of one program."""

    plan: DeltaScan
    operands: Operands
    results: Results
    tiles: Tiles
    barriers: Barriers

    def place(self):
        """Return the group of columns, the head and the sequence. They are computed at each use, so that no register holds
        them."""
        w = self.plan
        return place_of(lax.optimization_barrier(lax.axis_index("program")), w.V // w.columns, w.H)

    @property
    def head(self):
        return self.place()[1]

    def field(self, column: int):
        """Return one column of the sequence's row of the table."""
        return self.operands.table[self.place()[2], column]

    def count(self):
        return self.field(2)

    def chunk(self, step):
        """Return the chunk that the scan reaches at a step."""
        first, count = self.field(1), self.count()
        return first + (count - 1 - step if self.plan.descending else step)

    def tokens(self, x, step, head, columns: slice | pl.Slice = slice(None)):
        """Return the rows [C, ...] of one head of x [B, T, heads, ...] at a step."""
        return x.at[self.field(0), pl.ds(self.chunk(step) * C, C), head, columns]

    def stripe(self, me):
        """Return the columns of V that warpgroup `me` carries."""
        return pl.ds((self.place()[0] * self.plan.stripes + me) * STRIPE, STRIPE)

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.plan.stages))


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal scans are lowered once
def delta_scan(w: DeltaScan, rows: int, *operands) -> Results:
    """Scan every sequence of `table`. operands: the fields of `Operands`. rows: the number of rows of the outputs."""
    x = Operands(*operands)
    B, chunks = x.gates.shape[:2]

    def body(*refs):
        *in_global, own, barriers = refs
        count = len(Operands._fields)
        p = Program(w, Operands(*in_global[:count]), Results(*in_global[count:]), own, barriers)
        me = lax.axis_index("warpgroup")
        pl.when(me == w.stripes)(functools.partial(fetch_chunks, p))
        pl.when(me < w.stripes)(functools.partial(carry_stripe, p, me))

    body.__name__ = "delta_scan"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=tuple(Results.types(w, B, rows, chunks, x.table.shape[0])),
        grid=(w.V // w.columns * w.H * x.table.shape[0],),
        grid_names=("program",),
        num_threads=w.stripes + 1,
        thread_name="warpgroup",
        scratch_types=[Tiles.types(w), Barriers.types(w)],
        compiler_params=tiles.PARAMS,
    )
    return Results(*once(("delta_scan", w, rows), kernel, *x))


def fetch_chunks(p: Program):
    """Fetch chunks ahead, as many as shared memory holds."""
    w, x, t = p.plan, p.operands, p.tiles
    if w.stripes > 1:
        plgpu.set_max_registers(40, action="decrease")
    tokens = [(x.k, t.k, slice(None)), (x.v, t.v, pl.ds(p.place()[0] * w.columns, w.columns))]
    pairs = [(x.gates, t.gates), (x.beta, t.beta), (x.inverse, t.inverse)]
    if w.reads_queries:
        tokens.append((x.q, t.q, slice(None)))
        pairs.append((x.scores, t.scores))

    @pl.loop(0, p.count())
    def _(step):
        slot = p.slot(step)
        loaded = p.barriers.loaded.at[slot]
        pl.when(step >= w.stages)(lambda: plgpu.barrier_wait(p.barriers.consumed.at[slot]))
        for source, tile, columns in tokens:
            shared = quotient(p.head, w.H // source.shape[2])
            plgpu.copy_gmem_to_smem(p.tokens(source, step, shared, columns), tile.at[slot], loaded)
        for source, tile in pairs:
            plgpu.copy_gmem_to_smem(source.at[p.field(0), p.chunk(step), p.head], tile.at[slot], loaded)


def along_tokens(ref):
    """Return ref [C], repeated over the rows of [STRIPE, C]."""
    return by_column(ref, TOKENS)


def carry_stripe(p: Program, me):
    """Carry STRIPE columns of the state, transposed, [STRIPE, K], through all chunks."""
    w, x = p.plan, p.operands
    if w.stripes > 1:
        plgpu.set_max_registers(232, action="increase")
    S = zeros((STRIPE, w.K))
    if w.start:
        first = x.start.at[p.place()[2], p.head, p.stripe(me)]
        S = plgpu.load(first, layout=tiles.WGMMA, optimized=False)
    advance = dict(states=write_states, adjoint=write_adjoint).get(w.kind, write_outputs)
    S = lax.fori_loop(0, p.count(), functools.partial(advance, p, me), S)
    plgpu.wait_smem_to_gmem(0)
    p.results.last[p.place()[2], p.head, p.stripe(me), :] = S


def vector(ref):
    """Return ref [C] in the layout of the columns of [STRIPE, C]; see `along_tokens`."""
    return plgpu.load(ref, layout=BY_COLUMN, optimized=False)


def written(p: Program, me, slot, read_by_keys):
    """Return U^T = X^T + X^T R^T of a chunk, with X = beta (V - e^G K S). read_by_keys: (K S)^T; both [STRIPE, C] in float32."""
    t = p.tiles
    beta, within = vector(t.beta.at[slot]), jnp.exp2(vector(t.gates.at[slot]))
    v = read(transposed(t.v.at[slot, :, pl.ds(me * STRIPE, STRIPE)]))
    X = v * along_tokens(beta) - read_by_keys * along_tokens(beta * within)
    return tiles.added(X, (X.astype(BF16), transposed(t.inverse.at[slot])))


def to_edges(p: Program, slot):
    """Return (e^L, e^{L - G} [C])."""
    last = p.tiles.gates[slot, p.plan.last_token]
    return jnp.exp2(last), jnp.exp2(last - vector(p.tiles.gates.at[slot]))


def write_outputs(p: Program, me, step, S):
    """Write the outputs of a chunk, and what the gradient reads if the plan stores it; return the state behind the chunk."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    before = S.astype(BF16)

    def of_state(by_keys, by_queries):
        plgpu.wgmma(by_keys, before, transposed(t.k.at[slot]))
        plgpu.wgmma(by_queries, before, transposed(t.q.at[slot]))
        U = written(p, me, slot, after(by_keys, 1))
        return U, after(by_queries)

    accumulator = plgpu.ACC(TOKENS, jnp.float32)
    U, o = pl.run_scoped(of_state, accumulator, accumulator)
    within = jnp.exp2(vector(t.gates.at[slot])) * p.operands.scale[p.field(3)]
    through, leaving = to_edges(p, slot)
    o, S = tiles.added_all(
        (o * along_tokens(within), S * through),
        ((U.astype(BF16), transposed(t.scores.at[slot])),),
        (((U * along_tokens(leaving)).astype(BF16), t.k.at[slot]),),
    )
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if p.plan.stores_states:
        send_state(p, me, step, before, U)
    send_tokens(p, me, step, o)
    return S


def write_states(p: Program, me, step, S):
    """Write the state before a chunk and what its tokens write, and return the state behind it."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    before = S.astype(BF16)
    U = written(p, me, slot, tiles.product(TOKENS, (before, transposed(t.k.at[slot]))))
    through, leaving = to_edges(p, slot)
    S = tiles.added(S * through, ((U * along_tokens(leaving)).astype(BF16), t.k.at[slot]))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    send_state(p, me, step, before, U)
    return S


def write_adjoint(p: Program, me, step, dS):
    """Write dS' [STRIPE, K] behind a chunk and dX, and return dS before it."""
    t, slot = p.tiles, p.slot(step)
    plgpu.barrier_wait(p.barriers.loaded.at[slot])
    behind = dS.astype(BF16)
    d_output = transposed(t.v.at[slot, :, pl.ds(me * STRIPE, STRIPE)])

    def of_tokens(by_keys, by_scores):
        plgpu.wgmma(by_keys, behind, transposed(t.k.at[slot]))
        plgpu.wgmma(by_scores, plgpu.load(d_output, layout=tiles.WGMMA), t.scores.at[slot])
        through, leaving = to_edges(p, slot)
        dU = after(by_keys, 1) * along_tokens(leaving)
        return through, dU + after(by_scores)

    accumulator = plgpu.ACC(TOKENS, jnp.float32)
    through, dU = pl.run_scoped(of_tokens, accumulator, accumulator)
    dX = tiles.added(dU, (dU.astype(BF16), t.inverse.at[slot]))
    within = jnp.exp2(vector(t.gates.at[slot]))
    reads = read(d_output) * along_tokens(within * p.operands.scale[p.field(3)])
    erases = dX * along_tokens(-(within * vector(t.beta.at[slot])))
    dS = tiles.added(dS * through, (reads.astype(BF16), t.q.at[slot]), (erases.astype(BF16), t.k.at[slot]))
    dV = dX * along_tokens(vector(t.beta.at[slot]))
    plgpu.barrier_arrive(p.barriers.consumed.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    send_state(p, me, step, behind, dX)
    send_tokens(p, me, step, dV)
    return dS


def send_state(p: Program, me, step, S, x):
    """Send S [STRIPE, K] in bfloat16 and x [STRIPE, C] to the stored states. The caller knows that their tile is free."""
    tile, K = p.tiles.state.at[me], p.plan.K
    tile.at[:, pl.ds(0, K)][...] = S
    terms = split(x) if p.plan.beside > C else (x.astype(BF16),)
    for i, term in enumerate(terms):
        tile.at[:, pl.ds(K + i * C, C)][...] = term
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, p.results.states.at[p.field(0), p.chunk(step), p.head, p.stripe(me)])


def send_tokens(p: Program, me, step, x):
    """Send x [STRIPE, C] to the results by token. The caller knows that its tile is free."""
    tile = p.tiles.output.at[me]
    transposed(tile)[...] = x.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, p.tokens(p.results.output, step, p.head, p.stripe(me)))
