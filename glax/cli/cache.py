"""glax cache: what tuning has measured: listed, shown, cleared, taken elsewhere and brought back."""

import json
import math
import pathlib
import sys

import filelock

from glax.cli.errors import UsageError
from glax.cli.output import add_json, show_json, show_table
from glax.dispatch import executor
from glax.execution.cache import FORMAT, PersistentCache, check


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "cache",
        help="list, show, clear, export or import what tuning has measured",
        description="The measurements of this user, in GLAX_CACHE_DIR or else the user's cache folder.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name, takes, meaning in (
        ("list", None, "the files and how much is in each"),
        ("show", "NAME", "the entries of one file, by its name in the list or a part of it"),
        ("clear", None, "remove every file of measurements"),
        ("export", "FILE", "write all measurements to one JSON file"),
        ("import", "FILE", "add the measurements of an exported file; of two for the same call the faster stays"),
    ):
        action = actions.add_parser(name, help=meaning, description=meaning[0].upper() + meaning[1:] + ".")
        if takes is not None:
            action.add_argument("file", metavar=takes)
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="do not ask")
        add_json(action)
    return parser


def run(args) -> int:
    document, lines = ACTIONS[args.action](executor.chain.persistent, args)
    show_json(document) if args.json else lines()
    return 0


def files_of(persistent: PersistentCache) -> dict[str, dict]:
    """The content of every file of measurements, by its name: "device/kernel@version+compilers.json"."""
    return {path.relative_to(persistent.folder).as_posix(): content for path, content in persistent.files()}


def list_files(persistent: PersistentCache, args):
    files = [
        dict(name=name, kernel=content.get("kernel"), device=content.get("device"), entries=len(content["entries"]))
        for name, content in files_of(persistent).items()
    ]

    def lines():
        print(f"{persistent.folder}: {len(files)} files")
        if files:
            show_table(("file", "entries"), [(file["name"], file["entries"]) for file in files])

    return dict(folder=str(persistent.folder), files=files), lines


def show_file(persistent: PersistentCache, args):
    files = files_of(persistent)
    found = [name for name in files if name == args.file] or [name for name in files if args.file in name]
    if len(found) != 1:
        which = f"{len(found)} files: {', '.join(found)}" if found else "none of the files that `glax cache list` names"
        raise UsageError(f"NAME must fit one file, got {args.file!r}, which fits {which}")
    content = files[found[0]]

    def lines():
        print(found[0])
        show_table(
            ("call", "config", "ms", "candidates"),
            [(key, text_of(e), float(e["ms"]), len(e.get("candidates", {}))) for key, e in content["entries"].items()],
        )

    return dict(name=found[0], **content), lines


def text_of(entry: dict) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in entry["config"].items())
    return f"{entry.get('type', 'Config')}({fields})"


def clear(persistent: PersistentCache, args):
    paths = [path for path, _ in persistent.files()]
    if paths and not args.yes:
        if args.json or not sys.stdin.isatty():
            raise UsageError(f"would remove {len(paths)} files from {persistent.folder}: say --yes")
        if input(f"Remove {len(paths)} files from {persistent.folder}? [y/N] ").strip().lower() not in ("y", "yes"):
            return dict(removed=[]), lambda: print("nothing removed")
    for path in paths:
        with filelock.FileLock(f"{path}.lock"):  # lock files stay: another process may be waiting on one
            path.unlink(missing_ok=True)
    executor.chain.cache.clear()
    removed = [path.relative_to(persistent.folder).as_posix() for path in paths]
    return dict(removed=removed), lambda: print(f"removed {len(removed)} files from {persistent.folder}")


def export_file(persistent: PersistentCache, args):
    files = files_of(persistent)
    try:
        pathlib.Path(args.file).write_text(json.dumps(dict(format=FORMAT, files=files), indent=1))
    except OSError as error:
        raise UsageError(f"cannot write {args.file}: {error.strerror}") from error
    entries = sum(len(content["entries"]) for content in files.values())
    document = dict(file=args.file, files=len(files), entries=entries)
    return document, lambda: print(f"wrote {entries} measurements of {len(files)} files to {args.file}")


def import_file(persistent: PersistentCache, args):
    try:
        files = checked(json.loads(pathlib.Path(args.file).read_text()))
    except OSError as error:
        raise UsageError(f"cannot read {args.file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{args.file} is no export of `glax cache export`: {error}") from error
    added, kept = 0, 0
    for name, content in files.items():
        path = persistent.folder / name
        old = persistent.read(path).get("entries", {})
        better = {k: e for k, e in content["entries"].items() if k not in old or e["ms"] < old[k]["ms"]}
        if better:
            about = {k: x for k, x in content.items() if k not in ("format", "entries")}
            persistent.merge(path, about, better)
        added, kept = added + len(better), kept + len(content["entries"]) - len(better)
    if persistent.unwritable:
        raise UsageError(f"cannot write {persistent.folder}")
    executor.chain.cache.clear()
    document = dict(folder=str(persistent.folder), added=added, kept=kept)
    return document, lambda: print(f"{added} measurements added or faster, {kept} left as they were")


def checked(document) -> dict[str, dict]:
    """The files of an export, every name one of a place inside the cache, every entry one that can be read back."""
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError('it has no "files"')
    if document.get("format") != FORMAT:
        raise ValueError(f"its format is {document.get('format')!r}, this version of glax reads {FORMAT}")
    for name, content in document["files"].items():
        parts = name.split("/")
        if (
            len(parts) != 2
            or not name.endswith(".json")
            or "\\" in name
            or any(part[:1] in ("", ".") for part in parts)
        ):
            raise ValueError(f"file names must be device/kernel.json, got {name!r}")
        try:
            entries = check(content)["entries"]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for key, entry in entries.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict) or not is_ms(entry.get("ms")):
                raise ValueError(f"{name}: the entry {key!r} must have a config and its ms, got {entry!r:.80}")
    return document["files"]


def is_ms(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0


ACTIONS = dict(
    [("list", list_files), ("show", show_file), ("clear", clear), ("export", export_file), ("import", import_file)]
)
