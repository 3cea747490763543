"""Published models whose parameters lie on a mesh, with automatic and with explicit axes, against the models' own code."""

import contextlib
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import glax.models
from glax import nn
from glax.models import CausalLM
from glax.nn import losses
from tests.compiling import quick_jit
from tests.parallel.meshes import mesh_of

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
BY_TYPE = {
    json.loads((FIXTURES / name / "config.json").read_text()).get("model_type", "state-spaces"): name for name in NAMES
}
LOGITS, GRADIENTS = 2e-5, 1e-4  # as in tests/models/test_parity.py


@functools.cache
def loaded(name: str, kind: AxisType = AxisType.Explicit):
    mesh = mesh_of(kind, fsdp=2, model=2)
    return glax.models.from_pretrained(FIXTURES / name, mesh=mesh), mesh


@functools.cache
def expected(name: str):
    return load_file(FIXTURES / name / "expected.safetensors")


def assert_near(got, want, bar):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= bar * max(np.linalg.norm(want), 1e-12)


def spec_of(x) -> P:
    return P(*(axis for axis in jax.typeof(x).sharding.spec))


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_read_is_traced_on_explicit_axes(name):
    """A ShardingTypeError is raised while tracing. Results have types with shardings, and gradients those of parameters."""
    model, mesh = loaded(name)
    tokens = jax.device_put(jnp.asarray(expected(name)["tokens"]), NamedSharding(mesh, P("fsdp")))
    pools = model.initial_states(4, tokens.shape[1])

    def every_way(model, tokens, pools):
        gradient = nnx.grad(lambda model: model.loss(tokens) + model(tokens, tokens, pad_id=0).mean())(model)
        slots, cuts = jnp.array([2, 0]), jnp.array([0, 9, 13])
        packed, pools = model.prefill(jnp.zeros(13, jnp.int32), pools, slots, cuts, jnp.array([True, False]))
        return gradient, model(tokens), packed, model.step(jnp.zeros(2, jnp.int32), pools, slots)

    graph, params = nnx.split(model)
    shapes = jax.eval_shape(lambda params: every_way(nnx.merge(graph, params), tokens, pools), params)
    gradient, logits, _, (_, after) = shapes
    assert spec_of(logits) == P("fsdp", None, None)
    for got, given in ((gradient, params), (after, pools)):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(given), strict=True):
            assert (x.shape, x.sharding.spec) == (y.shape, jax.typeof(y).sharding.spec)


