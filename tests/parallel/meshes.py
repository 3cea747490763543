"""Meshes of simulated devices, and the comparison of what they compute."""

import jax
import numpy as np
from jax.sharding import AxisType

from tests.close import assert_close


def mesh_of(kind=AxisType.Auto, **axes):
    size = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices()[:size])


def tree_close(got, want, bar=5e-6):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("parallel", x, np.asarray(y), bar)
