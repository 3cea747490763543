"""Run `glax cache`: list, show, clear, export and import what tuning has measured."""

import json
import pathlib
import sys

from glax._src.core.files import read_json, replacing
from glax._src.solve.dispatch import executor
from glax._src.tuning.cache import FORMAT, NO_FOLDER, PersistentCache, check, check_entry, is_format, locked
from glax.cli.errors import UsageError
from glax.cli.output import show_json


def measurements() -> PersistentCache:
    """Return the measurements of this user on disk."""
    persistent = executor.chain.persistent
    assert persistent is not None  # glax's own executor has one
    return persistent


def folder_of(persistent: PersistentCache) -> pathlib.Path:
    """Return the folder of the measurements. Raises UsageError for a user who has none."""
    if persistent.folder is None:
        raise UsageError(NO_FOLDER)
    return persistent.folder


def run(args) -> int:
    persistent = measurements()
    folder_of(persistent)
    document, lines = ACTIONS[args.action](persistent, args)
    show_json(document) if args.json else lines()
    return 0


def files_of(persistent: PersistentCache) -> dict[str, dict]:
    """Return {name: content} of all files of measurements, where the name is "device/kernel@version+compilers.json"."""
    folder = folder_of(persistent)
    return {path.relative_to(folder).as_posix(): content for path, content in persistent.files()}


def list_files(persistent: PersistentCache, args):
    """Return (the document of all files, a function that prints it). The other actions of ACTIONS return such pairs, too."""
    files = [
        dict(name=name, kernel=content.get("kernel"), device=content.get("device"), entries=len(content["entries"]))
        for name, content in files_of(persistent).items()
    ]

    def lines():
        print(f"{persistent.folder}: {len(files)} files")
        for file in files:  # names stand whole, to be copied
            print(f"{file['entries']:>7,} {'entry  ' if file['entries'] == 1 else 'entries'}  {file['name']}")

    return dict(folder=str(persistent.folder), files=files), lines


def show_file(persistent: PersistentCache, args):
    """Return (the content of the one file whose name is, or contains, args.file; a function that prints it)."""
    files = files_of(persistent)
    found = [name for name in files if name == args.file] or [name for name in files if args.file in name]
    if len(found) != 1:
        which = f"{len(found)} files: {', '.join(found)}" if found else "none of the files that `glax cache list` names"
        raise UsageError(f"NAME must fit one file, got {args.file!r}, which fits {which}")
    content = files[found[0]]

    def lines():
        print(found[0])
        for key, entry in content["entries"].items():
            print(f"{key}\n    {entry_text(entry)}")

    return dict(name=found[0], **content), lines


def entry_text(entry) -> str:
    if reason := entry_error(entry):
        return f"ignored: {reason}"
    fields = ", ".join(f"{name}={value!r}" for name, value in entry["config"].items())
    return f"{entry['type']}({fields}): {entry['ms']:.4g} ms, of {len(entry.get('candidates', {}))} candidates"


def entry_error(entry) -> str | None:
    """Return what is wrong with an entry of a cache file, or None."""
    try:
        check_entry(entry)
    except ValueError as error:
        return str(error)
    return None


def clear(persistent: PersistentCache, args):
    paths = [path for path, _ in persistent.files()]
    if paths and not args.yes:
        if args.json or sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"would remove {len(paths)} files from {persistent.folder}: say --yes")
        try:
            answer = input(f"Remove {len(paths)} files from {persistent.folder}? [y/N] ")
        except EOFError:
            answer = "no"
        if answer.strip().lower() not in ("y", "yes"):
            return dict(removed=[]), lambda: print("nothing removed")
    for path in paths:
        try:
            with locked(path):  # lock files stay: another process may be waiting on one
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot remove {path}: {error.strerror or error}") from error
    executor.chain.cache.clear()
    folder = folder_of(persistent)
    removed = [path.relative_to(folder).as_posix() for path in paths]
    return dict(removed=removed), lambda: print(f"removed {len(removed)} files from {persistent.folder}")


def export_file(persistent: PersistentCache, args):
    files = files_of(persistent)
    text = json.dumps(dict(format=FORMAT, files=files), indent=1, allow_nan=False)
    try:
        if (
            args.file.exists() and not args.file.is_file()
        ):  # a terminal, a pipe or a device is written to, and never replaced
            args.file.write_text(text, encoding="utf-8")
        else:
            with replacing(args.file.resolve()) as new:
                new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {args.file}: {error.strerror}") from error
    entries = sum(len(content["entries"]) for content in files.values())
    document = dict(file=str(args.file), files=len(files), entries=entries)
    return document, lambda: print(f"wrote {entries} measurements of {len(files)} files to {args.file}")


def import_file(persistent: PersistentCache, args):
    try:
        files = checked(read_json(args.file)[1])
    except OSError as error:
        raise UsageError(f"cannot read {args.file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{args.file} is no export of `glax cache export`: {error}") from error
    folder, added, unchanged = folder_of(persistent), 0, 0
    for name, content in files.items():
        path = folder / name
        old = persistent.read(path).get("entries", {})
        better = {key: entry for key, entry in content["entries"].items() if is_faster(entry, old.get(key))}
        if better:
            about = {k: x for k, x in content.items() if k not in ("format", "entries")}
            try:
                persistent.merge(path, about, better)
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror or error}; {added} were added") from error
        added, unchanged = added + len(better), unchanged + len(content["entries"]) - len(better)
    executor.chain.cache.clear()
    document = dict(folder=str(folder), added=added, unchanged=unchanged)
    return document, lambda: print(f"{added} measurements added or faster, {unchanged} left as they were")


def is_faster(entry: dict, old) -> bool:
    """Return whether an entry takes less time than `old`, or `old` is no entry."""
    return entry_error(old) is not None or entry["ms"] < old["ms"]


def checked(document) -> dict[str, dict]:
    """Return the files of an export. Raises ValueError unless every name lies inside the cache and every entry can be read."""
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError('it has no "files"')
    if not is_format(document.get("format")):
        raise ValueError(f"its format is {document.get('format')!r:.80}, this version of glax reads {FORMAT}")
    for name, content in document["files"].items():
        parts = name.split("/")
        inside = len(parts) == 2 and not any(part[:1] in ("", ".") for part in parts)
        if not inside or not name.endswith(".json") or "\\" in name or not name.isprintable():
            raise ValueError(f"file names must be device/kernel.json, got {name!r:.80}")
        try:
            entries = check(content)["entries"]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for key, entry in entries.items():
            if reason := entry_error(entry):
                raise ValueError(f"{name}: the entry {key!r:.80} {reason.removeprefix('it ')}")
    return document["files"]


ACTIONS = dict(
    [("list", list_files), ("show", show_file), ("clear", clear), ("export", export_file), ("import", import_file)]
)
