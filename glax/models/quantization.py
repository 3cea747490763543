"""Read checkpoints whose weights are quantized, with their scales in other tensors, and refuse other quantizations by name."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from glax.models.config import ModelConfig, Options
from glax.models.dequantization import BESIDE, PACKED, SCALES, SHAPE, WHOLE, ZERO, ScaleBlock, columns_of, weight_of
from glax.models.folders import CONFIG, STORED, Weights, named_dtype, read_optional_object

KEY = "quantization_config"
MODELOPT_FILE, MODELOPT_KEY = "hf_quant_config.json", "quantization"  # of older versions of NVIDIA's Model Optimizer
REMEDY = (
    "load the checkpoint that it was made from, or dequantize it with transformers: model.dequantize(), then "
    "save_pretrained"
)
READ_INSIDE = frozenset({"load_in_4bit", "load_in_8bit"})  # another quantization, whatever quant_method says
# Options of quant_method fp8 that say which weights are quantized, which the files say too, or that choose kernels.
FP8_IGNORED = ("dequantize", "fmt", "ignored_layers", "modules_to_convert", "modules_to_not_convert")
FORMATS = (
    None, "dense", "fakequant", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")
# The kinds of the codes of quantized weights, as safetensors names them.
FLOAT8_KIND, PACKED_KINDS = "F8_E4M3", ("U8", "I32")
INTEGER_KINDS = ("I8", *PACKED_KINDS)
# What belongs to activations and to cached keys and values, which glax does not round.
OF_ACTIVATIONS = re.compile(r"[._](input|output|[kqv])_(scale|zero_point|global_scale)$|\.[kv]_proj\.[kv]_bias$")
# A factor of a layer's inputs, and an order of its columns.
REFUSED = (".pre_quant_scale", "weight_g_idx")


class Scheme(NamedTuple):
    """Describe the quantization that a config names.

    blocks: the (rows, columns) of the blocks of a weight that share a scale, as far as the config names them; `WHOLE` for a
    scale of the whole weight. has_zeros: whether every quantized weight has zero points.
    """

    blocks: tuple[ScaleBlock, ...]
    has_zeros: bool = False


def without_quantization(config: ModelConfig, folder: Path | None = None) -> tuple[ModelConfig, Scheme | None]:
    """Return (the config without `quantization_config`, its `Scheme`); None for weights that are not quantized.

    folder: the folder whose `MODELOPT_FILE` is read if the config has no quantization. Raises UnsupportedOption for a
    quantization that is not supported.
    """
    values, inside = config.values, config.values.get("text_config")
    given, key, file = values.pop(KEY, None), KEY, CONFIG
    if isinstance(inside, dict) and KEY in inside:  # Kimi K3
        values["text_config"] = {key: value for key, value in inside.items() if key != KEY}
        if not given:
            given, key = inside[KEY], f"text_config.{KEY}"
    if not given and folder is not None:
        given, key, file = read_modelopt_file(folder), MODELOPT_KEY, MODELOPT_FILE
    if not given:
        return (config if values == config.values else ModelConfig.of(values)), None
    outer = Options({key: given}, frozenset({key}), model_type=values.get("model_type"), file=file)
    options = outer.part(key, given, read=READ_INSIDE)
    method = options.take("quant_method", "modelopt" if "quant_algo" in options.values else None)
    if not isinstance(method, str) or method not in METHODS:
        raise options.unsupported(
            "quant_method", f"it must be one of {', '.join(map(repr, METHODS))}. Otherwise {REMEDY}"
        )
    scheme = METHODS[method](options)
    options.finish()
    outer.finish()
    return ModelConfig.of(values), scheme


def of_fp8(options: Options) -> Scheme:
    """Return the `Scheme` of the options of transformers' fine-grained float8."""
    options.choice("activation_scheme", "dynamic", ("dynamic",))
    options.choice("scale_fmt", "float", ("float",))
    options.choice("expert_dtype", "fp8", ("fp8",))
    options.ignore(*FP8_IGNORED)
    return Scheme((scale_block(options, "weight_block_size", (128, 128)) or WHOLE,))


