"""Read and write one chunk of a scan over chunks, and choose the form that computes it.

The arrays stay as they are, [B, T, heads, D]. A chunk is a window of C consecutive rows with a mask, so packing, `reverse`, and
a T that C does not divide move no row. `scan_chunks` runs a function over the chunks, and `select_form` evaluates a function
in the fast or the exact form of `chunk_math`. `scan_outputs` computes the outputs of a recurrence with both.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glax._src.core.recurrence import Outputs, Recurrence, is_symbol, spread_heads, sum_heads, varying_like
from glax._src.core.registry import Backend
from glax._src.kernels.common.chunks import Chunks, chunks_of, pad_to_chunk, trim_rows
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.xla import chunk_math

Carried = TypeVar("Carried", Array, chunk_math.State)  # what a scan passes from chunk to chunk


class ChunkWindow:
    """Read and write the rows of chunk i. A window is C consecutive rows within the array, and holds the chunk. Its rows
    outside the chunk are read as 0, and not written.

    begins: whether chunk i is the first of its sequence in the scan.
    """

    def __init__(self, r: Recurrence, chunks: Chunks, i, begins):
        C, T = chunks.size, r.q.shape[1]
        self.r, self.C = r, C
        self.start = jnp.minimum(chunks.first[i], T - C)
        row = self.start + jnp.arange(C, dtype=self.start.dtype)
        whole = r.boundaries is None and not is_symbol(T) and T % C == 0
        # [C]: whether a row belongs to this chunk; None if every chunk fills its window
        self.in_chunk = None if whole else (row >= chunks.first[i]) & (row < chunks.last[i])
        self.chunks, self.i, self.row = chunks, i, row
        self.sequence = chunks.sequence[i]
        self.begins = begins  # whether this is the first chunk of its sequence in the scan
        self.batch = r.q.shape[0]

    def rows(self, x: Float[Array, "B T H D"]) -> Float[Array, "B C H D"]:
        """Return the window's rows of x in the dtype of sums, with 0 outside the chunk."""
        window = lax.dynamic_slice_in_dim(x, self.start, self.C, 1).astype(self.r.dtype)
        return window if self.in_chunk is None else jnp.where(self.in_chunk[:, None, None], window, 0)

    def read(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B H C D"]:
        """Return the window's rows of x with a head for each head of the state, in the order of the products, with 0 outside
        the chunk."""
        x = spread_heads(self.rows(x), self.r.num_heads).transpose(0, 2, 1, 3)
        # Without the barrier, XLA reads the rows again for every use, transposed for each product.
        return lax.optimization_barrier(x)

    def read_all(self, *arrays: Float[Array, "B T _ _"]) -> list[Float[Array, "B H C _"]]:
        """Return `read` of each array.

        On CPUs, arrays of one width are read as one array. XLA then reads their rows once, and not in every kernel that uses
        them. The loop also begins with so few kernels that XLA wakes no other core for small ones.
        """
        if Backend.here() is not Backend.CPU:
            return [self.read(x) for x in arrays]
        windows = [spread_heads(self.rows(x), self.r.num_heads) for x in arrays]
        read = {}
        for width in {x.shape[3] for x in windows}:
            same = [i for i, x in enumerate(windows) if x.shape[3] == width]
            joint = jnp.concatenate([windows[i] for i in same], axis=1).transpose(0, 2, 1, 3)
            read |= zip(same, jnp.split(lax.optimization_barrier(joint), len(same), axis=2), strict=True)
        return [read[i] for i in range(len(windows))]

    def write(self, buffer: Float[Array, "B T heads D"], x: Float[Array, "B H C D"]) -> Array:
        """Return the buffer with x written to the chunk's rows, summed over the heads that share a head of the buffer."""
        x = sum_heads(x.transpose(0, 2, 1, 3), buffer.shape[2]).astype(buffer.dtype)
        if self.in_chunk is not None:
            x = jnp.where(self.in_chunk[:, None, None], x, lax.dynamic_slice_in_dim(buffer, self.start, self.C, 1))
        return lax.dynamic_update_slice_in_dim(buffer, x, self.start, 1)

    def read_state(self, states: Float[Array, "N *rest"]) -> Float[Array, "B *rest"]:
        """Return the entry of this chunk's sequence, [1, *rest]; without packing, the entries of all B sequences."""
        return states if self.r.boundaries is None else lax.dynamic_slice_in_dim(states, self.sequence, self.batch, 0)

    @property
    def is_first(self) -> Bool[Array, "C 1"]:
        """Return whether each row is the chunk's first token in the scan."""
        behind = jnp.minimum(self.start + self.C, self.chunks.last[self.i])
        return (self.row == (behind - 1 if self.r.reverse else self.chunks.first[self.i]))[:, None]

    @property
    def scale(self) -> Float[Array, "B 1 1 1"]:
        """Return the scale of the chunk's sequence, or without packing of all sequences."""
        return self.read_state(self.r.scale)[:, None, None, None]

    def carry_or_start(self, carried: Carried, states: Float[Array, "N *rest"] | None) -> Carried:
        """Return `carried`, the value from the previous chunk. Where a packed sequence begins, return instead its entry of
        `states`, or 0 if states is None.

        The loop therefore never reads the array that it writes its states to. XLA would copy all N states at every chunk.
        """
        if self.r.boundaries is None:
            return carried
        first = 0 if states is None else self.read_state(states)
        if isinstance(carried, chunk_math.State):
            return chunk_math.State(jnp.where(self.begins, first, carried.high), jnp.where(self.begins, 0, carried.low))
        return jnp.where(self.begins, first, carried)

    def write_state(self, states, x):
        """Return `states` with x as the entry of this chunk's sequence; without packing, return x."""
        return x if self.r.boundaries is None else lax.dynamic_update_slice_in_dim(states, x, self.sequence, 0)

    def gates(self) -> tuple[Array | None, Array | None]:
        """Read the log decays of the state's rows and columns, [B, H, C, K or 1] and [B, H, C, V], each None without gates.

        Gates are raised to a floor at which the decay is exactly 0 in this dtype. A gate of -inf would give 0 * inf in the sums.
        """
        decay, floor = self.r.decay, log_of_zero(self.r.dtype)
        key, value = (None if x is None else self.read(x) for x in (decay.key, decay.value))
        if decay.head is not None:
            key = self.read(decay.head[..., None])
        if decay.constant is not None:
            key = self.read_state(decay.constant.astype(self.r.dtype))[:, :, None, None]
            key = jnp.broadcast_to(key, (*key.shape[:2], self.C, 1))
            key = key if self.in_chunk is None else jnp.where(self.in_chunk[:, None], key, 0)
        key, value = (None if x is None else jnp.maximum(x, floor) for x in (key, value))
        return key, value


def log_through(gates: tuple[Array | None, Array | None], transposed: bool = False) -> list[Array | None]:
    """Return the sums of the gates of a chunk: the log decays of the state's rows, [B, H, K, 1], and columns, [B, H, 1, V],
    each None without gates. gates: the result of `ChunkWindow.gates`.

    transposed: whether the sums are those of the transposed state, [B, H, 1, K] and [B, H, V, 1].
    """
    key, value = (None if x is None else chunk_math.total(x, 2)[:, :, None] for x in gates)
    if transposed:
        return [key, None if value is None else value.mT]
    return [None if key is None else key.mT, value]


def log_of_zero(dtype) -> float:
    """Return a logarithm whose exponential is exactly 0. Subnormal numbers end at e^-104 in float32, at e^-746 in float64."""
    return LOG_OF_ZERO if dtype == jnp.float32 else -800.0


def select_form(g: chunk_math.Geometry, r: Recurrence, gates, with_self: bool, evaluate, *operands):
    """Return evaluate(key factors, value factors, masks, *operands), in the fast form if it is exact for this chunk, else in
    the exact form. gates: the result of `ChunkWindow.gates`.

    The masks hold the pairs of each token with the earlier tokens and, `with_self`, the pair with itself. `evaluate` should
    read the chunk's rows inside, because lax.cond copies the operands of its branches. The key factors have `before` where r
    erases before the decay.
    """
    decay, before = r.decay, r.erasure is not None and r.erasure.before_decay
    pairs = (g.causal if with_self else g.earlier,)
    if gates == (None, None):
        return evaluate(chunk_math.Factors(), chunk_math.Factors(), pairs, *operands)
    if decay.key is None and decay.value is None:
        return evaluate(chunk_math.per_head(g, gates[0], before), chunk_math.Factors(), pairs, *operands)
    present = [x for x in gates if x is not None]
    in_range = sum(chunk_math.max_abs_cumsum(g, x) for x in present) <= chunk_math.fast_limit(present[0].dtype)

    def fast(*operands):
        key, value = gates
        return evaluate(chunk_math.fast(g, key, before), chunk_math.fast(g, value), pairs, *operands)

    def exact(*operands):
        masks = *(mask for _, mask in g.halvings), *([g.causal & ~g.earlier] if with_self else [])
        key, value = gates
        factors = chunk_math.exact(g, key, with_self, before), chunk_math.exact(g, value, with_self)
        return evaluate(*factors, masks, *operands)

    return lax.cond(in_range, fast, exact, *operands)


def start(r: Recurrence, size: int) -> tuple[Chunks, chunk_math.Geometry]:
    """Return the chunks of r and their constant matrices, for chunks of `size` tokens or, if T is less, of T."""
    size = size if is_symbol(r.q.shape[1]) else min(size, r.q.shape[1])
    return chunks_of(r, size), chunk_math.geometry(size, r.reverse)


def scan_chunks(r: Recurrence, chunks: Chunks, body, carry, backwards: bool):
    """Return the last carry of body(window, i, carry) -> carry over the chunks, in scan order or, if `backwards`, in the
    opposite order. window: the `ChunkWindow` of chunk i."""
    carry = jax.tree.map(lambda x: varying_like(x, r.q), carry)
    descending = r.reverse != backwards

    def step(n, carry):
        i = chunks.count - 1 - n if descending else n
        earlier = jnp.clip(i + 1 if descending else i - 1, 0, chunks.first.shape[0] - 1)
        begins = (n == 0) | (chunks.sequence[earlier] != chunks.sequence[i])
        return body(ChunkWindow(r, chunks, i, begins), i, carry)

    return lax.fori_loop(0, chunks.count, step, carry)


def initial_state_of(states: Float[Array, "N *rest"], B: int) -> chunk_math.State:
    """Return the state that a scan carries before its first chunk: `states`, or zeros where N is not B: `carry_or_start` then
    reads the entry of each packed sequence at its first chunk. B: the batch size."""
    same = states.shape[0] == B
    return chunk_math.State.of(states if same else jnp.zeros((B, *states.shape[1:]), states.dtype))


def scan_outputs(
    r: Recurrence, size: int, save_states: bool, evaluate: Callable[..., tuple[Array, Array]]
) -> tuple[Outputs, Array | None]:
    """Compute the outputs and final states by a scan over chunks of `size` tokens, and the states before the chunks, [B, chunks,
    H, K, V], if `save_states`.

    evaluate: (r padded to a chunk, window, geometry, key factors, value factors, masks, state before the chunk [B, H, K, V]) ->
    (the terms of the chunk's tokens in the state behind it, [B, H, K, V]; the chunk's outputs, [B, H, C, V]).
    """
    T, (chunks, g) = r.q.shape[1], start(r, size)
    r = pad_to_chunk(r, chunks.size)
    first = r.start_state

    def body(w: ChunkWindow, i, carry):
        state, states, output, residuals = carry

        def evaluate_form(key, value, masks, S):
            return evaluate(r, w, g, key, value, masks, S)

        state, gates = w.carry_or_start(state, first), w.gates()
        added, o = select_form(g, r, gates, True, evaluate_form, state.high)
        residuals = residuals if residuals is None else lax.dynamic_update_index_in_dim(residuals, state.high, i, 1)
        state = state.advance(chunk_math.state_decay(*log_through(gates)), added)
        return state, w.write_state(states, state.high), w.write(output, o), residuals

    output = jnp.zeros((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)
    B, (H, K, V) = r.q.shape[0], r.state_shape[1:]
    residuals = jnp.zeros((B, chunks.first.shape[0], H, K, V), r.dtype) if save_states else None
    carry = initial_state_of(first, B), first, output, residuals
    _, final, output, residuals = scan_chunks(r, chunks, body, carry, backwards=False)
    return Outputs(trim_rows(output, T), final), residuals
