"""Compute the selective scan of Mamba-1 in chunks of tokens, all in parallel, and its gradient.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = sum over n of C_t[n] h_t[n]        for every channel d

1. Every chunk is read from a state of zeros. Its last state S and its decay exp(A sum dt) are one step of a scan over chunks,
   which gives the state before each chunk.
2. Every chunk is read from that state, which gives y.

The gradient does the same with the cotangents, from the last chunk to the first. It then reads chunks again, a few at a time, and
keeps the states of their tokens. No array [B, T, D, N] exists. The states before chunks are saved.

States are [N, D] here, so that the channels lie next to each other. A token of another sequence or segment never multiplies what
came before: states are selected, so that NaN stays in its document.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import bucket, is_symbol, varying_like
from glax._src.kernels.common.chunks import Chunks, chunks_of_rows
from glax._src.kernels.common.selective import SelectiveOperands

NOTHING = -1.0  # no decay is below 0


class Tokens(NamedTuple):
    """Hold the arrays of tokens: x and dt [..., D], B and C [..., N], in any float dtype."""

    x: Float[Array, "*rows D"]
    dt: Float[Array, "*rows D"]
    B: Float[Array, "*rows N"]
    C: Float[Array, "*rows N"]


def chunk_size(T: int) -> int:
    """Return the tokens of a chunk: the power of two from 16 to 64 that makes the loops over chunks and over tokens about
    equally long, but no more than T rounded up to a power of two. For a symbol T return 32."""
    return 32 if is_symbol(T) else min(64, max(16, 1 << round((T / 2) ** 0.5).bit_length() - 1), bucket(T))


@dataclasses.dataclass(frozen=True)
class Cut:
    """Arrange the rows of a batch in chunks. M is the number of chunks of a row of the batch, c the tokens of a chunk, and G
    the batch.

    T: the length of the time axis. cuts: the boundaries of packed sequences, with G = 1, or None.
    """

    T: int
    chunks: Chunks
    cuts: Int[Array, "cuts"] | None

    @classmethod
    def of(cls, T: int, cuts: Int[Array, "cuts"] | None) -> "Cut":
        """Return the arrangement of T tokens, with chunks of `chunk_size` tokens. cuts: the boundaries of packed sequences, or
        None."""
        return cls(T, chunks_of_rows(T, cuts, chunk_size(T)), cuts)

    @property
    def rows(self) -> Int[Array, "M c"]:
        """Return the indices in the time axis of each chunk's tokens. Those from chunks.last on are not of the chunk."""
        return self.chunks.first[:, None] + jnp.arange(self.chunks.size)

    def chunked(self, x: Array) -> Array:
        """Return x [G, T, ...] cut into chunks, [M, G, c, ...], with zeros where a chunk has fewer than c tokens."""
        if self.cuts is None:
            M, c = self.chunks.first.shape[0], self.chunks.size
            x = jnp.pad(x, ((0, 0), (0, M * c - self.T), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(x.shape[0], M, c, *x.shape[2:]), 1, 0)
        is_own = jnp.expand_dims(self.rows < self.chunks.last[:, None], range(2, x.ndim))
        return jnp.where(is_own, x[0, jnp.clip(self.rows, 0, self.T - 1)], 0)[:, None]

    def by_row(self, x: Array) -> Array:
        """Return x [M, G, c, ...] in the order of tokens, [G, T, ...]: the inverse of `chunked`. Tokens of no chunk are
        undefined."""
        if self.cuts is None:
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, : self.T]
        t = jnp.arange(self.T)
        own = jnp.clip(jnp.searchsorted(self.cuts, t, side="right") - 1, 0, self.cuts.shape[0] - 2)
        place = t - self.cuts[own]
        chunk = jnp.searchsorted(self.chunks.sequence, own) + place // self.chunks.size
        return x[jnp.clip(chunk, 0, x.shape[0] - 1), 0, place % self.chunks.size][None]

    def edges(self, scan_end: bool, reverse: bool) -> Bool[Array, "M"]:
        """Return for each chunk whether the scan of its sequence ends there if `scan_end`, else begins there. reverse: whether
        scans go from the last token to the first."""
        differs, edge = self.chunks.sequence[1:] != self.chunks.sequence[:-1], jnp.ones(1, bool)
        return jnp.concatenate([differs, edge] if scan_end != reverse else [edge, differs])

    def last_chunks(self, scan_end: bool, reverse: bool) -> Int[Array, "sequences"]:
        """Return the index of the chunk in which the scan of each sequence ends if `scan_end`, else begins. reverse: as in
        `edges`."""
        n = jnp.arange(1 if self.cuts is None else self.cuts.shape[0] - 1)
        if scan_end != reverse:
            return jnp.searchsorted(self.chunks.sequence, n, side="right") - 1
        return jnp.minimum(jnp.searchsorted(self.chunks.sequence, n), self.chunks.sequence.shape[0] - 1)


