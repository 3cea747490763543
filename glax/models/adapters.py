"""Fine-tune low-rank terms of projections (LoRA, arXiv 2106.09685), and read and write them as adapters of peft.

    y = x W + scale (x A) B,   scale = alpha / rank, or alpha / sqrt(rank) with rank stabilization (arXiv 2312.03732)

A [inputs, rank] and B [rank, outputs] are `nnx.LoRAParam`: `nnx.split(model, nnx.LoRAParam, ...)` divides what is trained from
what is frozen.
"""

import collections
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from glax._src.core.bind import check_real
from glax._src.core.files import newest, replacing_together
from glax.models.config import UnsupportedOption
from glax.models.folders import Weights, listed, read_object
from glax.models.load import floating
from glax.models.model import CausalLM
from glax.models.names import checkpoint_name, parameters, transposed
from glax.models.saving import merged_parameters
from glax.nn.parts import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = "all-linear"
PREFIX = "base_model.model."
MERGED = "merge the adapter into its base model, with merge_and_unload() of peft, and save that"
# Keys of adapter_config.json that do not change what an adapter computes: how it was made, trained or found, and which modules
# it adapts, which the names of its tensors say too.
IGNORED = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
)  # fmt: skip
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights")
# Values of init_lora_weights that leave the base model's weights as they are. All others change them.
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


def lora(
    model: CausalLM,
    rank: int,
    targets: str | Sequence[str] = ALL,
    *,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> CausalLM:
    """Give projections of a model low-rank terms, y = x W + scale (x A) B, in place, and return the model. B begins as zeros.

    rank: the columns of A [inputs, rank], and the rows of B. param_dtype: the dtype of both. rngs: for the first values of A,
    which are uniform within 1 / sqrt(inputs).
    targets: which projections, by the names of the modules in the checkpoint, as peft reads `target_modules`: a list of names or
    of their ends, such as ["q_proj", "v_proj"], a regular expression of whole names, or "all-linear" for all but the head.
    alpha: twice the rank if None; scale is alpha / rank, or alpha / sqrt(rank) if rank_stabilized.

    `nnx.split(model, nnx.LoRAParam, ...)` divides the terms from the frozen parameters. Raises TypeError or ValueError for a
    wrong rank, alpha or dtype; and if targets are no names, name no projection, or name one that has a term.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685.

    >>> model = glax.models.lora(model, 4, ["q_proj", "v_proj"], rngs=nnx.Rngs(0))
    >>> graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, got {rank!r}")
    alpha = 2.0 * rank if alpha is None else alpha
    check_real("alpha", alpha)
    dtype = floating("param_dtype", param_dtype)
    for path, layer in chosen(model, targets):
        term = LowRank(layer, rank, alpha, rank_stabilized, param_dtype=dtype, rngs=rngs)
        replace_module(model, path, with_low_rank(layer, term))
    return model


def merge_lora(model: CausalLM) -> CausalLM:
    """Return a model whose kernels are W + scale A B, each in the dtype of W, without low-rank terms. It shares all other arrays
    with `model`, which stays as it is. A model without terms gives an equal one.

    >>> tuned = glax.models.lora(glax.models.from_pretrained(folder), 4, rngs=nnx.Rngs(0))
    >>> merged = glax.models.merge_lora(tuned)
    >>> bool((merged(jnp.array([[1, 2]])) == model(jnp.array([[1, 2]]))).all())  # B is zeros
    True
    """
    values = merged_parameters(model)
    copy = without_lora(model)
    state = nnx.to_flat_state(nnx.state(copy, nnx.Param))
    nnx.update(copy, nnx.from_flat_state([(path, x.replace(values[".".join(map(str, path))])) for path, x in state]))
    return copy


def without_lora(model: CausalLM) -> CausalLM:
    """Return a new model without the low-rank terms of `model`: its projections are y = x W. No array is copied: both models
    hold the same ones. `model` stays as it is. A `model` without low-rank terms also gives a new model.

    >>> tuned = glax.models.lora(glax.models.from_pretrained(folder), 4, rngs=nnx.Rngs(0))
    >>> base = glax.models.without_lora(tuned)
    >>> base(jnp.array([[1, 2]])).shape == tuned(jnp.array([[1, 2]])).shape
    True
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda x: x, state))  # other variables, with the same arrays
    for path, layer in list(nnx.iter_modules(copy)):
        if type(layer) is nnx.LoRALinear:
            replace_module(copy, path, like(layer, nnx.Linear))
        elif type(layer) is nnx.LoRA and layer.base_module is not None:
            replace_module(copy, path, layer.base_module)
    return copy


