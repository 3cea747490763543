"""Many chunks at once, on CPUs: forward and gradient, in matrix products that two cores share.

With M_i the sum of log decays from the middle of token i's chunk through i, negative before it, `enter` the decay from the
chunk's begin to its middle, `leave` from there to its end, q~ = scale q e^M, k~ = k e^-M, S the state before the chunk and D the
gradient of the one behind it,

    o = enter q~ S + P v               P = q~ k~^T, j <= i      the next S: enter leave S + (leave k~)^T v
    dq~ = enter do S^T + dP k~         dP = do v^T, j <= i      the last D: enter leave D + (enter q~)^T do
    dk~ = leave v D^T + dP^T q~        dv = leave k~ D + P^T do
    dg_i = <S, dS> before the chunk - sum over j < i of q~ dq~ - k~ dk~

and with one decay a head it may be v~ = v e^-M, not k~. This is the fast form of `chunk`, and `within` tells at run time whether
it is exact. Only S, and D against time, pass from chunk to chunk. XLA runs a product of many small matrices on one core, but
kernels that are ready side by side once these are more than eight. So time is cut into groups of chunks, with products of their
own that wait for nothing but the states. Or heads are, where a decay is the head's alone and all is one block: all states of a
head are then one product, of a matrix of decays with what its chunks add, see `passing`, and no loop is left.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, fold_heads, gradient_like, spread_heads, varying_like
from glax._src.core.registry import Backend
from glax._src.kernels.xla import chunk_math
from glax._src.kernels.xla.chunk_math import inner, matmul, outer, times, total
from glax._src.kernels.xla.state_passing import Links, add_up, links, pass_on

GROUPS = 4  # 8 take as long and twice as long to compile, 2 leave a core idle
# A head's e^-M may stand at k or at v. At v no product is ready before the factors, so that those which states wait for are among
# the first: a gradient takes 5 to 8% less in JAX 0.10, 7% more since.
DOWN_AT_V = jax.__version_info__ < (0, 11)
CHUNK = 64  # chunks of 32 have a quarter less to multiply, but twice as many states, which leave the caches
# Elements of the rows of q, or of the states, that are solved at once: the gradient holds a dozen such arrays.
BLOCK = 2**19


def block(r: Recurrence, size: int) -> int:
    """How many tokens are solved at once: all, or so many that their arrays stay small, but at least a chunk a group."""
    groups = r.q.shape[1] // (GROUPS * size)
    fit = [n for n in range(1, groups + 1) if groups % n == 0 and elements(r, size, n * GROUPS * size) <= BLOCK]
    return max(fit, default=1) * GROUPS * size


def elements(r: Recurrence, size: int, tokens: int) -> int:
    H, K, V = r.state_shape[1:]
    return r.q.shape[0] * tokens * H * max(K, V, K * V // size)


def suits(r: Recurrence, size: int = CHUNK) -> bool:
    """Whether this form takes chunks of that size: all of them whole, and those of one block few enough."""
    if r.is_symbolic:
        return False
    whole = r.boundaries is None and r.decay.value is None and r.q.shape[1] % (GROUPS * size) == 0
    return Backend.here() is Backend.CPU and whole and elements(r, size, GROUPS * size) <= 2 * BLOCK


def by_heads(r: Recurrence, size: int) -> bool:
    """Whether groups are of heads, in one block, and their matrices of decays no larger than those of a chunk's pairs.

    The gradient then forms the states again, by the same two products a group.
    """
    T, heads = r.q.shape[1], r.num_heads
    return r.decay.key is None and heads % GROUPS == 0 and size**2 >= T and block(r, size) == T


def within(r: Recurrence, size: int) -> Bool[Array, ""]:
    """Whether no exponential overflows or vanishes, see `chunk.fast`, nor decays of e^-2 a token and less, on average, drown.

    For the gradient of log decays has each token's own part, which no gate touches, on both sides of a difference.
    """
    half = size // 2 if size % 2 == 0 else size
    log = log_decays(r)
    log = log.reshape(log.shape[0], -1, half, log.shape[2] * log.shape[3])
    # For `chunk.reach` XLA would write an array of absolute values. Their sum |x| = 2 x+ - x is at most this.
    farthest = jnp.abs(log.sum(2)).max() + 2 * half * jnp.maximum(log.max(), 0)
    return farthest <= min(chunk_math.fast_limit(r.dtype), size)


def where_exact(exact: Bool[Array, ""], r: Recurrence, size: int, together, otherwise, trains: bool):
    """together() if that is exact, else otherwise().

    What is passed into a branch of lax.cond is copied, and what is inside is shared with nothing outside: not the factors and
    rows that forward and gradient have in common. So if the call `trains` and all chunks are one block, together() stays
    outside. It may be NaN; a loop of one round or none overwrites it.
    """
    if not trains or block(r, size) < r.q.shape[1]:
        return lax.cond(exact, together, otherwise)
    found = together()

    def overwrite(carry):
        return jax.tree.map(varying_like, (jnp.ones((), bool), otherwise()), carry)

    return lax.while_loop(lambda carry: ~carry[0], overwrite, (exact, found))[1]


def log_decays(r: Recurrence) -> Float[Array, "B T H D"] | None:
    """D is K, or 1 for a decay of the head alone; None without decay."""
    if r.decay.form == "none":
        return None
    head = r.decay.head if r.decay.constant is None else r.by_token(r.decay.constant)
    return (r.decay.key if head is None else head[..., None]).astype(r.dtype)


# ---- one block -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A recurrence in GROUPS groups of n chunks of C = `size` tokens: of time, or of heads.

    N stands for the chunks of a group's heads, by chunk and head where groups are of time, else by head and chunk.
    """

    r: Recurrence
    size: int
    of_heads: bool = False

    @property
    def g(self) -> chunk_math.Geometry:
        return chunk_math.geometry(self.size, self.r.reverse)

    @property
    def scale(self) -> Float[Array, "B 1 1 1 1"]:
        return self.r.scale[:, None, None, None, None]

    def split(self, x: Float[Array, "B T heads D"]) -> list[Float[Array, "B n C H D"]]:
        x = spread_heads(x, self.r.num_heads).astype(self.r.dtype)
        parts = jnp.split(x, GROUPS, axis=2 if self.of_heads else 1)
        return [part.reshape(x.shape[0], -1, self.size, *part.shape[2:]) for part in parts]

    def by_head(self, x: Float[Array, "B n C H D"]) -> Float[Array, "B N C D"]:
        """As products take it."""
        x = x.transpose(0, 3, 1, 2, 4) if self.of_heads else x.transpose(0, 1, 3, 2, 4)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def by_token(self, x: Float[Array, "B N C D"]) -> Float[Array, "B n C H D"]:
        if self.of_heads:
            return x.reshape(x.shape[0], self.r.num_heads // GROUPS, -1, *x.shape[2:]).transpose(0, 2, 3, 1, 4)
        return x.reshape(x.shape[0], -1, self.r.num_heads, *x.shape[2:]).transpose(0, 1, 3, 2, 4)

    def states(self, x: Float[Array, "B n*H K V"]) -> Float[Array, "B n H K V"]:
        return x.reshape(x.shape[0], -1, *self.r.state_shape[1:])


class Factors(NamedTuple):
    """Those of one group, None is 1.

    q, k, v [B, n, C, H, D] multiply q, k, v; enter, leave_k, leave_v [B, N, 1, D] what these make, where it meets a state. Of
    `leave` there is the one on the side of e^-M. log: of the decay through each chunk, [B, n, H, D, 1] for groups of time.
    """

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    enter: Array | None = None
    leave_k: Array | None = None
    leave_v: Array | None = None
    log: Array | None = None
    links: Links | None = None


def factors(p: Problem) -> list[Factors]:
    log, found = log_decays(p.r), []
    if log is None:
        B, T, H = (*p.r.q.shape[:2], p.r.num_heads)
        none = varying_like(jnp.zeros((B, T // p.size, H // GROUPS), p.r.dtype), p.r.q)
        return [Factors(links=links(none, p.r.reverse) if p.of_heads else None)] * GROUPS
    for log in p.split(log):  # noqa: B020
        B, n, C, H, D = log.shape
        M = chunk_math.sums(p.g.middle, log.reshape(B, n, C, H * D)).reshape(log.shape)
        enter, leave = log[:, :, p.g.begin] - M[:, :, p.g.begin], M[:, :, p.g.end]
        through = enter + leave
        linked = links(through[..., 0], p.r.reverse) if p.of_heads else None
        up, (enter, leave) = jnp.exp(M), (p.by_head(jnp.exp(x)[:, :, None]) for x in (enter, leave))
        down, at_v = 1 / up, D == 1 and DOWN_AT_V
        sides = (None, down, enter, None, leave) if at_v else (down, None, enter, leave, None)
        found.append(Factors(up, *sides, through[..., None], linked))
    return found


class Rows(NamedTuple):
    """q~, k~ and v~ of one group, and what of them meets a state, [B, N, C, _]."""

    q: Array
    k: Array
    v: Array
    enter_q: Array
    leave_k: Array
    leave_v: Array


def rows(p: Problem, f: list[Factors]) -> list[Rows]:
    found = []
    for q, k, v, factor in zip(p.split(p.r.q), p.split(p.r.k), p.split(p.r.v), f, strict=True):
        q, k, v = (p.by_head(times(*x)) for x in ((q * p.scale, factor.q), (k, factor.k), (v, factor.v)))
        meets = times(q, factor.enter), times(k, factor.leave_k), times(v, factor.leave_v)
        found.append(Rows(q, k, v, *meets))
    return found


def flat(X: list[Float[Array, "B n H K V"]]) -> list[Float[Array, "B n*H K V"]]:
    """As products take them."""
    return [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in X]


def states(p: Problem, f: list[Factors], rows: list[Rows]):
    """S before each chunk, by groups, [B, N, K, V], and the final S."""
    added = [outer(x.leave_k, x.leave_v) for x in rows]
    if p.of_heads:
        given = jnp.split(p.r.start_state, GROUPS, axis=1)
        before, final = zip(
            *(add_up(f.links, *X, against=False) for f, *X in zip(f, given, added, strict=True)), strict=True
        )
        return before, jnp.concatenate(final, axis=1)
    before, _, final = pass_on(p.r.start_state, [x.log for x in f], [p.states(x) for x in added], p.r.reverse)
    return flat(before), final


def adjoints(p: Problem, f: list[Factors], rows: list[Rows], do, d_final, S: list[Array]):
    """D behind each chunk, like S; S dS before it; the gradient of the initial S."""
    added = [outer(x.enter_q, do) for x, do in zip(rows, do, strict=True)]
    if p.of_heads:
        given = jnp.split(d_final, GROUPS, axis=1)
        behind, first = zip(
            *(add_up(f.links, *X, against=True) for f, *X in zip(f, given, added, strict=True)), strict=True
        )
        edges = [S * (f.links.through * D + new) for f, S, D, new in zip(f, S, behind, added, strict=True)]
        return behind, edges, jnp.concatenate(first, axis=1)
    added = [p.states(x) for x in added]
    behind, before, first = pass_on(d_final, [x.log for x in f], added, not p.r.reverse)
    return flat(behind), [S * dS for S, dS in zip(S, flat(before), strict=True)], first


def forward(p: Problem) -> tuple[list[Array], Array, list[Array]]:
    """The outputs and the states before each chunk, each by groups, and between them the final states."""
    f = factors(p)
    all_rows = rows(p, f)
    before, final = states(p, f, all_rows)
    output = []
    for x, S in zip(all_rows, before, strict=True):
        pairs = jnp.where(p.g.causal, inner(x.q, x.k), 0)
        output.append(p.by_token(matmul(x.enter_q, S) + matmul(pairs, x.v)))
    return output, final, before


class Gradient(NamedTuple):
    """That of one block: rows by groups, `log` that of `log_decays`."""

    q: list[Array]
    k: list[Array]
    v: list[Array]
    log: list[Array]


def backward(p: Problem, d_output, d_final, kept: Array | None) -> tuple[Gradient, Array, Array]:
    """The gradient in all rows, in the initial states and in the scale, from the states before each chunk, if those are kept."""
    r, g, f = p.r, p.g, factors(p)
    all_rows = rows(p, f)
    S = states(p, f, all_rows)[0] if kept is None else flat(jnp.split(kept, GROUPS, axis=1))
    cotangents = [p.by_head(x) for x in p.split(d_output)]
    D, edges, d_initial = adjoints(p, f, all_rows, cotangents, d_final, S)

    d, d_scale = Gradient([], [], [], []), 0
    groups = zip(all_rows, cotangents, S, D, edges, f, p.split(r.q), strict=True)
    for x, do, S, D, edge, factor, q_given in groups:
        # With each token's own part, unlike in `chunk.backward`: see `within`.
        pairs, d_pairs = (jnp.where(g.causal, y, 0) for y in (inner(x.q, x.k), inner(do, x.v)))
        dq = times(inner(do, S), factor.enter) + matmul(d_pairs, x.k)
        dk = times(inner(x.leave_v, D), factor.leave_k) + outer(d_pairs, x.q)
        dv = times(matmul(x.leave_k, D), factor.leave_v) + outer(pairs, do)
        if r.decay.form != "none":
            d_log = chunk_math.log_gradient(g, x.q * dq - x.k * dk, total(edge, 3), per_head=r.decay.key is None)
            d.log.append(p.by_token(d_log))
        dq = times(p.by_token(dq), factor.q)
        d_scale += (dq * q_given).sum((1, 2, 3, 4))
        d.q.append(dq * p.scale)
        d.k.append(times(p.by_token(dk), factor.k))
        d.v.append(times(p.by_token(dv), factor.v))
    return d, d_initial, d_scale


# ---- block after block -----------------------------------------------------------------------------------------------


def write(buffer: Float[Array, "B T heads D"], parts: list[Float[Array, "B n C H D"]], at) -> Array:
    """The groups of one block, one after the other: an array of all would be written once more, on one core."""
    parts = [fold_heads(x.reshape(x.shape[0], -1, *x.shape[3:]), buffer.shape[2]).astype(buffer.dtype) for x in parts]
    if buffer.shape[1] == len(parts) * parts[0].shape[1]:
        return jnp.concatenate(parts, axis=1)
    for i, part in enumerate(parts):
        buffer = lax.dynamic_update_slice_in_dim(buffer, part, at + i * part.shape[1], 1)
    return buffer


def join(parts: list[Float[Array, "B n C H D"]], heads: int, dtype) -> Float[Array, "B T heads D"]:
    """Groups of heads, side by side and folded to so many."""
    whole = jnp.concatenate([part.reshape(part.shape[0], -1, *part.shape[3:]) for part in parts], axis=2)
    return fold_heads(whole, heads).astype(dtype)


def walk(r: Recurrence, size: int, body, carry, backwards: bool):
    """Folds body(at, block of r, carry) over the blocks, in the order of the recurrence or against it; `at` is its first row."""
    L = block(r, size)
    count = r.q.shape[1] // L
    if count == 1:
        return body(0, r, carry)

    def step(i, carry):
        at = (count - 1 - i if r.reverse != backwards else i) * L
        rows = lambda x: None if x is None else lax.dynamic_slice_in_dim(x, at, L, 1)  # noqa: E731
        decay = Decay(r.decay.constant, rows(r.decay.head), rows(r.decay.key))
        return body(at, r.replace(q=rows(r.q), k=rows(r.k), v=rows(r.v), decay=decay), carry)

    return lax.fori_loop(0, count, step, jax.tree.map(lambda x: varying_like(x, r.q), carry))


def solve(r: Recurrence, size: int) -> tuple[Outputs, Float[Array, "B chunks H K V"] | None]:
    """The outputs, and the state before each chunk, but for groups of heads."""
    (B, T), (H, K, V) = r.q.shape[:2], r.state_shape[1:]
    if by_heads(r, size):
        parts, final, _ = forward(Problem(r, size, of_heads=True))
        return Outputs(join(parts, H, r.q.dtype), final), None

    def body(at, part: Recurrence, carry):
        state, output, kept = carry
        o, state, before = forward(Problem(part.replace(initial_state=state), size))
        before = [x.reshape(B, -1, 1, H, K * V) for x in before]  # as rows of size 1
        return state, write(output, o, at), write(kept, before, at // size)

    output, kept = jnp.zeros((B, T, H, V), r.q.dtype), jnp.ones((B, T // size, H, K * V), r.dtype)
    state, output, kept = walk(r, size, body, (r.start_state, output, kept), backwards=False)
    return Outputs(output, state), kept.reshape(B, T // size, H, K, V)


def vjp(r: Recurrence, size: int, d_output, d_final, kept: Float[Array, "B chunks H K V"] | None) -> Recurrence:
    """The gradient in every input, from the states that `solve` returns, or from those that another pass forms again."""
    d_final = d_final.astype(r.dtype)
    log = log_decays(r)
    if by_heads(r, size):
        parts, d_state, d_scale = backward(Problem(r, size, of_heads=True), d_output, d_final, None)
        d = [
            None if x is None else join(y, x.shape[2], x.dtype)
            for x, y in zip((r.q, r.k, r.v, log), parts, strict=True)
        ]
        return assembled(r, *d, d_state, d_scale)
    if kept is None:
        kept = solve(r, size)[1]

    def body(at, part: Recurrence, carry):
        d, d_state, d_scale = carry
        rows = lambda x, at, n: lax.dynamic_slice_in_dim(x, at, n, 1)  # noqa: E731
        L = part.q.shape[1]
        parts, d_state, more = backward(
            Problem(part, size), rows(d_output, at, L), d_state, rows(kept, at // size, L // size)
        )
        d = [None if x is None else write(x, y, at) for x, y in zip(d, parts, strict=True)]
        return d, d_state, d_scale + more

    # Of arrays of one number XLA would make one, and copy it.
    blank = [None if x is None else jnp.full(x.shape, i, x.dtype) for i, x in enumerate((r.q, r.k, r.v, log))]
    d, d_state, d_scale = walk(r, size, body, (blank, d_final, jnp.zeros_like(r.scale)), backwards=True)
    return assembled(r, *d, d_state, d_scale)


def assembled(r: Recurrence, d_q, d_k, d_v, d_log, d_state, d_scale) -> Recurrence:
    decay = Decay(
        constant=None if r.decay.constant is None else d_log.sum((1, 3)),
        head=None if r.decay.head is None else d_log[..., 0],
        key=None if r.decay.key is None else d_log,
    )
    state = None if r.initial_state is None else d_state
    return gradient_like(
        r, r.replace(q=d_q, k=d_k, v=d_v, decay=decay, initial_state=state, boundaries=None, scale=d_scale)
    )
