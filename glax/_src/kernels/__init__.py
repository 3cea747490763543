"""Register the kernels. Each platform has a folder: `cpu` is platform "cpp", and "pallas" has a folder for GPUs and one for
TPUs.

Importing a folder registers its kernels. This happens at the first call.
"""

import functools
import importlib

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
