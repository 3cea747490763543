"""Run the commands of `glax`, whose arguments `glax_cli` parses. Each command is a module with run(args) -> exit code."""

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator

import jax

from glax.cli.errors import UsageError, reason
from glax.cli.processes import start_processes
from glax.testing.check import one_line
from glax_cli.arguments import INTERRUPTED

UNREAD = 141  # 128 + SIGPIPE, as shells have it


def run(args) -> int:
    """Run the command of the arguments, and return its exit code. What ends it early is one line on standard error."""
    name = f"glax {args.command}"
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed: nothing can be shown")
        command = importlib.import_module(f"glax.cli.{args.command}")
        with plain_output(name):
            if args.command != "cache":
                require_usable_jax(args.command)
            status = command.run(args)
            flush(sys.stdout)  # a closed reader or a full disk raises here, not at exit
        return status
    except UsageError as error:
        return ended(name, str(error), 2)
    except KeyboardInterrupt:
        return ended(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # as in `glax doctor | head`; Python would report unwritten output as it exits
        to_nowhere()
        return UNREAD
    except OSError as error:  # a full disk or a closed output; the system's message names it
        discard_output()
        return ended(name, reason(error), 1)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return ended(name, f"there is not enough memory: {one_line(error)}: take a smaller problem", 1)
        raise


def require_usable_jax(command: str):
    """Raise UsageError if JAX has no device to compute on, or if a variable of glax has an invalid value."""
    from glax._src.kernels.cpu.library import check_instructions
    from glax._src.solve.dispatch import executor

    if command == "bench":  # PyTorch, under which some peers run, needs memory too
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        _ = executor.chain.policy
        check_instructions()
        if command == "train":
            start_processes()  # before any device is used
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        jax.devices()
    except RuntimeError as error:
        chosen = os.environ.get("JAX_PLATFORMS")
        remedy = f"unset JAX_PLATFORMS, which is {chosen!r}" if chosen else "set JAX_PLATFORMS=cpu"
        raise UsageError(f"JAX cannot use its device: {one_line(error)}: {remedy}") from error


def ended(name: str, text: str, status: int) -> int:
    """Print why a command ended on standard error. Return `status`, its exit code."""
    print(f"{name}: {text}", file=sys.stderr)
    return status


@contextlib.contextmanager
def plain_output(name: str) -> Iterator[None]:
    """Print each warning as the line "NAME: message" inside the context, where `name` is NAME, a command's.

    Characters that the encoding of standard output does not have are escaped, behind the context too.
    """
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{name}: {message}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        warnings.formatwarning = before


def flush(stream):
    if stream is not None:  # None where the process was started without one
        stream.flush()


def discard_output():
    """Discard what is left in the output's buffer. Otherwise Python reports an error about it as it exits."""
    try:
        flush(sys.stdout)
    except OSError:
        to_nowhere()


def to_nowhere():
    """Redirect standard output to the null device."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
