"""Read the parameters of a model from safetensors, as `save_pretrained` of fla and transformers writes them."""

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from glax.models.folders import files_of, listed
from glax.models.model import CausalLM

FLOATS = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
DTYPES = tuple(jnp.dtype(dtype).name for dtype in FLOATS.values())  # the names that a config has for them
# Buffers of rotary positions, which older versions stored and the config determines.
ROTARY = r"(^|\.)(inv_freq|cos_cached|sin_cached)$"


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


def parameters(model: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yield (the path, such as "blocks.0.attn.query.kernel"; the parameter) for each parameter."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield ".".join(map(str, path)), param


def widen(model: CausalLM):
    """Make the parameters float32 that the model's own code has in float32, such as the bias of Nemotron-H's router."""
    widened = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        dtype = model.names.dtype(model.names(".".join(map(str, path))), param.dtype)
        if dtype != param.dtype:
            widened.append((path, param.replace(param[...].astype(dtype))))
    nnx.update(model, nnx.from_flat_state(widened))


def checkpoint_name(model: CausalLM, path: str) -> tuple[str, tuple]:
    """Return the name of a parameter in the checkpoint, and its `glax.models.names.Layout`."""
    return model.names(path), model.names.layout(path.rpartition(".")[2])


def stored_names(name: str, param: nnx.Param | np.ndarray) -> list[str]:
    """Return the names of the tensors that hold a parameter: one, or for a name with `*` one for each row of its first axis."""
    return [name.replace("*", str(i)) for i in range(param.shape[0])] if "*" in name else [name]


def load_into(model: CausalLM, weights: Weights, dtype: jnp.dtype | None, place):
    """Set every parameter of `model`, which may be abstract, from the weights.

    dtype: the dtype of the parameters; None leaves each as it is in the file. `Names.float32` are float32 in any case.
    place: (the path of a parameter, the parameter, its value) -> an array on devices.

    Raises ValueError, with their names, if weights are missing or left over, or if a shape differs.
    """
    named = {name for path, param in parameters(model) for name in stored_names(model.names(path), param)}
    weights.rename(model.names.aliases)
    check_tied(model, weights)
    found, unread = weights.names(), {tied_name(model), *model.derived_tensors()}
    missing = named - found
    left = [x for x in found - named - unread if not model.names.is_ignored(x) and not re.search(ROTARY, x)]
    if missing or left:
        parts = [f"missing are {listed(missing)}"] * bool(missing) + [f"left over are {listed(left)}"] * bool(left)
        raise ValueError(f"The weights in {weights.folder} do not fit its config: {'; '.join(parts)}")
    derived = model.derived_tensors()
    model.check_derived_tensors({name: weights.read(name) for name in sorted(found & derived.keys())})
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    loaded = []
    for path, param in flat:
        name, (_, _, back) = checkpoint_name(model, ".".join(map(str, path)))
        value = layered(weights, name, param, back)
        wanted = model.names.dtype(name, value.dtype if dtype is None else dtype)
        value = np.ascontiguousarray(value.astype(wanted, copy=False))
        loaded.append((path, param.replace(place(path, param, value))))
    nnx.update(model, nnx.from_flat_state(loaded))


def layered(weights: Weights, name: str, param: nnx.Param, back: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the value of a parameter in glax's layout. Raises ValueError for a tensor of another shape or kind."""
    rows, shape = [], param.shape[1:] if "*" in name else param.shape
    for one in stored_names(name, param):
        weights.dtype(one)  # raises for a kind that is not floating point
        stored = weights.read(one)
        try:
            row = back(stored)
        except (IndexError, ValueError):  # it has too few axes
            row = None
        if row is None or row.shape != shape:
            raise ValueError(
                f"{one} in {weights.files[one]} must have the shape that gives {shape} here, as its config says, "
                f"got {stored.shape}"
            )
        rows.append(row)
    return np.stack(rows) if "*" in name else rows[0]


def check_tied(model: CausalLM, weights: Weights):
    """Take a tied head that is stored under the head's name alone for the embedding.

    Raises ValueError if a folder has both and they differ: transformers does not tie them then, whatever the config says.
    """
    head, embedding = tied_name(model), model.names("embedding.embedding")
    if head is None or head not in weights.files:
        return
    weights.rename(((head, embedding),))
    if head in weights.files and not np.array_equal(weights.read(head), weights.read(embedding), equal_nan=True):
        raise ValueError(
            f"{head} and {embedding} in {weights.folder} differ, but its config ties them: "
            "set tie_word_embeddings to false in config.json, if the head is a weight of its own"
        )


def tied_name(model: CausalLM) -> str | None:
    """Return the name under which some writers store a tied head a second time; None if the head is not tied."""
    return model.names("head.kernel") if model.head is None else None
