"""Read a checkpoint's folder: the values of its config, and the tensors of its files by name."""

import collections
import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
# Further kinds of numbers that a file may hold: those of other models, and weights with scales.
STORED = FLOATS | {"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "BOOL": np.bool_}
STORED |= {f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)}
DTYPES = tuple(jnp.dtype(dtype).name for dtype in FLOATS.values())  # the names that a config has for them


def read_config(folder: Path) -> dict:
    """Return the values of a folder's config.json.

    Raises FileNotFoundError, which says what the folder holds instead, OSError if it is no regular file, and ValueError if it
    holds no JSON object.
    """
    path = newest(folder, CONFIG)
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: {other_content(folder)}")
    return read_object(path, infinite=True)


def read_object(path: Path, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file. infinite: whether NaN, Infinity and -Infinity are numbers in it.

    Raises OSError if it is no regular file, and ValueError, which names it, if it holds no JSON object.
    """
    try:
        _, values = read_json(path, infinite=infinite)
    except ContentError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no file. Raises OSError if it is no regular file, and ValueError if it
    holds no JSON object."""
    return read_object(path) if os.path.lexists(path) else {}


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a model's weights, in whatever form."""
    found = [path.name for path in (folder, folder / COMMITTED) if path.is_dir() for path in path.iterdir()]
    suffixes = (".safetensors", ".index.json", *PICKLES, *OTHER_FORMS)
    return any(name.endswith(suffixes) and not TRAINING.fullmatch(name) for name in found)


def opened(path: Path):
    """Return the open safetensors file at `path`. Raises OSError if it is no regular file, and ValueError if it holds no
    safetensors."""
    require_regular(path, path.stat().st_mode)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} holds no safetensors: {error}") from None


def files_of(folder: Path) -> tuple[dict[str, Path], dict[Path, safe_open]]:
    """Return (the file of each tensor by name, the open files by path).

    If a folder has both model.safetensors and an index, the former is read, as in transformers. Raises FileNotFoundError if
    there are no safetensors. A pickled file is named in the message and never opened. Raises ValueError, which names the file,
    for an index or a file of other content.
    """
    single, index = newest(folder, WEIGHTS), newest(folder, INDEX)
    if single.exists():
        if index.exists() and single.parent == folder:
            warnings.warn(
                f"{folder} holds both {WEIGHTS} and {INDEX}: the first is read, as in transformers, and the other is not. "
                "Remove the one that is out of date",
                stacklevel=4,
            )
        return of_file(single)
    if index.exists():
        return of_index(folder, index)
    raise no_weights(folder)


def of_file(path: Path) -> tuple[dict[str, Path], dict[Path, safe_open]]:
    """Return what `files_of` does, for one safetensors file."""
    handle = opened(path)
    return dict.fromkeys(handle.keys(), path), {path: handle}


