"""The gradient: a walk forwards leaves the state before each chunk, a walk backwards forms everything else.

With dS = dL/dS after a chunk, [C, C] pairs A and their cotangents dA, decays D_ij = e^{G_i - G_j} for j <= i:

    dq_i = scale * (e^{G_i} S do_i + sum_j dA_ij D_ij k_j)           dA_ij = do_i . v_j
    dk_j = e^{G_last - G_j} dS v_j + scale * sum_i dA_ij D_ij q_i
    dv_j = e^{G_last - G_j} dS^T k_j + scale * sum_i A_ij D_ij do_i
    dS_before = e^{G_last} dS + scale * sum_i e^{G_i} q_i do_i^T
    dg_t = <S, dS>_{before the chunk} - sum over s before t in the chunk of (q_s dq_s - k_s dk_s)

The last line starts afresh from both states at each chunk's edge, so its rounding does not grow with T. For that the states
are stored, one a chunk, in the dtype of q, k and v, in which they enter products anyway: for bfloat16 at K = V = 128, as many
bytes as one more tensor, written once and read once, where dq in a walk of its own would read three again.
"""

import dataclasses

import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence, fold_heads, gradient_like
from glax._src.kernels.pallas_tpu import head_gate, key_gate
from glax._src.kernels.pallas_tpu.blocks import cost, gate_inputs, load_state, row_inputs, state_input, store_state
from glax._src.kernels.pallas_tpu.config import TPUGradientConfig
from glax._src.kernels.pallas_tpu.launch import Refs, has_rows, launch, when
from glax._src.kernels.pallas_tpu.plan import Plan, Step


def form_of(refs: Refs):
    return key_gate if hasattr(refs, "key_gates") else head_gate


def remember(plan: Plan, step: Step, scale, refs: Refs):
    """The state before every step, from k, v and the gates."""

    @when(step.begins)
    def _():
        load_state(plan, getattr(refs, "initial_state", None), refs.state)

    refs.before[...] = refs.state[...].astype(refs.before.dtype)

    @when(has_rows(plan, step))
    def _():
        form_of(refs).remember(plan, step, refs)


def backward(plan: Plan, step: Step, scale, refs: Refs):
    """dq, dk, dv and the gates' gradients of every step, and d initial_state; the walk is against the recurrence."""

    @when(step.begins)
    def _():
        load_state(plan, refs.d_final, refs.d_state)
        refs.scale_terms[...] = jnp.zeros_like(refs.scale_terms)
        if hasattr(refs, "d_constant"):
            refs.constant_terms[...] = jnp.zeros_like(refs.constant_terms)

    @when(step.fresh)
    def _():
        for name, heads in zip(("dq", "dk", "dv", "d_gates", "d_key_gates"), (*plan.heads, None, None), strict=True):
            if (ref := getattr(refs, name, None)) is not None and (plan.packed or (heads and plan.is_shared(heads))):
                ref[...] = jnp.zeros_like(ref)

    @when(has_rows(plan, step))
    def _():
        form_of(refs).backward(plan, step, scale, refs)

    @when(step.ends)
    def _():
        refs.d_scale[...] = refs.scale_terms[...]
        if hasattr(refs, "d_initial"):
            store_state(plan, refs.d_state, refs.d_initial)
        if hasattr(refs, "d_constant"):
            refs.d_constant[...] = refs.constant_terms[...]


def states_before(plan: Plan, r: Recurrence) -> jnp.ndarray:
    """[B, groups, steps, units, V, K]."""
    rows = row_inputs(plan, r)
    inputs = dict(k=rows["k"], v=rows["v"]) | gate_inputs(plan, r)
    if r.initial_state is not None:
        inputs["initial_state"] = state_input(plan, r.initial_state)
    outputs = dict(before=((*plan.grid, *plan.state), r.q.dtype, plan.per_step(*plan.state)))
    return launch(
        plan, r, remember, inputs, outputs, dict(state=(plan.state, jnp.float32)), cost(plan, r, 1, inputs, outputs)
    )["before"]


