"""Every kernel that erases x every case of the delta rule x (output, state, every gradient), against the float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, KernelSpec, Role, kernel_registry
from glax._src.kernels import load_kernels
from glax.testing.cases import FORMS
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import ERASING_BARS, named, norm
from tests.close import (
    assert_close,
    assert_reference_gradient_is_the_slope,
)
from tests.compiling import OPTIMIZED
from tests.delta_cases import DeltaCase, Draw, all_cases, growing_cases
from tests.suite import at_each_draw, check_forward, check_gradient, check_taken, wanted, wanted_gradient

load_kernels()
CASES, GROWING = list(all_cases()), list(growing_cases())
KERNELS = [s for s in kernel_registry.kernels.values() if s.erases and s.backend in (Backend.ANY, Backend.here())]
FORWARD = [spec for spec in KERNELS if spec.role is Role.FORWARD]
BACKWARD = [spec for spec in KERNELS if spec.is_gradient]
FORM_OF = {gates: form for form, gates in FORMS.items()}
FAST = ("T65", "head-packed-reverse", "bfloat16-head", "heads1-2-4")


def takes(case: DeltaCase, spec: KernelSpec) -> bool:
    takes_form = spec.erasing_forms is None or FORM_OF[case.gates] in spec.erasing_forms
    before_decay = spec.erases_before_decay or not case.before_decay or not case.gates
    return takes_form and before_decay and (spec.erases_along or not case.along)


def on_each(cases: list[DeltaCase], specs: list[KernelSpec]):
    """Every case on every kernel that names the form of its decay: `test_kernels_name_the_forms_beside_an_erasure` has them."""
    marks = {True: [pytest.mark.fast], False: []}
    return pytest.mark.parametrize(
        ("case", "spec"),
        [
            pytest.param(c, s, id=f"{c}-{s.name}", marks=marks[str(c) in FAST])
            for c in cases
            for s in specs
            if takes(c, s)
        ],
    )


@functools.cache
def jitted(spec: KernelSpec, config, optimized: bool = False):
    return jax.jit(functools.partial(spec.run, config=config), compiler_options=OPTIMIZED if optimized else None)


def compiled(case: DeltaCase, spec: KernelSpec):
    r = case.recurrence(case.draws[0])
    check_taken(r, spec)
    return compiled_for(r, spec, optimized=str(case) in (*FAST, "key"))


def compiled_for(r: Recurrence, spec: KernelSpec, optimized: bool = False):
    return jitted(spec, spec.config.heuristic(r), optimized)


def test_kernels_name_the_forms_beside_an_erasure():
    """Token by token XLA takes all; in chunks, and in the native library, gates decay the state's rows alone."""
    here = [spec for spec in KERNELS if spec.backend in (Backend.ANY, Backend.CPU) and not spec.is_pooled]
    left_out = {spec.name: set(FORMS) - set(spec.erasing_forms or FORMS) for spec in here}
    none, columns = frozenset(), frozenset({"value", "key+value"})
    wanted = dict.fromkeys(("recurrent/xla/any", "recurrent.vjp/xla/any"), none)
    wanted |= dict.fromkeys(("chunked/xla/any", "chunked.vjp/xla/any"), columns)
    if Backend.here() is Backend.CPU:
        wanted |= dict.fromkeys(("recurrent/cpp/cpu", "recurrent.vjp/cpp/cpu"), columns)
    assert left_out == wanted


@on_each(CASES, FORWARD)
def test_forward(case, spec):
    check_forward(case, compiled(case, spec))


@on_each(CASES, BACKWARD)
def test_gradient(case, spec):
    check_gradient(case, compiled(case, spec))


@on_each(GROWING, FORWARD)
def test_a_growing_state_is_as_exact_as_float32_allows(case, spec):
    """No worse than 3 times the same reference in float32, whose rounding errors grow with the state."""
    run = compiled(case, spec)

    def check(draw):
        r, want = wanted(case, draw)
        plain, got = reference(r, np.float32), run(r)
        for name, x, y, z in zip(("output", "final_state"), got, plain, want, strict=True):
            assert norm(z) < 1e30
            bar = max(3 * norm(np.asarray(y, np.float64) - z) / norm(z), ERASING_BARS["float32"][0])
            assert_close(name, x, z, bar)

    at_each_draw(case, check)


@on_each(GROWING, BACKWARD)
def test_a_gradient_through_a_growing_state_is_as_exact_as_float32_allows(case, spec):
    """No worse than 3 times the same reference in float32, as above; T is short enough that gradients stay below 1e30."""
    run = compiled(case, spec)

    def check(draw):
        r, d, want = wanted_gradient(case, draw)
        plain, got, want = (named(x) for x in (reference_gradient(r, *d, np.float32), run(r, *d), want))
        for name, exact in want.items():
            assert norm(exact) < 1e30
            bar = max(3 * norm(np.asarray(plain[name], np.float64) - exact) / norm(exact), ERASING_BARS["float32"][1])
            assert_close(name, got[name], exact, bar)

    at_each_draw(case, check)


def test_float64():
    with jax.enable_x64(True):
        for name in ("head", "erase-write-key-packed-reverse"):
            case = next(case for case in CASES if case.name == name)
            wide = DeltaCase(**vars(case) | dict(dtype="float64", gate_dtype="float64", T=case.T, draws=case.draws[:3]))
            for spec in KERNELS:
                if spec.is_pooled or spec.refusal(wide.recurrence(Draw())) is not None:
                    continue
                check = check_gradient if spec.is_gradient else check_forward
                check(wide, compiled(wide, spec))


