"""The forward: one walk, the state in VMEM from the first chunk of a sequence to its last."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.pallas_tpu import head_gate, key_gate
from glax._src.kernels.pallas_tpu.blocks import cost, gate_inputs, load_state, row_inputs, state_input, store_state
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig
from glax._src.kernels.pallas_tpu.launch import Refs, has_rows, launch, when
from glax._src.kernels.pallas_tpu.plan import Plan, Step


def forward(plan: Plan, step: Step, scale, refs: Refs):
    """o_i = scale * ((q_i e^{G_i}) S + sum_{j <= i} (q_i . k_j e^{G_i - G_j}) v_j)

    S' = e^{G_last} S + sum_j k_j e^{G_last - G_j} v_j^T, from one chunk of a sequence to its next.
    """

    @when(step.begins)
    def _():
        load_state(plan, getattr(refs, "initial_state", None), refs.state)

    if plan.packed:

        @pl.when(step.fresh)
        def _():
            refs.output[...] = jnp.zeros_like(refs.output)

    @when(has_rows(plan, step))
    def _():
        (key_gate if hasattr(refs, "key_gates") else head_gate).forward(plan, step, scale, refs)

    @when(step.ends)
    def _():
        store_state(plan, refs.state, refs.final_state)


def chunked(r: Recurrence, *, config: TPUChunkedConfig) -> Outputs:
    """The recurrence in chunks; q, k, v and gates are read once, the output is written once."""
    plan = Plan.of(r, config.chunk, config.units)
    K, V = r.state_shape[2:]
    inputs = row_inputs(plan, r) | gate_inputs(plan, r)
    if r.initial_state is not None:
        inputs["initial_state"] = state_input(plan, r.initial_state)
    rows = max(plan.T, plan.chunk)
    outputs = dict(
        output=((plan.B, rows, plan.H * plan.V), r.q.dtype, plan.tokens(plan.H, plan.V)),
        final_state=(
            (plan.N, plan.groups, plan.rows, plan.K, plan.V),
            jnp.float32,
            plan.per_sequence(plan.rows, plan.K, plan.V),
        ),
    )
    scratch = dict(state=(plan.state, jnp.float32))
    got = launch(plan, r, forward, inputs, outputs, scratch, cost(plan, r, 4, inputs, outputs))
    return Outputs(plan.narrow(got["output"], plan.V, V), plan.from_states(got["final_state"], K, V))
