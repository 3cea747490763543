"""Read the rows of a shard next to one of its edges, as far as these rows and a state at the edge affect each other.

G_t is the sum of log decays from the edge to token t. Reading stops where every e^{G_t} underflows to 0 in float32, which is
exact. Log-sigmoid gates reach that after about 200 tokens, however long the shard is. The cost therefore depends on the shard's
gates alone, and needs no message from other shards.

**The message** of a shard to the others is the state that leaves if none enters, and the decay through the shard's rows:

    S = sum_t (k_t e^{G_t}) v_t^T + D S_0           G_t: the log decays after token t, D: the decay through all rows

The message in reverse time has dS = dL/dS, with scale * q and do in place of k and v, and its G_t includes token t. S_0 is the
state with which a sequence begins (or ends) inside the shard. S does not depend on the shard's outputs, and is sent while these
are computed.

**The correction** adds the state that arrives at an edge to outputs and gradients that were computed from zero states. A sequence
that enters the shard with state P, or leaves it with Q = dL/dS, adds to token t

    o_t += scale * (q_t e^{G_t})^T P         dk_t += e^{G_t} Q v_t       dv_t += (k_t e^{G_t})^T Q

G_t is the sum of log decays from the edge through t. For Q, token t itself is excluded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence, aligned, spread_heads, sum_heads
from glax._src.parallel.exchange import Edge, Factors, apply_decay, of_sequences

FIRST_ROWS = 256  # rows of the first window, which is always read; log-sigmoid gates underflow within it
NEXT_ROWS = 4096  # rows of each further window
CONSTANT_ROWS = 16384  # rows of every window if decays do not depend on the data; these seldom underflow
einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class BoundaryRows:
    """Hold the rows of a shard, ordered by their distance from one edge.

    r: the recurrence of the shard's rows. edge: this edge. It lies at the lowest row if `from_low`, else at the highest.
    """

    r: Recurrence
    edge: Edge
    from_low: bool

    @property
    def packed(self) -> bool:
        return self.r.boundaries is not None

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Return (E, H, K, V), the shape of the states that cross the edge."""
        return 1 if self.packed else self.r.q.shape[0], *self.r.state_shape[1:]

    @property
    def window_rows(self) -> tuple[int, int]:
        """Return (the rows of the first window, the rows of each further window)."""
        ends_early = self.r.decay.by_token or self.r.segments is not None
        first, following = (FIRST_ROWS, NEXT_ROWS) if ends_early else (CONSTANT_ROWS, CONSTANT_ROWS)
        return min(self.r.q.shape[1], first), min(self.r.q.shape[1], following)

    @property
    def max_next_windows(self) -> int:
        """Return the number of windows after the first."""
        first, following = self.window_rows
        return -(-(self.r.q.shape[1] - first) // following)

    @property
    def num_next_windows(self) -> Int[Array, ""]:
        """Count the windows after the first that have rows of the sequence that crosses the edge of the shard."""
        first, following = self.window_rows
        return -(-jnp.maximum(self.edge.rows.max() - first, 0) // following)

    @property
    def first_window(self) -> "Window":
        return Window(self, 0, self.window_rows[0])

    def next_window(self, i) -> "Window":
        """Return window i after the first."""
        first, following = self.window_rows
        return Window(self, first + i * following, following)

    def decays(self, logs: tuple[Array | None, Array | None], inclusive: bool) -> Factors:
        """Return the decays from the edge through each row, or only up to each row if not `inclusive`, as factors.

        The factors are exponentials of sums: (for the state's rows, for its columns), None for None. logs: the log decays of
        both.
        """
        row_log, column_log = (None if x is None else self.prefix(x, inclusive) for x in logs)
        return exp_both((row_log, column_log))

    def prefix(self, x: Array, inclusive: bool) -> Array:
        """Return the sums of x from the edge through each row, or only up to each row if not `inclusive`.

        No difference of sums is formed, because log decays may be -inf.
        """
        total = lax.cumsum(x, axis=1, reverse=not self.from_low)
        by = 1 if self.from_low else -1
        return total if inclusive else shift_rows(total, by)

    def suffix(self, x: Array) -> Array:
        """Return the sums of x over the rows beyond each row, away from the edge."""
        return shift_rows(lax.cumsum(x, axis=1, reverse=self.from_low), -1 if self.from_low else 1)

    def aligned(self, carry):
        """Return a loop's carry as varying over the mesh axes of the loop's operands, as shard_map requires."""
        return aligned((carry, self.r.q, self.edge))[0]


@dataclasses.dataclass(frozen=True)
class Window:
    """Read `size` rows of a shard that start at a distance of `offset` rows from the edge."""

    rows: BoundaryRows
    offset: int | Int[Array, ""]
    size: int

    @property
    def start(self) -> Int[Array, ""]:
        """Return the first row of a slice of `size` rows of the shard that contains the window."""
        T = self.rows.r.q.shape[1]
        return jnp.clip(self.offset if self.rows.from_low else T - self.offset - self.size, 0, T - self.size)

    @property
    def mask(self) -> Bool[Array, "*B C 1 1"]:
        """Return whether each row of the slice belongs to the window and to the crossing sequence or segment: [size, 1, 1], or
        with segments [B, size, 1, 1]."""
        row = self.start + jnp.arange(self.size)
        distance = row if self.rows.from_low else self.rows.r.q.shape[1] - 1 - row
        end = jnp.minimum(self.offset + self.size, self.rows.edge.rows)
        return ((distance >= self.offset) & (distance < end[..., None]))[..., None, None]

    def read(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B C H D"]:
        """Return the window of x, [B, size, H, D]: one head for each head of the states, and 0 outside of `mask`."""
        x = row_major(lax.dynamic_slice_in_dim(x, self.start, self.size, 1)).astype(self.rows.r.dtype)
        return spread_heads(jnp.where(self.mask, x, 0), self.rows.r.num_heads)

    def add(self, buffer: Float[Array, "B T heads D"], x: Float[Array, "B C H D"]) -> Array:
        """Return `buffer` with x added to the rows of the window where `mask` holds, summed over the state's heads that share
        one of the buffer's heads."""
        old = lax.dynamic_slice_in_dim(buffer, self.start, self.size, 1)
        new = (old.astype(self.rows.r.dtype) + sum_heads(x, buffer.shape[2])).astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, row_major(jnp.where(self.mask, new, old)), self.start, 1)

    def logs(self) -> tuple[Array | None, Array | None]:
        """Return the window's log decays of the state's rows and columns, each [E, C, H, width or 1] or None."""
        rows, decay = self.rows, self.rows.r.decay
        key, value = (None if x is None else self.read(x) for x in (decay.key, decay.value))
        if decay.head is not None:
            key = self.read(decay.head[..., None])
        if decay.constant is not None:
            key = rows.edge.pick(decay.constant, rows.packed).astype(rows.r.dtype)[:, None, :, None]
            key = jnp.where(self.mask, key, 0)
        return key, value


def scan_windows(rows: BoundaryRows, visit, carry: Any) -> tuple[Int[Array, ""], Factors, Any]:
    """Run visit(window, i, G, logs, carry) -> carry over the windows from the edge on, until all decays underflow to 0.

    window: a `Window`. i: its index among the windows after the first, None for the first. G: the sums of log decays from the
    edge up to the window, of the state's rows and of its columns. logs: the window's own log decays, as `Window.logs` returns
    them.

    Returns (the number of windows visited after the first, the decays through all rows of the crossing sequence, carry). The
    decays are factors of the state's rows and columns. They are 0 if the scan stopped before the last window.
    """
    E, H, K, V = rows.state_shape
    decay, dtype = rows.r.decay, rows.r.dtype
    row_width = K if decay.key is not None else 1
    row_sum = None if decay.form in ("none", "value") else jnp.zeros((E, H, row_width), dtype)
    column_sum = None if decay.value is None else jnp.zeros((E, H, V), dtype)
    G = row_sum, column_sum

    def step(window, i, G: Factors, carry):
        logs = window.logs()
        carry = visit(window, i, G, logs, carry)
        return jax.tree.map(lambda x, log: x + log.sum(1), G, logs), carry

    def is_alive(loop):
        i, G, _ = loop
        alive = [(jnp.exp(x) != 0).any() for x in G if x is not None]
        return functools.reduce(jnp.logical_and, alive, i < rows.num_next_windows)

    def visit_next(loop):
        i, *rest = loop
        return i + 1, *step(rows.next_window(i), i, *rest)

    loop = rows.aligned((jnp.zeros_like(rows.num_next_windows), *step(rows.first_window, None, G, carry)))
    i, G, carry = lax.while_loop(is_alive, visit_next, loop) if rows.max_next_windows else loop
    return i, jax.tree.map(lambda x: jnp.where(i == rows.num_next_windows, jnp.exp(x), 0), G), carry


def exp_both(logs: tuple[Array | None, Array | None]) -> Factors:
    """Return the exponentials of two arrays; None stays None."""
    row_log, column_log = logs
    return None if row_log is None else jnp.exp(row_log), None if column_log is None else jnp.exp(column_log)


def shift_rows(x: Array, by: int) -> Array:
    """Return x shifted by one row along axis 1, forward if by > 0, and filled with zeros."""
    zeros = jnp.zeros_like(x[:, :1])
    return jnp.concatenate([zeros, x[:, :-1]] if by > 0 else [x[:, 1:], zeros], axis=1)


def times(x: Array, factor: Array | None) -> Array:
    """Return x times a factor, where None stands for 1."""
    return x if factor is None else x * factor


def row_major(x: Array) -> Array:
    """Return x constrained to a row-major layout. Without it, XLA transposes a loop's whole arrays to suit the products of
    windows."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def state_and_decay(
    rows: BoundaryRows,
    spans: Bool[Array, "*E"],
    begun: Float[Array, "N H K V"],
    a: Float[Array, "B T _ K"],
    b: Float[Array, "B T _ V"],
    adjoint: bool,
) -> tuple[Array, Array, Array | None]:
    """Return the message of the shard: S [E, H, K, V], and D as factors of its rows [E, H, K or 1] and of its columns [E, H, V]
    or None.

    D is 0 unless the entering sequence also leaves (`spans`). rows: ordered from the edge where the state leaves. begun: S_0 of
    every sequence. a, b: k and v, or q and d_output if `adjoint`, for the message in reverse time.
    """
    r, edge = rows.r, rows.edge
    # As in the kernels, bfloat16 operands are multiplied as they are and summed in float32.
    product = functools.partial(jnp.einsum, preferred_element_type=r.dtype, precision=lax.Precision.HIGHEST)
    narrow = r.q.dtype if r.q.dtype == jnp.bfloat16 else r.dtype

    def visit(window, _, G, logs, S):
        row_decay, column_decay = rows.decays(logs, inclusive=adjoint)
        # [E, C, H, K], [E, C, H, V]
        x, y = times(window.read(a), row_decay).astype(narrow), times(window.read(b), column_decay).astype(narrow)
        return S + apply_decay(product("bchk,bchv->bhkv", x, y), *exp_both(G))

    _, passed, S = scan_windows(rows, visit, rows.aligned(jnp.zeros(rows.state_shape, r.dtype)))
    if adjoint:
        S = S * edge.pick(r.scale, rows.packed)[:, None, None, None]
    S = S + apply_decay(edge.pick(begun, rows.packed), *passed)
    return of_sequences(edge.crosses, S), *decay_of(rows, spans, passed)


def decay_of(rows: BoundaryRows, spans: Bool[Array, "*E"], passed: Factors) -> tuple[Array, Array | None]:
    """Return the decay through the shard as factors of the state's rows and columns, 0 unless `spans`. passed: the decays
    through all rows of the crossing sequence."""
    row_decay, column_decay = passed
    row_decay = jnp.ones((*rows.state_shape[:2], 1), rows.r.dtype) if row_decay is None else row_decay
    return of_sequences(spans, row_decay), None if column_decay is None else of_sequences(spans, column_decay)


def total_decay(rows: BoundaryRows, spans: Bool[Array, "*E"]) -> tuple[Array, Array | None]:
    """Return the decay D through the shard as `decay_of` does, computed from all rows together. It can be differentiated: a
    loop whose number of steps depends on data has no gradient."""
    logs = Window(rows, 0, rows.r.q.shape[1]).logs()
    row_log, column_log = (None if x is None else x.sum(1) for x in logs)
    return decay_of(rows, spans, exp_both((row_log, column_log)))


def correct_output(
    rows: BoundaryRows, P: Float[Array, "E H K V"], output: Float[Array, "B T H V"]
) -> tuple[Array, Factors]:
    """Return (`output` plus the terms of the arriving state P, the decay through all rows of the crossing sequence)."""
    r = rows.r
    scale = rows.edge.pick(r.scale, rows.packed)[:, None, None, None]

    def visit(window, _, G, logs, output):
        row_decay, column_decay = rows.decays(logs, inclusive=True)
        # [E, C, H, K]
        q = times(window.read(r.q) * scale, row_decay)
        return window.add(output, times(einsum("bchk,bhkv->bchv", q, apply_decay(P, *exp_both(G))), column_decay))

    _, passed, output = scan_windows(rows, visit, rows.aligned(output))
    return output, passed


def correct_gradient(
    rows: BoundaryRows, Q: Float[Array, "E H K V"], entered: Float[Array, "E H K V"], d: Recurrence
) -> tuple[Recurrence, Factors]:
    """Return (the gradient d plus the terms of Q = dL/dS at the edge, the decay through all rows of the crossing sequence).

    entered: the state before that sequence's first row in this shard. The gradient of a log decay is <entered, dL/d entered>
    plus the sum of k_s * dk_s over the tokens s before it. The sum starts at the rows farthest from the edge, where the terms
    are smallest.
    """
    r, decay = rows.r, rows.r.decay
    visited, passed, before = sums_before_windows(rows)
    # [E, H, K, V]
    edge_terms = apply_decay(Q, *passed) * entered
    totals = sums_by_gate(decay, edge_terms)

    def step(window, G: Factors, carry):
        dk, dv, d_decay, totals = carry
        adjoint, logs = apply_decay(Q, *exp_both(G)), window.logs()
        row_decay, column_decay = rows.decays(logs, inclusive=False)
        # [E, C, H, K], [E, C, H, V]
        k, v = times(window.read(r.k), row_decay), times(window.read(r.v), column_decay)
        k_term, v_term = einsum("bchv,bhkv->bchk", v, adjoint), einsum("bchk,bhkv->bchv", k, adjoint)
        row_side = None if decay.form == "value" else k * k_term
        column_side = None if decay.value is None else v * v_term
        if row_side is not None and decay.key is None:
            row_side = row_side.sum(3, keepdims=True)
        sides = row_side, column_side
        # Tokens that come earlier in the recurrence are farther from the edge.
        d_key, d_value = (
            None if x is None else t[:, None] + rows.suffix(x) for x, t in zip(sides, totals, strict=True)
        )
        d_decay = Decay(
            head=None if d_decay.head is None else window.add(d_decay.head[..., None], d_key)[..., 0],
            key=None if d_decay.key is None else window.add(d_decay.key, d_key),
            value=None if d_decay.value is None else window.add(d_decay.value, d_value),
        )
        totals = tuple(None if x is None else t + x.sum(1) for x, t in zip(sides, totals, strict=True))
        return window.add(dk, times(k_term, row_decay)), window.add(dv, times(v_term, column_decay)), d_decay, totals

    def visit_next(j, carry):
        i = visited - 1 - j
        G = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), before)
        return step(rows.next_window(i), G, carry)

    carry = rows.aligned((d.k, d.v, d.decay, totals))
    carry = lax.fori_loop(0, visited, visit_next, carry) if rows.max_next_windows else carry
    dk, dv, d_decay, _ = step(rows.first_window, (None, None), carry)
    return d.replace(k=dk, v=dv, decay=d_decay), passed


def sums_by_gate(decay: Decay, terms: Float[Array, "E H K V"]) -> Factors:
    """Return the sums of terms over the elements of the state that share a gate: (for gates of its rows, for gates of its
    columns)."""
    of_rows = None
    if decay.key is not None:
        of_rows = terms.sum(3)
    elif decay.form != "value":
        of_rows = terms.sum((2, 3))[..., None]
    return of_rows, None if decay.value is None else terms.sum(2)


def sums_before_windows(rows: BoundaryRows) -> tuple[Int[Array, ""], Factors, Factors]:
    """Return the results of `scan_windows`, of which the last is the sums of log decays up to each window after the first.

    These sums are [windows, E, H, width], or None without gates.
    """

    def visit(window, i, G, logs, saved):
        if i is None:
            return jax.tree.map(lambda x: jnp.zeros((rows.max_next_windows, *x.shape), x.dtype), G)
        return jax.tree.map(lambda x, now: lax.dynamic_update_index_in_dim(x, now, i, 0), saved, G)

    return scan_windows(rows, visit, None)
