"""The bounds that glax._src.kernels.common.limits derives hold in float32 arithmetic."""

import pathlib
import re

import numpy as np
import pytest

import glax
from glax._src.kernels.common.limits import FAST_LIMIT, LOG_OF_NOTHING, LOG_OF_ZERO

pytestmark = pytest.mark.fast
FLOAT32 = np.finfo(np.float32)
NATIVE = pathlib.Path(glax.__file__).parent / "_src/kernels/cpu/native/problem.h"


def exp(log):
    return np.exp(np.float32(log))


def test_factors_about_the_middle_leave_twelve_digits():
    assert exp(FAST_LIMIT) * 2.9e12 < FLOAT32.max
    assert exp(-FAST_LIMIT) > FLOAT32.tiny * 0.7e12


def test_from_middle_to_middle_takes_two_factors():
    """Two factors preserve a state that fills the range; one factor underflows to 0."""
    state = exp(FAST_LIMIT)
    assert state * exp(-2 * FAST_LIMIT) == 0
    np.testing.assert_allclose(state * exp(-FAST_LIMIT) * exp(-FAST_LIMIT), exp(-FAST_LIMIT), rtol=1e-5)


def test_logs_of_zero():
    assert exp(LOG_OF_NOTHING) == 0 and exp(LOG_OF_NOTHING + 1) > 0
    assert exp(LOG_OF_ZERO) == 0 and np.spacing(np.float32(-64 * LOG_OF_ZERO)) < 1e-3


def test_native_factors_leave_twenty_one_digits():
    found = re.findall(r"constexpr float (wide|narrow|faint) = ([-0-9.e]+);", NATIVE.read_text())
    wide, narrow, faint = (float(dict(found)[name]) for name in ("wide", "narrow", "faint"))
    assert exp(wide) * 1.4e21 < FLOAT32.max
    assert exp(-wide - 47) > FLOAT32.tiny
    assert (
        FLOAT32.tiny / exp(-wide) < faint * FLOAT32.eps / 2
    )  # what underflows beside the largest of a row that is not faint
    assert exp(narrow) * 1.2e38 < FLOAT32.max
