"""Write a model as a folder of config.json and safetensors, which fla and transformers load."""

import collections
import dataclasses
import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from glax._src.core.files import newest, replacing_together
from glax.models.config import ModelConfig
from glax.models.folders import CONFIG, INDEX, PICKLES, SHARD, TRAINING, WEIGHTS, listed, weight_map
from glax.models.load import abstract_model, unread_tensors
from glax.models.model import CausalLM, require_whole
from glax.models.names import checkpoint_name, parameters, stored_names
from glax.nn.parts import LowRank, with_term

# The files beside the weights for tokenizers and generation, in the forms that transformers writes.
BESIDE = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Describe a tensor to be written. size: its bytes. read: a function that returns its values."""

    size: int
    read: Callable[[], np.ndarray]

    @classmethod
    def of(cls, value: np.ndarray) -> "Stored":
        """Return the description of a tensor that is in memory, `value`."""
        return cls(value.nbytes, lambda: value)


def save_pretrained(model: CausalLM, folder: str | Path, *, others: bool = True, max_shard_size: int | str = "50GB"):
    """Write a model into a folder as config.json and model.safetensors, which fla and transformers load. Returns None.

    folder: is made if it is missing. All files are replaced in one step: until then the old files stay, and from then on
    `from_pretrained` reads the new ones, whatever is interrupted. The weights of an older model in the folder are removed.

    Each parameter is written in its own dtype, and the config names the dtype of most of them. Kernels are written with the
    terms of `lora`, `nnx.LoRA` and `nnx.LoRALinear` added. The model in memory stays as it is, with its terms apart.

    The source folder is `model.folder`, from which the model was loaded. The files of the tokenizer and of generation are
    copied from there, if they exist.

    others: whether the tensors of other models are copied from the source folder, too. These are tensors that glax does not
    read, such as those of a vision tower and of layers of multi-token prediction.

    max_shard_size: the most bytes of a file, as a number, or with a unit: "5GB" are 5 * 10^9, "1GiB" 2^30. Larger models are
    divided into files model-00001-of-00002.safetensors and so on, with an index. The host holds one file's tensors at a
    time. A tensor that is larger has a file of its own.

    Raises ValueError, which names the parameters, for a model whose parameters are not those that its config describes. Raises
    OSError if a file cannot be written.

    >>> glax.models.save_pretrained(model, folder)
    >>> glax.models.from_pretrained(folder).vocabulary == model.vocabulary
    True
    """
    save(model, Path(folder), {}, others=others, most=bytes_of(max_shard_size))


def bytes_of(size: int | str) -> int:
    """Return a size in bytes. Raises ValueError unless it is a number of bytes, or a number and a unit such as "5GB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    found = 0
    if match is not None and match[2].upper() in UNITS:
        found = int(float(match[1]) * UNITS[match[2].upper()])
    elif isinstance(size, int) and not isinstance(size, bool):
        found = size
    if found < 1:
        raise ValueError(f'max_shard_size must be a number of bytes, or such as "5GB", "200MB" or "1GiB", got {size!r}')
    return found


def save(
    model: CausalLM, folder: Path, files: Mapping[str, Path], *, others: bool = True, most: int = bytes_of("50GB")
):
    """Write a model as `save_pretrained` does. files: {the name in the folder: a file to copy}. others, most: its arguments
    others and max_shard_size, in bytes."""
    tensors, config = stored_tensors(model), model.config.values
    tensors |= {name: Stored.of(value) for name, value in unread_tensors(model).items()} if others else {}
    for values in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(values, dict) and key in values:
                values[key] = common_dtype(model)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, tensors, ModelConfig.of(config).text + "\n", {**beside(model.folder, folder), **files}, most)


def write(folder: Path, tensors: Mapping[str, Stored], config: str, copied: Mapping[str, Path], most: int):
    """Replace the model in a folder, in one step. tensors: by name. config: the text of config.json. copied: {name: a file to
    copy}. most: the most bytes of a file of tensors."""
    shards = divided(tensors, most)
    with replacing_together(folder) as (new, removed):
        for file, names in shards.items():
            try:
                save_file({name: tensors[name].read() for name in names}, new / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"cannot write {folder / file}: {error}") from error
        if WEIGHTS not in shards:
            index = dict(total_size=sum(tensor.size for tensor in tensors.values()))
            table = {name: file for file, names in shards.items() for name in names}
            (new / INDEX).write_text(json.dumps(dict(metadata=index, weight_map=table), indent=2) + "\n")
        (new / CONFIG).write_text(config)
        for name, path in copied.items():
            shutil.copyfile(path, new / name)
        removed |= older_weights(folder) - {path.name for path in new.iterdir()}
    warn_of_pickles(folder)


