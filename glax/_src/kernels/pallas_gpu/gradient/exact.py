"""Compute the gradient of chunks whose per-key gates are out of range for `gradient_key`, token by token in scan order:

    S_t = e^{g_t} S_{t-1} + k_t v_t^T                    dq_t = scale S_t do_t
    G_t = e^{g_{t+1}} G_{t+1} + scale q_t do_t^T         dk_t = G_t v_t,  dv_t = G_t^T k_t
    dg_t = <S_t, G_t> - k_t dk_t = dg_{t+1} + q_t dq'_t - k_t dk'_t

S is the state before the chunk and G = dL/dS behind it, both without scaling. dq' and dk' exclude the token's own terms, scale
(do_t . v_t) k_t and scale (do_t . v_t) q_t. These terms cancel in dg, which may be smaller than them by a factor of e^g. The
sums are float32, and no tensor core multiplies. The only exponents are gates, so the gradient is exact for all gates, and the
kernel is quick to compile. It is for gates that are rare.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, WGMMA, by_column, by_row, read, zeros
from glax._src.kernels.pallas_gpu.gradient.tiles import CHUNK, exp, half
from glax._src.kernels.pallas_gpu.plan import quotient, remainder

# [64 of K, V]: a thread has 4 rows of every eighth pair of columns, so that a sum over V takes 3 exchanges of 4 numbers.
ROWS = plgpu.Layout.TILED(
    Tiling(((64, 16), (16, 16), (4, 16), (4, 2))), warp_dims=(-8,), lane_dims=(-6, -3), vector_dim=-1
)
# [K, 64]: a thread has 8 of 64 rows, read together, of 4 columns: a sum over K takes 3 exchanges of 4 numbers.
STATE = plgpu.Layout.TILED(Tiling(((64, 64), (64, 16), (8, 4))), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1)
OF_K, OF_V = STATE.reduce(1), STATE.reduce(0)
OF_ROW, OF_COLUMN = ROWS.reduce(1), ROWS.reduce(0)


def programs(n) -> int:
    """Return the number of programs: two warpgroups for each multiprocessor. Each has half of K in dq, dk and dg, and half of
    V in dv."""
    return 2 * n.programs


def scratch(n) -> dict:
    """Return the shared memory of a program by name: the tokens of a chunk, [64, D] in bfloat16, and q dq / scale by token."""
    names = ("q", "k", "v", "g", "do", "g_rest")[: 4 + n.terms]
    tiles: dict[str, Any] = {name: plgpu.SMEM((CHUNK, n.D), jnp.bfloat16) for name in names}
    if n.resets:
        tiles |= dict(marks=plgpu.SMEM((CHUNK,), jnp.int32))
    return tiles | dict(drawn=plgpu.SMEM((CHUNK, 64), jnp.float32), full=plgpu.Barrier(num_arrivals=len(names)))


def scan_program(n, m):
    """Compute those of the program's items that are out of range. The items are distributed as if all were out of range."""
    first, step, heads = lax.axis_index("cta"), programs(n), n.H // n.summed
    parts = n.team * n.B * n.chunks * heads

    @pl.when(m.any_out_of_range_g[first] != 0)
    def _():
        @pl.loop(first, parts, step=step)
        def _(part):
            item, part = lax.div(part, n.team), lax.rem(part, n.team)
            rest, head = quotient(item, heads), remainder(item, heads)
            b, c = quotient(rest, n.chunks), remainder(rest, n.chunks)

            @pl.when(m.out_of_range_g[b, c, head * n.summed] != 0)
            def _():
                def add(column, used):
                    return used + chunk(n, m, Place(b, c, head * n.summed + column, part, head, column))

                layout = BY_ROW if n.resets else OF_ROW
                m.used_g[b, c, head, part] = lax.fori_loop(0, n.summed, add, zeros((64,), layout))


def by_program(n, out_of_range):
    """Return whether any item of each program is out of range, [programs]. out_of_range: [B, chunks, H]."""
    parts = jnp.repeat(out_of_range[..., :: n.summed].reshape(-1), n.team)
    return jnp.pad(parts, (0, -parts.size % programs(n))).reshape(-1, programs(n)).max(0)


def clear_foreign(n, m, c, names):
    """Zero the rows of tiles that do not belong to the chunk's sequence. They belong to another sequence, or may hold NaN."""
    first, end, layout = m.places_g[c, 1], m.places_g[c, 2], plgpu.Layout.WG_STRIDED((CHUNK, n.D), vec_size=8)

    @pl.when((first > 0) | (end < CHUNK))
    def _():
        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, n.D), 0, layout=layout)
        for tile in (m.tiles[name] for name in names):
            x = plgpu.load(tile, layout=layout)
            tile[...] = jnp.where((row >= first) & (row < end), x, jnp.bfloat16(0))
        plgpu.commit_smem()


class Place(NamedTuple):
    """Hold the place of a chunk, b and c, the block h of the state, and the half `part` of the block that is computed.

    The results are the `column`-th term of a sum over blocks of V, and belong to block `head` of K.
    """

    b: Any
    c: Any
    h: Any
    part: Any
    head: Any
    column: Any


