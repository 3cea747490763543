"""The comparisons of `glax.testing.tolerances` as assertions."""

import numpy as np

from glax._src.core.recurrence import Outputs, Recurrence
from glax.testing.tolerances import Comparison, compare, compare_gradients, compare_outputs


def assert_close(name: str, got, want, bar: float):
    """‖got - want‖ <= bar * ‖want‖, and every value finite. Below the least normal float32, all numbers are equal."""
    assert_within([compare(name, np.asarray(got), want, bar)])


def assert_outputs_close(r: Recurrence, got: Outputs, want: Outputs, extreme: bool = False):
    """Output and final state are within the bars of r's dtypes, have those dtypes, and padding rows are 0."""
    assert_within(compare_outputs(r, got, want, extreme))


def assert_gradients_close(r: Recurrence, got: Recurrence, want: Recurrence, extreme: bool = False):
    """The same for the gradient in every array of r."""
    assert_within(compare_gradients(r, got, want, extreme))


def assert_within(compared: list[Comparison]):
    missed = [comparison.reason for comparison in compared if comparison.reason is not None]
    assert not missed, "; ".join(missed)
