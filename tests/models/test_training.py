"""Training: it learns, resumes as if never interrupted, and spreads over devices; the loss; the commands."""

import contextlib
import dataclasses
import datetime
import gc
import importlib.util
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
from glax.models import training
from glax.models.load import MODEL_TYPES
from glax.models.operations import flops_per_token
from glax.models.training import NotFiniteLoss, TrainingConfig, muon_dimensions, spread_sequence, train
from glax.nn.losses import next_token_loss
from glax_cli import main

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
GLA = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)


def described(model: str | dict) -> glax.models.CausalLM:
    """Return the model of a fixture or a config, with shapes in place of arrays."""
    given = FIXTURES / model if isinstance(model, str) else model
    return nnx.eval_shape(lambda: glax.models.from_config(given, rngs=nnx.Rngs(0)))


@pytest.fixture
def config(tmp_path) -> TrainingConfig:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = dict(steps=8, batch=4, length=16, learning_rate=0.02, checkpoint_every=3)
    return TrainingConfig(GLA, str(text), out=str(tmp_path / "out"), **sizes)


def test_a_run_that_is_interrupted_continues_as_if_it_never_was(config, tmp_path):
    _, whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")))
    rarely = dataclasses.replace(config, checkpoint_every=7)
    train(rarely, lambda step, loss, seconds: step == 3)
    model, parts = train(rarely)
    assert parts.losses == whole.losses and list(parts.losses) == list(range(1, 9))
    assert parts.losses[8] < parts.losses[1] - 0.3
    assert list(parts.held_out) == [5, 7, 8]  # step 3 is read when step 5 was begun, and ends the run behind that
    saved = glax.models.from_pretrained(pathlib.Path(config.out) / "model")
    for x, y in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, saved)), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="is of another model"):
        train(dataclasses.replace(config, model=GLA | dict(num_hidden_layers=2)))


@pytest.mark.parametrize("changes", [{}, dict(ema=0.5, accumulate=2, remat="full", scan_layers=True)])
def test_a_step_is_compiled_once_while_the_parameters_are_drawn(config, caplog, monkeypatch, changes):
    order = []

    def note(name):
        whole = getattr(training, name)

        def noted(*arguments):
            order.append(name)
            return whole(*arguments)

        monkeypatch.setattr(training, name, noted)

    note("start_compiling")
    note("drawn_parameters")
    config = dataclasses.replace(config, steps=3, model=GLA | dict(num_hidden_layers=2), **changes)
    with jax.log_compiles(), caplog.at_level("WARNING"):  # of this thread alone
        train(config)
    assert order == ["start_compiling", "drawn_parameters"]
    lines = [x.getMessage() for x in caplog.records]
    assert sum("Finished tracing update for" in x for x in lines) == 1
    compiled = [x for x in lines if "XLA compilation of jit" in x]
    assert any("jit(evaluate)" in x for x in compiled)
    assert not any("jit(update)" in x for x in compiled)
    train(config)  # all steps are taken
    assert order == ["start_compiling", "drawn_parameters"]


EXPERTS = json.loads((FIXTURES / "qwen3_next" / "config.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        dict(remat="full"),
        dict(accumulate=2),
        dict(accumulate=2, fsdp=2, data=2),
        dict(data=2, sequence=2),
        dict(fsdp=4),
        dict(data=2, fsdp=-1),
        dict(fsdp=2, tensor=2),
        dict(tensor=2, sequence=2),
        dict(expert=2, fsdp=2, model=EXPERTS | dict(vocab_size=256)),
        dict(expert=2, tensor=2, sequence=2, model=EXPERTS | dict(vocab_size=256)),
    ],
    ids=lambda changes: "-".join(f"{name}{x}" for name, x in changes.items() if name != "model"),
)
def test_remat_and_shards_change_no_loss(config, tmp_path, changes):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    config = dataclasses.replace(config, steps=2, batch=8, model=changes.get("model", GLA))
    _, plain = train(dataclasses.replace(config, out=str(tmp_path / "plain")))
    model, other = train(dataclasses.replace(config, **changes))
    np.testing.assert_allclose(list(other.losses.values()), list(plain.losses.values()), rtol=1e-5)
    if "expert" in changes:
        stack = model.blocks[0].mlp.experts.down[...]
        assert stack.addressable_shards[0].data.shape[0] == stack.shape[0] // 2


