"""Compute the gradient: a forward scan saves the state before each chunk, and a backward scan computes everything else.

With dS = dL/dS after a chunk, [C, C] pairs A and their cotangents dA, decays D_ij = e^{G_i - G_j} for j <= i:

    dq_i = scale * (e^{G_i} S do_i + sum_j dA_ij D_ij k_j)           dA_ij = do_i . v_j
    dk_j = e^{G_last - G_j} dS v_j + scale * sum_i dA_ij D_ij q_i
    dv_j = e^{G_last - G_j} dS^T k_j + scale * sum_i A_ij D_ij do_i
    dS_before = e^{G_last} dS + scale * sum_i e^{G_i} q_i do_i^T
    dg_t = <S, dS>_{before the chunk} - sum over s before t in the chunk of (q_s dq_s - k_s dk_s)

The last line starts again from both states at each chunk's edge, so its rounding error does not grow with T. It needs the state
before every chunk. These states are stored in the dtype of q, k and v, in which products read them. For bfloat16 at K = V = 128
they take as many bytes as one more tensor, written once and read once. A separate scan for dq would read three tensors again.

With the delta rule it saves the inverses of the chunks, too, in float32: at V = 128 as many bytes as two more tensors in
bfloat16. They are temporary memory of the gradient, and nothing that a caller keeps from its forward.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence, gradient_recurrence
from glax._src.kernels.pallas_tpu.blocks import (
    erasure_inputs,
    estimate_cost,
    gate_inputs,
    load_state,
    row_inputs,
    state_input,
    store_state,
)
from glax._src.kernels.pallas_tpu.config import TPUGradientConfig
from glax._src.kernels.pallas_tpu.forward import chunk_form
from glax._src.kernels.pallas_tpu.launch import has_rows, launch, when
from glax._src.kernels.pallas_tpu.plan import Plan, Step
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, StateRefs
from glax._src.kernels.pallas_tpu.sizes import LANES


def save_states(plan: Plan, step: Step, scale, refs: StateRefs):
    """Save the state before a step, and advance it in VMEM by the k, v and gates of the step, and with the delta rule by its
    erasure."""

    @when(step.begins)
    def _():
        load_state(plan, refs.initial_state, refs.state)

    refs.states_before[...] = refs.state[...].astype(refs.states_before.dtype)

    @when(has_rows(plan, step))
    def _():
        chunk_form(refs).save_states(plan, step, refs)


def backward(plan: Plan, step: Step, scale, refs: BackwardRefs):
    """Store dq, dk, dv and the gradients of gates and erasure of a step, and at the end of a sequence those of scale, constant
    decay and initial state. The steps come in the opposite order of the recurrence."""

    @when(step.begins)
    def _():
        load_state(plan, refs.d_final, refs.d_state)
        refs.scale_terms[...] = jnp.zeros_like(refs.scale_terms)
        if refs.d_constant is not None:
            refs.constant_terms[...] = jnp.zeros_like(refs.constant_terms)

    @when(step.first_visit)
    def _():
        for ref, heads in zip((refs.dq, refs.dk, refs.dv), plan.heads, strict=True):
            if plan.packed or plan.is_shared(heads):
                ref[...] = jnp.zeros_like(ref)
        for ref in (refs.d_gates, refs.d_key_gates, refs.d_beta, refs.d_erase, refs.d_write):
            if ref is not None and plan.packed:
                ref[...] = jnp.zeros_like(ref)

    @when(has_rows(plan, step))
    def _():
        chunk_form(refs).backward(plan, step, scale, refs)

    @when(step.ends)
    def _():
        refs.d_scale[...] = refs.scale_terms[...]
        if refs.d_initial is not None:
            store_state(plan, refs.d_state, refs.d_initial)
        if refs.d_constant is not None:
            refs.d_constant[...] = refs.constant_terms[...]


def saved_inputs(plan: Plan, r: Recurrence) -> dict:
    """Run the forward scan that saves states, and return {field of `BackwardRefs`: (array, specification of its block)} for
    what `backward` reads of it.

    states_before: the state before every step, [B, groups, steps, units, pack * V, pack * K]. inverses: for the delta rule, the
    inverse of every chunk and head in float32, [B, groups, steps, units * pack, C, C].
    """
    rows = row_inputs(plan, r)
    inputs = dict(k=rows["k"], v=rows["v"]) | gate_inputs(plan, r) | erasure_inputs(plan, r)
    if r.initial_state is not None:
        inputs["initial_state"] = state_input(plan, r.initial_state)
    saved = dict(states_before=(plan.state, r.q.dtype))
    if r.erasure is not None:
        saved["inverses"] = (plan.program_heads, plan.chunk, plan.chunk), jnp.float32
    outputs = {name: ((*plan.grid, *shape), dtype, plan.step_block(*shape)) for name, (shape, dtype) in saved.items()}
    scratch = dict(state=(plan.state, jnp.float32))
    cost = estimate_cost(plan, r, 1, inputs, outputs)
    arrays = launch(plan, r, save_states, StateRefs, inputs, outputs, scratch, cost)
    adjoint = dataclasses.replace(plan, adjoint=True)
    return {name: (arrays[name], adjoint.step_block(*shape)) for name, (shape, _) in saved.items()}


class RowGradient(NamedTuple):
    """Describe the gradient of q, k or v by its name, number of heads, padded width and width."""

    name: str
    heads: int
    padded: int
    width: int


def row_gradients(plan: Plan, r: Recurrence) -> list[RowGradient]:
    """Return the descriptions of dq, dk and dv."""
    K, V = r.state_shape[2:]
    Hq, Hk, Hv = plan.heads
    return [RowGradient("dq", Hq, plan.K, K), RowGradient("dk", Hk, plan.K, K), RowGradient("dv", Hv, plan.V, V)]


def gradient_outputs(plan: Plan, r: Recurrence) -> tuple[dict, dict]:
    """Return (the outputs, the scratch arrays) of `backward`, each a dict by fields of `BackwardRefs`. An output is (shape,
    dtype, block), and a scratch array (shape, dtype)."""
    T_padded = max(plan.T, plan.chunk)
    scale_terms = (plan.units, 1, plan.lanes + plan.chunk)
    per_head = (plan.gate_rows, plan.chunk)
    outputs: dict[str, tuple] = {}
    for name, heads, padded, _ in row_gradients(plan, r):
        # The gradient of a shared head is summed in float32, and rounded after that.
        dtype = r.q.dtype if heads == plan.H else jnp.float32
        count = plan.heads_read(heads) * plan.groups
        outputs[name] = ((plan.B, T_padded, count * padded), dtype, plan.token_block(count, padded))
    outputs["d_scale"] = sequence_output(plan, scale_terms)
    scratch: dict[str, tuple] = dict(d_state=(plan.state, jnp.float32), scale_terms=(scale_terms, jnp.float32))
    if r.initial_state is not None:
        outputs["d_initial"] = sequence_output(plan, (plan.program_heads, plan.K, plan.V))
    if r.decay.key is not None:
        dtype = jnp.promote_types(r.decay.key.dtype, jnp.bfloat16)
        outputs["d_key_gates"] = ((plan.B, T_padded, plan.H * plan.K), dtype, plan.token_block(plan.H, plan.K))
    elif r.decay.form != "none":
        scratch["row_terms"] = (plan.chunk, LANES), jnp.float32
        if r.erasure is None:
            scratch["column_terms"] = per_head, jnp.float32
        scratch["edge_terms"] = (plan.gate_rows, plan.lanes), jnp.float32
    if r.decay.constant is not None:
        scratch["constant_terms"] = (per_head, jnp.float32)
        outputs["d_constant"] = sequence_output(plan, per_head)
    if r.decay.head is not None:
        outputs["d_gates"] = ((plan.B, plan.groups, plan.blocks, *per_head), jnp.float32, plan.head_gate_block())
    if r.erasure is not None:
        more_outputs, more_scratch = erasure_gradient_outputs(plan, r.erasure)
        outputs, scratch = outputs | more_outputs, scratch | more_scratch
    return outputs, scratch


def erasure_gradient_outputs(plan: Plan, erasure: Erasure) -> tuple[dict, dict]:
    """Return (the outputs, the scratch arrays) of `backward` for the gradient of an erasure, as `gradient_outputs` does."""
    T_padded, per_head = max(plan.T, plan.chunk), (plan.gate_rows, plan.chunk)
    if erasure.beta is not None:
        blocks = (plan.B, plan.groups, plan.blocks, *per_head)
        return dict(d_beta=(blocks, jnp.float32, plan.head_gate_block())), dict(
            beta_terms=((plan.chunk, LANES), jnp.float32)
        )
    outputs = {}
    for name, x, width in (("d_erase", erasure.erase, plan.K), ("d_write", erasure.write, plan.V)):
        if x is not None:
            dtype = jnp.promote_types(x.dtype, jnp.bfloat16)
            outputs[name] = (plan.B, T_padded, plan.H * width), dtype, plan.token_block(plan.H, width)
    return outputs, {}


def erasure_gradient(plan: Plan, r: Recurrence, d: dict) -> Erasure | None:
    """Return the gradient of r's erasure, in the shapes of r; None if r has no erasure. d: the kernel's outputs by name."""
    if r.erasure is None:
        return None
    K, V = r.state_shape[2:]
    return Erasure(
        beta=plan.from_groups(d["d_beta"]) if "d_beta" in d else None,
        erase=plan.from_lanes(d["d_erase"], plan.K, K) if "d_erase" in d else None,
        write=plan.from_lanes(d["d_write"], plan.V, V) if "d_write" in d else None,
    )


def sequence_output(plan: Plan, shape: tuple[int, ...]) -> tuple:
    """Return (shape, dtype, block) of a float32 output [N, groups, *shape], with one block for each sequence and program."""
    return (plan.N, plan.groups, *shape), jnp.float32, plan.sequence_block(*shape)


def chunked_vjp(r: Recurrence, d_output, d_final, *, config: TPUGradientConfig) -> Recurrence:
    """Return the gradient of every input of r, in the fields of a Recurrence. d_output, d_final: the cotangents of the output
    [B, T, H, V] and of the final state [N, H, K, V]."""
    plan = Plan.of(r, config.chunk, config.units, gradient=True)
    K, V = r.state_shape[2:]
    saved = saved_inputs(plan, r)
    plan = dataclasses.replace(plan, adjoint=True)
    inputs = row_inputs(plan, r) | gate_inputs(plan, r) | erasure_inputs(plan, r)
    inputs |= saved | dict(
        d_output=(plan.to_lanes(d_output, plan.V), plan.token_block(plan.H, plan.V)),
        d_final=state_input(plan, d_final),
    )
    outputs, scratch = gradient_outputs(plan, r)
    cost = estimate_cost(plan, r, 9, inputs, outputs)
    d = launch(plan, r, backward, BackwardRefs, inputs, outputs, scratch, cost)
    dq, dk, dv = (plan.from_lanes(d[x.name], x.padded, x.width) for x in row_gradients(plan, r))
    constant = d["d_constant"].sum(3)[:, :, : plan.program_heads] if "d_constant" in d else None
    decay = Decay(
        constant=None if constant is None else constant.reshape(plan.N, plan.H),
        head=plan.from_groups(d["d_gates"]) if "d_gates" in d else None,
        key=plan.from_lanes(d["d_key_gates"], plan.K, K) if "d_key_gates" in d else None,
    )
    initial = plan.from_state_blocks(d["d_initial"], K, V) if "d_initial" in d else None
    scale = d["d_scale"].sum((1, 2, 3, 4))
    return gradient_recurrence(r, dq, dk, dv, decay, initial, scale, erasure_gradient(plan, r, d))
