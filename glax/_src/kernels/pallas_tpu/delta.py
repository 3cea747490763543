"""Compute chunks of the delta rule. G_i is the sum of log gates through token i, and S the state before the chunk:

    L_ij = e_i . k_j e^{G_i - G_j}    j before i        what token i erases of what token j wrote
    P_ij = q_i . k_j e^{G_i - G_j}    j before i, j = i
    U    = (I + L)^-1 (w * v - (e e^G) S)               what the tokens write: u_i beside key k_i
    O    = (q e^G) S + P U
    S'   = e^{G_last} S + (k e^{G_last - G})^T U

A chunk is thus one of GLA with U in the place of v, and one more matrix of scores. Both matrices take the same factors of the
decays, those of `head_gate` and of `key_gate`, which are exact for every gate. L includes the decays: the inverse of a matrix
without them may overflow where (I + L)^-1 is small.

With beta, e = beta k and w = beta. Then beta multiplies the rows of products with k, and k itself is not rounded again.

What a token writes depends on what all earlier ones wrote, so rounding errors grow where nothing decays. Therefore products take
16 bits of each operand where q, k and v are bfloat16 (`chunk_math.fine_dot`).

A unit is one head, or two whose channels lie side by side in the lanes: `pack` heads (`plan.Plan`). `unit` is its number in the
program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from glax._src.kernels.pallas_tpu import chunk_math, head_gate, key_gate
from glax._src.kernels.pallas_tpu.blocks import (
    block_diagonal,
    join_heads,
    load_gradient_operands,
    load_rows,
    load_unit,
    select_head,
    step_rows,
    store_gradient,
    store_unit,
)
from glax._src.kernels.pallas_tpu.inverse import unit_inverse
from glax._src.kernels.pallas_tpu.plan import Plan, Step
from glax._src.kernels.pallas_tpu.refs import BackwardRefs, ForwardRefs, StateRefs

Refs = ForwardRefs | StateRefs | BackwardRefs


# ---- the decays of a chunk -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadDecays:
    """Form the products of a chunk with the decays of per-head gates, for the heads of one unit.

    Decays multiply products, never operands. heads: the numbers of the unit's heads in its program. sums and edges are None
    without gates. dtype: the dtype of q, k and v, which sets the precision of products (`chunk_math.fine_dot`).
    """

    plan: Plan
    heads: range
    sums: head_gate.HeadSums | None
    edges: head_gate.EdgeDecays | None
    dtype: Any

    def entering(self, S):
        """Return S, the transposed state before the chunk [pack * V, pack * K], in the form that `read` takes: unchanged. The
        adjoint of this function is the function itself."""
        return S

    def read(self, xs, S):
        """Return (x e^G) S for each x of xs [C, pack * K]: a list of arrays [C, pack * V]. S: the result of `entering`, [pack *
        V, pack * K]."""
        products = stacked_dot(xs, S, chunk_math.NT, self.dtype)
        if self.sums is None:
            return products
        decays = [self.sums.from_start(head, products[0].shape[1]) for head in self.heads]
        return [x * join_heads(self.plan, self.plan.V, decays) for x in products]

    @functools.cached_property
    def between(self) -> list:
        """Return e^{G_i - G_j} of each head for j before i and j = i, else 0: a list of arrays [C, C]."""
        causal = chunk_math.causal_mask(self.plan.chunk, self.plan.reverse, inclusive=True)
        if self.sums is None:
            return [jnp.where(causal, 1.0, 0.0)] * self.plan.pack
        return [self.sums.pair_decays(head, causal) for head in self.heads]

    def scores(self, q, e, k) -> tuple[list, list]:
        """Return (P of each head, L of each head), lists of arrays [C, C]. L includes its diagonal. P is empty if q is None. q,
        e, k: [C, pack * K]."""

        parts = self.plan.pack
        rows = [part for x in (q, e) if x is not None for part in select_heads(self.plan, x)]
        products = stacked_dot(rows, k, chunk_math.NT, self.dtype)
        scores = [product * self.between[i % parts] for i, product in enumerate(products)]
        return scores[:-parts], scores[-parts:]

    def read_gradient(self, ds, S):
        """Return the gradients (d S^T) e^G of the operands of `read`, a list of arrays [C, pack * K]. ds: the gradients of its
        results. S: the argument of `read`."""
        products = stacked_dot(ds, S, chunk_math.NN, self.dtype)
        if self.sums is None:
            return products
        decays = [self.sums.from_start(head, products[0].shape[1]) for head in self.heads]
        return [product * join_heads(self.plan, self.plan.K, decays) for product in products]

    def read_added(self, x, d):
        """Return the term d^T (x e^G) of one result of `read` in the gradient of S, [pack * V, pack * K]. x: the operand, [C,
        pack * K]. d: the gradient of the result, [C, pack * V]."""
        d = d.astype(jnp.float32).T
        if self.edges is not None:
            d = d * join_heads(
                self.plan, self.plan.V, [self.edges.from_start[head : head + 1] for head in self.heads], axis=0
            )
        return block_diagonal(self.plan, chunk_math.fine_dot(d, x, chunk_math.NN, self.dtype))

    def scores_gradient(self, d_pairs: list, xs: list, k):
        """Return (the gradients of each x of xs, for each x its term in the gradient of k): two lists of arrays [C, pack * K].

        d_pairs: for each x, the gradient of its scores, [C, C] for each head, with 0 where no score is. xs: q and e. k: [C,
        pack * K].
        """
        dxs, dks = [jnp.zeros(k.shape, jnp.float32) for _ in xs], [jnp.zeros(k.shape, jnp.float32) for _ in xs]
        for part, between in enumerate(self.between):
            ds = [d[part] * between for d in d_pairs]
            products = stacked_dot(ds, select_head(self.plan, k, self.plan.K, part), chunk_math.NN, self.dtype)
            for i, (d, x) in enumerate(zip(ds, xs, strict=True)):
                dxs[i] += products[i]
                dks[i] += chunk_math.fine_dot(
                    d, select_head(self.plan, x, self.plan.K, part), chunk_math.TN, self.dtype
                )
        return dxs, dks

    def leaving(self, dS):
        """Return dS, the gradient of the state after the chunk [pack * V, pack * K], in the form that `write_gradient` and
        `decayed` take: unchanged."""
        return dS

    def write_gradient(self, k, U, dS):
        """Return the gradients of U [C, pack * V] and of k [C, pack * K] through the state after the chunk. dS: the result of
        `leaving`."""
        dU = chunk_math.fine_dot(k, dS, chunk_math.NT, self.dtype)
        dk = chunk_math.fine_dot(U, dS, chunk_math.NN, self.dtype)
        if self.sums is None:
            return dU, dk
        to_end = [self.sums.to_end(head, max(dU.shape[1], dk.shape[1])) for head in self.heads]
        dU *= join_heads(self.plan, self.plan.V, [x[:, : dU.shape[1]] for x in to_end])
        dk *= join_heads(self.plan, self.plan.K, [x[:, : dk.shape[1]] for x in to_end])
        return dU, dk

    def decayed(self, dS):
        """Return e^{G_last} dS: the gradient of the state before the chunk, without the terms of tokens that read it. dS: the
        result of `leaving`."""
        if self.edges is None:
            return dS
        return dS * join_heads(self.plan, self.plan.K, [self.edges.total[head : head + 1] for head in self.heads])

    def carry(self, S, k, U):
        """Return the state after the chunk, e^{G_last} S + (k e^{G_last - G})^T U, transposed. S: the result of `entering`. U:
        [C, pack * V]."""
        return head_gate.carry_state(self.plan, S, k, U, self.edges, self.heads, self.dtype, chunk_math.fine_dot)


@dataclasses.dataclass(frozen=True)
class KeyDecays:
    """Form the products of a chunk with the decays of per-key gates, for one unit. Decays multiply operands. The methods are
    those of `HeadDecays`.

    In the factored form sums of gates begin at the chunk's middle: the methods take e^L S for S, and e^R dS for dS. levels: a
    function (body, carry) -> carry, which calls body(up, down, mask, carry) for each set of pairs that share a reference: up
    and down, [C, K], are the factors of rows and of keys, and mask [C, C] selects the pairs. K is here pack * K of the plan.
    """

    plan: Plan
    dtype: Any
    inward: jnp.ndarray  # [C, K]: multiplies what reads S
    outward: jnp.ndarray  # [C, K]: multiplies the keys of what is written
    enter: jnp.ndarray | None  # [1, K]: multiplies the state before it is read; None for 1
    keep: jnp.ndarray | None  # [1, K]: multiplies the state before the chunk's writes are added; None for 1
    leave: jnp.ndarray | None  # [1, K]: multiplies the state after that; None for 1
    levels: Callable

    @classmethod
    def factored(cls, plan: Plan, step: Step, refs: Refs, unit: int) -> "KeyDecays":
        """Return the decays of a unit in the factored form, which is exact only for gates in range."""
        f = key_gate.middle_factors(plan, refs, key_gate.load_gates(plan, step, refs, unit))
        causal = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=True)

        def levels(body, carry):
            return body(f.up, f.down, causal, carry)

        return cls(plan, refs.k.dtype, f.up, f.down, f.enter, None, f.leave, levels)

    @classmethod
    def exact(cls, plan: Plan, step: Step, refs: Refs, unit) -> "KeyDecays":
        """Return the decays of a unit in the exact form, for all gates."""
        gates = key_gate.load_gates(plan, step, refs, unit)
        edges = key_gate.edge_decays(plan, refs, gates)
        diagonal = chunk_math.diagonal_mask(plan.chunk)

        def levels(body, carry):
            def level(factor, mask, carry):
                return body(factor, factor, mask, carry)

            return key_gate.fold_levels(plan, refs, gates, level, body(1.0, 1.0, diagonal, carry))

        return cls(plan, refs.k.dtype, edges.from_start, edges.to_end, None, edges.total, None, levels)

    def entering(self, S):
        return times(S, self.enter)

    def read(self, xs, S):
        return stacked_dot([x * self.inward for x in xs], S, chunk_math.NT, self.dtype)

    def scores(self, q, e, k) -> tuple[list, list]:
        """Return (P of each head, L of each head), [C, C] each. L includes its diagonal. P is empty if q is None."""
        C, parts = self.plan.chunk, self.plan.pack

        def level(up, down, mask, carry):
            rows = [part for x in (q, e) if x is not None for part in select_heads(self.plan, x * up)]
            products = stacked_dot(rows, k * down, chunk_math.NT, self.dtype)
            return [x + masked(product, mask) for x, product in zip(carry, products, strict=True)]

        zeros = jnp.zeros((C, C), jnp.float32)
        scores = self.levels(level, [zeros for x in (q, e) if x is not None for _ in range(parts)])
        return scores[:-parts], scores[-parts:]

    def read_gradient(self, ds, S):
        return [x * self.inward for x in stacked_dot(ds, S, chunk_math.NN, self.dtype)]

    def read_added(self, x, d):
        return block_diagonal(self.plan, chunk_math.fine_dot(d, x * self.inward, chunk_math.TN, self.dtype))

    def scores_gradient(self, d_pairs: list, xs: list, k):
        def level(up, down, mask, carry):
            dxs, dks = map(list, carry)
            ups, k_down = [select_heads(self.plan, x * up) for x in xs], select_heads(self.plan, k * down)
            for part in range(self.plan.pack):
                ds = [masked(d[part], mask) for d in d_pairs]
                products = stacked_dot(ds, k_down[part], chunk_math.NN, self.dtype)
                for i, (d, x_up) in enumerate(zip(ds, ups, strict=True)):
                    dxs[i] += up * products[i]
                    dks[i] += down * chunk_math.fine_dot(d, x_up[part], chunk_math.TN, self.dtype)
            return dxs, dks

        zeros = [jnp.zeros(k.shape, jnp.float32) for _ in xs]
        return self.levels(level, (zeros, zeros))

    def leaving(self, dS):
        return times(dS, self.leave)

    def write_gradient(self, k, U, dS):
        dU = chunk_math.fine_dot(k * self.outward, dS, chunk_math.NT, self.dtype)
        return dU, chunk_math.fine_dot(U, dS, chunk_math.NN, self.dtype) * self.outward

    def decayed(self, dS):
        return times(dS, self.keep)

    def carry(self, S, k, U):
        added = block_diagonal(self.plan, chunk_math.fine_dot(U, k * self.outward, chunk_math.TN, self.dtype))
        return times(times(S, self.keep) + added, self.leave)


def stacked_dot(xs, y, dims, dtype) -> list:
    """Return the product of each x of xs [C, width] and y, a list. y is loaded into the matrix unit once.

    dims: NT or NN of `chunk_math`. dtype: the precision, as in `chunk_math.fine_dot`.
    """
    C, product = xs[0].shape[0], chunk_math.fine_dot(jnp.concatenate(xs), y, dims, dtype)
    return [product[i * C : (i + 1) * C] for i in range(len(xs))]


def times(x, factor):
    """Return x * factor, or x if factor is None."""
    return x if factor is None else x * factor


def masked(x, mask):
    """Return x where mask holds, else 0."""
    return jnp.where(mask, x, 0)


def select_heads(plan: Plan, x) -> list:
    """Return, for each head of a unit, x [C, pack * K] with 0 in the lanes of the unit's other head: a list of `pack`
    arrays."""
    return [select_head(plan, x, plan.K, part) for part in range(plan.pack)]


def run_units(plan: Plan, step: Step, refs: Refs, body):
    """Run body(unit, decays), a generator, for every unit of the program. decays: `HeadDecays`; or with per-key gates
    `KeyDecays`, factored if all units are in range, else exact."""
    if refs.key_gates is not None:

        def factored():
            side_by_side(body(unit, KeyDecays.factored(plan, step, refs, unit)) for unit in range(plan.units))

        def exact(unit):
            side_by_side([body(unit, KeyDecays.exact(plan, step, refs, unit))])

        return key_gate.run_units(plan, step, refs, factored, exact)
    sums, edges = head_gate.load_gates(plan, step, refs, refs.k.dtype)
    side_by_side(
        body(unit, HeadDecays(plan, plan.heads_of(unit), sums, edges, refs.k.dtype)) for unit in range(plan.units)
    )
    return None


def side_by_side(units):
    """Trace the generators of all units, each stage of all of them before the next. units: an iterable of generators.

    The compiler keeps to the order of the trace, so the products of one unit fill the delays of another only where they stand
    beside each other. A generator yields None; for one that has ended, `next` returns its default, which is not None.
    """
    units = list(units)
    while units:
        units = [unit for unit in units if next(unit, units) is None]


# ---- what a chunk writes ---------------------------------------------------------------------------------------------


class Erased(NamedTuple):
    """Hold e and w of one unit. With beta, e = beta * rows and w = beta, else e = rows, and w is `write`, or 1 if that is
    None."""

    rows: jnp.ndarray  # [C, pack * K]: k, or e
    beta: list | None  # of each head: [C, 1]
    write: jnp.ndarray | None  # [C, pack * V]


def load_betas(plan: Plan, step: Step, refs: Refs):
    """Load beta of all heads of a program from VMEM, [C, gate_rows] in float32, with 0 outside of the step's rows. Return None
    without beta."""
    if refs.beta is None:
        return None
    return chunk_math.select_rows(refs.beta[...], step_rows(plan, step, axis=1)).T


def load_erased(plan: Plan, step: Step, refs: Refs, unit, k, betas) -> Erased:
    """Load e and w of a unit from VMEM. k: the unit's keys, [C, pack * K]. betas: the result of `load_betas`."""
    if betas is not None:
        return Erased(k, [column(betas, unit * plan.pack + part) for part in range(plan.pack)], None)
    e = load_unit(plan, step, refs.erase, plan.H, plan.K, unit)
    return Erased(e, None, None if refs.write is None else load_unit(plan, step, refs.write, plan.H, plan.V, unit))


