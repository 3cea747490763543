"""The public functions: gates, variants, transformations, gradients of every argument."""

import functools
import inspect
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
import glax.parallel
from glax._src.api.recurrent import lightning_decay, retention_decay
from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import BARS
from tests.cases import GATE_SUBSETS, Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

OUT, GRAD = BARS["float32"]


def loss_and_outputs(arguments, weights, **options):
    outputs = glax.recurrent(**arguments, **options)
    return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), outputs


def weights_of(arguments, seed=5, **options):
    shapes = jax.eval_shape(functools.partial(glax.recurrent, **options), **arguments)
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in shapes]


def expected(arguments, weights, cuts=None, reverse=False):
    """Outputs and the gradient of every argument, from the float64 reference with every gate spread to a full row gate."""
    wide = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    B, T, H, K = *wide["query"].shape[:2], *wide["initial_state"].shape[1:3]
    V, N = wide["value"].shape[3], wide["initial_state"].shape[0]
    own = np.zeros(T, int) if cuts is None else np.clip(np.searchsorted(cuts, np.arange(T), side="right") - 1, 0, N - 1)
    spread = (lambda x: x[own][None]) if cuts is not None else (lambda x: np.repeat(x[:, None], T, axis=1))
    rows = np.zeros((B, T, H, K)) + wide.get("gk", 0) + wide.get("g", np.zeros(1))[..., None]
    rows = rows + (spread(wide["g_gamma"])[..., None] if "g_gamma" in wide else 0)
    columns = np.zeros((B, T, H, V)) + wide.get("gv", 0)
    scale = wide.get("softmax_scale", np.asarray(K**-0.5))
    r = Recurrence(
        wide["query"], wide["key"], wide["value"], Decay(key=rows, value=columns), wide["initial_state"],
        None if cuts is None else np.asarray(cuts), np.full(N, scale), reverse,
    )  # fmt: skip
    d = reference_gradient(r, *weights)
    d_rows = d.decay.key.sum(3)
    ranges = () if cuts is None else itertools.pairwise(cuts)
    d_gamma = d_rows.sum(1) if cuts is None else np.stack([d_rows[0, a:b].sum(0) for a, b in ranges])
    gradients = dict(
        query=d.q, key=d.k, value=d.v, g=d_rows, gk=d.decay.key, gv=d.decay.value, g_gamma=d_gamma,
        initial_state=d.initial_state, softmax_scale=d.scale.sum(),
    )  # fmt: skip
    return reference(r), {name: gradients[name] for name in arguments}


@pytest.mark.parametrize("gates", GATE_SUBSETS, ids=lambda gates: "+".join(gates) or "none")
def test_every_gate_subset_and_every_gradient(gates):
    """Traced softmax_scale, g_gamma and cu_seqlens; gradients in all float arguments and through both results."""
    cuts = (0, 9, 9, 33, 37)
    for case in (
        Case("plain", B=2, T=40, gates=gates, K=6, V=5),
        Case("packed", T=40, gates=gates, K=6, V=5, cuts=cuts),
    ):
        arguments = inputs(case, "log-sigmoid")
        arguments = {name: jnp.nan_to_num(x) for name, x in arguments.items()} | {"softmax_scale": jnp.float32(0.3)}
        cu = None if case.cuts is None else jnp.asarray(cuts)
        weights = weights_of(arguments, cu_seqlens=cu)
        run = jax.jit(jax.value_and_grad(functools.partial(loss_and_outputs), has_aux=True))
        (_, outputs), gradients = run(arguments, weights, cu_seqlens=cu)
        want_outputs, want = expected(arguments, weights, case.cuts)
        for name, got, x in zip(outputs._fields, outputs, want_outputs, strict=True):
            assert_close(name, got, x, OUT)
        for name, got in gradients.items():
            assert_close(f"d {name}", got, want[name], GRAD * (10 if name in ("g_gamma", "softmax_scale") else 1))


@pytest.mark.fast
def test_scale_zero_has_a_gradient():
    arguments = inputs(Case("", T=10), "log-sigmoid") | {"softmax_scale": jnp.float32(0.0)}
    weights = weights_of(arguments)
    got = jax.grad(loss_and_outputs, has_aux=True)(arguments, weights)[0]["softmax_scale"]
    assert_close("d softmax_scale", got, expected(arguments, weights)[1]["softmax_scale"], 10 * GRAD)


