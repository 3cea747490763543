"""Define the tunable numbers of the CUDA kernels, and the heuristic that derives them from the shapes."""

import dataclasses
import itertools
import math

from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import capability, multiprocessors

WIDEST = 512  # the largest K and V
HELD_BY_STEP = (
    64  # most numbers of the state in a thread that decodes one token: two blocks of 256 then share a multiprocessor
)
HELD_BY_TOKENS = 32  # the same where a thread scans several tokens
HELD_BY_REPLAY = 32  # the same in a step of a `StatePool`, where three or four blocks of 256 do
MOST_COMPACT = (
    HELD_BY_STEP * 512
)  # most numbers of a state in 8 bits, which one block has, its columns rounded up to a power of two
WIDEST_COMPACT = 256  # columns of it

# `Stored` in device/values.cuh.
STORED = {"float32": 0, "bfloat16": 1, "float16": 2}
COMPACT = {"int8": 3, "float8_e4m3fn": 4}
STORED_BYTES = (4, 2, 2, 1, 1)


def is_compact(states: Array | None) -> bool:
    """Return whether states are stored in 8 bits. states: an array of states, or None for states in float32."""
    return states is not None and str(states.dtype) in COMPACT


def layout_of(V: int, columns: int, state_bytes: int) -> tuple[int, int]:
    """Return (lanes, vector): how many threads share a row of the state, and how many columns each thread reads at a time, at
    most 8.

    lanes * vector is the number of columns in a block. It is `columns`, the most of a config, or fewer where V has fewer, and
    where 32 threads cannot read as many in one access each. state_bytes: the bytes of an element of a stored state.
    """
    vector = math.gcd(V, columns, min(8, 16 // state_bytes))
    return min(32, max(1, columns // vector), 1 << (-(-V // vector) - 1).bit_length()), vector


@dataclasses.dataclass(frozen=True)
class CudaConfig(Config):
    """Configure the CUDA kernels, which take the tokens one by one.

    threads: the threads of a block, a power of two from 32 to 1024. columns: the most columns of the state in a block, a power of
    two from 1 to 256; a block takes fewer where V is smaller. Raises ValueError, which names the field, for any other value.

    >>> glax.configs.CudaConfig(threads=128)
    CudaConfig(threads=128, columns=128)
    """

    threads: int = 256
    columns: int = 128

    def __post_init__(self):
        check_field("threads", self.threads, 32, 1024, power_of_two=True)
        check_field("columns", self.columns, 1, 256, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> "CudaConfig":
        """Return 256 threads and as many columns as V, rounded up to a power of two, but at most 128.

        The columns are halved, to no fewer than 16, while a thread would hold more numbers of the state than HELD_BY_STEP in a
        call of one token, or HELD_BY_TOKENS in a longer one. They are halved again, to no fewer than 32, while there are fewer
        than two blocks for each multiprocessor.
        """
        K, V = r.q.shape[3], r.v.shape[3]
        columns = min(128, 1 << (V - 1).bit_length())
        threads = 256
        held = HELD_BY_STEP if r.q.shape[1] == 1 else HELD_BY_TOKENS
        while columns > 16 and K * columns > held * threads:
            columns //= 2
        while columns > 32 and r.num_sequences * r.num_heads * -(-V // columns) < 2 * multiprocessors():
            columns //= 2
        return cls(threads, columns)

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[CudaConfig]":
        K, V = r.q.shape[3], r.v.shape[3]
        found = [cls.heuristic(r)]
        for threads, columns in itertools.product((128, 256, 512), (16, 32, 64, 128)):
            if columns < 2 * V and K * columns <= 2 * HELD_BY_STEP * threads:
                found.append(cls(threads, columns))
        # Configs whose columns are rounded to the same ones, for states of 4 and of 2 bytes, are one program.
        programs = {(c.threads, *(layout_of(V, c.columns, size) for size in (4, 2))): c for c in reversed(found)}
        return [c for c in dict.fromkeys(found) if c in programs.values()]


class ReplayConfig(CudaConfig):
    """Configure the CUDA kernel of a step of `glax.serving.StatePool`, with the fields and errors of `CudaConfig`.

    States in 8 bits need columns of at least V.

    >>> glax.configs.ReplayConfig(columns=64)
    ReplayConfig(threads=256, columns=64)
    """

    @classmethod
    def heuristic(cls, r: Recurrence) -> "ReplayConfig":
        """Return 256 threads and as many columns as V, rounded up to a power of two, but at most 256.

        The columns are halved, to no fewer than 16, while a thread would hold more than HELD_BY_REPLAY numbers of the state, and
        while there are fewer than two blocks for each multiprocessor. Of a state in 8 bits a block has all columns, if these are
        at most WIDEST_COMPACT and the state has at most MOST_COMPACT numbers; its threads grow with these numbers, from 128 on.
        """
        K, V = r.q.shape[3], r.v.shape[3]
        threads, columns = 256, 1 << (V - 1).bit_length()
        if is_compact(r.initial_state) and columns <= WIDEST_COMPACT and K * columns <= MOST_COMPACT:
            # On newer architectures the delta rule has no registers for more.
            held = HELD_BY_REPLAY if r.erasure is not None and capability() >= (10, 0) else HELD_BY_STEP
            return cls(max(128, 1 << (K * columns // held - 1).bit_length()), columns)
        while columns > 16 and K * columns > HELD_BY_REPLAY * threads:
            columns //= 2
        while columns > 16 and r.num_sequences * r.num_heads * -(-V // columns) < 2 * multiprocessors():
            columns //= 2
        return cls(threads, min(columns, 256))

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[ReplayConfig]":
        """Return the heuristic's config alone: a measurement would have to fill the rings of a pool."""
        return [cls.heuristic(r)]