def test_xla_knows_the_options_of_steps_on_several_gpus():
    jax.jit(jnp.sin, compiler_options=training.OVERLAP)(1.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        jax.jit(jnp.sin, compiler_options=dict(no_such_option=True))(1.0)


@pytest.mark.parametrize(
    "kind",
    sorted(MODEL_TYPES.keys() - {"falcon_mamba", "jamba", "lfm2", "lfm2_moe", "lfm3", "llama", "mamba", "qwen3"}),
)  # these have no recurrence, or a selective scan, whose rows the compiler gathers
def test_every_recurrence_of_a_model_takes_its_shard_of_the_sequence(kind):
    model = described(kind)
    mesh = jax.make_mesh((1, 1), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread_sequence(model, mesh)
    found = [module.recurrence for _, module in nnx.iter_modules(model) if hasattr(module, "recurrence")]
    assert found and all(getattr(recurrence, "func", None) is glax.parallel.recurrent for recurrence in found)


def test_the_held_out_loss_takes_the_rows_of_a_part_and_has_the_same_value(config, tmp_path, monkeypatch):
    config = dataclasses.replace(config, steps=1)
    _, whole = train(dataclasses.replace(config, out=str(tmp_path / "whole")))
    rows, loss = set(), glax.models.CausalLM.loss

    def noted(model, tokens, *rest, **options):
        rows.add(tokens.shape[0])
        return loss(model, tokens, *rest, **options)

    monkeypatch.setattr(glax.models.CausalLM, "loss", noted)
    _, parts = train(dataclasses.replace(config, accumulate=2))
    assert rows == {2}  # of a batch of 4
    np.testing.assert_allclose(parts.held_out[1], whole.held_out[1], rtol=1e-6)


def multiplied(model: glax.models.CausalLM) -> int:
    """Return the number of parameters but those of an embedding beside a head, which no product reads."""
    size = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return size - (0 if model.head is None else model.vocabulary * model.width)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_a_step_has_the_operations_of_the_experts_that_a_token_reads(name):
    config = json.loads((FIXTURES / name / "config.json").read_text())
    key = "num_experts" if "num_experts" in config else "n_routed_experts"
    few, many = described(config | {key: 4}), described(config | {key: 64})
    routers = sum(x.size for path, x in glax.models.names.parameters(many) if path.endswith((".router", ".correction")))
    assert flops_per_token(many, 16) - flops_per_token(few, 16) == 6 * routers * 60 / 64


@pytest.mark.parametrize(
    ("name", "passes", "entries"),
    [
        ("gla", 2, 2 * 4 * 8),
        ("kda", 3, 2 * 8 * 8),
        ("gated_deltaproduct", 5, 2 * 8 * 16),
        ("gsa", 2, 2 * 8 * 6 + 2 * 6 * 8),
        ("mamba3_inputs", 6, 4 * 8 * 8),
        ("rwkv7", 3, 2 * 8 * 8),
    ],
)
def test_a_step_has_the_operations_of_its_recurrences(name, passes, entries):
    """Each layer has states of so many entries, over which a token passes so often."""
    model = described(name)
    wanted = 6 * (multiplied(model) + len(model.blocks) * passes * entries)
    assert flops_per_token(model, 16) == wanted == flops_per_token(model, 32)


@pytest.mark.parametrize(
    ("name", "window", "channels", "others"),
    [
        ("llama", None, 2 * 4 * (4 + 4), 0),
        ("llama", 5, 2 * 4 * (4 + 4), 0),
        # One layer of latent attention. Two have recurrences, and two have experts, of which a token does not read 2.
        ("kimi_linear", None, 1 * 4 * (8 + 4 + 5), 2 * 3 * (2 * 8 * 8) - 2 * 2 * (3 * 16 * 12)),
    ],
)
def test_a_step_has_the_operations_of_the_tokens_that_a_token_reads(name, window, channels, others):
    """channels: layers of softmax attention * heads * (channels of keys + channels of values). others: p E of the layers with a
    recurrence, less the parameters of experts that a token does not read."""
    model = described(name)
    if window is not None:
        for block in model.blocks:
            block.attn.window = window
    read = sum(min(t, window or t) for t in range(1, 17)) / 16
    assert flops_per_token(model, 16) == 6 * (multiplied(model) + others + channels * read)


@pytest.mark.parametrize("name", ["gla", "llama"])
def test_xla_counts_about_as_many_operations(name):
    """XLA also counts norms, activations, gates and what the chunked forms compute beside the recurrence."""
    sizes = dict(hidden_size=128, intermediate_size=256, vocab_size=512, num_hidden_layers=2)
    config = json.loads((FIXTURES / name / "config.json").read_text()) | sizes
    model = described(config)
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)[0])
    compiled = run.lower(state, jax.ShapeDtypeStruct((1, 64), jnp.int32)).compile()
    counted = compiled.cost_analysis()["flops"] / 64
    assert 0.95 < counted / (flops_per_token(model, 64) / 3) < 1.25


