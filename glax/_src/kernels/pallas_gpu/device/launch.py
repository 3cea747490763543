"""Launch a kernel with its operands, results and shared memory by name."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.in_place import unfused
from glax._src.kernels.pallas_gpu.device.cache import once
from glax._src.kernels.pallas_gpu.device.pipeline import Pipeline, Roles, acting_as

PROGRAM, WARPGROUP = "program", "warpgroup"  # the axes of a launch
ALONE = dict(compute=1)
# Warps synchronise where the kernels say so. Pallas alone would synchronise them around every store to shared memory.
PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
SUMS_WITHIN_WARPS = dataclasses.replace(PARAMS, reduction_scratch_bytes=0)  # without 2 KB for sums over warps


def launch(
    name: str,
    plan: Hashable,
    body: Callable,
    operands,
    results,
    scratch: tuple,
    roles: Roles,
    pipeline: Pipeline | None = None,
    *,
    programs: int,
    over: bool = False,
    is_longest: bool = False,
    params: plgpu.CompilerParams = PARAMS,
) -> Any:
    """Run body(operands, results, *scratch, pipeline) in every warpgroup of every program, and return the results.

    name: the kernel's name in profiles. plan: everything that `body` depends on other than shapes and dtypes. operands: a tree
    of arrays. results: a tree of types, or, if `over`, of arrays that are overwritten. `body` receives references in the place
    of both. scratch: trees of types of shared memory. roles: the number of warpgroups of each role. pipeline: its barriers are
    allocated, and `body` receives it last; None without barriers. programs: the number of programs, the size of the grid.
    is_longest: whether the kernel takes longest to compile of those of its gradient, and is lowered first. params: options of
    Pallas's compiler.
    """
    arrays, structure = jax.tree.flatten(operands)
    found, of_results = jax.tree.flatten(results)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
    key = name, plan, programs, structure, tuple((x.shape, x.dtype) for x in types)
    barriers = [] if pipeline is None else [list(pipeline.barriers(roles).values())]
    inputs, outputs = len(arrays), len(types)

    run = acting_as(*roles)(body) if len(roles) == 1 else body

    def named(*refs):
        given, written, memory = refs[:inputs], refs[inputs : inputs + outputs], refs[inputs + outputs :]
        if pipeline is not None:
            *memory, own = memory
            memory = *memory, pipeline.of(roles, own)
        run(structure.unflatten(given), of_results.unflatten(written), *memory)

    named.__name__ = name
    kernel = plgpu.kernel(
        named,
        out_type=() if over else tuple(types),
        grid=(programs,),
        grid_names=(PROGRAM,),
        num_threads=sum(roles.values()),
        thread_name=WARPGROUP,
        scratch_types=[*scratch, *barriers],
        compiler_params=params,
    )

    def in_place(*operands):
        refs = [jax.new_ref(x) for x in operands[inputs:]]
        kernel(*operands[:inputs], *refs)
        return [ref[...] for ref in refs]

    found = [unfused(x) for x in found] if over else []
    call = in_place if over else kernel
    written = once(key, call, *arrays, *found, results=types, is_longest=is_longest)
    return of_results.unflatten([unfused(x) for x in written] if over else written)


def by_role(roles: Roles, work: Mapping[str, Callable]):
    """Run the function work[role] in the warpgroups of each role. If a role has several warpgroups, the function receives the
    index of the calling warpgroup among these; else it receives nothing. roles: the number of warpgroups of each role."""
    me, first = lax.axis_index(WARPGROUP), 0
    for role, count in roles.items():
        for index in range(count):
            run = functools.partial(work[role], *[index] * (count > 1))
            pl.when(me == first + index)(acting_as(role)(run))
        first += count
