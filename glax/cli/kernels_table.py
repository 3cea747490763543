"""Print every kernel's error and speed on one case."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from glax._src.core.bind import bind
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.testing.reference import reference, reference_gradient

REPEATS = 7


def show_kernels(console: Console, seed: int, B: int = 1, T: int = 1024, H: int = 4, width: int = 64):
    """Print a table of all registered kernels: their results on this machine, or why they cannot run."""
    load_kernels()
    r, cotangents = random_case(np.random.default_rng(seed), B, T, H, width)
    expected_forward, seconds = timed(functools.partial(reference, r))
    expected_gradient = reference_gradient(r, *cotangents)

    device = jax.devices()[0].device_kind
    console.print(f"B={B} T={T} H={H} K=V={width}, float32, log-sigmoid gate per key channel, on {device}")
    table = Table()
    table.add_column("kernel")
    for heading in ("error", "ms", "tokens/s"):
        table.add_column(heading, justify="right")
    refusals = {}
    for name, spec in sorted(kernel_registry.kernels.items()):
        if (reason := "takes states in a pool" if spec.is_pooled else spec.refusal(r, None)) is not None:
            refusals[name] = reason
            continue
        backward = spec.algorithm.endswith(".vjp")
        run = jax.jit(functools.partial(spec.run, config=spec.config.heuristic(r)))
        operands = (r, *cotangents) if backward else (r,)
        results = run(*operands)
        error = relative_error(results, expected_gradient if backward else expected_forward)
        ms = 1e3 * median_seconds(lambda run=run, operands=operands: jax.block_until_ready(run(*operands)))
        table.add_row(name, f"{error:.1e}", f"{ms:.2f}", f"{1e3 * B * T / ms:,.0f}")
    table.add_row("reference (NumPy, float64)", "0", f"{1e3 * seconds:.2f}", f"{B * T / seconds:,.0f}")
    console.print(table)
    for reason in dict.fromkeys(refusals.values()):
        names = ", ".join(name for name, why in refusals.items() if why == reason)
        console.print(f"not here: {names}: {reason}", markup=False)
    console.print("error: relative RMS against the reference, the largest of all results or gradients")


def random_case(rng: np.random.Generator, B: int, T: int, H: int, width: int) -> tuple[Recurrence, tuple[Array, Array]]:
    """Return (a recurrence with per-key log-sigmoid gates, (d_output, d_final)), drawn at random. width: K and V."""
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    tokens, states = (B, T, H, width), (B, H, width, width)
    g = jax.nn.log_sigmoid(normal(tokens))
    r = bind(*(normal(tokens) for _ in range(3)), g=g, initial_state=normal(states))
    return r, (jnp.asarray(normal(tokens)), jnp.asarray(normal(states)))


def relative_error(results, expected) -> float:
    """Return the largest |result - expected| / |expected| over the arrays, in the 2-norm."""

    def error(x, y):
        return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))

    return max(error(x, y) for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True))


def median_seconds(run: Callable) -> float:
    return statistics.median(timed(run)[1] for _ in range(REPEATS))


def timed(run: Callable) -> tuple:
    """Return the result of run(), and the seconds that it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start