# ---- shapes and options ----------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_hand_the_state_through(shape):
    q, state = jnp.zeros((*shape, 2, 4)), jnp.full((shape[0], 2, 4, 4), 3.0, jnp.bfloat16)
    run = functools.partial(glax.recurrent_gla, g=jnp.zeros((*shape, 2, 4)), initial_state=state)
    outputs = jax.jit(run)(q, q, q)
    assert outputs.output.shape == q.shape
    assert outputs.final_state.dtype == jnp.float32
    np.testing.assert_array_equal(outputs.final_state, state)
    d = jax.grad(lambda s: glax.recurrent(q, q, q, initial_state=s).final_state.sum())(state)
    np.testing.assert_array_equal(d, jnp.ones_like(state))


@pytest.mark.fast
def test_no_sequences():
    q = jnp.ones((1, 5, 2, 4))
    outputs = glax.recurrent(q, q, q, cu_seqlens=jnp.zeros(1, jnp.int32))
    assert outputs.final_state.shape == (0, 2, 4, 4)
    np.testing.assert_array_equal(outputs.output, jnp.zeros_like(q))


@pytest.mark.fast
def test_packed_rank_3_equals_rank_4():
    case = Case("", T=30, gates=("g", "gv"), cuts=(0, 11, 30))
    arguments = inputs(case, "log-sigmoid")
    flat = {name: x[0] if name != "initial_state" else x for name, x in arguments.items()}
    whole = glax.recurrent(**arguments, cu_seqlens=jnp.asarray(case.cuts))
    got = glax.recurrent(**flat, cu_seqlens=jnp.asarray(case.cuts))
    np.testing.assert_array_equal(got.output, whole.output[0])
    np.testing.assert_array_equal(got.final_state, whole.final_state)
    one = glax.recurrent(*(flat[name] for name in ("query", "key", "value")))
    assert one.output.shape == flat["query"].shape[:2] + flat["value"].shape[2:]
    assert one.final_state.shape == (1, 2, 16, 24)


@pytest.mark.fast
def test_one_state_for_all_sequences_and_any_state_dtype():
    arguments = inputs(Case("", B=3, T=9, state_dtype=None), "log-sigmoid")
    state = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 24)), jnp.bfloat16)
    one = glax.recurrent(**arguments, initial_state=state)
    each = glax.recurrent(**arguments, initial_state=jnp.stack([state.astype(jnp.float32)] * 3))
    np.testing.assert_array_equal(one.output, each.output)


