"""Store a ByteLM as one file: the parameters by name, and the config as JSON. The file can be loaded without other files."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from glax._src.core.files import parse, replacing
from glax.nn.model import ByteLM, ByteLMConfig


def save(model: ByteLM, path: str | Path):
    """Write the model to `path`. A temporary file is written first and then renamed, so an interruption leaves the old or the
    new file.

    Raises OSError if the file cannot be written.
    """
    path = Path(path)
    tensors = {name: np.asarray(param[...]) for name, param in named_parameters(model)}
    with replacing(path) as new:
        try:
            save_file(tensors, new, metadata={"config": json.dumps(dataclasses.asdict(model.config))})
        except SafetensorError as error:  # it is no OSError, although the system refused something
            raise OSError(errno.EIO, str(error), str(path)) from error


def load(path: str | Path) -> ByteLM:
    """Return the model that `save` wrote.

    Raises ValueError if the file holds another model, or a parameter of another shape or dtype; nothing is broadcast or cast.
    Raises OSError if the file cannot be read.
    """
    if not os.path.isfile(path):
        os.stat(path)  # raises OSError if the file is missing
        raise ValueError(f"{path} holds no ByteLM: it is not a regular file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path} holds no ByteLM: {error}") from error
    if "config" not in metadata:
        raise ValueError(f"{path} holds no ByteLM: its metadata has no config")
    try:
        fields = parse(metadata["config"].encode())
        if not isinstance(fields, dict):
            raise TypeError("it is no object of JSON")
        config = ByteLMConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no ByteLM: its config is {metadata['config']!r:.200}") from error
    if config.layers > len(tensors):  # checked before that many layers are made
        raise ValueError(f"{path} does not fit its config: {config.layers} layers, {len(tensors)} parameters")
    model = ByteLM(config, rngs=nnx.Rngs(0))
    parameters = dict(named_parameters(model))
    if parameters.keys() != tensors.keys():
        raise ValueError(f"{path} does not fit its config: it differs in {sorted(parameters.keys() ^ tensors.keys())}")
    for name, param in parameters.items():
        tensor = tensors[name]
        if (tensor.dtype, tensor.shape) != (
            param.dtype,
            param.shape,
        ):  # assignment would cast it or broadcast it
            fits, got = (f"{x.dtype} of shape {x.shape}" for x in (param, tensor))
            raise ValueError(f"{path} does not fit its config: {name} must be {fits}, got {got}")
        param[...] = jnp.asarray(tensor)
    return model


def named_parameters(model: ByteLM) -> list[tuple[str, nnx.Param]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [(".".join(map(str, path)), param) for path, param in flat]