# ---- one chunk -----------------------------------------------------------------------------------------------------------


def selected(resets: Bool[Array, ""] | None, S: Array) -> Array:
    """Return the state S, or zeros where the token resets. resets: None if no token does."""
    return S if resets is None else jnp.where(resets, 0, S)


def decay_of(A: Float[Array, "N D"], dt: Float[Array, "D"]) -> Float[Array, "N D"]:
    """Return the decay of the state at a token, exp(dt A)."""
    return jnp.exp(A * dt.astype(A.dtype)[None])


def one_token(A: Float[Array, "N D"], S: Float[Array, "N D"], t: Tokens, resets: Bool[Array, ""] | None = None):
    """Return (the state behind a token, y [D]), in the dtype of A. S: the state before. t: the token's x and dt [D], B and C
    [N]."""
    x, dt, B, C = (array.astype(A.dtype) for array in t)
    S = decay_of(A, dt) * selected(resets, S) + B[:, None] * (dt * x)[None]
    return S, (C[:, None] * S).sum(0)


def read_chunk(
    reverse: bool, resets: Bool[Array, "c"] | None, A: Float[Array, "N D"], S: Float[Array, "N D"], tokens: Tokens
) -> tuple[Float[Array, "N D"], Float[Array, "c D"]]:
    """Return (the state behind a chunk, y of its tokens). S: the state before the chunk. resets: the tokens that start from
    zeros, or None. For its gradient the states before tokens are saved, but no decays."""

    @jax.checkpoint
    def step(S, t):
        return one_token(A, S, *t)

    return lax.scan(step, S, (tokens, resets), reverse=reverse)


def read_adjoint(
    reverse: bool, resets: Bool[Array, "c"] | None, A: Float[Array, "N D"], d_y: Float[Array, "c D"], tokens: Tokens
) -> Float[Array, "N D"]:
    """Return the cotangent of the state before a chunk, from the cotangents d_y of the chunk's own outputs alone."""

    def step(d_S, t):
        tokens, resets, d_y = t
        d_S = d_S + tokens.C.astype(A.dtype)[:, None] * d_y
        return selected(resets, decay_of(A, tokens.dt) * d_S), None

    zeros = varying_like(jnp.zeros(A.shape, A.dtype), d_y)
    return lax.scan(step, zeros, (tokens, resets, d_y), reverse=not reverse)[0]


# ---- all chunks ----------------------------------------------------------------------------------------------------------


def of_every_chunk(f: Callable, reverse: bool, resets: Array | None, A: Array, *operands):
    """Return f(reverse, resets, A, *operands) of every chunk, in parallel, [M, G, ...]. resets and operands: arrays [M, G,
    ...], or trees of such. f takes those of one chunk."""
    axis = None if resets is None else 0
    run = functools.partial(f, reverse)
    for _ in range(2):
        run = jax.vmap(run, in_axes=(axis, None, *[0] * len(operands)))
    return run(resets, A, *operands)


def passed(decays: Array, own: Array, entry: Array, enters: Array | None, reverse: bool) -> tuple[Array, Array]:
    """Scan over chunks, and return the states before and behind each chunk, [M, G, N, D] both:   S_out = decay S_in + own.

    decays, own: [M, G, N, D]. A decay of NOTHING lets no state pass. enters: [M], the chunks before which the state is that
    chunk's `entry`, [M, G, N, D]; for None, entry is the state before the first chunk, [G, N, D].
    """

    def step(S, chunk):
        decay, own, entry, enters = chunk
        S = S if enters is None else jnp.where(enters, entry, S)
        after = jnp.where(decay == NOTHING, 0, decay * S) + own
        return after, (S, after)

    start = entry if enters is None else jnp.zeros_like(own[0])
    chunks = (decays, own, None if enters is None else entry, enters)
    return lax.scan(step, varying_like(start, own), chunks, reverse=reverse)[1]


def entering(
    cut: Cut, states: Float[Array, "sequences N D"], scan_end: bool, reverse: bool
) -> tuple[Array, Array | None]:
    """Return (entry, enters), the operands of `passed`: the states of sequences, at the chunks where their scans end if
    `scan_end`, else begin."""
    if cut.cuts is None:
        return states, None
    return states[cut.chunks.sequence][:, None], cut.edges(scan_end, reverse)


