"""Run device/scan.cu on the host: compiled by the C++ compiler behind emulate_cuda.h, called by jax.pure_callback."""

import ctypes
import functools
import hashlib
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.kernels.cuda import scan
from glax._src.kernels.cuda.images import DEVICE, SOURCES

HEADER = pathlib.Path(__file__).with_name("emulate_cuda.h")
RUN = """
extern "C" void run(int blocks, int threads, void** x, int T, int N) {
  run_blocks(blocks, threads, [=] {
    scan(x[0], x[1], x[2], x[3], x[4], x[5], static_cast<float*>(x[6]), static_cast<float*>(x[7]), x[8], x[9], x[10],
         static_cast<int*>(x[11]), static_cast<int*>(x[12]), x[13], x[14], x[15], T, N);
  });
}
"""


FLAGS = ["-std=c++20", "-O0", "-w", "-fPIC", "-pthread"]


@functools.cache
def precompiled(folder: pathlib.Path) -> pathlib.Path:
    """Compile the header once for all programs in the folder: it takes longer than what follows it."""
    header = folder / HEADER.name
    header.write_text(HEADER.read_text())
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return header


@functools.cache
def compiled(constants: tuple[tuple[str, int], ...], folder: pathlib.Path) -> ctypes.CDLL:
    lines = [f'#include "{precompiled(folder)}"', *(f"constexpr int {name} = {value};" for name, value in constants)]
    lines += [(DEVICE / name).read_text() for name in SOURCES if name != "half.cuh"]
    source = "\n".join(lines) + RUN
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cc"
    path.write_text(source)
    subprocess.run(["g++", *FLAGS, "-shared", str(path), "-o", str(path.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


def emulated(folder: pathlib.Path):
    """Return what takes the place of `scan.launch`."""

    def launch(r, config, operands, results, flags, aliases=None):
        constants, blocks = scan.plan(r, config, flags)
        library = compiled(tuple(constants.items()), folder)
        absent = [x is None for x in operands]
        operands = [jnp.zeros(0, jnp.float32) if x is None else x for x in operands]

        def run(*arrays):
            arrays = [np.array(x) for x in arrays]
            # Every result starts as NaN, or for one in place as its operand.
            outputs = [np.full(x.shape, np.nan, x.dtype) for x in results]
            for operand, output in (aliases or {}).items():
                outputs[output] = arrays[operand]
            pointers = [None if none else x.ctypes.data for none, x in zip(absent, arrays, strict=True)]
            pointers += [x.ctypes.data for x in outputs]
            given = (ctypes.c_void_p * len(pointers))(*pointers)
            library.run(blocks, config.threads, given, r.q.shape[1], r.num_sequences)
            return outputs

        return jax.pure_callback(run, results, *operands)

    return launch
