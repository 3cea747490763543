"""Compute chunks with per-head gates: e^{G_i - G_j} for every pair of tokens. Each is exact, so no gate needs another form.

In float32, G is the sum of two terms: log gates rounded to multiples of 1/16, whose sums are exact at any length, and the small
remainders. Their differences have every digit, even where gates of -100 stand among mild ones. In bfloat16 one float32 sum is
enough. Gates are at least -128, so the sum over a chunk is off by less than 1e-3, and by 1e-5 where the gates add up to 100.

One product with a matrix of ones sums along the lanes. Broadcasting a column over the lanes costs sixteen permutations per
head. Therefore only sums are read from columns, never the exponentials of sums.

A unit is one head, or two whose channels lie side by side in the lanes: `pack` heads (`plan.Plan`). `unit` is its number in the
program. K and V stand for pack * K and pack * V of the plan in shapes of a unit.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.blocks import (
    GradientOperands,
    block_diagonal,
    join_heads,
    load_gradient_operands,
    load_head_gates,
    load_rows,
    load_unit,
    select_head,
    step_rows,
    store_gradient,
    store_unit,
)
from glax._src.kernels.pallas_tpu.plan import Plan, Step
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, ForwardRefs, StateRefs


class EdgeDecays(NamedTuple):
    """Hold the decays between tokens and the edges of the chunk, for all heads of a program; R is `Plan.gate_rows`."""

    from_start: jnp.ndarray  # [R, C]: from the chunk's start through a token
    to_end: jnp.ndarray  # [R, C]: after a token, to the chunk's end
    total: jnp.ndarray  # [R, 1]: of the whole chunk


class HeadSums(NamedTuple):
    """Hold the sums G of log gates from the chunk's first token in scan order through each token, for all heads of a program.

    G is a sum of one or two terms. R is `Plan.gate_rows`. `head` is a head's number in its program, and `term` is 0 or 1.
    """

    rows: tuple  # of each term: [R, C]
    columns: jnp.ndarray  # [C, terms * R]: `rows` transposed, side by side
    last: tuple  # of each term: [R, 1], G of the whole chunk

    @property
    def terms(self) -> range:
        """Return the numbers of the terms."""
        return range(len(self.rows))

    def row(self, term: int, head: int):
        """Return a term of a head's G as a row, [1, C]."""
        return self.rows[term][head : head + 1]

    def column(self, term: int, head: int):
        """Return a term of a head's G as a column, [C, 1]."""
        at = term * self.rows[0].shape[0] + head
        return self.columns[:, at : at + 1]

    def pair_decays(self, head: int, mask):
        """Return e^{G_i - G_j}, the decay after token j through token i, where mask holds, else 0: [C, C]."""
        between = sum(self.column(term, head) - self.row(term, head) for term in self.terms)
        return jnp.exp(jnp.where(mask, between, -jnp.inf))

    def broadcast_column(self, term: int, head: int, width: int):
        """Return a term of a head's G, the same number in all lanes of a token: [C, width]."""
        return jnp.broadcast_to(self.column(term, head), (self.columns.shape[0], width))

    def from_start(self, head: int, width: int):
        """Return e^{G_i}, the decay from the chunk's start through each token, the same number in all lanes of a token: [C,
        width]."""
        return jnp.exp(sum(self.broadcast_column(term, head, width) for term in self.terms))

    def to_end(self, head: int, width: int):
        """Return e^{G_last - G_i}, the decay after each token to the chunk's end, the same number in all lanes of a token: [C,
        width]."""
        last = (self.last[term][head : head + 1] for term in self.terms)
        columns = ((end, self.broadcast_column(term, head, width)) for term, end in zip(self.terms, last, strict=True))
        return jnp.exp(sum(end - column for end, column in columns))

    def edge_decays(self) -> EdgeDecays:
        """Return the decays between tokens and the edges of the chunk, for all heads of the program."""
        to_end = sum(end - x for end, x in zip(self.last, self.rows, strict=True))
        return EdgeDecays(jnp.exp(sum(self.rows)), jnp.exp(to_end), jnp.exp(sum(self.last)))


