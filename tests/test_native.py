"""The native CPU kernels beyond conformance: their exponential, instructions, threads, and a machine without them."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.kernels.cpu import native
from glax.kernels.cpu.native import library, missing
from glax.kernels.cpu.recurrent import NativeConfig
from glax.reference import reference, reference_gradient
from glax.registry import Platform, kernel_registry
from tests.cases import EXTREME, Case, cotangents, recurrence
from tests.close import assert_gradients_close, assert_outputs_close

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"needs the native library: {missing()}")

CHECK = """
import os, sys
if "CPUS" in os.environ:
    os.sched_setaffinity(0, range(int(os.environ["CPUS"])))
import jax, jax.numpy as jnp, numpy as np
import glax
found = []
for shape, strength in (((2, 150, 3, 100), 1), ((1, 150, 1, 100), 3), ((1, 2100, 1, 40), 3)):
    q, k, v, x, y, do = np.random.default_rng(0).normal(size=(6, *shape)).astype(np.float32)
    gk, gv = -strength * np.log1p(np.exp(-x)), -strength * np.log1p(np.exp(-y))
    f = lambda q, k, v, gk, gv: glax.recurrent(q, k, v, gk=gk, gv=gv, platform="cpp")
    outputs, pull = jax.vjp(f, q, k, v, gk, gv)
    found += [*outputs, *pull(glax.Outputs(do, jnp.ones_like(outputs.final_state)))]
