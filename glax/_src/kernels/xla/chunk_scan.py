"""Chunk by chunk, in matrix products: forward, and its gradient in one walk forwards and one backwards. See `at_once`."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import (
    Outputs,
    Recurrence,
    Residuals,
    fold_heads,
    gradient_like,
    is_symbol,
    spread_heads,
    varying_like,
)
from glax._src.core.registry import Backend, Config, Platform, check_field, kernel_registry
from glax._src.kernels.common.chunks import Chunks, chunks_of, first_rows, more_rows, with_room
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.xla import chunk_math as chunk
from glax._src.kernels.xla import chunk_parallel
from glax._src.kernels.xla.recurrent import recurrent, stays_in_cache


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(Config):
    """chunk: tokens a chunk, from 1 to 4096. Work grows with it, its pairs' memory with the square; the number of steps and of
    stored states shrinks.
    """

    chunk: int = 64

    def __post_init__(self):
        check_field("chunk", self.chunk, 1, 4096)

    @classmethod
    def heuristic(cls, r: Recurrence) -> "ChunkedConfig":
        return cls(chunk_parallel.CHUNK) if chunk_parallel.suits(r) else cls.of_walk(r)

    @classmethod
    def of_walk(cls, r: Recurrence) -> "ChunkedConfig":
        """CPUs: 32, and 64 where states are so large that reading them costs more than longer pairs; 64 elsewhere.

        Measured, 2 cores, log-sigmoid `gk`: forward and gradient 10 + 30 ms against 11 + 36 with 64 at B1 T2048 H4 K=V=64, but
        245 + 555 ms against 193 + 513 at B2 T4096 H8 K=V=128. With gates on both sides, twice 64 tokens' decay would often
        pass the fast form's limit.
        """
        large = r.q.shape[3] * r.v.shape[3] >= 2**14 and r.decay.form != "key+value"
        return cls(chunk=32 if Backend.here() is Backend.CPU and not large else 64)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[ChunkedConfig]":
        """Powers of two, as far as T fills one chunk of half the size."""
        return [cls(chunk) for chunk in (16, 32, 64, 128) if chunk == 16 or chunk < 2 * r.q.shape[1]]


class Windows:
    """Reads and writes the rows of one chunk. All C rows of a window are in bounds; those outside the chunk read as 0."""

    def __init__(self, r: Recurrence, chunks: Chunks, i, begins):
        C, T = chunks.size, r.q.shape[1]
        self.r, self.C = r, C
        self.start = jnp.minimum(chunks.first[i], T - C)
        row = self.start + jnp.arange(C, dtype=self.start.dtype)
        whole = r.boundaries is None and not is_symbol(T) and T % C == 0
        # [C]: whether a row is of this chunk; None if all rows of all chunks are
        self.own = None if whole else (row >= chunks.first[i]) & (row < chunks.last[i])
        self.sequence = chunks.sequence[i]
        self.begins = begins  # whether the scan comes to this chunk's sequence with it
        self.batch = r.q.shape[0]

    def rows(self, x: Float[Array, "B T H D"]) -> Float[Array, "B C H D"]:
        window = lax.dynamic_slice_in_dim(x, self.start, self.C, 1).astype(self.r.dtype)
        return window if self.own is None else jnp.where(self.own[:, None, None], window, 0)

    def read(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B H C D"]:
        x = spread_heads(self.rows(x), self.r.num_heads).transpose(0, 2, 1, 3)
        # Else XLA reads the rows again for every use, transposed as each product would have them.
        return lax.optimization_barrier(x)

    def read_all(self, *arrays: Float[Array, "B T _ _"]) -> list[Float[Array, "B H C _"]]:
        """Each array's rows. On CPUs those of one width are read as one array: XLA then reads them once, not in every
        kernel that uses them, and has so few kernels to begin with that it does not wake another core for tiny ones."""
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
        x = fold_heads(x.transpose(0, 2, 1, 3), buffer.shape[2]).astype(buffer.dtype)
        if self.own is not None:
            x = jnp.where(self.own[:, None, None], x, lax.dynamic_slice_in_dim(buffer, self.start, self.C, 1))
        return lax.dynamic_update_slice_in_dim(buffer, x, self.start, 1)

    def state(self, states: Float[Array, "N *rest"]) -> Float[Array, "B *rest"]:
        """The rows of this chunk's sequence: all of them where B sequences are walked side by side."""
        return states if self.r.boundaries is None else lax.dynamic_slice_in_dim(states, self.sequence, self.batch, 0)

    @property
    def scale(self) -> Float[Array, "B 1 1 1"]:
        return self.state(self.r.scale)[:, None, None, None]

    def entered(self, carried, states: Float[Array, "N *rest"] | None):
        """`carried` from the chunk before, or, where a packed sequence begins, its row of `states`, or 0.

        So the loop never reads the array that it writes its states to. XLA would copy that at every chunk, all N states.
        """
        if self.r.boundaries is None:
            return carried
        first = 0 if states is None else self.state(states)
        if isinstance(carried, chunk.State):
            return chunk.State(jnp.where(self.begins, first, carried.high), jnp.where(self.begins, 0, carried.low))
        return jnp.where(self.begins, first, carried)

    def put_state(self, states, x):
        return x if self.r.boundaries is None else lax.dynamic_update_slice_in_dim(states, x, self.sequence, 0)

    def gates(self) -> tuple[Array | None, Array | None]:
        """The log decays of the state's rows and columns, each [B, H, C, width or 1] or None.

        At or below the floor a decay is exactly 0 in this dtype; -inf itself would make 0 * inf in the sums.
        """
        decay, floor = self.r.decay, log_of_zero(self.r.dtype)
        key, value = (None if x is None else self.read(x) for x in (decay.key, decay.value))
        if decay.head is not None:
            key = self.read(decay.head[..., None])
        if decay.constant is not None:
            key = self.state(decay.constant.astype(self.r.dtype))[:, :, None, None]
            key = jnp.broadcast_to(key, (*key.shape[:2], self.C, 1))
            key = key if self.own is None else jnp.where(self.own[:, None], key, 0)
        return tuple(None if x is None else jnp.maximum(x, floor) for x in (key, value))


