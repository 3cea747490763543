"""segment_ids and pad_id: against separate sequences, under transformations, and in every function of whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import glax
from glax._src.core.bind import bind
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import BARS
from tests.cases import FORMS, SEGMENT_IDS, Case, inputs, runs
from tests.close import assert_close
from tests.compiling import quick_jit

IDS = np.array(SEGMENT_IDS, np.int32)
B, T = IDS.shape
WHOLE = ("g_gamma", "initial_state", "softmax_scale")  # arguments without tokens


def pieces(ids: np.ndarray, pad_id, reverse: bool) -> list[np.ndarray]:
    """The tokens of each segment of a row, in ascending order; the segments in the order of the scan."""
    found, before = [], None
    for t in range(len(ids))[:: -1 if reverse else 1]:
        if ids[t] != pad_id:
            if before is None or ids[t] != before:
                found.append([])
            found[-1].append(t)
        before = None if ids[t] == pad_id else ids[t]
    return [np.sort(piece) for piece in found]


def separate(arguments: dict, d_output, d_final, ids=IDS, pad_id=None, reverse=False):
    """Output, final states and gradients of all arguments, from the float64 reference of each segment alone."""
    wide = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    output, final = np.zeros(d_output.shape), wide["initial_state"].copy()
    gradient = {name: np.zeros(x.shape) for name, x in wide.items()}
    gradient["initial_state"] = np.asarray(d_final, np.float64).copy()
    for b in range(len(ids)):
        each = pieces(ids[b], pad_id, reverse)
        for i, piece in enumerate(each):
            own = {name: x[b : b + 1] if name in WHOLE else x[b : b + 1, piece] for name, x in wide.items()}
            own["initial_state"] = own["initial_state"] * (i == 0)
            with jax.enable_x64(True):
                r = bind(**own, reverse=reverse)
                d = d_output[b : b + 1, piece], d_final[b : b + 1] * (i == len(each) - 1)
                outputs, dr = reference(r), reference_gradient(r, *d)
            output[b, piece], final[b] = outputs.output[0], outputs.final_state[0]
            gates = dict(g=dr.decay.head, g_gamma=dr.decay.constant, gk=dr.decay.key, gv=dr.decay.value)
            found = dict(query=dr.q, key=dr.k, value=dr.v) | gates
            for name in gradient.keys() & found.keys():
                gradient[name][(b,) if name in WHOLE else (b, piece)] += found[name][0]
            if i == 0:
                gradient["initial_state"][b] = dr.initial_state[0]
    return output, final, gradient


def arguments_of(gates=("gk",), **shapes) -> dict:
    case = Case("", gates=gates, **dict(B=B, T=T, heads=(4, 2, 1), K=8, V=6) | shapes)
    return inputs(case, "log-sigmoid")


def cotangents_of(arguments, seed=3):
    rng, H = np.random.default_rng(seed), arguments["initial_state"].shape[1]
    d_output = rng.normal(size=(*arguments["query"].shape[:2], H, arguments["value"].shape[3]))
    return jnp.asarray(d_output, jnp.float32), jnp.asarray(
        rng.normal(size=arguments["initial_state"].shape), jnp.float32
    )


def with_nan(arguments: dict, hidden) -> dict:
    """The arguments with NaN in hidden tokens."""
    return {
        name: x if name in WHOLE else jnp.where(jnp.expand_dims(hidden, range(2, x.ndim)), jnp.nan, x)
        for name, x in arguments.items()
    }


def pulled(f, arguments, cotangents):
    outputs, pull = jax.vjp(lambda x: tuple(f(**x)), arguments)
    return *outputs, pull(cotangents)[0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pad_id", [0, 9, None])
@pytest.mark.parametrize("form", ["none", "constant", "key", "key+value"])
def test_each_segment_is_a_sequence_of_its_own(form, pad_id, reverse):
    """NaN in padding, in the cotangent of the output there too, and an output that is not differentiated elsewhere."""
    arguments = arguments_of(FORMS[form])
    d_output, d_final = cotangents_of(arguments)
    wanted = separate(arguments, d_output, d_final, pad_id=pad_id, reverse=reverse)
    hidden = jnp.asarray(pad_id == IDS) if pad_id is not None else jnp.zeros(IDS.shape, bool)
    f = functools.partial(glax.recurrent, segment_ids=jnp.asarray(IDS), pad_id=pad_id, reverse=reverse)
    given = with_nan(arguments, hidden), with_nan(dict(x=d_output), hidden)["x"]
    output, final, gradient = quick_jit(functools.partial(pulled, f))(given[0], (given[1], d_final))
    assert_close("output", output, wanted[0], BARS["float32"][0])
    assert_close("final state", final, wanted[1], BARS["float32"][0])
    assert not np.asarray(output)[np.asarray(hidden)].any()
    for name, x in gradient.items():
        assert_close(f"d {name}", x, wanted[2][name], BARS["float32"][1] * (10 if name == "g_gamma" else 1))
        if name not in WHOLE:
            assert not np.asarray(x)[np.asarray(hidden)].any(), name


def test_gates_where_a_segment_begins_have_no_effect_and_no_gradient():
    arguments, ids = arguments_of(("g", "gk", "gv")), jnp.asarray(IDS[:1])
    arguments = {name: x[:1] for name, x in arguments.items()}
    begins = np.zeros((1, T), bool)
    for piece in pieces(IDS[0], 0, False)[1:]:
        begins[0, piece[0]] = True
    d = cotangents_of(arguments)
    run = quick_jit(functools.partial(pulled, functools.partial(glax.recurrent, segment_ids=ids, pad_id=0)))
    want = run(arguments, d)
    for value in (-jnp.inf, jnp.nan, 3.0):
        gates = {name: arguments[name] for name in ("g", "gk", "gv")}
        gates = {n: jnp.where(jnp.expand_dims(begins, range(2, x.ndim)), value, x) for n, x in gates.items()}
        got = run(arguments | gates, d)
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
        assert not any(np.asarray(got[2][name])[begins].any() for name in gates)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32, jnp.int64])
def test_ids_of_any_integer_dtype_and_without_batch(dtype):
    with jax.enable_x64(True):
        arguments = {name: x[0] for name, x in arguments_of(dtype="float64").items()}
        most = int(jnp.iinfo(dtype).max)
        ids = np.array(runs((most, 9), (most - 1, 9), (most, 20), (0, T - 38)), dtype)
        got = glax.recurrent(**arguments, segment_ids=ids, pad_id=most)
        batch = {name: x[None] for name, x in arguments.items()}
        d = [np.zeros(x.shape) for x in (got.output[None], got.final_state)]
        wanted = separate(batch, *d, ids=ids[None], pad_id=most)
        assert_close("output", got.output[None], wanted[0], 1e-13)
        assert_close("final state", got.final_state, wanted[1], 1e-13)
        glax.recurrent(**arguments, segment_ids=ids, pad_id=-1 if dtype == jnp.uint8 else 0)


def test_moved_documents_need_no_new_compile_and_vmap_scan_and_remat_hold():
    arguments = arguments_of(("g",), heads=(2, 2, 2), K=6, V=6)
    ids = jnp.stack([jnp.asarray(IDS), jnp.asarray(IDS[::-1])])
    count = 0

    def loss(arguments, ids):
        nonlocal count
        count += 1

        @jax.checkpoint
        def layer(x, _):
            o = glax.recurrent(**arguments | dict(value=x), segment_ids=ids, pad_id=0).output
            return x + o, None

        return (jax.lax.scan(layer, arguments["value"], None, length=2)[0] ** 2).sum()

    run = quick_jit(jax.value_and_grad(loss))
    each = [run(arguments, x) for x in ids]
    assert count == 1
    mapped = quick_jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(arguments, ids)
    for x, *ys in zip(jax.tree.leaves(mapped), *map(jax.tree.leaves, each), strict=True):
        assert_close("vmap", x, np.stack(ys), 1e-5)


@pytest.mark.parametrize("form", ["constant", "key+value"])
def test_second_derivatives(form):
    """Of a row of segments and of the same sequences packed by cu_seqlens."""
    lengths = (5, 1, 7, 4)
    case = Case("", T=17, heads=(2, 2, 2), K=4, V=3, gates=FORMS[form], state_dtype=None)
    arguments = inputs(case, "log-sigmoid")
    if "g_gamma" in arguments:
        arguments["g_gamma"] = arguments["g_gamma"][0]
    ids = jnp.asarray(runs(*zip((3, 1, 3, 2), lengths, strict=True)))[None]

    def curvature(**how):
        def slope(x):
            d = jax.grad(lambda x: (glax.recurrent(**x, **how).output ** 2).sum())(x)
            return sum((y**2).sum() for y in jax.tree.leaves(d))

        return quick_jit(jax.grad(slope))(arguments)

    got, want = curvature(segment_ids=ids), curvature(cu_seqlens=jnp.asarray(np.cumsum((0, *lengths))))
    for name, x in got.items():
        assert_close(f"d2 {name}", x, np.asarray(want[name]), 1e-4)


def test_inside_shard_map():
    arguments = arguments_of(("gk",), heads=(2, 2, 2))
    mesh = jax.make_mesh((4,), ("b",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    P = jax.sharding.PartitionSpec("b")
    run = jax.shard_map(
        lambda arguments, ids: glax.recurrent(**arguments, segment_ids=ids, pad_id=0),
        mesh=mesh,
        in_specs=P,
        out_specs=P,
    )
    got = quick_jit(jax.grad(lambda x: (run(x, jnp.asarray(IDS)).output ** 2).sum()))(arguments)
    want = quick_jit(jax.grad(lambda x: (glax.recurrent(**x, segment_ids=IDS, pad_id=0).output ** 2).sum()))(arguments)
    for name, x in got.items():
        assert_close(f"d {name}", x, np.asarray(want[name]), 1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_bonus_reads_within_its_segment(reverse):
    lengths = (4, 1, 6)
    arguments = inputs(Case("", T=11, heads=(4, 2, 1), K=6, V=5, gates=("gk",)), "log-sigmoid")
    bonus = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)
    state = arguments.pop("initial_state")
    states = jnp.concatenate([0 * state, 0 * state, state] if reverse else [state, 0 * state, 0 * state])
    cuts = jnp.asarray(np.cumsum((0, *lengths)))
    want = glax.recurrent(**arguments, bonus=bonus, cu_seqlens=cuts, initial_state=states, reverse=reverse)
    ids = np.array(runs((0, 2), (3, 4), (0, 1), (3, 1), (8, 6), (0, 3)))
    spread = {name: jnp.full((1, 17, *x.shape[2:]), jnp.nan).at[:, ids > 0].set(x) for name, x in arguments.items()}
    got = glax.recurrent(**spread, bonus=bonus, segment_ids=ids[None], pad_id=0, initial_state=state, reverse=reverse)
    assert_close("output", got.output[:, ids > 0], want.output, 1e-5)
    assert not np.asarray(got.output[:, ids == 0]).any()
    assert_close("final state", got.final_state, want.final_state[:1] if reverse else want.final_state[-1:], 1e-5)


@pytest.mark.fast
def test_every_function_of_whole_sequences_takes_them():
    q = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))
    g, dense, ids = -jnp.abs(q), -jnp.abs(q[..., 0]), jnp.asarray(runs((0, 1), (2, 4), (5, 4)))[None]
    options = dict(segment_ids=ids, pad_id=0)
    calls = [
        functools.partial(glax.recurrent, gk=g),
        functools.partial(glax.recurrent_attention, gk=g, return_state=True),
        functools.partial(glax.recurrent_gla, g=g),
        functools.partial(glax.simple_gla, g=dense),
        glax.retention,
        functools.partial(glax.lightning_attention, layer_idx=1, num_layers=4),
    ]
    from glax.compat import ejkernel

    calls += [functools.partial(ejkernel.recurrent, gk=g), functools.partial(ejkernel.recurrent_gla, g=g)]
    for call in calls:
        output, final = call(q, q, q, **options)
        rows = (
            {name: x[:, 5:] for name, x in call.keywords.items() if hasattr(x, "shape")}
            if hasattr(call, "keywords")
            else {}
        )
        alone = functools.partial(call.func, **call.keywords | rows) if hasattr(call, "keywords") else call
        want = alone(q[:, 5:], q[:, 5:], q[:, 5:])
        assert_close("output", output[:, 5:], want[0], 1e-5)
        assert_close("final state", final, want[1], 1e-5)
        assert not np.asarray(output[:, :1]).any()


IDS_OF_12 = np.zeros((2, 12), np.int32)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, "segment_ids must hold integers, got float32", dict(segment_ids=IDS_OF_12.astype(np.float32))),
        (TypeError, "segment_ids must be an array, got list", dict(segment_ids=[[1] * 12] * 2)),
        (
            ValueError,
            "segment_ids must be [B, T] with B=2 and T=12 as in query, got shape (12,)",
            dict(segment_ids=IDS_OF_12[0]),
        ),
        (TypeError, "pad_id must be an integer, known while tracing, got 0.5", dict(segment_ids=IDS_OF_12, pad_id=0.5)),
        (ValueError, "pad_id must be None without segment_ids, got 0", dict(pad_id=0)),
    ],
)
def test_errors_name_the_argument(error, text, options):
    x = jnp.ones((2, 12, 2, 4))
    with pytest.raises(error) as caught:
        glax.recurrent(x, x, x, **options)
    assert str(caught.value) == text


@pytest.mark.fast
def test_both_ways_to_pack_are_an_error():
    x = jnp.ones((12, 2, 4))
    with pytest.raises(ValueError, match="segment_ids must be None with cu_seqlens, for both divide T"):
        glax.recurrent(x, x, x, cu_seqlens=jnp.array([0, 12]), segment_ids=IDS_OF_12[0])
    with pytest.raises(ValueError, match=r"segment_ids must be \[T\] with T=12 as in query, which has no B"):
        glax.recurrent(x, x, x, segment_ids=IDS_OF_12)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_sharded_operands_stay_where_they_are(kind):
    """The batch and the heads over a mesh, in a plain jit: each device divides its own rows."""
    arguments = arguments_of(("gk",), heads=(2, 2, 2))
    mesh = jax.make_mesh((2, 2), ("b", "h"), (kind,) * 2, devices=jax.devices()[:4])

    def placed(x, *spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    there = {
        n: placed(x, "b", "h") if n == "initial_state" else placed(x, "b", None, "h") for n, x in arguments.items()
    }

    def loss(arguments, ids):
        output, state = glax.recurrent(**arguments, segment_ids=ids, pad_id=0)
        return (output**2).sum() + (state**2).sum()

    run = jax.jit(jax.value_and_grad(loss))
    text = run.lower(there, placed(IDS, "b")).compile().as_text()
    got, want = run(there, placed(IDS, "b")), quick_jit(jax.value_and_grad(loss))(arguments, jnp.asarray(IDS))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("sharded", x, np.asarray(y), 1e-5)
    assert "all-gather" not in text


@pytest.mark.fast
def test_one_row_of_many_segments_on_native_threads():
    """Few heads and long rows, which the native kernels cut: parts of runs, whole runs and single tokens together."""
    lengths = (1500, 1, 1, 2600, 3, 800)
    case = Case("", T=sum(lengths), heads=(1, 1, 1), K=8, V=8, gates=("gk",))
    arguments = inputs(case, "mild")
    ids, cuts = jnp.asarray(runs(*enumerate(lengths)))[None], jnp.asarray(np.cumsum((0, *lengths)))
    state = arguments.pop("initial_state")
    states = jnp.concatenate([state, jnp.zeros((len(lengths) - 1, *state.shape[1:]))])

    def loss(arguments, start, **how):
        output, final = glax.recurrent(**arguments, initial_state=start, **how)
        return (output**2).sum() + (final[-1] ** 2).sum()

    got = jax.jit(jax.grad(loss, (0, 1)))(arguments, state, segment_ids=ids)
    want = jax.jit(jax.grad(loss, (0, 1)))(arguments, states, cu_seqlens=cuts)
    for name, x in got[0].items():
        assert_close(f"d {name}", x, np.asarray(want[0][name]), 2e-5)
    assert_close("d initial state", got[1], np.asarray(want[1][:1]), 2e-5)


@pytest.mark.fast
def test_symbolic_shapes_and_the_delta_rule():
    """One exported program for all shapes; and tokens that erase, whose segments are those packed by cu_seqlens."""

    def gradient(x, ids):
        return jax.grad(lambda x: (glax.recurrent(x, x, x, gk=-abs(x), segment_ids=ids, pad_id=0).output ** 2).sum())(x)

    shape = export.symbolic_shape("b, t, 2, 8")
    checks = [export.DisabledSafetyCheck.custom_call(f"glax_{name}") for name in ("forward", "gradient")]
    given = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    exported = export.export(quick_jit(gradient), disabled_checks=checks)(*given)
    x = jnp.sin(jnp.arange(1 * 40 * 2 * 8.0)).reshape(1, 40, 2, 8)
    ids = jnp.asarray(runs((0, 3), (1, 20), (2, 17)), jnp.int32)[None]
    assert_close("gradient", exported.call(x, ids), np.asarray(gradient(x, ids)), 1e-6)

    beta = jnp.full((1, 40, 2), 0.5).at[:, :3].set(jnp.nan)
    outputs = glax.recurrent(x, x / 4, x, beta=beta, segment_ids=ids, pad_id=0)
    rows = dict(query=x[:, 3:], key=x[:, 3:] / 4, value=x[:, 3:], beta=beta[:, 3:])
    want = glax.recurrent(**rows, cu_seqlens=jnp.array([0, 20, 37]))
    assert_close("delta rule", outputs.output[:, 3:], np.asarray(want.output), 1e-5)
    assert_close("final state", outputs.final_state[0], np.asarray(want.final_state[1]), 1e-5)
    assert not np.asarray(outputs.output[:, :3]).any()


@pytest.mark.fast
def test_calls_with_segments_are_tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    x, ids = jax.ShapeDtypeStruct((1, 64, 1, 8), jnp.float32), jax.ShapeDtypeStruct((1, 64), jnp.int32)
    found = glax.tune(lambda x, ids: glax.recurrent(x, x, x, gk=x, segment_ids=ids), x, ids, progress=False)
    assert len(found) == 1
