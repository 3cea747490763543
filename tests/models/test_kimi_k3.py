"""Kimi K3: its published tensors, its experts in MXFP4, and options that it cannot have."""

import functools
import json
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax import nn
from glax.models.attention_residual import AttentionResidual
from glax.models.dequantization import E2M1
from glax.models.load import abstract_model, parameters, stored_names
from glax.models.quantization import without_quantization

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "fixtures" / "kimi_k3"


def config(**changes) -> dict:
    values = json.loads((FOLDER / "config.json").read_text())
    values["text_config"] |= changes
    return values


def linear(**changes) -> dict:
    return dict(linear_attn_config=config()["text_config"]["linear_attn_config"] | changes)


def test_the_names_and_shapes_of_tensors_are_those_of_the_published_files():
    """kimi_k3_tensors.json has the shape of each, with N for the numbers of layers and experts, of dequantized experts."""
    values = json.loads((HERE / "published" / "kimi-k3.json").read_text())
    model = abstract_model(without_quantization(glax.models.ModelConfig.of(values))[0])
    found = {}
    for path, param in parameters(model):
        [name, *_] = stored_names(model.names(path), param)
        _, to_checkpoint, _ = model.names.layout(path.rpartition(".")[2])
        shape = param.shape[1:] if ".experts." in path and ".shared." not in path else param.shape
        shape = to_checkpoint(np.broadcast_to(np.float32(0), shape)).shape
        assert found.setdefault(re.sub(r"\.\d+(?=\.)", ".N", name), list(shape)) == list(shape)
    assert found == json.loads((HERE / "kimi_k3_tensors.json").read_text())


def test_the_language_model_alone_is_a_kimi_linear_with_further_options(tmp_path):
    whole = glax.models.from_pretrained(FOLDER)
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()["text_config"]))
    alone = glax.models.from_pretrained(tmp_path)
    tokens = jnp.arange(12)[None]
    np.testing.assert_array_equal(alone(tokens), whole(tokens))
    glax.models.save_pretrained(alone, tmp_path / "saved")
    assert "model.layers.0.self_attn.A_log" in load_file(tmp_path / "saved" / "model.safetensors")
    again = glax.models.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(again(tokens), whole(tokens))


