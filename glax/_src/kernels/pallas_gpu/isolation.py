"""Run kernels so that a document's results depend on its own rows alone, even where other documents are not finite.

A document is a sequence, or a segment of a row. Kernels that take several documents as one row multiply masked scores of 0 by all
rows of a chunk, and clear a state by a decay of 0. A NaN or an inf passes both. What it reaches, it reaches in all later rows in
scan order, or in all rows of a chunk. So a result is finite everywhere if the rows at the edges of its chunks are.

    results = run(operands)                      as without other documents
    if the rows at the edges of chunks are not all finite:
        results = run(operands without the rows of the documents that are not finite)
        the rows of these documents = NaN

JAX 0.12 makes the branch a node of the GPU's graph. With JAX 0.11 the host reads its flag, so a call waits for the one before.
Where all is finite the branch writes nothing (`repaired`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Bool, Float

from glax._src.core.backend import Backend
from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, StoredStates, spread_heads
from glax._src.core.segments import expanded
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu.device.launch import ALONE, PROGRAM, launch
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.rows import PackedRow, Reading, boundaries_within

BEYOND = 1e24  # of a result: what is lost to cancellation beside it is not small either
LARGE = 1e18  # whose products overflow
SUSPECT = 1e8  # whose products of four may overflow
GROWTH = 40.0  # nats by which gates let a state grow before it is suspect
BLOCKS = 1024, 512, 256, 128  # numbers that a program of `repair` moves together, 1 to 8 a thread


def isolated(run: Callable, r: Recurrence, *given) -> Any:
    """Return run(r, *given), in which no document's results depend on another document's rows.

    run: a function (r) -> Outputs, or -> (Outputs, Residuals or None); or (r, d_output, d_final, *residuals) -> gradient.
    given: (), or the gradient's arguments behind r. A document with numbers that are not finite, or overflow, has outputs of
    NaN from there on, and gradients of NaN.
    """
    _, d_final, *residuals = given or (None, None)
    if not shares_rows(r, d_final):
        return run(r, *given)
    run = jax.jit(run)  # traced once for both calls
    found = run(r, *given)
    again = (without_spoiled_documents if given else without_spoiled_tokens)(run)
    is_spoiled = spoiled(r, found, d_final, *residuals)
    results = lax.cond(is_spoiled, again, lambda r, *_: empty_like(found), r, *given)
    return merged(is_spoiled.astype(jnp.int32), r, found, results)


def shares_rows(r: Recurrence, d_final=None) -> bool:
    """Return whether several documents of r share the rows that the kernels read. d_final: the gradient's argument, or None."""
    return r.segments is not None or Reading.of(r, d_final=d_final).shares_rows


def merged(is_spoiled: Array, r: Recurrence, found, results):
    """Return `results`, computed without spoiled documents, if `is_spoiled`; else `found`, the results of the first run.

    is_spoiled: an int32, not 0 if `spoiled` holds for `found`. A final state of a packed sequence is never spoiled, and is
    returned as found. A kernel of its own computes that state, which XLA drops where it is not used.
    """
    if isinstance(found, Recurrence):
        return repaired(is_spoiled, found, results)
    outputs, again = (x if isinstance(x, Outputs) else x[0] for x in (found, results))
    final = outputs.final_state
    if r.boundaries is None:
        final = repaired(is_spoiled, final, again.final_state)
    if isinstance(found, Outputs):
        return Outputs(repaired(is_spoiled, found.output, again.output), final)
    output, residuals = repaired(is_spoiled, (outputs.output, found[1]), (again.output, results[1]))
    return Outputs(output, final), residuals


def empty_like(x):
    """Return arrays of the shapes and dtypes of the tree x. Their numbers are not defined."""
    return jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), x)


# ---- are results spoiled ---------------------------------------------------------------------------------------------


