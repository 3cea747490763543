"""Compute the forward in one scan, with the state in VMEM from the first chunk of a sequence to its last."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.pallas_tpu import delta, head_gate, key_gate
from glax._src.kernels.pallas_tpu.blocks import (
    erasure_inputs,
    estimate_cost,
    gate_inputs,
    load_state,
    row_inputs,
    state_input,
    store_state,
)
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig
from glax._src.kernels.pallas_tpu.launch import has_rows, launch, when
from glax._src.kernels.pallas_tpu.plan import Plan, Step
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, ForwardRefs, StateRefs


def chunk_form(refs: ForwardRefs | StateRefs | BackwardRefs):
    """Return the module whose functions compute a chunk of this call: `delta`, `key_gate` or `head_gate`."""
    if refs.beta is not None or refs.erase is not None:
        return delta
    return head_gate if refs.key_gates is None else key_gate


def forward(plan: Plan, step: Step, scale, refs: ForwardRefs):
    """Store one step's outputs, and carry the state to the next chunk of its sequence, in VMEM. scale: the scale of the step's
    sequence.

        o_i = scale * ((q_i e^{G_i}) S + sum_{j <= i} (q_i . k_j e^{G_i - G_j}) v_j)
        S' = e^{G_last} S + sum_j k_j e^{G_last - G_j} v_j^T

    G_i is the sum of the chunk's log gates through token i, and S the state before the chunk. With the delta rule, the formulas
    are those of `delta`.
    """

    @when(step.begins)
    def _():
        load_state(plan, refs.initial_state, refs.state)

    if plan.packed:

        @pl.when(step.first_visit)
        def _():
            refs.output[...] = jnp.zeros_like(refs.output)

    @when(has_rows(plan, step))
    def _():
        chunk_form(refs).forward(plan, step, scale, refs)

    @when(step.ends)
    def _():
        store_state(plan, refs.state, refs.final_state)


def chunked(r: Recurrence, *, config: TPUChunkedConfig) -> Outputs:
    """Compute the recurrence in chunks. It reads q, k, v and gates once, and writes the output once."""
    plan = Plan.of(r, config.chunk, config.units, gradient=False)
    K, V = r.state_shape[2:]
    inputs = row_inputs(plan, r) | gate_inputs(plan, r) | erasure_inputs(plan, r)
    if r.initial_state is not None:
        inputs["initial_state"] = state_input(plan, r.initial_state)
    T_padded = max(plan.T, plan.chunk)
    outputs = dict(
        output=((plan.B, T_padded, plan.H * plan.V), r.q.dtype, plan.token_block(plan.H, plan.V)),
        final_state=(
            (plan.N, plan.groups, plan.program_heads, plan.K, plan.V),
            jnp.float32,
            plan.sequence_block(plan.program_heads, plan.K, plan.V),
        ),
    )
    scratch = dict(state=(plan.state, jnp.float32))
    cost = estimate_cost(plan, r, 4, inputs, outputs)
    results = launch(plan, r, forward, ForwardRefs, inputs, outputs, scratch, cost)
    return Outputs(plan.from_lanes(results["output"], plan.V, V), plan.from_state_blocks(results["final_state"], K, V))
