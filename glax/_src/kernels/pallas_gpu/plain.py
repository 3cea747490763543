"""Launch the Hopper kernels of calls without the delta rule: the recurrence and its gradient, whole or in two phases."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, StoredStates, gradient_recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.config import HopperConfig, group_size
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E
from glax._src.kernels.pallas_gpu.gradient.head import gradient_head
from glax._src.kernels.pallas_gpu.gradient.head_group import gradient_groups
from glax._src.kernels.pallas_gpu.gradient.key import gradient_key
from glax._src.kernels.pallas_gpu.gradient.wide import gradient_wide
from glax._src.kernels.pallas_gpu.layout import KernelLayout, layout_of, widen
from glax._src.kernels.pallas_gpu.plan import LOG_OF_RESET, C, ScanResults
from glax._src.kernels.pallas_gpu.route import Route


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states by a scan of every sequence. With several segments, first compute the states that
    enter them."""
    return forward(layout_of(r, Route.of(r, config)), save=False)[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Compute the outputs and final states, and the residuals for `chunked_vjp`.

    The residuals are those of the rows that kernels read: their axis 0 is shorter than the batch of r if sequences share a row.
    """
    return forward(layout_of(r, Route.of(r, config), square=True), save=True)


def forward(p: KernelLayout, save: bool, begun=None) -> tuple[Outputs, Residuals | None]:
    """Return the outputs, and the residuals if `save`, else None. begun: the first result of `begin` for this call, or None for
    a call in one phase."""
    r = p.r
    start = (
        p.segment_starts(r.initial_state, p.k, p.v, False) if begun is None else p.begun_from(r.initial_state, *begun)
    )
    plan = p.plan(start=start is not None, states=save, run=p.run if save else 1, **p.stored_states)
    scanned = p.scan(plan, p.k, p.v, start)
    last: Any = p.states_from_blocks(scanned.last)
    if r.states_every is not None:
        last = StoredStates(last, states_of_heads(p, scanned.behind))
    output = p.sum_of_values(scanned.o, p.blocks).astype(r.v.dtype)
    residuals = p.residuals(scanned) if save else None
    last = p.final_states(last)
    return Outputs(p.split(output), last), residuals


def in_phases(r: Recurrence, config: HopperConfig) -> KernelLayout:
    """Return the layout of r for the first or second phase of a call in two phases, in which sequences share no rows."""
    return layout_of(r, Route.of(r, config, in_phases=True), square=True)


def begin(r: Recurrence, config: HopperConfig):
    """Run the first phase of the forward. Return (the operands of `finish`, the final state of every sequence [N, H, K, V], its
    log decays [N, H, K or 1]).

    The last two are the message to other devices; see `first_part`.
    """
    p = in_phases(r, config)
    return first_part(p, p.k, p.v, r.initial_state, adjoint=False)


def finish(begun, r: Recurrence, config: HopperConfig) -> Outputs:
    """Run the second phase of the forward: return the outputs and final states. begun: the first result of `begin`.

    The initial states of r are those that arrived from other devices.
    """
    return forward(in_phases(r, config), False, begun)[0]


def finish_with_residuals(begun, r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Run the second phase of the forward: return the outputs and final states, and the residuals. begun: the first result of
    `begin`."""
    return forward(in_phases(r, config), True, begun)


def begin_vjp(r: Recurrence, d_output, d_final, config: HopperConfig):
    """Run the first phase of the gradient. Return (the operands of `finish_vjp`, the gradient of the initial state of every
    sequence [N, H, K, V], its log decays [N, H, K or 1]).

    The last two are the message to other devices; see `first_part`. d_output: [B, T, H, V]. d_final: [N, H, K, V], or None for
    zeros.
    """
    p = in_phases(r, config)
    return first_part(p, p.q, p.of_values(d_output), d_final, adjoint=True)


def finish_vjp(begun, r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig):
    """Run the second phase of the gradient: return the gradient of every input of r. begun: the first result of `begin_vjp`.

    d_final: the gradient of the final states that arrived from other devices. residuals: what the forward saved, or None.
    """
    return chunked_vjp(r, d_output, d_final, residuals, config, begun)


def first_part(p: KernelLayout, k, v, start, adjoint: bool):
    """Return (the operands of the second phase, the final state of every sequence [N, H, K, V], its log decays [N, H, K or 1]).

    k, v: in blocks, or q and d_output with `adjoint`. start: the state that enters each sequence, [N, H, K, V], or None for
    zeros. adjoint: whether the states are dL/dS, in a scan against time; the final state is then the gradient of the initial
    state.

    The last two results are the message to other devices. They do not depend on the states that enter segments, which are
    computed from zero during the exchange. The state that arrives is then decayed and added to these.
    """
    own = p.own_states(k, v, adjoint, last=True)
    _, S = p.along(own, p.states_to_blocks(start), adjoint)
    log = own[1].reshape(p.N, p.parts, *own[1].shape[1:])
    message = p.states_from_blocks(S), p.log_from_blocks(log.sum(1))
    return (p.entry_states(own, None, adjoint), p.decayed_before(log, adjoint)), *message


def states(p: KernelLayout) -> Residuals:
    """Return the residuals of the forward, the states at chunks, computed by a scan without outputs."""
    start = p.segment_starts(p.r.initial_state, p.k, p.v, adjoint=False)
    return p.residuals(p.scan(p.plan(outputs=False, states=True, run=p.run, start=start is not None), p.k, p.v, start))


def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig, begun=None
) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan computes dL/dS behind every chunk. From that and the states before the chunks, one kernel computes the
    gradients of all chunks in parallel. d_output: [B, T, H, V]. d_final: [N, H, K, V], or a `StoredStates` with `states_every`;
    None for zeros. residuals: what the forward saved, or None to compute it again. begun: the first result of `begin_vjp`, or
    None for a call in one phase. Sequences share a row here only if they did in the forward and d_final is None.
    """
    if r.segments is not None:
        d_output = r.segments.masked(d_output)
    route = Route.of(r, config, d_final, residuals, in_phases=begun is not None)
    if residuals is not None and not route.rows.takes(r, residuals):
        residuals = None
    p = layout_of(r, route, square=True)
    d, initial = gradients(p, p.join(d_output), d_final, residuals, begun)
    given, decay = p.given, Decay()
    if p.key:
        gates = p.gradient_of_tokens(d.gates)
        decay = Decay(key=gates if given.segments is None else given.segments.masked(gates))
    elif given.decay.form == "head":
        decay = Decay(head=p.gradient_of_gates(d.gates))
    elif given.decay.form == "constant":
        decay = Decay(constant=p.gradient_of_constant(d.gates))
    used = p.scale_by_token(d.scale)
    tokens = [p.gradient_of_tokens(x).astype(jnp.float32) for x in (d.q, d.k, d.v)]
    return p.gradient_of_given(gradient_recurrence(given, *tokens, decay, initial, p.gradient_of_scale(used)))


def gradients(p: KernelLayout, d_output, d_final, residuals: Residuals | None, begun) -> tuple["Gradients", jax.Array]:
    """Return the gradients of every chunk, and the gradient of the initial states, [N, H, K, V].

    d_output: [B, T, H, V] in the rows of p.r. d_final, residuals and begun: as in `chunked_vjp`.
    """
    residuals = p.of_blocks(states(p) if residuals is None else residuals)
    d_output = p.of_values(d_output)
    d_final, d_states = d_final if isinstance(d_final, StoredStates) else (d_final, None)
    behind = states_in_blocks(p, d_states)
    d_start = starts_against_time(p, d_final, d_output, behind) if begun is None else p.begun_from(d_final, *begun)
    run, of_caller = p.run if p.grouped else 1, {} if behind is None else p.stored_states
    against = p.plan(outputs=False, states=True, adjoint=True, start=d_start is not None, run=run, **of_caller)
    scanned = p.scan(against, p.q, d_output, d_start, out_of_range=residuals.out_of_range, behind=behind)
    form = by_groups if p.grouped else by_heads
    return form(p, d_output, residuals, scanned), p.states_from_blocks(scanned.last)


class Gradients(NamedTuple):
    """Hold the results of the gradient kernels.

    q, k: [B, T, heads or blocks of heads, K], and v: [B, T, H, V], in rows of r, before sums over heads that share one; bfloat16,
    or float32 where they are sums over blocks. gates: [B, T, H, K] for per-key gates, else [B, chunks, C, blocks of H] in
    float32. scale: the gradient of each chunk's scale in float32, [B, chunks, blocks of H] for per-key gates without resets, else
    by token [B, chunks, blocks of H, C]. If packed, the axes B and chunks of the last two arrays are exchanged.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: jax.Array
    scale: jax.Array


