"""Read and replace files that other processes may change: atomically, and never through a link."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

try:
    import fcntl
except ImportError:  # a system without locks of POSIX
    fcntl = None

LIMIT = 64 << 20  # bytes; enough for tens of thousands of measurements
DEPTH = 32  # levels of nesting; an export has 8
KINDS = {"l": "a link", "d": "a directory", "p": "a FIFO", "c": "a device", "b": "a device", "s": "a socket"}

STAGED, COMMITTED = ".glax-", ".glax.saved"  # a folder being written (a random name follows), and one complete
REMOVED = ".removed"  # in such a folder, the names of files that go when its own take their places

PACKAGE = pathlib.Path(__file__).parents[2]  # glax
IMPORTED = time.time()  # this process reads the sources about now

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


@functools.cache
def sources() -> str:
    """Return a digest of the source code of this package."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))).hexdigest()


def is_edited() -> bool:
    """Return whether the source code of this package was edited since this process imported it. `sources` may then describe other
    code than the process runs."""
    try:
        return any(path.stat().st_mtime >= IMPORTED for path in PACKAGE.rglob("*.py"))
    except FileNotFoundError:  # removed in this moment
        return True


class ContentError(ValueError):
    """Say that a cache file holds content that glax never writes."""


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the device, inode, modification time and size of a file. They change whenever the file is replaced or written."""
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def read_json(path: pathlib.Path, *, infinite: bool = False) -> tuple[Stamp, object]:
    """Read a JSON file and return (its stamp, its content). infinite: whether NaN, Infinity and -Infinity are numbers in it.

    Raises OSError if the file cannot be read now, and ContentError if it holds no JSON that glax writes.
    """
    found, raw = read_regular(path, LIMIT + 1)
    return stamp_of(found), parse(raw, infinite=infinite)


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


def read_trusted(path: pathlib.Path, base: pathlib.Path) -> bytes:
    """Return the content of a file whose code runs in this process, after a check that only this user or root can have written
    it.

    The file, and the folders below `base` that lead to it, must be no links, must belong to this user or to root, and nobody
    else may be able to write to them. Raises OSError if one of this does not hold, if the file is not a regular file, or if it
    has more than LIMIT bytes.
    """
    for folder in below(base, path.parent):
        check_trusted(folder, os.lstat(folder), stat.S_ISDIR)
    check_trusted(path, os.lstat(path), stat.S_ISREG)
    with open(path, "rb", opener=open_without_waiting) as file:
        check_trusted(path, os.fstat(file.fileno()), stat.S_ISREG)
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise OSError(errno.EFBIG, f"Larger than {LIMIT >> 20} MiB", str(path))
    return content


def check_trusted(path: pathlib.Path, found: os.stat_result, is_of_kind: Callable[[int], bool]):
    """Raise OSError unless is_of_kind(found.st_mode), the file belongs to this user or to root, and nobody else may write to
    it."""
    if not is_of_kind(found.st_mode):
        kind = KINDS.get(stat.filemode(found.st_mode)[0], "a regular file")
        raise OSError(errno.EINVAL, f"Not what glax makes there, but {kind}", str(path))
    if not hasattr(os, "getuid"):  # Windows has neither owners nor modes of this form
        return
    if found.st_uid not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, f"Belongs to user {found.st_uid}, not to this one: remove it", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "Others can write to it: chmod go-w, or remove it", str(path))


def below(base: pathlib.Path, path: pathlib.Path) -> list[pathlib.Path]:
    """Return `path` and its ancestors that lie below `base`, the outermost first. `base` itself is not among them."""
    return [base.joinpath(*path.relative_to(base).parts[: i + 1]) for i in range(len(path.relative_to(base).parts))]


def make_folders(path: pathlib.Path, base: pathlib.Path):
    """Make the folders from `base` to `path` that are missing, which only this user can enter, whatever the umask.

    Raises OSError if one of them below `base` is a link or no folder, which glax never makes.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    for folder in (base, *below(base, path)):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_folders(folder, base)


def check_folders(path: pathlib.Path, base: pathlib.Path):
    """Raise OSError if a folder from below `base` to `path` is missing, or is a link or no folder."""
    for folder in below(base, path):
        if not stat.S_ISDIR(mode := os.lstat(folder).st_mode):
            kind = KINDS.get(stat.filemode(mode)[0], "a regular file")
            raise OSError(errno.EINVAL, f"Not a folder, but {kind}", str(folder))


def open_without_waiting(path, flags: int) -> int:
    """Return the descriptor of os.open with O_NONBLOCK, so that opening a FIFO does not wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_regular(path: pathlib.Path, mode: int):
    """Raise OSError unless `mode`, the st_mode of `path`, says that `path` is a regular file."""
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.filemode(mode)[0], "special")
        raise OSError(errno.EINVAL, f"Not a regular file, but {kind}", str(path))


def parse(raw: bytes, *, infinite: bool = False) -> object:
    """Return the content of JSON in UTF-8.

    Raises ContentError for anything else, for NaN and infinities unless `infinite`, for repeated keys, for deep nesting, and
    for more than LIMIT bytes.
    """
    constant = float if infinite else finite
    if len(raw) > LIMIT:
        raise ContentError(f"it is larger than {LIMIT >> 20} MiB")
    try:
        content = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=constant, parse_float=finite)
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
    """Return the values of a dict or the entries of a list, as JSON has them; [] for any other value."""
    if isinstance(x, dict):
        return list(x.values())
    return x if isinstance(x, list) else []


def unique(pairs: list[tuple[str, object]]) -> dict:
    """Return the dict of these (key, value) pairs. Raises ContentError for a repeated key."""
    content = {}
    for name, value in pairs:
        if name in content:
            raise ContentError(f"the key {name!r:.80} stands twice")
        content[name] = value
    return content


def finite(text: str) -> float:
    """Return the number that the text of a JSON number or constant names. Raises ContentError if it is NaN or infinite."""
    if not math.isfinite(x := float(text)):
        raise ContentError(f"it holds the number {text:.80}, which is not finite")
    return x


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary path of the same name to write. The file written there replaces `path` at the end.

    The temporary path lies in a folder of `staging`. A link at `path` itself is replaced, not followed. After a failure `path`
    is unchanged.
    """
    with staging(path.parent) as private:
        yield private / path.name
        os.replace(private / path.name, path)


