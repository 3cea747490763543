"""Published models against their own code, by the fixtures of tests/models/make_fixtures.py; and each way to read them."""

import functools
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
from glax.models.names import parameters
from glax.models.saving import stored_tensors

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
READ_IN_ALL_WAYS = [
    "bailing_hybrid",
    "bailing_hybrid_options",
    "ling_2_5",
    "ling_2_5_options",
    "delta_net_options",
    "falcon_h1",
    "falcon_mamba",
    "gated_deltanet_options",
    "comba_options",
    "gated_deltaproduct_options",
    "gla_hybrid",
    "glm5_next",
    "glm5_next_options",
    "gla_options",
    "gsa_options",
    "hgrn",
    "hgrn_options",
    "hgrn2",
    "jamba",
    "jamba_options",
    "kda_options",
    "kimi_k3",
    "kimi_k3_options",
    "kimi_k3_plain",
    "kimi_linear",
    "kimi_linear_options",
    "lara_mini_options",
    "lfm2_moe_options",
    "lfm2_options",
    "lfm3",
    "lfm3_options",
    "mamba_options",
    "mamba2_attention",
    "mamba2_options",
    "mamba3_inputs",
    "mamba3_options",
    "nemotron_h",
    "olmo_hybrid_options",
    "qwen3_options",
    "qwen3_5_options",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "qwen4_exp_text",
    "qwen3_next",
    "recurrent_gemma",
    "recurrent_gemma_options",
    "retnet",
    "rwkv",
    "rwkv_options",
    "rwkv6",
    "rwkv7",
    "rwkv7_options",
    "xlstm_options",
    "xlstm_parts_fused",
    "zamba",
    "zamba_options",
    "zamba2_options",
]
LOGITS, GRADIENTS = 2e-5, 1e-4


@functools.cache
def loaded(name: str):
    model = glax.models.from_pretrained(FIXTURES / name)
    return model, load_file(FIXTURES / name / "expected.safetensors")


def assert_near(name, got, want, bar):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12)
    assert error <= bar, f"{name} is off by {error:.1e}, bar {bar:.1e}"


@functools.cache
def forward_and_gradient(name: str):
    model, expected = loaded(name)
    graph, params = nnx.split(model)
    shape = expected["logits"].shape
    weights = jnp.asarray(np.sin(3.0 * np.arange(np.prod(shape))).reshape(shape), jnp.float32)

    @jax.jit
    def run(params):
        def loss(params):
            logits = nnx.merge(graph, params)(expected["tokens"])
            return (weights * logits).mean(), logits

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, gradients

    return run(params)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_the_models_own_code(name):
    model, expected = loaded(name)
    logits, gradients = forward_and_gradient(name)
    assert_near("logits", logits, expected["logits"], LOGITS)
    compared = set()
    derived = model.derived_tensors()
    for name, gradient in stored_tensors(nnx.merge(nnx.graphdef(model), gradients)).items():
        if name not in derived:
            assert_near(name, gradient.read(), expected[f"gradient.{name}"], GRADIENTS)
            compared.add(f"gradient.{name}")
    assert compared == {key for key in expected if key.startswith("gradient.")}


@pytest.mark.parametrize("name", READ_IN_ALL_WAYS)
def test_packed_prefill_and_steps_equal_one_pass(name):
    """Two prompts, packed behind an empty one, in two pieces; then eight steps of both in a larger pool."""
    model, expected = loaded(name)
    tokens, want, T = expected["tokens"], expected["logits"], expected["tokens"].shape[1]
    pools = jax.tree.map(lambda x: jnp.full_like(x, 7), model.initial_states(4, T))
    prefill, step = nnx.jit(glax.models.CausalLM.prefill), nnx.jit(glax.models.CausalLM.step)
    slots, lengths = jnp.array([-1, 2, 0]), (T - 8, 5)
    first = np.concatenate([tokens[0, :3], tokens[1, :5], [0] * (T - 8)]).astype(np.int32)
    logits, pools = prefill(model, first, pools, slots, jnp.array([0, 0, 3, 8]), jnp.array([False, True, True]))
    assert_near("first piece", logits[:8], np.concatenate([want[0, :3], want[1, :5]]), LOGITS)
    second = np.concatenate([tokens[0, 3 : T - 8], [0] * 3]).astype(np.int32)
    cuts = jnp.array([0, 0, T - 11, T - 11])
    logits, pools = prefill(model, second, pools, slots, cuts, jnp.array([False, False, False]))
    assert_near("second piece", logits[: T - 11], want[0, 3 : T - 8], LOGITS)
    for t in range(8):
        at = [lengths[0] + t, lengths[1] + t]
        logits, pools = step(model, np.array([tokens[1, at[1]], tokens[0, at[0]], 0]), pools, jnp.array([0, 2, -1]))
        assert_near(f"step {t}", logits[:2], np.stack([want[1, at[1]], want[0, at[0]]]), LOGITS)
    for x in jax.tree.leaves(pools):
        assert (np.asarray(x[1]) == 7).all() and (np.asarray(x[3]) == 7).all()


