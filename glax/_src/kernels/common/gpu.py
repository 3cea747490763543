"""Serve the kernels of all GPU platforms: the number of multiprocessors, and the runtime library of Pallas Mosaic GPU."""

import functools
import importlib.util
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

from glax._src.core.backend import local_device
from glax._src.core.known_miscompiles import numbers


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU that kernels are chosen for. Without a GPU, return an H100's, for
    compiling ahead of time."""
    return getattr(local_device(), "core_count", None) or 132


def found_capability() -> str | None:
    """Return the compute capability of the GPU that kernels are chosen for, as text such as "9.0", or None without a GPU."""
    found = getattr(local_device(), "compute_capability", None)
    return None if found is None else str(found)


def capability() -> tuple[int, ...]:
    """Return the compute capability of the GPU that kernels are chosen for, such as (9, 0). Without a GPU, return an H100's,
    (9, 0)."""
    return numbers(found_capability() or "9.0")


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return the pool of threads, one for each CPU, in which kernels are compiled. The process has one pool."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="glax_compiles")


def locate_mosaic_runtime():
    """Set MOSAIC_GPU_RUNTIME_LIB_PATH, where XLA finds the library that programs with Pallas Mosaic GPU kernels load.

    The variable is not changed if it is set, or if no CUDA plugin of JAX has the library. JAX sets it when it imports Pallas
    Mosaic GPU. A process that loads such a program from a cache does not import that module.
    """
    for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        found = importlib.util.find_spec(plugin)
        for folder in () if found is None else found.submodule_search_locations or ():
            library = pathlib.Path(folder, "libmosaic_gpu_runtime.so")
            if library.exists():
                os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))
