"""Gates per head: e^{G_i - G_j} for every pair of tokens, each exact, so no gate needs another form.

In float32, G is two sums: of log gates rounded to multiples of 1/16, exact however long, and of what is left, small. Their
differences keep every digit even where gates of -100 stand among mild ones. For bfloat16 one float32 sum is enough: of a
chunk's gates, none below -128, it is off by less than 1e-3 even where all of them are, and by 1e-5 where they add up to 100.

Sums along the lanes come from one product with a matrix of ones; a column, spread over the lanes, costs sixteen permutations a
head, so as little as possible is taken from columns: sums, never the exponentials of sums.
"""

from typing import NamedTuple

import jax.numpy as jnp

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.blocks import (
    add,
    block_diagonal,
    by_head,
    gates_per_head,
    of_head,
    own_rows,
    read_unit,
    write,
)
from glax._src.kernels.pallas_tpu.launch import Refs
from glax._src.kernels.pallas_tpu.plan import Plan, Step


class HeadSums(NamedTuple):
    """G of every head of a program, as the terms that it is a sum of.

    rows: each [R, C]; columns: the same, transposed, side by side, [C, terms * R]; last: G of the chunk, each [R, 1].
    """

    rows: tuple
    columns: jnp.ndarray
    last: tuple

    @property
    def terms(self) -> range:
        return range(len(self.rows))

    def row(self, term: int, head: int):
        """[1, C]."""
        return self.rows[term][head : head + 1]

    def column(self, term: int, head: int):
        """[C, 1]."""
        at = term * self.rows[0].shape[0] + head
        return self.columns[:, at : at + 1]

    def pairs(self, head: int, mask):
        """[C, C]: the decay from behind token j through token i where mask holds, else 0."""
        between = sum(self.column(term, head) - self.row(term, head) for term in self.terms)
        return jnp.exp(jnp.where(mask, between, -jnp.inf))

    def spread(self, term: int, head: int, width: int):
        """[C, width]."""
        return jnp.broadcast_to(self.column(term, head), (self.columns.shape[0], width))

    def inward(self, head: int, width: int):
        """[C, width]: the decay from the chunk's start through a token."""
        return jnp.exp(sum(self.spread(term, head, width) for term in self.terms))

    def outward(self, head: int, width: int):
        """[C, width]: the decay from behind a token to the chunk's end."""
        last = (self.last[term][head : head + 1] for term in self.terms)
        return jnp.exp(sum(end - self.spread(term, head, width) for term, end in zip(self.terms, last, strict=True)))

    def edges(self):
        """`inward` and `outward` of all heads, [R, C], and the decay of the whole chunk, [R, 1]."""
        outward = sum(end - x for end, x in zip(self.last, self.rows, strict=True))
        return jnp.exp(sum(self.rows)), jnp.exp(outward), jnp.exp(sum(self.last))


def head_sums(gates, reverse: bool, dtype) -> HeadSums:
    """gates: [R, C] float32, 0 outside of the step's rows; dtype: that of q, k and v."""
    R, C = gates.shape
    gates = jnp.maximum(gates, LOG_OF_ZERO)
    terms = [gates]
    if dtype == jnp.float32:
        coarse = jnp.floor(gates * 16 + 0.5) * (1 / 16)
        terms = [coarse, gates - coarse]
    s, i = chunk_math.tokens((C, C), 0, reverse), chunk_math.tokens((C, C), 1, reverse)
    # [terms * R, C]
    sums = chunk_math.dot(jnp.concatenate(terms), jnp.where(s <= i, 1.0, 0.0), chunk_math.NN, jnp.float32)
    rows = tuple(sums[n * R : (n + 1) * R] for n in range(len(terms)))
    end = 0 if reverse else C - 1
    return HeadSums(rows, sums.T, tuple(x[:, end : end + 1] for x in rows))