@contextlib.contextmanager
def replacing_together(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, set[str]]]:
    """Yield (a temporary folder, an empty set), and at the end replace files of `folder` in one step.

    The files that the caller has written to the temporary folder replace those of the same names in `folder`. The files of
    `folder` whose names the caller has added to the set are removed.

    The one step renames the temporary folder to COMMITTED. Before this step, `folder` is unchanged. After it, `newest` finds
    every new file, whether it was moved to its place already or not. Moves that a kill prevented are done by the next call.

    Raises OSError if a file cannot be written, or if one of the names is a folder.
    """
    move_committed(folder)
    with staging(folder) as private:
        removed: set[str] = set()
        yield private, removed
        if removed:
            (private / REMOVED).write_text("\n".join(sorted(removed)))
        for path in private.iterdir():
            if (folder / path.name).is_dir():
                raise IsADirectoryError(errno.EISDIR, "A folder is in the place of the file", str(folder / path.name))
            flush(path)
        flush(private)
        os.rename(private, folder / COMMITTED)
    move_committed(folder)


def newest(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of the newest file `name` of a folder: in the subfolder COMMITTED if a killed `replacing_together` has
    left this file there, or was to remove it, else in the folder itself. The path may not exist."""
    waiting = folder / COMMITTED
    is_own = not waiting.is_symlink() and (os.path.lexists(waiting / name) or name in removed_names(waiting))
    return waiting / name if is_own else folder / name


def removed_names(waiting: pathlib.Path) -> list[str]:
    """Return the names of the files that a COMMITTED folder, `waiting`, says are to be removed; [] if it has no such list."""
    path = waiting / REMOVED
    return path.read_text().splitlines() if path.is_file() and not path.is_symlink() else []


def move_committed(folder: pathlib.Path):
    """Move the files of `folder`'s subfolder COMMITTED to their places in `folder`, and remove the files that its list names.

    Nothing happens if there is no such subfolder.
    """
    waiting = folder / COMMITTED
    if waiting.is_symlink() or not waiting.is_dir():
        return
    new = {path.name for path in waiting.iterdir()} - {REMOVED}
    for name in removed_names(waiting):
        if name == pathlib.Path(name).name and name not in new:
            (folder / name).unlink(missing_ok=True)
    for name in new:
        os.replace(waiting / name, folder / name)
    (waiting / REMOVED).unlink(missing_ok=True)
    waiting.rmdir()


def flush(path: pathlib.Path):
    """Wait until a file or a folder is on the disk, so that a loss of power cannot reorder what follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staging(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a new folder inside `folder` that only this user can enter, and remove the new folder at the end.

    The new folder has a random name and did not exist before, so no one else has made a link in it. First, folders that killed
    processes left behind are removed: those of this user that no living process has locked.
    """
    remove_abandoned(folder)
    private, lock = locked_folder(folder)
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def locked_folder(parent: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Make a folder and return (its path, the descriptor that locks it, or None where the system has no such locks)."""
    while True:
        private = pathlib.Path(tempfile.mkdtemp(prefix=STAGED, dir=parent))
        try:
            lock = locked(private, wait=True)
        except FileNotFoundError:
            continue  # another process took it for abandoned before it was locked
        if private.is_dir():
            return private, lock
        if lock is not None:
            os.close(lock)


def locked(folder: pathlib.Path, *, wait: bool) -> int | None:
    """Return the descriptor that locks a folder until it is closed. Return None where that is not possible, or where another
    process holds the lock and `wait` is False."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned(parent: pathlib.Path):
    """Remove the temporary folders of `staging` in `parent` that no living process has locked. Folders of other users stay."""
    for path in parent.glob(f"{STAGED}*"):
        with contextlib.suppress(OSError):  # it is another user's, no folder, or gone by now
            lock = locked(path, wait=False)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Rename a file or a folder to the first of path.unreadable, path.unreadable.1, ... that is free, and return the new path.

    A placeholder that is created exclusively reserves the name. So no other file is overwritten, and no link is followed.
    """
    aside, taken = path.with_name(f"{path.name}.unreadable"), 0
    is_folder = path.is_dir() and not path.is_symlink()
    while True:
        try:
            if is_folder:
                aside.mkdir()
            else:
                open(aside, "xb").close()
            break
        except FileExistsError:
            taken += 1
            aside = path.with_name(f"{path.name}.unreadable.{taken}")
    try:
        os.replace(path, aside)
    except OSError:
        if is_folder:
            aside.rmdir()
        else:
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