def chunk(n, m, at: Place):
    """Store one block's dv, and its dq, dk and dg added to those of the blocks before. Return q dq / scale, [64]: summed over
    tokens, by channel, or with `n.resets` summed over channels, by token."""
    b, c, h, part, head, column = at
    mine, scale = half(part), n.scale(m, b, c)
    plgpu.commit_smem()  # all are done with the tiles
    heads = n.heads(h)
    heads |= dict(g_rest=heads["g"]) if n.terms == 2 else {}
    for name, index in heads.items():
        source = m.in_global[name].at[b, n.rows(m, c), index]
        plgpu.copy_gmem_to_smem(source, m.tiles[name], m.full)
    if n.resets:
        m.marks[...] = plgpu.load(m.marks_g.at[b, c], layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
    plgpu.barrier_wait(m.full)
    if n.packed:
        clear_foreign(n, m, c, heads)

    def place(i):
        """Return the row of the chunk's i-th token in scan order."""
        return CHUNK - 1 - i if m.scan.reverse else i

    def stored(name, place):
        """Return what the blocks before have added to a result."""
        return plgpu.load(m.in_global[name].at[place], layout=OF_ROW, optimized=False).astype(jnp.float32)

    def store(row, **found):
        @pl.when(c * CHUNK + row < n.T)
        def _():
            for name, x in found.items():
                place = b, c * CHUNK + row, h if name == "dv" else head, mine
                if n.summed > 1 and name != "dv":
                    x = x + lax.cond(column > 0, functools.partial(stored, name, place), lambda: zeros((64,), OF_ROW))
                m.in_global[name][place] = x.astype(jnp.bfloat16)

    shape = (64, n.D)

    def rows(name, row):
        return read(m.tiles[name].at[row, mine], OF_ROW)

    def gate(row, rows=rows):
        """Return the log gates of a token, summed over their terms."""
        g = rows("g", row)
        return g if n.terms == 1 else g + rows("g_rest", row)

    def passed(i, x):
        """Return x, which passes to the i-th token in scan order from the one before or back, or 0 if the token is a reset."""
        return x * ((m.marks[place(i)] & 255) != i + 1).astype(jnp.float32) if n.resets else x

    def columns(name, row):
        return read(m.tiles[name].at[row], OF_COLUMN)

    def own(row):
        """Return do . v of a token, repeated for every row, so that the sum stays within a warp."""
        return jnp.sum(plgpu.layout_cast(by_column(columns("do", row) * columns("v", row), shape), ROWS), axis=1)

    def state(ref):
        return plgpu.load(ref.at[b, c, h, mine], layout=ROWS, optimized=False).astype(jnp.float32)

    def forward(i, carry):
        S, used = carry
        row = place(i)
        S = S * by_row(passed(i, exp(gate(row))), shape)
        drawn = jnp.sum(S * by_column(columns("do", row), shape), axis=1)
        m.drawn[row] = drawn * rows("q", row)
        drawn += own(row) * rows("k", row)
        S += by_row(rows("k", row), shape) * by_column(columns("v", row), shape)
        store(row, dq=scale * drawn)
        return S, used + drawn * rows("q", row)

    S, used = lax.fori_loop(0, CHUNK, forward, (state(m.before_g), zeros((64,), OF_ROW)))
    G = state(m.behind_g)
    plgpu.commit_smem()
    if n.resets:
        used = used_by_token(n, m, mine)

    def backward(i, carry):
        G, dg = carry
        at = CHUNK - 1 - i
        row = place(at)
        dk = jnp.sum(G * by_column(columns("v", row), shape), axis=1)
        dg += scale * plgpu.load(m.drawn.at[row], layout=OF_ROW) - rows("k", row) * dk
        G += by_row(scale * rows("q", row), shape) * by_column(columns("do", row), shape)
        dg = passed(at, dg)
        store(row, dk=dk + own(row) * scale * rows("q", row), dg=dg)
        return G * by_row(passed(at, exp(gate(row))), shape), dg

    lax.fori_loop(0, CHUNK, backward, (G, jnp.sum(S * G, axis=1)))

    def of_keys(name, row):
        return read(m.tiles[name].at[row], OF_K)

    def values(i, G):
        at = CHUNK - 1 - i
        row = place(at)
        q, k, g = of_keys("q", row), of_keys("k", row), gate(row, of_keys)
        G += by_row(scale * q, G.shape) * by_column(read(m.do.at[row, mine], OF_V), G.shape)
        store(row, dv=jnp.sum(G * by_row(k, G.shape), axis=0))
        return G * by_row(passed(at, exp(g)), G.shape)

    G = plgpu.load(m.behind_g.at[b, c, h, :, mine], layout=STATE, optimized=False).astype(jnp.float32)
    lax.fori_loop(0, CHUNK, values, G)
    return used


def used_by_token(n, m, mine):
    """Return q dq / scale of every token, summed over the channels `mine`: what `drawn` holds, and the token's own term."""

    def tile(ref):
        return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)

    own = sum((tile(m.do.at[:, half(part)]) * tile(m.v.at[:, half(part)])).sum(1) for part in range(n.team))
    return tile(m.drawn).sum(1) + own * (tile(m.q.at[:, mine]) * tile(m.k.at[:, mine])).sum(1)