np.savez(sys.argv[1], *map(np.asarray, found))
"""


def found_with(path: Path, **environment: str) -> list[np.ndarray]:
    """The outputs and gradients of CHECK in a process of its own."""
    env = os.environ | dict(JAX_PLATFORMS="cpu") | environment
    subprocess.run([sys.executable, "-c", CHECK, str(path)], check=True, env=env)
    return list(np.load(path).values())


def exponential(x: np.ndarray) -> np.ndarray:
    x, y = np.ascontiguousarray(x, np.float32), np.empty(len(x), np.float32)
    pointer = lambda z: z.ctypes.data_as(ctypes.POINTER(ctypes.c_float))  # noqa: E731
    library().glax_exponential(pointer(x), pointer(y), ctypes.c_int64(len(x)))
    return y


def test_exponential_is_within_2_ulp_everywhere():
    bits = np.arange(0, 2**32, 997, dtype=np.uint64).astype(np.uint32)  # of every sign and exponent
    with np.errstate(all="ignore"):
        x = np.concatenate([bits.view(np.float32), np.linspace(-105, 89, 1_000_001, dtype=np.float32)])
        x = np.concatenate([x, np.float32([0, -0.0, -np.inf, np.inf, np.nan, -103.98, 88.73, -87.4])])
        got, want = exponential(x), np.exp(x.astype(np.float64))
        nearest = want.astype(np.float32)
        unit = np.spacing(np.where(np.isfinite(nearest), nearest, np.finfo(np.float32).max)).astype(np.float64)
        finite = np.isfinite(nearest) & np.isfinite(got)
        error = np.abs(got.astype(np.float64) - want)[finite] / unit[finite]
    assert error.max() <= 2
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    # A float on either side of the largest may be infinite; nothing else may differ.
    unequal = np.isinf(got) != np.isinf(nearest)
    assert (np.abs(x[unequal] - 88.7228) < 1e-4).all()


def test_every_set_of_instructions_agrees(tmp_path):
    widest = found_with(tmp_path / "widest.npz")
    for most in ("avx2", "baseline"):
        for x, y in zip(found_with(tmp_path / f"{most}.npz", GLAX_CPU_INSTRUCTIONS=most), widest, strict=True):
            assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)


def test_any_number_of_threads_agrees_in_every_bit(tmp_path):
    own = found_with(tmp_path / "own.npz")
    one = found_with(tmp_path / "one.npz", CPUS="1")
    for x, y in zip(one, own, strict=True):
        np.testing.assert_array_equal(x, y)


LONG = dict(heads=(1, 1, 1), K=16, V=20, strengths=("log-sigmoid", "-1e-6", "-100 on 5%"))  # few heads: segments of T
SEGMENTED = [
    Case("both", T=2500, gates=("gk", "gv"), **LONG),
    Case("key-reverse", B=2, T=2100, reverse=True, **LONG),
    Case("head-constant-packed", T=2600, cuts=(0, 0, 1200, 1210, 2590), gates=("g", "g_gamma"), **LONG),
    Case("none-packed-reverse", T=2600, cuts=(0, 0, 1300, 2590), gates=(), reverse=True, **LONG),
    Case("no-state-bfloat16", T=2100, state_dtype=None, dtype="bfloat16", **LONG),
]


@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments_of_long_sequences(case):
    forward, gradient = (kernel_registry.kernels[f"{name}/cpp/cpu"].run for name in ("recurrent", "recurrent.vjp"))
    for strength in case.strengths:
        r, extreme = recurrence(case, strength), strength in EXTREME
        assert_outputs_close(r, forward(r, config=NativeConfig()), reference(r), extreme)
        d = cotangents(case, r)
        assert_gradients_close(r, gradient(r, *d, config=NativeConfig()), reference_gradient(r, *d), extreme)


def test_it_is_what_cpus_take():
    q = jnp.ones((1, 64, 2, 16))
    loss = jax.grad(lambda q: glax.recurrent(q, q, q, gk=-q).output.sum())
    assert [d.kernel for d in glax.explain(loss, q)] == ["recurrent/cpp/cpu", "recurrent.vjp/cpp/cpu"]
    state = jnp.ones((1, 2, 16, 16))
    (step,) = glax.explain(lambda q: glax.recurrent_step(q, q, q, state), q[:, 0])
    assert step.kernel == "recurrent.step/cpp/cpu"
    assert glax.detect_platform() is Platform.CPP


def test_the_pool_is_not_copied():
    pool, x, slots = jnp.zeros((512, 2, 32, 32)), jnp.ones((3, 2, 32)), jnp.array([5, -1, 7])
    step = jax.jit(lambda pool: glax.recurrent_step(x, x, x, pool, slots=slots, platform="cpp"), donate_argnums=0)
    memory = step.lower(pool).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes and memory.temp_size_in_bytes < pool.nbytes / 100


def test_blocks_of_any_length_agree():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, x = (jax.random.normal(key, (1, 100, 2, 40)) for key in keys)
    gate = jax.nn.log_sigmoid(x).at[:, ::7].set(-jnp.inf)
    whole = glax.recurrent(q, k, v, gk=gate, cfg=NativeConfig(32))
    for block in (1, 5, 64):
        output = glax.recurrent(q, k, v, gk=gate, cfg=NativeConfig(block)).output
        np.testing.assert_allclose(output, whole.output, rtol=2e-5, atol=2e-5)


def test_without_a_library_xla_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "FAILURE", tmp_path / "build_failure.txt")
    (tmp_path / "build_failure.txt").write_text("command 'g++' failed: No such file\n")
    library.cache_clear()
    try:
        q = jnp.ones((1, 64, 2, 24))
        call = lambda q: glax.recurrent(q, q, q).output  # noqa: E731
        explained = glax.explain(call, q)[0]
        assert explained.invocation.kernel.platform is Platform.XLA
        assert "g++' failed" in explained.refused["recurrent/cpp/cpu"]
        assert "install a C++17 compiler" in explained.refused["recurrent/cpp/cpu"]
        with pytest.raises(glax.UnsupportedError, match="install a C\\+\\+17 compiler"):
            glax.recurrent(q, q, q, platform="cpp")
        np.testing.assert_allclose(call(q), jnp.cumsum(jnp.full((1, 64, 2, 24), 24**0.5), 1), rtol=1e-5)
    finally:
        library.cache_clear()
