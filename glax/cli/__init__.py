"""Run the `glax` command. Each subcommand is a module with add_parser(subparsers) and run(args) -> exit code."""

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

import jax

from glax._version import __version__
from glax.cli import bench, cache, check, demo, doctor, generate, train, tune
from glax.cli.errors import UsageError, reason
from glax.cli.usable import require_usable_jax
from glax.testing.check import one_line

SUBCOMMANDS = (doctor, check, bench, tune, cache, demo, generate, train)
INTERRUPTED, UNREAD = 130, 141  # 128 + SIGINT and 128 + SIGPIPE, the exit codes that shells use


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="glax", description="Gated linear attention in JAX.")
    parser.add_argument("--version", action="version", version=f"glax {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in SUBCOMMANDS:
        module.add_parser(subparsers).set_defaults(run=module.run)
    name = "glax"
    try:
        args = parser.parse_args(arguments)
        name = f"glax {args.command}"
        if sys.stdout is None:
            raise UsageError("standard output is closed: nothing can be shown")
        with plain_output(name):
            if args.command != "cache":
                require_usable_jax()
            status = args.run(args)
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


def ended(name: str, text: str, status: int) -> int:
    print(f"{name}: {text}", file=sys.stderr)
    return status


@contextlib.contextmanager
def plain_output(name: str) -> Iterator[None]:
    """Print each warning on one line inside the context, and escape characters that the output's encoding does not have."""
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
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
