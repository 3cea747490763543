"""Build models by their `model_type`, and give their parameters the tensors of a folder: `from_config`, `from_pretrained`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from glax.models import bamba, falcon_h1, fla, granite, mamba2, minimax, nemotron_h, qwen3_next, zamba2
from glax.models.config import ModelConfig, UnsupportedOption, silent
from glax.models.folders import DTYPES, Weights, listed
from glax.models.model import CausalLM, Precision
from glax.models.names import checkpoint_name, parameters, stored_names
from glax.models.quantization import DequantizedWeights, without_quantization
from glax.models.shardings import Placement, check_mesh

# Buffers of rotary positions, which older versions stored and the config determines.
ROTARY = r"(^|\.)(inv_freq|cos_cached|sin_cached)$"
# Bounds several times beyond what is published, so that a wrong number in a config is an error and not an allocation.
MOST_PARAMETERS, MOST_ELEMENTS = 2**43, 2**35

# model_type -> the function that builds such a model. docs/internals/models.md says how one is added.
MODEL_TYPES: dict[str, Callable[[ModelConfig, Precision], CausalLM]] = {
    "bamba": bamba.bamba,
    "delta_net": fla.delta_net,
    "falcon_h1": falcon_h1.falcon_h1,
    "gated_deltanet": fla.gated_deltanet,
    "gla": fla.gla,
    "granitemoehybrid": granite.granite,
    "hgrn2": fla.hgrn2,
    "kda": fla.kda,
    "mamba2": mamba2.mamba2,
    "minimax": minimax.minimax,
    "nemotron_h": nemotron_h.nemotron_h,
    "qwen3_next": qwen3_next.qwen3_next,
    "retnet": fla.retnet,
    "rwkv6": fla.rwkv6,
    "zamba2": zamba2.zamba2,
}


def builder(config: ModelConfig) -> Callable[[ModelConfig, Precision], CausalLM]:
    values = config.values
    kind = values.get("model_type")
    if kind is None and "ssm_cfg" in values:  # a config of the state-spaces repository
        kind = "mamba2"
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise UnsupportedOption(f"model_type={kind!r} in config.json is not supported: supported are {known}")
    return MODEL_TYPES[kind]


class OneKey(nnx.Rngs):
    """Give the same key for every parameter. Where shapes alone count, drawing keys would take most of the time."""

    def params(self):
        return jax.random.key(0)


def abstract_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> CausalLM:
    """Return the model of a config with shapes and dtypes in place of arrays. Raises ValueError for one of no sensible size."""
    dtype = jnp.dtype(dtype)
    model = nnx.eval_shape(lambda: built(config, Precision(dtype, dtype, OneKey(0))))
    elements = [param.size for _, param in parameters(model)]
    if sum(elements) > MOST_PARAMETERS or max(elements) > MOST_ELEMENTS:
        sizes = {key: x for key, x in config.values.items() if isinstance(x, int) and x > 1}
        greatest = sorted(sizes, key=lambda key: -sizes[key])
        raise ValueError(
            f"config.json must describe at most {MOST_PARAMETERS} parameters, and {MOST_ELEMENTS} in each array, got "
            f"{sum(elements)}, and {max(elements)} in one: {', '.join(f'{key}={sizes[key]}' for key in greatest[:8])}"
        )
    return model


def built(config: ModelConfig, precision: Precision) -> CausalLM:
    model = builder(config)(config, precision)
    widen(model)
    return model


def floating(name: str, dtype: DTypeLike | None) -> jnp.dtype | None:
    """Return the dtype, or None. Raises ValueError, which names the argument, unless models compute in it."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"{name} must be None or one of {', '.join(DTYPES)}, got {dtype if found is None else found}")
    return found