def leaving(cut: Cut, found: Array, given: Float[Array, "sequences N D"], scan_end: bool, reverse: bool) -> Array:
    """Return `found` [M, G, N, D] at the chunk where the scan of each sequence ends if `scan_end`, else begins: [sequences, N,
    D]. An empty sequence has its entry of `given`."""
    if cut.cuts is None:
        return found[-1 if scan_end != reverse else 0]
    is_empty = (jnp.diff(cut.cuts) == 0)[:, None, None]
    return jnp.where(is_empty, given, found[cut.last_chunks(scan_end, reverse), 0])


def chunked_operands(p: SelectiveOperands) -> tuple[Cut, Tokens, Array | None]:
    """Return (the arrangement in chunks, the arrays of tokens [M, G, c, ...], the resets [M, G, c] or None)."""
    cut = Cut.of(p.x.shape[1], p.packing.cuts)
    resets = None if p.packing.resets is None else cut.chunked(p.packing.resets)
    return cut, Tokens(*map(cut.chunked, (p.x, p.dt, p.B, p.C))), resets


def chunk_decays(A: Array, tokens: Tokens, resets: Array | None) -> Float[Array, "M G N D"]:
    """Return exp(A sum dt) of every chunk, [M, G, N, D]; NOTHING for a chunk that resets the state."""
    decays = jnp.exp(A * tokens.dt.astype(A.dtype).sum(2)[:, :, None])
    return decays if resets is None else jnp.where(resets.any(2)[..., None, None], NOTHING, decays)


def forward(p: SelectiveOperands, *, reverse: bool) -> tuple[Array, Array, Array]:
    """Return y [G, T, D] and the final states [sequences, D, N], in the dtype of A, and the states before chunks, [M, G, N, D].
    No size may be 0. y of rows of no sequence is undefined."""
    cut, tokens, resets = chunked_operands(p)
    A, states = p.A.T, p.states.mT
    entry, enters = entering(cut, states, False, reverse)
    M, G = tokens.x.shape[:2]
    starts = entry[None]
    if enters is not None or M != 1:
        zeros = varying_like(jnp.zeros((M, G, *A.shape), A.dtype), tokens.x)
        own, _ = of_every_chunk(read_chunk, reverse, resets, A, zeros, tokens)
        starts, _ = passed(chunk_decays(A, tokens, resets), own, entry, enters, reverse)
    ends, y = of_every_chunk(read_chunk, reverse, resets, A, starts, tokens)
    return cut.by_row(y), leaving(cut, ends, states, True, reverse).mT, starts


def gradient(
    p: SelectiveOperands,
    starts: Float[Array, "M G N D"],
    d_y: Float[Array, "G T D"],
    d_final: Float[Array, "sequences D N"],
    *,
    reverse: bool,
) -> tuple[Array, ...]:
    """Return the gradients of x, dt, A, B, C and the states, in their dtypes. starts: the states before chunks that `forward`
    returned. Gradients of rows of no sequence are undefined."""
    cut, tokens, resets = chunked_operands(p)
    A, d_final, d_y = p.A.T, d_final.mT, cut.chunked(d_y)
    entry, enters = entering(cut, d_final, True, reverse)
    own = of_every_chunk(read_adjoint, reverse, resets, A, d_y, tokens)
    behind, before = passed(chunk_decays(A, tokens, resets), own, entry, enters, not reverse)

    def gradient_of_chunk(chunk):
        resets, start, tokens, d_end, d_y = chunk
        axes = (None if resets is None else 0, None, 0, 0)

        def read(A, S, tokens):
            return jax.vmap(functools.partial(read_chunk, reverse), axes)(resets, A, S, tokens)

        d_A, _, d_tokens = jax.vjp(read, A, start, tokens)[1]((d_end, d_y))
        return d_A, d_tokens

    # As many chunks together as hold about twice the elements of x in the states of their tokens.
    M = starts.shape[0]
    several = None if is_symbol(M) else -(-2 * M // A.shape[0])
    d_A, d_tokens = lax.map(gradient_of_chunk, (resets, starts, tokens, behind, d_y), batch_size=several)
    d_x, d_dt, d_B, d_C = map(cut.by_row, d_tokens)
    d_states = leaving(cut, before, d_final, False, reverse).mT
    return d_x, d_dt, d_A.sum(0).T, d_B, d_C, d_states
