"""Saving: one whole model whatever is interrupted, nothing left of older ones, and nothing that nobody loads."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import glax.models
from glax._src.core.files import COMMITTED, staging
from tests.models.folders import INDEX, WEIGHTS, assert_same, copied, make_sharded, scaled, write_index


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return copied(tmp_path / "model")


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_saving_over_a_sharded_folder_is_read_back(folder):
    make_sharded(folder)
    (folder / "README.md").write_text("mine")
    model = scaled(glax.models.from_pretrained(folder))
    glax.models.save_pretrained(model, folder)
    assert_same(glax.models.from_pretrained(folder), model)
    assert sorted(x.name for x in folder.iterdir()) == ["README.md", "config.json", WEIGHTS]


def test_an_index_that_names_the_single_file_goes_and_the_file_stays(folder):
    write_index(folder, dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS))
    with pytest.warns(UserWarning, match="holds both model.safetensors and model.safetensors.index.json"):
        model = scaled(glax.models.from_pretrained(folder))
    glax.models.save_pretrained(model, folder)
    assert_same(glax.models.from_pretrained(folder), model)
    assert not (folder / INDEX).exists()


@pytest.mark.parametrize("size", [10_000, "10KB", "9.765625 KiB", "1B"])
def test_shards_of_a_size_are_read_back(folder, tmp_path, size):
    model = scaled(glax.models.from_pretrained(folder))
    glax.models.save_pretrained(model, tmp_path / "out", max_shard_size=size)
    files = sorted(x.name for x in (tmp_path / "out").iterdir() if x.name.endswith(".safetensors"))
    assert len(files) > 2 and WEIGHTS not in files
    assert all(re.fullmatch(rf"model-\d{{5}}-of-{len(files):05}\.safetensors", name) for name in files)
    contents = [load_file(tmp_path / "out" / name) for name in files]
    assert all(len(x) == 1 or sum(y.nbytes for y in x.values()) <= 10_000 for x in contents)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, x in zip(files, contents, strict=True) for name in x}
    assert index["metadata"]["total_size"] == sum(y.nbytes for x in contents for y in x.values())
    assert_same(glax.models.from_pretrained(tmp_path / "out"), model)
    glax.models.save_pretrained(model, tmp_path / "out")
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "5", "GB", "5 pounds", "0MB"])
def test_a_size_of_no_sense_is_refused(folder, tmp_path, size):
    model = glax.models.from_pretrained(folder)
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes, or such as"):
        glax.models.save_pretrained(model, tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


def test_saving_beside_a_pickle_says_so(folder):
    model = glax.models.from_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"old")
    with pytest.warns(UserWarning, match=r"also holds pytorch_model\.bin"):
        glax.models.save_pretrained(model, folder)


KILLED = """
import json, os, pathlib, shutil, signal, sys
import numpy as np
from safetensors.numpy import load_file, save_file
from glax._src.core.files import newest
from glax.models.folders import files_of, read_config
from glax.models.saving import Stored, write

place = pathlib.Path(sys.argv[1])
OLD, NEW = ({"a": np.full((8, 8), x, np.float32), "b": np.full(3, x, np.float32)} for x in (1.0, 2.0))
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir", "tempfile.mkdtemp"}


def content(folder):
    files, handles = files_of(folder)
    tensors = {name: float(handles[path].get_tensor(name).ravel()[0]) for name, path in files.items()}
    return {read_config(folder)["x"], *tensors.values(), float(newest(folder, "vocab.txt").read_text())}


def make(folder, shards):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(x=1.0)))
    (folder / "vocab.txt").write_text("1.0")
    if shards:
        for name, x in OLD.items():
            save_file({name: x}, folder / f"model-0000{1 + (name == 'b')}-of-00002.safetensors")
        table = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=table)))
    else:
        save_file(OLD, folder / "model.safetensors")


def save(folder, x, most=10**9):
    (place / "vocab.txt").write_text(str(x))
    tensors = {name: Stored.of(value) for name, value in (NEW if x == 2.0 else OLD).items()}
    write(folder, tensors, json.dumps(dict(x=x)), {"vocab.txt": place / "vocab.txt"}, most)


def killed_at(count, folder, most):
    left = [count]

    def hook(event, args):
        if event in WATCHED:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        save(folder, 2.0, most)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