def head_sums(gates, reverse: bool, dtype) -> HeadSums:
    """Return the sums of log gates. gates: [R, C] in float32, 0 outside of the step's rows. dtype: the dtype of q, k and v;
    with float32 the sums have two terms."""
    R, C = gates.shape
    gates = jnp.maximum(gates, LOG_OF_ZERO)
    terms = [gates]
    if dtype == jnp.float32:
        coarse = jnp.floor(gates * 16 + 0.5) * (1 / 16)
        terms = [coarse, gates - coarse]
    s, i = chunk_math.positions((C, C), 0, reverse), chunk_math.positions((C, C), 1, reverse)
    # [terms * R, C]
    sums = chunk_math.dot(jnp.concatenate(terms), jnp.where(s <= i, 1.0, 0.0), chunk_math.NN, jnp.float32)
    rows = tuple(sums[n * R : (n + 1) * R] for n in range(len(terms)))
    end = 0 if reverse else C - 1
    return HeadSums(rows, sums.T, tuple(x[:, end : end + 1] for x in rows))


def load_gates(
    plan: Plan, step: Step, refs: ForwardRefs | StateRefs | BackwardRefs, dtype
) -> tuple[HeadSums | None, EdgeDecays | None]:
    """Return the sums of the step's log gates, and the decays between tokens and the chunk's edges; both None without gates.

    dtype: of q, k and v. With float32 the sums have two terms.
    """
    gates = load_head_gates(plan, step, refs)
    if gates is None:
        return None, None
    sums = head_sums(gates, plan.reverse, dtype)
    return sums, sums.edge_decays()


def forward(plan: Plan, step: Step, scale, refs: ForwardRefs):
    """Store a chunk's outputs, and replace its state S in VMEM by the state S' behind it, without gates or with per-head gates:

    o = scale (e^G (q S^T) + ((q k^T) * e^{G_i - G_j}) v)        S' = e^{G_last} S + v^T (k e^{G_last - G})        S: [V, K]
    """
    dtype = refs.q.dtype
    sums, edges = load_gates(plan, step, refs, dtype)
    causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=True)
    for unit in range(plan.units):
        heads = plan.heads_of(unit)
        # [C, K]   [C, K]   [C, V]
        q, k, v = load_rows(plan, step, refs, unit)
        # [V, K]
        S = refs.state[unit]
        # [C, V]
        o = chunk_math.dot(q, S, chunk_math.NT, dtype)
        if sums is not None:
            o *= join_heads(plan, plan.V, [sums.from_start(head, o.shape[1]) for head in heads])
        for part, head in enumerate(heads):
            # [C, C]
            pairs = chunk_math.dot(select_head(plan, q, plan.K, part), k, chunk_math.NT, dtype)
            pairs = jnp.where(causal, pairs, 0) if sums is None else pairs * sums.pair_decays(head, causal)
            o += chunk_math.dot(pairs, select_head(plan, v, plan.V, part), chunk_math.NN, dtype)
        store_unit(plan, step, refs.output, unit, o * scale)
        refs.state[unit] = carry_state(plan, S, k, v, edges, heads, dtype)


def carry_state(plan: Plan, S, k, v, edges: EdgeDecays | None, heads, dtype, product=chunk_math.dot):
    """Return a unit's state after the chunk:   S' = e^{G_last} S + sum_j v_j (k_j e^{G_last - G_j})^T   [pack * V, pack * K].

    edges: the decays of all heads of the program, or None without gates. heads: the numbers of the unit's heads in the program.
    product: multiplies the matrices, as `chunk_math.dot` does.
    """
    v = v.T
    if edges is not None:
        v = v * join_heads(plan, plan.V, [edges.to_end[head : head + 1] for head in heads], axis=0)
        S = S * join_heads(plan, plan.K, [edges.total[head : head + 1] for head in heads])
    return S + block_diagonal(plan, product(v, k, chunk_math.NN, dtype))


