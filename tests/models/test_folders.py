"""Folders that have lived: what is read, what is refused and how."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax_cli import main
from tests.models.folders import (
    FIXTURES,
    INDEX,
    WEIGHTS,
    assert_same,
    change_config,
    change_weights,
    copied,
    make_sharded,
    write_index,
)

pytestmark = pytest.mark.core


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return copied(tmp_path / "model")


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_the_single_file_is_read_where_an_index_stands_beside_it(folder):
    """Transformers tests for model.safetensors first, and reads the index only where that is missing."""
    single = load_file(folder / WEIGHTS)
    make_sharded(folder)
    save_file({name: x + 1 for name, x in single.items()}, folder / WEIGHTS)
    with pytest.warns(UserWarning, match="the first is read, as in transformers"):
        model = glax.models.from_pretrained(folder)
    np.testing.assert_array_equal(model.norm.scale[...], single["model.norm.weight"] + 1)


@pytest.mark.parametrize("name", ["gla", "mamba2", "granitemoehybrid", "zamba2"])
def test_a_tied_weight_may_be_stored_under_the_heads_name_alone(tmp_path, name):
    folder = copied(tmp_path / "model", name)
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda x: {k: v for k, v in x.items() if k != "lm_head.weight"})
    wanted = glax.models.from_pretrained(folder)
    embedding = wanted.names("embedding.embedding")
    change_weights(folder, lambda x: {("lm_head.weight" if k == embedding else k): v for k, v in x.items()})
    assert_same(glax.models.from_pretrained(folder), wanted)
    change_weights(folder, lambda x: x | {embedding: x["lm_head.weight"]})
    assert_same(glax.models.from_pretrained(folder), wanted)
    change_weights(folder, lambda x: x | {embedding: x["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight and .* differ, but its config ties them"):
        glax.models.from_pretrained(folder)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_options"])  # the head of the second is tied
def test_the_outer_config_of_qwen3_5_decides_whether_the_head_is_tied(tmp_path, name):
    """transformers 5.24.0 reads tie_word_embeddings there alone. It saves tied models whose text_config has false."""
    folder, wanted = copied(tmp_path / "model", name), glax.models.from_pretrained(FIXTURES / name)
    inside = wanted.config.text_values | dict(tie_word_embeddings=wanted.head is not None)
    change_config(folder, text_config=inside)
    assert_same(glax.models.from_pretrained(folder), wanted)


def test_the_oldest_files_of_rwkv7_hold_the_mixtures_of_a_layer_as_one_tensor(tmp_path):
    """fla's code for these files takes rows 0 to 5 of x_x as x_r, x_w, x_k, x_v, x_a and x_g."""
    folder = copied(tmp_path / "oldest", "rwkv7")

    def joined(weights):
        layers = {name.removesuffix("x_r") for name in weights if name.endswith(".x_r")}
        rows = {f"{layer}x_x": np.stack([weights.pop(f"{layer}x_{x}")[0, 0] for x in "rwkvag"]) for layer in layers}
        return weights | rows

    change_weights(folder, joined)
    assert_same(glax.models.from_pretrained(folder), glax.models.from_pretrained(FIXTURES / "rwkv7"))
    change_weights(folder, lambda weights: {name: x[:5] if name.endswith("x_x") else x for name, x in weights.items()})
    with pytest.raises(ValueError, match=r"attn\.x_x in .* must be \[6, columns\], got shape \[5, 16\]"):
        glax.models.from_pretrained(folder)


def test_buffers_of_rotary_positions_are_not_left_over(folder):
    wanted = glax.models.from_pretrained(folder)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32), "rotary.inv_freq": np.ones(4, int)}
    change_weights(folder, lambda x: x | more)
    assert_same(glax.models.from_pretrained(folder), wanted)


def test_shards_that_are_links_are_read(folder, tmp_path):
    wanted = glax.models.from_pretrained(folder)
    (tmp_path / "blobs").mkdir()
    for i, name in enumerate(sorted({*make_sharded(folder).values(), INDEX, "config.json"})):
        (folder / name).rename(tmp_path / "blobs" / str(i))
        (folder / name).symlink_to(f"../blobs/{i}")
    assert_same(glax.models.from_pretrained(folder), wanted)


def refused(folder, text, error=ValueError):
    with pytest.raises(error) as caught:
        glax.models.from_pretrained(folder)
    assert text in str(caught.value), caught.value


@pytest.mark.parametrize("name", [5, None, ["a"], "../x.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "x\0"])
def test_an_index_may_only_name_files_of_its_folder(folder, name):
    table = make_sharded(folder)
    write_index(folder, table | {"model.norm.weight": name})
    refused(folder, "must name a file in its own folder for model.norm.weight, got ")


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "x"]
)
def test_an_index_without_a_map_is_refused(folder, content):
    make_sharded(folder)
    (folder / INDEX).write_text(content)
    refused(folder, "model.safetensors.index.json holds no ")


def test_an_index_and_its_shards_must_agree(folder):
    table = make_sharded(folder)
    write_index(folder, table | {"model.ghost.weight": "model-00001-of-00002.safetensors"})
    refused(folder, "names tensors that their files lack: model.ghost.weight (model-00001-of-00002.safetensors)")
    write_index(folder, table | {"model.ghost.weight": "model-00003-of-00003.safetensors"})
    refused(folder, "names files that are not in", FileNotFoundError)
    write_index(folder, {k: v for k, v in table.items() if k != "model.norm.weight"})
    glax.models.from_pretrained(folder)  # its shard holds it all the same
    (folder / INDEX).unlink()
    refused(folder, "which names the tensors of its model-*: fetch the index, too", FileNotFoundError)


