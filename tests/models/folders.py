"""Copies of fixtures, and changes of them."""

import json
import pathlib
import shutil

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from glax.models.names import parameters

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def copied(folder: pathlib.Path, name="gla") -> pathlib.Path:
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected*"))
    return folder


def change_config(folder: pathlib.Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: pathlib.Path, change):
    save_file({k: np.ascontiguousarray(x) for k, x in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)


def make_sharded(folder: pathlib.Path, count=2) -> dict[str, str]:
    """Divide model.safetensors into shards with an index. Return the index's weight_map."""
    weights = load_file(folder / WEIGHTS)
    files = {key: f"model-{1 + i % count:05}-of-{count:05}.safetensors" for i, key in enumerate(weights)}
    for file in set(files.values()):
        save_file({key: x for key, x in weights.items() if files[key] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    write_index(folder, files)
    return files


def write_index(folder: pathlib.Path, table):
    (folder / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=table)))


def values(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(param[...]) for path, param in parameters(model)}


def assert_same(model, other):
    got, want = values(model), values(other)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def scaled(model):
    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x * 1.5, params))
