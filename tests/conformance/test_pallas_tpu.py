"""The TPU kernels without a TPU: run in Pallas' TPU interpreter against the reference, and lowered for a TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

import glax
from glax import parallel
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig, TPUGradientConfig
from glax.testing.reference import reference, reference_gradient
from tests import strengths
from tests.cases import Case, all_cases, cotangents, inputs, recurrence
from tests.close import assert_gradients_close, assert_outputs_close
from tests.compiling import UNOPTIMIZED
from tests.poison import dispatched, leaks, operands_of, packed, segmented
from tests.suite import check_forward, check_gradient

load_kernels()
FORWARD = kernel_registry.kernels["chunked/pallas/tpu"]
BACKWARD = kernel_registry.kernels["chunked.vjp/pallas/tpu"]
CASES = {case.name: case for case in all_cases()}
PACKED = dict(cuts=(0, 0, 100, 101, 101, 250, 291, 291), T=300)  # also blocks of 128 that three sequences share


def case(name: str, *strengths: str, **changes) -> Case:
    strengths = strengths or CASES[name].strengths
    return dataclasses.replace(CASES[name], strengths=strengths, **changes)


# Gate forms, packing, direction, widths, groups of heads and dtypes. Each pair that meets in the code is there at least once.
SMALL = [
    case("none"),
    case("none-packed-reverse"),
    case("constant"),
    case("constant-packed-reverse", "log-sigmoid", "-20", "0"),
    case("head"),
    case("head-packed", "log-sigmoid", "-inf on 5%"),
    case("key"),
    case("key-packed", "mild", "-inf on 5%"),
    case("key-packed-reverse", "log-sigmoid", "-120", "-20", "-100 on 5%"),
    case("T1"),
    case("T1000"),
    case("K64V64"),
    case("K64V256"),
    case("K128V60"),
    case("heads4-2-1-packed"),
    case("heads2-3-6-packed"),
    case("bfloat16-constant"),
    case("bfloat16-head"),
    case("bfloat16-key"),
    case("bfloat16-gates"),
    case("bfloat16-packed"),
    case("float16-gates"),
    case("no-state-packed"),
    case("all-padding"),
    case("chunk64", "log-sigmoid", "-100 on 5%"),
    Case("pairs-head", heads=(4, 4, 4), K=64, V=64, gates=("g",), **PACKED),
    Case("pairs-key-reverse", heads=(4, 4, 4), K=64, V=64, reverse=True, strengths=("mild", "-20"), **PACKED),
    Case("groups-key", heads=(4, 2, 1), T=140, strengths=("log-sigmoid", "-100 on 5%")),
    Case("bfloat16-128", T=300, K=128, V=128, gates=("g",), dtype="bfloat16", gate_dtype="bfloat16"),
    Case("bfloat16-128-key", T=260, K=128, V=128, dtype="bfloat16", gate_dtype="bfloat16", strengths=("mild", "-100 on 5%")),
]  # fmt: skip
# A gradient compiles slowly for the interpreter. These cases add no coverage of the gradient.
FORWARD_ONLY = (
    "none-packed-reverse", "constant", "key-packed", "K128V60", "heads4-2-1-packed", "bfloat16-key", "float16-gates",
    "pairs-key-reverse", "K64V256", "no-state-packed", "bfloat16-constant",
)  # fmt: skip
GRADIENT = [case for case in SMALL if case.name not in FORWARD_ONLY]


def configured(case: Case, spec):
    return spec.config() if case.chunk is None else spec.config(chunk=case.chunk)


def interpreted(f, **options):
    """Returns jit(f) in the TPU interpreter. Memory starts as NaN, and a read out of bounds raises an error."""
    options = dict(uninitialized_memory="nan", out_of_bounds_reads="raise") | options

    def run(*args):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**options)):
            return jax.block_until_ready(compiled(*args))

    compiled = jax.jit(f, compiler_options=UNOPTIMIZED)
    return run


@pytest.mark.parametrize("pack", [segmented, packed])
@pytest.mark.parametrize(
    "spec,form", [(FORWARD, "none"), (FORWARD, "key"), (BACKWARD, "head")], ids=["none", "key", "gradient"]
)
def test_a_poisoned_document_harms_no_other(spec, form, pack):
    layout = pack()
    operands = operands_of(layout.case(form, heads=(1, 1, 1)))
    program = interpreted(dispatched(spec, functools.partial(spec.run, config=spec.config())))
    found = leaks(layout, operands, *((None, program) if spec.is_gradient else (program, None)), few=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_forward(case):
    assert FORWARD.supports(recurrence(case, case.strengths[0])) is None
    check_forward(case, interpreted(functools.partial(FORWARD.run, config=configured(case, FORWARD))))


@pytest.mark.parametrize("case", GRADIENT, ids=str)
def test_gradient(case):
    check_gradient(case, interpreted(functools.partial(BACKWARD.run, config=configured(case, BACKWARD))))


@pytest.mark.parametrize("form", ["key", "head"])
def test_gates_near_the_limits(form):
    """Gates just inside and just outside of each limit. Each head has its own program, since a program checks all its heads."""
    r, *d = strengths.problem(form, half=16, T=72, K=128, dtype="float32")
    forward, backward = (
        interpreted(functools.partial(spec.run, config=spec.config(chunk=32, units=1))) for spec in (FORWARD, BACKWARD)
    )
    strengths.assert_right(r, *d, forward(r), backward(r, *d))


RACES = [
    Case("head", T=64, heads=(2, 2, 2), K=128, V=128, gates=("g",)),
    Case("key-packed-reverse", T=60, heads=(2, 2, 2), K=128, V=128, cuts=(0, 20, 50), reverse=True),
]


@pytest.mark.parametrize("case", [pytest.param(RACES[0], marks=pytest.mark.fast), RACES[1]], ids=str)
def test_no_races(case):
    """Every reader of a block waits for its writer, in any order of the parallel axes of the grid."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    r = recurrence(case, "log-sigmoid")
    d = cotangents(case, r)
    options = dict(detect_races=True, num_cores_or_threads=2, random_seed=1)
    got = interpreted(functools.partial(FORWARD.run, config=TPUChunkedConfig(32, 1)), **options)(r)
    assert_outputs_close(r, got, reference(r))
    assert not interpreter.races.races_found
    got = interpreted(functools.partial(BACKWARD.run, config=TPUGradientConfig(32, 1)), **options)(r, *d)
    assert_gradients_close(r, got, reference_gradient(r, *d))
    assert not interpreter.races.races_found


