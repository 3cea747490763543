"""A ByteLM as one file, which can be loaded alone: the parameters by name, the config as JSON beside them."""

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from glax.nn.model import ByteLM, ByteLMConfig


def save(model: ByteLM, path: str | Path):
    """Writes beside `path` and then renames: an interruption leaves the old file or the new one, whole."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    tensors = {name: np.asarray(param[...]) for name, param in named_parameters(model)}
    try:
        save_file(tensors, unfinished, metadata={"config": json.dumps(dataclasses.asdict(model.config))})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | Path) -> ByteLM:
    """The model that `save` wrote. ValueError if the file holds another."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise ValueError(f"{path} holds no ByteLM: its metadata has no config")
        try:
            config = ByteLMConfig(**json.loads(metadata["config"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no ByteLM: its config is {metadata['config']!r:.200}") from error
        model = ByteLM(config, rngs=nnx.Rngs(0))
        parameters = dict(named_parameters(model))
        if parameters.keys() != set(file.keys()):
            raise ValueError(f"{path} does not fit its config: it differs in {sorted(parameters.keys() ^ file.keys())}")
        for name, param in parameters.items():
            tensor = file.get_tensor(name)
            if (tensor.dtype, tensor.shape) != (
                param.dtype,
                param.shape,
            ):  # else it would be cast, or spread over the shape
                fits, got = (f"{x.dtype} of shape {x.shape}" for x in (param, tensor))
                raise ValueError(f"{path} does not fit its config: {name} must be {fits}, got {got}")
            param[...] = jnp.asarray(tensor)
    return model


def named_parameters(model: ByteLM) -> list[tuple[str, nnx.Param]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [(".".join(map(str, path)), param) for path, param in flat]
