"""Define which calls the Hopper kernels run, and how a call is divided into programs."""

import dataclasses
import importlib.util
import math

from glax._src.core.known_miscompiles import numbers, version_of
from glax._src.core.recurrence import Recurrence, varying_axes
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import found_capability, multiprocessors
from glax._src.kernels.common.refusals import XLA, empty, other_dtype, too_wide
from glax._src.kernels.pallas_gpu.plan import BLOCK, WHOLE, Blocks, C
from glax._src.kernels.pallas_gpu.rows import fits_one_row

WIDEST_KEY, WIDEST_VALUE = 256, 512
MOST_PARTS = 32


def installation() -> str | None:
    """Return what is missing on this machine for the Hopper kernels, or None."""
    if numbers(version_of("jax") or "") < (0, 11):
        return f"needs jax>=0.11, {version_of('jax')} is installed: pip install -U jax"
    if importlib.util.find_spec("absl") is None:
        return "needs absl-py: pip install absl-py"
    found = found_capability()
    if found is not None and numbers(found)[0] != 9:
        return f"needs a Hopper GPU, compute capability 9.0, this one has {found}: {XLA}"
    return None


def supports(r: Recurrence) -> str | None:
    """Return the reason why the Hopper kernels do not run r on this machine, or None if they do."""
    if (reason := other_dtype(r, ("bfloat16",))) is not None:
        return reason
    if (reason := too_wide(r, WIDEST_KEY, WIDEST_VALUE)) is not None:
        return reason
    if axes := varying_axes(r.q):  # loops in a kernel would mix them with what does not vary
        named = ", ".join(sorted(axes))
        return (
            f"takes arrays that do not vary over a mesh axis, got {named}: pass check_vma=False to shard_map, or {XLA}"
        )
    if r.erasure is not None and (reason := delta_supports(r)) is not None:
        return reason
    return empty(r) or installation()


def delta_supports(r: Recurrence) -> str | None:
    """Return the reason why the kernels of the delta rule do not compute r, which has an erasure, or None if they do."""
    if r.decay.key is not None:
        return too_wide(r, BLOCK, WIDEST_VALUE, "heads that erase, with per-key gates,")
    widest = WIDEST_KEY if r.erasing.beta is not None else BLOCK
    return too_wide(r, widest, WIDEST_VALUE, f"heads that erase by {'beta' if widest > BLOCK else 'erase'}")


