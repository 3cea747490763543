"""The examples: continuous batching, and training by a config."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from flax import nnx

import glax.models

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- serving ---------------------------------------------------------------------------------------------------------


def served(folder: pathlib.Path, prompts: list[str], monkeypatch, capsys, *options: str) -> list[str]:
    """What the example prints of each answer and each refusal."""
    monkeypatch.setattr(sys, "argv", ["serve.py", "--model", str(folder), *options, "--", *prompts])
    example("serve").main()
    return capsys.readouterr().out.removeprefix("---- ").split("\n---- ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A model of bytes, whose answers differ."""
    sizes = dict(vocab_size=256, hidden_size=32, num_hidden_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32)
    model = glax.models.from_config(dict(model_type="gla", initializer_range=0.2, **sizes), rngs=nnx.Rngs(0))
    path = tmp_path_factory.mktemp("served")
    glax.models.save_pretrained(model, path)
    return path


def test_served_text_is_that_of_each_request_alone(folder, monkeypatch, capsys):
    """More requests than slots, and a prompt longer than one read. Bytes that are no UTF-8 stand for themselves, and empty
    prompts are refused alone."""
    model, prompts = glax.models.from_pretrained(folder), ["the fox", "x", "", "a b c " * 30, "th\udcffe", "the fox"]
    got = served(folder, prompts, monkeypatch, capsys, "--length", "9", "--capacity", "2")
    want = ["'' is refused: prompt must be a sequence of at least one token, got []"]
    for prompt in prompts:
        if prompt:
            tokens = list(prompt.encode("utf-8", "surrogateescape"))
            written = bytes(np.asarray(glax.models.generate(model, [tokens], 9))[0].tolist()).decode("utf-8", "replace")
            want.append(f"{prompt!r}: length \n{prompt.encode(errors='backslashreplace').decode()}{written}")
    assert sorted(x.rstrip("\n") for x in got) == sorted(x.rstrip("\n") for x in want)
    assert got[0] == want[0] and len({x.split("\n")[-1] for x in want}) > 3  # not the same text every time


def test_wrong_sizes_of_the_server_are_errors(folder, monkeypatch, capsys):
    (got,) = served(folder, ["the"], monkeypatch, capsys, "--length", "-1")
    assert got == "'the' is refused: max_tokens must be an integer of at least 0, got -1\n"
    with pytest.raises(SystemExit, match="2"):
        served(folder, ["the"], monkeypatch, capsys, "--capacity", "0")
    assert "capacity must be an integer of at least 1, got 0" in capsys.readouterr().err


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_config_trains_by_the_example(tmp_path, monkeypatch, capsys):
    config = EXAMPLES.joinpath("train_gla.toml").read_text().replace("../README.md", str(EXAMPLES.parent / "README.md"))
    config = config.replace("num_hidden_layers = 2", "num_hidden_layers = 1").replace("length = 128", "length = 16")
    (tmp_path / "small.toml").write_text(config)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "small.toml"), "--steps", "2"])
    example("train").main()
    assert "step 2/2: " in capsys.readouterr().out
    assert (tmp_path / "train-out" / "model" / "model.safetensors").is_file()
    (tmp_path / "small.toml").write_text(config.replace("length = 16", "length = 8"))
    with pytest.raises(SystemExit, match="2"):
        example("train").main()
    assert "is of another length: length was 16, got 8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "missing.toml")])
    with pytest.raises(SystemExit, match="2"):
        example("train").main()
    assert "No such file or directory" in capsys.readouterr().err
