"""generation_config.json: end tokens and how tokens are drawn, in a checkpoint's folder and by `glax generate`."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import glax.models
from glax.models import generation
from glax.models.generation import FILE, GenerationDefaults, generation_defaults
from glax_cli import main
from tests.compiling import Compiled

TINY = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
PROMPT = "the fox"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved")
    glax.models.save_pretrained(glax.models.from_config(TINY, rngs=nnx.Rngs(0)), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path / "cache"))
    for path in saved.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def defaults(folder: pathlib.Path, content, eos=None, **given) -> GenerationDefaults:
    """Of a model of 256 tokens whose config.json has `eos`."""
    (folder / FILE).write_text(json.dumps(content))
    model = nnx.eval_shape(lambda: glax.models.from_config(TINY | dict(eos_token_id=eos), rngs=nnx.Rngs(0)))
    model.folder = str(folder)
    return generation_defaults(model, **given)


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
        (dict(do_sample=True), dict(temperature=1.0, top_k=50)),
        (dict(do_sample=True, top_k=None, top_p=None, temperature=None), dict(temperature=1.0, top_k=50)),
        (dict(do_sample=True, top_k=0), dict(temperature=1.0)),
        (dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.8), dict(temperature=0.7, top_k=20, top_p=0.8)),
        (dict(temperature=0.7, top_k=20, top_p=0.8), {}),
        (dict(do_sample=False, temperature="x", top_k=-1, top_p=0, min_p=0.1, typical_p=0.9), {}),
        (dict(do_sample=True, top_k=5, min_p=0.1), dict(temperature=1.0, top_k=5, unsupported=("min_p=0.1",))),
        (dict(max_new_tokens=7), dict(max_new_tokens=7)),
        (dict(max_new_tokens=None, num_return_sequences=1, token_healing=False, remove_invalid_values=False), {}),
        (
            dict(max_length=9, max_time=2.5, num_return_sequences=3, token_healing=True)
            | dict(remove_invalid_values=True, constraints=[1]),
            dict(
                unsupported=(
                    "constraints=[1]",
                    "max_length=9",
                    "max_time=2.5",
                    "num_return_sequences=3",
                    "remove_invalid_values=True",
                    "token_healing=True",
                )
            ),
        ),
        (dict(do_sample=False, temperature=None, top_k=None, top_p=None), {}),
        (dict(do_sample=True, temperature=0.0, top_k=0, top_p=1.0), {}),
        (dict(repetition_penalty=1.0, num_beams=1, min_p=None, suppress_tokens=[], bos_token_id=1, max_length=20), {}),
        (
            dict(repetition_penalty=1.1, num_beams=4, suppress_tokens=[7], stop_strings=["a", "b"]),
            dict(repetition_penalty=1.1, stop=("a", "b"), unsupported=("num_beams=4", "suppress_tokens=[7]")),
        ),
    ],
)
def test_how_tokens_are_drawn(tmp_path, content, want):
    assert defaults(tmp_path, content) == GenerationDefaults(**want)


def test_what_is_given_counts_more_than_the_file(tmp_path):
    file = dict(temperature="x", top_k=20, top_p=0, max_new_tokens=-1)
    given = dict(temperature=0.7, top_p=0.8, max_new_tokens=3)
    assert defaults(tmp_path, file, **given) == GenerationDefaults(top_k=20, **given)
    with pytest.raises(ValueError, match=r"top_p in .* got 0"):
        defaults(tmp_path, file, temperature=0.7)
    assert defaults(tmp_path, dict(do_sample=True, top_k=-1), temperature=0.0) == GenerationDefaults()


def test_end_tokens_do_not_depend_on_other_options(tmp_path):
    model = glax.models.from_config(TINY, rngs=nnx.Rngs(0))
    model.folder = str(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(dict(do_sample=True, top_k=-1, eos_token_id=3)))
    assert glax.models.end_tokens(model) == (3,)


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
        (dict(do_sample=True, temperature="0.7"), "temperature in .* must be a number of at most 1e\\+06, got '0.7'"),
        (dict(do_sample=True, temperature=-1), "temperature in .* must be at least 0, got -1"),
        (dict(do_sample=True, temperature=10**400), "temperature in .* must be a number"),
        (dict(max_new_tokens=0), "max_new_tokens in .* must be an integer of at least 1, got 0"),
        (dict(do_sample=True, top_k=-1), "top_k in .* must be an integer of at least 0, got -1"),
        (dict(do_sample=True, top_k=2.5), "top_k in .* must be an integer of at least 0, got 2.5"),
        (dict(do_sample=True, top_p=0), "top_p in .* must be above 0 and at most 1, got 0"),
        (dict(repetition_penalty=0), "repetition_penalty in .* must be above 0, got 0"),
        (dict(stop_strings=["a", ""]), "stop_strings in .* must be a text or a list of texts, got"),
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


def test_the_command_compiles_a_program_for_the_prompt_and_one_for_the_tokens(folder, capsys):
    jax.clear_caches()
    generation.compiled.clear()
    with Compiled() as compiled:
        generated(capsys, folder)
    assert compiled.count == 2


@pytest.mark.rest
def test_the_command_draws_as_the_file_says_and_arguments_win(folder, capsys):
    (folder / FILE).write_text(json.dumps(dict(do_sample=True, temperature=0.5, top_k=5, num_beams=4)))
    key = jax.random.key(7)
    out, err = generated(capsys, folder, "--seed", "7")
    assert out == shown(greedy(folder, temperature=0.5, top_k=5, key=key))
    assert "glax generate: temperature=0.5, top_k=5 as generation_config.json says\n" in err
    assert "not supported, and not done: num_beams=4 in generation_config.json\n" in err
    out, err = generated(capsys, folder, "--seed", "7", "--temperature", "2", "--top-p", "0.9")
    assert out == shown(greedy(folder, temperature=2.0, top_k=5, top_p=0.9, key=key))
    assert "glax generate: top_k=5 as generation_config.json says\n" in err
    out, err = generated(capsys, folder, "--temperature", "0")
    assert out == shown(greedy(folder)) and "says" not in err


def test_the_command_stops_at_texts_and_penalises_as_the_file_says(folder, capsys):
    penalised = greedy(folder, repetition_penalty=0.5)
    assert penalised != greedy(folder)
    (folder / FILE).write_text(json.dumps(dict(repetition_penalty=0.5)))
    out, err = generated(capsys, folder)
    assert out == shown(penalised) and "repetition_penalty=0.5 as generation_config.json says\n" in err
    text = shown(greedy(folder)).decode()[:-1]
    at = next(i for i in range(2, 10) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 2])
    (folder / FILE).write_text(json.dumps(dict(stop_strings=[text[at : at + 2]])))
    assert generated(capsys, folder)[0].decode() == text[: text.index(text[at : at + 2])] + "\n"
    (folder / FILE).write_text(json.dumps(dict(max_new_tokens=3)))
    assert main(["generate", str(folder), "--prompt", PROMPT]) == 0
    captured = capsys.readouterr()
    assert captured.out.encode() == shown(greedy(folder)[:3])
    assert "glax generate: max_new_tokens=3 as generation_config.json says\n3 tokens" in captured.err
    other = text[0]
    assert generated(capsys, folder, "--stop", other, "--stop", "never")[0] == b"\n"


def words(folder: pathlib.Path, special: int):
    """Give the folder a tokenizer of the words t0, t1, ..., whose token `special` is a special one, <|end|>."""
    names = {f"t{i}": i for i in range(256) if i != special} | {"<|end|>": special}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="t0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    return made


def test_a_special_token_may_be_a_text_that_ends_a_sequence(folder, capsys):
    model = glax.models.from_pretrained(folder)
    free = np.asarray(glax.models.generate(model, [[5, 6]], 12))[0].tolist()
    at = free.index(free[4])
    made = words(folder, free[4])
    written = glax.models.generate(model, [[5, 6]], 12, stop="<|end|>", tokenizer=made)
    assert written[0].tolist() == free[:at] + [free[4]] * (12 - at)
    command = ("generate", str(folder), "--prompt", "t5 t6", "--max-new-tokens", "12", "--stop", "<|end|>")
    assert main(list(command)) == 0
    captured = capsys.readouterr()
    assert captured.out == made.decode(free[:at]) + "\n" and captured.err.startswith(f"{at + 1} tokens")


def test_samples_have_no_rows_behind_a_text_that_ends_them(folder, capsys):
    model, options = glax.models.from_pretrained(folder), dict(temperature=2.0, key=jax.random.key(3), samples=2)
    rows, log_probs = map(np.asarray, glax.models.generate(model, [[5, 6]], 12, log_probs=True, **options))
    token = int(next(token for token in rows[0] if token not in rows[1]))
    end = rows[0].tolist().index(token) + 1
    made = words(folder, 255 - token)
    command = ["generate", str(folder), "--prompt", "t5 t6", "--max-new-tokens", "12", "--stop", f"t{token}"]
    assert not any(f"t{token}" in f"t{other}" for other in rows[1])
    assert main([*command, "--temperature", "2", "--seed", "3", "--samples", "2", "--log-probs"]) == 0
    lines = [
        [f"{x:10.4f}  {made.decode([one])!r}" for x, one in zip(found, row, strict=True)]
        for row, found in zip(rows, log_probs, strict=True)
    ]
    before = "".join(f"{made.decode([one])} " for one in rows[0, : end - 1])
    assert capsys.readouterr().out.splitlines() == [
        f"[1] {before}",
        *lines[0][:end],
        f"[2] {made.decode(rows[1].tolist())}",
        *lines[1],
    ]


def test_the_command_prints_samples_and_log_probs(folder, capsys):
    drawn = dict(temperature=2.0, key=jax.random.key(3), samples=2)
    model = glax.models.from_pretrained(folder)
    rows, log_probs = glax.models.generate(model, [list(PROMPT.encode())], 12, log_probs=True, **drawn)
    out, _ = generated(capsys, folder, "--temperature", "2", "--seed", "3", "--samples", "2", "--log-probs")
    want = b"".join(
        f"[{i + 1}] ".encode()
        + shown(row)
        + b"".join(
            f"{x:10.4f}  {bytes([token]).decode('utf-8', 'replace')!r}\n".encode()
            for x, token in zip(found, row, strict=True)
        )
        for i, (row, found) in enumerate(zip(np.asarray(rows).tolist(), np.asarray(log_probs), strict=True))
    )
    assert out == want
    assert main(["generate", str(folder), "--prompt", "a", "--samples", "2"]) == 2
    assert "--samples needs --temperature above 0" in capsys.readouterr().err


def test_the_command_reads_programs_that_it_compiled_before(folder, capsys):
    programs, before = folder / "cache" / "programs", jax.config.jax_compilation_cache_dir
    generated(capsys, folder, "--no-compilation-cache")
    assert not programs.exists()
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None
    )
    jax.clear_caches()
    first, _ = generated(capsys, folder)
    stored, found = {path.name for path in programs.iterdir()}, len(hits)
    assert all(any(name in file for file in stored) for name in ("read_prompts", "write_tokens"))
    jax.clear_caches()
    assert generated(capsys, folder)[0] == first
    assert len(hits) > found and {path.name for path in programs.iterdir()} == stored
    assert jax.config.jax_compilation_cache_dir == before
    (folder / "file").write_text("")
    os.environ["GLAX_CACHE_DIR"] = str(folder / "file")  # the fixture restores it
    assert "compiled programs are not stored: Not a directory" in generated(capsys, folder)[1]


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