def chunked_vjp(r: Recurrence, d_output, d_final, *, config: TPUGradientConfig) -> Recurrence:
    """The gradient in every input of r."""
    plan = Plan.of(r, config.chunk, config.units)
    K, V = r.state_shape[2:]
    scale_terms = (plan.units, 1, plan.lanes + plan.chunk)
    before = states_before(plan, r)
    plan = dataclasses.replace(plan, against=True)
    inputs = row_inputs(plan, r) | gate_inputs(plan, r)
    inputs |= dict(
        d_output=(plan.wide(d_output, plan.V), plan.tokens(plan.H, plan.V)),
        d_final=state_input(plan, d_final),
        before=(before, plan.per_step(*plan.state)),
    )
    length = max(plan.T, plan.chunk)
    outputs = {}
    for name, heads, width in zip(("dq", "dk", "dv"), plan.heads, (plan.K, plan.K, plan.V), strict=True):
        # What several heads share is summed before it is rounded.
        dtype = r.q.dtype if heads == plan.H else jnp.float32
        held = plan.held(heads) * plan.groups
        outputs[name] = ((plan.B, length, held * width), dtype, plan.tokens(held, width))
    scratch = dict(d_state=(plan.state, jnp.float32), scale_terms=(scale_terms, jnp.float32))
    outputs["d_scale"] = (
        (plan.N, plan.groups, *scale_terms),
        jnp.float32,
        plan.per_sequence(*scale_terms),
    )
    if r.initial_state is not None:
        shape = (plan.rows, plan.K, plan.V)
        outputs["d_initial"] = ((plan.N, plan.groups, *shape), jnp.float32, plan.per_sequence(*shape))
    per_head = (plan.gate_rows, plan.chunk)
    if r.decay.key is not None:
        shape = (plan.B, length, plan.H * plan.K)
        outputs["d_key_gates"] = (
            shape,
            jnp.promote_types(r.decay.key.dtype, jnp.bfloat16),
            plan.tokens(plan.H, plan.K),
        )
    elif r.decay.form != "none":
        scratch |= dict(
            row_terms=((plan.chunk, 128), jnp.float32),
            column_terms=(per_head, jnp.float32),
            edges=((plan.gate_rows, plan.lanes), jnp.float32),
        )
    if r.decay.constant is not None:
        scratch["constant_terms"] = (per_head, jnp.float32)
        outputs["d_constant"] = ((plan.N, plan.groups, *per_head), jnp.float32, plan.per_sequence(*per_head))
    if r.decay.head is not None:
        outputs["d_gates"] = ((plan.B, plan.groups, plan.blocks, *per_head), jnp.float32, plan.head_gates())

    d = launch(plan, r, backward, inputs, outputs, scratch, cost(plan, r, 9, inputs, outputs))
    dq, dk, dv = (
        fold_heads(plan.narrow(d[name], padded, used), heads)
        for name, heads, padded, used in zip(
            ("dq", "dk", "dv"), plan.heads, (plan.K, plan.K, plan.V), (K, K, V), strict=True
        )
    )
    decay = Decay(
        constant=d["d_constant"].sum(3)[:, :, : plan.rows].reshape(plan.N, plan.H) if "d_constant" in d else None,
        head=plan.from_groups(d["d_gates"]) if "d_gates" in d else None,
        key=plan.narrow(d["d_key_gates"], plan.K, K) if "d_key_gates" in d else None,
    )
    initial = plan.from_states(d["d_initial"], K, V) if "d_initial" in d else None
    scale = d["d_scale"].sum((1, 2, 3, 4))
    return gradient_like(
        r, r.replace(q=dq, k=dk, v=dv, decay=decay, initial_state=initial, boundaries=None, scale=scale)
    )
