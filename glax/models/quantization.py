"""Read checkpoints whose weights are stored in float8 with one scale for each block, and refuse other quantizations by name."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np

from glax.models.config import ModelConfig, Options
from glax.models.folders import Weights, named_dtype

KEY, SCALE, FLOAT8 = "quantization_config", "_scale_inv", "F8_E4M3"
REMEDY = (
    "load the checkpoint that it was made from, or dequantize it with transformers: model.dequantize(), then "
    "save_pretrained"
)
AT_ONCE = 128  # rows that are dequantized together
READ_INSIDE = frozenset({"load_in_4bit", "load_in_8bit"})  # another quantization, whatever quant_method says
# Options of quantization_config that say which weights are quantized, which the files say too, or that choose kernels.
IGNORED = ("dequantize", "fmt", "ignored_layers", "modules_to_convert", "modules_to_not_convert")


def without_quantization(config: ModelConfig) -> tuple[ModelConfig, tuple[int, int] | None]:
    """Return the config without `quantization_config`, and the (rows, columns) of a block that shares one scale.

    The block is (0, 0) if it is the whole weight, and None if nothing is quantized. Raises UnsupportedOption for another
    quantization than float8 with scales of its weights.
    """
    values = config.values
    given = values.pop(KEY, None)
    if not given:
        return (config if given is None else ModelConfig.of(values)), None
    options = Options(config.values, frozenset(config.values))
    inner = options.part(KEY, given, read=READ_INSIDE)
    method = inner.take("quant_method", None)
    if method != "fp8":
        raise options.unsupported(KEY, f"quant_method must be 'fp8', got {method!r}. Otherwise {REMEDY}")
    inner.choice("activation_scheme", "dynamic", ("dynamic",))
    inner.choice("scale_fmt", "float", ("float",))
    inner.choice("expert_dtype", "fp8", ("fp8",))
    inner.ignore(*IGNORED)
    block = inner.take("weight_block_size", (128, 128))
    inner.finish()
    options.finish()
    return ModelConfig.of(values), block_size(options, block)


def block_size(options: Options, block: Any) -> tuple[int, int]:
    if block is None:
        return 0, 0
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block):
        raise options.unsupported(KEY, f"weight_block_size must be two integers of at least 1, got {block!r}")
    return block[0], block[1]


class DequantizedWeights(Weights):
    """Hold the tensors of a folder whose weights may be float8. Such a weight [..., rows, columns] is read as

        weight[i, j] * scale[i // block[0], j // block[1]]

    formed in float32 and rounded to the config's dtype, bfloat16 if it names none. The scale is the tensor of the same name with
    "_scale_inv" behind it, or the one number that `Names.scales` names. The models' own code also rounds activations to float8,
    and glax does not.
    """

    def __init__(self, folder: Path, config: Mapping, block: tuple[int, int]):
        super().__init__(folder)
        self.block = block
        self.to = named_dtype(config) or jnp.dtype(jnp.bfloat16)
        self.scales: tuple[tuple[str, str], ...] = ()  # `Names.scales`

    def name_scales(self, rules: tuple[tuple[str, str], ...]):
        self.scales = rules

    def scale_name(self, name: str) -> str:
        for pattern, replacement in self.scales:
            if re.search(pattern, name):
                return re.sub(pattern, replacement, name)
        return name + SCALE

    def is_float8(self, name: str) -> bool:
        return self.header(name).get_dtype() == FLOAT8

    def names(self) -> set[str]:
        return super().names() - {self.scale_name(name) for name in self.files if self.is_float8(name)}

    def dtype(self, name: str) -> jnp.dtype:
        return self.to if self.is_float8(name) else super().dtype(name)

    def read(self, name: str) -> np.ndarray:
        if not self.is_float8(name):
            return super().read(name)
        whole: tuple[EllipsisType, slice] = ..., slice(None)
        tensor, (expert, rows) = self.parts.get(name, (name, whole))
        if rows is None:  # np.newaxis, by `Weights.divide_rows`
            raise ValueError(
                f"{tensor} in {self.files[tensor]} must not be float8, because its rows are tensors of their own"
            )
        if (scale := self.scale_name(tensor)) not in self.files:
            raise ValueError(f"{tensor} in {self.files[tensor]} is float8 and must come with {scale}")
        weight = self.mapped(tensor)
        scale, block = self.scale_of(tensor, weight.shape)
        return dequantized(weight[expert], scale[expert], block, rows, self.to)

    def scale_of(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, int]]:
        """Return (the scale of each block, the rows and columns of a block). Raises ValueError if the scales do not fit the
        blocks."""
        of = self.scale_name(name)
        scale = np.asarray(self.mapped(of), np.float32)
        rows, columns = shape[-2:]
        if scale.size == 1:
            return np.broadcast_to(scale.reshape(()), (*shape[:-2], 1, 1)), (rows, columns)
        block = self.block[0] or rows, self.block[1] or columns
        wanted = (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape != wanted:
            raise ValueError(
                f"{of} in {self.files[of]} must be {list(wanted)} for blocks of {list(block)}, got {scale.shape}"
            )
        return scale, block


def dequantized(
    weight: np.ndarray, scale: np.ndarray, block: tuple[int, int], rows: slice, dtype: np.dtype
) -> np.ndarray:
    """Return rows of weight [..., rows, columns] times the scales of their blocks, in `dtype`."""
    first, last, _ = rows.indices(weight.shape[-2])
    result = np.empty((*weight.shape[:-2], last - first, weight.shape[-1]), dtype)
    for start in range(first, last, AT_ONCE):  # in float32 a few rows at a time
        stop = min(start + AT_ONCE, last)
        wide = np.repeat(scale[..., np.arange(start, stop) // block[0], :], block[1], -1)[..., : weight.shape[-1]]
        result[..., start - first : stop - first, :] = weight[..., start:stop, :].astype(np.float32) * wide
    return result
