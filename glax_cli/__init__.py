"""Start the command `glax`. It lies outside of the package `glax`, which imports jax: help and completion need none of it."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from glax_cli.arguments import INTERRUPTED, a_path
from glax_cli.parser import Parser, build_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 2 for wrong usage."""
    parser = build_parser()
    try:
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.prog = f"glax {args.command}" if args.command else "glax"
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.version:
            print(f"glax {version()}")
            return 0
        if args.command is None:
            parser.print_help()
            return 0
        if args.command == "completion":
            print(completion(parser, args.shell))
            return 0
        from glax.cli import run

        return run(args)
    except KeyboardInterrupt:
        print("glax: interrupted", file=sys.stderr)
        return INTERRUPTED


def version() -> str:
    return runpy.run_path(str(Path(__file__).parents[1] / "glax" / "_version.py"))["__version__"]


def completion(parser: Parser, shell: str) -> str:
    """Return the script by which a shell completes commands, options, choices and names of files."""
    import shtab

    for each in parsers(parser):
        for action in each._actions:
            if action.type is a_path:
                names = shtab.DIRECTORY if action.metavar == "FOLDER" else shtab.FILE
                action.complete = names  # pyright: ignore[reportAttributeAccessIssue]  an attribute of shtab's
    return shtab.complete(parser, shell)


def parsers(parser):
    """Yield the parser, and the parsers of its commands, at any depth."""
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, dict) and action.nargs == "A...":
            for each in action.choices.values():
                yield from parsers(each)
