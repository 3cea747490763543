"""Scan over chunks: one chunk after the other, in batched matrix products. This is the form for all shapes and gates.

Each step reads the rows of one chunk (`chunk_window`), computes its outputs from the state S [B, H, K, V] before it
(`chunk_math.forward`), and carries the state after it to the next chunk. The gradient is in `chunk_scan_vjp`.

The kernels `chunked` and `chunked.vjp` are registered here. They take the form of `chunk_parallel` where it supports the shapes
and is exact for the gates of the call, and this scan otherwise.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import ROW_FORMS
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, varying_like
from glax._src.core.registry import Backend, Config, Platform, check_field, kernel_registry
from glax._src.kernels.xla import chunk_math, chunk_parallel, delta_chunk
from glax._src.kernels.xla.chunk_scan_vjp import vjp_by_scan
from glax._src.kernels.xla.chunk_window import (
    ChunkWindow,
    scan_outputs,
    start,
)
from glax._src.kernels.xla.isolated import isolate
from glax._src.kernels.xla.recurrent import recurrent, stays_in_cache


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(Config):
    """Configure XLA's kernels over chunks. chunk: the number of tokens per chunk, from 1 to 4096.

    The number of operations grows with the chunk, and the memory of its pairs of tokens with the square. The numbers of steps
    and of stored states shrink with a larger chunk. Raises ValueError for any other chunk.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.recurrent(q, q, q, platform="xla", cfg=glax.configs.ChunkedConfig(chunk=4)).output.shape
    (1, 8, 2, 4)
    """

    chunk: int = 64

    def __post_init__(self):
        check_field("chunk", self.chunk, 1, 4096)

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        if r.erasure is not None:
            return cls(delta_chunk.CHUNK)
        return cls(chunk_parallel.CHUNK) if chunk_parallel.suits(r) else cls.for_scan(r)

    @classmethod
    def for_scan(cls, r: Recurrence) -> Self:
        """Return the config of a scan over chunks: 64 tokens, but on CPUs 32 if K V is below 2^14 or gk and gv are both given.

        Smaller states are cheap to read, and then longer chunks cost more for their pairs of tokens than they save in reads. The
        bound was measured on a machine with two cores. With gk and gv, chunks of 64 tokens would often be out of range for the
        fast form, which takes one product for all pairs.
        """
        large = r.q.shape[3] * r.v.shape[3] >= 2**14 and r.decay.form != "key+value"
        return cls(chunk=32 if Backend.here() is Backend.CPU and not large else 64)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        """Return configs with chunks of 16 tokens, and those of 32, 64 and 128 tokens that are shorter than 2 T."""
        return [cls(chunk) for chunk in (16, 32, 64, 128) if chunk == 16 or chunk < 2 * r.q.shape[1]]


def solve(r: Recurrence, config: ChunkedConfig, save_states: bool) -> tuple[Outputs, Array | None, Array]:
    """Compute the outputs in the chunk-parallel form where it supports r and is exact for all gates, else by the scan. A
    recurrence with an erasure takes the scan of `delta_chunk`.

    Returns (outputs, states, is_blank). states: the states before each chunk, [B, chunks, H, K, V]; None without `save_states`,
    and where the chunk-parallel form has groups of heads. is_blank: whether the states are zeros without meaning, a boolean
    scalar.
    """
    if r.erasure is not None:
        return *delta_chunk.forward_by_scan(r, config.chunk, save_states), jnp.zeros((), bool)
    if not chunk_parallel.suits(r, config.chunk):
        return *forward_by_scan(r, config, save_states), jnp.zeros((), bool)

    saves_residuals = save_states and not chunk_parallel.groups_heads(r, config.chunk)

    def together():
        outputs, states = chunk_parallel.solve(r, config.chunk)
        return outputs, states if saves_residuals else None

    def otherwise():
        B, (H, K, V) = r.q.shape[0], r.state_shape[1:]
        outputs = (
            recurrent(r, config=None)
            if stays_in_cache(r)
            else forward_by_scan(r, scan_config(r, config), save_states=False)[0]
        )
        blank = jnp.zeros((B, r.q.shape[1] // config.chunk, H, K, V), r.dtype)
        return outputs, varying_like(blank, r.q) if saves_residuals else None

    if r.decay.form == "none":
        return *together(), jnp.zeros((), bool)
    in_range = chunk_parallel.in_range(r, config.chunk)
    return *chunk_parallel.where_exact(in_range, r, config.chunk, together, otherwise, trains=save_states), ~in_range


def scan_config(r: Recurrence, config: ChunkedConfig) -> ChunkedConfig:
    """Return the config of a scan that replaces the chunk-parallel form: the chunk of `ChunkedConfig.for_scan`, but no larger
    than config.chunk."""
    return ChunkedConfig(min(config.chunk, ChunkedConfig.for_scan(r).chunk))


def forward_by_scan(r: Recurrence, config: ChunkedConfig, save_states: bool) -> tuple[Outputs, Array | None]:
    """Return the results of `solve` without is_blank, computed by a scan over chunks."""

    def evaluate(r: Recurrence, w: ChunkWindow, g, key, value, masks, S):
        q, k, v = w.read_all(r.q, r.k, r.v)
        q *= w.scale
        return chunk_math.added(k, v, key, value), chunk_math.forward(S, q, k, v, key, value, masks)

    return scan_outputs(r, config.chunk, save_states, evaluate)


def count_determines_size(r: Recurrence, size: int) -> bool:
    """Return whether the number of chunks determines their size: `size` tokens are a power of two or the whole unpacked
    sequence. The gradient may have another config than the forward, and recognizes by the number whether the saved states are
    those of its own chunks."""
    return size & (size - 1) == 0 or (r.boundaries is None and size == r.q.shape[1])


def chunked_with_residuals(r: Recurrence, *, config: ChunkedConfig) -> tuple[Outputs, Residuals]:
    """Compute the outputs and final states, and the residuals: the state before each chunk, and a flag that is 1 if these
    states are blank.

    A single state [B, 1, H, K, V] is saved where the chunk-parallel form has groups of heads, and for chunks whose size does
    not follow from their number. A gradient uses residuals with as many states as it has chunks. Without packing, the saved
    state is the initial state, which is right for a gradient of one chunk. A packed gradient never has a single chunk.
    """
    determined = count_determines_size(r, min(config.chunk, r.q.shape[1]))
    outputs, states, blank = solve(r, config, save_states=determined)
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
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    erasing_forms=ROW_FORMS,  # with per-value gates each value column would need an inverse of its own
    mixes_segments=lambda r: True,
    isolate=isolate,
)
def chunked(r: Recurrence, *, config: ChunkedConfig) -> Outputs:
    """Compute the outputs and final states in chunks. The scan holds one state for each head in memory at a time, the
    chunk-parallel form the states of one block of chunks."""
    return solve(r, config, save_states=False)[0]


@kernel_registry.register(
    "chunked.vjp",
    Platform.XLA,
    Backend.ANY,
    config=ChunkedConfig,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    erasing_forms=ROW_FORMS,
    mixes_segments=lambda r: True,
    isolate=isolate,
)
def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: ChunkedConfig
) -> Recurrence:
    """Compute the gradient of every input, from d_output [B, T, H, V] and d_final [N, H, K, V].

    The states of `residuals` are used if they belong to the chunks of this config. Otherwise, and for None, they are formed
    again.
    """
    chunks, g = start(r, config.chunk)
    if residuals is not None:
        fits = count_determines_size(r, g.size) and residuals.states.shape[1] == chunks.first.shape[0]
        residuals = residuals if fits else None
    states = None if residuals is None else residuals.states
    if r.erasure is not None:
        return delta_chunk.vjp_by_scan(r, config.chunk, d_output, d_final, states)

    if not chunk_parallel.suits(r, config.chunk):
        return vjp_by_scan(r, config.chunk, d_output, d_final, states)

    def together():
        return chunk_parallel.vjp(r, config.chunk, d_output, d_final, states)

    def otherwise():
        return vjp_by_scan(r, scan_config(r, config).chunk, d_output, d_final, None)

    if r.decay.form == "none":
        return together()
    exact = chunk_parallel.in_range(r, config.chunk) if residuals is None else (residuals.out_of_range == 0).all()
    return chunk_parallel.where_exact(exact, r, config.chunk, together, otherwise, trains=True)