def test_variants_are_the_recurrence_with_their_gates():
    arguments = inputs(Case("", B=2, T=50, heads=(4, 2, 2), gates=("g",), K=8, V=8, state_dtype=None), "log-sigmoid")
    q, k, v, g = (arguments[name] for name in ("query", "key", "value", "g"))
    gk = jnp.broadcast_to(g[..., None], q.shape)
    h = np.arange(4)
    same = [
        (glax.simple_gla(q, k, v, g), glax.recurrent(q, k, v, g=g)),
        (glax.recurrent_gla(q, k, v, gk), glax.recurrent(q, k, v, gk=gk)),
        (glax.recurrent(q, k, v, g=gk), glax.recurrent(q, k, v, gk=gk)),
        (glax.retention(q, k, v), glax.recurrent(q, k, v, g_gamma=jnp.log(1 - 2.0 ** (-5 - h)).astype(jnp.float32))),
        (
            glax.lightning_attention(q, k, v, 3, 12),
            glax.recurrent(q, k, v, g_gamma=jnp.asarray(-(8 / 4) * (1 - 3 / 12) * h, jnp.float32)),
        ),
    ]
    for got, want in same:
        assert_close("output", got.output, want.output, 1e-6)
        assert_close("final_state", got.final_state, want.final_state, 1e-6)
    assert_close("g = gk", same[0][0].output, same[1][0].output, 1e-6)
    np.testing.assert_array_equal(glax.recurrent_attention(q, k, v, g), same[0][0].output)
    np.testing.assert_array_equal(glax.recurrent_attention(q, k, v, g, return_state=True)[1], same[0][0].final_state)
    by_layer = jax.jit(jax.vmap(lambda i: glax.lightning_attention(q, k, v, i, 12).output))(jnp.array([3, 5]))
    assert_close("traced layer_idx", by_layer[0], same[4][0].output, 1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("num_layers", [1, 2, 80])
def test_minimax_slopes(num_layers):
    """The decays as the formula has them in float64; the last layer's, 1e-5 of the first's, known or traced."""
    H, last = 8, num_layers - 1
    q, k, v = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).normal(size=(3, 1, 30, H, 4)))
    for layer in {0, last // 2, last}:
        through = 1 - layer / last if last else 1.0
        wanted = -(2.0 ** (-8 * (np.arange(H) + 1) / H)) * (through + 1e-5)
        traced = jax.jit(lambda i: lightning_decay(q, k, v, i, num_layers, "minimax"))
        for got in (lightning_decay(q, k, v, layer, num_layers, "minimax"), traced(np.uint8(layer))):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
        output = glax.lightning_attention(q, k, v, layer, num_layers, slopes="minimax").output
        assert_close("output", output, glax.recurrent(q, k, v, g_gamma=jnp.asarray(wanted, jnp.float32)).output, 1e-6)


@pytest.mark.fast
def test_fixed_decays_of_float64_inputs_are_float64():
    with jax.enable_x64(True):
        q = jnp.ones((1, 3, 4, 2), jnp.float64)
        h = np.arange(4)
        np.testing.assert_allclose(retention_decay(q, q, q), np.log1p(-(2.0 ** (-5 - h))), rtol=1e-15)
        np.testing.assert_allclose(lightning_decay(q, q, q, 1, 3), -8 / 4 * (1 - 1 / 3) * h, rtol=1e-15)
        wanted = -(2.0 ** (-2.0 * (h + 1))) * (1 / 2 + 1e-5)
        np.testing.assert_allclose(lightning_decay(q, q, q, jnp.asarray(1), 3, "minimax"), wanted, rtol=1e-15)


@pytest.mark.fast
def test_cfg_reaches_the_kernel_and_platform_insists():
    arguments = inputs(Case("", T=40), "log-sigmoid")
    text = [
        str(jax.make_jaxpr(functools.partial(glax.recurrent, cfg=ChunkedConfig(chunk), platform="xla"))(**arguments))
        for chunk in (8, 16)
    ]
    assert "8,8]" in text[0].replace(" ", "")
    assert "16,16]" in text[1].replace(" ", "")


# ---- transformations -------------------------------------------------------------------------------------------------

CASE = Case("", B=2, T=40, heads=(4, 2, 2), gates=("g", "gk"), K=6, V=5)


def assert_trees_close(got, want, bar=2e-6):
    for path, x in jax.tree.leaves_with_path(want):
        name = jax.tree_util.keystr(path)
        assert_close(name, dict(jax.tree.leaves_with_path(got))[path], x, bar)


def one_by_one(f, many):
    each = [f(jax.tree.map(lambda x, i=i: x[i], many)) for i in range(3)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


@pytest.mark.parametrize("cuts", [None, (0, 9, 9, 33, 37)], ids=["plain", "packed"])
def test_vmap_of_anything(cuts):
    """vmap of the function, of its gradient, and of only some arguments; a vmapped scale; vmap of vmap."""
    case = Case("", B=1, T=40, heads=(4, 2, 2), gates=("g", "gk"), K=6, V=5, cuts=cuts)
    many = [jax.tree.map(jnp.nan_to_num, inputs(case, "log-sigmoid", seed)) for seed in range(3)]
    many = jax.tree.map(lambda *x: jnp.stack(x), *many) | {"softmax_scale": jnp.array([0.2, 0.5, 1.0])}
    cu = None if cuts is None else jnp.asarray(cuts)
    weights = weights_of({name: x[0] for name, x in many.items()}, cu_seqlens=cu)
    run = jax.value_and_grad(functools.partial(loss_and_outputs, weights=weights, cu_seqlens=cu), has_aux=True)
    run = jax.jit(run)
    assert_trees_close(jax.vmap(run)(many), one_by_one(run, many))
    some = {name: x if name in ("key", "gk") else x[0] for name, x in many.items()}
    axes = {name: 0 if name in ("key", "gk") else None for name in many}
    in_turn = [run(some | {"key": some["key"][i], "gk": some["gk"][i]}) for i in range(3)]
    assert_trees_close(jax.vmap(run, in_axes=(axes,))(some), jax.tree.map(lambda *x: jnp.stack(x), *in_turn))
    twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), many)
    assert_trees_close(jax.vmap(jax.vmap(run))(twice)[1]["gk"][1][::-1], jax.vmap(run)(many)[1]["gk"])


