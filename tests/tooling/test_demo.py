"""The glax command and its demo, from its arguments to its files."""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.cli import demo, demo_run, order2
from glax.cli.kernels_table import show_kernels
from glax.models import from_config, from_pretrained
from glax_cli import main

TINY = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)


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
    assert {"loss.png", "model", "text.txt"} < {path.name for path in out.iterdir()}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert from_pretrained(out / "model").config.values == TINY

    shown = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)  # plain lines, for a pipe
    assert shown.startswith("\nKernels that run here\n") and shown.endswith(f"\nLosses: {out / 'loss.png'}\n")
    errors = [float(error) for error in re.findall(r"/xla/any +│ +(\S+)", shown)]
    assert len(errors) >= 3 and max(errors) < 1e-4
    assert re.findall(r"^step (\d)/6: .* bits/byte", shown, re.M) == ["1", "2", "3", "4", "5", "6"]
    assert "wins by" in shown and "bits per byte" in shown
    assert "the logits agree" in shown and "however long the text" in shown
    assert "of [bold]the text[/bold]\n" in shown.split("Generation")[1]  # the prompt, not taken for markup

    monkeypatch.setattr(demo_run, "show_kernels", lambda *_: None)
    assert demo_run.tour(settings(text, out)) == 0
    assert "no step is left" in capsys.readouterr().out
    with pytest.raises(demo_run.UsageError, match="is of another seed: seed was 0, got 1"):
        demo_run.tour(settings(text, out, seed=1))


def test_losing_is_a_failure_if_it_must_win(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "show_kernels", lambda *_: None)
    assert demo_run.tour(settings(text, tmp_path / "out", steps=1, must_win=True)) == 1
    assert "The order-2 model wins" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_ends_the_demo(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "show_kernels", lambda console, seed: None)
    monkeypatch.setattr(demo_run, "LEARNING_RATE", 1e30)
    assert demo_run.tour(settings(text, tmp_path / "out")) == 1
    assert re.search(r"glax demo: the .*loss (of|behind) step [2-6] is (nan|inf): ", capsys.readouterr().err)
    assert not (tmp_path / "out" / "model").exists()


def test_wrong_decoding_is_noticed(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "token_by_token", lambda model, tokens: 1.01 * model(tokens))
    model = from_config(TINY, rngs=nnx.Rngs(0))
    assert not demo_run.show_equality(Console(), model, demo_run.prepare(settings(text, tmp_path / "out")))
    assert "DISAGREE" in capsys.readouterr().out


def test_kernels_that_cannot_run_are_named_with_their_reason(monkeypatch, capsys):
    load_kernels()
    runs = kernel_registry.kernels["recurrent/xla/any"]
    refuses = dataclasses.replace(runs, platform="other", supports=lambda r: "widths [64] only")
    monkeypatch.setattr(kernel_registry, "kernels", {spec.name: spec for spec in (runs, refuses)})
    show_kernels(Console(), 0, T=20, H=1, width=8)
    assert "not here: recurrent/other/any: widths [64] only" in capsys.readouterr().out


def test_interrupted_training_leaves_a_model_and_goes_on(text, tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from rich.console import Console
        from glax.cli import demo_run as tour
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
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Interrupted after step" in rest and "Traceback" not in errors
    assert (tmp_path / "out" / "loss.png").is_file()
    assert from_pretrained(tmp_path / "out" / "model").config.values == TINY


# ---- the order-2 model -----------------------------------------------------------------------------------------------


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.fast
def test_order2_is_its_formula_by_hand():
    train = as_bytes(b"abcabdab")  # a 3, b 3, c 1, d 1
    c = (1 + 4 / 256) / (8 + 4)  # p(c)
    b = (3 + 4 / 256) / (8 + 4)  # p(b)
    expected = {
        b"abc": (1 + 2 * ((1 + 2 * c) / (2 + 2))) / (2 + 2),  # "b" and "ab" have two followers each
        b"cab": (1 + (3 + b) / (3 + 1)) / (1 + 1),
        b"zzc": c,  # neither context was seen
        b"zbc": (1 + 2 * c) / (2 + 2),
    }
    for three, want in expected.items():
        assert order2.probabilities(train, as_bytes(three)) == pytest.approx(want, rel=1e-12)


def test_order2_sums_to_one_and_leaves_nothing_impossible():
    train = as_bytes(b"abcabdabracadabra " * 30)
    for context in (b"ab", b"ra", b"zz", b"bz", b"za"):
        p = np.array([order2.probabilities(train, as_bytes(context + bytes([c])))[0] for c in range(256)])
        assert p.sum() == pytest.approx(1, abs=1e-12) and p.min() > 0


@pytest.mark.fast
def test_a_text_holds_out_whole_windows_from_its_end():
    raw = bytes(i % 251 for i in range(1000))
    text = demo_run.halves(raw, length=7, name="x")
    assert text.held_out.shape == (6, 8)  # of 50 bytes
    assert text.train.tobytes() + text.held_out.tobytes() == raw
    assert demo_run.halves(bytes(1020), length=50, name="x").held_out.shape == (1, 51)


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
        (["--text", "/dev/zero"], "cannot read the text /dev/zero: Not a regular file, but a device"),
        (["--text", "fifo"], "cannot read the text fifo: Not a regular file, but a FIFO"),
        (["--out", ""], "must be the name of a file or folder, got ''"),
        (["--length", "-3"], "must be at least 1, got -3"),
        (["--text", "missing.txt"], "cannot read the text missing.txt: No such file or directory"),
        (["--text", "."], "cannot read the text .: Not a regular file, but a directory"),
        (["--text", "short.txt"], "the text short.txt is too short: 9 bytes, windows of 128 need 2580"),
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
