"""Folders of every make: what is read is what was written last, and what cannot be read is refused by name."""

import json
import os
import pathlib
import tempfile
import warnings

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import glax.models
from tests.models.folders import FIXTURES, INDEX, WEIGHTS, assert_same, scaled, write_index

CONFIG = json.loads((FIXTURES / "gla" / "config.json").read_text())
TENSORS = load_file(FIXTURES / "gla" / WEIGHTS)
DTYPES = ("float32", "bfloat16", "float16")
NAMES = sorted(TENSORS)
BAD_NAMES = (5, None, [], {}, "", "..", "../x.safetensors", "/x.safetensors", "a\\b.safetensors", "gone.safetensors")
DAMAGES = ("ghost", "name", "no map", "cut", "lost", "extra", "bytes")
HARMLESS = ("rotary", "pickle", "killed save", "unlisted", "readme", "head as embedding", "further key")

folders = st.fixed_dictionaries(
    dict(
        shards=st.lists(st.integers(0, 2), min_size=len(NAMES), max_size=len(NAMES)) | st.none(),
        stale=st.booleans(),
        damage=st.none() | st.none() | st.sampled_from(DAMAGES),
        victim=st.sampled_from(NAMES),
        bad_name=st.sampled_from(BAD_NAMES),
        harmless=st.sets(st.sampled_from(HARMLESS), max_size=3),
        dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
        config_key=st.sampled_from(["dtype", "torch_dtype"]),
        config_dtype=st.none() | st.sampled_from(DTYPES),
        overwritten=st.booleans(),
    )
)


def tensors_of(plan) -> dict[str, np.ndarray]:
    dtypes = [plan["dtypes"][i % len(plan["dtypes"])] for i in range(len(NAMES))]
    return {name: TENSORS[name].astype(jnp.dtype(dtype)) for name, dtype in zip(NAMES, dtypes, strict=True)}


def is_tied(plan) -> bool:
    return "head as embedding" in plan["harmless"]


def make(folder: pathlib.Path, plan) -> dict[str, np.ndarray]:
    """Write the folder of a plan. Return the tensors that a reader must find, by name."""
    config = {k: v for k, v in CONFIG.items() if k != "dtype"} | dict(tie_word_embeddings=is_tied(plan))
    config |= {} if plan["config_dtype"] is None else {plan["config_key"]: plan["config_dtype"]}
    config |= dict(made_up="x") if "further key" in plan["harmless"] else {}
    (folder / "config.json").write_text(json.dumps(config))
    wanted, victim, damage = tensors_of(plan), plan["victim"], plan["damage"]
    stored = dict(wanted)
    if is_tied(plan):
        del wanted["lm_head.weight"]
        stored["lm_head.weight"] = stored.pop("model.embeddings.weight")
        victim = "lm_head.weight" if victim == "model.embeddings.weight" else victim
    if "rotary" in plan["harmless"]:
        stored["model.layers.0.attn.rotary.inv_freq"] = np.ones(2, np.float32)
    if damage == "lost":
        del stored[victim]
    if damage == "extra":
        stored["model.extra.weight"] = np.ones(2, np.float32)
    if "pickle" in plan["harmless"]:
        (folder / "pytorch_model.bin").write_bytes(b"old")
    if "readme" in plan["harmless"]:
        (folder / "README.md").write_text("mine")
    if "killed save" in plan["harmless"]:
        (folder / ".glax-killed").mkdir()
        (folder / ".glax-killed" / WEIGHTS).write_bytes(b"half")
    if plan["shards"] is None:
        save_file(stored, folder / WEIGHTS)
        if plan["stale"]:  # an index and a shard of an older model
            save_file({name: x + 1 for name, x in stored.items()}, folder / "model-00001-of-00001.safetensors")
            write_index(folder, dict.fromkeys(stored, "model-00001-of-00001.safetensors"))
    else:
        write_shards(folder, plan, stored, victim)
    if damage in ("cut", "bytes"):
        path = sorted(folder.glob("model*.safetensors"))[-1]
        path.write_bytes(b"x" * 100 if damage == "bytes" else path.read_bytes()[:-8])
    return wanted


def write_shards(folder: pathlib.Path, plan, stored, victim: str):
    table = {
        name: f"model-0000{1 + plan['shards'][i % len(NAMES)]}-of-00003.safetensors" for i, name in enumerate(stored)
    }
    for file in set(table.values()):
        save_file({name: x for name, x in stored.items() if table[name] == file}, folder / file)
    others = [name for name in table if name != victim and table[name] == table.get(victim)]
    if "unlisted" in plan["harmless"] and others:
        del table[others[0]]  # its file is named by the victim's entry and holds it all the same
    damages = dict(ghost={"model.ghost.weight": next(iter(table.values()))}, name={victim: plan["bad_name"]})
    write_index(folder, table | damages.get(plan["damage"], {}))
    if plan["damage"] == "no map":
        (folder / INDEX).write_text(json.dumps(dict(weight_map=[])))


def is_damaged(plan) -> bool:
    of_index = ("ghost", "name", "no map")
    return plan["damage"] is not None and not (plan["damage"] in of_index and plan["shards"] is None)


def activations(plan, wanted) -> str:
    """Return the dtype that the config names, if a tensor has it, else the dtype of most elements."""
    sizes = {}
    for x in [*wanted.values(), *([np.ones(2, np.float32)] if "rotary" in plan["harmless"] else [])]:
        sizes[str(x.dtype)] = sizes.get(str(x.dtype), 0) + x.size
    return plan["config_dtype"] if plan["config_dtype"] in sizes else max(sizes, key=lambda name: sizes[name])


def check_read(folder: pathlib.Path, plan, wanted):
    model = glax.models.from_pretrained(folder)
    out = folder.parent / "copy"
    glax.models.save_pretrained(model, out)
    found = load_file(out / WEIGHTS)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert str(model.dtype) == activations(plan, wanted)
    written, config = (json.loads((x / "config.json").read_text()) for x in (out, folder))
    assert written.keys() == config.keys() and written.get("made_up") == config.get("made_up")
    return model


@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(folders)
def test_every_folder_is_read_as_it_was_written_or_refused_by_name(plan):
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = pathlib.Path(place) / "model"
        folder.mkdir()
        wanted = make(folder, plan)
        if is_damaged(plan):
            try:
                glax.models.from_pretrained(folder)
            except (ValueError, FileNotFoundError) as error:
                assert str(folder) in str(error) and "\n" not in str(error), error
                return
            raise AssertionError(f"{plan} was read")
        model = check_read(folder, plan, wanted)
        if plan["overwritten"]:
            other = scaled(model)
            glax.models.save_pretrained(other, folder)
            assert_same(glax.models.from_pretrained(folder), other)
            own = {"README.md", "pytorch_model.bin"} & set(os.listdir(folder))
            assert set(os.listdir(folder)) == {"config.json", WEIGHTS} | own
