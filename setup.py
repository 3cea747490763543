"""Build the native CPU kernels. Without a C++ compiler glax still installs and reports the reason at run time."""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("glax/_src/kernels/cpu")
REASON = FOLDER / "build_failure.txt"  # read by glax/_src/kernels/cpu/library.py
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra"]


class BuildNative(build_ext):
    def run(self):
        reason = Path(self.build_lib, REASON) if not self.inplace else REASON
        reason.unlink(missing_ok=True)
        try:
            found = importlib.util.find_spec("jaxlib")
            if found is None:
                raise FileNotFoundError("jaxlib, whose headers it needs, is not installed")
            headers = Path(found.submodule_search_locations[0], "include")
            for extension in self.extensions:
                extension.extra_compile_args += ["-isystem", str(headers)]
            super().run()
        except Exception as error:  # glax works without its native kernels, so no compiler failure may stop the install
            text = str(error).strip() or type(error).__name__
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{text}\n")
            print(f"glax: the native CPU kernels were not built: {text}", file=sys.stderr)

    def copy_extensions_to_source(self):
        built = [Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(x.name))) for x in self.extensions]
        if all(path.exists() for path in built):
            super().copy_extensions_to_source()

    def build_extensions(self):
        # Each instruction set is a file of its own: compile them in parallel.
        self.parallel = os.cpu_count()
        super().build_extensions()


native = Extension(
    "glax._src.kernels.cpu._native",
    sources=[str(FOLDER / "native" / f"{name}.cc") for name in ("baseline", "avx2", "avx512", "handlers")],
    depends=[str(path) for path in sorted((FOLDER / "native").glob("*.h"))],
    extra_compile_args=FLAGS,
    language="c++",
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
