"""Launch the Hopper kernels: the recurrence and its gradient, whole or in two phases."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, StoredStates, gradient_recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu import caller_states
from glax._src.kernels.pallas_gpu.config import (
    WIDEST,
    HopperConfig,
    group_size,
    in_one_row,
    joined_number,
    packs,
    packs_if_not_joined,
)
from glax._src.kernels.pallas_gpu.gradient.head import gradient_head
from glax._src.kernels.pallas_gpu.gradient.head_group import gradient_groups
from glax._src.kernels.pallas_gpu.gradient.key import gradient_key
from glax._src.kernels.pallas_gpu.gradient.wide import gradient_wide
from glax._src.kernels.pallas_gpu.joined_rows import JoinedLayout, JoinedRows
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.packed_row import Edges, EqualSequences, PackedRow
from glax._src.kernels.pallas_gpu.plan import ScanResults


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states by a scan of every sequence. With several segments, first compute the states that
    enter them."""
    if in_one_row(r):
        return forward_in_one_row(r, config, save=False)[0]
    if joined_number(r) > 1:
        return forward_of_joined(r, config, save=False)[0]
    if packs(r, config):
        return forward_of_packed(r, config, save=False)[0]
    return forward(KernelLayout(r, config), save=False)[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Compute `chunked` and the residuals that `chunked_vjp` would otherwise compute again."""
    if in_one_row(r):
        return forward_in_one_row(r, config, save=True)
    if joined_number(r) > 1:
        return forward_of_joined(r, config, save=True)
    if packs(r, config):
        return forward_of_packed(r, config, save=True)
    return forward(KernelLayout(r, config, square=True), save=True)


def forward(p: KernelLayout, save: bool, begun=None) -> tuple[Outputs, Residuals | None]:
    """Return the outputs, and the residuals if `save`. begun: the result of `begin` for this call, or None."""
    r = p.r
    start = p.starts(r.initial_state, p.k, p.v, False) if begun is None else p.begun_from(r.initial_state, *begun)
    plan = p.plan(start=start is not None, states=save, run=p.run if save else 1, **caller_states.plan_fields(p))
    scanned = p.scan(plan, p.k, p.v, start)
    final: Any = p.narrow(scanned.last)
    if r.states_every is not None:
        final = StoredStates(final, caller_states.of_heads(p, scanned.behind))
    outputs = Outputs(p.sum_of_values(scanned.o, p.blocks).astype(r.v.dtype), final)
    return outputs, p.residuals(scanned) if save else None


def layout_of_row(packed: PackedRow, config: HopperConfig, square: bool) -> KernelLayout:
    """Return the layout of the row that represents packed sequences. Rows without a token are cleared, or with other than
    per-key gates read from copies."""
    if packed.r.decay.form == "key":
        return KernelLayout(packed.row, config, square, tokens=(packed.cuts[0], packed.cuts[-1]))
    return KernelLayout(packed.row, config, square, Edges.of(packed.r))


def forward_in_one_row(r: Recurrence, config: HopperConfig, save: bool) -> tuple[Outputs, Residuals | None]:
    """Run the forward of packed sequences as one row. A scan of its own computes the final states, and XLA drops it where they
    are not used."""
    outputs, residuals = forward(layout_of_row(PackedRow(r), config, square=save), save)
    return outputs._replace(final_state=final_states(r, config)), residuals


def final_states(r: Recurrence, config: HopperConfig) -> jax.Array:
    """Return the final states of packed sequences, [N, H, K, V], by a scan without outputs. Each sequence is copied to a
    chunk's start."""
    p = KernelLayout(r, dataclasses.replace(config, parts=1))
    return p.narrow(p.scan(p.plan(outputs=False), p.k, p.v, None).last)


def forward_of_joined(r: Recurrence, config: HopperConfig, save: bool) -> tuple[Outputs, Residuals | None]:
    """Run the forward of joined rows. Scans of their own compute the final states, and XLA drops them where they are not used.

    The residuals are those of the rows: their axis 0 is shorter than the batch of r."""
    joined = JoinedRows(r, joined_number(r))
    p = JoinedLayout(joined, config, square=save)
    outputs, residuals = forward(p, save)
    final = JoinedLayout(joined, config, square=False).final_states(config)
    return Outputs(joined.part(outputs.output), final), residuals


def forward_of_packed(r: Recurrence, config: HopperConfig, save: bool) -> tuple[Outputs, Residuals | None]:
    """Run the forward of a batch as packed sequences of equal length. Their residuals have one row."""
    sequences = EqualSequences(r)
    p = KernelLayout(sequences.packed, config, square=save, cuts=sequences.cuts)
    outputs, residuals = forward(p, save)
    return outputs._replace(output=sequences.part(outputs.output)), residuals


def begin(r: Recurrence, config: HopperConfig):
    """Run the first phase of the forward: compute the state of every segment from zero, and the message to other devices."""
    p = KernelLayout(r, config, square=True)
    return first_part(p, p.k, p.v, r.initial_state, adjoint=False)


def finish(begun, r: Recurrence, config: HopperConfig) -> Outputs:
    """Run the second phase of the forward: compute `chunked` from the result of `begin` and the states that arrived, which are
    the initial states of r."""
    return forward(KernelLayout(r, config, square=True), False, begun)[0]


def finish_with_residuals(begun, r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals | None]:
    """Run `finish`, and return the residuals too."""
    return forward(KernelLayout(r, config, square=True), True, begun)


def begin_vjp(r: Recurrence, d_output, d_final, config: HopperConfig):
    """Run the first phase of the gradient: compute every segment's term of dL/dS, and the message to other devices."""
    p = KernelLayout(r, config, square=True)
    return first_part(p, p.q, p.in_blocks(d_output, p.V), d_final, adjoint=True)


def finish_vjp(begun, r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig):
    """Run the second phase of the gradient: compute `chunked_vjp` from the result of `begin_vjp` and the d_final that arrived."""
    return chunked_vjp(r, d_output, d_final, residuals, config, begun)


def first_part(p: KernelLayout, a, b, start, adjoint: bool):
    """Return (the operands of the second phase, the final state of every sequence [N, H, K, V], its log decays [N, H, K or 1]).

    The last two are the message to other devices. It does not depend on the states that enter segments. These are computed from
    zero during the exchange, and the arriving state is then decayed and added to them.
    """
    own = p.own_states(a, b, adjoint, last=True)
    _, S = p.along(own, p.start(start), adjoint)
    log = own[1].reshape(p.N, p.parts, *own[1].shape[1:])
    message = p.narrow(S), p.narrow_log(log.sum(1))
    return (p.entry_states(own, None, adjoint), p.decayed_before(log, adjoint)), *message


def states(p: KernelLayout) -> Residuals:
    """Return the states before the chunks, in the form in which the forward saves them."""
    start = p.starts(p.r.initial_state, p.k, p.v, adjoint=False)
    return p.residuals(p.scan(p.plan(outputs=False, states=True, run=p.run, start=start is not None), p.k, p.v, start))


def form_of_gradient(p: KernelLayout):
    """Return the function that computes the gradient of every chunk."""
    if not p.key:
        return gradient_head
    in_steps = p.blocks.columns > 1 and p.K == WIDEST and not p.rows.in_place and p.tokens is None
    return gradient_wide if in_steps else gradient_key


def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig, begun=None
) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan computes dL/dS behind every chunk. From that and the states before the chunks, one kernel computes the
    gradients of all chunks in parallel. residuals: what the forward saved, or None. begun: the result of `begin_vjp`, or None.
    d_final: None for zeros. Packed sequences are taken as one row here if the forward could take them so and d_final is None.
    """
    if r.segments is not None:
        d_output = r.segments.masked(d_output)
    if in_one_row(r):
        if d_final is None:
            return gradient_in_one_row(r, d_output, residuals, config)
        # The residuals are a row's. The states are computed again, with each sequence from a chunk's start on.
        whole = KernelLayout(r, dataclasses.replace(config, parts=1), square=True)
        return gradient_of(r, whole, d_output, d_final, None, None)
    # how many sequences a row of the residuals holds or, without residuals, a row that would be read
    number = joined_number(r) if residuals is None else r.q.shape[0] // residuals.states.shape[0]
    if begun is None:
        if packs_if_not_joined(r) and (number > 1 or (residuals is None and packs(r, config))):
            return gradient_of_packed(r, d_output, d_final, residuals, config)
        if number > 1 and d_final is None:
            return gradient_of_joined(r, d_output, residuals, config, number)
    if number > 1:
        residuals = None  # they are those of joined rows
    return gradient_of(r, KernelLayout(r, config, square=True), d_output, d_final, residuals, begun)


def gradient_of(r: Recurrence, p: KernelLayout, d_output, d_final, residuals: Residuals | None, begun) -> Recurrence:
    """Return the gradient of every array of r, whose layout is p. The other arguments are those of `chunked_vjp`."""
    d, initial = gradients(p, d_output, d_final, residuals, begun)
    decay = dict.fromkeys(("constant", "head", "key"))
    if p.key:
        decay["key"] = d.gates if r.segments is None else r.segments.masked(d.gates)
    elif r.decay.form == "head":
        decay["head"] = p.rows.put(p.sum_of_blocks(d.gates).reshape(r.q.shape[0], -1, r.num_heads))
    elif r.decay.form == "constant":
        decay["constant"] = p.by_sequence(tokens_only(p, p.sum_of_blocks(d.gates)).sum(2))
    tokens = (x.astype(jnp.float32) for x in (d.q, d.k, d.v))
    return gradient_recurrence(r, *tokens, Decay(**decay), initial, p.by_sequence(d.scale_of_chunks).sum(1))


def tokens_only(p: KernelLayout, dg):
    """Return dg [B, chunks, C, H], or [chunks, 1, C, H] if packed, with 0 where a row holds no token and so no gate."""
    is_token = p.is_token if p.rows.begins is None else p.is_token[:, None]
    return jnp.where(is_token[..., None], dg, 0)


def gradient_in_one_row(r: Recurrence, d_output, residuals: Residuals | None, config: HopperConfig) -> Recurrence:
    """Return the gradient of packed sequences that are taken as one row. Their final states have no cotangent."""
    packed = PackedRow(r)
    p = layout_of_row(packed, config, square=True)
    d, _ = gradients(p, d_output, None, residuals, None)
    tokens = (x.astype(jnp.float32) for x in (d.q, d.k, d.v))
    if p.key:  # no gate has a gradient where a sequence begins, nor where no token is
        used = d.scale.sum(2).reshape(-1, 1)[: r.q.shape[1]]
        return gradient_recurrence(r, *tokens, Decay(key=d.gates), None, packed.per_sequence(used)[:, 0])
    # [1, T, H]
    gates = packed.gate_gradient(p.rows.put(p.sum_of_blocks(d.gates).reshape(1, -1, r.num_heads)))
    decay = Decay()
    if r.decay.form == "head":
        decay = Decay(head=gates)
    elif r.decay.form == "constant":
        decay = Decay(constant=packed.per_sequence(gates[0]))
    # [T, 1]
    used = d.scale.sum(2).reshape(-1, 1)[: r.q.shape[1]]
    return gradient_recurrence(r, *tokens, decay, None, packed.per_sequence(used)[:, 0])


def gradient_of_packed(
    r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig
) -> Recurrence:
    """Return the gradient of a batch that is taken as packed sequences of equal length. Residuals of several rows are those of
    batches that were merged, and are computed again."""
    sequences = EqualSequences(r)
    if residuals is not None and residuals.states.shape[0] > 1:
        residuals = None
    p = KernelLayout(sequences.packed, dataclasses.replace(config, parts=1), square=True, cuts=sequences.cuts)
    d = gradient_of(sequences.packed, p, sequences.pack(d_output), d_final, residuals, None)
    return d.map_tokens(sequences.part)


def gradient_of_joined(
    r: Recurrence, d_output, residuals: Residuals | None, config: HopperConfig, number: int
) -> Recurrence:
    """Return the gradient of sequences of which `number` are joined to a row. Their final states have no cotangent."""
    joined = JoinedRows(r, number)
    p = JoinedLayout(joined, config, square=True)
    d, _ = gradients(p, joined.join(d_output), None, residuals, None)
    tokens = (joined.part(x).astype(jnp.float32) for x in (d.q, d.k, d.v))

    def by_token(x):
        return joined.part(x.reshape(p.N, -1, *x.shape[3:]))

    decay = Decay()
    if p.key:
        gates = joined.part(d.gates)
        decay = Decay(key=gates if r.segments is None else r.segments.masked(gates))
    elif r.decay.form != "none":
        gates = joined.gate_gradient(by_token(p.sum_of_blocks(d.gates)))
        decay = Decay(head=gates) if r.decay.form == "head" else Decay(constant=gates.sum(1))
    used = by_token(d.scale.sum(2))
    return gradient_recurrence(r, *tokens, decay, None, used.sum(1))


def gradients(p: KernelLayout, d_output, d_final, residuals: Residuals | None, begun) -> tuple["Gradients", jax.Array]:
    """Return the gradients of every chunk, and the gradient of the initial states."""
    residuals = p.of_blocks(states(p) if residuals is None else residuals)
    d_output = p.in_blocks(d_output, p.V)
    d_final, d_states = d_final if isinstance(d_final, StoredStates) else (d_final, None)
    behind = caller_states.in_blocks(p, d_states)
    d_start = (
        caller_states.starts_against_time(p, d_final, d_output, behind)
        if begun is None
        else p.begun_from(d_final, *begun)
    )
    run, of_caller = p.run if p.grouped else 1, {} if behind is None else caller_states.plan_fields(p)
    against = p.plan(outputs=False, states=True, adjoint=True, start=d_start is not None, run=run, **of_caller)
    scanned = p.scan(against, p.q, d_output, d_start, out_of_range=residuals.out_of_range, behind=behind)
    form = by_groups if p.grouped else by_heads
    return form(p, d_output, residuals, scanned), p.narrow(scanned.last)


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

    @property
    def scale_of_chunks(self) -> jax.Array:
        """Return the gradient of each chunk's scale, summed over its tokens."""
        is_by_token = self.scale.ndim == 4
        return self.scale.sum(3) if is_by_token else self.scale


