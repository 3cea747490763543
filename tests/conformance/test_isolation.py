"""NaN, inf and overflow in one document change no other document's outputs, final states or gradients.

A sample of forms and poisons. `python -m tests.poison_table` tries all of them, on every kernel that runs on a machine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.registry import KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.xla.isolated import run_checked
from glax._src.solve.autodiff import solve
from glax._src.solve.dispatch import Choice, run_spec
from glax.testing.cases import Case
from tests.poison import (
    LAYOUTS,
    Layout,
    erasing_along,
    gradient_of,
    leaks,
    operands_of,
    second_derivatives,
    spoiled,
)

load_kernels()
NATIVE = ("recurrent/cpp/cpu", "recurrent.vjp/cpp/cpu")
CHUNKED = ("chunked/xla/any", "chunked.vjp/xla/any")
TOKENS = ("recurrent/xla/any", "recurrent.vjp/xla/any")
FORMS = ("none", "constant", "head", "key", "key+value", "none beta", "head beta", "key erase+write")
SAMPLE = {
    "segment_ids": {NATIVE: FORMS, CHUNKED: ("none", "key+value", "head beta"), TOKENS: ("key", "key erase")},
    "cu_seqlens": {NATIVE: ("head", "key beta"), CHUNKED: ("head", "key erase"), TOKENS: ("value",)},
    "cu_seqlens, last": {NATIVE: ("key",), CHUNKED: ("head",), TOKENS: ("head", "key erase")},
    "rows": {NATIVE: ("key", "head beta"), CHUNKED: ("constant",), TOKENS: ("none",)},
}


def sample():
    for name, chosen in SAMPLE.items():
        for kernels, forms in chosen.items():
            for case in LAYOUTS[name].cases():
                for kernel in kernels:
                    takes = case.erasure or kernel != "recurrent.vjp/xla/any"
                    if case.name in forms and takes:
                        fast = [pytest.mark.fast] if kernels is NATIVE else []
                        yield pytest.param(LAYOUTS[name], case, kernel, id=f"{name}-{case.name}-{kernel}", marks=fast)


def programs_of(spec: KernelSpec):
    program = jax.jit(functools.partial(run_spec, spec, Choice()))
    return (None, program) if spec.is_gradient else (program, None)


@pytest.mark.parametrize(("layout", "case", "kernel"), list(sample()))
def test_a_poisoned_document_harms_no_other(layout: Layout, case: Case, kernel: str):
    spec, operands = kernel_registry.kernels[kernel], operands_of(case)
    found = leaks(layout, operands, *programs_of(spec), few=True)
    assert not found, "\n".join(found)


@pytest.mark.fast
@pytest.mark.parametrize("options", [dict(), dict(bonus=True), dict(states_every=64)], ids=["plain", "bonus", "states"])
def test_public_calls_keep_segments_apart(options):
    """Of a row of three documents, NaN in the second one leaves the others' outputs and gradients as they were."""
    rng, (B, T, H, K) = np.random.default_rng(0), (1, 200, 2, 8)
    ids = jnp.asarray(np.repeat([3, 1, 2], (70, 60, 70)))[None]
    arrays = [jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.float32) for _ in range(4)]
    if options.get("bonus"):
        options = dict(bonus=jnp.ones((H, K)))

    @jax.jit
    def outputs_and_gradients(arrays):
        def output(q, k, v, g):
            return glax.recurrent(q, k, v, gk=-jnp.abs(g), segment_ids=ids, **options).output

        found, pull = jax.vjp(output, *arrays)
        return found, *pull(jnp.ones_like(found))

    others = np.r_[0:70, 130:200]
    clean = outputs_and_gradients(arrays)
    for i in range(4):
        poisoned = [x.at[:, 100].set(jnp.nan) if i == j else x for j, x in enumerate(arrays)]
        for got, want in zip(outputs_and_gradients(poisoned), clean, strict=True):
            np.testing.assert_allclose(got[:, others], want[:, others], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before_decay", [False, True])
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens, last", "segment_ids", "rows"])
def test_erasures_along_another_key_keep_documents_apart(name, before_decay):
    layout, run = LAYOUTS[name], functools.partial(solve, Choice())
    operands = erasing_along(operands_of(layout.case("key erase")), before_decay)
    found = leaks(layout, operands, jax.jit(run), jax.jit(gradient_of(run)), few=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("platform", [Platform.CPP, Platform.XLA])
@pytest.mark.parametrize("form", ["none", "constant", "head", "key+value", "head beta", "key erase+write"])
@pytest.mark.parametrize("name", ["cu_seqlens", "segment_ids"])
def test_second_derivatives_keep_documents_apart(name, form, platform):
    layout = LAYOUTS[name]
    operands = operands_of(layout.case(form))
    # Of constant decays the clean call forms the difference of sums over all tokens, and the poisoned call sums products.
    bar = 5e-3 if form == "constant" else 1e-3
    for of_cotangents in (False, True):
        program = second_derivatives(functools.partial(solve, Choice(platform)), of_cotangents)
        found = leaks(layout, operands, None, program, few=True, bar=bar)
        assert not found, "\n".join(found)


@pytest.mark.parametrize("spoiled", [False, True])
def test_third_derivatives_keep_segments_apart(spoiled):
    """Those of each segment are those of its sequence alone, also beside a segment of NaN."""
    ids = jnp.asarray(np.repeat([1, 2, 3], (5, 4, 6)))[None]
    x = jnp.sin(jnp.arange(15 * 3.0)).reshape(1, 15, 1, 3)
    x = x.at[:, 6].set(jnp.nan) if spoiled else x

    def third(x, **options):
        def derivative(f):
            return lambda x: (jax.grad(f)(x) ** 2 * 0.1).sum()

        def value(x):
            return (glax.recurrent(x, x, x, gk=-jnp.exp(x), **options).output ** 2).sum()

        return jax.jit(jax.grad(derivative(derivative(value))))(x)

    got = third(x, segment_ids=ids)
    for low, high in ((0, 5), (9, 15)):
        np.testing.assert_allclose(got[:, low:high], third(x[:, low:high]), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("kernel,form", [("chunked/xla/any", "head"), ("chunked.vjp/xla/any", "none")])
def test_what_is_computed_again_keeps_packed_sequences_apart(kernel, form):
    """As on GPUs, here of results that are never finite."""
    layout, spec = LAYOUTS["cu_seqlens"], kernel_registry.kernels[kernel]
    operands = operands_of(layout.case(form))
    clean = programs_of(spec)[spec.is_gradient](*operands[: 3 if spec.is_gradient else 1])

    def spoiling(r, *given):
        return jax.tree.map(lambda x: x * jnp.nan, clean)

    program = jax.jit(functools.partial(run_checked, spoiling))
    found = leaks(layout, operands, *((None, program) if spec.is_gradient else (program, None)), few=True)
    got = program(*operands[: 3 if spec.is_gradient else 1])
    assert not found and not spoiled(layout, (), got, clean, False, 1e-4), "\n".join(found)


@pytest.mark.fast
@pytest.mark.parametrize("platform", ["xla", "cpp"])
@pytest.mark.parametrize("erases", [False, True], ids=["no erasure", "beta"])
@pytest.mark.parametrize("call", ["step", "verify", "prefill"])
def test_slots_of_a_pool_stay_apart(call, erases, platform):
    """NaN in one sequence, or in the row of its state, leaves the outputs and states of others as they were."""
    rng, (N, T, H, K) = np.random.default_rng(0), (3, 1 if call == "step" else 5, 2, 8)
    slots, cuts = jnp.array([2, 0, 3]), jnp.arange(N + 1) * T
    rows = {name: rng.normal(size=(N, T, H, K)) for name in ("query", "key", "value", "gk")}
    rows["gk"] = -abs(rows["gk"])
    if erases:
        rows |= dict(beta=rng.random((N, T, H)))
    operands = {name: jnp.asarray(x, jnp.float32) for name, x in rows.items()} | dict(pool=jnp.ones((4, H, K, K)))

    @jax.jit
    def run(pool, **rows):
        if call == "step":
            return glax.recurrent_step(
                **{k: x[:, 0] for k, x in rows.items()}, state=pool, slots=slots, platform=platform
            )
        if call == "verify":
            return glax.recurrent_verify(**rows, state=pool, slots=slots, platform=platform)[0], pool
        rows = {k: x.reshape(1, N * T, *x.shape[2:]) for k, x in rows.items()}
        output, pool = glax.prefill_into(pool, slots, **rows, cu_seqlens=cuts, platform=platform)
        return output.reshape(N, T, H, K), pool

    clean = run(**operands)
    for name, x in operands.items():
        output, pool = run(**(operands | {name: x.at[0 if name == "pool" else 1].set(jnp.nan)}))
        np.testing.assert_allclose(output[::2], clean[0][::2], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(pool[1:], clean[1][1:], rtol=1e-5, atol=1e-5)