def log_through(gates: tuple[Array | None, Array | None], transposed: bool = False) -> list[Array | None]:
    """The log decays of a chunk's state, of rows [B, H, K, 1] and columns [B, H, 1, V]; or of its transpose."""
    key, value = (None if x is None else chunk.total(x, 2)[:, :, None] for x in gates)
    if transposed:
        return [key, None if value is None else value.mT]
    return [None if key is None else key.mT, value]


def log_of_zero(dtype) -> float:
    """A logarithm whose exponential is exactly 0: denormals end at e^-104 in float32, at e^-746 in float64."""
    return LOG_OF_ZERO if dtype == jnp.float32 else -800.0


def either_way(g: chunk.Geometry, decay: Decay, gates, own: bool, use, *operands):
    """use(key factors, value factors, masks, *operands), in the fast form where that is exact for this chunk.

    The masks hold the pairs of each token with the earlier ones and, if `own`, with itself. `use` should read the rows
    of the chunk itself: what is passed into a branch of lax.cond is copied.
    """
    pairs = (g.causal if own else g.earlier,)
    if gates == (None, None):
        return use(chunk.Factors(), chunk.Factors(), pairs, *operands)
    if decay.key is None and decay.value is None:
        return use(chunk.per_head(g, gates[0]), chunk.Factors(), pairs, *operands)
    present = [x for x in gates if x is not None]
    within = sum(chunk.reach(g, x) for x in present) <= chunk.fast_limit(present[0].dtype)

    def fast(*operands):
        return use(*(chunk.fast(g, side) for side in gates), pairs, *operands)

    def exact(*operands):
        masks = *(mask for _, mask in g.halvings), *([g.causal & ~g.earlier] if own else [])
        return use(*(chunk.exact(g, side, own) for side in gates), masks, *operands)

    return lax.cond(within, fast, exact, *operands)


def start(r: Recurrence, config: ChunkedConfig) -> tuple[Chunks, chunk.Geometry]:
    size = config.chunk if is_symbol(r.q.shape[1]) else min(config.chunk, r.q.shape[1])
    return chunks_of(r, size), chunk.geometry(size, r.reverse)


def walk(r: Recurrence, chunks: Chunks, body, carry, backwards: bool):
    """Folds body(windows, i, carry) over the chunks, in the order of the recurrence or against it."""
    carry = jax.tree.map(lambda x: varying_like(x, r.q), carry)
    against_time = r.reverse != backwards

    def step(n, carry):
        i = chunks.count - 1 - n if against_time else n
        earlier = jnp.clip(i + 1 if against_time else i - 1, 0, chunks.first.shape[0] - 1)
        begins = (n == 0) | (chunks.sequence[earlier] != chunks.sequence[i])
        return body(Windows(r, chunks, i, begins), i, carry)

    return lax.fori_loop(0, chunks.count, step, carry)


