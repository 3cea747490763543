"""The hashes of n-grams beside Python's integers, and options that a model with n-grams cannot have."""

import jax.numpy as jnp
import numpy as np
import pytest

import glax.models
from glax.models.config import ModelConfig
from glax.models.load import abstract_model
from glax.models.qwen4_exp import NGramHash, primes_from, product, remainder

CONFIG = dict(
    model_type="qwen4_exp_text", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    vocab_size=32, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8, hc_count=2, hc_lowrank=4,
    layer_types=["linear_attention", "full_attention"], ple_layer_ids=[1], heads_per_ngram=2, ngram_vocab_size_base=19,
    split_ngram_parts=2, eos_token_id=5, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
    indexer_compress_ratio=2,
)  # fmt: skip
NUMBERS = (0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**32 - 1)


def test_products_and_remainders_of_64_bits():
    a, high, low = (np.array(x, np.uint32) for x in np.meshgrid(NUMBERS, NUMBERS, NUMBERS))
    for b in (1, 3, 2**32 - 1, 2**32 + 1, 2**63 - 1, 2**48 + 12345):
        exact = [(int(x) * b) % 2**64 for x in a.ravel()]
        upper, lower = product(jnp.asarray(a), b)
        assert [(int(x) << 32) + int(y) for x, y in zip(np.ravel(upper), np.ravel(lower), strict=True)] == exact
    primes = (3, 37, 20_000_003, 2**31 - 1)
    found = np.asarray(remainder(jnp.asarray(high), jnp.asarray(low), primes)).reshape(-1, 4)
    for row, x, y in zip(found, high.ravel(), low.ravel(), strict=True):
        assert row.tolist() == [((int(x) << 32) + int(y)) % p for p in primes]


def test_n_grams_end_where_a_text_ends():
    hashes = NGramHash((3, 5, 7), (11, 13, 17, 19), end=2, rows=64)
    tokens = [9, 2, 4, 6, 2, 2, 8]
    padded = [2, 2, *tokens]
    found = hashes([jnp.asarray(padded[2 - lag : len(padded) - lag]) for lag in range(3)])
    for t, row in enumerate(np.asarray(found)):
        one = padded[t + 1]
        two = 2 if one == 2 else padded[t]
        pair = (3 * tokens[t]) ^ (5 * one)
        triple = pair ^ (7 * two)
        assert row.tolist() == [pair % 11, 11 + pair % 13, 24 + triple % 17, 41 + triple % 19]


def test_primes():
    primes = primes_from(1)
    assert [next(primes) for _ in range(6)] == [2, 3, 5, 7, 11, 13]
    assert next(primes_from(24)) == 29


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (dict(eos_token_id=None), "eos_token_id"),
        (dict(eos_token_id=-1), "eos_token_id"),
        (dict(eos_token_id=32), "eos_token_id"),
        (dict(eos_token_id=[]), "eos_token_id"),
        (dict(ple_layer_ids=[2]), "ple_layer_ids"),
        (dict(ple_layer_ids=[0]), "ple_layer_ids"),
        (dict(ple_layer_ids=0), "ple_layer_ids"),
        (dict(ngram_size=1), "ngram_size"),
        (dict(ple_embed_dim=18), "ple_embed_dim"),
        (
            dict(ngram_vocab_size_base=2_000_000_000, heads_per_ngram=131072, ple_embed_dim=262144),
            "ngram_vocab_size_base",
        ),
        (dict(indexer_budget=None), "indexer_budget"),
        (dict(indexer_budget=7), "indexer_budget"),
        (dict(indexer_kv_heads=2), "indexer_kv_heads"),
        (dict(indexer_head_dim=6), "indexer_head_dim"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(hc_count=1), "hc_count"),
    ],
)
def test_options_that_a_model_cannot_have_are_named(changed, key):
    abstract_model(ModelConfig.of(CONFIG))
    with pytest.raises(ValueError, match=rf"^{key}"):
        abstract_model(ModelConfig.of(CONFIG | changed))


def test_a_folder_with_other_hashes_is_refused(tmp_path):
    from flax import nnx

    model = glax.models.from_config(CONFIG, rngs=nnx.Rngs(0))
    glax.models.save_pretrained(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 5', '"eos_token_id": 5, "seed": 7'))
    with pytest.raises(ValueError, match=r"layer_multipliers must be .* got .*: give config.json the values"):
        glax.models.from_pretrained(tmp_path)