@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (1.5, 0.0), (None, 0.1), (1.5, 0.1)])
def test_the_loss_and_its_gradient_are_those_of_all_logits(cap, z_loss):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 1500, 4), (4, 11)))
    targets = jnp.asarray(rng.integers(-2, 11, (3, 1500)))

    def whole(x, kernel):
        logits = jnp.einsum("btd,dv->btv", x, kernel)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        logs, squares = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1) ** 2
        picked = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return ((z_loss * squares - picked) * (targets >= 0)).sum() / (targets >= 0).sum()

    got = jax.jit(jax.value_and_grad(lambda x, k: next_token_loss(x, k, targets, cap, z_loss), (0, 1)))(x, kernel)
    want = jax.jit(jax.value_and_grad(whole, (0, 1)))(x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8)
    assert next_token_loss(x, kernel, jnp.full((3, 1500), -1)) == 0
    text = jax.jit(jax.grad(lambda x: next_token_loss(x, kernel, targets))).lower(x).as_text()
    assert "3x1500x11xf32" not in text


def test_a_z_loss_that_is_no_number_from_0_on_is_named():
    x, kernel, targets = jnp.ones((1, 2, 4)), jnp.ones((4, 3)), jnp.zeros((1, 2), int)

    def loss(z_loss):
        return next_token_loss(x, kernel, targets, None, z_loss)

    assert loss(np.float32(0.5)) == loss(jnp.float32(0.5)) == loss(0.5)
    wanted = "z_loss must be a number of at least 0 that is known while tracing, got "
    with pytest.raises(ValueError, match=wanted + r"-1\.0"):
        loss(-1.0)
    with pytest.raises(ValueError, match=wanted):
        jax.jit(loss)(0.5)
    with pytest.raises(TypeError, match="z_loss must be a number, got NoneType"):
        loss(None)


def test_the_z_loss_is_in_the_loss_of_a_step_and_not_in_held_out_losses(config, tmp_path):
    """The rate is too small for float32 to change a parameter by more than a rounding."""
    config = dataclasses.replace(config, steps=1, learning_rate=1e-12)
    _, plain = train(dataclasses.replace(config, out=str(tmp_path / "plain")))
    _, with_z = train(dataclasses.replace(config, z_loss=0.5))
    square = np.log(256) ** 2  # of logits near 0
    np.testing.assert_allclose(with_z.losses[1] - plain.losses[1], 0.5 * square, rtol=1e-2)
    np.testing.assert_allclose(with_z.held_out[1], plain.held_out[1], rtol=1e-5)


def test_tensorboard_gets_the_values_of_the_history_and_hides_those_of_lost_steps(config):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    config = dataclasses.replace(config, steps=4, checkpoint_every=2, loggers=["tensorboard"])
    train(config, lambda step, loss, seconds: step == 1)  # ends behind step 3
    train(config)
    events = []
    for path in sorted(pathlib.Path(config.out, "tensorboard").iterdir()):
        raw = path.read_bytes()
        while raw:  # a length of 8 bytes, its checksum of 4, the event, its checksum of 4
            size = int.from_bytes(raw[:8], "little")
            events.append(event_pb2.Event.FromString(raw[12 : 12 + size]))
            raw = raw[16 + size :]
    found = {(x.step, value.tag): value.simple_value for x in events for value in x.summary.value}
    lines = [json.loads(line) for line in pathlib.Path(config.out, "history.jsonl").read_text().splitlines()]
    wanted = {(line["step"], name): x for line in lines for name, x in line.items() if name != "step"}
    assert found.keys() == wanted.keys() and (4, "held_out") in found and (1, "loss") in found
    np.testing.assert_allclose([found[key] for key in wanted], list(wanted.values()), rtol=1e-6)
    starts = [x.step for x in events if x.session_log.status == event_pb2.SessionLog.START]
    assert starts[0] == 1 and len(starts) == 2


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_logger_that_is_not_installed_is_named_with_its_package(config, monkeypatch, name, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda wanted, *rest: None if wanted == package else find(wanted, *rest)
    )
    with pytest.raises(ValueError, match=f"loggers '{name}' needs the package {package}: pip install {package}"):
        dataclasses.replace(config, loggers=[name])