def test_vmap_merges_into_the_batch_and_keeps_one_kernel():
    """A vmapped call is the call on a larger batch: the same loop over chunks, no copy of both branches of a cond."""
    arguments = inputs(Case("", B=2, T=64), "log-sigmoid")
    many = jax.tree.map(lambda x: jnp.stack([x] * 3), arguments)
    run = functools.partial(glax.recurrent, cfg=ChunkedConfig(32))
    text = str(jax.make_jaxpr(jax.vmap(lambda a: run(**a)))(many))
    assert "cond[" in text
    assert "6,2,32,32]" in text.replace(" ", ""), "scores of a batch of 3 * 2"


def test_scan_over_layers_and_checkpoint():
    arguments = inputs(CASE, "log-sigmoid")
    gates = jnp.stack([arguments["gk"], arguments["gk"] / 2])

    def layer(x, gk):
        return x + glax.recurrent(
            x, arguments["key"], jnp.tile(arguments["value"], 2)[..., :5], gk=gk, platform="xla"
        ).output @ mix, None

    mix = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)), jnp.float32) / 3

    def loss(gates, wrap):
        return (jax.lax.scan(wrap(layer), arguments["query"], gates)[0] ** 2).sum()

    def unrolled(gates):
        x = arguments["query"]
        for gk in gates:
            x = layer(x, gk)[0]
        return (x**2).sum()

    want = quick_jit(jax.value_and_grad(unrolled))(gates)
    for wrap in (lambda f: f, jax.checkpoint):
        got = quick_jit(jax.value_and_grad(lambda gates, wrap=wrap: loss(gates, wrap)))(gates)
        assert_trees_close(got, want)


@pytest.mark.parametrize("gates", [(), ("g",), ("gk", "gv"), ("g_gamma",)], ids=str)
def test_second_derivatives(gates):
    """The gradient of a function of the gradient, against central differences of the first in float64."""
    with jax.enable_x64(True):
        case = Case(
            "",
            B=2,
            T=7,
            heads=(2, 1, 2),
            gates=gates,
            K=3,
            V=2,
            dtype="float64",
            gate_dtype="float64",
            state_dtype="float64",
        )
        arguments = inputs(case, "log-sigmoid") | {"softmax_scale": jnp.asarray(0.7)}
        weights = weights_of(arguments)

        def energy(arguments):
            d = jax.grad(lambda a: loss_and_outputs(a, weights)[0] ** 2)(arguments)
            return sum((x**2).sum() for x in jax.tree.leaves(d))

        got = quick_jit(jax.grad(energy))(arguments)
        energy = quick_jit(energy)
        rng = np.random.default_rng(3)
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), arguments)
        moved = [jax.tree.map(lambda x, d, s=s: x + s * d, arguments, direction) for s in (1e-5, -1e-5)]
        slope = (energy(moved[0]) - energy(moved[1])) / 2e-5
        along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), got, direction)))
        assert abs(along - slope) < 1e-6 * abs(slope)


def test_second_derivatives_packed():
    """Packed second derivatives equal those of the sequences on their own."""
    cuts = (0, 5, 5, 12)
    arguments = inputs(Case("", T=14, gates=("gk",), K=3, V=2, cuts=cuts), "log-sigmoid")

    def norms(f, arguments):
        d = jax.grad(lambda a: (f(a).output[:, :12] ** 2).sum())(arguments)
        return sum((x**2).sum() for x in jax.tree.leaves(jax.tree.map(jnp.nan_to_num, d)))

    def separate(a):
        parts = []
        for n, (low, high) in enumerate(itertools.pairwise(cuts)):
            part = {name: x[:, low:high] if name != "initial_state" else x[n : n + 1] for name, x in a.items()}
            parts.append(glax.recurrent(**part))
        return parts[0]._replace(output=jnp.concatenate([p.output for p in parts], axis=1))

    packed = functools.partial(glax.recurrent, cu_seqlens=jnp.asarray(cuts))
    got = quick_jit(jax.grad(lambda a: norms(lambda a: packed(**a), a)))(arguments)
    want = quick_jit(jax.grad(lambda a: norms(separate, a)))(arguments)
    assert_trees_close(jax.tree.map(jnp.nan_to_num, got), jax.tree.map(jnp.nan_to_num, want), 5e-5)


