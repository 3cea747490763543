"""A program has the kernels of the platform that it is lowered for, whatever it was traced for."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import glax
from glax._src.core.recurrence import Residuals
from glax._src.kernels import load_kernels
from glax._src.kernels.cpu.library import missing
from glax._src.kernels.cpu.recurrent import NativeConfig
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import UNOPTIMIZED, quick_jit

pytestmark = pytest.mark.fast
needs_native = pytest.mark.skipif(missing() is not None, reason=f"needs the native library: {missing()}")

ARGUMENTS = inputs(Case("", B=2, T=40, heads=(2, 2, 2), K=16, V=16), "log-sigmoid")
TOKEN = {name: x[:, 0] for name, x in ARGUMENTS.items() if name != "initial_state"}
SLOTS, POOL = jnp.array([3, -1]), jnp.ones((5, 2, 16, 16))


def loss(arguments, **options):
    output, state = glax.recurrent(**arguments, **options)
    return (output**2).sum() + (state**2).sum()


def prefill(arguments, pool, slots):
    rows = {name: x for name, x in arguments.items() if name != "initial_state"}
    return glax.prefill_into(**rows, pool=pool, slots=slots)


def step(token, pool, slots=None):
    return glax.recurrent_step(**token, state=pool, slots=slots)


def verify(arguments):
    rows = {name: x for name, x in arguments.items() if name != "initial_state"}
    return glax.recurrent_verify(**rows, state=arguments["initial_state"])


CALLS = dict(
    forward=(lambda arguments: glax.recurrent(**arguments), ARGUMENTS),
    gradient=(jax.grad(loss), ARGUMENTS),
    vmap=(lambda batch: jax.vmap(lambda a: glax.recurrent(**a))(batch), jax.tree.map(lambda x: x[None], ARGUMENTS)),
    prefill=(prefill, ARGUMENTS, POOL, SLOTS),
    verify=(verify, ARGUMENTS),
    step=(step, TOKEN, POOL[:2]),
    pool=(step, TOKEN, POOL, SLOTS),
)


def foreign_code(lowered) -> set[str]:
    return set(re.findall(r"custom_call @(glax_\w+|tpu_custom_call)", lowered.as_text()))


@needs_native
@pytest.mark.parametrize("call", CALLS)
def test_each_platform_has_its_own_kernels(call):
    f, *operands = CALLS[call]
    traced = jax.jit(f).trace(*operands)
    native = foreign_code(traced.lower())
    assert native and all(name.startswith("glax_") for name in native)
    tpu = foreign_code(traced.lower(lowering_platforms=("tpu",)))
    assert tpu == {"tpu_custom_call"}
    for unknown in ("cuda", "rocm", "no_such_platform"):  # of GPUs it is not known which this would be
        assert foreign_code(traced.lower(lowering_platforms=(unknown,))) == set()
    assert foreign_code(traced.lower(lowering_platforms=("cpu", "tpu"))) == native | tpu


@needs_native
@pytest.mark.parametrize("options", [dict(platform="cpp"), dict(cfg=NativeConfig(12))], ids=["platform", "cfg"])
@pytest.mark.parametrize("f", [loss, jax.grad(loss)], ids=["forward", "gradient"])
def test_what_was_insisted_on_is_not_replaced(f, options):
    traced = jax.jit(functools.partial(f, **options)).trace(ARGUMENTS)
    with pytest.raises(glax.UnsupportedError, match="recurrent/cpp/cpu: needs a cpu, the program is lowered for tpu"):
        traced.lower(lowering_platforms=("tpu",))


def for_device(platform: str):
    """Inside, programs are traced for such a device."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Of this platform alone: numbers are wrong wherever they run, and what they keep has shapes of their own."""
    load_kernels()
    chunked = glax.kernel_registry.kernels["chunked/xla/any"]
    gradient = glax.kernel_registry.kernels["chunked.vjp/xla/any"]

    def wrong(r, *, config):
        outputs = chunked.run(r, config=config)
        return jax.tree.map(lambda x: x + 1, outputs)

    def wrong_with_residuals(r, *, config):
        B, H = r.q.shape[0], r.num_heads
        return wrong(r, config=config), Residuals(jnp.ones((B, 7, H, 3, 5)), jnp.ones((B, 9, H), jnp.int32))

    def wrong_gradient(r, d_output, d_final, residuals=None, *, config):
        assert residuals is None or residuals.states.shape[1] == 7
        return jax.tree.map(lambda x: x + 1, gradient.run(r, d_output, d_final, config=config))

    here = dict(platform=glax.Platform.CUDA, backend=glax.Backend.GPU, priority=lambda r: 100)
    specs = (
        dataclasses.replace(
            chunked, run=wrong, forward_with_residuals=wrong_with_residuals, saves_residuals=lambda r: True, **here
        ),
        dataclasses.replace(gradient, run=wrong_gradient, **here),
    )
    for spec in specs:
        monkeypatch.setitem(glax.kernel_registry.kernels, spec.name, spec)
    yield
    jax.clear_caches()


