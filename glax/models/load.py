"""Build models by their `model_type`, and give their parameters the tensors of a folder: `from_config`, `from_pretrained`."""

import collections
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from glax.models import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    fla,
    glm5_next,
    granite,
    jamba,
    kimi_k3,
    lara_mini,
    lfm2,
    llama,
    mamba,
    mamba2,
    mamba3,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    qwen4_exp,
    recurrent_gemma,
    rwkv,
    rwkv7,
    xlstm,
    zamba,
    zamba2,
)
from glax.models.config import ModelConfig, UnsupportedOption, silent
from glax.models.folders import DTYPES, Weights, has_weights, listed, no_folder
from glax.models.model import CausalLM, Precision
from glax.models.names import checkpoint_name, parameters, stored_names
from glax.models.placing import placed
from glax.models.quantization import DequantizedWeights, without_quantization
from glax.models.shardings import Placement, check_mesh

logger = logging.getLogger(__name__)
# Buffers of rotary positions, which older versions stored and the config determines.
ROTARY = r"(^|\.)(inv_freq|cos_cached|sin_cached)$"
# Bounds a few times beyond what is published, so that a wrong number in a config is an error and not an allocation.
MOST_PARAMETERS, MOST_ELEMENTS = 2**43, 2**37
SHOWN = 2**28  # bytes from which on a person sees the progress of loading
COMPARED = 1024  # rows that are compared together

# model_type -> the function that builds such a model. docs/internals/models.md says how one is added.
MODEL_TYPES: dict[str, Callable[[ModelConfig, Precision], CausalLM]] = {
    "bailing_hybrid": bailing_hybrid.bailing_hybrid,
    "bamba": bamba.bamba,
    "comba": fla.comba,
    "delta_net": fla.delta_net,
    "falcon_h1": falcon_h1.falcon_h1,
    "falcon_mamba": mamba.falcon_mamba,
    "gated_deltanet": fla.gated_deltanet,
    "gated_deltaproduct": fla.gated_deltaproduct,
    "gla": fla.gla,
    "glm5_next": glm5_next.glm5_next,
    "granitemoehybrid": granite.granite,
    "gsa": fla.gsa,
    "hgrn": fla.hgrn,
    "hgrn2": fla.hgrn2,
    "jamba": jamba.jamba,
    "kda": fla.kda,
    "kimi_k3": kimi_k3.kimi_k3,
    "kimi_linear": kimi_k3.kimi_text,
    "lara_mini": lara_mini.lara_mini,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "lfm3": lfm2.lfm3,
    "llama": llama.llama,
    "mamba": mamba.mamba,
    "mamba2": mamba2.mamba2,
    "mamba3": mamba3.mamba3,
    "minimax": minimax.minimax,
    "nemotron_h": nemotron_h.nemotron_h,
    "olmo_hybrid": olmo_hybrid.olmo_hybrid,
    "qwen3": llama.qwen3,
    "qwen3_5": qwen3_5.qwen3_5,
    "qwen3_5_moe": qwen3_5.qwen3_5,
    "qwen3_5_moe_text": qwen3_5.qwen3_5,
    "qwen3_5_text": qwen3_5.qwen3_5,
    "qwen3_next": qwen3_next.qwen3_next,
    "qwen4_exp": qwen4_exp.qwen4_exp,
    "qwen4_exp_text": qwen4_exp.qwen4_exp,
    "recurrent_gemma": recurrent_gemma.recurrent_gemma,
    "retnet": fla.retnet,
    "rwkv": rwkv.rwkv,
    "rwkv6": fla.rwkv6,
    "rwkv7": rwkv7.rwkv7,
    "xlstm": xlstm.xlstm,
    "zamba": zamba.zamba,
    "zamba2": zamba2.zamba2,
}


def builder(config: ModelConfig) -> Callable[[ModelConfig, Precision], CausalLM]:
    """Return the function that builds models of the config's model_type. Raises UnsupportedOption if there is none."""
    values = config.values
    kind = values.get("model_type")
    if kind is None and "ssm_cfg" in values:  # a config of the state-spaces repository
        kind = "mamba2"
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise UnsupportedOption(f"model_type={kind!r} in config.json is not supported: supported are {known}")
    return MODEL_TYPES[kind]


class OneKey(nnx.Rngs):
    """Give the same key for every parameter. It serves where only shapes count, and drawing keys would take most of the
    time."""

    def params(self):
        return jax.random.key(0)