@pytest.mark.parametrize("name", BY_TYPE.values(), ids=BY_TYPE.keys())
def test_logits_and_gradients_on_explicit_axes_are_those_of_the_models_own_code(name):
    (model, _), want = loaded(name), expected(name)
    shape = want["logits"].shape
    weights = jnp.asarray(np.sin(3.0 * np.arange(np.prod(shape))).reshape(shape), jnp.float32)

    def loss(model):
        logits = model(want["tokens"])
        return (weights * logits).mean(), logits

    (_, logits), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)
    assert_near(logits, want["logits"], LOGITS)
    compared = 0
    for path, gradient in glax.models.names.parameters(nnx.merge(nnx.graphdef(model), gradients)):
        key, (_, to, _) = glax.models.names.checkpoint_name(model, path)
        if "*" not in key:
            assert_near(to(np.asarray(gradient[...])), want[f"gradient.{key}"], GRADIENTS)
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gla_hybrid", AxisType.Auto), ("gla_hybrid", AxisType.Explicit), ("zamba2_options", AxisType.Explicit)],
    ids=str,
)
def test_prompts_pools_and_continuations_on_a_mesh(name, kind):
    (model, mesh), want = loaded(name, kind), expected(name)
    tokens, logits = want["tokens"], want["logits"]
    pools = model.initial_states(4, tokens.shape[1])
    prefill, step = nnx.jit(CausalLM.prefill), nnx.jit(CausalLM.step)
    packed = np.concatenate([tokens[0, :9], tokens[1, :4]])
    got, pools = prefill(model, packed, pools, jnp.array([2, 0]), jnp.array([0, 9, 13]))
    assert_near(got, np.concatenate([logits[0, :9], logits[1, :4]]), LOGITS)
    got, pools = step(model, np.array([tokens[1, 4], tokens[0, 9]]), pools, jnp.array([0, 2]))
    assert_near(got, np.stack([logits[1, 4], logits[0, 9]]), LOGITS)
    placed = jax.device_put(jnp.asarray(tokens[:, :9]), NamedSharding(mesh, P("fsdp")))
    written = np.asarray(glax.models.generate(model, placed, 4, lengths=np.array([9, 4])))
    np.testing.assert_array_equal(written[:, 0], logits.argmax(-1)[[0, 1], [8, 3]])
    streamed = np.stack(list(glax.models.stream(model, placed, 4, lengths=np.array([9, 4]))), 1)
    np.testing.assert_array_equal(streamed, written)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_next", AxisType.Explicit), ("lara_mini", AxisType.Auto)], ids=str
)  # "split" and "fused" experts
def test_experts_lie_on_the_devices_of_their_shard(name, kind, caplog):
    model = glax.models.from_pretrained(FIXTURES / name, mesh=mesh_of(kind, fsdp=2, expert=2))
    assert not warnings_of(caplog)
    stacks = [x[...] for path, x in glax.models.names.parameters(model) if ".experts." in path]
    assert stacks
    for x in stacks:
        assert x.sharding.spec[0] == "expert" and x.addressable_shards[0].data.size == x.size // 4
    logits = nnx.jit(CausalLM.__call__)(model, expected(name)["tokens"])
    assert_near(logits, expected(name)["logits"], LOGITS)


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_experts_on_a_mesh_read_the_rows_of_their_device(routing):
    mesh, x = mesh_of(data=2, expert=2), jax.random.normal(jax.random.key(0), (8, 64, 16))
    mlp = nn.SparseMLP(16, 24, count=4, top_k=2, routing=routing, rngs=nnx.Rngs(0))

    def gradient(mlp, x):
        return nnx.grad(lambda mlp, x: (mlp(x) ** 2).mean(), argnums=(0, 1))(mlp, x)

    want = nnx.jit(gradient)(mlp, x)
    glax.models.shard(mlp, mesh)
    mlp.experts.rows = NamedSharding(mesh, P(("data", "expert"), None))
    x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
    for one, other in zip(jax.tree.leaves(nnx.jit(gradient)(mlp, x)), jax.tree.leaves(want), strict=True):
        assert_near(one, other, LOGITS)
    graph, params = nnx.split(mlp)
    text = jax.jit(lambda params, x: gradient(nnx.merge(graph, params), x)).lower(params, x).compile().as_text()
    sizes = set(re.findall(r"f32\[(\d+),", text))  # 2 experts for each of 512 rows, on 4 devices
    assert "256" in sizes and not sizes & {"512", "1024"}


@pytest.mark.parametrize("in_context", [False, True])
def test_a_model_on_explicit_axes_runs_without_jit_and_in_a_context(in_context):
    model, mesh = loaded("gla")
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        logits = model(expected("gla")["tokens"])
        pools = model.initial_states(2)
        first, pools = model.step(jnp.asarray(expected("gla")["tokens"][:, 0]), pools)
        if in_context:  # JAX itself cannot place the gradient of any function outside of one
            gradient = nnx.grad(lambda model: model.loss(expected("gla")["tokens"]))(model)
            assert jax.tree.map(spec_of, gradient) == jax.tree.map(spec_of, nnx.state(model))
    assert_near(logits, expected("gla")["logits"], LOGITS)
    assert_near(first, expected("gla")["logits"][:, 0], LOGITS)
    assert spec_of(pools[0]["recurrent"]) == P(None, "model", None, None)


@pytest.mark.parametrize("make", ["layer", "model"])
def test_layers_and_models_on_explicit_axes(make):
    mesh, x = mesh_of(AxisType.Explicit, fsdp=2, model=2), jax.random.normal(jax.random.key(0), (2, 8, 16))
    if make == "layer":
        module = nn.GatedDeltaNet(16, num_heads=2, rngs=nnx.Rngs(0))
        pools = module.initial_state(2)
    else:
        sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
        module = glax.models.from_config(dict(model_type="gla", **sizes), rngs=nnx.Rngs(0))
        x, pools = (x[..., 0] > 0).astype(jnp.int32), module.initial_states(2)

    def read(module, x):
        y = module(x)
        return (y[0] if isinstance(y, tuple) else y), module.step(x[:, 0], pools)

    want = nnx.jit(read)(module, x)
    glax.models.shard(module, mesh)
    got = nnx.jit(read)(module, jax.device_put(x, NamedSharding(mesh, P("fsdp"))))
    assert spec_of(got[0]) == P("fsdp", None, None)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_near(one, other, LOGITS)


# ---- axes that do not divide, and axes of other names ----------------------------------------------------------------


