"""Load a C++ library that was built when glax was installed, and register its handlers with XLA."""

import ctypes
import importlib.machinery
from collections.abc import Callable
from pathlib import Path

REMEDY = "install a C++17 compiler (Debian, Ubuntu: apt install g++) and install glax again"


def load_built(folder: Path, stem: str, register: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | str:
    """Load folder/stem, pass the library to `register`, and return it. Return the reason and the remedy if it is missing or
    fails.

    setup.py writes folder/build_failure.txt where the build failed.
    """
    suffixes = (".so", *importlib.machinery.EXTENSION_SUFFIXES)  # earlier builds have Python's version in their names
    built = [path for suffix in suffixes if (path := folder / f"{stem}{suffix}").exists()]
    if not built:
        failure = folder / "build_failure.txt"
        why = failure.read_text().strip() if failure.exists() else "glax was installed without building it"
        return f"its library is missing ({why}): {REMEDY}"
    try:
        loaded = ctypes.CDLL(str(built[0]))
        register(loaded)
    except Exception as error:  # a damaged or foreign library may fail in any way; refusals show the reason
        return f"its library does not load ({error}): {REMEDY}"
    return loaded
