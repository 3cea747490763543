"""The Hopper kernels of the delta rule, forward and gradient, through the interpreter and against the float64 reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.core.bind import bind
from glax._src.kernels.pallas_gpu import delta
from glax._src.kernels.pallas_gpu.config import HopperConfig, delta_supports
from glax._src.kernels.pallas_gpu.delta_pairs import pairs_of_chunks
from glax.testing.reference import reference, reference_gradient
from tests import mosaic_interpreter
from tests.close import assert_gradients_close, assert_outputs_close
from tests.delta_cases import DeltaCase, Draw

NARROW, WIDE = HopperConfig(), HopperConfig(columns=128)
CASE = DeltaCase("", ("g",), T=100, heads=(1, 1, 1), K=128, V=128, dtype="bfloat16")
# the case, its draws, the config, and whether the forward saves residuals
CASES = {
    "shared heads": (dataclasses.replace(CASE, T=130, heads=(1, 1, 2), K=64, V=64), (Draw("mild"),), NARROW, True),
    "-inf on 5%, beta to 2, reversed": (
        dataclasses.replace(CASE, reverse=True),
        (Draw("-inf on 5%", "to 2"), Draw("-100 on 5%", "2", "some zero")),
        WIDE,
        False,
    ),
    "packed, odd widths": (
        dataclasses.replace(CASE, K=40, V=100, T=140, cuts=(0, 0, 30, 31, 130)), (Draw("mild"),), NARROW, True
    ),
    "no gates, nothing erased, keys of zero": (
        dataclasses.replace(CASE, gates=(), K=64, state=False), (Draw("0"), Draw("0", "0", "zero")), WIDE, True
    ),
    "constant, less than a chunk": (
        dataclasses.replace(CASE, gates=("g_gamma",), heads=(2, 1, 1), K=64, V=64, T=20), (Draw(),), NARROW, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name, monkeypatch):
    case, draws, config, save = CASES[name]
    mosaic_interpreter.install(monkeypatch)
    for draw in draws:
        r = case.recurrence(draw)
        cotangents = case.cotangents(r)
        with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
            if save:
                found, residuals = delta.chunked_with_residuals(r, config)
            else:
                found, residuals = delta.chunked(r, config), None
            d = delta.chunked_vjp(r, *cotangents, residuals, config)
        assert_outputs_close(r, found, reference(r))
        assert_gradients_close(r, d, reference_gradient(r, *cotangents))


@pytest.mark.parametrize("reverse", [False, True])
def test_inverse_where_its_powers_grow(reverse, monkeypatch):
    """Keys that repeat, no decay and beta of 2: powers of L reach 1e17, the inverse stays at 2."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 1, 64))
    k = jnp.asarray(np.broadcast_to(key / np.linalg.norm(key), (1, 64, 1, 64)), jnp.bfloat16)
    numbers = jnp.zeros((1, 1, 1, 64), jnp.float32)
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found = pairs_of_chunks(reverse, k, k, numbers, numbers + 2.0, jnp.ones((1, 1), jnp.float32))
    exact = np.asarray(k[0, :, 0], np.float64)
    i, j = np.indices((64, 64))
    L = np.where(i < j if reverse else i > j, 2 * exact @ exact.T, 0)
    expected = np.linalg.inv(np.eye(64) + L) - np.eye(64)
    error = np.linalg.norm(np.asarray(found.inverse[0, 0, 0], np.float64) - expected) / np.linalg.norm(expected)
    assert error < 3.5e-3


def test_unsupported_calls_name_the_reason():
    x, beta = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))
    assert delta_supports(bind(x, x, x, g=beta, beta=beta)) is None
    assert "per-key gates" in str(delta_supports(bind(x, x, x, gk=x, beta=beta)))
    assert "erase and write" in str(delta_supports(bind(x, x, x, erase=x)))
    wide = jnp.zeros((1, 64, 1, 200), jnp.bfloat16)
    assert "V up to 128, got K=64 and V=200" in str(delta_supports(bind(x, x, wide, beta=beta)))
    with pytest.raises(ValueError, match="parts must be 1 with beta"):
        delta.chunked(bind(x, x, x, beta=beta), HopperConfig(parts=2))