def abstract_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> CausalLM:
    """Return the model of a config with shapes and dtypes in place of arrays. dtype: the dtype of activations and parameters.
    Raises ValueError for more than MOST_PARAMETERS numbers in all or MOST_ELEMENTS in one array."""
    dtype = jnp.dtype(dtype)
    model = nnx.eval_shape(lambda: initial_model(config, Precision(dtype, dtype, OneKey(0))))
    elements = [param.size for _, param in parameters(model)]
    if sum(elements) > MOST_PARAMETERS or max(elements) > MOST_ELEMENTS:
        sizes = {key: x for key, x in config.values.items() if isinstance(x, int) and x > 1}
        greatest = sorted(sizes, key=lambda key: -sizes[key])
        raise ValueError(
            f"config.json must describe at most {MOST_PARAMETERS} parameters, and {MOST_ELEMENTS} in each array, got "
            f"{sum(elements)}, and {max(elements)} in one: {', '.join(f'{key}={sizes[key]}' for key in greatest[:8])}"
        )
    return model


def initial_model(config: ModelConfig, precision: Precision) -> CausalLM:
    """Return the model of a config with first values of its parameters, those of `Names.float32` in float32."""
    model = builder(config)(config, precision)
    widen(model)
    return model


def floating(name: str, dtype: DTypeLike | None) -> jnp.dtype | None:
    """Return `dtype` as a jnp.dtype; None for None. Raises ValueError, which names the argument `name`, unless it is one of
    DTYPES."""
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

    config: the content of a config.json, whose `model_type` is one of `MODEL_TYPES`, or a folder that holds one. dtype: the dtype
    of the activations; float32 if None. param_dtype: the dtype of the parameters; float32 if None. Parameters that the model's
    own code has in float32 are float32 in any case. rngs: for the parameters, such as nnx.Rngs(0).

    Raises UnsupportedOption, which names the key and its value, for an option that is not supported, ValueError for other wrong
    values and dtypes, and OSError if the folder's config cannot be read.

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
    model = initial_model(parsed, precision)
    if not isinstance(config, Mapping):
        model.folder = str(Path(config).absolute())
    return model


def from_pretrained(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    only: str | re.Pattern | None = None,
) -> CausalLM:
    """Return the model in a folder of config.json and safetensors, as `save_pretrained` of fla, transformers and glax writes
    it. The files are mapped, and each parameter is copied to its place, so that the host holds no second copy of the weights.

    dtype: the dtype of parameters and activations. If None, each parameter has the dtype of the file, and activations have the
    config's (`Weights.activations`). Sums and states, and the parameters that the model's own code has in float32, are float32
    in every case. mesh: the mesh over which `glax.models.shard` places the parameters; the default device if None.
    only: a regular expression. A parameter is read if `re.search` finds the expression in the name of its tensor, or of one of
    its tensors, in the checkpoint. The others are `jax.ShapeDtypeStruct`, without memory, so that single blocks of a large
    model can be run.

    Quantized weights, of the formats that docs/checkpoints.md lists, are formed in float32 and rounded to the config's dtype, or
    to bfloat16 if it names none; then to `dtype`, if that is given. `save_pretrained` writes them so, in the dtype of the
    parameters, and no quantized ones.

    Nothing is downloaded. The folder of a snapshot of huggingface_hub works. Raises UnsupportedOption, which names the key and
    its value, for an option that is not supported. Raises ValueError, which lists the names, if weights are missing or left
    over, and FileNotFoundError if there is no such folder.

    >>> model = glax.models.from_pretrained(folder)
    >>> model(jnp.array([[1, 2, 3]])).shape[:2]
    (1, 3)
    """
    model, read = opened_model(folder, dtype=dtype, mesh=mesh, only=only)
    read()
    return model


def opened_model(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    only: str | re.Pattern | None = None,
) -> tuple[CausalLM, Callable[[], None]]:
    """Return the model of `from_pretrained` with shapes in place of its parameters, and a function that reads these.

    The names of all tensors are checked. Only values that are tied, derived or joined are read for that. The function sets the
    parameters of this same model, once, and raises ValueError for a tensor of another shape. Programs can be compiled meanwhile.
    """
    folder, cast, pattern = Path(folder), floating("dtype", dtype), pattern_of(only)
    if mesh is not None:
        check_mesh(mesh)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: {no_folder(folder)}")
    config, weights = read_folder(folder)
    layers, stored = config.text_values.get("num_hidden_layers"), len(weights.names())
    if isinstance(layers, int) and layers > stored:
        raise ValueError(f"num_hidden_layers={layers} in config.json is more than the {stored} tensors in {folder}")
    wanted = weights.activations(config.text_values) if cast is None else cast
    model = abstract_model(config, wanted or jnp.float32)
    model.folder = str(folder.absolute())
    placement = None if mesh is None else Placement(model, mesh)
    chosen = parameters_to_read(model, weights, cast, pattern)

    def read():
        load_into(model, weights, chosen, placement)
        if placement is not None:
            placement.say()

    return model, read


