"""Store what is compiled below glax's cache folder, and read it again where nobody else can have written it."""

import hashlib
import pathlib
import warnings
from typing import NamedTuple

from glax._src.core.files import make_folders, read_trusted, replacing


class Code(NamedTuple):
    """Hold what a kind of stored code is called in warnings, and the mark that its files begin with. A file continues with the
    digest of the code, and the code."""

    name: str
    mark: bytes

    def read(self, path: pathlib.Path, folder: pathlib.Path) -> bytes | None:
        """Return the code in a file below the cache folder; None if the file is missing or damaged.

        The digest lies in the same file, so it shows damage alone. What anybody else may have written is not read, with a
        warning.
        """
        try:
            content = read_trusted(path, folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"glax does not read a stored {self.name}, and compiles it again: {error}", stacklevel=2)
            return None
        size = len(self.mark)
        mark, digest, code = content[:size], content[size : size + 32], content[size + 32 :]
        return code if mark == self.mark and digest == hashlib.sha256(code).digest() else None

    def write(self, path: pathlib.Path, folder: pathlib.Path, code: bytes):
        """Write the code to a file below the cache folder, which this user alone can read. Where that fails, warn."""
        try:
            make_folders(path.parent, folder)
            with replacing(path) as written:
                written.touch(mode=0o600)
                written.write_bytes(self.mark + hashlib.sha256(code).digest() + code)
        except OSError as error:
            warnings.warn(
                f"glax could not store a {self.name}, and compiles it again in each process: {error}", stacklevel=2
            )
