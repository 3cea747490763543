"""Load the heads and states of a step from the blocks of a plan, in units of whole tiles, and store them.

A unit is one head, or two whose channels lie side by side in the lanes: `pack` heads (`plan.Plan`). `unit` is its number in the
program. References are blocks in VMEM.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.plan import Plan, Step, pad
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, ForwardRefs, Ref, StateRefs


class GradientOperands(NamedTuple):
    """Hold the operands of the gradient of one unit, with 0 in rows that are not the step's. S is the state before the chunk,
    and dS = dL/dS behind it; both are transposed."""

    q: jnp.ndarray  # [C, pack * K]
    k: jnp.ndarray  # [C, pack * K]
    v: jnp.ndarray  # [C, pack * V]
    d_output: jnp.ndarray  # [C, pack * V]
    S: jnp.ndarray  # [pack * V, pack * K] float32
    dS: jnp.ndarray  # [pack * V, pack * K] float32


def step_rows(plan: Plan, step: Step, axis: int = 0):
    """Return whether each row of the block belongs to this step, a mask [C, 1], or [1, C] for axis 1. Return None if all rows
    of all blocks do."""
    if not plan.ragged:
        return None
    shape = (plan.chunk, 1) if axis == 0 else (1, plan.chunk)
    row = lax.broadcasted_iota(jnp.int32, shape, axis)
    return (row >= step.low) & (row < step.high)


def lanes(width: int, unit):
    """Return the slice of `width` lanes that belongs to a unit. unit: its index in the block, which may be traced if 128
    divides width."""
    if isinstance(unit, int):
        return slice(unit * width, (unit + 1) * width)
    return pl.ds(pl.multiple_of(unit * width, 128), width)


def load_unit(plan: Plan, step: Step, ref, heads: int, width: int, unit):
    """Load a unit's heads of an array from its block in VMEM, [C, pack * width], with 0 in rows that are not the step's.

    ref: the block, [C, heads that a program reads * width]. heads: the number of heads of the array. unit: the unit's number in
    the program.
    """
    at = lanes(plan.pack * width, plan.unit_of(unit, heads))
    return chunk_math.select_rows(ref[:, at], step_rows(plan, step))


def load_rows(plan: Plan, step: Step, refs: ForwardRefs | BackwardRefs, unit):
    """Load q [C, pack * K], k [C, pack * K] and v [C, pack * V] of a unit from VMEM, with 0 in rows that are not the step's."""
    Hq, Hk, Hv = plan.heads
    q = load_unit(plan, step, refs.q, Hq, plan.K, unit)
    k = load_unit(plan, step, refs.k, Hk, plan.K, unit)
    v = load_unit(plan, step, refs.v, Hv, plan.V, unit)
    return q, k, v


def load_gradient_operands(plan: Plan, step: Step, refs: BackwardRefs, unit) -> GradientOperands:
    """Load q, k, v, the output's cotangent and both states of a unit from VMEM."""
    rows = load_rows(plan, step, refs, unit)
    d_output = load_unit(plan, step, refs.d_output, plan.H, plan.V, unit)
    return GradientOperands(*rows, d_output, refs.states_before[unit].astype(jnp.float32), refs.d_state[unit])


def join_heads(plan: Plan, width: int, factors, axis: int = 1):
    """Return one factor for all lanes of a unit (axis 1), or for all its rows (axis 0), from one for each head. width: the
    lanes, or rows, of a head. factors: a list of `pack` arrays, each of which may be broadcast."""
    if plan.pack == 1:
        return factors[0]
    shape = (1, 2 * width) if axis else (2 * width, 1)
    return jnp.where(lax.broadcasted_iota(jnp.int32, shape, axis) < width, factors[0], factors[1])


def select_head(plan: Plan, x, width: int, head: int):
    """Return x [C, pack * width] with 0 in the lanes of the unit's other head. head: 0 or 1, the head's number in its unit."""
    if plan.pack == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (1, 2 * width), 1)
    return jnp.where((lane < width) == (head == 0), x, jnp.zeros_like(x))


def block_diagonal(plan: Plan, x):
    """Return x [pack * V, pack * K] with 0 outside of the diagonal blocks [V, K], which belong to one head each."""
    if plan.pack == 1:
        return x
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0) < plan.V
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) < plan.K
    return jnp.where(row == lane, x, 0)


def load_state(plan: Plan, source: Ref | None, target: Ref):
    """Fill a program's units [units, pack * V, pack * K] in float32 with its states [heads, K, V], transposed. source: the
    states, or None for zeros. target: the units, in scratch memory."""
    if source is None or plan.pack > 1:
        target[...] = jnp.zeros_like(target)
    if source is None:
        return
    for head in range(plan.program_heads):
        unit, part = divmod(head, plan.pack)
        V, K = (slice(part * width, (part + 1) * width) for width in (plan.V, plan.K))
        target[unit, V, K] = source[head].astype(jnp.float32).T