def by_heads(p: KernelLayout, d_output, residuals: Residuals, scanned: ScanResults) -> Gradients:
    """Compute the gradient of every chunk and block separately."""
    form, operands = form_of_gradient(p), p.chunkwise(d_output, residuals, scanned.states)
    if p.key:
        options = {} if p.newest is None else dict(newest=p.newest)
    else:
        options = dict(edges=p.edge_copies(*p.by_blocks(p.q, p.k, p.v, d_output)), rows=p.result_rows)
    *found, dg, d_scale = form(*operands, reverse=p.r.reverse, programs=multiprocessors(), blocks=p.stored, **options)
    # Packed, every chunk was a sequence of its own.
    dq, dk, dv = (x.reshape(p.q.shape[0], p.chunk_rows, *x.shape[2:]) for x in found)
    if p.key:
        dg = p.gradient_of_keys(dg.reshape(p.q.shape[0], p.chunk_rows, *dg.shape[2:]))
    return Gradients(p.gradient_of_keys(dq), p.gradient_of_keys(dk), p.sum_of_values(dv, p.stored), dg, d_scale)


def by_groups(p: KernelLayout, d_output, residuals: Residuals, scanned: ScanResults) -> Gradients:
    """Compute the gradient of every chunk, summed over heads that share a query and a key."""
    q, k, v, do = (p.in_tiles(x) for x in (p.q, p.k, p.v, d_output))
    operands = q, k, v, p.gates, do, p.scale_of_chunks(), residuals.states, scanned.states
    dq, dk, dv, dg, d_scale = gradient_groups(
        *operands, group=group_size(p.r), columns=p.blocks.columns, reverse=p.r.reverse, programs=multiprocessors(),
        edges=p.edge_copies(p.q, p.k, p.v, d_output), rows=p.result_rows,
    )  # fmt: skip
    dq, dk = (p.rows.put(x)[..., : p.r.q.shape[3]] for x in (dq, dk))
    if p.rows.begins is not None:
        dg, d_scale = dg.swapaxes(0, 1), d_scale.swapaxes(0, 1)
    return Gradients(dq, dk, p.sum_of_values(dv, p.stored), dg, d_scale)