def forward(plan: Plan, step: Step, scale, refs: Refs):
    """o and S' of `glax._src.kernels.pallas_tpu.forward`, without gates or with gates per head."""
    dtype = refs.q.dtype
    gates = gates_per_head(plan, step, refs)
    sums = None if gates is None else head_sums(gates, plan.reverse, dtype)
    _, outward, total = (None, None, None) if sums is None else sums.edges()
    causal = chunk_math.earlier(plan.chunk, plan.reverse, own=True)
    Hq, Hk, Hv = plan.heads
    for unit in range(plan.units):
        heads = plan.heads_of(unit)
        # [C, K]   [C, K]   [C, V]   [V, K]
        q = read_unit(plan, step, refs.q, Hq, plan.K, unit)
        k = read_unit(plan, step, refs.k, Hk, plan.K, unit)
        v = read_unit(plan, step, refs.v, Hv, plan.V, unit)
        S = refs.state[unit]
        o = chunk_math.dot(q, S, chunk_math.NT, dtype)
        if sums is not None:
            o *= by_head(plan, plan.V, [sums.inward(head, o.shape[1]) for head in heads])
        for part, head in enumerate(heads):
            # [C, C]
            pairs = chunk_math.dot(of_head(plan, q, plan.K, part), k, chunk_math.NT, dtype)
            pairs = jnp.where(causal, pairs, 0) if sums is None else pairs * sums.pairs(head, causal)
            o += chunk_math.dot(pairs, of_head(plan, v, plan.V, part), chunk_math.NN, dtype)
        write(plan, step, refs.output, unit, o * scale)
        refs.state[unit] = advance(plan, S, k, v, outward, total, heads, dtype)


def advance(plan: Plan, S, k, v, outward, total, heads, dtype):
    """e^{G_last} S + sum_j v_j (k_j e^{G_last - G_j})^T  [V, K]; outward [R, C] and total [R, 1] are of all heads."""
    v = v.T
    if outward is not None:
        v = v * by_head(plan, plan.V, [outward[head : head + 1] for head in heads], axis=0)
        S = S * by_head(plan, plan.K, [total[head : head + 1] for head in heads])
    return S + block_diagonal(plan, chunk_math.dot(v, k, chunk_math.NN, dtype))


def remember(plan: Plan, step: Step, refs: Refs):
    """S' alone."""
    dtype = refs.k.dtype
    gates = gates_per_head(plan, step, refs)
    _, outward, total = (None, None, None) if gates is None else head_sums(gates, plan.reverse, dtype).edges()
    for unit in range(plan.units):
        k = read_unit(plan, step, refs.k, plan.heads[1], plan.K, unit)
        v = read_unit(plan, step, refs.v, plan.heads[2], plan.V, unit)
        refs.state[unit] = advance(plan, refs.state[unit], k, v, outward, total, plan.heads_of(unit), dtype)


