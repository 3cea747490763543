"""`glax.testing.check_kernel` finds a kernel's faults, by the one set of tolerances."""

import dataclasses

import numpy as np
import pytest

from glax._src.core.recurrence import Outputs, Recurrence, gradient_like
from glax.testing import CASES, Case, check_kernel
from glax.testing.reference import reference, reference_gradient
from tests import strengths

pytestmark = pytest.mark.fast
SMALL = Case("small", B=2, T=7, heads=(2, 1, 2), K=3, V=4, strengths=("log-sigmoid", "-inf on 5%"))
PACKED = Case("packed", T=9, K=3, V=4, gates=("g", "gv"), cuts=(0, 0, 3, 8), reverse=True)


def sound(r: Recurrence) -> Outputs:
    output, state = reference(r)
    return Outputs(np.asarray(output).astype(r.q.dtype), np.asarray(state).astype(r.dtype))


def sound_gradient(r: Recurrence, d_output, d_final) -> Recurrence:
    return gradient_like(r, reference_gradient(r, d_output, d_final))


def test_a_sound_kernel_passes_every_case():
    results = check_kernel(sound, sound_gradient, cases=[SMALL, PACKED], name="mine")
    assert [(x.kernel, x.case, x.status) for x in results] == [
        (kernel, case, "pass")
        for case in ("small, log-sigmoid", "small, -inf on 5%", "packed")
        for kernel in ("mine", "mine.vjp")
    ]
    assert all(0 < x.error <= x.bar for x in results)


def wrong_output(r: Recurrence) -> Outputs:
    outputs = sound(r)
    return outputs._replace(output=outputs.output * np.float32(1 + 2e-5))


def wrong_dtype(r: Recurrence) -> Outputs:
    return Outputs(*reference(r))


def infinite_state(r: Recurrence) -> Outputs:
    outputs = sound(r)
    return outputs._replace(final_state=outputs.final_state / np.float32(0))


def filled_padding(r: Recurrence) -> Outputs:
    outputs = sound(r)
    outputs.output[:, -1] = 1e-30
    return outputs


def fails(r: Recurrence) -> Outputs:
    raise RuntimeError("launch failed\nsecond line")


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value)")
@pytest.mark.parametrize(
    ("run", "said"),
    [
        (wrong_output, "kernel on 'packed': output is off by 2.0e-05, bar 1.0e-05"),
        (wrong_dtype, "output is float64[1, 9, 2, 4], expected float32[1, 9, 2, 4]"),
        (infinite_state, "72 of 72 values of final_state are not finite"),
        (filled_padding, "padding rows of output are not 0"),
        (fails, "RuntimeError: launch failed"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_fault_of_a_forward_is_listed(run, said):
    with pytest.raises(AssertionError) as miss:
        check_kernel(run, cases=[PACKED])
    assert said in str(miss.value)


def wrong_scale(r: Recurrence, *d) -> Recurrence:
    gradient = sound_gradient(r, *d)
    return gradient.replace(scale=gradient.scale * 1.001)


def no_gate(r: Recurrence, *d) -> Recurrence:
    gradient = sound_gradient(r, *d)
    return gradient.replace(decay=dataclasses.replace(gradient.decay, key=None))


@pytest.mark.parametrize(
    ("gradient", "said"), [(wrong_scale, "d scale is off by 1.0e-03, bar 5.0e-04"), (no_gate, "expected q, k, v")]
)
def test_a_fault_of_a_gradient_is_listed(gradient, said):
    with pytest.raises(AssertionError) as miss:
        check_kernel(sound, gradient, cases=[dataclasses.replace(SMALL, strengths=("log-sigmoid",))])
    assert said in str(miss.value) and str(miss.value).startswith("1 of 2 results miss")


def test_unsupported_cases_are_refused_and_one_must_be_supported():
    def packed_alone(r: Recurrence) -> str | None:
        return None if r.boundaries is not None else "only packed sequences are supported"

    results = check_kernel(sound, cases=[SMALL, PACKED], supports=packed_alone)
    assert [x.status for x in results] == ["refused", "refused", "pass"]
    with pytest.raises(AssertionError, match="kernel supports none of 2 cases"):
        check_kernel(sound, cases=[SMALL], supports=packed_alone)


def test_the_default_cases_have_every_form_and_dtype():
    assert {case.dtype for case in CASES} == {"float32", "bfloat16", "float16"}
    assert {case.gates for case in CASES} >= {(), ("g",), ("g_gamma",), ("gk",), ("gv",), ("gk", "gv")}
    assert any(case.cuts and case.reverse for case in CASES)


def test_strengths_lie_on_both_sides_of_the_limits_of_float32():
    normal, tiny = np.finfo(np.float32).tiny, np.finfo(np.float32).smallest_subnormal
    with np.errstate(under="ignore"):
        for limit, least in ((strengths.NORMAL, normal), (strengths.TINY, tiny)):
            assert np.exp(-2.0 * limit) >= least
        assert tiny < np.exp(-2.0 * strengths.SUBNORMAL) < normal
        assert np.exp(np.float32(-2 * strengths.ZERO)) == 0
    assert list(strengths.BAND) == sorted(strengths.BAND)
