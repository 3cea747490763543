"""Test the native CPU kernels beyond conformance: exponential, instruction sets, threads, and a missing library."""

import ctypes
import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.registry import Platform, kernel_registry
from glax._src.kernels.cpu import library
from glax._src.kernels.cpu.library import load_library, missing
from glax._src.kernels.cpu.recurrent import NativeConfig, call, operands_of
from glax._src.tuning.cache import Measurement
from glax.testing.reference import reference, reference_gradient
from tests.cases import FORMS, Case, cotangents, recurrence
from tests.close import assert_close, assert_gradients_close, assert_outputs_close
from tests.suite import check_forward, check_gradient

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
    """Run CHECK in a new process and return its outputs and gradients."""
    env = os.environ | dict(JAX_PLATFORMS="cpu") | environment
    subprocess.run([sys.executable, "-c", CHECK, str(path)], check=True, env=env)
    return list(np.load(path).values())


def exponential(x: np.ndarray) -> np.ndarray:
    x, y = np.ascontiguousarray(x, np.float32), np.empty(len(x), np.float32)
    pointers = [z.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for z in (x, y)]
    load_library().glax_exponential(*pointers, ctypes.c_int64(len(x)))
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
    Case("key+value", T=2500, gates=("gk", "gv"), **LONG),
    Case("key-reverse", B=2, T=2100, reverse=True, **LONG),
    Case("head-constant-packed", T=2600, cuts=(0, 0, 1200, 1210, 2590), gates=("g", "g_gamma"), **LONG),
    Case("none-packed-reverse", T=2600, cuts=(0, 0, 1300, 2590), gates=(), reverse=True, **LONG),
    Case("no-state-bfloat16", T=2100, state_dtype=None, dtype="bfloat16", **LONG),
]


@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments_of_long_sequences(case):
    forward, gradient = (kernel_registry.kernels[f"{name}/cpp/cpu"].run for name in ("recurrent", "recurrent.vjp"))
    check_forward(case, functools.partial(forward, config=NativeConfig()))
    check_gradient(case, functools.partial(gradient, config=NativeConfig()))


def test_cpus_select_the_native_kernels():
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


