"""Loading at size: the host's memory, what a change of the files does, parts of a model, and shards on a mesh."""

import io
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from rich.console import Console
from safetensors.numpy import load_file, save_file

import glax.models
from glax.models import load, placing
from glax.models.names import parameters
from tests.models.folders import WEIGHTS, assert_same, copied, make_sharded

# A checkpoint of 300 MB: the embedding and the head are its largest tensors.
LARGE = dict(model_type="llama", vocab_size=16000, hidden_size=2048, intermediate_size=4096, num_hidden_layers=2)
LARGE |= dict(num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=False)

MEASURED = """
import json, sys
import jax, jax.numpy as jnp
import glax.models

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))

folder, small, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
glax.models.from_pretrained(small, **options)  # what is imported and compiled once
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
before = status("VmRSS")
model = glax.models.from_pretrained(folder, **options)
leaves = jax.tree.leaves(__import__("flax").nnx.state(model))
print(json.dumps([status("VmHWM") - before, sum(x.nbytes for x in leaves), max(x.nbytes for x in leaves)]))
"""


def random_folder(folder: pathlib.Path, config: dict, dtype) -> pathlib.Path:
    """Write a folder of random weights, as `save_pretrained` names and arranges them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model, random = nnx.eval_shape(lambda: glax.models.from_config(config, rngs=nnx.Rngs(0))), np.random.default_rng(0)
    tensors = {}
    for path, param in parameters(model):
        shape = param.shape[::-1] if path.endswith("kernel") else param.shape
        tensors[model.names(path)] = random.standard_normal(shape, np.float32).astype(dtype)
    save_file(tensors, folder / WEIGHTS)
    return folder


def measured(folder, small, **options) -> tuple[int, int, int]:
    """Return the bytes of (the peak of the host's memory while a folder is loaded, all parameters, the largest)."""
    command = [sys.executable, "-c", MEASURED, folder, small, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", [{}, dict(dtype="float32")], ids=str)
def test_the_host_holds_the_parameters_and_at_most_one_more_tensor(tmp_path, options):
    folder = random_folder(tmp_path / "large", LARGE, ml_dtypes.bfloat16)
    small = random_folder(tmp_path / "small", LARGE | dict(hidden_size=64, vocab_size=32), ml_dtypes.bfloat16)
    peak, placed, largest = measured(folder, small, **options)
    assert placed > 250e6 and largest > 60e6
    assert peak <= placed + 1.2 * largest, (peak, placed, largest)


@pytest.mark.parametrize("name", ["gla", "qwen3_next", "mamba2"])
def test_a_file_that_is_overwritten_changes_no_model(tmp_path, name):
    folder = copied(tmp_path / "model", name)
    wanted = {path: np.array(param[...]) for path, param in parameters(glax.models.from_pretrained(folder))}
    model = glax.models.from_pretrained(folder)
    size = (folder / WEIGHTS).stat().st_size
    with open(folder / WEIGHTS, "r+b") as file:
        file.write(b"\xff" * size)
        file.flush()
        file.truncate(0)
    for path, param in parameters(model):
        np.testing.assert_array_equal(param[...], wanted[path], err_msg=path)
    (folder / WEIGHTS).unlink()
    assert jnp.isfinite(model(jnp.arange(8)[None])).all()


def test_no_array_shares_memory_with_a_file(tmp_path):
    """Files may hold tensors where a CPU's array could take over their memory, at multiples of 64 bytes."""
    content = np.arange(4096, dtype=np.float32).reshape(64, 64)
    content.tofile(tmp_path / "x")
    view = np.memmap(tmp_path / "x", np.float32, "r", 0, (64, 64))
    assert jax.device_put(view).unsafe_buffer_pointer() == view.ctypes.data
    for rows in (view, view.T):
        array = placing.placed([rows], (64, 64), view.dtype, None, is_stacked=False, release=lambda: None)
        assert not view.ctypes.data <= array.unsafe_buffer_pointer() < view.ctypes.data + view.nbytes
        np.testing.assert_array_equal(array, content if rows is view else content.T)


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (70, 1030), (31, 33), (1, 7), (7, 1), (32, 2048)])
def test_a_transposed_copy_casts_as_numpy_does(source, target, shape):
    stored = (100 * np.random.default_rng(0).standard_normal(shape)).astype(source)
    result = placing.aligned(shape[::-1], np.dtype(target))
    placing.fill(result, stored.T)
    np.testing.assert_array_equal(result, stored.T.astype(target))
    wide = np.concatenate([stored, stored], 1)[:, 1 : shape[1] + 1]  # rows that are no neighbours
    placing.fill(result, wide.T)
    np.testing.assert_array_equal(result, wide.T.astype(target))