@dataclasses.dataclass(frozen=True)
class Widths:
    """Hold the blocks that a state is divided into, and the widths of one block. All blocks together cover the state.

    blocks: the number of blocks of K and of V. K, V: the rows and columns of one block. stored: the blocks by which states are
    stored for the gradient, which is computed by these blocks. With per-head gates a program of a scan has all of K, and its 64
    columns of a state are stored as parts of several blocks. Under the delta rule heads are not divided. in_memory: (the
    columns of a block of keys, the columns of a block of values) in arrays in memory. They are fewer than K and V where the
    kernels read narrower arrays in place.
    """

    blocks: Blocks
    K: int
    V: int
    stored: Blocks
    in_memory: tuple[int, int]

    @classmethod
    def of(cls, r: Recurrence, square: bool) -> "Widths":
        """Return the widths for r. square: whether the gradient's kernels need square blocks: of 64 columns if keys have at
        most 64, else of 128."""
        (K, V), width = (r.q.shape[3], r.v.shape[3]), 64 if r.q.shape[3] <= 64 else BLOCK
        if r.erasure is not None:
            # Without per-key gates tiles have 32 columns where 64 does not divide K; a state wider than 128 is in rows of 64.
            is_own_width = r.decay.key is None and (K == 192 or (K <= BLOCK and K % 32 == 0))
            K, V = K if is_own_width else -(-K // width) * width, -(-V // 64) * 64
            return cls(WHOLE, K, V, WHOLE, (K, V))
        # 64 columns of V if half of a block of 128 would be empty
        columns = width
        if not square:
            columns = BLOCK if -(-V // 64) % 2 == 0 else 64
        blocks = Blocks(-(-K // width), -(-V // columns))
        if blocks.rows > 1 and r.decay.key is None:
            # A program's 64 columns of the state lie in one block of V, so values are as wide as the blocks.
            keys, filled = columns_in_memory(K, blocks.rows, width), blocks.columns * columns
            return cls(WHOLE, blocks.rows * width, filled, blocks, (blocks.rows * keys, filled))
        keys, values = columns_in_memory(K, blocks.rows, width), columns_in_memory(V, blocks.columns, columns)
        # `gradient_groups` takes values in parts of 64 columns.
        by_parts = r.decay.key is None and (group_size(r) > 1 or V <= 64 < width)
        return cls(blocks, width, columns, blocks, (keys, columns if by_parts and values % 64 else values))


def columns_in_memory(size: int, blocks: int, width: int) -> int:
    """Return the columns of one block in memory, for arrays of `size` columns that are divided into `blocks` blocks.

    width: the columns of a block in the kernels. The result is less if the kernels read the arrays in place, which takes
    multiples of 32 columns.
    """
    each, rest = divmod(size, blocks)
    return width if rest or each % 32 else each


@dataclasses.dataclass(frozen=True)
class HopperConfig(Config):
    """Configure the Hopper kernels.

    parts: the segments that every sequence is divided into, 1 to 32; 1 for whole sequences. A call of packed sequences raises
    ValueError for more than 1 if it has initial states, or per-key gates with K up to 64 or with beta or erase. The gradient of
    packed sequences takes them whole, whatever parts is, if their final states have a gradient.

    columns: the columns of the state in a program of a scan, 64 or 128. What 128 does is the first line that fits the call:

        beta or erase                                                        ValueError
        no per-key gates, K above 128                                        64 columns
        no per-key gates, V up to 64, each head of query and of key          two heads of 64 columns
            serves an even number of heads, no states_every
        the call is differentiated or T is sharded over a mesh, and          128 columns if K is above 64, else 64
            gradient_groups does not run (below)
        every other call                                                     128 columns if ceil(V / 64) is even, else 64

    gradient_groups, a kernel of the gradient, runs in calls without per-key gates in which several heads share a head of query
    and a head of key, or in which V is up to 64 and K above 64.

    Raises ValueError, which names the field, for any other value.

    >>> glax.configs.HopperConfig(parts=4)
    HopperConfig(parts=4, columns=64)
    """

    parts: int = 1
    columns: int = 64

    def __post_init__(self):
        check_field("parts", self.parts, 1, MOST_PARTS)
        check_field("columns", self.columns, 64, BLOCK, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> "HopperConfig":
        """Return the config with the least estimated time, `Work.rounds`, of those that can run r."""
        work = Work.of(r)
        return cls(*min(work.shapes, key=work.rounds))

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[HopperConfig]":
        """Return the six configs with the least estimated times, in their order. The first is the heuristic's."""
        work = Work.of(r)
        return [cls(*shape) for shape in sorted(work.shapes, key=work.rounds)[:6]]


def group_size(r: Recurrence) -> int:
    """Return the number of consecutive heads that share a head of q and a head of k."""
    return math.gcd(r.num_heads // r.q.shape[2], r.num_heads // r.k.shape[2])


def stores_states(r: Recurrence) -> str | None:
    """Return why the kernels do not store the states behind every r.states_every tokens; None if they do."""
    if r.boundaries is not None or r.erasure is not None:
        got = "beta" if r.erasure is not None else "cu_seqlens"
        return f"stores states behind every n tokens of unpacked sequences without beta, got {got}: leave out platform"
    if r.reverse and r.q.shape[1] % C:
        return f"takes reverse with states_every for a T that {C} divides, got T={r.q.shape[1]}: pad T, or leave out platform"
    return None


def pairs_heads(r: Recurrence, widths: Widths) -> bool:
    """Return whether a program can scan two heads. They must have one block of 64 columns of V and at most 128 rows of K, no
    per-key gates, and groups of even size (`group_size`).

    widths: `Widths.of` the forward.
    """
    one_block = widths.K <= BLOCK and widths.V == 64 and widths.blocks == WHOLE
    return one_block and r.decay.key is None and group_size(r) % 2 == 0


@dataclasses.dataclass(frozen=True)
class Work:
    """Hold what decides how long a call takes, for any number of segments. The number of segments is chosen by it.

    shapes: (segments, columns of a program) of the configs that can run the call. erases: whether the call is of the delta
    rule. sequences: the number of rows that are scanned in parallel; 1 for packed sequences as one row. T: the tokens of a row.
    columns: the columns of the states of all heads. K: the width of a block. programs: the number that run at a time, one on a
    multiprocessor. The factors in the estimates are measurements; see docs/internals/experiments/hopper/segments.md.
    """

    shapes: list[tuple[int, int]]
    erases: bool
    sequences: int
    T: int
    columns: int
    K: int
    programs: int

    @classmethod
    def of(cls, r: Recurrence) -> "Work":
        """Return the work of r.

        128 columns need blocks of 128 x 128 or pairs of heads, and no erasure. A segment has at least four chunks. Packed calls
        have several segments only as one row.
        """
        widths, T, erases, one_row = (
            Widths.of(r, square=False),
            r.q.shape[1],
            r.erasure is not None,
            r.boundaries is not None and fits_one_row(r),
        )
        wide = not erases and (widths.K == widths.V == BLOCK or pairs_heads(r, widths))
        most = min(MOST_PARTS, max(1, T // (4 * C)) if one_row or r.boundaries is None else 1)
        shapes = [(parts, columns) for columns in (64, 128)[: 1 + wide] for parts in range(1, most + 1)]
        columns = r.num_heads * widths.blocks.rows * widths.blocks.columns * widths.V
        sequences = 1 if one_row else r.num_sequences
        return cls(shapes, erases, sequences, T, columns, widths.K, multiprocessors())

    def rounds(self, shape: tuple[int, int]) -> float:
        """Return an estimate of the call's time, in units of one chunk of one program. shape: (segments, columns of a program).

        Segments read k, v and the gates a second time, and pass on their states. 64 columns take 0.85 of the time of 128.
        """
        parts, columns = shape
        if self.erases:
            return self.delta_rounds(parts, columns)
        programs = self.sequences * -(-self.columns // columns) * parts
        chunks = -(-self.T // (C * parts))
        scans = -(-programs // self.programs) * chunks * (1 if columns == 128 else 0.85)
        return scans if parts == 1 else 1.7 * scans + self.passing_states(programs, columns)

    def passing_states(self, programs: int, columns: int) -> float:
        """Return the time in which all multiprocessors move the states of segments, in units of one chunk of one program.

        programs: the number of programs of the scan. columns: the columns of a program. A program writes its float32 state of K
        x columns, one kernel reads and writes it, and a program reads it. A chunk takes as long as its q and k and 128 columns
        of v and output take to move in bfloat16.
        """
        states, chunk = programs * self.K * columns * 4, C * 2 * (self.K + BLOCK) * 2
        return 4 * states / (chunk * self.programs)

    def delta_rounds(self, parts: int, columns: int) -> float:
        """Return an estimate of the call's time under the delta rule, in units of one chunk of one program. parts: the segments
        of a sequence. columns: the columns of a program.

        Segments are scanned twice, and the first scan has K more columns (`DeltaScan`, "transitions"). The states of segments
        are passed on one after another.
        """
        waves = -(-(self.sequences * self.columns // columns * parts) // self.programs)
        chunks = -(-self.T // (C * parts))
        return waves * chunks * (1.9 if parts > 1 else 1) + (parts > 1) * (25 + 12 * parts)
