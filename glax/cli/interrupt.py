"""Ctrl-C as a request instead of an exception."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator


@dataclasses.dataclass
class Interrupt:
    requested: bool = False


@contextlib.contextmanager
def noted_interrupt() -> Iterator[Interrupt]:
    """Within, the first Ctrl-C is noted and nothing more; a second one raises KeyboardInterrupt as usual.

    An exception inside a training step would find its donated parameters gone and the new ones not yet there.
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
