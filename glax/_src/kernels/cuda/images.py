"""Compile CUDA programs once, and store their machine code on disk beside the measurements of the tuner."""

import dataclasses
import functools
import hashlib
from pathlib import Path, PurePath

from glax._src.kernels.common.stored import Code
from glax._src.kernels.cuda.nvrtc import Compiler, load_compiler

DEVICE = Path(__file__).parent / "device"
HEADERS = ("half.cuh", "values.cuh", "decay.cuh", "block.cuh")  # of every kernel, in this order
PROGRAMS = Code("CUDA program", b"glax cuda image 1\n")


@dataclasses.dataclass(frozen=True)
class Image:
    """Hold machine code and its key: a digest of the source, the architecture and the compiler's version."""

    key: str
    code: bytes


@functools.cache
def device_source(kernel: str) -> str:
    """Return the text of all headers and of device/<kernel>.cu."""
    return "\n".join((DEVICE / name).read_text() for name in (*HEADERS, f"{kernel}.cu"))


@functools.cache
def image_of(kernel: str, constants: tuple[tuple[str, int], ...], architecture: str) -> Image:
    """Return the program of device/<kernel>.cu with these constants for an architecture such as "sm_90". constants: (name,
    value) pairs.

    Stored code is used if its digest is right and nobody else can have written it. Damaged code is compiled again and replaced.
    A folder that cannot be written, and a file that is not trusted, give a warning. Raises CompileError if NVRTC rejects the
    program, and RuntimeError if there is no NVRTC.
    """
    compiler = load_compiler()
    if not isinstance(compiler, Compiler):
        raise RuntimeError(f"the CUDA kernels: {compiler}")
    source = program_text(kernel, constants)
    version = ".".join(map(str, compiler.version))
    key = hashlib.sha256(f"{source}\n{architecture}\n{version}".encode()).hexdigest()[:32]
    path = PurePath("cuda", f"{architecture}-nvrtc{version}", f"{key}.cubin")
    return Image(key, PROGRAMS.made_once(path, lambda: compiler.cubin(source, options(architecture))[0]))


def program_text(kernel: str, constants: tuple[tuple[str, int], ...]) -> str:
    """Return the source of a program: the constants, by name, as constexpr int, and then the text of `device_source`."""
    lines = (f"constexpr int {name} = {value};\n" for name, value in constants)
    return "".join(lines) + device_source(kernel)


def options(architecture: str) -> list[str]:
    """Return NVRTC's options for an architecture such as "sm_90"."""
    return [f"--gpu-architecture={architecture}", "-std=c++17"]