def save_states(plan: Plan, step: Step, refs: StateRefs):
    """Replace the state in VMEM by the state behind the chunk, for all units, without computing outputs."""
    dtype = refs.k.dtype
    _, edges = load_gates(plan, step, refs, dtype)
    for unit in range(plan.units):
        # [C, K]   [C, V]
        k = load_unit(plan, step, refs.k, plan.heads[1], plan.K, unit)
        v = load_unit(plan, step, refs.v, plan.heads[2], plan.V, unit)
        refs.state[unit] = carry_state(plan, refs.state[unit], k, v, edges, plan.heads_of(unit), dtype)


@dataclasses.dataclass(frozen=True)
class Backward:
    """Hold the stages of the gradient of one step. scale: the scale of the step's sequence. sums and edges are None without
    gates. The masks are [C, C]."""

    plan: Plan
    step: Step
    scale: jnp.ndarray
    refs: BackwardRefs
    sums: HeadSums | None
    edges: EdgeDecays | None
    causal: jnp.ndarray
    strictly_causal: jnp.ndarray

    def run(self, unit: int):
        """Store the gradients of a unit in VMEM, and the terms of its gates' gradients in scratch memory. Replace dS by dL/dS
        before the chunk."""
        plan, refs, scale, dtype = self.plan, self.refs, self.scale, self.refs.q.dtype
        heads, (Hq, Hk, Hv) = plan.heads_of(unit), plan.heads
        q, k, v, do, S, dS = x = load_gradient_operands(plan, self.step, refs, unit)
        # [C, K]   [C, K]   [C, V]
        dq = chunk_math.dot(do, S, chunk_math.NN, dtype)
        dk = chunk_math.dot(v, dS, chunk_math.NN, dtype)
        dv = chunk_math.dot(k, dS, chunk_math.NT, dtype)
        # [V, C]
        do_T = do.T
        if self.sums is not None and self.edges is not None:
            dq, dk, dv = self.decay_state_terms(self.sums, heads, dq, dk, dv)
            do_T = do_T * join_heads(plan, plan.V, [self.edges.from_start[head : head + 1] for head in heads], axis=0)
            dS = dS * join_heads(plan, plan.K, [self.edges.total[head : head + 1] for head in heads])
        # [V, K]: what the chunk's tokens add to dS, without the scale
        added = block_diagonal(plan, chunk_math.dot(do_T, q, chunk_math.NN, dtype))
        refs.d_state[unit] = dS + added * scale
        # [1, K]
        state_read = (S * added).sum(0, keepdims=True)
        refs.scale_terms[unit, :, : plan.lanes] += state_read
        from_states = edge = None
        if self.sums is not None:
            # [C, K]   [1, K]
            from_states, edge = q * dq * scale - k * dk, (S * dS).sum(0, keepdims=True) + state_read * scale
        for part, head in enumerate(heads):
            dq, dk, dv = self.add_pairs(unit, part, head, x, (dq, dk, dv), (from_states, edge))
        store_gradient(plan, self.step, refs.dq, Hq, unit, dq * scale)
        store_gradient(plan, self.step, refs.dk, Hk, unit, dk)
        store_gradient(plan, self.step, refs.dv, Hv, unit, dv)

    def decay_state_terms(self, sums: HeadSums, heads, dq, dk, dv):
        """Return dq, dk and dv, so far the terms from S and dS, multiplied by the decays between tokens and the chunk's edges.
        heads: the numbers of the unit's heads in the program."""
        plan = self.plan
        dq *= join_heads(plan, plan.K, [sums.from_start(head, dq.shape[1]) for head in heads])
        to_end = [sums.to_end(head, max(dk.shape[1], dv.shape[1])) for head in heads]
        dk *= join_heads(plan, plan.K, [x[:, : dk.shape[1]] for x in to_end])
        dv *= join_heads(plan, plan.V, [x[:, : dv.shape[1]] for x in to_end])
        return dq, dk, dv

    def add_pairs(self, unit: int, part: int, head: int, x: GradientOperands, gradients, gate_terms):
        """Return (dq, dk, dv) with the terms of pairs of one head's tokens added to `gradients`, which are such arrays. Store
        the head's terms of the gates' gradients in scratch memory.

        part: the head's number in its unit. head: its number in the program. x: the unit's operands. gate_terms: the terms [C,
        K] and [1, K] that come from the states, or (None, None) without gates.
        """
        plan, refs, scale, dtype = self.plan, self.refs, self.scale, self.refs.q.dtype
        dq, dk, dv = gradients
        # [C, K]   [C, K]   [C, V], 0 in the lanes of the other head
        q = select_head(plan, x.q, plan.K, part)
        k = select_head(plan, x.k, plan.K, part)
        do = select_head(plan, x.d_output, plan.V, part)
        # [C, C]
        pairs = chunk_math.dot(q, x.k, chunk_math.NT, dtype)
        d_pairs = chunk_math.dot(do, x.v, chunk_math.NT, dtype)
        decays = None if self.sums is None else self.sums.pair_decays(head, self.causal)
        pairs = jnp.where(self.causal, pairs, 0) if decays is None else pairs * decays
        products = pairs * d_pairs
        refs.scale_terms[unit, :, plan.lanes :] += products.sum(0, keepdims=True)
        if self.sums is not None:
            from_states, edge = gate_terms
            products = jnp.where(self.strictly_causal, products, 0) * scale
            rows = chunk_math.row_sums(products, select_head(plan, from_states, plan.K, part))
            refs.row_terms[:, head : head + 1] = rows
            refs.column_terms[head : head + 1] = products.sum(0, keepdims=True)
            refs.edge_terms[head : head + 1] = select_head(plan, edge, plan.K, part)
        d_pairs = jnp.where(self.causal, d_pairs, 0) if decays is None else d_pairs * decays
        d_pairs, pairs = d_pairs.astype(dtype), pairs.astype(dtype)
        dq += chunk_math.dot(d_pairs, k, chunk_math.NN, dtype)
        dk += chunk_math.dot(d_pairs.T, q, chunk_math.NN, dtype) * scale
        dv += chunk_math.dot(pairs.T, do, chunk_math.NN, dtype) * scale
        return dq, dk, dv


