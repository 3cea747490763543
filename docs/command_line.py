"""Write the tables of options of docs/command_line.md from the parser.

python docs/command_line.py            prints the page
python docs/command_line.py --write    replaces the tables in it
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from glax_cli import parsers
from glax_cli.parser import build_parser

PAGE = pathlib.Path(__file__).parent / "command_line.md"
TABLE = re.compile(r"(<!-- (glax[a-z ]*): begin -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def page() -> str:
    """Return the page with the tables that the parser gives."""
    found = {parser.prog: table(parser) for parser in parsers(build_parser())}
    text = PAGE.read_text()
    named = [name for _, name, _ in TABLE.findall(text)]
    lacking = [name for name, rows in found.items() if rows and name not in named]
    if lacking:
        raise ValueError(
            f"{PAGE.name} must have a table for each command: add <!-- {lacking[0]}: begin --><!-- end -->"
        )
    return TABLE.sub(lambda match: match[1] + found[match[2]] + match[3], text)


def table(parser) -> str:
    """Return a row for each argument of a command but --help and the names of its actions."""
    rows = [
        f"| {written(action)} | {meaning(action)} |"
        for action in parser._actions
        if action.dest not in ("help", "command", "action")
    ]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n" if rows else ""


def written(action) -> str:
    name = action.option_strings[0] if action.option_strings else ""
    takes = "" if action.nargs == 0 or (action.choices and not action.metavar) else action.metavar or action.dest
    return f"`{' '.join(filter(None, (name, takes)))}`"


def meaning(action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default))
    if action.choices and not action.metavar:
        text = f"one of {', '.join(f'`{choice}`' for choice in action.choices)}: {text}"
    return re.sub(r"(?<![`\w])(--[a-z-]+)", r"`\1`", text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