def save_adapter(model: CausalLM, folder: str | Path):
    """Write the low-rank terms of a model as peft does: adapter_config.json and adapter_model.safetensors.

    folder: is made if it is missing. Both files of an older adapter are replaced together: wherever the call is interrupted,
    `load_adapter` reads either both old files or both new ones. Raises ValueError for a model without low-rank terms of
    `lora`, or with terms of which only some are rank_stabilized, and OSError if a file cannot be written.

    >>> tuned = glax.models.lora(model, 4, ["o_proj"], rngs=nnx.Rngs(0))
    >>> glax.models.save_adapter(tuned, folder)
    """
    terms = {name: layer.lora for name, (_, layer) in modules(model).items() if type(layer) is nnx.LoRALinear}
    terms = {name: term for name, term in terms.items() if isinstance(term, LowRank)}
    if not terms:
        raise ValueError("model must have low-rank terms of glax.models.lora, got none")
    if len({term.rank_stabilized for term in terms.values()}) > 1:
        raise ValueError("rank_stabilized must be the same for all low-rank terms, for an adapter has one use_rslora")
    rank, alpha = (collections.Counter(values).most_common(1)[0][0] for values in (
        [term.rank for term in terms.values()], [term.alpha for term in terms.values()]
    ))  # fmt: skip
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.folder,
        r=rank,
        lora_alpha=integer_if_whole(alpha),
        rank_pattern={name: term.rank for name, term in terms.items() if term.rank != rank},
        alpha_pattern={name: integer_if_whole(term.alpha) for name, term in terms.items() if term.alpha != alpha},
        use_rslora=next(iter(terms.values())).rank_stabilized,
        target_modules=sorted(terms),
        bias="none",
        lora_dropout=0.0,
        fan_in_fan_out=False,
        inference_mode=True,
    )
    tensors = {}
    for name, term in terms.items():
        for part, value in (("lora_A", term.lora_a), ("lora_B", term.lora_b)):
            tensors[f"{PREFIX}{name}.{part}.weight"] = np.ascontiguousarray(np.asarray(value[...]).T)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_together(folder) as (new, _):
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def integer_if_whole(alpha: float) -> int | float:
    """Return alpha as an integer if it is one, as peft writes it."""
    return int(alpha) if float(alpha).is_integer() else float(alpha)


def load_adapter(model: CausalLM, folder: str | Path, *, dtype: DTypeLike | None = None) -> CausalLM:
    """Give a model the low-rank terms in a folder of peft, in place, and return the model.

    folder: with adapter_config.json and the weights, as `save_adapter` writes it. dtype: the dtype of the terms; as in the file
    if None. Dropout, which acts in training alone, is not applied.

    Raises FileNotFoundError if a file is missing. Raises UnsupportedOption, which names the key and its value, for an adapter
    that computes something else, such as DoRA. Raises ValueError, which names the tensors or the projection, in four cases: the
    folder holds no terms; a tensor belongs to no projection of the model; a projection already has a low-rank term; shapes
    differ from those that the config and the model give.

    >>> tuned = glax.models.lora(glax.models.from_pretrained(folder), 4, rngs=nnx.Rngs(0))
    >>> glax.models.save_adapter(tuned, folder)
    >>> tuned = glax.models.load_adapter(glax.models.from_pretrained(folder), folder)
    """
    folder, cast = Path(folder), floating("dtype", dtype)
    config = read_adapter_config(folder)
    weights = adapter_weights(folder)
    named, rest = modules(model), set(weights.names())
    found = {}
    for tensor in sorted(rest):
        if match := re.fullmatch(rf"{re.escape(PREFIX)}(.*)\.lora_A\.weight", tensor):
            pair = tensor, f"{PREFIX}{match[1]}.lora_B.weight"
            name = usual_name(model, match[1])
            if pair[1] in rest and name in named:
                found[name] = pair
                rest -= set(pair)
    rest -= base_tensors(model, weights, rest)
    if rest or not found:
        what = f"left over are {listed(rest)}" if rest else "it holds no terms"
        raise ValueError(
            f"The adapter in {folder} does not fit the model: {what}: a projection of the model must have each"
        )
    terms = []
    for name, pair in found.items():
        path, layer = named[name]
        if type(layer) is not nnx.Linear:
            raise ValueError(f"{name} must be a projection without a low-rank term, got {type(layer).__name__}")
        terms.append((path, with_low_rank(layer, read_term(config, weights, name, pair, layer, cast))))
    for path, adapted in terms:
        replace_module(model, path, adapted)
    return model