def from_config(
    config: Mapping | str | Path,
    *,
    dtype: jnp.dtype | None = None,
    param_dtype: jnp.dtype | None = None,
    rngs: nnx.Rngs,
) -> CausalLM:
    """Return a model with random parameters, initialised as the model's own code does.

    config: the content of a config.json, or a folder that holds one. dtype: the dtype of the activations; float32 if None.
    param_dtype: the dtype of the parameters; float32 if None. Parameters that the model's own code has in float32 are float32 in
    any case.

    Raises UnsupportedOption, which names the key and its value, for an option that is not supported.

    >>> config = dict(model_type="gla", hidden_size=64, num_hidden_layers=2, vocab_size=100)
    >>> glax.models.from_config(config, rngs=nnx.Rngs(0)).vocabulary
    100
    """
    usual = jnp.dtype(jnp.float32)
    precision = Precision(floating("dtype", dtype) or usual, floating("param_dtype", param_dtype) or usual, rngs)
    parsed = ModelConfig.of(config) if isinstance(config, Mapping) else ModelConfig.read(Path(config))
    parsed, _ = without_quantization(parsed)
    with silent():
        abstract_model(parsed)  # raises for sizes of no sense before anything is allocated
    model = built(parsed, precision)
    if not isinstance(config, Mapping):
        model.folder = str(Path(config).absolute())
    return model


def from_pretrained(folder: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> CausalLM:
    """Return the model in a folder of config.json and safetensors, as `save_pretrained` of fla, transformers and glax writes
    it.

    dtype: the dtype of parameters and activations. If None, each parameter has the dtype of the file, and activations have the
    config's (`Weights.activations`). Sums and states, and the parameters that the model's own code has in float32, are float32
    in every case. mesh: the mesh over which `glax.models.shard` places the parameters; the default device if None.

    Weights in float8 with a scale for each block are dequantized to the config's dtype. `save_pretrained` writes them so.

    Nothing is downloaded. The folder of a snapshot of huggingface_hub works. Raises UnsupportedOption, which names the key and
    its value, for an option that is not supported. Raises ValueError, which lists the names, if weights are missing or left
    over.

    >>> model = glax.models.from_pretrained(folder)
    >>> model(jnp.array([[1, 2, 3]])).shape[:2]
    (1, 3)
    """
    folder, cast = Path(folder), floating("dtype", dtype)
    if mesh is not None:
        check_mesh(mesh)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: nothing is downloaded, so name the folder of a checkpoint")
    config, block = without_quantization(ModelConfig.read(folder))
    builder(config)  # raises for a type that is not supported, before the weights are looked for
    weights = Weights(folder) if block is None else DequantizedWeights(folder, config.values, block)
    layers, stored = config.values.get("num_hidden_layers"), len(weights.names())
    if isinstance(layers, int) and layers > stored:
        raise ValueError(f"num_hidden_layers={layers} in config.json is more than the {stored} tensors in {folder}")
    wanted = weights.activations(config.values) if cast is None else cast
    model = abstract_model(config, wanted or jnp.float32)

    placement = None if mesh is None else Placement(model, mesh)

    def place(path, param, value):
        return jnp.asarray(value) if placement is None else jax.device_put(value, placement.sharding(path, param))

    load_into(model, weights, cast, place)
    if placement is not None:
        placement.say()
    model.folder = str(folder.absolute())
    return model


# ---- from tensors to parameters ---------------------------------------------------------------------------------------


def widen(model: CausalLM):
    """Make the parameters float32 that the model's own code has in float32, such as the bias of Nemotron-H's router."""
    widened = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        dtype = model.names.dtype(model.names(".".join(map(str, path))), param.dtype)
        if dtype != param.dtype:
            widened.append((path, param.replace(param[...].astype(dtype))))
    nnx.update(model, nnx.from_flat_state(widened))


def load_into(model: CausalLM, weights: Weights, dtype: jnp.dtype | None, place):
    """Set every parameter of `model`, which may be abstract, from the weights.

    dtype: the dtype of the parameters; None leaves each as it is in the file. `Names.float32` are float32 in any case.
    place: (the path of a parameter, the parameter, its value) -> an array on devices.

    Raises ValueError, with their names, if weights are missing or left over, or if a shape differs.
    """
    named = {name for path, param in parameters(model) for name in stored_names(model.names(path), param)}
    weights.rename(model.names.aliases)
    check_tied(model, weights)
    derived = model.derived_tensors()
    found, unread = weights.names(), {tied_name(model), *derived}
    missing = named - found
    left = [x for x in found - named - unread if not model.names.is_ignored(x) and not re.search(ROTARY, x)]
    if missing or left:
        parts = [f"missing are {listed(missing)}"] * bool(missing) + [f"left over are {listed(left)}"] * bool(left)
        raise ValueError(f"The weights in {weights.folder} do not fit its config: {'; '.join(parts)}")
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
    """Use the head's tensor as the embedding, where a folder stores tied weights under the head's name alone.

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
