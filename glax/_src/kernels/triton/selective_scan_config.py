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


@dataclasses.dataclass(frozen=True)
class SelectiveConfig(Config):
    """Configure a Triton kernel of the selective scan. Its programs have one warp.

    lanes: the lanes that share a channel, up to 32. own: the neighbouring channels that a lane holds, up to 16. span: the tokens
    that are unrolled, up to 64; x and dt are read so far ahead. All are powers of two. Raises ValueError, which names the field,
    for any other value.
    """

    lanes: int = 2
    own: int = 1
    span: int = 8

    def __post_init__(self):
        for name, most in (("lanes", WARP), ("own", 16), ("span", CHUNK)):
            check_field(name, getattr(self, name), 1, most, power_of_two=True)

    @property
    def channels(self) -> int:
        """Return the number of channels of a program."""
        return WARP // self.lanes * self.own


def forward_config(operands: SelectiveOperands) -> SelectiveConfig:
    """Return a config with up to 8 numbers in a lane."""
    return with_more_lanes(SelectiveConfig(max(1, bucket(operands.A.shape[1]) // 8), 1, 8), operands)


def gradient_config(operands: SelectiveOperands) -> SelectiveConfig:
    """Return a config with up to 8 numbers in a lane, of two channels. With more tokens together registers have no room for three
    warps on each quarter of a multiprocessor."""
    span = 4 if capability()[0] == 9 else 2
    return with_more_lanes(SelectiveConfig(max(1, bucket(operands.A.shape[1]) // 4), 2, span), operands)


def with_more_lanes(config: SelectiveConfig, operands: SelectiveOperands) -> SelectiveConfig:
    """Return the config with more lanes to a channel, where quarters of multiprocessors would have no warp.

    A lane has two numbers or more: with fewer, sums over numbers take the time.
    """
    D, N = operands.A.shape
    wider = dataclasses.replace(config, lanes=min(2 * config.lanes, WARP))
    warps = operands.states.shape[0] * -(-D // wider.channels)
    if 2 * wider.lanes > bucket(N) or wider == config or warps > QUARTERS * multiprocessors():
        return config
    return with_more_lanes(wider, operands)


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
