"""Compile programs side by side. XLA does not hold Python's lock, so threads that compile run at the same time."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax


def start_compiling(programs: Iterable[jax.stages.Lowered]) -> list[Future]:
    """Begin to compile each program in a pool of threads. Return a future for each, which is done when it is compiled.

    JAX stores what is compiled, so a later call of the same function and shapes does not compile again. A call before its
    future is done compiles once more. The iterable is read lazily: a generator traces and lowers the next program while the
    programs before it are being compiled.
    """
    # Not the threads of `kernels.common.gpu`: these programs may wait for kernels that those compile.
    threads = ThreadPoolExecutor(thread_name_prefix="glax_compiles")
    compiling = [threads.submit(program.compile) for program in programs]
    threads.shutdown(wait=False)
    return compiling


def beside(compiles: Callable[[], None], reads: Callable[[], None]):
    """Call `compiles` in a thread and `reads` in the calling thread, and return when both have ended. Raises an error of
    `reads`, or else of `compiles`."""
    with ThreadPoolExecutor(1) as thread:
        compiling = thread.submit(compiles)
        reads()
        compiling.result()
