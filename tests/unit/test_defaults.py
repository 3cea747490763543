"""generation_config.json: end tokens and how tokens are drawn, in a checkpoint's folder and by `glax generate`."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax.models.generation import FILE, GenerationDefaults, generation_defaults
from glax_cli import main

TINY = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
PROMPT = "the fox"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved")
    glax.models.save_pretrained(glax.models.from_config(TINY, rngs=nnx.Rngs(0)), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    for path in saved.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def defaults(folder: pathlib.Path, content, eos=None) -> GenerationDefaults:
    """Of a model of 256 tokens whose config.json has `eos`."""
    (folder / FILE).write_text(json.dumps(content))
    model = nnx.eval_shape(lambda: glax.models.from_config(TINY | dict(eos_token_id=eos), rngs=nnx.Rngs(0)))
    model.folder = str(folder)
    return generation_defaults(model)


@pytest.mark.parametrize(
    ("content", "eos", "want"),
    [
        ({}, None, ()),
        ({}, 3, (3,)),
        ({}, [3, 4], (3, 4)),
        (dict(eos_token_id=5), 3, (5,)),
        (dict(eos_token_id=[5, 6]), 3, (5, 6)),
        (dict(eos_token_id=None), 3, (3,)),
        (dict(eos_token_id=[]), 3, ()),
        (dict(eos_token_id=[255, 256, -1]), 3, (255,)),
    ],
)
def test_end_tokens_are_those_of_the_file_else_of_the_config(tmp_path, content, eos, want):
    assert defaults(tmp_path, content, eos).eos == want


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (dict(do_sample=True), dict(temperature=1.0)),
        (dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.8), dict(temperature=0.7, top_k=20, top_p=0.8)),
        (dict(temperature=0.7, top_k=20, top_p=0.8), dict(temperature=0.0, top_k=20, top_p=0.8)),
        (dict(do_sample=False, temperature=None, top_k=None, top_p=None), {}),
        (dict(do_sample=True, temperature=0.0, top_k=0, top_p=1.0), {}),
        (dict(repetition_penalty=1.0, num_beams=1, min_p=None, suppress_tokens=[], bos_token_id=1, max_length=20), {}),
        (
            dict(repetition_penalty=1.1, num_beams=4, suppress_tokens=[7]),
            dict(unsupported=("num_beams=4", "repetition_penalty=1.1", "suppress_tokens=[7]")),
        ),
    ],
)
def test_how_tokens_are_drawn(tmp_path, content, want):
    assert defaults(tmp_path, content) == GenerationDefaults(**want)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "must hold a JSON object, got list"),
        (
            dict(eos_token_id="</s>"),
            "eos_token_id in .*generation_config.json must be a token or a list of tokens, got '</s>'",
        ),
        (dict(eos_token_id=True), "eos_token_id .* got True"),
        (dict(eos_token_id=[2.0]), r"eos_token_id .* got \[2.0\]"),
        (dict(temperature="0.7"), "temperature in .* must be a number of at most 1e\\+06, got '0.7'"),
        (dict(temperature=-1), "temperature in .* must be at least 0, got -1"),
        (dict(temperature=10**400), "temperature in .* must be a number"),
        (dict(top_k=2.5), "top_k in .* must be an integer of at least 0, got 2.5"),
        (dict(top_p=0), "top_p in .* must be above 0 and at most 1, got 0"),
        (dict(do_sample="yes"), "do_sample in .* must be true or false, got 'yes'"),
    ],
)
def test_a_value_that_is_none_is_an_error_by_name(tmp_path, content, text):
    with pytest.raises(ValueError, match=text):
        defaults(tmp_path, content)


# ---- the command -----------------------------------------------------------------------------------------------------


def generated(capsys, folder, *arguments: str) -> tuple[bytes, str]:
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "12", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out.encode(), captured.err


def greedy(folder, **options) -> list[int]:
    model = glax.models.from_pretrained(folder)
    return np.asarray(glax.models.generate(model, jnp.asarray([list(PROMPT.encode())]), 12, **options))[0].tolist()


def shown(tokens: list[int]) -> bytes:
    return (bytes(tokens).decode("utf-8", "replace") + "\n").encode()


def test_the_command_ends_at_an_end_token_of_a_byte_model(folder, capsys):
    tokens = greedy(folder)
    end = tokens[4]
    cut = tokens[: tokens.index(end) + 1]
    (folder / FILE).write_text(json.dumps(dict(eos_token_id=[end, 1000])))
    out, err = generated(capsys, folder)
    assert out == shown(cut) and err.startswith(f"{len(cut)} tokens")
    assert glax.models.end_tokens(glax.models.from_pretrained(folder)) == (end,)
    (folder / FILE).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | dict(eos_token_id=end)))
    assert generated(capsys, folder)[0] == shown(cut)


@pytest.mark.rest
def test_the_command_draws_as_the_file_says_and_arguments_win(folder, capsys):
    (folder / FILE).write_text(json.dumps(dict(do_sample=True, temperature=0.5, top_k=5, repetition_penalty=1.5)))
    key = jax.random.key(7)
    out, err = generated(capsys, folder, "--seed", "7")
    assert out == shown(greedy(folder, temperature=0.5, top_k=5, key=key))
    assert "glax generate: temperature=0.5, top_k=5 as generation_config.json says\n" in err
    assert "not supported, and not done: repetition_penalty=1.5 in generation_config.json\n" in err
    out, err = generated(capsys, folder, "--seed", "7", "--temperature", "2", "--top-p", "0.9")
    assert out == shown(greedy(folder, temperature=2.0, top_k=5, top_p=0.9, key=key))
    assert "glax generate: top_k=5 as generation_config.json says\n" in err
    out, err = generated(capsys, folder, "--temperature", "0")
    assert out == shown(greedy(folder)) and "says" not in err


def test_what_cannot_be_generated_from_is_one_line_and_exit_code_2(folder, capsys):
    def failure(*arguments: str) -> str:
        assert main(["generate", str(folder), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("glax generate: ") and error.count("\n") == 1
        return error

    (folder / FILE).write_text('{"eos_token_id": "x"}')
    assert "eos_token_id in" in failure("--prompt", "x")
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    assert "Not a regular file, but a FIFO" in failure("--prompt", "x")
    (folder / FILE).unlink()
    os.mkfifo(folder / "tokenizer.json")
    assert "Not a regular file, but a FIFO" in failure("--prompt", "x")
    (folder / "tokenizer.json").unlink()
    assert "No such file or directory" in failure("--prompt", "x", "--tokenizer", str(folder / "none"))
    assert "the prompt has no tokens" in failure("--prompt", "")


def test_a_prompt_of_bytes_that_are_no_utf8_is_read_as_bytes(folder, capsys):
    assert main(["generate", str(folder), "--prompt", os.fsdecode(b"caf\xe9"), "--max-new-tokens", "5"]) == 0
    model = glax.models.from_pretrained(folder)
    want = np.asarray(glax.models.generate(model, jnp.asarray([list(b"caf\xe9")]), 5))[0].tolist()
    assert capsys.readouterr().out.encode() == shown(want)


def test_a_file_that_is_no_json_is_named(saved, folder, capsys):
    (folder / FILE).write_text("{")
    assert main(["generate", str(folder), "--prompt", PROMPT]) == 2
    assert f"{folder / FILE} holds no JSON: Expecting property name" in capsys.readouterr().err