def column(x, index):
    """Return column `index` of x [C, n] as [C, 1]. The index may be traced: a sum over a mask then selects it."""
    if isinstance(index, int):
        return x[:, index : index + 1]
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane == index, x, 0).sum(1, keepdims=True)


def unsolved(plan: Plan, erased: Erased, v, read) -> tuple:
    """Return D and X, [C, pack * V] each. With beta, D = v - (k e^G) S and X = beta D. Otherwise D = w * v - (e e^G) S, and X
    is D. v: [C, pack * V]. read: the product with S in D."""
    left = times(v.astype(jnp.float32), erased.write) - read
    return left, left if erased.beta is None else left * join_heads(plan, plan.V, erased.beta)


def inverses(plan: Plan, erased: Erased, scores: list):
    """Return the list of (I + L)^-1 [C, C] of each head of a unit. The function is a generator, which yields between stages.

    scores: L of each head without beta; its diagonal is not read.
    """
    strict, found = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=False), []
    for part, x in enumerate(scores):
        L = masked(x, strict)
        L = L if erased.beta is None else erased.beta[part] * L
        found.append((yield from unit_inverse(L, plan.reverse)))
    return found


def apply_heads(plan: Plan, pairs: list, x, dims, dtype):
    """Return the product of each head's pairs [C, C] with its lanes of x [C, pack * V], as one array [C, pack * V]. dims: NN,
    or TN for transposed pairs. dtype: the precision, as in `chunk_math.fine_dot`."""
    products = (chunk_math.fine_dot(a, select_head(plan, x, plan.V, part), dims, dtype) for part, a in enumerate(pairs))
    return jnp.asarray(sum(products))


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(plan: Plan, step: Step, scale, refs: ForwardRefs):
    """Store a chunk's outputs, and replace its state S in VMEM by the state S' behind it, for the delta rule. scale: the scale
    of the step's sequence."""
    betas = load_betas(plan, step, refs)

    def unit_outputs(unit, decays):
        # [C, K]   [C, K]   [C, V]
        q, k, v = load_rows(plan, step, refs, unit)
        erased = load_erased(plan, step, refs, unit, k, betas)
        # [V, K]
        S = decays.entering(refs.state[unit])
        # [C, C] of each head
        yield
        P, L = decays.scores(q, erased.rows, k)
        yield
        # [C, V]
        o, read = decays.read([q, erased.rows], S)
        yield
        _, X = unsolved(plan, erased, v, read)
        inverse = yield from inverses(plan, erased, L)
        U = apply_heads(plan, inverse, X, chunk_math.NN, decays.dtype)
        yield
        o += apply_heads(plan, P, U, chunk_math.NN, decays.dtype)
        store_unit(plan, step, refs.output, unit, o * scale)
        yield
        refs.state[unit] = decays.carry(S, k, U)
        yield

    run_units(plan, step, refs, unit_outputs)


