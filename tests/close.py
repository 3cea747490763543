"""The comparisons of `glax.testing.tolerances` as assertions."""

import jax
import numpy as np

from glax._src.core.recurrence import Outputs, Recurrence
from glax.testing.reference import reference, reference_gradient
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


def assert_reference_gradient_is_the_slope(r: Recurrence, d: Outputs):
    """The reference's gradient under cotangents d is the slope by central differences in float64, along one random direction."""
    rng = np.random.default_rng(2)
    arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), r)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), arrays)

    def loss(step):
        outputs = reference(jax.tree.map(lambda x, dx: x + step * dx, arrays, direction))
        return sum((np.asarray(x) * np.asarray(dx)).sum() for x, dx in zip(outputs, d, strict=True))

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    gradient = reference_gradient(r, *d)
    along = sum(jax.tree.leaves(jax.tree.map(lambda x, dx: (x * dx).sum(), gradient, direction)))
    assert abs(along - slope) < 1e-6 * abs(slope)
