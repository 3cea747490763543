"""Compute a recurrence token by token where its results are not finite, so that no sequence or segment reads another's rows.

The chunks of other kernels hold tokens of several segments. A gate of -inf keeps these apart only while all numbers are finite,
because 0 times NaN or inf is NaN. Here a reset selects a state of zeros.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from glax._src.core.backend import Backend
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, varying_like
from glax._src.kernels.xla.delta_recurrent import delta_by_token, delta_gradient_by_token

Tree = TypeVar("Tree")
Resets = Bool[Array, "B T"] | None


def isolate(run: Callable[..., Any], r: Recurrence, *given) -> Any:
    """Return run(r, *given). If r is packed and the backend is a GPU, results that are not all finite are computed again token
    by token. run, given: as in `run_checked`.

    On GPUs, NaN of one sequence could otherwise reach others.
    """
    if r.boundaries is None or Backend.here() in (Backend.CPU, Backend.TPU):
        return run(r, *given)
    return run_checked(run, r, *given)


def run_checked(run: Callable[..., Any], r: Recurrence, *given, resets: Resets = None, axis=None) -> Any:
    """Return run(r, *given), computed again token by token if a number of the result is not finite.

    run: (r) -> Outputs or (Outputs, Residuals), or (r, d_output, d_final, *residuals) -> Recurrence, the gradient. given:
    empty, or the arguments behind r. resets: [B, T], the tokens that start from a state of zeros; None if there are none. axis:
    axes of a mesh along which all shards must be finite.
    """
    found = run(r, *given)
    if given:
        d_output, d_final, *_ = given
        return if_finite(found, functools.partial(isolated_gradient, r, d_output, d_final, resets), axis)
    again = functools.partial(isolated_outputs, r, resets)
    if isinstance(found, Outputs):
        return if_finite(found, again, axis)
    # The gradient checks its own results, whatever the residuals hold.
    outputs, residuals = found
    return if_finite(outputs, again, axis), residuals


def if_finite(found: Tree, again: Callable[[], Tree], axis: str | tuple[str, ...] | None = None) -> Tree:
    """Return `found` if all of its numbers are finite, else again(). axis: axes of a mesh along which all shards must be finite.

    A loop of at most one iteration overwrites `found` in place. lax.cond would copy it. The loop carries every array as a matrix:
    XLA would else carry them with time first, as again() forms them, and transpose `found` before and after the loop.
    """

    def as_matrices(tree):
        return jax.tree.map(lambda x: x.reshape(x.shape[0], math.prod(x.shape[1:])), tree)

    def overwrite(carry):
        return jax.tree.map(varying_like, (jnp.ones((), bool), as_matrices(again())), carry)

    _, matrices = lax.while_loop(lambda carry: ~carry[0], overwrite, (all_finite(found, axis), as_matrices(found)))
    return jax.tree.map(lambda x, like: x.reshape(like.shape), matrices, found)


def all_finite(tree, axis: str | tuple[str, ...] | None = None) -> Bool[Array, ""]:
    """Return whether all numbers of a tree's arrays are finite. axis: axes of a mesh, of which all shards must be finite; None
    for one device."""
    # x - x is 0 where x is finite, else NaN. XLA for CPUs forms such a sum in vectors, unlike a reduction of booleans. For x * 0
    # it would read an array of zeros too.
    sums = [(x - x).sum(dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    total = sum(sums, jnp.float32(0))
    return jnp.isfinite(total if axis is None else lax.psum(total, axis))


def isolated_outputs(r: Recurrence, resets: Resets) -> Outputs:
    """Compute the outputs and final states of r token by token. resets: [B, T], the tokens that start from a state of zeros,
    whose gates are -inf; None if there are none."""
    return delta_by_token(erasing_nothing(r), resets)


def isolated_gradient(r: Recurrence, d_output, d_final, resets: Resets) -> Recurrence:
    """Compute the gradient in every array of r, token by token. resets: [B, T], the tokens that start from a state of zeros, or
    None."""
    gradient = delta_gradient_by_token(erasing_nothing(r), d_output, d_final, resets)
    return gradient if r.erasure is not None else gradient.replace(erasure=None)


def erasing_nothing(r: Recurrence) -> Recurrence:
    """Return r itself if it has an erasure, else r with an erasure of zeros."""
    if r.erasure is not None:
        return r
    zeros = jnp.zeros((*r.q.shape[:2], r.num_heads, r.q.shape[3]), r.q.dtype)
    return r.replace(erasure=Erasure(erase=zeros))
