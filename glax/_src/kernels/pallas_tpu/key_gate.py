"""Compute chunks with per-key gates: in the factored form where a run-time check allows it, and in the exact form elsewhere.

The factored form writes e^{G_i - G_j} as e^{M_i} e^{-M_j} for all pairs together, with M = G minus G at the chunk's middle. The
exact form halves the chunk repeatedly, so that no exponent is positive for gates <= 0. `xla.chunk_math` has both forms, too.

A unit is one head, or two whose channels lie side by side in the lanes: `pack` heads (`plan.Plan`). `unit` is its number in the
program. K and V stand for pack * K and pack * V of the plan in shapes of a unit.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from glax._src.kernels.common import limits
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.blocks import (
    GradientOperands,
    block_diagonal,
    join_heads,
    load_gradient_operands,
    load_rows,
    load_unit,
    select_head,
    store_gradient,
    store_unit,
)
from glax._src.kernels.pallas_tpu.plan import Plan, Step
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, ForwardRefs, StateRefs

Refs = ForwardRefs | StateRefs | BackwardRefs


# ---- load gates ------------------------------------------------------------------------------------------------------


def load_gates(plan: Plan, step: Step, refs: Refs, unit):
    """Load the log gates of a unit from VMEM, [C, K] in float32 and at least LOG_OF_ZERO, with 0 outside of the step's rows."""
    gates = load_unit(plan, step, refs.key_gates, plan.H, plan.K, unit).astype(jnp.float32)
    return jnp.maximum(gates, limits.LOG_OF_ZERO)


def sum_gates(refs: Refs, matrix, gates):
    """Return matrix @ gates, [C, K] in float32: exact for float32 inputs, and to 16 bits of each gate for bfloat16 inputs.
    matrix: [C, C] of 1, 0 and -1. gates: [C, K]."""
    gates = gates.astype(jnp.bfloat16) if refs.key_gates.dtype == jnp.bfloat16 else gates
    return chunk_math.sum_by(matrix, gates, exact=refs.k.dtype == jnp.float32)


def in_range(plan: Plan, step: Step, refs: Refs):
    """Return whether |M|, |L| and |R| of `glax._src.kernels.common.limits` are in range in every channel of every unit, a
    traced bool.

    Each of the three is at most the sum of |gates| over its half of the chunk. `MiddleFactors` has e^L and e^R as two factors.
    The state is multiplied by one, then by the other, with the chunk's own part added in between, and never by their product.
    """
    half = plan.chunk // 2

    def larger_half(unit: int):
        size = jnp.abs(load_gates(plan, step, refs, unit))
        # [1, K]
        return jnp.maximum(size[:half].sum(0, keepdims=True), size[half:].sum(0, keepdims=True))

    largest = functools.reduce(jnp.maximum, map(larger_half, range(plan.units)))
    return largest.max() <= limits.FAST_LIMIT


def run_units(plan: Plan, step: Step, refs: Refs, factored, exact):
    """Run factored(), which computes all units, if the gates of all are in range; else exact(unit) for one unit after
    another."""
    is_in_range = in_range(plan, step, refs)

    @pl.when(is_in_range)
    def _():
        factored()

    @pl.when(jnp.logical_not(is_in_range))
    def _():
        lax.fori_loop(0, plan.units, lambda unit, _: exact(unit), None)


# ---- decays ----------------------------------------------------------------------------------------------------------


class MiddleFactors(NamedTuple):
    """Hold the decays of a unit relative to the chunk's middle, for the factored form."""

    up: jnp.ndarray  # [C, K]: e^M, multiplies q
    down: jnp.ndarray  # [C, K]: e^-M, multiplies k
    enter: jnp.ndarray  # [1, K]: e^L, multiplies the state that q e^M reads
    leave: jnp.ndarray  # [1, K]: e^R, multiplies the state after k e^-M is added


def middle_factors(plan: Plan, refs: Refs, gates) -> MiddleFactors:
    """Return the decays of a unit relative to the chunk's middle. gates: the result of `load_gates`."""
    C, reverse, half = plan.chunk, plan.reverse, plan.chunk // 2
    # [C, C]
    i, s = chunk_math.positions((C, C), 0, reverse), chunk_math.positions((C, C), 1, reverse)
    late, early = (half <= s) & (s <= i), (i < s) & (s < half)
    # [C, K]
    middle = sum_gates(refs, jnp.where(late, 1.0, jnp.where(early, -1.0, 0.0)), gates)
    begin, end = (C - 1, 0) if reverse else (0, C - 1)
    up, down = jnp.exp(middle), jnp.exp(-middle)
    enter = jnp.exp(gates[begin : begin + 1] - middle[begin : begin + 1])
    return MiddleFactors(up, down, enter, up[end : end + 1])


