"""Batches and heads sharded over devices."""

import functools
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import glax
import glax.parallel
from glax._src.core import backend, files
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax._src.solve import partitioning
from glax._src.solve.lowering import warn_of_automatic_axes
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

P = PartitionSpec
CASE = Case("", B=4, T=40, heads=(4, 2, 4), gates=("gk", "gv"), K=6, V=5)
ARGUMENTS = inputs(CASE, "log-sigmoid")
GAMMA = -jnp.arange(4.0) / 8


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))


def loss(arguments, g_gamma, cfg):
    output, state = glax.recurrent(**arguments, g_gamma=g_gamma, cfg=cfg)
    return (output**2).sum() + (state**2).sum()


@pytest.mark.parametrize("cfg", [None, ChunkedConfig(16)], ids=["recurrent", "chunked"])
def test_shard_map_on_the_batch(mesh, cfg):
    """Each device solves its sequences; the gradient of the replicated g_gamma is summed over the devices, once."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("batch"), P()), out_specs=P())
    def sharded(arguments, g_gamma):
        return jax.lax.psum(loss(arguments, g_gamma, cfg), "batch")

    got = quick_jit(jax.value_and_grad(sharded, argnums=(0, 1)))(ARGUMENTS, GAMMA)
    want = quick_jit(jax.value_and_grad(functools.partial(loss, cfg=cfg), argnums=(0, 1)))(ARGUMENTS, GAMMA)
    close(got, want)


def test_gradient_inside_shard_map(mesh):
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("batch"), P()), out_specs=(P("batch"), P()))
    def sharded(arguments, g_gamma):
        return jax.grad(functools.partial(loss, cfg=ChunkedConfig(16)), argnums=(0, 1))(arguments, g_gamma)

    want = quick_jit(jax.grad(functools.partial(loss, cfg=ChunkedConfig(16)), argnums=(0, 1)))(ARGUMENTS, GAMMA)
    close(quick_jit(sharded)(ARGUMENTS, GAMMA), want)


def test_packed_inside_shard_map(mesh):
    """Each device holds one packed row with its own boundaries."""
    arguments = {name: x for name, x in ARGUMENTS.items() if name != "initial_state"}
    cuts = jnp.array([[0, 0, 40], [0, 7, 30], [0, 40, 40], [0, 1, 2]])

    def one(arguments, cuts):
        arguments = {name: x for name, x in arguments.items()}
        return glax.recurrent(**arguments, cu_seqlens=cuts[0], cfg=ChunkedConfig(16)).output

    sharded = jax.shard_map(one, mesh=mesh, in_specs=(P("batch"), P("batch")), out_specs=P("batch"))
    got = quick_jit(sharded)(arguments, cuts)
    each = quick_jit(one)
    want = [each({name: x[i : i + 1] for name, x in arguments.items()}, cuts[i : i + 1]) for i in range(4)]
    close(got, jnp.concatenate(want))


@pytest.mark.parametrize("spec", [P("batch"), P(None, None, "batch")], ids=["batch", "heads"])
def test_jit_with_sharded_inputs(mesh, spec):
    """No helper: arrays that are already spread over the batch or the heads."""
    case = Case("", B=4, T=40, heads=(4, 4, 4), gates=("gk",), K=6, V=5, state_dtype=None)
    arguments = inputs(case, "log-sigmoid")
    placed = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, x in arguments.items()}
    run = quick_jit(jax.value_and_grad(functools.partial(loss, g_gamma=GAMMA, cfg=ChunkedConfig(16))))
    close(run(placed), run(arguments))


@pytest.mark.parametrize("f", [loss, jax.grad(loss)], ids=["forward", "gradient"])
def test_without_shardy_there_is_an_error(mesh, f):
    """XLA itself would end the process. On one device it is not needed."""
    run = quick_jit(functools.partial(f, g_gamma=GAMMA, cfg=None))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        run(ARGUMENTS)
        with pytest.raises(NotImplementedError, match=r"glax .*jax_use_shardy_partitioner=False"):
            run(jax.device_put(ARGUMENTS, NamedSharding(mesh, P("batch"))))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.fast
@pytest.mark.parametrize("cfg", [None, ChunkedConfig(16)], ids=["native", "chunked"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map_over_the_batch_alone(kind, cfg):
    """Heads are spread over the axis that is left, which no shard_map names: outputs and gradients, from inside and outside."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), (kind,) * 2, devices=jax.devices()[:4])
    case = Case("", B=2, T=20, heads=(4, 1, 4), gates=("gk",), K=6, V=5)
    arguments = inputs(case, "log-sigmoid")
    spec = dict(key=P("batch"), initial_state=P("batch", "heads"))
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, spec.get(name, P("batch", None, "heads"))))
        for name, x in arguments.items()
    }
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, axis_names={"batch"}, in_specs=P("batch"), out_specs=P("batch")
    )
    run = functools.partial(glax.recurrent, cfg=cfg)

    def whole(run, arguments):
        return sum((x**2).sum() for x in run(**arguments))

    want = quick_jit(jax.grad(functools.partial(whole, run)))(arguments)
    close(quick_jit(sharded(jax.grad(functools.partial(whole, run))))(placed), want)
    spread = sharded(lambda arguments: run(**arguments))
    outside = quick_jit(jax.grad(lambda arguments: sum((x**2).sum() for x in spread(arguments))))
    close(outside(placed), want)
    if kind is AxisType.Auto:  # JAX 0.10 itself gathers explicit ones
        assert "all-gather" not in outside.lower(placed).compile().as_text()