# ---- lowering --------------------------------------------------------------------------------------------------------


CHUNKS = (32, 64, 128, 256)  # of the configs; a case of another size is one of no size again


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in CASES.values() if c.chunk is None or c.chunk in CHUNKS], ids=str)
def test_lowers(case, dtype):
    """Mosaic lowers every case that the interpreter runs. The kernels refuse the others with a reason."""
    r = jax.eval_shape(lambda: recurrence(dataclasses.replace(case, dtype=dtype), case.strengths[0]))
    if "gv" in case.gates:
        assert FORWARD.other_form(r, r.decay.form) == BACKWARD.other_form(r, r.decay.form)
        assert "of the form none, constant, head, key; got" in FORWARD.other_form(r, r.decay.form)
        return
    chunks = {} if case.chunk is None else dict(chunk=case.chunk)
    config = FORWARD.config.heuristic(r), BACKWARD.config.heuristic(r)
    forward, backward = (dataclasses.replace(each, **chunks) for each in config)
    text = lowered(functools.partial(FORWARD.run, config=forward), r)
    assert text.count("tpu_custom_call") == 1
    text = lowered(functools.partial(BACKWARD.run, config=backward), r, *cotangents(case, r))
    assert text.count("tpu_custom_call") == 2


LOWERED = dict(B=4, T=130, heads=(8, 8, 8), K=64, V=64, dtype="bfloat16")