def test_the_loss_of_float32_residuals_has_products_in_the_models_dtype():
    config = dict(model_type="mamba2", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8)
    config |= dict(state_size=8, n_groups=1, residual_in_fp32=True)
    model = glax.models.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    text = jax.jit(lambda tokens: model.loss(tokens)).lower(jnp.zeros((2, 9), jnp.int32)).as_text()
    heads = [line for line in text.splitlines() if "dot_general" in line and "16x32" in line]
    assert heads and all("x16xbf16" in line for line in heads)


FILES = dict(text=None, held_out="x", documents=[dict(files="x")])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(steps=0), "steps must be an integer of at least 1, got 0"),
        (
            dict(data=-1, fsdp=-1),
            "one axis alone may be -1, what is left of the devices, got data and fsdp: give sizes",
        ),
        (dict(fsdp=0), "fsdp must be an integer of at least 1, or -1 for what is left of the devices, got 0"),
        (
            dict(batch=6, data=2, expert=2),
            "batch must be a multiple of data * expert=4, the devices that shard it, got 6",
        ),
        (dict(checkpoint_hours=0), "checkpoint_hours must be above 0, got 0"),
        (dict(batch=3, data=2), "batch must be a multiple of data=2, the devices that shard it, got 3"),
        (dict(learning_rate=-1e-3), "learning_rate must be above 0, got -0.001"),
        (dict(clip=0.0), "clip must be above 0, got 0.0"),
        (dict(loggers="wandb"), "loggers must be a list of 'tensorboard', 'wandb', got 'wandb'"),
        (dict(loggers=["mlflow"]), "loggers must be a list of 'tensorboard', 'wandb', got ['mlflow']"),
        (dict(loggers=[["wandb"]]), "loggers must be a list of 'tensorboard', 'wandb', got [['wandb']]"),
        (dict(z_loss=-1e-4), "z_loss must be at least 0, got -0.0001"),
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
        (dict(profile=[3, 2]), "profile must be a first step and a last one behind it, got [3, 2]"),
        (dict(profile=5), "profile must be a first step and a last one behind it, got 5"),
        (dict(schedule="linear"), "schedule must be one of cosine, wsd, constant, got 'linear'"),
        (dict(optimizer="sgd"), "optimizer must be one of adamw, muon, got 'sgd'"),
        (dict(moment_dtype="float16"), "moment_dtype must be one of float32, bfloat16, got 'float16'"),
        (dict(ema=1.0), "ema must be between 0 and 1, or None for no average, got 1.0"),
        (
            dict(batch=4, data=2, accumulate=4),
            "batch must be a multiple of accumulate=4 times the 2 shards of a part, got 4",
        ),
        (dict(remat=[]), "remat must be a name, got []"),
        (dict(held_out="x"), "held_out belongs to documents, got 'x' with a text: leave it out"),
        (dict(documents=[dict(files="x")]), "documents must come without a text, and with the files of held_out"),
        (dict(FILES, documents=[]), "documents must be a list of tables, got []"),
        (
            dict(FILES, documents=[dict(file="x")]),
            "documents must be tables of files, field and weight, got {'file': 'x'}",
        ),
        (dict(FILES, documents=[dict(files=3)]), "files of documents must be a name, got 3"),
        (dict(FILES, documents=[dict(files="x", weight=0)]), "weight of documents must be above 0, got 0"),
        (dict(FILES, end_token="x"), "end_token must be a token or None, got 'x'"),
        (dict(FILES, end_token=-1), "end_token must be from 0 to 2147483647, got -1"),
        (dict(FILES, end_token=2**31), "end_token must be from 0 to 2147483647, got 2147483648"),
        (dict(profile=[9, 12]), "profile must begin at one of the 8 steps, got [9, 12]"),
        (dict(FILES, workers=-1), "workers must be an integer of at least 0, got -1"),
    ],
)
def test_a_config_of_no_sense_is_refused(config, changes, text):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(config, **changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cosine", [0.25, 0.5, 0.75, 1.0] + [0.1 + 0.45 * (1 + np.cos(np.pi * i / 16)) for i in range(1, 16)]),
        ("constant", [0.25, 0.5, 0.75] + [1.0] * 16),
        ("wsd", [0.25, 0.5, 0.75] + [1.0] * 12 + [1 - i / 5 for i in range(1, 5)]),
    ],
)
def test_schedules_have_the_values_of_their_formulas(config, name, wanted):
    options = dict(steps=20, warmup=0.2, decay=0.25, learning_rate=1.0)
    rates = dataclasses.replace(config, schedule=name, **options).learning_rates()
    got = [float(rates(step)) for step in range(20)]
    start = [0.25 + 0.1875 * i for i in range(4)]  # linear from peak / warmup to the peak, over 4 steps
    np.testing.assert_allclose(got[:4], start, rtol=1e-6)
    np.testing.assert_allclose(got[4:19], wanted[3:18], rtol=1e-5, atol=1e-6)