@pytest.mark.parametrize("name", READ_IN_ALL_WAYS)
def test_segments_equal_separate_sequences_and_padding_has_no_influence(name):
    model, expected = loaded(name)
    tokens, want = expected["tokens"], expected["logits"]
    packed = np.concatenate([[3, 1], tokens[0, :9], tokens[1, :8], [5, 2]])[None]
    ids = np.array([[0] * 2 + [4] * 9 + [2] * 8 + [0] * 2])
    logits = jax.jit(lambda packed, ids: model(packed, ids, pad_id=0))(packed, jnp.asarray(ids))
    assert_near("first", logits[0, 2:11], want[0, :9], LOGITS)
    assert_near("second", logits[0, 11:19], want[1, :8], LOGITS)


@pytest.mark.parametrize("name", READ_IN_ALL_WAYS)
def test_greedy_continuations_are_the_likeliest_whatever_the_padding(name):
    model, expected = loaded(name)
    tokens, likeliest = expected["tokens"], expected["logits"].argmax(-1)
    lengths = np.array([9, 4])
    right, left = (np.full((2, 9), 7) for _ in range(2))
    for b, n in enumerate(lengths):
        right[b, :n], left[b, 9 - n :] = tokens[b, :n], tokens[b, :n]
    written = glax.models.generate(model, right, 6, lengths=lengths)
    np.testing.assert_array_equal(glax.models.generate(model, left, 6, lengths=lengths, padding="left"), written)
    np.testing.assert_array_equal(written[:, 0], likeliest[[0, 1], lengths - 1])
    np.testing.assert_array_equal(glax.models.generate(model, tokens[:1, :9], 6)[0], written[0])
    whole = np.concatenate([tokens[0, :9], written[0]])[None]
    again = nnx.jit(glax.models.CausalLM.__call__)(model, whole)
    np.testing.assert_array_equal(again[0, 8:-1].argmax(-1), written[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_what_was_loaded(name, tmp_path):
    model, _ = loaded(name)
    glax.models.save_pretrained(model, tmp_path)
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path, FIXTURES / name))
    original.pop("lm_head.weight" if model.head is None else "", None)
    assert saved.keys() == original.keys()
    derived = model.derived_tensors()
    for key, value in original.items():
        assert saved[key].dtype == value.dtype
        if key in derived:  # computed again
            np.testing.assert_allclose(saved[key], value, rtol=1e-6)
        else:
            np.testing.assert_array_equal(saved[key], value)
    config = json.loads((FIXTURES / name / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_the_files_of_the_tokenizer_go_with_the_model(tmp_path):
    folder, out = copied(tmp_path / "from"), tmp_path / "to"
    for name in ("tokenizer.json", "generation_config.json", "vocab.json", "merges.txt"):
        (folder / name).write_text(name)
    model = glax.models.from_pretrained(folder)
    glax.models.save_pretrained(model, folder)
    glax.models.save_pretrained(nnx.merge(*nnx.split(model)), out)
    beside = {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "vocab.json",
    }
    assert {path.name for path in out.iterdir()} == beside
    assert (out / "merges.txt").read_text() == "merges.txt"
    assert glax.models.from_config(folder, rngs=nnx.Rngs(0)).folder == str(folder)
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="is no more: no tokenizer is copied"):
        glax.models.save_pretrained(model, out)


# ---- folders that do not fit, and forms of folders -------------------------------------------------------------------


def copied(tmp_path, name="gla", **changes) -> pathlib.Path:
    shutil.copytree(FIXTURES / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(model_type="gpt2"), "model_type='gpt2' in config.json is not supported: supported are bailing_hybrid, "),
        (
            dict(rope_scaling={"type": "linear"}),
            "options that are not supported for model_type 'gla': rope_scaling={'type",
        ),
        (dict(hidden_act="tanh"), "hidden_act='tanh' in config.json is not supported"),
        (dict(feature_map="elu"), "feature_map='elu' in config.json is not supported"),
        (
            dict(attn=dict(layers=[5], num_heads=2)),
            "attn={'layers': [5], 'num_heads': 2} in config.json is not supported",
        ),
        (dict(attnres_block_size=3), "attnres_block_size=3 in config.json is not supported"),
        (dict(num_heads="4"), "num_heads in config.json must be an integer of at least 1, got '4'"),
        (dict(expand_k=0.3), "expand_k=0.3 in config.json must make hidden_size=16 an integer, got 4.8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_an_option_that_is_not_supported_is_named_with_its_value(tmp_path, changes, text):
    with pytest.raises(ValueError) as caught:
        glax.models.from_pretrained(copied(tmp_path, **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize(("name", "option"), [("gla", "rms_norm_eps"), ("delta_net", "norm_first")])
def test_options_of_older_configs_change_nothing(tmp_path, name, option):
    folder = copied(tmp_path, name)
    wanted = glax.models.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    value = 1e-3 if option == "rms_norm_eps" else True
    (folder / "config.json").write_text(json.dumps(config | {option: value}))
    tokens = np.arange(12)[None]
    np.testing.assert_array_equal(glax.models.from_pretrained(folder)(tokens), wanted(tokens))


def test_nemotron_names_the_option_that_holds_its_layers(tmp_path):
    changes = dict(layers_block_type=None, layer_types=["mamba", "convolution"])
    with pytest.raises(ValueError, match=r"layer_types=\['mamba', 'convolution'\] in config\.json is not supported"):
        glax.models.from_pretrained(copied(tmp_path, "nemotron_h", **changes))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (dict(model_type="delta_net", qk_norm="max"), "qk_norm='max' in config.json is not supported"),
        (
            dict(model_type="gated_deltanet", num_heads=2, num_v_heads=3),
            "num_v_heads=3 in config.json is not supported",
        ),
        (
            dict(model_type="gated_deltanet", head_dim=5, expand_v=1.5),
            "expand_v=1.5 in config.json must make head_dim=5",
        ),
        (dict(model_type="kda", safe_gate=True), "safe_gate=True in config.json is not supported"),
        (dict(model_type="kda", lower_bound=1.0), "lower_bound=1.0 in config.json is not supported"),
        (
            dict(model_type="qwen3_next", num_hidden_layers=2, linear_num_value_heads=24),
            "linear_num_value_heads=24 in config.json is not supported",
        ),
        (
            dict(model_type="qwen3_next", num_hidden_layers=2, mlp_only_layers=[2]),
            "mlp_only_layers=[2] in config.json is not supported",
        ),
        (
            dict(model_type="qwen3_next", num_hidden_layers=2, rope_parameters=dict(rope_type="yarn")),
            "rope_parameters={'rope_type': 'yarn'} in config.json is not supported",
        ),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_options_of_the_delta_rule_that_are_not_supported(config, text):
    with pytest.raises(ValueError) as caught:
        glax.models.from_config(config, rngs=nnx.Rngs(0))
    assert text in str(caught.value)


ATTN = dict(layers=[0], num_heads=2)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (
            "qwen3_next",
            dict(rope_parameters=dict(rope_theta=None)),
            "rope_parameters.rope_theta in config.json must be a",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(rope_theta="x")),
            "rope_parameters.rope_theta in config.json must be a",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(rope_theta=-1.0)),
            "rope_theta in config.json must be above 0, got -1.0",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(partial_rotary_factor=2.5)),
            "partial_rotary_factor in config.json must",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(rope_type="yarn")),
            "rope_parameters={'rope_type': 'yarn'} in config.json is not",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(full_attention={"rope_theta": 5})),
            "rope_parameters.full_attention={",
        ),
        ("qwen3_next", dict(rope_parameters=5), "rope_parameters=5 in config.json is not supported"),
        ("qwen3_next", dict(num_experts="x"), "num_experts in config.json must be an integer of at least 0, got 'x'"),
        ("qwen3_next", dict(num_experts=-1), "num_experts in config.json must be an integer of at least 0, got -1"),
        ("qwen3_next", dict(num_experts_per_tok=99), "num_experts_per_tok=99 in config.json is not supported"),
        ("qwen3_next", dict(num_key_value_heads=5), "num_key_value_heads=5 in config.json is not supported"),
        ("qwen3_next", dict(mlp_only_layers=5), "mlp_only_layers=5 in config.json is not supported"),
        ("qwen3_next", dict(layer_types=5), "layer_types=5 in config.json is not supported"),
        ("zamba2", dict(layers_block_type=5), "layers_block_type=5 in config.json is not supported"),
        ("zamba2", dict(mamba_ngroups=5), "mamba_ngroups=5 in config.json is not supported"),
        ("zamba2", dict(mamba_expand=float("nan")), "mamba_expand in config.json must be a finite number, got nan"),
        ("gated_deltanet", dict(expand_v=0), "expand_v=0.0 in config.json must make"),
        ("kda", dict(hidden_ratio=-1), "hidden_ratio in config.json must be above 0, got -1"),
        ("rwkv6", dict(hidden_ratio=0), "hidden_ratio in config.json must be above 0, got 0"),
        ("gla", dict(norm_eps=-1e-5), "norm_eps in config.json must be at least 0, got -1e-05"),
        ("mamba2", dict(layer_norm_epsilon=-1.0), "layer_norm_epsilon in config.json must be at least 0, got -1.0"),
        ("mamba2", dict(n_groups=3), "n_groups=3 in config.json is not supported"),
        ("mamba2", dict(time_step_limit=[1.0, 0.1]), "time_step_limit in config.json must be two numbers in ascending"),
        ("mamba2", dict(time_step_min=-0.1), "time_step_min in config.json must be above 0, got -0.1"),
        ("mamba2_fla", dict(A_init_range=[1]), "A_init_range in config.json must be two numbers above 0 in ascending"),
        ("mamba2_fla", dict(conv_init="x"), "conv_init in config.json must be a finite number, got 'x'"),
        ("nemotron_h", dict(n_groups=3), "n_groups=3 in config.json is not supported"),
        ("bamba", dict(rms_norm_eps=-1), "rms_norm_eps in config.json must be at least 0, got -1"),
        ("bamba", dict(attn_layer_indices=1), "attn_layer_indices=1 in config.json is not supported"),
        ("bamba", dict(mamba_d_head="x"), "mamba_d_head in config.json must be an integer of at least 1, got 'x'"),
        ("granitemoehybrid", dict(logits_scaling=0), "logits_scaling in config.json must be above 0, got 0"),
        ("granitemoehybrid", dict(num_experts_per_tok=9), "num_experts_per_tok=9 in config.json is not supported"),
        ("granitemoehybrid", dict(num_local_experts="8"), "num_local_experts in config.json must be an integer of at"),
        ("minimax", dict(num_experts_per_tok=9), "num_experts_per_tok=9 in config.json is not supported"),
        ("minimax", dict(initializer_range=-1), "initializer_range in config.json must be at least 0, got -1"),
        ("falcon_h1", dict(mlp_multipliers=["a", 1]), "mlp_multipliers=['a', 1] in config.json is not supported"),
        ("falcon_h1", dict(mlp_multipliers=[True, 1]), "mlp_multipliers=[True, 1] in config.json is not supported"),
        (
            "granitemoehybrid",
            dict(num_experts_per_tok=0),
            "num_experts_per_tok in config.json must be an integer of at least 1",
        ),
        ("kda", dict(model_type=[]), "model_type=[] in config.json is not supported"),
        ("kda", dict(attn=5), "attn=5 in config.json is not supported"),
        ("kda", dict(attn=ATTN | dict(layers=3)), "attn={'layers': 3, 'num_heads': 2} in config.json is not supported"),
        (
            "kda",
            dict(attn=ATTN | dict(layers=["0"])),
            "attn={'layers': ['0'], 'num_heads': 2} in config.json is not supported",
        ),
        (
            "kda",
            dict(attn=ATTN | dict(num_heads=0)),
            "attn.num_heads in config.json must be an integer of at least 1, got 0",
        ),
        ("kda", dict(attn=ATTN | dict(num_heads=3)), "attn.num_heads=3 in config.json is not supported"),
        (
            "kda",
            dict(attn=ATTN | dict(window_size=-1)),
            "attn.window_size in config.json must be an integer of at least 1",
        ),
        (
            "kda",
            dict(attn=ATTN | dict(rope_theta="x")),
            "attn.rope_theta in config.json must be a finite number, got 'x'",
        ),
        ("kda", dict(attn=ATTN | dict(qkv_bias="no")), "attn.qkv_bias in config.json must be true or false, got 'no'"),
    ],
)
def test_values_that_an_option_cannot_have_are_named(name, changes, text):
    config = json.loads((FIXTURES / name / "config.json").read_text()) | changes
    with pytest.raises(ValueError) as caught:
        glax.models.from_config(config, rngs=nnx.Rngs(0))
    assert text in str(caught.value)


