"""Define the block sizes of the kernels of softmax attention, and state which calls these kernels refuse.

Importing this module imports neither Triton nor jax-triton.
"""

import dataclasses

from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import is_symbol
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.common.softmax import SoftmaxOperands, StepOperands
from glax._src.kernels.triton.config import DTYPES, check_block, has_large_tiles, has_little_memory, width
from glax._src.kernels.triton.support import installation

WIDEST, WIDEST_FLOAT32 = 256, 128  # wider ones would spill the registers of whole tiles
WIDEST_VALUES_WITHIN, WIDEST_REST = 512, 128  # of keys whose first channels are values, and of their other channels
MOST_PARTS, PART_KEYS = 256, 128  # of a step: the most parts, and the fewest rows of a cache for each
FEW_ROWS, FEW_SCORES = 16, 2**15  # with fewer rows and up to so many scores one product is faster


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig(Config):
    """Configure the Triton kernel of softmax attention's forward.

    rows, keys: the numbers of rows and keys whose scores are formed together, powers of two from 16 to 256. warps: the warps of
    a program, a power of two. stages: the stages of its software pipeline. Raises ValueError, which names the field, for any
    other value.
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

    rows, keys, warps, stages: as in `SoftmaxConfig`, for the kernel that forms dq. own_keys, read_rows, key_warps, key_stages:
    the keys, rows, warps and stages of the kernel that forms dk and dv, whose programs own keys and read rows. read_rows
    divides rows. apart: whether that kernel runs twice, once for dk and once for dv, which takes five products in place of
    four, but half of the registers.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2
    own_keys: int = 64
    read_rows: int = 64
    key_warps: int = 8
    key_stages: int = 1
    apart: bool = False

    def __post_init__(self):
        check_block(self, *(field.name for field in dataclasses.fields(self) if field.name != "apart"))
        if type(self.apart) is not bool:
            raise ValueError(f"apart must be a bool, got {self.apart!r:.80}")
        if self.rows % self.read_rows:
            raise ValueError(f"read_rows must divide rows, {self.rows}, got {self.read_rows}")


@dataclasses.dataclass(frozen=True)
class SoftmaxStepConfig(Config):
    """Configure the Triton kernel of a step of softmax attention.

    keys: the number of keys whose scores are formed together. rows: the most heads of q that a program takes. Both are powers
    of two from 16 to 256. parts: the number of parts into which the keys of a sequence are cut. warps, stages: as in
    `SoftmaxConfig`.
    """

    keys: int = 32
    rows: int = 16
    parts: int = 1
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        check_block(self, "keys", "rows", "warps", "stages")
        check_field("parts", self.parts, 1, MOST_PARTS)


def widest(operands: SoftmaxOperands) -> int:
    """Return the larger of the widths of a head of keys and of values."""
    return max(operands.q.shape[-1], operands.v.shape[-1])


def most_keys(operands: SoftmaxOperands, keys: int) -> int:
    """Return the most keys, up to `keys`, that a program may take together: `keys` itself if rows read whole intervals. If rows
    read chosen blocks, it is the largest power of two up to `keys` and 31 size + 1, with `size` the keys of a block.

    So many keys touch at most 32 blocks, and a word of 32 bits has a bit for each of these.
    """
    if operands.blocks is None:
        return keys
    return min(keys, 1 << (31 * operands.blocks.size + 1).bit_length() - 1)


def check_keys(operands: SoftmaxOperands, **sizes: int):
    """Raise ValueError if one of `sizes`, {name of a config's field: its number of keys}, is more than `most_keys` allows. The
    message has the name."""
    for name, keys in sizes.items():
        if keys > (most := most_keys(operands, keys)):
            size = getattr(operands.blocks, "size", None)
            raise ValueError(f"{name} must be at most {most} where rows read chosen blocks of {size} keys, got {keys}")


def forward_config(operands: SoftmaxOperands) -> SoftmaxConfig:
    """Return the block sizes of the forward for the widths and dtype of a call. They let few registers spill, and only between
    the kernel's loops."""
    found = forward_sizes(operands)
    return dataclasses.replace(found, keys=most_keys(operands, found.keys))


def forward_sizes(operands: SoftmaxOperands) -> SoftmaxConfig:
    """Return the config of the forward for rows that read whole intervals: the sizes before `most_keys` limits the keys."""
    is_narrow = widest(operands) <= 128
    if operands.q.dtype == "float32":
        return SoftmaxConfig(32, 32, 4, 2)
    if not has_large_tiles():
        return SoftmaxConfig(128 if is_narrow else 64, 32, 8, 2)
    return SoftmaxConfig(128, 64, 8, 3 if is_narrow else 2)


def gradient_config(operands: SoftmaxOperands) -> SoftmaxGradientConfig:
    """Return the block sizes of the gradient for the widths and dtype of a call. They let few registers spill, and only between
    the kernels' loops."""
    found = gradient_sizes(operands)
    keys, own_keys = most_keys(operands, found.keys), most_keys(operands, found.own_keys)
    return dataclasses.replace(found, keys=keys, own_keys=own_keys)


def gradient_sizes(operands: SoftmaxOperands) -> SoftmaxGradientConfig:
    """Return the config of the gradient for rows that read whole intervals: the sizes before `most_keys` limits the keys."""
    is_narrow = widest(operands) <= 128
    if operands.q.dtype == "float32":
        return SoftmaxGradientConfig(32, 32, 8, 1, 32, 32, 8, 1)
    if not has_large_tiles():
        narrow = SoftmaxGradientConfig(64, 32, 4, 1, 32, 32, 4, 1)
        return narrow if is_narrow else SoftmaxGradientConfig(32, 32, 8, 1, 64, 32, 8, 1, apart=True)
    narrow = SoftmaxGradientConfig(128, 64, 8, 3, 128, 32, 8, 3)
    return narrow if is_narrow else SoftmaxGradientConfig(128, 32, 8, 2, 128, 32, 8, 2, apart=True)


def step_config(operands: StepOperands, value_width: int) -> SoftmaxStepConfig:
    """Return the sizes of a step. value_width: V, the channels of a value.

    Keys are cut into as many parts as let all programs run at the same time, with at least PART_KEYS rows of the cache for
    each. A multiprocessor runs two programs of at most 32 heads of q if it has memory for both and values are at most 256 wide,
    and else one.

    A block has 32 keys, or 16 where 32 would take more than 40 KB. A program has up to 64 heads of q, 32 on GPUs without large
    tiles, and 16 in float32, because its registers hold no more. With values wider than 256 columns a program has 16 heads of q
    as well. On GPUs with large tiles it has 64 where more than 16 heads of q read one head of k: products then read keys of two
    bytes from shared memory.
    """
    q, k = operands.q, operands.k
    group, columns = q.shape[2] // k.shape[2], k.shape[3] + (0 if operands.v is None else value_width)
    keys = 32 if columns * k.dtype.itemsize <= 1280 else 16

    def sizes(rows: int, beside: int, warps: int, stages: int) -> SoftmaxStepConfig:
        programs = q.shape[0] * k.shape[2] * -(-group // rows)
        parts = min(beside * multiprocessors() // programs, k.shape[1] // PART_KEYS, MOST_PARTS)
        return SoftmaxStepConfig(keys, rows, max(parts, 1), warps, stages)

    if width(value_width) > 256:
        from_shared_memory = group > 16 and k.dtype.itemsize == 2 and has_large_tiles()
        return sizes(64 if from_shared_memory else 16, 1, 8, 3)
    most_beside = 1 if has_little_memory() else 2
    if q.dtype == "float32":
        return sizes(16, most_beside, 8, 3)
    if group <= 16:
        return sizes(16, most_beside, 4, 4 if has_large_tiles() else 3)
    rows = min(width(group), 64 if has_large_tiles() else 32)
    return sizes(rows, most_beside if rows == 32 else 1, 8, 3)


def shape_refusal(sizes, got: str) -> str | None:
    """Return why a kernel refuses arrays of these sizes: one of the sizes is a symbol, or 0. Return None if none is. got: the
    call's shapes, for the text."""
    if any(is_symbol(n) for n in sizes):
        return "takes shapes that are known while tracing, got symbols"
    return f"takes arrays with elements, got {got}" if 0 in sizes else None


def refusal(operands: SoftmaxOperands, scale: float) -> str | None:
    """Return why the Triton kernels do not support a call, or None."""
    q, k, v = operands.q, operands.k, operands.v
    got = f"query {list(q.shape)} and key {list(k.shape)}"
    if (why := shape_refusal((*q.shape, *k.shape, *v.shape), got)) is not None:
        return why
    if str(q.dtype) not in DTYPES:
        return f"takes query in {' or '.join(DTYPES)}, got {q.dtype}"
    most = WIDEST_FLOAT32 if q.dtype == "float32" else WIDEST
    if widest(operands) > most:
        return f"takes heads of {q.dtype} up to {most} wide, got query {q.shape[-1]} and value {v.shape[-1]} wide"
    if scale <= 0:
        return f"takes a scale above 0, got {scale}"
    if q.shape[1] < FEW_ROWS and q.shape[1] * k.shape[1] <= FEW_SCORES:
        return f"takes {FEW_ROWS} rows or more than {FEW_SCORES} scores, got {q.shape[1]} rows of {k.shape[1]} keys"
    return known_miscompile("softmax/triton/gpu") or installation()


def step_refusal(operands: StepOperands, scale: float, value_width: int) -> str | None:
    """Return why the Triton kernel does not support a step, or None."""
    q, k, v = operands.q, operands.k, operands.v
    got = f"query {list(q.shape)}, key {list(k.shape)} and values {value_width} wide"
    if (why := shape_refusal((*q.shape, *k.shape, value_width), got)) is not None:
        return why
    dtypes = [str(x.dtype) for x in (q, k, v) if x is not None]
    if not set(dtypes) <= set(DTYPES):
        return f"takes query, key and value in {' or '.join(DTYPES)}, got {', '.join(dtypes)}"
    if v is None:
        rest = k.shape[3] - value_width
        if value_width > WIDEST_VALUES_WITHIN or rest > WIDEST_REST or q.dtype == "float32":
            return (
                f"takes keys whose first {WIDEST_VALUES_WITHIN} channels or fewer are values, with {WIDEST_REST} others or "
                f"fewer, and query of two bytes, got {value_width}, {rest} and {q.dtype}"
            )
    elif max(k.shape[3], value_width) > (most := WIDEST_FLOAT32 if q.dtype == "float32" else WIDEST):
        return f"takes heads of {q.dtype} up to {most} wide, got query {k.shape[3]} and value {value_width} wide"
    if scale <= 0:
        return f"takes a scale above 0, got {scale}"
    return known_miscompile("softmax.step/triton/gpu") or installation()
