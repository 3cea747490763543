"""Register the kernels. Each platform has a folder: `cpu` is platform "cpp", and "pallas" has a folder for GPUs and one for
TPUs.

Importing a folder registers its kernels. This happens at the first call.
"""

import functools
import importlib

import jax

MODULES = (
    "glax._src.kernels.xla",
    "glax._src.kernels.cpu.recurrent",
    "glax._src.kernels.triton",
    "glax._src.kernels.cuda",
    "glax._src.kernels.pallas_tpu",
    "glax._src.kernels.pallas_gpu",
)


@functools.cache
def load_kernels():
    for module in MODULES:
        importlib.import_module(module)


def import_pallas():
    """Import what adds options to the cache key of jax.jit, from JAX 0.11 on: Pallas, and the fuser that Pallas for TPUs imports.

    If a first call inside a jitted function imported them, JAX would trace and compile this function a second time.
    """
    if jax.__version_info__ >= (0, 11):
        importlib.import_module("jax.experimental.pallas")
        importlib.import_module("jax.experimental.pallas.fuser")
