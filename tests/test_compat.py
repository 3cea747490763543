"""Other packages' functions on glax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.compat import easydel
from tests.cases import Case, inputs
from tests.close import assert_close

CASE = Case("", B=2, T=37, K=6, V=5)


@pytest.mark.parametrize("chunk_size", [0, 8, 37, 100])
def test_easydel_recurrent_gla(chunk_size):
    a = inputs(CASE, "log-sigmoid")
    whole = glax.recurrent_gla(a["query"], a["key"], a["value"], a["gk"], initial_state=a["initial_state"])
    output, state = easydel.recurrent_gla(**a, chunk_size=chunk_size, output_final_state=True)
    assert_close("output", output, whole.output, 2e-6)
    assert_close("state", state, whole.final_state, 2e-6)


def test_easydel_defaults():
    a = inputs(CASE, "log-sigmoid")
    a = {name: x.astype(jnp.bfloat16) for name, x in a.items()}
    output, state = easydel.recurrent_gla(**a, scale=2.0)
    assert state is None
    assert output.dtype == jnp.float32
    default, _ = easydel.recurrent_gla(**a)
    np.testing.assert_allclose(output, default * 2 * 6**0.5, rtol=1e-5, atol=1e-5)
    assert easydel.recurrent_gla(**a, dtype=jnp.bfloat16)[0].dtype == jnp.bfloat16
    usual = [-1.0, -1, np.float64(-1.0), np.asarray(-1.0), jnp.float32(-1.0), jnp.bfloat16(-1.0), jnp.asarray(-1)]
    for meant in usual:  # however it arrives
        assert_close(repr(meant), easydel.recurrent_gla(**a, scale=meant)[0], default, 1e-6)
    run = jax.jit(lambda scale: easydel.recurrent_gla(**a, scale=scale)[0])
    assert_close("traced -1.0", run(jnp.float32(-1.0)), default, 1e-6)
    assert_close("traced 2.0", run(jnp.float32(2.0)), output, 1e-6)
    assert_close("-2.0", easydel.recurrent_gla(**a, scale=jnp.float32(-2.0))[0], -output, 1e-6)
    empty = easydel.recurrent_gla(*(a[name][:, :0] for name in ("query", "key", "value", "gk")), chunk_size=4)[0]
    assert empty.shape == (2, 0, 2, 5)
