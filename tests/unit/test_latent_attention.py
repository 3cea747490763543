"""Multi-head latent attention and sigmoid routing beside loops in float64, and each way to read tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax import nn
from glax.nn.mlp import sigmoid_router
from tests.close import assert_close

H, K, P, V, R, T = 3, 8, 4, 5, 6, 11
SIZES = dict(num_heads=H, latent_width=R, head_width=K, shared_width=P, value_width=V)


def made(**options) -> nn.MultiHeadLatentAttention:
    layer = nn.MultiHeadLatentAttention(16, **SIZES, **options, rngs=nnx.Rngs(0))
    for i, param in enumerate(jax.tree.leaves(nnx.state(layer, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        param[...] += 0.4 * jax.random.normal(jax.random.key(i), param.shape)
    return layer


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def linear(layer, x):
    y = x @ np.asarray(layer.kernel[...], np.float64)
    return y if layer.bias is None else y + np.asarray(layer.bias[...], np.float64)


def normalized(norm, x, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(norm.scale[...], np.float64)


def turned(x, t, theta, interleaved):
    """Rotate pairs (x[i], x[i + half]), or (x[2 i], x[2 i + 1]), by t theta^(-2 i / width)."""
    half = x.shape[-1] // 2
    angle = t * theta ** (-2.0 * np.arange(half) / (2 * half))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def by_formula(layer, x, theta, eps):
    """One token, one head and one key at a time."""
    x, rows = np.asarray(x, np.float64), []
    keys, shared, values = [], [], []
    for t in range(len(x)):
        row = linear(layer.latent, x[t])
        c = normalized(layer.latent_norm, row[:R], eps)
        expanded = linear(layer.expand, c).reshape(H, K + V)
        keys.append(expanded[:, :K])
        values.append(expanded[:, K:])
        shared.append(row[R:] if theta is None else turned(row[R:], t, theta, layer.interleaved))
        inner = x[t]
        if layer.query_down is not None:
            inner = normalized(layer.query_norm, linear(layer.query_down, inner), eps)
        q, o = linear(layer.query, inner).reshape(H, K + P), []
        for h in range(H):
            second = q[h, K:] if theta is None else turned(q[h, K:], t, theta, layer.interleaved)
            scores = [(q[h, :K] @ keys[s][h] + second @ shared[s]) / np.sqrt(K + P) for s in range(t + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            o.append(sum(w * values[s][h] for s, w in enumerate(weights / weights.sum())))
        gate = np.ones(H) if layer.gate is None else 1 / (1 + np.exp(-linear(layer.gate, x[t])))
        rows.append(linear(layer.output, np.concatenate([g * one for g, one in zip(gate, o, strict=True)])))
    return np.stack(rows)


@pytest.mark.parametrize("options", [
    pytest.param(dict(theta=None), marks=pytest.mark.rest),
    pytest.param(dict(theta=50.0, query_rank=7, bias=True, output_bias=True, norm_eps=1e-2), marks=pytest.mark.fast),
    pytest.param(dict(theta=50.0, interleaved=True, head_gated=True), marks=pytest.mark.rest),
], ids=["plain", "all", "interleaved"])  # fmt: skip
def test_every_way_to_read_is_the_formula(options):
    layer, x = made(**options), inputs(2, T, 16)
    want = np.stack([by_formula(layer, row, options["theta"], options.get("norm_eps", 1e-6)) for row in x])
    read, step = nnx.jit(type(layer).__call__), nnx.jit(type(layer).step)
    y, state = read(layer, x)
    assert_close("one pass", y, want, 2e-6)
    assert state["key"].shape == (2, T, 1, R + P) and set(state) == {"key", "length"}
    pool = layer.initial_state(2, T)
    first, pool = read(layer, x[:, :4], initial_state=pool)
    assert_close("prefill", first, want[:, :4], 2e-6)
    for t in range(4, T):
        row, pool = step(layer, x[:, t], pool)
        assert_close(f"step {t}", row, want[:, t], 2e-6)
    assert_close("cache", pool["key"], state["key"], 2e-6)
    packed, cuts = jnp.concatenate([x[0, :5], x[1, :6]]), jnp.array([0, 5, 11])
    parts = np.concatenate([want[0, :5], want[1, :6]])
    second = read(layer, x[1:, :6])[1]["key"][0]
    # Traced cuts do not say how long the longest sequence is, which a cache of its own is made for.
    for run, start in ((type(layer).__call__, None), (read, layer.initial_state(2, 6))):
        y, state = run(layer, packed, initial_state=start, cu_seqlens=cuts)
        assert_close("packed", y, parts, 2e-6)
        assert_close("cache of the second", state["key"][1], second, 2e-6)
    ids = jnp.array([[1] * 5 + [2] * 6])
    y, state = read(layer, packed[None], segment_ids=ids)
    assert_close("segments", y[0], parts, 2e-6)
    assert_close("cache of the last", state["key"][0, :6], second, 2e-6)


@pytest.mark.fast
@pytest.mark.parametrize("theta", [None, 50.0])
def test_prompts_form_keys_and_values_where_that_costs_less(theta, monkeypatch):
    """(latent_width (K + V)) / (2 latent_width - K - V) = 4.8 tokens, and at most 4 rows of the cache for each."""
    sizes = dict(num_heads=H, latent_width=24, head_width=4, shared_width=2, value_width=4)
    layer, x = nn.MultiHeadLatentAttention(16, **sizes, theta=theta, rngs=nnx.Rngs(0)), inputs(2, T, 16)
    for tokens, cached, absorbs in ((4, 4, True), (5, 5, False), (5, 20, False), (5, 21, True)):
        assert layer.should_absorb(tokens, cached) == absorbs
    ways = ((5, 20), (6, T), (4, 21))  # tokens of the first part, and rows of the cache

    def read_each_way() -> list:
        """Return the outputs of a prompt in two parts behind one another, and of two packed ones, traced anew."""

        def read(first: int, cached: int):
            y, state = layer(x[:, :first], initial_state=layer.initial_state(2, cached))
            rest, state = layer(x[:, first:], initial_state=state)
            packed, cuts = jnp.concatenate([x[0, :5], x[1, :7]]), jnp.array([0, 5, 12])
            beside, of_packed = layer(packed, initial_state=layer.initial_state(2, 20), cu_seqlens=cuts)
            return y, rest, beside, state["key"], of_packed["key"]

        return [jax.jit(read, static_argnums=(0, 1))(*way) for way in ways]

    want, found = jax.jit(lambda x: layer(x)[0])(x), read_each_way()
    monkeypatch.setattr(layer, "should_absorb", lambda *_: True)
    for own, absorbing in zip(found, read_each_way(), strict=True):
        for name, got, absorbed in zip(
            ("first", "rest", "packed", "cache", "cache of packed"), own, absorbing, strict=True
        ):
            assert_close(name, got, absorbed, 2e-6)
        assert_close("in parts", jnp.concatenate(own[:2], 1), want, 2e-6)


@pytest.mark.fast
def test_a_low_rank_term_of_the_expansion_reaches_queries_of_a_cache():
    layer, x = made(theta=None), inputs(1, T, 16)
    low = nnx.LoRALinear(*layer.expand.kernel.shape, lora_rank=2, use_bias=False, rngs=nnx.Rngs(0))
    low.kernel[...], low.lora.lora_b[...] = layer.expand.kernel[...], inputs(*low.lora.lora_b.shape)
    layer.expand = low
    read = nnx.jit(type(layer).__call__)
    assert_close("cached", read(layer, x, initial_state=layer.initial_state(1, T))[0], read(layer, x)[0], 2e-6)


@pytest.mark.fast
def test_without_a_shared_key_layers_compute_what_a_shared_key_of_zeros_gives():
    with_key = made(theta=None, scale=0.3, query_rank=5)
    queries = with_key.query.kernel[...].reshape(5, H, K + P).at[..., K:].set(0)
    with_key.query.kernel[...] = queries.reshape(5, -1)
    sizes = {name: size for name, size in SIZES.items() if name != "shared_width"}
    layer = nn.MultiHeadLatentAttention(16, **sizes, scale=0.3, query_rank=5, rngs=nnx.Rngs(0))
    layer.query.kernel[...] = queries[..., :K].reshape(5, -1)
    layer.latent.kernel[...] = with_key.latent.kernel[..., :R]
    for name in ("query_down", "expand", "output"):
        getattr(layer, name).kernel[...] = getattr(with_key, name).kernel[...]
    for name in ("query_norm", "latent_norm"):
        getattr(layer, name).scale[...] = getattr(with_key, name).scale[...]
    x = inputs(2, T, 16)
    read = nnx.jit(lambda layer, x, state: layer(x, initial_state=state))
    want, got = (read(each, x, None)[0] for each in (with_key, layer))
    assert_close("whole", got, want, 2e-6)
    cached, state = read(layer, x, layer.initial_state(2, T))
    assert_close("cached", cached, want, 2e-6)
    assert state["key"].shape == (2, T, 1, R)


@pytest.mark.fast
def test_a_limit_bounds_what_the_activation_and_the_product_read():
    x, limit = 3 * inputs(20, 6), 0.7
    mlp = nn.SwiGLU(6, 5, limit=limit, rngs=nnx.Rngs(0))
    for layer in (mlp.gate, mlp.up):
        layer.kernel[...] *= 40
    gate, up = (linear(layer, np.asarray(x, np.float64)) for layer in (mlp.gate, mlp.up))
    assert (abs(up) > limit).any() and (gate > limit).any() and (gate < -limit).any()
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    inside = gate / (1 + np.exp(-gate)) * up
    assert_close("mlp", mlp(x), linear(mlp.down, inside), 2e-6)
    experts = nn.Experts(6, 5, 1, limit=limit, rngs=nnx.Rngs(0))
    for name in ("gate", "up", "down"):
        getattr(experts, name)[...] = getattr(mlp, name).kernel[...][None]
    assert_close("experts", experts(x, (jnp.ones((20, 1)), jnp.zeros((20, 1), jnp.int32))), mlp(x), 2e-6)
    with pytest.raises(ValueError, match="limit must be None with form='plain'"):
        nn.Experts(6, 5, 1, form="plain", limit=limit, rngs=nnx.Rngs(0))


@pytest.mark.fast
def test_a_sigmoid_router_chooses_within_the_best_groups():
    x, kernel, correction = inputs(20, 5), inputs(5, 12, seed=1), inputs(12, seed=2)
    options = dict(groups=4, best_groups=2, scaling=1.5)
    weights, experts = sigmoid_router(x, kernel, correction, 3, **options)
    for row, found, chosen in zip(np.asarray(x, np.float64), weights, experts, strict=True):
        scores = 1 / (1 + np.exp(-row @ np.asarray(kernel, np.float64)))
        ranked = scores + np.asarray(correction)
        groups = sorted(range(4), key=lambda g: -sum(sorted(ranked[3 * g : 3 * g + 3])[1:]))[:2]
        want = sorted((e for g in groups for e in range(3 * g, 3 * g + 3)), key=lambda e: -ranked[e])[:3]
        assert set(want) == set(chosen.tolist())
        assert_close("weights", found, 1.5 * scores[chosen] / scores[chosen].sum(), 1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("count", [1, 2])
def test_the_gradient_of_normalized_weights_does_not_cancel(count):
    """With one expert a token the weight is w / (w + floor), of gradient floor / (w + floor)^2."""
    x, kernel, floor = inputs(20, 5), inputs(5, 6, seed=1), 1e-6

    def first(kernel):
        weights, experts = sigmoid_router(x, kernel, None, count, sum_floor=floor)
        return weights[:, 0].sum(), experts

    (_, experts), got = jax.value_and_grad(first, has_aux=True)(kernel)
    want = np.zeros(kernel.shape)
    for row, chosen in zip(np.asarray(x, np.float64), np.asarray(experts), strict=True):
        w = 1 / (1 + np.exp(-row @ np.asarray(kernel, np.float64)[:, chosen]))
        total = w.sum() + floor
        slopes = -w[0] / total**2 * w * (1 - w)
        slopes[0] = (total - w[0]) / total**2 * w[0] * (1 - w[0])
        for expert, slope in zip(chosen, slopes, strict=True):
            want[:, expert] += slope * row
    assert_close("gradient", got, want, 1e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(routing="top"), "routing must be 'softmax' or 'sigmoid', got 'top'"),
        (dict(groups=2), "groups must be 1, or come with routing='sigmoid', got 2"),
        (
            dict(routing="sigmoid", groups=4),
            "groups must be a divisor of count=4 that leaves at least 2 experts in a group, got 4",
        ),
        (dict(corrected=False), "corrected must be True, or come with routing='sigmoid', got False"),
        (dict(sum_floor=0.1), "sum_floor must be 1e-20, or come with routing='sigmoid', got 0.1"),
        (dict(routing="sigmoid", best_groups=2), "best_groups must be at most groups=1, got 2"),
        (dict(routing="sigmoid", groups=2, top_k=3), "top_k must be at most the 2 experts of best_groups, got 3"),
    ],
)
def test_options_of_routing_that_do_not_fit_are_named(options, text):
    arguments = dict(top_k=2) | options
    with pytest.raises(ValueError) as caught:
        nn.SparseMLP(8, 4, 4, arguments.pop("top_k"), **arguments, rngs=nnx.Rngs(0))
    assert text in str(caught.value)
