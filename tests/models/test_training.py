"""Training: it learns, resumes as if never interrupted, and spreads over devices; the loss; the commands."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
import glax.parallel
from glax.cli import main
from glax.models.load import MODEL_TYPES
from glax.models.training import TrainingConfig, spread_sequence, train
from glax.nn.losses import next_token_loss

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
    assert (tmp_path / "cli" / "loss.png").stat().st_size > 1000
    folder = str(tmp_path / "cli" / "model")
    assert main(["generate", folder, "--prompt", "the", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("5 tokens")
    model = glax.models.from_pretrained(folder)
    written = glax.models.generate(model, jnp.asarray([list(b"the")]), 5)
    assert captured.out == bytes(np.asarray(written[0], np.uint8)).decode("utf-8", "replace") + "\n"
    path.write_text(json.dumps(dict(model=GLA | dict(use_gp=True), text="text.txt", out="cli2")))
    assert main(["train", str(path)]) == 2
    assert "use_gp=True" in capsys.readouterr().err
    path.write_text(json.dumps(dict(model=GLA, text="text.txt", step=3)))
    assert main(["train", str(path)]) == 2
    assert "keys that are not known: step" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "is no folder: nothing is downloaded" in capsys.readouterr().err