def by_heads(p: KernelLayout, d_output, residuals: Residuals, scanned: ScanResults) -> Gradients:
    """Return the gradients of every chunk and block, each computed separately. d_output: in blocks. residuals: divided into
    blocks. scanned: the results of the scan of dL/dS."""
    operands = p.chunkwise(d_output, residuals, scanned.states)
    if p.key:
        form = gradient_wide if p.route.gradient == "gradient_wide" else gradient_key
        options = {} if p.newest is None else dict(newest=p.newest)
    else:
        form = gradient_head
        options = dict(edges=p.edge_copies(*p.by_blocks(p.q, p.k, p.v, d_output)), rows=p.result_rows)
    *by_chunk, dg, d_scale = form(
        *operands, reverse=p.r.reverse, programs=multiprocessors(), blocks=p.stored, **options
    )
    # Packed, every chunk was a sequence of its own.
    dq, dk, dv = (x.reshape(p.q.shape[0], p.chunk_rows, *x.shape[2:]) for x in by_chunk)
    if p.key:
        dg = p.gradient_of_keys(dg.reshape(p.q.shape[0], p.chunk_rows, *dg.shape[2:]))
    return Gradients(p.gradient_of_keys(dq), p.gradient_of_keys(dk), p.sum_of_values(dv, p.stored), dg, d_scale)


