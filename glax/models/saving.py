"""Write a model as a folder of config.json and model.safetensors, which fla and transformers load."""

import collections
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from glax._src.core.files import newest, replacing_together
from glax.models.config import ModelConfig
from glax.models.folders import CONFIG, INDEX, PICKLES, SHARD, TRAINING, WEIGHTS, listed, weight_map
from glax.models.load import abstract_model
from glax.models.model import CausalLM
from glax.models.names import checkpoint_name, parameters, stored_names
from glax.nn.parts import with_term

# The files beside the weights for tokenizers and generation, in the forms that transformers writes.
BESIDE = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


def save_pretrained(model: CausalLM, folder: str | Path):
    """Write config.json and model.safetensors, which fla and transformers load. All files are replaced in one step: until then
    the old files stay, and from then on `from_pretrained` reads the new ones, whatever is interrupted.

    Each parameter is written in its own dtype, and the config names the dtype of most of them. The terms of `nnx.LoRA` and
    `nnx.LoRALinear` are added to the kernels they belong to. The files of the tokenizer and of generation are copied from the
    folder that the model was loaded from, if they are there. The index and the shards of an older model are removed.

    Raises ValueError, which names the parameters, for a model with others than its config describes. Raises OSError if a file
    cannot be written.

    >>> glax.models.save_pretrained(model, folder)
    >>> glax.models.from_pretrained(folder).vocabulary == model.vocabulary
    True
    """
    save(model, Path(folder), {})


def save(model: CausalLM, folder: Path, files: Mapping[str, Path]):
    """Write a model as `save_pretrained` does, with copies of `files` by the names that they have in the folder."""
    tensors, config = stored_tensors(model), model.config.values
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = common_dtype(model)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, tensors, ModelConfig.of(config).text + "\n", {**beside(model.folder, folder), **files})


def write(folder: Path, tensors: Mapping[str, np.ndarray], config: str, copied: Mapping[str, Path]):
    """Replace the model in a folder, in one step."""
    with replacing_together(folder) as new:
        try:
            save_file(dict(tensors), new / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {folder / WEIGHTS}: {error}") from error
        (new / CONFIG).write_text(config)
        for name, path in copied.items():
            shutil.copyfile(path, new / name)
    remove_shards(folder)


def remove_shards(folder: Path):
    """Remove the index and the shards of an older model, which some readers prefer to model.safetensors. Warns of pickles."""
    index, named = folder / INDEX, []
    if index.is_file():
        try:
            named = list(weight_map(index).values())
        except ValueError:
            named = []  # nobody can read it
    older = {name for name in named if name != WEIGHTS} | {x.name for x in folder.iterdir() if SHARD.fullmatch(x.name)}
    index.unlink(missing_ok=True)
    for name in older:
        (folder / name).unlink(missing_ok=True)
    pickles = [x.name for x in folder.iterdir() if x.name.endswith(PICKLES) and not TRAINING.fullmatch(x.name)]
    if pickles:
        warnings.warn(
            f"{folder} also holds {listed(pickles)}, which readers of pickles take for this model: remove what is out of date",
            stacklevel=5,
        )


def stored_tensors(model: CausalLM) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint by name. Raises ValueError for parameters that the model's config does not describe."""
    values = merged_parameters(model)
    described = {path: tuple(param.shape) for path, param in parameters(abstract_model(model.config))}
    wrong = [path for path, value in values.items() if described.get(path) != tuple(value.shape)]
    missing = described.keys() - values.keys()
    if wrong or missing:
        parts = [f"not of it are {listed(wrong)}"] * bool(wrong) + [f"missing are {listed(missing)}"] * bool(missing)
        raise ValueError(
            "model must have the parameters that its config describes, for nothing loads others: " + "; ".join(parts)
        )
    tensors = dict(model.derived_tensors())
    for path, value in values.items():
        name, (_, to, _) = checkpoint_name(model, path)
        value = np.asarray(jax.device_get(value))
        for one, row in zip(stored_names(name, value), value if "*" in name else [value], strict=True):
            tensors[one] = np.ascontiguousarray(to(row))
    return tensors


def common_dtype(model: CausalLM) -> str:
    """Return the dtype of the most elements of the parameters."""
    elements = collections.Counter()
    for _, param in parameters(model):
        elements[str(param.dtype)] += param.size
    return elements.most_common(1)[0][0]


def beside(source: str | None, folder: Path) -> dict[str, Path]:
    """Return the files of the tokenizer and of generation to copy. Warns if their source folder no longer exists."""
    if source is None or Path(source) == folder.absolute():
        return {}
    if not Path(source).is_dir():
        warnings.warn(f"{source}, which the model was loaded from, is no more: no tokenizer is copied", stacklevel=4)
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
        if type(adapter) is not nnx.LoRA or kernel not in values:
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
