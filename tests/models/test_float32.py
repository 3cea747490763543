"""Parameters that the models' own code has in float32, in models of bfloat16. tests/models/float32_names.py made the lists."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax.models.names import parameters
from tests.models.folders import copied

FOLDER = pathlib.Path(__file__).parent
FIXTURES = FOLDER / "fixtures"
RECORDED = json.loads((FOLDER / "float32_names.json").read_text())
NAMES = sorted(RECORDED["names"])


def dtypes(model) -> dict[str, jnp.dtype]:
    return {path: param.dtype for path, param in parameters(model)}


def float32_names(folder: pathlib.Path) -> list[str]:
    saved = load_file(folder / "model.safetensors")
    assert {str(x.dtype) for x in saved.values()} <= {"float32", "bfloat16", "int64"}  # int64: derived tensors
    return sorted(name for name, x in saved.items() if x.dtype == np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_bfloat16_has_and_saves_the_same_float32_parameters_as_the_models_own_code(name, tmp_path):
    model = glax.models.from_pretrained(FIXTURES / name, dtype=jnp.bfloat16)
    derived = set(model.derived_tensors())
    glax.models.save_pretrained(model, tmp_path, others=False)
    assert sorted(set(float32_names(tmp_path)) - derived) == RECORDED["names"][name]
    again = glax.models.from_pretrained(tmp_path)
    assert dtypes(again) == dtypes(model)
    original = load_file(FIXTURES / name / "model.safetensors")
    for key in RECORDED["names"][name]:
        np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")[key], original[key])
    config = json.loads((FIXTURES / name / "config.json").read_text())
    random = nnx.eval_shape(lambda: glax.models.from_config(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert dtypes(random) == dtypes(model)


def test_a_file_of_bfloat16_alone_gives_the_same_float32_parameters(tmp_path):
    folder = tmp_path / "narrow"
    glax.models.save_pretrained(glax.models.from_pretrained(FIXTURES / "nemotron_h", dtype=jnp.bfloat16), folder)
    tensors = {
        key: np.asarray(jnp.asarray(x, jnp.bfloat16)) for key, x in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    glax.models.save_pretrained(glax.models.from_pretrained(folder), tmp_path / "again")
    assert float32_names(tmp_path / "again") == RECORDED["names"]["nemotron_h"]


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_options"])
def test_routers_with_large_biases_choose_the_experts_that_transformers_chooses(name, tmp_path):
    """In bfloat16, numbers of about 14 are 1/16 apart. tests/models/make_router_bias.py made the file."""
    recorded = load_file(FOLDER / "router_bias.safetensors")
    recorded = {key.removeprefix(f"{name}/"): x for key, x in recorded.items() if key.startswith(f"{name}/")}
    folder = copied(tmp_path / name, name)
    weights = load_file(folder / "model.safetensors")
    save_file({key: recorded.get(key, x) for key, x in weights.items()}, folder / "model.safetensors")
    model = glax.models.from_pretrained(folder, dtype=jnp.bfloat16)
    router = next(block.mixer for block in model.blocks if hasattr(block.mixer, "correction"))
    shares, experts = router.chosen(jnp.asarray(recorded["rows"], jnp.bfloat16))
    order = np.argsort(experts, 1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(experts), order, 1), recorded["experts"])
    np.testing.assert_allclose(np.take_along_axis(np.asarray(shares), order, 1), recorded["weights"], rtol=2e-6)

    logits, exact = np.asarray(model(recorded["tokens"]), np.float32), recorded["exact"]
    own, theirs = (np.linalg.norm(x - exact) for x in (logits, recorded["bfloat16"]))
    assert own <= 1.5 * theirs
    same, theirs = ((x.argmax(-1) == exact.argmax(-1)).mean() for x in (logits, recorded["bfloat16"]))
    assert same >= theirs - 0.01


# ---- the decays of MiniMax, which its config determines --------------------------------------------------------------


def test_rounded_decays_in_a_file_of_bfloat16_are_not_used(tmp_path):
    """transformers forms and stores them in bfloat16. In float32 such a file must give the logits of its parameters alone."""
    rounded, exact = copied(tmp_path / "rounded", "minimax"), copied(tmp_path / "exact", "minimax")
    tokens = load_file(FIXTURES / "minimax" / "expected.safetensors")["tokens"]
    logits, weights = [], load_file(rounded / "model.safetensors")
    derived = glax.models.from_pretrained(exact).derived_tensors().keys()
    assert derived & weights.keys()
    for folder in (rounded, exact):
        narrow = {key: np.asarray(jnp.asarray(x, jnp.bfloat16)) for key, x in weights.items()}
        wide = {key: weights[key] for key in derived}
        save_file(narrow | (wide if folder == exact else {}), folder / "model.safetensors")
        model = glax.models.from_pretrained(folder, dtype=jnp.float32)
        logits.append(model(tokens))
        glax.models.save_pretrained(glax.models.from_pretrained(folder), folder)
        saved = load_file(folder / "model.safetensors")
        for key in derived:
            assert saved[key].dtype == np.float32
            np.testing.assert_allclose(saved[key], weights[key], rtol=1e-5)
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("changes", [dict(num_attention_heads=2, head_dim=16), dict(block_size=4)], ids=str)
def test_decays_of_another_config_are_an_error(changes, tmp_path):
    folder = copied(tmp_path / "model", "minimax_options")
    weights = load_file(folder / "model.safetensors")
    other = glax.models.from_config(
        json.loads((folder / "config.json").read_text()) | changes | dict(num_key_value_heads=2), rngs=nnx.Rngs(0)
    )
    save_file(weights | other.derived_tensors(), folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.\w+ must be what config\.json determines by num_attention"
    ):
        glax.models.from_pretrained(folder)