def by_groups(p: KernelLayout, d_output, residuals: Residuals, scanned: ScanResults) -> Gradients:
    """Return the gradients of every chunk, with dq and dk summed over the heads that share a query and a key. d_output: in
    blocks. residuals: divided into blocks. scanned: the results of the scan of dL/dS."""
    q, k, v, do = (p.in_tiles(x) for x in (p.q, p.k, p.v, d_output))
    operands = q, k, v, p.gates, do, p.scale_of_chunks(), residuals.states, scanned.states
    dq, dk, dv, dg, d_scale = gradient_groups(
        *operands, group=group_size(p.r), columns=p.blocks.columns, reverse=p.r.reverse, programs=multiprocessors(),
        edges=p.edge_copies(p.q, p.k, p.v, d_output), rows=p.result_rows,
    )  # fmt: skip
    dq, dk = (p.put(x)[..., : p.r.q.shape[3]] for x in (dq, dk))
    if p.apart is not None:
        dg, d_scale = dg.swapaxes(0, 1), d_scale.swapaxes(0, 1)
    return Gradients(dq, dk, p.sum_of_values(dv, p.stored), dg, d_scale)


# ---- the states of the caller, behind every n tokens ------------------------------------------------------------------


def states_of_heads(p: KernelLayout, behind: Float[Array, "N J H K V"] | None) -> Float[Array, "N J H K V"]:
    """Return the states of `states_every` by head of the caller. behind: the states of blocks, as a scan stores them; None
    where rows are too short for a state, for which J is 0."""
    if behind is None:
        return jnp.zeros((p.N, 0, *p.r.state_shape[1:]), jnp.float32)
    own = p.states_from_blocks(behind.reshape(-1, *behind.shape[2:]))
    return own.reshape(*behind.shape[:2], *own.shape[1:])


def states_in_blocks(p: KernelLayout, d: Float[Array, "N J H K V"] | None) -> Float[Array, "N J H K V"] | None:
    """Return d, the gradients of the states of `states_every` by head, divided into blocks; None if d is None or there are no
    states."""
    if d is None or not p.stored_states:
        return None
    filled = p.states_to_blocks(d.reshape(-1, *d.shape[2:]))
    assert filled is not None
    return filled.reshape(*d.shape[:2], *filled.shape[1:])


def starts_against_time(p: KernelLayout, d_final, d_output, behind: Float[Array, "N J H K V"] | None):
    """Return dL/dS behind every segment, [E, H, K, V] in float32; None for zeros.

    d_final: the gradient of the final states of r, [N, H, K, V], or None. d_output: the gradient of the outputs in blocks, [B,
    rows, H, V]. behind: the gradients of the states of `states_every`, as `states_in_blocks` returns them.
    """
    if behind is None or p.parts == 1:
        return p.segment_starts(d_final, p.q, d_output, adjoint=True)
    states, log = p.own_states(p.q, d_output, adjoint=True, last=False)
    scale = jnp.repeat(p.scale, p.parts)[:, None, None, None]
    own = states * scale + at_edges(p, behind).reshape(states.shape), log
    return p.entry_states(own, p.states_to_blocks(d_final), adjoint=True, is_scaled=True)


def logs_of_chunks(p: KernelLayout) -> Float[Array, "N chunks heads _"]:
    """Return the log2 decay through every chunk in float32, one for each channel with per-key gates, else one for each head."""
    if not p.key:
        return p.gates[..., 0 if p.r.reverse else C - 1, None]
    # [B, T, heads, K]
    gates: Any = sum(g.astype(jnp.float32) for g in p.gates)
    gates = jnp.pad(jnp.maximum(gates, LOG_OF_ZERO), ((0, 0), (0, -gates.shape[1] % C), (0, 0), (0, 0)))
    logs = gates.reshape(gates.shape[0], -1, C, *gates.shape[2:]).sum(2) * LOG2E
    if p.newest is not None:  # no state passes a chunk with a reset
        logs = jnp.where(p.newest.max(2)[..., None, None] >= 0, LOG_OF_RESET, logs)
    return widen(logs, p.K)


def at_edges(p: KernelLayout, behind: Float[Array, "N J H K V"]) -> Float[Array, "N parts H K V"]:
    """Return, for every segment, the term of dL/dS that the gradients of the states of `states_every` within it contribute at
    the edge by which a reverse scan leaves the segment:

        sum_j e^{L_j} behind_j          L_j: the log decay through the chunks from state j to that edge

    All sums are float32. behind: the gradients of these states, in blocks.
    """
    count = np.arange(1, behind.shape[1] + 1) * p.every
    through = np.arange(p.chunks)
    chunk = p.chunks - count if p.r.reverse else count - 1
    part = chunk // p.size
    # [J, chunks]: the chunks between a state and the edge of its segment
    passed = (through >= chunk[:, None]) if p.r.reverse else (through <= chunk[:, None])
    passed &= through // p.size == part[:, None]
    logs = jnp.einsum("nchk,jc->njhk", logs_of_chunks(p), passed.astype(np.float32), precision="highest")
    decay = jnp.exp2(jnp.repeat(logs, p.H // logs.shape[2], axis=2))[..., None]
    each = [(decay[:, part == i] * behind[:, part == i]).sum(1) for i in range(p.parts)]
    return jnp.stack(each, axis=1)
