"""The gradient of every chunk and head from the states at both its ends: who loads, who computes, and in what order.

With S the state before the chunk, dS = dL/dS behind it, M the sum of log gates from the chunk's middle, x = q e^M, y = k e^-M,
A = mask(x y^T), dA = mask(do v^T), S' and dS' the states decayed to the middle:

    dq = scale e^M (do S'^T + dA y)      dk = e^-M (v dS'^T + scale dA^T x)      dv = scale A^T do + y dS'
    dg_t = sum_v e^{G_last} S dS + sum_{i >= t} x_i (do S'^T)_i scale + sum_{j < t} y_j (v dS'^T)_j
           + scale sum_{i >= t} (x_i (dA y)_i - y_i (dA^T x)_i)

The last sum cancels but for the pairs across t: it is formed of the rounded x, y and dA that dq and dk are formed of.

A program walks over chunks and heads. One warpgroup loads them, ahead; two compute, each half of K in dq, dk and dg, and half
of V in dv (for K = V = 64, each its own chunk). Where the gates of a chunk leave the range of e^M and e^-M, they note it, and
a second kernel computes those chunks exactly, in place.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax.kernels.pallas_gpu import gradient_exact, gradient_fast
from glax.kernels.pallas_gpu.gradient_tiles import CHUNK, SWIZZLED, Walk, half, halves, tokens

SLOTS = 2  # chunks in shared memory: one in work, one on its way


@dataclass(frozen=True)
class Sizes:
    B: int
    T: int
    H: int
    D: int  # of keys and of values
    HQ: int
    HK: int
    HV: int
    programs: int
    reverse: bool

    @property
    def chunks(self) -> int:
        return -(-self.T // CHUNK)

    @property
    def team(self) -> int:
        """How many warpgroups share a chunk."""
        return self.D // 64

    @property
    def teams(self) -> int:
        return 2 // self.team

    @property
    def step(self) -> int:
        return self.programs * self.teams

    def place(self, item):
        """Sequence, chunk and head of an item."""
        rest = lax.div(item, self.H)
        return lax.div(rest, self.chunks), lax.rem(rest, self.chunks), lax.rem(item, self.H)

    def items(self, first):
        """How many items are `first`, first + step, ..."""
        total = self.B * self.chunks * self.H
        return lax.div(jnp.maximum(total - first, 0) + (self.step - 1), self.step)


def load(n: Sizes, m: SimpleNamespace):
    """The loading warpgroup."""
    plgpu.set_max_registers(40, action="decrease")
    plgpu.copy_gmem_to_smem(m.halves_g, m.halves, m.halves_full)
    cta = lax.axis_index("cta")

    def load_team(i, t):
        first = cta * n.teams + t
        b, c, h = n.place(first + i * n.step)
        at = t * SLOTS + lax.rem(i, SLOTS)

        @pl.when(i >= SLOTS)
        def _():
            plgpu.barrier_wait(m.tokens_free.at[at])

        heads = [h, *(lax.div(h, n.H // shared) for shared in (n.HQ, n.HK, n.HV)), h]
        sources = (m.g_g, m.q_g, m.k_g, m.v_g, m.do_g)
        for source, target, head in zip(sources, (m.g, m.q, m.k, m.v, m.do), heads):
            for p in range(n.team):
                part = source.at[b, pl.ds(c * CHUNK, CHUNK), head, half(p)]
                plgpu.copy_gmem_to_smem(part, target.at[at, p], m.tokens_full.at[at])

        @pl.when(i >= 1)
        def _():
            plgpu.barrier_wait(m.states_free.at[t])

        plgpu.copy_gmem_to_smem(m.before_g.at[b, c, h], m.S.at[t], m.states_full.at[t])
        plgpu.copy_gmem_to_smem(m.behind_g.at[b, c, h], m.dS.at[t], m.states_full.at[t])

    def step(i, _):
        for t in range(n.teams):
            pl.when(i < n.items(cta * n.teams + t))(lambda t=t: load_team(i, t))
        return ()

    lax.fori_loop(0, n.items(cta * n.teams), step, ())


def at_item(n: Sizes, m: SimpleNamespace, item, slot, slots) -> SimpleNamespace:
    """What a computing warpgroup needs to know of an item: where it is, and its tiles; _w: the half that is its own."""
    wg = lax.axis_index("wg")
    t, w = lax.optimization_barrier((lax.div(wg, n.team), lax.rem(wg, n.team)))
    b, c, h = n.place(item)
    at = t * slots + slot
    tiles = {name: getattr(m, name).at[at] for name in ("q", "k", "v", "g", "do")}
    own = {name + "_w": ref.at[w] for name, ref in tiles.items()}
    place = dict(t=t, w=w, wg=t * n.team + w, b=b, c=c, h=h, at=at, mine=half(w), rows=pl.ds(c * CHUNK, CHUNK))
    scale = m.scale_g[b]
    return SimpleNamespace(**place, **tiles, **own, scale=scale, vector=m.vectors.at[t * n.team + w])


def compute(n: Sizes, m: SimpleNamespace):
    """A computing warpgroup."""
    plgpu.set_max_registers(232, action="increase")
    plgpu.barrier_wait(m.halves_full)
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    t = lax.div(wg, n.team)
    first = cta * n.teams + t
    count = n.items(first)

    def fast(i, worst):
        item = at_item(n, m, first + i * n.step, lax.rem(i, SLOTS), SLOTS)
        plgpu.barrier_wait(m.tokens_full.at[item.at])

        def release():
            """The outputs of the chunk before have left shared memory."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(i >= 1)
            def _():
                plgpu.barrier_arrive(m.tokens_free.at[item.t * SLOTS + lax.rem(i + 1, SLOTS)])

        gradient_fast.chunk(n, m, item, release)
        return ()

    lax.fori_loop(0, count, fast, ())
    plgpu.wait_smem_to_gmem(0)


