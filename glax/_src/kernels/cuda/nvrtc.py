"""Compile CUDA C++ for a GPU by NVRTC, the compiler that comes with `jax[cuda12]` and `jax[cuda13]`. NVRTC needs no GPU."""

import ctypes
import ctypes.util
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

REMEDY = 'pip install "jax[cuda13]" or nvidia-cuda-nvrtc'


class CompileError(RuntimeError):
    """Say that NVRTC rejected a program. The message has its log."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Represent a loaded NVRTC. version: its version, such as (13, 0)."""

    library: ctypes.CDLL
    version: tuple[int, int]

    def check(self, status: int, log: str = ""):
        """Raise CompileError with the error's name and the log if NVRTC's `status` is not 0."""
        if status:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            name = self.library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"NVRTC {'.'.join(map(str, self.version))}: {name}\n{log}".strip())

    def cubin(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Compile CUDA C++ and return (the machine code, NVRTC's log). options: of NVRTC's command line. Raises CompileError
        with the log."""
        program, nvrtc = ctypes.c_void_p(), self.library
        self.check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"glax.cu", 0, None, None))
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = nvrtc.nvrtcCompileProgram(program, len(options), given)
            log = self.read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode()
            self.check(status, log)
            return self.read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def read(self, program, size_of, read) -> bytes:
        """Return bytes of a program. size_of, read: the functions of NVRTC that give their number and copy them."""
        size = ctypes.c_size_t()
        self.check(size_of(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self.check(read(program, content))
        return content.raw


@functools.cache
def load_compiler() -> Compiler | str:
    """Load the newest NVRTC that is installed, or return the reason why there is none, and the remedy."""
    failures = []
    for path in candidates():
        try:
            builtins = sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if "/" in path else []
            for each in builtins:  # NVRTC opens it by name, from a folder that the loader does not search
                ctypes.CDLL(str(each))
            library = ctypes.CDLL(path)
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            return Compiler(library, (major.value, minor.value))
        except (OSError, AttributeError) as error:
            failures.append(f"{path}: {error}")
    why = "; ".join(failures) or "its library was not found"
    return f"needs NVRTC, CUDA's compiler at run time ({why}): {REMEDY}"


def candidates() -> Iterator[str]:
    """Yield paths of NVRTC: first those of NVIDIA's wheels, the newest first, then the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    yield from map(str, sorted(found, key=lambda path: version_in(path.name), reverse=True))
    if system := ctypes.util.find_library("nvrtc"):
        yield system
    yield from map(str, sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so"), reverse=True))


def version_in(name: str) -> tuple[int, ...]:
    """Return the numbers in the name of a library, as a key by which names are sorted by version."""
    return tuple(map(int, re.findall(r"\d+", name)))
