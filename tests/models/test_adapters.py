"""Adapters: those that peft saved give peft's logits, and go back as they came; what computes something else is refused."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax.models.training import TrainingConfig, train
from glax_cli import main
from tests.models.folders import FIXTURES, assert_same, copied, values
from tests.models.make_adapters import ADAPTERS, CASES

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MEANING = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out", "task_type")


def adapted(name: str, adapter: pathlib.Path | None = None):
    model = glax.models.from_pretrained(FIXTURES / CASES[name][0])
    return glax.models.load_adapter(model, adapter or ADAPTERS / name)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_gives_the_logits_that_it_gives_there(name):
    expected = load_file(ADAPTERS / name / "expected.safetensors")
    tokens, wanted = expected["tokens"], expected["logits"]
    model = adapted(name)
    base = glax.models.from_pretrained(FIXTURES / CASES[name][0])
    logits = model(tokens)
    assert np.linalg.norm(logits - base(tokens)) > 0.05 * np.linalg.norm(wanted)
    for got in (logits, glax.models.merge_lora(model)(tokens)):
        assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted)
    assert_same(glax.models.without_lora(model), base)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_goes_back_as_it_came(tmp_path, name):
    model = adapted(name)
    glax.models.save_adapter(model, tmp_path)
    wanted, got = load_file(ADAPTERS / name / FILE), load_file(tmp_path / FILE)
    wanted = {tensor: value for tensor, value in wanted.items() if ".lora_" in tensor}  # peft copies the head, too
    assert got.keys() == wanted.keys()
    for tensor, value in wanted.items():
        np.testing.assert_array_equal(got[tensor], value, err_msg=tensor)
    again = adapted(name, tmp_path)
    assert_same(again, model)
    terms = [
        {path: (x.rank, x.scale) for path, x in nnx.iter_modules(m) if hasattr(x, "scale") and hasattr(x, "rank")}
        for m in (again, model)
    ]
    assert terms[0] == terms[1] and terms[0]


def test_what_is_saved_says_what_peft_said(tmp_path):
    """The most common rank and alpha may be others than peft's r and lora_alpha, and the patterns then say the rest."""
    for name in ("llama", "llama_rslora", "gla", "mamba2"):
        glax.models.save_adapter(adapted(name), tmp_path / name)
        got, wanted = (json.loads((x / name / CONFIG).read_text()) for x in (tmp_path, ADAPTERS))
        assert {key: got[key] for key in MEANING} == {key: wanted[key] for key in MEANING}
        assert got["rank_pattern"] == got["alpha_pattern"] == {}


# ---- training -------------------------------------------------------------------------------------------------------------


def test_terms_begin_without_effect_and_alone_are_trained(tmp_path):
    tokens = jnp.arange(24).reshape(1, 24)
    model = glax.models.from_pretrained(copied(tmp_path / "model"))
    before, logits = values(model), model(tokens)
    assert glax.models.lora(model, 4, rngs=nnx.Rngs(0)) is model
    np.testing.assert_array_equal(model(tokens), logits)
    graph, terms, frozen = nnx.split(model, nnx.LoRAParam, ...)
    gradient = jax.grad(lambda terms: nnx.merge(graph, terms, frozen).loss(tokens))(terms)
    assert all(jnp.abs(x).max() > 0 for path, x in nnx.to_flat_state(gradient) if path[-1] == "lora_b")
    model = nnx.merge(graph, jax.tree.map(lambda x, g: x - 0.5 * g, terms, gradient), frozen)
    assert float(model.loss(tokens)) < float(nnx.merge(graph, terms, frozen).loss(tokens))
    after = values(model)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    glax.models.save_pretrained(model, tmp_path / "merged")
    assert_same(glax.models.from_pretrained(tmp_path / "merged"), glax.models.merge_lora(model))


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 14),
        (["q_proj"], 2),
        (["lm_head"], 1),
        (r"model\.layers\.1\.mlp\..*", 3),
        (["layers.0.mlp.up_proj"], 1),
    ],
)
def test_targets_are_read_as_peft_reads_them(tmp_path, targets, count):
    model = glax.models.lora(glax.models.from_pretrained(FIXTURES / "llama"), 2, targets, rngs=nnx.Rngs(0))
    glax.models.save_adapter(model, tmp_path)
    assert len(load_file(tmp_path / FILE)) == 2 * count


