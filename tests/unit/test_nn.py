"""The layer of gated linear attention: its formula, its three ways to read, and its errors."""

import itertools
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax.nn import GatedLinearAttention, ShortConvolution


def make_layer(**changes) -> GatedLinearAttention:
    sizes = dict(num_heads=4, num_kv_heads=2, key_width=8, value_width=4, gate_rank=3, temperature=2.0) | changes
    return GatedLinearAttention(16, **sizes, rngs=nnx.Rngs(0))


read = nnx.jit(GatedLinearAttention.__call__)


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(x, y, tolerance=1e-5):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * float(jnp.abs(y).max()))


# ---- the layer -------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_layer_is_its_formula():
    layer, x = make_layer(), normal(2, 5, 16)
    y, final = read(layer, x)

    def project(linear, heads):
        return np.asarray(x, np.float64) @ np.asarray(linear.kernel[...], np.float64), heads

    q, k, v, s = (
        product.reshape(2, 5, heads, -1)
        for product, heads in (
            project(layer.query, 4),
            project(layer.key, 2),
            project(layer.value, 2),
            project(layer.output_gate, 4),
        )
    )
    k, v = np.repeat(k, 2, 2), np.repeat(v, 2, 2)
    low = np.asarray(x) @ np.asarray(layer.gate_down.kernel[...]) @ np.asarray(layer.gate_up.kernel[...])
    decay = (1 / (1 + np.exp(-(low + np.asarray(layer.gate_bias[...]))))) ** (1 / 2.0)
    decay, S, rows = decay.reshape(2, 5, 4, 8), np.zeros((2, 4, 8, 4)), []
    for t in range(5):
        S = S * decay[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        o = np.einsum("bhk,bhkv->bhv", q[:, t], S) / np.sqrt(8)
        normed = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.norm.scale[...])
        gated = normed * s[:, t] / (1 + np.exp(-s[:, t]))
        rows.append(gated.reshape(2, -1) @ np.asarray(layer.output.kernel[...]))
    close(y, np.stack(rows, 1), 1e-4)
    close(final, S, 1e-4)


def test_steps_equal_one_pass():
    layer, x = make_layer(), normal(3, 40, 16)
    y, final = read(layer, x)
    state, step = layer.initial_state(3), nnx.jit(GatedLinearAttention.step)
    for t in range(40):
        row, state = step(layer, x[:, t], state)
        close(row, y[:, t], 1e-4)
    close(state, final)


def test_one_pass_equals_two_through_the_state():
    layer, x = make_layer(), normal(2, 40, 16)
    y, final = read(layer, x)
    first, state = read(layer, x[:, :13])
    second, state = read(layer, x[:, 13:], state)
    close(jnp.concatenate([first, second], 1), y, 1e-4)
    close(state, final)


def test_packed_equals_separate():
    layer, x = make_layer(), normal(40, 16)
    cuts = [0, 7, 7, 39]  # lengths 7, 0 and 32; the last row is padding
    starts = normal(3, *layer.initial_state(1).shape[1:], seed=2)
    packed, states = read(layer, x, starts, jnp.asarray(cuts))
    batched, _ = read(layer, x[None], starts, jnp.asarray(cuts))
    np.testing.assert_array_equal(batched[0], packed)
    for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
        alone, state = read(layer, x[None, begin:end], starts[n : n + 1])
        close(states[n], state[0])
        if end > begin:
            close(packed[begin:end], alone[0], 1e-4)


def test_bfloat16_keeps_a_float32_state():
    layer, x = make_layer(dtype=jnp.bfloat16), normal(2, 40, 16)
    y, state = read(layer, x)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    expected, _ = read(make_layer(), x)
    assert jnp.linalg.norm(y - expected) < 0.03 * jnp.linalg.norm(expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "num_heads must be an integer, known while tracing, got 4.0", dict(num_heads=4.0)),
        (ValueError, "num_kv_heads must be at least 1, got 0", dict(num_kv_heads=0)),
        (ValueError, "num_kv_heads must divide num_heads=4, got 3", dict(num_kv_heads=3)),
        (ValueError, "key_width must be at least 1, got 0", dict(key_width=0)),
        (ValueError, "value_width must be at least 1, got 0", dict(num_heads=17, value_width=None)),
        (TypeError, "gate_rank must be an integer, known while tracing, got True", dict(gate_rank=True)),
        (ValueError, "temperature must be above 0, got 0.0", dict(temperature=0.0)),
        (TypeError, "temperature must be a number, got str", dict(temperature="16")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_of_no_sense(error, text, arguments):
    with pytest.raises(error) as caught:
        make_layer(**dict(num_kv_heads=None) | arguments)
    assert str(caught.value) == text


@pytest.mark.fast
def test_rows_of_other_shapes():
    layer = make_layer()
    state = layer.initial_state(2)
    for call, form in (
        (layer, "[B, T, width], or [T, width] with cu_seqlens"),
        (lambda x: layer.step(x, state), "[B, width]"),
        (lambda x: layer.prefill_into(x, state, jnp.array([0]), jnp.array([0, 5])), "[T, width]"),
    ):
        for x in (normal(2, 5, 2, 16), normal(5, 15), normal(16)):
            with pytest.raises(ValueError, match=re.escape(f"x must be {form}, with width=16, got shape {x.shape}")):
                call(x)
        with pytest.raises(TypeError, match="x must be an array, got NoneType"):
            call(None)


@pytest.mark.fast
@pytest.mark.parametrize(
    "kind", [make_layer, lambda: ShortConvolution(16, rngs=nnx.Rngs(0))], ids=["gla", "convolution"]
)
def test_packing_and_slots_of_no_sense(kind):
    layer, x = kind(), normal(2, 5, 16)
    pool, ids, cuts, two = layer.initial_state(3), jnp.zeros((2, 5), jnp.int32), jnp.array([0, 2, 5]), jnp.array([0, 1])
    for error, text, call in (
        (ValueError, "pad_id must be None without segment_ids, got 0", lambda: layer(x, pad_id=0)),
        (TypeError, "segment_ids must hold integers, got float32", lambda: layer(x, segment_ids=ids * 1.0)),
        (TypeError, "cu_seqlens must hold integers, got float32", lambda: layer(x[:1], cu_seqlens=cuts * 1.0)),
        (ValueError, "cu_seqlens must be [N + 1], got shape (1, 3)", lambda: layer(x[:1], cu_seqlens=cuts[None])),
        (
            ValueError,
            "slots must be [N]=[2], one for each sequence, got shape (1,)",
            lambda: layer.prefill_into(x[0], pool, two[:1], cuts),
        ),
        (
            ValueError,
            "fresh must be booleans [N]=[2], got int32 of shape (2,)",
            lambda: layer.prefill_into(x[0], pool, two, cuts, fresh=two),
        ),
        (
            ValueError,
            "slots must be from -1 to 2, the last row of pool, got 3",
            lambda: layer.prefill_into(x[0], pool, two + 2, cuts),
        ),
        (ValueError, "slots must not repeat, got 1 more than once", lambda: layer.step(x[:, 0], pool, two * 0 + 1)),
        (TypeError, "slots must hold integers, got float32", lambda: layer.step(x[:, 0], pool, two * 1.0)),
        (
            ValueError,
            "slots must be [B]=[2], one for each sequence, got shape (3,)",
            lambda: layer.step(x[:, 0], pool, jnp.arange(3)),
        ),
    ):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text


def test_glax_needs_no_flax():
    code = "import glax, sys; print([m for m in ('flax', 'optax', 'rich', 'safetensors') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