@pytest.mark.fast
@pytest.mark.parametrize("over", [("heads",), ("batch", "heads")], ids=str)
def test_an_axis_that_does_not_divide_the_heads_shards_channels(over):
    """Two heads of channels that four devices shard: the kernel's operands are gathered over that axis, and nothing fails."""
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), (AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (4, 20, 16))
    placed = jax.device_put(x, NamedSharding(mesh, P("batch" if "batch" in over else None, None, "heads")))

    def whole(x):
        q = x.reshape(4, 20, 2, 8)
        return (glax.recurrent(q, q, q, gk=-jnp.abs(q)).output ** 2).sum()

    close(quick_jit(jax.value_and_grad(whole))(placed), quick_jit(jax.value_and_grad(whole))(x))


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("sharded", x, np.asarray(y), 2e-6)


@pytest.mark.fast
def test_compiled_programs_are_named_by_the_code_of_the_whole_package():
    assert files.PACKAGE.samefile(pathlib.Path(glax.__file__).parent)


@pytest.mark.fast
def test_compiled_programs_have_no_name_of_code_that_was_edited(mesh, monkeypatch):
    x = jax.ShapeDtypeStruct((4, 32, 2, 4), jnp.float32, sharding=NamedSharding(mesh, P("batch")))
    for is_edited in (False, True):
        monkeypatch.setattr(partitioning, "is_edited", functools.partial(bool, is_edited))
        jax.clear_caches()
        text = jax.jit(lambda q: glax.recurrent(q, q, q).output).lower(x).as_text()
        assert ('backend_config = "glax ' in text) is not is_edited


def test_segments_stay_apart_on_a_mesh():
    """NaN in one segment reaches no other one where batch and heads are sharded, in outputs and in gradients."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = jnp.sin(jnp.arange(2 * 24 * 2 * 8.0)).reshape(2, 24, 2, 8)
    ids = jnp.asarray([[1] * 9 + [2] * 10 + [3] * 5] * 2)

    @jax.jit
    def run(x, value):
        def f(x):
            return glax.parallel.recurrent(
                x, x, value, gk=-abs(x), segment_ids=ids, mesh=mesh, batch_axis="b", head_axis="h"
            ).output

        output, pull = jax.vjp(f, x)
        return output, pull(output)[0]

    clean, spoiled = run(x, x), run(x, x.at[0, 12].set(jnp.nan))
    expected = glax.recurrent(x, x, x, gk=-abs(x), segment_ids=ids).output
    assert_close("output", clean[0], expected, 2e-5)
    others = jnp.asarray(ids[0] != 2)
    for got, want in zip(spoiled, clean, strict=True):
        assert_close("row 1", got[1], want[1], 2e-5)
        assert_close("other segments", got[0, others], want[0, others], 2e-5)
        assert jnp.isnan(got[0, 12:19]).any()


def program_for_tpus(mesh, **options) -> str:
    """The gradient of a call whose rows lie on a mesh, lowered for a TPU on a machine without one."""
    x = jax.ShapeDtypeStruct((4, 64, 2, 64), jnp.float32, sharding=NamedSharding(mesh, P("batch")))

    def total(q):
        return glax.recurrent(q, q, q, gk=-abs(q), **options).output.sum()

    return jax.jit(jax.grad(total)).trace(x).lower(lowering_platforms=("tpu",)).as_text()


def test_a_program_for_tpus_on_explicit_axes_has_the_kernels_of_each_devices_rows():
    """The mesh is of TPUs, and this machine, for which the kernel was first chosen, is not."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((4,), ("batch",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = program_for_tpus(mesh)
    assert "tpu_custom_call" in text and "all_gather" not in text and "glax_forward" not in text


def test_a_program_for_tpus_on_automatic_axes_has_xlas_kernels_and_says_so_once(mesh, monkeypatch):
    monkeypatch.setattr(backend, "target_platform", lambda: backend.lowering_platform.value or "tpu")
    warn_of_automatic_axes.cache_clear()
    with pytest.warns(UserWarning, match="XLA's kernels .* explicit axes") as said:
        assert all("tpu_custom_call" not in program_for_tpus(mesh) for _ in range(2))
    assert len(said) == 1
    with pytest.raises(glax.UnsupportedError, match="over automatic axes on a TPU"):
        program_for_tpus(mesh, platform="pallas")
