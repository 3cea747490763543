"""Gates per key channel: the fast form where a run-time check allows it, the exact form elsewhere.

The fast form writes e^{G_i - G_j} as e^{M_i} e^{-M_j} with M = G minus G at the chunk's middle, for all pairs at once; the
exact form halves the chunk again and again, and no exponent is positive for gates <= 0. `xla.chunk_math` has both.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from glax._src.kernels.common import limits
from glax._src.kernels.pallas_tpu import chunk_math
from glax._src.kernels.pallas_tpu.blocks import add, block_diagonal, by_head, of_head, read_unit, write
from glax._src.kernels.pallas_tpu.launch import Refs
from glax._src.kernels.pallas_tpu.plan import Plan, Step


def read_gates(plan: Plan, step: Step, refs: Refs, unit):
    """[C, K] float32: the log gates of a unit, 0 outside of the step's rows."""
    gates = read_unit(plan, step, refs.key_gates, plan.H, plan.K, unit).astype(jnp.float32)
    return jnp.maximum(gates, limits.LOG_OF_ZERO)


def summed(plan: Plan, refs: Refs, matrix, gates):
    """matrix @ gates, exact to float32 for float32 inputs, to 16 bits of each gate for bfloat16 ones."""
    gates = gates.astype(jnp.bfloat16) if refs.key_gates.dtype == jnp.bfloat16 else gates
    return chunk_math.summed(matrix, gates, exact=refs.k.dtype == jnp.float32)


def fast_suffices(plan: Plan, step: Step, refs: Refs):
    """Returns whether |M|, |L| and |R| of glax._src.kernels.common.limits are in range in every channel of every unit.

    None exceeds the sum of |gates| of its half of the chunk. `enter` and `leave` are e^L and e^R: the state is multiplied by one
    and then by the other, with the chunk's own part between them, and never by their product.
    """
    half, reach = plan.chunk // 2, None
    for unit in range(plan.units):
        size = jnp.abs(read_gates(plan, step, refs, unit))
        # [1, K]
        both = jnp.maximum(size[:half].sum(0, keepdims=True), size[half:].sum(0, keepdims=True))
        reach = both if reach is None else jnp.maximum(reach, both)
    return reach.max() <= limits.FAST_LIMIT


def either_way(plan: Plan, step: Step, refs: Refs, fast, exact):
    """fast(unit) for each unit side by side, or exact(unit) one after another, by one check for all of them."""
    within = fast_suffices(plan, step, refs)

    @pl.when(within)
    def _():
        for unit in range(plan.units):
            fast(unit)

    @pl.when(jnp.logical_not(within))
    def _():
        lax.fori_loop(0, plan.units, lambda unit, _: exact(unit), None)


class Fast(NamedTuple):
    """e^M and e^-M, [C, K]; and, [1, K], what S is multiplied with to be read by q e^M, and k e^-M to be left in S."""

    up: jnp.ndarray
    down: jnp.ndarray
    enter: jnp.ndarray
    leave: jnp.ndarray


def fast_factors(plan: Plan, refs: Refs, gates) -> Fast:
    C, reverse, half = plan.chunk, plan.reverse, plan.chunk // 2
    i, s = chunk_math.tokens((C, C), 0, reverse), chunk_math.tokens((C, C), 1, reverse)
    late, early = (half <= s) & (s <= i), (i < s) & (s < half)
    middle = summed(plan, refs, jnp.where(late, 1.0, jnp.where(early, -1.0, 0.0)), gates)
    begin, end = (C - 1, 0) if reverse else (0, C - 1)
    up, down = jnp.exp(middle), jnp.exp(-middle)
    enter = jnp.exp(gates[begin : begin + 1] - middle[begin : begin + 1])
    return Fast(up, down, enter, up[end : end + 1])


