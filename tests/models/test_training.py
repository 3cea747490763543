"""Training: it learns, resumes as if never interrupted, and spreads over devices; the loss; the commands."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import glax.models
import glax.parallel
from glax.models.load import MODEL_TYPES
from glax.models.training import NotFiniteLoss, TrainingConfig, spread_sequence, train
from glax.nn.losses import next_token_loss
from glax_cli import main

GLA = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)


@pytest.fixture
def config(tmp_path) -> TrainingConfig:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = dict(steps=8, batch=4, length=16, learning_rate=0.02, checkpoint_every=3)
    return TrainingConfig(GLA, str(text), out=str(tmp_path / "out"), **sizes)


def test_a_run_that_is_interrupted_continues_as_if_it_never_was(config, tmp_path):
    _, whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")))
    train(config, lambda step, loss, seconds: step == 5)
    model, parts = train(config)
    assert parts.losses == whole.losses and list(parts.losses) == list(range(1, 9))
    assert parts.losses[8] < parts.losses[1] - 0.3
    assert list(parts.held_out) == [3, 5, 6, 8]
    saved = glax.models.from_pretrained(pathlib.Path(config.out) / "model")
    for x, y in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, saved)), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="is of another model"):
        train(dataclasses.replace(config, model=GLA | dict(num_hidden_layers=2)))


@pytest.mark.parametrize("changes", [dict(remat="full"), dict(data=2, sequence=2)], ids=["remat", "sharded"])
def test_remat_and_shards_change_no_loss(config, tmp_path, changes):
    if len(jax.devices()) < changes.get("data", 1) * changes.get("sequence", 1):
        pytest.skip("needs 4 devices")
    config = dataclasses.replace(config, steps=2)
    _, plain = train(dataclasses.replace(config, out=str(tmp_path / "plain")))
    _, other = train(dataclasses.replace(config, **changes))
    np.testing.assert_allclose(list(other.losses.values()), list(plain.losses.values()), rtol=1e-5)


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_every_recurrence_of_a_model_takes_its_shard_of_the_sequence(kind):
    folder = pathlib.Path(__file__).parent / "fixtures" / kind
    model = nnx.eval_shape(lambda: glax.models.from_config(folder, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((1, 1), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread_sequence(model, mesh)
    found = [module.recurrence for _, module in nnx.iter_modules(model) if hasattr(module, "recurrence")]
    assert found and all(getattr(recurrence, "func", None) is glax.parallel.recurrent for recurrence in found)


def test_the_loss_and_its_gradient_are_those_of_all_logits():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 1500, 4), (4, 11)))
    targets = jnp.asarray(rng.integers(-2, 11, (3, 1500)))

    def whole(x, kernel):
        logs = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", x, kernel))
        picked = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return -(picked * (targets >= 0)).sum() / (targets >= 0).sum()

    got = jax.jit(jax.value_and_grad(lambda x, k: next_token_loss(x, k, targets), (0, 1)))(x, kernel)
    want = jax.jit(jax.value_and_grad(whole, (0, 1)))(x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8)
    assert next_token_loss(x, kernel, jnp.full((3, 1500), -1)) == 0
    text = jax.jit(jax.grad(lambda x: next_token_loss(x, kernel, targets))).lower(x).as_text()
    assert "3x1500x11xf32" not in text


def test_the_loss_of_float32_residuals_has_products_in_the_models_dtype():
    config = dict(model_type="mamba2", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8)
    config |= dict(state_size=8, n_groups=1, residual_in_fp32=True)
    model = glax.models.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    text = jax.jit(lambda tokens: model.loss(tokens)).lower(jnp.zeros((2, 9), jnp.int32)).as_text()
    heads = [line for line in text.splitlines() if "dot_general" in line and "16x32" in line]
    assert heads and all("x16xbf16" in line for line in heads)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(steps=0), "steps must be an integer of at least 1, got 0"),
        (dict(batch=3, data=2), "batch must be a multiple of data=2, the devices that shard it, got 3"),
        (dict(learning_rate=-1e-3), "learning_rate must be above 0, got -0.001"),
        (dict(clip=0.0), "clip must be above 0, got 0.0"),
        (dict(weight_decay=-0.1), "weight_decay must be at least 0, got -0.1"),
        (dict(warmup=100), "warmup must be from 0 to 1, the share of the steps, got 100"),
        (dict(learning_rate=float("nan")), "learning_rate must be finite in float32"),
        (dict(remat="dot"), "remat must be one of 'full', 'dots', 'dots_no_batch', got 'dot'"),
        (dict(dtype="float64"), "dtype must be one of float32, bfloat16, got 'float64'"),
        (dict(seed=2**63), "seed must be at most 9223372036854775807, got 9223372036854775808"),
        (dict(seed=-1), "seed must be an integer of at least 0, got -1"),
        (dict(seed=1.5), "seed must be an integer of at least 0, got 1.5"),
        (dict(batch=2**31), "batch must be at most 2147483647, got 2147483648"),
        (dict(model=[]), "model must be the content of a config.json or the name of a folder, got []"),
        (dict(model=dict(x=float("nan"))), "model must be the content of a config.json, got {'x': nan}: "),
        (
            dict(model=dict(x=datetime.date(2000, 1, 1))),
            "model must be the content of a config.json, got {'x': datetime.date",
        ),
        (dict(model=None), "model must be the content of a config.json or the name of a folder, got None"),
        (dict(text=["a"]), "text must be a name, got ['a']"),
        (dict(text=""), "text must be a name, got ''"),
        (dict(tokenizer=3), "tokenizer must be a name, got 3"),
        (dict(out="a\0b"), "out must be a name, got 'a\\x00b'"),
        (dict(remat=[]), "remat must be a name, got []"),
    ],
)
def test_a_config_of_no_sense_is_refused(config, changes, text):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(config, **changes)
    assert text in str(caught.value)


def test_the_commands_train_and_continue_a_prompt(config, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(model=GLA, text="text.txt", out="cli", batch=4, length=16, steps=3)))
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert "step 3/3: " in out and "tokens/s" in out and "held out: " in out
    start, read, begun = out.splitlines()[:3]
    assert start.startswith("start: random parameters, seed 0; ") and start.endswith(" parameters")
    assert read == f"text: {tmp_path / 'text.txt'}, 2,581 tokens to train on, 119 held out"
    assert begun == f"3 steps of 4 x 16 tokens: a new run in {tmp_path / 'cli'}"
    assert (tmp_path / "cli" / "loss.png").stat().st_size > 1000
    folder = str(tmp_path / "cli" / "model")
    assert main(["generate", folder, "--prompt", "the", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("5 tokens")
    model = glax.models.from_pretrained(folder)
    written = glax.models.generate(model, jnp.asarray([list(b"the")]), 5)
    assert captured.out == bytes(np.asarray(written[0], np.uint8)).decode("utf-8", "replace") + "\n"
    path.write_text(json.dumps(dict(model=GLA | dict(hidden_act="tanh"), text="text.txt", out="cli2")))
    assert main(["train", str(path)]) == 2
    assert "hidden_act='tanh'" in capsys.readouterr().err
    path.write_text(json.dumps(dict(model=GLA, text="text.txt", out="cli", batch=4, length=16, steps=3, seed=1)))
    assert main(["train", str(path)]) == 2
    assert "is of another seed: seed was 0, got 1" in capsys.readouterr().err
    path.write_text(json.dumps(dict(model=GLA, text="text.txt", step=3)))
    assert main(["train", str(path)]) == 2
    assert "keys that are not known: step" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "is no folder: nothing is downloaded" in capsys.readouterr().err


# ---- runs that nobody watches ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps: (its config, its losses)."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = dict(steps=6, batch=4, length=16, learning_rate=0.02, checkpoint_every=3)
    config = TrainingConfig(GLA, str(folder / "text.txt"), out=str(folder / "out"), **sizes)
    return config, train(config)[1]


@pytest.fixture
def rerun(finished, tmp_path):
    """rerun(changes of the config) -> (the history, the step that it resumed from), on a copy of the finished run."""
    config, _ = finished
    shutil.copytree(config.out, tmp_path / "copy")

    def run(**changes):
        steps = []
        _, history = train(
            dataclasses.replace(config, out=str(tmp_path / "copy"), **changes),
            begin=lambda begun: steps.append(begun.step),
        )
        return history, steps[0]

    return run


def test_another_start_text_or_recipe_is_refused_by_name(rerun, finished, tmp_path):
    (tmp_path / "other.txt").write_text("the quick brown fox jumps over the lazy cat. " * 60)
    glax.models.save_pretrained(glax.models.from_config(GLA, rngs=nnx.Rngs(1)), tmp_path / "start")
    before = sorted(path.name for path in (tmp_path / "copy").rglob("*"))
    for changes, name in (
        (dict(text=str(tmp_path / "other.txt")), "text"),
        (dict(model=str(tmp_path / "start")), "model"),
        (dict(model=GLA | dict(intermediate_size=24)), "model"),
        (dict(seed=1), "seed"),
        (dict(learning_rate=0.03), "learning_rate"),
        (dict(batch=2, clip=2.0), "batch, clip"),
        (dict(dtype="bfloat16"), "dtype"),
    ):
        with pytest.raises(
            ValueError, match=rf"in .*copy/checkpoints is of another {name}: .* was .*, got .*: name another out"
        ):
            rerun(**changes)
    with pytest.raises(ValueError, match=r"steps must be at least 6, the steps that .*copy has, got 5"):
        rerun(steps=5)
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == before
    shutil.copy(finished[0].text, tmp_path / "moved.txt")
    history, step = rerun(text=str(tmp_path / "moved.txt"), remat="full", checkpoint_every=5)
    assert step == 6 and history == finished[1]


def test_more_steps_continue_and_lost_losses_stop_nothing(rerun, finished, tmp_path):
    (tmp_path / "copy" / "history.json").write_text('{"losses": {"1": 5.')
    with pytest.warns(UserWarning, match=r"history.json cannot be read: .*: set aside as .*history.json.unreadable"):
        history, step = rerun(steps=7)
    assert step == 6 and list(history.losses) == [7] and list(history.held_out) == [6, 7]
    assert history.held_out[6] == finished[1].held_out[6]  # computed again from the checkpoint


def test_a_kill_between_losses_and_checkpoint_shows_the_losses_of_the_checkpoint(config, tmp_path, monkeypatch):
    _, whole = train(dataclasses.replace(config, out=str(tmp_path / "whole"), steps=4, checkpoint_every=2))
    config = dataclasses.replace(config, steps=4, checkpoint_every=2)
    save = glax.models.training.Checkpoints.save

    def killed(checkpoints, step, state):
        if step == 4:
            raise KeyboardInterrupt
        save(checkpoints, step, state)

    monkeypatch.setattr(glax.models.training.Checkpoints, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    begun = []
    _, history = train(config, begin=lambda x: begun.append(x.step))
    assert begun == [2] and history == whole


@pytest.mark.parametrize(
    ("every", "good", "what"),
    [(3, 3, "the loss of step 6 is nan"), (5, None, "the held-out loss behind step 5 is nan")],
)
def test_a_loss_that_is_not_finite_ends_a_run(config, monkeypatch, every, good, what):
    """The update of step 5 makes every parameter NaN."""
    optimizer = TrainingConfig.optimizer

    def poisoned(recipe):
        poison = optax.scale_by_schedule(lambda count: jnp.where(count < 4, 1.0, jnp.nan))
        return optax.chain(optimizer(recipe), poison)

    monkeypatch.setattr(TrainingConfig, "optimizer", poisoned)
    newest = "no checkpoint was written" if good is None else f"the last good checkpoint is of step {good}"
    with pytest.raises(NotFiniteLoss, match=f"{what}: {newest} in .*out/checkpoints: .* learning_rate below 0.02"):
        train(dataclasses.replace(config, checkpoint_every=every))
    out = pathlib.Path(config.out)
    assert not (out / "model").exists()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ([] if good is None else [str(good)])


def test_a_parameter_that_is_not_finite_and_not_read_is_not_saved(config, monkeypatch):
    """The embedding of a byte that is in no text has no part in any loss."""
    optimizer = TrainingConfig.optimizer

    def poisoned(recipe):
        def update(updates, state, params=None):
            return jax.tree.map(lambda x: x.at[255].set(jnp.inf) if x.shape == (256, 16) else x, updates), state

        return optax.chain(optimizer(recipe), optax.GradientTransformation(lambda params: optax.EmptyState(), update))

    monkeypatch.setattr(TrainingConfig, "optimizer", poisoned)
    with pytest.raises(NotFiniteLoss, match="the parameters or moments behind step 3 are not finite: no checkpoint"):
        train(config)


def test_what_is_wrong_with_a_run_is_one_line_and_exit_code_2(tmp_path, capsys):
    text, folder = tmp_path / "text.txt", tmp_path
    text.write_text("x" * 2000)
    os.mkfifo(folder / "fifo")
    (folder / "link.txt").symlink_to("/dev/zero")
    (folder / "list.json").write_text("[1]")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deep.toml").write_text("x = " + "[" * 100_000)
    (folder / "latin.toml").write_bytes(b"text = '\xe9'")

    def written(name: str, **changes) -> str:
        values = dict(model=GLA, text="text.txt", out="out", batch=4, length=16, steps=2) | changes
        (folder / name).write_text(json.dumps(values))
        return name

    for name, message in (
        ("missing.toml", f"No such file or directory: {folder / 'missing.toml'}"),
        ("fifo", f"Not a regular file, but a FIFO: {folder / 'fifo'}"),
        ("list.json", "must hold a table of keys, got list"),
        ("deep.json", "is neither TOML nor JSON"),
        ("deep.toml", "is neither TOML nor JSON"),
        ("latin.toml", "is neither TOML nor JSON"),
        (written("1.json", model=[]), "model must be the content of a config.json or the name of a folder, got []"),
        (written("2.json", seed=2**63), "seed must be at most 9223372036854775807, got 9223372036854775808"),
        (written("3.json", text="fifo"), f"cannot read {folder / 'fifo'}: Not a regular file, but a FIFO"),
        (written("4.json", text="link.txt"), f"cannot read {folder / 'link.txt'}: Not a regular file, but a device"),
        (written("5.json", text="none.txt"), f"cannot read {folder / 'none.txt'}: No such file or directory"),
        (written("6.json", tokenizer="fifo"), f"cannot read {folder / 'fifo'}: Not a regular file, but a FIFO"),
        (written("7.json", model="none"), f"{folder / 'none'}"),
        (
            written("8.json", data=1000, batch=1000),
            f"data times sequence must be at most {jax.device_count()}, the number of",
        ),
    ):
        assert main(["train", str(folder / name)]) == 2, name
        error = capsys.readouterr().err
        assert error.startswith("glax train: ") and message in error and error.count("\n") == 1, (name, error)


@contextlib.contextmanager
def process(path: pathlib.Path):
    command = [sys.executable, "-u", "-m", "glax_cli", "train", str(path)]
    env = os.environ | dict(PYTHONPATH=str(pathlib.Path(glax.__file__).parents[1]))
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as made:
        try:
            yield made
        finally:
            made.kill()


def test_a_killed_run_keeps_others_out_while_it_lives_and_continues_when_it_is_dead(config, tmp_path, capsys):
    fields = dataclasses.asdict(config) | dict(steps=400, checkpoint_every=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with process(path) as first:
        lines = iter(first.stdout.readline, "")
        assert any(line.startswith("step 20/400") for line in lines), first.stderr.read()
        assert main(["train", str(path)]) == 2
        assert "out must be a folder that no other training writes to" in capsys.readouterr().err
        first.kill()
        first.wait()
    done = max(int(x.name) for x in pathlib.Path(config.out, "checkpoints").iterdir() if x.name.isdecimal())
    assert 18 <= done < 400 and not pathlib.Path(config.out, "model").exists()
    path.write_text(json.dumps(fields | dict(steps=done + 2)))
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{config.out} has step {done}: resumes" in out
    history = json.loads(pathlib.Path(config.out, "history.json").read_text())
    assert list(history["losses"]) == [str(step) for step in range(1, done + 3)]
    assert f"held out: {history['held_out'][str(done + 2)]:.3f} nats/token" in out
