"""Keep the segments of a row apart where a kernel's products mix them.

Many kernels receive segments as gates of -inf (`Recurrence.folded`). A chunk of theirs holds tokens of several segments, and a
weight of 0 does not stop NaN or inf: a document with such a number would spoil others. What a document spoils is not finite.
The results of such kernels are therefore checked, and computed again token by token where they are not finite.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from glax._src.core.recurrence import Recurrence
from glax._src.core.segments import Segments
from glax._src.solve.partitioning import Axis

Tree = TypeVar("Tree")


def isolating(run: Callable[..., Any], segments: Segments | None, axis: Axis = None) -> Callable[..., Any]:
    """Return `run` with results in which each segment, or packed sequence, depends on its own rows alone.

    run: (r) -> Outputs or (Outputs, Residuals), or (r, d_output, d_final, *residuals) -> Recurrence, of a recurrence whose
    `segments` are folded. axis: the axes of a mesh along which all shards are computed again if a result in one of them is not
    finite.
    """

    def checked(r: Recurrence, *given):
        from glax._src.kernels.xla.isolated import run_checked  # registers kernels, which happens at the first call

        return run_checked(run, r, *given, resets=None if segments is None else segments.resets, axis=axis)

    return checked


def isolating_gradient(run: Callable[..., Recurrence], segments: Segments) -> Callable[..., Recurrence]:
    """Return `run`, a gradient, with results in which each segment depends on its own tokens alone, and so do their
    derivatives.

    run: (r, d_output, d_final) -> Recurrence, of a recurrence whose `segments` are folded. The derivatives are in reverse mode.
    """

    def first(resets, r: Recurrence, d_output, d_final) -> Recurrence:
        return run(r, d_output, d_final)

    def again(resets, r: Recurrence, d_output, d_final) -> Recurrence:
        from glax._src.kernels.xla.isolated import (
            isolated_gradient,
        )  # registers kernels, which happens at the first call

        return isolated_gradient(r, d_output, d_final, resets)

    return functools.partial(checked_at_any_order(first, again), segments.resets)


def checked_at_any_order(run: Callable, again: Callable) -> Callable:
    """Return a function (constants, *operands) -> run(constants, *operands), or again(constants, *operands) if that is not
    finite.

    `again` computes the same as `run`. The derivatives in reverse mode of the returned function are chosen likewise, between
    those of `run` and of `again`, because the loop of `if_finite` has no such derivative. `constants` have no gradient.
    """

    @jax.custom_vjp
    def checked(constants, *operands):
        return if_finite(run(constants, *operands), functools.partial(again, constants, *operands))

    def fwd(constants, *operands):
        return checked(constants, *operands), (constants, operands)

    def bwd(given, cotangent):
        constants, operands = given
        pull = checked_at_any_order(pullback_of(run), pullback_of(again))
        return None, *pull(constants, operands, cotangent)

    checked.defvjp(fwd, bwd)
    return checked


def pullback_of(f: Callable) -> Callable:
    """Return a function (constants, operands, cotangent) -> the cotangents of the operands of f(constants, *operands)."""

    def pull(constants, operands, cotangent):
        return jax.vjp(functools.partial(f, constants), *operands)[1](cotangent)

    return pull


def if_finite(found: Tree, again: Callable[[], Tree]) -> Tree:
    """Return `found` if all of its numbers are finite, else again(), which has the same tree, shapes and dtypes."""
    from glax._src.kernels.xla import isolated  # registers kernels, which happens at the first call

    return isolated.if_finite(found, again)
