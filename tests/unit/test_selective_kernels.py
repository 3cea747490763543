"""Which kernel runs a selective scan: what is chosen, what is refused and why, and programs for other machines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.kernels.cpu import library
from glax._src.solve import selective_scan as solver
from tests.close import assert_close

T, D, N = 9, 6, 4


@pytest.fixture
def one_device(monkeypatch):
    """Makes calls of this process ones of a process with one device."""
    monkeypatch.setattr(solver, "spread_refusal", lambda: None)


def arrays(dtype="float32") -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    found = dict(x=rng.normal(size=(1, T, D)), dt=rng.random((1, T, D)), A=-rng.random((D, N)))
    found |= dict(B=rng.normal(size=(1, T, N)), C=rng.normal(size=(1, T, N)))
    return {name: jnp.asarray(x, dtype) for name, x in found.items()}


def token() -> dict[str, jax.Array]:
    found = {name: x if name == "A" else x[:, 0] for name, x in arrays().items()}
    return found | dict(state=jnp.ones((1, D, N)))


def kernels(f, *args, **options) -> list[str]:
    return [decision.kernel for decision in glax.explain(f, *args, **options)]


def test_native_code_is_chosen_for_the_scan_its_gradient_and_the_step(one_device):
    def loss(arrays):
        return glax.selective_scan(**arrays).output.sum()

    assert kernels(jax.grad(loss), arrays()) == ["selective_scan/cpp/cpu", "selective_scan.vjp/cpp/cpu"]
    assert kernels(glax.selective_scan_step, **token()) == ["selective_scan.step/cpp/cpu"]
    (decision,) = glax.explain(glax.selective_scan_step, **token())
    assert decision.outranked == {"selective_scan.step/xla/any": "able, and slower than selective_scan.step/cpp/cpu"}
    assert glax.detect_platform(glax.selective_scan, **arrays()) is glax.Platform.CPP
    assert kernels(glax.selective_scan, **arrays(), platform="xla") == ["selective_scan/xla/any"]


def test_explain_says_why_native_code_does_not_run(one_device):
    def reason(f, *args, **options):
        (decision,) = glax.explain(f, *args, **options)
        assert decision.invocation.kernel.platform is glax.Platform.XLA
        return next(why for kernel, why in decision.refused.items() if kernel.endswith("/cpp/cpu"))

    with jax.enable_x64(True):
        assert "takes float32, bfloat16 and float16, x is float64" in reason(glax.selective_scan, **arrays("float64"))
    (t,) = jax.export.symbolic_shape("t")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays().items()}
    shapes |= {name: jax.ShapeDtypeStruct((1, t, *x.shape[2:]), x.dtype) for name, x in shapes.items() if name != "A"}
    assert "not symbols" in reason(glax.selective_scan, **shapes)
    own = token() | dict(state=jnp.ones((1, D, N), jnp.bfloat16))
    assert "got rounding_key" in reason(glax.selective_scan_step, **own, rounding_key=jax.random.key(0))


def test_several_devices_leave_the_call_to_xla_unless_native_code_is_named():
    (decision,) = glax.explain(glax.selective_scan, **arrays())
    assert decision.kernel == "selective_scan/xla/any"
    assert "XLA may divide the call over 8" in decision.refused["selective_scan/cpp/cpu"]
    assert kernels(glax.selective_scan, **arrays(), platform="cpp") == ["selective_scan/cpp/cpu"]


def test_a_platform_that_cannot_raises_with_the_reason():
    with jax.enable_x64(True), pytest.raises(glax.UnsupportedError, match="x is float64"):
        glax.selective_scan(**arrays("float64"), platform="cpp")
    with pytest.raises(glax.UnsupportedError, match="on platform 'triton':\n  selective_scan/triton/gpu: needs a gpu"):
        glax.selective_scan(**arrays(), platform="triton")
    with pytest.raises(glax.UnsupportedError, match="step on platform 'triton':\n  none is written for it"):
        glax.selective_scan_step(**token(), platform="triton")
    with pytest.raises(glax.UnsupportedError, match=r"selective_scan.step on platform 'cpp':\n.*got rounding_key"):
        own = token() | dict(state=jnp.ones((1, D, N), jnp.bfloat16))
        glax.selective_scan_step(**own, rounding_key=jax.random.key(0), platform="cpp")
    with pytest.raises(ValueError, match="platform must be None, 'auto'"):
        glax.selective_scan_step(**token(), platform="native")


def test_an_older_library_is_refused_with_the_remedy(monkeypatch):
    class Older:
        glax_forward = None

    monkeypatch.setattr(library, "load_library", Older)
    with pytest.raises(glax.UnsupportedError, match=r"without glax_selective_step: install a C\+\+17 compiler"):
        glax.selective_scan(**arrays(), platform="cpp")


@pytest.mark.parametrize("platform", ["xla", "cpp"])
def test_forward_mode_is_refused_with_the_remedy(platform):
    for f, given, name in ((glax.selective_scan, arrays(), "x"), (glax.selective_scan_step, token(), "state")):

        def run(x, f=f, given=given, name=name):
            return f(**given | {name: x}, platform=platform)[0]

        with pytest.raises(TypeError, match=r"glax has no forward mode .* Two vjps are one jvp"):
            jax.jvp(run, (given[name],), (given[name],))


def test_a_program_for_another_backend_has_xlas_kernels():
    def value(arrays):
        return sum((x**2).sum() for x in glax.selective_scan(**arrays, platform="cpp"))

    def stepped(token):
        return glax.selective_scan_step(**token, platform="cpp")

    for f, given in ((jax.grad(value), arrays()), (stepped, token())):
        assert "glax_selective" in jax.jit(f).lower(given).as_text()
        exported = jax.export.export(jax.jit(f), platforms=["tpu"])(given)
        assert "glax_selective" not in exported.mlir_module()


def test_a_program_for_cpus_is_exported():
    f = jax.jit(functools.partial(glax.selective_scan, platform="cpp"))
    exported = jax.export.export(f, disabled_checks=glax.export_checks())(**arrays())
    for got, want in zip(exported.call(**arrays()), f(**arrays()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_donated_pool_is_updated_in_place():
    own = token()
    pool = jnp.ones((512, D, N))
    step = jax.jit(functools.partial(glax.selective_scan_step, platform="cpp"), donate_argnames="state")
    own |= dict(state=pool, slots=jnp.array([3]))
    program = step.lower(**own).compile()
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes // 4
    address = pool.unsafe_buffer_pointer()
    assert step(**own)[1].unsafe_buffer_pointer() == address


def test_slow_decays_keep_their_digits():
    """exp(-9e-6) has a rounding error of its own: 100,000 tokens that repeat it are 3e-3 off."""
    given = dict(x=jnp.zeros((1, 100_000, 2)), dt=jnp.full((1, 100_000, 2), 9e-6), A=jnp.array([[-1.0], [-0.5]]))
    ones = jnp.ones((1, 100_000, 1))
    final = glax.selective_scan(**given, B=ones, C=ones, initial_state=jnp.ones((2, 1)), platform="cpp").final_state
    step = np.float64(np.float32(9e-6))
    np.testing.assert_allclose(final[0, :, 0], np.exp(-100_000 * step * np.array([1, 0.5])), rtol=1e-4)


def test_decays_of_zero_forget_the_state():
    given = arrays() | dict(dt=jnp.full((1, T, D), 1e30))
    y, final = glax.selective_scan(
        **given | dict(x=jnp.full((1, T, D), 1e-30)), initial_state=jnp.full((D, N), 1e38), platform="cpp"
    )
    assert_close("final", final[0], jnp.broadcast_to(given["B"][:, -1], (D, N)), 1e-6)
    assert_close("y", y[0], jnp.broadcast_to((given["B"] * given["C"]).sum(-1)[0, :, None], (T, D)), 1e-6)


def test_the_tuner_measures_both_kernels():
    for platform in ("cpp", "xla"):
        measured = glax.tune(glax.selective_scan, **arrays(), platform=platform, progress=False)
        assert [name.split("/")[1] for name in measured] == [platform]
