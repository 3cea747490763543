"""The layers of glax.nn that no published checkpoint in tests/models uses, dtypes, and layers on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax.models
from glax import nn, parallel
from glax.nn.parts import products
from tests.close import assert_close

WIDTH, T = 16, 19


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def randomised(layer):
    """Every parameter random, those too that begin as zeros or ones."""
    for i, (_, param) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        param[...] = param[...] + 0.3 * normal(*param.shape, seed=10 + i)
    return layer


def numpy_of(layer) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {".".join(map(str, path)): np.asarray(param[...], np.float64) for path, param in flat}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def simple_gla_by_formula(p, x):
    """Two heads, one of keys and values; convolutions of 3 rows."""

    def projected(name, heads):
        y = x @ p[f"{name}.kernel"]
        padded = np.concatenate([np.zeros((2, y.shape[1])), y])
        y = silu(sum(padded[i : i + len(y)] * p[f"{name}_conv.filter"][i] for i in range(3)))
        return y.reshape(len(x), heads, -1)

    q, k, v = projected("query", 2), projected("key", 1).repeat(2, 1), projected("value", 1).repeat(2, 1)
    decay = sigmoid(x @ p["gate.kernel"] + p["gate.bias"]) ** (1 / 16)
    S, rows = np.zeros((2, 8, 8)), []
    for t in range(len(x)):
        S = decay[t][:, None, None] * S + k[t][:, :, None] * v[t][:, None, :]
        rows.append(np.einsum("hk,hkv->hv", q[t], S) / np.sqrt(8))
    o = np.stack(rows)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * p["norm.scale"]
    return (o.reshape(len(x), -1) * silu(x @ p["output_gate.kernel"])) @ p["output.kernel"]


def lightning_by_formula(p, x):
    """Slopes 0.5 and 0.125."""
    q, k, v = (silu(x @ p[f"{name}.kernel"]).reshape(len(x), 2, 8) for name in ("query", "key", "value"))
    S, rows = np.zeros((2, 8, 8)), []
    for t in range(len(x)):
        S = np.exp([-0.5, -0.125])[:, None, None] * S + k[t][:, :, None] * v[t][:, None, :]
        rows.append(np.einsum("hk,hkv->hv", q[t], S).ravel())
    o = np.stack(rows)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * p["norm.scale"]
    return (o * sigmoid(x @ p["output_gate.kernel"])) @ p["output.kernel"]


def mamba1_by_formula(p, x):
    """12 channels with states of 3, and a convolution of 2 rows. The scale of each norm tells its part."""

    def normed(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * p[f"{name}_norm.scale"]

    u, z = np.split(x @ p["input.kernel"] + p["input.bias"], 2, -1)
    before = np.concatenate([np.zeros((1, 12)), u[:-1]])
    u = np.tanh(before * p["conv.filter"][0] + u * p["conv.filter"][1] + p["conv.bias"])
    dt, B, C = np.split(u @ p["parts.kernel"], [2, 5], -1)
    dt = np.logaddexp(0, normed(dt, "dt") @ p["dt.kernel"] + p["dt_bias"])
    B, C, A = normed(B, "B"), normed(C, "C"), -np.exp(p["A_log"])
    h, rows = np.zeros((12, 3)), []
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * A) * h + np.outer(dt[t] * u[t], B[t])
        rows.append((h @ C[t] + p["D"] * u[t]) * silu(z[t]))
    return np.stack(rows) @ p["output.kernel"] + p["output.bias"]


def mlstm_by_formula(p, x):
    """Two heads of 3 keys and 5 values, without a stabiliser; gates within 4."""

    def projected(name, *shape):
        return (x @ p[f"{name}.kernel"] + p[f"{name}.bias"]).reshape(len(x), *shape)

    q, k, v = projected("query", 2, 3) / np.sqrt(3), projected("key", 2, 3), projected("value", 2, 5)
    i = np.exp(4 * np.tanh(projected("input_gate", 2) / 4))
    f = sigmoid(4 * np.tanh(projected("forget_gate", 2) / 4))
    C, n, m, rows = np.zeros((2, 3, 5)), np.zeros((2, 3)), np.zeros(2), []
    for t in range(len(x)):
        C = f[t][:, None, None] * C + i[t][:, None, None] * k[t][:, :, None] * v[t][:, None, :]
        n, m = f[t][:, None] * n + i[t][:, None] * k[t], np.maximum(np.log(f[t]) + m, np.log(i[t]))
        below = np.maximum(abs((n * q[t]).sum(1)), 1) + 0.1 * np.exp(m)
        rows.append(np.einsum("hk,hkv->hv", q[t], C) / below[:, None])
    h = np.stack(rows)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-3)
    h = h.reshape(len(x), -1) * p["norm.scale"] + p["norm.bias"]
    return (sigmoid(projected("output_gate", 10)) * h) @ p["output.kernel"] + p["output.bias"]


def slots_by_formula(p, x):
    """Four heads of 2 keys and 3 values, which read 2 heads of 5 slots; temperature 3."""

    def projected(name, heads):
        return (x @ p[f"{name}.kernel"]).reshape(len(x), heads, -1)

    q, k = (np.maximum(projected(name, heads) @ p["feature.kernel"], 0) for name, heads in (("query", 4), ("key", 2)))
    v, f = silu(projected("value", 2)), sigmoid(projected("slot_gate", 2)) ** (1 / 3)
    k, v, f = (y.repeat(2, 1) for y in (k, v, f))
    keys, values, rows = np.zeros((4, 2, 5)), np.zeros((4, 5, 3)), []
    for t in range(len(x)):
        keys = keys * f[t][:, None, :] + k[t][:, :, None] * (1 - f[t])[:, None, :]
        values = values * f[t][:, :, None] + (1 - f[t])[:, :, None] * v[t][:, None, :]
        score = np.exp(np.einsum("hk,hkm->hm", q[t], keys))
        rows.append(np.einsum("hm,hmv->hv", score / score.sum(-1, keepdims=True), values).ravel())
    o = silu(np.stack(rows))
    return (o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-3) * p["norm.scale"]) @ p["output.kernel"]


def hgrn_by_formula(p, x):
    """12 channels, and convolutions of 2 rows."""

    def projected(name):
        y = x @ p[f"{name}.kernel"]
        before = np.concatenate([np.zeros((1, 12)), y[:-1]])
        return before * p[f"{name}_conv.filter"][0] + y * p[f"{name}_conv.filter"][1] + p[f"{name}_conv.bias"]

    f, i, h, rows = sigmoid(projected("forget")), silu(projected("input")), np.zeros(12), []
    for t in range(len(x)):
        h = f[t] * h + (1 - f[t]) * i[t]
        rows.append(h)
    h = np.stack(rows)
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-3) * p["norm.scale"]
    return (h * silu(x @ p["output_gate.kernel"])) @ p["output.kernel"]


def rg_lru_by_formula(p, x):
    """12 channels in 3 heads, and a convolution of 2 rows."""
    u = x @ p["input.kernel"] + p["input.bias"]
    before = np.concatenate([np.zeros((1, 12)), u[:-1]])
    u = before * p["conv.filter"][0] + u * p["conv.filter"][1] + p["conv.bias"]

    def gate(name):
        heads = np.einsum("thi,hij->thj", u.reshape(-1, 3, 4), p[f"{name}.weight"]) + p[f"{name}.bias"]
        return sigmoid(heads.reshape(-1, 12))

    entering, h, rows = gate("input_gate"), np.zeros(12), []
    a = np.exp(-8 * np.log1p(np.exp(p["rate"])) * gate("decay_gate"))
    for t in range(len(x)):
        h = a[t] * h + (np.sqrt(1 - a[t] ** 2) if t else 1) * entering[t] * u[t]
        rows.append(h)
    y = np.stack(rows) * np.maximum(x @ p["gate.kernel"] + p["gate.bias"], 0)
    return y @ p["output.kernel"] + p["output.bias"]


def rwkv4_by_formula(p, x):
    """12 channels, whose sums of weights are formed as the paper has them."""
    before = np.concatenate([np.zeros((1, WIDTH)), x[:-1]])

    def projected(name):
        mu = p[f"mix_{name}"]
        return (mu * x + (1 - mu) * before) @ p[f"{name}.kernel"]

    r, k, v = (projected(name) for name in ("receptance", "key", "value"))
    w, numerator, total, rows = np.exp(p["decay"]), np.zeros(12), np.zeros(12), []
    for t in range(len(x)):
        own = np.exp(p["bonus"] + k[t])
        rows.append((numerator + own * v[t]) / (total + own))
        numerator, total = (np.exp(-w) * y + np.exp(k[t]) * z for y, z in ((numerator, v[t]), (total, 1)))
    return (sigmoid(r) * np.stack(rows)) @ p["output.kernel"]


LAYERS = {
    "rwkv4": (lambda: nn.RWKV4Attention(WIDTH, inside=12, rngs=nnx.Rngs(0)), rwkv4_by_formula),
    "rg_lru": (
        lambda: nn.RGLRU(WIDTH, num_heads=3, inside=12, conv_size=2, act="relu", rngs=nnx.Rngs(0)),
        rg_lru_by_formula,
    ),
    "slots": (
        lambda: nn.GatedSlotAttention(
            WIDTH,
            num_heads=4,
            num_kv_heads=2,
            key_width=2,
            value_width=3,
            num_slots=5,
            temperature=3.0,
            feature_map="relu",
            learned_feature_map=True,
            norm_eps=1e-3,
            rngs=nnx.Rngs(0),
        ),
        slots_by_formula,
    ),
    "hgrn": (
        lambda: nn.HGRNAttention(
            WIDTH, inside=12, use_short_conv=True, conv_size=2, conv_bias=True, norm_eps=1e-3, rngs=nnx.Rngs(0)
        ),
        hgrn_by_formula,
    ),
    "mamba1": (
        lambda: nn.Mamba1(
            WIDTH,
            inside=12,
            state_width=3,
            rank=2,
            conv_size=2,
            bias=True,
            act="tanh",
            part_norm="scaled",
            norm_eps=1e-2,
            rngs=nnx.Rngs(0),
        ),
        mamba1_by_formula,
    ),
    "mlstm": (
        lambda: nn.MLSTM(
            WIDTH,
            num_heads=2,
            key_width=3,
            value_width=5,
            gate_cap=4.0,
            bias=True,
            norm_eps=1e-3,
            eps=0.1,
            rngs=nnx.Rngs(0),
        ),
        mlstm_by_formula,
    ),
    "simple_gla": (
        lambda: nn.SimpleGatedLinearAttention(WIDTH, num_heads=2, num_kv_heads=1, conv_size=3, rngs=nnx.Rngs(0)),
        simple_gla_by_formula,
    ),
    "lightning": (
        lambda: nn.LightningAttention(WIDTH, num_heads=2, slopes=[0.5, 0.125], rngs=nnx.Rngs(0)),
        lightning_by_formula,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_way_to_read_is_the_formula(name):
    make, formula = LAYERS[name]
    layer, x = randomised(make()), normal(2, T, WIDTH)
    want = np.stack([formula(numpy_of(layer), np.asarray(row, np.float64)) for row in x])
    read, prefill_into, step = (nnx.jit(f) for f in (type(layer).__call__, type(layer).prefill_into, type(layer).step))
    y, final = read(layer, x)
    assert_close("one pass", y, want, 1e-5)
    pool = jax.tree.map(lambda s: jnp.full_like(s, 3), layer.initial_state(3))
    packed, cuts = jnp.concatenate([x[0, :7], x[1, :4], x[0, :2]]), jnp.array([0, 7, 11])
    y, pool = prefill_into(layer, packed, pool, jnp.array([2, 0]), cuts, jnp.array([True, True]))
    assert_close("prefill", y[:11], np.concatenate([want[0, :7], want[1, :4]]), 1e-5)
    for t in range(7, T):
        tokens = jnp.stack([x[0, t], x[0, 0]])
        y, pool = step(layer, tokens, pool, jnp.array([2, -1]))
        assert_close(f"step {t}", y[0], want[0, t], 1e-5)
    for got, state in zip(jax.tree.leaves(pool), jax.tree.leaves(final), strict=True):
        assert_close("state", got[2], state[0], 1e-5)
        assert (np.asarray(got[1]) == 3).all()
    rows = jnp.concatenate([x[0, :7], x[1, :12]])[None]
    y, _ = read(layer, rows, segment_ids=jnp.array([[5] * 7 + [2] * 12]))
    assert_close("segments", y[0], np.concatenate([want[0, :7], want[1, :12]]), 1e-5)


@pytest.mark.parametrize("slopes", ["fla", "minimax"])
def test_slopes_by_name_are_those_of_lightning_attention(slopes):
    layer = nn.LightningAttention(WIDTH, num_heads=2, slopes=slopes, layer_idx=2, num_layers=5, rngs=nnx.Rngs(0))
    q = normal(1, 9, 2, 4)
    want = glax.lightning_attention(q, q, q, 2, 5, slopes=slopes).output
    got = glax.recurrent(q, q, q, g_gamma=-jnp.asarray(layer.slopes, jnp.float32)).output
    assert_close("output", got, want, 1e-6)
    with pytest.raises(ValueError, match=r"slopes must be 'fla', 'minimax' or \[H\]=\[2\], got shape \(3,\)"):
        nn.LightningAttention(WIDTH, num_heads=2, slopes=[1, 2, 3], rngs=nnx.Rngs(0))


def test_dtypes_of_activations_parameters_and_states():
    options = dict(dtype=jnp.bfloat16, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    layers = [
        nn.Mamba1(WIDTH, state_width=4, **options),
        nn.Mamba2(WIDTH, num_heads=4, head_width=4, state_width=4, **options),
        nn.RWKV6Attention(WIDTH, num_heads=2, **options),
        nn.RWKV7Attention(WIDTH, num_heads=2, **options),
        nn.HGRN2Attention(WIDTH, num_heads=2, use_short_conv=True, **options),
        nn.DeltaNet(WIDTH, num_heads=2, **options),
        nn.GatedDeltaNet(WIDTH, num_heads=4, num_qk_heads=2, **options),
        nn.GatedDeltaProduct(WIDTH, num_heads=4, num_qk_heads=2, num_updates=3, **options),
        nn.Comba(WIDTH, num_heads=4, num_qk_heads=2, **options),
        nn.KimiDeltaAttention(WIDTH, num_heads=2, lower_bound=-5.0, **options),
    ]
    for layer in layers:
        assert {x.dtype for x in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {jnp.dtype(jnp.float16)}
        y, state = jax.eval_shape(layer, jnp.zeros((2, T, WIDTH), jnp.bfloat16))
        assert y.dtype == jnp.bfloat16 and state["recurrent"].dtype == jnp.float32
        assert {x.dtype for name, x in state.items() if name != "recurrent"} == {jnp.dtype(jnp.bfloat16)}
        empty = layer.initial_state(2)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)


def test_layers_on_a_mesh_read_across_shards_of_the_sequence():
    """A convolution needs rows of the shard before, and the recurrence its state."""
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    recurrence = functools.partial(parallel.recurrent, mesh=mesh, batch_axis="data", sequence_axis="sequence")
    plain = randomised(nn.SimpleGatedLinearAttention(WIDTH, num_heads=2, rngs=nnx.Rngs(0)))
    spread = nn.SimpleGatedLinearAttention(WIDTH, num_heads=2, recurrence=recurrence, rngs=nnx.Rngs(0))
    nnx.update(spread, nnx.state(plain, nnx.Param))
    x = normal(2, 32, WIDTH)
    want, _ = plain(x)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "sequence")))
    run = jax.jit(lambda x: spread(x)[0], out_shardings=placed.sharding)
    assert_close("output", run(placed), want, 1e-5)
    conv = plain.query_conv
    program = jax.jit(lambda x: conv(x)[0], out_shardings=placed.sharding).lower(placed).compile().as_text()
    assert "collective-permute" in program and "all-gather" not in program


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (nn.GatedDeltaNet, dict(num_heads=4, num_qk_heads=2, allow_neg_eigval=True)),  # a dense transition
        (nn.MLSTM, dict(num_heads=2)),
        (nn.GatedSlotAttention, dict(num_heads=2, num_slots=4)),
        (nn.HGRNAttention, dict(inside=24, use_short_conv=True)),
        (nn.RGLRU, dict(num_heads=2, inside=24)),
        (nn.RWKV4Attention, dict(inside=24)),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_a_layer_on_a_mesh_is_the_layer_on_one_device(make, sizes):
    """Shards of the sequence exchange what the states before them do to those behind."""
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    recurrence = functools.partial(parallel.recurrent, mesh=mesh, batch_axis="data", sequence_axis="sequence")
    plain = randomised(make(WIDTH, **sizes, rngs=nnx.Rngs(0)))
    spread = make(WIDTH, **sizes, recurrence=recurrence, rngs=nnx.Rngs(0))
    nnx.update(spread, nnx.state(plain, nnx.Param))
    x = normal(2, 32, WIDTH)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "sequence")))
    run = jax.jit(lambda x: spread(x)[0], out_shardings=placed.sharding)
    assert_close("output", run(placed), nnx.jit(make.__call__)(plain, x)[0], 1e-5)


def test_layers_of_the_delta_rule_begin_as_in_their_own_code_and_check_their_options():
    layer = nn.GatedDeltaNet(WIDTH, num_heads=64, rngs=nnx.Rngs(0), key_width=2, value_width=2)
    rate, step = np.exp(layer.A_log[...]), np.logaddexp(0, layer.dt_bias[...])
    assert 0 < rate.min() < 1 and 15 < rate.max() < 16 and 1e-3 < step.min() < 2e-3 and 0.05 < step.max() < 0.1
    layer = nn.KimiDeltaAttention(WIDTH, num_heads=64, rngs=nnx.Rngs(0), key_width=2, value_width=2)
    assert 1 < np.exp(layer.A_log[...]).min() < 2 and layer.dt_bias.shape == (128,)
    x = normal(1, 3, WIDTH)
    bounded = nn.KimiDeltaAttention(WIDTH, num_heads=2, lower_bound=-5.0, A_range=(1.0, 1.0), rngs=nnx.Rngs(0))
    bounded.dt_bias[...] = jnp.linspace(-90.0, 90.0, 16)
    g = np.asarray(bounded.log_gate(x)).ravel()
    assert -5 <= g.min() < -4.99 and -1e-6 < g.max() <= 0
    for options, message in (
        (dict(num_qk_heads=3), "num_qk_heads must divide num_heads=4, got 3"),
        (dict(lower_bound=1.0), "lower_bound must be a number below 0 .* got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            nn.KimiDeltaAttention(WIDTH, num_heads=4, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match="qk_norm must be one of 'l2', 'sum', got 'max'"):
        nn.DeltaNet(WIDTH, num_heads=4, qk_norm="max", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"qk_activation must be one of 'silu', .* got 'tanh'"):
        nn.DeltaNet(WIDTH, num_heads=4, qk_activation="tanh", rngs=nnx.Rngs(0))


def test_parameters_lie_where_their_logical_axes_say():
    config = dict(
        model_type="gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=24
    )
    model = glax.models.from_config(config, rngs=nnx.Rngs(0))
    spec = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    assert spec["blocks"][0]["mlp"]["down"]["kernel"].get_value() == P("mlp", "embed")
    tokens, before = jnp.arange(12)[None], None
    before = model(tokens)
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
    glax.models.shard(model, mesh)
    kernel = model.blocks[0].attn.query.kernel[...]
    assert kernel.sharding.spec == P("fsdp", "model") and kernel.addressable_shards[0].data.shape == (8, 4)
    assert_close("logits", nnx.jit(glax.models.CausalLM.__call__)(model, tokens), before, 1e-5)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_are_those_of_the_layers_alone(rows, bias):
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(8, 5, use_bias=bias, bias_init=nnx.initializers.normal(1), rngs=rngs) for _ in range(2)]
    x = jax.random.normal(jax.random.key(1), (2, rows, 8))
    for got, layer in zip(products(x, *layers), layers, strict=True):
        np.testing.assert_allclose(got, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_short_conv", [True, False])
def test_packed_rows_without_a_token_or_a_sequence(use_short_conv):
    layer = nn.GatedDeltaNet(WIDTH, num_heads=2, use_short_conv=use_short_conv, rngs=nnx.Rngs(0))
    zero = jnp.zeros(1, jnp.int32)
    starts = jax.tree.map(lambda x: x + 1, layer.initial_state(1))
    for options in (dict(cu_seqlens=jnp.zeros(2, jnp.int32)), dict(segment_ids=jnp.zeros((1, 0), jnp.int32))):
        out, states = layer(jnp.ones((1, 0, WIDTH)), initial_state=starts, **options)
        assert out.shape == (1, 0, WIDTH)
        jax.tree.map(np.testing.assert_array_equal, states, starts)
    out, states = layer.prefill_into(jnp.ones((0, WIDTH)), starts, zero, jnp.zeros(2, jnp.int32))
    assert out.shape == (0, WIDTH)
    jax.tree.map(np.testing.assert_array_equal, states, starts)
    out, states = layer(jnp.ones((1, 3, WIDTH)), cu_seqlens=zero)
    assert out.shape == (1, 3, WIDTH)
    assert all(len(x) == 0 for x in jax.tree.leaves(states))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("window must be at least 1, got 0", dict(window=0)),
        ("theta must be above 0, or None for no rotation, got -1.0", dict(theta=-1.0)),
        ("rotary_width must be even and at most head_width=8, got 3", dict(rotary_width=3)),
        ("rotary_width must be even and at most head_width=8, got 10", dict(rotary_width=10)),
        ("rotary_width must be even and at most head_width=5, got 5", dict(head_width=5)),
    ],
)
def test_attention_of_no_sense(text, options):
    with pytest.raises(ValueError) as caught:
        nn.Attention(16, num_heads=2, rngs=nnx.Rngs(0), **options)
    assert str(caught.value) == text


@pytest.mark.parametrize("layer", ["convolution", "attention"])
def test_states_of_another_number_of_sequences_are_refused(layer):
    if layer == "convolution":
        module = nn.ShortConvolution(WIDTH, rngs=nnx.Rngs(0))
    else:
        module = nn.Attention(WIDTH, num_heads=2, rngs=nnx.Rngs(0))
    x, cuts = jnp.ones((1, 6, WIDTH)), jnp.array([0, 2, 6])
    state = module.initial_state(1, max_length=8)
    with pytest.raises(
        ValueError, match=r"initial_state must have one row for each of the 2 sequences, got shape \(1,"
    ):
        module(x, state, cu_seqlens=cuts)


def test_attention_over_rows_without_a_token():
    layer = nn.Attention(WIDTH, num_heads=2, rngs=nnx.Rngs(0))
    for options in ({}, dict(cu_seqlens=jnp.zeros(2, jnp.int32)), dict(segment_ids=jnp.zeros((1, 0), jnp.int32))):
        out, _ = layer(jnp.ones((1, 0, WIDTH)), **options)
        assert out.shape == (1, 0, WIDTH)


@pytest.mark.parametrize("rows, top_k", [(0, 2), (3, 0)])
def test_experts_of_no_rows_or_no_choice(rows, top_k):
    experts, x = nn.Experts(6, 5, 2, rngs=nnx.Rngs(0)), jnp.ones((rows, 6))
    chosen = jnp.ones((rows, top_k)), jnp.zeros((rows, top_k), jnp.int32)
    for found in (experts(x, chosen), jax.grad(lambda x: experts(x, chosen).sum())(x)):
        np.testing.assert_array_equal(found, jnp.zeros((rows, 6)))


@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_multiply_in_their_dtype(dtype):
    experts = nn.Experts(6, 5, 2, dtype=dtype, rngs=nnx.Rngs(0))
    x, chosen = jnp.linspace(-2, 2, 24).reshape(4, 6), (jnp.full((4, 1), 0.5), jnp.array([[0], [1], [1], [0]]))
    y = experts(x, chosen)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, nn.Experts(6, 5, 2, rngs=nnx.Rngs(0))(x.astype(dtype), chosen))
    mlp = nn.SparseMLP(6, 5, 2, 1, dtype=dtype, rngs=nnx.Rngs(0))
    assert mlp(x).dtype == dtype and mlp.experts(x, chosen).dtype == dtype