def test_experts_in_mxfp4_are_read_although_text_config_names_the_quantization(tmp_path):
    values = config(hidden_size=32, moe_intermediate_size=32, routed_expert_hidden_size=64, num_hidden_layers=2)
    values["text_config"] |= linear(full_attn_layers=[2], kda_layers=[1])
    model = glax.models.from_config(values, rngs=nnx.Rngs(0))
    glax.models.save_pretrained(model, tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors.pop(name).shape
        tensors[name + "_packed"] = codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        tensors[name + "_scale"] = scale = rng.integers(120, 129, (rows, columns // 32), dtype=np.uint8)
        numbers = E2M1[codes].reshape(rows, columns // 32, 32) * 2.0 ** (scale[..., None].astype(np.float64) - 127)
        tensors[f"want.{name}"] = numbers.reshape(rows, columns).astype(np.float32)
    want = {name.removeprefix("want."): tensors.pop(name) for name in list(tensors) if name.startswith("want.")}
    save_file(tensors, tmp_path / "model.safetensors")
    published = json.loads((HERE / "published" / "kimi-k3.json").read_text())["text_config"]["quantization_config"]
    values["text_config"]["quantization_config"] = published
    (tmp_path / "config.json").write_text(json.dumps(values | dict(dtype="float32")))
    read = glax.models.from_pretrained(tmp_path, dtype=jnp.float32)
    glax.models.save_pretrained(read, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())["text_config"]
    for name, x in want.items():
        np.testing.assert_array_equal(saved[name], x)


def test_rates_of_more_heads_than_the_config_says_are_an_error(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.model.layers.0.self_attn.A_log"][5] = 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log in .* must have the shape"):
        glax.models.from_pretrained(tmp_path)


def test_a_residual_is_attention_over_depth():
    layer = AttentionResidual(6, norm_eps=1e-5, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    assert layer.norm.scale is not None
    layer.norm.scale[...] = jnp.asarray(rng.standard_normal(6), jnp.float32)
    values = rng.standard_normal((2, 4, 6))
    keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(layer.norm.scale[...])
    score = np.exp(keys @ np.asarray(layer.proj.kernel[...])[:, 0])
    want = (score[..., None] * values).sum(1) / score.sum(1)[:, None]
    np.testing.assert_allclose(layer([jnp.asarray(values[:, i], jnp.float32) for i in range(4)]), want, atol=1e-6)


def test_an_adapter_of_a_residual_counts():
    model = glax.models.from_pretrained(FOLDER)
    before = model(jnp.arange(9)[None])
    glax.models.lora(model, 2, targets=r".*res_proj", rngs=nnx.Rngs(0))
    for _, term in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        term[...] = jnp.ones_like(term[...])
    assert np.abs(model(jnp.arange(9)[None]) - before).max() > 1e-3


def test_the_weight_of_one_expert_is_not_normalised():
    logits = []
    for normalize in (False, True):
        values = config(num_experts_per_token=1, num_expert_group=1, topk_group=1, moe_renormalize=normalize)
        logits.append(glax.models.from_config(values, rngs=nnx.Rngs(0))(jnp.arange(9)[None]))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("changes", [dict(first_k_dense_replace=5), dict(moe_layer_freq=5, first_k_dense_replace=1)])
def test_a_model_without_experts_may_have_their_options(changes):
    model = glax.models.from_config(config(**changes), rngs=nnx.Rngs(0))
    assert all(isinstance(block.mlp, nn.SwiGLU) for block in model.blocks)


@pytest.mark.parametrize("c", [None, 1.5])
@pytest.mark.parametrize("form", ["split", "fused"])
def test_situ_is_formed_in_float32_by_layers_and_by_experts(form, c):
    x, b = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) * 4, 0.8
    mlp = nn.SwiGLU(8, 5, situ=(b, c), rngs=nnx.Rngs(0))
    gate, up = (x.astype(np.float64) @ np.asarray(y.kernel[...], np.float64) for y in (mlp.gate, mlp.up))
    inside = b * np.tanh(gate / b) / (1 + np.exp(-gate)) * (up if c is None else c * np.tanh(up / c))
    want = inside @ np.asarray(mlp.down.kernel[...], np.float64)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), want, atol=1e-5)
    experts = nn.Experts(8, 5, 1, form=form, situ=(b, c), rngs=nnx.Rngs(0))
    kernels = {name: getattr(mlp, name).kernel[...][None] for name in ("gate", "up", "down")}
    if form == "fused":
        kernels["input"] = jnp.concatenate([kernels.pop("gate"), kernels.pop("up")], -1)
    for name, kernel in kernels.items():
        getattr(experts, name)[...] = kernel
    chosen = jnp.ones((3, 1)), jnp.zeros((3, 1), jnp.int32)
    np.testing.assert_allclose(experts(jnp.asarray(x), chosen), want, atol=1e-5)
    narrow = experts(jnp.asarray(x, jnp.bfloat16), chosen).astype(jnp.float32)
    assert np.linalg.norm(narrow - want) < 0.02 * np.linalg.norm(want)


def test_experts_of_another_width_read_a_projection_and_their_sum_is_normalised():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8)), jnp.float32)
    mlp = nn.SparseMLP(8, 5, 4, 2, latent_width=6, latent_norm_eps=1e-3, latent_bias=True, rngs=nnx.Rngs(0))
    params = {".".join(map(str, path)): np.asarray(p[...]) for path, p in nnx.to_flat_state(nnx.state(mlp, nnx.Param))}
    z = mlp.experts(x @ params["into.kernel"] + params["into.bias"], mlp.chosen(x))
    z = np.asarray(z, np.float64)
    z = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-3) * params["out_norm.scale"]
    np.testing.assert_allclose(mlp(x), z @ params["out_of.kernel"] + params["out_of.bias"], atol=1e-5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *(
            (
                functools.partial(nn.SwiGLU, 8, 4, situ=situ),
                f"situ must be a pair of finite numbers above 0, or of one and None, got {situ!r}",
            )
            for situ in ((0.0, None), (None, 1.0), ("a", None), (1.0, float("inf")), (True, 1.0), (1.0,), 1.0)
        ),
        (lambda rngs: nn.SwiGLU(8, 4, situ=(1.0, 1.0), limit=2.0, rngs=rngs), "limit must be None with situ, got 2.0"),
        (
            lambda rngs: nn.Experts(8, 4, 2, form="plain", situ=(1.0, 1.0), rngs=rngs),
            "situ must be None with form='plain'",
        ),
        (
            lambda rngs: nn.SparseMLP(8, 4, 2, 1, latent_bias=True, rngs=rngs),
            "latent_bias must be False without latent_width",
        ),
        (
            lambda rngs: nn.MultiHeadLatentAttention(
                8, num_heads=2, latent_width=4, head_width=4, gated=True, head_gated=True, rngs=rngs
            ),
            "head_gated must be False with gated=True",
        ),
    ],
    ids=range(11),
)
def test_arguments_that_exclude_each_other(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make(rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(mla_use_nope=False), "text_config.mla_use_nope=False in config.json is not supported"),
        (dict(moe_router_activation_func="softmax"), "text_config.moe_router_activation_func='softmax'"),
        (
            dict(attn_res_block_size=0),
            "text_config.attn_res_block_size in config.json must be an integer of at least 1",
        ),
        (
            dict(activation_situ_linear_beta=0.0),
            "text_config.activation_situ_linear_beta in config.json must be above 0",
        ),
        (linear(gate_lower_bound=0.0), "text_config.linear_attn_config.gate_lower_bound=0.0 in config.json"),
        (linear(kda_layers=None), "it must come with full_attn_layers"),
        (linear(full_attn_layers=None), "text_config.linear_attn_config.full_attn_layers=None in config.json"),
        (linear(kda_layers=[1, 2]), "text_config.linear_attn_config.kda_layers=[1, 2] in config.json"),
        (dict(num_key_value_heads=1), "text_config.num_key_value_heads=1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_an_option_that_is_not_supported_is_named(changes, text):
    with pytest.raises(ValueError) as caught:
        glax.models.from_config(config(**changes), rngs=nnx.Rngs(0))
    assert text in str(caught.value)