def test_wrong_arguments_are_named(tmp_path):
    model = glax.models.from_pretrained(FIXTURES / "llama")
    for arguments, error, text in (
        ((0,), ValueError, "rank must be an integer of at least 1, got 0"),
        ((True,), ValueError, "rank must be an integer"),
        (
            (2, ["q_proj", "query"]),
            ValueError,
            r"targets must name projections of the model, got \['query'\]: .* q_proj",
        ),
        ((2, []), ValueError, "targets must name projections"),
        ((2, "("), ValueError, "targets must be a regular expression"),
        ((2, 5), TypeError, 'targets must be "all-linear"'),
        ((2, ["embed_tokens"]), ValueError, "targets must name projections"),
    ):
        with pytest.raises(error, match=text):
            glax.models.lora(model, *arguments, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="alpha must be a number"):
        glax.models.lora(model, 2, alpha="1", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model must have low-rank terms"):
        glax.models.save_adapter(model, tmp_path)
    glax.models.lora(model, 2, ["q_proj"], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"without a low-rank term, got model\.layers\.0\.self_attn\.q_proj"):
        glax.models.lora(model, 2, rngs=nnx.Rngs(0))


BYTES = dict(model_type="llama", vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
BYTES |= dict(num_attention_heads=2, num_key_value_heads=2, initializer_range=0.2)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    glax.models.save_pretrained(glax.models.from_config(BYTES, rngs=nnx.Rngs(0)), tmp_path / "model")
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(0, 256, 4000, np.uint8).tobytes())
    return tmp_path / "model"


def run_of(folder, out, **options) -> TrainingConfig:
    sizes = dict(batch=2, length=16, learning_rate=0.05, steps=4)
    return TrainingConfig(str(folder), str(folder.parent / "text"), None, str(folder.parent / out), **sizes | options)


def test_training_of_terms_leaves_the_rest_and_resumes(folder, tmp_path):
    options = dict(lora_rank=2, lora_targets=["q_proj", "up_proj"])
    whole, _ = train(run_of(folder, "whole", **options))
    train(run_of(folder, "parts", steps=2, **options))
    model, history = train(run_of(folder, "parts", **options))
    assert_same(model, whole)
    base, found = glax.models.from_pretrained(folder), values(model)
    for path, value in values(base).items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert sorted(history.losses) == [1, 2, 3, 4]
    tokens = jnp.arange(24).reshape(1, 24)
    assert float(jnp.abs(model(tokens) - base(tokens)).max()) > 0.01
    again = glax.models.load_adapter(base, tmp_path / "parts" / "adapter")
    np.testing.assert_array_equal(again(tokens), model(tokens))
    merged = glax.models.from_pretrained(tmp_path / "parts" / "model")
    np.testing.assert_allclose(merged(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"of another lora_rank: lora_rank was 2, got 3"):
        train(run_of(folder, "parts", **options | dict(lora_rank=3)))


def test_frozen_parameters_stay_and_the_others_are_trained(folder):
    model, _ = train(run_of(folder, "out", frozen=r"embed_tokens|layers\.0\.", steps=2))
    for path, value in values(glax.models.from_pretrained(folder)).items():
        is_frozen = path.startswith(("embedding.", "blocks.0."))
        assert np.array_equal(values(model)[path], value) == is_frozen, path
    with pytest.raises(ValueError, match="frozen must leave a parameter to train"):
        train(run_of(folder, "none", frozen="."))
    with pytest.raises(ValueError, match="frozen must leave a parameter to train, got '', which matches all"):
        train(run_of(folder, "none", frozen=""))
    with pytest.raises(
        ValueError, match=r"frozen must match a parameter, got 'embed_token/s': their names end with .*q_proj"
    ):
        train(run_of(folder, "none", frozen="embed_token/s"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(lora_rank=0), "lora_rank must be an integer of at least 1, got 0"),
        (dict(lora_targets=["q_proj"]), "lora_targets needs lora_rank"),
        (dict(lora_rank=2, lora_targets=5), "lora_targets must be a string or a list of names, got 5"),
        (dict(frozen="("), "frozen must be a regular expression of names"),
        (dict(frozen=5), "frozen must be a regular expression of names, got 5"),
    ],
)
def test_wrong_options_of_a_run_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        TrainingConfig("model", "text", **options)


def test_the_command_continues_a_prompt_with_an_adapter(folder, tmp_path, capsys):
    model = glax.models.lora(glax.models.from_pretrained(folder), 2, rngs=nnx.Rngs(0))
    graph, terms, rest = nnx.split(model, nnx.LoRAParam, ...)
    model = nnx.merge(graph, jax.tree.map(lambda x: x + 1, terms), rest)
    glax.models.save_adapter(model, tmp_path / "adapter")
    glax.models.save_pretrained(model, tmp_path / "merged")
    said = []
    for command in ([folder, "--adapter", tmp_path / "adapter"], [tmp_path / "merged"], [folder]):
        assert main(["generate", *map(str, command), "--prompt", "ab", "--max-new-tokens", "8"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert main(["generate", str(folder), "--prompt", "a", "--adapter", str(folder)]) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err


# ---- what is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path) -> pathlib.Path:
    shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 1]]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("something_new", {"x": 1}),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_by_key(adapter, key, value):
    change(adapter, {key: value})
    with pytest.raises(glax.models.UnsupportedOption, match=rf"^{key}=.* in adapter_config.json is not supported: "):
        adapted("llama", adapter)


def change(adapter, values):
    config = json.loads((adapter / CONFIG).read_text()) | values
    (adapter / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (dict(r=0), "the rank r in .* must be an integer of at least 1, got 0"),
        (dict(r=5), r"lora_A.weight in .* must be \[5, "),
        (dict(lora_alpha="6"), "the alpha lora_alpha in .* must be a number, got '6'"),
        (dict(rank_pattern=[1]), "rank_pattern in .* must be an object"),
        (dict(rank_pattern={"(": 4}), "rank_pattern in adapter_config.json must hold regular expressions"),
        (dict(use_rslora="yes"), "use_rslora in .* must be true or false"),
    ],
)
def test_a_config_of_no_sense_is_refused(adapter, values, text):
    change(adapter, values)
    with pytest.raises(ValueError, match=text):
        adapted("llama", adapter)


