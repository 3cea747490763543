"""Define how the kernels of the selective scan divide channels and states, and state which calls they refuse.

Importing this module imports neither Triton nor jax-triton.
"""

import dataclasses

from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import bucket, is_symbol
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import capability, multiprocessors
from glax._src.kernels.common.selective import SelectiveOperands
from glax._src.kernels.triton.config import DTYPES
from glax._src.kernels.triton.support import installation

CHUNK = 64  # tokens between two states that the forward saves
WIDEST = 128  # numbers of a state
MOST_NUMBERS = 2**31  # of all states of a sequence, and rows: offsets within them are int32
WARP = 32
QUARTERS = 4  # of a multiprocessor; each begins one instruction in a cycle
MOST_WARPS = 16  # on a quarter, of sequences that are cut
SHORTEST = 4 * CHUNK  # tokens of a segment, at least


@dataclasses.dataclass(frozen=True)
class SelectiveConfig(Config):
    """Configure a Triton kernel of the selective scan. Its programs have one warp.

    lanes: the lanes of the warp that share a channel, up to 32. own: the neighbouring channels that a lane holds, up to 16.
    span: the tokens that are unrolled, up to 64; x and dt are read span tokens ahead. These are powers of two. segment: the
    tokens of a part of a sequence that a program scans, a multiple of 64, or None for whole sequences. Raises ValueError, which
    names the field, for any other value.
    """

    lanes: int = 2
    own: int = 1
    span: int = 8
    segment: int | None = None

    def __post_init__(self):
        for name, most in (("lanes", WARP), ("own", 16), ("span", CHUNK)):
            check_field(name, getattr(self, name), 1, most, power_of_two=True)
        if self.segment is not None and (type(self.segment) is not int or self.segment < CHUNK or self.segment % CHUNK):
            raise ValueError(f"segment must be a multiple of {CHUNK} or None, got {self.segment!r:.80}")

    @property
    def channels(self) -> int:
        """Return the number of channels that a program has."""
        return WARP // self.lanes * self.own


def forward_config(operands: SelectiveOperands) -> SelectiveConfig:
    """Return the config of the forward, in which a lane holds up to 8 numbers of a state.

    Sequences are cut, or lanes added, where few warps run (`filling`). If `filling` does neither and a quarter of a
    multiprocessor has fewer than 4 warps, a lane holds half as many numbers.
    """
    start = SelectiveConfig(max(1, bucket(operands.A.shape[1]) // 8), 1, 8)
    config = filling(start, operands)
    if config == start and warps(config, operands) < 4:
        return wider(config, operands) or config
    return config


def gradient_config(operands: SelectiveOperands) -> SelectiveConfig:
    """Return the config of the gradient, in which a lane holds up to 8 numbers, of two channels.

    With a longer span registers have no room for three warps on each quarter of a multiprocessor.
    """
    span = 4 if capability()[0] == 9 else 2
    return filling(SelectiveConfig(max(1, bucket(operands.A.shape[1]) // 4), 2, span), operands)


def warps(config: SelectiveConfig, operands: SelectiveOperands) -> float:
    """Return the mean number of warps that a scan of whole sequences gives each quarter of a multiprocessor (four on each)."""
    return operands.states.shape[0] * -(-operands.A.shape[0] // config.channels) / (QUARTERS * multiprocessors())


def wider(config: SelectiveConfig, operands: SelectiveOperands) -> SelectiveConfig | None:
    """Return the config with twice the lanes for each channel. Return None if these would be more than 32, or if a lane would
    hold fewer than two numbers of a state."""
    lanes = 2 * config.lanes
    return dataclasses.replace(config, lanes=lanes) if lanes <= min(WARP, bucket(operands.A.shape[1]) // 2) else None


def filling(config: SelectiveConfig, operands: SelectiveOperands) -> SelectiveConfig:
    """Return the config with segments, or with more lanes, if a quarter of a multiprocessor has few warps.

    With fewer than two warps, sequences of 512 tokens or more on average are cut into segments of at least 256 tokens, such
    that a quarter has up to 16 warps. All segments have one length, from the average: a long sequence among many short ones
    stays whole. If nothing is cut, the lanes of a channel are doubled as long as a quarter then has at most one warp.
    """
    (G, T), sequences = operands.x.shape[:2], operands.states.shape[0]
    tokens = G * T // max(sequences, 1)  # of a sequence, on average
    found = warps(config, operands)
    if 0 < found < 2 and tokens >= 2 * SHORTEST:
        parts = min(int(MOST_WARPS / found), tokens // SHORTEST)
        return dataclasses.replace(config, segment=-(-tokens // (parts * CHUNK)) * CHUNK)
    more = wider(config, operands)
    return filling(more, operands) if more and warps(more, operands) <= 1 else config


def refusal(operands: SelectiveOperands) -> str | None:
    """Return why the Triton kernels do not run a scan, or None."""
    x, N = operands.x, operands.A.shape[1]
    if any(is_symbol(n) for n in (*x.shape, N, *operands.states.shape)):
        return "takes shapes that are known while tracing, not symbols"
    if str(x.dtype) not in DTYPES or operands.A.dtype != "float32":
        return f"takes {', '.join(DTYPES)} with states in float32, x is {x.dtype} and states {operands.A.dtype}"
    if N > WIDEST:
        return f"takes states of up to {WIDEST} numbers, got N={N}"
    if operands.A.size >= MOST_NUMBERS or x.shape[0] * x.shape[1] >= MOST_NUMBERS:
        return f"takes fewer than 2^31 numbers of a sequence's states, and rows, got {list(operands.A.shape)} and {list(x.shape)}"
    denied = known_miscompile("selective_scan/triton/gpu") or known_miscompile("selective_scan.vjp/triton/gpu")
    return denied or installation()
