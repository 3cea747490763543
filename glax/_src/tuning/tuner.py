"""Measure candidate configs. Only one that is correct and deterministic may be chosen."""

import concurrent.futures
import dataclasses
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.backend import x64_is_enabled
from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Platform, kernel_registry
from glax._src.core.ring import RingedStates
from glax._src.tuning.cache import Measurement
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.op import example_of

# The relative RMS error of a candidate against the yardstick, by the dtype of the result.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}


class CandidateError(Exception):
    """Say why a candidate is rejected."""


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Measure the candidates of a call, and find the fastest that is correct and deterministic. A `ConfigSelectorChain` has one.

    warmup: the runs of each candidate that are not counted. iters: the runs whose median is taken. Raises ValueError unless
    warmup is an int of at least 0, and iters of at least 1.

    >>> chain = glax.ConfigSelectorChain(tuner=glax.Tuner(warmup=1, iters=5))
    """

    warmup: int = 3
    iters: int = 15

    def __post_init__(self):
        for name, least in (("warmup", 0), ("iters", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")

    def tune(self, inv: Invocation, validate_backward: bool = True) -> Measurement:
        """Return the `Measurement`: the fastest candidate as `config`, its median milliseconds as `ms`, and in `candidates` the
        milliseconds of each, or the reason why it was rejected.

        A candidate is rejected if it fails to compile or run, is wrong, differs between two runs, or is a known miscompile.
        validate_backward: whether to compare gradients too, of operations that are no registered kernels. Raises ExceptionGroup
        if no candidate can be used.

        The measurement runs in a thread of its own, where no trace of the caller (jit, vmap, scan, shard_map) is under way. It
        uses real arrays on this process's first device.
        """
        with concurrent.futures.ThreadPoolExecutor(1) as fresh:
            return fresh.submit(self.measure, inv, validate_backward, x64_is_enabled()).result()

    def measure(self, inv: Invocation, validate_backward: bool, x64: bool) -> Measurement:
        """Measure as `tune` does, but in the calling thread, and return the `Measurement`.

        x64: whether JAX has 64-bit dtypes enabled while the candidates are compiled and run.
        """

        def compiled(config):
            with jax.enable_x64(x64), jax.default_device(jax.local_devices()[0]):
                return jax.jit(results(inv, config, validate_backward)).lower(*operands).compile()

        with jax.enable_x64(x64), jax.default_device(jax.local_devices()[0]):
            operands = example(inv)
            validate_backward = validate_backward and not registered(inv) and differentiable(inv, operands)
            want = yardstick(inv, validate_backward)(*operands)
            candidates = list(dict.fromkeys(inv.kernel.candidate_cfgs(inv)))
            with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                programs = {config: pool.submit(compiled, config) for config in candidates}
            outcomes: dict[Any, float | Exception] = {}
            for config, program in programs.items():
                try:
                    if reason := known_miscompile(inv.kernel.op_id, config):
                        raise CandidateError(reason)
                    check(program.result()(*operands), program.result()(*operands), want)
                    forward = jax.jit(inv_impl(inv, config)) if validate_backward else program.result()
                    outcomes[config] = self.time(forward, operands)
                except Exception as failure:  # whatever a compiler or a device raises disqualifies this candidate alone
                    outcomes[config] = failure
        timings = {config: ms for config, ms in outcomes.items() if not isinstance(ms, Exception)}
        failures = {config: failure for config, failure in outcomes.items() if isinstance(failure, Exception)}
        if not timings:
            raise ExceptionGroup(
                f"no candidate of {inv.kernel.op_id} for {inv.key} can be used", list(failures.values())
            )
        best = min(timings, key=lambda config: timings[config])
        notes: dict[str, float | str] = {}
        for config in outcomes:
            failure = failures.get(config)
            notes[str(config)] = timings[config] if failure is None else f"{type(failure).__name__}: {failure}"
        return Measurement(best, timings[best], notes)

    def time(self, f, operands) -> float:
        """Measure f(*operands) and return the median in milliseconds."""
        times = []
        for i in range(self.warmup + self.iters):
            start = time.perf_counter()
            jax.block_until_ready(f(*operands))
            if i >= self.warmup:
                times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


def example(inv: Invocation) -> tuple:
    """Return the arrays on which a call is measured: the leaves of (args, kwargs) of `Kernel.example` that are arrays.

    A kernel on a pool gets the slots 0, 1, 2 and so on, and empty replay rings: sequences that share a slot would race.
    """
    filled = inv.kernel.example(inv) if hasattr(inv.kernel, "example") else example_of((inv.args, inv.kwargs))
    if getattr(inv.kernel, "is_pooled", False):  # sequences that share a slot would race
        (r, pool, slots), rest = filled
        if isinstance(pool, RingedStates):
            none = jnp.zeros_like(pool.length)
            pool = dataclasses.replace(pool, length=none, drafted=none)
        filled = ((r, pool, None if slots is None else jnp.arange(slots.shape[0], dtype=slots.dtype)), rest)
    return tuple(x for x in jax.tree.leaves(filled) if hasattr(x, "dtype"))


def inv_impl(inv: Invocation, config):
    """Return the kernel of an Invocation with this config, as a function of the arrays alone."""
    leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))

    def run(*arrays):
        given = iter(arrays)
        args, kwargs = structure.unflatten([next(given) if hasattr(x, "dtype") else x for x in leaves])
        return inv.kernel.runner(config)(*args, **kwargs)

    return run


def results(inv: Invocation, config, validate_backward: bool):
    """Return a function of the call's arrays that computes what candidates are compared by: the outputs.

    With `validate_backward` the result is (outputs, gradients): the gradients of the sum of the outputs' squares, in every
    float array.
    """
    run = inv_impl(inv, config)
    if not validate_backward:
        return run

    def both(*arrays):
        floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def loss(*chosen):
            given = list(arrays)
            for i, x in zip(floats, chosen, strict=True):
                given[i] = x
            outputs = run(*given)
            return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(outputs)), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, tuple(range(len(floats))), has_aux=True)(
            *(arrays[i] for i in floats)
        )
        return outputs, gradients

    return both


def differentiable(inv: Invocation, operands) -> bool:
    """Return whether the kernel has a gradient to check: whether its gradient can be traced. An operation of a user may have
    none.

    operands: the call's arrays.
    """
    try:
        jax.eval_shape(results(inv, inv.kernel.heuristic_cfg(inv), True), *operands)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def registered(inv: Invocation) -> bool:
    """Return whether the Invocation is of a registered kernel. Its gradient is then a separate kernel, "<algorithm>.vjp", which
    is tuned and checked by itself."""
    return bool(inv.args) and isinstance(inv.args[0], Recurrence)


def yardstick(inv: Invocation, validate_backward: bool):
    """Return the function of the call's arrays whose results candidates must equal, compiled by jit.

    It is another kernel of XLA for the same call if there is one, else the call's kernel with its heuristic's config.
    """
    guess = jax.jit(results(inv, inv.kernel.heuristic_cfg(inv), validate_backward))
    if not registered(inv) or inv.kernel.is_pooled:
        return guess
    able, _ = kernel_registry.able(inv.args[0], Platform.XLA, role=inv.kernel.role)
    others = [spec for spec in able if spec.op_id != inv.kernel.op_id]
    if not others:
        return guess
    other = dataclasses.replace(inv, kernel=others[0])
    return jax.jit(inv_impl(other, others[0].heuristic_cfg(other)))


def check(got, again, want):
    """Raise CandidateError if two runs differ in a bit, or if a run differs from the yardstick by more than rounding.

    got, again: the results of two runs of a candidate on the same arrays. want: the yardstick's. All are trees of arrays.
    """
    for x, y, w in zip(*map(jax.tree.leaves, (got, again, want)), strict=True):
        if np.asarray(x).tobytes() != np.asarray(y).tobytes():
            raise CandidateError("two runs on the same input differ")
        x, w, tolerance = np.asarray(x, np.float64), np.asarray(w, np.float64), TOLERANCES.get(str(w.dtype), 0.0)
        with np.errstate(invalid="ignore"):
            error, size = np.linalg.norm(x - w), np.linalg.norm(w)
        if not error <= tolerance * size:  # NaN fails, too
            raise CandidateError(
                f"wrong: off by {error / max(size, 1e-300):.1e} of the result, {tolerance:.0e} allowed"
            )
