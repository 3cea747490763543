"""Compare kernels with the float64 reference: the registered kernels, as `glax check` does, and a user's own kernel."""

import dataclasses
import functools
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, KernelSpec, Role, kernel_registry
from glax._src.core.ring import RingedStates
from glax._src.kernels import load_kernels
from glax._src.serving.replay import new_tokens
from glax._src.solve.autodiff import solve
from glax._src.solve.dispatch import Choice
from glax.testing.cases import CASES, EXTREME, QUICK, Case, cotangents, recurrence
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import Comparison, compare_gradients, compare_output, compare_outputs

AS_CHOSEN = "recurrent and its gradient"  # what users call, through the choice of kernels


@dataclasses.dataclass(frozen=True)
class Result:
    """Hold the result of a kernel on a case, by their names.

    status: "pass", "miss", or "refused" by the kernel.
    error:  the relative RMS error of the array `of`. Of all arrays it is the one whose error is the largest part of its bar.
    bar:    the largest error of that array that passes. error, bar and of are None if refused.
    reason: why the kernel refused, or missed otherwise than by an error beyond the bar; None else.

    >>> glax.testing.Result("mine", "key", "pass", error=1e-7, bar=1e-5, of="output").status
    'pass'
    """

    kernel: str
    case: str
    status: str  # "pass", "miss" or "refused"
    error: float | None = None
    bar: float | None = None
    of: str | None = None
    reason: str | None = None


class Trial:
    """Hold a case at one strength: the operands of a kernel, and the reference's results, computed when they are first needed."""

    def __init__(self, case: Case, strength: str):
        self.title = case.name if len(case.strengths) == 1 else f"{case.name}, {strength}"
        self.extreme = strength in EXTREME
        self.r = recurrence(case, strength)
        self.cotangents = cotangents(case, self.r)

    @functools.cached_property
    def wanted(self) -> Outputs:
        return reference(self.r)

    @functools.cached_property
    def wanted_gradient(self) -> Recurrence:
        return reference_gradient(self.r, *self.cotangents)

    def forward(self, kernel: str, run: Callable[[Recurrence], Outputs]) -> Result:
        """Return the `Result` of comparing run(r) with the reference's outputs."""

        def compared() -> list[Comparison]:
            return self.compare_outputs(Outputs(*jax.block_until_ready(run(self.r))))

        return self.judged(kernel, compared)

    def verification(self, kernel: str, run: Callable[[Recurrence], jax.Array]) -> Result:
        """Return the `Result` of comparing run(r), an output alone, with the reference's."""

        def compared() -> list[Comparison]:
            return [compare_output(self.r, jax.block_until_ready(run(self.r)), self.wanted.output, self.extreme)]

        return self.judged(kernel, compared)

    def gradient(self, kernel: str, run: Callable[..., Recurrence]) -> Result:
        """Return the `Result` of comparing run(r, d_output, d_final), a gradient, with the reference's."""

        def compared() -> list[Comparison]:
            return self.compare_gradients(jax.block_until_ready(run(self.r, *self.cotangents)))

        return self.judged(kernel, compared)

    def both(self, kernel: str, run: Callable[..., tuple[Outputs, Recurrence]]) -> Result:
        """Return the `Result` of comparing run(r, d_output, d_final), outputs and gradient, with the reference's."""

        def compared() -> list[Comparison]:
            outputs, gradient = jax.block_until_ready(run(self.r, *self.cotangents))
            return self.compare_outputs(outputs) + self.compare_gradients(gradient)

        return self.judged(kernel, compared)

    def compare_outputs(self, got: Outputs) -> list[Comparison]:
        return compare_outputs(self.r, got, self.wanted, self.extreme)

    def compare_gradients(self, got: Recurrence) -> list[Comparison]:
        return compare_gradients(self.r, got, self.wanted_gradient, self.extreme)

    def judged(self, kernel: str, compared: Callable[[], list[Comparison]]) -> Result:
        """Return the `Result` for the array whose error is the largest part of its bar. compared: a function that runs the
        kernel and returns the comparisons."""
        try:
            each = compared()
        except Exception as failure:  # whatever a compiler or a device raises is the result of this kernel
            return Result(kernel, self.title, "miss", reason=one_line(failure))
        worst = max(each, key=lambda x: (x.error is None, x.reason is not None, (x.error or 0) / x.bar))
        status = "pass" if worst.reason is None else "miss"
        # An error beyond its bar needs no reason: the two numbers show it.
        reason = worst.reason if worst.error is None else None
        return Result(kernel, self.title, status, worst.error, worst.bar, worst.name, reason)


