"""What the kernels of all GPU platforms ask about the machine, and the threads that compile them."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

from glax._src.core.backend import local_device


def multiprocessors() -> int:
    """Of the GPU that kernels are chosen for; an H100's where there is none, for compiling ahead of time."""
    return getattr(local_device(), "core_count", None) or 132


@functools.cache
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="glax_compiles")