def test_tensors_of_too_few_axes_are_named(tmp_path):
    folder = copied(tmp_path / "model", "mamba2")
    conv = "backbone.layers.0.mixer.conv1d.weight"
    change_weights(folder, lambda x: x | {conv: x[conv][:, 0, 0]})
    refused(folder, f"{conv} in ")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "it is empty"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "it holds an adapter. Load its base model, and then the adapter by glax.models.load_adapter. Merge it",
        ),
        (["tiny.Q4_K_M.gguf", "README.md"], "it holds tiny.Q4_K_M.gguf, and GGUF is not read"),
        (["sub/config.json"], "Name one of "),
        (["snapshots/abc/config.json"], "it is a cache of huggingface_hub. Name one of "),
        (["notes.txt"], "it holds notes.txt"),
    ],
)
def test_a_folder_without_a_config_says_what_it_holds(tmp_path, names, text):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    refused(tmp_path, "has no config.json", FileNotFoundError)
    refused(tmp_path, text, FileNotFoundError)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("pytorch_model.bin", ValueError, "pytorch_model.bin is a pickle"),
        ("pytorch_model-00001-of-00002.bin", ValueError, "pytorch_model-00001-of-00002.bin is a pickle"),
        ("consolidated.00.pth", ValueError, "consolidated.00.pth is a pickle"),
        ("adapter_model.safetensors", FileNotFoundError, "it holds an adapter"),
        ("tiny.gguf", FileNotFoundError, "it holds tiny.gguf, and GGUF is not read"),
        ("weights.safetensors", FileNotFoundError, "it holds config.json, weights.safetensors"),
    ],
)
def test_weights_in_another_form_are_named_and_no_training_starts_from_random_ones(
    folder, tmp_path, capsys, name, error, text
):
    (folder / WEIGHTS).rename(folder / name)
    refused(folder, text, error)
    (tmp_path / "text.txt").write_text("x" * 5000)
    run = dict(model="model", text="text.txt", out="out", batch=1, length=8, steps=1)
    (tmp_path / "train.json").write_text(json.dumps(run))
    assert main(["train", str(tmp_path / "train.json")]) != 0
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "nothing"])
def test_what_is_no_regular_file_is_refused_without_waiting(folder, name, kind):
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else "gone")
    text = {"fifo": "Not a regular file, but a FIFO", "device": "Not a regular file, but a device"}
    refused(folder, text.get(kind, "a directory" if kind == "folder" else f"{name} is a link to nothing"), OSError)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"a":' * 40 + "1" + "}" * 40, "config.json holds no JSON: it is nested deeper than 32 levels"),
        ("[" * 100000, "config.json holds no JSON: it is nested deeper than 32 levels"),
        ("5", "config.json must hold a JSON object, got int"),
        ('{"a": 1, "a": 2}', "config.json holds no JSON: the key 'a' stands twice"),
        ('{"a": ' + "9" * 5000 + "}", "config.json holds no JSON: Exceeds the limit"),
        ("{", "config.json holds no JSON: "),
    ],
)
def test_a_config_of_no_sense_is_refused(folder, content, text):
    (folder / "config.json").write_text(content)
    refused(folder, text)


# ---- dtypes, arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["gla", "mamba2", "qwen3_next", "zamba_untied", "zamba2_untied"])
def test_the_configs_dtype_decides_that_of_activations(tmp_path, name, key):
    folder = copied(tmp_path / "model", name)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]

    def mixed(weights):
        return {k: x if k == "lm_head.weight" else np.asarray(jnp.asarray(x, jnp.bfloat16)) for k, x in weights.items()}

    change_weights(folder, mixed)
    (folder / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    model = glax.models.from_pretrained(folder)
    assert model.dtype == jnp.bfloat16 and model.head.kernel.dtype == jnp.float32
    (folder / "config.json").write_text(json.dumps(config | {key: "float32"}))
    assert glax.models.from_pretrained(folder).dtype == jnp.float32
    (folder / "config.json").write_text(json.dumps(config))
    assert glax.models.from_pretrained(folder).dtype == jnp.bfloat16  # the dtype of the most elements
    (folder / "config.json").write_text(json.dumps(config | {key: "float16"}))
    assert glax.models.from_pretrained(folder).dtype == jnp.bfloat16  # no tensor has the dtype that the config names
    (folder / "config.json").write_text(json.dumps(config | {key: "int8"}))
    refused(folder, f"{key} in config.json must be one of float64, float32, float16, bfloat16, got 'int8'")


@pytest.mark.parametrize("dtype", [jnp.int8, "int8", "foo", bool, jnp.float8_e4m3fn, [1]])
def test_dtypes_in_which_no_model_computes_are_refused(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be None or one of float64, float32, float16, bfloat16, got "):
        glax.models.from_pretrained(folder, dtype=dtype)
    for name in ("dtype", "param_dtype"):
        with pytest.raises(ValueError, match=f"^{name} must be None or one of float64"):
            glax.models.from_config(folder, **{name: dtype}, rngs=nnx.Rngs(0))


def test_a_mesh_must_be_a_mesh(folder):
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, as jax\.make_mesh returns it, got list"):
        glax.models.from_pretrained(folder, mesh=jax.devices())
