"""First values of parameters of a model made new: the ranges that the models' own code draws them from."""

import numpy as np
import pytest
from flax import nnx

import glax.models

WIDTH, INSIDE, LAYERS = 64, 128, 4
SMALL = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=16, state_size=16)
HEADS = dict(head_dim=32, num_heads=4, n_groups=1)

NEMOTRON = dict(model_type="nemotron_h", layers_block_type=["linear_attention"] * LAYERS, mamba_num_heads=4)
NEMOTRON |= dict(mamba_head_dim=32, n_groups=1, ssm_state_size=16)


def mixers(config) -> list:
    return [block.mixer for block in glax.models.from_config(config, rngs=nnx.Rngs(0)).blocks]


@pytest.mark.parametrize(
    ("config", "divisor"),
    [
        (dict(model_type="mamba"), 1),
        (dict(model_type="mamba", rescale_prenorm_residual=True), LAYERS**0.5),
        (dict(model_type="falcon_mamba"), 1),
        (dict(model_type="falcon_mamba", rescale_prenorm_residual=True), LAYERS**0.5),
        (dict(model_type="mamba2", **HEADS), 1),
        (dict(model_type="mamba2", rescale_prenorm_residual=True, **HEADS), LAYERS**0.5),
        (dict(model_type="mamba2", norm_eps=1e-5, **HEADS), LAYERS**0.5),
        (dict(model_type="mamba3", **HEADS), LAYERS**0.5),
        (NEMOTRON, LAYERS**0.5),
    ],
)
def test_output_projections_start_uniform_as_torch_has_them_divided_by_layers(config, divisor):
    bound = INSIDE**-0.5 / divisor
    for mixer in mixers(SMALL | config):
        kernel = np.asarray(mixer.output.kernel[...])
        assert kernel.shape == (INSIDE, WIDTH) and 0.99 * bound < np.abs(kernel).max() <= bound
        np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=0.03)
        assert abs(kernel.mean()) < 0.03 * bound


@pytest.mark.parametrize("config", [dict(model_type="mamba3"), dict(model_type="mamba2", norm_eps=1e-5), NEMOTRON])
def test_output_projections_start_normal_without_rescaling(config):
    config = (
        SMALL
        | (config if config is NEMOTRON else HEADS | config)
        | dict(rescale_prenorm_residual=False, initializer_range=0.5)
    )
    for mixer in mixers(config):
        kernel = np.asarray(mixer.output.kernel[...])
        np.testing.assert_allclose(kernel.std(), 0.5, rtol=0.03)
        assert np.abs(kernel).max() > 1


def rates(config) -> np.ndarray:
    """Return exp(A_log) of all layers that have it."""
    model = glax.models.from_config(config, rngs=nnx.Rngs(0))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return np.exp(np.concatenate([np.asarray(x[...]).ravel() for path, x in flat if path[-1] == "A_log"]))


def test_decay_rates_of_lara_mini_start_from_1_to_16():
    config = dict(model_type="lara_mini", hidden_size=16, num_hidden_layers=2, vocab_size=16, num_attention_heads=2)
    config |= dict(num_key_value_heads=1, head_dim=8, linear_num_key_heads=64, linear_num_value_heads=512)
    config |= dict(linear_key_head_dim=2, linear_value_head_dim=2, num_experts=2, num_experts_per_tok=1)
    found = rates(config | dict(layer_types=["linear_attention", "linear_attention"]))
    assert len(found) == 1024 and 1 <= found.min() < 1.2 and 15.8 < found.max() <= 16.001
    np.testing.assert_allclose([found.mean(), found.std()], [8.5, 15 / 12**0.5], rtol=0.05)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_decay_rates_of_glm5_next_start_at_1_where_log_decays_are_bounded(bound):
    config = dict(model_type="glm5_next", hidden_size=16, num_hidden_layers=1, vocab_size=16, pad_token_id=0)
    config |= dict(layer_types=["linear_attention"], mlp_layer_types=["dense"], intermediate_size=16)
    config |= dict(linear_num_heads=512, linear_head_dim=2, linear_lower_bound=bound, hc_mult=1)
    found = rates(config)
    if bound is None:
        assert 1 <= found.min() < 1.2 and 15.5 < found.max() <= 16.001
    else:
        np.testing.assert_array_equal(found, 1)