def spoiled(r: Recurrence, found, d_final=None, residuals: Residuals | None = None) -> Array:
    """Return whether the results `found` exceed BEYOND, or are NaN, in a row at the edge of a chunk: whether a document has
    perhaps spoiled the results of another. The result is a bool, because `lax.cond` clamps an integer by a kernel of its own.

    found: `Outputs`, (Outputs, Residuals), or the gradient of r. residuals: the gradient's argument, or None. The outputs of a
    chunk's last row in scan order draw on all rows before it, and so does the gradient of q. The other gradients of its first
    row draw on all rows behind it.
    """
    number = Reading.of(r, d_final=d_final).joined
    if residuals is not None and number > 1:
        number = r.q.shape[0] // residuals.states.shape[0]
    if isinstance(found, Recurrence):
        tokens = found.tokens_alone
        last, first = [tokens.q], jax.tree.leaves(tokens.replace(q=None))
    else:
        last, first = [(found if isinstance(found, Outputs) else found[0]).output], []
    edges = [*at_edges(r, last, number, True), *at_edges(r, first, number, False)]
    return functools.reduce(jnp.logical_or, [(~(jnp.abs(x) <= BEYOND)).any() for x in edges])


def at_edges(r: Recurrence, arrays: list[Array], number: int, last: bool) -> list[Array]:
    """Return the rows of `arrays`, [B, T, ...] each, at which the scan leaves its chunks, if `last`, or enters them.

    The results are [B / number, chunks, ...]. number: the number of sequences in a row that the kernels read. Where r has
    padding, the outermost token of each chunk takes the place of its edge, because results in padding are 0.
    """
    length = r.q.shape[1] * number
    joined = [x.reshape(-1, length, *x.shape[2:]) for x in arrays]
    down = last == r.reverse
    segments = r.segments
    if segments is not None and segments.is_token is not None:
        rows = edge_tokens(segments.is_token.reshape(-1, length), down)
        return [jax.vmap(lambda x, row: jnp.take(x, row, axis=0, mode="clip"))(x, rows) for x in joined]
    rows = np.minimum(np.arange(-(-length // C), dtype=np.int32) * C + (0 if down else C - 1), length - 1)
    if r.boundaries is not None:
        cuts = boundaries_within(r)
        rows = jnp.minimum(jnp.clip(rows, cuts[0], jnp.maximum(cuts[-1] - 1, cuts[0])), length - 1)
    elif down:
        return [x[:, ::C] for x in joined]
    return [jnp.take(x, rows, axis=1, mode="clip") for x in joined]


def edge_tokens(is_token: Array, down: bool) -> Array:
    """Return the row of the first token in memory of every chunk if `down`, else of the last, [B, chunks] in int32. For a chunk
    without a token return 0 if not `down`, else the last row of all.

    is_token: [B, rows].
    """
    length = is_token.shape[1]
    rows = jnp.arange(length, dtype=jnp.int32)
    found = jnp.where(is_token, rows, length if down else -1)
    found = jnp.pad(found, ((0, 0), (0, -length % C)), constant_values=length if down else -1)
    found = found.reshape(found.shape[0], -1, C)
    return jnp.clip(found.min(2) if down else found.max(2), 0, length - 1)


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Documents:
    """Hold where the documents of each row begin, and which rows are tokens.

    begins: whether the scan of a document begins at each row. is_token: false for padding, which counts to the document before
    it in scan order, and for rows of no sequence. reverse: whether the scan goes from the last row to the first.
    """

    begins: Bool[Array, "B T"]
    is_token: Bool[Array, "B T"]
    reverse: bool

    @classmethod
    def of(cls, r: Recurrence) -> "Documents":
        """Return the documents of r: its sequences, or the segments of its rows."""
        B, T = r.q.shape[:2]
        first = jnp.arange(T) == (T - 1 if r.reverse else 0)
        begins, is_token = jnp.broadcast_to(first, (B, T)), jnp.ones((B, T), bool)
        if r.boundaries is not None:
            packed = PackedRow(r)
            begins, is_token = begins | packed.begins, packed.is_token[None]
        elif r.segments is not None:
            begins = begins | r.segments.resets
            is_token = is_token if r.segments.is_token is None else r.segments.is_token
        return cls(begins, is_token, r.reverse)

    @property
    def first(self) -> int:
        """Return the index of the row that the scan takes first, 0 or -1."""
        return -1 if self.reverse else 0

    @property
    def last(self) -> int:
        """Return the index of the row that the scan takes last, 0 or -1."""
        return 0 if self.reverse else -1

    def in_order(self, x: Array) -> Array:
        """Return x [B, T, ...] with the rows in scan order if they are in memory order, and the other way round."""
        return x[:, ::-1] if self.reverse else x

    def reach(self, bad: Bool[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
        """Return two masks [B, T]: whether a token of the same document with `bad` true is at or before each token in scan
        order, and whether the document has any such token."""
        so_far = self.sums(bad.astype(jnp.int32))
        begins = self.in_order(self.begins)
        ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
        rows = jnp.arange(bad.shape[1], dtype=jnp.int32)
        last = lax.cummin(jnp.where(ends, rows, rows.size - 1), axis=1, reverse=True)
        whole = jnp.take_along_axis(self.in_order(so_far), last, axis=1)
        return so_far > 0, self.in_order(whole) > 0

    def sums(self, x: Array) -> Array:
        """Return the sums of x [B, T] over the tokens of each document up to and with each token in scan order, [B, T] in
        memory order."""
        x, begins = self.in_order(x), self.in_order(self.begins)
        rows = jnp.arange(x.shape[1], dtype=jnp.int32)
        first = lax.cummax(jnp.where(begins, rows, 0), axis=1)
        total = jnp.cumsum(x, axis=1)
        return self.in_order(total - jnp.take_along_axis(total - x, first, axis=1))

    def any_bad(self, bad: Bool[Array, "B T *rest"]) -> Bool[Array, "B T"]:
        """Return whether any element of `bad` is true at each token; false in padding."""
        return bad.reshape(*bad.shape[:2], -1).any(2) & self.is_token

    def by_sequence(self, r: Recurrence, bad: Bool[Array, "B T"]) -> Bool[Array, "N"]:
        """Return for each sequence of r whether `bad` is true for any of its tokens, [N]."""
        if r.boundaries is None:
            return bad.any(1)
        cuts = boundaries_within(r)
        begin = jnp.clip(cuts[:-1, None], 0, bad.shape[1])
        rows = jnp.arange(bad.shape[1], dtype=cuts.dtype)
        return (bad & (rows >= begin) & (rows < cuts[1:, None])).any(1)


def positive(gates: Float[Array, "B T *rest"]) -> Float[Array, "B T"]:
    """Return the largest positive gate of each token in float32, at most 100; 0 for gates that are NaN."""
    gates = jnp.nan_to_num(gates.astype(jnp.float32), nan=0.0, posinf=100.0, neginf=0.0)
    return jnp.clip(gates, 0, 100).reshape(*gates.shape[:2], -1).max(2)


# ---- run again without what spoils them ------------------------------------------------------------------------------


def without_spoiled_tokens(run: Callable) -> Callable:
    """Return a function of r that runs r without the tokens of each document from its first that is not finite on.

    run: a function (r) -> Outputs, or -> (Outputs, Residuals or None); the returned function has the same results. The outputs
    of the tokens left out, and the states behind them, are NaN. A token whose query alone is not finite, or too large, loses
    its own output only.
    """

    def again(r: Recurrence):
        documents = Documents.of(r)
        carried, own = bad_tokens(r, documents, [r.q]), largest(documents, [r.q]) > LARGE
        lost, _ = documents.reach(carried)
        own &= ~lost
        found = run(without(r, documents, lost, own))
        outputs = found if isinstance(found, Outputs) else found[0]
        final = outputs.final_state
        if r.boundaries is None:
            final = filled_states(r, final, documents, lost, jnp.nan)
        outputs = Outputs(filled(outputs.output, (lost | own) & documents.is_token, jnp.nan), final)
        return outputs if isinstance(found, Outputs) else (outputs, found[1])

    return again


def without_spoiled_documents(run: Callable) -> Callable:
    """Return a function (r, d_output, d_final, *residuals) -> gradient, which calls `run` without the documents that contain a
    token of `bad_tokens`, and sets their gradients to NaN. run: a function of the same arguments."""

    def again(r: Recurrence, d_output, d_final, *residuals):
        documents = Documents.of(r)
        bad = bad_tokens(r, documents, [r.q, d_output], d_final, whole=True)
        _, lost = documents.reach(bad)
        d_output = filled(d_output, lost, 0)
        d_final = None if d_final is None else filled_states(r, d_final, documents, lost, 0)
        residuals = [Residuals(jnp.where(magnitude(x.states) > LARGE, 0, x.states), x.out_of_range) for x in residuals]
        d = run(without(r, documents, lost, jnp.zeros_like(lost)), d_output, d_final, *residuals)
        return gradient_with_nan(r, d, documents, lost & documents.is_token)

    return again


def gradient_with_nan(r: Recurrence, d: Recurrence, documents: Documents, lost: Array) -> Recurrence:
    """Return d, a gradient with respect to r, with NaN at the tokens where `lost` [B, T] is true, and for the sequences that
    contain such a token."""
    d, sequences = d.map_tokens(lambda x: filled(x, lost, jnp.nan)), documents.by_sequence(r, lost)
    _, whole = documents.reach(lost)
    initial, constant = d.initial_state, d.decay.constant
    initial = None if initial is None else filled(initial, whole[:, documents.first], jnp.nan)
    constant = None if constant is None else filled(constant, sequences, jnp.nan)
    decay = Decay(constant, d.decay.head, d.decay.key, d.decay.value)
    return d.replace(initial_state=initial, decay=decay, scale=filled(d.scale, sequences, jnp.nan))


def filled(x: Array, mask: Array, value: float) -> Array:
    """Return x with `value` where the bool array `mask` is true. The axes of mask are the first axes of x."""
    return jnp.where(jnp.expand_dims(mask, range(mask.ndim, x.ndim)), jnp.asarray(value, x.dtype), x)


def filled_states(r: Recurrence, states: Any, documents: Documents, lost: Array, value: float) -> Any:
    """Return `states`, final states or `StoredStates`, with `value` where `lost` [B, T] is true for the token before a
    state."""
    final, stored = states if isinstance(states, StoredStates) else (states, None)
    final = filled(final, lost[:, documents.last], value)
    if not isinstance(states, StoredStates):
        return final
    if stored is not None:
        stored = filled(stored, lost[:, rows_before_states(r, stored.shape[1])], value)
    return StoredStates(final, stored)


def bad_tokens(r: Recurrence, documents: Documents, others: list[Array], d_final=None, whole: bool = False) -> Array:
    """Return a mask [B, T] of the tokens that may not be read: those that are not finite; if there are none, those that may
    overflow.

    others: arrays [B, T, ...] that are checked in addition to k, v and the erasure. d_final: gradients of states that are
    checked, or None. whole: whether numbers in `others` that are not finite make their token bad. The forward passes q in
    `others` with whole=False, because q affects only its own output.
    """
    carried = [r.k, r.v, *jax.tree.leaves(r.erasure)]
    size = jnp.maximum(largest_of_states(r, documents, d_final), largest(documents, carried))
    beside, gates = largest(documents, others), bad_gates(r, documents)
    not_finite = gates | (size > LARGE)
    of_all = not_finite | (beside > LARGE)
    suspect = gates | (size > SUSPECT) | (beside > SUSPECT) | grows(r, documents)
    return jnp.where(of_all.any(), of_all if whole else not_finite, suspect)


def largest(documents: Documents, arrays: list[Array]) -> Array:
    """Return the largest magnitude of each token over all of `arrays`, [B, T] in float32; inf for NaN, and 0 for padding."""
    each = [magnitude(x).reshape(*x.shape[:2], -1).max(2) for x in arrays]
    return jnp.where(documents.is_token, functools.reduce(jnp.maximum, each), 0)


def magnitude(x: Array) -> Array:
    """Return |x| in float32, inf for NaN."""
    x = jnp.abs(x.astype(jnp.float32))
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def largest_of_states(r: Recurrence, documents: Documents, d_final) -> Array:
    """Return the largest magnitude of the states that enter at each row of memory, [B, T] in float32; 0 where none enters.

    An initial state enters at the row that the scan takes first. The gradient of a state, from d_final (an array,
    `StoredStates` or None), enters at the token that the state follows.
    """
    found = jnp.zeros(documents.is_token.shape, jnp.float32)

    def put(found, rows, states):
        return found.at[:, rows].max(magnitude(states).reshape(*states.shape[:-3], -1).max(-1))

    if r.initial_state is not None:
        found = put(found, documents.first, r.initial_state)
    d_final, d_states = d_final if isinstance(d_final, StoredStates) else (d_final, None)
    if d_final is not None:
        found = put(found, documents.last, d_final)
    if d_states is not None and d_states.shape[1]:
        found = put(found, rows_before_states(r, d_states.shape[1]), d_states)
    return found


def rows_before_states(r: Recurrence, count: int) -> Array:
    """Return the row of memory before each of the states of `states_every`, [count]."""
    behind = (jnp.arange(count) + 1) * (r.states_every or 0)
    return r.q.shape[1] - behind if r.reverse else behind - 1


def bad_gates(r: Recurrence, documents: Documents) -> Array:
    """Return a mask [B, T] of the tokens that have a gate of NaN or inf, or lie behind gates by which a state may overflow.

    The gate of the first token of a document that begins from zeros decays nothing, and does not count.
    """
    bad = jnp.zeros_like(documents.is_token)
    for gates in gates_of(r):
        bad |= documents.any_bad(is_bad_gate(gates))
    return (bad & decays(r, documents)) | outgrown(r, documents)


def decays(r: Recurrence, documents: Documents) -> Array:
    """Return a mask [B, T] of the tokens at which a gate decays a state that is not zeros: all but the first of a document
    without an initial state."""
    begins = documents.begins
    if r.initial_state is not None:
        begins = begins.at[:, documents.first].set(False)
    return documents.is_token & ~begins


def outgrown(r: Recurrence, documents: Documents) -> Array:
    """Return a mask [B, T] of the tokens that lie behind gates which multiply a state by more than e^GROWTH."""
    growth = sum((positive(x) for x in gates_of(r)), jnp.zeros(documents.begins.shape, jnp.float32))
    return documents.sums(jnp.where(decays(r, documents), growth, 0)) > GROWTH


def gates_of(r: Recurrence) -> list[Array]:
    """Return a list of the gates of every token, [B, T, H] or [B, T, H, K] each; an empty list without gates."""
    d = r.decay
    constant = None if d.constant is None else r.by_token(d.constant)
    return [x for x in (constant, d.head, d.key) if x is not None]


def is_bad_gate(x: Array) -> Array:
    """Return a mask of the gates x that are NaN or inf. A gate of -inf, a decay of 0, is not bad."""
    return jnp.isnan(x) | jnp.isposinf(x)


def grows(r: Recurrence, documents: Documents) -> Array:
    """Return a mask [B, T] of the tokens behind keys with |1 - e . k| > 1 under the delta rule, by which a state may grow by
    more than e^GROWTH. Without a delta rule no token is marked."""
    if r.erasure is None:
        return jnp.zeros_like(documents.is_token)
    k, beta = jnp.nan_to_num(r.k.astype(jnp.float32)), r.erasing.beta
    if beta is not None:
        length = jnp.square(k).sum(3).max(2)
        size = jnp.nan_to_num(beta.astype(jnp.float32)).max(2) * length - 1
    else:
        e, _ = r.erasing.vectors(r.k)
        size = jnp.abs(1 - (jnp.nan_to_num(e.astype(jnp.float32)) * spread_heads(k, r.num_heads)).sum(3)).max(2)
    factor = jnp.log(jnp.clip(size, 1.0, 1e30))
    return documents.sums(jnp.where(documents.is_token, factor, 0)) > GROWTH


def without(r: Recurrence, documents: Documents, lost: Array, own: Array) -> Recurrence:
    """Return r with zeros in the rows where `lost` [B, T] is true, and zeros in q also where `own` [B, T] is true.

    Gates that are NaN or inf, and gates of tokens in `outgrown`, become 0. Documents keep all other gates, so that states
    before chunks equal those of any other call without the bad rows.
    """
    no_gate = outgrown(r, documents)

    def gate(x):
        return None if x is None else jnp.where(is_bad_gate(x) | expanded(no_gate, x.ndim), 0, x)

    d, erasure = r.decay, r.erasure
    constant = None if d.constant is None else jnp.where(is_bad_gate(d.constant), 0, d.constant)
    if erasure is not None:
        erasure = jax.tree.map(lambda x: filled(x, lost, 0), erasure)
    initial = None if r.initial_state is None else filled(r.initial_state, lost[:, documents.first], 0)
    q, k, v = filled(r.q, lost | own, 0), filled(r.k, lost, 0), filled(r.v, lost, 0)
    decay = Decay(constant, gate(d.head), gate(d.key), d.value)
    return r.replace(q=q, k=k, v=v, decay=decay, erasure=erasure, initial_state=initial)


# ---- replace results in place ----------------------------------------------------------------------------------------


def repaired(flag: Array, found: Any, others: Any) -> Any:
    """Return the tree of arrays `found` if flag is 0, else the tree `others` of the same shapes. flag: an int32.

    A select would read and write all arrays. On GPUs a kernel overwrites large arrays of `found` instead, and ends immediately
    where the flag is 0.
    """
    leaves, structure = jax.tree.flatten(found)
    pairs = list(zip(leaves, jax.tree.leaves(others), strict=True))
    block = [next((n for n in BLOCKS if x.size % n == 0), 0) for x in leaves]
    is_large = [n > 0 and Backend.here() is Backend.GPU for n in block]
    results = [x if large else jnp.where(flag > 0, y, x) for (x, y), large in zip(pairs, is_large, strict=True)]
    large = [i for i, found in enumerate(is_large) if found]
    if large:
        tiles = [tuple(x.reshape(-1, block[i]) for x in pairs[i]) for i in large]
        for i, x in zip(large, repair(flag[None], *(list(x) for x in zip(*tiles, strict=True))), strict=True):
            results[i] = x.reshape(leaves[i].shape)
    return structure.unflatten(results)


def repair(flag: Array, found: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    """Return `found`, or `others` if flag [1] is not 0, in the memory of `found`. All arrays are [rows, width], with a width of
    128, 256, 512 or 1024."""
    programs = multiprocessors()

    def body(operands, results):
        flag, others = operands
        program = lax.axis_index(PROGRAM)

        def move(source, target):
            def step(i, _):
                row = program + i * programs
                target[row] = source[row]

            lax.fori_loop(0, (target.shape[0] - program + programs - 1) // programs, step, None)

        @pl.when(flag[0] != 0)
        def _():
            for source, target in zip(others, results, strict=True):
                move(source, target)

    operands = flag, list(others)
    return launch(
        "repair", None, body, operands, list(found), (), ALONE, programs=programs, over=True, params=plgpu.CompilerParams()
    )  # fmt: skip
