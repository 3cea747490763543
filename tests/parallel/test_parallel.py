"""Recurrences over meshes of 8 simulated devices, compared with the float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import glax
from glax import parallel
from glax._src.core.decay import USUAL_FORMS
from glax._src.core.recurrence import Outputs
from glax._src.parallel.sharding import Spread, solve_on_mesh
from glax._src.solve.dispatch import Choice
from glax.testing.reference import reference, reference_gradient
from tests.cases import EXTREME, FORMS, Case, cotangents, inputs, recurrence
from tests.close import assert_gradients_close, assert_outputs_close
from tests.compiling import quick_jit
from tests.parallel.meshes import mesh_of, tree_close

P = PartitionSpec
WAITING = "none", "constant"  # gate forms for which shards never correct
TWO_PHASE = "none", "constant", "head", "key"  # gate forms that two-phase kernels support
# Empty sequences at the start, in the middle and at the end, one token, cuts inside shards and at edges, long sequences.
PACKED = dict(cuts=(0, 0, 30, 31, 31, 60, 93, 93), T=96)


def hold(case: Case, spread: Spread, strengths=("log-sigmoid",)):
    """Asserts that outputs and every gradient are within the tolerances of docs/numerics.md."""

    @quick_jit
    def run(r, *cotangents):
        out, pull = jax.vjp(
            lambda x: solve_on_mesh(Choice(), spread, x.replace(boundaries=r.boundaries)), r.replace(boundaries=None)
        )
        return out, pull(Outputs(*cotangents))[0]

    for strength in strengths:
        r = recurrence(case, strength)
        given = cotangents(case, r)
        out, gradient = run(r, *given)
        assert_outputs_close(r, out, reference(r), strength in EXTREME)
        assert_gradients_close(r, gradient, reference_gradient(r, *given), strength in EXTREME)


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize(
    ("form", "way"),
    [(form, "wait") for form in USUAL_FORMS]
    + [(form, "correct") for form in USUAL_FORMS if form not in WAITING]
    + [(form, "two_phase") for form in TWO_PHASE],
)
def test_sequence_parallel(form, way, kind, short_windows, request):
    """8 shards, T that 8 does not divide, shared heads and either direction. Each gate form has mild and strong decays."""
    if way == "correct":
        request.getfixturevalue("correcting")
    if way == "two_phase":
        begun = request.getfixturevalue("in_two_phases")
    reverse = (USUAL_FORMS.index(form) + (kind == "packed")) % 2 == 1
    shape = dict(B=2, T=77, heads=(4, 2, 2)) if kind == "plain" else PACKED | dict(heads=(2, 2, 1))
    case = Case("", gates=FORMS[form], K=8, V=6, reverse=reverse, **shape)
    strengths = ("log-sigmoid", "mild", "-100 on 5%", "-inf on 5%", "0") if FORMS[form] else ("log-sigmoid",)
    hold(case, Spread(mesh_of(s=8), sequence_axis="s"), strengths)
    assert way != "two_phase" or (any(".vjp/" in name for name in begun) and not all(".vjp/" in name for name in begun))


@pytest.mark.parametrize("shards", [1, 3, 4, 5])
def test_any_number_of_shards(shards, short_windows):
    case = Case("", gates=("gk",), K=8, V=6, reverse=shards == 3, **PACKED)
    hold(case, Spread(mesh_of(s=shards), sequence_axis="s"), ("mild",))


@pytest.mark.parametrize(
    "case",
    [
        Case("one token a shard and less", T=5, K=8, V=6),
        Case("all padding", cuts=(0, 0, 0), T=10, K=8, V=6),
        Case("one sequence over all", cuts=(0, 100), T=128, K=8, V=6),
        Case("no initial state", T=40, K=8, V=6, state_dtype=None),
        Case("bfloat16", B=2, T=200, dtype="bfloat16", gate_dtype="bfloat16", K=16, V=16),
    ],
    ids=str,
)
def test_edges(case):
    hold(case, Spread(mesh_of(s=8), sequence_axis="s"), ("mild",))


def test_a_long_sequence_in_windows_of_their_real_size(correcting):
    case = Case("", T=9200, gates=("gk", "gv"), K=4, V=4, heads=(1, 1, 1))
    hold(case, Spread(mesh_of(s=2), sequence_axis="s"), ("-0.004", "mild"))


def test_batch_heads_and_sequence_together(correcting):
    spread = Spread(mesh_of(b=2, h=2, s=2), "b", "h", "s")
    hold(Case("", B=2, T=41, heads=(4, 2, 1), gates=("gk", "gv"), K=8, V=6), spread, ("mild",))


# ---- what users call -------------------------------------------------------------------------------------------------

MESH = functools.cache(functools.partial(mesh_of, b=2, h=2, s=2))
AXES = dict(batch_axis="b", head_axis="h", sequence_axis="s")
CASE = Case("", B=2, T=44, heads=(4, 2, 2), gates=("gk",), K=8, V=6)


def loss(f, arguments, g_gamma, **options):
    output, state = f(**arguments, g_gamma=g_gamma, **options)
    return (output**2).sum() + (state**2).sum()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_under_jit_with_sharded_inputs(kind):
    """The gradient of g_gamma, one copy everywhere, is summed over the mesh once; automatic and explicit axes."""
    mesh = mesh_of(kind, b=2, h=2, s=2)
    arguments, gamma = inputs(CASE, "log-sigmoid"), -jnp.arange(4.0) / 8
    spec = {name: P("b", "h") if name == "initial_state" else P("b", "s", "h") for name in arguments}
    placed = {name: jax.device_put(x, NamedSharding(mesh, spec[name])) for name, x in arguments.items()}
    run = quick_jit(jax.value_and_grad(functools.partial(loss, parallel.recurrent, mesh=mesh, **AXES), argnums=(0, 1)))
    got = run(placed, jax.device_put(gamma, NamedSharding(mesh, P())))
    want = quick_jit(jax.value_and_grad(functools.partial(loss, glax.recurrent), argnums=(0, 1)))(arguments, gamma)
    tree_close(got, want)
    assert got[1][0]["query"].sharding.is_equivalent_to(placed["query"].sharding, 4)


@pytest.mark.parametrize("explicit", ["bhs", "h", "bs"])
def test_length_and_heads_that_explicit_axes_do_not_divide(explicit):
    """Types say equal shards alone: T=45 over 2 devices, and one head of values over 2."""
    kinds = tuple(AxisType.Explicit if name in explicit else AxisType.Auto for name in "bhs")
    mesh = jax.make_mesh((2, 2, 2), ("b", "h", "s"), kinds)
    case = dataclasses.replace(CASE, T=45, heads=(4, 2, 1), gates=FORMS["constant"])
    arguments = inputs(case, "log-sigmoid")
    gamma = arguments.pop("g_gamma")
    specs = dict(query=P("b", None, "h"), key=P(None, None, "s"), value=P("b"), initial_state=P("b", "h"))
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arguments.items()}
    run = quick_jit(jax.value_and_grad(functools.partial(loss, parallel.recurrent, mesh=mesh, **AXES), argnums=(0, 1)))
    got = run(placed, jax.device_put(gamma, NamedSharding(mesh, P())))
    want = quick_jit(jax.value_and_grad(functools.partial(loss, glax.recurrent), argnums=(0, 1)))(arguments, gamma)
    tree_close(got, want)


def test_outside_of_jit_and_by_the_mesh_in_use():
    arguments = inputs(CASE, "log-sigmoid")
    tree_close(parallel.recurrent(**arguments, mesh=MESH(), **AXES), glax.recurrent(**arguments), 2e-6)
    with jax.set_mesh(MESH()):
        got = jax.jit(lambda arguments: parallel.recurrent(**arguments, **AXES))(arguments)
    tree_close(got, glax.recurrent(**arguments), 2e-6)


def test_under_checkpoint_and_scan():
    """Three layers whose weights are scanned over, each recomputed for its gradient."""
    arguments = inputs(dataclasses.replace(CASE, heads=(4, 4, 4), V=8, state_dtype=None), "log-sigmoid")
    weights = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3

    def network(f, weights, arguments):
        @jax.checkpoint
        def layer(x, w):
            o = f(x @ w, arguments["key"], x, gk=arguments["gk"]).output
            return x + o, None

        return (jax.lax.scan(layer, arguments["value"], weights)[0] ** 2).sum()

    spread = functools.partial(parallel.recurrent, mesh=MESH(), **AXES)
    got, want = (
        quick_jit(jax.value_and_grad(functools.partial(network, f), argnums=(0, 1)))(weights, arguments)
        for f in (spread, glax.recurrent)
    )
    tree_close(got, want, 2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_by_vmap_in_parts(packed, in_two_phases):
    """What is begun goes through vmap to what finishes it."""
    case = Case("", B=2, T=48, gates=("gk",), K=8, V=6, heads=(2, 2, 2), state_dtype=None)
    arguments = {name: x[:, None] for name, x in inputs(case, "mild").items()}
    options = dict(cu_seqlens=jnp.array([0, 7, 40])) if packed else {}

    def gradient(f):
        def one(arguments):
            return (f(**arguments, **options).output ** 2).sum()

        return jax.jit(jax.vmap(jax.value_and_grad(one)))(arguments)

    spread = functools.partial(parallel.recurrent, mesh=mesh_of(s=4), sequence_axis="s")
    tree_close(gradient(spread), gradient(glax.recurrent), 2e-5)
    assert in_two_phases


@pytest.mark.parametrize("form", ["constant", "head", "key+value"])
def test_second_derivatives(form, request):
    """The derivative of every gradient in one direction, through shards that wait, and shards that correct (head)."""
    if form == "head":
        request.getfixturevalue("correcting")
    case = Case("", gates=FORMS[form], K=4, V=3, reverse=form == "head", **PACKED | dict(heads=(2, 1, 2)))
    arguments = inputs(case, "mild")
    options = dict(cu_seqlens=jnp.array(case.cuts), reverse=case.reverse)
    along = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), arguments)

    def directed(f, arguments):
        def value(arguments):
            output, state = f(**arguments, **options)
            return (output**2).sum() + (state**2).sum()

        gradient = jax.grad(value)
        return jax.grad(lambda x: sum(map(jnp.vdot, *map(jax.tree.leaves, (gradient(x), along)))))(arguments)

    spread = functools.partial(parallel.recurrent, mesh=mesh_of(s=4), sequence_axis="s")
    got, want = (quick_jit(functools.partial(directed, f))(arguments) for f in (spread, glax.recurrent))
    tree_close(got, want, 2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recurrent_gla", {}),
        ("simple_gla", {}),
        ("retention", {}),
        ("lightning_attention", {}),
        ("lightning_attention", dict(slopes="minimax")),
    ],
    ids=str,
)
def test_variants(name, options):
    arguments = inputs(dataclasses.replace(CASE, gates=()), "log-sigmoid")
    state = arguments.pop("initial_state")
    gates = dict(
        recurrent_gla=(inputs(CASE, "mild")["gk"],),
        simple_gla=(inputs(CASE, "mild")["gk"][..., 0],),
        retention=(),
        lightning_attention=(1, 4),
    )[name]
    tensors = (*arguments.values(), *gates)
    options = options | dict(initial_state=state, reverse=True)
    got = getattr(parallel, name)(*tensors, **options, mesh=MESH(), **AXES)
    tree_close(got, getattr(glax, name)(*tensors, **options), 2e-6)


def test_recurrent_attention_and_packed_rank_3():
    case = Case("", heads=(2, 2, 2), gates=("gk",), K=8, V=6, state_dtype=None, **PACKED)
    arguments = {name: x[0] for name, x in inputs(case, "mild").items()}
    options = dict(cu_seqlens=jnp.array(case.cuts), return_state=True)
    got = parallel.recurrent_attention(**arguments, **options, mesh=MESH(), head_axis="h", sequence_axis="s")
    tree_close(got, glax.recurrent_attention(**arguments, **options), 2e-6)
    whole = {name: x[:90] for name, x in arguments.items()}
    alone = parallel.recurrent_attention(**whole, mesh=MESH(), sequence_axis="s")
    tree_close(alone, glax.recurrent_attention(**whole), 2e-6)


@pytest.mark.fast
def test_nothing_to_solve():
    query = jnp.zeros((2, 0, 2, 8))
    output, state = parallel.recurrent(query, query, query, initial_state=jnp.ones((2, 8, 8)), mesh=MESH(), **AXES)
    assert output.shape == (2, 0, 2, 8)
    assert (state == 1).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "mesh must be given, or be in use by jax.set_mesh: there is none"),
        (dict(mesh=8), "mesh must be a jax.sharding.Mesh, got int"),
        (dict(mesh="m", sequence_axis="x"), r"sequence_axis must be of the mesh's axes \('b', 'h', 's'\), got 'x'"),
        (dict(mesh="m", sequence_axis=("b", "s")), r"sequence_axis must be of the mesh's axes"),
        (
            dict(mesh="m", head_axis="s", sequence_axis="s"),
            "sequence_axis must be another axis than head_axis, got 's'",
        ),
        (
            dict(mesh="m", head_axis=("h", "b")),
            r"head_axis must have a size that divides H=2, got \('h', 'b'\) of size 4",
        ),
        (dict(mesh="m", batch_axis="b"), "batch_axis must have a size that divides B=3, got 'b' of size 2"),
    ],
)
def test_errors_name_the_argument(options, message):
    query = jnp.zeros((3, 4, 2, 8))
    options = options | (dict(mesh=MESH()) if options.get("mesh") == "m" else {})
    with pytest.raises((ValueError, TypeError), match=message):
        parallel.recurrent(query, query, query, **options)


# ---- packing, where the sequence, the batch or both are sharded ------------------------------------------------------

LAYOUTS = dict(sequence=dict(sequence_axis="s"), batch=dict(batch_axis="b"), both=dict(AXES))


@pytest.mark.parametrize("layout", ["batch", "both"])
def test_the_batch_axis_shards_the_time_of_packed_sequences(layout):
    case = Case("", heads=(4, 2, 2), K=8, V=6, **PACKED)
    hold(case, Spread.of(MESH(), **dict(batch_axis=None, head_axis=None, sequence_axis=None) | LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["none", "constant", "key", "key+value"])
def test_segment_ids(form, layout):
    """T that 2 does not divide, segments that cross shards, padding of NaN; in either direction."""
    case = Case("", B=2, T=27, heads=(4, 2, 2), K=8, V=6, gates=FORMS[form])
    ids = jnp.array([[0] * 3 + [5] * 11 + [2] + [9] * 5 + [0] * 2 + [9] * 5, [4] * 27])
    arguments = inputs(case, "log-sigmoid")
    rows = [name for name in arguments if name not in ("g_gamma", "initial_state")]
    hidden = {name: (ids == 0).reshape(2, 27, *[1] * (arguments[name].ndim - 2)) for name in rows}
    arguments |= {name: jnp.where(hidden[name], jnp.nan, arguments[name]) for name in rows}
    gamma = arguments.pop("g_gamma", None)
    reverse = form in ("key", "none")
    options = dict(segment_ids=ids, pad_id=0, reverse=reverse)

    def both(f, **spread):
        return quick_jit(jax.value_and_grad(functools.partial(loss, f, **options, **spread), argnums=0))(
            arguments, gamma
        )

    tree_close(both(parallel.recurrent, mesh=MESH(), **LAYOUTS[layout]), both(glax.recurrent))


def test_segment_ids_along_explicit_axes():
    mesh = mesh_of(AxisType.Explicit, b=2, h=2, s=2)
    arguments, gamma = inputs(CASE, "log-sigmoid"), -jnp.arange(4.0) / 8
    B, T = arguments["query"].shape[:2]
    ids = jnp.arange(B * T).reshape(B, T) // 7
    spec = {name: P("b", "h") if name == "initial_state" else P("b", "s", "h") for name in arguments}
    placed = {name: jax.device_put(x, NamedSharding(mesh, spec[name])) for name, x in arguments.items()}
    there = dict(segment_ids=jax.device_put(ids, NamedSharding(mesh, P("b", "s"))), pad_id=1)

    def run(f, arguments, gamma, segment_ids, **spread):
        run = functools.partial(loss, f, pad_id=1, **spread)
        return quick_jit(jax.value_and_grad(lambda a, g, ids: run(a, g, segment_ids=ids), argnums=(0, 1)))(
            arguments, gamma, segment_ids
        )

    gamma_there = jax.device_put(gamma, NamedSharding(mesh, P()))
    got = run(parallel.recurrent, placed, gamma_there, there["segment_ids"], mesh=mesh, **AXES)
    tree_close(got, run(glax.recurrent, arguments, gamma, ids))