def backward(plan: Plan, step: Step, scale, refs: BackwardRefs):
    """Store dq, dk, dv, dS before the chunk and the gates' gradient, from S before the chunk and dS after it, all in VMEM.

    Let W_ij = A_ij dA_ij for the pairs j < i. A token's q.dq - k.dk is the sum of its row of W, minus the sum of its column,
    plus the terms from S and dS. The pair of a token with itself passes no gate, so it is never added.
    """
    sums, edges = load_gates(plan, step, refs, refs.q.dtype)
    causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=True)
    strictly_causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=False)
    stages = Backward(plan, step, scale, refs, sums, edges, causal, strictly_causal)
    for unit in range(plan.units):
        stages.run(unit)
    if sums is not None:
        emit_gate_gradients(plan, step, refs)


def emit_gate_gradients(plan: Plan, step: Step, refs: BackwardRefs):
    """Store dg_t = <S, dS>_{before the chunk} - sum over s before t in the chunk of (q_s dq_s - k_s dk_s), for every head, from
    the terms in scratch memory. A constant decay's dg_t is added up over the steps of a sequence, in scratch memory."""
    s, t = (chunk_math.positions((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    # [R, C]
    terms = refs.row_terms[...].T[: plan.gate_rows]
    if refs.column_terms is not None:
        terms -= refs.column_terms[...]
    earlier = chunk_math.dot(terms, jnp.where(s < t, 1.0, 0.0), chunk_math.NN, jnp.float32)
    d_gates = refs.edge_terms[...].sum(1, keepdims=True) - earlier
    # [1, C]
    rows = step_rows(plan, step, axis=1)
    if refs.d_constant is not None:
        refs.constant_terms[...] += chunk_math.select_rows(d_gates, rows)
    elif rows is None:
        refs.d_gates[...] = d_gates
    else:
        refs.d_gates[...] = jnp.where(rows, d_gates, refs.d_gates[...] if plan.packed else 0)