def save_states(plan: Plan, step: Step, refs: StateRefs):
    """Store the inverses of a chunk, and replace its state in VMEM by the state behind it, without computing outputs."""
    betas = load_betas(plan, step, refs)

    def unit_state(unit, decays):
        # [C, K]   [C, V]
        k = load_unit(plan, step, refs.k, plan.heads[1], plan.K, unit)
        v = load_unit(plan, step, refs.v, plan.heads[2], plan.V, unit)
        erased = load_erased(plan, step, refs, unit, k, betas)
        S = decays.entering(refs.state[unit])
        yield
        _, L = decays.scores(None, erased.rows, k)
        yield
        (read,) = decays.read([erased.rows], S)
        yield
        _, X = unsolved(plan, erased, v, read)
        inverse = yield from inverses(plan, erased, L)
        for part, T in enumerate(inverse):
            refs.inverses[unit * plan.pack + part] = T
        U = apply_heads(plan, inverse, X, chunk_math.NN, decays.dtype)
        yield
        refs.state[unit] = decays.carry(S, k, U)
        yield

    run_units(plan, step, refs, unit_state)


# ---- gradient --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Backward:
    """Hold the stages of the gradient of one step. scale: the scale of the step's sequence. betas: the result of
    `load_betas`."""

    plan: Plan
    step: Step
    scale: jnp.ndarray
    refs: BackwardRefs
    betas: jnp.ndarray | None

    def run(self, unit, decays: HeadDecays | KeyDecays):
        """Store the gradients of a unit, and the terms of its gates' gradients. The function is a generator, which yields
        between stages."""
        plan, refs, scale, dtype = self.plan, self.refs, self.scale, decays.dtype
        # [C, K]   [C, K]   [C, V]   [C, V]   [V, K]   [V, K]
        q, k, v, do, S, dS = load_gradient_operands(plan, self.step, refs, unit)
        erased = load_erased(plan, self.step, refs, unit, k, self.betas)
        S, dS = decays.entering(S), decays.leaving(dS)
        P, L = decays.scores(q, erased.rows, k)
        (read,) = decays.read([erased.rows], S)
        yield
        left, X = unsolved(plan, erased, v, read)
        inverse = [refs.inverses[unit * plan.pack + part] for part in range(plan.pack)]
        U = apply_heads(plan, inverse, X, chunk_math.NN, dtype)
        yield
        # [C, V]   [C, K]
        dU, dk = decays.write_gradient(k, U, dS)
        dU += apply_heads(plan, P, do, chunk_math.TN, dtype) * scale
        yield
        dX = apply_heads(plan, inverse, dU, chunk_math.TN, dtype)
        yield
        d_erased = dX if erased.beta is None else dX * join_heads(plan, plan.V, erased.beta)
        # [C, C] of each head
        dP, d_read = self.pairs([do, -dX], U, dtype)
        dL = d_read if erased.beta is None else [beta * x for beta, x in zip(erased.beta, d_read, strict=True)]
        yield
        # [C, K]
        (dq, de), (dk_read, dk_erased) = decays.scores_gradient([dP, dL], [q, erased.rows], k)
        dq_read, de_read = decays.read_gradient([do, d_erased], S)
        dq, de = dq + dq_read, de - de_read
        dk += dk_read * scale + dk_erased
        yield
        # [V, K]: the gradient of the entering state
        d_entering = decays.decayed(dS) + decays.read_added(q, do) * scale - decays.read_added(erased.rows, d_erased)
        refs.d_state[unit] = decays.entering(d_entering)
        yield
        self.emit_gates(unit, q * dq * scale - k * dk + erased.rows * de, (S * d_entering).sum(0, keepdims=True))
        yield
        # The pair of each token with itself passes no gate.
        own = [select_head(plan, do * U, plan.V, part).sum(1, keepdims=True) for part in range(plan.pack)]
        d_own = join_heads(plan, plan.K, own)
        dq, dk = dq + d_own * k, dk + d_own * q * scale
        refs.scale_terms[unit, :, : plan.lanes] += (q * dq).sum(0, keepdims=True)
        if erased.beta is not None:
            self.add_betas(unit, dX * left, [x * y for x, y in zip(d_read, L, strict=True)])
            dk, dv = dk + de, d_erased
        else:
            store_unit(plan, self.step, refs.d_erase, unit, de)
            dv = times(dX, erased.write)
            if refs.d_write is not None:
                store_unit(plan, self.step, refs.d_write, unit, dX * v)
        Hq, Hk, Hv = plan.heads
        store_gradient(plan, self.step, refs.dq, Hq, unit, dq * scale)
        store_gradient(plan, self.step, refs.dk, Hk, unit, dk)
        store_gradient(plan, self.step, refs.dv, Hv, unit, dv)

    def pairs(self, xs, y, dtype) -> list:
        """Return x y^T of each head for j before i, else 0: for each x of xs a list of arrays [C, C], one for each head. xs, y:
        [C, pack * V]."""
        plan, parts = self.plan, self.plan.pack
        strict = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=False)
        rows = [select_head(plan, x, plan.V, part).astype(jnp.float32) for x in xs for part in range(parts)]
        products = [masked(x, strict) for x in stacked_dot(rows, y, chunk_math.NT, dtype)]
        return [products[i * parts : (i + 1) * parts] for i in range(len(xs))]

    def add_betas(self, unit, products, pairs):
        """Store the gradient of a unit's betas in scratch memory: for each head, the sum of each row over its lanes of products
        [C, pack * V] and its pairs [C, C]."""
        lane = lax.broadcasted_iota(jnp.int32, self.refs.beta_terms.shape, 1)
        for part, each in enumerate(pairs):
            rows = chunk_math.row_sums(select_head(self.plan, products, self.plan.V, part), each)
            head = unit * self.plan.pack + part
            self.refs.beta_terms[...] = jnp.where(lane == head, rows, self.refs.beta_terms[...])

    def emit_gates(self, unit, terms, edge):
        """Store the gradient of per-key gates, or, in scratch memory, the terms of per-head gates.

        terms: q dq - k dk + e de of each token, without the pair of the token with itself, [C, K]. edge: <S, dS> before the
        chunk, [1, K].
        """
        plan, refs = self.plan, self.refs
        if refs.d_key_gates is not None:
            strict = chunk_math.causal_mask(plan.chunk, plan.reverse, inclusive=False)
            earlier = chunk_math.sum_by(jnp.where(strict, 1.0, 0.0), terms, exact=True)
            store_unit(plan, self.step, refs.d_key_gates, unit, edge - earlier)
        elif refs.row_terms is not None:
            for part, head in enumerate(plan.heads_of(unit)):
                refs.row_terms[:, head : head + 1] = select_head(plan, terms, plan.K, part).sum(1, keepdims=True)
                refs.edge_terms[head : head + 1] = select_head(plan, edge, plan.K, part)