def test_a_dense_model_may_have_no_experts_per_token():
    config = json.loads((FIXTURES / "granitemoehybrid_dense" / "config.json").read_text())
    glax.models.from_config(config | dict(num_local_experts=0, num_experts_per_tok=0), rngs=nnx.Rngs(0))


def test_layers_of_multi_token_prediction_are_not_read(tmp_path):
    folder = copied(tmp_path, "qwen3_next")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.norm.weight": np.zeros(16, np.float32)}, folder / "model.safetensors")
    model = glax.models.from_pretrained(folder)
    np.testing.assert_array_equal(model.norm.scale[...], weights["model.norm.weight"])


def test_tensors_of_other_models_are_named_and_saved_again_or_left_out(tmp_path, caplog):
    folder = copied(tmp_path / "in", "qwen3_5")
    weights = load_file(folder / "model.safetensors")
    others = {name: x for name, x in weights.items() if name.startswith("model.visual.")}
    others["mtp.norm.weight"] = np.ones(16, np.float32)
    save_file(weights | others, folder / "model.safetensors")
    with caplog.at_level("WARNING", logger="glax"):
        model = glax.models.from_pretrained(folder)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith(f"not read: {len(others) - 1} of model.visual.*, 1 of mtp.*")
    for whole in (True, False):
        out = tmp_path / f"out-{whole}"
        glax.models.save_pretrained(model, out, others=whole)
        saved = load_file(out / "model.safetensors")
        assert saved.keys() == (weights.keys() | others if whole else weights.keys() - others)
        for name in others if whole else ():
            np.testing.assert_array_equal(saved[name], others[name])
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="no tensors of other models"):
        glax.models.save_pretrained(model, tmp_path / "alone")