# ---- an erasure of nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", [(), ("g",), ("gk",)], ids=str)
def test_an_erasure_of_zero_changes_nothing(gates):
    case = DeltaCase("", gates, ("erase",), **dict(cuts=(0, 10, 30), T=32))
    r = case.recurrence(Draw("mild", "0"))
    plain, d = r.replace(erasure=None), case.cotangents(r)
    want, want_gradient = reference(plain)._asdict(), named(reference_gradient(plain, *d))
    for spec in (spec for spec in FORWARD if spec.refusal(r, None) is None):
        for name, x in compiled_for(r, spec)(r)._asdict().items():
            assert_close(name, x, want[name], ERASING_BARS["float32"][0])
    for spec in (spec for spec in BACKWARD if spec.refusal(r, None) is None):
        got = named(compiled_for(r, spec)(r, *d))
        for name in want_gradient:
            assert_close(name, got[name], want_gradient[name], ERASING_BARS["float32"][1])


# ---- the suite itself can fail -----------------------------------------------------------------------------------------

CHUNKED, CHUNKED_VJP = (kernel_registry.kernels[f"{name}/xla/any"] for name in ("chunked", "chunked.vjp"))
sound = jitted(CHUNKED, CHUNKED.config(64))
sound_gradient = jitted(CHUNKED_VJP, CHUNKED_VJP.config(64))


def by_token(r: Recurrence, step) -> Outputs:
    """A recurrence of one's own, over the tokens of one sequence and a key gate: step(S, decay, k, v, beta) -> S."""

    def body(S, row):
        q, k, v, g, beta = row
        S = step(S, jnp.exp(g)[..., None], k, v, beta[..., None])
        return S, jnp.einsum("bhk,bhkv->bhv", q * r.scale[:, None, None], S)

    rows = (jnp.moveaxis(x, 1, 0) for x in (r.q, r.k, r.v, r.decay.key, r.erasure.beta))
    S, o = jax.lax.scan(body, r.start_state, tuple(rows))
    return Outputs(jnp.moveaxis(o, 0, 1), S)


def read(S, k):
    return jnp.einsum("bhkv,bhk->bhv", S, k)


def written(S, k, u):
    return S + k[..., None] * u[..., None, :]


def right(S, decay, k, v, beta):
    return written(decay * S, k, beta * (v - read(decay * S, k)))


def decay_after_erase(S, decay, k, v, beta):
    return written(decay * (S - k[..., None] * (beta * read(S, k))[..., None, :]), k, beta * v)


def erase_before_decay_is_read(S, decay, k, v, beta):
    return written(decay * S, k, beta * (v - read(S, k)))


def beta_on_the_erasure_alone(S, decay, k, v, beta):
    return written(decay * S, k, v - beta * read(decay * S, k))


def beta_on_the_value_alone(S, decay, k, v, beta):
    return written(decay * S, k, beta * v - read(decay * S, k))


STEPS = (decay_after_erase, erase_before_decay_is_read, beta_on_the_erasure_alone, beta_on_the_value_alone)


@pytest.mark.parametrize("fault", STEPS, ids=lambda step: step.__name__)
def test_a_faulty_step_is_caught(fault):
    case = DeltaCase("", ("gk",), T=137, draws=(Draw(),))
    check_forward(case, jax.jit(functools.partial(by_token, step=right)))
    with pytest.raises(AssertionError):
        check_forward(case, jax.jit(functools.partial(by_token, step=fault)))


def erase_with_the_key_before(r: Recurrence) -> Outputs:
    return sound(r.replace(erasure=r.erasure.replace(erase=jnp.roll(r.erasure.erase, 1, axis=1))))


def state_not_reset(r: Recurrence) -> Outputs:
    """The packed sequences as one, of which every output but those of the first sequence is wrong."""
    whole = sound(
        r.replace(boundaries=r.boundaries[jnp.array([0, -1])], initial_state=r.initial_state[:1], scale=r.scale[:1])
    )
    return Outputs(whole.output, sound(r).final_state)


@pytest.mark.parametrize("fault", [erase_with_the_key_before, state_not_reset], ids=lambda fault: fault.__name__)
def test_a_faulty_input_is_caught(fault):
    case = DeltaCase("", ("gk",), ("erase", "write"), cuts=(0, 60, 137), draws=(Draw("mild"),))
    check_forward(case, sound)
    with pytest.raises(AssertionError):
        check_forward(case, fault)


def test_an_inverse_cut_after_one_term_is_caught(monkeypatch):
    from glax._src.kernels.xla import delta_chunk

    case = DeltaCase("", ("g",), T=137, draws=(Draw("mild", "to 2"),))
    check_forward(case, sound)
    monkeypatch.setattr(delta_chunk, "unit_inverse", lambda L, descending: jnp.eye(L.shape[-1]) - L)
    with pytest.raises(AssertionError):
        check_forward(case, jax.jit(lambda r: CHUNKED.run(r, config=CHUNKED.config(64))))


def gradient_without_the_gain_of_beta(r: Recurrence, *d) -> Recurrence:
    g = sound_gradient(r, *d)
    return g.replace(erasure=g.erasure.replace(beta=g.erasure.beta - (g.v * r.v).sum(-1) / r.erasure.beta))


def test_a_faulty_gradient_is_caught():
    case = DeltaCase("", ("g",), T=137, draws=(Draw(),))
    check_gradient(case, sound_gradient)
    with pytest.raises(AssertionError):
        check_gradient(case, gradient_without_the_gain_of_beta)


# ---- the reference itself ----------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("erasure", [("beta",), ("erase", "write")], ids=str)
def test_reference_gradient_is_the_slope_of_the_reference(erasure):
    case = DeltaCase("", ("g", "g_gamma", "gk", "gv"), erasure, B=2, T=9, heads=(4, 2, 1), K=3, V=4, reverse=True)
    r = case.recurrence(Draw())
    assert_reference_gradient_is_the_slope(r, case.cotangents(r))
