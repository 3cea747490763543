"""Build models by their `model_type`: `from_pretrained` and `from_config`."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from glax.models import bamba, delta, falcon_h1, fla, granite, mamba2, minimax, nemotron_h, qwen3_next, zamba2
from glax.models.checkpoints import Weights, load_into
from glax.models.config import ModelConfig, UnsupportedOption
from glax.models.model import CausalLM, Precision
from glax.models.shardings import partition_spec

# model_type -> the function that builds such a model. docs/internals/models.md says how one is added.
MODEL_TYPES: dict[str, Callable[[ModelConfig, Precision], CausalLM]] = {
    "bamba": bamba.bamba,
    "delta_net": delta.delta_net,
    "falcon_h1": falcon_h1.falcon_h1,
    "gated_deltanet": delta.gated_deltanet,
    "gla": fla.gla,
    "granitemoehybrid": granite.granite,
    "hgrn2": fla.hgrn2,
    "kda": delta.kda,
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


def from_config(
    config: Mapping | str | Path,
    *,
    dtype: jnp.dtype | None = None,
    param_dtype: jnp.dtype | None = None,
    rngs: nnx.Rngs,
) -> CausalLM:
    """Return a model with random parameters, initialised as the model's own code does.

    config: the content of a config.json, or a folder that holds one. dtype: the dtype of the activations; float32 if None.
    param_dtype: the dtype of the parameters; float32 if None.

    Raises UnsupportedOption, which names the key and its value, for an option that is not supported.
    """
    precision = Precision(jnp.dtype(dtype or jnp.float32), jnp.dtype(param_dtype or jnp.float32), rngs)
    if isinstance(config, Mapping):
        parsed = ModelConfig.of(config)
        return builder(parsed)(parsed, precision)
    parsed = ModelConfig.read(Path(config))
    model = builder(parsed)(parsed, precision)
    model.folder = str(Path(config).absolute())
    return model


def from_pretrained(folder: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> CausalLM:
    """Return the model in a folder of config.json and safetensors, as `save_pretrained` of fla, transformers and glax writes
    it.

    dtype: the dtype of parameters and activations; the file's if None. Sums and states are float32 in every case. mesh: the
    mesh over which `glax.models.partition_spec` shards each parameter; the default device if None.

    Nothing is downloaded. The folder of a snapshot of huggingface_hub works. Raises UnsupportedOption, which names the key and
    its value, for an option that is not supported. Raises ValueError, which lists the names, if weights are missing or left
    over.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: nothing is downloaded, so name the folder of a checkpoint")
    config, weights = ModelConfig.read(folder), None
    build = builder(config)
    weights = Weights(folder)
    names = sorted(weights.names())
    stored = next((name for name in names if "embedding" in name), names[0] if names else None)
    cast = None if dtype is None else jnp.dtype(dtype)
    if dtype is None and stored is not None:  # `load_into` raises if there are no weights
        dtype = weights.dtype(stored)
    wanted = jnp.dtype(dtype or jnp.float32)
    model = nnx.eval_shape(lambda: build(config, Precision(wanted, wanted, nnx.Rngs(0))))

    def place(value, axes):
        if mesh is None:
            return jnp.asarray(value)
        return jax.device_put(value, NamedSharding(mesh, partition_spec(axes, value.shape, mesh)))

    load_into(model, weights, cast, place)
    model.folder = str(folder.absolute())
    return model
