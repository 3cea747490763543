"""Load the library that launches CUDA programs, which is built when glax is installed with a C++ compiler."""

import ctypes
import functools
from pathlib import Path

import jax

from glax._src.kernels.common.library import load_built

TARGET = "glax_cuda_launch"


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """Load the library and register its handler with XLA, or return the reason why it is missing and the remedy."""
    return load_built(Path(__file__).parent, "_launch", register)


def register(library: ctypes.CDLL):
    """Register the handler that launches CUDA programs, and the one that loads them, with XLA as TARGET."""
    stages = dict(initialize=library.glax_cuda_load, execute=library.glax_cuda_launch)
    handlers = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
    jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA")