def test_muon_takes_orthogonal_steps_of_matrices_and_the_average_follows(config):
    """Singular values of a step are those that five iterations leave, .68 to 1.14 of the step's scale .2 sqrt(longer side)."""
    recipe = dataclasses.replace(
        config, optimizer="muon", weight_decay=0.0, warmup=0.0, ema=0.75, moment_dtype="bfloat16"
    )
    before = glax.models.from_config(GLA, rngs=nnx.Rngs(0))
    _, params = nnx.split(before)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    gradient = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    optimizer = glax.models.training.with_average(recipe.make_optimizer(), recipe.ema)
    change, state = optimizer.update(gradient, optimizer.init(params), params)
    step = nnx.merge(nnx.graphdef(before), change)
    kernel = np.asarray(step.blocks[0].attn.query.kernel[...], np.float64) / recipe.learning_rate
    values = np.linalg.svd(kernel, compute_uv=False) / (0.2 * np.sqrt(max(kernel.shape)))
    assert values.min() > 0.6 and values.max() < 1.3
    table = np.asarray(step.embedding.embedding[...]) / recipe.learning_rate
    # The first step of Adam with Nesterov's momentum: b1 (1 - b1) / (1 - b1^2) + 1 of the gradient's sign. Few are near 0.
    assert (np.abs(np.abs(table) - (0.9 * 0.1 / 0.19 + 1)) < 0.02).mean() > 0.99
    for average, p, c in zip(*map(jax.tree.leaves, (state[1], params, change)), strict=True):
        np.testing.assert_allclose(average, p + 0.25 * c, rtol=1e-4, atol=1e-6)
    halves = {x.dtype for x in jax.tree.leaves(state[0])}
    assert jnp.dtype(jnp.bfloat16) in halves


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("falcon_mamba", "A_log"),
        ("jamba", "A_log"),
        ("mamba3", "B_bias C_bias"),
        ("mamba3_inputs", "B_bias C_bias mimo_o mimo_x mimo_z"),
        ("rwkv6", "bonus mix_bias"),
        ("rwkv7", "bonus"),
        ("hgrn", "lower_bounds"),
        ("hgrn2", "lower_bounds"),
        ("glm5_next", "pooling position_bias"),
        ("qwen3_next", ""),
    ],
)
def test_only_matrices_tables_and_filters_have_weight_decay(config, kind, others):
    """Where the gradient is 0 the decay alone changes a parameter: by -rate decay p."""
    params = nnx.state(glax.models.from_config(FIXTURES / kind, rngs=nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(lambda x: jnp.ones_like(x), params)
    recipe = dataclasses.replace(config, learning_rate=0.5, weight_decay=0.5, warmup=0.0)
    zeros, optimizer = jax.tree.map(jnp.zeros_like, params), recipe.make_optimizer()
    change, _ = optimizer.update(zeros, optimizer.init(params), params)
    plain = {str(path[-1]) for path, x in nnx.to_flat_state(change) if x.ndim > 1 and not x[...].any()}
    assert plain == set(others.split())
    for path, x in nnx.to_flat_state(change):
        wanted = 0 if x.ndim == 1 or path[-1] in plain else -0.25
        np.testing.assert_allclose(x[...], wanted, rtol=1e-6, err_msg=str(path))
    axes = optax.contrib.MuonDimensionNumbers
    numbers = jax.tree.leaves_with_path(muon_dimensions(params), is_leaf=lambda x: isinstance(x, axes))
    chosen = {jax.tree_util.keystr(path[:-1]) for path, _ in numbers}
    by_adam = {*plain, "embedding", "filter"}
    assert chosen == {
        "".join(f"[{part!r}]" for part in path)
        for path, x in nnx.to_flat_state(params)
        if x.ndim > 1 and path[-1] not in by_adam and path[0] != "head"
    }


@pytest.mark.parametrize("stop", [3, 2])
def test_a_profile_is_written_though_the_run_ends_within(config, tmp_path, stop):
    out = tmp_path / str(stop)
    train(dataclasses.replace(config, out=str(out), steps=4, profile=[2, 9]), lambda step, loss, seconds: step == stop)
    assert [path.stat().st_size > 1000 for path in (out / "profile").rglob("*.xplane.pb")] == [True]


def test_the_average_is_evaluated_written_and_resumed(config, tmp_path):
    recipe = dataclasses.replace(config, ema=0.5, optimizer="muon", schedule="wsd", moment_dtype="bfloat16")
    model, whole = train(dataclasses.replace(recipe, out=str(tmp_path / "whole")))
    train(recipe, lambda step, loss, seconds: step == 3)
    other, parts = train(recipe)
    assert parts == whole and parts.losses[8] < parts.losses[1] - 0.2
    for x, y in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="is of another optimizer: optimizer was 'muon', got 'adamw'"):
        train(dataclasses.replace(recipe, optimizer="adamw"))


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
    gc.collect()  # warns of files that are open
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == before
    shutil.copy(finished[0].text, tmp_path / "moved.txt")
    history, step = rerun(text=str(tmp_path / "moved.txt"), remat="full", checkpoint_every=5)
    assert step == 6 and history == finished[1]


def test_more_steps_continue_and_lost_losses_stop_nothing(rerun, finished, tmp_path):
    (tmp_path / "copy" / "history.jsonl").write_text('{"step": 1, "loss": x}\n{"step": 2, "loss": 5.')
    with pytest.warns(UserWarning, match=r"history.jsonl cannot be read: .*: set aside as .*history.jsonl.unreadable"):
        history, step = rerun(steps=7)
    assert step == 6 and list(history.losses) == [7] and list(history.held_out) == [6, 7]
    assert history.held_out[6] == finished[1].held_out[6]  # computed again from the checkpoint


def test_a_kill_between_losses_and_checkpoint_shows_the_losses_of_the_checkpoint(config, tmp_path, monkeypatch):
    _, whole = train(dataclasses.replace(config, out=str(tmp_path / "whole"), steps=4, checkpoint_every=2))
    config = dataclasses.replace(config, steps=4, checkpoint_every=2)
    save = glax.models.training.Checkpoints.save

    def killed(checkpoints, step, state, position=None):
        if step == 4:
            raise KeyboardInterrupt
        save(checkpoints, step, state, position)

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
    optimizer = TrainingConfig.make_optimizer

    def poisoned(recipe):
        poison = optax.scale_by_schedule(lambda count: jnp.where(count < 4, 1.0, jnp.nan))
        return optax.chain(optimizer(recipe), poison)

    monkeypatch.setattr(TrainingConfig, "make_optimizer", poisoned)
    newest = "no checkpoint was written" if good is None else f"the last good checkpoint is of step {good}"
    with pytest.raises(NotFiniteLoss, match=f"{what}: {newest} in .*out/checkpoints: .* learning_rate below 0.02"):
        train(dataclasses.replace(config, checkpoint_every=every))
    out = pathlib.Path(config.out)
    assert not (out / "model").exists()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ([] if good is None else [str(good)])


def test_a_parameter_that_is_not_finite_and_not_read_is_not_saved(config, monkeypatch):
    """The embedding of a byte that is in no text has no part in any loss."""
    optimizer = TrainingConfig.make_optimizer

    def poisoned(recipe):
        def update(updates, state, params=None):
            return jax.tree.map(lambda x: x.at[255].set(jnp.inf) if x.shape == (256, 16) else x, updates), state

        return optax.chain(optimizer(recipe), optax.GradientTransformation(lambda params: optax.EmptyState(), update))

    monkeypatch.setattr(TrainingConfig, "make_optimizer", poisoned)
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
            f"data times fsdp times tensor times expert times sequence must be at most {jax.device_count()}, the number of",
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
    # Step 20 is reported before its checkpoint begins, which waits for the one of step 18: at least step 16 has a whole one.
    assert 16 <= done < 400 and not pathlib.Path(config.out, "model").exists()
    path.write_text(json.dumps(fields | dict(steps=done + 2)))
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{config.out} has step {done}: resumes" in out
    lines = [json.loads(line) for line in pathlib.Path(config.out, "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, done + 3))
    assert f"held out: {lines[-1]['held_out']:.3f} nats/token" in out
