"""Calls that write over an operand stand apart from what XLA would fuse them with."""

import jax
import jax.numpy as jnp
import pytest

from glax._src.kernels.common.foreign import call
from glax._src.kernels.pallas_gpu.chunks import pairs
from glax._src.kernels.pallas_gpu.gradient import delta_key
from glax._src.kernels.pallas_gpu.scan import key

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("aliases", "barriers"), [(None, 0), ({1: 0}, 2)])
def test_operands_and_results_in_place_are_behind_barriers(aliases, barriers):
    """test_hopper_compile.py shows what XLA does without them."""
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def write(a, b):
        return call("some_target", [a, b[:8]], [x], input_output_aliases=aliases)[0]

    text = jax.jit(write).lower(x, jax.ShapeDtypeStruct((9, 4), jnp.float32)).as_text()
    assert text.count("optimization_barrier") == barriers


class Elsewhere:
    """A program that a kernel never is, whose numbers the compiler must reckon with."""

    def scale(self):
        return jnp.float32(jnp.inf)

    def count(self):
        return -1


@pytest.mark.parametrize("x", [0.0, 1.0, 32])
@pytest.mark.parametrize("program", [pairs.Program, delta_key.Program, key.Program], ids=lambda x: x.__module__)
def test_a_hidden_number_might_be_another(program, x):
    """ptxas writes a matrix that it knows too late: zeros made from x + x it knew."""
    assert program.hidden(Elsewhere(), x) != x
