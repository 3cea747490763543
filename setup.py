"""Build the libraries of C++: native CPU kernels, and the launcher of CUDA programs.

Without a C++ compiler glax still installs, as a wheel for any platform, and says so on the terminal and at run time.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("glax/_src/kernels")
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra"]
# They change what sums and exponentials give, and linked with them a library leaves denormal numbers at 0 in the whole process.
INEXACT = {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-freciprocal-math",
           "-ffinite-math-only", "/fp:fast"}  # fmt: skip


def folder_of(extension: Extension) -> Path:
    return Path(*extension.name.split(".")[:-1])


class BuildNative(build_ext):
    """Build each library by itself: one that fails leaves build_failure.txt, which kernels/common/library.py reads."""

    def run(self):
        self.failed: list[str] = []
        self.in_source = self.inplace  # setuptools builds elsewhere first, and copies what was built
        for extension in self.extensions:
            self.reason(extension).unlink(missing_ok=True)
        try:
            found = importlib.util.find_spec("jaxlib")
            if found is None:
                raise FileNotFoundError("jaxlib, whose headers it needs, is not installed")
            headers = Path(found.submodule_search_locations[0], "include")
            for extension in self.extensions:
                extension.extra_compile_args += ["-isystem", str(headers)]
            super().run()
        except Exception as error:  # glax works without these libraries, so no compiler failure may stop the install
            for extension in self.extensions:
                self.fail(extension, error)

    def build_extension(self, extension: Extension):
        try:
            super().build_extension(extension)
        except Exception as error:
            self.fail(extension, error)

    def reason(self, extension: Extension) -> Path:
        path = folder_of(extension) / "build_failure.txt"
        return path if self.in_source else Path(self.build_lib, path)

    def fail(self, extension: Extension, error: Exception):
        text = (
            re.sub(r"Command '\['([^']+)',.*\]' returned", r"\1 returned", str(error).strip()) or type(error).__name__
        )
        path = self.reason(extension)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        self.failed.append(extension.name)
        tell(f"glax: {extension.name} was not built: {text}")

    def get_ext_filename(self, fullname: str) -> str:
        """Name a library without Python's version: it holds no symbols of Python, and one serves all."""
        return f"{Path(*fullname.split('.'))}.so"

    def get_outputs(self) -> list[str]:
        """Return the libraries that were built: setuptools would name those that were not, too."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self):
        """Replace each library in one step: other environments share the file, and may be loading it."""
        for extension in self.extensions:
            path = Path(self.get_ext_filename(extension.name))
            if (built := Path(self.build_lib, path)).exists():
                shutil.copy2(built, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)

    def build_extensions(self):
        if inexact := sorted(INEXACT & flags_of(self.compiler)):
            raise ValueError(
                f"{' '.join(inexact)} gives other numbers: leave it out of CFLAGS, CXXFLAGS, LDFLAGS and CC"
            )
        # Each instruction set is a file of its own: compile them in parallel.
        self.parallel = os.cpu_count()
        super().build_extensions()


class Wheel(bdist_wheel):
    """Name a wheel as one for all Pythons of a platform; without libraries of C++, of any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform

    def run(self):
        self.run_command("build_ext")
        if len(self.get_finalized_command("build_ext").failed) == len(self.distribution.ext_modules):
            self.root_is_pure, self.distribution.ext_modules = True, []
            tell("glax: the wheel has no native kernels, so it is for any platform: XLA's kernels run in their place")
        super().run()


def flags_of(compiler) -> set[str]:
    """Return all words of a compiler's commands."""
    named = ("compiler", "compiler_so", "compiler_cxx", "compiler_so_cxx", "linker_so", "linker_so_cxx")
    return {word for name in named for word in getattr(compiler, name, None) or ()}


def tell(text: str):
    """Print to standard error, which pip shows under -v alone, and to the terminal, if there is one."""
    print(text, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(text, file=terminal)


def extension(name: str, sources: list[Path]) -> Extension:
    headers = [str(path) for path in sorted(sources[0].parent.glob("*.h"))]
    return Extension(name, list(map(str, sources)), depends=headers, extra_compile_args=FLAGS, language="c++")


native = [KERNELS / "cpu" / "native" / f"{name}.cc" for name in ("baseline", "avx2", "avx512", "handlers")]
launch = [KERNELS / "cuda" / "host" / "launch.cc"]
setup(
    ext_modules=[
        extension("glax._src.kernels.cpu._native", native),
        extension("glax._src.kernels.cuda._launch", launch),
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
