"""A kernel body over named blocks, launched over the grid of a plan."""

from types import SimpleNamespace

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu.plan import Plan, Step


class Refs(SimpleNamespace):
    """References to the blocks of a step, by name."""


def launch(plan: Plan, r: Recurrence, body, inputs: dict, outputs: dict, scratch: dict, cost: pl.CostEstimate) -> dict:
    """Runs body(plan, step, scale, refs) at every step of the walk; returns the outputs by name.

    inputs: (array, block) by name; outputs: (shape, dtype, block); scratch: (shape, dtype). The grid's last axis is walked in
    order, so what a body leaves in scratch, and in a block that the next step sees again, is there in the next step.
    """
    table = plan.table(r)
    prefetched = (r.scale,) if table is None else (r.scale, table)
    names = [*inputs, *outputs, *scratch]
    varying = jax.typeof(r.q).mat  # inside shard_map: results differ over the mesh as the inputs do

    def kernel(*refs):
        scale, table = refs[0], refs[1] if plan.packed else None
        step = plan.step(pl.program_id(0), pl.program_id(2), table)
        blocks = Refs(**dict(zip(names, refs[len(prefetched) :], strict=True)))
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
    """pl.when, decided while tracing where the condition is a Python value."""
    if isinstance(condition, bool):
        return lambda f: f() if condition else None
    return pl.when(condition)


def has_rows(plan: Plan, step: Step) -> bool:
    """Whether a step has rows at all; unpacked, every step has."""
    return step.high > step.low if plan.packed else True