NO_MEMORY = """
import resource
import jax, jax.numpy as jnp
import glax
from glax._src.kernels.cpu.recurrent import NativeConfig
T, K = 4096, 2048
small, q, v = jnp.ones((1, 8, 1, 8)), jnp.ones((1, T, 1, K)), jnp.ones((1, T, 1, 8))
large = jax.jit(lambda q, v: glax.recurrent(q, q, v, cfg=NativeConfig(T)).output).lower(q, v).compile()
glax.recurrent(small, small, small).output.block_until_ready()
size = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))  # the scratch is 130 MB
try:
    large(q, v).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(error)
print(float(glax.recurrent(small, small, small).output[0, 0, 0, 0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux can")
def test_failed_allocations_raise_errors():
    env = os.environ | dict(JAX_PLATFORMS="cpu", MALLOC_ARENA_MAX="1")
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, value = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert error.startswith("RESOURCE_EXHAUSTED: glax: its CPU kernels found no memory to compute in.")
    assert abs(float(value) - 8**0.5) < 1e-5  # the process continues


def test_a_block_is_cut_to_the_sequence():
    """Whatever block another version of the package passes to the library."""
    r = recurrence(Case("", T=40, gates=("gk",), strengths=()), "log-sigmoid")
    results = [jax.ShapeDtypeStruct((1, 40, 2, 24), jnp.float32), jax.ShapeDtypeStruct(r.state_shape, jnp.float32)]
    for block in (10**12, 0, -1, 2**63 - 1):
        got = call("glax_forward", operands_of(r), results, reverse=False, block=np.int64(block))
        assert_outputs_close(r, glax.Outputs(*got), reference(r))


def test_invalid_stored_configs_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    q = jnp.ones((1, 40, 1, 8))
    (chosen,) = glax.explain(lambda q: glax.recurrent(q, q, q).output, q)
    stored = glax.PersistentCache("recurrent")
    stored.put(chosen.invocation, Measurement(NativeConfig(), 1.0))
    path = stored.path(chosen.invocation)
    content = path.read_text()
    for block in (10**12, 10**19, True, "24", None):
        path.write_text(content.replace('"block": 24', f'"block": {json.dumps(block)}'))
        with pytest.warns(UserWarning, match="block"):
            assert glax.PersistentCache("recurrent").get(chosen.invocation) is None


MAGNITUDES = [  # of q, k, v and d_output; kernels divide by decays down to e^-40 and multiply by them
    (1, 3e10, 3e10, 1),
    (1, 1.4e10, 1e11, 1),  # just above the largest that e^40 permits
    (1, 1e10, 1e11, 1),  # just below it
    (1, 1e17, 1e17, 1e-10),
    (1, 1, 1e35, 1e-9),
    (1e15, 1e10, 1e10, 1e-9),
    (1e-12, 1, 1, 1),  # just above the faintest row that e^-40 may shrink
    (1e-13, 1, 1, 1),
    (1e-14, 1, 1, 1),
    (1e-28, 1, 1, 1),
    (1, 1e-24, 1, 1),
    (1, 1, 1e-28, 1),
    (1, 1e-14, 1e-14, 1),
    (1, 1, 1, 1e-28),
]


@pytest.mark.parametrize("form", ["constant", "head", "key", "value", "key+value"])
def test_numbers_of_every_magnitude(form):
    """Intermediate values outside float32's range do not affect results within it."""
    case = Case("", T=70, K=16, V=20, gates=FORMS[form])
    forward, gradient = (kernel_registry.kernels[f"{name}/cpp/cpu"].run for name in ("recurrent", "recurrent.vjp"))
    run = jax.jit(lambda r, *d: (forward(r, config=NativeConfig()), gradient(r, *d, config=NativeConfig())))
    for strength in ("-1.4", "-0.9", "log-sigmoid"):
        r, d = recurrence(case, strength), cotangents(case, recurrence(case, strength))
        for by_q, by_k, by_v, by_d in MAGNITUDES:
            scaled = r.replace(q=r.q * by_q, k=r.k * by_k, v=r.v * by_v, initial_state=r.initial_state * by_k * by_v)
            cotangent = d[0] * by_d, d[1] * by_q * by_d
            outputs, gradients = run(scaled, *cotangent)
            assert_outputs_close(scaled, outputs, reference(scaled))
            assert_gradients_close(scaled, gradients, reference_gradient(scaled, *cotangent))


def steady(H: int, T: int, log: float, chunk: int = 200):
    """k v^T and its gradients of `recurrent` with one log decay at all T tokens, in float64, by chunks."""
    rng = np.random.default_rng(0)
    q, k, v, d = rng.normal(size=(4, H, T, 2)).astype(np.float32).astype(np.float64)
    S, dS = rng.normal(size=(2, H, 2, 2)).astype(np.float32).astype(np.float64)
    i = np.arange(chunk)
    pairs = np.where(i[:, None] >= i, np.exp(log * np.abs(i[:, None] - i)), 0)
    enter, leave = np.exp(log * (i + 1))[:, None], np.exp(log * (chunk - 1 - i))[:, None]

    def scan(q, k, v, S):
        """sum_{s <= t} e^{log (t - s)} (q_t k_s) v_s + e^{log (t + 1)} q_t S of every t, and the state behind the last."""
        out = np.empty((H, T, 2))
        for at in range(0, T, chunk):
            here = slice(at, at + chunk)
            scores = q[:, here] @ k[:, here].mT * pairs
            out[:, here] = scores @ v[:, here] + (q[:, here] * enter) @ S
            S = np.exp(log * chunk) * S + (k[:, here] * leave).mT @ v[:, here]
        return out, S

    def against(q, k, v, S):
        """The same against time, where a token's decay comes after it."""
        out, S = scan(*(x[:, ::-1] for x in (q, k, v)), np.exp(-log) * S)
        return out[:, ::-1], np.exp(log) * S

    output, final = scan(q, k, v, S)
    (d_q, _), (d_k, _), (d_v, d_S) = scan(d, v, k, S.mT), against(v, d, q, dS.mT), against(k, q, d, dS)
    tokens = np.cumsum(((q * d_q).sum(-1) - (k * d_k).sum(-1))[:, ::-1], 1)[:, ::-1]
    d_gate = tokens + (final * dS).sum((1, 2))[:, None]
    return (q, k, v, S, d, dS), (output, final, d_q, d_k, d_v, d_S, d_gate)