class EdgeDecays(NamedTuple):
    """Hold the decays of a unit between tokens and the edges of the chunk, for the exact form."""

    from_start: jnp.ndarray  # [C, K]: from the chunk's start through a token
    to_end: jnp.ndarray  # [C, K]: after a token, to the chunk's end
    total: jnp.ndarray  # [1, K]: of the whole chunk


def sums_from_start(plan: Plan, refs: Refs, gates):
    """Return the sums of log gates from the chunk's first token in scan order through each token, [C, K]."""
    i, s = (chunk_math.positions((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    return sum_gates(refs, jnp.where(s <= i, 1.0, 0.0), gates)


def sums_to_end(plan: Plan, refs: Refs, gates):
    """Return the sums of log gates after each token through the chunk's last token in scan order, [C, K]."""
    i, s = (chunk_math.positions((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    return sum_gates(refs, jnp.where(s > i, 1.0, 0.0), gates)


def edge_decays(plan: Plan, refs: Refs, gates) -> EdgeDecays:
    """Return the decays of a unit between tokens and the edges of the chunk. gates: the result of `load_gates`."""
    total = jnp.exp(gates.sum(0, keepdims=True))
    return EdgeDecays(jnp.exp(sums_from_start(plan, refs, gates)), jnp.exp(sums_to_end(plan, refs, gates)), total)


def fold_levels(plan: Plan, refs: Refs, gates, body, carry):
    """Return the carry after carry = body(factor, mask, carry) for each halving of the chunk, from blocks of C tokens to blocks
    of 2.

    mask [C, C] selects pairs of a token in the later half of a block with one in the earlier half. factor [C, K] is the decay
    between each token and its block's middle. gates: the result of `load_gates`.
    """
    C = plan.chunk
    i, s = chunk_math.positions((C, C), 0, plan.reverse), chunk_math.positions((C, C), 1, plan.reverse)

    def level(n, carry):
        width = lax.shift_right_logical(C, n)
        half, block = lax.shift_right_logical(width, 1), ~(width - 1)
        cut = (i & block) + half
        spans = ((cut <= s) & (s <= i)) | ((i < s) & (s < cut))
        mask = ((i & block) == (s & block)) & (i >= cut) & (s < cut)
        return body(jnp.exp(sum_gates(refs, jnp.where(spans, 1.0, 0.0), gates)), mask, carry)

    return lax.fori_loop(0, C.bit_length() - 1, level, carry)


# ---- forward ---------------------------------------------------------------------------------------------------------


def masked_pairs(plan: Plan, x, y, mask, part: int, width: int, dtype):
    """Return x y^T of one head of a unit where mask holds, else 0: [C, C]. x, y: [C, pack * width]. part: the head's number in
    its unit."""
    product = chunk_math.dot(select_head(plan, x, width, part), y, chunk_math.NT, dtype)
    return jnp.where(mask, product, 0)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Hold the stages of the forward of one step. scale: the scale of the step's sequence."""

    plan: Plan
    step: Step
    scale: jnp.ndarray
    refs: ForwardRefs

    @property
    def dtype(self):
        """Return the dtype of q, k and v, in which products take their operands."""
        return self.refs.q.dtype

    def pairs(self, q, k, mask, part: int):
        """Return q k^T of one head of a unit where mask holds, else 0: [C, C]. part: the head's number in its unit."""
        return masked_pairs(self.plan, q, k, mask, part, self.plan.K, self.dtype)

    def emit_outputs(self, unit, o, pairs, v):
        """Add the products of pairs [C, C] and v [C, pack * V] of each head to o [C, pack * V], and store o times the scale in
        VMEM. pairs: a list of one matrix for each head of the unit."""
        for part in range(self.plan.pack):
            v_part = select_head(self.plan, v, self.plan.V, part)
            o += chunk_math.dot(pairs[part], v_part, chunk_math.NN, self.dtype)
        store_unit(self.plan, self.step, self.refs.output, unit, o * self.scale)

    def factored_units(self):
        """Compute the outputs and states of all units in the factored form."""
        for unit in range(self.plan.units):
            self.factored(unit)

    def factored(self, unit):
        """Store a unit's outputs, and replace its state, in the factored form."""
        plan, refs, dtype = self.plan, self.refs, self.dtype
        # [C, K]   [C, K]   [C, V]
        q, k, v = load_rows(plan, self.step, refs, unit)
        # [V, K]
        S = refs.state[unit]
        f = middle_factors(plan, refs, load_gates(plan, self.step, refs, unit))
        q, k = (q * f.up).astype(dtype), (k * f.down).astype(dtype)
        causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=True)
        # [C, V]
        o = chunk_math.dot(q, S * f.enter, chunk_math.NT, dtype)
        self.emit_outputs(unit, o, [self.pairs(q, k, causal, part) for part in range(plan.pack)], v)
        refs.state[unit] = (S * f.enter + block_diagonal(plan, chunk_math.dot(v, k, chunk_math.TN, dtype))) * f.leave

    def exact(self, unit):
        """Store a unit's outputs, and replace its state, in the exact form."""
        plan, refs, dtype, parts = self.plan, self.refs, self.dtype, range(self.plan.pack)
        # [C, K]   [C, K]   [C, V]
        q, k, v = load_rows(plan, self.step, refs, unit)
        # [V, K]
        S = refs.state[unit]
        # [C, K]
        gates = load_gates(plan, self.step, refs, unit)
        edges = edge_decays(plan, refs, gates)
        diagonal = chunk_math.diagonal_mask(plan.chunk)

        def level(factor, mask, pairs):
            pairs = zip(parts, pairs, strict=True)
            return [x + self.pairs(q * factor, k * factor, mask, part) for part, x in pairs]

        pairs = fold_levels(plan, refs, gates, level, [self.pairs(q, k, diagonal, part) for part in parts])
        self.emit_outputs(unit, chunk_math.dot(q * edges.from_start, S, chunk_math.NT, dtype), pairs, v)
        S = S * edges.total
        refs.state[unit] = S + block_diagonal(plan, chunk_math.dot(v, k * edges.to_end, chunk_math.TN, dtype))


def forward(plan: Plan, step: Step, scale, refs: ForwardRefs):
    """Store a chunk's outputs and replace its state S by the state S' behind it, with per-key gates."""
    stages = Forward(plan, step, scale, refs)
    run_units(plan, step, refs, stages.factored_units, stages.exact)


def save_states(plan: Plan, step: Step, refs: StateRefs):
    """Replace the state in VMEM by the state behind the chunk, for all units, without computing outputs.

    The function takes one exponential for each element, which is exact for every gate, so no check of the range is needed.
    """
    dtype = refs.k.dtype
    for unit in range(plan.units):
        # [C, K]   [C, V]
        k = load_unit(plan, step, refs.k, plan.heads[1], plan.K, unit)
        v = load_unit(plan, step, refs.v, plan.heads[2], plan.V, unit)
        # [C, K]   [V, K]
        gates, S = load_gates(plan, step, refs, unit), refs.state[unit]
        # [C, K]   [1, K]
        to_end, total = jnp.exp(sums_to_end(plan, refs, gates)), jnp.exp(gates.sum(0, keepdims=True))
        refs.state[unit] = S * total + block_diagonal(plan, chunk_math.dot(v, k * to_end, chunk_math.TN, dtype))


# ---- gradient --------------------------------------------------------------------------------------------------------


class UnitGradient(NamedTuple):
    """Hold the gradient of a unit in float32. dq and dk lack the pairs of each token with itself, and dq lacks the scale."""

    dq: jnp.ndarray  # [C, K]
    dk: jnp.ndarray  # [C, K]
    dv: jnp.ndarray  # [C, V]
    gate_terms: jnp.ndarray  # [C, K]: q dq - k dk of each token
    edge: jnp.ndarray  # [1, K]: <S, dS> before the chunk
    state_read: jnp.ndarray  # [1, K]: what the outputs read from S, without the scale
    pairs: list  # of each head: [C, C]
    d_pairs: list  # of each head: [C, C], without the diagonal


@dataclasses.dataclass(frozen=True)
class Backward:
    """Hold the stages of the gradient of one step. scale: the scale of the step's sequence. The masks are [C, C]."""

    plan: Plan
    step: Step
    scale: jnp.ndarray
    refs: BackwardRefs
    causal: jnp.ndarray
    strictly_causal: jnp.ndarray

    @property
    def dtype(self):
        """Return the dtype of q, k and v, in which products take their operands."""
        return self.refs.q.dtype

    @property
    def parts(self) -> range:
        """Return the numbers of the heads in a unit."""
        return range(self.plan.pack)

    def pairs(self, q, k, mask) -> list:
        """Return q k^T where mask holds, else 0, for each head of a unit: a list of arrays [C, C]."""
        return [self.pair(q, k, mask, part) for part in self.parts]

    def pair(self, q, k, mask, part: int):
        """Return q k^T where mask holds, else 0, for one head of a unit: [C, C]. part: the head's number in its unit."""
        return masked_pairs(self.plan, q, k, mask, part, self.plan.K, self.dtype)

    def d_pairs(self, x: GradientOperands) -> list:
        """Return do v^T for j before i, else 0, for each head of a unit: a list of arrays [C, C]."""
        return [
            masked_pairs(self.plan, x.d_output, x.v, self.strictly_causal, part, self.plan.V, self.dtype)
            for part in self.parts
        ]

    def apply_pairs(self, pairs, x, width: int, dims):
        """Return the product of each head's pairs [C, C] with its lanes of x [C, pack * width], as one array [C, pack * width].
        dims: NN, or TN for transposed pairs."""
        products = (
            chunk_math.dot(pairs[part], select_head(self.plan, x, width, part), dims, self.dtype) for part in self.parts
        )
        return sum(products)

    def emit_gradients(self, unit, x: GradientOperands, d: UnitGradient):
        """Store the gradients of a unit in VMEM, after adding the pairs of each token with itself. x: the unit's operands. d:
        its gradient so far."""
        plan, step, refs, scale = self.plan, self.step, self.refs, self.scale
        Hq, Hk, Hv = plan.heads
        s_before = jnp.where(self.strictly_causal, 1.0, 0.0)
        earlier = chunk_math.sum_by(s_before, d.gate_terms, self.dtype == jnp.float32)
        store_unit(plan, step, refs.d_key_gates, unit, d.edge - earlier)
        # [C, V]
        products = x.d_output.astype(jnp.float32) * x.v
        # [C, K], or [C, 1] for one head
        d_diagonal = join_heads(
            plan,
            plan.K,
            [select_head(plan, products, plan.V, part).sum(1, keepdims=True) for part in self.parts],
        )
        # [C, K]
        dq_diagonal, dk_diagonal = d_diagonal * x.k, d_diagonal * x.q
        refs.scale_terms[unit, :, : plan.lanes] += d.state_read + (x.q * dq_diagonal).sum(0, keepdims=True)
        refs.scale_terms[unit, :, plan.lanes :] += jnp.asarray(
            sum(a * da for a, da in zip(d.pairs, d.d_pairs, strict=True))
        ).sum(0, keepdims=True)
        store_gradient(plan, step, refs.dq, Hq, unit, (d.dq + dq_diagonal) * scale)
        store_gradient(plan, step, refs.dk, Hk, unit, d.dk + dk_diagonal * scale)
        store_gradient(plan, step, refs.dv, Hv, unit, d.dv)

    def factored_units(self):
        """Compute the gradients of all units in the factored form."""
        for unit in range(self.plan.units):
            self.factored(unit)

    def factored(self, unit):
        """Store a unit's gradients, and replace dS by dL/dS before the chunk, in the factored form."""
        plan, refs, scale, dtype = self.plan, self.refs, self.scale, self.dtype
        q, k, v, do, S, dS = x = load_gradient_operands(plan, self.step, refs, unit)
        f = middle_factors(plan, refs, load_gates(plan, self.step, refs, unit))
        # [C, K]   [C, K]   [V, K]
        q, k, S = (q * f.up).astype(dtype), (k * f.down).astype(dtype), (S * f.enter).astype(dtype)
        # [C, C] of each head
        pairs, d_pairs = self.pairs(q, k, self.causal), self.d_pairs(x)
        dS = dS * f.leave
        # [C, K]   [C, K]   [C, V]
        dq = chunk_math.dot(do, S, chunk_math.NN, dtype) + self.apply_pairs(d_pairs, k, plan.K, chunk_math.NN)
        dk = chunk_math.dot(v, dS, chunk_math.NN, dtype) + self.apply_pairs(d_pairs, q, plan.K, chunk_math.TN) * scale
        dv = chunk_math.dot(k, dS, chunk_math.NT, dtype) + self.apply_pairs(pairs, do, plan.V, chunk_math.TN) * scale
        # [V, K]
        added = block_diagonal(plan, chunk_math.dot(do, q, chunk_math.TN, dtype))
        refs.d_state[unit] = (dS + added * scale) * f.enter
        # [1, K]
        state_read = (S * added).sum(0, keepdims=True)
        edge = (S * dS).sum(0, keepdims=True) + state_read * scale
        d = UnitGradient(
            dq=dq * f.up,
            dk=dk * f.down,
            dv=dv,
            gate_terms=q * dq * scale - k * dk,
            edge=edge,
            state_read=state_read,
            pairs=pairs,
            d_pairs=d_pairs,
        )
        self.emit_gradients(unit, x, d)

    def exact(self, unit):
        """Store a unit's gradients, and replace dS by dL/dS before the chunk, in the exact form."""
        plan, refs, scale, dtype = self.plan, self.refs, self.scale, self.dtype
        q, k, v, do, S, dS = x = load_gradient_operands(plan, self.step, refs, unit)
        # [C, K]
        gates = load_gates(plan, self.step, refs, unit)
        edges = edge_decays(plan, refs, gates)
        # [C, C] of each head
        d_pairs = self.d_pairs(x)

        def level(factor, mask, carry):
            pairs, dq, dk, gate_terms = carry
            q_middle, k_middle = (q * factor).astype(dtype), (k * factor).astype(dtype)
            pairs = [a + self.pair(q_middle, k_middle, mask, part) for part, a in zip(self.parts, pairs, strict=True)]
            of_level = [jnp.where(mask, a, 0).astype(dtype) for a in d_pairs]
            by_k = self.apply_pairs(of_level, k_middle, plan.K, chunk_math.NN)
            by_q = self.apply_pairs(of_level, q_middle, plan.K, chunk_math.TN)
            dq, dk = dq + factor * by_k, dk + factor * by_q * scale
            return pairs, dq, dk, gate_terms + (q_middle * by_k - k_middle * by_q) * scale

        # [C, K]   [C, K]   [V, K]
        q_start, k_end = (q * edges.from_start).astype(dtype), (k * edges.to_end).astype(dtype)
        S = S.astype(dtype)
        # [C, K]
        by_S, by_dS = chunk_math.dot(do, S, chunk_math.NN, dtype), chunk_math.dot(v, dS, chunk_math.NN, dtype)
        diagonal = [self.pair(q, k, chunk_math.diagonal_mask(plan.chunk), part) for part in self.parts]
        from_states = edges.from_start * by_S, edges.to_end * by_dS, q_start * by_S * scale - k_end * by_dS
        pairs, dq, dk, gate_terms = fold_levels(plan, refs, gates, level, (diagonal, *from_states))
        # [C, V]
        dv = (
            chunk_math.dot(k_end, dS, chunk_math.NT, dtype) + self.apply_pairs(pairs, do, plan.V, chunk_math.TN) * scale
        )
        # [V, K]
        added = block_diagonal(plan, chunk_math.dot(do, q_start, chunk_math.TN, dtype))
        dS = dS * edges.total
        refs.d_state[unit] = dS + added * scale
        # [1, K]
        state_read = (S * added).sum(0, keepdims=True)
        edge = (S * dS).sum(0, keepdims=True) + state_read * scale
        self.emit_gradients(unit, x, UnitGradient(dq, dk, dv, gate_terms, edge, state_read, pairs, d_pairs))


def backward(plan: Plan, step: Step, scale, refs: BackwardRefs):
    """Store dq, dk, dv, dS before the chunk and the gates' gradient, from S before the chunk and dS after it, all in VMEM.

    The pair of a token with itself passes no gate. Its terms of dq and dk stay out of the gates' sums, which they would exceed
    by far. The sums use products of rounded factors, and the same rounded factors wherever a pair appears. Therefore the terms
    of a pair that does not span t cancel exactly in dg_t.
    """
    causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=True)
    strictly_causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=False)
    stages = Backward(plan, step, scale, refs, causal, strictly_causal)
    run_units(plan, step, refs, stages.factored_units, stages.exact)
