"""Advance states that lie in a pool by a few tokens, in place, or read them: decoding, and the verification of drafts.

    S_t = e^{rows} S_{t-1} e^{columns} + k (w * v)^T - b (S^T e)^T        o_t = scale S_t^T q

rows are the log gates of a head and its keys together, and columns those of its values. With an erasure e reads the decayed
state, or with `before_decay` S_{t-1}, and b is k or `along`. Without one the last term is absent, and w is 1.

A program has one sequence, `heads` of its heads and `columns` columns of their states. The slots are known before a program
begins, so the pipeline copies the named rows of the pool alone to VMEM and back, while another program computes. A null sequence,
of slot -1, shares the row of a neighbour: the block of the pool then stays in VMEM, where the null sequence changes nothing.

All is done in float32 by the vector unit, with keys along sublanes and values along lanes. Numbers of keys arrive with keys along
lanes, and are transposed for all heads together.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence, spread_heads
from glax._src.kernels.pallas_tpu.config import pool_block_of

MILD = 1 / 64  # gates below it change a state by e^log - 1, which e^log would round alike at every token

Ref = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Hold the arrays of the tokens in float32, [B, groups, T, heads, K] or [..., V], or references to the blocks of one group
    of heads. An absent array is None. v, columns and w have the width V."""

    q: Any  # times the scale
    k: Any
    v: Any
    rows: Any
    columns: Any
    e: Any
    w: Any
    b: Any

    @classmethod
    def of(cls, r: Recurrence, heads: int) -> "Tokens":
        """Return the arrays of r in groups of `heads` heads. Heads that share q, k or v have copies. beta becomes e = beta k
        and w = beta."""
        erasure, decay = r.erasure or Erasure(), r.decay
        q, k, v = (spread_heads(x, r.num_heads).astype(jnp.float32) for x in (r.q, r.k, r.v))
        head = decay.head if decay.constant is None else r.by_token(decay.constant)
        gates = [x.astype(jnp.float32) for x in (None if head is None else head[..., None], decay.key) if x is not None]
        rows = jnp.broadcast_to(sum(gates[1:], gates[0]), k.shape) if gates else None
        e, w = erasure.erase, erasure.write
        if erasure.beta is not None:
            beta = erasure.beta.astype(jnp.float32)[..., None]
            e, w = beta * k, jnp.broadcast_to(beta, v.shape)
        q = q * r.scale.astype(jnp.float32)[:, None, None, None]
        found = cls(q, k, v, rows, decay.value, e, w, erasure.along)
        return jax.tree.map(lambda x: in_groups(x.astype(jnp.float32), heads), found)

    def at(self, t) -> "Tokens":
        """Load token t from the references, [heads, K] or [heads, V] each. t: the token's number in the call, from 0."""
        return jax.tree.map(lambda ref: ref[0, 0, t], self)


