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


def segment_for(r: Recurrence, chunk: int, programs: int) -> int:
    """Tokens a segment, 0 for whole sequences: T is cut only where the programs for uncut ones leave the GPU idle.

    Cutting walks k, v and the gates twice, which costs about a fifth; measured, it pays below three quarters of a program
    a multiprocessor, and then two a multiprocessor are best.
    """
    T, enough = r.q.shape[1], multiprocessors()
    parts = min(-(-2 * enough // max(programs, 1)), T // (8 * chunk))
    if parts < 2 or 4 * programs >= 3 * enough:
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
        """Measured on an H200 in bfloat16 at widths of 128: all of V in a program, with 8 warps, as soon as that fills the GPU.

        Else 64 columns and 4 warps. Elsewhere: what fits in registers.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        walks, wide = r.num_sequences * r.num_heads, r.q.dtype != "bfloat16"
        if K * V == 2**14 and not wide and r.decay.form == "key" and 3 * walks >= 2 * multiprocessors():
            return cls(32, V, 0, warps=8, stages=3)
        chunk = 16 if K >= 512 or (wide and K >= 256) else 32
        columns = min(V, 64, max(16, 2**13 // K))
        segment = segment_for(r, chunk, walks * -(-V // columns))
        return cls(chunk, columns, segment, warps=8 if K >= 256 else 4, stages=1 if wide or K >= 256 else 3)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[ChunkedConfig]":
        guess = cls.heuristic(r)
        found = [guess]
        for chunk, columns, warps in ((32, 64, 4), (32, 128, 8), (64, 64, 4), (16, 64, 4), (32, 32, 4)):
            for segment in dict.fromkeys((0, guess.segment, 1024)):
                if columns <= width(r.v.shape[3]) and segment < r.q.shape[1]:
                    found.append(cls(chunk, columns, segment, warps, guess.stages))
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
        """Measured on an H200 in bfloat16 at widths of 128: few rows at a time, so that two programs share a multiprocessor.

        Elsewhere: what fits in registers.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        wide = r.q.dtype != "bfloat16"
        chunk = 16 if wide and V >= 256 else 32 if wide or V >= 256 else 64
        block = min(64, K, V)
        rows = max(16, min(K, 2**11 // V))
        segment = segment_for(r, chunk, r.num_sequences * r.num_heads * (K // block) * (V // block))
        return cls(chunk, rows, segment, block, warps=4, stages=1 if wide or V >= 256 else 4)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[GradientConfig]":
        guess = cls.heuristic(r)
        found = [guess]
        for chunk, rows, warps in ((64, 16, 4), (64, 32, 4), (32, 16, 2), (32, 64, 4), (64, 64, 8)):
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