def trials(cases: Iterable[Case]) -> Iterator[Trial]:
    """Yield a `Trial` for each case and each of its strengths."""
    return (Trial(case, strength) for case in cases for strength in case.strengths)


def check_kernel(
    run: Callable[[Recurrence], Outputs],
    gradient: Callable[[Recurrence, jax.Array, jax.Array], Recurrence] | None = None,
    *,
    cases: Sequence[Case] = CASES,
    supports: Callable[[Recurrence], str | None] | None = None,
    name: str = "kernel",
) -> list[Result]:
    """Compare a kernel with the float64 reference on every case, with the tolerances that glax's own kernels are held to.

    run:      recurrence -> Outputs. It is called outside of jit: pass jax.jit(run) to test the compiled kernel.
    gradient: (recurrence, d_output, d_final) -> Recurrence, the gradient of <output, d_output> + <final_state, d_final> in
        every float array of the recurrence, each in the dtype of its array. `boundaries` and `segments` have no gradient: what
        the result holds there is ignored. None for a kernel without a gradient.
    cases:    shapes, dtypes and gates (`glax.testing.Case`). The default has every form of decay, packed and reversed
              sequences, grouped heads, extreme gates and three dtypes, each with an initial state.
    supports: recurrence -> None, or the reason why the kernel does not support it; such cases are "refused".
    name:     the kernel's name in the results. Results of the gradient are named "<name>.vjp".

    Returns one `Result` for each case and function. Raises AssertionError, with a list of the misses and the worst array of
    each, if an array has an error above its bar, the largest that passes; another shape or dtype; values that are not finite;
    or padding rows that are not 0. An exception of the kernel is a miss, too. Raises AssertionError as well if the kernel
    refuses every case.

    >>> kernel = glax.kernel_registry.kernels["recurrent/xla/any"]
    >>> def run(r): return kernel.run(r, config=kernel.config.heuristic(r))
    >>> [result.status for result in glax.testing.check_kernel(run, cases=glax.testing.CASES[:1])]
    ['pass']
    """
    results = []
    for trial in trials(cases):
        if supports is not None and (reason := supports(trial.r)) is not None:
            results.append(Result(name, trial.title, "refused", reason=reason))
            continue
        results.append(trial.forward(name, run))
        if gradient is not None:
            results.append(trial.gradient(f"{name}.vjp", gradient))
    if missed := [result for result in results if result.status == "miss"]:
        rows = [
            f"  {x.kernel} on {x.case!r}: {x.reason or f'{x.of} is off by {x.error:.1e}, bar {x.bar:.1e}'}"
            for x in missed
        ]
        raise AssertionError(f"{len(missed)} of {len(results)} results miss\n" + "\n".join(rows))
    if all(result.status == "refused" for result in results):
        rows = [f"  {x.case!r}: {x.reason}" for x in results]
        raise AssertionError(
            f"{name} supports none of {len(results)} cases; pass some that it does\n" + "\n".join(rows)
        )
    return results


