"""Print what commands report: tables in the width of the terminal, or one JSON document."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text


def show_json(document):
    print(json.dumps(document, indent=1, allow_nan=False))


def show_text(text: str = "", indent: int = 0):
    """Print text in lines as wide as the terminal, or as 80 columns."""
    for line in Text(text).wrap(Console(), Console().width - indent):
        print(" " * indent + line.plain.rstrip())


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None):
    """Print a table with text columns aligned left and other columns right. None prints as a dash. No cell is cut: text that is
    too wide continues in the next line. A column without any entry is left out."""
    rows, console = list(rows), Console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = [i for i, heading in enumerate(headings) if heading or any(row[i] for row in rows)]
    for i in columns:
        to_left = all(row[i] is None or isinstance(row[i], str) for row in rows)
        table.add_column(Text(headings[i]), justify="left" if to_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row[i])) for i in columns))
    if title is not None:
        console.print(Text(title, style="bold"))
    console.print(table)


def cell(x) -> str:
    """Return the text of a cell of a table: three digits of a float, thousands separated, and a dash for None."""
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

    Without a terminal there is no bar, and advance() does nothing.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
