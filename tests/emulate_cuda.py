"""Run device/*.cu on the host: compiled by the C++ compiler behind emulate_cuda.h, called by jax.pure_callback."""

import ctypes
import functools
import hashlib
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.kernels.cuda.images import DEVICE, HEADERS

HEADER = pathlib.Path(__file__).with_name("emulate_cuda.h")
# Calls a kernel, whose arguments are pointers, then numbers.
RUN = """
template <typename A>
A next_argument(void**& x, int*& numbers) {{
  if constexpr (std::is_pointer_v<A>) return static_cast<A>(*x++);
  else return *numbers++;
}}
template <typename... A>
void run_kernel(void (*kernel)(A...), int blocks, int threads, void** x, int* numbers) {{
  const std::tuple<A...> given{{next_argument<A>(x, numbers)...}};
  run_blocks(blocks, threads, [=] {{ std::apply(kernel, given); }});
}}
extern "C" void run(int blocks, int threads, void** x, int* numbers) {{ run_kernel({kernel}, blocks, threads, x, numbers); }}
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
def compiled(kernel: str, constants: tuple[tuple[str, int], ...], folder: pathlib.Path) -> ctypes.CDLL:
    lines = [f'#include "{precompiled(folder)}"', *(f"constexpr int {name} = {value};" for name, value in constants)]
    lines += [(DEVICE / name).read_text() for name in (*HEADERS, f"{kernel}.cu") if name != "half.cuh"]
    source = "\n".join(lines) + RUN.format(kernel=kernel)
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cc"
    path.write_text(source)
    subprocess.run(["g++", *FLAGS, "-shared", str(path), "-o", str(path.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


def emulated(folder: pathlib.Path):
    """Return what takes the place of `scan.launch_kernel`."""

    def launch_kernel(kernel, constants, blocks, threads, operands, results, numbers, aliases=None):
        library = compiled(kernel, tuple(constants.items()), folder)
        absent = [x is None for x in operands]
        operands = [jnp.zeros(0, jnp.float32) if x is None else x for x in operands]

        def run(*arrays):
            arrays = [np.array(x) for x in arrays]
            # Every result starts as NaN, or for one in place as its operand.
            outputs = [
                arrays[placed[i]] if i in placed else np.full(x.shape, np.nan, x.dtype) for i, x in enumerate(results)
            ]
            pointers = [None if none else x.ctypes.data for none, x in zip(absent, arrays, strict=True)]
            pointers += [x.ctypes.data for x in outputs]
            given = (ctypes.c_void_p * len(pointers))(*pointers)
            library.run(blocks, threads, given, (ctypes.c_int * len(numbers))(*numbers))
            return outputs

        placed = {output: operand for operand, output in (aliases or {}).items()}
        return jax.pure_callback(run, results, *operands)

    return launch_kernel
