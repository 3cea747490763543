"""Fetch the tokens of a chunk, from copies where the chunk contains rows without a token (`rows.Edges`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.plan import C

Ref = Any


class EdgeCopies(NamedTuple):
    """Hold which chunks are read from copies, and the copies, in global memory. A copy is None if the kernel does not read that
    array."""

    block: Ref  # [chunks]: 0, 1 or 2, the block of C rows of a copy that a chunk is read from; -1 for none
    k: Ref  # [B, 3 C, HK, K]
    q: Ref = None  # [B, 3 C, HQ, K]
    v: Ref = None  # [B, 3 C, HV, V]
    d_output: Ref = None  # [B, 3 C, H, V]


def split_edges(kind, operands):
    """Return operands as a `kind`, a NamedTuple, and those behind its last field as EdgeCopies, or None without any."""
    count = len(kind._fields)
    return kind(*operands[:count]), EdgeCopies(*operands[count:]) if operands[count:] else None


def load_rows(block: Ref | None, chunk, load: Callable):
    """Run load(rows, from_copy) with the rows of a chunk, or where copies hold the chunk, with its rows there.

    block: [chunks], the field of `EdgeCopies`, or None without copies.
    """
    if block is None:
        load(pl.ds(chunk * C, C), False)
        return
    at = block[chunk]
    pl.when(at < 0)(lambda: load(pl.ds(chunk * C, C), False))
    pl.when(at >= 0)(lambda: load(pl.ds(at * C, C), True))


def fetch_tokens(edges: EdgeCopies | None, name: str, x, at, tile, loaded):
    """Fetch the rows of x in a chunk, [C, columns]. name: the field of `edges` with the copy of x. at: batch row, chunk, head and
    columns."""
    b, chunk, head, columns = at

    def load(rows, from_copy: bool):
        source = getattr(edges, name) if from_copy else x
        plgpu.copy_gmem_to_smem(source.at[b, rows, head, columns], tile, loaded)

    load_rows(None if edges is None else edges.block, chunk, load)
