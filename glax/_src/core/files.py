"""Safe access to files that other processes may change: atomic reads and replacements, never through a link."""

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterator

LIMIT = 64 << 20  # bytes; tens of thousands of measurements
DEPTH = 32  # levels of nesting; an export has 8
KINDS = {"d": "a directory", "p": "a FIFO", "c": "a device", "b": "a device", "s": "a socket"}

Stamp = tuple[int, ...]


def cache_folder() -> pathlib.Path | None:
    """The folder of files that glax makes again when they are lost: GLAX_CACHE_DIR, else one in the user's cache folder.

    None for a user who has neither GLAX_CACHE_DIR nor a home directory.
    """
    if chosen := os.environ.get("GLAX_CACHE_DIR"):
        return pathlib.Path(chosen)
    import platformdirs  # here, for `import glax` needs jax, numpy and jaxtyping alone

    try:
        found = pathlib.Path(platformdirs.user_cache_dir("glax"))
    except RuntimeError:
        return None
    return found if found.is_absolute() else None  # older platformdirs leave "~" as it is


class ContentError(ValueError):
    """A file holds what glax never writes."""


def stamp_of(found: os.stat_result) -> Stamp:
    """What changes whenever a file is replaced or written."""
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def read_json(path: pathlib.Path) -> tuple[Stamp, object]:
    """Reads a JSON file: (its stamp, its content).

    Only regular files are opened: a FIFO waits for its writer, and a device may act on being opened. O_NONBLOCK covers a
    FIFO that takes the file's place in between.

    OSError: the file cannot be read now, whatever it holds. ContentError: it holds no JSON that glax writes.
    """
    require_regular(path, os.stat(path).st_mode)
    with open(path, "rb", opener=open_without_waiting) as file:
        found = os.fstat(file.fileno())
        require_regular(path, found.st_mode)
        return stamp_of(found), parse(file.read(LIMIT + 1))


def open_without_waiting(path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_regular(path: pathlib.Path, mode: int):
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.filemode(mode)[0], "special")
        raise OSError(errno.EINVAL, f"Not a regular file, but {kind}", str(path))


def parse(raw: bytes) -> object:
    """The content of JSON in UTF-8. ContentError for anything else, and for NaN, infinities, keys that stand twice, deep
    nesting and more than LIMIT bytes.
    """
    if len(raw) > LIMIT:
        raise ContentError(f"it is larger than {LIMIT >> 20} MiB")
    try:
        content = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ContentError(f"it is nested deeper than {DEPTH} levels") from None
    except ValueError as error:
        raise ContentError(str(error)) from error
    level = [content]
    for _ in range(DEPTH):
        level = [x for outer in level for x in children(outer)]
    if level:
        raise ContentError(f"it is nested deeper than {DEPTH} levels")
    return content


def children(x) -> list:
    if isinstance(x, dict):
        return list(x.values())
    return x if isinstance(x, list) else []


def unique(pairs: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in pairs]
    content = dict(pairs)
    if len(content) < len(names):
        twice = next(name for name in content if names.count(name) > 1)
        raise ContentError(f"the key {twice!r:.80} stands twice")
    return content


def finite(text: str) -> float:
    if not math.isfinite(x := float(text)):
        raise ContentError(f"it holds the number {text:.80}, which is not finite")
    return x


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of the same name to write; what lies there at the end takes the place of `path`.

    It lies in a new folder beside `path` that is this user's alone. The folder's name is random and mkdir takes none that
    exists, so no link can have been planted in it; a link at `path` itself is replaced, not followed. Whatever fails, `path`
    stays as it was, and nothing is left beside it.
    """
    private = pathlib.Path(tempfile.mkdtemp(prefix=".glax-", dir=path.parent))
    try:
        yield private / path.name
        os.replace(private / path.name, path)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a file to the first of path.unreadable, path.unreadable.1, ... that is free, and returns that.

    An exclusively created placeholder reserves the name, so that nothing else is overwritten and no link followed.
    """
    aside, taken = path.with_name(f"{path.name}.unreadable"), 0
    while True:
        try:
            open(aside, "xb").close()
            break
        except FileExistsError:
            taken += 1
            aside = path.with_name(f"{path.name}.unreadable.{taken}")
    try:
        os.replace(path, aside)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside


def unwritable(folder: pathlib.Path) -> str | None:
    """Why no file can be made in the folder, or in the nearest above it that exists; None if one can, and nothing is left."""
    nearest = next((place for place in (folder, *folder.parents) if os.path.exists(place)), pathlib.Path())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return str(error)
    return None