def store_state(plan: Plan, source: Ref, target: Ref):
    """Store a program's units [units, pack * V, pack * K], from scratch memory, as its states [heads, K, V], transposed."""
    for head in range(plan.program_heads):
        unit, part = divmod(head, plan.pack)
        V, K = (slice(part * width, (part + 1) * width) for width in (plan.V, plan.K))
        target[head] = source[unit, V, K].T


def load_head_gates(plan: Plan, step: Step, refs: ForwardRefs | StateRefs | BackwardRefs):
    """Load per-head gates from VMEM, [gate_rows, C] in float32, with 0 outside of the step's rows. Return None without such
    gates."""
    if refs.gates is None:
        return None
    gates = jnp.broadcast_to(refs.gates[...], (plan.gate_rows, plan.chunk))
    return chunk_math.select_rows(gates, step_rows(plan, step, axis=1))


def store_unit(plan: Plan, step: Step, ref: Ref, unit, x):
    """Store x [C, width] in a unit's lanes of its block in VMEM, cast to the dtype of `ref`. With packing, only the step's rows
    change."""
    at = lanes(x.shape[1], unit)
    x = x.astype(ref.dtype)
    rows = step_rows(plan, step) if plan.packed else None
    ref[:, at] = x if rows is None else jnp.where(rows, x, ref[:, at])


def store_gradient(plan: Plan, step: Step, ref: Ref, heads: int, unit, x):
    """Store x [C, pack * width], a unit's gradient of an array with `heads` heads, in its block in VMEM.

    Units that share a head add their gradients, in a block that starts as 0.
    """
    if not plan.is_shared(heads):
        return store_unit(plan, step, ref, unit, x)
    at = lanes(x.shape[1], plan.unit_of(unit, heads))
    ref[:, at] += chunk_math.select_rows(x, step_rows(plan, step))


def wide(x):
    """Return x in float32 if it is in float16, which a TPU does not read; else x."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def gate_inputs(plan: Plan, r: Recurrence) -> dict:
    """Return {field of the references: (array, specification of its block)} for the gates of r, in the plan's layout."""
    decay = r.decay
    if decay.constant is not None:
        x = decay.constant.astype(jnp.float32).reshape(plan.N, plan.groups, plan.program_heads, 1)
        x = pad(x, (0, 0), (0, 0), (0, plan.gate_rows - plan.program_heads), (0, 0))
        return dict(gates=(x, plan.sequence_block(plan.gate_rows, 1)))
    if decay.head is not None:
        return dict(gates=(plan.to_groups(decay.head), plan.head_gate_block()))
    if decay.key is not None:
        return dict(key_gates=(plan.to_lanes(wide(decay.key), plan.K), plan.token_block(plan.H, plan.K)))
    return {}


def erasure_inputs(plan: Plan, r: Recurrence) -> dict:
    """Return {field of the references: (array, specification of its block)} for beta, or for erase and write, in the plan's
    layout."""
    if r.erasure is None:
        return {}
    beta, erase, write = r.erasure.beta, r.erasure.erase, r.erasure.write
    inputs = {}
    if beta is not None:
        inputs["beta"] = plan.to_groups(beta), plan.head_gate_block()
    if erase is not None:
        inputs["erase"] = plan.to_lanes(wide(erase), plan.K), plan.token_block(plan.H, plan.K)
    if write is not None:
        inputs["write"] = plan.to_lanes(wide(write), plan.V), plan.token_block(plan.H, plan.V)
    return inputs


def row_inputs(plan: Plan, r: Recurrence) -> dict:
    """Return {field of the references: (array, specification of its block)} for q, k and v, in the plan's layout."""
    Hq, Hk, Hv = plan.heads
    return dict(
        q=(plan.to_lanes(r.q, plan.K), plan.token_block(Hq, plan.K)),
        k=(plan.to_lanes(r.k, plan.K), plan.token_block(Hk, plan.K)),
        v=(plan.to_lanes(r.v, plan.V), plan.token_block(Hv, plan.V)),
    )


def state_input(plan: Plan, x) -> tuple:
    """Return (the states x [N, H, K, V] in the plan's layout, the specification of their block)."""
    return plan.to_state_blocks(wide(x)), plan.sequence_block(plan.program_heads, plan.K, plan.V)


def estimate_cost(plan: Plan, r: Recurrence, products: int, inputs: dict, outputs: dict) -> pl.CostEstimate:
    """Return an estimate of the kernel's cost, by which XLA schedules it.

    products: the number of matrix products [C, K] @ [K, V] for each unit and chunk. inputs: (array, block) by name. outputs:
    (shape, dtype, block) by name. The estimate counts the exponentials of the decays, and the bytes of every array once.
    """
    chunks = plan.B * plan.groups * plan.steps * plan.units
    C, K, V = plan.chunk, plan.pack * plan.K, plan.pack * plan.V
    exponentials = dict(none=0, key=2 * C * K).get(r.decay.form, plan.pack * C * C)
    arrays = [x for x, _ in inputs.values()] + [jax.ShapeDtypeStruct(*output[:2]) for output in outputs.values()]
    return pl.CostEstimate(
        flops=chunks * products * 2 * C * K * V,
        transcendentals=chunks * exponentials,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
