"""Keep the segments of a row apart where a kernel's products mix them.

Many kernels receive segments as gates of -inf (`Recurrence.folded`). A chunk of theirs holds tokens of several segments, and a
weight of 0 does not stop NaN or inf: a document with such a number would spoil others. What a document spoils is not finite.
The results of such kernels are therefore checked, and computed again token by token where they are not finite.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from glax._src.core.recurrence import Outputs, Recurrence, varying_like
from glax._src.core.segments import Segments

Tree = TypeVar("Tree")


def isolating(run: Callable[..., Any], segments: Segments) -> Callable[..., Any]:
    """Return `run` with results in which each segment depends on its own rows alone.

    run: (r) -> Outputs or (Outputs, Residuals), or (r, d_output, d_final, *residuals) -> Recurrence, of a recurrence whose
    `segments` are folded.
    """

    def checked(r: Recurrence, *given):
        # Registers kernels, which happens at the first call.
        from glax._src.kernels.xla.isolated import isolated_gradient, isolated_outputs

        found = run(r, *given)
        if given:
            d_output, d_final, *_ = given
            again = functools.partial(isolated_gradient, r, d_output, d_final, segments.resets)
            return if_finite(found, again)
        again = functools.partial(isolated_outputs, r, segments.resets)
        if isinstance(found, Outputs):
            return if_finite(found, again)
        # The gradient checks its own results, whatever the residuals hold.
        outputs, residuals = found
        return if_finite(outputs, again), residuals

    return checked


def if_finite(found: Tree, again: Callable[[], Tree]) -> Tree:
    """Return `found` if all of its numbers are finite, else again().

    A loop of at most one iteration overwrites `found` in place. lax.cond would copy it. The loop carries every array as a matrix:
    XLA would else carry them with time first, as again() forms them, and transpose `found` before and after the loop.
    """

    def as_matrices(tree):
        return jax.tree.map(lambda x: x.reshape(x.shape[0], math.prod(x.shape[1:])), tree)

    def overwrite(carry):
        return jax.tree.map(varying_like, (jnp.ones((), bool), as_matrices(again())), carry)

    _, matrices = lax.while_loop(lambda carry: ~carry[0], overwrite, (all_finite(found), as_matrices(found)))
    return jax.tree.map(lambda x, like: x.reshape(like.shape), matrices, found)


def all_finite(tree) -> Bool[Array, ""]:
    """Return whether all numbers of a tree's arrays are finite."""
    # XLA for CPUs forms such a sum in vectors, unlike a reduction of booleans.
    sums = [(x * 0).sum(dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    return jnp.isfinite(sum(sums, jnp.float32(0)))
