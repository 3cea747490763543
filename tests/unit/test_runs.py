"""The folder of a training run: its lock, its record, its losses, and checkpoints that were damaged."""

import gc
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax.models.runs import (
    HISTORY,
    LOCK,
    Checkpoints,
    History,
    Journal,
    content,
    digest,
    locked,
)

# ---- lock ------------------------------------------------------------------------------------------------------------


def test_a_folder_has_one_training_at_a_time(tmp_path):
    out = tmp_path / "new" / "out"
    with (
        locked(out),
        pytest.raises(ValueError, match=r"no other training writes to, got .*new/out, which one does"),
        locked(out),
    ):
        pass
    with locked(out):
        pass


def test_a_lock_ends_with_its_process(tmp_path):
    program = (
        "import filelock, sys, time; x = filelock.FileLock(sys.argv[1]); x.acquire(); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.read(1)
        with pytest.raises(ValueError, match="no other training"), locked(tmp_path):
            pass
        other.kill()
        other.wait()
        with locked(tmp_path):
            pass


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match=f"out must be a folder to write to, got {out}: "), locked(out):
            pass


# ---- record ----------------------------------------------------------------------------------------------------------

RECORD = dict(seed=0, learning_rate=0.1, text=content("a.txt", "11"), model=content("random", "22"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(seed=1), "of another seed: seed was 0, got 1: name another out"),
        (dict(text=content("b.txt", "12")), r"of another text: text was a.txt \(11\), got b.txt \(12\)"),
        (
            dict(model=content("FOLDER", "23"), learning_rate=0.2),
            "of another learning_rate, model: learning_rate was 0.1",
        ),
        (dict(warmup=0.5), "of another warmup: warmup was None, got 0.5"),
    ],
)
def test_another_run_is_refused_by_name(saved, tmp_path, changes, text):
    out = shutil.copytree(saved[0], tmp_path / "out")
    with pytest.raises(ValueError, match=f"the checkpoint of step 6 in .* is {text}"):
        restored(out, record=RECORD | changes)
    assert restored(out, record=RECORD | dict(text=content("moved/a.txt", "11")))[1] == 6


# ---- losses ----------------------------------------------------------------------------------------------------------


def read_history(out: pathlib.Path, done: int) -> History:
    journal = Journal(out, done)
    journal.close()
    return journal.history


def test_losses_behind_the_checkpoint_are_left_out(tmp_path):
    journal = Journal(tmp_path, 0)
    for step, loss in ((1, 0.1), (2, 0.25), (3, 0.5)):
        journal.write(step, loss=loss, tokens_per_second=10.0, gradient_norm=float("inf"))
        journal.write(step, held_out=loss + 1)
    journal.close()
    lines = (tmp_path / HISTORY).read_text().splitlines()
    assert lines[0] == '{"step": 1, "loss": 0.1, "tokens_per_second": 10.0, "gradient_norm": null}' and len(lines) == 6
    with open(tmp_path / HISTORY, "a") as file:
        file.write('{"step": 3, "los')  # as a process that is killed may leave it
    assert read_history(tmp_path, 2) == History({1: 0.1, 2: 0.25}, {1: 1.1, 2: 1.25})
    assert (tmp_path / HISTORY).read_text().splitlines() == lines[:4]
    assert read_history(tmp_path, 0) == History()


@pytest.mark.parametrize(
    "damage",
    [
        b"[]\n",
        b"null\n",
        b"{}\n",
        b'{"step": 2, "loss"\n{"step": 2}\n',
        b'{"step": "2", "loss": 1}\n',
        b'{"step": 2, "loss": "x"}\n',
        b'{"step": 2, "loss": NaN}\n',
        b'{"step": true, "loss": 1}\n',
        b'{"step": 2, "loss": 1%s}\n' % (b"0" * 400),
        b'{"step": 2, "loss": %s}\n' % (b"[" * 9000),
        b"\xff\xfe\n",
        "a FIFO",
        "a folder",
        "a link to nothing",
    ],
    ids=str,
)
def test_a_damaged_history_is_set_aside_and_stops_no_run(tmp_path, damage):
    path = tmp_path / HISTORY
    if damage == "a FIFO":
        os.mkfifo(path)
    elif damage == "a folder":
        (path / "inside").mkdir(parents=True)
    elif damage == "a link to nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        path.write_bytes(b'{"step": 1, "loss": 0.25}\n' + damage + b'{"step": 2, "loss": 0.5}\n')
    whole = History({1: 0.25, 2: 0.5}) if isinstance(damage, bytes) else History()  # the other lines stay
    with pytest.warns(UserWarning, match=r"history.jsonl cannot be read: .*: set aside as .*history.jsonl.unreadable"):
        assert read_history(tmp_path, 2) == whole
    assert os.path.lexists(tmp_path / f"{HISTORY}.unreadable") and path.is_file()
    assert read_history(tmp_path, 2) == whole


def test_a_history_that_cannot_be_written_stops_no_run(tmp_path):
    with pytest.warns(UserWarning, match=r"history.jsonl cannot be written: .*: the run goes on without it"):
        journal = Journal(tmp_path / "none", 0)
    journal.write(1, loss=0.5)
    assert journal.history == History({1: 0.5})


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, dict]:
    """A folder with checkpoints of steps 3 and 6, and the state that each holds."""
    out = tmp_path_factory.mktemp("saved")
    states = {step: state(step) for step in (3, 6)}
    with Checkpoints(out, RECORD) as checkpoints:
        for step, x in states.items():
            checkpoints.save(step, x)
    return out, states