@pytest.mark.fast
@pytest.mark.parametrize("gates", [("g",), ("gk",), ("g_gamma",)], ids=lambda gates: gates[0])
def test_export(on_tpu, gates):
    """The public function and its gradient can be exported for TPUs, with kernels chosen by priority."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers, which is not installed")
    arguments = inputs(Case("", gates=gates, **LOWERED), "log-sigmoid")

    def loss(arguments):
        output, state = glax.recurrent(**arguments)
        return (output.astype(jnp.float32) ** 2).sum() + state.sum()

    calls = {functools.partial(lambda a: glax.recurrent(**a).output): 1, jax.value_and_grad(loss): 3}
    for f, kernels in calls.items():
        exported = jax.export.export(jax.jit(f), platforms=["tpu"])(arguments)
        again = jax.export.deserialize(exported.serialize())
        assert again.platforms == ("tpu",)
        assert again.out_avals == exported.out_avals
        assert again.mlir_module().count("tpu_custom_call") == kernels
        assert jax.tree.leaves(jax.eval_shape(f, arguments))[0].shape == again.out_avals[0].shape


@pytest.mark.fast
@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
def test_shard_map(on_tpu, spec):
    """The kernels' results vary over the mesh as their inputs do, sharded over the batch or over the heads."""
    P = PartitionSpec
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    arguments = inputs(Case("", gates=("gk",), **LOWERED | dict(T=131)), "log-sigmoid")
    specs = {name: P(*spec) for name in arguments}
    specs["initial_state"] = P(*spec) if spec[0] else P(None, "x")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=P())
    def loss(arguments):
        output, state = glax.recurrent(**arguments)
        return jax.lax.psum((output.astype(jnp.float32) ** 2).sum() + state.sum(), "x")

    assert lowered(jax.value_and_grad(loss), arguments).count("tpu_custom_call") == 3


@pytest.mark.fast
@pytest.mark.parametrize("cuts", [None, (0, 70, 300, 520)], ids=["whole", "packed"])
def test_sequence_axis(on_tpu, cuts):
    """With a sharded sequence, packed or not, the kernels run on every shard's rows, forward and backward."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    B, boundaries = (4, None) if cuts is None else (1, jnp.array(cuts, jnp.int32))
    arguments = inputs(Case("", gates=("gk",), cuts=cuts, **LOWERED | dict(B=B, T=520)), "log-sigmoid")

    def loss(arguments):
        output, state = parallel.recurrent(**arguments, cu_seqlens=boundaries, mesh=mesh, sequence_axis="x")
        return (output.astype(jnp.float32) ** 2).sum() + state.sum()

    assert lowered(jax.value_and_grad(loss), arguments).count("tpu_custom_call") == 3


def test_shard_map_numbers():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("x")
    r = recurrence(Case("", B=2, T=40, gates=("g",)), "log-sigmoid")
    run = functools.partial(FORWARD.run, config=TPUChunkedConfig(32))
    got = interpreted(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(r)
    assert_outputs_close(r, got, reference(r))


def test_sequence_axis_numbers(on_tpu):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    case = Case("", T=80, heads=(1, 1, 1), gates=("g",))
    options = dict(mesh=mesh, sequence_axis="x", cfg=TPUChunkedConfig(32))
    run = functools.partial(parallel.recurrent, **options)
    got = interpreted(lambda arguments: run(**arguments))(inputs(case, "log-sigmoid"))
    r = recurrence(case, "log-sigmoid")
    assert_outputs_close(r, got, reference(r))


# ---- choice and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_choice(on_tpu):
    r = recurrence(CASES["key"], "log-sigmoid")
    assert kernel_registry.find(r).name == "chunked/pallas/tpu"
    for refused in (recurrence(CASES["value"], "mild"), recurrence(CASES["float16-key"], "mild")):
        assert kernel_registry.find(refused).platform == "xla"
        with pytest.raises(glax.UnsupportedError, match=r"got value \(given by gv\)|query is float16"):
            kernel_registry.find(refused, glax.Platform.PALLAS)


@pytest.mark.fast
def test_calls_that_use_xla(on_tpu):
    """The kernels refuse calls that do not fit a TPU's memories, with a reason. Calls of a few tokens use XLA for speed."""
    array = jax.ShapeDtypeStruct
    wide = recurrence(Case("", gates=()), "0").replace(
        q=array((1, 64, 2, 640), "float32"), k=array((1, 64, 2, 640), "float32")
    )
    wide = wide.replace(v=array((1, 64, 2, 512), "float32"))
    assert "key (K) 640 wide and value (V) 512 wide in float32 do not fit VMEM" in FORWARD.supports(wide)
    many = recurrence(CASES["key-packed"], "0").replace(boundaries=array((30_001,), "int32"))
    assert "in 30000 sequences do not fit scalar memory" in BACKWARD.supports(many)
    short = recurrence(CASES["T2"], "log-sigmoid")
    assert kernel_registry.find(short).name == "recurrent/xla/any" and FORWARD.supports(short) is None


