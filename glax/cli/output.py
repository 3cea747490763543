"""Print what subcommands report: tables, by rich where it is installed, or one JSON document."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

WIDE = 10_000  # columns, where no terminal sets a limit


def add_json(parser):
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def show_json(document):
    print(json.dumps(document, indent=1, allow_nan=False))


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]]):
    """Print a table with text columns aligned left and other columns right. None prints as a dash."""
    rows = list(rows)
    left = [all(row[i] is None or isinstance(row[i], str) for row in rows) for i in range(len(headings))]
    cells = [[cell(x) for x in row] for row in rows]
    if importlib.util.find_spec("rich") is None:
        print(plain(headings, cells, left))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading, to_left in zip(headings, left, strict=True):
        table.add_column(Text(heading), justify="left" if to_left else "right")
    for row in cells:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def plain(headings: Sequence[str], cells: list[list[str]], left: list[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]

    def line(texts):
        padded = (t.ljust(w) if to_left else t.rjust(w) for t, w, to_left in zip(texts, widths, left, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [headings, *cells]))


def cell(x) -> str:
    match x:
        case None:
            return "-"
        case float():
            if 0 < abs(x) < 1e-3:
                return f"{x:.1e}"
            return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"
        case int():
            return f"{x:,}"
        case _:
            return str(x)


@contextlib.contextmanager
def progress(what: str, steps: int) -> Iterator:
    """Yield advance(), which moves a progress bar named `what` on standard error and is called after each of `steps` steps.

    Without a terminal or without rich there is no bar, and advance() does nothing.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