def backward(plan: Plan, step: Step, scale, refs: BackwardRefs):
    """Compute dq, dk, dv, the gradient of the erasure, dS before the chunk and the gates' gradient.

    dU, dX and what follows restrict dP and dL to j before i. The pair of a token with itself is added last.

        dU = (k e^{G_last - G}) dS' + P^T do              dX = (I + L)^-T dU              d(w * v) = dX
        dP = do U^T                                       dL = -dX U^T
        dq = (do S^T) e^G + dP k                          de = -(dX S^T) e^G + dL k
        dk = (U dS'^T) e^{G_last - G} + dP^T q + dL^T e   dS = e^{G_last} dS' + (q e^G)^T do - (e e^G)^T dX

    With beta, dL_ij and dX_i have the factor beta_i in dk, de and dS, so that de is beta de. The gradient of beta_i is what
    stands beside it: dX_i (v_i - e^G_i S^T k_i) - sum_j (dX_i . u_j) (k_i . k_j e^{G_i - G_j}).
    """
    stages = Backward(plan, step, scale, refs, load_betas(plan, step, refs))
    run_units(plan, step, refs, stages.run)
    if refs.row_terms is not None:
        head_gate.emit_gate_gradients(plan, step, refs)
    if refs.d_beta is not None:
        rows, d_beta = step_rows(plan, step, axis=1), refs.beta_terms[...].T[: plan.gate_rows]
        before = refs.d_beta[...] if plan.packed else 0
        refs.d_beta[...] = d_beta if rows is None else jnp.where(rows, d_beta, before)
