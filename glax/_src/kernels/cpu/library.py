"""The library of native kernels: built with glax where there was a compiler, and loaded with it."""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path

import jax

FOLDER = Path(__file__).parent
FAILURE = FOLDER / "build_failure.txt"  # written by setup.py where the build failed
INSTRUCTIONS = ("avx512", "avx2", "baseline")
TARGETS = ("glax_forward", "glax_gradient", "glax_step")
REMEDY = "install a C++17 compiler (Debian, Ubuntu: apt install g++) and install glax again"


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """The library, its kernels known to XLA; or the reason why there is none, and what to do."""
    built = [
        path for suffix in importlib.machinery.EXTENSION_SUFFIXES if (path := FOLDER / f"_native{suffix}").exists()
    ]
    if not built:
        why = FAILURE.read_text().strip() if FAILURE.exists() else "glax was installed without building it"
        return f"its library is missing ({why}): {REMEDY}"
    try:
        loaded = ctypes.CDLL(str(built[0]))
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    except Exception as error:  # whatever a damaged or foreign library does; the reason is shown with every refusal
        return f"its library does not load ({error}): {REMEDY}"
    loaded.glax_instructions.restype = ctypes.c_char_p
    return loaded


def check_instructions():
    """ValueError if GLAX_CPU_INSTRUCTIONS, the widest that kernels may use, is none that native/share.h knows."""
    named = os.environ.get("GLAX_CPU_INSTRUCTIONS") or INSTRUCTIONS[0]
    if named not in INSTRUCTIONS:
        known = f"{', '.join(INSTRUCTIONS[:-1])} or {INSTRUCTIONS[-1]}"
        raise ValueError(f"GLAX_CPU_INSTRUCTIONS must be {known}, got {named!r}: set one of these, or unset it")


def missing() -> str | None:
    """The reason why native kernels cannot run here; None if they can. ValueError if GLAX_CPU_INSTRUCTIONS means nothing."""
    check_instructions()
    found = load_library()
    return found if isinstance(found, str) else None
