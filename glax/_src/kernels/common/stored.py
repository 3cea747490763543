"""Store code that takes long to make below glax's cache folder, and read it again where nobody else can have written it."""

import contextlib
import hashlib
import pathlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

from glax._src.core.files import cache_folder, make_folders, read_trusted, replacing

MOST_BYTES = 2**28  # of the files of a folder


class Code(NamedTuple):
    """Describe a kind of stored code. name: what warnings call it. mark: the bytes with which its files begin. Behind the mark,
    a file has the SHA-256 digest of the code, and the code."""

    name: str
    mark: bytes

    def made_once(self, path: pathlib.PurePath | None, make: Callable[[], bytes]) -> bytes:
        """Return the code stored at `path` below the cache folder. If it is missing, return make() and store it.

        Nothing is stored if there is no cache folder, or if path is None.
        """
        folder = cache_folder()
        if folder is None or path is None:
            return make()
        if (code := self.read(folder / path, folder)) is None:
            code = make()
            self.write(folder / path, folder, code)
        return code

    def read(self, path: pathlib.Path, folder: pathlib.Path) -> bytes | None:
        """Return the code in the file `path`, which lies below the cache folder `folder`; None if the file is missing or
        damaged.

        The digest lies in the same file, so it reveals damage, but no forgery. A file that another user may have written, or
        that cannot be read, gives None and a warning.
        """
        try:
            content = read_trusted(path, folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"glax does not read a stored {self.name}, and makes it again: {error}", stacklevel=2)
            return None
        size = len(self.mark)
        mark, digest, code = content[:size], content[size : size + 32], content[size + 32 :]
        return code if mark == self.mark and digest == hashlib.sha256(code).digest() else None

    def write(self, path: pathlib.Path, folder: pathlib.Path, code: bytes):
        """Write the code to the file `path` below the cache folder `folder`. Only this user can read the file. A failure is a
        warning.

        The oldest files beside it are then removed while all together have more than MOST_BYTES.
        """
        try:
            make_folders(path.parent, folder)
            with replacing(path) as written:
                written.touch(mode=0o600)
                written.write_bytes(self.mark + hashlib.sha256(code).digest() + code)
            remove_oldest(path.parent)
        except OSError as error:
            warnings.warn(
                f"glax could not store a {self.name}, and makes it again in each process: {error}", stacklevel=2
            )


def remove_oldest(folder: pathlib.Path):
    """Remove the oldest files of a folder, by time of writing, until the others have at most MOST_BYTES."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            files.append((path.stat(), path))
    left = sum(found.st_size for found, _ in files)
    for found, path in sorted(files, key=lambda each: each[0].st_mtime_ns):
        if left <= MOST_BYTES:
            return
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        left -= found.st_size