def of_compressed_tensors(options: Options) -> Scheme:
    """Return the `Scheme` of the options of vLLM's compressed-tensors. Raises UnsupportedOption for an option that is not
    supported."""
    options.choice("format", None, FORMATS)
    for key, name in (
        ("sparsity_config", "format"),
        ("transform_config", "config_groups"),
        ("moe_sparsity_config", "method"),
    ):
        given = options.take(key, None) or {}
        if not isinstance(given, Mapping) or given.get(name) not in (None, {}, "dense"):
            raise options.unsupported(key, f"it must be empty. Otherwise {REMEDY}")
    blocks, are_symmetric = [], []
    groups = options.part("config_groups", options.take("config_groups", {}), read=frozenset())
    for key in groups.values:
        group = groups.part(key, groups.take(key), read=frozenset())
        group.choice("format", None, FORMATS)
        if group.take("weights", None) is None:
            continue
        weights = group.part("weights", group.values["weights"], read=frozenset())
        weights.choice("num_bits", 8, (4, 8))
        are_symmetric.append(weights.flag("symmetric", True))
        if (block := scale_block(weights, "block_structure", None)) is not None:
            blocks.append(block)
        if (size := weights.integer("group_size", None, optional=True, least=-1)) is not None and size > 0:
            blocks.append((1, size))
    return Scheme(tuple(dict.fromkeys(blocks)), bool(are_symmetric) and not any(are_symmetric))


def of_modelopt(options: Options) -> Scheme:
    """Return the `Scheme` of the options of NVIDIA's Model Optimizer, after a check. Without a `quant_algo` only cached keys
    and values are quantized."""
    options.choice("quant_algo", None, (None, *ALGORITHMS))
    layers = options.part("quantized_layers", options.take("quantized_layers", {}) or {}, read=frozenset())
    for key in layers.values:
        layers.part(key, layers.take(key), read=frozenset()).choice("quant_algo", None, (None, *ALGORITHMS))
    return Scheme(())


METHODS: dict[str, Callable[[Options], Scheme]] = {
    "fp8": of_fp8, "compressed-tensors": of_compressed_tensors, "modelopt": of_modelopt
}  # fmt: skip


def scale_block(options: Options, key: str, default: ScaleBlock | None) -> ScaleBlock | None:
    """Return the rows and columns of a block that `key` gives, such as [128, 128] or "128x128" of older files, or None if it is
    null. Raises UnsupportedOption for another value."""
    block = options.take(key, default)
    if block is None:
        return None
    if isinstance(block, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", block, re.ASCII):
        block = [int(size) for size in block.split("x")]
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block):
        raise options.unsupported(key, "it must be two integers of at least 1")
    return int(block[0]), int(block[1])


def read_modelopt_file(folder: Path) -> dict[str, Any] | None:
    """Return the quantization that the file of older versions of Model Optimizer in a folder names; None if there is no such
    file. Raises ValueError if the file names none."""
    path = folder / MODELOPT_FILE
    found = read_optional_object(path)
    if not found:
        return None
    given = found.get(MODELOPT_KEY)
    if not isinstance(given, Mapping):
        raise ValueError(f"{path} must hold an object {MODELOPT_KEY!r}, got {given!r:.100}")
    return dict(given) | dict(quant_method="modelopt")


