"""The attention of GLM-5.3-Flash where it reads a part of the tokens, and options that its own code cannot run."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax.models.load import abstract_model

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "glm5_next"
MOST = 7  # index_topk + index_kpool - 1 of the fixture: up to so many tokens, all are read


def test_the_indexer_decides_beyond_the_tokens_that_are_all_read_and_there_alone():
    attention = glax.models.from_pretrained(FOLDER).blocks[1].attn
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3 * MOST, 16)), jnp.float32)
    before, _ = attention(x)
    attention.indexer.weights.kernel[...] = -attention.indexer.weights.kernel[...]
    after, _ = attention(x)
    np.testing.assert_array_equal(before[:, :MOST], after[:, :MOST])
    assert (np.abs(before - after)[:, MOST:].max(-1) > 1e-3).any()


def test_a_layer_that_takes_the_choice_of_another_cannot_run_alone():
    model = glax.models.from_pretrained(FOLDER.with_name("glm5_next_options"))
    with pytest.raises(ValueError, match="a layer without an indexer must follow one that has an indexer, in a model"):
        model.blocks[2].attn(jnp.ones((1, 4, 16)))


def test_layers_of_which_one_takes_the_choice_of_another_run_in_no_scan():
    shared = abstract_model(glax.models.ModelConfig.read(FOLDER.with_name("glm5_next_options")))
    assert "the layer before them" in (shared.cannot_scan() or "")
    assert abstract_model(glax.models.ModelConfig.read(FOLDER)).cannot_scan() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(index_kpool_always_select_tail=False), "text_config.index_kpool_always_select_tail=False in config.json"),
        (dict(index_topk=21), "text_config.index_topk=21 in config.json is not supported"),
        (dict(qk_rope_head_dim=4), "text_config.qk_rope_head_dim=4 in config.json is not supported"),
        (dict(q_lora_rank=None), "text_config.q_lora_rank=None in config.json is not supported"),
        (dict(num_key_value_heads=2), "text_config.num_key_value_heads=2 in config.json is not supported"),
        (dict(indexer_types=["full", "shared"]), "layer 1 must follow a layer that has an indexer"),
        (dict(indexer_types=None, index_topk_pattern="FS"), "text_config.index_topk_pattern="),
        (dict(indexer_types=None, index_topk_pattern="FX"), "text_config.index_topk_pattern="),
        (dict(linear_lower_bound=0.0), "text_config.linear_lower_bound=0.0 in config.json is not supported"),
        (
            dict(linear_attn_config=dict(gate_lower_bound=1.0)),
            "text_config.linear_attn_config.gate_lower_bound=1.0 in config.json is not supported",
        ),
        (dict(linear_attn_config=dict(head_dim=0)), "text_config.linear_attn_config.head_dim in config.json must be"),
        (dict(swiglu_limit=0.0), "text_config.swiglu_limit in config.json must be above 0"),
        (dict(num_experts_per_tok=9), "text_config.num_experts_per_tok=9 in config.json is not supported"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_an_option_that_is_not_supported_is_named(changes, text):
    values = json.loads((FOLDER / "config.json").read_text())
    values["text_config"] |= changes
    with pytest.raises(ValueError) as caught:
        glax.models.from_config(values, rngs=nnx.Rngs(0))
    assert text in str(caught.value)


def test_a_config_without_text_config_is_that_of_the_language_model():
    values = json.loads((FOLDER / "config.json").read_text())
    flat = values["text_config"] | dict(model_type="glm5_next", tie_word_embeddings=False)
    whole, alone = (abstract_model(glax.models.ModelConfig.of(config)) for config in (values, flat))
    assert jax.tree.map(jnp.shape, nnx.state(alone)) == jax.tree.map(jnp.shape, nnx.state(whole))


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (dict(linear_lower_bound=None), None),
        (dict(linear_lower_bound=None, linear_attn_config={}), -5.0),
        (dict(linear_lower_bound=-2.0, linear_attn_config=dict(gate_lower_bound=None, safe_gate=False)), None),
        (dict(linear_lower_bound=-2.0, linear_attn_config=dict(gate_lower_bound=-3.0)), -3.0),
    ],
    ids=str,
)
def test_the_bound_of_gates_is_that_of_transformers_config(options, bound):
    values = json.loads((FOLDER / "config.json").read_text())
    values["text_config"] |= options
    assert abstract_model(glax.models.ModelConfig.of(values)).blocks[0].attn.lower_bound == bound