def base_tensors(model: CausalLM, weights: Weights, names: set[str]) -> set[str]:
    """Return those of `names`, tensors of an adapter's file, that are tensors of the base model. peft saves the head and the
    embedding in the file of an adapter.

    Raises ValueError if one differs from the model's own, because the adapter was then trained on another base model.
    """
    stored = {model.names(path): (path, param) for path, param in parameters(model)}
    found = set()
    for tensor in names:
        name = usual_name(model, tensor.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".base_layer"))
        if not tensor.startswith(PREFIX) or not tensor.endswith(".weight") or f"{name}.weight" not in stored:
            continue
        path, param = stored[f"{name}.weight"]
        value = checkpoint_name(model, path)[1][2](weights.read(tensor))
        if value.shape != param.shape or not np.array_equal(value.astype(param.dtype), param[...]):
            raise ValueError(
                f"{tensor} in {weights.file(tensor)} must be the model's own, got others: load its base model"
            )
        found.add(tensor)
    return found


def read_term(
    config: Mapping, weights: Weights, name: str, pair: tuple[str, str], layer: nnx.Linear, dtype: jnp.dtype | None
) -> LowRank:
    """Return the low-rank term of the projection `layer`. Raises ValueError if its tensors have other shapes than the config
    and the model say.

    config: the values of adapter_config.json. name: the module's name in the checkpoint. pair: the names of its tensors, A and
    B. dtype: as in the file if None.
    """
    rank = by_pattern(config, "rank_pattern", name, config["r"])
    alpha = by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    shapes = (rank, layer.in_features), (layer.out_features, rank)
    values = []
    for tensor, shape in zip(pair, shapes, strict=True):
        stored = weights.dtype(tensor)
        value = weights.read(tensor)
        if value.shape != shape:
            raise ValueError(f"{tensor} in {weights.file(tensor)} must be {list(shape)}, got {list(value.shape)}")
        values.append(jnp.array(np.ascontiguousarray(value.T.astype(dtype or stored)), copy=True))
    return LowRank(layer, rank, float(alpha), config["use_rslora"], values=(values[0], values[1]))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the values of adapter_config.json, with peft's defaults for r, lora_alpha, use_rslora and the two patterns.

    Raises FileNotFoundError if the folder has no such file, UnsupportedOption, which names the key, unless glax computes what
    it describes, and ValueError for a rank, an alpha, a pattern or use_rslora of another kind.
    """
    path = newest(folder, CONFIG)
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: name the folder of an adapter that peft saved")
    config = read_object(path, infinite=True)
    if config.get("peft_type") != "LORA":
        raise unsupported("peft_type", config.get("peft_type"), "supported is 'LORA'. Otherwise " + MERGED)
    for key, wanted in (("bias", ("none",)), ("init_lora_weights", BEGINNINGS)):
        if key in config and not any(config[key] is x or config[key] == x for x in wanted):
            raise unsupported(key, config[key], f"supported are {', '.join(map(repr, wanted))}. Otherwise {MERGED}")
    for key, value in config.items():
        if key not in (*READ, *IGNORED) and value not in (None, False, 0, "", [], {}):
            raise unsupported(key, value, MERGED)
    config = {"r": 8, "lora_alpha": 8, "use_rslora": False} | config
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = config.get(key) or {}
        if not isinstance(config[key], dict):
            raise ValueError(f"{key} in {path} must be an object of numbers by names, got {config[key]!r:.80}")
    for key, value in [("r", config["r"]), *config["rank_pattern"].items()]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"the rank {key} in {path} must be an integer of at least 1, got {value!r:.80}")
    for key, value in [("lora_alpha", config["lora_alpha"]), *config["alpha_pattern"].items()]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the alpha {key} in {path} must be a number, got {value!r:.80}")
    if not isinstance(config["use_rslora"], bool):
        raise ValueError(f"use_rslora in {path} must be true or false, got {config['use_rslora']!r:.80}")
    return config


def unsupported(key: str, value: object, remedy: str) -> UnsupportedOption:
    """Return the error for a value of adapter_config.json that is not supported. remedy: the end of its message."""
    return UnsupportedOption(f"{key}={value!r:.80} in {CONFIG} is not supported: {remedy}")


def by_pattern(config: Mapping, key: str, name: str, usual: Any) -> Any:
    """Return the number that a module has by `config[key]`, {a regular expression: number}. The first expression that matches
    the end of the module's name decides, as in peft; the number is `usual` if none matches. Raises ValueError for a key that is
    no expression."""
    for pattern, value in config[key].items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise ValueError(f"{key} in {CONFIG} must hold regular expressions, got {pattern!r:.80}: {error}") from None
    return usual


def adapter_weights(folder: Path) -> Weights:
    """Return the tensors of the adapter in a folder.

    Raises FileNotFoundError if the folder has no adapter_model.safetensors. A pickled adapter is never opened: it raises
    ValueError, which names the file.
    """
    path = newest(folder, WEIGHTS)
    if path.exists():
        return Weights(folder, WEIGHTS)
    if (folder / "adapter_model.bin").exists():
        raise ValueError(
            f"{folder / 'adapter_model.bin'} is a pickle, which can run any code when it is read: load it with peft and save "
            f"it again, which writes {WEIGHTS}"
        )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS}: name the folder of an adapter that peft saved")


# ---- the projections of a model ---------------------------------------------------------------------------------------


def projections(model: CausalLM) -> Iterator[tuple[tuple, nnx.Linear]]:
    """Yield (path, layer) for each projection, with a low-rank term or without."""
    for path, layer in list(nnx.iter_modules(model)):
        if isinstance(layer, nnx.Linear) and type(layer) in (nnx.Linear, nnx.LoRALinear):
            yield path, layer


def modules(model: CausalLM) -> dict[str, tuple[tuple, nnx.Linear]]:
    """Return {the name of a module in checkpoints: (path, layer)} for each projection whose kernel a checkpoint stores,
    transposed, as the weight of one linear module. path: the names and indices from the model to the layer."""
    found = {}
    for path, layer in projections(model):
        name = model.names(".".join((*map(str, path), "kernel")))
        if name.endswith(".weight") and "*" not in name and model.names.layout("kernel")[1] is transposed:
            found[name.removesuffix(".weight")] = path, layer
    return found


def usual_name(model: CausalLM, module: str) -> str:
    """Return the name that the model's `Names` give a module in checkpoints. module: that name, or another name by
    `Names.aliases`."""
    name = f"{module}.weight"
    for pattern, replacement in model.names.aliases:
        name = re.sub(pattern, replacement, name)
    return name.removesuffix(".weight")


def chosen(model: CausalLM, targets: str | Sequence[str]) -> list[tuple[tuple, nnx.Linear]]:
    """Return (path, layer) of each projection that `targets` names, as `lora` describes `targets`.

    Raises TypeError unless `targets` is a text or a list of texts. Raises ValueError if it is no regular expression, if it or
    one of its names names no projection, and for a projection that has a low-rank term.
    """
    named = modules(model)
    if not isinstance(targets, Sequence) or not all(isinstance(x, str) for x in targets):
        raise TypeError(f'targets must be "{ALL}", a regular expression or a list of names, got {targets!r:.80}')
    if targets == ALL:
        names = [name for name, (path, _) in named.items() if path != ("head",)]
    elif isinstance(targets, str):
        try:
            names = [name for name in named if re.fullmatch(targets, name)]
        except re.error as error:
            raise ValueError(f"targets must be a regular expression of whole names, got {targets!r}: {error}") from None
    else:
        names = [name for name in named if any(f".{name}".endswith(f".{x}") for x in targets)]
        if idle := [x for x in targets if not any(f".{name}".endswith(f".{x}") for name in names)]:
            names, targets = [], idle
    if not names:
        ends = sorted({name.rpartition(".")[2] for name in named})
        raise ValueError(
            f"targets must name projections of the model, got {targets!r}: their names end with {listed(ends)}"
        )
    if adapted := [name for name in names if type(named[name][1]) is nnx.LoRALinear]:
        raise ValueError(
            f"targets must name projections without a low-rank term, got {listed(adapted)}: merge those first"
        )
    return [named[name] for name in names]


def with_low_rank(layer: nnx.Linear, term: LowRank) -> nnx.LoRALinear:
    """Return a projection with the parameters of `layer` and the low-rank term."""
    adapted = like(layer, nnx.LoRALinear, lora_rank=term.rank)
    adapted.lora = term
    return adapted


def like(layer: nnx.Linear, kind: type, **options) -> Any:
    """Return a module of class `kind` with the parameters and the options of the projection `layer`."""
    names = "use_bias", "dtype", "param_dtype", "precision", "dot_general", "promote_dtype", "preferred_element_type"
    options |= {name: getattr(layer, name) for name in names}
    made = nnx.eval_shape(lambda: kind(layer.in_features, layer.out_features, rngs=nnx.Rngs(0), **options))
    made.kernel = layer.kernel
    if layer.bias is not None:
        made.bias = layer.bias
    return made


def replace_module(model: nnx.Module, path: tuple, module: nnx.Module):
    """Put `module` in the place of the module at `path` of the model."""
    *outer, last = path
    parent: Any = model
    for part in outer:
        parent = parent[part] if isinstance(part, int) else getattr(parent, part)
    if isinstance(last, int):
        parent[last] = module
    else:
        setattr(parent, last, module)
