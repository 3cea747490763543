"""The heads and states of a step: read from the blocks of a plan, in units of whole tiles, and written back."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from glax._src.core.recurrence import Recurrence
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.launch import Refs
from glax._src.kernels.pallas_tpu.plan import Plan, Step, pad


def own_rows(plan: Plan, step: Step, axis: int = 0):
    """[C, 1] (or [1, C]): whether a row of the block is of this step; None if all are."""
    if not plan.ragged:
        return None
    shape = (plan.chunk, 1) if axis == 0 else (1, plan.chunk)
    row = lax.broadcasted_iota(jnp.int32, shape, axis)
    return (row >= step.low) & (row < step.high)


def lanes(width: int, unit):
    """The lanes of unit `unit`, which may be traced."""
    if isinstance(unit, int):
        return slice(unit * width, (unit + 1) * width)
    return pl.ds(pl.multiple_of(unit * width, 128), width)


def read_unit(plan: Plan, step: Step, ref, heads: int, width: int, unit):
    """[C, pack * width]: the heads of a unit, of a tensor with `heads` heads, 0 outside of the step's rows."""
    at = lanes(plan.pack * width, plan.unit_of(unit, heads))
    return chunk_math.masked(ref[:, at], own_rows(plan, step))


def by_head(plan: Plan, width: int, each, axis: int = 1):
    """A factor of a unit's lanes (or, axis 0, rows) from the factors of its heads, each of which may be broadcast."""
    if plan.pack == 1:
        return each[0]
    shape = (1, 2 * width) if axis else (2 * width, 1)
    return jnp.where(lax.broadcasted_iota(jnp.int32, shape, axis) < width, each[0], each[1])


def of_head(plan: Plan, x, width: int, head: int):
    """x [C, pack * width] with the lanes of the unit's other head set to 0."""
    if plan.pack == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (1, 2 * width), 1)
    return jnp.where((lane < width) == (head == 0), x, jnp.zeros_like(x))


def block_diagonal(plan: Plan, x):
    """x [pack * V, pack * K] without what one head of a unit would write to the other's state."""
    if plan.pack == 1:
        return x
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0) < plan.V
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) < plan.K
    return jnp.where(row == lane, x, 0)


def load_state(plan: Plan, source, target):
    """The states [rows, K, V] of a program, transposed, into its units [units, pack * V, pack * K]."""
    if source is None or plan.pack > 1:
        target[...] = jnp.zeros_like(target)
    if source is None:
        return
    for head in range(plan.rows):
        unit, part = divmod(head, plan.pack)
        V, K = (slice(part * width, (part + 1) * width) for width in (plan.V, plan.K))
        target[unit, V, K] = source[head].astype(jnp.float32).T


def store_state(plan: Plan, source, target):
    """The inverse of `load_state`."""
    for head in range(plan.rows):
        unit, part = divmod(head, plan.pack)
        V, K = (slice(part * width, (part + 1) * width) for width in (plan.V, plan.K))
        target[head] = source[unit, V, K].T


def gates_per_head(plan: Plan, step: Step, refs: Refs):
    """[gate rows, C] float32, 0 outside of the step's rows; None without such gates."""
    if not hasattr(refs, "gates"):
        return None
    gates = jnp.broadcast_to(refs.gates[...], (plan.gate_rows, plan.chunk))
    return chunk_math.masked(gates, own_rows(plan, step, axis=1))


def write(plan: Plan, step: Step, ref, unit, x):
    """Writes the lanes of a unit, where the rows are the step's."""
    at = lanes(x.shape[1], unit)
    x = x.astype(ref.dtype)
    if plan.packed:
        x = jnp.where(own_rows(plan, step), x, ref[:, at])
    ref[:, at] = x


def add(plan: Plan, step: Step, ref, heads: int, unit, x):
    """Writes a unit's gradient of a tensor with `heads` heads; units that share one add to it, in a block that began as 0."""
    if not plan.is_shared(heads):
        return write(plan, step, ref, unit, x)
    at = lanes(x.shape[1], plan.unit_of(unit, heads))
    ref[:, at] += chunk_math.masked(x, own_rows(plan, step))


def gate_inputs(plan: Plan, r: Recurrence) -> dict:
    """The gates of r, as the blocks that kernels read."""
    decay = r.decay
    if decay.constant is not None:
        x = decay.constant.astype(jnp.float32).reshape(plan.N, plan.groups, plan.rows, 1)
        x = pad(x, (0, 0), (0, 0), (0, plan.gate_rows - plan.rows), (0, 0))
        return dict(gates=(x, plan.per_sequence(plan.gate_rows, 1)))
    if decay.head is not None:
        return dict(gates=(plan.by_group(decay.head), plan.head_gates()))
    if decay.key is not None:
        x = decay.key.astype(jnp.float32) if decay.key.dtype == jnp.float16 else decay.key
        return dict(key_gates=(plan.wide(x, plan.K), plan.tokens(plan.H, plan.K)))
    return {}


def row_inputs(plan: Plan, r: Recurrence) -> dict:
    """q, k and v."""
    Hq, Hk, Hv = plan.heads
    return dict(
        q=(plan.wide(r.q, plan.K), plan.tokens(Hq, plan.K)),
        k=(plan.wide(r.k, plan.K), plan.tokens(Hk, plan.K)),
        v=(plan.wide(r.v, plan.V), plan.tokens(Hv, plan.V)),
    )


def state_input(plan: Plan, x) -> tuple:
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
    return plan.states(x), plan.per_sequence(plan.rows, plan.K, plan.V)


def cost(plan: Plan, r: Recurrence, products: int, inputs: dict, outputs: dict) -> pl.CostEstimate:
    """What XLA schedules by: `products` of matrices a unit and chunk, the exponentials of the decays, and every array once."""
    chunks = plan.B * plan.groups * plan.steps * plan.units
    C, K, V = plan.chunk, plan.pack * plan.K, plan.pack * plan.V
    exponentials = dict(none=0, key=2 * C * K).get(r.decay.form, plan.pack * C * C)
    arrays = [x for x, _ in inputs.values()] + [jax.ShapeDtypeStruct(*output[:2]) for output in outputs.values()]
    return pl.CostEstimate(
        flops=chunks * products * 2 * C * K * V,
        transcendentals=chunks * exponentials,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