def check_kernels(cases: Sequence[Case] = CASES, backend: Backend | None = None) -> Iterator[Result]:
    """Yield the `Result` of each registered kernel on each case, and of `recurrent` with its gradient on some.

    These are the cases named "key", "key, extreme", "constant", "all gates, packed, reverse" and "bfloat16, key". Their results
    have the kernel "recurrent and its gradient".
    cases: as in `check_kernel`. backend: the `Backend` whose own kernels run, beside `recurrent`; all kernels if None. A kernel
    that does not run here is "refused". Cases run in up to eight threads. The results come in the order of the cases. Misses
    raise nothing.

    >>> results = glax.testing.check_kernels(glax.testing.CASES[:1])  # doctest: +SKIP
    >>> [result for result in results if result.status == "miss"]  # doctest: +SKIP
    []
    """
    load_kernels()
    specs = [spec for spec in kernel_registry.kernels.values() if backend in (None, spec.backend)]
    programs = {spec.name: jax.jit(spec.run, static_argnames="config") for spec in specs}

    def results_of(trial: Trial) -> list[Result]:
        results = [result_of(trial, spec, programs[spec.name]) for spec in specs]
        return [*results, trial.both(AS_CHOSEN, chosen)] if trial.title in QUICK else results

    # Most of the time is the compilers', which run beside each other in threads.
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="glax_check")
    try:
        for results in pool.map(results_of, trials(cases)):
            yield from results
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(trial: Trial, spec: KernelSpec, program: Callable) -> Result:
    """Return the `Result` of a registered kernel on a trial. program: spec.run as a compiled function, with config= as static
    argument."""
    if (reason := spec.refusal(trial.r)) is not None:
        return Result(spec.name, trial.title, "refused", reason=reason)
    if spec.is_gradient:
        return trial.gradient(spec.name, gradient_of(spec, program))
    if spec.role is Role.VERIFY:
        return trial.verification(spec.name, forward_of(spec, program))
    return trial.forward(spec.name, forward_of(spec, program))


def forward_of(spec: KernelSpec, program: Callable) -> Callable[[Recurrence], Any]:
    """Return a registered kernel as a function of the recurrence alone, with its heuristic's config. program: as in
    `result_of`."""

    def run(r: Recurrence) -> Outputs:
        config = spec.config.heuristic(r)
        if spec.role is Role.REPLAY:
            output, pool = program(
                r.replace(initial_state=None), without_tokens(r), jnp.arange(r.num_sequences), config=config
            )
            return Outputs(output[:, None], pool.states)
        if spec.is_pooled:
            every_slot = jnp.arange(r.num_sequences)
            return program(r.replace(initial_state=None), r.initial_state, every_slot, config=config)
        return program(r, config=config)

    return run


def without_tokens(r: Recurrence) -> RingedStates:
    """Return the initial states of r with empty replay rings, whose states are written at every token."""
    assert r.initial_state is not None
    ring = jax.tree.map(jnp.zeros_like, new_tokens(r, jnp.float32))
    length, drafted = jnp.zeros((2, r.num_sequences), jnp.int32)
    return RingedStates(r.initial_state, ring, length, drafted, 1)


def gradient_of(spec: KernelSpec, program: Callable) -> Callable[..., Recurrence]:
    """Return a registered gradient kernel as a function (r, d_output, d_final), with its heuristic's config. program: as in
    `forward_of`."""

    def run(r: Recurrence, d_output, d_final) -> Recurrence:
        return program(r, d_output, d_final, config=spec.config.heuristic(r))

    return run


@jax.jit
def chosen(r: Recurrence, d_output, d_final) -> tuple[Outputs, Recurrence]:
    """Return (the outputs of r, the gradient in r for the cotangents d_output and d_final), by the kernels that glax
    chooses."""
    outputs, pull = jax.vjp(lambda x: solve(Choice(), x.replace(boundaries=r.boundaries)), r.replace(boundaries=None))
    (gradient,) = pull(type(outputs)(d_output, d_final))
    return outputs, gradient


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, at most 160 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 160)
