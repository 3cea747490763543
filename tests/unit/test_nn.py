"""The layer, the language model, its checkpoint, and the order-2 model it is compared with."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax.nn import ByteLM, ByteLMConfig, GatedLinearAttention, ShortConvolution, checkpoint, order2
from glax.nn.generate import generate, token_by_token
from glax.nn.text import TextError, read_text, split
from glax.nn.train import Recipe, held_out_bits, jitted_bits, train

TINY = ByteLMConfig(
    width=16, layers=2, num_heads=2, num_kv_heads=1, key_width=4, value_width=8, gate_rank=2, mlp_width=24
)


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


def test_gradient_reaches_every_parameter():
    model, tokens = ByteLM(TINY, rngs=nnx.Rngs(0)), np.arange(2 * 21, dtype=np.uint8).reshape(2, 21)
    gradients = nnx.jit(nnx.grad(lambda model: jitted_bits(model, tokens).mean()))(model)
    for name, gradient in nnx.to_flat_state(gradients):
        assert np.isfinite(gradient[...]).all(), name
        assert np.abs(gradient[...]).max() > 0, name


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
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        dataclasses.replace(TINY, layers=0)


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


# ---- the language model ----------------------------------------------------------------------------------------------


def test_model_steps_and_extends_as_it_reads_at_once():
    model, tokens = ByteLM(TINY, rngs=nnx.Rngs(0)), jnp.arange(2 * 30).reshape(2, 30) * 7 % 256
    logits = model(tokens)
    close(token_by_token(model, tokens), logits, 1e-4)
    first, states = model.extend(tokens[:, :11], model.initial_states(2))
    second, _ = model.extend(tokens[:, 11:], states)
    close(jnp.concatenate([first, second], 1), logits, 1e-4)


def test_model_sees_no_future():
    model, tokens = ByteLM(TINY, rngs=nnx.Rngs(0)), jnp.arange(30)[None]
    changed = model(tokens.at[0, 20].set(99))
    np.testing.assert_array_equal(changed[:, :20], model(tokens)[:, :20])
    assert (changed[:, 20:] != model(tokens)[:, 20:]).any()


def test_training_learns_and_repeats_for_a_seed():
    text = np.frombuffer(b"the quick brown fox " * 40, np.uint8)
    losses, models = [], []
    for _ in range(2):
        seen = []

        def each_step(step, loss, model, seen=seen):
            seen.append(loss)
            return step == 25

        recipe = Recipe(steps=60, batch=4, length=12, learning_rate=0.02)
        models.append(train(ByteLM(dataclasses.replace(TINY, layers=1), rngs=nnx.Rngs(0)), text, recipe, 3, each_step))
        losses.append(seen)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 25
    assert losses[0][0] > 7 and losses[0][-1] < 4
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(model, nnx.Param) for model in models))
    windows = text[: 5 * 13].reshape(5, 13)
    assert held_out_bits(models[0], windows) == pytest.approx(float(jitted_bits(models[0], windows).mean()), rel=1e-5)


def test_generation_draws_from_the_softmax_or_takes_the_likeliest_byte():
    """Every byte is the one that jax.random.categorical draws; in the cold the likeliest; one program for all temperatures."""
    model, prompt, key = ByteLM(TINY, rngs=nnx.Rngs(0)), jnp.arange(6)[None], jax.random.key(0)

    def draw(temperature):
        tokens = generate(model, prompt, key, 8, temperature)
        return tokens[0], model(jnp.concatenate([prompt, tokens], 1))[0, 5:-1]

    tokens, logits = draw(0.5)
    drawn = jax.vmap(jax.random.categorical)(jax.random.split(key, 8), logits[:, None] / 0.5)
    np.testing.assert_array_equal(drawn[:, 0], tokens)
    for temperature in (0, 0.0, 1e-6, 1e-40, jnp.float32(0)):
        tokens, logits = draw(temperature)
        np.testing.assert_array_equal(logits.argmax(-1), tokens)
        assert len(set(np.asarray(tokens))) > 1  # NaN, of a division by 0, would give byte 0


KEYS = jax.random.split(jax.random.key(0))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "prompt must be [B, P], got shape (6,)", dict(prompt=jnp.arange(6))),
        (ValueError, "prompt must be [B, P], got shape (1, 2, 3)", dict(prompt=jnp.zeros((1, 2, 3), jnp.int32))),
        (ValueError, "prompt must be [B, P] with P of at least 1, got shape (1, 0)", dict(prompt=jnp.zeros((1, 0), int))),
        (ValueError, "prompt must hold bytes, from 0 to 255, got 256", dict(prompt=jnp.array([[1, 256]]))),
        (ValueError, "prompt must hold bytes, from 0 to 255, got -1", dict(prompt=np.array([[1, -1]]))),
        (TypeError, "prompt must hold integers, got float32", dict(prompt=jnp.ones((1, 3), jnp.float32))),
        (TypeError, "prompt must be an array, got list", dict(prompt=[[1, 2]])),
        (TypeError, "prompt must be an array, got NoneType", dict(prompt=None)),
        (TypeError, "key must be one key of jax.random, such as jax.random.key(0), got 0", dict(key=0)),
        (TypeError, "key must be one key of jax.random, such as jax.random.key(0), got key<fry> of shape (2,)", dict(key=KEYS)),
        (TypeError, "length must be an integer, known while tracing, got 3.0", dict(length=3.0)),
        (TypeError, "length must be an integer, known while tracing, got True", dict(length=True)),
        (ValueError, "length must be at least 0, got -1", dict(length=-1)),
        (ValueError, "temperature must be at least 0, got -0.5", dict(temperature=-0.5)),
        (ValueError, "temperature must be finite in float32, the dtype of sums, got nan", dict(temperature=jnp.float32(jnp.nan))),
        (TypeError, "temperature must be a number, got NoneType", dict(temperature=None)),
        (TypeError, "temperature must be a number, got str", dict(temperature="cold")),
        (TypeError, "temperature must be a number, got bool", dict(temperature=False)),
        (TypeError, "temperature must be a real number, got complex64", dict(temperature=jnp.complex64(1))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_bad_calls_of_generate(error, text, arguments):
    good = dict(prompt=jnp.arange(3)[None], key=jax.random.key(0), length=2, temperature=0.8)
    with pytest.raises(error) as caught:
        generate(ByteLM(TINY, rngs=nnx.Rngs(0)), **good | arguments)
    assert str(caught.value) == text


@pytest.mark.fast
def test_tokens_of_other_ranks():
    model, row = ByteLM(TINY, rngs=nnx.Rngs(0)), jnp.arange(6)
    states = model.initial_states(1)
    calls = [
        ("[B, T]", lambda: model(row)),
        ("[B, T]", lambda: model.extend(row, states)),
        ("[B, T]", lambda: token_by_token(model, row)),
        ("[T]", lambda: model.prefill_into(row[None], states, jnp.array([0]), jnp.array([0, 6]))),
        ("[B]", lambda: model.step(row[None], states)),
    ]
    for form, call in calls:
        with pytest.raises(ValueError, match=re.escape(f"tokens must be {form}, got shape")):
            call()


# ---- the checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_checkpoint_is_the_model_to_the_bit(tmp_path):
    model = ByteLM(TINY, rngs=nnx.Rngs(5))
    checkpoint.save(model, tmp_path / "model.safetensors")
    loaded = checkpoint.load(tmp_path / "model.safetensors")
    assert loaded.config == TINY
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded, nnx.Param), nnx.state(model, nnx.Param))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    checkpoint.save(ByteLM(TINY, rngs=nnx.Rngs(5)), path)
    before = path.read_bytes()

    def half(tensors, file, metadata):
        file.write_bytes(before[: len(before) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(ByteLM(TINY, rngs=nnx.Rngs(6)), path)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_load_refuses_other_files(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no ByteLM"):
        checkpoint.load(tmp_path / "other.safetensors")
    for config in ("[", "{}]", '{"depth": 3}', '{"layers": true}', "3"):
        save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors", metadata={"config": config})
        with pytest.raises(ValueError, match="holds no ByteLM: its config is "):
            checkpoint.load(tmp_path / "other.safetensors")


@pytest.mark.fast
@pytest.mark.parametrize("change", ["a scalar", "a row", "another dtype"])
def test_load_neither_broadcasts_nor_casts(tmp_path, change):
    from safetensors.numpy import load_file, save_file

    path, name = tmp_path / "model.safetensors", "norm.scale"
    checkpoint.save(ByteLM(TINY, rngs=nnx.Rngs(5)), path)
    tensors = load_file(path)
    changed = {"a scalar": np.float32(2), "a row": np.ones((1, 16), np.float32), "another dtype": np.ones(16)}[change]
    config = json.dumps(dataclasses.asdict(TINY))
    save_file(tensors | {name: np.asarray(changed)}, path, metadata={"config": config})
    wanted = f"{name} must be float32 of shape (16,), got {changed.dtype} of shape {changed.shape}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        checkpoint.load(path)


# ---- the order-2 model -----------------------------------------------------------------------------------------------


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def probability(model: order2.Order2, three: bytes) -> float:
    return float(model.probability(*(as_bytes(three)[i : i + 1] for i in range(3)))[0])


@pytest.mark.fast
def test_order2_counts_as_by_hand():
    model = order2.Order2.count(as_bytes(b"abcabdab"))  # a 3, b 3, c 1, d 1
    by_length = [dataclasses.replace(model, weights=np.tile(row, (order2.BUCKETS, 1))) for row in np.eye(4)]
    assert [probability(m, b"abc") for m in by_length] == [1 / 256, 1 / 8, 1 / 2, 1 / 2]
    assert [probability(m, b"cab") for m in by_length] == [1 / 256, 3 / 8, 3 / 3, 1 / 1]
    # "cb" was never seen: what follows is predicted from "b" alone; nor was "zz", nor "z"
    assert [probability(m, b"cbd") for m in by_length] == [1 / 256, 1 / 8, 1 / 2, 1 / 2]
    assert [probability(m, b"zza") for m in by_length] == [1 / 256, 3 / 8, 3 / 8, 3 / 8]
    assert by_length[2].bits_per_byte(as_bytes(b"abcab")) == pytest.approx((1 + 0 + 0) / 3)


def test_order2_sums_to_one_and_leaves_nothing_impossible():
    model = order2.fit(as_bytes(b"abcabdabracadabra " * 30))
    every = np.arange(256, dtype=np.uint8)
    for a, b in (b"ab", b"ra", b"zz", b"bz", b"za"):
        p = model.probability(np.full(256, a, np.uint8), np.full(256, b, np.uint8), every)
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert p.min() > 0


def test_order2_weights_help():
    """Fitted weights predict unseen text better than equal ones."""
    text = as_bytes(Path(order2.__file__).read_bytes())
    fitted, held_out = order2.fit(text[:-500]), text[-500:]
    equal = dataclasses.replace(fitted, weights=np.full((order2.BUCKETS, 4), 0.25))
    assert fitted.bits_per_byte(held_out) < equal.bits_per_byte(held_out)
    assert fitted.bits_per_byte(held_out) < 6


# ---- the text --------------------------------------------------------------------------------------------------------


def test_split_holds_out_whole_windows_from_the_end():
    raw = bytes(i % 251 for i in range(1000))
    text = split(raw, length=7, name="x")
    assert text.held_out.shape == (6, 8)  # of 50 bytes
    assert text.train.tobytes() + text.held_out.tobytes() == raw
    with pytest.raises(TextError, match="too short: 1000 bytes, windows of 50 need 1020"):
        split(raw, length=50, name="x")
    assert split(bytes(1020), length=50, name="x").held_out.shape == (1, 51)


def test_library_text_is_the_same_each_time():
    first, second = (read_text(None, 64) for _ in range(2))
    np.testing.assert_array_equal(first.train, second.train)
    assert b"def __init__(self" in first.train.tobytes()


def test_glax_needs_no_flax():
    code = "import glax, sys; print([m for m in ('flax', 'optax', 'rich', 'safetensors') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
