"""The tunable numbers of the Triton kernels, and rules for them from the shapes."""

import dataclasses

import jax

from glax.recurrence import Recurrence
from glax.registry import Config

WIDEST = 512


def width(n: int) -> int:
    """The block that holds n columns: the tensor cores' least is 16."""
    return max(16, 1 << (n - 1).bit_length())


def multiprocessors() -> int:
    """Of the GPU that JAX computes on; an H100's where there is none, for compiling ahead of time."""
    return getattr(jax.local_devices()[0], "core_count", None) or 132


def segment_for(r: Recurrence, chunk: int, programs: int, enough: int) -> int:
    """Tokens a segment, 0 for whole sequences: T is cut only where fewer programs than `enough` would run without.

    programs: how many there are for uncut sequences.
    """
    T = r.q.shape[1]
    parts = min(-(-enough // max(programs, 1)), T // (8 * chunk))
    if parts < 2:
        return 0
    return -(-T // (parts * chunk)) * chunk


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(Config):
    """chunk: tokens a chunk; columns: of the state's V in a program; segment: tokens a program walks, 0 for all of T.

    warps, stages: of each program, and of its software pipeline.
    """

    chunk: int = 32
    columns: int = 64
    segment: int = 0
    warps: int = 4
    stages: int = 2

    @classmethod
    def heuristic(cls, r: Recurrence) -> "ChunkedConfig":
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        wide = r.q.dtype.itemsize == 4 or r.q.dtype == "float16"
        chunk = 16 if K >= 512 or (wide and K >= 256) else 32
        columns = min(V, 64, max(16, 2**13 // K))
        programs = r.num_sequences * r.num_heads * -(-V // columns)
        segment = segment_for(r, chunk, programs, 4 * multiprocessors())
        return cls(chunk, columns, segment, warps=8 if K >= 256 else 4, stages=1 if wide or K >= 256 else 2)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[ChunkedConfig]":
        guess = cls.heuristic(r)
        found = [guess]
        for chunk in (32, 64):
            for columns in (32, 64, 128):
                for warps in (4, 8):
                    if columns <= width(r.v.shape[3]):
                        found.append(dataclasses.replace(guess, chunk=chunk, columns=columns, warps=warps))
        return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class GradientConfig(Config):
    """chunk: tokens a chunk, whose two states are stored; rows: of the states at a time; segment: tokens that a program of
    the states' kernels walks, 0 for all of T; block: rows and columns of the state in such a program.
    """

    chunk: int = 64
    rows: int = 64
    segment: int = 0
    block: int = 64
    warps: int = 4
    stages: int = 2

    @classmethod
    def heuristic(cls, r: Recurrence) -> "GradientConfig":
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        wide = r.q.dtype.itemsize == 4 or r.q.dtype == "float16"
        chunk = 16 if K >= 256 or wide else 64
        block = min(64, K, V)
        rows = min(K, 64, max(16, 2**13 // V))
        programs = r.num_sequences * r.num_heads * (K // block) * -(-V // block)
        segment = segment_for(r, chunk, programs, 2 * multiprocessors())
        return cls(chunk, rows, segment, block, warps=8 if K >= 128 else 4, stages=1 if wide or K >= 256 else 2)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[GradientConfig]":
        guess = cls.heuristic(r)
        found = [guess]
        for chunk in (32, 64):
            for rows in (32, 64, 128):
                for warps in (4, 8):
                    if rows <= width(r.q.shape[3]):
                        found.append(dataclasses.replace(guess, chunk=chunk, rows=rows, warps=warps))
        return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class TokenConfig(Config):
    """columns: of the state's V in a program."""

    columns: int = 16
    warps: int = 4

    @classmethod
    def heuristic(cls, r: Recurrence) -> "TokenConfig":
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        return cls(columns=min(V, max(8, 2**11 // K)), warps=4 if K >= 128 else 1)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[TokenConfig]":
        return [cls(c, w) for c in (8, 16, 32, 64) for w in (1, 2, 4) if c <= width(r.v.shape[3])]
