"""Launch a kernel body over the grid of a plan, with named references to its blocks."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu.plan import Plan, Step


def launch(
    plan: Plan, r: Recurrence, body, refs_type, inputs: dict, outputs: dict, scratch: dict, cost: pl.CostEstimate
) -> dict:
    """Run body(plan, step, scale, refs) at every step of the scan and return the outputs by name.

    refs_type: a class of `refs`, whose fields are the names below. inputs: (array, block) by name. outputs: (shape, dtype,
    block) by name. scratch: (shape, dtype) by name. The grid's last axis runs in order, so a step sees the scratch memory that
    the step before it left, and the rows of a block that both steps share.
    """
    table = plan.table(r)
    prefetched = (r.scale,) if table is None else (r.scale, table)
    names = [*inputs, *outputs, *scratch]
    varying = jax.typeof(r.q).mat  # inside shard_map, results vary over the mesh as the inputs do

    def kernel(*refs):
        scale, table = refs[0], refs[1] if plan.packed else None
        step = plan.step(pl.program_id(0), pl.program_id(2), table)
        blocks = refs_type(**dict(zip(names, refs[len(prefetched) :], strict=True)))
        body(plan, step, scale[step.sequence], blocks)

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=plan.grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, _, spec in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch.values()],
        ),
        out_shape=[jax.ShapeDtypeStruct(s, d, manual_axis_type=varying) for s, d, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        name=f"glax_{body.__name__}",
    )(*prefetched, *(x for x, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def when(condition):
    """Return a decorator that runs a function without arguments if the condition holds, as `pl.when` does. A Python bool is
    decided while tracing."""
    if isinstance(condition, bool):
        return lambda f: f() if condition else None
    return pl.when(condition)


def has_rows(plan: Plan, step: Step) -> bool | jax.Array:
    """Return whether a step has rows of a sequence: True without packing, else a traced bool."""
    return step.high > step.low if plan.packed else True
