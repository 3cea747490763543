"""Read and write folders of config.json and safetensors, as `save_pretrained` of fla and transformers writes them."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from glax._src.core.files import replacing
from glax.models.config import ModelConfig
from glax.models.model import CausalLM

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")
# The files beside the weights for tokenizers and generation, in the forms that transformers writes.
BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
FLOATS = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


class Weights:
    """Hold the tensors of a folder by name, and read them one at a time."""

    def __init__(self, folder: Path):
        self.folder, self.handles = folder, {}
        self.files, self.stored = files_of(folder), {}

    def rename(self, aliases: tuple[tuple[str, str], ...]):
        """Give tensors the usual name where a file has another name for them. aliases: (other name, usual name)."""
        for other, usual in aliases:
            if other in self.files and usual not in self.files:
                self.files[usual], self.stored[usual] = self.files.pop(other), other

    def names(self) -> set[str]:
        return set(self.files)

    def dtype(self, name: str) -> jnp.dtype:
        kind = self.open(name).get_slice(self.stored.get(name, name)).get_dtype()
        if kind not in FLOATS:
            raise ValueError(f"{name} in {self.files[name]} must be floating point, got {kind}")
        return jnp.dtype(FLOATS[kind])

    def read(self, name: str) -> np.ndarray:
        return self.open(name).get_tensor(self.stored.get(name, name))

    def open(self, name: str):
        path = self.files[name]
        if path not in self.handles:
            self.handles[path] = opened(path)
        return self.handles[path]


def opened(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} holds no safetensors: {error}") from None


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises FileNotFoundError if there are no safetensors; a pickled file is named in the
    message and never opened."""
    single, index = folder / WEIGHTS, folder / INDEX
    if index.is_file():
        try:
            table = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} holds no weight_map: {error!r}") from None
        missing = sorted({name for name in table.values() if not (folder / name).is_file()})
        if missing:
            raise FileNotFoundError(f"{index} names files that are not in {folder}: {', '.join(missing)}")
        return {tensor: folder / name for tensor, name in table.items()}
    if single.is_file():
        return dict.fromkeys(opened(single).keys(), single)
    for pickled in PICKLED:
        if (folder / pickled).exists():
            raise ValueError(
                f"{folder / pickled} is a pickle, which can run any code when it is read: convert it to {WEIGHTS}, "
                "for example with safetensors.torch.save_file"
            )
    raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")


def parameters(model: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yield (the path, such as "blocks.0.attn.query.kernel"; the parameter) for each parameter."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield ".".join(map(str, path)), param


def checkpoint_name(model: CausalLM, path: str) -> tuple[str, tuple]:
    """Return the name of a parameter in the checkpoint, and its `glax.models.names.Layout`."""
    return model.names(path), model.names.layout(path.rpartition(".")[2])


def stored_names(name: str, param: nnx.Param) -> list[str]:
    """Return the names of the tensors that hold a parameter: one, or for a name with `*` one for each row of its first axis."""
    return [name.replace("*", str(i)) for i in range(param.shape[0])] if "*" in name else [name]


def load_into(model: CausalLM, weights: Weights, dtype: jnp.dtype | None, place):
    """Set every parameter of `model`, which may be abstract, from the weights.

    dtype: the dtype of the parameters; None leaves each as it is in the file. place: (value, the axes of its metadata) -> an
    array on devices.

    Raises ValueError, with every name, if weights are missing or left over, or if a shape differs.
    """
    named = {name for path, param in parameters(model) for name in stored_names(model.names(path), param)}
    weights.rename(model.names.aliases)
    found, unread = weights.names(), {tied_name(model), *model.derived_tensors()}
    missing = sorted(named - found)
    left = sorted(name for name in found - named - unread if not model.names.is_ignored(name))
    if missing or left:
        parts = [f"missing are {', '.join(missing)}"] * bool(missing) + [f"left over are {', '.join(left)}"] * bool(
            left
        )
        raise ValueError(f"The weights in {weights.folder} do not fit its config: {'; '.join(parts)}")
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    loaded = []
    for path, param in flat:
        name, (_, _, back) = checkpoint_name(model, ".".join(map(str, path)))
        each = stored_names(name, param)
        for one in each:
            weights.dtype(one)
        rows = [back(weights.read(one)) for one in each]
        value = np.stack(rows) if "*" in name else rows[0]
        if value.shape != param.shape:
            raise ValueError(
                f"{each[0]} in {weights.files[each[0]]} must have the shape that gives {param.shape} here, as its config says, "
                f"got {weights.read(each[0]).shape}"
            )
        value = np.ascontiguousarray(value if dtype is None else value.astype(dtype))
        loaded.append((path, param.replace(place(value, param.get_metadata().get("out_sharding")))))
    nnx.update(model, nnx.from_flat_state(loaded))


def tied_name(model: CausalLM) -> str | None:
    """Return the name under which some writers store a tied head a second time; None if the head is not tied."""
    return model.names("head.kernel") if model.head is None else None


def save_pretrained(model: CausalLM, folder: str | Path):
    """Write config.json and model.safetensors, which fla and transformers load. If writing fails, the old files stay.

    Each parameter is written in its own dtype, and the config names the embedding's dtype. The files of the tokenizer and of
    generation are copied from the folder that the model was loaded from, if they are there. Raises OSError if a file cannot be
    written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(model.derived_tensors())
    for path, param in parameters(model):
        name, (_, to, _) = checkpoint_name(model, path)
        value = np.asarray(jax.device_get(param[...]))
        for one, row in zip(stored_names(name, param), value if "*" in name else [value], strict=True):
            tensors[one] = np.ascontiguousarray(to(row))
    config = model.config.values
    stored = str(model.embedding.embedding.dtype)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = stored
    with replacing(folder / WEIGHTS) as new:
        try:
            save_file(tensors, new, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {folder / WEIGHTS}: {error}") from error
    with replacing(folder / "config.json") as new:
        Path(new).write_text(ModelConfig.of(config).text + "\n")
    copy_beside(model.folder, folder)


def copy_beside(source: str | None, folder: Path):
    """Copy the files of the tokenizer and of generation to `folder`. Warns if their source folder no longer exists."""
    if source is None or Path(source) == folder.absolute():
        return
    if not Path(source).is_dir():
        warnings.warn(f"{source}, which the model was loaded from, is no more: no tokenizer is copied", stacklevel=3)
        return
    for path in (Path(source) / name for name in BESIDE):
        if path.is_file():
            with replacing(folder / path.name) as new:
                shutil.copyfile(path, new)
