"""Layers under one scan: the values and gradients of layers one by one, in programs that do not grow with depth."""

import dataclasses
import gc
import json
import pathlib
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import glax.models
from benchmarks.compile_depth import begun
from glax.cli.train import shown
from glax.models.layer_scan import Layers, patterns_of
from glax.models.model import Pattern
from glax.models.training import TrainingConfig, train

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
GLA = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=4, num_heads=2, intermediate_size=16)
HYBRID = GLA | dict(num_hidden_layers=5, attn=dict(layers=[1, 3], num_heads=2))
NEXT = json.loads((FIXTURES / "qwen3_next" / "config.json").read_text()) | dict(num_hidden_layers=4, vocab_size=256)
NEXT["layer_types"] = ["linear_attention", "full_attention"] * 2
MAMBA = dict(model_type="mamba", vocab_size=256, hidden_size=16, num_hidden_layers=3, residual_in_fp32=True)


@pytest.fixture
def config(tmp_path) -> TrainingConfig:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = dict(steps=4, batch=4, length=16, learning_rate=0.02, checkpoint_every=2, scan_layers=True)
    return TrainingConfig(GLA, str(text), out=str(tmp_path / "out"), **sizes)


@pytest.mark.parametrize(
    ("forms", "wanted"),
    [
        ("", []),
        ("abc", [(3, 1)]),
        ("aaaa", [(1, 4)]),
        ("xababab", [(1, 1), (2, 3)]),
        ("xaaayaaab", [(1, 1), (1, 3), (1, 1), (1, 3), (1, 1)]),
        ("aababaab", None),  # several are as good
        ("aaabaaab", [(4, 2)]),
        ("bbbbacacac", [(1, 4), (2, 3)]),
    ],
)
def test_patterns_cover_all_layers_in_few_blocks(forms, wanted):
    found = patterns_of(forms)
    assert sum(pattern.period * pattern.repeats for pattern in found) == len(forms)
    if wanted is not None:
        assert found == tuple(Pattern(*each) for each in wanted)
    layer = 0
    for pattern in found:
        behind = layer + pattern.period * pattern.repeats
        assert forms[layer : layer + pattern.period] * pattern.repeats == forms[layer:behind]
        layer = behind


@pytest.mark.parametrize(
    ("model", "dtype", "compiled"),
    [
        (GLA, "float32", 1),
        (HYBRID, "float32", 3),  # two layers in two repeats, and one behind them
        (NEXT, "float32", 2),
        (
            json.loads((FIXTURES / "rwkv7" / "config.json").read_text()),
            "float32",
            2,
        ),  # the first layer has a form of its own
        (json.loads((FIXTURES / "hgrn" / "config.json").read_text()) | dict(num_hidden_layers=4), "float32", 2),
        (MAMBA, "bfloat16", 1),  # residuals in float32 behind an embedding in bfloat16
    ],
    ids=lambda x: x.get("model_type", "") if isinstance(x, dict) else str(x),
)
def test_values_and_gradients_are_those_of_layers_one_by_one(model, dtype, compiled):
    """In float32 the loss and the whole gradient to 1e-6, and the gradient of each parameter to 2e-6 of its norm."""
    made = glax.models.from_config(model, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    made.set_remat("full")
    assert Layers.of(made, lambda path, variable: True, None).description.endswith("longer in a scan on CPUs and GPUs")
    layers = Layers.of(made, lambda path, variable: True, True)
    assert len(layers.numbers) == compiled
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, made.vocabulary, (2, 16)))
    ids = jnp.ones((2, 16), jnp.int32).at[:, 7:].set(2)

    def loss(graph, params):
        return nnx.merge(graph, params).loss(tokens, None, ids)

    graph, params = nnx.split(made)
    wanted, gradients = jax.jit(jax.value_and_grad(lambda params: loss(graph, params)))(params)
    stacked_graph, like = nnx.split(layers.model(made))
    stacks = layers.stacked(params, like)
    got, stacked = jax.jit(jax.value_and_grad(lambda params: loss(stacked_graph, params)))(stacks)
    bar = 1e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(got, wanted, rtol=bar)
    pairs = list(zip(*map(jax.tree.leaves, (layers.unstacked(stacked, gradients), gradients)), strict=True))
    pairs = [(np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()) for x, y in pairs]
    for x, y in pairs:
        assert np.linalg.norm(x - y) <= 2 * bar * np.linalg.norm(y)
    x, y = map(np.concatenate, zip(*pairs, strict=True))
    assert np.linalg.norm(x - y) <= bar * np.linalg.norm(y)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("zamba", "its hybrid layers share blocks"),
        ("zamba2", "its hybrid layers share blocks"),
        ("gla_attnres", "with attention residuals a layer reads the outputs of all earlier ones"),
        ("kimi_k3", "with attention residuals a layer reads the outputs of all earlier ones"),
        ("minimax", "no two layers that follow one another have one form"),
    ],
)
def test_a_model_that_cannot_says_why_and_is_refused_where_a_scan_is_wanted(model, why):
    made = nnx.eval_shape(lambda: glax.models.from_config(FIXTURES / model, rngs=nnx.Rngs(0)))
    found = Layers.of(made, lambda path, variable: True, None)
    assert found.description == f"each of {len(made.blocks)} compiled: {why}"
    with pytest.raises(ValueError, match=f"scan_layers must be false or left out for this model, got true: {why}"):
        Layers.of(made, lambda path, variable: True, True)