def test_the_digest_is_of_every_bit_and_of_no_sharding():
    """Any other element, place, dtype or shape has another digest; another mesh has not."""
    x = state(0)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = jax.device_put(x["w"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b")))
    assert digest(dict(w=spread)) == digest(dict(w=x["w"]))
    others = [
        x["w"].at[3, 5].set(jnp.nextafter(x["w"][3, 5], 9.0)),
        x["w"].at[0, 0].multiply(-1),
        x["w"][::-1],
        x["w"].T,
        x["w"].reshape(32, 128),
        jax.lax.bitcast_convert_type(x["w"], jnp.int32),
        x["w"].astype(jnp.bfloat16),
    ]
    others += [
        jnp.zeros(3, bool),
        jnp.array([True, False, False]),
        jnp.array([False, True, False]),
        jnp.uint8([0, 1, 0]),
    ]
    assert len({digest(dict(w=y)) for y in [x["w"], *others]}) == 1 + len(others)


def state(seed: int) -> dict:
    w = jax.random.normal(jax.random.key(seed), (64, 64))
    return dict(w=w, moment=[w.astype(jnp.bfloat16)], count=jnp.int32(seed))


def restored(out: pathlib.Path, like=None, record=RECORD) -> tuple[dict, int]:
    with Checkpoints(out, record) as checkpoints:
        return checkpoints.restore(jax.tree.map(jnp.zeros_like, state(0)) if like is None else like)[:2]


def assert_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def unreported(monkeypatch):
    """Inside, reads that orbax gave up may end in its threads at any time, which pytest would take for an error."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    gc.collect()


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def flipped(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut, marks=pytest.mark.rest),
        flipped,
        pytest.param(lambda raw: b"\0" * len(raw), marks=pytest.mark.rest),
        None,
    ],
    ids=["cut", "flipped", "zeros", "gone"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(saved, tmp_path, damage, unreported):
    """Whichever file is damaged, what is restored is what was saved: of step 6, or of step 3 with a warning."""
    files = [path for path in (saved[0] / "checkpoints" / "6").rglob("*") if path.is_file()]
    steps = []
    for i, path in enumerate(files):
        out = shutil.copytree(saved[0], tmp_path / str(i))
        copy = out / path.relative_to(saved[0])
        if damage is None:
            copy.unlink()
        else:
            copy.write_bytes(damage(path.read_bytes()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, step = restored(out)
        assert_equal(got, saved[1][step])
        said = [str(w.message) for w in caught if "is damaged" in str(w.message)]
        aside = out / "checkpoints" / "6.unreadable"
        assert len(said) == (step == 3) and aside.is_dir() == (step == 3)
        if step == 3:
            assert "the checkpoint of step 6 is damaged: " in said[0]
            assert f"set aside as {aside}, and the run goes on from step 3" in said[0]
            if 3 not in steps:
                with Checkpoints(out, RECORD) as checkpoints:
                    checkpoints.save(6, saved[1][6])
                assert restored(out)[1] == 6
        steps.append(step)
    assert steps.count(3) >= 3


def test_a_full_disk_leaves_the_checkpoint_before(saved, tmp_path, unreported):
    out = shutil.copytree(saved[0], tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(out, RECORD) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match="Cannot write a checkpoint"):
                checkpoints.save(9, state(9))
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    got, step = restored(out)
    assert step == 6
    assert_equal(got, saved[1][6])
    # A write of another array, which orbax does not wait for, may make the folder of step 9 again: a later start removes it.
    for _ in range(20):
        if sorted(path.name for path in (out / "checkpoints").iterdir()) == ["3", "6"]:
            return
        time.sleep(0.5)
        restored(out)
    raise AssertionError(f"remains stay: {list((out / 'checkpoints').iterdir())}")


def test_without_a_whole_checkpoint_nothing_is_moved(saved, tmp_path):
    out = shutil.copytree(saved[0], tmp_path / "out")
    for step in (3, 6):
        shutil.rmtree(out / "checkpoints" / str(step) / "default")
    for _ in range(2):  # the second start is no start from step 0 either
        with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged: .*remove that folder to start again"):
            restored(out)
    assert restored(tmp_path / "new")[1] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x | dict(w=x["w"][:, :32]), r"\['w'\] must be float32\[64, 32\], got float32\[64, 64\]"),
        (lambda x: x | dict(w=x["w"].astype(jnp.float16)), r"\['w'\] must be float16\[64, 64\], got float32\[64, 64\]"),
        (lambda x: x | dict(more=x["w"]), r"\['more'\] must be float32\[64, 64\], got none"),
        (lambda x: dict(w=x["w"], count=x["count"]), r"\['moment'\]\[0\] must be missing, got bfloat16\[64, 64\]"),
    ],
)
def test_another_model_is_told_from_damage(saved, tmp_path, change, text):
    with pytest.raises(ValueError, match=f"the checkpoint of step 6 in .* is of another model: {text}"):
        restored(shutil.copytree(saved[0], tmp_path / "out"), change(state(0)))


@pytest.mark.parametrize("fails", ["write", "close"])
def test_a_logger_that_fails_is_given_up_and_the_run_goes_on(tmp_path, fails):
    class Failing:
        def write(self, step, values):
            if fails == "write":
                raise ConnectionError("no route to the host")

        def close(self):
            raise OSError("no space left")

    journal = Journal(tmp_path, 0)
    journal.loggers.append(Failing())
    with pytest.warns(UserWarning, match="the logger Failing failed: .*the run goes on without it"):
        journal.write(1, loss=1.0)
        journal.close()
    assert journal.loggers == [] and '"loss": 1.0' in (tmp_path / HISTORY).read_text()
