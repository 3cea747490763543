"""The shapes in annotations are checked while tests run."""

import jax.numpy as jnp
import jaxtyping
import pytest

from glax._src.kernels.xla.chunk_math import outer

pytestmark = pytest.mark.fast


def test_a_wrong_shape_is_found():
    assert outer(jnp.ones((1, 2, 4, 3)), jnp.ones((1, 2, 4, 5))).shape == (1, 2, 3, 5)
    with pytest.raises(jaxtyping.TypeCheckError):
        outer(jnp.ones((1, 2, 4, 3)), jnp.ones((1, 1, 4, 5)))
