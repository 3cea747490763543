"""Treat Ctrl-C and SIGTERM as requests instead of exceptions."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator

# What a second signal does.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@dataclasses.dataclass
class Interrupt:
    """Hold the signal that asked the process to end. signal: the signal's number, or 0 if none came."""

    signal: int = 0

    @property
    def requested(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell reports for a process that this signal has ended."""
        return 128 + self.signal


@contextlib.contextmanager
def noted_interrupt() -> Iterator[Interrupt]:
    """Record the first Ctrl-C or SIGTERM inside the context without raising. A second one has its usual effect.

    An exception inside a training step would find its donated parameters deleted and the new ones not yet assigned.
    """
    interrupt = Interrupt()

    def note(number, frame):
        interrupt.signal = number
        for each, usual in USUAL.items():
            signal.signal(each, usual)

    before = {each: signal.signal(each, note) for each in USUAL}
    try:
        yield interrupt
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
