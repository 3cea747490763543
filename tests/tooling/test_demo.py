"""The glax command and its demo, from its arguments to its files."""

import dataclasses
import errno
import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from flax import nnx
from rich.console import Console

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.cli import demo, demo_run
from glax.cli.kernels_table import show_kernels
from glax.nn.checkpoint import load
from glax.nn.model import ByteLM, ByteLMConfig
from glax.nn.text import read_text
from glax.nn.train import Recipe
from glax_cli import main

TINY = ByteLMConfig(width=16, layers=1, num_heads=2, num_kv_heads=2, key_width=8, value_width=8, mlp_width=16)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of [bold]the text[/bold]\n" for i in range(300)))
    return path


def settings(text, out, **changes):
    fields = dict(steps=6, batch=2, length=15, seed=0, must_win=False, model=TINY) | changes
    return demo_run.Settings(out=out, text=text, **fields)


def test_whole_demo(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "show_kernels", functools.partial(show_kernels, T=20, H=1, width=16))
    out = tmp_path / "new" / "out"
    assert demo_run.tour(settings(text, out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "model.safetensors"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load(out / "model.safetensors").config == TINY

    shown = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)  # plain lines, for a pipe
    errors = [float(error) for error in re.findall(r"/xla/any +│ +(\S+)", shown)]
    assert len(errors) >= 3 and max(errors) < 1e-4
    assert re.findall(r"^step (\d)/6: ", shown, re.M) == ["1", "2", "3", "4", "5", "6"]
    assert "wins by" in shown and "bits per byte" in shown
    assert "the logits agree" in shown and "however long the text" in shown
    assert "of [bold]the text[/bold]\n" in shown.split("Generation from")[1]  # the prompt, not taken for markup


def test_losing_is_a_failure_if_it_must_win(text, tmp_path, monkeypatch, capsys):
    def untrained(model, text, recipe, seed, each_step):
        each_step(1, 8.0, model)
        return model

    monkeypatch.setattr(demo_run, "train", untrained)
    monkeypatch.setattr(demo_run, "show_kernels", lambda *_: None)
    assert demo_run.tour(settings(text, tmp_path, steps=1, must_win=True)) == 1
    assert "The order-2 model wins" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_ends_the_demo(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "show_kernels", lambda console, seed: None)
    monkeypatch.setattr(demo_run, "Recipe", functools.partial(Recipe, learning_rate=1e30))
    assert demo_run.tour(settings(text, tmp_path)) == 1
    assert re.search(
        r"glax demo: the loss of step [2-6] is (nan|inf): lower recipe.learning_rate", capsys.readouterr().err
    )
    assert not (tmp_path / "model.safetensors").exists()


def test_wrong_decoding_is_noticed(text, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "token_by_token", lambda model, tokens: 1.01 * model(tokens))
    model = ByteLM(TINY, rngs=nnx.Rngs(0))
    assert not demo_run.show_equality(Console(), model, read_text(text, 15))
    assert "DISAGREE" in capsys.readouterr().out


def test_kernels_that_cannot_run_are_named_with_their_reason(monkeypatch, capsys):
    load_kernels()
    runs = kernel_registry.kernels["recurrent/xla/any"]
    refuses = dataclasses.replace(runs, platform="other", supports=lambda r: "widths [64] only")
    monkeypatch.setattr(kernel_registry, "kernels", {spec.name: spec for spec in (runs, refuses)})
    show_kernels(Console(), 0, T=20, H=1, width=8)
    assert "not here: recurrent/other/any: widths [64] only" in capsys.readouterr().out


def test_interrupted_training_leaves_a_checkpoint(text, tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from rich.console import Console
        from glax.cli import demo_run as tour
        from glax.nn import ByteLMConfig
        settings = tour.Settings(Path({str(tmp_path / "out")!r}), Path({str(text)!r}), steps=1_000_000, batch=2,
                                 length=15, seed=0, must_win=True, model={TINY})
        sys.exit(tour.language_model(settings, tour.prepare(settings), Console()))
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Interrupted after" in rest and "Traceback" not in errors
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "model.safetensors"]
    assert load(tmp_path / "out" / "model.safetensors").config == TINY


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_full_disk_does_not_cost_the_trained_model(everywhere, tmp_path, monkeypatch, capsys):
    """The checkpoint goes elsewhere, and the message says where; if there is no place, the model serves from memory."""
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir(), other.mkdir()
    save = demo_run.save

    def full(model, path):
        if everywhere or path.parent == out:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(model, path)

    monkeypatch.setattr(demo_run, "save", full)
    monkeypatch.setenv("TMPDIR", str(other))
    model = ByteLM(TINY, rngs=nnx.Rngs(3))
    path, complete = demo_run.write_results(
        settings(None, out), Console(), model, demo_run.History([8.0], {0: 8.0}), 8.0, "title"
    )
    said = capsys.readouterr().err
    assert not complete and "model.safetensors: No space left on device" in said and said.count("\n") == 1
    if everywhere:
        assert path is None and "in memory only" in said and not list(other.iterdir())
    else:
        assert path.parent.parent == other and str(path) in said
        assert (load(path).head.kernel[...] == model.head.kernel[...]).all()
    assert [file.name for file in out.iterdir()] == ["loss.png"]


# ---- arguments -------------------------------------------------------------------------------------------------------


def failure(arguments, capsys) -> str:
    """What goes to stderr, one line; the exit code is 2."""
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be at least 1, got 0"),
        (["--steps", "many"], "invalid integer value: 'many'"),
        (["--seed", "-1"], "must be at least 0, got -1"),
        (["--seed", str(2**63)], "must be at most 9223372036854775807, got 9223372036854775808"),
        (["--batch", str(2**40)], "must be at most 2147483647"),
        (["--text", "/dev/zero"], "cannot read the text /dev/zero: it is a device"),
        (["--text", "fifo"], "cannot read the text fifo: it is a FIFO: name a file"),
        (["--out", ""], "must be the name of a file or folder, got ''"),
        (["--length", "-3"], "must be at least 1, got -3"),
        (["--text", "missing.txt"], "cannot read the text missing.txt: No such file or directory"),
        (["--text", "."], "cannot read the text .: Is a directory"),
        (["--text", "short.txt"], "the text short.txt is too short: 9 bytes, windows of 256 need 5140"),
        (["--text", "text.txt", "--length", "16", "--out", "text.txt"], "cannot write to text.txt: File exists"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    os.mkfifo(tmp_path / "fifo")
    assert message in failure(["demo", *arguments], capsys)


def test_missing_packages_are_one_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("flax", "rich") else find(name))
    assert failure(["demo"], capsys) == "glax demo: flax, rich not installed: pip install flax rich\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "orbax" else find(name))
    assert (
        failure(["train", "x"], capsys) == "glax train: orbax-checkpoint not installed: pip install orbax-checkpoint\n"
    )


@pytest.mark.fast
def test_no_message_installs_glax_from_an_index():
    """The name is on no index, so anyone could claim it there."""
    package = pathlib.Path(glax.__file__).parent
    remedies = [
        (path, line)
        for path in (*package.rglob("*.py"), *package.parents[0].glob("tests/**/*.py"))
        for line in path.read_text().splitlines()
        if "pip install" in line
    ]
    assert len(remedies) > 5
    assert [x for x in remedies if re.search(r"pip install .*\bglax\b", x[1]) and "re.search" not in x[1]] == []


def test_interrupt_outside_training_is_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "glax demo: interrupted\n"
