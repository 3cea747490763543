"""Read and replace files that other processes may change: atomically, and never through a link."""

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

LIMIT = 64 << 20  # bytes; enough for tens of thousands of measurements
DEPTH = 32  # levels of nesting; an export has 8
KINDS = {"d": "a directory", "p": "a FIFO", "c": "a device", "b": "a device", "s": "a socket"}

Stamp = tuple[int, ...]


def cache_folder() -> pathlib.Path | None:
    """Return the folder of files that glax can make again: GLAX_CACHE_DIR, else a folder in the user's cache folder.

    Return None for a user who has neither GLAX_CACHE_DIR nor a home directory.
    """
    if chosen := os.environ.get("GLAX_CACHE_DIR"):
        return pathlib.Path(chosen)
    import platformdirs  # imported here, because `import glax` needs only jax, numpy and jaxtyping

    try:
        found = pathlib.Path(platformdirs.user_cache_dir("glax"))
    except RuntimeError:
        return None
    return found if found.is_absolute() else None  # older platformdirs leave "~" as it is


class ContentError(ValueError):
    """A cache file holds content that glax never writes."""


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the device, inode, modification time and size of a file. They change whenever the file is replaced or written."""
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def read_json(path: pathlib.Path) -> tuple[Stamp, object]:
    """Read a JSON file and return (its stamp, its content).

    Raises OSError if the file cannot be read now, and ContentError if it holds no JSON that glax writes.
    """
    found, raw = read_regular(path, LIMIT + 1)
    return stamp_of(found), parse(raw)


def read_regular(path: pathlib.Path, most: int = -1) -> tuple[os.stat_result, bytes]:
    """Return the status of a regular file and its first `most` bytes, or all bytes if `most` is -1.

    Only regular files are opened: opening a FIFO would wait for a writer, and opening a device may have effects. O_NONBLOCK
    covers a FIFO that takes the file's place after the check. Raises OSError if the file cannot be read.
    """
    require_regular(path, os.stat(path).st_mode)
    with open(path, "rb", opener=open_without_waiting) as file:
        found = os.fstat(file.fileno())
        require_regular(path, found.st_mode)
        return found, file.read(most)


def open_without_waiting(path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_regular(path: pathlib.Path, mode: int):
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.filemode(mode)[0], "special")
        raise OSError(errno.EINVAL, f"Not a regular file, but {kind}", str(path))


def parse(raw: bytes) -> object:
    """Return the content of JSON in UTF-8.

    Raises ContentError for anything else, for NaN and infinities, for repeated keys, for deep nesting, and for more than LIMIT
    bytes.
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
    """Yield a temporary path of the same name to write. The file written there replaces `path` at the end.

    The temporary path lies in a new folder beside `path` that only this user can enter. The folder has a random name and did
    not exist before, so it contains no link that someone else has made. A link at `path` itself is replaced, not followed.
    After a failure `path` is unchanged, and the new folder is removed.
    """
    private = pathlib.Path(tempfile.mkdtemp(prefix=".glax-", dir=path.parent))
    try:
        yield private / path.name
        os.replace(private / path.name, path)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Rename a file to the first of path.unreadable, path.unreadable.1, ... that is free, and return the new path.

    A placeholder that is created exclusively reserves the name. So no other file is overwritten, and no link is followed.
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
    """Return why no file can be made in the folder, or in its nearest ancestor that exists. Return None if a file can be made;
    the file made to find out is removed."""
    nearest = next((place for place in (folder, *folder.parents) if os.path.exists(place)), pathlib.Path())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return str(error)
    return None
