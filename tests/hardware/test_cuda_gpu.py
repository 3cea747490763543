"""The CUDA kernels on an NVIDIA GPU: `pytest tests/hardware/test_cuda_gpu.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.bind import bind
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


ERASURES = {"plain": (), "beta": ("beta",), "erase and write": ("erase", "write")}


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("erasure", ERASURES.values(), ids=ERASURES)
@pytest.mark.parametrize("K,V", [(128, 128), (256, 64), (100, 60)])
def test_a_draft_is_verified_and_committed_in_a_pool(K, V, erasure, state):
    case = Case(
        "draft",
        B=4,
        T=16,
        heads=(1, 2, 4),
        K=K,
        V=V,
        gates=("gk",),
        dtype="bfloat16",
        state_dtype=state,
        erasure=erasure,
    )
    x, accepted = inputs(case, "log-sigmoid"), np.array([16, 0, 5, 1])
    states = x.pop("initial_state")
    pool = jnp.concatenate([states, jnp.full((3, *states.shape[1:]), 7.0, state)])[::-1]
    slots = np.array([6, 5, -1, 3], np.int32)

    @jax.jit
    def run(pool, accepted):
        output, draft = glax.recurrent_verify(**x, state=pool, slots=jnp.asarray(slots), platform="cuda")
        return output, glax.commit(pool, draft, accepted + output[:, 0, 0, 0].astype(jnp.int32) * 0)

    kernels = [decision.kernel for decision in glax.explain(run, pool, accepted)]
    assert kernels == ["recurrent.verify/cuda/gpu", "recurrent.step/cuda/gpu"]
    output, after = run(pool, accepted)
    r = recurrence(case, "log-sigmoid")
    used = np.array([0, 1, 3])
    assert_close("output", output[used], reference(r).output[used], 3.5e-3)
    assert not np.asarray(output[2]).any()
    for b in used:
        of_b = {name: array[b : b + 1, : accepted[b]] for name, array in x.items()}
        want = (
            states[b] if accepted[b] == 0 else reference(bind(**of_b, initial_state=states[b : b + 1])).final_state[0]
        )
        assert_close(f"state {b}", after[slots[b]], np.asarray(want, np.float64), 2e-5 if state == "float32" else 4e-3)
    others = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(np.asarray(after)[others], np.asarray(pool)[others])


@pytest.mark.parametrize("erasure", list(ERASURES.values())[1:], ids=list(ERASURES)[1:])
@pytest.mark.parametrize("gates", [(), ("g",), ("gk",), ("gk", "gv"), ("g_gamma",)], ids=str)
def test_the_delta_rule(gates, erasure):
    forward = jax.jit(lambda r: kernel_registry.kernels["recurrent/cuda/gpu"].run(r, config=CudaConfig.heuristic(r)))
    for options in (dict(T=50, reverse=True), dict(T=60, cuts=(0, 0, 13, 14, 57))):
        case = Case("delta", heads=(1, 2, 4), K=40, V=24, gates=gates, erasure=erasure, **options)
        for strength in ("log-sigmoid", "extreme") if gates and gates != ("g_gamma",) else ("log-sigmoid",):
            r = recurrence(case, strength)
            assert_outputs_close(r, forward(r), reference(r), strength in EXTREME)


def test_a_step_of_the_delta_rule():
    case = Case("step", B=3, T=1, heads=(1, 1, 2), K=128, V=128, gates=("g",), erasure=("beta",), dtype="bfloat16")
    x = {name: array if name == "initial_state" else array[:, 0] for name, array in inputs(case, "log-sigmoid").items()}
    pool = x.pop("initial_state")
    output, after = jax.jit(lambda x, pool: glax.recurrent_step(**x, state=pool, platform="cuda"))(x, pool)
    want = reference(recurrence(case, "log-sigmoid"))
    assert_close("output", output, want.output[:, 0], 3.5e-3)
    assert_close("state", after, want.final_state, 1e-5)


def test_the_gradient_of_a_verification_is_that_of_the_recurrence():
    case = Case("gradient", B=2, T=6, heads=(2, 1, 2), gates=("gk",))
    x = inputs(case, "log-sigmoid")
    pool = x.pop("initial_state")[::-1]

    def loss(x, pool, platform, slots=None):
        return (glax.recurrent_verify(**x, state=pool, slots=slots, platform=platform)[0] ** 2).sum()

    d_x, d_pool = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, pool, "cuda", jnp.array([1, 0]))
    want_x, want_states = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, pool[::-1], "xla")
    for name in want_x:
        assert_close(f"d {name}", d_x[name], np.asarray(want_x[name], np.float64), 5e-5)
    assert_close("d pool", d_pool[::-1], np.asarray(want_states, np.float64), 5e-5)
