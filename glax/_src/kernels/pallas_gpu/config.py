"""Define which calls the Hopper kernels run, and how a call is divided into programs."""

import dataclasses
import importlib.util
import math

from glax._src.core.backend import sequences_apart
from glax._src.core.known_miscompiles import numbers, version_of
from glax._src.core.recurrence import Recurrence, varying_axes
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import found_capability, multiprocessors
from glax._src.kernels.common.refusals import XLA, empty, other_dtype, too_wide
from glax._src.kernels.pallas_gpu.plan import ROWS, WHOLE, Blocks, C

WIDEST = 128  # of a block, the state of a program
WIDEST_KEY, WIDEST_VALUE = 256, 512
MOST_PARTS = 32
# Whether sequences whose length 8 does not divide are joined to rows that the kernels read in place (`joined_rows`), and the
# last chunk of one row is copied alone (`packed_row.LastChunk`).
JOINS = True


def installation() -> str | None:
    """Return what is missing on this machine, or None."""
    if numbers(version_of("jax") or "") < (0, 11):
        return f"needs jax>=0.11, {version_of('jax')} is installed: pip install -U jax"
    if importlib.util.find_spec("absl") is None:
        return "needs absl-py: pip install absl-py"
    found = found_capability()
    if found is not None and numbers(found)[0] != 9:
        return f"needs a Hopper GPU, compute capability 9.0, this one has {found}: {XLA}"
    return None


def supports(r: Recurrence) -> str | None:
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
    """Return None, or why the kernels of the delta rule do not compute a recurrence with an erasure."""
    if r.erasing.beta is None:
        return f"takes the delta rule with beta, got erase and write: {XLA}"
    if r.decay.form == "key":
        return too_wide(r, WIDEST, WIDEST_VALUE, "heads that erase, with per-key gates,")
    return too_wide(r, WIDEST_KEY, WIDEST_VALUE, "heads that erase")


