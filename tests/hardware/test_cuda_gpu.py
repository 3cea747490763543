"""The CUDA kernels on an NVIDIA GPU: `pytest tests/hardware/test_cuda_gpu.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.cuda import CudaConfig, installation
from glax.testing.reference import reference, reference_gradient
from tests.cases import EXTREME, Case, all_cases, cotangents, inputs, recurrence
from tests.close import assert_close, assert_outputs_close

load_kernels()
if jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
if (why := installation()) is not None:
    pytest.skip(why, allow_module_level=True)

CASES = [
    case
    for case in all_cases()
    if case.T <= 1000 and case.dtype != "float64" and case.chunk is None and case.ids is None
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case):
    run = jax.jit(lambda r: kernel_registry.kernels["recurrent/cuda/gpu"].run(r, config=CudaConfig.heuristic(r)))
    for strength in case.strengths:
        r = recurrence(case, strength)
        assert_outputs_close(r, run(r), reference(r), strength in EXTREME)


@pytest.mark.parametrize("gates", [("gk",), ("g",), ("gk", "gv"), ("g_gamma",)], ids="-".join)
def test_gradients_by_the_derived_form(gates):
    case = Case("gradient", B=2, T=20, heads=(2, 1, 2), gates=gates)
    r = recurrence(case, "log-sigmoid")
    do, dS = cotangents(case, r)
    arrays = inputs(case, "log-sigmoid")
    _, pull = jax.vjp(lambda x: tuple(glax.recurrent(**x, platform="cuda")), arrays)
    d = pull((do, dS))[0]
    want = reference_gradient(r, do, dS)
    assert_close("d query", d["query"], want.q, 5e-5)
    assert_close("d key", d["key"], want.k, 5e-5)
    assert_close("d value", d["value"], want.v, 5e-5)
    assert_close("d initial_state", d["initial_state"], want.initial_state, 5e-5)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "K,V,heads",
    [(128, 128, (4, 4, 4)), (256, 512, (2, 2, 2)), (128, 64, (1, 1, 8)), (100, 60, (2, 1, 2)), (1, 3, (1, 1, 1))],
)
def test_steps_in_a_pool(K, V, heads, state):
    case = Case("step", B=5, T=1, heads=heads, K=K, V=V, gates=("gk",), dtype="bfloat16", state_dtype=state)
    r = recurrence(case, "log-sigmoid")
    x = inputs(case, "log-sigmoid")
    pool = jnp.concatenate([r.initial_state, jnp.full((3, *r.initial_state.shape[1:]), 7.0, state)])[::-1]
    slots = jnp.array([7, -1, 5, 4, 3], jnp.int32)
    before = np.asarray(pool)
    step = jax.jit(
        lambda pool, x: glax.recurrent_step(
            x["query"][:, 0], x["key"][:, 0], x["value"][:, 0], pool, gk=x["gk"][:, 0], slots=slots, platform="cuda"
        ),
        donate_argnums=0,
    )
    output, after = step(pool, x)
    want, used = reference(r), np.array([0, 2, 3, 4])
    assert_close("output", output[used], want.output[used, 0], 3.5e-3)
    assert not np.asarray(output[1]).any()
    assert_close(
        "pool", np.asarray(after)[np.asarray(slots)[used]], want.final_state[used], {"float32": 1e-5}.get(state, 4e-3)
    )
    others = np.array([0, 1, 2, 6])
    np.testing.assert_array_equal(np.asarray(after)[others], before[others])


def test_a_program_is_captured_in_a_graph_and_repeats_in_every_bit():
    case = Case("loop", B=2, T=1, heads=(4, 4, 4), K=64, V=64)
    x = inputs(case, "log-sigmoid")

    @jax.jit
    def loop(state):
        def step(_, state):
            return glax.recurrent_step(
                x["query"][:, 0], x["key"][:, 0], x["value"][:, 0], state, gk=x["gk"][:, 0], platform="cuda"
            )[1]

        return jax.lax.fori_loop(0, 100, step, state)

    first, second = (np.asarray(loop(x["initial_state"])) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    want = np.asarray(glax.recurrent(
        *(jnp.broadcast_to(x[name], (2, 100, *x[name].shape[2:])) for name in ("query", "key", "value")),
        gk=jnp.broadcast_to(x["gk"], (2, 100, *x["gk"].shape[2:])), initial_state=x["initial_state"], platform="xla",
    ).final_state)  # fmt: skip
    assert_close("state", first, want, 2e-5)


def test_verification_of_a_draft():
    case = dataclasses.replace(Case("verify", B=3, T=8, heads=(2, 2, 4), K=64, V=64), dtype="bfloat16")
    x = inputs(case, "log-sigmoid")
    state = x.pop("initial_state")
    output, _ = glax.recurrent_verify(**x, state=state, platform="cuda")
    want = reference(recurrence(case, "log-sigmoid"))
    assert_close("output", output, want.output, 3.5e-3)
