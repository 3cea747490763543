"""Measure times on the device, and the limits of the device."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from glax._src.core.registry import Backend

WARMUP = 2
# Milliseconds of calls in flight on an accelerator. Launching the first and waiting for the last takes up to half a millisecond.
SAMPLE_MS = 60.0
MOST_IN_FLIGHT = 200


@dataclasses.dataclass(frozen=True)
class Way:
    """Describe one way to compute something, to be timed.

    run: starts it, and returns results that may not be ready. wait: a function of these results, which returns when they are
    ready. calls: how many calls a run makes.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Hold milliseconds per call: the median, and the 20th and the 80th percentile."""

    median: float
    p20: float
    p80: float
    samples: int

    def __str__(self):
        return f"{self.median:.1f} ({self.p20:.1f}-{self.p80:.1f})"


def interleaved(ways: Sequence[Way], iters: int) -> list[Timing]:
    """Time each way `iters` times. Every round runs all ways in turn, so that what slows the machine slows all of them."""
    in_flight = [runs_in_flight(way) for way in ways]
    samples: list[list[float]] = [[] for _ in ways]
    for _ in range(iters):
        for way, runs, each in zip(ways, in_flight, samples, strict=True):
            each.append(milliseconds(way, runs) / way.calls)
    return [timing(each) for each in samples]


def runs_in_flight(way: Way) -> int:
    """Return the number of runs to start before waiting. It is one on CPUs, where independent runs may overlap."""
    for _ in range(WARMUP):
        milliseconds(way, 1)
    if Backend.here() is Backend.CPU:
        return 1
    return min(MOST_IN_FLIGHT, math.ceil(SAMPLE_MS / milliseconds(way, 1)))


def milliseconds(way: Way, runs: int) -> float:
    """Return the milliseconds of one run when `runs` are started before waiting for the last."""
    begin = time.perf_counter()
    for _ in range(runs):
        result = way.run()
    way.wait(result)
    return 1e3 * (time.perf_counter() - begin) / runs


def timing(samples: list[float]) -> Timing:
    """Return the median and percentiles of samples, which are milliseconds per call."""
    if len(samples) == 1:
        return Timing(median=samples[0], p20=samples[0], p80=samples[0], samples=1)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[3], len(samples))


def copy_gbytes(iters: int) -> float:
    """Return the GB/s, read and written bytes together, of negating in place an array too large for any cache."""
    x = jnp.zeros((64 if Backend.here() is Backend.CPU else 512) * 2**20, jnp.float32)
    arrays, nbytes, negate = [x], x.nbytes, jax.jit(jnp.negative, donate_argnums=0)
    del x

    def run():
        arrays.append(negate(arrays.pop()))
        return arrays[0]

    return 2 * nbytes / interleaved([Way("copy", run)], iters)[0].median / 1e6


def matmul_gflops(dtype: str, iters: int) -> float:
    """Return the GFLOP/s of a product of two square matrices. float32 is multiplied in float32, without TF32."""
    n = 2048 if Backend.here() is Backend.CPU else 8192
    x = jnp.ones((n, n), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision="highest" if dtype == "float32" else None))
    return 2 * n**3 / interleaved([Way("matmul", lambda: product(x))], iters)[0].median / 1e6