def by_token(x, k, v):
    """recurrent with gk = -x^2, as jax.jvp can differentiate it."""

    def step(S, row):
        x, k, v = row
        S = jnp.exp(-(x**2))[..., None] * S + k[..., None] * v[:, None]
        return S, jnp.einsum("hk,hkv->hv", x, S, precision="highest")

    return jax.lax.scan(step, jnp.zeros((*x.shape[2:], v.shape[3])), (x[0], k[0], v[0]))[1][None]


@pytest.mark.fast
def test_forward_mode_names_the_ways_round():
    x, k, v = inputs(Case("", T=5, heads=(2, 2, 2), gates=(), K=3, V=2, state_dtype=None), "0").values()

    def f(x):
        return glax.recurrent(x, k, v, gk=-(x**2), softmax_scale=1.0).output

    def total(f, x):
        return (f(x) ** 2).sum()

    def one_token(x):
        return glax.recurrent_step(x[:, 0], k[:, 0], v[:, 0], jnp.ones((1, 2, 3, 2)))

    def on_a_mesh(x):
        mesh = jax.make_mesh((1,), ("s",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        return glax.parallel.recurrent(x, k, v, mesh=mesh, sequence_axis="s")

    for refused in (
        lambda: jax.jvp(f, (x,), (x,)),
        lambda: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda: jax.jacfwd(f)(x),
        lambda: jax.linearize(f, x)[1](x),
        lambda: jax.hessian(functools.partial(total, f))(x),
        lambda: jax.jvp(one_token, (x,), (x,)),
        lambda: jax.jvp(on_a_mesh, (x,), (x,)),
    ):
        with pytest.raises(
            TypeError, match=r"glax has no forward mode .* Two vjps are one jvp: with y, pull = jax.vjp"
        ):
            refused()
    along, plain = jnp.cos(x), functools.partial(by_token, k=k, v=v)
    y, pull = jax.vjp(f, x)
    assert_close("jvp", jax.vjp(lambda d: pull(d)[0], y)[1](along)[0], jax.jvp(plain, (x,), (along,))[1], GRAD)
    got, want = (
        jax.grad(lambda x, f=f: jnp.vdot(jax.grad(functools.partial(total, f))(x), along))(x) for f in (f, plain)
    )
    assert_close("Hessian", got, want, GRAD)


@pytest.mark.fast
def test_new_boundaries_need_no_new_compile():
    case = Case("", T=40, cuts=(0, 9, 9, 33, 37))
    arguments = jax.tree.map(jnp.nan_to_num, inputs(case, "log-sigmoid"))
    run = jax.jit(lambda a, cu: glax.recurrent(**a, cu_seqlens=cu))
    for cuts in (case.cuts, (0, 40, 40, 40, 40), (0, 0, 0, 1, 2)):
        run(arguments, jnp.asarray(cuts))
    assert run._cache_size() == 1


def test_the_gate_of_gla_has_the_name_of_the_step_too():
    q, gk = jnp.ones((1, 6, 1, 4)), -jnp.arange(24.0).reshape(1, 6, 1, 4) / 24
    wanted = glax.recurrent(q, q, q, gk=gk)
    mesh = jax.make_mesh((1,), ("s",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    for got in (
        glax.recurrent_gla(q, q, q, gk),
        glax.recurrent_gla(q, q, q, gk=gk),
        glax.parallel.recurrent_gla(q, q, q, gk=gk, mesh=mesh),
    ):
        assert_close("output", got.output, wanted.output, OUT)
        assert_close("final_state", got.final_state, wanted.final_state, OUT)


def test_functions_on_a_mesh_list_the_options_of_the_functions_without():
    """For type checkers: `glax.parallel` passes on what `glax` takes."""
    for name in ("recurrent", "recurrent_attention", "recurrent_gla", "simple_gla", "gated_delta_rule"):
        known = options_of(getattr(glax, name))
        assert known - options_of(getattr(glax.parallel, name)) == set(), name
        assert {"segment_ids", "pad_id", "states_every", "states_dtype"} <= known


def options_of(function) -> set[str]:
    """Return the names of a function's parameters, those of the TypedDict of its **options included."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    unpacked = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
    return named.union(*(typing.get_args(each)[0].__annotations__ for each in unpacked))
