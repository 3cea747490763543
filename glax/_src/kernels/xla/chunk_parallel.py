"""Solve all chunks of a block together, on CPUs: forward and gradient in a few batched matrix products.

M_i is the sum of log decays from the middle of token i's chunk through i, negated before the middle. `enter` is the decay from
the beginning of the chunk to its middle, `leave` from the middle to the end. q~ = scale q e^M and k~ = k e^-M are [C, K], v and
do are [C, V]. S [K, V] is the state before the chunk, and D [K, V] the gradient of the state after it:

    o = enter q~ S + P v               P = q~ k~^T, j <= i      the next S: enter leave S + (leave k~)^T v
    dq~ = enter do S^T + dP k~         dP = do v^T, j <= i      the last D: enter leave D + (enter q~)^T do
    dk~ = leave v D^T + dP^T q~        dv = leave k~ D + P^T do
    dg_i = <S, dS> before the chunk - sum over j < i of q~ dq~ - k~ dk~

A per-head gate allows v~ = v e^-M in place of k~. These are the formulas of `chunk_math.fast`. `in_range` decides at run time
whether they are exact; if not, the caller takes another form.

Only S, and D in the opposite order, pass from chunk to chunk. All other products are independent between chunks. XLA for CPUs
runs a batched product of small matrices on one core, but runs independent kernels in parallel. The chunks are therefore split
into GROUPS groups with separate products:

    groups of time     each group holds consecutive chunks of all heads; a loop passes the states (`state_passing.scan_states`)
    groups of heads    each group holds all chunks of some heads; one product with a matrix of decays gives all states of a
                       head (`state_passing.apply_chunk_decays`). It needs per-head gates and one block.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence, spread_heads, sum_heads, varying_like
from glax._src.core.registry import Backend
from glax._src.kernels.xla import chunk_math
from glax._src.kernels.xla.chunk_math import inner, matmul, outer, times, total
from glax._src.kernels.xla.state_passing import ChunkDecays, apply_chunk_decays, chunk_decays, scan_states

# The number of groups, chosen on machines with two cores: fewer leave a core idle, more take longer to compile.
GROUPS = 4
# A per-head e^-M may multiply k or v. With v, no product can start before the factors, so the products that the states need are
# among the first. Measured on two cores, this is faster in JAX 0.10 and slower in later versions.
DOWN_AT_V = jax.__version_info__ < (0, 11)
# Chunks of 32 need fewer operations but twice as many states, which did not fit the caches of the two-core machines measured.
CHUNK = 64
# The largest number of elements of q's rows, or of the states, in a block. The gradient holds a dozen such arrays. Chosen on
# machines with two cores.
BLOCK = 2**19


def block(r: Recurrence, size: int) -> int:
    """Return the number of tokens in a block: the most that hold at most BLOCK elements, in whole groups of chunks that divide
    T, but at least one chunk per group. size: the tokens of a chunk."""
    groups = r.q.shape[1] // (GROUPS * size)
    fit = [n for n in range(1, groups + 1) if groups % n == 0 and elements(r, size, n * GROUPS * size) <= BLOCK]
    return max(fit, default=1) * GROUPS * size


def elements(r: Recurrence, size: int, tokens: int) -> int:
    """Return the number of elements of the largest array for `tokens` tokens: rows of q, rows of v, or states."""
    H, K, V = r.state_shape[1:]
    return r.q.shape[0] * tokens * H * max(K, V, K * V // size)


def suits(r: Recurrence, size: int = CHUNK) -> bool:
    """Return whether this form supports r in chunks of `size` tokens: on CPUs, unpacked, with whole chunks, without per-value
    gates, and with at most 2 BLOCK elements in the smallest block.

    Calls in which several heads of the state share a query and also share a key are left to the scan: this form would repeat
    the rows of both for every head.
    """
    if r.is_symbolic:
        return False
    if max(r.q.shape[2], r.k.shape[2]) < r.num_heads:
        return False
    whole = r.boundaries is None and r.decay.value is None and r.q.shape[1] % (GROUPS * size) == 0
    return Backend.here() is Backend.CPU and whole and elements(r, size, GROUPS * size) <= 2 * BLOCK


def groups_heads(r: Recurrence, size: int) -> bool:
    """Return whether the groups are groups of heads: gates are not per-key, GROUPS divides the heads, all of T is one block,
    and a head has at most `size` chunks.

    The matrices of decays between chunks are then no larger than those between the tokens of a chunk. The forward saves no
    states, because the gradient recomputes them by the same two products per group.
    """
    T, heads = r.q.shape[1], r.num_heads
    return r.decay.key is None and heads % GROUPS == 0 and size**2 >= T and block(r, size) == T


def in_range(r: Recurrence, size: int) -> Bool[Array, ""]:
    """Return whether this form is exact for the gates of all chunks, a scalar.

    Sums of |log decays| over a half chunk must be at most `fast_limit`, so that no exponential overflows or underflows
    (`chunk_math.fast`). They must also be at most C, a decay of e^-2 per token on average: in the gradient of log decays, the
    term of each token with itself stands on both sides of a difference, and its rounding error must not exceed the result.
    """
    half = size // 2 if size % 2 == 0 else size
    log = log_decays(r)
    assert log is not None, "without decay every form is exact, and no caller asks"
    log = log.reshape(log.shape[0], -1, half, log.shape[2] * log.shape[3])
    # For `chunk_math.max_abs_cumsum`, XLA would write an array of absolute values. |x| = 2 x+ - x, so their sum is at most this.
    bound = jnp.abs(log.sum(2)).max() + 2 * half * jnp.maximum(log.max(), 0)
    return bound <= min(chunk_math.fast_limit(r.dtype), size)


def where_exact(exact: Bool[Array, ""], r: Recurrence, size: int, together, otherwise, trains: bool):
    """Return together() if `exact`, else otherwise(). size: the tokens of a chunk. trains: whether the call is part of a
    gradient.

    lax.cond copies the operands of its branches, and shares nothing inside of a branch with the code outside. Forward and
    gradient have factors and rows in common. If the call `trains` and all chunks are one block, together() is therefore
    computed outside. Where `exact` is False its result may be NaN, and otherwise() takes its place, in a loop of one iteration.
    """
    if not trains or block(r, size) < r.q.shape[1]:
        return lax.cond(exact, together, otherwise)
    found = together()

    def overwrite(carry):
        return jax.tree.map(varying_like, (jnp.ones((), bool), otherwise()), carry)

    return lax.while_loop(lambda carry: ~carry[0], overwrite, (exact, found))[1]


def log_decays(r: Recurrence) -> Float[Array, "B T H D"] | None:
    """Return the log decays, where D is K for per-key gates and 1 for per-head gates; None without decay."""
    head = r.decay.head if r.decay.constant is None else r.by_token(r.decay.constant)
    log = r.decay.key if head is None else head[..., None]
    return None if log is None else log.astype(r.dtype)


# ---- one block -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GroupedChunks:
    """Hold a recurrence whose chunks of C = `size` tokens are split into GROUPS groups, of time or `of_heads`.

    n is the number of chunks of a head in a group. N = n H is the number of matrices in a group's batched products, in the order
    (chunk, head) for groups of time and (head, chunk) for groups of heads.
    """

    r: Recurrence
    size: int
    of_heads: bool = False

    @property
    def g(self) -> chunk_math.Geometry:
        """Return the constant matrices of a chunk."""
        return chunk_math.geometry(self.size, self.r.reverse)

    @property
    def scale(self) -> Float[Array, "B 1 1 1 1"]:
        """Return the scale of each sequence, to multiply the arrays that `split` returns."""
        return self.r.scale[:, None, None, None, None]

    def split(self, x: Float[Array, "B T heads D"]) -> list[Float[Array, "B n C H D"]]:
        """Return x as a list over groups, each [B, n, C, H, D] in the dtype of sums: n chunks of C tokens. Shared heads are
        repeated to one for each head of the state. Groups of heads have all chunks and H of these heads each, other groups a part
        of the chunks and all heads."""
        x = spread_heads(x, self.r.num_heads).astype(self.r.dtype)
        parts = jnp.split(x, GROUPS, axis=2 if self.of_heads else 1)
        return [part.reshape(x.shape[0], -1, self.size, *part.shape[2:]) for part in parts]

    def by_head(self, x: Float[Array, "B n C H D"]) -> Float[Array, "B N C D"]:
        """Reorder x to one matrix [C, D] per chunk and head, as the products need it."""
        x = x.transpose(0, 3, 1, 2, 4) if self.of_heads else x.transpose(0, 1, 3, 2, 4)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def by_token(self, x: Float[Array, "B N C D"]) -> Float[Array, "B n C H D"]:
        """Return x [B, N, C, D] in the order [B, n, C, H, D]: the inverse of `by_head`."""
        if self.of_heads:
            return x.reshape(x.shape[0], self.r.num_heads // GROUPS, -1, *x.shape[2:]).transpose(0, 2, 3, 1, 4)
        return x.reshape(x.shape[0], -1, self.r.num_heads, *x.shape[2:]).transpose(0, 1, 3, 2, 4)

    def states(self, x: Float[Array, "B nH K V"]) -> Float[Array, "B n H K V"]:
        """Return x in the shape of the states of a group of time, with an axis of chunks."""
        return x.reshape(x.shape[0], -1, *self.r.state_shape[1:])


class Factors(NamedTuple):
    """Hold the decays that multiply the operands of one group. None is 1.

    q, k, v                   [B, n, C, H, D]    multiply q, k and v; e^-M is in k or in v
    enter, leave_k, leave_v   [B, N, 1, D]       multiply q~, k~ and v~ in products with a state; one `leave` is None
    log                       [B, n, H, D, 1]    the log decay through each chunk
    decays                                       the decays between chunks, for groups of heads
    """

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    enter: Array | None = None
    leave_k: Array | None = None
    leave_v: Array | None = None
    log: Array | None = None
    decays: ChunkDecays | None = None

    @property
    def between_chunks(self) -> ChunkDecays:
        """Return `decays`, which groups of heads have. Raises AssertionError for groups of time, where it is None."""
        assert self.decays is not None
        return self.decays


def factors(p: GroupedChunks) -> list[Factors]:
    """Return the decays of each group. Without gates they are all None, but for `decays` of groups of heads."""
    log, found = log_decays(p.r), []
    if log is None:
        B, T, H = (*p.r.q.shape[:2], p.r.num_heads)
        none = varying_like(jnp.zeros((B, T // p.size, H // GROUPS), p.r.dtype), p.r.q)
        return [Factors(decays=chunk_decays(none, p.r.reverse) if p.of_heads else None)] * GROUPS
    for log in p.split(log):  # noqa: B020
        B, n, C, H, D = log.shape
        M = chunk_math.sums(p.g.middle, log.reshape(B, n, C, H * D)).reshape(log.shape)
        enter, leave = log[:, :, p.g.begin] - M[:, :, p.g.begin], M[:, :, p.g.end]
        through = enter + leave
        linked = chunk_decays(through[..., 0], p.r.reverse) if p.of_heads else None
        up, (enter, leave) = jnp.exp(M), (p.by_head(jnp.exp(x)[:, :, None]) for x in (enter, leave))
        down, at_v = 1 / up, D == 1 and DOWN_AT_V
        sides = (None, down, enter, None, leave) if at_v else (down, None, enter, leave, None)
        found.append(Factors(up, *sides, through[..., None], linked))
    return found


class Rows(NamedTuple):
    """Hold q~, k~ and v~ of one group, and the same rows times the decays for products with a state: [B, N, C, K or V] each."""

    q: Array
    k: Array
    v: Array
    enter_q: Array
    leave_k: Array
    leave_v: Array


def rows(p: GroupedChunks, f: list[Factors]) -> list[Rows]:
    """Return the rows of each group. f: the result of `factors`."""
    found = []
    for q, k, v, factor in zip(p.split(p.r.q), p.split(p.r.k), p.split(p.r.v), f, strict=True):
        q, k, v = (p.by_head(times(*x)) for x in ((q * p.scale, factor.q), (k, factor.k), (v, factor.v)))
        meets = times(q, factor.enter), times(k, factor.leave_k), times(v, factor.leave_v)
        found.append(Rows(q, k, v, *meets))
    return found


def flat(X: list[Float[Array, "B n H K V"]]) -> list[Float[Array, "B nH K V"]]:
    """Merge the axes of chunks and heads, [B, n, H, K, V] to [B, n H, K, V], as the products need it."""
    return [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in X]


def states(p: GroupedChunks, f: list[Factors], rows: list[Rows]) -> tuple[list[Array], Array]:
    """Return S before each chunk, [B, N, K, V] for each group, and the final S, [B, H, K, V]. f, rows: the decays and rows of
    each group."""
    added = [outer(x.leave_k, x.leave_v) for x in rows]
    if p.of_heads:
        initial = jnp.split(p.r.start_state, GROUPS, axis=1)
        before, final = zip(
            *(apply_chunk_decays(f.between_chunks, *X, adjoint=False) for f, *X in zip(f, initial, added, strict=True)),
            strict=True,
        )
        return list(before), jnp.concatenate(final, axis=1)
    before, _, final = scan_states(p.r.start_state, [x.log for x in f], [p.states(x) for x in added], p.r.reverse)
    return flat(before), final


def adjoints(p: GroupedChunks, f: list[Factors], rows: list[Rows], do, d_final, S: list[Array]):
    """Return (D after each chunk and S dS before it, both [B, N, K, V] for each group, and the gradient of the initial S).

    f, rows: the decays and rows of each group. do: the rows of d_output of each group, [B, N, C, V]. d_final: [B, H, K, V]. S:
    the states before chunks of each group, [B, N, K, V].
    """
    added = [outer(x.enter_q, do) for x, do in zip(rows, do, strict=True)]
    if p.of_heads:
        initial = jnp.split(d_final, GROUPS, axis=1)
        behind, first = zip(
            *(apply_chunk_decays(f.between_chunks, *X, adjoint=True) for f, *X in zip(f, initial, added, strict=True)),
            strict=True,
        )
        edges = [S * (f.between_chunks.through * D + new) for f, S, D, new in zip(f, S, behind, added, strict=True)]
        return list(behind), edges, jnp.concatenate(first, axis=1)
    added = [p.states(x) for x in added]
    behind, before, first = scan_states(d_final, [x.log for x in f], added, not p.r.reverse)
    return flat(behind), [S * dS for S, dS in zip(S, flat(before), strict=True)], first


def forward(p: GroupedChunks) -> tuple[list[Array], Array, list[Array]]:
    """Return the outputs [B, n, C, H, V] of each group, the final states, and the states before each chunk of each group."""
    f = factors(p)
    all_rows = rows(p, f)
    before, final = states(p, f, all_rows)
    output = []
    for x, S in zip(all_rows, before, strict=True):
        pairs = jnp.where(p.g.causal, inner(x.q, x.k), 0)
        output.append(p.by_token(matmul(x.enter_q, S) + matmul(pairs, x.v)))
    return output, final, before


class Gradient(NamedTuple):
    """Hold the gradient of the rows of one block: q, k and v, and `log`, the gradient of `log_decays`, empty without decay.
    Each is a list over groups of arrays [B, n, C, H, D]."""

    q: list[Array]
    k: list[Array]
    v: list[Array]
    log: list[Array]


def backward(
    p: GroupedChunks, d_output, d_final, saved: Array | None
) -> tuple[Gradient, Float[Array, "B H K V"], Float[Array, "B"]]:
    """Return (the gradient of one block's rows, dL/dS before the block, the gradient of the scale).

    d_output: the block's rows. d_final: dL/dS after the block. saved: the states before each chunk, [B, chunks, H, K, V]; None
    recomputes them.
    """
    r, g, f = p.r, p.g, factors(p)
    all_rows = rows(p, f)
    S = states(p, f, all_rows)[0] if saved is None else flat(jnp.split(saved, GROUPS, axis=1))
    cotangents = [p.by_head(x) for x in p.split(d_output)]
    D, edges, d_initial = adjoints(p, f, all_rows, cotangents, d_final, S)

    d, d_scale = Gradient([], [], [], []), 0
    groups = zip(all_rows, cotangents, S, D, edges, f, p.split(r.q), strict=True)
    for x, do, S, D, edge, factor, q_rows in groups:
        # The pair of each token with itself is included, unlike in `chunk_math.backward`: see `in_range`.
        pairs, d_pairs = (jnp.where(g.causal, y, 0) for y in (inner(x.q, x.k), inner(do, x.v)))
        dq = times(inner(do, S), factor.enter) + matmul(d_pairs, x.k)
        dk = times(inner(x.leave_v, D), factor.leave_k) + outer(d_pairs, x.q)
        dv = times(matmul(x.leave_k, D), factor.leave_v) + outer(pairs, do)
        if r.decay.form != "none":
            d_log = chunk_math.log_gradient(g, x.q * dq - x.k * dk, total(edge, 3), per_head=r.decay.key is None)
            d.log.append(p.by_token(d_log))
        dq = times(p.by_token(dq), factor.q)
        d_scale += (dq * q_rows).sum((1, 2, 3, 4))
        d.q.append(dq * p.scale)
        d.k.append(times(p.by_token(dk), factor.k))
        d.v.append(times(p.by_token(dv), factor.v))
    return d, d_initial, jnp.asarray(d_scale)


# ---- block after block -----------------------------------------------------------------------------------------------


def write(buffer: Float[Array, "B T heads D"], parts: list[Float[Array, "B n C H D"]], at) -> Array:
    """Return the buffer with the groups of one block, `parts`, written to its rows from `at` on, one by one. Heads that share a
    row are summed. XLA would write a joined array once more, on one core."""
    parts = [sum_heads(x.reshape(x.shape[0], -1, *x.shape[3:]), buffer.shape[2]).astype(buffer.dtype) for x in parts]
    if buffer.shape[1] == len(parts) * parts[0].shape[1]:
        return jnp.concatenate(parts, axis=1)
    for i, part in enumerate(parts):
        buffer = lax.dynamic_update_slice_in_dim(buffer, part, at + i * part.shape[1], 1)
    return buffer


def join(parts: list[Float[Array, "B n C H D"]], heads: int, dtype) -> Float[Array, "B T heads D"]:
    """Return groups of heads as one array, with heads summed to `heads` heads, in `dtype`."""
    whole = jnp.concatenate([part.reshape(part.shape[0], -1, *part.shape[3:]) for part in parts], axis=2)
    return sum_heads(whole, heads).astype(dtype)


def scan_blocks(r: Recurrence, size: int, body, carry, backwards: bool):
    """Run body(at, block of r, carry) -> carry over the blocks, where `at` is the first row of the block.

    The blocks come in the order of the recurrence, or `backwards`, in the opposite order.
    """
    L = block(r, size)
    count = r.q.shape[1] // L
    if count == 1:
        return body(0, r, carry)

    def step(i, carry):
        at = (count - 1 - i if r.reverse != backwards else i) * L

        def rows(x: Array | None) -> Array | None:
            return None if x is None else lax.dynamic_slice_in_dim(x, at, L, 1)

        decay = Decay(r.decay.constant, rows(r.decay.head), rows(r.decay.key))
        return body(at, r.replace(q=rows(r.q), k=rows(r.k), v=rows(r.v), decay=decay), carry)

    return lax.fori_loop(0, count, step, jax.tree.map(lambda x: varying_like(x, r.q), carry))


def solve(r: Recurrence, size: int) -> tuple[Outputs, Float[Array, "B chunks H K V"] | None]:
    """Return the outputs, and the state before each chunk of `size` tokens, or None in place of the states for groups of
    heads."""
    (B, T), (H, K, V) = r.q.shape[:2], r.state_shape[1:]
    if groups_heads(r, size):
        parts, final, _ = forward(GroupedChunks(r, size, of_heads=True))
        return Outputs(join(parts, H, r.q.dtype), final), None

    def body(at, part: Recurrence, carry):
        state, output, saved = carry
        o, state, before = forward(GroupedChunks(part.replace(initial_state=state), size))
        before = [x.reshape(B, -1, 1, H, K * V) for x in before]  # as rows, with an axis of size 1
        return state, write(output, o, at), write(saved, before, at // size)

    output, saved = jnp.zeros((B, T, H, V), r.q.dtype), jnp.ones((B, T // size, H, K * V), r.dtype)
    state, output, saved = scan_blocks(r, size, body, (r.start_state, output, saved), backwards=False)
    return Outputs(output, state), saved.reshape(B, T // size, H, K, V)


def vjp(r: Recurrence, size: int, d_output, d_final, saved: Float[Array, "B chunks H K V"] | None) -> Recurrence:
    """Return the gradient of every input. size: the tokens of a chunk. saved: the states that `solve` returned; None recomputes
    them."""
    d_final = d_final.astype(r.dtype)
    log = log_decays(r)
    if groups_heads(r, size):
        parts, d_state, d_scale = backward(GroupedChunks(r, size, of_heads=True), d_output, d_final, None)
        dq, dk, dv = (join(y, x.shape[2], x.dtype) for x, y in zip((r.q, r.k, r.v), parts[:3], strict=True))
        d_log = None if log is None else join(parts.log, log.shape[2], log.dtype)
        return assembled(r, dq, dk, dv, d_log, d_state, d_scale)
    before = solve(r, size)[1] if saved is None else saved
    assert before is not None  # only groups of heads return no states

    def body(at, part: Recurrence, carry):
        d, d_state, d_scale = carry
        L = part.q.shape[1]
        d_rows = lax.dynamic_slice_in_dim(d_output, at, L, 1)
        states = lax.dynamic_slice_in_dim(before, at // size, L // size, 1)
        parts, d_state, more = backward(GroupedChunks(part, size), d_rows, d_state, states)
        d = [None if x is None else write(x, y, at) for x, y in zip(d, parts, strict=True)]
        return d, d_state, d_scale + more

    # XLA would merge arrays filled with the same number into one, and copy it. Every row is overwritten.
    blank = [None if x is None else jnp.full(x.shape, i, x.dtype) for i, x in enumerate((r.q, r.k, r.v, log))]
    d, d_state, d_scale = scan_blocks(r, size, body, (blank, d_final, jnp.zeros_like(r.scale)), backwards=True)
    dq, dk, dv, d_log = d
    return assembled(r, dq, dk, dv, d_log, d_state, d_scale)


def assembled(r: Recurrence, dq, dk, dv, d_log, d_state, d_scale) -> Recurrence:
    """Return the gradient of r from its parts. d_log [B, T, H, D]: the gradient of `log_decays`. d_state: of the initial
    states."""
    decay = Decay(
        constant=None if r.decay.constant is None else d_log.sum((1, 3)),
        head=None if r.decay.head is None else d_log[..., 0],
        key=None if r.decay.key is None else d_log,
    )
    return gradient_recurrence(r, dq, dk, dv, decay, d_state, d_scale)
