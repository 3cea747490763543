"""Times of functions of many sizes side by side, for CPUs, and tables of the results.

`glax.cli.measure` defines what a `Timing` is, and measures what a device can do at best. Here a candidate has a budget of time.
"""

import functools
from collections.abc import Callable

import jax

from glax.cli.measure import Timing, Way, milliseconds, timing


def compiled(f: Callable, *operands) -> Callable:
    """f compiled for these operands; `memory_analysis` of the result tells what it needs."""
    return jax.jit(f).lower(*operands).compile()


LONG = 1000.0  # milliseconds
WARM = 10.0  # milliseconds; after one run alone the next of a small candidate takes a tenth longer


def interleaved(
    candidates: dict[str, Callable], *operands, repeats: int, seconds: float, warm: bool = False
) -> dict[str, Timing]:
    """The `Timing` of each candidate(*operands), all in turn in every round: a machine that others slow down slows all.

    A candidate rests once it has run `repeats` times, or 3 times and for `seconds`. All must be compiled. With `warm`
    each timed run follows untimed ones, until they have taken WARM, so that a small candidate does not pay for the memory and the
    caches that a large one took. One that takes more than LONG is timed without them after its first run.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    ways = {name: Way(name, functools.partial(run, *operands)) for name, run in candidates.items()}
    for _ in range(repeats):
        for name, way in ways.items():
            if len(samples[name]) < 3 or sum(samples[name]) < 1e3 * seconds:
                untimed = LONG if samples[name] and samples[name][-1] > LONG else 0.0
                while warm and untimed < WARM:
                    untimed += milliseconds(way, 1)
                samples[name].append(milliseconds(way, 1))
    return {name: timing(each) for name, each in samples.items()}


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
