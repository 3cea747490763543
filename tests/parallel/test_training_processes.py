"""`glax train` by several processes: the losses of one process, after kills at any time too."""

import json
import random
import shutil
import signal

import numpy as np
import pytest

from tests.training_runs import GLA, Runs, kill


@pytest.fixture
def runs(tmp_path):
    with Runs(tmp_path) as made:
        yield made


def test_two_and_four_processes_have_the_losses_of_one(runs):
    runs.finish(runs.start("one", 1, 1))
    wanted = runs.losses("one")
    assert list(wanted) == list(range(1, 9)) and wanted[8] < wanted[1] - 0.1
    for out, processes, devices, mesh in (
        ("two", 2, 2, dict(fsdp=2, sequence=2)),
        ("four", 4, 1, dict(data=-1, fsdp=2)),
        ("tensor", 2, 1, dict(tensor=2)),
    ):
        written = runs.finish(runs.start(out, processes, devices, **mesh))
        assert "step 8/8: " in written
        got = runs.losses(out)
        assert list(got) == list(wanted)
        np.testing.assert_allclose(list(got.values()), list(wanted.values()), rtol=0, atol=1e-5, err_msg=out)
        for name, x in runs.parameters(out).items():
            np.testing.assert_allclose(x, runs.parameters("one")[name], atol=1e-4, err_msg=f"{out} {name}")


def test_layers_under_one_scan_on_two_processes_have_the_losses_of_layers_one_by_one(runs):
    """To 1e-5 of each: a scan sums in another order, and Adam makes whole steps of the rounding of small gradients."""
    model = GLA | dict(num_hidden_layers=3)
    runs.finish(runs.start("alone", 1, 1, model=model, scan_layers=False))
    runs.finish(runs.start("scan", 2, 2, model=model, scan_layers=True, fsdp=2, sequence=2))
    got, wanted = (list(runs.losses(out).values()) for out in ("scan", "alone"))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=0)


def test_parts_of_documents_have_the_losses_of_whole_batches_on_two_processes(runs):
    """A part of 2 rows has as many as a process reads of a batch of 4."""
    lines = [json.dumps(dict(text=f"{i} is followed by {i + 1}. ")) for i in range(300)]
    for name, part in (("train", lines[:200]), ("held", lines[200:])):
        (runs.root / f"{name}.jsonl").write_text("\n".join(part))
    documents = dict(
        documents=[dict(files="train.jsonl")], held_out="held.jsonl", held_out_tokens=300, steps=2, text=None
    )
    runs.finish(runs.start("one", 1, 1, **documents))
    runs.finish(runs.start("two", 2, 1, **documents, fsdp=2, accumulate=2))
    one, two = (
        [json.loads(line) for line in (runs.root / out / "history.jsonl").read_text().splitlines()]
        for out in ("one", "two")
    )
    for name in ("loss", "held_out"):
        wanted, got = ([line[name] for line in lines if name in line] for lines in (one, two))
        assert wanted
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("processes", "kills"), [(1, 7), (2, 3)])
def test_a_run_that_is_killed_at_random_points_is_equal_in_every_bit(runs, processes, kills):
    """Any process is killed at random moments, of which some lie within a checkpoint; the others end with it."""
    mesh = dict(fsdp=2, data=2, steps=40, checkpoint_every=1, model=GLA)
    runs.finish(runs.start("whole", processes, 4 // processes, **mesh))
    draw = random.Random(processes)
    for i in range(kills):
        made = runs.start("killed", processes, 4 // processes, **mesh)
        victim = draw.randrange(processes)
        reached = len(runs.losses("killed")) if i else 0
        line = "tokens to train on" if i % 3 == 0 or reached > 30 else ": resumes"
        kill(made, victim, line, draw.uniform(0.0, 2.0))
    shutil.copytree(runs.root / "killed", runs.root / "other")
    runs.finish(runs.start("killed", processes, 4 // processes, **mesh))
    assert runs.losses("killed") == runs.losses("whole")
    for name, x in runs.parameters("whole").items():
        np.testing.assert_array_equal(x, runs.parameters("killed")[name], err_msg=name)
    runs.finish(runs.start("other", 1, 2, **mesh | dict(fsdp=1, data=1, sequence=2)))
    got, want = (np.array(list(runs.losses(out).values())) for out in ("other", "whole"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_and_ends_every_process(runs, processes):
    made = runs.start("out", processes, 2 // processes, data=2, steps=100_000, checkpoint_every=50_000)
    for written in made[0].stdout:
        if written.startswith("step 1/"):
            break
    made[-1].send_signal(signal.SIGTERM)
    codes = [process.wait(timeout=120) for process in made]
    assert codes == [0] * (processes - 1) + [128 + signal.SIGTERM]
    (step,) = (int(path.name) for path in (runs.root / "out" / "checkpoints").iterdir() if path.name.isdecimal())
    assert list(runs.losses("out")) == list(range(1, step + 1)) and (runs.root / "out" / "model").is_dir()
