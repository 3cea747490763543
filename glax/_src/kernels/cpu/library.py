"""Load the library of native kernels, which is built when glax is installed with a C++ compiler."""

import ctypes
import functools
import os
from pathlib import Path

import jax

from glax._src.kernels.common.library import REMEDY, load_built

FOLDER = Path(__file__).parent
INSTRUCTIONS = ("avx512", "avx2", "baseline")
INTERFACE = 4  # of the handlers in native/handlers.cc
TARGETS = (
    "glax_forward", "glax_gradient", "glax_step", "glax_tokens", "glax_replay",
    "glax_delta_forward", "glax_delta_gradient", "glax_delta_step",
    "glax_selective_forward", "glax_selective_gradient", "glax_selective_step",
)  # fmt: skip


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """Load the library and register its kernels with XLA, or return the reason why it is missing and the remedy."""
    return load_built(FOLDER, "_native", register)


def register(library: ctypes.CDLL):
    """Register the kernels that the library has with XLA. Raises ValueError if the library has handlers of another version."""
    if (built := library.glax_interface()) != INTERFACE:
        raise ValueError(f"it has the handlers of version {built}, this version of glax calls those of {INTERFACE}")
    # The interface does not change when a handler is added, so an older library may lack some: see `missing`.
    for name in filter(functools.partial(hasattr, library), TARGETS):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.glax_instructions.restype = ctypes.c_char_p


def check_instructions():
    """Raise ValueError unless the variable GLAX_CPU_INSTRUCTIONS is unset, or is one of INSTRUCTIONS: the widest instructions
    that kernels may use."""
    named = os.environ.get("GLAX_CPU_INSTRUCTIONS") or INSTRUCTIONS[0]
    if named not in INSTRUCTIONS:
        known = f"{', '.join(INSTRUCTIONS[:-1])} or {INSTRUCTIONS[-1]}"
        raise ValueError(f"GLAX_CPU_INSTRUCTIONS must be {known}, got {named!r}: set one of these, or unset it")


def missing(target: str = TARGETS[0]) -> str | None:
    """Return the reason why the native kernel with the handler `target` cannot run here, or None. Raises ValueError for an
    unknown GLAX_CPU_INSTRUCTIONS."""
    check_instructions()
    found = load_library()
    if isinstance(found, str):
        return found
    if not hasattr(found, target):
        return f"its library is of an earlier version of glax, without {target}: {REMEDY}"
    return None
