"""The attention of GLM-5.3-Flash where it would be sparse, and options that its own code cannot run."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import glax.models
from glax.models.load import abstract_model

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "glm5_next"
MOST = 21  # index_topk + index_kpool - 1 of the fixture


@functools.cache
def loaded():
    return glax.models.from_pretrained(FOLDER), load_file(FOLDER / "expected.safetensors")


def test_sequences_that_would_be_sparse_are_refused():
    model, _ = loaded()
    text = rf"index_topk in config\.json allows sequences of at most {MOST} tokens here, got 22"
    attention, x = model.blocks[1].attn, jnp.ones((1, 30, model.width))
    calls = (
        lambda: jax.eval_shape(lambda: model(np.zeros((1, MOST + 1), np.int32))),
        lambda: attention(x, segment_ids=jnp.asarray([[1] * 8 + [2] * 22])),
        lambda: glax.models.generate(model, np.zeros((1, MOST - 1), np.int32), 3),
    )
    for call in calls:
        with pytest.raises(glax.models.UnsupportedOption, match=text):
            call()


def test_long_rows_of_short_sequences_run_and_a_traced_long_sequence_is_nan():
    model, expected = loaded()
    tokens, want = expected["tokens"], expected["logits"]
    packed = np.concatenate([tokens[0], tokens[1], [0] * 22])[None]
    run = jax.jit(lambda ids: model(packed, ids, pad_id=0))
    logits = np.asarray(run(jnp.asarray([[1] * MOST + [2] * MOST + [0] * 22])))[0, : 2 * MOST]
    np.testing.assert_allclose(logits, want.reshape(2 * MOST, -1), atol=2e-5)
    logits = np.asarray(run(jnp.asarray([[1] * MOST + [2] * (MOST + 22)])))[0]
    np.testing.assert_allclose(logits[: 2 * MOST], want.reshape(2 * MOST, -1), atol=2e-5)
    assert np.isnan(logits[2 * MOST :]).all()


def test_a_step_behind_the_last_token_that_attention_reads_whole_is_nan():
    attention = loaded()[0].blocks[1].attn
    state = attention.initial_state(2, 32) | dict(length=jnp.array([MOST - 1, MOST]))
    y, _ = nnx.jit(type(attention).step)(attention, jnp.ones((2, 16)), state)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


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
        (dict(linear_attn_config=dict(gate_lower_bound=1.0)), "the bound of log decays must be below 0"),
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
