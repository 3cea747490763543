"""Treat Ctrl-C as a request instead of an exception."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator


@dataclasses.dataclass
class Interrupt:
    requested: bool = False


@contextlib.contextmanager
def noted_interrupt() -> Iterator[Interrupt]:
    """Record the first Ctrl-C inside the context without raising. A second one raises KeyboardInterrupt as usual.

    An exception inside a training step would find its donated parameters deleted and the new ones not yet assigned.
    """
    interrupt = Interrupt()

    def note(number, frame):
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