class Edges(NamedTuple):
    """The decay from the chunk's start through a token and from behind it to the end, [C, K]; of the chunk, [1, K]."""

    inward: jnp.ndarray
    outward: jnp.ndarray
    total: jnp.ndarray


def through(plan: Plan, refs: Refs, gates):
    """[C, K]: the sums of log gates from the chunk's first token through each."""
    i, s = (chunk_math.tokens((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    return summed(plan, refs, jnp.where(s <= i, 1.0, 0.0), gates)


def behind(plan: Plan, refs: Refs, gates):
    """[C, K]: the sums of log gates from behind each token to the chunk's last."""
    i, s = (chunk_math.tokens((plan.chunk, plan.chunk), axis, plan.reverse) for axis in (0, 1))
    return summed(plan, refs, jnp.where(s > i, 1.0, 0.0), gates)


def edges(plan: Plan, refs: Refs, gates) -> Edges:
    total = jnp.exp(gates.sum(0, keepdims=True))
    return Edges(jnp.exp(through(plan, refs, gates)), jnp.exp(behind(plan, refs, gates)), total)


def each_level(plan: Plan, refs: Refs, gates, body, carry):
    """Folds body(factor [C, K], mask [C, C], carry) over the halvings of the chunk.

    The mask holds the pairs of the later and the earlier half of a block; factor is each token's decay to the block's middle.
    """
    C = plan.chunk
    i, s = chunk_math.tokens((C, C), 0, plan.reverse), chunk_math.tokens((C, C), 1, plan.reverse)

    def level(n, carry):
        width = lax.shift_right_logical(C, n)
        half, block = lax.shift_right_logical(width, 1), ~(width - 1)
        cut = (i & block) + half
        spans = ((cut <= s) & (s <= i)) | ((i < s) & (s < cut))
        mask = ((i & block) == (s & block)) & (i >= cut) & (s < cut)
        return body(jnp.exp(summed(plan, refs, jnp.where(spans, 1.0, 0.0), gates)), mask, carry)

    return lax.fori_loop(0, C.bit_length() - 1, level, carry)


def forward(plan: Plan, step: Step, scale, refs: Refs):
    """o and S' of `glax._src.kernels.pallas_tpu.forward`, gates per key channel."""
    dtype = refs.q.dtype
    Hq, Hk, Hv = plan.heads
    parts = range(plan.pack)

    def read(unit):
        # [C, K]   [C, K]   [C, V]   [V, K]
        q = read_unit(plan, step, refs.q, Hq, plan.K, unit)
        k = read_unit(plan, step, refs.k, Hk, plan.K, unit)
        v = read_unit(plan, step, refs.v, Hv, plan.V, unit)
        return q, k, v, refs.state[unit]

    def pairs_of(q, k, mask, part):
        return jnp.where(mask, chunk_math.dot(of_head(plan, q, plan.K, part), k, chunk_math.NT, dtype), 0)

    def finish(unit, o, pairs, v):
        for part in parts:
            o += chunk_math.dot(pairs[part], of_head(plan, v, plan.V, part), chunk_math.NN, dtype)
        write(plan, step, refs.output, unit, o * scale)

    def fast(unit):
        q, k, v, S = read(unit)
        f = fast_factors(plan, refs, read_gates(plan, step, refs, unit))
        q, k = (q * f.up).astype(dtype), (k * f.down).astype(dtype)
        causal = chunk_math.earlier(plan.chunk, plan.reverse, own=True)
        o = chunk_math.dot(q, S * f.enter, chunk_math.NT, dtype)
        finish(unit, o, [pairs_of(q, k, causal, part) for part in parts], v)
        refs.state[unit] = (S * f.enter + block_diagonal(plan, chunk_math.dot(v, k, chunk_math.TN, dtype))) * f.leave

    def exact(unit):
        q, k, v, S = read(unit)
        gates = read_gates(plan, step, refs, unit)
        e = edges(plan, refs, gates)
        itself = chunk_math.itself(plan.chunk)

        def level(factor, mask, pairs):
            return [x + pairs_of(q * factor, k * factor, mask, part) for part, x in zip(parts, pairs, strict=True)]

        pairs = each_level(plan, refs, gates, level, [pairs_of(q, k, itself, part) for part in parts])
        finish(unit, chunk_math.dot(q * e.inward, S, chunk_math.NT, dtype), pairs, v)
        refs.state[unit] = S * e.total + block_diagonal(plan, chunk_math.dot(v, k * e.outward, chunk_math.TN, dtype))

    either_way(plan, step, refs, fast, exact)


def remember(plan: Plan, step: Step, refs: Refs):
    """S' alone: one exponential an element, exact for every gate."""
    dtype = refs.k.dtype
    for unit in range(plan.units):
        # [C, K]   [C, V]   [C, K]   [V, K]
        k = read_unit(plan, step, refs.k, plan.heads[1], plan.K, unit)
        v = read_unit(plan, step, refs.v, plan.heads[2], plan.V, unit)
        gates, S = read_gates(plan, step, refs, unit), refs.state[unit]
        outward, total = jnp.exp(behind(plan, refs, gates)), jnp.exp(gates.sum(0, keepdims=True))
        refs.state[unit] = S * total + block_diagonal(plan, chunk_math.dot(v, k * outward, chunk_math.TN, dtype))


def backward(plan: Plan, step: Step, scale, refs: Refs):
    """dq, dk, dv, dS before the chunk and the gates' gradient, from S before it and dS after it.

    A token's own part of dq and dk, in which no gate takes part, stays out of the gates' sums: it would drown them. The sums
    are of products of rounded factors, the same ones wherever a pair of tokens appears, so that a pair which does not span t
    leaves nothing of itself in dg_t.
    """
    dtype = refs.q.dtype
    Hq, Hk, Hv = plan.heads
    parts = range(plan.pack)
    causal = chunk_math.earlier(plan.chunk, plan.reverse, own=True)
    earlier = chunk_math.earlier(plan.chunk, plan.reverse, own=False)

    def read(unit):
        # [C, K]   [C, K]   [C, V]   [C, V]   [V, K]   [V, K]
        q = read_unit(plan, step, refs.q, Hq, plan.K, unit)
        k = read_unit(plan, step, refs.k, Hk, plan.K, unit)
        v = read_unit(plan, step, refs.v, Hv, plan.V, unit)
        do = read_unit(plan, step, refs.d_output, plan.H, plan.V, unit)
        return q, k, v, do, refs.before[unit].astype(jnp.float32), refs.d_state[unit]

    def pairs_of(x, y, mask, part, width):
        return jnp.where(mask, chunk_math.dot(of_head(plan, x, width, part), y, chunk_math.NT, dtype), 0)

    def spread(pairs, x, width, dims):
        return sum(chunk_math.dot(pairs[part], of_head(plan, x, width, part), dims, dtype) for part in parts)

    def finish(unit, q, k, v, do, dq, dk, dv, terms, edge, read, pairs, d_pairs):
        """dq and dk come without the tokens' own parts, and dq without the scale, as all of `terms`, `edge` and `read` do."""
        s_before = jnp.where(earlier, 1.0, 0.0)
        write(plan, step, refs.d_key_gates, unit, edge - chunk_math.summed(s_before, terms, dtype == jnp.float32))
        each = do.astype(jnp.float32) * v
        d_own = by_head(plan, plan.K, [of_head(plan, each, plan.V, part).sum(1, keepdims=True) for part in parts])
        q_own, k_own = d_own * k, d_own * q
        refs.scale_terms[unit, :, : plan.lanes] += read + (q * q_own).sum(0, keepdims=True)
        refs.scale_terms[unit, :, plan.lanes :] += sum(x * y for x, y in zip(pairs, d_pairs, strict=True)).sum(
            0, keepdims=True
        )
        add(plan, step, refs.dq, Hq, unit, (dq + q_own) * scale)
        add(plan, step, refs.dk, Hk, unit, dk + k_own * scale)
        add(plan, step, refs.dv, Hv, unit, dv)

    def fast(unit):
        q, k, v, do, S, dS = read(unit)
        f = fast_factors(plan, refs, read_gates(plan, step, refs, unit))
        q_up, k_down, S = (q * f.up).astype(dtype), (k * f.down).astype(dtype), (S * f.enter).astype(dtype)
        pairs = [pairs_of(q_up, k_down, causal, part, plan.K) for part in parts]
        d_pairs = [pairs_of(do, v, earlier, part, plan.V) for part in parts]
        dS = dS * f.leave
        dq = chunk_math.dot(do, S, chunk_math.NN, dtype) + spread(d_pairs, k_down, plan.K, chunk_math.NN)
        dk = chunk_math.dot(v, dS, chunk_math.NN, dtype) + spread(d_pairs, q_up, plan.K, chunk_math.TN) * scale
        dv = chunk_math.dot(k_down, dS, chunk_math.NT, dtype) + spread(pairs, do, plan.V, chunk_math.TN) * scale
        added = block_diagonal(plan, chunk_math.dot(do, q_up, chunk_math.TN, dtype))
        refs.d_state[unit] = (dS + added * scale) * f.enter
        read_by = (S * added).sum(0, keepdims=True)
        edge = (S * dS).sum(0, keepdims=True) + read_by * scale
        finish(
            unit,
            q,
            k,
            v,
            do,
            dq * f.up,
            dk * f.down,
            dv,
            q_up * dq * scale - k_down * dk,
            edge,
            read_by,
            pairs,
            d_pairs,
        )

    def exact(unit):
        q, k, v, do, S, dS = read(unit)
        gates = read_gates(plan, step, refs, unit)
        e = edges(plan, refs, gates)
        d_pairs = [pairs_of(do, v, earlier, part, plan.V) for part in parts]

        def level(factor, mask, carry):
            pairs, dq, dk, terms = carry
            q_in, k_in = (q * factor).astype(dtype), (k * factor).astype(dtype)
            pairs = [x + pairs_of(q_in, k_in, mask, part, plan.K) for part, x in zip(parts, pairs, strict=True)]
            here = [jnp.where(mask, x, 0).astype(dtype) for x in d_pairs]
            by_k, by_q = spread(here, k_in, plan.K, chunk_math.NN), spread(here, q_in, plan.K, chunk_math.TN)
            return pairs, dq + factor * by_k, dk + factor * by_q * scale, terms + (q_in * by_k - k_in * by_q) * scale

        q_in, k_out, S = (q * e.inward).astype(dtype), (k * e.outward).astype(dtype), S.astype(dtype)
        by_S, by_dS = chunk_math.dot(do, S, chunk_math.NN, dtype), chunk_math.dot(v, dS, chunk_math.NN, dtype)
        own = [pairs_of(q, k, chunk_math.itself(plan.chunk), part, plan.K) for part in parts]
        carry = own, e.inward * by_S, e.outward * by_dS, q_in * by_S * scale - k_out * by_dS
        pairs, dq, dk, terms = each_level(plan, refs, gates, level, carry)
        dv = chunk_math.dot(k_out, dS, chunk_math.NT, dtype) + spread(pairs, do, plan.V, chunk_math.TN) * scale
        added = block_diagonal(plan, chunk_math.dot(do, q_in, chunk_math.TN, dtype))
        dS = dS * e.total
        refs.d_state[unit] = dS + added * scale
        read_by = (S * added).sum(0, keepdims=True)
        edge = (S * dS).sum(0, keepdims=True) + read_by * scale
        finish(unit, q, k, v, do, dq, dk, dv, terms, edge, read_by, pairs, d_pairs)

    either_way(plan, step, refs, fast, exact)