def divided(tensors: Mapping[str, Stored], most: int) -> dict[str, list[str]]:
    """Return {a file's name: the names of its tensors, in order}: model.safetensors alone, or several files of at most `most`
    bytes."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.size > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def older_weights(folder: Path) -> set[str]:
    """Return the names of the files in a folder that hold weights: model.safetensors, or an index and the shards that it names,
    and other shards."""
    index, named = folder / INDEX, []
    if index.is_file():
        try:
            named = list(weight_map(index).values())
        except ValueError:
            named = []  # nobody can read it
    shards = (path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))
    return {name for name in (*named, *shards, WEIGHTS, INDEX) if os.path.lexists(folder / name)}


def warn_of_pickles(folder: Path):
    """Warn of pickled weights in the folder, which other readers could take for the model."""
    pickles = [x.name for x in folder.iterdir() if x.name.endswith(PICKLES) and not TRAINING.fullmatch(x.name)]
    if pickles:
        warnings.warn(
            f"{folder} also holds {listed(pickles)}, which readers of pickles take for this model: remove what is out of date",
            stacklevel=5,
        )


def stored_tensors(model: CausalLM) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name. Raises ValueError for parameters that the model's config does not describe."""
    require_whole(model)
    values = merged_parameters(model)
    described = {path: tuple(param.shape) for path, param in parameters(abstract_model(model.config))}
    wrong = [path for path, value in values.items() if described.get(path) != tuple(value.shape)]
    missing = described.keys() - values.keys()
    if wrong or missing:
        parts = [f"not of it are {listed(wrong)}"] * bool(wrong) + [f"missing are {listed(missing)}"] * bool(missing)
        raise ValueError(
            "model must have the parameters that its config describes, for nothing loads others: " + "; ".join(parts)
        )
    tensors = {name: Stored.of(np.asarray(value)) for name, value in model.derived_tensors().items()}
    for path, value in values.items():
        name, (_, to, _) = checkpoint_name(model, path)
        rows: list[tuple[Any, str]] = [(..., name)]
        if "*" in name:
            rows = [*enumerate(stored_names(name, value))]
        last = model.names.last_rows(name, value)
        if last is not None:
            rows[-1] = (len(rows) - 1, slice(last)), rows[-1][1]
        for row, one in rows:
            size = value.nbytes // len(rows)
            size = size if last is None or one != rows[-1][1] else size * last // value.shape[1]
            tensors[one] = Stored(size, functools.partial(to_host, value, row, to))
    return tensors


def to_host(value: jax.Array, row: Any, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return a part of a parameter in the layout of the checkpoint. row: the index of the part, `...` for all. to: a function
    from glax's layout to the checkpoint's."""
    part = value if row is ... else value[row]
    return np.ascontiguousarray(to(np.asarray(jax.device_get(part))))


def common_dtype(model: CausalLM) -> str:
    """Return the name of the dtype that most elements of the parameters have."""
    elements = collections.Counter()
    for _, param in parameters(model):
        elements[str(param.dtype)] += param.size
    return elements.most_common(1)[0][0]


def beside(source: str | None, folder: Path) -> dict[str, Path]:
    """Return {name: path} of the files of the tokenizer and of generation, to be copied from the folder `source`. Warns if that
    no longer exists."""
    if source is None or Path(source) == folder.absolute():
        return {}
    if not Path(source).is_dir():
        warnings.warn(
            f"{source}, which the model was loaded from, is no more: no tokenizer is copied, and no tensors of other models",
            stacklevel=4,
        )
        return {}
    return {name: path for name in BESIDE if (path := newest(Path(source), name)).is_file()}


def merged_parameters(model: nnx.Module) -> dict[str, jax.Array]:
    """Return the value of each parameter by its path, with kernel + A B for the kernel that `LoRA` or `LoRALinear` adapts.

    The sum is formed in float32 and has the kernel's dtype. The model is not changed. Raises ValueError, which names the path,
    for an adapter without a kernel, and for a subclass, whose function may be another.
    """
    values = {path: param[...] for path, param in parameters(model)}
    adapters = [(".".join(map(str, path)), x) for path, x in nnx.iter_modules(model) if isinstance(x, nnx.LoRA)]
    linears = {".".join(map(str, path)): x for path, x in nnx.iter_modules(model) if isinstance(x, nnx.LoRALinear)}
    for path, adapter in sorted(adapters, key=lambda found: -found[0].count(".")):  # inner adapters first
        outer, _, last = path.rpartition(".")
        is_inside = last == "lora" and type(linears.get(outer)) is nnx.LoRALinear
        kernel = f"{outer}.kernel" if is_inside else f"{path}.base_module.kernel"
        if type(adapter) not in (nnx.LoRA, LowRank) or kernel not in values:
            raise ValueError(
                f"{path} cannot be saved: glax adds a LoRA to the kernel of its base_module, or of its LoRALinear, and this "
                f"{type(adapter).__name__} has none. Merge it by hand before saving"
            )
        for name in ("lora_a", "lora_b"):
            values.pop(f"{path}.{name}", None)
        values[kernel] = with_term(values[kernel], adapter)
        if not is_inside:
            base = f"{path}.base_module."
            values = {f"{path}.{x[len(base) :]}" if x.startswith(base) else x: value for x, value in values.items()}
    return values
