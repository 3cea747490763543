"""Load the library of native kernels, which is built when glax is installed with a C++ compiler."""

import ctypes
import functools
import os
from pathlib import Path

import jax

from glax._src.kernels.common.library import load_built

FOLDER = Path(__file__).parent
INSTRUCTIONS = ("avx512", "avx2", "baseline")
TARGETS = ("glax_forward", "glax_gradient", "glax_step")
DELTA_TARGETS = ("glax_delta_forward", "glax_delta_gradient", "glax_delta_step")


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """Load the library and register its kernels with XLA, or return the reason why it is missing and the remedy."""
    return load_built(FOLDER, "_native", register)


def register(library: ctypes.CDLL):
    for name in (*TARGETS, *(name for name in DELTA_TARGETS if hasattr(library, name))):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.glax_instructions.restype = ctypes.c_char_p


def lacks_sums_of_heads() -> str | None:
    """Return why the loaded library cannot sum gradients over heads that share a row, or None. Builds before glax_interface 2
    cannot."""
    if hasattr(load_library(), "glax_interface"):
        return None
    return "its library was built before it summed gradients of shared heads: install glax again"


def takes_segments(erases: bool) -> bool:
    """Return whether the library divides rows into segments itself. Builds before glax_interface 3 do not; for recurrences that
    erase, before 4."""
    found, wanted = load_library(), 4 if erases else 3
    return not isinstance(found, str) and hasattr(found, "glax_interface") and found.glax_interface() >= wanted


def check_instructions():
    """Raise ValueError unless GLAX_CPU_INSTRUCTIONS, the widest instructions for kernels, is a name that native/parallel_for.h
    knows."""
    named = os.environ.get("GLAX_CPU_INSTRUCTIONS") or INSTRUCTIONS[0]
    if named not in INSTRUCTIONS:
        known = f"{', '.join(INSTRUCTIONS[:-1])} or {INSTRUCTIONS[-1]}"
        raise ValueError(f"GLAX_CPU_INSTRUCTIONS must be {known}, got {named!r}: set one of these, or unset it")


def missing() -> str | None:
    """Return the reason why native kernels cannot run here, or None. Raise ValueError for an unknown GLAX_CPU_INSTRUCTIONS."""
    check_instructions()
    found = load_library()
    return found if isinstance(found, str) else None


def delta_missing() -> str | None:
    """Return the reason why the kernels of the delta rule cannot run here, or None. A library of an earlier version has no such
    kernels."""
    found = missing()
    if found is None and not all(hasattr(load_library(), name) for name in DELTA_TARGETS):
        return "its library was built before it had kernels of the delta rule: install glax again"
    return found
