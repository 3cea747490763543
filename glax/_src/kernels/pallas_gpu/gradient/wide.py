"""Compute the gradient of every chunk of heads wider than 128 columns, with per-key gates. dq, dk and dg are summed over V on
chip.

The formulas are those of `gradient/key.py`. In these, do S'^T, v dS'^T, do v^T and <S', dS'> are sums over the columns of V. A
program has one chunk of 128 channels of K. It scales q and k once, adds up these sums in registers over steps of 64 columns,
stores the columns of dv at each step, and forms dq, dk and dg behind the last step. q, k and the gates are therefore read once,
and dq, dk and dg are written once. Separate blocks of 128 columns would read and write them once for each block.

One warpgroup loads, a step ahead. Two compute, each with 64 channels. The first also forms do v^T, and the second dv.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN
from glax._src.kernels.pallas_gpu.gradient import exact as vjp_exact
from glax._src.kernels.pallas_gpu.gradient.items import Sizes, launch
from glax._src.kernels.pallas_gpu.gradient.tiles import half, marks, tokens
from glax._src.kernels.pallas_gpu.gradient.wide_item import compute_item
from glax._src.kernels.pallas_gpu.gradient.wide_refs import (
    STAGES,
    Barriers,
    Operands,
    Program,
    Results,
    Tiles,
    WideGradient,
)
from glax._src.kernels.pallas_gpu.plan import Blocks

WIDE_REGISTERS = 40, 232  # of a thread that loads, and of one that computes


def gradient_wide(
    q, k, v, g, d_output, scale, before, behind, out_of_range, *,
    reverse: bool, programs: int, blocks: Blocks, newest=None, interpret=None,
):  # fmt: skip
    """Return dq and dk of every block of K, [B, T, rows, 128]; dv of every block of the state, [B, T, rows * columns, 128]; dg of
    every block of K; all in bfloat16. Return d_scale too, [B, chunks, rows] in float32.

    The arguments are as in `gradient_key`, with blocks of 128 x 128.
    """
    (B, T), H = d_output.shape[:2], behind.shape[2] // blocks.count
    heads = tuple(x.shape[2] for x in (q, k, v))
    n = WideGradient(B, T, H, blocks, heads, programs, len(g), reverse, newest is not None)

    def body(*refs):
        p = Program.of(n, *refs)
        wg = lax.axis_index("wg")
        pl.when(wg == 2)(functools.partial(load, p))
        pl.when(wg < 2)(functools.partial(compute, p, wg))

    body.__name__ = "gradient_wide"  # in profiles
    results = tuple(Results.types(n))
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[Tiles.types(n), Barriers.types(n)],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    order = marks(newest, reverse) if n.resets else tokens(reverse)
    operands = Operands(q, k, v, tuple(g), d_output, scale, before, behind, order)
    leaves = jax.tree.leaves(operands)
    found = Results(*once(("gradient_wide", n), kernel, *leaves, results=results, is_longest=True))
    return exact(n, operands, found, out_of_range, interpret)


def exact(n: WideGradient, operands: Operands, found: Results, out_of_range, interpret):
    """Return the gradient with the chunks that are out of range computed again, token by token."""
    q, k, v, g, d_output, scale, before, behind, order = operands
    H = n.rows * n.blocks.columns
    sizes = Sizes(
        n.B, n.T, H, 128, *n.heads, n.programs, terms=n.terms, blocks=n.blocks, summed=n.blocks.columns, resets=n.resets
    )  # fmt: skip
    inputs = dict(q=q, k=k, v=v, g=g[0], do=d_output, scale=scale, before=before, behind=behind)
    inputs |= dict(tokens=tokens(n.reverse)) | (dict(g_rest=g[1]) if n.terms == 2 else {})
    inputs |= dict(marks=order) if n.resets else {}
    inputs |= dict(out_of_range=out_of_range, any_out_of_range=vjp_exact.by_program(sizes, out_of_range))
    outputs = dict(dq=found.dq, dk=found.dk, dv=found.dv, dg=found.dg, used=found.used)
    options = dict(threads=1, programs=vjp_exact.programs(sizes), reverse=n.reverse, interpret=interpret)
    scan = functools.partial(vjp_exact.scan_program, sizes)
    over = tuple(outputs.values())
    *gradients, used = launch(
        "gradient_exact", sizes, scan, inputs, outputs, vjp_exact.scratch(sizes), over=over, **options
    )
    return *gradients, used.sum(3) if n.resets else used.sum((3, 4))


def load(p: Program):
    """Fetch the tiles of every step as they become free, and q, k and the gates of the next item in between."""
    n = p.plan
    plgpu.set_max_registers(WIDE_REGISTERS[0], action="decrease")
    count = n.count(lax.axis_index("program"))

    fetch_gates(p, 0)
    fetch_keys(p, 0)

    @pl.loop(0, count)
    def _(i):
        @pl.loop(0, n.steps)
        def _(step):
            fetch_step(p, i, step)

            @pl.when((step == 1) & (i > 0))
            def _():
                plgpu.barrier_wait(p.barriers.gates_read)
                fetch_gates(p, i)

            ahead = i + n.slots - 1  # whose keys find their place free next
            pl.when((step == 1) & (ahead > 0) & (ahead < count))(lambda: fetch_keys(p, ahead))


def fetch_keys(p: Program, i):
    """Fetch q and k of the i-th item, once dq and dk of the item that used their tiles have left shared memory."""
    n, slot = p.plan, lax.rem(jnp.int32(i), jnp.int32(p.plan.slots))
    pl.when(i >= n.slots)(lambda: plgpu.barrier_wait(p.barriers.keys_free.at[slot]))
    block, every = p.block(i), n.rows * n.blocks.columns
    for x, heads, tile in zip((p.operands.q, p.operands.k), n.heads[:2], (p.tiles.q, p.tiles.k), strict=True):
        for w in range(2):
            source = x.at[(*p.rows(i), n.blocks.of_keys(block, every, heads), half(w))]
            plgpu.copy_gmem_to_smem(source, tile.at[slot, w], p.barriers.keys_loaded.at[slot])


def fetch_gates(p: Program, i):
    """Fetch the terms of the gates of the i-th item, in halves [C, 64] of the channels, and its resets."""
    if p.plan.resets:
        b, c, _ = p.place(i)
        plgpu.copy_gmem_to_smem(p.operands.tokens.at[b, c], p.tiles.order.at[p.parity(i)], p.barriers.gates_loaded)
    for term in range(p.plan.terms):
        for w in range(2):
            source = p.operands.gates[term].at[(*p.rows(i), p.place(i)[2], half(w))]
            plgpu.copy_gmem_to_smem(source, p.tiles.gates.at[term, w], p.barriers.gates_loaded)


def fetch_step(p: Program, i, step):
    """Fetch the step's columns of v, d_output and both states."""
    n, stage, block = p.plan, p.stage(i, step), p.block(i, step)
    every, columns, loaded = n.rows * n.blocks.columns, p.columns(step), p.barriers.loaded.at[stage]
    pl.when(i * n.steps + step >= STAGES)(lambda: plgpu.barrier_wait(p.barriers.consumed.at[stage]))
    of_v, of_output = (n.blocks.of_values(block, every, heads) for heads in (n.heads[2], n.H * n.blocks.columns))
    plgpu.copy_gmem_to_smem(p.operands.v.at[(*p.rows(i), of_v, columns)], p.tiles.v.at[stage], loaded)
    source = p.operands.d_output.at[(*p.rows(i), of_output, columns)]
    plgpu.copy_gmem_to_smem(source, p.tiles.d_output.at[stage], loaded)
    b, c, _ = p.place(i)
    for x, tile in ((p.operands.before, p.tiles.before), (p.operands.behind, p.tiles.behind)):
        plgpu.copy_gmem_to_smem(x.at[b, c, block, :, columns], tile.at[stage], loaded)


def compute(p: Program, wg):
    """Compute every item of the program, in one of two warpgroups."""
    plgpu.set_max_registers(WIDE_REGISTERS[1], action="increase")
    if not p.plan.resets:
        order = p.tiles.order.at[wg]
        order[...] = plgpu.load(p.operands.tokens, layout=BY_COLUMN, optimized=False)
        plgpu.commit_smem()
    pl.loop(0, p.plan.count(lax.axis_index("program")))(functools.partial(compute_item, p, wg))
    plgpu.wait_smem_to_gmem(0)
