"""Times of compiled functions side by side, what the machine can do at best, and tables of the results."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the 20th and 80th of a hundred."""

    median: float
    p20: float
    p80: float
    repeats: int

    def __str__(self):
        return f"{self.median:.1f} ({self.p20:.1f}-{self.p80:.1f})"


def compiled(f: Callable, *operands) -> Callable:
    """f compiled for these operands; `memory_analysis` of the result tells what it needs."""
    return jax.jit(f).lower(*operands).compile()


WARM = 10.0  # milliseconds; after one run alone the next of a small candidate takes a tenth longer


def interleaved(candidates: dict, *operands, repeats: int, seconds: float, warm: bool = False) -> dict:
    """The `Timing` of each candidate(*operands), all in turn in every round: a machine that others slow down slows all.

    A candidate rests once it has run `repeats` times, or 3 times and for `seconds`. All must be compiled. With `warm`
    each timed run follows untimed ones, until they have taken WARM, so that a small candidate does not pay for the memory and the
    caches that a large one took.
    """
    samples = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            if len(samples[name]) < 3 or sum(samples[name]) < 1e3 * seconds:
                untimed = 0.0
                while warm and untimed < WARM:
                    untimed += milliseconds(run, *operands)
                samples[name].append(milliseconds(run, *operands))
    return {name: timing(each) for name, each in samples.items()}


def milliseconds(run: Callable, *operands) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(*operands))
    return 1e3 * (time.perf_counter() - begin)


def timing(samples: list[float]) -> Timing:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[3], len(samples))


def matmul_gflops(size: int = 2048, repeats: int = 7) -> float:
    """GFLOP/s of a float32 product of two [size, size] matrices: 2 size^3 operations."""
    x = jnp.ones((size, size), jnp.float32)
    times = interleaved({"matmul": compiled(jnp.matmul, x, x)}, x, x, repeats=repeats, seconds=10)
    return 2 * size**3 / times["matmul"].median / 1e6


def copy_gbytes(megabytes: int = 256, repeats: int = 7) -> float:
    """GB/s of negating an array that no cache holds, read and written bytes together. In its own memory: to hand out fresh
    pages takes the system several times as long."""
    x = jnp.zeros(megabytes * 2**18, jnp.float32)
    run = jax.jit(jnp.negative, donate_argnums=0)
    samples = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        x = jax.block_until_ready(run(x))
        samples.append(time.perf_counter() - begin)
    return 2 * x.nbytes / statistics.median(samples[1:]) / 1e9


def available_bytes() -> int | None:
    """The memory that new arrays can have; None where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def table(rows: list[dict[str, object]]) -> str:
    """Aligned columns: text to the left, all else to the right; None is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    left = [all(isinstance(row.get(name), str) for row in rows) for name in names]

    def line(texts):
        padded = (t.ljust(w) if to_left else t.rjust(w) for t, w, to_left in zip(texts, widths, left, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [names, *cells]))


def cell(x) -> str:
    match x:
        case None:
            return "-"
        case float():
            return f"{x:.1e}" if x and abs(x) < 0.01 else f"{x:.2f}"
        case _:
            return str(x)
