"""Define the block sizes of the kernels of softmax attention, and state which calls these kernels refuse.

Importing this module imports neither Triton nor jax-triton.
"""

import dataclasses

from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import is_symbol
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.common.softmax import SoftmaxOperands
from glax._src.kernels.triton.support import installation

WIDEST = 256
DTYPES = ("bfloat16", "float16", "float32")
FEW_ROWS, FEW_SCORES = 16, 2**15  # a product of all rows with all keys is faster below both


def check_block(config, *names: str):
    """Check the fields that are rows, keys, warps or stages of a block."""
    for name in names:
        if name.endswith("warps"):
            check_field(name, getattr(config, name), 1, 32, power_of_two=True)
        elif name.endswith("stages"):
            check_field(name, getattr(config, name), 1, 16)
        else:
            check_field(name, getattr(config, name), 16, 256, power_of_two=True)


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig(Config):
    """Configure the Triton kernel of softmax attention's forward.

    rows, keys: those whose scores are formed together, powers of two from 16 to 256. warps: the warps of a program, a power of
    two. stages: the stages of its software pipeline. Raises ValueError, which names the field, for any other value.
    """

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 2

    def __post_init__(self):
        check_block(self, "rows", "keys", "warps", "stages")


@dataclasses.dataclass(frozen=True)
class SoftmaxGradientConfig(Config):
    """Configure the Triton kernels of softmax attention's gradient.

    rows, keys, warps, stages: as in `SoftmaxConfig`, of the kernel that forms dq. own_keys, read_rows, key_warps, key_stages: of
    the kernel that forms dk and dv, whose programs own keys and read rows. read_rows divides rows.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2
    own_keys: int = 64
    read_rows: int = 64
    key_warps: int = 8
    key_stages: int = 1

    def __post_init__(self):
        check_block(self, *(field.name for field in dataclasses.fields(self)))
        if self.rows % self.read_rows:
            raise ValueError(f"read_rows must divide rows, {self.rows}, got {self.read_rows}")


def widest(operands: SoftmaxOperands) -> int:
    return max(operands.q.shape[-1], operands.v.shape[-1])


def forward_config(operands: SoftmaxOperands) -> SoftmaxConfig:
    """Return the block sizes of the forward for the heads of a call, with which no program spills registers."""
    narrow, is_large = widest(operands) <= 128, capability()[0] in (9, 10)
    if operands.q.dtype == "float32":
        return SoftmaxConfig(64, 32, 4 if narrow else 8, 2)
    if not is_large:
        return SoftmaxConfig(64, 32, 4, 2) if not narrow else SoftmaxConfig(128, 32, 4, 2)
    return SoftmaxConfig(128, 64, 8, 3) if narrow else SoftmaxConfig(128, 64, 8, 2)


def gradient_config(operands: SoftmaxOperands) -> SoftmaxGradientConfig:
    """Return the block sizes of the gradient, in the same way."""
    narrow, is_large = widest(operands) <= 128, capability()[0] in (9, 10)
    if operands.q.dtype == "float32":
        return SoftmaxGradientConfig(32, 32, 4, 1, 32, 32, 4, 1)
    if not is_large:
        return SoftmaxGradientConfig(64, 32, 4, 1, 32, 32, 4, 1)
    if narrow:
        return SoftmaxGradientConfig(128, 64, 8, 2, 128, 64, 8, 2)
    return SoftmaxGradientConfig(128, 32, 8, 2, 64, 64, 8, 1)


def refusal(operands: SoftmaxOperands, scale: float) -> str | None:
    """Return why the Triton kernels do not support a call, or None."""
    q, k, v = operands.q, operands.k, operands.v
    sizes = (*q.shape, *k.shape, *v.shape)
    if any(is_symbol(n) for n in sizes):
        return "takes shapes that are known while tracing, got symbols"
    if 0 in sizes:
        return f"takes arrays with elements, got query {list(q.shape)} and key {list(k.shape)}"
    if str(q.dtype) not in DTYPES:
        return f"takes query in {' or '.join(DTYPES)}, got {q.dtype}"
    if widest(operands) > WIDEST:
        return f"takes heads up to {WIDEST} wide, got query {q.shape[-1]} and value {v.shape[-1]} wide"
    if scale <= 0:
        return f"takes a scale above 0, got {scale}"
    if q.shape[1] < FEW_ROWS and q.shape[1] * k.shape[1] <= FEW_SCORES:
        return f"takes {FEW_ROWS} rows or {FEW_SCORES} scores, got {q.shape[1]} rows of {k.shape[1]} keys"
    return known_miscompile("softmax/triton/gpu") or installation()
