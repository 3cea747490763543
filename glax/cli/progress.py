"""Show how far training is: by a bar on a terminal, else by a line now and then."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10


@contextlib.contextmanager
def progress(console: Console, steps: int, tokens_per_step: int) -> Iterator[Callable[[int, float], None]]:
    """Yield show(steps done, bits per byte), which is called after every step.

    The speed excludes the first step, which compiles.
    """
    since = math.nan

    def status(step: int, loss: float) -> str:
        nonlocal since
        if step == 1:
            since = time.perf_counter()
            return f"{loss:.3f} bits/byte"
        return f"{loss:.3f} bits/byte, {(step - 1) * tokens_per_step / (time.perf_counter() - since):,.0f} tokens/s"

    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=steps, status="compiling")
            yield lambda step, loss: bar.update(task, completed=step, status=status(step, loss))
        return

    every = math.ceil(steps / LINES)

    def line(step: int, loss: float):
        text = status(step, loss)
        if step == 1 or step % every == 0 or step == steps:
            console.print(f"step {step}/{steps}: {text}")

    yield line