def test_tensors_that_fit_no_projection_are_listed(adapter):
    tensors = load_file(adapter / FILE)
    first = next(name for name in tensors if "lora_A" in name)
    for more, text in (
        ({first.replace("layers.0", "layers.7"): tensors[first]}, "left over are .*layers.7"),
        ({first.replace("lora_A.weight", "lora_magnitude_vector"): tensors[first][0]}, "left over are .*magnitude"),
    ):
        save_file(tensors | more, adapter / FILE)
        model = glax.models.from_pretrained(FIXTURES / "llama")
        with pytest.raises(ValueError, match=text):
            glax.models.load_adapter(model, adapter)
        assert not any(isinstance(x, nnx.LoRA) for _, x in nnx.iter_modules(model))
    save_file({name: x for name, x in tensors.items() if name != first}, adapter / FILE)
    with pytest.raises(ValueError, match=r"left over are .*lora_B"):
        adapted("llama", adapter)


def test_an_adapter_of_another_base_model_is_refused(tmp_path):
    shutil.copytree(ADAPTERS / "llama_patterns", tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / FILE)
    name = "base_model.model.lm_head.base_layer.weight"
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "adapter" / FILE)
    with pytest.raises(ValueError, match=r"lm_head\.base_layer\.weight in .* must be the model's own"):
        adapted("llama_patterns", tmp_path / "adapter")


def test_a_pickled_adapter_and_a_folder_without_one_are_refused_by_name(adapter):
    (adapter / FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin is a pickle"):
        adapted("llama", adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors"):
        adapted("llama", adapter)
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        adapted("llama", FIXTURES / "llama")