def compute_far(n: Sizes, m: SimpleNamespace):
    """A warpgroup of the second kernel: of the items that the first would give it, those that are far."""
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    first = cta * n.teams + lax.div(wg, n.team)
    plgpu.copy_gmem_to_smem(m.halves_g, m.halves.at[wg], m.reloaded.at[wg])
    plgpu.barrier_wait(m.reloaded.at[wg])
    m.halves = m.halves.at[wg]

    def step(i, _):
        item = first + i * n.step
        b, c, h = n.place(item)
        pl.when(m.far_g[b, c, h] != 0)(lambda: gradient_exact.chunk(n, m, at_item(n, m, item, 0, 1)))
        return ()

    @pl.when(m.any_far_g[first] != 0)
    def _():
        lax.fori_loop(0, n.items(first), step, ())


def gradient_key(q, k, v, g, d_output, scale, before, behind, *, reverse: bool, programs: int, interpret=None):
    """dq, dk, dv, dg per head, [B, T, H, K] and V; d_scale, [B, H, chunks].

    q, k, v, d_output, g [B, T, H, K or V], bfloat16, q, k and v of as many heads as divide g's; scale [B] float32.
    before, behind [B, chunks, H, K, V], bfloat16: the state that enters each chunk in walking order, and the gradient in the
    state that leaves it. T a multiple of 8; K = V = 64 or 128.
    """
    B, T, H, D = g.shape
    n = Sizes(B, T, H, D, q.shape[2], k.shape[2], v.shape[2], programs, reverse)
    inputs = dict(q=q, k=k, v=v, g=g, do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(halves=halves(reverse), tokens=tokens(reverse))
    out = jax.ShapeDtypeStruct
    rows = out((B, n.chunks, H, n.team, CHUNK), jnp.float32)
    outputs = {name: out((B, T, H, D), jnp.bfloat16) for name in ("dq", "dk", "dv", "dg")} | dict(used=rows)

    def body(m):
        wg = lax.axis_index("wg")
        pl.when(wg == 2)(lambda: load(n, m))
        pl.when(wg < 2)(lambda: compute(n, m))

    options = dict(interpret=interpret, reverse=reverse, programs=programs)
    found = launch(body, inputs, outputs | dict(fits=rows), {}, scratch(n, SLOTS), threads=3, **options)
    far = jnp.any(found.pop() < 1.0, axis=(3, 4)).astype(jnp.int32)
    by_program = jnp.pad(far.reshape(-1), (0, -far.size % n.step)).reshape(-1, n.step).max(0)
    refs = {name: jax.new_ref(x) for name, x in zip(outputs, found)}
    launch(
        lambda m: compute_far(n, m),
        inputs | dict(far=far, any_far=by_program),
        {},
        refs,
        scratch(n, 1),
        threads=2,
        **options,
    )
    *gradients, used = (ref[...] for ref in refs.values())
    return *gradients, used.sum((3, 4)).swapaxes(1, 2)


def scratch(n: Sizes, slots: int) -> dict:
    def bf16(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    def barrier(arrivals, count):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    found = {name: bf16(n.teams * slots, n.team, CHUNK, 64) for name in ("q", "k", "v", "g", "do")}
    found |= {name: bf16(n.teams, n.D, n.D) for name in ("S", "dS")}
    found |= dict(vectors=plgpu.SMEM((2, 2, 64), jnp.float32))
    found |= dict(meet_scaled=barrier(n.team, n.teams), meet_done=barrier(n.team, n.teams))
    if slots == 1:
        return found | dict(halves=bf16(2, 8, 64), left=bf16(2, CHUNK, 64), reloaded=barrier(1, 2))
    found |= dict(halves=bf16(8, 64), halves_full=plgpu.Barrier())
    found |= dict(tokens_full=barrier(5 * n.team, n.teams * slots), tokens_free=barrier(n.team, n.teams * slots))
    return found | dict(states_full=barrier(2, n.teams), states_free=barrier(n.team, n.teams))


def launch(
    body, inputs: dict, outputs: dict, refs: dict, scratch: dict, *, threads, programs, reverse, interpret
) -> list:
    """body(memory) in every warpgroup; inputs, outputs and what `refs` hold by name and "_g", scratch by name."""
    names = [*(f"{name}_g" for name in [*inputs, *refs, *outputs]), *scratch]

    def named(*memory):
        m = SimpleNamespace(**dict(zip(names, memory)))
        m.walk = Walk(reverse, m.tokens_g)
        body(m)

    return list(
        plgpu.kernel(
            named,
            out_type=list(outputs.values()),
            grid=(programs,),
            grid_names=("cta",),
            num_threads=threads,
            thread_name="wg",
            scratch_types=list(scratch.values()),
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*inputs.values(), *refs.values())
    )