def test_the_program_of_a_step_does_not_grow_with_depth(config, tmp_path):
    def lines(period: int, layers: int) -> int:
        attention = dict(attn=dict(layers=list(range(1, layers, period)), num_heads=2)) if period > 1 else {}
        model = GLA | attention | dict(num_hidden_layers=layers)
        changes = dict(model=model, out=str(tmp_path / f"{period}-{layers}"))
        with begun(dataclasses.replace(config, **changes)) as run:
            return len(run.update.lower(*run.arguments(1, False)).as_text().splitlines())

    assert lines(1, 24) == lines(1, 4)
    assert lines(2, 24) == lines(2, 4)  # every second layer has softmax attention


@pytest.mark.parametrize(
    "changes",
    [
        dict(data=2, fsdp=2, remat="full", model=HYBRID),
        dict(fsdp=2, tensor=2, accumulate=2),
        dict(expert=2, sequence=2, model=NEXT),
        dict(fsdp=2, optimizer="muon", ema=0.9, moment_dtype="bfloat16"),
    ],
    ids=lambda changes: "-".join(f"{name}{x}" for name, x in changes.items() if name != "model"),
)
def test_a_scan_changes_no_loss_on_any_mesh(config, tmp_path, changes):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    config = dataclasses.replace(config, steps=2, **changes)
    _, scanned = train(config)
    _, alone = train(dataclasses.replace(config, out=str(tmp_path / "alone"), scan_layers=False))
    np.testing.assert_allclose(list(scanned.losses.values()), list(alone.losses.values()), rtol=1e-5)


def test_a_layer_is_gathered_at_a_time(config):
    """The axis of layers is not sharded, and no collective moves a stack."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    config = dataclasses.replace(config, fsdp=4, model=GLA | dict(num_hidden_layers=7, hidden_size=32))
    with begun(config) as run:
        stacks = [x for x in jax.tree.leaves(run.state) if x.shape[:1] == (7,)]
        assert stacks and all(x.sharding.shard_shape(x.shape)[0] == 7 for x in stacks)
        kernel = next(x for x in stacks if x.shape == (7, 32, 32))
        assert kernel.addressable_shards[0].data.size == kernel.size // 4
        text = run.update.lower(*run.arguments(1, False)).compile().as_text()
    gathers = re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-gather", text)
    assert gathers and not [shape for shape in gathers if re.search(r"\[7,", shape)], gathers


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(lora_rank=2), dict(frozen=r"layers\.0\.", optimizer="muon")],
    ids=["all", "lora", "frozen"],
)
def test_checkpoints_and_models_have_one_form(config, tmp_path, changes):
    """A run goes on from checkpoints of the other form, both ways, and ends where a run without a change of form does."""
    if changes.get("lora_rank"):
        start = glax.models.from_config(GLA, rngs=nnx.Rngs(1))
        glax.models.save_pretrained(start, tmp_path / "start")
        changes = changes | dict(model=str(tmp_path / "start"))
    config = dataclasses.replace(config, checkpoint_every=1, **changes)
    wanted, history = train(dataclasses.replace(config, out=str(tmp_path / "alone"), scan_layers=False))
    for steps, scan in ((1, False), (2, True), (4, False)):
        # `steps` is part of the schedule: the run is ended at a step instead.
        model, got = train(dataclasses.replace(config, scan_layers=scan), lambda step, *_, last=steps: step >= last)
    np.testing.assert_allclose(list(got.losses.values()), list(history.losses.values()), rtol=1e-5)
    scanned, got = train(dataclasses.replace(config, out=str(tmp_path / "scanned")))
    np.testing.assert_allclose(list(got.losses.values()), list(history.losses.values()), rtol=1e-5)
    for other in (model, scanned):
        for x, y in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (other, wanted)), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    arrays = [
        json.loads((tmp_path / out / "checkpoints" / "4" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"][
            "arrays"
        ]
        for out in ("alone", "scanned")
    ]
    assert arrays[0] == arrays[1] and any("['blocks'][3]" in name for name in arrays[0])
    saved = glax.models.from_pretrained(tmp_path / "scanned" / "model")
    assert len(saved.blocks) == 4


def test_a_run_of_the_command_holds_no_copy_of_the_parameters(config):
    """The model that a run begins with is one where layers are stacked: it goes when it was reported."""
    models, held = [], []

    def watched(config, each_step, begin):
        def reported(beginning):
            begin(beginning)
            models.append(weakref.ref(beginning.model))

        def read(*values):
            gc.collect()
            held.append(models[0]() is not None)
            return each_step(*values)

        return train(config, read, reported)

    shown(config, watched, Console(quiet=True))
    assert held == [False] * config.steps