def padded(width: int) -> int:
    """Return the width of the blocks that hold `width` columns: 64 if half of a block of 128 would be empty, else 128."""
    return WIDEST if -(-width // 64) % 2 == 0 else 64


@dataclasses.dataclass(frozen=True)
class Widths:
    """Hold the blocks that a state is divided into, and the widths K and V of one block. Together they are at least as wide as
    the state.

    stored: the blocks by which states are stored for the gradient, which is computed by these blocks. With per-head gates a
    program of a scan has all of K, and its 64 columns of a state are stored as parts of several blocks. Heads that erase are
    not divided.
    """

    blocks: Blocks
    K: int
    V: int
    stored: Blocks

    @classmethod
    def of(cls, r: Recurrence, square: bool) -> "Widths":
        """Return the widths for r. square: whether the gradient's kernels need square blocks, of 64 columns where keys are that
        narrow and else of 128."""
        K, V = 64 if r.q.shape[3] <= 64 else WIDEST, padded(r.v.shape[3])
        if r.erasure is not None:
            return cls(WHOLE, -(-r.q.shape[3] // K) * K, -(-r.v.shape[3] // 64) * 64, WHOLE)
        if square:
            V = K
        blocks = Blocks(-(-r.q.shape[3] // K), -(-r.v.shape[3] // V))
        if blocks.rows > 1 and r.decay.form != "key":
            return cls(WHOLE, blocks.rows * K, blocks.columns * V, blocks)
        return cls(blocks, K, V, blocks)


@dataclasses.dataclass(frozen=True)
class HopperConfig(Config):
    """Configure the Hopper kernels.

    parts: the segments of every sequence, 1 to 32; 1 for whole sequences, as packed sequences with initial states have to be. A
    gradient of final states takes packed sequences whole for any parts. columns: the columns of the state in a program, 64 or
    128. With heads of 64 columns, 128 columns are two heads, which share queries and keys (`pair_scan`).
    """

    parts: int = 1
    columns: int = 64

    def __post_init__(self):
        check_field("parts", self.parts, 1, MOST_PARTS)
        check_field("columns", self.columns, 64, WIDEST, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> "HopperConfig":
        """Return the config that can run r with the lowest estimate of `rounds`."""
        return min(shapes(r), key=lambda c: rounds(r, c))

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[HopperConfig]":
        """Return the six configs with the lowest estimates, the heuristic first."""
        return sorted(shapes(r), key=lambda c: rounds(r, c))[:6]


def check_parts(r: Recurrence, config: HopperConfig):
    """Raise ValueError if the config divides packed sequences that are not one row. Each of these begins a chunk."""
    if r.boundaries is not None and config.parts > 1:
        raise ValueError(
            f"parts must be 1 for packed sequences with states, each of which begins a chunk; got {config.parts}: pass "
            "cfg=HopperConfig(parts=1), or leave out cfg"
        )


def group_size(r: Recurrence) -> int:
    """Return the number of consecutive heads that share a head of q and a head of k."""
    return math.gcd(r.num_heads // r.q.shape[2], r.num_heads // r.k.shape[2])


def grouped(r: Recurrence) -> bool:
    """Return whether `gradient_groups` computes the gradient.

    It does so without per-key gates and for keys of one block, where heads share queries and keys, or where values are half as
    wide as keys.
    """
    widths = Widths.of(r, square=False)
    return (
        r.decay.form != "key"
        and widths.stored.rows == 1
        and (group_size(r) > 1 or widths.V * widths.blocks.columns < widths.K)
    )


def in_one_row(r: Recurrence) -> bool:
    """Return whether the kernels take packed sequences as one row of tokens, with a reset at every boundary.

    States that enter or leave at a boundary have no place in such a row.
    """
    may_reset = r.decay.form != "key" or takes_segments(r)
    return r.boundaries is not None and r.initial_state is None and may_reset


def takes_segments(r: Recurrence) -> bool:
    """Return whether the kernels mark the tokens that reset the state. Other boundaries are gates of -inf.

    Per-head gates of -inf are exact inside a chunk, so only per-key gates need marks. With keys of one block of 64 channels the
    gradient's kernel has no registers for the masks.
    """
    return r.decay.form == "key" and r.erasure is None and r.q.shape[3] > 64


def joined_number(r: Recurrence) -> int:
    """Return how many sequences, whose length 8 does not divide, are joined to a row: the least number with which 8 divides its
    length, or all if `copies_last_chunk` serves their row. Return 1 if none are joined."""
    (B, T), number = r.q.shape[:2], least_number(r)
    if not JOINS or T % ROWS == 0 or why_not_joined(r) is not None:
        return 1
    return number if B % number == 0 else B


def packs(r: Recurrence, config: HopperConfig) -> bool:
    """Return whether sequences that are not joined are read in place as packed sequences, each from a chunk's start on.

    Their results lie in chunks, and are gathered. Only kernels with per-key gates read packed sequences in place, and whole.
    """
    (B, T), is_plain = r.q.shape[:2], r.boundaries is None and r.segments is None and r.states_every is None
    whole = config.parts == 1 and T % ROWS > 0 and B * T % ROWS == 0 and T >= C
    return JOINS and B > 1 and is_plain and whole and packs_if_not_joined(r) and not sequences_apart.value


def packs_if_not_joined(r: Recurrence) -> bool:
    """Return whether r has per-key gates and is not joined, but may be packed: it has initial states, or keys without marks."""
    unmarked = r.initial_state is not None or not takes_segments(r)
    return r.decay.form == "key" and r.erasure is None and unmarked


def least_number(r: Recurrence) -> int:
    """Return the least number of sequences which have a multiple of 8 tokens together."""
    return ROWS // math.gcd(r.q.shape[1], ROWS)


def copies_last_chunk(r: Recurrence) -> bool:
    """Return whether the last chunk of one row, whose length 8 does not divide, is read from a copy, and the others in place.

    With per-key gates, or with beta, no kernel can do so.
    """
    B, T = r.q.shape[:2]
    is_row = B == 1 and r.boundaries is None and r.erasure is None
    return JOINS and is_row and r.decay.form != "key" and T > C and T % ROWS > 0


def why_not_joined(r: Recurrence) -> str | None:
    """Return why sequences whose length 8 does not divide cannot be joined, or None if they can be.

    In a joined row a sequence begins from zeros, at a reset inside a chunk.
    """
    (B, T), number = r.q.shape[:2], least_number(r)
    if r.boundaries is not None:
        return "packed sequences are one row already"
    if r.erasure is not None:
        return "beta is given"
    if r.initial_state is not None:
        return "initial states enter"
    if r.states_every is not None:
        return "states behind every n tokens are stored"
    if r.decay.form == "key" and not takes_segments(r):
        return "with per-key gates, keys of at most 64 channels have no marks for resets"
    if T < C:
        return f"sequences are shorter than {C} tokens"
    if B == 1:
        return "B=1"
    if B % number and r.decay.form == "key":
        return f"{number} sequences, which {ROWS} divides together, do not divide B={B}"
    if sequences_apart.value:
        return (
            "several devices may share the batch, or examples have scales of their own: call inside shard_map over all axes "
            "to join the sequences of a device"
        )
    return None


def stores_states(r: Recurrence) -> str | None:
    """Return why the kernels do not store the states behind every r.states_every tokens; None if they do."""
    if r.boundaries is not None or r.erasure is not None:
        got = "beta" if r.erasure is not None else "cu_seqlens"
        return f"stores states behind every n tokens of unpacked sequences without beta, got {got}: leave out platform"
    if r.reverse and r.q.shape[1] % C:
        return f"takes reverse with states_every for a T that {C} divides, got T={r.q.shape[1]}: pad T, or leave out platform"
    return None


def pairs_heads(r: Recurrence) -> bool:
    """Return whether a program can scan two heads. They must have 64 columns, no per-key gates, and groups of even size."""
    widths = Widths.of(r, square=False)
    one_block = widths.K <= WIDEST and widths.V == 64 and widths.blocks.count == 1
    return r.decay.form != "key" and one_block and group_size(r) % 2 == 0


def shapes(r: Recurrence) -> list[HopperConfig]:
    """Return the configs that can run r.

    128 columns need blocks of 128 x 128 or pairs of heads, and no erasure. A segment has at least four chunks. Packed calls have
    several segments only as one row.
    """
    widths = Widths.of(r, square=False)
    wide = r.erasure is None and (widths.K == widths.V == WIDEST or pairs_heads(r))
    whole = r.boundaries is not None and not in_one_row(r)
    most = 1 if whole else max(1, r.q.shape[1] // (4 * C))
    return [HopperConfig(p, columns) for columns in (64, 128)[: 1 + wide] for p in range(1, min(MOST_PARTS, most) + 1)]


def rounds(r: Recurrence, config: HopperConfig) -> float:
    """Return an estimate of a call's time, in units of one chunk of one program. A program occupies a multiprocessor.

    Segments read k, v and the gates a second time, and pass on their states. 64 columns take 0.85 of the time of 128.
    The factors are measurements; see docs/internals/experiments/hopper.md.
    """
    widths = Widths.of(r, square=False)
    columns = r.num_heads * widths.blocks.count * widths.V
    if r.erasure is not None:
        return delta_rounds(r, config, columns)
    sequences = 1 if in_one_row(r) else r.num_sequences
    programs = sequences * -(-columns // config.columns) * config.parts
    chunks = -(-r.q.shape[1] // (C * config.parts))
    scans = -(-programs // multiprocessors()) * chunks * (1 if config.columns == 128 else 0.85)
    return scans if config.parts == 1 else 1.7 * scans + passing_states(programs, config.columns, widths.K)


def passing_states(programs: int, columns: int, K: int) -> float:
    """Return the time in which all multiprocessors move the states of segments, in units of one chunk of one program.

    A program writes its float32 state of K x columns, one kernel reads and writes it, and a program reads it. A chunk takes as
    long as its q and k and 128 columns of v and output take to move in bfloat16.
    """
    states, chunk = programs * K * columns * 4, C * 2 * (K + WIDEST) * 2
    return 4 * states / (chunk * multiprocessors())


def delta_rounds(r: Recurrence, config: HopperConfig, columns: int) -> float:
    """Return an estimate of a call's time under the delta rule, in units of one chunk of one program.

    Segments are scanned twice, at first with as many more columns as keys have. Their states are passed on one after another.
    """
    sequences = 1 if in_one_row(r) else r.num_sequences
    waves = -(-(sequences * columns // config.columns * config.parts) // multiprocessors())
    chunks = -(-r.q.shape[1] // (C * config.parts))
    return waves * chunks * (1.9 if config.parts > 1 else 1) + (config.parts > 1) * (25 + 12 * config.parts)
