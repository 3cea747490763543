"""The Hopper kernels of the delta rule, forward and gradient, through the interpreter and against the float64 reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import glax
from glax._src.core.bind import bind
from glax._src.core.registry import Backend
from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu import delta
from glax._src.kernels.pallas_gpu.chunks import inverse as delta_inverse
from glax._src.kernels.pallas_gpu.config import HopperConfig, delta_supports
from glax._src.kernels.pallas_gpu.gradient import delta as delta_vjp
from glax._src.kernels.pallas_gpu.rows import fits_one_row
from glax.testing.reference import reference, reference_gradient
from tests import mosaic_interpreter
from tests.close import assert_gradients_close, assert_outputs_close
from tests.delta_cases import DeltaCase, Draw

CASE = DeltaCase("", ("g",), T=100, heads=(1, 1, 1), K=128, V=128, dtype="bfloat16")
# the case, its draws, whether the forward saves residuals, and the segments of a sequence
CASES = {
    "shared heads": (dataclasses.replace(CASE, T=130, heads=(1, 1, 2), K=64, V=64), (Draw("mild"),), True, 1),
    "-inf on 5%, beta to 2, reversed": (
        dataclasses.replace(CASE, reverse=True),
        (Draw("-inf on 5%", "to 2"), Draw("-100 on 5%", "2", "some zero")),
        False,
        1,
    ),
    "packed, odd widths": (
        dataclasses.replace(CASE, K=40, V=100, T=140, cuts=(0, 0, 30, 31, 130)), (Draw("mild"),), True, 1
    ),
    "no gates, nothing erased, keys of zero": (
        dataclasses.replace(CASE, gates=(), K=64, state=False), (Draw("0"), Draw("0", "0", "zero")), True, 1
    ),
    "constant, less than a chunk": (
        dataclasses.replace(CASE, gates=("g_gamma",), heads=(2, 1, 1), K=64, V=64, T=20), (Draw(),), True, 1
    ),
    "packed in one row": (
        dataclasses.replace(CASE, K=64, V=64, T=140, cuts=(0, 0, 30, 31, 130), state=False), (Draw("mild"),), True, 1
    ),
    "packed in one row, constant, reversed": (
        dataclasses.replace(
            CASE, gates=("g_gamma",), K=64, V=64, T=130, cuts=(0, 64, 70, 129), state=False, reverse=True
        ),
        (Draw(),),
        False,
        1,
    ),
    "segments": (
        dataclasses.replace(CASE, T=300, heads=(1, 1, 2), K=64, V=64), (Draw("mild"), Draw("-inf on 5%", "to 2")), True, 2
    ),
    "segments, reversed": (dataclasses.replace(CASE, T=200, V=64, reverse=True), (Draw("mild"),), False, 3),
    "values of 256": (dataclasses.replace(CASE, T=70, K=64, V=256), (Draw("mild"),), True, 1),
    "values of 160, packed in one row, reversed": (
        dataclasses.replace(CASE, K=96, V=160, T=70, cuts=(0, 40, 69), state=False, reverse=True), (Draw("mild"),), False, 1
    ),
    "values of 192, segments": (
        dataclasses.replace(CASE, T=120, K=64, V=192), (Draw("mild"),), True, 2
    ),
    "segments, packed": (
        dataclasses.replace(CASE, T=140, K=64, V=64, cuts=(0, 70, 139), state=False), (Draw("mild"),), False, 2
    ),
    "keys of 256, shared heads": (
        dataclasses.replace(CASE, T=140, heads=(1, 1, 2), K=256, V=64), (Draw("mild"), Draw("-inf on 5%", "to 2")), True, 1
    ),
    "keys of 256, values of 512": (dataclasses.replace(CASE, T=70, K=256, V=512), (Draw("mild"),), True, 1),
    "keys of 192, packed, reversed": (
        dataclasses.replace(CASE, K=192, V=100, T=140, cuts=(0, 0, 30, 31, 130), reverse=True), (Draw("mild"),), False, 1
    ),
    "keys of 256, packed in one row": (
        dataclasses.replace(CASE, K=256, V=64, T=140, cuts=(0, 40, 129), state=False), (Draw("mild"),), True, 1
    ),
    "keys of 256, segments": (dataclasses.replace(CASE, T=200, K=256), (Draw("mild"),), True, 2),
    "keys of 256, constant, segments, reversed": (
        dataclasses.replace(CASE, gates=("g_gamma",), T=140, K=256, V=64, reverse=True), (Draw(),), False, 2
    ),
}  # fmt: skip


MARKS = {"shared heads": [pytest.mark.fast]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES])
def test_against_the_reference(name, monkeypatch):
    assert_as_reference(*CASES[name], monkeypatch)


def assert_as_reference(case, draws, save: bool, parts: int, monkeypatch):
    config = HopperConfig(parts=parts)
    mosaic_interpreter.install(monkeypatch)
    mosaic_interpreter.one_kernel_at_a_time(
        monkeypatch,
        (delta, "inverses_of_chunks"),
        (delta, "delta_scan"),
        (delta_vjp, "delta_gradient_wide"),
        (delta_vjp, "delta_gradient"),
    )
    for draw in draws:
        r = case.recurrence(draw)
        d_output, d_final = case.cotangents(r)
        zeros = jnp.zeros(r.state_shape, jnp.float32)
        with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
            if save:
                found, residuals = delta.chunked_with_residuals(r, config)
            else:
                found, residuals = delta.chunked(r, config), None
        assert_outputs_close(r, found, reference(r))
        # Without d_final, packed sequences are one row in the gradient too, and segments begin from zeros that no array holds.
        for ends in (None, d_final) if fits_one_row(r) or (parts > 1 and not r.reverse) else (d_final,):
            with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
                d = delta.chunked_vjp(r, d_output, ends, residuals, config)
            assert_gradients_close(r, d, reference_gradient(r, d_output, zeros if ends is None else ends))


@pytest.mark.parametrize("reverse", [False, True])
def test_inverse_where_its_powers_grow(reverse, monkeypatch):
    """Keys that repeat, no decay and beta of 2: powers of L reach 1e17, the inverse stays at 2."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 1, 64))
    k = jnp.asarray(np.broadcast_to(key / np.linalg.norm(key), (1, 64, 1, 64)), jnp.bfloat16)
    numbers = jnp.zeros((1, 64, 1), jnp.float32)
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found = delta_inverse.inverses_of_chunks(reverse, 1, k, numbers, numbers + 2.0).inverse
    exact = np.asarray(k[0, :, 0], np.float64)
    i, j = np.indices((64, 64))
    L = np.where(i < j if reverse else i > j, 2 * exact @ exact.T, 0)
    expected = np.linalg.inv(np.eye(64) + L) - np.eye(64)
    error = np.linalg.norm(np.asarray(found[0, 0, 0], np.float64) - expected) / np.linalg.norm(expected)
    assert error < 3.5e-3