@pytest.mark.parametrize("name", ["olmo_hybrid", "olmo_hybrid_options"])
def test_filters_in_equal_parts_and_other_names_of_norms_are_read(tmp_path, name):
    """transformers saves the rows of q, k and v in three equal parts, whatever their widths; its modules have other names."""
    folder, (model, _) = copied(tmp_path / "in", name), loaded(name)
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if ".q_conv1d." in key]:
        names = [key.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        rows = np.concatenate([weights[one] for one in names])
        weights |= zip(names, map(np.ascontiguousarray, np.array_split(rows, 3)), strict=True)
    renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in renamed.items():
        weights = {key.replace(f".{old}.", f".{new}."): x for key, x in weights.items()}
    save_file(weights, folder / "model.safetensors")
    again = glax.models.from_pretrained(folder)
    for (path, x), (_, want) in zip(parameters(again), parameters(model), strict=True):
        np.testing.assert_array_equal(x[...], want[...], err_msg=path)


@pytest.mark.parametrize("name", ["jamba", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_experts_in_one_tensor_are_read_as_those_that_lie_apart(tmp_path, name):
    """Published files of Qwen3.5 hold them so, and so do the modules of transformers, which writes them apart by default."""
    folder, (model, _) = copied(tmp_path / "in", name), loaded(name)
    weights = load_file(folder / "model.safetensors")
    for layer in {key.partition(".experts.")[0] for key in weights if ".experts." in key}:
        parts = {
            part: np.stack([weights.pop(f"{layer}.experts.{i}.{part}_proj.weight") for i in range(4)])
            for part in ("gate", "up", "down")
        }
        weights[f"{layer}.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        weights[f"{layer}.experts.down_proj"] = parts["down"]
    save_file(weights, folder / "model.safetensors")
    again = glax.models.from_pretrained(folder)
    for (path, x), (_, want) in zip(parameters(again), parameters(model), strict=True):
        np.testing.assert_array_equal(x[...], want[...], err_msg=path)
    name = next(key for key in weights if key.endswith("gate_up_proj"))
    save_file(weights | {name: weights[name][0]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"gate_up_proj in .* must be \[experts, rows, columns\]"):
        glax.models.from_pretrained(folder)


@pytest.mark.parametrize(("name", "old", "new"), [
    ("qwen3_5", "model.language_model.", "model."), ("qwen3_5_text", "model.", "model.language_model."),
])  # fmt: skip
def test_a_language_model_is_read_under_the_names_that_it_has_alone_and_in_the_whole(tmp_path, name, old, new):
    folder, (model, _) = copied(tmp_path / "in", name), loaded(name)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {key.replace(old, new) if key.startswith(old) else key: x for key, x in weights.items()},
        folder / "model.safetensors",
    )
    again = glax.models.from_pretrained(folder)
    for (path, x), (_, want) in zip(parameters(again), parameters(model), strict=True):
        np.testing.assert_array_equal(x[...], want[...], err_msg=path)


def test_missing_and_left_over_weights_are_listed(tmp_path):
    folder = copied(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing are model\.norm\.weight; left over are model\.extra\.weight"):
        glax.models.from_pretrained(folder)
    weights["model.norm.weight"] = weights.pop("model.extra.weight")[:8]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* must have the shape .*\(16,\).*got \(8,\)"):
        glax.models.from_pretrained(folder)


def test_a_pickle_is_refused_by_name(tmp_path):
    folder = copied(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        glax.models.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="is no folder: nothing is downloaded"):
        glax.models.from_pretrained("fla-hub/gla-340M")


def test_a_sharded_bfloat16_folder_loads_in_its_dtype_or_another(tmp_path):
    folder, (_, expected) = copied(tmp_path), loaded("gla")
    weights = {k: np.asarray(jnp.asarray(x, jnp.bfloat16)) for k, x in load_file(folder / "model.safetensors").items()}
    files = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(weights)}
    for file in set(files.values()):
        save_file({key: x for key, x in weights.items() if files[key] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=files)))
    model = glax.models.from_pretrained(folder)
    assert {param.dtype for _, param in parameters(model)} == {jnp.dtype(jnp.bfloat16)}
    logits = model(expected["tokens"])
    assert logits.dtype == jnp.bfloat16
    assert_near("logits", logits, expected["logits"], 0.1)
    model = glax.models.from_pretrained(folder, dtype=jnp.float32)
    assert {param.dtype for _, param in parameters(model)} == {jnp.dtype(jnp.float32)}
    assert_near("logits", model(expected["tokens"]), expected["logits"], 0.03)


def test_the_state_spaces_form_of_mamba2_is_told_by_its_config(tmp_path):
    folder, (_, expected) = copied(tmp_path, "mamba2"), loaded("mamba2")
    weights = load_file(folder / "model.safetensors")
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    save_file(weights, folder / "model.safetensors")
    renamed = glax.models.from_pretrained(folder)  # as transformers reads it, too
    np.testing.assert_array_equal(renamed.embedding.embedding[...], weights["backbone.embedding.weight"])
    ssm = dict(layer="Mamba2", d_state=8, headdim=8)
    config = dict(d_model=16, n_layer=2, vocab_size=31, pad_vocab_size_multiple=16, ssm_cfg=ssm, rms_norm=True)
    config |= dict(
        residual_in_fp32=True, fused_add_norm=True, tie_embeddings=False, d_intermediate=0, attn_layer_idx=[]
    )
    (folder / "config.json").write_text(json.dumps(config))
    model = glax.models.from_pretrained(folder)
    assert_near("logits", model(expected["tokens"]), expected["logits"], LOGITS)
    (folder / "config.json").write_text(json.dumps(config | dict(ssm_cfg=ssm | dict(layer="Mamba1"))))
    with pytest.raises(ValueError, match=r"ssm_cfg\.layer='Mamba1' in config\.json is not supported"):
        glax.models.from_pretrained(folder)