def backward(plan: Plan, step: Step, scale, refs: Refs):
    """dq, dk, dv, dS before the chunk and the gates' gradient, from S before it and dS after it.

    With W_ij = A_ij dA_ij the pairs j < i, each token's q.dq - k.dk is the sum of its row of W less that of its column, and
    the parts that come from S and dS: a token's own pair, in which no gate takes part, never enters.
    """
    dtype = refs.q.dtype
    gates = gates_per_head(plan, step, refs)
    sums = None if gates is None else head_sums(gates, plan.reverse, dtype)
    inward, _, total = (None, None, None) if sums is None else sums.edges()
    causal = chunk_math.earlier(plan.chunk, plan.reverse, own=True)
    earlier = chunk_math.earlier(plan.chunk, plan.reverse, own=False)
    Hq, Hk, Hv = plan.heads
    for unit in range(plan.units):
        heads = plan.heads_of(unit)
        # [C, K]   [C, K]   [C, V]   [C, V]   [V, K]   [V, K]
        q = read_unit(plan, step, refs.q, Hq, plan.K, unit)
        k = read_unit(plan, step, refs.k, Hk, plan.K, unit)
        v = read_unit(plan, step, refs.v, Hv, plan.V, unit)
        do = read_unit(plan, step, refs.d_output, plan.H, plan.V, unit)
        S, dS = refs.before[unit].astype(jnp.float32), refs.d_state[unit]
        dq, dk, dv = (
            chunk_math.dot(*xs, dtype)
            for xs in ((do, S, chunk_math.NN), (v, dS, chunk_math.NN), (k, dS, chunk_math.NT))
        )
        do_out = do.T
        if sums is not None:
            dq *= by_head(plan, plan.K, [sums.inward(head, dq.shape[1]) for head in heads])
            out = [sums.outward(head, max(dk.shape[1], dv.shape[1])) for head in heads]
            dk *= by_head(plan, plan.K, [x[:, : dk.shape[1]] for x in out])
            dv *= by_head(plan, plan.V, [x[:, : dv.shape[1]] for x in out])
            do_out = do_out * by_head(plan, plan.V, [inward[head : head + 1] for head in heads], axis=0)
            dS = dS * by_head(plan, plan.K, [total[head : head + 1] for head in heads])
        # [V, K]: what the chunk's tokens add to dS, without the scale
        added = block_diagonal(plan, chunk_math.dot(do_out, q, chunk_math.NN, dtype))
        refs.d_state[unit] = dS + added * scale
        read = (S * added).sum(0, keepdims=True)
        refs.scale_terms[unit, :, : plan.lanes] += read
        if sums is not None:
            from_states, edge = q * dq * scale - k * dk, (S * dS).sum(0, keepdims=True) + read * scale
        for part, head in enumerate(heads):
            q_own, k_own, do_own = (of_head(plan, x, w, part) for x, w in ((q, plan.K), (k, plan.K), (do, plan.V)))
            # [C, C]
            pairs, d_pairs = (
                chunk_math.dot(q_own, k, chunk_math.NT, dtype),
                chunk_math.dot(do_own, v, chunk_math.NT, dtype),
            )
            between = None if sums is None else sums.pairs(head, causal)
            pairs = jnp.where(causal, pairs, 0) if sums is None else pairs * between
            both = pairs * d_pairs
            refs.scale_terms[unit, :, plan.lanes :] += both.sum(0, keepdims=True)
            if sums is not None:
                both = jnp.where(earlier, both, 0) * scale
                rows = chunk_math.row_sums(both, of_head(plan, from_states, plan.K, part))
                refs.row_terms[:, head : head + 1] = rows
                refs.column_terms[head : head + 1] = both.sum(0, keepdims=True)
                refs.edges[head : head + 1] = of_head(plan, edge, plan.K, part)
            d_pairs = jnp.where(causal, d_pairs, 0) if sums is None else d_pairs * between
            d_pairs, pairs = d_pairs.astype(dtype), pairs.astype(dtype)
            dq += chunk_math.dot(d_pairs, k_own, chunk_math.NN, dtype)
            dk += chunk_math.dot(d_pairs.T, q_own, chunk_math.NN, dtype) * scale
            dv += chunk_math.dot(pairs.T, do_own, chunk_math.NN, dtype) * scale
        add(plan, step, refs.dq, Hq, unit, dq * scale)
        add(plan, step, refs.dk, Hk, unit, dk)
        add(plan, step, refs.dv, Hv, unit, dv)
    if sums is not None:
        gate_gradient(plan, step, refs)


def gate_gradient(plan: Plan, step: Step, refs: Refs):
    """dg_t = <S, dS>_{before the chunk} - sum over s before t in the chunk of (q_s dq_s - k_s dk_s), in every head."""
    s, t = (chunk_math.tokens((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    terms = refs.row_terms[...].T[: plan.gate_rows] - refs.column_terms[...]
    behind = chunk_math.dot(terms, jnp.where(s < t, 1.0, 0.0), chunk_math.NN, jnp.float32)
    each = refs.edges[...].sum(1, keepdims=True) - behind
    own = own_rows(plan, step, axis=1)
    if hasattr(refs, "d_constant"):
        refs.constant_terms[...] += chunk_math.masked(each, own)
    else:
        refs.d_gates[...] = each if own is None else jnp.where(own, each, refs.d_gates[...] if plan.packed else 0)