@pytest.mark.parametrize(
    ("H", "T", "log", "gate"),
    [(1, 10**6, -9e-6, "g_gamma"), (1, 10**6, -1e-6, "g"), (8, 2 * 10**5, -9e-6, "g_gamma")],
    ids=str,
)
def test_decays_next_to_1_over_a_million_tokens(H, T, log, gate):
    """Equal rounding errors at every token must not add up, with segments (one head) and without (eight heads)."""
    log = float(np.float32(log))
    (q, k, v, S, d, dS), want = steady(H, T, log)
    shape = (H,) if gate == "g_gamma" else (1, T, H)

    def by_token(x):
        return jnp.asarray(x.swapaxes(0, 1)[None], jnp.float32)

    @jax.jit
    def run(q, k, v, S, gates, *cotangents):
        def f(q, k, v, S, gates):
            gates = {gate: gates}
            return glax.recurrent(q, k, v, **gates, initial_state=S, softmax_scale=1.0, platform="cpp")

        outputs, pull = jax.vjp(f, q, k, v, S, gates)
        return *outputs, *pull(glax.Outputs(*cotangents))

    S, dS = (jnp.asarray(x[None], jnp.float32) for x in (S, dS))
    got = run(*map(by_token, (q, k, v)), S, jnp.full(shape, log), by_token(d), dS)
    output, final, d_q, d_k, d_v, d_S, d_gate = want
    named = dict(output=output, final_state=final, query=d_q, key=d_k, value=d_v, initial_state=d_S)
    for (name, y), x in zip(named.items(), got, strict=False):
        assert_close(name, np.asarray(x)[0].swapaxes(0, 1) if x.ndim == 4 and "state" not in name else x[0], y, 1e-5)
    if gate == "g":
        assert_close("gate", np.asarray(got[6])[0].T, d_gate, 5e-5)
    else:
        assert_close("gate", got[6], d_gate.sum(1), 5e-4)  # one sum over all tokens


def test_without_a_library_xla_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / "build_failure.txt").write_text("command 'g++' failed: No such file\n")
    load_library.cache_clear()
    try:
        q = jnp.ones((1, 64, 2, 24))

        def call(q):
            return glax.recurrent(q, q, q).output

        explained = glax.explain(call, q)[0]
        assert explained.invocation.kernel.platform is Platform.XLA
        assert "g++' failed" in explained.refused["recurrent/cpp/cpu"]
        assert "install a C++17 compiler" in explained.refused["recurrent/cpp/cpu"]
        with pytest.raises(glax.UnsupportedError, match="install a C\\+\\+17 compiler"):
            glax.recurrent(q, q, q, platform="cpp")
        np.testing.assert_allclose(call(q), jnp.cumsum(jnp.full((1, 64, 2, 24), 24**0.5), 1), rtol=1e-5)
    finally:
        load_library.cache_clear()


@pytest.mark.parametrize(
    ("older", "reason"),
    [
        ("_native.so", "it has the handlers of version 3"),
        ("_native.cpython-311-x86_64-linux-gnu.so", "of an earlier version"),
    ],
)
def test_a_library_of_an_earlier_version_is_refused_with_the_remedy(older, reason, tmp_path, monkeypatch):
    (tmp_path / older).write_bytes(b"")
    earlier = types.ModuleType("a library")
    earlier.glax_interface = lambda: 3
    monkeypatch.setattr("glax._src.kernels.common.library.ctypes.CDLL", lambda path: earlier)
    found = library.load_built(tmp_path, "_native", library.register)
    assert reason in found and found.endswith("and install glax again")
