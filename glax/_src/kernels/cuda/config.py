"""The tunable numbers of the CUDA kernels, and the heuristic that derives them from the shapes."""

import dataclasses
import itertools

from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import multiprocessors

WIDEST = 512  # K and V
HELD = 64  # numbers of the state in a thread of a step, which leaves registers for two blocks of 256 threads
HELD_BY_TOKENS = 32  # where it stays in registers over several tokens


@dataclasses.dataclass(frozen=True)
class CudaConfig(Config):
    """Configure the token-by-token kernels.

    threads: of a block, 32 to 1024. columns: of the state in a block, 1 to 256; fewer where V has fewer.
    """

    threads: int = 256
    columns: int = 128

    def __post_init__(self):
        check_field("threads", self.threads, 32, 1024, power_of_two=True)
        check_field("columns", self.columns, 1, 256, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> "CudaConfig":
        """Return whole rows of the state in blocks of 256 threads, and fewer columns where the blocks would not fill the GPU.

        A thread holds at most HELD numbers of the state, or HELD_BY_TOKENS.
        """
        K, V = r.q.shape[3], r.v.shape[3]
        columns = min(128, 1 << (V - 1).bit_length())
        threads = 256
        held = HELD if r.q.shape[1] == 1 else HELD_BY_TOKENS
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
            if columns < 2 * V and K * columns <= 2 * HELD * threads:
                found.append(cls(threads, columns))
        return list(dict.fromkeys(found))
