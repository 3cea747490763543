"""Rotary angles against float64, at positions where a product in float32 has lost its digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax import nn
from glax.nn.rotary import Rotation, rotate

FAR = np.array([0, 1, 2, 4095, 32_767, 131_071, 131_072, 1_000_000, 12_345_678, 2**31 - 1], np.int32)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6, 7, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_angles_are_exact_at_every_position(theta, compiled):
    rotation, x = Rotation.of_base(theta, 32), np.random.default_rng(0).standard_normal((len(FAR), 3, 40), np.float32)
    run = jax.jit(rotate, static_argnums=2) if compiled else rotate
    got = np.asarray(run(jnp.asarray(x), jnp.asarray(FAR), rotation))
    angles = FAR[:, None].astype(np.longdouble) * (np.float64(theta) ** -(np.arange(0, 32, 2) / 32))
    cos, sin = (f(angles)[:, None].astype(np.float64) for f in (np.cos, np.sin))
    first, second = x[..., :16].astype(np.float64), x[..., 16:32].astype(np.float64)
    want = np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 32:]], -1)
    np.testing.assert_allclose(got, want, atol=5e-6, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_below_32768_the_angles_are_near_those_of_transformers(theta):
    """transformers multiplies in float32, as here; it is the one that is 2e-3 off."""
    at = np.arange(0, 32_768, 31)
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, 128, 2, dtype=np.float32) / np.float32(128))
    theirs = np.cos(at.astype(np.float32)[:, None] * frequencies)
    ours = np.cos(np.asarray(Rotation.of_base(theta, 128).angles(jnp.asarray(at))))
    np.testing.assert_allclose(ours, theirs, atol=2.5e-3, rtol=0)
    np.testing.assert_allclose(ours[at < 512], theirs[at < 512], atol=5e-5, rtol=0)


def far_and_near(layer, x, place: int):
    """Return the outputs of a layer on x behind `place` tokens of zeros, and at the beginning, which are equal: only distances
    count."""
    states = [layer.empty_state(1, at + x.shape[1]) for at in (place, 0)]
    states[0]["length"] = jnp.array([place], jnp.int32)
    return [np.asarray(nnx.jit(lambda layer, x, state: layer(x, state)[0])(layer, x, state)) for state in states]


@pytest.mark.parametrize("place", [131_072, 1_000_000])
def test_layers_read_distances_alone_at_far_positions(place):
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    bound = dict(num_heads=2, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.normal(0.5))
    for layer, first in (
        (nn.MultiScaleRetention(16, **bound), 0),
        (nn.Attention(16, window=3, **bound), 2),  # before that the window reaches rows of the cache that hold zeros
        (nn.Attention(16, window=3, rotary_width=4, theta=1e6, **bound), 2),
    ):
        far, near = far_and_near(layer, x, place)
        np.testing.assert_allclose(far[:, first:], near[:, first:], atol=1e-5 * np.abs(near).max(), rtol=0)


def test_frequencies_replace_the_base():
    options = dict(num_heads=2, rotary_width=4)
    base = nn.Attention(16, theta=100.0, rngs=nnx.Rngs(0), **options)
    given = nn.Attention(16, frequencies=[1.0, 0.1], rngs=nnx.Rngs(0), **options)
    other = nn.Attention(16, frequencies=[0.5, 0.1], rngs=nnx.Rngs(0), **options)
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    np.testing.assert_allclose(given(x)[0], base(x)[0], atol=1e-7)
    assert np.abs(other(x)[0] - base(x)[0]).max() > 1e-7


@pytest.mark.parametrize("layer", [nn.Attention, nn.LightningAttention])
@pytest.mark.parametrize(("name", "value"), [("rotary_width", 4), ("frequencies", [1.0, 0.1])])
def test_arguments_of_a_rotation_without_a_base_are_refused(layer, name, value):
    with pytest.raises(ValueError, match=f"{name} must be None where theta is None, which means no rotation, got "):
        layer(16, num_heads=2, theta=None, rngs=nnx.Rngs(0), **{name: value})


@pytest.mark.parametrize("frequencies", [[1.0], [1.0, np.nan], np.ones((2, 1))])
def test_frequencies_of_no_sense_are_refused(frequencies):
    with pytest.raises(ValueError, match="frequencies must be rotary_width / 2 = 2 finite numbers"):
        nn.Attention(16, num_heads=2, rotary_width=4, frequencies=frequencies, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("theta", [-1.0, 0, np.nan, np.inf])
def test_a_base_of_no_sense_is_refused(theta):
    for layer in (nn.Attention, nn.MultiScaleRetention):
        with pytest.raises(ValueError, match=r"theta must be"):
            layer(16, num_heads=2, theta=theta, rngs=nnx.Rngs(0))