def test_gpus_of_amd_run_the_kernels_of_every_device(gpu_kernels, monkeypatch):
    client = mock.Mock(platform_version="rocm 60300")
    device = mock.Mock(client=client, device_kind="AMD Instinct MI300X", compute_capability="gfx942")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    with for_device("gpu"):
        (decision,) = glax.explain(lambda: glax.recurrent(**ARGUMENTS))
    assert decision.kernel == "chunked/xla/any"
    assert decision.refused["chunked/cuda/gpu"] == "needs a gpu, JAX computes on rocm here"


def run_here(f, *operands):
    """Traced for a GPU, compiled for CPUs."""
    with for_device("gpu"):
        assert {d.kernel.split("/")[1] for d in glax.explain(f, *operands)} == {"cuda"}
        traced = jax.jit(f, compiler_options=UNOPTIMIZED).trace(*operands)
    return traced.lower().compile()(*operands)


@pytest.mark.parametrize("batched", [False, True], ids=["one", "vmap"])
def test_a_gradient_traced_for_another_backend(batched, gpu_kernels):
    """Which of the other backend's residuals this one's gradient cannot use."""
    f, operands = jax.value_and_grad(loss), ARGUMENTS
    if batched:
        f, operands = jax.vmap(f), jax.tree.map(lambda x: jnp.stack([x, -x]), ARGUMENTS)
        operands["gk"] = -jnp.abs(operands["gk"])
    want = quick_jit(f)(operands)
    for x, y in zip(jax.tree.leaves(run_here(f, operands)), jax.tree.leaves(want), strict=True):
        assert_close("traced elsewhere", x, y, 1e-6)


def test_spread_over_devices_and_traced_for_another_backend(gpu_kernels):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(ARGUMENTS, NamedSharding(mesh, PartitionSpec("batch")))
    want = quick_jit(jax.value_and_grad(loss))(ARGUMENTS)
    got = run_here(jax.value_and_grad(loss), spread)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("spread", x, y, 1e-6)


@needs_native
def test_the_default_device_decides(monkeypatch):
    """A CPU on a machine whose default backend is another; and where a trace guessed wrong, lowering puts it right."""
    want = glax.recurrent(**ARGUMENTS).output
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert glax.explain(lambda: glax.recurrent(**ARGUMENTS))[0].kernel == "recurrent/cpp/cpu"
    lowered = jax.jit(lambda a: glax.recurrent(**a).output).lower(ARGUMENTS)
    assert foreign_code(lowered) == {"glax_forward"}
    assert_close("output", lowered.compile()(ARGUMENTS), want, 1e-6)


def test_a_backend_of_unknown_name(monkeypatch):
    """XLA's kernels serve."""
    want = glax.recurrent(**ARGUMENTS).output
    monkeypatch.setattr(jax, "default_backend", lambda: "Metal")
    jax.clear_caches()  # which hold what was chosen for the true name
    found = glax.explain(lambda: glax.recurrent(**ARGUMENTS))[0]
    assert found.invocation.kernel.platform is glax.Platform.XLA
    assert found.refused["recurrent/cpp/cpu"] == "needs a cpu, JAX computes on Metal here"
    assert_close("output", glax.recurrent(**ARGUMENTS, platform="xla").output, want, 1e-5)
    with pytest.raises(glax.UnsupportedError, match="needs a cpu, JAX computes on Metal here"):
        glax.recurrent(**ARGUMENTS, platform="cpp")
    jax.clear_caches()


def test_without_jit():
    with jax.disable_jit():
        got = glax.recurrent(**ARGUMENTS)
    for x, y in zip(got, glax.recurrent(**ARGUMENTS), strict=True):
        assert_close("result", x, y, 1e-6)


def test_gradient_of_packed_sequences_without_jit():
    case = Case("", T=9, K=4, V=4, cuts=(0, 3, 3, 9))
    arguments = inputs(case, "log-sigmoid")

    def gradient():
        run = functools.partial(glax.recurrent, cu_seqlens=jnp.asarray(case.cuts), platform="xla")
        return jax.grad(lambda x: (run(**x).output ** 2).sum())(arguments)

    with jax.disable_jit():
        got = gradient()
    for name, want in gradient().items():
        assert_close(name, got[name], want, 1e-6)
