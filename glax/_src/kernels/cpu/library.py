"""Load the library of native kernels, which is built when glax is installed with a C++ compiler."""

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
    """Load the library and register its kernels with XLA, or return the reason why it is missing and the remedy."""
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
    except Exception as error:  # a damaged or foreign library may fail in any way; refusals show the reason
        return f"its library does not load ({error}): {REMEDY}"
    loaded.glax_instructions.restype = ctypes.c_char_p
    return loaded


def check_instructions():
    """Raise ValueError unless native/parallel_for.h knows GLAX_CPU_INSTRUCTIONS, the widest that kernels may use."""
    named = os.environ.get("GLAX_CPU_INSTRUCTIONS") or INSTRUCTIONS[0]
    if named not in INSTRUCTIONS:
        known = f"{', '.join(INSTRUCTIONS[:-1])} or {INSTRUCTIONS[-1]}"
        raise ValueError(f"GLAX_CPU_INSTRUCTIONS must be {known}, got {named!r}: set one of these, or unset it")


def missing() -> str | None:
    """Return the reason why native kernels cannot run here, or None. Raise ValueError for an unknown GLAX_CPU_INSTRUCTIONS."""
    check_instructions()
    found = load_library()
    return found if isinstance(found, str) else None
