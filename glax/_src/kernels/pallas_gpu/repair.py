"""Replace results by others in place, if a flag on the GPU says so."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.core.backend import Backend
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.common.in_place import unfused
from glax._src.kernels.pallas_gpu.device.cache import once

BLOCKS = 1024, 512, 256, 128  # numbers that a program moves together, 1 to 8 a thread


def repaired(flag: Array, found: Any, others: Any) -> Any:
    """Return the tree `found` where flag is 0, an int32, and else `others`.

    A select would read and write all arrays. This kernel ends immediately where the flag is 0.
    """
    leaves, structure = jax.tree.flatten(found)
    pairs = list(zip(leaves, jax.tree.leaves(others), strict=True))
    block = [next((n for n in BLOCKS if x.size % n == 0), 0) for x in leaves]
    is_large = [n > 0 and Backend.here() is Backend.GPU for n in block]
    results = [x if large else jnp.where(flag > 0, y, x) for (x, y), large in zip(pairs, is_large, strict=True)]
    large = [i for i, found in enumerate(is_large) if found]
    if large:
        tiles = [tuple(x.reshape(-1, block[i]) for x in pairs[i]) for i in large]
        for i, x in zip(large, in_place(flag[None], *(list(x) for x in zip(*tiles, strict=True))), strict=True):
            results[i] = x.reshape(leaves[i].shape)
    return structure.unflatten(results)


def in_place(flag: Array, found: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    """Return `found`, or `others` if flag [1] is not 0. All arrays are [rows, 128, 256, 512 or 1024]."""
    programs = multiprocessors()
    shapes = [x.shape for x in found]

    def body(flag_g, *refs):
        program = lax.axis_index("program")

        def move(rows, source, target):
            def step(i, _):
                row = program + i * programs
                target[row] = source[row]

            lax.fori_loop(0, (rows - program + programs - 1) // programs, step, None)

        @pl.when(flag_g[0] != 0)
        def _():
            for (rows, _), source, target in zip(shapes, refs[: len(shapes)], refs[len(shapes) :], strict=True):
                move(rows, source, target)

    body.__name__ = "repair"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(programs,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
    )

    def call(flag, *arrays):
        targets = [jax.new_ref(x) for x in arrays[: len(found)]]
        kernel(flag, *arrays[len(found) :], *targets)
        return [jax.freeze(x) for x in targets]

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
    found = [unfused(x) for x in found]
    return [unfused(x) for x in once(("repair", programs), call, flag, *found, *others, results=results)]
