"""Form weights from quantized numbers and the scales that stand beside them in a checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# What a name of a weight has behind it in the names of the tensors that belong to it.
SCALES = ("_scale_inv", "_scale")
FACTOR, DIVISOR = "_scale_2", "_global_scale"
ZERO, SHAPE, PACKED = "_zero_point", "_shape", "_packed"
BESIDE = (*SCALES, FACTOR, DIVISOR, ZERO, SHAPE)
AT_ONCE = 128  # rows that are formed together, in float32

Block = tuple[int, int]  # rows and columns that share a scale; 0 for all


def e2m1_pairs() -> np.ndarray:
    """Return the two numbers of each byte of 4-bit floats, [256, 2]: first that of its lower bits."""
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers, byte = np.concatenate([half, -half]), np.arange(256)
    return np.stack([numbers[byte & 15], numbers[byte >> 4]], -1)


E2M1 = e2m1_pairs()


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Hold the arrays, as a file has them, of one weight [rows, columns]:

        weight[i, j] = (code[i, j] - zero[i // R, j // C]) scale[i // R, j // C] factor / divisor

    R, C: `block`. Codes are int8, float8, two 4-bit floats in a byte, or integers of 4 or 8 bits in words of int32, of which the
    lowest bits come first and 2^(bits - 1) stands for 0. scale: float8, float32 or narrower, or uint8 for 2^(scale - 127).
    """

    codes: np.ndarray
    columns: int
    scale: np.ndarray
    block: Block
    zero: np.ndarray | None

    def rows(self, rows: slice, dtype: np.dtype) -> np.ndarray:
        """Return some rows of the weight, formed in float32 and rounded to `dtype`."""
        first, last, _ = rows.indices(self.codes.shape[-2])
        result = np.empty((last - first, self.columns), dtype)
        for start in range(first, last, AT_ONCE):
            stop = min(start + AT_ONCE, last)
            values, at = numbers(self.codes[start:stop], self.columns), np.arange(start, stop) // self.block[0]
            if self.zero is not None:
                values = values - self.wide(self.zero[at])
            result[start - first : stop - first] = values * self.wide(self.scale[at])
        return result

    def wide(self, x: np.ndarray) -> np.ndarray:
        """Return x [rows, blocks] by column."""
        return np.repeat(x, self.block[1], -1)[:, : self.columns]


def columns_of(codes: Sequence[int], dtype: np.dtype, shape: np.ndarray | None) -> int:
    """Return the columns of a weight from the shape and dtype of its codes. shape: what stands beside packed integers, or None.
    Raises ValueError for a shape of no such weight."""
    if dtype == np.uint8:
        return 2 * codes[-1]
    if dtype != np.int32:
        return codes[-1]
    if shape is None or shape.shape != (len(codes),) or any(shape[:-1] != codes[:-1]) or shape[-1] < 1:
        wanted = [*codes[:-1], "columns"]
        raise ValueError(f"{SHAPE} beside it must be {wanted}, got {None if shape is None else shape.tolist()}")
    return int(shape[-1])


def numbers(codes: np.ndarray, columns: int) -> np.ndarray:
    """Return codes [rows, ...] as float32 [rows, columns]."""
    if codes.dtype == np.uint8:
        return E2M1[codes].reshape(len(codes), -1)
    if codes.dtype == np.int32:
        codes = unpacked(codes, columns, packed_bits(codes.shape[-1], columns))
    return codes.astype(np.float32)


def packed_bits(words: int, columns: int) -> int:
    """Return the bits of each of `columns` integers in `words` words of 32 bits. Raises ValueError unless they are 4 or 8."""
    for bits in (4, 8):
        if words == -(-columns * bits // 32):
            return bits
    raise ValueError(f"must hold {columns} integers of 4 or 8 bits a row, got {words} words of 32 bits")


def unpacked(words: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """Return the integers [rows, columns] of 4 or 8 bits in words [rows, words], as int16."""
    content = np.ascontiguousarray(words).astype("<i4").view(np.uint8).astype(np.int16)
    if bits == 4:
        content = np.stack([content & 15, content >> 4], -1).reshape(len(words), -1)
    return content[:, :columns] - 2 ** (bits - 1)


def weight_of(codes: np.ndarray, beside: Mapping[str, np.ndarray], blocks: Sequence[Block]) -> Quantized:
    """Return the weight of these codes. beside: the arrays beside it, by the ends of their names. blocks: those that the config
    names. Raises ValueError for scales that fit no block."""
    rows, columns = codes.shape[-2], columns_of(codes.shape, codes.dtype, beside.get(SHAPE))
    scale = beside[next(name for name in SCALES if name in beside)]
    scale, block = scales_by_block(scale, (rows, columns), blocks)
    if FACTOR in beside:
        scale = scale * np.float32(beside[FACTOR].reshape(()))
    if DIVISOR in beside:
        scale = scale / np.float32(beside[DIVISOR].reshape(()))
    zero = beside.get(ZERO)
    if zero is not None:
        if zero.dtype == np.int32:
            zero = unpacked(zero.T, rows, packed_bits(codes.shape[-1], columns)).T
        zero = zero.astype(np.float32).reshape(scale.shape)
    return Quantized(codes, columns, scale, block, zero)


def scales_by_block(scale: np.ndarray, shape: Block, blocks: Sequence[Block]) -> tuple[np.ndarray, Block]:
    """Return (the scales by rows and columns of blocks, in float32, the rows and columns of a block). shape: of the weight."""
    rows, columns = shape
    given = scale.shape
    scale = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(1, 1), shape
    scale = scale[:, None] if scale.ndim == 1 else scale
    for block in blocks:
        block = block[0] or rows, block[1] or columns
        if scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return scale, block
    if scale.ndim == 2 and len(scale) == rows and columns % scale.shape[1] == 0:
        return scale, (1, columns // scale.shape[1])
    named = " or ".join(f"blocks of {list(block)}" for block in blocks) or "whole rows"
    raise ValueError(f"must be one number, or fit {named} of {list(shape)}, got {given}")
