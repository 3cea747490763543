"""Fetch the tokens of a chunk, from copies where the chunk contains rows without a token (`rows.Edges`)."""

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


def fetch_tokens(edges: EdgeCopies | None, name: str, x, at, tile, loaded):
    """Fetch the rows of x in a chunk, [C, columns]. name: the field of `edges` with the copy of x. at: batch row, chunk, head and
    columns."""
    b, chunk, head, columns = at

    def fetch(source, first):
        plgpu.copy_gmem_to_smem(source.at[b, pl.ds(first * C, C), head, columns], tile, loaded)

    if edges is None:
        fetch(x, chunk)
        return
    block, copy = edges.block[chunk], getattr(edges, name)
    pl.when(block < 0)(lambda: fetch(x, chunk))
    pl.when(block >= 0)(lambda: fetch(copy, block))