class Header(NamedTuple):
    """Hold the shape of a quantized weight and the dtype of its codes, with the methods of a safetensors header."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class DequantizedWeights(Weights):
    """Hold the tensors of a folder whose weights may be quantized. Such a weight is formed as
    `glax.models.dequantization.QuantizedWeight` says, and rounded to the config's dtype, bfloat16 if it names none.

    The scales, zero points and shape of a weight are the tensors whose names are the weight's name with an ending of `BESIDE`.
    The name of a weight of packed numbers ends in `PACKED`. `Names.scales` gives the scales that several weights share. The
    models' own code may also round activations, and glax does not.

    scheme: how the config says that weights are quantized. Raises ValueError for a tensor whose name ends in `REFUSED`, for
    packed numbers of a dtype that is not in PACKED_KINDS, and for a weight that is there packed and unpacked.
    """

    def __init__(self, folder: Path, config: Mapping, scheme: Scheme):
        super().__init__(folder)
        self.scheme = scheme
        self.to = named_dtype(config) or jnp.dtype(jnp.bfloat16)
        self.scales: tuple[tuple[str, str], ...] = ()  # `Names.scales`
        # Weights by their names in the files, without `PACKED`; and the files of the arrays beside them, by name.
        self.quantized: set[str] = set()
        self.beside: dict[str, Path] = {}
        if refused := [name for name in self.files if name.endswith(REFUSED)]:
            raise ValueError(f"{self.named_at(refused[0])} is not supported. {REMEDY.capitalize()}")
        for name in [name for name in self.files if name.endswith(PACKED)]:
            usual, kind = name.removesuffix(PACKED), super().header(name).get_dtype()
            if kind not in PACKED_KINDS:
                raise ValueError(f"{self.named_at(name)} must be of {' or '.join(PACKED_KINDS)}, got {kind}")
            if usual in self.files:
                raise ValueError(f"{self.named_at(name)} and {self.named_at(usual)} exclude each other")
            self.files[usual], self.stored[usual] = self.files.pop(name), name
        for name in [name for name in self.files if not name.endswith(BESIDE)]:
            kind = super().header(name).get_dtype()
            has_scale = any(name + end in self.files for end in SCALES)
            if kind == FLOAT8_KIND or name in self.stored or (kind in INTEGER_KINDS and has_scale):
                self.quantized.add(name)
                self.beside |= {name + end: self.files.pop(name + end) for end in BESIDE if name + end in self.files}
        for name in [name for name in self.files if OF_ACTIVATIONS.search(name)]:
            del self.files[name]

    def name_scales(self, rules: tuple[tuple[str, str], ...]):
        """Set `Names.scales` as `rules`, by which weights without a scale of their own find one."""
        self.scales = rules

    def shared_scale(self, name: str) -> str | None:
        """Return the name of the scale that a weight shares with others, or None."""
        for pattern, replacement in self.scales:
            if re.search(pattern, name):
                return re.sub(pattern, replacement, name)
        return None

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor of self.files holds the numbers of a quantized weight."""
        return self.original(name) in self.quantized

    def names(self) -> set[str]:
        return super().names() - {self.shared_scale(name) for name in self.files}

    def dtype(self, name: str) -> jnp.dtype:
        return self.to if self.is_quantized(self.tensor_of(name)) else super().dtype(name)

    def header(self, name: str):
        tensor = self.tensor_of(name)
        found = super().header(name)
        if not self.is_quantized(tensor):
            return found
        shape, kind = found.get_shape(), found.get_dtype()
        with self.named(tensor):
            columns = columns_of(shape, np.dtype(STORED[kind]), self.arrays_beside(tensor, (SHAPE,)).get(SHAPE))
        return Header([*shape[:-1], columns], kind)

    @contextlib.contextmanager
    def named(self, tensor: str) -> Iterator[None]:
        """Add the names of the tensor and its file to a ValueError that is raised inside the context."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.named_at(tensor)} cannot be dequantized: {error}") from None

    def read(self, name: str) -> np.ndarray:
        whole: tuple[EllipsisType, slice] = ..., slice(None)
        tensor, (expert, rows) = self.parts.get(name, (name, whole))
        if name in self.values or not self.is_quantized(tensor):
            return super().read(name)
        named = self.named_at(tensor)
        if rows is None:  # np.newaxis, by `Weights.divide_rows`
            raise ValueError(f"{named} must not be quantized, because its rows are tensors of their own")
        beside = self.arrays_beside(tensor)
        if (shared := self.shared_scale(tensor)) is not None and shared in self.files:
            beside = {SCALES[1]: self.mapped(shared)}
        if not beside.keys() & set(SCALES):
            scale = shared or " or ".join(f"{self.original(tensor)}{end}" for end in SCALES)
            raise ValueError(f"{named} is quantized and must come with {scale}")
        if self.scheme.has_zeros and ZERO not in beside:
            raise ValueError(f"{named} must come with {self.original(tensor)}{ZERO}: its config says symmetric=false")
        codes = self.mapped(tensor)
        # A tensor whose experts have names of their own has three axes: the number of one expert is a whole index.
        chosen = () if isinstance(expert, EllipsisType) else (expert,)
        leading = codes.shape[:-2]

        def of_one(at: tuple) -> np.ndarray:
            own = {end: x[-2:] if end == SHAPE else of_matrix(x, at, leading) for end, x in beside.items()}
            return weight_of(codes[at], own, self.scheme.blocks).rows(rows, self.to)

        with self.named(tensor):
            if len(chosen) == len(leading):
                return of_one(chosen)
            found = np.stack([of_one(at) for at in np.ndindex(leading)])
            return found.reshape(*leading, *found.shape[1:])

    def original(self, name: str) -> str:
        """Return the weight's name in the files, without the ending `PACKED`."""
        return self.stored.get(name, name).removesuffix(PACKED)

    def arrays_beside(self, name: str, ends: tuple[str, ...] = BESIDE) -> dict[str, np.ndarray]:
        """Return {an ending in `ends`: the array with the weight's name and this ending}, for those that exist."""
        own = self.original(name)
        return {end: self.array(self.beside[own + end], own + end) for end in ends if own + end in self.beside}


def of_matrix(x: np.ndarray, at: tuple, leading: tuple[int, ...]) -> np.ndarray:
    """Return the entry of x for matrix `at` of a tensor [*leading, rows, columns]. x: an array with an entry for each matrix,
    or one entry for all."""
    return x[at] if x.size > 1 and x.shape[: len(leading)] == leading else x