seen, left_behind = set(), 0
for shards, most in ((False, 10**9), (True, 10**9), (False, 100), (True, 100)):  # older shards, and the size of new ones
    count = 0
    while True:
        count += 1
        folder = place / f"{shards}-{most}-{count}"
        make(folder, shards)
        was_killed = killed_at(count, folder, most)
        found = content(folder)
        assert found in ({1.0}, {2.0}), (shards, most, count, found)
        left_behind += any(x.name.startswith(".glax") for x in folder.iterdir())
        save(folder, 1.0)
        assert content(folder) == {1.0}
        names = sorted(x.name for x in folder.iterdir())
        assert names == ["config.json", "model.safetensors", "vocab.txt"], (count, names)
        shutil.rmtree(folder)
        if not was_killed:
            assert found == {2.0}
            break
        seen.add(found.pop())
    assert count > 15, count
assert seen == {1.0, 2.0} and left_behind > 10, (seen, left_behind)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_that_is_killed_anywhere_leaves_one_whole_model_and_the_next_save_cleans_up(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.fast
def test_the_folder_of_a_save_that_lives_is_not_taken_for_abandoned(tmp_path):
    (tmp_path / ".glax-dead").mkdir()
    (tmp_path / ".glax-file").write_text("mine")
    with staging(tmp_path) as first:
        assert not (tmp_path / ".glax-dead").exists()
        with staging(tmp_path) as second:
            assert first.is_dir() and second.is_dir() and first != second
        assert first.is_dir()
    assert [x.name for x in tmp_path.iterdir()] == [".glax-file"]


def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(folder, monkeypatch):
    model, before = glax.models.from_pretrained(folder), sorted(folder.iterdir())
    model.folder = str(copied(folder.parent / "other"))
    (folder.parent / "other" / "vocab.txt").write_text("x")
    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(OSError, match="no space"):
        glax.models.save_pretrained(scaled(model), folder)
    assert sorted(folder.iterdir()) == before
    assert_same(glax.models.from_pretrained(folder), model)


def fails(*_):
    raise OSError("no space")


def test_a_folder_of_the_name_of_a_file_is_refused_before_anything_changes(folder):
    model = glax.models.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors"):
        glax.models.save_pretrained(model, folder)
    assert not (folder / COMMITTED).exists()


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(layer: nnx.Linear, rngs) -> nnx.LoRALinear:
    low = nnx.LoRALinear(*layer.kernel.shape, lora_rank=2, use_bias=layer.bias is not None, rngs=rngs)
    low.kernel[...], low.lora.lora_b[...] = layer.kernel[...], jax.random.normal(rngs.params(), low.lora.lora_b.shape)
    return low


def test_low_rank_terms_are_merged_on_saving_and_read_by_every_layer(folder, tmp_path):
    tokens, rngs = jnp.arange(24).reshape(1, 24), nnx.Rngs(3)
    model = glax.models.from_pretrained(folder)
    plain = model(tokens)
    block = model.blocks[0]
    block.mlp.gate, block.attn.query = adapted(block.mlp.gate, rngs), adapted(block.attn.query, rngs)
    model.head = adapted(model.head, rngs)
    wrapped = nnx.LoRA(*block.attn.output.kernel.shape[:1], 2, 16, base_module=block.attn.output, rngs=rngs)
    wrapped.lora_b[...] = jax.random.normal(rngs.params(), wrapped.lora_b.shape)
    block.attn.output = wrapped
    logits = model(tokens)
    assert float(jnp.abs(logits - plain).max()) > 0.1
    glax.models.save_pretrained(model, tmp_path / "out")
    saved = glax.models.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(saved(tokens), logits, rtol=1e-4, atol=1e-5)
    few = tokens[:, :3]  # fewer rows than columns take other products
    np.testing.assert_allclose(saved(few), model(few), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(saved.loss(tokens), model.loss(tokens), rtol=1e-5)


def test_parameters_that_nothing_loads_are_refused_by_path(folder, tmp_path):
    model = glax.models.from_pretrained(folder)
    model.blocks[0].attn.query = nnx.LoRA(16, 2, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.query cannot be saved: glax adds a LoRA to the kernel"):
        glax.models.save_pretrained(model, tmp_path / "out")
    model = glax.models.from_pretrained(folder)
    model.extra = nnx.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"parameters that its config describes.*not of it are extra"):
        glax.models.save_pretrained(model, tmp_path / "out")
    model = glax.models.from_pretrained(folder)
    model.norm.scale = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match=r"not of it are norm\.scale"):
        glax.models.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