@pytest.mark.parametrize("kind", [placing.HostShard, placing.DeviceShard])
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_shard_is_the_same_whether_host_or_device_arranges_it(kind, is_stacked, dtype):
    rows = [np.random.default_rng(i).standard_normal((6, 8)).astype(np.float32).T for i in range(4)]
    whole = np.stack(rows) if is_stacked else rows[0]
    place = (slice(1, 3), slice(0, 4), slice(2, 6)) if is_stacked else (slice(0, 4), slice(2, 6))
    shard = kind(jax.devices()[0], place, np.dtype(dtype), is_stacked)
    for i, row in enumerate(rows if is_stacked else rows[:1]):
        shard.add(i, row)
    np.testing.assert_array_equal(shard.array(), whole[place].astype(dtype))


@pytest.mark.parametrize("name", ["gla", "qwen3_next"])
def test_a_mesh_is_given_its_shards_alone(tmp_path, name):
    folder = copied(tmp_path / "model", name)
    make_sharded(folder)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    model, wanted = glax.models.from_pretrained(folder, mesh=mesh), glax.models.from_pretrained(folder)
    assert_same(model, wanted)
    glax.models.shard(wanted, mesh)
    for (path, param), (_, other) in zip(parameters(model), parameters(wanted), strict=True):
        assert param[...].sharding == other[...].sharding, path


# ---- parts of a model -------------------------------------------------------------------------------------------------


def test_only_the_named_parameters_are_read(tmp_path):
    folder = copied(tmp_path / "model")
    whole, part = glax.models.from_pretrained(folder), glax.models.from_pretrained(folder, only=r"layers\.1\.")
    for (path, param), (_, other) in zip(parameters(part), parameters(whole), strict=True):
        if path.startswith("blocks.1."):
            np.testing.assert_array_equal(param[...], other[...])
        else:
            assert isinstance(param.get_value(), jax.ShapeDtypeStruct), path
    x = jax.random.normal(jax.random.key(0), (1, 5, whole.width))
    np.testing.assert_array_equal(part.blocks[1].attn(x)[0], whole.blocks[1].attn(x)[0])
    tokens = jnp.arange(5)[None]
    for call in (
        lambda: part(tokens),
        lambda: part.loss(tokens),
        lambda: glax.models.generate(part, tokens, 2),
        lambda: glax.models.save_pretrained(part, tmp_path / "out"),
    ):
        with pytest.raises(
            ValueError, match=r"model must hold all its parameters, got none for blocks\.0\..* more: load it"
        ):
            call()


def test_a_person_sees_the_progress_and_a_file_does_not(tmp_path, monkeypatch):
    folder = copied(tmp_path / "model")
    monkeypatch.setattr(load, "SHOWN", 0)
    for is_terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(load, "Console", lambda **_: Console(file=shown, force_terminal=is_terminal))  # noqa: B023
        glax.models.from_pretrained(folder)
        assert ("loading model" in shown.getvalue() and "100%" not in shown.getvalue()) == is_terminal


def test_tensors_that_only_leaves_out_may_be_missing(tmp_path):
    folder = copied(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    save_file({name: x for name, x in tensors.items() if "layers.0." not in name}, folder / WEIGHTS)
    glax.models.from_pretrained(folder, only=r"layers\.1\.")
    with pytest.raises(ValueError, match=r"missing are .*layers\.0\."):
        glax.models.from_pretrained(folder, only=r"layers\.")


@pytest.mark.parametrize(
    ("only", "error", "text"),
    [
        ("(", ValueError, "only must be a regular expression of names, got '('"),
        (5, TypeError, "only must be None or a regular expression of names, got int"),
        ("nothing", ValueError, "got 'nothing': lm_head.weight, "),
    ],
)
def test_what_selects_nothing_is_refused(tmp_path, only, error, text):
    with pytest.raises(error) as caught:
        glax.models.from_pretrained(copied(tmp_path / "model"), only=only)
    assert text in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("x.gguf", "GGUF is not read"), ("x.bin", "a pickle can run any code")])
def test_a_file_in_another_form_is_refused_by_name(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=f"{name} is no folder: {text}"):
        glax.models.from_pretrained(tmp_path / name)


def test_an_index_may_not_lead_out_of_its_folder_through_a_link(tmp_path):
    folder = copied(tmp_path / "model")
    name = sorted(make_sharded(folder).values())[0]
    (tmp_path / "elsewhere").mkdir()
    (folder / name).rename(tmp_path / "elsewhere" / name)
    (folder / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(ValueError, match=rf"must name files in its own folder, got {name}, a link to .*elsewhere"):
        glax.models.from_pretrained(folder)
