"""Define how the gradient's kernels process chunks and heads: which warpgroups load and compute, and what shared memory holds.

A program processes every `step`-th item, a run of chunks of one head. One warpgroup loads the tokens a chunk ahead, and the
states at both ends of a chunk once the states of the chunk before have been read. Only the first chunk of a run has a stored
state before it. Within the run, the computing warpgroups carry that state on.

Two warpgroups compute. With per-key gates each has half of K in dq and dk, and half of V in dv. With per-head gates one has dq
and dv, and the other dk. With K = V = 64 each has its own chunk. Results overwrite the tiles of the tokens. The loading
warpgroup sends them to global memory while the next chunk is computed. It does so after fetching that chunk's states, because
the computing warpgroups wait for these.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, REGISTERS, tiled
from glax._src.kernels.pallas_gpu.gradient.refs import ChunkRefs, GradientRefs
from glax._src.kernels.pallas_gpu.gradient.tiles import (
    CHUNK,
    ScanOrder,
    half,
)
from glax._src.kernels.pallas_gpu.plan import ROWS, WHOLE, Blocks, quotient, remainder

SLOTS = 2  # chunks in shared memory: one in work, one on its way


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes and options that a kernel of the gradient is compiled for.

    H counts the blocks of all heads. A team is the warpgroups that share a chunk, and an item is a run of chunks of one head.
    """

    B: int
    T: int
    H: int
    D: int  # of keys and of values
    HQ: int
    HK: int
    HV: int
    programs: int
    run: int = 1  # chunks from one stored state to the next; divides those of a sequence
    whole: bool = False  # tiles of tokens are [64, D]; else by halves of 128 columns, one after the other
    terms: int = 1  # arrays of bfloat16 of which per-key gates are the sum
    summed: int = 1  # blocks of V over which dq, dk and dg are one sum; the exact form adds them up
    blocks: Blocks = WHOLE  # of which a wide head's state consists; H counts them
    packed: bool = False  # chunks begin at any row of the inputs: `places` has those
    edges: bool = False  # chunks without some tokens are read from copies: `rows.Edges`
    # Marked tokens reset the state (`resets.newest_resets`). A chunk may hold several sequences, so d_scale is by token.
    resets: bool = False

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a sequence."""
        return -(-self.T // CHUNK)

    @property
    def team(self) -> int:
        """Return how many warpgroups share a chunk."""
        return self.D // 64

    @property
    def teams(self) -> int:
        """Return the number of chunks that a program computes side by side."""
        return 2 // self.team

    @property
    def step(self) -> int:
        """Return the number of items from one of a team's items to its next."""
        return self.programs * self.teams

    @property
    def runs(self) -> int:
        """Return the number of runs of a sequence."""
        return self.chunks // self.run

    def place(self, item):
        """Return sequence, run and head of an item."""
        run, h = quotient(item, self.H), remainder(item, self.H)
        return quotient(run, self.runs), remainder(run, self.runs), h

    def items(self, first):
        """Return the number of items `first`, first + step, ..."""
        total = self.B * self.runs * self.H
        return lax.div(jnp.maximum(total - first, 0) + (self.step - 1), self.step)

    def chunk(self, first, i, reverse: bool):
        """Return sequence, run, chunk, head, and index in the run of a team's i-th chunk. `first` is the team's first item."""
        b, run, h = self.place(first + quotient(i, self.run) * self.step)
        j = remainder(i, self.run)
        return b, run, run * self.run + (self.run - 1 - j if reverse else j), h, j

    def rows(self, m: GradientRefs, c) -> slice | pl.Slice:
        """Return the rows of the inputs that a chunk reads."""
        return pl.ds(m.places_g[c, 0] * ROWS if self.packed else c * CHUNK, CHUNK)

    def scale(self, m: GradientRefs, b, c):
        """Return the scale of chunk c of row b. Packed arrays have one scale per chunk."""
        return m.scale_g[c if self.packed else b]

    def parts(self, tile) -> list:
        """Return a tile of tokens in the parts that the copy engine takes, each with its columns."""
        if self.whole:
            return [(tile, slice(None))]
        return [(tile.at[p], half(p)) for p in range(self.team)]

    def heads(self, h) -> dict:
        """Return for each input the head that head h reads, by name."""
        of_keys = dict(q=self.HQ, k=self.HK, g=self.H // self.blocks.columns)
        of_values = dict(v=self.HV, do=self.H // self.blocks.rows)
        found = {name: self.blocks.of_keys(h, self.H, heads) for name, heads in of_keys.items()}
        return found | {name: self.blocks.of_values(h, self.H, heads) for name, heads in of_values.items()}


def load(n: Sizes, m: GradientRefs, tiles, results: dict, late=(), last=()):
    """Run the loading warpgroup.

    tiles: the names of the tiles of tokens; `gates` [64] of a chunk are loaded too, if there are any. results: the tile of each
    result, by name. late: the tiles that are loaded with the states, because the chunk before uses them until then. last: the
    late tiles for which `values_full` waits instead of `tokens_full`.
    """
    cta = lax.axis_index("cta")

    def chunk(i, t):
        return n.chunk(cta * n.teams + t, i, m.scan.reverse)

    def slot(i, t):
        return t * SLOTS + lax.rem(i, SLOTS)

    def fetch(names, i, t):
        (b, _, c, h, _), at = chunk(i, t), slot(i, t)
        heads = n.heads(h)

        def copy(arrays, rows):
            for name in names:
                for part, columns in n.parts(m.tiles[name].at[at]):
                    source = arrays[name].at[b, rows, heads[name], columns]
                    plgpu.copy_gmem_to_smem(source, part, m.values_full.at[t] if name in last else m.tokens_full.at[at])

        if not n.edges:
            copy(m.in_global, n.rows(m, c))
            return
        block = m.edges_g[c]
        pl.when(block < 0)(lambda: copy(m.in_global, n.rows(m, c)))
        pl.when(block >= 0)(lambda: copy(m.edge_copies, pl.ds(block * CHUNK, CHUNK)))

    def begin(i, t):
        """Fetch the tiles that are free."""
        fetch([name for name in tiles if name not in late], i, t)
        if n.resets:
            (b, _, c, _, _), at = chunk(i, t), slot(i, t)
            plgpu.copy_gmem_to_smem(m.marks_g.at[b, c], m.marks.at[at], m.tokens_full.at[at])

    def complete(i, t):
        """Fetch the tiles that become free once the chunk before, or the one before that, has been read."""
        b, run, c, h, j = chunk(i, t)

        @pl.when(i >= 1)
        def _():
            plgpu.barrier_wait(m.states_free.at[t])

        fetch([name for name in late if name not in last], i, t)
        if m.gates is not None:
            plgpu.copy_gmem_to_smem(
                m.gates_g.at[b, c, n.blocks.head(h)], m.gates.at[slot(i, t)], m.tokens_full.at[slot(i, t)]
            )
        if n.terms == 2:
            rest = m.g_rest_g.at[b, n.rows(m, c), n.heads(h)["g"]]
            plgpu.copy_gmem_to_smem(rest, second_term(m, t), m.tokens_full.at[slot(i, t)])
        fetch(last, i, t)
        plgpu.copy_gmem_to_smem(m.behind_g.at[b, c, h], m.dS.at[t], m.behind_full.at[t])
        if n.terms == 2:
            plgpu.barrier_wait(m.gates_read.at[t])

        @pl.when(j == 0)
        def _():
            before_full = m.before_full if n.run > 1 else m.behind_full
            plgpu.copy_gmem_to_smem(m.before_g.at[b, run, h], m.S.at[t], before_full.at[t])

    def send(i, t):
        """Send the results to global memory, as one group."""
        b, _, c, h, _ = chunk(i, t)
        plgpu.barrier_wait(m.ready.at[t])
        for result, name in results.items():
            for part, columns in n.parts(m.tiles[name].at[slot(i, t)]):
                target = m.in_global[result].at[b, pl.ds(c * CHUNK, CHUNK), h, columns]
                plgpu.copy_smem_to_gmem(part, target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    chunks = [n.items(cta * n.teams + t) * n.run for t in range(n.teams)]

    def step(i, _):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for t in range(n.teams):
            pl.when((i >= 2) & (i <= chunks[t]))(lambda t=t: plgpu.barrier_arrive(m.sent.at[t]))
            pl.when(i < chunks[t])(lambda t=t: begin(i, t))
        for t in range(n.teams):
            pl.when(i < chunks[t])(lambda t=t: complete(i, t))
        for t in range(n.teams):
            pl.when((i >= 1) & (i <= chunks[t]))(lambda t=t: send(i - 1, t))
        return ()

    lax.fori_loop(0, chunks[0] + 1, step, ())
    plgpu.wait_smem_to_gmem(0)


def second_term(m: GradientRefs, t):
    """Return the tile of the gates' second term, [64, D]. It lies in the tile of S until sums of gates are formed."""
    return m.S.at[t, pl.ds(0, CHUNK)]


def at_chunk(n: Sizes, m: GradientRefs, tiles, first, i) -> ChunkRefs:
    """Return the references of a computing warpgroup's i-th chunk."""
    wg = lax.axis_index("wg")
    t, w = lax.optimization_barrier((lax.div(wg, n.team), lax.rem(wg, n.team)))
    b, _, c, h, j = n.chunk(first, i, m.scan.reverse)
    at, other = (t * SLOTS + lax.rem(i + ahead, SLOTS) for ahead in (0, 1))
    whole = {name: m.tiles[name].at[at] for name in tiles}
    own = {name + "_w": ref.at[:, half(w)] if n.whole else ref.at[w] for name, ref in whole.items()}

    def again():
        """Return the same references, formed again so that the compiler holds none of them in registers meanwhile."""
        return at_chunk(n, m, tiles, *lax.optimization_barrier((first, i)))

    place = dict(t=t, w=w, wg=t * n.team + w, b=b, c=c, h=h, j=j, at=at, other=other, mine=half(w))
    scan = ScanOrder(m.scan.reverse, m.marks.at[at], resets=True) if n.resets else m.scan
    return ChunkRefs(
        **place, **whole, **own, again=again, scale=n.scale(m, b, c), scan=scan, vector=m.vectors.at[t * n.team + w]
    )


def compute(n: Sizes, m: GradientRefs, tiles, chunk):
    """Run a computing warpgroup: chunk(n, m, refs, release) for each of its chunks."""
    wg = lax.axis_index("wg")
    first = lax.axis_index("cta") * n.teams + lax.div(wg, n.team)
    if m.order is not None:  # many masks: where tokens stand is read from shared memory
        order = m.order.at[wg]
        order[...] = plgpu.load(m.tokens_g, layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
        m = replace(m, scan=ScanOrder(m.scan.reverse, order))

    def step(i, _):
        c = at_chunk(n, m, tiles, first, i)
        plgpu.barrier_wait(m.tokens_full.at[c.at])

        def release():
            """Wait until the results of the chunk before have left shared memory."""
            pl.when(i >= 1)(lambda: plgpu.barrier_wait(m.sent.at[c.t]))

        chunk(n, m, c, release)
        return ()

    lax.fori_loop(0, n.items(first) * n.run, step, ())


def hand_over(m: GradientRefs, c: ChunkRefs):
    """Report to the loading warpgroup that the results are in shared memory."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(m.ready.at[c.t])


def barrier(arrivals, count):
    """Return the type of `count` barriers that wait for `arrivals` each."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def scratch(n: Sizes, tiles, slots: int = 1) -> dict:
    """Return the shared memory of `slots` chunks' tiles and of one chunk's states, the vectors that warpgroups exchange, and
    their barrier."""
    tile = (CHUNK, n.D) if n.whole else (n.team, CHUNK, 64)
    found = {name: tiled(n.teams * slots, *tile) for name in tiles}
    found |= {name: tiled(n.teams, n.D, n.D) for name in ("S", "dS")}
    found |= dict(vectors=plgpu.SMEM((2, 64), jnp.float32))
    return found | dict(met=barrier(n.team, n.teams))


def pipeline(n: Sizes, copies: int, last: int = 0) -> dict:
    """Return the barriers between loading and computing warpgroups. copies: the copies per chunk that `tokens_full` waits for.
    last: those that `values_full` waits for."""
    found = dict(tokens_full=barrier(copies, n.teams * SLOTS), sent=barrier(1, n.teams))
    found |= {name: barrier(n.team, n.teams) for name in ("states_free", "ready")}
    if last:
        found |= dict(values_full=barrier(last, n.teams))
    if n.terms == 2:
        found |= dict(gates_read=barrier(n.team, n.teams))
    if n.run == 1:
        return found | dict(behind_full=barrier(2, n.teams))
    return found | {name: barrier(1, n.teams) for name in ("before_full", "behind_full")}


def meet(n: Sizes, m: GradientRefs, c: ChunkRefs):
    """Wait for all warpgroups that share the chunk. Each then sees what the others have stored.

    One barrier serves every such point, because each barrier that a warpgroup waits for takes registers for its phase.
    """
    plgpu.commit_smem()
    plgpu.barrier_arrive(m.met.at[c.t])
    plgpu.barrier_wait(m.met.at[c.t])


def wait_for_states(n: Sizes, m: GradientRefs, c: ChunkRefs):
    """Wait for S before a run's first chunk, and for dS behind every chunk."""
    plgpu.barrier_wait(m.behind_full.at[c.t])
    if n.run > 1:
        pl.when(c.j == 0)(lambda: plgpu.barrier_wait(m.before_full.at[c.t]))


def launch(
    name: str, n: Sizes, body, inputs: dict, outputs: dict, memory: dict, *, threads, programs, reverse, interpret, over=()
) -> list:  # fmt: skip
    """Return the outputs, as new arrays or written to the arrays `over`. `body` must depend on nothing but `name` and `n`.

    Every warpgroup runs body(m), with inputs, outputs and shared memory as the fields of `GradientRefs`.
    """
    names = [*(f"{name}_g" for name in [*inputs, *outputs]), *memory]

    def named(*found):
        refs = dict(zip(names, found, strict=True))
        body(GradientRefs(ScanOrder(reverse, refs["tokens_g"]), **refs))

    named.__name__ = name  # in profiles
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
    mesh = dict(grid=(programs,), grid_names=("cta",), num_threads=threads, thread_name="wg")
    options: dict[str, Any] = dict(scratch_types=list(memory.values()), interpret=interpret, compiler_params=params)
    kernel = plgpu.kernel(named, out_type=[] if over else list(outputs.values()), **mesh, **options)

    first = len(inputs)  # a cached kernel must not hold a tracer

    def call(*operands):
        refs = [jax.new_ref(x) for x in operands[first:]]
        return kernel(*operands[:first], *refs) or [ref[...] for ref in refs]

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in over or outputs.values()]
    operands = *inputs.values(), *over
    return list(once((name, n, reverse, programs), call, *operands, results=results, is_longest=not over))


def warpgroups(loading, computing):
    """Run `loading` in the third warpgroup, with few registers, and `computing` in the first two, with many."""
    wg = lax.axis_index("wg")

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        loading()

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        computing()
