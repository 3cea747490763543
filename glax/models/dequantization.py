"""Form weights from quantized numbers and their scales, which are other tensors of a checkpoint."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

# What a name of a weight has behind it in the names of the tensors that belong to it.
SCALES = ("_scale_inv", "_scale")
FACTOR, DIVISOR = "_scale_2", "_global_scale"
ZERO, SHAPE, PACKED = "_zero_point", "_shape", "_packed"
BESIDE = (*SCALES, FACTOR, DIVISOR, ZERO, SHAPE)
ROWS_AT_ONCE = 128  # rows that are formed together, in float32
# Weights of at least so many numbers are formed by so many threads, unless there are fewer.
THREADED_SIZE, THREADS = 2**20, 8

ScaleBlock = tuple[int, int]  # rows and columns that share a scale; 0 for all
WHOLE: ScaleBlock = 0, 0
FLOAT_SCALES = tuple(np.dtype(x) for x in (np.float16, np.float32, ml_dtypes.bfloat16))
# The dtypes of two floats of 4 bits, of a power of 2, and of floats of 8 bits.
FLOAT4, POWER, FLOAT8 = np.dtype(np.uint8), np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)


def pairs_of_4_bits(numbers: np.ndarray) -> np.ndarray:
    """Return a table [256, 2] of the two numbers in each byte; the first is the number of its lower four bits. numbers: the
    number of each four bits, [16]."""
    byte = np.arange(256)
    return np.stack([numbers[byte & 15], numbers[byte >> 4]], -1)


E2M1 = pairs_of_4_bits(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32))
INT4 = pairs_of_4_bits(np.arange(-8, 8, dtype=np.float32))
INT8 = np.arange(-128, 128, dtype=np.float32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """Hold the codes and scales of one weight [rows, columns]:

        weight[i, j] = (code[i, j] - zero[i // R, j // C]) scale[i // R, j // C]

    codes: [rows, ...], int8, float8, two 4-bit floats in a byte of uint8, or integers of 4 or 8 bits in words of int32, of which
    the lowest bits come first and 2^(bits - 1) stands for 0. scale, zero: [ceil(rows / R), ceil(columns / C)], float32; zero is
    0 if None. block: (R, C).
    """

    codes: np.ndarray
    columns: int
    scale: np.ndarray
    block: ScaleBlock
    zero: np.ndarray | None

    def rows(self, rows: slice, dtype: np.dtype) -> np.ndarray:
        """Return some rows of the weight, formed in float32 and rounded to `dtype`, many of them by several threads."""
        first, last, _ = rows.indices(self.codes.shape[-2])
        result, starts = np.empty((last - first, self.columns), dtype), range(first, last, ROWS_AT_ONCE)

        def form(start: int):
            stop = min(start + ROWS_AT_ONCE, last)
            result[start - first : stop - first] = self.formed_rows(start, stop)

        if result.size < THREADED_SIZE:
            for start in starts:
                form(start)
        else:
            with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
                list(threads.map(form, starts))
        return result

    def formed_rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows `start` to `stop` - 1 of the weight, [stop - start, columns] in float32."""
        values, at = numbers(self.codes[start:stop], self.columns), np.arange(start, stop) // self.block[0]
        scale, zero, size = self.scale[at], None if self.zero is None else self.zero[at], self.block[1]
        if self.columns % size:  # the last block of a row is not whole
            scale = np.repeat(scale, size, -1)[:, : self.columns]
            zero = None if zero is None else np.repeat(zero, size, -1)[:, : self.columns]
            size = 1
        values = values.reshape(len(values), -1, size)
        if zero is not None:
            values = values - zero[..., None]
        np.multiply(values, scale[..., None], out=values)
        return values.reshape(len(values), -1)


def columns_of(code_shape: Sequence[int], dtype: np.dtype, shape: np.ndarray | None) -> int:
    """Return the number of columns of a weight. code_shape, dtype: those of its codes. shape: the tensor beside it that holds
    the weight's shape, which codes in int32 need; else None.

    Raises ValueError if the codes have fewer than 2 axes or an axis of length 0, or if `shape` is missing or does not fit them.
    """
    if len(code_shape) < 2 or 0 in code_shape:
        raise ValueError(f"it must have at least 2 axes, and none of length 0, got {list(code_shape)}")
    if dtype == FLOAT4:
        return 2 * code_shape[-1]
    if dtype != np.int32:
        return code_shape[-1]
    is_shape = shape is not None and shape.dtype.kind in "iu" and shape.shape == (len(code_shape),)
    if shape is None or not is_shape or any(shape[:-1] != code_shape[:-1]) or shape[-1] < 1:
        wanted, given = [*code_shape[:-1], "columns"], None if shape is None else shape.tolist()
        raise ValueError(f"what is called {SHAPE} beside it must be integers {wanted}, got {given}")
    return int(shape[-1])


def numbers(codes: np.ndarray, columns: int) -> np.ndarray:
    """Return the numbers that codes [rows, ...] stand for, before zero and scale, as float32 [rows, columns].

    codes: of the dtypes that `QuantizedWeight` lists. columns: the columns of the weight.
    """
    if codes.dtype == FLOAT4:
        return taken(E2M1, codes)
    if codes.dtype == np.int32:
        return unpacked(codes, columns, packed_bits(codes.shape[-1], columns))
    if codes.dtype == FLOAT8:
        return taken(E4M3, codes)
    return codes.astype(np.float32)


def taken(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return table[codes], the numbers of each byte of codes [rows, ...], as [rows, numbers]. table: [256], or [256, 2] for two
    numbers a byte."""
    rows = table.reshape(256, -1)
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))) if table.ndim == 2 else rows
    found = np.take(whole[:, 0], np.ascontiguousarray(codes).view(np.uint8))
    return found.view(np.float32).reshape(len(codes), -1)


def packed_bits(words: int, columns: int) -> int:
    """Return the bits of each of `columns` integers in `words` words of 32 bits. Raises ValueError unless they are 4 or 8, or
    if a row is so short that they may be either."""
    fitting = [bits for bits in (4, 8) if words == -(-columns * bits // 32)]
    if len(fitting) == 1:
        return fitting[0]
    raise ValueError(f"its codes must hold {columns} integers of 4 or 8 bits a row, got {words} words of 32 bits")


def unpacked(words: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """Return the integers [rows, columns] of 4 or 8 bits in words [rows, words], as float32."""
    content = np.ascontiguousarray(words).astype("<i4", copy=False)
    return taken(INT4 if bits == 4 else INT8, content)[:, :columns]


def weight_of(codes: np.ndarray, beside: Mapping[str, np.ndarray], blocks: Sequence[ScaleBlock]) -> QuantizedWeight:
    """Return the weight of these codes, as `QuantizedWeight` describes them.

    beside: its other arrays, by the ends of their names. Scales are float8, float32 or narrower, or uint8 for 2^(scale - 127);
    the number `FACTOR` multiplies them, and `DIVISOR` divides them. blocks: the blocks that the config names. Raises ValueError
    for scales that fit no block.
    """
    rows, columns = codes.shape[-2], columns_of(codes.shape, codes.dtype, beside.get(SHAPE))
    scale = beside[next(name for name in SCALES if name in beside)]
    check_dtypes(codes.dtype, scale.dtype, beside)
    scale, block = scales_by_block(scale, (rows, columns), blocks)
    if FACTOR in beside:
        scale = scale * np.float32(beside[FACTOR].reshape(()))
    if DIVISOR in beside:
        scale = scale / np.float32(beside[DIVISOR].reshape(()))
    zero = beside.get(ZERO)
    if zero is not None:
        if zero.dtype == np.int32:
            zero = unpacked(zero.T, rows, packed_bits(codes.shape[-1], columns)).T
        zero = zero.astype(np.float32, copy=False).reshape(scale.shape)
    return QuantizedWeight(codes, columns, scale, block, zero)


def check_dtypes(code_dtype: np.dtype, scale: np.dtype, beside: Mapping[str, np.ndarray]):
    """Raise ValueError if no format combines the dtypes of codes and scales, or if `beside` lacks an array or has one too many.

    Floats of 4 bits have scales of float8 and a factor (NVFP4), or powers of 2 (MXFP4). scale: the dtype of the scales. beside:
    the arrays beside the codes, by the ends of their names.
    """
    factors = [end for end in (FACTOR, DIVISOR) if end in beside]
    allowed = {FLOAT4: (FLOAT8, POWER), FLOAT8: (*FLOAT_SCALES, POWER)}.get(code_dtype, FLOAT_SCALES)
    if scale not in allowed:
        wanted = " or ".join(x.name for x in allowed)
        raise ValueError(f"the scales of {code_dtype.name} must be of {wanted}, got {scale.name}")
    has_factor = code_dtype == FLOAT4 and scale == FLOAT8
    if len(factors) != has_factor:
        needed = "one of" if has_factor else "none of"
        got = " and ".join(factors) or "none"
        raise ValueError(f"it must have {needed} {FACTOR} and {DIVISOR} with scales of {scale.name}, got {got}")
    if all(end in beside for end in SCALES):
        raise ValueError(f"it must have one of {SCALES[0]} and {SCALES[1]}, got both")


def scales_by_block(
    scale: np.ndarray, shape: tuple[int, int], blocks: Sequence[ScaleBlock]
) -> tuple[np.ndarray, ScaleBlock]:
    """Return (the scales [ceil(rows / R), ceil(columns / C)] in float32, the block (R, C) of rows and columns that share a
    scale).

    scale: one number, a number for each row, or a number for each block; uint8 for powers of 2. shape: (rows, columns) of the
    weight. blocks: the blocks that the config names. Raises ValueError if the scales fit none of them and no equal parts of
    rows.
    """
    rows, columns = shape
    given = scale.shape
    scale = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == POWER else scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(1, 1), shape
    scale = scale[:, None] if scale.ndim == 1 else scale
    for block in blocks:
        block = block[0] or rows, block[1] or columns
        if scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return scale, block
    if scale.ndim == 2 and len(scale) == rows and scale.size and columns % scale.shape[1] == 0:
        return scale, (1, columns // scale.shape[1])
    named = " or ".join(f"blocks of {list(block)}" for block in blocks) or "whole rows"
    raise ValueError(f"its scales must be one number, or fit {named} of {list(shape)}, got {given}")