def solve(r: Recurrence, config: ChunkedConfig, keep: bool) -> tuple[Outputs, Array | None, Array]:
    """The outputs; if `keep`, the states before the chunks, [B, chunks, H, K, V] (None of groups of heads); if they are blank.

    Many chunks at once where that suits the shapes and is exact for the gates of all of them.
    """
    if not chunk_parallel.suits(r, config.chunk):
        return *by_walk(r, config, keep), jnp.zeros((), bool)

    saves_residuals = keep and not chunk_parallel.by_heads(r, config.chunk)

    def together():
        outputs, states = chunk_parallel.solve(r, config.chunk)
        return outputs, states if saves_residuals else None

    def otherwise():
        B, (H, K, V) = r.q.shape[0], r.state_shape[1:]
        outputs = recurrent(r, config=None) if stays_in_cache(r) else by_walk(r, shorter(r, config), keep=False)[0]
        blank = jnp.zeros((B, r.q.shape[1] // config.chunk, H, K, V), r.dtype)
        return outputs, varying_like(blank, r.q) if saves_residuals else None

    if r.decay.form == "none":
        return *together(), jnp.zeros((), bool)
    within = chunk_parallel.within(r, config.chunk)
    return *chunk_parallel.where_exact(within, r, config.chunk, together, otherwise, trains=keep), ~within


def shorter(r: Recurrence, config: ChunkedConfig) -> ChunkedConfig:
    """For a walk in place of chunks of that size at once."""
    return ChunkedConfig(min(config.chunk, ChunkedConfig.of_walk(r).chunk))


def by_walk(r: Recurrence, config: ChunkedConfig, keep: bool) -> tuple[Outputs, Array | None]:
    """The same, chunk by chunk, in four products of matrices each."""
    T, (chunks, g) = r.q.shape[1], start(r, config)
    r = with_room(r, chunks.size)
    first = r.start_state

    def body(w: Windows, i, carry):
        state, states, output, residuals = carry

        def use(key, value, masks, S):
            q, k, v = w.read_all(r.q, r.k, r.v)
            q *= w.scale
            return chunk.added(k, v, key, value), chunk.forward(S, q, k, v, key, value, masks)

        state, gates = w.entered(state, first), w.gates()
        added, o = either_way(g, r.decay, gates, True, use, state.high)
        residuals = residuals if residuals is None else lax.dynamic_update_index_in_dim(residuals, state.high, i, 1)
        state = state.behind(chunk.state_decay(*log_through(gates)), added)
        return [state, w.put_state(states, state.high), w.write(output, o), residuals]

    output = jnp.zeros((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)
    B, (H, K, V) = r.q.shape[0], r.state_shape[1:]
    residuals = jnp.zeros((B, chunks.first.shape[0], H, K, V), r.dtype) if keep else None
    _, final, output, residuals = walk(r, chunks, body, [state_of(first, B), first, output, residuals], backwards=False)
    return Outputs(first_rows(output, T), final), residuals


def state_of(states: Float[Array, "N *rest"], B: int) -> chunk.State:
    """The state that a scan begins with; a packed one reads it at its first chunk, if it has any."""
    same = states.shape[0] == B
    return chunk.State.of(states if same else jnp.zeros((B, *states.shape[1:]), states.dtype))


def is_told(r: Recurrence, size: int) -> bool:
    """Whether the number of chunks tells their size: the forward's config need not be its gradient's."""
    return size & (size - 1) == 0 or (r.boundaries is None and size == r.q.shape[1])


def chunked_with_residuals(r: Recurrence, *, config: ChunkedConfig) -> tuple[Outputs, Residuals]:
    """The same, with the state before each chunk, or a flag that there is none.

    Of groups of heads, see `at_once`, and of chunks whose size their number does not tell, only a state that is right for a
    gradient of as many chunks: unpacked, one of all tokens; packed there is none of a single chunk.
    """
    told = is_told(r, min(config.chunk, r.q.shape[1]))
    outputs, states, blank = solve(r, config, keep=told)
    if states is None:
        start = r.start_state if r.boundaries is None else jnp.zeros((1, *r.state_shape[1:]), r.dtype)
        states = start[:, None]
    return outputs, Residuals(states, jnp.broadcast_to(blank, states.shape[:3]).astype(jnp.int32))


@kernel_registry.register(
    "chunked",
    Platform.XLA,
    Backend.ANY,
    config=ChunkedConfig,
    priority=lambda r: 1,
    forward_with_residuals=chunked_with_residuals,
    saves_residuals=lambda r: Backend.here() is Backend.CPU and not r.is_symbolic,
)
def chunked(r: Recurrence, *, config: ChunkedConfig) -> Outputs:
    """The recurrence in chunks; one state lives at a time, or those of one block of chunks."""
    return solve(r, config, keep=False)[0]


class Stored:
    """Keeps the state before each chunk, transposed, [B, H, V, K], in `place`, a list of arrays, until it is read.

    The rows of a chunk in two K-wide arrays hold a state of V <= 2 C columns. Where the gradients of q and k have such
    rows they are the place, for a chunk's are written after its state is read: then a gradient needs no memory but its
    results', which saves a tenth of its time where the system hands out fresh pages. Only where the state goes through
    a lax.cond does XLA know that order, and else copies the arrays.
    """

    def __init__(self, r: Recurrence, chunks: Chunks):
        B, T = r.q.shape[:2]
        H, K, V = r.state_shape[1:]
        self.shape, self.C, self.V = (chunks.first.shape[0], B, H, V, K), chunks.size, V
        whole = r.boundaries is None and not is_symbol(T) and T % self.C == 0 and V <= 2 * self.C
        whole &= r.decay.key is not None or r.decay.value is not None
        self.in_rows = whole and all(x.dtype == r.dtype and x.shape[2] == H for x in (r.q, r.k))
        self.own = [] if self.in_rows else [jnp.zeros(self.shape, r.dtype)]

    def put(self, w: Windows, i, place: list[Array], S: Float[Array, "B H V K"]) -> list[Array]:
        if not self.in_rows:
            return [lax.dynamic_update_index_in_dim(place[0], S, i, 0)]
        S = jnp.pad(S, ((0, 0), (0, 0), (0, 2 * self.C - self.V), (0, 0)))
        return [w.write(rows, part) for rows, part in zip(place, jnp.split(S, 2, axis=2), strict=True)]

    def get(self, w: Windows, i, place: list[Array]) -> Float[Array, "B H V K"]:
        if not self.in_rows:
            return lax.dynamic_index_in_dim(place[0], i, keepdims=False)
        return jnp.concatenate([w.read(rows) for rows in place], axis=2)[:, :, : self.V]


def states_before(r: Recurrence, chunks: Chunks, g: chunk.Geometry, d_qk: list[Array]):
    """A walk forwards that stores the state before each chunk: how to read it, and d_qk, which it may have filled."""
    stored, first = Stored(r, chunks), r.start_state.mT

    def remember(w: Windows, i, carry):
        state, place = carry
        state, (key, value) = w.entered(state, first), w.gates()
        k, v = w.read_all(r.k, r.v)
        added = chunk.added(v, k, chunk.edges(g, value), chunk.edges(g, key))
        decay = chunk.state_decay(*log_through((key, value), transposed=True))
        return [state.behind(decay, added), stored.put(w, i, place, state.high)]

    carry = [state_of(first, r.q.shape[0]), d_qk if stored.in_rows else stored.own]
    _, place = walk(r, chunks, remember, carry, backwards=False)
    if stored.in_rows:
        return stored.get, place
    return lambda w, i, d_qk: stored.get(w, i, place), d_qk


def blanks(r: Recurrence):
    """Functions of x that return an array like it, for results of which every row will be written (packed, 0: padding is not).

    Each is filled with another number, for of arrays of one number XLA makes one, and copies it on one core.
    """
    for number in itertools.count(1):
        yield functools.partial(jnp.full_like, fill_value=number if r.boundaries is None else 0)


@kernel_registry.register("chunked.vjp", Platform.XLA, Backend.ANY, config=ChunkedConfig)
def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: ChunkedConfig
) -> Recurrence:
    """The gradient in every input, from the states that the forward kept, if they are those of these chunks."""
    chunks, g = start(r, config)
    known = residuals is not None and is_told(r, g.size) and residuals.states.shape[1] == chunks.first.shape[0]
    states = residuals.states if known else None

    if not chunk_parallel.suits(r, config.chunk):
        return vjp_by_walk(r, config, d_output, d_final, states)

    def together():
        return chunk_parallel.vjp(r, config.chunk, d_output, d_final, states)

    def otherwise():
        return vjp_by_walk(r, shorter(r, config), d_output, d_final, None)

    if r.decay.form == "none":
        return together()
    exact = (residuals.far == 0).all() if known else chunk_parallel.within(r, config.chunk)
    return chunk_parallel.where_exact(exact, r, config.chunk, together, otherwise, trains=True)


def vjp_by_walk(r: Recurrence, config: ChunkedConfig, d_output, d_final, states: Array | None) -> Recurrence:
    """The same in a walk backwards, from those states, or from those that another walk forms again."""
    given, (chunks, g) = r, start(r, config)
    r, d_output = with_room(r, chunks.size), more_rows(d_output, chunks.size)
    blank = blanks(r)
    d_qk = [next(blank)(r.q), next(blank)(r.k)]
    if states is not None:
        state_before = lambda w, i, d_qk: lax.dynamic_index_in_dim(states, i, 1, keepdims=False).mT  # noqa: E731
    else:
        state_before, d_qk = states_before(r, chunks, g, d_qk)

    def body(w: Windows, i, carry):
        d_state, each_scale, d_states, d_scale, d_qk, d_v, d_decay = carry
        d_state, gates = w.entered(d_state, d_last), w.gates()

        def use(key, value, masks, S, dS):
            unscaled, k, v, do = w.read_all(r.q, r.k, r.v, d_output)
            q = unscaled * w.scale
            d_added, dq, dk, dv = chunk.backward(S, dS, q, k, v, do, key, value, masks)
            row_terms = q * dq[1] - k * dk[1]
            o = None if r.decay.value is None else chunk.forward(S.mT, q, k, v, key, value, masks)
            column_terms = None if o is None else o * do - v * dv[1]
            more_scale = chunk.total(unscaled * sum(dq), 3).sum((1, 2))
            return d_added, more_scale, sum(dq) * w.scale, sum(dk), sum(dv), (row_terms, column_terms)

        S = state_before(w, i, d_qk)
        d_added, more_scale, dq, dk, dv, terms = either_way(g, r.decay, gates, False, use, S, d_state.high)
        d_state = d_state.behind(chunk.state_decay(*log_through(gates, transposed=True)), d_added)
        edges = (chunk.total(S * d_state.high, axis) for axis in (2, 3))
        each_scale = w.entered(each_scale, None) + more_scale
        return [
            d_state,
            each_scale,
            w.put_state(d_states, d_state.high),
            w.put_state(d_scale, each_scale),
            [w.write(rows, x) for rows, x in zip(d_qk, (dq, dk), strict=True)],
            w.write(d_v, dv),
            decay_gradient(w, g, d_decay, *zip(terms, edges, strict=True)),
        ]

    d_v, d_decay = next(blank)(r.v), jax.tree.map(lambda x: next(blank)(x), r.decay)
    if r.decay.constant is not None:
        d_decay = Decay(constant=jnp.zeros(r.decay.constant.shape, r.dtype))
    B, d_last = r.q.shape[0], d_final.astype(r.dtype).mT
    sums = [d_last, jnp.zeros_like(r.scale)]
    carry = [state_of(d_last, B), jnp.zeros(B, r.dtype), *sums, d_qk, d_v, d_decay]
    _, _, d_initial, d_scale, (dq, dk), dv, d_decay = walk(r, chunks, body, carry, backwards=True)
    d_initial = None if r.initial_state is None else d_initial.mT
    dq, dk, dv, d_head, d_key, d_value = (
        first_rows(x, given.q.shape[1]) for x in (dq, dk, dv, d_decay.head, d_decay.key, d_decay.value)
    )
    d_decay = Decay(d_decay.constant, d_head, d_key, d_value)
    d = r.replace(q=dq, k=dk, v=dv, decay=d_decay, initial_state=d_initial, boundaries=None, scale=d_scale)
    return gradient_like(given, d)


def decay_gradient(w: Windows, g: chunk.Geometry, d_decay: Decay, row_side, column_side) -> Decay:
    """That of the log decays, written to d_decay. Each side is (terms [B, H, C, D], edge [B, H, D]), see `chunk.log_gradient`."""
    per_channel, per_head = (functools.partial(chunk.log_gradient, g, per_head=x) for x in (False, True))
    if d_decay.constant is not None:
        # [B, H, C]: rows outside the chunk hold no token
        each = per_head(*row_side)[..., 0]
        each = each if w.own is None else jnp.where(w.own, each, 0)
        return Decay(constant=w.put_state(d_decay.constant, w.state(d_decay.constant) + each.sum(2)))
    if d_decay.head is not None:
        return Decay(head=w.write(d_decay.head[..., None], per_head(*row_side))[..., 0])
    sides = ((d_decay.key, row_side), (d_decay.value, column_side))
    return Decay(None, None, *(None if d is None else w.write(d, per_channel(*side)) for d, side in sides))