@pytest.mark.parametrize("reverse", [False, True])
def test_one_program_for_all_chunks(reverse, monkeypatch):
    """Each warpgroup computes several, while the next are loaded."""
    monkeypatch.setattr(delta, "multiprocessors", lambda: 1)
    case = dataclasses.replace(CASE, T=230, heads=(1, 1, 2), K=64, V=64, reverse=reverse)
    assert_as_reference(case, (Draw("mild"),), True, 1, monkeypatch)


def test_inverses_in_turns(monkeypatch):
    """One program for all chunks, whose warpgroups take several each, with gates that are summed and a last chunk in part."""
    rng, (T, HK, H, K) = np.random.default_rng(1), (600, 1, 2, 64)
    k = rng.normal(size=(1, T, HK, K))
    k = jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), jnp.bfloat16)
    gates, beta = -rng.exponential(size=(1, T, H)), rng.uniform(size=(1, T, H))
    gates[0, 70:80, 1] = -np.inf
    padded = [jnp.asarray(np.pad(x, ((0, 0), (0, 40), (0, 0))), jnp.float32) for x in (gates, beta)]
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found = delta_inverse.inverses_of_chunks(False, 1, k, *padded)
    gates, beta = (np.asarray(x, np.float64).reshape(10, 64, H) for x in padded)
    exact = np.pad(np.asarray(k[0, :, 0], np.float64), ((0, 40), (0, 0))).reshape(10, 64, K)
    sums = np.cumsum(np.maximum(gates, LOG_OF_ZERO), 1)
    for c, h in np.ndindex(10, H):
        between = np.where(np.tri(64, k=-1) > 0, sums[c, :, None, h] - sums[c, None, :, h], -np.inf)
        L = beta[c, :, None, h] * (exact[c] @ exact[c].T) * np.exp(between)
        expected = np.linalg.inv(np.eye(64) + L) - np.eye(64)
        assert np.linalg.norm(np.asarray(found.inverse[0, c, h], np.float64) - expected) < 3.5e-3 * np.linalg.norm(
            expected
        )
        within, leaving = np.exp(sums[c, :, h]), np.exp(sums[c, -1, h] - sums[c, :, h])
        factors = beta[c, :, h], beta[c, :, h] * within, leaving, within, sums[c, :, h] / np.log(2)
        np.testing.assert_allclose(found.factors[0, c, h], factors, rtol=2e-4, atol=1e-6)


def test_keys_wider_than_128_are_chosen(monkeypatch):
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    q, v, beta = (jax.ShapeDtypeStruct((4, 2048, 16, *width), jnp.bfloat16) for width in ((256,), (512,), ()))

    def said(**platform):
        return str(glax.explain(lambda q, v, beta: glax.delta_rule(q, q, v, beta, **platform)[0], q, v, beta))

    assert said().startswith("chunked/pallas/gpu") and said(platform="pallas").startswith("chunked/pallas/gpu")


def test_unsupported_calls_name_the_reason():
    x, beta = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))
    assert delta_supports(bind(x, x, x, g=beta, beta=beta)) is None
    assert "erase and write" in str(delta_supports(bind(x, x, x, erase=x)))
    wide = jnp.zeros((1, 64, 1, 520), jnp.bfloat16)
    assert "value (V) up to 512 wide, got 64 and 520" in str(delta_supports(bind(x, x, wide, beta=beta)))
    assert "key (K) up to 256 wide and value (V) up to 512 wide, got 520" in str(
        delta_supports(bind(wide, wide, x, beta=beta))
    )
    keys = jnp.zeros((1, 64, 1, 136), jnp.bfloat16)
    assert "with per-key gates, with key (K) up to 128" in str(delta_supports(bind(keys, keys, x, gk=keys, beta=beta)))
    with pytest.raises(ValueError, match="columns must be 64 with beta"):
        delta.chunked(bind(x, x, x, beta=beta), HopperConfig(columns=128))
    state = jnp.zeros((2, 1, 64, 64))
    r = bind(x, x, x, beta=beta, initial_state=state, cu_seqlens=jnp.asarray([0, 30, 64]))
    for run in (delta.chunked, lambda r, config: delta.chunked_vjp(r, x, state, None, config)):
        with pytest.raises(ValueError, match="parts must be 1 for packed sequences with states"):
            run(r, HopperConfig(parts=2))
