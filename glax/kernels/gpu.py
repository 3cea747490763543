"""What the kernels of all GPU platforms ask about the machine, and the threads that compile them."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import jax


def multiprocessors() -> int:
    """Of the GPU that JAX computes on; an H100's where there is none, for compiling ahead of time."""
    return getattr(jax.local_devices()[0], "core_count", None) or 132


@functools.cache
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="glax_compiles")
