"""The Hopper kernels of the delta rule with per-key gates, through the interpreter and against the float64 reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.core.bind import bind
from glax._src.core.registry import KernelSpec, Platform
from glax._src.kernels.pallas_gpu import delta, registration
from glax._src.kernels.pallas_gpu.chunks import pairs as delta_key_pairs
from glax._src.kernels.pallas_gpu.config import HopperConfig, delta_supports
from glax._src.kernels.pallas_gpu.gradient import delta_key as delta_key_vjp
from glax._src.solve.dispatch import Choice, resolve
from glax.testing.reference import reference, reference_gradient
from tests import mosaic_interpreter
from tests.close import assert_gradients_close, assert_outputs_close
from tests.delta_cases import DeltaCase, Draw

CASE = DeltaCase("", ("gk",), T=100, heads=(1, 1, 1), K=64, V=64, dtype="bfloat16")
BFLOAT16 = dataclasses.replace(CASE, gate_dtype="bfloat16", state=False)
HARD = Draw("-inf on 5%", "to 2"), Draw("-100 on 5%", "2", "some zero")
# The case, its draws, the segments of a sequence, and for how many of the draws the gradient is computed. Two gradients are left
# out because they miss the bar: "growing", and "two blocks of keys" with -inf (docs/internals/experiments/hopper.md). The others
# are left out to save time.
CASES = {
    "gates of any size": (CASE, (HARD[0], Draw(), HARD[1]), 1, 1),
    "gates in bfloat16, reversed": (dataclasses.replace(BFLOAT16, reverse=True), (HARD[0], Draw()), 1, 1),
    "growing": (dataclasses.replace(CASE, T=20), (Draw("+0.05"),), 1, 0),
    "two blocks of keys": (dataclasses.replace(CASE, K=128, V=128, T=70), (Draw("mild"), HARD[0]), 1, 1),
    "packed, odd widths, shared heads": (
        dataclasses.replace(CASE, K=40, V=100, T=80, heads=(1, 1, 2), cuts=(0, 0, 30, 31, 72)), (Draw(),), 1, 1
    ),
    "packed, in bfloat16, reversed, less than a chunk": (
        dataclasses.replace(BFLOAT16, T=20, cuts=(3, 9, 17), reverse=True), (Draw(), HARD[0]), 1, 0
    ),
    "values of 192": (dataclasses.replace(CASE, T=20, V=192), (Draw("mild"),), 1, 1),
    "segments": (dataclasses.replace(CASE, T=200), (Draw("mild"), HARD[0]), 2, 0),
    "segments, reversed, shared heads": (
        dataclasses.replace(CASE, T=130, heads=(1, 2, 2), reverse=True), (Draw("mild"),), 2, 1
    ),
}  # fmt: skip


def run(f, *operands, parts: int = 1):
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        return f(*operands, HopperConfig(parts=parts))


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name, monkeypatch):
    case, draws, parts, gradients = CASES[name]
    mosaic_interpreter.install(monkeypatch)
    kernels = (delta, "pairs_of_chunks"), (delta, "delta_key_scan"), (delta_key_vjp, "delta_key_gradient")
    mosaic_interpreter.one_kernel_at_a_time(monkeypatch, *kernels)
    monkeypatch.setattr(delta, "multiprocessors", lambda: 2)  # so that programs have several chunks each
    for number, draw in enumerate(draws):
        r = case.recurrence(draw)
        if number >= gradients:
            assert_outputs_close(r, run(delta.chunked, r, parts=parts), reference(r))
            continue
        found, residuals = run(delta.chunked_with_residuals, r, parts=parts)
        assert_outputs_close(r, found, reference(r))
        d_output, d_final = case.cotangents(r)
        # In one case the gradient computes the states again.
        residuals = None if name == "values of 192" else residuals
        d = run(delta.chunked_vjp, r, d_output, d_final, residuals, parts=parts)
        assert_gradients_close(r, d, reference_gradient(r, d_output, d_final))


@pytest.mark.parametrize("seed", (9, 50))
def test_d_beta_where_its_sum_cancels(seed, monkeypatch):
    """With a gradient of the final state a few tokens have most of d beta, and each sums 64 products that nearly cancel. With dS'
    in one term of bfloat16 it would be off by 4.4e-3 and 4.7e-3."""
    case = dataclasses.replace(CASE, T=40, gate_dtype="bfloat16", reverse=True)
    mosaic_interpreter.install(monkeypatch)
    r = case.recurrence(Draw(), seed)
    d_output, d_final = case.cotangents(r)
    d = run(delta.chunked_vjp, r, d_output, d_final, None)
    assert_gradients_close(r, d, reference_gradient(r, d_output, d_final))


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.fast), True])
def test_at_the_limit_of_the_fast_form(reverse, monkeypatch):
    """32 gates of -1.875 sum to -60, at which the fast form is taken. With the next number below, the exact form is taken. In one
    channel the gates of the second half are the opposite, so that its state grows by e^60, to the size of the others."""
    inputs = dataclasses.replace(BFLOAT16, T=64).inputs(Draw())
    inputs["key"] = inputs["key"].at[..., 5].multiply(1e-26)
    mosaic_interpreter.install(monkeypatch)
    taken = []
    measure = delta_key_pairs.measure
    monkeypatch.setattr(delta_key_pairs, "measure", lambda p: seen(taken, measure(p)))
    second = (np.arange(64) < 32 if reverse else np.arange(64) >= 32)[:, None]
    for gate in (-1.875, -1.8828125):
        opposite = jnp.asarray(np.where(second, -gate, gate), jnp.bfloat16)
        inputs["gk"] = inputs["gk"].at[0, ..., 5].set(opposite).at[..., 9].set(gate)
        r = bind(**inputs, reverse=reverse)
        assert_outputs_close(r, run(delta.chunked, r), reference(r))
    assert taken == [True, False]


def seen(taken: list[bool], is_fast):
    jax.debug.callback(lambda x: taken.append(bool(x)), is_fast)
    return is_fast


def test_what_is_supported_and_chosen():
    x, beta = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))
    r = bind(x, x, x, gk=x, beta=beta)
    assert delta_supports(r) is None
    assert registration.forward_priority(r) == registration.gradient_priority(r) == registration.FASTER
    packed = bind(x, x, x, gk=x, beta=beta, cu_seqlens=jnp.asarray(np.array([0, 10, 64]), jnp.int32))
    _, reasons = registration.forward_route(packed, config=HopperConfig())
    assert "each sequence begins a chunk" in reasons["packed sequences as one row"]
    with pytest.raises(ValueError, match="columns must be 64 with beta"):
        delta.chunked(r, HopperConfig(columns=128))


def test_one_platform_runs_forward_and_gradient(monkeypatch):
    """Both are by the Hopper kernels from 2048 tokens and the size that was measured on, and by Triton for fewer."""
    here = {f"{what}/{by}" for what in ("chunked", "chunked.vjp") for by in ("pallas/gpu", "triton/gpu", "xla/any")}
    monkeypatch.setattr(
        KernelSpec, "refusal", lambda spec, r, config=None: None if spec.name in here else "is not here"
    )
    found = {}

    def call(x, beta):
        chosen = resolve(Choice(), bind(x, x, x, gk=x, beta=beta))
        found[x.shape[1]] = chosen.forward.platform, chosen.vjp.platform

    for T in (2048, 1024):
        jax.eval_shape(call, *(jax.ShapeDtypeStruct((4, T, 16, *width), jnp.bfloat16) for width in ((128,), ())))
    assert found == {2048: (Platform.PALLAS,) * 2, 1024: (Platform.TRITON,) * 2}