def in_groups(x, heads: int):
    """Return x [B, T, H, width] in groups of heads, [B, groups, T, heads, width]."""
    B, T, H, width = x.shape
    return jnp.swapaxes(x.reshape(B, T, H // heads, heads, width), 1, 2)


def decayed(S, log, axis: int):
    """Return S [K, V] with its rows (axis 0) or columns (axis 1) multiplied by e^log. log: [K, 1] or [1, V]."""
    mild = jnp.abs(log) < MILD
    change = log * (1 + log * (1 / 2 + log * (1 / 6 + log * (1 / 24))))  # to 1e-11 below MILD
    factor = jnp.where(mild, change, jnp.exp(log))
    return S * jnp.where(mild, 1.0, 0.0) + S * factor


def advance(x: Tokens, S: list, before_decay: bool) -> tuple[list, list]:
    """Return (the states of all heads behind a token, a list of [K, V]; its outputs, a list of [1, V]). x: the token, the
    result of `Tokens.at`. S: the states before it, a list of [K, V]. before_decay: whether e reads the state before its
    decay."""
    by_key = {name: y.T for name, y in dict(q=x.q, k=x.k, rows=x.rows, e=x.e, b=x.b).items() if y is not None}
    states, outputs = [], []
    for h, before in enumerate(S):

        def column(name: str, h: int = h):
            return by_key[name][:, h : h + 1]

        def row(values, h: int = h):
            return values[h : h + 1, :]

        state = before if x.rows is None else decayed(before, column("rows"), 0)
        state = state if x.columns is None else decayed(state, row(x.columns), 1)
        value = row(x.v) if x.w is None else row(x.v) * row(x.w)
        read = None
        if x.e is not None:
            read = jnp.sum((before if before_decay else state) * column("e"), axis=0, keepdims=True)
        if read is not None and x.b is None:
            value = value - read
        state = state + column("k") * value
        if read is not None and x.b is not None:
            state = state - column("b") * read
        states.append(state)
        outputs.append(jnp.sum(state * column("q"), axis=0, keepdims=True))
    return states, outputs


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Hold how a call is divided into programs, of `heads` heads and `columns` columns of their states each, which divide H and
    V. before_decay: whether e reads the state before its decay."""

    B: int
    T: int
    H: int
    K: int
    V: int
    heads: int
    columns: int
    before_decay: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the number of programs along each axis: groups of heads, groups of columns, sequences. Sequences are last, so
        that a program and the next have neighbouring sequences."""
        return self.H // self.heads, self.V // self.columns, self.B

    @property
    def by_key(self) -> pl.BlockSpec:
        """Return the specification of a block of tokens of width K: all tokens of a sequence, and the heads of a program."""
        return pl.BlockSpec((1, 1, self.T, self.heads, self.K), lambda h, v, n, *_: (n, h, 0, 0, 0))

    @property
    def by_value(self) -> pl.BlockSpec:
        """Return the specification of a block of tokens of width V: all tokens of a sequence, and the heads and columns of a
        program."""
        return pl.BlockSpec((1, 1, self.T, self.heads, self.columns), lambda h, v, n, *_: (n, h, 0, 0, v))

    @property
    def state(self) -> pl.BlockSpec:
        """Return the specification of the pool's block: the heads and columns of a program, in row rows[n] of the pool for
        sequence n."""
        return pl.BlockSpec((1, self.heads, self.K, self.columns), lambda h, v, n, slots, rows, _: (rows[n], h, 0, v))

    def specs(self, tokens: Tokens) -> Tokens:
        """Return the specification of a block for every array of the tokens that is not None."""
        names = {field.name for field in dataclasses.fields(Tokens)}
        of = dict.fromkeys(names, self.by_key) | dict.fromkeys(("v", "columns", "w"), self.by_value)
        return Tokens(**{name: None if getattr(tokens, name) is None else of[name] for name in names})


def rows_of(slots) -> tuple[jax.Array, jax.Array]:
    """Return (the row of the pool that each sequence's program copies, [B]; whether any sequence has a slot, int32 [1]). slots:
    [B]; -1 for none.

    A null sequence has the row of the last sequence before it that has a slot, or else of the first one that has.
    """
    used, order = slots >= 0, jnp.arange(len(slots), dtype=jnp.int32)
    newest = lax.cummax(jnp.where(used, order, -1))
    source = jnp.where(newest < 0, jnp.argmax(used).astype(jnp.int32), newest)
    return jnp.maximum(slots[source], 0), used.any()[None].astype(jnp.int32)


def run(plan: PoolPlan, slots, any_used, tokens: Tokens, pool, output, after: Ref | None, scratch: Ref):
    """Compute one program: store its outputs, and the states behind the tokens. A null sequence has outputs of 0.

    slots: [B] in scalar memory. any_used: the second result of `rows_of`, there too. The others are blocks in VMEM. pool,
    after: the block of the pool before and behind the tokens, in the same memory; after is None if the pool does not change.
    scratch: the states between tokens; it is not read for one token.
    """
    n, is_used = pl.program_id(2), slots[pl.program_id(2)] >= 0

    @pl.when(is_used)
    def _():
        S = [pool[0, h].astype(jnp.float32) for h in range(plan.heads)]
        if plan.T == 1:
            S, outputs = advance(tokens.at(0), S, plan.before_decay)
            output[0, 0, 0] = jnp.concatenate(outputs)
        else:
            for h, state in enumerate(S):
                scratch[h] = state

            @pl.loop(0, plan.T)
            def _(t):
                states, outputs = advance(tokens.at(t), [scratch[h] for h in range(plan.heads)], plan.before_decay)
                for h, state in enumerate(states):
                    scratch[h] = state
                output[0, 0, t] = jnp.concatenate(outputs)

            S = [scratch[h] for h in range(plan.heads)]
        if after is not None:
            for h, state in enumerate(S):
                after[0, h] = state.astype(after.dtype)

    @pl.when(~is_used)
    def _():
        output[...] = jnp.zeros_like(output)

    if after is not None:

        @pl.when((any_used[0] == 0) & (n == 0))
        def _():
            after[...] = pool[...]  # no sequence will fill the block


def run_in_pool(r: Recurrence, pool, slots, writes: bool):
    """Return a tuple: the outputs [B, T, H, V] of each sequence's tokens, and if `writes` also the pool behind them, in the
    same memory.

    pool: [P, H, K, V]. slots: [B] in int32, each sequence's row of the pool, or -1 for a null sequence.
    """
    (B, T), (H, K, V) = r.q.shape[:2], pool.shape[1:]
    block = pool_block_of(r)
    assert block is not None, "the kernel refuses such a state"
    heads, columns = block
    plan = PoolPlan(B, T, H, K, V, heads, columns, r.erasure is not None and r.erasure.before_decay)
    tokens = Tokens.of(r, heads)
    prefetched, (arrays, structure) = (slots, *rows_of(slots)), jax.tree.flatten(tokens)
    varying = jax.typeof(r.q).mat  # inside shard_map, results vary over the mesh as the inputs do
    results = [jax.ShapeDtypeStruct((B, H // heads, T, heads, V), jnp.float32, manual_axis_type=varying)]
    if writes:
        results.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype, manual_axis_type=varying))

    def kernel(slots, _, any_used, *refs):
        pool, output, *rest = refs[len(arrays) :]
        run(
            plan,
            slots,
            any_used,
            structure.unflatten(refs[: len(arrays)]),
            pool,
            output,
            rest[0] if writes else None,
            rest[-1] if T > 1 else None,
        )

    moved = 4 * sum(map(math.prod, (x.shape for x in arrays))) + (1 + writes) * B * math.prod(pool.shape[1:]) * 4
    output, *pool = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=plan.grid,
            in_specs=[*jax.tree.leaves(plan.specs(tokens), is_leaf=is_block), plan.state],
            out_specs=[plan.by_value, *[plan.state] * writes],
            scratch_shapes=[pltpu.VMEM((heads, K, columns), jnp.float32)] * (T > 1),
        ),
        out_shape=results,
        input_output_aliases={len(prefetched) + len(arrays): 1} if writes else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=8 * B * T * H * K * V, bytes_accessed=moved, transcendentals=B * T * H * K),
        name=f"glax_{'step' if writes else 'verify'}",
    )(*prefetched, *arrays, pool)
    return (jnp.swapaxes(output, 1, 2).reshape(B, T, H, V).astype(r.q.dtype), *pool)


def is_block(x) -> bool:
    """Return whether x is the specification of a block, a leaf in a tree of these."""
    return isinstance(x, pl.BlockSpec)


recurrent_step = functools.partial(run_in_pool, writes=True)


def recurrent_verify(r: Recurrence, pool, slots):
    """Return the outputs [B, T, H, V] of each sequence's tokens. Its state is read once, and the pool does not change. pool,
    slots: as in `run_in_pool`."""
    return run_in_pool(r, pool, slots, writes=False)[0]
