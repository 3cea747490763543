"""Read a checkpoint's folder: the values of its config, and the tensors of its files by name."""

import collections
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from glax._src.core.files import COMMITTED, ContentError, newest, read_json, require_regular

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_FORMS = (".gguf", ".h5", ".msgpack", ".npz", ".onnx")
# Files of a training's state that other trainers leave beside a model.
TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
LISTED = 20  # the most names in a message
FLOATS = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
DTYPES = tuple(jnp.dtype(dtype).name for dtype in FLOATS.values())  # the names that a config has for them


def read_config(folder: Path) -> dict:
    """Return the values of a folder's config.json.

    Raises FileNotFoundError, which says what the folder holds instead, OSError if it is no regular file, and ValueError if it
    holds no JSON object.
    """
    path = newest(folder, CONFIG)
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: {other_content(folder)}")
    try:
        _, values = read_json(path, infinite=True)
    except ContentError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a model's weights, in whatever form."""
    found = [path.name for path in (folder, folder / COMMITTED) if path.is_dir() for path in path.iterdir()]
    suffixes = (".safetensors", ".index.json", *PICKLES, *OTHER_FORMS)
    return any(name.endswith(suffixes) and not TRAINING.fullmatch(name) for name in found)


def opened(path: Path):
    require_regular(path, path.stat().st_mode)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} holds no safetensors: {error}") from None


def files_of(folder: Path) -> tuple[dict[str, Path], dict[Path, safe_open]]:
    """Return (the file of each tensor, the open files).

    model.safetensors is read where both it and an index stand in the folder, as transformers does.

    Raises FileNotFoundError if there are no safetensors. A pickled file is named in the message and never opened. Raises
    ValueError, which names the file, for an index or a file with another content.
    """
    single, index = newest(folder, WEIGHTS), newest(folder, INDEX)
    if single.exists():
        if index.exists() and single.parent == folder:
            warnings.warn(
                f"{folder} holds both {WEIGHTS} and {INDEX}: the first is read, as in transformers, and the other is not. "
                "Remove the one that is out of date",
                stacklevel=4,
            )
        handle = opened(single)
        return dict.fromkeys(handle.keys(), single), {single: handle}
    if index.exists():
        return of_index(folder, index)
    raise no_weights(folder)


def of_index(folder: Path, index: Path) -> tuple[dict[str, Path], dict[Path, safe_open]]:
    table = {tensor: folder / name for tensor, name in weight_map(index).items()}
    missing = [path.name for path in unique(table.values()) if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{index} names files that are not in {folder}: {listed(missing)}")
    handles = {path: opened(path) for path in unique(table.values())}
    content = {path: set(handle.keys()) for path, handle in handles.items()}
    lacking = [f"{tensor} ({path.name})" for tensor, path in table.items() if tensor not in content[path]]
    if lacking:
        raise ValueError(f"{index} names tensors that their files lack: {listed(lacking)}")
    further = {tensor: path for path, names in content.items() for tensor in names}
    return further | table, handles


def weight_map(index: Path) -> dict[str, str]:
    """Return the name of each tensor's file, as an index states them. Raises ValueError unless they lie in the index's folder."""
    try:
        _, values = read_json(index)
    except ContentError as error:
        raise ValueError(f"{index} holds no JSON: {error}") from None
    table = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{index} holds no weight_map: it must map the name of each tensor to the name of its file")
    for tensor, name in table.items():
        is_name = isinstance(name, str) and not re.search(r"[/\\\0]", name) and name not in ("", ".", "..")
        if not is_name:
            raise ValueError(f"{index} must name a file in its own folder for {tensor}, got {name!r:.200}")
    return table


def unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    names = sorted(names)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def no_weights(folder: Path) -> Exception:
    """Return the error for a folder without model.safetensors and index, which says what it holds."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES) and not TRAINING.fullmatch(name)]
    if any(name in ADAPTER for name in names):
        return FileNotFoundError(f"{folder} holds no {WEIGHTS}: {other_content(folder)}")
    if pickles:
        return ValueError(
            f"{folder / pickles[0]} is a pickle, which can run any code when it is read: convert it to {WEIGHTS}, "
            "for example with safetensors.torch.save_file"
        )
    if any(SHARD.fullmatch(name) for name in names):
        return FileNotFoundError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}, which names the tensors of its {WEIGHTS.partition('.')[0]}-*: "
            "fetch the index, too"
        )
    return FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: {other_content(folder)}")


def other_content(folder: Path) -> str:
    """Return what a folder holds that is no checkpoint of transformers, and the remedy if there is one."""
    names = sorted(path.name for path in folder.iterdir())
    if broken := [name for name in names if not (folder / name).exists()]:
        return f"{listed(broken)} {'is a link' if len(broken) == 1 else 'are links'} to nothing. Fetch the files again"
    if any(name in ADAPTER for name in names):
        return "it holds an adapter. Merge it into its base model, with merge_and_unload() of peft, and save that"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"it holds {gguf[0]}, and GGUF is not read. Take the checkpoint that the file was converted from"
    if inside := [str(path.parent) for path in sorted(folder.glob(f"*/{CONFIG}"))]:
        return f"it lies one folder further in. Name one of {listed(inside)}"
    if inside := [str(path.parent) for path in sorted(folder.glob(f"snapshots/*/{CONFIG}"))]:
        return f"it is a cache of huggingface_hub. Name one of {listed(inside)}"
    return f"it holds {listed(names)}" if names else "it is empty"


# ---- tensors ----------------------------------------------------------------------------------------------------------


class Weights:
    """Hold the tensors of a folder by name, and read them one at a time."""

    def __init__(self, folder: Path):
        self.folder, self.stored = folder, {}
        self.files, self.handles = files_of(folder)

    def rename(self, aliases: tuple[tuple[str, str], ...]):
        """Give tensors the usual name where a file has another name for them. aliases: (other name, usual name)."""
        for other, usual in aliases:
            if other in self.files and usual not in self.files:
                self.files[usual], self.stored[usual] = self.files.pop(other), other

    def names(self) -> set[str]:
        return set(self.files)

    def dtype(self, name: str) -> jnp.dtype:
        kind = self.header(name).get_dtype()
        if kind not in FLOATS:
            raise ValueError(f"{name} in {self.files[name]} must be floating point, got {kind}")
        return jnp.dtype(FLOATS[kind])

    def read(self, name: str) -> np.ndarray:
        return self.handles[self.files[name]].get_tensor(self.stored.get(name, name))

    def header(self, name: str):
        return self.handles[self.files[name]].get_slice(self.stored.get(name, name))

    def activations(self, config: Mapping) -> jnp.dtype | None:
        """Return the dtype that activations have if the user names none, or None if there are no floating-point tensors.

        It is the config's `dtype` (`torch_dtype` in older configs), if a tensor is stored in it. Without such an option, and in
        a folder where no tensor has the dtype that its config names, it is the dtype of the most elements.
        """
        elements = collections.Counter()
        for name in self.files:
            header = self.header(name)
            if header.get_dtype() in FLOATS:
                elements[jnp.dtype(FLOATS[header.get_dtype()])] += math.prod(header.get_shape())
        named = named_dtype(config)
        if named in elements or not elements:
            return named
        return elements.most_common(1)[0][0]


def named_dtype(config: Mapping) -> jnp.dtype | None:
    """Return the dtype that a config names, or None. Raises ValueError if it is none of DTYPES."""
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is None:
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in DTYPES:
            raise ValueError(f"{key} in config.json must be one of {', '.join(DTYPES)}, got {value!r}")
        return jnp.dtype(name)
    return None
