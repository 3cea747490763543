"""The platforms. Each is a folder; importing it registers its kernels, which happens at the first call."""

import functools
import importlib

MODULES = (
    "glax.kernels.xla",
    "glax.kernels.cpu.recurrent",
    "glax.kernels.triton",
    "glax.kernels.pallas_tpu",
    "glax.kernels.pallas_gpu",
)


@functools.cache
def load_kernels():
    for module in MODULES:
        importlib.import_module(module)