@pytest.mark.fast
def test_refused_elsewhere():
    q = jnp.ones((1, 8, 2, 16))
    with pytest.raises(glax.UnsupportedError, match="chunked/pallas/tpu: needs a tpu, JAX computes on cpu here"):
        glax.recurrent(q, q, q, platform="pallas")


@pytest.mark.fast
@pytest.mark.parametrize("bad", [dict(chunk=100), dict(chunk=16), dict(units=0), dict(units=1.0)], ids=str)
def test_config_refuses(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        TPUChunkedConfig(**bad)


# ---- the scan --------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_row_once(reverse, adjoint):
    """With packing, a row of a sequence is in one step, a block in consecutive steps, and a sequence begins and ends once."""
    from glax._src.kernels.pallas_tpu.plan import Plan

    rng = np.random.default_rng(0)
    table_of = jax.jit(lambda r: Plan.of(r, 32, 1, gradient=False).table(r))
    for trial in range(20):
        cuts = np.sort(rng.integers(0, 200, size=7)).astype(np.int32)
        cuts = cuts if trial else np.array([0, 0, 64, 64, 96, 200, 200], np.int32)
        r = recurrence(Case("", T=200, K=8, V=8, cuts=(0,) * 7, reverse=reverse, state_dtype=None), "0")
        r = r.replace(boundaries=jnp.asarray(cuts))
        plan = dataclasses.replace(Plan.of(r, 32, 1, gradient=False), adjoint=adjoint)
        table = np.asarray(table_of(r))
        steps = [plan.step(0, m, table) for m in range(plan.steps)]
        seen, begun, ended, first_visits = np.zeros(200, int), [], [], []
        for step in steps:
            rows = slice(step.block * 32 + step.low, step.block * 32 + max(step.low, step.high))
            seen[rows] += 1
            n = int(step.sequence)
            if step.begins:
                assert len(begun) == len(ended)
                begun.append(n)
            if step.high > step.low:
                assert begun[-1] == n and len(ended) == len(begun) - 1
                assert cuts[n] <= rows.start and rows.stop <= cuts[n + 1]
            if step.ends:
                ended.append(n)
            if step.first_visit:
                first_visits.append(int(step.block))
        inside = (np.arange(200) >= cuts[0]) & (np.arange(200) < cuts[-1])
        assert (seen == inside).all()
        order = range(6) if reverse == adjoint else reversed(range(6))
        assert begun == ended == list(order)
        assert sorted(first_visits) == list(range(7))


def test_cost_estimate():
    """The cost estimate has the floating-point operations and the bytes of the formula."""
    B, T, H, D, C = 2, 256, 4, 128, 128
    x = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
    r = recurrence(Case("", gates=(), state_dtype=None), "0").replace(q=x, k=x, v=x)
    r = r.replace(scale=jax.ShapeDtypeStruct((B,), jnp.float32))
    jaxpr = jax.make_jaxpr(functools.partial(FORWARD.run, config=TPUChunkedConfig()))(r)
    (call,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    cost = call.params["cost_estimate"]
    assert cost.flops == 4 * 2 * B * (T // C) * H * C * D * D
    assert cost.bytes_accessed == 4 * B * T * H * D * 2 + B * H * D * D * 4
    assert cost.transcendentals == 0