def of_index(folder: Path, index: Path) -> tuple[dict[str, Path], dict[Path, safe_open]]:
    """Return what `files_of` does, for the files that an index names. Tensors that these files hold beside those of the index
    are included.

    Raises FileNotFoundError for missing files, and ValueError for files outside of the folder and for tensors that the files
    lack.
    """
    table = {tensor: newest(folder, name) for tensor, name in weight_map(index).items()}
    missing = [path.name for path in unique(table.values()) if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{index} names files that are not in {folder}: {listed(missing)}")
    if outside := [path for path in unique(table.values()) if not is_inside(path, folder)]:
        raise ValueError(
            f"{index} must name files in its own folder, got {outside[0].name}, a link to {outside[0].resolve()}: "
            "put the file itself there, or name the folder that holds it"
        )
    handles = {path: opened(path) for path in unique(table.values())}
    content = {path: set(handle.keys()) for path, handle in handles.items()}
    lacking = [f"{tensor} ({path.name})" for tensor, path in table.items() if tensor not in content[path]]
    if lacking:
        raise ValueError(f"{index} names tensors that their files lack: {listed(lacking)}")
    further = {tensor: path for path, names in content.items() for tensor in names}
    return further | table, handles


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file lies in its folder, through links too, or among the `blobs` of a cache of huggingface_hub."""
    folder, found = folder.resolve(), path.resolve()
    blobs = [place / "blobs" for place in folder.parents[:2]]
    return any(found.is_relative_to(place) for place in (folder, *blobs))


def weight_map(index: Path) -> dict[str, str]:
    """Return {the name of a tensor: its file} as an index states it. Raises ValueError unless the files lie in the index's
    folder."""
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
    """Return the first LISTED names in alphabetical order as a text, and how many more there are."""
    names = sorted(names)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def no_folder(path: Path) -> str:
    """Return a text with the remedy, for a path that is no folder."""
    if path.suffix == ".gguf":
        return "GGUF is not read. Name the folder of the checkpoint that the file was converted from"
    if path.suffix in PICKLES:
        return f"a pickle can run any code when it is read. Convert it to {WEIGHTS}, and name the folder that holds it"
    if path.is_file():
        return f"name the folder that holds {CONFIG} and the weights, such as {path.parent}"
    return "nothing is downloaded, so name the folder of a checkpoint"


def no_weights(folder: Path) -> Exception:
    """Return the error for a folder without model.safetensors and without an index, which says what the folder holds."""
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
    """Return a text that says what a folder holds instead of a checkpoint of transformers, and the remedy if there is one."""
    names = sorted(path.name for path in folder.iterdir())
    if broken := [name for name in names if not (folder / name).exists()]:
        return f"{listed(broken)} {'is a link' if len(broken) == 1 else 'are links'} to nothing. Fetch the files again"
    if any(name in ADAPTER for name in names):
        return (
            "it holds an adapter. Load its base model, and then the adapter by glax.models.load_adapter. Merge it into its base "
            "model, with merge_and_unload() of peft, and save that, where glax refuses it"
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"it holds {gguf[0]}, and GGUF is not read. Take the checkpoint that the file was converted from"
    if inside := [str(path.parent) for path in sorted(folder.glob(f"*/{CONFIG}"))]:
        return f"it lies one folder further in. Name one of {listed(inside)}"
    if inside := [str(path.parent) for path in sorted(folder.glob(f"snapshots/*/{CONFIG}"))]:
        return f"it is a cache of huggingface_hub. Name one of {listed(inside)}"
    return f"it holds {listed(names)}" if names else "it is empty"


# ---- tensors ----------------------------------------------------------------------------------------------------------


class Weights:
    """Hold the tensors of a folder by name, in files that are mapped into memory."""

    def __init__(self, folder: Path, file: str | None = None):
        """Open the safetensors of a model's folder. file: the name of one file, which alone is opened; all of them if None."""
        self.folder, self.stored = folder, {}
        self.maps: dict[Path, tuple[mmap.mmap, dict]] = {}  # the mapped file and its header, by path
        self.files, self.handles = files_of(folder) if file is None else of_file(newest(folder, file))
        self.parts: dict[
            str, tuple[str, tuple[int | slice, slice | None]]
        ] = {}  # by the name of a part, its tensor and its place there
        self.values: dict[str, np.ndarray] = {}  # tensors that were divided anew

    def rename(self, aliases: tuple[tuple[str, str], ...]):
        """Rename tensors for which a file has another name than the usual one. aliases: pairs (pattern of the other name, the
        usual name) for re.sub."""
        for pattern, replacement in aliases:
            for other in [name for name in self.files if re.search(pattern, name)]:
                usual = re.sub(pattern, replacement, other)
                if usual not in self.files:
                    self.files[usual], self.stored[usual] = self.files.pop(other), self.stored.pop(other, other)

    def divide(self, stacked: tuple[tuple[str, tuple[str, ...]], ...]):
        """Give each expert's part of some tensors [experts, rows, columns] a name of its own, without a copy. Each part has an
        equal share of the rows.

        stacked: pairs (pattern of the name of such a tensor, the names of its parts, with `*` for the expert). Raises
        ValueError for a tensor of another rank.
        """
        for pattern, parts in stacked:
            for name in [name for name in self.names() if re.search(pattern, name)]:
                shape = self.header(name).get_shape()
                if len(shape) != 3:
                    raise ValueError(f"{self.named_at(name)} must be [experts, rows, columns], got shape {shape}")
                size = shape[1] // len(parts)
                for i, part in enumerate(parts):
                    for expert in range(shape[0]):
                        one = re.sub(pattern, part, name).replace("*", str(expert))
                        self.parts[one] = name, (expert, slice(i * size, (i + 1) * size))

    def divide_rows(self, stacked: tuple[tuple[str, tuple[str, ...]], ...]):
        """Give each row of some tensors [rows, columns] a name of its own, as a tensor [1, 1, columns].

        stacked: pairs (pattern of the name of such a tensor, the names of its rows).
        """
        for pattern, parts in stacked:
            for name in [name for name in self.names() if re.search(pattern, name)]:
                shape = self.header(name).get_shape()
                if len(shape) != 2 or shape[0] != len(parts):
                    raise ValueError(f"{self.named_at(name)} must be [{len(parts)}, columns], got shape {shape}")
                for i, part in enumerate(parts):
                    self.parts[re.sub(pattern, part, name)] = name, (slice(i, i + 1), np.newaxis)

    def divide_anew(self, sizes: Mapping[str, int]):
        """Cut the rows of several tensors, joined in the order of `sizes`, at other places. sizes: {the name of a tensor: its
        new number of rows}.

        Nothing changes if a tensor is missing, or if the new numbers of rows do not add up to those in the file.
        """
        if not sizes.keys() <= self.files.keys():
            return
        rows = np.concatenate([self.read(name) for name in sizes])
        if len(rows) == sum(sizes.values()):
            self.values |= zip(sizes, np.split(rows, np.cumsum(list(sizes.values()))[:-1]), strict=True)

    def name_scales(self, rules: tuple[tuple[str, str], ...]):
        """Do nothing. `DequantizedWeights` finds the scales of quantized weights by these `rules`; other weights have no
        scales."""

    def names(self) -> set[str]:
        """Return the usual names of all tensors, with the parts of divided tensors in place of these."""
        return set(self.files) - {name for name, _ in self.parts.values()} | set(self.parts)

    def tensor_of(self, name: str) -> str:
        """Return the name of the tensor in self.files that contains the part `name`; `name` itself if it is no part."""
        return self.parts[name][0] if name in self.parts else name

    def file(self, name: str) -> Path:
        return self.files[self.tensor_of(name)]

    def named_at(self, name: str) -> str:
        """Return a text for messages: the name of a tensor in the file, and the file."""
        tensor = self.tensor_of(name)
        return f"{self.stored.get(tensor, tensor)} in {self.files[tensor]}"

    def dtype(self, name: str) -> jnp.dtype:
        """Return the dtype of a tensor in its file. Raises ValueError unless it is floating point."""
        kind = self.header(name).get_dtype()
        if kind not in FLOATS:
            raise ValueError(f"{self.named_at(name)} must be floating point, got {kind}")
        return jnp.dtype(FLOATS[kind])

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, in most cases as a view of the mapped file: copy what outlives a change of the file."""
        if name in self.values:
            return self.values[name]
        if name in self.parts:
            tensor, place = self.parts[name]
            return self.mapped(tensor)[place]
        return self.mapped(name)

    def mapped(self, name: str) -> np.ndarray:
        """Return the whole tensor of this usual name as a view of its mapped file."""
        return self.array(self.files[name], self.stored.get(name, name))

    def array(self, path: Path, name: str) -> np.ndarray:
        """Return the tensor of this name in the file at `path` as a view of the file, which is mapped into memory at the first
        call."""
        if path not in self.maps:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))  # which safetensors has checked
                self.maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), header | {"": 8 + length}
        content, header = self.maps[path]
        found = header[name]
        if found["dtype"] not in STORED:
            raise ValueError(f"{name} in {path} must be of {', '.join(STORED)}, got {found['dtype']}")
        start, shape = header[""] + found["data_offsets"][0], found["shape"]
        return np.frombuffer(content, STORED[found["dtype"]], math.prod(shape), start).reshape(shape)

    def release(self):
        """Give back the memory of the pages that were read. They are read again where they are needed again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for content, _ in self.maps.values():
                content.madvise(mmap.MADV_DONTNEED)

    def header(self, name: str):
        """Return the header, with shape and dtype, of the tensor `name`, or of the tensor that contains the part `name`."""
        tensor = self.tensor_of(name)
        return self.handles[self.files[tensor]].get_slice(self.stored.get(tensor, tensor))

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