def warnings_of(caplog) -> list[str]:
    assert {record.name for record in caplog.records} <= {"glax"}
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "model_axis", "replicated"),
    [
        ("gla", 4, "blocks.*.attn.query.kernel (heads)"),  # 2 heads of 8 channels
        ("gla_options", 4, "blocks.*.attn.key.kernel (heads)"),  # 2 heads of keys and values under 4 heads
        ("gla_hybrid", 4, "blocks.*.attn.value.kernel (heads)"),  # 2 of softmax attention
        ("mamba2_options", 4, "blocks.*.mixer.input.kernel (heads)"),  # 2 groups
        ("granitemoehybrid", 8, "blocks.*.mlp.shared.output.kernel (mlp)"),
        ("qwen3_next", 4, "blocks.*.attn.qkvz.kernel (heads)"),
        ("falcon_h1", 2, "blocks.*.mamba.conv.filter (heads)"),  # 3 heads
    ],
)
def test_what_an_axis_does_not_divide_is_replicated_and_named(name, model_axis, replicated, caplog):
    kind = AxisType.Explicit if "options" in name else AxisType.Auto
    model = glax.models.from_pretrained(FIXTURES / name, mesh=mesh_of(kind, model=model_axis))
    (message,) = warnings_of(caplog)
    assert f"the axis 'model' of {model_axis} devices does not divide these parameters" in message
    assert replicated in message
    logits = nnx.jit(CausalLM.__call__)(model, expected(name)["tokens"])
    assert_near(logits, expected(name)["logits"], LOGITS)


def test_heads_of_queries_are_sharded_beside_few_heads_of_keys(caplog):
    model = glax.models.from_pretrained(FIXTURES / "gla_hybrid", mesh=mesh_of(model=4))
    attention = model.blocks[1].attn
    assert attention.query.kernel[...].sharding.spec == P(None, "model")
    assert attention.key.kernel[...].sharding.spec == P(None, None)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            dict(tp=2),
            "the axes 'tp' of the mesh shard no parameter: axes that shard parameters are called 'expert', 'fsdp', 'model'",
        ),
        (dict(fsdp=2, tp=2), "the axes 'tp' of the mesh shard no parameter"),
        (dict(data=2), "the axes 'data' of the mesh shard no parameter"),
        (dict(data=2, model=2), None),
        (dict(model=2, tensor=2), "the axes 'tensor' of the mesh shard no parameter"),
        (dict(tp=1), None),
    ],
)
def test_an_axis_that_shards_nothing_is_named(axes, said, caplog):
    model = glax.models.from_pretrained(FIXTURES / "gla")
    glax.models.shard(model, mesh_of(**axes))
    messages = warnings_of(caplog)
    assert [said in message for message in messages] == [True] * (said is not None)


@pytest.mark.fast
def test_devices_are_no_mesh():
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, as jax\.make_mesh returns it, got list"):
        glax.models.shard(nn.RMSNorm(4), jax.devices())


# ---- the loss of rows that are spread over devices --------------------------------------------------------------------

SPREAD = P(("data", "fsdp"), "sequence", None)


def loss_on_mesh(mesh, **options):
    return jax.value_and_grad(
        functools.partial(losses.next_token_loss, sharding=NamedSharding(mesh, SPREAD), **options), (0, 1)
    )


def test_the_loss_of_spread_rows_is_the_loss_of_all_rows(monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 5)
    mesh, rng = mesh_of(data=2, fsdp=2, sequence=2), np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((8, 14, 4), (4, 11)))
    targets, options = jnp.asarray(rng.integers(-2, 11, (8, 14))), dict(cap=1.5, z_loss=0.1)
    got = quick_jit(loss_on_mesh(mesh, **options))(x, kernel, targets)
    want = quick_jit(jax.value_and_grad(functools.partial(losses.next_token_loss, **options), (0, 1)))(
        x, kernel, targets
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def test_the_head_is_gathered_once_and_its_gradient_is_added_once(monkeypatch):
    """Before and behind the scan over parts of the rows, not in each of its steps."""
    monkeypatch.setattr(losses, "ROWS", 5)
    mesh = mesh_of(data=2, fsdp=4, sequence=1)

    def placed(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    arguments = placed((8, 16, 64), jnp.float32, SPREAD), placed((64, 48), jnp.float32, P("fsdp"))
    run = loss_on_mesh(mesh)
    text = quick_jit(run).lower(*arguments, placed((8, 16), jnp.int32, P(*SPREAD[:2]))).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    for kind in ("all-gather", "all-reduce|reduce-scatter"):
        whole = re.compile(rf"f32\[(64,48|48,64)\]\S*\)? ({kind})(-start)?\(")
        assert len(whole.findall(text)) == len(whole.findall(entry)) == 1, kind
    assert "while(" in entry
