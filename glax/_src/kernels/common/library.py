"""Load a C++ library that was built when glax was installed, and register its handlers with XLA."""

import ctypes
from collections.abc import Callable
from pathlib import Path

REMEDY = "install a C++17 compiler (Debian, Ubuntu: apt install g++) and install glax again"


def load_built(folder: Path, stem: str, register: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | str:
    """Load the library folder/stem.so, pass it to `register`, and return it. If the library is missing, or if loading it or
    `register` raises, return instead the reason and the remedy as text.

    register: registers the library's handlers with XLA. setup.py writes folder/build_failure.txt, the reason, where the build
    failed.
    """
    built, failure = folder / f"{stem}.so", folder / "build_failure.txt"
    if not built.exists():
        why = "glax was installed without building it"
        if failure.exists():
            why = failure.read_text().strip()
        elif any(folder.glob(f"{stem}.*.so")):  # with Python's version in its name
            why = "the one that is here is of an earlier version of glax"
        return f"its library is missing ({why}): {REMEDY}"
    try:
        loaded = ctypes.CDLL(str(built))
        register(loaded)
    except Exception as error:  # a damaged or foreign library may fail in any way; refusals show the reason
        return f"its library does not load ({error}): {REMEDY}"
    return loaded