def pattern_of(only: str | re.Pattern | None) -> re.Pattern | None:
    """Return the argument `only` of `from_pretrained` as a compiled expression, or None. Raises TypeError or ValueError for
    others."""
    if only is None or isinstance(only, re.Pattern):
        return only
    if not isinstance(only, str):
        raise TypeError(f"only must be None or a regular expression of names, got {type(only).__name__}")
    try:
        return re.compile(only)
    except re.error as error:
        raise ValueError(f"only must be a regular expression of names, got {only!r}: {error}") from None


def read_folder(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return (the config of a folder without its quantization, the folder's tensors). Raises UnsupportedOption for a model_type
    or a quantization that is not supported."""
    config, scheme = without_quantization(ModelConfig.read(folder), folder)
    builder(config)  # raises for a type that is not supported, before the weights are looked for
    return config, Weights(folder) if scheme is None else DequantizedWeights(folder, config.text_values, scheme)


def unread_tensors(model: CausalLM) -> dict[str, np.ndarray]:
    """Return {name: array} of the tensors that belong to other models (`Names.others`) in the folder that a model was loaded
    from."""
    folder = None if model.folder is None else Path(model.folder)
    if not model.names.others or folder is None or not folder.is_dir() or not has_weights(folder):
        return {}
    weights = read_folder(folder)[1]
    return {name: weights.read(name) for name in sorted(weights.names()) if model.names.other(name)}


# ---- from tensors to parameters ---------------------------------------------------------------------------------------


def widen(model: CausalLM):
    """Make the parameters float32 that the model's own code has in float32, such as the bias of Nemotron-H's router."""
    widened = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        dtype = model.names.dtype(model.names(".".join(map(str, path))), param.dtype)
        if dtype != param.dtype:
            widened.append((path, param.replace(param[...].astype(dtype))))
    nnx.update(model, nnx.from_flat_state(widened))


# A parameter to be read: its path, the variable, its name in the checkpoint, and the function of its layout.
Chosen = tuple[tuple, nnx.Param, str, Callable[[np.ndarray], np.ndarray]]


def parameters_to_read(
    model: CausalLM, weights: Weights, dtype: jnp.dtype | None, only: re.Pattern | None
) -> list[Chosen]:
    """Return the parameters that are to be read, and give the model, which is abstract, their dtypes.

    dtype: the dtype of the parameters; None leaves each as it is in the file. `Names.float32` are float32 in any case.
    only: as in `from_pretrained`. Raises ValueError, with their names, if weights are missing or left over.
    """
    weights.rename(model.names.aliases)
    weights.name_scales(model.names.scales)
    weights.divide(model.names.stacked)
    weights.divide_rows(model.names.stacked_rows)
    for sizes in joined_sizes(model):
        weights.divide_anew(sizes)
    check_tied(model, weights)
    check_names(model, weights, only)
    chosen: list[Chosen] = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, (_, _, from_checkpoint) = checkpoint_name(model, ".".join(map(str, path)))
        names = stored_names(name, param)
        if only is None or any(map(only.search, names)):
            stored = np.result_type(*{weights.dtype(one) for one in names})
            found = jax.dtypes.canonicalize_dtype(model.names.dtype(name, stored if dtype is None else dtype))
            chosen.append((path, param.replace(jax.ShapeDtypeStruct(param.shape, found)), name, from_checkpoint))
    if only is not None and not chosen:
        raise ValueError(
            f"only must match a tensor in {weights.folder}, got {only.pattern!r}: {listed(weights.names())}"
        )
    nnx.update(model, nnx.from_flat_state([(path, param) for path, param, _, _ in chosen]))
    return chosen


def load_into(model: CausalLM, weights: Weights, chosen: list[Chosen], placement: Placement | None):
    """Set the chosen parameters of `model` from the weights. Raises ValueError, with its name, if a tensor's shape differs.

    placement: the placement on a mesh; None for the default device.
    """
    loaded = []
    with progress(weights.folder, sum(size_of(param) for _, param, _, _ in chosen)) as advance:
        for path, param, name, from_checkpoint in chosen:
            shape = param.shape[1:] if "*" in name else param.shape
            last_rows = model.names.last_rows(name, param)
            value = placed(
                layered(weights, stored_names(name, param), shape, from_checkpoint, last_rows),
                param.shape,
                param.dtype,
                None if placement is None else placement.sharding(path, param),
                is_stacked="*" in name,
                release=weights.release,
            )
            loaded.append((path, param.replace(value)))
            advance(size_of(param))
    nnx.update(model, nnx.from_flat_state(loaded))


def size_of(param: nnx.Variable) -> int:
    """Return the size of a parameter, which may be abstract, in bytes."""
    return param.size * param.dtype.itemsize


def check_names(model: CausalLM, weights: Weights, only: re.Pattern | None):
    """Raise ValueError, with their names, if tensors that are to be read are missing, or if some are left over that the model
    does not read. Log a warning with the tensors of other models, and check the derived tensors. only: as in
    `from_pretrained`."""
    named = {name for path, param in parameters(model) for name in stored_names(model.names(path), param)}
    derived = model.derived_tensors()
    found, unread = weights.names(), {tied_name(model), *derived}
    missing = {name for name in named - found if only is None or only.search(name)}
    others = {name for name in found if model.names.other(name)}
    left = [x for x in found - named - unread - others if not model.names.is_ignored(x) and not re.search(ROTARY, x)]
    if missing or left:
        parts = [f"missing are {listed(missing)}"] * bool(missing) + [f"left over are {listed(left)}"] * bool(left)
        raise ValueError(f"The weights in {weights.folder} do not fit its config: {'; '.join(parts)}")
    if others:
        counts = collections.Counter(model.names.other(name) for name in sorted(others))
        words = ", ".join(f"{count} of {name}*" for name, count in counts.items())
        logger.warning("%s also holds tensors of other models, which are not read: %s", weights.folder, words)
    model.check_derived_tensors({name: weights.read(name) for name in sorted(found & derived.keys())})


@contextlib.contextmanager
def progress(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """Yield advance(bytes), which moves a bar for a person: on a terminal, while at least SHOWN bytes are loaded."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and size >= SHOWN
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(f"loading {folder.name}", total=size)
        yield lambda count: bar.advance(task, count)


def joined_sizes(model: CausalLM) -> list[dict[str, int]]:
    """Return {the name of a tensor: the number of rows that the model needs in it} for the tensors of `Names.joined`, one dict
    for each group of tensors that are cut from one matrix."""
    widths = {model.names(path): param.shape[-1] for path, param in parameters(model)} if model.names.joined else {}
    first, found = next(iter(model.names.joined), ""), []
    for name in widths:
        if f".{first}." in name and first:
            found.append({other: widths[other] for x in model.names.joined if (other := name.replace(first, x))})
    return found


def layered(
    weights: Weights,
    names: list[str],
    shape: tuple[int, ...],
    back: Callable[[np.ndarray], np.ndarray],
    last_rows: int | None = None,
) -> Iterator[np.ndarray]:
    """Yield the tensors `names` in glax's layout, one at a time. Raises ValueError for one of another shape than `shape`.

    back: a function from a tensor's layout to glax's. last_rows: the number of rows of the last tensor, if it may be smaller
    than shape[0]; zeros are added behind them.
    """
    for name in names:
        stored = weights.read(name)
        try:
            row = back(stored)
        except (IndexError, ValueError):  # it has too few axes
            row = None
        own = shape if last_rows is None or name != names[-1] else (last_rows, *shape[1:])
        if row is None or row.shape != own:
            raise ValueError(
                f"{name} in {weights.file(name)} must have the shape that gives {own} here, as its config says, "
                f"got {stored.shape}"
            )
        yield row if own == shape else np.pad(row, [(0, shape[0] - own[0]), *[(0, 0)] * (row.ndim - 1)])


def check_tied(model: CausalLM, weights: Weights):
    """Use the head's tensor as the embedding, where a folder stores tied weights under the head's name alone.

    Raises ValueError if a folder has both and they differ: transformers does not tie them then, whatever the config says.
    """
    head, embedding = tied_name(model), model.names("embedding.embedding")
    if head is None or head not in weights.files:
        return
    weights.rename(((rf"^{re.escape(head)}$", embedding),))
    if head in weights.files and not equal(weights, head, embedding):
        raise ValueError(
            f"{head} and {embedding} in {weights.folder} differ, but its config ties them: "
            "set tie_word_embeddings to false in config.json, if the head is a weight of its own"
        )


def equal(weights: Weights, name: str, other: str) -> bool:
    """Return whether two tensors are equal. They are compared in blocks, and the memory of each is released."""
    first, second = weights.read(name), weights.read(other)
    if first.shape != second.shape:
        return False
    for row in range(0, len(first), COMPARED):
        block = slice(row, row + COMPARED)
        if not np.array_equal(first[block], second[block], equal_nan=True):
            return False
        weights.release()
    return True


def tied_name(model: CausalLM) -> str | None:
    """Return the name under which some writers store a tied head a second time; None if the head is not tied."""
    return model.names("head.kernel") if model.head is None else None
