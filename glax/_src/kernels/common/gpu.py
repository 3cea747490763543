"""What the kernels of all GPU platforms ask about the machine, the threads that compile them, and the library that they load."""

import functools
import importlib.util
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

from glax._src.core.backend import local_device


def multiprocessors() -> int:
    """Of the GPU that kernels are chosen for; an H100's where there is none, for compiling ahead of time."""
    return getattr(local_device(), "core_count", None) or 132


@functools.cache
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="glax_compiles")


def locate_mosaic_runtime():
    """Tell XLA where the library lies that programs with Pallas Mosaic GPU kernels load.

    JAX does the same when it imports Pallas Mosaic GPU. A process that reads such a program back imports none of that.
    """
    for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        found = importlib.util.find_spec(plugin)
        for folder in () if found is None else found.submodule_search_locations or ():
            library = pathlib.Path(folder, "libmosaic_gpu_runtime.so")
            if library.exists():
                os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))
