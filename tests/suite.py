"""What every machine's suite does with a case: draw it, run it, and compare with the float64 reference at each of its draws."""

import functools
from collections.abc import Callable

import jax
import pytest

from glax._src.core.decay import USUAL_FORMS
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, KernelSpec
from glax.testing.reference import reference, reference_gradient
from tests.cases import EXTREME, Case, Sweep, cotangents, recurrence
from tests.close import assert_gradients_close, assert_outputs_close
from tests.delta_cases import DeltaCase, Draw

AnyCase = Case | Sweep | DeltaCase


def draws(case: AnyCase) -> tuple[str, ...] | tuple[Draw, ...]:
    """What a case is drawn by: strengths of its gates, or draws of the delta rule."""
    return case.draws if isinstance(case, DeltaCase) else case.strengths


def is_extreme(draw: str | Draw) -> bool:
    return isinstance(draw, str) and draw in EXTREME


def problem(case: AnyCase, draw) -> tuple[Recurrence, tuple[jax.Array, jax.Array]]:
    """A recurrence, and the cotangents of its results."""
    if isinstance(case, Sweep):
        return case.recurrence(draw), case.cotangents(draw)
    if isinstance(case, DeltaCase):
        r = case.recurrence(draw)
        return r, case.cotangents(r)
    r = recurrence(case, draw)
    return r, cotangents(case, r)


# Formed once for all kernels: a case's tests follow one another.
@functools.lru_cache(maxsize=64)
def wanted(case: AnyCase, draw) -> tuple[Recurrence, Outputs]:
    r, _ = problem(case, draw)
    return r, case.outputs(draw) if isinstance(case, Sweep) else reference(r)


@functools.lru_cache(maxsize=64)
def wanted_gradient(case: AnyCase, draw) -> tuple[Recurrence, tuple, Recurrence]:
    r, d = problem(case, draw)
    return r, d, case.gradient(draw) if isinstance(case, Sweep) else reference_gradient(r, *d)


def at_each_draw(case: AnyCase, check: Callable):
    at_each(draws(case), check)


def at_each(given, check: Callable):
    """check(draw) at all of them: where a form's limit is wrong, it is the band of those that miss that shows it."""
    misses = []
    for draw in given:
        try:
            check(draw)
        except AssertionError as miss:
            misses.append(f"{draw}: {miss}")
    assert not misses, f"{len(misses)} of {len(given)} draws\n" + "\n".join(misses)


def check_forward(case: AnyCase, run: Callable[[Recurrence], Outputs]):
    def check(draw):
        r, want = wanted(case, draw)
        assert_outputs_close(r, run(r), want, is_extreme(draw))

    at_each_draw(case, check)


def check_gradient(case: AnyCase, run: Callable[..., Recurrence]):
    def check(draw):
        r, d, want = wanted_gradient(case, draw)
        assert_gradients_close(r, run(r, *d), want, is_extreme(draw))

    at_each_draw(case, check)


def check_taken(r: Recurrence, spec: KernelSpec):
    """Fail if a kernel for every machine refuses r. Skip where a GPU's or a TPU's does, or any refuses a form that is no usual
    one, with its reason."""
    if (reason := spec.refusal(r, None)) is None:
        return
    is_usual = r.decay.form in USUAL_FORMS
    assert not is_usual or spec.backend not in (Backend.ANY, Backend.CPU), f"{spec.name} refuses: {reason}"
    pytest.skip(f"{spec.name} refuses: {reason}")
