"""Integers that carry meaning: tokens, targets, ids, slots and boundaries in any dtype, and beyond what their dtype holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax
import glax.parallel
from glax import nn
from glax.models import from_config, generate
from glax.models.tokens import find_tokenizer
from glax.nn import Attention, GatedLinearAttention
from glax.nn.losses import next_token_loss

OPTIONS = dict(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_heads=2, intermediate_size=8)
MODEL = from_config(dict(model_type="gla", **OPTIONS), rngs=nnx.Rngs(0))
TOKENS = np.array([[1, 299, 7, 3], [0, 5, 5, 298]], np.int32)
PACKED = dict(query=jnp.ones((1, 6, 1, 2)), key=jnp.ones((1, 6, 1, 2)), value=jnp.ones((1, 6, 1, 2)))


def test_the_loss_is_that_of_the_softmax_in_every_unsigned_dtype():
    logits = jax.nn.log_softmax(MODEL(jnp.asarray(TOKENS)).astype(jnp.float32))
    want = -np.take_along_axis(np.asarray(logits[:, :-1]), TOKENS[:, 1:, None], -1).mean()
    for dtype in ("uint16", "uint32", "uint64"):
        np.testing.assert_allclose(MODEL.loss(TOKENS.astype(dtype)), want, rtol=1e-5)
    few = TOKENS % 8
    for dtype in ("int4", "uint4", "uint8"):
        small = jnp.asarray(few).astype(dtype)
        np.testing.assert_allclose(MODEL.loss(small, small), MODEL.loss(few, few), rtol=1e-6)


@pytest.mark.rest
def test_a_padding_id_that_the_dtype_cannot_hold_is_no_id():
    ids, same = (
        np.array([[1, 1, 0, 0], [2, 2, 2, 2]], np.uint8),
        dict(segment_ids=np.array([[1, 1, 0, 0], [2, 2, 2, 2]])),
    )
    np.testing.assert_allclose(
        MODEL.loss(TOKENS, segment_ids=ids, pad_id=256), MODEL.loss(TOKENS, **same, pad_id=256), rtol=1e-6
    )
    layer, x = Attention(8, num_heads=2, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 4, 8))
    for kind in (layer, GatedLinearAttention(8, num_heads=2, rngs=nnx.Rngs(0))):
        np.testing.assert_array_equal(kind(x, segment_ids=ids, pad_id=256)[0], kind(x, **same, pad_id=256)[0])


@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_outside_of_the_vocabulary_is_an_error_or_nan(token):
    tokens, one = TOKENS.copy(), jnp.array([token])
    tokens[0, 1] = token
    text = f"tokens must be from 0 to 299, got {token}"
    pools, slots, cuts = MODEL.initial_states(1), jnp.array([0]), jnp.array([0, 1])
    for call in (
        lambda: MODEL(tokens),
        lambda: MODEL(jnp.asarray(tokens)),
        lambda: MODEL.loss(tokens),
        lambda: MODEL.step(one, pools),
        lambda: MODEL.prefill(one, pools, slots, cuts),
        lambda: generate(MODEL, tokens, 1),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == text
    run = nnx.jit(lambda model, tokens: model(tokens))
    logits = np.asarray(run(MODEL, jnp.asarray(tokens) % 301 - (tokens < 0) * 301))
    assert np.isnan(logits[0, 1:]).all(), "a token that is not in the vocabulary reads the row of another"
    assert np.isfinite(logits[0, 0]).all()
    for place in (1, 3):  # the last token is a target alone
        tokens = TOKENS.copy()
        tokens[0, place] = token
        assert np.isnan(nnx.jit(lambda model, tokens: model.loss(tokens))(MODEL, jnp.asarray(tokens)))


def test_targets_have_the_shape_of_the_tokens_and_lie_in_the_vocabulary():
    for shape in ((1, 4), (4, 2), (8,)):
        with pytest.raises(ValueError, match=r"targets must be \[2, 4\] as the tokens are, got shape"):
            MODEL.loss(TOKENS, np.zeros(shape, np.int32))
    with pytest.raises(
        ValueError, match="targets must be from 0 to 299, or below 0 for a token that does not count, got 300"
    ):
        MODEL.loss(TOKENS, TOKENS + 1)
    with pytest.raises(TypeError, match="targets must hold integers, got bool"):
        MODEL.loss(TOKENS, TOKENS > 2)
    x, kernel = jnp.ones((2, 3)), jnp.ones((3, 5))
    loss, gradients = jax.jit(jax.value_and_grad(next_token_loss, (0, 1)))(x, kernel, jnp.array([1, 5]))
    assert np.isnan(loss)
    assert all(np.isnan(d).any() for d in gradients)
    foreign = {"x": np.ones((2, 3), ">f4"), "kernel": np.ones((3, 5), ">f4")}
    for name, array in foreign.items():
        with pytest.raises(TypeError, match=f"{name} must have the byte order of this machine, got >f4"):
            next_token_loss(**dict(x=x, kernel=kernel) | {name: array}, targets=jnp.array([1, 2]))
    far = np.array([-(2**40), 3])  # int32 would hold 0
    np.testing.assert_allclose(next_token_loss(x, kernel, far), next_token_loss(x, kernel, jnp.array([-1, 3])))


def test_a_state_of_another_batch_is_refused():
    with pytest.raises(
        ValueError,
        match=r"state\['key'\] must have B=2 rows without slots, one for each token, got shape \(1, 4, 1, 2\)",
    ):
        layer = Attention(2, num_heads=1, rngs=nnx.Rngs(0))
        layer.step(jnp.ones((2, 2)), layer.initial_state(1, 4))
    with pytest.raises(ValueError, match=r"pools\[0\]\['recurrent'\] must have B=2 rows"):
        MODEL.step(jnp.array([1, 2]), MODEL.initial_states(3))


def test_ids_that_differ_in_their_upper_bits_alone_are_an_error():
    for ids in (np.array([[0, 0, 2**32, 2**32, 1, 1]]), np.array([[0, 0, 1, 1, 2**33, 2**33]], np.uint64)):
        with pytest.raises(
            ValueError, match=r"segment_ids must hold u?int32, as which JAX reads u?int64, got (4294967296|8589934592)"
        ):
            glax.recurrent(**PACKED, segment_ids=ids)
        with pytest.raises(ValueError, match="segment_ids must hold"):
            Attention(2, num_heads=1, rngs=nnx.Rngs(0))(jnp.ones((1, 6, 2)), segment_ids=ids)
    large = np.array([[0, 0, 2**32 - 1, 2**32 - 1, 1, 1]], np.uint64)  # uint32 holds these
    want = glax.recurrent(**PACKED, segment_ids=np.array([[0, 0, 3, 3, 1, 1]]))
    np.testing.assert_array_equal(glax.recurrent(**PACKED, segment_ids=large).output, want.output)


def other_order(x):
    x = np.asarray(x)
    return x.astype(x.dtype.newbyteorder(">"))


def masked(x):
    return np.ma.masked_array(np.asarray(x), mask=True)


@pytest.mark.parametrize(("make", "text"), [(other_order, "byte order of this machine, got >"), (masked, "no mask")])
def test_another_byte_order_and_masks_are_refused_by_the_arguments_name(make, text):
    q, x, layer = (
        np.ones((1, 6, 1, 2), np.float32),
        np.ones((1, 6, 2), np.float32),
        Attention(2, num_heads=1, rngs=nnx.Rngs(0)),
    )
    pool, slots, cuts, tokens = np.ones((2, 1, 2, 2), np.float32), np.array([0]), np.array([0, 6]), np.array([[1, 2]])
    step = [np.ones((1, 1, 2), np.float32)] * 3
    _, draft = glax.recurrent_verify(q, q, q, pool[:1])
    state, pools = layer.initial_state(1, 8), MODEL.initial_states(1)
    glax.recurrent(q, q, q)  # JAX's fast path of a compiled call reads such an array as native
    calls = dict(
        query=lambda: glax.recurrent(make(q), q, q),
        value=lambda: glax.parallel.recurrent(q, q, make(q), mesh=jax.make_mesh((1,), ("data",))),
        g=lambda: glax.simple_gla(q, q, q, make(q[..., 0])),
        beta=lambda: glax.delta_rule(q, q, q, make(q[..., 0])),
        softmax_scale=lambda: glax.recurrent(q, q, q, softmax_scale=make(np.float32(1))),
        cu_seqlens=lambda: glax.recurrent(q, q, q, cu_seqlens=make(cuts)),
        segment_ids=lambda: glax.recurrent(q, q, q, segment_ids=make(np.zeros((1, 6), np.int32))),
        layer_idx=lambda: glax.lightning_attention(q, q, q, make(np.int32(1)), 2),
        state=lambda: glax.recurrent_step(*step, make(pool[:1])),
        slots=lambda: glax.recurrent_step(*step, pool, slots=make(slots)),
        pool=lambda: glax.prefill_into(make(pool), slots, q, q, q),
        write_slots=lambda: glax.prefill_into(pool, slots, q, q, q, write_slots=make(slots)),
        accepted=lambda: glax.commit(pool[:1], draft, make(np.array([1]))),
        rounding_key=lambda: glax.commit(pool[:1], draft, np.array([1]), rounding_key=make(jax.random.PRNGKey(0))),
        x=lambda: layer(make(x)),
        initial_state=lambda: layer(x, jax.tree.map(make, state)),
        tokens=lambda: MODEL(make(tokens)),
        targets=lambda: MODEL.loss(tokens, make(tokens)),
        pools=lambda: MODEL.step(tokens[0, :1], jax.tree.map(make, pools)),
        lengths=lambda: generate(MODEL, tokens, 1, lengths=make(np.array([2]))),
        key=lambda: generate(MODEL, tokens, 1, temperature=1.0, key=make(jax.random.PRNGKey(0))),
        temperature=lambda: generate(MODEL, tokens, 1, temperature=make(np.float32(1)), key=jax.random.key(0)),
        top_k=lambda: generate(MODEL, tokens, 1, temperature=1.0, top_k=make(np.int32(1)), key=jax.random.key(0)),
        pad_id=lambda: glax.recurrent(q, q, q, segment_ids=np.zeros((1, 6), np.int32), pad_id=make(np.int32(1))),
        top_p=lambda: generate(MODEL, tokens, 1, temperature=1.0, top_p=make(np.float32(1)), key=jax.random.key(0)),
    )  # fmt: skip
    modules = (
        nn.RMSNorm(2),
        nn.LayerNorm(2),
        nn.SwiGLU(2, 2, rngs=nnx.Rngs(0)),
        nn.SparseMLP(2, 2, 2, 1, rngs=nnx.Rngs(0)),
    )
    calls |= {f"x of {type(module).__name__}": functools.partial(module, make(x)) for module in modules}
    for name, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(name.split()[0]), name
        assert text in str(caught.value), name


def test_sizes_in_a_dtype_whose_products_overflow_are_refused():
    with pytest.raises(TypeError, match="num_heads must be an int, got uint8, in which products of sizes overflow"):
        Attention(64, num_heads=np.uint8(16), rngs=nnx.Rngs(0))


def flat_model():
    """Return a model whose logits are all equal."""
    model = from_config(dict(model_type="gla", **OPTIONS), rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.zeros_like(model.head.kernel[...])
    return model


@pytest.mark.parametrize(
    ("drawn", "most"),
    [
        (dict(top_k=1), 1),
        (dict(top_k=3), 3),
        (dict(top_p=1e-6), 1),
        (dict(top_p=2.5 / 300), 3),
        (dict(top_k=5, top_p=0.5), 3),
    ],
)
def test_of_equal_logits_the_lowest_tokens_are_the_likeliest(drawn, most):
    tokens = generate(flat_model(), np.tile(TOKENS, (8, 1)), 6, temperature=1.0, key=jax.random.key(1), **drawn)
    assert set(np.unique(tokens)) == set(range(most))


def test_the_keys_of_draws_are_those_of_split_without_an_array_of_them():
    key, count, model = jax.random.key(3), 5, from_config(dict(model_type="gla", **OPTIONS), rngs=nnx.Rngs(0))
    got = generate(model, TOKENS, count, temperature=0.7, key=key)
    logits, states = model.extend_hidden(jnp.asarray(TOKENS), model.initial_states(2))
    logits = model.logits(logits[:, -1])
    for i, each in enumerate(jax.random.split(key, count)):
        token = jax.random.categorical(each, logits.astype(jnp.float32) / 0.7)
        np.testing.assert_array_equal(got[:, i], token)
        logits, states = model.step(token, states)
    for options in (dict(), dict(temperature=1.0, key=jax.random.key(0))):
        text = str(jax.make_jaxpr(lambda tokens, options=options: generate(model, tokens, 54321, **options))(TOKENS))
        arrays = set(re.findall(r"[a-z0-9<>]+\[54321[^\]]*\]", text))
        assert all(x.startswith(("i32", "bool")) for x in arrays), arrays


def test_the_largest_id_of_a_tokenizer_is_in_the_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 40}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has the token 40, beyond the model's vocabulary of 40"):
        find_tokenizer(tmp_path, 40)
    assert find_tokenizer(tmp_path, 41).vocabulary == 41
    words.post_processor = tokenizers.processors.TemplateProcessing("[S] $A", special_tokens=[("[S]", 77)])
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has the token 77, beyond the model's vocabulary of 50"):
        find_tokenizer(tmp_path, 50)


@pytest.mark.parametrize("eos", [300, -1, [2, 2**40], np.int64(2**33), 2.5, "a", True])
def test_an_end_token_outside_of_the_vocabulary_is_refused(eos):
    with pytest.raises((ValueError, TypeError), match="eos must be"):
        generate(MODEL, TOKENS, 2, eos=eos)


def test_rows_of_another_width_and_arrays_of_another_shape_are_refused():
    norm, gated, mlp = nn.RMSNorm(4), nn.RMSNormGated(4), nn.SwiGLU(4, 8, rngs=nnx.Rngs(0))
    experts, x, chosen = nn.Experts(4, 8, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 4)), jnp.zeros((3, 1), jnp.int32)
    for module in (norm, gated, nn.LayerNorm(4), mlp, nn.SparseMLP(4, 8, 2, 1, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=r"x must be \[\.\.\., 4\], got shape \(3, 1\)"):
            module(x[:, :1])
    with pytest.raises(ValueError, match=r"gate must have the shape of x, \(3, 4\), got \(1, 4\)"):
        gated(x, x[:1])
    with pytest.raises(ValueError, match=r"weights must be \[M, k\] with M=3 as x has rows, got shape \(1, 3\)"):
        experts(x, (jnp.ones((1, 3)), chosen))
    with pytest.raises(ValueError, match=r"experts must be \[M, k\] with M=3 as x has rows, got shape \(2, 1\)"):
        experts(x, (jnp.ones((3, 1)), chosen[:2]))
    with pytest.raises(ValueError, match="groups must divide width=4, got 3"):
        nn.RMSNorm(4, groups=3)
