"""The `glax` command. Each subcommand is a module with add_parser(subparsers) and run(args) -> exit code."""

import argparse
import os
import sys
from collections.abc import Sequence

from glax._version import __version__
from glax.cli import bench, cache, check, demo, doctor, tune
from glax.cli.errors import UsageError

SUBCOMMANDS = (doctor, check, bench, tune, cache, demo)
INTERRUPTED, UNREAD = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells have it


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="glax", description="Gated linear attention in JAX.")
    parser.add_argument("--version", action="version", version=f"glax {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in SUBCOMMANDS:
        module.add_parser(subparsers).set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        status = args.run(args)
        sys.stdout.flush()  # a reader that has gone is met here, not at exit
        return status
    except UsageError as error:
        print(f"glax {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"glax {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `glax doctor | head`; else Python complains of what is left as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
